"""The Fourier accountant of Koskela, Jälkö & Honkela (2020), as the papers of its authors use it.

A privacy loss density on a grid, composed by the fast Fourier transform.  It has no bound on its
own error, so this package does not use it: the replications compare with it.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq

__all__ = ["delta", "iterations"]

#: Points of the grid and its half width, the defaults of their code.
POINTS, WIDTH = 1_000_000, 20.0


def delta(epsilon: float, sigma: float, q: float, k: int) -> float:
    """Delta of `k` Gaussian sums over batches with sampling probability `q`, one record replaced.

    The pair is q N(1, sigma^2) + (1 - q) N(0, sigma^2) and q N(-1, sigma^2) + (1 - q) N(0,
    sigma^2): `sigma` is relative to the largest norm C of a contribution, and the sensitivity 2C of
    a replacement is in the pair already.
    """
    return _above(epsilon, _spectrum(sigma, q), k)


def iterations(epsilon: float, target: float, sigma: float, q: float) -> int:
    """The most iterations with at most this delta, to 0.1 %."""
    spectrum = _spectrum(sigma, q)

    def excess(log_k: float) -> float:
        found = _above(epsilon, spectrum, round(math.exp(log_k)))
        return math.log(max(found, 1e-300) / target)

    # where mu of the central limit theorem, 2 q k^(1/2) / sigma or more, is 1
    low = high = max(2.0 * math.log(sigma / (2.0 * q)), 0.0)
    while low > 0.0 and excess(low) > 0.0:
        low = max(low - 1.0, 0.0)
    while excess(high) <= 0.0:
        high += 1.0
    return int(math.exp(brentq(excess, low, high, xtol=1e-3)))


def _losses() -> np.ndarray:
    return -WIDTH + 2.0 * WIDTH / POINTS * np.arange(POINTS)


def _spectrum(sigma: float, q: float) -> np.ndarray:
    density = _density(_losses(), sigma, q)
    return np.fft.rfft(np.fft.fftshift(density) * 2.0 * WIDTH / POINTS)


def _above(epsilon: float, spectrum: np.ndarray, k: int) -> float:
    """E max(0, 1 - exp(epsilon - loss)) of k losses."""
    composed, losses = np.fft.fftshift(np.fft.irfft(spectrum**k, POINTS)), _losses()
    above = losses > epsilon
    return float(composed[above] @ -np.expm1(epsilon - losses[above]))


def _density(losses: np.ndarray, sigma: float, q: float) -> np.ndarray:
    """Of the privacy loss of one sum (their section 5.2): density at the inverse, times slope."""
    c, rest, ratio = q * math.exp(-0.5 / sigma**2), 1.0 - q, np.exp(losses)
    root = np.sqrt(rest**2 * (1.0 - ratio) ** 2 + 4.0 * c**2 * ratio)
    x = sigma**2 * np.log(np.maximum((root - rest * (1.0 - ratio)) / (2.0 * c), 1e-16))
    inner = (2.0 * c**2 * ratio - rest**2 * ratio * (1.0 - ratio)) / root + rest * ratio
    slope = sigma**2 * inner * (root + rest * (1.0 - ratio)) / (4.0 * c**2 * ratio)
    mixture = rest * np.exp(-0.5 * (x / sigma) ** 2) + q * np.exp(-0.5 * ((x - 1.0) / sigma) ** 2)
    return mixture * slope / (sigma * math.sqrt(2.0 * math.pi))
