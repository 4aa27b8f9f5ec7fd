"""The analyst's side: a model without records, whose questions several owners answer.

Answers of owners add up, and so do the variances of their noise (MATH 12; Algorithm 2 of Yildirim &
Ermis 2019): with s^2 = sum_k s_k^2 in place of s^2 every formula of one owner holds.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import pymc as pm
from pymc.model import Model

from pymc_dp import errors
from pymc_dp.base.checks import warn
from pymc_dp.budget import PrivacyBudget, get_budget
from pymc_dp.clusters.shards import take_place
from pymc_dp.errors import BudgetExceeded, PrivacyError, UnsafeModel
from pymc_dp.owners.messages import encoded, encoded_query, packed, unpacked
from pymc_dp.owners.teller import PROTOCOL, Teller, structure_of
from pymc_dp.privacy.account import PREPARATION
from pymc_dp.privacy.accounting import (
    GaussianEvent,
    epsilon_from_mu,
    mu_from_units,
    smallest_noise_multiplier,
)
from pymc_dp.privacy.answer import Query, Receipt
from pymc_dp.privacy.holder import Answers
from pymc_dp.privacy.queries import Rows
from pymc_dp.records.extraction import Records
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.tuning.model_parts import ModelParts

#: Relative difference of two densities that are computed on two machines.
_ALIKE = 1e-7


class Channel(Protocol):
    """How an owner is reached."""

    name: str

    def call(self, method: str, data: bytes) -> Callable[[], bytes]:
        """Begin a call; the function returned waits for the answer."""


class Here:
    """An owner in this process."""

    def __init__(self, teller: Teller, name: str) -> None:
        self.teller, self.name = teller, name

    def call(self, method: str, data: bytes) -> Callable[[], bytes]:
        """Answer at once."""
        found = self.teller.handle(method, data)
        return lambda: found


@dataclass
class Owner:
    """What is known of one owner; all of it is public."""

    name: str
    channel: Channel
    facts: dict[str, Any]

    @property
    def units(self) -> int:
        """Ledger units that its budget has for this study."""
        return int(self.facts["remaining"])

    def own_cost(self, cost: int, whole: int) -> int:
        """Its cost, in units of its own ledger, of what costs `cost` of `whole` in the plan."""
        own = math.floor(Fraction(cost, whole) * self.units)
        if own < 1:
            raise BudgetExceeded(f"The budget of {self.name} is too small for so many answers.")
        return own


class Owners:
    """Several owners of records, in place of a budget of the model.

    ::

        with pm.Model() as model:      # built on made-up rows
            beta = pm.Normal("beta", 0, 2, shape=2)
            pm.Bernoulli("y", logit_p=x @ beta, observed=y)
            dp.Owners([hospital_a, hospital_b, hospital_c])
            idata = dp.sample()

    Parameters
    ----------
    owners : sequence of pymc.Model
        Two or more.  A model of its own, with the owner's records and the owner's `PrivacyBudget`.
        The models must be equal but for their records.
    model : pymc.Model, optional
        The analyst's model, built on made-up rows.  Default: that of the context.

    Raises
    ------
    ValueError
        If there are fewer than two owners.
    UnsafeModel
        If the models differ, or protect against different changes of the records.
    BudgetExceeded
        If an owner's budget is used up.

    Notes
    -----
    *Guarantee.* The records of owner k are (epsilon_k, delta_k) differentially private against
    everybody else, the analyst and the other owners together included: an owner charges its own
    ledger and adds its own noise before anything leaves it. It needs no trust in others.

    *Assumptions.* For the posterior, not for privacy: all owners have built the same model, and
    answer as they should.

    *Weaknesses.* Noise adds up: with K equal owners its standard deviation is sqrt(K) times that of
    a pool of all records with the same budget. An owner that stops answering stops the run.
    """

    trusted = False  # owners run no code that they are sent, and draw no batches

    def __init__(self, owners: Sequence[Any], *, model: Model | None = None) -> None:
        if isinstance(owners, str | Model) or not isinstance(owners, Sequence) or len(owners) < 2:
            raise ValueError("owners must be a list of two or more.")
        model = pm.modelcontext(model)
        self._process = os.getpid()
        self._values = {model.rvs_to_values[rv] for rv in model.free_RVs}
        self.owners = [self._met(k, given, model) for k, given in enumerate(owners)]
        self._refuse_unlike(model)
        if any(owner.units < 1 for owner in self.owners):
            used = [owner.name for owner in self.owners if owner.units < 1]
            raise BudgetExceeded(f"Nothing is left of the budget of {', '.join(used)}.")
        self.n_units = sum(owner.facts["n_units"] for owner in self.owners)
        facts = [owner.facts for owner in self.owners]
        users = any(fact["privacy_unit"] != "row" for fact in facts)
        self.example_ids = self._example_ids(model) if users else None
        whole = math.floor(1 / sum(Fraction(1, owner.units) for owner in self.owners))
        delta = min(*(fact["delta"] for fact in facts), 0.1 / self.n_units)
        neighboring = facts[0]["neighboring"]
        self._budget = PrivacyBudget(
            epsilon_from_mu(mu_from_units(whole), delta),
            delta,
            neighboring=neighboring,
            n_public=self.n_units if neighboring == "add_or_remove_one" else None,
            records=self,
            model=model,
        )
        self.whole = self._budget.account.read().cap
        self._parts: dict[int, list[int]] = {}  # ledger units of preparations
        self._multipliers: dict[int, dict[str, float]] = {}
        self._chains: dict[int, Any] = {}
        self._check_structure(model)

    def _met(self, k: int, given: Any, model: Model) -> Owner:
        if not isinstance(given, Model):
            raise ValueError(
                f"owners[{k}] must be a PyMC model with a PrivacyBudget, not "
                f"{type(given).__name__}."
            )
        if given is model:
            raise ValueError(f"owners[{k}] is the analyst's model. Build one without records.")
        channel = Here(Teller(given), f"owner {k + 1}")
        budget = get_budget(given)
        if budget is not None and budget.dataset:
            channel.name = budget.dataset
        facts = _called(channel, "describe", {})()
        if facts["protocol"] != PROTOCOL:
            raise UnsafeModel(f"{channel.name} uses another version of pymc_dp. Use the same one.")
        return Owner(channel.name, channel, facts)

    def _refuse_unlike(self, model: Model) -> None:
        first = self.owners[0].facts
        for owner in self.owners[1:]:
            if owner.facts["neighboring"] != first["neighboring"]:
                raise UnsafeModel(
                    f"{owner.name} protects neighboring={owner.facts['neighboring']!r}, and "
                    f"{self.owners[0].name} {first['neighboring']!r}. All must protect the same."
                )
        names = [owner.name for owner in self.owners]
        if len({*names}) < len(names):
            warn("Two owners have one name. Give their budgets different labels, dataset=.")

    def _example_ids(self, model: Model) -> np.ndarray:
        from pymc_dp.records.units import row_counts

        return np.arange(max(row_counts(model, ()).values())) // 2

    def _check_structure(self, model: Model) -> None:
        """UnsafeModel unless all owners have the analyst's model, but for the records."""
        mine = structure_of(ModelParts(model, self._budget, computed=()))
        for owner in self.owners:
            difference = _difference(mine, owner.facts["structure"])
            if difference:
                raise UnsafeModel(
                    f"The model of {owner.name} is not yours: {difference}. Build both by the same "
                    "code; numbers in it must not be computed from the records."
                )

    # -- what a model with records elsewhere needs (see `pymc_dp.clusters.shards.Shards`) --------

    def in_place_of(self, records: Records, model: Model) -> Records:
        """The records of a model that was built on made-up rows: those of the owners."""
        none = dict.fromkeys(range(len(records.groups)), ())
        return take_place(records, none, self.n_units, self.n_units, self)

    def stated(self) -> dict[str, Any]:
        """What a statement says of the owners, each with its own promise; the largest for all."""
        found = []
        for owner in self.owners:
            with suppress(PrivacyError):  # one that does not answer any more has promised before
                owner.facts = _called(owner.channel, "describe", {})()
            names = ("epsilon", "delta", "gdp_mu", "neighboring", "privacy_unit", "n_units")
            kept = (*names, "dataset", "public", "bounds", "spent", "ledger", "ledger_head")
            found.append({"name": owner.name, **{name: owner.facts[name] for name in kept}})
        secure = all(owner.facts["secure"] for owner in self.owners)
        return {
            "owners": found,
            **{
                name: max(facts[name] for facts in found) for name in ("epsilon", "delta", "gdp_mu")
            },
            "spent": {"epsilon": max(facts["spent"] for facts in found)},
            **({} if secure else {"privacy_guarantee": "none"}),
        }

    def holder(self, rows: Rows, plan_id: int) -> Asked:
        """Who answers the queries of a plan."""
        return Asked(self, rows, plan_id)

    def agree(self, plan_id: int, plan: Mapping[str, Any], rows: Any = None) -> None:
        """Have every owner agree to a plan, or refuse it."""
        messages = [
            self._preparation(plan_id, plan, owner)
            if plan["kind"] == PREPARATION
            else self._run(plan_id, plan, owner, rows)
            for owner in self.owners
        ]
        self.all("agree", messages)
        if plan["kind"] == PREPARATION:
            self._parts[plan_id] = [message["units"] for message in messages]
        else:
            squares: dict[str, float] = {}
            for message in messages:
                for name, multiplier in message["noise_multipliers"].items():
                    squares[name] = squares.get(name, 0.0) + multiplier**2
            self._multipliers[plan_id] = {name: math.sqrt(x) for name, x in squares.items()}

    def _preparation(self, plan_id: int, plan: Mapping[str, Any], owner: Owner) -> dict[str, Any]:
        units = owner.own_cost(plan["units"], self.whole)
        return {"plan": plan_id, "kind": PREPARATION, "sampler": plan["sampler"], "units": units}

    def _run(
        self, plan_id: int, plan: Mapping[str, Any], owner: Owner, rows: Any
    ) -> dict[str, Any]:
        mechanisms = [*plan["events"]]
        clip_norms = {n: plan["clip_norms"][n] for n in mechanisms if n != "energy_error"}
        multipliers = {}
        for name, event in plan["events"].items():
            assert isinstance(event, GaussianEvent)
            cost = owner.own_cost(event.cost, self.whole)
            multipliers[name] = smallest_noise_multiplier(cost)
        kept = ("kind", "sampler", "draws", "tune", "chains", "per_iteration", "at_start")
        return {
            "plan": plan_id,
            **{name: plan[name] for name in kept},
            "noise_multipliers": multipliers,
            "clip_norms": clip_norms,
            "engine": self.described(rows),
        }

    def described(self, rows: Any) -> dict[str, Any]:
        """An engine, so that an owner can make the same one of its own model."""
        return {
            "predictor": isinstance(rows, PredictorEngine),
            "effects": not self._values.issuperset(rows.parameters.values),
            "tilted": rows.is_tilted,
            "at": encoded(rows.coordinates),
        }

    def shares(self, plan_id: int, cost: int) -> list[float]:
        """For every owner, the part of its preparation that a release of this cost takes."""
        parts = zip(self.owners, self._parts[plan_id], strict=True)
        # rounded up, so that the owner finds the same cost when it rounds down
        return [
            math.nextafter(owner.own_cost(cost, self.whole) / units, math.inf)
            for owner, units in parts
        ]

    def multiplier(self, plan_id: int, mechanism: str) -> float:
        """Noise of the sum of all answers of a mechanism, over the sensitivity of one owner's."""
        return self._multipliers[plan_id][mechanism]

    def begin_chain(self, plan_id: int) -> int:
        """Number of a new chain of a plan."""
        return next(self._chains.setdefault(plan_id, itertools.count()))

    # -- asking ---------------------------------------------------------------------------------

    def all(self, method: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What all owners answer to one message each, sent at once."""
        if self._process != os.getpid():
            raise RuntimeError("Owners were asked in another process. Sample with cores=1.")
        pairs = zip(self.owners, messages, strict=True)
        waiting = [_called(owner.channel, method, message) for owner, message in pairs]
        return [wait() for wait in waiting]

    def ask(self, plan_id: int, chain: int, number: int, query: Query) -> list[np.ndarray]:
        """The answers of all owners to a question of a chain."""
        question = {"chain": chain, "number": number, "query": encoded_query(query)}
        message = {"plan": plan_id, "questions": [question]}
        found = []
        for owner, reply in zip(
            self.owners, self.all("ask", [message] * len(self.owners)), strict=True
        ):
            [answer] = reply["answers"]
            if "error" in answer:
                raise _error_of(owner.name, answer["error"])
            found.append(np.array(answer["answer"]))
        return found

    def close(self, plan_id: int) -> None:
        """Tell all owners that no more will be asked for a plan."""
        self.all("close", [{"plan": plan_id}] * len(self.owners))


class Asked(Answers):
    """The records of all owners, for the queries of a plan, or of one chain of it."""

    def __init__(self, owners: Owners, rows: Rows, plan_id: int) -> None:
        self.owners, self.engine, self.plan_id = owners, rows, plan_id
        self._chain, self._number = -1, 0

    def forget(self) -> None:
        """Begin a new chain."""
        self._chain, self._number = self.owners.begin_chain(self.plan_id), 0

    def total(self, query: Query) -> np.ndarray:
        """Refused: nobody tells an exact sum."""
        raise PrivacyError("Owners tell no exact sums.")

    def answer(self, query: Query, receipt: Receipt) -> np.ndarray:
        """The sum of what the owners release."""
        receipt.take(query.mechanism, query.sum.noise_multiplier)
        if query.sum.told is not None:
            return np.full(query.sum.size, query.sum.told)
        found = self.owners.ask(self.plan_id, self._chain, self._number, query)
        self._number += 1
        return _summed(found, query.sum.size)

    def release(
        self, query: Query, receipt: Receipt, place: tuple[int, int], request: Mapping[str, Any]
    ) -> tuple[np.ndarray, float]:
        """The sum of what the owners release once, and the noise in it."""
        receipt.take(query.mechanism, query.sum.noise_multiplier)
        message = {
            "plan": place[0],
            "number": place[1],
            "query": encoded_query(query),
            "engine": self.owners.described(self.engine),
        }
        cost = GaussianEvent(query.mechanism, query.sum.noise_multiplier).cost
        shares = self.owners.shares(place[0], cost)
        found = self.owners.all("release", [{**message, "share": share} for share in shares])
        noise = math.hypot(*(reply["noise_sd"] for reply in found))
        return _summed([np.array(reply["value"]) for reply in found], query.sum.size), noise

    def noise_sd(self, mechanism: str, sum_: Any) -> float:
        """Of the sum of the answers of all owners."""
        return float(sum_.sensitivity * self.owners.multiplier(self.plan_id, mechanism))

    def close(self) -> None:
        """No more will be asked for the plan."""
        self.owners.close(self.plan_id)


def _summed(values: Sequence[np.ndarray], size: int) -> np.ndarray:
    if any(value.shape != (size,) or value.dtype.kind not in "if" for value in values):
        raise PrivacyError("An owner did not answer with the numbers that were asked for.")
    return np.asarray(sum(values), dtype="float64")


def _called(
    channel: Channel, method: str, message: Mapping[str, Any]
) -> Callable[[], dict[str, Any]]:
    """Begin a call of an owner."""
    wait = channel.call(method, packed(message))

    def found() -> dict[str, Any]:
        reply = unpacked(wait())
        if "error" in reply:
            raise _error_of(channel.name, reply["error"])
        answer: dict[str, Any] = reply["found"]
        return answer

    return found


def _error_of(name: str, error: Sequence[str]) -> Exception:
    """The error that an owner told of."""
    kind = getattr(errors, error[0], PrivacyError)
    found: Exception = kind(f"{name}: {error[1]}")
    return found


def _difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """How two models differ; empty if they do not."""
    if mine["parameters"] != theirs["parameters"]:
        return f"its parameters are {theirs['parameters']}, not {mine['parameters']}"
    if mine["observed"] != theirs["observed"]:
        return f"it observes {theirs['observed']}, not {mine['observed']}"
    pairs = zip(mine["densities"], theirs["densities"], strict=True)
    for k, (one, other) in enumerate(pairs):
        same = one == other
        if isinstance(one, int | float) and isinstance(other, int | float):
            same = math.isclose(one, other, rel_tol=_ALIKE, abs_tol=_ALIKE)
        if not same:
            return f"the {'prior' if k % 2 else 'likelihood'} of the same numbers is another"
    return ""
