"""NumPy's floating-point warnings are about values of single records: none may come out."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.extraction import extract
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.rows.groups import is_flat

N = 20_011
QUICK = {"mode": INTERPRETED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "extreme"),
    [
        (dp.DPHMC, 5e-324),
        (dp.DPLangevin, 1e308),
        pytest.param(dp.DPLangevin, 5e-324, marks=pytest.mark.exhaustive),
        pytest.param(dp.DPPenalty, 1e308, marks=pytest.mark.exhaustive),
        pytest.param(dp.DPHMC, 1e308, marks=pytest.mark.exhaustive),
        pytest.param(dp.DPPenalty, 5e-324, marks=pytest.mark.exhaustive),
    ],
)
def test_an_extreme_record_raises_no_warning(step: Any, extreme: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2))
    y = rng.poisson(np.exp(x @ [0.5, -0.5]))
    exposure = np.ones(N)
    exposure[7] = extreme
    x[11] = extreme
    with pm.Model():
        beta = pm.Normal("beta", 0.0, 1.0, shape=2)
        scale = pm.Data("exposure", exposure)
        pm.Poisson("y", scale * pm.math.exp(pm.math.dot(pm.Data("x", x), beta)), observed=y)
        dp.PrivacyBudget(epsilon=8.0, delta=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            made = step(draws=10, tune=0, chains=1, progressbar=False)
            dp.sample(10, tune=0, chains=1, step=made, cores=1, progressbar=False)


def beta_regression() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 2))
    y = rng.beta(4.0, 4.0, 300)
    x[5], y[[3, 4]] = 1e308, [5e-324, 1.0 - 2.0**-53]
    mu = pm.math.invlogit(pm.math.dot(x, pm.Normal("b", 0.0, 1.0, shape=2)))
    pm.Beta("y", mu=mu, nu=pm.Gamma("nu", 2.0, 0.1), observed=y)


def varying_slopes() -> None:
    rng = np.random.default_rng(2)
    group, x = np.arange(300) % 4, rng.normal(size=300)
    y = 1.0 + 0.5 * x + rng.normal(size=300)
    x[5], y[3] = 1e308, -1e308
    sd = pm.Exponential.dist(1.0, shape=2)
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=sd)
    effects = pm.Normal("mu", 0.0, 2.0, shape=2) + pm.Normal("z", shape=(4, 2)) @ chol.T
    pm.Normal("y", effects[group, 0] + effects[group, 1] * x, pm.HalfNormal("s"), observed=y)


@pytest.mark.parametrize(
    "declare",
    [
        pytest.param(beta_regression, marks=pytest.mark.slow),
        pytest.param(varying_slopes, marks=pytest.mark.exhaustive),
    ],
)
def test_places_where_a_model_is_not_finite_raise_no_warning(declare: Any) -> None:
    """Made-up outcomes of 0 under a Beta law, parameters far out under an LKJ prior."""
    with pm.Model(), warnings.catch_warnings():
        declare()
        dp.PrivacyBudget(epsilon=30.0, delta=1e-5)
        warnings.simplefilter("error", RuntimeWarning)
        made = dp.DPLangevin(draws=10, tune=0, chains=1, progressbar=False)
        dp.sample(10, tune=0, chains=1, step=made, cores=1, progressbar=False)


@pytest.mark.slow
@pytest.mark.parametrize("declare", [beta_regression, varying_slopes])
def test_functions_of_parameters_raise_no_warning_far_out(declare: Any) -> None:
    with pm.Model() as model:
        declare()
    records = extract(model, check=False)
    d = records.parameters.size
    at = Coordinates(np.zeros(d), np.eye(d))
    engine, public = RowEngine.of(records, at, QUICK), PublicTerms.of(records, at)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        is_flat(engine.groups, [np.zeros(d)])
        for far in (1e3, -1e3, 1e200, -1e308):
            public.both(np.full(d, far))
            for group in engine.groups:
                group.functions.shared(np.full(d, far))


def test_an_infinite_slope_of_the_prior_raises_no_warning() -> None:
    with pm.Model() as model:
        sd = 1.0 + pm.Gamma("extra", 0.5, 1.0, default_transform=None)
        pm.Normal("y", pm.Normal("b"), sd, observed=np.arange(3.0))
    public = PublicTerms.of(extract(model), Coordinates(np.zeros(2), np.eye(2)), QUICK)
    with np.errstate(all="raise"):
        value, slope = public.both(np.full(2, 5e-324))
    assert np.isfinite(value) and -np.inf in slope
