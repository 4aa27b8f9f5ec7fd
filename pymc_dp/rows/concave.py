"""Compiled loops for rows with a concave term in one linear predictor, and its Huberised form.

A row has numbers a and b >= 0, and l'(v) = a - b K'(v) falls in v (families:
:mod:`pymc_dp.rows.predictor`).  Between the knots lower <= v <= upper, where |l'| = bound, the
Huberised term is l; beyond, it is the tangent of l at the knot.  Every row is computed by itself.
"""

from __future__ import annotations

import math

from numpy import ndarray

from pymc_dp._jit import compiled

__all__ = ["huber_log_likelihoods", "huber_slopes", "knots", "norms"]

_LOGIT, _LOG, _NORMAL = 0, 1, 2
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
    """The logarithm of Phi(t)."""
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


@compiled(error_model="numpy")
def _value(family: int, v: float, a: float, b: float) -> float:
    if family == _LOGIT:
        # a v - b log(1 + exp(v)), without cancellation where a is 0 or b
        tail = b * math.log1p(math.exp(-math.fabs(v)))
        return -a * -v - tail if v < 0.0 else -(b - a) * v - tail
    if family == _LOG:
        return a * v - b * math.exp(v)
    if family == _NORMAL:
        return v * (a - 0.5 * b * v)
    return _log_phi(a * v) if b > 0.0 else 0.0


@compiled(error_model="numpy")
def _slope(family: int, v: float, a: float, b: float) -> float:
    if family == _LOGIT:
        tail = math.exp(-math.fabs(v))
        if v < 0.0:
            return a - b * (tail / (1.0 + tail))
        return (a - b) + b * (tail / (1.0 + tail))
    if family == _LOG:
        return a - b * math.exp(v)
    if family == _NORMAL:
        return a - b * v
    return a * _log_phi_slope(a * v) if b > 0.0 else 0.0


@compiled(error_model="numpy")
def huber_log_likelihoods(
    family: int, a: ndarray, b: ndarray, lower: ndarray, upper: ndarray, v: ndarray
) -> None:
    """v[i] <- Huberised log-likelihood at v[i], up to a constant of the row."""
    for i in range(v.shape[0]):
        x = v[i]
        if x < lower[i]:
            knot = lower[i]
        elif x > upper[i]:
            knot = upper[i]
        else:
            v[i] = _value(family, x, a[i], b[i])
            continue
        v[i] = _value(family, knot, a[i], b[i]) + _slope(family, knot, a[i], b[i]) * (x - knot)


@compiled(error_model="numpy")
def huber_slopes(
    family: int, a: ndarray, b: ndarray, lower: ndarray, upper: ndarray, v: ndarray
) -> None:
    """v[i] <- derivative of the Huberised log-likelihood at v[i]."""
    for i in range(v.shape[0]):
        v[i] = _slope(family, min(max(v[i], lower[i]), upper[i]), a[i], b[i])


@compiled(error_model="numpy")
def _where_steep(slope: float) -> float:
    """The t with phi(t)/Phi(t) = slope > 0, by bisection to the last bit."""
    low = -slope  # phi/Phi at t exceeds -t
    high = max(0.0, -2.0 * (math.log(0.5 * slope) + _HALF_LOG_2PI))
    high = math.sqrt(high) + 1e-6  # phi/Phi at t >= 0 is at most 2 phi(t)
    for _ in range(80):
        t = 0.5 * (low + high)
        if not low < t < high:
            break
        if _log_phi_slope(t) > slope:
            low = t
        else:
            high = t
    return high


@compiled(error_model="numpy")
def knots(
    family: int, a: ndarray, b: ndarray, bounds: ndarray, lower: ndarray, upper: ndarray
) -> None:
    """lower[i], upper[i] <- where the derivative is bounds[i] and -bounds[i].

    Infinite where the derivative stays within the bound.
    """
    for i in range(a.shape[0]):
        lower[i], upper[i] = -math.inf, math.inf
        bound = bounds[i]
        if not (b[i] > 0.0 and bound < math.inf):
            continue
        if family == _LOGIT:
            # the odds exp(v), with b - a exact for counts
            over, under = a[i] - bound, (b[i] - a[i]) + bound
            if over > 0.0 and under > 0.0:
                lower[i] = math.log(over / under)
            over, under = a[i] + bound, (b[i] - a[i]) - bound
            if over > 0.0 and under > 0.0:
                upper[i] = math.log(over / under)
        elif family == _LOG:
            if a[i] > bound:
                lower[i] = math.log((a[i] - bound) / b[i])
            upper[i] = math.log((a[i] + bound) / b[i])
        elif family == _NORMAL:
            lower[i], upper[i] = (a[i] - bound) / b[i], (a[i] + bound) / b[i]
        elif a[i] > 0.0:
            lower[i] = _where_steep(bound / a[i]) / a[i]
        elif a[i] < 0.0:
            upper[i] = _where_steep(bound / -a[i]) / a[i]


@compiled(error_model="numpy")
def norms(vectors: ndarray, out: ndarray) -> None:
    """out[i] = |vectors[:, i]|."""
    d, n = vectors.shape
    for i in range(n):
        out[i] = 0.0
    for j in range(d):
        for i in range(n):
            out[i] += vectors[j, i] * vectors[j, i]
    for i in range(n):
        out[i] = math.sqrt(out[i])
