"""Private predictive checks: p-values under the model, power, what is released, what it costs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import stats

import pymc_dp as dp
from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.errors import BudgetExceeded, UnsafeModel, UnsafeRelease
from pymc_dp.privacy.accounting import mu_from_budget, units_from_mu
from pymc_dp.privacy.answer import Grid, Query, VectorSum
from pymc_dp.privacy.holder import Holder
from pymc_dp.privacy.noise import insecure_noise
from pymc_dp.publication.results import constrain
from pymc_dp.records.extraction import extract
from pymc_dp.records.units import RecordStore
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from pymc_dp.workflow import estimates
from pymc_dp.workflow.checking import discrepancies, judge
from pymc_dp.workflow.discrepancies import Discrepancies, below, function, named
from pymc_dp.workflow.estimates import Estimate, estimate_of
from tests import models

pytestmark = pytest.mark.filterwarnings(
    "ignore:These data already have a budget:UserWarning",
    "ignore:The normal approximation is unreliable:UserWarning",
    "ignore:These draws are about as wide:UserWarning",
)

RELATIONS = ("replace_one", "add_or_remove_one")
STATISTICS = [named("mean"), named("dispersion"), named("zeros"), below(2.0)]
GROUPS, TRUTH = 3, np.array([0.2, 0.5, -0.4, 0.1])


def at(mean: np.ndarray, raw: np.ndarray, noise: np.ndarray | None = None) -> Estimate:
    """An estimate with an uninformative prior and noise of this covariance in its score."""
    extra = 0.0 if noise is None else raw @ noise @ raw
    return Estimate.of(mean, raw, raw + extra, raw)


# -- p-values under the model ---------------------------------------------------------------------


class PoissonStudy:
    """Data of a Poisson regression with group effects, fitted by maximum likelihood."""

    def __init__(self, n: int, by: str | None = None) -> None:
        rng = np.random.default_rng(0)
        self.n, self.x, self.group = n, rng.normal(size=n), rng.integers(0, GROUPS, n)
        self.design = np.column_stack([self.x, np.eye(GROUPS)[self.group]])
        with pm.Model() as model:
            b, a = pm.Normal("b", 0, 100), pm.Normal("a", 0, 100, shape=GROUPS)
            x, group = pm.Data("x", self.x), pm.Data("group", self.group)
            pm.Poisson("y", pt.exp(b * x + a[group]), observed=rng.poisson(1.0, n))
        d = GROUPS + 1
        self.engine = RowEngine.of(extract(model), Coordinates(np.zeros(d), np.eye(d)))
        guess = at(np.zeros(d), np.eye(d) / n)
        self.spec = discrepancies(self.engine, guess, STATISTICS, n, model, by, None)
        leaves = [leaf.source for leaf in self.engine.groups[0].functions.graph.leaves]
        [self.leaf] = [k for k, s in enumerate(leaves) if s not in (model["x"], model["group"])]

    def fit(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        beta = TRUTH.copy()
        for _ in range(8):
            mu = np.exp(self.design @ beta)
            information = (self.design.T * mu) @ self.design
            beta = beta + np.linalg.solve(information, self.design.T @ (y - mu))
        return beta, information

    def check(self, rng, noise_sd: float, noise_in_fit: float, y: np.ndarray):
        beta, information = self.fit(y)
        raw = np.linalg.inv(information)
        noise = noise_in_fit * information
        beta = beta + raw @ rng.multivariate_normal(np.zeros(len(raw)), noise)
        estimate = at(beta, raw, noise)
        [group] = self.engine.groups
        arrays = list(group.store.read())
        arrays[self.leaf] = y.astype(arrays[self.leaf].dtype)
        engine = self.engine.on([RowGroup(group.functions, RecordStore(arrays), None)], self.n)
        spec = replace(self.spec, coordinates=estimate.coordinates, points=estimate.points())
        total = sum(block.sum(axis=1) for _, block in spec.blocks(engine))
        value = total + rng.normal(0.0, noise_sd, spec.size)
        by = None if spec.by is None else "group"
        return judge(spec, estimate, value, noise_sd, 1.0, "", by)


def uniform(study, repeats: int, noise_sd: float, noise_in_fit: float, dispersion: float = 0.0):
    rng, found = np.random.default_rng(1), []
    for _ in range(repeats):
        mu = np.exp(study.design @ TRUTH)
        if dispersion:
            mu = mu * rng.gamma(1 / dispersion, dispersion, study.n)
        check = study.check(rng, noise_sd, noise_in_fit, rng.poisson(mu))
        found.append([check.p_value, *check.table["p_value"]])
    return np.array(found)


CASES = {
    "no noise": (0.01, 1e-9),
    "noise in the release": (30.0, 1e-9),
    "noise in the fit": (0.01, 4.0),
    "noise in both": (5.0, 1.0),
}


def smallest(found: np.ndarray) -> float:
    return min(stats.kstest(column, "uniform").pvalue for column in found.T)


@pytest.fixture(scope="module")
def study() -> PoissonStudy:
    return PoissonStudy(3000)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("case", CASES)
def test_p_values_are_uniform_under_the_model(study: PoissonStudy, case: str) -> None:
    """Kolmogorov-Smirnov; a false alarm below 1e-3 in each case, with its five columns."""
    assert smallest(uniform(study, 60, *CASES[case])) > 1e-4


@pytest.mark.compiled
def test_plain_posterior_predictive_p_values_are_not_uniform(
    study: PoissonStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: the data are not allowed to have been used for the fit."""
    monkeypatch.setattr(Estimate, "in_z", lambda self: (np.zeros((4, 4)), np.zeros((4, 4))))
    assert smallest(uniform(study, 60, *CASES["no noise"])) < 1e-8


@pytest.mark.compiled
def test_noise_that_is_not_allowed_for_is_seen(study: PoissonStudy) -> None:
    """A planted fault: the noise in the fit is not known."""
    plain = Estimate.in_z
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Estimate, "in_z", lambda self: (np.eye(4), plain(self)[1] * 0.2))
        assert smallest(uniform(study, 60, *CASES["noise in the fit"])) < 1e-4


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("by", [pytest.param(None, marks=pytest.mark.exhaustive), "group"])
@pytest.mark.parametrize("case", CASES)
def test_p_values_are_uniform_in_many_data_sets(case: str, by: str | None) -> None:
    """In 500; false alarms as above, with thirteen columns."""
    assert smallest(uniform(PoissonStudy(3000, by), 500, *CASES[case])) > 1e-4


@pytest.mark.compiled
def test_overdispersed_counts_are_found(study: PoissonStudy) -> None:
    """A gamma factor of variance 0.3; noise of 5 stands for epsilon of about 2."""
    found = uniform(study, 20, 5.0, 0.3, dispersion=0.3)
    assert (found[:, [0, 2, 3]] < 1e-3).all()


# -- what one unit adds ---------------------------------------------------------------------------

FAMILIES = [
    "logistic",
    "binomial",
    "poisson_groups",
    "negative_binomial",
    "normal",
    "student_t",
    "gamma",
    "beta",
    "zero_inflated",
    "hurdle",
    "mixture_shared",
    "censored",
    "persons",
]
SOME = [named("mean"), named("dispersion"), named("zeros"), below(0.4)]


@cache
def spec_of(name: str, by: str | None = None) -> tuple[RowEngine, Discrepancies, pm.Model]:
    model = models.build(name)
    options = models.EXAMPLES[name].options(models.Data())
    records = extract(model, **options)
    d = len(records.initial)
    point = at(records.initial, 0.01 * np.eye(d))
    engine = RowEngine.of(records, point.coordinates)
    spec = discrepancies(engine, point, SOME, records.n_units, model, by, None)
    return engine, spec, model


def values_of(engine: RowEngine, spec: Discrepancies) -> np.ndarray:
    return np.hstack([block.copy() for _, block in spec.blocks(engine)])


REPEATS = 200


def simulated(name: str) -> tuple[RowEngine, Discrepancies]:
    """Rows with outcomes that the model draws at the point, `REPEATS` for each."""
    engine, spec, model = spec_of(name)
    theta = engine.coordinates.location[None, None]
    names = [rv.name for rv in model.free_RVs]
    values = {k: v[0, 0] for k, v in constrain(model, engine.parameters, theta, names).items()}
    observed = pm.do(model, values)[spec.observed]
    drawn = pm.draw(observed, draws=REPEATS, random_seed=1, mode=INTERPRETED)
    [group] = engine.groups
    arrays = [np.concatenate([array] * REPEATS) for array in group.store.read()]
    [outcome] = group.functions.graph.outcomes
    arrays[outcome.leaf] = drawn.ravel().astype(arrays[outcome.leaf].dtype)
    rows = RowGroup(group.functions, RecordStore(arrays), None)
    return engine.on([rows], len(arrays[0])), spec


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_model_expects_of_a_row_is_right(name: str) -> None:
    """Of 200 outcomes that it draws for each of 60 rows: means, variances, and derivatives.

    Limits of five standard errors (false alarm 1e-5 for the 52), and of 15 % for variances.
    """
    engine, spec = simulated(name)
    values = values_of(engine, spec)
    n, t = values.shape[1], len(SOME)
    found, covariances, _, count = spec.read(values.sum(axis=1))
    assert count[0] == pytest.approx(n)
    variances = covariances[0].diagonal()
    assert (np.abs(found[0]) < 5.0 * np.sqrt(variances) + 1e-9 * n).all()
    seen = values[:t].var(axis=1) * n
    np.testing.assert_allclose(seen, variances, rtol=0.15, atol=0.01)
    np.testing.assert_allclose(covariances[0], values[:t] @ values[:t].T, atol=0.02 * n)


@pytest.mark.parametrize("name", FAMILIES)
def test_derivatives_of_expectations(name: str) -> None:
    """Of a smooth statistic: nodes move with the parameters, and indicators jump."""
    engine, spec, _ = spec_of(name)
    smooth = (function("tanh", pt.tanh, (-1.0, 1.0)),)
    at_point = replace(spec, statistics=smooth)
    slopes = at_point.read(values_of(engine, at_point).sum(axis=1))[2][0, 0]
    ahead = []
    for sign in (-1.0, 1.0):
        z = np.zeros(engine.d)
        z[0] = sign * 0.3
        moved = Coordinates(engine.coordinates.theta(z), engine.coordinates.scaling)
        there = replace(at_point, coordinates=moved)
        ahead.append(there.read(values_of(engine, there).sum(axis=1))[0][0, 0])
    assert -(ahead[1] - ahead[0]) / 0.6 == pytest.approx(slopes[0], rel=0.05, abs=2e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_neighbours_are_as_close_as_what_was_paid_for(name: str) -> None:
    """In integers, exactly; and no vector is ever clipped."""
    engine, spec, _ = spec_of(name)
    values = values_of(engine, spec)
    assert np.linalg.norm(values, axis=0).max() <= spec.norm
    for relation in RELATIONS:
        are_close(engine, spec, relation)


def are_close(engine: RowEngine, spec: Discrepancies, relation: str) -> None:
    grid = Grid.finest(0.7, engine.n_units)
    query = Query("check", spec, VectorSum(grid, relation, spec.size, spec.norm))
    whole = Holder(engine).total(query)
    without = Holder(engine.part(np.arange(1, engine.n_units))).total(query)
    if relation == "add_or_remove_one":
        assert squared(whole - without) <= (2.0**grid.log2_sigma / 0.7) ** 2
        return
    [group] = engine.groups
    arrays = [array.copy() for array in group.store.read()]
    mine = slice(0, 1) if group.units is None else group.units == 0
    for array in arrays:
        array[mine] = np.roll(array, 7, axis=0)[mine] * 3
    other = engine.on([RowGroup(group.functions, RecordStore(arrays), group.units)], engine.n_units)
    moved = Holder(other).total(query)
    assert squared(whole - moved) <= (2.0**grid.log2_sigma / 0.7) ** 2
    rest = Holder(other.part(np.arange(1, engine.n_units))).total(query)
    np.testing.assert_array_equal(without, rest)  # the others add the same, to the last bit


def squared(difference: np.ndarray) -> int:
    return sum(int(x) ** 2 for x in difference)


def test_expectations_are_averages_where_noise_has_made_the_fit_wide() -> None:
    """To the third order those over the error; not where it is as wide as a posterior."""
    with pm.Model() as model:
        b = pm.Normal("b", shape=2)
        x = np.random.default_rng(1).normal(size=(40, 2))
        pm.Poisson("y", pt.exp(pm.Data("x", x) @ b), observed=np.arange(40) % 3)
    records, raw = extract(model), np.diag([0.02, 0.01])
    assert at(records.initial, raw, 0.5 * np.linalg.inv(raw)).points() == ()
    error = np.array([[0.1, 0.03], [0.03, 0.07]])
    estimate = Estimate.of(records.initial, raw, error, raw)
    points = np.array([point.location for point in estimate.points()])
    np.testing.assert_allclose(points.mean(axis=0), records.initial, atol=1e-12)
    np.testing.assert_allclose(np.cov(points.T, bias=True), error)
    engine = RowEngine.of(records, estimate.coordinates)
    spec = discrepancies(engine, estimate, [named("zeros")], 40, model, None, None)
    expected = np.exp(-np.exp(x @ points.T)).mean(axis=1)
    seen = (np.arange(40) % 3 == 0) - values_of(engine, spec)[0]
    np.testing.assert_allclose(seen, expected, atol=1e-5)


def test_a_user_counts_by_the_average_of_the_rows() -> None:
    engine, spec, _ = spec_of("persons")
    [group] = engine.groups
    alone = engine.on([RowGroup(group.functions, group.store, None)], group.n_rows)
    rows = values_of(alone, spec)
    for unit, column in enumerate(values_of(engine, spec).T):
        np.testing.assert_allclose(column, rows[:, group.units == unit].mean(axis=1), atol=1e-12)


def test_groups_hold_their_own_rows() -> None:
    with pm.Model() as model:
        a = pm.Normal("a", shape=3)
        labels = np.array([0, 2, 2, 1, 0, 2] * 5)
        pm.Poisson("y", pt.exp(a[pm.Data("g", labels)]), observed=np.arange(30) % 4)
    records = extract(model)
    point = at(records.initial, 0.01 * np.eye(3))
    engine = RowEngine.of(records, point.coordinates)
    spec = discrepancies(engine, point, SOME, 30, model, "g", None)
    whole = discrepancies(engine, point, SOME, 30, model, None, None)
    found, covariances, _, count = spec.read(values_of(engine, spec).sum(axis=1))
    np.testing.assert_allclose(count, [10, 5, 15])
    together = whole.read(values_of(engine, whole).sum(axis=1))
    np.testing.assert_allclose(found.sum(axis=0), together[0][0])
    np.testing.assert_allclose(covariances.sum(axis=0), together[1][0])


# -- from a model and its budget ------------------------------------------------------------------


def counts_model(epsilon: float = 4.0, **options) -> tuple[pm.Model, dp.PrivacyBudget]:
    rng = np.random.default_rng(3)
    group = rng.integers(0, GROUPS, 2000)
    with pm.Model() as model:
        a = pm.Normal("a", 0, 1, shape=GROUPS)
        y = rng.poisson(np.exp(0.2 * group))
        pm.Poisson("y", pt.exp(a[pm.Data("group", group)]), observed=y)
        budget = dp.PrivacyBudget(epsilon, 1e-6, **options)
    return model, budget


@pytest.fixture(scope="module")
def fitted():
    model, budget = counts_model()
    with model:
        return model, budget, dp.laplace(share=0.4, random_seed=1, progressbar=False)


def check(fitted, **options):
    model, _, released = fitted
    return dp.predictive_check(released, model, **{"epsilon": 0.5, "progressbar": False, **options})


def test_a_check_costs_what_it_says(fitted) -> None:
    budget = fitted[1]
    before = budget.account.read().spent
    found = check(fitted, statistic="zeros", epsilon=0.7)
    cost = units_from_mu(mu_from_budget(0.7, 1e-6))
    assert budget.account.read().spent - before == cost
    row = budget.table().iloc[-4]
    assert (row["sampler"], row["mechanism"], row["releases"]) == (
        "predictive check",
        "check of y",
        1,
    )
    assert row["epsilon"] == pytest.approx(0.7, rel=1e-6)
    assert list(found.table.index) == ["zeros"]
    assert found.table["p_value"].iloc[0] > 1e-6
    assert found.privacy_guarantee == "(epsilon, delta)-differential privacy"
    assert "epsilon = 0.7" in repr(found) and "<table" in found._repr_html_()


def test_differences_are_per_record_where_their_number_is_public(fitted) -> None:
    """The noise of the count, here of thousands, is in the count alone."""
    with insecure_noise(3):
        found = check(fitted, statistic="zeros", epsilon=0.02)
    row = found.table.iloc[0]
    assert abs(row["records"] - 2000) > 500
    assert row["noise"] > 0.9
    mu = mu_from_budget(0.02, 1e-6)
    norm = math.sqrt(1 + 0.5**2 + 0.125**2 + 0.25**2)
    assert row["sd"] * math.sqrt(row["noise"]) == pytest.approx(2 * norm / mu / 2000, rel=1e-3)


def test_groups_and_functions_in_a_check(fitted) -> None:
    statistic = {"many": lambda y: y > 3, "log": lambda y: pt.log1p(y)}
    bounds = {"many": (0, 1), "log": (0, 2)}
    found = check(fitted, statistic=statistic, bounds=bounds, by="group", epsilon=1.0)
    assert found.table.index.names == ["group", "statistic"]
    assert len(found.table) == 2 * GROUPS and found.dof == 2 * GROUPS
    assert found.table["p_adjusted"].min() > 1e-6
    ax = found.plot()
    assert len(ax.get_yticklabels()) == 2 * GROUPS


@pytest.mark.slow
def test_where_the_number_of_records_is_private() -> None:
    model, _ = counts_model(6.0, neighboring="add_or_remove_one", n_public=2000)
    with model:
        released = dp.laplace(share=0.4, random_seed=1, progressbar=False)
        found = dp.predictive_check(released, epsilon=1.0, progressbar=False)
    assert found.table["records"].iloc[0] == pytest.approx(2000, abs=400)
    assert found.p_value > 1e-6


def test_insecure_noise_is_stamped(fitted) -> None:
    with insecure_noise(1):
        found = check(fitted, statistic="zeros", epsilon=0.1)
    assert found.privacy_guarantee == "none"
    assert "NO PRIVACY GUARANTEE" in repr(found)
    assert "NO PRIVACY" in found.plot().get_title(loc="left")


def test_insecure_draws_are_stamped(fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is made at their mean."""
    plain = estimates.released_draws

    def insecure(released):
        facts, posterior = plain(released)
        return {**facts, "privacy_guarantee": "none"}, posterior

    monkeypatch.setattr(estimates, "released_draws", insecure)
    assert check(fitted, statistic="zeros", epsilon=0.05).privacy_guarantee == "none"


WRONG = {
    "epsilon must be positive": {"epsilon": -1.0},
    "statistic must be one of": {"statistic": "median"},
    "statistic is empty": {"statistic": []},
    "bounds of statistic 'f'": {"statistic": {"f": lambda y: y}},
    "lower < upper": {"statistic": {"f": lambda y: y}, "bounds": {"f": (1, 1)}},
    "elementwise": {"statistic": {"f": lambda y: y - y.mean()}, "bounds": {"f": (0, 1)}},
    "no functions": {"statistic": "mean", "bounds": {"mean": (0, 1)}},
    "no private observed": {"observed": "z"},
    "an integer pm.Data .*'group'.*, not 'nothing'": {"by": "nothing"},
    "an integer pm.Data .*, not a Series": {"by": pd.Series([0, 1])},
    "an integer pm.Data .*, not a list": {"by": ["group"]},
    r"one of .'group'., not 'y'": {"by": "y"},
    "epsilon=1e-09 is too small: the noise of the check .* 2000 units": {"epsilon": 1e-9},
    "must be finite": {"statistic": ("quantile", math.inf)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_spend_nothing(fitted, message: str) -> None:
    before = fitted[1].account.read().spent
    with pytest.raises(ValueError, match=message):
        check(fitted, **WRONG[message])
    assert fitted[1].account.read().spent == before


def test_results_of_others_are_refused(fitted) -> None:
    model, budget, released = fitted
    other, _ = counts_model()
    before = budget.account.read().spent
    with pytest.raises(UnsafeRelease, match="another budget"):
        dp.predictive_check(released, other, epsilon=0.1, progressbar=False)
    with pytest.raises(UnsafeRelease):
        dp.predictive_check(released.posterior, model, epsilon=0.1, progressbar=False)
    with pytest.raises(BudgetExceeded, match=r"needs more than the epsilon = \d"):
        check(fitted, epsilon=50.0)
    with pytest.raises(ValueError, match="Check the order of the arguments"):
        dp.predictive_check(model, released, epsilon=0.1)
    with pm.Model() as plain:
        pm.Normal("y", pm.Normal("m"), 1.0, observed=np.zeros(9))
    with pytest.raises(UnsafeModel, match="needs a privacy budget"):
        dp.predictive_check(released, plain, epsilon=0.1)
    assert budget.account.read().spent == before


def test_a_law_that_is_not_known_is_refused() -> None:
    with pm.Model() as vectors:
        pm.MvNormal("y", pm.Normal("m", shape=2), np.eye(2), observed=np.zeros((9, 2)))
    records = extract(vectors)
    point = at(records.initial, np.eye(2))
    with pytest.raises(ValueError, match="one number per record"):
        unknown = RowEngine.of(records, point.coordinates)
        discrepancies(unknown, point, SOME, 9, vectors, None, None)


def test_an_observed_variable_without_parameters_is_refused() -> None:
    with pm.Model() as model:
        pm.Poisson("y", pt.exp(pm.Normal("a")), observed=np.arange(9))
        pm.Normal("w", 0.0, 1.0, observed=np.linspace(0, 1, 9))
    records = extract(model)
    point = at(records.initial, np.eye(1))
    engine = RowEngine.of(records, point.coordinates)
    with pytest.raises(ValueError, match="depends on parameters"):
        discrepancies(engine, point, SOME, 9, model, None, "w")
    assert discrepancies(engine, point, SOME, 9, model, None, None).observed == "y"


def test_a_contribution_that_sees_other_rows_is_caught_before_it_is_paid(
    fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Discrepancies._of

    def mixed(spec, *rows):
        found = plain(spec, *rows)
        return found - found.mean(axis=1, keepdims=True)

    monkeypatch.setattr(Discrepancies, "_of", mixed)
    before = fitted[1].account.read().spent
    with pytest.raises(dp.PrivacyError, match="not sums of one contribution per unit"):
        check(fitted)
    assert fitted[1].account.read().spent == before


# -- the error of a released mean -----------------------------------------------------------------


def test_the_error_of_a_released_mean(fitted) -> None:
    """Of group rates with a flat enough prior: the gain is the inverse information."""
    model, budget, released = fitted
    estimate = estimate_of(released, model, budget, extract(model).parameters)
    sizes = np.bincount(model["group"].get_value())
    information = sizes * np.exp(estimate.mean)
    exact = np.diag(1.0 / (information + 1.0))
    scaling = estimate.coordinates.scaling
    np.testing.assert_allclose(scaling @ scaling.T, exact, atol=0.25 * exact.max())
    assert (np.linalg.eigvalsh(estimate.covariance - 0.9 * exact) > 0.0).all()


def test_draws_about_the_prior_are_not_checked() -> None:
    """First-order p-values would be about 0, as the error is as wide as the prior."""
    model, budget = counts_model(0.02)
    with model, pytest.warns(UserWarning), insecure_noise(1):
        released = dp.laplace(share=0.5, random_seed=1, progressbar=False)
        before = budget.account.read().spent
        with pytest.raises(ValueError, match=r"about the prior.* Nothing has been spent"):
            dp.predictive_check(released, epsilon=0.01, progressbar=False)
    assert budget.account.read().spent == before
