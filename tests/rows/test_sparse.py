"""Score vectors without their zeros, and the functions that rows are computed with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pymc as pm
import pytest

from pymc_dp.base.jit import compiled as jit
from pymc_dp.base.matrices import Coordinates
from pymc_dp.records.extraction import extract
from pymc_dp.rows import linear, loops
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.loops import Layout
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from tests.records.test_records import QUICK, point, quick, records_of

#: One index, shared maps, crossed indices, several numbers for each label, users.
INDEXED = ["poisson_groups", "two_indices", "index_and_constant"]
INDEXED += ["random_slopes", "non_centred_groups", "persons"]
OTHERS = ["logistic", "mv_normal", "two_observed"]


def by_blocks(name: str, diagonal: bool) -> RowEngine:
    """An engine in coordinates that keep groups apart, or that mix them all."""
    engine = quick(name)[2]
    rng, d = np.random.default_rng(3), engine.d
    scaling = np.diag(rng.uniform(0.5, 2.0, d))
    if not diagonal:
        scaling += 0.1 * rng.standard_normal((d, d))
    return engine.with_coordinates(Coordinates(point(records_of(name)[1], 5), scaling))


def with_zeros(engine: RowEngine, z: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """(d, n) score vectors, of which every entry is held on the way."""
    other = engine.with_coordinates(replace(engine.coordinates))
    with monkeypatch.context() as patch:
        patch.setattr(loops, "_DENSE", -1.0)
        blocks = [block.copy() for _, block in other.vectors(other.scores(z))]
    return np.concatenate(blocks, axis=1)


@pytest.mark.parametrize(
    ("name", "diagonal"),
    [(name, True) for name in INDEXED]
    + [(name, False) for name in [*OTHERS, "poisson_groups", "two_indices"]],
)
def test_sparse_vectors_are_the_vectors(
    name: str, diagonal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = by_blocks(name, diagonal)
    z = 0.3 * np.random.default_rng(8).standard_normal(engine.d)
    engines: list[RowEngine] = [engine, engine.tilted()]
    predictor, _ = recognise(engine)
    if predictor is not None:
        engines.append(PredictorEngine(engine, predictor))
    for each in engines:
        scores = each.scores(z)
        dense = with_zeros(each, z, monkeypatch)
        sparse = []
        for where, block in each.sparse_vectors(scores, slice(0, each.n_units)):
            assert block.values.shape[1] == where.stop - where.start
            for i, column in enumerate(block.moving.T):
                held = column[block.values[len(block.common) :, i] != 0.0]
                places = [*block.common, *held]
                assert len(set(places)) == len(places), "a coordinate stands twice"
            sparse.append(block.dense(engine.d).copy())
        # sums over predictors may be added in another order
        found = np.concatenate(sparse, axis=1)
        np.testing.assert_allclose(found, dense, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["nested_groups", "two_indices", "small_unsigned_labels"])
def test_groups_leave_out_each_other(name: str) -> None:
    engine = by_blocks(name, True)
    scores = engine.scores(np.zeros(engine.d))
    widths = [
        len(block.values) for _, block in engine.sparse_vectors(scores, slice(0, engine.n_units))
    ]
    assert max(widths) <= 0.6 * engine.d


def test_coordinates_that_rows_touch_may_change_with_z(monkeypatch: pytest.MonkeyPatch) -> None:
    """`maximum(a, b)` moves with one of its arguments, on either side of the coefficients."""
    monkeypatch.setattr(loops, "_WORTH", 0)  # designs are kept
    rng = np.random.default_rng(0)
    n, groups = 300, 8
    x, group, y = rng.normal(size=(n, 3)), rng.integers(0, groups, n), rng.normal(size=n)
    with pm.Model() as model:
        a = pm.Normal("a")
        beta = pm.Normal("beta", shape=3)
        b = pm.Normal("b")
        effect = pm.Normal("effect", shape=groups)
        pm.Normal("y", x @ beta + pm.math.maximum(a, b) + effect[group], 1.0, observed=y)
    records = extract(model, check=False)
    d = records.parameters.size
    scaling = np.eye(d)
    scaling[1:4, 1:4] += 0.3 * rng.standard_normal((3, 3))
    engine = RowEngine.of(records, Coordinates(np.zeros(d), scaling), QUICK)
    for larger in (0, 4, 0):
        z = 0.1 * rng.standard_normal(d)
        z[larger] = 2.0
        scores = engine.scores(z)
        dense = with_zeros(engine, z, monkeypatch)
        sparse = [
            block.dense(d).copy()
            for _, block in engine.sparse_vectors(scores, slice(0, engine.n_units))
        ]
        np.testing.assert_allclose(np.concatenate(sparse, axis=1), dense, atol=1e-13)
        work = engine.work(scores, np.zeros_like(z), z, np.ones(n))
        np.testing.assert_allclose(work, z @ dense, rtol=1e-10, atol=1e-12)


def test_a_coordinate_of_two_indices_is_held_for_every_row() -> None:
    one, other = np.eye(5, 12), np.eye(5, 12, k=4)  # both have coordinate 4
    layout = Layout.of(["index", "index"], [1, 1], [one, other], 12)
    assert list(layout.common) == [4]
    first, second = layout.labelled
    assert first is not None and second is not None
    assert not first.weights[4].any() and not second.weights[0].any()


def test_a_coordinate_of_most_labels_is_held_for_every_row() -> None:
    maps = np.eye(8, 20)
    maps[:, 19] = 1.0
    layout = Layout.of(["index"], [1], [maps], 20)
    assert list(layout.common) == [19] and layout.moving == 1


def test_scores_of_another_shape_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled loops check no bounds: they would read what stands beside an array."""
    engine = by_blocks("logistic", diagonal=True)
    functions = engine.groups[0].functions
    right = functions.scores

    def short(*given: Any) -> list[Any]:
        return [None if part is None else part[:1] for part in right(*given)]

    monkeypatch.setattr(functions, "scores", short)
    with pytest.raises(ValueError, match="Not every row has a score of its own"):
        engine.scores(np.zeros(engine.d))


def evaluated(function: Callable[[float], float], x: np.ndarray) -> np.ndarray:
    @jit(error_model="numpy")
    def loop(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.shape[0]):
            out[i] = function(x[i])

    out = np.empty_like(x)
    loop(x, out)
    return out


def test_exponential() -> None:
    mpmath = pytest.importorskip("mpmath")
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-708.0, 709.7, 500), rng.normal(0.0, 1.0, 500), [0.0, -0.0]])
    found = evaluated(linear.exp, x)
    for value, result in zip(x, found, strict=True):
        exact = mpmath.exp(mpmath.mpf(value))
        assert abs(mpmath.mpf(result) - exact) <= exact * 2.0**-51
    ends = np.array([-math.inf, -746.0, -745.2, 709.782712893384, 709.79, math.inf, math.nan])
    with np.errstate(over="ignore"):
        expected = np.exp(ends)
    found = evaluated(linear.exp, ends)
    np.testing.assert_allclose(found, expected, rtol=2.0**-51, atol=5e-324)
    small = np.linspace(-745.0, -708.5, 200)  # less than a normal number: to the last place
    np.testing.assert_allclose(evaluated(linear.exp, small), np.exp(small), rtol=0, atol=1e-323)


def test_logarithm() -> None:
    mpmath = pytest.importorskip("mpmath")
    rng = np.random.default_rng(1)
    t = np.concatenate([rng.uniform(0.0, 1.0, 500), 10.0 ** rng.uniform(-300, 0, 200), [0.0, 1.0]])
    found = evaluated(linear.log1p, t)
    with mpmath.workdps(340):
        for value, result in zip(t, found, strict=True):
            exact = mpmath.log1p(mpmath.mpf(value))
            assert abs(mpmath.mpf(result) - exact) <= exact * 2.0**-50


@pytest.mark.parametrize("name", ["exp", "log1p"])
def test_vector_instructions_change_no_bit(name: str) -> None:
    x = np.random.default_rng(2).uniform(0.0, 1.0, 1003)
    function = getattr(linear, name)
    whole = evaluated(function, x)
    assert whole.tobytes() == np.array([function(value) for value in x]).tobytes()
    assert whole[1:].tobytes() == evaluated(function, x[1:].copy()).tobytes()
