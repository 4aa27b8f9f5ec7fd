"""Private stochastic-gradient samplers as PyMC steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pymc as pm

from pymc_dp.base.checks import check_number, check_positive, warn
from pymc_dp.budget import get_budget
from pymc_dp.kernels import sgmcmc
from pymc_dp.steps.base import PrivateStep
from pymc_dp.tuning.coordinates import learn_coordinates
from pymc_dp.tuning.model_parts import Design
from pymc_dp.tuning.preparing import Preparing

_SMALLEST, _PART = 256, 0.02  # least default size of a batch, and part of all records
#: Longest steps on N(0, I): variances are off by h/4 of Langevin dynamics, h^2/8 of the thermostat.
_LONGEST = {"Langevin": 0.1, "Nosé-Hoover": 0.25}
_SAMPLING = 0.05  # largest part of the variance from the sampling of batches


class _Dynamics(PrivateStep):
    """What both samplers share: one noisy score of a batch per iteration."""

    dynamics: str
    _needed = ("step_size",)
    _takes_batches = True

    def __init__(
        self,
        vars: Any = None,
        *,
        step_size: float | None = None,
        batch_size: int | None = None,
        clip_norm: float | Mapping[str, float] | None = None,
        scaling: Any = None,
        **kwargs: Any,
    ) -> None:
        self.step_size = None if step_size is None else check_positive("step_size", step_size)
        if batch_size is None:
            budget = get_budget(pm.modelcontext(kwargs.get("model")))
            n = 1 if budget is None else budget.n_public
            batch_size = min(n, max(_SMALLEST, round(_PART * n)))
        super().__init__(
            vars,
            batch_size=batch_size,
            clip_norm=clip_norm,
            scaling=scaling,
            settings={"batch_size": batch_size, "dynamics": self.dynamics},
            **kwargs,
        )

    def _prepare(self, preparing: Preparing) -> Design:
        found, design = learn_coordinates(preparing, centred=False)
        return replace(design, clip_norms={"gradient": found.clip_norms["gradient"]})

    def _exactness(self) -> str:
        return (
            f"The draws follow {self.dynamics} dynamics without an accept test: biased by their "
            "step, by the sampling of batches and by clipping, none of which is reported."
        )

    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        return {"gradient": 1}, {}

    @property
    def _sampling(self) -> float:
        """Variance of the score of a batch on N(0, I), where records hold all the information."""
        assert self.plan.batches is not None
        q = self.plan.batches.event.sampling_probability
        return (1.0 - q) / q

    def _settle(self) -> dict[str, Any]:
        if self.step_size is None:
            self.step_size = self._longest(self.queries.gradient_noise_sd)
        return {"step_size": self.step_size}

    @abstractmethod
    def _longest(self, noise_sd: float) -> float:
        """The default step, given the noise on each entry of a score."""


class DPSGLD(_Dynamics):
    """Private stochastic-gradient Langevin dynamics.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    draws, tune, chains : int
        The plan: what ``pm.sample`` will be called with.
    step_size : float, optional
        h of z' = z + h/2 score + N(0, h), in z.  Default (automatic settings only): 0.1, or less:
        batches add at most 5 % to the variance, and privacy at most the noise that is needed.
    batch_size : int, optional
        Number of records (or users) in a batch.  Default: 2 %, 256 at least.
    clip_norm : float, optional
        Bound on the norm of one record's score in z.  Default: learned privately.
    scaling : float, (d,) array, (d, d) array or dict, optional
        As for :class:`DPLangevin`.  Default: learned privately.
    noise_multiplier : float, optional
        Noise standard deviation over `clip_norm`; default: the least that fits the budget.
    runs, share : optional
        Must be 1: the plan is fixed when the step is built, for a whole budget.
    batches : {"poisson", "fixed_size"}
        A secret coin for each record decides whether it is in a batch, whose size varies about
        `batch_size`; or batches are secret subsets of exactly this size, for 2 to 7 times the
        epsilon, and under ``replace_one`` only.
    model, rng, compile_kwargs, initial_point, blocked, progressbar
        As in PyMC.

    Raises
    ------
    TypeError, ValueError, UnsafeModel, NotFactorizable, BudgetExceeded
        Before anything is spent.
    ImportError
        Without dp-accounting: ``pip install pymc_dp[accounting]``.

    Notes
    -----
    *Guarantee.*  (epsilon, delta), for all draws together, by the composed privacy loss
    distribution of Gaussian sums over Poisson batches, or the Rényi divergences of those over
    batches of a fixed size.  The plan is fixed and paid for as a whole when the step is built: a
    run that is interrupted or never made costs all of it.

    *Assumptions.*  As for :class:`DPLangevin`.

    *Weaknesses.*  There is no accept test, so draws are biased: by h/4 of the variance from the
    step, by (1 - q)/q h/4 of it from batches with sampling probability q, by clipping, and where
    the posterior is not near normal.  Published samplers of this name take a step of h score with
    noise of variance h and so sample at temperature 1/2; this one does not.

    References
    ----------
    Welling & Teh (2011); Wang, Fienberg & Smola (2015); Li, Chen, Liu & Carin (2019).
    """

    name = "dp_sgld"
    dynamics = "Langevin"

    def _longest(self, noise_sd: float) -> float:
        batches = 4.0 * _SAMPLING / max(self._sampling, 1e-12)
        return min(_LONGEST[self.dynamics], batches, sgmcmc.largest_step(noise_sd))

    def _settle(self) -> dict[str, Any]:
        step_size = super()._settle()["step_size"]
        longest = sgmcmc.largest_step(self.queries.gradient_noise_sd)
        if step_size > longest and not self.automatic:
            raise ValueError(
                f"step_size={step_size:g} needs less noise than privacy adds: at most "
                f"{longest:.3g} with this plan. Use that, fewer draws, or larger batches."
            )
        if step_size > longest:
            warn(
                f"step_size={step_size:g} needs less noise than privacy adds with this plan; "
                f"{longest:.3g} is used. Fewer draws or larger batches would allow longer steps."
            )
        self.step_size = min(step_size, longest)
        return {"step_size": self.step_size}

    def _initial_state(self, z: np.ndarray) -> sgmcmc.SGLDState:
        return sgmcmc.SGLDState(z)

    def _transition(self, state: sgmcmc.SGLDState, iteration: int) -> tuple[sgmcmc.SGLDState, bool]:
        assert self.step_size is not None
        state, info = sgmcmc.langevin(
            self.rng, state, self.queries, self.prior, step_size=self.step_size
        )
        return state, bool(info.accepted)


class DPSGNHT(_Dynamics):
    """Private stochastic-gradient Nosé-Hoover thermostat.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    draws, tune, chains : int
        As for :class:`DPSGLD`.
    friction : float, default 1
        A: the momentum gets noise of variance 2 A h per step, that of privacy included.
    step_size : float, optional
        h, in z.  Default (automatic settings only): 0.25, or less, so that neither the privacy
        noise nor the sampling of batches asks for a friction above 1.
    batch_size, clip_norm, scaling, noise_multiplier, runs, share, batches : optional
        As for :class:`DPSGLD`.
    model, rng, compile_kwargs, initial_point, blocked, progressbar
        As in PyMC.

    Raises
    ------
    TypeError, ValueError, UnsafeModel, NotFactorizable, BudgetExceeded, ImportError
        As for :class:`DPSGLD`.

    Notes
    -----
    *Guarantee.*  As for :class:`DPSGLD`.

    *Assumptions.*  As for :class:`DPSGLD`.

    *Weaknesses.*  There is no accept test, so draws are biased, by h^2 and by clipping.  The
    thermostat absorbs noise of any size, that of batches included, if it is Gaussian and the same
    everywhere.

    References
    ----------
    Ding et al. (2014); Li, Chen, Liu & Carin (2019); Leimkuhler & Shang (2016).
    """

    name = "dp_sgnht"
    dynamics = "Nosé-Hoover"

    def __init__(self, vars: Any = None, *, friction: float = 1.0, **kwargs: Any) -> None:
        self.friction = check_number("friction", friction)
        if self.friction < 0.0:
            raise ValueError(f"friction must not be negative, got {friction}.")
        super().__init__(vars, **kwargs)

    def _longest(self, noise_sd: float) -> float:
        variance = noise_sd**2 + self._sampling
        return min(_LONGEST[self.dynamics], 2.0 / max(variance, 1e-12))

    def _settle(self) -> dict[str, Any]:
        return {**super()._settle(), "friction": self.friction}

    def _initial_state(self, z: np.ndarray) -> sgmcmc.SGNHTState:
        return sgmcmc.initial_thermostat(self.rng, z, self.friction)

    def _transition(
        self, state: sgmcmc.SGNHTState, iteration: int
    ) -> tuple[sgmcmc.SGNHTState, bool]:
        assert self.step_size is not None
        state, info = sgmcmc.thermostat(
            self.rng,
            state,
            self.queries,
            self.prior,
            step_size=self.step_size,
            friction=self.friction,
        )
        return state, bool(info.accepted)
