"""Stochastic gradients with control variates: the right temperature, and what bias is left."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.kernels import sgmcmc
from tests.kernels.test_sgmcmc import CHAINS, D, Flat, Gaussian, variance
from tests.selection import marked
from tests.subsampling.test_ecs_step import (
    agree,
    budgeted,
    latents,
    logistic_run,
    regression,
    sample,
)

pytestmark = pytest.mark.compiled

#: Two-sided normal tail 3.8e-8 for each of a few moments.
Z = 5.5


@pytest.mark.parametrize("h", [0.8, 0.4, 0.1])
def test_hamiltonian_dynamics_have_the_right_temperature(h: float) -> None:
    """The bias is h^2 / 8 in first order."""
    rng, queries = np.random.default_rng(1), Gaussian(2)

    def step(state):
        return sgmcmc.hamiltonian(rng, state, queries, Flat(), step_size=h, friction=1.0)

    start = sgmcmc.initial_hamiltonian(rng, rng.standard_normal((CHAINS, D)))
    found, error = variance(step, start, 400)
    assert abs(found - 1.0) < 0.14 * h**2 + Z * error


def test_a_wrong_temperature_is_found() -> None:
    rng, queries = np.random.default_rng(1), Gaussian(2)

    def step(state):  # a friction that takes out more than its noise puts in
        new, info = sgmcmc.hamiltonian(rng, state, queries, Flat(), step_size=0.1, friction=1.0)
        return new._replace(momentum=0.98 * new.momentum), info

    start = sgmcmc.initial_hamiltonian(rng, rng.standard_normal((CHAINS, D)))
    found, error = variance(step, start, 400)
    assert 1.0 - found > 0.001 + 2 * Z * error


def unit_gaussian() -> pm.Model:
    """A posterior that is normal, so that order 2 gives exact scores."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("y", mu, 1, observed=np.random.default_rng(0).normal(size=500))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "bias"),
    marked(
        [("SGLD", 0.25), ("SGHMC", 0.1), ("SGNHT", 0.1)],
        exhaustive=[("SGHMC", 0.1), ("SGNHT", 0.1)],
    ),
)
def test_variances_approach_1_as_steps_shrink(sampler: str, bias: float) -> None:
    model = unit_gaussian()
    for h in (0.4, 0.1):
        step = getattr(dp, sampler)(
            step_size=h, n_steps=8, subsample_size=10, model=model, progressbar=False
        )
        draws = _compat.group(sample(model, step, draws=1000, tune=100), "posterior")["mu"].values
        z = draws / np.sqrt(step.variates.curved.covariance[0, 0])
        ess = _compat.effective_draws(((z - z.mean()) ** 2)[..., None])
        allowed = bias * h * (1.3 if sampler == "SGLD" else h)
        assert abs(z.var() - 1) < allowed + Z * np.sqrt(2 / ess[0])


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["SGLD", "SGHMC", "SGNHT"])
def test_chains_agree_with_hmcecs(sampler: str) -> None:
    model = regression("logistic")
    step = getattr(dp, sampler)(
        step_size=0.1, n_steps=10, subsample_size=200, model=model, progressbar=False
    )
    assert agree(sample(model, step, draws=600, tune=50), logistic_run("perturbed")[1])


@pytest.mark.slow
def test_without_control_variates_samples_add_variance() -> None:
    model = regression("logistic")
    found = {}
    for order in (0, 2):
        step = dp.SGLD(
            step_size=0.2, order=order, subsample_size=200, model=model, progressbar=False
        )
        draws = _compat.group(sample(model, step, draws=2000, tune=100), "posterior")["beta"].values
        found[order] = float(
            (draws.var(axis=(0, 1)) / np.diag(step.variates.curved.covariance)).mean()
        )
    assert found[0] > 3 * found[2]


def test_schedules_are_followed() -> None:
    model = unit_gaussian()
    step = dp.SGLD(step_size=lambda t: 0.1 / (1 + t), model=model, progressbar=False)
    stats = _compat.group(sample(model, step, draws=5, tune=5), "sample_stats")
    assert np.allclose(stats["step_size"].values[0], 0.1 / (1 + np.arange(5, 10)))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["SGLD", "SGHMC", "SGNHT"])
def test_chains_stay_in_the_support(sampler: str) -> None:
    rng = np.random.default_rng(0)
    with pm.Model() as model:
        b = pm.Uniform("b", -0.3, 0.3, default_transform=None)
        pm.Normal("y", b, 1.0, observed=rng.normal(0.25, 1.0, 100))
    step = getattr(dp, sampler)(subsample_size=50, model=model, progressbar=False)
    draws = _compat.group(sample(model, step, draws=1000, tune=10), "posterior")["b"].values
    assert np.abs(draws).max() < 0.3
    assert np.ptp(draws) > 0.1


@pytest.mark.parametrize("sampler", ["SGLD", "SGHMC", "SGNHT"])
def test_what_is_refused(sampler: str) -> None:
    step = getattr(dp, sampler)
    with pytest.raises(dp.UnsafeModel, match=f"{sampler} is not private"):
        step(model=budgeted(), progressbar=False)
    with pytest.raises(dp.NotFactorizable, match=f"{sampler} estimates"):
        step(model=latents(), progressbar=False)
    for size in (-0.1, 0.0, 1e-320, 2.2):
        with pytest.raises(ValueError, match=r"step_size must lie between 0\.0001 and 1"):
            step(model=unit_gaussian(), step_size=size, progressbar=False)
    for size in (np.nan, "a", [0.1]):
        with pytest.raises(ValueError, match="step_size must be"):
            step(model=unit_gaussian(), step_size=size, progressbar=False)
    if sampler != "SGLD":
        with pytest.raises(ValueError, match="friction must be positive"):
            step(model=unit_gaussian(), friction=0.0, progressbar=False)
