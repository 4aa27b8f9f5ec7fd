"""Expectations and ordinary draws from chains whose draws have signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import check_probability

MIN_POSITIVE = 0.9  # least tau, part of positive signs: variances grow by (2 tau - 1)^-2, 1.6


def _signed_draws(idata: Any, min_positive: float) -> tuple[xr.Dataset, xr.DataArray]:
    least = check_probability("min_positive", min_positive)
    if "sample_stats" not in _compat.group_names(idata) or "sign" not in (
        stats := _compat.group(idata, "sample_stats")
    ):
        raise ValueError(
            "idata has no statistic `sign` in sample_stats. Sample with "
            "step=dp.HMCECS(estimator='signed')."
        )
    sign = stats["sign"]
    positive = float((sign > 0).mean())
    if positive < least:
        raise ValueError(
            f"Only {positive:.3f} of the signs are positive (tau), below {least}: signs cancel, "
            "and estimates are mostly noise. Sample with a larger subsample_size, order=2, or the "
            "default reference; min_positive lowers the limit."
        )
    return _compat.group(idata, "posterior"), sign


def signed_expectation(
    idata: Any, f: Callable[[xr.Dataset], Any], *, min_positive: float = MIN_POSITIVE
) -> Any:
    """Posterior expectation from signed draws: the ratio of sum f s to sum s.

    Parameters
    ----------
    idata : arviz.InferenceData or xarray.DataTree
        From ``pm.sample(step=dp.HMCECS(estimator="signed"))``.
    f : callable
        From the posterior data set, with dims chain and draw, to a data array or data set with
        these dims: ``lambda x: x["beta"]``, ``lambda x: x["beta"] > 0``.  Draws that it leaves out
        do not count.
    min_positive : float, default 0.9
        Least part of positive signs.

    Returns
    -------
    xarray.DataArray or xarray.Dataset
        Without the dims chain and draw.  The part of positive signs is in its attribute ``tau``.

    Raises
    ------
    ValueError
        If there are no signs, too few of them are positive, or `f` leaves no dims chain and draw,
        or others than it was given.

    Notes
    -----
    *Guarantee.*  Consistent: no bias is left from subsampling (eq. 5.3 of Dang et al. 2019).

    *Weaknesses.*  The variance grows as (2 tau - 1)^-2, tau being the part of positive signs.

    References
    ----------
    Lyne, Girolami, Atchadé, Strathmann & Simpson (2015); Dang et al. (2019), Section 5.
    """
    posterior, sign = _signed_draws(idata, min_positive)
    values = f(posterior)
    dims = ("chain", "draw")
    if not set(dims) <= set(getattr(values, "dims", ())):
        raise ValueError(
            "f must return values for every draw, with the dims chain and draw: signs weigh the "
            "draws, so means cannot be taken before."
        )
    # f may have left draws out
    weights = sign.sel({dim: values[dim] for dim in dims if dim in values.coords})
    if any(values.sizes[dim] != weights.sizes[dim] for dim in dims):
        raise ValueError(
            "f returned other chains or draws than it was given: keep the coordinates chain and "
            "draw of those that are left."
        )
    if not float(weights.sum(dims)) > 0.0:
        raise ValueError(
            "There are no more positive signs than negative ones, so no expectation is left. "
            "Sample with a larger subsample_size."
        )
    found = (values * weights).sum(dims, skipna=False) / weights.sum(dims)
    found.attrs["tau"] = float((weights > 0).mean())
    return found


def resample_signed(
    idata: Any,
    *,
    draws: int | None = None,
    min_positive: float = MIN_POSITIVE,
    random_seed: Any = None,
) -> Any:
    """Ordinary draws from signed ones, for programs that know nothing of signs.

    Parameters
    ----------
    idata : arviz.InferenceData or xarray.DataTree
        From ``pm.sample(step=dp.HMCECS(estimator="signed"))``.
    draws : int, optional
        Per chain; default: the fewest, over chains, by which positive draws exceed negative ones.
    min_positive : float, default 0.9
        Least part of positive signs.
    random_seed : int or Generator, optional

    Returns
    -------
    arviz.InferenceData (PyMC 5) or xarray.DataTree (PyMC 6)
        With the group ``posterior``.

    Raises
    ------
    ValueError
        If there are no signs, too few are positive (in any chain no more than negative), or more
        draws are asked for than are left.

    Notes
    -----
    *Guarantee.*  Exact if all signs are positive: draws are returned as they are.

    *Weaknesses.*  Draws cannot have negative weight, so each negative draw is left out together
    with the nearest positive draw of its chain, in units of standard deviations.  Where many signs
    are negative the draws are too wide (1.4 times the variance with 28 % of them, in one
    experiment).  :func:`signed_expectation` does not have this bias.
    """
    posterior, sign = _signed_draws(idata, min_positive)
    rng = np.random.default_rng(random_seed)
    keep = [_unmatched(posterior, sign, chain) for chain in range(sign.sizes["chain"])]
    least = min(len(index) for index in keep)
    if draws is not None and not 0 < draws <= least:
        raise ValueError(f"draws must be between 1 and {least}, the draws left of each chain.")
    size = least if draws is None else draws
    chosen = [np.sort(rng.choice(index, size, replace=False)) for index in keep]
    parts = [posterior.isel(chain=[c], draw=index) for c, index in enumerate(chosen)]
    parts = [part.assign_coords(draw=np.arange(size)) for part in parts]
    return _compat.inference_data(
        {"posterior": xr.concat(parts, dim="chain")}, _compat.attributes(idata)
    )


def _unmatched(posterior: xr.Dataset, sign: xr.DataArray, chain: int) -> np.ndarray:
    """Positive draws of a chain, without the nearest one to each negative draw."""
    signs = sign.isel(chain=chain).values
    if (signs > 0).sum() <= (signs < 0).sum():
        raise ValueError(
            f"Chain {chain} has no more positive signs than negative ones, so no draws are left of "
            "it. Sample with a larger subsample_size, or leave the chain out."
        )
    columns = [
        x.isel(chain=chain).values.reshape(len(signs), -1) for x in posterior.data_vars.values()
    ]
    values = np.concatenate(columns, axis=1).astype("float64")
    values = values[:, np.isfinite(values).all(axis=0)]
    spread = values.std(axis=0)
    values = values / np.where(spread > 0, spread, 1.0)
    left = list(np.flatnonzero(signs > 0))
    for negative in np.flatnonzero(signs < 0):
        distances = ((values[left] - values[negative]) ** 2).sum(axis=1)
        del left[int(np.argmin(distances))]
    return np.array(left)
