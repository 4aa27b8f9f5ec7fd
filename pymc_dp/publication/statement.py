"""The privacy statement: what was promised about a release, as data and in words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xarray as xr

from pymc_dp.base import compat as _compat
from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import UnsafeRelease
from pymc_dp.privacy import noise
from pymc_dp.privacy.accounting import epsilon_from_mu, mu_from_units
from pymc_dp.privacy.events import MU2_UNIT, SubsampledGaussianEvent, batch_event
from pymc_dp.privacy.ledger import STATISTIC, Ledger

#: The attribute of a result that holds its statement.
STATEMENT = "pymc_dp_statement"
#: Settings that are long arrays, or stated otherwise.
_UNSTATED = ("anchor", "location", "scaling", "secure")


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
    """The facts that go with a release, machine-readable.

    What was promised is read from the ledger, not from the budget object. `plan` is the plan's
    payload there. `vouched` are released Deterministics whose formulas hold numbers that were taken
    as public. `correction` says how the noise of an anchored run was taken into account.
    """
    from pymc_dp import __version__

    ledger = budget.ledger
    info = ledger.account_info(budget.account)
    secure = plan["settings"].get("secure", False) and not noise.is_insecure()
    batches = budget.batches()
    statement: dict[str, Any] = {
        "privacy_guarantee": "(epsilon, delta)-differential privacy" if secure else "none",
        "epsilon": info.epsilon,
        "delta": info.delta,
        # releases on batches are accounted at the budget's own delta
        "gdp_mu": None if batches else mu_from_units(info.cap),
        "batches": batches and {**batches, "made": _were_made(ledger, budget.account)},
        "neighboring": info.neighboring,
        "privacy_unit": info.unit,
        "n_units": budget.n_units if info.neighboring == "replace_one" else None,
        "dataset": info.public["dataset"],
        "public": info.public["public"],
        "bounds": info.public["bounds"],
        "taken_as_public": vouched,
        "spent": {"epsilon": budget.spent().epsilon, "gdp_mu2": info.spent / MU2_UNIT},
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
        "preparation": {
            **_preparation(ledger, budget.account),
            "budget_mu2": info.cap / MU2_UNIT,
        },
        "ledger": "temporary" if ledger.is_temporary else "persistent",
        "ledger_head": ledger.head(),
        "pymc_dp_version": __version__,
    }
    if correction is not None:
        statement["noise_aware"] = correction
    reserved = ledger.total_reserved()
    if not ledger.is_temporary or reserved > info.cap:
        statement["ledger_total"] = {
            "gdp_mu2": reserved / MU2_UNIT,
            # with batches there is no other account, and no figure but the budget's own
            "epsilon": info.epsilon
            if batches
            else epsilon_from_mu(mu_from_units(reserved), budget.delta),
            "dataset": ledger.dataset,
            "public": _declared_public(ledger),
        }
    return statement


def _were_made(ledger: Ledger, account: int) -> bool:
    """Whether a chain was begun of the run that makes the releases on batches."""
    mine = [e for e in ledger.entries() if e.account == account]
    runs = {e.plan for e in mine if e.kind == "run" and e.payload.get("batches")}
    return any(e.kind == "chain" and e.plan in runs for e in mine)


def _preparation(ledger: Ledger, account: int) -> dict[str, Any]:
    """How many one-off releases were charged, and how much for them."""
    mine = [e for e in ledger.entries() if e.account == account]
    statistics = {
        e.plan for e in mine if e.kind == "plan" and e.payload.get("sampler") == STATISTIC
    }
    charges = [e.amount for e in mine if e.kind == "charge" and e.plan not in statistics]
    return {"releases": len(charges), "gdp_mu2": sum(charges) / MU2_UNIT}


def _declared_public(ledger: Ledger) -> list[str]:
    """Everything that some budget on a ledger declared public."""
    names: set[str] = set()
    for entry in ledger.entries():
        if entry.kind == "account":
            names.update(entry.payload["public"].get("public", []))
    return sorted(names)


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
        The same facts are in ``idata.attrs["pymc_dp_statement"]`` as JSON.

    Raises
    ------
    UnsafeRelease
        If the result was not released.
    """
    return "\n".join(_sentences(facts_of(idata)))


def facts_of(idata: Any) -> dict[str, Any]:
    """The statement of a released result as data; UnsafeRelease if it was not released."""
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
    units = unit.replace("group", "groups") if " " in unit else f"{unit}s"
    size = f" of {facts['n_units']:,} {units}" if facts["n_units"] else ""
    data = f' "{facts["dataset"]}"' if facts["dataset"] else ""
    lines = [
        f"These posterior draws are ({facts['epsilon']:g}, {facts['delta']:g})-differentially "
        f"private with respect to the data{data}: the probability of any outcome changes by a "
        f"factor of at most e^{facts['epsilon']:g}, up to {facts['delta']:g}, when {relation}"
        f"{size and ','}{size and ' in a data set' + size}.",
        (
            f"Equivalently {facts['gdp_mu']:.4g}-Gaussian differential privacy (the guarantee "
            "holds at every delta). "
            if facts["gdp_mu"]
            else "The guarantee holds at this delta. "
        )
        + f"Charged so far: epsilon = {facts['spent']['epsilon']:.4g}.",
        _method(facts),
    ]
    if facts["preparation"]["releases"]:
        share = facts["preparation"]["gdp_mu2"] / facts["preparation"]["budget_mu2"]
        lines.append(
            f"  Before the chains: {facts['preparation']['releases']} releases with Gaussian "
            f"noise, {share:.1%} of the budget (in squared mu)."
        )
    for name, mechanism in facts["mechanisms"].items():
        lines.append(
            f"  {name}: Gaussian noise, multiplier {mechanism['noise_multiplier']:.4g}, "
            f"{mechanism['per_iteration']} per iteration"
            + (f", {mechanism['at_start']} at the start" if mechanism["at_start"] else "")
            + "."
        )
    for plan in [facts["batches"]] if facts["batches"] else []:
        event = batch_event(plan["event"])
        poisson = isinstance(event, SubsampledGaussianEvent)
        lines.append(
            f"  {event.mechanism}: {plan['releases']:,} releases with Gaussian noise, multiplier "
            f"{event.noise_multiplier:.4g}, each of a secret {event.batch}; accounted together by "
            + ("their privacy loss distribution" if poisson else "Rényi differential privacy")
            + ("." if plan["made"] else ", and paid for, but not made.")
        )
    if facts.get("far", 0.0) > 0.1:
        lines.append(
            f"UNRELIABLE: {facts['far']:.0%} of the draws lie far from where the likelihood was "
            "approximated; the posterior is not near normal, and this form cannot describe it."
        )
    if "noise_aware" in facts:
        lines += _correction(facts["noise_aware"], facts["settings"])
    if facts["public"]:
        lines.append(f"Declared public, and not protected: {', '.join(facts['public'])}.")
    lines += _clamped(facts["bounds"])
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
    lines += _target(facts["settings"])
    lines += _improper(facts["settings"])
    lines += [
        f"Ledger head {facts['ledger_head'][:16]}; pymc_dp {facts['pymc_dp_version']}.",
        "It is assumed that model, priors, bounds and settings were chosen without looking at the "
        "private data.",
    ]
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


def _correction(correction: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """What intervals mean, after an anchored run."""
    if correction["method"] == "none":
        first = (
            "Intervals do NOT account for the privacy noise in the released score, and are too "
            f"narrow: {correction['reason']}."
        )
    else:
        first = "Intervals account for the privacy noise in the released score"
        if correction["method"] == "resampled":
            first += (
                ": the posterior is not near normal, and draws were resampled with weights that "
                "hold for any shape. Approximate in that the law of the noise is taken as Gaussian."
            )
        elif correction["method"] == "explored":
            first += (
                ": the noise is large and the prior not normal over the draws, so these are draws "
                "of the prior times a normal likelihood, of the curvature that the chains show. "
                "Approximate in that the likelihood is taken as normal, and in that they are worth "
                f"about {correction['explored']:.0f} draws: if these are few, scales of effects "
                "near 0 are seen too seldom."
            )
        elif correction["method"] == "widened":
            first += (
                ": draws were widened by all that it could have moved them, and not moved. "
                "Approximate."
            )
        elif correction["normal"]:
            first += ", which was added to the draws; this is exact for a normal posterior."
        else:
            first += ", but only approximately: the posterior is not near normal."
        first += " The draws of the chains are in the group posterior_raw."
    return [first, _bias(settings)]


def _untouched(settings: dict[str, Any]) -> str:
    """Which variables the records said next to nothing about, as a sentence to append."""
    names = settings.get("about_prior")
    return f" ABOUT AS WIDE AS THEIR PRIOR: {', '.join(names)}." if names else ""


def _diagonal(settings: dict[str, Any]) -> str:
    """Whether only the diagonal of the curvature was released, as a sentence to append."""
    if not settings.get("diagonal"):
        return ""
    return (
        " ONLY THE DIAGONAL OF THE CURVATURE was released: intervals of sums and means of "
        "parameters are too narrow."
    )


def _unreliable(settings: dict[str, Any]) -> list[str]:
    """How the draws differ from what they should be draws of, if that was seen."""
    return [f"UNRELIABLE: {settings['departs']}."] if settings.get("departs") else []


def _improper(settings: dict[str, Any]) -> list[str]:
    """Which variables have no proper prior to be left to."""
    released = settings.get("form") in ("laplace", "quadratic", "anchored")
    if not settings.get("improper") or not (released or settings.get("trusted") is False):
        return []
    return [
        f"IMPROPER PRIOR OF {', '.join(settings['improper'])}: what the privacy noise hides of the "
        "records has no posterior, and intervals mean nothing there."
    ]


def _bias(settings: dict[str, Any]) -> str:
    """What clipping the scores of an anchor did to the draws."""
    if settings.get("clipping") == "consistent":
        return (
            "What clipping takes from a score was given back on average, over outcomes that the "
            "model would draw for the record (Fisher consistency), so that it leaves no bias where "
            "the model is true, and intervals account for what it cost. Where the model is wrong, "
            f"outliers count for less than it says. {_clipped(settings)}"
        )
    return f"Intervals do not account for the bias of clipping scores. {_clipped(settings)}"


def _clipped(settings: dict[str, Any]) -> str:
    """A noisy count of the scores that were clipped."""
    if not settings.get("clipped"):
        return ""
    fraction, sd = settings["clipped"]
    if sd == 0.0:
        return "A bound was used that no score can pass at the first origin."
    counted = f"By a noisy count, {100 * fraction:.2g} % (sd {100 * sd:.2g}) of the scores were "
    if settings.get("clipping") == "consistent":
        return f"{counted}clipped."
    return (
        f"{counted}clipped: such records, and outliers too few to be seen, count for less than the "
        f"model says.{_heavy(settings)}"
    )


def _heavy(settings: dict[str, Any]) -> str:
    if not settings.get("heavy_tails"):
        return ""
    return (
        " THE SCORES HAVE HEAVY TAILS: the posterior of the model as written may lie farther away "
        "than the intervals say."
    )


def _method(facts: dict[str, Any]) -> str:
    if facts["sampler"] == "find_MAP":
        centre = facts["settings"].get("centre", "mode")
        return f"Method: find_MAP, a posterior {centre} with its uncertainty."
    return (
        f"Sampler: {facts['sampler']}, {facts['chains']} chains of {facts['draws']} draws after "
        f"{facts['tune']} tuning iterations."
    )


def _target(settings: dict[str, Any]) -> list[str]:
    """What the draws are draws from."""
    power = settings.get("likelihood_power", 1.0)
    if power != 1.0:
        return [
            f"THE LIKELIHOOD COUNTS TO THE POWER {power:g}, by design: the draws spread as if only "
            "that part of the records were there.",
            *_target({**settings, "likelihood_power": 1.0}),
        ]
    form = settings.get("form")
    if settings.get("trusted") is False:
        public = form in ("quadratic", "laplace")  # else noise decides where the chains go
        where = "from the prior, or about it" if public else "about the prior, or where they began"
        return [
            "THE BUDGET WAS TOO SMALL: the records could not be told from the privacy noise, and "
            f"these are draws {where}."
        ]
    if form == "exponential_family":
        return [
            f"The records were seen through their sufficient statistic alone ({settings['family']})"
            ", clamped to public bounds; the draws are from the exact posterior of the statistics "
            "so clamped, as far as the chains have converged."
        ]
    if form == "laplace":
        return [
            "The posterior was replaced by a normal one about its "
            f"{settings.get('centre', 'mode')}, from released scores and curvatures, whose noise "
            "the intervals account for; no chains touched the records. Approximate where the "
            f"posterior is not near normal. {_bias(settings)}{_diagonal(settings)}"
            f"{_untouched(settings)}",
            *_unreliable(settings),
        ]
    if form == "quadratic":
        what = (
            "log-likelihood, as a function of the effects that the records see (group means, say), "
            "was replaced"
            if settings.get("effects")
            else "log-likelihood was replaced"
        )
        return [
            f"The chains did not touch the records: the {what} by a quadratic one, from released "
            "scores and curvatures, whose noise the intervals account for; the prior is exact. "
            f"Approximate where that likelihood is not near normal. {_bias(settings)}"
            f"{_diagonal(settings)}{_untouched(settings)}",
            *_unreliable(settings),
        ]
    if form == "anchored":
        return [
            "Changes of scores and energy errors were clipped at bounds learned from noisy "
            "histograms; the chains are exact as far as no energy error was clipped."
        ]
    if form == "plain" and settings.get("clipped"):
        return [f"The chains are exact as far as nothing was clipped. {_clipped(settings)}"]
    if "dynamics" in settings:
        return [
            f"The draws follow {settings['dynamics']} dynamics without an accept test: biased by "
            "their step, by the sampling of batches and by clipping, none of which is reported."
        ]
    if settings.get("batch_size") and "correction_error" in settings:
        return [
            "The accept test is Barker's, approximate for three reasons: its noise is logistic to "
            f"{settings['correction_error']:.2g} in distribution; ratios are estimated from "
            "batches, whose sampling noise is not quite normal; and the variance of that is "
            "an estimate. Clipping, which is not reported, may bias the draws as well."
        ]
    if settings.get("batch_size"):
        return [
            "The accept test is approximate: ratios are estimated from batches, and their sampling "
            "variance with them. Clipping, which is not reported, may bias the draws as well."
        ]
    if "correction_error" in settings:
        return [
            "The accept test is Barker's, approximate by "
            f"{settings['correction_error']:.2g} in the distribution function of its noise. "
            "Clipping, which is not reported, may bias the draws as well."
        ]
    return [
        "Whether the posterior is exact depends on clipping, which is not reported: it is if the "
        "bounds of the sampler hold for every record."
    ]
