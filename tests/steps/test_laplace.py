"""Point estimates and normal approximations without chains, and the forecast before them."""

from __future__ import annotations

import json
import math
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
import xarray as xr
from scipy import stats

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.base.matrices import Coordinates, root
from pymc_dp.errors import UnsafeModel
from pymc_dp.kernels.targets import Quadratic
from pymc_dp.privacy.accounting import mu_from_budget
from pymc_dp.publication.explore import Explored, _Whole, explore
from pymc_dp.records.extraction import extract
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.tuning import forecast, quadratic
from pymc_dp.tuning.forecast import whole_curvature
from pymc_dp.tuning.model_parts import ModelParts, find_mode
from tests.publication.test_noise_aware import Funnel as Hierarchy
from tests.selection import marked

laplace_module = sys.modules["pymc_dp.steps.laplace"]  # `dp.laplace` is the function
N, D = 6000, 3
TRUTH = np.array([0.3, -0.5, 0.8])
FACTS = "pymc_dp_statement"


def model_of(epsilon: float, **options) -> tuple[pm.Model, dp.PrivacyBudget]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, D))
    y = x @ TRUTH + rng.normal(size=N)
    with pm.Model(coords={"feature": ["a", "b", "c"]}) as model:
        beta = pm.Normal("beta", 0, 2, dims="feature")
        sigma = pm.HalfNormal("sigma", 2)
        pm.Deterministic("ratio", beta / sigma, dims="feature")
        pm.Normal("y", x @ beta, sigma, observed=y)
        budget = dp.PrivacyBudget(epsilon, 1e-6, **options)
    return model, budget


def test_laplace_is_near_the_truth_and_spends_the_budget():
    model, budget = model_of(20.0, public=["feature"])
    with model:
        idata = dp.laplace(500, chains=2, random_seed=1, progressbar=False)
    posterior = _compat.group(idata, "posterior")
    assert posterior.sizes["chain"] == 2 and posterior.sizes["draw"] == 500
    assert list(posterior["feature"].values) == ["a", "b", "c"]
    assert set(posterior) == {"beta", "sigma", "ratio"}
    draws = posterior["beta"].values.reshape(-1, D)
    # least squares has standard errors of .013; at 12 of them a false alarm is out of the question
    assert np.abs(draws.mean(axis=0) - TRUTH).max() < 12 * 0.013
    assert 0.7 * 0.013 < draws.std(axis=0).min() and draws.std(axis=0).max() < 3 * 0.013
    cap = budget.account.read().cap
    left = budget.account.read().remaining
    assert 0 <= left < cap / 2**20
    text = dp.privacy_statement(idata)
    assert "no chains touched the records" in text and "laplace" in text
    ratio = posterior["beta"] / posterior["sigma"]
    assert np.abs(posterior["ratio"] - ratio).max() < 1e-9


class Funnel:
    """Effects N(0, exp(2 s)) with s ~ N(0, 1), of which measurements with noise are known."""

    def __init__(self, noise):
        self.noise = noise

    def log_density(self, z):
        s, effects = z[0], z[1:]
        prior = -0.5 * (s**2 + np.sum(effects**2) * np.exp(-2 * s)) - len(effects) * s
        return prior - 0.5 * np.sum((effects - 1.0) ** 2) / self.noise**2

    def gradient(self, z):
        s, effects = z[0], z[1:]
        precision = np.exp(-2 * s)
        slope = -s + np.sum(effects**2) * precision - len(effects)
        return np.append(slope, -effects * precision - (effects - 1.0) / self.noise**2)


@pytest.mark.parametrize(("noise", "normal"), [(0.01, True), (3.0, False)])
def test_what_is_not_near_normal_is_said(noise, normal):
    target = Funnel(noise)
    mode, precision = find_mode(target, np.eye(9))
    widths = root(np.linalg.inv(precision))
    assert (laplace_module._departure(target, mode, widths, np.eye(9)) == "") == normal


class Independent:
    """Parameters with one law each."""

    def __init__(self, law, d):
        self.law, self.d = law, d

    def log_density(self, z):
        return float(self.law.logpdf(z).sum())

    def gradient(self, z):
        return (self.law.logpdf(z + 1e-5) - self.law.logpdf(z - 1e-5)) / 2e-5


@pytest.mark.parametrize(
    ("law", "d", "departs"),
    [
        (stats.norm(), 60, False),
        # the weights of many parameters are uneven, and yet each is well described
        (stats.t(20), 60, False),
        (stats.t(3), 1, True),
        (stats.gumbel_r(), 3, True),
    ],
)
def test_parameters_are_looked_at_one_by_one(law, d, departs):
    target = Independent(law, d)
    mode, precision = find_mode(target, np.eye(d))
    said = laplace_module._departure(target, mode, root(np.linalg.inv(precision)), np.eye(d))
    assert bool(said) == departs, said


@pytest.mark.parametrize("noise", [1.0, 100.0])
def test_the_mode_is_found_however_wide_the_noise_makes_the_target(noise):
    """In units of what the records would know without noise it is far away."""
    rng = np.random.default_rng(0)
    d, score = 4, 4.0 * math.sqrt(1.0 + noise) * rng.standard_normal(4)
    prior = Independent(stats.norm(0.0, 100.0), d)
    target = Quadratic(prior, score, np.eye(d), noise * np.eye(d))
    mode, precision = find_mode(target, target.information + 1e-4 * np.eye(d))
    known = 1e-4 + 1.0 / (1.0 + noise)
    np.testing.assert_allclose(precision, known * np.eye(d), rtol=1e-3, atol=1e-5 * known)
    np.testing.assert_allclose(mode, score / (1.0 + noise) / known, rtol=1e-3)
    assert not laplace_module._departure(target, mode, root(np.linalg.inv(precision)), np.eye(d))


@pytest.mark.slow
def test_what_is_not_normal_is_said_where_it_is_published(monkeypatch):
    monkeypatch.setattr(laplace_module, "_in_words", lambda *_: "it leans to one side")
    model, _ = model_of(20.0)
    with model, pytest.warns(UserWarning, match="unreliable: it leans to one side"):
        idata = dp.laplace(10, progressbar=False)
    assert "UNRELIABLE: it leans to one side." in dp.privacy_statement(idata)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    marked([RuntimeError, pm.exceptions.SamplingError], exhaustive=[pm.exceptions.SamplingError]),
)
def test_a_failure_to_explore_leaves_the_mode(monkeypatch, error):
    def failed(*_, **__):
        raise error

    monkeypatch.setattr(laplace_module, "_departure", lambda *_: "it leans to one side")
    monkeypatch.setattr(quadratic.Quadratic, "explored", failed)
    model, _ = model_of(20.0)
    with model, pytest.warns(UserWarning, match="unreliable: it leans to one side"):
        idata = dp.laplace(10, progressbar=False)
    assert "UNRELIABLE: it leans to one side." in dp.privacy_statement(idata)


@pytest.mark.slow
def test_held_interrupts_are_an_interrupt(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(laplace_module, "_departure", lambda *_: "it leans to one side")
    monkeypatch.setattr(_Whole, "__call__", interrupted)
    model, _ = model_of(20.0)
    with model, pytest.raises(KeyboardInterrupt, match="resumes from what was released"):
        dp.laplace(10, progressbar=False)


@pytest.mark.parametrize(
    ("chain", "at"),
    marked([(0, 1), (0, 1500), (3, 1500)], slow=[(0, 1500)], exhaustive=[(0, 1), (3, 1500)]),
)
def test_after_an_interrupt_the_same_call_goes_on(monkeypatch, chain, at):
    """PyMC takes an interrupt for the end of one chain and goes on with the next."""
    seen = []

    def interrupted(self, trace, draw, call=_Whole.__call__):
        call(self, trace, draw)
        seen.append(draw.chain)
        if draw.chain == chain and seen.count(chain) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(laplace_module, "_departure", lambda *_: "it leans to one side")
    model, budget = model_of(20.0)
    with monkeypatch.context() as patch, model:
        patch.setattr(_Whole, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt, match="resumes from what was released"):
            dp.laplace(10, progressbar=False)
    assert seen.count(chain) == at and set(seen) == set(range(chain + 1))
    charges = [e for e in budget.ledger.entries() if e.kind == "charge"]
    with model:
        idata = dp.laplace(10, progressbar=False)
    assert charges == [e for e in budget.ledger.entries() if e.kind == "charge"]
    assert "about its mean" in dp.privacy_statement(idata)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worth", "apart", "said"),
    marked(
        [(60.0, False, "are worth about 60 draws"), (4000.0, True, "ended in different places")],
        exhaustive=[(4000.0, True, "ended in different places")],
    ),
)
def test_chains_that_explored_badly_are_said(monkeypatch, worth, apart, said):
    def badly(*args, draws=quadratic.Quadratic.explored, **options):
        return draws(*args, **options)._replace(effective=worth, apart=apart)

    monkeypatch.setattr(laplace_module, "_departure", lambda *_: "it leans to one side")
    monkeypatch.setattr(quadratic.Quadratic, "explored", badly)
    model, _ = model_of(20.0)
    with model, pytest.warns(UserWarning, match=f"unreliable: .*{said}"):
        idata = dp.laplace(10, progressbar=False)
    assert said in dp.privacy_statement(idata)


def plan_of(budget: dp.PrivacyBudget) -> dict:
    """What the ledger keeps of a normal approximation."""
    plans = [e.payload["settings"] for e in budget.ledger.entries() if e.kind == "plan"]
    [plan] = [settings for settings in plans if "location" in settings]
    return plan


def about(prior, **budget) -> tuple[SimpleNamespace, ModelParts]:
    """What was released about a regression with this prior of its two slopes."""
    with pm.Model() as model:
        pm.Normal("y", np.ones((50, 2)) @ prior(), 1.0, observed=np.zeros(50))
        parts = ModelParts(model, dp.PrivacyBudget(1.0, 1e-6, **budget))
    released = SimpleNamespace(
        coordinates=Coordinates(np.array([0.4, -0.3]), np.array([[0.5, 0.0], [0.2, 0.3]])),
        score=np.array([1.0, -2.0]),
        curvature=np.array([[2.0, 0.5], [0.5, 1.0]]),
        covariance=np.array([[0.3, 0.1], [0.1, 0.2]]),
    )
    return released, parts


def test_where_the_prior_is_normal_the_target_is_drawn_as_it_is():
    """Means and covariances of 4000 draws, each with five entries: six standard errors, 1e-8."""

    def prior():
        first = pm.Normal("first", 1.0, 2.0)
        return pt.stack([first, pm.Normal("second", 0.5 * first, 0.7)])

    released, parts = about(prior)
    drawn = quadratic.Quadratic.normal(released, parts)
    at, precision = released.coordinates, np.linalg.inv([[4.0, 2.0], [2.0, 1.49]])
    back = np.linalg.inv(at.scaling)
    seen = back.T @ released.curvature
    weight = np.linalg.inv(released.curvature + released.covariance)
    slope = precision @ np.array([1.0, 0.5]) + seen @ weight @ (
        released.score + released.curvature @ back @ at.location
    )
    covariance = np.linalg.inv(precision + seen @ weight @ seen.T)
    z = np.linalg.solve(np.linalg.cholesky(covariance), (drawn - covariance @ slope).T)
    assert np.abs(z.mean(axis=1)).max() < 6.0 / math.sqrt(len(drawn))
    assert np.abs(z @ z.T / len(drawn) - np.eye(2)).max() < 6.0 * math.sqrt(2.0 / len(drawn))


NOT_NORMAL = {
    "half": lambda: pm.HalfNormal("second", 1.0),
    "Laplace": lambda: pm.Laplace("second", 0.0, 1.0),
    "t": lambda: pm.StudentT("second", 4.0),
    "uniform": lambda: pm.Uniform("second", -1.0, 1.0, default_transform=None),
    "mixture": lambda: pm.NormalMixture("second", [0.5, 0.5], [0.0, 30.0], 1.0),
    "hierarchy": lambda: pm.Normal("second", 0.0, pm.math.exp(pm.Normal("log sd"))),
    "flat": lambda: pm.Flat("second"),
}


@pytest.mark.parametrize("name", marked(NOT_NORMAL, slow=["half", "Laplace", "uniform", "mixture"]))
def test_no_other_prior_is_taken_for_a_normal_one(name):
    released, parts = about(lambda: pt.stack([pm.Normal("first"), NOT_NORMAL[name]()]))
    if parts.engine.d == 3:
        released.coordinates = Coordinates(np.zeros(3), np.eye(3))
        released.score, released.covariance = np.ones(3), np.eye(3)
        released.curvature = np.diag([1.0, 1.0, 0.0])
    assert quadratic.Quadratic.normal(released, parts) is None


@pytest.mark.parametrize("law", [pm.Normal, pm.Cauchy])
def test_public_outcomes_count(law):
    def prior():
        slopes = pm.Normal("slopes", shape=2)
        law("known", slopes[1], 1.0, observed=[0.5, 3.0])
        return slopes

    released, parts = about(prior, public=["known"])
    assert (quadratic.Quadratic.normal(released, parts) is None) == (law is pm.Cauchy)


def test_a_constant_hides_no_prior():
    """The log density of these outcomes is -5e9, whatever the slopes are."""

    def prior():
        pm.Normal("known", 0.0, 1.0, observed=[1e5])
        return pm.StudentT("slopes", 4.0, shape=2)

    released, parts = about(prior, public=["known"])
    assert quadratic.Quadratic.normal(released, parts) is None


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_prior_without_end_is_no_normal_one():
    """Some draws of this one are 0, and their logarithm is infinite."""
    released, parts = about(lambda: pt.stack([pm.Normal("first"), pm.Gamma("second", 1e-3, 1e-3)]))
    released.coordinates = Coordinates(np.zeros(2), np.eye(2))
    assert np.isinf(parts.prior_draws).any()
    assert quadratic.Quadratic.normal(released, parts) is None


@pytest.mark.slow
def test_effects_whose_spread_may_be_small_are_explored_where_it_is():
    """4,000 draws of NUTS; of the effects as they are written, tau misses its small values and the
    second error is .06 to .13."""
    funnel = Hierarchy(0.25, 0.5)
    d = funnel.groups + 1
    with pm.Model() as model:
        effects = pm.Normal("effects", 0.0, pm.HalfNormal("tau", 1.0), shape=funnel.groups)
        pm.Normal("y", effects[np.arange(60) % funnel.groups], 1.0, observed=np.zeros(60))
        parts = ModelParts(model, dp.PrivacyBudget(1.0, 1e-6))
    precision = np.r_[0.0, np.full(funnel.groups, 1.0 / funnel.variance)]
    released = SimpleNamespace(
        coordinates=Coordinates(np.zeros(d), np.eye(d)),
        score=precision * np.r_[0.0, funnel.seen],
        curvature=np.diag(precision),
        covariance=np.diag(precision**2 * funnel.noise),
        normal=lambda parts: None,
    )
    released.log_target = partial(quadratic.Quadratic.log_target, released)
    explored = quadratic.Quadratic.explored(released, parts)
    assert explored.effective > 800 and not explored.doubt
    shift, ratio = funnel.errors(np.roll(explored.draws, -1, axis=1))
    assert shift < 0.08 and ratio < 0.05


@pytest.mark.slow
def test_many_parameters_are_explored():
    """The mass matrix of the first 101 draws is singular in 120 dimensions, and chains stood still.

    Means of some 4000 draws differ by six standard errors with probability 1e-7 in all.
    """
    d = 120
    theta = pt.vector("theta", shape=(d,))
    widths = np.geomspace(0.1, 2.0, d)
    target = -pt.sum((theta / widths) ** 2) / 2.0
    starts = np.random.default_rng(4).normal(size=(4, d)) * widths
    for scaling in (None, np.diag(widths)):
        explored = explore(theta, target, starts, 5, scaling)
        assert not explored.doubt
        off = explored.draws.mean(axis=0) / widths
        assert np.abs(off).max() < 6.0 / np.sqrt(explored.effective)
        assert np.abs(explored.draws.std(axis=0) / widths - 1.0).max() < 0.25


@pytest.mark.slow
def test_item_responses_of_many_persons_are_those_of_their_records():
    """100 persons with 200 answers each; what is sure is the difference to items alone.

    The released curvature knows that a shift of all persons and all items is left to the prior:
    of width 1 / sqrt(120) = 0.09. Of a diagonal one, it was 0.02.
    """
    rng = np.random.default_rng(0)
    person, item = rng.integers(0, 100, 20_000), rng.integers(0, 20, 20_000)
    ability, level = rng.normal(size=100), rng.normal(size=20)
    chance = 1.0 / (1.0 + np.exp(level[item] - ability[person]))
    with pm.Model():
        logit = pm.Normal("ability", shape=100)[person] - pm.Normal("level", shape=20)[item]
        pm.Bernoulli("y", logit_p=logit, observed=rng.random(20_000) < chance)
        dp.PrivacyBudget(16.0, 1e-6)
        idata = dp.sample(chains=4, cores=1, progressbar=False, step_kwargs={"form": "quadratic"})
    drawn = _compat.group(idata, "posterior")["ability"].values.reshape(-1, 100)
    assert 0.06 < drawn.mean(axis=1).std() < 0.13
    relative = drawn - drawn.mean(axis=1, keepdims=True)
    z = (relative.mean(axis=0) - (ability - ability.mean())) / relative.std(axis=0)
    # 100 squares of which the sum is chi-square: beyond this with probability 1e-7
    assert np.mean(z**2) < 1.9 and np.abs(z).max() < 6.5
    assert relative.std(axis=0).mean() < 0.3


@pytest.mark.slow
def test_what_is_far_from_its_mode_takes_mean_and_covariance_of_draws(monkeypatch, recwarn):
    drawn = []

    def kept(*args, draws=quadratic.Quadratic.explored, **options):
        drawn.append(draws(*args, **options))
        return drawn[-1]

    monkeypatch.setattr(laplace_module, "_departure", lambda *_: "it leans to one side")
    monkeypatch.setattr(quadratic.Quadratic, "explored", kept)
    model, budget = model_of(20.0)
    with model:
        dp.laplace(10, progressbar=False)
    [(draws, effective, apart)], plan = drawn, plan_of(budget)
    assert effective > 1000 and not apart
    scaling = np.array(plan["scaling"])
    assert draws.shape == (4000, D + 1)
    assert np.allclose(plan["location"], draws.mean(axis=0), rtol=1e-9)
    assert np.allclose(scaling @ scaling.T, np.cov(draws.T), rtol=1e-6, atol=1e-12)
    # these are near normal, and that is what is said: 4,000 draws are at 5 errors of 0.02 or less
    assert plan["departs"] == "" and plan["centre"] == "mean"
    assert not [w for w in recwarn if "unreliable" in str(w.message)]


@pytest.mark.slow
def test_draws_that_wander_off_tell_nothing(monkeypatch):
    """Where a prior has no bound the target may have no mean."""

    def wandering(*_, **__):
        draws = 1e4 * np.random.default_rng(0).standard_cauchy((4000, D + 1))
        return Explored(draws, 4000.0, False)

    monkeypatch.setattr(laplace_module, "_departure", lambda *_: "it leans to one side")
    monkeypatch.setattr(quadratic.Quadratic, "explored", wandering)
    model, budget = model_of(20.0)
    with model, pytest.warns(UserWarning, match="unreliable: it leans to one side"):
        dp.laplace(10, progressbar=False)
    assert np.abs(np.array(plan_of(budget)["location"][:D]) - TRUTH).max() < 12 * 0.013


def test_improper_priors_are_said_before_anything_is_spent():
    rng = np.random.default_rng(0)
    with pm.Model() as model:
        mu, sigma = pm.Flat("mu"), pm.HalfFlat("sigma")
        pm.Normal("y", mu, sigma, observed=rng.normal(50, 7, 100))
        budget = dp.PrivacyBudget(0.5, 1e-6)
    with model, warnings.catch_warnings():
        warnings.filterwarnings("error", "The prior of mu, sigma is improper")
        with pytest.raises(UserWarning, match="Nothing has been spent"):
            dp.laplace(10, progressbar=False)
    assert not [e for e in budget.ledger.entries() if e.kind == "charge"]
    with model, pytest.warns(UserWarning, match="so the result is not a posterior"):
        idata = dp.laplace(10, progressbar=False)
    text = dp.privacy_statement(idata)
    assert "TOO SMALL" in text and "IMPROPER PRIOR OF mu, sigma" in text


@pytest.mark.slow
def test_what_public_observations_bound_is_not_improper(recwarn):
    with pm.Model() as model:
        mu = pm.Flat("mu")
        pm.Normal("pilot", mu, 1.0, observed=np.array([0.2, -0.3, 0.1]))
        pm.Normal("y", mu, 1.0, observed=np.random.default_rng(0).normal(size=500))
        dp.PrivacyBudget(8.0, 1e-5, public=["pilot"], privacy_unit={"y": np.arange(500)})
    with model:
        idata = dp.laplace(10, progressbar=False)
    assert "IMPROPER" not in dp.privacy_statement(idata)
    assert not [w for w in recwarn if "improper" in str(w.message)]


@pytest.mark.slow
@pytest.mark.parametrize("prior", marked([pm.Flat, pm.HalfFlat], exhaustive=[pm.Flat]))
def test_an_improper_parameter_that_no_record_sees_leaves_the_others_alone(prior):
    """Its width is that of the search, and took all digits from the others."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=2000)
    with pm.Model() as model:
        a, b = pm.Normal("a", 0, 10), pm.Normal("b", 0, 10)
        prior("u")
        pm.Normal("y", a + b * x, 1.0, observed=1.0 + 2.0 * x + rng.normal(size=2000))
        dp.PrivacyBudget(8.0, 1e-6)
    with model, pytest.warns(UserWarning, match="The prior of u is improper"):
        idata = dp.laplace(1000, progressbar=False)
    posterior = _compat.group(idata, "posterior")
    for name, truth in (("a", 1.0), ("b", 2.0)):
        # the exact posterior has an sd of .022, and noise hides about as much
        assert posterior[name].std() < 6 * 0.022
        assert abs(posterior[name].mean() - truth) < 15 * 0.022
    assert "IMPROPER PRIOR OF u" in dp.privacy_statement(idata)


@pytest.mark.slow
def test_draws_far_from_what_was_looked_at_are_said(monkeypatch):
    monkeypatch.setattr(quadratic.Quadratic, "far", lambda *_: 0.3)
    model, _ = model_of(20.0)
    with model, pytest.warns(UserWarning, match="30% of the draws lie far"):
        idata = dp.laplace(10, progressbar=False)
    assert "UNRELIABLE: 30% of the draws lie far" in dp.privacy_statement(idata)


@pytest.mark.slow
def test_a_hierarchy_whose_prior_curves_without_bound_at_the_start():
    rng = np.random.default_rng(3)
    group, means = rng.integers(0, 8, N), rng.normal(1.0, 0.7, 8)
    with pm.Model():
        mu, tau = pm.Normal("mu", 0, 5), pm.HalfNormal("tau", 2)
        alpha = pm.Normal("alpha", mu, tau, shape=8)
        sigma = pm.HalfNormal("sigma", 3)
        pm.Normal("y", alpha[group], sigma, observed=rng.normal(means[group], 1.5))
        dp.PrivacyBudget(20.0, 1e-6)
        posterior = _compat.group(dp.laplace(500, progressbar=False), "posterior")
    # means of 750 records have standard errors of .055; at 12 of them no false alarm
    found = posterior["alpha"].values.reshape(-1, 8)
    assert np.abs(found.mean(axis=0) - means).max() < 12 * 0.055
    assert 0.7 * 0.055 < found.std(axis=0).min() and found.std(axis=0).max() < 3 * 0.055


def test_what_no_record_sees_begins_where_the_others_put_it():
    """A search leaves mu and tau anywhere; draws far from there are not far from the data."""
    means = np.array([0.2, 1.1, 1.9, 0.7, -0.4])
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0, 5), pm.HalfNormal("tau", 2)
        alpha = pm.Normal("alpha", mu, tau, shape=5)
        pm.Normal("y", alpha[np.arange(100) % 5], 1.0, observed=np.zeros(100))
    records = extract(model)
    before = Coordinates(records.initial, np.diag([5.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0]))
    terms, unseen = PublicTerms.of(records, before), np.array([0, 1])
    lost = Coordinates(np.array([-27.0, 8.4, *means]), np.eye(7))
    begin, reach = laplace_module._settled(terms, lost, before, unseen)
    place = lost.theta(begin)
    np.testing.assert_array_equal(place[2:], means)
    assert abs(place[0] - means.mean()) < 0.1
    assert 0.5 * means.std() < np.exp(place[1]) < 1.5 * means.std()
    # tau may not go to 0: five of its standard deviations, of about 1 / sqrt(2 * 5)
    assert 25.0 * 7 / reach[1, 1] == pytest.approx((5.0 * 0.32) ** 2, rel=0.3)

    drawn = np.random.default_rng(0).standard_normal((1000, 7)) + place
    parts = SimpleNamespace(engine=RowEngine.of(records, before))
    assert quadratic.Quadratic.far(SimpleNamespace(clip=lost), drawn, parts) == 0.0
    assert quadratic.far_from(lost.location, drawn) == 1.0


def test_too_small_a_budget_leaves_the_prior_of_a_hierarchy():
    """Whose density has no bound, so that a mode would be a spike or nowhere."""
    rng = np.random.default_rng(4)
    with pm.Model():
        tau = pm.HalfNormal("tau", 1.0)
        alpha = pm.Normal("alpha", 0.0, tau, shape=8)
        pm.Normal("y", alpha[np.arange(N) % 8], 1.0, observed=rng.normal(size=N))
        dp.PrivacyBudget(0.01, 1e-6)
        with pytest.warns(UserWarning, match="too small"):
            posterior = _compat.group(dp.laplace(500, progressbar=False), "posterior")
    # the prior's sd of an effect is 1, half of its central 68 % is 0.68; 2000 draws
    spread = posterior["alpha"].values.reshape(-1, 8).std(axis=0)
    assert np.isfinite(posterior["tau"].values).all()
    assert 0.5 < spread.min() and spread.max() < 1.5


def test_a_flat_density_is_no_wider_than_ten_priors():
    least = np.diag([1.0, 0.1])
    wide = laplace_module._widths(np.array([[4.0, 0.0], [0.0, 1e-8]]), least)
    np.testing.assert_allclose(wide @ wide.T, np.diag([0.25, 100.0]), rtol=1e-9)
    kept = np.array([[4.0, 0.3], [0.3, 1.0]])
    wide = laplace_module._widths(kept, least)
    np.testing.assert_allclose(np.linalg.inv(wide @ wide.T), kept, rtol=1e-9)


@pytest.mark.slow
def test_find_map_leaves_the_rest_of_the_budget(tmp_path):
    model, budget = model_of(20.0)
    with model:
        found = dp.find_MAP(share=0.5, progressbar=False)
    assert isinstance(found, xr.Dataset)
    assert list(found["estimate"].values) == ["mode", "sd"]
    mode, sd = (found["beta"].sel(estimate=name).values for name in ("mode", "sd"))
    assert np.abs(mode - TRUTH).max() < 12 * 0.013 and (sd > 0.7 * 0.013).all()
    assert budget.spent().gdp_mu2 == pytest.approx(0.5 * budget_mu2(budget), rel=1e-6)
    facts = json.loads(found.attrs[FACTS])
    assert facts["sampler"] == "find_MAP" and facts["preparation"]["releases"] > 5
    assert "find_MAP" in dp.privacy_statement(found)
    page = dp.report(found, tmp_path / "report.html", model=model).read_text(encoding="utf-8")
    assert all(f"<td>{value:.4g}</td>" in page for value in (*mode, *sd))


def budget_mu2(budget: dp.PrivacyBudget) -> float:
    return budget.spent().gdp_mu2 + budget.remaining().gdp_mu2


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_share_out_of_range(share):
    model, budget = model_of(1.0)
    with model, pytest.raises(ValueError, match="share"):
        dp.laplace(10, share=share, progressbar=False)
    assert budget.spent().gdp_mu2 == 0


def test_laplace_needs_a_budget():
    with pm.Model() as model:
        pm.Normal("mu")
    with model, pytest.raises(UnsafeModel, match="needs a privacy budget"):
        dp.laplace(10)


# -- forecast --------------------------------------------------------------------------------------


def forecast_of(**changes):
    known = {
        "draws": 1000,
        "tune": 0,
        "chains": 4,
        "d": 10,
        "mu2": 0.7,
    }
    budget = SimpleNamespace(
        n_public=changes.pop("n", 100_000),
        delta=changes.pop("delta", 1e-6),
        sensitivity=changes.pop("sensitivity", 2.0),
    )
    sampler = changes.pop("sampler", "DPLangevin")
    return forecast.forecast_of(budget, sampler, **{**known, **changes})


def test_noise_falls_with_records_and_budget():
    base = forecast_of()
    assert base.form == "anchored" and base.enough
    assert forecast_of(n=400_000).noise_sd == pytest.approx(base.noise_sd / 2)
    assert forecast_of(mu2=0.7 * 4).noise_sd == pytest.approx(base.noise_sd / 2)
    assert forecast_of(sensitivity=1.0).noise_sd == pytest.approx(base.noise_sd / 2)


def test_small_budgets_are_said_to_be_small():
    small = forecast_of(n=1000, mu2=0.05)
    assert small.form == "quadratic" and not small.enough
    assert "raise the budget to epsilon = " in str(small) and "x the records" in str(small)
    part = forecast_of(n=1000, mu2=0.05, whole=0.1)
    assert part.noise_sd == small.noise_sd and part.advice != small.advice
    chains = forecast_of(sampler="DPHMC", mu2=0.05)
    assert not chains.enough and "effective draws" in chains.advice


@pytest.mark.parametrize("sampler", ["DPLangevin", "DPHMC", "DPPenalty"])
def test_many_parameters_with_few_records_each_are_told(sampler):
    """Runs with the first figures gave about the prior, regressions with the second did not."""
    for n, d, epsilon in [(20_000, 500, 2.0), (2000, 50, 4.0), (500, 4, 1.0), (200, 4, 1.0)]:
        mu2 = mu_from_budget(epsilon, 1e-6) ** 2
        found = forecast_of(sampler=sampler, n=n, d=d, mu2=mu2)
        assert not found.enough
        assert "records for each parameter tell" in found.advice
        assert "little more than the prior" in found.advice and "raise the budget" in found.advice
    for n, d, epsilon in [(1000, 4, 1.0), (2000, 50, 8.0), (20_000, 4, 2.0), (20_000, 86, 2.0)]:
        mu2 = mu_from_budget(epsilon, 1e-6) ** 2
        assert "prior" not in forecast_of(sampler=sampler, n=n, d=d, mu2=mu2).advice


def item_responses(persons: int, n: int) -> pm.Model:
    """A Rasch model of n answers to ten items, and answers that tell nothing."""
    rng = np.random.default_rng(6)
    person, item = rng.integers(0, persons, n), rng.integers(0, 10, n)
    with pm.Model() as model:
        logit = pm.Normal("ability", shape=persons)[person] - pm.Normal("level", shape=10)[item]
        pm.Bernoulli("y", logit_p=logit, observed=rng.integers(0, 2, n))
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("error:The budget buys next to nothing")
def test_item_responses_are_told_what_they_will_get_before_they_pay():
    with item_responses(persons=90, n=4000):
        budget = dp.PrivacyBudget(2.0, 1e-6)
        assert "next to nothing" in str(budget.plan())
        with pytest.raises(UserWarning, match=r"40 records.*fewer parameters.*has been spent"):
            dp.sample(progressbar=False)
    assert budget.spent().gdp_mu2 == 0


@pytest.mark.slow
def test_what_noise_hides_of_a_curvature_is_told_before_and_after():
    for n, d, epsilon, diagonal in [
        (20_000, 500, 8.0, True),
        (20_000, 240, 4.0, True),
        (20_000, 240, 8.0, False),
        (2000, 60, 2.0, False),  # hidden as a whole, and left to the prior
        (1_000_000, 500, 8.0, True),  # too much to compute
    ]:
        mu2 = mu_from_budget(epsilon, 1e-6) ** 2
        found = forecast_of(sampler="DPLangevin", n=n, d=d, mu2=mu2)
        assert found.form == "anchored" or found.diagonal == diagonal
        assert whole_curvature(n, d, mu2) != diagonal
        assert ("sums and means" in found.advice) == found.diagonal
    with item_responses(persons=60, n=2000):
        budget = dp.PrivacyBudget(8.0, 1e-6)
        assert "70 parameters depend on each other" in str(budget.plan())
        with pytest.warns(UserWarning, match=r"their sums and means.*Nothing has been spent"):
            idata = dp.laplace(progressbar=False)
    assert "ONLY THE DIAGONAL OF THE CURVATURE" in dp.privacy_statement(idata)


def test_the_advice_is_enough():
    small = forecast_of(n=2000, mu2=0.05)
    factor = float(small.advice.split("collect ")[1].split("x")[0])
    assert forecast_of(n=round(2000 * factor * 1.1), mu2=0.05).enough


def test_draws_auto():
    assert forecast_of(draws="auto").draws == 1000
    few = forecast_of(draws="auto", sampler="DPHMC", mu2=0.05)
    many = forecast_of(draws="auto", sampler="DPHMC", mu2=50.0)
    assert 20 <= few.draws < many.draws <= 1000


def test_budget_plan_spends_nothing():
    model, budget = model_of(1.0)
    with model:
        plan = budget.plan(draws=200, chains=2, step=dp.DPPenalty)
        assert plan.d == D + 1 and plan.n == N and plan.sampler == "DPPenalty"
        assert "Privacy noise in the posterior mean" not in str(plan)  # it is in the next line
        assert f"Effective draws: about {plan.effective_draws:.2g};" in str(plan)
        with pytest.raises(ValueError, match="step must be one of"):
            budget.plan(step="NUTS")
    assert budget.spent().gdp_mu2 == 0
    with pm.Model() as other:
        pm.Normal("mu")
    with pytest.raises(UnsafeModel, match="another model"):
        budget.plan(other)
    with pytest.raises(ValueError, match=r"must be a PyMC model, not int.*draws=500"):
        budget.plan(500)


RECORDS = np.linspace(0.1, 2.0, 60)
#: Models that cannot be sampled privately.
REFUSED = {
    "discrete parameter": lambda: pm.Normal("y", pm.Poisson("k", 2.0), 1.0, observed=RECORDS),
    "one latent per record": lambda: pm.Normal(
        "y", pm.Normal("latent", shape=60), 1.0, observed=RECORDS
    ),
    "support": lambda: pm.Uniform("y", 0, pm.HalfNormal("top"), observed=RECORDS),
    "potential": lambda: (
        pm.Normal("y", pm.Normal("mu"), 1.0, observed=RECORDS),
        pm.Potential("penalty", pt.as_tensor(1.0)),
    ),
    "latent Gaussian process": lambda: pm.Normal(
        "y",
        pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, ls=pm.HalfNormal("ls"))).prior(
            "f", X=RECORDS[:, None]
        ),
        1.0,
        observed=RECORDS,
    ),
    "marginal Gaussian process": lambda: pm.gp.Marginal(
        cov_func=pm.gp.cov.ExpQuad(1, ls=pm.HalfNormal("ls"))
    ).marginal_likelihood("y", X=RECORDS[:, None], y=RECORDS, sigma=1.0),
    "autoregression": lambda: pm.AR("y", rho=pm.Normal("rho", shape=1), observed=RECORDS),
    "edge": lambda: pm.Normal("y", 0, pm.HalfNormal("sigma", initval=0.0), observed=RECORDS),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore:These data already have a budget")
def test_budget_plan_refuses_what_cannot_be_sampled(what):
    """In the words of dp.sample, before anything is spent."""
    texts = []
    for call in (dp.PrivacyBudget.plan, lambda _: dp.sample(draws=10, progressbar=False)):
        with pm.Model():
            REFUSED[what]()
            budget = dp.PrivacyBudget(1.0, 1e-6)
            with pytest.raises(ValueError) as error:
                call(budget)
        assert budget.spent().gdp_mu2 == 0
        texts.append(f"{type(error.value)}: {error.value}")
    assert texts[0] == texts[1]


def test_budget_plan_reads_no_record():
    """It forecasts for data that dp.sample refuses for what they hold."""
    with pm.Model() as model:
        x = pm.Data("x", np.where(RECORDS > 1.0, np.inf, RECORDS))
        labels = pm.Data("labels", np.full(60, 7))
        pm.Normal("y", pm.Normal("b", shape=2)[labels] * x, 1.0, observed=RECORDS)
        budget = dp.PrivacyBudget(1.0, 1e-6)
        assert budget.plan().d == 2
        with pytest.raises(UnsafeModel):
            dp.sample(model=model, progressbar=False)


@pytest.mark.slow
def test_sample_takes_draws_auto():
    model, budget = model_of(20.0)
    with model:
        expected = budget.plan(draws="auto", chains=1, step=dp.DPPenalty).draws
        idata = dp.sample(
            "auto", chains=1, cores=1, step=dp.DPPenalty, progressbar=False, random_seed=1
        )
    assert _compat.group(idata, "posterior").sizes["draw"] == expected
