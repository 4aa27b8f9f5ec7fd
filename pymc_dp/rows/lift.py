"""Structural proof that a log-likelihood factorises over records, and its rebuilding by blocks.

:func:`lift_rows` walks from the per-observation log-probability back to the data, following the
record axis through every operation.  An operation for which there is no rule is refused by name:
the rules are an allow-list.  What the walk meets is either row data, lifted to an input that holds
a block of rows, or a shared value, which must not depend on any row (checked at the end).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.logprob.utils import CheckParameterValue
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import (
    Alloc,
    ARange,
    Join,
    MakeVector,
    ScalarFromTensor,
    get_underlying_scalar_constant_value,
)
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import All, Dot
from pytensor.tensor.shape import Reshape, Shape, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor

from pymc_dp._compat import AdvancedSubtensor1, LogSumExp, advanced_indices, subtensor_indices
from pymc_dp.errors import NotFactorizable
from pymc_dp.rows.ancestry import (
    SHAPE_OPS,
    ancestors_without_shapes,
    array_of,
    is_data,
    is_long_constant,
)
from pymc_dp.rows.cuts import Cut, RowGraph, RowLeaf

__all__ = ["fixed_shapes", "lift_rows"]

#: For functions called once.  Constants of the model stay in the graph: nothing may compile it.
_INTERPRETED = Mode(linker="py", optimizer=None)
_AXIS_OPS = (Softmax, LogSoftmax, CumOp)


def _describe(variable: Variable) -> str:
    return f"`{variable.name}`" if variable.name else "an unnamed array"


class _Lifter:
    def __init__(
        self,
        parameters: Iterable[Variable],
        public: set[Variable],
        n_rows: int,
        private_length: int,
        name: str,
        leaves: dict[Variable, RowLeaf],
        cuts: dict[tuple, Cut],
        conditions: list[Variable],
    ) -> None:
        self.parameters = set(parameters)
        self.public = public
        self.n_rows = n_rows
        self.private_length = private_length
        self.name = name
        self.leaves = leaves
        self.cuts = cuts
        self.conditions = conditions
        self.memo: dict[tuple[Variable, int], Variable] = {}
        self.shared: list[Variable] = []
        # labels of rows, the array they index, and its axis
        self.lookups: list[tuple[Variable, Variable, int]] = []
        # stands for the number of rows of a block; replaced once the first leaf is known
        self.block_rows = pt.scalar("block_rows", dtype="int64")

    # -- messages -------------------------------------------------------------------------------

    def refuse(self, what: str, remedy: str) -> NotFactorizable:
        return NotFactorizable(
            f"The likelihood of `{self.name}` is not a sum of one term per record: {what}. {remedy}"
        )

    # -- shared values --------------------------------------------------------------------------

    def depends_on_parameters(self, variable: Variable) -> bool:
        return not self.parameters.isdisjoint(ancestors_without_shapes([variable]))

    def share(self, variable: Variable, axis: int | None = None) -> Variable:
        """A shared value as the rows see it: itself, or the row input of a "copy" cut.

        `axis` is the position of the record axis in the row value, and `variable` has size one
        there; ``None`` when the value has no such axis.
        """
        self.shared.append(variable)
        if not self.depends_on_parameters(variable):
            return variable
        if axis is None:
            return self._cut("copy", variable, (self.n_rows, *variable.type.shape))
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
        if order[axis] == "x":
            eta = self._cut("copy", phi, (self.n_rows, *phi.type.shape))
            return eta.dimshuffle(
                [
                    0 if k == axis else ("x" if isinstance(a, str) else a + 1)
                    for k, a in enumerate(order)
                ]
            )
        # the axis of size one belongs to the value itself
        eta = self._cut("copy", variable, (self.n_rows, *variable.type.shape))
        keep = [0 if k == axis else k + 1 for k in range(variable.type.ndim)]
        return eta.dimshuffle(keep)

    def _cut(
        self,
        kind: str,
        phi: Variable,
        shape: Sequence[int | None],
        row_data: Variable | None = None,
    ) -> Variable:
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
        key = (variable, axis)
        if key not in self.memo:
            self.memo[key] = self._lift(variable, axis)
        return self.memo[key]

    def lift_or_share(self, variable: Variable, axis: int) -> Variable:
        if variable.type.broadcastable[axis]:
            return self.share(variable, axis)
        return self.lift(variable, axis)

    def _lift(self, variable: Variable, axis: int) -> Variable:
        if variable.owner is None:
            return self._leaf(variable, axis)
        op = variable.owner.op
        for kinds, rule in _RULES:
            if isinstance(op, kinds):
                return rule(self, variable, axis)
        if isinstance(op, OpFromGraph):
            return self.lift(_inline(variable), axis)
        raise self.refuse(
            f"operation {op} acts on the record axis and is not on the list of operations known to "
            "keep records apart",
            "Write the likelihood with elementwise operations, linear predictors (X @ beta) and "
            "group indices (alpha[g]); sums, sorts, scans and recursions over records are not "
            "private per record.",
        )

    def _leaf(self, variable: Variable, axis: int) -> Variable:
        if variable in self.parameters:
            raise self.refuse(
                f"parameter {_describe(variable)} has one entry per record",
                "Per-record latent variables can not be released; integrate them out, or index "
                "them by a public group.",
            )
        if not isinstance(variable, Constant | SharedVariable):
            raise self.refuse(
                f"it depends on {_describe(variable)}, which is neither data nor a parameter",
                "Give its value as data or as a parameter.",
            )
        if variable in self.leaves:
            leaf = self.leaves[variable]
            if leaf.axis != axis:
                raise self.refuse(
                    f"{_describe(variable)} is used with two different record axes",
                    "Put records on the first axis of every array.",
                )
            return leaf.block if axis == 0 else pt.moveaxis(leaf.block, 0, axis)
        rows = np.shape(array_of(variable))[axis]
        if rows != self.n_rows:
            raise self.refuse(
                f"{_describe(variable)} has {rows} rows where `{self.name}` has {self.n_rows}",
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
        """Lifted labels that index the axes of `indexed` from `first` on.

        The labels of the data are checked when the model is read.  Made-up data are not, and
        compiled code does not check bounds, so the labels are clipped as well.
        """
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


def _inline(variable: Variable) -> Variable:
    """Replace an op that wraps a graph by that graph."""
    node = variable.owner
    inner = node.op.inner_outputs[node.outputs.index(variable)]
    replaced = clone_replace(
        [inner], dict(zip(node.op.inner_inputs, node.inputs, strict=False)), rebuild_strict=False
    )[0]
    return replaced


# -- rules: one per kind of operation -------------------------------------------------------------


def _elemwise(self: _Lifter, v: Variable, axis: int) -> Variable:
    inputs = [self.lift_or_share(x, axis) for x in v.owner.inputs]
    return v.owner.op.make_node(*inputs).outputs[v.owner.outputs.index(v)]


def _dimshuffle(self: _Lifter, v: Variable, axis: int) -> Variable:
    op, x = v.owner.op, v.owner.inputs[0]
    source = op.new_order[axis]
    if source == "x":  # pragma: no cover - lift_or_share never asks for it
        raise self.refuse("an axis of size one is used as the record axis", "Use two rows or more.")
    return self.lift(x, source).dimshuffle(op.new_order)


def _kept_axes(ndim: int, axes: Iterable[int]) -> list[int]:
    dropped = {a % ndim for a in axes}
    return [k for k in range(ndim) if k not in dropped]


def _reduction(self: _Lifter, v: Variable, axis: int) -> Variable:
    op, x = v.owner.op, v.owner.inputs[0]
    axes = range(x.type.ndim) if op.axis is None else np.atleast_1d(op.axis)
    if getattr(op, "keepdims", False):
        source = axis
    else:
        kept = _kept_axes(x.type.ndim, axes)
        source = kept[axis]
    if source in {a % x.type.ndim for a in axes}:
        raise self.refuse(f"{op} reduces over records", "Keep one term per record.")
    return op(self.lift(x, source))


def _along_axis(self: _Lifter, v: Variable, axis: int) -> Variable:
    op, x = v.owner.op, v.owner.inputs[0]
    if op.axis is None or axis in {a % x.type.ndim for a in np.atleast_1d(op.axis)}:
        raise self.refuse(
            f"{op} mixes records", "Apply it along another axis than that of the records."
        )
    return op(self.lift(x, axis))


def _product(self: _Lifter, v: Variable, a: Variable, b: Variable, axis: int) -> Variable:
    """(rows, p) @ (p,) and (rows, p) @ (p, k), or the transposed (k, p) @ (p, rows)."""
    if axis == 1 and v.type.ndim == 2:
        return _product(self, v.T, b.T, a.T, 0).T
    if a.type.ndim == 1 and b.type.ndim == 2:  # beta @ X.T
        return _product(self, v, b.T, a, 0)
    if a.type.ndim != 2 or axis != 0:
        raise self.refuse("a product over the record axis", "Put records on the first axis.")
    if a.type.broadcastable[0]:
        raise self.refuse("a product whose rows are all the same", "Drop the constant row axis.")
    rows = self.lift(a, 0)
    self.shared.append(b)
    if not self.depends_on_parameters(b):
        # a fixed matrix, row by row: written as a sum, because a matrix product may round a row
        # differently according to its place in the block
        return (rows[:, :, None] * b[None]).sum(1) if b.ndim == 2 else (rows * b[None]).sum(1)
    if self.is_row_data(rows):
        phi, column = b, False
        if b.owner is not None and isinstance(b.owner.op, DimShuffle):
            if tuple(b.owner.op.new_order) == (0, "x"):
                phi, column = b.owner.inputs[0], True
        eta = self._cut("dot", phi, (self.n_rows, *phi.type.shape[1:]), rows)
        return eta[:, None] if column else eta
    copies = self._cut("copy", b, (self.n_rows, *b.type.shape))
    return (rows[:, :, None] * copies).sum(1) if b.ndim == 2 else (rows * copies).sum(1)


def _dot(self: _Lifter, v: Variable, axis: int) -> Variable:
    a, b = v.owner.inputs
    return _product(self, v, a, b, axis)


def _blockwise(self: _Lifter, v: Variable, axis: int) -> Variable:
    node, op = v.owner, v.owner.op
    batch = op.batch_ndim(node)
    if axis < batch:
        inputs = [self.lift_or_share(x, axis) for x in node.inputs]
        return op.make_node(*inputs).outputs[node.outputs.index(v)]
    if isinstance(op.core_op, Dot) and batch == 0:
        a, b = node.inputs
        return _product(self, v, a, b, axis)
    raise self.refuse(
        f"{op} mixes records",
        "Give each record its own small vector or matrix, records on the first axis.",
    )


def _subtensor(self: _Lifter, v: Variable, axis: int) -> Variable:
    x = v.owner.inputs[0]
    entries = subtensor_indices(v.owner)
    entries += [slice(None)] * (x.type.ndim - len(entries))
    kept = [k for k, entry in enumerate(entries) if isinstance(entry, slice)]
    source = kept[axis]
    if entries[source] != slice(None):
        raise self.refuse(
            "it takes a part of the records, or shifts them against each other",
            "Select the records before the model is built; autoregressive terms couple records.",
        )
    for index in v.owner.inputs[1:]:
        self.shared.append(index)
        if self.depends_on_parameters(index):
            raise self.refuse("it is indexed by a parameter", "Index by data.")
    return self.lift(x, source)[tuple(entries)]


def _flat_index(phi: Variable, labels: list[Variable]) -> tuple[Variable, Variable]:
    """Several label columns as one: ``phi[g, h]`` is ``phi.reshape(G*H)[g*H + h]``."""
    flat = None
    for k, label in enumerate(labels):
        size = phi.shape[k]
        wrapped = pt.switch(label < 0, label + size, label)
        flat = wrapped if flat is None else flat * size + wrapped
    rest = [phi.shape[k] for k in range(len(labels), phi.ndim)]
    return phi.reshape((-1, *rest), ndim=1 + len(rest)), flat


def _take(self: _Lifter, v: Variable, axis: int) -> Variable:
    x, entries = v.owner.inputs[0], advanced_indices(v.owner)
    while entries and entries[-1] == slice(None):
        entries.pop()
    if any(isinstance(entry, slice) or entry is None for entry in entries) or axis != 0:
        raise self.refuse(
            "an index that is not on the first axis",
            "Put the group axis first: alpha[g] for alpha of shape (groups, ...).",
        )
    if any(entry.type.dtype == "bool" for entry in entries):
        raise self.refuse(
            "it is indexed by a mask", "Use integer labels: the number of rows kept is private."
        )
    depth = max(entry.type.ndim for entry in entries)
    if any(entry.type.ndim not in (0, depth) for entry in entries):
        raise self.refuse("it is indexed by a matrix", "Use one column of labels per index.")
    if is_row_numbers(entries[0]):
        if not x.type.broadcastable[0]:  # x[arange(n), label]: one entry of each row
            rows = self.lift(x, 0)
            number = pt.arange(rows.shape[0]).reshape((-1, *[1] * (depth - 1)))
            return rows[(number, *self.labels(entries[1:], x, 1))]
        x, entries = x[0], entries[1:]  # the only row is that of all records
    labels = self.labels(entries, x, 0)
    self.shared.append(x)
    if not self.depends_on_parameters(x):
        return x[tuple(labels)]
    if any(not all(label.type.broadcastable[1:]) for label in labels):
        raise self.refuse("it is indexed by a matrix", "Use one column of labels per index.")
    columns = [label.dimshuffle(0) if label.type.ndim else label for label in labels]
    phi, label = (x, columns[0]) if len(columns) == 1 else _flat_index(x, columns)
    eta = self._cut("index", phi, (self.n_rows, *phi.type.shape[1:]), label)
    return eta.dimshuffle(0, *["x"] * (depth - 1), *range(1, eta.type.ndim))


def is_row_numbers(index: Variable) -> bool:
    """True when `index` is 0, 1, ..., m-1 by construction, as a column of any depth."""
    if isinstance(index, Constant) or not all(index.type.broadcastable[1:]):
        return False
    while index.owner is not None and isinstance(index.owner.op, Reshape | DimShuffle):
        index = index.owner.inputs[0]
    if index.owner is None or not isinstance(index.owner.op, ARange):
        return False
    start, _, step = index.owner.inputs
    fixed = [isinstance(x, Constant) and int(x.data) == at for x, at in ((start, 0), (step, 1))]
    return all(fixed)


def _alloc(self: _Lifter, v: Variable, axis: int) -> Variable:
    x, sizes = v.owner.inputs[0], v.owner.inputs[1:]
    source = axis - (v.type.ndim - x.type.ndim)
    if source < 0:
        padded = x.dimshuffle(*["x"] * (v.type.ndim - x.type.ndim), *range(x.type.ndim))
        value = self.share(padded, axis)
    elif x.type.broadcastable[source]:
        value = self.share(x, source)
    else:
        value = self.lift(x, source)
    shape = [self.block_rows if k == axis else size for k, size in enumerate(sizes)]
    self.shared.extend(size for k, size in enumerate(sizes) if k != axis)
    return pt.alloc(value, *shape)


def _join(self: _Lifter, v: Variable, axis: int) -> Variable:
    node = v.owner
    if hasattr(node.op, "axis"):
        along, parts = node.op.axis, node.inputs
    else:  # PyTensor 2: the axis is an input
        parts = node.inputs[1:]
        try:
            along = int(get_underlying_scalar_constant_value(node.inputs[0]))
        except NotScalarConstantError:
            raise self.refuse("arrays are joined along a computed axis", "Fix the axis.") from None
    if along % v.type.ndim == axis:
        raise self.refuse(
            "records are joined from several arrays", "Use one observed variable for each array."
        )
    return pt.concatenate([self.lift(part, axis) for part in parts], axis=along)


def _reshape(self: _Lifter, v: Variable, axis: int) -> Variable:
    x = v.owner.inputs[0]
    trailing = v.type.shape[1:]
    if axis != 0 or any(size is None for size in trailing) or x.type.ndim == 0:
        raise self.refuse("a reshape of the record axis", "Keep records on the first axis.")
    # row-major order: the first axis is untouched exactly when the entries per row are as many
    inner = x.type.shape[1:]
    if any(size is None for size in inner) or np.prod(inner, dtype=int) != np.prod(
        trailing, dtype=int
    ):
        raise self.refuse("a reshape of the record axis", "Keep records on the first axis.")
    return self.lift(x, 0).reshape((-1, *trailing))


def _specify_shape(self: _Lifter, v: Variable, axis: int) -> Variable:
    return self.lift_or_share(v.owner.inputs[0], axis)


def _check(self: _Lifter, v: Variable, axis: int) -> Variable:
    """A parameter check, made per record: a bad row is impossible by itself, not for all rows.

    A check of shared values becomes a condition on the parameters (public); a check of row values
    whose shape is not that of the log-likelihood is left out, and a value that is not a number
    then counts as no information about the record.
    """
    value = self.lift(v.owner.inputs[0], axis)
    for condition in v.owner.inputs[1:]:
        for part in _conjunction(condition):
            if not self.touches_rows(part):
                if self.depends_on_parameters(part):
                    self.shared.append(part)
                    self.conditions.append(part if part.type.ndim == 0 else pt.all(part))
            elif _broadcasts_to(part, v) and not part.type.broadcastable[axis]:
                value = pt.switch(self.lift(part, axis), value, -np.inf)
    return value


def _broadcasts_to(x: Variable, y: Variable) -> bool:
    """True when elementwise use of `x` with `y` keeps the shape of `y`."""
    return x.type.ndim == y.type.ndim and all(
        narrow or not wide
        for narrow, wide in zip(x.type.broadcastable, y.type.broadcastable, strict=True)
    )


def _conjunction(condition: Variable) -> list[Variable]:
    """The elementwise conditions behind ``all(all(a), all(b), ...)``."""
    if condition.owner is None:
        return []
    op = condition.owner.op
    if isinstance(op, ScalarFromTensor):
        return _conjunction(condition.owner.inputs[0])
    if isinstance(op, All):
        x = condition.owner.inputs[0]
        if x.owner is not None and isinstance(x.owner.op, MakeVector):
            return [part for y in x.owner.inputs for part in _conjunction(y)]
        if x.owner is not None and isinstance(x.owner.op, All):
            return _conjunction(x)
        return [x]
    return [condition] if isinstance(condition.type, pt.TensorType) else []


Rule = Callable[[_Lifter, Variable, int], Variable]
_RULES: tuple[tuple[type | tuple[type, ...], Rule], ...] = (
    (Elemwise, _elemwise),
    (DimShuffle, _dimshuffle),
    ((CAReduce, *((LogSumExp,) if LogSumExp is not None else ())), _reduction),
    (_AXIS_OPS, _along_axis),
    (Dot, _dot),
    (Blockwise, _blockwise),
    (Subtensor, _subtensor),
    (
        (AdvancedSubtensor, *((AdvancedSubtensor1,) if AdvancedSubtensor1 is not None else ())),
        _take,
    ),
    (Alloc, _alloc),
    (Join, _join),
    (Reshape, _reshape),
    (SpecifyShape, _specify_shape),
    ((CheckParameterValue, CheckAndRaise), _check),
)


def lift_rows(
    logps: dict[str, Variable],
    parameters: Mapping[Variable, tuple[int, ...]],
    public: Iterable[Variable],
    n_rows: int,
    private_length: int | None = None,
    secret_sizes: Iterable[int] = (),
) -> RowGraph:
    """Rebuild per-observation log-likelihoods as the log-likelihood of a block of rows.

    Parameters
    ----------
    logps : dict of str to Variable
        Per-observation log-probability of each observed variable, records on the first axis;
        further axes are summed into the record's term.
    parameters : mapping of Variable to tuple of int
        The value variables of the free random variables, and their shapes.
    public : iterable of Variable
        Constants and shared variables declared public: they may reach every record.
    n_rows : int
        The number of rows of these observed variables.
    private_length : int, optional
        Unnamed arrays with an axis of this length or more may hold records and must not reach
        every record.  Default: `n_rows`.
    secret_sizes : iterable of int
        Numbers of rows, where they are private: no term may depend on them.

    Returns
    -------
    RowGraph

    Raises
    ------
    NotFactorizable
        If a term can not be shown to depend on its own row only.  The message names the observed
        variable, the operation or array, and a remedy.
    """
    public = set(public)
    leaves: dict[Variable, RowLeaf] = {}
    cuts: dict[tuple, Cut] = {}
    conditions: list[Variable] = []
    lookups: list[tuple[Variable, int]] = []
    total = None
    for name, logp in logps.items():
        lifter = _Lifter(
            parameters, public, n_rows, private_length or n_rows, name, leaves, cuts, conditions
        )
        value = lifter.lift(logp, 0)
        if value.type.ndim > 1:
            value = value.sum(axis=tuple(range(1, value.type.ndim)))
        if not leaves:
            raise NotFactorizable(f"The likelihood of `{name}` does not depend on any data.")
        rows_of_block = next(iter(leaves.values())).block.shape[0]
        designs = [key for key, cut in cuts.items() if cut.row_data is not None]
        value, *columns = clone_replace(
            [
                value,
                *[cuts[key].row_data for key in designs],
                *[label for label, _, _ in lifter.lookups],
            ],
            {lifter.block_rows: rows_of_block},
        )
        for key, column in zip(designs, columns, strict=False):
            cuts[key] = replace(cuts[key], row_data=column)
        for label, (_, indexed, axis) in zip(columns[len(designs) :], lifter.lookups, strict=True):
            lookups.append((label, _static_shape(indexed, parameters)[axis]))
        _check_shared(lifter)
        total = value if total is None else total + value
    assert total is not None
    rows = {leaf.block for leaf in leaves.values()} | {cut.eta for cut in cuts.values()}
    found = iter(
        fixed_shapes(
            [
                total,
                *[cut.row_data for cut in cuts.values() if cut.row_data is not None],
                *[cut.phi for cut in cuts.values()],
                *[label for label, _ in lookups],
                *conditions,
            ],
            parameters,
            public,
            rows,
            secret_sizes,
        )
    )
    total = next(found)
    row_data = [None if cut.row_data is None else next(found) for cut in cuts.values()]
    return RowGraph(
        loglik=total,
        cuts=tuple(
            replace(cut, row_data=columns, phi=next(found))
            for cut, columns in zip(cuts.values(), row_data, strict=True)
        ),
        leaves=tuple(leaves.values()),
        lookups=tuple((next(found), size) for _, size in lookups),
        conditions=tuple(found),
        n_rows=n_rows,
        names=tuple(logps),
    )


def _check_shared(lifter: _Lifter) -> None:
    """Refuse row data, and private arrays of unknown meaning, that reach every record."""
    for variable in ancestors_without_shapes(lifter.shared):
        if variable in lifter.public or variable.owner is not None:
            continue
        if variable in lifter.leaves:
            raise lifter.refuse(
                f"rows of {_describe(variable)} reach other records (for instance through a mean, "
                "a maximum or a standardisation inside the model)",
                "Standardise with public constants, before the model is built.",
            )
        if isinstance(variable, SharedVariable):
            raise lifter.refuse(
                f"pm.Data {_describe(variable)} reaches every record",
                f"If it is not private, declare it: PrivacyBudget(public=[{variable.name!r}]).",
            )
        if is_long_constant(variable, lifter.private_length):
            raise lifter.refuse(
                "a constant array as long as the data reaches other records",
                "Standardise with public constants before the model is built; if the array is "
                "public, pass it as pm.Data and declare it in PrivacyBudget(public=...).",
            )


def fixed_shapes(
    outputs: Sequence[Variable],
    parameters: Mapping[Variable, tuple[int, ...]],
    public: Iterable[Variable],
    rows: Iterable[Variable] = (),
    secret_sizes: Iterable[int] = (),
) -> list[Variable]:
    """Sizes and public ``pm.Data`` as numbers, so that no compiled function refers to the model.

    Data arrays would else be reached for their shape, and ``pm.set_data`` would change functions
    already compiled.

    Parameters
    ----------
    outputs : sequence of Variable
    parameters : mapping of Variable to tuple of int
        The value variables of the free random variables, and their shapes.
    public : iterable of Variable
        What was declared public.
    rows : iterable of Variable
        Inputs with an axis of rows, whose sizes are known only when the function runs.
    secret_sizes : iterable of int
        Numbers of rows, where they are private: no value may depend on them.

    Raises
    ------
    NotFactorizable
        If a value depends on a secret size.
    """
    now: dict[Variable, Variable] = {
        variable: variable.type.make_constant(variable.get_value())
        for variable in public
        if is_data(variable)
    }
    outputs = clone_replace(list(outputs), now)
    rows = set(rows)
    sizes: dict[Variable, Variable] = {}
    for variable in ancestors(outputs):
        if variable.owner is None or not isinstance(variable.owner.op, SHAPE_OPS):
            continue
        op, [source] = variable.owner.op, variable.owner.inputs
        if not rows.isdisjoint(ancestors([source])):
            continue  # the size of a block
        shape = _static_shape(source, parameters)
        size = shape if isinstance(op, Shape) else shape[op.i]
        sizes[variable] = pt.constant(np.asarray(size, dtype="int64"))
    _refuse_secret_sizes(outputs, sizes, set(secret_sizes))
    return clone_replace(outputs, sizes, rebuild_strict=False)


def _refuse_secret_sizes(
    outputs: Sequence[Variable], sizes: Mapping[Variable, Variable], secret: set[int]
) -> None:
    """Refuse outputs in which a private number of rows is used as a number."""
    if not secret:
        return
    nodes = {variable.owner for variable in ancestors(outputs) if variable.owner is not None}
    for variable, size in sizes.items():
        if not secret & set(np.ravel(size.data).tolist()):
            continue
        for node in nodes:
            if variable not in node.inputs:
                continue
            picks = isinstance(node.op, Subtensor) and all(
                isinstance(index, Constant) and size.data[int(index.data)] not in secret
                for index in node.inputs[1:]
            )
            if not (picks and len(node.inputs) == 2):
                raise NotFactorizable(
                    "The number of rows enters the likelihood or the prior, and is private under "
                    "neighboring='add_or_remove_one'. Use a public constant instead."
                )


def _static_shape(
    variable: Variable, parameters: Mapping[Variable, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of a value of the full model, computed without reading any data."""
    if None not in variable.type.shape:
        return variable.type.shape
    roots = [v for v in ancestors([variable]) if v.owner is None and not isinstance(v, Constant)]
    blanks = [root.type() for root in roots]
    [copy] = clone_replace([variable], dict(zip(roots, blanks, strict=True)), rebuild_strict=False)
    function = pytensor.function(blanks, copy.shape, mode=_INTERPRETED, on_unused_input="ignore")
    zeros = [
        np.zeros(
            parameters[root] if root in parameters else np.shape(array_of(root)),
            dtype=root.type.dtype,
        )
        for root in roots
    ]
    return tuple(int(size) for size in function(*zeros))
