"""Dynamics in one set of coordinates, releases in another.

Contributions are clipped, and noise is isotropic, in z; the chain moves in w, z = B w, where the
posterior is about N(0, I). The two choices are independent: the first decides what noise costs, the
second how the chain mixes (a mass matrix (B B')^-1 in z).
"""

from __future__ import annotations

import numpy as np

from pymc_dp.kernels.interfaces import Array, Batch, Mask, Path, PathQueries


class InBasis:
    """Path queries about z = B w, asked in w.

    A score in w is B' times that in z, so its noise has covariance sigma^2 B'B; public noise from
    `rng` makes it isotropic, as the kernel assumes. `queries` are in z; `basis` is B, (d, d) and
    invertible.
    """

    def __init__(self, queries: PathQueries, basis: Array, rng: np.random.Generator) -> None:
        self.queries = queries
        self.basis = basis
        self.rng = rng
        values, vectors = np.linalg.eigh(basis.T @ basis)
        sd = queries.gradient_noise_sd
        self._sd = sd * float(np.sqrt(values[-1]))
        extra = sd * np.sqrt(np.maximum(values[-1] - values, 0.0))
        self._extra = vectors * extra if np.any(extra > 1e-9 * self._sd) else None

    @property
    def gradient_noise_sd(self) -> float:
        """Standard deviation of the noise on each coordinate of a score, in w."""
        return self._sd

    def path(self, w_start: Array) -> _PathInBasis:
        """Begin a trajectory at ``w_start``."""
        return _PathInBasis(self, w_start)


class _PathInBasis:
    def __init__(self, queries: InBasis, w_start: Array) -> None:
        self._of = queries
        self._path: Path = queries.queries.path(w_start @ queries.basis.T)

    def gradient(self, mid: Array) -> Array:
        score = self._path.gradient(mid @ self._of.basis.T) @ self._of.basis
        if self._of._extra is not None:
            score = score + self._of.rng.standard_normal(mid.shape) @ self._of._extra.T
        return score

    def advance(self, displacement: Array) -> None:
        self._path.advance(displacement @ self._of.basis.T)

    def energy_error(self, w_end: Array, lower: Batch, upper: Batch) -> tuple[Batch, Batch]:
        return self._path.energy_error(w_end @ self._of.basis.T, lower, upper)

    def finish(self, accepted: Mask) -> None:
        self._path.finish(accepted)
