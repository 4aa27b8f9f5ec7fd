"""Several owners in one process: whose noise and whose budget it is, and what analysts may ask."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import stats

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.owners.analyst import Here, Study
from pymc_dp.owners.messages import unpacked
from pymc_dp.owners.teller import Teller
from pymc_dp.privacy.account import PREPARATION, Account
from pymc_dp.privacy.accounting import GaussianEvent
from pymc_dp.privacy.answer import Query, Receipt
from pymc_dp.privacy.journal import Transaction
from pymc_dp.privacy.queries import ScoreAt
from pymc_dp.tuning.model_parts import ModelParts
from tests.selection import marked

pytestmark = [
    pytest.mark.compiled,
    *(
        pytest.mark.filterwarnings(f"ignore:{words}")
        for words in ("The gradients of this plan", "These data already", "Only 0.0%")
    ),
]

SIZES, EPSILONS = (300, 200, 100), (2.0, 1.0, 4.0)
TRUTH = np.array([0.8, -0.5])


def data(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    return x, (rng.random(n) < 1.0 / (1.0 + np.exp(-x @ TRUTH))).astype(int)


def logistic(n: int, seed: int, prior: float = 2.0, name: str = "b") -> pm.Model:
    x, y = data(n, seed)
    with pm.Model() as model:
        b = pm.Normal(name, 0.0, prior, shape=2)
        pm.Bernoulli("y", logit_p=pm.Data("x", x) @ b, observed=y)
    return model


def owner(k: int, **budget: Any) -> pm.Model:
    model = logistic(SIZES[k], k + 1)
    with model:
        dp.PrivacyBudget(EPSILONS[k], 1e-6, dataset=f"hospital {k + 1}", **budget)
    return model


def analyst(models: list[pm.Model]) -> tuple[pm.Model, Study]:
    model = logistic(40, 99)
    with model:
        found = dp.Owners(models)._study
    return model, found


def by_hand(model: pm.Model, kind: str = "DPLangevin", draws: int = 10, chains: int = 2) -> Any:
    settings: dict[str, Any] = {"scaling": 0.3, "progressbar": False, "model": model}
    if kind == "DPLangevin":
        settings |= {"clip_norm": 1.0, "step_size": 0.2, "n_steps": 2, "energy_clip": 0.5}
    elif kind == "DPHMC":
        settings |= {"clip_norm": 1.0, "step_size": 0.2, "n_steps": 2}
    else:
        settings |= {"clip_norm": 1.0, "step_size": 0.5}
    return getattr(dp, kind)(draws=draws, chains=chains, **settings)


@pytest.fixture
def models() -> list[pm.Model]:
    return [owner(k) for k in range(3)]


# -- budgets and statements -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", marked(["DPLangevin", "DPHMC", "DPPenalty"], slow=["DPHMC", "DPPenalty"])
)
def test_each_owner_pays_from_its_own_ledger(models: list[pm.Model], kind: str) -> None:
    model, _ = analyst(models)
    step = by_hand(model, kind)
    draws = dp.sample(10, chains=2, step=step, model=model, progressbar=False)
    assert _compat.group(draws, "posterior")["b"].shape == (2, 10, 2)
    for k, one in enumerate(models):
        budget = dp.get_budget(one)
        assert budget is not None
        spent = budget.spent().epsilon
        assert 0.999 * EPSILONS[k] < spent <= EPSILONS[k]
        counts: dict[str, int] = {}
        for _, _, event, count in budget.releases():
            counts[event.mechanism] = counts.get(event.mechanism, 0) + count
        plan = step.plan
        expected = {
            name: 20 * plan.per_iteration.get(name, 0) + 2 * plan.at_start.get(name, 0)
            for name in plan.events
        }
        assert counts == expected


def test_the_statement_has_a_paragraph_for_each_owner(models: list[pm.Model]) -> None:
    model, _ = analyst(models)
    released = dp.sample(10, chains=2, step=by_hand(model), model=model, progressbar=False)
    text = dp.privacy_statement(released)
    for k, (n, epsilon) in enumerate(zip(SIZES, EPSILONS, strict=True)):
        [paragraph] = [line for line in text.split("\n") if f"hospital {k + 1}:" in line]
        assert f"({epsilon:g}, 1e-06)-differentially private" in paragraph
        assert f"{n} rows" in paragraph and "everybody else" in paragraph
    facts = json.loads(_compat.attributes(released)["pymc_dp_statement"])
    assert [one["epsilon"] for one in facts["owners"]] == list(EPSILONS)
    assert facts["epsilon"] == max(EPSILONS)


def test_what_is_not_used_comes_back(models: list[pm.Model]) -> None:
    model, owners = analyst(models)
    step = by_hand(model)
    before = [dp.get_budget(one).spent().gdp_mu2 for one in models]
    step.queries.holder.forget()
    step.close()
    after = [dp.get_budget(one).spent().gdp_mu2 for one in models]
    assert min(before) > 0.05
    assert max(after) == 0.0
    with pytest.raises(dp.PrivacyError, match="not agreed, or was ended"):
        ask_kick(owners, step.plan.plan_id, 0, 0)


# -- noise ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_noise_of_owners_adds_up(models: list[pm.Model]) -> None:
    """Mean and variance of many answers; each test fails by chance in one of 10^7 runs."""
    model, _ = analyst(models)
    step = by_hand(model, draws=400, chains=1)
    queries = step.queries
    queries.holder.forget()
    z, sum_ = np.array([0.2, -0.1]), queries._scores
    exact = 0.0
    for one in models:
        parts = ModelParts(one, dp.get_budget(one))
        engine = parts.engine.with_coordinates(step.coordinates)
        vectors = np.concatenate([b for _, b in engine.vectors(engine.scores(z))], axis=1)
        norms = np.linalg.norm(vectors, axis=0)
        exact = exact + (vectors * np.minimum(1.0, 1.0 / norms)).sum(axis=1)
    receipt = Receipt([("gradient", 0.0, 800)])
    found = np.array(
        [queries.holder.answer(Query("gradient", ScoreAt(z), sum_), receipt) for _ in range(800)]
    )
    sd = queries.gradient_noise_sd
    assert sd == pytest.approx(2.0 * math.sqrt(sum(x**2 for x in own_multipliers(models))))
    errors = ((found - exact) / sd).ravel()
    assert abs(errors.mean()) * math.sqrt(errors.size) < 5.4
    squares = (errors**2).sum()
    assert stats.chi2.ppf(5e-8, errors.size) < squares < stats.chi2.isf(5e-8, errors.size)
    assert abs(np.corrcoef(found.T)[0, 1]) * math.sqrt(len(found)) < 5.4


def own_multipliers(models: list[pm.Model]) -> list[float]:
    """Of the gradients of the newest plan of each owner."""
    found = []
    for one in models:
        budget = dp.get_budget(one)
        assert budget is not None
        plans = [e.payload for e in budget.account.entries() if e.kind == "plan"]
        found.append(plans[-1]["events"]["gradient"]["noise_multiplier"])
    return found


@pytest.mark.slow
def test_shares_are_those_of_the_budgets(models: list[pm.Model]) -> None:
    model, _ = analyst(models)
    by_hand(model)
    mu2 = [dp.get_budget(one).spent().gdp_mu2 for one in models]
    squares = [x**2 for x in own_multipliers(models)]
    products = [a * b for a, b in zip(mu2, squares, strict=True)]
    np.testing.assert_allclose(products, products[0], rtol=1e-6)


# -- models that differ ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prior": 2.5}, r"the prior of the same numbers is another"),
        ({"name": "beta"}, r"its parameters are \[\['beta', \[2\]\]\], not \[\['b'"),
    ],
)
def test_another_model_is_refused(
    models: list[pm.Model], changes: dict[str, Any], words: str
) -> None:
    other = logistic(50, 5, **changes)
    with other:
        dp.PrivacyBudget(1.0, 1e-6, dataset="the other")
    with pytest.raises(dp.UnsafeModel, match=f"The model of the other is not yours: {words}"):
        analyst([*models[:2], other])
    assert dp.get_budget(other).spent().epsilon == 0.0


def test_a_likelihood_with_numbers_of_its_own_is_refused(models: list[pm.Model]) -> None:
    x, y = data(80, 7)
    with pm.Model() as other:
        b = pm.Normal("b", 0.0, 2.0, shape=2)
        pm.Bernoulli("y", logit_p=(pm.Data("x", x) - float(x.mean())) @ b, observed=y)
        dp.PrivacyBudget(1.0, 1e-6)
    with pytest.raises(dp.UnsafeModel, match="the likelihood of the same numbers is another"):
        analyst([*models[:2], other])


def test_relations_must_be_the_same(models: list[pm.Model]) -> None:
    other = logistic(50, 5)
    with other:
        dp.PrivacyBudget(1.0, 1e-6, neighboring="add_or_remove_one", n_public=50)
    with pytest.raises(dp.UnsafeModel, match="All must protect the same"):
        analyst([models[0], other])


def test_one_owner_is_not_several(models: list[pm.Model]) -> None:
    with logistic(40, 99), pytest.raises(ValueError, match="two or more"):
        dp.Owners(models[:1])
    model = logistic(40, 99)
    with model, pytest.raises(ValueError, match=r"owners\[1\] must be an address"):
        dp.Owners([models[0], 42])
    with model, pytest.raises(ValueError, match="The owner at hospital needs certificates"):
        dp.Owners([models[0], "hospital"])
    with model, pytest.raises(ValueError, match=r"owners\[1\] is the analyst's model"):
        dp.Owners([models[0], model])


@pytest.mark.parametrize(
    ("step", "settings", "words"),
    [
        ("DPSGLD", {"batch_size": 20}, "not for batches"),
        ("DPPenalty", {"batch_size": 20}, "not for batches"),
        ("ExponentialFamilyPenalty", {}, "sends owners code"),
    ],
)
def test_steps_that_do_not_fit_are_refused(
    models: list[pm.Model], step: str, settings: dict[str, Any], words: str
) -> None:
    model, _ = analyst(models)
    with pytest.raises(ValueError, match=words):
        dp.sample(10, chains=2, step=step, step_kwargs=settings, model=model, progressbar=False)
    assert all(dp.get_budget(one).spent().epsilon == 0.0 for one in models)


# -- hostile analysts -----------------------------------------------------------------------------


def kick(z: float = 0.1, norm: float = 1.0, path: int = 0, **changes: Any) -> dict[str, Any]:
    """A question about a kick, as a message."""
    at = {"is": "reals", "shape": [2], "values": [z, z]}
    of = {"is": "Kick", "path": path, "at": at, "midpoint": at, **changes}
    return {"mechanism": "gradient", "of": of, "sum": {"is": "VectorSum", "norm": norm}}


def ask_kick(owners: Study, plan_id: int, chain: int, number: int, **of: Any) -> Any:
    question = {"chain": chain, "number": number, "query": kick(**of)}
    found = ask(owners.owners[0].channel.teller, plan_id, question)
    if "error" in found:
        raise dp.PrivacyError(found["error"][1])
    return found["answer"]


def call(teller: Teller, method: str, message: Any) -> dict[str, Any]:
    return unpacked(teller.handle(method, json.dumps(message).encode()))


def ask(teller: Teller, plan_id: int, *questions: Any) -> dict[str, Any]:
    reply = call(teller, "ask", {"plan": plan_id, "questions": list(questions)})
    return {"error": reply["error"]} if "error" in reply else reply["found"]["answers"][0]


@pytest.fixture(scope="module")
def teller() -> Teller:
    """An owner with a large budget."""
    model = logistic(SIZES[0], 1)
    with model:
        dp.PrivacyBudget(50.0, 1e-6)
    return Teller(model)


_plans = itertools.count(1000)


@pytest.fixture
def agreed(teller: Teller) -> int:
    """A plan of two chains, of ten iterations with two kicks and an energy error, was agreed."""
    plan_id = next(_plans)
    message = plan_message(
        plan=plan_id,
        draws=10,
        chains=2,
        per_iteration={"gradient": 2, "energy_error": 1},
        noise_multipliers={"gradient": 50.0, "energy_error": 50.0},
    )
    assert call(teller, "agree", message) == {"found": {}}
    return plan_id


@pytest.mark.parametrize(
    "query",
    [
        kick(norm=math.inf),
        kick(norm=math.nan),
        kick(norm=-1.0),
        kick(norm=0.0),
        kick(norm=2.0),
        kick(norm=True),
        kick(z=math.nan),
        kick(z=math.inf),
        kick(path=-1),
        kick(path=0.5),
        kick(at={"is": "reals", "shape": [3], "values": [0.0, 0.0, 0.0]}),
        kick(at={"is": "reals", "shape": [2, 1], "values": [0.0, 0.0]}),
        kick(at={"is": "reals", "shape": [2], "values": ["0.0", None]}),
        kick(at=[0.0, 0.0]),
        kick(code="import os"),
        {**kick(), "mechanism": "energy_error"},
        {**kick(), "mechanism": "statistic"},
        {**kick(), "mechanism": ["gradient"]},
        {**kick(), "sum": {"is": "NormCounts"}},
        {**kick(), "sum": {"is": "IntervalSum", "lower": -1.0, "upper": 1.0}},
        {**kick(), "sum": {"is": "LaplaceSum", "norm": 1.0}},
        {**kick(), "of": {"is": "Statistic", "rows": "lambda x: x"}},
        {**kick(), "of": {"is": "OfBatch", "of": None, "event": None}},
        {**kick(), "of": "ScoreAt"},
        {"mechanism": "gradient"},
        None,
        "gradient",
        [],
    ],
)
def test_questions_that_were_not_agreed_are_refused(
    teller: Teller, agreed: int, query: Any
) -> None:
    before = teller.budget.account.read().spent
    reads = teller.parts.engine.reads
    found = ask(teller, agreed, {"chain": 0, "number": 0, "query": query})
    assert found["error"][0] == "PrivacyError"
    assert "answer" not in found
    assert teller.budget.account.read().spent == before
    assert teller.parts.engine.reads == reads
    # the chain goes on as if nothing had been
    assert "answer" in ask(teller, agreed, {"chain": 0, "number": 0, "query": kick()})


def energy(lower: float, upper: float, kicks: int = 2) -> dict[str, Any]:
    at = {"is": "reals", "shape": [2], "values": [0.1, 0.1]}
    of = {"is": "EnergyError", "path": 0, "kicks": kicks, "start": at, "end": at}
    return {
        "mechanism": "energy_error",
        "of": of,
        "sum": {"is": "IntervalSum", "lower": lower, "upper": upper},
    }


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(0.1, 0.2), (-1.0, -0.5), (-math.inf, 1.0), (0.0, math.nan), (0.0, 0.0), (-1e300, 1e300)],
)
def test_intervals_that_hide_nothing_are_refused(
    teller: Teller, agreed: int, lower: float, upper: float
) -> None:
    for number in range(2):
        ask(teller, agreed, {"chain": 0, "number": number, "query": kick()})
    found = ask(teller, agreed, {"chain": 0, "number": 2, "query": energy(lower, upper)})
    assert "answer" not in found


def test_an_energy_error_needs_all_kicks_of_its_path(teller: Teller, agreed: int) -> None:
    ask(teller, agreed, {"chain": 0, "number": 0, "query": kick()})
    found = ask(teller, agreed, {"chain": 0, "number": 1, "query": energy(-1.0, 1.0)})
    assert "not for all kicks" in found["error"][1]


def test_the_same_question_has_one_answer(teller: Teller, agreed: int) -> None:
    question = {"chain": 1, "number": 0, "query": kick()}
    first = ask(teller, agreed, question)["answer"]
    assert all(ask(teller, agreed, question)["answer"] == first for _ in range(5))
    other = ask(teller, agreed, {**question, "query": kick(z=0.2)})
    assert "in other words, or out of its turn" in other["error"][1]
    for number in (2, 7, -1, 2**60):
        found = ask(teller, agreed, {**question, "number": number})
        assert "answer" not in found
    second = ask(teller, agreed, {**question, "number": 1})["answer"]
    assert second != first
    gone = ask(teller, agreed, question)
    assert "out of its turn" in gone["error"][1]


def test_no_more_than_was_agreed(teller: Teller, agreed: int) -> None:
    answered = 0
    for number in range(100):
        found = ask(teller, agreed, {"chain": 0, "number": number, "query": kick()})
        if "error" in found:
            assert "all the answers that were agreed" in found["error"][1]
            break
        answered += 1
    assert answered == 20  # ten iterations of two kicks
    for chain in (2, -1, 10**9):
        found = ask(teller, agreed, {"chain": chain, "number": 0, "query": kick()})
        assert "answer" not in found


def plan_message(**changes: Any) -> dict[str, Any]:
    at = {
        "is": "Coordinates",
        "location": {"is": "reals", "shape": [2], "values": [0.0, 0.0]},
        "scaling": {"is": "reals", "shape": [2, 2], "values": [1.0, 0.0, 0.0, 1.0]},
    }
    return {
        "plan": 12,
        "kind": "chains",
        "sampler": "DPHMC",
        "draws": 5,
        "tune": 0,
        "chains": 1,
        "per_iteration": {"gradient": 1},
        "at_start": {},
        "noise_multipliers": {"gradient": 50.0},
        "clip_norms": {"gradient": 1.0},
        "engine": {"predictor": True, "effects": False, "tilted": False, "at": at},
        **changes,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_norms": {"gradient": math.inf}},
        {"clip_norms": {"gradient": math.nan}},
        {"clip_norms": {"gradient": 0.0}},
        {"clip_norms": {"gradient": 1e305}},
        {"clip_norms": {}},
        {"noise_multipliers": {"gradient": 0.0}},
        {"noise_multipliers": {"gradient": -1.0}},
        {"noise_multipliers": {"gradient": math.nan}},
        {"noise_multipliers": {"gradient": 1e-30}},
        {"noise_multipliers": {"gradient": 0.1}, "draws": 10**6},  # more than the budget has
        {"draws": 10**7},
        {"draws": 0},
        {"draws": 5.0},
        {"chains": True},
        {"chains": 10**4},
        {"per_iteration": {"gradient": -1}},
        {"per_iteration": {"statistic": 1}},
        {"per_iteration": {}},
        {"per_iteration": {}, "at_start": {"gradient": 1}},
        {"kind": "batches"},
        {"sampler": 1},
        {"sampler": "x" * 10_000},
        {"sampler": "DPHMC\nAgreed: nothing"},
        {"plan": -1},
        {"plan": "12"},
        {"engine": {"predictor": True}},
        {"engine": None},
        {"extra": 1},
    ],
)
def test_plans_that_may_not_be_are_refused(teller: Teller, changes: dict[str, Any]) -> None:
    before = teller.budget.account.read().spent, list(teller.budget.account.entries())
    reply = call(teller, "agree", plan_message(**{"plan": next(_plans), **changes}))
    assert "found" not in reply
    assert (teller.budget.account.read().spent, list(teller.budget.account.entries())) == before
    # and a sound one is agreed to
    assert call(teller, "agree", plan_message(plan=next(_plans))) == {"found": {}}


def test_a_plan_cannot_be_changed_after_it_was_agreed(teller: Teller) -> None:
    plan_id = next(_plans)
    call(teller, "agree", plan_message(plan=plan_id))
    spent = teller.budget.account.read().spent
    assert call(teller, "agree", plan_message(plan=plan_id)) == {"found": {}}
    assert teller.budget.account.read().spent == spent
    reply = call(teller, "agree", plan_message(plan=plan_id, draws=50))
    assert reply["error"][0] == "LedgerError"
    reply = call(teller, "agree", plan_message(plan=plan_id, clip_norms={"gradient": 2.0}))
    assert reply["error"][0] == "LedgerError"
    assert teller.budget.account.read().spent == spent


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000, b'{"a": NaN}', b"\xff\xfe"])
def test_what_is_no_message_is_refused(teller: Teller, data: bytes) -> None:
    assert unpacked(teller.handle("ask", data))["error"][0] == "PrivacyError"
    assert "error" in unpacked(teller.handle("__init__", b"{}"))


def test_errors_do_not_tell_of_records(teller: Teller, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(message: Any) -> None:
        raise ValueError("the record 0.12345 is strange")

    monkeypatch.setitem(teller._methods, "ask", fail)
    reply = teller.handle("ask", b"{}")
    assert b"0.12345" not in reply
    assert b"ValueError" in reply


# -- an owner that is killed ----------------------------------------------------------------------


class Mortal(Here):
    """An owner whose process ends now and then, before it answers or after."""

    def __init__(self, make: Callable[[], Teller], name: str) -> None:
        super().__init__(make(), name)
        self.make, self.calls, self.deaths = make, 0, 0

    def call(self, method: str, data: bytes) -> Callable[[], bytes]:
        self.calls += 1
        if self.calls % 30 == 7:  # the answer was made, and did not arrive
            self.teller.handle(method, data)
        if self.calls % 30 in (7, 19):
            self.deaths += 1
            self.teller.close()
            self.teller = self.make()
        return super().call(method, data)


@pytest.mark.slow
def test_an_owner_that_is_killed_goes_on(tmp_path: Path, models: list[pm.Model]) -> None:
    path = tmp_path / "ledger"
    dp.Ledger.create(path)
    first = owner(0, ledger=path, resume=True)
    model, owners = analyst([first, *models[1:]])

    def again() -> Teller:
        return Teller(first)

    channel = owners.owners[0].channel
    assert isinstance(channel, Here)
    channel.teller.close()
    mortal = Mortal(again, "hospital 1")
    owners.owners[0].channel = mortal
    step = by_hand(model)
    released = dp.sample(10, chains=2, cores=1, step=step, model=model, progressbar=False)
    assert mortal.deaths >= 3
    assert _compat.group(released, "posterior")["b"].shape == (2, 10, 2)
    for k, one in enumerate((first, *models[1:])):
        spent = dp.get_budget(one).spent().epsilon
        assert 0.999 * EPSILONS[k] < spent <= EPSILONS[k]


def test_what_units_gathered_is_gathered_again(tmp_path: Path) -> None:
    """The energy error after a restart is that of an owner that went on, up to its noise."""
    path = tmp_path / "ledger"
    dp.Ledger.create(path)
    model = owner(0, ledger=path, resume=True)
    teller = Teller(model)
    counts = {"gradient": 2, "energy_error": 1}
    message = plan_message(
        per_iteration=counts,
        noise_multipliers={"gradient": 50.0, "energy_error": 50.0},
    )
    assert call(teller, "agree", message) == {"found": {}}
    for number, z in enumerate((0.3, -0.4)):
        ask(teller, 12, {"chain": 0, "number": number, "query": kick(z)})
    teller.close()
    one, two = teller._plan(12), Teller(model)._plan(12)
    query = energy(-1.0, 1.0)
    exact = [plan.begun[0].holder.total(plan.query(query)) for plan in (one, two)]
    assert exact[0] == exact[1] != 0


def test_another_budget_knows_no_chain_of_the_first(tmp_path: Path) -> None:
    """Plans have the numbers that an analyst gives them; a cheap one pays for no dear one."""
    path = tmp_path / "ledger"
    dp.Ledger.create(path)
    first = Teller(owner(0, ledger=path, resume=True))
    cheap = plan_message(per_iteration={"gradient": 100}, noise_multipliers={"gradient": 1e5})
    assert call(first, "agree", cheap) == {"found": {}}
    assert "answer" in ask(first, 12, {"chain": 0, "number": 0, "query": kick()})
    first.close()
    second = Teller(owner(1, ledger=path, resume=True))
    message = plan_message(draws=1, noise_multipliers={"gradient": 100.0})
    assert call(second, "agree", message) == {"found": {}}
    answers = [ask(second, 12, {"chain": 0, "number": k, "query": kick()}) for k in range(5)]
    assert ["answer" in answer for answer in answers] == [True, False, False, False, False]
    second.close()


def test_a_plan_that_is_not_charged_as_a_whole_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    dp.Ledger.create(path)
    teller = Teller(owner(0, ledger=path, resume=True))
    message = plan_message(at_start={"gradient": 1}, noise_multipliers={"gradient": 100.0})

    append, leases = Transaction.append, itertools.count()

    def dies(self: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind == "lease" and next(leases) == 1:  # between the two parts of the charge
            raise KeyboardInterrupt
        return append(self, kind, *args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(Transaction, "append", dies)
        with pytest.raises(KeyboardInterrupt):
            call(teller, "agree", message)
    found = ask(teller, 12, {"chain": 0, "number": 0, "query": kick()})
    assert "not agreed" in found["error"][1]
    assert teller.budget.account.read().spent == 0
    assert call(teller, "agree", message) == {"found": {}}
    assert "answer" in ask(teller, 12, {"chain": 0, "number": 0, "query": kick()})
    teller.close()


def test_a_refusal_costs_the_other_owners_nothing(models: list[pm.Model]) -> None:
    model, owners = analyst(models)
    poor = owners.owners[2].channel
    assert isinstance(poor, Here)
    poor.teller.budget.account.charge(
        _spent_elsewhere(poor.teller), GaussianEvent("elsewhere", 1.5)
    )
    with pytest.raises(dp.BudgetExceeded, match="hospital 3: What remains"):
        by_hand(model)
    for one in models[:2]:
        assert dp.get_budget(one).spent().epsilon == 0.0


def _spent_elsewhere(teller: Teller) -> int:
    payload = {"kind": PREPARATION, "sampler": "own", "settings": {}, "secure": True, "units": 1}
    teller.budget.account.record_plan(5, payload)
    return 5


def test_a_plan_that_was_ended_is_not_agreed_again(teller: Teller) -> None:
    plan_id = next(_plans)
    call(teller, "agree", plan_message(plan=plan_id))
    before = teller.budget.account.read().spent
    assert call(teller, "close", {"plan": plan_id}) == {"found": {}}
    assert teller.budget.account.read().spent < before
    reply = call(teller, "agree", plan_message(plan=plan_id))
    assert "was ended" in reply["error"][1]


def test_another_request_does_not_get_the_kept_release(teller: Teller) -> None:
    plan_id = next(_plans)
    plan = {"plan": plan_id, "kind": "preparation", "sampler": "x", "units": 10**9}
    assert call(teller, "agree", plan) == {"found": {}}
    engine = plan_message()["engine"]
    score = {"is": "Score", "coordinates": engine["at"], "part": None}
    request = {
        "plan": plan_id,
        "number": 0,
        "share": 0.5,
        "query": {"mechanism": "score", "of": score, "sum": {"is": "VectorSum", "norm": 1.0}},
        "engine": engine,
    }
    first = call(teller, "release", request)
    assert len(first["found"]["value"]) == 2
    assert call(teller, "release", request) == first
    other = {**request["query"], "sum": {"is": "VectorSum", "norm": 9.0}}
    assert "Something else" in call(teller, "release", {**request, "query": other})["error"][1]
    tilted = {**request, "number": 1, "engine": {**engine, "tilted": True}}
    spent = teller.budget.account.read().spent
    assert "error" in call(teller, "release", tilted)
    assert "error" in call(teller, "release", {**request, "number": 2})
    assert teller.budget.account.read().spent == spent
    assert "found" in call(teller, "release", {**request, "number": 1})
    # shares are of what was agreed
    assert "error" in call(teller, "release", {**request, "number": 2})


def test_a_persistent_owner_must_resume(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    dp.Ledger.create(path)
    with pytest.raises(dp.UnsafeModel, match="resume=True"):
        Teller(owner(0, ledger=path))


def test_two_processes_do_not_answer_for_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    dp.Ledger.create(path)
    model = owner(0, ledger=path, resume=True)
    first = Teller(model)
    with pytest.raises(dp.PrivacyError, match="Another process answers for this owner"):
        Teller(model)
    first.close()
    Teller(model).close()


def test_an_owner_that_starts_again_has_no_second_budget(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = dp.Ledger.create(path)
    first = dp.get_budget(owner(0, ledger=path, resume=True))
    again = dp.get_budget(owner(0, ledger=path, resume=True))
    assert first.account.number == again.account.number
    assert ledger.total_reserved() == first.account.read().cap
    # another promise, or as usual, is another budget
    assert dp.get_budget(owner(1, ledger=path, resume=True)).account.number == 2
    assert dp.get_budget(owner(0, ledger=path)).account.number == 3
    first.account.close()
    assert dp.get_budget(owner(0, ledger=path, resume=True)).account.number == 4


def test_an_answer_that_could_not_be_kept_is_not_given(
    teller: Teller, agreed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {"chain": 0, "number": 0, "query": kick()}

    def full(*args: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as context:
        context.setattr(Account, "keep_states", full)
        assert "answer" not in ask(teller, agreed, question)
        assert "answer" not in ask(teller, agreed, question)
        assert "answer" not in ask(teller, agreed, {**question, "number": 1})
    first = ask(teller, agreed, question)
    assert first.keys() == {"answer"} or "out of its turn" in first["error"][1]
    [state] = teller.budget.account.states(agreed).values()
    assert state["answer"]
