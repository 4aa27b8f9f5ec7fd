"""The public log density, and the parameters that no record sees.

The mean and the scale of a centred hierarchy reach records through other parameters only, so no
release moves them, and quadratic models of their density are poor guides: that of a scale falls off
slowly on one side and has no bound on the other, where all effects come to one value.  A search
keeps them where the public density expects them, and makes its steps in the other parameters.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from scipy.optimize import minimize

from pymc_dp.base.matrices import root
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.tuning.answers import Structure

#: Pairs of public draws that stand for what is not known of the parameters, the most steps of the
#: optimiser, and how far from the prior's location it goes, in widths of the prior.
_PAIRS, _STEPS, _FURTHEST = 8, 30, 20.0


class Density(Protocol):
    """A log density of d parameters."""

    def gradient(self, theta: np.ndarray, /) -> np.ndarray:
        """(d,) gradient."""

    def both(self, theta: np.ndarray, /) -> tuple[float, np.ndarray]:
        """Log density and gradient."""


def unseen(structure: Structure, location: np.ndarray) -> np.ndarray:
    """Indices of the parameters that reach no record, as those of the prior of group effects.

    Read off the graph at this public place, and others.
    """
    return np.flatnonzero(~seen_together(structure, location).diagonal())


def seen_together(structure: Structure, location: np.ndarray) -> np.ndarray:
    """(d, d) bool: pairs of parameters that a record may see; from the graph, at public places."""
    return structure.touched(Coordinates(location, np.eye(len(location))))


class Public:
    """What steps of a search take from the public log density, in theta.

    `spread` (d,) are the widths of the prior, and `alone` the parameters that no record sees.
    """

    def __init__(self, density: Density, structure: Structure, start: Coordinates) -> None:
        self.density = density
        self.origin = start.location
        self.spread = np.linalg.norm(start.scaling, axis=1)
        self.alone = unseen(structure, start.location)

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        """(d,) gradient in theta."""
        return self.density.gradient(theta)

    def score(self, at: Coordinates) -> np.ndarray:
        """(d,) gradient in w at the location, without the parameters that are settled there."""
        slope = np.array(self.density.gradient(at.location))
        slope[self.alone] = 0.0
        return np.asarray(at.scaling.T @ slope)

    def settled(self, location: np.ndarray, precision: np.ndarray) -> np.ndarray:
        """The location with the parameters that no record sees where the density expects them.

        `precision` (d, d) is about that of the posterior.  The location is returned as it is where
        the density cannot be evaluated.

        Notes
        -----
        The mean, in these parameters, of the normal law of that precision which is nearest to the
        density (Kullback-Leibler; Opper & Archambeau 2009, "The variational Gaussian approximation
        revisited").  The density at the location alone would have scales too small, by what effects
        differ more than their estimates do, or 0, which two levels of groups have as their mode.
        """
        alone = self.alone
        if not alone.size:
            return location
        unit, metric = self.spread[alone], precision.copy()
        metric[alone, alone] += unit**-2.0  # the quadratic model of their density may be flat
        draws = np.random.default_rng(0).standard_normal((_PAIRS, len(location)))
        moves = draws @ root(np.linalg.inv(metric)).T
        places = location + np.vstack([moves, -moves])
        before, away = places[:, alone], (self.origin - location)[alone] / unit

        def expected(move: np.ndarray) -> tuple[float, np.ndarray]:
            """Minus the mean log density, and its gradient."""
            places[:, alone] = before + unit * move
            values, slopes = zip(*(self.density.both(theta) for theta in places), strict=True)
            return -float(np.mean(values)), -unit * np.mean(slopes, axis=0)[alone]

        with np.errstate(all="ignore"):
            found = minimize(
                expected,
                np.zeros(len(alone)),
                jac=True,
                method="L-BFGS-B",
                bounds=[(x - _FURTHEST, x + _FURTHEST) for x in away],
                options={"maxiter": _STEPS},
            )
            there = location.copy()
            there[alone] += unit * found.x
            known = math.isfinite(found.fun) and np.isfinite(self.gradient(there)).all()
        return there if known else location
