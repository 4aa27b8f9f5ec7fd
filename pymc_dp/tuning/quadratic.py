"""The quadratic form: two scores and a few curvatures, for budgets that pay for no more."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy.linalg import pinv, pinvh

from pymc_dp.base.matrices import positive_part
from pymc_dp.privacy.forecast import whole_curvature
from pymc_dp.publication.noise_laws import noisy_posterior
from pymc_dp.rows.contributions import Curvature, ExpectedCurvature
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.tuning.answers import CurvatureNoise
from pymc_dp.tuning.bulk import prior_curvature
from pymc_dp.tuning.prepared import Prepared, Shares, pooled
from pymc_dp.tuning.public import Public

#: Length of the differences of a piecewise linear likelihood, in standard deviations of one record:
#: scores change only at kinks, and enough records must pass one that the noise does not hide them.
#: The density of Laplace residuals falls by 14 % on the way, so intervals are 7 % wider.
_FLAT_STEP = 0.3
#: Parts of what is left for the curvature, and for one or two more where it is not steady: where it
#: changes by more than this factor over the step that it was meant for.
_CURVATURES, _STEADY = (0.24, 0.06, 0.06), 0.6
#: And by more than so many sds of its noise; the noise of the search, which cost less, is larger.
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

    The limit is five standard deviations of chi-square: a sound measurement fails with probability
    below 1e-4.
    """
    inverse, d = pinvh(covariance, return_rank=True)
    square = float(difference @ inverse @ difference)
    return square < d + 5.0 * math.sqrt(2.0 * d) + 10.0


def _both(
    first: np.ndarray, noise: np.ndarray, second: np.ndarray, rest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What two scores tell of the one at the place of the second, and its noise.

    Where they differ by more than noise, the first is ignored.
    """
    square = (second - first) ** 2
    far = square > _FAR * (noise + rest).diagonal()
    noise = noise + np.diag(np.where(far, square, 0.0))
    if _consistent(second - first, noise + rest):
        second, rest = pooled(first, noise, second, rest)
    return second, rest


def _common(
    moved: np.ndarray, curvature: np.ndarray, noise: np.ndarray, inside: np.ndarray, n: float
) -> float:
    """Error of the score of a residual sd, say, after a move of the effects of many groups.

    The score of the log sd of n residuals changes by the sum of the squared moves of means, in
    their posterior sds; its own is 1/sqrt(2 n).  No expected curvature contains this change.

    `moved` is (d,); `curvature` (d, d) is released; `noise` (d, d) is the covariance of what its
    noise makes of the move; `inside` (d,) says which parameters are effects of groups.
    """
    moved = np.where(inside, moved, 0.0)
    unsure = math.sqrt(float(moved @ noise @ moved))
    return (max(float(moved @ curvature @ moved), 0.0) + unsure) / math.sqrt(2.0 * n)


def _visible(released: np.ndarray, error: CurvatureNoise, basis: np.ndarray) -> np.ndarray:
    """A noisy curvature without the directions in which it may be nothing but noise.

    Eigenvalues are compared with the largest that noise alone has in as many dimensions: first in
    all directions, then in those that were not above it, as long as some of these are above that.
    """
    values, vectors = np.linalg.eigh(released)
    hidden = np.ones(len(values), dtype=bool)
    while hidden.any():
        still = hidden & (values <= error.norm(basis @ vectors[:, hidden]))
        if (still == hidden).all():
            break
        hidden = still
    return np.asarray((vectors * np.where(hidden, 0.0, values)) @ vectors.T)


class _Origin:
    """Where scores and curvatures are taken: a place that moves.

    `here` are the coordinates w, `clip` those in which contributions are clipped.  The rows of
    `seen` (k, d) are the directions of w that records see.
    """

    def __init__(self, blank: Prepared, public: Public) -> None:
        self.here, self.clip, self._public = blank.coordinates, blank.clip, public
        scaling = self.here.scaling
        self._precision = np.linalg.inv(scaling @ scaling.T)
        self.seen = np.eye(len(scaling))
        if public.alone.size:
            self.seen = np.delete(scaling, public.alone, axis=0)
            self.seen /= np.linalg.norm(self.seen, axis=1, keepdims=True)
        # records see no step at right angles to that
        self._along = pinv(self.seen) @ self.seen

    def move(self, step: np.ndarray, longest: float) -> np.ndarray:
        """Move by a step in w, or by a part of it; that part."""
        step = self._along @ step
        length = float(np.linalg.norm(step))
        step = step if length <= longest else step * (longest / length)
        location = self._public.settled(self.here.theta(step), self._precision)
        self.here = Coordinates(location, self.here.scaling)
        self.clip = Coordinates(location, self.clip.scaling)
        return step

    def posterior(
        self, score: np.ndarray, covariance: np.ndarray, curvature: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance in w, as far as a score here tells them."""
        bend = positive_part(prior_curvature(self._public.gradient, self.here), _FLATTEST)
        prior = self._public.score(self.here)
        return noisy_posterior(score, covariance, curvature, bend, prior)


def _looked(
    budget: Shares, look: Curvature, again: str, share: float, size: float, before: float | None
) -> tuple[np.ndarray, CurvatureNoise, float] | None:
    """A curvature, its noise and its clip norm; None where noise hides how long they are.

    `again` is for labels.  `size` is the largest eigenvalue of the noise for the whole budget and a
    clip norm of 1, in w.  `before` is an earlier clip norm: a later look costs less, and may be
    hidden where the first was not.
    """
    clip_norm = budget.tail(f"curvature norms{again}", look, _TAIL, share / 6.0) or before
    if not clip_norm:
        return None
    clear = min((size * clip_norm / _CLEAR) ** 2, _MOST * (1.0 - budget.spent))
    part = max(share * 5.0 / 6.0, clear)
    return *budget.curvature(f"curvature{again}", look, clip_norm, part), clip_norm


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
    the way took from it.  The second score comes in two parts, and the first of them may move the
    origin once more.

    `known` (d, d) is the curvature of the log-likelihood in theta, as the search left it; `flat`
    says that log-likelihoods are piecewise linear.
    """
    d, basis, clipping = len(blank.score), blank.basis, blank.clipping
    left = 1.0 - budget.spent
    spec, bound = clipping.score(blank.clip), clipping.bound
    loss = clipping.loss(budget, blank.clip, basis)
    score, of_score = budget.score("first score", spec, bound, 0.35 * left)
    origin = _Origin(blank, public)
    at = origin.here
    before = at.scaling.T @ known @ at.scaling
    first, noise, _ = loss.corrected(basis.T @ score, of_score.covariance(basis), before)
    longest = _FURTHEST * math.sqrt(d + float(np.trace(noise)))
    inside = np.zeros(d, dtype=bool)
    for block in budget.answers.structure.effects(at.location)[0]:
        inside[block] = True
    n = budget.releases.n_public
    diagonal = not whole_curvature(n, d, budget.releases.units_mu2)
    length = _FLAT_STEP * math.sqrt(n / d) if flat else 1e-6
    # what is piecewise linear has the curvature of the density at its kinks, whatever the model
    kind = Curvature if flat or clipping.inner is None else ExpectedCurvature
    size = of_score.sd / bound * math.sqrt(0.35 * left) * float(np.linalg.norm(basis, 2)) ** 2
    size *= 3.0 if diagonal else math.sqrt(2.0 * d)

    def errors(
        step: np.ndarray, matrix: np.ndarray, error: CurvatureNoise
    ) -> tuple[np.ndarray, np.ndarray]:
        """Those of the score after a step: of the curvature, and in what all groups share."""
        moved = basis @ step
        product = error.of_product(np.outer(moved, moved))
        common = np.where(inside, 0.0, _common(moved, matrix, product, inside, n))
        return basis.T @ product @ basis, (basis.T * (of_score.reach * common**2)) @ basis

    step = first + public.score(at)  # the precision in w is about 1
    clip_norm: float | None = None
    for k, share in enumerate(_CURVATURES):
        step = origin.move(step, longest)
        look = kind(origin.clip, diagonal=diagonal, step=length)
        found = _looked(budget, look, f" {k + 1}" if k else "", share * left, size, clip_norm)
        if found is None:
            return replace(blank, trusted=False)
        matrix, error, clip_norm = found
        released = basis.T @ matrix @ basis
        curvature = _visible(released, error, basis)
        of_step, common = errors(step, matrix, error)
        now, then = float(step @ released @ step), float(step @ before @ step)
        unsure = _UNSURE * math.sqrt(max(float(step @ of_step @ step), 0.0))
        steady = _STEADY * then - unsure <= now <= then / _STEADY + unsure
        first = first - (curvature if steady else 0.5 * (before + curvature)) @ step
        # what two places do not tell of the curvature between them is an error like noise
        bent = 0.5 * (before - curvature) @ step
        noise = noise + of_step + common + np.outer(bent, bent)
        if steady and float(np.linalg.norm(step)) < 0.999 * longest:
            break
        before = curvature
        if k < len(_CURVATURES) - 1:
            # a score means nothing in directions that noise hides
            step, _ = origin.posterior(first, noise, curvature)
    unseen = _EXCESS * clipping.hidden * bound / d  # sd of what clipping may have taken besides
    besides = replace(of_score, sd=unseen).covariance(basis)

    def second(label: str, part: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        score, of_score = budget.score(label, clipping.score(origin.clip), bound, part)
        return loss.corrected(basis.T @ score, of_score.covariance(basis), curvature)

    half, of_half, lost = second("anchor", (1.0 - budget.spent) / 2.0)
    besides = besides + lost
    score, noise_here = _both(first, noise, half, of_half)
    mean, width = origin.posterior(score, noise_here + besides, curvature)
    far = mean**2 > _FAR * width.diagonal()
    if far.any():
        step = origin.move(mean, longest)
        # not told from so far
        astray = np.diag(np.where(far, step**2, 0.0))
        first = score - curvature @ step
        noise = noise_here + sum(errors(step, matrix, error)) + astray
    other, of_other, _ = second("anchor 2", 1.0 - budget.spent)
    if not far.any():
        other, of_other = pooled(half, of_half, other, of_other)
    first, noise = _both(first, noise, other, of_other)
    covariance = noise + besides
    mean, width = origin.posterior(first, covariance, curvature)
    away = origin.seen @ mean
    if float(away @ pinvh(origin.seen @ width @ origin.seen.T) @ away) > _FURTHEST**2 * len(away):
        return replace(blank, trusted=False)
    # the noise in the curvature counts as far as the posterior reaches
    reach = basis @ (width + np.outer(mean, mean)) @ basis.T
    covariance = covariance + basis.T @ error.of_product(reach) @ basis
    return replace(
        blank,
        clip=origin.clip,
        score=first,
        covariance=covariance,
        curvature=curvature,
        diagonal=diagonal,
        clip_norms={"anchor": bound},
    )
