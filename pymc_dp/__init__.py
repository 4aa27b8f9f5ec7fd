"""pymc_dp: differentially private Bayesian inference for PyMC."""

from __future__ import annotations

from pymc_dp import audit
from pymc_dp.budget import PrivacyBudget, get_budget
from pymc_dp.clusters.dask import from_dask
from pymc_dp.errors import (
    BudgetExceeded,
    LedgerError,
    NotFactorizable,
    OwnerUnavailable,
    PlanMismatch,
    PrivacyError,
    UnsafeModel,
    UnsafeRelease,
)
from pymc_dp.owners.analyst import Owners
from pymc_dp.owners.study import Owner
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.publication.publish import privacy_statement, statement_facts
from pymc_dp.publication.release import posterior_mean, release
from pymc_dp.published.making import PublishedStatistic, release_statistic
from pymc_dp.published.releases import (
    DiscreteGaussianRelease,
    ExponentialMechanismRelease,
    GaussianRelease,
    GeometricRelease,
    KNormGradientRelease,
    LaplaceRelease,
    ObjectivePerturbationRelease,
    RandomizedResponse,
    Release,
    clamp,
    present,
)
from pymc_dp.published.step import ConjugateNormal, PrivacyAwareGibbs
from pymc_dp.records.bounds import bounds
from pymc_dp.reports.budgets import plot_budget, plot_effective_draws, plot_epsilon_delta
from pymc_dp.reports.clipping import clip_advice, clipping_report, plot_clip_advice
from pymc_dp.reports.comparison import compare_accountants
from pymc_dp.reports.diagnostics import inefficiency, mmd
from pymc_dp.reports.page import report
from pymc_dp.reports.posteriors import (
    plot_acceptance,
    plot_gibbs_acceptance,
    plot_posterior_comparison,
)
from pymc_dp.sampling import install_guard as _install_guard
from pymc_dp.sampling import sample
from pymc_dp.steps import (
    DPHMC,
    DPSGLD,
    DPSGNHT,
    DPBarker,
    DPLangevin,
    DPPenalty,
    ExponentialFamilyPenalty,
)
from pymc_dp.steps.laplace import find_MAP, laplace
from pymc_dp.subsampling import HMCECS, SGHMC, SGLD, SGNHT, resample_signed, signed_expectation
from pymc_dp.workflow.checking import PredictiveCheck, predictive_check
from pymc_dp.workflow.comparing import Comparison, compare
from pymc_dp.workflow.predicting import predict, sample_posterior_predictive
from pymc_dp.workflow.rehearsal import Rehearsal, rehearse

__version__ = "0.1.0"

__all__ = [
    "DPHMC",
    "DPSGLD",
    "DPSGNHT",
    "HMCECS",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "BudgetExceeded",
    "Comparison",
    "ConjugateNormal",
    "DPBarker",
    "DPLangevin",
    "DPPenalty",
    "DiscreteGaussianRelease",
    "ExponentialFamilyPenalty",
    "ExponentialMechanismRelease",
    "GaussianRelease",
    "GeometricRelease",
    "KNormGradientRelease",
    "LaplaceRelease",
    "Ledger",
    "LedgerError",
    "NotFactorizable",
    "ObjectivePerturbationRelease",
    "Owner",
    "OwnerUnavailable",
    "Owners",
    "PlanMismatch",
    "PredictiveCheck",
    "PrivacyAwareGibbs",
    "PrivacyBudget",
    "PrivacyError",
    "PublishedStatistic",
    "RandomizedResponse",
    "Rehearsal",
    "Release",
    "UnsafeModel",
    "UnsafeRelease",
    "audit",
    "bounds",
    "clamp",
    "clip_advice",
    "clipping_report",
    "compare",
    "compare_accountants",
    "find_MAP",
    "from_dask",
    "get_budget",
    "inefficiency",
    "laplace",
    "mmd",
    "plot_acceptance",
    "plot_budget",
    "plot_clip_advice",
    "plot_effective_draws",
    "plot_epsilon_delta",
    "plot_gibbs_acceptance",
    "plot_posterior_comparison",
    "posterior_mean",
    "predict",
    "predictive_check",
    "present",
    "privacy_statement",
    "rehearse",
    "release",
    "release_statistic",
    "report",
    "resample_signed",
    "sample",
    "sample_posterior_predictive",
    "signed_expectation",
    "statement_facts",
]

_install_guard()
