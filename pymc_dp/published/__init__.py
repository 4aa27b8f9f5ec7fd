"""Bayesian inference from statistics that were published with privacy noise."""

from __future__ import annotations

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

__all__ = [
    "ConjugateNormal",
    "DiscreteGaussianRelease",
    "ExponentialMechanismRelease",
    "GaussianRelease",
    "GeometricRelease",
    "KNormGradientRelease",
    "LaplaceRelease",
    "ObjectivePerturbationRelease",
    "PrivacyAwareGibbs",
    "PublishedStatistic",
    "RandomizedResponse",
    "Release",
    "clamp",
    "present",
    "release_statistic",
]
