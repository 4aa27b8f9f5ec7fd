"""How the d_k of a sample make up an estimate, and what each adds to its gradient."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled

#: Sizes of a mini-batch that stand for estimators without mini-batches.
PERTURBED, MEAN = 0, -1


@compiled(error_model="numpy")
def weigh(d: ndarray, scale: float, shift: float, batch: int, weights: ndarray) -> float:
    """The estimate; its derivative by each d_k is written to `weights`.

    Scale, shift and batch are those of :mod:`pymc_dp.subsampling.estimates`.
    """
    m = d.shape[0]
    if batch > 0:  # eq. 5.1, but for its constants
        value = 0.0
        for first in range(0, m, batch):
            term = scale * d[first : first + batch].sum() - shift
            value += np.log(abs(term))
            weights[first : first + batch] = scale / term
        return value
    total = d.sum()
    if batch == MEAN:
        weights[:] = scale
        return scale * total
    # eq. 4.5
    mean, square = total / m, 0.0
    for i in range(m):
        away = d[i] - mean
        square += away * away
        weights[i] = scale - scale * scale * away
    return scale * total - 0.5 * scale * scale * square
