"""The quadratic form: two scores and a few curvatures, for budgets that pay for no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.linalg import pinv, pinvh

from pymc_dp.forecast import whole_curvature
from pymc_dp.matrices import positive_part
from pymc_dp.noise_laws import noisy_posterior
from pymc_dp.rows.contributions import Curvature, ExpectedCurvature
from pymc_dp.rows.engine import Coordinates
from pymc_dp.warmup.answers import CurvatureNoise
from pymc_dp.warmup.bulk import prior_curvature
from pymc_dp.warmup.prepared import Prepared, Shares, pooled
from pymc_dp.warmup.public import Public

__all__ = ["quadratic"]

#: Length of the differences of a piecewise linear likelihood, in standard deviations of one record:
#: scores change at kinks alone, and so many records must pass one that the noise does not hide
#: them. The density of Laplace residuals falls by 14 % on the way, so intervals are 7 % wider.
_FLAT_STEP = 0.3
#: Parts of what is left for the curvature, and for one more or two where it is not steady: where it
#: changes by a factor over the step that it was meant for.
_CURVATURES, _STEADY = (0.24, 0.06, 0.06), 0.6
#: And by more than so many sds of its noise; that of the search, which cost less, is larger.
_UNSURE = 8.0
#: Noise of a curvature of 1 from which on directions are hidden: more is paid for less noise, up to
#: a part of what is left.
_CLEAR, _MOST = 0.3, 0.45
#: How far a step goes, in standard deviations of a score, noise included; and how far the posterior
#: mean may be in the end from where the curvature was taken, in its own. Of 2,400 simulated runs
#: with one to six parameters 92 ended farther, and their 90 % intervals held half of the truths.
_FURTHEST = 3.0
#: Least precision of the prior in w: the quadratic holds over no more than 30 posterior sds.
_FLATTEST = 1e-3
#: Square in one direction, in units of its variance, that is not noise.
_FAR = 9.0
#: How much clipped scores exceed the bound, in units of it, where noise hides how many do.
_EXCESS = 0.15
#: Fraction of the curvatures that may be clipped: it makes them smaller, so intervals wider.
_TAIL = 0.03


def _consistent(difference: np.ndarray, covariance: np.ndarray) -> bool:
    """Whether two measurements of one vector differ by no more than their noise explains.

    Five standard deviations of chi-square: a sound one fails with probability below 1e-4.
    """
    inverse, d = pinvh(covariance, return_rank=True)
    square = float(difference @ inverse @ difference)
    return square < d + 5.0 * math.sqrt(2.0 * d) + 10.0


def _both(
    first: np.ndarray, noise: np.ndarray, second: np.ndarray, rest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What two scores tell of the one at the place of the second, and its noise.

    Where they differ by more than noise the first has nothing to say.
    """
    square = (second - first) ** 2
    far = square > _FAR * (noise + rest).diagonal()
    noise = noise + np.diag(np.where(far, square, 0.0))
    if _consistent(second - first, noise + rest):
        second, rest = pooled(first, noise, second, rest)
    return second, rest


def _common(
    moved: np.ndarray, blocks: Sequence[np.ndarray], reach: np.ndarray, n: float
) -> np.ndarray:
    """Error of the score of what all records see, after a move of the effects of many groups.

    The score of the log sd of n residuals changes by the sum of the squared moves of means, in
    their posterior sds; its own is 1/sqrt(2 n).  The change is in no curvature that is expected.
    """
    inside = np.zeros(len(moved), dtype=bool)
    for block in blocks:
        inside[block] = True
    error = float(np.sum(moved[inside] ** 2)) / math.sqrt(2.0 * n)
    return np.diag(np.where(reach & ~inside, error**2, 0.0))


def _visible(released: np.ndarray, error: CurvatureNoise, basis: np.ndarray) -> np.ndarray:
    """A noisy curvature without the directions in which it may be nothing but noise.

    Eigenvalues are compared with the largest that noise alone has in as many dimensions: in all at
    first, then in those that were not above it, as long as some of these are above that.
    """
    values, vectors = np.linalg.eigh(released)
    hidden = np.ones(len(values), dtype=bool)
    while hidden.any():
        still = hidden & (values <= error.norm(basis @ vectors[:, hidden]))
        if (still == hidden).all():
            break
        hidden = still
    return np.asarray((vectors * np.where(hidden, 0.0, values)) @ vectors.T)


def _shortened(step: np.ndarray, longest: float) -> np.ndarray:
    """The step, no longer than that."""
    length = float(np.linalg.norm(step))
    return step if length <= longest else step * (longest / length)


def quadratic(
    blank: Prepared,
    budget: Shares,
    public: Public,
    known: np.ndarray,
    flat: bool = False,
) -> Prepared:
    """The whole rest for scores at two places and a curvature: the form for small budgets.

    The first score moves the origin to where the second and the curvature are taken; it then counts
    there, too. What the noise in the curvature adds to the score, over the distance to the mode, is
    noise like any other. Where the curvature changes much on the way, or the way was longer than a
    step may be, the origin moves again, by the first score less what the curvature at both ends of
    the way took from it.

    Parameters
    ----------
    blank : Prepared
    budget : Shares
    public : Public
    known : (d, d) ndarray
        Curvature of the log-likelihood in theta, as the search left it.
    flat : bool
        Log-likelihoods are piecewise linear.

    Returns
    -------
    Prepared
    """
    d, basis, clipping = len(blank.score), blank.basis, blank.clipping
    left = 1.0 - budget.spent
    spec, bound = clipping.score(blank.clip), clipping.bound
    loss = clipping.loss(budget, blank.clip, basis)
    score, of_score = budget.score("first score", spec, bound, 0.35 * left)
    unit = of_score.sd / bound * math.sqrt(0.35 * left)  # of a sum of norm 1 for the whole budget
    at = blank.coordinates
    here, before = at, at.scaling.T @ known @ at.scaling
    first, noise, _ = loss.corrected(basis.T @ score, of_score.covariance(basis), before)
    longest = _FURTHEST * math.sqrt(d + float(np.trace(noise)))
    rows = np.eye(d)  # what records see of w; they see no step at right angles to that
    if public.alone.size:
        rows = np.delete(at.scaling, public.alone, axis=0)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    along = pinv(rows) @ rows
    precision = np.linalg.inv(at.scaling @ at.scaling.T)
    step = first + public.score(at)  # the precision in w is about 1
    step = _shortened(along @ step, longest)
    clip_norm: float | None = None
    n = budget.releases.n_public
    diagonal = not whole_curvature(n, d, budget.releases.units_mu2)
    length = _FLAT_STEP * math.sqrt(n / d) if flat else 1e-6
    for k, share in enumerate(_CURVATURES):
        here = Coordinates(public.settled(here.theta(step), precision), at.scaling)
        clip = Coordinates(here.location, blank.clip.scaling)
        # what is piecewise linear has the curvature of the density at its kinks, whatever the model
        kind = Curvature if flat or clipping.inner is None else ExpectedCurvature
        look = kind(clip, diagonal=diagonal, step=length)
        again = f" {k + 1}" if k else ""
        arrived = float(np.linalg.norm(step)) < 0.999 * longest or k == len(_CURVATURES) - 1
        # a later look costs less, and may be hidden where the first was not
        seen_norm = budget.tail(f"curvature norms{again}", look, _TAIL, share * left / 6.0)
        clip_norm = seen_norm or clip_norm
        if not clip_norm:
            return replace(blank, trusted=False)
        size = 3.0 if diagonal else math.sqrt(2.0 * d)
        size *= unit * clip_norm * float(np.linalg.norm(basis, 2)) ** 2
        part = max(
            share * left * 5.0 / 6.0, min((size / _CLEAR) ** 2, _MOST * (1.0 - budget.spent))
        )
        matrix, error = budget.curvature(f"curvature{again}", look, clip_norm, part)
        blocks, _ = budget.answers.structure.effects(here.location)
        released = basis.T @ matrix @ basis
        curvature = _visible(released, error, basis)
        moved = basis @ step
        of_step = basis.T @ error.of_product(np.outer(moved, moved)) @ basis
        noise = noise + of_step
        now, then = float(step @ released @ step), float(step @ before @ step)
        unsure = _UNSURE * math.sqrt(max(float(step @ of_step @ step), 0.0))
        steady = _STEADY * then - unsure <= now <= then / _STEADY + unsure
        first = first - (curvature if steady else 0.5 * (before + curvature)) @ step
        # what two places do not tell of the curvature between them is an error like noise
        bent = 0.5 * (before - curvature) @ step
        common = _common(moved, blocks, of_score.reach, n)
        noise = noise + np.outer(bent, bent) + basis.T @ common @ basis
        if steady and arrived:
            break
        before = curvature
        # a score means nothing in directions that noise hides
        bend = positive_part(prior_curvature(public.gradient, here), _FLATTEST)
        step, _ = noisy_posterior(first, noise, curvature, bend, public.score(here))
        step = _shortened(along @ step, longest)
    unseen = _EXCESS * clipping.hidden * bound / d  # sd of what clipping may have taken besides
    besides = replace(of_score, sd=unseen).covariance(basis)
    for k in range(2):  # both at one place, unless the first of them tells of a better one
        again, part = (" 2", 1.0 - budget.spent) if k else ("", (1.0 - budget.spent) / 2.0)
        score, of_score = budget.score(f"anchor{again}", clipping.score(clip), bound, part)
        second, rest, lost = loss.corrected(basis.T @ score, of_score.covariance(basis), curvature)
        first, noise = _both(first, noise, second, rest)
        covariance = noise + lost + besides
        bend = positive_part(prior_curvature(public.gradient, here), _FLATTEST)
        mean, width = noisy_posterior(first, covariance, curvature, bend, public.score(here))
        far = mean**2 > _FAR * width.diagonal()
        if far.any() and not k:
            step = _shortened(along @ mean, longest)
            here = Coordinates(public.settled(here.theta(step), precision), at.scaling)
            clip = Coordinates(here.location, blank.clip.scaling)
            first = first - curvature @ step
            moved = basis @ step
            of_step = error.of_product(np.outer(moved, moved))
            of_step = of_step + _common(moved, blocks, of_score.reach, n)
            # not told from so far
            noise = noise + basis.T @ of_step @ basis + np.diag(np.where(far, step**2, 0.0))
    away = rows @ mean
    if float(away @ pinvh(rows @ width @ rows.T) @ away) > _FURTHEST**2 * len(away):
        return replace(blank, trusted=False)
    # the noise in the curvature counts as far as the posterior reaches
    reach = basis @ (width + np.outer(mean, mean)) @ basis.T
    covariance = covariance + basis.T @ error.of_product(reach) @ basis
    return replace(
        blank,
        clip=clip,
        score=first,
        covariance=covariance,
        curvature=curvature,
        diagonal=diagonal,
        clip_norms={"anchor": bound},
    )
