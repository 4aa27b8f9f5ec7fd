"""What was spent on a data set: accounts, plans, charges and one-off releases, in one file."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

from pymc_dp.base.checks import (
    check_budget,
    check_delta,
    check_epsilon,
    check_integer,
    check_neighboring,
)
from pymc_dp.errors import BudgetExceeded, LedgerError, PlanMismatch
from pymc_dp.privacy.accounting import (
    epsilon_from_mu,
    mu_from_budget,
    mu_from_units,
    units_from_mu,
)
from pymc_dp.privacy.events import BATCHES, GaussianEvent
from pymc_dp.privacy.journal import GENESIS, SPENDING, Entry, Journal, Transaction, as_stored

Neighboring = Literal["replace_one", "add_or_remove_one"]

PREPARATION = "preparation"
"""What ``payload["kind"]`` of a plan of one-off releases is."""
STATISTIC = "release_statistic"
"""What ``payload["sampler"]`` of a published statistic is."""
_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_FORMAT = 2
_LARGEST = 2**63 - 1  # SQLite integers are signed 64-bit
_ALONE = (
    "releases on batches of records are accounted at the epsilon and delta of one budget, and "
    "cannot be added to what other budgets on the same ledger release, nor be counted at the "
    "ledger's own delta, if that is another; use a ledger of their own"
)
_ANOTHER = (
    "another plan of releases on batches was fixed for this budget; use the same draws, chains, "
    "batch_size and noise, or a new budget"
)
_LATE = (
    "releases on batches must be planned before anything else is released under the same budget; "
    "build this step first, or use a new budget"
)


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


class Release(NamedTuple):
    """A one-off release that was charged, made and kept."""

    label: str
    values: dict[str, Any]


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
    *Guarantee.*  A charge is committed before the method that makes it returns, and the charges of
    an account never pass its cap, whichever processes write and whenever they are killed. The caps
    of all accounts never pass the ledger's cap. With the filter theorem of Smith & Thakurta (2022)
    and Koskela, Tobaben & Honkela (2022) the releases paid from an account are then GDP with the
    squared mu of its cap, however adaptively they were chosen.

    *Assumptions.*  All work on the data set is charged to the same file, nobody with write access
    is hostile, and file locks work (a local disk). The file grows by about 250 bytes per lease. It
    holds released values, no private one, and no time.

    *Weaknesses.*  The hash chain shows that a row in the middle was edited. Replacing the file by
    an older copy or rewriting it whole cannot be seen from the file alone: `verify` with the head
    hash of a published statement shows it.
    """

    _of_process: ClassVar[dict[str, tuple[dict[Any, Any], dict[int, Any]]]] = {}

    def __init__(self, path: _Path, temporary: bool = False) -> None:
        # One spelling per file, so that every process locks the same lock, wherever it runs.
        self.path = str(_file(path).resolve())
        self.is_temporary = temporary
        self._journal = Journal(self.path, durable=not temporary)
        # Shared by all ledgers of one file in this process, copies included; no pickle has it.
        #: Releases that were charged and not kept, by plan and number: an error came in between.
        self.pending: dict[tuple[int, int], Any]
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
            raise LedgerError(f"there is no ledger at {found}; make one with Ledger.create")
        ledger = cls(path)
        if ledger._header["temporary"]:
            ledger = cls(path, temporary=True)
        return ledger

    @classmethod
    def temporary(cls, neighboring: Neighboring = "replace_one") -> Ledger:
        """Make a private ledger that this process removes when it exits.

        Its charges survive a kill of any process, but not a power failure. A power failure ends
        all processes that could continue to spend, and the released values with them. So nothing
        is lost by not waiting for the disk, and a charge is about a hundred times cheaper.

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
        self._journal.create(
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
        with self._journal.transaction() as transaction:
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

    # Accounts

    def open_account(
        self,
        cap: int,
        *,
        epsilon: float,
        delta: float,
        neighboring: str,
        unit: str | None,
        public_payload: Mapping[str, Any],
    ) -> int:
        """Reserve `cap` ledger units for one budget and return the account's number.

        Parameters
        ----------
        cap : int
            Ledger units.
        epsilon, delta : float
            The budget, as its owner stated it.
        neighboring : str
            That of the ledger; another is refused.
        unit : str or None
            What one privacy unit is, in words.
        public_payload : mapping
            Public facts to keep beside, JSON values only.

        Returns
        -------
        int
            Number of the account.

        Raises
        ------
        BudgetExceeded
            If the reservations of all accounts would pass the ledger's cap.
        LedgerError
            If `neighboring` or `unit` is not that of the ledger's other accounts.
        ValueError
            If `cap`, `epsilon` or `delta` is out of range.
        """
        cap = check_integer("cap", cap, minimum=1)
        if cap > _LARGEST:
            raise ValueError("cap is more than a ledger can count; use an epsilon up to 1e6")
        epsilon, delta = check_epsilon(epsilon), check_delta(delta)
        check_neighboring(neighboring)
        if neighboring != self.neighboring:
            raise LedgerError(
                f"the budget protects neighboring={neighboring!r} but the ledger {self.path} "
                f"counts {self.neighboring!r}; use the same relation, or another ledger"
            )
        limit = self.total_cap
        with self._journal.transaction() as transaction:
            earlier = transaction.newest("account")
            if earlier is not None and earlier.payload["unit"] != unit:
                raise LedgerError(
                    f"the budget protects one {unit} but the ledger {self.path} counts losses of "
                    f"one {earlier.payload['unit']}; losses of different units do not add up. Use "
                    "the same privacy_unit, or another ledger"
                )
            fixed = transaction.newest(BATCHES)
            if fixed is not None and fixed.payload:
                raise LedgerError(_ALONE)
            taken = _reserved(transaction)
            if limit is not None and taken + cap > limit:
                wanted, rest, whole = (
                    _epsilon(units, cast("float", self.delta))
                    for units in (cap, limit - taken, limit)
                )
                raise BudgetExceeded(
                    f"the ledger {self.path} has an overall cap of {whole} at delta "
                    f"{self.delta:g}, of which {rest} is not reserved; the budget asks for "
                    f"{wanted}. Use a smaller epsilon, or close a budget that has not spent its "
                    "share (its unspent part is released)"
                )
            number = transaction.count("account") + 1
            payload = {
                "epsilon": epsilon,
                "delta": delta,
                "neighboring": neighboring,
                "unit": unit,
                "public": dict(public_payload),
            }
            transaction.append("account", number, cap, payload)
        return number

    def close_account(self, account: int) -> None:
        """Release the unspent part of an account's reservation; it cannot be charged again.

        Parameters
        ----------
        account : int
        """
        with self._journal.transaction() as transaction:
            if not _account(transaction, account).closed:
                transaction.append("close", account, 0, {})

    def account_info(self, account: int) -> Account:
        """Return the state of an account; LedgerError if there is none of that number.

        Parameters
        ----------
        account : int

        Returns
        -------
        Account
        """
        with self._journal.transaction() as transaction:
            return _account(transaction, account)

    def spent(self, account: int) -> int:
        """Return the ledger units charged to an account.

        Parameters
        ----------
        account : int

        Returns
        -------
        int
        """
        return self.account_info(account).spent

    def cap(self, account: int) -> int:
        """Return the ledger units an account may spend; once closed, what it has spent.

        Parameters
        ----------
        account : int

        Returns
        -------
        int
        """
        return self.account_info(account).cap

    def remaining(self, account: int) -> int:
        """Return the ledger units that may still be charged to an account.

        Parameters
        ----------
        account : int

        Returns
        -------
        int
        """
        return self.account_info(account).remaining

    def total_reserved(self) -> int:
        """Return the sum of the caps of all accounts, in ledger units.

        Returns
        -------
        int
        """
        with self._journal.transaction() as transaction:
            return _reserved(transaction)

    # Plans, runs, chains

    def record_plan(self, account: int, plan_id: int, payload: Mapping[str, Any]) -> None:
        """Record a plan before anything is done for it; the same plan twice is recorded once.

        Parameters
        ----------
        account : int
            Account that will pay.
        plan_id : int
            Number of the plan, unique within the account.
        payload : mapping
            Public facts, JSON values only; ``payload["chains"]`` is the number of chains of a run.
            A plan of one-off releases has ``payload["kind"] == "preparation"`` instead: it can be
            charged (`charge`) but not run.

        Raises
        ------
        LedgerError
            If another plan has that number, or the account is closed.
        ValueError
            If the payload of a run has no positive integer ``"chains"``.
        """
        plan_id = check_integer("plan_id", plan_id, minimum=0)
        if payload.get("kind") != PREPARATION:
            check_integer("payload['chains']", payload.get("chains"), minimum=1)
        with self._journal.transaction() as transaction:
            _open_account(transaction, account)
            known = transaction.newest("plan", account=account, plan=plan_id)
            if known is None:
                transaction.append("plan", account, 0, payload, plan_id)
            elif known.payload != as_stored(payload):
                raise LedgerError(
                    f"account {account} already has another plan number {plan_id}; give the new "
                    "plan a new number"
                )

    def fix_batches(self, account: int, payload: Mapping[str, Any] | None) -> None:
        """Fix, and charge, the releases on batches that an account will make, before all others.

        The same releases are fixed once, however often this is called.  As long as nothing else
        was charged, others replace them, and None takes them back.  After that they are final,
        whether they will be made or not.  So there is no choice between them and others, or
        between them and Gaussian releases in their place.  This makes their accounting valid
        beside a filter (``pymc_dp.privacy.subsampled.room_beside``).

        Parameters
        ----------
        account : int
        payload : mapping or None
            JSON values; ``payload["reserved"]`` are the ledger units to be charged.

        Raises
        ------
        LedgerError
            If the account is closed; if something else was charged, or a run was authorised; if
            there are other accounts, or the ledger's own cap is at another delta, as the guarantee
            holds at this account's alone.
        BudgetExceeded
            If the budget is less than what they cost.
        """
        limit, delta = self.total_cap, self.delta
        new = {} if payload is None else as_stored(payload)
        with self._journal.transaction() as transaction:
            info = _open_account(transaction, account)
            old = _batches(transaction, account)
            if new == old:
                return
            if _reserved(transaction) > info.cap or (limit is not None and delta != info.delta):
                raise LedgerError(_ALONE)
            if transaction.count("charge", "lease", "run", account=account):
                raise LedgerError(_ANOTHER if old else _LATE)
            cost = new.get("reserved", 0)
            if cost > info.cap:
                raise BudgetExceeded("the releases on batches cost more than the budget has")
            transaction.append(BATCHES, account, cost - old.get("reserved", 0), new)

    def batches(self, account: int) -> dict[str, Any] | None:
        """Return the releases on batches that were fixed for an account, or None.

        Parameters
        ----------
        account : int

        Returns
        -------
        dict or None
        """
        with self._journal.transaction() as transaction:
            return _batches(transaction, account) or None

    def plan(self, account: int, plan_id: int) -> dict[str, Any]:
        """Return the payload of a recorded plan; LedgerError if there is none.

        Parameters
        ----------
        account, plan_id : int

        Returns
        -------
        dict
        """
        with self._journal.transaction() as transaction:
            return _plan(transaction, account, plan_id)

    def begin_run(
        self,
        account: int,
        plan_id: int,
        *,
        max_runs: int,
        run_cost: int,
        batches: Mapping[str, Any] | None = None,
    ) -> int:
        """Authorise one run (one call of ``pm.sample``) of a plan and return its number, from 0.

        Nothing is charged: the chains charge as they go. A run that could not be paid to its end
        when it starts is refused here, before any work. A run that was interrupted before any of
        its chains began has made no release: it is authorised again and not counted twice.

        Parameters
        ----------
        account, plan_id : int
            Whose plan.
        max_runs : int
            Runs that the plan allows in all.
        run_cost : int
            Ledger units that the run may charge at most.
        batches : mapping, optional
            The releases on batches that the run will make, as they were fixed and charged.

        Returns
        -------
        int

        Raises
        ------
        BudgetExceeded
            If all runs were used, or less than `run_cost` remains, or the releases on batches were
            made.
        LedgerError
            If the plan was not recorded, or the account is closed.
        PlanMismatch
            If the plan is a preparation, or `batches` are not those that were fixed.
        """
        max_runs = check_integer("max_runs", max_runs, minimum=1)
        run_cost = check_integer("run_cost", run_cost, minimum=0)
        with self._journal.transaction() as transaction:
            info = _open_account(transaction, account)
            plan = _plan(transaction, account, plan_id)
            if plan.get("kind") == PREPARATION:
                raise PlanMismatch(f"plan {plan_id} is a preparation, which no chain can run")
            if batches is not None:
                if _batches(transaction, account) != as_stored(batches):
                    raise PlanMismatch(
                        "the releases on batches of this run are not those that were fixed for the "
                        "budget; build the step again"
                    )
                if _begun_on_batches(transaction, account) is not None:
                    raise BudgetExceeded(
                        "the releases on batches that were planned under this budget have been "
                        "made; another run needs a new budget"
                    )
            runs = transaction.count("run", account=account, plan=plan_id)
            newest = transaction.newest("run", account=account, plan=plan_id)
            again = newest is not None and not _chains_of(transaction, newest)
            if runs >= max_runs and not again:
                raise BudgetExceeded(
                    f"all planned runs of this step ({max_runs}) have been used; build a new step, "
                    "which plans and pays for a new run"
                )
            if run_cost > info.remaining:
                raise BudgetExceeded(
                    f"this run needs {_epsilon(run_cost, info.delta)}, but only "
                    f"{_epsilon(info.remaining, info.delta)} of the budget remains; plan fewer "
                    "draws or chains, or use a larger budget"
                )
            if newest is not None and again:
                return int(newest.payload["run"])
            facts = {"run": runs} if batches is None else {"run": runs, "batches": True}
            transaction.append("run", account, 0, facts, plan_id)
            return runs

    def begin_chain(self, account: int, plan_id: int) -> int:
        """Register a chain of the newest run and return its number within the run, from 0.

        Parameters
        ----------
        account, plan_id : int

        Returns
        -------
        int

        Raises
        ------
        LedgerError
            If the plan was not recorded.
        PlanMismatch
            If no run was authorised, all of its chains have started, or another step makes the
            releases on batches.
        """
        with self._journal.transaction() as transaction:
            plan = _plan(transaction, account, plan_id)
            run = transaction.newest("run", account=account, plan=plan_id)
            if run is None:
                raise PlanMismatch(
                    "a chain was started but no run was authorised; sample through pm.sample or "
                    "dp.sample, which check the plan first"
                )
            if run.payload.get("batches") and (
                _begun_on_batches(transaction, account) not in (None, plan_id)
            ):
                raise PlanMismatch(
                    "the releases on batches that were planned under this budget are made by "
                    "another step"
                )
            number = _chains_of(transaction, run)
            if number >= plan["chains"]:
                raise PlanMismatch(
                    f"this run was planned with {plan['chains']} chains and all of them have "
                    "started; build a new step to sample again"
                )
            payload = {"run": run.payload["run"], "chain": number}
            transaction.append("chain", account, 0, payload, plan_id)
        return number

    # Charges

    def lease(self, account: int, plan_id: int, cost: int, want: int) -> int:
        """Charge up to `want` iterations of `cost` units each and return how many were charged.

        Only whole iterations are charged. The charge is committed when the method returns; 0 means
        that the account cannot pay for one more.

        Parameters
        ----------
        account, plan_id : int
        cost : int
            Ledger units of one iteration.
        want : int
            Iterations.

        Returns
        -------
        int
            Iterations that were charged.
        """
        cost = check_integer("cost", cost, minimum=1)
        want = check_integer("want", want, minimum=0)
        with self._journal.transaction() as transaction:
            granted = min(want, _account(transaction, account).remaining // cost)
            if granted > 0:
                payload = {"cost": cost, "iterations": granted}
                transaction.append("lease", account, granted * cost, payload, plan_id)
        return granted

    def give_back(self, account: int, plan_id: int, cost: int, unused: int) -> None:
        """Return leased iterations that were never begun.

        Parameters
        ----------
        account, plan_id : int
        cost : int
            Ledger units of one iteration.
        unused : int
            Iterations.

        Raises
        ------
        LedgerError
            If that is more than the plan was charged.
        """
        cost = check_integer("cost", cost, minimum=1)
        unused = check_integer("unused", unused, minimum=0)
        with self._journal.transaction() as transaction:
            leased = transaction.total("lease", "return", account=account, plan=plan_id)
            if unused * cost > leased:
                raise LedgerError(
                    f"{unused} iterations were to be given back to plan {plan_id} of account "
                    f"{account}, which was charged for fewer"
                )
            if unused > 0:
                payload = {"cost": cost, "iterations": unused}
                transaction.append("return", account, -unused * cost, payload, plan_id)

    # One-off releases

    def find_plan(self, account: int, facts: Mapping[str, Any]) -> int | None:
        """Return the newest unfinished plan whose payload agrees with `facts`, or None.

        Parameters
        ----------
        account : int
        facts : mapping
            Entries that the plan's payload must have, with equal values as JSON; the payload may
            have others, such as what remained of the budget when it was recorded.

        Returns
        -------
        int or None
        """
        wanted = as_stored(facts)
        with self._journal.transaction() as transaction:
            finished = {row.plan for row in transaction.rows("finish", account=account)}
            for row in transaction.rows("plan", account=account, order="seq DESC"):
                if row.plan not in finished and wanted.items() <= row.payload.items():
                    return row.plan
        return None

    def charge(self, account: int, plan_id: int, event: GaussianEvent) -> int:
        """Charge one release of a recorded plan and return its cost in ledger units.

        The charge is committed when the method returns: only then may a record be touched. The
        cost is the event's, so that it cannot differ from the noise multiplier that is recorded.

        Parameters
        ----------
        account, plan_id : int
            Whose plan.
        event : GaussianEvent
            The release; its `mechanism` is the label under which the values are kept.

        Returns
        -------
        int

        Raises
        ------
        BudgetExceeded
            If the cost would pass the account's cap; nothing is charged.
        LedgerError
            If the plan was not recorded or is finished, or the account is closed.
        """
        with self._journal.transaction() as transaction:
            info = _open_account(transaction, account)
            _plan(transaction, account, plan_id)
            if transaction.count("finish", account=account, plan=plan_id):
                raise LedgerError(
                    f"plan {plan_id} of account {account} is finished; record a new plan for new "
                    "releases"
                )
            if event.cost > info.remaining:
                raise BudgetExceeded(
                    f"the release {event.mechanism!r} needs {_epsilon(event.cost, info.delta)}, "
                    f"but only {_epsilon(info.remaining, info.delta)} of the budget remains; no "
                    "record was read for it"
                )
            transaction.append("charge", account, event.cost, event.to_dict(), plan_id)
        return event.cost

    def keep(
        self, account: int, plan_id: int, label: str, values: Mapping[str, Any], number: int
    ) -> None:
        """Keep the released values of the plan's newest charge.

        Parameters
        ----------
        account, plan_id : int
            Whose plan.
        label : str
            The `mechanism` of the event that was charged.
        values : mapping
            Released values only, as JSON; finite floats come back exactly.
        number : int
            How many releases of the plan were kept before.

        Raises
        ------
        LedgerError
            If no charge pays for the release, or another process has kept one meanwhile.
        """
        with self._journal.transaction() as transaction:
            _plan(transaction, account, plan_id)
            before = transaction.count("release", account=account, plan=plan_id)
            if before != number:
                raise LedgerError(
                    f"plan {plan_id} of account {account} has kept {before} releases, not "
                    f"{number}: two processes are preparing the same plan. Build the step in one "
                    "of them"
                )
            newest = transaction.newest("charge", "release", account=account, plan=plan_id)
            if newest is None or newest.payload.get("mechanism") != label:
                raise LedgerError(f"a release {label!r} was to be kept that was not charged")
            kept = {"label": label, "values": dict(values)}
            transaction.append("release", account, 0, kept, plan_id)

    def kept(self, account: int, plan_id: int) -> list[Release]:
        """Return the releases of a plan that were kept, oldest first.

        Parameters
        ----------
        account, plan_id : int

        Returns
        -------
        list of Release
        """
        with self._journal.transaction() as transaction:
            rows = transaction.rows("release", account=account, plan=plan_id)
        return [Release(row.payload["label"], row.payload["values"]) for row in rows]

    def charged(self, account: int, plan_id: int) -> int:
        """Return the ledger units that a plan was charged, less what its chains gave back.

        Parameters
        ----------
        account, plan_id : int

        Returns
        -------
        int
        """
        with self._journal.transaction() as transaction:
            return transaction.total(*SPENDING, account=account, plan=plan_id)

    def unkept(self, account: int, plan_id: int) -> int:
        """Return the ledger units charged for one-off releases of a plan that were not kept.

        Parameters
        ----------
        account, plan_id : int

        Returns
        -------
        int
        """
        with self._journal.transaction() as transaction:
            rows = transaction.rows("charge", "release", account=account, plan=plan_id)
        total, last = 0, 0
        for row in rows:  # a release was paid for by the charge before it
            total += row.amount if row.kind == "charge" else -last
            last = row.amount
        return total

    def finish_plan(self, account: int, plan_id: int) -> None:
        """Record that a plan has made all its releases: it is not charged or found again.

        Parameters
        ----------
        account, plan_id : int
        """
        with self._journal.transaction() as transaction:
            _plan(transaction, account, plan_id)
            if not transaction.count("finish", account=account, plan=plan_id):
                transaction.append("finish", account, 0, {}, plan_id)

    # Audit

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
        with self._journal.transaction() as transaction:
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
        return self._journal.entries()

    def verify(self, head: str | None = None) -> int:
        """Walk the whole hash chain and return the number of rows.

        A row that was changed, inserted, removed or put elsewhere is found.

        Parameters
        ----------
        head : str, optional
            Hash from a published statement. It must be the hash of some row; this detects an older
            copy of the file, or a rewritten one.

        Returns
        -------
        int

        Raises
        ------
        LedgerError
            If a row was altered, or `head` is not in the chain.
        """
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
            previous, found = entry.hash, found or entry.hash == head
        if rows == 0:
            raise LedgerError(f"{self.path} is damaged or not a ledger: it has no rows")
        if not found:
            raise LedgerError(
                f"the hash {head} is not in the ledger {self.path}: the file is an older copy, "
                "was rewritten, or belongs to another statement"
            )
        return rows


def _file(path: object) -> Path:
    """The path of a ledger file; ValueError if it is something else, as SQLite would take it."""
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


def _epsilon(units: int, delta: float) -> str:
    """Ledger units in words."""
    return f"epsilon = {epsilon_from_mu(mu_from_units(units), delta):.4g}"


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits exit handlers, and the parent still spends
        shutil.rmtree(directory, ignore_errors=True)


# What an account and its plans are, read within one transaction.


def _account(transaction: Transaction, account: int) -> Account:
    """The state of an account; LedgerError if there is none of that number."""
    row = transaction.newest("account", account=account)
    if row is None:
        raise LedgerError(f"this ledger has no account number {account}")
    spent = transaction.balance(account)
    closed = transaction.count("close", account=account) > 0
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


def _open_account(transaction: Transaction, account: int) -> Account:
    """The state of an account; LedgerError if it was closed."""
    info = _account(transaction, account)
    if info.closed:
        raise LedgerError(f"account {account} of this ledger was closed; make a new budget")
    return info


def _plan(transaction: Transaction, account: int, plan_id: int) -> dict[str, Any]:
    """The payload of a plan; LedgerError if there is none of that number."""
    entry = transaction.newest("plan", account=account, plan=plan_id)
    if entry is None:
        raise LedgerError(f"account {account} of this ledger has no plan number {plan_id}")
    return entry.payload


def _batches(transaction: Transaction, account: int) -> dict[str, Any]:
    """The releases on batches that were fixed for an account; empty if there are none."""
    entry = transaction.newest(BATCHES, account=account)
    return entry.payload if entry else {}


def _begun_on_batches(transaction: Transaction, account: int) -> int | None:
    """The plan whose chains make the releases on batches, or None if none has begun.

    They are charged once, for the chains of one run.
    """
    for run in transaction.rows("run", account=account):
        if run.payload.get("batches") and _chains_of(transaction, run):
            return run.plan
    return None


def _chains_of(transaction: Transaction, run: Entry) -> int:
    """How many chains have begun since a run of a plan was authorised."""
    assert run.plan is not None
    return transaction.count("chain", account=run.account, plan=run.plan, after=run.seq)


def _reserved(transaction: Transaction) -> int:
    """Sum of the caps of all accounts, in ledger units."""
    return sum(_account(transaction, row.account).cap for row in transaction.rows("account"))
