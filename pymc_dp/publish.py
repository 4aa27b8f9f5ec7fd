"""Publication: what may leave, and the statement that goes with it.

A result of ``pm.sample`` holds the observed data, coordinates with names, deterministics that are
functions of records.  :func:`release` builds a new object from a whitelist; nothing is copied that
is not on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.type import TensorType

from pymc_dp import _compat, noise
from pymc_dp.accounting import epsilon_from_mu, mu_from_units
from pymc_dp.budget import PrivacyBudget, get_budget
from pymc_dp.errors import LedgerError, UnsafeRelease
from pymc_dp.events import MU2_UNIT
from pymc_dp.records import private_observed, public_inputs
from pymc_dp.rows.lift import ancestors_without_shapes

__all__ = ["privacy_statement", "release", "released", "touches_private_data"]

STATEMENT = "pymc_dp_statement"
#: Sampler statistics that are functions of released values and public settings.
PUBLIC_STATS = ("dp_accepted", "dp_epsilon", "dp_plan_id")


# -- what may leave -------------------------------------------------------------------------------


def _row_counts(model: Model, public: Iterable[str]) -> set[int]:
    """Lengths of the private observed variables."""
    return {
        int(np.shape(_data(source))[0])
        for rv in private_observed(model, public)
        for source in ancestors_without_shapes([model.rvs_to_values[rv]])
        if isinstance(source, Constant | SharedVariable) and np.ndim(_data(source)) > 0
    }


def _data(source: Any) -> Any:
    return source.get_value(borrow=True) if isinstance(source, SharedVariable) else source.data


def touches_private_data(model: Model, variable: Variable, public: Iterable[str]) -> bool:
    """True unless `variable` is shown, by its graph, to be a function of public things alone.

    Private are: private observed variables and their values, ``pm.Data`` not declared public, and
    arrays with one entry per record.
    """
    public = set(public)
    private = {*private_observed(model, public)}
    private |= {model.rvs_to_values[rv] for rv in private}
    rows = _row_counts(model, public)
    declared = {
        variable
        for variable in public_inputs(model, public)
        if variable not in model.dim_lengths.values() or int(variable.eval()) not in rows
    }
    # a free variable is released by the sampler: what is behind it in the graph is only its prior
    stop = set(model.free_RVs)
    seen: set[Variable] = set()
    stack = [variable]
    while stack:
        current = stack.pop()
        if current in seen or current in stop or current in declared:
            continue
        seen.add(current)
        if current in private:
            return True
        if isinstance(current, SharedVariable) and isinstance(current.type, TensorType):
            return True
        if isinstance(current, Constant) and rows & set(np.shape(current.data)):
            return True
        if current.owner is not None:
            stack.extend(current.owner.inputs)
    return False


def _names(model: Model, budget: PrivacyBudget, var_names: Sequence[str] | None) -> list[str]:
    free = [rv.name for rv in model.free_RVs]
    deterministics = {rv.name: rv for rv in model.deterministics}
    if var_names is None:
        safe = [
            name
            for name, rv in deterministics.items()
            if not touches_private_data(model, rv, budget.public)
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
        if touches_private_data(model, deterministics[name], budget.public):
            raise UnsafeRelease(
                f"`{name}` is a function of private data as well as of parameters. Compute it "
                "from the released draws and public covariates instead."
            )
    return list(var_names)


def _kept(frozen: np.ndarray) -> tuple[np.ndarray, int]:
    """Chains and length of the largest rectangle of draws that are not frozen."""
    lengths = (~frozen).sum(axis=1)
    best = max(range(len(lengths)), key=lambda c: lengths[c] * (lengths >= lengths[c]).sum())
    length = int(lengths[best])
    return np.flatnonzero(lengths >= length), length


def _public_coords(dataset: xr.Dataset, public: Iterable[str]) -> xr.Dataset:
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
        they are functions of parameters and public constants alone.

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
    names = _names(model, budget, var_names)
    posterior = _compat.group(idata, "posterior")
    missing = [name for name in names if name not in posterior]
    if missing and var_names is not None:
        raise UnsafeRelease(f"{missing} were not sampled: see `var_names` of pm.sample.")
    names = [name for name in names if name in posterior]
    where = {"chain": chains, "draw": slice(0, length)}
    statement = _statement(model, budget, plan_id, plan)
    return _compat.inference_data(
        {
            "posterior": _public_coords(posterior[names].isel(where), budget.public),
            "sample_stats": _public_coords(
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
    model: Model, budget: PrivacyBudget, plan_id: int, plan: dict[str, Any]
) -> dict[str, Any]:
    from pymc_dp import __version__

    ledger = budget.ledger
    info = ledger.account_info(budget.account)
    secure = plan["settings"].get("secure", False) and not noise.is_insecure()
    statement: dict[str, Any] = {
        "privacy_guarantee": "(epsilon, delta)-differential privacy" if secure else "none",
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "gdp_mu": mu_from_units(info.cap),
        "neighboring": budget.neighboring,
        "privacy_unit": budget.unit,
        "n_units": budget.n_units if budget.neighboring == "replace_one" else None,
        "dataset": budget.dataset,
        "public": list(budget.public),
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
        }
    return statement


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
    if facts["ledger"] == "temporary":
        lines.append(
            "The ledger was temporary: releases from the same data in other sessions are not "
            "counted here and add to the loss."
        )
    if "ledger_total" in facts:
        total = facts["ledger_total"]
        lines.append(
            "Everything that the budgets on this ledger may release, together: epsilon = "
            f"{total['epsilon']:.4g} at the same delta."
        )
    lines += [
        f"Ledger head {facts['ledger_head'][:16]}; pymc_dp {facts['pymc_dp_version']}.",
        "It is assumed that model, priors, bounds and settings were chosen without looking at the "
        "private data. The posterior is exact only if no contribution to an accept test was "
        "clipped.",
    ]
    return lines
