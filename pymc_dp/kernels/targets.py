"""Public terms with what was released about the records added, and coordinates to move in."""

from __future__ import annotations

import math

import numpy as np

from pymc_dp.kernels.interfaces import Array, Batch, Path, PathQueries, Prior


class Tilted:
    """Public terms with a known linear term: log pi0(z) + G . z, with G an anchored score, (d,).
    Restricted to norm(z) <= radius: a tilt by noise need not be proper where the prior has heavy
    tails and the likelihood is flat.
    """

    def __init__(self, prior: Prior, score: Array, radius: float = math.inf) -> None:
        self.prior = prior
        self.score = score
        self.radius = radius

    def log_density(self, z: Array) -> Batch:
        """Log density at ``z`` up to a constant; minus infinity outside of the ball."""
        inside = np.vecdot(z, z) <= self.radius**2
        return np.where(inside, self.prior.log_density(z) + z @ self.score, -np.inf)

    def gradient(self, z: Array) -> Array:
        """Gradient of `log_density`."""
        return self.prior.gradient(z) + self.score


class Quadratic:
    """Public terms and the likelihood of a noisy score under a quadratic log-likelihood.

    If the log-likelihood is G . z - z'Hz / 2, then G is N(Hz, H). What was released at z = 0, with
    noise of covariance V, is N(Hz, H + V): its likelihood accounts for the noise, with any prior.
    `score` (d,) is G, `curvature` H, positive semidefinite, and `noise` V.
    """

    def __init__(self, prior: Prior, score: Array, curvature: Array, noise: Array) -> None:
        self.prior = prior
        self.score = score
        self.curvature = curvature
        self._weight = np.linalg.pinv(curvature + noise, hermitian=True)

    @property
    def information(self) -> Array:
        """(d, d) precision of what was released, H (H + V)^-1 H."""
        return self.curvature @ self._weight @ self.curvature

    def _residual(self, z: Array) -> Array:
        return self.score - z @ self.curvature

    def log_density(self, z: Array) -> Batch:
        """Log density at ``z`` up to a constant."""
        residual = self._residual(z)
        square = np.vecdot(residual @ self._weight, residual)
        return self.prior.log_density(z) - square / 2.0

    def gradient(self, z: Array) -> Array:
        """Gradient of `log_density`."""
        return self.prior.gradient(z) + self._residual(z) @ self._weight @ self.curvature


class NoRecords:
    """Path queries of a target that is public altogether."""

    gradient_noise_sd = 0.0

    def path(self, z_start: Array) -> NoRecords:
        """Begin a trajectory."""
        return self

    def gradient(self, z: Array, mid: Array) -> Array:
        """No score."""
        return np.zeros_like(mid)

    def energy_error(self, z_end: Array, lower: Batch, upper: Batch) -> tuple[Batch, Batch]:
        """No error, no noise."""
        return 0.0, 0.0


# -- coordinates -----------------------------------------------------------------------------------


class InBasis:
    """Path queries about z = B w, asked in w, with B = `basis`, (d, d) and invertible.

    Contributions are clipped, and noise is isotropic, in z, which decides what noise costs; the
    chain moves in w, where the posterior is about N(0, I), which decides how the chain mixes (a
    mass matrix (B B')^-1 in z). A score in w is B' times that in z, so its noise has covariance
    sigma^2 B'B; public noise from `rng` makes it isotropic, as the kernel assumes.
    """

    def __init__(self, queries: PathQueries, basis: Array, rng: np.random.Generator) -> None:
        self.queries = queries
        self.basis = basis
        self.rng = rng
        values, vectors = np.linalg.eigh(basis.T @ basis)
        sd = queries.gradient_noise_sd
        #: Standard deviation of the noise on each coordinate of a score, in w.
        self.gradient_noise_sd = sd * float(np.sqrt(values[-1]))
        extra = sd * np.sqrt(np.maximum(values[-1] - values, 0.0))
        self._extra = vectors * extra if np.any(extra > 1e-9 * self.gradient_noise_sd) else None

    def path(self, w_start: Array) -> _PathInBasis:
        """Begin a trajectory at ``w_start``."""
        return _PathInBasis(self, w_start)


class _PathInBasis:
    def __init__(self, queries: InBasis, w_start: Array) -> None:
        self._of = queries
        self._path: Path = queries.queries.path(w_start.dot(queries.basis.T))

    def gradient(self, z: Array, mid: Array) -> Array:
        basis = self._of.basis  # `dot` takes half the time of @
        score = self._path.gradient(z.dot(basis.T), mid.dot(basis.T)).dot(basis)
        if self._of._extra is not None:
            score = score + self._of.rng.standard_normal(mid.shape).dot(self._of._extra.T)
        return score

    def energy_error(self, w_end: Array, lower: Batch, upper: Batch) -> tuple[Batch, Batch]:
        return self._path.energy_error(w_end @ self._of.basis.T, lower, upper)
