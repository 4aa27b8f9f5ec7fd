"""The penalty method as a PyMC step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pymc_dp.kernels import penalty
from pymc_dp.steps.base import PrivateStep
from pymc_dp.steps.settings import required
from pymc_dp.steps.source import Design, Source

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
    step_size : float or (d,) array
        Standard deviation of the Gaussian proposal in z, per coordinate if an array.
    clip_norm : float
        Bound b on how fast one record's log-likelihood changes: ratios are clipped to
        ``b * |z' - z|``.  A public Lipschitz bound (for logistic regression, a bound on the norm
        of a row of features in z) makes the chain exact.
    scaling : float, (d,) array, (d, d) array or dict
        The A of theta = initial point + A z, in unconstrained space: about the posterior standard
        deviation of each parameter, from public knowledge.
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
    standard deviations.

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
        scale = np.asarray(step_size, dtype="float64")
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError("step_size must be positive and finite.")
        self.proposal = penalty.GaussianProposal(scale)
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
            settings={"step_size": scale.tolist(), "proposal": proposal},
            **kwargs,
        )
        if scale.ndim > 0 and scale.shape != (self.parameters.size,):
            raise ValueError(
                f"step_size must be a number or a vector of {self.parameters.size}, got shape "
                f"{scale.shape}."
            )

    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        return penalty.releases(), penalty.start_releases()

    def _initial_state(self, z: np.ndarray) -> penalty.PenaltyState:
        return penalty.initial_state(z, self.prior)

    def _transition(
        self, state: penalty.PenaltyState, iteration: int
    ) -> tuple[penalty.PenaltyState, bool]:
        state, info = penalty.transition(
            self.rng, state, self.queries, self.prior, proposal=self.proposal
        )
        return state, bool(info.accepted)

    def _prepare(self, source: Source) -> Design:
        raise NotImplementedError
