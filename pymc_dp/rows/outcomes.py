"""What the graph of a model tells of the outcomes of a record: their supports.

Expectations over an outcome that the model itself would draw for a record (:mod:`.expected`) need
the places that it can have. They are public, or a function of other data of the same record.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pymc.distributions.censored import CensoredRV
from pymc.distributions.mixture import _BaseMixtureRV
from pymc.distributions.transforms import _default_transform
from pymc.logprob.transforms import (
    CircularTransform,
    IntervalTransform,
    LogOddsTransform,
    LogTransform,
)
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import get_underlying_scalar_constant_value
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.shape import SpecifyShape

from pymc_dp.rows.ancestry import ancestors_without_shapes, data_behind, without_casts
from pymc_dp.rows.cuts import Column, Outcome, RowGraph, RowLeaf
from pymc_dp.rows.integers import is_discrete, is_float

__all__ = ["each_alone", "with_outcomes"]


#: Operations that leave the numbers of a row as they are.
_COPIES = (SpecifyShape, DimShuffle)
#: More modes of a mixture than this have no nodes of their own.
_MODES = 4


class _Unknown(Exception):
    """The support is not known."""


def with_outcomes(graph: RowGraph, rvs: Sequence[Variable], values: Sequence[Variable]) -> RowGraph:
    """The graph, with what is known of the outcomes of its rows.

    Parameters
    ----------
    graph : RowGraph
    rvs, values : sequence of Variable
        The observed random variables that it covers, and what they observe.
    """
    try:
        outcomes = [
            _outcome(graph, k, *seen) for k, seen in enumerate(zip(rvs, values, strict=True))
        ]
    except _Unknown:
        return graph
    return replace(graph, outcomes=tuple(outcomes))


def each_alone(graph: RowGraph) -> list[RowGraph]:
    """A graph for each observed variable, of the same leaves and of the cuts that it needs."""
    if len(graph.names) == 1:
        return [graph]
    found = []
    for k, term in enumerate(graph.terms):
        behind = set(ancestors([term]))
        cuts = tuple(cut for cut in graph.cuts if cut.eta in behind)
        outcomes = graph.outcomes[k : k + 1]
        names = graph.names[k : k + 1]
        found.append(replace(graph, terms=(term,), cuts=cuts, names=names, outcomes=outcomes))
    return found


def _outcome(graph: RowGraph, which: int, rv: Variable, value: Variable) -> Outcome:
    source = data_behind(value)
    held = [k for k, leaf in enumerate(graph.leaves) if leaf.source is source]
    if rv.type.ndim != 1 or len(held) != 1:
        raise _Unknown
    [leaf], block = held, graph.leaves[held[0]].block
    columns = [cut.row_data for cut in graph.cuts if cut.row_data is not None]
    others = [term for k, term in enumerate(graph.terms) if k != which]
    if block in ancestors_without_shapes([*columns, *others]):
        raise _Unknown
    behind = [
        (label, size) for label, size in graph.lookups if block in ancestors_without_shapes([label])
    ]
    if is_discrete(rv):
        if any(not _is_cast_of(label, block) for label, _ in behind):
            raise _Unknown
        largest = float(min([_largest(block), *[size - 1 for _, size in behind]]))
        return Outcome(leaf, True, 0.0, largest, modes=_modes(rv))
    if behind or not is_float(block):
        raise _Unknown
    lower, upper, atoms = _interval(rv, graph.leaves)
    return Outcome(leaf, False, lower, upper, atoms, _modes(rv))


def _largest(block: Variable) -> int:
    """The largest integer that the data can hold."""
    dtype = np.dtype(block.type.dtype)
    if dtype.kind == "b":
        return 1
    return 2**31 - 1 if dtype.kind == "f" else min(2**31 - 1, int(np.iinfo(dtype).max))


def _is_cast_of(label: Variable, block: Variable) -> bool:
    return without_casts(label, _COPIES) is block


def _interval(
    rv: Variable, leaves: Sequence[RowLeaf]
) -> tuple[float | Column, float | Column, tuple[float | Column, ...]]:
    """Support of a continuous outcome, and its atoms."""
    op = rv.owner.op
    if isinstance(op, CensoredRV):
        base, *ends = rv.owner.inputs[:3]
        lower, upper, atoms = _interval(base, leaves)
        low, high = _end(ends[0], leaves, -np.inf), _end(ends[1], leaves, np.inf)
        atoms = tuple(end for end in (low, high) if end not in (-np.inf, np.inf))
        return _narrower(lower, low, max), _narrower(upper, high, min), atoms
    if isinstance(op, _BaseMixtureRV):
        found = [_interval(part, leaves) for part in rv.owner.inputs[2:] if _is_law(part)]
        spread = [part for part in found if part[0] != part[1] or part[0] == -np.inf]
        if not spread or any(part[:2] != spread[0][:2] for part in spread[1:]):
            raise _Unknown
        points = [part[0] for part in found if part[0] == part[1]]
        return *spread[0][:2], tuple(dict.fromkeys(points))
    if _is_point(rv):
        place = _end(rv.owner.inputs[0], leaves)
        return place, place, ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transform: Any = _default_transform(op, rv)
    if transform is None:
        return -np.inf, np.inf, ()
    if isinstance(transform, LogOddsTransform):
        return 0.0, 1.0, ()
    if isinstance(transform, LogTransform):
        return 0.0, np.inf, ()
    if isinstance(transform, CircularTransform):
        return -np.pi, np.pi, ()
    if isinstance(transform, IntervalTransform):
        ends = transform.args_fn(*rv.owner.inputs)
        lower, upper = (
            infinite if end is None else _end(end, leaves)
            for end, infinite in zip(ends, (-np.inf, np.inf), strict=True)
        )
        return lower, upper, ()
    raise _Unknown


def _modes(rv: Variable) -> int:
    """How many modes a density may have, if those of a mixture have one each."""
    op = rv.owner.op
    if isinstance(op, CensoredRV):
        return _modes(rv.owner.inputs[0])
    if not isinstance(op, _BaseMixtureRV):
        return 1
    parts = [part for part in rv.owner.inputs[2:] if _is_law(part)]
    if len(parts) == 1:
        return min(parts[0].type.shape[-1] or _MODES, _MODES)
    return min(max(sum(not _is_point(part) for part in parts), 1), _MODES)


def _is_law(variable: Variable) -> bool:
    return variable.owner is not None and hasattr(variable.owner.op, "ndim_supp")


def _is_point(rv: Variable) -> bool:
    return type(rv.owner.op).__name__ == "DiracDeltaRV"


def _narrower(one: float | Column, other: float | Column, choose: Any) -> float | Column:
    """Where an interval ends that is cut off."""
    if isinstance(one, Column):
        raise _Unknown
    if isinstance(other, Column):
        return replace(other, least=one) if choose is max else replace(other, most=one)
    return choose(one, other)


def _end(end: Variable, leaves: Sequence[RowLeaf], without: float | None = None) -> float | Column:
    """A number, or one for each row.

    Whether the entries of a longer array are equal is not looked at: they may be private.  PyMC 6
    leaves ends out of a censored density where none of a constant is finite, whatever the signs:
    they are as if there were none then, `without`.
    """
    end = without_casts(end, _COPIES)
    for k, leaf in enumerate(leaves):
        if leaf.source is end and leaf.block.type.ndim == 1:
            return Column(k)
    if without is not None and isinstance(end, Constant) and np.ndim(end.data) == 1:
        if np.isinf(end.data).all():
            return without
    constants = [v for v in ancestors([end]) if v.owner is None]
    if not all(isinstance(v, Constant) and np.ndim(v.data) == 0 for v in constants):
        raise _Unknown
    try:
        return float(get_underlying_scalar_constant_value(end))
    except NotScalarConstantError:
        raise _Unknown from None
