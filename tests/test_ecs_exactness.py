"""What a chain samples is the model's own density: control variates and remainders add up to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
import xarray as xr
from pymc.model import Model

import pymc_dp as dp
from pymc_dp.ecs.expansion import quadratic
from pymc_dp.ecs.kinks import has_kinks
from pymc_dp.ecs.preparation import Variates, prepare

N = 120
_rng = np.random.default_rng(4)
X = _rng.normal(size=(N, 2))
Y = _rng.integers(0, 2, N)
V = X @ [0.4, -0.2] + _rng.normal(size=N)


def laplace() -> None:
    b = pm.Laplace("b", 0, 0.1, shape=2)
    pm.Bernoulli("y", logit_p=X @ b, observed=Y)


def bounded() -> None:
    b = pm.Uniform("b", -0.5, 0.5, shape=2, default_transform=None)
    pm.Bernoulli("y", logit_p=X @ b, observed=Y)


def jumping() -> None:
    b, c = pm.Normal("b"), pm.Normal("c", initval=0.3)
    pm.Normal("y", b * X[:, 0] + pt.sign(c) * X[:, 1], 1.0, observed=V)


def negative_weights() -> None:
    weights = np.where(np.arange(N) % 10, 1.0, -1.0)
    mu = pm.Normal("mu", 0, 10)

    def logp(value: Any, mu: Any, weights: Any) -> Any:
        return -0.5 * weights * (value - mu) ** 2

    pm.CustomDist("y", mu, weights, logp=logp, observed=V)


def normal() -> None:
    b = pm.Normal("b", 0, [1.0, 3.0], shape=2)
    pm.Bernoulli("y", logit_p=X @ b, observed=Y)


def made(declare: Callable[[], None]) -> tuple[Model, Variates]:
    with pm.Model() as model:
        declare()
    variates = prepare(
        model,
        "HMCECS",
        order=2,
        estimator="mean",
        reference=None,
        rng=np.random.default_rng(0),
        progressbar=False,
    )
    return model, variates


def density(variates: Variates, theta: np.ndarray) -> float:
    """What the chains sample, from all records, up to a constant."""
    total = variates.differences(theta, np.arange(variates.n)).sum()
    total += quadratic(variates.expansion, theta, np.empty(len(theta)))
    if variates.prior_graph is not None:
        total += variates.prior(theta, np.empty(len(theta)))
    return float(total)


@pytest.mark.parametrize("declare", [normal, laplace, bounded, jumping, negative_weights])
def test_records_and_prior_add_up_to_the_density(declare: Callable[[], None]) -> None:
    model, variates = made(declare)
    logp = model.compile_logp()
    rng = np.random.default_rng(1)
    centre = variates.curved.mode
    points = [centre, *(centre + rng.normal(0, 2.0, (12, len(centre))))]
    expected = np.array([float(logp(variates.parameters.point(p))) for p in points])
    found = np.array([density(variates, p) for p in points])
    inside = np.isfinite(expected)
    assert not np.isfinite(found[~inside]).any()
    assert np.allclose((found - found[0])[inside], (expected - expected[0])[inside], atol=1e-6)


def test_kinks_are_seen_where_derivatives_show_none() -> None:
    theta = pt.dvector("theta")
    for value in (
        pt.abs(theta).sum(),
        pt.switch(theta > 0, 1.0, 2.0).sum(),
        pt.sign(theta).sum(),
        pt.floor(theta).sum(),
        pt.max(theta),
        pt.sort(theta)[0],
        (theta > 0).astype("float64").sum(),
    ):
        assert has_kinks([value], theta)
    mask = np.array([True, False])
    for value in (
        (theta**2).sum(),
        pt.switch(mask, theta, 0.0).sum(),
        pt.ones(theta.shape) @ theta,
    ):
        assert not has_kinks([value], theta)


def test_a_condition_among_many_numbers_is_refused() -> None:
    with pm.Model():
        b = pm.Normal("b", shape=8)
        tau = pm.Normal("tau")
        rows = pt.switch(tau > 0, (b * np.ones((N, 8))).sum(axis=1), 0.0)
        mixed = sum(pt.exp(-((V - b[k]) ** 2)) for k in range(8))

        def logp(value: Any, rows: Any, mixed: Any) -> Any:
            return -((value - rows) ** 2) + mixed

        pm.CustomDist("y", rows, mixed, logp=logp, observed=V)
        with pytest.raises(dp.NotFactorizable):
            dp.HMCECS(progressbar=False)


@pytest.mark.parametrize("cls", [dp.HMCECS, dp.SGLD])
def test_data_that_were_changed_are_refused(cls: Any) -> None:
    with pm.Model():
        y = pm.Data("responses", V)
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1.0, observed=y)
        step = cls(subsample_size=20, progressbar=False)
        pm.set_data({"responses": V.copy()})
        step.set_rng(np.random.default_rng(1))
        pm.set_data({"responses": V + 1.0})
        with pytest.raises(ValueError, match=r"`responses` was changed.*Make the step anew"):
            step.set_rng(np.random.default_rng(1))


def test_expectations_of_missing_values_are_missing() -> None:
    from pymc_dp._compat import inference_data

    draws = xr.DataArray(np.linspace(-1, 1, 20).reshape(2, 10), dims=("chain", "draw"), name="b")
    groups = {
        "posterior": xr.Dataset({"b": draws}),
        "sample_stats": xr.Dataset({"sign": xr.ones_like(draws)}),
    }
    idata = inference_data(groups, {})
    with np.errstate(invalid="ignore"):
        assert np.isnan(dp.signed_expectation(idata, lambda x: np.log(x["b"])))
    with pytest.raises(ValueError, match="dims chain and draw"):
        dp.signed_expectation(idata, lambda x: x["b"].mean())
    assert float(dp.signed_expectation(idata, lambda x: x["b"])) == pytest.approx(0.0)
