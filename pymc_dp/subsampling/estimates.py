"""What a sample of records says of the log-posterior, and trajectories along it: compiled loops.

d_k is what control variates leave of the log-likelihood of record k. An estimate of their sum has a
scale (n / m, with m records in the sample or mini-batch), a shift (a of the block-Poisson
estimator, eq. 5.1), and a batch (records of a mini-batch of that estimator, whose absolute value is
taken; `PERTURBED` for eq. 4.5, `MEAN` for stochastic gradients).

Records of one linear predictor have loops of their own; others have a kernel, compiled from the
graph of the model and called through its address. A function as an argument would cost half a
millisecond per call, and the type of the loop would depend on it; with addresses, loops are
compiled once, and cached, for all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy import ndarray
from pytensor.graph.basic import Variable

from pymc_dp.base.jit import compiled
from pymc_dp.rows.functions import compile_function
from pymc_dp.rows.linear import LOG, LOGIT, of_log, of_logit, of_normal

PERTURBED, MEAN = 0, -1  # sizes of a mini-batch that stand for estimators without mini-batches
_REORDERED = {"reassoc", "contract", "nsz"}  # sums may be reordered; NaN and infinity stay

# -- samples of records ---------------------------------------------------------------------------

Sample = tuple[ndarray, ndarray]  # (m, p) designs, (k, m) other numbers
_BLOCK = 2**14  # rows that are filled at once


def packed(arrays: Sequence[ndarray]) -> ndarray:
    """(n, k) float64 matrix of (n, ...) arrays side by side."""
    n = len(arrays[0])
    flat = [x.reshape(n, -1) for x in arrays]
    rows = np.empty((n, sum(x.shape[1] for x in flat)))
    for first in range(0, n, _BLOCK):  # all columns of a row while it is in a cache
        here, start = slice(first, first + _BLOCK), 0
        for x in flat:
            rows[here, start : start + x.shape[1]] = x[here]
            start += x.shape[1]
    return rows


def empty_sample(rows: ndarray, width: int, size: int) -> Sample:
    """Room for `size` records whose designs have `width` numbers."""
    return np.zeros((size, width)), np.zeros((rows.shape[1] - width, size))


def drawn(rows: ndarray, width: int, index: ndarray) -> Sample:
    """The records of an index."""
    sample = empty_sample(rows, width, len(index))
    gather(rows, index, sample)
    return sample


@compiled(error_model="numpy")
def gather(rows: ndarray, index: ndarray, sample: Sample) -> None:
    """Copy the records of an index to the first places of a sample."""
    design, numbers = sample
    width = design.shape[1]
    for i in range(index.shape[0]):
        row = rows[index[i]]
        for j in range(width):
            design[i, j] = row[j]
        for j in range(numbers.shape[0]):
            numbers[j, i] = row[width + j]


@compiled(error_model="numpy")
def move(source: Sample, first: int, count: int, target: Sample, start: int) -> None:
    """Copy `count` records of a sample, from `first` on, to `start` and on of another."""
    for i in range(count):
        for j in range(source[0].shape[1]):
            target[0][start + i, j] = source[0][first + i, j]
    for j in range(source[1].shape[0]):
        for i in range(count):
            target[1][j, start + i] = source[1][j, first + i]


@compiled(error_model="numpy")
def first_records(sample: Sample, stop: int) -> Sample:
    """The first records of a sample."""
    return sample[0][:stop], np.ascontiguousarray(sample[1][:, :stop])


# -- the sum of all control variates --------------------------------------------------------------


class Expansion(NamedTuple):
    """constant + A . delta + delta' B delta / 2, with delta = theta - centre."""

    centre: ndarray  # (d,) theta*
    constant: float
    A: ndarray  # (d,) sum of the records' gradients at the centre
    B: ndarray  # (d, d) sum of their Hessians

    def plus(self, constant: float, slope: ndarray, curvature: ndarray) -> Expansion:
        """The sum with another quadratic function about the same centre."""
        return Expansion(self.centre, self.constant + constant, self.A + slope, self.B + curvature)


def expand(
    centre: ndarray, value: float, gradient: ndarray, hessian: ndarray, order: int
) -> Expansion:
    """The Taylor polynomial of an order."""
    return Expansion(
        np.ascontiguousarray(centre, dtype="float64"),
        float(value),
        gradient * float(order >= 1),
        np.ascontiguousarray(hessian * float(order >= 2)),
    )


@compiled(error_model="numpy")
def quadratic(expansion: Expansion, theta: ndarray, gradient: ndarray) -> float:
    """The value at theta; its gradient is written."""
    d = theta.shape[0]
    value = expansion.constant
    for j in range(d):
        bent = 0.0
        row = expansion.B[j]
        for k in range(d):
            bent += row[k] * (theta[k] - expansion.centre[k])
        value += (theta[j] - expansion.centre[j]) * (expansion.A[j] + 0.5 * bent)
        gradient[j] = expansion.A[j] + bent
    return value


# -- functions compiled from graphs ---------------------------------------------------------------


@intrinsic
def call_address(typingctx: Any, address: Any, arguments: Any) -> Any:
    """Result, a float64, of the ``numba.cfunc`` at an address, from a tuple of its arguments."""

    def call(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in arguments.types]
        result = context.get_value_type(types.float64)
        pointer = builder.inttoptr(values[0], ir.FunctionType(result, kinds).as_pointer())
        return builder.call(pointer, cgutils.unpack_tuple(builder, values[1]))

    return types.float64(types.int64, arguments), call


KernelGraph = tuple[list[Variable], list[Variable]]
_VECTOR, _MATRIX = types.float64[::1], types.float64[:, ::1]

# Where a function raises (a singular matrix), its results are not numbers: behind an address an
# error would return 0. Numba takes seconds to compile an assigned slice, so loops copy results.


def callable_kernel(graph: KernelGraph) -> Any:
    """The whole estimate of a sample: d and the gradient are written."""
    function = compile_function(*graph).vm.jit_fn
    *_, coefficients, _, _ = graph[0]
    stop = coefficients.type.shape[0]  # rows of `others` that are coefficients

    def estimate(theta, centre, numbers, tables, d, gradient, design, others):  # type: ignore[no-untyped-def]
        try:
            value, found, slope = function(
                theta,
                centre,
                numbers,
                tables,
                design,
                design.T,
                others[:stop],
                others[:stop].T,
                others[stop:],
            )
        except Exception:
            d.fill(np.nan)
            gradient.fill(np.nan)
            return np.nan
        for i in range(d.shape[0]):
            d[i] = found[i]
        for k in range(gradient.shape[0]):
            gradient[k] = slope[k]
        return value[0]

    signature = types.float64(
        _VECTOR, _VECTOR, _VECTOR, _MATRIX, _VECTOR, _VECTOR, _MATRIX, _MATRIX
    )
    return cfunc(signature)(estimate)


def callable_prior(graph: KernelGraph) -> Any:
    """The log-prior: takes theta and room for its gradient."""
    function = compile_function(*graph).vm.jit_fn

    def log_prior(theta, gradient):  # type: ignore[no-untyped-def]
        try:
            value, slope = function(theta)
        except Exception:
            gradient.fill(np.nan)
            return np.nan
        for k in range(gradient.shape[0]):
            gradient[k] = slope[k]
        return value[0]

    return cfunc(types.float64(_VECTOR, _VECTOR))(log_prior)


# -- estimates ------------------------------------------------------------------------------------


class Sampled(NamedTuple):
    """`family` of the predictor, or -1; `expansion` has the prior where that is quadratic."""

    family: int
    expansion: Expansion
    scale: float
    shift: float
    batch: int


@compiled(error_model="numpy")
def _weigh(d: ndarray, scale: float, shift: float, batch: int, weights: ndarray) -> float:
    """The estimate; its derivative by each d_k is written to `weights`."""
    m = d.shape[0]
    if batch > 0:  # eq. 5.1, but for its constants
        value = 0.0
        for first in range(0, m, batch):
            term = scale * d[first : first + batch].sum() - shift
            value += np.log(abs(term))
            weights[first : first + batch] = scale / term
        return value
    total = d.sum()
    if batch == MEAN:
        weights[:] = scale
        return scale * total
    # eq. 4.5
    mean, square = total / m, 0.0
    for i in range(m):
        away = d[i] - mean
        square += away * away
        weights[i] = scale - scale * scale * away
    return scale * total - 0.5 * scale * scale * square


@compiled(error_model="numpy", fastmath=_REORDERED)
def _products(design: ndarray, delta: ndarray, out: ndarray) -> None:
    """Product of every row of a design with `delta`."""
    for i in range(design.shape[0]):
        x, total = design[i], 0.0
        for j in range(delta.shape[0]):
            total += x[j] * delta[j]
        out[i] = total


@compiled(error_model="numpy", fastmath=_REORDERED)
def _add_rows(design: ndarray, weights: ndarray, out: ndarray) -> None:
    """Add the weighted sum of the rows of a design."""
    for i in range(design.shape[0]):
        x, w = design[i], weights[i]
        for j in range(out.shape[0]):
            out[j] += w * x[j]


@compiled(error_model="numpy")
def concave(family: int, b: ndarray, v: ndarray, value: ndarray, slope: ndarray) -> None:
    """value[i] <- -b K(v[i]), and slope[i] <- -b K'(v[i])."""
    n = v.shape[0]
    if family == LOGIT:
        for i in range(n):
            value[i], slope[i] = of_logit(v[i], 0.0, b[i])
    elif family == LOG:
        for i in range(n):
            value[i], slope[i] = of_log(v[i], 0.0, b[i])
    else:
        for i in range(n):
            value[i], slope[i] = of_normal(v[i], 0.0, b[i])


@compiled(error_model="numpy")
def _of_predictor(
    at: Sampled, sample: Sample, theta: ndarray, d: ndarray, gradient: ndarray
) -> float:
    """The estimate from records of one linear predictor (:mod:`pymc_dp.subsampling.linear`)."""
    design, numbers = sample
    m = design.shape[0]
    ways, slopes, weights = np.empty(m), np.empty(m), np.empty(m)
    _products(design, theta - at.expansion.centre, ways)
    v, value, b, linear, bent = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    concave(at.family, b, v + ways, d, slopes)
    for i in range(m):
        way = ways[i]
        d[i] += way * (linear[i] + 0.5 * bent[i] * way) - value[i]
        slopes[i] += linear[i] + bent[i] * way
    total = _weigh(d, at.scale, at.shift, at.batch, weights)
    weights *= slopes
    gradient[:] = 0.0
    _add_rows(design, weights, gradient)
    return total


@compiled(error_model="numpy")
def estimate(
    kernel: Any, at: Sampled, sample: Sample, theta: ndarray, d: ndarray, gradient: ndarray
) -> float:
    """What a sample says of the sum of d_k; d_k and the gradient are written.

    `kernel` is None for records of one linear predictor; else an address and tables.
    """
    if d.shape[0] == 0:
        gradient[:] = 0.0
        return 0.0
    if kernel is None:
        return _of_predictor(at, sample, theta, d, gradient)
    address, tables = kernel
    numbers, centre = np.array([at.scale, at.shift, float(at.batch)]), at.expansion.centre
    return call_address(
        address, (theta, centre, numbers, tables, d, gradient, sample[0], sample[1])
    )


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
    """Estimated log-posterior at theta, up to a constant; d_k and the gradient are written.

    `prior` is an address, or None for a prior that is part of the expansion.
    """
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
    """Half a kick, drifts and kicks, half a kick, all on one sample; the log-posterior there.

    The published listing mixes up the indices of its half kicks.
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

    Returns the probability of acceptance, the error of the energy, and the estimated log-posterior,
    up to a constant, where the chain is now; if accepted, theta and d_k are those at the end.
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
