"""Records that see theta through one linear predictor, with a concave term.

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

from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import ParameterVector, RowGraph
from pymc_dp.rows.functions import jacobian_of
from pymc_dp.rows.predictor import FAMILIES, Predictor, has_kinks, predictor_of
from pymc_dp.subsampling.estimates import concave, packed
from pymc_dp.subsampling.reading import columns_of

_LARGEST = 2**29  # numbers of a dense design that may be kept: 4 GB
_BLOCK = 2**14  # rows that are evaluated at once


def linear_rows(
    graph: RowGraph, parameters: ParameterVector, data: Sequence[ndarray]
) -> LinearRows | None:
    """Records as rows of one linear predictor, or None; `data` is ordered as ``graph.leaves``."""
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
    """Records of a linear predictor: place in `FAMILIES`, offset (n,), design (n, d), a, b."""

    def __init__(
        self, family: int, offset: ndarray, design: ndarray, a: ndarray, b: ndarray
    ) -> None:
        self.family = family
        self.offset, self.design, self.a, self.b = offset, design, a, b
        self.n, self.d = design.shape

    def total(self, theta: ndarray, rows: ndarray | None = None) -> tuple[float, ndarray]:
        """Log-likelihood of all records, or of some, up to a constant, and its (d,) gradient."""
        offset, design, a, b = self._parts(rows)
        v = offset + design @ theta
        value, slope, _ = self._curved(v, b)
        return float(a @ v + value.sum()), (a + slope) @ design

    def hessian(self, theta: ndarray, rows: ndarray | None = None) -> ndarray:
        """(d, d) sum of the Hessians of all records, or of some of them."""
        offset, design, _, b = self._parts(rows)
        weights = self._curved(offset + design @ theta, b)[2]
        found = np.zeros((self.d, self.d))
        for start in range(0, len(weights), _BLOCK):  # no second copy of the design
            part = design[start : start + _BLOCK]
            found += (part * weights[start : start + _BLOCK, None]).T @ part
        return found

    def _parts(self, rows: ndarray | None) -> tuple[ndarray, ...]:
        parts = self.offset, self.design, self.a, self.b
        return parts if rows is None else tuple(x[rows] for x in parts)

    def _curved(self, v: ndarray, b: ndarray) -> tuple[ndarray, ndarray, ndarray]:
        """-b K(v) and its first and second derivative."""
        value, slope = np.empty_like(v), np.empty_like(v)
        concave(self.family, b, v, value, slope)
        if FAMILIES[self.family] == "normal":
            return value, slope, -b
        if FAMILIES[self.family] == "log":
            return value, slope, slope
        return value, slope, slope * (1.0 + np.divide(slope, b, out=np.zeros_like(v), where=b > 0))

    def remainders(self, centre: ndarray, order: int) -> tuple[ndarray, int]:
        """What an estimate reads of every record, and the width of its design.

        The other numbers are v and -b K at the centre, b, and the coefficients of t and t^2/2.
        """
        v = self.offset + self.design @ centre
        value, slope, bent = self._curved(v, self.b)
        linear = -slope if order >= 1 else self.a
        return packed([self.design, v, value, self.b, linear, -bent * (order == 2)]), self.d
