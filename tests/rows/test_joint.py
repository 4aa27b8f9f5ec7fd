"""Consistent clipping of units with several outcomes, or with several rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy.special import expit, logit
from scipy.stats import binom

from pymc_dp.base import threads
from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.extraction import extract
from pymc_dp.records.units import RecordStore
from pymc_dp.rows import contributions, groups, law
from pymc_dp.rows.contributions import (
    ConsistentScore,
    ExpectedCurvature,
    LawNotFound,
    Loss,
    OuterProduct,
    Score,
    law_unknown,
)
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from tests.records.test_records import same_bits
from tests.rows.test_consistent import every_kind
from tests.rows.test_contributions import values
from tests.selection import marked

CLIP = 0.9
#: Of a sum of scores of independent units: exceeded by chance once in 10^7 runs.
Z_LIMIT = 5.3
_rng = np.random.default_rng(21)


# -- models ---------------------------------------------------------------------------------------


def predictor(x: np.ndarray) -> Any:
    return pm.Normal("a") + pm.Normal("b") * x


def pair(n: int, rng: np.random.Generator) -> None:
    """Counts, and positive numbers of the same mean: few combinations."""
    x = rng.normal(size=n)
    mu, mean = pt.exp(predictor(x)), np.exp(0.2 + 0.4 * x)
    shape = pm.Exponential("shape", 1.0)
    pm.Poisson("k", mu, observed=rng.poisson(mean))
    pm.Gamma("y", alpha=shape, beta=shape / mu, observed=rng.gamma(2.0, mean / 2.0))


def three(n: int, rng: np.random.Generator) -> None:
    """So many combinations that points stand for them."""
    x = rng.normal(size=n)
    eta, mean = predictor(x), 0.2 + 0.4 * x
    pm.Bernoulli("kind", logit_p=pm.Normal("c"), observed=rng.random(n) < 0.5)
    pm.Poisson("k", pt.exp(eta), observed=rng.poisson(np.exp(mean)))
    pm.StudentT("y", nu=4.0, mu=eta, sigma=1.0, observed=mean + rng.standard_t(4.0, n))


def users(n: int, rng: np.random.Generator) -> np.ndarray:
    """One to ten rows of each user, in any order."""
    ids = rng.permutation(np.repeat(np.arange(n), 1 + np.arange(n) % 10))
    x = rng.normal(size=len(ids))
    alpha, mean = pm.Exponential("alpha", 1.0), np.exp(0.2 + 0.4 * x)
    y = rng.poisson(rng.gamma(2.0, mean / 2.0))
    pm.NegativeBinomial("y", mu=pt.exp(predictor(x)), alpha=alpha, observed=y)
    return ids


def visits(n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Two variables of users, of which each user has two rows, and half of them one more."""
    ids = {"k": rng.permutation(np.arange(n).repeat(2)), "y": np.arange(0, n, 2)}
    x = rng.normal(size=2 * n)
    eta = predictor(x)
    pm.Poisson("k", pt.exp(eta), observed=rng.poisson(np.exp(0.2 + 0.4 * x)))
    sigma = pm.HalfNormal("sigma")
    pm.Normal("y", pm.Normal("m"), sigma, observed=rng.normal(size=n // 2))
    return ids


def arms(n: int, rng: np.random.Generator) -> np.ndarray:
    """Ten choices of each user, three of them under a treatment."""
    ids = rng.permutation(np.arange(n).repeat(10))
    x = np.empty(10 * n)
    x[np.argsort(ids)] = np.tile(np.arange(10) % 4 == 0, n)
    seen = rng.random(10 * n) < expit(-2.0 + x)
    pm.Bernoulli("y", logit_p=predictor(x), observed=seen)
    return ids


MODELS: dict[str, Callable[[int, np.random.Generator], Any]] = {
    f.__name__: f for f in (pair, three, users, visits, arms)
}
SOME = marked(MODELS, slow=["three", "visits"])
FEWER = marked(MODELS, slow=["three", "users", "visits"])
#: Parameters that the data are drawn with, unconstrained.
TRUTHS = {
    "pair": [0.2, 0.4, np.log(2.0)],
    "three": [0.2, 0.4, 0.0],
    "users": [np.log(2.0), 0.2, 0.4],
    "visits": [0.2, 0.4, 0.0, 0.0],
    "arms": [-2.0, 1.0],
}


@cache
def engine_of(name: str, n: int = 40, mode: Any = INTERPRETED) -> RowEngine:
    """At the truth, in coordinates in which scores have a length of about one."""
    with pm.Model() as model:
        ids = MODELS[name](n, np.random.default_rng(4))
    records = extract(model, check=False, privacy_unit=ids)
    point, d = np.array(TRUTHS[name]), records.parameters.size
    engine = RowEngine.of(records, Coordinates(point, np.eye(d)), {"mode": mode})
    norm = np.linalg.norm(values(engine, Score(engine.coordinates)), axis=1).mean()
    scaling = np.eye(d) / norm + 0.02 * np.random.default_rng(3).standard_normal((d, d))
    return engine.with_coordinates(Coordinates(point, scaling))


def units_of(group: RowGroup) -> np.ndarray:
    return np.arange(group.n_rows) if group.units is None else group.units


def arranged(engine: RowEngine, place: np.ndarray) -> RowEngine:
    """Unit u becomes unit place[u], and rows are sorted by it."""
    groups = []
    for group in engine.groups:
        units = place[units_of(group)]
        order = np.argsort(units, kind="stable")
        store = RecordStore([np.ascontiguousarray(a[order]) for a in group.store.read()])
        told = None if group.units is None else units[order]
        groups.append(RowGroup(group.functions, store, told))
    return RowEngine(groups, engine.parameters, engine.n_units, engine.coordinates)


def changed(engine: RowEngine, unit: int) -> RowEngine:
    """The rows of a unit in the place of those of the next, as far as there are as many."""
    groups = []
    for group in engine.groups:
        here, there = (np.flatnonzero(units_of(group) == u) for u in (unit, unit + 1))
        k = min(len(here), len(there))
        arrays = [array.copy() for array in group.store.read()]
        for array in arrays:
            array[there[:k]] = array[here[:k]]
        groups.append(RowGroup(group.functions, RecordStore(arrays), group.units))
    return RowEngine(groups, engine.parameters, engine.n_units, engine.coordinates)


# -- a function of the unit -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(MODELS, exhaustive=["arms", "pair", "three"]))
def test_bits_of_a_unit_do_not_depend_on_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(name, 24, mode="NUMBA")
    n = engine.n_units
    assert not law_unknown(engine)
    kinds = every_kind(engine.coordinates, CLIP)
    whole = [values(engine, spec) for spec in kinds]
    assert not whole[-1].any()
    place = np.random.default_rng(3).permutation(n)
    permuted, other = arranged(engine, place), changed(engine, 7)

    def same() -> None:
        for spec, found in zip(kinds, whole, strict=True):
            assert same_bits(values(permuted, spec)[place], found)
            after = values(other, spec)
            assert same_bits(np.delete(after, 8, axis=0), np.delete(found, 8, axis=0))
        assert not same_bits(values(other, kinds[0])[8], whole[0][8])

    same()
    monkeypatch.setattr(contributions, "BLOCK", 7)
    same()
    monkeypatch.setattr(contributions, "_JOINT", 1)  # units one by one
    monkeypatch.setattr(contributions, "_DIRECTIONS", 60)  # rows
    monkeypatch.setattr(threads, "count", lambda: 3)
    monkeypatch.setattr(groups, "_COST", 2**40)
    same()


@pytest.mark.slow
def test_units_that_are_alike_add_the_same() -> None:
    engine = changed(engine_of("pair"), 7)
    for spec in every_kind(engine.coordinates, CLIP):
        found = values(engine, spec)
        assert same_bits(found[7], found[8])


# -- the right value ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_clipped_scores_have_no_bias(name: str) -> None:
    """Over data that the model draws; sums of units are normal."""
    engine = engine_of(name, 4000)
    at = engine.coordinates
    own, found = values(engine, Score(at)), values(engine, ConsistentScore(at, clip_norm=CLIP))
    factors = np.minimum(1.0, CLIP / np.linalg.norm(own, axis=1))[:, None]
    assert np.mean(factors < 1.0) > 0.1
    z = [np.abs(g.sum(axis=0) / np.sqrt((g**2).sum(axis=0))).max() for g in (found, factors * own)]
    assert z[0] < Z_LIMIT
    if name in ("pair", "users"):
        assert z[1] > 1.5 * Z_LIMIT, "clipping alone is not seen"


@pytest.mark.parametrize("name", FEWER)
def test_what_clipping_takes_is_stated(name: str) -> None:
    """Against what it takes from data that the model draws: means of squares, of 4000 units."""
    engine = engine_of(name, 4000)
    at, d = engine.coordinates, engine.d
    own = values(engine, Score(at))
    taken = (1.0 - np.minimum(1.0, CLIP / np.linalg.norm(own, axis=1)))[:, None] * own
    lost, shared = np.split(values(engine, Loss(at, CLIP)), [d], axis=1)
    for stated, seen in ((lost, taken * taken), (shared, taken * own)):
        error = seen.std(axis=0) * np.sqrt(len(seen))
        assert np.all(np.abs(stated.sum(axis=0) - seen.sum(axis=0)) < Z_LIMIT * error)


@pytest.mark.parametrize("name", MODELS)
def test_points_of_a_unit_have_the_moments_of_its_terms(name: str) -> None:
    """Terms are independent: without a point that they share, variances add up in each unit."""
    engine = engine_of(name)
    exact = values(engine, ExpectedCurvature(engine.coordinates, diagonal=True))
    [(_, points)] = contributions.units_with_outcomes(engine.each_alone())
    np.testing.assert_allclose(points.weights.sum(axis=1), 1.0)
    sizes = np.sqrt(exact.sum(axis=1))
    second = np.einsum("ik,ikj->ij", points.weights, points.vectors**2)
    mean = np.einsum("ik,ikj->ij", points.weights, points.vectors)
    assert np.abs(mean).max(axis=1).max() < 0.06 * sizes.max()
    assert np.all(np.abs(second - exact).max(axis=1) < 0.2 * exact.max(axis=1))
    assert np.mean(np.abs(second - exact).max(axis=1) / exact.max(axis=1)) < 0.03


def test_two_choices_are_an_exact_sum() -> None:
    n = 50
    x, y = _rng.normal(size=n), _rng.integers(0, 2, (2, n))
    with pm.Model() as model:
        for name, seen in zip("ab", y, strict=True):
            pm.Bernoulli(f"y_{name}", logit_p=pm.Normal(name) * x, observed=seen)
    engine = RowEngine.of(
        extract(model, check=False), Coordinates(np.array([0.5, -1.0]), np.eye(2))
    )
    p = expit(np.array([0.5, -1.0])[:, None] * x)

    def clip(g: np.ndarray) -> np.ndarray:
        return g * np.minimum(1.0, 0.4 / np.linalg.norm(g, axis=0))

    total = clip((y - p) * x)
    for a in (0, 1):
        for b in (0, 1):
            g = (np.array([[a], [b]]) - p) * x
            total += np.prod(np.where([[a], [b]], p, 1.0 - p), axis=0) * (g - clip(g))
    found = values(engine, ConsistentScore(engine.coordinates, clip_norm=0.4))
    np.testing.assert_allclose(found, total.T, rtol=1e-9, atol=1e-12)


def test_users_of_one_row_are_records() -> None:
    n = 30
    x, y = _rng.normal(size=n), _rng.poisson(1.0, n)
    found = []
    for ids in (None, np.arange(n)):
        with pm.Model() as model:
            pm.Poisson("y", pt.exp(predictor(x)), observed=y)
        records = extract(model, check=False, privacy_unit=ids)
        engine = RowEngine.of(records, Coordinates(np.array([0.1, 0.5]), np.eye(2)))
        found.append([values(engine, spec) for spec in every_kind(engine.coordinates, CLIP)])
    for record, user in zip(*found, strict=True):
        np.testing.assert_allclose(user, record, rtol=1e-9, atol=1e-12)


def test_more_points_give_back_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lattice against all combinations."""
    engine = engine_of("pair")
    spec = ConsistentScore(engine.coordinates, clip_norm=CLIP)
    exact = values(engine, spec)
    monkeypatch.setattr(contributions, "most_nodes", lambda outcome: 2 * law.most_nodes(outcome))
    points = values(engine, spec)
    assert 0.0 < np.abs(points - exact).max() < 0.02 * CLIP
    assert np.abs((points - exact).mean(axis=0)).max() < 0.002 * CLIP


def test_units_that_differ_have_points_of_their_own() -> None:
    """Errors of a quadrature that many units share would add up."""
    x = np.zeros(200)
    with pm.Model() as model:
        pm.Normal("y", predictor(x), 1.0, observed=_rng.normal(size=200))
    ids = np.arange(200) // 4
    records = extract(model, check=False, privacy_unit=ids)
    engine = RowEngine.of(records, Coordinates(np.zeros(2), np.eye(2)))
    found = values(engine, ConsistentScore(engine.coordinates, clip_norm=CLIP))
    own = values(engine, Score(engine.coordinates))
    clipped = own * np.minimum(1.0, CLIP / np.linalg.norm(own, axis=1))[:, None]
    errors = (found - clipped)[:, 0]  # the law is symmetric: nothing is to be given back
    assert np.abs(errors).max() < 0.02
    assert np.abs(errors.mean()) < 5.3 * errors.std() / np.sqrt(len(errors))
    assert len(set(errors.round(12))) == len(errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alike", "share"),
    marked(
        [(True, 0.3), (True, 0.05), (False, 0.3), (False, 0.05)],
        exhaustive=[(True, 0.05), (False, 0.3), (False, 0.05)],
    ),
)
def test_errors_of_users_with_the_same_score_do_not_add_up(alike: bool, share: float) -> None:
    """Against the exact sum: more choices than points, of equal rows and of rows that differ."""
    n, k = 4000, 20
    rng = np.random.default_rng(8)
    x = np.zeros(n * k) if alike else rng.normal(size=n * k)
    x[k - 1 :: k] = 0.0  # users may have a row in common
    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b")
        pm.Bernoulli("y", logit_p=a + 1e-9 * b * x, observed=rng.random(n * k) < share)
    at = Coordinates(np.array([logit(share), 1.0]), np.eye(2))
    engine = RowEngine.of(extract(model, check=False, privacy_unit=np.arange(n * k) // k), at)
    scores = np.arange(k + 1) - k * share
    weights = binom.pmf(np.arange(k + 1), k, share)
    clip = np.abs(scores)[np.searchsorted(np.cumsum(weights), 0.9)]
    exact = (weights * (scores - np.clip(scores, -clip, clip))).sum()
    own = values(engine, Score(at))[:, 0]
    found = values(engine, ConsistentScore(at, clip_norm=clip))[:, 0]
    given_back = found - np.clip(own, -clip, clip)
    sd = np.sqrt(n * k * share * (1.0 - share))  # of the sum of scores
    assert n * np.abs(exact) > 0.5 * sd, "clipping has no bias"
    assert np.abs((given_back - exact).sum()) < (1e-6 if alike else 0.04) * sd


def test_impossible_choices_of_a_unit_are_nothing_whatever_others_have() -> None:
    """Scores of a choice of probability 0 may be too long for a number."""
    found = []
    for other in (-1e4, 0.5):  # the choice is looked at where any row of a block has it
        x = np.array([[-1e160, 0.1]] * 2 + [[other, 0.2]] * 2)
        with pm.Model() as model:
            b, a = pm.Normal("b", shape=2), pm.Normal("a")
            eta = np.array([1e160, 1e160, 1.0, 1.0]) * (x @ b)
            pm.Bernoulli("y", logit_p=eta, observed=np.zeros(4, dtype=int))
            pm.Gamma("v", 1.0, pt.exp(a), observed=np.array([0.3, 2.0]))
        units = {"y": np.array([0, 0, 1, 1]), "v": np.arange(2)}
        at = Coordinates(np.full(3, 0.3), np.eye(3))
        engine = RowEngine.of(extract(model, check=False, privacy_unit=units), at)
        found.append(values(engine, ConsistentScore(at, clip_norm=0.3)))
    assert same_bits(found[0][0], found[1][0])
    assert not same_bits(found[0][1], found[1][1])


@pytest.mark.parametrize("upper", [15.0, 20.0])
def test_weights_of_all_combinations_of_counts_add_up(upper: float) -> None:
    y = np.array([3.0, 9.0, 10.0, 8.0])
    with pm.Model() as model:
        count = pm.Poisson.dist(14.0 * pt.exp(pm.Normal("a")))
        pm.Censored("y", count, lower=None, upper=upper, observed=y)
    records = extract(model, check=False, privacy_unit=np.arange(4) // 2)
    engine = RowEngine.of(records, Coordinates(np.zeros(1), np.eye(1)))
    [(_, points)] = contributions.units_with_outcomes(engine.each_alone())
    np.testing.assert_allclose(points.weights.sum(axis=1), 1.0)


def test_whether_all_combinations_are_taken_does_not_depend_on_the_ends_of_others() -> None:
    """PyMC 6 leaves ends out of the density where all are infinite."""
    found, n, k = [], 6, 37
    for first in (np.inf, 3.0):
        with pm.Model() as model:
            a, b = pm.Normal("a"), pm.Normal("b")
            base = pm.Exponential.dist(pt.exp(a))
            upper = np.r_[first, np.full(n - 1, np.inf)]
            pm.Censored("t", base, lower=None, upper=upper, observed=np.linspace(0.1, 2.0, n))
            pm.Bernoulli("y", logit_p=b, observed=np.arange(n * k) % 3 == 0)
        units = {"t": np.arange(n), "y": np.arange(n * k) // k}
        at = Coordinates(np.array([0.2, 0.4]), np.eye(2))
        engine = RowEngine.of(extract(model, check=False, privacy_unit=units), at)
        found.append(values(engine, ConsistentScore(at, clip_norm=2.0)))
    assert same_bits(found[0][1:], found[1][1:])


@pytest.mark.slow
def test_a_unit_with_a_term_of_unknown_law_is_as_it_was_seen() -> None:
    n = 30
    large = np.where(np.arange(n) < 10, 5.0, 0.0)
    with pm.Model() as model:
        y = pm.Data("y", _rng.poisson(2.0, n).astype("uint8"))
        a, b = pm.Normal("a"), pm.Normal("b")
        pm.Poisson("k", pt.exp(a + large + 1.0), observed=y)
        pm.Normal("v", b, 1.0, observed=_rng.normal(size=n))
    engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(2), np.eye(2)))
    at = engine.coordinates
    missing = values(engine, LawNotFound(at))[:, 0].astype(bool)
    assert missing[:10].all() and not missing[10:].any()
    own = values(engine, Score(at))
    scale = np.minimum(1.0, CLIP / np.linalg.norm(own, axis=1))[:, None]
    found = values(engine, ConsistentScore(at, clip_norm=CLIP))
    np.testing.assert_allclose(found[missing], (scale * own)[missing])
    loss = values(engine, Loss(at, CLIP))
    np.testing.assert_allclose(loss[missing, :2], (((1.0 - scale) * own) ** 2)[missing])
    products = values(engine, OuterProduct(at, diagonal=True))
    curvatures = values(engine, ExpectedCurvature(at, diagonal=True))
    np.testing.assert_allclose(curvatures[missing, 0], products[missing, 0])
    np.testing.assert_allclose(curvatures[:, 1], 1.0, rtol=0.02)


# -- where it is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("by_user", [False, True])
@pytest.mark.parametrize("use", [lambda y: y, lambda y: y[:, None]])
def test_an_outcome_that_is_a_covariate_is_refused(use: Any, by_user: bool) -> None:
    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b", shape=1)
        y = pm.Data("first", _rng.normal(size=30))
        pm.Normal("y", a, 1.0, observed=y)
        eta = use(y) @ b if use(y).type.ndim == 2 else use(y) * b[0]
        pm.Poisson("k", pt.exp(eta), observed=_rng.poisson(1.0, 30))
    ids = np.arange(30) // 3 if by_user else None
    engine = RowEngine.of(
        extract(model, check=False, privacy_unit=ids), Coordinates(np.zeros(2), np.eye(2))
    )
    assert "covariate" in law_unknown(engine)
    with pytest.raises(TypeError, match="covariate"):
        values(engine, LawNotFound(engine.coordinates))
