"""The penalty method as a PyMC step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pymc_dp.kernels import penalty
from pymc_dp.steps.base import PrivateStep
from pymc_dp.steps.settings import required
from pymc_dp.steps.source import Design, Source
from pymc_dp.warmup.scaled import random_walk

__all__ = ["DPPenalty"]


class DPPenalty(PrivateStep):
    """Random-walk Metropolis with a private accept test (the penalty method).

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    draws, tune, chains : int
        The plan: what ``pm.sample`` will be called with.  Noise is calibrated to it; another call
        is refused before anything is spent.
    step_size : float or (d,) array, optional
        Standard deviation of the Gaussian proposal in z, per coordinate if an array.  Default
        (automatic settings only): the longest mean squared jump on N(0, I) with the noise that the
        plan implies, 2.38 / (d (1 + K c^2))^(1/2), with K iterations in all and c the noise of a
        ratio per unit of distance if one iteration had the whole budget.
    clip_norm : float, optional
        Bound b on how fast one record's log-likelihood changes: ratios are clipped to
        ``b * |z' - z|``.  A public Lipschitz bound (for logistic regression, a bound on the norm
        of a row of features in z) makes the chain exact.  Default: learned privately, from
        projections of the scores on a few random directions.
    scaling : float, (d,) array, (d, d) array or dict, optional
        The A of theta = initial point + A z, in unconstrained space: about the posterior standard
        deviation of each parameter, from public knowledge.  Default: learned privately.
    proposal : {"gaussian"}
    noise_multiplier : float, optional
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
    *Guarantee.*  One Gaussian release per iteration; all draws together satisfy the budget.
    Stationary distribution: the exact posterior, whatever the noise, if no ratio is clipped.

    *Assumptions.*  ``clip_norm`` is a valid Lipschitz bound; settings are public.

    *Weaknesses.*  Where ratios are clipped the posterior is biased, much more than the share
    clipped suggests: on logistic regression 0.5 % clipped moved the posterior mean by 1.3 posterior
    standard deviations.  With the best steps, chains are worth about M / (12 d b^2) independent
    draws for squared mu M (records replaced) at most, however many iterations are made.

    References
    ----------
    Yildirim & Ermis (2019), Exact MCMC with differentially private moves; Heikkila et al. (2019);
    noise penalty of Ceperley & Dewing (1999).
    """

    name = "dp_penalty"

    def __init__(
        self,
        vars: Any = None,
        *,
        draws: int | None = None,
        tune: int = 0,
        chains: int | None = None,
        step_size: float | np.ndarray | None = None,
        clip_norm: float | Mapping[str, float] | None = None,
        scaling: Any = None,
        proposal: str = "gaussian",
        noise_multiplier: float | Mapping[str, float] | None = None,
        runs: int = 1,
        **kwargs: Any,
    ) -> None:
        by_hand = clip_norm is not None or scaling is not None
        if by_hand:
            required(
                "DPPenalty",
                draws=draws,
                chains=chains,
                step_size=step_size,
                clip_norm=clip_norm,
                scaling=scaling,
            )
        if proposal != "gaussian":
            raise ValueError(f"proposal must be 'gaussian', got {proposal!r}.")
        self.step_size: np.ndarray | None = None
        if step_size is not None:
            self.step_size = np.asarray(step_size, dtype="float64")
            if not (np.isfinite(self.step_size).all() and (self.step_size > 0).all()):
                raise ValueError("step_size must be positive and finite.")
        super().__init__(
            vars,
            draws=draws,
            tune=tune,
            chains=chains,
            clip_norm=clip_norm,
            scaling=scaling,
            shares={"log_ratio": 1.0},
            noise_multiplier=noise_multiplier,
            runs=runs,
            settings={
                "step_size": None if self.step_size is None else self.step_size.tolist(),
                "proposal": proposal,
            },
            **kwargs,
        )

    def _check(self, d: int) -> None:
        if self.step_size is not None and self.step_size.shape not in ((), (d,)):
            raise ValueError(
                f"step_size must be a number or a vector of {d}, got shape {self.step_size.shape}."
            )

    def _prepare(self, source: Source) -> Design:
        found, design = source.scaled("DPPenalty")
        d = len(found.coordinates.location)
        if self.step_size is None:
            noise = source.sensitivity * found.clip_norms["log_ratio"] / math.sqrt(found.left)
            self.step_size = np.asarray(random_walk(d, source.paths, noise))
        return replace(
            design,
            clip_norms={"log_ratio": found.clip_norms["log_ratio"]},
            shares={"log_ratio": 1.0},
            settings={"step_size": self.step_size.tolist()},
        )

    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        return penalty.releases(), penalty.start_releases()

    def _initial_state(self, z: np.ndarray) -> penalty.PenaltyState:
        return penalty.initial_state(z, self.prior)

    def _transition(
        self, state: penalty.PenaltyState, iteration: int
    ) -> tuple[penalty.PenaltyState, bool]:
        assert self.step_size is not None
        proposal = penalty.GaussianProposal(self.step_size)
        state, info = penalty.transition(
            self.rng, state, self.queries, self.prior, proposal=proposal
        )
        return state, bool(info.accepted)
