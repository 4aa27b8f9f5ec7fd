"""Privacy events: what one release was, as frozen data that an accountant can only read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pymc_dp._checks import check_number

__all__ = ["MU2_UNIT", "GaussianEvent"]

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
        name: object = self.mechanism
        if not isinstance(name, str) or not name:
            raise ValueError("mechanism must be a non-empty string, such as 'gradient'")
        tau = check_number("noise_multiplier", self.noise_multiplier)
        if tau <= 0:
            raise ValueError(f"noise_multiplier must be positive, not {tau}")
        object.__setattr__(self, "noise_multiplier", tau)

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
        if values.get("event") != "gaussian":
            raise ValueError(f"not a Gaussian event: 'event' is {values.get('event')!r}")
        missing = {"mechanism", "noise_multiplier"} - set(values)
        if missing:
            raise ValueError(f"a Gaussian event needs the entries {sorted(missing)}")
        return cls(values["mechanism"], values["noise_multiplier"])
