"""The anchored form: one score for most of the budget, then only its changes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pymc_dp.rows.contributions import Change
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.tuning.paths import accept_tests, energy_clip
from pymc_dp.tuning.prepared import Prepared, Shares, pooled
from pymc_dp.tuning.public import Public

#: Part of what is left for the first of the two scores that an anchor is made of, and part of the
#: budget to move the origin.
FIRST, RECENTRE = 0.3, 0.02
#: Least and largest parts for accept tests.
TESTS = (0.01, 0.10)


def anchored(
    blank: Prepared,
    budget: Shares,
    change: float,
    kicks: float,
    public: Public,
    known: np.ndarray,
    paths: int,
    sensitivity: float,
    step_size: float | None,
) -> Prepared:
    """One score, released in two parts; what is left pays for changes.

    The first part moves the origin to the mode that it implies, from where changes are smallest;
    the second is taken there, and the first joins it by a released change, whose noise is small.
    """
    basis, total, clipping = blank.basis, budget.total, blank.clipping
    rng = np.random.default_rng(1)
    left = 1.0 - budget.spent
    spec, bound = clipping.score(blank.clip), clipping.bound
    at = blank.coordinates
    curvature = at.scaling.T @ known @ at.scaling
    loss = clipping.loss(budget, blank.clip, basis)
    score, noise = budget.score("first score", spec, bound, FIRST * left)
    first, first_noise, _ = loss.corrected(basis.T @ score, noise.covariance(basis), curvature)
    step = first + public.score(at)  # the precision in w is about 1
    change_of = Change(blank.clip, basis @ step)
    moved = replace(blank, form="anchored", clip=Coordinates(at.theta(step), blank.clip.scaling))
    reach = budget.tail("norms of the move", change_of, 0.001, 0.25 * RECENTRE)
    joined = None
    if reach:
        label, share = "move of the origin", 0.75 * RECENTRE
        difference, noise = budget.score(label, change_of, 1.1 * reach, share)
        joined = first + basis.T @ difference
        first_noise = first_noise + noise.covariance(basis)

    kick = sensitivity * change * float(np.linalg.norm(basis, 2))  # sd of its noise
    kick *= math.sqrt(paths * blank.n_steps / (kicks * total))
    moved = replace(moved, step_size=step_size or min(blank.step_size, 2.0 / kick))
    error = energy_clip(moved, budget, kick, change, rng)
    unit = 5.0 * sensitivity * math.sqrt(paths / total)  # noise of 0.2 in the log ratio
    error, tests = accept_tests(error, unit, TESTS[0], TESTS[1] * (1.0 - budget.spent))
    left = 1.0 - budget.spent - kicks - tests
    score, noise = budget.score("anchor", clipping.score(moved.clip), bound, left)
    final, covariance, lost = loss.corrected(basis.T @ score, noise.covariance(basis), curvature)
    if joined is not None:
        final, covariance = pooled(joined, first_noise, final, covariance)
    return replace(
        moved,
        score=final,
        covariance=covariance + lost,  # of the same records in both scores
        clip_norms={"anchor": bound, "gradient": change, "energy_error": error},
        shares={"gradient": kicks, "energy_error": tests},
    )
