"""Mode of a public target, and the precision there."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from pymc_dp.base.matrices import minus_hessian, within

#: How far the mode may be, in standard deviations per parameter: what is known holds no farther.
_FURTHEST = 5.0


class Target(Protocol):
    """A public log density."""

    def log_density(self, z: np.ndarray) -> float | np.ndarray:
        """Log density at z, (d,)."""

    def gradient(self, z: np.ndarray) -> np.ndarray:
        """(d,) gradient."""


def climb(
    target: Target, metric: np.ndarray, start: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mode (d,) of a public target, and the precision there, by Newton steps in a trust region.

    `metric` (d, d) is the precision of what is known of the target before: its mode is looked for
    within five standard deviations of the start for each parameter. Steps begin at one unit of z
    for each. The start is 0 by default.
    """
    d = len(metric)
    start = np.zeros(d) if start is None else start
    z, radius = start, math.sqrt(d)
    for _ in range(200):
        precision = _precision(target, z)
        slope = np.asarray(target.gradient(z))
        step = within(precision, np.eye(d), slope, radius)
        gain = float(target.log_density(z + step) - target.log_density(z))
        reach = z + step - start
        far = float(reach @ metric @ reach) > _FURTHEST**2 * d
        if far or not gain > -1e-9:  # a scale in the prior may have its mode at 0
            radius /= 4.0
            if radius < 1e-10:
                break
            continue
        z, radius = z + step, radius * 2.0
        if float(np.linalg.norm(step)) < 1e-6:
            break
    return z, _precision(target, z)


def _precision(target: Target, z: np.ndarray, step: float = 1e-4) -> np.ndarray:
    """Minus the Hessian, eigenvalues in absolute value."""
    hessian = minus_hessian(target.gradient, z, np.full(len(z), step))
    hessian = np.where(np.isfinite(hessian), hessian, 0.0)
    values, vectors = np.linalg.eigh(hessian)
    return np.asarray((vectors * np.maximum(np.abs(values), 1e-8)) @ vectors.T)
