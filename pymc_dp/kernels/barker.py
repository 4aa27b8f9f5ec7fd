"""Barker's accept test with Gaussian noise: a logistic variable is put together from the noise.

Barker (1965); Seita, Pan, Chen & Canny (2017), An efficient minibatch acceptance test for
Metropolis-Hastings; Räisä (2021), section 3.2, for the private form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import linprog
from scipy.special import expit, ndtr

from pymc_dp.kernels.interfaces import Array, Batch, Mask

#: Components of the correction: normals of this width, this far apart, out to this place.
_WIDTH, _SPAN = 0.25, 14.0
#: Where distribution functions are compared; beyond, both are 1 to within 1e-13.
_GRID = np.linspace(0.0, 30.0, 1201)


@dataclass(frozen=True, eq=False)
class Correction:
    """What is added to N(0, sd^2) so that the sum is nearly logistic: a mixture of normals."""

    sd: float
    places: Array  # (k,): the components are normals of one width about +place and -place
    weights: Array  # (k,)
    error: float  # largest difference of the distribution functions: of the sum, and logistic

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Independent draws of the correction."""
        place = rng.choice(self.places, shape, p=self.weights)
        sign = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
        draws: Array = sign * place + _WIDTH * rng.standard_normal(shape)
        return draws


@cache
def correction(sd: float) -> Correction:
    """The mixture of normals that brings N(0, sd^2) closest to the logistic distribution.

    sd < pi / 3^(1/2) = 1.81. A logistic variable is for no sd exactly a normal one plus an
    independent other: its characteristic function over the Gaussian's diverges. A linear program in
    the weights makes the largest difference of distribution functions least: 2.3e-7 for sd 1,
    2.9e-5 for 1.2, 6.5e-4 for 1.4 and 5.0e-3 for 1.6.
    """
    if not 0.0 < sd < np.pi / np.sqrt(3.0):
        raise ValueError(
            f"The noise of Barker's test must have a standard deviation between 0 and 1.81, not "
            f"{sd:g}: a logistic variable has no more."
        )
    places = np.arange(0.0, _SPAN, _WIDTH)
    cells = _components(_GRID, places, sd)
    slack = np.ones((len(_GRID), 1))
    found = linprog(
        np.r_[np.zeros(len(places)), 1.0],
        A_ub=np.block([[cells, -slack], [-cells, -slack]]),
        b_ub=np.r_[expit(_GRID), -expit(_GRID)],
        A_eq=np.r_[np.ones(len(places)), 0.0][None],
        b_eq=[1.0],
        bounds=[(0.0, None)] * (len(places) + 1),
    )
    weights = np.maximum(found.x[:-1], 0.0)
    kept = weights > 1e-12
    places, weights = places[kept], weights[kept] / weights[kept].sum()
    fine = np.linspace(0.0, _GRID[-1], 20_001)
    error = np.abs(_components(fine, places, sd) @ weights - expit(fine)).max()
    return Correction(sd, places, weights, float(error))


def _components(x: Array, places: Array, sd: float) -> Array:
    """(len(x), k) distribution functions of the components of the sum."""
    total = np.hypot(sd, _WIDTH)
    both: Array = 0.5 * sum(ndtr((x[:, None] - sign * places) / total) for sign in (-1.0, 1.0))
    return both


@dataclass(frozen=True, slots=True)
class BarkerTest:
    """Accept when log ratio + noise + correction > 0.

    Public noise fills the noise of every answer up to `noise_sd`. Proposals whose answer is noisier
    are rejected; noise, or the law of its estimate, is symmetric in the two positions, so that is
    too.

    *Guarantee.* With a logistic V, P(lambda + V > 0) / P(-lambda + V > 0) = exp(lambda): detailed
    balance. Here V is logistic up to `Correction.error`.

    *Weaknesses.* Approximate, whatever the correction. The relative error of small acceptance
    probabilities is larger than that of the distribution function. The test accepts at most half as
    many proposals as a Metropolis test. Noise with a third cumulant k changes the log odds of a
    move and its reverse by k (1 - 6 f) / 6 in first order, with f the logistic density at the log
    ratio. Where part of the noise is that of sampling, with an estimated variance v, k is its third
    cumulant less three times its covariance with v.
    """

    noise_sd: float

    def __call__(
        self, rng: np.random.Generator, possible: Mask, value: Batch, noise_sd: Batch, public: Batch
    ) -> tuple[Mask, Batch]:
        """See `pymc_dp.kernels.interfaces.AcceptTest`."""
        shape = np.shape(possible)
        missing = np.square(self.noise_sd) - np.square(noise_sd)
        filled = np.sqrt(np.maximum(missing, 0.0)) * rng.standard_normal(shape)
        log_ratio = value + public + filled
        drawn = correction(self.noise_sd).draw(rng, shape)
        return possible & (missing >= 0.0) & (log_ratio + drawn > 0.0), log_ratio
