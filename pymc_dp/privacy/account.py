"""What one budget spends in a ledger: its plans, runs and chains, charges and one-off releases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from pymc_dp.base.checks import check_delta, check_epsilon, check_integer, check_neighboring
from pymc_dp.errors import BudgetExceeded, LedgerError, PlanMismatch
from pymc_dp.privacy import subsampled
from pymc_dp.privacy.accounting import (
    BATCHES,
    MU2_UNIT,
    GaussianEvent,
    batch_event,
    epsilon_from_mu,
    mu_from_units,
)
from pymc_dp.privacy.journal import SPENDING, Entry, Transaction, as_stored
from pymc_dp.privacy.ledger import Ledger, Standing, reserved, standing

PREPARATION = "preparation"
"""What ``payload["kind"]`` of a plan of one-off releases is."""
STATISTIC = "release_statistic"
"""What ``payload["sampler"]`` of a published statistic is."""
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


class Spending(NamedTuple):
    """An amount of privacy loss, in two currencies."""

    epsilon: float  # at the budget's delta
    gdp_mu2: float  # squared Gaussian-DP mu, which adds up over releases


class Release(NamedTuple):
    """A one-off release that was charged, made and kept."""

    label: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Account:
    """One account of a ledger; plans have numbers that are unique within it. It holds no figure:
    each method reads the file, and what it writes is committed when it returns.
    """

    ledger: Ledger
    number: int

    @classmethod
    def open(
        cls,
        ledger: Ledger,
        cap: int,
        *,
        epsilon: float,
        delta: float,
        neighboring: str,
        unit: str | None,
        public_payload: Mapping[str, Any],
        resume: bool = False,
    ) -> Account:
        """Reserve `cap` ledger units for one budget; the payload holds further public facts.

        With `resume`, the newest account that is open and promises exactly the same is resumed, if
        there is one, and nothing is reserved.
        """
        cap = check_integer("cap", cap, minimum=1)
        if cap > _LARGEST:
            raise ValueError("cap is more than a ledger can count; use an epsilon up to 1e6")
        epsilon, delta = check_epsilon(epsilon), check_delta(delta)
        check_neighboring(neighboring)
        if neighboring != ledger.neighboring:
            raise LedgerError(
                f"the budget protects neighboring={neighboring!r} but the ledger {ledger.path} "
                f"counts {ledger.neighboring!r}; use the same relation, or another ledger"
            )
        limit = ledger.total_cap
        payload = {
            "epsilon": epsilon,
            "delta": delta,
            "neighboring": neighboring,
            "unit": unit,
            "public": dict(public_payload),
        }
        with ledger.journal.transaction() as transaction:
            for entry in transaction.rows("account", order="seq DESC") if resume else ():
                same = entry.payload == as_stored(payload)
                if same and not standing(transaction, entry.account).closed:
                    return cls(ledger, entry.account)
            earlier = transaction.newest("account")
            if earlier is not None and earlier.payload["unit"] != unit:
                raise LedgerError(
                    f"the budget protects one {unit} but the ledger {ledger.path} counts losses of "
                    f"one {earlier.payload['unit']}; losses of different units do not add up. Use "
                    "the same privacy_unit, or another ledger"
                )
            fixed = transaction.newest(BATCHES)
            if fixed is not None and fixed.payload:
                raise LedgerError(_ALONE)
            taken = reserved(transaction)
            if limit is not None and taken + cap > limit:
                wanted, rest, whole = (
                    _epsilon(units, cast("float", ledger.delta))
                    for units in (cap, limit - taken, limit)
                )
                raise BudgetExceeded(
                    f"the ledger {ledger.path} has an overall cap of {whole} at delta "
                    f"{ledger.delta:g}, of which {rest} is not reserved; the budget asks for "
                    f"{wanted}. Use a smaller epsilon, or close a budget that has not spent its "
                    "share, with budget.account.close()"
                )
            number = transaction.count("account") + 1
            transaction.append("account", number, cap, payload)
        return cls(ledger, number)

    def twins(self) -> list[int]:
        """Open accounts beside this one that a process which is started again would resume."""
        with self.ledger.journal.transaction() as transaction:
            return [
                entry.account
                for entry in transaction.rows("account")
                if "n_public" in entry.payload["public"]
                and entry.account != self.number
                and not standing(transaction, entry.account).closed
            ]

    def close(self) -> None:
        """Release the unspent part of the reservation; nothing can be charged any more."""
        with self.ledger.journal.transaction() as transaction:
            if not standing(transaction, self.number).closed:
                transaction.append("close", self.number, 0, {})

    def read(self) -> Standing:
        """How the account stands."""
        with self.ledger.journal.transaction() as transaction:
            return standing(transaction, self.number)

    def entries(self) -> Iterator[Entry]:
        """The account's own rows, oldest first."""
        return (entry for entry in self.ledger.entries() if entry.account == self.number)

    def spent(self) -> Spending:
        """What was charged, unused parts of open leases included."""
        info, found = self.read(), self.batches()
        beside = info.spent if found is None else info.spent - found["reserved"]
        return Spending(epsilon_of(info, beside, found), info.spent / MU2_UNIT)

    def remaining(self) -> Spending:
        """What may still be charged."""
        info = self.read()
        return Spending(epsilon_of(info, info.remaining), info.remaining / MU2_UNIT)

    def charges(self) -> Iterator[tuple[Entry, dict[str, Any], dict[GaussianEvent, int]]]:
        """Row, payload of its plan, and releases by event of every charge, oldest first. Numbers
        are negative where the unused part of a lease was returned. Releases on batches are not
        among them: see `batches`.
        """
        plans: dict[int, dict[str, Any]] = {}
        for entry in self.entries():
            if entry.plan is None:
                continue
            if entry.kind == "plan":
                plans[entry.plan] = entry.payload
            elif entry.kind == "charge":
                event = GaussianEvent.from_dict(entry.payload)
                yield entry, plans[entry.plan], {event: 1}
            elif entry.kind in ("lease", "return"):
                plan = plans[entry.plan]
                iterations = entry.payload["iterations"] * (-1 if entry.kind == "return" else 1)
                counts = _counts_of(plan, entry.payload["cost"])
                events = {name: GaussianEvent.from_dict(plan["events"][name]) for name in counts}
                yield entry, plan, {events[name]: n * iterations for name, n in counts.items()}

    # -- plans, runs, chains --------------------------------------------------------------------

    def record_plan(self, plan_id: int, payload: Mapping[str, Any]) -> None:
        """Record a plan before anything is done for it; the same plan twice is recorded once. A run
        has its number of chains as ``payload["chains"]``. A plan of one-off releases has
        ``payload["kind"] == "preparation"``: it can be charged (`charge`) but not run.
        """
        plan_id = check_integer("plan_id", plan_id, minimum=0)
        if payload.get("kind") != PREPARATION:
            check_integer("payload['chains']", payload.get("chains"), minimum=1)
        with self.ledger.journal.transaction() as transaction:
            self._open(transaction)
            known = transaction.newest("plan", account=self.number, plan=plan_id)
            if known is None:
                transaction.append("plan", self.number, 0, payload, plan_id)
            elif known.payload != as_stored(payload):
                raise LedgerError(
                    f"account {self.number} already has another plan number {plan_id}; give the "
                    "new plan a new number"
                )

    def plan(self, plan_id: int) -> dict[str, Any]:
        """The payload of a recorded plan."""
        with self.ledger.journal.transaction() as transaction:
            return self._plan(transaction, plan_id)

    def find_plan(self, facts: Mapping[str, Any]) -> int | None:
        """The newest unfinished plan whose payload has all entries of `facts`, or None."""
        wanted = as_stored(facts)
        with self.ledger.journal.transaction() as transaction:
            finished = {row.plan for row in transaction.rows("finish", account=self.number)}
            for row in transaction.rows("plan", account=self.number, order="seq DESC"):
                if row.plan not in finished and wanted.items() <= row.payload.items():
                    return row.plan
        return None

    def finish_plan(self, plan_id: int) -> None:
        """Record that a plan has made all its releases: it is not charged or found again."""
        with self.ledger.journal.transaction() as transaction:
            self._plan(transaction, plan_id)
            if not transaction.count("finish", account=self.number, plan=plan_id):
                transaction.append("finish", self.number, 0, {}, plan_id)

    def begin_run(
        self,
        plan_id: int,
        *,
        max_runs: int,
        run_cost: int,
        batches: Mapping[str, Any] | None = None,
    ) -> int:
        """Authorise one run (one call of ``pm.sample``) of a plan and return its number, from 0.

        Nothing is charged: the chains charge as they go. A run that could not be paid to its end
        (`run_cost` at most) is refused before any work. A run that was interrupted before any of
        its chains began has released nothing: it is authorised again and counted once. `batches`
        are the releases on batches that it will make, as they were fixed and charged.
        """
        max_runs = check_integer("max_runs", max_runs, minimum=1)
        run_cost = check_integer("run_cost", run_cost, minimum=0)
        with self.ledger.journal.transaction() as transaction:
            info = self._open(transaction)
            plan = self._plan(transaction, plan_id)
            if plan.get("kind") == PREPARATION:
                raise PlanMismatch(f"plan {plan_id} is a preparation, which no chain can run")
            if batches is not None:
                if self._batches(transaction) != as_stored(batches):
                    raise PlanMismatch(
                        "the releases on batches of this run are not those that were fixed for the "
                        "budget; build the step again"
                    )
                if self._begun_on_batches(transaction) is not None:
                    raise BudgetExceeded(
                        "the releases on batches that were planned under this budget have been "
                        "made; another run needs a new budget"
                    )
            runs = transaction.count("run", account=self.number, plan=plan_id)
            newest = transaction.newest("run", account=self.number, plan=plan_id)
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
            transaction.append("run", self.number, 0, facts, plan_id)
            return runs

    def begin_chain(self, plan_id: int) -> int:
        """Register a chain of the newest run and return its number within the run, from 0."""
        with self.ledger.journal.transaction() as transaction:
            plan = self._plan(transaction, plan_id)
            run = transaction.newest("run", account=self.number, plan=plan_id)
            if run is None:
                raise PlanMismatch(
                    "a chain was started but no run was authorised; sample through pm.sample or "
                    "dp.sample, which check the plan first"
                )
            if run.payload.get("batches") and (
                self._begun_on_batches(transaction) not in (None, plan_id)
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
            transaction.append("chain", self.number, 0, payload, plan_id)
        return number

    # -- charges --------------------------------------------------------------------------------

    def fix_batches(self, payload: Mapping[str, Any] | None) -> None:
        """Fix, and charge, the releases on batches that the account will make, before all others.

        As long as nothing else was charged, other releases replace them, and None takes them back.
        After that they are final, whether they will be made or not: nobody can choose between them
        and others, or Gaussian releases in their place. This makes their accounting valid beside a
        filter (`pymc_dp.privacy.subsampled.room_beside`). LedgerError if there are other accounts,
        or a cap of the ledger at another delta: the guarantee holds at this account's delta alone.
        """
        limit, delta = self.ledger.total_cap, self.ledger.delta
        new = {} if payload is None else as_stored(payload)
        with self.ledger.journal.transaction() as transaction:
            info = self._open(transaction)
            old = self._batches(transaction)
            if new == old:
                return
            if reserved(transaction) > info.cap or (limit is not None and delta != info.delta):
                raise LedgerError(_ALONE)
            if transaction.count("charge", "lease", "run", account=self.number):
                raise LedgerError(_ANOTHER if old else _LATE)
            cost = new.get("reserved", 0)
            if cost > info.cap:
                raise BudgetExceeded("the releases on batches cost more than the budget has")
            transaction.append(BATCHES, self.number, cost - old.get("reserved", 0), new)

    def batches(self) -> dict[str, Any] | None:
        """The releases on batches that were fixed and charged, or None."""
        with self.ledger.journal.transaction() as transaction:
            return self._batches(transaction) or None

    def lease(self, plan_id: int, cost: int, want: int) -> int:
        """Charge up to `want` iterations of `cost` units each; the number charged, 0 if none can be
        paid.
        """
        cost = check_integer("cost", cost, minimum=1)
        want = check_integer("want", want, minimum=0)
        with self.ledger.journal.transaction() as transaction:
            granted = min(want, standing(transaction, self.number).remaining // cost)
            if granted > 0:
                payload = {"cost": cost, "iterations": granted}
                transaction.append("lease", self.number, granted * cost, payload, plan_id)
        return granted

    def lease_run(self, plan_id: int, parts: Sequence[tuple[int, int]]) -> None:
        """Charge all of a run at once: for each part, a number of answers at a cost. A run that is
        charged is not charged again. BudgetExceeded, with nothing charged, if it cannot be paid.
        """
        with self.ledger.journal.transaction() as transaction:
            if transaction.count("lease", account=self.number, plan=plan_id):
                return
            info = self._open(transaction)
            if sum(cost * number for cost, number in parts) > info.remaining:
                raise BudgetExceeded("What remains of the budget does not pay for this plan.")
            for cost, number in parts:
                if cost * number:
                    payload = {"cost": cost, "iterations": number}
                    transaction.append("lease", self.number, cost * number, payload, plan_id)

    def begin_chains(self, plan_id: int, chains: Iterable[int]) -> None:
        """Register chains of a plan that was charged as a whole. LedgerError if it was ended."""
        with self.ledger.journal.transaction() as transaction:
            if transaction.count("finish", account=self.number, plan=plan_id):
                raise LedgerError("the plan was ended")
            for chain in chains:
                transaction.append("chain", self.number, 0, {"chain": chain}, plan_id)

    def chains(self, plan_id: int) -> tuple[str, set[int]]:
        """Hash of the row of a plan that was charged as a whole, and its chains that have begun."""
        with self.ledger.journal.transaction() as transaction:
            plan = transaction.newest("plan", account=self.number, plan=plan_id)
            begun = transaction.rows("chain", account=self.number, plan=plan_id)
        assert plan is not None
        return plan.hash, {entry.payload["chain"] for entry in begun}

    def stages(self, plan_id: int) -> set[str]:
        """How far a plan has come: "run", "lease" when it was charged, "finish" when it ended."""
        with self.ledger.journal.transaction() as transaction:
            rows = transaction.rows("run", "lease", "finish", account=self.number, plan=plan_id)
            return {entry.kind for entry in rows}

    def unended(self) -> list[int]:
        """Plans that were charged as a whole and not ended."""
        with self.ledger.journal.transaction() as transaction:
            charged, ended, begun = (
                transaction.rows(kind, account=self.number) for kind in ("lease", "finish", "chain")
            )
        # chains of a run (`begin_run`) charge for themselves, and return what is unused
        others = {e.plan for e in (*ended, *(e for e in begun if "run" in e.payload))}
        return sorted({e.plan for e in charged if e.plan is not None} - others)

    def give_back(self, plan_id: int, cost: int, unused: int) -> None:
        """Return leased iterations that were never begun; LedgerError if fewer were charged."""
        cost = check_integer("cost", cost, minimum=1)
        unused = check_integer("unused", unused, minimum=0)
        with self.ledger.journal.transaction() as transaction:
            self._give_back(transaction, plan_id, cost, unused)

    def _give_back(self, transaction: Transaction, plan_id: int, cost: int, unused: int) -> None:
        leased = transaction.total("lease", "return", account=self.number, plan=plan_id)
        if unused * cost > leased:
            raise LedgerError(
                f"{unused} iterations were to be given back to plan {plan_id} of account "
                f"{self.number}, which was charged for fewer"
            )
        if unused > 0:
            payload = {"cost": cost, "iterations": unused}
            transaction.append("return", self.number, -unused * cost, payload, plan_id)

    def end_run(self, plan_id: int, unused: Iterable[tuple[int, int]]) -> None:
        """End a run that was charged as a whole, and return what is unused of it: costs, and how
        many of each.
        """
        with self.ledger.journal.transaction() as transaction:
            if transaction.count("finish", account=self.number, plan=plan_id):
                return
            for cost, number in unused:
                if cost:
                    self._give_back(transaction, plan_id, cost, number)
            transaction.append("finish", self.number, 0, {}, plan_id)

    def charge(self, plan_id: int, event: GaussianEvent) -> int:
        """Charge one release of a recorded plan and return its cost; then a record may be touched.
        The cost is the event's own, so it cannot differ from the recorded noise multiplier; the
        event's `mechanism` is the label under which the values are kept.
        """
        with self.ledger.journal.transaction() as transaction:
            info = self._open(transaction)
            self._plan(transaction, plan_id)
            if transaction.count("finish", account=self.number, plan=plan_id):
                raise LedgerError(
                    f"plan {plan_id} of account {self.number} is finished; record a new plan for "
                    "new releases"
                )
            if event.cost > info.remaining:
                raise BudgetExceeded(
                    f"the release {event.mechanism!r} needs {_epsilon(event.cost, info.delta)}, "
                    f"but only {_epsilon(info.remaining, info.delta)} of the budget remains; no "
                    "record was read for it"
                )
            transaction.append("charge", self.number, event.cost, event.to_dict(), plan_id)
        return event.cost

    def keep(self, plan_id: int, label: str, values: Mapping[str, Any], number: int) -> None:
        """Keep, as JSON, the released values of the plan's newest charge, whose `mechanism` was
        `label`. `number` is how many releases of the plan were kept before: another process may
        keep one meanwhile.
        """
        with self.ledger.journal.transaction() as transaction:
            self._plan(transaction, plan_id)
            before = transaction.count("release", account=self.number, plan=plan_id)
            if before != number:
                raise LedgerError(
                    f"plan {plan_id} of account {self.number} has kept {before} releases, not "
                    f"{number}: two processes are preparing the same plan. Build the step in one "
                    "of them"
                )
            newest = transaction.newest("charge", "release", account=self.number, plan=plan_id)
            if newest is None or newest.payload.get("mechanism") != label:
                raise LedgerError(f"a release {label!r} was to be kept that was not charged")
            kept = {"label": label, "values": dict(values)}
            transaction.append("release", self.number, 0, kept, plan_id)

    def kept(self, plan_id: int) -> list[Release]:
        """The releases of a plan that were kept, oldest first."""
        with self.ledger.journal.transaction() as transaction:
            rows = transaction.rows("release", account=self.number, plan=plan_id)
        return [Release(row.payload["label"], row.payload["values"]) for row in rows]

    def charged(self, plan_id: int) -> int:
        """Ledger units that a plan was charged, less what its chains gave back."""
        with self.ledger.journal.transaction() as transaction:
            return transaction.total(*SPENDING, account=self.number, plan=plan_id)

    def unkept(self, plan_id: int) -> int:
        """Ledger units charged for one-off releases of a plan that were not kept."""
        with self.ledger.journal.transaction() as transaction:
            rows = transaction.rows("charge", "release", account=self.number, plan=plan_id)
        total, last = 0, 0
        for row in rows:  # a release was paid for by the charge before it
            total += row.amount if row.kind == "charge" else -last
            last = row.amount
        return total

    # -- read within one transaction ------------------------------------------------------------

    def _open(self, transaction: Transaction) -> Standing:
        """How the account stands; LedgerError if it was closed."""
        info = standing(transaction, self.number)
        if info.closed:
            raise LedgerError(f"account {self.number} of this ledger was closed; make a new budget")
        return info

    def _plan(self, transaction: Transaction, plan_id: int) -> dict[str, Any]:
        entry = transaction.newest("plan", account=self.number, plan=plan_id)
        if entry is None:
            raise LedgerError(f"account {self.number} of this ledger has no plan number {plan_id}")
        return entry.payload

    def _batches(self, transaction: Transaction) -> dict[str, Any]:
        """The releases on batches that were fixed; empty if there are none."""
        entry = transaction.newest(BATCHES, account=self.number)
        return entry.payload if entry else {}

    def _begun_on_batches(self, transaction: Transaction) -> int | None:
        """The plan whose chains make the releases on batches (charged once, for one run), or
        None.
        """
        for run in transaction.rows("run", account=self.number):
            if run.payload.get("batches") and _chains_of(transaction, run):
                return run.plan
        return None


def _chains_of(transaction: Transaction, run: Entry) -> int:
    """How many chains have begun since a run of a plan was authorised."""
    assert run.plan is not None
    return transaction.count("chain", account=run.account, plan=run.plan, after=run.seq)


def epsilon_of(promise: Any, units: int, batches: Mapping[str, Any] | None = None) -> float:
    """Epsilon, at the delta of a `promise` (a budget, or how its account stands), of a cost in
    ledger units and of the releases on batches that `Account.batches` says.
    """
    if batches is None:
        return epsilon_from_mu(mu_from_units(units), promise.delta) if units else 0.0
    plan = (batch_event(batches["event"]), batches["releases"])
    found = subsampled.epsilon_of([plan], units, promise.delta, promise.neighboring)
    # the room is rounded down, so this may pass the budget's epsilon by a rounding error
    return min(found, promise.epsilon)


def _counts_of(plan: dict[str, Any], cost: int) -> dict[str, int]:
    """Which releases a charge of `cost` pays for: an iteration or the start of a chain."""
    costs = {name: GaussianEvent.from_dict(event).cost for name, event in plan["events"].items()}
    for key in ("per_iteration", "at_start"):
        counts: dict[str, int] = plan[key]
        if counts and sum(costs[name] * count for name, count in counts.items()) == cost:
            return counts
    return {}


def _epsilon(units: int, delta: float) -> str:
    """Ledger units in words."""
    return f"epsilon = {epsilon_from_mu(mu_from_units(units), delta):.4g}"
