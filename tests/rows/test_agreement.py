"""Log-likelihoods and scores of random models agree with PyMC's own log-density to 1e-9.

PyMC's density is compiled again from the model, weighted by unit, in the interpreter; its
derivatives are taken twice: by PyTensor, and by differences of values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.errors import NotFactorizable
from pymc_dp.privacy import holder
from pymc_dp.privacy.answer import Grid, Query, VectorSum
from pymc_dp.privacy.holder import Holder
from pymc_dp.privacy.queries import Kick
from pymc_dp.records.extraction import extract
from pymc_dp.records.units import RecordStore, count_units
from pymc_dp.rows import engine as engine_module
from pymc_dp.rows import groups, predicted
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import BLOCK, RowGroup
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import Predictor, recognise
from tests.random_models import (
    FAMILIES,
    Case,
    Structure,
    Table,
    cases,
    declare,
    owners,
    recognisable,
    structures,
)
from tests.records.test_records import evaluate, same_bits
from tests.selection import marked, others

#: Of the sum of absolute values of what is added up, and of 1.
TOLERANCE = 1e-9
#: A data set of this many rows tells what a model is: nothing else in it is as long.
TEMPLATE = Case(40, 6, "many", "dense", BLOCK, 2**16, 0)
#: Random models per family, and data sets per model.
MODELS, CASES = 2, 4
FIXED = settings(
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],  # a smaller model has to be compiled as well
    suppress_health_check=list(HealthCheck),
)


class Drawn:
    """A random model, compiled once, and its log-density as PyMC has it."""

    def __init__(self, family: str, structure: Structure, kwargs: dict[str, Any] | None) -> None:
        self.users, self.kwargs = structure.users, kwargs
        self.table = Table(structure, TEMPLATE)
        self.model = declare(family, self.table)
        self.observed = [rv.name for rv in self.model.observed_RVs]
        # the functions of rows are the same, whatever the units
        ids = self.ids(TEMPLATE) if self.users else None
        self.records = extract(self.model, privacy_unit=ids, check=False)
        d = self.records.parameters.size
        self.functions = [
            group.functions
            for group in RowEngine.of(
                self.records, Coordinates(np.zeros(d), np.eye(d)), kwargs
            ).groups
        ]

    def ids(self, case: Case) -> dict[str, np.ndarray]:
        rows = {name: case.n + (5 if name == "visits_of" else 0) for name in self.observed}
        return {name: owners(case, n) for name, n in rows.items()}

    @cached_property
    def predictor(self) -> tuple[Predictor | None, str]:
        return recognise(self.engine(TEMPLATE)[0], self.kwargs)

    @cached_property
    def _density(self) -> Any:
        """Log-densities of rows, and the gradient of their weighted sum, as PyMC writes them."""
        model = self.model
        values = [model.rvs_to_values[rv] for rv in model.free_RVs]
        terms = model.logp(vars=model.observed_RVs, jacobian=False, sum=False)
        rows = [term.sum(axis=tuple(range(1, term.ndim))) for term in terms]
        weights = [pt.dvector() for _ in rows]
        total = pt.sum([(w * row).sum() for w, row in zip(weights, rows, strict=True)])
        gradient = pytensor.grad(total, values, disconnected_inputs="ignore")
        inputs = [*values, *weights]
        return pytensor.function(
            inputs, [*rows, *gradient], mode=INTERPRETED, on_unused_input="ignore"
        )

    def engine(self, case: Case) -> tuple[RowEngine, dict[str, np.ndarray]]:
        """The engine on another data set, and the unit of every row."""
        self.table.set(case)
        ids = self.ids(case) if self.users else {n: np.arange(case.n) for n in self.observed}
        names = np.unique(np.concatenate(list(ids.values())))
        units = {name: np.searchsorted(names, array) for name, array in ids.items()}
        told: dict[str, np.ndarray | None] = dict(units) if self.users else dict.fromkeys(units)
        if case.n > 1:  # one row is refused before the model is looked at
            n_units, told = count_units(self.model, (), ids if self.users else None)
            assert n_units == len(names)
        groups = []
        for functions in self.functions:
            leaves = functions.graph.leaves
            assert not any(leaf.axis for leaf in leaves)
            store = RecordStore([leaf.source.get_value() for leaf in leaves])
            groups.append(RowGroup(functions, store, told[functions.graph.names[0]]))
        records = self.records
        rng, d = np.random.default_rng(case.seed + 2), records.parameters.size
        scaling = np.diag(rng.uniform(0.5, 1.5, d))
        if case.coordinates == "dense":
            scaling += 0.2 * rng.standard_normal((d, d)) / np.sqrt(d)
        elif case.coordinates == "identity":
            scaling = np.eye(d)
        at = Coordinates(records.initial + 0.3 * rng.standard_normal(d), scaling)
        return RowEngine(groups, records.parameters, len(names), at), units

    def density(
        self, theta: np.ndarray, weights: list[np.ndarray]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """PyMC's log-densities of the rows, and the gradient of their weighted sum."""
        at = self.records.parameters.point(theta)
        values = [at[value.name] for value in self.records.parameters.values]
        found = self._density(*values, *weights)
        k = len(self.observed)
        return found[:k], np.concatenate([np.ravel(g) for g in found[k:]])


@contextmanager
def blocks_of(rows: int, numbers: int) -> Iterator[None]:
    """Blocks and parts of at most so many rows, and vectors of so many numbers."""

    def over(part: Any, n: int, numbers: int) -> Iterator[Any]:
        step = rows if numbers else n  # 0: it may not be divided
        return (part(slice(k, min(k + step, n))) for k in range(0, n, step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "BLOCK", rows)
        patch.setattr(engine_module, "_CACHED", numbers)
        patch.setattr(predicted, "_BLOCK", rows)
        patch.setattr(predicted, "_CACHED", numbers)
        patch.setattr(holder, "over", over)
        yield


def by_unit(rows: list[np.ndarray], units: dict[str, np.ndarray], n_units: int) -> np.ndarray:
    out = np.zeros(n_units)
    for row, unit in zip(rows, units.values(), strict=True):
        np.add.at(out, unit, row)
    return out


def close(found: np.ndarray, expected: np.ndarray, size: np.ndarray | float) -> None:
    """Agreement to 1e-9 of 1 and of `size`, a sum of absolute values."""
    assert found.shape == expected.shape
    error = np.abs(found - expected)
    assert np.all(error <= TOLERANCE * (1.0 + size)), f"off by {np.max(error)}"


def extrapolated(central: Any, step: float, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Richardson's extrapolation of central differences with steps that are halved.

    And how far apart its last two orders are, from which truncation and rounding are seen.
    """
    table = [central(step / 2**k) for k in range(levels)]
    for power in range(1, levels):
        before = table
        pairs = zip(table[1:], table[:-1], strict=True)
        table = [fine + (fine - coarse) / (4**power - 1) for fine, coarse in pairs]
    return table[0], np.max([np.abs(table[0] - other) for other in before], axis=0)


def agree(model: Drawn, case: Case) -> None:
    """All units at one point of one data set."""
    engine, units = model.engine(case)
    rng = np.random.default_rng(case.seed + 3)
    z = 0.4 * rng.standard_normal(engine.d)
    theta, scaling = engine.coordinates.theta(z), engine.coordinates.scaling
    with blocks_of(case.block, case.cached):
        values, vectors = evaluate(engine, z)
    assert vectors.shape == (engine.n_units, engine.d)

    # values, unit by unit
    ones = [np.ones(len(unit)) for unit in units.values()]
    rows, gradient = model.density(theta, ones)
    assert all(np.isfinite(row).all() for row in rows)
    sizes = by_unit([np.abs(row) for row in rows], units, engine.n_units)
    close(values, by_unit(rows, units, engine.n_units), sizes)
    close(values.sum(), np.sum([row.sum() for row in rows]), sizes.sum())

    # derivatives, all units together, and with a weight for each; alone where they are few
    close(vectors.sum(axis=0), scaling.T @ gradient, np.abs(vectors).sum(axis=0))
    chosen = np.eye(engine.n_units) if engine.n_units <= 8 else rng.normal(size=(2, engine.n_units))
    for w in chosen:
        gradient = model.density(theta, [w[unit] for unit in units.values()])[1]
        close(w @ vectors, scaling.T @ gradient, np.abs(w) @ np.abs(vectors))

    # differences of values along a direction in which every coordinate moves
    direction = rng.standard_normal(engine.d)
    direction /= np.linalg.norm(direction)

    def central(h: float) -> np.ndarray:
        ends = [model.density(theta + t * (scaling @ direction), ones)[0] for t in (h, -h)]
        return (by_unit(ends[0], units, len(sizes)) - by_unit(ends[1], units, len(sizes))) / (2 * h)

    # PyMC loses digits in the logarithm of one minus a probability near one
    expected, doubt = extrapolated(central, 0.02, 4)
    sizes = sizes + np.abs(vectors) @ np.abs(direction)
    close(vectors @ direction, expected, sizes + 10.0 * doubt / TOLERANCE)
    assert np.median(doubt / (1.0 + sizes)) < TOLERANCE and np.all(doubt < 1e-5 * (1.0 + sizes))
    agree_with_plain_sum(engine, z, vectors, case)


def summed(
    engine: RowEngine, z: np.ndarray, vectors: np.ndarray
) -> tuple[np.ndarray, np.ndarray, VectorSum]:
    """The sum of all units, about half of which are clipped, their scales, and how it is made."""
    clip_norm = max(float(np.median(np.linalg.norm(vectors, axis=1))), 1e-3)
    how = VectorSum(Grid.finest(1.0, engine.n_units), "replace_one", engine.d, clip_norm)
    asked = Holder(engine)
    total = asked.total(Query("gradient", Kick(0, z, z), how))
    assert asked._path is not None
    return total, asked._path.scale, how


def agree_with_plain_sum(engine: RowEngine, z: np.ndarray, vectors: np.ndarray, case: Case) -> None:
    """Integers of the sum against NumPy's, but where rounding may go either way."""
    with blocks_of(case.block, case.cached):
        total, scale, how = summed(engine, z, vectors)
    units = vectors * (1.0 / how.unit)
    norms = np.linalg.norm(units, axis=1)
    expected_scale = np.minimum(1.0, how.bound / np.maximum(norms, 1e-300))
    np.testing.assert_allclose(scale, expected_scale, rtol=1e-12)
    entries = units * expected_scale[:, None]
    expected = np.rint(entries).astype(np.int64).sum(axis=0)
    # the rounding errors that `vector_bound` allows for, of either evaluation
    slack = 2.0 * (engine.d + 8) * 2.0**-53 * how.bound
    either = np.abs(entries - np.floor(entries) - 0.5) <= slack
    assert np.all(np.abs(total - expected) <= either.sum(axis=0))


def agree_with_linear_form(model: Drawn, case: Case) -> None:
    """The form with one linear predictor per row, which knows values up to a constant."""
    predictor, reason = model.predictor
    assert predictor is not None, reason
    engine, _ = model.engine(case)
    linear = PredictorEngine(engine, predictor)
    z = 0.4 * np.random.default_rng(case.seed + 3).standard_normal(engine.d)
    with blocks_of(case.block, case.cached):
        values, vectors = evaluate(linear, z)
        start = evaluate(linear, np.zeros(engine.d))[0]
    expected, expected_vectors = evaluate(engine, z)
    expected_start = evaluate(engine, np.zeros(engine.d))[0]
    close(values - start, expected - expected_start, np.abs(expected) + np.abs(expected_start))
    close(vectors, expected_vectors, np.abs(expected_vectors))
    agree_with_plain_sum(linear, z, vectors, case)


#: One row, two, around a multiple of the block, and whatever else.
SMALL = cases([1, 2, 7, 15, 16, 17, 35], [16, 8192, 1, 7])


def check_family(family: str, models: int, source: int) -> None:
    linear = 0

    @seed(zlib.crc32(family.encode()) + source)  # other models for other families
    @settings(FIXED, max_examples=models)
    @given(structure=structures, data_sets=st.lists(SMALL, min_size=CASES, max_size=CASES))
    def check(structure: Structure, data_sets: list[Case]) -> None:
        nonlocal linear
        model = Drawn(family, structure, {"mode": INTERPRETED})
        for case in data_sets:
            agree(model, case)
            if recognisable(family, structure):
                agree_with_linear_form(model, case)
                linear += 1

    check()
    could = recognisable(family, Structure("linear", "known", 0, 2, 1, False))
    assert linear or not could, "no model of a concave family had its linear form compared"


#: Examples of these are compared with PyMC in `tests.records.test_records`.
LIKE_EXAMPLES = ["beta", "categorical", "hurdle", "matrix_observations", "ordered", "student_t"]
LIKE_EXAMPLES += ["truncated", "zero_inflated", "binomial", "negative_binomial", "gamma"]


@pytest.mark.parametrize(
    "family", marked(FAMILIES, slow=LIKE_EXAMPLES, exhaustive=["mv_normal", "mixture"])
)
def test_random_models_agree_with_pymc(family: str) -> None:
    check_family(family, MODELS, 0)


@pytest.mark.parametrize(
    "family",
    marked(
        FAMILIES,
        slow=["mv_normal", "mixture"],
        exhaustive=others(FAMILIES, ["mv_normal", "mixture"]),
    ),
)
def test_many_random_models_agree_with_pymc(family: str) -> None:
    check_family(family, 8, 1)


# -- whole blocks, compiled as in production ------------------------------------------------------

LOGISTIC = Structure("groups_and_linear", "known", 0, 3, 40, False)
SHARED = Structure("non_centred", "shared", 0, 2, 6, False)
SOFTMAX = Structure("intercept_and_linear", "known", 0, 2, 1, False)
COMPILED = marked(
    [("bernoulli", LOGISTIC), ("negative_binomial", SHARED), ("categorical", SOFTMAX)],
    slow=[("bernoulli", LOGISTIC)],
    exhaustive=[("negative_binomial", SHARED), ("categorical", SOFTMAX)],
)
LARGE = cases([BLOCK + 3, 1, BLOCK - 1, 2 * BLOCK + 1, 100], [64, 7, 1000])


@pytest.mark.parametrize(("family", "structure"), COMPILED)
def test_results_do_not_depend_on_the_blocks(family: str, structure: Structure) -> None:
    model = Drawn(family, structure, None)

    @seed(zlib.crc32(family.encode()))
    @settings(FIXED, max_examples=6)
    @given(case=LARGE, users=st.booleans())
    def check(case: Case, users: bool) -> None:
        model.users = users  # the functions of rows are the same
        agree(model, replace(case, block=BLOCK, cached=2**16))
        engine, _ = model.engine(case)
        engines: list[RowEngine] = [engine]
        if recognisable(family, replace(structure, users=users)):
            agree_with_linear_form(model, replace(case, block=BLOCK, cached=2**16))
            predictor, _ = model.predictor
            assert predictor is not None
            engines.append(PredictorEngine(engine, predictor))
        z = 0.4 * np.random.default_rng(case.seed + 3).standard_normal(engine.d)
        for each in engines:
            values, vectors = evaluate(each, z)
            total, scale, _ = summed(each, z, vectors)
            # in new coordinates nothing of the first evaluation is kept
            again = each.with_coordinates(replace(each.coordinates))
            with blocks_of(case.block, case.cached):
                found_values, found_vectors = evaluate(again, z)
                found, found_scale, _ = summed(again, z, vectors)
            assert same_bits(found_values, values)
            assert same_bits(found_vectors, vectors)
            assert same_bits(found, total)
            assert same_bits(found_scale, scale)

    check()


def test_a_model_of_one_row_is_refused() -> None:
    """One row can be read, as above, but there is nothing it could hide among."""
    with pytest.raises(NotFactorizable, match="fewer than two records"):
        extract(declare("bernoulli", Table(LOGISTIC, replace(TEMPLATE, n=1))))
