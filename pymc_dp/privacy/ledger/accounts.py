"""The state of accounts and plans, read within one transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pymc_dp.errors import LedgerError
from pymc_dp.privacy.events import BATCHES
from pymc_dp.privacy.ledger.entry import Entry
from pymc_dp.privacy.ledger.journal import Transaction


@dataclass(frozen=True, slots=True)
class Account:
    """The account of one privacy budget, as it stood when it was read.

    `cap` and `spent` count ledger units, 2^-40 of squared mu. Once the account is `closed`, the
    unspent part of the reservation is released and `cap` is what was spent. The owner stated all
    the rest; `unit` is what one privacy unit is, in words.
    """

    number: int
    cap: int
    spent: int
    closed: bool
    epsilon: float
    delta: float
    neighboring: str
    unit: str | None
    public: dict[str, Any]

    @property
    def remaining(self) -> int:
        """Ledger units that may still be charged."""
        return self.cap - self.spent


def rows_of(kind: str, account: int, plan_id: int) -> tuple[str, tuple[object, ...]]:
    """Return the SQL condition, and its values, of one plan's rows of a kind."""
    return f"account = ? AND kind = '{kind}' AND plan = ?", (account, plan_id)


def read_account(transaction: Transaction, account: int) -> Account:
    """Return the state of an account; LedgerError if there is none of that number."""
    row = transaction.only("account = ? AND kind = 'account'", (account,))
    if row is None:
        raise LedgerError(f"this ledger has no account number {account}")
    spent = transaction.balance(account)
    closed = transaction.only("account = ? AND kind = 'close'", (account,)) is not None
    facts = row.payload
    return Account(
        number=account,
        cap=spent if closed else row.amount,
        spent=spent,
        closed=closed,
        epsilon=facts["epsilon"],
        delta=facts["delta"],
        neighboring=facts["neighboring"],
        unit=facts["unit"],
        public=facts["public"],
    )


def read_open_account(transaction: Transaction, account: int) -> Account:
    """Return the state of an account; LedgerError if it was closed."""
    info = read_account(transaction, account)
    if info.closed:
        raise LedgerError(f"account {account} of this ledger was closed; make a new budget")
    return info


def read_plan(transaction: Transaction, account: int, plan_id: int) -> Entry:
    """Return the row of a plan; LedgerError if there is none of that number."""
    entry = transaction.only(*rows_of("plan", account, plan_id))
    if entry is None:
        raise LedgerError(f"account {account} of this ledger has no plan number {plan_id}")
    return entry


def read_batches(transaction: Transaction, account: int) -> dict[str, Any]:
    """Return the releases on batches that were fixed for an account; empty if there are none."""
    entry = transaction.newest(f"account = ? AND kind = '{BATCHES}'", (account,))
    return entry.payload if entry else {}


def begun_on_batches(transaction: Transaction, account: int) -> int | None:
    """Return the plan whose chains make the releases on batches, or None if none has begun.

    They are charged once, for the chains of one run.
    """
    runs = transaction.rows("account = ? AND kind = 'run'", (account,))
    for plan in {run.plan for run in runs if run.payload.get("batches")}:
        if plan is not None and transaction.count(*rows_of("chain", account, plan)):
            return plan
    return None


def chains_begun(transaction: Transaction, account: int, plan_id: int, run: Entry) -> int:
    """Return how many chains of the newest run of a plan have begun."""
    condition, values = rows_of("chain", account, plan_id)
    return transaction.count(f"{condition} AND seq > ?", (*values, run.seq))


def unbegun_run(transaction: Transaction, account: int, plan_id: int) -> Entry | None:
    """Return the newest run of a plan, if none of its chains has begun."""
    run = transaction.newest(*rows_of("run", account, plan_id))
    if run is None:
        return None
    return None if chains_begun(transaction, account, plan_id, run) else run


def reserved(transaction: Transaction) -> int:
    """Return the sum of the caps of all accounts, in ledger units."""
    numbers = [row.account for row in transaction.rows("kind = 'account'")]
    return sum(read_account(transaction, number).cap for number in numbers)
