"""Public structure of a model: which parameters are group effects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pymc_dp.rows.store import RowGroup

__all__ = ["effects", "index_blocks"]


def index_blocks(groups: Sequence[RowGroup], theta: np.ndarray) -> list[np.ndarray]:
    """Blocks of parameters of which a row sees one entry at a time.

    Parameters
    ----------
    groups : sequence of RowGroup
    theta : (d,) ndarray
        Where to look, a public point.

    Returns
    -------
    list of (k,) int64 ndarray
        Indices of parameters, k >= 2, in the order of their first entries.  They reach the rows
        through "index" cuts alone, each of them in one label of a cut, and all of one block in the
        same columns.  The intercepts ``alpha[g]`` are a block, so are the ``z`` of
        ``(mu + tau * z)[g]``, and each column of ``slopes[g]``.  What is not listed is dense.

    Notes
    -----
    Read from the zeros of d phi / d theta, which depends on the model and on `theta`, not on data.
    A derivative may vanish by chance at one point (that by tau at z = 0), so a second point nearby
    is looked at as well.
    """
    nearby = theta + np.random.default_rng(0).uniform(0.05, 0.15, theta.size)
    dense: set[int] = set()
    labels: dict[int, set[tuple[int, int, int]]] = {}
    columns: dict[int, set[tuple[int, int, int]]] = {}
    for g, group in enumerate(groups):
        for at in (theta, nearby):
            phis, jacobians = group.functions.shared(at)
            for k, cut in enumerate(group.functions.ordered):
                jacobian = jacobians[k]
                if jacobian is None:
                    continue
                entries, parameters = np.nonzero(jacobian)
                if cut.kind != "index":
                    dense.update(parameters.tolist())
                    continue
                width = phis[k].size // len(phis[k])
                for entry, j in zip(entries.tolist(), parameters.tolist(), strict=True):
                    labels.setdefault(j, set()).add((g, k, entry // width))
                    columns.setdefault(j, set()).add((g, k, entry % width))
    found: dict[frozenset[tuple[int, int, int]], list[int]] = {}
    for j in sorted(labels.keys() - dense):
        if len(labels[j]) == len({(g, k) for g, k, _ in labels[j]}):
            found.setdefault(frozenset(columns[j]), []).append(j)
    return [np.array(block, dtype=np.int64) for block in found.values() if len(block) > 1]


def effects(groups: Sequence[RowGroup], theta: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Index blocks, and coordinates in which their entries are the effects that rows see.

    Parameters
    ----------
    groups : sequence of RowGroup
    theta : (d,) ndarray
        A public point.

    Returns
    -------
    blocks : list of (k,) int64 ndarray
        From :func:`index_blocks`.
    effects : (d, d) ndarray
        T of theta' = T theta: the identity, but for a parameter z_l of a block, whose row is the
        derivative of the effect phi_l by theta. For ``(mu + tau * z)[g]`` theta' has the group
        means themselves in place of the ``z``: a row that sees one of them has no score in ``mu``
        and ``tau`` then, and the ridge along which only these can move needs no noise.
    """
    blocks = index_blocks(groups, theta)
    change = np.eye(theta.size)
    rows: dict[int, list[np.ndarray]] = {}
    members = {int(j) for block in blocks for j in block}
    for group in groups:
        _, jacobians = group.functions.shared(theta)
        for k, cut in enumerate(group.functions.ordered):
            jacobian = jacobians[k]
            if cut.kind != "index" or jacobian is None:
                continue
            for j in members:
                for entry in np.flatnonzero(jacobian[:, j]):
                    rows.setdefault(j, []).append(jacobian[entry])
    for block in blocks:
        # an effect that is seen through several cuts has no one row that stands for it
        if all(len(rows.get(int(j), [])) == 1 for j in block):
            for j in map(int, block):
                change[j] = rows[j][0]
    if not np.linalg.cond(change) < 1e8:
        change = np.eye(theta.size)
    return blocks, change
