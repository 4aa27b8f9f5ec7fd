"""Predictions are functions of released draws and public values, and of nothing else."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
import xarray as xr
from pymc.model.fgraph import clone_model

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.publication.publish import STATEMENT
from tests.test_wrong_inputs import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning"),
    pytest.mark.filterwarnings("ignore:The budget:UserWarning"),
]

N = 83  # no other length or number here
RNG = np.random.default_rng(5)
X = RNG.uniform(-2, 2, (N, 2))
SITE = RNG.integers(0, 3, N)
LEVEL, SLOPE = np.array([5.0, 0.0, -5.0]), np.array([1.0, -1.0])
Y = LEVEL[SITE] + X @ SLOPE + RNG.normal(0, 0.3, N)
GRID = {"x": np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]), "site": [0, 1, 2, 0]}
EXPECTED = LEVEL[GRID["site"]] + GRID["x"] @ SLOPE
NAMES = [f"Zyxwv {k}" for k in range(N)]


def linear(**budget: Any) -> pm.Model:
    coords = {"person": NAMES, "feature": ["age", "income"], "site": ["a", "b", "c"]}
    with pm.Model(coords=coords) as model:
        x = pm.Data("x", X, dims=("person", "feature"))
        site = pm.Data("site_of", SITE, dims="person")
        level = pm.Normal("level", 0, 10, dims="site")
        slope = pm.Normal("slope", 0, 10, dims="feature")
        mu = pm.Deterministic("mu", level[site] + x @ slope, dims="person")
        pm.Normal("y", mu, 0.3, observed=pm.Data("seen", Y, dims="person"), dims="person")
        if budget is not None:
            dp.PrivacyBudget(**{"epsilon": 5.0, "delta": 1e-3, "public": ["feature"], **budget})
    return model


def released(model: pm.Model, draws: int = 200, **known: Any) -> Any:
    """As if released: draws around known values of the free variables, 1 where none are given."""
    shapes = dict(zip([rv.name for rv in model.free_RVs], _shapes(model), strict=True))
    columns = {}
    for name, shape in shapes.items():
        centre = np.broadcast_to(np.asarray(known.get(name, 1.0), float), shape)
        noise = np.random.default_rng(1).normal(0, 1e-3, (2, draws // 2, *shape))
        dims = [f"{name}_dim_{k}" for k in range(len(shape))]
        columns[name] = (("chain", "draw", *dims), centre + noise)
    if (budget := dp.get_budget(model)) is not None:
        budget.account.record_plan(FACTS["plan_id"], {"chains": 2})
    return _compat.inference_data(
        {"posterior": xr.Dataset(columns)}, {STATEMENT: json.dumps(FACTS)}
    )


def _shapes(model: pm.Model) -> list[tuple[int, ...]]:
    point = model.initial_point()
    back = model.rvs_to_transforms
    return [
        np.shape(point[model.rvs_to_values[rv].name]) if back[rv] is None else tuple(rv.type.shape)
        for rv in model.free_RVs
    ]


FACTS = {"taken_as_public": [], "plan_id": 1}


def at(values: dict[str, Any]) -> dict[str, Any]:
    return {"x": values["x"], "site_of": values["site"]}


def predicted(result: Any, name: str = "y", group: str = "predictions") -> np.ndarray:
    return _compat.group(result, group)[name].values


@pytest.fixture(scope="module")
def known() -> tuple[pm.Model, Any]:
    """Draws near to the true values."""
    model = linear()
    return model, released(model, level=LEVEL, slope=SLOPE)


def test_predictions_at_new_values(tmp_path: Path) -> None:
    """Of a private fit, from its first line to a file of predictions."""
    model = linear()
    draws = dp.laplace(200, model=model, progressbar=False)
    budget = dp.get_budget(model)
    assert budget is not None
    spent, entries = budget.spent(), len(list(budget.ledger.entries()))
    found = dp.predict(draws, at(GRID), model=model, random_seed=1, progressbar=False)
    assert _compat.group_names(found) == ["predictions", "predictions_constant_data"]
    posterior = _compat.group(draws, "posterior")
    mu = posterior["level"].values[..., GRID["site"]] + posterior["slope"].values @ GRID["x"].T
    # of 800 draws: within 5 standard errors of the noise of the likelihood
    np.testing.assert_allclose(
        predicted(found).mean((0, 1)), mu.mean((0, 1)), atol=5 * 0.3 / np.sqrt(800)
    )
    assert (budget.spent(), len(list(budget.ledger.entries()))) == (spent, entries)
    facts = json.loads(found.attrs[STATEMENT])
    assert facts["epsilon"] == 5.0
    assert facts["taken_as_public"] == ["y"]  # its standard deviation is a number
    assert "formulas of y were taken as public" in dp.privacy_statement(found)
    found.to_netcdf(tmp_path / "predictions.nc")
    with xr.open_dataset(tmp_path / "predictions.nc", group="predictions") as back:
        np.testing.assert_array_equal(back["y"].values, predicted(found))


@pytest.mark.parametrize("rows", [1, 4, N, 200])
def test_any_number_of_rows(known: tuple[pm.Model, Any], rows: int) -> None:
    model, draws = known
    new = {"x": np.zeros((rows, 2)), "site_of": np.zeros(rows, int)}
    found = dp.predict(draws, new, model=model, progressbar=False)
    assert predicted(found).shape == (2, 100, rows)
    assert np.abs(predicted(found).mean() - 5.0) < 5 * 0.3 / np.sqrt(200)


@pytest.mark.parametrize("call", [dp.predict, dp.sample_posterior_predictive])
def test_draws_of_another_budget_are_told(known: tuple[pm.Model, Any], call: Any) -> None:
    """The model may be the same, declared again in another session; it is as private as before."""
    with pytest.warns(UserWarning, match="under another budget"), pytest.raises(dp.UnsafeRelease):
        call(known[1], model=linear(), progressbar=False)


def test_a_seed_fixes_predictions(known: tuple[pm.Model, Any]) -> None:
    model, draws = known
    first, again, other = (
        predicted(dp.predict(draws, at(GRID), model=model, random_seed=k, progressbar=False))
        for k in (1, np.random.default_rng(1), 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()


def test_deterministics_are_computed(known: tuple[pm.Model, Any]) -> None:
    model, draws = known
    both = dp.predict(draws, at(GRID), model=model, var_names=["mu", "y"], progressbar=False)
    np.testing.assert_allclose(predicted(both, "mu").mean((0, 1)), EXPECTED, atol=1e-2)
    alone = dp.predict(draws, at(GRID), model=model, var_names="mu", progressbar=False)
    assert list(_compat.group(alone, "predictions")) == ["mu"]
    assert json.loads(alone.attrs[STATEMENT])["taken_as_public"] == []


# -- nothing private ------------------------------------------------------------------------------


def test_no_record_is_read_and_none_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    draws = released(model, level=LEVEL, slope=SLOPE)

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("a record was read")

    for data in model.data_vars:
        monkeypatch.setattr(data, "get_value", read)
    found = dp.predict(draws, at(GRID), model=model, var_names=["y", "mu"], progressbar=False)
    sizes = {n for g in _compat.group_names(found) for n in _compat.group(found, g).sizes.values()}
    assert sizes == {2, 100, 4}  # chains and features, draws, rows
    everything = pickle.dumps(found) + repr(found).encode() + json.dumps(found.attrs).encode()
    assert b"Zyxwv" not in everything
    private = np.concatenate([X.ravel(), Y])
    for group in _compat.group_names(found):
        for variable in _compat.group(found, group).variables.values():
            if variable.dtype.kind in "iuf":
                assert not np.isin(private, variable.values).any()


#: What a model may hold of its records, besides the named covariate x: a factor for each row.
HELD: dict[str, Callable[[Any], Any]] = {
    "covariate": lambda mu: mu + X[:, 1],
    "offset of one entry": lambda mu: mu + Y[:1],
    "row": lambda mu: mu + pt.as_tensor_variable(X[0]).sum(),
    "labels": lambda mu: mu + pt.as_tensor_variable(np.arange(3.0))[SITE],
    "data": lambda mu: mu + pm.Data("offset", Y),
    "labels as data": lambda mu: mu + pt.as_tensor_variable(np.zeros(3))[pm.Data("offset", SITE)],
    "sums of the data": lambda mu: mu + pm.Data("offset", Y).mean(),
}


@pytest.mark.parametrize("how", HELD)
def test_private_data_that_stay_are_refused(how: str) -> None:
    with pm.Model() as model:
        x, slope = pm.Data("x", X[:, 0]), pm.Normal("slope")
        pm.Normal("y", HELD[how](slope * x), 1.0, observed=Y)
        dp.PrivacyBudget(5.0, 1e-3)
    draws = released(model)
    if how == "offset of one entry":  # a number like others
        found = dp.predict(draws, {"x": np.zeros(4)}, model=model, progressbar=False)
        assert json.loads(found.attrs[STATEMENT])["taken_as_public"] == ["y"]
        return
    words = ["`y`", "private covariates"]
    words += ["`offset`", "'offset': ..."] if "offset" in model.named_vars else ["x = pm.Data('x',"]
    with refused(dp.UnsafeRelease, *words):
        dp.predict(draws, {"x": np.zeros(4)}, model=model)


def _binomial(mu: Any) -> None:
    pm.Binomial("y", n=np.arange(N) + 5, logit_p=mu, observed=SITE)


def _exposure(mu: Any) -> None:
    pm.Poisson("y", np.abs(Y) * pm.math.exp(mu), observed=SITE)


def _scale(mu: Any) -> None:
    pm.Normal("y", mu, np.abs(Y) + 1.0, observed=Y)


def _bound(mu: Any) -> None:
    upper = pm.Data("upper", np.full(N, 9.0))
    pm.Censored("y", pm.Normal.dist(mu, 1.0), lower=None, upper=upper, observed=Y)


@pytest.mark.parametrize("declare", [_binomial, _exposure, _scale, _bound])
def test_private_parameters_of_a_distribution_are_refused(declare: Callable[[Any], None]) -> None:
    with pm.Model() as model:
        declare(pm.Normal("slope") * pm.Data("x", X[:, 0]))
        dp.PrivacyBudget(5.0, 1e-3)
    with refused(dp.UnsafeRelease, "`y`", "private covariates"):
        dp.predict(released(model), {"x": np.zeros(4)}, model=model)


@pytest.mark.parametrize("counted", ["data", "dim"])
def test_a_private_number_of_records_is_refused(counted: str) -> None:
    with pm.Model(coords={"person": range(N)}) as model:
        x, slope = pm.Data("x", X[:, 0], dims="person"), pm.Normal("slope")
        n = pm.Data("z", Y).shape[0] if counted == "data" else model.dim_lengths["person"]
        mu = pm.Deterministic("mu", slope * x * n)
        pm.Normal("y", slope * x, 1.0, observed=Y, dims="person")
        dp.PrivacyBudget(5.0, 1e-3, neighboring="add_or_remove_one", n_public=100)
    draws = released(model)
    assert predicted(dp.predict(draws, {"x": [1.0]}, model=model, progressbar=False)).size == 200
    with refused(dp.UnsafeRelease, "`mu`"):
        dp.predict(draws, {"x": [1.0]}, model=model, var_names=[mu.name])


def test_a_private_number_of_records_is_in_no_error() -> None:
    with pm.Model() as model:
        x = pm.Data("x", X[:, 0], shape=(N,))  # any number of new rows may take its place
        mu = pm.Deterministic("mu", pm.Normal("slope") * x)
        pm.Deterministic("sum", mu + pt.zeros(N))
        pm.Normal("y", mu, 1.0, observed=Y)
        dp.PrivacyBudget(5.0, 1e-3, neighboring="add_or_remove_one", n_public=100)
    draws, new = released(model), {"x": [0.0, 1.0]}
    found = dp.predict(draws, new, model=model, var_names=["y", "mu"], progressbar=False)
    assert predicted(found).shape == (2, 100, 2)
    with pytest.raises(ValueError, match="cannot be computed") as caught:
        dp.predict(draws, new, model=model, var_names=["sum"], progressbar=False)
    assert str(N) not in str(caught.value)


def test_one_public_outcome_is_predicted_with_new_values() -> None:
    with pm.Model() as model:
        slope, year = pm.Normal("slope"), pm.Data("year", 2.0)
        pm.Normal("total", slope * year, 0.01, observed=1.0)
        pm.Normal("y", slope, 1.0, observed=Y)
        dp.PrivacyBudget(5.0, 1e-3, public=["total", "year"])
    found = dp.predict(
        released(model), {"year": 5.0}, model=model, var_names=["total"], progressbar=False
    )
    np.testing.assert_allclose(predicted(found, "total").mean(), 5.0, atol=0.02)


@pytest.mark.parametrize("length", [1, 5])
def test_outcomes_without_covariates_are_not_as_many_as_the_records(length: int) -> None:
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("level"), 1.0, observed=pm.Data("seen", Y, dims="row"), dims="row")
        dp.PrivacyBudget(5.0, 1e-3)
    coords = None if length == 1 else {"row": list("vwxyz")}
    found = dp.predict(released(model), model=model, coords=coords, progressbar=False)
    assert predicted(found).shape == (2, 100, length)
    assert _compat.group_names(found) == ["predictions"]


@pytest.mark.parametrize("secret", [False, True])
def test_posterior_predictive_draws_are_as_many_as_the_records(secret: bool) -> None:
    options = {"neighboring": "add_or_remove_one", "n_public": 100} if secret else {}
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("level"), 1.0, observed=Y)
        dp.PrivacyBudget(5.0, 1e-3, **options)
    draws = released(model)
    if secret:
        with refused(dp.UnsafeRelease, "`y`", "number of records"):
            dp.sample_posterior_predictive(draws, model)
    else:
        found = dp.sample_posterior_predictive(draws, model, progressbar=False)
        assert predicted(found, group="posterior_predictive").shape == (2, 100, N)


def test_a_copy_of_a_model_is_refused(known: tuple[pm.Model, Any]) -> None:
    model, draws = known
    with refused(dp.UnsafeRelease, "copy", "original model"):
        dp.predict(draws, at(GRID), model=clone_model(model))


# -- coordinates ----------------------------------------------------------------------------------


def test_coords_are_public_or_given(known: tuple[pm.Model, Any]) -> None:
    model, draws = known
    found = dp.predict(draws, at(GRID), model=model, progressbar=False)
    np.testing.assert_array_equal(_compat.group(found, "predictions")["person"], range(4))
    constant = _compat.group(found, "predictions_constant_data")
    assert list(constant["feature"].values) == ["age", "income"]
    assert constant["x"].dims == ("person", "feature")
    np.testing.assert_array_equal(constant["site_of"], GRID["site"])
    labels = {"person": list("abcd")}
    named = dp.predict(draws, at(GRID), model=model, coords=labels, progressbar=False)
    for group in ("predictions", "predictions_constant_data"):
        assert list(_compat.group(named, group)["person"].values) == list("abcd")


def test_labels_of_the_records_are_not_those_of_new_rows() -> None:
    """Nor are public ones, where as many rows are new as there were."""
    model = linear(public=["x", "site_of", "person", "feature"])
    draws = released(model)
    own = _compat.group(dp.predict(draws, model=model, progressbar=False), "predictions")
    assert list(own["person"].values) == NAMES
    new = dp.predict(draws, {"x": X[::-1]}, model=model, progressbar=False)
    np.testing.assert_array_equal(_compat.group(new, "predictions")["person"], range(N))


def test_parameters_are_those_that_were_released(known: tuple[pm.Model, Any]) -> None:
    """PyMC 5 draws them from their prior where coords differ, as they do if they are private."""
    _, draws = known
    with pm.Model(coords={"site": ["a", "b", "c"], "feature": ["age", "income"]}) as public:
        level = pm.Normal("level", 0, 10, dims="site")
        slope = pm.Normal("slope", 0, pm.Data("wide", 10.0), dims="feature")
        at_grid = level[GRID["site"]] + pt.as_tensor_variable(GRID["x"]) @ slope
        pm.Normal("y", at_grid, 0.3, observed=np.zeros(4))
        pm.Deterministic("mu", at_grid)
    found = dp.sample_posterior_predictive(draws, public, progressbar=False)
    again = dp.predict(draws, model=public, progressbar=False)
    for result, group in ((found, "posterior_predictive"), (again, "predictions")):
        values = predicted(result, group=group)
        np.testing.assert_allclose(values.mean((0, 1)), EXPECTED, atol=5 * 0.3 / np.sqrt(200))
        np.testing.assert_allclose(values.std((0, 1)), 0.3, rtol=0.25)  # 5 standard errors
    exact = dp.sample_posterior_predictive(draws, public, var_names="mu", progressbar=False)
    assert list(_compat.group(exact, "posterior_predictive")) == ["mu"]


def test_public_data_are_used_as_they_are_or_replaced() -> None:
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("slope") * pm.Data("x", X[:, 0]), 0.01, observed=Y)
        dp.PrivacyBudget(5.0, 1e-3, public=["x"])
    draws = released(model)
    own = predicted(dp.predict(draws, model=model, progressbar=False))
    np.testing.assert_allclose(own.mean((0, 1)), X[:, 0], atol=0.02)
    other = predicted(dp.predict(draws, {"x": [3.0]}, model=model, progressbar=False))
    np.testing.assert_allclose(other.mean((0, 1)), [3.0], atol=0.02)


# -- likelihoods ----------------------------------------------------------------------------------

OBSERVED = RNG.normal(size=N)
COUNT = RNG.integers(0, 3, N)
PAIR = RNG.normal(size=(N, 2))


def _mixture(b: Any, x: Any) -> None:
    parts = [pm.Normal.dist(b[0] * x, 1.0), pm.Normal.dist(b[1], 1.0)]
    pm.Mixture("y", w=pm.Dirichlet("w", np.ones(2)), comp_dists=parts, observed=OBSERVED)


def _normal_mixture(b: Any, x: Any) -> None:
    w = pm.Dirichlet("w", np.ones(2))
    pm.NormalMixture("y", w=w, mu=b[:2] * x[:, None], sigma=1.0, observed=OBSERVED)


def _ordered(b: Any, x: Any) -> None:
    cut = pt.stack([-pm.math.exp(b[1]), pm.math.exp(b[2])])
    pm.OrderedLogistic("y", eta=x * b[0], cutpoints=cut, observed=COUNT)


def _of_an_outcome(b: Any, x: Any) -> None:
    """What one variable observes is a covariate of another."""
    earlier = pm.Normal("earlier", b[0] * x, 0.01, observed=OBSERVED)
    pm.Normal("y", 2.0 * earlier, 0.01, observed=OBSERVED.copy())


#: A likelihood of (b, x), and the shape of a row of outcomes.
LIKELIHOODS: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...]]] = {
    "bernoulli": (lambda b, x: pm.Bernoulli("y", logit_p=b[0] * x, observed=COUNT % 2), ()),
    "binomial": (lambda b, x: pm.Binomial("y", n=7, logit_p=b[0] * x, observed=COUNT), ()),
    "categorical": (
        lambda b, x: pm.Categorical("y", p=pm.math.softmax(x[:, None] * b, -1), observed=COUNT),
        (),
    ),
    "censored": (
        lambda b, x: pm.Censored(
            "y", pm.Normal.dist(b[0] * x, 1.0), lower=-1.0, upper=None, observed=abs(OBSERVED)
        ),
        (),
    ),
    "hurdle": (
        lambda b, x: pm.HurdlePoisson("y", psi=0.5, mu=pm.math.exp(b[0] * x), observed=COUNT),
        (),
    ),
    "matrix": (lambda b, x: pm.Normal("y", x[:, None] * b[:2], 1.0, observed=PAIR), (2,)),
    "matrix of one mean": (
        lambda b, x: pm.Normal("y", x[:, None] * b[0], 1.0, observed=pm.Data("pair", PAIR)),
        (2,),
    ),
    "mixture": (_mixture, ()),
    "multinomial": (
        lambda b, x: pm.Multinomial(
            "y", n=5, p=pm.math.softmax(x[:, None] * b, -1), observed=np.full((N, 3), [1, 2, 2])
        ),
        (3,),
    ),
    "mv_normal": (
        lambda b, x: pm.MvNormal(
            "y", mu=x[:, None] * b[:2], cov=pt.eye(2) * pm.math.exp(b[2]), observed=PAIR
        ),
        (2,),
    ),
    "normal mixture": (_normal_mixture, ()),
    "of an outcome": (_of_an_outcome, ()),
    "ordered": (_ordered, ()),
    "skewed": (lambda b, x: pm.ExGaussian("y", mu=b[0] * x, sigma=1, nu=1, observed=OBSERVED), ()),
    "truncated": (
        lambda b, x: pm.Truncated(
            "y", pm.Normal.dist(b[0] * x, 1.0), lower=-1.0, observed=abs(OBSERVED)
        ),
        (),
    ),
    "zero-inflated": (
        lambda b, x: pm.ZeroInflatedPoisson("y", psi=0.5, mu=pm.math.exp(b[0] * x), observed=COUNT),
        (),
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods(name: str) -> None:
    declare, row = LIKELIHOODS[name]
    with pm.Model() as model:
        declare(pm.Normal("b", 0, 1, shape=3), pm.Data("x", X[:, 0]))
        dp.PrivacyBudget(5.0, 1e-3)
    draws = released(model, draws=10)
    if "w" in model.named_vars:
        posterior = _compat.group(draws, "posterior")
        posterior["w"] = posterior["w"] / posterior["w"].sum("w_dim_0")
        draws = _compat.inference_data({"posterior": posterior}, {STATEMENT: json.dumps(FACTS)})
    for rows in (1, 4):
        found = dp.predict(draws, {"x": np.ones(rows)}, model=model, progressbar=False)
        assert predicted(found).shape == (2, 5, rows, *row)
    if name == "of an outcome":
        both = _compat.group(found, "predictions")
        np.testing.assert_allclose(both["y"], 2.0 * both["earlier"], atol=0.06)


# -- wrong inputs ---------------------------------------------------------------------------------

ZEROS = np.zeros((3, 2))
WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "an array": (ZEROS, ("new must be a dict", "ndarray")),
    "an unknown name": ({"z": 1}, ("['z']", "no pm.Data", "['seen', 'site_of', 'x']")),
    "an observed variable": ({"y": 1}, ("['y']", "no pm.Data")),
    "the outcome": (
        {"x": ZEROS, "site_of": [0, 1, 2], "seen": [0.0]},
        ("['seen']", "the outcome itself needs none"),
    ),
    "one axis": ({"x": [1.0, 2.0]}, ("new['x']", "(2,)", "2 axes")),
    "no row": ({"x": ZEROS[:0], "site_of": [0]}, ("new['x']", "(0, 2)", "one row")),
    "columns": (
        {"x": np.zeros((3, 5)), "site_of": [0, 1, 2]},
        ("new['x']: (3, 5)", "`slope`: (2,)"),
    ),
    "lengths": ({"x": ZEROS, "site_of": [0, 1]}, ("new['x']: (3, 2)", "new['site_of']: (2,)")),
    "NaN": ({"x": ZEROS * np.nan, "site_of": [0, 1, 2]}, ("new['x'] holds NaN",)),
    "a mask": ({"x": np.ma.masked_equal(ZEROS, 0.0)}, ("new['x']", "masked")),
    "text": ({"site_of": ["a", "b"]}, ("new['site_of']", "labels", "pd.Categorical")),
    "fractions": ({"x": ZEROS, "site_of": [0, 0.5, 1]}, ("new['site_of']", "whole numbers")),
    "large": ({"x": ZEROS, "site_of": [0, 2**40, 1]}, ("new['site_of']", "whole numbers", "int32")),
    "a label too high": (
        {"x": ZEROS, "site_of": [0, 1, 3]},
        ("new['site_of'] must hold labels of the groups that there are", "with size 3"),
    ),
    "a label below": (
        {"x": ZEROS, "site_of": [0, 1, -1]},
        ("new['site_of'] holds negative labels", "-1"),
    ),
    "nothing": (None, ("Predictions of `y`", "`site_of`, `x`", "'site_of': ..., 'x': ...")),
    "half": ({"x": ZEROS}, ("Predictions of `y`", "`site_of`", "new={'site_of': ...}")),
    "columns in disorder": (
        {"x": pd.DataFrame(ZEROS, columns=["income", "age"]), "site_of": [0, 0, 0]},
        ("new['x']", "another order", "'feature'"),
    ),
    "a column of text": (
        {"x": pd.DataFrame({"age": [1.0], "income": ["low"]}), "site_of": [0]},
        ("new['x']['income']", "labels"),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_values(known: tuple[pm.Model, Any], what: str) -> None:
    model, draws = known
    new, words = WRONG[what]
    with refused(dp.UnsafeRelease if what in ("nothing", "half") else ValueError, *words):
        dp.predict(draws, new, model=model, progressbar=False)


def test_new_values_are_clamped_as_the_data_are() -> None:
    with pm.Model() as model:
        x = pm.Data("x", X[:, 0])
        pm.Normal("y", pm.Normal("slope") * x, 0.3, observed=Y)
        dp.bounds(x=(-1, 2))
        dp.PrivacyBudget(5.0, 1e-3)
    found = dp.predict(released(model), {"x": [-9.0, np.inf]}, model=model, progressbar=False)
    used = _compat.group(found, "predictions_constant_data")["x"]
    np.testing.assert_array_equal(used, [-1.0, 2.0])


def test_wrong_calls(known: tuple[pm.Model, Any]) -> None:
    model, draws = known
    for names in ("level", ["x"], ["nothing"]):
        with refused(ValueError, "var_names", "it observes ['y']"):
            dp.predict(draws, at(GRID), model=model, var_names=names)
    for coords in ({"person": [1]}, {"nothing": list("abcd")}):
        with refused(ValueError, "coords has", "the predictions have {'person': 4"):
            dp.predict(draws, at(GRID), model=model, coords=coords, progressbar=False)
    posterior = _compat.group(draws, "posterior")
    raw = _compat.inference_data({"posterior": posterior.drop_attrs()}, {})
    for result in (raw, posterior, None):
        with refused(dp.UnsafeRelease, "Release the draws first"):
            dp.predict(result, at(GRID), model=model)
    attrs = {STATEMENT: json.dumps(FACTS)}
    less = _compat.inference_data({"posterior": posterior[["slope"]]}, attrs)
    with refused(ValueError, "lack ['level']"):
        dp.predict(less, at(GRID), model=model)
    other = posterior.assign(slope=posterior["level"])
    with refused(ValueError, "`slope`: (3,)"):
        other = _compat.inference_data({"posterior": other}, attrs)
        dp.predict(other, at(GRID), model=model, progressbar=False)
    other = _compat.inference_data({"posterior": posterior.isel(level_dim_0=0)}, attrs)
    with refused(ValueError, "cannot be computed", "`level`: ()", "the model of these draws"):
        dp.predict(other, at(GRID), model=model)
    with pytest.raises(TypeError, match="There is no model"):
        dp.predict(draws, at(GRID))


def test_what_cannot_be_drawn_is_said() -> None:
    with pm.Model() as model:
        pm.Normal("y", 0.0, pm.Normal("b") * pm.Data("x", X[:, 0] ** 2), observed=Y)
        dp.PrivacyBudget(5.0, 1e-3)
    with refused(ValueError, "Predictions cannot be computed: scale < 0"):
        dp.predict(released(model), {"x": [-1.0]}, model=model, progressbar=False)
