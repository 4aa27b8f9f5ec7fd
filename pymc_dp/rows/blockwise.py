"""Compiled functions of rows, for all rows of a group: block by block, in threads where it pays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pymc_dp.base.threads import over
from pymc_dp.rows import etas as through
from pymc_dp.rows import loops
from pymc_dp.rows.store import RowGroup

#: Rows per block, at most: what a block needs stays in a second-level cache.
BLOCK = 8192
#: What a function of rows costs, as numbers read for each row.
_COST = 8


def log_likelihoods(group: RowGroup, phis: list[np.ndarray]) -> np.ndarray:
    """(n_rows,) log-likelihoods, given the shared value of each cut."""
    columns, values = group.columns(), np.empty(group.n_rows)

    def block(where: slice) -> None:
        etas, labels, data = through.inputs(group, columns, phis, where)
        values[where] = group.functions.loglik(etas, phis, labels, data)

    _each(group, block)
    return values


def scores(group: RowGroup, phis: list[np.ndarray]) -> list[np.ndarray | None]:
    """Per cut, (k, n_rows) derivatives of log-likelihoods by what rows see; 0 if not finite."""
    functions, columns = group.functions, group.columns()
    found = [
        np.empty((through.width(cut, phi), group.n_rows)) if smooth else None
        for cut, phi, smooth in zip(functions.ordered, phis, functions.differentiable, strict=True)
    ]

    def block(where: slice) -> None:
        etas, labels, data = through.inputs(group, columns, phis, where)
        parts = functions.scores(etas, phis, labels, data)
        for whole, part in zip(found, parts, strict=True):
            if whole is not None and part is not None:
                own = np.array(part.T, order="C")
                loops.clean(own)
                whole[:, where] = own

    _each(group, block)
    return found


def _each(group: RowGroup, block: Callable[[slice], None]) -> None:
    blocks = loops.row_blocks(group.n_rows, BLOCK)
    numbers = group.n_rows * _COST if group.functions.threaded else 0

    def part(some: slice) -> None:
        for where in blocks[some]:
            block(where)

    for _ in over(part, len(blocks), numbers):
        pass
