"""Whether log-likelihoods are piecewise linear in what the rows see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pymc_dp.rows.etas import inputs
from pymc_dp.rows.store import RowGroup

_ROWS = 16
_STEP = 1e-3
_ZERO = 1e-9


def is_flat(groups: Sequence[RowGroup], places: Sequence[np.ndarray]) -> bool:
    """Whether rows push a shared value by a force that does not change with it.

    True for Laplace likelihoods and quantile regression: their curvature is zero almost everywhere,
    and says nothing about the width of the posterior.  `places`, (d,) each, are public.

    Public: looked at with made-up rows of zeros, and of ones, and with made-up predictors.  A force
    that does not change counts only if its parameters push nothing else: the two terms of a Poisson
    log-likelihood ``y log(m) - m`` are linear in what they see.
    """
    rng = np.random.default_rng(0)
    for group in groups:
        made_up = group.synthetic(_ROWS)
        functions, columns = made_up.functions, made_up.columns()
        ones = functions.row_data(group.store.synthetic(_ROWS, 1).read())
        everywhere = None
        for theta in places:
            phis, jacobians = functions.shared(theta)
            alone = _alone(jacobians)
            etas, labels, zeros = inputs(made_up, columns, phis, slice(0, _ROWS))
            etas = [rng.normal(size=eta.shape) for eta in etas]
            for blocks in (zeros, ones):
                flat = np.zeros(len(functions.ordered), dtype=bool)
                for k, smooth in enumerate(functions.differentiable):
                    if not (smooth and alone[k]):
                        continue
                    moved_etas, moved_phis = list(etas), list(phis)
                    moved = moved_etas if k < functions.n_dots else moved_phis
                    # not all by the same: choices do not see what is added to all of them
                    move = _STEP * rng.uniform(0.5, 1.5, np.shape(moved[k]))
                    # of the same type and number of axes, or numba compiles once more
                    moved[k] = np.asarray(moved[k] + move, dtype=moved[k].dtype, order="C")
                    with np.errstate(all="ignore"):
                        here = functions.scores(etas, phis, labels, blocks)[k]
                        there = functions.scores(moved_etas, moved_phis, labels, blocks)[k]
                    assert here is not None and there is not None
                    # a made-up outcome may be impossible, and its score infinite
                    same = np.isclose(there, here, rtol=_ZERO, atol=0.0) & np.isfinite(here)
                    flat[k] = np.mean(same & (here != 0.0)) > 0.5
                everywhere = flat if everywhere is None else everywhere & flat
        if everywhere is not None and everywhere.any():
            return True
    return False


def _alone(jacobians: Sequence[np.ndarray | None]) -> list[bool]:
    """Whether the parameters behind each shared value are behind no other."""
    behind = [None if j is None else np.any(j != 0.0, axis=0) for j in jacobians]
    found = []
    for k, mine in enumerate(behind):
        others = [b for i, b in enumerate(behind) if i != k and b is not None]
        found.append(mine is not None and not any(np.any(mine & other) for other in others))
    return found
