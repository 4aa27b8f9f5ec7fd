"""Release of an anchored run: draws that know of the noise in their score, end to end.

Nothing is sampled here: the draws are made, the plan is recorded by hand, and their release is
compared with what the mathematics says.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pymc as pm
import pytest
import xarray as xr
from pytensor.compile.mode import Mode

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.budget import get_budget
from pymc_dp.publication import noise_aware
from pymc_dp.publication.explore import Explored
from pymc_dp.publication.results import unconstrain
from pymc_dp.records.extraction import extract
from tests.anchored import (
    CHAINS,
    DRAWS,
    X,
    Y,
    anchored_result,
    budgeted,
    coordinates,
    facts,
    flat,
    linear,
    settings_of,
    transformed,
)
from tests.publication.test_noise_aware import Funnel

pytestmark = pytest.mark.compiled

# -- Gaussian: a closed form ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def gaussian():
    """A linear model, draws whose moments are those of the raw posterior, and the exact answer."""
    model, budget = budgeted(linear)
    location, scaling = coordinates(2)
    rng = np.random.default_rng(1)
    noise = np.diag([60.0, 40.0]) + 10.0
    # everything about theta here; in w = A^-1 (theta - m) scores are multiplied by A'
    curvature = X.T @ X
    noise_theta = np.linalg.inv(scaling).T @ noise @ np.linalg.inv(scaling)
    prior, prior_mean = np.diag([25.0, 0.25]), np.array([1.0, -2.0])
    score = X.T @ Y + rng.multivariate_normal(np.zeros(2), noise_theta)
    raw = np.linalg.inv(prior + curvature)
    raw_mean = raw @ (score + prior @ prior_mean)
    weight = curvature @ np.linalg.inv(curvature + noise_theta)
    exact = np.linalg.inv(prior + weight @ curvature)
    exact_mean = exact @ (weight @ score + prior @ prior_mean)

    white = rng.normal(size=(4 * 5000, 2))
    white -= white.mean(axis=0)
    white = white @ np.linalg.inv(np.linalg.cholesky(np.cov(white.T))).T  # exact moments
    theta = (raw_mean + white @ np.linalg.cholesky(raw).T).reshape(4, 5000, 2)
    result = anchored_result(model, budget, theta, settings_of(location, scaling, noise))
    return model, result, (raw_mean, raw), (exact_mean, exact)


def test_released_draws_have_the_exact_moments(gaussian):
    """At 5 standard errors of 20,000 draws: a false alarm rate below 1e-6 per comparison."""
    model, result, (raw_mean, raw), (exact_mean, exact) = gaussian
    safe = dp.release(result, model)
    assert sorted(_compat.group_names(safe)) == ["posterior", "posterior_raw", "sample_stats"]
    draws = _compat.group(safe, "posterior")["beta"].values.reshape(-1, 2)
    sd = np.sqrt(np.diag(exact))
    assert np.abs((draws.mean(axis=0) - exact_mean) / sd).max() < 5 / np.sqrt(len(draws))
    assert np.abs(draws.var(axis=0) / sd**2 - 1).max() < 5 * np.sqrt(2 / len(draws))
    # the raw draws are far from that
    assert np.abs((raw_mean - exact_mean) / sd).max() > 0.2
    assert (np.diag(raw) < 0.95 * sd**2).all()
    assert facts(safe)["noise_aware"]["method"] == "shift"
    assert facts(safe)["noise_aware"]["normal"] is True
    assert facts(safe)["noise_aware"]["widening"] == pytest.approx(
        np.sqrt(1 + np.mean(np.diag(exact) / np.diag(raw) - 1)), rel=0.2
    )


@pytest.mark.slow
def test_released_twice_is_the_same(gaussian):
    model, result, _, _ = gaussian
    first, second = dp.release(result, model), dp.release(result, model)
    for name in ("posterior", "posterior_raw"):
        xr.testing.assert_identical(_compat.group(first, name), _compat.group(second, name))
    assert dp.release(first, model) is first


@pytest.mark.slow
def test_raw_draws_stay_beside(gaussian):
    model, result, _, _ = gaussian
    safe = dp.release(result, model)
    raw = _compat.group(safe, "posterior_raw")["beta"].values
    assert np.array_equal(raw, _compat.group(result, "posterior")["beta"].values)
    # shifted draws keep their chains and their order
    aware = _compat.group(safe, "posterior")["beta"].values
    assert np.corrcoef(raw[0, :, 0], aware[0, :, 0])[0, 1] > 0.3


# -- transformed variables ------------------------------------------------------------------------


def near(model: pm.Model, budget: dp.PrivacyBudget, spread: float, seed: int = 0) -> np.ndarray:
    """Normal draws of the unconstrained parameters about the initial point."""
    records = extract(model, public=budget.public, check=False)
    rng = np.random.default_rng(seed)
    return records.initial + spread * rng.normal(size=(CHAINS, DRAWS, records.parameters.size))


@pytest.fixture(scope="module")
def mixed():
    model, budget = budgeted(transformed)
    theta = near(model, budget, 0.3)
    location, scaling = coordinates(5)
    settings = settings_of(location, scaling, 0.5 * np.eye(5))
    return model, budget, theta, settings, anchored_result(model, budget, theta, settings)


@pytest.mark.slow
def test_there_and_back(mixed):
    model, budget, theta, _, result = mixed
    parameters = extract(model, public=budget.public, check=False).parameters
    back = unconstrain(model, parameters, _compat.group(result, "posterior"))
    np.testing.assert_allclose(back, theta, rtol=0, atol=1e-12)


def vectors() -> None:
    """Transforms that act on whole vectors."""
    pm.Dirichlet("shares", np.ones(3))
    pm.Normal(
        "cuts", 0.0, 1.0, shape=3, transform=pm.distributions.transforms.ordered, initval=[-1, 0, 1]
    )
    sd = pm.HalfNormal.dist(1.0, shape=2)
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=sd)
    pm.TruncatedNormal("positive", 1.0, 1.0, lower=0.0)
    pm.MvNormal("y", np.zeros(2), chol=chol, observed=X)


@pytest.mark.slow
def test_there_and_back_for_vectors():
    model, budget = budgeted(vectors)
    theta = near(model, budget, 0.5)
    result = anchored_result(model, budget, theta, {})
    parameters = extract(model, public=budget.public, check=False).parameters
    back = unconstrain(model, parameters, _compat.group(result, "posterior"))
    np.testing.assert_allclose(back, theta, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_constrained_variables_and_deterministics_agree(mixed):
    """Each draw is one consistent set of values; supports are respected."""
    model, _, _, _, result = mixed
    safe = dp.release(
        result, model, var_names=["beta", "sigma", "lower", "middle", "spread", "scaled"]
    )
    for group in ("posterior", "posterior_raw"):
        draws = _compat.group(safe, group)
        assert (draws["sigma"] > 0).all()
        assert ((draws["middle"] > draws["lower"]) & (draws["middle"] < draws["lower"] + 3)).all()
        spread = np.exp(draws["beta"]).sum("effect") * draws["sigma"]
        xr.testing.assert_allclose(draws["spread"], spread)
        xr.testing.assert_allclose(draws["scaled"], 2.0 * draws["sigma"])
    moved = (
        _compat.group(safe, "posterior")["middle"] != _compat.group(safe, "posterior_raw")["middle"]
    )
    assert moved.mean() > 0.9
    assert _compat.group(safe, "posterior")["effect"].values.tolist() == [0, 1]
    assert facts(safe)["taken_as_public"] == ["scaled"]


@pytest.mark.slow
def test_what_is_asked_for_does_not_change_the_draws(mixed):
    model, _, _, _, result = mixed
    everything = _compat.group(dp.release(result, model), "posterior")
    assert list(everything) == ["beta", "sigma", "lower", "middle", "spread"]
    one = _compat.group(dp.release(result, model, var_names=["spread"]), "posterior")
    assert list(one) == ["spread"]
    xr.testing.assert_equal(one["spread"], everything["spread"])


@pytest.mark.slow
def test_the_correction_is_that_of_the_unconstrained_parameters(mixed, monkeypatch):
    """By hand: prior precision and score at the mean, in the coordinates of the score."""
    model, _, theta, settings, result = mixed
    location, scaling = (np.array(settings[name]) for name in ("location", "scaling"))
    seen = {}
    right = noise_aware.noise_aware

    def spy(rng, draws, noise, prior, **rest):
        seen.update(draws=draws, noise=noise, prior=prior)
        return right(rng, draws, noise, prior, **rest)

    monkeypatch.setattr("pymc_dp.publication.release.noise_aware", spy)
    dp.release(result, model)
    np.testing.assert_allclose(location + seen["draws"] @ scaling.T, theta, atol=1e-10)
    np.testing.assert_allclose(seen["noise"], 0.5 * np.eye(5))
    parameters = extract(model, check=False).parameters
    prior_gradient = model.compile_fn(
        pm.pytensorf.gradient(model.logp(vars=model.free_RVs), model.value_vars),
        inputs=model.value_vars,
        mode=Mode(linker="py", optimizer=None),
    )
    flat_draws = theta.reshape(-1, 5)
    scores = np.array([prior_gradient(parameters.point(draw)) for draw in flat_draws[::CHAINS]])
    # a fifth of the draws or more are looked at
    error = 5 * scores.std(axis=0) / np.sqrt(len(scores)) + 1e-8
    inverse = np.linalg.inv(scaling)
    assert (np.abs(inverse.T @ seen["prior"].score - scores.mean(axis=0)) < error).all()
    # the normal priors of beta: their part of the precision is known
    precision = inverse.T @ seen["prior"].precision @ inverse
    np.testing.assert_allclose(precision[:2, :2], np.eye(2), atol=1e-6)
    np.testing.assert_allclose(precision[:2, 2:], 0.0, atol=0.1)  # the others are not linear


# -- a prior that is not normal -------------------------------------------------------------------


@pytest.fixture(scope="module")
def hierarchy():
    """Effects of unknown spread, and noise in their score of twice the variance of their errors."""
    funnel = Funnel(0.25, 0.5)
    with pm.Model(coords={"effect": ["one", "two"]}) as model:
        effects = pm.Normal("effects", 0.0, pm.HalfNormal("tau", 1.0), shape=funnel.groups)
        pm.Normal("y", effects[np.arange(60) % funnel.groups], 1.0, observed=np.zeros(60))
        budget = dp.PrivacyBudget(epsilon=2.0, delta=1e-3)
    theta = np.roll(funnel.raw, 1, axis=1).reshape(4, -1, funnel.groups + 1)  # tau comes first
    settings = settings_of(
        np.zeros(funnel.groups + 1),
        np.eye(funnel.groups + 1),
        np.roll(funnel.covariance, (1, 1), axis=(0, 1)),
    )
    settings["anchor"]["pairs"] = np.diag([0] + [1] * funnel.groups).tolist()
    return funnel, model, anchored_result(model, budget, theta, settings)


@pytest.mark.slow
def test_a_prior_that_is_not_normal_is_explored(hierarchy):
    """As close to the exact posterior as 2,000 draws tell its curvature; and always the same."""
    funnel, model, result = hierarchy
    safe = dp.release(result, model, progressbar=False)
    assert facts(safe)["noise_aware"]["method"] == "explored"
    assert "prior times a normal likelihood" in " ".join(dp.privacy_statement(safe).split())
    posterior = _compat.group(safe, "posterior")
    effects = posterior["effects"].values.reshape(-1, funnel.groups)
    draws = np.column_stack([effects, np.log(posterior["tau"].values.ravel())])
    shift, ratio = funnel.errors(draws)
    assert shift < 0.1 and ratio < 0.07  # NUTS on the effects themselves: up to .09 and .13
    assert facts(safe)["noise_aware"]["explored"] > 800
    again = dp.release(result, model, progressbar=False)
    xr.testing.assert_identical(posterior, _compat.group(again, "posterior"))


@pytest.mark.slow
def test_draws_are_not_lost_where_exploring_fails(hierarchy, monkeypatch):
    _, model, result = hierarchy

    def fails(*arguments: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("pymc_dp.publication.release.explore", fails)
    with pytest.warns(UserWarning, match="could not be told from them and the prior together"):
        safe = dp.release(result, model, progressbar=False)
    assert facts(safe)["noise_aware"]["method"] == "widened"
    assert "and not moved" in dp.privacy_statement(safe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tries", "worth"),
    [
        ([(450, False)], 450),
        ([(90, False), (310, False)], 310),
        ([(310, False), (90, False)], 310),
        ([(float("nan"), False), None], 0),
        ([(350, False), None], 350),
        ([(350, False), (500, True)], 350),
        ([(600, True), (300, False)], 300),
        ([None, (120, False)], 120),
        ([(40, False), (49, False)], 0),
    ],
)
def test_explorations_that_are_usable_are_used(tries, worth, hierarchy, monkeypatch):
    """Which of two: effective draws and whether chains are apart, or None for a failure."""
    _, model, result = hierarchy
    left = list(tries)

    def explore(theta: Any, target: Any, starts: np.ndarray, *rest: Any) -> Explored:
        found = left.pop(0)
        if found is None:
            raise RuntimeError
        return Explored(np.repeat(starts, 10, axis=0), *found)

    monkeypatch.setattr("pymc_dp.publication.release.explore", explore)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        safe = dp.release(result, model, progressbar=False)
    assert not left
    noise_aware = facts(safe)["noise_aware"]
    assert noise_aware["method"] == ("explored" if worth else "widened")
    assert noise_aware["explored"] == worth
    assert ("unreliable" in noise_aware) == (worth == 0)
    if worth:
        assert f"worth about {worth} draws" in " ".join(dp.privacy_statement(safe).split())


@pytest.mark.slow
def test_the_width_of_what_no_record_sees_is_no_fault(hierarchy):
    """The scale of effects may be known worse than the prior's normal approximation says."""
    funnel, model, _ = hierarchy
    settings = settings_of(
        np.zeros(funnel.groups + 1),
        np.diag([0.05] + [1.0] * funnel.groups),
        np.roll(funnel.covariance, (1, 1), axis=(0, 1)),
    )
    settings["anchor"]["pairs"] = np.diag([0] + [1] * funnel.groups).tolist()
    theta = np.roll(funnel.raw, 1, axis=1).reshape(4, -1, funnel.groups + 1)
    assert theta[..., 0].std() / 0.05 > 2.5
    budget = get_budget(model)
    safe = dp.release(anchored_result(model, budget, theta, settings, plan_id=9), model)
    assert "unreliable" not in facts(safe)["noise_aware"]


@pytest.mark.slow
def test_frozen_draws_play_no_part(mixed):
    model, budget, theta, settings, _ = mixed
    result = anchored_result(model, budget, theta, settings, plan_id=8, frozen=100)
    safe = dp.release(result, model)
    assert _compat.group(safe, "posterior").sizes["draw"] == DRAWS - 100
    assert _compat.group(safe, "posterior_raw").sizes["draw"] == DRAWS - 100


# -- skewed posteriors ----------------------------------------------------------------------------


def skewed_result(noise_sd: float, plan_id: int) -> tuple[pm.Model, Any]:
    model, budget = budgeted(flat)
    rng = np.random.default_rng(3)
    theta = 0.3 * (rng.gamma(3.0, size=(CHAINS, 2000, 2)) - 3.0)
    noise = noise_sd**2 * np.eye(2)
    settings = settings_of(np.zeros(2), np.eye(2), noise, clipping="consistent")
    return model, anchored_result(model, budget, theta, settings, plan_id=plan_id)


@pytest.mark.slow
def test_a_skewed_posterior_is_resampled_where_weights_allow():
    model, result = skewed_result(0.5, 1)
    safe = dp.release(result, model)
    assert facts(safe)["noise_aware"]["method"] == "resampled"
    assert facts(safe)["noise_aware"]["normal"] is False
    raw = _compat.group(safe, "posterior_raw")["beta"].values.ravel()
    aware = _compat.group(safe, "posterior")["beta"].values.ravel()
    assert np.abs(np.subtract.outer(aware[:50], raw)).min(axis=1).max() < 1e-12
    text = dp.privacy_statement(safe)
    assert "not near normal, and draws were resampled" in text
    assert "given back on average" in text and "bias of clipping" not in text


@pytest.mark.slow
def test_a_skewed_posterior_is_shifted_with_a_warning_otherwise():
    model, result = skewed_result(50.0, 2)
    safe = dp.release(result, model)
    assert facts(safe)["noise_aware"]["method"] == "shift"
    assert "only approximately: the posterior is not near normal" in dp.privacy_statement(safe)


# -- the statement --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_statement_says_what_intervals_mean(gaussian):
    model, result, _, _ = gaussian
    safe = dp.release(result, model)
    text = dp.privacy_statement(safe)
    assert "account for the privacy noise in the released score" in text
    assert "posterior_raw" in text
    assert "do not account for the bias of clipping" in text
    stated = facts(safe)["settings"]
    assert not {"anchor", "location", "scaling", "secure"} & set(stated)
    assert stated["clip_norm"] == {"anchor": 1.5}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"keep": ("beta", "sigma")}, "lower, middle were not kept"),
        ({"frozen": DRAWS - 3}, "too few draws"),
    ],
)
def test_what_can_not_be_corrected_says_so(mixed, change, reason):
    model, budget, theta, settings, _ = mixed
    plan_id = {"keep": 20, "frozen": 21}[next(iter(change))]
    result = anchored_result(model, budget, theta, settings, plan_id=plan_id, **change)
    with pytest.warns(UserWarning, match=f"not accounted for, because .*{reason}.*too narrow"):
        safe = dp.release(result, model)
    found = facts(safe)["noise_aware"]
    assert found["method"] == "none" and reason in found["reason"]
    assert "too narrow: " in dp.privacy_statement(safe) and reason in dp.privacy_statement(safe)
    xr.testing.assert_equal(_compat.group(safe, "posterior"), _compat.group(safe, "posterior_raw"))


@pytest.mark.slow
def test_a_draw_on_the_boundary_can_not_be_moved(mixed):
    model, budget, theta, settings, _ = mixed
    theta = theta.copy()
    theta[0, 0, 4] = 60.0  # `middle` is rounded to its upper bound
    result = anchored_result(model, budget, theta, settings, plan_id=30)
    with pytest.warns(UserWarning, match="not accounted for"):
        safe = dp.release(result, model)
    assert "boundary" in facts(safe)["noise_aware"]["reason"]


def test_a_run_without_an_anchor_is_released_as_it_is(mixed):
    model, budget, theta, settings, _ = mixed
    plain = {k: v for k, v in settings.items() if k != "anchor"}
    safe = dp.release(anchored_result(model, budget, theta, plain, plan_id=40), model)
    assert sorted(_compat.group_names(safe)) == ["posterior", "sample_stats"]
    assert "noise_aware" not in facts(safe)


@pytest.mark.slow
def test_a_released_result_survives_a_file(gaussian, tmp_path):
    model, result, _, _ = gaussian
    safe = dp.release(result, model)
    safe.to_netcdf(str(tmp_path / "posterior.nc"))
    if _compat.PYMC_MAJOR < 6:
        import arviz as az

        back = az.from_netcdf(str(tmp_path / "posterior.nc"))
    else:
        back = xr.open_datatree(tmp_path / "posterior.nc", engine="h5netcdf")
    assert dp.privacy_statement(back) == dp.privacy_statement(safe)
    assert dp.release(back, model) is back
    for name in ("posterior", "posterior_raw"):
        xr.testing.assert_equal(_compat.group(back, name), _compat.group(safe, name))
