"""Publishing statistics of real records: sensitivity, noise, charges, and what is not told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

import pymc_dp as dp
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.errors import LedgerError
from pymc_dp.privacy import answer as answers
from pymc_dp.privacy import noise
from pymc_dp.privacy.account import Account
from pymc_dp.privacy.accounting import delta_from_mu, mu_from_pure, smallest_noise_multiplier
from pymc_dp.privacy.answer import Grid, LaplaceSum, Query, Receipt, VectorSum, clip_l1
from pymc_dp.privacy.holder import Table
from pymc_dp.privacy.noise import discrete_laplace
from pymc_dp.published import making
from pymc_dp.published.reading import read
from tests.selection import marked, others

pytestmark = pytest.mark.compiled

N = 40
RNG = np.random.default_rng(12)
X = RNG.normal(size=N)
Y = RNG.integers(0, 2, N)
ANY = st.floats(allow_nan=True, allow_infinity=True, width=64)


def rows(x: Any, y: Any) -> Any:
    return pt.stack([x, x * y], axis=1)


@pytest.fixture
def ledger() -> dp.Ledger:
    return dp.Ledger.temporary()


# -- sensitivity ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300, derandomize=True)
@given(arrays(np.float64, (3, 1), elements=ANY), st.sampled_from([1, 7, 2**30]))
def test_a_record_adds_no_more_than_the_bound(vector: np.ndarray, bound: int) -> None:
    total = np.zeros(3, dtype=np.int64)
    clip_l1(vector, bound / 4.0, np.int64(bound), total)
    assert np.abs(total).sum() <= bound


def test_the_bound_is_reached() -> None:
    for bound in (1, 7, 2**30):
        total = np.zeros(2, dtype=np.int64)
        clip_l1(np.array([[8.0 * bound], [0.0]]), 1.0, np.int64(bound), total)
        assert total.tolist() == [bound, 0]


def test_a_record_whose_rounding_passes_the_bound_adds_nothing() -> None:
    """A bound that floats cannot divide by exactly: five fifths of it are more than all of it."""
    bound, total = 2**56, np.zeros(5, dtype=np.int64)
    fifths = np.full((5, 1), float(bound))
    assert 5 * int(bound * (bound / fifths.sum())) > bound
    clip_l1(fifths, 1.0, np.int64(bound), total)
    assert not total.any()


@pytest.mark.parametrize(
    ("bounded", "mechanism", "neighboring"),
    marked(
        itertools.product(
            [True, False], ["laplace", "geometric"], ["replace_one", "add_or_remove_one"]
        ),
        exhaustive=[
            (True, "laplace", "replace_one"),
            (True, "geometric", "replace_one"),
            (False, "laplace", "add_or_remove_one"),
        ],
    ),
)
def test_sums_of_neighbours(
    bounded: bool, mechanism: str, neighboring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact sums differ by the sensitivity at most, come near it, and by whole strides."""
    sums: list[np.ndarray] = []
    scales: list[Fraction] = []

    def no_noise(size: int, scale: Fraction) -> list[int]:
        scales.append(scale)
        return [0] * size

    monkeypatch.setattr(answers, "discrete_laplace", no_noise)
    whole = mechanism == "geometric"
    extremes = [-1e9, -2.0, 0.0, 1e9, *([] if whole else [math.nan, math.inf])]
    epsilon = 0.5
    data = [np.array([a, b]) for a, b in itertools.product(extremes, repeat=2)]
    for record in data:
        others = np.array([[1.0, 2.0], record])
        if neighboring == "add_or_remove_one" and record is data[0]:
            others = others[:1]  # the data set without the record
        released = dp.release_statistic(
            {"x": others.astype("int64") if whole else others},
            lambda x: x,
            (-2, 3) if bounded else None,
            mechanism,
            dp.Ledger.temporary(neighboring),
            epsilon=epsilon,
            row_norm=None if bounded else 4,
        )
        sums.append(np.array(released.observed) / np.array(released.scale))
    first = sums if neighboring == "replace_one" else sums[:1]
    # the sensitivity in units of the noise's scale is epsilon
    distance = [np.abs(a - b).sum() for a in first for b in sums]
    assert max(distance) <= epsilon * (1 + 1e-12)
    assert max(distance) >= epsilon * (1 - 1e-6)
    assert len(set(scales)) == 1


def test_gaussian_sums_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "rounded_normal", lambda size, m: np.zeros(size, np.int64))
    found = []
    for record in itertools.product([-1e9, -2.0, 0.0, 3.0, math.nan], repeat=2):
        released = dp.release_statistic(
            {"x": np.array([[1.0, 2.0], record])},
            lambda x: x,
            (-2, 3),
            "gaussian",
            dp.Ledger.temporary(),
            epsilon=1.0,
            delta=1e-6,
        )
        found.append(np.array(released.observed) / np.array(released.scale))
    distance = max(np.linalg.norm(a - b) for a in found for b in found)
    assert delta_from_mu(1.0, distance) <= 1e-6
    assert delta_from_mu(1.0, distance * 1.001) > 1e-6


# -- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(7, 3), Fraction(40)])
def test_discrete_laplace(scale: Fraction) -> None:
    """Chi-square at 1e-6 on 20,000 draws; a scale that is 5 % off is found."""
    draws = np.array(discrete_laplace(20_000, scale))

    def p_value(b: float) -> float:
        edges = np.arange(-round(6 * b) - 1, round(6 * b) + 2)
        law = stats.dlaplace(1 / b)
        expected = np.diff(np.r_[0.0, law.cdf(edges), 1.0]) * len(draws)
        counts = np.bincount(np.searchsorted(edges, draws), minlength=len(edges) + 1)
        keep = expected > 5
        inner = np.r_[expected[keep], expected[~keep].sum() + 1e-9]
        seen = np.r_[counts[keep], counts[~keep].sum()]
        return float(stats.chi2.sf(((seen - inner) ** 2 / inner).sum(), len(inner) - 1))

    assert p_value(float(scale)) > 1e-6
    assert p_value(float(scale) * 1.3) < 1e-6
    assert abs(draws.mean()) < 5.5 * draws.std() / math.sqrt(len(draws))


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "geometric"])
@pytest.mark.parametrize("neighboring", ["replace_one", "add_or_remove_one"])
@pytest.mark.parametrize("epsilon", [1e-3, 1e5, 1e6])
def test_statistics_at_the_ends_of_the_range(tmp_path, mechanism, neighboring, epsilon):
    """Noise within 8 standard deviations, or 21 Laplace scales: false alarms below 1e-8."""
    ledger = dp.Ledger.create(tmp_path / "ledger", neighboring=neighboring)
    delta = {"delta": 1e-300} if mechanism == "gaussian" else {}
    values = {"epsilon": epsilon, **delta, "progressbar": False}
    y = np.arange(200) % 2
    found = dp.release_statistic({"y": y}, lambda y: y, (0, 1), mechanism, ledger, **values)
    width = 8.0 if mechanism == "gaussian" else 21.0  # e^-21
    assert abs(found.observed[0] - 100) <= width * found.scale[0] + 1e-3
    assert 0 < Account(ledger, 1).read().spent == Account(ledger, 1).read().cap < 2**63
    if mechanism != "gaussian":
        with pytest.raises(ValueError, match="epsilon up to 1e6"):
            dp.release_statistic(
                {"y": y}, lambda y: y, (0, 1), mechanism, ledger, **{**values, "epsilon": 2e6}
            )


@pytest.mark.parametrize("kind", ["keep", "finish_plan"])
def test_a_full_disk_after_the_charge_loses_nothing(tmp_path, monkeypatch, kind):
    """What was paid for is returned; the charge is counted."""

    def fail(*arguments):
        raise LedgerError("the disk is full")

    ledger = dp.Ledger.create(tmp_path / "ledger")
    y = np.arange(200) % 2
    with monkeypatch.context() as patch:
        patch.setattr(Account, kind, fail)
        with pytest.warns(UserWarning, match="was charged, but .* the disk is full"):
            found = dp.release_statistic(
                {"y": y}, lambda y: y, (0, 1), "laplace", ledger, epsilon=20.0, progressbar=False
            )
    assert abs(found.observed[0] - 100) < 3
    assert Account(ledger, 1).read().spent == Account(ledger, 1).read().cap


def noisy(sum_: VectorSum | LaplaceSum, rows: np.ndarray) -> np.ndarray:
    """Noisy sum of (m, n) rows."""
    receipt = Receipt([("sum", sum_.noise_multiplier, 1)])
    query = Query("sum", None, sum_)
    return answers.answer(query, Table(rows.shape[1], lambda: rows).total, receipt)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "geometric"])
def test_the_noise_of_a_sum_has_the_scale_that_it_states(mechanism: str) -> None:
    """20,000 draws at 5.5 standard errors: false alarms below 1e-7; 8 % in a scale are found."""
    sum_: VectorSum | LaplaceSum
    if mechanism == "gaussian":
        grid = Grid.finest(smallest_noise_multiplier(2**40), 2)
        sum_ = VectorSum(grid, "replace_one", 20_000, 3.0)
        assert sum_.noise_sd == 6.0  # mu = 1, and two norms
    else:
        scaling = making._Scaling.of(None, 3.0, mechanism, "replace_one", 20_000, 2)
        sum_ = scaling.laplace_sum(mechanism, 0.5, "replace_one", 20_000, 2)
        assert sum_.noise_sd == pytest.approx(12.0)
    drawn = noisy(sum_, np.zeros((20_000, 1))) / sum_.noise_sd
    moment, relative_sd = (2.0, 2.0**0.5) if mechanism == "gaussian" else (1.0, 1.0)
    size = (np.abs(drawn) ** moment).mean()
    assert abs(size - 1.0) < 5.5 * relative_sd / math.sqrt(len(drawn))


def test_the_noise_comes_from_no_seed() -> None:
    np.random.seed(1)  # noqa: NPY002 - what must have no influence
    first = discrete_laplace(20, Fraction(1000))
    np.random.seed(1)  # noqa: NPY002
    assert discrete_laplace(20, Fraction(1000)) != first
    with pytest.raises(ValueError, match="positive"):
        discrete_laplace(1, Fraction(0))


@pytest.mark.parametrize("epsilon", [1e-6, 0.01, 0.5, 1.0, 5.0, 20.0, 100.0, 750.0, 1e4, 1e6])
def test_pure_privacy_as_gaussian_privacy(epsilon: float) -> None:
    """Phi(-mu/2) <= 1/(1 + e^epsilon), and not for a mu that is 1e-11 smaller."""
    with mpmath.workdps(60):
        mu = mpmath.mpf(mu_from_pure(epsilon))
        a = 1 / (1 + mpmath.exp(epsilon))
        assert mpmath.ncdf(-mu / 2) <= a
        assert mpmath.ncdf(-(mu * (1 - mpmath.mpf(1e-11)) - mpmath.mpf(1e-14)) / 2) > a


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_gaussian_privacy_dominates_pure_privacy(epsilon: float) -> None:
    """At every level of false alarms, and nowhere with 1 % less."""
    alpha = np.linspace(1e-6, 1 - 1e-6, 2001)
    pure = np.maximum.reduce(
        [np.zeros(len(alpha)), 1 - math.exp(epsilon) * alpha, math.exp(-epsilon) * (1 - alpha)]
    )
    mu = mu_from_pure(epsilon)
    assert (stats.norm.cdf(stats.norm.isf(alpha) - mu) <= pure + 1e-12).all()
    assert (stats.norm.cdf(stats.norm.isf(alpha) - 0.99 * mu) > pure).any()


@pytest.mark.slow
def test_an_audit_of_the_laplace_mechanism() -> None:
    """Worlds told apart by the likelihood ratio: the bound nearly reaches epsilon, never passes."""
    runs, epsilon = 60_000, 1.0
    sum_ = making._Scaling.of(None, 1.0, "laplace", "replace_one", 1, 2).laplace_sum(
        "laplace", epsilon, "replace_one", 1, 2
    )
    worlds = [
        np.array([noisy(sum_, np.array([[0.3, record]]))[0] for _ in range(runs)])
        for record in (-1.0, 1.0)
    ]
    alarm, found = ((world > 1.3).mean() for world in worlds)
    error = 5.0 * math.sqrt(0.25 * 0.75 / runs)
    assert math.log((found - error) / (alarm + error)) > 0.9 * epsilon
    assert math.log((found - error) / (alarm + error)) <= epsilon


# -- charges --------------------------------------------------------------------------------------


def release(ledger: Any, **changes: Any) -> dp.PublishedStatistic:
    arguments: dict[str, Any] = {
        "data": {"x": X, "y": Y},
        "statistic": rows,
        "bounds": (-3, 3),
        "mechanism": "laplace",
        "budget": ledger,
        "epsilon": 1.0,
    }
    arguments.update(changes)
    return dp.release_statistic(**arguments)


def kinds(ledger: dp.Ledger) -> list[str]:
    return [entry.kind for entry in ledger.entries()]


def test_the_charge_comes_before_the_records(
    ledger: dp.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    honest = making.RowByRow.compute

    def watched(self: Any, *given: Any) -> np.ndarray:
        seen.append(kinds(ledger))
        return honest(self, *given)

    monkeypatch.setattr(making.RowByRow, "compute", watched)
    release(ledger)
    assert "charge" in seen[0] and "release" not in seen[0]
    assert "release" in kinds(ledger)


@pytest.mark.parametrize(
    "changes",
    [
        {"bounds": None},
        {"bounds": (1, 0)},
        {"bounds": (0, [1, 2, 3])},
        {"row_norm": 1.0},
        {"mechanism": "staircase"},
        {"epsilon": None},
        {"epsilon": -1.0},
        {"delta": 1e-6},
        {"mechanism": "gaussian"},
        {"mechanism": "gaussian", "delta": 0.5},  # more than one in n
        {"mechanism": "geometric"},
        {"data": {"x": X, "y": Y[:5]}},
        {"data": X},
        {"data": {"x": X.astype(str), "y": Y}},
        {"data": {"x": X.tolist(), "y": Y}},
        {"data": {"x": X.astype(object), "y": Y}},
        {"data": {"x": np.ma.masked_greater(X, 0.0), "y": Y}},
        {"data": {"x": X.astype(np.longdouble), "y": Y}},
        {"statistic": lambda x, y: x.sum()},
        {"statistic": lambda x, y: x - x.mean()},
        {"statistic": lambda x, y: x * X},
        {"statistic": lambda x: x},
        {"budget": 1.0},
    ],
)
def test_wrong_input_spends_nothing(ledger: dp.Ledger, changes: dict[str, Any]) -> None:
    before = kinds(ledger)
    with pytest.raises(ValueError) as caught:
        release(ledger, **changes)
    assert kinds(ledger) == before
    assert not any(f"{value:.4f}"[:6] in str(caught.value) for value in X)


def counter() -> Any:
    """A statistic that remembers earlier records."""
    seen = pytensor.shared(0.0)

    def statistic(x: Any, y: Any) -> Any:
        seen.default_update = seen + (x > 10).sum().astype("float64")
        return x * 0 + seen

    return statistic


@pytest.mark.parametrize(
    ("statistic", "message"),
    [
        (counter(), "updated from record to record"),
        (lambda x, y: x + pm.Normal.dist(), "random"),
        (lambda x, y: x * pytensor.shared(X), "room for an entry per record"),
        (lambda x, y: x * pt.constant(X)[y], "room for an entry per record"),
    ],
)
def test_a_statistic_carries_nothing_along(ledger: dp.Ledger, statistic: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        release(ledger, statistic=statistic)


def test_a_private_number_of_records_is_not_told_by_errors() -> None:
    """The same tables pass, and fail, with any number of records."""
    table = np.arange(50.0)
    for n in (0, 49, 50, 51):
        ledger = dp.Ledger.temporary("add_or_remove_one")
        data = {"k": np.zeros(n, dtype=np.int64)}
        made = dp.release_statistic(
            data, lambda k: pt.constant(table)[k], (0.0, 1.0), "laplace", ledger, epsilon=1.0
        )
        assert np.isfinite(made.observed).all()
        with pytest.raises(ValueError, match="room for an entry"):
            dp.release_statistic(
                data,
                lambda k: pt.constant(np.zeros(20_000))[k],
                (0.0, 1.0),
                "laplace",
                ledger,
                epsilon=1.0,
            )


@pytest.mark.parametrize("mechanism", ["laplace", "geometric"])
def test_a_pure_release_is_charged_what_implies_it(ledger: dp.Ledger, mechanism: str) -> None:
    """The squared mu of the ledger is no less than that of (epsilon, 0), and hardly more."""
    release(ledger, mechanism=mechanism, data={"x": Y, "y": Y}, epsilon=0.7)
    charged = Account(ledger, 1).read().spent / 2**40
    assert 1.0 <= charged / mu_from_pure(0.7) ** 2 < 1.0 + 1e-9


def test_promises_are_not_larger_than_the_charge(ledger: dp.Ledger) -> None:
    with pytest.raises(ValueError, match="too small to be counted"):
        release(ledger, mechanism="gaussian", epsilon=1e-6, delta=1e-12)
    with pytest.raises(ValueError, match="not below 1/n"):
        release(ledger, mechanism="gaussian", epsilon=1.0, delta=0.9)


@pytest.mark.parametrize(
    "changes",
    [
        {"bounds": (1e307, 1.7e308)},
        {"bounds": None, "row_norm": 1.5e308},
        {"mechanism": "geometric", "bounds": (2**53, 2**53 + 6), "statistic": lambda x, y: y},
        {
            "mechanism": "geometric",
            "bounds": (0, 2**39),
            "statistic": lambda x, y: y,
            "epsilon": 2.0**-24,
        },
    ],
)
def test_bounds_that_can_not_be_computed_with(ledger: dp.Ledger, changes: dict[str, Any]) -> None:
    before = kinds(ledger)
    with pytest.raises((ValueError, dp.PrivacyError)):
        release(ledger, **changes)
    assert kinds(ledger) == before


def test_a_count_that_does_not_fit_into_64_bits_is_refused_first(ledger: dp.Ledger) -> None:
    before, years = kinds(ledger), np.zeros(2**22 + 1, dtype=np.int8)
    with pytest.raises(ValueError, match="may not fit into 64 bits"):
        dp.release_statistic(
            {"y": years},
            lambda y: y,
            (2**40 - 1, 2**40),
            budget=ledger,
            mechanism="geometric",
            epsilon=1.0,
        )
    assert kinds(ledger) == before


@pytest.mark.slow
def test_a_posterior_on_the_same_ledger(tmp_path: Path) -> None:
    dp.Ledger.create(tmp_path / "ledger.db")
    release(tmp_path / "ledger.db")
    with pm.Model():
        mu = pm.Normal("mu")
        pm.Normal("y", mu, observed=X)
        dp.PrivacyBudget(epsilon=50.0, delta=1e-4, ledger=tmp_path / "ledger.db")
        released = dp.laplace(draws=10, progressbar=False)
    assert "ledger" in dp.privacy_statement(released)


def test_noise_made_reproducible_during_a_release(
    tmp_path: Path, ledger: dp.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = making.RowByRow.compute
    block = noise.insecure_noise(1)

    def switch(self: Any, *given: Any) -> np.ndarray:
        block.__enter__()
        return honest(self, *given)

    monkeypatch.setattr(making.RowByRow, "compute", switch)
    try:
        assert release(ledger).privacy_guarantee == "none"
    finally:
        block.__exit__(None, None, None)


def test_a_ledger_with_a_cap_refuses(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    dp.Ledger.create(path, epsilon=3.0, delta=1e-6)
    release(path, mechanism="gaussian", epsilon=1.0, delta=1e-6)
    with pytest.raises(dp.BudgetExceeded):
        release(path, mechanism="gaussian", epsilon=3.0, delta=1e-6)
    with pytest.raises(dp.BudgetExceeded):  # pure privacy is dear in this currency
        release(path, epsilon=2.0)


def test_a_budget_pays() -> None:
    with pm.Model():
        mu = pm.Normal("mu")
        pm.Normal("y", mu, observed=X)
        budget = dp.PrivacyBudget(epsilon=1.0, delta=1e-4)
    first = release(budget, mechanism="gaussian", epsilon=0.5, delta=1e-4)
    assert 0 < budget.spent().epsilon <= 0.5
    release(budget, mechanism="gaussian", epsilon=None)
    assert budget.spent().epsilon == pytest.approx(1.0, rel=1e-6)
    assert first.n == N
    with pytest.raises((dp.BudgetExceeded, ValueError)):
        release(budget, mechanism="gaussian", epsilon=0.1, delta=1e-4)
    assert "release_statistic" in set(budget.table()["sampler"])
    with pytest.raises(dp.UnsafeModel, match="records"):
        release(budget, data={"x": X[:9], "y": Y[:9]})


def test_insecure_noise_is_stamped(tmp_path: Path, ledger: dp.Ledger) -> None:
    dp.Ledger.create(tmp_path / "ledger.db")
    with noise.insecure_noise(1):
        assert release(ledger).privacy_guarantee == "none"
        with pytest.raises(dp.PrivacyError):
            release(tmp_path / "ledger.db")


# -- what is not told -----------------------------------------------------------------------------


def test_the_number_of_records_is_hidden_where_it_is_private() -> None:
    found = [
        release(dp.Ledger.temporary("add_or_remove_one"), data={"x": X[:k], "y": Y[:k]})
        for k in (5, N)
    ]
    assert [made.n for made in found] == [None, None]
    assert found[0].scale == found[1].scale
    assert found[0].statement == found[1].statement


@pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning")
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("payer", ["ledger", "budget"])
def test_the_grid_follows_from_no_private_number(
    mechanism: str, payer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fine as a public number of records asks for, whoever pays; the sum is on it."""
    asked: list[int] = []
    gaussian, laplace = Grid.finest, making._Scaling.laplace_sum

    def finest(noise_multiplier: float, n: int) -> Grid:
        asked.append(n)
        return gaussian(noise_multiplier, n)

    def laplace_sum(self: Any, *given: Any) -> LaplaceSum:
        asked.append(given[-1])
        return laplace(self, *given)

    monkeypatch.setattr(Grid, "finest", finest)
    monkeypatch.setattr(making._Scaling, "laplace_sum", laplace_sum)
    delta = 1e-8 if mechanism == "gaussian" else None
    for k in (5, N):
        pays: Any = dp.Ledger.temporary("add_or_remove_one")
        if payer == "budget":
            with pm.Model():
                pm.Normal("y", pm.Normal("mu"), observed=X[:k])
                pays = dp.PrivacyBudget(
                    9.0, 1e-6, neighboring="add_or_remove_one", n_public=1000, ledger=pays
                )
        release(pays, data={"x": X[:k], "y": Y[:k]}, mechanism=mechanism, delta=delta)
    assert set(asked) == {1000 if payer == "budget" else 2**24}


def test_a_record_that_can_not_be_computed_tells_nothing(ledger: dp.Ledger) -> None:
    x = X.copy()
    x[3] = math.nan
    made = release(ledger, data={"x": x, "y": Y}, statistic=lambda x, y: pt.log(x))
    assert np.isfinite(made.observed)
    secret = np.array([5, 0, 3])
    made = dp.release_statistic(
        {"k": secret},
        lambda k: 7 // k,
        (0, 7),
        "geometric",
        ledger,
        epsilon=1.0,
    )
    assert isinstance(made.observed[0], int)


# -- the numbers of a row -------------------------------------------------------------------------

ILL = RNG.random(N) < 0.3
LARGE = RNG.integers(10**9, 9 * 10**9, N)
WHOLE = {
    "ill": ILL,
    "x": X,
    "large": LARGE,
    "int8": RNG.integers(-128, 128, N).astype("int8"),
    "uint8": RNG.integers(0, 256, N).astype("uint8"),
    "uint64": 2**63 + RNG.integers(0, 5, N).astype("uint64"),
    "label": RNG.integers(0, 3, N),
}
#: Statistics, and what they are in exact arithmetic.
ROWS: dict[str, tuple[Callable[..., Any], Any]] = {
    "~": (lambda ill, **_: ~ill, ~ILL),
    "invert": (lambda ill, **_: pt.invert(ill), ~ILL),
    "where": (lambda ill, **_: pt.where(~ill, 1, 0), ~ILL),
    "switch": (lambda ill, **_: pt.switch(~ill, 2, 5), 5 - 3 * ~ILL),
    "~ of a comparison": (lambda x, **_: ~(x > 0), X <= 0),
    "~ of both": (lambda ill, x, **_: ~(ill & (x > 0)), ~(ILL & (X > 0))),
    "1 - truth": (lambda ill, **_: 1 - ill, ~ILL),
    "count": (lambda ill, x, **_: ill.astype("int64") + (x > 0), 1 * ILL + (X > 0)),
    "count in columns": (lambda ill, x, **_: pt.stack([ill, x > 0], 1).sum(1), 1 * ILL + (X > 0)),
    "exp of truth": (lambda ill, x, **_: pt.exp(ill) * x, np.exp(1.0 * ILL) * X),
    "square": (lambda large, **_: large**2, LARGE.astype(float) ** 2),
    "cube": (lambda large, **_: large * large * large, LARGE.astype(float) ** 3),
    "sum of squares": (
        lambda large, **_: (pt.stack([large, large], 1) ** 2).sum(1),
        2.0 * LARGE.astype(float) ** 2,
    ),
    "small product": (lambda int8, uint8, **_: int8 * int8 * uint8, None),
    "minus unsigned": (lambda uint8, **_: -uint8, None),
    "unsigned": (lambda uint64, **_: uint64, WHOLE["uint64"].astype(float)),
    "unsigned and signed": (lambda uint64, int8, **_: uint64 + int8, 2.0**63),
    "cast": (lambda large, **_: large.astype("int8"), LARGE),
    "cut off": (lambda x, **_: (1e30 * x).astype("int64"), 1e30 * X),
    "label": (lambda label, **_: pt.constant([3.0, 5.0, 9.0])[2 - label], None),
    "remainder": (lambda large, **_: large % 10, LARGE % 10),
}
ROWS["small product"] = (
    ROWS["small product"][0],
    WHOLE["int8"].astype(float) ** 2 * WHOLE["uint8"],
)
ROWS["minus unsigned"] = (ROWS["minus unsigned"][0], -WHOLE["uint8"].astype(float))
ROWS["label"] = (ROWS["label"][0], np.array([9.0, 5.0, 3.0])[WHOLE["label"]])


#: Of these in every run: all types, and each way in which one may be left.
QUICK_ROWS = ["~", "~ of both", "count in columns", "square", "small product"]
QUICK_ROWS += ["unsigned and signed", "cast", "cut off", "remainder"]


@pytest.mark.parametrize("name", marked(ROWS, slow=others(ROWS, QUICK_ROWS)))
def test_rows_are_what_was_written(name: str) -> None:
    """Truth values are negated as such, and integers do not wrap; 2e-16 is a rounding or two."""
    statistic, exact = ROWS[name]
    found = making.RowByRow(WHOLE, statistic).compute(list(WHOLE.values()))
    np.testing.assert_allclose(found[0], np.broadcast_to(exact, N) * 1.0, rtol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "geometric"])
def test_what_is_published_of_any_type(mechanism: str, ledger: dp.Ledger) -> None:
    """Within 5.5 standard deviations of the Gaussian noise: false alarms below 1e-7."""
    small = [int(v) for v in WHOLE["uint8"]]
    for column, statistic, upper, exact in (
        (ILL, lambda c: ~c, 1, (~ILL).sum()),
        (LARGE, lambda c: (c * c) // 10**18, 81, sum(int(v) ** 2 // 10**18 for v in LARGE)),
        (WHOLE["uint64"], lambda c: (c // 2**60).astype("int64"), 8, 8 * N),
        (WHOLE["uint8"], lambda c: (c + c) // 8, 63, sum(2 * v // 8 for v in small)),
    ):
        made = dp.release_statistic(
            {"c": column},
            statistic,
            (0, upper),
            mechanism,
            ledger,
            epsilon=300.0,
            delta=1e-6 if mechanism == "gaussian" else None,
        )
        assert abs(made.observed[0] - exact) < 0.3 * upper


CONFUSED = {
    "~ of integers": (lambda k, **_: ~k, "~ .*integers.*1 - x"),
    "~ of integers in a branch": (lambda k, **_: pt.switch(~k, 1, 0), "~ .*integers.*1 - x"),
    "+ of truth values": (lambda k, ill: ill + (k > 0), "True and False.*x | y"),
    "product of truth values": (
        lambda k, ill: pt.dot(pt.stack([ill, k > 0], 1), np.array([True, True])),
        "True and False.*x | y",
    ),
}


@pytest.mark.parametrize("name", CONFUSED)
def test_integers_and_truth_values_are_not_confused(name: str, ledger: dp.Ledger) -> None:
    """Neither by the custodian, who spends nothing, nor by the analyst."""
    statistic, message = CONFUSED[name]
    before = kinds(ledger)
    with pytest.raises(ValueError, match=f"(?s)^statistic .*{message}"):
        release(ledger, data={"k": Y, "ill": ILL}, statistic=statistic)
    assert kinds(ledger) == before
    with pm.Model():
        k, ill = pm.Bernoulli("k", 0.5, shape=N), pt.as_tensor(ILL)
        with pytest.raises(ValueError, match=f"(?s)`s`: the statistic .*{message}"):
            dp.LaplaceRelease("s", statistic(k=k, ill=ill), scale=1.0, observed=3.0)


@pytest.mark.slow
def test_eigenvalues_of_the_matrix_of_each_record(ledger: dp.Ledger) -> None:
    """PyTensor 2 takes one matrix in eigh, and says no word about it; PyTensor 3 takes a stack."""
    halves = RNG.normal(size=(N, 2, 2))
    given: dict[str, Any] = {"data": {"x": halves + halves.transpose(0, 2, 1)}}
    given |= {"bounds": (-20.0, 20.0), "epsilon": 300.0}
    exact = np.linalg.eigvalsh(given["data"]["x"]).sum(axis=0)
    eigenvalues = pt.vectorize(lambda a: pt.linalg.eigh(a)[0], "(m,m)->(m)")
    # ten standard deviations of the noise
    made = release(ledger, statistic=lambda x: eigenvalues(x), **given)
    np.testing.assert_allclose(made.observed, exact, atol=10.0 * max(made.scale))
    try:
        made = release(ledger, statistic=lambda x: pt.linalg.eigh(x)[0], **given)
    except ValueError as error:
        assert str(error).startswith("statistic fails") and "pt.vectorize" in str(error)
    else:
        np.testing.assert_allclose(made.observed, exact, atol=10.0 * max(made.scale))


def test_what_true_and_false_have_not_is_told(ledger: dp.Ledger) -> None:
    with pytest.raises(ValueError, match=r"truth values.*astype"):
        release(ledger, data={"ill": ILL}, statistic=lambda ill: -ill)


# -- what the analyst declares --------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
def test_the_analyst_computes_the_same_rows(plain: bool) -> None:
    """Squares beyond 64 bits, and negated comparisons, in PrivacyAwareGibbs."""
    with pm.Model() as model:
        k = pm.DiscreteUniform("k", 0, 2**40, shape=N)
        rows = pt.stack([k**2, pt.switch(~(k > 2**32), 1, 0)], axis=1)
        if plain:
            pm.Laplace("s", rows.sum(axis=0), 1.0, observed=[1.0, 2.0])
        else:
            dp.LaplaceRelease("s", rows, scale=1.0, observed=[1.0, 2.0])
    found = read(model, [k], None)
    values = pytensor.function(found.values, found.rows, mode=INTERPRETED)(LARGE)
    np.testing.assert_array_equal(values[:, 0], LARGE.astype(float) ** 2)
    np.testing.assert_array_equal(values[:, 1], LARGE <= 2**32)


def rows_of(declared: Any) -> np.ndarray:
    """What the sum that a declared release is about adds up."""
    total = declared.owner.op.dist_params(declared.owner)[0]
    return np.asarray(total.owner.inputs[0].eval())


@pytest.mark.slow
def test_declared_rows_that_are_not_numbers_or_do_not_exist(ledger: dp.Ledger) -> None:
    made = release(ledger, statistic=lambda x, y: pt.log(y), bounds=(-5, 5))
    with pm.Model():
        declared = made.declare("s", pt.log(pt.as_tensor_variable(Y)))
        with pytest.raises(ValueError, match=f"{N} records"):
            made.declare("t", pt.zeros(7))
    assert np.array_equal(rows_of(declared), np.zeros(N))
    made = release(
        dp.Ledger.temporary("add_or_remove_one"), statistic=lambda x, y: x, bounds=(1, 5)
    )
    with pm.Model():
        declared = made.declare("s", pt.full(6, 3.0), present=dp.present(4, 6))
    assert rows_of(declared).tolist() == [3.0, 3.0, 3.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "geometric"])
@pytest.mark.parametrize(
    ("bounds", "scalar"), [((-1, 2), False), pytest.param(None, True, marks=pytest.mark.slow)]
)
def test_the_declared_release_is_the_one_that_was_made(
    mechanism: str,
    bounds: Any,
    scalar: bool,
    ledger: dp.Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without noise, the declared sum at the real records is what was published."""
    monkeypatch.setattr(answers, "discrete_laplace", lambda size, scale: [0] * size)
    monkeypatch.setattr(answers, "rounded_normal", lambda size, m: np.zeros(size, np.int64))
    whole = mechanism == "geometric"
    z = np.rint(3 * X).astype("int64") if whole else 3 * X

    def statistic(z: Any) -> Any:
        return z if scalar else pt.stack([z, 2 * z], axis=1)

    made = dp.release_statistic(
        {"z": z},
        statistic,
        bounds,
        mechanism,
        ledger,
        epsilon=1.0,
        delta=1e-6 if mechanism == "gaussian" else None,
        row_norm=None if bounds else 4,
    )
    assert dp.PublishedStatistic.from_json(made.to_json()) == made
    with pm.Model() as model:
        declared = made.declare("s", statistic(pt.as_tensor_variable(z)))
        with pytest.raises(ValueError, match="dimensions"):
            made.declare("t", pt.zeros((3, 2)) if scalar else pt.zeros(3))
    first = declared.owner.op.dist_params(declared.owner)[0].eval()
    total = first.sum(axis=0) if whole else first  # PyMC's own laws are given the sum
    scale = np.max(made.scale)
    np.testing.assert_allclose(
        total, made.observed[0] if scalar else made.observed, atol=1e-6 * scale * N
    )
    assert np.isfinite(model.point_logps()["s"])
