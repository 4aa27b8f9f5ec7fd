"""Langevin, Hamiltonian and Nosé-Hoover dynamics with noisy scores, without an accept test.

Welling & Teh (2011); Wang, Fienberg & Smola (2015); Li, Chen, Liu & Carin (2019), for private
stochastic gradients; Chen, Fox & Guestrin (2014), for friction; Ding et al. (2014), for the
thermostat; Leimkuhler & Shang (2016), for the order of its parts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pymc_dp.kernels.interfaces import (
    Array,
    Batch,
    GradientQueries,
    Mask,
    Prior,
    every,
    select,
)


class SGLDState(NamedTuple):
    """What the Langevin chain carries on."""

    z: Array  # (..., d)


class SGHMCState(NamedTuple):
    """What Hamiltonian dynamics with friction carry on."""

    z: Array  # (..., d)
    momentum: Array  # (..., d)


class SGNHTState(NamedTuple):
    """What the thermostat carries on."""

    z: Array  # (..., d)
    momentum: Array  # (..., d)
    friction: Array  # (...), the thermostat's variable


class SGInfo(NamedTuple):
    """Public diagnostics of one iteration, each of shape ``(...)``."""

    accepted: Mask  # whether the chain moved: False where it would have left the finite numbers


def largest_step(gradient_noise_sd: float) -> float:
    """The step of `langevin` at which the noise of the scores is all the noise it needs. (step_size
    / 2)^2 noise_sd^2 = step_size.
    """
    return math.inf if gradient_noise_sd == 0.0 else 4.0 / gradient_noise_sd**2


def langevin(
    rng: np.random.Generator,
    state: SGLDState,
    queries: GradientQueries,
    prior: Prior,
    *,
    step_size: float,
) -> tuple[SGLDState, SGInfo]:
    """One step of private stochastic-gradient Langevin dynamics.

    z' = z + h/2 (s + score of the prior) + N(0, h - (h/2)^2 sd^2), with h the `step_size`, at most
    `largest_step`, s the noisy score and sd its privacy noise, which is part of the noise that the
    dynamics need. (The published private samplers take a drift of h s with noise of variance h, and
    sample at temperature 1/2.)

    *Guarantee.* On N(0, 1), with the whole score, the stationary variance is 1 / (1 - h/4).
    *Weaknesses.* No accept test: a bias of order h, and of (1 - q)/q h times the information in the
    records from sampling batches of them. Clipping biases the drift itself.
    """
    with np.errstate(all="ignore"):
        score = queries.gradient(state.z) + prior.gradient(state.z)
        missing = max(0.0, step_size - (0.5 * step_size * queries.gradient_noise_sd) ** 2)
        noise = math.sqrt(missing) * rng.standard_normal(state.z.shape)
        z = state.z + 0.5 * step_size * score + noise
        finite = _inside(z, prior)
    return SGLDState(select(finite, z, state.z)), SGInfo(finite)


def initial_hamiltonian(rng: np.random.Generator, z: Array) -> SGHMCState:
    """State of Hamiltonian dynamics that start at ``z`` with a momentum of their own."""
    return SGHMCState(z, rng.standard_normal(z.shape))


def hamiltonian(
    rng: np.random.Generator,
    state: SGHMCState,
    queries: GradientQueries,
    prior: Prior,
    *,
    step_size: float,
    friction: float,
) -> tuple[SGHMCState, SGInfo]:
    """One step of stochastic-gradient Hamiltonian dynamics with friction.

    dz = p dt, dp = (score - C p) dt + sqrt(2 C) dW, with C the `friction`, in steps of h, the
    `step_size`, and in the palindromic order z, friction, score, friction, z. The noise of scores
    is not subtracted from that of the dynamics (Chen, Fox & Guestrin 2014 with B = 0).

    *Guarantee.* With exact scores and h -> 0, the posterior is stationary. *Weaknesses.* No accept
    test: a bias of order h^2, and one of order h times the variance of the scores.
    """
    half = 0.5 * step_size
    z, p = state
    kept = math.exp(-friction * half)
    spread = math.sqrt(1.0 - kept**2)
    with np.errstate(all="ignore"):
        z = z + half * p
        p = kept * p + spread * rng.standard_normal(p.shape)
        possible = every(np.isfinite(z))
        asked = select(possible, z, state.z)
        p = p + step_size * (queries.gradient(asked) + prior.gradient(asked))
        p = kept * p + spread * rng.standard_normal(p.shape)
        z = z + half * p
        possible = possible & _inside(z, prior) & every(np.isfinite(p))
    moved = SGHMCState(select(possible, z, state.z), select(possible, p, -state.momentum))
    return moved, SGInfo(possible)


def initial_thermostat(rng: np.random.Generator, z: Array, friction: float) -> SGNHTState:
    """State of a thermostat that starts at ``z`` with a momentum of its own."""
    return SGNHTState(z, rng.standard_normal(z.shape), np.full(z.shape[:-1], friction))


def thermostat(
    rng: np.random.Generator,
    state: SGNHTState,
    queries: GradientQueries,
    prior: Prior,
    *,
    step_size: float,
    friction: float,
) -> tuple[SGNHTState, SGInfo]:
    """One step of private stochastic-gradient Nosé-Hoover dynamics.

    dz = p dt, dp = (score - xi p) dt + sqrt(2 A) dW, dxi = (|p|^2 / d - 1) dt, in steps of h, the
    `step_size`, and in the palindromic order z, xi, friction, score, friction, xi, z. A is the
    `friction`: noise of variance 2 A h in all, that of the scores included. xi settles where it
    takes out what noise of any size puts in, so the noise of batches, whose variance nobody knows,
    is absorbed.

    *Guarantee.* With Gaussian noise of a constant, unknown variance and h -> 0, the posterior is
    stationary. *Weaknesses.* No accept test: a bias of order h^2, and one from noise that is not
    Gaussian or varies with z. Clipping biases the score itself.
    """
    h = step_size
    z, p, xi = state
    d = z.shape[-1]
    missing = max(0.0, 2.0 * friction * h - (h * queries.gradient_noise_sd) ** 2)
    with np.errstate(all="ignore"):
        z = z + 0.5 * h * p
        xi = xi + 0.5 * h * (np.vecdot(p, p) / d - 1.0)
        p = _damped(p, xi, 0.5 * h)
        possible = every(np.isfinite(z)) & np.isfinite(xi)
        asked = select(possible, z, state.z)
        score = queries.gradient(asked) + prior.gradient(asked)
        p = p + h * score + math.sqrt(missing) * rng.standard_normal(p.shape)
        p = _damped(p, xi, 0.5 * h)
        xi = xi + 0.5 * h * (np.vecdot(p, p) / d - 1.0)
        z = z + 0.5 * h * p
        possible = possible & _inside(z, prior) & every(np.isfinite(p)) & np.isfinite(xi)
    moved = SGNHTState(
        select(possible, z, state.z),
        # a chain that would leave turns back
        select(possible, p, -state.momentum),
        np.where(possible, xi, state.friction),
    )
    return moved, SGInfo(possible)


def _damped(p: Array, xi: Batch, time: float) -> Array:
    damped: Array = np.exp(-np.asarray(xi) * time)[..., None] * p
    return damped


def _inside(z: Array, prior: Prior) -> Mask:
    inside: Mask = every(np.isfinite(z))
    return inside & np.isfinite(prior.log_density(select(inside, z, np.zeros_like(z))))
