"""Whether the support of an observed variable ends at a value that depends on parameters.

The density of a Uniform(0, theta) is zero above theta.  Log-likelihoods jump there, and scores,
which tell of slopes, do not show it: the largest record alone holds what there is to know.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor import scalar
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.variable import TensorConstant

from pymc_dp.rows.ancestry import SHAPE_OPS, ancestors_without_shapes, array_of
from pymc_dp.rows.check import full_eta
from pymc_dp.rows.cuts import RowGraph
from pymc_dp.rows.functions import INTERPRETED
from pymc_dp.rows.total import without_errors

_COMPARISONS = (scalar.LT, scalar.LE, scalar.GT, scalar.GE, scalar.IsNan, scalar.IsInf)
_CHOICES = (scalar.ScalarMaximum, scalar.ScalarMinimum, scalar.Clip)
#: Made-up rows at a place among the parameters, and such places.
_ROWS, _PLACES = 48, 12


def ends_of_support(
    graph: RowGraph,
    observed: Container[Variable],
    parameters: Mapping[Variable, tuple[int, ...]],
    start: Mapping[str, np.ndarray],
) -> list[Variable]:
    """The parameters at which the support of an observed variable ends, if any.

    `observed` are the arrays that hold the values of the variable.  `parameters` are the value
    variables of the free random variables, with their shapes, and `start` their initial values.

    A choice between values that depends on the observed value and on parameters is such an end if
    the density is zero on one side of it, whatever the record, and is not on the other.  It is
    taken either way in turn, on made-up rows.  An end at which a density of the user's own is not a
    number, or very small, is not seen.
    """
    rows = [leaf.block for leaf in graph.leaves if leaf.source in observed]
    of_rows, of_etas = _behind(graph, rows), _behind(graph, [cut.eta for cut in graph.cuts])
    found: dict[Variable, None] = {}
    for node in toposort([graph.loglik]):
        if of_rows.isdisjoint(node.inputs) or of_etas.isdisjoint(node.inputs):
            continue
        ways = list(_ways(node))
        if ways and _is_end(graph, node.outputs[0], ways, parameters, start):
            behind = ancestors_without_shapes(node.inputs)
            phis = ancestors_without_shapes([c.phi for c in graph.cuts if c.eta in behind])
            found.update(dict.fromkeys(value for value in parameters if value in phis))
    return list(found)


def _behind(graph: RowGraph, inputs: list[Variable]) -> set[Variable]:
    """What depends on the entries of `inputs`."""
    depend = set(inputs)
    for node in toposort([graph.loglik]):
        if not isinstance(node.op, SHAPE_OPS) and not depend.isdisjoint(node.inputs):
            depend.update(node.outputs)
    return depend


def _ways(node: Apply) -> Iterator[Variable]:
    """What an operation that chooses could have chosen."""
    operation = node.op.scalar_op if isinstance(node.op, Elemwise) else None
    if isinstance(operation, _COMPARISONS):
        here = node.op.make_node(*node.inputs).outputs[0]
        yield from (pt.ones_like(here), pt.zeros_like(here))
    elif isinstance(operation, _CHOICES):
        here = node.op.make_node(*node.inputs).outputs[0]
        for chosen in node.inputs:
            yield pt.switch(pt.ones_like(here, dtype="bool"), chosen, here).astype(here.type.dtype)


def _is_end(
    graph: RowGraph,
    choice: Variable,
    ways: list[Variable],
    parameters: Mapping[Variable, tuple[int, ...]],
    start: Mapping[str, np.ndarray],
) -> bool:
    """Whether one way of a choice is impossible wherever it makes a difference, and is taken."""
    rng = np.random.default_rng(0)
    logps = [clone_replace(graph.loglik, {choice: way}, rebuild_strict=False) for way in ways]
    logps.append(graph.loglik)
    etas = {cut.eta: full_eta(cut, _ROWS) for cut in graph.cuts}
    logps = clone_replace(logps, etas, rebuild_strict=False)
    function = pytensor.function(
        [*parameters, *[leaf.block for leaf in graph.leaves]],
        without_errors(logps, interpreted=True),
        mode=INTERPRETED,
        on_unused_input="ignore",
    )
    # a support may also have fixed ends, between which made-up rows must lie
    constants = [v.data for v in ancestors([graph.loglik]) if isinstance(v, TensorConstant)]
    centres = [0.0, *[float(x.ravel()[0]) for x in constants if x.size == 1]]
    centres = [x for x in centres if abs(x) < 1e12]
    found = []
    for _ in range(_PLACES):
        theta = [
            np.asarray(start[v.name] + rng.normal(size=shape), dtype=v.type.dtype)
            for v, shape in parameters.items()
        ]
        blocks = []
        for leaf in graph.leaves:
            shape = list(np.shape(array_of(leaf.source)))
            del shape[leaf.axis]
            blocks.append(_made_up((_ROWS, *shape), leaf.block.type.dtype, centres, rng))
        with np.errstate(all="ignore"):
            found.append(function(*theta, *blocks))
    # (ways, places and rows)
    *values, taken = np.array(found).swapaxes(0, 1).reshape(len(logps), -1)
    for k, way in enumerate(values):
        others = np.delete(values, k, axis=0)
        differ = ~np.isnan(way) & np.any(others != way, axis=0)
        if (
            np.all(way[differ] == -np.inf)
            and np.isfinite(others[:, differ]).any()
            and np.any(taken[differ] == -np.inf)
        ):
            return True
    return False


def _made_up(
    shape: tuple[int, ...], dtype: str, centres: list[float], rng: np.random.Generator
) -> np.ndarray:
    """Rows in (0, 1), and near and far around numbers of the model; never 0, a possible atom."""
    rows = rng.choice(centres, shape) + rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(
        -1.0, 12.0, shape
    )
    rows[: _ROWS // 3] = rng.uniform(0.1, 0.9, (_ROWS // 3, *shape[1:]))
    if dtype[0] == "f":
        return rows.astype(dtype)
    largest = 1 if dtype == "bool" else np.iinfo(dtype).max
    rows = np.clip(np.round(rows), -largest * (dtype[0] == "i"), largest)
    return np.where(rows == 0.0, 1.0, rows).astype(dtype)
