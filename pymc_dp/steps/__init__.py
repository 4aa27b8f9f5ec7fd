"""PyMC step methods: thin, one per public class."""

from __future__ import annotations

from pymc_dp.steps.hmc import DPHMC
from pymc_dp.steps.langevin import DPLangevin
from pymc_dp.steps.penalty import DPBarker, DPPenalty

__all__ = ["DPHMC", "DPBarker", "DPLangevin", "DPPenalty"]
