"""Affine coordinates of the parameters, and scores of rows in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Affine coordinates, theta = location + scaling @ z; shapes (d,) and (d, d), invertible."""

    location: np.ndarray
    scaling: np.ndarray

    def theta(self, z: np.ndarray) -> np.ndarray:
        """(d,) unconstrained parameters at z."""
        return self.location + self.scaling @ z

    def z(self, theta: np.ndarray) -> np.ndarray:
        """(d,) coordinates of unconstrained parameters."""
        return np.linalg.solve(self.scaling, theta - self.location)


@dataclass(eq=False)
class Scores:
    """Derivatives at one z, by group and cut: rows (k, n_rows), maps d phi / d z (entries, d)."""

    rows: list[list[np.ndarray | None]]
    maps: list[list[np.ndarray | None]]
