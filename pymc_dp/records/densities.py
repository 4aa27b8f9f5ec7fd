"""Log-densities of a model with its data still in view, and supports of what it observes.

PyMC folds expressions of constants when it derives a log-density: ``X - X.mean(0)`` with a NumPy
``X`` would be one more array with a row per record, and what couples records would not be seen.
Long constants are therefore hidden behind inputs meanwhile, and those of closures
(``pm.CustomDist``) are not folded.  Where the number of rows is private, ``pm.Data`` are hidden as
well, and operations are made again, because types may know lengths (``shape=(n,)``).

Data may be infinite where a record has no bound (``pm.Censored``, ``pm.Truncated``): harmless if
they are only compared (:func:`may_be_infinite`).  A truncated likelihood computes with bounds, and
infinity spoils its derivative: :func:`open_sided` lets records choose the formula for theirs.

Expectations need the supports of outcomes (:func:`with_outcomes`), which the graph of a model
tells.  They are public, or a function of other data of the same record.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pymc.distributions.censored import CensoredRV
from pymc.distributions.continuous import TruncatedNormalRV
from pymc.distributions.mixture import _BaseMixtureRV, _HurdleRV
from pymc.distributions.transforms import _default_transform
from pymc.distributions.truncated import TruncatedRV
from pymc.logprob.abstract import _logprob
from pymc.logprob.basic import transformed_conditional_logp
from pymc.logprob.transforms import (
    CircularTransform,
    IntervalTransform,
    LogOddsTransform,
    LogTransform,
)
from pymc.model import Model
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.basic import Alloc, get_underlying_scalar_constant_value
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.pad import Pad
from pytensor.tensor.random.basic import BernoulliRV
from pytensor.tensor.rewriting.basic import unconditional_constant_folding
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import Subtensor

from pymc_dp.base.compat import OWN_INNER_GRAPHS
from pymc_dp.errors import NotFactorizable
from pymc_dp.records.ancestry import (
    SHAPE_OPS,
    RowCounts,
    ancestors_without_shapes,
    data_behind,
    is_data,
    is_long_constant,
    number,
    without_casts,
)
from pymc_dp.records.arithmetic import is_discrete, is_float, without_wrapping
from pymc_dp.records.graph import Column, Outcome, RowGraph, RowLeaf


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
    """Log-densities of `rvs`, by observation, with every long array as it stands in the model.

    Functions of value variables and data.  `counts` are numbers of rows, where private.  Raises
    NotFactorizable if PyMC cannot derive them, or they confuse integers with truth values.
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

    PyTensor moves an index into a product if that is shorter: a sign whether rows outnumber groups.
    """
    rows = None if counts is None else counts.rows.get(variable, 0)
    shape = tuple(
        None if k is None or k >= length or (axis == rows and k != 1) else k
        for axis, k in enumerate(variable.type.shape)
    )
    return variable.type.clone(shape=shape)(name=variable.name)


_COMPARES = (ps.EQ, ps.NEQ, ps.LT, ps.LE, ps.GT, ps.GE, ps.IsInf, ps.IsNan)
#: An infinite number passes as it is, or with the other sign.
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


class _OpenTruncated(TruncatedRV):
    """A truncated variable, some of whose records may have no bound."""


class _OpenTruncatedNormal(TruncatedNormalRV):
    """The same for the normal distribution, of which PyMC has a variable of its own."""


_OPEN = {TruncatedRV: _OpenTruncated, TruncatedNormalRV: _OpenTruncatedNormal}


def open_sided(rvs: Sequence[Variable]) -> None:
    """Let records without a bound be told apart in log-densities of `rvs`, a copy, in place."""
    for node in toposort(rvs):
        if type(node.op) not in _OPEN:
            continue
        roots = [
            [v for v in ancestors_without_shapes([bound]) if v.owner is None]
            for bound in node.inputs[-2:]
        ]
        sides = [any(is_data(v) or getattr(v.type, "ndim", 0) > 0 for v in x) for x in roots]
        if any(sides):
            op = copy(node.op)
            op.__class__ = _OPEN[type(node.op)]
            op.sides = sides
            node.op = op


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
    """`value` made from ones, not `wrt`, in places whose derivatives are 0 times infinity."""
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


_COPIES = (SpecifyShape, DimShuffle)  # they leave the numbers of a row as they are
_MODES = 4  # more modes of a mixture have no nodes of their own


Support = tuple[float | Column, float | Column, tuple[float | Column, ...]]
"""Two ends, and places between them with a probability of their own."""


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
    return Outcome(leaf, discrete, *support, _modes(rv), _hashed(rv, leaf, graph.leaves))


def _hashed(rv: Variable, own: int, leaves: Sequence[RowLeaf]) -> tuple[int, ...]:
    while isinstance(rv.owner.op, CensoredRV):
        rv = rv.owner.inputs[0]
    behind = set(ancestors([rv]))
    return tuple(k for k, leaf in enumerate(leaves) if k == own or leaf.source in behind)


def _is_count(rv: Variable) -> bool:
    """Whether an outcome is an integer; a censored one is held as a real number."""
    base = isinstance(rv.owner.op, CensoredRV)
    return _is_count(rv.owner.inputs[0]) if base else bool(is_discrete(rv))


def _integers(rv: Variable, leaves: Sequence[RowLeaf], largest: float) -> Support:
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


def _interval(rv: Variable, leaves: Sequence[RowLeaf]) -> Support:
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


def _censored(rv: Variable, leaves: Sequence[RowLeaf]) -> Support:
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
