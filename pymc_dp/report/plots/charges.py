"""What was spent, read off a budget, a released result, or events."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xarray as xr

from pymc_dp.base import compat as _compat
from pymc_dp.budget import PrivacyBudget
from pymc_dp.privacy.events import (
    MU2_UNIT,
    BatchEvent,
    FixedBatchGaussianEvent,
    GaussianEvent,
    SubsampledGaussianEvent,
    batch_event,
)
from pymc_dp.privacy.subsampled import epsilon_of
from pymc_dp.publication.statement import facts_of

#: A mechanism of the search for the posterior, in the tables of budgets.
_ROUND = re.compile(r"round (\d+): ")


@dataclass(frozen=True)
class Charges:
    """What was spent, and of what.

    `units` is the squared mu, in ledger units, of releases on all units; `cap` is the budget in the
    same units.  `batches` are releases on batches of records, with their numbers.  `epsilon` and
    `delta` are the budget as stated, where there is one.  `secure` is False for draws that were
    made with insecure test noise.
    """

    units: int
    batches: tuple[tuple[BatchEvent, int], ...] = ()
    neighboring: str = "replace_one"
    epsilon: float | None = None
    delta: float | None = None
    cap: int | None = None
    secure: bool = True

    @property
    def stated(self) -> str:
        """The budget in words."""
        return f"budget: ε = {self.epsilon:g}, δ = {self.delta:g}"

    @property
    def usual_delta(self) -> float:
        """The delta stated, or a usual one."""
        return 1e-6 if self.delta is None else self.delta

    def epsilon_at(self, delta: float) -> float:
        """Epsilon of all that was spent, at this delta."""
        return epsilon_of(self.batches, self.units, delta, self.neighboring)


@dataclass(frozen=True)
class Part:
    """A part of the budget: who spent it, on what, and how large it is."""

    sampler: str
    mechanism: str
    share: float


def charges_of(spent: Any, name: str) -> Charges:
    """What was spent under a budget, for a released result, or by a list of events.

    Raises UnsafeRelease if a result carries no statement, and ValueError, which names the argument,
    for anything else.
    """
    if isinstance(spent, PrivacyBudget):
        found = spent.batches()
        reserved = 0 if found is None else found["reserved"]
        return Charges(
            spent.ledger.spent(spent.account) - reserved,
            () if found is None else ((batch_event(found["event"]), found["releases"]),),
            spent.neighboring,
            spent.epsilon,
            spent.delta,
            spent.ledger.account_info(spent.account).cap,
        )
    if isinstance(spent, xr.Dataset) or _compat.is_result(spent):
        facts = facts_of(spent)
        found = facts["batches"]
        units = round(facts["spent"]["gdp_mu2"] * MU2_UNIT)
        return Charges(
            max(units - (found["reserved"] if found else 0), 0),  # a float has 53 bits
            ((batch_event(found["event"]), found["releases"]),) if found else (),
            facts["neighboring"],
            facts["epsilon"],
            facts["delta"],
            round(facts["preparation"]["budget_mu2"] * MU2_UNIT),
            facts["privacy_guarantee"] != "none",
        )
    return _of_events(spent, name)


def _of_events(spent: Any, name: str) -> Charges:
    if isinstance(spent, GaussianEvent | SubsampledGaussianEvent | FixedBatchGaussianEvent):
        spent = [spent]
    units, batches = 0, []
    for entry in spent if isinstance(spent, Iterable) and not isinstance(spent, str) else [None]:
        event, count = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 1)
        if isinstance(event, GaussianEvent):
            units += count * event.cost
        elif isinstance(event, SubsampledGaussianEvent | FixedBatchGaussianEvent):
            batches.append((event, count))
        else:
            raise ValueError(
                f"{name} must be a PrivacyBudget, a released result, or privacy events such as "
                f"[(GaussianEvent('sum', 20.0), 100)]; got {type(spent).__name__}."
            )
    if not units and not batches:
        raise ValueError(f"{name} holds no event.")
    return Charges(units, tuple(batches))


def parts_of(spent: Any, name: str) -> list[Part]:
    """Shares of the budget, of its squared mu, oldest first; they add up to what was spent.

    Raises as `charges_of`.
    """
    if isinstance(spent, PrivacyBudget):
        return _parts_of_budget(spent)
    if isinstance(spent, xr.Dataset) or _compat.is_result(spent):
        return _parts_of_statement(facts_of(spent))
    raise ValueError(
        f"{name} must be a PrivacyBudget or a released result, not {type(spent).__name__}."
    )


def _parts_of_budget(budget: PrivacyBudget) -> list[Part]:
    """Parts from its table, with all rounds of a search for the posterior in one part."""
    table = budget.table()
    shares: dict[tuple[str, str], float] = {}
    rounds: dict[str, list[int]] = {}
    for row in table[table["mechanism"] != ""].itertuples():
        found = _ROUND.match(row.mechanism)
        if found:
            rounds.setdefault(row.sampler, []).append(int(found[1]))
        key = (row.sampler or "releases on batches", "" if found else row.mechanism)
        shares[key] = shares.get(key, 0.0) + row.share
    parts = []
    for (sampler, mechanism), share in shares.items():
        if not mechanism:
            last = max(rounds[sampler])
            mechanism = "round 1" if last == 1 else f"rounds 1 to {last}"
        parts.append(Part(sampler, mechanism, share))
    return parts


def _parts_of_statement(facts: dict[str, Any]) -> list[Part]:
    """The preparation as a whole, then the mechanisms of the chains as they were planned."""
    cap, sampler = facts["preparation"]["budget_mu2"], facts["sampler"]
    before = facts["preparation"]["gdp_mu2"] / cap
    found = facts["batches"]
    batches = found["reserved"] / MU2_UNIT / cap if found else 0.0
    left = facts["spent"]["gdp_mu2"] / cap - before - batches
    planned = {
        name: facts["chains"]
        * (m["at_start"] + (facts["draws"] + facts["tune"]) * m["per_iteration"])
        * GaussianEvent(name, m["noise_multiplier"]).cost
        / MU2_UNIT
        / cap
        for name, m in facts["mechanisms"].items()
    }
    total = sum(planned.values())
    made = min(1.0, max(left, 0.0) / total) if total else 1.0  # a run may have been interrupted
    parts = [Part("preparation", f"{facts['preparation']['releases']} releases before", before)]
    if found:
        event = batch_event(found["event"])
        parts.append(Part("releases on batches", f"{event.mechanism}, {event.batch}", batches))
    parts += [Part(sampler, name, share * made) for name, share in planned.items()]
    parts.append(Part("other runs and statistics", "releases", left - total * made))
    return [part for part in parts if part.share > 1e-9]
