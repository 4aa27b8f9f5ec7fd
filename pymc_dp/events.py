"""Privacy events: what one release was, as frozen data that an accountant can only read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pymc_dp._checks import check_number, check_probability

__all__ = ["MU2_UNIT", "GaussianEvent", "SubsampledGaussianEvent"]

MU2_UNIT = 2**40
"""Ledger units in one unit of squared Gaussian-DP mu: a ledger counts multiples of 2^-40."""


@dataclass(frozen=True, slots=True)
class GaussianEvent:
    """One release of a query with Gaussian noise.

    Guarantee
    ---------
    A query of l2 sensitivity Δ released with noise of standard deviation σ = τΔ is (1/τ)-GDP
    (Dong, Roth & Su 2022, Theorem 1), so it uses 1/τ² of squared mu. Squared mu adds up under
    fully adaptive composition, hence the sum of `cost` over the events of a transcript bounds
    what the transcript has used.

    Parameters
    ----------
    mechanism : str
        Name of the query that is released, for instance ``"gradient"``.
    noise_multiplier : float
        τ = σ/Δ, dimensionless; positive and finite.

    Raises
    ------
    ValueError
        If `mechanism` is empty or `noise_multiplier` is not a positive finite number.
    """

    mechanism: str
    noise_multiplier: float

    def __post_init__(self) -> None:
        _check_name(self.mechanism)
        object.__setattr__(self, "noise_multiplier", _check_noise(self.noise_multiplier))

    @property
    def cost(self) -> int:
        """Squared mu of the release in ledger units, ceil(2^40/τ²), at least 1.

        The noise multiplier is a float and therefore an exact rational: the ceiling is taken in
        integer arithmetic, so the cost is never below the truth and sums of costs never round.
        """
        return math.ceil(MU2_UNIT / Fraction(self.noise_multiplier) ** 2)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; floats survive JSON exactly."""
        return {
            "event": "gaussian",
            "mechanism": self.mechanism,
            "noise_multiplier": self.noise_multiplier,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GaussianEvent:
        """Rebuild an event from `to_dict`.

        Raises
        ------
        ValueError
            If `values` does not describe a Gaussian event.
        """
        _check_entries(values, "gaussian", "Gaussian event", {"mechanism", "noise_multiplier"})
        return cls(values["mechanism"], values["noise_multiplier"])


@dataclass(frozen=True, slots=True)
class SubsampledGaussianEvent:
    """One release, with Gaussian noise, of a sum over a Poisson batch.

    Every unit is in the batch with probability q, independently of all others and of earlier
    batches; the contribution of a unit has an l2 norm of at most C; noise of standard deviation σ
    is added to their sum.

    Guarantee
    ---------
    The privacy loss is at most that of a pair of mixtures of normals: under ``add_or_remove_one``
    (1 - q) N(0, σ²) + q N(C, σ²) against N(0, σ²), in either order; under ``replace_one`` that
    with means C and -C.  :mod:`pymc_dp.accounting.subsampled` composes them.

    Assumptions
    -----------
    The batch is a Poisson sample, and which units are in it stays secret.  Batches of a fixed size
    cost several times as much (:func:`pymc_dp.accounting.subsampled.fixed_size_epsilon`).

    Weaknesses
    ----------
    The loss is not Gaussian, so no sum of squared mu describes it: a plan of such releases is
    fixed beforehand and reserved as a whole.

    Parameters
    ----------
    mechanism : str
        Name of the query that is released, for instance ``"batch gradient"``.
    noise_multiplier : float
        s = σ/C, positive and finite, with C the largest norm of *one* unit's contribution under
        both neighbouring relations.  (The sensitivity in `GaussianEvent` is 2C under
        ``replace_one``; here the accountant knows that.)
    sampling_probability : float
        q, in (0, 1].

    Raises
    ------
    ValueError
        If an argument is out of its range.
    """

    mechanism: str
    noise_multiplier: float
    sampling_probability: float

    def __post_init__(self) -> None:
        _check_name(self.mechanism)
        object.__setattr__(self, "noise_multiplier", _check_noise(self.noise_multiplier))
        probability = check_probability("sampling_probability", self.sampling_probability)
        object.__setattr__(self, "sampling_probability", probability)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; floats survive JSON exactly."""
        return {
            "event": "subsampled_gaussian",
            "mechanism": self.mechanism,
            "noise_multiplier": self.noise_multiplier,
            "sampling_probability": self.sampling_probability,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SubsampledGaussianEvent:
        """Rebuild an event from `to_dict`.

        Raises
        ------
        ValueError
            If `values` does not describe a subsampled Gaussian event.
        """
        names = {"mechanism", "noise_multiplier", "sampling_probability"}
        _check_entries(values, "subsampled_gaussian", "subsampled Gaussian event", names)
        return cls(values["mechanism"], values["noise_multiplier"], values["sampling_probability"])


def _check_name(mechanism: object) -> None:
    if not isinstance(mechanism, str) or not mechanism:
        raise ValueError("mechanism must be a non-empty string, such as 'gradient'")


def _check_noise(noise_multiplier: object) -> float:
    value = check_number("noise_multiplier", noise_multiplier)
    if value <= 0:
        raise ValueError(f"noise_multiplier must be positive, not {value}")
    return value


def _check_entries(values: Mapping[str, Any], kind: str, what: str, names: set[str]) -> None:
    if values.get("event") != kind:
        raise ValueError(f"not a {what}: 'event' is {values.get('event')!r}")
    if missing := names - set(values):
        raise ValueError(f"a {what} needs the entries {sorted(missing)}")
