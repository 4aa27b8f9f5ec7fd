"""Stochastic-gradient dynamics: the right temperature, and what bias is left."""

from __future__ import annotations

import numpy as np
import pytest

from pymc_dp.kernels import sgmcmc
from pymc_dp.kernels.interfaces import Array

CHAINS, D = 2000, 2
#: Two-sided normal tail 3.8e-8 for each of a few moments.
Z = 5.5


class Flat:
    def log_density(self, z: Array) -> Array:
        return np.zeros(z.shape[:-1])

    def gradient(self, z: Array) -> Array:
        return np.zeros_like(z)


class Gaussian:
    """Score -z of N(0, I), with noise that is told and noise that is not."""

    def __init__(self, seed: int, told: float = 0.0, hidden: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.gradient_noise_sd, self.hidden = told, hidden

    def gradient(self, z: Array) -> Array:
        sd = np.hypot(self.gradient_noise_sd, self.hidden)
        return -z + sd * self.rng.standard_normal(z.shape)


def variance(step, state, iterations: int, discard: int = 200) -> tuple[float, float]:
    """Mean over chains of time averages of z^2, and its standard error."""
    total = np.zeros(CHAINS)
    for k in range(discard + iterations):
        state, _ = step(state)
        if k >= discard:
            total += np.square(state.z).mean(axis=-1)
    return total.mean() / iterations, total.std(ddof=1) / iterations / np.sqrt(CHAINS)


def langevin_variance(h: float, told: float, hidden: float = 0.0, drift: float = 1.0):
    rng, queries = np.random.default_rng(1), Gaussian(2, told, hidden)

    def step(state):
        new, info = sgmcmc.langevin(rng, state, queries, Flat(), step_size=h)
        # a planted fault doubles the drift, as the published private samplers do
        return new._replace(z=new.z - 0.5 * (drift - 1.0) * h * state.z), info

    return variance(step, sgmcmc.SGLDState(rng.standard_normal((CHAINS, D))), 400)


@pytest.mark.parametrize(("h", "told"), [(0.05, 0.0), (0.05, 8.0), (0.2, 3.0)])
def test_langevin_has_the_right_temperature(h: float, told: float) -> None:
    assert h <= sgmcmc.largest_step(told)
    found, error = langevin_variance(h, told)
    assert abs(found - 1.0 / (1.0 - h / 4.0)) < Z * error
    wrong, error = langevin_variance(h, told, drift=2.0)
    assert abs(wrong - 0.5 / (1.0 - h / 2.0)) < Z * error and 1.0 - wrong > 50 * error


def test_noise_of_batches_biases_langevin_by_a_multiple_of_the_step() -> None:
    """A score with hidden noise of variance v: 1 + h v / 4 of the variance, in first order."""
    for h in (0.1, 0.025):
        found, error = langevin_variance(h, 0.0, hidden=3.0)
        assert abs(found - (1.0 + h * 9.0 / 4.0) / (1.0 - h / 4.0)) < Z * error


def thermostat_variance(h: float, told: float, hidden: float, fixed: bool = False):
    rng, queries = np.random.default_rng(3), Gaussian(4, told, hidden)

    def step(state):
        new, info = sgmcmc.thermostat(rng, state, queries, Flat(), step_size=h, friction=1.0)
        return (new._replace(friction=state.friction) if fixed else new), info

    start = sgmcmc.initial_thermostat(rng, rng.standard_normal((CHAINS, D)), 1.0)
    return variance(step, start, 600, discard=400)


@pytest.mark.parametrize(("told", "hidden"), [(0.0, 0.0), (2.0, 0.0), (2.0, 4.0)])
def test_the_thermostat_absorbs_noise_that_nobody_told_it_of(told: float, hidden: float) -> None:
    # a bias of order h^2 is left
    found, error = thermostat_variance(0.1, told, hidden)
    assert abs(found - 1.0) < 0.01 + Z * error


def test_without_its_variable_it_does_not() -> None:
    found, error = thermostat_variance(0.1, 2.0, 4.0, fixed=True)
    assert found - 1.0 > 0.2 > 20 * error


@pytest.mark.parametrize("kernel", ["langevin", "thermostat"])
def test_chains_never_leave_the_finite_numbers(kernel: str) -> None:
    class Explosive(Gaussian):
        def gradient(self, z: Array) -> Array:
            assert np.isfinite(z).all()
            return 1e300 * z**3

    rng, queries = np.random.default_rng(5), Explosive(6)
    z = rng.standard_normal((50, D))
    for _ in range(20):
        if kernel == "langevin":
            new, info = sgmcmc.langevin(rng, sgmcmc.SGLDState(z), queries, Flat(), step_size=0.5)
        else:
            state = sgmcmc.initial_thermostat(rng, z, 1.0)
            new, info = sgmcmc.thermostat(rng, state, queries, Flat(), step_size=0.5, friction=1.0)
        assert np.isfinite(new.z).all()
        assert np.array_equal((new.z != z).any(axis=-1), info.accepted)
        z = new.z
