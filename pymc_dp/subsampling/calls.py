"""Calls of compiled functions through their addresses, from compiled loops.

A function among the arguments of a loop costs half a millisecond in each call from Python, and the
type of the loop depends on it; an address is a number.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def call_address(typingctx: Any, address: Any, arguments: Any) -> Any:
    """Result, a float64, of the ``numba.cfunc`` at an address, from a tuple of its arguments."""

    def call(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in arguments.types]
        result = context.get_value_type(types.float64)
        pointer = builder.inttoptr(values[0], ir.FunctionType(result, kinds).as_pointer())
        return builder.call(pointer, cgutils.unpack_tuple(builder, values[1]))

    return types.float64(types.int64, arguments), call
