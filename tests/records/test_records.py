"""Records: what a model says about one record is found, rebuilt exactly, or refused.

Comparisons of bits need the compiled mode of production; values are compared with PyMC's own
log-density in whatever mode compiles fastest.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pymc.distributions.dist_math import check_parameters
from pymc.logprob.transforms import Transform
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import UnaryScalarOp, upgrade_to_float
from pytensor.tensor.elemwise import Elemwise

from pymc_dp.base import threads
from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED, ExactLinker
from pymc_dp.errors import NotFactorizable, UnsafeModel
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.extraction import Records, extract
from pymc_dp.records.units import RecordStore, _rows_overlap, _same_units, count_units
from pymc_dp.rows import groups
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.rows.groups import RowGroup
from tests.models import EXAMPLES, GROUPS, Data, build
from tests.selection import marked

QUICK = {"mode": INTERPRETED}
#: Examples compiled as in production: every kind of cut, per-row linear algebra, special functions.
COMPILED = [
    "categorical",
    "censored",
    "logistic",
    "mixture_shared",
    "mv_normal",
    "negative_binomial",
    "neural_network",
    "poisson_groups",
    "random_slopes",
    "two_observed",
]
#: Those of them that take longest to compile.
LONG, LONGEST = (
    ["mv_normal", "poisson_groups", "random_slopes"],
    [
        "categorical",
        "censored",
        "mixture_shared",
        "negative_binomial",
        "neural_network",
        "two_observed",
    ],
)
#: Further examples of what the others show.
FURTHER = [
    "beta",
    "categorical_shared",
    "censored",
    "custom_dist",
    "data_with_dims",
    "dirichlet",
    "gamma",
    "hurdle",
    "integer_design",
    "matrix_with_one_column",
    "mixture_of_regressions",
    "mixture_shared",
    "multinomial",
    "mv_normal",
    "mv_normal_lkj",
    "negative_binomial",
    "nested_groups",
    "neural_network",
    "non_centred_groups",
    "normal",
    "one_column",
    "one_column_of_data",
    "ordered_logistic",
    "pandas_inputs",
    "random_walk_prior",
    "scalar_times_column",
    "series_by_row",
    "single_precision_design",
    "small_unsigned_labels",
    "spline",
    "square_design",
    "student_t",
    "sum_of_products",
    "switch_on_data",
    "truncated",
    "vector_times_transpose",
    "zero_inflated",
]
Bits = tuple[np.ndarray, np.ndarray]


@cache
def records_of(name: str) -> tuple[pm.Model, Records]:
    data = Data()
    model = build(name, data)
    return model, extract(model, **EXAMPLES[name].options(data))


def identity(records: Records) -> Coordinates:
    d = records.parameters.size
    return Coordinates(np.zeros(d), np.eye(d))


@cache
def quick(name: str) -> tuple[pm.Model, Records, RowEngine, PublicTerms]:
    model, records = records_of(name)
    at = identity(records)
    return model, records, RowEngine.of(records, at, QUICK), PublicTerms.of(records, at, QUICK)


@cache
def compiled(name: str) -> RowEngine:
    records = records_of(name)[1]
    return RowEngine.of(records, identity(records), {"mode": "NUMBA"})


def point(records: Records, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return records.initial + 0.3 * rng.standard_normal(records.parameters.size)


def evaluate(engine: RowEngine, z: np.ndarray) -> Bits:
    """Log-likelihoods (n,) and score vectors (n, d) of all units."""
    vectors = [block.T.copy() for _, block in engine.vectors(engine.scores(z))]
    return engine.log_likelihood(z), np.concatenate(vectors)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def with_data(engine: RowEngine, change: Callable[[np.ndarray], np.ndarray]) -> RowEngine:
    """The same functions on changed data."""
    groups = [
        RowGroup(
            group.functions,
            RecordStore([np.ascontiguousarray(change(a)) for a in group.store.read()]),
            group.units,
        )
        for group in engine.groups
    ]
    return RowEngine(groups, engine.parameters, engine.n_units, engine.coordinates)


# -- values ---------------------------------------------------------------------------------------


ROWS = np.random.default_rng(5)
COLUMNS = {
    "ill": ROWS.random(60) < 0.4,
    "x": ROWS.normal(size=60),
    "small": ROWS.integers(-128, 128, 60).astype("int8"),
    "byte": ROWS.integers(0, 256, 60).astype("uint8"),
    "middle": ROWS.integers(2**16, 2**31, 60).astype("int32"),
    "large": ROWS.integers(10**9, 9 * 10**9, 60),
    "huge": 2**63 + ROWS.integers(0, 9, 60).astype("uint64"),
}
REAL = {name: column.astype(float) for name, column in COLUMNS.items()}
#: Columns of a linear predictor as they are written in a model, and in exact arithmetic.
TYPED: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda c: ~c["ill"], 1 - REAL["ill"]),
    (lambda c: pt.invert(c["ill"]), 1 - REAL["ill"]),
    (lambda c: pt.where(~c["ill"], 1, 0), 1 - REAL["ill"]),
    (lambda c: pt.switch(~c["ill"], c["x"], 0.5), np.where(COLUMNS["ill"], 0.5, REAL["x"])),
    (lambda c: ~(c["x"] > 0), REAL["x"] <= 0),
    (lambda c: ~(c["ill"] & (c["x"] > 0)), ~(COLUMNS["ill"] & (REAL["x"] > 0))),
    (lambda c: 1 - c["ill"], 1 - REAL["ill"]),
    (lambda c: c["ill"] * (c["x"] > 0), REAL["ill"] * (REAL["x"] > 0)),
    (lambda c: pt.stack([c["ill"], c["x"] > 0], 1).sum(1), REAL["ill"] + (REAL["x"] > 0)),
    (lambda c: c["small"] * c["small"], REAL["small"] ** 2),
    (lambda c: c["byte"] + c["byte"], 2 * REAL["byte"]),
    (lambda c: -c["byte"], -REAL["byte"]),
    (lambda c: c["middle"] * c["middle"], REAL["middle"] ** 2),
    (lambda c: (c["middle"] * c["middle"]) * c["x"], REAL["middle"] ** 2 * REAL["x"]),
    (lambda c: c["large"] ** 2, REAL["large"] ** 2),
    (lambda c: c["huge"] * 2, REAL["huge"] * 2),
    (lambda c: c["huge"] + c["small"], REAL["huge"] + REAL["small"]),
    (lambda c: pt.einsum("ij,ij->i", *[pt.stack([c["large"]] * 2, 1)] * 2), 2 * REAL["large"] ** 2),
    (lambda c: c["middle"].astype("int8"), REAL["middle"]),
    (lambda c: c["byte"] / c["small"].clip(1, 9), REAL["byte"] / REAL["small"].clip(1, 9)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "mode"),
    [(False, QUICK), (True, QUICK), pytest.param(False, {}, marks=pytest.mark.exhaustive)],
)
def test_truth_values_are_negated_and_integers_do_not_wrap(named: bool, mode: Any) -> None:
    """Scores are compared as well: each is that of the row's own column."""
    exact = np.column_stack([column * 1.0 for _, column in TYPED])
    scale = np.abs(exact).max(axis=0)
    weights = np.linspace(0.1, 0.5, len(TYPED))
    with pm.Model() as model:
        columns = {k: pt.as_tensor(v) for k, v in COLUMNS.items()}
        if named:  # pm.Data makes 32 bits of 64
            columns |= {k: pm.Data(k, v) for k, v in COLUMNS.items() if k != "large"}
        beta = pm.Normal("beta", shape=len(TYPED))
        terms = [beta[k] * written(columns) / scale[k] for k, (written, _) in enumerate(TYPED)]
        pm.Normal("y", sum(terms), 1.0, observed=COLUMNS["x"])
    records = extract(model)
    found, vectors = evaluate(RowEngine.of(records, identity(records), mode), weights)
    residual = COLUMNS["x"] - (exact / scale) @ weights
    expected = -0.5 * residual**2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(vectors, residual[:, None] * exact / scale, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", marked(sorted(EXAMPLES), slow=FURTHER))
def test_terms_add_up_to_the_log_density_of_pymc(name: str) -> None:
    model, records, engine, public = quick(name)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    declared = [model[v] for v in EXAMPLES[name].options(Data()).get("public", ()) if v != "X"]
    known = [*model.free_RVs, *[rv for rv in model.observed_RVs if rv in declared]]
    private = [rv for rv in model.observed_RVs if rv not in declared]
    likelihood = model.logp(vars=private, jacobian=False)
    prior = model.logp(vars=known, jacobian=True)
    reference = pytensor.function(
        values,
        [
            likelihood,
            prior,
            *pytensor.grad(likelihood, values, disconnected_inputs="ignore"),
            *pytensor.grad(prior, values),
        ],
        on_unused_input="ignore",
        **QUICK,
    )
    for seed in range(3):
        z = point(records, seed)
        at = records.parameters.point(z)
        expected = reference(*[at[value.name] for value in values])
        gradients = [np.ravel(g) for g in expected[2:]]
        found, vectors = evaluate(engine, z)
        # two orders of summation in double precision; single precision in one of the examples
        tolerance = (
            {"rtol": 1e-5, "atol": 1e-5} if "single" in name else {"rtol": 1e-9, "atol": 1e-9}
        )
        np.testing.assert_allclose(found.sum(), expected[0], **tolerance)
        np.testing.assert_allclose(
            vectors.sum(axis=0), np.concatenate(gradients[: len(values)]), **tolerance
        )
        np.testing.assert_allclose(public.log_density(z), expected[1], **tolerance)
        np.testing.assert_allclose(
            public.gradient(z), np.concatenate(gradients[len(values) :]), **tolerance
        )


@pytest.mark.parametrize("name", ["logistic", "poisson_groups", "persons", "two_lengths"])
def test_work_is_the_product_of_score_and_displacement(name: str) -> None:
    _, records, engine, _ = quick(name)
    z = point(records, 0)
    rng = np.random.default_rng(1)
    displacement = rng.standard_normal(z.size)
    scale = rng.uniform(size=engine.n_units)
    _, vectors = evaluate(engine, z)
    np.testing.assert_allclose(
        engine.work(engine.scores(z), z, z + displacement, scale),
        scale * (vectors @ displacement),
        rtol=1e-10,
        atol=1e-10,
    )


def test_scaled_coordinates_change_variables() -> None:
    _, records, engine, _ = quick("poisson_groups")
    d = records.parameters.size
    rng = np.random.default_rng(2)
    location, scaling = rng.standard_normal(d), np.eye(d) + 0.1 * rng.standard_normal((d, d))
    at = Coordinates(location, scaling)
    moved = RowEngine(engine.groups, engine.parameters, engine.n_units, at)
    z = rng.standard_normal(d)
    plain, scaled = evaluate(engine, at.theta(z)), evaluate(moved, z)
    np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-12)
    np.testing.assert_allclose(scaled[1], plain[1] @ scaling, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(at.z(at.theta(z)), z, rtol=1e-9, atol=1e-12)


# -- one record concerns no other -----------------------------------------------------------------


@pytest.mark.parametrize("name", marked(COMPILED, slow=LONG, exhaustive=LONGEST))
def test_bits_do_not_depend_on_place_or_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = compiled(name)
    z = point(records_of(name)[1], 0)
    order = np.random.default_rng(3).permutation(engine.n_units)
    whole = evaluate(engine, z)
    permuted = with_data(engine, lambda a: a[order])
    for size in (7, 16, 8192):  # odd, of vector registers, all rows at once
        monkeypatch.setattr(groups, "BLOCK", size)
        monkeypatch.setattr(threads, "_WORTH", size)
        monkeypatch.setattr(threads, "count", lambda: 3)
        found, moved = evaluate(engine, z), evaluate(permuted, z)
        for k in range(2):
            assert same_bits(found[k], whole[k])
            assert same_bits(moved[k], whole[k][order])


@pytest.mark.parametrize("bad", [None, np.nan, np.inf, 1e308])
@pytest.mark.parametrize("name", marked(COMPILED, slow=LONG, exhaustive=LONGEST))
def test_a_changed_record_leaves_the_bits_of_all_others(name: str, bad: float | None) -> None:
    engine = compiled(name)
    z = point(records_of(name)[1], 1)
    chosen, other = 11, 42

    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        if bad is None:
            array[chosen] = array[other]
        elif array.dtype.kind == "f":
            array[chosen] = bad
        return array

    before, after = evaluate(engine, z), evaluate(with_data(engine, change), z)
    others = np.arange(engine.n_units) != chosen
    for k in range(2):
        assert same_bits(after[k][others], before[k][others])
    if bad is None:
        for k in range(2):
            assert same_bits(after[k][chosen], before[k][other])


def test_a_record_outside_the_support_is_impossible_by_itself() -> None:
    """PyMC's checks are global: one impossible row would make every row impossible."""
    data = Data()
    data.real[5] = 1e3
    with pm.Model() as model:
        sd = pt.as_tensor(np.where(np.arange(data.n) == 5, -1.0, 1.0))
        pm.Normal("y", pm.Normal("b"), sd, observed=data.real)
    records = extract(model, check=False)
    found = RowEngine.of(records, identity(records), QUICK).log_likelihood(records.initial)
    assert found[5] == -np.inf
    assert np.isfinite(np.delete(found, 5)).all()


def test_a_record_with_an_impossible_parameter_is_impossible_though_its_formula_has_a_value() -> (
    None
):
    ill = np.ones(30, dtype=int)
    with pm.Model() as model:
        wrong = pt.as_tensor(np.arange(30) == 5)
        p = pt.switch(wrong, 1.5, pm.math.invlogit(pm.Normal("b")))
        pm.Bernoulli("y", p, observed=ill)
    records = extract(model, check=False)
    found = RowEngine.of(records, identity(records), QUICK).log_likelihood(records.initial)
    assert found[5] == -np.inf
    assert np.isfinite(np.delete(found, 5)).all()


def test_outcomes_that_are_only_rounded_to_no_probability_are_accepted() -> None:
    data = Data()
    with pm.Model() as model:
        rate = pt.exp(1e4 * data.x * pm.Normal("b", 1.0))
        pm.Poisson("y", rate, observed=data.count)
        parts = [pm.Normal.dist(pm.Normal("mu"), 1.0), pm.Normal.dist(0.0, 1.0)]
        pm.Mixture("z", [0.5, 0.5], parts, observed=1e3 * data.real)
        pm.Normal("u", pm.Normal("v"), 1.0, observed=1e200 * data.real)
        pm.Gumbel("w", pm.Normal("g", 0.0, 9.0), 1.0, observed=data.real - 71.0)
        pm.Poisson("of start", pm.Normal("m", 0.0, 9.0), observed=data.count)  # a mean of 0
    extract(model)


def test_parameters_outside_the_support_are_impossible_in_public() -> None:
    with pm.Model() as model:
        pm.Normal("y", 0.0, pm.Normal("s", 1.0, 1.0), observed=Data().real)
    records = extract(model)
    public = PublicTerms.of(records, identity(records), QUICK)
    assert public.log_density(np.array([-0.5])) == -np.inf
    assert np.isfinite(public.log_density(np.array([0.5])))


@pytest.mark.parametrize("name", ["logistic", "random_slopes"])
def test_no_rows_have_no_scores(name: str) -> None:
    group = quick(name)[2].groups[0]
    phis, _ = group.functions.shared(quick(name)[1].initial)
    one, none = (
        group.functions.scores(etas, phis, labels, blocks)
        for etas, labels, blocks in (group.inputs(phis, slice(3, k)) for k in (4, 3))
    )
    assert [s if s is None else (0, s.shape[1]) for s in one] == [
        s if s is None else s.shape for s in none
    ]


# -- units ----------------------------------------------------------------------------------------


def test_rows_of_a_person_are_summed() -> None:
    _, records, engine, _ = quick("persons")
    z = point(records, 0)
    units = np.unique(Data().person, return_inverse=True)[1]
    single = RowEngine(
        [RowGroup(engine.groups[0].functions, engine.groups[0].store, None)],
        engine.parameters,
        Data().n,
        engine.coordinates,
    )
    for found, rows in zip(evaluate(engine, z), evaluate(single, z), strict=True):
        expected = np.zeros((engine.n_units, *rows.shape[1:]))
        np.add.at(expected, units, rows)  # in the order of the rows, as the engine does
        assert same_bits(found, expected)
    assert engine.n_units == len(np.unique(Data().person))


def test_observed_variables_of_two_lengths_meet_in_their_persons() -> None:
    data = Data()
    model, records, engine, _ = quick("two_lengths")
    ids = {"y": data.person, "visits": data.other_person}
    unique = np.unique(np.concatenate(list(ids.values())))
    assert records.n_units == engine.n_units == len(unique)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    rows = pytensor.function(
        values, model.logp(vars=model.observed_RVs, jacobian=False, sum=False), **QUICK
    )
    z = point(records, 0)
    at = records.parameters.point(z)
    expected = np.zeros(len(unique))
    for rv, found in zip(model.observed_RVs, rows(*[at[v.name] for v in values]), strict=True):
        np.add.at(expected, np.searchsorted(unique, ids[rv.name]), found)
    np.testing.assert_allclose(engine.log_likelihood(z), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.arange(5), "one id for each row of `y`; it has another length"),
        (np.linspace(0, 1, 60), "privacy_unit of `y` must be ids, integers or text, not of type"),
        (np.zeros((60, 1), int), "privacy_unit of `y` must be one vector of ids, or one column"),
        (["a", 1] * 30, "privacy_unit of `y` has ids of several kinds .int, str."),
        ({"z": np.arange(60)}, "private observed variables are"),
    ],
)
def test_wrong_ids_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_units(records_of("logistic")[0], (), ids)


# -- refusals -------------------------------------------------------------------------------------

DATA = Data()
REFUSALS: dict[str, tuple[Callable[[], None], str, dict[str, Any]]] = {}


def refused(match: str, **options: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a model that must be refused with a text that matches."""

    def register(declare: Callable[[], None]) -> Callable[[], None]:
        REFUSALS[declare.__name__] = (declare, match, options)
        return declare

    return register


def observe(mu: Any, **kwargs: Any) -> None:
    pm.Normal("y", mu, 1.0, observed=DATA.real, **kwargs)


def fixed(array: Any) -> Any:
    return pt.as_tensor(array)


STANDARDISE = "`y`.*as long as the data reaches other records.*Standardise with public constants"


@refused("density of `y` uses ~.*integers.*Write 1 - x")
def integers_negated_as_truth_values() -> None:
    observe(pm.Normal("b") * pt.switch(~fixed(DATA.binary), 1.0, 0.0))


@refused("density of `y` adds True and False.*x | y")
def truth_values_added() -> None:
    observe(pm.Normal("b") * (fixed(DATA.binary > 0) + fixed(DATA.x > 0)))


@refused("rows of an unnamed array reach other records.*Standardise with public constants")
def standardised_inside() -> None:
    X = fixed(DATA.X)
    observe(((X - X.mean(axis=0)) / X.std(axis=0)) @ pm.Normal("b", shape=3))


@refused("rows of `y` reach other records.*Standardise with public constants")
def centred_response() -> None:
    def logp(value: Any, b: Any) -> Any:
        return -((value - value.mean() - b) ** 2)

    pm.CustomDist("y", pm.Normal("b"), logp=logp, observed=DATA.real)


@refused("`X` reaches every record.*public=\\['X'\\]")
def mean_of_named_data() -> None:
    X = pm.Data("X", DATA.X)
    observe(X.mean(axis=0) @ pm.Normal("b", shape=3))


@refused("`x` reach other records")
def named_data_by_row_and_by_mean() -> None:
    x = pm.Data("x", DATA.x)
    observe(pm.Normal("b") * (x - x.mean()))


@refused(STANDARDISE)
def mean_of_a_flattened_copy() -> None:
    observe(pm.Normal("b") * fixed(DATA.X.ravel()).mean())


@refused(STANDARDISE)
def mean_in_a_wrapped_graph() -> None:
    b = pt.dscalar()
    observe(OpFromGraph([b], [b * fixed(DATA.x).mean()])(pm.Normal("b")))


@refused(STANDARDISE)
def mean_of_a_sparse_matrix() -> None:
    from pytensor import sparse as pytensor_sparse
    from scipy import sparse

    X = pytensor_sparse.as_sparse(sparse.csr_matrix(DATA.X))
    observe(pm.Normal("b") * pytensor_sparse.sp_sum(X))


@refused("it is indexed by a parameter.*Index by data")
def labels_from_a_parameter() -> None:
    label = pt.floor(pm.Normal("b") * fixed(DATA.x)).astype("int64")
    observe(pm.Normal("alpha", shape=GROUPS)[pt.clip(label, 0, GROUPS - 1)])


@refused(STANDARDISE)
def number_of_positive_records() -> None:
    x = fixed(DATA.x)
    observe(pm.Normal("b") * x[x > 0].shape[0])


@refused(STANDARDISE)
def first_record() -> None:
    observe(pm.Normal("b") * fixed(DATA.x)[0])


@refused(STANDARDISE)
def permuted_records() -> None:
    order = np.random.default_rng(0).permutation(DATA.n)
    observe(pm.Normal("b") * fixed(DATA.x)[order])


@refused(STANDARDISE)
def records_by_a_longer_table() -> None:
    table = fixed(np.arange(100.0))
    observe(pm.Normal("b") * table[np.arange(DATA.n)])


@refused(STANDARDISE, privacy_unit=DATA.person)
def covariate_of_persons() -> None:
    table = fixed(np.linspace(0, 1, DATA.n // 3))
    observe(pm.Normal("b") * table[DATA.person])


@refused(STANDARDISE, privacy_unit={"y": DATA.person, "visits": DATA.other_person})
def mean_of_another_observed_variable() -> None:
    b = pm.Normal("b")
    observe(b * fixed(DATA.other_count).mean())
    pm.Poisson("visits", pt.exp(b), observed=DATA.other_count)


@refused("`y`.*Cumsum.*mixes records")
def cumulative_sum() -> None:
    observe(pm.Normal("b") * pt.cumsum(fixed(DATA.x)))


@refused("`y`.*Softmax.*mixes records")
def softmax_over_records() -> None:
    observe(pm.Normal("b") * pt.special.softmax(fixed(DATA.x), axis=0))


@refused("`y`.*SortOp.*not on the list.*linear predictors")
def sorted_records() -> None:
    observe(pm.Normal("b") * pt.sort(fixed(DATA.x)))


@refused("`y`.*ArgSort.*not on the list")
def labels_by_rank() -> None:
    observe(pm.Normal("b", shape=DATA.n)[pt.argsort(fixed(DATA.x))])


@refused("`y`.*shifts them against each other.*Select the records before")
def reversed_records() -> None:
    observe(pm.Normal("b") * fixed(DATA.x)[::-1])


@refused("`y`.*shifts them against each other")
def autoregression() -> None:
    def logp(value: Any, b: Any) -> Any:
        return -((value[1:] - b * value[:-1]) ** 2)

    pm.CustomDist("y", pm.Normal("b"), logp=logp, observed=DATA.real)


@refused("`y`.*joined from several arrays")
def differences() -> None:
    x = fixed(DATA.x)
    observe(pm.Normal("b") * pt.concatenate([x[:1], pt.diff(x)]))


@refused("rows of an unnamed array reach other records")
def products_between_records() -> None:
    X = fixed(DATA.X)
    observe(X @ (X.T @ pm.Normal("b", shape=DATA.n)))


@refused(STANDARDISE)
def branch_on_all_data() -> None:
    from pytensor.ifelse import ifelse

    observe(ifelse(pt.gt(fixed(DATA.x).sum(), 0), pm.Normal("b"), pm.Normal("c")))


@refused(STANDARDISE)
def scan_over_records() -> None:
    from pytensor.scan.basic import scan

    states = scan(
        lambda x, s, b: s + b * x,
        sequences=[fixed(DATA.x)],
        outputs_info=[pt.zeros(())],
        non_sequences=[pm.Normal("b")],
        return_updates=False,
    )
    observe(states[-1])


@refused("`y` has one log-likelihood for all of its data.*one row per record")
def random_walk() -> None:
    pm.GaussianRandomWalk(
        "y", mu=pm.Normal("b"), sigma=1.0, init_dist=pm.Normal.dist(), observed=DATA.real
    )


@refused("`y` has one log-likelihood for all of its data")
def gaussian_process() -> None:
    process = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(1, ls=pm.HalfNormal("ls")))
    process.marginal_likelihood("y", X=DATA.x[:, None], y=DATA.real, sigma=1.0)


@refused("`y` is not a sum of one term per record")
def latent_gaussian_process() -> None:
    process = pm.gp.Latent(cov_func=pm.gp.cov.ExpQuad(1, ls=pm.HalfNormal("ls")))
    observe(process.prior("f", X=DATA.x[:, None]))


@refused("`y` has one log-likelihood for all of its data")
def multivariate_over_records() -> None:
    mu = pm.Normal("b") * np.ones(DATA.n)
    pm.MvNormal("y", mu=mu, cov=np.eye(DATA.n), observed=DATA.real)


@refused("parameter `u` has one entry per record.*public group")
def latent_per_record() -> None:
    observe(pm.Normal("u", shape=DATA.n))


@refused("parameter `alpha` has one entry per record")
def as_many_groups_as_records() -> None:
    observe(pm.Normal("alpha", shape=DATA.n) * DATA.x)


@refused("operation SetSubtensor|operation IncSubtensor")
def overwritten_record() -> None:
    observe(pt.set_subtensor(fixed(DATA.x)[0], pm.Normal("b")))


@refused("indexed by a mask.*integer labels")
def index_by_mask() -> None:
    observe(pm.Normal("b", shape=DATA.n)[fixed(DATA.x) > -100.0])


@refused("outside 0..3, where 4 groups.*Recode")
def label_without_a_group() -> None:
    labels = DATA.group.copy()
    labels[7] = 99
    observe(pm.Normal("alpha", shape=GROUPS)[labels])


@refused("outside 0..1, where 2 groups.*Recode")
def second_label_without_a_group() -> None:
    labels = DATA.half.copy()
    labels[7] = 2  # within the flattened table
    observe(pm.Normal("alpha", shape=(GROUPS, 2))[DATA.group, labels])


@refused("outside 0..3, where 4 groups.*pandas codes a missing category as -1")
def missing_category() -> None:
    """PyTensor counts it from the end: it would be one of the last group."""
    codes = pd.Categorical(np.where(DATA.half, "a", None)).codes
    observe(pm.Normal("alpha", shape=GROUPS)[codes])


@refused("outside 0..3, where 4 groups.*pandas codes a missing category as -1")
def missing_category_as_data() -> None:
    labels = DATA.group.copy()
    labels[7] = -1
    observe(pm.Normal("alpha", shape=GROUPS)[pm.Data("labels", labels)])


@refused("outside 0..3, where 4 groups.*pandas codes a missing category as -1")
def missing_category_beside_a_number() -> None:
    labels = DATA.group.copy()
    labels[7] = -1
    observe(pm.Normal("alpha", shape=(GROUPS, 2))[labels, -1])


@refused("`y` uses pm.Minibatch or total_size.*full data")
def total_size() -> None:
    observe(pm.Normal("b"), total_size=10_000)


@refused("`y` uses pm.Minibatch or total_size")
def minibatch() -> None:
    x, y = pm.Minibatch(DATA.x, DATA.real, batch_size=10)
    pm.Normal("y", pm.Normal("b") * x, 1.0, observed=y)


@refused("`y`.*axis of size one is used as the record axis.*one term per record")
def sum_made_an_array_of_one() -> None:
    def logp(value: Any, mu: Any) -> Any:
        return pt.sum(-0.5 * (value - mu) ** 2)[None]

    pm.CustomDist("y", pm.Normal("b"), logp=logp, observed=DATA.real)


@refused("pm.Potential \\(`penalty`\\).*pm.CustomDist")
def potential() -> None:
    b = pm.Normal("b")
    observe(b)
    pm.Potential("penalty", -(b**2))


OUTSIDE = "outcomes of `y` have probability zero.*outside of the support.*Recode or drop.*private"


@refused(OUTSIDE)
def count_for_a_truth_value() -> None:
    pm.Bernoulli("y", logit_p=pm.Normal("b"), observed=DATA.count + 2 * DATA.half)


@refused(OUTSIDE)
def share_at_an_end() -> None:
    pm.Beta("y", mu=pm.math.invlogit(pm.Normal("b")), nu=3.0, observed=DATA.fraction * DATA.half)


@refused(OUTSIDE)
def neither_zero_nor_a_count() -> None:
    pm.ZeroInflatedPoisson("y", 0.5, pt.exp(pm.Normal("b")), observed=DATA.count - 1)


@refused(OUTSIDE)
def negative_count() -> None:
    pm.Poisson("y", pt.exp(pm.Normal("b")), observed=DATA.count - 1)


@refused(OUTSIDE)
def count_that_is_not_whole() -> None:
    pm.Poisson("y", pt.exp(pm.Normal("b")), observed=pm.Data("seen", DATA.count + 0.5 * DATA.half))


@refused(OUTSIDE)
def more_than_there_can_be() -> None:
    pm.BetaBinomial("y", 1.0, pm.HalfNormal("b"), n=1, observed=DATA.count + 2 * DATA.half)


@refused("missing values.*Drop or impute")
@pytest.mark.filterwarnings("ignore::UserWarning")
def missing_values() -> None:
    pm.Normal("y", pm.Normal("b"), 1.0, observed=np.where(DATA.x > 1.5, np.nan, DATA.real))


@refused("`k` is a discrete parameter.*Sum it out")
def discrete_parameter() -> None:
    observe(pm.Poisson("k", 1.0))


@refused("`y`.*check of its parameters is not one condition for each record.*pt.switch")
def check_of_all_records_together() -> None:
    def logp(y: Any, mu: Any) -> Any:
        return check_parameters(-((y - mu) ** 2), pt.or_(pt.all(mu > -1.0), pt.all(mu < 1.0)))

    pm.CustomDist("y", pm.Normal("b") * fixed(DATA.x), logp=logp, observed=DATA.real)


@refused("observed value of `y` is computed in the model.*Compute it before")
def computed_observations() -> None:
    pm.Normal("y", pm.Normal("b"), 1.0, observed=fixed(DATA.real)[DATA.group])


@refused("`y` has no record axis.*one entry per record")
def single_observation() -> None:
    pm.Normal("y", pm.Normal("b"), 1.0, observed=0.3)


@refused("`y` has fewer than two records on its first axis")
def single_record() -> None:
    pm.Normal("y", pm.Normal("b"), 1.0, observed=DATA.real[:1])


@refused("`y`, `visits` differ in length.*privacy_unit=")
def lengths_that_disagree() -> None:
    b = pm.Normal("b")
    observe(b)
    pm.Poisson("visits", pt.exp(b), observed=DATA.other_count)


@refused("no private observed variable", public=["y"])
def nothing_private() -> None:
    observe(pm.Normal("b"))


@refused("no free random variable")
def nothing_to_sample() -> None:
    observe(0.0)


@refused("`y` depends on no free variable")
def nothing_to_learn() -> None:
    observe(0.0 * pm.Normal("b"))


@refused(
    "`visits` depends on no free variable",
    privacy_unit={"y": np.arange(60), "visits": np.arange(67)},
)
def nothing_to_learn_beside() -> None:
    observe(pm.Normal("b"))
    pm.Poisson("visits", 2.0, observed=DATA.other_count)


@refused("prior of `b` depends on.*declare the data")
def prior_from_the_data() -> None:
    observe(pm.Normal("b", fixed(DATA.x).mean(), 1.0))


@refused("prior of `b` depends on `x`.*declare the data")
def prior_from_named_data() -> None:
    observe(pm.Normal("b", pm.Data("x", DATA.x).mean(), 1.0))


@refused("prior or a public likelihood depends on", public=["z"])
def public_likelihood_from_the_data() -> None:
    b = pm.Normal("b")
    observe(b)
    pm.Normal("z", b * fixed(DATA.x).mean(), 1.0, observed=np.zeros(5))


@refused("prior or a public likelihood depends on `y`")
def prior_from_the_response() -> None:
    response = pm.Normal("y", pm.Normal("b"), 1.0, observed=DATA.real)
    pm.Normal("c", response.sum(), 1.0)


@refused("(prior|shape) of `alpha` depends on an array of the data.*public knowledge")
def shape_from_the_labels() -> None:
    """The size of what is released would be the largest label and one."""
    labels = fixed(DATA.group)
    observe(pm.ZeroSumNormal("alpha", 1.0, shape=(labels.max() + 1,))[labels])


MATRIX = np.random.default_rng(3).normal(size=(60, 3))


@refused(
    "prior of `b` depends on an array of the data|public likelihood depends on an array of the"
)
def prior_from_a_record() -> None:
    """A row of a matrix is a part of it, however short."""
    b = pm.Normal("b", fixed(MATRIX[7]), 1.0, shape=3)
    pm.Normal("y", fixed(MATRIX) @ b, 1.0, observed=np.zeros(60))


@refused("`y`.*[Ee]igh.*pt.linalg.cholesky")
def eigenvalues_of_the_matrix_of_each_record() -> None:
    def logp(value: Any, a: Any) -> Any:
        return pt.linalg.eigh(value[:, :, None] * value[:, None, :] * pt.exp(a))[0]

    pm.CustomDist("y", pm.Normal("a"), logp=logp, observed=MATRIX)


@refused("`y`.*array that holds records.*Standardise")
def record_in_the_likelihood_of_all() -> None:
    b = pm.Normal("b", shape=3)
    mean = fixed(MATRIX) @ b + (fixed(MATRIX[7]) * b).sum()
    pm.Normal("y", mean, 1.0, observed=np.zeros(60))


#: Two arrays that share memory, or not; and whether rows of different units may read them.
SHARED: dict[str, tuple[Callable[[], tuple[Any, Any]], bool]] = {
    "the same array": (lambda: (MATRIX, MATRIX), False),
    "a column": (lambda: (MATRIX[:, :1], MATRIX[:, 0][:, None]), False),
    "in reverse": (lambda: (MATRIX, MATRIX[::-1]), False),
    "transposed twice": (lambda: (MATRIX, np.asfortranarray(MATRIX.T).T), False),
    "other columns": (lambda: (MATRIX[:, :1], MATRIX[:, 1:2]), True),
    "a copy": (lambda: (MATRIX, MATRIX.copy()), True),
    "two constants": (lambda: (fixed(MATRIX), fixed(MATRIX)), False),
    "a constant and its clone": (lambda: ((x := fixed(MATRIX)), x.clone()), False),
    "shared variables": (
        lambda: tuple(pytensor.shared(MATRIX, borrow=True) for _ in range(2)),
        False,
    ),
    "one pm.Data": (lambda: (pm.Data("x", MATRIX),) * 2, False),
}


@pytest.mark.parametrize("what", SHARED)
def test_an_entry_in_memory_has_one_unit(what: str) -> None:
    make, other_units = SHARED[what]
    ids = np.arange(60) // 2
    same = (ids,) if what in ("the same array", "in reverse", "other columns") else ()
    for units in (*same, np.roll(ids, 3)):
        with pm.Model() as model:
            for name, array in zip(("y1", "y2"), make(), strict=True):
                b = pm.Normal(f"b_{name}", shape=pt.as_tensor(array).eval().shape[1:])
                pm.Normal(name, pt.as_tensor(array) @ b, 1.0, observed=np.zeros(60))
        options: dict[str, Any] = {"privacy_unit": {"y1": ids, "y2": units}, "check": False}
        if other_units or (units is ids and what != "in reverse"):
            extract(model, **options)
            continue
        with pytest.raises(NotFactorizable, match=r"another\s+privacy_unit.*copy of its own"):
            extract(model, **options)


def test_an_entry_in_memory_is_in_one_row() -> None:
    """Two lags of a series: whoever is one row of it would be in two."""
    series = np.random.default_rng(4).normal(size=62)
    for copied in (False, True):
        one, two = series[1:-1], series[:-2]
        with pm.Model() as model:
            mean = pm.Normal("b") * fixed(one) + pm.Normal("c") * fixed(
                two.copy() if copied else two
            )
            pm.Normal("y", mean, 1.0, observed=np.zeros(60))
        if copied:
            extract(model, check=False)
            continue
        with pytest.raises(NotFactorizable, match="another row"):
            extract(model, check=False)


@pytest.mark.parametrize(
    ("array", "of_one"),
    [
        (np.lib.stride_tricks.sliding_window_view(np.arange(62.0), 3), False),
        (np.lib.stride_tricks.sliding_window_view(np.arange(180.0), 3)[::3], True),
        (np.broadcast_to(np.arange(3.0), (60, 3)), False),
        (np.broadcast_to(np.arange(60.0)[:, None], (60, 3)), True),
        (np.arange(180.0).reshape(60, 3)[:, ::-1], True),
        (np.asfortranarray(np.arange(180.0).reshape(60, 3)), True),
    ],
    ids=["windows", "steps", "broadcast rows", "broadcast columns", "reversed", "columns"],
)
def test_an_entry_in_memory_is_in_one_row_of_an_array(array: np.ndarray, of_one: bool) -> None:
    with pm.Model() as model:
        b = pm.Normal("b", shape=3)
        pm.Normal("y", fixed(array) @ b, 1.0, observed=np.zeros(60))
    if of_one:
        extract(model, check=False)
        return
    with pytest.raises(NotFactorizable, match=r"An array shows.*in several rows.*a copy"):
        extract(model, check=False)


def test_parts_of_entries_are_refused() -> None:
    """Bytes of one entry behind numbers of another row, beside the entries themselves or alone."""
    x = np.random.default_rng(0).integers(0, 1000, 60)
    halves = np.lib.stride_tricks.as_strided(x.view("i4"), shape=(58, 2), strides=(8, 12))
    with pm.Model() as model:
        mean = pm.Normal("b") * pt.as_tensor(halves)[:, 1] + pm.Normal("c") * fixed(x[:58])
        pm.Normal("y", mean, 1.0, observed=np.zeros(58))
    with pytest.raises(NotFactorizable, match="another row"):
        extract(model, check=False)
    assert not _same_units(halves, np.arange(58), x, np.arange(60))
    assert not _same_units(x, np.arange(60), halves, np.arange(58))
    assert _rows_overlap(np.lib.stride_tricks.as_strided(x.view("i4"), (100, 1), (2, 4)))


def test_a_transform_holds_no_private_data() -> None:
    """What is released is what it makes of a coordinate; neither start nor density need show it."""

    class Shifted(Transform):  # type: ignore[misc]
        name = "shifted"

        def __init__(self, by: Any) -> None:
            self.by = by

        def forward(self, value: Any, *inputs: Any) -> Any:
            return value

        def backward(self, value: Any, *inputs: Any) -> Any:
            return value + self.by

        def log_jac_det(self, value: Any, *inputs: Any) -> Any:
            return pt.zeros_like(value)

    y = np.random.default_rng(0).normal(size=200)
    for by in ("data", "rows", "public"):
        with pm.Model() as model:
            data = pm.Data("data", y)
            shift = {"data": data.mean(), "rows": data.shape[0], "public": pt.constant(2.0)}[by]
            pm.Flat("u", default_transform=None, transform=Shifted(shift))
            pm.Normal("y", pm.Normal("b"), 1.0, observed=data)
            options = {"count_is_private": True, "n_public": 200} if by == "rows" else {}
        if by == "public":
            extract(model, check=False, **options)
            continue
        with pytest.raises(UnsafeModel, match="The transform of `u`"):
            extract(model, check=False, **options)


@pytest.mark.parametrize("of", [np.asarray, pt.as_tensor, lambda row: row[:, None].T[0]])
def test_no_start_is_a_record(of: Callable[[Any], Any]) -> None:
    with pm.Model() as model:
        b = pm.Normal("b", shape=MATRIX.shape[1], initval=of(MATRIX[0]))
        pm.Normal("y", fixed(MATRIX) @ b, 1.0, observed=np.zeros(60))
    with pytest.raises(UnsafeModel, match="initial value of `b` is a part of an array"):
        extract(model, check=False)


@pytest.mark.filterwarnings("ignore:Data in:UserWarning")
@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_refusal_names_variable_and_remedy(name: str) -> None:
    declare, match, options = REFUSALS[name]
    with pm.Model() as model:
        declare()
    with pytest.raises((NotFactorizable, UnsafeModel), match=f"(?s){match}"):
        extract(model, **options)


@pytest.mark.parametrize("name", ["logistic"])
def test_functions_are_exact_wherever_they_are_compiled(name: str) -> None:
    """A pickled function is compiled again, by the defaults of the process that reads it."""
    engine = compiled(name)
    assert pytensor.config.numba__fastmath  # or nothing is shown
    for each in (engine, pickle.loads(pickle.dumps(engine))):
        functions = each.groups[0].functions
        assert functions.threaded
        for function in (functions._loglik, functions._scores):
            assert function.vm.jit_fn.targetoptions["fastmath"] is False
            assert isinstance(function.maker.linker, ExactLinker)


def test_a_joint_check_is_made_for_each_record() -> None:
    def logp(y: Any, mu: Any) -> Any:
        return check_parameters(-((y - mu) ** 2), pt.all(mu > -1.0) & pt.all(mu < 1.0))

    with pm.Model() as model:
        b = pm.Normal("b")
        pm.CustomDist("y", b * fixed(DATA.x), logp=logp, observed=DATA.real)
    records = extract(model)
    found = RowEngine.of(records, identity(records), QUICK).log_likelihood(np.array([1.5]))
    mu = 1.5 * DATA.x
    inside = np.abs(mu) < 1.0
    assert 0 < inside.sum() < len(mu)
    expected = np.where(inside, -((DATA.real - mu) ** 2), -np.inf)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "n"), [("logistic", 3), ("poisson_groups", GROUPS), ("random_slopes", GROUPS)]
)
def test_as_many_records_as_features_or_groups(name: str, n: int) -> None:
    """Sizes that coincide by accident do not turn a group into a record."""
    model = build(name, Data(n))
    records = extract(model)
    z = point(records, 0)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    rows = model.logp(vars=model.observed_RVs, jacobian=False, sum=False)
    reference = pytensor.function(values, rows, **QUICK)
    at = records.parameters.point(z)
    [expected] = reference(*[at[value.name] for value in values])
    engine = RowEngine.of(records, identity(records), QUICK)
    np.testing.assert_allclose(engine.log_likelihood(z), expected, rtol=1e-9)


# -- what becomes of the data ---------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["income", None])
def test_bad_feature_names_the_column_and_prints_no_value(bad: float, name: str | None) -> None:
    X = DATA.X.copy()
    X[18, 2] = 31337.25
    with pm.Model() as model:
        source = pt.as_tensor(X) if name is None else pm.Data(name, X)
        observe(source @ pm.Normal("b", shape=3))
    (source.data if name is None else source.get_value(borrow=True))[17, 2] = bad
    with pytest.raises(UnsafeModel, match=f"column 2 of .*{name or 'the data of `y`'}") as caught:
        extract(model)
    assert not any(text in str(caught.value) for text in ("17", "18", "31337"))


def test_wrong_label_prints_no_value() -> None:
    declare, _, _ = REFUSALS["label_without_a_group"]
    with pm.Model() as model:
        declare()
    with pytest.raises(UnsafeModel) as caught:
        extract(model)
    assert "99" not in str(caught.value)
    assert "7" not in str(caught.value)


def test_labels_of_made_up_data_stay_within_the_table() -> None:
    """Functions are compiled by a call on zeros, where compiled code checks no bounds."""
    _, records, engine, _ = quick("labels_computed_in_the_model")
    z = point(records, 0)
    found, vectors = evaluate(engine.synthetic(), z)
    assert np.isfinite(found).all()
    assert np.isfinite(vectors).all()


def test_set_data_after_the_step_is_built_changes_nothing() -> None:
    data = Data()
    model = build("public_data", data)
    records = extract(model, **EXAMPLES["public_data"].options(data))
    engine = RowEngine.of(records, identity(records), QUICK)
    public = PublicTerms.of(records, identity(records), QUICK)
    z = point(records, 0)
    before = (*evaluate(engine, z), public.log_density(z), public.gradient(z))
    with model:
        pm.set_data({"X": data.X + 1.0, "centre": np.ones(3), "covariate": np.ones(data.n + 5)})
    after = (*evaluate(engine, z), public.log_density(z), public.gradient(z))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def functions_of(engine: RowEngine, public: PublicTerms) -> Iterator[Any]:
    yield public._function.function  # inside of what keeps it silent
    for group in engine.groups:
        functions = group.functions
        yield from (functions._loglik, functions._scores, functions._shared.function)
        yield from (how for how in functions.column_of.values() if not isinstance(how, int))


def roots_of(outputs: list[Any]) -> Iterator[Any]:
    for variable in ancestors(outputs):
        if variable.owner is None:
            yield variable
        elif isinstance(variable.owner.op, HasInnerGraph):
            yield from roots_of(variable.owner.op.inner_outputs)


@pytest.mark.parametrize("name", marked(sorted(EXAMPLES), slow=FURTHER))
def test_no_data_in_compiled_functions(name: str) -> None:
    model, _, engine, public = quick(name)
    engines = [engine, compiled(name)] if name in COMPILED else [engine]
    secret = {
        float(number)
        for group in engine.groups
        for array in group.store.read()
        for number in np.ravel(array)
        if float(number) != round(float(number), 1)  # 0.5 may well be in a graph
    }
    declared = [
        model[public_name].get_value()
        for public_name in EXAMPLES[name].options(DATA).get("public", ())
        if isinstance(model[public_name], SharedVariable)
    ]
    for made in engines:
        for function in functions_of(made, public):
            assert not any(isinstance(v, SharedVariable) for v in function.maker.inputs)
            for root in roots_of(function.maker.fgraph.outputs):
                assert not isinstance(root, SharedVariable)
                if not isinstance(root, Constant) or not hasattr(root.data, "dtype"):
                    continue
                if any(np.array_equal(root.data, array) for array in declared):
                    continue
                assert max(root.data.shape, default=0) < DATA.n
                assert secret.isdisjoint(np.ravel(root.data).astype(float).tolist())


def test_a_private_number_of_rows_may_not_be_used_as_a_number():
    data = Data()
    with pm.Model() as uses_it:  # a mean, as in the second model, divides by it
        x = pm.Data("x", data.x)
        b = pm.Normal("b")
        pm.Normal("y", b * x, sigma=1 + 1 / x.shape[0], observed=pm.Data("y_data", data.real))
    extract(uses_it)
    for model, options in (
        (uses_it, {}),
        (build("public_data_by_row_and_by_mean"), {"public": ["public_x"]}),
    ):
        with pytest.raises(NotFactorizable, match="number of rows"):
            extract(model, count_is_private=True, **options)


@pytest.mark.parametrize(
    "name",
    marked([n for n in EXAMPLES if n != "public_data_by_row_and_by_mean"], slow=FURTHER),
)
def test_no_other_example_uses_its_number_of_rows(name):
    model = build(name)
    extract(model, count_is_private=True, check=False, **EXAMPLES[name].options(Data()))


def test_a_constant_in_a_graph_within_a_graph_is_behind_its_result() -> None:
    b = pt.dscalar()
    result = OpFromGraph([b], [b * fixed(DATA.x).mean()])(pt.dscalar())
    constants = [v for v in ancestors_without_shapes([result]) if isinstance(v, Constant)]
    assert any(np.array_equal(constant.data, DATA.x) for constant in constants)


class Hidden(Op):
    """Adds what only its code knows."""

    itypes, otypes = [pt.dscalar], [pt.dscalar]

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        outputs[0][0] = np.asarray(inputs[0] + DATA.x.mean())


class HiddenNumber(UnaryScalarOp):
    """Adds what its code holds to each entry."""

    def impl(self, x: float) -> float:
        return x + DATA.x.mean()


def wrapped(b: Any) -> Any:
    x = b.type()
    return OpFromGraph([x], [Hidden()(x)])(b)


EACH = Elemwise(HiddenNumber(upgrade_to_float, name="each"))


@pytest.mark.parametrize(
    ("mean", "words"),
    [
        (lambda b, x: Hidden()(b), r"Hidden reaches records and may hold data"),
        (lambda b, x: EACH(b), r"HiddenNumber reaches records"),
        (lambda b, x: wrapped(b), r"Hidden reaches records"),
        (lambda b, x: b * EACH(x), r"HiddenNumber reaches records"),
        (lambda b, x: EACH(b * x), r"HiddenNumber reaches records"),
    ],
)
def test_an_operation_whose_code_is_not_seen_reaches_no_record(mean, words) -> None:
    with pm.Model() as model:
        pm.Normal("y", mean(pm.Normal("b"), pm.Data("x", DATA.x)), 1.0, observed=DATA.real)
    with pytest.raises(NotFactorizable, match=words):
        extract(model, check=False)


# -- models made to deceive ------------------------------------------------------------------------

DATA = Data()
AS_TENSOR = pt.as_tensor_variable(DATA.x)
PERSON = np.arange(DATA.n) // 2
OTHER_PERSON = np.random.default_rng(0).permutation(PERSON)


def centred_in_a_closure() -> None:
    def dist(b, size):
        return pm.Normal.dist(b * (AS_TENSOR - AS_TENSOR.mean()), 1.0)

    pm.CustomDist("y", pm.Normal("b"), dist=dist, observed=DATA.real)


def mean_in_a_closure() -> None:
    def dist(b, size):
        return pm.Normal.dist(b * AS_TENSOR.mean(), 1.0, size=size)

    pm.CustomDist("y", pm.Normal("b"), dist=dist, observed=DATA.real)


def mean_in_a_log_density() -> None:
    def logp(value, b):
        return pm.logp(pt.exp(pm.Normal.dist(b * AS_TENSOR.mean(), 1.0)), value)

    pm.CustomDist("y", pm.Normal("b"), logp=logp, observed=DATA.positive)


def maximum_in_a_mixture() -> None:
    def dist(mu, size):
        return pm.Normal.dist(mu + AS_TENSOR.max(), 1.0, size=size)

    parts = [
        pm.Normal.dist(pm.Normal("b"), 1.0, shape=(DATA.n,)),
        pm.CustomDist.dist(0.0, dist=dist, shape=(DATA.n,)),
    ]
    pm.Mixture("y", w=[0.4, 0.6], comp_dists=parts, observed=DATA.real)


def mean_in_a_prior() -> None:
    def logp(value, mu):
        return pm.logp(pm.Normal.dist(mu + AS_TENSOR.mean(), 1.0), value)

    pm.Normal("y", pm.CustomDist("b", 0.0, logp=logp), 1.0, observed=DATA.real)


def mean_of_another_layout() -> None:
    table = pt.as_tensor_variable(DATA.x.reshape(6, -1))
    pm.Normal("y", pm.Normal("b") * table.mean(), 1.0, observed=DATA.real)


def start_at_the_mean_of_data() -> None:
    x = pm.Data("x", DATA.x)
    pm.Normal("y", pm.Normal("b", initval=x.mean()) * x, 1.0, observed=DATA.real)


def start_at_the_mean_of_a_constant() -> None:
    pm.Normal("y", pm.Normal("b", initval=AS_TENSOR.mean()), 1.0, observed=DATA.real)


def rows_of_two_people() -> None:
    c = pm.Poisson("c", pt.exp(pm.Normal("a")), observed=DATA.count)
    pm.Normal("y", pm.Normal("b") * c, 1.0, observed=DATA.real)


def sum_over_the_first_axis() -> None:
    def logp(value, b):
        return -((value - b) ** 2).sum(0)

    square = np.random.default_rng(0).normal(size=(9, 9))
    pm.CustomDist("y", pm.Normal("b"), logp=logp, observed=square)


def rows_counted_by_data() -> None:
    k = pm.Data("k", np.array(1))
    label = pt.as_tensor_variable(2000 + DATA.choice) - 2000
    chosen = pt.as_tensor_variable(DATA.X)[pt.arange(k), label]
    pm.Normal("y", pm.Normal("b") * chosen, 1.0, observed=DATA.real)


DECEIVING: dict[str, tuple[Callable[[], None], str]] = {
    f.__name__: (f, words)
    for f, words in (
        (centred_in_a_closure, "`y`"),
        (mean_in_a_closure, "`y`"),
        (mean_in_a_log_density, "`y`"),
        (maximum_in_a_mixture, "`y`"),
        (mean_in_a_prior, "prior"),
        (mean_of_another_layout, "`y`"),
        (start_at_the_mean_of_data, "initial value or prior of `b`"),
        (start_at_the_mean_of_a_constant, "initial value or prior of `b`"),
        (rows_of_two_people, "`c`"),
        (sum_over_the_first_axis, "first axis"),
        (rows_counted_by_data, "`y`"),
    )
}


@pytest.mark.parametrize("name", DECEIVING)
def test_models_made_to_deceive_are_refused(name):
    declare, words = DECEIVING[name]
    with pm.Model() as model:
        declare()
    options: dict[str, Any] = {}
    if name == "rows_of_two_people":
        options["privacy_unit"] = {"c": OTHER_PERSON, "y": PERSON}
    with pytest.raises((NotFactorizable, UnsafeModel), match=words):
        extract(model, **options)
    if name == "rows_of_two_people":  # with the same people in both it is a model like others
        extract(model, privacy_unit={"c": PERSON, "y": PERSON})


def linear_probabilities() -> None:
    a = pm.Normal("a")
    size = np.abs(DATA.x)
    pm.Categorical(
        "y", p=pt.stack([0.5 + a * size, 0.5 - a * size], 1), observed=np.zeros(DATA.n, int)
    )


def cutpoints_out_of_order() -> None:
    pm.OrderedLogistic(
        "y", eta=0.0 * DATA.x, cutpoints=pm.Normal("c", 0, 1, shape=2), observed=DATA.choice
    )


@pytest.mark.parametrize(
    ("declare", "theta"), [(linear_probabilities, [5.0]), (cutpoints_out_of_order, [1.0, -1.0])]
)
def test_impossible_parameters_are_impossible_and_not_uninformative(declare, theta):
    with pm.Model() as model:
        declare()
    records = extract(model, check=False)
    d = records.parameters.size
    engine = RowEngine.of(records, Coordinates(np.zeros(d), np.eye(d)), {"mode": "FAST_COMPILE"})
    values = engine.log_likelihood(np.asarray(theta))
    assert not np.isnan(values).any()
    assert np.isneginf(values).any()


def test_a_prior_outside_of_its_support_is_no_error():
    with pm.Model() as model:
        pm.Gamma("g", alpha=pm.Normal("a"), beta=1.0)
        pm.Normal("y", pm.Normal("b"), 1.0, observed=DATA.real)
    coordinates = Coordinates(np.zeros(3), np.eye(3))
    terms = PublicTerms.of(extract(model), coordinates, {"mode": "FAST_COMPILE"})
    assert terms.log_density(np.array([-0.5, 0.0, 0.0])) == -np.inf


def test_sizes_and_public_data_may_stand_behind_a_prior():
    with pm.Model(coords={"effect": ["one", "two", "three"]}) as model:
        centre = pm.Data("centre", np.arange(3.0), dims="effect")
        beta = pm.Normal("beta", centre, 1.0, dims="effect")
        pm.Normal("y", pt.as_tensor_variable(DATA.X) @ beta, 1.0, observed=DATA.real)
    assert extract(model, public=["centre"]).initial.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(UnsafeModel, match="centre"):
        extract(model)
