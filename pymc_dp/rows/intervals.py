"""Interval arithmetic over row graphs: what a value can be when the data lie within public bounds.

Every variable is enclosed in an array of intervals, from the inputs on.  The enclosure is valid
for all values of the inputs within theirs, and exact where an input occurs once (Moore, Kearfott &
Cloud 2009, Introduction to Interval Analysis, ch. 5).  Rounding is not directed outwards: an end
may be off by the rounding errors of its own computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytensor
from pytensor import scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.basic import Alloc, Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor

from pymc_dp.base.compat import AdvancedSubtensor1
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.ancestry import SHAPE_OPS
from pymc_dp.records.bounds import Interval


class NoEnclosure(Exception):
    """No bounds follow, for the public reason given."""


_INCREASING = (
    ps.Add,
    ps.AND,
    ps.Ceil,
    ps.Clip,
    ps.Erf,
    ps.Exp,
    ps.Expm1,
    ps.Floor,
    ps.Identity,
    ps.Log,
    ps.Log1p,
    ps.OR,
    ps.ScalarMaximum,
    ps.ScalarMinimum,
    ps.Second,
    ps.Sigmoid,
    ps.Sign,
    ps.Softplus,
    ps.Sqrt,
    ps.Tanh,
    ps.Trunc,
)
_PLACING = (
    Alloc,
    DimShuffle,
    Join,
    MakeVector,
    Reshape,
    ScalarFromTensor,
    SpecifyShape,
    Subtensor,
    TensorFromScalar,
    AdvancedSubtensor,
    *((AdvancedSubtensor1,) if AdvancedSubtensor1 is not None else ()),
)
_SUMS = (ps.Add, ps.AND, ps.OR, ps.ScalarMaximum, ps.ScalarMinimum)


def enclose(outputs: Sequence[Variable], given: Mapping[Variable, Interval]) -> list[Interval]:
    """Enclosures of graphs of elementwise operations, indices by constants, joins and sums.

    `given` are the finite intervals of their inputs.  A result is not a number, or infinite, where
    a computation with known values overflows.  An operation without a rule here raises NoEnclosure.
    """
    found: dict[Variable, Interval] = dict(given)
    with np.errstate(all="ignore"):
        for node in toposort(list(outputs), blockers=list(given)):
            inputs = [_value(x, found) for x in node.inputs]
            for output, interval in zip(node.outputs, _node(node, inputs), strict=True):
                found[output] = interval
    return [_value(x, found) for x in outputs]


def product(a: Interval, b: Interval) -> Interval:
    """The products of intervals, elementwise."""
    corners = np.broadcast_arrays(a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1])
    return np.min(corners, axis=0), np.max(corners, axis=0)


def _value(x: Variable, found: Mapping[Variable, Interval]) -> Interval:
    if x in found:
        return found[x]
    if isinstance(x, Constant):
        return x.data, x.data
    raise NoEnclosure(f"Bounds do not follow for {x.name or x.type}.")


def _known(interval: Interval) -> bool:
    return interval[0] is interval[1]


def _node(node: Apply, inputs: list[Interval]) -> list[Interval]:
    if all(map(_known, inputs)) or isinstance(node.op, SHAPE_OPS):
        return [(x, x) for x in _perform(node, [x for x, _ in inputs])]
    if isinstance(node.op, Elemwise):
        lower, upper = _elemwise(node, inputs)
        dtype = node.outputs[0].type.dtype
        interval = np.asarray(lower, dtype=dtype), np.asarray(upper, dtype=dtype)
    elif isinstance(node.op, _PLACING) and (
        isinstance(node.op, Join | MakeVector) or all(map(_known, inputs[1:]))
    ):
        interval = _ends(node, inputs)
    elif isinstance(node.op, CAReduce) and isinstance(node.op.scalar_op, _SUMS):
        interval = _ends(node, inputs)
    else:
        raise NoEnclosure(f"Bounds do not follow through the operation {node.op}.")
    if np.isnan(interval[0]).any() or np.isnan(interval[1]).any():
        raise NoEnclosure(f"{node.op} may be evaluated where it is not defined, or overflows.")
    return [interval]


def _perform(node: Apply, inputs: Sequence[Any]) -> list[np.ndarray]:
    symbols = [x if isinstance(x, Constant) else x.type() for x in node.inputs]
    clone = node.clone_with_new_inputs(symbols, strict=False)
    chosen = [k for k, x in enumerate(node.inputs) if not isinstance(x, Constant)]
    function = pytensor.function(
        [symbols[k] for k in chosen],
        clone.outputs,
        mode=INTERPRETED,
        on_unused_input="ignore",
    )
    return function(*[inputs[k] for k in chosen])


def _ends(node: Apply, inputs: list[Interval]) -> Interval:
    """The ends of an operation that increases in all of its inputs."""
    return tuple(_perform(node, [x[end] for x in inputs])[0] for end in (0, 1))  # type: ignore


# -- elementwise ----------------------------------------------------------------------------------


def _elemwise(node: Apply, inputs: list[Interval]) -> Interval:
    op = node.op.scalar_op
    if isinstance(op, _INCREASING):
        return _ends(node, inputs)
    if isinstance(op, ps.Cast):
        after = np.dtype(node.outputs[0].type.dtype)
        if after.kind == "f" or (after.kind in "iu" and _fits(inputs[0], after)):
            return _ends(node, inputs)
    for kind, rule in _RULES:
        if isinstance(op, kind):
            return rule(*inputs)
    raise NoEnclosure(f"Bounds do not follow through the operation {node.op}.")


def _fits(x: Interval, dtype: np.dtype) -> bool:
    """Whether a cast to an integer type, which cuts off decimals, cannot wrap around."""
    info = np.iinfo(dtype)
    least, most = np.min(x[0]), np.max(x[1])
    return bool(least >= max(info.min, -(2**53)) and most <= min(info.max, 2**53))


def _quotient(x: Interval, y: Interval) -> Interval:
    if np.any((y[0] <= 0) & (y[1] >= 0)):
        raise NoEnclosure("A denominator may be 0.")
    return product(x, (1.0 / y[1], 1.0 / y[0]))


def _absolute(x: Interval) -> Interval:
    ends = np.abs(x[0]), np.abs(x[1])
    least = np.where((x[0] <= 0) & (x[1] >= 0), 0, np.minimum(*ends))
    return least, np.maximum(*ends)


def _square(x: Interval) -> Interval:
    lower, upper = _absolute(x)
    return lower * lower, upper * upper


def _power(x: Interval, exponent: Interval) -> Interval:
    if not _known(exponent):
        raise NoEnclosure("An exponent depends on data.")
    k = np.asarray(exponent[0], dtype="float64")
    if np.all(k == 1):
        return x
    if np.all(k == 2):
        return _square(x)
    if np.any(x[0] < 0) or (np.any(k < 0) and np.any(x[0] <= 0)):
        raise NoEnclosure("A power of a number that may be negative, or 0.")
    ends = np.broadcast_arrays(np.power(x[0] * 1.0, k), np.power(x[1] * 1.0, k))
    return np.minimum(*ends), np.maximum(*ends)


def _switch(condition: Interval, x: Interval, y: Interval) -> Interval:
    true = (condition[0] > 0) | (condition[1] < 0)
    false = (condition[0] == 0) & (condition[1] == 0)
    return (
        np.where(true, x[0], np.where(false, y[0], np.minimum(x[0], y[0]))),
        np.where(true, x[1], np.where(false, y[1], np.maximum(x[1], y[1]))),
    )


def _equal(x: Interval, y: Interval) -> Interval:
    same = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    return same, (x[0] <= y[1]) & (y[0] <= x[1])


def _not(x: Interval) -> Interval:
    return ~np.asarray(x[1], dtype=bool), ~np.asarray(x[0], dtype=bool)


def _never(x: Interval) -> Interval:
    """The enclosure of ``isnan`` and ``isinf``: the ends of all intervals are checked."""
    if not (np.isfinite(x[0]).all() and np.isfinite(x[1]).all()):
        raise NoEnclosure("A value may be infinite.")
    return np.zeros(np.shape(x[0]), dtype=bool), np.zeros(np.shape(x[0]), dtype=bool)


_RULES: tuple[tuple[type | tuple[type, ...], Callable[..., Interval]], ...] = (
    (ps.Neg, lambda x: (-x[1], -x[0])),
    (ps.Sub, lambda x, y: (x[0] - y[1], x[1] - y[0])),
    (ps.Mul, lambda *factors: reduce(product, factors)),
    (ps.TrueDiv, _quotient),
    (ps.Reciprocal, lambda x: _quotient((np.ones(()), np.ones(())), x)),
    (ps.Abs, _absolute),
    (ps.Sqr, _square),
    (ps.Pow, _power),
    (ps.Switch, _switch),
    (ps.LT, lambda x, y: (x[1] < y[0], x[0] < y[1])),
    (ps.GT, lambda x, y: (y[1] < x[0], y[0] < x[1])),
    (ps.LE, lambda x, y: (x[1] <= y[0], x[0] <= y[1])),
    (ps.GE, lambda x, y: (y[1] <= x[0], y[0] <= x[1])),
    (ps.EQ, _equal),
    (ps.NEQ, lambda x, y: _not(_equal(x, y))),
    (ps.Invert, _not),
    ((ps.IsNan, ps.IsInf), _never),
)
