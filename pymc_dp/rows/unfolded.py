"""Log-densities of a model with its data still in view.

While PyMC derives a log-density it folds expressions of constants: ``X - X.mean(0)`` with a NumPy
``X`` would reach us as one more array with a row per record, and what couples the records would
never be seen.  Long constants are therefore hidden behind inputs for the time of the derivation,
and those that appear only meanwhile, captured by a closure of ``pm.CustomDist``, are not folded.

Where the number of rows is private, the same is done with ``pm.Data``, and every operation is made
again: a type that knows a length (``pm.Data("x", x, shape=(n,))``) would turn it into a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pymc.logprob.basic import transformed_conditional_logp
from pymc.model import Model
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.pad import Pad
from pytensor.tensor.rewriting.basic import unconditional_constant_folding

from pymc_dp.base.compat import OWN_INNER_GRAPHS
from pymc_dp.errors import NotFactorizable
from pymc_dp.rows.ancestry import is_long_constant
from pymc_dp.rows.counts import RowCounts
from pymc_dp.rows.infinite import open_sided
from pymc_dp.rows.integers import without_wrapping


@contextmanager
def long_constants_kept(length: int) -> Iterator[None]:
    """Keep PyTensor from folding expressions of constants with `length` entries or more."""
    rewriter = unconditional_constant_folding
    fold = rewriter.transform

    def transform(fgraph: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        if any(is_long_constant(x, length) for x in node.inputs):
            return False
        return fold(fgraph, node, *args, **kwargs)

    rewriter.transform = transform
    try:
        yield
    finally:
        del rewriter.transform


def log_densities(
    model: Model, rvs: Sequence[Variable], *, jacobian: bool, length: int, counts: RowCounts | None
) -> list[Variable]:
    """Per-observation log-densities, every long array as it stands in the model.

    There is one for each of `rvs`, as a function of the model's value variables and data.
    `jacobian` adds the log-Jacobian of the transforms.  Constants with `length` entries or more are
    not folded.  `counts` are the numbers of rows, where they are private.  Raises NotFactorizable
    if PyMC cannot derive them, or they confuse integers with truth values.
    """
    everything = model.basic_RVs
    values = [model.rvs_to_values[rv] for rv in everything]
    hidden = {
        variable: _without_lengths(variable, length, counts)
        for variable in ancestors([*everything, *values])
        if is_long_constant(variable, length) or (counts is not None and counts.may_tell(variable))
    }
    symbolic = clone_replace(everything, hidden, rebuild_strict=False, **OWN_INNER_GRAPHS)
    if counts is not None:
        symbolic = _rebuilt(symbolic, set(hidden.values()))
    open_sided(symbolic)
    clones = dict(zip(everything, symbolic, strict=True))
    symbols = dict(zip(values, clone_replace(values, hidden, rebuild_strict=False), strict=True))
    # a short array may be one of rows, too, and is told only by where it stands
    kept = length if counts is None else 2
    try:
        with long_constants_kept(kept):
            logps = transformed_conditional_logp(
                [clones[rv] for rv in rvs],
                rvs_to_values={clones[rv]: symbols[model.rvs_to_values[rv]] for rv in everything},
                rvs_to_transforms={
                    clones[rv]: model.rvs_to_transforms.get(rv) for rv in everything
                },
                jacobian=jacobian,
            )
    except (AssertionError, AttributeError, ValueError) as error:
        names = ", ".join(f"`{rv.name}`" for rv in rvs)
        if isinstance(error, AssertionError):  # how PyTensor 2 refuses a matrix for each record
            raise NotFactorizable(
                f"The log-density of {names} fails an assertion of PyTensor, most often because an "
                "operation on one matrix, such as pt.linalg.eigh, is given one for each record. "
                "Compute it before the model is built, or use pt.linalg.cholesky and "
                "pt.linalg.solve_triangular."
            ) from error
        if isinstance(error, AttributeError):
            if error.name != "ndim_supp":  # PyMC takes a shape that it must assert for a variable
                raise
            raise NotFactorizable(
                f"PyMC could not derive the log-density of {names} without the lengths of its "
                "arrays, which may be numbers of rows: some have as many entries as there are "
                "records. Give the components of a mixture as a list, one distribution each."
            ) from error
        raise NotFactorizable(
            f"PyMC could not derive the log-density of {names}, most often because lengths "
            "disagree. Give every column of one likelihood the same number of rows."
        ) from error
    data = {symbol: constant for constant, symbol in hidden.items()}
    logps = clone_replace(logps, data, rebuild_strict=False)
    return [
        without_wrapping([logp], f"The density of `{rv.name}`")[0]
        for rv, logp in zip(rvs, logps, strict=True)
    ]


def _rebuilt(outputs: Sequence[Variable], inputs: set[Variable]) -> list[Variable]:
    """`outputs` with all operations on `inputs` repeated, to lose what they knew of lengths."""
    found: dict[Variable, Variable] = {}
    for node in toposort(outputs):
        if not any(x in inputs or x in found for x in node.inputs):
            continue
        now = [found.get(x, x) for x in node.inputs]
        try:
            if isinstance(node.op, Pad):  # it wraps a graph that keeps what it knew
                raise TypeError
            made = node.op.make_node(*now)
        except (AssertionError, TypeError, ValueError) as error:
            what = f"{node.op} cannot be computed without the lengths of its arrays, which may be "
            raise NotFactorizable(
                f"{what}the number of rows; that is private under neighboring='add_or_remove_one' "
                "and with a privacy_unit. Write it with other operations.",
                f"{what}the number of rows. Write it with other operations.",
            ) from error
        for before, after in zip(node.outputs, made.outputs, strict=True):
            after.name = before.name
            found[before] = after
    return [found.get(x, x) for x in outputs]


def _without_lengths(variable: Variable, length: int, counts: RowCounts | None) -> Variable:
    """An input like an array, whose long axes, and that of rows, have unknown lengths.

    PyTensor moves an index into a product where this makes it shorter, so that the form of a
    likelihood would tell whether there are more rows, which may be secret, or more groups.
    """
    rows = None if counts is None else counts.rows.get(variable, 0)
    shape = tuple(
        None if k is None or k >= length or (axis == rows and k != 1) else k
        for axis, k in enumerate(variable.type.shape)
    )
    return variable.type.clone(shape=shape)(name=variable.name)
