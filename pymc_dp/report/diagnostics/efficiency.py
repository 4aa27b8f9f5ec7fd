"""What one independent draw costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from pymc_dp.base import compat as _compat
from pymc_dp.report.diagnostics.draws import dataset_of, is_labelled, names_of, numbers, variables
from pymc_dp.steps.settings import positive


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
    independent draw, and the computational time CT = IF x evaluations (eq. 3.2) compares runs of
    equally many draws whatever the implementation.  With signs, CT = IF / (2 tau - 1)² x
    evaluations (eq. 5.4), tau being the share of positive signs.  The relative computational time
    of two algorithms is the ratio of their CT (eq. 6.1).

    *Weaknesses.*  The paper estimates IF with the spectral density at 0 (R package coda); here it
    is ArviZ's rank-normalised bulk ESS.  Bias of the draws is not in it.

    Examples
    --------
    >>> import numpy as np, pymc_dp as dp
    >>> x = np.random.default_rng(1).normal(size=(4, 1000))
    >>> bool(abs(dp.inefficiency(x).inefficiency["x"] - 1.0) < 0.2)
    True
    """
    if is_labelled(draws):
        dataset = dataset_of("draws", draws, ["posterior_raw", "posterior"])
        names = names_of(var_names, list(dataset))
        columns = dict(zip(names, variables("draws", dataset, names), strict=True))
    else:
        if var_names is not None:
            raise ValueError("var_names are for labelled draws; draws is an array.")
        values = numbers("draws", draws)
        if values.ndim not in (2, 3):
            raise ValueError(
                f"draws must have shape (chains, draws) or (chains, draws, d); got {values.shape}."
            )
        columns = {"x": values}
    if not columns:
        raise ValueError("draws has no variables.")
    index = [label for name, x in columns.items() for label in _labels(name, x.shape[2:])]
    flat = [x.reshape(*x.shape[:2], -1).astype("float64") for x in columns.values()]
    ess = np.concatenate([_compat.effective_draws(x) for x in flat])
    size = flat[0].shape[0] * flat[0].shape[1]
    table = pd.DataFrame({"ess": ess, "inefficiency": size / ess}, index=index)
    if evaluations is not None:
        cost = positive("evaluations", evaluations)
        table["computational_time"] = table["inefficiency"] * cost / _sign_loss(signs, flat[0])
    elif signs is not None:
        raise ValueError("signs change the computational time alone: pass evaluations as well.")
    return table


def _labels(name: str, shape: tuple[int, ...]) -> list[str]:
    """beta[0], beta[1], ..., as ArviZ calls the entries of a variable."""
    if not shape:
        return [name]
    return [f"{name}[{', '.join(map(str, where))}]" for where in np.ndindex(shape)]


def _sign_loss(signs: Any, draws: np.ndarray) -> float:
    """(2 tau - 1)², with tau the share of positive signs."""
    if signs is None:
        return 1.0
    values = numbers("signs", signs)
    if values.shape != draws.shape[:2] or not np.isin(values, (-1.0, 1.0)).all():
        raise ValueError(f"signs must be 1 or -1, of shape {draws.shape[:2]}.")
    loss = (2.0 * float(np.mean(values > 0)) - 1.0) ** 2
    if loss == 0:
        raise ValueError("As many signs are negative as positive: no mean can be estimated.")
    return loss
