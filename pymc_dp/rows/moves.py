"""How one number of each row moves with z, kept: u_i = d v_i / d z for all rows.

Score vectors of rows that see z through one number v are multiples s_i u_i of it.  With u_i at
hand, a kick costs one product per entry whatever the scaling of z, instead of a product with the
scaling for every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp._jit import compiled
from pymc_dp.rows import loops
from pymc_dp.rows.sparse import Layout, SparseBlock
from pymc_dp.rows.store import Columns, RowGroup

__all__ = ["Moves", "ScaledDesign"]

#: Entries of a map for each entry of its product with a design from which on the product is made,
#: and how many numbers may be kept: 1 GB of float64.
_WORTH, _LARGEST = 4, 2**27


class ScaledDesign(NamedTuple):
    """A design in z: how the linear predictors of all rows move with it.

    Attributes
    ----------
    moves : (k, q, n) ndarray
        By predictor and coordinate.
    columns : (q,) integer ndarray
        The coordinates that matter.
    """

    moves: ndarray
    columns: ndarray

    @staticmethod
    def pays(matrix: ndarray, width: int) -> bool:
        """Whether reading it would cost less than products with the map d phi / d z, (p*k, d).

        A matter of the map alone: what is computed must not depend on how many rows there are.
        """
        return bool(np.count_nonzero(matrix) >= _WORTH * width * matrix.any(axis=0).sum())

    @classmethod
    def of(cls, design: ndarray, matrix: ndarray, width: int, where: slice) -> ScaledDesign:
        """For some rows of a (p, n) design, and the map of its (p, k) coefficients."""
        columns = np.flatnonzero(matrix.any(axis=0))
        moves = np.zeros((width, len(columns), where.stop - where.start))
        ones = np.ones((1, where.stop))
        for k in range(width):
            part = np.ascontiguousarray(matrix[k::width, columns])
            entries = loops.compressed_rows(part)
            loops.add_products(moves[k], design, ones, where.start, *entries)
        return cls(moves, columns)

    @staticmethod
    def fits(matrix: ndarray, width: int, n: int) -> bool:
        """Whether it may be kept for n rows."""
        return bool(width * matrix.any(axis=0).sum() * n <= _LARGEST)


@dataclass(frozen=True, eq=False)
class Moves:
    """The derivatives u_i of one number of each row by z.

    Attributes
    ----------
    d : int
        Number of coordinates.
    layout : Layout
        Which of them a row touches; public.
    common : (q, n) ndarray
        Entries at the common coordinates.
    labels, weights : list of ndarray or None
        Per cut, (n,) labels and (k, n) weights; None where nothing depends on a label.
    """

    d: int
    layout: Layout
    common: ndarray
    labels: list[ndarray | None]
    weights: list[ndarray | None]

    @classmethod
    def of(
        cls,
        group: RowGroup,
        columns: Columns,
        weights: Sequence[ndarray | None],
        maps: Sequence[ndarray | None],
    ) -> Moves:
        """Of v = sum over cuts of weights . (values at the cut), with the maps d phi / d z."""
        cuts = [
            (cut, w, matrix)
            for cut, w, matrix in zip(group.functions.ordered, weights, maps, strict=True)
            if w is not None and matrix is not None
        ]
        d = max(matrix.shape[1] for _, _, matrix in cuts)
        kinds, widths = [cut.kind for cut, _, _ in cuts], [len(w) for _, w, _ in cuts]
        layout = Layout.of(kinds, widths, [matrix for _, _, matrix in cuts], d)
        common = np.zeros((len(layout.common), group.n_rows))
        for cut, w, matrix in cuts:
            part = np.ascontiguousarray(matrix[:, layout.common])
            at = (w, 0, *loops.compressed_rows(part))
            if cut.kind == "dot":
                loops.add_products(common, columns.designs[cut], *at)
            elif cut.kind == "copy":
                loops.add_copies(common, *at)
            else:
                loops.add_indexed(common, columns.labels[cut], len(matrix) // len(w), *at)
        used = [part is not None for part in layout.labelled]
        labels = [columns.labels[c] if u else None for (c, _, _), u in zip(cuts, used, strict=True)]
        return cls(
            d,
            layout,
            common,
            labels,
            [w if u else None for (_, w, _), u in zip(cuts, used, strict=True)],
        )

    @property
    def width(self) -> int:
        """Entries that are held of each row."""
        return len(self.layout.common) + self.layout.moving

    @property
    def seen(self) -> ndarray:
        """(d,) which coordinates matter to some row, by the structure of the model."""
        return self.layout.seen(self.d)

    def part(self, rows: slice) -> Moves:
        """Those of some rows."""
        return Moves(
            self.d,
            self.layout,
            np.ascontiguousarray(self.common[:, rows]),
            [None if x is None else x[rows] for x in self.labels],
            [None if w is None else np.ascontiguousarray(w[:, rows]) for w in self.weights],
        )

    def along(self, displacement: ndarray) -> ndarray:
        """(n,) u_i . displacement."""
        out = np.empty((1, self.common.shape[1]))
        loops.linear_predictor(self.common, 0, displacement[self.layout.common][:, None], out)
        for k, (labels, weights) in enumerate(zip(self.labels, self.weights, strict=True)):
            if labels is not None and weights is not None:
                moved = self.layout.along(k, displacement)
                loops.gather_dot(weights, labels, moved, out[0])
        return out[0]

    def times(self, factors: ndarray, where: slice) -> SparseBlock:
        """factors_i u_i for a block of rows, factors (n,)."""
        block = self.layout.empty(where.stop - where.start)
        _times(self.common, factors, where.start, block.values)
        self.layout.fill(
            block,
            [None if x is None else x[where] for x in self.labels],
            [None if w is None else w[:, where] * factors[where] for w in self.weights],
        )
        return block


@compiled(error_model="numpy")
def _times(common: ndarray, factors: ndarray, first: int, out: ndarray) -> None:
    """out[c, i] = common[c, first + i] * factors[first + i]."""
    n = out.shape[1]
    f = factors[first : first + n]
    for c in range(common.shape[0]):
        x, y = common[c, first : first + n], out[c]
        for i in range(n):
            y[i] = x[i] * f[i]
