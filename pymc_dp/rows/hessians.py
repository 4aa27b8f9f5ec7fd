"""Curvatures of units whose rows see z through a few numbers, without differences along z."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.rows import loops
from pymc_dp.rows.engine import RowEngine

Blocks = Iterator[tuple[slice, ndarray]]

#: Numbers of a block of packed matrices, and of the derivatives that it is made of: what fits into
#: the second and the third level of cache.
_PACKED, _DIRECTIONS = 2**16, 2**20
#: Rows of a block of packed matrices, at least.
_SHORTEST = 64
_ROOT_2 = math.sqrt(2.0)


def sees_few(engine: RowEngine) -> bool:
    """Whether rows see z through at least one and at most d numbers, all of them affine in z."""
    counts = engine.eta_counts()
    return counts is not None and 1 <= min(counts) and max(counts) <= engine.d


def packed_curvatures(
    engine: RowEngine, step: float, diagonal: bool
) -> Iterator[tuple[slice, ndarray]]:
    """Minus the second derivatives of the log-likelihood of every unit by z, at z = 0.

    By forward differences of length `step` in z, for an engine of which :func:`sees_few` holds.
    Yields units, and (size, units of the block) values, which are valid until the next ones and
    packed as in :class:`pymc_dp.rows.contributions.Curvature`.
    """
    yield from by_unit(engine, diagonal, lambda g: _of_rows(engine, g, step, diagonal))


def by_unit(
    engine: RowEngine, diagonal: bool, of_rows: Callable[[int], Blocks]
) -> Iterator[tuple[slice, ndarray]]:
    """Packed matrices of units from those of the rows of each group."""
    if engine.one_row_per_unit:
        yield from of_rows(0)
        return
    d = engine.d
    total = np.zeros((d if diagonal else d * (d + 1) // 2, engine.n_units))
    for g, group in enumerate(engine.groups):
        for where, block in of_rows(g):
            if group.units is None:
                total[:, where] += block
            else:
                loops.add_to_units(block, group.units[where], total)
    yield slice(0, engine.n_units), total


def outer_products(vectors: ndarray, diagonal: bool) -> Iterator[tuple[slice, ndarray]]:
    """Packed v_i v_i' of the columns of a (d, n) array, block by block."""
    d, n = vectors.shape
    everywhere, seconds = np.ones((1, d), dtype=bool), np.full((1, 1, n), -1.0)
    yield from packed(everywhere, vectors[None], seconds, diagonal)


def _of_rows(
    engine: RowEngine, g: int, step: float, diagonal: bool
) -> Iterator[tuple[slice, ndarray]]:
    n, counts = engine.groups[g].n_rows, engine.eta_counts()
    assert counts is not None
    at_once = max(1, min(8192, _DIRECTIONS // (counts[g] * (engine.d + counts[g]))))
    for start in range(0, n, at_once):
        rows = slice(start, min(start + at_once, n))
        seen, directions = engine.directions(g, rows)
        seconds = engine.second_derivatives(g, rows, step, _norms(directions))
        for where, block in packed(seen, directions, seconds, diagonal):
            yield slice(start + where.start, start + where.stop), block


def packed(
    seen: ndarray, directions: ndarray, seconds: ndarray, diagonal: bool
) -> Iterator[tuple[slice, ndarray]]:
    """Packed -sum_ab u_a S_ab u_b' in blocks that stay in a cache, each valid until the next."""
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
def _norms(directions: ndarray) -> ndarray:
    """|directions[k, :, i]|."""
    width, d, n = directions.shape
    out = np.zeros((width, n))
    for k in range(width):
        for j in range(d):
            for i in range(n):
                out[k, i] += directions[k, j, i] * directions[k, j, i]
        for i in range(n):
            out[k, i] = math.sqrt(out[k, i])
    return out


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
