"""Log-likelihood, gradient and Hessian of all records that see few numbers.

The first and second derivatives of a record by the numbers eta that it sees are compiled once;
those by theta follow by products with d eta / d theta, whatever the dimension of theta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable

from pymc_dp.ecs.variates import coefficients
from pymc_dp.rows.cuts import Cut
from pymc_dp.rows.functions import ParameterVector, compile_function, jacobian_of

__all__ = ["RowDerivatives"]

_INTERPRETED = Mode(linker="py", optimizer="fast_run").excluding("fusion")


class RowDerivatives:
    """Sums over records, and what is stored of each.

    Parameters
    ----------
    loglik : Variable
        (rows,) log-likelihood.
    cuts : sequence of Cut
        Those with real shared values first.
    values : list of Variable
        Shared value of each cut, of the parameters.
    affine : list of bool
        Per cut with real values, whether these are affine in the parameters.
    parameters : ParameterVector
    data : list of Variable
        Row data that `loglik` reads.
    """

    def __init__(
        self,
        loglik: Variable,
        cuts: Sequence[Cut],
        values: list[Variable],
        affine: list[bool],
        parameters: ParameterVector,
        data: list[Variable],
    ) -> None:
        self.cuts = cuts
        etas = [cut.eta for cut in cuts]
        self._real = n_real = len(affine)
        matrix = coefficients(loglik, etas[:n_real], 2)
        self._function = compile_function([*etas, *data], matrix)
        theta = parameters.theta
        self._maps = _interpreted([theta], [jacobian_of(v, theta) for v in values[:n_real]])
        self._values = _interpreted([theta], values)
        self._bent = [k for k, flat in enumerate(affine) if not flat]
        if self._bent:
            weights = [pt.TensorType("float64", values[k].type.shape)() for k in self._bent]
            weighted = sum(
                ((values[k] * w).sum() for k, w in zip(self._bent, weights, strict=True)),
                start=0.0,
            )
            slope = pytensor.grad(weighted, theta, disconnected_inputs="ignore")
            self._curved = _interpreted([theta, *weights], [jacobian_of(slope, theta)])

    def width(self, order: int) -> int:
        """Columns of :meth:`at` that control variates of an order need."""
        k = sum(int(np.prod(cut.eta.type.shape[1:], dtype=int)) for cut in self.cuts[: self._real])
        return (1, 1 + k, 1 + k + k * (k + 1) // 2)[order]

    def at(
        self, theta: np.ndarray, columns: Sequence[Any], data: Sequence[np.ndarray]
    ) -> np.ndarray:
        """(rows, k) value, first and second derivatives by eta of a block of rows."""
        values = self._values(theta)
        etas = []
        for cut, phi, column in zip(self.cuts, values, columns, strict=True):
            if cut.kind == "dot":
                eta = column @ phi
            elif cut.kind == "index":
                eta = phi[column]
            else:
                eta = np.broadcast_to(phi, (_rows(columns, data), *phi.shape))
            etas.append(np.ascontiguousarray(eta, dtype=cut.eta.type.dtype))
        return np.asarray(self._function(*etas, *data))

    def sums(
        self,
        theta: np.ndarray,
        columns: Sequence[Any],
        data: Sequence[np.ndarray],
        *,
        second: bool,
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """Log-likelihood, (d,) gradient and, if asked for, (d, d) Hessian of a block of rows."""
        found = self.at(theta, columns, data)
        maps = [np.asarray(m, dtype="float64") for m in self._maps(theta)]
        d = len(theta)
        directions: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        # other values, of conditions for example, have no derivatives
        for cut, column, matrix in zip(self.cuts, columns, maps, strict=False):
            width = int(np.prod(cut.eta.type.shape[1:], dtype=int))
            sums = np.zeros(len(matrix))
            for k in range(width):
                slope = found[:, 1 + len(directions)]
                part = matrix[k::width]
                if cut.kind == "dot":
                    directions.append(column @ part)
                    sums[k::width] = slope @ column
                elif cut.kind == "index":
                    directions.append(part[column])
                    np.add.at(sums[k::width], column, slope)
                else:
                    directions.append(np.broadcast_to(part, (len(found), d)))
                    sums[k::width] = slope.sum()
            weights.append(sums)
        gradient = np.asarray(sum(w @ m for w, m in zip(weights, maps, strict=True)))
        hessian = np.zeros((d, d))
        if second:
            place = 1 + len(directions)
            for k, u in enumerate(directions):
                for j, v in enumerate(directions[k:], start=k):
                    product = u.T @ (found[:, place, None] * v)
                    hessian += product if j == k else product + product.T
                    place += 1
            if self._bent:
                shapes = [self.cuts[k].phi.type.shape for k in self._bent]
                by_value = [
                    weights[k].reshape(shape) for k, shape in zip(self._bent, shapes, strict=True)
                ]
                hessian += self._curved(theta, *by_value)[0]
        return float(found[:, 0].sum()), gradient, hessian


def _interpreted(inputs: list[Variable], outputs: list[Variable]) -> Any:
    """Functions of the parameters alone, called a few times."""
    return pytensor.function(inputs, outputs, mode=_INTERPRETED, on_unused_input="ignore")


def _rows(columns: Sequence[Any], data: Sequence[np.ndarray]) -> int:
    return len(next(x for x in (*columns, *data) if x is not None))
