"""Records of several owners: each has its own budget, its own ledger and its own noise."""
