"""The posterior mean from the scores released along Langevin paths: better than the draws' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from pymc.model import Model

from pymc_dp.base import compat as _compat
from pymc_dp.budget import get_budget, model_of
from pymc_dp.errors import UnsafeRelease
from pymc_dp.publication.results import constrain, unconstrain
from pymc_dp.publication.statement import STATEMENT, refuse_other_types
from pymc_dp.records.extraction import extract


def newton_estimate(midpoint: np.ndarray, score: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """Estimate of the posterior mean by a Newton step: midpoint + Lambda^-1 score.

    Midpoint and score, (..., d), are means over the mid-points of a path and over the scores
    released there, the prior's included. Lambda, (d, d) or (d,), is the posterior precision, from
    public knowledge or releases. With the exact one of a normal posterior, the result is the
    posterior mean plus the noise of one release, wherever the path ran. Whatever Lambda is, there
    is no bias: over a stationary chain the score has mean 0 and the result that of the mid-points.
    """
    if precision.ndim == 1:
        return midpoint + score / precision
    return midpoint + np.linalg.solve(precision, score[..., None])[..., 0]


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
    and as friction. The mean of ``newton_estimate`` over iterations is the estimate for the
    unconstrained parameters; the draws are moved there together, and the means of their constrained
    values are returned. The standard error is that of the Newton estimates, carried over by
    regression of the variable on the unconstrained parameters.

    *Assumptions.* The posterior is smooth and the chains are stationary.

    *Weaknesses.* The gain is large with fresh momentum or much public friction; with persistent
    momentum and no public friction, which adds the scores up by itself, it is a few per cent. The
    error is that of the chains, as is ArviZ's ``mcse``: the noise of an anchored score is not in
    it, but in the spread of noise-aware draws.
    """
    refuse_other_types(idata)
    if STATEMENT not in _compat.attributes(idata):
        raise UnsafeRelease("Release the draws first: dp.release(idata, model).")
    model = model_of(model)
    stats = _compat.group(idata, "sample_stats")
    if "dp_newton" not in stats:
        raise ValueError(
            "idata has no dp_newton: its chains released no scores whose mean estimates that of "
            "the posterior. Only those of DPLangevin do, unless they draw from a target that is "
            "public as a whole. Average the draws instead."
        )
    posterior = _compat.group(idata, "posterior")
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
