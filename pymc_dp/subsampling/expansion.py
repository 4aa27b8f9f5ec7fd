"""The sum of all control variates: a quadratic function, computed once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled


class Expansion(NamedTuple):
    """constant + A . delta + delta' B delta / 2, with delta = theta - centre."""

    centre: ndarray  # (d,) theta*
    constant: float
    A: ndarray  # (d,) sum of the records' gradients at the centre
    B: ndarray  # (d, d) sum of their Hessians

    def plus(self, constant: float, slope: ndarray, curvature: ndarray) -> Expansion:
        """The sum with another quadratic function about the same centre."""
        return Expansion(self.centre, self.constant + constant, self.A + slope, self.B + curvature)


def expand(
    centre: ndarray, value: float, gradient: ndarray, hessian: ndarray, order: int
) -> Expansion:
    """The Taylor polynomial of an order."""
    return Expansion(
        np.ascontiguousarray(centre, dtype="float64"),
        float(value),
        gradient * float(order >= 1),
        np.ascontiguousarray(hessian * float(order >= 2)),
    )


@compiled(error_model="numpy")
def quadratic(expansion: Expansion, theta: ndarray, gradient: ndarray) -> float:
    """The value at theta; its gradient is written."""
    d = theta.shape[0]
    value = expansion.constant
    for j in range(d):
        bent = 0.0
        row = expansion.B[j]
        for k in range(d):
            bent += row[k] * (theta[k] - expansion.centre[k])
        value += (theta[j] - expansion.centre[j]) * (expansion.A[j] + 0.5 * bent)
        gradient[j] = expansion.A[j] + bent
    return value
