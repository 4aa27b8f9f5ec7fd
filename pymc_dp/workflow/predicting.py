"""Predictions from released draws, which are functions of these and of public values alone.

Private data of the model are replaced by public values, and the graph that is left has to show that
nothing private is behind it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import xarray as xr
from pymc.distributions.distribution import SymbolicRandomVariable
from pymc.distributions.shape_utils import change_dist_size
from pymc.distributions.truncated import TruncatedRV
from pymc.model import Model
from pymc.pytensorf import compile as compile_draws
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.type import TensorType
from rich.progress import track

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import warn
from pymc_dp.base.columns import is_frame, named, numbers
from pymc_dp.base.compat import advanced_indices
from pymc_dp.budget import PrivacyBudget, get_budget, has_lost_budget, model_of
from pymc_dp.errors import UnsafeRelease
from pymc_dp.publication.publish import (
    STATEMENT,
    plan_of,
    private_inputs,
    public_coords,
    released_draws,
)
from pymc_dp.publication.results import LOOPS, PYTHON, dataset, dims_of
from pymc_dp.records.ancestry import TAKES, array_of, data_behind, hides_code
from pymc_dp.records.bounds import clamp, source_limits
from pymc_dp.records.units import private_observed

_BY_HAND = (
    "Build a model with public covariates and the same parameters, and predict from that one: "
    "released draws may be used freely."
)


def predict(
    released: Any,
    new: Mapping[str, Any] | Any = None,
    *,
    model: Model | None = None,
    var_names: str | Sequence[str] | None = None,
    coords: Mapping[str, Sequence[Any]] | None = None,
    random_seed: Any = None,
    progressbar: bool = True,
) -> Any:
    """Predict outcomes at public values of your choice.

    ::

        grid = np.linspace(18, 80, 50)  # public
        predicted = dp.predict(released, new={"age": grid}, model=model)

    Parameters
    ----------
    released : arviz.InferenceData or xarray.DataTree
        Released draws, with all parameters that the predictions depend on.
    new : dict of str to array or column, or data frame, optional
        Public values by name of a ``pm.Data``, in its place: one row for each prediction, as many
        as you like.  All private data on which a prediction depends need one; data that were
        declared public may have one.  They are clamped to :func:`bounds`, as the data are.
    model : pymc.Model, optional
        The model of the draws, or one without a budget and with parameters of the same names.
        Default: the model of the context.
    var_names : str or sequence of str, optional
        Observed variables, to be simulated, and Deterministics, to be computed.  Default: all
        observed variables.
    coords : dict of str to sequence, optional
        Public labels of the new rows, by dim.  Default: 0..k-1.
    random_seed : int or numpy.random.Generator, optional
        Of the simulation.
    progressbar : bool, default True

    Returns
    -------
    arviz.InferenceData (PyMC 5) or xarray.DataTree (PyMC 6)
        With groups ``predictions`` and, where there are new values, ``predictions_constant_data``,
        and the privacy statement of the draws.

    Raises
    ------
    UnsafeRelease
        If the draws were not released, or a prediction would depend on private data.
    ValueError
        If `new`, `var_names` or `coords` do not fit the model, or parameters were not released.

    Notes
    -----
    *Guarantee.*  Predictions are functions of released draws, public values and the formula of the
    model, so nothing is spent, and the statement of the draws holds for them. No record is read.

    *Assumptions.*  `new` is public, and is part of the result: grids, scenarios, or people who are
    in no private data set, never rows of the private data, which nothing recognises. So are numbers
    in the formula of a prediction, such as a known standard deviation (the statement names the
    variables with such numbers), and all that a `model` without a budget holds.

    *Weaknesses.*  An array without a name cannot be replaced: pass arrays as ``pm.Data``. An
    observed variable that has no value of its own for each row is simulated once, or once for each
    label in `coords`.
    """
    model, simulation = model_of(model), (var_names, random_seed, progressbar)
    return _predictions("predictions", released, model, simulation, new, coords)


def sample_posterior_predictive(
    idata: Any,
    model: Model | None = None,
    *,
    var_names: str | Sequence[str] | None = None,
    random_seed: Any = None,
    progressbar: bool = True,
) -> Any:
    """Posterior predictive draws of what depends on parameters and public data alone.

    This is :func:`predict` at the data that the model has, as many as it has.

    Parameters
    ----------
    idata : arviz.InferenceData or xarray.DataTree
        Released draws.
    model, var_names, random_seed, progressbar
        As for :func:`predict`.

    Returns
    -------
    arviz.InferenceData (PyMC 5) or xarray.DataTree (PyMC 6)
        With the group ``posterior_predictive`` and the privacy statement of the draws.

    Raises
    ------
    UnsafeRelease, ValueError
        As of :func:`predict`.
    """
    model, simulation = model_of(model), (var_names, random_seed, progressbar)
    return _predictions("posterior_predictive", idata, model, simulation)


def _predictions(
    group: str, released: Any, model: Model, simulation: Any, new: Any = None, coords: Any = None
) -> Any:
    statement, posterior = released_draws(released)
    if has_lost_budget(model):
        raise UnsafeRelease(
            "The model is a copy of one with a PrivacyBudget: it holds the private covariates, and "
            "does not say which data are public. Give the original model."
        )
    if (budget := get_budget(model)) is not None:  # one without a budget is built by hand
        try:
            plan_of(statement["plan_id"], budget)
        except UnsafeRelease:  # the model may have been built again, in a new session say
            warn(
                "The draws were made under another budget than that of the model: predictions make "
                "sense only if it is the same model."
            )
    labels = {dim: list(given) for dim, given in dict(coords or {}).items()}
    sizes = {dim: len(given) for dim, given in labels.items()}
    resize = group == "predictions"
    graphs = _Graphs(model, budget, _new_values(model, new), sizes, resize)
    groups = {group: _simulated(graphs, posterior, *simulation)}
    if graphs.new:
        values = {v.name: value.get_value() for v, value in graphs.new.items()}
        columns = {name: (dims_of(model, name, x.ndim), x) for name, x in values.items()}
        groups["predictions_constant_data"] = xr.Dataset(columns)
    return _published(graphs, groups, statement, labels)


# -- what is given --------------------------------------------------------------------------------


def _new_values(model: Model, new: Any) -> dict[Variable, SharedVariable]:
    """Public values, by the ``pm.Data`` whose place they take."""
    new = named({} if new is None else new)
    if not isinstance(new, Mapping):
        raise ValueError(
            "new must be a dict of arrays by name of a pm.Data, new={'x': grid}, or a data frame, "
            f"not {type(new).__name__}."
        )
    data = {v.name: v for v in model.data_vars}
    if unknown := [name for name in new if name not in data]:
        raise ValueError(
            f"new has {unknown}, which are no pm.Data of the model; those are {sorted(data)}. "
            "Other arrays have no name and cannot be replaced: pass them as pm.Data when the model "
            "is built, x = pm.Data('x', x)."
        )
    return {data[name]: _new_value(model, data[name], given) for name, given in new.items()}


def _new_value(model: Model, variable: Variable, given: Any) -> SharedVariable:
    name = variable.name
    label = f"new[{name!r}]"
    dims = model.named_vars_to_dims.get(name, ())
    if is_frame(given) and len(dims) > 1 and model.coords.get(dims[1]) is not None:
        columns = list(given.columns)
        if columns != list(model.coords[dims[1]]) and set(columns) == set(model.coords[dims[1]]):
            raise ValueError(f"{label} has its columns in another order than dim '{dims[1]}'.")
    array = numbers(label, given)
    if array.ndim != variable.type.ndim or not array.size:
        raise ValueError(
            f"{label} has shape {array.shape}; it must have {variable.type.ndim} axes, as `{name}` "
            "has, and one row for each prediction."
        )
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise ValueError(f"{label} holds NaN. Leave out the rows without a value, or fill them.")
    dtype = np.dtype(variable.type.dtype)
    with np.errstate(invalid="ignore"):
        value = array.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(value, array):
        kind = "True or False" if dtype.kind == "b" else "whole numbers"
        raise ValueError(f"{label} must hold {kind} that fit {dtype}, the type of `{name}`.")
    if (limits := source_limits(model).get(variable)) is not None:  # as in the fit
        value = clamp(value, limits)
    # an axis may be declared to be of length one, and be broadcast
    lengths = zip(variable.type.shape, value.shape, strict=True)
    shape = tuple(1 if declared == n == 1 else None for declared, n in lengths)
    return pytensor.shared(value, name=name, shape=shape)


def _wanted(model: Model, var_names: str | Sequence[str] | None) -> list[Variable]:
    observed = [rv.name for rv in model.observed_RVs]
    names = [var_names] if isinstance(var_names, str) else list(var_names or observed)
    known = {*observed, *(rv.name for rv in model.deterministics)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"var_names {unknown} are not in the model, or are data or parameters; it observes "
            f"{observed}."
        )
    return [model[name] for name in dict.fromkeys(names)]


# -- what is computed -----------------------------------------------------------------------------


@dataclass(eq=False)
class _Graphs:
    """Variables of a model as functions of released parameters and of new values.

    `new` are values by the ``pm.Data`` whose place they take, `lengths` those of dims that the user
    labels. With `resize` an observed variable has as many rows as these; else it keeps its own.
    """

    model: Model
    budget: PrivacyBudget | None
    new: Mapping[Variable, SharedVariable]
    lengths: Mapping[str, int]
    resize: bool

    def __post_init__(self) -> None:
        #: Free variables, and what takes their place.
        self.parameters = {rv: rv.type(name=rv.name) for rv in self.model.free_RVs}
        self.replaced: dict[Variable, Variable] = {**self.parameters, **self.new}
        #: What has new rows; names of variables with unnamed numbers.
        self.at_new_rows: set[Variable] = set(self.new.values())
        self.with_numbers: list[str] = []

    def of(self, wanted: Sequence[Variable]) -> list[Variable]:
        """Graphs of the variables; UnsafeRelease if something private is behind one."""
        behind, observed = set(ancestors(wanted)), self.model.observed_RVs
        for variable in (*observed, *self.model.deterministics):  # one may be behind another
            if variable in wanted or (variable in behind and variable in observed):
                self.replaced[variable] = self._graph(variable)
        return [self.replaced[variable] for variable in wanted]

    def _graph(self, variable: Variable) -> Variable:
        [graph] = clone_replace([variable], self.replaced, rebuild_strict=False)
        private = False
        if self.budget is not None:
            private = variable in private_observed(self.model, self.budget.public)
            self._refuse_private(variable, graph, private)
        if self.resize and (private or not self.at_new_rows.isdisjoint(ancestors([graph]))):
            if variable in self.model.observed_RVs:
                graph = self._resized(variable, graph)
            self.at_new_rows.add(graph)
        return graph

    def _refuse_private(self, variable: Variable, graph: Variable, observed: bool) -> None:
        """Refuse what is behind a variable; the number of rows too, if private data are observed
        and it is private and stays.
        """
        budget = self.budget
        assert budget is not None
        if (code := hides_code([graph])) is not None:
            raise UnsafeRelease(
                f"Predictions of `{variable.name}` are drawn by {code}, whose code may hold "
                f"private data. {_BY_HAND}"
            )
        leaves = [x for x, _ in self._leaves(graph)] if _is_distribution(graph) else [graph]
        private, numbers = private_inputs(self.model, leaves, budget, self.replaced.values())
        if private or (observed and budget.rows_are_private and not self.resize):
            raise _private(variable, private, self.model)
        if numbers:
            self.with_numbers.append(variable.name)

    def _leaves(self, graph: Variable, core: int = 0) -> Iterator[tuple[Variable, int]]:
        """Parameters of a distribution, and of those that it is made of, but no sizes; with the
        number of axes that each has besides those of rows.
        """
        for parameter, own in _parameters_of(graph):
            if _is_distribution(parameter) and parameter not in self.at_new_rows:
                yield from self._leaves(parameter, core + own - parameter.owner.op.ndim_supp)
            else:
                yield parameter, core + own

    def _resized(self, variable: Variable, graph: Variable) -> Variable:
        """With as many rows as its parameters have, or one for each label."""
        if not _is_distribution(graph):
            raise ValueError(f"`{variable.name}` cannot be given other rows. {_BY_HAND}")
        n_axes = graph.type.ndim - graph.owner.op.ndim_supp
        if not n_axes:
            return graph
        rows = [
            parameter.shape[0]
            for parameter, core in self._leaves(graph)
            if parameter.type.ndim == n_axes + core and parameter.type.shape[0] != 1
        ]
        dim = dims_of(self.model, variable.name, graph.type.ndim)[0]
        length = reduce(pt.maximum, rows) if rows else self.lengths.get(dim, 1)
        source = data_behind(self.model.rvs_to_values[variable]) if n_axes > 1 else None
        widths = () if source is None else np.shape(array_of(source))[1:n_axes]
        return change_dist_size(graph, (length, *widths))


def _is_distribution(variable: Variable) -> bool:
    """Whether a variable is drawn from a distribution whose parameters are known."""
    op = None if variable.owner is None else variable.owner.op
    known = isinstance(op, TruncatedRV) or getattr(op, "ndims_params", None) is not None
    return known and isinstance(op, RandomVariable | SymbolicRandomVariable)


def _parameters_of(variable: Variable) -> list[tuple[Variable, int]]:
    """Those of a distribution, with the number of axes that each has of its own."""
    node = variable.owner
    if isinstance(node.op, TruncatedRV):  # after generator and size of what is truncated
        return [(x, 0) for x in node.inputs[2:] if isinstance(x.type, TensorType)]
    return list(zip(node.op.dist_params(node), node.op.ndims_params, strict=True))


def _private(variable: Variable, private: Collection[Variable], model: Model) -> UnsafeRelease:
    """The error that says which data need public values in their place."""
    data = sorted({v.name for v in private if v in model.data_vars})
    text = f"Predictions of `{variable.name}` would be made at private covariates"
    if data:
        names, values = (", ".join(form.format(x) for x in data) for form in ("`{}`", "{!r}: ..."))
        text += f", {names}. Give public values in their place: dp.predict(..., new={{{values}}})"
    if len(data) < len(set(private)) or not private:
        text += (
            ". Arrays without a name, and the number of records, cannot be replaced: pass arrays "
            f"as pm.Data, x = pm.Data('x', x), when the model is built. {_BY_HAND[:-1]}"
        )
    return UnsafeRelease(f"{text}.")


# -- what comes out -------------------------------------------------------------------------------


def _simulated(
    graphs: _Graphs, posterior: xr.Dataset, var_names: Any, random_seed: Any, progressbar: bool
) -> xr.Dataset:
    """One simulation for each draw."""
    wanted = _wanted(graphs.model, var_names)
    outputs = graphs.of(wanted)
    used = set(ancestors(outputs))
    if unused := [v.name for v, value in graphs.new.items() if value not in used]:
        raise ValueError(
            f"new has values of {unused}, on which no prediction depends. Leave them out: the "
            "outcome itself needs none."
        )
    inputs = {rv.name: x for rv, x in graphs.parameters.items() if x in used}
    if missing := [name for name in inputs if name not in posterior]:
        raise ValueError(
            f"The draws lack {missing}, on which predictions depend. Release without var_names, or "
            "give the model of these draws."
        )
    _refuse_negative_labels(outputs, graphs)
    # lengths without the draws that they are lengths of: those may be as many as the records
    rewrites = ("ShapeOpt", "canonicalize")
    outputs = rewrite_graph(outputs, include=rewrites, exclude=LOOPS, clone=False)
    seed = int(np.random.default_rng(random_seed).integers(2**31))
    function = compile_draws(
        list(inputs.values()), outputs, random_seed=seed, mode=PYTHON, on_unused_input="ignore"
    )
    columns = [
        posterior[name].transpose("chain", "draw", ...).values.astype(x.dtype)
        for name, x in inputs.items()
    ]
    chains = {dim: posterior[dim].values for dim in ("chain", "draw")}
    size = tuple(len(labels) for labels in chains.values())
    try:
        places = track([*np.ndindex(size)], "Predicting", disable=not progressbar)
        made = [function(*[x[where] for x in columns]) for where in places]
    except (AssertionError, IndexError, TypeError, ValueError) as error:
        shapes = {f"new[{v.name!r}]": x.get_value().shape for v, x in graphs.new.items()}
        shapes |= {f"`{k}`": x.shape[2:] for k, x in zip(inputs, columns, strict=True)}
        counts = graphs.budget is not None and graphs.budget.rows_are_private
        reason = "" if counts else f": {str(error).splitlines()[0]}"  # it may tell their number
        labels = [f"new[{v.name!r}]" for v in graphs.new if v.type.dtype.startswith("int")]
        if labels and isinstance(error, IndexError):
            reason = f": {', '.join(labels)} must hold labels of the groups that there are{reason}"
        raise ValueError(
            f"Predictions cannot be computed{reason}. Shapes are "
            f"{', '.join(f'{name}: {shape}' for name, shape in shapes.items())}. If they do not "
            "fit, give every array in new one row for each prediction, with the columns and labels "
            "of the model, and the model of these draws."
        ) from None
    values = {
        variable.name: np.stack(found).reshape((*size, *np.shape(found[0])))
        for variable, found in zip(wanted, zip(*made, strict=True), strict=True)
    }
    return dataset(graphs.model, values, ()).assign_coords(chains)


def _refuse_negative_labels(outputs: Sequence[Variable], graphs: _Graphs) -> None:
    """Refuse new labels that would count from the end; those that are too high are an error."""
    for variable in ancestors(outputs):
        if variable.owner is None or not isinstance(variable.owner.op, TAKES):
            continue
        for entry in advanced_indices(variable.owner):
            behind = set(ancestors([entry])) if isinstance(entry, Variable) else set()
            names = [f"new[{x.name!r}]" for x in graphs.new.values() if x in behind]
            if not names or not behind.isdisjoint(graphs.parameters.values()):
                continue
            if (pytensor.function([], entry, mode=PYTHON)() < 0).any():
                raise ValueError(
                    f"{', '.join(names)} holds negative labels, which would count from the end; "
                    "pandas codes a category that it does not know as -1."
                )


def _published(
    graphs: _Graphs,
    groups: Mapping[str, xr.Dataset],
    statement: dict[str, Any],
    labels: Mapping[str, list[Any]],
) -> Any:
    """A result with public coords, and the statement of the draws."""
    model, budget = graphs.model, graphs.budget
    sizes = {dim: size for found in groups.values() for dim, size in found.sizes.items()}
    for dim, given in labels.items():
        if len(given) != sizes.get(dim, -1):
            raise ValueError(
                f"coords has {len(given)} labels of dim {dim!r}; the predictions have "
                f"{ {d: n for d, n in sizes.items() if d not in ('chain', 'draw')} }."
            )
    rows = {dims_of(model, x.name, x.type.ndim)[0] for x in graphs.at_new_rows if x.type.ndim}
    kept = {
        dim: list(found)
        for dim, found in model.coords.items()
        if found is not None
        and len(found) == sizes.get(dim)
        and dim not in rows
        and (budget is None or dim in budget.public)
    }
    coords = {**kept, **labels}
    taken = [*statement["taken_as_public"], *graphs.with_numbers]
    statement["taken_as_public"] = list(dict.fromkeys(taken))
    return _compat.inference_data(
        {
            group: public_coords(
                found.assign_coords({d: x for d, x in coords.items() if d in found.sizes}), coords
            )
            for group, found in groups.items()
        },
        {STATEMENT: json.dumps(statement)},
    )
