"""The same model on made-up records: prior predictive at plausible values, no record is read."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.shape_utils import change_dist_size
from pymc.model import Model
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from pymc_dp.budget import PrivacyBudget, untagged
from pymc_dp.errors import UnsafeModel
from pymc_dp.publication.results import constrain, unconstrain
from pymc_dp.records.ancestry import array_of, data_behind, hides_code, is_data, is_long_constant
from pymc_dp.records.bounds import bounds, declared_bounds
from pymc_dp.records.extraction import Records, extract
from pymc_dp.records.units import private_observed
from pymc_dp.reports.simulation import Simulation, drawn_from_prior

#: Draws from the prior whose median is its centre.
_DRAWS = 101


@dataclass
class MadeUp:
    """Made-up records of a model with a budget, and the values of its parameters they come from.

    `truth` has values of the free variables by name; `assumed` names the features that were taken
    as standard normal, or as 0 and 1.
    """

    model: Model
    budget: PrivacyBudget
    truth: dict[str, np.ndarray]
    assumed: list[str]
    rows_per_unit: int
    _records: Records
    _arrays: dict[Variable, np.ndarray]

    @classmethod
    def of(
        cls,
        model: Model,
        budget: PrivacyBudget,
        data: Mapping[str, Any],
        at: Mapping[str, Any],
        rows_per_unit: int,
        rng: np.random.Generator,
    ) -> MadeUp:
        """As many records as the budget has units, with public features where there are any."""
        if (code := hides_code(model.basic_RVs)) is not None:
            raise UnsafeModel(
                f"The model has a part of which {code} holds the code, and that code may hold "
                "private data. Build the model on made-up arrays of your own, and use dp.sample."
            )
        records = extract(model, **budget.secrecy, check=False, read=False)
        each = 1 if budget.privacy_unit is None else rows_per_unit
        simulation = Simulation(
            model,
            records,
            budget.public,
            budget.longest_unnamed,
            data,
            rng,
            rows=budget.n_public * each,
            standard=True,
        )
        truth = _plausible(model, records, at, rng)
        arrays = simulation.draw([truth[rv.name] for rv in model.free_RVs])
        return cls(model, budget, truth, simulation.assumed, each, records, arrays)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.budget.n_public * self.rows_per_unit

    def build(self) -> Model:
        """A new model on these records, without a budget; it holds no private array."""
        with pm.Model(model=None) as built:  # not within the model of the context
            self._add_variables(built, self._add_data(built))
            if limits := declared_bounds(self.model):
                bounds(built, limits)
        return built

    def with_budget(self, epsilon: float) -> Model:
        """The same with a budget of its own, on a ledger that is thrown away."""
        built, budget = self.build(), self.budget
        unit: Any = None
        if budget.privacy_unit is not None:
            ids = np.repeat(np.arange(budget.n_public), self.rows_per_unit)
            unit = {rv.name: ids for rv in private_observed(built, budget.public)}
        private = budget.neighboring == "add_or_remove_one"
        with warnings.catch_warnings():  # the same made-up records may be rehearsed again
            warnings.filterwarnings("ignore", "These data already have a budget")
            PrivacyBudget(
                epsilon,
                budget.delta,
                neighboring=budget.neighboring,
                privacy_unit=unit,
                public=[n for n in budget.public if n in (*built.named_vars, *built.coords)],
                n_public=budget.n_public if private else None,
                dataset="made-up records",
                model=built,
            )
        return built

    def _placed(self) -> dict[Variable, np.ndarray]:
        """Made-up arrays, with axes as in the model, and public data."""
        leaves = [leaf for group in self._records.groups for leaf in group.graph.leaves]
        axes = {leaf.source: leaf.axis for leaf in leaves}
        made = {source: np.moveaxis(x, 0, axes[source]) for source, x in self._arrays.items()}
        public = [v for v in self.model.data_vars if v.name in self.budget.public]
        return {**made, **{v: array_of(v) for v in public if v not in made}}

    def _lengths(self, arrays: Mapping[Variable, np.ndarray]) -> dict[str, int]:
        """Of the dims of parameters, outcomes and data; public data may have other rows."""
        model = self.model
        shapes = {name: value.shape for name, value in self.truth.items()}
        for rv in private_observed(model, self.budget.public):
            shapes[rv.name] = arrays[data_behind(model.rvs_to_values[rv])].shape
        shapes |= {v.name: array.shape for v, array in arrays.items() if v in model.data_vars}
        lengths: dict[str, int] = {}
        for name, shape in shapes.items():
            for dim, length in zip(model.named_vars_to_dims.get(name, ()), shape, strict=False):
                lengths.setdefault(dim, length)
        for dim in self.budget.public:
            if model.coords.get(dim) is not None:
                lengths.setdefault(dim, len(model.coords[dim]))
        return {dim: length for dim, length in lengths.items() if dim is not None}

    def _label(self, dim: str, length: int) -> Any:
        """The labels of a dim if they are public, else numbers."""
        labels = self.model.coords[dim] if dim in self.budget.public else None
        return np.arange(length) if labels is None or len(labels) != length else list(labels)

    def _add_data(self, built: Model) -> dict[Variable, Variable]:
        """What stands in place of the arrays of the model, and of the lengths of its dims."""
        model, arrays = self.model, self._placed()
        lengths = self._lengths(arrays)
        built.add_coords({dim: self._label(dim, length) for dim, length in lengths.items()})
        replaced = {model.dim_lengths[dim]: built.dim_lengths[dim] for dim in lengths}
        for source, array in arrays.items():
            if source in model.data_vars:
                dims = _fitting(built, model.named_vars_to_dims.get(source.name), array.shape)
                replaced[source] = pm.Data(source.name, array, dims=dims, model=built)
            else:
                replaced[source] = pt.as_tensor_variable(array, name=source.name)
        return replaced

    def _unknown(self, variables: Sequence[Variable], replaced: Collection[Variable]) -> set:
        """Private arrays behind variables in whose place nothing stands."""
        length, known = self.budget.longest_unnamed, {*replaced, *self.model.dim_lengths.values()}
        behind = set(ancestors(variables)) - known
        return {v for v in behind if is_data(v) or is_long_constant(v, length)}

    def _blank(self, source: Variable) -> Variable:
        """An array of zeros in place of one that is used for its shape alone."""
        shape = np.shape(array_of(source))
        if shape and self.budget.rows_are_private:
            shape = (self.rows, *shape[1:])
        return pt.as_tensor_variable(np.zeros(shape, source.type.dtype))

    def _add_variables(self, built: Model, replaced: dict[Variable, Variable]) -> None:
        """Those of the model, in its order, with other data behind them."""
        model, dims = self.model, self.model.named_vars_to_dims
        whole = {
            source
            for source in replaced
            if dims.get(source.name) == built.named_vars_to_dims.get(source.name)
        }
        kept = [v for v in model.deterministics if not self._unknown([v], whole)]
        variables = [*model.basic_RVs, *kept]
        for source in self._unknown(variables, replaced):
            replaced[source] = self._blank(source)
        clones = dict(
            zip(variables, clone_replace(variables, replaced, rebuild_strict=False), strict=True)
        )
        private = private_observed(model, self.budget.public)
        for rv in model.basic_RVs:
            clone, named = untagged(clones[rv]), dims.get(rv.name)
            if rv in model.free_RVs:
                transform = model.rvs_to_transforms[rv]
                start = model.rvs_to_initial_values.get(rv)
                start = None if isinstance(start, Variable) else start
                built.register_rv(
                    clone,
                    rv.name,
                    dims=named,
                    transform=transform,
                    default_transform=None,
                    initval=start,
                )
                continue
            value = model.rvs_to_values[rv]
            source = data_behind(value)
            if source is not None:
                named = _fitting(built, named, np.shape(array_of(replaced.get(source, source))))
                value = replaced.get(source, value)
            if rv in private and self.rows != np.shape(array_of(source))[0]:
                batch = clone.type.ndim - getattr(clone.owner.op, "ndim_supp", 0)
                resized = change_dist_size(clone, (self.rows, *self._arrays[source].shape[1:batch]))
                clone = untagged(resized)
            built.register_rv(clone, rv.name, observed=value, dims=named)
        for variable in kept:
            clone = clones[variable]
            named = _fitting(built, dims.get(variable.name), clone.type.shape)
            pm.Deterministic(variable.name, clone, model=built, dims=named)


def _fitting(built: Model, dims: Any, shape: Sequence[int | None]) -> Any:
    """Dims that are as long in the new model as a variable; public data may have other rows."""
    lengths = {dim: len(labels) for dim, labels in built.coords.items()}
    fits = (
        dim is None or (dim in lengths and n in (None, lengths[dim]))
        for dim, n in zip(dims or (), shape, strict=False)
    )
    return dims if all(fits) else None


def _plausible(
    model: Model, records: Records, at: Mapping[str, Any], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Values of the free variables: those given, and half-way from the centre of the prior to a
    draw of it, cut to its central 80 %, as wide priors say little about where the posterior will
    be.
    """
    free = [rv.name for rv in model.free_RVs]
    unknown = sorted(set(at) - set(free))
    if unknown:
        raise ValueError(f"at names {unknown}; the free variables of the model are {free}.")
    drawn = drawn_from_prior(model, _DRAWS, int(rng.integers(2**31)))
    prior = {name: values[None] for name, values in zip(free, drawn, strict=True)}
    theta = unconstrain(model, records.parameters, prior)[0]
    theta = theta[np.isfinite(theta).all(axis=1)]
    if not len(theta):
        raise ValueError("No draw of the prior is inside of its support; choose another prior.")
    low, centre, high = np.quantile(theta, [0.1, 0.5, 0.9], axis=0)
    middle = 0.5 * (centre + theta[0].clip(low, high))
    found = constrain(model, records.parameters, middle[None, None], free)
    truth = {}
    for name, value in found.items():
        given = np.asarray(at.get(name, value[0, 0]))
        fits = given.dtype.kind in "biuf" and given.shape == value.shape[2:]
        if not (fits and np.isfinite(given).all()):
            raise ValueError(f"at[{name!r}] must be finite numbers of shape {value.shape[2:]}.")
        truth[name] = given.astype(value.dtype)
    return truth
