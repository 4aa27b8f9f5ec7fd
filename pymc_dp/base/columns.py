"""Columns of data frames, of pandas or polars, as NumPy arrays; errors name the column."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    columns = {str(name): given[name] for name in given.columns}
    if len(columns) < len(given.columns):
        raise ValueError(f"Of the columns {list(columns)} some have one name. Rename them.")
    return columns


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
