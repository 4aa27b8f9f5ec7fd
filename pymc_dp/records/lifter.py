"""The walk along the record axis: what is row data, what is shared, and where they meet.

A rule gets a value and the position of the record axis in it, and rebuilds it for a block of rows,
or refuses, naming a remedy.  What has no rule is refused: the rules are an allow-list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytensor.tensor as pt
from pymc.logprob.utils import CheckParameterValue
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar import AND
from pytensor.tensor.basic import (
    Alloc,
    ARange,
    Join,
    MakeVector,
    ScalarFromTensor,
)
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import All, Dot
from pytensor.tensor.rewriting.ofg import inline_ofg_node
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import Subtensor

from pymc_dp.base.compat import LogSumExp, advanced_indices, subtensor_indices
from pymc_dp.errors import NotFactorizable
from pymc_dp.records.ancestry import (
    TAKES,
    ancestors_without_shapes,
    array_of,
    is_data,
    is_long_constant,
    number,
    static_shape,
)
from pymc_dp.records.graph import Cut, RowLeaf


def describe(variable: Variable) -> str:
    """A variable in a message: its name, never its values."""
    return f"`{variable.name}`" if variable.name else "an unnamed array"


@dataclass(eq=False)
class Lifter:
    """One walk from log-probabilities back to data; walks share `leaves`, `cuts`, `conditions`."""

    name: str
    parameters: Mapping[Variable, tuple[int, ...]]
    public: set[Variable]
    n_rows: int
    private_length: int
    leaves: dict[Variable, RowLeaf]
    cuts: dict[tuple, Cut]
    conditions: list[Variable]
    memo: dict[tuple[Variable, int], Variable] = field(default_factory=dict)
    shared: list[Variable] = field(default_factory=list)
    #: Labels of rows, the array they index, and its axis.
    lookups: list[tuple[Variable, Variable, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # stands for the number of rows of a block; replaced once the first leaf is known
        self.block_rows = pt.scalar("block_rows", dtype="int64")

    def refuse(self, what: str, remedy: str, nonprivate: str | None = None) -> NotFactorizable:
        """The error, with a remedy; `nonprivate` is that where nothing has to be private."""
        start = f"The likelihood of `{self.name}` is not a sum of one term per record: {what}."
        return NotFactorizable(f"{start} {remedy}", f"{start} {nonprivate or remedy}")

    # -- shared values --------------------------------------------------------------------------

    def depends_on_parameters(self, variable: Variable) -> bool:
        """Whether the value of `variable` is a function of some parameter."""
        return not self.parameters.keys().isdisjoint(ancestors_without_shapes([variable]))

    def share(self, variable: Variable, axis: int | None = None) -> Variable:
        """A shared value as rows see it; their `axis` in it has size one, or is None."""
        self.shared.append(variable)
        if not self.depends_on_parameters(variable):
            return variable
        if axis is None:
            return self.cut("copy", variable, (self.n_rows, *variable.type.shape))
        phi = variable
        # look through the axes that only broadcasting added, so that one parameter is one cut
        order: list[int | str] = list(range(variable.type.ndim))
        while isinstance(phi.owner.op if phi.owner else None, DimShuffle):
            op = phi.owner.op
            kept = [a for a in op.new_order if a != "x"]
            if kept != sorted(kept) or len(kept) != phi.owner.inputs[0].type.ndim:
                break
            order = [op.new_order[a] if a != "x" else "x" for a in order]
            phi = phi.owner.inputs[0]
        if order[axis] != "x":  # the axis of size one belongs to the value itself
            phi, order = variable, list(range(variable.type.ndim))
        eta = self.cut("copy", phi, (self.n_rows, *phi.type.shape))
        after = ["x" if isinstance(a, str) else a + 1 for a in order]
        return eta.dimshuffle([*after[:axis], 0, *after[axis + 1 :]])

    def cut(
        self,
        kind: str,
        phi: Variable,
        shape: Sequence[int | None],
        row_data: Variable | None = None,
    ) -> Variable:
        """The row input that stands for a shared value; one for each way in which it is used."""
        key = (kind, phi, row_data)
        if key not in self.cuts:
            static = (None, *shape[1:])
            eta = pt.TensorType(phi.type.dtype, shape=static)(name=f"eta{len(self.cuts)}")
            self.cuts[key] = Cut(kind, phi, eta, row_data)  # type: ignore[arg-type]
        return self.cuts[key].eta

    def touches_rows(self, variable: Variable) -> bool:
        """True when some array that may hold records is behind `variable`."""
        return any(
            v in self.leaves or is_long_constant(v, self.private_length) or is_data(v)
            for v in ancestors_without_shapes([variable])
            if v not in self.public
        )

    # -- row values -----------------------------------------------------------------------------

    def lift(self, variable: Variable, axis: int) -> Variable:
        """A row value, with its record axis at `axis`, for a block of rows."""
        key = (variable, axis)
        if key not in self.memo:
            self.memo[key] = self._lift(variable, axis)
        return self.memo[key]

    def lift_or_share(self, variable: Variable, axis: int) -> Variable:
        """A value that broadcasts against rows: shared where it has size one along `axis`."""
        if variable.type.broadcastable[axis]:
            return self.share(variable, axis)
        return self.lift(variable, axis)

    def _lift(self, variable: Variable, axis: int) -> Variable:
        if variable.owner is None:
            return self._leaf(variable, axis)
        op = variable.owner.op
        for kinds, rule in RULES:
            if isinstance(op, kinds):
                return rule(self, variable, axis)
        if isinstance(op, OpFromGraph):
            inlined = inline_ofg_node(variable.owner)
            return self.lift(inlined[variable.owner.outputs.index(variable)], axis)
        raise self.refuse(
            f"operation {op} acts on the record axis and is not on the list of operations known to "
            "keep records apart",
            "Write the likelihood with elementwise operations, linear predictors (X @ beta) and "
            "group indices (alpha[g]); sums, sorts, scans and recursions over records are no sum "
            "over records.",
        )

    def _leaf(self, variable: Variable, axis: int) -> Variable:
        if variable in self.parameters:
            raise self.refuse(
                f"parameter {describe(variable)} has one entry per record",
                "Per-record latent variables cannot be released; integrate them out, or index "
                "them by a public group.",
                "Most of them would have no record in a sample: integrate them out, or index them "
                "by a group.",
            )
        if not isinstance(variable, Constant | SharedVariable):
            raise self.refuse(
                f"it depends on {describe(variable)}, which is neither data nor a parameter",
                "Give its value as data or as a parameter.",
            )
        if variable in self.leaves:
            leaf = self.leaves[variable]
            if leaf.axis != axis:
                raise self.refuse(
                    f"{describe(variable)} is used with two different record axes",
                    "Put records on the first axis of every array.",
                )
            return leaf.block if axis == 0 else pt.moveaxis(leaf.block, 0, axis)
        if np.shape(array_of(variable))[axis] != self.n_rows:
            raise self.refuse(
                f"{describe(variable)} has another number of rows than `{self.name}`",
                "Give every column of one likelihood the same number of rows.",
            )
        shape = [None if k == axis else s for k, s in enumerate(variable.type.shape)]
        shape.insert(0, shape.pop(axis))
        block = pt.TensorType(variable.type.dtype, shape=tuple(shape))(
            name=f"block{len(self.leaves)}"
        )
        self.leaves[variable] = RowLeaf(variable, axis, block)
        return block if axis == 0 else pt.moveaxis(block, 0, axis)

    def labels(self, entries: list[Variable], indexed: Variable, first: int) -> list[Variable]:
        """Labels for axes of `indexed` from `first` on; clipped, as made-up data are unchecked."""
        labels = []
        for axis, entry in enumerate(entries, start=first):
            if entry.type.ndim == 0:  # the same for all rows
                self.shared.append(entry)
                label = entry
            else:
                label = self.lift_or_share(entry, 0)
            if self.depends_on_parameters(entry) or not self.is_row_data(label):
                raise self.refuse("it is indexed by a parameter", "Index by data.")
            if label.type.dtype == "uint64":  # with int64 it would become a float
                label = label.astype("int64")
            self.lookups.append((label, indexed, axis))
            size = indexed.shape[axis]
            labels.append(pt.clip(label, -size, size - 1))
        return labels

    def is_row_data(self, lifted: Variable) -> bool:
        """True when a lifted value is a function of data alone."""
        etas = {cut.eta for cut in self.cuts.values()}
        return etas.isdisjoint(ancestors_without_shapes([lifted]))


# -- rules -----------------------------------------------------------------------------------------


#: Neither these nor their derivatives fail.  An inverse (the derivative of a determinant) or a
#: general solve raises for some matrices, which would tell of a record.
_NEVER_FAIL = {"Cholesky", "CholeskySolve", "Dot", "SolveTriangular"}


def _elemwise(lifter: Lifter, v: Variable, axis: int) -> Variable:
    if v.type.dtype.startswith("complex"):  # a negative modulus of one record is an error
        raise lifter.refuse("it uses complex numbers", "Write real and imaginary parts apart.")
    inputs = [lifter.lift_or_share(x, axis) for x in v.owner.inputs]
    return v.owner.op.make_node(*inputs).outputs[v.owner.outputs.index(v)]


def _dimshuffle(lifter: Lifter, v: Variable, axis: int) -> Variable:
    order = v.owner.op.new_order
    if order[axis] == "x":  # the log-likelihood is one number, made an array of one
        raise lifter.refuse(
            "an axis of size one is used as the record axis", "Keep one term per record."
        )
    return lifter.lift(v.owner.inputs[0], order[axis]).dimshuffle(order)


def _reduction(lifter: Lifter, v: Variable, axis: int) -> Variable:
    op, x = v.owner.op, v.owner.inputs[0]
    ndim = x.type.ndim
    axes = {a % ndim for a in (range(ndim) if op.axis is None else np.atleast_1d(op.axis))}
    keeps = getattr(op, "keepdims", False)
    source = axis if keeps else [k for k in range(ndim) if k not in axes][axis]
    if source in axes:
        raise lifter.refuse(f"{op} reduces over records", "Keep one term per record.")
    return op(lifter.lift(x, source))


def _along_axis(lifter: Lifter, v: Variable, axis: int) -> Variable:
    op, x = v.owner.op, v.owner.inputs[0]
    if op.axis is None or axis in {a % x.type.ndim for a in np.atleast_1d(op.axis)}:
        raise lifter.refuse(
            f"{op} mixes records", "Apply it along another axis than that of the records."
        )
    return op(lifter.lift(x, axis))


def _product(lifter: Lifter, v: Variable, axis: int, a: Variable, b: Variable) -> Variable:
    """(rows, p) @ (p,) and (rows, p) @ (p, k), or the transposed (k, p) @ (p, rows)."""
    if axis == 1 and v.type.ndim == 2:
        return _product(lifter, v.T, 0, b.T, a.T).T
    if a.type.ndim == 1 and b.type.ndim == 2:  # beta @ X.T
        return _product(lifter, v, 0, b.T, a)
    if a.type.ndim != 2 or axis != 0:
        raise lifter.refuse("a product over the record axis", "Put records on the first axis.")
    if a.type.broadcastable[0]:
        raise lifter.refuse("a product whose rows are all the same", "Drop the constant row axis.")
    rows = lifter.lift(a, 0)
    lifter.shared.append(b)
    if not lifter.depends_on_parameters(b):
        # a fixed matrix, row by row: written as a sum, because a matrix product may round a row
        # differently according to its place in the block
        return (rows[:, :, None] * b[None]).sum(1) if b.ndim == 2 else (rows * b[None]).sum(1)
    if lifter.is_row_data(rows):
        phi, column = b, False
        if b.owner is not None and isinstance(b.owner.op, DimShuffle):
            if tuple(b.owner.op.new_order) == (0, "x"):
                phi, column = b.owner.inputs[0], True
        eta = lifter.cut("dot", phi, (lifter.n_rows, *phi.type.shape[1:]), rows)
        return eta[:, None] if column else eta
    copies = lifter.cut("copy", b, (lifter.n_rows, *b.type.shape))
    return (rows[:, :, None] * copies).sum(1) if b.ndim == 2 else (rows * copies).sum(1)


def _blockwise(lifter: Lifter, v: Variable, axis: int) -> Variable:
    node, op = v.owner, v.owner.op
    batch = op.batch_ndim(node)
    if axis < batch:
        if type(op.core_op).__name__ not in _NEVER_FAIL:
            raise lifter.refuse(
                f"{op} acts on the matrix of each record, and may fail for some",
                "Compute it before the model is built, or use pt.linalg.cholesky and "
                "pt.linalg.solve_triangular.",
            )
        inputs = [lifter.lift_or_share(x, axis) for x in node.inputs]
        return op.make_node(*inputs).outputs[node.outputs.index(v)]
    if isinstance(op.core_op, Dot) and batch == 0:
        return _product(lifter, v, axis, *node.inputs)
    raise lifter.refuse(
        f"{op} mixes records",
        "Give each record its own small vector or matrix, records on the first axis.",
    )


def _subtensor(lifter: Lifter, v: Variable, axis: int) -> Variable:
    x = v.owner.inputs[0]
    entries = subtensor_indices(v.owner)
    entries += [slice(None)] * (x.type.ndim - len(entries))
    kept = [k for k, entry in enumerate(entries) if isinstance(entry, slice)]
    source = kept[axis]
    if entries[source] != slice(None):
        raise lifter.refuse(
            "it takes a part of the records, or shifts them against each other",
            "Select the records before the model is built; autoregressive terms couple records.",
        )
    for index in v.owner.inputs[1:]:
        lifter.shared.append(index)
        if lifter.depends_on_parameters(index):
            raise lifter.refuse("it is indexed by a parameter", "Index by data.")
    return lifter.lift(x, source)[tuple(entries)]


def _take(lifter: Lifter, v: Variable, axis: int) -> Variable:
    x, entries = v.owner.inputs[0], advanced_indices(v.owner)
    while entries and entries[-1] == slice(None):
        entries.pop()
    if any(isinstance(entry, slice) or entry is None for entry in entries) or axis != 0:
        raise lifter.refuse(
            "an index that is not on the first axis",
            "Put the group axis first: alpha[g] for alpha of shape (groups, ...).",
        )
    if any(entry.type.dtype == "bool" for entry in entries):
        raise lifter.refuse(
            "it is indexed by a mask",
            "Use integer labels: the number of rows kept is private.",
            "Use integer labels instead.",
        )
    depth = max(entry.type.ndim for entry in entries)
    if any(entry.type.ndim not in (0, depth) for entry in entries):
        raise lifter.refuse("it is indexed by a matrix", "Use one column of labels per index.")
    if _is_row_numbers(entries[0]):
        rows = 1 if x.type.broadcastable[0] else lifter.n_rows
        if static_shape(entries[0], lifter.parameters)[0] != rows:
            raise lifter.refuse("an index that counts other than the records", "Index by data.")
        if not x.type.broadcastable[0]:  # x[arange(n), label]: one entry of each row
            rows = lifter.lift(x, 0)
            number = pt.arange(rows.shape[0]).reshape((-1, *[1] * (depth - 1)))
            return rows[(number, *lifter.labels(entries[1:], x, 1))]
        x, entries = x[0], entries[1:]  # the only row is that of all records
    labels = lifter.labels(entries, x, 0)
    lifter.shared.append(x)
    if not lifter.depends_on_parameters(x):
        return x[tuple(labels)]
    if any(not all(label.type.broadcastable[1:]) for label in labels):
        raise lifter.refuse("it is indexed by a matrix", "Use one column of labels per index.")
    columns = [label.dimshuffle(0) if label.type.ndim else label for label in labels]
    phi, label = x, columns[0]
    if len(columns) > 1:  # phi[g, h] is phi.reshape(G * H)[g * H + h]
        sizes = [x.shape[k] for k in range(x.ndim)]
        wrapped = [pt.switch(g < 0, g + n, g) for g, n in zip(columns, sizes, strict=False)]
        label = wrapped[0]
        for column, size in zip(wrapped[1:], sizes[1:], strict=False):
            label = label * size + column
        phi = x.reshape((-1, *sizes[len(columns) :]), ndim=1 + x.ndim - len(columns))
    eta = lifter.cut("index", phi, (lifter.n_rows, *phi.type.shape[1:]), label)
    return eta.dimshuffle(0, *["x"] * (depth - 1), *range(1, eta.type.ndim))


def _is_row_numbers(index: Variable) -> bool:
    """True when `index` is 0, 1, ..., m-1 by construction, as a column of any depth."""
    if isinstance(index, Constant) or not all(index.type.broadcastable[1:]):
        return False
    while index.owner is not None and isinstance(index.owner.op, Reshape | DimShuffle):
        index = index.owner.inputs[0]
    if index.owner is None or not isinstance(index.owner.op, ARange):
        return False
    start, _, step = index.owner.inputs
    return all(isinstance(x, Constant) and int(x.data) == at for x, at in ((start, 0), (step, 1)))


def _alloc(lifter: Lifter, v: Variable, axis: int) -> Variable:
    x, sizes = v.owner.inputs[0], v.owner.inputs[1:]
    source = axis - (v.type.ndim - x.type.ndim)
    if source < 0:
        padded = x.dimshuffle(*["x"] * (v.type.ndim - x.type.ndim), *range(x.type.ndim))
        value = lifter.share(padded, axis)
    elif x.type.broadcastable[source]:
        value = lifter.share(x, source)
    else:
        value = lifter.lift(x, source)
    shape = [lifter.block_rows if k == axis else size for k, size in enumerate(sizes)]
    lifter.shared.extend(size for k, size in enumerate(sizes) if k != axis)
    return pt.alloc(value, *shape)


def _join(lifter: Lifter, v: Variable, axis: int) -> Variable:
    node = v.owner
    if hasattr(node.op, "axis"):
        along, parts = node.op.axis, node.inputs
    else:  # PyTensor 2: the axis is an input
        along, parts = number(node.inputs[0]), node.inputs[1:]
        if along is None:
            raise lifter.refuse("arrays are joined along a computed axis", "Fix the axis.")
        along = int(along)
    if along % v.type.ndim == axis:
        raise lifter.refuse(
            "records are joined from several arrays", "Use one observed variable for each array."
        )
    return pt.concatenate([lifter.lift(part, axis) for part in parts], axis=along)


def _reshape(lifter: Lifter, v: Variable, axis: int) -> Variable:
    x = v.owner.inputs[0]
    trailing, inner = v.type.shape[1:], x.type.shape[1:]
    # row-major order: the first axis is untouched exactly when the entries per row are as many
    known = axis == 0 and x.type.ndim > 0 and None not in (*trailing, *inner)
    if not known or math.prod(inner) != math.prod(trailing):
        raise lifter.refuse("a reshape of the record axis", "Keep records on the first axis.")
    return lifter.lift(x, 0).reshape((-1, *trailing))


def _specify_shape(lifter: Lifter, v: Variable, axis: int) -> Variable:
    """An axis of one column may broadcast only where it is known to be one."""
    lifted = lifter.lift_or_share(v.owner.inputs[0], axis)
    known = zip(v.type.shape, lifted.type.shape, strict=True)
    ones = [k for k, (now, before) in enumerate(known) if k != axis and now == 1 != before]
    return pt.specify_broadcastable(lifted, *ones) if ones else lifted


def _check(lifter: Lifter, v: Variable, axis: int) -> Variable:
    """A parameter check, made per record: a bad row is impossible by itself, not for all rows.

    Checks of shared values become public conditions; row values with further axes need all entries.
    """
    value = lifter.lift(v.owner.inputs[0], axis)
    for condition in v.owner.inputs[1:]:
        for part in conjunction(condition):
            if not lifter.touches_rows(part):
                if lifter.depends_on_parameters(part):
                    lifter.shared.append(part)
                    lifter.conditions.append(part if part.type.ndim == 0 else pt.all(part))
            elif _broadcasts_to(part, v) and not part.type.broadcastable[axis]:
                value = pt.switch(lifter.lift(part, axis), value, -np.inf)
            elif part.type.ndim > v.type.ndim and not part.type.broadcastable[axis]:
                further = tuple(range(v.type.ndim, part.type.ndim))
                holds = lifter.lift(part, axis).all(axis=further)
                value = pt.switch(holds, value, -np.inf)
            else:
                raise lifter.refuse(
                    "a check of its parameters is not one condition for each record",
                    "Check each record by itself: pt.switch(valid, logp, -np.inf).",
                )
    return value


def _broadcasts_to(x: Variable, y: Variable) -> bool:
    """True when elementwise use of `x` with `y` keeps the shape of `y`."""
    return x.type.ndim == y.type.ndim and all(
        narrow or not wide
        for narrow, wide in zip(x.type.broadcastable, y.type.broadcastable, strict=True)
    )


def conjunction(condition: Variable) -> list[Variable]:
    """The elementwise conditions behind ``all(all(a), all(b), ...)`` and ``all(a) & all(b)``."""
    if condition.owner is None:
        return [condition]
    op = condition.owner.op
    if isinstance(op, ScalarFromTensor):
        return conjunction(condition.owner.inputs[0])
    if isinstance(op, All):
        x = condition.owner.inputs[0]
        if x.owner is not None and isinstance(x.owner.op, MakeVector):
            return [part for y in x.owner.inputs for part in conjunction(y)]
        return conjunction(x) if x.type.ndim == 0 else [x]
    if isinstance(op, Elemwise) and isinstance(op.scalar_op, AND) and condition.dtype == "bool":
        return [part for y in condition.owner.inputs for part in conjunction(y)]
    return [condition]


RULES: tuple[tuple[type | tuple[type, ...], Callable[[Lifter, Variable, int], Variable]], ...] = (
    (Elemwise, _elemwise),
    (DimShuffle, _dimshuffle),
    ((CAReduce, *((LogSumExp,) if LogSumExp is not None else ())), _reduction),
    ((Softmax, LogSoftmax, CumOp), _along_axis),
    (Dot, lambda lifter, v, axis: _product(lifter, v, axis, *v.owner.inputs)),
    (Blockwise, _blockwise),
    (Subtensor, _subtensor),
    (TAKES, _take),
    (Alloc, _alloc),
    (Join, _join),
    (Reshape, _reshape),
    (SpecifyShape, _specify_shape),
    ((CheckParameterValue, CheckAndRaise), _check),
)
