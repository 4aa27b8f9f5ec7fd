"""Samplers that see samples of the records.  They are not private."""

from __future__ import annotations

from pymc_dp.subsampling.hmcecs import HMCECS
from pymc_dp.subsampling.signs import resample_signed, signed_expectation
from pymc_dp.subsampling.stochastic import SGHMC, SGLD, SGNHT

__all__ = ["HMCECS", "SGHMC", "SGLD", "SGNHT", "resample_signed", "signed_expectation"]
