"""What a chain samples is the model's own density: control variates and remainders add up to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
import xarray as xr
from numba import njit
from pymc.model import Model

import pymc_dp as dp
from pymc_dp.rows import predictor
from pymc_dp.rows.predictor import has_kinks
from pymc_dp.subsampling import reading
from pymc_dp.subsampling.estimates import MEAN, Sampled, call_address, callable_prior, density
from pymc_dp.subsampling.preparation import Variates, prepare
from pymc_dp.subsampling.reading import degree_of

N = 120
_rng = np.random.default_rng(4)
X = _rng.normal(size=(N, 2))
Y = _rng.integers(0, 2, N)
COUNT, CLASS = _rng.poisson(1.0, N), _rng.integers(0, 3, N)
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


def natural_normal() -> None:
    """In natural form: the slope of a record is not 0 where its predictor is."""
    b = pm.Normal("b", 0, 3, shape=2)
    pm.CustomDist("y", X @ b, logp=lambda y, v: y * v - v**2 / 2.0, observed=V)


def flat() -> None:
    b, s = pm.Normal("b", 0, 1, shape=2), pm.Flat("s")
    pm.Bernoulli("y", logit_p=X @ b + s, observed=Y)


def categorical() -> None:
    logits = X @ pm.Normal("b", 0, 1, shape=(2, 2))
    base = pt.zeros((N, 1))
    pm.Categorical("y", logit_p=pt.concatenate([base, logits], axis=1), observed=CLASS)


def many_classes() -> None:
    pm.Categorical("y", logit_p=X @ pm.Normal("b", 0, 1, shape=(2, 8)), observed=CLASS)


def mixture() -> None:
    mu = pm.Normal("mu", [-1, 1], 1, shape=2)
    sigma = pm.HalfNormal("sigma", 1, shape=2)
    pm.NormalMixture("y", w=pm.Dirichlet("w", np.ones(2)), mu=mu, sigma=sigma, observed=V)


def zero_inflated() -> None:
    b = pm.Normal("b", 0, 1, shape=2)
    pm.ZeroInflatedPoisson("y", psi=pm.Beta("p", 2, 2), mu=pt.exp(X @ b), observed=COUNT)


def censored() -> None:
    eta = X @ pm.Normal("b", 0, 1, shape=2)
    normal = pm.Normal.dist(eta, pm.HalfNormal("s", 1))
    pm.Censored("y", normal, lower=-1.0, upper=1.0, observed=np.clip(V, -1, 1))


def several() -> None:
    b, s = pm.Normal("b", 0, 1, shape=2), pm.HalfNormal("s", 1)
    pm.Normal("y", X @ b, s, observed=V)
    pm.Poisson("k", pt.exp(b[0] * X[:, 1]), observed=COUNT)


def groups() -> None:
    """Group effects around a common scale, in data of several types."""
    a = pm.HalfNormal("tau", 1) * pm.Normal("z", 0, 1, shape=3)
    b = pm.Normal("b", 0, 1, shape=2)
    x = pm.Data("x", X.astype("float32"))
    pm.StudentT("y", nu=4, mu=a[CLASS] + x @ b, sigma=pm.HalfNormal("s", 1), observed=V)


def half_life() -> None:
    """The level follows from another parameter: no quadratic prior."""
    x = pm.Normal("x", 0, 1, shape=2)
    z = pm.Normal("z", 0.5 ** x[0], 1)
    pm.Normal("y", X[:, 0] * z + x[1], 1.0, observed=V)


def unit_vector() -> None:
    """Its derivatives at 0 are no numbers."""
    v = pm.Normal("v", 1.0, 0.1, shape=2)
    pm.Normal("y", X @ (v / pt.sqrt((v**2).sum())), 1.0, observed=V)


def condition() -> None:
    """A condition on parameters chooses what records see, beside many numbers."""
    b, tau = pm.Normal("b", shape=8), pm.Normal("tau", initval=0.5)
    rows = pt.switch(tau > 0, (b * np.ones((N, 8))).sum(axis=1), 0.0)
    mixed = sum(pt.exp(-((V - b[k]) ** 2)) for k in range(8))

    def logp(value: Any, rows: Any, mixed: Any) -> Any:
        return -((value - rows) ** 2) + mixed

    pm.CustomDist("y", rows, mixed, logp=logp, observed=V)


def made(declare: Callable[[], None]) -> tuple[Model, Variates]:
    with pm.Model() as model:
        declare()
    variates = prepare(model, "HMCECS", order=2, estimator="mean")
    return model, variates


LONG = (pytest.mark.slow, pytest.mark.compiled)
SLOW, FURTHER = (
    [groups, negative_weights, condition],
    [jumping, unit_vector, categorical, mixture, several, many_classes, zero_inflated, censored],
)


@pytest.mark.parametrize(
    "declare",
    [
        flat,
        bounded,
        *(pytest.param(f, marks=pytest.mark.slow) for f in [normal, natural_normal]),
        *(pytest.param(declare, marks=LONG) for declare in [laplace, half_life, *SLOW]),
        *(pytest.param(declare, marks=pytest.mark.exhaustive) for declare in FURTHER),
    ],
)
def test_records_and_prior_add_up_to_the_density(declare: Callable[[], None]) -> None:
    model, variates = made(declare)
    logp = model.compile_logp()
    rng = np.random.default_rng(1)
    centre = variates.curved.mode
    points = [centre, *(centre + rng.normal(0, 2.0, (12, len(centre))))]
    expected = np.array([float(logp(variates.parameters.point(p))) for p in points])
    found = np.array([variates.total(p) for p in points])
    inside = np.isfinite(expected)
    assert not np.isfinite(found[~inside]).any()
    assert np.allclose((found - found[0])[inside], (expected - expected[0])[inside], atol=1e-6)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("order", [0, 1, 2])
def test_an_estimate_from_all_records_is_exact(order: int) -> None:
    """Rows see a linear predictor, an effect of their group, log sigma and nu, which all vary."""
    with pm.Model() as model:
        a = pm.HalfNormal("tau", 1) * pm.Normal("z", 0, 1, shape=3)
        mu = a[CLASS] + X @ pm.Normal("b", 0, 1, shape=2)
        sigma = pt.exp(pm.Normal("log_sigma", 0, 1))
        pm.StudentT("y", nu=pm.Gamma("nu", 2, 0.1), mu=mu, sigma=sigma, observed=V)
    variates = prepare(model, "HMCECS", order=order, estimator="mean")
    at = Sampled(variates.family, variates.expansion, 1.0, 0.0, MEAN)
    sample, logp, slope = variates.sample(np.arange(N)), model.compile_logp(), model.compile_dlogp()
    rng, constants = np.random.default_rng(1), []
    for _ in range(4):
        theta = variates.curved.theta + rng.normal(0, 0.3, len(variates.curved.theta))
        d, gradient = np.empty(N), np.empty_like(theta)
        found = density(variates.kernel, variates.prior, at, sample, theta, d, gradient)
        point = variates.parameters.point(theta)
        constants.append(found - float(logp(point)))
        assert np.allclose(gradient, slope(point), rtol=1e-9, atol=1e-9)
        assert np.abs(d).max() > 1e-3
    assert np.ptp(constants) < 1e-9


@pytest.mark.parametrize(
    ("declare", "count"),
    [
        (lambda: pm.Bernoulli("y", logit_p=X @ pm.Normal("b", shape=2), observed=Y + 1), Y.sum()),
        (lambda: pm.Bernoulli("y", logit_p=X @ pm.Normal("b", shape=2), observed=2 * Y - 1), None),
        (lambda: pm.Poisson("y", pt.exp(X[:, 0] * pm.Normal("b")), observed=COUNT - 1), None),
    ],
)
def test_impossible_records_are_refused(
    declare: Callable[[], None], count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pm.Model():
        declare()
        with pytest.raises(dp.UnsafeModel, match="outcomes of `y` have probability zero"):
            dp.HMCECS(progressbar=False)
        monkeypatch.setattr(reading, "_CHECKED", 0)  # as with many records
        with pytest.raises(dp.UnsafeModel, match=f"{count or ''}.*`y`.*no finite log-density"):
            dp.HMCECS(progressbar=False)


@pytest.mark.slow
def test_another_density_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: rows lose the coefficient of their linear term."""
    right = predictor.Predictor.coefficients

    def wrong(self: Any, arrays: Any) -> Any:
        a, b = right(self, arrays)
        return 0.999 * a, b

    monkeypatch.setattr(predictor.Predictor, "coefficients", wrong)
    with pm.Model():
        natural_normal()
        with pytest.raises(RuntimeError, match="not its log-density"):
            dp.HMCECS(progressbar=False)


@pytest.mark.slow
def test_functions_that_raise_give_no_number() -> None:
    theta = pt.vector("theta", shape=(2,))
    matrix = pt.stack([theta, theta])
    value = pt.linalg.inv(matrix)[0, 0].reshape((1,))
    prior = callable_prior(([theta], [value, theta]))

    @njit
    def called(address: Any, theta: Any, gradient: Any) -> Any:
        return call_address(address, (theta, gradient))

    gradient = np.zeros(2)
    assert np.isnan(called(prior.address, np.array([1.0, 2.0]), gradient))
    assert np.isnan(gradient).all()


def test_kinks_are_seen_where_derivatives_show_none() -> None:
    theta = pt.dvector("theta")
    for value in (
        pt.abs(theta).sum(),
        pt.switch(theta > 0, 1.0, 2.0).sum(),
        pt.sign(theta).sum(),
        pt.floor(theta).sum(),
        (theta // 0.5).sum(),
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


@pytest.mark.slow
def test_degrees_are_never_too_low() -> None:
    theta = pt.dvector("theta")
    chosen = theta[theta > 0]
    for value in (
        (theta**2 + 2.0**theta).sum(),
        (2.0**theta + theta**2).sum(),
        pt.switch(pt.scalar("c") > 1, theta**2, 2.0**theta).sum(),
        pt.join(0, theta, 2.0**theta).sum(),
        pt.join(0, 2.0**theta, theta).sum(),
        (theta**theta).sum(),
        pt.ones_like(chosen).sum(),
        chosen.shape[0] * 1.0,
        theta[0] ** 2 * theta[1],
        1.0 / theta[0],
        pt.abs(theta).sum(),
        pt.exp(theta).sum(),
        theta.astype("float32").sum(),
    ):
        assert degree_of(value, theta) > 2.0
    for value, degree in (
        ((theta**2).sum(), 2.0),
        (pt.sqr(theta - theta[0]).sum() / 3.0, 2.0),
        (pt.dot(theta, pt.dot(np.eye(2), theta)), 2.0),
        (pt.ones(theta.shape) @ theta, 1.0),
        (theta.shape[0] * 1.0, 0.0),
    ):
        assert degree_of(value, theta) == degree


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
        with pytest.raises(ValueError, match=r"`responses` was changed.*Make the step again"):
            step.set_rng(np.random.default_rng(1))


def test_shared_variables_that_were_changed_are_refused() -> None:
    x = pytensor.shared(np.linspace(-1, 1, N), name="x")
    with pm.Model():
        pm.Normal("y", pm.Normal("b") * x, 1.0, observed=V)
        step = dp.HMCECS(subsample_size=20, progressbar=False)
        step.set_rng(np.random.default_rng(1))
        x.set_value(-x.get_value())
        with pytest.raises(ValueError, match=r"`x` was changed.*Make the step again"):
            step.set_rng(np.random.default_rng(1))


def test_expectations_of_missing_values_are_missing() -> None:
    from pymc_dp.base.compat import inference_data

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
