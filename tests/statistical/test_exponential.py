"""ExponentialFamilyPenalty keeps known posteriors under strong noise; planted faults are rejected.

False alarms: at most 1e-6 per test (see `harness.Z_LIMIT`, and `P_LIMIT` here).  Privacy noise of
the last tests comes from the operating system; all else has fixed seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import stats

import pymc_dp as dp
from pymc_dp.kernels import exponential, penalty
from pymc_dp.kernels.proposals import GaussianProposal
from tests.selection import marked
from tests.statistical.harness import Z_LIMIT, Target, run

pytestmark = pytest.mark.compiled

CHAINS = 2000
FAULT_LIMIT = 8.0
#: False-alarm rate of the tests with privacy noise.
P_LIMIT = 1e-7


class NormalRecords(Target):
    """Normal records with unknown mean z_1 and log standard deviation z_2, prior N(0, I)."""

    def __init__(self, n=12, seed=2):
        self.y = np.random.default_rng(seed).normal(0.4, 1.3, n)

    def log_likelihood(self, z):
        mu, log_sigma = z[..., :1], z[..., 1:]
        return -0.5 * ((self.y - mu) / np.exp(log_sigma)) ** 2 - log_sigma

    def log_density(self, z):
        return -0.5 * (z**2).sum(-1)

    def gradient(self, z):
        return -z

    @property
    def statistics(self):
        return np.stack([self.y, self.y**2], axis=1)

    def natural(self, z):
        mu, precision = z[..., 0], np.exp(-2.0 * z[..., 1])
        normaliser = 0.5 * mu**2 * precision + z[..., 1]
        return np.stack([mu * precision, -0.5 * precision, -normaliser], axis=-1)


class CountsRecords(NormalRecords):
    """A Bernoulli outcome of logit z_1 and a Poisson count of log mean z_2, prior N(0, I)."""

    def __init__(self, n=12, seed=2):
        rng = np.random.default_rng(seed)
        self.statistics_ = np.stack([rng.integers(0, 2, n), rng.poisson(1.5, n)], axis=1) * 1.0

    @property
    def statistics(self):
        return self.statistics_

    def log_likelihood(self, z):
        normaliser = np.log1p(np.exp(z[..., 0])) + np.exp(z[..., 1])
        return z @ self.statistics.T - normaliser[..., None]

    def natural(self, z):
        normaliser = np.log1p(np.exp(z[..., 0])) + np.exp(z[..., 1])
        return np.concatenate([z, -normaliser[..., None]], axis=-1)


class Sums:
    """Noisy sums of the statistics, one for each chain."""

    def __init__(self, target, noise_sd, seed=7):
        self.total, self.noise_sd = target.statistics.sum(0), noise_sd
        self.rng = np.random.default_rng(seed)
        self.answers = 0

    def noise(self):
        return self.rng.standard_normal((CHAINS, len(self.total)))

    def statistic(self):
        self.answers += 1
        return self.total + self.noise_sd * self.noise(), self.noise_sd


class NoiseReused(Sums):
    """The first noise of a chain, again and again."""

    kept = None

    def noise(self):
        if self.kept is None:
            self.kept = super().noise()
        return self.kept


class VarianceUnderstated(Sums):
    """The penalty is for less noise than was added."""

    def statistic(self):
        value, noise_sd = super().statistic()
        return value, 0.7 * noise_sd


class VarianceOverstated(Sums):
    """The penalty is for more noise than was added."""

    def statistic(self):
        value, noise_sd = super().statistic()
        return value, 1.4 * noise_sd


TARGETS = {"normal": (NormalRecords(), 6.0), "counts": (CountsRecords(), 3.0)}


def walk(target, noise_sd, sums=Sums, n=None, iterations=250):
    asked = sums(target, noise_sd)
    n = len(target.statistics) if n is None else n
    ratios = exponential.StatisticRatios(asked, target.natural, float(n))
    rng = np.random.default_rng(3)
    state = penalty.initial_state(rng, target.draw(rng, CHAINS), target)
    proposal = GaussianProposal(0.35)

    def step(state, iteration):
        return penalty.transition(rng, state, ratios, target, proposal=proposal)

    return asked, run(step, state, target, iterations=iterations)


@pytest.mark.parametrize("name", TARGETS)
def test_posterior_is_stationary(name: str) -> None:
    target, noise_sd = TARGETS[name]
    asked, report = walk(target, noise_sd)
    assert abs(report.worst[1]) < Z_LIMIT, report
    assert 0.05 < report.acceptance < 0.95  # neither frozen nor free of noise
    assert asked.answers == 300  # one release an iteration


FAULTS: dict[str, dict[str, Any]] = {
    "noise reused between iterations": {"sums": NoiseReused},
    "penalty for less noise": {"sums": VarianceUnderstated},
    "penalty for more noise": {"sums": VarianceOverstated},
    "one record not normalised": {"n": 11},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", TARGETS)
def test_planted_fault_is_rejected(name: str, fault: str) -> None:
    target, noise_sd = TARGETS[name]
    _, report = walk(target, noise_sd, **FAULTS[fault])
    assert abs(report.worst[1]) > FAULT_LIMIT, report


# -- the step itself, with its own noise, on conjugate models --------------------------------------


@dataclass(frozen=True)
class Conjugate:
    """A model, its exact posterior, and the way from the parameter to unconstrained space."""

    declare: Callable[[np.ndarray], None]
    draw: Callable[[np.random.Generator, int], np.ndarray]
    posterior: Callable[[np.ndarray], Any]
    unconstrained: Callable[[np.ndarray], np.ndarray]
    constrained: Callable[[np.ndarray], np.ndarray]
    bounds: tuple[float, float] | None = None


def beta_bernoulli(y: np.ndarray) -> None:
    pm.Bernoulli("y", pm.Beta("p", 2, 3), observed=y)


def gamma_poisson(y: np.ndarray) -> None:
    pm.Poisson("y", pm.Gamma("rate", 3, 2), observed=y)


def normal_normal(y: np.ndarray) -> None:
    pm.Normal("y", pm.Normal("mu", 0.5, 2.0), 1.5, observed=y)


MODELS = {
    "Bernoulli": Conjugate(
        beta_bernoulli,
        lambda rng, n: rng.integers(0, 2, n),
        lambda y: stats.beta(2 + y.sum(), 3 + len(y) - y.sum()),
        lambda p: np.log(p) - np.log1p(-p),
        lambda x: 1.0 / (1.0 + np.exp(-x)),
    ),
    "Poisson": Conjugate(
        gamma_poisson,
        lambda rng, n: rng.poisson(2.0, n),
        # what is beyond the bounds is clamped
        lambda y: stats.gamma(3 + np.minimum(y, 3).sum(), scale=1 / (2 + len(y))),
        np.log,
        np.exp,
        (0, 3),
    ),
    "Normal": Conjugate(
        normal_normal,
        lambda rng, n: rng.normal(1.0, 1.5, n),
        lambda y: stats.norm(
            (0.5 / 4 + np.clip(y, -2, 3).sum() / 2.25) / (1 / 4 + len(y) / 2.25),
            (1 / 4 + len(y) / 2.25) ** -0.5,
        ),
        lambda mu: mu,
        lambda mu: mu,
        (-2, 3),
    ),
}
N = 60


def positions(step: Any, start: np.ndarray, iterations: int, sums: Any) -> np.ndarray:
    """Where independent chains of a step are, having begun at `start` (unconstrained)."""
    ratios = exponential.StatisticRatios(sums, step._natural, step._exponential.n)
    proposal = GaussianProposal(step.step_size)
    rng = np.random.default_rng(5)
    ends = np.empty(len(start))
    for k, theta in enumerate(start):
        state = penalty.initial_state(rng, step.coordinates.z(np.array([theta])), step.prior)
        for _ in range(iterations):
            state, _ = penalty.transition(rng, state, ratios, step.prior, proposal=proposal)
        ends[k] = step.coordinates.theta(state.z)[0]
    return ends


def p_value(posterior: Any, draws: np.ndarray) -> float:
    """Of location and spread of independent draws, each with normal scores; two-sided."""
    scores = stats.norm.ppf(np.clip(posterior.cdf(draws), 1e-12, 1.0 - 1e-12))
    square = (scores**2).sum()
    tails = [
        stats.chi2.sf(square, len(scores)),
        stats.chi2.cdf(square, len(scores)),
        stats.norm.sf(abs(scores.mean()) * np.sqrt(len(scores))),
    ]
    return float(2.0 * min(tails))


class StepSums:
    """The sums of a step, without its meter; `stated` times the noise that was added."""

    def __init__(self, step: Any, stated: float = 1.0):
        query, self.stated = step.queries._query, stated
        self.sum, self.total = query.sum, step.queries.holder.total(query)

    def statistic(self) -> tuple[np.ndarray, float]:
        noisy = (self.total + self.sum.noise(self.sum.size)) * self.sum.unit
        return noisy, self.stated * self.sum.noise_sd


@pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning")
@pytest.mark.parametrize(
    ("name", "neighboring"),
    marked(
        itertools.product(MODELS, ["replace_one", "add_or_remove_one"]),
        slow=[("Normal", "replace_one"), ("Poisson", "add_or_remove_one")],
        exhaustive=[
            ("Bernoulli", "replace_one"),
            ("Bernoulli", "add_or_remove_one"),
            ("Poisson", "replace_one"),
            ("Normal", "add_or_remove_one"),
        ],
    ),
)
def test_the_step_keeps_the_exact_posterior_of_the_clamped_statistics(
    name: str, neighboring: Any
) -> None:
    case = MODELS[name]
    y = case.draw(np.random.default_rng(1), N)
    with pm.Model():
        case.declare(y)
        if case.bounds is not None:
            dp.bounds(y=case.bounds)
        hidden = {} if neighboring == "replace_one" else {"n_public": N}
        dp.PrivacyBudget(1.0, 1e-4, neighboring=neighboring, **hidden)
        step = dp.ExponentialFamilyPenalty(
            draws=40, chains=1, scaling=0.2, step_size=1.0, noise_multiplier=10.0
        )
    posterior = case.posterior(y)
    exact = posterior.rvs(500, random_state=np.random.default_rng(2))
    start = case.unconstrained(exact)

    ends = case.constrained(positions(step, start, 40, StepSums(step)))
    assert np.mean(ends != case.constrained(start)) > 0.5  # they have moved
    assert p_value(posterior, ends) > P_LIMIT
    # an accept test without penalty drifts: the comparison can fail
    wrong = case.constrained(positions(step, start, 40, StepSums(step, stated=0.0)))
    assert p_value(posterior, wrong) < P_LIMIT
