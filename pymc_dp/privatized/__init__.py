"""Bayesian inference from statistics that were published with privacy noise."""

from __future__ import annotations

from pymc_dp.privatized.conjugate import ConjugateNormal
from pymc_dp.privatized.making import PublishedStatistic, release_statistic
from pymc_dp.privatized.releases import (
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
from pymc_dp.privatized.step import PrivacyAwareGibbs

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
