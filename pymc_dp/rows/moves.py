"""How one number of each row moves with z, kept: u_i = d v_i / d z for all rows.

Score vectors of rows that see z through one number v are multiples s_i u_i.  With u_i at hand, a
kick costs one product per entry whatever the scaling of z, instead of a product with the scaling
for every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.rows import loops
from pymc_dp.rows.sparse import Layout, SparseBlock
from pymc_dp.rows.store import Columns, RowGroup

#: Entries of a map for each entry of its product with a design from which on the product is made,
#: and how many numbers may be kept: 1 GB of float64.
_WORTH, LARGEST = 4, 2**27
#: Rows that are made at a time, in float64, before they are stored.
_BLOCK = 4096


class ScaledDesign(NamedTuple):
    """A design in z: how the linear predictors of all rows move with it.

    `columns`, (q,), are the coordinates that matter.  `moves`, (k, q, n), are by predictor and
    coordinate, of the type of the design.
    """

    moves: ndarray
    columns: ndarray

    @staticmethod
    def pays(matrix: ndarray, width: int) -> bool:
        """Whether reading it would cost less than products with the map d phi / d z, (p*k, d).

        It depends on the map alone: what is computed must not depend on how many rows there are.
        """
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

    @staticmethod
    def fits(matrix: ndarray, width: int, n: int) -> bool:
        """Whether it may be kept for n rows."""
        return bool(width * matrix.any(axis=0).sum() * n <= LARGEST)


class Moves(NamedTuple):
    """The derivatives u_i of one number of each row by z.

    Every row touches the coordinates `common`, (q,), and has further ones in `moving`, (m, n).
    `common_values`, (q, n), and `moving_values`, (m, n), are the entries there, float32 if all
    features are and float64 otherwise.  `lengths`, (n,), are those of u_i as it is stored, rounded
    up: see :func:`pymc_dp.rows.loops.lengths`.
    """

    common: ndarray
    common_values: ndarray
    moving: ndarray
    moving_values: ndarray
    lengths: ndarray

    @classmethod
    def of(
        cls,
        group: RowGroup,
        columns: Columns,
        weights: Sequence[ndarray | None],
        maps: Sequence[ndarray | None],
        single: bool,
    ) -> tuple[Moves, ndarray]:
        """Of v = sum over cuts of weights . (values at the cut), with the maps d phi / d z.

        In float32 if all designs are and `single` says that other features are no wider.  The
        second result, (d,) bool, tells which coordinates matter to some row, by the structure of
        the model: public.
        """
        cuts = [
            (cut, w, matrix)
            for cut, w, matrix in zip(group.functions.ordered, weights, maps, strict=True)
            if w is not None and matrix is not None
        ]
        d = max(matrix.shape[1] for _, _, matrix in cuts)
        kinds, widths = [cut.kind for cut, _, _ in cuts], [len(w) for _, w, _ in cuts]
        layout = Layout.of(kinds, widths, [matrix for _, _, matrix in cuts], d)
        designs = [columns.designs[cut].dtype for cut, _, _ in cuts if cut.kind == "dot"]
        dtype = np.result_type(*designs) if single and designs else np.dtype("float64")
        n, q = group.n_rows, len(layout.common)
        values = np.empty((layout.width, n), dtype)
        moving, lengths = np.empty((layout.moving, n), dtype=np.int64), np.empty(n)
        labelled = list(zip([part is not None for part in layout.labelled], cuts, strict=True))
        entries = [
            loops.compressed_rows(np.ascontiguousarray(matrix[:, layout.common]))
            for _, _, matrix in cuts
        ]
        for where in loops.row_blocks(n, _BLOCK):
            block = layout.empty(where.stop - where.start)
            common = block.values[:q]
            common[:] = 0.0
            for (cut, w, matrix), own in zip(cuts, entries, strict=True):
                at = (w, where.start, *own)
                if cut.kind == "dot":
                    loops.add_products(common, columns.designs[cut], *at)
                elif cut.kind == "copy":
                    loops.add_copies(common, *at)
                else:
                    loops.add_indexed(common, columns.labels[cut], len(matrix) // len(w), *at)
            layout.fill(
                block,
                [columns.labels[cut][where] if u else None for u, (cut, _, _) in labelled],
                [np.ascontiguousarray(w[:, where]) if u else None for u, (_, w, _) in labelled],
            )
            with np.errstate(over="ignore"):  # its length is then infinite, and its weight 0
                values[:, where] = block.values
            moving[:, where] = block.moving
            block.values[:] = values[:, where]  # as stored: lengths must not be too short
            loops.lengths(common, block.values[q:], lengths[where])
        moves = cls(layout.common, values[:q], moving, values[q:], lengths)
        return moves, layout.seen(d)

    @property
    def width(self) -> int:
        """Entries that are held of each row."""
        return len(self.common) + len(self.moving)

    def part(self, rows: slice) -> Moves:
        """Those of some rows."""
        return Moves(
            self.common,
            np.ascontiguousarray(self.common_values[:, rows]),
            np.ascontiguousarray(self.moving[:, rows]),
            np.ascontiguousarray(self.moving_values[:, rows]),
            self.lengths[rows],
        )

    def times(self, factors: ndarray, where: slice) -> SparseBlock:
        """factors_i u_i for a block of rows, factors (n,)."""
        block = np.empty((self.width, where.stop - where.start))
        q = len(self.common)
        _times(self.common_values, factors, where.start, block[:q])
        _times(self.moving_values, factors, where.start, block[q:])
        return SparseBlock(block, self.common, np.ascontiguousarray(self.moving[:, where]))


@compiled(error_model="numpy")
def predict(moves: Moves, z: ndarray, first: int, out: ndarray) -> None:
    """out[i] = u_{first + i} . z."""
    n = out.shape[0]
    weights, used = z[moves.common], np.empty(moves.common.shape[0], dtype=np.int64)
    count = loops.nonzero(weights, used)
    loops.combine(moves.common_values, first, weights, used, count, out)
    for j in range(moves.moving.shape[0]):
        x = moves.moving_values[j, first : first + n]
        places = moves.moving[j, first : first + n]
        for i in range(n):
            out[i] += x[i] * z[places[i]]


@compiled(error_model="numpy")
def _times(values: ndarray, factors: ndarray, first: int, out: ndarray) -> None:
    """out[c, i] = values[c, first + i] * factors[first + i]."""
    n = out.shape[1]
    f = factors[first : first + n]
    for c in range(values.shape[0]):
        x, y = values[c, first : first + n], out[c]
        for i in range(n):
            y[i] = x[i] * f[i]
