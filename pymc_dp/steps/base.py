"""What all private step methods share: the plan, the coordinates, the life of a chain in PyMC."""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pymc as pm
from pymc.model import Model
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.util import get_random_generator, get_value_vars_from_user_vars

from pymc_dp.base import compat as _compat
from pymc_dp.base import threads
from pymc_dp.base.checks import check_integer, warn
from pymc_dp.base.compat import full_signature
from pymc_dp.base.matrices import Coordinates
from pymc_dp.budget import check_model, get_budget, require_budget
from pymc_dp.errors import PlanMismatch, PrivacyError, UnsafeModel
from pymc_dp.kernels.interfaces import Prior, start_log_prior
from pymc_dp.privacy import noise
from pymc_dp.privacy.accounting import BATCHES
from pymc_dp.privacy.chains import BatchQueries, Queries
from pymc_dp.privacy.journal import SPENDING
from pymc_dp.privacy.meter import Meter, noise_is_secure
from pymc_dp.privacy.plan import Batches, Plan, make_plan, per_mechanism
from pymc_dp.steps.settings import (
    check_batches,
    fixed_batches,
    scaling_matrix,
)
from pymc_dp.tuning.forecast import SAMPLERS
from pymc_dp.tuning.model_parts import Design, ModelParts
from pymc_dp.tuning.preparing import Preparing, Version, improper_prior, private_arrays, too_small


@dataclass_state
class PrivateStepState(StepMethodState):
    """PyMC's own state; privacy noise and paid iterations are never part of it."""


_OF_A_CHAIN = ("_model", "_state", "_point")  # or of the process: a pickle leaves them out


_MEANING = {
    "step_size": "the step in z, where theta = initial point + scaling @ z",
    "n_steps": "the number of integration steps of one trajectory",
    "clip_norm": "the bound on one record's score (its gradient of the log-likelihood) in z",
    "scaling": "the scale of each parameter: about its posterior standard deviation",
    "draws": "the draws per chain that pm.sample will be asked for",
    "chains": "the number of chains that pm.sample will be asked for",
}


def refuse_unknown(sampler: str, given: Iterable[str], known: list[str]) -> None:
    """Raise TypeError for the first unknown argument, with what was probably meant."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise TypeError(
                f"{sampler} has no argument `{name}`. "
                + (f"Did you mean `{near[0]}`?" if near else f"It takes {', '.join(known)}.")
            )


def required(sampler: str, **values: Any) -> None:
    """Raise ValueError for arguments that were not given, with what they mean."""
    missing = [name for name, value in values.items() if value is None]
    if missing:
        meanings = "; ".join(f"{name} ({_MEANING[name]})" for name in missing)
        caution = (
            " Choose settings from public knowledge only: a value tuned on the private data is not "
            "covered by the guarantee."
        )
        raise ValueError(
            f"{sampler} needs {meanings}." + ("" if {*missing} <= {"draws", "chains"} else caution)
        )


class PrivateStep(_compat.NamedStep):
    """Base class of the private step methods.

    A subclass names its releases in :meth:`_releases`, makes the state of a chain in
    :meth:`_initial_state` and moves it in :meth:`_transition`.
    """

    name = "private"
    _shown: Mapping[str, tuple[str, str]] = {
        "dp_epsilon": ("ε ≤", ".3f"),
        "dp_accept_rate": ("Accepted", ".2f"),
    }
    stats_dtypes_shapes: dict[str, Any] = {  # noqa: RUF012 - PyMC reads it from the class
        "dp_accept_rate": (np.float64, []),
        "dp_accepted": (bool, []),
        "dp_epsilon": (np.float64, []),
        "dp_frozen": (bool, []),
        "dp_plan_id": (np.int64, []),
        "warning": (SamplerWarning, None),
    }
    _state_class = PrivateStepState
    _by_hand: tuple[str, ...] = ("clip_norm", "scaling")  # all learned privately, or all given
    _needed: tuple[str, ...] = ()  # attributes that must be given with them
    _takes_batches = False
    batch_size: int | None = None
    _batch_queries: type[BatchQueries] = BatchQueries

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Tell `help` and editors what `**kwargs` stands for."""
        super().__init_subclass__(**kwargs)
        hidden = {"shares", "settings", "computed", "clip_norm", "batch_size", "batches"}
        hidden -= {*cls._by_hand}
        if cls._takes_batches:
            hidden -= {"batch_size", "batches"}
        cls.__signature__ = full_signature(cls, hidden)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse unknown arguments before anything else is checked."""
        known = full_signature(cls, {"shares", "settings"}).parameters
        refuse_unknown(cls.__name__, kwargs, list(known))
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        vars: Any = None,
        *,
        draws: int | None = None,
        tune: int = 0,
        chains: int | None = None,
        clip_norm: float | Mapping[str, float] | None = None,
        scaling: Any = None,
        shares: Mapping[str, float] | None = None,
        noise_multiplier: float | Mapping[str, float] | None = None,
        runs: int = 1,
        share: float = 1.0,
        batch_size: int | None = None,
        batches: str = "poisson",
        model: Model | None = None,
        rng: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        initial_point: Any = None,
        blocked: bool = True,
        progressbar: bool = True,
        computed: Sequence[str] | None = None,  # by `dp.sample`; None: all, by ``pm.sample``
        settings: Mapping[str, Any],
    ) -> None:
        sampler = type(self).__name__
        given = {"clip_norm": clip_norm, "scaling": scaling}
        by_hand = {name: given[name] for name in self._by_hand}
        self.automatic = all(value is None for value in by_hand.values())
        needed = {} if self.automatic else {n: getattr(self, n) for n in self._needed} | by_hand
        required(sampler, draws=draws, chains=chains, **needed)
        counts = {
            "draws": check_integer("draws", draws, minimum=1),
            "tune": check_integer("tune", tune, minimum=0),
            "chains": check_integer("chains", chains, minimum=1),
            "runs": check_integer("runs", runs, minimum=1),
        }
        if self.automatic and noise_multiplier is not None:
            raise ValueError(
                f"noise_multiplier sets the noise by hand, and {sampler} then needs "
                f"{' and '.join(by_hand)} by hand as well. Leave all of them out to have them "
                "learned privately."
            )
        if not blocked:
            raise ValueError(f"{sampler} moves all variables together; leave `blocked` at True.")
        model = pm.modelcontext(model)
        self.budget = require_budget(model, sampler)
        records = self.budget.records
        if counts["runs"] > 1 and records is not None and not records.trusted:
            raise ValueError("Owners agree on one run at a time. Build a step for each, runs=1.")
        self.vars = _all_variables(vars, model, sampler)
        self.rng = get_random_generator(rng)
        self.tune = bool(tune)
        self._model = model
        self._secure = noise_is_secure(self.budget.ledger)

        if self._takes_batches:
            mode = (compile_kwargs or {}).get("mode")
            self.batch_size = check_batches(
                batches, batch_size, self.budget, counts["runs"], noise_multiplier, mode
            )
        elif batch_size is not None or batches != "poisson":
            raise ValueError(
                f"{sampler} reads all records in every iteration: leave batch_size and batches "
                "out. DPSGLD, DPSGNHT, DPPenalty and DPBarker take batches."
            )
        if batch_size is not None and share != 1.0:
            raise ValueError("share must be 1 with batches, which are planned for a whole budget.")
        mine = None if batch_size is None else self.budget.batches()
        set_aside = 0 if mine is None else mine["reserved"]
        self._version = Version(b"", private_arrays(model, ()))
        parts = ModelParts(model, self.budget, compile_kwargs, computed)
        kinds = [kind.__name__ for kind in type(self).__mro__]
        like = next((kind for kind in kinds if kind in SAMPLERS), "DPPenalty")
        preparing = Preparing(parts, sampler, counts, progressbar, set_aside, like, share)
        self.parameters = parts.records.parameters
        d, step_size = self.parameters.size, np.asarray(getattr(self, "step_size", None))
        if step_size.shape not in ((), (d,)):
            raise ValueError(
                f"step_size must be a number or a vector of {d}, got shape {step_size.shape}."
            )
        self.initial = parts.records.initial
        self._edge = ~np.isfinite(self.parameters.ravel(model.initial_point()))
        design = None
        if not self.automatic:
            preparing.refuse_if_used_up()
            design = self._given(parts, scaling_matrix(scaling, self.parameters, model), clip_norm)
            design = replace(design, shares=dict(shares or {}))
        charges: AbstractContextManager[Batches | None] = nullcontext()
        if self.batch_size is not None:  # before anything else is released
            per_iteration, at_start = self._releases()
            [(mechanism, once)] = per_iteration.items()
            assert once == 1 and not at_start
            kind = mechanism, batches, self.batch_size
            charges = fixed_batches(*kind, self.budget, counts, noise_multiplier, self.automatic)
        with charges as charged:
            self._build(preparing, design, counts, noise_multiplier, charged, settings)

    def _build(
        self,
        preparing: Preparing,
        design: Design | None,
        counts: Mapping[str, int],
        noise_multiplier: Any,
        batches: Batches | None,
        settings: Mapping[str, Any],
    ) -> None:
        """Do what needs the budget: the preparation, the plan, the queries of the chains."""
        if design is None:
            preparing.set_aside = 0 if batches is None else batches.reserved
            design = self._prepare(preparing)
        self.coordinates = design.coordinates
        self.prior: Prior = design.prior
        sampler, budget = type(self).__name__, self.budget
        if batches is not None:
            self.plan = plan = Plan(
                sampler, counts["draws"], counts["tune"], counts["chains"], batches=batches
            )
            self.queries: Queries = self._batch_queries(
                preparing.parts.engine.with_coordinates(design.coordinates),
                Meter(budget.account, plan.plan_id, {batches.event: 1}, {}, plan.iterations, True),
                batches.event,
                design.clip_norms[batches.event.mechanism],
                budget.n_public,
                getattr(self, "likelihood_power", 1.0),
            )
        else:
            per_iteration, at_start = self._releases()
            if per_iteration or at_start:
                preparing.compare_rest()
            self.plan = plan = make_plan(
                sampler,
                **counts,
                per_iteration=per_iteration,
                at_start=at_start,
                available=preparing.available(),
                shares=design.shares,
                noise_multiplier=noise_multiplier,
            )
            answers = plan.answers(per_iteration), plan.answers(at_start)
            self.queries = self._open(
                engine=design.engine,
                meter=Meter(budget.account, plan.plan_id, *answers, plan.iterations),
                events=plan.events,
                clip_norms=design.clip_norms,
                neighboring=budget.neighboring,
                n_public=budget.n_public,
            )
        self.queries.compile()
        settings = {
            **settings,
            **design.settings,
            **self._settle(),
            "improper": preparing.parts.improper if self.automatic else [],
        }
        self.prior.gradient(np.zeros(self.parameters.size))
        budget.account.record_plan(
            plan.plan_id,
            plan.payload(
                clip_norm=design.clip_norms,
                location=self.coordinates.location.tolist(),
                scaling=self.coordinates.scaling.tolist(),
                secure=self._secure and preparing.secure,
                sentences=self._sentences(settings),
                **settings,
            ),
        )
        if budget.records is not None and plan.events:
            asked = {
                **{name: getattr(plan, name) for name in ("sampler", "draws", "tune", "chains")},
                "per_iteration": plan.per_iteration,
                "at_start": plan.at_start,
                "events": plan.events,
                "clip_norms": design.clip_norms,
            }
            budget.records.agree(plan.plan_id, {"kind": "chains", **asked}, design.engine)
        self._unfinished = preparing.unfinished
        self._stats: dict[str, Any] = {}
        self._blank_stats: dict[str, Any] = {}
        self._forget_chain()

    # -- what a sampler defines -----------------------------------------------------------------

    @abstractmethod
    def _prepare(self, preparing: Preparing) -> Design:
        """Learn the settings privately, and set those of the step itself."""

    def _settle(self) -> dict[str, Any]:
        """Settings that follow from the noise of the plan, for the ledger."""
        return {}

    @abstractmethod
    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        """Releases of each mechanism per iteration, and at the start of a chain."""

    def _given(self, parts: ModelParts, scaling: np.ndarray, clip_norm: Any) -> Design:
        """A design from the settings that are given by hand."""
        per_iteration, at_start = self._releases()
        # an energy error is clipped to an interval of its own
        clipped = [name for name in {**per_iteration, **at_start} if name != "energy_error"]
        bounds = per_mechanism("clip_norm", clip_norm, clipped)
        return parts.design(Coordinates(parts.records.initial, scaling), bounds)

    def _sentences(self, settings: Mapping[str, Any]) -> list[str]:
        """What the privacy statement says of the draws."""
        if settings.get("trusted") is False:  # noise decides where the chains go
            return [too_small("about the prior, or where they began"), *improper_prior(settings)]
        return [self._exactness()]

    def _exactness(self) -> str:
        """How the draws differ from those of the posterior, where settings were found or given."""
        return (
            "Whether the posterior is exact depends on clipping, which is not reported: it is if "
            "the bounds of the sampler hold for every record."
        )

    def _open(self, **settings: Any) -> Queries:
        """Queries of the chains, from the arguments of `Queries`."""
        return Queries(**settings)

    @abstractmethod
    def _initial_state(self, z: np.ndarray) -> Any:
        """The kernel's state at z; may make the releases paid for at the start."""

    @abstractmethod
    def _transition(self, state: Any, iteration: int) -> tuple[Any, bool]:
        """One iteration: the new state, and whether the proposal was accepted."""

    # -- the life of a chain --------------------------------------------------------------------

    def set_rng(self, rng: Any) -> None:
        """Begin a chain with a generator for the public randomness (PyMC 5)."""
        self.rng = get_random_generator(rng, copy=False)
        self._forget_chain()

    def setup_chain(self, rng: Any, tune: int, draws: int) -> None:
        """Begin a chain (PyMC 6)."""
        self.set_rng(rng)

    @property
    def default_tune_steps(self) -> int:
        """What PyMC 6 takes for `tune` if ``pm.sample`` is called without it."""
        return self.plan.tune

    def _forget_chain(self) -> None:
        self._state: Any = None
        self._point: dict[str, np.ndarray] | None = None
        self._iteration = 0
        self._accepted = 0
        self._run = 0
        self._spent_before = 0
        self._cap = 0
        self._beside: dict[str, Any] | None = None
        self._epsilon_at: tuple[Any, float] = (None, 0.0)
        self._warned = False

    def _add_stat(self, name: str, blank: np.ndarray) -> None:
        """Declare a vector statistic; `blank` is its value where no iteration was made."""
        kind = (np.dtype((np.float64, blank.shape)), list(blank.shape))
        self.stats_dtypes_shapes = {**self.stats_dtypes_shapes, name: kind}
        self.stats_dtypes = [{key: of[0] for key, of in self.stats_dtypes_shapes.items()}]
        self._blank_stats = {**self._blank_stats, name: blank}

    @property
    def tuning(self) -> bool:
        """Whether the chain is still in the iterations that are not kept."""
        return self._iteration < self.plan.tune

    def belongs_to(self, model: Model) -> bool:
        """Whether the step was built for `model` and its budget.

        Parameters
        ----------
        model : pymc.Model

        Returns
        -------
        bool
        """
        return model is self._model and get_budget(model) is self.budget

    def close(self) -> None:
        """Return what was charged for iterations that were not begun."""
        self.queries.meter.close()
        self.queries.holder.close()

    def finish(self) -> None:
        """End the preparation; until then an equal step resumes it, at no cost.

        `dp.sample` ends it when its result is complete. After `pm.sample` nothing tells what became
        of the draws, except what charged chains have left.
        """
        if self._unfinished is not None:
            self.budget.account.finish_plan(self._unfinished)

    @property
    def waits(self) -> bool:
        """Whether an equal step resumes what was paid for this one: no chain was charged."""
        charged = self.budget.account.charged
        return self._unfinished is not None and not charged(self.plan.plan_id)

    def _start(self, d: int) -> np.ndarray:
        """Where a chain begins if the user gave no start: about the posterior, chains apart."""
        return self.rng.standard_normal(d)

    def _begin_chain(self, point: dict[str, np.ndarray]) -> None:
        if noise.is_insecure() and self._secure:
            raise PrivacyError("Insecure test noise was switched on after the step was built.")
        theta = self.parameters.ravel(point)
        theta = np.where(self._edge & ~np.isfinite(theta), self.initial, theta)
        z = self.coordinates.z(theta)
        if self.automatic and np.allclose(theta, self.initial, rtol=1e-6, atol=1e-9):
            z = self._start(len(z))
        if self.automatic and not np.isfinite(self.prior.log_density(z)):
            z = self._start(len(z))  # outside of the public ball: too far from the posterior
        start_log_prior(z, self.prior)  # refuses a start outside of the support, uncharged
        threads.share(self.plan.chains)
        self.queries.begin_chain()
        mine = list(self.budget.account.entries())
        runs = sum(e.kind == "run" and e.plan == self.plan.plan_id for e in mine)
        self._run = runs - 1
        self._beside = self.budget.batches()  # final, since this run was begun
        self._cap = self.budget.account.read().cap
        self._spent_before = sum(
            e.amount
            for e in mine
            if e.kind in SPENDING and e.kind != BATCHES and e.plan != self.plan.plan_id
        )
        if self.queries.meter.frozen:
            return
        self._state = self._initial_state(z)
        self._point = self.parameters.point(self.coordinates.theta(self._state.z))

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[Any]]:
        """One iteration; UnsafeModel if another step method has moved the variables since."""
        if self._point is None:
            self._begin_chain(point)
            if self._point is None:  # frozen from the beginning
                self._point = {name: np.array(value) for name, value in point.items()}
        elif any(point[name].tobytes() != value.tobytes() for name, value in self._point.items()):
            raise UnsafeModel(
                "Another step method has moved the variables between two iterations of "
                f"{self.plan.sampler}; such draws are not private. Sample with one step."
            )
        stats: dict[str, Any] = {
            "dp_plan_id": self.plan.plan_id,
            "dp_epsilon": self._epsilon_now(),
            "dp_accept_rate": self._accepted / max(self._iteration, 1),
            "dp_accepted": False,
            "dp_frozen": True,
            "warning": None,
            **self._blank_stats,
        }
        if self._state is not None and self.queries.begin_iteration():
            self._state, accepted = self._transition(self._state, self._iteration)
            self._iteration += 1
            self._accepted += int(accepted)
            rate = self._accepted / self._iteration
            stats.update(self._stats)
            stats.update(dp_accept_rate=rate, dp_accepted=bool(accepted), dp_frozen=False)
            if accepted:
                self._point = self.parameters.point(self.coordinates.theta(self._state.z))
        elif not self._warned:
            self._warned = True
            stats["warning"] = SamplerWarning(
                WarningType.CONVERGENCE,
                "The privacy budget is used up: the chain stays where it is and no record is read. "
                "Frozen draws are marked dp_frozen and dropped by dp.release.",
                "warn",
            )
        return {name: value.copy() for name, value in self._point.items()}, [stats]

    def _warn_if_small(self) -> None:
        """Say so, before spending, when the budget buys next to nothing."""
        event = self.plan.events["gradient"]
        mu2 = self.plan.releases("gradient") / event.noise_multiplier**2
        draws = mu2 / (4.0 * self.queries.clip_norms["gradient"] ** 2)
        if draws < 10:
            warn(
                f"The gradients of this plan are worth about {draws:.2g} effective draws, if the "
                "scaling is about the posterior's: the result will be mostly noise. A larger "
                "epsilon, more records or a smaller clip_norm would help. Nothing has been spent."
            )

    # -- the plan -------------------------------------------------------------------------------

    def _epsilon_now(self) -> float:
        """Epsilon spent once all chains have come as far as this one; rounded up.

        It depends on the iteration alone, as what other chains have leased depends on timing. A run
        has 25 values of it, at a millisecond each, or one with batches, at a second.
        """
        plan, budget, batches = self.plan, self.budget, self._beside
        iterations = plan.iterations
        stride = max(1, iterations // 25) if batches is None else iterations
        done = min(-(-(self._iteration + 1) // stride) * stride, iterations)
        if self._epsilon_at[0] != (self._run, done):
            per_chain = plan.start_cost + done * plan.iteration_cost
            units = self._spent_before + self._run * plan.run_cost + plan.chains * per_chain
            beside = 0 if batches is None else batches["reserved"]
            units = min(units, self._cap - beside)
            epsilon = budget.epsilon_of(units, batches)
            self._epsilon_at = ((self._run, done), epsilon)
        return self._epsilon_at[1]

    def _about_to_sample(self, call: _compat.SampleCall | None) -> None:
        """Check, in the parent process before a chain starts, that this is the planned run."""
        plan = self.plan
        expected = (
            f"pm.sample(draws={plan.draws}, tune={plan.tune}, chains={plan.chains}, step=step)"
        )
        self.queries.meter.refuse_other_threads()
        if call is None:
            raise PlanMismatch(
                f"{plan.sampler} was not started by pm.sample, so its plan cannot be checked. "
                f"Call {expected} or dp.sample."
            )
        if not self.belongs_to(call.model):
            raise PlanMismatch(
                f"{plan.sampler} was built for another model than the one being sampled. Build "
                "the step inside the model's context."
            )
        if call.step is not self:
            raise UnsafeModel(
                f"{plan.sampler} is combined with other step methods, which would move the "
                f"variables without privacy after it. Nothing was spent. Call {expected}."
            )
        if not Version(b"", private_arrays(call.model, ())).is_that_of(self._version):
            raise PlanMismatch(
                f"Data were replaced (pm.set_data) since this {plan.sampler} was built, which "
                "would sample the old data. Nothing was spent. Build the step again."
            )
        check_model(self.budget, call.model)
        if (call.draws, call.tune, call.chains) != (plan.draws, plan.tune, plan.chains):
            raise PlanMismatch(
                f"{plan.sampler} was planned for draws={plan.draws}, tune={plan.tune}, "
                f"chains={plan.chains}, but pm.sample was called with draws={call.draws}, "
                f"tune={call.tune}, chains={call.chains}. Nothing was spent. Call {expected}, or "
                "build the step with the numbers you want."
            )
        records, at_once = self.budget.records, min(call.cores, call.chains)
        if records is not None and at_once > records.processes(call.chains):
            raise PlanMismatch(
                "The records are on other machines, all of which work for one chain at a time, and "
                f"pm.sample was called with cores={call.cores}. Nothing was spent. Add cores=1."
            )
        self.budget.account.begin_run(
            plan.plan_id,
            max_runs=plan.runs,
            run_cost=plan.run_cost,
            batches=None if plan.batches is None else plan.batches.to_dict(),
        )

    # -- PyMC -----------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_version", *_OF_A_CHAIN) and not name.endswith("__newargs")
        }
        return object.__new__, (type(self),), {**kept, **dict.fromkeys(_OF_A_CHAIN)}


def _all_variables(vars: Any, model: Model, sampler: str) -> list[Any]:
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    if vars is not None:
        chosen = set(get_value_vars_from_user_vars(vars, model))
        if chosen != set(values):
            left = [value.name for value in values if value not in chosen]
            raise UnsafeModel(
                f"{sampler} must move all variables of the model, but `vars` leaves out {left}; "
                "another step would sample them without privacy. Leave `vars` out."
            )
    return values
