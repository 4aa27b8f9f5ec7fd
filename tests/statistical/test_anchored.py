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

from pymc_dp.base.matrices import Coordinates
from pymc_dp.kernels import langevin
from pymc_dp.kernels.langevin import ConstantInterval
from pymc_dp.kernels.targets import InBasis, Tilted
from pymc_dp.privacy.answer import IntervalSum
from pymc_dp.privacy.noise import insecure_noise
from pymc_dp.records.extraction import extract
from pymc_dp.rows.contributions import ConsistentScore, Score
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from tests.privacy.toy import make_queries
from tests.statistical.harness import Z_LIMIT, Target

pytestmark = pytest.mark.compiled

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
INNER = 0.15  # to which scores of the consistent anchor are clipped: all but a few are longer
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

    def __init__(self, excess: float | None) -> None:
        directions = X @ AT.scaling
        v = X @ AT.location
        slopes, _ = self.terms(v)
        self.anchor = slopes, directions
        if excess is not None:
            slopes = self.consistent(v, np.linalg.norm(directions, axis=1), excess)
        self.score = slopes @ directions + TILT

    def consistent(self, v, lengths, excess):
        """Clipped slopes, plus `excess` times what clipping takes from them on average."""
        p, most = 1.0 / (1.0 + np.exp(-v)), INNER / lengths
        lost = [y - p - np.clip(y - p, -most, most) for y in (0, 1)]
        return np.clip(Y - p, -most, most) + excess * ((1.0 - p) * lost[0] + p * lost[1])

    def terms(self, v):
        """Slope and value of each record's log-likelihood at the predictors v."""
        sign = 2.0 * Y - 1.0
        return sign / (1.0 + np.exp(sign * v)), -np.logaddexp(0.0, -sign * v)

    def log_likelihood(self, w):
        z = w @ BASIS.T
        slopes, directions = self.anchor
        values = self.terms((AT.location + z @ AT.scaling.T) @ X.T)[1]
        return values - z @ (slopes[:, None] * directions).T

    def log_density(self, w):
        z = w @ BASIS.T
        theta = AT.location + z @ AT.scaling.T
        return -0.5 * (theta**2).sum(-1) / PRIOR_SD**2 + z @ self.score


TARGETS = {"plain": Anchored(None), "consistent": Anchored(1.0)}


@cache
def parts() -> tuple[dict[str, RowEngine], PublicTerms]:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, PRIOR_SD, shape=2)
        pm.Bernoulli("y", logit_p=X @ beta, observed=Y)
    records = extract(model)
    engine = RowEngine.of(records, AT)
    predictor, reason = recognise(engine)
    assert predictor is not None, reason
    moved = Coordinates(AT.location, AT.scaling @ BASIS)
    engines = {"plain": engine, "consistent": PredictorEngine(engine, predictor)}
    return engines, PublicTerms.of(records, moved)


def released(clipping: str) -> np.ndarray:
    """(2,) the score of the anchor in z, with its error."""
    engines, _ = parts()
    spec = Score(AT) if clipping == "plain" else ConsistentScore(AT, clip_norm=INNER)
    added = [values.sum(axis=1) for _, values in spec.blocks(engines[clipping])]
    return np.sum(added, axis=0) + TILT


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
def anchored_run(clipping: str, tilted: bool = True, chains: int = 300) -> Run:
    engines, terms = parts()
    records, target = engines[clipping], TARGETS[clipping]
    rng = np.random.default_rng(8)
    prior = Tilted(terms, BASIS.T @ released(clipping))
    bounds = {**CLIP, "energy_error": 1.0}
    queries = make_queries(records.tilted() if tilted else records, NOISE, bounds)
    asked, errors = InBasis(queries, BASIS, rng), [0.0]
    add_up = IntervalSum.add

    def watched(self, block, total):
        errors.append(float(np.abs(block.values).max()))
        add_up(self, block, total)

    draws = np.empty((chains, ITERATIONS, 2))
    accepted = 0
    with insecure_noise(5), pytest.MonkeyPatch.context() as patch:
        patch.setattr(IntervalSum, "add", watched)
        for chain, w in zip(draws, target.draw(rng, chains), strict=True):
            queries.begin_chain()
            state = langevin.initial_state(rng, w, prior)
            for position in chain:
                queries.begin_iteration()
                state, info = langevin.transition(rng, state, asked, prior, **SETTINGS)
                position[:] = state.z
                accepted += int(info.accepted)
    return Run(draws, accepted / (chains * ITERATIONS), max(errors))


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["plain", "consistent"])
def test_tilted_posterior_is_stationary(clipping):
    run, target = anchored_run(clipping), TARGETS[clipping]
    assert run.largest_error < HALF_WIDTH, "the setting must clip no energy error to be exact"
    assert 0.05 < run.acceptance < 0.97, "the accept test must matter"
    assert run.worst(target) < Z_LIMIT, run.z_scores(target)


@pytest.mark.slow
def test_other_targets_are_told_apart():
    """What clipping takes is given back, once; where records are not tilted, scores count twice."""
    for fault in (None, 0.0, -1.0):
        assert anchored_run("consistent").worst(Anchored(fault)) > FAULT_LIMIT
    assert anchored_run("plain", tilted=False, chains=100).worst(TARGETS["plain"]) > FAULT_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["plain", "consistent"])
def test_target_written_by_hand_is_that_of_the_engine(clipping):
    """And the clip norms are not idle: they bind for some records and not for others."""
    engine = parts()[0][clipping]
    tilted, target = engine.tilted(), TARGETS[clipping]
    np.testing.assert_allclose(released(clipping), target.score, atol=1e-12)
    draws = target.draw(np.random.default_rng(1), 20)
    found = np.array([tilted.log_likelihood(BASIS @ w) for w in draws])
    by_hand = target.log_likelihood(draws)
    np.testing.assert_allclose(found - found[0], by_hand - by_hand[0], atol=1e-12)

    def lengths(engine, z):
        blocks = [block.copy() for _, block in engine.vectors(engine.scores(z))]
        return np.linalg.norm(np.concatenate(blocks, axis=1), axis=0)

    assert 0.2 < np.mean(lengths(engine, np.zeros(2)) > INNER) < 0.95
    changes = np.concatenate([lengths(tilted, BASIS @ w) for w in draws])
    assert 0.1 < np.mean(changes > CLIP["gradient"]) < 0.9
