"""How far draws are from a reference posterior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from pymc_dp.report.diagnostics.draws import dataset_of, is_labelled, names_of, numbers, variables

#: More draws than this are thinned before distances are taken.
_LARGEST = 2000
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
    names: list[str] = []
    for name, draws in (("sample", sample), ("reference", reference)):
        if is_labelled(draws):
            names = names_of(var_names, list(dataset_of(name, draws, ["posterior"])))
            break
    else:
        if var_names is not None:
            raise ValueError("var_names are for labelled draws; sample and reference are arrays.")
    one, two = _rows("sample", sample, names), _rows("reference", reference, names)
    if one.shape[1] != two.shape[1]:
        raise ValueError(
            f"sample has {one.shape[1]} columns and reference {two.shape[1]}: pass the same "
            "variables, or var_names."
        )
    return _discrepancy(one, two, np.random.default_rng(random_seed))


def _rows(name: str, draws: Any, var_names: Sequence[str]) -> np.ndarray:
    """(k, d) draws of all chains."""
    if is_labelled(draws):
        dataset = dataset_of(name, draws, ["posterior"])
        flat = [x.reshape(x.shape[0] * x.shape[1], -1) for x in variables(name, dataset, var_names)]
        values = np.concatenate(flat, axis=1).astype("float64")
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
