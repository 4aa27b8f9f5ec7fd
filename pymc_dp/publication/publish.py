"""Publication: what may leave, with the statement of what was promised.

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
from pymc_dp.base.checks import counted
from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import PrivacyError, UnsafeRelease
from pymc_dp.privacy import noise
from pymc_dp.privacy.account import STATISTIC
from pymc_dp.privacy.accounting import (
    MU2_UNIT,
    SubsampledGaussianEvent,
    batch_event,
    epsilon_from_mu,
    mu_from_units,
)
from pymc_dp.publication.results import largest_rectangle
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
    """What a variable is a function of, by its graph alone."""
    if hides_code([variable]) is not None:
        return Provenance.PRIVATE
    private, numbers = private_inputs(model, [variable], budget)
    if private:
        return Provenance.PRIVATE
    return Provenance.CONSTANTS if numbers else Provenance.PUBLIC


def private_inputs(
    model: Model, variables: Iterable[Variable], budget: PrivacyBudget, known: Iterable = ()
) -> tuple[list[Variable], bool]:
    """What is private among that of which variables are functions, and whether they hold numbers.

    These are private: private observed variables and their values, ``pm.Data`` not declared public,
    unnamed arrays (they may be rows of the data), and, where the number of rows is private, the
    length of a dim of the records; no length is compared with another. Other unnamed numbers (an
    index, the length of an undeclared dim) may be statistics of the data: a variable with some is
    released when it is named. `known` are further variables that are public.
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
    stop = {*model.free_RVs, *declared, *known} - private
    found: list[Variable] = []
    numbers = False
    seen: set[Variable] = set()
    stack = list(variables)
    while stack:
        current = stack.pop()
        if current in seen or current in stop:
            continue
        seen.add(current)
        length = current in lengths
        held = _numbers(current.data) if isinstance(current, Constant) and not length else []
        if current in private or held is None or (is_data(current) and not length):
            found.append(current)
            continue
        numbers = numbers or length or bool(held)
        if current.owner is not None:
            stack.extend(current.owner.inputs)
            op = current.owner.op
            for inner in (op, *(getattr(op, name, None) for name in ("core_op", "scalar_op"))):
                if isinstance(inner, HasInnerGraph):
                    stack.extend(inner.inner_outputs)
    return found, numbers


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
                "the number of records, as well as of parameters. Compute it at public covariates "
                "instead, with dp.predict and the released draws, or pass public arrays as pm.Data "
                "and declare them in PrivacyBudget(public=...)."
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
    plan = plan_of(int(ids[0]), budget)
    chains, length = largest_rectangle((~stats["dp_frozen"].values.astype(bool)).sum(axis=1))
    if length == 0:
        raise UnsafeRelease("No draw was made before the budget was used up.")
    where = {"chain": chains, "draw": slice(0, length)}
    draws = _compat.group(idata, "posterior").isel(where)
    return int(ids[0]), plan, draws, stats.isel(where)


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


# -- the statement --------------------------------------------------------------------------------


#: The attribute of a result that holds its statement.
STATEMENT = "pymc_dp_statement"
#: Part of the draws that may lie where the likelihood was not looked at.
FAR = 0.1
#: Settings that are long arrays, or stated otherwise.
_UNSTATED = ("anchor", "likelihood", "location", "scaling", "secure", "sentences")
_EARLIER = [
    "An earlier version planned these draws: only that version can say how far they are exact."
]


def refuse_other_types(idata: Any) -> None:
    """Refuse what is no result of sampling, with UnsafeRelease."""
    if not _compat.is_result(idata):
        raise UnsafeRelease(
            f"A {type(idata).__name__} is not a result of sampling and cannot be released. "
            "Results of pm.sample with a private step can; pm.find_MAP, pm.fit and the like use "
            "the records without privacy."
        )


def make_statement(
    budget: PrivacyBudget,
    plan_id: int,
    plan: dict[str, Any],
    vouched: list[str],
    correction: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The facts that go with a release, machine-readable; promises are read from the ledger. `plan`
    is the payload there. `vouched` are released Deterministics whose formulas hold numbers that
    were taken as public. `correction` says how the noise of an anchored run was accounted for.
    """
    from pymc_dp import __version__

    ledger = budget.ledger
    info = budget.account.read()
    secure = plan["settings"].get("secure", False) and not noise.is_insecure()
    batches, entries = budget.batches(), list(ledger.entries())
    mine = [e for e in entries if e.account == budget.account.number]
    # whether a chain was begun of the run that makes the releases on batches
    on_batches = {e.plan for e in mine if e.kind == "run" and e.payload.get("batches")}
    made = any(e.kind == "chain" and e.plan in on_batches for e in mine)
    statistics = {
        e.plan for e in mine if e.kind == "plan" and e.payload.get("sampler") == STATISTIC
    }
    one_off = [e.amount for e in mine if e.kind == "charge" and e.plan not in statistics]
    statement: dict[str, Any] = {
        "privacy_guarantee": "(epsilon, delta)-differential privacy" if secure else "none",
        "epsilon": info.epsilon,
        "delta": info.delta,
        # releases on batches are accounted at the budget's own delta
        "gdp_mu": None if batches else mu_from_units(info.cap),
        "batches": batches and {**batches, "made": made},
        "neighboring": info.neighboring,
        "privacy_unit": info.unit,
        "n_units": budget.n_units if info.neighboring == "replace_one" else None,
        "dataset": info.public["dataset"] or ledger.dataset,
        "public": info.public["public"],
        "bounds": info.public["bounds"],
        "taken_as_public": vouched,
        "spent": {"epsilon": budget.account.spent().epsilon, "gdp_mu2": info.spent / MU2_UNIT},
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
            if key not in _UNSTATED and value is not None
        },
        "draws_are": plan["settings"].get("sentences", _EARLIER),
        "preparation": {
            "releases": len(one_off),
            "gdp_mu2": sum(one_off) / MU2_UNIT,
            "budget_mu2": info.cap / MU2_UNIT,
        },
        "ledger": "temporary" if ledger.is_temporary else "persistent",
        "ledger_head": ledger.head(),
        "pymc_dp_version": __version__,
    }
    if correction is not None:
        statement["noise_aware"] = correction
    if budget.records is not None:
        statement |= budget.records.stated()
    if "owners" in statement:  # they have ledgers of their own
        return statement
    reserved = ledger.total_reserved()
    if not ledger.is_temporary or reserved > info.cap:
        statement["ledger_total"] = {
            "gdp_mu2": reserved / MU2_UNIT,
            # with batches there is no other account, and no figure but the budget's own
            "epsilon": info.epsilon
            if batches
            else epsilon_from_mu(mu_from_units(reserved), budget.delta),
            "dataset": ledger.dataset,
            "public": sorted(
                {
                    name
                    for entry in entries
                    if entry.kind == "account"
                    for name in entry.payload["public"].get("public", [])
                }
            ),
        }
    return statement


def privacy_statement(idata: Any) -> str:
    """The privacy statement of a released result, in words.

    Parameters
    ----------
    idata : arviz.InferenceData, xarray.DataTree or xarray.Dataset
        From :func:`release`, :func:`pymc_dp.sample`, :func:`pymc_dp.laplace` or
        :func:`pymc_dp.find_MAP`, or read back from a netCDF file.

    Returns
    -------
    str
        The same facts as numbers: :func:`statement_facts`.

    Raises
    ------
    UnsafeRelease
        If the result was not released.
    """
    return "\n".join(_sentences(statement_facts(idata)))


def statement_facts(idata: Any) -> dict[str, Any]:
    """The privacy statement of a released result, as data.

    Parameters
    ----------
    idata : arviz.InferenceData, xarray.DataTree or xarray.Dataset
        As for :func:`privacy_statement`.

    Returns
    -------
    dict
        What ``idata.attrs["pymc_dp_statement"]`` holds as JSON. Among it ``epsilon``, ``delta``,
        ``gdp_mu``, ``neighboring``, ``privacy_unit``, ``n_units`` (None where it is private) and
        ``dataset``; ``spent``, ``preparation`` and ``mechanisms``; ``sampler``, ``settings`` and
        planned ``chains`` and ``draws`` (``kept`` are both where there are fewer);
        ``ledger_head``. The promises of several owners are in a list, ``owners``; the figures of
        the whole are then the largest of them.

    Raises
    ------
    UnsafeRelease
        If the result was not released.
    """
    if isinstance(idata, xr.Dataset):
        attrs = idata.attrs
    else:
        refuse_other_types(idata)
        attrs = _compat.attributes(idata)
    if STATEMENT not in attrs:
        raise UnsafeRelease(
            "This result carries no privacy statement. Make one with dp.release(idata, model)."
        )
    facts: dict[str, Any] = json.loads(attrs[STATEMENT])
    return facts


def released_draws(idata: Any) -> tuple[dict[str, Any], xr.Dataset]:
    """The facts and the posterior of a released result; refuse what is none, and parts of one."""
    attrs = _compat.attributes(idata) if _compat.is_result(idata) else {}
    if STATEMENT not in attrs or "posterior" not in _compat.group_names(idata):
        raise UnsafeRelease(
            "Release the draws first: released = dp.release(idata, model). Give the whole result, "
            "not one of its groups."
        )
    return json.loads(attrs[STATEMENT]), _compat.group(idata, "posterior")


def plan_of(plan_id: int, budget: PrivacyBudget) -> dict[str, Any]:
    """The plan of a result; UnsafeRelease if it is none of this budget."""
    try:
        return budget.account.plan(plan_id)
    except PrivacyError:
        raise UnsafeRelease(
            "The draws were made under another budget than that of the model. Give the model that "
            "they were sampled from."
        ) from None


def _sentences(facts: dict[str, Any]) -> list[str]:
    """The statement; text that not every result needs stands beside the fact that asks for it."""
    if facts["privacy_guarantee"] == "none":
        return [
            "NO PRIVACY GUARANTEE. These draws were made with insecure test noise. Do not publish."
        ]
    names = {key: ", ".join(facts[key]) for key in ("public", "taken_as_public")}
    total = facts.get("ledger_total", {"epsilon": 0.0, "public": []})
    besides = f", {', '.join(total['public'])} being public" if total["public"] else ""
    far = facts.get("far", 0.0)
    caveats: list[tuple[Any, list[str] | str]] = [
        (
            far > FAR,
            f"UNRELIABLE: {far:.0%} of the draws lie far from where the likelihood was "
            "approximated; the posterior is not near normal, and this form cannot describe it.",
        ),
        (True, facts.get("noise_aware", {}).get("sentences", [])),
        (facts["public"], f"Declared public, and not protected: {names['public']}."),
        (True, _clamped(facts["bounds"])),
        (
            facts["taken_as_public"],
            f"The numbers in the formulas of {names['taken_as_public']} were taken as public.",
        ),
        (
            facts["ledger"] == "temporary",
            "The ledger was temporary: releases from the same data under other ledgers, in this "
            "session or in others, are not counted here and add to the loss.",
        ),
        (
            "ledger_total" in facts,
            "Everything that the budgets on this ledger so far may release, together: epsilon = "
            f"{total['epsilon']:.4g} at the same delta{besides}.",
        ),
        (True, facts.get("draws_are", _EARLIER)),
        (True, f"Ledger head {facts['ledger_head'][:16]}; pymc_dp {facts['pymc_dp_version']}."),
        (
            True,
            "It is assumed that model, priors, bounds and settings were chosen without looking at "
            "the private data.",
        ),
    ]
    lines = [*_promise(facts), *_releases(facts)]
    for holds, text in caveats:
        if holds:
            lines += [text] if isinstance(text, str) else text
    return lines


def _promise(facts: dict[str, Any]) -> list[str]:
    """The guarantee, and the method."""
    planned = facts["chains"], facts["draws"]
    draws, begun = (
        f"{counted(n, 'chain')} of {counted(k, 'draw')}"
        for n, k in (facts.get("kept", planned), planned)
    )
    method = (
        f"Sampler: {facts['sampler']}, {draws}{f' (of {begun} planned)' if draws != begun else ''} "
        f"after {counted(facts['tune'], 'tuning iteration')}."
    )
    if facts["sampler"] == "find_MAP":
        centre = facts["settings"].get("centre", "mode")
        method = f"Method: find_MAP, a posterior {centre} with its uncertainty."
    if "owners" in facts:
        return [*(_promise_of_owner(owner) for owner in facts["owners"]), method]
    data = f' "{facts["dataset"]}"' if facts["dataset"] else ""
    every = "The guarantee holds at this delta."
    if facts["gdp_mu"]:
        every = (
            f"Equivalently {facts['gdp_mu']:.4g}-Gaussian differential privacy (the guarantee "
            "holds at every delta)."
        )
    return [
        f"These posterior draws are {_meaning(facts, f'respect to the data{data}')}",
        f"{every} Charged so far: epsilon = {facts['spent']['epsilon']:.4g}.",
        method,
    ]


def _promise_of_owner(facts: dict[str, Any]) -> str:
    """The paragraph of one owner."""
    temporary = (
        " The ledger was temporary: releases from the same data under other ledgers are not "
        "counted here and add to the loss."
    )
    return (
        f"{facts['name']}: these posterior draws are {_meaning(facts, 'respect to its records')} "
        "This holds against everybody else, the analyst and the other owners together included. "
        f"Charged so far: epsilon = {facts['spent']:.4g}."
        f"{temporary if facts['ledger'] == 'temporary' else ''}"
    )


def _meaning(facts: dict[str, Any], whose: str) -> str:
    """Epsilon and delta in words."""
    unit, epsilon = facts["privacy_unit"], f"{facts['epsilon']:g}"
    relation = "replaced by any other"
    if facts["neighboring"] != "replace_one":
        relation = "added or removed"
    units = unit.replace("unit", "units") if " " in unit else f"{unit}s"
    size = f", in a data set of {facts['n_units']:,} {units}" if facts["n_units"] else ""
    return (
        f"({epsilon}, {facts['delta']:g})-differentially private with {whose}: the probability of "
        f"any outcome changes by a factor of at most e^{epsilon}, up to {facts['delta']:g}, when "
        f"one {unit} is {relation}{size}."
    )


def _releases(facts: dict[str, Any]) -> list[str]:
    """What was released, by mechanism."""
    lines = []
    if number := facts["preparation"]["releases"]:
        share = facts["preparation"]["gdp_mu2"] / facts["preparation"]["budget_mu2"]
        lines.append(
            f"  Before the chains: {number} releases with Gaussian noise, {share:.1%} of the "
            "budget (in squared mu)."
        )
    for name, mechanism in facts["mechanisms"].items():
        begun = f", {mechanism['at_start']} at the start" if mechanism["at_start"] else ""
        lines.append(
            f"  {name}: Gaussian noise, multiplier {mechanism['noise_multiplier']:.4g}, "
            f"{mechanism['per_iteration']} per iteration{begun}."
        )
    if plan := facts["batches"]:
        event = batch_event(plan["event"])
        accounted = "Rényi differential privacy"
        if isinstance(event, SubsampledGaussianEvent):
            accounted = "their privacy loss distribution"
        made = "" if plan["made"] else ", and paid for, but not made"
        lines.append(
            f"  {event.mechanism}: {plan['releases']:,} releases with Gaussian noise, multiplier "
            f"{event.noise_multiplier:.4g}, each of a secret {event.batch}; accounted together by "
            f"{accounted}{made}."
        )
    return lines


def _clamped(bounds: dict[str, list[Any]]) -> list[str]:
    """What is replaced by public bounds, one sentence for each array."""
    lines = []
    for name, (lower, upper) in bounds.items():
        lows, highs = np.broadcast_arrays(
            np.array(lower, dtype="float64"), np.array(upper, dtype="float64")
        )
        # None, which JSON has for a side without bound, has become NaN
        ends = zip(np.where(np.isnan(lows), -np.inf, lows).flat, highs.flat, strict=True)
        ranges = [f"[{low:.12g}, {np.inf if np.isnan(high) else high:.12g}]" for low, high in ends]
        if len(set(ranges)) == 1:
            lines.append(f"{name} is clamped to {ranges[0]}.")
        elif len(ranges) <= 8:
            lines.append(f"{name} is clamped, by column, to {', '.join(ranges)}.")
        else:
            lines.append(f"{name} is clamped, by column, to {len(ranges)} public ranges.")
    return lines
