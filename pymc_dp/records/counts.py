"""Whether a value or a shape depends on how many rows the data have.

Where that is private, it may enter neither a value nor the shape of a parameter, be it as
``y.shape[0]``, the length of ``y[1:]``, or a sum of ``ones_like(y)``.  The walk follows values and
single axes (the number of columns is public).  An operation without a rule depends on all inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.traversal import ancestors
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Cast, Second
from pytensor.tensor.basic import Alloc, Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import Subtensor

from pymc_dp.base.compat import advanced_indices, subtensor_indices
from pymc_dp.records.ancestry import SHAPE_OPS, TAKES, is_data, is_long_constant

_Item = tuple[Variable, int | None]  # a variable, and which of its axes; None for its value

_ENTRY_BY_ENTRY = (  # an entry is computed from those at its place, whatever the lengths of axes
    CheckAndRaise,
    DimShuffle,
    Elemwise,
    MakeVector,
    ScalarFromTensor,
    TensorFromScalar,
)
_KEEPS_AXES = (CheckAndRaise, CumOp, LogSoftmax, Softmax, SpecifyShape)  # those of the first input


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
                stack.extend(_behind_value(variable) if axis is None else _behind(variable, axis))
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
        yield from _axes(inputs[0], None if op.axis is None else _as_tuple(op.axis))
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


def _behind(variable: Variable, axis: int) -> Iterator[_Item]:
    """What the length of one axis of a variable is computed from."""
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
        dropped = {a % ndim for a in _as_tuple(op.axis)}  # not all axes: the result has some
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
    while isinstance(size, Variable) and size.owner and _is_cast(size.owner.op):
        [size] = size.owner.inputs
    if not _fixed(size):
        yield size, None
    if not _fixed(size) or (_number(size) or 0) < 0:  # what the other sizes leave
        yield sizes, None
        yield from _axes(x)


def _is_cast(op: Any) -> bool:
    if isinstance(op, Elemwise):
        return isinstance(op.scalar_op, Cast)
    return isinstance(op, ScalarFromTensor | TensorFromScalar)


def _as_tuple(axis: Any) -> tuple[int, ...]:
    return (axis,) if isinstance(axis, int) else tuple(axis)
