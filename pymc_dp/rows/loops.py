"""Compiled loops over rows.

Arrays are (columns, rows): the innermost loop runs over rows and vectorises.  Each row has the same
operations wherever it stands: no ``fastmath``, no matrix library, whose rounding depends on place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled

_TILE = 512  # rows of a tile: the columns of a block then stay in the fastest caches
_PACKED, _SHORTEST = 2**16, 64  # numbers of a block of packed matrices: second cache; least rows
_ROOT_2 = math.sqrt(2.0)
Compressed = tuple[np.ndarray, np.ndarray, np.ndarray]


@compiled(error_model="numpy")
def nonzero(weights: ndarray, used: ndarray) -> int:
    """Put the places of the weights that are not 0 first in `used`; how many there are."""
    count = 0
    for j in range(weights.shape[0]):
        if weights[j] != 0.0:
            used[count] = j
            count += 1
    return count


@compiled(error_model="numpy")
def combine(
    vectors: ndarray, first: int, weights: ndarray, used: ndarray, count: int, out: ndarray
) -> None:
    """out[i] = sum_j vectors[j, first + i] * weights[j], j in ``used[:count]``, in one order."""
    n = out.shape[0]
    for i in range(n):
        out[i] = 0.0
    fours = count // 4 * 4
    for t in range(0, fours, 4):
        a, b, c, d = used[t], used[t + 1], used[t + 2], used[t + 3]
        wa, wb, wc, wd = weights[a], weights[b], weights[c], weights[d]
        xa, xb = vectors[a, first : first + n], vectors[b, first : first + n]
        xc, xd = vectors[c, first : first + n], vectors[d, first : first + n]
        for i in range(n):
            out[i] += (xa[i] * wa + xb[i] * wb) + (xc[i] * wc + xd[i] * wd)
    for t in range(fours, count):
        w, x = weights[used[t]], vectors[used[t], first : first + n]
        for i in range(n):
            out[i] += x[i] * w


@compiled(error_model="numpy")
def linear_predictor(design: ndarray, first: int, phi: ndarray, out: ndarray) -> None:
    """out[k, i] = sum_j design[j, first + i] * phi[j, k]."""
    n = out.shape[1]
    weights = np.ascontiguousarray(phi.T)
    used, counts = np.empty(weights.shape, dtype=np.int64), np.empty(len(weights), dtype=np.int64)
    for k in range(len(weights)):
        counts[k] = nonzero(weights[k], used[k])
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        for k in range(len(weights)):
            combine(design, first + start, weights[k], used[k], counts[k], out[k, start:stop])


@compiled(error_model="numpy")
def clean(scores: ndarray) -> None:
    """Set scores that are not finite to 0, before any norm is taken (0 * inf is not a number)."""
    k, n = scores.shape
    for j in range(k):
        for i in range(n):
            value = scores[j, i]
            scores[j, i] = value if math.fabs(value) < math.inf else 0.0


@compiled(error_model="numpy")
def lengths(common: ndarray, moving: ndarray, out: ndarray) -> None:
    """out[i] = a number that is at least the l2 norm of column i of both arrays together.

    With d entries it exceeds the norm by at most (d + 9) 2^-52 of it, plus d 2^-536: squares sum
    with a relative error of d 2^-53, and d 2^-1075 underflows.  Infinite or NaN where a square is.
    """
    n, d = out.shape[0], common.shape[0] + moving.shape[0]
    for i in range(n):
        out[i] = 0.0
    for part in (common, moving):
        for j in range(part.shape[0]):
            for i in range(n):
                out[i] += part[j, i] * part[j, i]
    for i in range(n):
        out[i] = math.sqrt(out[i]) * (1.0 + (d + 8) * 2.0**-53) + d * 2.0**-536


@compiled(error_model="numpy")
def to_factors(squares: ndarray, clip_norm: float) -> None:
    """Squared norms -> min(1, clip_norm / norm), 0 where the norm is not finite."""
    for i in range(squares.shape[0]):
        norm = math.sqrt(squares[i])
        if not norm < math.inf:
            squares[i] = 0.0
        elif norm <= clip_norm:
            squares[i] = 1.0
        else:
            squares[i] = clip_norm / norm


@compiled(error_model="numpy")
def clip_factors(vectors: ndarray, clip_norm: float, out: ndarray) -> None:
    """out[i] = min(1, clip_norm / |vectors[:, i]|), 0 where the norm is not finite."""
    d, n = vectors.shape
    for i in range(n):
        out[i] = 0.0
    for j in range(d):
        for i in range(n):
            out[i] += vectors[j, i] * vectors[j, i]
    to_factors(out, clip_norm)


@compiled(error_model="numpy")
def add_products(
    vectors: ndarray,
    design: ndarray,
    scores: ndarray,
    first: int,
    starts: ndarray,
    columns: ndarray,
    values: ndarray,
) -> None:
    """vectors[c, i] += design[j, first+i] * scores[k, first+i] * B[j*K+k, c], B compressed."""
    p, n = design.shape[0], vectors.shape[1]
    width = scores.shape[0]
    product = np.empty(_TILE)
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        for j in range(p):
            x = design[j, first + start : first + stop]
            for k in range(width):
                row = j * width + k
                if starts[row] == starts[row + 1]:
                    continue
                s = scores[k, first + start : first + stop]
                if starts[row + 1] == starts[row] + 1:  # the same bits, without the product between
                    value = values[starts[row]]
                    y = vectors[columns[starts[row]], start:stop]
                    for i in range(stop - start):
                        y[i] += x[i] * s[i] * value
                    continue
                for i in range(stop - start):
                    product[i] = x[i] * s[i]
                for t in range(starts[row], starts[row + 1]):
                    value = values[t]
                    y = vectors[columns[t], start:stop]
                    for i in range(stop - start):
                        y[i] += product[i] * value


@compiled(error_model="numpy")
def add_copies(
    vectors: ndarray,
    scores: ndarray,
    first: int,
    starts: ndarray,
    columns: ndarray,
    values: ndarray,
) -> None:
    """vectors[c, i] += scores[k, first + i] * B[k, c], with B in compressed rows."""
    n = vectors.shape[1]
    for k in range(scores.shape[0]):
        s = scores[k, first : first + n]
        for t in range(starts[k], starts[k + 1]):
            value = values[t]
            y = vectors[columns[t]]
            for i in range(n):
                y[i] += s[i] * value


@compiled(error_model="numpy")
def add_indexed(
    vectors: ndarray,
    labels: ndarray,
    size: int,
    scores: ndarray,
    first: int,
    starts: ndarray,
    columns: ndarray,
    values: ndarray,
) -> None:
    """vectors[c, i] += scores[k, first + i] * B[label*K + k, c], with B in compressed rows."""
    width, n = scores.shape[0], vectors.shape[1]
    for i in range(n):
        label = labels[first + i]
        if label < 0:
            label += size
        for k in range(width):
            row = label * width + k
            for t in range(starts[row], starts[row + 1]):
                vectors[columns[t], i] += scores[k, first + i] * values[t]


@compiled(error_model="numpy")
def add_scaled(
    vectors: ndarray, moves: ndarray, columns: ndarray, begin: int, scores: ndarray, first: int
) -> None:
    """vectors[columns[c], i] += sum_k moves[k, c, begin + i] * scores[k, first + i]."""
    n = vectors.shape[1]
    for c in range(columns.shape[0]):
        y = vectors[columns[c]]
        for k in range(scores.shape[0]):
            u = moves[k, c, begin : begin + n]
            s = scores[k, first : first + n]
            for i in range(n):
                y[i] += u[i] * s[i]


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
def slopes(start: ndarray, end: ndarray, length: ndarray, out: ndarray) -> None:
    """out[k, i] = (end[k, i] - start[k, i]) / length[i], or by the one length; 0 where it is 0."""
    width, n = start.shape
    for k in range(width):
        for i in range(n):
            by = length[i] if length.shape[0] > 1 else length[0]
            out[k, i] = (end[k, i] - start[k, i]) / by if by != 0.0 else 0.0


@compiled(error_model="numpy")
def add_to_units(rows: ndarray, units: ndarray, out: ndarray) -> None:
    """out[:, units[i]] += rows[:, i], in the order of the rows."""
    d, n = rows.shape
    for j in range(d):
        entries, sums = rows[j], out[j]
        for i in range(n):
            sums[units[i]] += entries[i]


@compiled(error_model="numpy")
def add_block_to_units(
    values: ndarray, common: ndarray, moving: ndarray, units: ndarray, out: ndarray
) -> None:
    """Add a :class:`pymc_dp.rows.sparse.SparseBlock` to sums of units, in the order of the rows."""
    q, n = common.shape[0], values.shape[1]
    for j in range(q):
        entries, sums = values[j], out[common[j]]
        for i in range(n):
            sums[units[i]] += entries[i]
    for i in range(n):
        for t in range(moving.shape[0]):
            out[moving[t, i], units[i]] += values[q + t, i]


def packed(
    seen: ndarray, directions: ndarray, seconds: ndarray, diagonal: bool
) -> Iterator[tuple[slice, ndarray]]:
    """Packed -sum_ab u_a S_ab u_b' (`contributions.Curvature`) in blocks valid until the next."""
    _, d, n = directions.shape
    size = d if diagonal else d * (d + 1) // 2
    at_once = min(n, max(_SHORTEST, _PACKED // size))
    buffer = np.empty(size * at_once)
    for start in range(0, n, at_once):
        m = min(at_once, n - start)
        block = buffer[: size * m].reshape(size, m)
        _pack(seen, directions, seconds, start, diagonal, block)
        yield slice(start, start + m), block


@compiled(error_model="numpy")
def _pack(
    seen: ndarray, directions: ndarray, seconds: ndarray, first: int, diagonal: bool, out: ndarray
) -> None:
    """out[:, i] <- entries (j, k), j <= k, of -sum_ab u_aj S_ab u_bk, times sqrt(2) where j < k."""
    width, d, _ = directions.shape
    m = out.shape[1]
    weighted = np.empty((width, m))  # sum_a u_aj S_ab
    entry = 0
    for j in range(d):
        for b in range(width):
            t = weighted[b]
            t[:] = 0.0
            for a in range(width):
                if seen[a, j]:
                    u, s = directions[a, j], seconds[a, b]
                    for i in range(m):
                        t[i] -= u[first + i] * s[first + i]
        for k in range(j, j + 1 if diagonal else d):
            if k == j + 1:
                for b in range(width):
                    for i in range(m):
                        weighted[b, i] *= _ROOT_2
            y = out[entry]
            blank = True
            for b in range(width):
                if seen[b, k]:
                    u, t = directions[b, k], weighted[b]
                    if blank:
                        for i in range(m):
                            y[i] = t[i] * u[first + i]
                    else:
                        for i in range(m):
                            y[i] += t[i] * u[first + i]
                    blank = False
            if blank:
                y[:] = 0.0
            entry += 1


def compressed_rows(matrix: np.ndarray) -> Compressed:
    """Row starts, column numbers and values of the nonzero entries of a matrix."""
    rows, columns = np.nonzero(matrix)
    starts = np.searchsorted(rows, np.arange(matrix.shape[0] + 1))
    return starts.astype(np.int64), columns.astype(np.int64), matrix[rows, columns]


def row_blocks(n_rows: int, size: int, first: int = 0) -> list[slice]:
    """Slices of about `size` rows from `first` on; none has one row, which may round otherwise."""
    starts = list(range(0, n_rows, size))
    if len(starts) > 1 and n_rows - starts[-1] == 1:
        starts.pop()
    return [slice(first + a, first + b) for a, b in pairwise([*starts, n_rows])]
