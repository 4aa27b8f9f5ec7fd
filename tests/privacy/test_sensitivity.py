"""Integer sums of neighbouring data sets: their exact distance, and what it does not depend on.

What is compared are the integers before noise.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pymc as pm
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pymc_dp.base import threads
from pymc_dp.base.matrices import Coordinates
from pymc_dp.errors import PrivacyError
from pymc_dp.privacy import answer as page
from pymc_dp.privacy.answer import (
    COARSEST,
    FINEST,
    Grid,
    IntervalSum,
    NormCounts,
    Query,
    VectorSum,
    clip_interval,
    clip_multiples,
    clip_vectors,
    vector_bound,
)
from pymc_dp.privacy.holder import Holder
from pymc_dp.records.extraction import extract
from pymc_dp.records.units import RecordStore
from pymc_dp.rows import contributions, groups, linear, loops
from pymc_dp.rows.contributions import (
    Change,
    ConsistentScore,
    Curvature,
    ExpectedCurvature,
    LawNotFound,
    LongestEntry,
    LongestScore,
    Loss,
    PathError,
    Score,
    law_unknown,
)
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from pymc_dp.rows.loops import SparseBlock
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from tests.privacy.toy import LinearRecords, make_queries

pytestmark = pytest.mark.compiled

RELATIONS = ("replace_one", "add_or_remove_one")
TAU = {"gradient": 0.7, "log_ratio": 1.3, "energy_error": 2.1}
CLIP = {"gradient": 1.5, "log_ratio": 0.8}
NASTY = [0.0, -0.0, 5e-324, -2e-308, 1e-160, 1e160, 1.7e308, math.inf, -math.inf, math.nan]
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


class Sums:
    """The integer sum of the last query."""

    def __init__(self, monkeypatch):
        plain = Holder.total

        def total(holder, query):
            found = plain(holder, query)
            self.last = [int(entry) for entry in found]
            return found

        monkeypatch.setattr(Holder, "total", total)

    def of(self, ask, *arguments):
        self.last = None
        ask(*arguments)
        return self.last


@pytest.fixture
def sums(monkeypatch):
    return Sums(monkeypatch)


def squared_distance(left, right):
    return sum((a - b) ** 2 for a, b in zip(left, right, strict=True))


def claimed(tau, log2_sigma):
    """The sensitivity that the charge of a release assumes: 2^m / tau, exactly."""
    return Fraction(2) ** log2_sigma / Fraction(tau)


def within(left, right, queries, mechanism):
    grid = queries.grids[mechanism]
    assert grid.noise_multiplier == queries.events[mechanism].noise_multiplier
    bound = claimed(grid.noise_multiplier, grid.log2_sigma)
    return squared_distance(left, right) <= bound**2


def attained(left, right, queries, mechanism, d):
    """Whether the distance is within 2 sqrt(d) + 2 units of the bound."""
    grid = queries.grids[mechanism]
    distance = math.sqrt(squared_distance(left, right))
    return distance >= float(claimed(grid.noise_multiplier, grid.log2_sigma)) - 2 * d**0.5 - 2


# -- the grid -------------------------------------------------------------------------------------


@FEW
@given(
    tau=st.floats(1e-9, 1e9),
    n=st.integers(1, 10**10),
)
def test_the_grid_is_the_finest_that_fits(tau, n):
    def fits(m):
        return n * 2.0**m / tau + 16 * 2.0**m < 2.0**62 and 2.0**m / tau <= 2.0**50

    if not fits(COARSEST):
        with pytest.raises(PrivacyError, match="does not fit"):
            Grid.finest(tau, n)
        return
    grid = Grid.finest(tau, n)
    assert fits(grid.log2_sigma)
    assert grid.log2_sigma == FINEST or not fits(grid.log2_sigma + 1)
    # the sum of n contributions and 16 sds of noise stay inside 64 bits
    assert n * math.ceil(grid.sensitivity) + 16 * 2**grid.log2_sigma < 2**63


def test_a_noise_too_large_for_the_grid_is_refused_before_anything_is_asked():
    engine = LinearRecords(np.ones((4, 3)))
    with pytest.raises(PrivacyError, match="cannot represent a record"):
        make_queries(engine, {"gradient": 2.0**36}, {"gradient": 1.0})
    assert engine.reads == 0


# -- sums of vectors ------------------------------------------------------------------------------

finite_rows = hnp.arrays(
    np.float64,
    st.tuples(st.integers(2, 6), st.integers(1, 5)),
    elements=st.one_of(
        st.floats(-3, 3), st.sampled_from(NASTY), st.floats(allow_nan=True, allow_infinity=True)
    ),
)


def in_grid_units(tau, n, d, clip, neighboring):
    """Norm that one record may have, norm to which it is clipped, and units per natural unit."""
    grid = Grid.finest(tau, n)
    relative = 2.0 if neighboring == "replace_one" else 1.0
    limit = claimed(tau, grid.log2_sigma) / Fraction(relative)
    bound = vector_bound(grid.norm_bound(neighboring), d)
    return limit, bound, 1.0 / grid.unit(relative * clip)


def clip_dense(vectors, units, bound, total, scale):
    clip_vectors(SparseBlock.full(vectors), units, bound, total, scale)


def places_of(rng, n, entries, size):
    """(entries, n) places of the entries of each column, distinct within it."""
    places = np.array([rng.permutation(size)[:entries] for _ in range(n)], dtype=np.int64).T
    return np.ascontiguousarray(places.reshape(entries, n))


@FEW
@given(
    rows=finite_rows,
    tau=st.floats(1e-9, 1e4),
    clip=st.floats(1e-8, 1e8),
    neighboring=st.sampled_from(RELATIONS),
    scale=st.sampled_from([1e-300, 1e-9, 1.0, 1e9, 1e300]),
)
def test_vectors_of_any_floats_stay_within_the_norm_bound(rows, tau, clip, neighboring, scale):
    """One column alone is at most half the sensitivity (replace_one), or all of it."""
    with np.errstate(over="ignore", under="ignore"):
        rows = rows * scale
    n, d = rows.shape
    limit, bound, inverse_unit = in_grid_units(tau, n, d, clip, neighboring)
    columns, total = [], np.zeros(d, np.int64)
    for row in rows:
        alone = np.zeros(d, np.int64)
        with np.errstate(over="ignore"):
            clip_dense(row[:, None].copy(), inverse_unit, bound, alone, np.empty(1))
        assert sum(int(entry) ** 2 for entry in alone) <= limit**2
        columns.append(alone)
    factors = np.empty(n)
    clip_dense(np.ascontiguousarray(rows.T), inverse_unit, bound, total, factors)
    np.testing.assert_array_equal(total, np.sum(columns, axis=0))  # no term sees another
    assert np.all((factors >= 0) & (factors <= 1))
    assert np.all(factors[~np.isfinite(rows).all(axis=1)] == 0)


def test_numbers_are_rounded_to_the_nearest_integer_and_halves_to_the_even_one():
    rng = np.random.default_rng(3)
    sizes = 2.0 ** rng.integers(-5, 50, 1000)
    values = np.concatenate([np.arange(-9, 9) / 2.0, sizes * rng.uniform(-1, 1, 1000), [2.0**50]])
    for value in [*values, *-values]:
        for kind in ("vectors", "multiples"):
            total, one = np.zeros(1, np.int64), np.ones(1)
            if kind == "vectors":
                clip_dense(np.array([[value]]), 1.0, 2.0**50, total, one)
            else:
                nothing = np.empty((0, 1))
                u = linear.Moves(np.arange(1), one[None], nothing.astype(int), nothing, one)
                clip_multiples(u, 0, np.array([value]), 1.0, 2.0**50, total, one.copy())
            assert total[0] == round(value), kind


def test_a_grid_on_which_records_cannot_be_rounded_is_refused():
    """Integers above 2^51 are not in the bits that are read."""
    assert vector_bound(2.0**50, 1) < 2.0**50
    with pytest.raises(PrivacyError, match="cannot represent a record"):
        VectorSum(Grid(36, 2.0**-15), "add_or_remove_one", 1, 1.0)


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_rounding_of_vectors_at_the_bound_stays_within_it(neighboring):
    """About half of all long vectors are rounded to longer ones."""
    rng = np.random.default_rng(1)
    for d in (1, 2, 5, 40):
        limit, bound, inverse_unit = in_grid_units(1.0, 1000, d, 1.0, neighboring)
        for direction in rng.normal(size=(100, d)):
            alone = np.zeros(d, np.int64)
            clip_dense(1e3 * direction[:, None], inverse_unit, bound, alone, np.empty(1))
            assert sum(int(entry) ** 2 for entry in alone) <= limit**2


@FEW
@given(
    rows=finite_rows,
    tau=st.floats(1e-9, 1e4),
    clip=st.floats(1e-8, 1e8),
    neighboring=st.sampled_from(RELATIONS),
    scale=st.sampled_from([1e-300, 1.0, 1e300]),
    held=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_vectors_without_their_zeros_stay_within_the_norm_bound(
    rows, tau, clip, neighboring, scale, held, seed
):
    with np.errstate(over="ignore", under="ignore"):
        rows = rows * scale
    n, w = rows.shape
    q, d = min(held, w), 2 * w + 3
    common = np.arange(d - q, d)
    rng = np.random.default_rng(seed)
    moving = places_of(rng, n, w - q, d - q)
    limit, bound, inverse_unit = in_grid_units(tau, n, d, clip, neighboring)
    total, expected = np.zeros(d, np.int64), np.zeros(d, np.int64)
    for i, row in enumerate(rows):
        alone, whole = np.zeros(d, np.int64), np.zeros(w, np.int64)
        column, places = row[:, None].copy(), np.ascontiguousarray(moving[:, i : i + 1])
        with np.errstate(over="ignore"):
            block = SparseBlock(column, common, places)
            clip_vectors(block, inverse_unit, bound, alone, np.empty(1))
            clip_dense(row[:, None].copy(), inverse_unit, bound, whole, np.empty(1))
        assert sum(int(entry) ** 2 for entry in alone) <= limit**2
        np.testing.assert_array_equal(alone[[*common, *moving[:, i]]], whole)
        assert np.count_nonzero(alone) == np.count_nonzero(whole)
        expected += alone
    columns = SparseBlock(np.ascontiguousarray(rows.T), common, moving)
    clip_vectors(columns, inverse_unit, bound, total, np.empty(n))
    np.testing.assert_array_equal(total, expected)


def multiples(rows, factors, held, moving, inverse_unit, bound, d, lengths=None, dtype="float64"):
    """Integers of each row alone, and what it was scaled by, from `clip_multiples`."""
    n, w = rows.shape
    columns = np.ascontiguousarray(rows.T)
    q = min(held, w)
    u, v = np.ascontiguousarray(columns[:q]), np.ascontiguousarray(columns[q:])
    if lengths is None:
        lengths = np.empty(n)
        loops.lengths(u, v, lengths)
    u, v = u.astype(dtype), v.astype(dtype)
    u_i = linear.Moves(np.arange(d - q, d), u, moving, v, lengths)
    found, scales = [], np.empty(n)
    for i in range(n):
        alone = np.zeros(d, np.int64)
        one, scale = factors[i : i + 1], scales[i : i + 1]
        clip_multiples(u_i, i, one, inverse_unit, bound, alone, scale)
        found.append(alone)
    together = np.zeros(d, np.int64)
    clip_multiples(u_i, 0, factors, inverse_unit, bound, together, np.empty(n))
    np.testing.assert_array_equal(together, np.sum(found, axis=0))
    return found, scales


@FEW
@given(
    rows=finite_rows,
    factor=st.one_of(st.floats(-3, 3), st.sampled_from([*NASTY, 1e-200, 1e200, 1e300])),
    tau=st.floats(1e-9, 1e4),
    clip=st.floats(1e-8, 1e8),
    neighboring=st.sampled_from(RELATIONS),
    scale=st.sampled_from([1e-300, 1e-160, 1.0, 1e150, 1e300]),
    held=st.integers(0, 5),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_multiples_of_any_vectors_stay_within_the_norm_bound(
    rows, factor, tau, clip, neighboring, scale, held, seed, dtype
):
    with np.errstate(over="ignore", under="ignore"):
        rows = (rows * scale).astype(dtype).astype("float64")
    n, w = rows.shape
    q, d = min(held, w), 2 * w + 3
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        factors = factor * rng.choice([1.0, -1.0, 1e-9, 1e9], n)
    moving = places_of(rng, n, w - q, d - q)
    limit, bound, inverse_unit = in_grid_units(tau, n, d, clip, neighboring)
    found, scales = multiples(rows, factors, held, moving, inverse_unit, bound, d, dtype=dtype)
    assert np.all((scales >= 0) & (scales <= 1))
    for i, (alone, s) in enumerate(zip(found, scales, strict=True)):
        assert sum(int(entry) ** 2 for entry in alone) <= limit**2
        finite = np.isfinite(rows[i]).all() and np.isfinite(factors[i])
        assert finite or (s == 0 and not alone.any())
        # what clip_vectors adds for the vector itself, to rounding
        with np.errstate(all="ignore"):
            vector = (rows[i] * factors[i])[:, None]
            length = np.sqrt((rows[i] ** 2).sum())
        if finite and 1e-100 < length < 1e100 and np.all(np.abs(vector) < 1e100):
            whole = np.zeros(w, np.int64)
            clip_dense(vector, inverse_unit, bound, whole, np.empty(1))
            at = np.concatenate([np.arange(d - q, d), moving[:, i]])
            slack = 1.0 + 2.0**-48 * np.abs(whole)
            assert np.all(np.abs(alone[at] - whole) <= slack)


def test_lengths_that_are_too_short_are_caught():
    """The planted fault: without it a vector of any length would be added as it is."""
    rows, moving = np.ones((1, 3)), np.empty((0, 1), dtype=np.int64)
    how = (rows, np.array([5.0]), 3, moving, 1e6, 1e6, 3)
    [right], _ = multiples(*how)
    [wrong], _ = multiples(*how, lengths=np.array([0.1]))
    assert sum(int(entry) ** 2 for entry in right) <= 1e12 < sum(int(e) ** 2 for e in wrong)


@FEW
@given(rows=finite_rows, scale=st.sampled_from([1e-320, 1e-170, 1e-160, 1.0, 1e150]))
def test_lengths_are_never_less_than_norms(rows, scale):
    with np.errstate(over="ignore", under="ignore"):
        rows = rows * scale
    held = np.ascontiguousarray(rows.T)
    lengths = np.empty(len(rows))
    loops.lengths(held[:1], held[1:], lengths)
    for row, length in zip(rows, lengths, strict=True):
        if not np.isfinite(row).all():
            assert not length < math.inf
        elif length < math.inf:
            assert Fraction(length) ** 2 >= sum(Fraction(x) ** 2 for x in row)


@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("d", [1, 2, 7, 40])
@pytest.mark.parametrize("tau", [0.03, 1.0, 41.7])
def test_opposite_vectors_at_the_bound_attain_the_sensitivity(sums, neighboring, d, tau):
    rng = np.random.default_rng(d)
    direction = rng.standard_normal(d)
    direction *= CLIP["gradient"] / np.linalg.norm(direction)
    others = rng.standard_normal((20, d))
    answers = []
    for record in ([direction], [-direction] if neighboring == "replace_one" else []):
        engine = LinearRecords(np.concatenate([others, np.reshape(record, (-1, d))]))
        queries = make_queries(
            engine, {"gradient": tau}, CLIP, neighboring=neighboring, n_public=21
        )
        queries.begin_iteration()
        answers.append(sums.of(queries.gradient, np.zeros(d)))
    assert within(*answers, queries, "gradient")
    assert attained(*answers, queries, "gradient", d)


# -- sums of scalars ------------------------------------------------------------------------------

ends = st.one_of(st.floats(0, 1e3), st.sampled_from([0.0, 5e-324, 1e-300, 1e-30, 1e200]))
values = st.lists(
    st.one_of(st.floats(-10, 10), st.sampled_from(NASTY)), min_size=1, max_size=8
).map(np.array)


def interval(queries, mechanism, values, lower, upper):
    """The integer sum of values; None where records do not decide the answer."""
    sum_ = IntervalSum(queries.grids[mechanism], queries.neighboring, lower, upper)
    if sum_.told is not None:
        return None
    total = np.zeros(1, np.int64)
    sum_.add(SparseBlock.full(values[None]), total)
    return [int(total[0])]


@FEW
@given(
    values=values,
    change=st.one_of(st.floats(-1e4, 1e4), st.sampled_from(NASTY)),
    lower=ends,
    upper=ends,
    tau=st.floats(1e-11, 1e6),
    neighboring=st.sampled_from(RELATIONS),
)
def test_interval_sums_of_neighbours_and_of_reversed_paths(
    values, change, lower, upper, tau, neighboring
):
    engine = LinearRecords(np.zeros((len(values), 1)))
    queries = make_queries(engine, {"log_ratio": tau}, CLIP, neighboring=neighboring)

    def ask(numbers, low=-lower, high=upper):
        return interval(queries, "log_ratio", numbers, low, high)

    here = ask(values)
    changed = np.append(values[:-1], change)
    other = ask(changed if neighboring == "replace_one" else values[:-1])
    back = ask(-values, -upper, lower)
    if here is None:  # nothing was asked: no interval, or none that a float can describe
        assert other is None and back is None
        return
    assert within(here, other, queries, "log_ratio")
    assert back == [-here[0]]


@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("tau", [0.01, 1.0, 1e3])
@pytest.mark.parametrize(("lower", "upper"), [(-1.0, 1.0), (-0.3, 2.7), (-1e-9, 0.0), (0.0, 1e7)])
def test_opposite_values_attain_the_sensitivity(neighboring, tau, lower, upper):
    engine = LinearRecords(np.zeros((9, 1)))
    queries = make_queries(engine, {"energy_error": tau}, {}, neighboring=neighboring)
    values = np.random.default_rng(1).normal(0, upper - lower, 9)
    larger = -math.inf if -lower > upper else math.inf
    worlds = [np.append(values, larger)]
    worlds.append(np.append(values, -larger) if neighboring == "replace_one" else values)
    answers = [interval(queries, "energy_error", w, lower, upper) for w in worlds]
    assert within(*answers, queries, "energy_error")
    assert attained(*answers, queries, "energy_error", 1)


def test_what_is_not_a_number_adds_nothing_and_infinities_add_the_ends():
    values = np.array([math.nan, math.inf, -math.inf, 1e300, -1e300, 5e-324])
    assert clip_interval(values[:1], 1.0, np.int64(-3), np.int64(7)) == 0
    assert clip_interval(values, 1.0, np.int64(-3), np.int64(7)) == 2 * (7 - 3)


def test_the_noise_says_its_standard_deviation(sums):
    """The claim 2^m units = noise_multiplier x sensitivity, for the sd that kernels are told."""
    queries = make_queries(LinearRecords(np.ones((5, 2))), TAU, CLIP)
    queries.begin_iteration()
    _, sd = queries.log_ratio(np.zeros(2), np.ones(2))
    c = CLIP["log_ratio"] * 2**0.5
    assert sd == pytest.approx(TAU["log_ratio"] * 2 * c, rel=1e-14)
    assert queries.gradient_noise_sd == pytest.approx(TAU["gradient"] * 2 * CLIP["gradient"])


def test_a_sum_beyond_64_bits_wraps_with_its_noise(monkeypatch):
    """A private n may be far above n_public.  Sum and noise wrap together, modulo 2^64."""
    n = 10**4
    engine = LinearRecords(np.ones((n, 1)))
    queries = make_queries(
        engine, {"log_ratio": 1e-6}, CLIP, neighboring="add_or_remove_one", n_public=2
    )
    unit = queries.grids["log_ratio"].unit(CLIP["log_ratio"])
    total = n * math.floor(CLIP["log_ratio"] / unit * page._SLACK)
    assert total > 2**63
    for noise in (0, 2**63 - 1, -(2**63)):
        monkeypatch.setattr(page, "rounded_normal", lambda size, m, x=noise: np.array([x]))
        queries.begin_iteration()
        value, _ = queries.log_ratio(np.zeros(1), np.ones(1))
        assert value == pytest.approx(((total + noise + 2**63) % 2**64 - 2**63) * unit)


# -- real models ----------------------------------------------------------------------------------

N = 41


def _logistic(rng):
    b = pm.Normal("b", 0, 1, shape=2)
    pm.Bernoulli("y", logit_p=rng.normal(size=(N, 2)) @ b, observed=rng.integers(0, 2, N))


def _poisson_groups(rng):
    b = pm.Normal("b", 0, 1)
    groups = pm.Normal("groups", 0, 1, shape=3)
    rate = groups[rng.integers(0, 3, N)] + rng.normal(size=N) * b
    pm.Poisson("y", mu=pm.math.exp(rate), observed=rng.poisson(2, N))


def _two_observed(rng):
    slope = pm.Normal("slope", 0, 1)
    scale = pm.HalfNormal("scale", 1)
    x = rng.normal(size=N)
    pm.StudentT("t", nu=4, mu=slope * x, sigma=scale, observed=x + rng.normal(size=N))
    pm.Gamma("g", alpha=2, beta=pm.math.exp(slope) / scale, observed=rng.gamma(2, 1, N))


def _survival(rng):
    b = pm.Normal("b", 0, 1, shape=2)
    base = pm.Weibull.dist(pm.math.exp(b[0]), pm.math.exp(b[1] * rng.normal(size=N)))
    ends = rng.uniform(0.5, 3.0, N)
    pm.Censored("y", base, lower=None, upper=ends, observed=np.minimum(rng.gamma(2, 1, N), ends))


class RealModel:
    """The compiled functions of a model, for any data of its layout."""

    def __init__(self, build, people):
        rng = np.random.default_rng(7)
        with pm.Model() as model:
            build(rng)
        self.units = rng.integers(0, 13, N) if people else None
        if people:
            self.units[:13] = np.arange(13)
        records = extract(model, privacy_unit=self.units)
        d = records.parameters.size
        self.coordinates = Coordinates(np.zeros(d), np.eye(d) + 0.3)
        self.base = RowEngine.of(records, self.coordinates)
        [group] = self.base.groups
        self.functions, self.arrays = group.functions, group.store.read()
        self.d = d

    def rows(self, rng, size):
        """Records as wild as the types of the columns allow."""
        found = []
        for array in self.arrays:
            shape = (size, *array.shape[1:])
            if array.dtype.kind == "f":
                wild = rng.choice([5e-324, -1e-300, 1e-30, 1e8, -1e200, 1.7e308], shape)
                found.append(np.where(rng.random(shape) < 0.5, wild, rng.normal(size=shape) * 9))
            else:  # labels must stay labels
                top = array.max() + (0 if array.max() < 3 else 10**6)
                found.append(rng.integers(0, top + 1, shape).astype(array.dtype))
        return found

    def engine(self, arrays, units=None):
        n_units = len(arrays[0])
        if units is not None:  # numbered as records are: a unit without rows is none
            people, units = np.unique(units, return_inverse=True)
            n_units = len(people)
        group = RowGroup(self.functions, RecordStore(arrays), units)
        return RowEngine([group], self.base.parameters, n_units, self.coordinates)

    def queries(self, arrays, neighboring, units=None, n_public=N):
        engine = self.engine(arrays, units)
        return make_queries(engine, TAU, CLIP, neighboring=neighboring, n_public=n_public)


def transcript(sums, queries, seed):
    """Integer sums of all kinds of queries, at points near and far."""
    rng = np.random.default_rng(seed)
    found = []
    for spread in (0.3, 30.0):
        queries.begin_iteration()
        z = [rng.normal(0, spread, queries.holder.engine.d) for _ in range(3)]
        found.append(("gradient", sums.of(queries.gradient, z[0])))
        found.append(("log_ratio", sums.of(queries.log_ratio, z[0], z[1])))
        path = queries.path(z[0])
        found.append(("gradient", sums.of(path.gradient, z[0], z[2])))
        found.append(("energy_error", sums.of(path.energy_error, z[1], -0.4, 1.1)))
    return found


@pytest.fixture(
    scope="module",
    params=[
        (_logistic, False),
        (_poisson_groups, False),
        pytest.param((_survival, False), marks=pytest.mark.slow),
        pytest.param((_two_observed, False), marks=pytest.mark.exhaustive),
        (_logistic, True),
    ],
    ids=["logistic", "poisson_groups", "survival", "two_observed", "people"],
)
def model(request):
    return RealModel(*request.param)


def neighbours(model, neighboring, seed):
    """Wild records, those of a neighbouring data set, and the units of its rows."""
    rng = np.random.default_rng(seed)
    wild = model.rows(rng, N)
    mix = rng.random(N) < 0.2
    arrays = [np.where(_like(mix, a), w, a) for a, w in zip(model.arrays, wild, strict=True)]
    units = model.units
    if units is None:
        chosen = np.arange(N) == rng.integers(N)
    else:
        chosen = units == rng.integers(13)
    other = model.rows(rng, N)
    if neighboring == "replace_one":
        changed = [np.where(_like(chosen, a), o, a) for a, o in zip(arrays, other, strict=True)]
        others_units = units
    else:
        changed = [a[~chosen] for a in arrays]
        others_units = None if units is None else units[~chosen]
    return arrays, changed, others_units


def one_off_releases(engine, neighboring, seed):
    """Sums of all kinds of one-off releases, and their integers before noise."""
    rng = np.random.default_rng(seed)
    at, d = engine.coordinates, engine.d
    points, midpoints = rng.normal(size=(3, d)), rng.normal(size=(2, d))
    specs = [
        Score(at),
        Score(at, np.array([d - 1])),
        LongestEntry(at),
        Change(at, rng.normal(0, 30, d)),
        Curvature(at),
        PathError(at, points, midpoints, 0.4),
    ]
    if isinstance(engine, PredictorEngine):
        specs.append(LongestScore(at))
    if not law_unknown(engine):
        specs += [
            ConsistentScore(at, clip_norm=0.27),
            ExpectedCurvature(at),
            Loss(at, 0.27),
            LawNotFound(at),
        ]
    grid, holder = Grid.finest(0.9, N), Holder(engine)
    return [
        (sum_, [int(entry) for entry in holder.total(Query("a", spec, sum_))])
        for spec in specs
        for sum_ in (
            NormCounts(grid, neighboring),
            VectorSum(grid, neighboring, spec.size, 0.3),
        )
    ]


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_one_off_releases_of_neighbouring_data_of_real_models(model, neighboring):
    for seed in range(2):
        arrays, changed, others_units = neighbours(model, neighboring, seed)
        worlds = [model.engine(arrays, model.units), model.engine(changed, others_units)]
        for (mechanism, left), (_, right) in zip(
            *(one_off_releases(world, neighboring, seed) for world in worlds), strict=True
        ):
            grid = mechanism.grid
            bound = claimed(grid.noise_multiplier, grid.log2_sigma)
            assert squared_distance(left, right) <= bound**2, mechanism


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_neighbouring_data_of_real_models(sums, model, neighboring):
    for seed in range(12):
        arrays, changed, others_units = neighbours(model, neighboring, seed)
        here = model.queries(arrays, neighboring, model.units)
        there = model.queries(changed, neighboring, others_units)
        with np.errstate(all="ignore"):
            pairs = zip(transcript(sums, here, seed), transcript(sums, there, seed), strict=True)
        for (mechanism, left), (_, right) in pairs:
            assert within(left, right, here, mechanism), mechanism


def _like(mask, array):
    return mask.reshape(-1, *[1] * (array.ndim - 1))


def test_order_and_blocking_do_not_matter(sums, model, monkeypatch):
    rng = np.random.default_rng(3)
    wild = model.rows(rng, N)
    mix = rng.random(N) < 0.2
    arrays = [np.where(_like(mix, a), w, a) for a, w in zip(model.arrays, wild, strict=True)]
    with np.errstate(all="ignore"):
        expected = transcript(sums, model.queries(arrays, "replace_one", model.units), 3)
        totals = one_off_releases(model.engine(arrays, model.units), "replace_one", 3)
        for block in (8192, 1, 7):
            monkeypatch.setattr(groups, "BLOCK", block)
            monkeypatch.setattr(contributions, "BLOCK", block)
            monkeypatch.setattr(threads, "_WORTH", block)
            monkeypatch.setattr(threads, "count", lambda most=block: most)
            order = rng.permutation(N)
            units = model.units
            if units is not None:  # the rows of one person stay in order: reals are added there
                order = np.argsort(rng.permutation(13)[units], kind="stable")
                units = units[order]
            permuted = [a[order] for a in arrays]
            queries = model.queries(permuted, "replace_one", units)
            assert transcript(sums, queries, 3) == expected
            found = one_off_releases(model.engine(permuted, units), "replace_one", 3)
            assert [integers for _, integers in found] == [integers for _, integers in totals]


@pytest.fixture(params=["kept_designs", "one_predictor"])
def fast_model(request, monkeypatch):
    """Models whose rows keep how they move with z, here for any scaling of it."""
    monkeypatch.setattr(loops, "_WORTH", 0)
    monkeypatch.setattr(loops, "_SHORTEST", 3)
    monkeypatch.setattr(loops, "_PACKED", 1)
    model = RealModel(_poisson_groups, False)
    if request.param == "one_predictor":
        predictor, _ = recognise(model.base)
        plain = model.engine

        def fast(arrays, units=None):
            return PredictorEngine(plain(arrays, units), predictor)

        model.engine = fast
    queries = model.queries

    def tilted(*arguments):
        found = queries(*arguments)
        found.holder = Holder(found.holder.engine.tilted())
        return found

    model.queries = tilted
    return model


@pytest.mark.slow
@pytest.mark.parametrize("neighboring", RELATIONS)
def test_neighbouring_data_where_moves_are_kept(sums, fast_model, neighboring):
    for seed in range(6):
        arrays, changed, _ = neighbours(fast_model, neighboring, seed)
        with np.errstate(all="ignore"):
            here, there = (fast_model.queries(a, neighboring) for a in (arrays, changed))
            pairs = zip(transcript(sums, here, seed), transcript(sums, there, seed), strict=True)
            for (mechanism, left), (_, right) in pairs:
                assert within(left, right, here, mechanism), mechanism
            worlds = [fast_model.engine(a) for a in (arrays, changed)]
            releases = (one_off_releases(world, neighboring, seed) for world in worlds)
            for (mechanism, left), (_, right) in zip(*releases, strict=True):
                grid = mechanism.grid
                bound = claimed(grid.noise_multiplier, grid.log2_sigma)
                assert squared_distance(left, right) <= bound**2, mechanism


@pytest.mark.slow
def test_order_and_blocking_do_not_matter_where_moves_are_kept(sums, fast_model, monkeypatch):
    test_order_and_blocking_do_not_matter(sums, fast_model, monkeypatch)
