"""What the value of a variable is computed from: values behind it, but not mere shapes.

Shapes are public, so a graph that uses an array only for its size does not depend on its entries.
Shapes computed from entries (``x[x > 0].shape[0]``) are looked behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.ops import FromFunctionOp
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Cast, Second
from pytensor.tensor.basic import Alloc, Join, MakeVector, get_underlying_scalar_constant_value
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
)
from pytensor.tensor.type import TensorType

from pymc_dp.base.compat import AdvancedIncSubtensor1, AdvancedSubtensor1, subtensor_indices
from pymc_dp.base.threads import INTERPRETED

SHAPE_OPS = (Shape, Shape_i)
_SHAPES_FROM_SHAPES = (  # the shape of the result follows from the shapes of the inputs
    CAReduce,
    CheckAndRaise,
    CumOp,
    DimShuffle,
    Dot,
    Elemwise,
    Join,
    LogSoftmax,
    Softmax,
    SpecifyShape,
)
#: Entries picked by arrays of labels.
TAKES = (AdvancedSubtensor, *((AdvancedSubtensor1,) if AdvancedSubtensor1 is not None else ()))
_SETS = (  # an array in which some entries are set or added to
    IncSubtensor,
    AdvancedIncSubtensor,
    *((AdvancedIncSubtensor1,) if AdvancedIncSubtensor1 is not None else ()),
)


def ancestors_without_shapes(variables: Iterable[Variable]) -> set[Variable]:
    """All ancestors on whose values `variables` depend, those inside wrapped graphs included."""
    seen: set[tuple[Variable, bool]] = set()
    stack = [(variable, True) for variable in variables]
    while stack:
        item = stack.pop()
        if item not in seen:
            seen.add(item)
            stack.extend(_behind_value(item[0]) if item[1] else _behind_shape(item[0]))
    return {variable for variable, by_value in seen if by_value}


def _behind_value(variable: Variable) -> Iterator[tuple[Variable, bool]]:
    """What a value is computed from, each with whether by its value or by its shape."""
    node = variable.owner
    if node is None:
        return
    op = node.op
    if isinstance(op, SHAPE_OPS):
        yield node.inputs[0], False
        return
    is_fill = isinstance(op, Elemwise) and isinstance(op.scalar_op, Second)
    for k, x in enumerate(node.inputs):
        yield x, not (is_fill and k == 0)
    for inner in (op, getattr(op, "core_op", None)):
        if isinstance(inner, HasInnerGraph):
            yield from ((x, True) for x in inner.inner_outputs)


def _behind_shape(variable: Variable) -> Iterator[tuple[Variable, bool]]:
    """What a shape is computed from, each with whether by its value or by its shape."""
    node = variable.owner
    # a static shape says nothing: it may be folded from values
    if node is None or not getattr(variable.type, "ndim", 1):
        return
    op, inputs = node.op, node.inputs
    if isinstance(op, _SHAPES_FROM_SHAPES) or (
        isinstance(op, Blockwise) and set().union(*op.outputs_sig) <= set().union(*op.inputs_sig)
    ):
        yield from ((x, False) for x in inputs)
    elif isinstance(op, _SETS):
        yield inputs[0], False
    elif isinstance(op, Alloc):
        yield from ((x, True) for x in inputs[1:])
    elif isinstance(op, Subtensor | Reshape):
        yield inputs[0], False
        yield from ((x, True) for x in inputs[1:])
    elif isinstance(op, TAKES):
        yield inputs[0], False
        for x in inputs[1:]:
            counts = isinstance(x.type, TensorType) and x.type.dtype != "bool"
            yield x, not counts
    else:  # unknown: it may depend on the entries
        yield from ((x, True) for x in inputs)


def array_of(source: Variable) -> np.ndarray:
    """The array behind a constant or shared variable."""
    if isinstance(source, SharedVariable):
        return source.get_value(borrow=True)
    return source.data


def share_memory(a: object, b: object) -> bool:
    """Whether two arrays have an entry in common; if that is hard to tell, they count as such."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return a is b
    try:
        return np.shares_memory(a, b, max_work=10**6)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def is_data(variable: Variable) -> bool:
    """True for a ``pm.Data``: a shared variable that is not a random number generator."""
    return isinstance(variable, SharedVariable) and not isinstance(variable.type, RandomType)


def is_long_constant(variable: Variable, length: int) -> bool:
    """True for a constant array of `length` entries or more, which no name can declare public."""
    return isinstance(variable, Constant) and _is_long(variable, length)


def is_long_array(variable: Variable, length: int) -> bool:
    """True for a constant or a ``pm.Data`` of `length` entries or more."""
    return is_long_constant(variable, length) or (is_data(variable) and _is_long(variable, length))


def _is_long(source: Variable, length: int) -> bool:
    shape = getattr(array_of(source), "shape", ())  # of a sparse matrix too, which has no entries
    return max(math.prod(shape) if shape else 0, max(shape, default=0)) >= length


def hides_code(variables: Iterable[Variable]) -> str | None:
    """The name of an operation behind `variables` whose code the graph does not show.

    Python closures may hold data, as in ``pm.CustomDist``; PyMC's ODE holds the times of values.
    """
    for variable in ancestors(variables):
        if variable.owner is None:
            continue
        op = variable.owner.op
        module = type(op).__module__
        known = module.split(".")[0] in ("pytensor", "pymc") and module != "pymc.ode.ode"
        if not known or isinstance(op, FromFunctionOp):
            return str(op)
    return None


def without_casts(value: Variable, passed: tuple[type, ...] = (SpecifyShape,)) -> Variable:
    """What a variable was before casts, and operations of the types `passed`."""
    while value.owner is not None:
        op = value.owner.op
        cast = isinstance(op, Elemwise) and isinstance(op.scalar_op, Cast)
        if not (cast or isinstance(op, passed)):
            break
        value = value.owner.inputs[0]
    return value


def data_behind(value: Variable) -> Variable | None:
    """The array behind an observed value, without PyMC's casts; None if the model computes it."""
    value = without_casts(value)
    return value if isinstance(value, Constant | SharedVariable) else None


def number(x: Variable) -> float | None:
    """The value of a constant that is one number, whatever its axes."""
    try:
        return float(get_underlying_scalar_constant_value(x))
    except NotScalarConstantError:
        return None


def fixed_shapes(
    outputs: Sequence[Variable],
    parameters: Mapping[Variable, tuple[int, ...]],
    public: Iterable[Variable],
    rows: Iterable[Variable] = (),
) -> list[Variable]:
    """Sizes and public ``pm.Data`` as numbers, so that no compiled function refers to the model.

    Otherwise data would be reached for their shape, and ``pm.set_data`` change compiled functions.
    `parameters` are value variables with shapes; sizes of `rows` are known when a function runs.
    """
    now: dict[Variable, Variable] = {
        variable: variable.type.make_constant(variable.get_value())
        for variable in public
        if is_data(variable)
    }
    outputs = _picked(clone_replace(list(outputs), now))
    rows = set(rows)
    sizes: dict[Variable, Variable] = {}
    for variable in ancestors(outputs):
        if variable.owner is None or not isinstance(variable.owner.op, SHAPE_OPS):
            continue
        op, [source] = variable.owner.op, variable.owner.inputs
        if not rows.isdisjoint(ancestors([source])):
            continue  # the size of a block
        shape = static_shape(source, parameters)
        size = shape if isinstance(op, Shape) else shape[op.i]
        sizes[variable] = pt.constant(np.asarray(size, dtype="int64"))
    return clone_replace(outputs, sizes, rebuild_strict=False)


def _picked(outputs: Sequence[Variable]) -> list[Variable]:
    """Entries of vectors that were made of numbers as these numbers: the others are not used."""
    found: dict[Variable, Variable] = {}
    for variable in ancestors(outputs):
        node = variable.owner
        if node is None or not isinstance(node.op, Subtensor):
            continue
        [index, *more] = subtensor_indices(node)
        vector = node.inputs[0].owner
        if more or vector is None or not isinstance(vector.op, MakeVector):
            continue
        index = index.data if isinstance(index, Constant) else index
        if isinstance(index, int | np.integer | np.ndarray):
            found[variable] = vector.inputs[int(index)].astype(variable.type.dtype)
    return clone_replace(list(outputs), found, rebuild_strict=False)


def counts_rows(what: str, source: Variable) -> str:
    """The message where `what` depends on the number of rows of `source`, which is private."""
    label = f"`{source.name}`" if source.name else "an array of the data"
    return (
        f"{what} depends on the number of rows of {label}, which is private under "
        "neighboring='add_or_remove_one' and with a privacy_unit. Use a public constant instead, "
        "or declare public data in PrivacyBudget(public=...)."
    )


def static_shape(
    variable: Variable, parameters: Mapping[Variable, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of a value of the full model, computed without reading any data."""
    if None not in variable.type.shape:
        return variable.type.shape
    roots = [v for v in ancestors([variable]) if v.owner is None and not isinstance(v, Constant)]
    blanks = [root.type() for root in roots]
    [copy] = clone_replace([variable], dict(zip(roots, blanks, strict=True)), rebuild_strict=False)
    function = pytensor.function(blanks, copy.shape, mode=INTERPRETED, on_unused_input="ignore")
    zeros = [
        np.zeros(
            parameters[root] if root in parameters else np.shape(array_of(root)),
            dtype=root.type.dtype,
        )
        for root in roots
    ]
    return tuple(int(size) for size in function(*zeros))
