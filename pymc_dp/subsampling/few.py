"""Records that see few numbers of theta: their functions from the graph of the model."""

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

from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import ParameterVector, RowGraph
from pymc_dp.rows.functions import compile_function, jacobian_of, prepared_loglik
from pymc_dp.rows.simplify import hoisted
from pymc_dp.subsampling.columns import columns_of
from pymc_dp.subsampling.compact import BLOCK, COPY, DOT, INDEX, Plan, compact_total
from pymc_dp.subsampling.compiling import Kernel, KernelGraph, callable_rows, callable_shared
from pymc_dp.subsampling.gather import empty_sample, packed
from pymc_dp.subsampling.variates import FEW, SharedValues, by_row, entries, numbers_seen

#: For functions called once for every block, one array operation after the other.
_ONCE = Mode(linker="py", optimizer="fast_run").excluding("fusion")
#: Rows whose curvatures are summed at once.
_ROWS = 2**13
_DOORS = {"copy": COPY, "dot": DOT, "index": INDEX}


@dataclass(frozen=True, eq=False)
class CompactGraph:
    """What :mod:`pymc_dp.subsampling.compact` calls, before it is compiled."""

    rows: KernelGraph
    shared: KernelGraph | None
    plan: Plan

    def compiled(self) -> Kernel:
        """The kernel of an estimate."""
        functions = [callable_rows(self.rows)]
        if self.shared is not None:
            functions.append(callable_shared(self.shared))
        return Kernel(self.plan, functions)


def few_numbers(
    graph: RowGraph, parameters: ParameterVector, data: Sequence[np.ndarray], order: int
) -> FewNumbers | None:
    """The records as rows that see few real numbers; None if they do not."""
    real = all(cut.phi.type.dtype.startswith("float") for cut in graph.cuts)
    if not real or numbers_seen([cut.eta for cut in graph.cuts]) > FEW:
        return None
    return FewNumbers(graph, parameters, data, order)


class FewNumbers:
    """Records that see few numbers of the parameters.

    `data` is in the order of ``graph.leaves``, records first; `order` is that of control variates.
    """

    def __init__(
        self,
        graph: RowGraph,
        parameters: ParameterVector,
        data: Sequence[np.ndarray],
        order: int,
    ) -> None:
        self.cuts, self.order = graph.cuts, order
        self.parameters, self.d, self.n = parameters, parameters.size, graph.n_rows
        self._widths = [math.prod(cut.eta.type.shape[1:]) for cut in self.cuts]
        self._n_seen = sum(self._widths)
        self._pack(graph, data)
        self._share()
        eta, numbers = pt.dmatrix("eta"), pt.dmatrix("numbers")
        inputs = self._inputs_of(eta, numbers)
        etas = [cut.eta for cut in self.cuts]
        derivatives = by_row(self._loglik, etas, 2)
        found = pt.stack(derivatives[: 1 + self._n_seen]), pt.stack(derivatives)
        [first, second] = clone_replace(found, inputs, rebuild_strict=False)
        self.graph = CompactGraph(([eta, numbers], [first]), self._shared_graph, self._plan())
        #: What an estimate calls.
        self.kernel = self.graph.compiled()
        self._second = compile_function([eta, numbers], second)

    # -- rows and shared values -----------------------------------------------------------------

    def _pack(self, graph: RowGraph, data: Sequence[np.ndarray]) -> None:
        """All records as one matrix: designs, labels, data, slow functions of the data, room."""
        leaves = [leaf.block for leaf in graph.leaves]
        arrays = dict(zip(leaves, map(np.ascontiguousarray, data), strict=True))
        [self._loglik], stored, columns = hoisted([prepared_loglik(graph)], leaves)
        if columns:
            function = pytensor.function(leaves, columns, mode=_ONCE, on_unused_input="ignore")
            starts = range(0, self.n, _ROWS)
            blocks = [function(*(x[k : k + _ROWS] for x in arrays.values())) for k in starts]
            found = [np.concatenate(part) for part in zip(*blocks, strict=True)]
            arrays |= dict(zip(stored, found, strict=True))
        seen = columns_of(graph, data)
        dots = {cut.row_data for cut in self.cuts if cut.kind == "dot"}
        designs = {v: x for v, x in seen.items() if v in dots}
        labels = {v: x for v, x in seen.items() if v not in dots}
        used = ancestors_without_shapes([self._loglik])
        read = {v: x for v, x in arrays.items() if v in used}
        self.width = sum(x.shape[1] for x in designs.values())
        self._column_of: dict[Variable | None, int] = {}
        place = 0
        for v, x in designs.items():
            self._column_of[v] = place
            place += x.shape[1]
        self._place_of: dict[Variable, tuple[int, tuple[int, ...]]] = {}
        for place, v in enumerate(labels):
            self._column_of[v] = place
        place = len(labels)
        for v, x in read.items():
            self._place_of[v] = (place, x.shape[1:])
            place += math.prod(x.shape[1:])
        k = self._n_seen
        #: Columns of coefficients.
        self._kept = (1, 1 + k, 1 + k + k * (k + 1) // 2)[self.order]
        self._star = place
        room = k + self._kept
        #: Data of which the log-likelihood reads the shape alone.
        self._unread = {v: x.shape[1:] for v, x in arrays.items() if v not in read}
        parts = [*designs.values(), *labels.values(), *read.values()]
        self.rows = packed(parts, room) if parts else np.empty((self.n, room))

    def _inputs_of(self, eta: Variable, numbers: Variable) -> dict[Variable, Variable]:
        """What the rows read, as parts of the two matrices of a compiled function."""
        inputs, first = {}, 0
        for cut, width in zip(self.cuts, self._widths, strict=True):
            inputs[cut.eta] = entries(eta, first, cut.eta.type.shape[1:], cut.eta.type.dtype)
            first += width
        for v, (place, shape) in self._place_of.items():
            inputs[v] = entries(numbers, place, shape, v.type.dtype)
        for v, shape in self._unread.items():
            inputs[v] = pt.zeros((numbers.shape[1], *shape), dtype=v.type.dtype)
        return inputs

    def _share(self) -> None:
        """Shared values: matrices of those that are affine, functions of the others."""
        theta = self.parameters.theta
        shared = SharedValues.of(self.cuts, self.parameters)
        self._bent = [not flat for flat in shared.affine]
        at = np.zeros(self.d)
        values = _interpreted([theta], [v.astype("float64").flatten() for v in shared.value])(at)
        self._sizes = [len(v) for v in values]
        affine = [k for k, flat in enumerate(shared.affine) if flat]
        bent = [k for k, flat in enumerate(shared.affine) if not flat]
        maps = _interpreted([theta], [jacobian_of(shared.value[k], theta) for k in affine])(at)
        self._jacobian = np.vstack([np.zeros((0, self.d)), *maps])
        self._origin = np.concatenate([np.zeros(0), *(values[k] for k in affine)])
        self._constants_at: Callable[[np.ndarray], np.ndarray] = lambda _: np.zeros(0)
        self._constants = np.zeros(0)  # nothing is expanded yet
        self._shared_graph: KernelGraph | None = None
        if bent:
            along = shared.along(theta, bent, self.order)
            parts = [*(shared.value[k] for k in bent), *along.firsts, *along.seconds]
            found = pt.concatenate([x.astype("float64").flatten() for x in parts])
            adjoint = pt.dvector("adjoint")
            slope = pytensor.grad(pt.dot(found, adjoint), theta, disconnected_inputs="ignore")
            inputs = [theta, shared.centre, along.constants, adjoint]
            self._shared_graph = (inputs, [found, slope])
            self._constants_at, self._constants = along.at, np.zeros(along.size)
            flat = pt.concatenate([shared.value[k].astype("float64").flatten() for k in bent])
            weights = pt.dvector("weights")
            slope = pytensor.grad(pt.dot(flat, weights), theta, disconnected_inputs="ignore")
            curved = jacobian_of(slope, theta)
            self._bent_values = _interpreted([theta], [flat, jacobian_of(flat, theta)])
            self._bent_curvature = _interpreted([theta, weights], [curved])

    def _plan(self) -> Plan:
        doors: list[list[int]] = []
        starts = [0, 0]
        for cut, width, size, bent in zip(
            self.cuts, self._widths, self._sizes, self._bent, strict=True
        ):
            column = self._column_of.get(cut.row_data, 0)
            for k in range(width):
                base, length = starts[bent] + k, size // width
                doors.append([_DOORS[cut.kind], column, base, width, length, bent])
            starts[bent] += size
        table = np.ascontiguousarray(np.array(doors, dtype=np.int64).reshape(-1, 6).T)
        return Plan(
            door=table[0],
            column=table[1],
            base=table[2],
            stride=table[3],
            length=table[4],
            bent=table[5].astype(bool),
            n_bent=starts[True],
            star=self._star,
            coefficients=self._star + self._n_seen,
            order=self.order,
            jacobian=np.ascontiguousarray(self._jacobian),
            origin=self._origin,
            constants=self._constants,
        )

    # -- the whole log-likelihood ---------------------------------------------------------------

    def total(self, theta: np.ndarray, rows: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """Log-likelihood of all records, or of some of them, and its (d,) gradient."""
        index = np.arange(self.n) if rows is None else rows
        gradient = np.empty(self.d)
        room = empty_sample(self.rows, self.width, BLOCK)
        value = compact_total(*self.kernel.arguments, self.rows, index, room, theta, gradient)
        return value, gradient

    def hessian(self, theta: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """(d, d) sum of the Hessians of all records, or of some of them."""
        plan = self.graph.plan
        maps = self._maps(theta)
        k = self._n_seen
        pairs = [(i, j) for i in range(k) for j in range(i, k)]
        sums = {(i, j): np.zeros((plan.length[i], plan.length[j])) for i, j in pairs}
        slopes = np.zeros(plan.n_bent)
        for block in self._blocks(rows):
            found = self._derivatives(*self._seen(theta, block)).T
            for place, ((i, j), into) in enumerate(sums.items(), start=1 + k):
                into += self._product(i, j, found[:, place], block)
            for j in map(int, np.flatnonzero(plan.bent)):
                here = slice(plan.base[j], None, plan.stride[j])
                part = self._column_sums(j, found[:, 1 + j, None], block)[:, 0]
                slopes[here][: len(part)] += part
        hessian = np.zeros((self.d, self.d))
        for (i, j), into in sums.items():
            part = maps[i].T @ (into @ maps[j])
            hessian += part if i == j else part + part.T
        if plan.n_bent:
            hessian += self._bent_curvature(theta, slopes)[0]
        return (hessian + hessian.T) / 2.0

    def _derivatives(self, eta: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """(k, m) values, first and second derivatives of a block of rows."""
        with np.errstate(all="ignore"):
            return np.asarray(self._second(eta, numbers))

    def _maps(self, theta: np.ndarray) -> list[np.ndarray]:
        """Per number that a row sees, the (length, d) derivatives of its shared values."""
        plan, bent = self.graph.plan, np.zeros((0, self.d))
        if plan.n_bent:
            bent = self._bent_values(theta)[1]
        found = []
        for j, (base, stride, length) in enumerate(
            zip(plan.base, plan.stride, plan.length, strict=True)
        ):
            matrix = bent if plan.bent[j] else plan.jacobian
            found.append(matrix[base : base + stride * length : stride])
        return found

    def _blocks(self, rows: np.ndarray | None) -> Iterator[np.ndarray]:
        size = self.n if rows is None else len(rows)
        for start in range(0, size, _ROWS):
            here = slice(start, start + _ROWS)
            yield self.rows[here] if rows is None else self.rows[rows[here]]

    def _seen(self, theta: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(K, m) numbers that a block of rows sees, and its other numbers."""
        plan = self.graph.plan
        affine = plan.origin + plan.jacobian @ theta
        bent = self._bent_values(theta)[0] if plan.n_bent else affine
        eta = np.empty((self._n_seen, len(block)))
        for j, (base, stride, length) in enumerate(
            zip(plan.base, plan.stride, plan.length, strict=True)
        ):
            values = (bent if plan.bent[j] else affine)[base : base + stride * length : stride]
            if plan.door[j] == COPY:
                eta[j] = values[0]
            elif plan.door[j] == DOT:
                eta[j] = self._design(j, block) @ values
            else:
                eta[j] = values[self._labels(j, block)]
        return eta, np.ascontiguousarray(block[:, self.width :].T)

    def _design(self, j: int, block: np.ndarray) -> np.ndarray:
        plan = self.graph.plan
        return block[:, plan.column[j] : plan.column[j] + plan.length[j]]

    def _labels(self, j: int, block: np.ndarray) -> np.ndarray:
        return block[:, self.width + self.graph.plan.column[j]].astype(np.int64)

    def _column_sums(self, j: int, values: np.ndarray, block: np.ndarray) -> np.ndarray:
        """(length, k) sums of (m, k) values, by what the rows see as number j."""
        plan = self.graph.plan
        if plan.door[j] == COPY:
            return values.sum(axis=0, keepdims=True)
        if plan.door[j] == DOT:
            return self._design(j, block).T @ values
        found = np.zeros((plan.length[j], values.shape[1]))
        np.add.at(found, self._labels(j, block), values)
        return found

    def _product(self, i: int, j: int, weights: np.ndarray, block: np.ndarray) -> np.ndarray:
        """(length_i, length_j) weighted sum of products of what the rows see."""
        door = self.graph.plan.door
        if door[j] == COPY:
            return self._column_sums(i, weights[:, None], block)
        if door[j] == DOT:
            return self._column_sums(i, weights[:, None] * self._design(j, block), block)
        if door[i] != INDEX:
            return self._product(j, i, weights, block).T
        found = np.zeros((self.graph.plan.length[i], self.graph.plan.length[j]))
        np.add.at(found, (self._labels(i, block), self._labels(j, block)), weights)
        return found

    # -- what a sample estimates ----------------------------------------------------------------

    def expand(self, centre: np.ndarray) -> None:
        """Expand all records about the centre, in their rows."""
        star, kept = self.width + self._star, self._kept
        for start in range(0, self.n, _ROWS):
            block = self.rows[start : start + _ROWS]
            eta, numbers = self._seen(centre, block)
            block[:, star : star + len(eta)] = eta.T
            block[:, star + len(eta) :] = self._derivatives(eta, numbers)[:kept].T
        plan = self.graph.plan._replace(constants=self._constants_at(centre))
        self.graph = CompactGraph(self.graph.rows, self.graph.shared, plan)
        self.kernel = Kernel(plan, self.kernel.functions)


def _interpreted(inputs: list[Variable], outputs: list[Variable]) -> Any:
    """Functions of the parameters alone, called a few times."""
    function = pytensor.function(inputs, outputs, mode=INTERPRETED, on_unused_input="ignore")
    return lambda *x: [np.asarray(v, dtype="float64") for v in function(*x)]
