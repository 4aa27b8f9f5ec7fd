"""Exact discrete Laplace noise, from operating-system entropy and integer arithmetic alone.

Canonne, Kamath & Steinke (2020), Algorithms 1 and 2.  Python integers are slow and exact; a
published statistic needs one draw per entry.
"""

from __future__ import annotations

import secrets
from fractions import Fraction


def discrete_laplace(size: int, scale: Fraction) -> list[int]:
    """Independent integers u with probability proportional to exp(-|u| / scale), scale > 0.

    *Guarantee.*  Exact, given uniform random bits: no floating-point number is involved.  Bits come
    from ``secrets``, never from a seed.

    *Weaknesses.*  The running time depends on the draws.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}.")
    return [_draw(scale.numerator, scale.denominator) for _ in range(size)]


def _draw(t: int, s: int) -> int:
    """One draw of scale t / s."""
    while True:
        u = secrets.randbelow(t)
        if not _happens(Fraction(u, t)):
            continue
        v = 0
        while _happens(Fraction(1)):
            v += 1
        y = (u + t * v) // s
        negative = secrets.randbits(1)
        if negative and y == 0:
            continue
        return -y if negative else y


def _happens(gamma: Fraction) -> bool:
    """True with probability exp(-gamma), 0 <= gamma <= 1."""
    k = 1
    while secrets.randbelow(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1
