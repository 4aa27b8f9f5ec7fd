"""The walk along the record axis: what is row data, what is shared, and where they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.rewriting.ofg import inline_ofg_node

from pymc_dp.errors import NotFactorizable
from pymc_dp.rows.ancestry import (
    ancestors_without_shapes,
    array_of,
    is_data,
    is_long_constant,
)
from pymc_dp.rows.cuts import Cut, RowLeaf


def describe(variable: Variable) -> str:
    """A variable in a message: its name, never its values."""
    return f"`{variable.name}`" if variable.name else "an unnamed array"


Rule = Callable[["Lifter", Variable, int], Variable]
Rules = tuple[tuple[type | tuple[type, ...], Rule], ...]


class Lifter:
    """One walk from a per-observation log-probability back to the data; rules call its methods."""

    def __init__(
        self,
        parameters: Mapping[Variable, tuple[int, ...]],
        public: set[Variable],
        n_rows: int,
        private_length: int,
        name: str,
        leaves: dict[Variable, RowLeaf],
        cuts: dict[tuple, Cut],
        conditions: list[Variable],
        rules: Rules,
    ) -> None:
        self.parameters = set(parameters)
        self.shapes = parameters
        self.public = public
        self.n_rows = n_rows
        self.private_length = private_length
        self.name = name
        self.leaves = leaves
        self.cuts = cuts
        self.conditions = conditions
        self.rules = rules
        self.memo: dict[tuple[Variable, int], Variable] = {}
        self.shared: list[Variable] = []
        # labels of rows, the array they index, and its axis
        self.lookups: list[tuple[Variable, Variable, int]] = []
        # stands for the number of rows of a block; replaced once the first leaf is known
        self.block_rows = pt.scalar("block_rows", dtype="int64")

    # -- messages -------------------------------------------------------------------------------

    def refuse(self, what: str, remedy: str, nonprivate: str | None = None) -> NotFactorizable:
        """The error that names the observed variable, what is wrong with it, and a remedy.

        `nonprivate` is the remedy where nothing has to be private.
        """
        start = f"The likelihood of `{self.name}` is not a sum of one term per record: {what}."
        return NotFactorizable(f"{start} {remedy}", f"{start} {nonprivate or remedy}")

    # -- shared values --------------------------------------------------------------------------

    def depends_on_parameters(self, variable: Variable) -> bool:
        """Whether the value of `variable` is a function of some parameter."""
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
        if order[axis] == "x":
            eta = self.cut("copy", phi, (self.n_rows, *phi.type.shape))
            return eta.dimshuffle(
                [
                    0 if k == axis else ("x" if isinstance(a, str) else a + 1)
                    for k, a in enumerate(order)
                ]
            )
        # the axis of size one belongs to the value itself
        eta = self.cut("copy", variable, (self.n_rows, *variable.type.shape))
        keep = [0 if k == axis else k + 1 for k in range(variable.type.ndim)]
        return eta.dimshuffle(keep)

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
        for kinds, rule in self.rules:
            if isinstance(op, kinds):
                return rule(self, variable, axis)
        if isinstance(op, OpFromGraph):
            return self.lift(_inline(variable), axis)
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
        """Lifted labels that index the axes of `indexed` from `first` on.

        They are clipped: labels of the data are checked when the model is read, but made-up data
        are not, and compiled code does not check bounds.
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
    node = variable.owner
    return inline_ofg_node(node)[node.outputs.index(variable)]
