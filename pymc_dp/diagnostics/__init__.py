"""What can be said about draws, and about clipping, beside R-hat."""

from __future__ import annotations

from pymc_dp.diagnostics.clipping import clipping_report
from pymc_dp.diagnostics.discrepancy import mmd
from pymc_dp.diagnostics.efficiency import inefficiency

__all__ = ["clipping_report", "inefficiency", "mmd"]
