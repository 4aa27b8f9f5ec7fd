"""Where the number of rows is secret, nothing that is decided from the graph depends on it.

Nor does a prior, a shape, an initial value or a likelihood that is public for all else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.model.transform.optimization import freeze_dims_and_data

import pymc_dp as dp
from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.extraction import extract
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.rows.predictor import recognise
from pymc_dp.tuning.effects import effects_of
from tests.selection import marked, others

GROUPS, USERS = 40, 30
#: Forms are compared, not bits: compiled functions would take most of the time.
QUICK = {"mode": INTERPRETED}


def noncentred(group: Any, y: np.ndarray) -> None:
    mu = pm.Normal("mu", 0.0, 1.0)
    tau = pm.HalfNormal("tau", 1.0)
    z = pm.Normal("z", 0.0, 1.0, shape=GROUPS)
    pm.Normal("y", (mu + tau * z)[group], 1.0, observed=y)


def transformed(group: Any, y: np.ndarray) -> None:
    a = pm.Normal("a", 0.0, 1.0, shape=GROUPS)
    pm.Poisson("y", pt.exp(a)[group], observed=np.abs(y).round().astype(int))


def constant_labels(group: Any, y: np.ndarray) -> None:
    a = pm.Normal("a", 0.0, 1.0, shape=GROUPS)
    b = pm.Normal("b", 0.0, 1.0)
    pm.Bernoulli("y", logit_p=b * a[group], observed=(y > 0).astype(int))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("declare", "data"),
    [
        (noncentred, False),
        (transformed, True),
        (constant_labels, False),
        *(
            pytest.param(*other, marks=pytest.mark.exhaustive)
            for other in [(noncentred, True), (transformed, False), (constant_labels, True)]
        ),
    ],
)
def test_form_of_the_likelihood(declare: Any, data: bool) -> None:
    """One user with 5, 9 or 50 rows more, below and above the number of groups."""
    found = []
    for more in (5, 9, 11, 50):
        rng = np.random.default_rng(0)
        unit = np.r_[np.arange(USERS), np.zeros(more, dtype=int)]
        group = np.r_[rng.integers(0, GROUPS, USERS), np.zeros(more, dtype=int)]
        y = np.r_[rng.normal(size=USERS), np.zeros(more)]
        with pm.Model() as model:
            declare(pm.Data("group", group) if data else group, y)
        records = extract(model, privacy_unit=unit, check=False)
        d = records.parameters.size
        engine = RowEngine.of(records, Coordinates(np.zeros(d), np.eye(d)), QUICK)
        drawn = np.random.default_rng(1).normal(0.0, 0.7, (50, d))
        effects = effects_of(records, engine, drawn, QUICK)
        graph = records.groups[0].graph
        found.append(
            (
                [(cut.kind, cut.phi.type.ndim) for cut in graph.cuts],
                [jacobian is None for jacobian in engine.groups[0].functions.constant_jacobians],
                None if effects is None else effects.engine.d,
                recognise(engine, QUICK)[1],
            )
        )
    assert all(one == found[0] for one in found)


# -- numbers of rows, in whatever way they are counted --------------------------------------------

ROWS, COLUMNS = 37, 3
SECRET = {"units": {"privacy_unit": np.arange(ROWS) // 2}, "rows": {"count_is_private": True}}

Number = Callable[[Any, Any], Any]


def labels_of(y: Any) -> Any:
    return pt.cast(pt.gt(y, 0.0), "int64")


COUNTS: dict[str, Number] = {
    "shape": lambda y, x: y.shape[0],
    "size": lambda y, x: x.size,
    "first_sizes": lambda y, x: pt.prod(x.shape[:-1]),
    "part": lambda y, x: y[1:].shape[0],
    "strided": lambda y, x: y[::2].shape[0],
    "stride": lambda y, x: pt.zeros(1000)[:: y.shape[0]].shape[0],
    "rest": lambda y, x: pt.zeros(5040).reshape((y[1:].shape[0], -1)).shape[1],
    "cut_off": lambda y, x: pt.zeros(60)[: y[1:].shape[0]].shape[0],
    "joined": lambda y, x: pt.concatenate([y, y]).shape[0],
    "reshaped": lambda y, x: x.reshape((-1,)).shape[0],
    "flattened": lambda y, x: pt.cumsum(x.T).shape[0],
    "ones": lambda y, x: pt.sum(pt.ones_like(y)),
    "zeros": lambda y, x: pt.sum(pt.zeros_like(y) + 1.0),
    "cumulative": lambda y, x: pt.cumsum(pt.ones_like(y))[-1],
    "outer": lambda y, x: pt.sum(pt.outer(pt.ones_like(y), pt.ones(2))),
    "product": lambda y, x: (pt.ones_like(x).T @ pt.ones_like(x))[0, 0],
    "largest": lambda y, x: pt.max(pt.arange(y.shape[0])),
    "last": lambda y, x: pt.concatenate([pt.zeros_like(y), pt.arange(5.0)])[-1],
    "labelled": lambda y, x: pt.zeros((5, 2))[labels_of(y)].shape[0],
    "one_of_several": lambda y, x: pt.stack([x.shape[1], y.shape[0]])[-1],
    "threshold": lambda y, x: pt.switch(y.shape[0] > 30, 2.0, 1.0),
}
WIDTHS: dict[str, Number] = {
    "shape": lambda y, x: x.shape[1],
    "shapes": lambda y, x: pt.prod(x.shape[1:]),
    "transposed": lambda y, x: x.T.shape[0],
    "ones": lambda y, x: pt.sum(pt.ones_like(x[0])),
    "eye": lambda y, x: pt.sum(pt.eye(x.shape[-1])),
    "labelled": lambda y, x: pt.zeros((5, 2))[labels_of(y)].shape[1],
    "one_of_several": lambda y, x: pt.stack([y.shape[0], x.shape[1]])[1],
    "product": lambda y, x: pt.sum(pt.ones((1, x.shape[1])) @ pt.ones((x.shape[1], 1))),
}


def in_the_prior(y: Any, x: Any, number: Any) -> None:
    pm.Normal("y", pm.Normal("b", 0.0, 1.0 + number), 1.0, observed=y)


def in_the_likelihood(y: Any, x: Any, number: Any) -> None:
    pm.Normal("y", pm.Normal("b"), 1.0 + number, observed=y)


def in_the_predictor(y: Any, x: Any, number: Any) -> None:
    b = pm.Normal("b", shape=COLUMNS)
    pm.Normal("y", x @ (b * number), 1.0, observed=y)


def in_the_shape(y: Any, x: Any, number: Any) -> None:
    b = pm.Normal("b", shape=(pt.cast(number, "int64") + 1,))
    pm.Normal("y", b[0], 1.0, observed=y)


def in_the_initial_value(y: Any, x: Any, number: Any) -> None:
    b = pm.Normal("b", initval=pt.cast(number, "float64"))
    pm.Normal("y", b, 1.0, observed=y)


PLACES = (in_the_prior, in_the_likelihood, in_the_predictor, in_the_shape, in_the_initial_value)


def counting(
    place: Callable[..., None], number: Number, data: bool, known: bool = False
) -> pm.Model:
    rng = np.random.default_rng(0)
    y, x = rng.normal(size=ROWS), rng.normal(size=(ROWS, COLUMNS))
    with pm.Model() as model:
        if data:
            rows = pm.Data("rows", y, shape=y.shape if known else None)
            columns = pm.Data("columns", x, shape=x.shape if known else None)
        else:
            rows, columns = pt.as_tensor(y), pt.as_tensor(x)
        place(rows if data else y, columns, number(rows, columns))
    return model


def refuse_as_secret(model: pm.Model, **options: Any) -> str:
    """The message of the refusal, which names no private number."""
    with pytest.raises((dp.UnsafeModel, dp.NotFactorizable), match="number of rows") as refused:
        extract(model, check=False, **options)
    text = str(refused.value)
    assert re.search(r"\d", text) is None
    assert "Use a public constant" in text
    return text


COUNTED = list(itertools.product(COUNTS, PLACES))
#: Every number in two places, and every place with many numbers.
FIRST = [
    (name, PLACES[(k + step) % len(PLACES)]) for k, name in enumerate(COUNTS) for step in (0, 2)
]


@pytest.mark.parametrize(
    ("name", "place", "data"),
    [
        pytest.param(
            name,
            place,
            data,
            id=f"{name}-{place.__name__}-{'data' if data else 'numpy'}",
            marks=() if (name, place) in FIRST and (k + data) % 2 else pytest.mark.exhaustive,
        )
        for k, (name, place) in enumerate(COUNTED)
        for data in (False, True)
    ],
)
def test_a_number_of_rows_is_refused_where_it_is_secret(name: str, place: Any, data: bool) -> None:
    model = counting(place, COUNTS[name], data)
    text = refuse_as_secret(model, **SECRET["rows"])
    assert "`rows`" in text or "`columns`" in text or not data
    assert "`y`" in text or "`b`" in text or place is in_the_prior
    refuse_as_secret(model, **SECRET["units"])


@pytest.mark.parametrize(("name", "place"), marked(COUNTED, exhaustive=others(COUNTED, FIRST[::2])))
def test_a_length_that_is_part_of_a_type_is_no_number(name: str, place: Any) -> None:
    """PyTensor would put it into the graph while the likelihood is derived."""
    refuse_as_secret(counting(place, COUNTS[name], data=True, known=True), **SECRET["rows"])


@pytest.mark.parametrize("where", ["prior", "likelihood"])
@pytest.mark.parametrize("less", [0, 1])
def test_lengths_of_dims_are_no_numbers_even_when_frozen(where: str, less: int) -> None:
    rng = np.random.default_rng(0)
    with pm.Model(coords={"record": range(ROWS)}) as model:
        scale = 1.0 / pt.sqrt(model.dim_lengths["record"] - less)
        b = pm.Normal("b", 0.0, scale if where == "prior" else 1.0)
        sd = scale if where == "likelihood" else 1.0
        pm.Normal("y", b, sd, observed=rng.normal(size=ROWS), dims="record")
    for each in (model, freeze_dims_and_data(model)):
        with pytest.raises((dp.UnsafeModel, dp.NotFactorizable)):
            extract(each, check=False, **SECRET["rows"])


def test_a_number_that_equals_that_of_users_or_rows_is_accepted() -> None:
    """It may be public; and a refusal would tell that it equals a secret."""
    users = np.arange(ROWS) // 2
    for levels in (users.max() + 1, ROWS, ROWS + 1):
        with pm.Model(coords={"level": range(levels)}) as model:
            a = pm.Normal("a", 0.0, 1.0 / levels, dims="level")
            pm.Normal("y", a[users], 1.0, observed=np.zeros(ROWS))
        for options in ({}, {"privacy_unit": users}, {"count_is_private": True}):
            extract(model, check=False, n_public=200, **options)


@pytest.mark.parametrize("data", [False, True], ids=["numpy", "data"])
def test_a_category_of_reference_counts_no_rows(data: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, COLUMNS))
    with pm.Model() as model:
        rows = pm.Data("rows", x) if data else pt.as_tensor(x)
        first = pt.zeros((rows.shape[0], 1))
        eta = pt.concatenate([first, rows @ pm.Normal("b", shape=(COLUMNS, 2))], axis=1)
        pm.Categorical("y", logit_p=eta, observed=rng.integers(0, 3, ROWS))
    for options in SECRET.values():
        extract(model, check=False, **options)


@pytest.mark.parametrize("data", [False, True], ids=["numpy", "data"])
def test_several_outcomes_of_a_record_count_no_rows(data: bool) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, COLUMNS)), rng.normal(size=(ROWS, 3))
    with pm.Model() as model:
        rows = pm.Data("rows", x) if data else x
        mean = rows @ pm.Normal("b", shape=(COLUMNS, 3))
        pm.Normal("y", mean, 1.0, observed=pm.Data("outcomes", y) if data else y)
    for options in SECRET.values():
        extract(model, check=False, **options)


@pytest.mark.parametrize("data", [False, True], ids=["numpy", "data"])
def test_effects_of_groups_on_categories_count_no_rows(data: bool) -> None:
    rng = np.random.default_rng(0)
    group, y = rng.integers(0, 3, ROWS), rng.integers(0, 4, ROWS)
    with pm.Model() as model:
        effects = pm.Normal("a", shape=(3, 4))
        p = pm.math.softmax(effects[pm.Data("group", group) if data else group], axis=-1)
        pm.Categorical("y", p=p, observed=y)
    for options in SECRET.values():
        extract(model, check=False, **options)


@pytest.mark.parametrize("data", [False, True], ids=["numpy", "data"])
@pytest.mark.parametrize("place", PLACES)
def test_a_number_of_rows_is_a_number_where_it_is_public(place: Any, data: bool) -> None:
    name = ["shape", "part", "ones"][PLACES.index(place) % 3]
    extract(counting(place, COUNTS[name], data), check=False)


def places_of_widths() -> list[Any]:
    """Every number in one place and every place with one number; others before a version."""
    crossed = list(itertools.product(WIDTHS, PLACES))
    first = [
        *((name, PLACES[k % len(PLACES)]) for k, name in enumerate(WIDTHS)),
        *(("shapes", place) for place in PLACES),
    ]
    return marked(crossed, exhaustive=others(crossed, first))


@pytest.mark.parametrize(("name", "place"), places_of_widths())
def test_a_number_of_columns_is_public(name: str, place: Any) -> None:
    """And what is computed with it does not depend on the number of rows."""
    data = (list(WIDTHS).index(name) + PLACES.index(place)) % 2 == 1
    model = counting(place, WIDTHS[name], data)
    known, secret = extract(model, check=False), extract(model, check=False, **SECRET["rows"])
    d = known.parameters.size
    at = Coordinates(np.zeros(d), np.eye(d))
    theta = np.full(d, 0.3)
    assert np.array_equal(known.initial, secret.initial)
    assert PublicTerms.of(known, at).log_density(theta) == pytest.approx(
        PublicTerms.of(secret, at).log_density(theta), rel=1e-12
    )


def shape_of_the_rows(y: Any) -> None:
    pm.Normal("b", shape=(y.shape[0],))


def implied_by_a_scale(y: Any) -> None:
    pm.Normal("b", 0.0, pt.ones_like(y[1:]))


def implied_by_a_column(y: Any) -> None:
    pm.Normal("b", pt.zeros_like(y)[:, None], 1.0)


def of_a_simplex(y: Any) -> None:
    pm.Dirichlet("b", pt.ones_like(y))


def with_a_start(y: Any) -> None:
    pm.Normal("b", shape=(y.shape[0] - 30,), initval=np.zeros(ROWS - 30))


def of_a_dimension(y: Any) -> None:
    pm.Normal("b", dims="row")


def scaled_by_a_dimension(y: Any) -> None:
    pm.Normal("b", 0.0, 1.0 / pt.sqrt(pm.modelcontext(None).dim_lengths["row"]))


@pytest.mark.parametrize("data", [False, True], ids=["numpy", "data"])
@pytest.mark.parametrize(
    "declare",
    [
        shape_of_the_rows,
        implied_by_a_scale,
        implied_by_a_column,
        of_a_simplex,
        with_a_start,
        of_a_dimension,
        scaled_by_a_dimension,
    ],
)
def test_shapes_of_parameters_do_not_count_rows(declare: Any, data: bool) -> None:
    y = np.random.default_rng(0).normal(size=ROWS)
    with pm.Model(coords=None if data else {"row": range(ROWS)}) as model:
        rows = pm.Data("rows", y, dims="row") if data else pt.as_tensor(y)
        declare(rows)
        dims = "row" if declare in (of_a_dimension, scaled_by_a_dimension) else None
        pm.Normal("y", model["b"].flatten()[0], 1.0, observed=y, dims=dims)
    for options in SECRET.values():
        with pytest.raises(dp.UnsafeModel) as refused:
            extract(model, check=False, **options)
        assert "`b`" in str(refused.value)
        assert re.search(r"\d", str(refused.value)) is None


@pytest.mark.parametrize("free", [False, True], ids=["likelihood", "prior"])
@pytest.mark.parametrize("name", ["shape", "part", "size", "ones"])
def test_graphs_within_graphs_do_not_count_rows(name: str, free: bool) -> None:
    """Constants of a ``CustomDist`` are inside of its operation."""
    rng = np.random.default_rng(0)
    y, x = rng.normal(size=ROWS), rng.normal(size=(ROWS, COLUMNS))

    def dist(mu: Any, size: Any) -> Any:
        return pm.Normal.dist(mu, 1.0 + COUNTS[name](pt.as_tensor(y), pt.as_tensor(x)), size=size)

    with pm.Model() as model:
        b = pm.CustomDist("b", 0.0, dist=dist) if free else pm.Normal("b")
        if free:
            pm.Normal("y", b, 1.0, observed=y)
        else:
            pm.CustomDist("y", b, dist=dist, observed=y)
    extract(model, check=False)
    refuse_as_secret(model, **SECRET["rows"])


@pytest.mark.parametrize(("place", "axis"), [("shape", 0), ("prior", 1), ("likelihood", 1)])
def test_dims_of_covariates_count_rows(place: str, axis: int) -> None:
    """Also where the outcome has no dims, and on whatever axis rows stand; other axes do not."""
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    with pm.Model(coords={"row": range(ROWS), "column": ["a", "b"]}) as model:
        dims = ("column", "row") if axis else ("row", "column")
        data = pm.Data("x", x.T if axis else x, dims=dims)
        b = pm.Normal("b", dims="column")
        number = model.dim_lengths["row"].astype("float64")
        a = pm.Normal("a", 0.0, number if place == "prior" else 1.0)
        if place == "shape":
            a = pm.Normal("each", dims="row").sum()
        a = a + number if place == "likelihood" else a
        pm.Normal("y", a + (b @ data if axis else data @ b), 1.0, observed=np.zeros(ROWS))
    for options in SECRET.values():
        with pytest.raises((dp.UnsafeModel, dp.NotFactorizable), match="`row`") as refused:
            extract(model, check=False, **options)
        assert re.search(r"\d", str(refused.value)) is None
    with pm.Model(coords=model.coords) as fine:
        data = pm.Data("x", x.T if axis else x, dims=dims)
        b = pm.Normal("b", 0.0, fine.dim_lengths["column"].astype("float64"), dims="column")
        pm.Normal("y", b @ data if axis else data @ b, 1.0, observed=np.zeros(ROWS))
    for options in SECRET.values():
        extract(fine, check=False, **options)


def test_nothing_is_spent_on_a_shape_that_counts_rows() -> None:
    """The shape of a released array would tell how many rows a user has."""
    rng = np.random.default_rng(1)
    n = 403
    with pm.Model():
        y = pm.Data("rows", rng.normal(size=n))
        a = pm.Normal("a", 0.0, 1.0, shape=(y.shape[0] - 399,))
        pm.Normal("y", a[rng.integers(0, 4, n)], 1.0, observed=y)
        budget = dp.PrivacyBudget(4.0, 1e-6, privacy_unit=np.r_[np.arange(400), 0, 0, 0])
        with pytest.raises(dp.UnsafeModel, match=r"shape of `a`.*number of rows of `rows`"):
            dp.laplace(10, progressbar=False)
    assert budget.spent().gdp_mu2 == 0


def test_a_mixture_with_as_many_components_as_records_is_refused_by_name() -> None:
    """PyMC cannot derive it without the lengths of its arrays."""
    rng = np.random.default_rng(0)
    with pm.Model() as model:
        weights = pt.special.softmax(rng.normal(size=(3, 3)) * pm.Normal("b", shape=3), axis=1)
        components = pm.Normal.dist(pt.as_tensor(np.arange(3.0)), 1.0)
        pm.Mixture("y", w=weights, comp_dists=components, observed=rng.normal(size=3))
    with pytest.raises(dp.NotFactorizable, match=r"`y`.*as a list"):
        extract(model)


@pytest.mark.parametrize("entries", [5, 60])
def test_whether_a_prior_is_refused_does_not_tell_how_many_units_there_are(entries: int) -> None:
    """An array without a name is as long as the data, or is not, by the public number of units."""
    told = []
    for n in (59, 60, 61, 400):
        with pm.Model() as model:
            a = pm.Normal("a", 0, np.linspace(1, 2, entries), shape=entries)
            pm.Normal("y", a.sum(), 1.0, observed=np.zeros(n))
            budget = dp.PrivacyBudget(20.0, 1e-5, neighboring="add_or_remove_one", n_public=100)
            try:
                extract(model, check=False, **budget.secrecy)
                told.append(True)
            except dp.UnsafeModel:
                told.append(False)
    assert told == [entries == 5] * 4


@pytest.mark.parametrize("n_public", [50, 100, 199])
def test_an_unnamed_array_as_long_as_the_data_is_private(n_public: int) -> None:
    """Of half the public number of units, that is, whatever the true one."""
    secret = pt.as_tensor(np.linspace(0, 1, 100))
    with pm.Model() as model:
        a = pm.Normal("a", secret.mean(), 1.0)
        pm.Normal("y", a, 1.0, observed=np.zeros(100))
        budget = dp.PrivacyBudget(20.0, 1e-5, neighboring="add_or_remove_one", n_public=n_public)
    with pytest.raises(dp.UnsafeModel):
        extract(model, check=False, **budget.secrecy)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("where", ["prior", "likelihood"])
def test_rows_are_not_counted_where_few_units_have_any(axis: int, where: str) -> None:
    """A constant in the place of a row is one of rows, however short, and on whatever axis."""
    rows, units = 12, 200
    x = np.random.default_rng(0).normal(size=(rows, 2))
    with pm.Model() as model:
        array = pt.as_tensor(np.array(x.T if axis else x))
        number = array.shape[axis].astype("float64")
        b = pm.Normal("b", 0.0, number if where == "prior" else 1.0, shape=2)
        sd = number if where == "likelihood" else 1.0
        pm.Normal("all", b[0], 1.0, observed=np.zeros(units))
        pm.Normal("some", b @ array if axis else array @ b, sd, observed=np.zeros(rows))
    refuse_as_secret(model, privacy_unit={"all": np.arange(units), "some": np.arange(rows)})


@pytest.mark.parametrize("n_public", [None, 100])
def test_what_is_refused_is_the_same_for_one_row_more(n_public: int | None) -> None:
    """A public grid of 50 points and a model with 49, 50 or 51 rows of one variable."""
    grid, units = np.linspace(0.0, 1.0, 50), 60
    for rows in (49, 50, 51):
        rng = np.random.default_rng(0)
        with pm.Model(coords={"point": grid}) as model:
            b = pm.Normal("b", 0.0, 1.0 + 0.1 * pt.as_tensor(grid).shape[0])
            pm.Deterministic("curve", b * grid, dims="point")
            pm.Normal("y1", b, 1.0 + grid.mean(), observed=rng.normal(size=units))
            pm.Normal("y2", b * pt.as_tensor(grid).sum(), 1.0, observed=rng.normal(size=rows))
        ids = {"y1": np.arange(units), "y2": np.arange(rows)}
        secrecy = {"count_is_private": n_public is not None, "n_public": n_public}
        if n_public is None:  # 60 units
            extract(model, check=False, privacy_unit=ids, **secrecy)
        else:
            with pytest.raises(dp.UnsafeModel, match="prior or shape of `b`"):
                extract(model, check=False, privacy_unit=ids, **secrecy)


@pytest.mark.parametrize(("rows", "as_data"), [(100, True), (101, False), (101, True)])
def test_steps_are_built_however_many_rows_a_unit_brings(rows: int, as_data: bool) -> None:
    """Coords as long as the rows of one world are no reason to refuse the other."""
    ids = np.append(np.repeat(np.arange(50), 2), np.zeros(rows - 100, int))
    y = np.random.default_rng(0).normal(size=rows)
    with pm.Model(coords={"row": range(100)}):
        observed = pm.Data("data", y, dims="row") if as_data else y
        pm.Normal("y", pm.Normal("b"), 1.0, observed=observed, dims="row")
        dp.PrivacyBudget(2.0, 1e-6, privacy_unit=ids)
        dp.DPPenalty(draws=20, chains=1, clip_norm=1.0, scaling=0.1, step_size=0.1)
