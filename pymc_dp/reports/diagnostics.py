"""What can be said about draws beside R-hat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy.spatial.distance import cdist

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import check_positive

# -- draws in any form ----------------------------------------------------------------------------


def is_labelled(draws: Any) -> bool:
    """Whether draws have names: a result of ``pm.sample``, or a data set."""
    return isinstance(draws, xr.Dataset) or _compat.is_result(draws)


def dataset_of(name: str, draws: Any, groups: Sequence[str] = ("posterior",)) -> xr.Dataset:
    """The first of `groups` that a result has, or the data set itself."""
    if isinstance(draws, xr.Dataset):
        return draws
    for group in groups:
        if group in _compat.group_names(draws):
            return _compat.group(draws, group)
    raise ValueError(f"{name} has none of the groups {list(groups)}.")


def draws_of(
    name: str,
    draws: Any,
    var_names: str | Sequence[str] | None,
    groups: Sequence[str] = ("posterior",),
) -> dict[str, xr.DataArray]:
    """(chains, draws, ...) values of each variable, by default of all; an array is called x."""
    if not is_labelled(draws):
        if var_names is not None:
            raise ValueError(f"var_names are for labelled draws; {name} is an array.")
        values = numbers(name, draws)
        if values.ndim not in (2, 3):
            raise ValueError(
                f"{name} must have shape (chains, draws) or (chains, draws, d); got {values.shape}."
            )
        return {"x": xr.DataArray(values, dims=("chain", "draw", "entry")[: values.ndim], name="x")}
    dataset = dataset_of(name, draws, groups)
    var_names = [var_names] if isinstance(var_names, str) else var_names
    found = {}
    for variable in list(dataset) if var_names is None else var_names:
        if variable not in dataset:
            raise ValueError(f"{name} has no variable {variable!r}; it has {list(dataset)}.")
        if not {"chain", "draw"} <= set(dataset[variable].dims):
            raise ValueError(f"{name}: {variable!r} lacks the dims 'chain' and 'draw'.")
        found[variable] = dataset[variable].transpose("chain", "draw", ...)
    return found


def entries(array: xr.DataArray) -> Iterator[tuple[str, np.ndarray]]:
    """Name, as ArviZ calls it, and (chains, draws) values of each entry of a variable."""
    values, axes = array.values.astype("float64"), [array[dim].values for dim in array.dims[2:]]
    for where in np.ndindex(values.shape[2:]):
        place = ", ".join(str(axis[k]) for axis, k in zip(axes, where, strict=True))
        yield f"{array.name}[{place}]" if where else str(array.name), values[(..., *where)]


def numbers(name: str, draws: Any) -> np.ndarray:
    """An array of numbers, or a ValueError that names the argument."""
    try:
        return np.asarray(draws, dtype="float64")
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be an array of numbers, an xarray.Dataset or a result of pm.sample, "
            f"not {type(draws).__name__}."
        ) from None


# -- what one independent draw costs --------------------------------------------------------------


def inefficiency(
    draws: Any,
    evaluations: float | None = None,
    *,
    signs: Any = None,
    var_names: str | Sequence[str] | None = None,
) -> pd.DataFrame:
    """Draws, and evaluations, that one independent draw costs.

    Parameters
    ----------
    draws : array, xarray.Dataset, arviz.InferenceData or xarray.DataTree
        Arrays have shape (chains, draws) or (chains, draws, d).  The group ``posterior_raw`` of a
        released result is taken where there is one: noise-aware draws are no Markov chain.
    evaluations : float, optional
        Evaluations of the density or of its gradient for one record, over the whole run.
    signs : array, optional
        (chains, draws) signs of the likelihood estimates, for signed HMC-ECS.
    var_names : str or sequence of str, optional
        Variables of labelled draws; default: all.

    Returns
    -------
    pandas.DataFrame
        One row for each scalar parameter, with the columns ``ess``, the effective sample size over
        all chains; ``inefficiency``, IF = draws / ESS; and, with `evaluations`,
        ``computational_time``.

    Raises
    ------
    ValueError
        If shapes do not fit or an argument is out of its range.

    Notes
    -----
    Dang et al. (2019): the inefficiency factor IF is the number of draws that are worth one
    independent draw.  The computational time CT = IF x evaluations (eq. 3.2), or with a share tau
    of positive signs IF / (2 tau - 1)² x evaluations (eq. 5.4), compares runs of equally many draws
    whatever the implementation, as the ratio of their CT (eq. 6.1).

    *Weaknesses.*  The paper estimates IF with the spectral density at 0 (R package coda); here it
    is ArviZ's rank-normalised bulk ESS.  Bias of the draws is not in it.

    Examples
    --------
    >>> import numpy as np, pymc_dp as dp
    >>> x = np.random.default_rng(1).normal(size=(4, 1000))
    >>> bool(abs(dp.inefficiency(x).inefficiency["x"] - 1.0) < 0.2)
    True
    """
    variables = draws_of("draws", draws, var_names, ("posterior_raw", "posterior"))
    columns = dict(entry for array in variables.values() for entry in entries(array))
    if not columns:
        raise ValueError("draws has no variables.")
    values = np.stack(list(columns.values()), axis=-1)
    ess, size = _compat.effective_draws(values), values.shape[0] * values.shape[1]
    table = pd.DataFrame({"ess": ess, "inefficiency": size / ess}, index=list(columns))
    if evaluations is not None:
        cost = check_positive("evaluations", evaluations)
        loss = 1.0 if signs is None else _sign_loss(signs, values.shape[:2])
        table["computational_time"] = table["inefficiency"] * cost / loss
    elif signs is not None:
        raise ValueError("signs change the computational time alone: pass evaluations as well.")
    return table


def _sign_loss(signs: Any, shape: tuple[int, ...]) -> float:
    """(2 tau - 1)², with tau the share of positive signs."""
    values = numbers("signs", signs)
    if values.shape != shape or not np.isin(values, (-1.0, 1.0)).all():
        raise ValueError(f"signs must be 1 or -1, of shape {shape}.")
    loss = (2.0 * float(np.mean(values > 0)) - 1.0) ** 2
    if loss == 0:
        raise ValueError("As many signs are negative as positive: no mean can be estimated.")
    return loss


# -- how far draws are from a reference -----------------------------------------------------------


_LARGEST = 2000  # more draws than this are thinned before distances are taken
_PAIRS = 500


def mmd(
    sample: Any,
    reference: Any,
    *,
    var_names: str | Sequence[str] | None = None,
    random_seed: int = 0,
) -> float:
    """Maximum mean discrepancy of draws from reference draws, with a kernel of median width.

    Parameters
    ----------
    sample, reference : array, xarray.Dataset, arviz.InferenceData or xarray.DataTree
        Arrays of draws have shape (k,) or (k, d), or (chains, draws, d).  The group ``posterior``
        of a result is taken.
    var_names : str or sequence of str, optional
        Variables of labelled draws, in the order of the columns of an array beside them.  Default:
        those of `sample`, or of `reference` if `sample` is an array.
    random_seed : int, default 0
        Of the 500 pairs whose median distance is the width of the kernel.

    Returns
    -------
    float
        Square root of the absolute value of the unbiased estimate of the squared discrepancy, with
        the kernel ``exp(-|x - y|²/(2 w²))``, as Räisä et al. (2021) report it.  About 0.016 for two
        sets of 1000 independent draws of one law; at most sqrt(2).

    Raises
    ------
    ValueError
        If shapes or variables do not match, a draw is not finite, or nothing varies.

    Notes
    -----
    *Assumptions.*  `reference` holds draws of the distribution that is meant, independent or
    nearly so.  Variables are comparable in scale: one that is much wider than the others decides.

    *Weaknesses.*  Blind to wrong variances in all but the widest directions: look at ratios of
    standard deviations beside it.  More than 2000 draws are thinned to at most 2000.

    Both arguments may be private; the result is private then, too.

    Examples
    --------
    >>> import numpy as np, pymc_dp as dp
    >>> rng = np.random.default_rng(1)
    >>> x, y = rng.normal(size=(2, 1000, 3))
    >>> dp.mmd(x, y) < 0.05, dp.mmd(x, y + 1.0) > 0.4
    (True, True)
    """
    if not is_labelled(sample) and not is_labelled(reference) and var_names is not None:
        raise ValueError("var_names are for labelled draws; sample and reference are arrays.")
    if var_names is None and is_labelled(sample):
        var_names = list(dataset_of("sample", sample))
    one, two = _rows("sample", sample, var_names), _rows("reference", reference, var_names)
    if one.shape[1] != two.shape[1]:
        raise ValueError(
            f"sample has {one.shape[1]} columns and reference {two.shape[1]}: pass the same "
            "variables, or var_names."
        )
    return _discrepancy(one, two, np.random.default_rng(random_seed))


def _rows(name: str, draws: Any, var_names: str | Sequence[str] | None) -> np.ndarray:
    """(k, d) draws of all chains."""
    if is_labelled(draws):
        variables = draws_of(name, draws, var_names).values()
        values = np.stack([x.ravel() for array in variables for _, x in entries(array)], axis=1)
    else:
        values = numbers(name, draws)
        if not 1 <= values.ndim <= 3:
            raise ValueError(
                f"{name} must have shape (draws,), (draws, d) or (chains, draws, d); got "
                f"{values.shape}."
            )
        values = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
    if len(values) < 2 or not np.isfinite(values).all():
        raise ValueError(f"{name} must hold at least two draws, all of them finite.")
    return values


def _discrepancy(one: np.ndarray, two: np.ndarray, rng: np.random.Generator) -> float:
    one, two = (x[:: -(-len(x) // _LARGEST)] for x in (one, two))
    i, j = rng.integers(0, len(one), _PAIRS), rng.integers(0, len(two), _PAIRS)
    width = np.median(np.linalg.norm(one[i] - two[j], axis=1))
    if width == 0:
        raise ValueError("Most draws of sample and reference are the same point.")

    def mean(x: np.ndarray, y: np.ndarray, diagonal: float) -> float:
        values = np.exp(-cdist(x, y, "sqeuclidean") / (2.0 * width**2))
        return float((values.sum() - diagonal) / (values.size - diagonal))

    within = mean(one, one, len(one)) + mean(two, two, len(two))
    return float(np.sqrt(np.abs(within - 2.0 * mean(one, two, 0.0))))
