"""Rows of several arrays at once, within compiled loops.

The arrays of a tuple may differ in type, so loops over them are unrolled when they are compiled:
each function treats the first array and calls itself for the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

__all__ = ["copy_rows", "empty_rows", "first_rows"]

Arrays = tuple[np.ndarray, ...]


def copy_rows(source: Arrays, index: np.ndarray, target: Arrays, start: int) -> None:
    """target[k][start + i] = source[k][index[i]] for all arrays k and entries i of the index."""
    for x, y in zip(source, target, strict=True):
        y[start : start + len(index)] = x[index]


# numba wants the signatures of all implementations to be that of the overload, annotations included


@overload(copy_rows)
def _copy_rows(source: Any, index: Any, target: Any, start: Any) -> Any:
    def nothing(source: Any, index: Any, target: Any, start: Any) -> Any:
        return None

    def copy(source: Any, index: Any, target: Any, start: Any) -> Any:
        x, y = source[0], target[0]
        for i in range(index.shape[0]):
            y[start + i] = x[index[i]]
        copy_rows(source[1:], index, target[1:], start)

    return copy if len(source) else nothing


def first_rows(arrays: Arrays, stop: int) -> Arrays:
    """The first rows of all arrays, as views."""
    return tuple(x[:stop] for x in arrays)


@overload(first_rows)
def _first_rows(arrays: Any, stop: Any) -> Any:
    def nothing(arrays: Any, stop: Any) -> Any:
        return ()

    def view(arrays: Any, stop: Any) -> Any:
        return (arrays[0][:stop], *first_rows(arrays[1:], stop))

    return view if len(arrays) else nothing


def empty_rows(arrays: Arrays, n: int) -> Arrays:
    """Room for `n` rows like those of the arrays."""
    return tuple(np.zeros((n, *x.shape[1:]), x.dtype) for x in arrays)
