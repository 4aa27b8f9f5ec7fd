"""Shared values that meet only in the rows become one shared value.

``mu + tau * z[g]`` is the same likelihood as ``(mu + tau * z)[g]``, and ``x * a * b`` as
``x * (a * b)``.  :mod:`pymc_dp.records.lifter` cuts the first forms at each parameter.  Here they
become the second: sums, differences, products and quotients of cuts alone leave the rows.

A value of cuts alone enters the rows through one door: "copy" if all cuts are copies; "index" if
the others have one and the same column; "dot" if it is linear in products with one design, as
``a * (x_i @ beta) = x_i @ (a * beta)``.  Operations and cuts act row by row, so it is the cut of
the same expression of shared values, copies with a leading axis of one.  Columns are the same if
they are one ``pm.Data`` or array.

Guarantee: only the graph is looked at, never values of row data or their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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

#: Taken out of the rows.  Others, such as inverse links, stay: below them it is nearer to normal.
_ARITHMETIC = (Add, Mul, Neg, Sub, TrueDiv)

#: "constant", "copy", or "index" or "dot" with the length of the shared value and the row data.
Door = tuple[Any, ...]


class _Kind(NamedTuple):
    """How rows see a value computed from constants and the row inputs `etas` of cuts alone."""

    door: Door
    etas: frozenset[Variable] = frozenset()


def merged(graph: RowGraph) -> RowGraph:
    """The same graph with one cut per arithmetic expression of cuts; `graph` if none merge."""
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


def first_equal(values: Sequence[Variable]) -> dict[Variable, Variable]:
    """For each value the first of those that are computed alike."""
    graph = FunctionGraph(outputs=list(values), clone=True)
    MergeOptimizer().rewrite(graph)
    firsts: dict[Variable, Variable] = {}
    for value, found in zip(values, graph.outputs, strict=True):
        firsts.setdefault(found, value)
    return {v: firsts[m] for v, m in zip(values, graph.outputs, strict=True)}


def _doors(graph: RowGraph) -> dict[Cut, Door]:
    """The door of each cut; labels must index as many groups, as negative ones wrap around."""
    blocks: dict[Any, Variable] = {}
    arrays = {  # each use of a NumPy array makes a leaf
        leaf.block: blocks.setdefault((id(leaf.source.data), leaf.axis), leaf.block)
        for leaf in graph.leaves
        if isinstance(leaf.source, Constant)
    }
    cuts = [cut for cut in graph.cuts if cut.row_data is not None]
    columns = clone_replace([cut.row_data for cut in cuts], arrays, rebuild_strict=False)
    first = first_equal(columns)
    doors: dict[Cut, Door] = dict.fromkeys(graph.cuts, ("copy",))
    for cut, column in zip(cuts, columns, strict=True):
        doors[cut] = cut.kind, cut.phi.type.shape[0], first[column]
    return doors


class _Walk:
    """One walk from the cuts up to log-likelihoods."""

    def __init__(self, graph: RowGraph) -> None:
        self.cuts = graph.cuts
        self.doors = _doors(graph)
        self.kinds: dict[Variable, _Kind | None] = {}
        self.sums: dict[Any, Variable] = {}
        for cut in self.cuts:
            known = cut.phi.type.dtype == "float64" and None not in cut.phi.type.shape
            self.kinds[cut.eta] = _Kind(self.doors[cut], frozenset([cut.eta])) if known else None

    def kind(self, x: Variable) -> _Kind | None:
        """How rows see a value; None if not from cuts alone, or not through one door."""
        if x not in self.kinds:
            self.kinds[x] = self._kind(x)
        return self.kinds[x]

    def _kind(self, x: Variable) -> _Kind | None:
        shape = getattr(x.type, "shape", None)
        if shape is None:
            return None
        if all(isinstance(v, Constant) for v in ancestors([x]) if v.owner is None):
            return _Kind(("constant",)) if shape[:1] in ((), (1,)) else None
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

    def rebuilt(self, function: FunctionGraph) -> list[Variable]:
        """The same values with terms, and factors, of one door side by side."""
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
        op, inputs = x.owner.op, list(x.owner.inputs)
        scalar_op = getattr(op, "scalar_op", None)
        if x.type.dtype != "float64" or not isinstance(scalar_op, Add | Mul | Sub):
            return x
        if isinstance(scalar_op, Sub):
            plus, minus = map(_terms, inputs)
            op, inputs = pt.add, [*plus, *map(pt.neg, minus)]
        groups = self._groups(inputs, product=isinstance(scalar_op, Mul))
        if all(len(group) == 1 for group in groups):
            return x
        parts = [self._joined(op, group) for group in groups]
        return parts[0] if len(parts) == 1 else op(*parts)

    def _groups(self, inputs: Sequence[Variable], product: bool) -> list[list[Variable]]:
        """Inputs of a sum or a product, those that can be one cut side by side."""
        kinds = [self.kind(x) for x in inputs]
        count = Counter(kind.door for kind in kinds if kind is not None)
        # copies go along with what they may be added to, or multiplied with, if it is one thing
        homes = [door for door in count if door[0] == "index" or (product and door[0] == "dot")]
        designs = sum(count[door] for door in count if door[0] == "dot")
        home: Door = homes[0] if len(homes) == 1 and (designs < 2 or not product) else ("copy",)
        groups: dict[Any, list[Variable]] = {}
        for k, (x, kind) in enumerate(zip(inputs, kinds, strict=True)):
            door = ("constant",) if kind is None else kind.door
            alone = door[0] == "constant" or (product and door[0] == "dot" and designs > 1)
            key = k if alone else home if door == ("copy",) else door
            groups.setdefault(key, []).append(x)
        return list(groups.values())

    def _joined(self, op: Any, parts: Sequence[Variable]) -> Variable:
        """Sum or product of some values, one variable for the same parts in whatever order."""
        if len(parts) == 1:
            return parts[0]
        key = op, *sorted(id(x) for x in parts)
        if key not in self.sums:
            self.sums[key] = op(*parts)
        return self.sums[key]

    def joined(self, terms: Sequence[Variable]) -> list[Variable]:
        """The values of several cuts that become one: those nearest to the log-likelihoods."""
        found: dict[Variable, None] = {}
        seen: set[Variable] = set()
        stack = [*reversed(terms)]
        while stack:
            x = stack.pop()
            if x in seen:
                continue
            seen.add(x)
            if self._combines(x):
                found[x] = None
            elif x.owner is not None and not isinstance(x.owner.op, SHAPE_OPS):
                stack.extend(reversed(x.owner.inputs))
        return list(found)

    def _combines(self, x: Variable) -> bool:
        """Whether several values that are not constant meet here."""
        kind = self.kind(x)
        if x.owner is None or kind is None or (kind.door[0] == "dot" and x.type.ndim > 2):
            return False
        kinds = [self.kind(y) for y in x.owner.inputs]
        return len(kind.etas) > 1 and sum(k is not None and bool(k.etas) for k in kinds) > 1

    def cut(self, value: Variable, number: int) -> Cut:
        """The cut that a value of several cuts becomes."""
        kind = self.kind(value)
        assert kind is not None
        behind = [cut for cut in self.cuts if cut.eta in kind.etas]
        shared = {cut.eta: cut.phi[None] if cut.kind == "copy" else cut.phi for cut in behind}
        [phi] = clone_replace([value], shared, rebuild_strict=False)
        row_data = next((c.row_data for c in behind if self.doors[c] == kind.door), None)
        if kind.door == ("copy",):
            phi = phi.dimshuffle(*range(1, phi.type.ndim))
        shape = phi.type.shape[kind.door != ("copy",) :]
        eta = pt.TensorType("float64", shape=(None, *shape))(name=f"eta{len(self.cuts) + number}")
        return Cut(kind.door[0], phi, eta, row_data)


def _terms(x: Variable) -> list[Variable]:
    is_sum = x.owner is not None and isinstance(getattr(x.owner.op, "scalar_op", None), Add)
    return list(x.owner.inputs) if is_sum else [x]


def _combined(scalar_op: Any, kinds: Sequence[_Kind | None]) -> _Kind | None:
    known = [kind for kind in kinds if kind is not None]
    doors = {kind.door for kind in known} - {("constant",), ("copy",)}
    if len(known) < len(kinds) or len(doors) > 1:
        return None
    etas = frozenset(eta for kind in known for eta in kind.etas)
    door: Door = doors.pop() if doors else ("copy",)
    if door[0] == "dot":
        dots = [kind.door == door for kind in known]
        linear = (
            isinstance(scalar_op, Neg)
            or (isinstance(scalar_op, Add | Sub) and all(dots))
            or (isinstance(scalar_op, Mul) and sum(dots) == 1)
            or (isinstance(scalar_op, TrueDiv) and dots == [True, False])
        )
        if not linear:
            return None
    return _Kind(door, etas)
