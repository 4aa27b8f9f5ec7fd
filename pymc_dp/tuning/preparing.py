"""The life of a private preparation: begun, shown, resumed where it was interrupted, ended."""

from __future__ import annotations

import hashlib
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
from pymc.model import Model
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pymc_dp.base import threads
from pymc_dp.base.checks import check_share, warn
from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import BudgetExceeded, PrivacyError
from pymc_dp.privacy.account import PREPARATION
from pymc_dp.privacy.accounting import MU2_UNIT
from pymc_dp.privacy.preparation import Preparation, Unpayable
from pymc_dp.records.ancestry import is_data
from pymc_dp.records.units import private_observed
from pymc_dp.rows.contributions import made_up_norms
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.forecast import forecast_of
from pymc_dp.tuning.model_parts import ModelParts
from pymc_dp.tuning.releases import Shares

PREPARES = " preparation"
"""Ending of the names of plans of preparations."""
_log = logging.getLogger("pymc.pymc_dp")  # shown among the messages of PyMC
#: Parts of the rest for the chains that may be gone on resumption without a warning, a refusal.
_GONE, _TOO_MUCH_GONE = 0.05, 0.9

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Version:
    """Data and priors as they were at some time.

    Whether private data are the same is told by what was done (``pm.set_data`` makes another
    version), not by values: a result shows whether a preparation was resumed, and could tell
    whether a record changed. `public` is a digest of public data and priors; `private` gives the
    private arrays, as long as anybody holds them.
    """

    public: bytes
    private: list[Callable[[], Any]]

    def is_that_of(self, other: Version) -> bool:
        """Whether data and priors are the same."""
        if self.public != other.public or len(self.private) != len(other.private):
            return False
        pairs = zip(self.private, other.private, strict=True)
        return all(a() is not None and a() is b() for a, b in pairs)


def private_arrays(model: Model, public: Iterable[str]) -> list[Callable[[], Any]]:
    """References to the arrays behind the private observed variables, in a fixed order."""
    public = set(public)
    observed = private_observed(model, public)
    roots = [*observed, *(model.rvs_to_values[rv] for rv in observed)]
    lengths = set(model.dim_lengths.values())  # new labels are no new data
    found: dict[int, Any] = {}
    for source in ancestors(roots):
        if isinstance(source, Constant):
            array = source.data
        elif is_data(source) and source.name not in public and source not in lengths:
            array = source.container.storage[0]
        else:
            continue
        found.setdefault(id(array), array)
    return [_reference(array) for array in found.values() if array is not None]


def _reference(array: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(array)
    except TypeError:  # a number
        return lambda: array


def unfinished_preparations(budget: PrivacyBudget) -> list[tuple[int, dict[str, Any]]]:
    """Plan ids and payloads of the preparations that were not finished, newest first."""
    mine = list(budget.account.entries())
    finished = {e.plan for e in mine if e.kind == "finish"}
    return [
        (e.plan, e.payload)
        for e in reversed(mine)
        if e.kind == "plan"
        and e.plan is not None
        and e.plan not in finished
        and e.payload.get("kind") == PREPARATION
        and e.payload.get("sampler", "").endswith(PREPARES)
    ]


def settle(end: Callable[[], None]) -> None:
    """Call `end`, which ends a run in the ledger; a failure only warns, to keep the result."""
    try:
        end()
    except (PrivacyError, KeyboardInterrupt) as error:
        why = str(error) or "interrupted"
        warn(
            f"The ledger was not told that a run has ended: {why}. Nothing is lost but what was "
            "charged and not used."
        )


def can_pay(paths: int, mu2: float) -> bool:
    """Whether a budget has a few ledger units for every path: two releases, of part of it."""
    return 4 * paths <= mu2 * MU2_UNIT


def too_small(where: str) -> str:
    """What a statement says of draws for which nothing was learned."""
    return (
        "THE BUDGET WAS TOO SMALL: the records could not be told from the privacy noise, and "
        f"these are draws {where}."
    )


def improper_prior(facts: Mapping[str, Any]) -> list[str]:
    """Which variables have no proper prior to be left to, for a statement."""
    if not facts["improper"]:
        return []
    return [
        f"IMPROPER PRIOR OF {', '.join(facts['improper'])}: what the privacy noise hides of the "
        "records has no posterior, and intervals mean nothing there."
    ]


class Preparing:
    """Releases for a step, from what is left; BudgetExceeded before anything is spent."""

    def __init__(
        self,
        parts: ModelParts,
        sampler: str,
        counts: Mapping[str, int],
        progressbar: bool,
        set_aside: int = 0,
        like: str = "DPLangevin",
        share: float = 1.0,
    ) -> None:
        #: Part of what is left that this step may use.
        self.share = check_share(share)
        self.like = like  # whose forecast is this one's
        self.parts, self.budget, self.sampler = parts, parts.budget, sampler
        self.counts, self.progressbar = dict(counts), progressbar
        #: Ledger units that were charged already for what the chains will release.
        self.set_aside = set_aside
        self._preparation: Preparation | None = None
        if all(  # no preparation waits to be resumed; equal steps on batches share theirs
            plan["settings"]["set_aside"] for _, plan in unfinished_preparations(self.budget)
        ):
            self.refuse_if_used_up()
        # compiled, or refused, before anything is spent
        self.terms, self.engine = parts.terms, parts.engine

    @property
    def paths(self) -> int:
        """Iterations of all chains and runs."""
        iterations = self.counts["draws"] + self.counts["tune"]
        return self.counts["runs"] * self.counts["chains"] * iterations

    def remaining(self) -> int:
        """Ledger units of which shares are parts: those that are left, and those set aside."""
        return self.budget.account.read().remaining + self.set_aside

    def available(self) -> int:
        """Ledger units that chains may use: what a preparation has left of its own, or a share."""
        left, preparation = self.remaining(), self._preparation
        if preparation is None:
            return math.floor(Fraction(self.share) * left)
        return min(left, preparation.units - preparation.spent) if self.share < 1.0 else left

    def refuse_if_used_up(self, hint: bool = True) -> None:
        """Raise `BudgetExceeded` unless something is left; hint at what can be resumed."""
        budget = self.budget
        if budget.account.read().closed:
            raise BudgetExceeded(
                f"The account of this privacy budget (epsilon={budget.epsilon:g}) was closed, and "
                "what it had left was released; no record was read. A new analysis of these data "
                "needs a new budget, decided by whoever answers for the data."
            )
        if self._used_up():
            account = budget.account
            left = account.read().remaining
            waits = hint and any(
                plan["units"] - account.charged(of) <= left
                for of, plan in unfinished_preparations(budget)
            )
            resumed = (
                " An interrupted preparation can be resumed, at no more than it planned: repeat "
                "the call that began it, with the same settings."
            )
            raise BudgetExceeded(
                f"The privacy budget (epsilon={budget.epsilon:g}) is used up; no record was read. "
                "Draws made before can still be released. A new analysis of these data needs a new "
                "budget, decided by whoever answers for the data."
                f"{resumed if waits else ''}"
            )

    def _used_up(self) -> bool:
        account = self.budget.account.read()
        return self.remaining() <= account.cap >> 20  # what the integers of a used plan leave over

    def prepared(
        self,
        ask: Callable[[Shares], _T],
        settings: Mapping[str, Any],
        engine: RowEngine | None = None,
        needed: float = 1.0,
        again: bool = False,
    ) -> _T:
        """What `ask` makes of the releases of a new preparation, or of one that was interrupted.

        Of a new one in any case if `again`: `ask` is called twice where the rest of an interrupted
        preparation cannot be paid any more, and what is left then pays for a new one. `settings`
        are the public ones on which the requests depend. Shares are parts of what the step may use
        of the budget; the requests cost at most `needed` of that. `engine` has the records, by
        default in unconstrained parameters.

        Raises BudgetExceeded if nothing is left, and ValueError if no part of the budget could pay
        for the chains afterwards; nothing was spent then.
        """
        given = (engine or self.engine, self.budget.account)
        asked: dict[str, Any] = {
            "sampler": self.sampler + PREPARES,
            "settings": {
                **self.counts,
                "set_aside": self.set_aside,
                "share": self.share,
                **settings,
            },
            "n_public": self.budget.n_public,
        }
        before = Preparation.resume(*given, **asked)
        lost = 0 if before is None else before.lost
        version, versions = self._version(), self.budget.ledger.versions
        same = before and version.is_that_of(versions.setdefault(before.plan_id, version))
        if before is None or again or not same:
            form = settings.get("form", "chains")
            units = self._units(form, hint=before is None)
            if before is not None:
                cap = self.budget.account.read().cap
                warn(
                    f"A preparation that has cost {before.spent / cap:.0%} of the budget cannot "
                    "be resumed (data or priors were replaced since, a release was charged by a "
                    "process that was killed, or what is left does not pay for the rest). A new "
                    f"one is made with {units / cap:.0%} of the budget."
                )
            preparation = Preparation.begin(
                *given, **asked, units=units, needed=math.ceil(Fraction(needed) * units)
            )
            if before is not None:
                before.finish()
            versions[preparation.plan_id] = version
            left = max(units - self.set_aside, 0)
            _log.info(
                "%s prepares: private releases from what is left of the budget, epsilon = %.4g "
                "(mu^2 = %.4g), shown one by one in budget.table().",
                self.sampler,
                self.budget.epsilon_of(left),
                left / MU2_UNIT,
            )
        else:
            preparation = before
            if not self.set_aside:  # what equal steps on batches share may cost less
                preparation.required = math.ceil(Fraction(needed) * preparation.units) + lost
            _log.info(
                "%s resumes a preparation that was begun before: what was released is not "
                "paid again.",
                self.sampler,
            )
        self._preparation = preparation
        bar = Progress(
            TextColumn("Private preparation"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} % of the budget"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            disable=not self.progressbar,
        )
        try:
            with bar:
                return ask(Shares(preparation, given[0], bar))
        except Unpayable:
            return self.prepared(ask, settings, engine, needed, again=True)

    def compare_rest(self) -> None:
        """Warn if chains get less than planned; BudgetExceeded if they get next to nothing."""
        preparation = self._preparation
        if preparation is None or not preparation.resumed:
            return
        planned = preparation.units - preparation.spent
        left = self.budget.account.read().remaining
        gone = 1.0 - left / planned if planned > 0 else 1.0
        if gone <= _GONE:
            return
        if self._used_up():
            self.refuse_if_used_up(hint=False)
        what = (
            f"Since this preparation was made, {gone:.0%} of what it left for the chains was paid "
            "for something else"
        )
        if gone > _TOO_MUCH_GONE:
            raise BudgetExceeded(
                f"{what}, so its settings no longer fit. Build a step with other draws or chains: "
                "it prepares again with what is left."
            )
        warn(f"{what}: their noise is larger, and the chains mix worse than planned.")

    def _units(self, form: str | None, hint: bool) -> int:
        """Ledger units of a new preparation; warns if too few. `hint`: none has these settings."""
        self.refuse_if_used_up(hint)
        units = math.floor(Fraction(self.share) * self.remaining())
        records = self.parts.records
        once = self.sampler in ("laplace", "find_MAP")  # one preparation, and draws for nothing
        expected = forecast_of(
            self.budget,
            self.like,
            1000 if once else self.counts["draws"],
            self.counts["tune"],
            self.counts["chains"] * self.counts["runs"],
            d=records.parameters.size,
            mu2=units / MU2_UNIT,
            whole=self.budget.account.read().cap / MU2_UNIT,
            norms=made_up_norms(self.engine, records.initial)
            if self.like == "DPLangevin"
            else None,
        )
        if (form or expected.form) != "quadratic" and not can_pay(self.paths, units / MU2_UNIT):
            raise ValueError(
                f"the budget cannot pay for {self.paths} iterations: each would get less than the "
                "smallest charge (2^-40 of squared mu). Plan fewer draws or chains, or use a "
                "larger epsilon."
            )
        if self.share == 1.0:
            self._warn_if_another_waits()
        if hint:
            self._warn_if_paid_for()
        if improper := self.parts.improper:
            warn(
                f"The prior of {', '.join(improper)} is improper (pm.Flat, pm.HalfFlat, "
                "or a density that does not fall). Where privacy noise hides the records, only the "
                "prior is left, and there is then no posterior. The search begins at the initial "
                "point and may not arrive. Give a proper prior, as wide as public knowledge "
                "demands. Nothing has been spent yet."
            )
        if not expected.enough or expected.diagonal:
            warn(f"{expected.advice} Nothing has been spent yet.")
        return units

    @property
    def unfinished(self) -> int | None:
        """Plan of the preparation that an equal step resumes, until finished; None on batches.

        There equal steps share their preparation for good, as no budget is left for another.
        """
        if self._preparation is None or self.set_aside:
            return None
        return self._preparation.plan_id

    def finish(self) -> None:
        """Nothing is lost any more: an equal call prepares again."""
        if (plan_id := self.unfinished) is not None:
            self.budget.account.finish_plan(plan_id)

    @property
    def secure(self) -> bool:
        """Whether all noise of the preparation was secure."""
        return self._preparation is None or self._preparation.secure

    def _version(self) -> Version:
        digest = hashlib.blake2b()
        model, public = self.parts.model, self.budget.public
        named = [model[name] for name in public if name in model.named_vars]
        arrays = [v.get_value() for v in named if hasattr(v, "get_value")]
        start = self.parts.records.initial
        for array in (*arrays, start, self.terms.gradient(start)):
            digest.update(np.ascontiguousarray(array).tobytes())
        return Version(digest.digest(), private_arrays(model, public))

    def _warn_if_another_waits(self) -> None:
        """Warn that a preparation plans with all that is left, chains of earlier steps included."""
        mine = list(self.budget.account.entries())
        begun = Counter(e.plan for e in mine if e.kind == "run")
        waiting = [e for e in mine if e.kind == "plan" and e.payload.get("events")]
        if any(begun[e.plan] < e.payload.get("runs", 1) for e in waiting):
            warn(
                f"{self.sampler} will use all that is left of the budget, so another step, which "
                "has not made all of its runs, cannot run any more. Run that step first, or give "
                "each step a budget of its own, on one ledger."
            )

    def _warn_if_paid_for(self) -> None:
        """Warn that a call with other settings does not use what an earlier one has paid for."""
        entries = list(self.budget.account.entries())
        newest = max((e.seq for e in entries if e.kind == "run"), default=0)
        began = {e.plan: e.seq for e in entries if e.kind == "plan"}
        for plan_id, plan in unfinished_preparations(self.budget):
            spent = self.budget.account.charged(plan_id)
            if began[plan_id] > newest and spent and not plan["settings"]["set_aside"]:
                name, counts = plan["sampler"].removesuffix(PREPARES), plan["settings"]
                warn(
                    f"An earlier preparation of {name} ({counts['draws']} draws, "
                    f"{counts['chains']} chains) was paid for and is not used: {self.sampler} "
                    "prepares again with what is left of the budget. To resume the earlier one, "
                    "repeat that call."
                )
                return

    def tell_threads(self, engine: RowEngine) -> None:
        """Log how records are shared among processors, by public numbers."""
        if not engine.one_row_per_unit:
            return
        numbers, chains = self.budget.n_public * engine.d, self.counts["chains"]
        first = threads.pieces(numbers, threads.available())
        if first > 1:
            _log.info(
                "Records are read by %d threads if chains run one after the other, by %d in each "
                "of %d chains at once. NUMBA_NUM_THREADS sets a limit.",
                first,
                threads.pieces(numbers, threads.of_each(chains)),
                chains,
            )

    def warn_heavy(self) -> None:
        """Warn that clipping may matter; decided from a released histogram."""
        warn(
            f"{self.sampler} found heavy tails in the scores of the records: some records hold "
            "much of the information, and clipping them may bias the posterior by more than its "
            "intervals say. A likelihood with heavier tails (StudentT instead of Normal), or "
            "public bounds of the data (dp.bounds), would help."
        )

    def warn_untrusted(self) -> None:
        """Warn that the preparation found nothing."""
        follows = "what follows is about the prior"
        if self.parts.improper:
            names = ", ".join(self.parts.improper)
            follows += f". The prior of {names} is improper, so the result is not a posterior"
        warn(
            f"The budget (epsilon={self.budget.epsilon:g}) is too small for these data and this "
            f"model: the preparation of {self.sampler} could not tell the records from the "
            f"privacy noise, and {follows}. A larger epsilon, more records, fewer parameters or a "
            "narrower prior would help."
        )
