"""The only clip-and-sum: from real contributions to an integer sum of exact sensitivity.

A record's contribution is measured in *grid units* (:class:`Grid`), clipped, rounded to integers
and added in int64.  Integer addition is associative, so the sum is the same for any order of
records, any blocking and any number of threads, and the sum of a neighbouring data set differs
from it by exactly the difference of one record's integer contribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from pymc_dp._jit import compiled
from pymc_dp.errors import PrivacyError

__all__ = [
    "Grid",
    "Neighboring",
    "clip_interval_sum",
    "clip_l1_sum",
    "clip_multiples_sum",
    "clip_norm_sum",
    "clip_sparse_sum",
    "clip_to_box",
    "count_norms",
    "nonnegative_bound",
    "vector_bound",
]

Neighboring = Literal["replace_one", "add_or_remove_one"]

#: Vectors of a tile: their entries then stay in the fastest caches.
_TILE = 512
#: Range of m, where one standard deviation of the noise is 2^m grid units.
FINEST, COARSEST = 36, 20


@dataclass(frozen=True, slots=True)
class Grid:
    """The integer grid of one release.

    Attributes
    ----------
    log2_sigma : int
        The noise has standard deviation ``2**log2_sigma`` units: a power of two, so that the
        noise sampler works on integers alone.
    noise_multiplier : float
        tau = standard deviation of the noise / l2 sensitivity.
    """

    log2_sigma: int
    noise_multiplier: float

    @classmethod
    def finest(cls, noise_multiplier: float, n: int) -> Grid:
        """The finest grid on which `n` contributions and the noise fit into 64 bits.

        Parameters
        ----------
        noise_multiplier : float
            tau > 0.
        n : int
            Number of units (records or users) that are summed.

        Raises
        ------
        PrivacyError
            If even the coarsest grid (2^20 units per standard deviation) is too fine.
        """
        for log2_sigma in range(FINEST, COARSEST - 1, -1):
            # a contribution is at most the sensitivity, sigma / tau
            largest = 2.0**log2_sigma / noise_multiplier
            if n * largest + 16.0 * 2.0**log2_sigma < 2.0**62:
                return cls(log2_sigma, noise_multiplier)
        raise PrivacyError(
            f"A sum over {n} units with noise multiplier {noise_multiplier:.3g} does not fit into "
            "64-bit integers. Use a larger noise multiplier (a smaller budget, or more draws)."
        )

    @property
    def sensitivity(self) -> float:
        """Largest l2 change of the integer sum between neighbours, in units: 2^m / tau."""
        return 2.0**self.log2_sigma / self.noise_multiplier

    def unit(self, sensitivity: float) -> float:
        """Size of one unit, for a query of the given real l2 sensitivity."""
        return self.noise_multiplier * sensitivity / 2.0**self.log2_sigma

    def norm_bound(self, neighboring: Neighboring) -> float:
        """Norm bound of one record's integer vector, in units: half the sensitivity if replaced."""
        return self.sensitivity / 2.0 if neighboring == "replace_one" else self.sensitivity

    def count_unit(self, neighboring: Neighboring) -> int:
        """Size of one count of a histogram, in units.

        Each record counts once in one bin.  Replacing it changes two counts by one, an l2 distance
        of sqrt(2); adding or removing it changes one.  The largest integer w with
        ``w * distance <= 2^m / tau`` is found in exact arithmetic.

        Raises
        ------
        PrivacyError
            If the noise is so large that a count is less than one unit.
        """
        squared_distance = 2 if neighboring == "replace_one" else 1
        squared = Fraction(4**self.log2_sigma) / Fraction(self.noise_multiplier) ** 2
        size = math.isqrt(math.floor(squared / squared_distance))
        if size < 1:
            raise PrivacyError(
                "The noise is so large that the integer grid cannot represent a count. Use a "
                "larger budget, or a larger share of it for this histogram."
            )
        return size


def vector_bound(norm_bound: float, d: int) -> float:
    """Norm to which a real d-vector is clipped so that its rounding has norm <= `norm_bound`.

    Rounding moves each entry by at most 1/2, hence the norm by at most sqrt(d)/2; the relative
    slack (d + 8) 2^-53 covers the rounding errors of the norm (d/2 + 2 units in the last place), of
    the quotient and of the products with it.

    Raises
    ------
    PrivacyError
        If the grid is so coarse that nothing is left of the bound.
    """
    bound = (norm_bound - math.sqrt(d) / 2.0) * (1.0 - (d + 8) * 2.0**-53)
    if not bound > 0.0:
        raise PrivacyError(
            "The noise is so large compared with one record that the integer grid cannot "
            "represent a record. Use fewer draws or a larger budget."
        )
    return bound


def nonnegative_bound(sensitivity: float) -> float:
    """Norm bound of vectors without negative entries that gives a sensitivity if one is replaced.

    Two such vectors a, b with |a|, |b| <= B differ by (|a|^2 + |b|^2 - 2 a.b)^1/2 <= 2^1/2 B, since
    a.b >= 0: for indicators of categories that is attained, and less than the 2 B of any vectors.
    The slack covers the rounding of the quotient.
    """
    return sensitivity / math.sqrt(2.0) * (1.0 - 2.0**-50)


def clip_to_box(vectors: np.ndarray, lower: float, upper: float) -> None:
    """Clamp every entry of (d, n) vectors to [lower, upper], in place; NaN stays NaN."""
    np.clip(vectors, lower, upper, out=vectors)


@compiled(error_model="numpy")
def clip_norm_sum(
    vectors: np.ndarray, inverse_unit: float, bound: float, total: np.ndarray, scale: np.ndarray
) -> None:
    """Add clipped, rounded vectors to an integer total.

    Parameters
    ----------
    vectors : (d, n) float64
        One contribution per column, in natural units.
    inverse_unit : float
        Grid units per natural unit.
    bound : float
        Norm bound in grid units, from :func:`vector_bound`.
    total : (d,) int64
        Added to in place.
    scale : (n,) float64
        Receives the factor min(1, bound / norm) of every vector; 0 where the vector is not finite.

    Notes
    -----
    Sensitivity: each column adds an integer vector of norm at most ``norm_bound`` (see
    :func:`vector_bound`), and a column that is not finite, or whose norm overflows, adds 0.
    """
    n = vectors.shape[1]
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        factors = scale[start:stop]
        _scale(vectors, start, inverse_unit, bound, factors)
        for j in range(vectors.shape[0]):
            total[j] += _rounded_sum(vectors[j, start:stop], inverse_unit, factors)


@compiled(error_model="numpy")
def clip_sparse_sum(
    values: np.ndarray,
    common: np.ndarray,
    moving: np.ndarray,
    inverse_unit: float,
    bound: float,
    total: np.ndarray,
    scale: np.ndarray,
) -> None:
    """The same for vectors of which only some entries are held; the others are 0.

    Parameters
    ----------
    values : (w, n) float64
        Entries of one contribution per column, in natural units.
    common : (q,) int64
        Places of the first q entries in `total`.
    moving : (w - q, n) int64
        Places of the others.  Those of a column are distinct where its entries are not 0.
    inverse_unit, bound, total, scale
        As in :func:`clip_norm_sum`.

    Notes
    -----
    Sensitivity: zeros change neither a norm nor an integer, so each column adds what
    :func:`clip_norm_sum` adds for the whole vector.
    """
    n, q = values.shape[1], common.shape[0]
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        factors = scale[start:stop]
        _scale(values, start, inverse_unit, bound, factors)
        for j in range(q):
            total[common[j]] += _rounded_sum(values[j, start:stop], inverse_unit, factors)
        for j in range(moving.shape[0]):
            entries, places = values[q + j, start:stop], moving[j, start:stop]
            for i in range(stop - start):
                if factors[i] > 0.0:
                    entry = (entries[i] * inverse_unit) * factors[i]
                    total[places[i]] += np.int64(np.rint(entry))


@compiled(error_model="numpy")
def clip_multiples_sum(
    common_values: np.ndarray,
    common: np.ndarray,
    moving_values: np.ndarray,
    moving: np.ndarray,
    lengths: np.ndarray,
    first: int,
    factors: np.ndarray,
    inverse_unit: float,
    bound: float,
    total: np.ndarray,
    scale: np.ndarray,
    multiples: np.ndarray,
) -> None:
    """The same for multiples f_i u_i of vectors whose lengths are known: they are never made.

    Parameters
    ----------
    common_values : (q, N) float64 or float32
        Entries of the vectors u_i, one per column.  Products are in float64 in both cases.
    common : (q,) int64
        Places of these entries in `total`.
    moving_values : (m, N) float64 or float32
        Further entries.
    moving : (m, N) int64
        Their places.  Those of a column are distinct where its entries are not 0.
    lengths : (N,) float64
        At least the l2 norm of each column, from :func:`pymc_dp.rows.loops.lengths`.
    first : int
        The contributions are those of the columns first, ..., first + n - 1.
    factors : (n,) float64
        f_i, in natural units.
    inverse_unit, bound, total, scale
        As in :func:`clip_norm_sum`; scale is 0 where the length, or the norm, is not finite.
    multiples : (n,) float64
        Receives what the columns were multiplied by, in grid units.

    Notes
    -----
    Sensitivity: with w = f_i / unit and N = |w| lengths_i, in floating point, a column is
    multiplied by |w| min(1, bound / N).  The four roundings there, and one of each entry, are
    relative; the slack of :func:`vector_bound` covers them, as it covers those of
    :func:`clip_norm_sum`.  No contribution is the sum of several vectors, so nothing cancels.
    """
    n = factors.shape[0]
    length = lengths[first : first + n]
    for i in range(n):
        w = factors[i] * inverse_unit
        norm = math.fabs(w) * length[i]
        s = 1.0 if norm <= bound else bound / norm
        s = s if norm < math.inf else 0.0  # also not a number
        scale[i] = s
        multiples[i] = w * s if s > 0.0 else 0.0
    for j in range(common.shape[0]):
        x = common_values[j, first : first + n]
        sum_j = np.int64(0)
        for i in range(n):
            entry = np.rint(x[i] * multiples[i])
            sum_j += np.int64(entry if multiples[i] != 0.0 else 0.0)
        total[common[j]] += sum_j
    for j in range(moving.shape[0]):
        x, places = moving_values[j, first : first + n], moving[j, first : first + n]
        for i in range(n):
            if multiples[i] != 0.0:
                total[places[i]] += np.int64(np.rint(x[i] * multiples[i]))


@compiled(error_model="numpy")
def _rounded_sum(entries: np.ndarray, inverse_unit: float, scale: np.ndarray) -> np.int64:
    """Sum of one entry of all scaled vectors, rounded one by one."""
    total = np.int64(0)
    for i in range(entries.shape[0]):
        entry = np.rint((entries[i] * inverse_unit) * scale[i])
        total += np.int64(entry if scale[i] > 0.0 else 0.0)
    return total


@compiled(error_model="numpy")
def _scale(
    vectors: np.ndarray, first: int, inverse_unit: float, bound: float, scale: np.ndarray
) -> None:
    """The factor of each vector from column `first` on, in grid units."""
    n = scale.shape[0]
    scale[:] = 0.0
    for j in range(vectors.shape[0]):
        x = vectors[j, first : first + n]
        for i in range(n):
            w = x[i] * inverse_unit
            scale[i] += w * w
    for i in range(n):
        norm = math.sqrt(scale[i])
        s = 1.0 if norm <= bound else bound / norm
        scale[i] = s if norm < math.inf else 0.0  # also not a number


@compiled(error_model="numpy")
def clip_interval_sum(
    values: np.ndarray, inverse_unit: float, lower: np.int64, upper: np.int64
) -> np.int64:
    """Integer sum of values rounded and clipped to an interval.

    Parameters
    ----------
    values : (n,) float64
        One value per record, in natural units.
    inverse_unit : float
        Grid units per natural unit.
    lower, upper : int64
        The interval in grid units, lower <= 0 <= upper.

    Returns
    -------
    int64

    Notes
    -----
    Sensitivity: each record adds an integer in [lower, upper], so replacing one changes the sum
    by at most upper - lower, and adding or removing one by at most max(-lower, upper).  A value
    that is not a number adds 0, an infinite one its end of the interval.
    """
    total = np.int64(0)
    low, high = float(lower), float(upper)
    for i in range(values.shape[0]):
        v = values[i] * inverse_unit
        if v != v:
            continue
        if v <= low:
            total += lower
        elif v >= high:
            total += upper
        else:
            total += np.int64(np.rint(v))
    return total


@compiled(error_model="numpy")
def clip_l1_sum(
    vectors: np.ndarray, inverse_unit: float, bound: np.int64, total: np.ndarray
) -> None:
    """Add vectors, clipped in l1 norm and cut off to integers, to an integer total.

    Parameters
    ----------
    vectors : (d, n) float64
        One contribution per column, in natural units.
    inverse_unit : float
        Grid units per natural unit.
    bound : int64
        Bound on the l1 norm of a column in grid units.
    total : (d,) int64
        Added to in place.

    Notes
    -----
    Sensitivity: each column adds an integer vector of l1 norm at most `bound`, which is checked in
    integers before it is added.  A column that is not finite, whose norm overflows, or whose
    rounded scaling would pass the bound (2^46 and more), adds 0.
    """
    d, n = vectors.shape
    entries = np.empty(d, dtype=np.int64)
    for i in range(n):
        norm = 0.0
        for j in range(d):
            norm += math.fabs(vectors[j, i] * inverse_unit)
        if not norm < math.inf:  # also not a number
            continue
        s = 1.0 if norm <= bound else bound / norm
        size = np.int64(0)
        for j in range(d):
            entries[j] = np.int64(math.trunc((vectors[j, i] * inverse_unit) * s))
            size += abs(entries[j])
        if size <= bound:
            for j in range(d):
                total[j] += entries[j]


@compiled(error_model="numpy")
def count_norms(vectors: np.ndarray, squared_edges: np.ndarray, counts: np.ndarray) -> None:
    """Count each vector once, in the bin of its norm.

    Parameters
    ----------
    vectors : (d, n) float64
        One contribution per column.
    squared_edges : (k - 1,) float64
        Squares of the ends between neighbouring bins, increasing; the outer bins are unbounded.
    counts : (k,) int64
        Added to in place.

    Notes
    -----
    Sensitivity: each column adds 1 to one count, so replacing one moves the counts by sqrt(2) in l2
    norm, and adding or removing one by 1.  The norm is a function of its column alone.  One that
    overflows is in the last bin; one that is not a number is in the first, like the zero that
    :func:`clip_norm_sum` adds for it.
    """
    d, n = vectors.shape
    last = squared_edges.shape[0]
    squares = np.zeros(n)
    for j in range(d):
        for i in range(n):
            squares[i] += vectors[j, i] * vectors[j, i]
    for i in range(n):
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if squares[i] >= squared_edges[middle]:
                low = middle + 1
            else:
                high = middle
        counts[low] += 1
