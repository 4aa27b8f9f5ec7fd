"""How many records are clipped: expected by the model, or bought as a noisy count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from pymc.model import Model

from pymc_dp.base.checks import check_epsilon
from pymc_dp.budget import get_budget
from pymc_dp.privacy.accounting import mu_from_budget, units_from_mu
from pymc_dp.privacy.preparation import Preparation
from pymc_dp.publication.results import unconstrain
from pymc_dp.records import Records, extract
from pymc_dp.report.advice import score_norms
from pymc_dp.report.diagnostics.draws import numbers
from pymc_dp.rows.contributions import Score
from pymc_dp.rows.interfaces import Coordinates
from pymc_dp.steps.settings import positive, scaling_matrix

#: The last bin of a histogram of norms begins here (`pymc_dp.privacy.answer.EDGES`).
_LAST_EDGE = 2.0**60


def clipping_report(
    model: Model | None = None,
    *,
    scaling: Any,
    clip_norm: float | Sequence[float],
    data: Mapping[str, Any] | None = None,
    draws: int = 200,
    random_seed: int | None = None,
    epsilon: float | None = None,
    at: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Share of records whose score would be clipped: simulated, or bought as a noisy count.

    Parameters
    ----------
    model : pymc.Model, optional
        Default: the model of the context.
    scaling : float, array or dict
        As the private step will have it: norms are in its coordinates z.
    clip_norm : float or sequence of float
        Bounds to report on; public.
    data, draws, random_seed
        Of the simulation, as in :func:`pymc_dp.clip_advice`.
    epsilon : float, optional
        Buy the count for the private records, for so much at the budget's delta if nothing else
        were released.  Default: simulate, and spend nothing.
    at : mapping of str to array, optional
        With `epsilon`: value of each free variable at which the scores are taken; public, or
        released, such as posterior means.  Default: the initial point of the model.

    Returns
    -------
    pandas.DataFrame
        One row for each clip norm.  ``clipped`` is the share of records above it.  Simulated:
        ``worst``, that share at the draw of the parameters where it is largest, and ``kept``, the
        sum of the clipped norms over the sum of all.  Bought: ``noise_sd``, the standard deviation
        of the noise on ``clipped``, which may be negative.

    Raises
    ------
    BudgetExceeded
        If the budget does not allow `epsilon`; no record was read.
    UnsafeModel
        If the model cannot be simulated without private features, or not be asked about records.
    ValueError
        If an argument is out of its range, or `epsilon` is given and the model has no budget.

    Notes
    -----
    *Guarantee.*  Without `epsilon`, a function of the model, the public arguments and the shapes of
    a row; nothing is charged.  With `epsilon`, each clip norm is one Gaussian release, charged
    before a record is read and shown in ``budget.table()``: a histogram with noise, of which the
    last bin counts the units whose score is at least `clip_norm`.

    *Assumptions.*  `clip_norm`, `scaling`, `data` and `at` are public or were released.

    *Weaknesses.*  Simulated records are what the model and its prior expect: where the prior is
    wide, most draws are far from the posterior and more is clipped there than in a run.  A bought
    count is about one point only.  A small share does not prove a small bias, which depends on
    how skewed the clipped part is: for the log-likelihood ratios of ``DPPenalty``, 0.5 % of skewed
    records can move a posterior mean by one standard deviation.
    """
    norms = np.array([positive("clip_norm", c) for c in np.atleast_1d(np.asarray(clip_norm))])
    model = pm.modelcontext(model)
    if epsilon is not None:
        return _bought(model, scaling, norms, check_epsilon(epsilon), at)
    if at is not None:
        raise ValueError("at is for bought counts: simulated records have the parameters drawn.")
    found = score_norms(model, scaling=scaling, data=data, draws=draws, random_seed=random_seed)
    everything = np.concatenate(found)
    whole = everything.sum()
    rows = [
        {
            "clipped": np.mean(everything > c),
            "worst": max(np.mean(x > c) for x in found),
            "kept": np.minimum(everything, c).sum() / whole if whole > 0 else 1.0,
        }
        for c in norms
    ]
    return pd.DataFrame(rows, index=pd.Index(norms, name="clip_norm"))


def _bought(
    model: Model, scaling: Any, norms: np.ndarray, epsilon: float, at: Mapping[str, Any] | None
) -> pd.DataFrame:
    budget = get_budget(model)
    if budget is None:
        raise ValueError(
            "epsilon is given, but the model has no budget to charge: "
            "dp.PrivacyBudget(epsilon=..., delta=...) in the model, or leave epsilon out."
        )
    budget.check_model(model)
    records = extract(model, **budget.secrecy)
    matrix = scaling_matrix(scaling, records.parameters, model)
    location = records.initial if at is None else _location(model, records, at)
    engine = records.engine(Coordinates(location, matrix), None)
    preparation = Preparation.begin(
        engine,
        budget.ledger,
        budget.account,
        sampler="clipping report",
        settings={"clip_norms": norms.tolist()},
        units=units_from_mu(mu_from_budget(epsilon, budget.delta)),
        neighboring=budget.neighboring,
        n_public=budget.n_public,
    )
    rows = []
    try:
        for c in norms:
            # scores so long that the last bin, and no other, holds those above the clip norm
            spec = Score(Coordinates(location, matrix * (_LAST_EDGE / c)))
            found = preparation.histogram(f"records above {c:g}", spec, 1.0 / len(norms))
            n = budget.n_public
            rows.append({"clipped": found.counts[-1] / n, "noise_sd": found.noise_sd / n})
    finally:
        preparation.finish()
    table = pd.DataFrame(rows, index=pd.Index(norms, name="clip_norm"))
    guarantee = "(epsilon, delta)-differential privacy" if preparation.secure else "none"
    table.attrs["privacy_guarantee"] = guarantee
    return table


def _location(model: Model, records: Records, at: Mapping[str, Any]) -> np.ndarray:
    """(d,) unconstrained parameters of a point."""
    names = [rv.name for rv in model.free_RVs]
    if set(at) != set(names):
        raise ValueError(f"at must give a value of each of {names}; it gives {sorted(at)}.")
    columns = {}
    for rv in model.free_RVs:
        value = numbers(f"at[{rv.name!r}]", at[rv.name])
        if rv.ndim != value.ndim:
            raise ValueError(f"at[{rv.name!r}] must have {rv.ndim} axes, not {value.ndim}.")
        axes = [f"{rv.name}_{k}" for k in range(value.ndim)]
        columns[rv.name] = (("chain", "draw", *axes), value[None, None])
    location = unconstrain(model, records.parameters, xr.Dataset(columns))[0, 0]
    if not np.isfinite(location).all():
        raise ValueError("at is on the boundary of the support of a variable, or not finite.")
    return location
