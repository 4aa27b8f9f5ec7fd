"""DPLangevin as a PyMC step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from pymc_dp.base.checks import check_integer, check_number, check_positive
from pymc_dp.kernels import langevin
from pymc_dp.kernels.interfaces import ClipInterval, HaltonJitter, PathQueries
from pymc_dp.kernels.langevin import ConstantInterval, CurvatureInterval
from pymc_dp.kernels.targets import InBasis, NoRecords
from pymc_dp.steps.base import PrivateStep, required
from pymc_dp.tuning.choice import FORMS, learn_form
from pymc_dp.tuning.effects import InEffects
from pymc_dp.tuning.forms import Form, Plain
from pymc_dp.tuning.model_parts import Design
from pymc_dp.tuning.preparing import Preparing


class DPLangevin(PrivateStep):
    """Private Langevin trajectories: the privacy noise is the friction.  The recommended sampler.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    draws, tune, chains : int
        The plan: what ``pm.sample`` will be called with.  Noise is calibrated to it; another call
        is refused before anything is spent.  With settings by hand, tuning iterations move without
        the accept test, to reach the bulk of the posterior from afar; they are charged like others.
    form : {"auto", "anchored", "plain", "quadratic"}
        What the chains ask of the records (see Notes). By default the form that makes most of the
        budget, decided from releases.
    consistent_clipping : bool, optional
        Give back what clipping takes from the scores of an anchor on average, over outcomes that
        the model would draw for each record (Fisher consistency), so that short clip norms leave no
        bias where the model is true. Default: where each record is one row with one outcome of
        known support (all usual distributions, also censored, zero-inflated and mixed).
    step_size : float, optional
        h, the step in coordinates in which the posterior is about N(0, I).
    n_steps : int, optional
        L, gradients per iteration.
    clip_norm, scaling, curvature, log_concave, energy_clip
        For settings by hand, from public knowledge alone: `scaling` is the A of theta = initial
        point + A z (number, (d,), (d, d) or dict by variable name), `clip_norm` bounds the norm of
        one record's score in z, `curvature` bounds the spectral norm of the Hessian of one record's
        log-likelihood there (``|A|^2 B^2 / 4`` for logistic regression with rows of norm at most
        B; the chain is exact then if gradients are never clipped), halved in effect by
        `log_concave`; `energy_clip`, about ``0.1 * clip_norm``, is used where no such bound is
        known. `step_size` is needed too, and nothing is spent on a preparation.
    momentum : {"persistent", "fresh"}, optional
        Keep the momentum between iterations, or draw it again. Default: persistent for the plain
        form with ``n_steps=1``, else fresh.
    friction : float, optional
        Least friction, per unit of time: public noise is added where the privacy noise is weaker,
        which keeps the chain from moving in circles. Default: 0.3 with fresh momentum, else 1.
    jitter : float, default 0.0
        Step sizes vary by this fraction, by a randomised Halton sequence.
    energy_share : float, optional
        Part of the budget for accept tests; the rest pays for gradients. For settings by hand.
    noise_multiplier : float or {"gradient": float, "energy_error": float}, optional
        Noise standard deviation over sensitivity, by hand; default: so that the plan uses the
        budget.
    runs : int, default 1
        How many times ``pm.sample`` may be called with this step.
    share : float, default 1
        Part of what is left of the budget that may be used, in squared mu.  The rest pays for
        other things: :func:`pymc_dp.predictive_check`, say.
    model, rng, compile_kwargs, initial_point, blocked, progressbar
        As in PyMC.

    Raises
    ------
    TypeError, ValueError, UnsafeModel, NotFactorizable, BudgetExceeded
        Before anything is spent.

    Notes
    -----
    With nothing but a plan, everything else is learned by private releases when the step is built,
    in the parent process, all of them charged (`pymc_dp.tuning`); the chains share what is learned.

    - *anchored*: the score at one point is released once, with most of the budget; chains pay for
      its changes only, which are a thousand times smaller in large data. They target the posterior
      tilted by the noise of that one release, exactly, and publication corrects for it
      (``pymc_dp.publication.noise_aware``).
    - *plain*: every iteration pays for the whole score; the target is the posterior itself. For
      posteriors far from normal, where changes of scores are as large as scores.
    - *quadratic*: where the budget pays for a few scores and curvatures only. Chains do not touch
      the records; the likelihood is its normal approximation, which accounts for the noise. Also
      where what records see is non-linear in the parameters (group means of a non-centred
      hierarchy, products): the likelihood of these *effects* is approximated, the rest is exact.

    *Guarantee.*  All releases together satisfy the budget.  Stationary distribution: the stated
    target (exactly the posterior with settings by hand), for any noise, step size and clipping of
    the gradients, if no energy error is clipped.

    *Assumptions.*  Settings by hand are public; `curvature` and `log_concave` hold.

    *Weaknesses.*  Where gradients are clipped without consistent clipping, energy errors are first
    order in the step, and clipping them biases the posterior.  The law of the noise in an anchored
    score is exact, what it does to a posterior that is not near normal is approximated.

    References
    ----------
    Relatives: Horowitz (1991), generalised HMC; Zhang, Cooper & De Sa (2020), AMAGOLD;
    Riou-Durand & Vogrinc (2022), MALT.
    """

    name = "dp_langevin"

    def __init__(
        self,
        vars: Any = None,
        *,
        form: Literal["auto", "anchored", "plain", "quadratic"] = "auto",
        consistent_clipping: bool | None = None,
        step_size: float | None = None,
        n_steps: int | None = None,
        clip_norm: float | Mapping[str, float] | None = None,
        scaling: Any = None,
        curvature: float | None = None,
        log_concave: bool = False,
        energy_clip: float | None = None,
        momentum: Literal["persistent", "fresh"] | None = None,
        friction: float | None = None,
        jitter: float = 0.0,
        energy_share: float = 0.15,
        **kwargs: Any,
    ) -> None:
        if form not in ("auto", *FORMS):
            raise ValueError(
                f"form must be 'auto', 'anchored', 'plain' or 'quadratic', got {form!r}."
            )
        if momentum not in (None, "persistent", "fresh"):
            raise ValueError(f"momentum must be 'persistent' or 'fresh', got {momentum!r}.")
        if not (consistent_clipping is None or isinstance(consistent_clipping, (bool, np.bool_))):
            raise ValueError(
                f"consistent_clipping must be True, False or None, got {consistent_clipping!r}."
            )
        by_hand = clip_norm is not None or scaling is not None
        if by_hand:
            required(
                "DPLangevin",
                draws=kwargs.get("draws"),
                chains=kwargs.get("chains"),
                step_size=step_size,
                clip_norm=clip_norm,
                scaling=scaling,
            )
            if consistent_clipping:
                raise ValueError(
                    "consistent_clipping=True needs the bound that a private preparation learns: "
                    "leave clip_norm and scaling out."
                )
            if form not in ("auto", "plain"):
                raise ValueError(
                    f"form={form!r} needs what a private preparation learns: leave clip_norm and "
                    "scaling out."
                )
            if (curvature is None) == (energy_clip is None):
                raise ValueError(
                    "DPLangevin needs exactly one of curvature (a public bound on the curvature of "
                    "one record's log-likelihood in z; exact) and energy_clip (a constant, about "
                    "0.1 * clip_norm, where no such bound is known)."
                )
        elif curvature is not None or energy_clip is not None:
            raise ValueError(
                "curvature and energy_clip go with clip_norm and scaling, which set the "
                "coordinates they are in. Leave all of them out to have them learned privately."
            )
        if log_concave and curvature is None:
            raise ValueError("log_concave=True narrows the interval of `curvature`; give that.")
        self.form: str = "plain" if by_hand else form
        self.consistent_clipping = consistent_clipping
        self.step_size = None if step_size is None else check_positive("step_size", step_size)
        self.n_steps = None if n_steps is None else check_integer("n_steps", n_steps, minimum=1)
        self.persistent = momentum == "persistent"
        if by_hand:
            self.n_steps = self.n_steps or 1
            self.persistent = momentum != "fresh"
            self.interval: ClipInterval = (
                ConstantInterval(check_positive("energy_clip", energy_clip))
                if curvature is None
                else CurvatureInterval(check_positive("curvature", curvature), bool(log_concave))
            )
        self._momentum = momentum
        self.friction = 1.0 if friction is None else check_number("friction", friction)
        self._choose_friction = friction is None
        if self.friction < 0:
            raise ValueError(f"friction must not be negative, got {self.friction}.")
        self.jitter = check_number("jitter", jitter)
        HaltonJitter(self.jitter)  # refuses a width outside [0, 1)
        share = check_number("energy_share", energy_share)
        if not 0 < share < 1:
            raise ValueError(f"energy_share must be between 0 and 1, got {share}.")
        self._kind: type[Form] = Plain
        self._learned: list[str] | None = None
        self._basis: np.ndarray | None = None
        self._public_draws: np.ndarray | None = None
        super().__init__(
            vars,
            clip_norm=clip_norm,
            scaling=scaling,
            shares={"gradient": 1.0 - share, "energy_error": share},
            settings={
                "step_size": self.step_size,
                "n_steps": self.n_steps,
                "curvature": curvature,
                "log_concave": bool(log_concave),
                "energy_clip": energy_clip,
                "momentum": momentum or "persistent",
                "friction": self.friction,
                "jitter": self.jitter,
            }
            if by_hand
            else {},
            **kwargs,
        )
        if by_hand:
            self._warn_if_small()
        elif self._public_draws is None:
            d = self.parameters.size
            self._add_stat("dp_newton", np.full(d, np.nan))

    # -- settings -------------------------------------------------------------------------------

    def _prepare(self, preparing: Preparing) -> Design:
        found, engine = learn_form(
            preparing,
            form=None if self.form == "auto" else self.form,
            consistent_clipping=self.consistent_clipping,
            step_size=self.step_size,
            n_steps=self.n_steps,
        )
        self._kind, self._basis = type(found), found.basis
        self.form = found.form
        self.step_size, self.n_steps = found.step_size, found.n_steps
        self.persistent = found.persistent if self._momentum is None else self.persistent
        self.friction = found.friction if self._choose_friction else self.friction
        self.interval = ConstantInterval(found.clip_norms.get("energy_error", 1.0))
        design = found.design(preparing, engine)
        self._public_draws = design.draws
        settings = {
            "form": found.form,
            "trusted": found.trusted,
            "effects": isinstance(found, InEffects),
            "about_prior": [],
            "departs": "",
            "step_size": self.step_size,
            "n_steps": self.n_steps,
            "momentum": "persistent" if self.persistent else "fresh",
            "friction": self.friction,
            "jitter": self.jitter,
            **found.clipping.facts(),
            "diagonal": found.diagonal,
            **design.settings,
        }
        improper = {"improper": preparing.parts.improper}
        self._learned = found.sentences({**settings, **improper})
        return replace(design, settings=settings)

    def _sentences(self, settings: Mapping[str, Any]) -> list[str]:
        return super()._sentences(settings) if self._learned is None else self._learned

    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        assert self.n_steps is not None
        return (langevin.releases(self.n_steps) if self._kind.asks else {}), {}

    # -- chains ---------------------------------------------------------------------------------

    def _start(self, d: int) -> np.ndarray:
        return self._kind.apart * super()._start(d)

    def _initial_state(self, z: np.ndarray) -> langevin.LangevinState:
        self._multiplier = HaltonJitter(self.jitter, self.rng.random())
        self._asked: PathQueries = self.queries
        if self._public_draws is not None:  # in random order
            self._first_draw = int(self.rng.integers(len(self._public_draws)))
        if self._basis is not None:
            asks = self._kind.asks
            self._asked = InBasis(self.queries, self._basis, self.rng) if asks else NoRecords()
        return langevin.initial_state(self.rng, z, self.prior)

    def _transition(
        self, state: langevin.LangevinState, iteration: int
    ) -> tuple[langevin.LangevinState, bool]:
        assert self.step_size is not None and self.n_steps is not None
        if self._public_draws is not None:
            which = (self._first_draw + iteration) % len(self._public_draws)
            z = self.coordinates.z(self._public_draws[which])
            changed = not np.array_equal(z, state.z)
            return langevin.initial_state(self.rng, z, self.prior), changed
        state, info = langevin.transition(
            self.rng,
            state,
            self._asked,
            self.prior,
            step_size=self.step_size * self._multiplier(iteration),
            n_steps=self.n_steps,
            interval=self.interval,
            persistent=self.persistent,
            friction=self.friction,
            adjusted=self.automatic or not self.tuning,
        )
        if self.automatic:  # a Newton step: the precision in these coordinates is about 1
            moved = info.midpoint + info.gradient
            self._stats["dp_newton"] = self.coordinates.theta(moved)
        return state, bool(info.accepted)
