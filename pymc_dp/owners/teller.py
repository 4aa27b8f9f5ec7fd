"""One owner of records: agrees on plans, charges its own ledger, answers with noise of its own.

It trusts nobody.  Whatever an analyst sends is checked, or refused; a question is answered for a
plan that was agreed and charged before, with noise that this process draws; and for one charge
there is one answer, which is kept and given again if it is asked for again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from filelock import FileLock, Timeout
from pymc.model import Model

from pymc_dp import errors
from pymc_dp.budget import require_budget
from pymc_dp.errors import BudgetExceeded, LedgerError, PrivacyError, UnsafeModel
from pymc_dp.owners.messages import (
    OF_CHAINS,
    OF_RELEASES,
    coordinates,
    decoded_query,
    packed,
    positive,
    unpacked,
)
from pymc_dp.privacy.account import PREPARATION
from pymc_dp.privacy.accounting import GaussianEvent, mu_from_units
from pymc_dp.privacy.answer import Grid, NormCounts, Query, VectorSum
from pymc_dp.privacy.holder import holder_of, rehearse
from pymc_dp.privacy.journal import States, canonical
from pymc_dp.privacy.meter import PaidChain, interrupts_wait, noise_is_secure, pay_run
from pymc_dp.privacy.plan import Plan
from pymc_dp.privacy.preparation import Preparation
from pymc_dp.privacy.queries import EnergyError, Kick, LogRatio, ScoreAt
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from pymc_dp.tuning.effects import effects_of
from pymc_dp.tuning.model_parts import ModelParts

_log = logging.getLogger("pymc_dp.owners")
#: Version of the messages, and what may be called.
PROTOCOL = 1
METHODS = ("describe", "agree", "release", "ask", "close", "end_all")
#: Which questions the mechanisms of chains answer.
_MECHANISMS: dict[str, tuple[type, ...]] = {
    "gradient": (ScoreAt, Kick),
    "log_ratio": (LogRatio,),
    "energy_error": (EnergyError,),
}
#: Made-up rows, and places, at which two models are compared.
_ROWS, _PLACES = 16, 3
#: Most engines in other coordinates, plans, and chains of a plan, that are held at a time.
_ENGINES, _PLANS, _CHAINS = 4, 4, 32
#: Draws, tune and answers per iteration, and chains, that anybody may want.
_MOST, _MOST_CHAINS = 10**6, 10**3


class Engines:
    """The records of a model, as plans may ask for them."""

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts
        self._bases: dict[tuple[bool, bool], RowEngine] = {}
        self._found: dict[str, RowEngine] = {}

    def of(self, description: Any) -> RowEngine:
        """The engine of a description, as `described` makes them; PrivacyError if there is none."""
        parts = {"predictor", "effects", "tilted", "at"}
        if not isinstance(description, dict) or set(description) != parts:
            raise PrivacyError("An engine does not have its parts.")
        predictor, effects, tilted = (description[k] for k in ("predictor", "effects", "tilted"))
        if not all(isinstance(flag, bool) for flag in (predictor, effects, tilted)):
            raise PrivacyError("An engine does not have its parts.")
        key = json.dumps(description, sort_keys=True)
        if key not in self._found:
            base = self._base(predictor, effects)
            found = base.with_coordinates(coordinates(description["at"], base.d))
            while len(self._found) >= _ENGINES:
                del self._found[next(iter(self._found))]
            self._found[key] = found.tilted() if tilted else found
        return self._found[key]

    def _base(self, predictor: bool, effects: bool) -> RowEngine:
        if (predictor, effects) not in self._bases:
            parts = self.parts
            rows = parts.engine
            if effects:
                found = effects_of(parts.records, rows, parts.prior_draws, parts.compile_kwargs)
                if found is None:
                    raise PrivacyError("The records of this model are not seen through effects.")
                rows = found.engine
            if predictor:
                linear, _ = recognise(rows, parts.compile_kwargs)
                if linear is None:
                    raise PrivacyError("The records of this model have no linear predictor.")
                rows = PredictorEngine(rows, linear)
            self._bases[predictor, effects] = rows
        return self._bases[predictor, effects]


@np.errstate(all="ignore")
def structure_of(parts: ModelParts) -> dict[str, Any]:
    """What two models must have in common.  It reads no record; numbers in a model are public.

    Parameters and observed variables, and the log densities of made-up rows and of the parameters
    at a few places: a constant of the model that differs changes them.
    """
    parameters, engine = parts.records.parameters, parts.engine
    groups = [group.synthetic(_ROWS, None) for group in engine.groups]
    users = any(group.units is not None for group in groups)
    made_up = engine.on(groups, _ROWS // 2 if users else _ROWS)
    rng, start = np.random.default_rng(0), np.zeros(parameters.size)
    numbers = []
    for _ in range(_PLACES):
        theta = start + 0.3 * rng.standard_normal(parameters.size)
        numbers.append(float(made_up.log_likelihood(theta).sum()))
        numbers.append(float(parts.terms.log_density(theta)))
    return {
        "parameters": [
            [value.name, list(shape)]
            for value, shape in zip(parameters.values, parameters.shapes, strict=True)
        ],
        "observed": [list(group.functions.graph.names) for group in engine.groups],
        "densities": [x if np.isfinite(x) else str(x) for x in numbers],
    }


class _Chain:
    """One chain of a plan: what it may still ask, and what it was answered last."""

    def __init__(self, plan: _AgreedPlan, kept: str | None) -> None:
        self._plan, self.number, self.digest = plan, -1, ""
        self.answer: list[float] = []
        self.path, self.kicks = -1, list[str]()  # the path under way: its number, and questions
        if kept is None:
            self.paid = PaidChain(plan.plan)
            return
        state = json.loads(kept)
        self.number, self.digest = state["number"], state["digest"]
        self.answer, self.path, self.kicks = (state[k] for k in ("answer", "path", "kicks"))
        self.paid = PaidChain(plan.plan, state["paid"])
        for kick in self.kicks:  # of another process: what units gathered is gathered again
            self.holder.total(plan.query(json.loads(kick)))

    @cached_property
    def holder(self) -> Any:
        """Who has the records, for this chain; they are read when it is first asked for."""
        engine = self._plan.engine
        if engine.elsewhere is None:
            engine.linear()  # made once, for all chains
        return holder_of(engine.of_another_chain(), self._plan.plan.plan_id)

    @property
    def state(self) -> dict[str, Any]:
        """For the ledger."""
        return {
            "number": self.number,
            "digest": self.digest,
            "answer": self.answer,
            "path": self.path,
            "kicks": self.kicks,
            "paid": self.paid.state,
        }

    def ask(self, number: int, message: Any) -> bool:
        """Make the answer to a question; False if it was made before."""
        asked = packed(message)
        digest = _digest(asked)
        if number == self.number and digest == self.digest:
            return False
        if number != self.number + 1:
            raise PrivacyError(
                "A question was asked again in other words, or out of its turn. It is not answered."
            )
        query = self._plan.query(message)
        of, path, kicks = query.of, self.path, self.kicks
        if isinstance(of, Kick):
            kicks = kicks if of.path == path else []
            path, most = of.path, self._plan.plan.per_iteration["gradient"]
            if len(kicks) >= most:
                raise PrivacyError("A path has no more kicks than an iteration.")
            kicks = [*kicks, asked.decode()]
        elif isinstance(of, EnergyError):
            if not kicks or (path, len(kicks)) != (of.path, of.kicks):
                raise PrivacyError("An energy error was asked for, but not for all kicks.")
            kicks = []
        self._plan.try_on_made_up(query)
        value = self.holder.answer(query, self.paid.pays(query.mechanism))
        self.number, self.digest, self.answer = number, digest, value.tolist()
        self.path, self.kicks = path, kicks
        return True


class _AgreedPlan:
    """A plan of chains that was agreed and charged."""

    def __init__(self, teller: Teller, plan_id: int, payload: Mapping[str, Any]) -> None:
        self._teller, self.plan = teller, Plan.of(plan_id, payload)
        self.engine = teller.engines.of(payload["settings"]["engine"])
        self.clip_norms: dict[str, float] = payload["settings"]["clip_norms"]
        self._grids = {
            name: Grid.finest(event.noise_multiplier, teller.budget.n_public)
            for name, event in self.plan.events.items()
        }
        self._tried: set[type] = set()
        teller.refuse_other_models(payload)
        #: Where chains are: as they were kept, and those that were asked last, in memory.
        self._key, self._begun, self._kept = teller.where(plan_id)
        self._chains: dict[int, _Chain] = {}
        self._unkept: dict[int, _Chain] = {}

    def query(self, message: Any) -> Query:
        """The query of a message, checked against what was agreed."""
        mechanism = message.get("mechanism") if isinstance(message, dict) else None
        if not isinstance(mechanism, str) or mechanism not in self._grids:
            raise PrivacyError("A question is of no mechanism that was agreed.")
        given = self._grids[mechanism], self._teller.budget.neighboring
        query = decoded_query(message, OF_CHAINS, self.engine.d, *given)
        if not isinstance(query.of, _MECHANISMS[mechanism]):
            raise PrivacyError("A question is not one of its mechanism.")
        if isinstance(query.sum, VectorSum) and query.sum.norm != self.clip_norms[mechanism]:
            raise PrivacyError("A question has another clip norm than was agreed.")
        return query

    def try_on_made_up(self, query: Query) -> None:
        """Compile and try what a new kind of question runs."""
        if type(query.of) not in self._tried:
            asked = [query]
            if isinstance(query.of, EnergyError):
                of, grid = query.of, self._grids["gradient"]
                sum_ = VectorSum(
                    grid, query.sum.neighboring, self.engine.d, self.clip_norms["gradient"]
                )
                kick = Query("gradient", Kick(of.path, of.start, of.end), sum_)
                of = EnergyError(of.path, 1, of.start, of.end)
                asked = [kick, Query(query.mechanism, of, query.sum)]
            rehearse(self.engine, asked)
            self._tried.add(type(query.of))

    def ask(self, questions: list[Any]) -> list[dict[str, Any]]:
        """Answers, kept before they are given."""
        given: list[dict[str, Any]] = []
        for question in questions:
            try:
                number, chain = self._chain(question)
                if chain.ask(_whole("number", question["number"]), question["query"]):
                    self._unkept[number] = chain
                given.append({"answer": chain.answer})
            except PrivacyError as error:
                given.append({"error": [type(error).__name__, str(error)]})
        if self._unkept:  # also what could not be kept when it was made, and was not given
            states = {k: canonical(chain.state) for k, chain in self._unkept.items()}
            self._teller.states.put(self._key, self._kept, states)
            self._kept.update(states)
            self._unkept.clear()
        if new := self._kept.keys() - self._begun:  # also those of a process that ended before this
            self._teller.budget.account.begin_chains(self.plan.plan_id, sorted(new))
            self._begun.update(new)
        return given

    def _chain(self, question: Any) -> tuple[int, _Chain]:
        if not isinstance(question, dict) or set(question) != {"chain", "number", "query"}:
            raise PrivacyError("A question does not have its parts.")
        number = _whole("chain", question["chain"])
        if number >= self.plan.chains:
            raise PrivacyError(f"The plan has {self.plan.chains} chains, and another one asks.")
        return number, self.chain(number)

    def chain(self, number: int) -> _Chain:
        """A chain of the plan, as it is now."""
        found = self._chains.pop(number, None) or _Chain(self, self._kept.get(number))
        idle = [k for k in self._chains if k not in self._unkept]
        if idle and len(self._chains) >= _CHAINS:
            del self._chains[idle[0]]
        self._chains[number] = found
        return found


def _digest(message: bytes) -> str:
    return hashlib.blake2b(message, digest_size=16).hexdigest()


def _whole(name: str, value: Any, least: int = 0, most: int = 2**53) -> int:
    """A whole number of a message."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PrivacyError(f"`{name}` of a message must be a whole number, {least} to {most}.")
    return value


def _counts(name: str, value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not set(value) <= set(_MECHANISMS):
        raise PrivacyError(f"`{name}` of a plan must count answers of known mechanisms.")
    return {mechanism: _whole(name, count, 1, _MOST) for mechanism, count in value.items()}


_tellers: WeakKeyDictionary[Model, Teller] = WeakKeyDictionary()


def teller_of(model: Model, model_hash: str | None = None) -> Teller:
    """The one that answers for a model in this process."""
    if model not in _tellers or _tellers[model].closed:
        _tellers[model] = Teller(model, model_hash)
    return _tellers[model]


class Teller:
    """An owner's side of all conversations about one model with a budget.

    Parameters
    ----------
    model : pymc.Model
        The owner's model, with its records and its `PrivacyBudget`.
    model_hash : str, optional
        Of the file that the model was made by.
    """

    def __init__(self, model: Model, model_hash: str | None = None) -> None:
        self.budget = require_budget(model, "An owner")
        self.parts = ModelParts(model, self.budget, computed=())
        self.engines = Engines(self.parts)
        self._hash, self._structure = model_hash, structure_of(self.parts)
        #: Of what a plan is agreed for.
        self.model_digest = _digest(packed({"hash": model_hash, "structure": self._structure}))
        ledger, self._process, self.closed = self.budget.ledger, os.getpid(), False
        resumed = "n_public" in self.budget.account.read().public
        if not (ledger.is_temporary or resumed or ledger.total_cap is not None):
            raise UnsafeModel(
                "A process that is started again would have another budget on the same ledger. "
                "Declare PrivacyBudget(..., resume=True), or use dp.Owner."
            )
        others = self.budget.account.twins()
        if others and ledger.total_cap is None:
            raise UnsafeModel(
                f"The ledger {ledger.path} has {len(others)} more of these budgets, of another "
                "promise, label or number of records, and no cap on them together. Make a ledger "
                "with one, dp.Ledger.create(path, epsilon, delta), or close those that are over."
            )
        self._lock = FileLock(f"{ledger.path}.owner", timeout=0, is_singleton=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise PrivacyError(
                "Another process answers for this owner, from the same ledger. Two would answer "
                "the same question with different noise. Stop the other one."
            ) from None
        try:
            self.states = States(ledger.path, durable=not ledger.is_temporary)
        except BaseException:
            self._lock.release()
            raise
        self._plans: dict[int, _AgreedPlan] = {}
        self._preparations: dict[int, Preparation] = {}
        self._one_at_a_time = threading.Lock()
        self._methods: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            method: getattr(self, f"_{method}") for method in METHODS
        }

    def close(self) -> None:
        """Answer no more; another process may."""
        with self._one_at_a_time:
            self.closed = True
            try:
                self.states.close()
            finally:
                self._lock.release()

    def handle(self, method: str, data: bytes) -> bytes:
        """The answer to a message: ``{"found": ...}``, or ``{"error": [name, text]}``.

        Texts are those of errors that were written for others to read; of any other error, only
        its kind is told.
        """
        try:
            with self._one_at_a_time, interrupts_wait():
                if self.closed or self._process != os.getpid():
                    raise PrivacyError("This is not the process that answers for the owner.")
                return packed({"found": self._methods[method](unpacked(data))})
        except LedgerError as error:  # its text names files
            _log.warning("%s", error)
            text = "The ledger of the owner refused: it has another plan of this number, or fails."
            return packed({"error": [LedgerError.__name__, text]})
        except PrivacyError as error:
            name = type(error).__name__
            name = name if hasattr(errors, name) else PrivacyError.__name__
            return packed({"error": [name, str(error)]})
        except Exception as error:
            text = f"The owner could not answer: {type(error).__name__}."
            return packed({"error": [PrivacyError.__name__, text]})

    def _describe(self, message: dict[str, Any]) -> dict[str, Any]:
        from pymc_dp import __version__

        budget = self.budget
        info = budget.account.read()
        return {
            "protocol": PROTOCOL,
            "version": __version__,
            "model_hash": self._hash,
            "structure": self._structure,
            "dataset": budget.dataset,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "neighboring": budget.neighboring,
            "privacy_unit": info.unit,
            "n_units": budget.n_public,
            "gdp_mu": mu_from_units(info.cap),
            "public": list(budget.public),
            "bounds": info.public["bounds"],
            "ledger_head": budget.ledger.head(),
            "remaining": 0 if info.closed else info.remaining,
            "unended": len(budget.account.unended()),
            "spent": budget.spent().epsilon,
            "secure": noise_is_secure(budget.ledger),
            "ledger": "temporary" if budget.ledger.is_temporary else "persistent",
        }

    # -- plans ----------------------------------------------------------------------------------

    def _agree(self, message: dict[str, Any]) -> dict[str, Any]:
        """Record a plan; one of chains is charged now.  The same plan again changes nothing."""
        plan_id, kind = _whole("plan", message.get("plan")), message.get("kind")
        name = message.get("sampler")
        if not isinstance(name, str) or len(name) > 100 or not name.isprintable():
            raise PrivacyError("A plan does not name its sampler.")
        if kind == PREPARATION:
            self._agree_preparation(plan_id, message)
        elif kind == "chains":
            self._agree_chains(plan_id, message)
        else:
            raise PrivacyError("A plan is of no kind that is known here.")
        return {}

    def _agree_preparation(self, plan_id: int, message: dict[str, Any]) -> None:
        if set(message) != {"plan", "kind", "sampler", "units"}:
            raise PrivacyError("A plan does not have its parts.")
        account = self.budget.account
        units = _whole("units", message["units"], 1)
        payload = {
            "kind": PREPARATION,
            "sampler": f"{message['sampler']}, for an analyst",
            "settings": {"model": self.model_digest},
            "secure": noise_is_secure(self.budget.ledger),
            "units": units,
        }
        known = account.charged(plan_id)
        if units - known > account.read().remaining:
            raise BudgetExceeded("What remains of the budget does not pay for this plan.")
        account.record_plan(plan_id, payload)
        _log.info(
            "Agreed: %s, one-off answers for at most epsilon = %.4g.",
            message["sampler"],
            self.budget.epsilon_of(units),
        )

    def _agree_chains(self, plan_id: int, message: dict[str, Any]) -> None:
        wanted = {"plan", "kind", "sampler", "draws", "tune", "chains", "per_iteration"}
        wanted |= {"at_start", "noise_multipliers", "clip_norms", "engine"}
        if set(message) != wanted:
            raise PrivacyError("A plan does not have its parts.")
        numbers = {
            name: _whole(name, message[name], least, most)
            for name, least, most in (
                ("draws", 1, _MOST),
                ("tune", 0, _MOST),
                ("chains", 1, _MOST_CHAINS),
            )
        }
        counts = {name: _counts(name, message[name]) for name in ("per_iteration", "at_start")}
        mechanisms = {name for of in counts.values() for name in of}
        multipliers, norms = message["noise_multipliers"], message["clip_norms"]
        if not counts["per_iteration"]:
            raise PrivacyError("A plan of chains asks for nothing in an iteration.")
        if not isinstance(multipliers, dict) or set(multipliers) != mechanisms:
            raise PrivacyError("A plan does not say how much noise each of its answers has.")
        clipped = mechanisms - {"energy_error"}
        if not isinstance(norms, dict) or set(norms) != clipped:
            raise PrivacyError("A plan does not say where each of its mechanisms clips.")
        clip_norms = {name: positive("clip_norms", norm) for name, norm in norms.items()}
        engine, n_public = self.engines.of(message["engine"]), self.budget.n_public
        events = {
            name: GaussianEvent(name, positive("noise_multipliers", multiplier))
            for name, multiplier in multipliers.items()
        }
        grids = {name: Grid.finest(e.noise_multiplier, n_public) for name, e in events.items()}
        if "gradient" in events:
            given = grids["gradient"], self.budget.neighboring, engine.d, clip_norms["gradient"]
            if VectorSum(*given).told is not None:
                raise PrivacyError("A clip norm of a plan is too small or large to compute with.")
        parts: dict[str, Any] = {**numbers, **counts, "events": events, "plan_id": plan_id}
        plan = Plan(message["sampler"], **parts)
        payload = plan.payload(
            engine=message["engine"],
            clip_norms=clip_norms,
            model=self.model_digest,
            secure=noise_is_secure(self.budget.ledger),
        )
        account, stages = self.budget.account, self.budget.account.stages(plan_id)
        if "finish" in stages:
            raise PrivacyError("A plan that was ended cannot be agreed again.")
        if "lease" not in stages and plan.run_cost > account.read().remaining:
            raise BudgetExceeded("What remains of the budget does not pay for this plan.")
        account.record_plan(plan_id, payload)
        if "run" not in stages:
            account.begin_run(plan_id, max_runs=1, run_cost=plan.run_cost)
        pay_run(account, plan)
        asked = ", ".join(f"{plan.releases(name)} of {name}" for name in events)
        _log.info(
            "Agreed: %s, %d chains of %d draws, %s. Charged so far: epsilon = %.4g of %.4g.",
            plan.sampler,
            plan.chains,
            plan.draws,
            asked,
            self.budget.spent().epsilon,
            self.budget.epsilon,
        )

    def refuse_other_models(self, payload: Mapping[str, Any]) -> None:
        """PrivacyError unless a plan was agreed for the model that is served."""
        if payload["settings"]["model"] != self.model_digest:
            raise PrivacyError(
                "The plan was agreed for another model than the one that is served now."
            )

    # -- answers --------------------------------------------------------------------------------

    def _release(self, message: dict[str, Any]) -> dict[str, Any]:
        """A one-off release of a preparation, or the one that was kept in its place."""
        if set(message) != {"plan", "number", "share", "query", "engine"}:
            raise PrivacyError("A request does not have its parts.")
        plan_id, number = _whole("plan", message["plan"]), _whole("number", message["number"])
        share = positive("share", message["share"])
        account, budget = self.budget.account, self.budget
        engine = self.engines.of(message["engine"])
        if engine.is_tilted:
            raise PrivacyError("One-off releases are about scores, and not about changes of them.")
        # the noise follows from the share: this grid only makes a query of the message
        grid = Grid.finest(1.0, budget.n_public)
        query = decoded_query(message["query"], OF_RELEASES, engine.d, grid, budget.neighboring)
        kept = account.kept(plan_id)
        asked = _digest(packed(message))
        if number < len(kept):
            values = kept[number].values
            if values["request"].get("asked") != asked:
                raise PrivacyError("Something else was released in this place.")
            return {"value": values["value"], "noise_sd": values["noise_sd"]}
        if plan_id not in self._preparations:
            payload = account.plan(plan_id)
            self.refuse_other_models(payload)
            self._preparations[plan_id] = Preparation(
                engine, account, plan_id, payload.get("units", 0), budget.n_public
            )
        preparation = self._preparations[plan_id]
        preparation.engine, preparation.asked = engine, asked
        preparation.skip_kept()
        if number != preparation.answered:
            raise PrivacyError("A request is out of its turn. It is not answered.")
        label, of = query.mechanism, query.of
        if isinstance(query.sum, NormCounts):
            _, value, noise_sd = preparation.histogram(label, of, share)
        else:
            assert isinstance(query.sum, VectorSum)
            value, noise_sd = preparation.vector_sum(label, of, query.sum.norm, share)
        return {"value": value.tolist(), "noise_sd": noise_sd}

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answers to questions of chains, one of each chain."""
        if set(message) != {"plan", "questions"} or not isinstance(message["questions"], list):
            raise PrivacyError("A message does not have its parts.")
        return {"answers": self._plan(message["plan"]).ask(message["questions"])}

    def _plan(self, number: Any) -> _AgreedPlan:
        plan_id = _whole("plan", number)
        if plan_id not in self._plans:
            stages = self.budget.account.stages(plan_id)
            if "lease" not in stages or "finish" in stages:
                raise PrivacyError("A question is about a plan that is not agreed, or was ended.")
            while len(self._plans) >= _PLANS:  # it is loaded again when it is asked for
                del self._plans[next(iter(self._plans))]
            self._plans[plan_id] = _AgreedPlan(self, plan_id, self.budget.account.plan(plan_id))
        return self._plans[plan_id]

    def where(self, plan_id: int) -> tuple[str, set[int], dict[int, str]]:
        """Name of a plan in the file of states, its chains that have begun, and where they are."""
        key, begun = self.budget.account.chains(plan_id)
        kept = self.states.of(key)
        if not begun <= kept.keys():
            raise LedgerError(f"{self.states.path} is not the file that belongs beside the ledger")
        return key, begun, kept

    def _close(self, message: dict[str, Any]) -> dict[str, Any]:
        """End a plan of chains, and return what was not used."""
        plan_id = _whole("plan", message.get("plan"))
        if "lease" in self.budget.account.stages(plan_id):
            self._end(plan_id)
        return {}

    def _end_all(self, message: dict[str, Any]) -> dict[str, Any]:
        """End all plans of chains, whoever agreed them."""
        for plan_id in self.budget.account.unended():
            self._end(plan_id)
        return {}

    def _end(self, plan_id: int) -> None:
        """End a plan of chains, and return what was charged for iterations that were not begun."""
        plan = Plan.of(plan_id, self.budget.account.plan(plan_id))
        key, _, _ = self.where(plan_id)
        self._plans.pop(plan_id, None)
        states = self.states.end(key)  # before it is counted: nobody begins a chain meanwhile
        begun = sum(PaidChain(plan, json.loads(x)["paid"]).begun for x in states.values())
        unused = (
            (plan.iteration_cost, plan.chains * plan.iterations - begun),
            (plan.start_cost, plan.chains - len(states)),
        )
        self.budget.account.end_run(plan_id, unused)
        _log.info("Ended. Charged: epsilon = %.4g.", self.budget.spent().epsilon)
