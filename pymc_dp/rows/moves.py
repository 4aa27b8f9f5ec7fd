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
from pymc_dp.rows.store import Columns, RowGroup

__all__ = ["Moves", "ScaledDesign"]

#: A coordinate that more than this part of all labels touch is held for every row.
_COMMON = 0.25
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


class _Effect(NamedTuple):
    """Coordinates that rows touch according to their label: weights_i . matrix[label_i]."""

    labels: ndarray  # (n,)
    weights: ndarray  # (k, n)
    size: int  # labels
    matrix: ndarray  # (size * k, d), 0 in coordinates that are held for every row
    entries: tuple[ndarray, ndarray, ndarray]  # the same in compressed rows

    def part(self, rows: slice) -> _Effect:
        weights = np.ascontiguousarray(self.weights[:, rows])
        return self._replace(labels=self.labels[rows], weights=weights)


@dataclass(frozen=True, eq=False)
class Moves:
    """The derivatives u_i of one number of each row by z.

    Attributes
    ----------
    place : (d,) int64 ndarray
        Where a coordinate stands in `common`, -1 if it does not; public.
    common : (q, n) ndarray
        The coordinates that many rows touch.
    effects : list of _Effect
        The others.
    """

    place: ndarray
    common: ndarray
    effects: list[_Effect]

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
        touched = np.zeros(d, dtype=bool)
        for cut, w, matrix in cuts:
            labels = np.count_nonzero(np.any(matrix.reshape(-1, len(w), d), axis=1), axis=0)
            rare = max(2.0, _COMMON * len(matrix) / len(w)) if cut.kind == "index" else 0
            touched |= labels > rare
        where = np.flatnonzero(touched)
        place = np.full(d, -1)
        place[where] = np.arange(len(where))
        common = np.zeros((len(where), group.n_rows))
        effects = []
        for cut, w, matrix in cuts:
            at = (w, 0, *loops.compressed_rows(np.ascontiguousarray(matrix[:, where])))
            if cut.kind == "dot":
                loops.add_products(common, columns.designs[cut], *at)
            elif cut.kind == "copy":
                loops.add_copies(common, *at)
            else:
                labels, size = columns.labels[cut], len(matrix) // len(w)
                loops.add_indexed(common, labels, size, *at)
                rest = matrix * ~touched
                if rest.any():
                    effects.append(_Effect(labels, w, size, rest, loops.compressed_rows(rest)))
        return cls(place, common, effects)

    @property
    def seen(self) -> ndarray:
        """(d,) which coordinates matter to some row, by the structure of the model."""
        rest = [effect.matrix.any(axis=0) for effect in self.effects]
        return np.asarray(np.any([self.place >= 0, *rest], axis=0))

    def part(self, rows: slice) -> Moves:
        """Those of some rows."""
        common = np.ascontiguousarray(self.common[:, rows])
        return Moves(self.place, common, [effect.part(rows) for effect in self.effects])

    def along(self, displacement: ndarray) -> ndarray:
        """(n,) u_i . displacement."""
        out = np.empty((1, self.common.shape[1]))
        common = displacement[self.place >= 0][:, None]
        loops.linear_predictor(self.common, 0, common, out)
        for effect in self.effects:
            flat = effect.matrix @ displacement
            loops.gather_dot(effect.weights, effect.labels, flat.reshape(effect.size, -1), out[0])
        return out[0]

    def times(self, factors: ndarray, where: slice, out: ndarray) -> None:
        """out[:, i] <- factors_i u_i for a block of rows, factors (n,), out (d, rows)."""
        _times(self.common, self.place, factors, where.start, out)
        for effect in self.effects:
            scores = effect.weights[:, where] * factors[where]
            loops.add_indexed(out, effect.labels[where], effect.size, scores, 0, *effect.entries)


@compiled(error_model="numpy")
def _times(common: ndarray, place: ndarray, factors: ndarray, first: int, out: ndarray) -> None:
    """out[c, i] = common[place_c, first + i] * factors[first + i], 0 where the place is -1."""
    d, n = out.shape
    f = factors[first : first + n]
    for c in range(d):
        y = out[c]
        if place[c] < 0:
            y[:] = 0.0
            continue
        x = common[place[c], first : first + n]
        for i in range(n):
            y[i] = x[i] * f[i]
