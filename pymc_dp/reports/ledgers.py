"""A ledger for its steward: shown in words and tables, verified, exported, an account closed."""

from __future__ import annotations

import csv
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pymc_dp.base.checks import counted
from pymc_dp.privacy.account import PREPARATION, STATISTIC, Account, epsilon_of
from pymc_dp.privacy.accounting import BATCHES, batch_event
from pymc_dp.privacy.journal import Entry, canonical
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.privacy.plan import Plan

_ACCOUNTS = ("account", "data", "unit", "relation", "epsilon", "delta", "spent", "left", "state")
_RELEASES = ("rows", "account", "what", "releases", "account has spent")
_COLUMNS = ("seq", "account", "plan", "kind", "amount", "balance", "payload", "previous", "hash")


def show(path: Path) -> None:
    """Print what was promised, spent and released, oldest first, and what was not ended."""
    ledger, accounts = _opened(path)
    label = f'"{ledger.dataset}", ' if ledger.dataset else ""
    _say(f"Ledger {ledger.path}: {label}{ledger.neighboring}. Its head is {ledger.head()}.")
    _say(_cap(ledger, accounts))
    if not accounts:
        return _say("Nothing was promised yet.")
    _print_table("Accounts, one for each budget", _ACCOUNTS, map(_row_of, accounts))
    released = sorted(row for account in accounts for row in _released(account))
    title = "Releases, in the order of the ledger, which has no times"
    _print_table(title, _RELEASES, [line for _, line in released])
    waiting = [(a.number, text) for a in accounts if not a.read().closed for text in _unended(a)]
    for number, text in waiting:
        print()
        _say(f"NOT ENDED, account {number}: {text}")
    if waiting:
        _say(
            "If nobody goes on with an account, `pymc_dp ledger close` ends it, and the cap has "
            "room for what it has not spent."
        )


def verify(path: Path, head: str | None = None) -> None:
    """Walk the chain of hashes, and print how many rows it has; LedgerError if it is broken."""
    ledger = Ledger.open(path)
    _say(f"{ledger.verify(head)} rows, none of them altered. The head is {ledger.head()}.")
    if head is not None:
        _say("The head that was given is among them: the ledger goes on from what was published.")


def close(path: Path, number: int, yes: bool = False) -> None:
    """Close an account, once it is confirmed."""
    ledger, _ = _opened(path)
    account = Account(ledger, number)
    info = account.read()
    if info.closed:
        return _say(f"Account {number} is closed already.")
    _print_table("To be closed", _ACCOUNTS, [_row_of(account)])
    for text in _unended(account):
        _say(f"NOT ENDED: {text}")
    if ledger.total_cap is not None:
        free = ledger.total_cap - ledger.total_reserved()
        now, then = (epsilon_of(ledger, units) for units in (free, free + info.remaining))
        _say(f"The cap has room for epsilon = {now:.4g}, and then for {then:.4g}.")
    _say("Nothing can be charged to it any more, and a run that is under way stops.")
    if not yes:
        try:
            answer = input("Close it? This cannot be undone. [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            raise ValueError("The account was not closed. Answer y, or give --yes.")
    account.close()
    _say(f"Account {number} is closed.")


def export(path: Path, out: Path | None = None) -> None:
    """Write all rows as CSV, to a new file or to standard output."""
    entries = Ledger.open(path).entries()
    with nullcontext(sys.stdout) if out is None else _new_file(out) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for entry in entries:
            values = {name: getattr(entry, name) for name in _COLUMNS}
            writer.writerow({**values, "payload": canonical(entry.payload)}.values())


def _new_file(path: Path) -> Any:
    """A file that only its owner can read, like the ledger."""
    try:
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        raise ValueError(f"{path} cannot be made: {error.strerror}. Name a new file.") from None
    return open(made, "w", encoding="utf-8")


def _opened(path: Path) -> tuple[Ledger, list[Account]]:
    """A ledger that was not altered, and its accounts."""
    ledger = Ledger.open(path)
    ledger.verify()
    return ledger, [Account(ledger, e.account) for e in ledger.entries() if e.kind == "account"]


def _cap(ledger: Ledger, accounts: Sequence[Account]) -> str:
    """What all accounts together may release, and the room that the cap has for others."""
    infos = [account.read() for account in accounts]
    if any(account.batches() for account in accounts):  # only one, whose figure has no other
        return f"Epsilon = {infos[0].epsilon:g} may be released. No other account can be opened."
    # epsilon holds at the smallest delta of several
    promise: Any = ledger if ledger.delta else min(infos, key=lambda x: x.delta, default=None)
    if promise is None:
        return "It has no overall cap."
    reserved = ledger.total_reserved()
    said = f"Its accounts may release together: epsilon = {epsilon_of(promise, reserved):.4g}"
    if ledger.total_cap is None:
        return f"It has no overall cap. {said} at delta = {promise.delta:g}."
    free = epsilon_of(ledger, ledger.total_cap - reserved)
    return (
        f"Overall cap: epsilon = {ledger.epsilon:g} at delta = {ledger.delta:g}. {said}. Free for "
        f"another account: epsilon = {free:.4g}."
    )


def _row_of(account: Account) -> list[str]:
    """A line about an account."""
    info = account.read()
    data = info.public.get("statistic") or info.public.get("dataset") or account.ledger.dataset
    spent, left = (x.epsilon for x in (account.spent(), account.remaining()))
    promised = f"{info.epsilon:g}", f"{info.delta:g}", f"{spent:.4g}", f"{left:.4g}"
    state = "closed" if info.closed else "open"
    return [str(account.number), data or "-", info.unit or "-", info.neighboring, *promised, state]


def _released(account: Account) -> Iterator[tuple[int, list[str]]]:
    """For each plan, the row of its last charge, and a line about it."""
    info, batches = account.read(), account.batches()
    found: dict[int | None, tuple[int, Entry, str, int]] = {}
    for entry, plan, counts in account.charges():
        first, _, what, number = found.get(entry.plan, (entry.seq, entry, _name(plan), 0))
        found[entry.plan] = first, entry, what, number + sum(counts.values())
    if batches:
        *_, fixed = (entry for entry in account.entries() if entry.kind == BATCHES)
        event = batch_event(batches["event"])
        what = f"{event.mechanism}, {event.batch}"
        found[None] = fixed.seq, fixed, what, batches["releases"]
    for first, entry, what, number in found.values():
        beside = entry.balance - (batches["reserved"] if batches else 0)
        epsilon = epsilon_of(info, beside, batches)
        rows = f"{first}-{entry.seq}" if first < entry.seq else str(first)
        yield entry.seq, [rows, str(account.number), what, f"{number:,}", f"{epsilon:.4g}"]


def _name(plan: dict[str, Any]) -> str:
    """What a plan is about."""
    if plan["sampler"] == STATISTIC:
        return f"statistic {plan['settings']['name']}"
    chains = (
        f": {counted(plan['chains'], 'chain')} of {plan['draws']} draws" if "chains" in plan else ""
    )
    return f"{plan['sampler']}{chains}"


def _unended(account: Account) -> Iterator[str]:
    """What was paid for and not ended, and what to do about it."""
    entries = list(account.entries())
    count = Counter((entry.kind, entry.plan) for entry in entries)
    newest = max((entry.seq for entry in entries if entry.kind == "run"), default=0)
    for entry in entries:
        number, payload = entry.plan, entry.payload
        if entry.kind != "plan" or number is None or count["finish", number]:
            continue
        charged, runs = account.charged(number), count["run", number]
        if payload.get("kind") == PREPARATION:
            if charged and payload["sampler"] == STATISTIC:
                yield f"{_name(payload)} was charged, and its value was not kept. It is lost."
            elif charged and entry.seq > newest:  # chains that were begun later have used it
                yield (
                    f"{_name(payload)}. Repeat the same call on the same model, in another process "
                    "on the model that was pickled before: what was released is not paid again."
                )
        elif runs and "model" in payload["settings"]:
            yield (
                f"{_name(payload)}, agreed with an analyst and charged as a whole. If no run is "
                "under way, dp.Owners(..., end_runs=True) ends it, and what it did not use comes "
                "back. Closing the account does not bring it back."
            )
        elif runs:
            plan = Plan.of(number, payload)
            begun, chains = count["chain", number], runs * plan.chains
            part = charged / (runs * plan.run_cost) if plan.run_cost else 1.0
            if begun < chains or part < 1.0:
                yield (
                    f"{_name(payload)}. It is under way, or was stopped: {begun} of {chains} "
                    f"chains were begun, and {part:.1%} of their cost was charged, which stays "
                    "so. The same call of dp.sample uses the preparation again, and the rest."
                )


def _printable(text: str) -> str:
    """Without characters that steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _say(text: str) -> None:
    print(_printable(text))


def _print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in a terminal, and aligned columns elsewhere."""
    cells = [[_printable(cell) for cell in row] for row in rows]
    console = Console()
    if console.is_terminal:
        table = Table(*head, title=title, title_justify="left")
        for row in cells:
            table.add_row(*map(Text, row))
        return console.print(table)
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    print(f"\n{title}")
    for row in ([*head], *cells):
        print("  ".join(map(str.ljust, row, widths)).rstrip())
