"""Step-size multipliers from a randomised Halton sequence.

Owen (2017); Hoffman, Radul & Sountsov (2021) for its use with Hamiltonian trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def van_der_corput(index: int) -> float:
    """Radical inverse of ``index`` in base 2: 0, 1/2, 1/4, 3/4, 1/8, ..., in [0, 1)."""
    value, weight = 0.0, 0.5
    while index:
        index, bit = divmod(index, 2)
        value += weight * bit
        weight *= 0.5
    return value


@dataclass(frozen=True, slots=True)
class HaltonJitter:
    """Multipliers 1 + width * (2 u_t - 1), u_t the t-th van der Corput point + `shift`, modulo 1.
    *Guarantee.* The multiplier depends on the iteration only, never on the state, so a kernel that
    leaves the posterior stationary at every step size still does.
    """

    width: float
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.width < 1.0:
            raise ValueError(
                f"The jitter `width` must be in [0, 1) so that step sizes stay positive, "
                f"got {self.width}."
            )

    @classmethod
    def random(cls, rng: np.random.Generator, width: float) -> HaltonJitter:
        """Sequence with a shift drawn from ``rng``."""
        return cls(width, rng.random())

    def __call__(self, iteration: int) -> float:
        """Multiplier for the given iteration, counted from 0."""
        u = (van_der_corput(iteration) + self.shift) % 1.0
        return 1.0 + self.width * (2.0 * u - 1.0)
