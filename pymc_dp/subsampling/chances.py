"""The random numbers of one iteration of HMC-ECS, drawn before its compiled loops run.

Numba needs 17 microseconds to take a generator, as long as it needs for a whole iteration with a
small sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

#: Mini-batches of one product, at most: a Poisson(1) variable exceeds it with probability 1e-14.
MOST_BATCHES = 16


class Chances(NamedTuple):
    """What an iteration leaves to chance."""

    momentum: ndarray  # (d,) a draw from N(0, mass matrix), which is overwritten
    block: int  # the block of the sample, or the product, that is offered other records
    records: ndarray  # (k,) int64, these records
    uniforms: ndarray  # (2,) for the accept tests of the records and of the trajectory


def perturbed_chances(
    rng: np.random.Generator, mass_root: ndarray, n: int, blocks: int, size: int
) -> Chances:
    """Chances of a sample of `blocks` blocks of `size` of n records.

    ``mass_root @ mass_root.T`` is the mass matrix.
    """
    momentum = mass_root @ rng.standard_normal(len(mass_root))
    block, records = rng.integers(blocks), rng.integers(0, n, size)
    return Chances(momentum, int(block), records, rng.random(2))


def signed_chances(
    rng: np.random.Generator, mass_root: ndarray, n: int, products: int, batch: int
) -> Chances:
    """Chances of `products` products of Poisson(1) many mini-batches of `batch` of n records."""
    size = batch * min(int(rng.poisson(1.0)), MOST_BATCHES)
    return perturbed_chances(rng, mass_root, n, products, size)
