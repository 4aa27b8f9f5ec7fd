"""DP-HMC as a PyMC step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pymc_dp.base.checks import check_integer, check_number, check_positive
from pymc_dp.kernels import hmc
from pymc_dp.kernels.interfaces import HaltonJitter
from pymc_dp.steps.base import PrivateStep
from pymc_dp.tuning.coordinates import learn_coordinates, trajectory
from pymc_dp.tuning.model_parts import Design
from pymc_dp.tuning.preparing import Preparing


class DPHMC(PrivateStep):
    """Differentially private Hamiltonian Monte Carlo.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    draws, tune, chains : int
        The plan: what ``pm.sample`` will be called with. Noise is calibrated to it; another call is
        refused before anything is spent. With settings by hand, tuning iterations move without the
        accept test, to reach the bulk of the posterior from afar; they are charged like others.
    step_size : float, optional
        Leapfrog step in z. Default (automatic settings only): so that trajectories are as long as
        the noise of the plan allows, see Notes.
    n_steps : int, optional
        L, leapfrog steps per iteration. Default (automatic settings only): as few as keep the
        energy error small, often 1; the noise of a trajectory does not depend on how it is cut into
        steps.
    clip_norm : float or {"gradient": float, "log_ratio": float}, optional
        Bound b on the norm of one record's score in z, and on how fast its log-likelihood changes
        per unit of distance in z. One number serves for both. Default: learned privately.
    scaling : float, (d,) array, (d, d) array or dict, optional
        The A of theta = initial point + A z, in unconstrained space: about the posterior standard
        deviation of each parameter, from public knowledge. Default: learned privately.
    integrator : {"leapfrog", "position"}
        "leapfrog" is the paper's; "position" starts with half a drift and saves a gradient.
    reuse_gradient : bool, optional
        Use the last gradient of an iteration as the first of the next (leapfrog only): L gradients
        an iteration instead of L + 1. Default: with automatic settings and leapfrog, because two
        half kicks then have half of the noise of a whole one.
    jitter : float, default 0.1
        Step sizes vary by this fraction, by a randomised Halton sequence, so that trajectories do
        not return to where they started.
    gradient_share : float, optional
        Part of the budget for gradients; the rest pays for accept tests. Default: .5 by hand, else
        what makes the noise of both together least.
    noise_multiplier : float or {"gradient": float, "log_ratio": float}, optional
        Noise standard deviation over sensitivity; default: so that the plan uses the budget.
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
    *Guarantee.* ``n_steps + 1`` Gaussian gradient releases (``n_steps`` with "position" or
    `reuse_gradient`) and one log-likelihood ratio per iteration; all draws together satisfy the
    budget. Stationary distribution: the exact posterior for any gradient noise and clipping, if
    no log-likelihood ratio is clipped.

    *Automatic settings.* On N(0, I) a trajectory of length T = L h moves by about T d^(1/2), and
    the noise of its gradients and of its ratio adds (T c)^2 d K to the variance of the log
    acceptance ratio, with K iterations in all and c known from the clip norms and the budget. Mean
    squared jumps are longest where that is 2.38^2 (23 % accepted), or at T = pi/2.

    *Assumptions.* Settings are public; ``clip_norm`` of the ratio is a valid Lipschitz bound.

    *Weaknesses.* The log-likelihood ratio is taken over the whole length of a trajectory, so its
    noise is large: DPLangevin needs a far smaller budget for the same accuracy.

    References
    ----------
    Raisa, Koskela & Honkela (2021), Differentially private Hamiltonian Monte Carlo, Algorithm 1.
    """

    name = "dp_hmc"
    _needed = ("step_size", "n_steps")

    def __init__(
        self,
        vars: Any = None,
        *,
        step_size: float | None = None,
        n_steps: int | None = None,
        clip_norm: float | Mapping[str, float] | None = None,
        scaling: Any = None,
        integrator: hmc.Integrator = "leapfrog",
        reuse_gradient: bool | None = None,
        jitter: float = 0.1,
        gradient_share: float | None = None,
        **kwargs: Any,
    ) -> None:
        by_hand = clip_norm is not None or scaling is not None
        if integrator not in hmc.INTEGRATORS:
            raise ValueError(
                f"integrator must be one of {sorted(hmc.INTEGRATORS)}, got {integrator!r}."
            )
        if reuse_gradient and integrator != "leapfrog":
            raise ValueError("reuse_gradient=True needs integrator='leapfrog'.")
        self.step_size = None if step_size is None else check_positive("step_size", step_size)
        self.n_steps = None if n_steps is None else check_integer("n_steps", n_steps, minimum=1)
        self.integrator: hmc.Integrator = integrator
        if reuse_gradient is None:
            reuse_gradient = not by_hand and integrator == "leapfrog"
        self.reuse_gradient = bool(reuse_gradient)
        self.jitter = check_number("jitter", jitter)
        HaltonJitter(self.jitter)  # refuses a width outside [0, 1)
        share = 0.5 if gradient_share is None else check_number("gradient_share", gradient_share)
        if not 0 < share < 1:
            raise ValueError(f"gradient_share must be between 0 and 1, got {share}.")
        self.share = None if gradient_share is None else share
        super().__init__(
            vars,
            clip_norm=clip_norm,
            scaling=scaling,
            shares={"gradient": share, "log_ratio": 1.0 - share},
            settings={
                "integrator": integrator,
                "reuse_gradient": self.reuse_gradient,
                "jitter": self.jitter,
            },
            **kwargs,
        )
        if by_hand:
            self._warn_if_small()

    def _prepare(self, preparing: Preparing) -> Design:
        found, design = learn_coordinates(preparing)
        noise = {
            name: self.budget.sensitivity * norm / math.sqrt(found.left)
            for name, norm in found.clip_norms.items()
        }
        chosen = trajectory(
            len(found.coordinates.location),
            preparing.paths,
            noise["gradient"],
            noise["log_ratio"],
            self._kick_noise,
            n_steps=self.n_steps,
            step_size=self.step_size,
            gradient_share=self.share,
        )
        self.step_size, self.n_steps = chosen.step_size, chosen.n_steps
        share = chosen.gradient_share
        return replace(
            design,
            clip_norms=found.clip_norms,
            shares={"gradient": share, "log_ratio": 1.0 - share},
        )

    def _settle(self) -> dict[str, Any]:
        return {"step_size": self.step_size, "n_steps": self.n_steps}

    def _kick_noise(self, n_steps: int) -> float:
        """Noise variance of all kicks of a trajectory, relative to one of its length."""
        paid = hmc.releases(n_steps, self.integrator, self.reuse_gradient)["gradient"]
        stages = hmc.INTEGRATORS[self.integrator](n_steps)
        return paid * sum(kick**2 for kick, _ in stages) / n_steps**2

    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        assert self.n_steps is not None
        return (
            hmc.releases(self.n_steps, self.integrator, self.reuse_gradient),
            hmc.start_releases(self.reuse_gradient),
        )

    def _initial_state(self, z: np.ndarray) -> hmc.HMCState:
        self._multiplier = HaltonJitter(self.jitter, self.rng.random())
        release = self.queries.gradient if self.reuse_gradient else None
        return hmc.initial_state(z, self.prior, release_gradient=release)

    def _transition(self, state: hmc.HMCState, iteration: int) -> tuple[hmc.HMCState, bool]:
        assert self.step_size is not None and self.n_steps is not None
        state, info = hmc.transition(
            self.rng,
            state,
            self.queries,
            self.prior,
            step_size=self.step_size * self._multiplier(iteration),
            n_steps=self.n_steps,
            integrator=self.integrator,
            adjusted=self.automatic or not self.tuning,
        )
        return state, bool(info.accepted)
