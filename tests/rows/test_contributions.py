"""Contributions to one-off releases: the values meant, each a function of its own unit alone."""

from __future__ import annotations

import math
import pickle
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from pymc_dp.base.matrices import Coordinates
from pymc_dp.records.units import RecordStore
from pymc_dp.rows import contributions, groups, loops
from pymc_dp.rows.contributions import (
    Change,
    Contribution,
    Curvature,
    OuterProduct,
    PathError,
    Score,
)
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import Columns, RowGroup
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from tests.records.test_records import compiled, evaluate, quick, records_of, same_bits, with_data
from tests.selection import marked

pytestmark = pytest.mark.compiled

NAMES = ["logistic", "neural_network", "non_centred_groups", "persons", "two_lengths"]


def coordinates(name: str) -> Coordinates:
    records = records_of(name)[1]
    rng, d = np.random.default_rng(4), records.parameters.size
    location = records.initial + 0.1 * rng.standard_normal(d)
    return Coordinates(location, np.eye(d) + 0.1 * rng.standard_normal((d, d)))


def values(engine: RowEngine, spec: Contribution) -> np.ndarray:
    """(n_units, size) contributions; every unit once, in order."""
    parts, end = [], 0
    for where, block in spec.blocks(engine):
        assert where.start == end
        end = where.stop
        assert block.shape == (spec.size, end - where.start)
        parts.append(block.T.copy())
    assert end == engine.n_units
    return np.concatenate(parts)


def every_kind(at: Coordinates) -> list[Contribution]:
    d = at.location.size
    rng = np.random.default_rng(5)
    return [
        Score(at),
        Score(at, np.array([d - 1, 0])),
        Change(at, 0.3 * rng.standard_normal(d)),
        Curvature(at),
        Curvature(at, diagonal=True),
        PathError(
            at, 0.2 * rng.standard_normal((4, d)), 0.2 * rng.standard_normal((3, d)), clip_norm=0.1
        ),
        OuterProduct(at),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_values_against_whole_score_vectors(name: str) -> None:
    engine, at = quick(name)[2], coordinates(name)
    moved, d = engine.with_coordinates(at), at.location.size
    score, part, change, _, _, path, product = every_kind(at)
    at_zero = evaluate(moved, np.zeros(d))[1]
    tight = {"rtol": 1e-12, "atol": 1e-12}  # sums of a few products of size one
    assert same_bits(values(engine, score), at_zero)
    assert same_bits(values(engine, part), at_zero[:, [d - 1, 0]])
    assert isinstance(change, Change) and isinstance(path, PathError)
    assert isinstance(product, OuterProduct)
    for packed, g in zip(values(engine, product), at_zero, strict=True):
        np.testing.assert_allclose(product.matrix(packed), np.outer(g, g), **tight)
    np.testing.assert_allclose(
        values(engine, change), evaluate(moved, change.z)[1] - at_zero, **tight
    )

    displacements = np.diff(path.points, axis=0)
    error = evaluate(moved, path.points[-1])[0] - evaluate(moved, path.points[0])[0]
    error -= at_zero @ (path.points[-1] - path.points[0])
    clipped = 0
    for midpoint, displacement in zip(path.midpoints, displacements, strict=True):
        moves = evaluate(moved, midpoint)[1] - at_zero
        norms = np.linalg.norm(moves, axis=1)
        clipped += np.count_nonzero(norms > path.clip_norm)
        error -= path.clip_norm / np.maximum(norms, path.clip_norm) * (moves @ displacement)
    assert clipped
    np.testing.assert_allclose(values(engine, path)[:, 0], error, **tight)


def differences(engine: RowEngine, spec: Curvature) -> np.ndarray:
    """(n_units, size) curvatures by differences of whole score vectors along the axes of z."""
    moved = engine.with_coordinates(spec.coordinates)
    return spec._along_axes(moved.tilted()).T


def repeated(name: str, times: int) -> RowEngine:
    """Each unit has several rows, in several groups."""
    engine = compiled(name)
    [group] = engine.groups
    rng = np.random.default_rng(11)
    units = [rng.permutation(np.arange(group.n_rows) % 17) for _ in range(times)]
    groups = [RowGroup(group.functions, group.store, u) for u in units]
    return RowEngine(groups, engine.parameters, 17, engine.coordinates)


@pytest.mark.parametrize("name", NAMES)
def test_differences_along_axes(name: str) -> None:
    engine, at = quick(name)[2], coordinates(name)
    moved, d, h = engine.with_coordinates(at), at.location.size, 0.01
    at_zero = evaluate(moved, np.zeros(d))[1]
    hessians = np.stack(
        [(at_zero - evaluate(moved, h * axis)[1]) / h for axis in np.eye(d)], axis=2
    )
    hessians = (hessians + hessians.transpose(0, 2, 1)) / 2
    close = {"rtol": 1e-9, "atol": 1e-9}  # rounding, divided by the step
    curvature = Curvature(at, step=h)
    packed = differences(engine, curvature)
    for unit in range(engine.n_units):
        np.testing.assert_allclose(curvature.matrix(packed[unit]), hessians[unit], **close)
    np.testing.assert_allclose(
        np.linalg.norm(packed, axis=1), np.linalg.norm(hessians, axis=(1, 2)), **close
    )
    np.testing.assert_allclose(
        differences(engine, Curvature(at, True, h)),
        np.diagonal(hessians, axis1=1, axis2=2),
        **close,
    )


#: Whether rows see z through a few numbers that are affine in it.
FEW = {
    "logistic": True,
    "poisson_groups": True,  # a predictor and a group effect
    "random_slopes": True,  # three effects of one label
    "mv_normal": True,  # twelve predictors
    "categorical": True,
    "neural_network": True,  # predictors and weights that all rows share
    "custom_logp": True,
    "non_centred_groups": False,
    "persons": False,
    "two_lengths": False,
}


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", FEW)
def test_curvature_through_what_rows_see(name: str, diagonal: bool) -> None:
    engine, at = quick(name)[2], coordinates(name)
    assert contributions.sees_few(engine) == FEW[name]
    spec = Curvature(at, diagonal, step=1e-6)
    # two forward differences: step times third derivatives up to 1e2; cancellation 1e-16/1e-6
    close = {"rtol": 0.0, "atol": 1e-4}
    found = values(engine, spec)
    np.testing.assert_allclose(found, differences(engine, spec), **close)
    assert np.abs(found).max() > 0.1


@pytest.mark.parametrize(("name", "diagonal"), [("logistic", True), ("poisson_groups", False)])
def test_curvature_by_one_predictor(name: str, diagonal: bool) -> None:
    engine, at = compiled(name), coordinates(name)
    predictor, _ = recognise(engine)
    assert predictor is not None
    fast = PredictorEngine(engine.with_coordinates(at), predictor)
    spec = Curvature(at, diagonal, step=1e-6)
    found = values(fast, spec)
    np.testing.assert_allclose(found, differences(fast, spec), rtol=0.0, atol=1e-4)
    np.testing.assert_allclose(found, values(engine, spec), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("times", [1, 2])
def test_curvature_of_units_of_several_rows(times: int) -> None:
    engine, spec = repeated("poisson_groups", times), Curvature(coordinates("poisson_groups"))
    assert contributions.sees_few(engine)
    alone = values(compiled("poisson_groups"), spec)
    expected = np.zeros((17, spec.size))
    for group in engine.groups:
        assert group.units is not None
        np.add.at(expected, group.units, alone)
    np.testing.assert_allclose(values(engine, spec), expected, rtol=1e-12, atol=1e-12)


def test_curvature_is_that_of_the_log_likelihood() -> None:
    """Logistic regression, where the Hessian is p(1 - p) x x'; differences are first order."""
    engine = quick("logistic")[2]
    at = Coordinates(np.array([0.5, -0.2, 0.1]), np.eye(3))
    X = engine.groups[0].columns().designs[engine.groups[0].functions.ordered[0]].T
    p = 1.0 / (1.0 + np.exp(-X @ at.location))
    exact = (p * (1.0 - p))[:, None, None] * X[:, :, None] * X[:, None, :]
    spec = Curvature(at, step=1e-5)
    found = np.array([spec.matrix(row) for row in values(engine, spec)])
    # |l'''| <= 0.1, |x|^3 up to about 60, half a step; cancellation 1e-16/1e-5
    np.testing.assert_allclose(found, exact, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_packed_matrix_has_the_frobenius_norm(diagonal: bool) -> None:
    d = 4
    spec = Curvature(Coordinates(np.zeros(d), np.eye(d)), diagonal)
    packed = np.random.default_rng(0).standard_normal(spec.size)
    matrix = spec.matrix(packed)
    assert np.array_equal(matrix, matrix.T)
    assert math.isclose(np.linalg.norm(matrix), np.linalg.norm(packed), rel_tol=1e-14)


# -- one unit concerns no other -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    marked(
        ["logistic", "poisson_groups", "neural_network", "categorical"],
        slow=["neural_network", "categorical"],
    ),
)
def test_bits_do_not_depend_on_place_or_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, at = compiled(name), coordinates(name)
    order = np.random.default_rng(3).permutation(engine.n_units)
    permuted = with_data(engine, lambda a: a[order])
    for spec in every_kind(at):
        whole = values(engine, spec)
        with monkeypatch.context() as patch:
            for size in (7, 16):
                patch.setattr(groups, "BLOCK", size)
                patch.setattr(contributions, "BLOCK", 2 * size + 1)
                patch.setattr(contributions, "_DIRECTIONS", 2000)
                patch.setattr(loops, "_SHORTEST", size - 2)
                patch.setattr(loops, "_PACKED", 1)
                assert same_bits(values(engine, spec), whole)
                assert same_bits(values(permuted, spec), whole[order])


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(["persons", "two_lengths"], exhaustive=["persons"]))
def test_units_of_several_rows_keep_their_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, at = compiled(name), coordinates(name)
    groups = []
    for k, group in enumerate(engine.groups):  # rows of one unit stay in their order
        rng = np.random.default_rng(k)
        assert group.units is not None
        slots = rng.permutation(group.units)
        order = np.empty(group.n_rows, dtype=int)
        order[np.argsort(slots, kind="stable")] = np.argsort(group.units, kind="stable")
        store_ = RecordStore([a[order] for a in group.store.read()])
        groups.append(RowGroup(group.functions, store_, slots))
    shuffled = RowEngine(groups, engine.parameters, engine.n_units, engine.coordinates)
    for spec in every_kind(at):
        whole = values(engine, spec)
        assert same_bits(values(shuffled, spec), whole)
        with monkeypatch.context() as patch:
            patch.setattr(contributions, "BLOCK", 3)
            assert same_bits(values(engine, spec), whole)


@pytest.mark.parametrize("bad", [None, np.nan, np.inf, 1e308])
@pytest.mark.parametrize(
    "name",
    marked(
        ["logistic", "neural_network", "poisson_groups", "persons"],
        slow=["neural_network", "persons"],
    ),
)
def test_a_changed_record_changes_its_own_contribution_alone(name: str, bad: float | None) -> None:
    engine, at = compiled(name), coordinates(name)
    rows = 11

    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        if array.dtype.kind == "f":
            array[rows] = array[42] if bad is None else bad
        return array

    changed = with_data(engine, change)
    units = engine.groups[0].units
    unit = rows if units is None else int(units[rows])
    others = np.arange(engine.n_units) != unit
    for spec in every_kind(at):
        before, after = values(engine, spec), values(changed, spec)
        assert same_bits(before[others], after[others])
        assert np.isfinite(after).all()
        assert not same_bits(before, after)


# -- cost and caches ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Score, Curvature, Change])
def test_rows_are_read_in_large_blocks(kind: Callable[..., Contribution]) -> None:
    engine, at = compiled("logistic"), coordinates("logistic")
    spec = Change(at, np.ones(engine.d)) if kind is Change else kind(at)
    assert len(list(spec.blocks(engine))) == 1


@pytest.mark.slow
def test_curvature_needs_no_matrix_per_record(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = compiled("neural_network")  # 26 parameters
    many = with_data(engine, lambda a: np.tile(a, (400, *[1] * (a.ndim - 1))))
    many.n_units = many.groups[0].n_rows
    spec = Curvature(coordinates("neural_network"))
    monkeypatch.setattr(contributions, "_LARGEST", 2**18)  # 2 MB
    for _ in spec.blocks(many):
        break
    tracemalloc.start()
    try:
        for _ in spec.blocks(many):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**21 < 0.2 * 8 * spec.size * many.n_units


def test_coordinates_share_what_is_free_of_parameters() -> None:
    engine = with_data(compiled("logistic"), lambda a: a)
    engine.log_likelihood(np.zeros(engine.d))
    reads = engine.reads
    moved = engine.with_coordinates(coordinates("logistic"))
    moved.log_likelihood(np.zeros(engine.d))
    assert moved.groups[0].columns() is engine.groups[0].columns()
    assert moved.reads == reads


def arrays_in(value: object, found: Callable[[np.ndarray], None], seen: set[int]) -> None:
    """Every array that an object of this package holds."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        found(value)
    elif isinstance(value, dict):
        for item in value.values():
            arrays_in(item, found, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            arrays_in(item, found, seen)
    elif type(value).__module__.startswith("pymc_dp"):
        arrays_in(vars(value), found, seen)


def long_arrays(engine: object, n: int) -> int:
    """How many arrays with an axis of n an engine holds outside of its record stores."""
    count = 0

    def found(array: np.ndarray) -> None:
        nonlocal count
        count += n in array.shape

    arrays_in(engine, found, set())
    return count


def test_a_pickled_engine_holds_records_and_nothing_made_of_them() -> None:
    engine = with_data(compiled("logistic"), lambda a: a)
    stored = long_arrays(engine, engine.n_units)
    tilted = engine.with_coordinates(coordinates("logistic")).tilted()
    values(tilted, Curvature(coordinates("logistic")))
    evaluate(tilted, np.ones(engine.d))
    assert long_arrays(tilted, engine.n_units) > stored
    groups = [RowGroup(None, g.store, g.units) for g in engine.groups]  # functions: not arrays
    for group, full in zip(groups, engine.groups, strict=True):
        group._columns = full.columns()
        assert isinstance(group._columns, Columns)
        assert pickle.loads(pickle.dumps(group))._columns is None
    state = tilted.__getstate__()
    assert state["_reference"] is None


# -- public structure -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("logistic", []),
        ("poisson_groups", [[0, 1, 2, 3]]),
        ("non_centred_groups", [[2, 3, 4, 5]]),
        ("nested_groups", [[2, 3, 4, 5]]),
        ("random_slopes", [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
        ("small_unsigned_labels", [[0, 1, 2, 3], [4, 5]]),
        ("random_walk_prior", [[0, 1, 2, 3]]),
        ("persons", [[0, 1, 2, 3]]),
        ("categorical_shared", []),
    ],
)
def test_group_effects_are_blocks(name: str, expected: list[list[int]]) -> None:
    _, records, engine, _ = quick(name)
    before = engine.reads
    assert [block.tolist() for block in engine.index_blocks(records.initial)] == expected
    assert engine.reads == before
