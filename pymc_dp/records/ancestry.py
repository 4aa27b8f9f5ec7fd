"""What a value is computed from: values behind it, but not mere shapes; counts of rows among them.

Shapes are public, so a graph that uses an array only for its size does not depend on its entries.
Shapes computed from entries (``x[x > 0].shape[0]``) are looked behind.

Where the number of rows is private, it may enter neither a value nor the shape of a parameter, be
it as ``y.shape[0]``, the length of ``y[1:]``, or a sum of ``ones_like(y)`` (:class:`RowCounts`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.ops import FromFunctionOp
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Cast, Second
from pytensor.tensor.basic import (
    Alloc,
    Join,
    MakeVector,
    ScalarFromTensor,
    TensorFromScalar,
    get_underlying_scalar_constant_value,
)
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

from pymc_dp.base.compat import (
    AdvancedIncSubtensor1,
    AdvancedSubtensor1,
    advanced_indices,
    subtensor_indices,
)
from pymc_dp.base.threads import INTERPRETED

SHAPE_OPS = (Shape, Shape_i)
#: Entries picked by arrays of labels.
TAKES = (AdvancedSubtensor, *((AdvancedSubtensor1,) if AdvancedSubtensor1 is not None else ()))
#: Where operations call functions of the user, or hold data.
_RUN_ANY_CODE = ("pymc.ode.ode", "pytensor.link.jax.ops")
_SETS = (  # an array in which some entries are set or added to
    IncSubtensor,
    AdvancedIncSubtensor,
    *((AdvancedIncSubtensor1,) if AdvancedIncSubtensor1 is not None else ()),
)


def ancestors_without_shapes(variables: Iterable[Variable]) -> set[Variable]:
    """All ancestors on whose values `variables` depend, those inside wrapped graphs included."""
    seen: set[tuple[Variable, bool]] = set()
    stack = [(variable, True) for variable in variables]  # and whether its value matters
    while stack:
        item = stack.pop()
        variable, by_value = item
        if item in seen:
            continue
        seen.add(item)
        node = variable.owner
        if node is None:
            continue
        if not by_value:  # not the static shape: it may be folded from values
            behind = [x for place in _axes(variable) for x in _behind(*place)]
            stack.extend((x, axis is None) for x, axis in behind)
        elif isinstance(node.op, SHAPE_OPS):
            stack.append((node.inputs[0], False))
        else:
            is_fill = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Second)
            stack.extend((x, not (is_fill and k == 0)) for k, x in enumerate(node.inputs))
            stack.extend((x, axis is None) for x, axis in _inside(node))
    return {variable for variable, by_value in seen if by_value}


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
    stack = [variable.owner.op for variable in ancestors(variables) if variable.owner is not None]
    while stack:
        op = stack.pop()
        module = type(op).__module__
        known = module.split(".")[0] in ("pytensor", "pymc") and module not in _RUN_ANY_CODE
        if not known or isinstance(op, FromFunctionOp):
            return type(op).__name__  # its text may show what it holds
        if isinstance(op, HasInnerGraph):
            stack += [v.owner.op for v in ancestors(op.inner_outputs) if v.owner is not None]
        stack += [getattr(op, name) for name in ("core_op", "scalar_op") if hasattr(op, name)]
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
        "neighboring='add_or_remove_one' and with a privacy_unit, and that of made-up rows where "
        "the records are elsewhere. Use a public constant instead, or declare public data in "
        "PrivacyBudget(public=...)."
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


_Item = tuple[Variable, int | None]  # a variable, and which of its axes; None for its value

_ENTRY_BY_ENTRY = (  # an entry is computed from those at its place, whatever the lengths of axes
    CheckAndRaise,
    DimShuffle,
    Elemwise,
    MakeVector,
    ScalarFromTensor,
    TensorFromScalar,
)
_KEEPS_AXES = (*_SETS, CheckAndRaise, CumOp, LogSoftmax, Softmax, SpecifyShape)  # of the first


@dataclass(frozen=True, eq=False)
class RowCounts:
    """The numbers of rows of private arrays, which nothing may depend on.

    `public` are inputs with public values and shapes: parameters, what was declared, blocks of
    rows.  Constants of `length` entries or more are private.  `rows` are arrays known to hold rows,
    and on which axis (the first in other private arrays).  `lengths` of dims, constants too, count
    rows.
    """

    public: Collection[Variable]
    length: int
    rows: Mapping[Variable, int]
    lengths: Collection[Variable] = ()

    def behind(
        self, values: Iterable[Variable] = (), shapes: Iterable[Variable] = ()
    ) -> Variable | None:
        """A private array whose rows are counted by `values` or by shapes of `shapes`, or None."""
        containers = {v.container for v in self.public if isinstance(v, SharedVariable)}
        stack: list[_Item] = [(variable, None) for variable in values]
        stack += [item for variable in shapes for item in _axes(variable)]
        seen: set[_Item] = set()
        while stack:
            item = stack.pop()
            variable, axis = item
            if item in seen or variable in self.public:
                continue
            seen.add(item)
            if variable in self.lengths:
                return variable
            if variable.owner is not None:
                stack.extend(_behind(variable, axis))
            elif getattr(variable, "container", None) in containers:
                continue  # PyMC copies shared variables for initial values
            elif axis in (None, self.rows.get(variable, 0)) and self.may_hold_rows(variable):
                return variable
        return None

    def may_hold_rows(self, variable: Variable) -> bool:
        """Whether an input that is not public has an axis of rows, or may have one."""
        return variable in self.rows or is_data(variable) or is_long_constant(variable, self.length)

    def may_tell(self, variable: Variable) -> bool:
        """Whether a number of rows may be read off the type, or the value, of an input."""
        if variable in self.lengths:
            return True
        return getattr(variable.type, "ndim", 0) > 0 and self.may_hold_rows(variable)

    def inside(self, variables: Iterable[Variable]) -> Variable | None:
        """A private array whose rows are counted by graphs that operations behind `variables` wrap.

        PyTensor unfolds such graphs with lengths of constants as numbers, where nothing is seen.
        """
        asked: list[Variable] = []
        stack = list(variables)
        while stack:
            nodes = {v.owner for v in ancestors([stack.pop()]) if v.owner is not None}
            wrapped = [x for node in nodes for x, axis in _inside(node) if axis is None]
            stack.extend(wrapped)
            found = set(ancestors(wrapped))
            picked = [v for v in found if v.owner and isinstance(v.owner.op, Subtensor)]
            whole = [(v, v.owner.inputs[0].owner) for v in picked]
            parts = {v for v, node in whole if node and isinstance(node.op, Shape)}
            used = [x for v in found - parts if v.owner for x in v.owner.inputs]
            sizes = (x for x in (*used, *wrapped) if x.owner and isinstance(x.owner.op, SHAPE_OPS))
            asked += [*parts, *sizes]
        return self.behind(asked)


def _axes(variable: Variable, axes: Any = None) -> Iterator[_Item]:
    ndim = getattr(variable.type, "ndim", 0)
    return ((variable, k % ndim) for k in (range(ndim) if axes is None else axes))


def _all(node: Apply) -> Iterator[_Item]:
    for x in node.inputs:
        yield x, None
        yield from _axes(x)
    yield from _inside(node)


def _inside(node: Apply) -> Iterator[_Item]:
    """The results of a graph that an operation wraps; it may hold constants of its own."""
    for inner in (node.op, getattr(node.op, "core_op", None)):
        if isinstance(inner, HasInnerGraph):
            for x in inner.inner_outputs:
                yield x, None
                yield from _axes(x)


def _fixed(entry: Any) -> bool:
    """Whether an index, or an end of a slice, is not computed."""
    return isinstance(entry, Constant) or not isinstance(entry, Variable)


def _number(entry: Any) -> int | None:
    """A fixed index as a number; ``None`` where it is left out."""
    value = entry.data if isinstance(entry, Constant) else entry
    return None if value is None else int(value)


def _behind_value(variable: Variable) -> Iterator[_Item]:
    """What the entries of a variable are computed from."""
    node = variable.owner
    op, inputs = node.op, node.inputs
    if isinstance(op, Shape):
        yield from _axes(inputs[0])
    elif isinstance(op, Shape_i):
        yield inputs[0], op.i
    elif isinstance(op, Elemwise) and isinstance(op.scalar_op, Second):
        yield inputs[1], None
    elif isinstance(op, _ENTRY_BY_ENTRY):
        yield from ((x, None) for x in inputs)
    elif isinstance(op, Alloc | SpecifyShape):
        yield inputs[0], None
    elif isinstance(op, CAReduce | CumOp | LogSoftmax | Softmax):
        yield inputs[0], None
        yield from _axes(inputs[0], None if op.axis is None else np.atleast_1d(op.axis))
    elif isinstance(op, Dot):
        for x, contracted in zip(inputs, (-1, -2), strict=True):
            yield x, None
            yield x, max(x.type.ndim + contracted, 0)
    elif isinstance(op, Blockwise):
        for x in inputs:
            yield x, None
            yield from _axes(x, range(op.batch_ndim(node), x.type.ndim))
        yield from _inside(node)
    elif isinstance(op, Subtensor):
        yield from _behind_part(node)
    elif (labels := _labels(node)) is not None:
        yield from ((x, None) for x in (inputs[0], *labels))
        yield from _axes(inputs[0], range(len(labels)))  # negative labels count from the end
    else:
        yield from _all(node)


def _labels(node: Apply) -> list[Variable] | None:
    """The integer arrays that index the first axes of an array, if nothing else indexes it."""
    if not isinstance(node.op, TAKES):
        return None
    entries = advanced_indices(node)
    while entries and isinstance(entries[-1], slice) and entries[-1] == slice(None):
        entries.pop()
    whole = all(isinstance(x, Variable) and hasattr(x.type, "ndim") for x in entries)
    return entries if entries and whole and all(x.type.dtype != "bool" for x in entries) else None


def _sizes(vector: Variable) -> list[_Item] | None:
    """What each entry of a vector of sizes, or of other numbers, is computed from."""
    op = None if vector.owner is None else vector.owner.op
    if isinstance(op, Shape):
        return list(_axes(vector.owner.inputs[0]))
    return [(x, None) for x in vector.owner.inputs] if isinstance(op, MakeVector) else None


def _behind_part(node: Apply) -> Iterator[_Item]:
    """What a part of an array is computed from; for a vector of sizes, those that it picks."""
    x, entries = node.inputs[0], subtensor_indices(node)
    parts = [
        [entry.start, entry.stop, entry.step] if isinstance(entry, slice) else [entry]
        for entry in entries
    ]
    sizes = _sizes(x) if all(map(_fixed, parts[0])) else None
    if sizes is not None:
        numbers = [_number(part) for part in parts[0]]
        picked = slice(*numbers) if len(numbers) > 1 else slice(numbers[0], None)
        yield from sizes[picked] if len(numbers) > 1 else sizes[picked][:1]
        return
    yield from ((index, None) for index in node.inputs)
    for axis, ends in enumerate(parts):
        # where a part begins depends on the length of the axis if it is counted from its end
        begins = [ends[0], *ends[2:]]
        if not all(_fixed(end) and (_number(end) or 0) >= 0 for end in begins):
            yield x, axis


def _behind(variable: Variable, axis: int | None) -> Iterator[_Item]:
    """What the length of one axis of a variable, or its entries, are computed from."""
    if axis is None:
        yield from _behind_value(variable)
        return
    node = variable.owner
    op, inputs = node.op, node.inputs
    if isinstance(op, Elemwise):
        yield from ((x, axis) for x in inputs)
    elif isinstance(op, CumOp) and op.axis is None:  # of all entries, one after the other
        yield from _axes(inputs[0])
    elif isinstance(op, _KEEPS_AXES):
        yield inputs[0], axis
    elif isinstance(op, Shape | MakeVector):
        return
    elif isinstance(op, DimShuffle):
        if op.new_order[axis] != "x":
            yield inputs[0], op.new_order[axis]
    elif isinstance(op, CAReduce):
        ndim = inputs[0].type.ndim
        dropped = {a % ndim for a in np.atleast_1d(op.axis)}  # not all axes: the result has some
        yield inputs[0], [k for k in range(ndim) if k not in dropped][axis]
    elif isinstance(op, Alloc):
        yield inputs[1 + axis], None
    elif isinstance(op, Join):
        yield from ((x, axis if x.type.ndim else None) for x in inputs)
    elif isinstance(op, Dot):
        contracted = [x.type.ndim + k for x, k in zip(inputs, (-1, -2), strict=True)]
        kept = [
            (x, k)
            for x, without in zip(inputs, contracted, strict=True)
            for k in range(x.type.ndim)
            if k != max(without, 0)
        ]
        yield kept[axis]
    elif isinstance(op, Blockwise):
        yield from _behind_batch(node, node.outputs.index(variable), axis)
    elif isinstance(op, Reshape):
        yield from _behind_reshape(node, axis)
    elif isinstance(op, Subtensor):
        entries = subtensor_indices(node)
        entries += [slice(None)] * (inputs[0].type.ndim - len(entries))
        source = [k for k, entry in enumerate(entries) if isinstance(entry, slice)][axis]
        part = entries[source]
        yield inputs[0], source
        ends = (part.start, part.stop, part.step)
        yield from ((x, None) for x in ends if isinstance(x, Variable))
    elif (labels := _labels(node)) is not None:
        depth = max(x.type.ndim for x in labels)
        if axis >= depth:
            yield inputs[0], len(labels) + axis - depth
        else:  # labels broadcast
            at = [(x, axis - depth + x.type.ndim) for x in labels]
            yield from ((x, k) for x, k in at if k >= 0)
    else:
        yield from _all(node)


def _behind_batch(node: Apply, output: int, axis: int) -> Iterator[_Item]:
    """An axis over which an operation is repeated, or one that it takes over from its inputs."""
    op = node.op
    batch = op.batch_ndim(node)
    if axis < batch:
        yield from ((x, axis) for x in node.inputs)
        return
    label = op.outputs_sig[output][axis - batch]
    found = [
        (x, batch + k)
        for x, labels in zip(node.inputs, op.inputs_sig, strict=True)
        for k, other in enumerate(labels)
        if other == label
    ]
    yield from found or _all(node)


def _behind_reshape(node: Apply, axis: int) -> Iterator[_Item]:
    """One length of a reshaped array: given, computed, or what the others leave (-1)."""
    x, sizes = node.inputs
    size: Any = sizes
    if isinstance(sizes, Constant):
        size = int(sizes.data[axis])
    elif sizes.owner is not None and isinstance(sizes.owner.op, MakeVector):
        size = sizes.owner.inputs[axis]
    if isinstance(size, Variable):
        size = without_casts(size, (ScalarFromTensor, TensorFromScalar))
    if not _fixed(size):
        yield size, None
    if not _fixed(size) or (_number(size) or 0) < 0:  # what the other sizes leave
        yield sizes, None
        yield from _axes(x)
