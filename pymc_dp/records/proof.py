"""The proof that a likelihood is a sum of one term per record.

:func:`lift_rows` walks from the per-observation log-probability back to the data, following the
record axis through every operation (:mod:`pymc_dp.records.lifter`), to row data and to shared
values, which must not depend on any row.  :func:`check_numerically` tries the result on synthetic
data.  :func:`ends_of_support` finds what scores do not show.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor import scalar
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.variable import TensorConstant

from pymc_dp.base.threads import INTERPRETED
from pymc_dp.errors import NotFactorizable
from pymc_dp.records.ancestry import (
    SHAPE_OPS,
    RowCounts,
    ancestors_without_shapes,
    array_of,
    counts_rows,
    fixed_shapes,
    hides_code,
    is_long_constant,
    static_shape,
)
from pymc_dp.records.arithmetic import without_errors
from pymc_dp.records.graph import Cut, RowGraph, RowLeaf, full_eta
from pymc_dp.records.lifter import Lifter, describe
from pymc_dp.records.units import made_up


def lift_rows(
    logps: dict[str, Variable],
    parameters: Mapping[Variable, tuple[int, ...]],
    public: Iterable[Variable],
    n_rows: int,
    private_length: int | None = None,
    counts: RowCounts | None = None,
) -> RowGraph:
    """Rebuild per-observation log-likelihoods as the log-likelihood of a block of rows.

    Raises NotFactorizable, with a remedy, unless each term is shown to depend on its own row only.
    `logps`, by observed variable, have records first; further axes are summed.  `parameters` are
    value variables with their shapes.  `public` inputs may reach every record; unnamed arrays of
    `private_length` (default `n_rows`) entries or more may not.  No term may depend on `counts`.
    """
    public = set(public)
    leaves: dict[Variable, RowLeaf] = {}
    cuts: dict[tuple, Cut] = {}
    conditions: list[Variable] = []
    lifters: list[Lifter] = []
    terms: list[Variable] = []
    for name, logp in logps.items():
        length = private_length or n_rows
        lifter = Lifter(name, parameters, public, n_rows, length, leaves, cuts, conditions)
        value = lifter.lift(logp, 0)
        if value.type.ndim > 1:
            value = value.sum(axis=tuple(range(1, value.type.ndim)))
        if not leaves:
            raise NotFactorizable(f"The likelihood of `{name}` does not depend on any data.")
        check_shared(lifter)
        lifters.append(lifter)
        terms.append(value)
    rows = {leaf.block for leaf in leaves.values()} | {cut.eta for cut in cuts.values()}
    phis = [cut.phi for cut in cuts.values()]
    lookups = [lookup for lifter in lifters for lookup in lifter.lookups]
    columns = [cut.row_data for cut in cuts.values() if cut.row_data is not None]
    block_rows = next(iter(leaves.values())).block.shape[0]
    of_rows = clone_replace(
        [*terms, *columns, *[label for label, _, _ in lookups]],
        {lifter.block_rows: block_rows for lifter in lifters},
    )
    outputs = [*of_rows, *phis, *conditions]
    if counts is not None:
        counted = replace(counts, public={*counts.public, *parameters, *rows}).behind(outputs, phis)
        if counted is not None:
            names = ", ".join(f"`{name}`" for name in logps)
            raise NotFactorizable(counts_rows(f"The likelihood of {names}", counted))
    found = iter(fixed_shapes(outputs, parameters, public, rows))
    terms = [next(found) for _ in terms]
    row_data = [None if cut.row_data is None else next(found) for cut in cuts.values()]
    labels = [(next(found), static_shape(x, parameters)[axis]) for _, x, axis in lookups]
    return RowGraph(
        terms=tuple(terms),
        cuts=tuple(
            replace(cut, row_data=column, phi=next(found))
            for cut, column in zip(cuts.values(), row_data, strict=True)
        ),
        leaves=tuple(leaves.values()),
        lookups=tuple(labels),
        conditions=tuple(found),
        n_rows=n_rows,
        names=tuple(logps),
    )


def check_shared(lifter: Lifter) -> None:
    """Refuse row data, and private arrays of unknown meaning, that reach every record."""
    hidden = hides_code([*lifter.shared, *lifter.memo.values()])
    if hidden is not None:
        raise lifter.refuse(
            f"operation {hidden} reaches records and may hold data that cannot be seen",
            "Write it with PyTensor operations.",
        )
    for variable in ancestors_without_shapes(lifter.shared):
        if variable in lifter.public or variable.owner is not None:
            continue
        if variable in lifter.leaves:
            raise lifter.refuse(
                f"rows of {describe(variable)} reach other records (for instance through a mean, "
                "a maximum or a standardisation inside the model)",
                "Standardise with public constants, before the model is built.",
                "Standardise with constants, before the model is built.",
            )
        if isinstance(variable, SharedVariable):
            raise lifter.refuse(
                f"pm.Data {describe(variable)} reaches every record",
                f"If it is not private, declare it: PrivacyBudget(public=[{variable.name!r}]).",
                "It has as many entries as there are records, of which a sample takes a part: "
                "compute what is needed of it before the model is built.",
            )
        if is_long_constant(variable, lifter.private_length):
            raise lifter.refuse(
                "a constant array as long as the data reaches other records",
                "Standardise with public constants before the model is built; if the array is "
                "public, pass it as pm.Data and declare it in PrivacyBudget(public=...).",
                "Standardise with constants before the model is built.",
            )


def check_numerically(
    raw: dict[str, Variable],
    graph: RowGraph,
    values: Sequence[Variable],
    shapes: Mapping[Variable, tuple[int, ...]],
    public: set[Variable],
) -> None:
    """Perturb one synthetic record: all other terms of PyMC's own graph must keep their bits.

    The rebuilt graph must agree with PyMC's.  Public data stay.  Where labels computed from data do
    not fit synthetic ones, the structural proof stands alone.
    """
    rng = np.random.default_rng(20211)
    sources = [leaf.source for leaf in graph.leaves]
    blanks = [source.type() for source in sources]
    terms = []
    for logp in raw.values():
        terms.append(logp if logp.type.ndim == 1 else logp.sum(tuple(range(1, logp.type.ndim))))
    # clone first: the model's own graph must not be rewritten in place
    terms = clone_replace(terms, dict(zip(sources, blanks, strict=True)), rebuild_strict=False)
    terms = rewrite_graph(
        terms, include=("canonicalize", "local_remove_check_parameter"), clone=False
    )
    shared_etas = [full_eta(cut, graph.n_rows) for cut in graph.cuts]
    rebuilt = clone_replace(
        [graph.loglik],
        {cut.eta: eta for cut, eta in zip(graph.cuts, shared_etas, strict=True)},
        rebuild_strict=False,
    )[0]
    blocks = [leaf.block for leaf in graph.leaves]
    function = pytensor.function(
        [*values, *blanks, *blocks],
        without_errors([reduce(add, terms), rebuilt], interpreted=True),
        mode=INTERPRETED,
        on_unused_input="ignore",
        accept_inplace=True,
    )
    theta = [
        np.asarray(0.05 + 0.1 * rng.standard_normal(shapes[v]), dtype=v.type.dtype) for v in values
    ]
    largest = min([1, *[size - 1 for _, size in graph.lookups]])
    arrays = [
        array_of(leaf.source)
        if leaf.source in public
        else made_up(np.shape(array_of(leaf.source)), array_of(leaf.source).dtype, largest, rng)
        for leaf in graph.leaves
    ]

    def evaluate() -> tuple[np.ndarray, np.ndarray]:
        moved = [
            np.moveaxis(array, leaf.axis, 0)
            for array, leaf in zip(arrays, graph.leaves, strict=True)
        ]
        with np.errstate(all="ignore"):
            return function(*theta, *arrays, *moved)

    try:
        before, lifted = evaluate()
    except IndexError:
        return
    chosen = int(rng.integers(graph.n_rows))
    for k, (array, leaf) in enumerate(zip(arrays, graph.leaves, strict=True)):
        if leaf.source in public:
            continue
        changed = np.moveaxis(array.copy(), leaf.axis, 0)
        changed[chosen] = made_up(changed[chosen].shape, changed.dtype, largest, rng)
        arrays[k] = np.moveaxis(changed, 0, leaf.axis)
    after, _ = evaluate()
    others = np.arange(graph.n_rows) != chosen
    if not np.array_equal(before[others], after[others], equal_nan=True):
        raise NotFactorizable(
            f"Changing one record of synthetic data changes the likelihood terms of other records "
            f"of {graph.quoted}. Remove what couples records (means, sorts, cumulative sums)."
        )
    usable = np.isfinite(before) & np.isfinite(lifted)
    if not np.allclose(before[usable], lifted[usable], rtol=1e-6, atol=1e-8):
        raise NotFactorizable(
            f"The per-record terms of {graph.quoted} could not be rebuilt faithfully from the "
            "model. Please report the model; use a simpler form of the likelihood meanwhile."
        )


_COMPARISONS = (scalar.LT, scalar.LE, scalar.GT, scalar.GE, scalar.IsNan, scalar.IsInf)
_CHOICES = (scalar.ScalarMaximum, scalar.ScalarMinimum, scalar.Clip)
_ROWS, _PLACES = 48, 12  # made-up rows at a place among the parameters, and such places


def ends_of_support(
    graph: RowGraph,
    observed: Container[Variable],
    parameters: Mapping[Variable, tuple[int, ...]],
    start: Mapping[str, np.ndarray],
) -> list[Variable]:
    """The parameters at which the support of an observed variable ends, if any.

    The density of a Uniform(0, theta) is zero above theta.  Scores do not show such jumps: the
    largest record alone holds what there is to know.  A choice that depends on `observed` arrays
    and on `parameters` is an end if the density is zero on one side of it, whatever the record, and
    not on the other.  It is taken either way, on made-up rows, about `start`.  An end at which a
    density of the user's own is not a number, or very small, is not seen.
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
        blocks = [
            _rows_about((_ROWS, *leaf.entries), leaf.block.type.dtype, centres, rng)
            for leaf in graph.leaves
        ]
        with np.errstate(all="ignore"):
            found.append(function(*theta, *blocks))
    *values, taken = np.array(found).swapaxes(0, 1).reshape(len(logps), -1)  # (ways, places x rows)
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


def _rows_about(
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
