"""What pays for answers: receipts are made here alone, after a charge that is committed."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from pymc_dp.base.checks import check_integer
from pymc_dp.errors import PlanMismatch, PrivacyError
from pymc_dp.privacy import noise
from pymc_dp.privacy.account import Account
from pymc_dp.privacy.accounting import BatchEvent, GaussianEvent
from pymc_dp.privacy.answer import Receipt
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.privacy.plan import Plan

SMALLEST_LEASE = 64  # iterations
LEASE_SECONDS = 0.5
COMMITS_PER_LEASE = 200  # iterations of one lease last this many commits: 1/2 % of the time


Answers: TypeAlias = Mapping[GaussianEvent, int] | Mapping[BatchEvent, int]
"""How many answers of each kind are made at a time."""


def noise_is_secure(ledger: Ledger) -> bool:
    """Whether noise is secure; PrivacyError if it is not and the ledger outlives this process."""
    secure = not noise.is_insecure()
    if not secure and not ledger.is_temporary:
        raise PrivacyError("Insecure test noise is refused together with a persistent ledger.")
    return secure


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay a keyboard interrupt to the end of the block (one pass over the records). So what was
    charged is also released, and kept.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is None:  # set by what Python is embedded in
        yield
        return
    came = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came and callable(handler):
        handler(*came[0])
    elif came and handler == signal.SIG_DFL:
        signal.raise_signal(signal.SIGINT)


def pay(account: Account, plan_id: int, event: GaussianEvent) -> Receipt:
    """Charge one release of a recorded plan."""
    account.charge(plan_id, event)
    return _receipt({event: 1})


def _receipt(answers: Answers) -> Receipt:
    return Receipt([(e.mechanism, e.noise_multiplier, count) for e, count in answers.items()])


def _cost(answers: Answers) -> int:
    return sum(event.cost * count for event, count in answers.items())  # type: ignore


def pay_run(account: Account, plan: Plan) -> None:
    """Charge all chains of one run of a recorded plan together, as one who was asked for them does.
    Once: again, it changes nothing. BudgetExceeded, with nothing charged, if it cannot be paid.
    """
    parts = [(plan.iteration_cost, plan.chains * plan.iterations), (plan.start_cost, plan.chains)]
    account.lease_run(plan.plan_id, parts)


class PaidChain:
    """Receipts of one chain of a run that `pay_run` has charged: for its start, and for each of its
    iterations when the one before is used up.

    `state`: iterations begun, and answers of each mechanism that are left of the last one, or of
    the start; None for a chain that was not begun.

    *Guarantee.* Together they pay for what was charged for the chain, and not more. *Assumptions.*
    A `state` is that of the same chain when its last answer was made, from the ledger.
    """

    def __init__(self, plan: Plan, state: tuple[int, dict[str, int]] | None = None) -> None:
        self._plan = plan
        self.begun, left = (0, plan.at_start) if state is None else state
        most = plan.per_iteration if self.begun else plan.at_start
        if self.begun > plan.iterations or any(n > most.get(m, 0) for m, n in left.items()):
            raise PrivacyError("The state of a chain is not one of its plan.")
        self.receipt = _receipt(plan.answers(left))

    @property
    def state(self) -> tuple[int, dict[str, int]]:
        """As it was given."""
        return self.begun, self.receipt.left

    def pays(self, mechanism: str) -> Receipt:
        """A receipt for an answer; PrivacyError if the chain has had all that was agreed."""
        if not self.receipt.left.get(mechanism):
            if self.begun >= self._plan.iterations:
                raise PrivacyError("This chain has had all the answers that were agreed.")
            self.begun += 1
            self.receipt = _receipt(self._plan.answers(self._plan.per_iteration))
        return self.receipt


class Meter:
    """Pays for the iterations of one chain, in blocks, from one account of a ledger.

    `per_iteration` and `at_start` are the answers that one iteration, and the beginning of a chain,
    make. `iterations` (draws and tune) are never exceeded. `prepaid`: all answers were paid for
    together, as those about batches are.

    *Guarantee.* `begin_iteration` returns a receipt only for iterations whose charge is committed,
    whenever the process is killed, and never in another process than the one that called
    `begin_chain`: a fork, a copy or a pickle of a meter holds no paid iterations. Unused iterations
    come back only through `close`. *Assumptions.* One chain uses the meter at a time, in the thread
    that began it; another thread is refused while that one lives and its chain has iterations left.
    *Weaknesses.* A killed chain loses what is left of its block: at most the next power of two of
    64 iterations, half a second, or 200 commits, whichever is largest. So charging takes less than
    1 % of the time of iterations of 1 ms and more.
    """

    def __init__(
        self,
        account: Account,
        plan_id: int,
        per_iteration: Answers,
        at_start: Answers,
        iterations: int,
        prepaid: bool = False,
    ) -> None:
        self.account = account
        self.plan_id = plan_id
        self.per_iteration, self.at_start = dict(per_iteration), dict(at_start)
        self.iteration_cost = 0 if prepaid else _cost(self.per_iteration)
        self.start_cost = 0 if prepaid else _cost(self.at_start)
        self.iterations = check_integer("iterations", iterations, minimum=0)
        self._beginning = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._process: int | None = None  # which process holds the block; None when closed
        self._thread = threading.current_thread()  # which thread of it
        self._paid = 0  # iterations of the block not begun yet
        self._block = 0  # size of the block
        self._unleased = self.iterations  # planned and in no block yet
        self._frozen = False
        self._commit_seconds = 0.0
        self._block_start = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._beginning = threading.Lock()
        self._reset()

    @property
    def frozen(self) -> bool:
        """Whether the chain may not touch the records again: it could not be paid for."""
        return self._is_mine() and self._frozen

    @property
    def started(self) -> int:
        """Iterations begun by the current chain in this process."""
        return self.iterations - self._unleased - self._paid if self._is_mine() else 0

    def refuse_other_threads(self) -> None:
        """Raise `PlanMismatch` if another thread of this process is at a chain."""
        if self._is_elsewhere():
            raise PlanMismatch(
                "another thread is sampling with this step. Nothing was spent. Build a step for "
                "each thread, or sample in one after the other"
            )

    def begin_chain(self) -> Receipt:
        """Register a chain, and pay for its start. If the start cannot be paid, the chain is
        `frozen` from the beginning, and the receipt is for nothing. A chain that this process has
        not closed is closed first.
        """
        with self._beginning:
            self.refuse_other_threads()
            self.close()
            self._reset()
            self.account.begin_chain(self.plan_id)
            if self.start_cost > 0:
                paid = self.account.lease(self.plan_id, self.start_cost, 1)
                self._frozen = paid == 0
            self._process = os.getpid()
        return _receipt({} if self._frozen else self.at_start)

    def begin_iteration(self) -> Receipt | None:
        """Pay for the next iteration; None means frozen for good."""
        if not self._is_mine():
            self.refuse_other_threads()
            raise PlanMismatch(
                "an iteration was asked for but no chain was begun in this process and thread; "
                "sample through pm.sample, which begins every chain"
            )
        if self._paid <= 0 and not self._lease():
            return None
        self._paid -= 1
        return _receipt(self.per_iteration)

    def close(self) -> None:
        """Give back the iterations of the block that were not begun; harmless when repeated. Those
        of another thread that is at its chain stay with it.
        """
        if self._is_elsewhere():
            return
        unused = self._paid if self._is_mine() else 0
        # Forget the block first: if giving it back fails, it stays charged but cannot be used.
        self._process, self._paid = None, 0
        if unused > 0 and self.iteration_cost > 0:
            self.account.give_back(self.plan_id, self.iteration_cost, unused)

    def _is_mine(self) -> bool:
        here = self._thread is threading.current_thread() or not self._thread.is_alive()
        return self._process == os.getpid() and here

    def _is_elsewhere(self) -> bool:
        """Whether another thread of this process has iterations to make."""
        unmade = self._paid > 0 or (self._unleased > 0 and not self._frozen)
        return self._process == os.getpid() and not self._is_mine() and unmade

    def _lease(self) -> bool:
        want = min(self._lease_size(), self._unleased)
        if self.iteration_cost == 0:
            self._paid, self._unleased = self._unleased, 0
            return self._paid > 0
        if self._frozen or want == 0:
            self._frozen = True
            return False
        begin = time.perf_counter()
        granted = self.account.lease(self.plan_id, self.iteration_cost, want)
        self._block_start = time.perf_counter()
        self._commit_seconds = self._block_start - begin
        self._block = self._paid = granted
        self._unleased -= granted
        self._frozen = granted == 0
        return granted > 0

    def _lease_size(self) -> int:
        if self._block == 0:
            return SMALLEST_LEASE
        seconds = max((time.perf_counter() - self._block_start) / self._block, 1e-9)
        length = max(LEASE_SECONDS, COMMITS_PER_LEASE * self._commit_seconds)
        size = max(SMALLEST_LEASE, math.ceil(length / seconds))
        # A power of two: sizes are in the ledger, and should not tell times to the microsecond.
        return 1 << (size - 1).bit_length()
