"""One iteration of signed HMC-ECS: one product of the block-Poisson estimator, then a trajectory.

Dang et al. (2019), Section 5: the likelihood is estimated without bias by products of Poisson(1)
many factors each (eq. 5.1); the chain sees the absolute value, and keeps the sign.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.subsampling.chances import MOST_BATCHES, Chances
from pymc_dp.subsampling.estimates import Sampled, density, estimate, negative, trajectory
from pymc_dp.subsampling.gather import Sample, empty_sample, first_records, gather, move


class SignedChain(NamedTuple):
    """What a chain carries on; the arrays are changed in place."""

    theta: ndarray  # (d,)
    gradient: ndarray  # (d,) room for a gradient
    d: ndarray  # (capacity,) d_k of the mini-batches at theta
    sample: Sample  # their records: those of mini-batch j at j * batch and on
    owner: ndarray  # (capacity / batch,) int64: the product to which each mini-batch belongs
    counts: ndarray  # (2,) int64: how many mini-batches there are, and products
    block: Sample  # room for the records of one product


def start_signed(
    rng: np.random.Generator, theta: ndarray, rows: ndarray, width: int, batch: int, products: int
) -> SignedChain:
    """A chain at theta, with mini-batches of its own; designs have `width` numbers."""
    # a Poisson(products) variable exceeds it with probability below 1e-15
    capacity = products + math.ceil(9.0 * math.sqrt(products)) + 2 * MOST_BATCHES
    numbers = np.minimum(rng.poisson(1.0, products), MOST_BATCHES)
    owners = np.repeat(np.arange(products), numbers)[:capacity]
    owner = np.zeros(capacity, dtype=np.int64)
    owner[: len(owners)] = owners
    sample = empty_sample(rows, width, capacity * batch)
    gather(rows, rng.integers(0, len(rows), len(owners) * batch), sample, 0)
    d = np.full(capacity * batch, np.nan)
    count = np.array([len(owners), products])
    block = empty_sample(rows, width, MOST_BATCHES * batch)
    return SignedChain(np.array(theta), np.zeros(len(theta)), d, sample, owner, count, block)


@compiled(error_model="numpy")
def _log_size(d: ndarray, scale: float, shift: float, products: int) -> float:
    """Log |d_hat - a| / lambda of one mini-batch."""
    return math.log(abs(scale * d.sum() - shift) / products)


@compiled(error_model="numpy")
def log_constants(shift: float, products: int, batches: int) -> float:
    """What eq. 5.1 has beside the numerators of its factors, in logarithms."""
    return shift + products - batches * math.log(products)


@compiled(error_model="numpy")
def _replace(chain: Any, chosen: int, batch: int, fresh: ndarray) -> None:
    """Give a product other mini-batches, the first of the block."""
    owner, count = chain.owner, chain.counts
    j = 0
    while j < count[0]:
        if owner[j] == chosen:  # the last one takes its place
            count[0] -= 1
            last = count[0]
            move(chain.sample, last * batch, batch, chain.sample, j * batch)
            chain.d[j * batch : (j + 1) * batch] = chain.d[last * batch : (last + 1) * batch]
            owner[j] = owner[last]
        else:
            j += 1
    start = count[0] * batch
    move(chain.block, 0, fresh.shape[0], chain.sample, start)
    chain.d[start : start + fresh.shape[0]] = fresh
    for _ in range(fresh.shape[0] // batch):
        owner[count[0]] = chosen
        count[0] += 1


@compiled(error_model="numpy")
def _refresh(kernel: Any, at: Sampled, rows: ndarray, chain: Any, chances: Chances) -> float:
    """Offer one product other mini-batches; the probability of acceptance."""
    batch, count = at.batch, chain.counts
    chosen, size = chances.block, chances.records.shape[0]
    number = size // batch
    fresh = np.empty(size)
    change = 0.0
    if size > 0:
        gather(rows, chances.records, chain.block, 0)
        estimate(kernel, at, first_records(chain.block, size), chain.theta, fresh, chain.gradient)
        for first in range(0, size, batch):
            change += _log_size(fresh[first : first + batch], at.scale, at.shift, count[1])
    for j in range(count[0]):
        if chain.owner[j] == chosen:
            old = chain.d[j * batch : (j + 1) * batch]
            change -= _log_size(old, at.scale, at.shift, count[1])
            number -= 1
    accept = math.exp(min(0.0, change)) if np.isfinite(change) else 0.0
    if count[0] + number > chain.owner.shape[0]:
        accept = 0.0
    if chances.uniforms[0] < accept:
        _replace(chain, chosen, batch, fresh)
    return accept


@compiled(error_model="numpy")
def signed(
    kernel: Any,
    prior: Any,
    at: Sampled,
    rows: ndarray,
    chain: Any,
    covariance: ndarray,
    step_size: float,
    n_steps: int,
    chances: Chances,
) -> tuple[float, float, float, float, float, float]:
    """One iteration, of a :class:`SignedChain`.

    Parameters and results are those of :func:`pymc_dp.subsampling.perturbed.perturbed`, and the
    sign of the estimated likelihood comes last.
    """
    theta, gradient, count = chain.theta, chain.gradient, chain.counts
    if not np.isfinite(chain.d[0]):
        m = count[0] * at.batch
        density(kernel, prior, at, first_records(chain.sample, m), theta, chain.d[:m], gradient)
    accept_u = _refresh(kernel, at, rows, chain, chances)
    m = count[0] * at.batch
    sample, d = first_records(chain.sample, m), chain.d[:m]
    accept_theta, error, value = trajectory(
        kernel,
        prior,
        at,
        sample,
        theta,
        chances.momentum,
        gradient,
        d,
        covariance,
        step_size,
        n_steps,
        chances.uniforms[1],
    )
    products = count[1]
    # of the logarithm of the estimate: a compound Poisson variable
    variance = 0.0
    for first in range(0, m, at.batch):
        variance += _log_size(d[first : first + at.batch], at.scale, at.shift, products) ** 2
    value += log_constants(at.shift, products, count[0])
    sign = -1.0 if negative(d, at.scale, at.shift, at.batch) else 1.0
    return accept_theta, accept_u, variance, error, value, sign
