"""The same model on made-up records: prior predictive at plausible values, no record is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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
from pymc_dp.records.ancestry import array_of, data_behind, hides_code, is_data, is_long_array
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
    as standard normal.
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
        if (code := hides_code([*model.basic_RVs, *model.potentials])) is not None:
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
        model, budget, arrays = self.model, self.budget, self._arrays
        replaced: dict[Variable, Variable] = {}
        with pm.Model(coords=self._coords(), model=None) as built:
            for variable in model.data_vars:
                known = arrays.get(variable)
                if known is None and variable.name in budget.public:
                    known = array_of(variable)
                if known is not None:
                    dims = model.named_vars_to_dims.get(variable.name)
                    replaced[variable] = pm.Data(variable.name, known, dims=dims)
            for source, array in arrays.items():
                if source not in replaced:
                    replaced[source] = pt.as_tensor_variable(array, name=source.name)
            for dim, length in model.dim_lengths.items():
                if dim in built.dim_lengths:
                    replaced[length] = built.dim_lengths[dim]
            self._add_variables(built, replaced)
            limits = declared_bounds(model)
            if limits:
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

    def _coords(self) -> dict[str, Any]:
        """Of all dims with labels; rows are numbered 0, 1, 2."""
        model, rows = self.model, set()
        for group in self._records.groups:
            for leaf in group.graph.leaves:
                dims = model.named_vars_to_dims.get(leaf.source.name or "")
                if is_data(leaf.source) and dims:
                    rows.add(dims[leaf.axis])
        for rv in private_observed(model, self.budget.public):
            rows.update(list(model.named_vars_to_dims.get(rv.name) or ())[:1])
        return {
            dim: np.arange(self.rows) if dim in rows else list(labels)
            for dim, labels in model.coords.items()
            if labels is not None
        }

    def _add_variables(self, built: Model, replaced: dict[Variable, Variable]) -> None:
        """Those of the model, in its order, with other data behind them."""
        model, length = self.model, self.budget.longest_unnamed
        kept = [
            variable
            for variable in model.deterministics
            if not any(
                is_long_array(left, length) and left not in replaced
                for left in ancestors([variable])
            )
        ]
        variables = [*model.basic_RVs, *kept, *model.potentials]
        clones = dict(
            zip(variables, clone_replace(variables, replaced, rebuild_strict=False), strict=True)
        )
        private = private_observed(model, self.budget.public)
        for rv in model.basic_RVs:
            dims, clone = model.named_vars_to_dims.get(rv.name), untagged(clones[rv])
            if rv in model.free_RVs:
                transform = model.rvs_to_transforms[rv]
                start = model.rvs_to_initial_values.get(rv)
                start = None if isinstance(start, Variable) else start
                built.register_rv(
                    clone,
                    rv.name,
                    dims=dims,
                    transform=transform,
                    default_transform=None,
                    initval=start,
                )
                continue
            source = data_behind(model.rvs_to_values[rv])
            value = replaced.get(source, model.rvs_to_values[rv]) if source is not None else None
            if rv in private and self.rows != np.shape(array_of(source))[0]:
                batch = clone.type.ndim - getattr(clone.owner.op, "ndim_supp", 0)
                resized = change_dist_size(clone, (self.rows, *self._arrays[source].shape[1:batch]))
                clone = untagged(resized)
            built.register_rv(clone, rv.name, observed=value, dims=dims)
        for variable in kept:
            clone = clones[variable]
            pm.Deterministic(variable.name, clone, dims=model.named_vars_to_dims.get(variable.name))
        for variable in model.potentials:
            pm.Potential(variable.name, clones[variable])


def _plausible(
    model: Model, records: Records, at: Mapping[str, Any], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Values of the free variables: those given, and half-way from the centre of the prior to a
    draw of it, as wide priors say little about where the posterior will be.
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
    middle = 0.5 * (np.median(theta, axis=0) + theta[0])
    found = constrain(model, records.parameters, middle[None, None], free)
    truth = {}
    for name, value in found.items():
        given = np.asarray(at.get(name, value[0, 0]), dtype=value.dtype)
        if given.shape != value.shape[2:] or not np.isfinite(given).all():
            raise ValueError(
                f"at[{name!r}] must be finite numbers of shape {value.shape[2:]}, not of shape "
                f"{given.shape}."
            )
        truth[name] = given
    return truth
