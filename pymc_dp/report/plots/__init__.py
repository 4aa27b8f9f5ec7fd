"""Pictures of budgets, posteriors and chains: functions that return matplotlib axes.

They draw what their arguments say and nothing else: no record is read and nothing is spent.
"""

from __future__ import annotations

from pymc_dp.report.plots.acceptance import plot_acceptance, plot_gibbs_acceptance
from pymc_dp.report.plots.clipping import plot_clip_advice
from pymc_dp.report.plots.expected import plot_effective_draws
from pymc_dp.report.plots.guarantees import plot_epsilon_delta
from pymc_dp.report.plots.posteriors import plot_posterior_comparison
from pymc_dp.report.plots.spending import plot_budget

__all__ = [
    "plot_acceptance",
    "plot_budget",
    "plot_clip_advice",
    "plot_effective_draws",
    "plot_epsilon_delta",
    "plot_gibbs_acceptance",
    "plot_posterior_comparison",
]
