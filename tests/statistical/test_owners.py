"""Chains whose records are with three unequal owners: questions, budgets and noise as they are.

Logistic regression of 24 records on two coefficients, split 4, 8 and 12, with budgets in a ratio of
1 to 4 in squared mu. Many short chains start from exact draws of the target, so that a valid
sampler keeps every moment, and an invalid one drifts away. What is random is seeded; without seeds,
a test would fail by chance in less than one of 10^6 runs (`harness.Z_LIMIT`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.kernels import hmc, langevin, penalty
from pymc_dp.kernels.interfaces import Prior
from pymc_dp.kernels.langevin import ConstantInterval
from pymc_dp.kernels.penalty import GaussianProposal, GuidedProposal, OneComponentProposal
from pymc_dp.kernels.targets import Tilted
from pymc_dp.owners.analyst import Study
from pymc_dp.privacy.accounting import GaussianEvent
from pymc_dp.privacy.chains import Queries
from pymc_dp.privacy.noise import insecure_noise
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from pymc_dp.tuning.model_parts import ModelParts
from tests.kernels.test_stationarity import (
    ANCHORED as HARNESS_ANCHORED,
)
from tests.kernels.test_stationarity import (
    LANGEVIN_NOISE,
    LOGISTIC,
    RANDOM_WALK,
    chain,
    hmc_settings,
    langevin_settings,
)
from tests.privacy.toy import FreeMeter
from tests.statistical.harness import Z_LIMIT, NoisyQueries, Target, run
from tests.statistical.test_anchored import AT, PRIOR_SD, Run, X, Y

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:These data already"),
]

PARTS = (slice(0, 4), slice(4, 12), slice(12, 24))
EPSILONS = (2.5e5, 7e5, 1e6)
FAULT_LIMIT = 8.0
ITERATIONS = 40
_plans = itertools.count(1)


def built(x: np.ndarray, y: np.ndarray) -> pm.Model:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, PRIOR_SD, shape=2)
        pm.Bernoulli("y", logit_p=pm.Data("x", x) @ beta, observed=y)
    return model


def study() -> tuple[Study, RowEngine, PublicTerms]:
    """Owners, the engine of the analyst, and the prior, in the coordinates of clipping."""
    models = [built(X[part], Y[part]) for part in PARTS]
    for model, epsilon in zip(models, EPSILONS, strict=True):
        with model:
            dp.PrivacyBudget(epsilon, 1e-3)
    rng = np.random.default_rng(0)
    model = built(rng.normal(size=(30, 2)), np.arange(30) % 2)
    with model:
        owners = dp.Owners(models)._study
    budget = dp.get_budget(model)
    assert budget is not None
    parts = ModelParts(model, budget)
    predictor, reason = recognise(parts.engine)
    assert predictor is not None, reason
    engine = PredictorEngine(parts.engine, predictor).with_coordinates(AT)
    return owners, engine, parts.terms.with_coordinates(AT)


class Whole(Target):
    """The posterior of all records in z, by hand; anchored at 0 if there is a score."""

    half_range = 16.0

    def __init__(self, score: np.ndarray | None = None) -> None:
        v = X @ AT.location
        self.directions = X @ AT.scaling
        self.slopes = Y - 1.0 / (1.0 + np.exp(-v))
        self.score = score

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        v = (AT.location + z @ AT.scaling.T) @ X.T
        values = -np.logaddexp(0.0, -(2.0 * Y - 1.0) * v)
        if self.score is not None:
            values = values - z @ (self.slopes[:, None] * self.directions).T
        return values

    def log_density(self, z: np.ndarray) -> np.ndarray:
        theta = AT.location + z @ AT.scaling.T
        value = -0.5 * (theta**2).sum(-1) / PRIOR_SD**2
        return value if self.score is None else value + z @ self.score


PLAIN = Whole()
ANCHORED = Whole(PLAIN.slopes @ PLAIN.directions + np.array([1.1, -0.8]))


@dataclass(frozen=True)
class Case:
    """A kernel, its settings, and the noise of its answers."""

    kernel: Any
    settings: dict[str, Any]
    counts: dict[str, int]
    multipliers: dict[str, float]
    clip_norms: dict[str, float]
    anchored: bool = False


LANGEVIN = {
    "step_size": 0.5,
    "n_steps": 2,
    "interval": ConstantInterval(1.5),
    "persistent": False,
    "friction": 0.3,
}
RATIO = {"log_ratio": 0.9}, {"log_ratio": 1.2}  # longest score: 1.15
PROPOSALS = {
    "DPPenalty": GaussianProposal(0.8),
    "DPPenalty one component": OneComponentProposal(np.array([0.9, 0.9])),
    "DPPenalty guided": GuidedProposal(0.8),
}
CASES = {
    **{
        name: Case(penalty, {"proposal": proposal}, {"log_ratio": 1}, *RATIO)
        for name, proposal in PROPOSALS.items()
    },
    "DPHMC": Case(
        hmc,
        {"step_size": 0.5, "n_steps": 2},
        {"gradient": 3, "log_ratio": 1},
        {"gradient": 0.7, "log_ratio": 0.7},
        {"gradient": 0.8, "log_ratio": 1.2},
    ),
    "DPLangevin plain": Case(
        langevin,
        LANGEVIN,
        {"gradient": 2, "energy_error": 1},
        {"gradient": 1.0, "energy_error": 0.6},
        {"gradient": 0.8},
    ),
    "DPLangevin anchored": Case(
        langevin,
        LANGEVIN,
        {"gradient": 2, "energy_error": 1},
        {"gradient": 3.0, "energy_error": 0.6},
        {"gradient": 0.3},
        anchored=True,
    ),
}


def target_of(case: Case) -> Whole:
    return ANCHORED if case.anchored else PLAIN


def sampled(name: str, chains: int = 120) -> Run:
    """Positions of many short chains in z."""
    case = CASES[name]
    owners, engine, terms = study()
    target, plan_id = target_of(case), next(_plans)
    rng, draws = np.random.default_rng(8), np.empty((chains, ITERATIONS, 2))
    prior: Prior = terms
    if case.anchored:
        assert target.score is not None
        engine, prior = engine.tilted(), Tilted(terms, target.score)
    events = {name: GaussianEvent(name, x) for name, x in case.multipliers.items()}
    plan = {
        "kind": "chains",
        "sampler": name,
        "draws": ITERATIONS,
        "tune": 0,
        "chains": chains,
        "per_iteration": case.counts,
        "at_start": {},
        "events": events,
        "clip_norms": case.clip_norms,
    }
    accepted = 0
    with insecure_noise(5):
        owners.agree(plan_id, plan, engine)
        meter: Any = FreeMeter()
        meter.plan_id = plan_id
        meter.per_iteration = [(n, x, case.counts[n]) for n, x in case.multipliers.items()]
        queries = Queries(engine, meter, events, case.clip_norms, "replace_one", len(Y))
        for chain, z in zip(draws, target.draw(rng, chains), strict=True):
            queries.begin_chain()
            if case.kernel is hmc:
                state: Any = hmc.initial_state(z, prior)
            else:
                state = case.kernel.initial_state(rng, z, prior)
            for position in chain:
                queries.begin_iteration()
                state, info = case.kernel.transition(rng, state, queries, prior, **case.settings)
                position[:] = state.z
                accepted += int(info.accepted)
        owners.close(plan_id)
    return Run(draws, accepted / (chains * ITERATIONS), 0.0)


@pytest.mark.parametrize("name", CASES)
def test_the_posterior_of_all_records_is_stationary(name: str) -> None:
    found, target = sampled(name), target_of(CASES[name])
    assert 0.05 < found.acceptance < 0.97, "the accept test must matter"

    assert found.worst(target) < Z_LIMIT, found.z_scores(target)


# -- faults that need thousands of chains: the same sums of three owners' answers, all at once -----


class ThreeOwners(NoisyQueries):
    """Records of a target with three unequal owners, each with noise of its own."""

    weights = np.array([0.62, 0.22, 0.16])  # of the variance
    parts = (slice(0, 2), slice(2, 6), slice(6, 12))

    def _noise(self, sd: Any, shape: tuple[int, ...]) -> np.ndarray:
        """(owners, ...) noise of each answer."""
        every = self.rng.standard_normal((3, *shape))
        return every * np.sqrt(self.weights).reshape(3, *[1] * len(shape)) * sd

    def noisy_gradient(self, z: np.ndarray, g: np.ndarray) -> np.ndarray:
        noise = self._noise(self.gradient_noise_sd, z.shape)
        answers = [g[..., k, :].sum(-2) + x for k, x in zip(self.parts, noise, strict=True)]
        return np.asarray(self.together(answers))

    def noisy_sum(self, name: str, terms: np.ndarray, lower: Any, upper: Any) -> Any:
        lower, upper = np.asarray(lower), np.asarray(upper)
        bounded = np.clip(terms, lower[..., None], upper[..., None])
        self.clipped += np.count_nonzero(np.abs(bounded - terms) > 1e-9)
        noise_sd = self.noise_multiplier * (upper - lower)
        noise = self._noise(noise_sd, terms.shape[:-1])
        answers = [bounded[..., k].sum(-1) + x for k, x in zip(self.parts, noise, strict=True)]
        return self.together(answers), self.stated(noise_sd)

    def together(self, answers: list[np.ndarray]) -> np.ndarray:
        return sum(answers)

    def stated(self, noise_sd: Any) -> Any:
        return noise_sd


class LeftOut(ThreeOwners):
    """The noise of one owner is left out of the penalty."""

    def stated(self, noise_sd: Any) -> Any:
        return noise_sd * math.sqrt(1.0 - self.weights[0])


class Twice(ThreeOwners):
    """The answer of one owner counts twice."""

    def together(self, answers: list[np.ndarray]) -> np.ndarray:
        return sum(answers) + answers[2]


class Fresh(ThreeOwners):
    """One owner is asked again, and answers with fresh noise: the best of three is taken."""

    def noisy_sum(self, name: str, terms: np.ndarray, lower: Any, upper: Any) -> Any:
        value, noise_sd = super().noisy_sum(name, terms, lower, upper)
        spread = np.sqrt(self.weights[0]) * noise_sd
        first = spread * self.rng.standard_normal(value.shape)
        others = spread * self.rng.standard_normal((2, *value.shape))
        return value + np.maximum(first, others.max(axis=0)) - first, noise_sd


MANY = {
    "DPPenalty": (penalty, LOGISTIC, RANDOM_WALK, {"noise_multiplier": 0.6}),
    "DPHMC": (hmc, LOGISTIC, hmc_settings(), {"gradient_noise_sd": 1.2, "noise_multiplier": 0.4}),
    "DPLangevin plain": (
        langevin,
        LOGISTIC,
        langevin_settings(),
        {**LANGEVIN_NOISE, "noise_multiplier": 1.6},
    ),
    "DPLangevin anchored": (
        langevin,
        HARNESS_ANCHORED,
        langevin_settings(n_steps=2, persistent=False),
        LANGEVIN_NOISE,
    ),
}


def many_chains(name: str, queries: type[NoisyQueries]) -> Any:
    kernel, target, settings, noise = MANY[name]
    asked, state, step = chain(kernel, target, settings=dict(settings), queries=queries, **noise)
    report = run(step, state, target, iterations=400)
    assert asked.clipped == 0
    return report


@pytest.mark.parametrize("name", MANY)
def test_many_chains_are_stationary(name: str) -> None:
    report = many_chains(name, ThreeOwners)
    assert 0.05 < report.acceptance < 0.95, "the accept test must matter"
    assert abs(report.worst[1]) < Z_LIMIT, report


@pytest.mark.parametrize("fault", [LeftOut, Twice, Fresh])
@pytest.mark.parametrize("name", MANY)
def test_faults_are_noticed(name: str, fault: type[ThreeOwners]) -> None:
    report = many_chains(name, fault)
    assert abs(report.worst[1]) > FAULT_LIMIT, report
