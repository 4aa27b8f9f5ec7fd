"""ExponentialFamilyPenalty: families, sensitivity, what is charged, kept and refused."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import cloudpickle
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy import stats

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.base.matrices import Coordinates
from pymc_dp.errors import PrivacyError, UnsafeModel
from pymc_dp.privacy import holder
from pymc_dp.privacy.answer import Grid, Query, VectorSum
from pymc_dp.privacy.holder import Holder
from pymc_dp.records.units import RecordStore
from pymc_dp.rows.contributions import Statistic
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from pymc_dp.steps import exponential as recognition
from tests.selection import marked, others

pytestmark = pytest.mark.filterwarnings(
    "ignore:These data already have a budget:UserWarning",
    "ignore:The privacy noise is about:UserWarning",
    "ignore:The chains of this plan:UserWarning",
)

N = 40
RNG = np.random.default_rng(17)
REAL = RNG.normal(0.5, 1.0, N)
POSITIVE = RNG.gamma(2.0, 1.0, N) + 0.05
BINARY = RNG.integers(0, 2, N)
COUNT = RNG.poisson(2.0, N)
LABEL = RNG.integers(0, 3, N)
PAIR = RNG.normal(size=(N, 2))
X = RNG.uniform(-1, 1, N)


def mv_normal() -> None:
    sd = pm.HalfNormal("sd", 1, shape=2)
    root = np.array([[1.0, 0.0], [0.6, 0.8]])
    pm.MvNormal("y", pm.Normal("mu", 0, 1, shape=2), chol=sd[:, None] * root, observed=PAIR)


def derived() -> None:
    """Parameters that are functions of functions of the free variables."""
    a = pm.Normal("a", 0, 1)
    b = pm.Deterministic("b", pt.exp(0.3 * a))
    pm.Normal("y", pt.tanh(a) + b, b, observed=pm.Data("data", REAL))


#: Declaration of the model, and bounds of y.
CASES: dict[str, tuple[Callable[[], Any], Any]] = {
    "Normal": (
        lambda: pm.Normal("y", pm.Normal("m", 0, 2), pm.HalfNormal("s", 2), observed=REAL),
        (-3, 4),
    ),
    "Normal, known sd": (lambda: pm.Normal("y", pm.Normal("m", 0, 2), 1.5, observed=REAL), (-3, 4)),
    "Normal, derived": (derived, (-3, 4)),
    "Bernoulli": (
        lambda: pm.Bernoulli("y", logit_p=pm.Normal("a", 0, 2), observed=BINARY),
        None,
    ),
    "Binomial": (lambda: pm.Binomial("y", 9, pm.Beta("p", 1, 1), observed=COUNT), None),
    "Poisson": (lambda: pm.Poisson("y", pm.Gamma("m", 2, 1), observed=COUNT), (0, 8)),
    "Exponential": (lambda: pm.Exponential("y", pm.Gamma("m", 2, 1), observed=POSITIVE), (0, 9)),
    "Gamma": (
        lambda: pm.Gamma("y", pm.Gamma("a", 3, 1), pm.Gamma("b", 3, 1), observed=POSITIVE),
        (0.01, 9),
    ),
    "Gamma, known shape": (
        lambda: pm.Gamma("y", 2, pm.Gamma("b", 3, 1), observed=POSITIVE),
        (0, 9),
    ),
    "Categorical": (
        lambda: pm.Categorical("y", pm.Dirichlet("p", np.ones(3)), observed=LABEL),
        None,
    ),
    "MvNormal": (mv_normal, ([-3, -4], [4, 3])),
}
#: Entries of the statistic, the number of records not counted.
SIZES = {
    "Normal": 2,
    "Normal, known sd": 1,
    "Normal, derived": 2,
    "Gamma": 2,
    "Categorical": 3,
    "MvNormal": 5,
}
BY_HAND = {"scaling": 0.3, "step_size": 1.0}


def budgeted(name: str, neighboring: str = "replace_one", epsilon: float = 50.0) -> pm.Model:
    declare, bounds = CASES[name]
    with pm.Model() as model:
        declare()
        if bounds is not None:
            dp.bounds(y=bounds)
        hidden = {} if neighboring == "replace_one" else {"n_public": N}
        dp.PrivacyBudget(epsilon, 1e-4, neighboring=neighboring, **hidden)
    return model


def step_of(model: pm.Model, **changes: Any) -> Any:
    arguments = {"draws": 12, "chains": 1, "model": model, **BY_HAND, **changes}
    return dp.ExponentialFamilyPenalty(**arguments)


def spent(model: pm.Model) -> int:
    budget = dp.get_budget(model)
    assert budget is not None
    return budget.account.read().spent


def with_records(engine: RowEngine, y: np.ndarray) -> RowEngine:
    """The engine of other records."""
    [group] = engine.groups
    store = RecordStore([np.ascontiguousarray(y, group.store.read()[0].dtype)])
    at = Coordinates(np.zeros(engine.d), np.eye(engine.d))
    return RowEngine([RowGroup(group.functions, store, None)], engine.parameters, len(y), at)


def total(spec: Statistic, grid: Grid, neighboring: Any, engine: Any) -> np.ndarray:
    """The exact sum of the statistics of these records, in integers."""
    sum_ = VectorSum(grid, neighboring, spec.size, spec.norm, spec.nonnegative)
    return Holder(engine).total(Query("statistic", spec, sum_))


def extreme(name: str, size: int = 12) -> np.ndarray:
    """Records at, near and far beyond the ends of what is possible."""
    _, bounds = CASES[name]
    if name == "MvNormal":
        corners = np.array([[-3, -4], [4, 3], [-3, 3], [4, -4], [0.5, -0.5], [1e300, -1e300]])
        return np.vstack([corners, [[np.nan, 0], [np.inf, 1]], RNG.uniform(-9, 9, (size, 2))])
    if name in ("Bernoulli", "Binomial", "Poisson", "Categorical"):
        return np.r_[[0, 1, 2, 8, 9, 10**6, -5, 2**62], RNG.integers(0, 9, size)]
    low, high = bounds
    middle = (low + high) / 2.0
    special = [low, high, middle, low - 1, high + 1, -1e308, 1e308, np.inf, -np.inf, np.nan, 5e-324]
    return np.r_[special, RNG.uniform(low, high, size)]


# -- families -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "neighboring"),
    marked(
        itertools.product(CASES, ["replace_one", "add_or_remove_one"]),
        slow=[("MvNormal", "replace_one"), ("Poisson", "add_or_remove_one")],
        exhaustive=[
            *itertools.product(others(CASES, ["Normal", "MvNormal"]), ["replace_one"]),
            *itertools.product(others(CASES, ["Poisson"]), ["add_or_remove_one"]),
        ],
    ),
)
def test_family(name: str, neighboring: str) -> None:
    """Found, checked, bounded; sums of neighbours differ by no more than is charged for."""
    model = budgeted(name, neighboring)
    step = step_of(model)  # it has compared the family with PyMC's log-density
    assert spent(model) == 0
    made, engine = step._exponential, step.queries.holder.engine
    counted = neighboring == "add_or_remove_one" and name != "Categorical"
    assert made.statistic.size == SIZES.get(name, 1) + counted
    cloudpickle.dumps(step)  # as PyMC sends it to other processes
    assert made.n == (0.0 if neighboring == "add_or_remove_one" else N)

    y = extreme(name)
    rows = made.statistic.rows(with_records(engine, y).groups[0].store.read())
    finite = np.isfinite(rows).all(axis=0)
    lengths = np.sqrt((rows[:, finite] ** 2).sum(axis=0))
    assert lengths.max() <= made.statistic.norm * (1 + 1e-12)
    assert lengths.max() >= made.statistic.norm * (1 - 1e-12)  # no wider than need be

    for tau in (0.9, 37.5, 4000.0):
        grid = Grid.finest(tau, N)

        def of(records: np.ndarray, grid: Grid = grid) -> np.ndarray:
            return total(made.statistic, grid, neighboring, with_records(engine, records))

        single, whole = [of(y[i : i + 1]) for i in range(len(y))], of(y)
        # exactly additive: a record adds the same integers wherever it stands
        assert np.array_equal(whole, np.sum(single, axis=0))
        if neighboring == "replace_one":
            pairs = [(a, b) for a in single for b in single]
        else:
            pairs = [(a, np.zeros_like(a)) for a in single]
        largest = max(sum(int(u - v) ** 2 for u, v in zip(a, b, strict=True)) for a, b in pairs)
        # |difference| tau <= 2^m, in exact arithmetic
        assert largest * Fraction(tau) ** 2 <= 4**grid.log2_sigma
        if neighboring == "add_or_remove_one" or name not in (
            "Normal",
            "Normal, derived",
            "MvNormal",
        ):
            assert largest * tau**2 > 0.999999 * 4.0**grid.log2_sigma  # and it is attained


@pytest.mark.slow
def test_a_wrong_bound_would_be_seen() -> None:
    """The comparison above can fail: records twice as long as they may be."""
    step = step_of(budgeted("Bernoulli"))
    honest = step._exponential.statistic
    double = Statistic(lambda arrays: 2.0 * honest.rows(arrays), honest.size, honest.norm)
    grid, one = Grid.finest(5.0, N), with_records(step.queries.holder.engine, np.array([1]))
    clipped = total(double, grid, "replace_one", one)
    assert abs(int(clipped[0])) <= grid.sensitivity / 2  # clipped, whatever the rows are
    assert np.abs(clipped - total(honest, grid, "replace_one", one)) <= 1


@pytest.mark.slow
def test_a_statistic_does_not_depend_on_where_a_record_stands() -> None:
    step = step_of(budgeted("Gamma"))
    y = np.random.default_rng(3).uniform(0.01, 9, 1003)
    rows = step._exponential.statistic.rows([y])
    for i in (0, 1, 7, 500, 1002):
        assert np.array_equal(rows[:, i : i + 1], step._exponential.statistic.rows([y[i : i + 1]]))


@pytest.mark.slow
def test_noise_of_a_sum_is_what_it_says() -> None:
    step = step_of(budgeted("Normal"))
    step.budget.account.begin_run(
        step.plan.plan_id,
        max_runs=1,
        run_cost=step.plan.run_cost,
    )
    queries = step.queries
    queries.begin_chain()
    answers = []
    for _ in range(12):
        assert queries.begin_iteration()
        value, noise_sd = queries.statistic()
        answers.append(value)
    with pytest.raises(PrivacyError, match="no charge pays for"):
        queries.statistic()
    exact = queries.holder.total(queries._query) * queries._query.sum.unit
    scores = ((np.array(answers) - exact) / noise_sd).ravel()
    assert len(np.unique(scores)) == 24  # fresh every time, and in every entry
    # false alarms: 2e-7
    assert 1e-7 < stats.chi2.cdf((scores**2).sum(), 24) < 1 - 1e-7
    # two sensitivities of the vector, times the multiplier, to the rounding of the grid
    tau = step.plan.events["statistic"].noise_multiplier
    assert noise_sd == pytest.approx(2 * math.sqrt(4 / 3) * tau, rel=1e-6)


# -- what is charged, read and kept ----------------------------------------------------------------


@pytest.mark.slow
def test_charged_before_the_records_are_read_and_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = budgeted("Poisson")
    seen: list[tuple[int, int]] = []
    honest = holder.checked

    def watched(engine: Any, of: Any) -> Any:
        seen.append((engine.n_units, spent(model)))
        return honest(engine, of)

    monkeypatch.setattr(holder, "checked", watched)
    step = step_of(model, chains=2)
    assert all(units < N for units, _ in seen) or all(charge == 0 for _, charge in seen)
    seen.clear()
    idata = pm.sample(
        12, tune=0, chains=2, cores=1, step=step, model=model, progressbar=False, random_seed=1
    )
    assert [units for units, _ in seen] == [N, N]  # once for each chain
    assert all(charge >= step.plan.iteration_cost for _, charge in seen)
    assert spent(model) == step.plan.run_cost

    stats_ = _compat.group(idata, "sample_stats")
    names = {"dp_accept_rate", "dp_accepted", "dp_epsilon", "dp_frozen", "dp_plan_id"}
    assert {str(name) for name in stats_} == names
    query, private = step.queries.holder._same
    assert query is step.queries._query
    for kept in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step.queries)):
        assert getattr(kept, "queries", kept).holder._same is None
    patterns = [private.tobytes(), (private * query.sum.unit).tobytes()]
    assert not any(pattern in pickle.dumps(step) for pattern in patterns)
    texts = f"{step!r} {step.queries!r} {step.queries.holder!r} {query!r} {step.plan!r}"
    assert str(int(private[0])) not in texts
    safe = dp.release(idata, model)
    assert "Poisson), clamped to public bounds" in dp.privacy_statement(safe)
    assert "y is clamped to [0, 8]" in dp.privacy_statement(safe)


@pytest.mark.slow
def test_settings_are_learned_from_releases_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default: two one-off releases at most, charged before; chains begin at the posterior."""
    rng = np.random.default_rng(8)
    y = rng.normal(3.0, 2.0, 9000)  # more than a block of made-up records
    with pm.Model():
        pm.Normal("y", pm.Normal("mu", 0, 10), pm.HalfNormal("sigma", 5), observed=y)
        dp.bounds(y=(-10, 15))
        budget = dp.PrivacyBudget(30.0, 1e-6)
        charges: list[int] = []
        honest = holder.checked

        def watched(engine: Any, of: Any) -> Any:
            if engine.n_units == len(y):
                charges.append(len([e for e in budget.ledger.entries() if e.kind == "charge"]))
            return honest(engine, of)

        monkeypatch.setattr(holder, "checked", watched)
        safe = dp.sample(
            300, chains=2, step="ExponentialFamilyPenalty", cores=1, progressbar=False,
            random_seed=2, compute_convergence_checks=False,
        )  # fmt: skip
    releases = budget.table()["mechanism"].tolist()
    assert releases[0] == "statistic 1" and releases.count("statistic") == 1
    one_off = sum(name.startswith("statistic ") for name in releases)
    assert charges == [*range(1, one_off + 1), one_off, one_off]  # the chains are leased
    assert budget.remaining().gdp_mu2 < 1e-6 * budget.spent().gdp_mu2
    # 600 draws, of 50 effective ones or more: off by a standard deviation of the posterior with
    # probability below 1e-10
    posterior = _compat.group(safe, "posterior")
    assert abs(float(posterior["mu"].mean()) - y.mean()) < 2.0 / math.sqrt(len(y))
    assert abs(float(posterior["sigma"].mean()) - y.std()) < 2.0 / math.sqrt(2 * len(y)) * 2.0


@pytest.mark.slow
def test_a_number_of_records_that_is_private_is_not_in_the_chain() -> None:
    step = step_of(budgeted("Bernoulli", "add_or_remove_one"))
    assert step._exponential.n == 0.0
    theta = np.array([0.7])
    # the entry that counts has minus the log-normaliser as its parameter
    weight = step._exponential.statistic.rows([np.array([0, 1])])[-1]
    natural = step._exponential.natural(theta)
    phi, centred = natural[0], natural[1] * weight[0]
    assert centred == pytest.approx(-(math.log1p(math.exp(0.7)) - phi))


# -- by hand --------------------------------------------------------------------------------------

LINE: dict[str, Any] = {
    "statistic": lambda y, x: pt.stack([x * y, x * x, y * y], axis=1),
    "natural": lambda slope, sigma: pt.stack(
        [slope / sigma**2, -0.5 * (slope / sigma) ** 2, -0.5 / sigma**2]
    ),
    "log_normalizer": lambda sigma: pt.log(sigma),
    "statistic_bounds": ([-4.0, 0.0, 0.0], [4.0, 1.0, 16.0]),
}


def line(neighboring: str = "replace_one") -> pm.Model:
    """Regression through the origin: the statistic is of pairs (x, y)."""
    with pm.Model() as model:
        x = pm.Data("x", X)
        slope, sigma = pm.Normal("slope", 0, 1), pm.HalfNormal("sigma", 1)
        pm.Normal("y", slope * x, sigma, observed=REAL)
        hidden = {} if neighboring == "replace_one" else {"n_public": N}
        dp.PrivacyBudget(50.0, 1e-4, neighboring=neighboring, **hidden)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "neighboring", [pytest.param("replace_one", marks=pytest.mark.exhaustive), "add_or_remove_one"]
)
def test_a_family_by_hand(neighboring: str) -> None:
    model = line(neighboring)
    step = step_of(model, **LINE)
    query = step.queries._query
    exact = Holder(step.queries.holder.engine).total(query) * query.sum.unit
    lower, upper = (np.array(end) for end in LINE["statistic_bounds"])
    rows = np.clip(np.stack([X * REAL, X * X, REAL**2]).T, lower, upper)
    scaled = (rows - (lower + upper) / 2) / ((upper - lower) / 2)
    expected = scaled.sum(0) if neighboring == "replace_one" else np.r_[scaled.sum(0), N]
    assert exact == pytest.approx(expected, rel=1e-6, abs=1e-6)
    safe = dp.sample(
        12, chains=1, tune=0, cores=1, step=step, model=model, progressbar=False,
        compute_convergence_checks=False,
    )  # fmt: skip
    assert _compat.group(safe, "posterior")["slope"].shape == (1, 12)
    pickle.dumps(step)  # the functions of the user are not part of it


# -- what is refused ------------------------------------------------------------------------------

ONE = {
    "statistic": lambda y: y[:, None],
    "natural": lambda m: pt.log(m)[None],
    "log_normalizer": lambda m: m,
    "statistic_bounds": (0, 8),
}


@pytest.mark.slow
def test_the_template_of_wrong_families_is_right() -> None:
    step = step_of(budgeted("Poisson"), **ONE)
    assert step._exponential.statistic.size == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"statistic": lambda y: y**2}, "differs from natural"),
        ({"natural": lambda m: 1.001 * pt.log(m)[None]}, "differs from natural"),
        ({"log_normalizer": lambda m: m + 1e-6 * m**2}, "differs from natural"),
        ({"statistic_bounds": (8, 0)}, "statistic_bounds must be finite"),
        ({"statistic_bounds": (0, np.inf)}, "statistic_bounds must be finite"),
        ({"statistic_bounds": ([0, 1], [2, 3])}, "arrays of 1 entries"),
        ({"statistic_bounds": 3.0}, "pair"),
        ({"statistic_bounds": None}, "lacks statistic_bounds"),
        ({"natural": None}, "lacks natural"),
        ({"natural": 1.0}, "natural must be a function"),
        ({"natural": lambda q: q[None]}, "asks for \\['q'\\]"),
        ({"natural": lambda m: m}, "vector of 1 entries"),
        ({"log_normalizer": lambda m: m[None]}, "must return a number"),
        ({"log_normalizer": lambda m: m * COUNT.mean() + 0 * pt.as_tensor(COUNT).sum()}, "private"),
        ({"statistic": lambda y: y - y.mean()}, "other records"),
        ({"statistic": lambda y: y * COUNT}, "room for an entry per record"),
        ({"step_size": None}, "step_size"),
        ({"step_size": -1.0}, "step_size must be positive"),
        ({"step_size": [0.1, 0.2]}, "vector of 1"),
        ({"scaling": None, "step_size": None, "noise_multiplier": 3.0}, "scaling by hand"),
    ],
)
def test_wrong_settings_spend_nothing(changes: dict[str, Any], message: str) -> None:
    model = budgeted("Poisson")
    with pytest.raises((ValueError, TypeError), match=message):
        step_of(model, **{**ONE, **changes})
    assert spent(model) == 0


def test_other_wrong_arguments_spend_nothing() -> None:
    model = budgeted("Poisson")
    with pytest.raises(TypeError, match="no argument `clip_norm`"):
        step_of(model, clip_norm=1.0)
    with pytest.raises(TypeError, match="Did you mean `natural`"):
        step_of(model, naturals=1.0)
    with pytest.raises(ValueError, match=r"dp\.bounds"):
        step_of(model, statistic_bounds=(0, 8))
    assert spent(model) == 0


def no_bounds() -> None:
    pm.Normal("y", pm.Normal("m"), 1.0, observed=REAL)


def one_bound() -> None:
    pm.Poisson("y", pm.Gamma("m", 2, 1), observed=COUNT)


def gamma_from_zero() -> None:
    pm.Gamma("y", pm.Gamma("a", 2, 1), 1.0, observed=POSITIVE)
    dp.bounds(y=(0, 9))


def regression() -> None:
    pm.Normal("y", pm.Normal("b") * X, 1.0, observed=REAL)
    dp.bounds(y=(-3, 3))


def student() -> None:
    pm.StudentT("y", nu=4, mu=pm.Normal("m"), sigma=1.0, observed=REAL)
    dp.bounds(y=(-3, 3))


def two_observed() -> None:
    m = pm.Normal("m")
    pm.Normal("y", m, 1.0, observed=REAL)
    pm.Bernoulli("z", logit_p=m, observed=BINARY)
    dp.bounds(y=(-3, 3))


def columns() -> None:
    pm.Normal("y", pm.Normal("m"), 1.0, observed=PAIR)
    dp.bounds(y=(-3, 3))


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (no_bounds, "dp.bounds\\(y="),
        (one_bound, "dp.bounds\\(y="),
        (gamma_from_zero, "positive lower bound"),
        (regression, "for every record"),
        (student, "whose statistics are known"),
        (two_observed, "single private observed"),
        (columns, "records of 1 dimensions"),
    ],
)
def test_models_without_a_bounded_common_statistic(
    declare: Callable[[], None], message: str
) -> None:
    with pm.Model() as model:
        declare()
        dp.PrivacyBudget(5.0, 1e-4)
    with pytest.raises(UnsafeModel, match=message):
        step_of(model)
    assert spent(model) == 0


def test_persons_with_several_rows_are_refused() -> None:
    with pm.Model() as model:
        pm.Bernoulli("y", pm.Beta("p", 1, 1), observed=BINARY)
        dp.PrivacyBudget(5.0, 1e-4, privacy_unit=np.arange(N) // 2)
    with pytest.raises(UnsafeModel, match="privacy_unit"):
        step_of(model)
    assert spent(model) == 0


@pytest.mark.slow
def test_a_wrong_family_of_ours_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with PyMC looks at families that are found, too."""
    honest = recognition.family_of

    def wrong(*arguments: Any) -> Any:
        from dataclasses import replace

        found = honest(*arguments)
        return replace(found, natural=found.natural * (1.0 + 1e-6))

    monkeypatch.setattr(recognition, "family_of", wrong)
    with pytest.raises(UnsafeModel, match="differs from natural"):
        step_of(budgeted("Normal"))
