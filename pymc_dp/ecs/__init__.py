"""Samplers that see samples of the records.  They are not private."""

from __future__ import annotations

from pymc_dp.ecs.signs import resample_signed, signed_expectation
from pymc_dp.ecs.step import HMCECS

__all__ = ["HMCECS", "resample_signed", "signed_expectation"]
