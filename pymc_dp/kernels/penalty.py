"""Penalty method: Metropolis-Hastings with Gaussian noise on the log-likelihood ratio.

Source: Yildirim & Ermis (2019), Exact MCMC with differentially private moves; the correction is
that of Ceperley & Dewing (1999), The penalty method for random walks with uncertain energies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pymc_dp.kernels._batch import all_finite, select, start_log_prior
from pymc_dp.kernels.interfaces import (
    AcceptTest,
    Array,
    Batch,
    LogRatioQueries,
    Mask,
    Prior,
    Proposal,
)


class PenaltyState(NamedTuple):
    """What the chain carries on."""

    z: Array  # (..., d)
    log_prior: Batch  # public log density at z, (...)
    direction: Array  # 1 or -1 per coordinate, (..., d); for guided proposals


class PenaltyInfo(NamedTuple):
    """Public diagnostics of one iteration, each of shape ``(...)``."""

    accepted: Mask
    log_accept: Batch  # noisy, penalised log acceptance ratio
    noise_sd: Batch  # noise of the released log-likelihood ratio
    finite: Mask  # False where the proposal was rejected because it had no finite prior density


def penalty_test(
    rng: np.random.Generator, possible: Mask, value: Batch, noise_sd: Batch, public: Batch
) -> tuple[Mask, Batch]:
    """Accept when log u < value + public - noise_sd^2 / 2.

    The `value` is the released log ratio, R + N(0, noise_sd^2), and `public` is the public part of
    the log acceptance ratio. Where `possible` is False the proposal is rejected whatever the
    released value. Returns the decisions and the right-hand side.

    Guarantee: with lambda = R + public odd and noise_sd even under exchange of current and proposed
    state, detailed balance holds exactly, because
    E min(1, exp(lambda + xi - s^2/2)) = exp(lambda) E min(1, exp(-lambda + xi - s^2/2)) for xi ~
    N(0, s^2).
    """
    log_accept = value + public - 0.5 * np.square(noise_sd)
    log_u = -rng.standard_exponential(np.shape(possible))
    return possible & (log_u < log_accept), log_accept


def initial_state(rng: np.random.Generator, z: Array, prior: Prior) -> PenaltyState:
    """State of a chain that starts at ``z``, with directions at random.

    ValueError if the position or its log prior density is not finite.
    """
    direction = np.where(rng.random(z.shape) < 0.5, -1.0, 1.0)
    return PenaltyState(z, start_log_prior(z, prior), direction)


def transition(
    rng: np.random.Generator,
    state: PenaltyState,
    queries: LogRatioQueries,
    prior: Prior,
    *,
    proposal: Proposal,
    likelihood_power: float = 1.0,
    test: AcceptTest = penalty_test,
) -> tuple[PenaltyState, PenaltyInfo]:
    """One iteration of the penalty method.

    The target is prior times likelihood to the power T, the `likelihood_power`. Clipping
    T r_i to T c, as Yildirim & Ermis (2019) do, is T times the same answer: all that changes is
    what is made of it.

    Notes
    -----
    Accept z' when log u < R~ + log pi0(z')/pi0(z) + log q(z|z')/q(z'|z) - s^2/2, with R~ the
    released sum of clipped log-likelihood ratios and s its noise standard deviation.

    Guarantee
        The posterior (or prior times likelihood to the power T) is stationary, for any noise.

    Assumptions
        No ratio is clipped, and s is symmetric in (z, z'). Where the model has a public Lipschitz
        bound |l_i(z') - l_i(z)| <= b |z' - z| and the clip is at least that, nothing is clipped.

    Weaknesses
        Clipping biases the chain, and much more than often stated: on logistic regression with
        d = 10 and n = 2e4 to 1e5, clipping 0.5 % of the ratios moved the posterior mean by about
        1.3 posterior standard deviations, 10 to 20 % by 10 to 18. The noise must stay of order 1,
        so the step shrinks and the chain slows as the budget falls.
    """
    with np.errstate(all="ignore"):  # an overflowing proposal is a rejection, not an error
        z_new, log_q_ratio, turned = proposal(rng, state.z, state.direction)
        finite = all_finite(z_new)
        log_prior_new = prior.log_density(select(finite, z_new, state.z))
        public = log_prior_new - state.log_prior + log_q_ratio
        possible = finite & np.isfinite(public)

        z_new = select(possible, z_new, state.z)
        value, noise_sd = queries.log_ratio(state.z, z_new)
        value, noise_sd = likelihood_power * value, likelihood_power * noise_sd
        accepted, log_accept = test(rng, possible, value, noise_sd, public)

    state = PenaltyState(
        select(accepted, z_new, state.z),
        np.where(accepted, log_prior_new, state.log_prior),
        select(accepted, state.direction, turned),
    )
    return state, PenaltyInfo(accepted, log_accept, noise_sd, possible)


def releases() -> dict[str, int]:
    """Gaussian releases of one iteration, by query name."""
    return {"log_ratio": 1}


def start_releases() -> dict[str, int]:
    """Gaussian releases once per chain, by query name."""
    return {}
