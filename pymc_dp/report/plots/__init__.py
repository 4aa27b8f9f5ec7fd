"""Pictures of budgets, posteriors and chains: functions that return matplotlib axes.

They draw what their arguments say and nothing else: no record is read and nothing is spent.
"""

from __future__ import annotations

from pymc_dp.report.plots.budgets import plot_budget, plot_epsilon_delta
from pymc_dp.report.plots.planning import plot_clip_advice, plot_effective_draws
from pymc_dp.report.plots.results import (
    plot_acceptance,
    plot_gibbs_acceptance,
    plot_posterior_comparison,
)

__all__ = [
    "plot_acceptance",
    "plot_budget",
    "plot_clip_advice",
    "plot_effective_draws",
    "plot_epsilon_delta",
    "plot_gibbs_acceptance",
    "plot_posterior_comparison",
]
