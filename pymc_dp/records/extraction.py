"""Records of a PyMC model: its prior, and one log-likelihood term per record, or a refusal.

Privacy per record needs a likelihood that is a sum of one term per record.  :func:`extract` proves
that from the graph (:mod:`pymc_dp.records.proof`) and checks it on synthetic data of the same
shape.  Of private arrays it uses no value, except to see that a row can have it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.distributions.censored import CensoredRV
from pymc.initial_point import make_initial_point_expression
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.blockwise import Blockwise

from pymc_dp.base.threads import INTERPRETED
from pymc_dp.errors import NotFactorizable, UnsafeModel
from pymc_dp.records.ancestry import (
    RowCounts,
    ancestors_without_shapes,
    array_of,
    counts_rows,
    data_behind,
    fixed_shapes,
    hides_code,
    is_data,
    is_long_constant,
    share_memory,
)
from pymc_dp.records.arithmetic import is_discrete, is_float, without_errors
from pymc_dp.records.bounds import Interval, clamp, source_limits
from pymc_dp.records.densities import (
    log_densities,
    long_constants_kept,
    may_be_infinite,
    with_outcomes,
)
from pymc_dp.records.graph import ParameterVector, RowGraph, full_eta
from pymc_dp.records.proof import check_numerically, ends_of_support, lift_rows
from pymc_dp.records.units import (
    Group,
    RecordStore,
    count_units,
    lengths_of_rows,
    longest_unnamed,
    private_observed,
    public_inputs,
    refuse_captured_rows,
    refuse_shared_rows,
    row_counts,
)

_MARK = -1.2345678912345e30  # in place of minus infinity: no density is a multiple of this
_BLOCK = 2**16  # rows that are looked at together
_NOT_SHOWN = "(which rows are concerned is not shown here: it is private)"  # in messages


@dataclass(frozen=True, eq=False)
class Records:
    """What a model says about its records, in graph form.

    `groups` share their rows.  `public_logp` is the log-density of prior (with Jacobian) and public
    likelihoods, minus infinity outside the support of the likelihood's parameters.  `initial`,
    (d,), is PyMC's initial point, a function of the prior alone.
    """

    parameters: ParameterVector
    groups: tuple[Group, ...]
    public_logp: Variable
    n_units: int
    initial: np.ndarray


def _refuse_unsupported(model: Model, observed: Sequence[Variable]) -> None:
    for rv in model.free_RVs:
        if is_discrete(rv):
            raise UnsafeModel(
                f"`{rv.name}` is a discrete parameter; the private samplers move continuous "
                "parameters only. Sum it out (pm.Mixture, pm.ZeroInflatedPoisson, ...)."
            )
    if model.potentials:
        names = ", ".join(f"`{p.name}`" for p in model.potentials)
        raise NotFactorizable(
            f"pm.Potential ({names}) carries no record axis, so what one record adds to it is "
            "unknown. Write it as a distribution: pm.CustomDist(..., observed=...)."
        )
    for rv in model.observed_RVs:
        if any("Minibatch" in type(v.owner.op).__name__ for v in ancestors([rv]) if v.owner):
            raise NotFactorizable(
                f"`{rv.name}` uses pm.Minibatch or total_size, whose scaling and sampling are not "
                "accounted for. Give the full data without total_size."
            )
    for rv in observed:
        # bounds of all records would decide how PyMC holds censored counts
        censored = [
            v.owner for v in ancestors([rv]) if v.owner and isinstance(v.owner.op, CensoredRV)
        ]
        counts = [node for node in censored if is_discrete(node.inputs[0])]
        bounds = [bound for node in counts for bound in node.inputs[1:3]]
        if any(isinstance(bound, Constant) and bound.type.ndim for bound in bounds):
            raise NotFactorizable(
                f"`{rv.name}` is a censored count with an array of bounds. PyMC 6 looks at all of "
                "them to choose between integers and real numbers, so that one record would change "
                "the values of others. Give the bounds as pm.Data."
            )


@np.errstate(all="ignore")  # a warning would tell of an extreme record
def extract(
    model: Model,
    *,
    public: Sequence[str] = (),
    privacy_unit: Any = None,
    count_is_private: bool = False,
    n_public: int | None = None,
    elsewhere: bool = False,
    check: bool = True,
    read: bool = True,
) -> Records:
    """Split a model into public terms and one log-likelihood term per record.

    Names in `public` are ``pm.Data`` and observed variables that are not private; `privacy_unit`:
    see :func:`count_units`.  With one, if `count_is_private` (add or remove one), or if records are
    `elsewhere` and the rows here are made up, neither a value nor the shape of a parameter may
    depend on the number of rows.  In the second case the public number of units, `n_public`, tells
    how long an unnamed array may be.  `check` also tries the proof on synthetic data.  `read` takes
    the data, clamped to their bounds; else stores hold two rows of zeros, and no private value is
    looked at.  Errors (NotFactorizable, UnsafeModel, ValueError) name variable and remedy.
    """
    observed = private_observed(model, public)
    _refuse_unsupported(model, observed)
    n_units, units = count_units(model, public, privacy_unit)
    rows = row_counts(model, public)
    # from this length on, an axis of an unnamed array may be one of records, or of units
    length = longest_unnamed(n_units, n_public if count_is_private else None)
    public_variables = public_inputs(model, public)
    counts = None
    if count_is_private or elsewhere or privacy_unit is not None:  # a unit may bring any number
        lengths = lengths_of_rows(model, dict.fromkeys(observed, 0))
        computed = {size for size in model.dim_lengths.values() if size.owner is not None}
        public_variables -= lengths | computed  # the computed ones are followed
        sources = [data_behind(model.rvs_to_values[rv]) for rv in observed]
        counts = RowCounts(public_variables, length, dict.fromkeys(sources, 0), lengths)
    _refuse_private_start(model, public, length, counts)
    point = _initial_point(model)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    shapes = {value: np.shape(point[value.name]) for value in values}
    if not values:
        raise UnsafeModel("The model has no free random variable to sample.")
    parameters = ParameterVector.of(values, list(shapes.values()))
    limits = source_limits(model)
    groups = []
    # without a privacy_unit a record has a row of each
    together = [tuple(rows)] if privacy_unit is None else [(name,) for name in rows]

    def lifted() -> list[tuple[RowGraph, dict[str, Variable]]]:
        raw = _terms(model, observed, length, counts)
        terms = [{name: raw[name] for name in names} for names in together]
        return [
            (lift_rows(t, shapes, public_variables, rows[next(iter(t))], length, counts), t)
            for t in terms
        ]

    graphs = lifted()
    if counts is not None:
        on = {leaf.source: leaf.axis for graph, _ in graphs for leaf in graph.leaves}
        lengths = lengths_of_rows(model, on).union(counts.lengths)
        public_variables -= lengths
        if len(lengths) > len(set(counts.lengths)) or any(
            axis or x in public_variables or not counts.may_hold_rows(x) for x, axis in on.items()
        ):  # that these hold rows, and where, is known only now
            counts = RowCounts(public_variables - on.keys(), length, {**counts.rows, **on}, lengths)
            _refuse_private_start(model, public, length, counts)
            graphs = lifted()
    for graph, terms in graphs:
        seen = [model[name] for name in terms]
        graph = with_outcomes(graph, seen, [model.rvs_to_values[rv] for rv in seen])
        for name, logp in terms.items():
            alone = graph
            if len(terms) > 1:  # what one variable observes may be a covariate of another
                alone = lift_rows({name: logp}, shapes, public_variables, graph.n_rows, length)
            _refuse_ends(model, alone, shapes, point)
        _refuse_graph(model, graph, limits)
        if check:
            graph = _with_impossible(graph, parameters, parameters.ravel(point))
        blank = [np.zeros((2, *leaf.entries), leaf.block.type.dtype) for leaf in graph.leaves]
        store = _store(graph, limits, elsewhere) if read else RecordStore(blank)
        groups.append(Group(graph, store, units[graph.names[0]]))
        if check:
            check_numerically(terms, graph, values, shapes, public_variables)
    read_from = {leaf.source for group in groups for leaf in group.graph.leaves}
    if unread := [f"`{source.name}`" for source in limits if source not in read_from]:
        raise ValueError(  # a statement says what is clamped: nothing may be left as it is
            f"{', '.join(unread)} has bounds, but no private likelihood reads it. Leave them out."
        )
    refuse_shared_rows(groups, public_variables)
    refuse_captured_rows(groups)
    public_logp = _public_logp(model, public, groups, shapes, length, counts)
    _refuse_start_at_a_record(model, groups)
    return Records(parameters, tuple(groups), public_logp, n_units, parameters.ravel(point))


def _terms(
    model: Model, observed: Sequence[Variable], length: int, counts: RowCounts | None
) -> dict[str, Variable]:
    if counts is not None:
        for rv in model.observed_RVs:
            _refuse_counted(counts.inside([rv]), f"The likelihood of `{rv.name}`")
    logps = log_densities(model, observed, jacobian=False, length=length, counts=counts)
    for rv, logp in zip(observed, logps, strict=True):
        if logp.type.ndim == 0:
            raise NotFactorizable(
                f"`{rv.name}` has one log-likelihood for all of its data: there is no record axis. "
                "Give observed data with one row per record, on the first axis."
            )
    return {rv.name: logp for rv, logp in zip(observed, logps, strict=True)}


def _initial_point(model: Model) -> dict[str, np.ndarray]:
    """PyMC's initial point; 0 where a default (of a truncated distribution) is not finite."""
    point = model.initial_point()
    for rv in model.free_RVs:
        given = model.rvs_to_initial_values[rv]
        if given is None or isinstance(given, str):
            name = model.rvs_to_values[rv].name
            point[name] = np.where(np.isfinite(point[name]), point[name], 0.0)
    return point


def _store(graph: RowGraph, limits: Mapping[Variable, Interval], elsewhere: bool) -> RecordStore:
    arrays, names = [], []
    for leaf in graph.leaves:
        source = leaf.source
        # a shared variable can be changed later with pm.set_data: keep the values of now
        data = source.get_value() if isinstance(source, SharedVariable) else source.data
        data = np.moveaxis(np.asarray(data), leaf.axis, 0)
        name = f"`{source.name}`" if source.name else f"the data of `{graph.names[0]}`"
        if source in limits:
            if leaf.axis:
                raise ValueError(
                    f"{name} has bounds, but its records are not on the first axis. Put them there."
                )
            data = clamp(data, limits[source])
        arrays.append(data)
        names.append(name)
    checked_rows(graph, arrays, names)
    if not elsewhere:  # made-up rows are not of any distribution
        refuse_impossible(graph, arrays)
    return RecordStore(arrays)


def checked_rows(
    graph: RowGraph, arrays: list[np.ndarray], names: Sequence[str]
) -> list[np.ndarray]:
    """The arrays of a graph, rows first; UnsafeModel if they hold what no row may."""
    compared = may_be_infinite(graph)
    for leaf, data, name in zip(graph.leaves, arrays, names, strict=True):
        if data.dtype.kind == "f":
            _refuse_non_finite(data, name, infinite=leaf.block in compared)
    _refuse_wrong_labels(graph, arrays)
    return arrays


def _refuse_ends(
    model: Model,
    graph: RowGraph,
    shapes: Mapping[Variable, tuple[int, ...]],
    start: Mapping[str, np.ndarray],
) -> None:
    """Refuse ends of support: scores do not show them, so paid rounds would find nothing."""
    [name] = graph.names
    observed = set(ancestors([model.rvs_to_values[model[name]]]))
    found = ends_of_support(graph, observed, shapes, start)
    if found:
        ends = ", ".join(f"`{model.values_to_rvs[value].name}`" for value in found)
        what = (
            f"The support of `{name}` ends at a value that depends on {ends}: beyond it the "
            "density is zero. Only the most extreme records tell where it ends, and"
        )
        other = "choose a distribution whose support does not depend on parameters, or"
        raise UnsafeModel(
            f"{what} the scores that would be released do not show it, so no budget is large "
            f"enough. Fix the end at a public value, {other} publish noisy counts of the data in "
            "public intervals and sample from these with dp.PrivacyAwareGibbs.",
            f"{what} most samples of records do not hold them. Fix the end at a constant, {other} "
            "use NUTS.",
        )


def _refuse_graph(model: Model, graph: RowGraph, limits: Mapping[Variable, Interval]) -> None:
    if not any(cut.phi.type.dtype.startswith("float") for cut in graph.cuts):
        raise UnsafeModel(
            f"The distribution of {graph.quoted} depends on no free variable, so there is nothing "
            "to learn from its records. Leave it out, or put a free variable into its parameters."
        )
    for name in graph.names:  # records are the first axis, also where another axis is as long
        seen = ancestors([model.rvs_to_values[model[name]]])
        if any(leaf.axis != 0 and leaf.source in seen for leaf in graph.leaves):
            raise NotFactorizable(
                f"The likelihood of `{name}` runs over another axis of its observed value than the "
                "first. Put records on the first axis."
            )
    # a label between two groups is no label
    behind = ancestors_without_shapes([label for label, _ in graph.lookups])
    for leaf in graph.leaves:
        if leaf.source in limits and leaf.block in behind and leaf.block.type.dtype[0] not in "iu":
            raise ValueError(
                f"`{leaf.source.name}` is used as a label and has bounds, but holds no integers. "
                "Pass labels as integers, or leave out their bounds."
            )


def _refuse_wrong_labels(graph: RowGraph, arrays: Sequence[np.ndarray]) -> None:
    """Compiled code does not check bounds: a wrong label would read what is not its record's."""
    if not graph.lookups:
        return
    found = _of_rows(graph, [label for label, _ in graph.lookups])(*arrays)
    for labels, (_, size) in zip(found, graph.lookups, strict=True):
        least = 0 if np.ndim(labels) else -size  # one number, as in a[group, -1], is no label
        if np.size(labels) and not (least <= np.min(labels) and np.max(labels) < size):
            what = (
                f"Some labels in the likelihood of {graph.quoted} are outside 0..{size - 1}, where "
                f"{size} groups are declared; pandas codes a missing category as -1. Recode or "
                "drop these rows before the model is built"
            )
            raise UnsafeModel(f"{what} {_NOT_SHOWN}.", f"{what}.")


def _of_rows(graph: RowGraph, outputs: Sequence[Variable]) -> Callable[..., list[np.ndarray]]:
    """Functions of rows alone."""
    blocks = [leaf.block for leaf in graph.leaves]
    outputs = without_errors(outputs, interpreted=True)
    function = pytensor.function(blocks, outputs, mode=INTERPRETED, on_unused_input="ignore")
    return cast("Callable[..., list[np.ndarray]]", function)


def _with_impossible(graph: RowGraph, parameters: ParameterVector, start: np.ndarray) -> RowGraph:
    """The graph, with what tells outcomes that no parameters make possible.

    Supports that end at parameters are refused: the density is zero by its formula, a constant that
    is marked here, at the start and on both sides of zero. It may be rounded to zero anywhere, and
    a start may be a bad one, as where the mean of a count is 0.
    """
    n_rows = graph.leaves[0].block.shape[0]
    etas = {cut.eta: full_eta(cut, n_rows) for cut in graph.cuts}
    constants = [v for v in ancestors(graph.terms) if isinstance(v, Constant)]
    ends = [v for v in constants if is_float(v) and np.size(v.data) and np.isneginf(v.data).all()]
    marks = {v: pt.constant(np.full_like(v.data, _MARK)) for v in ends}
    # as it is computed later: a density of a mixture may be rounded to zero as it stands
    terms = clone_replace(list(graph.terms), {**etas, **marks})
    terms = rewrite_graph(terms, include=("canonicalize", "stabilize"), clone=False)
    zero, away = [], start + np.random.default_rng(len(start)).normal(size=len(start))
    for theta in (start, away, -away):
        parts = map(pt.constant, parameters.point(theta).values())
        values = dict(zip(parameters.values, parts, strict=True))
        zero.append(clone_replace(terms, values))
    impossible = []
    for k, found in enumerate(zip(*zero, strict=True)):
        at_end = beyond = pt.zeros(n_rows, dtype=bool)
        for outcome in graph.outcomes[k : k + 1]:
            block = graph.leaves[outcome.leaf].block
            if outcome.discrete and is_float(block):
                beyond = pt.neq(block, pt.trunc(block))
            for end in (outcome.lower, outcome.upper):  # where a logarithm is infinite
                if isinstance(end, float) and not outcome.discrete:
                    at_end = at_end | pt.eq(block, end)
        places = [beyond]
        if not any(v.owner and isinstance(v.owner.op, Blockwise) for v in ancestors(found)):
            # marks of several entries add up; others would be evaluated by rows, in Python
            times = [x / _MARK for x in found]
            marked = [(x > 0.5) & (x < 1e3) & (abs(x - pt.round(x)) < 1e-9) for x in times]
            infinite = [at_end & pt.eq(x, -np.inf) for x in found]
            places = [beyond | one | other for one, other in zip(marked, infinite, strict=True)]
        impossible.append(tuple(places))
    return replace(graph, impossible=tuple(impossible))


@np.errstate(all="ignore")
def refuse_impossible(graph: RowGraph, arrays: Sequence[np.ndarray]) -> None:
    """Refuse outcomes, such as a count below 0, that would be paid for and tell nothing."""
    for name, places in zip(graph.names, graph.impossible, strict=False):
        rows = np.arange(len(arrays[0]))
        for place in places:  # mostly none is left after the first
            if rows.size:
                look = _of_rows(graph, [place])
                parts = np.array_split(rows, -(-len(rows) // _BLOCK))
                zero = [look(*(array[part] for array in arrays))[0] for part in parts]
                rows = rows[np.concatenate(zero)]
        if rows.size:
            what = (
                f"Some outcomes of `{name}` have probability zero at the initial point: they are "
                "outside of the support of its distribution, such as -1 for a Poisson or 2 for a "
                "Bernoulli variable. Recode or drop these rows, or choose another distribution or "
                "other initial values, before the model is built"
            )
            raise UnsafeModel(f"{what} {_NOT_SHOWN}.", f"{what}.")


def _refuse_non_finite(data: np.ndarray, name: str, *, infinite: bool) -> None:
    usable = ~np.isnan(data) if infinite else np.isfinite(data)
    if usable.all():
        return
    columns = np.flatnonzero(~usable.reshape(len(data), -1).all(axis=0))
    where = f"column {', '.join(map(str, columns))} of {name}" if data.ndim > 1 else name
    values = "NaN" if infinite else "NaN or infinite values"
    what = f"{where} holds {values}. Clean the data before the model is built"
    raise UnsafeModel(f"{what} {_NOT_SHOWN}.", f"{what}.")


def refuse_private(
    value: Variable,
    named: set[Variable],
    leaves: Collection[Variable],
    length: int,
    what: str,
) -> None:
    """Refuse a public value that depends on private data."""
    label = hides_code([value])
    data = [array_of(leaf) for leaf in leaves]
    # PyMC copies shared variables for initial values: a copy has the same container
    containers = {v.container for v in named if isinstance(v, SharedVariable)}
    for variable in ancestors_without_shapes([value]) - named:
        if isinstance(variable, SharedVariable) and variable.container in containers:
            continue
        part = isinstance(variable, Constant) and any(share_memory(variable.data, x) for x in data)
        if part or is_data(variable) or is_long_constant(variable, length):
            label = f"`{variable.name}`" if variable.name else "an array of the data, or as long"
    if label is not None:
        raise UnsafeModel(
            f"{what} depends on {label}, which is private or may hold private data. Choose it from "
            "public knowledge, or declare the data in PrivacyBudget(public=...).",
            f"{what} depends on {label}, which holds data of the records, or may. Compute what it "
            "needs before the model is built.",
        )


def draws_are_public(model: Model, public: Sequence[str], length: int) -> bool:
    """Whether the graph shows that prior draws use no private data; ``pm.CustomDist`` hides it."""
    for rv in model.free_RVs:
        ops = [v.owner.op for v in ancestors([rv]) if v.owner is not None]
        if any("Custom" in base.__name__ for op in ops for base in type(op).__mro__):
            return False
    named = public_inputs(model, public)
    try:
        for rv in model.free_RVs:
            refuse_private(rv, named, set(), length, f"`{rv.name}`")
    except UnsafeModel:
        return False
    return True


def _refuse_counted(found: Variable | None, what: str) -> None:
    if found is not None:
        raise UnsafeModel(counts_rows(what, found))


def _refuse_private_start(
    model: Model, public: Sequence[str], length: int, counts: RowCounts | None
) -> None:
    """Initial values, shapes and transforms must be public: coordinates and releases show them."""
    named = public_inputs(model, public)
    released = model.replace_rvs_by_values(model.free_RVs)
    for rv, start, value in zip(model.free_RVs, _starts(model), released, strict=True):
        refuse_private(start, named, (), length, f"The initial value or prior of `{rv.name}`")
        refuse_private(value, named, (), length, f"The transform of `{rv.name}`")
        if counts is not None:
            what = f"The initial value or shape of `{rv.name}`"
            _refuse_counted(counts.behind([start], [start]), what)
            _refuse_counted(counts.behind([value], [value]), f"The transform of `{rv.name}`")
            _refuse_counted(counts.behind([rv], [rv]), f"The prior or shape of `{rv.name}`")


def _refuse_start_at_a_record(model: Model, groups: Sequence[Group]) -> None:
    """No initial value may be a part of an array of records, however short."""
    arrays = [array_of(leaf.source) for group in groups for leaf in group.graph.leaves]
    for rv, start in zip(model.free_RVs, _starts(model), strict=True):
        constants = [v.data for v in ancestors([start]) if isinstance(v, Constant)]
        given = [*constants, model.rvs_to_initial_values[rv]]
        if any(share_memory(part, array) for part in given for array in arrays):
            raise UnsafeModel(
                f"The initial value of `{rv.name}` is a part of an array that holds records. "
                "Choose it from public knowledge."
            )


def _starts(model: Model) -> list[Variable]:
    return make_initial_point_expression(
        free_rvs=model.free_RVs,
        rvs_to_transforms=model.rvs_to_transforms,
        initval_strategies=model.rvs_to_initial_values,
        return_transformed=True,
    )


def _public_logp(
    model: Model,
    public: Sequence[str],
    groups: Sequence[Group],
    shapes: Mapping[Variable, tuple[int, ...]],
    length: int,
    counts: RowCounts | None,
) -> Variable:
    """Prior with Jacobian and public likelihoods, minus infinity where a condition fails."""
    rvs = [*model.free_RVs, *[rv for rv in model.observed_RVs if rv.name in set(public)]]
    terms = log_densities(model, rvs, jacobian=True, length=length, counts=counts)
    logp = pt.sum([pt.sum(term) for term in terms])
    leaves = {leaf.source for group in groups for leaf in group.graph.leaves}
    named = public_inputs(model, public)
    what = "The prior or a public likelihood"
    refuse_private(logp, named, leaves, length, what)
    if counts is not None:  # before the lengths of constants are folded
        _refuse_counted(counts.behind([logp]), what)
    with long_constants_kept(length):
        [logp] = rewrite_graph(
            [logp],
            include=("canonicalize", "local_check_parameter_to_ninf_switch"),
            clone=False,
        )
    for group in groups:
        for condition in group.graph.conditions:
            logp = pt.switch(condition, logp, -np.inf)
    return fixed_shapes([logp], shapes, named)[0]
