"""Data that are infinite where a record has no bound, as in ``pm.Censored`` and ``pm.Truncated``.

Infinite data are harmless where they are only compared.  :func:`may_be_infinite` finds these in the
graph.  A censored likelihood does nothing else with its bounds.  A truncated one computes with
them, and infinity spoils its derivative if not its value, so :func:`open_sided` lets each record
choose the formula that PyMC has for the bounds that the record has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pymc.distributions.continuous import TruncatedNormalRV
from pymc.distributions.truncated import TruncatedRV
from pymc.logprob.abstract import _logprob
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import toposort
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import Subtensor

from pymc_dp.rows.ancestry import SHAPE_OPS, ancestors_without_shapes, is_data
from pymc_dp.rows.cuts import RowGraph
from pymc_dp.rows.kinks import number

__all__ = ["may_be_infinite", "open_sided"]

_COMPARISONS = (ps.EQ, ps.NEQ, ps.LT, ps.LE, ps.GT, ps.GE, ps.IsInf, ps.IsNan)
#: What hands infinite numbers on as they are, or with the other sign.
_HANDS_ON = (ps.Cast, ps.Identity, ps.Neg, ps.ScalarMaximum, ps.ScalarMinimum, ps.Second, ps.Switch)
_MOVES = (Alloc, DimShuffle, Reshape, SpecifyShape, Subtensor)


def may_be_infinite(graph: RowGraph) -> set[Variable]:
    """The blocks of data that a row graph only compares, or clips to finite numbers first."""
    outputs = [graph.loglik, *(label for label, _ in graph.lookups)]
    outputs += [cut.row_data for cut in graph.cuts if cut.row_data is not None]
    nodes = list(toposort(outputs))

    def harmless(block: Variable) -> bool:
        infinite = {block}
        for node in nodes:
            scalar = node.op.scalar_op if isinstance(node.op, Elemwise) else None
            ends = [number(x) for x in node.inputs[1:]] if isinstance(scalar, ps.Clip) else [None]
            clipped = all(end is not None and math.isfinite(end) for end in ends)
            ends_here = clipped or isinstance(scalar, _COMPARISONS) or isinstance(node.op, SHAPE_OPS)
            if ends_here or infinite.isdisjoint(node.inputs):
                continue
            if not isinstance(scalar, _HANDS_ON) and not isinstance(node.op, _MOVES):
                return False
            if not node.outputs[0].type.dtype.startswith("float"):
                return False
            infinite.update(node.outputs)
        return infinite.isdisjoint(outputs)

    floats = (leaf.block for leaf in graph.leaves if leaf.block.type.dtype.startswith("float"))
    return {block for block in floats if harmless(block)}


# -- truncated likelihoods ------------------------------------------------------------------------


class _OpenTruncated(TruncatedRV):
    """A truncated variable, some of whose records may have no bound."""


class _OpenTruncatedNormal(TruncatedNormalRV):
    """The same for the normal distribution, of which PyMC has a variable of its own."""


_OPEN = {TruncatedRV: _OpenTruncated, TruncatedNormalRV: _OpenTruncatedNormal}


def open_sided(rvs: Sequence[Variable]) -> None:
    """Let records without a bound be told apart in the log-densities of some variables, in place.

    Parameters
    ----------
    rvs : sequence of Variable
        A copy of random variables, with inputs in place of long constants.
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
    given = {x.type(): x for x in inputs if _is_float(x) and not isinstance(x, Constant)}
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
    """`value` with 1 for what depends on `wrt`, in some places, that its derivatives are 0 there.

    Derivatives of a choice are sums over both branches, in which 0 times infinity is no number.
    """
    new: dict[Variable, Variable] = {}
    done: set[Variable] = set()
    for node in toposort([value]):
        mine = [x for x in node.inputs if x in wrt or x in new]
        if not mine:
            continue
        again = list(node.inputs)
        for k, x in enumerate(node.inputs):
            again[k] = new.get(x, x)
            aligned = isinstance(node.op, Elemwise) and x.type.ndim == where.type.ndim
            if x in mine and x not in done and aligned and _is_float(x):
                again[k] = pt.switch(where, 1, again[k])
        outputs = node.clone_with_new_inputs(again, strict=False).outputs
        new.update(zip(node.outputs, outputs, strict=True))
        if all(x in done or y is not new.get(x, x) for x, y in zip(node.inputs, again) if x in mine):
            done.update(node.outputs)
    return new[value]


def _is_float(x: Variable) -> bool:
    return getattr(x.type, "dtype", "").startswith("float")
