"""What a preparation of DPLangevin learns, and the budget it learns it with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.linalg import pinvh

from pymc_dp.noise_laws import Likelihood
from pymc_dp.rows.contributions import (
    Change,
    ConsistentScore,
    Contribution,
    Curvature,
    LostInformation,
    Score,
)
from pymc_dp.rows.engine import Coordinates
from pymc_dp.warmup.answers import Answers, CurvatureNoise, Releases, ScoreNoise, Structure
from pymc_dp.warmup.quantiles import (
    cheapest_bound,
    heavy_quantile,
    hidden_tail,
    tail_quantile,
)

__all__ = [
    "ROOM",
    "WORTH",
    "Clipping",
    "Form",
    "Prepared",
    "Shares",
    "harmless_tail",
    "pooled",
    "tail_of_scores",
]

Form = Literal["anchored", "plain", "quadratic"]
"""What the chains ask of the records."""

#: Bins above a quantile in which what it cuts off is counted: two octaves.
_TAIL_BINS = 8
#: Tail index from which on a few records hold much of the information: 0.35 is that of lognormal
#: features, and more than that of any light-tailed score but the squares of residuals, which seem
#: to come to 0.5 where noise hides all but the last few per cent.
_HEAVY, _HEAVY_SQUARES = 0.35, 0.6
#: Where scores of some outcome are so many times as long as those that are seen, it is rare. Noise
#: in one of two quantiles is no such outcome: they must differ where this part is above them, too.
_RARE, _SHOWN = 1.5, 0.03
#: Effective draws per squared mu of a score of norm bound 1/2, where its noise is the friction:
#: measured on N(0, I), per kick .86 / sigma^2.
WORTH = 0.86


#: Room for what is given back, in units of the norm to which scores are clipped before that.
ROOM = 1.1
#: Most scores that are clipped where what that takes is given back on average.
_MOST_CLIPPED = 0.2
#: Part of the budget for the covariance of what clipping takes, and a bound on what a unit adds to
#: it, in units of its squared clip norm.
_LOSS, _LOSS_BOUND = 0.01, 0.25


@dataclass(frozen=True)
class Clipping:
    """How the scores of an anchor are clipped.

    Attributes
    ----------
    bound : float
        On what a unit adds to the sum.
    inner : float or None
        What takes scores to this norm is given back on average: see `ConsistentScore`.
    """

    bound: float
    inner: float | None = None

    @classmethod
    def consistent(cls, clip_norm: float) -> Clipping:
        """With room for what is given back."""
        return cls(ROOM * clip_norm, clip_norm)

    def score(self, at: Coordinates) -> Score:
        """What units add to the sum."""
        return Score(at) if self.inner is None else ConsistentScore(at, clip_norm=self.inner)

    def lost(self, budget: Shares, at: Coordinates, basis: np.ndarray) -> np.ndarray:
        """(d, d) covariance in w of what clipping takes beside its mean, as it is released."""
        d = len(basis)
        if self.inner is None:
            return np.zeros((d, d))
        spec = LostInformation(at, diagonal=True, clip_norm=self.inner)
        bound = _LOSS_BOUND * self.inner**2
        matrix, _ = budget.curvature("what clipping takes", spec, bound, _LOSS)
        return np.asarray(basis.T @ np.maximum(matrix, 0.0) @ basis)


@dataclass(frozen=True)
class Prepared:
    """What the chains start from; released values and public numbers only.

    The chains move in w, theta = location + clip.scaling @ basis @ w, where the posterior is about
    N(0, I); contributions are clipped in z = basis @ w.

    Attributes
    ----------
    form : {"anchored", "plain", "quadratic"}
    clip : Coordinates
        In which contributions are clipped; its location is the origin.
    basis : (d, d) ndarray
    score : (d,) ndarray
        Released score at the origin, in w; 0 in the plain form.
    covariance : (d, d) ndarray
        Of the noise in it.
    curvature : (d, d) ndarray
        Of the log-likelihood at the origin, in w: the whole likelihood of the quadratic form.
    clip_norms : dict of str to float
        "anchor", "gradient" and "energy_error", as far as the form has them.
    shares : dict of str to float
        Relative parts of the rest of the budget.
    step_size : float
    n_steps : int
    friction : float
    persistent : bool
    effective_draws : float
        What the chains' releases are worth.
    clipped : tuple of float
        Noisy fraction of the scores that are longer than the anchor's bound, and its standard
        deviation.
    trusted : bool
        False where the budget could not tell the records from the noise.
    tail_index : float
        Of the scores: see `heavy_quantile`.
    huberised : bool
        Clipping scores is exact for a stated target.
    diagonal : bool
        Of the curvature, only the diagonal in z was released.
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
    clipped: tuple[float, float]
    trusted: bool
    tail_index: float = 0.0
    huberised: bool = False
    diagonal: bool = False

    @property
    def heavy_tails(self) -> bool:
        """Whether what is clipped may matter more than the noise."""
        return self.tail_index > (_HEAVY if self.huberised else _HEAVY_SQUARES)

    @property
    def radius(self) -> float:
        """Of the ball in w that anchored chains stay in: no normal draw comes near its edge."""
        return 8.0 * math.sqrt(len(self.score)) + 20.0

    @property
    def likelihood(self) -> Likelihood:
        """What was released of the likelihood, in w."""
        return Likelihood(self.score, self.curvature, self.covariance)

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates w of the chains."""
        return Coordinates(self.clip.location, self.clip.scaling @ self.basis)


def tail_of_scores(n: int, noise: float = math.inf) -> float:
    """Fraction of the scores that an anchor may clip.

    Parameters
    ----------
    n : int
    noise : float
        About the standard deviation of the anchor's noise, in posterior standard deviations: where
        it is small, the bias must be smaller.

    With 0.3 % clipped at n = 1e5 the bias was below 0.05 posterior sds in logistic regression; it
    grows like sqrt(n) for a fixed fraction, while posterior sds shrink.
    """
    return 0.003 * min(1.0, math.sqrt(1e5 / n)) * min(1.0, noise / 0.2)


def harmless_tail(n: int, noise: float) -> float:
    """Fraction of the scores that may be clipped where clipping changes the target.

    Parameters
    ----------
    n : int
    noise : float
        Noise sd over clip norm of the sum in question.

    Scores above the clip norm b are longer than it by about 0.15 b on average, and may all point
    the same way (squares of residuals do), so that a fraction t of them moves the sum by up to
    0.15 n t b. Half of the noise is harmless.
    """
    return min(0.003, 0.5 * noise / (0.15 * n))


class Shares:
    """Releases by their share of the budget, and what was spent so far.

    Parameters
    ----------
    releases : Releases
    structure : Structure
    spent : float
    """

    def __init__(self, releases: Releases, structure: Structure, spent: float) -> None:
        self.releases = releases
        self.answers = Answers(releases, structure)
        self.spent = spent
        self._of_scores = (np.empty(0), np.empty(0), 0.0)  # the histogram of the scores
        self.above = (0.0, 0.0)  # noisy fraction above the last quantile, and its sd
        self.hidden = 0.0  # scores above their bound that noise may hide

    @property
    def total(self) -> float:
        """Squared mu of which shares are parts."""
        return self.releases.units_mu2

    def tail(self, label: str, spec: Contribution, tail: float, share: float) -> float | None:
        """Upper quantile of the norms of `spec`; see `tail_quantile`."""
        histogram = self._histogram(label, spec, share)
        return self._counted(histogram, tail_quantile(*histogram, tail, self.releases.n_public))

    def heavy_tail(self, label: str, spec: Contribution, tail: float, share: float) -> float | None:
        """The same where what lies above matters; see `heavy_quantile`."""
        histogram = self._histogram(label, spec, share)
        found, _ = heavy_quantile(*histogram, tail, self.releases.n_public)
        return self._counted(histogram, found)

    def scores(
        self, spec: Contribution, tail: float, share: float, huberised: bool
    ) -> tuple[float | None, float]:
        """Bound on the scores, and the index of their tail."""
        histogram = self._of_scores = self._histogram("scores", spec, share)
        found, index = heavy_quantile(*histogram, tail, self.releases.n_public)
        self.hidden = hidden_tail(*histogram, tail, self.releases.n_public)
        if huberised:
            found = tail_quantile(*histogram, tail, self.releases.n_public)
        return self._counted(histogram, found), index

    def cheapest(self, price: float) -> float | None:
        """Clip norm of scores of which what is clipped is given back; see `cheapest_bound`."""
        n = self.releases.n_public
        return self._counted(
            self._of_scores, cheapest_bound(*self._of_scores, price, _MOST_CLIPPED, n)
        )

    def longer_scores(
        self, spec: Contribution, bound: float, tail: float, share: float
    ) -> float | None:
        """Bound on what scores would be under other outcomes, if that is much longer."""
        histogram, n = self._histogram("longest scores", spec, share), self.releases.n_public
        found = tail_quantile(*histogram, tail, n)
        shown = tail_quantile(*histogram, max(tail, _SHOWN), n)
        seen = tail_quantile(*self._of_scores, max(tail, _SHOWN), n)
        if not (found and shown and seen) or min(found / bound, shown / seen) < _RARE:
            return None
        return found

    def scores_above(self, bound: float) -> tuple[float, float]:
        """Noisy fraction of the scores that are longer than another bound, and its sd."""
        self._counted(self._of_scores, bound)
        return self.above

    def _histogram(
        self, label: str, spec: Contribution, share: float
    ) -> tuple[np.ndarray, np.ndarray, float]:
        self.spent += share
        return self.releases.histogram(label, spec, share)

    def _counted(
        self, histogram: tuple[np.ndarray, np.ndarray, float], found: float | None
    ) -> float | None:
        """The quantile `found`, above which units are counted."""
        edges, counts, noise_sd = histogram
        if found:
            beyond = edges[:-1] >= found
            top = np.flatnonzero(beyond)[:_TAIL_BINS]
            self.above = (
                max(float(counts[top].sum()), 0.0) / self.releases.n_public,
                noise_sd * math.sqrt(len(top)) / self.releases.n_public,
            )
        return found

    def score(
        self, label: str, spec: Score | Change, clip_norm: float, share: float
    ) -> tuple[np.ndarray, ScoreNoise]:
        """Noisy sum of clipped scores, or of their changes."""
        self.spent += share
        return self.answers.score(label, spec, clip_norm, share)

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
