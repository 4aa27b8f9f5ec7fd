"""Sizes of arrays as numbers, so that no compiled function refers to the data for their shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import MakeVector
from pytensor.tensor.shape import Shape
from pytensor.tensor.subtensor import Subtensor

from pymc_dp.base.compat import subtensor_indices
from pymc_dp.rows.ancestry import (
    SHAPE_OPS,
    array_of,
    is_data,
)

#: For functions called once.  Constants of the model stay in the graph: nothing may compile it.
_INTERPRETED = Mode(linker="py", optimizer=None)


def fixed_shapes(
    outputs: Sequence[Variable],
    parameters: Mapping[Variable, tuple[int, ...]],
    public: Iterable[Variable],
    rows: Iterable[Variable] = (),
) -> list[Variable]:
    """Sizes and public ``pm.Data`` as numbers, so that no compiled function refers to the model.

    Otherwise data arrays would be reached for their shape, and ``pm.set_data`` would change
    functions already compiled.  `parameters` are the value variables of the free random variables,
    and their shapes.  `rows` are inputs with an axis of rows, whose sizes are known only when the
    function runs.
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
    function = pytensor.function(blanks, copy.shape, mode=_INTERPRETED, on_unused_input="ignore")
    zeros = [
        np.zeros(
            parameters[root] if root in parameters else np.shape(array_of(root)),
            dtype=root.type.dtype,
        )
        for root in roots
    ]
    return tuple(int(size) for size in function(*zeros))
