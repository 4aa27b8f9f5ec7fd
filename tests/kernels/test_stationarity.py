"""Every kernel keeps a known posterior under strong noise, and planted faults are rejected.

False alarms: at most 1e-6 per test (see `harness.Z_LIMIT`), and none at all for the fixed seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from pymc_dp.kernels import hmc, langevin, penalty
from pymc_dp.kernels.interfaces import HaltonJitter
from pymc_dp.kernels.langevin import ConstantInterval, CurvatureInterval
from pymc_dp.kernels.penalty import (
    BarkerTest,
    GaussianProposal,
    GuidedProposal,
    IndependenceProposal,
    OneComponentProposal,
)
from pymc_dp.kernels.targets import InBasis, NoRecords, Quadratic, Tilted
from tests.selection import marked
from tests.statistical.harness import (
    Z_LIMIT,
    Anchored,
    Ball,
    Banana,
    Logistic,
    Moved,
    NoisyQueries,
    Public,
    RecordPath,
    Target,
    run,
)

pytestmark = pytest.mark.compiled

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
        state = penalty.initial_state(rng, z, target)
    step_size = settings.get("step_size")

    def step(state, iteration):
        if jitter is not None:
            settings["step_size"] = step_size * jitter(iteration)
        return kernel.transition(rng, state, asked, target, **settings)

    return asked, state, step


RANDOM_WALK = {"proposal": GaussianProposal(0.5)}
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
        {"proposal": GaussianProposal(0.6)},
        {"noise_multiplier": 0.0125, "ratio_clip": unclipped},
    ),
    "penalty one component": (
        penalty,
        LOGISTIC,
        {"proposal": OneComponentProposal(np.array([0.6, 0.9]))},
        PENALTY_NOISE,
    ),
    "penalty guided": (penalty, LOGISTIC, {"proposal": GuidedProposal(0.7)}, PENALTY_NOISE),
    "penalty independence": (
        penalty,
        LOGISTIC,
        {"proposal": IndependenceProposal(np.array([0.8, 0.9]))},
        {"noise_multiplier": 0.15},
    ),
    "barker": (
        penalty,
        LOGISTIC,
        {**RANDOM_WALK, "test": BarkerTest(1.0)},
        {"noise_multiplier": 0.15},
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    marked(
        VALID,
        exhaustive=[
            "hmc jitter and mass",
            "langevin jitter and mass",
            "hmc banana",
            "langevin long fresh, constant interval",
        ],
    ),
)
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


class ReleasedAccounts(RecordPath):
    """Accounts that use the released gradient instead of the true one."""

    def gradient(self, z, mid):
        answer = super().gradient(z, mid)
        self.g = self.g + (answer - self.g.sum(-2))[..., None, :] / self.g.shape[-2]
        return answer


class ReleasedControlVariate(NoisyQueries):
    path_class = ReleasedAccounts


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
    """The accept test ignores the momentum: that at the end is as at the start."""
    integrate = hmc.integrate

    def unmoved(z, momentum, *args, **kwargs):
        return integrate(z, momentum, *args, **kwargs)._replace(momentum=momentum)

    def faulty(state, iteration):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hmc, "integrate", unmoved)
            return step(state, iteration)

    return faulty


class NeverTurned(GuidedProposal):
    """The direction stays after a rejection."""

    def __call__(self, rng, z, direction):
        return super().__call__(rng, z, direction)._replace(turned=direction)


class WithoutRatio(IndependenceProposal):
    """Taken for symmetric."""

    def __call__(self, rng, z, direction):
        return super().__call__(rng, z, direction)._replace(log_ratio=0.0)


class NoiseAlone(BarkerTest):
    """Accepts where the noisy ratio is positive; nothing makes its noise logistic."""

    def __call__(self, rng, possible, value, noise_sd, public):
        return possible & (value + public > 0.0), value + public


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
    "penalty: not turned round": Fault(
        penalty,
        {"proposal": GuidedProposal(1.5)},
        PENALTY_NOISE,
        changes={"proposal": NeverTurned(1.5)},
    ),
    "penalty: density of the proposal forgotten": Fault(
        penalty,
        {"proposal": IndependenceProposal(0.7)},
        {"noise_multiplier": 0.15},
        changes={"proposal": WithoutRatio(0.7)},
    ),
    "barker: noise alone": Fault(
        penalty,
        {**RANDOM_WALK, "test": BarkerTest(1.0)},
        {"noise_multiplier": 0.15},
        changes={"test": NoiseAlone(1.0)},
    ),
    "barker: more noise than can be corrected": Fault(
        penalty,
        {**RANDOM_WALK, "test": BarkerTest(1.2)},
        {"noise_multiplier": 0.2},
        changes={"test": BarkerTest(1.8)},
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


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(False, marks=pytest.mark.exhaustive, id="valid"),
        pytest.param(True, id="faulty"),
    ],
)
@pytest.mark.parametrize(
    "name",
    marked(
        FAULTS,
        slow=[
            "hmc: kinetic energy missing",
            "langevin: released control variate",
            "langevin: odd noise",
            "langevin: gradient noise misstated",
        ],
    ),
)
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


class Tempered(Target):
    """Prior times likelihood to a power."""

    def __init__(self, base, power):
        self.base, self.power = base, power
        self.half_range = 7.0

    def log_likelihood(self, z):
        return self.power * self.base.log_likelihood(z)

    def log_density(self, z):
        return self.base.log_density(z)


@pytest.mark.parametrize("test", [penalty.penalty_test, BarkerTest(1.0)])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_tempered_likelihood_is_stationary(test, forgotten):
    target = Tempered(LOGISTIC, 0.4)
    rng = np.random.default_rng(5)
    queries = NoisyQueries(LOGISTIC, np.random.default_rng(6), noise_multiplier=0.3)
    state = penalty.initial_state(rng, target.draw(rng, CHAINS), LOGISTIC)
    settings = {"proposal": GaussianProposal(0.6), "test": test}
    power = 1.0 if forgotten else target.power

    def step(state, iteration):
        return penalty.transition(rng, state, queries, LOGISTIC, likelihood_power=power, **settings)

    report = run(step, state, target, iterations=300)
    assert queries.clipped == 0
    assert (abs(report.worst[1]) > FAULT_LIMIT) == forgotten, report
    assert forgotten or abs(report.worst[1]) < Z_LIMIT, report


# Chains that move in w, z = B w, with a released score or likelihood among the public terms.

SKEW = np.array([[1.2, 0.5], [-0.3, 0.45]])  # neither symmetric nor orthogonal


class ClipAtMidpoint(RecordPath):
    """Residual scores clipped to a norm that grows with the distance of the mid-point, which the
    reversed path shares, from the origin.
    """

    def clipped_gradients(self, mid):
        return self.clipped(mid, mid)

    def clipped(self, mid, where):
        g = self.queries.target.record_gradients(mid)
        bound = 0.15 * np.sqrt((where**2).sum(-1))[..., None, None]
        norm = np.maximum(np.sqrt((g**2).sum(-1, keepdims=True)), 1e-300)
        return g * np.minimum(1.0, bound / norm)


class ClipAtStart(ClipAtMidpoint):
    """The bound is taken at z_j, from where the step began."""

    def clipped_gradients(self, mid):
        return self.clipped(mid, self.at)


class MidpointQueries(NoisyQueries):
    path_class = ClipAtMidpoint


class StartQueries(NoisyQueries):
    path_class = ClipAtStart


class WithoutExtraNoise(InBasis):
    """The noise in w keeps the shape that the basis gives it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._extra = None


class WithoutTranspose(InBasis):
    """Scores in w are B g, not B' g."""

    def path(self, w_start):
        path = super().path(w_start)
        inner = path._path

        class Slip:
            def __getattr__(self, name):
                return getattr(inner, name)

            def gradient(self, z, mid):
                return inner.gradient(z, mid) @ SKEW.T @ np.linalg.inv(SKEW)

        path._path = Slip()
        return path


class TiltNotTested(Tilted):
    """The accept test does not know of the released score."""

    def log_density(self, z):
        return self.prior.log_density(z)


TILT = Tilted(LOGISTIC, ANCHORED.score)
WIDE = ConstantInterval(8.0)
CURVATURE = np.array([[2.0, 0.7], [0.7, 0.5]])
SCORE_NOISE = np.array([[0.6, -0.2], [-0.2, 0.9]])
QUADRATIC = Quadratic(Public(LOGISTIC), np.array([1.5, -0.4]), CURVATURE, SCORE_NOISE)


@dataclass(frozen=True)
class Arrangement:
    """A kernel's view of a target, and the slip that spoils it, if there is one.

    The chain targets `target` in w; queries are about `records` in z, the rest is in `prior`.
    """

    target: Any
    records: Any
    prior: Any
    settings: dict[str, Any]
    noise: dict[str, float]
    basis: np.ndarray | None = None
    queries: Callable[..., Any] = NoisyQueries
    wrapper: Callable[..., Any] = InBasis
    slip: dict[str, Any] = field(default_factory=dict)

    def run(self, iterations: int, seed: int = 3):
        rng = np.random.default_rng(seed)
        asked = self.queries(self.records, np.random.default_rng(seed + 1), **self.noise)
        state = langevin.initial_state(rng, self.target.draw(rng, CHAINS), self.prior)
        wrapped = asked if self.basis is None else self.wrapper(asked, self.basis, rng)

        def step(state, iteration):
            return langevin.transition(rng, state, wrapped, self.prior, **self.settings)

        return run(step, state, self.target, iterations=iterations), asked


WEAK_NOISE = {"gradient_noise_sd": 1.5, "noise_multiplier": 0.06}
ARRANGEMENTS = {
    "basis": Arrangement(
        Moved(LOGISTIC, SKEW),
        LOGISTIC,
        Moved(LOGISTIC, SKEW),
        langevin_settings(interval=WIDE),
        {"gradient_noise_sd": 2.0, "noise_multiplier": 0.06},
        basis=SKEW,
        slip={"wrapper": WithoutExtraNoise},
    ),
    "basis, several fresh steps": Arrangement(
        Moved(LOGISTIC, SKEW),
        LOGISTIC,
        Moved(LOGISTIC, SKEW),
        langevin_settings(n_steps=3, persistent=False, interval=WIDE, friction=0.5),
        WEAK_NOISE,
        basis=SKEW,
        slip={"wrapper": WithoutTranspose},
    ),
    "tilt": Arrangement(
        ANCHORED,
        ANCHORED,
        TILT,
        langevin_settings(n_steps=4, persistent=False, interval=WIDE, friction=0.3),
        {"gradient_noise_sd": 1.0, "noise_multiplier": 0.06},
        slip={"prior": TiltNotTested(LOGISTIC, ANCHORED.score)},
    ),
    "tilt in a basis": Arrangement(
        Moved(ANCHORED, SKEW),
        ANCHORED,
        Tilted(Moved(LOGISTIC, SKEW), SKEW.T @ ANCHORED.score),
        langevin_settings(n_steps=2, interval=WIDE),
        WEAK_NOISE,
        basis=SKEW,
    ),
    "tilt in a ball": Arrangement(
        Ball(ANCHORED, 1.2),
        ANCHORED,
        Tilted(LOGISTIC, ANCHORED.score, radius=1.2),
        langevin_settings(n_steps=2, persistent=False, interval=WIDE, friction=0.3),
        WEAK_NOISE,
        slip={"prior": TILT},
    ),
    "residual clip at the mid-point": Arrangement(
        ANCHORED,
        ANCHORED,
        TILT,
        langevin_settings(interval=WIDE, step_size=0.8),
        WEAK_NOISE,
        queries=MidpointQueries,
        slip={"queries": StartQueries},
    ),
    "quadratic without records": Arrangement(
        Public(QUADRATIC),
        None,
        QUADRATIC,
        langevin_settings(n_steps=4, persistent=False, friction=0.3),
        {},
        queries=lambda records, rng: NoRecords(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_arrangement_is_stationary(name):
    report, queries = ARRANGEMENTS[name].run(iterations=400)
    assert getattr(queries, "clipped", 0) == 0, "the setting must clip nothing to be exact"
    assert 0.05 < report.acceptance < 0.97, "the accept test must matter"
    assert abs(report.worst[1]) < Z_LIMIT, report


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, a in ARRANGEMENTS.items() if a.slip])
def test_slip_in_an_arrangement_is_rejected(name):
    """A sound kernel would be beyond this limit in one of 10^14 runs."""
    report, _ = replace(ARRANGEMENTS[name], **ARRANGEMENTS[name].slip).run(iterations=250)
    assert abs(report.worst[1]) > FAULT_LIMIT, report


def test_quadratic_matches_closed_form():
    # prior N(0, I): z has precision I + W, W = H (H + V)^-1 H, and mean (I + W)^-1 H (H + V)^-1 G
    class Normal(Logistic):
        def log_likelihood(self, z):
            return np.zeros((*z.shape[:-1], 1))

    target = Public(Quadratic(Normal(), QUADRATIC.score, CURVATURE, SCORE_NOISE))
    gain = CURVATURE @ np.linalg.inv(CURVATURE + SCORE_NOISE)
    covariance = np.linalg.inv(np.eye(2) + gain @ CURVATURE)
    np.testing.assert_allclose(target.mean, covariance @ gain @ QUADRATIC.score, atol=1e-6)
    np.testing.assert_allclose(target.sd**2, np.diag(covariance), rtol=1e-5)


def test_banana_quadrature_matches_closed_form():
    # theta1 ~ N(mu1, v1), theta2 + a theta1^2 ~ N(mu2, v2)
    precision = np.array([12 / BANANA.s1**2, 12 / BANANA.s2**2]) + 1.0
    m1, m2 = BANANA.x.mean(0) * (precision - 1.0) / precision
    v1, v2 = 1.0 / precision
    a = BANANA.a
    np.testing.assert_allclose(BANANA.mean, [m1, m2 - a * (m1**2 + v1)], rtol=1e-6)
    variance = [v1, v2 + a**2 * (2 * v1**2 + 4 * m1**2 * v1)]
    np.testing.assert_allclose(BANANA.sd**2, variance, rtol=1e-6)
