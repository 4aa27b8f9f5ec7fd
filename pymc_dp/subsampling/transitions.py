"""One iteration of HMC-ECS: part of the sample, then a trajectory (Dang et al. 2019, Algorithm 1).

Perturbed chains (eq. 4.5) renew one block of their sample. Signed chains (Section 5) estimate the
likelihood without bias by products of Poisson(1) many factors (eq. 5.1), of which one is renewed;
the chain sees the absolute value, and keeps the sign.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.subsampling.estimates import (
    MEAN,
    Sample,
    Sampled,
    density,
    drawn,
    empty_sample,
    estimate,
    first_records,
    gather,
    move,
    trajectory,
)

MOST_BATCHES = 16  # of one product: a Poisson(1) variable exceeds it with probability 1e-15


class Drawn(NamedTuple):
    """Random numbers of an iteration, drawn before: a generator costs Numba 17 microseconds."""

    momentum: ndarray  # (d,) a draw from N(0, mass matrix), which is overwritten
    block: int  # the block of the sample, or the product, that is offered other records
    records: ndarray  # (k,) int64, these records
    uniforms: ndarray  # (2,) for the accept tests of the records and of the trajectory


def perturbed_numbers(
    rng: np.random.Generator, mass_root: ndarray, n: int, blocks: int, size: int
) -> Drawn:
    """Random numbers for blocks of `size` of n records; mass matrix ``mass_root @ mass_root.T``."""
    momentum = mass_root @ rng.standard_normal(len(mass_root))
    block, records = rng.integers(blocks), rng.integers(0, n, size)
    return Drawn(momentum, int(block), records, rng.random(2))


def signed_numbers(
    rng: np.random.Generator, mass_root: ndarray, n: int, products: int, batch: int
) -> Drawn:
    """Random numbers for products of Poisson(1) many mini-batches of `batch` of n records."""
    size = batch * min(int(rng.poisson(1.0)), MOST_BATCHES)
    return perturbed_numbers(rng, mass_root, n, products, size)


# -- perturbed ------------------------------------------------------------------------------------


class PerturbedChain(NamedTuple):
    """What a chain carries on; the arrays are changed in place."""

    theta: ndarray  # (d,)
    gradient: ndarray  # (d,) room for a gradient
    d: ndarray  # (m,) d_k of the sample at theta
    sample: Sample  # the m records
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
def _perturbed_estimate(d: ndarray, scale: float) -> tuple[float, float]:
    """The estimate of the sum of d_k, and its variance (eq. 4.3)."""
    variance = scale * scale * ((d - d.mean()) ** 2).sum()
    return scale * d.sum() - 0.5 * variance, variance


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
    numbers: Drawn,
) -> tuple[float, float, float, float, float]:
    """One iteration. `rows` (n, k) are all records, `covariance` is the inverse mass matrix.

    Returns the probabilities of acceptance of theta and of the sample, the estimated variance of
    the log-likelihood estimate, the error of the energy, and the estimated log-posterior. `kernel`
    and `prior` are as in :func:`pymc_dp.subsampling.estimates.density`.
    """
    d = chain.d
    theta, gradient = chain.theta, chain.gradient
    if not np.isfinite(d[0]):
        density(kernel, prior, at, chain.sample, theta, d, gradient)
    # a block of the sample, given theta
    size = chain.block[1].shape[1]
    first = numbers.block * size
    gather(rows, numbers.records, chain.block)
    proposed, plain = d.copy(), Sampled(at.family, at.expansion, at.scale, at.shift, MEAN)
    estimate(kernel, plain, chain.block, theta, proposed[first : first + size], gradient)
    change = _perturbed_estimate(proposed, at.scale)[0] - _perturbed_estimate(d, at.scale)[0]
    accept_u = np.exp(min(0.0, change)) if np.isfinite(change) else 0.0
    if numbers.uniforms[0] < accept_u:
        move(chain.block, 0, size, chain.sample, first)
        d[:] = proposed
    accept_theta, error, value = trajectory(
        kernel,
        prior,
        at,
        chain.sample,
        theta,
        numbers.momentum,
        gradient,
        d,
        covariance,
        step_size,
        n_steps,
        numbers.uniforms[1],
    )
    return accept_theta, accept_u, _perturbed_estimate(d, at.scale)[1], error, value


# -- signed ---------------------------------------------------------------------------------------


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
    gather(rows, rng.integers(0, len(rows), len(owners) * batch), sample)
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
def _refresh(kernel: Any, at: Sampled, rows: ndarray, chain: Any, numbers: Drawn) -> float:
    """Offer one product other mini-batches; the probability of acceptance."""
    batch, count = at.batch, chain.counts
    chosen, size = numbers.block, numbers.records.shape[0]
    number = size // batch
    fresh = np.empty(size)
    change = 0.0
    if size > 0:
        gather(rows, numbers.records, chain.block)
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
    if numbers.uniforms[0] < accept:
        _replace(chain, chosen, batch, fresh)
    return accept


@compiled(error_model="numpy")
def negative(d: ndarray, scale: float, shift: float, batch: int) -> bool:
    """Whether a product of the mini-batches' factors is negative."""
    found = False
    for first in range(0, d.shape[0], batch):
        if scale * d[first : first + batch].sum() < shift:
            found = not found
    return found


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
    numbers: Drawn,
) -> tuple[float, float, float, float, float, float]:
    """One iteration of a :class:`SignedChain`; as :func:`perturbed`, but the sign comes last."""
    theta, gradient, count = chain.theta, chain.gradient, chain.counts
    if not np.isfinite(chain.d[0]):
        m = count[0] * at.batch
        density(kernel, prior, at, first_records(chain.sample, m), theta, chain.d[:m], gradient)
    accept_u = _refresh(kernel, at, rows, chain, numbers)
    m = count[0] * at.batch
    sample, d = first_records(chain.sample, m), chain.d[:m]
    accept_theta, error, value = trajectory(
        kernel,
        prior,
        at,
        sample,
        theta,
        numbers.momentum,
        gradient,
        d,
        covariance,
        step_size,
        n_steps,
        numbers.uniforms[1],
    )
    products = count[1]
    # of the logarithm of the estimate: a compound Poisson variable
    variance = 0.0
    for first in range(0, m, at.batch):
        variance += _log_size(d[first : first + at.batch], at.scale, at.shift, products) ** 2
    value += log_constants(at.shift, products, count[0])
    sign = -1.0 if negative(d, at.scale, at.shift, at.batch) else 1.0
    return accept_theta, accept_u, variance, error, value, sign
