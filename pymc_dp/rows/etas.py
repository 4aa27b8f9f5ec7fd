"""What a block of rows sees: values at the cuts, how they move with z, and second derivatives.

Each row sees the parameters through a few numbers eta (a linear predictor, a group effect, a
scale: :mod:`pymc_dp.rows.cuts`).  Where they are affine in z, with u_a = d eta_a / d z, the
curvature of a row is -sum_ab S_ab u_a u_b', where S, the second derivatives of its log-likelihood
by its own eta, needs as many evaluations of the row functions as a row has eta, whatever d is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pymc_dp.rows import loops
from pymc_dp.rows.cuts import Cut
from pymc_dp.rows.store import Columns, RowGroup

Inputs = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]
Maps = Sequence[np.ndarray | None]


def inputs(group: RowGroup, columns: Columns, phis: list[np.ndarray], where: slice) -> Inputs:
    """The linear predictors, labels and data of a block of rows."""
    functions = group.functions
    etas = []
    for cut, phi in zip(functions.ordered[: functions.n_dots], phis, strict=False):
        matrix = np.asarray(phi, dtype="float64")
        eta = np.empty((matrix.size // matrix.shape[0], where.stop - where.start))
        loops.linear_predictor(
            columns.designs[cut], where.start, matrix.reshape(matrix.shape[0], -1), eta
        )
        etas.append(eta[0] if phi.ndim == 1 else np.ascontiguousarray(eta.T))
    labels = [columns.labels[cut][where] for cut in functions.labels]
    return etas, labels, [block[where] for block in columns.blocks]


def width(cut: Cut, phi: np.ndarray) -> int:
    """How many numbers a row sees at a cut."""
    return phi.size if cut.kind == "copy" else phi.size // max(phi.shape[0], 1)


def _by_eta(cut: Cut, width: int, matrix: np.ndarray) -> list[np.ndarray]:
    """Parts of d phi / d z, one for each number of a row: (coefficients or labels or 1, d)."""
    if cut.kind == "copy":
        return [matrix[k : k + 1] for k in range(width)]
    return [np.ascontiguousarray(matrix[k::width]) for k in range(width)]


def seen(group: RowGroup, phis: Sequence[np.ndarray], maps: Maps) -> np.ndarray:
    """(K, d) whether the k-th number that rows see depends on the j-th coordinate; public."""
    found = []
    for cut, phi, matrix in zip(group.functions.ordered, phis, maps, strict=True):
        if matrix is not None:
            found += [part.any(axis=0) for part in _by_eta(cut, width(cut, phi), matrix)]
    return np.array(found, dtype=bool).reshape(len(found), -1)


def directions(
    group: RowGroup, columns: Columns, phis: Sequence[np.ndarray], maps: Maps, where: slice
) -> np.ndarray:
    """(K, d, rows) derivatives u_a of the numbers that a block of rows sees."""
    ones = np.ones((1, where.stop))
    found = []
    for cut, phi, matrix in zip(group.functions.ordered, phis, maps, strict=True):
        if matrix is None:
            continue
        for part in _by_eta(cut, width(cut, phi), matrix):
            u = np.zeros((part.shape[1], where.stop - where.start))
            at = (ones, where.start, *loops.compressed_rows(part))
            if cut.kind == "dot":
                loops.add_products(u, columns.designs[cut], *at)
            elif cut.kind == "index":
                loops.add_indexed(u, columns.labels[cut], len(part), *at)
            else:
                loops.add_copies(u, *at)
            found.append(u)
    return np.array(found)


def second_derivatives(
    group: RowGroup,
    columns: Columns,
    phis: list[np.ndarray],
    maps: Maps,
    where: slice,
    step: float,
    norms: np.ndarray,
) -> np.ndarray:
    """Second derivatives S of the log-likelihoods of a block of rows by what these rows see.

    S, (K, K, rows), is symmetrised, and 0 by a number that does not move.  It is found by forward
    differences of length `step` in z: each number moves by `step` times its |u_a|.  `phis` are
    shared values, per cut, and `maps` are d phi / d z, per differentiable cut.  `norms`, (K, rows),
    are |u_a|, read for linear predictors only.  A number that several rows share moves by the same
    length for all of them, which is public.
    """
    functions = group.functions
    etas, labels, blocks = inputs(group, columns, phis, where)

    def scores(etas: list[np.ndarray], phis: list[np.ndarray]) -> np.ndarray:
        by_cut = functions.scores(etas, phis, labels, blocks)
        found = np.concatenate([np.ascontiguousarray(s.T) for s in by_cut if s is not None])
        loops.clean(found)
        return found

    start = scores(etas, phis)
    found = np.empty((len(start), *start.shape))
    a = 0
    for k, (cut, phi, matrix) in enumerate(zip(functions.ordered, phis, maps, strict=True)):
        if matrix is None:
            continue
        for j, part in enumerate(_by_eta(cut, width(cut, phi), matrix)):
            at = etas[k] if cut.kind == "dot" else phi
            moved = at.copy()
            entries = moved.reshape(1 if cut.kind == "copy" else len(moved), -1)[:, j]
            if cut.kind == "dot":
                entries += step * norms[a]
            else:
                entries += (step * np.linalg.norm(part, axis=1)).astype(phi.dtype)
            length = entries - at.reshape(len(entries), -1)[:, j]  # as it was rounded
            if cut.kind == "dot":
                end = scores([*etas[:k], moved, *etas[k + 1 :]], phis)
            else:
                end = scores(etas, [*phis[:k], moved, *phis[k + 1 :]])
            if cut.kind == "index":
                length = length[columns.labels[cut][where]]
            loops.slopes(start, end, length.astype("float64"), found[a])
            a += 1
    return (found + found.transpose(1, 0, 2)) / 2.0
