"""What records see of the parameters: coordinates in which a likelihood may be simpler.

The shared values of a likelihood (:mod:`pymc_dp.records.graph`) may be non-linear in the
parameters: the group means of a non-centred hierarchy ``(mu + tau * z)[g]``, coefficients ``tau *
z`` with a shared scale, a curve ``b + a**2``.  The posterior is then curved, whatever the data say,
although the likelihood of the shared values themselves is near normal in large data.  Here these
*effects* replace the parameters, so that records are asked about something simple; how the
parameters follow from the effects is public.  It does not matter how a model is written: shared
values that meet in the rows alone are first :func:`merged` into one.

``mu + tau * z[g]`` and ``(mu + tau * z)[g]`` are the same likelihood, and so are ``x * a * b`` and
``x * (a * b)``.  The walk that makes the cuts (:mod:`pymc_dp.records.lifter`) cuts at each
parameter in the first form of each, and at the whole expression in the second.  The first is turned
into the second: sums, differences, products and quotients of cuts alone are taken out of the rows.

A value of the rows that is computed from cuts alone has one of three kinds, those of its cuts:
"copy" if all of them are copies; "index" if the others are indexed by one and the same column;
"dot" if it is linear in products with one and the same design, because
``a * (x_i @ beta) = x_i @ (a * beta)``.  Since both operations and cuts act row by row, the value
is the cut of the same expression of the shared values, copies having a leading axis of size one.
Terms and factors are grouped for this: ``mu + x * b + tau * z[g]`` is
``(mu + tau * z)[g] + x * b``.  Columns are the same if the graph says so: the same ``pm.Data``, or
the same NumPy array, not one of equal entries.

Guarantee: only the graph is looked at, never values of row data or their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable, equal_computations
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
from pymc_dp.records.graph import Cut, ParameterVector, RowGraph
from pymc_dp.rows.functions import compile_parameter_function, jacobian_of
from pymc_dp.rows.groups import RowGroup

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

    alike = [(a, b) for a in arrays for b in arrays if arrays[a] == arrays[b]]
    here, there = [a for a, _ in alike], [b for _, b in alike]
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
            and equal_computations([other.row_data], [cut.row_data], here, there)
        )
        numbers[cut] = next(same, len(numbers))
    return numbers


class _Walk:
    """One walk from the cuts up to log-likelihoods."""

    def __init__(self, graph: RowGraph) -> None:
        self.cuts = graph.cuts
        self.columns = _columns(graph)
        self.kinds: dict[Variable, _Kind | None] = {}
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
        if not any(v.owner is None and not isinstance(v, Constant) for v in ancestors([x])):
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
            # what follows, wholly or in part, from what rows see anyway
            kinds = [(x, kind) for x in found if (kind := self.kind(x)) is not None]
            wrong = {x for x, kind in kinds if kind.etas <= alone}
            wrong |= {x for x in found if not set(found) & set(ancestors([x])) <= {x}}
            if not wrong:
                return found
            refused |= wrong

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


#: Derivatives that differ by less than this part of the largest are those of something linear.
_LINEAR = 1e-9
#: Singular values below this part of the largest, in prior widths, make effects redundant.
_SINGULAR = 1e-6


@dataclass(frozen=True, eq=False)
class Seen:
    """Effects that replace the parameters of a likelihood.

    `effects` are in terms of the model's value variables: those of them that records see directly,
    and the shared values that are non-linear in several.  `parameters` is the (k,) vector of all
    entries, k <= d.  Its first `n_direct` entries are parameters themselves, the others are mixed.
    `graphs` are the likelihood as a function of the effects, group by group.  `function` maps (d,)
    unconstrained parameters to (k,) effects.
    """

    effects: tuple[Variable, ...]
    parameters: ParameterVector
    graphs: tuple[RowGraph, ...]
    n_direct: int
    function: Callable[[np.ndarray], np.ndarray]

    def symbolic(self, parameters: ParameterVector) -> Variable:
        """(k,) effects as a function of ``parameters.theta``."""
        return _flat(self.effects, parameters)


def _flat(effects: Sequence[Variable], parameters: ParameterVector) -> Variable:
    values = parameters.substitute(effects)
    return pt.concatenate([pt.as_tensor(e).astype("float64").flatten() for e in values])


def see(
    groups: Sequence[RowGroup],
    graphs: Sequence[RowGraph],
    parameters: ParameterVector,
    places: np.ndarray,
    compile_kwargs: dict[str, Any] | None = None,
) -> Iterator[Seen]:
    """The effects of a likelihood that is non-linear in its parameters.

    `groups` have the compiled shared values of `graphs`.  `places`, (m, d), are public points at
    which derivatives are looked at: draws from the prior.

    Yields those of the merged graphs, then those of `graphs` as they are cut.  Yields none where no
    shared value is non-linear in several parameters, or where effects are redundant (more of them
    than parameters, functions of each other).
    """
    known = _known(groups, places)
    together = tuple(merged(graph) for graph in graphs)
    candidates = [tuple(graphs)]
    if any(new is not old for new, old in zip(together, graphs, strict=True)):
        phis = {cut.phi: None for graph in together for cut in graph.cuts}
        new = [phi for phi in phis if phi not in known]
        known |= _evaluated(new, parameters, places, compile_kwargs)
        candidates.insert(0, together)
    for candidate in candidates:
        seen = _seen(candidate, known, parameters, places, compile_kwargs)
        if seen is not None:
            yield seen


@dataclass(frozen=True)
class _Shape:
    """The shape of a shared value, and whether it is non-linear in several parameters."""

    shape: tuple[int, ...]
    mixed: bool


def _known(groups: Sequence[RowGroup], places: np.ndarray) -> dict[Variable, _Shape]:
    """What the compiled functions of groups tell of shared values."""
    found = {}
    for group in groups:
        at = [group.functions.shared(theta) for theta in places]
        for k, cut in enumerate(group.functions.ordered):
            varies = k in group.functions.varying
            mixed = varies and _mixes([jacobians[k] for _, jacobians in at])
            found[cut.phi] = _Shape(np.shape(at[0][0][k]), mixed)
    return found


def _evaluated(
    phis: Sequence[Variable],
    parameters: ParameterVector,
    places: np.ndarray,
    compile_kwargs: dict[str, Any] | None,
) -> dict[Variable, _Shape]:
    """The same for differentiable shared values that no group has."""
    theta = parameters.theta
    values = parameters.substitute(phis)
    matrices = [jacobian_of(value, theta) for value in values]
    function = compile_parameter_function([theta], [*values, *matrices], compile_kwargs)
    at = [function(place) for place in places]
    return {
        phi: _Shape(np.shape(at[0][k]), _mixes([row[len(phis) + k] for row in at]))
        for k, phi in enumerate(phis)
    }


def _mixes(jacobians: Sequence[np.ndarray | None]) -> bool:
    """Whether some entry of a shared value is non-linear in several parameters, at some places."""
    matrices = np.array(jacobians)
    largest = np.abs(matrices).max(axis=(0, 2), initial=0.0)
    bends = ~(np.ptp(matrices, axis=0).max(axis=1, initial=0.0) <= _LINEAR * largest)
    several = np.any(np.count_nonzero(matrices, axis=2) > 1, axis=0)
    return bool(np.any(several & bends))


def _seen(
    graphs: Sequence[RowGraph],
    known: Mapping[Variable, _Shape],
    parameters: ParameterVector,
    places: np.ndarray,
    compile_kwargs: dict[str, Any] | None,
) -> Seen | None:
    first = _equal([cut.phi for graph in graphs for cut in graph.cuts])
    leaves: dict[Variable, Variable] = {}  # shared value -> the input that takes its place
    direct: list[Variable] = []
    for graph in graphs:
        for cut in graph.cuts:
            phi = first[cut.phi]
            if known[cut.phi].mixed and phi not in leaves:
                kind = pt.TensorType("float64", shape=known[cut.phi].shape)
                leaves[phi] = kind(name=f"effect{len(leaves)}")
        behind = ancestors_without_shapes([c.phi for c in graph.cuts if not known[c.phi].mixed])
        direct += [v for v in parameters.values if v in behind and v not in direct]
    if not leaves:
        return None
    shapes = dict(zip(parameters.values, parameters.shapes, strict=True))
    inputs = [*direct, *leaves.values()]
    vector = ParameterVector.of(
        inputs, [*[shapes[v] for v in direct], *[leaf.type.shape for leaf in leaves.values()]]
    )
    effects = (*direct, *leaves)
    flat = _flat(effects, parameters)
    function = compile_parameter_function([parameters.theta], flat, compile_kwargs)
    if not _independent(function, vector.size, places):
        return None
    rebuilt = tuple(
        replace(
            graph,
            cuts=tuple(replace(cut, phi=leaves.get(first[cut.phi], cut.phi)) for cut in graph.cuts),
        )
        for graph in graphs
    )
    n_direct = sum(int(np.prod(shapes[v], dtype=int)) for v in direct)
    return Seen(effects, vector, rebuilt, n_direct, lambda theta: np.asarray(function(theta)))


def _equal(phis: Sequence[Variable]) -> dict[Variable, Variable]:
    """For each shared value the first of those that are computed alike.

    Likelihoods that share parameters, and predictors that take two columns of one matrix, have a
    copy each.
    """
    graph = FunctionGraph(outputs=list(phis), clone=True)
    MergeOptimizer().rewrite(graph)
    firsts: dict[Variable, Variable] = {}
    for phi, merged_phi in zip(phis, graph.outputs, strict=True):
        firsts.setdefault(merged_phi, phi)
    return {p: firsts[m] for p, m in zip(phis, graph.outputs, strict=True)}


def _independent(
    function: Callable[[np.ndarray], np.ndarray], size: int, places: np.ndarray
) -> bool:
    """Whether effects can be varied one by one, almost everywhere."""
    d = places.shape[1]
    if size > d:
        return False
    widths = places.std(axis=0)
    for theta in places:
        columns = [
            function(theta + 1e-6 * w * e) - function(theta - 1e-6 * w * e)
            for w, e in zip(widths, np.eye(d), strict=True)
        ]
        jacobian = np.array(columns).T
        norms = np.linalg.norm(jacobian, axis=1)
        if not (np.isfinite(jacobian).all() and norms.all()):
            return False
        values = np.linalg.svd(jacobian / norms[:, None], compute_uv=False)
        if values[-1] < _SINGULAR * values[0]:
            return False
    return True
