"""What is released of a private run, after the noise in an anchored score is accounted for.

:mod:`pymc_dp.publication.publish` decides what may leave; the rest uses released values alone.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from pymc.model import Model

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import warn
from pymc_dp.base.compat import working
from pymc_dp.base.matrices import Coordinates
from pymc_dp.budget import PrivacyBudget, check_model, get_budget, model_of
from pymc_dp.errors import UnsafeRelease
from pymc_dp.publication.explore import CHAINS, ENOUGH, explore, log_likelihood, noncentred
from pymc_dp.publication.noise_aware import (
    BENT,
    MUCH,
    PLACES,
    Likelihood,
    directions,
    linear_prior,
    noise_aware,
    spread_out,
)
from pymc_dp.publication.publish import (
    FAR,
    STATEMENT,
    make_statement,
    private_draws,
    publish,
    refuse_other_types,
    releasable,
    released_draws,
    vouched,
)
from pymc_dp.publication.results import PaidDraws, constrain, unconstrain
from pymc_dp.records.extraction import Records, extract
from pymc_dp.rows.functions import PublicTerms

#: Acceptance below which draws are no sample.
_HARDLY_MOVED = 0.05
#: Groups of what is released.
_RELEASED = {"posterior", "posterior_raw", "sample_stats"}
#: Draws beyond this part of the radius that anchored chains are restricted to say that it binds.
_EDGE = 0.9
#: Draws so many times as wide as the preparation found, whose error is below 1.6, tell of a fault.
_WIDEST = 2.5
#: Effective draws from which an exploration is better than widened draws (these may be off by
#: several sds).
_FEWEST = 50.0


def drop(budget: PrivacyBudget, paid: PaidDraws) -> None:
    """Keep draws no longer that were released, or cannot be; another thread may have done so."""
    budget.unreleased[:] = [other for other in budget.unreleased if other is not paid]


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
        What ``pm.sample`` returned with a private step.  Default: the newest draws that a
        ``dp.sample`` had made when it was interrupted, or failed.
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
        If the draws do not come from a private step of this model, or something else is asked for.
    """
    if idata is None:
        model = model_of(model)
        budget = get_budget(model)
        kept = [] if budget is None else [p for p in budget.unreleased if p.model is model]
        if budget is None or not kept:
            raise UnsafeRelease("Nothing was kept of this model; give what pm.sample returned.")
        result = release(kept[-1].result(), model, var_names=var_names, progressbar=progressbar)
        drop(budget, kept[-1])
        return result
    refuse_other_types(idata)
    if STATEMENT in _compat.attributes(idata) and _RELEASED.issuperset(_compat.group_names(idata)):
        if var_names is not None:
            raise UnsafeRelease(
                "idata is a released result. Leave var_names out, and select its variables with "
                "ArviZ or xarray."
            )
        return idata
    model = model_of(model)
    budget = get_budget(model)
    if budget is None:
        raise UnsafeRelease(
            "The model has no PrivacyBudget, so nothing is known about the privacy of this result."
        )
    check_model(budget, model)
    plan_id, plan, draws, stats = private_draws(idata, budget)
    names = releasable(model, budget, var_names)
    missing = [name for name in names if name not in draws]
    if missing and var_names is not None:
        raise UnsafeRelease(f"{missing} were not sampled: see `var_names` of pm.sample.")
    names = [name for name in names if name in draws]
    accepted = float(stats["dp_accepted"].mean("draw").min())
    if accepted < _HARDLY_MOVED:
        warn(
            f"Only {accepted:.1%} of the proposals of a chain were accepted: it hardly moved, and "
            "its draws do not represent the posterior. Another form, more records or a larger "
            "budget would help."
        )
    published = {"posterior": draws, "sample_stats": stats}
    correction = None
    if "anchor" in plan["settings"]:
        published["posterior_raw"] = draws
        published["posterior"], correction = account_for_noise(
            model, budget, plan["settings"], draws, names, plan_id, progressbar
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
    constants = vouched(model, budget, names)
    statement = make_statement(budget, plan_id, plan, constants, correction)
    kept = [draws.sizes["chain"], draws.sizes["draw"]]
    if kept != [plan["chains"], plan["draws"]]:
        statement["kept"] = kept
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
    return publish(model, budget, names, statement, **published)


# -- the noise in an anchored score ---------------------------------------------------------------


def account_for_noise(
    model: Model,
    budget: PrivacyBudget,
    settings: Mapping[str, Any],
    posterior: xr.Dataset,
    names: Sequence[str],
    plan_id: int,
    progressbar: bool = True,
) -> tuple[xr.Dataset, dict[str, Any]]:
    """Noise-aware draws of the variables asked for, and the facts for the statement.

    Of the plan's settings, ``location`` and ``scaling`` are the coordinates and
    ``anchor["covariance"]`` that of the noise in the anchored score. `posterior` holds the raw
    draws that were kept. `plan_id` seeds the correction, with the draws: released twice, a result
    is the same. Where nothing could be done, the raw draws and the reason are returned.
    """
    raw = posterior[list(names)]
    missing = [rv.name for rv in model.free_RVs if rv.name not in posterior]
    if missing:
        return raw, _uncorrected(f"the draws of {', '.join(missing)} were not kept")
    records = extract(model, **budget.secrecy, check=False)
    theta = unconstrain(model, records.parameters, posterior)
    at = Coordinates(*(np.array(settings[name]) for name in ("location", "scaling")))
    w = np.linalg.solve(at.scaling, (theta - at.location)[..., None])[..., 0]
    d = records.parameters.size
    pooled = w.reshape(-1, d)
    if not np.isfinite(pooled).all():
        return raw, _uncorrected("some draws lie on the boundary of their support")
    if len(pooled) <= 4 * d or np.linalg.matrix_rank(pooled - pooled.mean(axis=0)) < d:
        return raw, _uncorrected("there are too few draws")
    if np.linalg.norm(pooled, axis=1).max() > _EDGE * settings.get("radius", np.inf):
        reason = (
            "the chains came to the edge of the public ball that they are restricted to, so the "
            "posterior with this noise in its score has no end; use form='quadratic' or 'plain', "
            "or a prior with lighter tails"
        )
        return raw, {**_uncorrected(reason), "unreliable": reason}
    noise = np.array(settings["anchor"]["covariance"])
    seen = (pooled - pooled.mean(axis=0)) @ directions(noise)[0]  # others are as wide as the prior
    widest = float(np.linalg.norm(seen, 2)) / np.sqrt(len(seen))
    terms = PublicTerms.of(records, at)
    places = pooled[spread_out(len(pooled), max(PLACES, 4 * d))]
    seed = [plan_id, zlib.crc32(w.tobytes())]

    def scores(at: np.ndarray) -> np.ndarray:
        return np.array([terms.gradient(place) for place in at])

    exploration = _Exploration(model, records, at, places, seed, progressbar)
    found = noise_aware(
        np.random.default_rng(seed),
        w,
        noise,
        linear_prior(places, scores(places)),
        ess=float(_compat.effective_draws(theta).min()),
        axes=at.scaling,
        pairs=np.array(settings["anchor"]["pairs"], dtype=bool),
        scores=scores,
        explore=exploration,
    )
    values = constrain(model, records.parameters, at.location + found.draws @ at.scaling.T, names)
    corrected = raw.assign({name: raw[name].copy(data=value) for name, value in values.items()})
    facts = {}
    if widest > _WIDEST:
        facts["unreliable"] = (
            f"the chains are {widest:.1f} times as wide in some direction as the released "
            "curvature says; changes of scores or energy errors were clipped, or the posterior has "
            "heavy tails. form='quadratic' may be better"
        )
    if found.method == "widened" and found.widening**2 > 1.0 + MUCH:
        facts["unreliable"] = (
            "the noise is large, and what it has done to the draws could not be told from them and "
            "the prior together; form='quadratic', longer chains or the effects of a hierarchy "
            "written as mu + tau * z with z ~ N(0, 1) may be better"
        )
    return corrected, {
        **facts,
        "method": found.method,
        "bend": found.bend,
        "normal": found.normality.near_normal and found.bend <= BENT,
        "largest_skewness": float(np.abs(found.normality.skewness).max()),
        "largest_excess_kurtosis": float(np.abs(found.normality.excess_kurtosis).max()),
        "weight_ess": found.weight_ess,
        "widening": found.widening,
        "explored": exploration.effective,
    }


def _uncorrected(reason: str) -> dict[str, Any]:
    return {"method": "none", "reason": reason}


def in_words(facts: Mapping[str, Any]) -> str:
    """What intervals mean, for the statement."""
    if facts["method"] == "none":
        return (
            "Intervals do NOT account for the privacy noise in the released score, and are too "
            f"narrow: {facts['reason']}."
        )
    how = ", but only approximately: the posterior is not near normal."
    if facts["method"] == "resampled":
        how = (
            ": the posterior is not near normal, and draws were resampled with weights that hold "
            "for any shape. Approximate in that the law of the noise is taken as Gaussian."
        )
    elif facts["method"] == "explored":
        how = (
            ": the noise is large and the prior not normal over the draws, so these are draws of "
            "the prior times a normal likelihood, of the curvature that the chains show. "
            "Approximate in that the likelihood is taken as normal, and in that they are worth "
            f"about {facts['explored']:.0f} draws: if these are few, scales of effects near 0 are "
            "seen too seldom."
        )
    elif facts["method"] == "widened":
        how = (
            ": draws were widened by all that it could have moved them, and not moved. Approximate."
        )
    elif facts["normal"]:
        how = ", which was added to the draws; this is exact for a normal posterior."
    return (
        f"Intervals account for the privacy noise in the released score{how} The draws of the "
        "chains are in the group posterior_raw."
    )


@dataclass(eq=False)
class _Exploration:
    """Draws in w of the prior as it is times a normal likelihood, by NUTS; all of it is public."""

    model: Model
    records: Records
    at: Coordinates
    places: np.ndarray
    seed: list[int]
    progressbar: bool
    effective: float = 0.0  # what the draws are worth, in the worst parameter

    def __call__(self, likelihood: Likelihood) -> np.ndarray | None:
        """(k, d) draws, or None where NUTS hardly mixes; no failure may lose the draws that there
        are.
        """
        theta = self.records.parameters.theta
        [public] = self.records.parameters.substitute([self.records.public_logp])
        target = public + log_likelihood(theta, self.at, likelihood)
        rng = np.random.default_rng(self.seed)
        chosen = rng.choice(self.places, CHAINS, replace=False)
        starts = np.array([self.at.theta(w) for w in chosen])
        best = None
        with working("Exploring what was released", self.progressbar):
            # where effects are known well, the model as it is written may be better
            for care, in_z in ((0.9, True), (0.99, False)):
                with contextlib.suppress(Exception):
                    through = noncentred(self.model, self.records.parameters) if in_z else None
                    seed = int(rng.integers(2**31))
                    found = explore(theta, target, starts, seed, self.at.scaling, care, through)
                    if found.effective >= max(_FEWEST, self.effective) and not found.apart:
                        best, self.effective = found.draws, found.effective
                if self.effective >= ENOUGH:
                    break
        if best is None:
            return None
        drawn = rng.permutation(np.array([self.at.z(x) for x in best]))
        return drawn if np.isfinite(drawn).all() else None


# -- means with less Monte-Carlo error ------------------------------------------------------------


def posterior_mean(idata: Any, model: Model | None = None) -> xr.Dataset:
    """Posterior means with less Monte-Carlo error than the averages of the draws.

    Parameters
    ----------
    idata : arviz.InferenceData or xarray.DataTree
        A released result of ``DPLangevin``, with all free variables of the model.
    model : pymc.Model, optional
        Default: the model of the context.

    Returns
    -------
    xarray.Dataset
        For each variable of the posterior, ``estimate`` "mean" and "standard_error".

    Raises
    ------
    UnsafeRelease
        If the result was not released.
    ValueError
        If it has no ``dp_newton``, or not all of the free variables.

    Notes
    -----
    Free post-processing. Every iteration has released a score, which the draws use only as a force
    and as friction. A Newton step from the means over its path, the mid-point plus the score
    divided by the posterior precision, estimates the unconstrained parameters. The draws are moved
    to the mean of these estimates, and the means of their constrained values are returned. The
    standard error is that of the Newton estimates, carried over by regression of the variable on
    the unconstrained parameters.

    *Assumptions.* The posterior is smooth and the chains are stationary.

    *Weaknesses.* The gain is large with fresh momentum or much public friction; with persistent
    momentum and no public friction, which adds the scores up by itself, it is a few per cent. The
    error is that of the chains, as is ArviZ's ``mcse``: the noise of an anchored score is not in
    it, but in the spread of noise-aware draws.
    """
    _, posterior = released_draws(idata)
    model = model_of(model)
    stats = _compat.group(idata, "sample_stats")
    if "dp_newton" not in stats:
        raise ValueError(
            "idata has no dp_newton: its chains released no scores whose mean estimates that of "
            "the posterior. Only those of DPLangevin do, unless they draw from a target that is "
            "public as a whole. Average the draws instead."
        )
    missing = [rv.name for rv in model.free_RVs if rv.name not in posterior]
    if missing:
        raise ValueError(
            f"idata lacks {', '.join(missing)}: all free variables are needed, as they are moved "
            "together. Release without var_names."
        )
    budget = get_budget(model)
    secrecy = {} if budget is None else budget.secrecy
    parameters = extract(model, **secrecy, check=False).parameters

    newton = stats["dp_newton"].transpose("chain", "draw", ...).values
    theta = unconstrain(model, parameters, posterior)
    raw = theta
    if "posterior_raw" in _compat.group_names(idata):
        raw = unconstrain(model, parameters, _compat.group(idata, "posterior_raw"))
    moved = theta + newton.mean(axis=(0, 1)) - raw.mean(axis=(0, 1))
    values = constrain(model, parameters, moved, list(posterior))
    found = {}
    for name, value in values.items():
        mean = value.mean(axis=(0, 1))
        error = _standard_error(value, moved, newton).reshape(mean.shape)
        found[name] = (("estimate", *posterior[name].dims[2:]), np.stack([mean, error]))
    coords = {k: v for k, v in posterior.coords.items() if k not in ("chain", "draw")}
    return xr.Dataset(found, coords={"estimate": ["mean", "standard_error"], **coords})


def _standard_error(value: np.ndarray, theta: np.ndarray, newton: np.ndarray) -> np.ndarray:
    """(entries,) standard error of the mean of `value`, linear in that of `theta`."""
    flat = value.reshape(-1, int(np.prod(value.shape[2:], dtype=int)))
    centred = theta.reshape(len(flat), -1)
    centred = centred - centred.mean(axis=0)
    slopes = np.linalg.lstsq(centred, flat - flat.mean(axis=0), rcond=None)[0]
    series = (newton - newton.mean(axis=(0, 1))) @ slopes
    effective = _compat.effective_draws(series)
    return np.sqrt(np.square(series).mean(axis=(0, 1)) / effective)
