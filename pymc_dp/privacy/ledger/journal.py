"""An append-only, hash-chained table of charges in one SQLite file, safe against kill -9.

Guarantee
---------
`Journal.transaction` commits before it returns, and all of it or nothing: a process killed at any
moment leaves either the old table or the new one. Two processes never write at the same time.

How
---
- A file lock around every transaction. SQLite's own lock alone lets writers starve: waiting ones
  sleep, and the one that has just finished takes the lock again (155, 38, 1 and 1 commits of four
  writers were seen).
- Rollback journal (``DELETE``) and ``synchronous=EXTRA``: SQLite before 3.51.3 can lose committed
  WAL transactions, and EXTRA also syncs the directory after the journal is deleted, so that a power
  failure cannot bring the journal, and with it the old table, back.
- A connection lives for one transaction. Nothing is open in between that a fork could share or a
  pickle could carry, and opening one is cheap beside a commit that reaches the disk.
- No fork happens inside a transaction (`os.register_at_fork`): SQLite keeps its locks in process
  memory, and a child would inherit them while the file is not locked for it.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from pymc_dp.errors import LedgerError
from pymc_dp.privacy.ledger.entry import (
    COLUMNS,
    GENESIS,
    SPENDING,
    Entry,
    as_stored,
    decode,
    encode,
)

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

_SCHEMA = """
CREATE TABLE entries (
    seq INTEGER PRIMARY KEY,
    account INTEGER NOT NULL,
    plan INTEGER,
    kind TEXT NOT NULL,
    amount INTEGER NOT NULL,
    balance INTEGER NOT NULL,
    payload TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL
);
CREATE INDEX by_account ON entries (account);
CREATE INDEX by_kind ON entries (kind, account, plan, amount);
CREATE TRIGGER no_update BEFORE UPDATE ON entries
    BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END;
CREATE TRIGGER no_delete BEFORE DELETE ON entries
    BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END;
"""


class Transaction:
    """Rows read and appended under one lock; see `Journal.transaction`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, condition: str, values: tuple[object, ...] = ()) -> list[Entry]:
        """Return the rows for which an SQL condition holds (it may end in ORDER BY or LIMIT)."""
        query = f"SELECT {COLUMNS} FROM entries WHERE {condition}"
        return [decode(row) for row in self._connection.execute(query, values)]

    def only(self, condition: str, values: tuple[object, ...] = ()) -> Entry | None:
        """Return the row for which an SQL condition holds, where at most one can."""
        found = self.rows(condition, values)
        return found[0] if found else None

    def newest(self, condition: str = "TRUE", values: tuple[object, ...] = ()) -> Entry | None:
        """Return the newest row for which an SQL condition holds."""
        found = self.rows(f"{condition} ORDER BY seq DESC LIMIT 1", values)
        return found[0] if found else None

    def count(self, condition: str, values: tuple[object, ...]) -> int:
        """Return the number of rows for which an SQL condition holds."""
        query = f"SELECT count(*) FROM entries WHERE {condition}"
        return int(self._connection.execute(query, values).fetchone()[0])

    def charged(self, account: int, plan: int) -> int:
        """Return the sum of leases and returns of one plan, in ledger units."""
        query = (
            "SELECT amount FROM entries "
            "WHERE account = ? AND kind IN ('lease', 'return') AND plan = ?"
        )
        # not added by SQLite, whose 64 bits what was leased and returned in turn may pass
        return sum(amount for (amount,) in self._connection.execute(query, (account, plan)))

    def balance(self, account: int) -> int:
        """Return what an account has spent, in ledger units."""
        newest = self.newest("account = ?", (account,))
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
        marks = ", ".join("?" * 9)
        self._connection.execute(f"INSERT INTO entries VALUES ({marks})", encode(entry))
        return entry


class Journal:
    """Transactions on one file; holds a path and no handle, so it may be pickled and forked.

    `path` is absolute, and ``path + ".lock"`` is the lock beside it. `durable` says whether a
    commit must survive a power failure, and so waits for the disk.
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
                for statement in _statements(_SCHEMA):
                    transaction._connection.execute(statement)
                transaction.append("ledger", 0, 0, payload)
        except BaseException:
            Path(self.path).unlink(missing_ok=True)
            raise

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Lock, read, append, commit. An exception inside leaves the file as it was.

        LedgerError if the file cannot be locked, read or written.
        """
        with _FORK_GUARD, self._lock():
            try:
                with closing(self._connect()) as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    yield Transaction(connection)
                    connection.execute("COMMIT")  # closing without it rolls back
            except sqlite3.Error as error:
                raise LedgerError(self._explain(error)) from error

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Iterate over the rows after a sequence number; the lock is held for a page at a time."""
        while True:
            with self.transaction() as transaction:
                page = transaction.rows(f"seq > ? ORDER BY seq LIMIT {_PAGE}", (after,))
            if not page:
                return
            yield from page
            after = page[-1].seq

    def verify(self) -> Iterator[Entry]:
        """Iterate over the rows and check the hash chain.

        LedgerError at the first row that was changed, inserted, removed or reordered.
        """
        previous, balances = GENESIS, dict[int, int]()
        for expected, entry in enumerate(self.entries(), start=1):
            balance = balances.get(entry.account, 0)
            balance += entry.amount if entry.kind in SPENDING else 0
            balances[entry.account] = balance
            if (
                entry.seq != expected
                or entry.previous != previous
                or entry.hash != entry.expected_hash()
                or entry.balance != balance
                or (entry.kind == "ledger") != (expected == 1)
            ):
                raise LedgerError(
                    f"the ledger {self.path} was altered: the hash chain breaks at row {expected}"
                )
            previous = entry.hash
            yield entry

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: a missing file is an error, not a fresh and empty ledger.
        connection = sqlite3.connect(
            f"{Path(self.path).as_uri()}?mode=rw",
            uri=True,
            timeout=_LOCK_TIMEOUT,
            isolation_level=None,
        )
        try:
            connection.execute("PRAGMA journal_mode=DELETE")
            # Without durability SQLite does not wait for the disk. What a process wrote before
            # kill -9 is in the page cache and survives it, in the order in which it was written, so
            # the commit stays atomic; only a power failure could undo it.
            connection.execute(f"PRAGMA synchronous={'EXTRA' if self.durable else 'OFF'}")
            connection.execute("PRAGMA fullfsync=ON")  # macOS: fsync alone stops at the drive cache
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _lock(self) -> Iterator[None]:
        if not os.path.exists(self.path):  # before a lock is left where it was
            raise LedgerError(
                f"the ledger {self.path} is missing; put it, or its disk, back in its place and "
                "run again"
            )
        lock: BaseFileLock = FileLock(self.path + ".lock", timeout=_LOCK_TIMEOUT)
        begin = time.perf_counter()
        try:
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
        if locked - begin > _POLL:
            self._contended_at = locked
        try:
            self._refuse_soft(lock)
            yield
        finally:
            held = time.perf_counter() - locked
            with suppress(OSError):  # a lock that was lost: what was written is committed or not
                lock.release()
            if locked - self._contended_at < 1.0:
                # Others wait, and a waiting process only looks now and then. Staying away for one
                # and a half turns lets two of them go first, so that writers nearly take turns.
                time.sleep(min(max(1.5 * held, 2 * _POLL), _LONGEST_PAUSE))

    def _refuse_soft(self, lock: BaseFileLock) -> None:
        # filelock replaces a lock that the file system lacks by the mere existence of a file, which
        # a killed process leaves behind.
        if isinstance(lock, SoftFileLock):
            raise LedgerError(
                f"the file system of {self.path} has no file locks (as on some network drives); "
                "put the ledger on a local disk"
            )

    def _explain(self, error: sqlite3.Error) -> str:
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
        return f"the ledger {self.path} cannot be used: {reason}. No record is read uncharged"


def _statements(script: str) -> Iterator[str]:
    """Split a script into statements (`executescript` would commit in between)."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
