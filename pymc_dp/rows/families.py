"""Compiled loops for rows with a concave term in one linear predictor.

A row has numbers a and b >= 0, and l'(v) = a - b K'(v) falls in v (families:
:mod:`pymc_dp.rows.predictor`).  Every row is computed by itself.
"""

from __future__ import annotations

import math

from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.rows import elementary

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
def value_and_slope(family: int, v: float, a: float, b: float) -> tuple[float, float]:
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
def _log_likelihoods(family: int, a: ndarray, b: ndarray, v: ndarray) -> None:
    for i in range(v.shape[0]):
        v[i] = value_and_slope(family, v[i], a[i], b[i])[0]


@compiled(error_model="numpy", inline="always")
def _slopes(family: int, a: ndarray, b: ndarray, v: ndarray) -> None:
    for i in range(v.shape[0]):
        slope = value_and_slope(family, v[i], a[i], b[i])[1]
        v[i] = slope if math.fabs(slope) < math.inf else 0.0


@compiled(error_model="numpy")
def log_likelihoods(family: int, a: ndarray, b: ndarray, v: ndarray) -> None:
    """v[i] <- log-likelihood at v[i], up to a constant of the row."""
    # a constant in each call, so that every loop has the formulas of one family only
    if family == _LOGIT:
        _log_likelihoods(_LOGIT, a, b, v)
    elif family == _LOG:
        _log_likelihoods(_LOG, a, b, v)
    elif family == _NORMAL:
        _log_likelihoods(_NORMAL, a, b, v)
    else:
        _log_likelihoods(_PROBIT, a, b, v)


@compiled(error_model="numpy")
def slopes(family: int, a: ndarray, b: ndarray, v: ndarray) -> None:
    """v[i] <- derivative of the log-likelihood at v[i], 0 where it is not finite."""
    if family == _LOGIT:
        _slopes(_LOGIT, a, b, v)
    elif family == _LOG:
        _slopes(_LOG, a, b, v)
    elif family == _NORMAL:
        _slopes(_NORMAL, a, b, v)
    else:
        _slopes(_PROBIT, a, b, v)


@compiled(error_model="numpy")
def steepest(family: int, a: ndarray, b: ndarray, v: ndarray) -> None:
    """v[i] <- a bound on |l'(v[i])| whatever the outcome of the row; 0 where there is none.

    The bound for counts is on how much they fall short of their mean, or exceed it if they are at
    most 1.
    """
    for i in range(v.shape[0]):
        x = v[i]
        if family == _LOGIT:
            successes = -value_and_slope(family, x, 0.0, b[i])[1]
            failures = value_and_slope(family, x, b[i], b[i])[1]
            v[i] = max(successes, failures)
        elif family == _LOG:
            mean = -value_and_slope(family, x, 0.0, b[i])[1]
            v[i] = max(mean, 1.0 - mean)
        elif family == _PROBIT:
            one = value_and_slope(family, x, a[i], b[i])[1]
            other = value_and_slope(family, x, -a[i], b[i])[1]
            v[i] = max(math.fabs(one), math.fabs(other))
        else:
            v[i] = 0.0
