"""What a new user gets wrong: one clear error each, nothing spent, nothing private in the text."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import cloudpickle
import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

import pymc_dp as dp
from pymc_dp.base.compat import PYMC_MAJOR, group
from pymc_dp.budget import MODELS
from pymc_dp.records.units import RecordStore

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:These data already have a budget:UserWarning",
        "ignore:The gradients of this plan:UserWarning",
        "ignore:`find_MAP` will:FutureWarning",
    ),
]

N = 60
_rng = np.random.default_rng(3)
X = np.c_[np.ones(N), _rng.uniform(-1, 1, N)]
Y = _rng.integers(0, 2, N)
S = _rng.normal(size=N)
IDS = 48611 + np.arange(N) // 2
# planted in the records; no error may show them
X[3, 1] = S[3] = 0.7362819
X[4, 1] = S[4] = 0.5817263
SECRETS = ("7362819", "5817263", "48611", "mallory")

READ = RecordStore.read
BUDGET = {"epsilon": 5.0, "delta": 1e-4}
SETTINGS = {"step_size": 0.5, "clip_norm": 0.45, "curvature": 0.05, "scaling": 0.3}


def spending() -> dict[tuple[str, int], int]:
    """Ledger units charged to every budget that is alive."""
    budgets = [dp.get_budget(model) for model in list(MODELS)]
    return {(b.ledger.path, b.account.number): b.account.read().spent for b in budgets if b}


def texts(error: BaseException | None) -> Iterator[str]:
    """What a user would see: the message and those of the errors it came from."""
    while error is not None:
        yield str(error)
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """Expect exactly this error, with these words; no charge, no read and no planted value."""
    before, reads = spending(), []

    def watched(store: RecordStore) -> list[np.ndarray]:
        arrays = READ(store)
        reads.extend(True for array in arrays if np.isin([0.7362819, 0.5817263], array).any())
        return arrays

    with pytest.MonkeyPatch.context() as patch, pytest.raises(error) as caught:
        patch.setattr(RecordStore, "read", watched)
        yield
    assert type(caught.value) is error
    assert not reads
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert [s for s in SECRETS for text in texts(caught.value) if s in text] == []
    assert [key for key, units in spending().items() if units != before.get(key, 0)] == []


def logistic(budget: bool = True, **arguments) -> pm.Model:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Bernoulli("y", logit_p=X @ beta, observed=Y)
        if budget:
            dp.PrivacyBudget(**{**BUDGET, **arguments})
    return model


def line(budget: bool = True) -> pm.Model:
    """Two free variables."""
    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b")
        pm.Normal("s", a + b * X[:, 1], 1, observed=S)
        if budget:
            dp.PrivacyBudget(**BUDGET)
    return model


def step_of(model: pm.Model, cls=dp.DPLangevin, **arguments):
    return cls(**{"draws": 5, "chains": 1, "model": model, **SETTINGS, **arguments})


def sample(model: pm.Model, **arguments):
    quiet = {"cores": 1, "progressbar": False, "compute_convergence_checks": False}
    return pm.sample(**{"draws": 20, "chains": 2, "model": model, **quiet, **arguments})


@pytest.fixture(scope="module")
def planned():
    """A model and a step that no test may run: 20 draws, 5 tuning, 2 chains."""
    model = logistic()
    step = step_of(model, draws=20, tune=5, chains=2)
    yield model, step
    assert dp.get_budget(model).spent().epsilon == 0


@pytest.fixture(scope="module")
def used():
    """A model, its step and the raw result, once the budget is spent."""
    model = logistic()
    step = step_of(model, draws=20, chains=1)
    idata = sample(model, draws=20, tune=0, chains=1, step=step)
    assert dp.get_budget(model).spent().epsilon == pytest.approx(5.0)
    return model, step, idata


class TestBudget:
    def test_missing_for_a_step(self):
        with refused(dp.UnsafeModel, "DPLangevin needs a privacy budget", "dp.PrivacyBudget("):
            step_of(logistic(budget=False))

    def test_missing_for_dp_sample(self):
        with refused(dp.UnsafeModel, "needs a privacy budget", "dp.PrivacyBudget("):
            dp.sample(model=logistic(budget=False))

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"epsilon": -1}, ["epsilon must be positive"]),
            ({"epsilon": 0}, ["epsilon must be positive"]),
            ({"epsilon": np.nan}, ["epsilon must be finite"]),
            ({"epsilon": np.inf}, ["epsilon must be finite"]),
            ({"epsilon": "1"}, ["epsilon must be a number"]),
            ({"epsilon": 1.1e6}, ["epsilon of a budget must be from 0.001 to 1e+06"]),
            ({"epsilon": 1e12}, ["epsilon of a budget must be from 0.001 to 1e+06"]),
            ({"epsilon": 9e-4}, ["epsilon of a budget must be from 0.001 to 1e+06"]),
            ({"delta": 1e-301}, ["delta of a budget must be from 1e-300 to 0.5"]),
            ({"delta": 0.6}, ["delta of a budget must be from 1e-300 to 0.5"]),
            ({"delta": 1}, ["delta must lie strictly between 0 and 1", "1e-6"]),
            ({"delta": 1.5}, ["delta must lie strictly between 0 and 1"]),
            ({"delta": 0}, ["delta must lie strictly between 0 and 1"]),
            ({"delta": 1 / N}, ["delta", "not below 1/n"]),
            ({"ledger": ":memory:"}, ["':memory:' is not the path", "without ledger="]),
            ({"ledger": ""}, ["'' is not the path", "without ledger="]),
            ({"ledger": 3}, ["the path of a ledger must be a path, not int"]),
            ({"neighboring": "add_one"}, ["neighboring", "replace_one", "add_or_remove_one"]),
            ({"neighboring": "add_or_remove_one"}, ["add_or_remove_one", "n_public="]),
            ({"n_public": 30}, ["n_public", "Leave it out"]),
            ({"n_public": 2.5}, ["n_public must be an integer"]),
            ({"public": "y"}, ["write public=['y']"]),
            ({"public": None}, ["public must be a list of names"]),
            ({"public": ["age"]}, ["public names ['age']", "['y']"]),
            ({"public": ["beta"]}, ["public names ['beta']", "pm.Data"]),
            (
                {"privacy_unit": IDS[:-1]},
                ["privacy_unit of `y`", "one id for each row", "another length"],
            ),
            ({"privacy_unit": IDS.astype(float)}, ["privacy_unit of `y`", "of type float"]),
            ({"privacy_unit": np.full(N, "mallory")}, ["fewer than 3 units"]),
            ({"privacy_unit": IDS % 2}, ["privacy_unit gives all rows to fewer than 3 units"]),
            ({"privacy_unit": {"income": IDS}}, ["privacy_unit names ['income']", "['y']"]),
            ({"dataset": X}, ["dataset must be a label"]),
        ],
        ids=lambda value: "" if isinstance(value, list) else "-".join(value),
    )
    def test_arguments(self, arguments, words):
        with refused(ValueError, *words):
            logistic(**arguments)

    def test_ledger_that_is_not_there(self, tmp_path):
        with refused(dp.LedgerError, "no ledger at", "Ledger.create"):
            logistic(ledger=tmp_path / "missing.sqlite")

    def test_share_beyond_the_cap_of_the_ledger(self, tmp_path):
        ledger = dp.Ledger.create(tmp_path / "ledger.sqlite", epsilon=1.0, delta=1e-4)
        with refused(dp.BudgetExceeded, "overall cap", "smaller epsilon"):
            logistic(ledger=ledger)

    def test_everything_public(self):
        with refused(dp.UnsafeModel, "no private observed variable"):
            logistic(public=["y"])

    def test_before_the_data(self):
        with refused(dp.UnsafeModel, "no private observed variable"), pm.Model():
            pm.Normal("beta")
            dp.PrivacyBudget(**BUDGET)

    def test_same_line_twice(self):
        with refused(dp.UnsafeModel, "already has a PrivacyBudget", "rebuild the model"):
            with logistic():
                dp.PrivacyBudget(**BUDGET)

    def test_variables_after_the_budget(self):
        with logistic() as model:
            pm.Normal("late")
        with refused(dp.UnsafeModel, "['late']", "Declare the budget last"):
            step_of(model)

    def test_too_small_for_the_plan(self):
        with refused(ValueError, "cannot pay", "fewer draws"):
            step_of(logistic(), draws=10**13)

    @pytest.mark.filterwarnings("default:These data already have a budget:UserWarning")
    def test_cell_of_the_model_run_again(self):
        """Legal (the first model may have been a mistake), but the two are counted apart."""
        logistic()
        with pytest.warns(UserWarning, match=r"counted apart.*dp\.Ledger\.create"):
            logistic()


class TestNestedAndCopied:
    def test_budget_on_a_nested_model(self):
        with refused(dp.UnsafeModel, "nested", "outermost"), pm.Model():
            with pm.Model("inner"):
                pm.Normal("y", pm.Normal("b"), 1, observed=S)
                dp.PrivacyBudget(**BUDGET)

    def test_step_for_a_nested_model(self):
        with pm.Model() as outer:
            with pm.Model("inner") as inner:
                pm.Normal("y", pm.Normal("b"), 1, observed=S)
            budget = dp.PrivacyBudget(**BUDGET)
        assert dp.get_budget(inner) is budget is dp.get_budget(outer)
        with refused(dp.UnsafeModel, "nested", "outermost"):
            step_of(inner)

    @pytest.mark.parametrize(
        "copied",
        [
            pm.Model.copy,
            copy.deepcopy,
            lambda model: pm.do(model, {"a": 0.0}),
            lambda model: pm.observe(model, {"a": 0.0}),
        ],
        ids=["copy", "deepcopy", "do", "observe"],
    )
    def test_a_copy_is_neither_sampled_nor_budgeted(self, copied):
        other = copied(line())
        with refused(dp.UnsafeModel, "copy", "original model"):
            step_of(other)
        with refused(dp.UnsafeModel, "`b`" if "a" not in other.named_vars else "PrivacyBudget"):
            sample(other)
        with refused(dp.UnsafeModel, "copy", "persistent ledger"):
            dp.PrivacyBudget(**BUDGET, model=other)
        with refused(dp.UnsafeModel, "copy"):
            dp.sample(model=other)

    @pytest.mark.slow
    def test_a_pickled_copy_pays_from_the_same_account(self):
        model = logistic()
        other = cloudpickle.loads(cloudpickle.dumps(model))
        with refused(dp.UnsafeModel, "PrivacyBudget", "without privacy"):
            sample(other)
        with refused(dp.UnsafeModel, "already has a PrivacyBudget"):
            dp.PrivacyBudget(**BUDGET, model=other)
        dp.sample(5, chains=1, model=other, step_kwargs=SETTINGS, cores=1, progressbar=False)
        assert dp.get_budget(model).spent() == dp.get_budget(other).spent()
        with refused(dp.BudgetExceeded, "used up"):
            step_of(model)


class TestStep:
    @pytest.mark.parametrize("cls", [dp.DPLangevin, dp.DPHMC, dp.DPPenalty])
    def test_nothing_given(self, cls):
        """The plan is all that is needed: the rest is learned privately."""
        with refused(ValueError, f"{cls.__name__} needs draws", "chains"):
            cls(model=logistic())

    @pytest.mark.parametrize(
        ("given", "missing"), [({"clip_norm": 0.45}, "scaling"), ({"scaling": 0.3}, "clip_norm")]
    )
    @pytest.mark.parametrize("cls", [dp.DPLangevin, dp.DPHMC, dp.DPPenalty])
    def test_one_half_of_the_settings_by_hand(self, cls, given, missing):
        with refused(ValueError, f"{cls.__name__} needs", missing, "public knowledge"):
            cls(draws=5, chains=1, model=logistic(), **given)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"clip_norm": None}, ["needs clip_norm", "public knowledge"]),
            ({"clip_norm": -1}, ["clip_norm", "positive"]),
            ({"clip_norm": np.nan}, ["clip_norm", "finite"]),
            ({"clip_norm": {"gradients": 1.0}}, ["clip_norm", "['gradient']", "['gradients']"]),
            ({"draws": None}, ["needs draws"]),
            ({"draws": 0}, ["draws must be an integer of at least 1"]),
            ({"draws": 2.5}, ["draws must be an integer of at least 1"]),
            ({"chains": None}, ["needs chains"]),
            ({"chains": 0}, ["chains must be an integer of at least 1"]),
            ({"tune": None}, ["tune must be an integer of at least 0"]),
            ({"runs": 0}, ["runs must be an integer of at least 1"]),
            ({"scaling": None}, ["needs scaling"]),
            ({"scaling": 0}, ["scaling", "positive and finite"]),
            ({"scaling": np.nan}, ["scaling", "positive and finite"]),
            ({"scaling": "prior"}, ["scaling must be numbers"]),
            ({"scaling": [1, 2, 3]}, ["scaling", "vector of 2", "(3,)", "beta"]),
            ({"scaling": np.eye(3)}, ["scaling", "(2, 2) matrix", "(3, 3)"]),
            ({"scaling": np.ones((2, 2))}, ["scaling", "invertible"]),
            ({"scaling": {"bta": 1}}, ["scaling names ['bta']", "beta"]),
            ({"scaling": {}}, ["scaling lacks ['beta']"]),
            ({"scaling": {"beta": [1, 2, 3]}}, ["scaling of `beta`", "(2,)"]),
            ({"scaling": {"beta": [1, -1]}}, ["scaling of `beta`", "positive"]),
            ({"noise_multiplier": 0}, ["noise_multiplier", "positive"]),
            ({"noise_multiplier": "low"}, ["noise_multiplier", "must be a number"]),
            (
                {"noise_multiplier": {"gradient": 1.0, "energy": 1.0}},
                ["noise_multiplier", "['energy_error', 'gradient']", "['energy', 'gradient']"],
            ),
            ({"step_size": -1}, ["step_size must be positive"]),
            ({"step_size": [0.1, 0.2]}, ["step_size must be a number"]),
            ({"n_steps": 0}, ["n_steps must be an integer of at least 1"]),
            ({"curvature": None}, ["exactly one of curvature", "energy_clip"]),
            ({"energy_clip": 0.1}, ["exactly one of curvature", "energy_clip"]),
            ({"curvature": -1}, ["curvature must be positive"]),
            ({"momentum": "none"}, ["momentum", "'persistent' or 'fresh'"]),
            ({"friction": -1}, ["friction must not be negative"]),
            ({"jitter": 2}, ["jitter", "[0, 1)"]),
            ({"energy_share": 1.5}, ["energy_share must be between 0 and 1"]),
            ({"blocked": False}, ["blocked"]),
            ({"cls": dp.DPHMC, "n_steps": None}, ["DPHMC needs n_steps"]),
            ({"cls": dp.DPHMC, "n_steps": 2, "integrator": "verlet"}, ["integrator", "leapfrog"]),
            (
                {"cls": dp.DPHMC, "n_steps": 2, "integrator": "position", "reuse_gradient": True},
                ["reuse_gradient", "leapfrog"],
            ),
            ({"cls": dp.DPPenalty, "proposal": "walk"}, ["proposal must be one of", "guided"]),
            ({"cls": dp.DPPenalty, "likelihood_power": 0.0}, ["likelihood_power"]),
            ({"cls": dp.DPPenalty, "likelihood_power": 1.5}, ["likelihood_power", "at most 1"]),
            ({"cls": dp.DPBarker, "noise_sd": 1.9}, ["Barker", "1.81"]),
            ({"cls": dp.DPPenalty, "step_size": [1, 2, 3]}, ["step_size", "vector of 2"]),
        ],
        ids=str,
    )
    def test_arguments(self, arguments, words):
        settings = dict(arguments)
        cls = settings.pop("cls", dp.DPLangevin)
        if cls is not dp.DPLangevin:
            settings = {"curvature": ..., **settings}
        settings = {**SETTINGS, "draws": 5, "chains": 1, **settings}
        settings = {name: value for name, value in settings.items() if value is not ...}
        model = logistic()
        with refused(ValueError, *words):
            cls(model=model, **settings)

    @pytest.mark.parametrize(
        ("cls", "arguments", "words"),
        [
            (
                dp.DPLangevin,
                {"noise_multiplier": 2.0},
                ["noise_multiplier", "clip_norm", "by hand"],
            ),
            (dp.DPHMC, {"noise_multiplier": 2.0}, ["noise_multiplier", "clip_norm", "by hand"]),
            (dp.DPPenalty, {"noise_multiplier": 2.0}, ["noise_multiplier", "clip_norm", "by hand"]),
            (dp.DPLangevin, {"form": "anchord"}, ["form must be", "'anchored'", "'anchord'"]),
            (dp.DPLangevin, {"form": None}, ["form must be 'auto'"]),
            (dp.DPLangevin, {"curvature": 0.1}, ["curvature", "clip_norm and scaling"]),
            (dp.DPLangevin, {"energy_clip": 0.1}, ["energy_clip", "clip_norm and scaling"]),
            (dp.DPLangevin, {"log_concave": True}, ["log_concave", "`curvature`"]),
            (dp.DPLangevin, {"step_size": 0}, ["step_size must be positive"]),
            (dp.DPLangevin, {"step_size": [0.1, 0.2]}, ["step_size must be a number"]),
            (dp.DPLangevin, {"n_steps": 0}, ["n_steps must be an integer of at least 1"]),
            (dp.DPLangevin, {"momentum": "none"}, ["momentum", "'persistent' or 'fresh'"]),
            (dp.DPLangevin, {"friction": -1}, ["friction must not be negative"]),
            (dp.DPLangevin, {"jitter": 1}, ["jitter", "[0, 1)"]),
            (dp.DPHMC, {"step_size": -1}, ["step_size must be positive"]),
            (dp.DPHMC, {"n_steps": 1.5}, ["n_steps must be an integer of at least 1"]),
            (dp.DPHMC, {"gradient_share": 1}, ["gradient_share must be between 0 and 1"]),
            (dp.DPPenalty, {"step_size": [1, 2, 3]}, ["step_size", "vector of 2", "(3,)"]),
            (dp.DPPenalty, {"step_size": [[1, 2]]}, ["step_size", "vector of 2", "(1, 2)"]),
            (dp.DPPenalty, {"step_size": [1, -1]}, ["step_size must be positive"]),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_arguments_of_a_private_preparation(self, cls, arguments, words):
        with refused(ValueError, *words):
            cls(draws=5, chains=1, model=logistic(), **arguments)

    @pytest.mark.parametrize("form", ["anchored", "quadratic"])
    def test_form_that_is_not_for_settings_by_hand(self, form):
        with refused(ValueError, f"form='{form}'", "clip_norm and scaling"):
            step_of(logistic(), form=form)

    @pytest.mark.parametrize("value", ["maybe", 1, [True]])
    def test_consistent_clipping_is_a_choice(self, value):
        with refused(ValueError, "consistent_clipping must be True, False or None"):
            dp.DPLangevin(draws=5, chains=1, model=logistic(), consistent_clipping=value)

    def test_consistent_clipping_of_an_outcome_that_is_a_covariate(self):
        with pm.Model() as model:
            a, b, data = pm.Normal("a"), pm.HalfNormal("b"), pm.Data("data", S)
            pm.Normal("s", a * X[:, 1], b, observed=data)
            pm.Normal("t", a * data, b, observed=X[:, 1])
            dp.PrivacyBudget(**BUDGET)
        with refused(ValueError, "consistent_clipping=True is not available"):
            dp.DPLangevin(draws=5, chains=1, model=model, consistent_clipping=True)

    @pytest.mark.parametrize(
        "cls", [partial(dp.DPLangevin, form="anchored"), dp.DPHMC, dp.DPPenalty]
    )
    def test_too_many_draws_for_the_budget(self, cls):
        """A preparation does not begin if no chain that is charged could follow it."""
        with refused(ValueError, "cannot pay", "fewer draws"):
            cls(draws=10**13, chains=1, model=logistic(), progressbar=False)

    @pytest.mark.parametrize(
        ("typo", "meant"),
        [("clip_nrom", "clip_norm"), ("draw", "draws"), ("stepsize", "step_size")],
    )
    @pytest.mark.parametrize("cls", [dp.DPLangevin, dp.DPHMC, dp.DPPenalty])
    def test_misspelt_argument(self, cls, typo, meant):
        model = logistic()
        with refused(TypeError, cls.__name__, f"no argument `{typo}`", f"Did you mean `{meant}`"):
            cls(model=model, **{typo: 1})
        with refused(TypeError, cls.__name__, f"no argument `{typo}`"):
            dp.sample(model=model, step=cls, step_kwargs={typo: 1})

    def test_argument_of_another_sampler(self):
        with refused(TypeError, "no argument `target_accept`", "It takes vars, draws"):
            step_of(logistic(), target_accept=0.9)

    def test_some_variables_only(self):
        model = line()
        with refused(dp.UnsafeModel, "must move all variables", "['b']", "Leave `vars` out"):
            step_of(model, vars=[model["a"]])

    def test_variables_of_another_model(self):
        with refused(ValueError, "not random variables in the model"):
            step_of(logistic(), vars=[logistic(budget=False)["beta"]])


def refuse_model(build, error: type[Exception], *words: str) -> None:
    with refused(error, *words):
        with pm.Model() as model:
            build()
            dp.PrivacyBudget(**BUDGET)
        step_of(model)


class TestModel:
    def test_discrete_parameter(self):
        def build():
            pm.Normal("y", pm.Bernoulli("z", 0.5) * pm.Normal("b"), 1, observed=S)

        refuse_model(build, dp.UnsafeModel, "`z` is a discrete parameter", "pm.Mixture")

    @pytest.mark.parametrize("container", [pt.as_tensor, lambda x: pm.Data("X", x)])
    def test_standardising_inside(self, container):
        def build():
            features = container(X)
            features = features - features.mean(0)
            pm.Bernoulli("y", logit_p=features @ pm.Normal("b", shape=2), observed=Y)

        refuse_model(build, dp.NotFactorizable, "`y`", "reach other records", "public constants")

    def test_data_in_the_prior(self):
        def build():
            centre = pm.Data("centre", S).mean()
            pm.Normal("y", pm.Normal("b", centre, 1), 1, observed=S)

        refuse_model(build, dp.UnsafeModel, "prior", "`centre`", "PrivacyBudget(public=...)")

    def test_ar1(self):
        def build():
            rho = pm.Normal("rho", shape=1)
            pm.AR("y", rho, sigma=1.0, init_dist=pm.Normal.dist(0, 1), observed=S)

        refuse_model(build, dp.NotFactorizable, "`y`", "no record axis")

    def test_lagged_data(self):
        def build():
            series = pm.Data("series", S)
            pm.Normal("y", pm.Normal("rho") * series[:-1], 1, observed=S[1:])

        refuse_model(build, dp.NotFactorizable, "`y`", "shifts them", "autoregressive")

    def test_latent_per_record(self):
        def build():
            pm.Normal("y", pm.Normal("u", shape=N), 1, observed=S)

        refuse_model(build, dp.NotFactorizable, "parameter `u` has one entry per record")

    def test_gaussian_process(self):
        def build():
            gp = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(2, pm.HalfNormal("length")))
            gp.marginal_likelihood("y", X=X, y=S, sigma=1.0)

        refuse_model(build, dp.NotFactorizable, "`y`", "no record axis")

    @pytest.mark.parametrize(
        "data", [np.where(np.arange(N) == 3, np.nan, S), np.ma.masked_greater(S, 0.7)]
    )
    @pytest.mark.filterwarnings("ignore:Data in y contains missing values")
    def test_missing_data(self, data):
        def build():
            pm.Normal("y", pm.Normal("b"), 1, observed=data)

        refuse_model(build, dp.NotFactorizable, "missing values", "Drop or impute")

    def test_potential(self):
        def build():
            beta = pm.Normal("beta", shape=2)
            pm.Bernoulli("y", logit_p=X @ beta, observed=Y)
            pm.Potential("penalty", pm.logp(pm.Normal.dist(X @ beta, 1), S).sum())

        refuse_model(build, dp.NotFactorizable, "pm.Potential (`penalty`)", "CustomDist")

    def test_total_size(self):
        def build():
            beta = pm.Normal("beta", shape=2)
            pm.Bernoulli("y", logit_p=X @ beta, observed=Y, total_size=600)

        refuse_model(build, dp.NotFactorizable, "`y`", "total_size")

    def test_string_columns(self):
        """PyMC's own refusal, before there is a budget."""
        frame = pd.DataFrame({"name": ["mallory"] * N, "x": S})

        def build():
            pm.Bernoulli("y", logit_p=pm.math.dot(frame.values, pm.Normal("b", shape=2)))

        refuse_model(build, TypeError, "object")

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("container", [np.asarray, lambda x: pm.Data("X", x)])
    def test_bad_features(self, container, bad):
        features = X.copy()
        features[3, 1] = bad
        if np.isnan(bad) and container is not np.asarray:
            pytest.skip("PyMC refuses NaN in pm.Data itself")

        def build():
            beta = pm.Normal("b", shape=2)
            pm.Bernoulli("y", logit_p=pm.math.dot(container(features), beta), observed=Y)

        refuse_model(build, dp.UnsafeModel, "column 1", "NaN or infinite", "Clean the data")

    @pytest.mark.parametrize(
        ("container", "rows"),
        [(np.asarray, 59), (lambda x: pm.Data("X", x), 59), (lambda x: pm.Data("X", x), 61)],
    )
    def test_lengths_that_disagree(self, container, rows):
        def build():
            features = container(np.resize(X, (rows, 2)))
            pm.Bernoulli("y", logit_p=pm.math.dot(features, pm.Normal("b", shape=2)), observed=Y)

        refuse_model(build, dp.NotFactorizable, "`y`", "the same number of rows")

    def test_observed_variables_of_different_lengths(self):
        def build():
            b = pm.Normal("b")
            pm.Normal("y", b, 1, observed=S)
            pm.Normal("z", b, 1, observed=S[:40])

        refuse_model(build, dp.NotFactorizable, "`y`, `z` differ in length", "privacy_unit={")

    @pytest.mark.parametrize("data", [0.7362819, [0.7362819]])
    def test_one_number(self, data):
        def build():
            pm.Normal("y", pm.Normal("b"), 1, observed=data)

        refuse_model(build, dp.NotFactorizable, "`y`", "record")

    def test_no_data(self):
        refuse_model(lambda: pm.Normal("b"), dp.UnsafeModel, "no private observed variable")


class TestPmSample:
    @pytest.mark.parametrize("cores", [1, 2])
    @pytest.mark.parametrize(
        "call",
        [
            {"draws": 21},
            {"draws": 10},
            {"tune": 6},
            {"tune": 1000},  # PyMC 5's default would spend everything on discarded draws
            {"chains": 3},
            {"chains": 1},
        ],
        ids=str,
    )
    def test_another_plan(self, planned, call, cores):
        model, step = planned
        (name, value), *_ = call.items()
        with refused(
            dp.PlanMismatch,
            "planned for draws=20, tune=5, chains=2",
            f"{name}={value}",
            "pm.sample(draws=20, tune=5, chains=2, step=step)",
        ):
            sample(model, **{"tune": 5, "step": [step], "cores": cores, **call})

    @pytest.mark.parametrize("step", [None, "partial"])
    @pytest.mark.parametrize("nuts_sampler", ["pymc", "nutpie", "numpyro"])
    def test_without_a_private_step(self, step, nuts_sampler):
        model = line()
        with model:
            chosen = pm.Slice([model["b"]]) if step else None
        with refused(dp.UnsafeModel, "PrivacyBudget", "without privacy", "dp.DPLangevin"):
            sample(model, step=chosen, nuts_sampler=nuts_sampler)

    def test_external_sampler_and_a_private_step(self, planned):
        model, step = planned
        with refused(ValueError):  # PyMC's own
            sample(model, tune=5, step=step, nuts_sampler="nutpie")

    def test_private_step_for_a_part(self):
        model = line()
        with refused(dp.UnsafeModel, "must move all variables", "['b']"), model:
            sample(model, step=[step_of(model, vars=[model["a"]]), pm.Slice([model["b"]])])

    @pytest.mark.parametrize("first", [True, False])
    def test_combined_with_another_step(self, planned, first):
        model, step = planned
        with model:
            other = pm.Metropolis()
        with refused(dp.UnsafeModel, "combined with other step methods"):
            sample(model, tune=5, step=[step, other] if first else [other, step])

    def test_population_path(self, planned):
        """It never asks for a progress bar, where plans are checked: no chain may begin."""
        model, step = planned
        with model:
            other = pm.DEMetropolis()
        with refused(dp.PlanMismatch, "no run was authorised", "pm.sample"):
            sample(model, tune=5, chains=4, step=[other, step])

    def test_step_of_another_model(self, planned):
        _, step = planned
        with refused(ValueError, "not a value variable in the model"):  # PyMC's own
            sample(logistic(), tune=5, step=step)

    def test_a_class(self, planned):
        with refused(ValueError, "Step should be a Step"):  # PyMC's own
            sample(planned[0], step=dp.DPLangevin)

    def test_step_driven_by_hand(self, planned):
        model, step = planned
        with refused(dp.PlanMismatch, "no run was authorised"):
            copy.copy(step).step(model.initial_point())

    def test_start_outside_of_the_support(self):
        with pm.Model() as model:
            pm.Normal("y", pm.Uniform("b", 0, 1), 1, observed=S)
            dp.PrivacyBudget(**BUDGET)
        settings = {k: v for k, v in SETTINGS.items() if k != "curvature"}
        step = dp.DPHMC(draws=5, chains=1, n_steps=1, reuse_gradient=True, model=model, **settings)
        with refused(ValueError, "start", "support"), np.errstate(invalid="ignore"):
            sample(model, draws=5, tune=0, chains=1, step=step, initvals={"b": 2.0})

    def test_tune_left_out(self):
        """PyMC 5 would tune 1000 times; PyMC 6 asks the step."""
        model = logistic()
        step = step_of(model, tune=3)
        if PYMC_MAJOR < 6:
            with refused(dp.PlanMismatch, "tune=3", "tune=1000"):
                sample(model, draws=5, chains=1, step=step)
        else:
            assert (
                group(sample(model, draws=5, chains=1, step=step), "posterior").sizes["draw"] == 5
            )
            assert dp.get_budget(model).account.read().spent == step.plan.run_cost


class TestRunAgain:
    @pytest.mark.slow
    def test_cell_of_the_step(self, used):
        with refused(dp.BudgetExceeded, "epsilon=5", "used up", "can still be released"):
            step_of(used[0])

    def test_cell_of_the_sampling(self, used):
        model, step, _ = used
        with refused(dp.BudgetExceeded, "all planned runs of this step (1)", "build a new step"):
            sample(model, tune=0, chains=1, step=step)

    def test_cell_of_dp_sample(self, used):
        with refused(dp.BudgetExceeded, "used up"):
            dp.sample(5, chains=1, model=used[0], step_kwargs=SETTINGS)

    def test_with_noise_given(self, used):
        """Nothing is calibrated, so the step can be built from what is left: nothing."""
        with refused(dp.BudgetExceeded, "used up"):
            step_of(used[0], noise_multiplier=100.0)


class TestDpSample:
    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"draws": 21}, dp.PlanMismatch, ["planned with draws=20", "draws=21"]),
            ({"tune": 0}, dp.PlanMismatch, ["tune=5", "tune=0"]),
            ({"chains": None}, dp.PlanMismatch, ["chains=2", "chains=None"]),
            ({"step_kwargs": {"jitter": 0.1}}, ValueError, ["step_kwargs", "built already"]),
            ({"step": "NUTS"}, ValueError, ["'NUTS'", "DPLangevin"]),
            ({"step": pm.NUTS}, ValueError, ["NUTS is not a private step", "DPLangevin"]),
            ({"step": None}, ValueError, ["not a private step", "DPLangevin"]),
            (
                {"step": dp.DPLangevin, "step_kwargs": {"clip_norm": 0.45}},
                ValueError,
                ["needs step_size", "scaling"],
            ),
            ({"nuts_sampler": "nutpie"}, ValueError, ["nuts_sampler", "not private"]),
            ({"return_inferencedata": False}, ValueError, ["return_inferencedata"]),
            ({"blocked": False}, ValueError, ["blocked=False"]),
        ],
        ids=str,
    )
    def test_arguments(self, planned, arguments, error, words):
        model, step = planned
        call = {"draws": 20, "tune": 5, "chains": 2, "step": step, **arguments}
        with refused(error, *words):
            dp.sample(**call, model=model, cores=1, progressbar=False)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"random_seed": "a"}, ["random_seed cannot be 'a'", "Leave it out"]),
            ({"random_seed": -1}, ["random_seed cannot be -1"]),
            ({"cores": 0}, ["cores cannot be 0"]),
            ({"cores": "all"}, ["cores cannot be 'all'"]),
            ({"blas_cores": "x"}, ["blas_cores cannot be 'x'"]),
            ({"progressbar": "no"}, ["progressbar cannot be 'no'"]),
            ({"callback": 3}, ["callback cannot be 3"]),
            ({"mp_ctx": "nope"}, ["mp_ctx cannot be 'nope'"]),
            ({"init": "adapt_diag"}, ["does not take init", "initvals"]),
            ({"compile_kwargs": {"mode": "NOPE"}}, ["compile_kwargs cannot be"]),
            ({"initvals": {"nope": 1}}, ["initvals of nope must be", "its shape: beta [2]"]),
            ({"initvals": {"beta": 1.0}}, ["initvals of beta must be finite", "beta [2]"]),
            ({"initvals": {"beta": [1, np.nan]}}, ["initvals of beta must be finite"]),
            ({"initvals": {"beta": "zero"}}, ["initvals of beta must be finite"]),
            ({"initvals": [{}]}, ["initvals must be a dict", "each chain"]),
            ({"step_kwargs": 3}, ["step_kwargs must be a dict"]),
            ({"speed": 3}, ["no argument speed, here or in pm.sample"]),
        ],
        ids=str,
    )
    def test_arguments_of_pm_sample(self, arguments, words):
        with refused(ValueError, *words):
            dp.sample(20, chains=2, model=logistic(), **arguments)

    def test_step_of_another_model(self, planned):
        with refused(dp.PlanMismatch, "built for another model"):
            dp.sample(20, tune=5, chains=2, step=planned[1], model=logistic())


class TestRelease:
    def test_find_map(self):
        model = logistic()
        with pytensor.config.change_flags(linker="py"):
            found = pm.find_MAP(model=model, progressbar=False)
        with refused(dp.UnsafeRelease, "dict", "pm.find_MAP"):
            dp.release(found, model)

    def test_fit(self):
        model = logistic()
        with model, pytensor.config.change_flags(linker="py"):
            approximation = pm.fit(10, progressbar=False)
            draws = approximation.sample(10)
        with refused(dp.UnsafeRelease, "pm.fit"):
            dp.release(approximation, model)
        with refused(dp.UnsafeRelease, "dp_plan_id", "pm.fit"):
            dp.release(draws, model)

    def test_model_without_budget(self, used):
        with refused(dp.UnsafeRelease, "no PrivacyBudget"):
            dp.release(used[2], logistic(budget=False))

    def test_model_with_another_budget(self, used):
        with refused(dp.UnsafeRelease, "another budget"):
            dp.release(used[2], logistic())

    @pytest.mark.parametrize("names", [["y"], "y", ["nothing"]])
    def test_names(self, used, names):
        with refused(dp.UnsafeRelease, "cannot be released", "['beta']"):
            dp.release(used[2], used[0], var_names=names)

    def test_names_of_a_released_result(self, used):
        safe = dp.release(used[2], used[0])
        assert dp.release(safe) is safe
        with refused(dp.UnsafeRelease, "var_names", "select its variables"):
            dp.release(safe, var_names=["beta"])

    def test_statement_of_what_was_not_released(self, used):
        with refused(dp.UnsafeRelease, "dp.release"):
            dp.privacy_statement(used[2])

    def test_predictions_at_private_covariates(self, used):
        model, _, idata = used
        with refused(dp.UnsafeRelease, "`y`", "private covariates", "public covariates"):
            dp.sample_posterior_predictive(dp.release(idata, model), model)
        with refused(dp.UnsafeRelease, "Release the draws first"):
            dp.sample_posterior_predictive(idata, model)
        with refused(ValueError, "var_names ['nothing']"):
            dp.sample_posterior_predictive(dp.release(idata, model), model, var_names="nothing")


def test_warnings_point_at_the_line_that_called_the_package():
    within = {"__name__": "pymc_dp.made_up"}
    exec("from pymc_dp.base.checks import warn\ndef call(): warn('look')", within)  # noqa: S102
    with pytest.warns(UserWarning, match="look") as caught:
        within["call"]()
    assert caught[0].filename == __file__
