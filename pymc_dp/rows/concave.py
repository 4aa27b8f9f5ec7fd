"""Compiled loops for rows with a concave term in one linear predictor, and its Huberised form.

A row has numbers a and b >= 0, and l'(v) = a - b K'(v) falls in v (families:
:mod:`pymc_dp.rows.predictor`).  Between the knots lower <= v <= upper, where |l'| = bound, the
Huberised term is l; beyond, it is the tangent of l at the knot.  Every row is computed by itself.
"""

from __future__ import annotations

import math

from numpy import ndarray

from pymc_dp._jit import compiled
from pymc_dp.rows import elementary

__all__ = ["huber_log_likelihoods", "huber_slopes", "knots", "steepest"]

_LOGIT, _LOG, _NORMAL, _PROBIT = 0, 1, 2, 3
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


@compiled(error_model="numpy", inline="always")
def _value_and_slope(family: int, v: float, a: float, b: float) -> tuple[float, float]:
    """l(v) up to a constant, and l'(v); without branches for the first three families."""
    if family == _LOGIT:
        # a v - b log(1 + exp(v)), without cancellation where a is 0 or b
        tail = elementary.exp(-math.fabs(v))
        high = v >= 0.0
        slope = a - b if high else a
        value = slope * v - b * elementary.log1p(tail)
        part = b * (tail / (1.0 + tail))
        return value, slope + (part if high else -part)
    if family == _LOG:
        rate = b * elementary.exp(v)
        return a * v - rate, a - rate
    if family == _NORMAL:
        return v * (a - 0.5 * b * v), a - b * v
    if b > 0.0:
        return _log_phi(a * v), a * _log_phi_slope(a * v)
    return 0.0, 0.0


@compiled(error_model="numpy", inline="always")
def _log_likelihoods(
    family: int, a: ndarray, b: ndarray, lower: ndarray, upper: ndarray, v: ndarray
) -> None:
    for i in range(v.shape[0]):
        x = v[i]
        inside = min(max(x, lower[i]), upper[i])
        value, slope = _value_and_slope(family, inside, a[i], b[i])
        beyond = slope * (x - inside)
        v[i] = value + (beyond if x != inside else 0.0)


@compiled(error_model="numpy", inline="always")
def _slopes(
    family: int, a: ndarray, b: ndarray, lower: ndarray, upper: ndarray, v: ndarray
) -> None:
    for i in range(v.shape[0]):
        inside = min(max(v[i], lower[i]), upper[i])
        slope = _value_and_slope(family, inside, a[i], b[i])[1]
        v[i] = slope if math.fabs(slope) < math.inf else 0.0


@compiled(error_model="numpy")
def huber_log_likelihoods(
    family: int, a: ndarray, b: ndarray, lower: ndarray, upper: ndarray, v: ndarray
) -> None:
    """v[i] <- Huberised log-likelihood at v[i], up to a constant of the row."""
    # a constant in each call, so that every loop has the formulas of one family only
    if family == _LOGIT:
        _log_likelihoods(_LOGIT, a, b, lower, upper, v)
    elif family == _LOG:
        _log_likelihoods(_LOG, a, b, lower, upper, v)
    elif family == _NORMAL:
        _log_likelihoods(_NORMAL, a, b, lower, upper, v)
    else:
        _log_likelihoods(_PROBIT, a, b, lower, upper, v)


@compiled(error_model="numpy")
def huber_slopes(
    family: int, a: ndarray, b: ndarray, lower: ndarray, upper: ndarray, v: ndarray
) -> None:
    """v[i] <- derivative of the Huberised log-likelihood at v[i], 0 where it is not finite."""
    if family == _LOGIT:
        _slopes(_LOGIT, a, b, lower, upper, v)
    elif family == _LOG:
        _slopes(_LOG, a, b, lower, upper, v)
    elif family == _NORMAL:
        _slopes(_NORMAL, a, b, lower, upper, v)
    else:
        _slopes(_PROBIT, a, b, lower, upper, v)


@compiled(error_model="numpy")
def _likely(mean: float, variance: float) -> float:
    """The largest deviation of a count that is to be expected: one where none is, or 4 sds."""
    return max(1.0 - mean, min(mean, 4.0 * math.sqrt(variance)))


@compiled(error_model="numpy")
def steepest(family: int, a: ndarray, b: ndarray, v: ndarray, likely: bool) -> None:
    """v[i] <- a bound on |l'(v[i])| whatever the outcome of the row; 0 where there is none.

    Of counts: on how much they fall short of their mean, or exceed it if they are at most 1.  With
    `likely`, on deviations that many rows like this one would show.
    """
    for i in range(v.shape[0]):
        x = v[i]
        if family == _LOGIT:
            successes = -_value_and_slope(family, x, 0.0, b[i])[1]
            failures = _value_and_slope(family, x, b[i], b[i])[1]
            v[i] = max(successes, failures)
            if likely and b[i] > 0.0:
                variance = successes * failures / b[i]
                v[i] = max(_likely(successes, variance), _likely(failures, variance))
        elif family == _LOG:
            mean = -_value_and_slope(family, x, 0.0, b[i])[1]
            v[i] = _likely(mean, mean) if likely else max(mean, 1.0 - mean)
        elif family == _PROBIT:
            one = _value_and_slope(family, x, a[i], b[i])[1]
            other = _value_and_slope(family, x, -a[i], b[i])[1]
            v[i] = max(math.fabs(one), math.fabs(other))
        else:
            v[i] = 0.0


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
