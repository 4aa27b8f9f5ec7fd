"""Affine coordinates and small linear algebra: roots, positive parts, trust regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Affine coordinates, theta = location + scaling @ z; shapes (d,) and (d, d), invertible."""

    location: np.ndarray
    scaling: np.ndarray

    def same(self, other: Coordinates) -> bool:
        """Whether the two are equal."""
        pairs = (self.location, other.location), (self.scaling, other.scaling)
        return self is other or all(np.array_equal(*pair) for pair in pairs)

    def theta(self, z: np.ndarray) -> np.ndarray:
        """(d,) unconstrained parameters at z."""
        return self.location + self.scaling.dot(z)  # half the time of @, the same bits

    def z(self, theta: np.ndarray) -> np.ndarray:
        """(d,) coordinates of unconstrained parameters."""
        return np.linalg.solve(self.scaling, theta - self.location)


def minus_hessian(
    gradient: Callable[[np.ndarray], np.ndarray], at: np.ndarray, steps: np.ndarray
) -> np.ndarray:
    """(d, d) minus the Hessian, by central differences of the gradient of half lengths `steps`
    (d,).
    """
    rows = [
        (gradient(at - step * axis) - gradient(at + step * axis)) / (2.0 * step)
        for step, axis in zip(steps, np.eye(len(at)), strict=True)
    ]
    hessian = np.array(rows)
    return (hessian + hessian.T) / 2.0


def positive_part(matrix: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """A symmetric matrix with its eigenvalues raised to at least `floor`."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2.0)
    return (vectors * np.maximum(values, floor)) @ vectors.T


def within(hessian: np.ndarray, metric: np.ndarray, slope: np.ndarray, radius: float) -> np.ndarray:
    """The step (d,) that is best for a quadratic model in a trust region (More 1978). (hessian +
    lambda metric)^-1 slope with the least lambda >= 0 that makes s' metric s <= radius^2; `hessian`
    and `metric` are positive definite, `slope` is the gradient of what is maximised.
    """
    values, basis = eigh(hessian, metric)  # basis' metric basis = I
    inner = basis.T @ slope
    penalty = 0.0
    if np.sum((inner / values) ** 2) > radius**2:
        low, high = 0.0, float(np.linalg.norm(inner)) / radius
        for _ in range(60):
            penalty = (low + high) / 2.0
            if np.sum((inner / (values + penalty)) ** 2) > radius**2:
                low = penalty
            else:
                high = penalty
        penalty = high
    return basis @ (inner / (values + penalty))


def root(matrix: np.ndarray) -> np.ndarray:
    """A square root R of a positive semidefinite matrix, R R' = matrix, with principal axes as
    columns. Axes that mix large and small groups give score changes longer tails; an anchor may not
    pay then.
    """
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2.0)
    return np.asarray(vectors * np.sqrt(np.maximum(values, values[-1] * 1e-14)))
