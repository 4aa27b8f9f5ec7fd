"""Rehearsals: the same model on made-up records, of which no value is private."""

from __future__ import annotations

import warnings

import cloudpickle
import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
import xarray as xr

import pymc_dp as dp
from pymc_dp.base.compat import group, inference_data
from pymc_dp.errors import UnsafeModel
from pymc_dp.records.units import RecordStore
from pymc_dp.workflow import rehearsal
from pymc_dp.workflow.made_up import MadeUp

SECRET = 1234.56789


def hierarchical(seed=0, n=300, rows=None, **budget):
    """Groups, dims, bounds, a public covariate, a Deterministic of the data."""
    rng = np.random.default_rng(seed)
    rows = n if rows is None else rows
    x, labels = rng.uniform(0, 1, (rows, 2)), rng.integers(0, 4, rows)
    y, extra = rng.poisson(2.0, rows), rng.standard_normal(rows)
    coords = {"group": list("abcd"), "obs": [f"person {seed} {k}" for k in range(rows)]}
    with pm.Model(coords=coords) as model:
        features = pm.Data("X", x, dims=("obs", None))
        of_group = pm.Data("labels", labels, dims="obs")
        known = pm.Data("known", np.linspace(0, 1, rows), dims="obs")
        mu, tau = pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1)
        z = pm.Normal("z", 0, 1, dims="group")
        effect = pm.Deterministic("effect", mu + tau * z, dims="group")
        beta = pm.Normal("beta", 0, 1, shape=2)
        pm.Deterministic("of the data", mu * extra)
        eta = effect[of_group] + features @ beta + known
        pm.Poisson("y", mu=pm.math.exp(eta), observed=y, dims="obs")
        dp.bounds(X=(0, 1), y=(0, 40))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same data, in several tests
            dp.PrivacyBudget(2.0, 1e-6, **{"public": ["known"], **budget})
    return model


def linear(n=200, scale=1.0, **budget):
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((n, 2)) * scale, rng.standard_normal(n) * scale
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        sigma = pm.HalfNormal("sigma", 2)
        pm.Normal("y", x @ beta, sigma, observed=y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dp.PrivacyBudget(3.0, 1e-6, **budget)
    return model


def made(model, seed=3, **kwargs):
    arguments = {"data": {}, "at": {}, "rows_per_unit": 2, **kwargs}
    rng = np.random.default_rng(seed)
    return MadeUp.of(model, dp.get_budget(model), rng=rng, **arguments)


SECRETS = np.full(50, SECRET)
NAMES = [f"Zyxwv {k}" for k in range(50)]


def held_by_a_formula(b):
    x = np.where(np.arange(50) % 2, SECRET, 1.0)
    pm.Data("unused", SECRETS)
    pm.Normal("y", x * b, 1.0, observed=SECRETS)


def held_by_a_dim(b):
    pm.Data("unused", SECRETS, dims="row")
    pm.Normal("y", b, 1.0, observed=SECRETS, dims="row")


def held_by_a_shape(b):
    pm.Normal("y", b, 1.0, observed=SECRETS, shape=pm.Data("unused", SECRETS).shape)


def held_by_the_shape_of_a_constant(b):
    pm.Normal("y", b, 1.0, observed=SECRETS, size=pt.as_tensor_variable(SECRETS).shape)


def held_by_deterministics(b):
    pm.Deterministic("number", b * pm.Data("unused", SECRET))
    pm.Deterministic("pair", b * pm.Data("other", [SECRET, 1.0]))
    pm.Normal("y", b, 1.0, observed=SECRETS)


#: Where a model may hold private arrays that its likelihood does not read.
HELD = {
    f.__name__: f
    for f in (
        held_by_a_formula,
        held_by_a_dim,
        held_by_a_shape,
        held_by_the_shape_of_a_constant,
        held_by_deterministics,
    )
}


def density(model):
    """The log densities of a model at a few places: a function of all that it holds."""
    point = model.initial_point()
    of = model.compile_logp(mode="FAST_COMPILE")
    return [float(of({k: v + shift for k, v in point.items()})) for shift in (0.0, 0.1, -0.2)]


class TestMadeUpRecords:
    @pytest.mark.parametrize("build", [hierarchical, lambda seed=0: linear(scale=10.0**seed)])
    def test_they_do_not_depend_on_the_private_ones(self, build):
        one, other = (made(build(seed=seed)).build() for seed in (0, 5))
        assert density(one) == density(other)

    def test_no_record_is_read(self, monkeypatch):
        monkeypatch.setattr(RecordStore, "read", None)
        made(hierarchical()).build()

    @pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning")
    @pytest.mark.parametrize("how", HELD)
    @pytest.mark.parametrize("secret", [False, True])
    def test_no_private_array_comes_along(self, how, secret):
        size = {"neighboring": "add_or_remove_one", "n_public": 40} if secret else {}
        with pm.Model(coords={"person": NAMES, "site": ["Zyxwv", "other"]}) as model:
            b = pm.Normal("b", dims="site")
            HELD[how](b.sum())
            dp.PrivacyBudget(1.0, 1e-3, **size)
        built = made(model).with_budget(1.0)
        held = [*built.named_vars.values(), *built.rvs_to_values.values()]
        everything = [cloudpickle.dumps(v) for v in (*held, *built.dim_lengths.values())]
        assert not any(np.float64(SECRET).tobytes() in found for found in everything)
        assert "Zyxwv" not in repr(built.coords) and "unused" not in built.named_vars
        rows = 40 if secret else len(NAMES)
        assert len(built.rvs_to_values[built["y"]].eval()) == rows
        assert len(NAMES) == rows or len(NAMES) not in [len(x) for x in built.coords.values()]

    def test_dims_groups_bounds_and_public_data_are_those_of_the_model(self):
        model = hierarchical()
        built = made(model).build()
        assert built.named_vars_to_dims["effect"] == ("group",)
        assert list(built.coords["group"]) == list(range(4))  # labels are private
        assert list(built.coords["obs"]) == list(range(300))
        public = made(hierarchical(public=["known", "group"])).build()
        assert list(public.coords["group"]) == list("abcd")
        np.testing.assert_array_equal(built["known"].get_value(), np.linspace(0, 1, 300))
        x, labels = built["X"].get_value(), built["labels"].get_value()
        assert 0 <= x.min() < 0.1 < 0.9 < x.max() <= 1 and {*labels} == {0, 1, 2, 3}
        assert "of the data" not in built.named_vars and "effect" in built.named_vars

    def test_there_are_as_many_as_the_public_number(self):
        hidden = made(hierarchical(rows=321, neighboring="add_or_remove_one", n_public=300))
        assert hidden.build()["X"].get_value().shape == (300, 2)
        ids = np.repeat(np.arange(80), 3)
        users = made(linear(240, privacy_unit=ids), rows_per_unit=5)
        budget = dp.get_budget(users.with_budget(1.0))
        assert users.rows == 400 and budget.n_units == 80

    def test_an_array_that_stands_twice_in_the_model_is_one_feature(self):
        x = np.random.default_rng(0).standard_normal(100)
        with pm.Model() as model:
            b = pm.Normal("b", 0, 1, shape=2)
            pm.Normal("y", b[0] * x + b[1] * pm.math.exp(x), 1.0, observed=x[::-1].copy())
            dp.PrivacyBudget(1.0, 1e-3)
        found = made(model, at={"b": [0.0, 1.0]})
        features = [a for a in found._arrays.values() if abs(a.mean()) < 1.0]
        assert all(np.array_equal(features[0], a) for a in features)

    def test_records_stand_on_the_axis_where_the_model_has_them(self):
        x = np.random.default_rng(0).standard_normal((2, 100))
        with pm.Model() as model:
            b = pm.Normal("b", shape=2)
            pm.Normal("y", b @ pm.Data("x", x, dims=("feature", "row")), 1.0, observed=x[0].copy())
            dp.PrivacyBudget(1.0, 1e-3, neighboring="add_or_remove_one", n_public=80)
        built = made(model).build()
        assert built["x"].get_value().shape == (2, 80) and np.isfinite(density(built)).all()

    def test_public_data_may_have_other_rows(self):
        known = np.linspace(0.0, 1.0, 60)
        with pm.Model() as model:
            b = pm.Normal("b")
            public = pm.Data("known", known, dims="row")
            pm.Deterministic("at known values", b * public, dims="row")
            pm.Normal("earlier", b * public, 1.0, observed=pm.Data("seen", known), dims="row")
            pm.Normal("y", b, 1.0, observed=np.zeros(60), dims="row")
            names = ["known", "seen", "earlier"]
            dp.PrivacyBudget(1.0, 1e-3, neighboring="add_or_remove_one", n_public=50, public=names)
        built = made(model).build()
        np.testing.assert_array_equal(built["known"].get_value(), known)
        assert len(built.coords["row"]) == 50 and np.isfinite(density(built)).all()
        assert "at known values" not in built.named_vars

    def test_examples_and_values_are_taken(self):
        model = hierarchical()
        example = pd.DataFrame({"a": [0.25] * 7, "b": pd.array([0.75] * 7, "Float64")})
        found = made(model, data={"X": example}, at={"mu": 0.5, "beta": [1.0, -1.0]})
        np.testing.assert_array_equal(
            found.build()["X"].get_value(), np.tile([[0.25, 0.75]], (300, 1))
        )
        assert found.truth["mu"] == 0.5 and found.truth["beta"].tolist() == [1.0, -1.0]
        assert found.assumed == []
        assert made(linear()).assumed == ["an array without a name"]


@pytest.fixture(scope="module")
def found():
    model = linear(400)
    budget = dp.get_budget(model)
    head = budget.ledger.head()
    with model:
        names = list(model.named_vars)
        result = dp.rehearse(
            draws=200,
            chains=2,
            cores=1,
            random_seed=1,
            progressbar=False,
            reference=False,
            var_names="sigma",
        )
    assert list(model.named_vars) == names
    assert budget.ledger.head() == head and budget.spent().epsilon == 0.0
    return result


class TestRehearse:
    @pytest.mark.slow
    def test_what_it_says(self, found):
        text = repr(found)
        assert "nothing was spent" in text and "Taken as standard normal" in text
        assert found.form in ("anchored", "quadratic") and found.form in text
        assert list(found.table.index) == ["beta[0]", "beta[1]", "sigma"]
        assert "<table" in found._repr_html_() and found.seconds["private"] > 0
        assert found.forecast is not None and found.forecast.n == 400
        assert 0.0 <= found.coverage <= 1.0 and found.reference is None
        assert group(found.released, "posterior").sizes == {
            "chain": 2,
            "draw": 200,
            "beta_dim_0": 2,
        }
        for compared in (found.plot, lambda: found.error):
            with pytest.raises(ValueError, match=r"nothing to compare.*reference=True"):
                compared()

    def test_errors_are_those_of_the_table(self):
        truth = {"a": np.array(1.0)}
        rng = np.random.default_rng(0)
        draws = rng.standard_normal((2, 2, 500))
        one, other = (_posterior({"a": x}) for x in (3.0 + 2.0 * draws[0], 1.0 + 0.5 * draws[1]))
        table = rehearsal._compared(truth, one, other)
        row = table.loc["a"]
        assert isinstance(table, pd.DataFrame)
        assert row["error"] == pytest.approx(
            (draws[0].mean() * 2 + 2 - 0.5 * draws[1].mean()) / (0.5 * draws[1].std())
        )
        assert row["sd_ratio"] == pytest.approx(4.0 * draws[0].std() / draws[1].std())
        assert row["covered"] and row["truth"] == 1.0

    @pytest.mark.slow
    def test_beside_nuts(self):
        """A rehearsal of 2,000 records at epsilon = 8: noise of a tenth of a posterior sd; the
        error of 3 means is below 1 with probability 1 - 1e-6 and more."""
        with pm.Model() as model:
            x = np.zeros((2000, 2))
            beta = pm.Normal("beta", 0, 2, shape=2)
            sigma = pm.HalfNormal("sigma", 2)
            pm.Normal("y", x @ beta, sigma, observed=np.arange(2000.0))
            dp.PrivacyBudget(8.0, 1e-6)
        found = dp.rehearse(model, 500, chains=2, random_seed=2, progressbar=False)
        assert found.error < 1.0 and found.error < 10.0 * found.forecast.error
        assert 0.5 < found.table["sd_ratio"].median() < 2.0
        assert len(np.atleast_1d(found.plot())) == 3

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"rows_per_unit": 0}, ValueError, "rows_per_unit"),
            ({"data": {"W": np.ones(3)}}, ValueError, "'W'"),
            ({"data": {"X": np.ones((3, 5))}}, ValueError, r"data\['X'\]"),
            ({"data": {"labels": [0, 1, 7]}}, ValueError, r"data\['labels'\].*from 0 to 3"),
            ({"data": 3}, ValueError, "data and at must be dicts"),
            ({"at": 3}, ValueError, "data and at must be dicts"),
            ({"at": {"mu": "high"}}, ValueError, r"at\['mu'\] must be finite numbers"),
            ({"at": {"nu": 1.0}}, ValueError, "nu"),
            (
                {"at": {"beta": [1.0, np.nan]}},
                ValueError,
                r"at\['beta'\] must be finite.*\(2,\)\.$",
            ),
            ({"at": {"beta": 1.0}}, ValueError, r"at\['beta'\]"),
            ({"draws": 0}, ValueError, "draws"),
            ({"nuts": {}}, ValueError, "nuts"),
        ],
    )
    def test_wrong_arguments(self, arguments, error, text):
        with pytest.raises(error, match=text):
            dp.rehearse(hierarchical(), **arguments)

    def test_a_step_that_was_built_is_for_the_real_records(self):
        model = linear()
        with pytest.raises(ValueError, match="class or a name"):
            dp.rehearse(model, step=object())

    def test_a_model_without_a_budget(self):
        with pm.Model() as model:
            pm.Normal("y", pm.Normal("b"), 1.0, observed=np.zeros(9))
        with pytest.raises(UnsafeModel, match="PrivacyBudget"):
            dp.rehearse(model)

    def test_code_that_may_hold_records_is_not_run(self):
        secret = np.full(9, SECRET)
        with pm.Model() as model:
            b = pm.Normal("b")
            pm.CustomDist("y", b, logp=lambda y, b: -((y - b * secret) ** 2), observed=np.zeros(9))
            dp.PrivacyBudget(1.0, 1e-3)
        with pytest.raises(UnsafeModel, match="CustomDist"):
            dp.rehearse(model)

    def test_whole_numbers_of_which_nothing_is_known_are_0_or_1(self):
        with pm.Model() as model:
            k, seen = pm.Data("k", np.arange(20)), pm.Data("seen", np.arange(20) > 9)
            pm.Normal("y", pm.Normal("b") * k + seen, 1.0, observed=np.zeros(20))
            dp.PrivacyBudget(1.0, 1e-3)
        found = made(model)
        assert set(found.assumed) == {"k", "seen"}
        for name in found.assumed:
            assert {*found.build()[name].get_value().tolist()} == {0, 1}


def _posterior(variables):
    columns = {name: (("chain", "draw"), draws) for name, draws in variables.items()}
    return inference_data({"posterior": xr.Dataset(columns)}, {})
