"""What a preparation of DPLangevin learns, and the budget it learns it with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.linalg import pinvh

from pymc_dp.base.matrices import positive_part
from pymc_dp.privacy.forecast import ROOM
from pymc_dp.publication.noise_laws import Likelihood
from pymc_dp.rows.contributions import (
    Change,
    ConsistentScore,
    Contribution,
    Curvature,
    LawNotFound,
    Loss,
    Score,
)
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.tuning.answers import Answers, CurvatureNoise, Releases, ScoreNoise, Structure
from pymc_dp.tuning.quantiles import cheapest_bound, heavy_quantile, hidden_tail, tail_quantile

Form = Literal["anchored", "plain", "quadratic"]
"""What the chains ask of the records."""

#: Bins above a quantile in which what it cuts off is counted: two octaves.
_TAIL_BINS = 8
#: Tail index above which a few records hold much of the information: more than that of squares of
#: residuals, which seem to come to 0.5 where noise hides all but the last few per cent.
_HEAVY = 0.6
#: Effective draws per squared mu of a score of norm bound 1/2, where its noise is the friction:
#: measured on N(0, I), per kick .86 / sigma^2.
WORTH = 0.86


#: Largest fraction of the scores that is clipped where what that takes is given back on average.
_MOST_CLIPPED = 0.2
#: Parts of the budget for how much clipping takes from a unit, and for the covariance of that; and
#: the fraction of the units that are above the bound on what a unit adds to it.
_LOSS_LOOK, _LOSS, _LOSS_TAIL = 0.004, 0.008, 0.002
#: Part of the budget for how many laws of outcomes are not found, and the fraction that may be.
_LAWS, _NOT_FOUND = 0.002, 0.02
#: Least curvature by which a loss is divided, where the posterior has 1, and the largest part of a
#: curvature that may be lost.
_LEAST_CURVATURE, _MOST_LOST = 0.01, 0.6
#: Bound on what a unit adds to what clipping takes, in units of the squared clip norm, where noise
#: hides it or most units lose nothing.
_LOSS_BOUND = 0.25


Histogram = tuple[np.ndarray, np.ndarray, float]
"""Edges, noisy counts, standard deviation of their noise."""


@dataclass(frozen=True)
class Clipping:
    """How the scores of an anchor are clipped.

    `bound` is on what a unit adds to the sum.  What takes scores to the norm `inner`, if any, is
    given back on average: see `ConsistentScore`.  `above` is the noisy fraction of the scores that
    are longer, and its standard deviation.  Where nothing is given back, `hidden` is the number of
    scores longer than the bound that noise may hide, and `tail_index` that of the scores, see
    `heavy_quantile`.
    """

    bound: float
    inner: float | None = None
    above: tuple[float, float] = (0.0, 0.0)
    hidden: float = 0.0
    tail_index: float = 0.0

    @classmethod
    def consistent(
        cls, norms: Histogram, price: float, longest: float, n: float
    ) -> Clipping | None:
        """The clipping that costs least where what it takes is given back.

        None if its bound is not below `longest`.  `norms` are those of the scores; `price` is as
        for `cheapest_bound`.
        """
        inner = cheapest_bound(*norms, price, _MOST_CLIPPED, n)
        if not inner or ROOM * inner >= longest:
            return None
        return cls(ROOM * inner, inner, _above(norms, inner, n))

    @property
    def heavy_tails(self) -> bool:
        """Whether what is clipped may matter more than the noise."""
        return self.tail_index > _HEAVY

    def facts(self) -> dict[str, Any]:
        """What the privacy statement says of it."""
        return {
            "clipping": "consistent" if self.inner is not None else None,
            "clipped": list(self.above),
            "heavy_tails": self.heavy_tails,
        }

    def score(self, at: Coordinates) -> Score:
        """What units add to the sum."""
        return Score(at) if self.inner is None else ConsistentScore(at, clip_norm=self.inner)

    def loss(self, budget: Shares, at: Coordinates, basis: np.ndarray) -> Lost:
        """What clipping takes from the scores beyond its mean, as it is released, in w."""
        if self.inner is None:
            nothing = np.zeros((len(basis), len(basis)))
            return Lost(nothing, nothing)
        spec, label = Loss(at, self.inner), "what clipping takes"
        bound = budget.tail(f"{label}, norms", spec, _LOSS_TAIL, _LOSS_LOOK)
        lost, shared = budget.loss(label, spec, bound or _LOSS_BOUND * self.inner**2, _LOSS)
        return Lost(basis.T * lost @ basis, basis.T * shared @ basis)


@dataclass(frozen=True, eq=False)
class Lost:
    """What clipping takes from a sum of scores of which it gives back the mean.

    With e what it takes from the sum g, of covariance H over data of the model at the origin, the
    sum that is left changes with w as H - C does, C = Cov(e, g), and not as H: it leans towards the
    origin.  It is multiplied by H (H - C)^-1, and then is a score with an error of its own.

    `covariance` is Cov(e) and `shared` is C, both (d, d) in w.
    """

    covariance: np.ndarray
    shared: np.ndarray

    def corrected(
        self, score: np.ndarray, noise: np.ndarray, curvature: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The score (d,), the covariance of its noise, and that of what clipping has lost.

        `noise` is the covariance of the noise; `curvature` is H, as far as it is known.
        """
        if not self.shared.any():
            return score, noise, self.covariance
        values, vectors = np.linalg.eigh(curvature)
        sizes = np.sqrt(np.maximum(values, _LEAST_CURVATURE))
        whiten, back = (vectors / sizes) @ vectors.T, (vectors * sizes) @ vectors.T
        parts, axes = np.linalg.eigh(whiten @ self.shared @ whiten)
        parts = np.clip(parts, 0.0, _MOST_LOST)
        factor = back @ (axes / (1.0 - parts)) @ axes.T @ whiten
        rest = whiten @ self.covariance @ whiten - (axes * parts**2) @ axes.T
        lost = back @ positive_part(rest) @ back
        return factor @ score, factor @ noise @ factor.T, factor @ lost @ factor.T


@dataclass(frozen=True)
class Prepared:
    """What the chains start from; released values and public numbers only.

    The chains move in w, theta = location + clip.scaling @ basis @ w, where the posterior is about
    N(0, I); contributions are clipped in z = basis @ w.  The location of `clip` is the origin.

    `score` (d,) is the released score at the origin, in w; 0 in the plain form.  `covariance` is
    that of the noise in it.  `curvature` (d, d) is that of the log-likelihood at the origin, in w:
    the whole likelihood of the quadratic form.  `clip_norms` holds "anchor", "gradient" and
    "energy_error", as far as the form has them; `shares` are relative parts of the rest of the
    budget.  `effective_draws` is what the chains' releases are worth.  `clipping` is that of the
    scores of the anchor, or of all scores in the plain form.  `trusted` is False where the budget
    could not tell the records from the noise.  `diagonal`: only the diagonal of the curvature in z
    was released.
    """

    form: Form
    clip: Coordinates
    basis: np.ndarray
    score: np.ndarray
    covariance: np.ndarray
    curvature: np.ndarray
    clip_norms: dict[str, float]
    shares: dict[str, float]
    step_size: float
    n_steps: int
    friction: float
    persistent: bool
    effective_draws: float
    clipping: Clipping
    trusted: bool
    diagonal: bool = False

    @property
    def radius(self) -> float:
        """Radius of the ball in w that anchored chains stay in: no normal draw comes near it."""
        return 8.0 * math.sqrt(len(self.score)) + 20.0

    @property
    def likelihood(self) -> Likelihood:
        """What was released of the likelihood, in w."""
        return Likelihood(self.score, self.curvature, self.covariance)

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates w of the chains."""
        return Coordinates(self.clip.location, self.clip.scaling @ self.basis)


def tail_of_scores(n: int) -> float:
    """Fraction of the scores that may be clipped where noise is about a posterior sd.

    With 0.3 % clipped at n = 1e5 the bias was below 0.05 posterior sds in logistic regression; it
    grows like sqrt(n) for a fixed fraction, while posterior sds shrink.
    """
    return 0.003 * min(1.0, math.sqrt(1e5 / n))


def harmless_tail(n: int, noise: float) -> float:
    """Fraction of the scores that may be clipped where clipping changes the target.

    `noise` is the noise sd over the clip norm of the sum in question.  Scores above the clip norm b
    are longer than it by about 0.15 b on average, and may all point the same way (squares of
    residuals do), so that a fraction t of them moves the sum by up to 0.15 n t b. Half of the noise
    is harmless.
    """
    return min(0.003, 0.5 * noise / (0.15 * n))


def _above(norms: Histogram, bound: float, n: float) -> tuple[float, float]:
    """Noisy fraction of the units above a bound, and its standard deviation."""
    edges, counts, noise_sd = norms
    top = np.flatnonzero(edges[:-1] >= bound)[:_TAIL_BINS]
    return max(float(counts[top].sum()), 0.0) / n, noise_sd * math.sqrt(len(top)) / n


class Shares:
    """Releases by their share of the budget; counts what was spent so far."""

    def __init__(self, releases: Releases, structure: Structure, spent: float) -> None:
        self.releases = releases
        self.answers = Answers(releases, structure)
        self.spent = spent

    @property
    def total(self) -> float:
        """Squared mu of which shares are parts."""
        return self.releases.units_mu2

    def tail(self, label: str, spec: Contribution, tail: float, share: float) -> float | None:
        """Upper quantile of the norms of `spec`; see `tail_quantile`."""
        return tail_quantile(*self.histogram(label, spec, share), tail, self.releases.n_public)

    def heavy_tail(self, label: str, spec: Contribution, tail: float, share: float) -> float | None:
        """Upper quantile where what lies above matters; see `heavy_quantile`."""
        histogram = self.histogram(label, spec, share)
        return heavy_quantile(*histogram, tail, self.releases.n_public)[0]

    def clipping(
        self, spec: Score, tail: float, price: float | None, share: float
    ) -> tuple[Clipping, Clipping] | None:
        """How scores are clipped in the plain form, and in the others; None where noise hides them.

        `tail` is the fraction that may be clipped where nothing is given back.  `price` is as for
        `cheapest_bound`, where what is clipped can be given back.
        """
        histogram, n = self.histogram("scores", spec, share), self.releases.n_public
        bound, index = heavy_quantile(*histogram, tail, n)
        if not bound:
            return None
        hidden = hidden_tail(*histogram, tail, n)
        whole = Clipping(bound, None, _above(histogram, bound, n), hidden, index)
        shorter = price and Clipping.consistent(histogram, price, bound, n)
        return whole, shorter or whole

    def laws_found(self, at: Coordinates) -> bool:
        """Whether the laws of the outcomes of nearly all units are found, as far as noise shows."""
        edges, counts, noise_sd = self.histogram("laws not found", LawNotFound(at), _LAWS)
        one = int(np.searchsorted(edges, 1.0, side="right")) - 1
        n = self.releases.n_public
        return float(counts[one]) - 2.0 * noise_sd < _NOT_FOUND * n

    def histogram(self, label: str, spec: Contribution, share: float) -> Histogram:
        """Noisy histogram of the norms of `spec`."""
        self.spent += share
        return self.releases.histogram(label, spec, share)

    def score(
        self, label: str, spec: Score | Change, clip_norm: float, share: float
    ) -> tuple[np.ndarray, ScoreNoise]:
        """Noisy sum of clipped scores, or of their changes."""
        self.spent += share
        return self.answers.score(label, spec, clip_norm, share)

    def loss(
        self, label: str, spec: Loss, clip_norm: float, share: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Noisy sums of the variances of what clipping takes, and of its covariances."""
        self.spent += share
        return self.answers.loss(label, spec, clip_norm, share)

    def curvature(
        self, label: str, spec: Curvature, clip_norm: float, share: float
    ) -> tuple[np.ndarray, CurvatureNoise]:
        """Noisy sum of clipped curvatures."""
        self.spent += share
        return self.answers.curvature(label, spec, clip_norm, share)


def pooled(
    first: np.ndarray, first_noise: np.ndarray, second: np.ndarray, second_noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The best of two noisy measurements of one vector, and the covariance of its noise."""
    # of the first; both are exact where there is no noise
    weight = second_noise @ pinvh(first_noise + second_noise)
    covariance = second_noise - weight @ second_noise
    return second + weight @ (first - second), (covariance + covariance.T) / 2.0
