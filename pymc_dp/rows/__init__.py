"""What one record contributes: compiled per-record log-likelihoods and score factors."""
