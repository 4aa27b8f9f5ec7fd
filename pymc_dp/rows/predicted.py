"""The fast engine of records that see the parameters through one linear predictor.

Such a record sees one number v_i, affine in z with direction u_i = d v_i / d z, and has the score
l_i'(v_i) u_i: a pass over the rows reads each u_i once, and makes no vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import over
from pymc_dp.rows import linear, loops
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from pymc_dp.rows.linear import LinearRows, Moves, predict
from pymc_dp.rows.loops import LARGEST, Layout, SparseBlock
from pymc_dp.rows.predictor import FAMILIES, Predictor

_BLOCK, _CACHED = 8192, 2**16  # rows, and numbers of a block of vectors: half a second-level cache
_WIDER = 2  # how many times as many numbers as the data of a row its vector may hold
_LOG_LIKELIHOOD = 10  # numbers that are read in the time that a log-likelihood takes
_KEPT = 4  # points whose products with all rows are kept: two midpoints, and the ends of a step
#: Distance of a point from the middle of two others, and how much larger these may be, relative.
_ROUNDING, _APART = 1e-13, 1e3


@dataclass(frozen=True, eq=False)
class _Rows:
    """What each row is, whatever the coordinates: v = offset + weights . (values at the cuts)."""

    a: np.ndarray
    b: np.ndarray
    offset: np.ndarray
    weights: list[np.ndarray | None]


class _Private:
    """Values of records, made at the first use in a process and never pickled."""

    def __init__(self) -> None:
        self.rows: _Rows | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": None}


class PredictorEngine(RowEngine):
    """Log-likelihoods and score vectors of rows with a `predictor` (:mod:`pymc_dp.rows.predictor`).

    Log-likelihoods are up to a constant of the record.  A record outside the support of the
    likelihood contributes nothing, nor does one whose direction or slope overflows.
    """

    def __init__(self, engine: RowEngine, predictor: Predictor) -> None:
        super().__init__(engine.groups, engine.parameters, engine.n_units, engine.coordinates)
        self.predictor = predictor
        self._family = FAMILIES.index(predictor.family)
        self._private = _Private()

    def _forget_all(self) -> None:
        super()._forget_all()
        self._linear: LinearRows | None = None
        self._moved: PredictorEngine | None = None
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_linear": None, "_moved_by": {}, "_moved": None}

    def synthetic(self, value: int | None = 0, first: int = 0, last: int | None = None) -> Self:
        """The same functions on made-up data."""
        synthetic = super().synthetic(value, first, last)
        synthetic._private = _Private()
        return synthetic

    def with_coordinates(self, coordinates: Coordinates) -> PredictorEngine:
        """The same records in other coordinates."""
        if coordinates is self.coordinates:
            return self
        if self._moved is None or self._moved.coordinates is not coordinates:
            self._moved = super().with_coordinates(coordinates)  # several releases ask for it
        return self._moved

    def part(self, units: slice | np.ndarray) -> Self:
        """The records of some units alone, with the same bits; units in a slice."""
        assert isinstance(units, slice)
        part = super().part(units)
        part._private = _Private()
        part._linear = self.linear().part(units)
        if self.is_tilted:
            part._reference = part._linear.reference
        return part

    def tilted(self) -> Self:
        """The same records, measured against their linearisation at z = 0."""
        tilted = super().tilted()
        tilted._linear = self._linear
        return tilted

    def pays(self, n: int) -> bool:
        """Whether to keep the vectors u_i of `n` rows; it depends on public things alone."""
        group = self.groups[0]
        phis, maps = self._shared(group)
        cuts = group.functions.ordered
        widths = [math.prod(tail) for tail in self.predictor.tails]
        layout = Layout.of([cut.kind for cut in cuts], widths, maps, self.d)
        read = sum(
            len(phi) if cut.kind == "dot" else 1 for cut, phi in zip(cuts, phis, strict=True)
        )
        return layout.width <= _WIDER * read and layout.width * n <= LARGEST

    def _rows(self) -> _Rows:
        if self._private.rows is None:
            n = self.n_units
            arrays = self.groups[0].store.read()
            a, b, offset = np.empty(n), np.empty(n), np.empty(n)
            weights: list[np.ndarray] = []
            for where in loops.row_blocks(n, _BLOCK):
                block = [array[where] for array in arrays]
                a[where], b[where] = self.predictor.coefficients(block)
                offset[where], found = self.predictor.affine_form(block)
                if not weights:
                    weights = [np.empty((len(w), n)) for w in found]
                for w, part in zip(weights, found, strict=True):
                    w[:, where] = part
            self._private.rows = _Rows(a, b, offset, list(weights))
        return self._private.rows

    def linear(self) -> LinearRows:
        """The rows as multiples of vectors that do not depend on z."""
        if self._linear is None:
            rows, group = self._rows(), self.groups[0]
            phis, maps = self._shared(group)
            origin = rows.offset.copy()
            self._add_products(0, rows.weights, [np.ravel(phi) for phi in phis], origin)
            moves = moves_of(group, rows.weights, maps, self.predictor.single)
            finite = np.isfinite(moves.lengths)
            a, b = (np.where(finite, x, 0.0) for x in (rows.a, rows.b))
            self._linear = LinearRows(self._family, a, b, origin, np.empty(0), moves)
        if self.is_tilted and self._reference is None:
            moved, out = np.empty(self.n_units), np.empty(self.n_units)
            linear.slopes(self._linear, np.zeros(self.d), 0, moved, out)
            self._reference = out
            self._linear = self._linear._replace(reference=out)
        return self._linear

    def reference(self) -> np.ndarray:
        """(n_units,) slopes at z = 0, where the engine is tilted."""
        return self.linear().reference

    def _along(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) u_i . z, kept for the last points: a path step ends between two midpoints."""
        if not np.logical_or.reduce(z):
            return np.zeros(self.n_units)
        key = z.tobytes()
        if key in self._moved_by:
            self._moved_by[key] = self._moved_by.pop(key)  # the newest last
            return self._moved_by[key]
        found = self._between(z)
        if found is None:
            moved, moves = np.empty(self.n_units), self.linear().moves
            numbers = moves.width * self.n_units
            over(lambda rows: predict(moves, z, rows.start, moved[rows]), self.n_units, numbers)
            found = moved
        self.remember(z, found)
        return found

    def _between(self, z: np.ndarray) -> np.ndarray | None:
        """(n_units,) u_i . z where z is half-way between two points that are kept."""
        if not self._moved_by:
            return None
        points = np.frombuffer(b"".join(self._moved_by)).reshape(-1, len(z))
        size, sizes = np.maximum.reduce(np.abs(z)), np.maximum.reduce(np.abs(points), axis=1)
        near = sizes <= _APART * size  # else products would lose the digits of what is between
        off = np.maximum.reduce(np.abs(0.5 * (points[:, None] + points) - z), axis=2)
        pairs = (off <= _ROUNDING * size) & near[:, None] & near
        p, q = divmod(int(pairs.argmax()), len(points))
        moved = list(self._moved_by.values())
        return 0.5 * (moved[p] + moved[q]) if pairs[p, q] else None

    def remember(self, z: np.ndarray, moved: np.ndarray) -> None:
        """Keep (n_units,) u_i . z, and forget the oldest."""
        if not np.logical_and.reduce(np.isfinite(z)):
            return
        self._moved_by[z.tobytes()] = moved  # the newest last
        while len(self._moved_by) > _KEPT:
            del self._moved_by[next(iter(self._moved_by))]

    def forget(self) -> None:
        """Keep nothing of an earlier chain."""
        self._moved_by: dict[bytes, np.ndarray] = {}

    def longest_scores(self) -> np.ndarray:
        """(1, rows) norms that scores would have at z = 0 with the outcome that fits worst."""
        rows = self.linear()
        found = rows.origin.copy()
        linear.steepest(self._family, rows.a, rows.b, found)
        found *= rows.moves.lengths
        return found[None]

    def _log_likelihood(self, z: np.ndarray) -> np.ndarray:
        all_rows, moved, out = self.linear(), self._along(z), np.empty(self.n_units)

        def part(rows: slice) -> None:
            linear.log_likelihoods(all_rows, rows.start, moved[rows], out[rows])

        over(part, self.n_units, self.n_units * _LOG_LIKELIHOOD)
        return out

    def scores(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) slope of every row at z, its score at the one number that it sees."""
        moved, out = np.empty(self.n_units), np.empty(self.n_units)
        linear.slopes(self.linear(), z, 0, moved, out)
        self.remember(z, moved)
        return out

    def sparse_vectors(
        self, scores: np.ndarray, units: slice
    ) -> Iterator[tuple[slice, SparseBlock]]:
        """Vectors of some units without the coordinates in which they are 0."""
        moves = self.linear().moves
        step = max(1, min(_BLOCK, _CACHED // max(1, moves.width)))
        for start in range(units.start, units.stop, step):
            where = slice(start, min(start + step, units.stop))
            yield where, moves.times(scores, where)

    def work(
        self, scores: np.ndarray, start: np.ndarray, end: np.ndarray, scale: float | np.ndarray
    ) -> np.ndarray:
        """(n_units,) scale_i * g_i . (end - start): the work of clipped score vectors."""
        there = self._along(end)
        return (there - self._along(start)) * scores * scale


def moves_of(
    group: RowGroup,
    weights: Sequence[np.ndarray | None],
    maps: Sequence[np.ndarray | None],
    single: bool,
) -> Moves:
    """Of v = sum of weights . (values at cuts); float32 if all designs are and if `single`."""
    columns = group.columns()
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
    moving = np.empty((layout.moving, n), dtype=np.int64)
    entries = [
        loops.compressed_rows(np.ascontiguousarray(matrix[:, layout.common]))
        for _, _, matrix in cuts
    ]
    of_cuts = [columns.labels.get(cut) for cut, _, _ in cuts]
    for where in loops.row_blocks(n, _BLOCK):
        block = layout.empty(where.stop - where.start)
        common = block.values[:q]
        common[:] = 0.0
        for (cut, w, _), own in zip(cuts, entries, strict=True):
            columns.add(cut, common, w, where.start, own)
        labels = [None if every is None else every[where] for every in of_cuts]
        layout.fill(block, labels, [np.ascontiguousarray(w[:, where]) for _, w, _ in cuts])
        with np.errstate(over="ignore"):  # its length is then infinite, and its weight 0
            values[:, where] = block.values
        moving[:, where] = block.moving
    return Moves.of(layout.common, values[:q], moving, values[q:])
