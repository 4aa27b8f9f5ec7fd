"""The one scalar linear predictor through which all parameters reach a row, if there is one."""

from __future__ import annotations

from collections.abc import Callable

from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.scalar import Add, Cast, Mul, Neg, Sub, TrueDiv
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Reshape, SpecifyShape

from pymc_dp.rows.ancestry import ancestors_without_shapes
from pymc_dp.rows.cuts import RowGraph


def _affine_inputs(variable: Variable, moving: Callable[[Variable], bool]) -> list[Variable] | None:
    """The inputs in which a value is affine, row by row; None if it is not."""
    node = variable.owner
    if node is None:
        return None
    depends = [x for x in node.inputs if moving(x)]
    op = node.op
    if isinstance(op, Elemwise):
        scalar = op.scalar_op
        linear = (
            isinstance(scalar, Add | Sub | Neg)
            or (isinstance(scalar, Mul) and len(depends) == 1)
            or (isinstance(scalar, TrueDiv) and not moving(node.inputs[1]))
            or (isinstance(scalar, Cast) and variable.type.dtype == "float64")
        )
        return depends if linear else None
    if isinstance(op, CAReduce):
        axes = None if op.axis is None else {a % node.inputs[0].type.ndim for a in op.axis}
        linear = isinstance(op.scalar_op, Add) and axes is not None and 0 not in axes
        return depends if linear else None
    if isinstance(op, DimShuffle | Reshape | SpecifyShape | Alloc) and depends == node.inputs[:1]:
        return depends
    return None


def linear_predictor(graph: RowGraph) -> Variable | None:
    """The variable, affine in the cuts, behind which all of them stand.

    It has shape (rows,) and double precision, and is as near to the log-likelihood as there is one.
    None if the cuts reach the log-likelihood in another way as well, or through operations that are
    not elementwise.
    """
    etas = {cut.eta for cut in graph.cuts}
    moves: dict[Variable, bool] = {}
    affine: dict[Variable, bool] = {}
    depth: dict[Variable, int] = {}

    def moving(x: Variable) -> bool:
        if x not in moves:
            moves[x] = x in etas or not etas.isdisjoint(ancestors_without_shapes([x]))
        return moves[x]

    def is_affine(x: Variable) -> bool:
        if x not in affine:
            inputs = [] if x in etas else _affine_inputs(x, moving)
            affine[x] = inputs is not None and all(is_affine(y) for y in inputs)
        return affine[x]

    def deep(x: Variable) -> int:
        if x not in depth:
            depth[x] = 0 if x.owner is None else 1 + max(map(deep, x.owner.inputs), default=0)
        return depth[x]

    ends: set[Variable] = set()
    seen: set[Variable] = set()
    stack = [graph.loglik]
    while stack:
        x = stack.pop()
        if x in seen or not moving(x):
            continue
        seen.add(x)
        if is_affine(x):
            ends.add(x)
        elif x.owner is None or not isinstance(x.owner.op, Elemwise | DimShuffle | Alloc):
            return None
        else:
            stack.extend(x.owner.inputs)
    # several affine values: go down to the one that they have in common
    while len(ends) > 1:
        last = max(ends, key=deep)
        if last in etas:
            return None
        ends.remove(last)
        ends.update(x for x in last.owner.inputs if moving(x))
    for x in ends:
        if x.type.ndim == 1 and x.type.dtype == "float64":
            [rest] = clone_replace([graph.loglik], {x: x.type()}, rebuild_strict=False)
            return x if etas.isdisjoint(ancestors([rest])) else None
    return None
