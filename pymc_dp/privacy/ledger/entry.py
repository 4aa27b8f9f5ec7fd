"""One row of a ledger and its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pymc_dp.errors import LedgerError
from pymc_dp.privacy.events import BATCHES

COLUMNS = "seq, account, plan, kind, amount, balance, payload, previous, hash"
GENESIS = "0" * 64
"""What the first row names as the hash before it."""
SPENDING = ("lease", "return", "charge", BATCHES)
"""Kinds whose amounts make up what an account has spent."""


def _canonical(value: object) -> str:
    """JSON with one spelling per value, so that equal rows have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def as_stored(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a payload as it comes back from the file: tuples as lists, keys as strings."""
    return dict(json.loads(_canonical(dict(payload))))


@dataclass(frozen=True, slots=True)
class Entry:
    """One row. There is no time in it: when a model was sampled is nobody's business.

    - `seq`: 1, 2, 3, … without gaps.
    - `account`: 0 for the row that describes the ledger.
    - `kind`: ``"ledger"``, ``"account"``, ``"batches"`` or ``"close"``; for a run ``"plan"``,
      ``"run"``, ``"chain"``, ``"lease"`` or ``"return"``; for one-off releases ``"plan"``,
      ``"charge"``, ``"release"`` or ``"finish"``.
    - `amount`: ledger units of a lease, a charge or releases on batches; negative for a return, the
      reservation for an account, else 0.
    - `balance`: what the account has spent after this row: the running sum over the kinds in
      `SPENDING`.
    - `payload`: public facts about the row.
    - `previous`, `hash`: SHA-256 in hexadecimal of the row before and of this row (which covers the
      one before).
    """

    seq: int
    account: int
    plan: int | None
    kind: str
    amount: int
    balance: int
    payload: dict[str, Any]
    previous: str
    hash: str

    def expected_hash(self) -> str:
        """SHA-256 over the hash of the row before and everything else in this row."""
        facts = [self.seq, self.account, self.plan, self.kind, self.amount, self.balance]
        text = self.previous + _canonical([*facts, self.payload])
        return hashlib.sha256(text.encode()).hexdigest()


def decode(row: tuple[Any, ...]) -> Entry:
    """Read a row in the order of `COLUMNS`; LedgerError if it is damaged."""
    seq, account, plan, kind, amount, balance, payload, previous, digest = row
    try:
        values = json.loads(payload)
    except (TypeError, ValueError):
        values = None
    whole = all(isinstance(number, int) for number in (seq, account, amount, balance))
    if not (whole and isinstance(values, dict)):  # SQLite stores any type in any column
        raise LedgerError(f"row {seq} of the ledger is damaged: it cannot be read")
    return Entry(seq, account, plan, kind, amount, balance, values, previous, digest)


def encode(entry: Entry) -> tuple[Any, ...]:
    """Return the values of a row in the order of `COLUMNS`."""
    facts = (entry.seq, entry.account, entry.plan, entry.kind, entry.amount, entry.balance)
    return (*facts, _canonical(entry.payload), entry.previous, entry.hash)
