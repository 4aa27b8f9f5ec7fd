"""Records of a PyMC model: its prior, and one log-likelihood term per record, or a refusal.

Privacy per record needs a likelihood that is a sum of one term per record.  :func:`extract` proves
that from the graph of the model (:mod:`pymc_dp.rows.lift`) and checks it numerically on synthetic
data of the same shape.  It uses no value of a private array, except to see that it is finite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.distributions.censored import CensoredRV
from pymc.initial_point import make_initial_point_expression
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import SpecifyShape

from pymc_dp.bounds import clamp, source_limits
from pymc_dp.errors import NotFactorizable, UnsafeModel
from pymc_dp.privacy.forecast import Norms
from pymc_dp.rows.ancestry import (
    ancestors_without_shapes,
    array_of,
    data_behind,
    hides_code,
    is_data,
    is_long_constant,
    share_memory,
)
from pymc_dp.rows.check import check_numerically
from pymc_dp.rows.counts import RowCounts
from pymc_dp.rows.cuts import RowGraph
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import (
    INTERPRETED,
    ParameterVector,
    RowFunctions,
    compile_parameter_function,
)
from pymc_dp.rows.infinite import may_be_infinite
from pymc_dp.rows.integers import is_discrete
from pymc_dp.rows.interfaces import Coordinates
from pymc_dp.rows.intervals import Interval
from pymc_dp.rows.lift import lift_rows
from pymc_dp.rows.made_up import made_up_norms
from pymc_dp.rows.outcomes import with_outcomes
from pymc_dp.rows.sizes import counts_rows, fixed_shapes
from pymc_dp.rows.store import RecordStore, RowGroup
from pymc_dp.rows.support import ends_of_support
from pymc_dp.rows.total import without_errors
from pymc_dp.rows.unfolded import log_densities, long_constants_kept

#: In messages about rows.
_NOT_SHOWN = "(which rows are concerned is not shown here: it is private)"


@dataclass(frozen=True, eq=False)
class _Group:
    graph: RowGraph
    store: RecordStore
    units: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Records:
    """What a model says about its records, in graph form.

    `groups` hold per-record terms, grouped by observed variables that share their rows.
    `public_logp` is the log-density of the public terms: prior with Jacobian, and public
    likelihoods; minus infinity outside the support of the likelihood's parameters.  `initial`,
    (d,), is PyMC's initial point, a function of the prior alone.
    """

    parameters: ParameterVector
    groups: tuple[_Group, ...]
    public_logp: Variable
    n_units: int
    initial: np.ndarray

    def engine(
        self, coordinates: Coordinates, compile_kwargs: dict[str, Any] | None = None
    ) -> RowEngine:
        """Compile the per-record functions."""
        groups = [
            RowGroup(
                RowFunctions(group.graph, self.parameters, compile_kwargs), group.store, group.units
            )
            for group in self.groups
        ]
        return RowEngine(groups, self.parameters, self.n_units, coordinates)

    def score_norms(self) -> Norms | None:
        """Norms of the scores of made-up records (:func:`pymc_dp.rows.made_up.made_up_norms`)."""
        at = Coordinates(self.initial, np.eye(self.parameters.size))
        return made_up_norms(self.engine(at), self.initial)

    def public_terms(
        self, coordinates: Coordinates, compile_kwargs: dict[str, Any] | None = None
    ) -> PublicTerms:
        """Compile the prior and other public terms."""
        [logp] = self.parameters.substitute([self.public_logp])
        gradient = pytensor.grad(logp, self.parameters.theta, disconnected_inputs="ignore")
        function = compile_parameter_function(
            [self.parameters.theta], [logp, gradient], compile_kwargs
        )
        return PublicTerms(function, coordinates)


class PublicTerms:
    """Log-density and gradient in z of everything that is not private."""

    def __init__(self, function: Any, coordinates: Coordinates) -> None:
        self._function = function
        self.coordinates = coordinates

    def with_coordinates(self, coordinates: Coordinates) -> PublicTerms:
        """The same terms in other coordinates."""
        return PublicTerms(self._function, coordinates)

    def log_density(self, z: np.ndarray) -> float:
        """Log-density at z, a (d,) vector."""
        return float(self._function(self.coordinates.theta(z))[0])

    def gradient(self, z: np.ndarray) -> np.ndarray:
        """(d,) gradient at z."""
        return self.both(z)[1]

    @np.errstate(all="ignore")  # 0 times the infinite slope of a place that is not possible
    def both(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        """Log-density and gradient at z, for the price of one."""
        value, slope = self._function(self.coordinates.theta(z))
        return float(value), self.coordinates.scaling.T @ slope


# -- what is observed -----------------------------------------------------------------------------


def _refuse_unsupported(model: Model) -> None:
    for rv in model.free_RVs:
        if type(rv.owner.op).__name__ == "PartialObservedRV" or rv.name.endswith("_unobserved"):
            raise NotFactorizable(
                f"`{rv.name}`: the observed data hold missing values, which PyMC turns into one "
                "latent variable per missing entry. Drop or impute them before the model is built."
            )
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


def _refuse_bounds_that_are_looked_at(observed: Sequence[Variable]) -> None:
    """Refuse censored counts if bounds of all records decide how PyMC holds what is observed."""
    for rv in observed:
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


def private_observed(model: Model, public: Iterable[str]) -> list[Variable]:
    """The observed variables of a model that are not declared public."""
    public = set(public)
    return [rv for rv in model.observed_RVs if rv.name not in public]


def _n_rows(model: Model, rv: Variable) -> int:
    source = model.rvs_to_values[rv]
    while source.owner is not None and isinstance(source.owner.op, Elemwise | SpecifyShape):
        source = source.owner.inputs[0]  # PyMC casts pm.Data to the type of the distribution
    if not isinstance(source, Constant | SharedVariable):
        raise NotFactorizable(
            f"The observed value of `{rv.name}` is computed in the model, so it is not known which "
            "of its entries belong to one record. Compute it before: observed= an array or pm.Data."
        )
    shape = np.shape(array_of(source))
    if not shape:
        raise NotFactorizable(
            f"`{rv.name}` has no record axis: its observed value is a single number. Pass one "
            "entry per record."
        )
    if shape[0] < 2:
        raise NotFactorizable(
            f"`{rv.name}` has fewer than two records on its first axis; nothing can be hidden "
            "among so few. Put records on the first axis, one row each."
        )
    return int(shape[0])


def row_counts(model: Model, public: Iterable[str]) -> dict[str, int]:
    """Number of rows of each private observed variable."""
    return {rv.name: _n_rows(model, rv) for rv in private_observed(model, public)}


def count_units(
    model: Model, public: Iterable[str], privacy_unit: Any = None
) -> tuple[int, dict[str, np.ndarray | None]]:
    """The number of privacy units, and the unit of every row of each private observed variable.

    `privacy_unit` is None, an (n,) integer array, or a dict of these by name, as in
    :class:`pymc_dp.PrivacyBudget`.  Raises ValueError if the ids do not match the observed
    variables, and NotFactorizable if observed variables of different lengths have no ids.
    """
    rows = row_counts(model, public)
    if not rows:
        raise UnsafeModel(
            "The model has no private observed variable, so there is nothing to protect. Add "
            "observed data before the budget, or sample without pymc_dp."
        )
    if privacy_unit is None:
        if len(set(rows.values())) > 1:
            names = ", ".join(f"`{name}`" for name in rows)
            raise NotFactorizable(
                f"Observed variables {names} differ in length, so it is not known which rows "
                "belong to one record. Pass privacy_unit={'name': ids, ...} to PrivacyBudget."
            )
        return next(iter(rows.values())), dict.fromkeys(rows)
    given = (
        dict(privacy_unit)
        if isinstance(privacy_unit, Mapping)
        else dict.fromkeys(rows, privacy_unit)
    )
    if set(given) != set(rows):
        raise ValueError(
            f"privacy_unit names {sorted(given)}, but the private observed variables are "
            f"{sorted(rows)}. Give ids for each of these."
        )
    ids = {}
    for name, n in rows.items():
        array = np.asarray(given[name])
        if array.ndim != 1 or len(array) != n or array.dtype.kind not in "iu":
            raise ValueError(
                f"privacy_unit of `{name}` must be a vector of integers, one for each row of "
                f"`{name}`; got type {array.dtype} with {array.ndim} axes, or another length."
            )
        ids[name] = array.astype("int64")
    unique = np.unique(np.concatenate(list(ids.values())))
    return len(unique), {
        name: np.searchsorted(unique, array).astype("int64") for name, array in ids.items()
    }


def public_inputs(model: Model, public: Iterable[str]) -> set[Variable]:
    """Variables declared public, the data of public observed ones, and lengths of dims."""
    named = {model[name] for name in public if name in model.named_vars}
    observed = [model.rvs_to_values[rv] for rv in named & set(model.observed_RVs)]
    data = {v for v in ancestors(observed) if v.owner is None}
    return named | data | set(model.dim_lengths.values())


def lengths_of_rows(model: Model, axes: Mapping[Variable, int]) -> set[Variable]:
    """Lengths of the dims of variables and of data, at the axes on which their rows stand."""
    of = ((model.named_vars_to_dims.get(v.name, ()), axis) for v, axis in axes.items())
    dims = {dims[axis] for dims, axis in of if len(dims) > axis}
    return {model.dim_lengths[dim] for dim in dims if dim in model.dim_lengths}


# -- extraction -----------------------------------------------------------------------------------


@np.errstate(all="ignore")  # a warning would tell of an extreme record
def extract(
    model: Model,
    *,
    public: Sequence[str] = (),
    privacy_unit: Any = None,
    count_is_private: bool = False,
    n_public: int | None = None,
    check: bool = True,
    read: bool = True,
) -> Records:
    """Split a model into public terms and one log-likelihood term per record.

    Errors name the variable and the remedy: NotFactorizable, UnsafeModel, or ValueError if declared
    bounds cannot be applied.

    Parameters
    ----------
    public
        Names of ``pm.Data`` and observed variables that are not private.
    privacy_unit
        See :func:`count_units`.
    count_is_private
        The number of rows is private (add or remove one), as it is with a `privacy_unit`: refuse
        models in which a value, or the shape of a parameter, depends on it.
    n_public
        Public number of units, if theirs is private: it tells how long an unnamed array may be.
    check
        Also check factorisation and rebuilding numerically, on synthetic data of the same shape.
    read
        Take the data, clamped to their public bounds (:func:`pymc_dp.bounds.bounds`).  Otherwise
        the stores hold two rows of zeros, and no private value is looked at.
    """
    _refuse_unsupported(model)
    n_units, units = count_units(model, public, privacy_unit)
    rows = row_counts(model, public)
    observed = private_observed(model, public)
    _refuse_bounds_that_are_looked_at(observed)
    # from this length on, an axis of an unnamed array may be one of records, or of units
    length = longest_unnamed(n_units, n_public if count_is_private else None)
    public_variables = public_inputs(model, public)
    counts = None
    if count_is_private or privacy_unit is not None:  # a unit may bring any number of rows
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
        _refuse_constant(graph)
        _refuse_other_axes(model, graph)
        _refuse_bounded_labels(graph, limits)
        store = _store(graph, limits) if read else _blank(graph)
        groups.append(_Group(graph, store, units[graph.names[0]]))
        if check:
            check_numerically(terms, graph, values, shapes, public_variables)
    _refuse_unread_bounds(groups, limits)
    _refuse_shared_rows(groups, public_variables)
    _refuse_captured_rows(groups)
    public_logp = _public_logp(model, public, groups, shapes, length, counts)
    _refuse_start_at_a_record(model, groups)
    initial = parameters.ravel(point)
    return Records(parameters, tuple(groups), public_logp, n_units, initial)


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
    """PyMC's initial point; where its default is not finite, 0 in unconstrained space.

    The default of a truncated distribution may lie on its bounds, or outside.  0 is inside.
    """
    point = model.initial_point()
    for rv in model.free_RVs:
        given = model.rvs_to_initial_values[rv]
        if given is None or isinstance(given, str):
            name = model.rvs_to_values[rv].name
            point[name] = np.where(np.isfinite(point[name]), point[name], 0.0)
    return point


def _blank(graph: RowGraph) -> RecordStore:
    arrays = []
    for leaf in graph.leaves:
        shape = list(np.shape(array_of(leaf.source)))
        del shape[leaf.axis]
        arrays.append(np.zeros((2, *shape), leaf.source.type.dtype))
    return RecordStore(arrays)


def _store(graph: RowGraph, limits: Mapping[Variable, Interval]) -> RecordStore:
    arrays, compared = [], may_be_infinite(graph)
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
        if data.dtype.kind == "f":
            _refuse_non_finite(data, name, infinite=leaf.block in compared)
        arrays.append(data)
    _refuse_wrong_labels(graph, arrays)
    return RecordStore(arrays)


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


def _refuse_constant(graph: RowGraph) -> None:
    if not any(cut.phi.type.dtype.startswith("float") for cut in graph.cuts):
        names = ", ".join(f"`{name}`" for name in graph.names)
        raise UnsafeModel(
            f"The distribution of {names} depends on no free variable, so there is nothing to "
            "learn from its records. Leave it out, or put a free variable into its parameters."
        )


def _refuse_bounded_labels(graph: RowGraph, limits: Mapping[Variable, Interval]) -> None:
    """A label between two groups is no label."""
    behind = ancestors_without_shapes([label for label, _ in graph.lookups])
    for leaf in graph.leaves:
        if leaf.source in limits and leaf.block in behind and leaf.block.type.dtype[0] not in "iu":
            raise ValueError(
                f"`{leaf.source.name}` is used as a label and has bounds, but holds no integers. "
                "Pass labels as integers, or leave out their bounds."
            )


def _refuse_unread_bounds(groups: Sequence[_Group], limits: Mapping[Variable, Interval]) -> None:
    """A statement says what is clamped, so nothing may have bounds and be left as it is."""
    read = {leaf.source for group in groups for leaf in group.graph.leaves}
    unread = [f"`{source.name}`" for source in limits if source not in read]
    if unread:
        raise ValueError(
            f"{', '.join(unread)} has bounds, but no private likelihood reads it. Leave them out."
        )


def _refuse_wrong_labels(graph: RowGraph, arrays: Sequence[np.ndarray]) -> None:
    """Compiled code does not check bounds: a wrong label would read what is not its record's."""
    if not graph.lookups:
        return
    function = pytensor.function(
        [leaf.block for leaf in graph.leaves],
        without_errors([label for label, _ in graph.lookups], interpreted=True),
        mode=INTERPRETED,
        on_unused_input="ignore",
    )
    for labels, (_, size) in zip(function(*arrays), graph.lookups, strict=True):
        least = 0 if np.ndim(labels) else -size  # one number, as in a[group, -1], is no label
        if np.size(labels) and not (least <= np.min(labels) and np.max(labels) < size):
            names = ", ".join(f"`{name}`" for name in graph.names)
            what = (
                f"Some labels in the likelihood of {names} are outside 0..{size - 1}, where "
                f"{size} groups are declared; pandas codes a missing category as -1. Recode or "
                "drop these rows before the model is built"
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


def longest_unnamed(n_units: int, n_public: int | None) -> int:
    """The number of entries from which on an unnamed array may hold one for each record, or unit.

    Whether a model is accepted may not depend on a private number of units, nor on a number of
    rows: half of the public number stands for the first, that of units for the second.
    """
    return n_units if n_public is None else max(n_public // 2, 3)


def draws_are_public(model: Model, public: Sequence[str], length: int) -> bool:
    """Whether the graph shows that draws from the prior use no private data.

    A public log-density does not show it: a ``pm.CustomDist`` draws with other code.
    """
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
    """Initial values must be public: the sampler's coordinates have their origin there.

    Their shapes must be public too, and so must the transforms: what is released has these shapes,
    and is what transforms make of coordinates.
    """
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


def _refuse_start_at_a_record(model: Model, groups: Sequence[_Group]) -> None:
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


def _refuse_other_axes(model: Model, graph: RowGraph) -> None:
    """Records are the first axis of what is observed, also where another axis is as long."""
    for name in graph.names:
        observed = ancestors([model.rvs_to_values[model[name]]])
        if any(leaf.axis != 0 and leaf.source in observed for leaf in graph.leaves):
            raise NotFactorizable(
                f"The likelihood of `{name}` runs over another axis of its observed value than the "
                "first. Put records on the first axis."
            )


def _refuse_shared_rows(groups: Sequence[_Group], public: set[Variable]) -> None:
    """An entry in memory belongs to one unit, wherever a likelihood reads it.

    Identity is that of the memory, so a view or a slice of an array is the array itself.  PyMC
    copies what it observes and what is in ``pm.Data``.  Only the user knows whether such copies, or
    others, hold the same entries.
    """
    earlier: list[tuple[Variable, np.ndarray, np.ndarray]] = []
    for group in groups:
        for leaf in group.graph.leaves:
            if leaf.source in public:
                continue
            array = np.moveaxis(np.asarray(array_of(leaf.source)), leaf.axis, 0)
            units = np.arange(len(array)) if group.units is None else group.units
            if _rows_overlap(array):
                named = f"`{leaf.source.name}`" if leaf.source.name else "An array"
                raise NotFactorizable(
                    f"{named} shows one entry in memory in several rows, as sliding windows and "
                    "broadcast arrays do, so it would belong to several records. Give a copy "
                    "(numpy.array) if these are different data."
                )
            for source, other, others in earlier:
                if not _same_units(array, units, other, others):
                    named = leaf.source.name or source.name
                    raise NotFactorizable(
                        f"{f'`{named}`' if named else 'One array'} is read by several likelihoods, "
                        "or as several arrays, and some of its entries belong to another "
                        "privacy_unit, or to another row, in one than in the other. Give each a "
                        "copy of its own if they are different data, or the same ids."
                    )
            earlier.append((leaf.source, array, units))


def _refuse_captured_rows(groups: Sequence[_Group]) -> None:
    """No part of an array of records, such as a row, may be left where every record reads it."""
    arrays = [array_of(leaf.source) for group in groups for leaf in group.graph.leaves]
    for group in groups:
        graph = group.graph
        outputs = [graph.loglik, *graph.conditions, *(cut.phi for cut in graph.cuts)]
        outputs += [cut.row_data for cut in graph.cuts if cut.row_data is not None]
        outputs += [label for label, _ in graph.lookups]
        for variable in ancestors_without_shapes(outputs):
            if isinstance(variable, Constant) and any(
                share_memory(variable.data, array) for array in arrays
            ):
                names = ", ".join(f"`{name}`" for name in graph.names)
                what = (
                    f"The likelihood of {names} is not a sum of one term per record: a part of an "
                    "array that holds records reaches all of them."
                )
                raise NotFactorizable(
                    f"{what} Standardise with public constants before the model is built, or give "
                    "it a copy if it is public.",
                    f"{what} Standardise with constants before the model is built, or give it a "
                    "copy.",
                )


def _rows_overlap(array: np.ndarray) -> bool:
    """Whether an entry in memory is in several rows of an array."""
    reach = array.itemsize
    for stride, size in sorted(
        (abs(k), n) for k, n in zip(array.strides, array.shape, strict=True)
    ):
        if size > 1 and stride < reach:
            break
        reach += stride * (size - 1)
    else:  # each axis steps over what the shorter steps reach
        return False
    if not _whole_entries(array):
        return True
    places = _addresses(array)
    rows = np.repeat(np.arange(len(array)), max(array[:1].size, 1))
    order = np.lexsort((rows, places))
    return bool(np.any((np.diff(places[order]) == 0) & (np.diff(rows[order]) > 0)))


def _same_units(a: np.ndarray, of_a: np.ndarray, b: np.ndarray, of_b: np.ndarray) -> bool:
    """Whether the entries that two arrays share have the same unit in both; each is in one row."""
    if not share_memory(a, b):
        return True
    if a.itemsize != b.itemsize or not _whole_entries(a, b):
        return False
    if a.__array_interface__["data"] == b.__array_interface__["data"] and (
        (a.strides, a.shape) == (b.strides, b.shape)
    ):
        return np.array_equal(of_a, of_b)
    rows = [np.repeat(units, max(x[:1].size, 1)) for x, units in ((a, of_a), (b, of_b))]
    _, at_a, at_b = np.intersect1d(_addresses(a), _addresses(b), return_indices=True)
    return len(at_a) > 0 and np.array_equal(rows[0][at_a], rows[1][at_b])


def _whole_entries(*arrays: np.ndarray) -> bool:
    """Whether entries of arrays with items of one size coincide in memory or are apart."""
    size, first = arrays[0].itemsize, arrays[0].__array_interface__["data"][0]
    starts = [array.__array_interface__["data"][0] - first for array in arrays]
    strides = [k for a in arrays for k, n in zip(a.strides, a.shape, strict=True) if n > 1]
    return not any(step % size for step in (*starts, *strides))


def _addresses(array: np.ndarray) -> np.ndarray:
    places = np.full(1, array.__array_interface__["data"][0])
    for size, stride in zip(array.shape, array.strides, strict=True):
        places = np.add.outer(places, stride * np.arange(size))
    return places.ravel()


def _public_logp(
    model: Model,
    public: Sequence[str],
    groups: Sequence[_Group],
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
