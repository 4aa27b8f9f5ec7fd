"""An append-only, hash-chained table of charges in one SQLite file, safe against kill -9.

*Guarantee.* `Journal.transaction` commits all or nothing, before it returns: a process killed at
any moment leaves either the old table or the new one. Two processes never write at the same time.

- A file lock around every transaction: with SQLite's own lock alone, waiting writers starve.
- Rollback journal (``DELETE``) and ``synchronous=EXTRA``: SQLite before 3.51.3 can lose committed
  WAL transactions, and EXTRA also syncs the directory after the journal is deleted, so that a power
  failure cannot bring the journal, and with it the old table, back.
- A connection lives for one transaction: nothing is open in between that a fork could share or a
  pickle could carry. Opening one is cheap beside a commit that reaches the disk. What is written
  all the time, by one process, is not here (:class:`States`).
- No fork happens inside a transaction (`os.register_at_fork`): SQLite keeps its locks in process
  memory, and a child would inherit them while the file is not locked for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import finalize

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from pymc_dp.errors import LedgerError
from pymc_dp.privacy.accounting import BATCHES

SPENDING = ("lease", "return", "charge", BATCHES)
"""Kinds whose amounts make up what an account has spent."""
_COLUMNS = "seq, account, plan, kind, amount, balance, payload, previous, hash"
GENESIS = "0" * 64
"""What the first row names as the hash before it."""
_LOCK_TIMEOUT = 60.0  # seconds; a commit takes well under one, even on a slow disk
_POLL = 0.001  # seconds between two looks at a lock that is taken
_LONGEST_PAUSE = 0.1  # seconds
_PAGE = 1000

_FORK_GUARD = threading.Lock()
os.register_at_fork(
    before=_FORK_GUARD.acquire,
    after_in_parent=_FORK_GUARD.release,
    after_in_child=_FORK_GUARD.release,
)

_SCHEMA = (  # one by one: `executescript` would commit in between
    """CREATE TABLE entries (
        seq INTEGER PRIMARY KEY,
        account INTEGER NOT NULL,
        plan INTEGER,
        kind TEXT NOT NULL,
        amount INTEGER NOT NULL,
        balance INTEGER NOT NULL,
        payload TEXT NOT NULL,
        previous TEXT NOT NULL,
        hash TEXT NOT NULL
    )""",
    "CREATE INDEX by_account ON entries (account)",
    "CREATE INDEX by_kind ON entries (kind, account, plan, amount)",
    """CREATE TRIGGER no_update BEFORE UPDATE ON entries
        BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END""",
    """CREATE TRIGGER no_delete BEFORE DELETE ON entries
        BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END""",
)
_STATES = """CREATE TABLE IF NOT EXISTS states (
        plan TEXT, chain INTEGER, state TEXT NOT NULL, PRIMARY KEY (plan, chain)
    )"""
_PUT = "INSERT OR REPLACE INTO states VALUES (?, ?, ?)"
_ENDED = -1  # in the place of a chain, of a plan that was ended


def canonical(value: object) -> str:
    """JSON with one spelling per value, so that equal rows have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def as_stored(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a payload as it comes back from the file: tuples as lists, keys as strings."""
    return dict(json.loads(canonical(dict(payload))))


@dataclass(frozen=True, slots=True)
class Entry:
    """One row, without a time: when a model was sampled is nobody's business.

    Kinds are ``"ledger"``, ``"account"``, ``"batches"`` and ``"close"``; for a run ``"plan"``,
    ``"run"``, ``"chain"``, ``"lease"`` and ``"return"``; for one-off releases ``"plan"``,
    ``"charge"``, ``"release"`` and ``"finish"``. Amounts are the reservation of an account, or
    ledger units: of a lease or a charge, of releases on batches (less those that they replace),
    negative for what is returned or taken back. Hashes are SHA-256 in hexadecimal.
    """

    seq: int  # 1, 2, 3, … without gaps
    account: int  # 0 for the row that describes the ledger
    plan: int | None
    kind: str
    amount: int
    balance: int  # what the account has spent after this row: a running sum over `SPENDING`
    payload: dict[str, Any]  # public facts
    previous: str  # hash of the row before
    hash: str  # of this row, `previous` included

    def expected_hash(self) -> str:
        """SHA-256 over the hash of the row before and everything else in this row."""
        facts = [self.seq, self.account, self.plan, self.kind, self.amount, self.balance]
        text = self.previous + canonical([*facts, self.payload])
        return hashlib.sha256(text.encode()).hexdigest()


def decode(row: tuple[Any, ...]) -> Entry:
    """Read a row in the order of `_COLUMNS`; LedgerError if it is damaged."""
    seq, account, plan, kind, amount, balance, payload, previous, digest = row
    try:
        values = json.loads(payload)
    except (TypeError, ValueError):
        values = None
    whole = all(isinstance(number, int) for number in (seq, account, amount, balance))
    if not (whole and isinstance(values, dict)):  # SQLite stores any type in any column
        raise LedgerError(f"row {seq} of the ledger is damaged: it cannot be read")
    return Entry(seq, account, plan, kind, amount, balance, values, previous, digest)


class Transaction:
    """Rows read and appended under one lock; see `Journal.transaction`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, *kinds: str, order: str = "seq", **of: int) -> list[Entry]:
        """Return the rows of these kinds, or of all, oldest first. `of` may name an ``account``, a
        ``plan``, and the row ``after`` which they stand.
        """
        condition, values = _condition(kinds, of)
        # With "+", SQLite looks up the kind and then sorts, rather than reading all of an account.
        sign = "+" if kinds else ""
        query = f"SELECT {_COLUMNS} FROM entries WHERE {condition} ORDER BY {sign}{order}"
        return [decode(row) for row in self._connection.execute(query, values)]

    def newest(self, *kinds: str, **of: int) -> Entry | None:
        """Return the last of these rows, or None."""
        found = self.rows(*kinds, order="seq DESC LIMIT 1", **of)
        return found[0] if found else None

    def count(self, *kinds: str, **of: int) -> int:
        """Return the number of these rows."""
        condition, values = _condition(kinds, of)
        query = f"SELECT count(*) FROM entries WHERE {condition}"
        return int(self._connection.execute(query, values).fetchone()[0])

    def total(self, *kinds: str, **of: int) -> int:
        """Return the sum of the amounts of these rows."""
        condition, values = _condition(kinds, of)
        # not added by SQLite, whose 64 bits what was leased and returned in turn may pass
        query = f"SELECT amount FROM entries WHERE {condition}"
        return sum(amount for (amount,) in self._connection.execute(query, values))

    def balance(self, account: int) -> int:
        """Return what an account has spent, in ledger units."""
        newest = self.newest(account=account)
        return newest.balance if newest else 0

    def append(
        self,
        kind: str,
        account: int,
        amount: int,
        payload: Mapping[str, Any],
        plan: int | None = None,
    ) -> Entry:
        """Append a row; it is part of the file once the transaction has ended without an error."""
        head = self.newest()
        balance = self.balance(account) + (amount if kind in SPENDING else 0)
        seq, previous = (head.seq + 1, head.hash) if head else (1, GENESIS)
        entry = Entry(seq, account, plan, kind, amount, balance, as_stored(payload), previous, "")
        entry = replace(entry, hash=entry.expected_hash())
        facts = (seq, account, plan, kind, amount, balance, canonical(entry.payload))
        marks = ", ".join("?" * 9)
        values = (*facts, previous, entry.hash)
        self._connection.execute(f"INSERT INTO entries VALUES ({marks})", values)
        return entry


def _condition(kinds: Sequence[str], of: Mapping[str, int]) -> tuple[str, tuple[object, ...]]:
    """SQL for the rows of some kinds, and its values."""
    parts = [f"kind IN ({', '.join('?' * len(kinds))})"] if kinds else []
    parts += ["seq > ?" if name == "after" else f"{name} = ?" for name in of]
    return " AND ".join(parts) or "TRUE", (*kinds, *of.values())


class Journal:
    """Transactions on one file; holds a path and no handle. ``path + ".lock"`` is the lock.
    `durable`: a commit waits for the disk, to survive a power failure.
    """

    def __init__(self, path: str, durable: bool) -> None:
        self.path = path
        self.durable = durable
        self._contended_at = -math.inf  # when this object last had to wait for the lock

    def create(self, payload: Mapping[str, Any]) -> None:
        """Make the file, readable by its owner only, with a first row of kind ``"ledger"``."""
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            raise LedgerError(
                f"{self.path} exists already; use Ledger.open, or another path"
            ) from None
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be made: {error.strerror}; choose a directory that "
                "exists and can be written, on a disk with room"
            ) from None
        try:
            with self.transaction() as transaction:
                for statement in _SCHEMA:
                    transaction._connection.execute(statement)
                transaction.append("ledger", 0, 0, payload)
        except BaseException:
            Path(self.path).unlink(missing_ok=True)
            raise

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Lock, read, append, commit. An exception inside leaves the file as it was."""
        with _FORK_GUARD, self._lock():
            try:
                with closing(self._connect()) as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    yield Transaction(connection)
                    connection.execute("COMMIT")  # closing without it rolls back
            except sqlite3.Error as error:
                raise LedgerError(_explain(self.path, error)) from error

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Iterate over the rows after a sequence number; the lock is held for a page at a time."""
        while True:
            with self.transaction() as transaction:
                page = transaction.rows(order=f"seq LIMIT {_PAGE}", after=after)
            if not page:
                return
            yield from page
            after = page[-1].seq

    def _connect(self) -> sqlite3.Connection:
        # DELETE: nothing beside the file is part of it between two transactions
        return _connect(self.path, "DELETE", self.durable)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        if not os.path.exists(self.path):  # before a lock is left where it was
            raise LedgerError(
                f"the ledger {self.path} is missing; put it, or its disk, back in its place and "
                "run again"
            )
        lock: BaseFileLock = FileLock(self.path + ".lock", timeout=_LOCK_TIMEOUT)
        waited = False
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                waited = True
                lock.acquire(poll_interval=_POLL)
        except Timeout:
            self._refuse_soft(lock)
            raise LedgerError(
                f"the ledger {self.path} has been locked by another process for "
                f"{_LOCK_TIMEOUT:.0f} seconds; no record was touched"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be locked ({error}); no record was touched. It "
                "needs a directory that can be written, on a local disk with room, whose file "
                "locks work: see to that and run again"
            ) from None
        locked = time.perf_counter()
        if waited:
            self._contended_at = locked
        try:
            self._refuse_soft(lock)
            yield
        finally:
            held = time.perf_counter() - locked
            with suppress(OSError):  # a lock that was lost: what was written is committed or not
                lock.release()
            if locked - self._contended_at < 1.0:
                # Others wait and look only now and then; let two of them go first.
                time.sleep(min(max(1.5 * held, 2 * _POLL), _LONGEST_PAUSE))

    def _refuse_soft(self, lock: BaseFileLock) -> None:
        # where the file system has no locks, filelock uses a file, which a killed process leaves
        if isinstance(lock, SoftFileLock):
            raise LedgerError(
                f"the file system of {self.path} has no file locks (as on some network drives); "
                "put the ledger on a local disk"
            )


class States:
    """Where the chains of plans are, in a file beside a ledger, for the process that answers them.

    It is written at every answer: a write-ahead log waits for the disk once, and a ledger's journal
    four times. `path` is the ledger's; `durable` as there. Plans go by the hash of their row in the
    ledger, so that states of another ledger are nobody's.

    *Guarantee.* `put` commits all or nothing before it returns, and only if no other process went
    on meanwhile, and the file is where it was. A file without its log, which a copy may have lost,
    is refused: the file itself says whether a log has its newest part (``user_version``), wherever
    a process was killed. *Assumptions.* One process at a time, which the owner's lock sees to:
    SQLite before 3.51.3 can lose what two connections commit. *Weaknesses.* An older copy of the
    file is not recognised.
    """

    def __init__(self, path: str, durable: bool) -> None:
        self.path = path + ".states"
        log = self.path + "-wal"
        try:
            with open(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600), "rb") as file:
                self._file = os.fstat(file.fileno())
                logged = any(file.read(64)[60:])
        except OSError as error:
            raise LedgerError(f"{self.path} cannot be used: {error.strerror}") from None
        if logged and not os.path.exists(log):
            raise LedgerError(
                f"{self.path} was copied without {log}, which has its newest part; bring both"
            )
        with self._explained():
            self._connection = _connect(self.path, "WAL", durable)
            # also if nobody closes it: SQLite removes the log then
            self._merge = finalize(self, _merge, self._connection, os.getpid())
            self._connection.execute(_STATES)
            self._connection.execute("PRAGMA user_version=1")
            self._connection.execute("PRAGMA wal_checkpoint(FULL)")

    def of(self, plan: str) -> dict[int, str]:
        """Where the chains of a plan are."""
        query = "SELECT chain, state FROM states WHERE plan = ? AND chain >= 0"
        with self._explained():
            return dict(self._connection.execute(query, (plan,)))

    def put(self, plan: str, before: Mapping[int, str], after: Mapping[int, str]) -> None:
        """Keep where chains are. LedgerError if one is not where it was `before`, the plan was
        ended, or the file was moved: another process may have it.
        """
        marks = ", ".join("?" * (len(after) + 1))
        query = f"SELECT chain, state FROM states WHERE plan = ? AND chain IN ({marks})"
        with self._explained():
            if not (os.path.exists(self.path) and os.path.samestat(os.stat(self.path), self._file)):
                raise LedgerError(f"{self.path} was moved or replaced; stop, and start again")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                kept = dict(self._connection.execute(query, (plan, _ENDED, *after)))
                if _ENDED in kept:
                    raise LedgerError("the plan was ended")
                if kept != {chain: before[chain] for chain in after if chain in before}:
                    raise LedgerError("another process answers for a chain")
                rows = [(plan, chain, state) for chain, state in after.items()]
                self._connection.executemany(_PUT, rows)
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def end(self, plan: str) -> dict[int, str]:
        """Where the chains of a plan are, for good."""
        with self._explained():
            self._connection.execute(_PUT, (plan, _ENDED, ""))
        return self.of(plan)

    def close(self) -> None:
        """Leave one file, which can be moved without others."""
        with self._explained():
            self._merge()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with _FORK_GUARD:
                yield
        except sqlite3.Error as error:
            raise LedgerError(_explain(self.path, error)) from error


def _merge(connection: sqlite3.Connection, process: int) -> None:
    """Close, and leave one file. It says so when it has all that the log has, and not before."""
    if os.getpid() == process:
        with closing(connection):
            connection.execute("PRAGMA wal_checkpoint(FULL)")
            connection.execute("PRAGMA user_version=0")


def _connect(path: str, journal: str, durable: bool) -> sqlite3.Connection:
    # mode=rw: a missing file is an error, not a fresh and empty ledger.
    connection = sqlite3.connect(
        f"{Path(path).as_uri()}?mode=rw",
        uri=True,
        timeout=_LOCK_TIMEOUT,
        isolation_level=None,
        check_same_thread=False,  # one thread at a time
    )
    try:
        connection.execute(f"PRAGMA journal_mode={journal}")
        # With OFF, SQLite does not wait for the disk. What was written before kill -9 survives in
        # the page cache, in order, so only a power failure could undo a commit.
        connection.execute(f"PRAGMA synchronous={'EXTRA' if durable else 'OFF'}")
        connection.execute("PRAGMA fullfsync=ON")  # macOS: fsync alone stops at the drive cache
    except BaseException:
        connection.close()
        raise
    return connection


def _explain(path: str, error: sqlite3.Error) -> str:
    text = str(error)
    if "full" in text or "I/O" in text:  # which of them: that depends on the file system
        reason = (
            f"{text} (the disk is full, a quota is used up, or a drive fails); make room and "
            "run again: releases that were kept are not paid again"
        )
    elif "readonly" in text or "unable to open" in text:
        reason = "it or its directory cannot be written; make that possible and run again"
    elif "locked" in text:
        reason = "another program has it open; close that program"
    elif any(word in text for word in ("not a database", "malformed", "no such", "empty")):
        reason = "it is damaged or not a ledger; restore a copy, or create one elsewhere"
    else:
        reason = text
    return f"the ledger {path} cannot be used: {reason}. No record is read uncharged"
