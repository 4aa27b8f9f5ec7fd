"""In which coordinates to clip: whitened where every record pushes every coordinate, one common
scale where a record touches one entry only.

Noise is isotropic in the coordinates in which contributions are clipped, and its size is the
largest norm that a record may have. For dense predictors the norm of a record is spread over all
coordinates, and whitening makes the noise least in posterior standard deviations. For an indexed
parameter a record touches one entry: the norm is a maximum over entries, not a sum, so one scale
for the whole block gives each group's score the same noise however many groups there are. With
whitening, small groups would have the largest norms; their force would be clipped away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.linalg import sqrtm

from pymc_dp.base.matrices import root


def clip_scaling(
    precision: np.ndarray,
    blocks: Sequence[np.ndarray],
    n: int,
    effects: np.ndarray | None = None,
    unseen: np.ndarray | None = None,
) -> np.ndarray:
    """The scaling A of the coordinates theta = m + A z in which contributions are clipped.

    `precision` (d, d) is that of the posterior, in theta; positive definite.  `blocks` are the
    parameters that reach each of the n units through an index; the rest is dense.  `effects` (d, d)
    is T of theta' = T theta, in which the entries of the blocks are what units see.  `unseen` are
    parameters that reach no unit, as those of the prior of group effects: their scores are 0, and
    they are kept apart from the others.  A has mean square posterior width 1 in z, that of seen and
    of unseen parameters.

    Notes
    -----
    With noise of sd proportional to the norm q of a record, the sum over parameters of noise
    variance over posterior variance is the trace of Sigma Q^-1 times q^2, Q = A A'. For block b
    with tr(Sigma_b Q_b^-1) = e_b and mean square norm q_b^2 = tr(Q_b W_b) / n, scaling the blocks
    by lambda_b, lambda_b^2 = sqrt(e_b) / q_b, minimises the product of sum e_b / lambda_b^2 and
    sum lambda_b^2 q_b^2 (Cauchy-Schwarz). Within the dense block the same argument gives the
    geometric mean of Sigma_b and W_b^-1.
    """
    d = len(precision)
    if effects is not None:
        back = np.linalg.inv(effects)
        return np.asarray(back @ clip_scaling(back.T @ precision @ back, blocks, n, None, unseen))
    if unseen is not None and 0 < len(unseen) < d:
        seen = np.setdiff1d(np.arange(d), unseen)
        inside = [np.searchsorted(seen, block) for block in blocks]
        scaling, covariance = np.zeros((d, d)), np.linalg.inv(precision)
        marginal = np.linalg.inv(covariance[np.ix_(seen, seen)])
        scaling[np.ix_(seen, seen)] = clip_scaling(marginal, inside, n)
        scaling[np.ix_(unseen, unseen)] = root(covariance[np.ix_(unseen, unseen)])
        return scaling
    covariance = np.linalg.inv(precision)
    covariance = (covariance + covariance.T) / 2.0
    indexed = np.concatenate(blocks) if blocks else np.empty(0, dtype=int)
    dense = np.setdiff1d(np.arange(d), indexed)
    scaling = np.zeros((d, d))
    for block in [dense, *blocks]:
        if block.size == 0:
            continue
        where = np.ix_(block, block)
        sigma, weight = covariance[where], precision[where]
        if block is dense:
            shape = root(_geometric_mean(sigma, np.linalg.inv(weight)))
        else:
            shape = np.eye(len(block))
        square = shape @ shape.T
        error = float(np.trace(np.linalg.solve(square, sigma)))
        norm = float(np.sqrt(np.trace(square @ weight) / n))
        scaling[where] = np.sqrt(np.sqrt(error) / norm) * shape
    inner = np.linalg.solve(scaling, covariance) @ np.linalg.inv(scaling).T
    return np.asarray(scaling * np.sqrt(np.trace(inner) / d))


def _geometric_mean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A # B = A^1/2 (A^-1/2 B A^-1/2)^1/2 A^1/2."""
    half = root(a)
    inner = np.linalg.solve(half, np.linalg.solve(half, b).T)
    return np.asarray(half @ np.real(sqrtm((inner + inner.T) / 2.0)) @ half.T)
