"""Draws in any form: arrays, data sets, results of ``pm.sample``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from pymc_dp.base import compat as _compat


def dataset_of(name: str, draws: Any, groups: Sequence[str]) -> xr.Dataset:
    """The first of `groups` that a result has, or the data set itself."""
    if isinstance(draws, xr.Dataset):
        return draws
    for group in groups:
        if group in _compat.group_names(draws):
            return _compat.group(draws, group)
    raise ValueError(f"{name} has none of the groups {list(groups)}.")


def is_labelled(draws: Any) -> bool:
    """Whether draws have names: a result of ``pm.sample``, or a data set."""
    return isinstance(draws, xr.Dataset) or _compat.is_result(draws)


def variables(name: str, dataset: xr.Dataset, var_names: Sequence[str]) -> Iterator[np.ndarray]:
    """(chains, draws, ...) values of each variable."""
    for variable in var_names:
        if variable not in dataset:
            raise ValueError(f"{name} has no variable {variable!r}; it has {list(dataset)}.")
        if not {"chain", "draw"} <= set(dataset[variable].dims):
            raise ValueError(f"{name}: {variable!r} lacks the dims 'chain' and 'draw'.")
        yield np.asarray(dataset[variable].transpose("chain", "draw", ...).values)


def names_of(var_names: str | Sequence[str] | None, otherwise: Sequence[str]) -> list[str]:
    """`var_names` as a list, or all others."""
    if var_names is None:
        return list(otherwise)
    return [var_names] if isinstance(var_names, str) else list(var_names)


def numbers(name: str, draws: Any) -> np.ndarray:
    """An array of numbers, or a ValueError that names the argument."""
    try:
        return np.asarray(draws, dtype="float64")
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be an array of numbers, an xarray.Dataset or a result of pm.sample, "
            f"not {type(draws).__name__}."
        ) from None
