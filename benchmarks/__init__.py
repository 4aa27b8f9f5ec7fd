"""How much accuracy a budget buys: models, reference posteriors, and runs of every sampler."""
