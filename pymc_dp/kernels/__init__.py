"""How a chain moves: pure transition kernels that ask noisy questions and never see a record.

A kernel is a function ``transition(rng, state, queries, prior, ...) -> (state, info)``. The info
holds public diagnostics: public settings, public randomness and released answers alone decide it.
"""
