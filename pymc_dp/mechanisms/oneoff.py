"""The two mechanisms of one-off releases: a histogram of norms, and a sum of clipped vectors.

They read records and are told nothing about payment: :mod:`pymc_dp.mechanisms.preparation` calls
:meth:`evaluate` after the charge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_dp.clipping import Grid, Neighboring, clip_norm_sum, count_norms, vector_bound
from pymc_dp.errors import PrivacyError
from pymc_dp.noise import rounded_normal
from pymc_dp.rows.contributions import Contribution, blocks
from pymc_dp.rows.engine import Engine

__all__ = ["EDGES", "ClippedSum", "NormHistogram", "checked", "described"]

#: Ends of the bins of a histogram of norms: steps of 2^(1/4) from 2^-60 to 2^60, and the rest.
EDGES = np.concatenate([[0.0], 2.0 ** (np.arange(-240, 241) / 4.0), [math.inf]])
#: A unit outside of this, its inverse, or 2^63 of it, would lose accuracy or overflow.
_SMALLEST_UNIT, _LARGEST_UNIT = 2.0**-900, 2.0**900


@dataclass(frozen=True, eq=False)
class NormHistogram:
    """Counts of all units in bins of the l2 norm of their contributions.

    Attributes
    ----------
    spec : Contribution
    grid : Grid
    neighboring : {"replace_one", "add_or_remove_one"}

    Notes
    -----
    *Guarantee.*  (1 / grid.noise_multiplier)-GDP with respect to one unit.  Each unit counts once
    in one bin, so replacing one moves the counts by sqrt(2) in l2 norm, and adding or removing one
    by 1; a count is ``Grid.count_unit`` units of the grid, an integer, so the bound holds exactly.
    """

    spec: Contribution
    grid: Grid
    neighboring: Neighboring

    def __post_init__(self) -> None:
        self.grid.count_unit(self.neighboring)  # refuse a grid that is too coarse

    @property
    def noise_sd(self) -> float:
        """Standard deviation of the noise on each count."""
        return 2.0**self.grid.log2_sigma / self.grid.count_unit(self.neighboring)

    def request(self) -> dict[str, Any]:
        """What is asked for, as JSON."""
        return {"release": "histogram", **described(self.spec)}

    def evaluate(self, engine: Engine) -> np.ndarray:
        """(k,) noisy counts."""
        size = self.grid.count_unit(self.neighboring)
        counts = np.zeros(len(EDGES) - 1, dtype=np.int64)
        for block in checked(engine, self.spec):
            count_norms(block, EDGES[1:-1] ** 2, counts)
        # in 64 bits, as is the noise: if one wraps, both do, and wrapping is post-processing
        counts *= size
        counts += rounded_normal(len(counts), self.grid.log2_sigma)
        return counts / size


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """The sum over all units of their contributions, clipped to an l2 norm.

    Attributes
    ----------
    spec : Contribution
    clip_norm : float
        Public, or a function of earlier releases.
    grid : Grid
    neighboring : {"replace_one", "add_or_remove_one"}

    Raises
    ------
    PrivacyError
        If `clip_norm` is not positive and of a size that floats can divide by.

    Notes
    -----
    *Guarantee.*  (1 / grid.noise_multiplier)-GDP with respect to one unit: the integer sums of
    neighbours differ by ``grid.sensitivity`` at most (:func:`pymc_dp.clipping.clip_norm_sum`).
    """

    spec: Contribution
    clip_norm: float
    grid: Grid
    neighboring: Neighboring

    def __post_init__(self) -> None:
        vector_bound(self.grid.norm_bound(self.neighboring), self.spec.size)
        if not _SMALLEST_UNIT < self.grid.unit(self.sensitivity) < _LARGEST_UNIT:
            raise PrivacyError(f"clip_norm={self.clip_norm:g} is not a usable bound.")

    @property
    def sensitivity(self) -> float:
        """l2 sensitivity in natural units."""
        return 2.0 * self.clip_norm if self.neighboring == "replace_one" else self.clip_norm

    @property
    def noise_sd(self) -> float:
        """Standard deviation of the noise on each entry."""
        return self.grid.noise_multiplier * self.sensitivity

    def request(self) -> dict[str, Any]:
        """What is asked for, as JSON."""
        return {"release": "vector_sum", "clip_norm": self.clip_norm, **described(self.spec)}

    def evaluate(self, engine: Engine) -> np.ndarray:
        """(size,) noisy sum."""
        unit = self.grid.unit(self.sensitivity)
        bound = vector_bound(self.grid.norm_bound(self.neighboring), self.spec.size)
        total = np.zeros(self.spec.size, dtype=np.int64)
        for block in checked(engine, self.spec):
            clip_norm_sum(block, 1.0 / unit, bound, total, np.empty(block.shape[1]))
        total += rounded_normal(self.spec.size, self.grid.log2_sigma)
        return total * unit


def described(spec: Contribution) -> dict[str, Any]:
    """What is summed, as JSON."""
    return {"of": type(spec).__name__, "size": spec.size}


def checked(engine: Engine, spec: Contribution) -> Iterator[np.ndarray]:
    """Blocks in which every unit stands exactly once, with as many entries as announced."""
    seen = 0
    for where, block in blocks(engine, spec):
        if where.start != seen or block.shape != (spec.size, where.stop - where.start):
            raise PrivacyError("A unit was about to contribute twice, or with other entries.")
        seen = where.stop
        yield block
    if seen != engine.n_units:
        raise PrivacyError("Not all units were about to contribute.")
