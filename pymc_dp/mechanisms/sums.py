"""One pass over the records: scores, clipped and added, tile by tile.

A tile of rows stays in the fastest caches from its data to its integers.  Sums are of integers and
every row is computed by itself, so results have the same bits for any tile and number of threads.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from pymc_dp._jit import compiled
from pymc_dp.clipping import clip_multiples_sum, clip_norm_sum, clip_sparse_sum
from pymc_dp.rows.engine import Engine, Scores
from pymc_dp.rows.linear import LinearRows, slopes
from pymc_dp.rows.sparse import SparseBlock
from pymc_dp.threads import over

__all__ = ["add_clipped", "clipped_sum"]

#: Rows of a tile.
_TILE = 512


def clipped_sum(
    engine: Engine, z: ndarray, inverse_unit: float, bound: float
) -> tuple[ndarray, Scores, ndarray]:
    """Integer sum of the clipped score vectors of all units at z.

    Parameters
    ----------
    engine : Engine
    z : (d,) ndarray
    inverse_unit, bound : float
        As in :func:`pymc_dp.clipping.clip_norm_sum`.

    Returns
    -------
    total : (d,) int64 ndarray
    scores : Scores
        Of every row, before clipping.
    scale : (n_units,) ndarray
        What each vector was scaled by.
    """
    total, scale = np.zeros(engine.d, dtype=np.int64), np.empty(engine.n_units)
    rows = engine.linear()
    if rows is None:
        scores = engine.scores(z)

        def general(units: slice) -> ndarray:
            own = np.zeros(engine.d, dtype=np.int64)
            for where, block in engine.sparse_vectors(scores, units):
                add_clipped(block, inverse_unit, bound, own, scale[where])
            return own

        numbers = engine.n_units * engine.d if engine.divisible else 0
        for own in over(general, engine.n_units, numbers):
            total += own
        return total, scores, scale
    moved, found = np.empty(engine.n_units), np.empty(engine.n_units)

    def part(where: slice) -> ndarray:
        own = np.zeros(engine.d, dtype=np.int64)
        at = (where.start, moved[where], found[where], scale[where])
        _linear_sum(rows, z, inverse_unit, bound, own, *at, _TILE)
        return own

    for own in over(part, engine.n_units, engine.n_units * rows.moves.width):
        total += own
    engine.remember(z, moved)
    return total, Scores([[found[None]]], [[None]]), scale


def add_clipped(
    block: SparseBlock, inverse_unit: float, bound: float, total: ndarray, scale: ndarray
) -> None:
    """Add the clipped, rounded vectors of a block to an integer total: `clip_norm_sum`."""
    if len(block.common) == len(total):
        clip_norm_sum(block.values, inverse_unit, bound, total, scale)
    else:
        clip_sparse_sum(*block, inverse_unit, bound, total, scale)


@compiled(error_model="numpy")
def _linear_sum(
    rows: LinearRows,
    z: ndarray,
    inverse_unit: float,
    bound: float,
    total: ndarray,
    first: int,
    moved: ndarray,
    found: ndarray,
    scale: ndarray,
    tile: int,
) -> None:
    """Add the clipped scores of the rows from `first` on, as many as `found` has entries."""
    multiples, moves = np.empty(tile), rows.moves
    for start in range(0, found.shape[0], tile):
        stop = min(start + tile, found.shape[0])
        factors = found[start:stop]
        slopes(rows, z, first + start, moved[start:stop], factors)
        clip_multiples_sum(
            moves.common_values,
            moves.common,
            moves.moving_values,
            moves.moving,
            moves.lengths,
            first + start,
            factors,
            inverse_unit,
            bound,
            total,
            scale[start:stop],
            multiples[: stop - start],
        )
