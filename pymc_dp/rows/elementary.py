"""Elementary functions without branches or calls, so that loops over rows use vector instructions.

A loop that calls the mathematics library computes one row at a time.  These are sequences of
additions, multiplications, one division and one rounding, which round alike in scalar and vector
form: a record gives the same bits wherever it stands.
"""

from __future__ import annotations

import numpy as np

from pymc_dp.base.jit import compiled

_LOG2_E = 1.4426950408889634
#: log 2 in two parts; a multiple of the first below 2^11 is exact.
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6
#: Adding it rounds to an integer, which then stands in the low bits.
_ROUNDING = 6755399441055744.0
#: Beyond these exp is 0 or infinite in double precision.
_LOWEST, _HIGHEST = -746.0, 709.782712893384


@compiled(error_model="numpy")
def exp(x: float) -> float:
    """The exponential function, with a relative error below 2^-51 where it is a normal number.

    x = k log 2 + r, |r| <= log(2)/2, exp(r) by the rational approximation of Moshier (Cephes,
    1984), and 2^k in two factors, so that small results lose precision gradually.
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

    2 artanh(s) with s = t / (2 + t) <= 1/3, by 16 terms of its series: the next is below
    3^-32 / 33 < 2^-55 of the first.
    """
    s = t / (2.0 + t)
    ss = s * s
    series = 1.0 / 31.0
    series = series * ss + 1.0 / 29.0
    series = series * ss + 1.0 / 27.0
    series = series * ss + 1.0 / 25.0
    series = series * ss + 1.0 / 23.0
    series = series * ss + 1.0 / 21.0
    series = series * ss + 1.0 / 19.0
    series = series * ss + 1.0 / 17.0
    series = series * ss + 1.0 / 15.0
    series = series * ss + 1.0 / 13.0
    series = series * ss + 1.0 / 11.0
    series = series * ss + 1.0 / 9.0
    series = series * ss + 1.0 / 7.0
    series = series * ss + 1.0 / 5.0
    series = series * ss + 1.0 / 3.0
    series = series * ss + 1.0
    return 2.0 * s * series
