"""A plan: how many releases a run makes, with how much noise, and what it costs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pymc_dp.base.checks import check_positive
from pymc_dp.errors import BudgetExceeded
from pymc_dp.privacy.accounting import BatchEvent, GaussianEvent, calibrate
from pymc_dp.privacy.subsampled import room_beside, smallest_noise_multiplier

#: Ledger units by which the room beside releases on batches may be rounded down.
_ROUNDED = 4


@dataclass(frozen=True)
class Batches:
    """One release on a batch of records per iteration of every chain, and how many in all.
    `reserved` ledger units are charged: what the account's cap has above the largest Gaussian
    transcript that may run beside them (`pymc_dp.privacy.subsampled.room_beside`).
    """

    event: BatchEvent
    releases: int
    reserved: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "event": self.event.to_dict()}


@dataclass(frozen=True)
class Plan:
    """The releases of one step method, fixed before a record is touched. `per_iteration` and
    `at_start` count the releases of each mechanism of `events` in one iteration, and once per
    chain. `batches` are paid for as a whole; then there are no other releases.
    """

    sampler: str
    draws: int
    tune: int
    chains: int
    runs: int = 1  # calls of ``pm.sample``
    events: dict[str, GaussianEvent] = field(default_factory=dict)
    per_iteration: dict[str, int] = field(default_factory=dict)
    at_start: dict[str, int] = field(default_factory=dict)
    plan_id: int = field(default_factory=lambda: secrets.randbits(53))  # also exact as a float
    batches: Batches | None = None

    @classmethod
    def of(cls, plan_id: int, payload: Mapping[str, Any]) -> Plan:
        """A plan from what the ledger keeps of it (`payload`), without its releases on batches."""
        kept = ("sampler", "draws", "tune", "chains", "runs", "per_iteration", "at_start")
        events = {name: GaussianEvent.from_dict(event) for name, event in payload["events"].items()}
        return cls(**{name: payload[name] for name in kept}, events=events, plan_id=plan_id)

    @property
    def iterations(self) -> int:
        """Iterations of one chain, tuning included."""
        return self.draws + self.tune

    def answers(self, counts: Mapping[str, int]) -> dict[GaussianEvent, int]:
        """Releases as events, from their mechanisms."""
        return {self.events[name]: count for name, count in counts.items()}

    @property
    def iteration_cost(self) -> int:
        """Ledger units of one iteration."""
        return sum(self.events[name].cost * count for name, count in self.per_iteration.items())

    @property
    def start_cost(self) -> int:
        """Ledger units of the start of a chain."""
        return sum(self.events[name].cost * count for name, count in self.at_start.items())

    @property
    def run_cost(self) -> int:
        """Ledger units that the chains of one run charge, if nothing interrupts it."""
        return self.chains * (self.start_cost + self.iterations * self.iteration_cost)

    def releases(self, name: str) -> int:
        """Number of releases of one mechanism over all runs."""
        per_chain = self.at_start.get(name, 0) + self.iterations * self.per_iteration.get(name, 0)
        return self.runs * self.chains * per_chain

    def payload(self, **settings: Any) -> dict[str, Any]:
        """What the ledger keeps: the plan and the public settings of the sampler."""
        return {
            "sampler": self.sampler,
            "draws": self.draws,
            "tune": self.tune,
            "chains": self.chains,
            "runs": self.runs,
            "per_iteration": self.per_iteration,
            "at_start": self.at_start,
            "events": {name: event.to_dict() for name, event in self.events.items()},
            "settings": settings,
        }


def plan_batches(
    event_of: Callable[[float], BatchEvent],
    steps: int,
    *,
    epsilon: float,
    delta: float,
    neighboring: str,
    cap: int,
    room: int,
    noise_multiplier: float | None = None,
) -> Batches:
    """`steps` releases on batches, for a budget of which nothing is spent. `event_of` gives the
    event of one release by its noise multiplier; the default multiplier is the smallest with which
    all fits. Gaussian releases beside them will need `room` of the budget's `cap`.
    """
    if noise_multiplier is None:
        noise_multiplier = smallest_noise_multiplier(
            epsilon, delta, event_of, steps, neighboring, units=room + _ROUNDED
        )
    event = event_of(noise_multiplier)
    beside = room_beside([(event, steps)], epsilon, delta, neighboring, cap)
    if beside < room:
        raise BudgetExceeded(
            f"{steps} releases on batches with noise multiplier {noise_multiplier:.4g} leave less "
            "of the budget than the rest needs. Use a larger noise_multiplier, or leave it out."
        )
    return Batches(event, steps, max(cap - beside, 1))


def make_plan(
    sampler: str,
    *,
    draws: int,
    tune: int,
    chains: int,
    runs: int = 1,
    per_iteration: Mapping[str, int],
    at_start: Mapping[str, int],
    available: int,
    shares: Mapping[str, float],
    noise_multiplier: float | Mapping[str, float] | None = None,
) -> Plan:
    """Choose noise multipliers so that a run uses a budget, or take those given. `shares` has the
    part of each mechanism in the `available` ledger units; if it is empty, parts are equal.
    `noise_multiplier` is one for all mechanisms or one each; ``None`` calibrates.
    """
    plan = Plan(sampler, draws, tune, chains, runs, {}, dict(per_iteration), dict(at_start))
    mechanisms = list(dict.fromkeys([*per_iteration, *at_start]))
    if not mechanisms:  # everything was released before
        return plan
    if noise_multiplier is None:
        counts = {name: plan.releases(name) for name in mechanisms}
        parts = {name: shares[name] for name in mechanisms} if shares else dict.fromkeys(counts, 1)
        events = calibrate(available, counts, parts)
    else:
        given = per_mechanism("noise_multiplier", noise_multiplier, mechanisms)
        events = {name: GaussianEvent(name, value) for name, value in given.items()}
    return replace(plan, events=events)


def per_mechanism(
    argument: str, value: float | Mapping[str, float], mechanisms: list[str]
) -> dict[str, float]:
    """One positive number for each mechanism, from a number or a mapping."""
    if isinstance(value, Mapping):
        if set(value) != set(mechanisms):
            raise ValueError(
                f"{argument} must name the mechanisms {sorted(mechanisms)}; got {sorted(value)}."
            )
        numbers = {name: value[name] for name in mechanisms}
    else:
        numbers = dict.fromkeys(mechanisms, value)
    return {
        name: check_positive(f"{argument}[{name!r}]", number) for name, number in numbers.items()
    }
