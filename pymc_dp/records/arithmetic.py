"""Arithmetic of rows that gives a number for every record, the same with every backend.

Python refuses negative powers of integers and integers made of NaN, with a message that may hold
the value.  Compiled code raises for negative integer powers of 0, also a real 0, and the processor
stops it when the least integer is divided by -1.  Such an error of one record, after a charge,
would tell of it: :func:`without_errors` puts operations that are defined everywhere in their place.

PyTensor gives products of integers their own type.  Whether large ones wrap, and whether the sum of
two truth values is 1 or 2, differs between backends and fused loops (:func:`without_wrapping`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pymc.logprob.abstract import MeasurableOp
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.traversal import toposort
from pytensor.scalar.basic import Abs, Add, Cast, IntDiv, Invert, Mod, Mul, Neg, Pow, Sqr, Sub
from pytensor.tensor.basic import Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.rewriting.ofg import inline_ofg_node

from pymc_dp.errors import NotFactorizable


class _ToInteger(Op):
    """Real numbers as integers: cut off, the nearest one where out of range, the least for NaN."""

    __props__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def make_node(self, x: Variable) -> Apply:
        return Apply(self, [x], [x.type.clone(dtype=self.dtype)()])

    def perform(self, node: Apply, inputs: Sequence[np.ndarray], outputs: Any) -> None:
        x, limits = inputs[0], np.iinfo(self.dtype)
        if x.dtype.kind != "f":  # modulo 2^k, as in C
            outputs[0][0] = np.asarray(x.astype(self.dtype))
            return
        x = x.astype("float64")
        # the largest integer may round up to a number that is out of range itself
        above = x >= float(limits.max)
        inside = (x > float(limits.min)) & ~above
        found = np.where(inside, x, 0.0).astype(self.dtype)
        ends = (np.array(end, dtype=self.dtype) for end in (limits.max, limits.min))
        outputs[0][0] = np.where(inside, found, np.where(above, *ends))


def without_errors(outputs: Sequence[Variable], *, interpreted: bool) -> list[Variable]:
    """`outputs` with powers, integer quotients, remainders and casts defined for all values.

    Equal wherever Python gives a number that fits.  Integers to negative powers are cut off towards
    zero, 0 for a base of 0; a real 0 gives infinity.  Integer casts are replaced if `interpreted`.
    """
    defined: dict[Variable, Variable] = {}
    for node in toposort(outputs):
        inputs = [defined.get(x, x) for x in node.inputs]
        replacement = _replacement(node, inputs, interpreted)
        if replacement is not None:
            defined[node.outputs[0]] = replacement
        elif inputs != node.inputs:
            again = node.clone_with_new_inputs(inputs, strict=False)
            defined.update(zip(node.outputs, again.outputs, strict=True))
    return [defined.get(x, x) for x in outputs]


def _replacement(node: Apply, inputs: Sequence[Variable], interpreted: bool) -> Variable | None:
    dtype = getattr(node.outputs[0].type, "dtype", "")
    if not isinstance(node.op, Elemwise):
        return None
    scalar = node.op.scalar_op
    if isinstance(scalar, Pow) and dtype.startswith("float"):
        base, exponent = inputs
        if exponent.type.dtype[0] == "f" or never_negative(exponent):
            return None
        base, exponent = base.astype(dtype), exponent.astype("int64")
        # not base**float(exponent): LLVM makes that a call to a routine that need not be there
        found = base ** pt.abs(pt.maximum(exponent, np.iinfo("int64").min + 1))
        return pt.switch(exponent < 0, 1.0 / found, found).astype(dtype)
    if not dtype.startswith(("int", "uint")):
        return None
    if isinstance(scalar, Cast):
        return _ToInteger(dtype)(inputs[0]) if interpreted else None
    if not isinstance(scalar, IntDiv | Mod | Pow) or never_negative(inputs[1]):
        return None
    if isinstance(scalar, Pow):
        return _power(*inputs).astype(dtype)
    x, by = inputs
    safe = node.op(x, pt.switch(pt.eq(by, -1), 1, by))
    return pt.switch(pt.eq(by, -1), -safe, safe).astype(dtype)  # the remainder by 1 is 0


def _power(base: Variable, exponent: Variable) -> Variable:
    least = np.iinfo(exponent.type.dtype).min  # its modulus is out of range
    modulus = pt.abs(pt.maximum(exponent, least + 1))
    # 1/base is an integer for a base of 1 and -1 alone
    return pt.switch((exponent >= 0) | pt.eq(base, 1) | pt.eq(base, -1), base**modulus, 0)


def never_negative(x: Variable) -> bool:
    """Whether integers are known to be 0 or more: unsigned, or constant."""
    if x.type.dtype[0] in "ub":
        return True
    while x.owner is not None and isinstance(x.owner.op, DimShuffle):
        x = x.owner.inputs[0]
    return isinstance(x, Constant) and bool(np.min(x.data, initial=0) >= 0)


_GROWING = (Abs, Add, Mul, Neg, Pow, Sqr, Sub)  # may leave the range of a type of integers
_SINGLE = ("float16", "float32")


def is_discrete(variable: Variable) -> bool:
    """Whether a variable holds integers or truth values."""
    return getattr(variable.type, "dtype", "").startswith(("int", "uint", "bool"))


def is_float(variable: Variable) -> bool:
    """Whether a variable holds real numbers."""
    return getattr(variable.type, "dtype", "").startswith("float")


def without_wrapping(
    outputs: Sequence[Variable], what: str, *, single: bool = False
) -> list[Variable]:
    """`outputs` with arithmetic of integer arrays in double precision.

    Casts to integers cut off decimals, and keep what is out of range.  Single numbers, most of them
    lengths, stay integers; so do labels and random variables.  If `single`, arithmetic in float32
    is replaced too.  NotFactorizable, with `what`, refuses ``~`` on integers and ``+`` on booleans.
    """
    return _unwrapped(outputs, what, single, {}, set())


def _unwrapped(
    outputs: Sequence[Variable],
    what: str,
    single: bool,
    found: dict[Variable, Variable],
    done: set[Apply],
) -> list[Variable]:
    for node in toposort(outputs):
        if node in done or isinstance(node.op, RandomVariable | MeasurableOp):
            continue
        done.add(node)
        _refuse_confused(node, what)
        inputs = [found.get(x, x) for x in node.inputs]
        if isinstance(node.op, OpFromGraph) and any(map(is_discrete, node.inputs)):
            replaced = _unwrapped(inline_ofg_node(node), what, single, found, done)
        else:
            replaced = _in_double_precision(node, inputs, single)
            if not replaced and inputs != node.inputs:
                replaced = _with_inputs(node, inputs)
        found.update(zip(node.outputs, replaced, strict=False))
    return [found.get(x, x) for x in outputs]


def _refuse_confused(node: Apply, what: str) -> None:
    scalar = getattr(node.op, "scalar_op", None)
    if not isinstance(node.op, Elemwise):
        scalar = getattr(node.op, "core_op", node.op)
    dtype = getattr(node.outputs[0].type, "dtype", None)
    if isinstance(scalar, Invert) and dtype != "bool":
        raise NotFactorizable(
            f"{what} uses ~ (pt.invert) on integers, where ~x is -1 - x and never 0 for 0 and 1. "
            "Write 1 - x, or ~(x > 0); data that are True and False can be passed as such."
        )
    if isinstance(scalar, Add | Dot) and dtype == "bool":
        raise NotFactorizable(
            f"{what} adds True and False, which is a count or a logical or, depending on the "
            "backend of PyTensor. Write x.astype('int64') + y for a count, or x | y."
        )


def _in_double_precision(node: Apply, inputs: Sequence[Variable], single: bool) -> list[Variable]:
    """The outputs of arithmetic on integers, as real numbers; nothing for other operations."""
    op, out = node.op, node.outputs[0]
    if all(getattr(out.type, "broadcastable", ())):  # one number
        return []
    weak = _SINGLE if single else ()
    real = [
        x.astype("float64") if is_discrete(x) or getattr(x.type, "dtype", "") in weak else x
        for x in inputs
    ]
    whole = is_discrete(out) and out.type.dtype != "bool"
    if isinstance(op, Elemwise):
        scalar, [x, *_] = op.scalar_op, inputs
        if isinstance(scalar, Cast):
            if not whole or (is_discrete(x) and np.can_cast(x.type.dtype, out.type.dtype)):
                return []  # also casts to real numbers
            return [real[0] if is_discrete(x) else pt.trunc(x.astype("float64"))]
        mixed = out.type.dtype == "float64" and all(map(is_discrete, node.inputs))
        if not (out.type.dtype in weak or mixed or (whole and isinstance(scalar, _GROWING))):
            return []
        [found] = op.make_node(*real).outputs
        cut = whole and isinstance(scalar, Pow) and not never_negative(node.inputs[1])
        return [pt.trunc(found) if cut else found]
    if isinstance(op, CAReduce) and whole and isinstance(op.scalar_op, Add | Mul):
        reduce = pt.sum if isinstance(op.scalar_op, Add) else pt.prod
        return [reduce(real[0], axis=op.axis)]
    product = isinstance(getattr(op, "core_op", op), Dot) and whole
    if product or (isinstance(op, CumOp) and is_discrete(out)):
        return op.make_node(*real).outputs
    return []


def _with_inputs(node: Apply, inputs: Sequence[Variable]) -> list[Variable]:
    """The operation on real numbers, or on integers again where it takes no others."""
    before = [
        now if now is then else now.astype(then.type.dtype)
        for now, then in zip(inputs, node.inputs, strict=True)
    ]
    attempts = [before]
    if isinstance(node.op, Blockwise | Dot | Elemwise | Join):
        attempts.insert(0, list(inputs))
    elif not isinstance(node.op, HasInnerGraph):
        attempts.insert(0, [inputs[0], *before[1:]])  # labels and lengths come after the array
    for attempt in attempts:
        try:
            return node.op.make_node(*attempt).outputs
        except (AssertionError, IndexError, NotImplementedError, TypeError, ValueError):
            continue
    raise AssertionError(f"{node.op} was made with the types of these inputs before.")
