"""Compiled loops over rows, and vectors of rows without most of their zeros.

Arrays are (columns, rows): the innermost loop runs over rows and vectorises.  Each row has the same
operations wherever it stands: no ``fastmath``, no matrix library, whose rounding depends on place.

Which coordinates a vector can touch is known from the model and the label of the row: some are
common to all rows, a few (the effect of its group) depend on the label.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled

_TILE = 512  # rows of a tile: the columns of a block then stay in the fastest caches
_PACKED, _SHORTEST = 2**16, 64  # numbers of a block of packed matrices: second cache; least rows
_ROOT_2 = math.sqrt(2.0)
Compressed = tuple[np.ndarray, np.ndarray, np.ndarray]


@compiled(error_model="numpy")
def combine(vectors: ndarray, first: int, weights: ndarray, used: ndarray, out: ndarray) -> None:
    """out[i] = sum_j vectors[j, first + i] * weights[j], j in `used`, in one order."""
    n, count = out.shape[0], used.shape[0]
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
def places(weights: ndarray) -> ndarray:
    """Where weights are not 0: much quicker to compile than NumPy's function."""
    found, count = np.empty(weights.shape[0], dtype=np.int64), 0
    for j in range(weights.shape[0]):
        if weights[j] != 0.0:
            found[count] = j
            count += 1
    return found[:count]


@compiled(error_model="numpy")
def linear_predictor(design: ndarray, first: int, weights: ndarray, out: ndarray) -> None:
    """out[k, i] = sum_j design[j, first + i] * weights[k, j]."""
    n = out.shape[1]
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        for k in range(out.shape[0]):
            w = weights[k]
            combine(design, first + start, w, places(w), out[k, start:stop])


@compiled(error_model="numpy")
def clean(scores: ndarray, out: ndarray, first: int) -> None:
    """out[j, first + i] = scores[j, i], or 0 if it is not finite: before any norm is taken, as 0 *
    inf is not a number.
    """
    k, n = scores.shape
    for j in range(k):
        x, y = scores[j], out[j, first : first + n]
        for i in range(n):
            y[i] = x[i] if math.fabs(x[i]) < math.inf else 0.0


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
def clip_factors(vectors: ndarray, clip_norm: float, out: ndarray) -> None:
    """out[i] = min(1, clip_norm / |vectors[:, i]|), 0 where the norm is not finite."""
    d, n = vectors.shape
    for i in range(n):
        out[i] = 0.0
    for j in range(d):
        for i in range(n):
            out[i] += vectors[j, i] * vectors[j, i]
    for i in range(n):
        norm = math.sqrt(out[i])
        if not norm < math.inf:
            out[i] = 0.0
        else:
            out[i] = 1.0 if norm <= clip_norm else clip_norm / norm


@compiled(error_model="numpy")
def add_products(
    vectors: ndarray, design: ndarray, scores: ndarray, first: int, entries: Compressed
) -> None:
    """vectors[c, i] += design[j, first+i] * scores[k, first+i] * B[j*K+k, c], B compressed."""
    starts, columns, values = entries
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
def add_copies(vectors: ndarray, scores: ndarray, first: int, entries: Compressed) -> None:
    """vectors[c, i] += scores[k, first + i] * B[k, c], with B in compressed rows."""
    starts, columns, values = entries
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
    vectors: ndarray, labels: ndarray, scores: ndarray, first: int, entries: Compressed
) -> None:
    """vectors[c, i] += scores[k, first + i] * B[label*K + k, c], with B in compressed rows."""
    starts, columns, values = entries
    width, n = scores.shape[0], vectors.shape[1]
    size = (starts.shape[0] - 1) // width
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
    """Add a :class:`SparseBlock` to sums of units, in the order of the rows."""
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


_COMMON = 0.25  # a coordinate that more than this part of all labels touch is held for every row
_DENSE = 0.6  # held entries per coordinate from which on the zeros are held as well


class SparseBlock(NamedTuple):
    """Vectors of a block of rows.

    `values`, (w, rows), may be overwritten.  The first q have the coordinates `common`, (q,), the
    others those of `moving`, (w - q, rows), distinct in a row wherever an entry is not 0.
    """

    values: ndarray
    common: ndarray
    moving: ndarray

    @classmethod
    def full(cls, vectors: ndarray) -> SparseBlock:
        """(d, rows) vectors of which every entry is held."""
        nothing = np.empty((0, vectors.shape[1]), dtype=np.int64)
        return cls(vectors, np.arange(len(vectors)), nothing)

    def dense(self, d: int) -> ndarray:
        """(d, rows) vectors with their zeros."""
        if len(self.common) == d:
            return self.values
        out = np.zeros((d, self.values.shape[1]))
        out[self.common] = self.values[: len(self.common)]
        _scatter(self.values[len(self.common) :], self.moving, out)
        return out


class _Labelled(NamedTuple):
    """What labels of a cut add: entry t of label l is weights[l, t] . scores, at its place."""

    places: ndarray  # (labels, c) int64
    weights: ndarray  # (labels, c, k)


class Layout(NamedTuple):
    """Where entries of vectors stand: `common` coordinates, (q,), and those of labels, by cut."""

    common: ndarray
    labelled: list[_Labelled | None]

    @classmethod
    def of(
        cls, kinds: Sequence[str], widths: Sequence[int], maps: Sequence[ndarray | None], d: int
    ) -> Layout:
        """For cuts of these kinds, with `widths` numbers per row and maps d phi / d z.

        Coordinates that labels of two cuts touch are common: none stands twice in a row.
        """
        held = np.zeros(d, dtype=bool)
        claimed = np.zeros(d, dtype=bool)
        touched: list[ndarray | None] = []
        for kind, width, matrix in zip(kinds, widths, maps, strict=True):
            if matrix is None or kind != "index":
                touched.append(None)
                if matrix is not None:
                    held |= matrix.any(axis=0)
                continue
            by_label = np.asarray(matrix.reshape(-1, width, d).any(axis=1))
            counts = by_label.sum(axis=0)
            held |= counts > max(1.0, _COMMON * len(by_label))
            held |= claimed & (counts > 0)
            claimed |= counts > 0
            touched.append(by_label)
        common = np.flatnonzero(held)
        labelled: list[_Labelled | None] = []
        size = len(common)
        for labels, width, matrix in zip(touched, widths, maps, strict=True):
            labelled.append(None)
            if labels is None or matrix is None:
                continue
            own = labels & ~held
            c = int(own.sum(axis=1).max(initial=0))
            if c == 0:
                continue
            # coordinates of a label first, in order; places beyond its own have weight 0
            places = np.argsort(~own, axis=1, kind="stable")[:, :c].astype(np.int64)
            inside = np.take_along_axis(own, places, axis=1)
            weights = np.take_along_axis(
                matrix.reshape(len(own), width, d), places[:, None, :], axis=2
            )
            weights = np.where(inside[:, None, :], weights, 0.0).transpose(0, 2, 1)
            labelled[-1] = _Labelled(places, np.ascontiguousarray(weights))
            size += c
        return (
            cls(common, labelled) if size <= _DENSE * d else cls(np.arange(d), [None] * len(maps))
        )

    @property
    def moving(self) -> int:
        """Number of entries of a row whose coordinates depend on its labels."""
        return sum(part.places.shape[1] for part in self.labelled if part is not None)

    @property
    def width(self) -> int:
        """Number of entries of a row that are held."""
        return len(self.common) + self.moving

    def empty(self, rows: int) -> SparseBlock:
        """A block whose numbers are anything."""
        moving = np.empty((self.moving, rows), dtype=np.int64)
        return SparseBlock(np.empty((self.width, rows)), self.common, moving)

    def fill(
        self,
        block: SparseBlock,
        by_label: Sequence[tuple[int, ndarray, ndarray]],
    ) -> None:
        """Set the entries that depend on labels: cuts with (rows,) labels and (k, rows) scores."""
        at = 0
        for k, label, s in by_label:
            part = self.labelled[k]
            assert part is not None
            c = part.places.shape[1]
            values = block.values[len(self.common) + at : len(self.common) + at + c]
            _fill(values, block.moving[at : at + c], part.places, part.weights, label, s)
            at += c
        assert at == len(block.moving)  # or places would be left as they are


@compiled(error_model="numpy")
def _fill(
    values: ndarray,
    moving: ndarray,
    places: ndarray,
    weights: ndarray,
    labels: ndarray,
    scores: ndarray,
) -> None:
    size, c, width = weights.shape
    n = values.shape[1]
    for t in range(c):
        entries, at, place = values[t], moving[t], places[:, t].copy()
        for i in range(n):
            label = labels[i]
            at[i] = place[label if label >= 0 else label + size]
            entries[i] = 0.0
        for k in range(width):
            weight, s = weights[:, t, k].copy(), scores[k]
            for i in range(n):
                label = labels[i]
                entries[i] += s[i] * weight[label if label >= 0 else label + size]


@compiled(error_model="numpy")
def _scatter(values: ndarray, moving: ndarray, out: ndarray) -> None:
    for t in range(values.shape[0]):
        for i in range(values.shape[1]):
            out[moving[t, i], i] += values[t, i]


#: Entries of a map per entry of its product with a design that make it pay; numbers kept: 1 GB.
_WORTH, LARGEST = 4, 2**27


_BLOCK = 4096  # rows that are made at a time, in float64, before they are stored


class ScaledDesign(NamedTuple):
    """A design in z: `moves`, (k, q, n), of k predictors along the q `columns` that matter."""

    moves: ndarray
    columns: ndarray

    @staticmethod
    def pays(matrix: ndarray, width: int) -> bool:
        """Whether it beats products with the (p*k, d) map; independent of the number of rows."""
        return bool(np.count_nonzero(matrix) >= _WORTH * width * matrix.any(axis=0).sum())

    @classmethod
    def of(cls, design: ndarray, matrix: ndarray, width: int, where: slice) -> ScaledDesign:
        """For some rows of a (p, n) design, and the map of its (p, k) coefficients."""
        columns = np.flatnonzero(matrix.any(axis=0))
        n = where.stop - where.start
        moves = np.empty((width, len(columns), n), design.dtype)
        ones = np.ones((1, where.stop))
        for k in range(width):
            part = np.ascontiguousarray(matrix[k::width, columns])
            entries = compressed_rows(part)
            for rows in row_blocks(n, _BLOCK):
                block = np.zeros((len(columns), rows.stop - rows.start))
                add_products(block, design, ones, where.start + rows.start, entries)
                with np.errstate(over="ignore"):  # a long one gets the weight 0
                    moves[k][:, rows] = block
        return cls(moves, columns)
