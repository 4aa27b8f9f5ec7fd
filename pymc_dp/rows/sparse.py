"""Vectors of rows that are zero in most coordinates: only the others are held.

Which coordinates a vector can touch is known from the model and the label of the row: some are
common to all rows, a few (the effect of its group) depend on the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.rows import loops

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
    def full(cls, cuts: int, d: int) -> Layout:
        """All coordinates are held for every row."""
        return cls(np.arange(d), [None] * cuts)

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
        return cls(common, labelled) if size <= _DENSE * d else cls.full(len(maps), d)

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
        labels: Sequence[ndarray | None],
        scores: Sequence[ndarray | None],
    ) -> None:
        """Set the entries that depend on labels, from (rows,) labels and (k, rows) scores."""
        at = 0
        for part, label, s in zip(self.labelled, labels, scores, strict=True):
            if part is None:
                continue
            assert label is not None and s is not None  # or places would be left as they are
            c = part.places.shape[1]
            values = block.values[len(self.common) + at : len(self.common) + at + c]
            _fill(values, block.moving[at : at + c], part.places, part.weights, label, s)
            at += c


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
            entries = loops.compressed_rows(part)
            for rows in loops.row_blocks(n, _BLOCK):
                block = np.zeros((len(columns), rows.stop - rows.start))
                loops.add_products(block, design, ones, where.start + rows.start, *entries)
                with np.errstate(over="ignore"):  # a long one gets the weight 0
                    moves[k][:, rows] = block
        return cls(moves, columns)
