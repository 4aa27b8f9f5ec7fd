"""What releases cost: conversions between (epsilon, delta) and mu, and noise for a budget."""

from __future__ import annotations

from pymc_dp.accounting.calibration import calibrate, smallest_noise_multiplier
from pymc_dp.accounting.gdp import (
    delta_from_mu,
    epsilon_from_mu,
    mu_from_budget,
    mu_from_pure,
    mu_from_units,
    units_from_mu,
)

__all__ = [
    "calibrate",
    "delta_from_mu",
    "epsilon_from_mu",
    "mu_from_budget",
    "mu_from_pure",
    "mu_from_units",
    "smallest_noise_multiplier",
    "units_from_mu",
]
