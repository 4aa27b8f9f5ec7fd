"""PyMC step methods: thin, one per public class."""

from __future__ import annotations

from pymc_dp.steps.exponential import ExponentialFamilyPenalty
from pymc_dp.steps.hmc import DPHMC
from pymc_dp.steps.langevin import DPLangevin
from pymc_dp.steps.penalty import DPPenalty

__all__ = ["DPHMC", "DPLangevin", "DPPenalty", "ExponentialFamilyPenalty"]
