"""Every kernel keeps a known posterior under strong noise, and planted faults are rejected.

False alarms: at most 1e-6 per test (see `harness.Z_LIMIT`), and none at all for the fixed seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pymc_dp.kernels import hmc, langevin, penalty
from pymc_dp.kernels.intervals import ConstantInterval, CurvatureInterval
from pymc_dp.kernels.jitter import HaltonJitter

from .harness import Z_LIMIT, Anchored, Banana, Logistic, NoisyQueries, RecordPath, run

CHAINS = 2000
FAULT_LIMIT = 8.0

LOGISTIC = Logistic()
BANANA = Banana()
ANCHORED = Anchored(LOGISTIC, tilt=np.array([0.8, -0.5]))
BETA = Logistic.bound**2 / 4  # curvature of one logistic term with |x| <= bound


def unclipped(distance):
    """A constant ratio clip that no record of the banana reaches."""
    return np.full_like(distance, 40.0)


def chain(kernel, target, *, seed=3, queries=NoisyQueries, jitter=None, settings, **noise):
    """Queries, start state and step function of a batch of chains."""
    rng = np.random.default_rng(seed)
    asked = queries(target, np.random.default_rng(seed + 1), **noise)
    z = target.draw(rng, CHAINS)
    reuse = settings.pop("reuse_gradient", False)
    if kernel is langevin:
        state = langevin.initial_state(rng, z, target)
    elif kernel is hmc:
        release = asked.gradient if reuse else None
        state = hmc.initial_state(z, target, release_gradient=release)
    else:
        state = penalty.initial_state(z, target)
    step_size = settings.get("step_size")

    def step(state, iteration):
        if jitter is not None:
            settings["step_size"] = step_size * jitter(iteration)
        return kernel.transition(rng, state, asked, target, **settings)

    return asked, state, step


RANDOM_WALK = {"proposal": penalty.GaussianProposal(0.5)}
PENALTY_NOISE = {"noise_multiplier": 0.4}
HMC_NOISE = {"gradient_noise_sd": 1.2, "noise_multiplier": 0.25}
LANGEVIN_NOISE = {"gradient_noise_sd": 2.5, "noise_multiplier": 0.8}
JITTER = HaltonJitter(0.4, shift=0.3)


def hmc_settings(**changes):
    return {"step_size": 0.45, "n_steps": 3, **changes}


def langevin_settings(**changes):
    log_concave = CurvatureInterval(BETA, log_concave=True)
    return {"step_size": 0.6, "n_steps": 1, "interval": log_concave, **changes}


VALID = {
    "penalty": (penalty, LOGISTIC, RANDOM_WALK, PENALTY_NOISE),
    "penalty banana": (
        penalty,
        BANANA,
        {"proposal": penalty.GaussianProposal(0.6)},
        {"noise_multiplier": 0.0125, "ratio_clip": unclipped},
    ),
    "hmc leapfrog": (hmc, LOGISTIC, hmc_settings(), HMC_NOISE),
    "hmc position": (hmc, LOGISTIC, hmc_settings(integrator="position"), HMC_NOISE),
    "hmc reuse": (hmc, LOGISTIC, hmc_settings(reuse_gradient=True), HMC_NOISE),
    "hmc clipped gradients": (hmc, LOGISTIC, hmc_settings(), {**HMC_NOISE, "clip_norm": 0.6}),
    "hmc banana": (
        hmc,
        BANANA,
        hmc_settings(step_size=0.25),
        {"gradient_noise_sd": 1.2, "noise_multiplier": 0.0125, "ratio_clip": unclipped},
    ),
    "hmc jitter and mass": (
        hmc,
        LOGISTIC,
        hmc_settings(step_size=np.array([0.35, 0.6])),
        {**HMC_NOISE, "jitter": JITTER},
    ),
    "langevin": (langevin, LOGISTIC, langevin_settings(), LANGEVIN_NOISE),
    "langevin fresh": (
        langevin,
        LOGISTIC,
        langevin_settings(persistent=False),
        LANGEVIN_NOISE,
    ),
    "langevin long fresh, constant interval": (
        langevin,
        LOGISTIC,
        langevin_settings(n_steps=3, persistent=False, interval=ConstantInterval(1.5)),
        {"gradient_noise_sd": 2.0, "noise_multiplier": 0.3},
    ),
    "langevin long, curvature interval": (
        langevin,
        LOGISTIC,
        langevin_settings(n_steps=3, step_size=0.5, interval=CurvatureInterval(BETA)),
        {"gradient_noise_sd": 2.0, "noise_multiplier": 0.2},
    ),
    "langevin kappa above 1": (
        langevin,
        LOGISTIC,
        langevin_settings(step_size=0.9),
        {"gradient_noise_sd": 3.0, "noise_multiplier": 0.4},
    ),
    "langevin with friction": (
        langevin,
        LOGISTIC,
        langevin_settings(friction=1.5),
        {"gradient_noise_sd": 1.0, "noise_multiplier": 0.8},
    ),
    "langevin clipped gradients": (
        langevin,
        LOGISTIC,
        langevin_settings(interval=ConstantInterval(8.0)),
        {"gradient_noise_sd": 1.5, "noise_multiplier": 0.06, "clip_norm": 0.6},
    ),
    "langevin jitter and mass": (
        langevin,
        LOGISTIC,
        langevin_settings(n_steps=2, step_size=np.array([0.4, 0.7]), friction=0.5),
        {"gradient_noise_sd": 2.0, "noise_multiplier": 0.4, "jitter": JITTER},
    ),
    "langevin banana": (
        langevin,
        BANANA,
        langevin_settings(n_steps=2, step_size=0.3, interval=ConstantInterval(60.0)),
        {"gradient_noise_sd": 2.0, "noise_multiplier": 0.008},
    ),
    "langevin anchored": (
        langevin,
        ANCHORED,
        langevin_settings(n_steps=3, step_size=0.5),
        {"gradient_noise_sd": 1.0, "noise_multiplier": 0.4},
    ),
}


@pytest.mark.parametrize("name", VALID)
def test_posterior_is_stationary(name):
    kernel, target, settings, noise = VALID[name]
    queries, state, step = chain(kernel, target, settings=dict(settings), **noise)
    report = run(step, state, target, iterations=500)
    assert queries.clipped == 0, "the setting must clip nothing to be exact"
    assert 0.05 < report.acceptance < 0.95, "the accept test must matter"
    assert abs(report.worst[1]) < Z_LIMIT, report


# Faulty queries, intervals and transitions: one slip each.


class UnstatedNoise(NoisyQueries):
    """Accept-test noise that the kernel is not told about: the penalty is forgotten."""

    def noisy_sum(self, name, terms, lower, upper):
        value, noise_sd = super().noisy_sum(name, terms, lower, upper)
        return value, 0.0 * noise_sd


class MisstatedGradientNoise(NoisyQueries):
    """Gradient noise twice as strong as stated."""

    def noisy_gradient(self, z, g):
        answer = super().noisy_gradient(z, g)
        extra = np.sqrt(3.0) * self.gradient_noise_sd
        return answer + extra * self.rng.standard_normal(z.shape)


class AsymmetricRatioNoise(NoisyQueries):
    """Log-ratio noise that depends on the current position only."""

    def log_ratio(self, z_from, z_to):
        value, _ = NoisyQueries(self.target, self.rng).log_ratio(z_from, z_to)
        noise_sd = 2.0 * self.noise_multiplier * np.abs(z_from[..., 0])
        return value + noise_sd * self.rng.standard_normal(noise_sd.shape), noise_sd


class ReleasedControlVariate(NoisyQueries):
    """Accounts that use the released gradient instead of the true one."""

    def path(self, z_start):
        super().path(z_start)
        return ReleasedAccounts(self)


class ReleasedAccounts(RecordPath):
    def gradient(self, mid):
        answer = super().gradient(mid)
        self.g = self.g + (answer - self.g.sum(-2))[..., None, :] / self.g.shape[-2]
        return answer


class NoAcceptTest(NoisyQueries):
    """Answers that accept every finite path."""

    def noisy_sum(self, name, terms, lower, upper):
        value, noise_sd = super().noisy_sum(name, terms, lower, upper)
        return value + 1e6, noise_sd


@dataclass(frozen=True)
class PathInterval:
    """An interval that grows with the path; its width survives reversal only if even."""

    even: bool

    def __call__(self, departure, arrival):
        half = 6.0 + 4.0 * (departure + arrival if self.even else departure)
        return -half, half


def keep_momentum(step, queries):
    """No sign change at rejection."""

    def faulty(state, iteration):
        new, info = step(state, iteration)
        sign = np.where(info.accepted, 1.0, -1.0)[:, None]
        return new._replace(momentum=sign * new.momentum), info

    return faulty


def store_rejected_gradient(step, queries):
    """The gradient released at a rejected end point replaces the stored one."""

    def faulty(state, iteration):
        new, info = step(state, iteration)
        z, answer = queries.last_gradient
        return new._replace(gradient=answer + LOGISTIC.gradient(z)), info

    return faulty


def forget_kinetic_energy(step, queries):
    """The accept test ignores the momentum."""

    def faulty(state, iteration):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hmc, "kinetic_energy", lambda p: np.zeros(p.shape[:-1]))
            return step(state, iteration)

    return faulty


@dataclass(frozen=True)
class Fault:
    """A valid setting on the logistic target, and the one slip that spoils it."""

    kernel: Any
    settings: dict[str, Any]
    noise: dict[str, float]
    queries: type[NoisyQueries] = NoisyQueries
    wrap: Callable[[Any, Any], Any] = lambda step, queries: step
    changes: dict[str, Any] = field(default_factory=dict)


FAULTS = {
    "penalty: penalty forgotten": Fault(penalty, RANDOM_WALK, PENALTY_NOISE, queries=UnstatedNoise),
    "penalty: asymmetric noise": Fault(
        penalty, RANDOM_WALK, PENALTY_NOISE, queries=AsymmetricRatioNoise
    ),
    "hmc: penalty forgotten": Fault(hmc, hmc_settings(), HMC_NOISE, queries=UnstatedNoise),
    "hmc: kinetic energy missing": Fault(
        hmc, hmc_settings(), HMC_NOISE, wrap=forget_kinetic_energy
    ),
    "hmc: rejected gradient stored": Fault(
        hmc,
        hmc_settings(reuse_gradient=True, n_steps=1, step_size=0.7),
        {"gradient_noise_sd": 2.5, "noise_multiplier": 0.25},
        wrap=store_rejected_gradient,
    ),
    "langevin: penalty forgotten": Fault(
        langevin,
        langevin_settings(step_size=1.0, n_steps=2, interval=ConstantInterval(8.0)),
        {"gradient_noise_sd": 1.5, "noise_multiplier": 0.15},
        queries=UnstatedNoise,
    ),
    "langevin: released control variate": Fault(
        langevin,
        langevin_settings(interval=ConstantInterval(10.0)),
        {"gradient_noise_sd": 2.5, "noise_multiplier": 0.02},
        queries=ReleasedControlVariate,
    ),
    "langevin: momentum not flipped": Fault(
        langevin,
        langevin_settings(),
        {"gradient_noise_sd": 1.0, "noise_multiplier": 0.8},
        wrap=keep_momentum,
    ),
    "langevin: odd noise": Fault(
        langevin,
        langevin_settings(step_size=0.9, interval=PathInterval(even=True)),
        {"gradient_noise_sd": 1.0, "noise_multiplier": 0.07},
        changes={"interval": PathInterval(even=False)},
    ),
    "langevin: no accept test": Fault(
        langevin, langevin_settings(step_size=0.9), LANGEVIN_NOISE, queries=NoAcceptTest
    ),
    "langevin: gradient noise misstated": Fault(
        langevin,
        langevin_settings(),
        {"gradient_noise_sd": 1.2, "noise_multiplier": 0.2},
        queries=MisstatedGradientNoise,
    ),
}


@pytest.mark.parametrize("planted", [False, True], ids=["valid", "faulty"])
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_rejected(name, planted):
    fault = FAULTS[name]
    settings = {**fault.settings, **(fault.changes if planted else {})}
    queries_class = fault.queries if planted else NoisyQueries
    queries, state, step = chain(
        fault.kernel, LOGISTIC, settings=settings, queries=queries_class, **fault.noise
    )
    step = fault.wrap(step, queries) if planted else step
    report = run(step, state, LOGISTIC, iterations=250)
    if planted:
        assert abs(report.worst[1]) > FAULT_LIMIT, report
    else:
        assert queries.clipped == 0
        assert abs(report.worst[1]) < Z_LIMIT, report


def test_banana_quadrature_matches_closed_form():
    # theta1 ~ N(mu1, v1), theta2 + a theta1^2 ~ N(mu2, v2)
    precision = np.array([12 / BANANA.s1**2, 12 / BANANA.s2**2]) + 1.0
    m1, m2 = BANANA.x.mean(0) * (precision - 1.0) / precision
    v1, v2 = 1.0 / precision
    a = BANANA.a
    np.testing.assert_allclose(BANANA.mean, [m1, m2 - a * (m1**2 + v1)], rtol=1e-6)
    variance = [v1, v2 + a**2 * (2 * v1**2 + 4 * m1**2 * v1)]
    np.testing.assert_allclose(BANANA.sd**2, variance, rtol=1e-6)
