"""Records that see few numbers of theta: loops of our own about one compiled function of the rows.

Record i sees K numbers eta_j, each through a door of its own (:mod:`pymc_dp.records.graph`): the
same shared value for every record, a product of the record's design with shared values, or the
shared value of the record's label. What is compiled for a model is the log-likelihood of a record
and its derivatives by eta. These loops do the rest, and are compiled once for all models.

Shared values come in two kinds. Those that are affine in theta move from the centre by
first = J (theta - centre). Those that are bent have a value, and a first and a second derivative
along theta - centre, from a function of the parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.subsampling.calls import call_address
from pymc_dp.subsampling.gather import Sample, gather
from pymc_dp.subsampling.linear import add_rows, products
from pymc_dp.subsampling.weights import weigh

#: The doors.
COPY, DOT, INDEX = 0, 1, 2
#: Rows of a pass over all records that are evaluated at once.
BLOCK = 1024


class Plan(NamedTuple):
    """Where everything is, for the K numbers that a row sees."""

    door: ndarray  # (K,) int64: COPY, DOT or INDEX
    column: ndarray  # (K,) int64: first column of the design, or place of the labels
    base: ndarray  # (K,) int64: first of its shared values, in the vector of their kind
    stride: ndarray  # (K,) int64: from one of them to the next
    length: ndarray  # (K,) int64: how many there are
    bent: ndarray  # (K,) bool: of which kind they are
    n_bent: int  # how many shared values are bent
    star: int  # place, among the other numbers, of eta at the centre
    coefficients: int  # place of the log-likelihood there, with its derivatives by eta
    order: int  # of the control variates
    jacobian: ndarray  # (S, d): J
    origin: ndarray  # (S,): affine shared values at theta = 0
    constants: ndarray  # for the function of the parameters


@compiled(error_model="numpy")
def _seen(plan: Plan, j: int, shared: ndarray, offset: int, sample: Sample, out: ndarray) -> None:
    """The number j of each record, from shared values that begin at `offset`."""
    base, stride, column = offset + plan.base[j], plan.stride[j], plan.column[j]
    if plan.door[j] == COPY:
        out[:] = shared[base]
    elif plan.door[j] == DOT:
        way = np.empty(plan.length[j])
        for k in range(way.shape[0]):
            way[k] = shared[base + k * stride]
        products(sample[0], column, way, out)
    else:
        labels = sample[1][column]
        for i in range(out.shape[0]):
            out[i] = shared[base + int(labels[i]) * stride]


@compiled(error_model="numpy")
def _pulled(
    plan: Plan, j: int, weights: ndarray, sample: Sample, adjoint: ndarray, offset: int
) -> None:
    """Add the derivatives by these shared values, given those by the number j of each record."""
    base, stride, column = offset + plan.base[j], plan.stride[j], plan.column[j]
    if plan.door[j] == COPY:
        adjoint[base] += weights.sum()
    elif plan.door[j] == DOT:
        way = np.zeros(plan.length[j])
        add_rows(sample[0], column, weights, way)
        for k in range(way.shape[0]):
            adjoint[base + k * stride] += way[k]
    else:
        labels = sample[1][column]
        for i in range(weights.shape[0]):
            adjoint[base + int(labels[i]) * stride] += weights[i]


@compiled(error_model="numpy")
def _bent_values(
    plan: Plan,
    functions: ndarray,
    theta: ndarray,
    centre: ndarray,
    adjoint: ndarray,
    gradient: ndarray,
) -> ndarray:
    """Values, first and second derivatives of bent shared values; what the adjoint pulls back."""
    values = np.empty(3 * plan.n_bent)
    if plan.n_bent > 0:
        call_address(functions[1], (theta, centre, plan.constants, adjoint, values, gradient))
    return values


@compiled(error_model="numpy")
def _expansion(plan: Plan, numbers: ndarray, ways: ndarray, seconds: ndarray, out: ndarray) -> Any:
    """q_k of each record, and (K, m) its derivatives by the first derivatives of eta."""
    n_seen = ways.shape[0]
    slopes = np.zeros(ways.shape)
    place = plan.coefficients
    out[:] = numbers[place]
    if plan.order == 0:
        return slopes
    for j in range(n_seen):
        slope, way, second, into = numbers[place + 1 + j], ways[j], seconds[j], slopes[j]
        for i in range(out.shape[0]):
            out[i] += slope[i] * (way[i] + 0.5 * second[i])
            into[i] = slope[i]
    if plan.order == 1:
        return slopes
    place += 1 + n_seen
    for j in range(n_seen):
        way, into = ways[j], slopes[j]
        for k in range(j, n_seen):
            bend, other, into_other = numbers[place], ways[k], slopes[k]
            place += 1
            if j == k:
                for i in range(out.shape[0]):
                    bent = bend[i] * way[i]
                    out[i] += 0.5 * bent * way[i]
                    into[i] += bent
            else:
                for i in range(out.shape[0]):
                    out[i] += bend[i] * way[i] * other[i]
                    into[i] += bend[i] * other[i]
                    into_other[i] += bend[i] * way[i]
    return slopes


@compiled(error_model="numpy")
def compact_estimate(
    plan: Plan,
    functions: ndarray,
    sample: Sample,
    theta: ndarray,
    centre: ndarray,
    how: tuple[float, float, int],
    d: ndarray,
    gradient: ndarray,
) -> float:
    """The estimate from a sample of records; d_k (m,) and the gradient (d,) are written.

    `functions` holds int64 addresses: of the function of the rows, and of that of bent shared
    values. `how` is (scale, shift, batch), as in :mod:`pymc_dp.subsampling.estimates`.
    """
    numbers = sample[1]
    n_seen, m, n_bent = plan.door.shape[0], numbers.shape[1], plan.n_bent
    first = np.zeros(plan.jacobian.shape[0])
    products(plan.jacobian, 0, theta - centre, first)
    adjoint = np.zeros(3 * n_bent)
    bent = _bent_values(plan, functions, theta, centre, adjoint, gradient)
    eta, ways, seconds = np.empty((n_seen, m)), np.empty((n_seen, m)), np.zeros((n_seen, m))
    for j in range(n_seen):
        if plan.bent[j]:
            _seen(plan, j, bent, 0, sample, eta[j])
            _seen(plan, j, bent, n_bent, sample, ways[j])
            if plan.order == 2:
                _seen(plan, j, bent, 2 * n_bent, sample, seconds[j])
        else:
            _seen(plan, j, first, 0, sample, ways[j])
            star, way, here = numbers[plan.star + j], ways[j], eta[j]
            for i in range(m):
                here[i] = star[i] + way[i]
    found, expansion = np.empty((n_seen + 1, m)), np.empty(m)
    call_address(functions[0], (eta, numbers, found))
    slopes = _expansion(plan, numbers, ways, seconds, expansion)
    d[:] = found[0] - expansion
    weights = np.empty(m)
    value = weigh(d, how[0], how[1], how[2], weights)
    affine = np.zeros(first.shape[0])
    for j in range(n_seen):
        if plan.bent[j]:
            _pulled(plan, j, weights * found[1 + j], sample, adjoint, 0)
            _pulled(plan, j, -weights * slopes[j], sample, adjoint, n_bent)
            if plan.order == 2:
                bend = -0.5 * weights * numbers[plan.coefficients + 1 + j]
                _pulled(plan, j, bend, sample, adjoint, 2 * n_bent)
        else:
            _pulled(plan, j, weights * (found[1 + j] - slopes[j]), sample, affine, 0)
    gradient[:] = 0.0
    _bent_values(plan, functions, theta, centre, adjoint, gradient)
    add_rows(plan.jacobian, 0, affine, gradient)
    return value


@compiled(error_model="numpy")
def compact_total(
    plan: Plan,
    functions: ndarray,
    records: ndarray,
    index: ndarray,
    room: Sample,
    theta: ndarray,
    gradient: ndarray,
) -> float:
    """Log-likelihood of some records; its gradient is written."""
    n_seen = plan.door.shape[0]
    values = np.empty(plan.origin.shape[0])
    products(plan.jacobian, 0, theta, values)
    values += plan.origin
    adjoint = np.zeros(3 * plan.n_bent)
    bent = _bent_values(plan, functions, theta, theta, adjoint, gradient)
    affine, value = np.zeros(values.shape[0]), 0.0
    for first in range(0, index.shape[0], BLOCK):
        here = index[first : first + BLOCK]
        m = here.shape[0]
        gather(records, here, room, 0)
        sample = (room[0][:m], np.ascontiguousarray(room[1][:, :m]))
        eta, found = np.empty((n_seen, m)), np.empty((n_seen + 1, m))
        for j in range(n_seen):
            _seen(plan, j, bent if plan.bent[j] else values, 0, sample, eta[j])
        call_address(functions[0], (eta, sample[1], found))
        value += found[0].sum()
        for j in range(n_seen):
            _pulled(plan, j, found[1 + j], sample, adjoint if plan.bent[j] else affine, 0)
    gradient[:] = 0.0
    _bent_values(plan, functions, theta, theta, adjoint, gradient)
    add_rows(plan.jacobian, 0, affine, gradient)
    return value
