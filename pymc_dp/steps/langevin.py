"""DPLangevin as a PyMC step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from pymc_dp._checks import check_integer, check_number
from pymc_dp.kernels import langevin
from pymc_dp.kernels.intervals import ConstantInterval, CurvatureInterval
from pymc_dp.kernels.jitter import HaltonJitter
from pymc_dp.steps.base import PrivateStep
from pymc_dp.steps.settings import positive, required

__all__ = ["DPLangevin"]


class DPLangevin(PrivateStep):
    """Private Langevin trajectories: the privacy noise is the friction.  The recommended sampler.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    draws, tune, chains : int
        The plan: what ``pm.sample`` will be called with.  Noise is calibrated to it; another call
        is refused before anything is spent.  Tuning iterations move without the accept test, to
        reach the bulk of the posterior from afar; they are charged like the others.
    step_size : float
        h, the step in z.  About 0.5 where z is whitened (posterior standard deviations near 1).
    n_steps : int, default 1
        L, gradients per iteration.  1 suits persistent momentum, 2 to 4 fresh momentum.
    clip_norm : float
        Bound b on the norm of one record's score in z ("gradient").
    scaling : float, (d,) array, (d, d) array or dict
        The A of theta = initial point + A z, in unconstrained space: about the posterior standard
        deviation of each parameter, from public knowledge.
    curvature : float, optional
        Public bound on the spectral norm of the Hessian of one record's log-likelihood in z, for
        instance ``|A|^2 B^2 / 4`` for logistic regression with rows of norm at most B.  With
        gradients that are never clipped, no energy error is clipped then, and the chain is exact.
    log_concave : bool, default False
        The log-likelihood of a record is concave in z: halves the noise of the accept test.
    energy_clip : float, optional
        Clip energy errors to [-c, c] instead, where no bound on curvature is known; about
        ``0.1 * clip_norm``.  Exactly one of `curvature` and `energy_clip` is needed.
    momentum : {"persistent", "fresh"}
        Keep the momentum between iterations (default), or draw it anew.
    friction : float, default 1.0
        Least friction, per unit of time in z: public noise is added where the privacy noise is
        weaker, which with large budgets keeps the chain from moving in circles.
    jitter : float, default 0.0
        Step sizes vary by this fraction, by a randomised Halton sequence.
    energy_share : float, default 0.15
        Part of the budget for accept tests, which are nearly free; the rest pays for gradients.
    noise_multiplier : float or {"gradient": float, "energy_error": float}, optional
        Noise standard deviation over sensitivity; default: calibrated so that the plan uses the
        budget.
    runs : int, default 1
        How many times ``pm.sample`` may be called with this step.
    model, rng, compile_kwargs, initial_point, blocked
        As in PyMC.

    Raises
    ------
    TypeError, ValueError, UnsafeModel, NotFactorizable, BudgetExceeded
        Before anything is spent.

    Notes
    -----
    *Guarantee.*  ``n_steps`` Gaussian gradient releases and one energy-error release per iteration;
    all draws together satisfy the budget.  Stationary distribution: the exact posterior, for any
    noise, step size and clipping of the gradients, if no energy error is clipped.

    *Assumptions.*  Settings are public; `curvature` and `log_concave` hold.

    *Weaknesses.*  Where gradients are clipped, energy errors are first order in the step, and
    clipping them biases the posterior.

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
        draws: int | None = None,
        tune: int = 0,
        chains: int | None = None,
        step_size: float | None = None,
        n_steps: int = 1,
        clip_norm: float | Mapping[str, float] | None = None,
        scaling: Any = None,
        curvature: float | None = None,
        log_concave: bool = False,
        energy_clip: float | None = None,
        momentum: Literal["persistent", "fresh"] = "persistent",
        friction: float = 1.0,
        jitter: float = 0.0,
        energy_share: float = 0.15,
        noise_multiplier: float | Mapping[str, float] | None = None,
        runs: int = 1,
        **kwargs: Any,
    ) -> None:
        required(
            "DPLangevin",
            draws=draws,
            chains=chains,
            step_size=step_size,
            clip_norm=clip_norm,
            scaling=scaling,
        )
        if (curvature is None) == (energy_clip is None):
            raise ValueError(
                "DPLangevin needs exactly one of curvature (a public bound on the curvature of one "
                "record's log-likelihood in z; exact) and energy_clip (a constant, about "
                "0.1 * clip_norm, where no such bound is known)."
            )
        if log_concave and curvature is None:
            raise ValueError("log_concave=True narrows the interval of `curvature`; give that.")
        if momentum not in ("persistent", "fresh"):
            raise ValueError(f"momentum must be 'persistent' or 'fresh', got {momentum!r}.")
        self.step_size = positive("step_size", step_size)
        self.n_steps = check_integer("n_steps", n_steps, minimum=1)
        self.interval = (
            ConstantInterval(positive("energy_clip", energy_clip))
            if curvature is None
            else CurvatureInterval(positive("curvature", curvature), bool(log_concave))
        )
        self.persistent = momentum == "persistent"
        self.friction = check_number("friction", friction)
        if self.friction < 0:
            raise ValueError(f"friction must not be negative, got {self.friction}.")
        self.jitter = check_number("jitter", jitter)
        HaltonJitter(self.jitter)  # refuses a width outside [0, 1)
        share = check_number("energy_share", energy_share)
        if not 0 < share < 1:
            raise ValueError(f"energy_share must be between 0 and 1, got {share}.")
        super().__init__(
            vars,
            draws=draws,
            tune=tune,
            chains=chains,
            clip_norm=clip_norm,
            scaling=scaling,
            shares={"gradient": 1.0 - share, "energy_error": share},
            noise_multiplier=noise_multiplier,
            runs=runs,
            settings={
                "step_size": self.step_size,
                "n_steps": self.n_steps,
                "curvature": curvature,
                "log_concave": bool(log_concave),
                "energy_clip": energy_clip,
                "momentum": momentum,
                "friction": self.friction,
                "jitter": self.jitter,
            },
            **kwargs,
        )
        self._warn_if_small()

    def _clipped_mechanisms(self) -> list[str]:
        return ["gradient"]

    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        return langevin.releases(self.n_steps), langevin.start_releases()

    def _initial_state(self, z: np.ndarray) -> langevin.LangevinState:
        self._multiplier = HaltonJitter.random(self.rng, self.jitter)
        return langevin.initial_state(self.rng, z, self.prior)

    def _transition(
        self, state: langevin.LangevinState, iteration: int
    ) -> tuple[langevin.LangevinState, bool]:
        state, info = langevin.transition(
            self.rng,
            state,
            self.queries,
            self.prior,
            step_size=self.step_size * self._multiplier(iteration),
            n_steps=self.n_steps,
            interval=self.interval,
            persistent=self.persistent,
            friction=self.friction,
            adjusted=not self.tuning,
        )
        return state, bool(info.accepted)
