"""The quadratic form: two scores and one curvature, for budgets that pay for no more."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pymc_dp.matrices import positive_part
from pymc_dp.rows.contributions import Curvature, OuterProduct, Score
from pymc_dp.rows.engine import Coordinates
from pymc_dp.warmup.bulk import FULL, Gradient, prior_curvature
from pymc_dp.warmup.prepared import Prepared, Shares, pooled

__all__ = ["quadratic"]


def _consistent(difference: np.ndarray, covariance: np.ndarray) -> bool:
    """Whether two measurements of one vector differ by no more than their noise explains.

    Five standard deviations of chi-square: a sound one fails with probability below 1e-4.
    """
    d = len(difference)
    square = float(difference @ np.linalg.solve(covariance, difference))
    return square < d + 5.0 * math.sqrt(2.0 * d) + 10.0


def quadratic(
    blank: Prepared, budget: Shares, bound: float, gradient: Gradient, flat: bool = False
) -> Prepared:
    """The whole rest for scores at two places and one curvature: the form for small budgets.

    The first score moves the origin to where the second and the curvature are taken; it then counts
    there, too. What the noise in the curvature adds to the score, over the distance to the mode, is
    noise like any other.
    """
    d, basis = len(blank.score), blank.basis
    left = 1.0 - budget.spent
    score, sd = budget.sum("first score", Score(blank.clip), bound, 0.35 * left)
    first, noise = basis.T @ score, sd**2 * basis.T @ basis
    at = blank.coordinates
    step = first + at.scaling.T @ gradient(at.location)  # the precision in w is about 1
    moved = replace(blank, clip=Coordinates(at.theta(step), blank.clip.scaling))

    kind = OuterProduct if flat else Curvature
    spec = kind(moved.clip, diagonal=d > FULL, step=1e-6)
    clip_norm = budget.tail("curvature norms", spec, 0.01, 0.04 * left)
    if not clip_norm:
        return replace(blank, trusted=False)
    packed, error = budget.sum("curvature", spec, clip_norm, 0.2 * left)
    error *= float(np.linalg.norm(basis, 2)) ** 2
    floor = 3.0 * error if spec.diagonal else error * math.sqrt(2.0 * d)
    values, vectors = np.linalg.eigh(basis.T @ spec.matrix(packed) @ basis)
    curvature = (vectors * np.where(values > floor, values, 0.0)) @ vectors.T
    score, sd = budget.sum("anchor", Score(moved.clip), bound, 1.0 - budget.spent)
    second, rest = basis.T @ score, sd**2 * basis.T @ basis

    transported = first - curvature @ step
    noise = noise + error**2 * float(step @ step) * np.eye(d)
    if not _consistent(second - transported, noise + rest):
        return replace(blank, trusted=False)
    final, covariance = pooled(transported, noise, second, rest)
    here = moved.coordinates
    prior = here.scaling.T @ gradient(here.location)
    precision = positive_part(curvature + prior_curvature(gradient, here), 1e-3)
    ahead = np.linalg.solve(precision, final + prior)
    covariance = covariance + error**2 * float(ahead @ ahead) * np.eye(d)
    return replace(
        moved,
        score=final,
        covariance=covariance,
        curvature=curvature,
        clip_norms={"anchor": bound},
    )
