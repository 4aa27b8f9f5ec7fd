"""Rows that see z through one number v_i = origin_i + u_i . z, with a concave term.

Score vectors are multiples of vectors u_i that do not depend on z: with these at hand, a kick costs
one product per entry, and a pass over the rows reads each u_i once and makes no vector.  A row has
numbers a and b >= 0, and l'(v) = a - b K'(v) falls in v (families: :mod:`pymc_dp.rows.predictor`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.rows import loops
from pymc_dp.rows.loops import SparseBlock

# `exp` and `log1p` have no branches or library calls, so that loops over rows use vector
# instructions.  Additions, multiplications, one division and one rounding round alike in scalar and
# vector form: a record gives the same bits wherever it stands.

_LOG2_E = 1.4426950408889634
#: log 2 in two parts; a multiple of the first below 2^11 is exact.
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6
_ROUNDING = 6755399441055744.0  # adding it rounds to an integer, which then stands in the low bits
_LOWEST, _HIGHEST = -746.0, 709.782712893384  # beyond these exp is 0 or infinite


@compiled(error_model="numpy")
def exp(x: float) -> float:
    """The exponential function, with a relative error below 2^-51 where it is a normal number.

    x = k log 2 + r; exp(r) by Moshier (Cephes, 1984); 2^k in two factors, for gradual underflow.
    """
    v = min(max(x, _LOWEST), _HIGHEST)
    rounded = v * _LOG2_E + _ROUNDING
    k = rounded - _ROUNDING
    r = (v - k * _LN2_HIGH) - k * _LN2_LOW
    rr = r * r
    p = r * ((1.26177193074810590878e-4 * rr + 3.02994407707441961300e-2) * rr + 1.0)
    q = (3.00198505138664455042e-6 * rr + 2.52448340349684104192e-3) * rr
    q = (q + 2.27265548208155028766e-1) * rr + 2.0
    value = 1.0 + 2.0 * p / (q - p)
    integer = np.float64(rounded).view(np.int64) - np.float64(_ROUNDING).view(np.int64)
    half = integer >> 1
    value *= np.int64((half + 1023) << 52).view(np.float64)
    value *= np.int64((integer - half + 1023) << 52).view(np.float64)
    return value if x <= _HIGHEST else x * np.inf


@compiled(error_model="numpy")
def log1p(t: float) -> float:
    """The logarithm of 1 + t for 0 <= t <= 1, with a relative error below 2^-50.

    2 artanh(s), s = t / (2 + t) <= 1/3, by 16 terms: the next is < 3^-32 / 33 < 2^-55 of the first.
    """
    s = t / (2.0 + t)
    ss = s * s
    series = 1.0 / 31.0
    for k in range(29, 0, -2):  # unrolled by the compiler
        series = series * ss + 1.0 / k
    return 2.0 * s * series


LOGIT, LOG, _NORMAL = 0, 1, 2  # and 3, probit: places in FAMILIES
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_SQRT_HALF = math.sqrt(0.5)


@compiled(error_model="numpy")
def _mills(x: float) -> float:
    """Phi(-x)/phi(x) for x >= 5, by its continued fraction."""
    fraction = x
    for k in range(50, 0, -1):
        fraction = x + k / fraction
    return 1.0 / fraction


@compiled(error_model="numpy")
def _log_phi(t: float) -> float:
    if t > 0.0:
        return math.log1p(-0.5 * math.erfc(t * _SQRT_HALF))
    if t > -5.0:
        return math.log(0.5 * math.erfc(-t * _SQRT_HALF))
    return -0.5 * t * t - _HALF_LOG_2PI + math.log(_mills(-t))


@compiled(error_model="numpy")
def _log_phi_slope(t: float) -> float:
    """phi(t)/Phi(t)."""
    if t > -5.0:
        return math.exp(-0.5 * t * t - _HALF_LOG_2PI) / (0.5 * math.erfc(-t * _SQRT_HALF))
    return 1.0 / _mills(-t)


# l(v) up to a constant, and l'(v), by family. The first three have no branches where they are
# inlined, in a loop for each family.
_family = compiled(error_model="numpy", forceinline=True)


@_family
def of_logit(v: float, a: float, b: float) -> tuple[float, float]:
    """Binomial: a v - b log(1 + exp(v)), without cancellation where a is 0 or b."""
    tail = exp(-math.fabs(v))
    high = v >= 0.0
    slope = a - b if high else a
    value = slope * v - b * log1p(tail)
    part = b * (tail / (1.0 + tail))
    return value, slope + (part if high else -part)


@_family
def of_log(v: float, a: float, b: float) -> tuple[float, float]:
    """Poisson: a v - b exp(v)."""
    rate = b * exp(v)
    return a * v - rate, a - rate


@_family
def of_normal(v: float, a: float, b: float) -> tuple[float, float]:
    """Normal: a v - b v^2 / 2."""
    return v * (a - 0.5 * b * v), a - b * v


@_family
def _of_probit(v: float, a: float, b: float) -> tuple[float, float]:
    """Probit: log Phi(a v), 0 if b is."""
    if b > 0.0:
        return _log_phi(a * v), a * _log_phi_slope(a * v)
    return 0.0, 0.0


@_family
def _finite(slope: float) -> float:
    return slope if math.fabs(slope) < math.inf else 0.0


@compiled(error_model="numpy")
def evaluate(family: int, a: ndarray, b: ndarray, v: ndarray) -> None:
    """v[i] <- log-likelihood at v[i], up to a constant."""
    n = v.shape[0]
    if family == LOGIT:
        for i in range(n):
            v[i] = of_logit(v[i], a[i], b[i])[0]
    elif family == LOG:
        for i in range(n):
            v[i] = of_log(v[i], a[i], b[i])[0]
    elif family == _NORMAL:
        for i in range(n):
            v[i] = of_normal(v[i], a[i], b[i])[0]
    else:
        for i in range(n):
            v[i] = _of_probit(v[i], a[i], b[i])[0]


@compiled(error_model="numpy")
def differentiate(family: int, a: ndarray, b: ndarray, v: ndarray) -> None:
    """v[i] <- slope of the log-likelihood at v[i], 0 if not finite."""
    n = v.shape[0]
    if family == LOGIT:
        for i in range(n):
            v[i] = _finite(of_logit(v[i], a[i], b[i])[1])
    elif family == LOG:
        for i in range(n):
            v[i] = _finite(of_log(v[i], a[i], b[i])[1])
    elif family == _NORMAL:
        for i in range(n):
            v[i] = _finite(of_normal(v[i], a[i], b[i])[1])
    else:
        for i in range(n):
            v[i] = _finite(_of_probit(v[i], a[i], b[i])[1])


@compiled(error_model="numpy")
def steepest(family: int, a: ndarray, b: ndarray, v: ndarray) -> None:
    """v[i] <- the largest |l'(v[i])| over outcomes (0 and 1 of counts); 0 if outcomes are real."""
    for i in range(v.shape[0]):
        x = v[i]
        if family == LOGIT:
            v[i] = max(-of_logit(x, 0.0, b[i])[1], of_logit(x, b[i], b[i])[1])
        elif family == LOG:
            mean = -of_log(x, 0.0, b[i])[1]
            v[i] = max(mean, 1.0 - mean)
        elif family == _NORMAL:
            v[i] = 0.0
        else:
            one, other = _of_probit(x, a[i], b[i])[1], _of_probit(x, -a[i], b[i])[1]
            v[i] = max(math.fabs(one), math.fabs(other))


#: Rows whose lengths are computed at once.
_BLOCK = 8192


class Moves(NamedTuple):
    """The derivatives u_i of one number of each row by z.

    `common_values`, (q, n), are at coordinates `common` of all rows, `moving_values` at a row's own
    `moving`, (m, n); float32 if all features are.  `lengths`, (n,), are rounded up, of these as
    stored.
    """

    common: ndarray
    common_values: ndarray
    moving: ndarray
    moving_values: ndarray
    lengths: ndarray

    @classmethod
    def of(
        cls, common: ndarray, common_values: ndarray, moving: ndarray, moving_values: ndarray
    ) -> Moves:
        """With the lengths of the vectors as they are stored, which clips rely on."""
        lengths = np.empty(moving.shape[1])
        for where in loops.row_blocks(len(lengths), _BLOCK):
            first, further = (x[:, where].astype("float64") for x in (common_values, moving_values))
            loops.lengths(first, further, lengths[where])
        return cls(common, common_values, moving, moving_values, lengths)

    @property
    def width(self) -> int:
        """Entries that are held of each row."""
        return len(self.common) + len(self.moving)

    def part(self, rows: slice) -> Moves:
        """Those of some rows."""
        common, moving, own = (np.ascontiguousarray(x[:, rows]) for x in self[1:4])
        return Moves(self.common, common, moving, own, self.lengths[rows])

    def times(self, factors: ndarray, where: slice) -> SparseBlock:
        """factors_i u_i for a block of rows, factors (n,)."""
        block = np.empty((self.width, where.stop - where.start))
        q = len(self.common)
        _times(self.common_values, factors, where.start, block[:q])
        _times(self.moving_values, factors, where.start, block[q:])
        return SparseBlock(block, self.common, np.ascontiguousarray(self.moving[:, where]))


@compiled(error_model="numpy")
def predict(moves: Moves, z: ndarray, first: int, out: ndarray) -> None:
    """out[i] = u_{first + i} . z."""
    n = out.shape[0]
    weights = np.empty(moves.common.shape[0])
    for j in range(weights.shape[0]):
        weights[j] = z[moves.common[j]]
    loops.combine(moves.common_values, first, weights, loops.places(weights), out)
    for j in range(moves.moving.shape[0]):
        x = moves.moving_values[j, first : first + n]
        places = moves.moving[j, first : first + n]
        for i in range(n):
            out[i] += x[i] * z[places[i]]


@compiled(error_model="numpy")
def _times(values: ndarray, factors: ndarray, first: int, out: ndarray) -> None:
    """out[c, i] = values[c, first + i] * factors[first + i]."""
    n = out.shape[1]
    f = factors[first : first + n]
    for c in range(values.shape[0]):
        x, y = values[c, first : first + n], out[c]
        for i in range(n):
            y[i] = x[i] * f[i]


class LinearRows(NamedTuple):
    """What each row is, in the layout of the loops; private.

    `family` indexes :data:`pymc_dp.rows.predictor.FAMILIES`; `a` and `b`, (n,), are its numbers;
    `origin`, (n,), is v at z = 0; `reference`, (n,) or (0,), is subtracted from slopes.
    """

    family: int
    a: ndarray
    b: ndarray
    origin: ndarray
    reference: ndarray
    moves: Moves

    def part(self, rows: slice) -> LinearRows:
        """Those of some rows."""
        a, b, origin, reference = (x[rows] for x in self[1:5])
        return LinearRows(self.family, a, b, origin, reference, self.moves.part(rows))


@compiled(error_model="numpy")
def slopes(rows: LinearRows, z: ndarray, first: int, out: ndarray) -> None:
    """out[i] = l'(v) of row first + i, less the reference, 0 if not finite."""
    predict(rows.moves, z, first, out)
    last = first + out.shape[0]
    origin = rows.origin[first:last]
    for i in range(out.shape[0]):
        out[i] += origin[i]
    differentiate(rows.family, rows.a[first:last], rows.b[first:last], out)
    if rows.reference.shape[0] > 0:
        reference = rows.reference[first:last]
        for i in range(out.shape[0]):
            out[i] -= reference[i]


@compiled(error_model="numpy")
def log_likelihoods(rows: LinearRows, first: int, moved: ndarray, out: ndarray) -> None:
    """out[i] = l(origin + moved[i]) of row first + i, up to a constant; without the reference."""
    last = first + out.shape[0]
    origin = rows.origin[first:last]
    for i in range(out.shape[0]):
        out[i] = origin[i] + moved[i]
    evaluate(rows.family, rows.a[first:last], rows.b[first:last], out)
