"""A process killed at any moment never began more iterations than the ledger charged."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time

import pytest

from pymc_dp.errors import PlanMismatch
from pymc_dp.privacy import meter as metering
from pymc_dp.privacy.account import Account
from pymc_dp.privacy.accounting import GaussianEvent
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.privacy.meter import Meter

FORK = multiprocessing.get_context("fork")
COST, START = 3, 11
UNIT = GaussianEvent("gradient", 2.0**20)  # one unit


def spend(meter, report):
    """Report each iteration by one byte in a file before anything else is done for it.

    What `os.write` handed to the kernel survives the kill, so no begun iteration is missed.
    """
    meter.begin_chain()
    os.write(report, b"s")
    while meter.begin_iteration():
        os.write(report, b"i")
    os._exit(3)  # the plan is longer than the child lives


@pytest.fixture(params=["temporary", "on disk"])
def ledger(request, tmp_path):
    if request.param == "temporary":
        return Ledger.temporary()
    return Ledger.create(tmp_path / "ledger")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(metering, "LEASE_SECONDS", 0.0)
    monkeypatch.setattr(metering, "COMMITS_PER_LEASE", 0)


def kill_chains(ledger, folder, kills, meter_class=Meter):
    """Kill chains at random moments within 60 ms of their first charge.

    Returns
    -------
    list of (int, int)
        Units that the iterations begun by each chain cost, and units that the ledger charged.
    """
    account = Account.open(
        ledger,
        2**50,
        epsilon=1.0,
        delta=1e-6,
        neighboring="replace_one",
        unit=None,
        public_payload={},
    )
    account.record_plan(1, {"chains": kills})
    account.begin_run(1, max_runs=1, run_cost=0)
    meter = meter_class(account, 1, {UNIT: COST}, {UNIT: START}, 10**9)
    moments = random.Random(kills)
    outcomes = []
    for kill in range(kills):
        before = account.read().spent
        path = folder / f"{kill}"
        report = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        child = FORK.Process(target=spend, args=(meter, report))
        child.start()
        os.close(report)
        deadline = time.monotonic() + 30
        while path.stat().st_size == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.06))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        begun = path.read_bytes()
        assert begun[:1] == b"s"
        outcomes.append((START + COST * begun.count(b"i"), account.read().spent - before))
    assert account.read().spent == sum(charged for _, charged in outcomes)
    ledger.verify()
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("smallest", [1, 64])
def test_kill_never_undercounts(ledger, tmp_path, monkeypatch, small_blocks, smallest):
    """Over 50 kills in the four cases together.

    With blocks of one iteration nearly all moments lie within a commit; with blocks of 64 many lie
    between two.
    """
    monkeypatch.setattr(metering, "SMALLEST_LEASE", smallest)
    for used, charged in kill_chains(ledger, tmp_path, kills=13):
        assert used <= charged <= used + COST * smallest  # no more is lost than one block


class LateMeter(Meter):
    """A planted fault: an iteration begins, and is paid for when the next one begins."""

    late = 0

    def begin_iteration(self):
        self.late += 1
        return self.late == 1 or super().begin_iteration()


def test_a_late_charge_is_found(tmp_path, monkeypatch, small_blocks):
    monkeypatch.setattr(metering, "SMALLEST_LEASE", 1)
    outcomes = kill_chains(Ledger.temporary(), tmp_path, 6, LateMeter)
    assert any(used > charged for used, charged in outcomes)


def test_a_killed_chain_keeps_its_place(tmp_path):
    """The iterations of a killed chain stay charged, and its number is not given out again."""
    ledger = Ledger.create(tmp_path / "ledger")
    account = Account.open(
        ledger,
        200,
        epsilon=1.0,
        delta=1e-6,
        neighboring="replace_one",
        unit=None,
        public_payload={},
    )
    account.record_plan(1, {"chains": 2})
    account.begin_run(1, max_runs=1, run_cost=200)
    meter = Meter(account, 1, {UNIT: 1}, {}, 100)

    def child():
        meter.begin_chain()
        meter.begin_iteration()
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert account.read().spent == 64
    meter.begin_chain()
    assert all(meter.begin_iteration() for _ in range(100))
    assert account.read().spent == 164
    with pytest.raises(PlanMismatch, match="2 chains"):
        meter.begin_chain()
