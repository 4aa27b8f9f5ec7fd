"""Where chains of an exponential family start, and how they move: from one or two noisy sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pymc_dp.base.matrices import minus_hessian, root
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.tuning.climb import Target, climb
from pymc_dp.tuning.scaled import CENTRE

#: The least and the most of the budget for the start; see `CENTRE`.
LEAST, MOST = 0.05, 0.25


class Natural(Protocol):
    """Natural parameters and minus the log-normaliser, in unconstrained parameters."""

    def natural(self, theta: np.ndarray) -> np.ndarray:
        """(m + 1,)"""

    def jacobian(self, theta: np.ndarray) -> np.ndarray:
        """(m + 1, d)"""


@dataclass(frozen=True)
class Start:
    """About where the posterior is.

    `coordinates`: the posterior is about N(0, I) in these.  `noise` is the noise sd of a
    log-likelihood ratio per unit of distance, if one release had the whole budget; the root mean
    square over directions.  `spent` is a part of the budget.  `trusted` is False where no mode was
    found: these are then the prior's coordinates.
    """

    coordinates: Coordinates
    noise: float
    spent: float
    trusted: bool


class _Noisy:
    """The posterior of a noisy statistic, taken for the true one; in coordinates z."""

    def __init__(
        self, model: Natural, prior: Target, value: np.ndarray, at: Coordinates, restraint: float
    ) -> None:
        self._model, self._prior, self._value, self._at = model, prior, value, at
        self._restraint = restraint
        self._centre = model.natural(at.location)[:-1]

    def log_density(self, z: np.ndarray) -> float:
        theta = self._at.theta(z)
        natural = self._model.natural(theta)
        away = natural[:-1] - self._centre
        return float(
            natural @ self._value
            + self._prior.log_density(theta)
            - 0.5 * self._restraint * (away @ away)
        )

    def gradient(self, z: np.ndarray) -> np.ndarray:
        theta = self._at.theta(z)
        slope = self._value.copy()
        slope[:-1] -= self._restraint * (self._model.natural(theta)[:-1] - self._centre)
        found = self._model.jacobian(theta).T @ slope + self._prior.gradient(theta)
        return np.asarray(self._at.scaling.T @ found)


def prepare_statistic(
    release: Callable[[str, float], tuple[np.ndarray, float]],
    model: Natural,
    prior: Target,
    start: Coordinates,
    n: float,
) -> Start:
    """Normal approximation of the posterior of a noisy statistic, by plain optimisation.

    `release` maps ``(label, share)`` to ``((m,) noisy sums, noise_sd)``.  `prior` is in
    unconstrained parameters; `start` holds the location and spread of the prior.  `n` is the public
    number of records, the multiple of the log-normaliser; 0 if it is among the entries.

    Notes
    -----
    All of it is post-processing of the releases.  The first costs 5 % of the budget; if its noise
    moves the mode by more than half a posterior standard deviation per parameter, a second one
    makes up for that, as far as a quarter of the budget does.

    Noise may bring the sums to where no parameter puts them (a negative variance), and the mode to
    infinity.  The search is then repeated with half the variance that the noise gives a log ratio
    to the prior's location taken off, as in the accept test of the chains, which keeps it finite.
    """
    value, sd = release("statistic 1", LEAST)
    spent = LEAST
    at, trusted = _mode(model, prior, start, np.append(value, n), sd)
    loud = _noise(model, at) * sd * math.sqrt(LEAST)
    share = min((loud / CENTRE) ** 2, MOST) - LEAST
    if share >= LEAST:
        again, other = release("statistic 2", share)
        weights = sd**-2, other**-2
        value = (weights[0] * value + weights[1] * again) / sum(weights)
        sd = sum(weights) ** -0.5
        spent += share
        at, trusted = _mode(model, prior, start, np.append(value, n), sd)
    return Start(at, _noise(model, at) * sd * math.sqrt(spent), spent, trusted)


def _noise(model: Natural, at: Coordinates) -> float:
    """Root mean square over directions of the change of phi per unit of distance."""
    change = model.jacobian(at.location)[:-1] @ at.scaling
    return float(np.linalg.norm(change)) / math.sqrt(len(at.location))


@np.errstate(all="ignore")
def _mode(
    model: Natural, prior: Target, start: Coordinates, value: np.ndarray, sd: float
) -> tuple[Coordinates, bool]:
    for restraint in (0.0, sd**2):
        target = _Noisy(model, prior, value, start, restraint)
        try:
            z, precision = climb(target, np.eye(len(start.location)))
            hessian = minus_hessian(target.gradient, z, np.full(len(z), 1e-4))
            slope = target.gradient(z)
            left = float(slope @ np.linalg.solve(precision, slope))
            found = np.linalg.eigvalsh(hessian)[0] > 0.0 and left < 0.01
            scaling = start.scaling @ root(np.linalg.inv(precision))
        except np.linalg.LinAlgError:
            continue
        if found and np.isfinite(scaling).all():
            return Coordinates(start.theta(z), scaling), True
    return start, False
