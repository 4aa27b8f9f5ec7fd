"""Data that are infinite where a record has no bound, as in ``pm.Censored`` and ``pm.Truncated``.

Infinite data are harmless where they are only compared.  :func:`may_be_infinite` finds these in the
graph.  A censored likelihood does nothing else with its bounds.  A truncated one computes with
them, and infinity spoils its derivative if not its value.  So :func:`open_sided` lets each record
choose PyMC's formula for the bounds that the record has.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pymc.distributions.continuous import TruncatedNormalRV
from pymc.distributions.truncated import TruncatedRV
from pymc.logprob.abstract import _logprob
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import toposort
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import Subtensor

from pymc_dp.rows.ancestry import SHAPE_OPS, ancestors_without_shapes, is_data
from pymc_dp.rows.cuts import RowGraph
from pymc_dp.rows.integers import is_float
from pymc_dp.rows.kinks import number

_COMPARES = (ps.EQ, ps.NEQ, ps.LT, ps.LE, ps.GT, ps.GE, ps.IsInf, ps.IsNan)
#: What an infinite number passes as it is, or with the other sign.
_PASSES = (ps.Cast, ps.Identity, ps.Neg, ps.ScalarMaximum, ps.ScalarMinimum, ps.Second, ps.Switch)
_MOVES = (Alloc, DimShuffle, Reshape, SpecifyShape, Subtensor)


def may_be_infinite(graph: RowGraph) -> set[Variable]:
    """The blocks of data that a row graph only compares, or clips to finite numbers first."""
    outputs = [graph.loglik, *(label for label, _ in graph.lookups)]
    outputs += [cut.row_data for cut in graph.cuts if cut.row_data is not None]
    nodes = list(toposort(outputs))

    def harmless(block: Variable) -> bool:
        infinite = {block}
        for node in nodes:
            unused = infinite.isdisjoint(node.inputs) or isinstance(node.op, SHAPE_OPS)
            if unused or _ends(node):
                continue
            scalar = node.op.scalar_op if isinstance(node.op, Elemwise) else None
            others = [x for x in node.inputs if x not in infinite]
            shifts = (
                isinstance(scalar, ps.Add | ps.Sub) and len(others) == 1 and _is_finite(others[0])
            )
            passes = shifts or isinstance(scalar, _PASSES) or isinstance(node.op, _MOVES)
            if not passes or not is_float(node.outputs[0]):
                return False
            infinite.update(node.outputs)
        return infinite.isdisjoint(outputs)

    return {leaf.block for leaf in graph.leaves if is_float(leaf.block) and harmless(leaf.block)}


def _ends(node: Apply) -> bool:
    """Whether a value is finite, or a condition, whatever goes in."""
    scalar = node.op.scalar_op if isinstance(node.op, Elemwise) else None
    clips = isinstance(scalar, ps.Clip) and all(map(_is_finite, node.inputs[1:]))
    return clips or isinstance(scalar, _COMPARES)


def _is_finite(x: Variable) -> bool:
    known = number(x)
    return known is not None and abs(known) < np.inf


# -- truncated likelihoods ------------------------------------------------------------------------


class _OpenTruncated(TruncatedRV):
    """A truncated variable, some of whose records may have no bound."""


class _OpenTruncatedNormal(TruncatedNormalRV):
    """The same for the normal distribution, of which PyMC has a variable of its own."""


_OPEN = {TruncatedRV: _OpenTruncated, TruncatedNormalRV: _OpenTruncatedNormal}


def open_sided(rvs: Sequence[Variable]) -> None:
    """Let records without a bound be told apart in the log-densities of some variables, in place.

    `rvs` are a copy of random variables, with inputs in place of long constants.
    """
    for node in toposort(rvs):
        sides = [_is_of_data(bound) for bound in node.inputs[-2:]]
        if type(node.op) in _OPEN and any(sides):
            op = copy(node.op)
            op.__class__ = _OPEN[type(node.op)]
            op.sides = sides
            node.op = op


def _is_of_data(bound: Variable) -> bool:
    behind = [v for v in ancestors_without_shapes([bound]) if v.owner is None]
    return any(is_data(v) or getattr(v.type, "ndim", 0) > 0 for v in behind)


@_logprob.register(_OpenTruncated)
@_logprob.register(_OpenTruncatedNormal)
def _open_logprob(op: Any, values: Sequence[Variable], *inputs: Any, **kwargs: Any) -> Variable:
    """PyMC's log-density for each set of bounds that a record may have, and a choice by record."""
    [value] = values
    plain = _logprob.dispatch(type(op).__base__)
    given = {x.type(): x for x in inputs if is_float(x) and not isinstance(x, Constant)}
    names = {x: name for name, x in given.items()}

    def density(inputs: list[Any], sides: list[tuple[int, float]]) -> Variable:
        if not sides:
            return plain(op, values, *inputs, **kwargs)
        (place, end), *others = sides
        bound, without, within = inputs[place], list(inputs), list(inputs)
        missing = pt.shape_padleft(pt.eq(bound, end), value.type.ndim - bound.type.ndim)
        limit = float(np.finfo(bound.type.dtype).max)
        without[place] = pt.constant(end)
        within[place] = pt.clip(pt.switch(missing, value, bound), -limit, limit)
        bounded = _with_ones(density(within, others), set(given), missing)
        return pt.switch(missing, density(without, others), bounded)

    sides = [(-2, -np.inf), (-1, np.inf)]
    sides = [x for x, of_data in zip(sides, op.sides, strict=True) if of_data]
    found = density([names.get(x, x) for x in inputs], [x for x in sides if inputs[x[0]] in names])
    return graph_replace(found, given, strict=False)


def _with_ones(value: Variable, wrt: set[Variable], where: Variable) -> Variable:
    """`value` made from ones instead of `wrt` in some places, so that it has no derivative there.

    A derivative of a choice has terms of both branches, where 0 times infinity is not a number.
    """
    new: dict[Variable, Variable] = {}
    done: set[Variable] = set()
    for node in toposort([value]):
        mine = [x for x in node.inputs if x in wrt or x in new]
        if not mine:
            continue
        known = {x: new.get(x, x) for x in node.inputs}
        for x in {*mine} - done:
            if isinstance(node.op, Elemwise) and x.type.ndim == where.type.ndim and is_float(x):
                known[x] = pt.switch(where, 1, known[x])
        outputs = node.clone_with_new_inputs([known[x] for x in node.inputs], strict=False).outputs
        new.update(zip(node.outputs, outputs, strict=True))
        if all(x in done or known[x] is not new.get(x, x) for x in mine):
            done.update(node.outputs)
    return new[value]
