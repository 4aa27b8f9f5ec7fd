"""Releases on batches: who is in them, what they cost, and what they give."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from time import perf_counter
from typing import Any

import numpy as np
import pymc as pm
import pytest
from pymc.model import Model
from scipy.stats import chi2, chisquare

import pymc_dp as dp
from pymc_dp.base.matrices import Coordinates
from pymc_dp.budget import get_budget
from pymc_dp.kernels import penalty
from pymc_dp.kernels.penalty import BarkerTest, GaussianProposal
from pymc_dp.privacy import answer, holder, noise, subsampled
from pymc_dp.privacy.account import Account
from pymc_dp.privacy.accounting import (
    MU2_UNIT,
    BatchEvent,
    FixedBatchGaussianEvent,
    GaussianEvent,
    SubsampledGaussianEvent,
)
from pymc_dp.privacy.chains import BatchQueries, MomentQueries
from pymc_dp.privacy.holder import COINS
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.privacy.meter import Meter
from pymc_dp.privacy.plan import plan_batches
from pymc_dp.privacy.preparation import Preparation
from pymc_dp.records.extraction import extract
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.preparing import Version
from tests.selection import marked

pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning")

#: Two-sided normal tail 3.8e-8.
Z = 5.5
N = 600
_rng = np.random.default_rng(3)
X = np.c_[np.ones(N), _rng.normal(size=N)]
Y = _rng.integers(0, 2, N)
USERS = np.sort(_rng.integers(0, 150, N))
SETTINGS = {"scaling": 0.1, "clip_norm": 0.3, "step_size": 0.05, "batch_size": 200}


def logistic(epsilon: float = 5.0, **kwargs: Any) -> tuple[Model, dp.PrivacyBudget]:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Bernoulli("y", logit_p=pm.math.dot(X, beta), observed=Y)
        budget = dp.PrivacyBudget(epsilon, 1e-5, **kwargs)
    return model, budget


# -- coins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerator", [2**26, 2**31, 2**32 - 2**28])
def test_coins_have_their_probability(numerator: int) -> None:
    n, p = 400_000, numerator / 2**32
    found = noise.coins(n, numerator)
    assert abs(found.mean() - p) < Z * np.sqrt(p * (1 - p) / n)
    pairs = (found[1:] & found[:-1]).mean()
    assert abs(pairs - p * p) < 2 * Z * np.sqrt(p * p * (1 - p * p) / n)


def test_coins_at_the_ends() -> None:
    assert noise.coins(1000, 2**32).all()
    assert not noise.coins(1000, 0).any()
    for wrong in ((-1, 5), (5, -1), (5, 2**32 + 1)):
        with pytest.raises(ValueError, match="numerator"):
            noise.coins(*wrong)


def test_coins_do_not_follow_a_seed() -> None:
    found = []
    for _ in range(2):
        np.random.seed(1)  # noqa: NPY002 - the point of the test
        found.append(noise.coins(256, 2**31))
    assert not np.array_equal(*found)


# -- subsets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "size"), [(7, 3), (7, 5), (8, 4)])
def test_all_subsets_are_equally_likely(n: int, size: int) -> None:
    every = list(combinations(range(n), size))
    place = {one: k for k, one in enumerate(every)}
    found = [place[tuple(noise.subset(n, size).tolist())] for _ in range(300 * len(every))]
    counts = np.bincount(found, minlength=len(every))
    assert chisquare(counts).pvalue > 1e-6


def test_members_of_large_subsets() -> None:
    n, size, rounds = 30_001, 6_000, 200
    counts = np.zeros(n)
    for _ in range(rounds):
        found = noise.subset(n, size)
        assert len(found) == size and (np.diff(found) > 0).all()
        assert 0 <= found[0] and found[-1] < n
        counts[found] += 1
    # each count is binomial; cells of 30 neighbours, whose counts have a little less variance
    cells = counts[:30_000].reshape(-1, 30).sum(1)
    expected, variance = 30 * rounds * size / n, 30 * rounds * size / n * (1 - size / n)
    assert chi2.sf(((cells - expected) ** 2).sum() / variance, len(cells)) > 1e-6


def test_subsets_at_the_ends() -> None:
    assert noise.subset(5, 5).tolist() == [0, 1, 2, 3, 4]
    assert noise.subset(1, 1).tolist() == [0] and noise.subset(5, 0).tolist() == []
    for wrong in ((5, 6), (5, -1), (2**32 + 1, 1)):
        with pytest.raises(ValueError, match="size"):
            noise.subset(*wrong)


def test_subsets_do_not_follow_a_seed_and_do_not_take_long() -> None:
    found, seconds = [], []
    for _ in range(5):
        np.random.seed(1)  # noqa: NPY002 - the point of the test
        start = perf_counter()
        found.append(noise.subset(1_000_000, 20_000))
        seconds.append(perf_counter() - start)
    assert not np.array_equal(found[0], found[1])
    assert min(seconds) < 0.05


# -- batches --------------------------------------------------------------------------------------


def engine_of(users: bool) -> Any:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Bernoulli("y", logit_p=pm.math.dot(X, beta), observed=Y)
        unit = {"privacy_unit": USERS} if users else {}
        budget = dp.PrivacyBudget(5.0, 1e-5, **unit)
    coordinates = Coordinates(np.zeros(2), 0.1 * np.eye(2))
    return RowEngine.of(extract(model, **budget.secrecy), coordinates, None)


@pytest.mark.parametrize("users", [False, True])
def test_a_batch_has_the_bits_of_its_units(users: bool) -> None:
    engine = engine_of(users)
    drawn = np.flatnonzero(np.random.default_rng(1).random(engine.n_units) < 0.3)
    z = np.array([0.4, -1.3])
    batch = engine.part(drawn)
    assert batch.n_units == len(drawn)
    assert np.array_equal(batch.log_likelihood(z), engine.log_likelihood(z)[drawn])


def poisson(mechanism: str, probability: float, multiplier: float) -> BatchEvent:
    return SubsampledGaussianEvent(mechanism, multiplier, round(probability * COINS) / COINS)


def fixed(mechanism: str, probability: float, multiplier: float) -> BatchEvent:
    return FixedBatchGaussianEvent(mechanism, multiplier, round(probability * N), N)


BOTH = pytest.mark.parametrize("event", [poisson, fixed])


def queries(
    event: BatchEvent,
    kind: type[BatchQueries] = BatchQueries,
    clip_norm: float = 0.3,
    **kwargs: Any,
) -> Any:
    ledger = Ledger.temporary()
    account = Account.open(
        ledger,
        MU2_UNIT,
        epsilon=1.0,
        delta=1e-5,
        neighboring="replace_one",
        unit="row",
        public_payload={},
    )
    account.record_plan(1, {"chains": 1})
    account.begin_run(1, max_runs=1, run_cost=0)
    meter = Meter(account, 1, {event: 1}, {}, 10**6, prepaid=True)
    found = kind(engine_of(False), meter, event, clip_norm, N, **kwargs)
    found.begin_chain()
    return found


@pytest.mark.slow
@BOTH
def test_gradients_of_batches_are_unbiased(event: Any) -> None:
    asked, z = queries(event("gradient", 0.25, 0.01)), np.array([0.5, 0.2])
    whole = queries(poisson("gradient", 1.0, 1e-4))
    assert whole.begin_iteration()
    expected = whole.gradient(z)
    answers = []
    for _ in range(3000):
        assert asked.begin_iteration()
        answers.append(asked.gradient(z))
    error = np.std(answers, axis=0) / np.sqrt(len(answers))
    assert (np.abs(np.mean(answers, axis=0) - expected) < Z * error + 1e-3).all()


@pytest.mark.slow
@BOTH
def test_ratios_of_batches_have_their_penalty_taken_off(event: Any) -> None:
    q, power = 0.25, 0.3
    asked = queries(event("log_ratio", q, 1e-4), likelihood_power=power)
    z, new = np.array([0.5, 0.2]), np.array([1.1, -0.4])
    c = 0.3 * np.linalg.norm(new - z)
    likelihood = asked.holder.engine.log_likelihood
    r = np.clip(likelihood(new) - likelihood(z), -c, c)
    answers = []
    for _ in range(4000):
        assert asked.begin_iteration()
        answers.append(asked.log_ratio(z, new)[0])
    estimate = power**2 * (1 - q) / q * (r**2).sum()
    expected = power * r.sum() - 0.5 * estimate
    assert abs(np.mean(answers) - expected) < Z * np.std(answers) / np.sqrt(len(answers)) + 1e-3
    variance = estimate
    if event is fixed:  # squares about the mean
        variance = power**2 * (1 - q) / q * N * r.var(ddof=1)
    assert abs(np.var(answers) / variance - 1.0) < 0.2


def test_one_record_in_a_batch_changes_a_ratio_by_no_more_than_is_paid_for() -> None:
    q, power, c = 0.1, 0.7, 0.4
    r = np.linspace(-c, c, 100_001)
    linear = power / q
    values = linear * r - 0.5 * linear**2 * (1 - q) * r**2
    bound = linear * c + 0.5 * linear**2 * (1 - q) * c**2
    assert np.abs(values).max() == pytest.approx(bound, rel=1e-12)
    asked = queries(poisson("log_ratio", q, 2.0), likelihood_power=power)
    asked.begin_iteration()
    z = np.zeros(2)
    new = np.array([c / asked.clip_norms["log_ratio"], 0.0])
    _, sd = asked.log_ratio(z, new)
    q = asked.probability  # rounded to coins
    linear = power / q
    assert sd == pytest.approx(2.0 * (linear * c + 0.5 * linear**2 * (1 - q) * c**2))


def integers(asked: Any, ask: Callable[..., Any], *at: np.ndarray) -> np.ndarray:
    """The exact sum behind an answer."""
    found: list[np.ndarray] = []
    with pytest.MonkeyPatch.context() as patch:
        total = asked.holder.total
        patch.setattr(asked.holder, "total", lambda query: found.append(total(query)) or found[0])
        assert asked.begin_iteration()
        ask(*at)
    return found[0]


def test_integer_sums_of_batches_move_by_one_clipped_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, without noise: with one unit more in the batch, at most C in grid units."""
    asked = queries(poisson("gradient", 0.5, 1.5))
    rng = np.random.default_rng(5)
    z = np.array([0.3, -0.7])
    for _ in range(30):
        members = rng.random(N) < 0.5
        other = members.copy()
        k = rng.integers(N)
        other[k] = not other[k]
        sums = []
        for chosen in (members, other):
            monkeypatch.setattr(noise, "coins", lambda size, numerator, chosen=chosen: chosen)
            sums.append(integers(asked, asked.gradient, z))
        assert 0.0 < np.linalg.norm(sums[0] - sums[1]) <= asked.grids["gradient"].sensitivity


def test_replacing_a_record_changes_two_terms_of_a_fixed_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, without noise: two data sets that differ in one record, over the same batch."""
    rng = np.random.default_rng(6)
    z, new = np.array([0.3, -0.7]), np.array([0.9, 0.4])
    for mechanism in ("gradient", "log_ratio"):
        event = fixed(mechanism, 0.3, 1.5)
        asked = queries(event, clip_norm=0.02, likelihood_power=0.4)  # it binds
        grid = asked.grids[mechanism]
        largest = 0.0
        for _ in range(30):
            members = np.sort(rng.choice(N, 180, replace=False))
            k = rng.integers(180)
            outside = rng.choice(np.setdiff1d(np.arange(N), members))
            # a neighbour in which this member holds another record's values
            other = np.sort(np.r_[np.delete(members, k), outside])
            sums = []
            for chosen in (members, other):
                monkeypatch.setattr(noise, "subset", lambda n, size, chosen=chosen: chosen)
                at = (z,) if mechanism == "gradient" else (z, new)
                sums.append(integers(asked, getattr(asked, mechanism), *at))
            largest = max(largest, float(np.linalg.norm(sums[0] - sums[1])))
        assert grid.sensitivity < largest <= 2.0 * grid.sensitivity


class Ratios:
    """A batch whose records have these log-likelihood ratios between 0 and any other point."""

    def __init__(self, ratios: Any) -> None:
        self.ratios = np.array(ratios, dtype=float)
        self.n_units = len(self.ratios)

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        return self.ratios if z.any() else np.zeros(len(self.ratios))


@pytest.mark.parametrize("multiplier", [0.3, 2.0, 1e4])
@pytest.mark.parametrize("far", [1.0, 1e-30, 1e30])
def test_a_record_moves_both_sums_together_by_no_more_than_is_paid_for(
    monkeypatch: pytest.MonkeyPatch, multiplier: float, far: float
) -> None:
    """Bit for bit, in integers: one record in or out; if replaced, two of these."""
    seen: list[np.ndarray] = []
    original = answer.clip_vectors

    def watched(block: Any, units: Any, bound: Any, total: np.ndarray, scale: Any) -> None:
        assert not total.any()
        original(block, units, bound, total, scale)
        seen.append(total.copy())
        # where the ratio is within its interval, the vector is within its bound but for rounding
        assert (scale[np.isfinite(block.values).all(axis=0)] > 1 - 1e-6).all()

    monkeypatch.setattr(answer, "clip_vectors", watched)
    asked = queries(poisson("log_ratio", 0.1, multiplier), MomentQueries, likelihood_power=0.7)
    grid = asked.grids["log_ratio"]
    bound = Fraction(2) ** grid.log2_sigma / Fraction(multiplier)
    z = np.array([far, 0.0])
    c = asked.clip_norms["log_ratio"] * far
    rng = np.random.default_rng(9)
    others = list(c * rng.uniform(-1.5, 1.5, 40))
    nasty = [0.0, 5e-324, 1e160, -1e160, np.inf, -np.inf, np.nan, -c, c, c * (1 - 1e-12)]
    distances = []
    for one in [*nasty, *(c * rng.uniform(-1.5, 1.5, 40))]:
        del seen[:]
        for ratios in (others, [*others, one]):
            monkeypatch.setattr(holder, "_batch", lambda *_, ratios=ratios: Ratios(ratios))
            asked.begin_iteration()
            value, noise_sd = asked.log_ratio(np.zeros(2), z)
            assert np.isfinite(value) and np.isfinite(noise_sd)
        change = [int(b) - int(a) for a, b in zip(*seen, strict=True)]
        assert sum(entry**2 for entry in change) <= bound**2
        distances.append(np.hypot(*map(float, change)))
    assert max(distances) >= float(bound) - 5  # attained


@pytest.mark.slow
@BOTH
def test_ratios_and_their_sampling_variance_are_unbiased(event: Any) -> None:
    q, power = 0.25, 0.3
    asked = queries(event("log_ratio", q, 0.1), MomentQueries, likelihood_power=power)
    z, new = np.array([0.5, 0.2]), np.array([1.1, -0.4])
    distance = np.linalg.norm(new - z)
    likelihood = asked.holder.engine.log_likelihood
    r = np.clip(likelihood(new) - likelihood(z), -0.3 * distance, 0.3 * distance)
    found = []
    for _ in range(3000):
        assert asked.begin_iteration()
        found.append(asked.log_ratio(z, new))
    value, total = np.transpose(found) ** np.array([[1], [2]])
    private = power * asked.ratio_noise_sd * distance
    assert private == pytest.approx(0.1 * np.hypot(1, 0.5) * power * 0.3 * distance / q)
    sampling = power**2 * (1 - q) / q * (r**2).sum()
    assert total.min() > 0  # nothing was cut off, which would bias it
    root = np.sqrt(len(found))
    assert abs(value.mean() - power * r.sum()) < Z * value.std() / root
    assert abs(total.mean() - private**2 - sampling) < Z * total.std() / root
    true = sampling if event is poisson else power**2 * (1 - q) / q * N * r.var(ddof=1)
    squares = (value - power * r.sum()) ** 2
    assert abs(squares.mean() - private**2 - true) < Z * squares.std() / root
    # the noise of the estimate is that which its docstring tells, and that of the batch
    unsure = (1 - q) * private / 0.5 * power * 0.3 * distance / q
    batch = power**4 * (1 - q) ** 3 / q**3 * (r**4).sum()
    if event is poisson:
        assert total.var() == pytest.approx(unsure**2 + batch, rel=0.2)


def test_points_without_a_usable_bound() -> None:
    asked = queries(poisson("log_ratio", 0.5, 1.0), MomentQueries)
    for clip_norm, far, told in ((0.3, 0.0, 0.0), (1e-305, 1.0, -np.inf), (1e300, 1e30, -np.inf)):
        asked.clip_norms["log_ratio"] = clip_norm
        asked.begin_iteration()
        assert asked.log_ratio(np.zeros(2), np.array([far, 0.0])) == (told, 0.0)


@pytest.mark.parametrize("kind", [BatchQueries, MomentQueries])
def test_an_empty_batch_is_noise_alone(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(noise, "coins", lambda size, numerator: np.zeros(size, bool))
    for mechanism in ("gradient", "log_ratio") if kind is BatchQueries else ("log_ratio",):
        asked = queries(poisson(mechanism, 0.5, 1.0), kind)
        asked.begin_iteration()
        z = np.zeros(2)
        value = asked.gradient(z) if mechanism == "gradient" else asked.log_ratio(z, z + 1.0)[0]
        assert np.isfinite(value).all() and np.all(np.asarray(value) != 0.0)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("event", "kind", "test", "iterations"),
    [
        (poisson, BatchQueries, penalty.penalty_test, 20_000),
        (fixed, BatchQueries, penalty.penalty_test, 6_000),
        (poisson, MomentQueries, BarkerTest(1.2), 6_000),
    ],
)
def test_subsampled_accept_tests_are_nearly_exact(
    event: Any, kind: Any, test: Any, iterations: int
) -> None:
    """Their bias is that of a sum that is not quite normal: small where batches are large."""
    q, power = 0.5, 0.05
    asked = queries(event("log_ratio", q, 0.5), kind, likelihood_power=power)

    class Prior:
        def log_density(self, z: np.ndarray) -> Any:
            return -0.5 * float(z @ z) / 400.0

        def gradient(self, z: np.ndarray) -> np.ndarray:
            return -z / 400.0

    rng = np.random.default_rng(8)
    axis = np.linspace(-25, 25, 101)
    nodes = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    likelihood = np.array([asked.holder.engine.log_likelihood(z).sum() for z in nodes])
    p = np.exp(power * (likelihood - likelihood.max()) - 0.5 * (nodes**2).sum(1) / 400.0)
    p /= p.sum()
    mean = p @ nodes
    variance = p @ (nodes - mean) ** 2
    state = penalty.initial_state(rng, mean, Prior())
    draws = []
    settings = {"proposal": GaussianProposal(4.0), "test": test}
    for _ in range(iterations):
        asked.begin_iteration()
        state, _ = penalty.transition(rng, state, asked, Prior(), **settings)
        draws.append(state.z)
    found = np.array(draws)
    from pymc_dp.base.compat import effective_draws

    effective = effective_draws(found[None])
    assert (np.abs(found.mean(0) - mean) < Z * np.sqrt(variance / effective)).all()
    squares = (found - mean) ** 2
    error = squares.std(0) / np.sqrt(effective_draws(squares[None]))
    # 5 % for what the central limit theorem leaves out
    assert (np.abs(squares.mean(0) - variance) < Z * error + 0.05 * variance).all()


# -- plans and the ledger -------------------------------------------------------------------------


def plan(multiplier: float | None = None, part: float = 0.0) -> Any:
    budget: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-6, "neighboring": "replace_one"}
    cap = subsampled.room_beside([], cap=2**62, **budget)
    made = plan_batches(
        lambda noise: SubsampledGaussianEvent("gradient", noise, 0.125),
        200,
        cap=cap,
        room=int(part * cap),
        noise_multiplier=multiplier,
        **budget,
    )
    return made, cap


@pytest.mark.parametrize("part", marked([0.0, 0.9], slow=[0.0]))
def test_a_plan_uses_the_budget_and_no_more(part: float) -> None:
    made, cap = plan(part=part)
    pair = (made.event, made.releases)
    beside = cap - made.reserved
    assert part * cap <= beside + 1 < 1.01 * part * cap + 0.001 * cap
    assert 1.99 < subsampled.epsilon_of([pair], beside, 1e-6, "replace_one") <= 2.0


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises((ValueError, dp.BudgetExceeded), match="noise multiplier"):
        plan(multiplier=0.3)
    with pytest.raises(dp.BudgetExceeded, match="noise multiplier"):
        plan(multiplier=8.0, part=0.99)


@pytest.mark.slow
def test_a_run_is_paid_for_before_a_record_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, budget = logistic()
    step = dp.DPSGLD(draws=5, chains=1, model=model, **SETTINGS)
    assert budget.account.read().spent == step.plan.batches.reserved
    spent = []
    original = holder._batch

    def watched(*of: Any) -> Any:
        spent.append(budget.account.read().spent)
        return original(*of)

    monkeypatch.setattr(holder, "_batch", watched)
    sample(model, step, draws=5)
    assert set(spent) == {step.plan.batches.reserved}
    with pytest.raises(dp.BudgetExceeded, match="have been made"):
        sample(model, step, draws=5)


def sample(model: Model, step: Any, draws: int = 40, chains: int = 1, cores: int = 1) -> Any:
    return pm.sample(
        draws=draws,
        tune=0,
        chains=chains,
        step=step,
        cores=cores,
        mp_ctx=multiprocessing.get_context("fork"),
        model=model,
        progressbar=False,
        random_seed=1,
        compute_convergence_checks=False,
    )


BATCHES = [
    (cls, *kind)
    for cls in (dp.DPSGLD, dp.DPSGNHT, dp.DPPenalty, dp.DPBarker)
    for kind in (
        ("poisson", "replace_one"),
        ("poisson", "add_or_remove_one"),
        ("fixed_size", "replace_one"),
    )
]


@pytest.mark.parametrize(
    ("cls", "kind", "neighboring"),
    marked(
        BATCHES,
        slow=[
            *(case for case in BATCHES if case[1:] == ("poisson", "replace_one")),
            (dp.DPBarker, "poisson", "add_or_remove_one"),
            (dp.DPPenalty, "poisson", "add_or_remove_one"),
        ],
        exhaustive=[
            (dp.DPSGLD, "fixed_size", "replace_one"),
            (dp.DPSGNHT, "poisson", "add_or_remove_one"),
            (dp.DPPenalty, "fixed_size", "replace_one"),
        ],
    ),
)
def test_steps_on_batches(cls: Any, kind: str, neighboring: Any) -> None:
    public = {} if neighboring == "replace_one" else {"n_public": N}
    # fixed sizes need as much noise for a larger budget
    epsilon = 5.0 if kind == "poisson" else 20.0
    model, budget = logistic(epsilon, neighboring=neighboring, **public)
    tested = cls in (dp.DPPenalty, dp.DPBarker)
    power = {"likelihood_power": 0.2} if tested else {}
    step = cls(draws=40, chains=2, batches=kind, model=model, **SETTINGS, **power)
    raw = sample(model, step, chains=2, cores=2)
    safe = dp.release(raw, model)
    draws = np.asarray(safe["posterior"]["beta"])
    assert draws.shape == (2, 40, 2) and np.isfinite(draws).all()
    assert not np.array_equal(draws[0], draws[1])  # batches and noise of their own
    statement = dp.privacy_statement(safe)
    batch = "Poisson batch (prob" if kind == "poisson" else "batch of exactly 200 of 600 units"
    assert batch in statement and "at this delta" in statement
    assert ("Rényi" in statement) == (kind == "fixed_size")
    assert "Gaussian differential privacy" not in statement
    batches = step.plan.batches
    used = subsampled.epsilon_of([(batches.event, batches.releases)], 0, budget.delta, neighboring)
    assert 0.98 * epsilon < used <= epsilon
    assert budget.spent().epsilon == used
    assert budget.account.read().spent == batches.reserved
    assert batch in budget.table()["mechanism"].iloc[0]
    assert ("approximate" in statement) == tested
    assert ("three reasons" in statement) == (cls is dp.DPBarker)


def test_fixed_batches_of_users() -> None:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Bernoulli("y", logit_p=pm.math.dot(X, beta), observed=Y)
        budget = dp.PrivacyBudget(30.0, 1e-5, privacy_unit=USERS)
    settings = {**SETTINGS, "batch_size": 20, "step_size": 1e-4}
    step = dp.DPSGLD(draws=10, chains=1, batches="fixed_size", model=model, **settings)
    users = len(np.unique(USERS))
    assert step.plan.batches.event.n_units == users == budget.n_public
    drawn = holder._batch(step.queries.holder.engine, step.queries.event)
    assert drawn is not None and drawn.n_units == 20
    statement = dp.privacy_statement(dp.release(sample(model, step, draws=10), model))
    assert f"exactly 20 of {users} units" in statement


@pytest.mark.parametrize("units", [N - 1, N + 1])
def test_a_fixed_batch_is_one_of_the_units_that_were_accounted_for(units: int) -> None:
    with pytest.raises(dp.PrivacyError, match="another data set"):
        queries(FixedBatchGaussianEvent("gradient", 1.0, 50, units))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cls": dp.DPSGLD, "batches": "fixed"}, "'poisson' or 'fixed_size'"),
        ({"cls": dp.DPPenalty, "batches": "fixed_size", "batch_size": None}, "needs a batch_size"),
        ({"cls": dp.DPSGNHT, "batches": "fixed_size", "batch_size": N + 1}, "at most the 600"),
        ({"cls": dp.DPHMC, "n_steps": 2, "batches": "fixed_size"}, "leave batch_size and"),
    ],
)
def test_wrong_kinds_of_batches_spend_nothing(settings: Any, message: str) -> None:
    model, budget = logistic()
    made = {**SETTINGS, **settings}
    with pytest.raises(ValueError, match=message):
        made.pop("cls")(draws=10, chains=1, model=model, **made)
    assert budget.spent().epsilon == 0.0


def test_fixed_batches_need_a_public_number_of_units() -> None:
    model, budget = logistic(neighboring="add_or_remove_one", n_public=N)
    with pytest.raises(ValueError, match="neighboring='replace_one' only"):
        dp.DPSGLD(draws=10, chains=1, batches="fixed_size", model=model, **SETTINGS)
    assert budget.account.read().spent == 0


def test_a_preparation_beside_fixed_batches() -> None:
    """The default step of Barker's test keeps its answers quiet enough."""
    model, budget = logistic(epsilon=8.0)
    given: dict[str, Any] = {"batch_size": 200, "batches": "fixed_size", "likelihood_power": 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = dp.DPBarker(draws=20, chains=1, model=model, **given)
    account = budget.account.read()
    assert step.plan.batches.reserved < account.spent <= account.cap
    q = step.plan.batches.event.sampling_probability
    typical = 1.3 * np.sqrt(2) * float(step.step_size)  # of 2 coordinates
    noise = 0.1 * typical * np.hypot(step.queries.ratio_noise_sd, np.sqrt((1 - q) / q))
    assert noise <= 1.2 * (1 + 1e-9)
    longest = 2.38 / np.sqrt(2) / np.sqrt(0.1)
    assert float(step.step_size) == pytest.approx(longest) or noise == pytest.approx(1.2)
    sample(model, step, draws=20)
    assert budget.spent().epsilon <= 8.0


def test_another_release_on_the_same_budget_stays_within_the_room() -> None:
    model, budget = logistic(epsilon=5.0)
    step = dp.DPSGLD(
        draws=20, chains=1, model=model, noise_multiplier=15.0, **{**SETTINGS, "step_size": 0.005}
    )
    sample(model, step, draws=20)
    account = budget.account.read()
    batches = step.plan.batches
    pair = (batches.event, batches.releases)
    assert subsampled.epsilon_of([pair], account.remaining, budget.delta, "replace_one") <= 5.0
    event = GaussianEvent("all that is left", 1.0001 * (MU2_UNIT / account.remaining) ** 0.5)
    budget.account.record_plan(5, {"kind": "preparation"})
    budget.account.charge(5, event)
    with pytest.raises(dp.BudgetExceeded):
        budget.account.charge(5, event)


SHORT = {**SETTINGS, "step_size": 0.005, "noise_multiplier": 25.0}
OTHER = {**SHORT, "step_size": 0.001, "batch_size": 100}


def charge(budget: dp.PrivacyBudget, multiplier: float) -> None:
    """A Gaussian release."""
    budget.account.record_plan(5, {"kind": "preparation"})
    budget.account.charge(5, GaussianEvent("a release", multiplier))


@pytest.mark.slow
def test_there_is_no_choice_of_a_plan_after_a_release() -> None:
    """Each plan alone would fit; chosen in view of a release, they would leak more together."""
    model, budget = logistic(epsilon=5.0)
    given: dict[str, Any] = {"draws": 20, "chains": 1, "model": model}
    dp.DPSGLD(**given, **OTHER)
    step = dp.DPSGLD(**given, **SHORT)  # nothing was released: another plan takes its place
    assert budget.account.read().spent == step.plan.batches.reserved
    again = dp.DPSGLD(**given, **SHORT)
    sample(model, step, draws=20)
    with pytest.raises(dp.BudgetExceeded, match="have been made"):
        sample(model, again, draws=20)
    with pytest.raises(dp.LedgerError, match="another plan"):
        dp.DPSGLD(**given, **OTHER)
    other, budget = logistic(epsilon=5.0)
    charge(budget, 3.0)
    with pytest.raises(dp.LedgerError, match="before anything else"):
        dp.DPSGLD(draws=20, chains=1, model=other, **SHORT)
    assert budget.batches() is None


@pytest.mark.slow
def test_a_plan_that_was_replaced_can_not_run() -> None:
    model, _ = logistic(epsilon=5.0)
    given: dict[str, Any] = {"draws": 20, "chains": 1, "model": model}
    first = dp.DPSGLD(**given, **OTHER)
    dp.DPSGLD(**given, **SHORT)
    with pytest.raises(dp.PlanMismatch, match="not those that were fixed"):
        sample(model, first, draws=20)


@pytest.mark.slow
def test_there_is_no_choice_between_batches_and_other_releases() -> None:
    """What the batches cost is gone, whether they are released or not.

    With delta left over by either of two ways to go on, a choice between them in view of a release
    has more than the larger of their deltas: 1.8 times with 100 releases at q = 0.001.
    """
    model, budget = logistic(epsilon=5.0)
    step = dp.DPSGLD(draws=20, chains=1, model=model, **SHORT)
    room = budget.account.read().cap - step.plan.batches.reserved
    assert budget.account.read().remaining == room
    charge(budget, 1.001 * (MU2_UNIT / room) ** 0.5)
    with pytest.raises(dp.BudgetExceeded, match="needs epsilon"):
        budget.account.charge(5, GaussianEvent("one more", 3.0))
    with pytest.raises(dp.LedgerError):
        budget.account.fix_batches(None)
    gaussian = {"scaling": 0.1, "clip_norm": 0.3, "step_size": 0.05}
    other, budget = logistic(epsilon=5.0)
    dp.DPSGLD(draws=20, chains=1, model=other, **SHORT)
    beside = dp.DPPenalty(draws=20, chains=1, model=other, **gaussian)
    assert beside.plan.run_cost <= budget.account.read().remaining


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"scaling": -1.0}, {"scaling": None, "clip_norm": None}])
def test_a_step_that_can_not_be_made_costs_nothing(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, budget = logistic()
    settings = {**SETTINGS, **wrong}

    def fails(*args: Any) -> None:
        raise RuntimeError("no preparation")

    monkeypatch.setattr(dp.DPSGLD, "_prepare", fails)
    with pytest.raises((ValueError, RuntimeError)):
        dp.DPSGLD(draws=5, chains=1, model=model, **settings)
    assert budget.account.read().spent == 0 and budget.batches() is None
    dp.DPPenalty(draws=5, chains=1, model=model, scaling=0.1, clip_norm=0.3, step_size=0.1)


@pytest.mark.slow
def test_draws_beside_batches_say_what_all_of_it_cost() -> None:
    model, budget = logistic(epsilon=5.0)
    step = dp.DPSGLD(draws=20, chains=1, model=model, **SHORT)
    sample(model, step, draws=20)
    before = budget.spent().epsilon
    beside = dp.DPPenalty(
        draws=20, chains=1, model=model, scaling=0.1, clip_norm=0.3, step_size=0.05
    )
    raw = sample(model, beside, draws=20)
    told = np.asarray(raw["sample_stats"]["dp_epsilon"])
    assert (told > before).all()
    assert told == pytest.approx(budget.spent().epsilon)


@pytest.mark.slow
def test_a_preparation_stays_within_its_room() -> None:
    model, budget = logistic(epsilon=20.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = dp.DPSGNHT(draws=20, chains=1, model=model)
    account = budget.account.read()
    assert step.plan.batches.reserved < account.spent <= account.cap
    sample(model, step, draws=20)
    assert budget.spent().epsilon <= 20.0


@pytest.mark.slow
def test_a_step_that_is_built_again_prepares_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the room was set aside for was released once, and would not pay for another time."""
    model, budget = logistic(epsilon=20.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = dp.DPSGNHT(draws=20, chains=1, model=model)
        spent = budget.account.read().spent
        again = dp.DPSGNHT(draws=20, chains=1, model=model)
        assert budget.account.read().spent == spent
        assert again.coordinates.scaling.tolist() == first.coordinates.scaling.tolist()
        with monkeypatch.context() as stale:
            stale.setattr(Version, "is_that_of", lambda self, other: False)
            with pytest.raises(dp.BudgetExceeded, match=r"needs more than .* No record was read"):
                dp.DPSGNHT(draws=20, chains=1, model=model)
    assert budget.account.read().spent == spent
    sample(model, again, draws=20)


@pytest.mark.slow
def test_a_preparation_beside_batches_is_not_taken_up_by_another_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts shares of the whole budget, of which the batches have their part."""
    model, budget = logistic(epsilon=20.0)
    original, asked = Preparation.histogram, []

    def interrupted(self: Any, label: str, spec: Any, share: float) -> Any:
        asked.append(self.units)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return original(self, label, spec, share)

    monkeypatch.setattr(Preparation, "histogram", interrupted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(KeyboardInterrupt):
            dp.DPPenalty(draws=20, chains=1, model=model, batch_size=200)
        left = budget.account.read().remaining
        dp.DPPenalty(draws=20, chains=1, model=model)
    assert asked[2] > left
    assert set(asked[3:]) == {left}


def test_the_ledger_is_read_a_few_times_for_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = logistic()
    step = dp.DPPenalty(draws=60, chains=1, model=model, scaling=0.1, clip_norm=0.3, step_size=0.1)
    original, read = Account.batches, []

    def counted(self: Account) -> Any:
        read.append(self)
        return original(self)

    monkeypatch.setattr(Account, "batches", counted)
    sample(model, step, draws=60)
    assert len(read) < 60


def test_what_was_spent_is_that_of_the_batches() -> None:
    """Ledger units that stand for batches do not turn into an epsilon as those of others do."""
    model, budget = logistic(epsilon=8.0)
    settings = {**SETTINGS, "step_size": 1e-5, "noise_multiplier": 2.0}
    step = dp.DPSGLD(draws=20, chains=1, model=model, **settings)
    raw = sample(model, step, draws=20)
    made = step.plan.batches
    true = subsampled.epsilon_of([(made.event, made.releases)], 0, budget.delta, "replace_one")
    assert true < 7.9
    assert budget.spent().epsilon == pytest.approx(true)
    assert budget.table().set_index("sampler").loc["spent", "epsilon"] == pytest.approx(true)
    assert np.allclose(raw["sample_stats"]["dp_epsilon"], true)
    assert f"Charged so far: epsilon = {true:.4g}" in dp.privacy_statement(dp.release(raw, model))


def test_a_ledger_with_a_cap_at_another_delta_has_no_batches(tmp_path: Any) -> None:
    dp.Ledger.create(tmp_path / "capped.db", epsilon=5.0, delta=1e-7)
    model, budget = logistic(epsilon=1.0, ledger=tmp_path / "capped.db")
    with pytest.raises(dp.LedgerError, match="another"):
        dp.DPSGLD(draws=5, chains=1, model=model, **SETTINGS)
    assert budget.spent().epsilon == 0.0


@pytest.mark.slow
def test_budgets_that_share_a_ledger_have_no_batches(tmp_path: Any) -> None:
    ledger = dp.Ledger.create(tmp_path / "one.db")
    first, _ = logistic(epsilon=1.0, ledger=tmp_path / "one.db")
    logistic(epsilon=1.0, ledger=tmp_path / "one.db")
    with pytest.raises(dp.LedgerError, match="of their own"):
        dp.DPSGLD(draws=5, chains=1, model=first, **SETTINGS)
    ledger = dp.Ledger.create(tmp_path / "two.db")
    model, _ = logistic(epsilon=1.0, ledger=tmp_path / "two.db")
    dp.DPSGLD(draws=5, chains=1, model=model, **SETTINGS)
    with pytest.raises(dp.LedgerError, match="of their own"):
        logistic(epsilon=1.0, ledger=tmp_path / "two.db")
    assert ledger.verify() > 0


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (dp.DPSGLD, {"batch_size": 0}, "batch_size must be an integer of at least 1"),
        (dp.DPSGLD, {"batch_size": N + 1}, "at most the 600"),
        (dp.DPSGLD, {"step_size": -1.0}, "step_size must be positive"),
        (dp.DPSGLD, {"step_size": 50.0}, "needs less noise than privacy adds"),
        (dp.DPSGLD, {"runs": 2}, "run once"),
        (dp.DPSGLD, {"noise_multiplier": {"gradient": 1.0}}, "one number"),
        (dp.DPSGNHT, {"friction": -1.0}, "friction must not be negative"),
        (dp.DPPenalty, {"runs": 2}, "run once"),
        (dp.DPHMC, {"n_steps": 2}, "batch_size"),
        (dp.DPLangevin, {"curvature": 0.2}, "batch_size"),
        (dp.DPBarker, {"noise_sd": 1.9}, "1.81"),
        (dp.DPBarker, {"batch_size": N + 1}, "at most the 600"),
        (dp.DPBarker, {"runs": 2}, "run once"),
    ],
)
def test_wrong_settings_spend_nothing(cls: Any, settings: Any, message: str) -> None:
    model, budget = logistic()
    with pytest.raises((ValueError, TypeError), match=message):
        cls(draws=10, chains=1, model=model, **{**SETTINGS, **settings})
    assert budget.spent().epsilon == 0.0
    assert get_budget(model) is budget
