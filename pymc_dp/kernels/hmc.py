"""Hamiltonian Monte Carlo with noisy gradients and a penalty-corrected accept test.

Raisa, Koskela & Honkela (2021), Differentially Private Hamiltonian Monte Carlo, Algorithm 1, with
unit mass in the scaled coordinates z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from pymc_dp.kernels.interfaces import (
    Array,
    Batch,
    HamiltonianQueries,
    Mask,
    Prior,
    every,
    penalty_test,
    select,
    start_log_prior,
)
from pymc_dp.kernels.penalty import PenaltyInfo

Integrator: TypeAlias = Literal["leapfrog", "position"]
Stages: TypeAlias = tuple[tuple[float, float], ...]


class HMCState(NamedTuple):
    """What the chain carries on."""

    z: Array  # (..., d)
    log_prior: Batch  # public log density at z, (...)
    gradient: Array | None = None  # released posterior score G at z, (..., d); None: not reused


class Trajectory(NamedTuple):
    """End of an integration."""

    z: Array  # the start where the trajectory overflowed
    momentum: Array
    gradient: Array  # score released last
    finite: Mask


# Integrators as (kick, drift) coefficients in units of the step size. Each is a palindrome, which
# makes the noisy trajectory reversible (Corollary 3.2 of the paper).
INTEGRATORS: dict[str, Callable[[int], Stages]] = {
    # K_{1/2} (D K)^{L-1} D K_{1/2}: L + 1 releases, the first and last at the end points
    "leapfrog": lambda n_steps: ((0.5, 1.0), *((1.0, 1.0),) * (n_steps - 1), (0.5, 0.0)),
    # D_{1/2} (K D)^{L-1} K D_{1/2}: L releases, none at the end points
    "position": lambda n_steps: ((0.0, 0.5), *((1.0, 1.0),) * (n_steps - 1), (1.0, 0.5)),
}


def integrate(
    z: Array,
    momentum: Array,
    step_size: float | Array,
    stages: Stages,
    score: Callable[[Array], Array],
    first: Array | None = None,
) -> Trajectory:
    """Follow kicks p <- p + kick * h * score(z) and drifts z <- z + drift * h * p. h is
    `step_size`; an array (d,) is a diagonal mass, h / sqrt(m_j). `score` gives the noisy score of
    the posterior, at finite positions only. The first kick uses `first` if that is given.
    """
    start, finite, gradient = z, every(np.isfinite(z)), np.zeros(z.shape)
    for kick, drift in stages:
        if kick:
            gradient, first = (score(z) if first is None else first), None
            momentum = momentum + kick * step_size * gradient
        if drift:
            z = z + drift * step_size * momentum
            finite = finite & every(np.isfinite(z))
            z = select(finite, z, start)
    return Trajectory(z, momentum, gradient, finite)


def initial_state(
    z: Array, prior: Prior, *, release_gradient: Callable[[Array], Array] | None = None
) -> HMCState:
    """State of a chain that starts at ``z``, which must be finite in position and prior density. To
    reuse gradients, pass ``queries.gradient`` as `release_gradient`: one release at ``z`` is made
    and kept. Build a new state, and pay again, whenever noise, clip norm or scaling changes.
    """
    log_prior = start_log_prior(z, prior)
    if release_gradient is None:
        return HMCState(z, log_prior)
    return HMCState(z, log_prior, release_gradient(z) + prior.gradient(z))


def transition(
    rng: np.random.Generator,
    state: HMCState,
    queries: HamiltonianQueries,
    prior: Prior,
    *,
    step_size: float | Array,
    n_steps: int,
    integrator: Integrator = "leapfrog",
    adjusted: bool = True,
) -> tuple[HMCState, PenaltyInfo]:
    """One iteration of DP-HMC with fresh momentum.

    `step_size` is h in z; an array (d,) is a diagonal mass, h / sqrt(m_j). It may vary between
    iterations if it does not depend on the state. `n_steps` is L: drifts for leapfrog (Algorithm 1
    of the paper), kicks for position, which saves a release by starting with half a drift. If not
    `adjusted`, there is no accept test and no release for it: a burn-in, whose draws are not kept.

    Accept when log u < R~ + log pi0(z')/pi0(z) + (p.p - p'.p')/2 - s^2/2, with R~ the released sum
    of clipped log-likelihood ratios and s its noise standard deviation. A gradient stored in the
    state is reused for the first half kick (leapfrog only). That extends the state to (z, G) with
    target pi(z) N(G; g(z), sigma^2 I). G drives the first half kick and a fresh G' the last; the
    map (z, p, G, G') -> (z', -p', G', G) is a volume-preserving involution and the densities of G,
    G' cancel. On rejection G stays and G' is dropped.

    *Guarantee.* The posterior is stationary, for any noise and any clipping of the gradients: a
    noisy kick is a shear for every value of its noise, so the trajectory is reversible with respect
    to Lebesgue measure. *Assumptions.* No log-likelihood ratio is clipped, s is symmetric in (z,
    z'), momentum is fresh. *Weaknesses.* Each iteration pays for a log-likelihood ratio, whose clip
    grows with the distance moved; clipping it biases the chain as in `pymc_dp.kernels.penalty`.
    Gradient noise accumulates in the kinetic energy and lowers acceptance as L grows.
    """
    if state.gradient is not None and integrator != "leapfrog":
        raise ValueError(
            f"A stored gradient cannot be reused with integrator={integrator!r}, which asks for "
            'none at the start; use integrator="leapfrog" or a state without gradient.'
        )

    def score(z: Array) -> Array:
        return queries.gradient(z) + prior.gradient(z)

    with np.errstate(all="ignore"):  # an overflowing trajectory is a rejection, not an error
        momentum = rng.standard_normal(state.z.shape)
        stages = INTEGRATORS[integrator](n_steps)
        end = integrate(state.z, momentum, step_size, stages, score, first=state.gradient)

        log_prior_new = prior.log_density(end.z)
        before, after = (0.5 * np.vecdot(p, p) for p in (momentum, end.momentum))
        public = log_prior_new - state.log_prior + (before - after)
        possible = end.finite & np.isfinite(public)

        z_new = select(possible, end.z, state.z)
        if adjusted:
            value, noise_sd = queries.log_ratio(state.z, z_new)
            accepted, log_accept = penalty_test(rng, possible, value, noise_sd, public)
        else:
            accepted, noise_sd, log_accept = possible, 0.0, np.zeros_like(public)

    state = HMCState(
        select(accepted, z_new, state.z),
        np.where(accepted, log_prior_new, state.log_prior),
        None if state.gradient is None else select(accepted, end.gradient, state.gradient),
    )
    return state, PenaltyInfo(accepted, log_accept, noise_sd, possible)


def releases(
    n_steps: int, integrator: Integrator = "leapfrog", reuse_gradient: bool = False
) -> dict[str, int]:
    """Gaussian releases of one iteration, by query name."""
    kicks = sum(kick != 0 for kick, _ in INTEGRATORS[integrator](n_steps))
    return {"gradient": kicks - int(reuse_gradient), "log_ratio": 1}


def start_releases(reuse_gradient: bool = False) -> dict[str, int]:
    """Gaussian releases once per chain, by query name."""
    return {"gradient": 1} if reuse_gradient else {}
