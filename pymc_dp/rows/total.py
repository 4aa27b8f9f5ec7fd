"""Functions of rows that give a number for every record.

Python refuses to raise an integer to a negative power and to make an integer of what is no number,
with a message that may hold the value.  Compiled code raises for negative integer powers of 0, of a
real 0 as well, and the processor stops it when the least integer is divided by -1.  An error that
one record causes, after a charge, would tell of that record, so such operations are replaced by
ones that are defined everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import toposort
from pytensor.scalar.basic import Cast, IntDiv, Mod, Pow
from pytensor.tensor.elemwise import DimShuffle, Elemwise


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

    Equal wherever Python gives a number that fits.  An integer to a negative power is cut off
    towards zero; for a base of 0 it is 0.  A real 0 to a negative power is infinite.  Casts to
    integers are replaced if `interpreted`: compiled ones do not fail.
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
        return _real_power(base.astype(dtype), exponent.astype("int64"))
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


def _real_power(base: Variable, exponent: Variable) -> Variable:
    # not base**float(exponent): LLVM makes that a call to a routine that need not be there
    found = base ** pt.abs(pt.maximum(exponent, np.iinfo("int64").min + 1))
    return pt.switch(exponent < 0, 1.0 / found, found).astype(base.type.dtype)


def never_negative(x: Variable) -> bool:
    """Whether integers are known to be 0 or more: unsigned, or constant."""
    if x.type.dtype[0] in "ub":
        return True
    while x.owner is not None and isinstance(x.owner.op, DimShuffle):
        x = x.owner.inputs[0]
    return isinstance(x, Constant) and bool(np.min(x.data, initial=0) >= 0)
