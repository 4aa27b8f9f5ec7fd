"""Records of any likelihood: compiled from the graph of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace

from pymc_dp.ecs.columns import columns_of
from pymc_dp.ecs.variates import SharedValues, remainder
from pymc_dp.rows.ancestry import ancestors_without_shapes
from pymc_dp.rows.cuts import RowGraph
from pymc_dp.rows.functions import ParameterVector, compile_function, prepared_loglik

__all__ = ["GeneralRows", "KernelGraph", "jit"]

#: Rows that are evaluated at once, so that what is between stays in a cache.
_BLOCK = 4096

KernelGraph = tuple[list[Variable], list[Variable]]


def jit(graph: KernelGraph) -> Any:
    """A function that other compiled functions can call, from the inputs and outputs of a graph."""
    return compile_function(*graph).vm.jit_fn


class GeneralRows:
    """The records of a model, each a function of what it sees of theta.

    Parameters
    ----------
    graph : RowGraph
    parameters : ParameterVector
    data : sequence of ndarray
        In the order of ``graph.leaves``, records first.
    """

    def __init__(
        self, graph: RowGraph, parameters: ParameterVector, data: Sequence[np.ndarray]
    ) -> None:
        self.graph = graph
        self.parameters = parameters
        self._loglik = prepared_loglik(graph)
        self._place_columns(data)
        used = ancestors_without_shapes([self._loglik])
        for leaf, array in zip(graph.leaves, data, strict=True):
            if leaf.block in used:
                self.inputs.append(leaf.block)
                self.arrays.append(np.ascontiguousarray(array))
        self.n = graph.n_rows
        self.d = parameters.size
        self._shared = SharedValues.of(graph.cuts, parameters)
        self._total: Any = None
        self._product: Any = None

    def _place_columns(self, data: Sequence[np.ndarray]) -> None:
        """Inputs for the designs and labels."""
        columns = columns_of(self.graph, data)
        self._input_of = {
            expression: pt.TensorType(str(array.dtype), (None, *expression.type.shape[1:]))()
            for expression, array in columns.items()
        }
        self.inputs: list[Variable] = list(self._input_of.values())
        self.arrays: list[np.ndarray] = list(columns.values())

    # -- the whole log-likelihood ---------------------------------------------------------------

    def _seen(self, values: Sequence[Variable]) -> list[Variable]:
        """What a block of rows sees of shared values, per cut."""
        n_block = self.inputs[0].shape[0]
        found = []
        for cut, phi in zip(self.graph.cuts, values, strict=True):
            if cut.kind == "dot":
                eta = pt.dot(self._input_of[cut.row_data], phi)
            elif cut.kind == "index":
                eta = phi[self._input_of[cut.row_data]]
            else:
                eta = pt.alloc(phi, n_block, *phi.shape)
            found.append(eta.astype(cut.eta.type.dtype))
        return found

    def _sum(self) -> Variable:
        etas = dict(zip(self._etas(), self._seen(self._shared.value), strict=True))
        [rows] = clone_replace([self._loglik], etas, rebuild_strict=False)
        return rows.sum()

    def _etas(self) -> list[Variable]:
        return [cut.eta for cut in self.graph.cuts]

    def total(self, theta: np.ndarray, rows: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """Log-likelihood of all records, or of some of them, and its (d,) gradient."""
        if self._total is None:
            value, wrt = self._sum(), self.parameters.theta
            slope = pytensor.grad(value, wrt, disconnected_inputs="ignore")
            self._total = compile_function([wrt, *self.inputs], [value, slope])
        value, gradient = 0.0, np.zeros(self.d)
        for block in self._blocks(rows):
            part, slope = self._total(theta, *block)
            value += float(part)
            gradient += slope
        return value, gradient

    def hessian(self, theta: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """(d, d) sum of the Hessians of all records, or of some of them, column by column."""
        if self._product is None:
            wrt, direction = self.parameters.theta, self._shared.direction
            slope = pytensor.grad(self._sum(), wrt, disconnected_inputs="ignore")
            product = pytensor.grad((slope * direction).sum(), wrt, disconnected_inputs="ignore")
            self._product = compile_function([wrt, direction, *self.inputs], product)
        found, units = np.zeros((self.d, self.d)), np.eye(self.d)
        for block in self._blocks(rows):
            for j in range(self.d):
                found[j] += self._product(theta, units[j], *block)
        return (found + found.T) / 2.0

    def _blocks(self, rows: np.ndarray | None) -> Iterator[list[np.ndarray]]:
        arrays = self.arrays if rows is None else [x[rows] for x in self.arrays]
        for start in range(0, len(arrays[0]), _BLOCK):
            yield [x[start : start + _BLOCK] for x in arrays]

    # -- what a sample estimates ----------------------------------------------------------------

    def remainders(
        self, centre: np.ndarray, order: int, estimator: str
    ) -> tuple[KernelGraph, tuple[np.ndarray, ...]]:
        """The estimate from a sample of records, and what it reads of every record.

        Parameters
        ----------
        centre : (d,) ndarray
        order : {0, 1, 2}
            Of the control variates.
        estimator : {"perturbed", "signed", "mean"}

        Returns
        -------
        kernel : (inputs, outputs)
            From theta, centre, scale, shift, size of a mini-batch and the rows of the sample, to
            the (1,) estimate, the (rows,) d_k, and the (d,) gradient of the estimate by theta.
        rows : tuple of ndarray
            Records first.
        """
        shared, cuts = self._shared, self.graph.cuts
        data = [x for x in self.inputs if x not in self._input_of.values()]
        found = remainder(self._loglik, cuts, data, shared.affine, order)
        theta = self.parameters.theta
        delta = {shared.direction: theta - shared.centre}
        firsts = clone_replace(shared.first, delta, rebuild_strict=False)
        seconds = clone_replace(shared.second, delta, rebuild_strict=False)
        stars = dict(zip(found.stars, self._seen(shared.at_centre), strict=True))
        seen = dict(zip(found.etas, self._seen(shared.value), strict=True))
        seen |= dict(zip(found.firsts, self._seen(firsts), strict=True))
        seen |= dict(zip(found.seconds, self._seen(seconds), strict=True))
        # what a linear predictor is at the centre is stored; other shared values are at hand
        stored, columns = list(found.stored), list(found.columns)
        used = ancestors_without_shapes([found.value])
        for cut, star in zip(cuts, found.stars, strict=True):
            if cut.kind == "dot" and star in used:
                stored.append(star)
                columns.append(star)
            else:
                seen[star] = stars[star]
        [d] = clone_replace([found.value], seen, rebuild_strict=False)
        scale, shift = pt.dscalar("scale"), pt.dscalar("shift")
        batch = pt.lscalar("batch")
        value = _estimate(d, scale, shift, batch, estimator)
        gradient = pytensor.grad(value, theta, disconnected_inputs="ignore")
        read = ancestors_without_shapes([value, gradient])
        kept = [k for k, x in enumerate(self.inputs) if x in read or k == 0]
        rows = [self.inputs[k] for k in kept] + stored
        arrays = [self.arrays[k] for k in kept] + self._stored(columns, stars, centre)
        inputs = [theta, shared.centre, scale, shift, batch, *rows]
        return (inputs, [value.reshape((1,)), d, gradient]), tuple(arrays)

    def _stored(
        self, columns: list[Variable], stars: dict[Variable, Variable], centre: np.ndarray
    ) -> list[np.ndarray]:
        if not columns:
            return []
        values = clone_replace(columns, stars, rebuild_strict=False)
        function = compile_function([self._shared.centre, *self.inputs], values)
        parts = [function(centre, *block) for block in self._blocks(None)]
        return [np.concatenate(part) for part in zip(*parts, strict=True)]


def _estimate(d: Variable, scale: Variable, shift: Variable, batch: Variable, how: str) -> Variable:
    """What a sample says of the sum of d_k, on the scale of the log-likelihood."""
    if how == "signed":  # eq. 5.1, but for its constants
        return pt.log(pt.abs(scale * d.reshape((-1, batch)).sum(axis=1) - shift)).sum()
    if how == "mean":
        return scale * d.sum()
    # eq. 4.5
    return scale * d.sum() - 0.5 * scale**2 * ((d - d.mean()) ** 2).sum()
