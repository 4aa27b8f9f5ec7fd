"""Rows that see z through one number v_i = origin_i + u_i . z, with a concave term.

Their score vectors are multiples of vectors u_i that do not depend on z, so one pass over the rows
reads each u_i once, and makes no vector.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.rows import families
from pymc_dp.rows.moves import Moves, predict


class LinearRows(NamedTuple):
    """What each row is, in the layout of the loops; private.

    `family` is a place in :data:`pymc_dp.rows.predictor.FAMILIES`.  Of shape (n,) are `a` and `b`,
    numbers of the concave term (:mod:`pymc_dp.rows.families`), and `origin`, v at z = 0.
    `reference`, (n,) or (0,), is what is subtracted from every slope, if anything is.  `moves` are
    the vectors u_i.
    """

    family: int
    a: ndarray
    b: ndarray
    origin: ndarray
    reference: ndarray
    moves: Moves

    def part(self, rows: slice) -> LinearRows:
        """Those of some rows."""
        return LinearRows(
            self.family,
            self.a[rows],
            self.b[rows],
            self.origin[rows],
            self.reference[rows] if len(self.reference) else self.reference,
            self.moves.part(rows),
        )

    def minus(self, reference: ndarray) -> LinearRows:
        """The same rows with other slopes subtracted."""
        return self._replace(reference=np.ascontiguousarray(reference))


@compiled(error_model="numpy")
def slopes(rows: LinearRows, z: ndarray, first: int, moved: ndarray, out: ndarray) -> None:
    """out[i] = l'(v) of row first + i at z, minus the reference; 0 where it is not finite.

    And moved[i] = u . z, by which v differs from its value at z = 0.
    """
    predict(rows.moves, z, first, moved)
    last = first + out.shape[0]
    origin = rows.origin[first:last]
    for i in range(out.shape[0]):
        out[i] = origin[i] + moved[i]
    families.slopes(rows.family, rows.a[first:last], rows.b[first:last], out)
    if rows.reference.shape[0] > 0:
        reference = rows.reference[first:last]
        for i in range(out.shape[0]):
            out[i] -= reference[i]


@compiled(error_model="numpy")
def log_likelihoods(rows: LinearRows, first: int, moved: ndarray, out: ndarray) -> None:
    """out[i] = l(origin + moved[i]) of row first + i, up to a constant of the row.

    The reference is not used.
    """
    last = first + out.shape[0]
    origin = rows.origin[first:last]
    for i in range(out.shape[0]):
        out[i] = origin[i] + moved[i]
    families.log_likelihoods(rows.family, rows.a[first:last], rows.b[first:last], out)


@compiled(error_model="numpy")
def works(start: ndarray, end: ndarray, slopes: ndarray, scale: ndarray, out: ndarray) -> None:
    """out[i] = (end[i] - start[i]) slopes[i] scale[i], or the one scale there is."""
    for i in range(out.shape[0]):
        out[i] = (end[i] - start[i]) * slopes[i]
    if scale.shape[0] == 1:
        for i in range(out.shape[0]):
            out[i] *= scale[0]
    else:
        for i in range(out.shape[0]):
            out[i] *= scale[i]
