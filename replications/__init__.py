"""Tables and figures of the papers that the samplers come from: their numbers beside ours."""
