"""The normal approximation of a posterior, from one preparation: no chains, any number of draws."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import xarray as xr
from pymc.model import Model
from scipy.linalg import eigh
from scipy.stats import norm

from pymc_dp.base.checks import check_integer, warn
from pymc_dp.base.compat import working
from pymc_dp.base.matrices import Coordinates, positive_part, root
from pymc_dp.budget import PrivacyBudget, model_of, require_budget
from pymc_dp.kernels import targets
from pymc_dp.kernels.interfaces import Prior
from pymc_dp.privacy.plan import Plan
from pymc_dp.publication.explore import Explored
from pymc_dp.publication.publish import (
    FAR,
    STATEMENT,
    make_statement,
    public_coords,
    publish,
    releasable,
    vouched,
)
from pymc_dp.publication.results import check_fits, constrain, dataset
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.tuning.choice import learn_form
from pymc_dp.tuning.effects import effects_of
from pymc_dp.tuning.model_parts import ModelParts, find_mode, unseen
from pymc_dp.tuning.preparing import Preparing, improper_prior, settle, too_small
from pymc_dp.tuning.quadratic import Quadratic, about_prior, unreliable

_SPREAD_DRAWS = 2000
#: How much less than 90 % of the target an interval of the normal may hold, and how many standard
#: deviations its centre may be off; fewer effective draws than this tell neither.
_CONTENT, _SHIFT, _FEWEST = 0.05, 0.3, 50.0
_WIDEST = 10.0  # widest result, in widths of the prior, as a mode may be flat


class _Normal:
    """Mean and root of the covariance in unconstrained space, and what they were learned under."""

    def __init__(
        self,
        sampler: str,
        model: Model,
        names: list[str],
        share: float,
        draws: int,
        chains: int,
        progressbar: bool,
    ) -> None:
        self.model, self.names = model, names
        self.budget: PrivacyBudget = require_budget(model, sampler)
        counts = {"draws": 1, "tune": 0, "chains": 1, "runs": 1}
        parts = ModelParts(model, self.budget, computed=names)
        self.preparing = Preparing(parts, sampler, counts, progressbar, share=share)
        self.parameters = parts.records.parameters
        first = self._values(parts.records.initial[None, None])
        reserved = ("chain", "draw", *(["estimate"] if sampler == "find_MAP" else []))
        shapes = {name: value.shape[2:] for name, value in first.items()}
        check_fits(model, shapes, reserved=reserved)
        if effects_of(parts.records, parts.engine, parts.prior_draws, None) is not None:
            warn(
                "What the records see is non-linear in the parameters (a product of parameters, "
                "say), so the posterior is curved and its mode may be far from its mean: a normal "
                "approximation is poor. dp.DPLangevin handles such models. Nothing has been spent "
                "yet."
            )
        found, _ = learn_form(self.preparing, form="quadratic")
        at = found.coordinates
        # if nothing was found, which was said already: about the prior, which may have no mode
        self.mean, self.root = at.location, at.scaling
        centre, facts = "mode", {"about_prior": [], "departs": "", "improper": parts.improper}
        sentences = [too_small("from the prior, or about it")]
        nothing = np.zeros((len(self.mean), len(self.mean))).tolist()
        likelihood: dict[str, Any] | None = {"curvature": nothing, "covariance": nothing}
        if found.trusted:
            assert isinstance(found, Quadratic)
            likelihood = found.likelihood
            centre, departs = self._approximate(found, parts)
            public = self.draw(np.random.default_rng(), 1, _SPREAD_DRAWS)[0]
            untouched = about_prior(public, parts)
            if (beyond := found.far(public, parts)) > FAR:
                departs = (
                    f"{beyond:.0%} of the draws lie far from where the likelihood was approximated"
                )
            if departs:
                warn(
                    f"The normal approximation is unreliable: {departs}. This happens in "
                    "hierarchies whose scale is little known, and where signals are much stronger "
                    "than the budget shows. Use dp.sample with DPLangevin, or a larger budget."
                )
            facts.update(about_prior=untouched, departs=departs)
            sentences = [
                f"The posterior was replaced by a normal one about its {centre}, from released "
                "scores and curvatures, whose noise the intervals account for; no chains touched "
                "the records. Approximate where the posterior is not near normal. "
                f"{found.caveats(facts)}",
                *unreliable(facts),
            ]
        plan = Plan(sampler, draws, 0, chains)  # all was released before
        payload = plan.payload(
            form="laplace",
            trusted=found.trusted,
            **facts,
            centre=centre,
            clip_norm=found.clip_norms,
            diagonal=found.diagonal,
            **found.clipping.facts(),
            likelihood=likelihood,
            location=self.mean.tolist(),
            scaling=self.root.tolist(),
            secure=self.preparing.secure,
            sentences=[*sentences, *improper_prior(facts)],
        )
        self.budget.account.record_plan(plan.plan_id, payload)
        self.plan_id = plan.plan_id
        constants = vouched(model, self.budget, names)
        self.facts = make_statement(self.budget, plan.plan_id, payload, constants)

    def _approximate(self, found: Quadratic, parts: ModelParts) -> tuple[str, str]:
        """Set mean and root; what the mean is, and how the target differs from this, in words."""
        at, before = found.coordinates, parts.start
        prior = parts.terms.with_coordinates(at)
        target = targets.Quadratic(prior, found.score, found.curvature, found.covariance)
        hidden = unseen(parts.engine, found.clip.location)
        begin, reach = _settled(parts.terms, at, before, hidden)
        mode, precision = find_mode(target, reach + target.information, begin)
        least = np.linalg.solve(_WIDEST * before.scaling, at.scaling)
        widths = _widths(precision, least)
        self.mean, self.root = at.theta(mode), at.scaling @ widths
        departs = _departure(target, mode, widths, at.scaling)
        explored = _explored(found, parts, self.preparing.progressbar) if departs else None
        if explored is None:
            return "mode", departs
        w = np.linalg.solve(at.scaling, (explored.draws - at.location).T)
        precision = np.linalg.inv(positive_part(np.atleast_2d(np.cov(w)), 1e-14))
        self.mean, self.root = explored.draws.mean(axis=0), at.scaling @ _widths(precision, least)
        z = (explored.draws - self.mean) / np.linalg.norm(self.root, axis=1)
        even = np.full(len(z), 1.0 / len(z))
        return "mean", explored.doubt or _in_words(z, even, explored.effective)

    def draw(self, rng: np.random.Generator, chains: int, draws: int) -> np.ndarray:
        """(chains, draws, d) unconstrained draws."""
        return self.mean + rng.standard_normal((chains, draws, len(self.mean))) @ self.root.T

    def _values(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        return constrain(self.model, self.parameters, theta, self.names)

    def dataset(self, theta: np.ndarray) -> xr.Dataset:
        """Variables at (chains, draws, d) unconstrained parameters."""
        public = self.budget.public
        return public_coords(dataset(self.model, self._values(theta), public), public)


def _settled(
    terms: PublicTerms, at: Coordinates, before: Coordinates, hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where in w to look for the mode from, and the precision of how far it may be.

    Without releases, parameters that records see are about where the prior is. Those of the prior
    alone (tau of a hierarchy) begin at their mode given the others and stay within five of their
    sds: as tau goes to 0, and all effects to one value, the density has no bound.
    """
    spread = before.scaling.diagonal()
    widths = at.scaling / spread[:, None]
    place, reach = at.location.copy(), widths.T @ widths
    if hidden.size:
        place[hidden] = before.location[hidden]
        given = terms.with_coordinates(Coordinates(place, np.diag(spread)[:, hidden]))
        mode, precision = find_mode(given, np.eye(len(hidden)))
        place[hidden] += spread[hidden] * mode
        reach = reach + len(place) * widths[hidden].T @ precision @ widths[hidden]
    return at.z(place), reach


def _explored(found: Quadratic, parts: ModelParts, progressbar: bool) -> Explored | None:
    """Public draws of the target; None where they say nothing of its mean and covariance.

    The budget is spent by then: no failure may lose what it has paid for. After an interrupt the
    same call resumes from what was released.
    """
    if parts.improper:  # nor need the target have any; a chain would wander off for minutes
        return None
    try:
        with working("Exploring what was released", progressbar):
            explored = found.explored(parts)
    except Exception:
        return None
    with np.errstate(all="ignore"):
        wide = explored.draws.std(axis=0) / parts.start.scaling.diagonal()
    return explored if explored.effective >= _FEWEST and np.all(wide <= _WIDEST) else None


def _widths(precision: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Root of the covariance in w, no wider than the inverse of `least` in any direction."""
    values, basis = eigh(precision, least.T @ least)  # basis' (least' least) basis = I
    back = np.linalg.inv(basis)
    return root(np.linalg.inv(back.T @ (np.maximum(values, 1.0)[:, None] * back)))


def _departure(target: Prior, mode: np.ndarray, widths: np.ndarray, scaling: np.ndarray) -> str:
    """How weighted draws of the normal differ from the target, if they do: see `_in_words`."""
    u = np.random.default_rng(0).standard_normal((_SPREAD_DRAWS, len(mode)))
    log_target = np.array([float(target.log_density(z)) for z in mode + u @ widths.T])
    log_weights = log_target + 0.5 * (u**2).sum(axis=1)
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    ess = 1.0 / float(np.sum(weights**2))
    if not ess >= _FEWEST:
        return "it hardly overlaps with prior times released likelihood"
    axes = scaling @ widths
    return _in_words(u @ axes.T / np.linalg.norm(axes, axis=1), weights, ess)


def _in_words(z: np.ndarray, weights: np.ndarray, ess: float) -> str:
    """How weighted draws, (m, d), differ from N(0, 1) in each parameter."""
    error = 3.0 / math.sqrt(ess)
    content = float((weights @ (np.abs(z) < norm.ppf(0.95))).min())
    if content < 0.9 - _CONTENT - 0.3 * error:
        return f"90 % intervals hold as little as {content:.0%} of prior times released likelihood"
    shift = float(np.abs(weights @ z).max())
    if shift > _SHIFT + error:
        return f"the mean of prior times released likelihood is {shift:.1f} standard deviations off"
    return ""


def laplace(
    draws: int = 1000,
    *,
    chains: int = 4,
    share: float = 1.0,
    model: Model | None = None,
    var_names: list[str] | None = None,
    random_seed: Any = None,
    progressbar: bool = True,
) -> Any:
    """Draws from a normal approximation of the posterior that accounts for the privacy noise.

    Parameters
    ----------
    draws, chains : int
        Independent draws; they cost nothing beyond the preparation.
    share : float, default 1.0
        Part of what remains of the budget.
    model : pymc.Model, optional
        Default: the model of the context.
    var_names : list of str, optional
        As in :func:`pymc_dp.release`.
    random_seed : int or Generator, optional
        Of the draws. Privacy noise always comes from the operating system.
    progressbar : bool, default True

    Returns
    -------
    arviz.InferenceData (PyMC 5) or xarray.DataTree (PyMC 6)
        Released: group ``posterior`` with the privacy statement.

    Raises
    ------
    UnsafeModel, NotFactorizable, BudgetExceeded, ValueError
        Before anything is spent.

    Notes
    -----
    The log-likelihood is replaced by a quadratic one, from two released scores and a released
    curvature at the mode. Given the parameters, the released score is N(H z, H + V), with V the
    privacy noise, so the draws are wider than the posterior by what the noise hides, and hardly
    wider than the prior. In unconstrained space the result is normal about the mode of prior times
    released likelihood. Where weighted draws show that this target is not near normal there, as in
    hierarchies whose scale is little known, it has the mean and covariance of NUTS draws of the
    target.

    *Guarantee.* The releases of the preparation satisfy the budget.

    *Weaknesses.* Approximate where the posterior is not near normal; ``DPLangevin`` is better
    there. A warning and the statement say where prior times released likelihood is not near normal
    about the mode that was found; other modes of the prior are not looked for. The bias of clipping
    is not covered. Use it for near-normal posteriors and for budgets too small for chains.
    """
    draws = check_integer("draws", draws, minimum=1)
    chains = check_integer("chains", chains, minimum=1)
    model = model_of(model)
    names = releasable(model, require_budget(model, "dp.laplace"), var_names)
    rng = np.random.default_rng(random_seed)
    normal = _Normal("laplace", model, names, share, draws, chains, progressbar)
    theta = normal.draw(rng, chains, draws)
    found = publish(model, normal.budget, names, normal.facts, posterior=normal.dataset(theta))
    settle(normal.preparing.finish)
    return found


def find_MAP(
    model: Model | None = None, *, share: float = 1.0, progressbar: bool = True
) -> xr.Dataset:
    """Private posterior mode, with its uncertainty.

    Parameters
    ----------
    model : pymc.Model, optional
        Default: the model of the context.
    share : float, default 1.0
        Part of what remains of the budget.
    progressbar : bool, default True

    Returns
    -------
    xarray.Dataset
        For each free variable and each Deterministic that may be released, ``estimate`` "mode" and
        "sd": the standard deviation of the approximate posterior, privacy noise included.  The
        privacy statement is in its attributes: ``dp.privacy_statement(dataset)``.

    Raises
    ------
    UnsafeModel, NotFactorizable, BudgetExceeded, ValueError
        Before anything is spent.

    Notes
    -----
    The mode is that of the unconstrained parameters, under the likelihood of :func:`laplace`; where
    that takes the mean of draws instead, so does this.
    """
    model = model_of(model)
    names = releasable(model, require_budget(model, "dp.find_MAP"))
    normal = _Normal("find_MAP", model, names, share, 1, 1, progressbar)
    mode = normal.dataset(normal.mean[None, None]).isel(chain=0, draw=0, drop=True)
    theta = normal.draw(np.random.default_rng(normal.plan_id), 1, _SPREAD_DRAWS)
    spread = normal.dataset(theta).std(("chain", "draw"))
    found = xr.concat([mode, spread], dim="estimate").assign_coords(estimate=["mode", "sd"])
    found.attrs[STATEMENT] = json.dumps(normal.facts)
    settle(normal.preparing.finish)
    return found
