"""One iteration of perturbed HMC-ECS: a block of the sample, then a trajectory.

Dang et al. (2019), Algorithm 1 with the estimator of eq. 4.5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.subsampling.chances import Chances
from pymc_dp.subsampling.estimates import Sampled, density, estimate, trajectory
from pymc_dp.subsampling.gather import Sample, drawn, empty_sample, gather, move
from pymc_dp.subsampling.weights import MEAN


class PerturbedChain(NamedTuple):
    """What a chain carries on; the arrays are changed in place."""

    theta: ndarray  # (d,)
    gradient: ndarray  # (d,) room for a gradient
    d: ndarray  # (m,) d_k of the sample at theta
    sample: Sample  # the m records: `pymc_dp.subsampling.gather`
    block: Sample  # room for the records of one block


def start_perturbed(
    rng: np.random.Generator, theta: ndarray, rows: ndarray, width: int, size: int, blocks: int
) -> PerturbedChain:
    """A chain at theta, with a sample of its own; designs have `width` numbers."""
    sample = drawn(rows, width, rng.integers(0, len(rows), size))
    d = len(theta)
    block = empty_sample(rows, width, size // blocks)
    return PerturbedChain(np.array(theta), np.zeros(d), np.full(size, np.nan), sample, block)


@compiled(error_model="numpy")
def _estimate_of(d: ndarray, block: ndarray, first: int, scale: float) -> tuple[float, float]:
    """The estimate with other d_k in one block, and the variance (eq. 4.3)."""
    m = d.shape[0]
    last, total = first + block.shape[0], 0.0
    for i in range(m):
        total += block[i - first] if first <= i < last else d[i]
    mean, square = total / m, 0.0
    for i in range(m):
        away = (block[i - first] if first <= i < last else d[i]) - mean
        square += away * away
    variance = scale * scale * square
    return scale * total - 0.5 * variance, variance


@compiled(error_model="numpy")
def perturbed(
    kernel: Any,
    prior: Any,
    at: Sampled,
    rows: ndarray,
    chain: Any,
    covariance: ndarray,
    step_size: float,
    n_steps: int,
    chances: Chances,
) -> tuple[float, float, float, float, float]:
    """One iteration.

    `kernel` and `prior` are compiled functions, or None: :mod:`pymc_dp.subsampling.estimates`.
    `rows` (n, k) is what is read of all records, and `covariance` (d, d) the inverse of the mass
    matrix.

    Returns the probabilities of acceptance of theta and of the sample, the estimated variance of
    the estimate of the log-likelihood, the error of the energy along the trajectory, and the
    estimated log-posterior.
    """
    d = chain.d
    theta, gradient = chain.theta, chain.gradient
    if not np.isfinite(d[0]):
        density(kernel, prior, at, chain.sample, theta, d, gradient)
    # a block of the sample, given theta
    size = chain.block[1].shape[1]
    first = chances.block * size
    gather(rows, chances.records, chain.block, 0)
    proposed = np.empty(size)
    plain = Sampled(at.family, at.expansion, at.scale, at.shift, MEAN)
    estimate(kernel, plain, chain.block, theta, proposed, gradient)
    before, _ = _estimate_of(d, d[:0], 0, at.scale)
    after, _ = _estimate_of(d, proposed, first, at.scale)
    accept_u = np.exp(min(0.0, after - before)) if np.isfinite(after) else 0.0
    if chances.uniforms[0] < accept_u:
        move(chain.block, 0, size, chain.sample, first)
        d[first : first + size] = proposed
    accept_theta, error, value = trajectory(
        kernel,
        prior,
        at,
        chain.sample,
        theta,
        chances.momentum,
        gradient,
        d,
        covariance,
        step_size,
        n_steps,
        chances.uniforms[1],
    )
    _, variance = _estimate_of(d, d[:0], 0, at.scale)
    return accept_theta, accept_u, variance, error, value
