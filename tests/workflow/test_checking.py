"""Private predictive checks: p-values under the model, power, what is released and what it costs."""

from __future__ import annotations

import math

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import stats

import pymc_dp as dp
from pymc_dp.base.matrices import Coordinates
from pymc_dp.errors import BudgetExceeded, UnsafeModel, UnsafeRelease
from pymc_dp.privacy.accounting import mu_from_budget, units_from_mu
from pymc_dp.privacy.answer import Grid, Query, VectorSum
from pymc_dp.privacy.holder import Holder
from pymc_dp.privacy.noise import insecure_noise
from pymc_dp.records.extraction import extract
from pymc_dp.records.units import RecordStore
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from pymc_dp.workflow.checking import discrepancies, judge
from pymc_dp.workflow.discrepancies import Discrepancies, below, function, named
from pymc_dp.workflow.estimates import Estimate, estimate_of
from tests import models

pytestmark = pytest.mark.filterwarnings(
    "ignore:These data already have a budget:UserWarning",
    "ignore:The normal approximation is unreliable:UserWarning",
    "ignore:These draws are about as wide:UserWarning",
)

RELATIONS = ("replace_one", "add_or_remove_one")
STATISTICS = [named("mean"), named("dispersion"), named("zeros"), below(2.0)]
GROUPS, TRUTH = 3, np.array([0.2, 0.5, -0.4, 0.1])


def at(mean: np.ndarray, raw: np.ndarray, noise: np.ndarray | None = None) -> Estimate:
    """An estimate with an uninformative prior and noise of this covariance in its score."""
    extra = 0.0 if noise is None else raw @ noise @ raw
    return Estimate.of(mean, raw, raw + extra, raw)


# -- p-values under the model ---------------------------------------------------------------------


class PoissonStudy:
    """Data of a Poisson regression with group effects, fitted by maximum likelihood."""

    def __init__(self, n: int, by: str | None = None) -> None:
        rng = np.random.default_rng(0)
        self.n, self.x, self.group = n, rng.normal(size=n), rng.integers(0, GROUPS, n)
        self.design = np.column_stack([self.x, np.eye(GROUPS)[self.group]])
        with pm.Model() as model:
            b, a = pm.Normal("b", 0, 100), pm.Normal("a", 0, 100, shape=GROUPS)
            x, group = pm.Data("x", self.x), pm.Data("group", self.group)
            pm.Poisson("y", pt.exp(b * x + a[group]), observed=rng.poisson(1.0, n))
        d = GROUPS + 1
        self.engine = RowEngine.of(extract(model), Coordinates(np.zeros(d), np.eye(d)))
        guess = at(np.zeros(d), np.eye(d) / n)
        self.spec = discrepancies(self.engine, guess, STATISTICS, n, model, by, None)
        leaves = [leaf.source for leaf in self.engine.groups[0].functions.graph.leaves]
        [self.leaf] = [k for k, s in enumerate(leaves) if s not in (model["x"], model["group"])]

    def fit(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        beta = TRUTH.copy()
        for _ in range(8):
            mu = np.exp(self.design @ beta)
            information = (self.design.T * mu) @ self.design
            beta = beta + np.linalg.solve(information, self.design.T @ (y - mu))
        return beta, information

    def check(self, rng, noise_sd: float, noise_in_fit: float, y: np.ndarray):
        beta, information = self.fit(y)
        raw = np.linalg.inv(information)
        noise = noise_in_fit * information
        beta = beta + raw @ rng.multivariate_normal(np.zeros(len(raw)), noise)
        estimate = at(beta, raw, noise)
        [group] = self.engine.groups
        arrays = list(group.store.read())
        arrays[self.leaf] = y.astype(arrays[self.leaf].dtype)
        engine = self.engine.on([RowGroup(group.functions, RecordStore(arrays), None)], self.n)
        spec = Discrepancies(
            estimate.coordinates,
            self.spec.observed,
            self.spec.statistics,
            self.spec.weight,
            self.spec.by,
            self.spec.groups,
        )
        total = sum(block.sum(axis=1) for _, block in spec.blocks(engine))
        value = total + rng.normal(0.0, noise_sd, spec.size)
        by = None if spec.by is None else "group"
        return judge(spec, estimate, value, noise_sd, 1.0, "", by)


def uniform(study, repeats: int, noise_sd: float, noise_in_fit: float, dispersion: float = 0.0):
    rng, found = np.random.default_rng(1), []
    for _ in range(repeats):
        mu = np.exp(study.design @ TRUTH)
        if dispersion:
            mu = mu * rng.gamma(1 / dispersion, dispersion, study.n)
        check = study.check(rng, noise_sd, noise_in_fit, rng.poisson(mu))
        found.append([check.p_value, *check.table["p_value"]])
    return np.array(found)


CASES = {
    "no noise": (0.01, 1e-9),
    "noise in the release": (30.0, 1e-9),
    "noise in the fit": (0.01, 4.0),
    "noise in both": (5.0, 1.0),
}


@pytest.mark.compiled
@pytest.mark.parametrize("case", CASES)
def test_p_values_are_uniform_under_the_model(case: str) -> None:
    """Kolmogorov-Smirnov, false alarm 1e-4 for each; without an allowance for the fit it fails."""
    found = uniform(PoissonStudy(600), 60, *CASES[case])
    columns = [0, 2, 3, 4]  # the mean is fitted: what is left is below first order
    assert min(stats.kstest(found[:, k], "uniform").pvalue for k in columns) > 1e-4


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("by", [None, "group"])
@pytest.mark.parametrize("case", CASES)
def test_p_values_are_uniform_under_the_model_in_many_data_sets(case: str, by: str | None) -> None:
    found = uniform(PoissonStudy(1500, by), 500, *CASES[case])
    free = [k for k in range(found.shape[1]) if k == 0 or (k - 1) % len(STATISTICS)]
    assert min(stats.kstest(found[:, k], "uniform").pvalue for k in free) > 1e-4
