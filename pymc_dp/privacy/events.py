"""Privacy events: what one release was, as frozen data that an accountant can only read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, Self, TypeAlias

from pymc_dp.base.checks import check_integer, check_number, check_probability

BATCHES = "batches"
"""In a plan: what describes its releases on batches of records."""
MU2_UNIT = 2**40
"""Ledger units in one unit of squared Gaussian-DP mu: a ledger counts multiples of 2^-40."""


class _Event:
    """What events have in common: they are written as plain values, which survive JSON exactly."""

    __slots__ = ()
    kind: ClassVar[str]
    mechanism: str
    noise_multiplier: float

    def _check(self) -> None:
        if not isinstance(self.mechanism, str) or not self.mechanism:
            raise ValueError("mechanism must be a non-empty string, such as 'gradient'")
        value = check_number("noise_multiplier", self.noise_multiplier)
        if value <= 0:
            raise ValueError(f"noise_multiplier must be positive, not {value}")
        object.__setattr__(self, "noise_multiplier", value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"event": self.kind, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild an event from `to_dict`; ValueError if `values` does not describe one."""
        if values.get("event") != cls.kind:
            raise ValueError(f"not a {cls.kind} event: 'event' is {values.get('event')!r}")
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if missing := set(names) - set(values):
            raise ValueError(f"a {cls.kind} event needs the entries {sorted(missing)}")
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True, slots=True)
class GaussianEvent(_Event):
    """One release of a query with Gaussian noise.

    `mechanism` names the query, ``"gradient"`` for instance. `noise_multiplier` is τ = σ/Δ,
    dimensionless; positive and finite.

    Guarantee
    ---------
    A query of l2 sensitivity Δ released with noise of standard deviation σ = τΔ is (1/τ)-GDP (Dong,
    Roth & Su 2022, Theorem 1), so it uses 1/τ² of squared mu. Squared mu adds up under fully
    adaptive composition, hence the sum of `cost` over the events of a transcript bounds what the
    transcript has used.
    """

    kind: ClassVar[str] = "gaussian"
    mechanism: str
    noise_multiplier: float

    def __post_init__(self) -> None:
        self._check()

    @property
    def cost(self) -> int:
        """Squared mu of the release in ledger units, ceil(2^40/τ²), at least 1.

        The noise multiplier is a float and therefore an exact rational: the ceiling is taken in
        integer arithmetic, so the cost is never below the truth and sums of costs never round.
        """
        return math.ceil(MU2_UNIT / Fraction(self.noise_multiplier) ** 2)


@dataclass(frozen=True, slots=True)
class SubsampledGaussianEvent(_Event):
    """One release, with Gaussian noise, of a sum over a Poisson batch.

    Every unit is in the batch with probability q, independently of all others and of earlier
    batches; the contribution of a unit has an l2 norm of at most C; noise of standard deviation σ
    is added to their sum. `noise_multiplier` is s = σ/C, with C the largest norm of *one* unit's
    contribution under both neighbouring relations.  (The sensitivity in `GaussianEvent` is 2C under
    ``replace_one``; here the accountant knows that.) `sampling_probability` is q, in (0, 1].

    Guarantee
    ---------
    The privacy loss is at most that of a pair of mixtures of normals: under ``add_or_remove_one``
    (1 - q) N(0, σ²) + q N(C, σ²) against N(0, σ²), in either order; under ``replace_one`` that with
    means C and -C.  `pymc_dp.privacy.subsampled` composes them.

    Assumptions
    -----------
    The batch is a Poisson sample, and which units are in it stays secret.  Batches of a fixed size
    cost several times as much (`FixedBatchGaussianEvent`).

    Weaknesses
    ----------
    The loss is not Gaussian, so no sum of squared mu describes it: a plan of such releases is fixed
    beforehand and reserved as a whole.
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

    The batch is a uniformly random subset, drawn without replacement for each release; the
    contribution of a unit has an l2 norm of at most C; noise of standard deviation σ is added to
    their sum. `noise_multiplier` is s = σ/C, as in `SubsampledGaussianEvent`.

    Guarantee
    ---------
    Under ``replace_one``, sums of neighbours over the same batch are at most 2C apart, and the unit
    that was replaced is in a batch with probability B/n.  Rényi divergences are bounded by Wang,
    Balle & Kasiviswanathan (2019, Theorem 27); `pymc_dp.privacy.subsampled` adds them up.

    Assumptions
    -----------
    n is public, and which units are in a batch stays secret.

    Weaknesses
    ----------
    2 to 7 times the epsilon of Poisson batches of the same mean size (more below 0.05): the bound
    is not tight, and no tight one is known, as no pair of neighbouring data sets is known to be the
    worst.  With 1000 releases, q = 0.01 and delta = 1e-6, epsilon is 23.29 against 3.21 (s = 1),
    4.02 against 1.37 (s = 2) and 1.24 against 0.51 (s = 5).  There is none for
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
    """Rebuild a release on batches, of whichever kind, from `to_dict`; ValueError if it is none."""
    if values.get("event") == FixedBatchGaussianEvent.kind:
        return FixedBatchGaussianEvent.from_dict(values)
    return SubsampledGaussianEvent.from_dict(values)
