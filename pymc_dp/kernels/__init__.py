"""How a chain moves: pure transition kernels that ask noisy questions and never see a record.

A kernel is a function ``transition(rng, state, queries, prior, ...) -> (state, info)``. The state
is carried on. The info holds public diagnostics only: everything in it is computed from public
settings, public randomness and released answers. Kernels depend on NumPy alone.
"""
