"""Whether values have kinks or jumps in the parameters, which derivatives at a point do not show.

The logarithm of a Laplace density has the second derivative 0 wherever it has one, and sgn(theta)
the first: neither is linear.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytensor import scalar
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.sort import SortOp

__all__ = ["has_kinks"]

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


def has_kinks(values: Sequence[Variable], theta: Variable) -> bool:
    """Whether an operation on the way from `theta` to `values` bends, jumps or chooses."""
    depend = {theta}
    for node in toposort(list(values)):
        if isinstance(node.op, Shape | Shape_i) or depend.isdisjoint(node.inputs):
            continue
        depend.update(node.outputs)
        # conditions and places are no floating-point numbers
        chooses = any(not str(x.type.dtype).startswith("float") for x in node.outputs)
        bends = isinstance(node.op, Elemwise | CAReduce) and isinstance(node.op.scalar_op, _BENDS)
        if chooses or bends or isinstance(node.op, SortOp):
            return True
    return False
