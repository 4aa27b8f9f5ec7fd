"""Parameters that no record sees, as the mean and the scale of a centred hierarchy.

Records tell of them through other parameters only, so no release moves them, and the quadratic
models of a search are poor guides: the density of a scale falls off slowly on one side and has no
bound on the other, where all effects come to one value.  They are kept where the public density
expects them (`settled`), and steps are made in the other parameters.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

from pymc_dp.matrices import root
from pymc_dp.rows.engine import Coordinates
from pymc_dp.warmup.answers import Structure
from pymc_dp.warmup.climb import Target

__all__ = ["settled", "unseen"]

#: Pairs of public draws that stand for what is not known of the other parameters.
_PAIRS = 8
#: How far one call goes, in prior widths.
_FURTHEST = 10.0


def unseen(structure: Structure, location: np.ndarray) -> np.ndarray:
    """Indices of the parameters that reach no record, as those of the prior of group effects.

    Read off the graph at a public place, and others.
    """
    here = Coordinates(location, np.eye(len(location)))
    return np.flatnonzero(~structure.touched(here).diagonal())


def settled(
    public: Target,
    location: np.ndarray,
    alone: np.ndarray,
    precision: np.ndarray,
    spread: np.ndarray,
) -> np.ndarray:
    """The location with the parameters `alone` at the mode of their expected log density.

    The expectation is over a normal law of the others about the location: the step of expectation
    maximisation (Dempster, Laird & Rubin 1977).  At the location itself the density would have a
    scale too small, by what the effects may differ more than their estimates do.

    Parameters
    ----------
    public : Target
        Public log density, in theta.
    location : (d,) ndarray
    alone : integer ndarray
    precision : (d, d) ndarray
        Of the posterior, about.
    spread : (d,) ndarray
        Widths of the prior: the unit of length.

    Returns
    -------
    (d,) ndarray
        The location itself where the density can not be evaluated.
    """
    if not alone.size:
        return location
    others = np.setdiff1d(np.arange(len(location)), alone)
    half = root(np.linalg.inv(precision[np.ix_(others, others)]))
    moves = np.random.default_rng(0).standard_normal((_PAIRS, len(others))) @ half.T
    places = np.repeat(location[None], 2 * _PAIRS, axis=0)
    places[:, others] += np.vstack([moves, -moves])
    unit = spread[alone]

    def expected(move: np.ndarray) -> tuple[float, np.ndarray]:
        """Minus the mean log density, and its gradient."""
        places[:, alone] = location[alone] + unit * move
        values = [float(public.log_density(theta)) for theta in places]
        slopes = [public.gradient(theta)[alone] for theta in places]
        return -float(np.mean(values)), -unit * np.mean(slopes, axis=0)

    bounds = [(-_FURTHEST, _FURTHEST)] * len(alone)
    start = np.zeros(len(alone))
    with np.errstate(all="ignore"):
        found = minimize(expected, start, jac=True, method="L-BFGS-B", bounds=bounds)
    if not np.isfinite(found.fun) or not np.isfinite(found.x).all():
        return location
    there = location.copy()
    there[alone] += unit * found.x
    return there
