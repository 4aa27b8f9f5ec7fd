"""Released sums have no noise where nothing but noise could be: which entries these are."""

from __future__ import annotations

import math

import numpy as np
import pymc as pm
import pytest

from pymc_dp.base.matrices import Coordinates
from pymc_dp.publication.noise_aware import noisy_posterior
from pymc_dp.records.extraction import extract
from pymc_dp.rows.contributions import Change, Curvature, OuterProduct, Score
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.bulk import clip_scaling
from pymc_dp.tuning.quadratic import _visible
from pymc_dp.tuning.releases import CurvatureNoise, ScoreNoise, Shares
from tests.models import EXAMPLES
from tests.records.test_records import quick, records_of
from tests.selection import marked, others

#: Designs that differ in how they are written, but not in what rows see.
WRITTEN = ["bernoulli_p", "binomial", "boolean_design", "data_with_dims", "matrix_with_one_column"]
WRITTEN += ["normal", "one_column_of_data", "pandas_inputs", "public_data", "public_likelihood"]
WRITTEN += ["scalar_times_column", "series_by_row", "small_unsigned_labels", "square_design"]
WRITTEN += ["sum_of_products", "switch_on_data"]
N, GROUPS = 400, 5


def centred(n: int = N) -> pm.Model:
    """Group means about a level with a scale: neither of these reaches a record."""
    rng = np.random.default_rng(0)
    group = np.arange(n) % GROUPS
    with pm.Model() as model:
        level, scale = pm.Normal("level"), pm.HalfNormal("scale")
        means, slope = pm.Normal("means", level, scale, shape=GROUPS), pm.Normal("slope")
        pm.Normal("y", means[group] + slope * rng.normal(size=n), 1.0, observed=rng.normal(size=n))
    return model


#: One of each kind runs always: groups, users, several outcomes, and laws of all sorts.
FIRST = ["custom_logp", "hurdle", "index_and_constant", "labels_computed_in_the_model"]
FIRST += ["matrix_observations", "multinomial", "nested_groups", "non_centred_groups", "persons"]
FIRST += ["poisson_groups", "random_slopes", "two_indices", "two_lengths", "two_observed"]
LATER = others(sorted(EXAMPLES), FIRST + WRITTEN)


@pytest.mark.parametrize("name", marked(sorted(EXAMPLES), slow=LATER, exhaustive=WRITTEN))
def test_what_no_row_sees_is_zero(name: str) -> None:
    """Scores and curvatures of the records of every model have no other entries than these."""
    engine, records = quick(name)[2], records_of(name)[1]
    d = engine.d
    location = records.initial + 0.1 * np.random.default_rng(1).standard_normal(d)
    at = Coordinates(location, np.eye(d))
    pairs = engine.touched(at)
    assert (pairs == pairs.T).all()
    scores = np.zeros(d, dtype=bool)
    for _, block in Score(at).blocks(engine):
        scores |= (block != 0.0).any(axis=1)
    assert not (scores & ~pairs.diagonal()).any()
    spec = Curvature(at, step=1e-6)
    curvatures = np.zeros((d, d), dtype=bool)
    for _, block in spec.blocks(engine):
        curvatures |= spec.matrix((block != 0.0).any(axis=1).astype(float)) != 0.0
    assert not (curvatures & ~pairs).any()


def test_the_pattern_of_a_hierarchy() -> None:
    records = extract(centred())
    d = len(records.initial)
    at = Coordinates(records.initial, np.eye(d))
    engine = RowEngine.of(records, at)
    places = dict(_places(records))
    expected = np.zeros((d, d), dtype=bool)
    means, slope = places["means"], places["slope"]
    expected[means, means] = True
    expected[np.ix_([*means, *slope], slope)] = True
    expected[np.ix_(slope, means)] = True
    np.testing.assert_array_equal(engine.touched(at), expected)
    # coordinates that mix everything hide it
    mixed = Coordinates(records.initial, np.random.default_rng(0).normal(size=(d, d)))
    assert engine.touched(mixed).all()


def _places(records) -> list[tuple[str, np.ndarray]]:
    at, found = 0, []
    for rv, size in (("level", 1), ("scale", 1), ("means", GROUPS), ("slope", 1)):
        found.append((rv, np.arange(at, at + size)))
        at += size
    assert at == len(records.initial)
    return found


class Loud:
    """Answers that are nothing but noise."""

    n_public, units_mu2 = N, 1.0

    def histogram(self, label, spec, share):
        raise AssertionError

    def vector_sum(self, label, spec, clip_norm, share):
        size = spec.size
        return np.random.default_rng(3).standard_normal(size), 1.0


def test_answers_are_quiet_where_nothing_is_to_be_heard() -> None:
    records = extract(centred())
    d = len(records.initial)
    at = Coordinates(records.initial, np.eye(d))
    engine = RowEngine.of(records, at)
    budget = Shares(Loud(), engine)
    pairs = engine.touched(at)
    score, noise = budget.score("score", Score(at), 1.0, 0.1)
    np.testing.assert_array_equal(score != 0.0, pairs.diagonal())
    np.testing.assert_array_equal(noise.reach, pairs.diagonal())
    full, _ = budget.curvature("curvature", Curvature(at), 1.0, 0.1)
    np.testing.assert_array_equal(full != 0.0, pairs)
    diagonal, _ = budget.curvature("diagonal", Curvature(at, diagonal=True), 1.0, 0.1)
    np.testing.assert_array_equal(diagonal != 0.0, np.diag(pairs.diagonal()))


def test_outer_products_of_users_meet_what_rows_do_not() -> None:
    """The rows of one user may lie in two groups: their scores multiply."""
    model = centred()
    records = extract(model, privacy_unit=np.arange(N) // 4)
    d = len(records.initial)
    at = Coordinates(records.initial, np.eye(d))
    engine = RowEngine.of(records, at)
    spec = OuterProduct(at)
    seen = np.zeros((d, d), dtype=bool)
    for _, block in spec.blocks(engine):
        seen |= spec.matrix((block != 0.0).any(axis=1).astype(float)) != 0.0
    outer, _ = Shares(Loud(), engine).curvature("outer", spec, 1.0, 0.1)
    assert (seen & ~engine.touched(at)).any()
    np.testing.assert_array_equal(outer != 0.0, seen)


def made_up(noise: CurvatureNoise, count: int) -> np.ndarray:
    d, rng = len(noise.variances), np.random.default_rng(7)
    raw = np.triu(rng.standard_normal((count, d, d)))
    return np.sqrt(noise.variances) * (raw + np.triu(raw, 1).transpose(0, 2, 1))


PATTERNS = {
    "full": np.ones((4, 4), dtype=bool),
    "diagonal": np.eye(4, dtype=bool),
    "hierarchy": np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]], dtype=bool),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_noise_of_a_curvature(name: str) -> None:
    """Its covariance with a vector and its size are those of 40,000 draws; entries within 8 sds."""
    noise = CurvatureNoise.of(0.3, PATTERNS[name])
    drawn = made_up(noise, 40_000)
    u = np.array([1.0, -2.0, 0.5, 3.0])
    products = drawn @ u
    found, expected = products.T @ products / len(drawn), noise.of_product(np.outer(u, u))
    sizes = np.sqrt(np.outer(expected.diagonal(), expected.diagonal()) + expected**2)
    assert (np.abs(found - expected) <= 8.0 * sizes / np.sqrt(len(drawn))).all()
    basis = np.random.default_rng(8).normal(size=(4, 3))
    for of in (None, basis):
        matrices = drawn[:4000] if of is None else of.T @ drawn[:4000] @ of
        norms = np.linalg.norm(matrices, 2, axis=(1, 2))
        assert np.quantile(norms, 0.8) < noise.norm(of) < 2.5 * np.quantile(norms, 0.99)


def test_noise_of_a_score() -> None:
    basis = np.random.default_rng(8).normal(size=(3, 3))
    noise = ScoreNoise(0.5, np.array([True, False, True]))
    rest = basis[[0, 2]]
    np.testing.assert_allclose(noise.covariance(basis), 0.25 * rest.T @ rest)


@pytest.mark.slow
def test_directions_hidden_by_noise_have_their_mean() -> None:
    """One of ten directions carries nothing; the others carry 1, as much as is heard of them."""
    truth = np.diag(np.r_[np.zeros(1), np.ones(9)])
    noise = CurvatureNoise.of(0.08, np.ones((10, 10), dtype=bool))
    assert noise.norm() > 0.35, "in all directions at once it would hide one of half the size"
    seen = np.eye(10)
    least = [
        np.linalg.eigvalsh(_visible(truth + x, noise, seen, seen)) for x in made_up(noise, 200)
    ]
    assert np.max([values[0] for values in least]) < 0.3, "one direction alone: its noise"
    assert np.mean([values[0] < 1e-9 for values in least]) > 0.7, "one sd in 16 %"
    assert np.min([values[1] for values in least]) > 0.5
    nothing = [_visible(draw, noise, seen, seen).any() for draw in made_up(noise, 200)]
    assert np.mean(nothing) < 0.3, "their mean is above one sd of its noise in 16 % of the cases"
    # too little to be told from noise in each direction, and well told on the whole
    few = [_visible(0.2 * seen + draw, noise, seen, seen) for draw in made_up(noise, 200)]
    means = np.array([np.trace(matrix) / 10.0 for matrix in few])
    sd = math.sqrt(noise.of_trace(seen)) / 10.0
    assert sd == pytest.approx(0.08 / math.sqrt(10.0))
    assert abs(means.mean() - 0.2) < 0.05 and means.std() < 2.0 * sd


def test_parameters_that_no_record_sees_have_no_curvature() -> None:
    """Hidden or not: the mean is taken over directions that records see."""
    noise = CurvatureNoise.of(0.08, np.ones((4, 4), dtype=bool))
    seen = np.eye(6)[:4]
    basis = np.eye(4, 6)
    released = np.diag([0.2, 0.2, 0.2, 0.2, 0.0, 0.0])
    kept = _visible(released, noise, basis, seen)
    np.testing.assert_allclose(kept, released, atol=1e-12)


def test_unseen_parameters_have_coordinates_of_their_own() -> None:
    rng = np.random.default_rng(2)
    raw = rng.normal(size=(6, 6))
    precision, unseen = raw @ raw.T + np.eye(6), np.array([1, 4])
    seen = np.array([0, 2, 3, 5])
    scaling = clip_scaling(precision, [np.array([2, 5])], N, unseen)
    assert not scaling[np.ix_(seen, unseen)].any() and not scaling[np.ix_(unseen, seen)].any()
    covariance = np.linalg.inv(precision)
    alone = clip_scaling(np.linalg.inv(covariance[np.ix_(seen, seen)]), [np.array([1, 3])], N)
    np.testing.assert_allclose(scaling[np.ix_(seen, seen)], alone)
    own = scaling[np.ix_(unseen, unseen)]
    np.testing.assert_allclose(own @ own.T, covariance[np.ix_(unseen, unseen)])


def test_the_noise_aware_posterior_of_one_parameter() -> None:
    """Of one normal parameter: likelihood N(G; h w, h + v), prior N(m, 1/p)."""
    g, v, h, p, m = 3.0, 2.0, 4.0, 0.5, 0.7
    precision = p + h**2 / (h + v)
    mean = (h * g / (h + v) + p * m) / precision
    one = np.ones((1, 1))
    found, width = noisy_posterior(np.array([g]), v * one, h * one, p * one, np.array([p * m]))
    np.testing.assert_allclose(found, [mean])
    np.testing.assert_allclose(width, [[1.0 / precision]])


def test_what_is_flat_here_may_be_seen_elsewhere() -> None:
    """A hinge at 0: its records have no score in `b` where b < 0, and one where b > 0."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=N), rng.normal(size=N)
    with pm.Model() as model:
        b, c = pm.Normal("b"), pm.Normal("c")
        pm.Normal("y", pm.math.maximum(b, 0.0) * x + c, 1.0, observed=y)
    records = extract(model)
    at = Coordinates(np.array([-0.3, 0.0]), np.eye(2))
    engine = RowEngine.of(records, at)
    assert engine.touched(at).all()
    change = Change(at, np.array([1.0, 0.1]))
    score, noise = Shares(Loud(), engine).score("change", change, 1.0, 0.1)
    assert score.all() and noise.reach.all()
