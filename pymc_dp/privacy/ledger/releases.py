"""Rows of one-off releases: what each was charged, and the values that were released."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pymc_dp.errors import BudgetExceeded, LedgerError
from pymc_dp.privacy.accounting.gdp import epsilon_from_mu, mu_from_units
from pymc_dp.privacy.events import GaussianEvent
from pymc_dp.privacy.ledger.accounts import Account, read_open_account, read_plan, rows_of
from pymc_dp.privacy.ledger.entry import as_stored
from pymc_dp.privacy.ledger.journal import Transaction

PREPARATION = "preparation"
"""What ``payload["kind"]`` of a plan of one-off releases is."""
STATISTIC = "release_statistic"
"""What ``payload["sampler"]`` of a published statistic is."""


class Release(NamedTuple):
    """A one-off release that was charged, made and kept."""

    label: str
    values: dict[str, Any]


def charge(transaction: Transaction, account: int, plan_id: int, event: GaussianEvent) -> int:
    """Append the charge of one release; BudgetExceeded if it would pass the cap."""
    info = read_open_account(transaction, account)
    read_plan(transaction, account, plan_id)
    if _is_finished(transaction, account, plan_id):
        raise LedgerError(
            f"plan {plan_id} of account {account} is finished; record a new plan for new releases"
        )
    if event.cost > info.remaining:
        raise BudgetExceeded(
            f"the release {event.mechanism!r} needs {_in_words(event.cost, info)}, but only "
            f"{_in_words(info.remaining, info)} of the budget remains; no record was read for it"
        )
    transaction.append("charge", account, event.cost, event.to_dict(), plan_id)
    return event.cost


def keep(
    transaction: Transaction,
    account: int,
    plan_id: int,
    label: str,
    values: Mapping[str, Any],
    number: int,
) -> None:
    """Append the values of the release that the newest charge of the plan has paid for."""
    read_plan(transaction, account, plan_id)
    before = transaction.count(*rows_of("release", account, plan_id))
    if before != number:
        raise LedgerError(
            f"plan {plan_id} of account {account} has kept {before} releases, not {number}: two "
            "processes are preparing the same plan. Build the step in one of them"
        )
    paid = transaction.newest(*rows_of("charge", account, plan_id))
    last = transaction.newest(*rows_of("release", account, plan_id))
    unpaid = paid is None or paid.payload["mechanism"] != label
    if unpaid or (paid is not None and last is not None and last.seq > paid.seq):
        raise LedgerError(f"a release {label!r} was to be kept that was not charged")
    transaction.append("release", account, 0, {"label": label, "values": dict(values)}, plan_id)


def kept(transaction: Transaction, account: int, plan_id: int) -> list[Release]:
    """Return the kept releases of a plan, oldest first."""
    condition, values = rows_of("release", account, plan_id)
    rows = transaction.rows(f"{condition} ORDER BY seq", values)
    return [Release(row.payload["label"], row.payload["values"]) for row in rows]


def charged(transaction: Transaction, account: int, plan_id: int) -> int:
    """Return the ledger units that one-off releases of a plan were charged."""
    return sum(row.amount for row in transaction.rows(*rows_of("charge", account, plan_id)))


def unkept(transaction: Transaction, account: int, plan_id: int) -> int:
    """Return the ledger units charged for one-off releases of a plan whose values were not kept."""
    paid, made = ("charge", account, plan_id), ("release", account, plan_id)
    rows = [*transaction.rows(*rows_of(*paid)), *transaction.rows(*rows_of(*made))]
    total, last = 0, 0
    for row in sorted(rows, key=lambda row: row.seq):
        if row.kind == "charge":
            total, last = total + row.amount, row.amount
        else:
            total -= last
    return total


def finish(transaction: Transaction, account: int, plan_id: int) -> None:
    """Append that a plan has made all its releases; harmless when repeated."""
    read_plan(transaction, account, plan_id)
    if not _is_finished(transaction, account, plan_id):
        transaction.append("finish", account, 0, {}, plan_id)


def find_plan(transaction: Transaction, account: int, facts: Mapping[str, Any]) -> int | None:
    """Return the newest plan that agrees with `facts` and was not finished, or None."""
    wanted = as_stored(facts)
    rows = transaction.rows("account = ? AND kind = 'plan' ORDER BY seq DESC", (account,))
    for row in rows:
        agrees = all(key in row.payload and row.payload[key] == wanted[key] for key in wanted)
        if agrees and row.plan is not None and not _is_finished(transaction, account, row.plan):
            return row.plan
    return None


def _is_finished(transaction: Transaction, account: int, plan_id: int) -> bool:
    return transaction.only(*rows_of("finish", account, plan_id)) is not None


def _in_words(units: int, info: Account) -> str:
    epsilon = epsilon_from_mu(mu_from_units(units), info.delta) if units else 0.0
    return f"epsilon = {epsilon:.4g}"
