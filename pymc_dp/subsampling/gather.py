"""All records as rows of one matrix, and samples of them as arrays that loops read in order.

A record is a row: first its design, of which its linear predictors are products, then its other
numbers. A sample is copied when it is drawn, not when it is used: a row is read from one place of
memory. Its designs stay rows; each other number becomes an array over the sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled

#: (m, p) designs and (k, m) other numbers of m records.
Sample = tuple[ndarray, ndarray]
#: Rows that are filled at once.
_BLOCK = 2**14


def packed(arrays: Sequence[ndarray], room: int = 0) -> ndarray:
    """(n, k + room) float64 matrix of (n, ...) arrays side by side."""
    n = len(arrays[0])
    flat = [x.reshape(n, -1) for x in arrays]
    rows = np.empty((n, sum(x.shape[1] for x in flat) + room))
    for first in range(0, n, _BLOCK):  # all columns of a row while it is in a cache
        here, start = slice(first, first + _BLOCK), 0
        for x in flat:
            rows[here, start : start + x.shape[1]] = x[here]
            start += x.shape[1]
    return rows


def empty_sample(rows: ndarray, width: int, size: int) -> Sample:
    """Room for `size` records whose designs have `width` numbers."""
    return np.zeros((size, width)), np.zeros((rows.shape[1] - width, size))


def drawn(rows: ndarray, width: int, index: ndarray) -> Sample:
    """The records of an index."""
    sample = empty_sample(rows, width, len(index))
    gather(rows, index, sample, 0)
    return sample


@compiled(error_model="numpy")
def gather(rows: ndarray, index: ndarray, sample: Sample, start: int) -> None:
    """Copy the records of an index to the places `start` and on of a sample."""
    design, numbers = sample
    width = design.shape[1]
    for i in range(index.shape[0]):
        row = rows[index[i]]
        for j in range(width):
            design[start + i, j] = row[j]
        for j in range(numbers.shape[0]):
            numbers[j, start + i] = row[width + j]


@compiled(error_model="numpy")
def move(source: Sample, first: int, count: int, target: Sample, start: int) -> None:
    """Copy `count` records of a sample, from `first` on, to `start` and on of another."""
    for i in range(count):
        for j in range(source[0].shape[1]):
            target[0][start + i, j] = source[0][first + i, j]
    for j in range(source[1].shape[0]):
        for i in range(count):
            target[1][j, start + i] = source[1][j, first + i]


@compiled(error_model="numpy")
def first_records(sample: Sample, stop: int) -> Sample:
    """The first records of a sample."""
    return sample[0][:stop], np.ascontiguousarray(sample[1][:, :stop])
