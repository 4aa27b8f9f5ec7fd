"""What can be said about draws, and about clipping, beside R-hat."""

from __future__ import annotations

from pymc_dp.report.diagnostics.clipping import clipping_report
from pymc_dp.report.diagnostics.discrepancy import mmd
from pymc_dp.report.diagnostics.efficiency import inefficiency

__all__ = ["clipping_report", "inefficiency", "mmd"]
