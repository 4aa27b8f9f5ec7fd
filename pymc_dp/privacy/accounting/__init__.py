"""What releases cost: conversions between (epsilon, delta) and mu, and noise for a budget."""

from __future__ import annotations

from pymc_dp.privacy.accounting.calibration import calibrate, smallest_noise_multiplier
from pymc_dp.privacy.accounting.comparison import compare_accountants
from pymc_dp.privacy.accounting.fixed_size import fixed_size_epsilon
from pymc_dp.privacy.accounting.gdp import (
    delta_from_mu,
    epsilon_from_mu,
    mu_from_budget,
    mu_from_pure,
    mu_from_units,
    units_from_mu,
)
from pymc_dp.privacy.accounting.subsampled import epsilon_of, room_beside

__all__ = [
    "calibrate",
    "compare_accountants",
    "delta_from_mu",
    "epsilon_from_mu",
    "epsilon_of",
    "fixed_size_epsilon",
    "mu_from_budget",
    "mu_from_pure",
    "mu_from_units",
    "room_beside",
    "smallest_noise_multiplier",
    "units_from_mu",
]
