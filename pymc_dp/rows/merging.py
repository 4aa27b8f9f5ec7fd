"""Shared values that meet only in the rows become one shared value.

``mu + tau * z[g]`` and ``(mu + tau * z)[g]`` are the same likelihood, and so are ``x * a * b`` and
``x * (a * b)``.  The walk that makes the cuts (:mod:`pymc_dp.records.lifter`) cuts at each
parameter in the first form of each, and at the whole expression in the second.  Here the first is
turned into the second: sums, differences, products and quotients of cuts alone are taken out of the
rows.

A value of the rows that is computed from cuts alone has one of three kinds, those of its cuts:
"copy" if all of them are copies; "index" if the others are indexed by one and the same column;
"dot" if it is linear in products with one and the same design, because
``a * (x_i @ beta) = x_i @ (a * beta)``.  Since both operations and cuts act row by row, the value
is the cut of the same expression of the shared values, copies having a leading axis of size one.
Terms and factors are grouped for this: ``mu + x * b + tau * z[g]`` is
``(mu + tau * z)[g] + x * b``.

Columns are the same if the graph says so: the same ``pm.Data``, or the same NumPy array, not one of
equal entries.

Guarantee: only the graph is looked at, never values of row data or their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.scalar import Add, Mul, Neg, Sub, TrueDiv
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.subtensor import Subtensor

from pymc_dp.base.compat import subtensor_indices
from pymc_dp.records.ancestry import SHAPE_OPS, ancestors_without_shapes
from pymc_dp.records.graph import Cut, RowGraph

#: What is taken out of the rows.  Other functions (an inverse link, say) stay there: the
#: likelihood as a function of what is below them is nearer to normal.
_ARITHMETIC = (Add, Mul, Neg, Sub, TrueDiv)


@dataclass(frozen=True)
class _Kind:
    """How a row sees a value computed from cuts alone: "constant", "copy", "index" or "dot".

    `column` is the number of the column of labels, or of the design; -1 for the others.  `etas` are
    the row inputs it is computed from.
    """

    kind: str
    column: int = -1
    etas: frozenset[Variable] = frozenset()

    @property
    def door(self) -> tuple[str, int]:
        """The kind and the column."""
        return self.kind, self.column


_CONSTANT = _Kind("constant")


def merged(graph: RowGraph) -> RowGraph:
    """Rebuild a row graph with one cut for each arithmetic expression of cuts alone.

    The log-likelihood, leaves, labels that are checked, and conditions stay the same.  Where
    nothing merges, the result is `graph` itself.
    """
    walk = _Walk(graph)
    terms = walk.rebuilt(_canonical(graph))
    joined = walk.joined(terms)
    if not joined:
        return graph
    new = [walk.cut(value, k) for k, value in enumerate(joined)]
    terms = clone_replace(
        terms,
        {value: cut.eta for value, cut in zip(joined, new, strict=True)},
        rebuild_strict=False,
    )
    reached = ancestors_without_shapes(terms)
    rows = graph.leaves[0].block.shape[0]
    blanks = {  # what is left of the others is their number of rows
        cut.eta: pt.alloc(pt.zeros((), cut.eta.type.dtype), rows, *cut.eta.type.shape[1:])
        for cut in graph.cuts
        if cut.eta not in reached and None not in cut.eta.type.shape[1:]
    }
    terms = clone_replace(terms, blanks, rebuild_strict=False)
    reached = set(ancestors(terms))
    cuts = tuple(cut for cut in (*graph.cuts, *new) if cut.eta in reached)
    return replace(graph, terms=tuple(terms), cuts=cuts)


def _canonical(graph: RowGraph) -> FunctionGraph:
    """A copy of the log-likelihoods in which nested sums and products are flat."""
    copies = clone_replace(list(graph.terms))
    flat = rewrite_graph(copies, include=("canonicalize",), clone=False)
    inputs = [x for x in ancestors(flat) if x.owner is None and not isinstance(x, Constant)]
    function = FunctionGraph(inputs, flat, clone=False)
    MergeOptimizer().rewrite(function)
    return function


def _columns(graph: RowGraph) -> dict[Cut, int]:
    """Number of the row data of each "index" and "dot"; the same for the same expression.

    Labels are the same only if they index as many groups: negative ones count from the end.
    """
    arrays = {
        leaf.block: (id(leaf.source.data), leaf.axis)
        for leaf in graph.leaves
        if isinstance(leaf.source, Constant)  # each use of a NumPy array makes one
    }

    @cache
    def equal(x: Variable, y: Variable) -> bool:
        if x is y:
            return True
        if x in arrays or y in arrays:
            return arrays.get(x) == arrays.get(y)
        if x.owner is None or y.owner is None:
            return isinstance(x, Constant) and isinstance(y, Constant) and bool(x.equals(y))
        return (
            x.owner.op == y.owner.op
            and x.owner.outputs.index(x) == y.owner.outputs.index(y)
            and len(x.owner.inputs) == len(y.owner.inputs)
            and all(equal(a, b) for a, b in zip(x.owner.inputs, y.owner.inputs, strict=True))
        )

    numbers: dict[Cut, int] = {}
    for cut in graph.cuts:
        if cut.row_data is None:
            continue
        same = (
            number
            for other, number in numbers.items()
            if other.kind == cut.kind
            and other.phi.type.shape[0] == cut.phi.type.shape[0]
            and other.row_data is not None
            and equal(other.row_data, cut.row_data)
        )
        numbers[cut] = next(same, len(numbers))
    return numbers


class _Walk:
    """One walk from the cuts up to log-likelihoods."""

    def __init__(self, graph: RowGraph) -> None:
        self.cuts = graph.cuts
        self.columns = _columns(graph)
        self.kinds: dict[Variable, _Kind | None] = {}
        self.fixed: dict[Variable, bool] = {}
        self.groups: dict[tuple[Any, ...], Variable] = {}
        for cut in self.cuts:
            known = cut.phi.type.dtype == "float64" and None not in cut.phi.type.shape
            column = self.columns.get(cut, -1)
            self.kinds[cut.eta] = _Kind(cut.kind, column, frozenset([cut.eta])) if known else None

    # -- kinds ----------------------------------------------------------------------------------

    def kind(self, x: Variable) -> _Kind | None:
        """How rows see a value; None if not from cuts alone, or not through one column."""
        if x not in self.kinds:
            self.kinds[x] = self._kind(x)
        return self.kinds[x]

    def _kind(self, x: Variable) -> _Kind | None:
        shape = getattr(x.type, "shape", None)
        if shape is None:
            return None
        if self._is_fixed(x):
            return _CONSTANT if not shape or shape[0] == 1 else None
        if x.owner is None or x.type.dtype != "float64" or None in shape[1:]:
            return None
        op, inputs = x.owner.op, x.owner.inputs
        if isinstance(op, DimShuffle):
            return self.kind(inputs[0]) if op.new_order[:1] == (0,) else None
        if isinstance(op, Subtensor):
            fixed = all(isinstance(index, Constant) for index in inputs[1:])
            whole = fixed and subtensor_indices(x.owner)[:1] == [slice(None)]
            return self.kind(inputs[0]) if whole else None
        if isinstance(op, Elemwise) and isinstance(op.scalar_op, _ARITHMETIC):
            return _combined(op.scalar_op, [self.kind(y) for y in inputs])
        return None

    def _is_fixed(self, x: Variable) -> bool:
        """Whether a value is computed from constants alone."""
        if x not in self.fixed:
            node = x.owner
            self.fixed[x] = isinstance(x, Constant) or (
                node is not None and bool(node.inputs) and all(map(self._is_fixed, node.inputs))
            )
        return self.fixed[x]

    # -- sums and products ----------------------------------------------------------------------

    def rebuilt(self, function: FunctionGraph) -> list[Variable]:
        """The same values with terms, and factors, of one kind side by side."""
        new: dict[Variable, Variable] = {}
        for node in function.toposort():
            inputs = [new.get(x, x) for x in node.inputs]
            outputs = node.clone_with_new_inputs(inputs, strict=False).outputs
            new.update(zip(node.outputs, outputs, strict=True))
            if len(outputs) == 1 and self.kind(outputs[0]) is None:
                new[node.outputs[0]] = self._regrouped(outputs[0])
        return [new.get(x, x) for x in function.outputs]

    def _regrouped(self, x: Variable) -> Variable:
        assert x.owner is not None
        op, inputs = x.owner.op, x.owner.inputs
        if not isinstance(op, Elemwise) or x.type.dtype != "float64":
            return x
        if isinstance(op.scalar_op, Sub):
            plus, minus = (_terms(y) for y in inputs)
            terms = [*plus, *map(pt.neg, minus)]
            groups = self._groups(pt.add, terms)
            if all({y in plus for y in group} != {True, False} for group in groups):
                return x
            op = pt.add
        elif isinstance(op.scalar_op, Add | Mul):
            groups = self._groups(op, inputs)
            if all(len(group) == 1 for group in groups):
                return x
        else:
            return x
        parts = [self._joined(op, group) for group in groups]
        return parts[0] if len(parts) == 1 else op(*parts)

    def _groups(self, op: Elemwise, inputs: Sequence[Variable]) -> list[list[Variable]]:
        """Inputs of a sum or a product, those that can be one cut side by side."""
        kinds = [self.kind(x) for x in inputs]
        moving = [k for k in kinds if k is not None and k.kind != "constant"]
        labels = {k.door for k in moving if k.kind == "index"}
        designs = [k for k in moving if k.kind == "dot"]
        product = isinstance(op.scalar_op, Mul)
        # the one place where copies can go along
        home: tuple[str, int] = ("copy", -1)
        if len(labels) + (len(designs) if product else 0) == 1:
            home = next(iter(labels)) if labels else designs[0].door
        groups: dict[Any, list[Variable]] = {}
        for k, (x, kind) in enumerate(zip(inputs, kinds, strict=True)):
            key: Any = k
            if kind is not None and kind.kind == "copy":
                key = home
            elif kind is not None and (
                kind.kind == "index" or (kind.kind == "dot" and not (product and len(designs) > 1))
            ):
                key = kind.door
            groups.setdefault(key, []).append(x)
        return list(groups.values())

    def _joined(self, op: Elemwise, parts: Sequence[Variable]) -> Variable:
        """Sum or product of some values, one variable for the same parts in whatever order."""
        if len(parts) == 1:
            return parts[0]
        key = (op.scalar_op, *sorted(id(x) for x in parts))
        if key not in self.groups:
            self.groups[key] = op(*parts)
        return self.groups[key]

    # -- what is taken out ----------------------------------------------------------------------

    def joined(self, terms: Sequence[Variable]) -> list[Variable]:
        """The values of several cuts that become one."""
        refused: set[Variable] = set()
        while True:
            found, alone = self._frontier(terms, refused)
            wrong = {x for x in found if self._is_redundant(x, found, alone)}
            if not wrong:
                return found
            refused |= wrong

    def _is_redundant(self, x: Variable, found: Iterable[Variable], alone: set[Variable]) -> bool:
        """Whether a value follows, wholly or in part, from what rows see anyway."""
        kind = self.kind(x)
        assert kind is not None
        return kind.etas <= alone or not (set(found) & set(ancestors([x]))) <= {x}

    def _frontier(
        self, terms: Sequence[Variable], refused: set[Variable]
    ) -> tuple[list[Variable], set[Variable]]:
        """Values of several cuts nearest to the log-likelihoods, and the cuts used on their own."""
        etas = {cut.eta for cut in self.cuts}
        found: dict[Variable, None] = {}
        alone: set[Variable] = set()
        seen: set[Variable] = set()
        stack = [*reversed(terms)]
        while stack:
            x = stack.pop()
            if x in seen:
                continue
            seen.add(x)
            if x in etas:
                alone.add(x)
            elif x not in refused and self._combines(x):
                found[x] = None
            elif x.owner is not None and not isinstance(x.owner.op, SHAPE_OPS):
                stack.extend(reversed(x.owner.inputs))
        return list(found), alone

    def _combines(self, x: Variable) -> bool:
        """Whether several values that are not constant meet here."""
        kind = self.kind(x)
        if x.owner is None or kind is None or (kind.kind == "dot" and x.type.ndim > 2):
            return False
        kinds = [self.kind(y) for y in x.owner.inputs]
        return len(kind.etas) > 1 and sum(k is not None and bool(k.etas) for k in kinds) > 1

    def cut(self, value: Variable, number: int) -> Cut:
        """The cut that a value of several cuts becomes."""
        kind = self.kind(value)
        assert kind is not None
        behind = [cut for cut in self.cuts if cut.eta in kind.etas]
        shared = {
            cut.eta: cut.phi.dimshuffle("x", *range(cut.phi.type.ndim))
            if cut.kind == "copy"
            else cut.phi
            for cut in behind
        }
        [phi] = clone_replace([value], shared, rebuild_strict=False)
        row_data = None
        if kind.kind == "copy":
            phi = phi.dimshuffle(*range(1, phi.type.ndim))
            shape = phi.type.shape
        else:
            row_data = next(c.row_data for c in behind if self.columns.get(c) == kind.column)
            shape = phi.type.shape[1:]
        eta = pt.TensorType("float64", shape=(None, *shape))(name=f"eta{len(self.cuts) + number}")
        return Cut(kind.kind, phi, eta, row_data)  # type: ignore[arg-type]


def _terms(x: Variable) -> list[Variable]:
    is_sum = x.owner is not None and isinstance(x.owner.op, Elemwise)
    return list(x.owner.inputs) if is_sum and isinstance(x.owner.op.scalar_op, Add) else [x]


def _combined(scalar_op: Any, kinds: Sequence[_Kind | None]) -> _Kind | None:
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    moving = [kind for kind in known if kind.kind != "constant"]
    doors = {kind.door for kind in moving if kind.kind != "copy"}
    etas = frozenset(eta for kind in moving for eta in kind.etas)
    if not doors:
        return _Kind("copy", -1, etas)
    if len(doors) > 1:
        return None
    [(kind, column)] = doors
    if kind == "dot":
        dots = [k.kind == "dot" for k in known]
        linear = (
            isinstance(scalar_op, Neg)
            or (isinstance(scalar_op, Add | Sub) and all(dots))
            or (isinstance(scalar_op, Mul) and sum(dots) == 1)
            or (isinstance(scalar_op, TrueDiv) and dots == [True, False])
        )
        if not linear:
            return None
    return _Kind(kind, column, etas)
