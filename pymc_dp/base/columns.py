"""Columns of data frames, of pandas or polars, as NumPy arrays; errors name the column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

#: What to write in place of a column that holds no numbers, by the kind of its type.
_INSTEAD = {
    "M": "dates. Write days since a public date: "
    "(column - pd.Timestamp('2020-01-01')).dt.days.to_numpy()",
    "m": "time differences. Write them as a number: column.dt.total_seconds().to_numpy()",
    "O": "labels or other objects. Write labels as positions in a public list, "
    "pd.Categorical(column, categories=[...]).codes, and numbers as column.to_numpy('float64')",
}


def is_frame(given: Any) -> bool:
    """Whether this is a data frame, of whichever library."""
    return hasattr(given, "columns") and hasattr(given, "to_numpy")


def named(given: Any) -> Any:
    """The columns of a data frame by name; anything else as it is."""
    if not is_frame(given):
        return given
    names = [str(name) for name in given.columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"The data frame has several columns named {twice}. Rename them.")
    return {str(name): given[name] for name in given.columns}


def _kind(dtype: Any) -> str:
    """As of NumPy, of the type of a column, which for one of text is that of objects."""
    kind = getattr(dtype, "kind", None)
    if kind is None and hasattr(dtype, "is_temporal"):  # polars
        kind = "f" if dtype.is_numeric() or str(dtype) == "Boolean" else "O"
        kind = "M" if dtype.is_temporal() else kind
    return kind if kind in ("b", "i", "u", "f", "M", "m") else "O"


def numbers(label: str, given: Any) -> np.ndarray:
    """An array of numbers, of an array, of a column, or of a data frame as a matrix.

    Its type depends on that of the column alone: one that can be without a value comes as reals,
    NaN where there is none.  ValueError, with `label`, for what holds no numbers.
    """
    if is_frame(given):
        columns = named(given).items()
        return np.column_stack([numbers(f"{label}[{name!r}]", column) for name, column in columns])
    if isinstance(given, np.ma.MaskedArray):
        raise ValueError(f"{label} is a masked array. Fill it, or leave out rows without a value.")
    if not hasattr(given, "dtype"):
        given = np.asarray(given)
    dtype = given.dtype
    kind = _kind(dtype)
    if kind in _INSTEAD:
        raise ValueError(f"{label} holds {_INSTEAD[kind]}.")
    if isinstance(dtype, np.dtype):
        return np.asarray(given)
    if hasattr(dtype, "kind"):  # pandas
        return given.to_numpy(dtype="float64", na_value=np.nan)
    return given.cast(float).to_numpy()


def codes_of_ids(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """(n,) integers for each column of ids, by name: equal where the ids are.

    Ids are integers, text, or anything else that is equal or not; all of one kind, as "7" is not
    7.  ValueError, with the name and without an id, for other columns.
    """
    columns = {}
    for name, ids in given.items():
        whole = isinstance(getattr(ids, "dtype", None), np.dtype) and ids.dtype.kind in "iu"
        column = columns[name] = np.asarray(ids) if whole else np.asarray(ids, dtype=object)
        if column.ndim != 1 or isinstance(ids, np.ma.MaskedArray):
            raise ValueError(
                f"privacy_unit of `{name}` must be one vector of ids, or one column, such as "
                f"df['person']; got {type(ids).__name__} with {column.ndim} axes."
            )
        if not whole and pd.isna(column).any():
            raise ValueError(
                f"privacy_unit of `{name}` lacks the ids of some rows. Give each row the id of its "
                "person, or leave these rows out."
            )
    if all(column.dtype != object for column in columns.values()):
        return {name: column.astype("int64") for name, column in columns.items()}
    joint = np.concatenate([column.astype(object) for column in columns.values()])
    alike = {np.integer: int, str: str}  # NumPy has types of its own
    kinds = {
        next((one for of, one in alike.items() if issubclass(kind, of)), kind)
        for kind in set(map(type, joint))
    }
    what = f"privacy_unit of {', '.join(f'`{name}`' for name in columns)}"
    if len(kinds) > 1:
        raise ValueError(
            f"{what} has ids of several kinds ({', '.join(sorted(k.__name__ for k in kinds))}), so "
            "that one person may have two. Make them alike: df['person'].astype(str)."
        )
    try:
        if any(issubclass(kind, float | np.floating | bool | np.bool_) for kind in kinds):
            raise TypeError
        codes = pd.factorize(joint)[0].astype("int64")
    except TypeError:
        raise ValueError(
            f"{what} must be ids, integers or text, not of type {kinds.pop().__name__}. Write "
            "whole numbers that came as reals as df['person'].astype('int64')."
        ) from None
    ends = np.cumsum([len(column) for column in columns.values()])
    return dict(zip(columns, np.split(codes, ends[:-1]), strict=True))
