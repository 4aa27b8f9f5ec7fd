"""What was spent on a data set, in one file: its cap, what its accounts reserve, the audit."""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

from pymc_dp.base.checks import Neighboring, check_budget, check_neighboring
from pymc_dp.errors import LedgerError
from pymc_dp.privacy.accounting import mu_from_budget, units_from_mu
from pymc_dp.privacy.journal import GENESIS, SPENDING, Entry, Journal, Transaction

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Standing:
    """How the account of one privacy budget stood when it was read. `cap` and `spent` count ledger
    units, 2^-40 of squared mu. Closing an account releases what is unspent: `cap` is then what was
    spent.
    """

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


class Ledger:
    """A persistent record of what was spent on one data set; see `create`, `open`, `temporary`.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        An existing ledger; nothing is read before the first use. `open` is the checked way.
    temporary : bool
        Whether charges may be lost in a power failure; set by `Ledger.temporary`.

    Notes
    -----
    *Guarantee.* A charge is committed before the method that makes it returns. The charges of an
    account never pass its cap, and the caps of all accounts never pass the ledger's, whichever
    processes write and whenever they are killed. By the filter theorem of Smith & Thakurta (2022)
    and Koskela, Tobaben & Honkela (2022) the releases paid from an account are GDP with the squared
    mu of its cap, however adaptively they were chosen.

    *Assumptions.* All work on the data set is charged to the same file, nobody with write access is
    hostile, and file locks work (a local disk). The file grows by about 250 bytes per lease. It
    holds released values, no private one, and no time.

    *Weaknesses.* The hash chain shows that a row in the middle was edited. An older copy, or a file
    that was rewritten whole, is recognised only by `verify` with the head hash of a published
    statement.
    """

    _of_process: ClassVar[dict[str, tuple[dict[Any, Any], dict[int, Any]]]] = {}

    def __init__(self, path: _Path, temporary: bool = False) -> None:
        # One spelling per file, so that every process locks the same lock, wherever it runs.
        self.path = str(_file(path).resolve())
        self.is_temporary = temporary
        self.journal = Journal(self.path, durable=not temporary)
        # Shared by all ledgers of one file in this process, copies included; no pickle has it.
        #: Releases that were charged and not kept, by account, plan and number.
        self.pending: dict[tuple[int, int, int], Any]
        #: Versions of the data that plans are about, by plan.
        self.versions: dict[int, Any]
        self.pending, self.versions = self._of_process.setdefault(self.path, ({}, {}))

    def __reduce__(self) -> tuple[type[Ledger], tuple[str, bool]]:
        return type(self), (self.path, self.is_temporary)

    def __repr__(self) -> str:
        return f"Ledger({'temporary' if self.is_temporary else self.path!r})"

    # Making and opening

    @classmethod
    def create(
        cls,
        path: _Path,
        epsilon: float | None = None,
        delta: float | None = None,
        neighboring: Neighboring = "replace_one",
        dataset: str | None = None,
    ) -> Ledger:
        """Make a ledger file.

        Parameters
        ----------
        path : str, bytes or os.PathLike
            Where; an existing file is refused.
        epsilon, delta : float, optional
            Overall cap on everything that is ever charged to the file. None means no cap.
        neighboring : {"replace_one", "add_or_remove_one"}
            Relation that all accounts share: costs under different relations do not add up.
        dataset : str, optional
            Your label for the data. A label, never a hash: a hash of small data can be guessed.

        Returns
        -------
        Ledger

        Raises
        ------
        LedgerError
            If the file exists or cannot be made.
        ValueError
            If an argument is out of range, or only one of `epsilon` and `delta` is given.
        """
        cap = None
        if (epsilon is None) != (delta is None):
            raise ValueError("epsilon and delta belong together: give both, or neither for no cap")
        if epsilon is not None and delta is not None:
            epsilon, delta = check_budget(epsilon, delta)
            cap = units_from_mu(mu_from_budget(epsilon, delta))
        ledger = cls(path)
        ledger._make(cap, epsilon, delta, neighboring, dataset)
        return ledger

    @classmethod
    def open(cls, path: _Path) -> Ledger:
        """Open a ledger file and check its first row; `verify` checks all of them.

        Parameters
        ----------
        path : str, bytes or os.PathLike

        Returns
        -------
        Ledger

        Raises
        ------
        LedgerError
            If the file is missing, damaged or not a ledger.
        ValueError
            If `path` is not the path of a file.
        """
        if not (found := _file(path)).is_file():
            raise LedgerError(f"there is no ledger at {found}; make one with dp.Ledger.create")
        ledger = cls(path)
        if ledger._header["temporary"]:
            ledger = cls(path, temporary=True)
        return ledger

    @classmethod
    def temporary(cls, neighboring: Neighboring = "replace_one") -> Ledger:
        """Make a private ledger that this process removes when it exits.

        Its charges survive a kill of any process, but not a power failure, which also ends all
        processes that could continue to spend. So a charge need not wait for the disk, and is about
        a hundred times cheaper.

        Parameters
        ----------
        neighboring : {"replace_one", "add_or_remove_one"}

        Returns
        -------
        Ledger

        Raises
        ------
        LedgerError
            If there is no room for it, or no directory that can be written.
        """
        try:
            directory = tempfile.mkdtemp(prefix="pymc_dp-")
        except OSError as error:
            raise LedgerError(
                f"no temporary ledger can be made: {error.strerror}; make room, set TMPDIR to a "
                "directory that can be written, or use a ledger file (Ledger.create)"
            ) from None
        atexit.register(_remove, directory, os.getpid())
        ledger = cls(Path(directory) / "ledger.sqlite", temporary=True)
        ledger._make(None, None, None, neighboring, None)
        return ledger

    def _make(
        self,
        cap: int | None,
        epsilon: float | None,
        delta: float | None,
        neighboring: str,
        dataset: str | None,
    ) -> None:
        check_neighboring(neighboring)
        label: object = dataset
        if label is not None and not isinstance(label, str):
            raise ValueError(f"dataset must be a label in words, not {type(label).__name__}")
        self.journal.create(
            {
                "format": _FORMAT,
                "cap": cap,
                "epsilon": epsilon,
                "delta": delta,
                "neighboring": neighboring,
                "dataset": dataset,
                "temporary": self.is_temporary,
                # a head that is published must not let anyone search for what was hashed
                "nonce": secrets.token_hex(16),
            }
        )

    @cached_property
    def _header(self) -> dict[str, Any]:
        with self.journal.transaction() as transaction:
            first = transaction.rows(order="seq LIMIT 1")
        if not first or (entry := first[0]).kind != "ledger" or entry.hash != entry.expected_hash():
            raise LedgerError(f"{self.path} is damaged or not a ledger: its first row is wrong")
        if entry.payload.get("format") != _FORMAT:
            raise LedgerError(
                f"{self.path} has ledger format {entry.payload.get('format')!r}; this version of "
                f"pymc_dp reads format {_FORMAT}"
            )
        return entry.payload

    @property
    def total_cap(self) -> int | None:
        """Overall cap in ledger units, or None."""
        return cast("int | None", self._header["cap"])

    @property
    def epsilon(self) -> float | None:
        """Overall cap as its owner stated it, or None."""
        return cast("float | None", self._header["epsilon"])

    @property
    def delta(self) -> float | None:
        """Delta of the overall cap, or None."""
        return cast("float | None", self._header["delta"])

    @property
    def neighboring(self) -> Neighboring:
        """Neighbouring relation of all accounts."""
        return cast("Neighboring", self._header["neighboring"])

    @property
    def dataset(self) -> str | None:
        """The owner's label for the data, or None."""
        return cast("str | None", self._header["dataset"])

    # What all accounts together have, and the audit

    def total_reserved(self) -> int:
        """Return the sum of the caps of all accounts, in ledger units.

        Returns
        -------
        int
        """
        with self.journal.transaction() as transaction:
            return reserved(transaction)

    def head(self) -> str:
        """Return the hash of the newest row, which covers every row before it.

        Returns
        -------
        str

        Raises
        ------
        LedgerError
            If the file has no rows.
        """
        with self.journal.transaction() as transaction:
            newest = transaction.newest()
        if newest is None:
            raise LedgerError(f"{self.path} is damaged or not a ledger: it has no rows")
        return newest.hash

    def entries(self) -> Iterator[Entry]:
        """Iterate over all rows, oldest first.

        Returns
        -------
        iterator of Entry
        """
        return self.journal.entries()

    def verify(self, head: str | None = None) -> int:
        """Walk the whole hash chain and return the number of rows.

        A row that was changed, inserted, removed or moved is found.

        Parameters
        ----------
        head : str, optional
            Hash from a published statement, or its first 16 digits or more, as they are in its
            text. It must be the hash of some row; this detects an older copy of the file, or a
            rewritten one.

        Returns
        -------
        int

        Raises
        ------
        LedgerError
            If a row was altered, or `head` is not in the chain.
        ValueError
            If `head` is no hash.
        """
        if head is not None and not re.fullmatch("[0-9a-f]{16,64}", str(head)):
            raise ValueError(
                "head must be the hash of a ledger: 64 digits from 0 to f, or the first 16 or more"
            )
        previous, balances, found, rows = GENESIS, dict[int, int](), head is None, 0
        for rows, entry in enumerate(self.entries(), start=1):
            balance = balances.get(entry.account, 0)
            balance += entry.amount if entry.kind in SPENDING else 0
            balances[entry.account] = balance
            if (
                entry.seq != rows
                or entry.previous != previous
                or entry.hash != entry.expected_hash()
                or entry.balance != balance
                or (entry.kind == "ledger") != (rows == 1)
            ):
                raise LedgerError(
                    f"the ledger {self.path} was altered: the hash chain breaks at row {rows}"
                )
            previous, found = entry.hash, found or entry.hash.startswith(str(head))
        if rows == 0:
            raise LedgerError(f"{self.path} is damaged or not a ledger: it has no rows")
        if not found:
            raise LedgerError(
                f"the hash {head} is not in the ledger {self.path}: the file is an older copy, "
                "was rewritten, or belongs to another statement"
            )
        return rows


def _file(path: object) -> Path:
    """The path of a ledger file; ValueError for names that SQLite would take as something else."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise ValueError(f"the path of a ledger must be a path, not {type(path).__name__}")
    name = os.fsdecode(path)
    if not name.strip() or "\0" in name or name == ":memory:" or name.startswith("file:"):
        raise ValueError(
            f"a ledger is a file, and {name!r} is not the path of one. Give a path such as "
            "'ledger.sqlite'; for a ledger that ends with this process use Ledger.temporary(), or "
            "a PrivacyBudget without ledger="
        )
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ValueError(f"the path {name!r} of a ledger names no user's home directory") from None


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits exit handlers, and the parent still spends
        shutil.rmtree(directory, ignore_errors=True)


# What accounts are, read within one transaction.


def standing(transaction: Transaction, account: int) -> Standing:
    """How an account stands; LedgerError if there is none of that number."""
    row = transaction.newest("account", account=account)
    if row is None:
        raise LedgerError(f"this ledger has no account number {account}")
    spent = transaction.balance(account)
    closed = transaction.count("close", account=account) > 0
    facts = row.payload
    return Standing(
        cap=spent if closed else row.amount,
        spent=spent,
        closed=closed,
        epsilon=facts["epsilon"],
        delta=facts["delta"],
        neighboring=facts["neighboring"],
        unit=facts["unit"],
        public=facts["public"],
    )


def reserved(transaction: Transaction) -> int:
    """Sum of the caps of all accounts, in ledger units."""
    return sum(standing(transaction, row.account).cap for row in transaction.rows("account"))
