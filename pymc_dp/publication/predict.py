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

from pymc_dp.base import compat as _compat
from pymc_dp.base.columns import is_frame, named, numbers
from pymc_dp.base.compat import advanced_indices
from pymc_dp.budget import PrivacyBudget, get_budget, has_lost_budget, model_of
from pymc_dp.errors import UnsafeRelease
from pymc_dp.publication.publish import STATEMENT, private_inputs, public_coords, released_draws
from pymc_dp.publication.results import PYTHON, dataset, dims_of
from pymc_dp.records.ancestry import TAKES, array_of, data_behind, hides_code
from pymc_dp.records.units import private_observed

_BY_HAND = (
    "Build a model with public data and the same parameters, and predict from that one: released "
    "draws may be used freely."
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
        declared public may have one.
    model : pymc.Model, optional
        The model of the draws, or one with parameters of the same names.  Default: the model of the
        context.
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

    *Assumptions.*  `new` is public: grids, scenarios, or people who are in no private data set.
    Numbers in the formula of a prediction, such as a known standard deviation, are taken as public;
    the statement names the variables with such numbers.

    *Weaknesses.*  An array without a name cannot be replaced: pass arrays as ``pm.Data``. An
    observed variable that has no value of its own for each row is simulated once, or once for each
    label in `coords`.
    """
    model = model_of(model)
    statement, posterior = _released(released, model)
    labels = {dim: list(given) for dim, given in dict(coords or {}).items()}
    sizes = {dim: len(given) for dim, given in labels.items()}
    graphs = _Graphs(model, get_budget(model), _new_values(model, new), sizes, resize=True)
    groups = {"predictions": _simulated(graphs, posterior, var_names, random_seed, progressbar)}
    if graphs.new:
        values = {v.name: value.get_value() for v, value in graphs.new.items()}
        columns = {name: (dims_of(model, name, x.ndim), x) for name, x in values.items()}
        groups["predictions_constant_data"] = xr.Dataset(columns)
    return _published(graphs, groups, statement, labels)


def sample_posterior_predictive(
    idata: Any,
    model: Model | None = None,
    *,
    var_names: str | Sequence[str] | None = None,
    random_seed: Any = None,
    progressbar: bool = True,
) -> Any:
    """Posterior predictive draws of what depends on parameters and public data alone.

    For predictions at public values in place of private data see :func:`pymc_dp.predict`.

    Parameters
    ----------
    idata : arviz.InferenceData or xarray.DataTree
        A released result.
    model : pymc.Model, optional
        Default: the model of the context.
    var_names : str or sequence of str, optional
        Default: all observed variables.
    random_seed : int or numpy.random.Generator, optional
        Of the simulation.
    progressbar : bool, default True

    Returns
    -------
    arviz.InferenceData (PyMC 5) or xarray.DataTree (PyMC 6)
        With the group ``posterior_predictive`` and the privacy statement.

    Raises
    ------
    UnsafeRelease
        If the draws were not released, or a variable depends on private data.
    ValueError
        If `var_names` are not in the model, or parameters were not released.
    """
    model = model_of(model)
    statement, posterior = _released(idata, model)
    graphs = _Graphs(model, get_budget(model), {}, {}, resize=False)
    draws = _simulated(graphs, posterior, var_names, random_seed, progressbar)
    return _published(graphs, {"posterior_predictive": draws}, statement, {})


# -- what is given --------------------------------------------------------------------------------


def _released(idata: Any, model: Model) -> tuple[dict[str, Any], xr.Dataset]:
    """The statement and the draws of a released result; refuse what is none, and copied models."""
    facts, posterior = released_draws(idata)
    if has_lost_budget(model):
        raise UnsafeRelease(
            "The model is a copy of one with a PrivacyBudget: it holds the private covariates, and "
            "does not say which data are public. Give the original model."
        )
    return facts, posterior


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
    try:
        return pytensor.shared(value, name=name, shape=variable.type.shape)
    except TypeError:
        raise ValueError(
            f"{label} has shape {array.shape}; `{name}` was declared with {variable.type.shape}."
        ) from None


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
        #: All that predictions depend on; graphs with new rows; variables with unnamed numbers.
        self.used: set[Variable] = set()
        self.at_new_rows: set[Variable] = set()
        self.with_numbers: list[str] = []

    def of(self, wanted: Sequence[Variable]) -> list[Variable]:
        """Graphs of the variables; UnsafeRelease if something private is behind one."""
        behind, observed = set(ancestors(wanted)), self.model.observed_RVs
        for variable in (*observed, *self.model.deterministics):  # one may be behind another
            if variable in wanted or (variable in behind and variable in observed):
                self.replaced[variable] = self._graph(variable)
        outputs = [self.replaced[variable] for variable in wanted]
        self.used.update(ancestors(outputs))
        if unused := [v.name for v, value in self.new.items() if value not in self.used]:
            raise ValueError(
                f"new has values of {unused}, on which no prediction depends. Leave them out: the "
                "outcome itself needs none."
            )
        return outputs

    def _graph(self, variable: Variable) -> Variable:
        [graph] = clone_replace([variable], self.replaced, rebuild_strict=False)
        private = False
        if self.budget is not None:
            private = variable in private_observed(self.model, self.budget.public)
            self._refuse_private(variable, graph, private)
        fresh = not {*self.new.values(), *self.at_new_rows}.isdisjoint(ancestors([graph]))
        if self.resize and (private or (fresh and variable in self.model.observed_RVs)):
            graph = self._resized(variable, graph)
            fresh = True
        if fresh:
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
        leaves = self._leaves(graph) if _is_distribution(graph) else [graph]
        private, numbers = private_inputs(self.model, leaves, budget, self.replaced.values())
        if private or (observed and budget.rows_are_private and not self.resize):
            raise _private(variable, private, self.model)
        if numbers:
            self.with_numbers.append(variable.name)

    def _leaves(self, graph: Variable) -> Iterator[Variable]:
        """Parameters of a distribution, and of those that it is made of, but no sizes."""
        for parameter, _ in _parameters_of(graph):
            if self._is_part(parameter):
                yield from self._leaves(parameter)
            else:
                yield parameter

    def _is_part(self, parameter: Variable) -> bool:
        return _is_distribution(parameter) and parameter not in self.at_new_rows

    def _axes(self, graph: Variable) -> Iterator[list[Variable | None]]:
        """Lengths of the leading axes of a distribution, as its parameters have them; None where
        one is made to be repeated.
        """
        for parameter, core in _parameters_of(graph):
            lengths = zip(parameter.shape, parameter.type.shape, strict=True)
            shapes = [[None if fixed == 1 else length for length, fixed in lengths]]
            if self._is_part(parameter):
                core -= parameter.owner.op.ndim_supp
                shapes = list(self._axes(parameter))
            yield from (shape[: max(len(shape) - core, 0)] for shape in shapes)

    def _resized(self, variable: Variable, graph: Variable) -> Variable:
        """With as many rows as its parameters have, or one for each label."""
        if not _is_distribution(graph):
            raise ValueError(f"`{variable.name}` cannot be given other rows. {_BY_HAND}")
        n_axes = graph.type.ndim - graph.owner.op.ndim_supp
        rows = [axes[0] for axes in self._axes(graph) if len(axes) == n_axes]
        rows = [length for length in rows if length is not None]
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
        values = ", ".join(f"{name!r}: ..." for name in data)
        text += f", {', '.join(f'`{name}`' for name in data)}"
        text += f". Give public values in their place: dp.predict(..., new={{{values}}})"
    if len(data) < len(set(private)) or not private:
        text += (
            ". Arrays without a name, and the number of records, cannot be replaced: pass arrays "
            "as pm.Data, x = pm.Data('x', x), when the model is built. With these draws, build a "
            "model with public covariates and the same parameters, and predict from that one: "
            "released draws may be used freely"
        )
    return UnsafeRelease(f"{text}.")


# -- what comes out -------------------------------------------------------------------------------


def _simulated(
    graphs: _Graphs, posterior: xr.Dataset, var_names: Any, random_seed: Any, progressbar: bool
) -> xr.Dataset:
    """One simulation for each draw."""
    wanted = _wanted(graphs.model, var_names)
    outputs = graphs.of(wanted)
    inputs = {rv.name: x for rv, x in graphs.parameters.items() if x in graphs.used}
    if missing := [name for name in inputs if name not in posterior]:
        raise ValueError(
            f"The draws lack {missing}, on which predictions depend. Release without var_names, or "
            "give the model of these draws."
        )
    columns = [posterior[name].transpose("chain", "draw", ...).values for name in inputs]
    arguments = list(inputs.values())
    shapes = {f"new[{v.name!r}]": x.get_value().shape for v, x in graphs.new.items()}
    shapes |= {f"`{k}`": x.shape[2:] for k, x in zip(inputs, columns, strict=True)}

    def called(function: Any, where: tuple[int, ...]) -> list[np.ndarray]:
        """What a function of the parameters gives for one draw."""
        draw = [x[where].astype(v.dtype) for v, x in zip(arguments, columns, strict=True)]
        try:
            return function(*draw)
        except (AssertionError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"Predictions cannot be computed: {str(error).splitlines()[0]}. Shapes are "
                f"{', '.join(f'{name}: {shape}' for name, shape in shapes.items())}. If they do "
                "not fit, give every array in new one row for each prediction, with the columns of "
                "the model, and the model of these draws."
            ) from None

    lookups = _lookups(outputs, graphs.new)
    checked = [x for _, _, *pair in lookups for x in pair]
    function = pytensor.function(arguments, checked, mode=PYTHON, on_unused_input="ignore")
    _refuse_labels(lookups, called(function, (0, 0)))
    # lengths without the draws that they are lengths of: those may be as many as the records
    outputs = rewrite_graph(outputs, include=("ShapeOpt", "canonicalize"), clone=False)
    seed = int(np.random.default_rng(random_seed).integers(2**31))
    function = compile_draws(
        arguments, outputs, random_seed=seed, mode=PYTHON, on_unused_input="ignore"
    )
    chains = {dim: posterior[dim].values for dim in ("chain", "draw")}
    size = tuple(len(labels) for labels in chains.values())
    with _compat.working("Predicting", progressbar):
        made = [called(function, where) for where in np.ndindex(size)]
    values = {
        variable.name: np.stack(found).reshape((*size, *np.shape(found[0])))
        for variable, found in zip(wanted, zip(*made, strict=True), strict=True)
    }
    return dataset(graphs.model, values, ()).assign_coords(chains)


#: Names of new values, what is looked up in, the labels, and how many entries there are.
_Lookup = tuple[list[str], str, Variable, Variable]


def _lookups(outputs: Sequence[Variable], new: Mapping[Variable, SharedVariable]) -> list[_Lookup]:
    """Where new values are labels."""
    found = []
    for variable in ancestors(outputs):
        if variable.owner is None or not isinstance(variable.owner.op, TAKES):
            continue
        axis, source = 0, variable.owner.inputs[0]
        for entry in advanced_indices(variable.owner):
            mask = isinstance(entry, Variable) and entry.type.dtype == "bool"
            if isinstance(entry, Variable) and not mask:
                behind = set(ancestors([entry]))
                names = [f"new[{x.name!r}]" for x in new.values() if x in behind]
                label = f"`{source.name}`" if source.name else "a parameter"
                found += [(names, label, entry, source.shape[axis])] if names else []
            axis += entry.type.ndim if mask else entry is not None
    return found


def _refuse_labels(lookups: Sequence[_Lookup], values: Sequence[np.ndarray]) -> None:
    """Refuse labels without an entry: negative ones would count from the end."""
    for (names, source, *_), label, size in zip(lookups, values[::2], values[1::2], strict=True):
        if np.size(label) and not (np.min(label) >= 0 and np.max(label) < size):
            raise ValueError(
                f"{', '.join(names)} holds labels outside of 0..{size - 1}, where {source} has "
                f"{size} entries; pandas codes a category that it does not know as -1."
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
    rows = {
        dims_of(model, x.name, x.type.ndim)[0]
        for x in (*graphs.new.values(), *graphs.at_new_rows)
        if x.type.ndim
    }
    kept = {
        dim: list(found)
        for dim, found in model.coords.items()
        if dim in sizes
        and dim not in rows
        and (budget is None or dim in budget.public)
        and found is not None
        and len(found) == sizes[dim]
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
