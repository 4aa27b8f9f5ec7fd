"""Scores of which clipping takes much, and gives it back: does the posterior cover the truth?

Poisson regression on 1,500 records.  The parameters are drawn from a normal prior about the origin,
2.5 times as wide as the posterior, and the records from the model; the sum of the clipped scores at
the origin, plus noise, is all that is seen.  The squared distance of the truth from the mean of the
posterior given that sum, in its own widths, is 1 per parameter on average.  All draws are seeded;
without seeds a test would fail by chance in less than one of 10^6 runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pymc as pm
import pytest

from pymc_dp.base.matrices import Coordinates
from pymc_dp.publication.noise_aware import noisy_posterior
from pymc_dp.records.extraction import extract
from pymc_dp.records.units import RecordStore
from pymc_dp.rows import contributions
from pymc_dp.rows.contributions import ConsistentScore, Loss
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from pymc_dp.rows.law import Law, law_of
from pymc_dp.tuning.releases import Lost
from tests.statistical.harness import Z_LIMIT

pytestmark = pytest.mark.compiled

N, REPEATS, WIDTH, NOISE = 1500, 1500, 2.5, 0.05
#: Part of the scores that are clipped.
CLIPPED = 0.4
_rng = np.random.default_rng(0)
X = np.c_[np.ones(N), _rng.normal(size=N)]
ORIGIN = np.array([0.3, 0.4])


@cache
def records() -> RowEngine:
    """In coordinates in which the curvature is 1."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=2)
        pm.Poisson("y", pm.math.exp(X @ beta), observed=np.zeros(N, dtype=int))
    curvature = (X.T * np.exp(X @ ORIGIN)) @ X
    scaling = np.linalg.cholesky(np.linalg.inv(curvature))
    return RowEngine.of(extract(model, check=False), Coordinates(ORIGIN, scaling))


def with_outcomes(y: np.ndarray) -> RowEngine:
    engine = records()
    [group] = engine.groups
    graph = group.functions.graph
    assert graph.outcomes
    arrays = list(group.store.read())
    arrays[graph.outcomes[0].leaf] = y.astype(arrays[graph.outcomes[0].leaf].dtype)
    group = RowGroup(group.functions, RecordStore(arrays), None)
    return RowEngine([group], engine.parameters, N, engine.coordinates)


@cache
def clip_norm() -> float:
    engine = with_outcomes(np.random.default_rng(1).poisson(np.exp(X @ ORIGIN)))
    [(_, scores)] = engine.vectors(engine.scores(np.zeros(2)))
    return float(np.quantile(np.linalg.norm(scores, axis=0), 1.0 - CLIPPED))


def loss() -> Lost:
    engine = with_outcomes(np.zeros(N))  # what is seen plays no part
    total = sum(
        values.sum(axis=1) for _, values in Loss(engine.coordinates, clip_norm()).blocks(engine)
    )
    return Lost(np.diag(total[:2]), np.diag(total[2:]))


@cache
def sums(repeats: int = REPEATS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(repeats, 2) truths, and sums of clipped scores with and without what is given back."""
    rng = np.random.default_rng(2)
    truths = WIDTH * rng.standard_normal((repeats, 2))
    given, plain = np.empty((2, repeats, 2))
    for k, z in enumerate(truths):
        theta = records().coordinates.theta(z)
        engine = with_outcomes(rng.poisson(np.exp(X @ theta)))
        given_back = ConsistentScore(engine.coordinates, clip_norm=clip_norm()).blocks(engine)
        given[k] = sum(values.sum(axis=1) for _, values in given_back)
        scores = np.concatenate([b for _, b in engine.vectors(engine.scores(np.zeros(2)))], axis=1)
        factors = np.minimum(1.0, clip_norm() / np.linalg.norm(scores, axis=0))
        plain[k] = scores @ factors
    return truths, given, plain


def distance(truths: np.ndarray, scores: np.ndarray, lost: Lost, add: bool = True) -> float:
    """Mean squared distance of the truth from the posterior mean, in its widths, less 1: a z."""
    rng, one = np.random.default_rng(3), np.eye(2)
    squares = []
    for z, score in zip(truths, scores, strict=True):
        noisy = score + NOISE * rng.standard_normal(2)
        slope, noise, rest = lost.corrected(noisy, NOISE**2 * one, one)
        covariance = noise + rest if add else noise
        mean, width = noisy_posterior(slope, covariance, one, one / WIDTH**2, np.zeros(2))
        squares.append((z - mean) @ np.linalg.solve(width, z - mean) / 2.0)
    return float((np.mean(squares) - 1.0) * np.sqrt(len(squares)))  # of variance 1 each


@pytest.mark.slow
def test_posteriors_cover_the_truth() -> None:
    truths, given, _ = sums()
    assert abs(distance(truths, given, loss())) < Z_LIMIT


@pytest.mark.slow
def test_faults_are_seen() -> None:
    truths, given, plain = sums()
    lost = loss()
    without_slope = replace(lost, shared=np.zeros((2, 2)))
    assert distance(truths, given, lost, add=False) > Z_LIMIT, "what clipping has lost, left out"
    assert distance(truths, given, without_slope) > Z_LIMIT, "the slope of what is left"
    assert distance(truths, plain, lost) > Z_LIMIT, "nothing given back"
    assert distance(truths, 2.0 * plain - given, lost) > Z_LIMIT, "taken once more"


@pytest.mark.slow
def test_a_quadrature_shared_by_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_first(*given: object) -> Law:
        found = law_of(*given)  # type: ignore[arg-type]
        return Law(*(np.repeat(x[:, :1], x.shape[1], axis=1) for x in (found.nodes, found.weights)))

    monkeypatch.setattr(contributions, "law_of", of_the_first)
    truths, given, _ = sums.__wrapped__(200)
    assert distance(truths, given, loss()) > Z_LIMIT
