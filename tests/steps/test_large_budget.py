"""With a budget so large that its noise hardly matters, every step finds the usual posterior.

With the smallest one, a run ends in the verdict that it was too small.

A logistic regression of 200 records on two coefficients, whose posterior is known by quadrature.
The records are bounded, so nothing is ever clipped and the chains are exact.

Tolerance: 0.1 posterior standard deviations for means, 10 % for standard deviations.  The numbers
of draws below are worth at least 4,000 independent ones for means and 1,900 for standard
deviations, by the effective sample sizes of runs of 1,000 draws and more, so the tolerances are
more than 6 standard errors: all 28 comparisons together fail by chance less than once in 10^7
runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.base.compat import group
from tests.selection import marked, others

pytestmark = pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning")

N, CHAINS, TUNE = 200, 2, 20
_rng = np.random.default_rng(0)
X = np.c_[np.ones(N), _rng.uniform(-1, 1, N)]
Y = _rng.binomial(1, 1 / (1 + np.exp(-X @ [0.3, 1.0])))
PRIOR_SD = 2.0


def posterior_moments() -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance by the trapezoidal rule, whose error is far below 1e-6 here."""
    axis = np.linspace(-3.0, 3.0, 401)
    beta = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    log_density = -0.5 * (beta**2).sum(axis=1) / PRIOR_SD**2
    for x, y in zip(X, Y, strict=True):
        eta = beta @ x
        log_density += y * eta - np.logaddexp(0.0, eta)
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ beta
    return mean, (beta - mean).T @ (weight[:, None] * (beta - mean))


MEAN, COVARIANCE = posterior_moments()
SD = np.sqrt(np.diag(COVARIANCE))
SCALING = np.linalg.cholesky(COVARIANCE)
# |score| <= |A^T x| is largest at an end of the second feature's range [-1, 1]
BOUND = max(float(np.linalg.norm(SCALING.T @ [1.0, end])) for end in (-1.0, 1.0))

HMC = {"step_size": 0.9, "n_steps": 2, "jitter": 0.1}
LANGEVIN = {"curvature": BOUND**2 / 4, "log_concave": True}
STEPS: dict[str, tuple[type, int, dict[str, Any]]] = {  # with draws per chain
    "penalty": (dp.DPPenalty, 18_000, {"step_size": 2.0}),
    "hmc-leapfrog": (dp.DPHMC, 2_500, HMC),
    "hmc-position": (
        dp.DPHMC,
        4_000,
        {"step_size": 0.8, "n_steps": 2, "jitter": 0.3, "integrator": "position"},
    ),
    "hmc-reuse_gradient": (dp.DPHMC, 2_500, {**HMC, "reuse_gradient": True}),
    "langevin": (dp.DPLangevin, 10_000, {"step_size": 1.2, "friction": 1.5, **LANGEVIN}),
    "langevin-three_steps": (dp.DPLangevin, 2_500, {"step_size": 1.0, "n_steps": 3, **LANGEVIN}),
    "langevin-fresh": (
        dp.DPLangevin,
        2_500,
        {
            "step_size": 1.0,
            "n_steps": 2,
            "momentum": "fresh",
            "friction": 0.3,
            "jitter": 0.2,
            **LANGEVIN,
        },
    ),
}


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    marked(
        STEPS,
        exhaustive=others(STEPS, ["langevin", "hmc-reuse_gradient"]),
    ),
)
def test_posterior(name):
    cls, draws, settings = STEPS[name]
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
        pm.Bernoulli("y", logit_p=X @ beta, observed=Y)
        dp.PrivacyBudget(epsilon=1e5, delta=1e-6)
    plan = {"draws": draws, "tune": TUNE, "chains": CHAINS}
    safe = dp.sample(
        **plan,
        step=cls,
        step_kwargs={"scaling": SCALING, "clip_norm": BOUND, **settings},
        model=model,
        cores=1,
        random_seed=7,
        progressbar=False,
        compute_convergence_checks=False,
    )
    found = group(safe, "posterior")["beta"].values.reshape(-1, 2)
    np.testing.assert_allclose((found.mean(axis=0) - MEAN) / SD, 0.0, atol=0.1)
    np.testing.assert_allclose(found.std(axis=0) / SD, 1.0, atol=0.1)


def budgeted(epsilon: float, delta: float, neighboring: str) -> pm.Model:
    number = {} if neighboring == "replace_one" else {"n_public": N}
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=2)
        pm.Bernoulli("y", logit_p=X @ beta, observed=Y)
        dp.PrivacyBudget(epsilon, delta, neighboring=neighboring, **number)
    return model


RUN: dict[str, Any] = {"chains": 2, "cores": 1, "random_seed": 7, "progressbar": False}
RUN["compute_convergence_checks"] = False


@pytest.mark.parametrize(
    ("epsilon", "delta", "neighboring"),
    marked(
        [(1e5, 1e-6, "replace_one"), (1e6, 1e-300, "add_or_remove_one")],
        slow=[(1e6, 1e-300, "add_or_remove_one")],
        exhaustive=[(1e5, 1e-6, "replace_one")],
    ),
)
def test_everything_learned(epsilon, delta, neighboring):
    """Defaults, at budgets of up to 2^61 ledger units; 700 effective draws, so 6 standard errors.

    dp.laplace is a normal approximation about the mode, which is within 0.2 standard deviations of
    the mean.
    """
    model = budgeted(epsilon, delta, neighboring)
    safe = dp.sample(draws=1000, tune=100, model=model, **RUN)
    found = group(safe, "posterior")["beta"].values.reshape(-1, 2)
    np.testing.assert_allclose((found.mean(axis=0) - MEAN) / SD, 0.0, atol=0.25)
    np.testing.assert_allclose(found.std(axis=0) / SD, 1.0, atol=0.2)
    assert "TOO SMALL" not in dp.privacy_statement(safe)
    budget = dp.get_budget(model)
    assert 0.9 * epsilon < budget.spent().epsilon <= epsilon
    model = budgeted(epsilon, delta, neighboring)
    safe = dp.laplace(model=model, draws=2000, random_seed=7, progressbar=False)
    found = group(safe, "posterior")["beta"].values.reshape(-1, 2)
    np.testing.assert_allclose((found.mean(axis=0) - MEAN) / SD, 0.0, atol=0.3)
    np.testing.assert_allclose(found.std(axis=0) / SD, 1.0, atol=0.2)


@pytest.mark.filterwarnings("ignore")  # they say the same
@pytest.mark.parametrize(
    ("call", "delta", "neighboring"),
    [
        pytest.param("DPLangevin", 1e-300, "replace_one", marks=pytest.mark.slow),
        pytest.param("DPHMC", 1e-6, "add_or_remove_one", marks=pytest.mark.slow),
        pytest.param("DPPenalty", 1e-6, "replace_one", marks=pytest.mark.slow),
        ("laplace", 1e-300, "add_or_remove_one"),
    ],
)
def test_the_smallest_budget_ends_in_a_verdict(call, delta, neighboring):
    """800 ledger units at the smallest delta: less than one for each of 4,200 iterations."""
    model = budgeted(1e-3, delta, neighboring)
    if call == "laplace":
        safe = dp.laplace(model=model, draws=100, progressbar=False)
    else:
        draws = 2000 if call == "DPLangevin" else 50
        safe = dp.sample(draws=draws, tune=100, step=call, model=model, **RUN)
    assert "THE BUDGET WAS TOO SMALL" in dp.privacy_statement(safe)
    assert np.isfinite(group(safe, "posterior")["beta"].values).all()
    assert 0 < dp.get_budget(model).spent().epsilon <= 1e-3
