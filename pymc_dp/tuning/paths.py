"""What paths need: a bound on the energy errors of records, and a charge each."""

from __future__ import annotations

import math

import numpy as np

from pymc_dp.privacy.events import MU2_UNIT
from pymc_dp.rows.contributions import PathError
from pymc_dp.tuning.prepared import Prepared, Shares

#: Part of the budget for the look.
LOOK = 0.008
#: Most paths for the look at energy errors: one alone may miss the record with the largest.
_PATHS = 8


def can_pay(paths: int, mu2: float) -> bool:
    """Whether a budget has a few ledger units for every path: two releases, of part of it."""
    return 4 * paths <= mu2 * MU2_UNIT


def accept_tests(error: float, unit: float, least: float, most: float) -> tuple[float, float]:
    """Bound on energy errors, as long as costs nothing, and the part of the budget for the tests.

    `error` is the bound that is needed.  Bound 1 takes the part unit^2 for the noise in the log
    ratio that is wanted.  `least` and `most` limit the part: up to the least, a longer bound is
    free.
    """
    error = max(error, math.sqrt(least) / unit)
    return error, min((error * unit) ** 2, most)


def energy_clip(
    prepared: Prepared, budget: Shares, noise: float, clip_norm: float, rng: np.random.Generator
) -> float:
    """Bound on the energy errors of the records, from paths of the dynamics of N(0, I).

    One path, or more where the budget pays for histograms that count single records.
    """
    noise = max(noise, math.sqrt(2.0 * prepared.friction / prepared.step_size))
    count = min(max(int(LOOK * budget.total / 2.0), 1), _PATHS)
    found = 0.0
    for k in range(count):
        spec = _path(prepared, noise, clip_norm, rng)
        label = "energy errors" + (f" {k + 1}" if k else "")
        found = max(budget.heavy_tail(label, spec, 0.001, LOOK / count) or 0.0, found)
    return 2.0 * found if found else 0.1 * clip_norm


def _path(
    prepared: Prepared, noise: float, clip_norm: float, rng: np.random.Generator
) -> PathError:
    """Energy errors along one path of N(0, I)."""
    d, h = len(prepared.score), prepared.step_size
    kappa = (h * noise) ** 2 / 4.0
    w, p = rng.standard_normal((2, d))
    points, midpoints = [w], []
    for _ in range(prepared.n_steps):
        middle = w + h * p / 2.0
        force = noise * rng.standard_normal(d) - middle
        kicked = ((1.0 - kappa) * p + h * force) / (1.0 + kappa)
        w, p = w + h * (p + kicked) / 2.0, kicked
        points.append(w)
        midpoints.append(middle)
    return PathError(
        prepared.clip,
        np.array(points) @ prepared.basis.T,
        np.array(midpoints) @ prepared.basis.T,
        clip_norm,
    )
