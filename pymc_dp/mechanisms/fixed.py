"""A sum over the records that is the same in every iteration: made once, released with fresh noise.

The exact sum is private.  It is kept by the process that made it for one chain, in integers; it is
never part of a pickle, and nothing but its noisy versions is handed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_dp.clipping import (
    Grid,
    Neighboring,
    clip_norm_sum,
    clip_to_box,
    nonnegative_bound,
    vector_bound,
)
from pymc_dp.errors import PrivacyError
from pymc_dp.mechanisms.oneoff import checked, described
from pymc_dp.mechanisms.queries import Queries
from pymc_dp.noise import rounded_normal
from pymc_dp.rows.contributions import Statistic
from pymc_dp.rows.engine import Engine

__all__ = ["FixedSum", "StatisticQueries"]

#: A unit outside of this, its inverse, or 2^63 of it, would lose accuracy or overflow.
_SMALLEST_UNIT, _LARGEST_UNIT = 2.0**-900, 2.0**900
#: Relative room for the rounding errors of a statistic whose norm is just its bound.
_ROOM = 1.0 + 2.0**-40


@dataclass(frozen=True, eq=False)
class FixedSum:
    """The sum over all units of their statistics.

    Attributes
    ----------
    spec : Statistic
    grid : Grid
    neighboring : {"replace_one", "add_or_remove_one"}

    Raises
    ------
    PrivacyError
        If the bound of `spec` is not of a size that floats can divide by, or the grid too coarse.

    Notes
    -----
    *Guarantee.*  (1 / grid.noise_multiplier)-GDP with respect to one unit.  A unit adds an integer
    vector of norm at most B (:func:`pymc_dp.clipping.clip_norm_sum`), so integer sums of neighbours
    differ by B if one is added or removed, by 2 B if one is replaced, and by 2^(1/2) B if no entry
    is negative (:func:`pymc_dp.clipping.nonnegative_bound`); B is chosen such that this is
    ``grid.sensitivity``.

    The size of a unit of the grid is chosen such that a vector as long as its bound is rounded and
    not scaled: what is summed is the statistic, to half a unit per record and entry.
    """

    spec: Statistic
    grid: Grid
    neighboring: Neighboring

    def __post_init__(self) -> None:
        if not _SMALLEST_UNIT < self.unit < _LARGEST_UNIT:
            raise PrivacyError(f"A bound of {self.spec.norm:g} on a statistic is not usable.")

    @property
    def bound(self) -> float:
        """Norm bound of a vector before it is rounded, in units of the grid."""
        if self.neighboring == "replace_one" and self.spec.nonnegative:
            return vector_bound(nonnegative_bound(self.grid.sensitivity), self.spec.size)
        return vector_bound(self.grid.norm_bound(self.neighboring), self.spec.size)

    @property
    def unit(self) -> float:
        """Size of a unit of the grid."""
        return self.spec.norm * _ROOM / self.bound

    @property
    def noise_sd(self) -> float:
        """Standard deviation of the noise on each entry."""
        return 2.0**self.grid.log2_sigma * self.unit

    def request(self) -> dict[str, Any]:
        """What is asked for, as JSON."""
        return {"release": "statistic", "clip_norm": self.spec.norm, **described(self.spec)}

    def total(self, engine: Engine) -> np.ndarray:
        """(size,) int64, exact: private."""
        inverse_unit, bound = 1.0 / self.unit, self.bound
        total = np.zeros(self.spec.size, dtype=np.int64)
        for block in checked(engine, self.spec):
            if self.spec.boxed:
                clip_to_box(block, -1.0, 1.0)
            if self.spec.nonnegative:
                clip_to_box(block, 0.0, np.inf)
            clip_norm_sum(block, inverse_unit, bound, total, np.empty(block.shape[1]))
        return total

    def noisy(self, total: np.ndarray) -> np.ndarray:
        """(size,) the sum with fresh noise, in natural units."""
        # in 64 bits, like the sum itself: if one wraps, both do, and wrapping is post-processing
        noisy: np.ndarray = total + rounded_normal(len(total), self.grid.log2_sigma)
        return noisy * self.unit

    def evaluate(self, engine: Engine) -> np.ndarray:
        """(size,) noisy sum."""
        return self.noisy(self.total(engine))


class StatisticQueries(Queries):
    """Noisy sums of a statistic of the records of one model, for one chain.

    Parameters
    ----------
    spec : Statistic
    **settings
        The arguments of `Queries`, with the mechanism "statistic".

    Notes
    -----
    *Guarantee.*  Each answer is (1 / noise_multiplier)-GDP with respect to one unit, given all
    earlier ones: its noise is its own.  Records are read at the first answer of a chain, after it
    was paid for, and not again.
    """

    def __init__(self, spec: Statistic, **settings: Any) -> None:
        super().__init__(**settings)
        self.sum = FixedSum(spec, self.grids["statistic"], self.neighboring)
        self._total: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_total": None}

    def compile(self) -> None:
        """Compile all that a query runs, on made-up data: forked chains inherit the code."""
        self.sum.evaluate(self.engine.synthetic())

    def begin_chain(self) -> None:
        """Register a chain, and forget the sum of an earlier one."""
        self._total = None
        super().begin_chain()

    def statistic(self) -> tuple[np.ndarray, float]:
        """Noisy sum of the statistics of all units.

        Returns
        -------
        value : (size,) ndarray
            sum_i S_i + N(0, noise_sd^2 I), the noise fresh at every call.
        noise_sd : float
        """
        self._use("statistic")
        with np.errstate(all="ignore"):  # a warning would tell of an extreme record
            if self._total is None:
                self._total = self.sum.total(self.engine)
            return self.sum.noisy(self._total), self.sum.noise_sd
