"""Records that see many numbers of theta: the whole estimate is compiled from the graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace

from pymc_dp.errors import NotFactorizable
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import Cut, ParameterVector, RowGraph
from pymc_dp.rows.functions import compile_function, prepared_loglik
from pymc_dp.subsampling.columns import columns_of
from pymc_dp.subsampling.compiling import Kernel, KernelGraph, callable_kernel
from pymc_dp.subsampling.gather import packed
from pymc_dp.subsampling.variates import FEW, SharedValues, entries, numbers_seen, remainder

#: For functions called once for every row, one array operation after the other.
_ONCE = Mode(linker="py", optimizer="fast_run").excluding("fusion")
#: Rows that are evaluated at once, so that what is between stays in a cache.
_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class WholeGraph:
    """The estimate of a sample, before it is compiled, and numbers that it reads."""

    graph: KernelGraph
    constants: np.ndarray

    def compiled(self) -> Kernel:
        """The kernel of an estimate."""
        return Kernel(self.constants, [callable_kernel(self.graph)])


class GeneralRows:
    """The records of a model, each a function of what it sees of theta.

    `data` is in the order of ``graph.leaves``, records first.
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
        real = [cut for cut in graph.cuts if cut.phi.type.dtype.startswith("float")]
        self._others = [cut for cut in graph.cuts if cut not in real]
        self._cuts = real
        self._shared = SharedValues.of(real, parameters)
        self._other_values = parameters.substitute([cut.phi for cut in self._others])
        self._derivatives: Callable[..., Any] | None = None

    def _place_columns(self, data: Sequence[np.ndarray]) -> None:
        columns = columns_of(self.graph, data)
        self._input_of = {
            expression: pt.TensorType(str(array.dtype), (None, *expression.type.shape[1:]))()
            for expression, array in columns.items()
        }
        self.inputs: list[Variable] = list(self._input_of.values())
        self.arrays: list[np.ndarray] = list(columns.values())

    # -- the whole log-likelihood ---------------------------------------------------------------

    def _seen(self, cuts: Sequence[Cut], values: Sequence[Variable]) -> list[Variable]:
        """What a block of rows sees of shared values, per cut."""
        n_block = self.inputs[0].shape[0]
        found = []
        for cut, phi in zip(cuts, values, strict=True):
            if cut.kind == "dot":
                eta = pt.dot(self._input_of[cut.row_data], phi)
            elif cut.kind == "index":
                eta = phi[self._input_of[cut.row_data]]
            else:
                eta = pt.alloc(phi, n_block, *phi.shape)
            found.append(eta.astype(cut.eta.type.dtype))
        return found

    def _sum(self) -> Variable:
        cuts, values = [*self._cuts, *self._others], [*self._shared.value, *self._other_values]
        etas = dict(zip([cut.eta for cut in cuts], self._seen(cuts, values), strict=True))
        [rows] = clone_replace([self._loglik], etas, rebuild_strict=False)
        return rows.sum()

    def total(self, theta: np.ndarray, rows: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """Log-likelihood of all records, or of some of them, and its (d,) gradient."""
        value, gradient, _ = self._sums(theta, rows, second=False)
        return value, gradient

    def hessian(self, theta: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """(d, d) sum of the Hessians of all records, or of some of them."""
        found = self._sums(theta, rows, second=True)[2]
        return (found + found.T) / 2.0

    def _sums(
        self, theta: np.ndarray, rows: np.ndarray | None, *, second: bool
    ) -> tuple[float, np.ndarray, np.ndarray]:
        value, gradient, hessian = 0.0, np.zeros(self.d), np.zeros((self.d, self.d))
        if self._derivatives is None:
            self._derivatives = self._compile_sums()
        for block in self._blocks(rows):
            part, slope, bent = self._derivatives(theta, block, second)
            value += part
            gradient += slope
            hessian += bent
        return value, gradient, hessian

    def _compile_sums(self) -> Callable[..., tuple[float, np.ndarray, np.ndarray]]:
        """Log-likelihood, gradient and Hessian of a block of rows."""
        shared = self._shared
        wrt, value = self.parameters.theta, self._sum()
        slope = pytensor.grad(value, wrt, disconnected_inputs="ignore")
        product = pytensor.grad((slope * shared.direction).sum(), wrt, disconnected_inputs="ignore")
        total = compile_function([wrt, *self.inputs], [value, slope])
        along = compile_function([wrt, shared.direction, *self.inputs], product)

        def by_parameters(theta: np.ndarray, block: list[np.ndarray], second: bool) -> Any:
            units = np.eye(len(theta) if second else 0)
            bent = np.array([along(theta, unit, *block) for unit in units])
            part, gradient = total(theta, *block)
            return float(part), gradient, bent if second else 0.0

        return by_parameters

    def _blocks(self, rows: np.ndarray | None) -> Iterator[list[np.ndarray]]:
        arrays = self.arrays if rows is None else [x[rows] for x in self.arrays]
        for start in range(0, len(arrays[0]), _BLOCK):
            yield [x[start : start + _BLOCK] for x in arrays]

    # -- what a sample estimates ----------------------------------------------------------------

    def remainders(
        self, centre: np.ndarray, order: int, estimator: str
    ) -> tuple[WholeGraph, np.ndarray, int]:
        """The estimate from a sample of records, and what it reads of every record.

        `order` is that of the control variates; `estimator` is "perturbed", "signed" or "mean".

        Returns the kernel, the rows (n, k), and the width of the designs, which come first in the
        rows. From theta, centre, (scale, shift, size of a mini-batch, constants) and a sample, the
        kernel gives the (1,) estimate, the (rows,) d_k, and the (d,) gradient of the estimate by
        theta.
        """
        shared, cuts = self._shared, self._cuts
        data = [x for x in self.inputs if x not in self._input_of.values()]
        if self._others and numbers_seen([cut.eta for cut in cuts]) > FEW:
            names = ", ".join(f"`{name}`" for name in self.graph.names)
            raise NotFactorizable(
                f"{names}: records see more than {FEW} numbers of parameters, and a condition on "
                "them, which an expansion cannot follow. Write it without the condition, or use "
                "NUTS."
            )
        found = remainder(self._loglik, cuts, data, shared.affine, order)
        theta = self.parameters.theta
        along = shared.along(theta, range(len(cuts)), order)
        firsts, seconds = along.firsts, along.seconds
        stars = dict(zip(found.stars, self._seen(cuts, shared.at_centre), strict=True))
        seen = dict(zip(found.etas, self._seen(cuts, shared.value), strict=True))
        seen |= dict(zip(found.firsts, self._seen(cuts, firsts), strict=True))
        seen |= dict(zip(found.seconds, self._seen(cuts, seconds), strict=True))
        # others, of conditions for example: those at theta here, those at the centre in columns
        others = [cut.eta for cut in self._others]
        seen |= dict(zip(others, self._seen(self._others, self._other_values), strict=True))
        at_centre = clone_replace(self._other_values, {theta: shared.centre})
        stars |= dict(zip(others, self._seen(self._others, at_centre), strict=True))
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
        numbers = pt.dvector("numbers")
        value = _estimate(d, numbers, estimator)
        gradient = pytensor.grad(value, theta, disconnected_inputs="ignore")
        read = ancestors_without_shapes([value, gradient])
        designs = {cut.row_data for cut in self.graph.cuts if cut.kind == "dot"}
        designs = {self._input_of[expression] for expression in designs}
        held = dict(zip(self.inputs, self.arrays, strict=True))
        first = {v: x for v, x in held.items() if v in read and v in designs}
        other = {v: x for v, x in held.items() if v in read and v not in designs}
        other |= dict(zip(stored, self._stored(columns, stars, centre), strict=True))
        inputs, design, others = {}, pt.dmatrix("design"), pt.dmatrix("others")
        width = 0
        for v, x in first.items():
            inputs[v] = design[:, width : width + x.shape[1]]
            width += x.shape[1]
        place = 0
        for v, x in other.items():
            inputs[v] = entries(others, place, x.shape[1:], v.type.dtype)
            place += math.prod(x.shape[1:])
        for v in self.inputs:  # of others the shape alone may be read
            inputs.setdefault(v, pt.zeros((design.shape[0], *v.type.shape[1:]), v.type.dtype))
        inputs[along.constants] = numbers[3:]
        outputs = clone_replace([value.reshape((1,)), d, gradient], inputs, rebuild_strict=False)
        rows = packed([*first.values(), *other.values()])
        graph = ([theta, shared.centre, numbers, design, others], outputs)
        return WholeGraph(graph, along.at(centre)), rows, width

    def _stored(
        self, columns: list[Variable], stars: dict[Variable, Variable], centre: np.ndarray
    ) -> list[np.ndarray]:
        """What is stored of every record: functions of the data and of the centre."""
        if not columns:
            return []
        values = clone_replace(columns, stars, rebuild_strict=False)
        inputs = [self._shared.centre, *self.inputs]
        function = pytensor.function(inputs, values, mode=_ONCE, on_unused_input="ignore")
        blocks = [function(centre, *block) for block in self._blocks(None)]
        return [np.concatenate(part) for part in zip(*blocks, strict=True)]


def _estimate(d: Variable, numbers: Variable, how: str) -> Variable:
    """What a sample says of the sum of d_k, on the scale of the log-likelihood."""
    scale, shift = numbers[0], numbers[1]
    if how == "signed":  # eq. 5.1, but for its constants
        batch = numbers[2].astype("int64")
        sums = d.reshape((d.shape[0] // batch, batch)).sum(axis=1)
        return pt.log(pt.abs(scale * sums - shift)).sum()
    if how == "mean":
        return scale * d.sum()
    # eq. 4.5
    return scale * d.sum() - 0.5 * scale**2 * ((d - d.mean()) ** 2).sum()
