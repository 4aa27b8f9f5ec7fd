"""What releases cost: events, conversions between (epsilon, delta) and mu, noise for a budget.

A mechanism is mu-GDP when telling two neighbours apart is no easier than telling N(0, 1) from N(mu,
1). Its exact curve is (Dong, Roth & Su 2022, Corollary 1; Balle & Wang 2018, Theorem 8)

    delta(epsilon) = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2).

Every function errs on the private side. `delta_from_mu` returns the computed value plus a bound on
its rounding error. The inverses only return points at which that upper bound was found to hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from scipy.special import erfcx, ndtr, ndtri_exp

from pymc_dp.base.checks import (
    check_delta,
    check_epsilon,
    check_integer,
    check_number,
    check_positive,
    check_probability,
)

BATCHES = "batches"
"""In a plan: what describes its releases on batches of records."""
MU2_UNIT = 2**40
"""Ledger units in one unit of squared Gaussian-DP mu: a ledger counts multiples of 2^-40."""
_ROUNDOFF = 2.0**-53
_FUNCTION_ERROR = 16 * _ROUNDOFF  # relative, of erfcx and ndtr; SciPy's are within 8 units here
_SMALLEST = math.ulp(0.0)
_TAIL = 40.0  # Phi(-40) < e^-800 is below the smallest float, so 1 - Phi(40) rounds to 0


# -- events --------------------------------------------------------------------------------------


class _Event:
    """What events have in common: they are written as plain values, which survive JSON exactly."""

    __slots__ = ()
    kind: ClassVar[str]
    mechanism: str
    noise_multiplier: float

    def _check(self) -> None:
        if not isinstance(self.mechanism, str) or not self.mechanism:
            raise ValueError("mechanism must be a non-empty string, such as 'gradient'")
        value = check_positive("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"event": self.kind, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild an event from `to_dict`."""
        if values.get("event") != cls.kind:
            raise ValueError(f"not a {cls.kind} event: 'event' is {values.get('event')!r}")
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if missing := set(names) - set(values):
            raise ValueError(f"a {cls.kind} event needs the entries {sorted(missing)}")
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True, slots=True)
class GaussianEvent(_Event):
    """One release of a query with Gaussian noise; `noise_multiplier` is τ = σ/Δ, Δ the l2
    sensitivity.

    *Guarantee.* (1/τ)-GDP (Dong, Roth & Su 2022, Theorem 1), so it uses 1/τ² of squared mu. Squared
    mu adds up under fully adaptive composition: the sum of `cost` over the events of a transcript
    bounds what the transcript has used.
    """

    kind: ClassVar[str] = "gaussian"
    mechanism: str
    noise_multiplier: float

    def __post_init__(self) -> None:
        self._check()

    @property
    def cost(self) -> int:
        """Squared mu in ledger units, ceil(2^40/τ²): in integers, since a float τ is an exact
        rational. So the cost is never below the truth, and sums of costs never round.
        """
        return math.ceil(MU2_UNIT / Fraction(self.noise_multiplier) ** 2)


@dataclass(frozen=True, slots=True)
class SubsampledGaussianEvent(_Event):
    """One release, with Gaussian noise of standard deviation σ, of a sum over a Poisson batch.

    Every unit is in the batch with probability q = `sampling_probability`, independently of all
    others and of earlier batches; its contribution has an l2 norm of at most C. `noise_multiplier`
    is s = σ/C under both neighbouring relations. (`GaussianEvent` uses the sensitivity, 2C under
    ``replace_one``; here the accountant applies that factor.)

    *Guarantee.* The privacy loss is at most that of a pair of mixtures of normals: under
    ``add_or_remove_one`` (1 - q) N(0, σ²) + q N(C, σ²) against N(0, σ²), in either order; under
    ``replace_one`` that with means C and -C. `pymc_dp.privacy.subsampled` composes them.

    *Assumptions.* The batch is a Poisson sample, and which units are in it stays secret. Batches of
    a fixed size cost several times as much (`FixedBatchGaussianEvent`).

    *Weaknesses.* The loss is not Gaussian, so no sum of squared mu describes it: a plan of such
    releases is fixed beforehand and reserved as a whole.
    """

    kind: ClassVar[str] = "subsampled_gaussian"
    mechanism: str
    noise_multiplier: float
    sampling_probability: float

    def __post_init__(self) -> None:
        self._check()
        probability = check_probability("sampling_probability", self.sampling_probability)
        object.__setattr__(self, "sampling_probability", probability)

    @property
    def batch(self) -> str:
        """The batch in words."""
        return f"Poisson batch (probability {self.sampling_probability:.3g})"


@dataclass(frozen=True, slots=True)
class FixedBatchGaussianEvent(_Event):
    """One release, with Gaussian noise, of a sum over a batch of exactly B of n units.

    The batch is a uniformly random subset, drawn without replacement for each release;
    contributions and `noise_multiplier` are as in `SubsampledGaussianEvent`.

    *Guarantee.* Under ``replace_one``, sums of neighbours over the same batch are at most 2C apart,
    and the replaced unit is in a batch with probability B/n. Wang, Balle & Kasiviswanathan (2019,
    Theorem 27) bound the Rényi divergences; `pymc_dp.privacy.subsampled` adds them up.

    *Assumptions.* n is public, and which units are in a batch stays secret.

    *Weaknesses.* 2 to 7 times the epsilon of Poisson batches of the same mean size (more below
    0.05): no tight bound is known. With 1000 releases, q = 0.01 and delta = 1e-6, epsilon is 23.29
    against 3.21 (s = 1), 4.02 against 1.37 (s = 2) and 1.24 against 0.51 (s = 5). No bound for
    ``add_or_remove_one``.
    """

    kind: ClassVar[str] = "fixed_batch_gaussian"
    mechanism: str
    noise_multiplier: float
    batch_size: int
    n_units: int

    def __post_init__(self) -> None:
        self._check()
        n = check_integer("n_units", self.n_units, minimum=1)
        size = check_integer("batch_size", self.batch_size, minimum=1)
        if size > n:
            raise ValueError(f"batch_size must be at most n_units = {n}, not {size}")
        object.__setattr__(self, "n_units", n)
        object.__setattr__(self, "batch_size", size)

    @property
    def sampling_probability(self) -> float:
        """B/n, the probability of each unit to be in a batch."""
        return self.batch_size / self.n_units

    @property
    def batch(self) -> str:
        """The batch in words."""
        return f"batch of exactly {self.batch_size:,} of {self.n_units:,} units"


#: A release on a batch of either kind.
BatchEvent: TypeAlias = SubsampledGaussianEvent | FixedBatchGaussianEvent


def batch_event(values: Mapping[str, Any]) -> BatchEvent:
    """Rebuild a release on batches from `to_dict`."""
    if values.get("event") == FixedBatchGaussianEvent.kind:
        return FixedBatchGaussianEvent.from_dict(values)
    return SubsampledGaussianEvent.from_dict(values)


# -- from mu to epsilon and delta, and back ------------------------------------------------------


def _check_mu(mu: object) -> float:
    value = check_number("mu", mu)
    if value < 0:
        raise ValueError(f"mu must not be negative, not {value}")
    return value


def delta_from_mu(epsilon: float, mu: float) -> float:
    """Upper bound of delta(epsilon; mu), within about 1e-12 (1 + 1/mu) relative of it. With a =
    mu/2 - epsilon/mu and s = mu/2 + epsilon/mu, e^epsilon phi(s) = phi(a), hence e^epsilon Phi(-s)
    = exp(-a²/2) erfcx(s/sqrt 2)/2. So e^epsilon, which overflows, is not needed.
    """
    if mu == 0:
        return 0.0
    s = mu / 2 + epsilon / mu
    a = mu / 2 - epsilon / mu
    if math.isinf(s):  # epsilon/mu overflows only where Phi(a) is far below the smallest float
        return _SMALLEST
    slack = 4 * _ROUNDOFF * s  # bounds the rounding error of both a and s
    if a > _TAIL:
        return 1.0
    if a + slack < -_TAIL:
        return _SMALLEST
    if slack > 1e-6:  # epsilon above 1e9: a has lost its digits, but delta <= Phi(a) always
        return min(1.0, float(ndtr(a + slack)) * (1 + 1e-9) + _SMALLEST)
    half = math.exp(-a * a / 2) / 2
    half_error = abs(a) * slack + (a * a / 2 + 4) * _ROUNDOFF
    # |d log erfcx(x)/dx| <= sqrt 2 for x >= 0, so an error of slack/sqrt 2 in x costs `slack`.
    tail_error = _FUNCTION_ERROR + slack
    tail = float(erfcx(s / math.sqrt(2)))
    if a < 0:  # both terms share the factor `half`, so its error is relative to the difference
        head = float(erfcx(-a / math.sqrt(2)))
        value = half * (head - tail)
        error = half * (head + tail) * tail_error + abs(value) * half_error
    else:  # phi(a) <= Phi(a): an error of `slack` in a is at most that much relative
        head = float(ndtr(a))
        value = head - half * tail
        error = head * tail_error + half * tail * (tail_error + half_error)
    return min(1.0, (value + error) * (1 + 4 * _ROUNDOFF) + 4 * _SMALLEST)


def epsilon_from_mu(mu: float, delta: float) -> float:
    """Smallest epsilon >= 0 for which mu-GDP implies (epsilon, delta)-DP, rounded up."""
    mu, delta = _check_mu(mu), check_delta(delta)
    if delta_from_mu(0.0, mu) <= delta:
        return 0.0
    # delta <= Phi(a) <= exp(-a²/2)/2, so this start holds but for rounding.
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    while delta_from_mu(high, mu) > delta:
        high *= 2
        if math.isinf(high):
            raise ValueError(f"mu = {mu} is too large to be expressed as an epsilon")
    while high > 1e-300 and delta_from_mu(high / 2, mu) <= delta:
        high /= 2
    low = high / 2
    while low < (middle := low + (high - low) / 2) < high:
        if delta_from_mu(middle, mu) <= delta:
            high = middle
        else:
            low = middle
    return high


def mu_from_budget(epsilon: float, delta: float) -> float:
    """Largest mu for which mu-GDP implies (epsilon, delta)-DP, rounded down."""
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    low = 1.0
    while delta_from_mu(epsilon, low) > delta:
        low /= 2
    while delta_from_mu(epsilon, 2 * low) <= delta:
        low *= 2
    high = 2 * low
    while low < (middle := low + (high - low) / 2) < high:
        if delta_from_mu(epsilon, middle) <= delta:
            low = middle
        else:
            high = middle
    return low


def mu_from_pure(epsilon: float) -> float:
    """Smallest mu for which (epsilon, 0)-DP implies mu-GDP, rounded up.

    It is -2 Phi^-1(1 / (1 + e^epsilon)). The trade-off function of (epsilon, 0)-DP (Dong, Roth & Su
    2022, Proposition 2.5) is two lines that meet at (a, a), a = 1 / (1 + e^epsilon). That of mu-GDP
    is convex, symmetric, and passes through (0, 1) and (a, a), so it lies nowhere above; with a
    smaller mu it passes above (a, a).
    """
    half = -float(ndtri_exp(-np.logaddexp(0.0, check_epsilon(epsilon))))
    return 2.0 * half * (1.0 + 1e-12) + 1e-15


def units_from_mu(mu: float) -> int:
    """Ledger units that mu-GDP allows: floor(2^40 mu²), exact, hence never too many."""
    return math.floor(MU2_UNIT * Fraction(_check_mu(mu)) ** 2)


def mu_from_units(units: int) -> float:
    """Smallest float >= sqrt(units/2^40): mu_from_units(units_from_mu(mu)) <= mu."""
    return _root_above(Fraction(check_integer("units", units, minimum=0), MU2_UNIT))


def _root_above(square: Fraction) -> float:
    """Smallest float that is at least the square root, compared exactly."""
    root = math.sqrt(square)
    while Fraction(root) ** 2 < square:
        root = math.nextafter(root, math.inf)
    while root > 0 and Fraction(below := math.nextafter(root, 0.0)) ** 2 >= square:
        root = below
    return root


# -- from a budget and a plan to noise multipliers -----------------------------------------------


def smallest_noise_multiplier(cost: int) -> float:
    """Smallest float τ (compared exactly) for which one release costs at most `cost` ledger
    units.
    """
    return _root_above(Fraction(MU2_UNIT, check_integer("cost", cost, minimum=1)))


def calibrate(
    total: int, counts: Mapping[str, int], shares: Mapping[str, float]
) -> dict[str, GaussianEvent]:
    """Noise multipliers with which a fixed plan uses a budget of `total` ledger units.

    Mechanism k is released ``counts[k]`` times over all chains and iterations, and may use the
    fraction ``shares[k] / sum(shares)`` of `total`, in equal parts.

    *Guarantee.* ``sum(counts[k] * event[k].cost) <= total`` exactly: shares are divided as
    rationals, parts are rounded down to whole ledger units, and an event never costs more than its
    part.
    """
    total = check_integer("total", total, minimum=1)
    if not counts:
        raise ValueError("counts is empty: name at least one mechanism")
    if set(counts) != set(shares):
        differing = sorted(map(str, set(counts) ^ set(shares)))
        raise ValueError(f"counts and shares must name the same mechanisms; check {differing}")
    parts = {
        name: Fraction(check_positive(f"shares[{name!r}]", share)) for name, share in shares.items()
    }
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
