"""Where a private preparation starts: location and spread of the prior."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pymc as pm
import xarray as xr
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.model import Model
from pytensor.graph.traversal import ancestors

from pymc_dp.budget import PrivacyBudget
from pymc_dp.records import PublicTerms, Records, draws_are_public
from pymc_dp.rows.engine import Coordinates
from pymc_dp.unconstrained import unconstrain

__all__ = ["few_prior_draws", "improper", "prior_coordinates", "prior_draws"]

_DRAWS = 500
#: Prior draws are public; the same seed makes a resumed preparation ask the same questions.
_SEED = 20_240_229


def prior_coordinates(
    records: Records, terms: PublicTerms, draws: np.ndarray | None
) -> Coordinates:
    """Initial point of the model, and the prior standard deviation of every parameter.

    Parameters
    ----------
    records : Records
    terms : PublicTerms
        In the coordinates theta.
    draws : (m, d) ndarray or None
        From `few_prior_draws`.

    Returns
    -------
    Coordinates
        With a diagonal scaling, in unconstrained space.  Half the width of the central 68 % of 500
        prior draws, which heavy tails do not spoil; where the prior can not be drawn from
        (``pm.Flat``), or draws with code of the user's own, the inverse root of its curvature at
        the initial point, or 1.
    """
    widths = np.full(records.parameters.size, np.nan)
    if draws is not None:
        low, high = np.quantile(draws, [0.16, 0.84], axis=0)
        widths = (high - low) / 2.0
    usable = np.isfinite(widths) & (widths > 0.0)
    if not usable.all():
        widths = np.where(usable, widths, _from_curvature(records.initial, terms))
    return Coordinates(records.initial, np.diag(widths))


def improper(model: Model, public: Sequence[str]) -> list[str]:
    """Names of the free variables that nothing public bounds: ``pm.Flat`` and ``pm.HalfFlat``.

    Public observations may bound what they depend on.
    """
    bounded = {*ancestors([rv for rv in model.observed_RVs if rv.name in set(public)])}
    flat = [rv for rv in model.free_RVs if isinstance(rv.owner.op, FlatRV | HalfFlatRV)]
    return [rv.name for rv in flat if rv not in bounded]


def few_prior_draws(model: Model, budget: PrivacyBudget, records: Records) -> np.ndarray | None:
    """Always the same (500, d) draws; see `prior_draws`."""
    return prior_draws(model, budget, records, _DRAWS, _SEED)


def prior_draws(
    model: Model, budget: PrivacyBudget, records: Records, size: int, seed: int
) -> np.ndarray | None:
    """(size, d) draws from the prior in unconstrained space; None where it can not be drawn from.

    Parameters
    ----------
    model : pymc.Model
    budget : PrivacyBudget
    records : Records
    size : int
    seed : int
        Public.
    """
    length = min(records.n_units, *budget.row_counts.values())
    if not draws_are_public(model, budget.public, length):
        return None
    try:
        draws = pm.draw(model.free_RVs, draws=size, random_seed=seed)
    except NotImplementedError:
        return None
    dataset = xr.Dataset(
        {
            rv.name: (("chain", "draw", *[f"{rv.name}_{k}" for k in range(rv.ndim)]), value[None])
            for rv, value in zip(model.free_RVs, draws, strict=True)
        }
    )
    return unconstrain(model, records.parameters, dataset)[0]


def _from_curvature(initial: np.ndarray, terms: PublicTerms, step: float = 1e-3) -> np.ndarray:
    widths = np.ones(len(initial))
    for j in range(len(initial)):
        shift = step * np.eye(len(initial))[j]
        slope = terms.gradient(initial + shift)[j] - terms.gradient(initial - shift)[j]
        if slope < 0.0:
            widths[j] = 1.0 / np.sqrt(-slope / (2.0 * step))
    return widths
