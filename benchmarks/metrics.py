"""How far draws are from a reference posterior."""

from __future__ import annotations

from dataclasses import dataclass

import arviz as az
import numpy as np
import xarray as xr

__all__ = ["Directions", "diagnostics"]


@dataclass(frozen=True, eq=False)
class Directions:
    """Principal directions of a reference posterior, in units of its standard deviations.

    Attributes
    ----------
    mean : (d,) ndarray
    to : (d, d) ndarray
        theta -> coordinates of mean 0 and covariance I, along the eigenvectors of the correlation.
    """

    mean: np.ndarray
    to: np.ndarray

    @classmethod
    def of(cls, mean: np.ndarray, covariance: np.ndarray) -> Directions:
        sd = np.sqrt(np.diag(covariance))
        values, vectors = np.linalg.eigh(covariance / np.outer(sd, sd))
        return cls(mean, (vectors / np.sqrt(values)).T / sd)

    def whitened(self, theta: np.ndarray) -> np.ndarray:
        return (theta - self.mean) @ self.to.T

    def rmse(self, theta: np.ndarray) -> float:
        """Error of the mean of (k, d) draws, a root mean square over directions, in sds."""
        return float(np.sqrt(np.mean(self.whitened(theta.mean(axis=0)) ** 2)))

    def sd_ratios(self, theta: np.ndarray) -> np.ndarray:
        """(d,) standard deviations of (k, d) draws over those of the reference."""
        return self.whitened(theta).std(axis=0)


def diagnostics(theta: np.ndarray) -> tuple[float, float]:
    """Least effective sample size per 1000 draws and largest R-hat of (chains, draws, d) draws."""
    data = xr.Dataset({"theta": (("chain", "draw", "entry"), theta)})
    least = float(np.min(az.ess(data)["theta"].values))
    largest = float(np.max(az.rhat(data)["theta"].values)) if len(theta) > 1 else np.nan
    return 1000.0 * least / (theta.shape[0] * theta.shape[1]), largest
