"""Publication: what may leave.

:func:`publish` builds a new object from a whitelist: a result of ``pm.sample`` also holds data,
coordinates with names, and deterministics that are functions of records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from pymc.model import Model
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import HasInnerGraph

from pymc_dp.base import compat as _compat
from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import UnsafeRelease
from pymc_dp.publication.results import largest_rectangle
from pymc_dp.publication.statement import STATEMENT
from pymc_dp.records.ancestry import hides_code, is_data
from pymc_dp.records.units import lengths_of_rows, private_observed, public_inputs

#: Sampler statistics that are functions of released values and public settings.
PUBLIC_STATS = ("dp_accepted", "dp_epsilon", "dp_newton", "dp_plan_id")


class Provenance(Enum):
    """Where the value of a variable comes from, as far as its graph shows."""

    PUBLIC = "parameters and public variables alone"
    CONSTANTS = "parameters, public variables and unnamed numbers"
    PRIVATE = "private data, or arrays that may be private"


def provenance(model: Model, variable: Variable, budget: PrivacyBudget) -> Provenance:
    """What a variable is a function of, by its graph alone: no length is compared with another.

    These are private: private observed variables and their values, ``pm.Data`` not declared public,
    unnamed arrays (they may be rows of the data), code, and, where the number of rows is private,
    the length of a dim of the records. Other unnamed numbers (an index, the length of an undeclared
    dim) may be statistics of the data: the variable is released when it is named.
    """
    public = set(budget.public)
    observed = private_observed(model, public)
    private = {*observed, *(model.rvs_to_values[rv] for rv in observed)}
    if budget.rows_are_private:
        data = [v for v in model.data_vars if v.name not in public]
        private |= lengths_of_rows(model, dict.fromkeys([*observed, *data], 0))
    # numbers like others, where nobody has said that they are public
    lengths = {length for dim, length in model.dim_lengths.items() if dim not in public}
    declared = public_inputs(model, public) - lengths
    # a free variable is released by the sampler: what is behind it in the graph is only its prior
    stop = {*model.free_RVs, *declared} - private
    if hides_code([variable]) is not None:
        return Provenance.PRIVATE
    found = Provenance.PUBLIC
    seen: set[Variable] = set()
    stack = [variable]
    while stack:
        current = stack.pop()
        if current in seen or current in stop:
            continue
        seen.add(current)
        if current in private:
            return Provenance.PRIVATE
        if current in lengths:
            found = Provenance.CONSTANTS
            if current.owner is None:
                continue
        if is_data(current):
            return Provenance.PRIVATE
        if isinstance(current, Constant):
            numbers = _numbers(current.data)
            if numbers is None:
                return Provenance.PRIVATE
            if numbers:
                found = Provenance.CONSTANTS
        if current.owner is not None:
            stack.extend(current.owner.inputs)
            for inner in (current.owner.op, getattr(current.owner.op, "core_op", None)):
                if isinstance(inner, HasInnerGraph):
                    stack.extend(inner.inner_outputs)
    return found


def _numbers(data: Any) -> list[float] | None:
    """Those of a number, an index or a slice; None for an array of several, or something else."""
    if data is None:
        return []
    if isinstance(data, slice):
        return [x for x in (data.start, data.stop, data.step) if x is not None]
    array = np.asarray(data)
    return array.ravel().tolist() if array.dtype.kind in "biuf" and array.size < 2 else None


def releasable(
    model: Model, budget: PrivacyBudget, var_names: Sequence[str] | None = None
) -> list[str]:
    """Names of what may be released: by default all that is safe, else those asked for."""
    free = [rv.name for rv in model.free_RVs]
    deterministics = {rv.name: rv for rv in model.deterministics}
    if isinstance(var_names, str):
        var_names = [var_names]
    if var_names is None:
        safe = [
            name
            for name, rv in deterministics.items()
            if provenance(model, rv, budget) is Provenance.PUBLIC
        ]
        return [*free, *safe]
    if not var_names:
        raise ValueError("var_names is empty. Name what is to be released, or leave it out.")
    for name in var_names:
        if name in free:
            continue
        if name not in deterministics:
            raise UnsafeRelease(
                f"`{name}` cannot be released: it is neither a free variable nor a Deterministic "
                f"of the model. Free variables are {free}."
            )
        if provenance(model, deterministics[name], budget) is Provenance.PRIVATE:
            raise UnsafeRelease(
                f"`{name}` is a function of private data, of arrays not known to be public, or of "
                "the number of records, as well as of parameters. Compute it from the released "
                "draws and public covariates instead, or pass public arrays as pm.Data and declare "
                "them in PrivacyBudget(public=...)."
            )
    return list(var_names)


def public_coords(dataset: xr.Dataset, public: Iterable[str]) -> xr.Dataset:
    """Coordinates that are not declared public become 0..k-1."""
    public = {"chain", "draw", *public}
    kept = {
        name: (name, np.asarray(dataset.coords[name].values))
        for name in dataset.dims
        if name in public and name in dataset.coords
    }
    numbered = {
        name: (name, np.arange(size)) for name, size in dataset.sizes.items() if name not in kept
    }
    values = {
        name: (variable.dims, np.asarray(variable.values))
        for name, variable in dataset.data_vars.items()
    }
    return xr.Dataset(values, coords={**kept, **numbered})


def private_draws(
    idata: Any, budget: PrivacyBudget
) -> tuple[int, dict[str, Any], xr.Dataset, xr.Dataset]:
    """The plan of a result by id and in full, its draws and its statistics, without frozen draws.
    UnsafeRelease if a private step of this budget did not make them.
    """
    groups = _compat.group_names(idata)
    stats = _compat.group(idata, "sample_stats") if "sample_stats" in groups else xr.Dataset()
    if "posterior" not in groups or "dp_plan_id" not in stats:
        raise UnsafeRelease(
            "These draws carry no dp_plan_id: they were not made by a private step (but by "
            "pm.fit, pm.find_MAP, NUTS, ...) and cannot be released."
        )
    ids = np.unique(stats["dp_plan_id"].values)
    if len(ids) != 1:
        raise UnsafeRelease("The draws come from several plans; release each result by itself.")
    plans = {e.plan: e.payload for e in budget.account.entries() if e.kind == "plan"}
    if ids[0] not in plans:
        raise UnsafeRelease(
            "The draws were made under another budget than that of the model. Pass the model they "
            "were sampled from."
        )
    chains, length = largest_rectangle((~stats["dp_frozen"].values.astype(bool)).sum(axis=1))
    if length == 0:
        raise UnsafeRelease("No draw was made before the budget was used up.")
    where = {"chain": chains, "draw": slice(0, length)}
    draws = _compat.group(idata, "posterior").isel(where)
    return int(ids[0]), plans[int(ids[0])], draws, stats.isel(where)


def vouched(model: Model, budget: PrivacyBudget, names: Sequence[str]) -> list[str]:
    """The variables among `names` whose numbers are public because the user says so."""
    return [
        rv.name
        for rv in model.deterministics
        if rv.name in names and provenance(model, rv, budget) is Provenance.CONSTANTS
    ]


def publish(
    model: Model,
    budget: PrivacyBudget,
    names: Sequence[str],
    statement: Mapping[str, Any],
    **groups: xr.Dataset,
) -> Any:
    """A new result of `groups`, with the variables `names`, the public statistics, a statement.

    UnsafeRelease if one of `names` may not be released.
    """
    names = releasable(model, budget, names)
    kept = {"posterior": names, "posterior_raw": names, "sample_stats": PUBLIC_STATS}
    return _compat.inference_data(
        {
            group: public_coords(
                dataset[[name for name in kept[group] if name in dataset]], budget.public
            )
            for group, dataset in groups.items()
        },
        {
            STATEMENT: json.dumps(statement),
            "inference_library": "pymc",
            "inference_library_version": pm.__version__,
        },
    )
