"""The public log density, the parameters that no record sees, and modes of public targets.

Mean and scale of a centred hierarchy reach records through other parameters only: no release moves
them, and quadratic models of their density are poor (that of a scale is unbounded where all effects
coincide). A search keeps them where the public density expects them, and steps in the others.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from scipy.optimize import minimize

from pymc_dp.base.matrices import minus_hessian, root, within
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.engine import RowEngine

#: Pairs of public draws; most steps of the optimiser; how far it goes, in widths of the prior.
_PAIRS, _STEPS, _FURTHEST = 8, 30, 20.0
_FARTHEST_MODE = 5.0  # how far a mode may be, in standard deviations per parameter


class Density(Protocol):
    """A log density of d parameters."""

    def gradient(self, theta: np.ndarray, /) -> np.ndarray:
        """(d,) gradient."""

    def both(self, theta: np.ndarray, /) -> tuple[float, np.ndarray]:
        """Log density and gradient."""


def unseen(structure: RowEngine, location: np.ndarray) -> np.ndarray:
    """Indices of the parameters that reach no record, as those of the prior of group effects."""
    return np.flatnonzero(~seen_together(structure, location).diagonal())


def seen_together(structure: RowEngine, location: np.ndarray) -> np.ndarray:
    """(d, d) bool: pairs of parameters that a record may see; from the graph, at public places."""
    return structure.touched(Coordinates(location, np.eye(len(location))))


class Public:
    """The public log density, as a search sees it: widths `spread` of the prior, and `unseen`."""

    def __init__(self, density: Density, structure: RowEngine, start: Coordinates) -> None:
        self.density = density
        self.origin = start.location
        self.spread = np.linalg.norm(start.scaling, axis=1)
        self.unseen = unseen(structure, start.location)

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        """(d,) gradient in theta."""
        return self.density.gradient(theta)

    def score(self, at: Coordinates) -> np.ndarray:
        """(d,) gradient in w at the location, without the parameters that are settled there."""
        slope = np.array(self.density.gradient(at.location))
        slope[self.unseen] = 0.0
        return np.asarray(at.scaling.T @ slope)

    def settled(self, location: np.ndarray, precision: np.ndarray) -> np.ndarray:
        """The location, with the parameters that no record sees where the density expects them.

        Unchanged where the density cannot be evaluated. It is the mean, in these parameters, of the
        normal law of this `precision` (d, d), about the posterior's, nearest to the density
        (Kullback-Leibler; Opper & Archambeau 2009). The density at the location alone would make
        scales too small, as estimates of effects differ less than effects do, or 0, the mode for
        two levels of groups.
        """
        unseen = self.unseen
        if not unseen.size:
            return location
        unit, metric = self.spread[unseen], precision.copy()
        metric[unseen, unseen] += unit**-2.0  # the quadratic model of their density may be flat
        draws = np.random.default_rng(0).standard_normal((_PAIRS, len(location)))
        moves = draws @ root(np.linalg.inv(metric)).T
        places = location + np.vstack([moves, -moves])
        before, away = places[:, unseen], (self.origin - location)[unseen] / unit

        def expected(move: np.ndarray) -> tuple[float, np.ndarray]:
            """Minus the mean log density, and its gradient."""
            places[:, unseen] = before + unit * move
            values, slopes = zip(*(self.density.both(theta) for theta in places), strict=True)
            return -float(np.mean(values)), -unit * np.mean(slopes, axis=0)[unseen]

        with np.errstate(all="ignore"):
            found = minimize(
                expected,
                np.zeros(len(unseen)),
                jac=True,
                method="L-BFGS-B",
                bounds=[(x - _FURTHEST, x + _FURTHEST) for x in away],
                options={"maxiter": _STEPS},
            )
            there = location.copy()
            there[unseen] += unit * found.x
            known = math.isfinite(found.fun) and np.isfinite(self.gradient(there)).all()
        return there if known else location


class Target(Protocol):
    """A public log density."""

    def log_density(self, z: np.ndarray) -> float | np.ndarray:
        """Log density at z, (d,)."""

    def gradient(self, z: np.ndarray) -> np.ndarray:
        """(d,) gradient."""


def find_mode(
    target: Target, metric: np.ndarray, start: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mode (d,) of a public target, and the precision there, by Newton steps in a trust region.

    It is looked for within five standard deviations of the start, per parameter, by the precision
    `metric` (d, d) of what is known before.
    """
    d = len(metric)
    start = np.zeros(d) if start is None else start
    z, radius = start, math.sqrt(d)
    for _ in range(200):
        precision = _precision(target, z)
        slope = np.asarray(target.gradient(z))
        step = within(precision, np.eye(d), slope, radius)
        gain = float(target.log_density(z + step) - target.log_density(z))
        reach = z + step - start
        far = float(reach @ metric @ reach) > _FARTHEST_MODE**2 * d
        if far or not gain > -1e-9:  # a scale in the prior may have its mode at 0
            radius /= 4.0
            if radius < 1e-10:
                break
            continue
        z, radius = z + step, radius * 2.0
        if float(np.linalg.norm(step)) < 1e-6:
            break
    return z, _precision(target, z)


def _precision(target: Target, z: np.ndarray, step: float = 1e-4) -> np.ndarray:
    """Minus the Hessian, eigenvalues in absolute value."""
    hessian = minus_hessian(target.gradient, z, np.full(len(z), step))
    hessian = np.where(np.isfinite(hessian), hessian, 0.0)
    values, vectors = np.linalg.eigh(hessian)
    return np.asarray((vectors * np.maximum(np.abs(values), 1e-8)) @ vectors.T)
