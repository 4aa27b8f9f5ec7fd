"""Rows with one linear predictor: recognised families, and their fast engine."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_dp as dp
from pymc_dp.base.matrices import Coordinates
from pymc_dp.records.extraction import extract
from pymc_dp.rows import contributions, groups, linear
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.loops import row_blocks
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import Predictor, recognise
from tests.models import EXAMPLES, Data
from tests.records.test_records import (
    FURTHER,
    QUICK,
    compiled,
    evaluate,
    quick,
    same_bits,
    with_data,
)
from tests.rows.test_contributions import every_kind, long_arrays, values
from tests.selection import marked, others

#: Examples of tests/models.py that have one linear predictor per row, and a concave family.
RECOGNISED = {
    **dict.fromkeys(["logistic", "bernoulli_p", "binomial", "public_likelihood"], "logit"),
    "poisson_groups": "log",
    **dict.fromkeys(
        [
            "boolean_design",
            "custom_logp",
            "index_and_constant",
            "integer_design",
            "labels_computed_in_the_model",
            "nested_groups",
            "one_column",
            "pandas_inputs",
            "public_data",
            "public_data_by_row_and_by_mean",
            "random_slopes",
            "random_walk_prior",
            "scalar_times_column",
            "single_precision_design",
            "small_unsigned_labels",
            "spline",
            "square_design",
            "sum_of_products",
            "two_indices",
            "vector_times_transpose",
        ],
        "normal",
    ),
}


def coefficients() -> pt.TensorVariable:
    return pm.Normal("beta", 0.0, 1.0, shape=3)


def probit(d: Data) -> None:
    pm.Bernoulli("y", p=pm.math.invprobit(d.X @ coefficients() + 0.3 * d.x), observed=d.binary)


def exposed(d: Data) -> None:
    pm.Poisson("y", mu=(1.0 + d.half) * pt.exp(d.X @ coefficients()), observed=d.count)


def exponential_rate(d: Data) -> None:
    pm.Exponential("y", lam=pt.exp(d.X @ coefficients()), observed=d.positive)


def exponential_scale(d: Data) -> None:
    pm.Exponential("y", scale=pt.exp(d.X @ coefficients()), observed=d.positive)


def gamma_rate(d: Data) -> None:
    pm.Gamma("y", alpha=2.5, beta=pt.exp(-d.X @ coefficients()), observed=d.positive)


def known_scales(d: Data) -> None:
    slopes = pm.Normal("slopes", 0.0, 1.0, shape=(4, 3))
    mu = (slopes[d.group] * d.X).sum(axis=1) - d.X @ coefficients() / 2.0
    pm.Normal("y", mu, 0.5 + np.abs(d.x), observed=d.real)


def grouped_binomial(d: Data) -> None:
    alpha = pm.Normal("alpha", 0.0, 1.0, shape=4)
    logit_p = 1.5 - (alpha[d.group] + d.X @ coefficients())
    pm.Binomial("y", n=d.count + 3, logit_p=logit_p, observed=d.count)


def natural_normal(d: Data) -> None:
    """In natural form: the slope of a row is not 0 where its predictor is."""
    pm.CustomDist("y", d.X @ coefficients(), logp=lambda y, v: y * v - v**2 / 2.0, observed=d.real)


def weighted_squares(d: Data) -> None:
    weights = pt.as_tensor(0.5 + np.abs(d.x))
    pm.CustomDist(
        "y",
        d.X @ coefficients(),
        logp=lambda y, v: -weights * (v * v - 2.0 * y * v + y * y),
        observed=d.real,
    )


FAMILY_MODELS: dict[Callable[[Data], None], str] = {
    probit: "probit",
    exposed: "log",
    exponential_rate: "log",
    exponential_scale: "log",
    gamma_rate: "log",
    known_scales: "normal",
    natural_normal: "normal",
    weighted_squares: "normal",
    grouped_binomial: "logit",
}


def student(d: Data) -> None:
    pm.StudentT("y", nu=4.0, mu=d.X @ coefficients(), sigma=1.0, observed=d.real)


def cloglog(d: Data) -> None:
    pm.Bernoulli("y", p=1.0 - pt.exp(-pt.exp(d.X @ coefficients())), observed=d.binary)


def link_by_record(d: Data) -> None:
    """Another likelihood for some records, which made-up rows must not miss."""
    eta = d.X @ coefficients()
    pm.Bernoulli(
        "y",
        p=pt.switch(d.x > 1.9, 0.5 + pt.arctan(eta) / np.pi, pm.math.sigmoid(eta)),
        observed=d.binary,
    )


def quadratic(d: Data) -> None:
    pm.Normal("y", (d.X @ coefficients()) ** 2, 1.0, observed=d.real)


REFUSED = [student, cloglog, link_by_record, quadratic]


def many_groups(d: Data) -> None:
    effects = pm.Normal("a", shape=40)
    group = np.arange(len(d.binary)) % 40
    pm.Bernoulli("y", logit_p=d.X @ coefficients() + effects[group], observed=d.binary)


def coefficients_alone(d: Data) -> None:
    pm.Bernoulli("y", logit_p=d.X @ coefficients(), observed=d.binary)


def engine_of(declare: Callable[[Data], None], **kwargs: object) -> RowEngine:
    with pm.Model() as model:
        declare(Data())
    records = extract(model)
    rng, d = np.random.default_rng(1), records.parameters.size
    at = Coordinates(
        records.initial + 0.1 * rng.standard_normal(d),
        np.eye(d) + 0.1 * rng.standard_normal((d, d)),
    )
    return RowEngine.of(records, at, kwargs or None)


@cache
def family_engine(declare: Callable[[Data], None]) -> tuple[RowEngine, Predictor]:
    engine = engine_of(declare, **QUICK)
    predictor, reason = recognise(engine, QUICK)
    assert predictor is not None, reason
    return engine, predictor


def found_in(engine: RowEngine) -> Predictor:
    predictor, reason = recognise(engine)
    assert predictor is not None, reason
    return predictor


# -- what is recognised ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked(sorted(EXAMPLES), exhaustive=FURTHER))
def test_examples_are_recognised_or_told_why_not(name: str) -> None:
    engine = with_data(quick(name)[2], lambda a: a)
    predictor, reason = recognise(engine, QUICK)
    assert (predictor and predictor.family) == RECOGNISED.get(name)
    assert reason.endswith(".") and reason.count(".") == 1
    # no record was looked at
    assert engine.reads == 0


@pytest.mark.parametrize("declare", REFUSED, ids=lambda f: f.__name__)
def test_look_alikes_are_refused(declare: Callable[[Data], None]) -> None:
    predictor, reason = recognise(engine_of(declare, **QUICK), QUICK)
    assert predictor is None, reason


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("declare", FAMILY_MODELS, ids=lambda f: f.__name__)
def test_values_and_scores_are_those_of_the_model(declare: Callable[[Data], None]) -> None:
    engine, predictor = family_engine(declare)
    assert predictor.family == FAMILY_MODELS[declare]
    fast = PredictorEngine(engine, predictor)
    rng = np.random.default_rng(2)
    origin = evaluate(engine, np.zeros(engine.d))[0], fast.log_likelihood(np.zeros(engine.d))
    # PyMC loses digits in log(1 - p) of a probit far out
    reach = 0.3 if predictor.family == "probit" else 1.0
    for z in reach * rng.standard_normal((4, engine.d)):
        expected, found = evaluate(engine, z), evaluate(fast, z)
        size = 1.0 + np.abs(expected[0]) + np.abs(origin[0])
        assert np.max(np.abs(found[0] - origin[1] - (expected[0] - origin[0])) / size) < 1e-12
        size = 1.0 + np.linalg.norm(expected[1], axis=1, keepdims=True)
        assert np.max(np.abs(found[1] - expected[1]) / size) < 1e-12


@pytest.mark.parametrize("t", [-60.0, -37.0, -5.0, -4.9999, -1.0, 0.0, 3.0, 9.0])
def test_probit_tails(t: float) -> None:
    mpmath = pytest.importorskip("mpmath")

    with mpmath.workdps(60):
        value = mpmath.log(mpmath.erfc(-mpmath.mpf(t) / mpmath.sqrt(2)) / 2)
        slope = mpmath.npdf(t) / (mpmath.erfc(-mpmath.mpf(t) / mpmath.sqrt(2)) / 2)
    one = np.ones(1)
    for compute, expected in ((linear.evaluate, value), (linear.differentiate, slope)):
        v = np.array([t])
        compute(3, one, one, v)
        np.testing.assert_allclose(v[0], float(expected), rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("family", ["logit", "probit", "log"])
def test_longest_scores_are_those_of_the_worst_outcome(family: str) -> None:

    rng = np.random.default_rng(5)
    v = rng.normal(0.0, 4.0, 300)
    code = ["logit", "log", "normal", "probit"].index(family)
    trials = rng.integers(1, 6, 300).astype(float) if family == "logit" else np.ones(300)
    a = np.ones(300)
    found = v.copy()
    linear.steepest(code, a, trials, found)
    if family == "logit":
        outcomes = [np.zeros(300), trials]
    else:
        outcomes = [-a, a] if family == "probit" else [0.0 * a, np.where(v < 0.0, a, 0.0)]
    worst = np.zeros(300)
    for outcome in outcomes:
        slopes = v.copy()
        linear.differentiate(code, outcome, trials, slopes)
        worst = np.maximum(worst, np.abs(slopes))
    np.testing.assert_allclose(found, worst, rtol=1e-12)
    normal = v.copy()
    linear.steepest(2, a, trials, normal)
    assert not normal.any()


@pytest.mark.slow
def test_impossible_records_contribute_nothing() -> None:
    engine = compiled("poisson_groups")

    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        if array.dtype.kind in "iu" and array.max() > 3:  # the counts, not the labels
            array[[3, 8]] = -1
        return array

    changed = with_data(engine, change)
    fast = PredictorEngine(changed, found_in(engine))
    values_, vectors = evaluate(fast, np.full(engine.d, 0.7))
    assert not vectors[[3, 8]].any() and np.count_nonzero(~vectors.any(axis=1)) == 2
    assert values_[3] == fast.log_likelihood(np.zeros(engine.d))[3]


# -- one record concerns no other -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "declare",
    marked([probit, known_scales, grouped_binomial], exhaustive=[known_scales, grouped_binomial]),
    ids=lambda f: f.__name__,
)
def test_bits_do_not_depend_on_place_or_block(
    declare: Callable[[Data], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(declare)
    predictor = found_in(engine)
    z = np.random.default_rng(5).standard_normal(engine.d)
    order = np.random.default_rng(3).permutation(engine.n_units)
    fast = PredictorEngine(engine, predictor)
    whole, kinds = evaluate(fast, z), every_kind(engine.coordinates)
    added = [values(fast, spec) for spec in kinds]
    for size in (7, 16, 8192):
        monkeypatch.setattr(groups, "BLOCK", size)
        monkeypatch.setattr(contributions, "BLOCK", size)
        moved = PredictorEngine(with_data(engine, lambda a: a[order]), predictor)
        found = evaluate(moved, z)
        for k in range(2):
            assert same_bits(found[k], whole[k][order])
        for spec, expected in zip(kinds, added, strict=True):
            assert same_bits(values(moved, spec), expected[order])


def test_a_changed_record_leaves_the_bits_of_all_others() -> None:
    engine = compiled("logistic")
    predictor = found_in(engine)
    z = np.random.default_rng(6).standard_normal(engine.d)
    for bad in (None, np.nan, np.inf, 1e308):

        def change(array: np.ndarray, bad: float | None = bad) -> np.ndarray:
            array = array.copy()
            array[11] = array[42] if bad is None or array.dtype.kind != "f" else bad
            return array

        before = evaluate(PredictorEngine(engine, predictor), z)
        after = evaluate(PredictorEngine(with_data(engine, change), predictor), z)
        others = np.arange(engine.n_units) != 11
        for k in range(2):
            assert same_bits(before[k][others], after[k][others])
            assert not same_bits(before[k], after[k])


# -- with the other parts -------------------------------------------------------------------------


def test_tilted_and_released() -> None:
    engine, predictor = family_engine(known_scales)
    fast = PredictorEngine(engine, predictor)
    tilted = fast.tilted()
    z = np.random.default_rng(7).standard_normal(engine.d)
    at_zero, there = evaluate(fast, np.zeros(engine.d)), evaluate(fast, z)
    found = evaluate(tilted, z)
    np.testing.assert_allclose(found[0], there[0] - at_zero[1] @ z, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found[1], there[1] - at_zero[1], rtol=1e-12, atol=1e-12)
    assert not evaluate(tilted, np.zeros(engine.d))[1].any()
    score, _, change, *_ = every_kind(engine.coordinates)
    assert same_bits(values(fast, score), at_zero[1])
    assert isinstance(change, contributions.Change)
    expected = evaluate(tilted, change.z)[1]
    np.testing.assert_allclose(values(fast, change), expected, rtol=1e-12, atol=1e-12)


def test_new_coordinates_share_what_does_not_depend_on_them() -> None:
    engine, predictor = family_engine(grouped_binomial)
    fast = PredictorEngine(engine, predictor)
    z = np.random.default_rng(8).standard_normal(engine.d)
    fast.log_likelihood(z)
    reads = engine.reads
    at = Coordinates(engine.coordinates.location + 0.1, 2.0 * np.eye(engine.d))
    moved = fast.with_coordinates(at)
    vectors = evaluate(moved, z)[1]
    fresh = PredictorEngine(engine.with_coordinates(at), predictor)
    assert same_bits(vectors, evaluate(fresh, z)[1])
    # what does not depend on coordinates was not made again
    assert moved._rows() is fast._rows()
    assert reads <= engine.reads <= reads + 1
    assert fast.with_coordinates(fast.coordinates) is fast


def test_other_engines_in_known_coordinates_are_others() -> None:
    """What was made for these coordinates is not given to made-up, partial or tilted records."""
    engine, predictor = family_engine(known_scales)
    fast = PredictorEngine(engine, predictor)
    at = Coordinates(np.zeros(engine.d), 2.0 * np.eye(engine.d))
    assert fast.with_coordinates(at) is fast.with_coordinates(at)
    assert fast.part(slice(0, 5)).with_coordinates(at).n_units == 5
    assert fast.tilted().with_coordinates(at).is_tilted
    with np.errstate(all="ignore"):  # a made-up scale is 0
        evaluate(fast.synthetic().with_coordinates(at), np.zeros(engine.d))
    assert fast.with_coordinates(at)._rows() is fast._rows()
    assert fast.tilted()._rows() is fast._rows()
    assert fast.part(slice(0, 5)).groups[0].kept is None


def test_nothing_is_read_early_or_pickled() -> None:
    engine = with_data(compiled("logistic"), lambda a: a)
    stored = long_arrays(engine, engine.n_units)
    predictor = found_in(engine)
    fast = PredictorEngine(engine, predictor)
    made_up = fast.synthetic()
    evaluate(made_up, np.ones(engine.d))
    assert engine.reads == 0 and long_arrays(fast, engine.n_units) == stored
    for _ in every_kind(engine.coordinates)[0].blocks(fast):
        pass
    assert long_arrays(fast, engine.n_units) > stored
    state = fast.__getstate__()
    assert state["_linear"] is None and state["_moved_by"] == {}
    assert fast.groups[0].__getstate__()["kept"] is None


# -- numbers of all sizes, and what only looks like a predictor -----------------------------------


def differences(engine: RowEngine) -> np.ndarray:
    """(5, n) changes of the log-likelihood of every record between places."""
    places = np.random.default_rng(5).normal(0.0, 1.0, (6, engine.d))
    values = np.array([engine.log_likelihood(z) for z in places])
    return np.diff(values, axis=0)


UNITS = [1e-30, 1e-14, 1.0, 1e12, 1e17, 1e30]
EXTREME = [("gamma", 1e-30), ("normal", 1e30)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "unit"),
    marked(
        itertools.product(["gamma", "exponential", "normal"], UNITS),
        exhaustive=others(itertools.product(["gamma", "exponential", "normal"], UNITS), EXTREME),
    ),
)
def test_units_of_the_data_lose_no_digits(kind: str, unit: float) -> None:
    """One of the two numbers of a record may be any part of the other, or nothing."""
    rng = np.random.default_rng(0)
    n, x = 60, np.random.default_rng(1).normal(size=(60, 2))
    y = np.floor(rng.exponential(2.0, n)) if kind == "exponential" else rng.gamma(2.0, 1.0, n)
    with pm.Model() as model:
        eta = x @ pm.Normal("b", shape=2) + np.log(unit) * (kind != "normal")
        if kind == "gamma":
            pm.Gamma("y", alpha=2.0, beta=2.0 / pt.exp(eta), observed=y * unit)
        elif kind == "exponential":  # 0 is within the support
            pm.Exponential("y", pt.exp(-eta), observed=y * unit)
        else:
            pm.Normal("y", eta, unit, observed=y * unit)
    engine = RowEngine.of(extract(model), Coordinates(np.zeros(2), np.eye(2)))
    predictor, reason = recognise(engine)
    assert predictor is not None, reason
    fast = PredictorEngine(engine, predictor)
    expected = differences(engine)
    np.testing.assert_allclose(differences(fast), expected, rtol=1e-9, atol=1e-10)
    z = np.array([0.5, -0.3])
    plain = np.concatenate([block.copy() for _, block in engine.vectors(engine.scores(z))], axis=1)
    found = np.concatenate([block for _, block in fast.vectors(fast.scores(z))], axis=1)
    size = np.linalg.norm(plain, axis=0)
    assert np.max(np.abs(found - plain) / np.maximum(size, 1e-300)) < 1e-8


@pytest.mark.parametrize(
    "bend",
    [
        lambda v: pt.minimum(v, 50.0),
        lambda v: pt.clip(v, -1e5, 1e5),
        lambda v: pt.switch(v > 40.0, 40.0 + 0.1 * (v - 40.0), v),
        lambda v: pt.abs(v + 1e15) - 1e15,
    ],
)
def test_a_predictor_that_bends_far_out_is_none(bend: Callable[..., Any]) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    with pm.Model() as model:
        pm.Normal("y", bend(x @ pm.Normal("b", shape=2)), 1.0, observed=x[:, 0])
    engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(2), np.eye(2)))
    assert recognise(engine)[0] is None


@pytest.mark.parametrize(
    "declare",
    [
        lambda v, k: pm.Poisson("y", pt.exp(pt.clip(v, -40.0, 40.0)), observed=k),
        lambda v, k: pm.Poisson("y", pt.exp(pt.clip(v, -350.0, 350.0)), observed=k),
        lambda v, k: pm.Poisson("y", pt.exp(pt.switch(v < 350.0, v, 350.0)), observed=k),
        lambda v, k: pm.Bernoulli("y", logit_p=pt.clip(v, -35.0, 35.0), observed=k % 2),
        lambda v, k: pm.Bernoulli("y", logit_p=pt.maximum(v, -32.0), observed=k % 2),
        lambda v, k: pm.Bernoulli(
            "y", p=pt.clip(pm.math.sigmoid(v), 1e-15, 1.0 - 1e-15), observed=k % 2
        ),
        lambda v, k: pm.Bernoulli("y", p=pm.math.invprobit(pt.clip(v, -5.0, 5.0)), observed=k % 2),
    ],
)
def test_a_rate_or_probability_that_is_cut_off_is_none(declare: Callable[..., Any]) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    with pm.Model() as model:
        declare(x @ pm.Normal("b", shape=2), np.arange(60) % 5)
    engine = RowEngine.of(extract(model), Coordinates(np.zeros(2), np.eye(2)))
    assert recognise(engine)[0] is None


@pytest.mark.parametrize("weight", [1e-30, 1e-12, 1e-6, 1.0, 1e6])
def test_the_family_does_not_depend_on_a_weight(weight: float) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    with pm.Model() as model:
        mu = x @ pm.Normal("b", shape=2)

        def logp(value: Any, mu: Any) -> Any:
            return -0.5 * weight * (value - mu) ** 2

        pm.CustomDist("y", mu, logp=logp, observed=x[:, 0])
    engine = RowEngine.of(extract(model), Coordinates(np.zeros(2), np.eye(2)))
    predictor, reason = recognise(engine)
    assert predictor is not None and predictor.family == "normal", reason


def test_a_product_does_not_depend_on_the_points_that_are_kept() -> None:
    engine = with_data(compiled("logistic"), lambda a: a)
    fast = PredictorEngine(engine, found_in(engine))
    fresh = PredictorEngine(engine, found_in(engine))
    rng = np.random.default_rng(2)
    z, move = rng.normal(size=engine.d), rng.normal(size=engine.d)
    expected = fresh.log_likelihood(z)
    for far in (0.3, 1e5, 1e10, 1e16, 1e160, np.inf):
        fast.forget()
        with np.errstate(all="ignore"):
            fast.scores(z + far * move)
            fast.scores(z - far * move)
        np.testing.assert_array_equal(fast.log_likelihood(z), expected)


def test_engines_can_be_pickled_by_any_means() -> None:
    engine = with_data(compiled("logistic"), lambda a: a)
    fast = PredictorEngine(engine, found_in(engine))
    z = np.ones(engine.d)
    again = pickle.loads(pickle.dumps(fast))
    assert np.array_equal(again.log_likelihood(z), fast.log_likelihood(z))


@pytest.mark.slow
def test_vectors_are_kept_only_where_they_are_short() -> None:
    engine = engine_of(many_groups)
    d, predictor = engine.d, found_in(engine)
    dense = np.eye(d) + 0.01 * np.random.default_rng(0).standard_normal((d, d))
    for scaling, expected in ((np.eye(d), True), (dense, False)):
        linear = PredictorEngine(engine, predictor)
        linear = linear.with_coordinates(Coordinates(np.zeros(d), scaling))
        before = linear.reads
        assert linear.pays(1000) is expected
        assert linear.reads == before
        assert linear.linear().moves.width == (4 if expected else d)
    assert not PredictorEngine(engine, predictor).pays(2**40)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("float64", marks=pytest.mark.exhaustive)]
)
def test_features_are_kept_in_their_own_precision(dtype: str) -> None:
    """Nothing of more than a number per row is in float64 if features are float32."""

    def effects(d: Data) -> None:
        slopes = pm.Normal("a", shape=40)[np.arange(len(d.binary)) % 40]
        eta = slopes + d.X.astype(dtype) @ coefficients()
        pm.Bernoulli("y", logit_p=eta, observed=d.binary)

    engine = engine_of(effects)
    rng = np.random.default_rng(2)
    engine = engine.with_coordinates(
        Coordinates(np.zeros(engine.d), np.diag(rng.gamma(4.0, 1.0, engine.d)))
    )
    fast = PredictorEngine(engine, found_in(engine))
    moves = fast.linear().moves
    assert moves.moving.shape[0] == 1
    assert moves.common_values.dtype == moves.moving_values.dtype == dtype
    held = np.concatenate([moves.common_values, moves.moving_values]).astype("float64")
    assert np.all(moves.lengths >= np.sqrt((held**2).sum(axis=0)))
    z = rng.standard_normal(engine.d)
    vectors = evaluate(engine, z)[1]
    error = np.abs(evaluate(fast, z)[1] - vectors).max() / np.abs(vectors).max()
    assert error < (1e-5 if dtype == "float32" else 1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_steps_by_hand_read_one_predictor_where_it_is_short() -> None:
    for declare, kind in ((coefficients_alone, PredictorEngine), (quadratic, RowEngine)):
        with pm.Model() as model:
            declare(Data())
            dp.PrivacyBudget(1.0, 1e-3)
            settings = {"clip_norm": 1.0, "scaling": 0.1, "step_size": 0.1, "n_steps": 2}
            step = dp.DPHMC(draws=2, chains=1, model=model, **settings)
        assert type(step.queries.holder.engine) is kind


@pytest.mark.parametrize(("n", "size"), [(0, 4), (1, 4), (4, 4), (5, 4), (6, 4), (9, 4), (3, 1)])
def test_blocks_hold_all_rows_in_order_and_none_alone(n: int, size: int) -> None:
    found = row_blocks(n, size)
    rows = [row for where in found for row in range(n)[where]]
    assert rows == list(range(n))
    lengths = [where.stop - where.start for where in found]
    assert n == 1 or size == 1 or 1 not in lengths
    assert all(length <= size + 1 for length in lengths)
