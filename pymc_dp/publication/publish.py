"""Publication: what may leave.

A result of ``pm.sample`` holds the observed data, coordinates with names, deterministics that are
functions of records.  :func:`release` builds a new object from a whitelist; nothing is copied that
is not on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pymc as pm
import xarray as xr
from pymc.model import Model
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import HasInnerGraph

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import warn
from pymc_dp.budget import PrivacyBudget, get_budget, model_of
from pymc_dp.errors import UnsafeRelease
from pymc_dp.publication.correction import account_for_noise, in_words
from pymc_dp.publication.results import PaidDraws, largest_rectangle
from pymc_dp.publication.statement import FAR, STATEMENT, make_statement, refuse_other_types
from pymc_dp.records.ancestry import hides_code, is_data
from pymc_dp.records.units import lengths_of_rows, private_observed, public_inputs

#: Acceptance below which draws are no sample.
_HARDLY_MOVED = 0.05
#: Draws that `pymc_dp.sample` has made and not released, the newest last.
_UNRELEASED: WeakKeyDictionary[Model, list[PaidDraws]] = WeakKeyDictionary()
#: Groups of what is released.
_RELEASED = {"posterior", "posterior_raw", "sample_stats"}
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
    the length of a dim of the records.  Other unnamed numbers, such as an index or the length of a
    dim that is not declared public, cannot be told from a statistic of the data: the variable is
    released when it is named.
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
    """Names of what may be released: by default all that is safe, else those asked for.

    UnsafeRelease if one of `var_names` may not be released; ValueError if it is empty.
    """
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


def keep_unreleased(model: Model, paid: PaidDraws) -> None:
    """Keep draws of `pymc_dp.sample`, and their model, until they are released."""
    _UNRELEASED.setdefault(model, []).append(paid)


def forget_unreleased(model: Model, paid: PaidDraws) -> None:
    """Drop draws that were released, or cannot be."""
    kept = [other for other in _UNRELEASED.pop(model, []) if other is not paid]
    if kept:
        _UNRELEASED[model] = kept


def release(
    idata: Any = None,
    model: Model | None = None,
    *,
    var_names: Sequence[str] | None = None,
    progressbar: bool = True,
) -> Any:
    """What may be published of a private run.

    Parameters
    ----------
    idata : arviz.InferenceData or xarray.DataTree
        What ``pm.sample`` returned with a private step.  Default: the draws of a ``dp.sample`` that
        was interrupted, or failed, when they had been made; the newest of them.
    model : pymc.Model, optional
        Default: the model of the context.
    var_names : sequence of str, optional
        Which variables; default: all free variables, and the Deterministics whose graph shows that
        they are functions of parameters and declared public data alone.  A Deterministic with
        numbers or indices in its formula is released only when it is named here: a number cannot
        be told from a statistic of the data, and naming it says that it is none.
    progressbar : bool, default True
        Of an anchored run whose prior is not normal over the draws: see
        ``pymc_dp.publication.noise_aware.noise_aware``.

    Returns
    -------
    arviz.InferenceData (PyMC 5) or xarray.DataTree (PyMC 6)
        A new object with groups ``posterior`` and ``sample_stats`` and the privacy statement in
        its attributes.  Frozen draws are dropped; coordinates of dims that were not declared
        public are 0..k-1.  A result that was released before is returned as it is.

        Of an anchored run, ``posterior`` holds noise-aware draws
        (``pymc_dp.publication.noise_aware``), and ``posterior_raw`` the draws of the chains,
        on which effective sample sizes and R-hat are to be computed.

    Raises
    ------
    UnsafeRelease
        If the draws do not come from a private step of this model, or something else is asked
        for.
    """
    if idata is None:
        model = model_of(model)
        if model not in _UNRELEASED:
            raise UnsafeRelease("Nothing was kept of this model; give what pm.sample returned.")
        paid = _UNRELEASED[model][-1]
        result = release(paid.result(), model, var_names=var_names, progressbar=progressbar)
        forget_unreleased(model, paid)
        return result
    refuse_other_types(idata)
    groups = _compat.group_names(idata)
    if STATEMENT in _compat.attributes(idata) and _RELEASED.issuperset(groups):
        return idata
    model = model_of(model)
    budget = get_budget(model)
    if budget is None:
        raise UnsafeRelease(
            "The model has no PrivacyBudget, so nothing is known about the privacy of this result."
        )
    budget.check_model(model)
    stats = _compat.group(idata, "sample_stats") if "sample_stats" in groups else xr.Dataset()
    if "posterior" not in groups or "dp_plan_id" not in stats:
        raise UnsafeRelease(
            "These draws carry no dp_plan_id: they were not made by a private step (but by "
            "pm.fit, pm.find_MAP, NUTS, ...) and cannot be released."
        )
    plan_id, plan = _plan_of(stats, budget)
    chains, length = largest_rectangle((~stats["dp_frozen"].values.astype(bool)).sum(axis=1))
    if length == 0:
        raise UnsafeRelease("No draw was made before the budget was used up.")
    names = releasable(model, budget, var_names)
    posterior = _compat.group(idata, "posterior")
    missing = [name for name in names if name not in posterior]
    if missing and var_names is not None:
        raise UnsafeRelease(f"{missing} were not sampled: see `var_names` of pm.sample.")
    names = [name for name in names if name in posterior]
    where = {"chain": chains, "draw": slice(0, length)}
    vouched = [
        rv.name
        for rv in model.deterministics
        if rv.name in names and provenance(model, rv, budget) is Provenance.CONSTANTS
    ]
    posterior = posterior.isel(where)
    accepted = float(stats["dp_accepted"].isel(where).mean("draw").min())
    if accepted < _HARDLY_MOVED:
        warn(
            f"Only {accepted:.1%} of the proposals of a chain were accepted: it hardly moved, and "
            "its draws do not represent the posterior. Another form, more records or a larger "
            "budget would help."
        )
    published = {
        "posterior": posterior[names],
        "sample_stats": stats[[name for name in PUBLIC_STATS if name in stats]].isel(where),
    }
    correction = None
    if "anchor" in plan["settings"]:
        published["posterior_raw"] = posterior[names]
        published["posterior"], correction = account_for_noise(
            model, budget, plan["settings"], posterior, names, plan_id, progressbar
        )
        clipped = plan["settings"]["anchor"].get("clipped")  # not of plans of earlier versions
        correction["sentences"] = [in_words(correction), *([clipped] if clipped else [])]
        if "unreliable" in correction:
            warn(f"These draws are unreliable: {correction['unreliable']}.")
        elif correction["method"] == "none":
            warn(
                "The privacy noise in these draws is not accounted for, because "
                f"{correction['reason']}: intervals are too narrow. Longer chains of all free "
                "variables, or form='quadratic', would mend that."
            )
    statement = make_statement(budget, plan_id, plan, vouched, correction)
    far = plan["settings"].get("far")
    if far is not None:
        statement["far"] = far
        if far > FAR:
            warn(
                f"{far:.0%} of the draws lie far from where the likelihood was "
                "approximated: the posterior is not near normal, and these draws are unreliable. "
                "A centred hierarchy instead of a non-centred one (or the reverse), a larger "
                "budget, or form='plain' may help."
            )
    return _compat.inference_data(
        {name: public_coords(dataset, budget.public) for name, dataset in published.items()},
        {
            STATEMENT: json.dumps(statement),
            "inference_library": "pymc",
            "inference_library_version": pm.__version__,
        },
    )


def _plan_of(stats: xr.Dataset, budget: PrivacyBudget) -> tuple[int, dict[str, Any]]:
    ids = np.unique(stats["dp_plan_id"].values)
    if len(ids) != 1:
        raise UnsafeRelease("The draws come from several plans; release each result by itself.")
    plans = {e.plan: e.payload for e in budget.account.entries() if e.kind == "plan"}
    if ids[0] not in plans:
        raise UnsafeRelease(
            "The draws were made under another budget than that of the model. Pass the model they "
            "were sampled from."
        )
    return int(ids[0]), plans[int(ids[0])]
