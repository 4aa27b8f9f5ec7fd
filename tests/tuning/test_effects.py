"""Likelihoods that are non-linear in their parameters: what records see takes their place."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.privacy.journal import SPENDING
from pymc_dp.privacy.noise import insecure_noise
from pymc_dp.records.extraction import extract
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.effects import Effects, effects_of

N, GROUPS = 3001, 6

pytestmark = pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning")


class Records:
    """Made-up data of unequal groups."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.group = rng.choice(GROUPS, N, p=np.arange(1, GROUPS + 1) / 21.0)
        self.x = rng.normal(size=(N, 3))
        means = 2.0 + 1.5 * rng.normal(size=GROUPS)
        self.y = means[self.group] + rng.normal(size=N)
        self.positive = rng.gamma(2.0, 1.0, N)
        self.count = rng.poisson(1.5, N)


R = Records()


def noncentred() -> None:
    mu = pm.Normal("mu", 0.0, 5.0)
    tau = pm.HalfNormal("tau", 3.0)
    z = pm.Normal("z", 0.0, 1.0, shape=GROUPS)
    pm.Normal("y", (mu + tau * z)[R.group], 1.0, observed=R.y)


def banana() -> None:
    a = pm.Normal("a", 0.0, 2.0)
    b = pm.Normal("b", 0.0, 10.0)
    pm.Normal("first", a, 1.0, observed=R.x[:, 0])
    pm.Normal("second", b + 3.0 * a**2, 2.0, observed=R.x[:, 1])


def shrinkage() -> None:
    tau = pm.HalfNormal("tau", 1.0)
    z = pm.Normal("z", 0.0, 1.0, shape=3)
    intercept = pm.Normal("intercept", 0.0, 2.0)
    pm.Poisson("y", pt.exp(intercept + R.x @ (tau * z)), observed=R.count)


def varying_slopes() -> None:
    """Two columns of one matrix, each of which is asked for by itself."""
    mu, tau = pm.Normal("mu", 0.0, 1.0, shape=2), pm.HalfNormal("tau", 1.0, shape=2)
    b = mu + tau * pm.Normal("z", 0.0, 1.0, shape=(GROUPS, 2))
    eta = b[R.group, 0] + b[R.group, 1] * R.x[:, 0]
    pm.Normal("y", eta, pm.HalfNormal("sigma", 2.0), observed=R.y)


def two_likelihoods() -> None:
    """Both see the same group means."""
    mu, tau = pm.Normal("mu", 0.0, 1.0), pm.HalfNormal("tau", 1.0)
    a = mu + tau * pm.Normal("z", 0.0, 1.0, shape=GROUPS)
    pm.Normal("y", a[R.group], 1.0, observed=R.y)
    pm.Poisson("n", pt.exp(a[R.group] + 0.2 * R.x[:, 0]), observed=R.count)


def unknown_scale() -> None:
    mu = pm.Normal("mu", 0.0, 5.0)
    tau = pm.HalfNormal("tau", 3.0)
    z = pm.Normal("z", 0.0, 1.0, shape=GROUPS)
    sigma = pm.HalfNormal("sigma", 2.0)
    pm.Normal("y", (mu + tau * z)[R.group], sigma, observed=R.y)


def noncentred_row_by_row() -> None:
    """The same in the other way of writing it, with an unknown scale."""
    mu = pm.Normal("mu", 0.0, 5.0)
    tau = pm.HalfNormal("tau", 3.0)
    z = pm.Normal("z", 0.0, 1.0, shape=GROUPS)
    sigma = pm.HalfNormal("sigma", 2.0)
    pm.Normal("y", mu + tau * z[R.group], sigma, observed=R.y)


def centred() -> None:
    mu = pm.Normal("mu", 0.0, 5.0)
    tau = pm.HalfNormal("tau", 3.0)
    alpha = pm.Normal("alpha", mu, tau, shape=GROUPS)
    pm.Normal("y", alpha[R.group], 1.0, observed=R.y)


def scale_of_one_parameter() -> None:
    sigma = pm.HalfNormal("sigma", 2.0)
    pm.Normal("y", pm.Normal("mu", 0.0, 5.0), sigma, observed=R.y)


def bounded() -> None:
    """Shape and rate are non-linear in mean and standard deviation, and positive."""
    mu = pm.HalfNormal("mu", 3.0)
    sigma = pm.HalfNormal("sigma", 3.0)
    pm.Gamma("y", mu=mu, sigma=sigma, observed=R.positive)


def overdispersed() -> None:
    """The log of the shape and the intercept are added: linear, though not as it is written."""
    mu = pt.exp(pm.Normal("a") + R.x @ pm.Normal("b", shape=3))
    counts = R.positive.round().astype("int64")
    pm.NegativeBinomial("y", mu=mu, alpha=pm.Exponential("alpha", 1.0), observed=counts)


def redundant() -> None:
    """Six group means of three parameters."""
    a = pm.Normal("a", 0.0, 1.0, shape=3)
    places = np.linspace(-1.0, 1.0, GROUPS)
    pm.Normal("y", (a[0] + pt.exp(a[1]) * places * a[2])[R.group], 1.0, observed=R.y)


#: Values are compared, not bits: compiled functions would take most of the time.
QUICK = {"mode": INTERPRETED}


def parts(declare: Any) -> tuple[Any, RowEngine, Effects | None, np.ndarray]:
    """Records, their engine in unconstrained parameters, effects, and draws from the prior."""
    with pm.Model() as model:
        declare()
    records = extract(model, check=False)
    d = records.parameters.size
    engine = RowEngine.of(records, Coordinates(np.zeros(d), np.eye(d)), QUICK)
    drawn = np.random.default_rng(1).normal(0.0, 0.7, (200, d))
    return records, engine, effects_of(records, engine, drawn, QUICK), drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("declare", "size"),
    [
        (noncentred, GROUPS),
        (banana, 2),
        (shrinkage, 4),
        (unknown_scale, GROUPS + 1),
        (noncentred_row_by_row, GROUPS + 1),
        (varying_slopes, 2 * GROUPS + 1),
        (two_likelihoods, GROUPS),
    ],
)
def test_effects_are_found_and_carry_the_whole_likelihood(declare: Any, size: int) -> None:
    """Likelihood and score of every record are those of the parameters, by the chain rule."""
    _, engine, effects, drawn = parts(declare)
    assert effects is not None and effects.engine.d == size
    d = engine.d
    for theta in drawn[:3]:
        at = effects.seen.function(theta)
        inside = effects.engine.with_coordinates(Coordinates(at, np.eye(size)))
        outside = engine.with_coordinates(Coordinates(theta, np.eye(d)))
        np.testing.assert_allclose(
            inside.log_likelihood(np.zeros(size)), outside.log_likelihood(np.zeros(d)), rtol=1e-9
        )
        jacobian = np.array(
            [
                (effects.seen.function(theta + 1e-6 * e) - effects.seen.function(theta - 1e-6 * e))
                / 2e-6
                for e in np.eye(d)
            ]
        )
        for (where, g), (_, h) in zip(
            inside.vectors(inside.scores(np.zeros(size))),
            outside.vectors(outside.scores(np.zeros(d))),
            strict=True,
        ):
            assert where.start == 0
            np.testing.assert_allclose(jacobian @ g, h, rtol=1e-5, atol=1e-5 * np.abs(h).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "declare", [centred, scale_of_one_parameter, bounded, overdispersed, redundant]
)
def test_parameters_stay_where_effects_would_be_no_better(declare: Any) -> None:
    assert parts(declare)[2] is None


def _sample(
    declare: Any, epsilon: float, noise: Any, draws: int = 800
) -> tuple[pm.Model, Any, Any]:
    with pm.Model() as model, noise:
        declare()
        budget = dp.PrivacyBudget(epsilon=epsilon, delta=1e-5)
        step = dp.DPLangevin(draws=draws, chains=2, progressbar=False)
        result = dp.sample(draws, chains=2, step=step, cores=1, random_seed=1, progressbar=False)
    return model, budget, result


@pytest.mark.slow
def test_noncentred_hierarchy_has_the_exact_posterior() -> None:
    """Against the posterior of (mu, log tau) on a grid, with privacy noise that hardly matters.

    NUTS makes 4000 draws of an effective number above 400, so that errors have a standard
    deviation below .08 posterior sds with the privacy noise; .5 is more than six of them.
    """
    _, budget, result = _sample(noncentred, 60.0, insecure_noise(3))
    assert "TOO SMALL" not in dp.privacy_statement(result)
    n = np.bincount(R.group, minlength=GROUPS)
    means = np.bincount(R.group, weights=R.y, minlength=GROUPS) / n
    mu, log_tau = np.meshgrid(np.linspace(-8, 12, 401), np.linspace(-3, 3, 301), indexing="ij")
    tau = np.exp(log_tau)
    variance = tau[..., None] ** 2 + 1.0 / n
    log = -0.5 * np.sum((means - mu[..., None]) ** 2 / variance + np.log(variance), axis=-1)
    log += -0.5 * (mu / 5.0) ** 2 - 0.5 * (tau / 3.0) ** 2 + log_tau
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    posterior = _compat.group(result, "posterior")
    for name, grid in (("mu", mu), ("tau", tau)):
        mean = float(np.sum(weight * grid))
        sd = float(np.sqrt(np.sum(weight * (grid - mean) ** 2)))
        drawn = posterior[name].values
        assert abs(drawn.mean() - mean) < 0.5 * sd
        assert 0.75 < drawn.std() / sd < 1.33
    spent = sum(e.amount for e in budget.ledger.entries() if e.kind in SPENDING)
    cap = budget.account.read().cap
    assert cap * (1 - 2.0**-20) <= spent <= cap


@pytest.mark.slow
def test_what_is_said_about_it() -> None:
    """The statement names the approximation; no score is there to average."""
    model, _, result = _sample(banana, 20.0, contextlib.nullcontext(), draws=50)
    text = dp.privacy_statement(result)
    assert "quadratic" in text and "effects" in text
    with model, pytest.raises(ValueError, match="Average the draws instead"):
        dp.posterior_mean(result)


@pytest.mark.slow
def test_a_form_that_is_asked_for_is_used() -> None:
    with pm.Model(), insecure_noise(3):
        banana()
        dp.PrivacyBudget(epsilon=20.0, delta=1e-5)
        step = dp.DPLangevin(draws=10, chains=1, form="plain", progressbar=False)
        assert step.form == "plain" and step._public_draws is None


@pytest.mark.slow
def test_laplace_warns_of_a_curved_posterior() -> None:
    with pm.Model(), insecure_noise(3):
        banana()
        dp.PrivacyBudget(epsilon=20.0, delta=1e-5)
        with pytest.warns(UserWarning, match="posterior is curved"):
            dp.laplace(draws=10, chains=1, progressbar=False)


@pytest.mark.slow
def test_what_the_records_did_not_say_is_named() -> None:
    """Two records of a thousand are in the last group; its mean stays with the prior."""
    rng = np.random.default_rng(2)
    group = np.r_[np.zeros(998, dtype=int), 1, 1]
    y = rng.normal(size=1000)
    with pm.Model(), insecure_noise(4):
        pm.Normal("y", pm.Normal("mean", 0.0, 1.0, shape=2)[group], 1.0, observed=y)
        dp.PrivacyBudget(epsilon=2.0, delta=1e-5)
        step = dp.DPLangevin(draws=50, chains=1, form="quadratic", progressbar=False)
    plan = step.budget.account.plan(step.plan.plan_id)
    assert plan["settings"]["about_prior"] == ["mean (1 of 2 entries)"]


@pytest.mark.slow
def test_a_product_of_scales_beside_does_not_hide_group_means() -> None:
    def declare() -> None:
        mu, tau = pm.Normal("mu", 0.0, 5.0), pm.HalfNormal("tau", 3.0)
        z = pm.Normal("z", 0.0, 1.0, shape=GROUPS)
        s, w = pm.HalfNormal("s", 2.0), pm.LogNormal("w", 0.0, 0.3, shape=GROUPS)
        pm.Normal("y", (mu + tau * z)[R.group], s * w[R.group], observed=R.y)

    effects = parts(declare)[2]
    assert effects is not None and effects.engine.d == 2 * GROUPS + 1
