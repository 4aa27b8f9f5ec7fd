"""How an answer about records is made: paid for, clipped, added in integers, noised.

Whatever is released about records is the value of :func:`answer`, for a committed :class:`Receipt`:

1. The numbers of each privacy unit are clipped, rounded to the grid (:class:`Grid`) and added in
   int64: sums of neighbouring data sets differ by at most ``Grid.sensitivity`` units in l2 norm,
   exactly, for any order, any blocks and any number of threads.
2. A normal variable with a standard deviation of ``2**m`` units, rounded to an integer without any
   other error, is added. As ``round(x + N) = x + round(N)`` for an integer x, the value is a
   function of the exact Gaussian mechanism's, and (1/tau)-GDP. (A published statistic may have
   exact Laplace noise instead.) If 64 bits wrap, sum and noise both do, which is post-processing,
   as is the scaling to natural units.

The functions that compute a unit's numbers (:mod:`pymc_dp.rows`) are trusted to use nothing but the
rows of that unit and public numbers.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from pymc_dp.base.checks import Neighboring
from pymc_dp.base.jit import compiled
from pymc_dp.errors import PrivacyError
from pymc_dp.privacy.accounting import mu_from_pure
from pymc_dp.privacy.noise import discrete_laplace, rounded_normal
from pymc_dp.rows.linear import LinearRows, Moves, slopes
from pymc_dp.rows.loops import SparseBlock

Array: TypeAlias = np.ndarray

#: Range of m, where one standard deviation of the noise is 2^m grid units.
FINEST, COARSEST = 36, 20
#: Vectors of a tile: their entries then stay in the fastest caches.
TILE = 512
#: Numbers of at most 2^51 are rounded to an integer, ties to even, by adding the first: it is in
#: the last bits of the sum. A processor does so for several numbers at a time.
_ROUNDS, _BITS = 1.5 * 2.0**52, np.int64(0x4338000000000000)
#: Ends of the bins of a histogram of norms: steps of 2^(1/4) from 2^-60 to 2^60, and the rest.
EDGES = np.concatenate([[0.0], 2.0 ** (np.arange(-240, 241) / 4.0), [math.inf]])
#: A unit outside of this, its inverse, or 2^63 of it, would lose accuracy or overflow.
_SMALLEST, _LARGEST = 2.0**-900, 2.0**900
#: Relative slack for the rounding of interval ends: 8 units in the last place, for 4 roundings.
_SLACK = 1.0 - 2.0**-50


# -- the grid, and what one unit may add to a sum -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grid:
    """The integer grid of one release, with noise of standard deviation ``2**log2_sigma`` units.
    The noise sampler needs a power of two. `noise_multiplier` is tau, noise over l2 sensitivity.
    """

    log2_sigma: int
    noise_multiplier: float

    @classmethod
    def finest(cls, noise_multiplier: float, n: int) -> Grid:
        """The finest grid on which contributions of `n` units and the noise fit into 64 bits, and
        each contribution into 50.
        """
        for log2_sigma in range(FINEST, COARSEST - 1, -1):
            # a contribution is at most the sensitivity, sigma / tau
            largest = 2.0**log2_sigma / noise_multiplier
            if n * largest + 16.0 * 2.0**log2_sigma < 2.0**62 and largest <= 2.0**50:
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
        """Norm bound of one unit's integer vector, in units: half the sensitivity if replaced."""
        return self.sensitivity / 2.0 if neighboring == "replace_one" else self.sensitivity

    def count_unit(self, neighboring: Neighboring) -> int:
        """Size of one count of a histogram, in units. Replacing a record changes two counts by one,
        an l2 distance of sqrt(2); adding or removing it changes one. The result is the largest
        integer w with ``w * distance <= 2^m / tau``, exactly.
        """
        squared = Fraction(4**self.log2_sigma) / Fraction(self.noise_multiplier) ** 2
        size = math.isqrt(math.floor(squared / (2 if neighboring == "replace_one" else 1)))
        if size < 1:
            raise PrivacyError(
                "The noise is so large that the integer grid cannot represent a count. Use a "
                "larger budget, or a larger share of it for this histogram."
            )
        return size


def vector_bound(norm_bound: float, d: int) -> float:
    """Norm to which a real d-vector is clipped so that its rounding has norm <= `norm_bound`.
    Rounding moves the norm by at most sqrt(d)/2. The slack (d + 8) 2^-53 covers the rounding errors
    of the norm (d/2 + 2 units in the last place), of the quotient and of the products with it.
    """
    bound = (norm_bound - math.sqrt(d) / 2.0) * (1.0 - (d + 8) * 2.0**-53)
    if not 0.0 < bound <= 2.0**50:  # no grid of `Grid.finest` is too fine
        raise PrivacyError(
            "The noise is so large compared with one record that the integer grid cannot "
            "represent a record. Use fewer draws or a larger budget."
        )
    return bound


def nonnegative_bound(sensitivity: float) -> float:
    """Norm bound of vectors without negative entries that gives a sensitivity if one is replaced.
    Two such vectors with |a|, |b| <= B differ by (|a|^2 + |b|^2 - 2 a.b)^1/2 <= 2^1/2 B, not 2 B,
    as a.b >= 0. The slack covers the rounding of the quotient.
    """
    return sensitivity / math.sqrt(2.0) * (1.0 - 2.0**-50)


# -- clip, round and add --------------------------------------------------------------------------
#
# `units` is grid units per natural unit, `bound` a norm bound in grid units, `total` the int64 sum,
# changed in place. `scale` receives min(1, bound / norm) of each vector, or 0 where the vector is
# not finite or its norm overflows; such a vector adds 0.


@compiled(error_model="numpy")
def _sum_of_rounded(x: Array, units: float, factors: Array, work: Array) -> np.int64:
    """Sum of x_i units f_i, each rounded to an integer, and at most 2^51; 0 where f_i is 0."""
    n, total = x.shape[0], np.int64(0)
    for i in range(n):
        work[i] = ((x[i] * units) * factors[i] if factors[i] != 0.0 else 0.0) + _ROUNDS
    bits = work.view(np.int64)
    for i in range(n):
        total += bits[i] - _BITS
    return total


@compiled(error_model="numpy")
def clip_vectors(
    block: SparseBlock, units: float, bound: float, total: Array, scale: Array
) -> None:
    """Add the vectors of a block, one per column; entries that the block does not hold are 0.
    Sensitivity: each column adds an integer vector of norm at most the bound that was given to
    :func:`vector_bound`.
    """
    values, common, moving = block
    n, q, work = values.shape[1], common.shape[0], np.empty(TILE)
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        factors = scale[start:stop]
        factors[:] = 0.0
        for j in range(values.shape[0]):
            x = values[j, start:stop]
            for i in range(stop - start):
                w = x[i] * units
                factors[i] += w * w
        for i in range(stop - start):
            norm = math.sqrt(factors[i])
            s = 1.0 if norm <= bound else bound / norm
            factors[i] = s if norm < math.inf else 0.0  # also not a number
        for j in range(q):
            total[common[j]] += _sum_of_rounded(values[j, start:stop], units, factors, work)
        for j in range(moving.shape[0]):
            x, places = values[q + j, start:stop], moving[j, start:stop]
            for i in range(stop - start):
                if factors[i] > 0.0:
                    total[places[i]] += np.int64(np.rint((x[i] * units) * factors[i]))


@compiled(error_model="numpy")
def clip_multiples(
    moves: Moves, first: int, factors: Array, units: float, bound: float, total: Array, scale: Array
) -> None:
    """The same for multiples f_i u_i of the vectors first, ..., first + n - 1, which are never
    made.

    Factors (n,), in natural units, and products are in float64, the vectors in float64 or float32.
    With w = f_i / unit and N = |w| lengths_i, a vector is multiplied by |w| min(1, bound / N).

    Sensitivity: the four roundings there, and one of each entry, are relative; the slack of
    :func:`vector_bound` covers them. A subnormal quotient is off by up to 8 * 2^-53 more, for which
    `lengths` has slack. No contribution is the sum of several vectors: nothing cancels.
    """
    n = factors.shape[0]
    length, multiples, work = moves.lengths[first : first + n], np.empty(n), np.empty(n)
    for i in range(n):
        w = factors[i] * units
        norm = math.fabs(w) * length[i]
        s = 1.0 if norm <= bound else bound / norm
        scale[i] = s if norm < math.inf else 0.0  # also not a number
        multiples[i] = w * scale[i] if scale[i] > 0.0 else 0.0
    for j in range(moves.common.shape[0]):
        x = moves.common_values[j, first : first + n]
        total[moves.common[j]] += _sum_of_rounded(x, 1.0, multiples, work)
    for j in range(moves.moving.shape[0]):
        x, places = moves.moving_values[j, first : first + n], moves.moving[j, first : first + n]
        for i in range(n):
            if multiples[i] != 0.0:
                total[places[i]] += np.int64(np.rint(x[i] * multiples[i]))


@compiled(error_model="numpy")
def clip_linear(
    rows: LinearRows, z: Array, part: Array, units: float, bound: float, total: Array, found: Array
) -> None:
    """The same for the scores at z of rows part[0] to part[1], which have a linear predictor. For
    each row, `found`, (2, rows), receives the slope, and what its vector was scaled by. A tile of
    rows stays in the fastest caches from its data to its integers.
    """
    for start in range(part[0], part[1], TILE):
        stop = min(start + TILE, part[1])
        factors = found[0, start:stop]
        slopes(rows, z, start, factors)
        clip_multiples(rows.moves, start, factors, units, bound, total, found[1, start:stop])


@compiled(error_model="numpy")
def clip_interval(values: Array, units: float, lower: np.int64, upper: np.int64) -> np.int64:
    """Sum of (n,) values, rounded and clipped to an interval in grid units, lower <= 0 <= upper.
    Sensitivity: replacing a value changes the sum by at most upper - lower, adding or removing one
    by at most max(-lower, upper). NaN adds 0.
    """
    total, low, high = np.int64(0), float(lower), float(upper)
    for i in range(values.shape[0]):
        v = values[i] * units
        if v <= low:
            total += lower
        elif v >= high:
            total += upper
        elif v == v:
            total += np.int64(np.rint(v))
    return total


@compiled(error_model="numpy")
def clip_l1(vectors: Array, units: float, bound: np.int64, total: Array) -> None:
    """Add (d, n) vectors, one per column, clipped in l1 norm and cut off to integers. Sensitivity:
    each column adds an integer vector of l1 norm at most `bound`, checked in integers, or 0 where
    it is not finite, its norm overflows, or rounding would pass the bound (2^46 and more).
    """
    d, n = vectors.shape
    entries = np.empty(d, dtype=np.int64)
    for i in range(n):
        norm = 0.0
        for j in range(d):
            norm += math.fabs(vectors[j, i] * units)
        if not norm < math.inf:  # also not a number
            continue
        s = 1.0 if norm <= bound else bound / norm
        size = np.int64(0)
        for j in range(d):
            entries[j] = np.int64(math.trunc((vectors[j, i] * units) * s))
            size += abs(entries[j])
        if size <= bound:
            for j in range(d):
                total[j] += entries[j]


@np.errstate(all="ignore")
def count_norms(vectors: Array, squared_edges: Array, weight: np.int64, counts: Array) -> None:
    """Add `weight` for each of (d, n) vectors, to the one bin in which its norm is.

    `squared_edges` are the squared ends between bins. A norm that overflows is in the last bin, NaN
    in the first. Sensitivity: a norm depends on its column alone, so replacing one vector moves the
    counts by sqrt(2) `weight` in l2 norm, and adding or removing one by `weight`.
    """
    squares = np.zeros(vectors.shape[1])
    for entries in vectors:
        squares += entries * entries
    places = np.searchsorted(squared_edges, np.nan_to_num(squares), side="right")
    counts += weight * np.bincount(places, minlength=len(counts))


# -- sums: what one unit may add, and the noise that hides it -------------------------------------


def _told(sum_: Sum | LaplaceSum) -> float | None:
    """The value if the bound decides it and records do not; minus infinity for an unusable
    bound.
    """
    usable = _SMALLEST < sum_.unit and sum_.noise_sd < _LARGEST
    return 0.0 if sum_.noise_sd == 0.0 else None if usable else -math.inf


@dataclass(frozen=True)
class Sum(ABC):
    """A clipped sum over all units on a grid of integers, with noise: what is common to all. `size`
    is the number of its entries; `add` adds the clipped numbers of a block of units to an int64
    total. Guarantee: with the normal noise of this class, (1 / noise_multiplier)-GDP.
    """

    grid: Grid
    neighboring: Neighboring

    @cached_property
    def noise_multiplier(self) -> float:
        return self.grid.noise_multiplier

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """Largest l2 change between neighbours, in natural units: ``grid.sensitivity`` of
        the grid.
        """

    @cached_property
    def unit(self) -> float:
        """Size of one unit of the grid."""
        return self.grid.unit(self.sensitivity)

    @cached_property
    def noise_sd(self) -> float:
        """Standard deviation of the noise on each entry."""
        return 2.0**self.grid.log2_sigma * self.unit

    told = cached_property(_told)

    def noise(self, size: int) -> Array:
        """(size,) int64."""
        return rounded_normal(size, self.grid.log2_sigma)


@dataclass(frozen=True)
class VectorSum(Sum):
    """Of vectors clipped to an l2 norm; if `nonnegative`, entries below 0 become 0 before."""

    size: int
    norm: float
    nonnegative: bool = False

    def __post_init__(self) -> None:
        _ = self.bound  # refuses a grid that is too coarse

    @property
    def sensitivity(self) -> float:
        if self.neighboring == "add_or_remove_one":
            return self.norm
        return (math.sqrt(2.0) if self.nonnegative else 2.0) * self.norm

    @cached_property
    def bound(self) -> float:
        """Norm bound in grid units, before rounding."""
        if self.neighboring == "replace_one" and self.nonnegative:
            return vector_bound(nonnegative_bound(self.grid.sensitivity), self.size)
        return vector_bound(self.grid.norm_bound(self.neighboring), self.size)

    def add(self, block: SparseBlock, total: Array, scale: Array | None = None) -> None:
        if self.nonnegative:
            np.maximum(block.values, 0.0, out=block.values)  # what is not a number stays so
        scale = np.empty(block.values.shape[1]) if scale is None else scale
        clip_vectors(block, 1.0 / self.unit, self.bound, total, scale)


@dataclass(frozen=True)
class IntervalSum(Sum):
    """Of one number of each unit, clipped to an interval, lower <= 0 <= upper."""

    lower: float
    upper: float
    size = 1

    @property
    def sensitivity(self) -> float:
        if self.neighboring == "replace_one":
            return self.upper - self.lower
        return max(-self.lower, self.upper)

    def add(self, block: SparseBlock, total: Array) -> None:
        # both ends shrink alike, to stay antisymmetric under reversal
        low = math.ceil(self.lower / self.unit * _SLACK)
        high = math.floor(self.upper / self.unit * _SLACK)
        if not low <= 0 <= high:
            raise PrivacyError("An interval for clipping must contain zero.")
        total += clip_interval(block.values[0], 1.0 / self.unit, np.int64(low), np.int64(high))


@dataclass(frozen=True)
class NormCounts(Sum):
    """Of the units whose vectors have an l2 norm in each bin of `EDGES`."""

    size = len(EDGES) - 1
    sensitivity = 1.0

    def __post_init__(self) -> None:
        _ = self.unit  # refuses a grid that is too coarse

    @cached_property
    def unit(self) -> float:
        return 1.0 / self.grid.count_unit(self.neighboring)

    def add(self, block: SparseBlock, total: Array) -> None:
        weight = np.int64(self.grid.count_unit(self.neighboring))
        count_norms(block.values, EDGES[1:-1] ** 2, weight, total)


@dataclass(frozen=True)
class LaplaceSum:
    """Of vectors clipped in l1 norm and cut off to integers, with discrete Laplace noise.

    Guarantee: epsilon-differentially private, exactly. Integer sums of neighbours differ by at most
    `distance` in l1 norm, and the noise, drawn without rounding, has the scale distance / epsilon.
    `noise_multiplier` is that of normal noise which protects no better.

    `one_sided` vectors have no negative entries, and none above bounds that add up to `bound`: two
    of them then differ by at most `bound`.
    """

    size: int
    bound: int  # on the l1 norm of a unit's vector, in units of the grid
    unit: float  # of the grid; the integer 1 for geometric noise, whose values are integers
    epsilon: float
    neighboring: Neighboring
    one_sided: bool = False

    @property
    def distance(self) -> int:
        """l1 sensitivity of the integer sum."""
        two_sided = self.neighboring == "replace_one" and not self.one_sided
        return 2 * self.bound if two_sided else self.bound

    @property
    def noise_sd(self) -> float:
        """Scale of the noise on each entry."""
        return self.unit * self.distance / self.epsilon

    told = cached_property(_told)

    @property
    def noise_multiplier(self) -> float:
        return math.nextafter(1.0 / mu_from_pure(self.epsilon), 0.0)

    def add(self, block: SparseBlock, total: Array) -> None:
        clip_l1(block.values, 1.0 / self.unit, np.int64(self.bound), total)

    def noise(self, size: int) -> Array:
        """(size,) int64: what does not fit wraps, like the sum."""
        draws = discrete_laplace(size, Fraction(self.distance) / Fraction(self.epsilon))
        return np.array([u % 2**64 for u in draws], dtype=np.uint64).view(np.int64)


# -- the answer -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Query:
    """A question about records: public, or a function of earlier answers. The ledger was charged
    for `mechanism`. `of` is what each unit adds (:mod:`pymc_dp.rows.contributions`,
    :mod:`pymc_dp.privacy.queries`); `sum` clips, adds and noises it.
    """

    mechanism: str
    of: Any
    sum: VectorSum | IntervalSum | NormCounts | LaplaceSum


class Receipt:
    """Answers that a committed charge has paid for: mechanisms, noise multipliers and numbers.

    Made by :mod:`pymc_dp.privacy.meter` alone, and of no use in another process.
    """

    def __init__(self, paid: Iterable[tuple[str, float, int]] = ()) -> None:
        self._left = {name: [multiplier, count] for name, multiplier, count in paid}
        self._process = os.getpid()  # a fork shares nothing that was paid for

    def __reduce__(self) -> tuple[Any, ...]:
        return Receipt, ()  # a copy pays for nothing

    def pays(self, mechanism: str, noise_multiplier: float) -> bool:
        """Whether an answer with so much noise is paid for."""
        multiplier, count = self._left.get(mechanism, (math.inf, 0))
        return count > 0 and noise_multiplier >= multiplier and self._process == os.getpid()

    @property
    def left(self) -> dict[str, int]:
        """Answers of each mechanism that it still pays for."""
        return {mechanism: int(count) for mechanism, (_, count) in self._left.items()}

    def take(self, mechanism: str, noise_multiplier: float) -> None:
        """Take one answer off; `PrivacyError` unless it is paid for."""
        multiplier, count = self._left.get(mechanism, (math.inf, 0))
        mine = self._process == os.getpid()
        if not (count > 0 and noise_multiplier >= multiplier and mine):  # as `pays`, in one call
            raise PrivacyError(
                f"A {mechanism} answer was asked for that no charge pays for. This is a fault of "
                "the kernel: its count of releases does not match its queries."
            )
        self._left[mechanism][1] -= 1

    def put_back(self, mechanism: str) -> None:
        """Undo `take`: no value was made, or nobody has seen it."""
        self._left[mechanism][1] += 1


@np.errstate(all="ignore")  # a floating-point warning would tell of an extreme record
def answer(query: Query, total: Callable[[Query], Array], receipt: Receipt) -> Array:
    """The released value of a query: the (size,) sum in natural units, plus noise.

    ``total(query)``, the exact int64 sum over all units, is private. The answer is taken off the
    receipt before a record is touched. If something fails, nobody has seen a value, and the receipt
    is as it was, or one answer poorer.
    """
    receipt.take(query.mechanism, query.sum.noise_multiplier)
    try:
        if query.sum.told is not None:
            return np.full(query.sum.size, query.sum.told)
        return (total(query) + query.sum.noise(query.sum.size)) * query.sum.unit
    except BaseException:
        receipt.put_back(query.mechanism)
        raise
