"""What an owner's server says to hostile analysts, and after it was killed."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.owners.analyst import Here, _error_of
from pymc_dp.owners.messages import unpacked
from pymc_dp.owners.teller import Teller
from pymc_dp.privacy.account import PREPARATION, Account
from pymc_dp.privacy.accounting import GaussianEvent
from pymc_dp.privacy.journal import States, Transaction
from pymc_dp.privacy.plan import Plan
from tests.owners.common import (
    EPSILONS,
    MARKS,
    SIZES,
    analyst,
    ask,
    by_hand,
    call,
    energy,
    kick,
    logistic,
    owner,
    plan_message,
)

pytestmark = MARKS

# -- hostile analysts -----------------------------------------------------------------------------


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
        question = {"chain": 0, "number": number, "query": kick(path=number // 2)}
        found = ask(teller, agreed, question)
        if "error" in found:
            assert "all the answers that were agreed" in found["error"][1]
            break
        answered += 1
    assert answered == 20  # ten iterations of two kicks
    for chain in (2, -1, 10**9):
        found = ask(teller, agreed, {"chain": chain, "number": 0, "query": kick()})
        assert "answer" not in found


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


def on_a_file(folder: Path) -> pm.Model:
    """An owner whose ledger is a file."""
    path = folder / "ledger"
    dp.Ledger.create(path)
    return owner(0, ledger=path, resume=True)


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
    model = on_a_file(tmp_path)
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
    exact = [plan.chain(0).holder.total(plan.query(query)) for plan in (one, two)]
    assert exact[0] == exact[1] != 0


def test_another_budget_knows_no_chain_of_the_first(tmp_path: Path) -> None:
    """Plans have the numbers that an analyst gives them; a cheap one pays for no dear one."""
    path = tmp_path / "ledger"
    dp.Ledger.create(path, 10.0, 1e-6)
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
    model = on_a_file(tmp_path)
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
        context.setattr(States, "put", full)
        assert "answer" not in ask(teller, agreed, question)
        assert "answer" not in ask(teller, agreed, question)
        assert "answer" not in ask(teller, agreed, {**question, "number": 1})
    first = ask(teller, agreed, question)
    assert first.keys() == {"answer"} or "out of its turn" in first["error"][1]
    [state] = teller.where(agreed)[2].values()
    assert json.loads(state)["answer"]


# -- two that answer for one owner, and runs that nobody ended ------------------------------------


def unlocked(model: pm.Model, monkeypatch: pytest.MonkeyPatch) -> Teller:
    """A teller beside another one, as if somebody had removed the lock."""
    with monkeypatch.context() as context:
        context.setattr("pymc_dp.owners.teller.FileLock", Mock())
        return Teller(model)


def test_a_charge_has_one_answer_without_the_lock_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_a_file(tmp_path)
    one, two = Teller(model), unlocked(model, monkeypatch)
    message = plan_message(chains=2, noise_multipliers={"gradient": 100.0})
    for teller in (one, two):
        assert call(teller, "agree", message) == {"found": {}}
        teller._plan(12)  # where chains are is read now
    first = {"chain": 0, "number": 0, "query": kick()}
    assert "answer" in ask(one, 12, first)
    for _ in range(2):
        assert ask(two, 12, first)["error"][0] == "LedgerError"
    other = {**first, "chain": 1}
    assert "answer" in ask(one, 12, other)
    assert call(one, "close", {"plan": 12}) == {"found": {}}
    third = unlocked(model, monkeypatch)
    assert "was ended" in ask(third, 12, {**other, "number": 1})["error"][1]
    assert "error" in ask(two, 12, {**other, "number": 0})


def test_chains_that_began_are_not_answered_without_their_states(tmp_path: Path) -> None:
    model = on_a_file(tmp_path)
    first = Teller(model)
    assert call(first, "agree", plan_message()) == {"found": {}}
    question = {"chain": 0, "number": 0, "query": kick()}
    assert "answer" in ask(first, 12, question)
    spent = first.budget.account.read().spent
    first.close()
    (tmp_path / "ledger.states").rename(tmp_path / "away")
    second = Teller(model)
    for method, message in (
        ("ask", {"plan": 12, "questions": [question]}),
        ("close", {"plan": 12}),  # nobody knows what is unused
        ("end_all", {}),
    ):
        assert call(second, method, message)["error"][0] == "LedgerError"
    assert second.budget.account.read().spent == spent
    second.close()
    (tmp_path / "away").rename(tmp_path / "ledger.states")
    third = Teller(model)
    assert ask(third, 12, question) == first._plan(12).ask([question])[0]


def test_a_chain_is_not_answered_before_the_ledger_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_a_file(tmp_path)
    first = Teller(model)
    assert call(first, "agree", plan_message()) == {"found": {}}
    question = {"chain": 0, "number": 0, "query": kick()}

    def dies(*args: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as context:
        context.setattr(Account, "begin_chains", dies)
        assert "answer" not in ask(first, 12, question)
    first.close()  # the state was kept
    second = Teller(model)
    assert "answer" in ask(second, 12, question)
    second.close()
    (tmp_path / "ledger.states").unlink()
    third = Teller(model)
    assert ask(third, 12, question)["error"][0] == "LedgerError"
    assert call(third, "close", {"plan": 12})["error"][0] == "LedgerError"


def test_who_has_closed_answers_no_more(teller: Teller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teller, "closed", True)
    assert "not the process that answers" in call(teller, "describe", {})["error"][1]


def test_chains_that_were_put_aside_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymc_dp.owners.teller._CHAINS", 1)
    teller = Teller(owner(0))
    counts = {"gradient": 2, "energy_error": 1}
    noise = {"gradient": 50.0, "energy_error": 50.0}
    message = plan_message(chains=3, per_iteration=counts, noise_multipliers=noise)
    assert call(teller, "agree", message) == {"found": {}}
    for number, z in enumerate((0.3, -0.4)):
        for chain in range(3):
            question = {"chain": chain, "number": number, "query": kick(z)}
            assert "answer" in ask(teller, 12, question)
    plan = teller._plan(12)
    exact = [plan.chain(k).holder.total(plan.query(energy(-1.0, 1.0))) for k in range(3)]
    assert exact[0] == exact[1] == exact[2] != 0


def test_a_path_has_no_more_kicks_than_an_iteration(teller: Teller, agreed: int) -> None:
    found = [
        ask(teller, agreed, {"chain": 0, "number": number, "query": kick()}) for number in range(3)
    ]
    assert ["answer" in each for each in found] == [True, True, False]
    assert "no more kicks" in found[2]["error"][1]


def test_nothing_of_a_run_of_the_owner_itself_is_returned(teller: Teller, agreed: int) -> None:
    account, plan_id = teller.budget.account, next(_plans)
    account.record_plan(plan_id, account.plan(agreed))
    account.begin_run(plan_id, max_runs=1, run_cost=0)
    account.begin_chain(plan_id)
    assert account.lease(plan_id, Plan.of(plan_id, account.plan(agreed)).iteration_cost, 20) == 20
    charged = account.charged(plan_id)
    assert call(teller, "close", {"plan": plan_id})["error"][0] == "LedgerError"
    assert call(teller, "end_all", {}) == {"found": {}}
    assert account.charged(plan_id) == charged
    assert account.charged(agreed) == 0


@pytest.mark.slow
def test_runs_of_a_process_that_was_killed_are_ended(models: list[pm.Model]) -> None:
    model, _ = analyst(models)
    by_hand(model)  # agreed and charged, and nobody asks
    again = logistic(40, 99)
    with again:
        with pytest.raises(
            dp.BudgetExceeded, match=r"hospital \d.* 1 of its runs .* end_runs=True"
        ):
            dp.Owners(models)
        dp.Owners(models, end_runs=True)
    assert all(dp.get_budget(one).spent().epsilon == 0.0 for one in models)
    step = by_hand(again)
    found = dp.sample(10, chains=2, step=step, model=again, progressbar=False)
    assert _compat.group(found, "posterior")["b"].shape == (2, 10, 2)


def test_a_run_is_ended_by_who_serves_another_model(tmp_path: Path) -> None:
    model = on_a_file(tmp_path)
    first = Teller(model)
    assert call(first, "agree", plan_message()) == {"found": {}}
    first.close()
    second = Teller(model, "another file")
    assert (
        "another model" in ask(second, 12, {"chain": 0, "number": 0, "query": kick()})["error"][1]
    )
    assert call(second, "close", {"plan": 12}) == {"found": {}}
    assert second.budget.account.read().spent == 0


def test_what_was_asked_for_is_not_returned(teller: Teller, agreed: int) -> None:
    spent = teller.budget.account.read().spent
    for number in range(2):
        ask(teller, agreed, {"chain": 0, "number": number, "query": kick()})
    plan = teller._plan(agreed).plan
    assert call(teller, "close", {"plan": agreed}) == {"found": {}}
    returned = spent - teller.budget.account.read().spent
    assert returned == plan.iteration_cost * (2 * 10 - 1) + plan.start_cost


def test_owners_tell_no_other_errors_than_ours() -> None:
    for name in ("annotations", "math", "", "PrivacyError"):
        assert type(_error_of("one", [name, "text"])) is dp.PrivacyError
    assert type(_error_of("one", ["BudgetExceeded", "text"])) is dp.BudgetExceeded
