"""Public terms with what was released about the records added to them."""

from __future__ import annotations

import math

import numpy as np

from pymc_dp.kernels.interfaces import Array, Batch, Mask, Prior


class Tilted:
    """Public terms with a known linear term: log pi0(z) + G . z, with G an anchored score, (d,).

    The target is restricted to norm(z) <= radius: a tilt by noise need not be proper where the
    prior has heavy tails and the likelihood is flat.
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

    If the log-likelihood is G . z - z'Hz / 2, then G is N(Hz, H). What was released, with noise of
    covariance V, is N(Hz, H + V). Its likelihood accounts for the noise, with any prior, and adds
    no more precision than H (H + V)^-1 H.

    The `score` (d,) was released at z = 0; `curvature` is H, (d, d) and positive semidefinite;
    `noise` is V, (d, d).
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

    def gradient(self, mid: Array) -> Array:
        """No score."""
        return np.zeros_like(mid)

    def advance(self, displacement: Array) -> None:
        """No accounts."""

    def energy_error(self, z_end: Array, lower: Batch, upper: Batch) -> tuple[Batch, Batch]:
        """No error, no noise."""
        return 0.0, 0.0

    def finish(self, accepted: Mask) -> None:
        """Nothing to forget."""
