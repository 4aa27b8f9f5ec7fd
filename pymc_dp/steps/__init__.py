"""Step methods of PyMC, thin, one per public class; and approximations that need no chain."""

from __future__ import annotations

from pymc_dp.steps.exponential import ExponentialFamilyPenalty
from pymc_dp.steps.hmc import DPHMC
from pymc_dp.steps.langevin import DPLangevin
from pymc_dp.steps.penalty import DPBarker, DPPenalty
from pymc_dp.steps.sgmcmc import DPSGLD, DPSGNHT

__all__ = [
    "DPHMC",
    "DPSGLD",
    "DPSGNHT",
    "DPBarker",
    "DPLangevin",
    "DPPenalty",
    "ExponentialFamilyPenalty",
]
