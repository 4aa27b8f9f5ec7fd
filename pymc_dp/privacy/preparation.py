"""One-off releases before the chains run: noisy histograms of norms and noisy sums of vectors."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pymc_dp.base.checks import check_integer, check_number
from pymc_dp.errors import BudgetExceeded, PrivacyError
from pymc_dp.privacy import noise
from pymc_dp.privacy.account import PREPARATION, Account
from pymc_dp.privacy.accounting import MU2_UNIT, GaussianEvent, smallest_noise_multiplier
from pymc_dp.privacy.answer import (
    EDGES,
    Grid,
    NormCounts,
    Query,
    Receipt,
    VectorSum,
)
from pymc_dp.privacy.holder import holder_of, rehearse
from pymc_dp.privacy.meter import interrupts_wait, noise_is_secure, pay
from pymc_dp.privacy.queries import Contribution, Rows

#: Shares are floats, so those of a whole preparation add up to 1 with a rounding error.
_WHOLE = 1.0 + 1e-9


class Histogram(NamedTuple):
    """A noisy histogram of the norms of all units, with the edges `EDGES` (k + 1,) and counts (k,).
    Bin j holds the norms with ``edges[j] <= norm < edges[j + 1]``; the first one also holds the
    zeros. Counts may be negative.
    """

    edges: np.ndarray
    counts: np.ndarray
    noise_sd: float  # of each count


class Unpayable(BudgetExceeded):
    """A preparation that is resumed cannot be paid to its end: something else was paid since."""


@dataclass
class _Pending:
    """A release that was charged and not kept, and its values if they were made. The values are
    kept later as they are: they may have left traces in the file, so other values for the same
    charge would be a second release.
    """

    event: GaussianEvent
    receipt: Receipt
    values: dict[str, Any] | None = None

    @property
    def pays(self) -> bool:
        """Whether a value is there, or can be made."""
        event = self.event
        return self.values is not None or self.receipt.pays(event.mechanism, event.noise_multiplier)

    def pays_for(self, event: GaussianEvent, request: Mapping[str, Any]) -> bool:
        """Whether it was charged for this, and not made for something else."""
        made = None if self.values is None else self.values["request"]
        return self.pays and self.event == event and made in (None, request)


class Preparation:
    """One-off releases of a recorded plan, each charged first and kept in the ledger.

    Built again for the same plan, a preparation answers the same requests with the kept values,
    without a charge and without touching a record, and continues where it was interrupted. A
    request costs a share of `units` ledger units. `n_public` units set the resolution of the grid.

    *Guarantee.* A release with share s is a Gaussian mechanism that costs at most s * units, or 1,
    given everything released before, and its charge is committed before a record is touched. All
    together cost at most `units`. A release that was interrupted between its charge and
    `Account.keep` showed no value to anybody: within the process it is made, or kept, for the same
    charge. After a process was killed it is charged again, if what remains pays for it, as the file
    may hold traces of a value that was about to be kept. *Assumptions.* Contributions of different
    units are computed independently of each other. *Weaknesses.* Interrupted releases make a
    preparation cost more than `units`; the account's cap holds all the same.
    """

    def __init__(
        self,
        engine: Rows,
        account: Account,
        plan_id: int,
        units: int,
        n_public: int,
    ) -> None:
        self.engine = engine
        self.account = account
        self.ledger = account.ledger
        self.plan_id = plan_id
        self.units = check_integer("units", units, minimum=1)
        self.neighboring = account.ledger.neighboring
        self.n_public = n_public
        self.resumed = 0  # requests answered from the ledger
        #: Of one that is resumed: what all of its requests may cost, in ledger units.
        self.required: int | None = None
        #: Kept with a request, where questions come from somebody else: what was asked, exactly.
        self.asked: str | None = None
        self.secure = True  # whether all noise so far was secure
        self._answered = 0
        self._planned = 0  # units of the requests answered
        self._shares = 0.0
        self._rehearsed: set[tuple[Any, ...]] = set()
        self._process: int | None = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    @property
    def answered(self) -> int:
        """Requests that were answered."""
        return self._answered

    @classmethod
    def resume(
        cls,
        engine: Rows,
        account: Account,
        *,
        sampler: str,
        settings: Mapping[str, Any],
        n_public: int,
    ) -> Preparation | None:
        """The unfinished preparation of the same `sampler`, with its own units, or None. `settings`
        are the public settings, JSON values only, on which the requests depend.
        """
        plan_id = account.find_plan(_facts(sampler, settings))
        if plan_id is None:
            return None
        units = account.plan(plan_id)["units"]
        found = cls(engine, account, plan_id, units, n_public)
        found._agree(sampler)
        return found

    @classmethod
    def begin(
        cls,
        engine: Rows,
        account: Account,
        *,
        sampler: str,
        settings: Mapping[str, Any],
        units: int,
        n_public: int,
        needed: int | None = None,
    ) -> Preparation:
        """A new preparation; `sampler` and `settings` as in :meth:`resume`. `needed` is how many of
        `units` will be charged at most (default: all); these must remain.
        """
        if (units if needed is None else needed) > account.read().remaining:
            raise BudgetExceeded(
                f"{sampler} needs more than the epsilon = {account.remaining().epsilon:.4g} that "
                "is left. No record was read. Ask for less or, in the next analysis, leave more: "
                "dp.sample(share=0.7), say."
            )
        plan_id = secrets.randbits(53)
        found = cls(engine, account, plan_id, units, n_public)
        found._agree(sampler)
        account.record_plan(plan_id, {**_facts(sampler, settings), "units": units})
        return found

    def _agree(self, sampler: str) -> None:
        """Those who have the records, and budgets of their own, may refuse."""
        if self.engine.elsewhere is not None:
            plan = {"kind": PREPARATION, "sampler": sampler, "units": self.units}
            self.engine.elsewhere.agree(self.plan_id, plan)

    def skip_kept(self) -> None:
        """Go on after all releases that were kept, for one whose questions somebody else knows."""
        for release in self.account.kept(self.plan_id)[self._answered :]:
            share = release.values["request"]["share"]
            self._planned += self._cost(share)
            self._shares += share
            self._answered += 1

    def finish(self) -> None:
        """Record that no release follows: :meth:`resume` does not find it again."""
        self.account.finish_plan(self.plan_id)

    @property
    def units_mu2(self) -> float:
        """`units` as a squared mu."""
        return self.units / MU2_UNIT

    @property
    def spent(self) -> int:
        """Ledger units charged for the plan so far, in all processes."""
        return self.account.charged(self.plan_id)

    @property
    def lost(self) -> int:
        """Ledger units charged for releases that were interrupted, and are charged again."""
        number = len(self.account.kept(self.plan_id))
        pending = self.ledger.pending.get((self.account.number, self.plan_id, number))
        paid = 0 if pending is None or not pending.pays else pending.event.cost
        return self.account.unkept(self.plan_id) - paid

    # -- requests -------------------------------------------------------------------------------

    def histogram(self, label: str, spec: Contribution, share: float) -> Histogram:
        """Noisy histogram of the norms of all units' contributions; those not finite count as zero.

        The release may cost the fraction `share` of `units`. BudgetExceeded if the account cannot
        pay for it and the rest of what is resumed; PrivacyError if shares pass 1, or a replayed
        request differs. No record was touched then.
        """

        def counts(grid: Grid) -> NormCounts:
            return NormCounts(grid, self.neighboring)

        request = {"release": "histogram"}
        return Histogram(EDGES.copy(), *self._answer(label, share, request, spec, counts))

    def vector_sum(
        self, label: str, spec: Contribution, clip_norm: float, share: float
    ) -> tuple[np.ndarray, float]:
        """(size,) noisy sum over all units, sum_i clip(v_i) + N(0, noise_sd^2 I), and noise_sd. A
        v_i that is not finite adds zero. `clip_norm` bounds the l2 norm of v_i; it is public, or
        chosen from earlier releases. Errors as in :meth:`histogram`.
        """
        clip_norm = check_number("clip_norm", clip_norm)

        def vectors(grid: Grid) -> VectorSum:
            return VectorSum(grid, self.neighboring, spec.size, clip_norm, spec.nonnegative)

        request = {"release": "vector_sum", "clip_norm": clip_norm}
        return self._answer(label, share, request, spec, vectors)

    # -- paying ---------------------------------------------------------------------------------

    def _answer(
        self,
        label: str,
        share: float,
        request: dict[str, Any],
        spec: Contribution,
        sum_on: Callable[[Grid], NormCounts | VectorSum],
    ) -> tuple[np.ndarray, float]:
        """The kept value of the next request, or that of a release that is charged now."""
        if self._process != os.getpid():
            raise PrivacyError(
                "A preparation was used in another process than the one that began it. Build the "
                "step in the main process, before the chains are started."
            )
        kept = self.account.kept(self.plan_id)
        before = kept[self._answered] if self._answered < len(kept) else None
        if before is not None and _alike(share, before.values["request"].get("share")):
            share = before.values["request"]["share"]
        cost = self._cost(share)
        event = GaussianEvent(label, smallest_noise_multiplier(cost))
        query = Query(label, spec, sum_on(Grid.finest(event.noise_multiplier, self.n_public)))
        if query.sum.told is not None:
            raise PrivacyError(f"clip_norm={request['clip_norm']:g} is not a usable bound.")
        request |= {"share": share, "of": type(spec).__name__, "size": spec.size}
        if self.asked is not None:
            request["asked"] = self.asked
        if before is not None:
            values = before.values
            _refuse_other(label, request, before.label, values["request"])
            self.resumed += 1
        else:
            self._check_rest()
            values = self._release(event, request, query)
        self.secure = self.secure and values["secure"]
        self._answered += 1
        self._planned += cost
        self._shares += share
        return np.array(values["value"]), values["noise_sd"]

    def _check_rest(self) -> None:
        """Refuse to pay for a part of what cannot be paid to its end."""
        if self.required is not None:
            missing = self.required - self.spent
            if missing > self.account.read().remaining:
                raise Unpayable(
                    "What remains of the budget does not pay for the rest of the preparation that "
                    "was interrupted."
                )
            self.required = None

    def _cost(self, share: float) -> int:
        """Ledger units of a share, rounded down, but one at least; all are at most `units`."""
        share = check_number("share", share)
        if not (0.0 < share and self._shares + share <= _WHOLE):
            raise PrivacyError(
                f"A share of {share:g} was asked for when {self._shares:g} of the preparation was "
                "used. Shares are positive and add up to at most 1."
            )
        cost = min(max(math.floor(Fraction(share) * self.units), 1), self.units - self._planned)
        if cost < 1:
            raise PrivacyError(
                f"Nothing is left for a share of {share:g} of the preparation: charges are whole "
                "units (2^-40 of squared mu). Use a larger budget."
            )
        return cost

    def _release(
        self, event: GaussianEvent, request: dict[str, Any], query: Query
    ) -> dict[str, Any]:
        secure = noise_is_secure(self.ledger)
        kind = type(self.engine), request["release"], request["of"], request["size"]
        if kind not in self._rehearsed:
            rehearse(self.engine, [query])
            noise.rounded_normal(0, 0)
            self._rehearsed.add(kind)
        place, holder = (self.plan_id, self._answered), holder_of(self.engine, self.plan_id)
        with interrupts_wait():
            key = (self.account.number, *place)
            pending = self.ledger.pending.pop(key, None)
            if pending is None or not pending.pays_for(event, request):
                receipt = pay(self.account, self.plan_id, event)
                pending = _Pending(event, receipt)
            try:
                if pending.values is None:
                    value, sd = holder.release(query, pending.receipt, place, request)
                    pending.values = {
                        "request": request,
                        "value": value.tolist(),
                        "noise_sd": sd,
                        "secure": noise_is_secure(self.ledger) and secure,
                    }
                values = pending.values
                self.account.keep(self.plan_id, event.mechanism, values, place[1])
            except BaseException:
                self.ledger.pending[key] = pending
                raise
        return values


def _facts(sampler: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan in the ledger must have for a preparation to resume it."""
    return {
        "kind": PREPARATION,
        "sampler": sampler,
        "settings": dict(settings),
        "secure": not noise.is_insecure(),
    }


def _alike(one: float, other: Any) -> bool:
    """Clip norms and shares follow from released values; another computer may round differently."""
    return isinstance(other, float | int) and math.isclose(one, other, rel_tol=1e-9)


def _refuse_other(
    label: str, request: Mapping[str, Any], kept_label: str, kept: Mapping[str, Any]
) -> None:
    """Refuse a request that differs from the one whose values were kept."""
    same = all(kept.get(key) == request[key] for key in request if key != "clip_norm")
    if label != kept_label or not (
        same and _alike(request.get("clip_norm", 0.0), kept.get("clip_norm", 0.0))
    ):
        raise PrivacyError(
            f"The preparation is resumed with the request {label!r}, but {kept_label!r}, or one of "
            "the same name with another share, bound or size, was released at this place. Resume "
            "with the same settings and version, or begin a new preparation."
        )
