"""Mechanisms for one published statistic: a clipped sum with Gaussian, Laplace or geometric noise.

They are handed the rows of all records, and are told nothing about payment:
:mod:`pymc_dp.privatized.making` computes the rows after the charge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from pymc_dp.accounting import mu_from_pure, smallest_noise_multiplier
from pymc_dp.clipping import Grid, Neighboring, clip_l1_sum, clip_norm_sum, vector_bound
from pymc_dp.errors import PrivacyError
from pymc_dp.exact_laplace import discrete_laplace
from pymc_dp.noise import rounded_normal

__all__ = ["GaussianSum", "LaplaceSum", "Neighboring", "StatisticMechanism"]

#: Units of a record's bound on the grid of Laplace noise, at most: 2^30.
_FINEST = 30
#: A unit outside of this would lose accuracy or overflow.
_SMALLEST, _LARGEST = 2.0**-900, 2.0**900
#: Records added in 64 bits at a time.
_BLOCK = 2**16


class StatisticMechanism(Protocol):
    """What a mechanism of one sum tells about itself."""

    @property
    def scale(self) -> float:
        """Scale of the noise, in natural units."""

    @property
    def noise_multiplier(self) -> float:
        """That of a Gaussian mechanism which protects no better: 1 / mu."""

    def evaluate(self, rows: np.ndarray) -> np.ndarray:
        """(m,) noisy sum of (m, n) rows."""


@dataclass(frozen=True)
class GaussianSum:
    """Sum of vectors clipped in l2 norm, with Gaussian noise.

    Attributes
    ----------
    norm : float
        Bound on a record's l2 norm.
    grid : Grid
    neighboring : {"replace_one", "add_or_remove_one"}

    Notes
    -----
    *Guarantee.*  (1 / grid.noise_multiplier)-GDP, exactly: :func:`pymc_dp.clipping.clip_norm_sum`
    and :func:`pymc_dp.noise.rounded_normal`.
    """

    norm: float
    grid: Grid
    neighboring: Neighboring

    def __post_init__(self) -> None:
        if not _SMALLEST < self.grid.unit(self.sensitivity) < _LARGEST:
            raise PrivacyError("A record's bound is too small or too large to compute with.")

    @classmethod
    def costing(
        cls, units: int, norm: float, n_public: int, neighboring: Neighboring
    ) -> GaussianSum:
        """With the least noise that costs at most so many ledger units."""
        grid = Grid.finest(smallest_noise_multiplier(units), n_public)
        return cls(norm, grid, neighboring)

    @property
    def sensitivity(self) -> float:
        """l2 sensitivity in natural units."""
        return 2.0 * self.norm if self.neighboring == "replace_one" else self.norm

    @property
    def scale(self) -> float:
        """Standard deviation of the noise."""
        return self.grid.noise_multiplier * self.sensitivity

    @property
    def noise_multiplier(self) -> float:
        """1 / mu."""
        return self.grid.noise_multiplier

    def evaluate(self, rows: np.ndarray) -> np.ndarray:
        """(m,) noisy sum of (m, n) rows."""
        m, n = rows.shape
        unit = self.grid.unit(self.sensitivity)
        bound = vector_bound(self.grid.norm_bound(self.neighboring), m)
        total = np.zeros(m, dtype=np.int64)
        clip_norm_sum(rows, 1.0 / unit, bound, total, np.empty(n))
        total += rounded_normal(m, self.grid.log2_sigma)
        return total * unit


@dataclass(frozen=True)
class LaplaceSum:
    """Sum of vectors clipped in l1 norm and cut off to a grid, with discrete Laplace noise.

    Attributes
    ----------
    norm : float
        Bound on a record's l1 norm.
    epsilon : float
    n_public : int
        Public number of records, which sets the resolution of the grid.
    neighboring : {"replace_one", "add_or_remove_one"}
    whole : bool
        Whether rows are integers and stay integers: geometric noise.  `norm` is then an integer.
    one_sided : bool
        Whether rows have no negative entries, and none above bounds that add up to `norm`: two of
        them then differ by no more than one of them.

    Notes
    -----
    *Guarantee.*  epsilon-differentially private, exactly: integer sums of neighbours differ by at
    most `sensitivity` units in l1 norm (:func:`pymc_dp.clipping.clip_l1_sum`), and the noise, drawn
    without rounding (:func:`pymc_dp.exact_laplace.discrete_laplace`), has that many units over
    epsilon for its scale.  Hence `noise_multiplier` (:func:`pymc_dp.accounting.mu_from_pure`).
    """

    norm: float
    epsilon: float
    n_public: int
    neighboring: Neighboring
    whole: bool = False
    one_sided: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.bound < 2**40:
            raise PrivacyError("The bound of a record's statistic must be from 1 to 2^40.")
        if not _SMALLEST < self.unit < _LARGEST or not self.scale < 2.0**900:
            raise PrivacyError("A record's bound is too small or too large to compute with.")
        if self.whole and 64.0 * self.scale + float(self.n_public) * self.bound > 2.0**62:
            raise PrivacyError("The noisy count may not fit into 64 bits; raise epsilon.")

    @property
    def bound(self) -> int:
        """Bound on a record's l1 norm, in units."""
        if self.whole:
            return int(self.norm)
        return 2 ** max(1, min(_FINEST, 60 - math.ceil(math.log2(max(self.n_public, 2)))))

    @property
    def unit(self) -> float:
        """Size of one unit."""
        return 1.0 if self.whole else self.norm / self.bound

    @property
    def sensitivity(self) -> int:
        """l1 sensitivity of the integer sum, in units."""
        two_sided = self.neighboring == "replace_one" and not self.one_sided
        return 2 * self.bound if two_sided else self.bound

    @property
    def scale(self) -> float:
        """Scale of the noise."""
        return self.unit * self.sensitivity / self.epsilon

    @property
    def noise_multiplier(self) -> float:
        """1 / mu."""
        return math.nextafter(1.0 / mu_from_pure(self.epsilon), 0.0)

    def evaluate(self, rows: np.ndarray) -> np.ndarray:
        """(m,) noisy sum of (m, n) rows."""
        exact = [0] * len(rows)
        for start in range(0, rows.shape[1], _BLOCK):  # no block passes 62 bits
            part = np.zeros(len(rows), dtype=np.int64)
            block = rows[:, start : start + _BLOCK]
            clip_l1_sum(block, 1.0 / self.unit, np.int64(self.bound), part)
            exact = [a + int(b) for a, b in zip(exact, part, strict=True)]
        noise = discrete_laplace(len(rows), Fraction(self.sensitivity) / Fraction(self.epsilon))
        noisy = [a + u for a, u in zip(exact, noise, strict=True)]
        if self.whole:  # beyond 64 bits never, but for a private number of records far above n
            return np.array([min(max(u, -(2**62)), 2**62) for u in noisy], dtype=np.int64)
        return np.array([u * self.unit for u in noisy])
