"""Records that see theta through one linear predictor, with a concave term: loops of our own.

l_k(v) = a_k v - b_k K(v) with v = v0_k + w_k . theta: Bernoulli and binomial with a logit link,
Poisson and the like with a log link, normal with a known scale (:mod:`pymc_dp.rows.predictor`).
With t the way of v from the centre, control variates of order 1 or 2 leave

    d_k = -b_k (K(v* + t) - K(v*) - K'(v*) t - [order 2] K''(v*) t^2 / 2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytensor
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import ParameterVector, RowGraph
from pymc_dp.rows import linear
from pymc_dp.rows.functions import jacobian_of
from pymc_dp.rows.predictor import FAMILIES, Predictor, has_kinks, predictor_of
from pymc_dp.subsampling.columns import columns_of
from pymc_dp.subsampling.gather import Sample, packed
from pymc_dp.subsampling.weights import weigh

_LOGIT, _LOG = FAMILIES.index("logit"), FAMILIES.index("log")
#: Numbers of a dense design that may be kept: 4 GB.
_LARGEST = 2**29
#: Rows that are evaluated at once.
_BLOCK = 2**14
#: Flags that let sums be reordered, and keep numbers that are not finite.
_REORDERED = {"reassoc", "contract", "nsz"}


def linear_rows(
    graph: RowGraph, parameters: ParameterVector, data: Sequence[ndarray]
) -> LinearRows | None:
    """The records as rows of one linear predictor; None if they are not.

    `data` is in the order of ``graph.leaves``, records first.
    """
    theta = parameters.theta
    phis = parameters.substitute([cut.phi for cut in graph.cuts])
    if graph.n_rows * parameters.size > _LARGEST:
        return None
    if not all(phi.type.dtype.startswith("float") for phi in phis):
        return None
    jacobians = [jacobian_of(phi, theta) for phi in phis]
    linear = theta not in ancestors_without_shapes(jacobians) and not has_kinks(phis, theta)
    predictor, _ = predictor_of(graph, graph.cuts, linear, {"mode": INTERPRETED})
    if predictor is None or predictor.family == "probit":
        return None
    evaluate = pytensor.function(
        [theta], [*phis, *jacobians], mode=INTERPRETED, on_unused_input="ignore"
    )
    found = [np.asarray(x, dtype="float64") for x in evaluate(np.zeros(parameters.size))]
    k = len(phis)
    offset, design = _assembled(graph, data, predictor, found[:k], found[k:])
    a, b = predictor.coefficients(data)
    if not _all_counted(predictor, data, a, b):
        return None
    return LinearRows(FAMILIES.index(predictor.family), offset, design, a, b)


def _all_counted(predictor: Predictor, data: Sequence[ndarray], a: ndarray, b: ndarray) -> bool:
    """Whether rows without coefficients have no slope, and were not left out (negative weights)."""
    without = (a == 0.0) & (b == 0.0)
    leaves = [np.ascontiguousarray(data[k])[without] for k in predictor.leaves]
    slopes = [predictor.slope(np.full(without.sum(), v), *leaves) for v in (0.0, 1.0)]
    return all(bool((np.asarray(slope) == 0.0).all()) for slope in slopes)


def _assembled(
    graph: RowGraph,
    data: Sequence[ndarray],
    predictor: Predictor,
    phis: list[ndarray],
    jacobians: list[ndarray],
) -> tuple[ndarray, ndarray]:
    """(n,) v at theta = 0, and (n, d) its derivatives."""
    columns = columns_of(graph, data)
    offset, weights = predictor.affine_form(data)
    offset = np.array(offset)
    design = np.zeros((graph.n_rows, jacobians[0].shape[1]))
    for cut, by_eta, phi, jacobian in zip(graph.cuts, weights, phis, jacobians, strict=True):
        width = len(by_eta)
        flat = phi.reshape(-1, width)
        for k, weight in enumerate(by_eta):
            part, value = jacobian[k::width], flat[:, k]
            if cut.kind == "dot":
                value, part = columns[cut.row_data] @ value, columns[cut.row_data] @ part
            elif cut.kind == "index":
                value, part = value[columns[cut.row_data]], part[columns[cut.row_data]]
            offset += weight * value
            design += weight[:, None] * part
    return offset, design


class LinearRows:
    """The records of a linear predictor.

    `family` is a place in :data:`pymc_dp.rows.predictor.FAMILIES`. Shapes: offset (n,),
    design (n, d), a and b (n,).
    """

    def __init__(
        self, family: int, offset: ndarray, design: ndarray, a: ndarray, b: ndarray
    ) -> None:
        self.family = family
        self.offset, self.design, self.a, self.b = offset, design, a, b
        self.n, self.d = design.shape

    def _parts(self, rows: ndarray | None) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        if rows is None:
            return self.offset, self.design, self.a, self.b
        return self.offset[rows], self.design[rows], self.a[rows], self.b[rows]

    def total(self, theta: ndarray, rows: ndarray | None = None) -> tuple[float, ndarray]:
        """Log-likelihood of all records, or of some, up to a constant, and its (d,) gradient."""
        offset, design, a, b = self._parts(rows)
        v = offset + design @ theta
        k, k1, _ = _kernel(self.family, v)
        return float(a @ v - b @ k), (a - b * k1) @ design

    def hessian(self, theta: ndarray, rows: ndarray | None = None) -> ndarray:
        """(d, d) sum of the Hessians of all records, or of some of them."""
        offset, design, _, b = self._parts(rows)
        weights = b * _kernel(self.family, offset + design @ theta)[2]
        found = np.zeros((self.d, self.d))
        for start in range(0, len(weights), _BLOCK):  # no second copy of the design
            part = design[start : start + _BLOCK]
            found -= (part * weights[start : start + _BLOCK, None]).T @ part
        return found

    def remainders(self, centre: ndarray, order: int) -> tuple[ndarray, int]:
        """What an estimate reads of every record, and the width of its design.

        The other numbers are v and K at the centre, b, and the coefficients of t and t^2/2.
        """
        v = self.offset + self.design @ centre
        k, k1, k2 = _kernel(self.family, v)
        linear = self.b * k1 if order >= 1 else self.a
        bent = self.b * k2 * float(order == 2)
        return packed([self.design, v, k, self.b, linear, bent]), self.d


@compiled(error_model="numpy", inline="always")
def _logit(v: float) -> tuple[float, float]:
    """K(v) and K'(v), without branches."""
    tail = linear.exp(-abs(v))
    inverse = 1.0 / (1.0 + tail)
    return max(v, 0.0) + linear.log1p(tail), inverse if v >= 0.0 else tail * inverse


@compiled(error_model="numpy")
def _kernel(family: int, v: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """K, K' and K'' at all v."""
    value, slope, bent = np.empty_like(v), np.empty_like(v), np.empty_like(v)
    for i in range(v.shape[0]):
        if family == _LOGIT:
            value[i], slope[i] = _logit(v[i])
            bent[i] = slope[i] * (1.0 - slope[i])
        elif family == _LOG:
            value[i] = slope[i] = bent[i] = linear.exp(v[i])
        else:
            value[i], slope[i], bent[i] = 0.5 * v[i] * v[i], v[i], 1.0
    return value, slope, bent


@compiled(error_model="numpy", fastmath=_REORDERED)
def products(design: ndarray, first: int, delta: ndarray, out: ndarray) -> None:
    """Product of the columns of a design from `first` on with `delta`, per row."""
    for i in range(design.shape[0]):
        # a view, since sums of indices hinder vector instructions
        x, total = design[i][first : first + delta.shape[0]], 0.0
        for j in range(delta.shape[0]):
            total += x[j] * delta[j]
        out[i] = total


@compiled(error_model="numpy", fastmath=_REORDERED)
def add_rows(design: ndarray, first: int, weights: ndarray, out: ndarray) -> None:
    """Add the sum of the rows of these columns, weighted."""
    for i in range(design.shape[0]):
        x, w = design[i][first : first + out.shape[0]], weights[i]
        for j in range(out.shape[0]):
            out[j] += w * x[j]


@compiled(error_model="numpy")
def _values(family: int, v: ndarray, t: ndarray, value: ndarray, slope: ndarray) -> None:
    """K and K' at v + t.

    A loop for each family, over few arrays, so that it uses vector instructions.
    """
    if family == _LOGIT:
        for i in range(t.shape[0]):
            value[i], slope[i] = _logit(v[i] + t[i])
    elif family == _LOG:
        for i in range(t.shape[0]):
            value[i] = linear.exp(v[i] + t[i])
            slope[i] = value[i]
    else:
        for i in range(t.shape[0]):
            slope[i] = v[i] + t[i]
            value[i] = 0.5 * slope[i] * slope[i]


@compiled(error_model="numpy")
def _remainders(family: int, numbers: ndarray, t: ndarray, d: ndarray, slope: ndarray) -> None:
    """d_k from the ways t of v, and the derivatives of d_k by v."""
    v, k, b, linear, bent = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    _values(family, v, t, d, slope)
    for i in range(t.shape[0]):
        way = t[i]
        d[i] = way * (linear[i] + 0.5 * bent[i] * way) - b[i] * (d[i] - k[i])
        slope[i] = linear[i] + bent[i] * way - b[i] * slope[i]


@compiled(error_model="numpy")
def linear_estimate(
    family: int,
    sample: Sample,
    delta: ndarray,
    scale: float,
    shift: float,
    batch: int,
    d: ndarray,
    gradient: ndarray,
) -> float:
    """The estimate from a sample of records; d_k (m,) and the gradient (d,) are written.

    `sample` holds (m, d) and (5, m) arrays of the rows from :meth:`LinearRows.remainders`. `delta`
    is theta - centre. Scale, shift and batch are as in :mod:`pymc_dp.subsampling.estimates`.
    """
    design, numbers = sample
    m = design.shape[0]
    ways, slopes, weights = np.empty(m), np.empty(m), np.empty(m)
    products(design, 0, delta, ways)
    _remainders(family, numbers, ways, d, slopes)
    value = weigh(d, scale, shift, batch, weights)
    weights *= slopes
    gradient[:] = 0.0
    add_rows(design, 0, weights, gradient)
    return value
