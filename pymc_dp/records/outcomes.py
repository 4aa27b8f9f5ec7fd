"""What the graph of a model tells of the outcomes of a record: their supports.

Expectations need them.  They are public, or a function of other data of the same record.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pymc.distributions.censored import CensoredRV
from pymc.distributions.mixture import _BaseMixtureRV, _HurdleRV
from pymc.distributions.transforms import _default_transform
from pymc.distributions.truncated import TruncatedRV
from pymc.logprob.transforms import (
    CircularTransform,
    IntervalTransform,
    LogOddsTransform,
    LogTransform,
)
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import get_underlying_scalar_constant_value
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.random.basic import BernoulliRV
from pytensor.tensor.shape import SpecifyShape

from pymc_dp.records.ancestry import ancestors_without_shapes, data_behind, without_casts
from pymc_dp.records.arithmetic import is_discrete, is_float
from pymc_dp.records.graph import Column, Outcome, RowGraph, RowLeaf

_COPIES = (SpecifyShape, DimShuffle)  # they leave the numbers of a row as they are
_MODES = 4  # more modes of a mixture have no nodes of their own


class _Unknown(Exception):
    """The support is not known."""


def with_outcomes(graph: RowGraph, rvs: Sequence[Variable], values: Sequence[Variable]) -> RowGraph:
    """The graph, with what is known of the outcomes `values` of its observed variables `rvs`."""
    try:
        outcomes = [
            _outcome(graph, k, *seen) for k, seen in enumerate(zip(rvs, values, strict=True))
        ]
    except _Unknown:
        return graph
    return replace(graph, outcomes=tuple(outcomes))


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
    discrete = _is_count(rv)
    if discrete:
        if any(without_casts(label, _COPIES) is not block for label, _ in behind):
            raise _Unknown
        largest = float(min([_largest(block), *[size - 1 for _, size in behind]]))
        support = _integers(rv, graph.leaves, largest)
    elif behind or not is_float(block):
        raise _Unknown
    else:
        support = _interval(rv, graph.leaves)
    hashed = _hashed(rv, leaf, graph.leaves)
    return Outcome(leaf, discrete, *support, _modes(rv), hashed)


def _hashed(rv: Variable, own: int, leaves: Sequence[RowLeaf]) -> tuple[int, ...]:
    while isinstance(rv.owner.op, CensoredRV):
        rv = rv.owner.inputs[0]
    behind = set(ancestors([rv]))
    return tuple(k for k, leaf in enumerate(leaves) if k == own or leaf.source in behind)


def _is_count(rv: Variable) -> bool:
    """Whether an outcome is an integer; a censored one is held as a real number."""
    base = isinstance(rv.owner.op, CensoredRV)
    return _is_count(rv.owner.inputs[0]) if base else bool(is_discrete(rv))


def _integers(
    rv: Variable, leaves: Sequence[RowLeaf], largest: float
) -> tuple[float | Column, float | Column, tuple[float | Column, ...]]:
    """Support of a count, as far as the distribution tells it, and its atoms."""
    if not isinstance(rv.owner.op, CensoredRV):
        return 0.0, 1.0 if isinstance(rv.owner.op, BernoulliRV) else largest, ()
    low, high, atoms = _censored(rv, leaves)
    if any(isinstance(end, float) and end % 1.0 for end in atoms):
        raise _Unknown
    return _narrower(0.0, low, max), _narrower(largest, high, min), atoms


def _largest(block: Variable) -> int:
    """The largest integer that the data can hold."""
    dtype = np.dtype(block.type.dtype)
    if dtype.kind == "b":
        return 1
    return 2**31 - 1 if dtype.kind == "f" else min(2**31 - 1, int(np.iinfo(dtype).max))


def _interval(
    rv: Variable, leaves: Sequence[RowLeaf]
) -> tuple[float | Column, float | Column, tuple[float | Column, ...]]:
    """Support of a continuous outcome, and its atoms."""
    op = rv.owner.op
    if isinstance(op, CensoredRV):
        lower, upper, _ = _interval(rv.owner.inputs[0], leaves)
        low, high, atoms = _censored(rv, leaves)
        return _narrower(lower, low, max), _narrower(upper, high, min), atoms
    if isinstance(op, _BaseMixtureRV):
        parts = [part for part in rv.owner.inputs[2:] if _is_law(part)]
        if any(isinstance(part.owner.op, CensoredRV) for part in parts):
            raise _Unknown  # whose ends may be gone, see _end
        found = [_interval(part, leaves) for part in parts]
        spread = [part for part in found if part[0] != part[1] or part[0] == -np.inf]
        if not spread or any(part[:2] != spread[0][:2] for part in spread[1:]):
            raise _Unknown
        points = [part[0] for part in found if part[0] == part[1]]
        lower, upper = spread[0][:2]
        apart = isinstance(op, _HurdleRV)  # elsewhere PyMC adds a density to a probability
        if not apart and any(_may_be_between(point, lower, upper) for point in points):
            raise _Unknown
        return lower, upper, tuple(dict.fromkeys(points))
    if _is_point(rv):
        place = _end(rv.owner.inputs[-1], leaves)
        return place, place, ()
    if isinstance(op, TruncatedRV):
        lower, upper = _by_transform(op.base_rv_op, rv, rv.owner.inputs[:-2], leaves)
        low, high = (_end(end, leaves) for end in rv.owner.inputs[-2:])
        return _narrower(lower, low, max), _narrower(upper, high, min), ()
    return *_by_transform(op, rv, rv.owner.inputs, leaves), ()


def _by_transform(
    op: Op, rv: Variable, inputs: Sequence[Variable], leaves: Sequence[RowLeaf]
) -> tuple[float | Column, float | Column]:
    """Where a distribution ends, told by PyMC's transform to real numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transform: Any = _default_transform(op, rv)
    if transform is None:
        return -np.inf, np.inf
    if isinstance(transform, LogOddsTransform):
        return 0.0, 1.0
    if isinstance(transform, LogTransform):
        return 0.0, np.inf
    if isinstance(transform, CircularTransform):
        return -np.pi, np.pi
    if isinstance(transform, IntervalTransform):
        # PyMC looks whether numbers of an array are the same, and infinite: these may be private
        arrays = [v for v in ancestors(inputs) if isinstance(v, Constant) and np.ndim(v.data)]
        names = {array: array.type() for array in arrays}
        ends = transform.args_fn(*clone_replace(inputs, names))
        arrays_of = {name: array for array, name in names.items()}
        lower, upper = (
            infinite if end is None else _end(graph_replace(end, arrays_of, strict=False), leaves)
            for end, infinite in zip(ends, (-np.inf, np.inf), strict=True)
        )
        return lower, upper
    raise _Unknown


def _censored(
    rv: Variable, leaves: Sequence[RowLeaf]
) -> tuple[float | Column, float | Column, tuple[float | Column, ...]]:
    """Where an outcome is cut off, and which of these ends are finite."""
    low, high = (
        _end(end, leaves, infinite)
        for end, infinite in zip(rv.owner.inputs[1:3], (-np.inf, np.inf), strict=True)
    )
    return low, high, tuple(end for end in (low, high) if end not in (-np.inf, np.inf))


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


def _may_be_between(point: float | Column, lower: float | Column, upper: float | Column) -> bool:
    if isinstance(point, Column) or isinstance(lower, Column) or isinstance(upper, Column):
        return True
    return lower <= point <= upper


def _narrower(one: float | Column, other: float | Column, choose: Any) -> float | Column:
    if isinstance(one, Column):
        raise _Unknown
    if isinstance(other, Column):
        return replace(other, least=one) if choose is max else replace(other, most=one)
    return choose(one, other)


def _end(end: Variable, leaves: Sequence[RowLeaf], without: float | None = None) -> float | Column:
    """A number, or one for each row; entries of an array, which may be private, are not compared.

    `without` stands for ends that are all infinite: PyMC 6 leaves these out of a censored density.
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
