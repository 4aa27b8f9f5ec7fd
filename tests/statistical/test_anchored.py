"""The anchored sampler on a real model: engine, clipping, grid and noise, against quadrature.

Logistic regression of 24 records on two coefficients. Many short chains start from exact draws of
the target, so that a valid sampler keeps every moment, and an invalid one drifts away. What is
random is seeded; without seeds, a test would fail by chance in less than one of 10^6 runs
(`harness.Z_LIMIT`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pymc as pm
import pytest

from pymc_dp.kernels import langevin
from pymc_dp.kernels.basis import InBasis
from pymc_dp.kernels.intervals import ConstantInterval
from pymc_dp.kernels.tilts import Tilted
from pymc_dp.noise import insecure_noise
from pymc_dp.records import PublicTerms, extract
from pymc_dp.rows.engine import Coordinates, RowEngine
from pymc_dp.rows.huber import HuberEngine
from pymc_dp.rows.predictor import recognise
from pymc_dp.rows.tilt import TiltedEngine

from ..privacy.toy import make_queries
from .harness import Z_LIMIT, Target

N = 24
ITERATIONS, DISCARD = 40, 10
FAULT_LIMIT = 8.0
_rng = np.random.default_rng(4)
X = np.c_[np.ones(N), _rng.normal(size=N)] * _rng.uniform(0.5, 1.5, (N, 1))
Y = (_rng.random(N) < 1.0 / (1.0 + np.exp(-X @ [0.5, -1.0]))).astype(int)
PRIOR_SD = 1.5
#: theta = AT.location + AT.scaling @ z; contributions are clipped in z, the chain moves in w.
AT = Coordinates(np.array([0.6, -0.7]), np.array([[0.6, 0.1], [-0.2, 0.5]]))
BASIS = np.array([[0.9, 0.5], [-0.3, 0.8]])
TILT = np.array([1.1, -0.8])  # error of the released score, in z
HUBER = 0.3  # clip norm of scores in z; about half of them are longer at the origin
CLIP = {"gradient": 0.12}  # of changes of scores; binds along the way
HALF_WIDTH = 6.0  # of the interval for energy errors
SETTINGS = {
    "step_size": 0.5,
    "n_steps": 2,
    "interval": ConstantInterval(HALF_WIDTH),
    "persistent": False,
    "friction": 0.3,
}
NOISE = {"gradient": 5.0, "energy_error": 0.03}  # sds of 1.2 in z, and of 0.36 in the accept test


class Anchored(Target):
    """The tilted posterior in w, written down by hand."""

    half_range = 16.0

    def __init__(self, huber: float | None) -> None:
        self.huber = huber
        directions = X @ AT.scaling
        slopes, _ = self.terms(X @ AT.location)
        self.score = (slopes[:, None] * directions).sum(axis=0) + TILT
        self.anchor = slopes, directions

    def terms(self, v):
        """Slope and value of each record's log-likelihood at the predictors v."""
        sign = 2.0 * Y - 1.0
        t = sign * v
        if self.huber is None:
            knot = np.full(N, -np.inf)
        else:  # where the slope 1 / (1 + e^t) times |u| is the clip norm
            share = self.huber / np.linalg.norm(X @ AT.scaling, axis=1)
            knot = np.where(share < 1.0, np.log(1.0 / np.minimum(share, 1.0 - 1e-12) - 1.0), -1e9)
        beyond = np.maximum(t, knot)
        slope = 1.0 / (1.0 + np.exp(beyond))
        return sign * slope, -np.logaddexp(0.0, -beyond) + slope * (t - beyond)

    def log_likelihood(self, w):
        z = w @ BASIS.T
        slopes, directions = self.anchor
        values = self.terms((AT.location + z @ AT.scaling.T) @ X.T)[1]
        return values - z @ (slopes[:, None] * directions).T

    def log_density(self, w):
        z = w @ BASIS.T
        theta = AT.location + z @ AT.scaling.T
        return -0.5 * (theta**2).sum(-1) / PRIOR_SD**2 + z @ self.score


TARGETS = {False: Anchored(None), True: Anchored(HUBER)}


@cache
def parts() -> tuple[RowEngine, HuberEngine, PublicTerms]:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, PRIOR_SD, shape=2)
        pm.Bernoulli("y", logit_p=X @ beta, observed=Y)
    records = extract(model)
    engine = records.engine(AT)
    predictor, reason = recognise(engine)
    assert predictor is not None, reason
    moved = Coordinates(AT.location, AT.scaling @ BASIS)
    return engine, HuberEngine(engine, predictor, HUBER), records.public_terms(moved)


@dataclass(frozen=True)
class Run:
    """Positions of many short chains in w, and what else was seen."""

    draws: np.ndarray  # (chains, iterations, 2)
    acceptance: float
    largest_error: float  # energy error of a record

    def z_scores(self, target: Target) -> dict[str, float]:
        """Averages of moments over chains, which are independent, against exact ones."""
        scores = {}
        for name, values in target.moments(self.draws[:, DISCARD:]).items():
            average = values.mean(axis=1) - target.exact[name]
            scores[name] = float(average.mean() / (average.std(ddof=1) / np.sqrt(len(average))))
        return scores

    def worst(self, target: Target) -> float:
        return max(map(abs, self.z_scores(target).values()))


@cache
def anchored_run(huberised: bool, tilted: bool = True, chains: int = 300) -> Run:
    engine, huber, terms = parts()
    records = huber if huberised else engine
    target = TARGETS[huberised]
    rng = np.random.default_rng(8)
    prior = Tilted(terms, BASIS.T @ target.score)
    bounds = {**CLIP, "energy_error": 1.0}
    queries = make_queries(TiltedEngine(records) if tilted else records, NOISE, bounds)
    asked, errors = InBasis(queries, BASIS, rng), [0.0]
    add_up = queries._interval_sum

    def watched(mechanism, values, lower, upper):
        errors.append(float(np.abs(values).max()))
        return add_up(mechanism, values, lower, upper)

    queries._interval_sum = watched
    draws = np.empty((chains, ITERATIONS, 2))
    accepted = 0
    with insecure_noise(5):
        for chain, w in zip(draws, target.draw(rng, chains), strict=True):
            queries.begin_chain()
            state = langevin.initial_state(rng, w, prior)
            for position in chain:
                queries.begin_iteration()
                state, info = langevin.transition(rng, state, asked, prior, **SETTINGS)
                position[:] = state.z
                accepted += int(info.accepted)
    return Run(draws, accepted / (chains * ITERATIONS), max(errors))


@pytest.mark.parametrize(
    "huberised",
    [pytest.param(False, marks=pytest.mark.slow, id="plain"), pytest.param(True, id="Huberised")],
)
def test_tilted_posterior_is_stationary(huberised):
    run, target = anchored_run(huberised), TARGETS[huberised]
    assert run.largest_error < HALF_WIDTH, "the setting must clip no energy error to be exact"
    assert 0.05 < run.acceptance < 0.97, "the accept test must matter"
    assert run.worst(target) < Z_LIMIT, run.z_scores(target)


def test_other_targets_are_told_apart():
    """The Huberised posterior is another one; where records are not tilted, scores count twice."""
    assert anchored_run(True).worst(TARGETS[False]) > FAULT_LIMIT
    assert anchored_run(False).worst(TARGETS[True]) > FAULT_LIMIT
    assert anchored_run(False, tilted=False, chains=100).worst(TARGETS[False]) > FAULT_LIMIT


@pytest.mark.parametrize("huberised", [False, True], ids=["plain", "Huberised"])
def test_target_written_by_hand_is_that_of_the_engine(huberised):
    """And the clip norms are not idle: they bind for some records and not for others."""
    engine, huber, _ = parts()
    tilted, target = TiltedEngine(huber if huberised else engine), TARGETS[huberised]
    draws = target.draw(np.random.default_rng(1), 20)
    found = np.array([tilted.log_likelihood(BASIS @ w) for w in draws])
    by_hand = target.log_likelihood(draws)
    np.testing.assert_allclose(found - found[0], by_hand - by_hand[0], atol=1e-12)

    def lengths(engine, z):
        blocks = [block.copy() for _, block in engine.vectors(engine.scores(z))]
        return np.linalg.norm(np.concatenate(blocks, axis=1), axis=0)

    assert 0.2 < np.mean(lengths(engine, np.zeros(2)) > HUBER) < 0.8
    changes = np.concatenate([lengths(tilted, BASIS @ w) for w in draws])
    assert 0.1 < np.mean(changes > CLIP["gradient"]) < 0.9
