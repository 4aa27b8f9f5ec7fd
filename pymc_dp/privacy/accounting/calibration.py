"""From a budget and a plan to noise multipliers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from pymc_dp.base.checks import check_integer, check_number
from pymc_dp.privacy.events import MU2_UNIT, GaussianEvent


def smallest_noise_multiplier(cost: int) -> float:
    """Smallest float τ for which one release costs at most `cost` ledger units.

    It is the least τ with 2^40/τ² <= cost, compared exactly: the float below it would cost more.
    Rounding τ up rounds the privacy loss down. ValueError if `cost` is not a positive integer.
    """
    cost = check_integer("cost", cost, minimum=1)
    square = Fraction(MU2_UNIT, cost)
    tau = math.sqrt(square)
    while Fraction(tau) ** 2 < square:
        tau = math.nextafter(tau, math.inf)
    while Fraction(below := math.nextafter(tau, 0.0)) ** 2 >= square:
        tau = below
    return tau


def calibrate(
    total: int, counts: Mapping[str, int], shares: Mapping[str, float]
) -> dict[str, GaussianEvent]:
    """Noise multipliers with which a fixed plan uses a budget of `total` ledger units.

    Mechanism k is released ``counts[k]`` times over the whole plan (all chains, all iterations). It
    may use the fraction ``shares[k] / sum(shares)`` of `total`. Each of its releases gets an equal
    part, rounded down to whole ledger units (2^-40 of squared mu). ValueError if an argument is out
    of range, the two mappings name different mechanisms, or a release would get less than one unit.

    Guarantee
    ---------
    ``sum(counts[k] * event[k].cost) <= total`` exactly: shares are divided as rationals, parts are
    rounded down, and an event never costs more than its part.
    """
    total = check_integer("total", total, minimum=1)
    if not counts:
        raise ValueError("counts is empty: name at least one mechanism")
    if set(counts) != set(shares):
        differing = sorted(map(str, set(counts) ^ set(shares)))
        raise ValueError(f"counts and shares must name the same mechanisms; check {differing}")
    parts: dict[str, Fraction] = {}
    for name, share in shares.items():
        parts[name] = Fraction(check_number(f"shares[{name!r}]", share))
        if parts[name] <= 0:
            raise ValueError(f"shares[{name!r}] must be positive, not {share}")
    whole = sum(parts.values())
    events = {}
    for name, count in counts.items():
        count = check_integer(f"counts[{name!r}]", count, minimum=1)
        cost = math.floor(total * parts[name] / whole / count)
        if cost < 1:
            raise ValueError(
                f"the budget cannot pay for {count} releases of {name!r}: each would get less "
                "than the smallest charge (2^-40 of squared mu). Plan fewer draws or chains, give "
                f"{name!r} a larger share, or use a larger epsilon"
            )
        events[name] = GaussianEvent(name, smallest_noise_multiplier(cost))
    return events
