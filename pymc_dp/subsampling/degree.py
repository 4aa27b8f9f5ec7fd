"""Whether a value is a polynomial of low degree in the parameters, as its graph shows.

Second derivatives would show it as well, but PyTensor 2.38 does not come to an end of simplifying
those of a simplex transform.
"""

from __future__ import annotations

import math

import numpy as np
from pytensor import scalar
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, Join, MakeVector
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor

from pymc_dp.base.compat import AdvancedSubtensor1, SolveTriangular

#: Entries of the first input, moved about.
_VIEWS: tuple[type, ...] = (
    AdvancedSubtensor,
    Alloc,
    CheckAndRaise,
    DimShuffle,
    Reshape,
    SpecifyShape,
    Subtensor,
    *((AdvancedSubtensor1,) if AdvancedSubtensor1 is not None else ()),
)


def degree_of(value: Variable, theta: Variable) -> float:
    """A bound of the degree of `value` as a polynomial in `theta`; infinite if none is seen."""
    degrees: dict[Variable, float] = {theta: 1.0}
    for node in toposort([value]):
        inputs = [degrees.get(x, 0.0) for x in node.inputs]
        degree = _degree(node, inputs) if any(inputs) else 0.0
        degrees.update(dict.fromkeys(node.outputs, degree))
    return degrees.get(value, 0.0)


def _degree(node: Apply, inputs: list[float]) -> float:
    """The degree of the outputs of a node, from those of its inputs; not all are 0."""
    op = node.op
    if isinstance(op, Shape | Shape_i):  # a choice of entries changes the shape
        return 0.0 if math.isfinite(max(inputs)) else math.inf
    if isinstance(op, Elemwise):
        return _of_scalars(op.scalar_op, node, inputs)
    if isinstance(op, CAReduce):
        return inputs[0] if isinstance(op.scalar_op, scalar.Add) else math.inf
    if isinstance(op, Dot):
        return sum(inputs)
    if isinstance(op, Join | MakeVector):
        return max(inputs)
    if isinstance(op, _VIEWS):
        return inputs[0] if not any(inputs[1:]) else math.inf
    core = op.core_op if isinstance(op, Blockwise) else op
    if isinstance(core, SolveTriangular):
        return inputs[1] if not inputs[0] else math.inf
    if isinstance(core, Dot):
        return sum(inputs)
    return math.inf


def _of_scalars(op: scalar.ScalarOp, node: Apply, inputs: list[float]) -> float:
    """The same for an elementwise operation."""
    if isinstance(op, scalar.Add | scalar.Sub | scalar.Neg | scalar.Identity):
        return max(inputs)
    if isinstance(op, scalar.Cast):
        return inputs[0] if str(node.outputs[0].type.dtype) == "float64" else math.inf
    if isinstance(op, scalar.Mul):
        return sum(inputs)
    if isinstance(op, scalar.Sqr):
        return 2.0 * inputs[0]
    if isinstance(op, scalar.TrueDiv):
        return inputs[0] if not inputs[1] else math.inf
    if isinstance(op, scalar.Second):
        return inputs[1] if math.isfinite(inputs[0]) else math.inf
    if isinstance(op, scalar.Switch):
        return max(inputs[1:]) if not inputs[0] else math.inf
    if isinstance(op, scalar.Pow):
        return inputs[0] * _power(node.inputs[1]) if not inputs[1] else math.inf
    return math.inf


def _power(exponent: Variable) -> float:
    """A constant whole exponent, from 1 on; infinity for any other."""
    while exponent.owner is not None and isinstance(exponent.owner.op, DimShuffle):
        [exponent] = exponent.owner.inputs
    if isinstance(exponent, Constant) and np.size(exponent.data) == 1:
        power = float(np.asarray(exponent.data).item())
        if power >= 1 and power.is_integer():
            return power
    return math.inf
