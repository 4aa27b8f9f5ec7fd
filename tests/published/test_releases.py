"""Releases declared in PyMC: densities, predictive draws, groups, and wrong input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from scipy import stats

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.privacy.accounting import mu_from_budget

N = 6
RNG = np.random.default_rng(4)
RECORDS = RNG.normal(size=(N, 2))
COUNTS = RNG.integers(0, 2, (N, 2))


def log_density(declare: Callable[[], Any]) -> float:
    """Log-density of a release of fixed records."""
    with pm.Model() as model:
        pm.Normal("unused")
        declare()
    [term] = model.logp(vars=model.observed_RVs, sum=False)
    return float(np.sum(term.eval(mode="FAST_COMPILE")))


SUM = RECORDS.sum(axis=0)
S = SUM + np.array([0.7, -2.0])
WHOLE = COUNTS.sum(axis=0) + np.array([1, -4])


@pytest.mark.parametrize(
    ("declare", "expected"),
    [
        (
            lambda: dp.LaplaceRelease("s", RECORDS, scale=1.5, observed=S),
            stats.laplace(SUM, 1.5).logpdf(S).sum(),
        ),
        (
            lambda: dp.LaplaceRelease("s", RECORDS, sensitivity=4, epsilon=2.0, observed=S),
            stats.laplace(SUM, 2.0).logpdf(S).sum(),
        ),
        (
            lambda: dp.LaplaceRelease("s", RECORDS[:, 0], scale=1.5, observed=S[0]),
            stats.laplace(SUM[0], 1.5).logpdf(S[0]),
        ),
        (
            lambda: dp.GaussianRelease("s", RECORDS, scale=[1.0, 3.0], observed=S),
            stats.norm(SUM, [1.0, 3.0]).logpdf(S).sum(),
        ),
        (
            lambda: dp.GaussianRelease("s", RECORDS, sensitivity=2.0, rho=0.5, observed=S),
            stats.norm(SUM, 2.0).logpdf(S).sum(),
        ),
        (
            lambda: dp.GaussianRelease(
                "s", RECORDS, sensitivity=2.0, epsilon=1.0, delta=1e-6, observed=S
            ),
            stats.norm(SUM, 2.0 / mu_from_budget(1.0, 1e-6)).logpdf(S).sum(),
        ),
        (
            lambda: dp.GeometricRelease("s", COUNTS, scale=1.5, observed=WHOLE),
            stats.dlaplace(1 / 1.5, loc=COUNTS.sum(axis=0)).logpmf(WHOLE).sum(),
        ),
        (
            lambda: dp.RandomizedResponse("s", COUNTS[:, 0], epsilon=1.0, observed=COUNTS[:, 1]),
            np.where(COUNTS[:, 0] == COUNTS[:, 1], -math.log1p(math.exp(-1)), 0).sum()
            + np.where(COUNTS[:, 0] != COUNTS[:, 1], -math.log1p(math.exp(1)), 0).sum(),
        ),
        (
            lambda: dp.ExponentialMechanismRelease(
                "s", COUNTS, epsilon=2.0, sensitivity=1.0, observed=1
            ),
            float(np.log(np.exp(COUNTS.sum(0)) / np.exp(COUNTS.sum(0)).sum())[1]),
        ),
        (
            lambda: dp.KNormGradientRelease(
                "s", RECORDS[:, :, None], epsilon=2.0, sensitivity=1.0, observed=0
            ),
            float(np.log(np.exp(-np.abs(SUM)) / np.exp(-np.abs(SUM)).sum())[0]),
        ),
        (
            lambda: dp.Release(
                "s",
                RECORDS,
                observed=S,
                log_density=lambda value, total: (
                    -pt.abs(value - total).sum() / 1.5 - 2 * math.log(3.0)
                ),
            ),
            stats.laplace(SUM, 1.5).logpdf(S).sum(),
        ),
    ],
)
def test_densities(declare: Callable[[], Any], expected: float) -> None:
    assert log_density(declare) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.9, 5.1, 40.0])
def test_the_discrete_gaussian_adds_up_to_one(sigma: float) -> None:
    reach = math.ceil(15 * sigma) + 3
    found = [
        log_density(
            lambda u=u: dp.DiscreteGaussianRelease("s", COUNTS[:, 0], scale=sigma, observed=u)
        )
        for u in np.arange(-1, 2) + COUNTS[:, 0].sum()
    ]
    u = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (u / sigma) ** 2)
    expected = np.log(weights / weights.sum())[reach - 1 : reach + 2]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise", ["l1", "l2", "gaussian"])
def test_objective_perturbation_is_a_density(noise: str) -> None:
    """A quadratic loss: s = -(sum x + b) / (n + gamma), so s is an affine function of b."""
    gamma, scale = 0.5, 2.0

    def at(s: np.ndarray) -> float:
        gradient = RECORDS[:, :1] + s
        hessian = np.ones((N, 1, 1))
        return log_density(
            lambda: dp.ObjectivePerturbationRelease(
                "s",
                gradient,
                hessian,
                observed=s,
                scale=scale,
                regularization=gamma,
                noise=noise,
            )
        )

    s = np.array([0.3])
    b = -(SUM[0] + (N + gamma) * s[0])
    law = stats.norm(0, scale) if noise == "gaussian" else stats.laplace(0, scale)
    assert at(s) == pytest.approx(law.logpdf(b) + math.log(N + gamma), rel=1e-12)


@pytest.mark.parametrize("kind", ["K-norm", "objective", "row norm"])
def test_norms_of_one_negative_number(kind: str) -> None:
    """PyTensor rewrites the root of a square as the number itself, or NaN where it is negative."""
    with pm.Model() as model:
        x = pm.Normal("x", shape=N)
        if kind == "K-norm":
            rows = pt.stack([x, 2.0 * x], axis=1)[:, :, None]
            dp.KNormGradientRelease("s", rows, epsilon=2.0, sensitivity=1.0, observed=0)
        elif kind == "objective":
            rows = x[:, None]
            dp.ObjectivePerturbationRelease("s", rows, rows[:, None] ** 2, observed=[5.0], scale=3)
        else:
            ledger = dp.Ledger.temporary()
            data, budget = {"x": np.ones(N)}, {"epsilon": 1.0, "delta": 1e-6, "row_norm": 2.0}
            made = dp.release_statistic(data, lambda x: x, None, "gaussian", ledger, **budget)
            made.declare("s", x)
    [term] = model.logp(vars=model.observed_RVs, sum=False)
    found = []
    for rewrites in ("fast_run", None):
        mode = Mode(linker="py", optimizer=rewrites)
        density = pytensor.function(model.value_vars, term.sum(), mode=mode)
        found.append(density(np.linspace(-3.0, -2.0, N)))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


@pytest.mark.slow
def test_predictive_draws_have_the_density() -> None:
    """Moments of 4000 draws, at 5.5 standard errors: false alarms below 1e-6 in all."""
    with pm.Model() as model:
        pm.Normal("unused")
        dp.LaplaceRelease("laplace", RECORDS, scale=1.5, observed=S)
        dp.GaussianRelease("gaussian", RECORDS, scale=[1.0, 3.0], observed=S)
        dp.GeometricRelease("geometric", COUNTS, scale=1.5, observed=WHOLE)
        dp.DiscreteGaussianRelease("discrete", COUNTS, scale=1.5, observed=WHOLE)
        dp.DiscreteGaussianRelease("wide", COUNTS, scale=1e4, observed=WHOLE)
        dp.RandomizedResponse("answer", COUNTS[:, 0], epsilon=1.0, observed=COUNTS[:, 1])
        draws = pm.sample_prior_predictive(4000, random_seed=3)
    found = _compat.group(draws, "prior_predictive")
    geometric = 2 * math.exp(-1 / 1.5) / (1 - math.exp(-1 / 1.5)) ** 2
    u = np.arange(-30, 31)
    weights = np.exp(-0.5 * (u / 1.5) ** 2)
    laws = {
        "laplace": (SUM, np.full(2, 2 * 1.5**2), 6),
        "gaussian": (SUM, np.array([1.0, 9.0]), 3),
        "geometric": (COUNTS.sum(axis=0), np.full(2, geometric), 6.5),
        "discrete": (COUNTS.sum(axis=0), np.full(2, (weights * u**2).sum() / weights.sum()), 3),
        "wide": (COUNTS.sum(axis=0), np.full(2, 1e8), 3),
    }
    for name, (mean, variance, kurtosis) in laws.items():
        values = found[name].values[0]
        assert (np.abs(values.mean(axis=0) - mean) < 5.5 * np.sqrt(variance / 4000)).all(), name
        error = variance * math.sqrt((kurtosis - 1) / 4000)
        assert (np.abs(values.var(axis=0) - variance) < 6 * error).all(), name
    same = (found["answer"].values[0] == COUNTS[:, 0]).mean()
    truth = 1 / (1 + math.exp(-1))
    assert abs(same - truth) < 5.5 * math.sqrt(truth * (1 - truth) / (4000 * N))
    assert set(_compat.group(draws, "observed_data")) >= {"laplace", "answer"}
    assert model["geometric"].type.dtype == "int64"


def test_clamped_records() -> None:
    x = np.array([-30.0, -1.0, 0.0, 4.0, 99.0])
    np.testing.assert_allclose(dp.clamp(x, -2, 4).eval(), [-1, -2 / 3, -1 / 3, 1, 1])
    np.testing.assert_allclose(dp.clamp(x, -2, 4, rescale=False).eval(), [-2, -1, 0, 4, 4])
    assert dp.present(2, 4).eval().tolist() == [1, 1, 0, 0]


def test_published_data_may_be_pm_data() -> None:
    with pm.Model() as model:
        s = pm.Data("published", S)
        dp.LaplaceRelease("s", RECORDS, scale=1.5, observed=s)
        pm.set_data({"published": S + 1.0})
    [term] = model.logp(vars=model.observed_RVs, sum=False)
    expected = stats.laplace(SUM, 1.5).logpdf(S + 1).sum()
    assert float(np.sum(term.eval())) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: dp.LaplaceRelease("s", RECORDS, observed=S), "needs scale"),
        (lambda: dp.LaplaceRelease("s", RECORDS, observed=S, sensitivity=1.0), "needs scale"),
        (lambda: dp.LaplaceRelease("s", RECORDS, observed=S, scale=-1.0), "positive"),
        (lambda: dp.LaplaceRelease("s", RECORDS, observed=S, scale="b"), "positive"),
        (lambda: dp.LaplaceRelease("s", RECORDS, observed=S, scale=[1, 2, 3]), "shape"),
        (lambda: dp.LaplaceRelease("s", RECORDS, observed=S[:1], scale=1.0), "shape"),
        (lambda: dp.LaplaceRelease("s", SUM.sum(), observed=1.0, scale=1.0), "not their sum"),
        (lambda: dp.LaplaceRelease("s", RECORDS, observed=S * np.nan, scale=1.0), "finite"),
        (lambda: dp.GaussianRelease("s", RECORDS, observed=S, sensitivity=1.0), "one of mu, rho"),
        (
            lambda: dp.GaussianRelease("s", RECORDS, observed=S, sensitivity=1.0, mu=1, rho=1),
            "one of mu, rho",
        ),
        (lambda: dp.GeometricRelease("s", RECORDS, observed=WHOLE, scale=1.0), "integers"),
        (lambda: dp.GeometricRelease("s", COUNTS, observed=[0.5, 1], scale=1.0), "integers"),
        (lambda: dp.RandomizedResponse("s", COUNTS[:, 0], observed=COUNTS[:, 1]), "epsilon"),
        (
            lambda: dp.RandomizedResponse("s", COUNTS[:, 0], observed=COUNTS[:, 1] + 1, epsilon=1),
            "integers 0 to 1",
        ),
        (
            lambda: dp.RandomizedResponse("s", COUNTS[:, 0], observed=COUNTS[:4, 1], epsilon=1),
            "shape",
        ),
        (
            lambda: dp.ExponentialMechanismRelease(
                "s", COUNTS, epsilon=1.0, sensitivity=1.0, observed=2
            ),
            "2 candidates",
        ),
        (lambda: dp.clamp(RECORDS, 1.0, 1.0), "lower < upper"),
        (lambda: dp.present(3, 0), "capacity"),
    ],
)
def test_wrong_input_is_named(declare: Callable[[], Any], message: str) -> None:
    with pm.Model(), pytest.raises(ValueError, match=message):
        declare()


def test_releases_stand_in_the_graph_of_the_model() -> None:
    with pm.Model() as model:
        x = pm.Normal("x", shape=N)
        dp.LaplaceRelease("s", x, scale=1.0, observed=0.3)
    graph = pm.model_graph.ModelGraph(model)
    assert graph.make_compute_graph()["s"] >= {"x"}
