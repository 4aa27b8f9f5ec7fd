"""Public bounds: what is clamped, and advice that reads no record."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
import xarray as xr

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.publication.publish import STATEMENT, make_statement
from pymc_dp.records.bounds import clamp, declared_bounds
from pymc_dp.records.extraction import extract
from pymc_dp.records.units import RecordStore
from tests.models import GROUPS, Data, coefficients

DATA = Data()
# each budget here is on the same made-up data, under a ledger of its own
pytestmark = pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning")


def regression(X: Any = DATA.X, y: Any = DATA.binary) -> None:
    pm.Bernoulli("y", logit_p=pm.Data("X", X) @ coefficients(), observed=y)


def stored(model: pm.Model, **options: Any) -> dict[str, np.ndarray]:
    """The arrays that samplers would read, by name."""
    records = extract(model, check=False, **options)
    return {
        leaf.source.name: array
        for group in records.groups
        for leaf, array in zip(group.graph.leaves, group.store.read(), strict=True)
    }


# -- clamping -------------------------------------------------------------------------------------


def test_values_outside_are_clamped_by_column() -> None:
    wild = DATA.X.copy()
    wild[3] = [np.inf, -np.inf, 50.0]
    with pm.Model() as model:
        regression(wild)
        dp.bounds(X=([-1.0, -2.0, 0.0], [1.0, 2.0, np.inf]))
    found = stored(model)["X"]
    np.testing.assert_array_equal(found[3], [1.0, -2.0, 50.0])
    np.testing.assert_array_equal(found, np.clip(wild, [-1, -2, 0], [1, 2, np.inf]))
    np.testing.assert_array_equal(model["X"].get_value(), wild)


def test_observed_values_are_clamped_also_behind_a_cast() -> None:
    counts = DATA.count.astype("float64")
    counts[0] = 1e300
    with pm.Model() as model:
        mu = pt.exp(pm.Normal("a"))
        pm.Poisson("y", mu, observed=pm.Data("counts", counts))
        dp.bounds(y=(0, 4))
    assert stored(model)["counts"].max() == 4.0
    with pm.Model() as model:
        pm.Poisson("y", pt.exp(pm.Normal("a")), observed=DATA.count)
        dp.bounds({"y": (1, 3)})
    np.testing.assert_array_equal(stored(model)["y"], DATA.count.clip(1, 3))


def test_data_that_serve_two_likelihoods_are_clamped_in_both() -> None:
    with pm.Model() as model:
        X, b = pm.Data("X", DATA.X), coefficients()
        pm.Normal("y", X @ b, 1.0, observed=DATA.real)
        pm.Poisson("visits", pt.exp(X[:, 0] * b[0]), observed=DATA.other_count[: DATA.n])
        pm.Normal("z", b[1] * X[:, 1], 1.0, observed=DATA.x)
        dp.bounds(model, X=(-0.5, 0.5))
    records = extract(model, privacy_unit=dict.fromkeys(("y", "visits", "z"), DATA.person))
    arrays = [
        array
        for group in records.groups
        for leaf, array in zip(group.graph.leaves, group.store.read(), strict=True)
        if leaf.source is model["X"]
    ]
    assert len(arrays) == 3
    assert all(np.abs(array).max() <= 0.5 for array in arrays)


def test_labels_outside_are_clamped_and_no_error() -> None:
    group = DATA.group.copy()
    group[7] = 1000
    for limits in (None, (0, GROUPS - 1)):
        with pm.Model() as model:
            alpha = pm.Normal("alpha", shape=GROUPS)
            pm.Normal("y", alpha[pm.Data("group", group)], 1.0, observed=DATA.real)
            if limits is None:
                with pytest.raises(dp.UnsafeModel, match=r"outside 0\.\.3"):
                    extract(model)
            else:
                dp.bounds(group=limits)
                assert stored(model)["group"][7] == GROUPS - 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "float32"])
def test_clamping_keeps_the_type(dtype: str) -> None:
    data = np.array([0, 1, 100], dtype=dtype)
    for limits, expected in (((1, 50), [1, 1, 50]), ((-np.inf, np.inf), [0, 1, 100])):
        found = clamp(data, tuple(np.array(end, dtype="float64") for end in limits))
        assert found.dtype == data.dtype
        np.testing.assert_array_equal(found, expected)


def test_limits_of_single_precision_data_are_rounded_inwards() -> None:
    with pm.Model() as model:
        y = pytensor.shared(DATA.real.astype("float32"), name="single")
        pm.Normal("y", pm.Normal("b"), 1.0, observed=y)
        dp.bounds(y=(-0.1, 0.1))  # the nearest number of the type is larger
    found = stored(model)["single"]
    assert found.dtype == np.float32
    assert np.abs(found.astype("float64")).max() <= 0.1


def test_not_a_number_is_still_refused() -> None:
    X = DATA.X.copy()
    X[5, 1] = np.nan
    with pm.Model() as model:
        regression()
        dp.bounds(X=(-3, 3))
    model["X"].set_value(X)
    with pytest.raises(dp.UnsafeModel, match="column 1 of `X` holds NaN"):
        extract(model)


def test_infinite_values_without_a_bound_are_still_refused() -> None:
    X = DATA.X.copy()
    X[5, 1] = np.inf
    with pm.Model() as model:
        regression(X)
        dp.bounds(X=(-3, np.inf))
    with pytest.raises(dp.UnsafeModel, match="column 1 of `X`"):
        extract(model)


def test_data_set_later_are_clamped_as_well() -> None:
    with pm.Model() as model:
        regression()
        dp.bounds(X=(-1, 1))
    model.set_data("X", 100.0 * DATA.X)
    assert np.abs(stored(model)["X"]).max() == 1.0


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"Z": (0, 1)}, "names 'Z'"),
        ({"beta": (0, 1)}, "names 'beta'"),
        ({"X": (1, 0)}, "lower must be below upper"),
        ({"X": (0, [1, 1, -1])}, "lower must be below upper"),
        ({"X": (0, np.nan)}, "NaN"),
        ({"X": (np.inf, np.inf)}, "leave no number"),
        ({"X": ([0, 0], [1, 1])}, r"shape \(3,\); got shape \(2,\)"),
        ({"X": 3}, "must be a pair"),
        ({"X": (0, 1, 2)}, "must be a pair"),
        ({"X": ("low", "high")}, "must be a pair"),
        ({"X": ("1", "2")}, "must be a pair"),
        ({"X": (1, 1)}, "lower must be below upper"),
        ({}, "dp.bounds got no limits"),
        ({"y": (0, 0.5)}, "whole numbers"),
    ],
)
def test_limits_that_make_no_sense(limits: dict[str, Any], message: str) -> None:
    with pm.Model() as model:
        regression()
        with pytest.raises(ValueError, match=message):
            dp.bounds(**limits)
    assert not declared_bounds(model)


def test_bounds_are_given_once_for_each_array() -> None:
    with pm.Model() as model:
        pm.Poisson("y", pt.exp(pm.Normal("a")), observed=pm.Data("counts", DATA.count))
        dp.bounds(counts=(0, 9))
        with pytest.raises(ValueError, match="bounds already, as `counts`"):
            dp.bounds(y=(0, 5))
        with pytest.raises(ValueError, match="`counts` has bounds already"):
            dp.bounds({"counts": (0, 5)})
        with pytest.raises(ValueError, match="twice"):
            dp.bounds(model, {"counts": (0, 5)}, counts=(0, 5))
    assert float(declared_bounds(model)["counts"][1]) == 9.0
    with pytest.raises(TypeError):
        declared_bounds(model)["counts"] = (0, 1)  # type: ignore[index]


def test_bounds_come_before_the_budget_and_not_on_public_data() -> None:
    with pm.Model():
        regression()
        dp.bounds(X=(-1, 1))
        with pytest.raises(ValueError, match="`X` is declared public and has bounds"):
            dp.PrivacyBudget(1.0, 1e-6, public=["X"])
        dp.PrivacyBudget(1.0, 1e-6)
        with pytest.raises(dp.UnsafeModel, match="before it"):
            dp.bounds(y=(0, 1))
    with pm.Model():
        regression()
        dp.PrivacyBudget(1.0, 1e-6)
        with pytest.raises(dp.UnsafeModel, match="before it"):
            dp.bounds(X=(-1, 1))


def test_bounds_that_can_not_be_applied() -> None:
    with pm.Model() as model:
        regression()
        pm.Data("unused", DATA.x)
        dp.bounds(unused=(0, 1))
    with pytest.raises(ValueError, match="`unused` has bounds, but no private likelihood reads it"):
        extract(model)
    with pm.Model() as model:
        alpha = pm.Normal("alpha", shape=GROUPS)
        label = pm.Data("label", DATA.group.astype("float64"))
        pm.Normal("y", alpha[label.astype("int64")], 1.0, observed=DATA.real)
        dp.bounds(label=(0, 3))
    with pytest.raises(ValueError, match="used as a label"):
        extract(model)
    with pm.Model() as model, pm.Model(name="part"):
        pm.Normal("y", pm.Normal("b"), 1.0, observed=DATA.real)
        with pytest.raises(dp.UnsafeModel, match="nested"):
            dp.bounds({"part::y": (0, 1)})


# -- what is said ---------------------------------------------------------------------------------


def test_the_statement_lists_what_is_clamped() -> None:
    with pm.Model():
        pm.Normal(
            "y", pm.Data("X", DATA.X) @ coefficients() + pm.Data("x", DATA.x), observed=DATA.real
        )
        dp.bounds(X=(-3, 3), x=(0, np.inf), y=(-1.5, 1234567.0))
        budget = dp.PrivacyBudget(1.0, 1e-6)
    assert budget.account.read().public["bounds"] == {
        "X": [-3.0, 3.0],
        "x": [0.0, None],
        "y": [-1.5, 1234567.0],
    }
    assert "X is clamped to [-3, 3].\n" in words(budget)
    assert "x is clamped to [0, inf].\n" in words(budget)
    assert "y is clamped to [-1.5, 1234567].\n" in words(budget)
    with pm.Model():
        regression()
        dp.bounds(X=([-1, -2, 0], [1, np.inf, 1]))
        budget = dp.PrivacyBudget(1.0, 1e-6)
    assert "X is clamped, by column, to [-1, 1], [-2, inf], [0, 1].\n" in words(budget)
    with pm.Model():
        regression()
        budget = dp.PrivacyBudget(1.0, 1e-6)
    assert "clamped" not in words(budget)


def words(budget: dp.PrivacyBudget) -> str:
    """The statement of a run that was not made."""
    plan = {"settings": {"secure": True}, "sampler": "DPLangevin", "draws": 1, "tune": 0}
    plan |= {"chains": 1, "events": {}, "per_iteration": {}, "at_start": {}}
    statement = make_statement(budget, 1, plan, [])
    posterior = xr.Dataset({"b": (("chain", "draw"), np.zeros((1, 1)))})
    idata = _compat.inference_data({"posterior": posterior}, {STATEMENT: json.dumps(statement)})
    return dp.privacy_statement(idata)


# -- advice ---------------------------------------------------------------------------------------


def test_advice_for_a_known_distribution() -> None:
    # y - mu is standard normal whatever the prior, and is the score of mu
    with pm.Model():
        pm.Normal("y", pm.Normal("mu", 0.0, 3.0), 1.0, observed=DATA.real)
        advice = dp.clip_advice(scaling=0.1, random_seed=1, draws=400)
    # 40,000 records: the standard errors of the two quantiles are 0.00085 and 0.0051, times 0.1
    # and 5.5 of them have a false-alarm rate of 4e-8
    assert advice.quantiles[0.5] == pytest.approx(0.06745, abs=5.5 * 0.0008)
    assert advice.clip_norm == pytest.approx(0.2807, abs=5.5 * 0.0018)
    assert advice.draws == 400
    assert advice.clip_norm == advice.quantiles[0.995]
    assert "clip_norm = 0.28" in repr(advice)
    assert "no private record was read" in repr(advice)


def with_everything(data: Data, **limits: Any) -> pm.Model:
    with pm.Model() as model:
        X, group = pm.Data("X", data.X), pm.Data("group", data.group)
        alpha = pm.Normal("alpha", shape=GROUPS)
        count = pm.Poisson("count", pt.exp(0.1 * alpha[group]), observed=data.count)
        mu = X @ coefficients() + 0.1 * count
        pm.Normal("y", mu, pm.HalfNormal("sigma"), observed=pm.Data("data", data.real))
        dp.bounds(X=(-2, 2), y=(-30, 30))
    return model


@pytest.mark.slow
def test_advice_is_the_same_for_all_data(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Data(n=2 * DATA.n, seed=1)
    # values that could not be missed in a score
    other.X, other.real, other.count = 1e6 + other.X, -1e6 + other.real, 1000 + other.count
    wrong = Data(seed=2)
    wrong.X[:], wrong.real[0] = np.inf, np.inf
    wrong.group[:] = 99
    stores: list[RecordStore] = []
    original = RecordStore.__init__

    def noted(self: RecordStore, arrays: list[np.ndarray]) -> None:
        original(self, arrays)
        stores.append(self)

    monkeypatch.setattr(RecordStore, "__init__", noted)
    found = []
    for data in (DATA, other, wrong):
        model = with_everything(data)
        private = [data.X, data.real, data.count, data.group]
        found.append(dp.clip_advice(model, scaling=0.5, random_seed=7, draws=20).quantiles)
        for store in stores:
            for array in store.read():
                assert not any(
                    np.shape(array) == np.shape(x) and np.array_equal(array, x) for x in private
                )
                assert len(array) != data.n
        stores.clear()
    assert found[0] == found[1] == found[2]
    assert 0.0 < found[0][0.5] < found[0][0.995] < 1e5


def test_advice_reads_no_store_of_the_model() -> None:
    with pm.Model() as model:
        regression()
        dp.bounds(X=(-1.5, 1.5))
    records = extract(model, check=False, read=False)
    [group] = records.groups
    assert group.store.reads == 0
    assert all(not array.any() and len(array) == 2 for array in group.store.read())


@pytest.mark.slow
def test_examples_are_used_and_matched() -> None:
    with pm.Model() as model:
        x, scale = pm.Data("x", DATA.x), pm.Data("scale", DATA.x)
        pm.Normal("y", pm.Normal("b") * x * scale, 1.0, observed=DATA.real)
    # rows stay together: x * scale is 1 in all of them, so the score is a standard normal
    x = np.array([0.01, 0.1, 1.0, 10.0])
    together = dp.clip_advice(
        model, scaling=1.0, data={"x": x, "scale": 1.0 / x}, random_seed=0, draws=100
    )
    assert together.clip_norm == pytest.approx(2.807, abs=5.5 * 0.036)
    apart = dp.clip_advice(
        model, scaling=1.0, data={"x": x, "scale": 1.0 / x[:3]}, random_seed=0, draws=100
    )
    assert apart.clip_norm > 100.0


def test_advice_under_a_budget_uses_what_is_public() -> None:
    with pm.Model() as model:
        x = pm.Data("x", np.ones(DATA.n))
        pm.Normal("y", pm.Normal("b") * x, 1.0, observed=DATA.real)
        budget = dp.PrivacyBudget(1.0, 1e-6, public=["x"])
        advice = dp.clip_advice(scaling=1.0, random_seed=0, draws=100)
    assert advice.clip_norm == pytest.approx(2.807, abs=5.5 * 0.036)
    assert budget.spent().epsilon == 0.0
    assert model is not None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, dp.UnsafeModel, r"`X` is private.*data=\{'X': array\}.*dp.bounds\(X="),
        ({"data": {"Z": DATA.X}}, ValueError, r"data names 'Z'.*\['X'\]"),
        ({"data": {"X": DATA.x}}, ValueError, r"shape \(rows, 3\); got shape \(60,\)"),
        ({"data": {"X": [[1.0, 2.0, np.nan]]}}, ValueError, "finite numbers"),
        ({"data": {"X": DATA.X}, "scaling": -1.0}, ValueError, "scales must be positive"),
        ({"data": {"X": DATA.X}, "draws": 3}, ValueError, "at least 10"),
    ],
)
def test_advice_that_can_not_be_given(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pm.Model():
        regression()
        with pytest.raises(error, match=message):
            dp.clip_advice(**{"scaling": 0.1, "draws": 10, **arguments})


def test_models_that_can_not_be_simulated() -> None:
    with pm.Model():
        regression_on_an_array = DATA.X @ coefficients()
        pm.Bernoulli("y", logit_p=regression_on_an_array, observed=DATA.binary)
        with pytest.raises(dp.UnsafeModel, match="An unnamed array"):
            dp.clip_advice(scaling=0.1)
    with pm.Model():
        pm.Normal("y", pm.Flat("b"), 1.0, observed=DATA.real)
        with pytest.raises(ValueError, match="improper"):
            dp.clip_advice(scaling=0.1)
    with pm.Model():
        b = pm.Normal("b")
        pm.CustomDist("y", b, logp=lambda x, b: -((x - b) ** 2), observed=DATA.real)
        with pytest.raises(ValueError, match="`y` cannot be simulated"):
            dp.clip_advice(scaling=0.1)


def test_without_a_model_the_remedy_is_said() -> None:
    with pytest.raises(TypeError, match=r"There is no model.*dp\.bounds\(model, y="):
        dp.bounds(y=(0, 1))
