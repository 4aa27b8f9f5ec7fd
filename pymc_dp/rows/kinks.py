"""Whether values have kinks or jumps in the parameters, which derivatives at a point do not show.

The logarithm of a Laplace density has the second derivative 0 wherever it has one, and sgn(theta)
has the first derivative 0; neither is linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytensor import scalar
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.basic import get_underlying_scalar_constant_value
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.sort import SortOp

from pymc_dp.rows.integers import is_float

_BENDS = (
    scalar.Abs,
    scalar.Ceil,
    scalar.Clip,
    scalar.Floor,
    scalar.IntDiv,
    scalar.Mod,
    scalar.RoundHalfAwayFromZero,
    scalar.RoundHalfToEven,
    scalar.ScalarMaximum,
    scalar.ScalarMinimum,
    scalar.Sign,
    scalar.Trunc,
)


def has_bends(value: Variable, v: Variable, *, equalities: bool) -> bool:
    """Whether an operation on the way from `v` to `value` bends, or chooses by a range of `v`.

    `equalities` allows choices by ``==``: they are about single points, which have no say in a
    function that is continuous elsewhere.  Checks that parameters lie in their range (a rate is not
    negative, a probability not above 1) are no choices: what is impossible beyond 0 or 1 is seen at
    a few points.
    """
    #: What a range of v decides, and whether the range ends at 0 or 1.
    decided: dict[Variable, bool] = {}
    for node, operation, depend in _way([value], v):
        if isinstance(operation, _BENDS) or isinstance(node.op, SortOp):
            return True
        mine = [x for x in node.inputs if x in depend]
        if isinstance(operation, scalar.Switch) and node.inputs[0] in depend:
            condition, *branches = node.inputs
            checks = decided.get(condition, True) and any(map(_is_impossible, branches))
            if not equalities or (condition in decided and not checks):
                return True
        if not is_float(node.outputs[0]) and not isinstance(operation, scalar.EQ):
            compares, before = any(map(is_float, mine)), [decided[x] for x in mine if x in decided]
            if compares or before:
                ends = [number(x) in (0.0, 1.0) for x in node.inputs if x not in depend]
                decided[node.outputs[0]] = all(before) and (not compares or any(ends))
    return False


def _way(values: Sequence[Variable], v: Variable) -> Iterator[tuple[Apply, object, set[Variable]]]:
    """Nodes from `v` to `values`: each with its scalar operation, and what depends on v so far."""
    depend = {v}
    for node in toposort(list(values)):
        if isinstance(node.op, Shape | Shape_i) or depend.isdisjoint(node.inputs):
            continue
        depend.update(node.outputs)
        operation = node.op.scalar_op if isinstance(node.op, Elemwise | CAReduce) else None
        yield node, operation, depend


def number(x: Variable) -> float | None:
    """The value of a constant that is one number, whatever its axes."""
    try:
        return float(get_underlying_scalar_constant_value(x))
    except NotScalarConstantError:
        return None


def _is_impossible(log_density: Variable) -> bool:
    return number(log_density) == -math.inf


def has_kinks(values: Sequence[Variable], theta: Variable) -> bool:
    """Whether an operation on the way from `theta` to `values` bends, jumps or chooses."""
    for node, operation, _ in _way(values, theta):
        # conditions and places are no floating-point numbers
        chooses = not all(map(is_float, node.outputs))
        if chooses or isinstance(operation, _BENDS) or isinstance(node.op, SortOp):
            return True
    return False
