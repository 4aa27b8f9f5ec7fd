"""The log-posterior that a sample of records sees, its gradient, and trajectories along it.

Three numbers describe an estimate:

- scale: n / m, with m records in the sample, or in a mini-batch of it;
- shift: a of the block-Poisson estimator (eq. 5.1);
- batch: records of a mini-batch of the block-Poisson estimator, whose absolute value is taken; 0
  for the perturbed one (eq. 4.5); -1 for the plain mean, of stochastic gradients.

`kernel` says how records are evaluated: None for those of one linear predictor
(:mod:`pymc_dp.subsampling.linear`), a plan and addresses for those that see few numbers
(:mod:`pymc_dp.subsampling.compact`), constants and an address for others
(:mod:`pymc_dp.subsampling.general`). `prior` is the address of a function compiled from a graph, or
None for a prior that is part of the expansion.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.subsampling.calls import call_address
from pymc_dp.subsampling.compact import compact_estimate
from pymc_dp.subsampling.expansion import Expansion, quadratic
from pymc_dp.subsampling.gather import Sample
from pymc_dp.subsampling.linear import linear_estimate


class Sampled(NamedTuple):
    """How the posterior is estimated from a sample.

    `family` is that of the linear predictor; -1 without one. `expansion` is the sum of the control
    variates; with the prior, where that is quadratic too.
    """

    family: int
    expansion: Expansion
    scale: float
    shift: float
    batch: int


def _estimate(
    kernel: Any, at: Sampled, sample: Sample, theta: ndarray, d: ndarray, gradient: ndarray
) -> float:
    """As :func:`estimate`, which is compiled."""
    raise TypeError("An estimate is made by compiled loops only.")


@overload(_estimate)
def _choose(kernel: Any, at: Any, sample: Any, theta: Any, d: Any, gradient: Any) -> Any:
    def linear(kernel: Any, at: Any, sample: Any, theta: Any, d: Any, gradient: Any) -> Any:
        delta = theta - at.expansion.centre
        return linear_estimate(at.family, sample, delta, at.scale, at.shift, at.batch, d, gradient)

    def compact(kernel: Any, at: Any, sample: Any, theta: Any, d: Any, gradient: Any) -> Any:
        centre, numbers = at.expansion.centre, (at.scale, at.shift, at.batch)
        return compact_estimate(kernel[0], kernel[1], sample, theta, centre, numbers, d, gradient)

    def graph(kernel: Any, at: Any, sample: Any, theta: Any, d: Any, gradient: Any) -> Any:
        constants, functions = kernel
        numbers = np.concatenate((np.array([at.scale, at.shift, float(at.batch)]), constants))
        arguments = (theta, at.expansion.centre, numbers, d, gradient, sample[0], sample[1])
        return call_address(functions[0], arguments)

    if isinstance(kernel, types.NoneType):
        return linear
    return compact if isinstance(kernel[0], types.BaseNamedTuple) else graph


@compiled(error_model="numpy")
def estimate(
    kernel: Any, at: Sampled, sample: Sample, theta: ndarray, d: ndarray, gradient: ndarray
) -> float:
    """What a sample says of the sum of d_k; d_k and the gradient are written."""
    if d.shape[0] == 0:
        gradient[:] = 0.0
        return 0.0
    return _estimate(kernel, at, sample, theta, d, gradient)


@compiled(error_model="numpy")
def density(
    kernel: Any,
    prior: Any,
    at: Sampled,
    sample: Sample,
    theta: ndarray,
    d: ndarray,
    gradient: ndarray,
) -> float:
    """Estimated log-posterior at theta, up to a constant; d_k and the gradient are written."""
    value = estimate(kernel, at, sample, theta, d, gradient)
    part = np.empty_like(gradient)
    value += quadratic(at.expansion, theta, part)
    gradient += part
    if prior is not None:
        value += call_address(prior, (theta, part))
        gradient += part
    return value


@compiled(error_model="numpy")
def leapfrog(
    kernel: Any,
    prior: Any,
    at: Sampled,
    sample: Sample,
    theta: ndarray,
    momentum: ndarray,
    gradient: ndarray,
    d: ndarray,
    covariance: ndarray,
    step_size: float,
    n_steps: int,
) -> float:
    """Move theta and the momentum along a trajectory; the log-posterior at its end.

    All of it sees the same sample: half a kick, then drifts and kicks, then half a kick. The
    published listing mixes up the indices of its half kicks.
    """
    value = 0.0
    momentum += 0.5 * step_size * gradient
    for step in range(n_steps):
        theta += step_size * (covariance @ momentum)
        value = density(kernel, prior, at, sample, theta, d, gradient)
        if not np.isfinite(value):
            return value
        momentum += (step_size if step < n_steps - 1 else 0.5 * step_size) * gradient
    return value


@compiled(error_model="numpy")
def trajectory(
    kernel: Any,
    prior: Any,
    at: Sampled,
    sample: Sample,
    theta: ndarray,
    momentum: ndarray,
    gradient: ndarray,
    d: ndarray,
    covariance: ndarray,
    step_size: float,
    n_steps: int,
    uniform: float,
) -> tuple[float, float, float]:
    """A trajectory from theta and its accept test, given the sample and a uniform number.

    Returns the probability of acceptance, the error of the energy along the trajectory, and the
    estimated log-posterior, up to a constant, where the chain is now. Where it was accepted, theta
    and d_k are those at its end.
    """
    value = density(kernel, prior, at, sample, theta, d, gradient)
    kinetic = 0.5 * np.dot(momentum, covariance @ momentum)
    moved, at_end = theta.copy(), np.empty(d.shape[0])
    end = leapfrog(
        kernel, prior, at, sample, moved, momentum, gradient, at_end, covariance, step_size, n_steps
    )
    error = value - end + 0.5 * np.dot(momentum, covariance @ momentum) - kinetic
    accept = np.exp(min(0.0, -error)) if np.isfinite(error) else 0.0
    if uniform < accept:
        theta[:] = moved
        d[:] = at_end
        value = end
    return accept, error, value


@compiled(error_model="numpy")
def negative(d: ndarray, scale: float, shift: float, batch: int) -> bool:
    """Whether a product of the mini-batches' factors is negative."""
    found = False
    for first in range(0, d.shape[0], batch):
        if scale * d[first : first + batch].sum() < shift:
            found = not found
    return found
