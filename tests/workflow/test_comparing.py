"""Private comparison of models: coverage, verdicts, what is released and what it costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import stats

import pymc_dp as dp
from pymc_dp.base.matrices import Coordinates
from pymc_dp.errors import BudgetExceeded, UnsafeModel
from pymc_dp.privacy.accounting import mu_from_budget, units_from_mu
from pymc_dp.privacy.answer import Grid, Query, VectorSum
from pymc_dp.privacy.holder import Holder, rehearse
from pymc_dp.privacy.noise import insecure_noise
from pymc_dp.records.extraction import extract
from pymc_dp.records.units import RecordStore
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from pymc_dp.workflow.comparing import Moments, Together, _same_records, ranked

pytestmark = pytest.mark.filterwarnings(
    "ignore:The normal approximation is unreliable:UserWarning",
    "ignore:These draws are about as wide:UserWarning",
    "ignore:These data already have a budget:UserWarning",
)

N = 1000
X = np.c_[np.ones(N), np.random.default_rng(0).normal(size=(N, 2))]
NEW = np.c_[np.ones(100_000), np.random.default_rng(1).normal(size=(100_000, 2))]
#: Columns of two Poisson regressions, and the coefficients of the truth.
PAIRS = {
    "nested, the larger is true": ([0, 1], [0, 1, 2], [0.2, 0.4, 0.15]),
    "nested, the smaller is true": ([0, 1], [0, 1, 2], [0.2, 0.4, 0.0]),
    "not nested": ([0, 1], [0, 2], [0.2, 0.3, 0.2]),
}


def poisson(columns: list[int]) -> tuple[RowEngine, int]:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 100, shape=len(columns))
        pm.Poisson("y", pt.exp(pm.Data("x", X[:, columns]) @ beta), observed=np.zeros(N, int))
    d = len(columns)
    engine = RowEngine.of(extract(model, check=False), Coordinates(np.zeros(d), np.eye(d)))
    [outcome] = engine.groups[0].functions.graph.outcomes
    return engine, outcome.leaf


def fitted(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    beta = np.zeros(x.shape[1])
    for _ in range(15):
        mu = np.exp(x @ beta)
        covariance = np.linalg.inv((x.T * mu) @ x)
        beta = beta + covariance @ (x.T @ (y - mu))
    return beta, covariance


def errors(pair: str, repeats: int, noise_sd: float, noise_in_fit: float) -> np.ndarray:
    """Of differences of expected log densities, in their standard errors."""
    *both, truth = PAIRS[pair]
    compiled, rng, found = [poisson(columns) for columns in both], np.random.default_rng(5), []
    for _ in range(repeats):
        x = np.c_[np.ones(N), rng.normal(size=(N, 2))]
        y = rng.poisson(np.exp(x @ truth))
        engines, at, new = [], [], []
        for (engine, leaf), columns in zip(compiled, both, strict=True):
            beta, covariance = fitted(x[:, columns], y)
            beta = rng.multivariate_normal(beta, noise_in_fit * covariance)
            at.append(Coordinates(beta, np.linalg.cholesky(covariance)))
            [group] = engine.groups
            arrays = [x[:, columns], x[:, columns]]
            arrays[leaf] = y.astype(group.store.read()[leaf].dtype)
            rows = RowGroup(group.functions, RecordStore(arrays), None)
            engines.append(engine.on([rows], N))
            eta = NEW[:, columns] @ beta
            new.append(np.mean(np.exp(NEW @ truth) * eta - np.exp(eta)))
        spec = Moments(tuple(at), 3.0, N)
        total = sum(
            block.sum(axis=1) for _, block in spec.blocks(Together(tuple(engines), frozenset()))
        )
        table = ranked(["a", "b"], spec, total + rng.normal(0, noise_sd, spec.size), noise_sd)
        best, other = table.index
        truly = N * (new[1] - new[0]) * (1 if best == "b" else -1)
        row = table.loc[other]
        found.append((row["elpd_diff"] - truly) / row["dse"])
    return np.array(found)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("noise", [(0.01, 1e-9), (3.0, 1e-9), (0.01, 2.0), (1.0, 1.0)])
@pytest.mark.parametrize("pair", PAIRS)
def test_intervals_of_differences_cover(pair: str, noise: tuple[float, float]) -> None:
    """In 200 data sets at least as often as 95 %: fewer than 180 by chance once in 400."""
    far = np.abs(errors(pair, 200, *noise))
    assert np.mean(far < 1.96) > 0.90


@pytest.mark.compiled
def test_intervals_of_a_difference_cover() -> None:
    far = np.abs(errors("not nested", 60, 1.0, 0.5))
    assert np.mean(far < 1.96) > 0.86
    assert np.mean(far < 0.67) > 0.25


@pytest.mark.compiled
def test_errors_are_normal() -> None:
    """In standard errors, N(0, 1), but for the order of the models."""
    assert stats.kstest(errors("not nested", 100, 0.01, 1e-9), "norm").pvalue > 1e-4


# -- what one unit adds ---------------------------------------------------------------------------


def outcome_of(engine: RowEngine) -> Any:
    """The source of what is observed."""
    graph = engine.groups[0].functions.graph
    return graph.leaves[graph.outcomes[0].leaf].source


def several(users: bool = False) -> tuple[Together, Moments]:
    rng = np.random.default_rng(2)
    y, person = rng.poisson(1.0, 60), np.arange(60) // 3
    engines = []
    for negative_binomial in (False, True, False):
        with pm.Model() as model:
            mu = pt.exp(X[:60, : 1 + len(engines)] @ pm.Normal("b", shape=1 + len(engines)))
            if negative_binomial:
                pm.NegativeBinomial("y", mu=mu, alpha=pm.HalfNormal("alpha"), observed=y)
            else:
                pm.Poisson("y", mu, observed=y)
        records = extract(model, privacy_unit=person if users else None)
        d = len(records.initial)
        engines.append(RowEngine.of(records, Coordinates(records.initial, 0.1 * np.eye(d))))
    rows = Together(tuple(engines), frozenset(map(outcome_of, engines)))
    return rows, Moments(tuple(engine.coordinates for engine in engines), 0.4, rows.n_units)


@pytest.mark.parametrize("users", [False, True])
def test_moments_are_those_of_ratios_and_scores(users: bool) -> None:
    rows, spec = several(users)
    values = np.hstack([block for _, block in spec.blocks(rows)])
    ratios, products, scores = spec.read(values.sum(axis=1))
    logs = [engine.log_likelihood(np.zeros(engine.d)) for engine in rows.engines]
    r = np.clip([logs[1] - logs[0], logs[2] - logs[0]], -0.4, 0.4)
    np.testing.assert_allclose(ratios, r.sum(axis=1))
    np.testing.assert_allclose(products, r @ r.T)
    g = np.vstack(
        [
            np.hstack([v.copy() for _, v in engine.vectors(engine.scores(np.zeros(engine.d)))])
            for engine in rows.engines
        ]
    )
    longest = math.sqrt(6.0 * len(g) / rows.n_units)
    g *= np.minimum(1.0, longest / np.linalg.norm(g, axis=0))
    np.testing.assert_allclose(scores, g @ g.T, atol=1e-10)


@pytest.mark.parametrize("users", [False, True])
@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_neighbours_are_as_close_as_what_was_paid_for(users: bool, relation: str) -> None:
    """In integers, exactly; and no vector is ever clipped."""
    rows, spec = several(users)
    grid = Grid.finest(0.7, rows.n_units)
    query = Query("comparison", spec, VectorSum(grid, relation, spec.size, spec.norm))
    values = np.hstack([block for _, block in spec.blocks(rows)])
    assert np.linalg.norm(values, axis=0).max() <= spec.norm
    rehearse(rows, [query])
    whole, without = (Holder(r).total(query) for r in (rows, rows.part(slice(1, rows.n_units))))
    bound = 2.0**grid.log2_sigma / 0.7
    if relation == "add_or_remove_one":
        assert squared(whole - without) <= bound**2
        return
    engines = []
    for engine in rows.engines:
        [group] = engine.groups
        arrays = [array.copy() for array in group.store.read()]
        mine = slice(0, 3) if users else slice(0, 1)
        for array in arrays:
            array[mine] = 7 * np.roll(array, 11, axis=0)[mine]
        changed = RowGroup(group.functions, RecordStore(arrays), group.units)
        engines.append(engine.on([changed], engine.n_units))
    other = Together(tuple(engines), rows.observed)
    assert squared(whole - Holder(other).total(query)) <= bound**2
    rest = Holder(other.part(slice(1, rows.n_units))).total(query)
    np.testing.assert_array_equal(without, rest)


def squared(difference: np.ndarray) -> int:
    return sum(int(x) ** 2 for x in difference)


@pytest.mark.parametrize("users", [False, True])
def test_a_unit_with_other_outcomes_in_one_model_adds_to_a_count_alone(users: bool) -> None:
    rows, spec = several(users)
    whole = np.hstack([block for _, block in spec.blocks(rows)])
    engine = rows.engines[1]
    [group] = engine.groups
    arrays = [array.copy() for array in group.store.read()]
    [outcome] = group.functions.graph.outcomes
    arrays[outcome.leaf][[0, 7]] += 1
    other = engine.on([RowGroup(group.functions, RecordStore(arrays), group.units)], rows.n_units)
    changed = Together((rows.engines[0], other, rows.engines[2]), rows.observed)
    values = np.hstack([block for _, block in spec.blocks(changed)])
    differ = [0, 2] if users else [0, 7]
    assert not values[:-1, differ].any()
    assert list(np.flatnonzero(values[-1])) == differ
    np.testing.assert_array_equal(np.delete(values, differ, 1), np.delete(whole, differ, 1))
    total = values.sum(axis=1)
    assert spec.differing(total, 0.1) == 2
    assert spec.differing(total, 1.0) == 0  # may be noise


def test_users_are_alike_in_any_order_of_their_rows() -> None:
    rows, _ = several(users=True)
    engine = rows.engines[0]
    [group] = engine.groups
    back = slice(None, None, -1)
    store = RecordStore([array[back].copy() for array in group.store.read()])
    turned = engine.on([RowGroup(group.functions, store, group.units[back].copy())], rows.n_units)
    assert Together((engine, turned), rows.observed).alike().all()
    moved = engine.part(slice(0, 19)), turned.part(slice(1, 20))
    assert not Together(moved, rows.observed).alike().all()


def budgeted(y: np.ndarray, x: Any = 1.0, name: str = "y", **options: Any) -> tuple[None, pm.Model]:
    with pm.Model() as model:
        pm.Poisson(name, pt.exp(pm.Normal("a") * pm.Data("x", x)), observed=y)
        dp.PrivacyBudget(1.0, 1e-6, **options)
    return None, model


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_no_error_tells_of_a_record(relation: str) -> None:
    """Whether arrays are equal may depend on one record, as whether one is above a limit."""
    ledger = dp.Ledger.temporary(relation)
    options = {"ledger": ledger, "neighboring": relation}
    if relation == "add_or_remove_one":
        options["n_public"] = 50
    y = np.arange(50) % 9
    first = budgeted(y, **options)
    for other in [np.minimum(y, 7), y[y < 8]] if len(options) == 3 else [np.minimum(y, 7)]:
        _same_records({"a": first, "b": budgeted(other, **options)})


def test_public_facts_that_differ_are_refused() -> None:
    ledger = dp.Ledger.temporary("replace_one")
    y, x = np.arange(50) % 9, np.linspace(0.0, 1.0, 50)
    first = budgeted(y, x, ledger=ledger)
    for other, error, message in (
        (budgeted(y[1:], x[1:], ledger=ledger), ValueError, "not the same records"),
        (budgeted(y[:, None], x[:, None], ledger=ledger), ValueError, "not the same records"),
        (budgeted(y, x, ledger=ledger, public=["x"]), UnsafeModel, "public for one model"),
    ):
        with pytest.raises(error, match=message):
            _same_records({"a": first, "b": other})
    with pytest.warns(UserWarning, match="have other names"):
        _same_records({"a": first, "b": budgeted(y, x, "z", ledger=ledger)})


def test_a_mean_that_is_subtracted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: ratios less their average, which all records move."""
    rows, spec = several()
    plain = Moments._values

    def centred(spec, engines, ratios):
        return plain(spec, engines, ratios - ratios.mean())

    monkeypatch.setattr(Moments, "_values", centred)
    grid = Grid.finest(0.7, rows.n_units)
    query = Query("comparison", spec, VectorSum(grid, "replace_one", spec.size, spec.norm))
    with pytest.raises(dp.PrivacyError, match="not sums of one contribution per unit"):
        rehearse(rows, [query])


# -- from models and their budgets ----------------------------------------------------------------


@pytest.fixture(scope="module")
def three():
    """Overdispersed counts: Poisson, negative binomial, and this with a useless feature."""
    rng = np.random.default_rng(3)
    n = 4000
    x = rng.normal(size=(n, 2))
    y = rng.poisson(np.exp(0.3 + 0.5 * x[:, 0]) * rng.gamma(1.0, 1.0, n))
    ledger, found = dp.Ledger.temporary("replace_one"), {}
    for name, columns in (("poisson", 1), ("negative binomial", 1), ("more", 2)):
        with pm.Model() as model:
            mu = pt.exp(pm.Normal("a") + x[:, :columns] @ pm.Normal("b", shape=columns))
            if name == "poisson":
                pm.Poisson("y", mu, observed=y)
            else:
                pm.NegativeBinomial("y", mu=mu, alpha=pm.HalfNormal("alpha", 3), observed=y)
            dp.PrivacyBudget(4.0, 1e-6, ledger=ledger)
            released = dp.laplace(share=0.5, random_seed=1, progressbar=False)
        found[name] = released, model
    return found


def some(three, *names):
    return {name: three[name] for name in names}


@pytest.mark.slow
def test_the_right_model_wins_where_the_budget_suffices(three) -> None:
    budget = dp.get_budget(three["poisson"][1])
    before = budget.account.read().spent
    found = dp.compare(some(three, "poisson", "negative binomial"), epsilon=1.0, progressbar=False)
    assert list(found.table["verdict"]) == ["winner", "worse"]
    assert found.table.index[0] == "negative binomial"
    cost = units_from_mu(mu_from_budget(1.0, 1e-6))
    assert cost - 2 <= budget.account.read().spent - before <= cost
    assert list(budget.table()["mechanism"][-5:-3]) == ["log ratios", "comparison"]
    assert "winner" in repr(found) and "<table" in found._repr_html_()
    assert len(found.plot().get_yticklabels()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("clip", [1.0, None])
def test_models_of_other_records_are_not_compared(three, clip: float | None) -> None:
    """Some records have other outcomes, or all, where there are no ratios to look at."""
    y = three["poisson"][1].rvs_to_values[three["poisson"][1]["y"]].data
    ledger = dp.get_budget(three["poisson"][1]).ledger
    with pm.Model() as model:
        pm.Poisson("y", pt.exp(pm.Normal("a")), observed=y[::-1].copy() if clip else y + 1)
        dp.PrivacyBudget(4.0, 1e-6, ledger=ledger)
        released = dp.laplace(share=0.5, random_seed=1, progressbar=False)
    pair = {**some(three, "poisson"), "turned": (released, model)}
    with pytest.warns(UserWarning, match="other outcomes in one model"):
        found = dp.compare(pair, epsilon=0.3, clip=clip, progressbar=False)
    assert set(found.table["verdict"]) == {"cannot tell"} and "other outcomes" in repr(found)


@pytest.mark.slow
def test_models_that_are_alike_cannot_be_told_apart(three) -> None:
    """Within five standard errors: a verdict of 95 % would be wrong too often for a test.

    Noise looks like a bin of ratios with p < 3e-4: not twice.
    """
    found = dp.compare(some(three, "negative binomial", "more"), epsilon=0.5, progressbar=False)
    assert (found.table["elpd_diff"] <= 5.0 * found.table["dse"]).all()
    different = some(three, "poisson", "negative binomial")
    with pytest.warns(UserWarning, match="At epsilon=0.01 noise hides how large log ratios are"):
        dp.compare(different, epsilon=0.01, forecast=True, progressbar=False)
    both = [dp.compare(different, epsilon=0.01, progressbar=False) for _ in range(2)]
    hidden = [found for found in both if found.clip == 1.0]
    assert hidden and all("Give a public clip=" in repr(found) for found in hidden)
    few = hidden[0]
    assert not (few.table["elpd_diff"] > 5.0 * few.table["dse"]).any()
    assert few.table["dse"].iloc[1] >= few.table["noise_sd"].iloc[1] > 0.0


@pytest.mark.parametrize(("noise_sd", "verdicts"), [(0.01, ["winner", "worse"]), (90.0, [])])
def test_verdicts(noise_sd: float, verdicts: list[str]) -> None:
    """A sum of 100 clipped ratios, which all are 1, with little noise and with much."""
    point = Coordinates(np.zeros(1), np.eye(1))
    spec = Moments((point, point), 1.0, 100)
    value = np.zeros(spec.size)
    value[:2] = 100.0, 50.0
    table = ranked(["a", "b"], spec, value, noise_sd)
    assert list(table.index) == ["b", "a"]
    assert list(table["verdict"]) == (verdicts or ["cannot tell"] * 2)
    assert table["elpd_diff"].iloc[1] == pytest.approx(100.0)
    nothing = ranked(["a", "b"], spec, None, math.nan)
    assert set(nothing["verdict"]) == {"cannot tell"}


@pytest.mark.slow
def test_a_forecast_spends_nothing_and_is_right(three) -> None:
    budget, pair = dp.get_budget(three["poisson"][1]), some(three, "poisson", "negative binomial")
    before = budget.account.read().spent
    table = dp.compare(pair, epsilon=0.3, clip=2.0, forecast=True, progressbar=False)
    assert budget.account.read().spent == before
    with insecure_noise(1):
        found = dp.compare(pair, epsilon=0.3, clip=2.0, progressbar=False)
    assert found.privacy_guarantee == "none" and "NO PRIVACY" in repr(found)
    # that of the numbers of parameters is small
    assert found.table["noise_sd"].iloc[1] == pytest.approx(table["noise_sd"].iloc[0], rel=0.1)


@pytest.mark.slow
def test_wrong_arguments_spend_nothing(three) -> None:
    budget = dp.get_budget(three["poisson"][1])
    before = budget.account.read().spent
    pair = some(three, "poisson", "negative binomial")
    for models, options, error, message in (
        (some(three, "poisson"), {}, ValueError, "two or more"),
        ({"a": 1, "b": 2}, {}, ValueError, "must be .released, model"),
        (pair, {"epsilon": 0.0}, ValueError, "epsilon must be positive"),
        (pair, {"clip": -1.0}, ValueError, "clip must be positive"),
        (pair, {"epsilon": 99.0}, BudgetExceeded, "needs more than the epsilon = "),
        (pair, {"epsilon": 1e-9}, ValueError, "noise of the comparison would hide"),
    ):
        with pytest.raises(error, match=message):
            dp.compare(models, **{"epsilon": 0.1, "progressbar": False, **options})
    with pm.Model() as other:
        pm.Poisson("y", pt.exp(pm.Normal("a")), observed=np.zeros(3999, int))
        dp.PrivacyBudget(1.0, 1e-6, ledger=budget.ledger)
    pair["other"] = three["poisson"][0], other
    with pytest.raises(ValueError, match="not the same records"):
        dp.compare(pair, epsilon=0.1)
    with pm.Model() as apart:
        pm.Poisson("y", pt.exp(pm.Normal("a")), observed=np.zeros(4000, int))
        dp.PrivacyBudget(1.0, 1e-6)
    with pytest.raises(UnsafeModel, match="several ledgers"):
        dp.compare({**pair, "other": (three["poisson"][0], apart)}, epsilon=0.1)
    assert budget.account.read().spent == before
