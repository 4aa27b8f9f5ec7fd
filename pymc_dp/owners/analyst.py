"""The analyst's side: a model without records, whose questions several owners answer.

Answers of owners add up, and so do the variances of their noise (MATH 12; Algorithm 2 of Yildirim &
Ermis 2019): with s^2 = sum_k s_k^2 in place of s^2 every formula of one owner holds.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol
from weakref import finalize

import numpy as np
import pymc as pm
from pymc.model import Model

from pymc_dp import errors
from pymc_dp.base.checks import SMALLEST_EPSILON, check_positive, warn
from pymc_dp.budget import PrivacyBudget
from pymc_dp.clusters.shards import take_place
from pymc_dp.errors import BudgetExceeded, PrivacyError, UnsafeModel
from pymc_dp.owners.lockstep import Line, Lockstep
from pymc_dp.owners.messages import encoded, encoded_query, packed, unpacked
from pymc_dp.owners.network import There
from pymc_dp.owners.study import ModelFile, Owner
from pymc_dp.owners.teller import PROTOCOL, Teller, structure_of, teller_of
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
from pymc_dp.records.units import row_counts
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
class Known:
    """What is known of one owner; all of it is public."""

    name: str
    channel: Channel
    facts: dict[str, Any]  # as it told them last
    units: int  # of its ledger, that its budget had for this study at the beginning

    def own_cost(self, cost: int, whole: int) -> int:
        """Its cost, in units of its own ledger, of what costs `cost` of `whole` in the plan."""
        own = math.floor(Fraction(cost, whole) * self.units)
        if own < 1:
            raise BudgetExceeded(f"The budget of {self.name} is too small for so many answers.")
        return own


class Study:
    """What stands for the records of several owners; see `Owners`."""

    trusted = False  # owners run no code that they are sent, and draw no batches

    def __init__(
        self,
        owners: Sequence[Any],
        model: Model,
        model_hash: str | None,
        certificates: Path | None,
        patience: float,
        end_runs: bool,
    ) -> None:
        self.model, self._hash = model, model_hash  # the analyst's, without records
        self._certificates, self._patience = certificates, patience
        self._process = os.getpid()
        self._values = {model.rvs_to_values[rv] for rv in model.free_RVs}
        self._end_runs = end_runs
        self.owners = [self._met(k, given) for k, given in enumerate(owners)]
        self._refuse_unlike()
        self._refuse_used_up()
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
        self._at_once = threading.Lock()
        self._lockstep: Lockstep | None = None
        self._line: Line | None = None
        self._check_structure(model)

    def _met(self, k: int, given: Any) -> Known:
        """An owner, and what it says of itself."""
        channel: Channel
        if isinstance(given, str):
            channel = There(given, self._certificates, self._patience)
        else:
            made = given if isinstance(given, Owner) else None
            found = given if made is None else made.model
            if not isinstance(found, Model):
                raise ValueError(
                    f"owners[{k}] must be an address, a dp.Owner, or a PyMC model with a "
                    f"PrivacyBudget, not {type(given).__name__}."
                )
            if found is self.model:
                raise ValueError(f"owners[{k}] is the analyst's model. Build one without records.")
            teller = teller_of(found, None if made is None else made.model_hash)
            channel = Here(teller, f"owner {k + 1}")
        if self._end_runs:
            _called(channel, "end_all", {})()
        facts = _called(channel, "describe", {})()
        if facts["protocol"] != PROTOCOL:
            raise UnsafeModel(f"{channel.name} uses another version of pymc_dp. Use the same one.")
        channel.name = facts["dataset"] or channel.name
        if None not in (self._hash, facts["model_hash"]) and self._hash != facts["model_hash"]:
            raise UnsafeModel(
                f"The model file of {channel.name} is not yours: its SHA-256 begins with "
                f"{facts['model_hash'][:12]}, yours with {str(self._hash)[:12]}. Send each other "
                "the file, and serve again."
            )
        return Known(channel.name, channel, facts, int(facts["remaining"]))

    def _refuse_unlike(self) -> None:
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

    def _refuse_used_up(self) -> None:
        for owner in self.owners:
            facts = owner.facts
            if epsilon_from_mu(mu_from_units(owner.units), facts["delta"]) >= SMALLEST_EPSILON:
                continue
            waiting = (
                f" {facts['unended']} of its runs were not ended (of a process that was killed, "
                "say). If no run is under way, dp.Owners(..., end_runs=True) ends them, and what "
                "they did not use comes back."
            )
            raise BudgetExceeded(
                f"Nothing is left of the budget of {owner.name}, epsilon = {facts['epsilon']:g}."
                f"{waiting if facts['unended'] else ''}"
            )

    def _example_ids(self, model: Model) -> np.ndarray:
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

    def processes(self, chains: int) -> int:
        """How many processes a number of chains takes: they ask together, and compute little."""
        return chains

    def stated(self) -> dict[str, Any]:
        """What a statement says of the owners, each with its own promise; the largest for all."""
        promise = ("epsilon", "delta", "gdp_mu")
        about = ("neighboring", "privacy_unit", "n_units", "dataset", "public", "bounds")
        kept = (*promise, *about, "spent", "ledger", "ledger_head")
        found = []
        for owner in self.owners:
            with suppress(PrivacyError):  # one that does not answer any more has promised before
                owner.facts = _called(owner.channel, "describe", {})()
            found.append({"name": owner.name, **{name: owner.facts[name] for name in kept}})
        secure = all(owner.facts["secure"] for owner in self.owners)
        return {
            "owners": found,
            **{name: max(facts[name] for facts in found) for name in promise},
            "spent": {"epsilon": max(facts["spent"] for facts in found)},
            "ledger": "of each owner",
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
        try:
            self.all("agree", messages)
        except BaseException:  # those that have agreed have charged
            if plan["kind"] != PREPARATION:
                with suppress(PrivacyError):
                    self.all("close", [{"plan": plan_id}] * len(self.owners))
            raise
        self._gate()  # before chains are begun in other processes
        if plan["kind"] == PREPARATION:
            self._parts[plan_id] = [message["units"] for message in messages]
        else:
            squares: dict[str, float] = {}
            for message in messages:
                for name, multiplier in message["noise_multipliers"].items():
                    squares[name] = squares.get(name, 0.0) + multiplier**2
            self._multipliers[plan_id] = {name: math.sqrt(x) for name, x in squares.items()}

    def _preparation(self, plan_id: int, plan: Mapping[str, Any], owner: Known) -> dict[str, Any]:
        units = owner.own_cost(plan["units"], self.whole)
        return {"plan": plan_id, "kind": PREPARATION, "sampler": plan["sampler"], "units": units}

    def _run(
        self, plan_id: int, plan: Mapping[str, Any], owner: Known, rows: Any
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

    # -- asking ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For a chain in another process, which asks through this one."""
        gate = self._gate()
        kept = {"_multipliers": self._multipliers, "example_ids": self.example_ids}
        return {**kept, "n_units": self.n_units, "_way": (gate.address, gate.key)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _process=None, _line=None)

    def _gate(self) -> Lockstep:
        if self._lockstep is None:
            self._lockstep = Lockstep(self._ask_together, self._begin_chain)
            self._way = self._lockstep.address, self._lockstep.key
            finalize(self, self._lockstep.close)
        return self._lockstep

    def _away(self) -> Line | None:
        """The way to the process that reaches the owners; None in that one."""
        if self._process == os.getpid():
            return None
        if self._line is None:
            self._line = Line(*self._way)
        return self._line

    def begin_chain(self, plan_id: int) -> int:
        """Number of a new chain of a plan."""
        line = self._away()
        return self._begin_chain(plan_id) if line is None else line.begin(plan_id)

    def _begin_chain(self, plan_id: int) -> int:
        return next(self._chains.setdefault(plan_id, itertools.count()))

    def ask(self, plan_id: int, question: dict[str, Any]) -> np.ndarray:
        """The sum of the answers of all owners to a question of a chain."""
        line = self._away()
        if line is not None:
            return line.ask(plan_id, question)
        [found] = self._ask_together(plan_id, [question])
        if isinstance(found, Exception):
            raise found
        return np.asarray(found)

    def _ask_together(self, plan_id: int, questions: Sequence[dict[str, Any]]) -> list[Any]:
        """For each question, the sum of the answers of all owners, or an error."""
        message = packed({"plan": plan_id, "questions": list(questions)})
        replies = self.all("ask", [message] * len(self.owners))
        return [
            self._sum_of([reply["answers"][k] for reply in replies]) for k in range(len(questions))
        ]

    def _sum_of(self, answers: Sequence[dict[str, Any]]) -> Any:
        for owner, answer in zip(self.owners, answers, strict=True):
            if "error" in answer:
                return _error_of(owner.name, answer["error"])
        values = [np.array(answer["answer"]) for answer in answers]
        return _summed(values, len(values[0]))

    def all(
        self, method: str, messages: Sequence[Mapping[str, Any] | bytes]
    ) -> list[dict[str, Any]]:
        """What all owners answer to one message each, packed or not, sent at once."""
        with self._at_once:
            pairs = zip(self.owners, messages, strict=True)
            waiting = [_called(owner.channel, method, message) for owner, message in pairs]
            found, failed = [], []
            for wait in waiting:
                try:
                    found.append(wait())
                except PrivacyError as error:
                    failed.append(error)
        if failed:
            raise failed[0]
        return found

    def close(self, plan_id: int) -> None:
        """Tell all owners that no more will be asked for a plan."""
        if plan_id in self._multipliers:
            self.all("close", [{"plan": plan_id}] * len(self.owners))


class Asked(Answers):
    """The records of all owners, for the queries of a plan, or of one chain of it."""

    def __init__(self, owners: Study, rows: Rows, plan_id: int) -> None:
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
        question = {"chain": self._chain, "number": self._number, "query": encoded_query(query)}
        found = self.owners.ask(self.plan_id, question)
        self._number += 1
        if found.shape != (query.sum.size,):
            raise PrivacyError("Owners did not answer with the numbers that were asked for.")
        return found

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
    channel: Channel, method: str, message: Mapping[str, Any] | bytes
) -> Callable[[], dict[str, Any]]:
    """Begin a call of an owner."""
    wait = channel.call(method, message if isinstance(message, bytes) else packed(message))

    def found() -> dict[str, Any]:
        reply = unpacked(wait())
        if "error" in reply:
            raise _error_of(channel.name, reply["error"])
        answer: dict[str, Any] = reply["found"]
        return answer

    return found


def _error_of(name: str, error: Sequence[str]) -> Exception:
    """The error that an owner told of."""
    kind = getattr(errors, str(error[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, PrivacyError)):
        kind = PrivacyError
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
    owners : sequence of str, Owner or pymc.Model
        Two or more.  An address, ``"host:port"``, at which ``pymc_dp serve`` answers; or, for study
        and tests in one process, an :class:`Owner`, or a model of its own with records and a
        `PrivacyBudget`.  The models must be equal but for their records.
    model_file : str or Path, optional
        Python that makes the model (see :class:`Owner`); the same file as that of the owners.
    certificates : str or Path, optional
        Folder with the analyst's certificate, for owners at addresses.  Without, they must be on
        this machine.
    patience : float, default 300
        Seconds for which an owner that does not answer is asked again.
    end_runs : bool, default False
        Whether to end all runs that were agreed and not ended, of a process that was killed, say:
        what they did not use comes back to the budgets.  Only if no run is under way.
    model : pymc.Model, optional
        The analyst's model, built on made-up rows.  Default: that of `model_file`, or of the
        context.

    Attributes
    ----------
    model : pymc.Model
        To sample: ``dp.sample(model=owners.model)``.

    Raises
    ------
    ImportError
        If gRPC is not installed and an owner has an address.
    ValueError
        If there are fewer than two owners, or an argument is not usable.
    UnsafeModel
        If the models differ, or protect against different changes of the records.
    BudgetExceeded
        If an owner's budget is used up.
    OwnerUnavailable
        If an owner does not answer.

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

    def __init__(
        self,
        owners: Sequence[Any],
        *,
        model_file: str | Path | None = None,
        certificates: str | Path | None = None,
        patience: float = 300.0,
        end_runs: bool = False,
        model: Model | None = None,
    ) -> None:
        if isinstance(owners, str | Model) or not isinstance(owners, Sequence) or len(owners) < 2:
            raise ValueError("owners must be a list of two or more.")
        file = None if model_file is None else ModelFile(model_file)
        if file is not None and model is not None:
            raise ValueError("Give model_file or model, not both: the file makes the model.")
        if file is not None:
            model = file.model(file.example())
        self.model = pm.modelcontext(model)
        self._study = Study(
            owners,
            self.model,
            None if file is None else file.hash,
            None if certificates is None else Path(certificates),
            check_positive("patience", patience),
            end_runs,
        )

    def __repr__(self) -> str:
        return f"Owners({', '.join(owner.name for owner in self._study.owners)})"
