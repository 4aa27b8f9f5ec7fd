"""The penalty method, and Barker's test, as PyMC steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pymc_dp.base.checks import check_number
from pymc_dp.kernels import penalty
from pymc_dp.kernels.interfaces import AcceptTest, Proposal
from pymc_dp.kernels.penalty import (
    BarkerTest,
    GaussianProposal,
    GuidedProposal,
    IndependenceProposal,
    OneComponentProposal,
    correction,
)
from pymc_dp.privacy.chains import BatchQueries, MomentQueries
from pymc_dp.steps.base import PrivateStep
from pymc_dp.steps.settings import step_sizes
from pymc_dp.tuning.coordinates import learn_coordinates, random_walk
from pymc_dp.tuning.model_parts import Design
from pymc_dp.tuning.preparing import Preparing

PROPOSALS: dict[str, Callable[[Any], Proposal]] = {
    "gaussian": GaussianProposal,
    "one_component": OneComponentProposal,
    "guided": GuidedProposal,
    "independence": IndependenceProposal,
}
_MAY_BIAS = "Clipping, which is not reported, may bias the draws as well."


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
        (automatic settings only): 2.38 / (d (1 + K c^2))^(1/2), for the longest mean squared jump
        on N(0, I), with K iterations in all and c the noise of a ratio per unit of distance if one
        iteration had the whole budget.
    clip_norm : float, optional
        Bound b on how fast one record's log-likelihood changes: ratios are clipped to
        ``b * |z' - z|``.  A public Lipschitz bound (for logistic regression, a bound on the norm of
        a row of features in z) makes the chain exact.  Default: learned privately, from projections
        of scores on random directions, or from their longest entries for moves of one component.
    scaling : float, (d,) array, (d, d) array or dict, optional
        The A of theta = initial point + A z, in unconstrained space: about the posterior standard
        deviation of each parameter, from public knowledge.  Default: learned privately.
    proposal : {"gaussian", "one_component", "guided", "independence"}
        A random walk of all coordinates; of one at a time; of one at a time, in the same direction
        until it is rejected; or draws from a Student t about z = 0, for large budgets.
    likelihood_power : float, default 1
        The target is prior times likelihood to this power, at most 1: of n records it has the
        width of a posterior of ``likelihood_power * n``, and the noise weighs less.
    noise_multiplier : float, optional
        Noise standard deviation over sensitivity; default: so that the plan uses the budget.
    runs : int, default 1
        How many times ``pm.sample`` may be called with this step.
    share : float, default 1
        Part of what is left of the budget that may be used, in squared mu.  The rest pays for
        other things: :func:`pymc_dp.predictive_check`, say.
    batch_size : int, optional
        Number of records (or users) in a batch, from which every ratio is estimated; default: all
        records.  Approximate, and sensible with a small `likelihood_power` only.
    batches : {"poisson", "fixed_size"}
        A secret coin for each record decides whether it is in a batch, of expected size
        `batch_size`; or batches are secret subsets of exactly this size, for 2 to 7 times the
        epsilon, and under ``replace_one`` only.
    model, rng, compile_kwargs, initial_point, blocked, progressbar
        As in PyMC.

    Raises
    ------
    TypeError, ValueError, UnsafeModel, NotFactorizable, BudgetExceeded
        Before anything is spent.

    Notes
    -----
    *Guarantee.*  One Gaussian release per iteration; all draws together satisfy the budget.
    Stationary distribution: the exact posterior, whatever the noise, if no ratio is clipped.

    With `batch_size`, T times the sum of ratios is estimated by sum T r / q over a batch with
    sampling probability q, and its sampling variance by T^2 (1 - q) / q^2 sum r^2.  What is
    released is the estimate less half of that variance, a sum with one bounded term per record:
    ``|T r / q - T^2 (1 - q) r^2 / (2 q^2)| <= T c / q + T^2 (1 - q) c^2 / (2 q^2)`` for
    ``|r| <= c``.  So the variance costs no release of its own.  The penalty is right as far as the
    estimate is normal and its variance well estimated.  All releases are accounted together by
    their privacy loss distribution (fixed sizes: Rényi divergences), and paid for when the step is
    built.

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
    _needed = ("step_size",)
    _takes_batches = True
    _test: AcceptTest = staticmethod(penalty.penalty_test)

    def __init__(
        self,
        vars: Any = None,
        *,
        step_size: float | np.ndarray | None = None,
        clip_norm: float | Mapping[str, float] | None = None,
        scaling: Any = None,
        proposal: str = "gaussian",
        likelihood_power: float = 1.0,
        **kwargs: Any,
    ) -> None:
        if proposal not in PROPOSALS:
            raise ValueError(f"proposal must be one of {list(PROPOSALS)}, not {proposal!r}.")
        self.proposal = proposal
        self.likelihood_power = check_number("likelihood_power", likelihood_power)
        if not 0.0 < self.likelihood_power <= 1.0:
            raise ValueError(
                f"likelihood_power must be above 0 and at most 1, not {likelihood_power}."
            )
        self.step_size = step_sizes(step_size)
        super().__init__(
            vars,
            clip_norm=clip_norm,
            scaling=scaling,
            settings={
                "proposal": proposal,
                "likelihood_power": self.likelihood_power,
                "batch_size": kwargs.get("batch_size"),
            },
            **kwargs,
        )

    def _step(self, d: int, iterations: int, noise: float) -> float:
        """Proposal sd on N(0, I), see :func:`pymc_dp.tuning.coordinates.random_walk`."""
        return random_walk(d, iterations, noise)

    def _prepare(self, preparing: Preparing) -> Design:
        along_axes = self.proposal in ("one_component", "guided")
        along_axes |= self.step_size is not None and self.step_size.ndim > 0  # may be long in one
        found, design = learn_coordinates(preparing, self.batch_size is None, along_axes)
        d = len(found.coordinates.location)
        if self.step_size is None and self.batch_size is None:
            noise = self.budget.sensitivity * found.clip_norms["log_ratio"] / math.sqrt(found.left)
            self.step_size = self._longest(d, preparing.paths, noise)
        return replace(design, clip_norms={"log_ratio": found.clip_norms["log_ratio"]})

    def _longest(self, d: int, iterations: int, noise: float) -> np.ndarray:
        """Proposal sd in z, where the posterior without tempering is N(0, I)."""
        wide = math.sqrt(self.likelihood_power)  # the target is wider by its inverse
        moving = d if self.proposal == "gaussian" else 1
        step = 1.0
        if self.proposal != "independence":
            step = self._step(moving, iterations, wide * noise)
        return np.asarray(step / wide)

    def _settle(self) -> dict[str, Any]:
        batches = self.plan.batches
        if self.step_size is None and batches is not None:
            # noise of a ratio per unit of distance: that of privacy, and that of sampling
            assert isinstance(self.queries, BatchQueries)
            q = batches.event.sampling_probability
            noise = math.hypot(self.queries.ratio_noise_sd, math.sqrt((1.0 - q) / q))
            self.step_size = self._longest(self.parameters.size, 1, noise)
        assert self.step_size is not None
        return {"step_size": self.step_size.tolist()}

    def _sentences(self, settings: Mapping[str, Any]) -> list[str]:
        if self.likelihood_power == 1.0:
            return super()._sentences(settings)
        return [
            f"THE LIKELIHOOD COUNTS TO THE POWER {self.likelihood_power:g}, by design: the draws "
            "spread as if only that part of the records were there.",
            *super()._sentences(settings),
        ]

    def _exactness(self) -> str:
        if self.batch_size is None:
            return super()._exactness()
        return (
            "The accept test is approximate: ratios are estimated from batches, and their sampling "
            f"variance with them. {_MAY_BIAS}"
        )

    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        return penalty.releases(), {}

    def _initial_state(self, z: np.ndarray) -> penalty.PenaltyState:
        return penalty.initial_state(self.rng, z, self.prior)

    def _transition(
        self, state: penalty.PenaltyState, iteration: int
    ) -> tuple[penalty.PenaltyState, bool]:
        assert self.step_size is not None
        state, info = penalty.transition(
            self.rng,
            state,
            self.queries,
            self.prior,
            proposal=PROPOSALS[self.proposal](self.step_size),
            # answers on batches include it already
            likelihood_power=1.0 if self.plan.batches else self.likelihood_power,
            test=self._test,
        )
        return state, bool(info.accepted)


class DPBarker(DPPenalty):
    """Metropolis-Hastings with Barker's accept test, to which the privacy noise contributes.

    The noise of a log-likelihood ratio is filled up to a Gaussian of fixed size and then to a
    logistic variable, with which the test needs no penalty.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    draws, tune, chains : int
        As for :class:`DPPenalty`.
    noise_sd : float, default 1.2
        Standard deviation of the Gaussian noise in the test, below 1.81.  More allows longer moves
        and makes the test less exact: the distribution function of the noise differs from the
        logistic one by 2.3e-7 at 1, 2.9e-5 at 1.2, 6.5e-4 at 1.4 and 5e-3 at 1.6.
    step_size, clip_norm, scaling, proposal, likelihood_power : optional
        As for :class:`DPPenalty`; the default step keeps most answers less noisy than `noise_sd`.
    noise_multiplier, runs, share : optional
        As for :class:`DPPenalty`; the default step keeps most answers less noisy than `noise_sd`.
    batch_size : int, optional
        Number of records (or users) in a batch, from which every ratio is estimated; default: all
        records.  Sensible with a small `likelihood_power` only.
    batches, model, rng, compile_kwargs, initial_point, blocked, progressbar : optional
        As for :class:`DPPenalty`.

    Raises
    ------
    TypeError, ValueError, UnsafeModel, NotFactorizable, BudgetExceeded
        Before anything is spent.

    Notes
    -----
    *Guarantee.*  One Gaussian release per iteration; all draws together satisfy the budget.

    With `batch_size`, a batch with sampling probability q gives two sums in one Gaussian release:
    of T r / q, which estimates the ratio, and of w T r^2 / (q c), from which its sampling variance
    follows.  A record with ``|r| <= c`` adds a vector of norm (T c / q) (1 + w^2)^(1/2) at most;
    w = 1/2 makes the ratio 12 % noisier than it would be alone.  Public noise fills up what privacy
    noise and estimated sampling variance leave of `noise_sd`.  The guarantee counts only the added
    Gaussian noise, amplified by the sampling: unlike that of Räisä (2021) it does not need normal
    sampling noise.

    *Assumptions.*  As for :class:`DPPenalty`.

    *Weaknesses.*  Approximate: the test is never exactly Barker's, though its error at the default
    is far below what chains of usual length can show.  A proposal whose answer is noisier than
    `noise_sd` is rejected.  At most half of the proposals are accepted.

    With `batch_size` it is approximate for two more reasons.  Sampling noise is normal by a central
    limit theorem only: skewed ratios r shift the log odds of a move by about
    (2 - q) (1 - q) T^3 sum r^3 / (12 q^2) where both ways are equally likely, one over the root of
    the size of the batch.  And its variance is estimated, with noise of standard deviation
    (1 - q) (T c / q) s / w (s the privacy noise), 1.8 (1 - q) s^2 over the noise multiplier: tests
    are too noisy where the estimate is negative or near what `noise_sd` allows.  In simulations
    draws were 1 to 3 % too wide for a multiplier of 2, and up to 6 % for one below 1.

    References
    ----------
    Barker (1965); Seita, Pan, Chen & Canny (2017); Räisä (2021), section 3.2.
    """

    name = "dp_barker"
    _batch_queries = MomentQueries

    def __init__(self, vars: Any = None, *, noise_sd: float = 1.2, **kwargs: Any) -> None:
        self._corrected = correction(check_number("noise_sd", noise_sd))
        self._test = BarkerTest(self._corrected.sd)
        super().__init__(vars, **kwargs)

    def _settle(self) -> dict[str, Any]:
        test = {"noise_sd": self._corrected.sd, "correction_error": self._corrected.error}
        return {**super()._settle(), **test}

    def _exactness(self) -> str:
        error = f"{self._corrected.error:.2g}"
        if self.batch_size is None:
            return (
                f"The accept test is Barker's, approximate by {error} in the distribution function "
                f"of its noise. {_MAY_BIAS}"
            )
        return (
            f"The accept test is Barker's, approximate for three reasons: its noise is logistic to "
            f"{error} in distribution; ratios are estimated from batches, whose sampling noise is "
            f"not quite normal; and the variance of that is an estimate. {_MAY_BIAS}"
        )

    def _step(self, d: int, iterations: int, noise: float) -> float:
        # the longest of most moves is as noisy as the test allows
        longest = 2.0 if d == 1 else 1.3
        quiet = self._corrected.sd / (longest * noise * math.sqrt(d * iterations))
        return min(random_walk(d, iterations, 0.0), quiet)
