"""The ledger and the meter: caps, plans, runs, leases, the hash chain, forks and pickles."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import pickle
import resource
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import filelock
import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.base.compat import group
from pymc_dp.errors import BudgetExceeded, LedgerError, PlanMismatch, PrivacyError
from pymc_dp.privacy import journal
from pymc_dp.privacy import meter as metering
from pymc_dp.privacy.account import Account
from pymc_dp.privacy.accounting import GaussianEvent, mu_from_budget, units_from_mu
from pymc_dp.privacy.journal import States
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.privacy.meter import Meter

FORK = multiprocessing.get_context("fork")


def open_account(ledger, cap=1000, neighboring="replace_one"):
    return Account.open(
        ledger,
        cap,
        epsilon=1.0,
        delta=1e-6,
        neighboring=neighboring,
        unit=None,
        public_payload={"x": 1},
    )


def planned(ledger, cap=1000, chains=4):
    account = open_account(ledger, cap)
    account.record_plan(1, {"chains": chains})
    account.begin_run(1, max_runs=1, run_cost=0)
    return account


@pytest.fixture
def ledger(tmp_path):
    return Ledger.create(tmp_path / "ledger.sqlite", dataset="survey 2020")


@pytest.fixture
def temporary():
    return Ledger.temporary()


class TestFile:
    def test_create_and_open(self, tmp_path):
        path = tmp_path / "ledger.sqlite"
        made = Ledger.create(path, 2.0, 1e-6, "add_or_remove_one", "survey")
        again = Ledger.open(str(path))
        assert again.total_cap == made.total_cap == units_from_mu(mu_from_budget(2.0, 1e-6))
        assert (again.epsilon, again.delta, again.dataset) == (2.0, 1e-6, "survey")
        assert again.neighboring == "add_or_remove_one"
        assert not again.is_temporary
        assert again.verify() == 1
        assert path.stat().st_mode & 0o077 == 0

    def test_create_refuses_an_existing_file(self, ledger):
        head = ledger.head()
        with pytest.raises(LedgerError, match="exists already"):
            Ledger.create(ledger.path)
        assert ledger.head() == head

    def test_create_refuses_a_missing_directory(self, tmp_path):
        with pytest.raises(LedgerError, match="choose a directory"):
            Ledger.create(tmp_path / "nowhere" / "ledger.sqlite")

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({"epsilon": 1.0}, "epsilon and delta"),
            ({"delta": 1e-6}, "epsilon and delta"),
            ({"epsilon": -1.0, "delta": 1e-6}, "epsilon"),
            ({"epsilon": 1e-9, "delta": 1e-300}, "epsilon"),
            ({"epsilon": 1e12, "delta": 1e-6}, "epsilon"),
            ({"epsilon": 1.0, "delta": 1.0}, "delta"),
            ({"neighboring": "add"}, "neighboring"),
            ({"dataset": 3}, "dataset"),
        ],
    )
    def test_create_refuses_bad_arguments(self, tmp_path, arguments, match):
        with pytest.raises(ValueError, match=match):
            Ledger.create(tmp_path / "ledger.sqlite", **arguments)
        assert not (tmp_path / "ledger.sqlite").exists()

    def test_open_refuses_what_is_not_a_ledger(self, tmp_path):
        with pytest.raises(LedgerError, match="no ledger at"):
            Ledger.open(tmp_path / "missing")
        assert not (tmp_path / "missing").exists()
        for name, content in [("empty", b""), ("text", b"not a database, surely not" * 100)]:
            (tmp_path / name).write_bytes(content)
            with pytest.raises(LedgerError, match="damaged or not a ledger"):
                Ledger.open(tmp_path / name)
        with closing(sqlite3.connect(tmp_path / "other")) as connection:
            connection.execute("CREATE TABLE entries (seq INTEGER)")
        with pytest.raises(LedgerError, match="damaged or not a ledger"):
            Ledger.open(tmp_path / "other")

    def test_open_checks_the_first_row(self, ledger):
        tamper(ledger, "UPDATE entries SET payload = replace(payload, '2020', '2021')")
        with pytest.raises(LedgerError, match="first row"):
            Ledger.open(ledger.path)

    def test_a_truncated_file_is_damaged(self, ledger):
        account = planned(ledger)
        for _ in range(60):
            account.lease(1, 1, 1)
        content = Path(ledger.path).read_bytes()
        Path(ledger.path).write_bytes(content[: len(content) // 2])
        with pytest.raises(LedgerError):
            Ledger.open(ledger.path).verify()

    def test_the_file_refuses_edits(self, ledger):
        for statement in ("UPDATE entries SET amount = 0", "DELETE FROM entries"):
            with (
                closing(sqlite3.connect(ledger.path)) as connection,
                pytest.raises(sqlite3.IntegrityError, match="append-only"),
            ):
                connection.execute(statement)

    def test_a_lost_file_is_not_rebuilt(self, ledger):
        account = planned(ledger)
        os.unlink(ledger.path)
        with pytest.raises(LedgerError, match="missing"):
            account.lease(1, 1, 1)
        assert not os.path.exists(ledger.path)

    def test_a_file_that_is_lost_after_it_was_seen_is_not_rebuilt(self, ledger, monkeypatch):
        account, connect = planned(ledger), sqlite3.connect

        def lost(*args, **options):
            if os.path.exists(ledger.path):
                os.unlink(ledger.path)
            return connect(*args, **options)

        monkeypatch.setattr("pymc_dp.privacy.journal.sqlite3.connect", lost)
        with pytest.raises(LedgerError):
            account.lease(1, 1, 1)
        assert not os.path.exists(ledger.path)

    @pytest.mark.parametrize(
        "path",
        ["", " ", ":memory:", Path(":memory:"), b":memory:", "file:x?mode=memory", "a\0b", "~/.."],
    )
    def test_what_is_no_file_is_refused(self, tmp_path, monkeypatch, path):
        """SQLite would take some of these for a data base in memory, which nobody else counts."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        remedy = r"is not the path of one.*Ledger\.temporary\(\)"
        if path == "~/..":  # a directory
            with pytest.raises(LedgerError, match="exists already"):
                Ledger.create(path)
            with pytest.raises(LedgerError, match="no ledger at"):
                Ledger.open(path)
        else:
            for call in (Ledger, Ledger.create, Ledger.open):
                with pytest.raises(ValueError, match=remedy):
                    call(path)
        assert os.listdir() == []

    @pytest.mark.parametrize("path", [None, 3, True, ["ledger"], "~nobody-of-this-name/ledger"])
    def test_what_is_no_path_is_refused(self, path):
        for call in (Ledger, Ledger.create, Ledger.open):
            with pytest.raises(ValueError, match="path"):
                call(path)

    @pytest.mark.parametrize("name", ["ledger", "l\u00e9dger ?#%.db", b"\xff\xfe.db"])
    def test_spellings_of_a_path(self, tmp_path, name):
        """Bytes, a subclass of str and objects with a path all mean the same file."""

        class Spelling(str):
            pass

        class Somewhere:
            def __init__(self, path):
                self.path = path

            def __fspath__(self):
                return self.path

        raw = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
        text = os.fsdecode(raw)
        made = Ledger.create(raw)
        account = open_account(made)
        assert os.path.exists(raw)
        for path in (text, Path(text), Spelling(text), Somewhere(text), Somewhere(raw)):
            again = Ledger.open(path)
            assert type(again.path) is str
            assert again.path == made.path
            assert account.read().cap == 1000
        assert pickle.loads(pickle.dumps(made)).head() == made.head()

    @pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO, errno.ENOSPC])
    def test_a_share_without_locks_charges_nothing(self, ledger, monkeypatch, code):
        account = planned(ledger)
        flock = fcntl.flock

        def fail(file, operation):
            if operation & fcntl.LOCK_EX:
                raise OSError(code, os.strerror(code))
            flock(file, operation)

        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", fail)
            with pytest.raises(LedgerError, match=r"no record was touched.*local disk with room"):
                account.lease(1, 1, 5)
            with pytest.raises(LedgerError, match="cannot be locked"):
                Ledger.create(ledger.path + ".new")
        assert not os.path.exists(ledger.path + ".new")
        assert account.read().spent == 0
        assert account.lease(1, 1, 5) == 5

    def test_a_directory_that_is_gone(self, ledger):
        """Nothing is made in its place, and work goes on when it is back."""
        account = planned(ledger)
        directory = Path(ledger.path).parent
        away = directory.rename(directory.with_name("away"))
        for call in (ledger.head, lambda: account.lease(1, 1, 1)):
            with pytest.raises(LedgerError, match=r"missing.*back in its place"):
                call()
        assert not directory.exists()
        away.rename(directory)
        assert account.lease(1, 1, 5) == account.read().spent == 5

    def test_a_file_that_cannot_be_written(self, ledger, monkeypatch):
        """As on a disk that is read-only, by what SQLite says then."""
        account = planned(ledger)
        connect = sqlite3.connect

        def read_only(name, **settings):
            return connect(name.replace("mode=rw", "mode=ro"), **settings)

        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", read_only)
            with pytest.raises(LedgerError, match=r"cannot be written.*run again"):
                account.lease(1, 1, 5)
        assert account.read().spent == 0
        assert account.lease(1, 1, 5) == 5

    def test_no_room_for_a_temporary_ledger(self, monkeypatch):
        def fail(**settings):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(tempfile, "mkdtemp", fail)
        with pytest.raises(LedgerError, match=r"make room, set TMPDIR"):
            Ledger.temporary()

    def test_lock_failures_are_explained(self, ledger, monkeypatch):
        def refuse(self, *args, **kwargs):
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(filelock.FileLock, "acquire", refuse)
            with pytest.raises(LedgerError, match="can be written"):
                ledger.head()
        monkeypatch.setattr(journal, "_LOCK_TIMEOUT", 0.05)
        with monkeypatch.context() as patch:
            # What filelock falls back to where the file system has no locks.
            patch.setattr(journal, "FileLock", filelock.SoftFileLock)
            for _ in range(2):  # with a file in the way, and without
                with pytest.raises(LedgerError, match="no file locks"):
                    ledger.head()
                Path(ledger.path + ".lock").unlink(missing_ok=True)
        with (
            filelock.FileLock(ledger.path + ".lock"),
            pytest.raises(LedgerError, match="locked by"),
        ):
            ledger.head()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_read_only_directory_is_explained(self, ledger):
        directory = Path(ledger.path).parent
        account = planned(ledger)
        directory.chmod(0o500)
        try:
            with pytest.raises(LedgerError, match=r"can(not)? be written"):
                account.lease(1, 1, 1)
        finally:
            directory.chmod(0o700)

    def test_paths_are_absolute(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        ledger = Ledger.create("ledger.sqlite")
        monkeypatch.chdir("/")
        assert ledger.verify() == 1

    @pytest.mark.slow
    def test_temporary_ledger_goes_with_its_process(self):
        code = (
            "import os\n"
            "from pymc_dp.privacy.ledger import Ledger\n"
            "ledger = Ledger.temporary()\n"
            "if os.fork() == 0:\n"
            "    raise SystemExit  # runs the exit handlers in the child\n"
            "os.wait()\n"
            "assert os.path.exists(ledger.path), 'removed by a child'\n"
            "print(ledger.path)\n"
        )
        path = run_python(code).decode().strip()
        assert path.endswith("ledger.sqlite")
        assert not os.path.exists(os.path.dirname(path))

    def test_temporary_ledger_is_known_by_its_file(self, temporary):
        assert Ledger.open(temporary.path).is_temporary
        assert pickle.loads(pickle.dumps(temporary)).is_temporary


class Disk:
    """A disk with room for some pages of 4096 bytes: by SQLite's own limit, or by the system's."""

    def __init__(self, kind):
        self.kind = kind
        self.pages = None

    @contextmanager
    def transaction(self, journal):
        if self.pages is None:
            with TRANSACTION(journal) as transaction:
                yield transaction
        elif self.kind == "full":
            with TRANSACTION(journal) as transaction:
                transaction._connection.execute(f"PRAGMA max_page_count={self.pages}")
                yield transaction
        else:
            old = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 * self.pages, old[1]))
            try:
                with TRANSACTION(journal) as transaction:
                    yield transaction
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, old)


TRANSACTION = journal.Journal.transaction


@pytest.fixture(params=["full", "quota"])
def disk(request, monkeypatch):
    disk = Disk(request.param)
    monkeypatch.setattr(journal.Journal, "transaction", lambda self: disk.transaction(self))
    return disk


class TestDisk:
    def test_no_ledger_is_made(self, tmp_path, disk):
        disk.pages = 1
        with pytest.raises(LedgerError, match="make room"):
            Ledger.create(tmp_path / "ledger")
        assert not (tmp_path / "ledger").exists()
        disk.pages = None
        assert Ledger.create(tmp_path / "ledger").verify() == 1

    @pytest.mark.slow
    def test_what_is_charged_is_what_was_granted(self, tmp_path, disk):
        """Whatever is being written when the disk is full, and a page more each time."""
        ledger = Ledger.create(tmp_path / "ledger")
        account = prepared(ledger, cap=10**6)
        disk.pages = os.path.getsize(ledger.path) // 4096
        event = GaussianEvent("a long name " * 10, 2.0**19)
        calls = {
            "account": lambda: 0 * open_account(ledger, cap=10**6).number,
            "lease": lambda: account.lease(7, 1, 7),
            "charge": lambda: account.charge(7, event),
        }
        failed, granted, accounts = [], 0, 1
        for name in np.random.default_rng(0).choice(list(calls), 150):
            try:
                granted += calls[name]()
                accounts += name == "account"
            except LedgerError as error:
                assert "make room and run again" in str(error)
                failed.append(name)
                disk.pages += 1
            assert account.read().spent == granted
            assert ledger.total_reserved() == accounts * 10**6
        assert set(failed) == set(calls)
        disk.pages = None
        assert ledger.verify() == 2 + 150 - len(failed) + 1

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    def test_a_run_goes_on_when_there_is_room(self, tmp_path, monkeypatch):
        """The disk is full at one row of every kind, in turn, and there is room when asked again.

        What was released is charged once; of chains that failed, the leases are charged.
        """
        x = np.random.default_rng(0).normal(size=(200, 2))
        ledger = Ledger.create(tmp_path / "ledger")
        with pm.Model() as model:
            pm.Normal("y", x @ pm.Normal("b", shape=2), 1.0, observed=x[:, 0])
            budget = dp.PrivacyBudget(5.0, 1e-6, ledger=ledger)
        append, account = journal.Transaction.append, budget.account

        def full_at(patch, wanted):
            def fail(self, kind, *arguments):
                entry = append(self, kind, *arguments)
                if kind == wanted:
                    raise sqlite3.OperationalError("disk I/O error")
                return entry

            patch.setattr(journal.Transaction, "append", fail)

        def run():
            return dp.sample(
                **{"draws": 30, "chains": 1, "tune": 0, "step": "DPPenalty", "model": model},
                **{"progressbar": False, "compute_convergence_checks": False},
            )

        spent = []
        for kind in ("plan", "charge", "release", "run", "chain", "lease"):
            with monkeypatch.context() as patch:
                full_at(patch, kind)
                with pytest.raises(LedgerError, match="make room and run again"):
                    run()
            charged = {"charge", "lease", "return"}
            rows = [e.amount for e in ledger.entries() if e.kind in charged]
            assert account.read().spent == sum(rows)
            spent.append(sum(rows))
        assert spent[0] == spent[1] == 0 < spent[2] < spent[3] == spent[4] == spent[5]
        with monkeypatch.context() as patch:  # the result is whole all the same
            full_at(patch, "finish")
            assert group(run(), "posterior").sizes["draw"] == 30
        kinds = [e.kind for e in ledger.entries()]
        assert kinds.count("charge") == kinds.count("release")
        assert account.read().spent <= account.read().cap
        assert ledger.verify() == len(kinds)


class TestAccounts:
    def test_an_account_reserves(self, tmp_path):
        ledger = Ledger.create(tmp_path / "ledger.sqlite", 1.0, 1e-6)
        total = ledger.total_cap
        first = open_account(ledger, total - 10)
        with pytest.raises(BudgetExceeded, match="overall cap of epsilon = 1 at delta 1e-06"):
            open_account(ledger, 11)
        second = open_account(ledger, 10)
        assert (first.number, second.number) == (1, 2)
        assert ledger.total_reserved() == total

    def test_closing_releases_what_was_not_spent(self, ledger):
        account = planned(ledger, cap=100)
        account.lease(1, 7, 3)
        account.close()
        account.close()
        info = account.read()
        assert (info.cap, info.spent, info.remaining, info.closed) == (21, 21, 0, True)
        assert ledger.total_reserved() == 21
        assert account.lease(1, 1, 1) == 0
        for call in (
            lambda: account.record_plan(2, {"chains": 1}),
            lambda: account.begin_run(1, max_runs=9, run_cost=0),
        ):
            with pytest.raises(LedgerError, match="closed"):
                call()
        # A chain that was still running returns what it had leased: no charge can use it.
        account.give_back(1, 7, 1)
        assert ledger.total_reserved() == account.read().cap == 14
        assert account.read().remaining == 0

    def test_relations_do_not_mix(self, ledger):
        with pytest.raises(LedgerError, match=r"'add_or_remove_one'.*'replace_one'"):
            open_account(ledger, neighboring="add_or_remove_one")

    def test_account_info(self, ledger):
        account = open_account(ledger, cap=5)
        info = account.read()
        assert (account.number, info.cap, info.spent, info.remaining) == (1, 5, 0, 5)
        assert (info.epsilon, info.delta, info.unit, info.public) == (1.0, 1e-6, None, {"x": 1})

    @pytest.mark.parametrize("cap", [0, -1, 1.5, True, "7", 2**63])
    def test_bad_caps(self, ledger, cap):
        with pytest.raises(ValueError, match="cap"):
            open_account(ledger, cap)

    def test_unknown_accounts(self, ledger):
        account = Account(ledger, 3)
        for call in (account.read, account.close, lambda: account.lease(1, 1, 1)):
            with pytest.raises(LedgerError, match="no account number 3"):
                call()


class TestPlans:
    def test_plan_is_kept(self, ledger):
        account = open_account(ledger)
        payload = {"chains": 2, "noise": 0.1, "names": ("a", "é")}
        account.record_plan(7, payload)
        account.record_plan(7, payload)
        assert account.plan(7) == {"chains": 2, "noise": 0.1, "names": ["a", "é"]}
        assert ledger.verify() == 3
        assert [entry.kind for entry in ledger.entries()] == ["ledger", "account", "plan"]
        with pytest.raises(LedgerError, match="another plan number 7"):
            account.record_plan(7, {"chains": 3})
        with pytest.raises(LedgerError, match="no plan number 8"):
            account.plan(8)

    @pytest.mark.parametrize("payload", [{}, {"chains": 0}, {"chains": "2"}, {"chains": True}])
    def test_plan_needs_chains(self, ledger, payload):
        with pytest.raises(ValueError, match="chains"):
            open_account(ledger).record_plan(1, payload)

    def test_payload_is_json(self, ledger):
        account = open_account(ledger)
        with pytest.raises((TypeError, ValueError)):
            account.record_plan(1, {"chains": 1, "x": float("nan")})
        with pytest.raises(TypeError):
            account.record_plan(1, {"chains": 1, "x": object()})
        assert ledger.verify() == 2

    def test_runs_are_counted(self, ledger):
        account = open_account(ledger, cap=100)
        account.record_plan(1, {"chains": 1})
        assert account.begin_run(1, max_runs=2, run_cost=60) == 0
        account.begin_chain(1)
        account.lease(1, 1, 60)
        with pytest.raises(BudgetExceeded, match=r"needs epsilon = .*, but only epsilon = .* of"):
            account.begin_run(1, max_runs=2, run_cost=60)
        assert account.begin_run(1, max_runs=2, run_cost=40) == 1
        # interrupted before a chain began: the same run again, and no other chains than its own
        assert account.begin_run(1, max_runs=2, run_cost=40) == 1
        account.begin_chain(1)
        with pytest.raises(PlanMismatch, match="1 chains"):
            account.begin_chain(1)
        with pytest.raises(BudgetExceeded, match="build a new step"):
            account.begin_run(1, max_runs=2, run_cost=0)
        with pytest.raises(LedgerError, match="no plan number 2"):
            account.begin_run(2, max_runs=1, run_cost=0)

    def test_chains_are_counted_per_run(self, ledger):
        account = open_account(ledger)
        account.record_plan(1, {"chains": 2})
        with pytest.raises(PlanMismatch, match="no run was authorised"):
            account.begin_chain(1)
        for _ in range(2):
            account.begin_run(1, max_runs=2, run_cost=0)
            assert [account.begin_chain(1) for _ in range(2)] == [0, 1]
            with pytest.raises(PlanMismatch, match="2 chains"):
                account.begin_chain(1)


class TestLeases:
    def test_whole_iterations_within_the_cap(self, ledger):
        account = planned(ledger, cap=100)
        assert account.lease(1, 30, 2) == 2
        assert account.lease(1, 30, 5) == 1
        assert account.lease(1, 30, 5) == 0
        assert account.lease(1, 10, 5) == 1
        assert (account.read().spent, account.read().remaining) == (100, 0)

    def test_accounts_do_not_share(self, ledger):
        first, second = planned(ledger, cap=10), planned(ledger, cap=10)
        assert first.lease(1, 1, 99) == 10
        assert second.lease(1, 1, 99) == 10

    def test_give_back(self, ledger):
        account = planned(ledger, cap=100)
        account.lease(1, 10, 10)
        account.give_back(1, 10, 4)
        account.give_back(1, 10, 0)
        assert account.read().spent == 60
        with pytest.raises(LedgerError, match="charged for fewer"):
            account.give_back(1, 10, 7)
        with pytest.raises(LedgerError, match="charged for fewer"):
            account.give_back(2, 10, 1)
        assert account.lease(1, 10, 10) == 4

    def test_runs_whose_chains_charge_are_not_ended_for_them(self, ledger):
        """Where chains of an owner's own run are is not known beside the ledger."""
        account = planned(ledger)
        account.begin_chain(1)
        account.lease(1, 10, 10)
        account.record_plan(2, {"chains": 4})
        account.lease_run(2, [(10, 10)])
        account.begin_chains(2, [0])
        assert account.unended() == [2]
        account.end_run(2, [])
        assert account.unended() == []

    @pytest.mark.parametrize("bad", [-1, 1.0, True, "1"])
    def test_bad_amounts(self, ledger, bad):
        account = planned(ledger)
        for call in (
            lambda: account.lease(1, bad, 1),
            lambda: account.lease(1, 1, bad),
            lambda: account.give_back(1, bad, 1),
            lambda: account.give_back(1, 1, bad),
        ):
            with pytest.raises(ValueError, match=r"cost|want|unused"):
                call()


EVENT = GaussianEvent("score", 2.0**18)  # 16 units
UNIT = GaussianEvent("gradient", 2.0**20)  # one unit
PREPARED = {"kind": "preparation", "sampler": "DPLangevin", "units": 64, "settings": {"a": (1, 2)}}


def prepared(ledger, cap=1000):
    account = open_account(ledger, cap)
    account.record_plan(7, PREPARED)
    return account


class TestReleases:
    def test_charge_and_keep(self, ledger):
        account = prepared(ledger)
        values = {"value": [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3], "sd": 2**-0.5}
        for number in range(2):
            assert account.charge(7, EVENT) == EVENT.cost == 16
            assert account.read().spent == 16 * (number + 1)
            account.keep(7, "score", values, number)
        assert account.kept(7) == [("score", values)] * 2
        assert [str(x) for x in account.kept(7)[0].values["value"]] == [
            str(x) for x in values["value"]
        ]
        assert account.charged(7) == account.read().spent == 32
        assert account.kept(8) == []
        entries = list(ledger.entries())
        assert [entry.kind for entry in entries[2:]] == ["plan", *["charge", "release"] * 2]
        assert [entry.balance for entry in entries[3:]] == [16, 16, 32, 32]
        assert GaussianEvent.from_dict(entries[3].payload) == EVENT
        assert ledger.verify() == 7

    def test_the_cap_holds_for_charges_and_leases_together(self, ledger):
        account = prepared(ledger, cap=50)
        account.charge(7, EVENT)
        account.record_plan(1, {"chains": 1})
        assert account.lease(1, 10, 9) == 3
        rows = ledger.verify()
        with pytest.raises(BudgetExceeded, match=r"'score' needs epsilon = .* no record was read"):
            account.charge(7, EVENT)
        assert (ledger.verify(), account.read().spent) == (rows, 46)
        with pytest.raises(LedgerError, match="charged for fewer"):
            account.give_back(7, 16, 1)  # a release is never given back
        account.close()
        assert ledger.total_reserved() == 46
        with pytest.raises(LedgerError, match="closed"):
            account.charge(7, EVENT)

    def test_only_what_was_charged_is_kept(self, ledger):
        account = prepared(ledger)
        for plan, match in ((7, "not charged"), (8, "no plan number 8")):
            with pytest.raises(LedgerError, match=match):
                account.keep(plan, "score", {}, 0)
        with pytest.raises(LedgerError, match="no plan number 8"):
            account.charge(8, EVENT)
        account.charge(7, EVENT)
        with pytest.raises(LedgerError, match="not charged"):
            account.keep(7, "curvature", {}, 0)
        with pytest.raises(LedgerError, match="two processes"):
            account.keep(7, "score", {}, 1)
        with pytest.raises(ValueError, match=r"nan|JSON"):
            account.keep(7, "score", {"value": float("nan")}, 0)
        account.keep(7, "score", {}, 0)
        with pytest.raises(LedgerError, match="not charged"):
            account.keep(7, "score", {}, 1)
        assert len(account.kept(7)) == 1

    def test_plans_are_found_until_they_are_finished(self, ledger):
        account, other = prepared(ledger), open_account(ledger)
        facts = {"kind": "preparation", "settings": {"a": (1, 2)}}
        assert account.find_plan(facts) == 7
        assert account.find_plan({**facts, "settings": {"a": [1, 3]}}) is None
        assert account.find_plan({"more": None}) is None
        assert other.find_plan(facts) is None
        account.record_plan(9, PREPARED)
        assert account.find_plan(facts) == 9
        account.finish_plan(9)
        account.finish_plan(9)
        assert account.find_plan(facts) == 7
        with pytest.raises(LedgerError, match="finished"):
            account.charge(9, EVENT)
        with pytest.raises(LedgerError, match="no plan number 10"):
            account.finish_plan(10)
        assert [entry.kind for entry in ledger.entries()].count("finish") == 1
        ledger.verify()

    def test_a_preparation_is_not_run(self, ledger):
        account = prepared(ledger)
        with pytest.raises(PlanMismatch, match="preparation"):
            account.begin_run(7, max_runs=1, run_cost=0)
        with pytest.raises(PlanMismatch):
            account.begin_chain(7)

    def test_tampering_with_a_released_value_is_found(self, ledger):
        account = prepared(ledger)
        account.charge(7, EVENT)
        account.keep(7, "score", {"value": [0.25]}, 0)
        tamper(ledger, "UPDATE entries SET payload = replace(payload, '0.25', '0.26')")
        with pytest.raises(LedgerError, match="altered"):
            ledger.verify()

    def test_two_processes_never_pass_the_cap(self, temporary):
        account = prepared(temporary, cap=16 * 21 + 5)

        def spend():
            count = 0
            try:
                while True:
                    count += account.charge(7, EVENT)
            except BudgetExceeded:
                return count

        queue = FORK.SimpleQueue()
        processes = [FORK.Process(target=lambda: queue.put(spend())) for _ in range(2)]
        for process in processes:
            process.start()
        totals = [queue.get() for _ in processes]
        for process in processes:
            process.join()
        assert sum(totals) == account.read().spent == 16 * 21
        temporary.verify()


def tamper(ledger, statement):
    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as connection:
        for trigger in ("no_update", "no_delete"):
            connection.execute(f"DROP TRIGGER IF EXISTS {trigger}")
        connection.execute(statement)


class TestChain:
    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE entries SET amount = 1 WHERE seq = 6",
            "UPDATE entries SET balance = balance - 5 WHERE seq >= 6",
            "UPDATE entries SET account = 2 WHERE seq = 6",
            "UPDATE entries SET plan = 2 WHERE seq = 6",
            "UPDATE entries SET kind = 'chain' WHERE seq = 6",
            "UPDATE entries SET payload = '{}' WHERE seq = 6",
            "UPDATE entries SET payload = 'gibberish' WHERE seq = 6",
            "UPDATE entries SET amount = 'x' WHERE seq = 6",
            "DELETE FROM entries WHERE seq = 6",
            "UPDATE entries SET seq = 60 WHERE seq = 8",
            "DELETE FROM entries",
        ],
    )
    def test_tampering_is_found(self, ledger, statement):
        account = planned(ledger)
        for _ in range(4):
            account.lease(1, 5, 1)
        assert ledger.verify() == 8
        tamper(ledger, statement)
        with pytest.raises(LedgerError, match=r"altered|damaged"):
            ledger.verify()

    def test_an_altered_row_needs_new_hashes_in_all_rows_after_it(self, ledger):
        account = planned(ledger)
        for _ in range(4):
            account.lease(1, 5, 1)
        entry = list(ledger.entries())[5]
        other = replace(entry, payload={**entry.payload, "note": "altered"})
        text, new = journal.canonical(other.payload), other.expected_hash()
        tamper(ledger, f"UPDATE entries SET payload = '{text}', hash = '{new}' WHERE seq = 6")
        tamper(ledger, f"UPDATE entries SET previous = '{new}' WHERE seq = 7")
        with pytest.raises(LedgerError, match="altered"):
            ledger.verify()

    def test_a_published_head_finds_an_older_copy(self, ledger):
        account = planned(ledger)
        account.lease(1, 5, 1)
        head = ledger.head()
        account.lease(1, 5, 1)
        assert ledger.verify(head) == 6
        tamper(ledger, "DELETE FROM entries WHERE seq >= 5")
        assert ledger.verify() == 4  # the chain alone cannot know
        with pytest.raises(LedgerError, match="older copy"):
            ledger.verify(head)

    def test_entries(self, ledger):
        account = planned(ledger)
        account.lease(1, 5, 3)
        account.give_back(1, 5, 1)
        entries = list(ledger.entries())
        kinds = ["ledger", "account", "plan", "run", "lease", "return"]
        assert [entry.kind for entry in entries] == kinds
        assert [entry.amount for entry in entries] == [0, 1000, 0, 0, 15, -5]
        assert [entry.balance for entry in entries] == [0, 0, 0, 0, 15, 10]
        assert [entry.previous for entry in entries[1:]] == [entry.hash for entry in entries[:-1]]
        assert entries[-1].hash == ledger.head()
        assert entries[-1].payload == {"cost": 5, "iterations": 1}

    def test_reading_in_pages(self, temporary, monkeypatch):
        monkeypatch.setattr(journal, "_PAGE", 7)
        account = planned(temporary)
        for _ in range(30):
            account.lease(1, 1, 1)
        assert [entry.seq for entry in temporary.entries()] == list(range(1, 35))
        assert temporary.verify() == 34

    @pytest.mark.slow
    def test_long_ledgers_stay_fast(self, temporary):
        """A charge in a ledger of 20,000 rows reads a few of them: totals are running sums."""
        account = planned(temporary, cap=10**9)
        with temporary.journal.transaction() as transaction:
            for _ in range(20_000):
                transaction.append("lease", account.number, 1, {"cost": 1, "iterations": 1}, 1)
        steps = 0

        def tick():
            nonlocal steps
            steps += 1

        connect = journal.Journal._connect

        def counting(self):
            connection = connect(self)
            connection.set_progress_handler(tick, 100)
            return connection

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal.Journal, "_connect", counting)
            account.lease(1, 1, 1)
        assert steps < 20  # virtual machine instructions / 100; a scan would take over 1000


class TestMeter:
    def test_a_chain_is_paid_and_no_more(self, temporary):
        account = planned(temporary, cap=10**6)
        meter = Meter(account, 1, {UNIT: 10}, {UNIT: 7}, 200)
        meter.begin_chain()
        assert account.read().spent == 7
        for started in range(200):
            assert meter.started == started
            assert meter.begin_iteration()
            assert account.read().spent >= 7 + 10 * (started + 1)
        assert account.read().spent == 2007
        assert not meter.frozen
        assert not meter.begin_iteration()  # not planned, so not charged
        meter.close()
        assert account.read().spent == 2007

    def test_close_returns_the_rest(self, temporary):
        account = planned(temporary)
        meter = Meter(account, 1, {UNIT: 1}, {}, 100)
        meter.begin_chain()
        assert all(meter.begin_iteration() for _ in range(10))
        meter.close()
        meter.close()
        assert account.read().spent == 10
        with pytest.raises(PlanMismatch, match="no chain was begun"):
            meter.begin_iteration()

    def test_frozen_for_good(self, temporary):
        account = planned(temporary, cap=70)
        other = Meter(account, 1, {UNIT: 1}, {}, 50)
        other.begin_chain()
        other.begin_iteration()
        meter = Meter(account, 1, {UNIT: 1}, {}, 50)
        meter.begin_chain()
        assert sum(meter.begin_iteration() is not None for _ in range(30)) == 20
        other.close()
        assert account.read().remaining == 49
        assert meter.frozen
        assert not meter.begin_iteration()

    def test_a_start_that_cannot_be_paid_freezes(self, temporary):
        account = planned(temporary, cap=5)
        meter = Meter(account, 1, {UNIT: 1}, {UNIT: 6}, 50)
        with pytest.raises(PrivacyError, match="no charge pays"):
            meter.begin_chain().take(UNIT.mechanism, UNIT.noise_multiplier)
        assert meter.frozen
        assert not meter.begin_iteration()
        assert account.read().spent == 0

    def test_chains_in_one_process(self, temporary):
        account = planned(temporary, chains=2)
        meter = Meter(account, 1, {UNIT: 1}, {UNIT: 2}, 100)
        meter.begin_chain()
        meter.begin_iteration()
        meter.begin_chain()  # closes the first
        assert account.read().spent == 5
        meter.begin_iteration()
        with pytest.raises(PlanMismatch, match="2 chains"):
            meter.begin_chain()
        assert account.read().spent == 6

    def test_a_failed_return_stays_charged(self, temporary, monkeypatch):
        account = planned(temporary)
        meter = Meter(account, 1, {UNIT: 1}, {}, 100)
        meter.begin_chain()
        meter.begin_iteration()

        def fail(*args):
            raise LedgerError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(Account, "give_back", fail)
            with pytest.raises(LedgerError, match="full"):
                meter.close()
        meter.close()
        assert account.read().spent == 64
        with pytest.raises(PlanMismatch):
            meter.begin_iteration()

    def test_blocks_follow_the_clock(self, temporary, monkeypatch):
        class Clock:
            now = 0.0

            def perf_counter(self):
                return self.now

        clock = Clock()
        monkeypatch.setattr(metering, "time", clock)
        account = planned(temporary, cap=10**6)
        meter = Meter(account, 1, {UNIT: 1}, {}, 10**4)
        meter.begin_chain()
        for _ in range(65):
            assert meter.begin_iteration()
            clock.now += 0.002  # half a second is 250 iterations, rounded up to 256
        assert account.read().spent == 64 + 256
        lease = Account.lease

        def slow(self, *args):
            clock.now += 0.02  # 200 commits are 4 seconds: 2000 iterations, rounded up to 2048
            return lease(self, *args)

        monkeypatch.setattr(Account, "lease", slow)
        for _ in range(256):
            assert meter.begin_iteration()
            clock.now += 0.002
        charged = account.read().spent
        for _ in range(charged - meter.started + 1):
            assert meter.begin_iteration()
            clock.now += 0.002
        assert account.read().spent - charged == 2048

    @pytest.mark.parametrize("bad", [-1, 1.0, True, "1", None])
    def test_wrong_arguments(self, temporary, bad):
        with pytest.raises(ValueError, match="iterations"):
            Meter(Account(temporary, 1), 1, {}, {}, bad)

    def test_a_receipt_is_for_what_was_charged(self, temporary):
        meter = Meter(planned(temporary), 1, {UNIT: 2}, {}, 10)
        meter.begin_chain()
        receipt, name, multiplier = meter.begin_iteration(), UNIT.mechanism, UNIT.noise_multiplier
        for refused in (("other", multiplier), (name, 0.999 * multiplier)):
            with pytest.raises(PrivacyError, match="no charge pays"):
                receipt.take(*refused)
        receipt.take(name, multiplier)
        receipt.take(name, 2.0 * multiplier)
        with pytest.raises(PrivacyError, match="no charge pays"):
            receipt.take(name, multiplier)
        receipt.put_back(name)
        receipt.take(name, multiplier)


def run_python(code, data=b""):
    """Run code in a fresh interpreter, as the spawn start method does."""
    environment = {**os.environ, "PYTHONPATH": str(Path(metering.__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-c", code], input=data, env=environment, check=True, capture_output=True
    ).stdout


def in_child(function):
    """Run a function in a forked child and return what it returned."""
    queue = FORK.SimpleQueue()
    process = FORK.Process(target=lambda: queue.put(function()))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return queue.get()


class TestProcesses:
    def test_what_a_process_knows_is_shared_by_all_ledgers_of_a_file(self, ledger):
        for other in (pickle.loads(pickle.dumps(ledger)), Ledger(ledger.path)):
            assert other.pending is ledger.pending and other.versions is ledger.versions

    def test_a_pickle_holds_a_path_and_no_handle(self, ledger):
        assert Path(ledger.path).name.encode() in pickle.dumps(ledger)
        assert ledger.__reduce__() == (Ledger, (ledger.path, False))
        account = planned(ledger)
        meter = Meter(account, 1, {UNIT: 1}, {}, 100)
        meter.begin_chain()
        meter.begin_iteration()
        copy = pickle.loads(pickle.dumps(meter))
        with pytest.raises(PlanMismatch):
            copy.begin_iteration()
        copy.close()
        assert account.read().spent == 64
        copy.begin_chain()
        assert meter.begin_iteration()

    def test_a_fork_does_not_spend_its_parents_lease(self, temporary):
        account = planned(temporary)
        meter = Meter(account, 1, {UNIT: 1}, {}, 100)
        meter.begin_chain()
        meter.begin_iteration()

        def child():
            with pytest.raises(PlanMismatch, match="in this process"):
                meter.begin_iteration()
            assert meter.started == 0
            assert not meter.frozen
            meter.close()
            before = account.read().spent
            meter.begin_chain()
            return before, sum(meter.begin_iteration() is not None for _ in range(5))

        assert in_child(child) == (64, 5)
        assert account.read().spent == 128
        assert sum(meter.begin_iteration() is not None for _ in range(63)) == 63
        assert account.read().spent == 128

    @pytest.mark.slow
    def test_a_spawned_process_gets_a_fresh_meter(self, ledger):
        account = planned(ledger)
        meter = Meter(account, 1, {UNIT: 1}, {}, 100)
        meter.begin_chain()
        meter.begin_iteration()
        code = (
            "import pickle, sys\n"
            "meter = pickle.load(sys.stdin.buffer)\n"
            "meter.begin_chain()\n"
            "print(sum(meter.begin_iteration() is not None for _ in range(10)))\n"
            "meter.close()\n"
        )
        assert run_python(code, pickle.dumps(meter)).split() == [b"10"]
        assert account.read().spent == 64 + 10

    def test_forking_while_another_thread_charges(self, temporary):
        """A child must not inherit a half-open transaction or a lock nobody will release."""
        account = planned(temporary, cap=10**9)
        stop = threading.Event()
        charged = 0

        def charge():
            nonlocal charged
            while not stop.is_set():
                charged += account.lease(1, 1, 1)

        thread = threading.Thread(target=charge)
        thread.start()
        try:
            for _ in range(15):
                assert in_child(lambda: account.lease(1, 1, 1)) == 1
        finally:
            stop.set()
            thread.join()
        assert account.read().spent == charged + 15
        temporary.verify()

    def test_two_processes_never_pass_the_cap(self, temporary):
        account = planned(temporary, cap=1003)

        def spend():
            total = 0
            while granted := account.lease(1, 2, 3):
                total += granted
            return total

        queue = FORK.SimpleQueue()
        processes = [FORK.Process(target=lambda: queue.put(spend())) for _ in range(2)]
        for process in processes:
            process.start()
        totals = [queue.get() for _ in processes]
        for process in processes:
            process.join()
        assert 2 * sum(totals) == account.read().spent == 1002
        temporary.verify()

    @pytest.mark.slow
    def test_four_writers_share_fairly(self, temporary):
        """Each gets at least 0.8 of a fair share (0.97 is usual, of some 600 charges each)."""
        account = planned(temporary, cap=10**9)
        begin = time.monotonic() + 0.5  # all have started by then

        def spend():
            total = 0
            time.sleep(max(0.0, begin - time.monotonic()))
            while time.monotonic() < begin + 3:
                total += account.lease(1, 1, 1)
            return total

        queue = FORK.SimpleQueue()
        processes = [FORK.Process(target=lambda: queue.put(spend())) for _ in range(4)]
        for process in processes:
            process.start()
        totals = [queue.get() for _ in processes]
        for process in processes:
            process.join()
        assert sum(totals) == account.read().spent
        assert min(totals) >= 0.8 * sum(totals) / 4

    def test_a_slow_processor_is_no_other_process(self, ledger, monkeypatch):
        """Only who had to wait for the lock lets others go first."""
        account, acquire, pauses = planned(ledger), filelock.FileLock.acquire, []

        def slow(self, *args, **kwargs):
            time.sleep(2 * journal._POLL)
            return acquire(self, *args, **kwargs)

        monkeypatch.setattr(filelock.FileLock, "acquire", slow)
        with monkeypatch.context() as patch:
            real = time.sleep
            patch.setattr(time, "sleep", lambda pause: (pauses.append(pause), real(pause)))
            account.lease(1, 1, 1)
            assert pauses == [2 * journal._POLL]  # that of the test


class TestStates:
    """Where chains of an owner's plans are: beside the ledger, and not in it."""

    @pytest.fixture
    def states(self, ledger):
        return States(ledger.path, durable=True)

    def test_all_or_nothing_is_kept_and_found_again(self, ledger, states):
        states.put("a", {}, {0: "zero", 1: "one"})
        states.put("b", {}, {0: "another"})
        with pytest.raises(LedgerError, match="another process"):
            states.put("a", {0: "zero", 1: "old"}, {0: "next", 1: "next"})
        with pytest.raises(LedgerError, match="another process"):
            states.put("a", {}, {1: "next"})
        states.put("a", {0: "zero"}, {0: "next", 2: "two"})
        states.close()
        assert not Path(states.path + "-wal").exists()
        assert os.stat(states.path).st_mode & 0o777 == 0o600
        again = States(ledger.path, durable=True)
        assert again.of("a") == {0: "next", 1: "one", 2: "two"}
        assert again.of("b") == {0: "another"}

    def test_a_plan_that_was_ended_has_no_more_states(self, states):
        states.put("a", {}, {0: "zero"})
        assert states.end("a") == {0: "zero"}
        for chain in (0, 1):
            with pytest.raises(LedgerError, match="was ended"):
                states.put("a", {0: "zero"}, {chain: "next"})
        assert states.end("a") == states.of("a") == {0: "zero"}

    def test_what_was_put_outlives_a_kill(self, ledger):
        def put():
            found = States(ledger.path, durable=True)
            for k in range(5):
                found.put("a", {0: str(k - 1)} if k else {}, {0: str(k)})
            os.kill(os.getpid(), 9)

        process = FORK.Process(target=put)
        process.start()
        process.join()
        assert Path(ledger.path + ".states-wal").stat().st_size > 0
        assert States(ledger.path, durable=True).of("a") == {0: "4"}

    def test_a_copy_without_its_log_is_refused(self, ledger, states, tmp_path):
        for name in ("", ".states", ".states-wal"):
            (tmp_path / f"copy{name}").write_bytes(Path(ledger.path + name).read_bytes())
        (tmp_path / "copy.states-wal").rename(tmp_path / "log")
        with pytest.raises(LedgerError, match="bring both"):
            States(str(tmp_path / "copy"), durable=True)
        (tmp_path / "log").rename(tmp_path / "copy.states-wal")
        States(str(tmp_path / "copy"), durable=True)

    @pytest.mark.slow
    def test_who_does_not_close_leaves_one_file_too(self, ledger):
        """As by Ctrl-C, or where a notebook is started again."""
        put = "import sys\nfrom pymc_dp.privacy.journal import States\n" + (
            "states = States(sys.argv[1], True)\nstates.put('a', {}, {0: 'zero'})"
        )
        subprocess.run([sys.executable, "-c", put, ledger.path], check=True)
        states = States(ledger.path, durable=True)
        states.put("a", {0: "zero"}, {0: "next"})
        del states
        again = States(ledger.path, durable=True)
        assert again.of("a") == {0: "next"}
        for _ in range(2):
            again.close()
        assert not Path(again.path + "-wal").exists()

    @pytest.mark.slow
    def test_who_is_killed_while_it_opens_or_closes_can_begin_again(self, ledger):
        def restart():
            while True:
                States(ledger.path, durable=True).close()

        rng = np.random.default_rng(0)
        for _ in range(20):
            process = FORK.Process(target=restart)
            process.start()
            time.sleep(rng.uniform(0.0, 0.2))
            process.kill()
            process.join()
            States(ledger.path, durable=True).close()

    def test_a_file_that_was_moved_is_not_written(self, ledger, states, tmp_path):
        """Moved to another disk, say: another process may go on with it there."""
        states.put("a", {}, {0: "zero"})
        for name in (".states", ".states-wal"):
            (tmp_path / f"copy{name}").write_bytes(Path(ledger.path + name).read_bytes())
        Path(states.path).unlink()
        with pytest.raises(LedgerError, match="moved or replaced"):
            states.put("a", {0: "zero"}, {0: "next"})
        (tmp_path / "copy.states").rename(states.path)
        with pytest.raises(LedgerError, match="moved or replaced"):
            states.put("a", {0: "zero"}, {0: "next"})

    def test_a_fork_that_ends_leaves_the_log(self, ledger, states):
        """SQLite merges a log into its file, and removes it, when the last process leaves."""
        states.put("a", {}, {0: "zero"})

        def end():
            states.close()
            states._connection.close()

        process = FORK.Process(target=end)
        process.start()
        process.join()
        assert process.exitcode == 0
        states.put("a", {0: "zero"}, {0: "next"})
        states._connection.execute("PRAGMA wal_checkpoint")
        Path(ledger.path + "2.states").write_bytes(Path(states.path).read_bytes())
        with pytest.raises(LedgerError, match="bring both"):
            States(ledger.path + "2", durable=True)
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), 9)
        os.waitpid(pid, 0)
        shown = f"import sqlite3; print(*sqlite3.connect({states.path!r}).execute(" + (
            "'SELECT state FROM states'))"
        )
        found = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True)
        assert found.stdout == "('next',)\n"

    def test_what_fails_leaves_nothing(self, states, monkeypatch):
        states.put("a", {}, {0: "zero"})
        with pytest.raises(LedgerError):
            states.put("a", {0: "zero"}, {0: "next", 1: object()})
        assert states.of("a") == {0: "zero"}
        states.put("a", {0: "zero"}, {0: "next"})

    def test_a_file_that_is_no_database_is_named(self, ledger):
        Path(ledger.path + ".states").write_text("not a database, but long enough to be one")
        with pytest.raises(LedgerError, match=r"\.states.*damaged"):
            States(ledger.path, durable=True)
