"""The example of the page "Write your own private step method"."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_step.py"


@pytest.fixture(scope="module")
def own_step():
    if not EXAMPLE.is_file():
        pytest.skip("the package is installed without its examples")
    spec = importlib.util.spec_from_file_location("own_step", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_step"] = module  # for processes that unpickle the step
    spec.loader.exec_module(module)
    yield module
    del sys.modules["own_step"]


# test: begin
class Flat:
    """No prior."""

    def log_density(self, z):
        return 0.0


class Noisy:
    """Log-likelihood ratios of N(0.5, 0.4^2), with noise of standard deviation 1.5."""

    def __init__(self, rng, told):
        self.rng, self.told = rng, told

    def log_ratio(self, z_from, z_to):
        exact = 0.5 * (((z_from - 0.5) / 0.4) ** 2 - ((z_to - 0.5) / 0.4) ** 2).sum()
        return exact + 1.5 * self.rng.standard_normal(), self.told


def spread(own_step, told, iterations=30_000):
    """Standard deviation of a long chain, over the true one."""
    rng = np.random.default_rng(3)
    queries, state = Noisy(rng, told), own_step.State(np.zeros(1), 0.0)
    draws = np.empty(iterations)
    for i in range(iterations):
        state, _ = own_step.transition(rng, state, queries, Flat(), step_size=0.5)
        draws[i] = state.z[0]
    return draws[1000:].std() / 0.4


def test_the_kernel_targets_the_posterior_whatever_the_noise(own_step):
    assert spread(own_step, told=1.5) == pytest.approx(1.0, abs=0.04)


def test_noise_that_is_not_accounted_for_is_found(own_step):
    assert spread(own_step, told=0.0) > 1.1


# test: end


def test_the_step_samples_through_the_package(own_step):
    rng = np.random.default_rng(5)
    y = rng.normal(0.3, 1.0, 200)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 1)
        pm.Normal("y", mu, 1.0, observed=y)
        budget = dp.PrivacyBudget(epsilon=50.0, delta=1e-4)
        released = dp.sample(
            30,
            chains=1,
            step=own_step.DPCrankNicolson,
            step_kwargs={"scaling": 0.1, "clip_norm": 0.3},
            progressbar=False,
        )
    assert released["posterior"]["mu"].shape == (1, 30)
    assert "DPCrankNicolson" in dp.privacy_statement(released)
    assert budget.spent().epsilon == pytest.approx(50.0, rel=1e-3)
    with model, pytest.raises(ValueError, match="between 0 and 1"):
        own_step.DPCrankNicolson(draws=30, chains=1, step_size=2.0)
