"""Publication: what may leave, and the statement that goes with it.

A result of ``pm.sample`` holds the observed data, coordinates with names, deterministics that are
functions of records.  :func:`release` builds a new object from a whitelist; nothing is copied that
is not on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import HasInnerGraph
from pytensor.tensor.type import TensorType

from pymc_dp import _compat, noise
from pymc_dp.accounting import epsilon_from_mu, mu_from_units
from pymc_dp.budget import PrivacyBudget, get_budget
from pymc_dp.errors import LedgerError, UnsafeRelease
from pymc_dp.events import MU2_UNIT
from pymc_dp.ledger import Ledger
from pymc_dp.records import private_observed, public_inputs
from pymc_dp.rows.ancestry import array_of

__all__ = [
    "Provenance",
    "privacy_statement",
    "provenance",
    "public_coords",
    "releasable",
    "release",
    "released",
]

STATEMENT = "pymc_dp_statement"
#: Sampler statistics that are functions of released values and public settings.
PUBLIC_STATS = ("dp_accepted", "dp_epsilon", "dp_plan_id")


# -- what may leave -------------------------------------------------------------------------------


class Provenance(Enum):
    """Where the value of a variable comes from, as far as its graph shows."""

    PUBLIC = "parameters and public variables alone"
    CONSTANTS = "parameters, public variables and unnamed numbers"
    PRIVATE = "private data, or arrays that may be private"


def provenance(model: Model, variable: Variable, budget: PrivacyBudget) -> Provenance:
    """What a variable is a function of.

    Private are: private observed variables and their values, ``pm.Data`` not declared public,
    unnamed arrays (they may be rows of the data), and, where the number of units is private, any
    number equal to it.  A single unnamed number can not be told from a statistic of the data.
    """
    public = set(budget.public)
    private = {*private_observed(model, public)}
    private |= {model.rvs_to_values[rv] for rv in private}
    rows = set(budget.row_counts.values())
    secret = () if budget.neighboring == "replace_one" else (*rows, budget.n_units)
    lengths = {v for v in model.dim_lengths.values() if int(array_of(v)) in rows}
    declared = public_inputs(model, public) - lengths
    # a free variable is released by the sampler: what is behind it in the graph is only its prior
    stop = set(model.free_RVs)
    found = Provenance.PUBLIC
    seen: set[Variable] = set()
    stack = [variable]
    while stack:
        current = stack.pop()
        if current in seen or current in stop or current in declared:
            continue
        seen.add(current)
        if current in private:
            return Provenance.PRIVATE
        if isinstance(current, SharedVariable) and isinstance(current.type, TensorType):
            return Provenance.PRIVATE
        if isinstance(current, Constant) and isinstance(current.type, TensorType):
            if current.data.size > 1 or np.isin(current.data, secret).any():
                return Provenance.PRIVATE
            found = Provenance.CONSTANTS
        if current.owner is not None:
            stack.extend(current.owner.inputs)
            for inner in (current.owner.op, getattr(current.owner.op, "core_op", None)):
                if isinstance(inner, HasInnerGraph):
                    stack.extend(inner.inner_outputs)
    return found


def releasable(
    model: Model, budget: PrivacyBudget, var_names: Sequence[str] | None = None
) -> list[str]:
    """Names of what may be released: by default all that is safe, else those asked for.

    Raises
    ------
    UnsafeRelease
        If one of `var_names` may not be released.
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
    for name in var_names:
        if name in free:
            continue
        if name not in deterministics:
            raise UnsafeRelease(
                f"`{name}` can not be released: it is neither a free variable nor a Deterministic "
                f"of the model. Free variables are {free}."
            )
        if provenance(model, deterministics[name], budget) is Provenance.PRIVATE:
            raise UnsafeRelease(
                f"`{name}` is a function of private data, or of arrays not known to be public, as "
                "well as of parameters. Compute it from the released draws and public covariates "
                "instead, or pass public arrays as pm.Data and declare them in "
                "PrivacyBudget(public=...)."
            )
    return list(var_names)


def _refuse_other_types(idata: Any) -> None:
    if not _compat.is_result(idata):
        raise UnsafeRelease(
            f"A {type(idata).__name__} is not a result of sampling and can not be released. "
            "Results of pm.sample with a private step can; pm.find_MAP, pm.fit and the like use "
            "the records without privacy."
        )


def _kept(frozen: np.ndarray) -> tuple[np.ndarray, int]:
    """Chains and length of the largest rectangle of draws that are not frozen."""
    lengths = (~frozen).sum(axis=1)
    best = max(range(len(lengths)), key=lambda c: lengths[c] * (lengths >= lengths[c]).sum())
    length = int(lengths[best])
    return np.flatnonzero(lengths >= length), length


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


def released(idata: Any) -> bool:
    """True for a result that :func:`release` has made."""
    return STATEMENT in _compat.attributes(idata) and set(_compat.group_names(idata)) <= {
        "posterior",
        "posterior_raw",
        "sample_stats",
    }


def release(
    idata: Any, model: Model | None = None, *, var_names: Sequence[str] | None = None
) -> Any:
    """What may be published of a private run.

    Parameters
    ----------
    idata : arviz.InferenceData or xarray.DataTree
        What ``pm.sample`` returned with a private step.
    model : pymc.Model, optional
        Default: the model of the context.
    var_names : sequence of str, optional
        Which variables; default: all free variables, and the Deterministics whose graph shows that
        they are functions of parameters and declared public data alone.  A Deterministic with
        numbers in its formula is released only when it is named here: a number can not be told
        from a statistic of the data, and naming it says that it is none.

    Returns
    -------
    arviz.InferenceData (PyMC 5) or xarray.DataTree (PyMC 6)
        A new object with groups ``posterior`` and ``sample_stats`` and the privacy statement in
        its attributes.  Frozen draws are dropped; coordinates of dims that were not declared
        public are 0..k-1.  A result that was released before is returned as it is.

    Raises
    ------
    UnsafeRelease
        If the draws do not come from a private step of this model, or something else is asked
        for.
    """
    _refuse_other_types(idata)
    if released(idata):
        return idata
    model = pm.modelcontext(model)
    budget = get_budget(model)
    if budget is None:
        raise UnsafeRelease(
            "The model has no PrivacyBudget, so nothing is known about the privacy of this result."
        )
    budget.check_model(model)
    groups = _compat.group_names(idata)
    stats = _compat.group(idata, "sample_stats") if "sample_stats" in groups else xr.Dataset()
    if "posterior" not in groups or "dp_plan_id" not in stats:
        raise UnsafeRelease(
            "These draws carry no dp_plan_id: they were not made by a private step (but by "
            "pm.fit, pm.find_MAP, NUTS, ...) and can not be released."
        )
    plan_id, plan = _plan_of(stats, budget)
    chains, length = _kept(stats["dp_frozen"].values.astype(bool))
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
    statement = _statement(budget, plan_id, plan, vouched)
    return _compat.inference_data(
        {
            "posterior": public_coords(posterior[names].isel(where), budget.public),
            "sample_stats": public_coords(
                stats[[name for name in PUBLIC_STATS if name in stats]].isel(where), budget.public
            ),
        },
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
    try:
        return int(ids[0]), budget.ledger.plan(budget.account, int(ids[0]))
    except LedgerError:
        raise UnsafeRelease(
            "The draws were made under another budget than that of the model. Pass the model they "
            "were sampled from."
        ) from None


# -- the statement --------------------------------------------------------------------------------


def _statement(
    budget: PrivacyBudget, plan_id: int, plan: dict[str, Any], vouched: list[str]
) -> dict[str, Any]:
    from pymc_dp import __version__

    ledger = budget.ledger
    info = ledger.account_info(budget.account)
    secure = plan["settings"].get("secure", False) and not noise.is_insecure()
    statement: dict[str, Any] = {
        "privacy_guarantee": "(epsilon, delta)-differential privacy" if secure else "none",
        "epsilon": info.epsilon,
        "delta": info.delta,
        "gdp_mu": mu_from_units(info.cap),
        "neighboring": info.neighboring,
        "privacy_unit": info.unit,
        "n_units": budget.n_units if info.neighboring == "replace_one" else None,
        "dataset": info.public["dataset"],
        "public": info.public["public"],
        "taken_as_public": vouched,
        "spent": {"epsilon": budget.epsilon_of(info.spent), "gdp_mu2": info.spent / MU2_UNIT},
        "plan_id": plan_id,
        "sampler": plan["sampler"],
        "draws": plan["draws"],
        "tune": plan["tune"],
        "chains": plan["chains"],
        "mechanisms": {
            name: {
                "noise_multiplier": event["noise_multiplier"],
                "per_iteration": plan["per_iteration"].get(name, 0),
                "at_start": plan["at_start"].get(name, 0),
            }
            for name, event in plan["events"].items()
        },
        "settings": {
            key: value
            for key, value in plan["settings"].items()
            if key not in ("scaling", "secure") and value is not None
        },
        "ledger": "temporary" if ledger.is_temporary else "persistent",
        "ledger_head": ledger.head(),
        "pymc_dp_version": __version__,
    }
    reserved = ledger.total_reserved()
    if not ledger.is_temporary or reserved > info.cap:
        statement["ledger_total"] = {
            "gdp_mu2": reserved / MU2_UNIT,
            "epsilon": epsilon_from_mu(mu_from_units(reserved), budget.delta),
            "dataset": ledger.dataset,
            "public": _declared_public(ledger),
        }
    return statement


def _declared_public(ledger: Ledger) -> list[str]:
    """Everything that some budget on a ledger declared public."""
    names: set[str] = set()
    for entry in ledger.entries():
        if entry.kind == "account":
            names.update(entry.payload["public"]["public"])
    return sorted(names)


def privacy_statement(idata: Any) -> str:
    """The privacy statement of a released result, in words.

    Parameters
    ----------
    idata : arviz.InferenceData or xarray.DataTree
        From :func:`release` or :func:`pymc_dp.sample`, or read back from a netCDF file.

    Returns
    -------
    str
        The same facts are in ``idata.attrs["pymc_dp_statement"]`` as JSON.

    Raises
    ------
    UnsafeRelease
        If the result was not released.
    """
    _refuse_other_types(idata)
    attrs = _compat.attributes(idata)
    if STATEMENT not in attrs:
        raise UnsafeRelease(
            "This result carries no privacy statement. Make one with dp.release(idata, model)."
        )
    facts = json.loads(attrs[STATEMENT])
    return "\n".join(_sentences(facts))


def _sentences(facts: dict[str, Any]) -> list[str]:
    if facts["privacy_guarantee"] == "none":
        return [
            "NO PRIVACY GUARANTEE. These draws were made with insecure test noise. Do not publish."
        ]
    unit = facts["privacy_unit"]
    relation = (
        f"one {unit} is replaced by any other"
        if facts["neighboring"] == "replace_one"
        else f"one {unit} is added or removed"
    )
    size = f" of {facts['n_units']:,} {unit}s" if facts["n_units"] else ""
    data = f' "{facts["dataset"]}"' if facts["dataset"] else ""
    lines = [
        f"These posterior draws are ({facts['epsilon']:g}, {facts['delta']:g})-differentially "
        f"private with respect to the data{data}: the probability of any outcome changes by a "
        f"factor of at most e^{facts['epsilon']:g}, up to {facts['delta']:g}, when {relation}"
        f"{size and ','}{size and ' in a data set' + size}.",
        f"Equivalently {facts['gdp_mu']:.4g}-Gaussian differential privacy (the guarantee holds at "
        f"every delta). Charged so far: epsilon = {facts['spent']['epsilon']:.4g}.",
        f"Sampler: {facts['sampler']}, {facts['chains']} chains of {facts['draws']} draws after "
        f"{facts['tune']} tuning iterations.",
    ]
    for name, mechanism in facts["mechanisms"].items():
        lines.append(
            f"  {name}: Gaussian noise, multiplier {mechanism['noise_multiplier']:.4g}, "
            f"{mechanism['per_iteration']} per iteration"
            + (f", {mechanism['at_start']} at the start" if mechanism["at_start"] else "")
            + "."
        )
    if facts["public"]:
        lines.append(f"Declared public, and not protected: {', '.join(facts['public'])}.")
    if facts["taken_as_public"]:
        lines.append(
            f"The numbers in the formulas of {', '.join(facts['taken_as_public'])} were taken as "
            "public."
        )
    if facts["ledger"] == "temporary":
        lines.append(
            "The ledger was temporary: releases from the same data under other ledgers, in this "
            "session or in others, are not counted here and add to the loss."
        )
    if "ledger_total" in facts:
        total = facts["ledger_total"]
        lines.append(
            "Everything that the budgets on this ledger so far may release, together: epsilon = "
            f"{total['epsilon']:.4g} at the same delta"
            + (f", {', '.join(total['public'])} being public." if total["public"] else ".")
        )
    lines += [
        f"Ledger head {facts['ledger_head'][:16]}; pymc_dp {facts['pymc_dp_version']}.",
        "It is assumed that model, priors, bounds and settings were chosen without looking at the "
        "private data. Whether the posterior is exact depends on clipping, which is not reported: "
        "it is if the bounds given to the sampler hold for every record.",
    ]
    return lines
