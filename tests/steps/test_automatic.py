"""Steps that learn their settings privately: what they cost, say and leave behind.

The budgets are large, so that a preparation finds what it looks for; nothing is said about the
accuracy of the draws, but for the one budget that is far too small.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import multiprocessing
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import cloudpickle
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.privacy import holder as holders
from pymc_dp.privacy.accounting import MU2_UNIT
from pymc_dp.privacy.answer import VectorSum
from pymc_dp.privacy.noise import insecure_noise
from pymc_dp.privacy.preparation import Preparation
from pymc_dp.rows import functions
from pymc_dp.rows.predicted import PredictorEngine
from tests.selection import marked
from tests.steps.test_conformance import CHAINS, DRAWS, TUNE, check_raw, pm_sample

pytestmark = pytest.mark.filterwarnings(
    "ignore:These data already have a budget:UserWarning",
    "ignore:More chains:UserWarning",
)

N = 2503  # a length that no other array has
DELTA = 1e-5
CAP = 2.0**-20  # what may be left of a budget, as a fraction


class Records:
    """Columns of a made-up data set; every value of `x` is a secret."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=N)
        self.X = np.c_[np.ones(N), self.x]
        self.binary = (rng.random(N) < 1.0 / (1.0 + np.exp(0.8 * self.x - 0.3))).astype(int)
        self.group = rng.choice(4, N, p=[0.5, 0.3, 0.15, 0.05])
        rate = np.array([0.0, 0.5, 1.0, -0.3])[self.group] + 0.3 * self.x
        self.count = rng.poisson(np.exp(rate))
        self.first = rng.normal(0.3, 10.0, N)
        self.second = rng.normal(0.6, 10.0, N)
        self.person = np.arange(N) // 2

    @property
    def patterns(self) -> list[bytes]:
        numbers = [*self.x[:200], self.x.mean(), self.first.mean(), self.second.mean()]
        texts = [repr(float(value))[:-3].encode() for value in numbers]
        return [*texts, *[np.float64(value).tobytes() for value in numbers]]

    def found_in(self, *texts: str | bytes) -> list[bytes]:
        data = b"\n".join(t.encode() if isinstance(t, str) else t for t in texts)
        return [pattern for pattern in self.patterns if pattern in data]


RECORDS = Records()


def logistic(r: Records) -> None:
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Bernoulli("y", logit_p=r.X @ beta, observed=r.binary)


def poisson_groups(r: Records) -> None:
    """An index block of unequal groups beside a slope."""
    intercept = pm.Normal("intercept", 0, 2, shape=4)
    slope = pm.Normal("slope", 0, 1)
    pm.Poisson("y", pt.exp(intercept[r.group] + slope * r.x), observed=r.count)


def banana(r: Records) -> None:
    """Two observed variables, and a posterior that is bent."""
    a, b = pm.Normal("a", 0, 1), pm.Normal("b", 0, 1)
    pm.Normal("first", a, 10.0, observed=r.first)
    pm.Normal("second", b + a**2, 10.0, observed=r.second)


MODELS: dict[str, tuple[Callable[[Records], None], dict[str, Any]]] = {
    "logistic": (logistic, {}),
    "poisson_groups": (poisson_groups, {}),
    "banana": (banana, {}),
    "users": (logistic, {"privacy_unit": RECORDS.person}),
    "added or removed": (logistic, {"neighboring": "add_or_remove_one", "n_public": 2000}),
}
STEPS: dict[str, tuple[type, dict[str, Any]]] = {
    "penalty": (dp.DPPenalty, {}),
    "hmc": (dp.DPHMC, {"n_steps": 2}),
    "langevin": (dp.DPLangevin, {}),
    **{
        f"langevin-{form}": (dp.DPLangevin, {"form": form})
        for form in ("anchored", "plain", "quadratic")
    },
}

#: What a statement says of each form alone.
TARGETS = {
    "anchored": "Changes of scores and energy errors were clipped",
    "plain": "Energy errors were clipped at a learned bound",
    "quadratic": "did not touch the records",
}


def build(
    name: str, epsilon: float = 40.0, records: Records = RECORDS, **options: Any
) -> tuple[pm.Model, dp.PrivacyBudget]:
    declare, own = MODELS[name]
    with pm.Model() as model:
        declare(records)
        budget = dp.PrivacyBudget(epsilon, DELTA, dataset="made up", **{**own, **options})
    return model, budget


def automatic(name: str, model: pm.Model, **arguments: Any) -> Any:
    cls, settings = STEPS[name]
    plan = {"draws": DRAWS, "tune": TUNE, "chains": CHAINS, "progressbar": False}
    return cls(**{**plan, **settings, **arguments}, model=model)


def spent_by_entries(budget: dp.PrivacyBudget) -> int:
    """Ledger units, from noise multipliers alone: ceil(2^40 / tau^2) for every release."""
    total = 0
    for entry in budget.ledger.entries():
        if entry.kind == "charge":
            tau = Fraction(entry.payload["noise_multiplier"])
            total += math.ceil(MU2_UNIT / tau**2)
        elif entry.kind in ("lease", "return"):
            plan = budget.account.plan(entry.plan)
            costs = [
                sum(
                    count
                    * math.ceil(MU2_UNIT / Fraction(plan["events"][k]["noise_multiplier"]) ** 2)
                    for k, count in plan[part].items()
                )
                for part in ("per_iteration", "at_start")
            ]
            cost, iterations = entry.payload["cost"], entry.payload["iterations"]
            assert cost == costs[0] or (cost, iterations) == (costs[1], 1)
            total += cost * iterations * (-1) ** (entry.kind == "return")
        else:
            assert entry.amount == 0 or entry.kind == "account"
        assert total <= budget.account.read().cap
        if entry.account == budget.account.number:
            assert entry.balance == total
    return total


def check_all_spent(budget: dp.PrivacyBudget) -> None:
    total, cap = spent_by_entries(budget), budget.account.read().cap
    assert total == budget.account.read().spent
    assert cap * (1.0 - CAP) <= total <= cap
    budget.ledger.verify()


def plan_of(safe: Any, budget: dp.PrivacyBudget) -> dict[str, Any]:
    plan_id = int(_compat.group(safe, "sample_stats")["dp_plan_id"][0, 0])
    return budget.account.plan(plan_id)


def _releases_scores(step: Any) -> bool:
    return isinstance(step, dp.DPLangevin) and step.form != "quadratic"


def check_result(safe: Any, budget: dp.PrivacyBudget) -> None:
    """Groups, statistics and words of a released result."""
    plan = plan_of(safe, budget)
    sampler, form = plan["sampler"], plan["settings"].get("form")
    anchored = form == "anchored"
    groups = ["posterior", "posterior_raw", "sample_stats"]
    assert sorted(_compat.group_names(safe)) == [g for g in groups if anchored or "raw" not in g]
    posterior, stats = _compat.group(safe, "posterior"), _compat.group(safe, "sample_stats")
    scores = sampler == "DPLangevin" and form != "quadratic"
    newton = {"dp_newton"} if scores else set()
    assert {str(name) for name in stats} == {"dp_accepted", "dp_epsilon", "dp_plan_id"} | newton
    raw = _compat.group(safe, "posterior_raw") if anchored else posterior
    for dataset in (posterior, raw):
        assert (dataset.sizes["chain"], dataset.sizes["draw"]) == (CHAINS, DRAWS)
        assert set(dataset) == set(raw)
        assert all(np.isfinite(variable).all() for variable in dataset.values())
    moved = np.diff(raw[next(iter(raw))].values.reshape(CHAINS, DRAWS, -1), axis=1)
    assert np.array_equal(moved.any(axis=-1), stats["dp_accepted"].values[:, 1:])
    # the budget of a step without releases in its chains is spent when they begin
    epsilon, quadratic = stats["dp_epsilon"].values, form == "quadratic"
    assert ((np.diff(epsilon, axis=1) == 0) if quadratic else (np.diff(epsilon, axis=1) > 0)).all()
    assert (epsilon[:, -1] == budget.spent().epsilon).all()

    text, facts = dp.privacy_statement(safe), json.loads(safe.attrs["pymc_dp_statement"])
    assert f"({budget.epsilon:g}, {DELTA:g})-differentially private" in text
    assert f"Sampler: {sampler}, {CHAINS} chains of {DRAWS} draws" in text
    assert ("noise_aware" in facts) == ("privacy noise in the released score" in text) == anchored
    if anchored:
        assert "posterior_raw" in text
        given_back = facts["settings"].get("clipping") == "consistent"
        assert ("given back on average" in text) == given_back
        assert ("do not account for the bias of clipping" in text) != given_back
    assert "BUDGET WAS TOO SMALL" not in text
    assert {name for name, words in TARGETS.items() if words in text} <= {form}
    assert not {"anchor", "location", "scaling"} & set(facts["settings"])
    assert f"Before the chains: {facts['preparation']['releases']} releases" in text
    charges = [e for e in budget.ledger.entries() if e.kind == "charge"]
    assert facts["preparation"]["releases"] == len(charges)
    assert facts["privacy_guarantee"] == "(epsilon, delta)-differential privacy"


# -- sampling -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "step_name",
    marked(
        STEPS,
        exhaustive=["hmc", "langevin-plain", "langevin-anchored", "langevin-quadratic"],
    ),
)
def test_step(step_name):
    """Three runs, on one core, on two and by ``dp.sample``; then the budget is used up."""
    model, budget = build("logistic")
    step = automatic(step_name, model, runs=3)
    prepared = spent_by_entries(budget)
    assert 0 < prepared == budget.account.read().spent
    with pytest.raises(dp.PlanMismatch, match=f"planned for draws={DRAWS}"):
        pm.sample(draws=DRAWS + 1, tune=TUNE, chains=CHAINS, step=step, cores=1, model=model)
    for run, cores in enumerate([1, 2], start=1):
        idata = pm_sample(model, step, cores, multiprocessing.get_context("fork"))
        check_raw(idata, step, newton=_releases_scores(step))
        assert spent_by_entries(budget) == prepared + run * step.plan.run_cost
    safe = dp.sample(
        DRAWS, tune=TUNE, chains=CHAINS, step=step, cores=1, model=model, progressbar=False
    )
    check_all_spent(budget)
    check_result(safe, budget)
    with pytest.raises(dp.BudgetExceeded, match="all planned runs"):
        pm_sample(model, step, cores=1)
    with pytest.raises(dp.BudgetExceeded, match="used up"):
        automatic(step_name, model)
    samplers = budget.table()["sampler"].tolist()
    assert samplers.count(type(step).__name__) == len(step.plan.events)
    assert samplers.count(f"{type(step).__name__} preparation") >= 5
    check_all_spent(budget)


@pytest.mark.parametrize(
    ("model_name", "step_name"),
    marked(
        [
            *itertools.product([m for m in MODELS if m != "logistic"], ["langevin", "penalty"]),
            ("banana", "langevin-anchored"),
            ("users", "hmc"),
        ],
        slow=[("banana", "langevin-anchored"), ("added or removed", "langevin")],
        exhaustive=[
            ("banana", "langevin"),
            ("poisson_groups", "langevin"),
            ("poisson_groups", "penalty"),
            ("banana", "penalty"),
            ("added or removed", "penalty"),
            ("users", "hmc"),
            ("users", "penalty"),
        ],
    ),
)
def test_model(model_name, step_name):
    model, budget = build(model_name)
    cls, settings = STEPS[step_name]
    safe = dp.sample(
        DRAWS,
        tune=TUNE,
        chains=CHAINS,
        step=cls,
        step_kwargs={**settings, "progressbar": False},
        model=model,
        cores=1,
        progressbar=False,
        compute_convergence_checks=False,
    )
    check_all_spent(budget)
    check_result(safe, budget)
    text = dp.privacy_statement(safe)
    assert ("added or removed" in text) == (model_name == "added or removed")
    assert ("one unit (all rows with one id)" in text) == (model_name == "users")
    assert ("units (all rows with one id)." in text) == (model_name == "users")
    assert ("2,503" in text) == (model_name not in ("users", "added or removed"))
    if cls is dp.DPLangevin:
        clipping = plan_of(safe, budget)["settings"]["clipping"]
        # the anchor of a banana may have a bound beyond the tail that is no longer
        assert clipping == "consistent" or model_name == "banana"


@pytest.mark.slow
def test_new_interpreters():
    """An anchored step, with its records tilted, reaches them in one piece."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pymc_dp"])
    model, budget = build("logistic")
    step = automatic("langevin-anchored", model)
    idata = pm_sample(model, step, cores=2, mp_ctx=context)
    check_raw(idata, step, newton=_releases_scores(step))
    check_all_spent(budget)
    check_result(dp.release(idata, model), budget)


@pytest.mark.slow
@pytest.mark.parametrize("consistent", [None, True, False])
def test_consistent_clipping(consistent):
    model, budget = build("logistic")
    step = automatic("langevin-anchored", model, consistent_clipping=consistent)
    tilted = step.queries.holder.engine
    assert isinstance(tilted, PredictorEngine)
    assert tilted.is_tilted
    plans = [e.payload for e in budget.ledger.entries() if e.plan == step.plan.plan_id]
    given_back = plans[0]["settings"]["clipping"] == "consistent"
    assert given_back == (consistent is not False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step_name", "given"),
    [
        ("langevin", {"step_size": 0.123, "n_steps": 3, "momentum": "persistent", "jitter": 0.2}),
        ("hmc", {"step_size": 0.123, "n_steps": 3}),
        ("penalty", {"step_size": [0.1, 0.2]}),
    ],
)
def test_settings_that_are_given_are_kept(step_name, given):
    model, budget = build("logistic")
    step = automatic(step_name, model, **given)
    settings = budget.account.plan(step.plan.plan_id)["settings"]
    assert {name: settings[name] for name in given} == given
    assert step.plan.per_iteration.get("gradient", 3) in (3, 4)


# -- what is left behind --------------------------------------------------------------------------


class Census(cloudpickle.Pickler):
    """Counts the arrays with an entry for each record that a pickle holds."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: Counter[tuple[Any, ...]] = Counter()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray) and N in obj.shape:
            self.found[obj.shape, obj.dtype.str, zlib.crc32(obj.tobytes())] += 1
        return super().reducer_override(obj)

    @classmethod
    def of(cls, step: Any) -> Counter[tuple[Any, ...]]:
        census = cls()
        census.dump(step)
        return census.found


@pytest.mark.slow
def test_a_pickle_holds_the_records_and_nothing_made_of_them():
    """New interpreters need the data; columns, references and knots they make themselves."""
    model, _ = build("logistic")
    step = automatic("langevin-anchored", model)
    fresh = Census.of(step)
    pm_sample(model, step, cores=1)
    assert step.queries.holder.engine._linear.reference.any()
    model, _ = build("logistic")
    by_hand = dp.DPLangevin(
        draws=5, chains=1, model=model, scaling=0.1, clip_norm=0.2, step_size=0.3, energy_clip=0.1
    )
    given = Census.of(by_hand)
    data = {zlib.crc32(array.tobytes()) for array in (RECORDS.X, RECORDS.binary)}
    assert {checksum for _, _, checksum in given} == data
    assert Census.of(step) == fresh == given


@pytest.mark.compiled
@pytest.mark.slow
def test_results_logs_and_ledger_hold_no_secret(tmp_path, caplog, capfd):
    said = []
    for seed in (0, 1):
        records = Records(seed)
        path = tmp_path / f"ledger {seed}"
        dp.Ledger.create(path)
        model, budget = build("banana", records=records, ledger=path)
        caplog.clear()
        with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = automatic("langevin-anchored", model, progressbar=True)
            idata = pm_sample(model, step, cores=1)
            safe = dp.release(idata, model)
        out = capfd.readouterr()
        texts = [record.getMessage() for record in caplog.records]
        texts += [str(warning.message) for warning in caught]
        posterior = b"".join(
            np.ascontiguousarray(variable.values).tobytes()
            for name in _compat.group_names(safe)
            for variable in _compat.group(safe, name).values()
        )
        assert records.found_in(*texts, out.out, out.err, posterior) == []
        assert records.found_in(json.dumps(safe.attrs), budget.table().to_string()) == []
        for file in tmp_path.rglob("*"):
            assert file.is_dir() or records.found_in(file.read_bytes()) == []
        ours = [r.getMessage() for r in caplog.records if r.name == "pymc.pymc_dp"]
        stats = _compat.group(idata, "sample_stats")
        said.append((ours, stats["dp_epsilon"].values.shape, stats["dp_frozen"].values.any()))
    assert said[0][0], "the preparation is announced"
    assert said[0] == said[1], "what is said is the same for other records"


# -- interruptions --------------------------------------------------------------------------------


def interrupt(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Make the `call`-th request for a sum an interruption by the user."""
    method, calls = Preparation.vector_sum, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return method(self, *args, **kwargs)

    monkeypatch.setattr(Preparation, "vector_sum", interrupted)


BY_HAND = {"form": "plain", "clip_norm": 1.0, "scaling": 0.1, "step_size": 0.1, "energy_clip": 0.1}


def charged(budget: dp.PrivacyBudget) -> list[str]:
    """Names of the one-off releases, in order."""
    return [e.payload["mechanism"] for e in budget.ledger.entries() if e.kind == "charge"]


def kept(budget: dp.PrivacyBudget) -> list[str]:
    return [e.payload["label"] for e in budget.ledger.entries() if e.kind == "release"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step_name", "call"), [("langevin-anchored", 1), ("langevin-anchored", 7), ("hmc", 4)]
)
def test_an_interrupted_preparation_goes_on(step_name, call, monkeypatch):
    model, budget = build("logistic")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, call)
        automatic(step_name, model)
    before = spent_by_entries(budget)
    assert 0 < before == budget.account.read().spent
    labels = charged(budget)
    assert labels == kept(budget) and len(labels) >= 2 * call - 1

    found = []

    def resume(*args, method=Preparation.resume, **kwargs):
        found.append(method(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(Preparation, "resume", resume)
    step = automatic(step_name, model)
    [preparation] = found
    assert preparation.resumed == len(labels)
    after = charged(budget)
    assert after[: len(labels)] == labels
    assert after == kept(budget), "nothing is charged twice"
    idata = pm_sample(model, step, cores=1)
    check_all_spent(budget)
    check_result(dp.release(idata, model), budget)


@pytest.mark.slow
def test_an_interrupt_after_the_last_release_loses_nothing(monkeypatch):
    """The quadratic form spends all of the budget, and then explores its target for seconds."""
    model, budget = build("logistic")

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("pymc_dp.tuning.quadratic.Quadratic.explored", interrupted)
        automatic("langevin-quadratic", model)
    labels = charged(budget)
    check_all_spent(budget)
    for other in ({"draws": DRAWS + 1}, BY_HAND):
        with pytest.raises(dp.BudgetExceeded, match=r"used up.*resumed, at no more than"):
            automatic("langevin-quadratic", model, **other)
    step = automatic("langevin-quadratic", model)
    assert charged(budget) == labels
    check_result(dp.release(pm_sample(model, step, cores=1), model), budget)


@pytest.mark.slow
@pytest.mark.parametrize("made", [False, True])
def test_a_release_that_was_charged_and_not_made_is_made_for_its_charge(monkeypatch, made):
    """One value for each charge. What pays for one that was lost is missing for the rest."""
    model, budget = build("logistic")

    def interrupted(query, total, receipt, answer=holders.answer):
        if isinstance(query.sum, VectorSum) and len(charged(budget)) > 6:
            _ = answer(query, total, receipt) if made else total(query)
            raise KeyboardInterrupt
        return answer(query, total, receipt)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(holders, "answer", interrupted)
        automatic("langevin", model)
    *seen, lost = charged(budget)
    assert seen == kept(budget)
    step = automatic("langevin", model)
    labels = charged(budget)
    assert labels[: len(seen) + 1] == [*seen, lost]
    if made:  # another preparation begins
        assert labels[len(seen) + 1] == labels[0]
    else:
        assert labels[len(seen) + 1] != lost
        assert labels == kept(budget)
    idata = pm_sample(model, step, cores=1)
    check_all_spent(budget)
    check_result(dp.release(idata, model), budget)


@pytest.mark.slow
def test_a_preparation_that_can_no_longer_be_paid_begins_again(monkeypatch):
    model, budget = build("logistic")

    def laplace(share: float) -> None:
        dp.laplace(10, share=share, model=model, progressbar=False)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 4)
        laplace(1.0)
    laplace(0.5)  # another preparation, which takes what the first one counts on
    labels = charged(budget)
    laplace(1.0)
    assert charged(budget)[: len(labels) + 1] == [*labels, labels[0]]
    check_all_spent(budget)


@pytest.mark.slow
def test_another_plan_does_not_go_on_with_an_interrupted_preparation(monkeypatch):
    model, budget = build("logistic")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 4)
        automatic("langevin", model)
    labels = charged(budget)
    step = automatic("langevin", model, draws=DRAWS + 1)
    assert charged(budget)[len(labels) :][:1] == labels[:1]
    assert step.plan.draws == DRAWS + 1
    spent_by_entries(budget)


# -- a part of the budget --------------------------------------------------------------------------


def spent_part(budget: dp.PrivacyBudget) -> float:
    return spent_by_entries(budget) / budget.account.read().cap


@pytest.mark.slow
@pytest.mark.parametrize("step_name", ["langevin-anchored", "langevin-quadratic", "hmc"])
def test_a_share_leaves_the_rest(step_name, monkeypatch):
    """Also if the preparation is interrupted, when less than all is left."""
    model, budget = build("logistic")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 4)
        automatic(step_name, model, share=0.6)
    step = automatic(step_name, model, share=0.6)
    safe = dp.release(pm_sample(model, step, cores=1), model)
    assert spent_part(budget) == pytest.approx(0.6, abs=2 * CAP)
    check_result(safe, budget)
    automatic("langevin-quadratic", model)
    check_all_spent(budget)


def test_a_share_of_settings_by_hand():
    model, budget = build("logistic")
    settings = {"draws": 20, "chains": 1, "progressbar": False, "random_seed": 1}
    with model:
        dp.sample(share=0.25, step_kwargs=BY_HAND, **settings)
        assert spent_part(budget) == pytest.approx(0.25, abs=CAP)
        dp.sample(share=0.5, step_kwargs=BY_HAND, **settings)
    assert spent_part(budget) == pytest.approx(0.625, abs=CAP)


def test_a_share_where_there_can_be_none():
    model, budget = build("logistic")
    with model, pytest.raises(ValueError, match=r"share must be in \(0, 1\], got 0"):
        dp.sample(10, share=0.0)
    with model, pytest.raises(ValueError, match="share must be 1 with batches"):
        dp.sample(10, share=0.5, step=dp.DPSGLD, step_kwargs={"batch_size": 50})
    step = automatic("langevin-plain", model, **BY_HAND)
    with model, pytest.raises(ValueError, match="step_kwargs and share are for a step given as"):
        dp.sample(DRAWS, tune=TUNE, chains=CHAINS, share=0.5, step=step)
    with model, pytest.raises(ValueError, match="spends no budget"):
        dp.sample(10, share=0.5, step="PrivacyAwareGibbs")
    with pytest.raises(ValueError, match="share must be in"):
        budget.plan(model, share=1.5)
    whole, half = (budget.plan(model, 10, share=share).noise_sd for share in (1.0, 0.5))
    assert half == pytest.approx(math.sqrt(2.0) * whole, rel=0.05)
    assert budget.spent().gdp_mu2 == 0


# -- small budgets --------------------------------------------------------------------------------


def small(n: int = 200, epsilon: float = 0.5) -> pm.Model:
    rng = np.random.default_rng(5)
    x = np.c_[np.ones(n), rng.normal(size=n)]
    y = (rng.random(n) < 0.5).astype(int)
    with pm.Model() as model:
        beta = pm.Normal("beta", [1.0, -1.0], [0.5, 2.0], shape=2)
        pm.Bernoulli("y", logit_p=x @ beta, observed=y)
        dp.PrivacyBudget(epsilon, DELTA)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("cls", [dp.DPLangevin, dp.DPHMC, dp.DPPenalty])
def test_a_small_budget_is_said_to_be_small(cls):
    model = small()
    with insecure_noise(2), pytest.warns(UserWarning, match="too small for these data"):
        cls(draws=20, chains=1, model=model, progressbar=False)


@pytest.mark.slow
def test_a_small_budget_leaves_the_prior():
    """Means and widths of the prior, and never wider.

    1,600 draws, each about independent of the one before (trajectories of 1.4 prior sds): a mean
    is off by 0.03 prior sds, a width by 2 %.  Tolerances are six times that, a false-alarm rate
    below 1e-7 if noise and proposals were not seeded, as they are.
    """
    model = small()
    with insecure_noise(2), pytest.warns(UserWarning, match="too small for these data"):
        safe = dp.sample(
            400,
            chains=4,
            step_kwargs={"progressbar": False},
            model=model,
            cores=1,
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
        )
    draws = _compat.group(safe, "posterior")["beta"].values.reshape(-1, 2)
    np.testing.assert_allclose((draws.mean(axis=0) - [1.0, -1.0]) / [0.5, 2.0], 0.0, atol=0.2)
    np.testing.assert_allclose(draws.std(axis=0) / [0.5, 2.0], 1.0, atol=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["poisson_groups", "logistic"])
def test_how_far_groups_go_is_looked_at_where_there_are_any(name):
    model, budget = build(name)
    automatic("langevin-anchored", model)
    assert ("changes of groups" in charged(budget)) == (name == "poisson_groups")


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_defaults_as_users_have_them(monkeypatch, epsilon):
    """Functions of the parameters are compiled, too, which other tests interpret."""
    monkeypatch.setattr(functions, "_LARGE_GRAPH", 60)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 2))
    with pm.Model():
        pm.Bernoulli("y", logit_p=x @ pm.Normal("b", shape=2), observed=rng.random(4000) < 0.4)
        budget = dp.PrivacyBudget(epsilon, 1e-6)
        released = dp.sample(50, chains=2, cores=1, progressbar=False)
    assert _compat.group(released, "posterior").sizes["draw"] == 50
    assert budget.spent().epsilon > 0.0
