"""Data frames as people have them: what works, and what is said where it does not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.base.columns import numbers
from pymc_dp.records.units import codes_of_ids
from tests.test_wrong_inputs import refused
from tests.workflow.test_predicting import predicted, released

pytestmark = [
    pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning"),
]

N = 60
RNG = np.random.default_rng(7)
AGE = RNG.integers(20, 60, N)
INCOME = RNG.normal(size=N)
SITES = ["north", "south", "west"]
SITE = RNG.integers(0, 3, N)
PEOPLE = np.array([f"mallory {k // 2}" for k in range(N)])
FRAME = pd.DataFrame(
    {
        "age": AGE,
        "years": pd.array(AGE, dtype="Int64"),
        "income": INCOME,
        "wage": pd.array(INCOME, dtype="Float64"),
        "well": SITE == 0,
        "happy": pd.array(SITE == 1, dtype="boolean"),
        "site": pd.Categorical.from_codes(SITE, SITES),
        "person": PEOPLE,
        "seen": pd.Timestamp("2020-01-01") + pd.to_timedelta(AGE, "D"),
    },
    index=RNG.permutation(N),
)
POLARS = ("age", "income", "well")


def polars_frame() -> Any:
    polars = pytest.importorskip("polars")
    return polars.DataFrame({name: FRAME[name].to_numpy() for name in (*POLARS, "person")})


def frames() -> list[tuple[Any, str]]:
    """Columns of numbers, of each library."""
    wanted = ("age", "years", "income", "wage", "well", "happy")
    return [(FRAME, name) for name in wanted] + [(None, name) for name in POLARS]


# -- in a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("frame", "name"), frames())
@pytest.mark.parametrize("role", ["data", "observed", "array"])
def test_columns_of_numbers_are_records(frame: Any, name: str, role: str) -> None:
    column = (polars_frame() if frame is None else frame)[name]
    with pm.Model() as model:
        b = pm.Normal("b")
        if role == "data":
            pm.Normal("y", b * pm.Data("x", column), 1.0, observed=INCOME)
        elif role == "array":
            pm.Normal("y", b * column.to_numpy().astype(float), 1.0, observed=INCOME)
        else:
            pm.Normal("y", b, 1.0, observed=column)
        budget = dp.PrivacyBudget(5.0, 1e-4)
    [group] = budget.records_of(model).groups
    expected = np.asarray(column.to_numpy(), dtype="float64")
    assert any(np.array_equal(array, expected) for array in group.store.read())


def test_a_frame_is_a_matrix_of_records() -> None:
    with pm.Model() as model:
        x = pm.Data("x", FRAME[["years", "income", "well"]])
        dp.bounds(x=([20, -1, 0], [50, 1, 1]))
        pm.Normal("y", x @ pm.Normal("b", shape=3), 1.0, observed=FRAME["wage"])
        budget = dp.PrivacyBudget(5.0, 1e-4)
    arrays = budget.records_of(model).groups[0].store.read()
    clamped = np.clip(np.c_[AGE, INCOME, SITE == 0], [20, -1, 0], [50, 1, 1])
    assert any(np.array_equal(array, clamped) for array in arrays)


def missing_codes() -> Any:
    site = FRAME["site"].where(FRAME["age"] > FRAME["age"].min())
    pm.Normal("y", pm.Normal("a", shape=3)[pm.Data("s", site.cat.codes)], 1.0, observed=INCOME)


def missing_outcomes() -> Any:
    pm.Normal("y", pm.Normal("a"), 1.0, observed=FRAME["wage"].mask(FRAME["age"] > 55))


def missing_covariates() -> Any:
    x = FRAME["wage"].mask(FRAME["age"] > 55).to_numpy("float64", na_value=np.nan)
    pm.Normal("y", pm.Normal("a") * x, 1.0, observed=INCOME)


def nulls() -> Any:
    polars = pytest.importorskip("polars")
    x = pm.Data("x", polars.Series([None, *INCOME[1:]]))
    pm.Normal("y", pm.Normal("a") * x, 1.0, observed=INCOME)


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (missing_codes, ("outside 0..2", "pandas codes a missing category as -1")),
        (missing_outcomes, ("`y_unobserved`", "missing values")),
        (missing_covariates, ("the data of `y`", "NaN")),
        (nulls, ("`x`", "NaN")),
    ],
)
def test_missing_values_are_refused_before_anything_is_spent(
    declare: Callable[[], Any], words: tuple[str, ...]
) -> None:
    with pm.Model() as model:
        declare()
    if declare is missing_outcomes:  # there are two variables then, and ids fit neither
        with refused(dp.NotFactorizable, *words):
            dp.PrivacyBudget(5.0, 1e-4, privacy_unit=PEOPLE, model=model)
        return
    dp.PrivacyBudget(5.0, 1e-4, model=model)
    with refused(dp.UnsafeModel, *words):
        dp.laplace(10, model=model, progressbar=False)


def test_bounds_by_column_are_in_one_order() -> None:
    low = pd.Series({"age": 20, "income": -1})
    with pm.Model():
        pm.Data("x", FRAME[["age", "income"]])
        with refused(ValueError, "bounds of `x`", "two orders"):
            dp.bounds(x=(low, pd.Series({"income": 1, "age": 60})))
        dp.bounds(x=(low, pd.Series({"age": 60, "income": 1})))


# -- ids ------------------------------------------------------------------------------------------

INTEGERS = np.arange(N) // 2
IDS: dict[str, Any] = {
    "integers": pd.Series(INTEGERS),
    "nullable integers": pd.Series(INTEGERS, dtype="Int64"),
    "large integers": pd.Series(2**60 + INTEGERS, dtype="Int64"),
    "text": FRAME["person"],
    "an array of text": PEOPLE,
    "a list": PEOPLE.tolist(),
    "categories": FRAME["person"].astype("category"),
    "dates": pd.Series(pd.Timestamp("2020-01-01") + pd.to_timedelta(INTEGERS, "D")),
    "days": [date(2020, 1 + k // 20, 1 + k % 20) for k in INTEGERS],
    "pairs": pd.Series([("home", k) for k in INTEGERS]),
    "UUIDs": [UUID(int=int(k)) for k in INTEGERS],
    "polars": None,
}


@pytest.mark.parametrize("kind", IDS)
def test_ids_of_any_kind_tell_units_apart(kind: str) -> None:
    ids = polars_frame()["person"] if kind == "polars" else IDS[kind]
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("a"), 1.0, observed=INCOME)
        budget = dp.PrivacyBudget(5.0, 1e-4, privacy_unit=ids)
    assert (budget.n_units, budget.unit) == (N // 2, "unit (all rows with one id)")
    [group] = budget.records_of(model).groups
    assert group.units is not None
    np.testing.assert_array_equal(group.units, INTEGERS)
    assert b"mallory" not in np.concatenate(list(budget.privacy_unit.values())).tobytes()


def test_ids_of_two_tables_are_those_of_the_same_people() -> None:
    visits = pd.Series([*PEOPLE[::-1], "mallory 3", "eve"]).astype("category")
    with pm.Model():
        a = pm.Normal("a")
        pm.Normal("y", a, 1.0, observed=INCOME)
        pm.Normal("visits", a, 1.0, observed=np.r_[INCOME, 1.0, 2.0])
        budget = dp.PrivacyBudget(5.0, 1e-4, privacy_unit={"y": PEOPLE, "visits": visits})
    assert budget.n_units == N // 2 + 1
    one, other = (budget.privacy_unit[name] for name in ("y", "visits"))
    np.testing.assert_array_equal(one[::-1], other[:N])
    assert other[N] == one[6]
    assert other[N + 1] not in one


WRONG_IDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "missing text": (FRAME["person"].mask(FRAME["age"] > 55), ("lacks the ids of some rows",)),
    "missing numbers": (pd.Series(INTEGERS).mask(INTEGERS > 20), ("lacks the ids of some rows",)),
    "None": ([None, *PEOPLE[1:]], ("lacks the ids of some rows",)),
    "reals": (pd.Series(INTEGERS, dtype="float64"), ("of type float", ".astype('int64')")),
    "truth values": (FRAME["well"], ("of type bool",)),
    "mixed": ([7, *PEOPLE[1:]], ("several kinds (int, str)", "astype(str)")),
    "lists": (pd.Series([[k] for k in INTEGERS]), ("of type list",)),
    "a frame": (FRAME[["person"]], ("one vector of ids", "df['person']", "DataFrame with 2")),
    "a name": ("person", ("one vector of ids", "df['person']", "str with 0 axes")),
    "fewer": (PEOPLE[:-1], ("one id for each row of `y`", "another length")),
}


@pytest.mark.parametrize("kind", WRONG_IDS)
def test_wrong_ids(kind: str) -> None:
    ids, words = WRONG_IDS[kind]
    with pm.Model():
        pm.Normal("y", pm.Normal("a"), 1.0, observed=INCOME)
        with refused(ValueError, "privacy_unit of `y`", *words):
            dp.PrivacyBudget(5.0, 1e-4, privacy_unit=ids)


def test_ids_that_are_numbers_here_and_text_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`y`, `visits` has ids of several kinds \(int, str\)"):
        codes_of_ids({"y": INTEGERS, "visits": pd.Series(INTEGERS).astype(str)})


# -- statistics of a frame ------------------------------------------------------------------------


def statistic(data: Any) -> float:
    """The sum of all columns, each row clamped to [0, 60], with noise of scale 0.06."""
    found = dp.release_statistic(
        data,
        lambda **x: sum(x.values()),
        (0, 60),
        "laplace",
        dp.Ledger.temporary("replace_one"),
        epsilon=1000.0,
        progressbar=False,
    )
    return found.observed[0]


#: Passed by Laplace noise of scale 0.06 with a probability of e^-25.
NOISE = 25 * 0.06


@pytest.mark.parametrize(("frame", "name"), frames())
def test_columns_of_numbers_have_statistics(frame: Any, name: str) -> None:
    column = (polars_frame() if frame is None else frame)[name]
    expected = np.clip(np.asarray(column.to_numpy(), dtype="float64"), 0, 60).sum()
    assert abs(statistic({"x": column}) - expected) < NOISE


def test_a_frame_has_a_statistic_and_rows_without_values_count_as_zeros() -> None:
    kept = FRAME["age"] <= 40
    data = pd.DataFrame({"x": FRAME["years"].where(kept), "y": FRAME["happy"]})
    expected = (FRAME["age"] + FRAME["happy"])[kept].sum()
    assert abs(statistic(data) - expected) < NOISE


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (FRAME["site"], ("labels", "pd.Categorical")),
        (FRAME["person"], ("labels", "pd.Categorical")),
        (FRAME["seen"], ("dates", "dt.days")),
        (FRAME["seen"] - FRAME["seen"].iloc[0], ("time differences", "total_seconds")),
        (FRAME["age"].astype(object), ("labels or other objects", "to_numpy('float64')")),
        (np.ma.masked_greater(AGE, 50), ("masked array",)),
        (AGE.tolist(), ("an array or a column",)),
    ],
)
def test_other_columns_have_no_statistic(column: Any, words: tuple[str, ...]) -> None:
    with refused(ValueError, "data['x']", *words):
        statistic({"x": column})


@pytest.mark.parametrize("names", [["x", "x"], [1, "1"]])
def test_columns_of_one_name_are_refused(names: list[Any]) -> None:
    frame = pd.DataFrame(np.zeros((3, 2)), columns=names)
    for use in (statistic, lambda frame: numbers("new['x']", frame)):
        with refused(ValueError, f"['{names[1]}'] some have one name"):
            use(frame)


def test_types_of_polars() -> None:
    polars = pytest.importorskip("polars")
    for values in ([1, None, 3], [True, None, False], [0.5, None, 1.0]):
        found = numbers("x", polars.Series(values))
        np.testing.assert_array_equal(found, [float(values[0]), np.nan, float(values[2])])
    for values in (["a", "b"], [date(2020, 1, 1)], [[1], [2]]):
        with pytest.raises(ValueError, match=r"x holds (labels|dates)"):
            numbers("x", polars.Series(values))


# -- predictions at rows of a frame ---------------------------------------------------------------


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_predictions_at_rows_of_a_frame(library: str) -> None:
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=3), pm.Normal("b")
        codes = pm.Data("site", FRAME["site"].cat.codes.to_numpy("int64"))
        mean = a[codes] + b * pm.Data("age", FRAME["years"]) * pm.Data("well", FRAME["well"])
        pm.Normal("y", mean, 0.01, observed=FRAME["income"])
        dp.PrivacyBudget(5.0, 1e-4)
    draws = released(model, a=[0.0, 10.0, 20.0], b=1.0)
    new = pd.DataFrame({"site": [0, 2], "age": [30, 40], "well": [True, False]})
    new["age"] = new["age"].astype("Int64")
    if library == "polars":
        new = pytest.importorskip("polars").DataFrame(new.to_dict("list"))
    found = dp.predict(draws, new, model=model, progressbar=False)
    np.testing.assert_allclose(predicted(found).mean((0, 1)), [30.0, 20.0], atol=0.1)
    labelled = {"site": pd.Series(["north", "west"], dtype="category")}
    for wrong, words in (
        ({**labelled, "age": [1, 2], "well": [True, True]}, ("new['site']", "pd.Categorical")),
        ({"site": [0, 1], "age": [1.5, 2.0], "well": [True, True]}, ("new['age']", "whole")),
        ({"site": [0, 1], "age": [1, 2], "well": [0.0, 2.0]}, ("new['well']", "True or False")),
        ({"site": [0], "age": pd.array([None], "Int64"), "well": [True]}, ("['age'] holds NaN",)),
        (
            pd.DataFrame({"site": [0], "age": [1], "well": [True], "x": [1]}),
            ("['x']", "no pm.Data"),
        ),
    ):
        with refused(ValueError, *words):
            dp.predict(draws, wrong, model=model, progressbar=False)
    assert "y" in _compat.group(found, "predictions")
