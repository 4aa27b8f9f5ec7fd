"""Laws of outcomes by quadrature, and what they give back to clipped scores, row by row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import stats
from scipy.special import expit

from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.errors import NotFactorizable
from pymc_dp.records.extraction import Records, extract
from pymc_dp.records.graph import Outcome
from pymc_dp.rows import contributions, law
from pymc_dp.rows.contributions import (
    ConsistentScore,
    Contribution,
    Curvature,
    ExpectedCurvature,
    LawNotFound,
    Loss,
    OuterProduct,
    RowsWithLaw,
    Score,
    law_unknown,
    score_norms,
)
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.law import law_of
from tests.records.test_records import same_bits, with_data
from tests.rows.test_contributions import values
from tests.selection import marked, others

N = 120
CLIP = 0.8
LINE, HALF, UNIT = (-np.inf, np.inf), (0.0, np.inf), (0.0, 1.0)


# -- laws -----------------------------------------------------------------------------------------


SHIFTS = np.array([0.3, 0.3, 0.0, 0.6, 0.999])


def found(outcome: Outcome, log_density: Callable[[np.ndarray], np.ndarray]) -> law.Law:
    """The law of rows with the same covariates, of which two are alike."""
    with np.errstate(all="ignore"):
        return law_of(outcome, [np.zeros(len(SHIFTS))], SHIFTS.__getitem__, lambda _: log_density)


REALS: dict[str, tuple[tuple[float, float], Any]] = {
    "normal": (LINE, stats.norm(3.0, 2.0)),
    "far and narrow": (LINE, stats.norm(1e6, 1e-2)),
    "t of 3": (LINE, stats.t(3.0)),
    "Cauchy": (LINE, stats.cauchy(5.0)),
    "Laplace": (LINE, stats.laplace(2.0, 3.0)),
    "Gumbel": (LINE, stats.gumbel_r(2.0, 3.0)),
    "skew normal": (LINE, stats.skewnorm(8.0)),
    "gamma, infinite at 0": (HALF, stats.gamma(0.3)),
    "gamma": (HALF, stats.gamma(100.0)),
    "Weibull, infinite at 0": (HALF, stats.weibull_min(0.4)),
    "lognormal": (HALF, stats.lognorm(3.0)),
    "Lomax": (HALF, stats.lomax(1.2)),
    "beta": (UNIT, stats.beta(2.0, 8.0)),
    "beta, infinite at both ends": (UNIT, stats.beta(0.1, 0.3)),
    "uniform": (UNIT, stats.uniform()),
    "von Mises": ((-np.pi, np.pi), stats.vonmises(1000.0)),
}


@pytest.mark.parametrize("name", marked(REALS, slow=["von Mises"]))
def test_probabilities_of_real_outcomes(name: str) -> None:
    (lower, upper), exact = REALS[name]
    outcome = found(Outcome(0, False, lower, upper), exact.logpdf)
    assert outcome.weights.sum(axis=0) == pytest.approx(1.0) and outcome.weights.min() >= 0.0
    assert same_bits(outcome.nodes[:, 0], outcome.nodes[:, 1])
    # expectations of functions that level off, like clipped scores
    centre, width = exact.median(), np.subtract(*exact.ppf([0.8, 0.2]))
    for function in (np.tanh, lambda u: np.exp(-u * u), expit):
        by_nodes = (outcome.weights * function((outcome.nodes - centre) / width)).sum(axis=0)
        by_integral = np.mean(function((exact.ppf((np.arange(1000) + 0.5) / 1e3) - centre) / width))
        assert by_nodes == pytest.approx(float(by_integral), abs=0.01)


COUNTS: dict[str, Any] = {
    **{f"Poisson {mean:g}": stats.poisson(mean) for mean in (1e-3, 1.0, 5.0, 40.0, 3000.0)},
    **{f"negative binomial {n:g}": stats.nbinom(n, 0.1) for n in (0.3, 2.0, 50.0)},
    "Bernoulli": stats.bernoulli(0.2),
    "geometric": stats.geom(0.03),
    "binomial": stats.binom(400, 0.7),
}


@pytest.mark.parametrize("name", COUNTS)
def test_moments_of_counts(name: str) -> None:
    exact = COUNTS[name]
    outcome = found(Outcome(0, True, 0.0, 2.0**31), exact.logpmf)
    nodes, weights = outcome.nodes, outcome.weights
    assert weights.sum(axis=0) == pytest.approx(1.0) and weights.min() >= 0.0
    mean, variance = exact.stats("mv")
    few = exact.sf(14) < 1e-6  # then each is a node
    first = (weights * nodes).sum(axis=0)
    assert first == pytest.approx(mean, rel=1e-5 if few else 0.003, abs=1e-5)
    spread = (weights * (nodes - mean) ** 2).sum(axis=0)
    assert spread == pytest.approx(variance, rel=1e-4 if few else 0.07, abs=1e-4)


@pytest.mark.parametrize("event", [0.3, 1e-2, 1e-3, 1e-5])
def test_the_rest_is_found_beside_an_outcome_of_nearly_all_probability(event: float) -> None:
    """Times of rare events that are censored at 1, and counts of which nearly all are 0."""
    rate = -np.log1p(-event)

    def of_times(y: np.ndarray) -> np.ndarray:
        return np.where(y < 1.0, np.log(rate) - rate * y, -rate)

    times = found(Outcome(0, False, 0.0, 1.0, (1.0,)), of_times)
    before = np.where(times.nodes < 1.0, times.weights, 0.0)
    np.testing.assert_allclose(before.sum(axis=0), event, rtol=1e-6)
    some = stats.nbinom(5.0, 0.05)

    def of_counts(k: np.ndarray) -> np.ndarray:
        chance = np.where(k == 0.0, (1.0 - event) + event * some.pmf(0), event * some.pmf(k))
        return np.log(chance)

    counts = found(Outcome(0, True, 0.0, 1e6), of_counts)
    mean, square = event * some.mean(), event * (some.var() + some.mean() ** 2)
    np.testing.assert_allclose((counts.weights * counts.nodes).sum(axis=0), mean, rtol=1e-2)
    np.testing.assert_allclose((counts.weights * counts.nodes**2).sum(axis=0), square, rtol=2e-2)


def test_laws_that_are_not_found_have_no_weights() -> None:
    def far_apart(y: np.ndarray) -> np.ndarray:
        return np.logaddexp(stats.norm.logpdf(y, -20.0), stats.norm.logpdf(y, 8.0, 0.5)) - 0.7

    assert not found(Outcome(0, False, *LINE), far_apart).weights.any()
    assert not found(Outcome(0, True, 0.0, 255.0), stats.poisson(300.0).logpmf).weights.any()
    assert not found(Outcome(0, False, *LINE), lambda y: np.full(len(y), np.nan)).weights.any()


# -- models ---------------------------------------------------------------------------------------

_rng = np.random.default_rng(11)
X = _rng.normal(size=N)
#: Means from 0.01 to 400: some laws are sums over a few integers, others over groups of them.
WIDE = _rng.uniform(-4.5, 6.0, N)


def line() -> Any:
    return pm.Normal("a", 0.0, 1.0) + pm.Normal("b", 0.0, 1.0) * X


def logistic() -> None:
    pm.Bernoulli("y", logit_p=line(), observed=_rng.integers(0, 2, N))


def counts() -> None:
    pm.Poisson("y", pt.exp(line() + WIDE), observed=_rng.poisson(np.exp(WIDE)))


def overdispersed() -> None:
    alpha = pm.Exponential("alpha", 1.0)
    pm.NegativeBinomial("y", mu=pt.exp(line()), alpha=alpha, observed=_rng.poisson(2.0, N))


def positive() -> None:
    shape = pm.Exponential("shape", 1.0)
    pm.Gamma("y", alpha=shape, beta=shape / pt.exp(line()), observed=_rng.gamma(2.0, 1.0, N))


def fractions() -> None:
    y = _rng.beta(2.0, 3.0, N).astype("float32")
    pm.Beta("y", mu=pm.math.sigmoid(line()), nu=pm.Exponential("nu", 0.1), observed=y)


def heavy() -> None:
    sigma = pm.HalfNormal("sigma", 1.0)
    pm.StudentT("y", nu=4.0, mu=line(), sigma=sigma, observed=_rng.standard_t(4.0, N))


def inflated() -> None:
    psi = pm.Beta("psi", 1.0, 1.0)
    y = _rng.poisson(2.0, N) * (_rng.random(N) < 0.7)
    pm.ZeroInflatedPoisson("y", psi=psi, mu=pt.exp(line()), observed=y)


def survival() -> None:
    base = pm.Weibull.dist(alpha=pm.Exponential("alpha", 1.0), beta=pt.exp(line()))
    ends = _rng.uniform(0.5, 4.0, N)
    y = np.minimum(_rng.weibull(1.3, N), ends)
    pm.Censored("y", base, lower=None, upper=ends, observed=y)


def hurdle() -> None:
    y = _rng.gamma(2.0, 1.0, N) * (_rng.random(N) < 0.3)
    pm.HurdleGamma("y", psi=pm.Beta("psi", 1.0, 1.0), alpha=2.0, beta=pt.exp(line()), observed=y)


def two_normals() -> None:
    parts = pm.Normal.dist(line()[:, None] + np.array([0.0, 3.0]), np.array([1.0, 3.0]))
    pm.Mixture("y", w=np.array([0.7, 0.3]), comp_dists=parts, observed=_rng.normal(size=N))


MODELS = {
    f.__name__: f
    for f in (
        logistic,
        counts,
        overdispersed,
        positive,
        fractions,
        heavy,
        inflated,
        survival,
        hurdle,
        two_normals,
    )
}

SOME = marked(MODELS, slow=others(MODELS, ["logistic", "counts", "survival"]))
LONG = ["fractions", "inflated", "positive"]
COMPILED = marked(MODELS, slow=others(MODELS, ["counts", *LONG]), exhaustive=LONG)


@cache
def engine_of(name: str, mode: Any = INTERPRETED) -> RowEngine:
    with pm.Model() as model:
        MODELS[name]()
    records = extract(model, check=False)
    d = records.parameters.size
    rng = np.random.default_rng(3)
    scaling = np.eye(d) + 0.1 * rng.standard_normal((d, d))
    at = Coordinates(records.initial + 0.1, scaling)
    return RowEngine.of(records, at, {"mode": mode})


def at_start(records: Records) -> RowEngine:
    at = Coordinates(records.initial, np.eye(records.parameters.size))
    return RowEngine.of(records, at)


def every_kind(at: Coordinates, clip_norm: float = CLIP) -> list[Contribution]:
    return [
        ConsistentScore(at, clip_norm=clip_norm),
        ExpectedCurvature(at),
        ExpectedCurvature(at, diagonal=True),
        Loss(at, clip_norm),
        LawNotFound(at),
    ]


@pytest.mark.parametrize("name", COMPILED)
def test_bits_of_a_row_do_not_depend_on_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(name, mode="NUMBA")
    assert not law_unknown(engine)
    kinds = every_kind(engine.coordinates)
    whole = [values(engine, spec) for spec in kinds]
    assert not whole[-1].any()
    order = np.random.default_rng(3).permutation(N)
    permuted = with_data(engine, lambda a: a[order])

    def other(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[7] = array[8]
        return array

    changed = with_data(engine, other)
    for size in (8192, 7):
        monkeypatch.setattr(contributions, "BLOCK", size)
        for spec, expected in zip(kinds, whole, strict=True):
            assert same_bits(values(permuted, spec), expected[order])
            after = values(changed, spec)
            assert same_bits(np.delete(after, 7, axis=0), np.delete(expected, 7, axis=0))
            assert same_bits(after[7], expected[8])


@pytest.mark.parametrize("name", SOME)
def test_scores_of_a_law_have_mean_zero_and_the_curvature_as_variance(name: str) -> None:
    """The two identities of a likelihood, of which the second is by other functions."""
    engine = engine_of(name)
    rows = RowsWithLaw(engine, slice(0, N), 0)
    mean = np.zeros((engine.d, N))
    for weight, scores in zip(rows.law.weights, rows.of_outcomes(), strict=True):
        mean += weight * np.einsum("adi,ai->di", rows.directions, scores)
    expected = values(engine, ExpectedCurvature(engine.coordinates, diagonal=True))
    assert np.max(np.abs(mean) / np.sqrt(expected.T + 1e-6)) < 0.06
    assert np.max(np.abs(mean.sum(axis=1)) / np.sqrt(expected.sum(axis=0))) < 0.2
    expected = values(engine, ExpectedCurvature(engine.coordinates))
    by_hand = np.zeros_like(expected)
    graph = engine.groups[0].functions.graph
    assert graph.outcomes
    leaf = graph.outcomes[0].leaf
    for node, weight in zip(rows.law.nodes, rows.law.weights, strict=True):
        if weight.any():
            data = list(engine.groups[0].store.read())
            data[leaf] = node.astype(data[leaf].dtype)
            made = iter(data)
            other = with_data(engine, lambda _, made=made: next(made))
            by_hand += weight[:, None] * values(other, Curvature(engine.coordinates, step=1e-4))
    by_hand, expected = by_hand.sum(axis=0), expected.sum(axis=0)
    np.testing.assert_allclose(expected, by_hand, rtol=0.03, atol=0.03 * np.abs(by_hand).max())


@pytest.mark.parametrize("name", SOME)
def test_more_nodes_give_back_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(name)
    spec = ConsistentScore(engine.coordinates, clip_norm=CLIP)
    few = values(engine, spec)
    own = values(engine, Score(engine.coordinates))
    norms = np.linalg.norm(own, axis=1, keepdims=True)
    assert np.mean(norms > CLIP) > 0.02
    clipped = own * np.minimum(1.0, CLIP / np.maximum(norms, 1e-300))
    monkeypatch.setattr(law, "_NODES", 500)
    monkeypatch.setattr(law, "_INTEGERS", 500)
    monkeypatch.setattr(law, "_FEW", 200)
    many = values(engine, spec)
    assert np.abs(many - clipped).max() > 0.02, "clipping takes something from the average record"
    assert np.abs(few - many).max() < 0.1 * CLIP
    assert np.abs((few - many).mean(axis=0)).max() < 0.005 * CLIP


@pytest.mark.parametrize("value", [-1e308, -1e16, -np.inf, np.inf, np.nan])
@pytest.mark.parametrize("outcome", [Outcome(0, False, *LINE), Outcome(0, True, 0.0, 1e6)])
def test_a_density_too_small_to_tell_values_apart(outcome: Outcome, value: float) -> None:
    law_ = found(outcome, lambda y: np.full(len(y), value))
    assert not law_.weights.any() and np.isfinite(law_.nodes).all()


def test_excess_of_a_choice_is_an_exact_sum() -> None:
    engine = engine_of("logistic")
    at = engine.coordinates
    a, b = at.location
    p = expit(a + b * X)
    directions = np.c_[np.ones(N), X] @ at.scaling
    lengths = np.linalg.norm(directions, axis=1)
    y = engine.groups[0].store.read()[0]
    assert set(np.unique(y)) == {0, 1}

    def clip(slope: np.ndarray) -> np.ndarray:
        return np.clip(slope, -CLIP / lengths, CLIP / lengths)

    lost = (1.0 - p) * (-p - clip(-p)) + p * (1.0 - p - clip(1.0 - p))
    expected = (clip(y - p) + lost)[:, None] * directions
    np.testing.assert_allclose(values(engine, ConsistentScore(at, clip_norm=CLIP)), expected)


@pytest.mark.parametrize(
    ("lower", "upper", "mean", "dispersed"),
    [
        (0, 12, 5.0, False),
        (45, 60, 50.0, False),
        (0, 60, 20.0, True),
    ],
)
def test_excess_of_a_censored_count_is_an_exact_sum(
    lower: int, upper: int, mean: float, dispersed: bool
) -> None:
    y = np.arange(lower, upper + 1.0)
    with pm.Model() as model:
        mu = pt.exp(pm.Normal("a", shape=1)[0] + np.log(mean))
        count = pm.NegativeBinomial.dist(mu=mu, alpha=2.0) if dispersed else pm.Poisson.dist(mu)
        upper_of_each = pm.Data("upper", np.full(len(y), float(upper)))
        pm.Censored("y", count, lower=lower or None, upper=upper_of_each, observed=y)
    engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(1), np.eye(1)))
    at = engine.coordinates
    weights = np.exp(engine.log_likelihood(np.zeros(1)))
    own = values(engine, Score(at))[:, 0]
    assert weights.sum() == pytest.approx(1.0)
    assert not values(engine, LawNotFound(at)).any()
    clip = np.sqrt(weights @ own**2)
    exact = weights @ (own - np.clip(own, -clip, clip))
    found = values(engine, ConsistentScore(at, clip_norm=clip))[:, 0] - np.clip(own, -clip, clip)
    assert weights @ found == pytest.approx(exact, abs=(1e-6 if upper < 16 else 1e-3) * clip)


def test_counts_cut_off_between_integers_have_no_law() -> None:
    """PyMC's own probabilities do not add up to one there."""
    with pm.Model() as model:
        count = pm.Poisson.dist(pt.exp(pm.Normal("a")))
        upper = pm.Data("upper", np.where(X > 0.0, 2.5, 3.0))
        pm.Censored("y", count, lower=None, upper=upper, observed=X * 0.0)
    engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(1), np.eye(1)))
    np.testing.assert_array_equal(values(engine, LawNotFound(engine.coordinates))[:, 0], X > 0.0)


#: Outcomes, a model of them, and how far off a sum may be.
ALIKE: dict[str, tuple[np.ndarray, Callable[[Any, np.ndarray], Any], float]] = {
    "gamma": (
        np.exp(np.linspace(-14.0, 3.0, 8001)),
        lambda a, y: pm.Gamma("y", 2.0, pt.exp(-a), observed=y),
        0.03,
    ),
    "counts": (
        np.arange(150),
        lambda a, y: pm.Poisson("y", 50.0 * pt.exp(a), observed=y),
        0.15,
    ),
    "overdispersed": (
        np.arange(600),
        lambda a, y: pm.NegativeBinomial("y", mu=20.0 * pt.exp(a), alpha=2.0, observed=y),
        0.3,
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_errors_of_rows_without_covariates_do_not_add_up(name: str) -> None:
    """In sds of the score of 20,000 rows, of which clipping has a bias of more than one."""
    y, observed, error = ALIKE[name]
    with pm.Model() as model:
        observed(pm.Normal("a", shape=1)[0], y)
    engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(1), np.eye(1)))
    weights = np.exp(engine.log_likelihood(np.zeros(1)))
    if y.dtype == float:
        weights *= np.gradient(y)
    own = values(engine, Score(engine.coordinates))[:, 0]
    sd = np.sqrt(weights @ own**2)
    for clip in (0.5 * sd, sd, 1.7 * sd):
        given = values(engine, ConsistentScore(engine.coordinates, clip_norm=clip))[:, 0]
        assert np.sqrt(20_000) * np.abs(weights @ np.clip(own, -clip, clip)) > sd
        assert np.sqrt(20_000) * np.abs(weights @ given) < error * sd


def test_rare_outcomes_count() -> None:
    """Of events and of counts with a mean below a millionth."""
    with pm.Model() as model:
        eta = pm.Normal("a", shape=1)[0] - 16.0
        pm.Bernoulli("y", logit_p=eta, observed=np.zeros(N, dtype=int))
        pm.Poisson("k", pt.exp(eta), observed=np.zeros(N, dtype=int))
    engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(1), np.eye(1)))
    curvatures = values(engine, ExpectedCurvature(engine.coordinates))
    np.testing.assert_allclose(curvatures, 2.0 * np.exp(-16.0), rtol=1e-5)


def test_a_variable_without_parameters_is_left_out() -> None:
    y, found = _rng.poisson(1.0, N), []
    for beside in (False, True):
        with pm.Model() as model:
            pm.Poisson("y", pt.exp(pm.Normal("a") + X), observed=y)
            if beside:
                pm.Normal("control", 0.0, 1.0, observed=X.copy())
        engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(1), np.eye(1)))
        assert not law_unknown(engine)
        found.append(values(engine, ConsistentScore(engine.coordinates, clip_norm=CLIP)))
    np.testing.assert_allclose(found[1], found[0])


def test_a_row_without_a_law_is_as_it_was_seen() -> None:
    """Counts of which a byte holds too few."""
    large = np.where(np.arange(N) < 10, 5.0, 0.0)
    with pm.Model() as model:
        y = pm.Data("y", _rng.poisson(2.0, N).astype("uint8"))
        pm.Poisson("k", pt.exp(pm.Normal("a") + pm.Normal("b") * X + large + 1.0), observed=y)
    engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(2), np.eye(2)))
    at = engine.coordinates
    missing = values(engine, LawNotFound(at))[:, 0].astype(bool)
    assert missing[:10].all() and not missing[10:].any()
    own = values(engine, Score(at))
    found = values(engine, ConsistentScore(at, clip_norm=CLIP))
    scale = np.minimum(1.0, CLIP / np.linalg.norm(own, axis=1))[:, None]
    np.testing.assert_allclose(found[missing], (scale * own)[missing])
    products = values(engine, OuterProduct(at))
    curvatures = values(engine, ExpectedCurvature(at))
    np.testing.assert_allclose(curvatures[missing], products[missing])
    loss = values(engine, Loss(at, CLIP))
    np.testing.assert_allclose(loss[missing, :2], (((1.0 - scale) * own) ** 2)[missing])
    np.testing.assert_allclose(loss[missing, 2:], ((1.0 - scale) * own**2)[missing])


def test_made_up_records_of_which_no_law_is_found_tell_nothing() -> None:
    with pm.Model() as model:
        pm.Poisson("k", pt.exp(pm.Normal("a") + 40.0), observed=_rng.poisson(2.0, N))
    assert score_norms(extract(model, check=False)) is None


# -- supports -------------------------------------------------------------------------------------


def outcome_of(declare: Callable[[], Any]) -> Outcome | None:
    with pm.Model() as model:
        declare()
    return next(iter(extract(model, check=False).groups[0].graph.outcomes), None)


def _truncated_weibull(mu: Any, upper: np.ndarray, y: np.ndarray) -> None:
    pm.Truncated("y", pm.Weibull.dist(1.5, pt.exp(mu)), lower=None, upper=upper, observed=y)


def _truncated_normal(mu: Any, upper: np.ndarray, y: np.ndarray) -> None:
    pm.TruncatedNormal("y", mu, 1.0, upper=upper, observed=y)


def _mixture(mu: Any, upper: np.ndarray, y: np.ndarray) -> None:
    parts = [pm.TruncatedNormal.dist(mu, 1.0, upper=upper), pm.Normal.dist(0.0, 3.0, shape=N)]
    pm.Mixture("y", w=[0.5, 0.5], comp_dists=parts, observed=y)


def _mixture_of_censored(mu: Any, upper: np.ndarray, y: np.ndarray) -> None:
    part = pm.Censored.dist(pm.Normal.dist(mu, 1.0), lower=None, upper=upper)
    pm.Mixture("y", w=[0.5, 0.5], comp_dists=[part, pm.Normal.dist(mu, 3.0)], observed=y)


@pytest.mark.parametrize(
    "declare",
    marked(
        [_truncated_weibull, _truncated_normal, _mixture, _mixture_of_censored],
        slow=[_truncated_weibull, _truncated_normal],
    ),
)
def test_whether_others_have_an_end_is_not_told(declare: Callable[..., None]) -> None:
    """What is done without noise is the same, whether one record has a finite end or none has."""
    y, told = _rng.gamma(2.0, size=N), []
    for first in (np.inf, 50.0):
        with pm.Model() as model:
            mu = pm.Normal("a") + pm.Normal("b") * X
            declare(mu, np.r_[first, np.full(N - 1, np.inf)], y)
        records = extract(model, check=False)
        outcomes = [astuple(outcome) for outcome in records.groups[0].graph.outcomes]
        norms = score_norms(records)
        rows = None if norms is None else tuple(map(tuple, norms))
        told.append((outcomes, law_unknown(at_start(records)), rows))
    assert told[0] == told[1]


def test_a_place_with_a_probability_of_its_own_has_no_density() -> None:
    """PyMC adds the two where a point is inside of the support of another part."""
    outcome = outcome_of(hurdle)
    assert outcome is not None and outcome.atoms == (0.0,) and outcome.modes == 1

    def normal() -> None:
        parts = [pm.DiracDelta.dist(0.0), pm.Normal.dist(pm.Normal("a"), 30.0)]
        pm.Mixture("y", [0.5, 0.5], parts, observed=X)

    def exponential() -> None:
        parts = [pm.DiracDelta.dist(0.0), pm.Exponential.dist(pt.exp(pm.Normal("a")))]
        pm.Mixture("y", [0.5, 0.5], parts, observed=np.abs(X))

    assert outcome_of(normal) is None and outcome_of(exponential) is None


@pytest.mark.parametrize("lower", [np.full(N, -np.inf), np.zeros(N)])
def test_censored_counts_have_no_array_of_bounds(lower: np.ndarray) -> None:
    """PyMC 6 holds them as integers where all bounds are infinite, and as real numbers else."""
    with pm.Model() as model:
        count = pm.Geometric.dist(pm.math.sigmoid(pm.Normal("a") + 0.0 * X))
        pm.Censored("y", count, lower=lower, upper=None, observed=np.full(N, 3))
    with pytest.raises(NotFactorizable, match=r"`y` is a censored count.*pm\.Data"):
        extract(model)


def test_truncated_outcomes_lie_where_their_law_does() -> None:
    upper = np.where(X > 0.0, 2.0, np.inf)
    with pm.Model() as model:
        _truncated_weibull(pm.Normal("a") * X, upper, np.minimum(_rng.gamma(2.0, size=N), upper))
    engine = at_start(extract(model, check=False))
    assert not values(engine, LawNotFound(engine.coordinates)).any()


@pytest.mark.parametrize("rows", marked([1, 3], slow=[1]))
def test_ends_are_not_read_from_private_values(rows: int) -> None:
    """A record that is not censored at the same place must not change those of other units.

    PyMC 6 leaves ends out of the density where all are infinite.
    """
    y, x = _rng.weibull(0.9, N) + 0.2, _rng.normal(size=N)
    same, one_other = np.full(N, -np.inf), np.full(N, -np.inf)
    one_other[1] = 0.1
    found = []
    for lower in (same, one_other):

        def declare(lower: np.ndarray = lower) -> None:
            base = pm.Weibull.dist(0.9, pt.exp(pm.Normal("a") + pm.Normal("b") * x))
            pm.Censored("y", base, lower=lower, upper=None, observed=y)

        with pm.Model() as model:
            declare()
        records = extract(model, check=False, privacy_unit=np.arange(N) // rows)
        engine = RowEngine.of(records, Coordinates(np.zeros(2), np.eye(2)))
        found.append(values(engine, ConsistentScore(engine.coordinates, clip_norm=0.3)))
    changed = 1 // rows
    assert same_bits(np.delete(found[0], changed, axis=0), np.delete(found[1], changed, axis=0))
    assert not same_bits(found[0][changed], found[1][changed])


@pytest.mark.slow
def test_signs_of_infinite_ends_concern_their_own_row_alone() -> None:
    """PyMC 6 leaves upper ends out of the density where all are infinite, minus infinity too."""
    y, x = _rng.normal(size=N), _rng.normal(size=N)
    found = []
    for first in (np.inf, -np.inf):
        upper = np.r_[first, np.full(N - 1, np.inf)]
        with pm.Model() as model:
            base = pm.Normal.dist(pm.Normal("a") + pm.Normal("b") * x, 1.0)
            pm.Censored("y", base, lower=None, upper=upper, observed=y)
        engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(2), np.eye(2)))
        found.append(values(engine, ConsistentScore(engine.coordinates, clip_norm=0.3)))
    assert same_bits(found[0][1:], found[1][1:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", marked(["uint8", "float64"], exhaustive=["float64"]))
def test_any_ends_of_counts_concern_their_own_row_alone(dtype: str) -> None:
    y, found = _rng.poisson(20.0, N).astype(dtype), []
    for end in (30.0, -np.inf, np.inf, -5.0, 0.0, 1e300, 4e9, 18.5):
        ends = [np.full(N, 15.0), np.full(N, 25.0)]
        ends[0][0], ends[1][1] = end, end
        with warnings.catch_warnings(), pm.Model() as model:
            warnings.simplefilter("error", RuntimeWarning)
            lower, upper = map(pm.Data, ("lower", "upper"), ends)
            count = pm.Poisson.dist(20.0 * pt.exp(pm.Normal("a") + 0.1 * X))
            pm.Censored("y", count, lower=lower, upper=upper, observed=y)
            engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(1), np.eye(1)))
            assert not law_unknown(engine)
            found.append(values(engine, ConsistentScore(engine.coordinates, clip_norm=CLIP)))
            missing = values(engine, LawNotFound(engine.coordinates))[2:]
        assert np.isfinite(found[-1]).all() and same_bits(found[-1][2:], found[0][2:])
        assert not missing.any()


@pytest.mark.parametrize("end", [lambda c: pt.exp(pt.log(c)), lambda c: c + 0.0 * c.sum()])
def test_ends_that_are_computed_are_unknown(end: Callable[[Any], Any]) -> None:
    ends = _rng.uniform(1.0, 4.0, N)

    def declare() -> None:
        base = pm.Gamma.dist(2.0, pt.exp(pm.Normal("a") * X))
        pm.Censored("y", base, lower=None, upper=end(pm.Data("c", ends)), observed=ends / 2.0)

    assert outcome_of(declare) is None


@pytest.mark.slow
def test_each_mode_of_a_mixture_has_nodes() -> None:
    """All rows have one law here, so that what a quadrature gets wrong adds up."""
    y = _rng.choice([-3.0, 0.5, 4.0], N) + _rng.normal(size=N)

    def three() -> None:
        pm.NormalMixture(
            "y",
            w=[0.3, 0.45, 0.25],
            mu=[-3.0, 0.5, 4.0],
            sigma=pm.Gamma("s", 9, 9, shape=3),
            observed=y,
        )

    mixture = outcome_of(three)
    one = outcome_of(inflated)
    assert mixture is not None and mixture.modes == 3
    assert one is not None and one.modes == 1
    with pm.Model() as model:
        three()
    engine = RowEngine.of(
        extract(model, check=False), Coordinates(np.log([0.8, 1.0, 0.7]), np.eye(3))
    )
    rows = RowsWithLaw(engine, slice(0, N), 0)
    mean, square = np.zeros(3), np.zeros(3)
    for weight, scores in zip(rows.law.weights, rows.of_outcomes(), strict=True):
        each = np.einsum("adi,ai->di", rows.directions, scores)[:, 0]
        mean += weight[0] * each
        square += weight[0] * each**2
    assert np.all(np.abs(mean) < 0.002 * np.sqrt(square))


@pytest.mark.parametrize(("dtype", "largest"), [("uint8", 255.0), ("int32", 2.0**31 - 1.0)])
def test_integers_end_where_their_type_does(dtype: str, largest: float) -> None:
    def declare() -> None:
        y = pm.Data("y", _rng.poisson(2.0, N).astype(dtype))
        pm.Poisson("k", pt.exp(pm.Normal("a") * X), observed=y)

    found = outcome_of(declare)
    assert found is not None and found.discrete and found.upper == largest


def test_densities_that_overflow_concern_their_own_row_alone() -> None:
    x = np.zeros(N)

    def engine(x: np.ndarray) -> RowEngine:
        def logp(y: Any, mu: Any, x: Any) -> Any:
            cauchy = -pt.log1p((y - mu) ** 2) - np.log(np.pi)
            return pt.switch(pt.and_(pt.eq(x, 0.0), y > 1e9), np.inf, cauchy)

        with pm.Model() as model:
            data = pm.Data("x", x)
            mu = pm.Normal("a") + pm.Normal("b") * data
            pm.CustomDist("y", mu, data, logp=logp, observed=np.ones(N))
        return RowEngine.of(
            extract(model, check=False), Coordinates(np.array([0.0, 1.0]), np.eye(2))
        )

    before = engine(x)
    x[1] = 3.0
    after = engine(x)
    for spec in every_kind(before.coordinates):
        others = [np.delete(values(world, spec), 1, axis=0) for world in (before, after)]
        assert same_bits(*others)
