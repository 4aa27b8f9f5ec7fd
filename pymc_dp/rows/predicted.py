"""The fast engine of records that see the parameters through one linear predictor.

Such a record sees one number v_i, affine in z with direction u_i = d v_i / d z, and has the score
l_i'(v_i) u_i: a pass over the rows reads each u_i once, and makes no vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

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
_KEPT = 3  # points whose products with all rows are kept: of a path, its start and its last step


class PredictorEngine(RowEngine):
    """Log-likelihoods and score vectors of rows with a `predictor` (:mod:`pymc_dp.rows.predictor`).

    Log-likelihoods are up to a constant of the record.  A record outside the support of the
    likelihood contributes nothing, nor does one whose direction or slope overflows.
    """

    def __init__(self, engine: RowEngine, predictor: Predictor) -> None:
        super().__init__(engine.groups, engine.parameters, engine.n_units, engine.coordinates)
        self.predictor = predictor
        self._family = FAMILIES.index(predictor.family)

    def _forget_all(self) -> None:
        super()._forget_all()
        self._linear: LinearRows | None = None
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_linear": None, "_moved_by": {}}

    def part(self, units: slice | np.ndarray) -> Self:
        """The records of some units alone, with the same bits; units in a slice."""
        assert isinstance(units, slice)
        part = super().part(units)
        part._linear = self.linear().part(units)
        return part

    def tilted(self) -> Self:
        """The same records, measured against their linearisation at z = 0."""
        tilted = super().tilted()
        tilted._linear = self._linear
        return tilted

    def pays(self, n: int) -> bool:
        """Whether to keep the vectors u_i of `n` rows; it depends on public things alone."""
        group = self.groups[0]
        phis, maps = group.shared(self.coordinates)
        cuts = group.functions.ordered
        widths = [math.prod(tail) for tail in self.predictor.tails]
        layout = Layout.of([cut.kind for cut in cuts], widths, maps, self.d)
        read = sum(
            len(phi) if cut.kind == "dot" else 1 for cut, phi in zip(cuts, phis, strict=True)
        )
        return layout.width <= _WIDER * read and layout.width * n <= LARGEST

    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Numbers a and b, offsets and weights: v = offset + weights . (values at the cuts)."""
        group = self.groups[0]
        if group.kept is None or group.kept[0] is not self.predictor:
            n, arrays = self.n_units, group.store.read()
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
            group.kept = self.predictor, (a, b, offset, weights)
        rows: tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]] = group.kept[1]
        return rows

    def linear(self) -> LinearRows:
        """The rows as multiples of vectors that do not depend on z."""
        if self._linear is None:
            (a, b, offset, weights), group = self._rows(), self.groups[0]
            phis, maps = group.shared(self.coordinates)
            origin = offset.copy()
            self._add_products(0, weights, [np.ravel(phi) for phi in phis], origin)
            moves = moves_of(group, weights, maps, self.predictor.single)
            finite = np.isfinite(moves.lengths)
            a, b = (np.where(finite, x, 0.0) for x in (a, b))
            self._linear = LinearRows(self._family, a, b, origin, np.empty(0), moves)
        if self.is_tilted and not self._linear.reference.size:
            reference = np.empty(self.n_units)
            linear.slopes(self._linear, np.zeros(self.d), 0, reference)
            self._linear = self._linear._replace(reference=reference)
        return self._linear

    def reference(self) -> np.ndarray:
        """(n_units,) slopes at z = 0, where the engine is tilted."""
        return self.linear().reference

    def _along(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) u_i . z, kept for the last points."""
        if not np.logical_or.reduce(z):
            return np.zeros(self.n_units)
        key = z.tobytes()
        if key in self._moved_by:
            self._moved_by[key] = self._moved_by.pop(key)  # the newest last
            return self._moved_by[key]
        moved, moves = np.empty(self.n_units), self.linear().moves
        numbers = moves.width * self.n_units
        over(lambda rows: predict(moves, z, rows.start, moved[rows]), self.n_units, numbers)
        self._moved_by[key] = moved
        if len(self._moved_by) > _KEPT:
            del self._moved_by[next(iter(self._moved_by))]
        return moved

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
        out = np.empty(self.n_units)
        linear.slopes(self.linear(), z, 0, out)
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
    weights: Sequence[np.ndarray],
    maps: Sequence[np.ndarray | None],
    single: bool,
) -> Moves:
    """Of v = sum of weights . (values at cuts); float32 if all designs are and if `single`."""
    columns = group.columns()
    cuts = [
        (cut, w, matrix)
        for cut, w, matrix in zip(group.functions.ordered, weights, maps, strict=True)
        if matrix is not None
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
    moved = [k for k, part in enumerate(layout.labelled) if part is not None]
    labelled = [(k, columns.labels[cuts[k][0]], cuts[k][1]) for k in moved]
    for where in loops.row_blocks(n, _BLOCK):
        block = layout.empty(where.stop - where.start)
        common = block.values[:q]
        common[:] = 0.0
        for (cut, w, _), own in zip(cuts, entries, strict=True):
            columns.add(cut, common, w, where.start, own)
        layout.fill(block, [(k, own[where], w[:, where]) for k, own, w in labelled])
        with np.errstate(over="ignore"):  # its length is then infinite, and its weight 0
            values[:, where] = block.values
        moving[:, where] = block.moving
    return Moves.of(layout.common, values[:q], moving, values[q:])
