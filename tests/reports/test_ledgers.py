"""The commands for whoever holds a ledger: what they say is what budgets and statements say."""

from __future__ import annotations

import csv
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.__main__ import main
from pymc_dp.privacy.account import STATISTIC
from pymc_dp.privacy.accounting import GaussianEvent, SubsampledGaussianEvent
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.privacy.meter import pay_run
from pymc_dp.privacy.plan import Batches, Plan, make_plan

Y = np.random.default_rng(2).normal(0.5, 1.0, 400)


def budget_on(ledger: Ledger, epsilon: float = 1.0, **options: Any) -> dp.PrivacyBudget:
    with pm.Model():
        pm.Normal("y", pm.Normal("mu", 0.0, 2.0), 1.0, observed=Y)
        return dp.PrivacyBudget(epsilon, 1e-6, ledger=ledger, **options)


def prepare(budget: dp.PrivacyBudget, plan_id: int, sampler: str, releases: int = 1) -> None:
    payload = {"kind": "preparation", "sampler": sampler, "settings": {"name": "sum of ages"}}
    budget.account.record_plan(plan_id, payload)
    for k in range(releases):
        budget.account.charge(plan_id, GaussianEvent(f"release {k}", 20.0))


def run(budget: dp.PrivacyBudget, plan_id: int, **settings: Any) -> Plan:
    """A run of two chains that is authorised."""
    plan = make_plan(
        "DPLangevin",
        draws=100,
        tune=0,
        chains=2,
        per_iteration={"gradient": 4},
        at_start={},
        available=budget.account.read().remaining // 2,
        shares={"gradient": 1.0},
    )
    plan = Plan(**{**vars(plan), "plan_id": plan_id})
    budget.account.record_plan(plan_id, plan.payload(secure=True, **settings))
    budget.account.begin_run(plan_id, max_runs=1, run_cost=plan.run_cost)
    return plan


def finish(budget: dp.PrivacyBudget, plan: Plan, lengths: tuple[int, ...] = (100, 100)) -> None:
    for length in lengths:
        budget.account.begin_chain(plan.plan_id)
        budget.account.lease(plan.plan_id, plan.iteration_cost, length)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "l.sqlite", 3.0, 1e-6, dataset="survey [red] \x1b[2J")


def said(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """What a command prints: on standard output if it succeeds, else as an error."""
    assert main(["ledger", *map(str, arguments)]) == status
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert "\x1b" not in out + err
    return err if status else out


def cells(text: str, title: str) -> list[dict[str, str]]:
    """Lines of a table that was printed in columns."""
    block = text.split(f"\n{title}")[1].split("\n\n")[0].splitlines()[1:]
    starts = [
        k for k, c in enumerate(block[0]) if c != " " and block[0][max(k - 2, 0) : k].isspace()
    ]
    starts = [0, *starts] if 0 not in starts else starts
    ends = [*starts[1:], None]
    rows = [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in block]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


# -- show -----------------------------------------------------------------------------------------


def test_what_is_shown_is_what_budgets_say(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = budget_on(ledger, dataset="wave 1"), budget_on(ledger, 0.5)
    prepare(one, 1, "DPLangevin preparation", 3)
    prepare(two, 2, STATISTIC)
    two.account.finish_plan(2)
    finish(one, run(one, 3))
    between = one.spent().epsilon
    finish(two, run(two, 4))
    text = said(capsys, "show", ledger.path)
    assert '"survey [red] ?[2J", replace_one' in text
    assert ledger.head() in text
    accounts = cells(text, "Accounts")
    for row, budget in zip(accounts, (one, two), strict=True):
        assert row["epsilon"] == f"{budget.epsilon:g}"
        assert row["spent"] == f"{budget.spent().epsilon:.4g}"
        assert row["left"] == f"{budget.remaining().epsilon:.4g}"
        assert (row["unit"], row["relation"], row["state"]) == ("row", "replace_one", "open")
    assert accounts[0]["data"] == "wave 1"
    released = cells(text, "Releases")
    assert [row["what"] for row in released] == [
        "DPLangevin preparation",
        "statistic sum of ages",
        "DPLangevin: 2 chains of 100 draws",
        "DPLangevin: 2 chains of 100 draws",
    ]
    assert [row["releases"] for row in released] == ["3", "1", "800", "800"]
    assert [row["account"] for row in released] == ["1", "2", "1", "2"]
    assert released[2]["account has spent"] == f"{between:.4g}"
    assert released[3]["account has spent"] == f"{two.spent().epsilon:.4g}"
    assert "NOT ENDED" not in text


def test_room_under_the_cap(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Nothing was promised yet." in said(capsys, "show", ledger.path)
    budget_on(ledger)
    text = said(capsys, "show", ledger.path)
    assert "Overall cap: epsilon = 3 at delta = 1e-06." in text
    assert "may release together: epsilon = 1." in text
    free = float(text.split("Free for another account: epsilon = ")[1].split(".\n")[0])
    with pytest.raises(dp.BudgetExceeded):
        budget_on(ledger, 1.01 * free)
    budget_on(ledger, 0.99 * free)


def test_a_ledger_without_a_cap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger.create(tmp_path / "l.sqlite")
    assert "It has no overall cap." in said(capsys, "show", ledger.path)
    for _ in range(2):
        budget = budget_on(ledger)
    text = said(capsys, "show", ledger.path)
    assert "may release together: epsilon = 1.455 at delta = 1e-06" in text
    assert budget.account.read().cap * 2 == ledger.total_reserved()


def test_releases_on_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dp_accounting")
    ledger = Ledger.create(tmp_path / "l.sqlite")
    budget = budget_on(ledger)
    batches = Batches(SubsampledGaussianEvent("gradient", 3.0, 0.1), 50, 10**9)
    budget.account.fix_batches(batches.to_dict())
    text = said(capsys, "show", ledger.path)
    [row] = cells(text, "Releases")
    assert row["what"] == "gradient, Poisson batch (probability 0.1)"
    assert row["releases"] == "50"
    assert row["account has spent"] == f"{budget.spent().epsilon:.4g}"
    assert "Epsilon = 1 may be released. No other account can be opened." in text
    with pytest.raises(dp.LedgerError, match="use a ledger of their own"):
        budget_on(ledger)


def test_a_table_in_a_terminal(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_on(ledger)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["ledger", "show", ledger.path]) == 0
    text = capsys.readouterr().out
    assert "│" in text
    assert "survey [red] ?[2J" in text  # neither markup nor what clears a screen
    assert "\x1b[2J" not in text


# -- what was not ended ---------------------------------------------------------------------------


def unended(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = said(capsys, "show", ledger.path).splitlines()
    return [line for line in lines if line.startswith("NOT ENDED")]


def test_a_run_that_stopped(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    budget = budget_on(ledger)
    finish(budget, run(budget, 1), (50,))
    [line] = unended(ledger, capsys)
    assert "account 1: DPLangevin" in line
    assert "1 of 2 chains were begun, and 25.0% of their cost was charged" in line
    assert "The same call of dp.sample" in line
    budget.account.close()
    assert unended(ledger, capsys) == []


def test_a_preparation_that_stopped(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    budget = budget_on(ledger)
    prepare(budget, 1, "DPLangevin preparation", 2)
    [line] = unended(ledger, capsys)
    assert "Repeat the same call on the same model" in line
    finish(budget, run(budget, 2))  # as after pm.sample, which does not end a preparation
    assert unended(ledger, capsys) == []
    prepare(budget, 3, "laplace preparation")
    assert len(unended(ledger, capsys)) == 1
    budget.account.finish_plan(3)
    assert unended(ledger, capsys) == []


def test_a_statistic_that_was_lost(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(budget_on(ledger), 1, STATISTIC)
    [line] = unended(ledger, capsys)
    assert "statistic sum of ages was charged, and its value was not kept" in line


def test_a_run_of_an_analyst(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    budget = budget_on(ledger)
    pay_run(budget.account, run(budget, 1, model="digest"))
    [line] = unended(ledger, capsys)
    assert "end_runs=True" in line
    budget.account.end_run(1, [])
    assert unended(ledger, capsys) == []


# -- verify, close, export ------------------------------------------------------------------------


def test_a_published_head_is_found(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    head = ledger.head()
    prepare(budget_on(ledger), 1, "DPHMC preparation")
    text = said(capsys, "verify", ledger.path)
    assert "4 rows, none of them altered" in text
    assert ledger.head() in text
    for given in (head, head[:16]):  # as in attributes, and as in the text of a statement
        assert "is among them" in said(capsys, "verify", ledger.path, "--head", given)
    other = head[:15] + ("0" if head[15] != "0" else "1")
    for given in (other, "0" * 64):
        text = said(capsys, "verify", ledger.path, "--head", given, status=1)
        assert "older copy" in text
    for given in (head[:15], head.upper(), "", head + "0"):
        text = said(capsys, "verify", ledger.path, "--head", given, status=1)
        assert "head must be the hash" in text


@pytest.mark.parametrize("action", ["show", "verify", "close"])
def test_an_altered_ledger(ledger: Ledger, capsys: pytest.CaptureFixture[str], action: str) -> None:
    budget_on(ledger)
    with sqlite3.connect(ledger.path) as connection:
        connection.execute("DROP TRIGGER no_update")
        connection.execute("UPDATE entries SET payload = '{}' WHERE seq = 2")
    more = [1, "--yes"] if action == "close" else []
    assert "breaks at row 2" in said(capsys, action, ledger.path, *more, status=1)


def test_an_account_is_closed(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = budget_on(ledger)
    prepare(budget, 1, "DPHMC preparation")
    for answer in ("", "n", "no", EOFError):

        def refuse(prompt: str, answer: Any = answer) -> str:
            if answer is EOFError:
                raise EOFError
            return answer

        monkeypatch.setattr("builtins.input", refuse)
        assert "was not closed" in said(capsys, "close", ledger.path, 1, status=1)
    assert not budget.account.read().closed
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    text = said(capsys, "close", ledger.path, 1)
    assert budget.account.read().closed
    assert "NOT ENDED: DPHMC preparation" in text
    now, then = (
        float(part.split()[0].rstrip("."))
        for part in text.split("room for epsilon = ")[1].split(", and then for ")
    )
    assert now < then < 3.0
    assert f"Free for another account: epsilon = {then:.4g}" in said(capsys, "show", ledger.path)
    assert "is closed already" in said(capsys, "close", ledger.path, 1, "--yes")
    with pytest.raises(dp.LedgerError, match="was closed"):
        budget.account.charge(1, GaussianEvent("more", 20.0))


def test_rows_as_csv(ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(budget_on(ledger, dataset='a "quoted", label'), 1, "DPHMC preparation")
    out = tmp_path / "rows.csv"
    assert said(capsys, "export", ledger.path, "--csv", out) == ""
    assert out.stat().st_mode & 0o077 == 0
    text = out.read_text(encoding="utf-8")
    assert said(capsys, "export", ledger.path) == text
    rows = list(csv.DictReader(text.splitlines()))
    for row, entry in zip(rows, ledger.entries(), strict=True):
        assert json.loads(row["payload"]) == entry.payload
        assert (row["hash"], row["previous"]) == (entry.hash, entry.previous)
        assert row["plan"] == ("" if entry.plan is None else str(entry.plan))
        numbers = tuple(int(row[name]) for name in ("seq", "account", "amount", "balance"))
        assert numbers == (entry.seq, entry.account, entry.amount, entry.balance)
    before = Path(ledger.path).read_bytes()
    for taken in (out, ledger.path, tmp_path / "nowhere" / "rows.csv"):
        assert "cannot be made" in said(capsys, "export", ledger.path, "--csv", taken, status=1)
    assert Path(ledger.path).read_bytes() == before


@pytest.mark.parametrize("action", [["show"], ["verify"], ["close", "1", "--yes"], ["export"]])
def test_what_is_no_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str]
) -> None:
    name, *more = action
    (tmp_path / "text.csv").write_text("a, b\n" * 1000)
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE t (x)")
    for file, words in (
        ("missing", "there is no ledger"),
        (".", "there is no ledger"),
        ("text.csv", "not a ledger"),
        ("other.sqlite", "not a ledger"),
    ):
        assert words in said(capsys, name, tmp_path / file, *more, status=1)


def test_wrong_arguments(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no account number 1" in said(capsys, "close", ledger.path, 1, "--yes", status=1)
    for arguments in (["ledger"], ["ledger", "show"], ["ledger", "close", ledger.path, "one"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
    assert "invalid int value" in capsys.readouterr().err
