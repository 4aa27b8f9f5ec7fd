"""Records that are spread over the workers of a cluster."""
