"""Compiled loops over rows.

Arrays are laid out (columns, rows), so that the innermost loop runs over rows and vectorises while
every row is still computed by the same sequence of operations, whatever its place: no ``fastmath``,
no matrix library, whose blocking may round a row differently at the edge of a block.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from pymc_dp._jit import compiled

__all__ = [
    "add_copies",
    "add_indexed",
    "add_products",
    "add_to_units",
    "clean",
    "dot_rows",
    "gather_dot",
    "linear_predictor",
]


@compiled(error_model="numpy")
def linear_predictor(design: ndarray, phi: ndarray, out: ndarray) -> None:
    """out[k, i] = sum_j design[j, i] * phi[j, k]."""
    p, n = design.shape
    for k in range(phi.shape[1]):
        for i in range(n):
            out[k, i] = 0.0
        for j in range(p):
            weight = phi[j, k]
            if weight != 0.0:
                for i in range(n):
                    out[k, i] += design[j, i] * weight


@compiled(error_model="numpy")
def clean(scores: ndarray) -> None:
    """Set scores that are not finite to 0, before any norm is taken (0 * inf is not a number)."""
    k, n = scores.shape
    for j in range(k):
        for i in range(n):
            if not math.fabs(scores[j, i]) < math.inf:
                scores[j, i] = 0.0


@compiled(error_model="numpy")
def add_products(
    vectors: ndarray,
    design: ndarray,
    scores: ndarray,
    starts: ndarray,
    columns: ndarray,
    values: ndarray,
) -> None:
    """vectors[c, i] += design[j, i] * scores[k, i] * B[j*K + k, c], with B in compressed rows."""
    p, n = design.shape
    width = scores.shape[0]
    for j in range(p):
        for k in range(width):
            row = j * width + k
            for t in range(starts[row], starts[row + 1]):
                c, value = columns[t], values[t]
                for i in range(n):
                    vectors[c, i] += design[j, i] * scores[k, i] * value


@compiled(error_model="numpy")
def add_copies(
    vectors: ndarray, scores: ndarray, starts: ndarray, columns: ndarray, values: ndarray
) -> None:
    """vectors[c, i] += scores[k, i] * B[k, c], with B in compressed rows."""
    width, n = scores.shape
    for k in range(width):
        for t in range(starts[k], starts[k + 1]):
            c, value = columns[t], values[t]
            for i in range(n):
                vectors[c, i] += scores[k, i] * value


@compiled(error_model="numpy")
def add_indexed(
    vectors: ndarray,
    labels: ndarray,
    size: int,
    scores: ndarray,
    starts: ndarray,
    columns: ndarray,
    values: ndarray,
) -> None:
    """vectors[c, i] += scores[k, i] * B[label_i*K + k, c], with B in compressed rows."""
    width, n = scores.shape
    for i in range(n):
        label = labels[i] if labels[i] >= 0 else labels[i] + size
        for k in range(width):
            row = label * width + k
            for t in range(starts[row], starts[row + 1]):
                vectors[columns[t], i] += scores[k, i] * values[t]


@compiled(error_model="numpy")
def dot_rows(scores: ndarray, etas: ndarray, out: ndarray) -> None:
    """out[i] += sum_k scores[k, i] * etas[k, i]."""
    width, n = scores.shape
    for k in range(width):
        for i in range(n):
            out[i] += scores[k, i] * etas[k, i]


@compiled(error_model="numpy")
def gather_dot(scores: ndarray, labels: ndarray, phi: ndarray, out: ndarray) -> None:
    """out[i] += sum_k scores[k, i] * phi[label_i, k]."""
    size, width = phi.shape
    for i in range(labels.shape[0]):
        label = labels[i] if labels[i] >= 0 else labels[i] + size
        for k in range(width):
            out[i] += scores[k, i] * phi[label, k]


@compiled(error_model="numpy")
def add_to_units(rows: ndarray, units: ndarray, out: ndarray) -> None:
    """out[:, units[i]] += rows[:, i], in the order of the rows."""
    d, n = rows.shape
    for j in range(d):
        for i in range(n):
            out[j, units[i]] += rows[j, i]


def compressed_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row starts, column numbers and values of the nonzero entries of a matrix."""
    rows, columns = np.nonzero(matrix)
    starts = np.searchsorted(rows, np.arange(matrix.shape[0] + 1))
    return starts.astype(np.int64), columns.astype(np.int64), matrix[rows, columns]
