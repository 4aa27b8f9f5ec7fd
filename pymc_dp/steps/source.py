"""What the settings of a step come from: the model's parts, the budget, a private preparation."""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pymc.model import Model

from pymc_dp.base import threads
from pymc_dp.base.compat import working
from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import BudgetExceeded
from pymc_dp.kernels.interfaces import Prior
from pymc_dp.privacy.events import MU2_UNIT
from pymc_dp.privacy.forecast import SAMPLERS, Forecast
from pymc_dp.privacy.preparation import Preparation, Unpayable
from pymc_dp.publication.results import check_step
from pymc_dp.records.bounds import known_limits
from pymc_dp.rows.contributions import made_up_norms
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.engine import Engine, RowEngine
from pymc_dp.rows.expected import law_unknown
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.rows.limits import score_norm_limit
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from pymc_dp.rows.structure import is_flat
from pymc_dp.steps.effects import Effects, effects_of
from pymc_dp.steps.progress import Shown
from pymc_dp.steps.resuming import PREPARES, Version, private_arrays, unfinished_preparations
from pymc_dp.steps.start import (
    NO_NUMBERS,
    few_prior_draws,
    improper,
    prior_coordinates,
    prior_draws,
)
from pymc_dp.tuning.langevin import prepare_langevin, prior_only
from pymc_dp.tuning.paths import can_pay
from pymc_dp.tuning.prepared import Form, Prepared
from pymc_dp.tuning.scaled import FIRST_PART, Scaled, prepare_scaled

#: Shown among the messages of PyMC.
_log = logging.getLogger("pymc.pymc_dp")
#: Parts of what a preparation left for the chains that may be gone when it is resumed: more than
#: the first is a warning, more than the second a refusal.
_GONE, _TOO_MUCH_GONE = 0.05, 0.9

_T = TypeVar("_T")


@dataclass(frozen=True)
class Design:
    """How a sampler moves and what it may ask.

    `engine` has the records that queries are about, in the coordinates in which they are clipped;
    `prior` has the public terms in the `coordinates` of the chains.  `shares` are relative parts of
    what is left of the budget; the ledger keeps `settings`.
    """

    coordinates: Coordinates
    engine: Engine
    prior: Prior
    clip_norms: dict[str, float]
    shares: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


class Learned(NamedTuple):
    """What a preparation of DPLangevin gave.

    `engine` has the records in the coordinates in which they are clipped.  `found` is in terms of
    `effects`, or in unconstrained parameters where these are None.
    """

    found: Prepared
    engine: Engine
    effects: Effects | None


class Source:
    """Records, prior and budget of a model, before a sampler has coordinates.

    Raises UnsafeModel, NotFactorizable or BudgetExceeded before anything is spent.
    """

    def __init__(
        self,
        model: Model,
        budget: PrivacyBudget,
        compile_kwargs: dict[str, Any] | None,
        counts: Mapping[str, int],
        progressbar: bool,
        set_aside: int = 0,
    ) -> None:
        self.model = model
        self.budget = budget
        #: Ledger units that were charged already for what the chains will release.
        self.set_aside = set_aside
        self.counts = dict(counts)
        self.progressbar = progressbar
        self.compile_kwargs = compile_kwargs
        # the number of entries of the data must not be told where it is private
        check_step(model, data=not budget.rows_are_private)
        self.records = budget.records_of(model)
        if not self._interrupted():
            self.refuse_if_used_up()
        theta = Coordinates(np.zeros(len(self.records.initial)), np.eye(len(self.records.initial)))
        self.terms = PublicTerms.of(self.records, theta, compile_kwargs)
        self._refuse_start()
        self.engine = RowEngine.of(self.records, theta, compile_kwargs)
        self._preparation: Preparation | None = None

    @property
    def paths(self) -> int:
        """Iterations of all chains and runs."""
        iterations = self.counts["draws"] + self.counts["tune"]
        return self.counts["runs"] * self.counts["chains"] * iterations

    @property
    def sensitivity(self) -> float:
        """l2 sensitivity of a sum of vectors of norm at most 1."""
        return self.budget.sensitivity

    def remaining(self) -> int:
        """Ledger units of which shares are parts: those that are left, and those set aside."""
        return self.budget.ledger.remaining(self.budget.account) + self.set_aside

    def _interrupted(self) -> bool:
        """Whether a preparation of a step, of whatever settings, waits to be resumed."""
        return any(
            not plan["settings"]["set_aside"]  # equal steps on batches share theirs
            for _, plan in unfinished_preparations(self.budget)
        )

    def _hint(self) -> str:
        """A hint that a preparation goes on, if one can be paid to its end."""
        ledger, account = self.budget.ledger, self.budget.account
        left = ledger.remaining(account)
        waiting = unfinished_preparations(self.budget)
        if not any(p["units"] - ledger.charged(account, of) <= left for of, p in waiting):
            return ""
        return (
            " A preparation that was interrupted goes on, at no more than it planned, when what "
            "was called then is called again with the same settings."
        )

    def _refuse_start(self) -> None:
        """A search cannot begin where the prior has no density."""
        value, slope = self.terms.both(self.records.initial)
        if np.isnan(value) or not (np.isfinite(value) or np.isfinite(slope).all()):
            raise ValueError(
                f"The prior density at the initial values is not a number. {NO_NUMBERS}"
            )

    def refuse_if_used_up(self, hint: bool = True) -> None:
        """Raise `BudgetExceeded` unless something is left; hint at a preparation that goes on."""
        budget = self.budget
        if budget.ledger.account_info(budget.account).closed:
            raise BudgetExceeded(
                f"The account of this privacy budget (epsilon={budget.epsilon:g}) was closed, and "
                "what it had left was released; no record was read. A new analysis of these data "
                "needs a new budget, decided by whoever answers for the data."
            )
        if self._used_up():
            raise BudgetExceeded(
                f"The privacy budget (epsilon={budget.epsilon:g}) is used up; no record was read. "
                "Draws made before can still be released. A new analysis of these data needs a new "
                "budget, decided by whoever answers for the data."
                f"{self._hint() if hint else ''}"
            )

    def _used_up(self) -> bool:
        account = self.budget.ledger.account_info(self.budget.account)
        return self.remaining() <= account.cap >> 20  # what the integers of a used plan leave over

    def by_hand(self, scaling: np.ndarray, clip_norms: dict[str, float]) -> Design:
        """A design with given coordinates and bounds."""
        return self._design(Coordinates(self.records.initial, scaling), clip_norms)

    def _design(
        self,
        coordinates: Coordinates,
        clip_norms: dict[str, float],
        settings: Mapping[str, Any] | None = None,
    ) -> Design:
        engine: Engine = self.engine.with_coordinates(coordinates)
        predictor, _ = recognise(self.engine, self.compile_kwargs)
        if predictor is not None:  # the same likelihood, several times as fast
            linear = PredictorEngine(self.engine, predictor).with_coordinates(coordinates)
            engine = linear if linear.pays(self.budget.n_public) else engine
        return Design(
            coordinates,
            engine,
            self.terms.with_coordinates(coordinates),
            clip_norms,
            settings=dict(settings or {}),
        )

    def start(self) -> Coordinates:
        """Location and spread of the prior."""
        return prior_coordinates(self.records, self.terms, self.few_prior_draws)

    def learn(
        self,
        sampler: str,
        *,
        share: float = 1.0,
        form: Form | None = None,
        consistent_clipping: bool | None = None,
        step_size: float | None = None,
        n_steps: int | None = None,
    ) -> Learned:
        """The private preparation of DPLangevin, consistently clipped where that is possible.

        Where no form is asked for and the shared values of the likelihood are non-linear in the
        parameters, the records are asked about these.  Raises ValueError if consistent clipping is
        asked for and not available.
        """
        effects = self.effects() if form is None else None
        if effects is None:
            records = self.engine
        else:
            form, records = "quadratic", effects.engine
        self._compile(records)
        flat = self._is_flat(records)
        unknown = law_unknown(records)
        if consistent_clipping and unknown:
            raise ValueError(f"consistent_clipping=True is not available: {unknown}")
        consistent = not unknown and consistent_clipping is not False
        predictor, _ = recognised = recognise(records, self.compile_kwargs)
        limits = known_limits(self.model, self.budget.public)
        start = self.start()
        engine = records if predictor is None else PredictorEngine(records, predictor)
        settings = {
            "form": form,
            "effects": effects is not None,
            "consistent": consistent,
            "step_size": step_size,
            "n_steps": n_steps,
            "share": share,
        }

        def ask(releases: Shown) -> Prepared:
            releases.ask(engine)
            return prepare_langevin(
                releases,
                self.terms if effects is None else effects,
                start if effects is None else effects.start,
                records,
                paths=self.paths,
                sensitivity=self.sensitivity,
                form=form,
                step_size=step_size,
                n_steps=n_steps,
                limit=lambda clip: score_norm_limit(records, clip, limits, recognised)[0],
                flat=flat,
                counts=predictor is not None and predictor.counts,
                consistent=consistent,
            )

        found = self.prepared(ask, sampler, settings, share, records)
        if found.trusted and found.clipping.heavy_tails:
            self._warn_heavy(sampler)
        if not found.trusted:
            self.warn_untrusted(sampler)
            if effects is not None:
                return Learned(prior_only(found, start), self.engine, None)
        engine = engine.with_coordinates(found.clip)
        if found.form != "quadratic":
            self._tell_threads(engine)
        return Learned(found, engine, effects)

    def effects(self) -> Effects | None:
        """What records see of the parameters, where it is non-linear in them."""
        draws = self.few_prior_draws
        return effects_of(self.records, self.engine, draws, self.compile_kwargs)

    @cached_property
    def improper(self) -> list[str]:
        """Names of the free variables that have no proper prior."""
        few = self.few_prior_draws
        return improper(self.model, self.budget.public, self.terms, self.start(), few, self.names())

    def names(self) -> list[tuple[str, slice]]:
        """The free variables, and where their entries are among the parameters."""
        parameters = self.records.parameters
        return [
            (self.model.values_to_rvs[value].name, where)
            for value, where in zip(parameters.values, parameters.slices, strict=True)
        ]

    @cached_property
    def few_prior_draws(self) -> np.ndarray | None:
        """Always the same (500, d) unconstrained draws from the prior, if it can be drawn from."""
        return few_prior_draws(self.model, self.budget, self.records)

    def _compile(self, engine: RowEngine) -> None:
        """Evaluate on made-up data what the preparation will ask for; it takes seconds."""
        at = np.zeros(engine.d)
        with working("Compiling the model", self.progressbar), np.errstate(all="ignore"):
            engines = [engine]
            if not law_unknown(engine) and (alone := engine.each_alone()) is not engine:
                engines.append(alone)
            for made_up in (each.synthetic() for each in engines):
                made_up.log_likelihood(at)
                made_up.scores(at)

    def _is_flat(self, records: RowEngine) -> bool:
        """Whether log-likelihoods are piecewise linear, near the start."""
        at = records.coordinates.location
        nearby = np.random.default_rng(0).normal(0.0, 0.3, (2, len(at)))
        return is_flat(records.groups, [at + move for move in nearby])

    def prior_draws(self, size: int, seed: int) -> np.ndarray | None:
        """Unconstrained draws of all that is public, if that is the prior and it can be drawn."""
        public = set(self.budget.public)
        if any(rv.name in public for rv in self.model.observed_RVs):
            return None
        draws = prior_draws(self.model, self.budget, self.records, size, seed)
        return draws if draws is not None and np.isfinite(draws).all() else None

    def prepared(
        self,
        ask: Callable[[Shown], _T],
        sampler: str,
        settings: Mapping[str, Any],
        share: float = 1.0,
        engine: RowEngine | None = None,
        needed: float = 1.0,
    ) -> _T:
        """What `ask` makes of the releases of a new preparation, or of one that was interrupted.

        `ask` is called twice where the rest of an interrupted preparation cannot be paid, since
        something else was: what is left then pays for a new one.  `settings` are the public ones on
        which the requests depend.  `share` is the part of what is left of the budget that shares
        are parts of, and `needed` the part of that which the requests cost at most.  `engine` has
        the records to ask about; default: in unconstrained parameters.

        Raises BudgetExceeded if nothing is left for a new preparation, and ValueError if no part of
        the budget could pay for the chains afterwards; nothing was spent then.
        """
        asked = (sampler, settings, share, engine, needed)
        try:
            with self._preparing(*asked) as releases:
                found = ask(releases)
        except Unpayable:
            with self._preparing(*asked, again=True) as releases:
                found = ask(releases)
        return found

    def compare_rest(self) -> None:
        """Warn if chains get less than their preparation was made for.

        Raises BudgetExceeded if next to nothing is left for them.
        """
        preparation = self._preparation
        if preparation is None or not preparation.resumed:
            return
        planned = preparation.units - preparation.spent
        left = self.budget.ledger.remaining(self.budget.account)
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
                f"{what}: their noise would bear no relation to it. Build a step with other draws "
                "or chains, which prepares again with what is left."
            )
        warnings.warn(
            f"{what}: their noise is larger, and they move worse than planned.",
            UserWarning,
            stacklevel=6,
        )

    def _preparing(
        self,
        sampler: str,
        settings: Mapping[str, Any],
        share: float,
        engine: RowEngine | None,
        needed: float,
        again: bool = False,
    ) -> Shown:
        """As :meth:`prepared`; `again` asks for a new preparation."""
        given = (engine or self.engine, self.budget.ledger, self.budget.account)
        asked: dict[str, Any] = {
            "sampler": sampler + PREPARES,
            "settings": {**self.counts, "set_aside": self.set_aside, **settings},
            "n_public": self.budget.n_public,
        }
        before = Preparation.resume(*given, **asked)
        lost = 0 if before is None else before.lost
        if before is None or again or self._is_stale(before.plan_id):
            form = settings.get("form", "chains")
            units = self._units(sampler, share, form, hint=before is None)
            if before is not None:
                self._warn_if_given_up(before, units)
            preparation = Preparation.begin(
                *given, **asked, units=units, needed=math.ceil(Fraction(needed) * units)
            )
            if before is not None:
                before.finish()
            self.budget.ledger.versions[preparation.plan_id] = self._version()
            _log.info(
                "%s prepares: private releases from what is left of the budget, %s, shown one by "
                "one in budget.table().",
                sampler,
                self.budget.describe(max(units - self.set_aside, 0)),
            )
        else:
            preparation = before
            if not self.set_aside:  # what equal steps on batches share may cost less
                preparation.required = math.ceil(Fraction(needed) * preparation.units) + lost
            _log.info(
                "%s resumes a preparation that was begun before: what was released is not "
                "paid again.",
                sampler,
            )
        self._preparation = preparation
        return Shown(preparation, self.progressbar)

    def _units(self, sampler: str, share: float, form: str | None, hint: bool) -> int:
        """Ledger units that a new preparation plans with; warns, or refuses, if these are too few.

        `hint` says that there is no preparation of the same settings.
        """
        self.refuse_if_used_up(hint)
        units = math.floor(Fraction(share) * self.remaining())
        expected = self._forecast(sampler, units)
        if (form or expected.form) != "quadratic" and not can_pay(self.paths, units / MU2_UNIT):
            raise ValueError(
                f"the budget cannot pay for {self.paths} iterations: each would get less than the "
                "smallest charge (2^-40 of squared mu). Plan fewer draws or chains, or use a "
                "larger epsilon."
            )
        self._warn_if_another_waits(sampler)
        if hint:
            self._warn_if_paid_for(sampler)
        self._warn_if_improper()
        if not expected.enough or expected.diagonal:
            warnings.warn(f"{expected.advice} Nothing has been spent.", UserWarning, stacklevel=6)
        return units

    def _is_stale(self, plan_id: int) -> bool:
        """Whether data or priors were replaced since a preparation began."""
        version = self._version()
        return not version.is_that_of(self.budget.ledger.versions.setdefault(plan_id, version))

    def _warn_if_given_up(self, before: Preparation, units: int) -> None:
        """Warn that a preparation that cannot be resumed was paid for all the same."""
        account = self.budget.ledger.account_info(self.budget.account)
        warnings.warn(
            f"A preparation that has cost {before.spent / account.cap:.0%} of the budget cannot "
            "be resumed (data or priors were replaced since, a release was charged by a "
            "process that was killed, or what is left does not pay for the rest). A new one is "
            f"made with {units / account.cap:.0%} of the budget.",
            UserWarning,
            stacklevel=7,
        )

    @property
    def unfinished(self) -> int | None:
        """Plan of the preparation that an equal step resumes, until it is finished.

        None on batches: equal steps share their preparation for good, as there is no budget for
        another.
        """
        if self._preparation is None or self.set_aside:
            return None
        return self._preparation.plan_id

    @property
    def secure(self) -> bool:
        """Whether all noise of the preparation was secure."""
        return self._preparation is None or self._preparation.secure

    def _version(self) -> Version:
        digest = hashlib.blake2b()
        named = [self.model[name] for name in self.budget.public if name in self.model.named_vars]
        arrays = [v.get_value() for v in named if hasattr(v, "get_value")]
        start = self.records.initial
        for array in (*arrays, start, self.terms.gradient(start)):
            digest.update(np.ascontiguousarray(array).tobytes())
        return Version(digest.digest(), private_arrays(self.model, self.budget.public))

    def _forecast(self, sampler: str, units: int) -> Forecast:
        """Forecast, before anything is spent, whether the result will be mostly noise."""
        once = sampler in ("laplace", "find_MAP")  # one preparation, and draws for nothing
        like = "DPLangevin" if once else "DPPenalty"
        langevin = once or sampler == "DPLangevin"
        return self.budget.forecast(
            sampler if sampler in SAMPLERS else like,
            1000 if once else self.counts["draws"],
            self.counts["tune"],
            self.counts["chains"] * self.counts["runs"],
            d=self.records.parameters.size,
            mu2=units / MU2_UNIT,
            norms=made_up_norms(self.engine, self.records.initial) if langevin else None,
        )

    def _warn_if_improper(self) -> None:
        if self.improper:
            warnings.warn(
                f"The prior of {', '.join(self.improper)} is improper (pm.Flat, pm.HalfFlat, or a "
                "density that does not fall). What the privacy noise hides of the records is left "
                "to the prior, and there is no posterior then; a search begins at the initial "
                "point and may not arrive. Give a proper prior, as wide as public knowledge asks "
                "for. Nothing has been spent.",
                UserWarning,
                stacklevel=7,
            )

    def _warn_if_another_waits(self, sampler: str) -> None:
        """Warn that a preparation plans with all that is left, chains of earlier steps included."""
        mine = [e for e in self.budget.ledger.entries() if e.account == self.budget.account]
        begun = Counter(e.plan for e in mine if e.kind == "run")
        waiting = [e for e in mine if e.kind == "plan" and e.payload.get("events")]
        if any(begun[e.plan] < e.payload.get("runs", 1) for e in waiting):
            warnings.warn(
                f"{sampler} is about to use all that is left of the budget, but another step was "
                "built on it that has not made all of its runs, and will not be paid. Run that one "
                "first, or build each step on its own budget, on one ledger.",
                UserWarning,
                stacklevel=7,
            )

    def _warn_if_paid_for(self, sampler: str) -> None:
        """Warn that a call with other settings does not use what an earlier one has paid for."""
        entries = [e for e in self.budget.ledger.entries() if e.account == self.budget.account]
        newest = max((e.seq for e in entries if e.kind == "run"), default=0)
        began = {e.plan: e.seq for e in entries if e.kind == "plan"}
        for plan_id, plan in unfinished_preparations(self.budget):
            spent = self.budget.ledger.charged(self.budget.account, plan_id)
            if began[plan_id] > newest and spent and not plan["settings"]["set_aside"]:
                name, counts = plan["sampler"].removesuffix(PREPARES), plan["settings"]
                warnings.warn(
                    f"What was paid for a preparation of {name} ({counts['draws']} draws, "
                    f"{counts['chains']} chains) is not used: {sampler} prepares again, with what "
                    "is left of the budget. The same call as before would resume it.",
                    UserWarning,
                    stacklevel=7,
                )
                return

    def scaled(
        self, sampler: str, centred: bool = True, along_axes: bool = False
    ) -> tuple[Scaled, Design]:
        """A design in coordinates that were learned privately, with one clip norm for all."""
        start = self.start()
        self._compile(self.engine)
        needed = 1.0 if centred else FIRST_PART
        settings = {"along_axes": along_axes}

        def ask(releases: Shown) -> Scaled:
            return prepare_scaled(
                releases,
                self.terms,
                start,
                self.engine,
                sensitivity=self.sensitivity,
                flat=self._is_flat(self.engine),
                centred=centred,
                along_axes=along_axes,
                consistent=not law_unknown(self.engine),
            )

        found = self.prepared(ask, sampler, settings, needed=needed)
        if not found.trusted:
            self.warn_untrusted(sampler)
        design = self._design(found.coordinates, {}, {"trusted": found.trusted})
        self._tell_threads(design.engine)
        return found, design

    def _tell_threads(self, engine: Engine) -> None:
        """Log how records are shared among processors, by public numbers."""
        if not engine.divisible or self._preparation is None:
            return
        numbers, chains = self._preparation.n_public * engine.d, self.counts["chains"]
        alone = threads.pieces(numbers, threads.available())
        if alone > 1:
            _log.info(
                "Records are read by %d threads if chains run one after the other, by %d in each "
                "of %d chains at once. NUMBA_NUM_THREADS sets a limit.",
                alone,
                threads.pieces(numbers, threads.of_each(chains)),
                chains,
            )

    def _warn_heavy(self, sampler: str) -> None:
        """Warn that clipping may matter; decided from a released histogram."""
        warnings.warn(
            f"{sampler} found heavy tails in the scores of the records: some records hold much of "
            "the information, and clipping them may bias the posterior by more than its intervals "
            "say. A likelihood with heavier tails (StudentT instead of Normal), or public bounds "
            "of the data (dp.bounds), would help.",
            UserWarning,
            stacklevel=4,
        )

    def warn_untrusted(self, sampler: str) -> None:
        """Warn that the preparation found nothing."""
        follows = "what follows is about the prior"
        if self.improper:
            follows += (
                f". That of {', '.join(self.improper)} is improper: this is no posterior, and says "
                "nothing"
            )
        warnings.warn(
            f"The budget (epsilon={self.budget.epsilon:g}) is too small for these data and this "
            f"model: the preparation of {sampler} could not tell the records from the privacy "
            f"noise, and {follows}. A larger epsilon, more records, fewer parameters or a narrower "
            "prior would help.",
            UserWarning,
            stacklevel=4,
        )
