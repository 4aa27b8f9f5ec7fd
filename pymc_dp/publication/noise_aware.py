"""Noise-aware draws: from the posterior given a noisy score to that given the noise's law.

G = S + xi is the score, xi ~ N(0, V). The likelihood has curvature H, the prior precision P0; both
scores are taken at w = 0. An anchored chain targets pi(w | G), the posterior tilted by exp(xi . w):
it takes the noise for data. pi(w | G - xi') mixed over xi', from the law of xi given what was
released, takes it for noise. All of it is post-processing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.linalg import pinvh
from scipy.stats import chi2

from pymc_dp.base.matrices import positive_part, root

#: Of the largest variance or precision, what is none but for rounding.
NONE = 1e-12
#: Skewness and excess kurtosis of a posterior near normal.  Shifting all draws alike by t sds is
#: wrong by about skewness * t^2 / 2 sds in the mean.
SKEWNESS, KURTOSIS = 0.25, 0.5
#: Monte-Carlo errors beyond which a moment counts: with 4, one in 16,000 by chance.
ERRORS = 4.0
#: Effective draws under the weights of one xi', for nine in ten of them, from which on resampling
#: is sound; below, single draws stand for whole regions.
WEIGHT_ESS = 50.0
#: Draws to choose from when resampling: more would cost time and add nothing.
CANDIDATES = 4000
_CHUNK = 256
#: Largest `LinearPrior.bend` of a prior that counts as normal, in general and with so much noise
#: that raw draws may lie where the prior looks more linear than it is.
BENT, EXACTLY = 0.1, 0.01
#: Variance of a shift over that of the draws: in any direction, where it is not worth a look at the
#: prior; on average, from which on the shape of the posterior depends on the noise.
LITTLE, MUCH = 0.02, 0.25
#: Effective draws per parameter below which a covariance is not worth inverting.
ENOUGH = 2.0
#: The mean noise, squared and in its variances, is at most chi-squared, with a degree of freedom
#: per parameter that is seen: values less likely than this are not plausible.
_ONE_IN = 1e-6
#: At how many draws the prior is looked at: four times their dimension, if that is more.
PLACES = 1000


@dataclass(frozen=True, eq=False)
class NoiseLaw:
    """N(mean, covariance), (d,) and (d, d): the law of the noise in a score given that score."""

    mean: np.ndarray
    covariance: np.ndarray

    def sample(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """(n, d) draws; the covariance may be singular."""
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        return self.mean + rng.standard_normal((n, len(self.mean))) @ root.T


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    return (matrix + matrix.T) / 2.0


def noise_law(
    score: np.ndarray,
    noise: np.ndarray,
    curvature: np.ndarray,
    prior_precision: np.ndarray,
    prior_score: np.ndarray,
) -> NoiseLaw:
    """Law of xi given G, N(K (G - H w_p), V - K V), of a Gaussian likelihood and prior.

    The gain K = V (V + H + H P0^-1 H)^-1 is how much of a surprising score is noise: 0 where the
    prior is flat, as nothing is surprising then. Arguments are G, V, H, P0 and P0 w_p, the score of
    the prior at w = 0; w_p itself need not exist. Each matrix may be singular, unless V + H is.

    P0 is never inverted. With the noise-aware posterior N(mu, C), C = (P0 + H U H)^-1 and mu = C (H
    U G + P0 w_p), the mean is V U (G - H mu) and the covariance V - V U V + V U H C H U V, a sum of
    positive semidefinite terms.
    """
    mu, c = noisy_posterior(score, noise, curvature, prior_precision, prior_score)
    vu = noise @ pinvh(_symmetric(noise + curvature))
    vuh = vu @ curvature
    # V - V U V = V U H
    return NoiseLaw(vu @ (score - curvature @ mu), _symmetric(vuh + vuh @ c @ vuh.T))


def noisy_posterior(
    score: np.ndarray,
    noise: np.ndarray,
    curvature: np.ndarray,
    prior_precision: np.ndarray,
    prior_score: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the noise-aware posterior; arguments as in :func:`noise_law`."""
    u = pinvh(_symmetric(noise + curvature))
    c = pinvh(_symmetric(prior_precision + curvature @ u @ curvature))
    return np.asarray(c @ (curvature @ (u @ score) + prior_score)), c


@dataclass(frozen=True, eq=False)
class LinearPrior:
    """The score of a prior over the draws of a posterior, as a linear function of them.

    The best linear fit is score - P0 (w - centre). `bend`, 0 for a normal prior, is what the fit
    leaves: a root mean square in the direction where it is largest, in units of the posterior's own
    score there (one over its sd).
    """

    precision: np.ndarray  # (d, d), P0
    score: np.ndarray  # (d,), mean over the draws that were fitted
    bend: float = 0.0
    centre: np.ndarray | None = None  # (d,), their mean; None: that of the draws it is used for

    def about(self, centre: np.ndarray) -> LinearPrior:
        """The same function, with its score at another centre; `centre`, if there was none."""
        if self.centre is None:
            return replace(self, centre=centre)
        score = self.score - self.precision @ (centre - self.centre)
        return replace(self, score=score, centre=centre)

    def bend_at(self, draws: np.ndarray, scores: np.ndarray) -> float:
        """What the same fit leaves at other (m, d) draws, of these (m, d) scores of the prior."""
        centred = draws - draws.mean(axis=0)
        covariance = centred.T @ centred / (len(draws) - 1)
        rest = scores - self.score + (draws - self.centre) @ self.precision
        return _bend(rest, covariance)


def linear_prior(draws: np.ndarray, scores: np.ndarray) -> LinearPrior:
    """Fit a linear function to the (m, d) scores of a prior at (m, d) draws of a posterior. For a
    Gaussian likelihood of curvature H, whatever the prior, integration by parts gives H = Sigma^-1
    - P0 with this P0, and a score of the likelihood at the mean that is minus `score`.
    """
    known = np.isfinite(scores).all(axis=1)
    if not known.all():  # not linear, whatever the others say
        if known.sum() <= draws.shape[1]:
            d = draws.shape[1]
            return LinearPrior(np.zeros((d, d)), np.zeros(d), np.inf)
        return replace(linear_prior(draws[known], scores[known]), bend=np.inf)
    centred, rest = draws - draws.mean(axis=0), scores - scores.mean(axis=0)
    covariance = centred.T @ centred / (len(draws) - 1)
    across = rest.T @ centred / (len(draws) - 1)
    precision = -_symmetric(across @ pinvh(covariance))
    bend = _bend(rest + centred @ precision, covariance)
    return LinearPrior(precision, scores.mean(axis=0), bend, draws.mean(axis=0))


def _bend(rest: np.ndarray, covariance: np.ndarray) -> float:
    """(m, d) rests of scores as in `LinearPrior.bend`, over draws of this covariance."""
    if not np.isfinite(rest).all():
        return np.inf
    rest = rest @ root(covariance)
    return float(np.sqrt(np.linalg.norm(rest.T @ rest / len(rest), 2)))


@dataclass(frozen=True, eq=False)
class Likelihood:
    """A likelihood that is normal but for the noise in its score: N(score; H w, H + V)."""

    score: np.ndarray  # (d,), noisy, at w = 0
    curvature: np.ndarray  # (d, d), H
    noise: np.ndarray  # (d, d), V

    def noise_at(self, rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
        """(m, d) draws of xi given (m, d) parameters."""
        u = pinvh(_symmetric(self.noise + self.curvature))
        rest = NoiseLaw(
            np.zeros(len(self.score)), _symmetric(self.noise @ u @ self.curvature)
        ).sample(rng, len(w))
        return (self.score - w @ self.curvature) @ (self.noise @ u).T + rest


def law_at_mean(
    likelihood: Likelihood, seen: np.ndarray, unseen: np.ndarray, prior: LinearPrior
) -> NoiseLaw:
    """Law of xi under a normal prior; see `noise_aware`. Directions without noise are those that no
    record sees. The likelihood has neither score nor curvature there; whatever draws show of them
    instead would be divided by next to nothing, so they are integrated out first.
    """
    p0 = positive_part(prior.precision)
    across = seen.T @ p0 @ unseen
    rounding = NONE * np.trace(p0)
    follow = across @ pinvh(_symmetric(unseen.T @ p0 @ unseen), atol=rounding)
    score = seen.T @ prior.score - follow @ (unseen.T @ prior.score)
    law = noise_law(
        -score,
        seen.T @ likelihood.noise @ seen,
        seen.T @ likelihood.curvature @ seen,
        _symmetric(seen.T @ p0 @ seen - follow @ across.T),
        score,
    )
    return NoiseLaw(seen @ law.mean, seen @ law.covariance @ seen.T)


# -- draws ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Normality:
    """How far draws are from normal, along standardised axes and their principal directions."""

    skewness: np.ndarray  # (2d,)
    excess_kurtosis: np.ndarray  # (2d,)
    near_normal: bool  # none of them is both large enough to matter and significant


def normality(draws: np.ndarray, ess: float) -> Normality:
    """Compare skewness and kurtosis of (n, d) draws, worth `ess`, with those of a normal law. The
    axes of their coordinates must have a meaning: a skewed parameter hides in a rotation.
    """
    standardised = (draws - draws.mean(axis=0)) / draws.std(axis=0)
    _, vectors = np.linalg.eigh(standardised.T @ standardised)
    projected = standardised @ vectors
    projected = np.hstack([standardised, projected / projected.std(axis=0)])
    skewness = (projected**3).mean(axis=0)
    kurtosis = (projected**4).mean(axis=0) - 3.0
    # with their Monte-Carlo standard errors for normal draws
    near = np.all(np.abs(skewness) <= np.maximum(SKEWNESS, ERRORS * np.sqrt(6.0 / ess))) and np.all(
        np.abs(kurtosis) <= np.maximum(KURTOSIS, ERRORS * np.sqrt(24.0 / ess))
    )
    return Normality(skewness, kurtosis, bool(near))


Explore = Callable[[Likelihood], np.ndarray | None]
"""Draws, (k, d) in random order, of the prior as it is times a likelihood; None if unreliable."""


@dataclass(frozen=True, eq=False)
class NoiseAware:
    """Noise-aware (chains, draws, d) draws, and how they were made."""

    draws: np.ndarray
    method: Literal["shift", "resampled", "explored", "widened"]
    normality: Normality  # of the raw draws
    weight_ess: float  # effective raw draws under the weights of one xi', for nine in ten of them
    widening: float  # noise-aware over raw posterior sd, a root mean square over directions
    bend: float  # of the prior over the draws, raw or moved: see `LinearPrior`


def noise_aware(
    rng: np.random.Generator,
    draws: np.ndarray,
    noise: np.ndarray,
    prior: LinearPrior,
    *,
    ess: float,
    axes: np.ndarray | None = None,
    pairs: np.ndarray | None = None,
    explore: Explore | None = None,
    scores: Callable[[np.ndarray], np.ndarray] | None = None,
) -> NoiseAware:
    """Turn draws given a noisy score into draws given the law of its noise.

    `draws`, (chains, draws, d), are raw draws w, more than d of them and not all in a plane, worth
    `ess`. `noise` is V in the coordinates w, singular where parameters reach no record. `axes` is
    the A of theta = m + A w (default: identity), with theta the parameters of the model, by which
    normality is judged; a record may see `pairs` (d, d) of these together: elsewhere the curvature
    of the likelihood is 0, and what draws show of it is chance. `explore` makes draws where the
    prior is not normal over the draws; `scores` gives its scores, (m, d) at (m, d) draws (default:
    `prior` holds wherever draws may be moved to).

    With Sigma the covariance of the raw draws and xi' from the law of the noise given the releases:

    - shift: w - Sigma xi', which keeps chains and order. Exact for a normal posterior.
    - resampled: a raw draw, chosen with weights exp(-xi' . w). These turn pi(w | G) into
      pi(w | G - xi') whatever its shape, as a chain of its own for every xi' would. Taken where the
      posterior is not near normal and the weights are spread over enough draws; order is lost.

    *The law of xi'.* If the prior is about normal over the draws, it is that of `noise_law`. The
    score G is not needed: on average over the raw draws the score of their target vanishes, so the
    noisy score of the likelihood at their mean is minus that of the prior. Parameters that no
    record sees (mean and scale of a centred hierarchy) have no noise: the prior is integrated over
    them, and they follow a shift by their covariance with the others.

    Otherwise (effects whose scale is little known, heavy-tailed priors) a linear prior can be wrong
    by any number of standard deviations of the noise. The raw draws may lie on one side of a kink,
    so linearity is checked again at the moved draws. `explore` then draws from p(w) N(G; H w, H +
    V), the prior as it is, H the curvature that raw draws and prior leave to the likelihood, and
    xi' follows given w. Where so much noise decides the shape of the posterior (the scale of
    effects takes noise for spread), the explored draws themselves are the result.

    *widened*: where that is not worth it (hardly any noise), not to be had, or not plausible, xi'
    is N(0, V): draws are widened, by all that the noise could have moved them, and not moved.

    *Weaknesses.* The law of xi' takes the likelihood for Gaussian over the draws.
    """
    d = draws.shape[-1]
    pooled = draws.reshape(-1, d)
    centred = pooled - pooled.mean(axis=0)
    covariance = centred.T @ centred / (len(pooled) - 1)
    prior = prior.about(pooled.mean(axis=0))
    axes = np.eye(d) if axes is None else axes
    shape = normality(centred @ axes.T, ess)
    seen, unseen = directions(noise)
    k = seen.shape[1]
    effects = np.linalg.eigvalsh(root(noise).T @ covariance @ root(noise))
    much = effects.sum() > MUCH * k
    bend = prior.bend
    normal = bend <= (EXACTLY if much else BENT)
    method: Literal["shift", "resampled", "explored", "widened"] = "shift"
    xi = places = None
    little = effects.max() <= LITTLE and not (normal and shape.near_normal)
    worth = min(ess, float(len(pooled)))
    if worth > ENOUGH * d + 3.0 and k and not little:
        # on average the inverse of a covariance of so many draws is too large
        precision = pinvh(covariance) * (worth - d - 2.0) / (worth - 1.0)
        curvature = _possible(precision - prior.precision, seen, axes, pairs)
        score = curvature @ pooled.mean(axis=0) - seen @ (seen.T @ prior.score)
        likelihood = Likelihood(score, curvature, noise)
        if normal:
            xi = law_at_mean(likelihood, seen, unseen, prior).sample(rng, len(pooled))
            if scores is not None:
                some = spread_out(len(pooled), max(PLACES, 4 * d))
                moved = pooled[some] - xi[some] @ covariance
                bend = max(bend, prior.bend_at(moved, scores(moved)))
                normal = bend <= BENT
        if not normal:
            xi = None
            if explore is not None and (explored := explore(likelihood)) is not None:
                places = explored[np.arange(len(pooled)) % len(explored)]
                xi = likelihood.noise_at(rng, places)
    likely = chi2.isf(_ONE_IN, max(k, 1))
    if xi is None or xi.mean(axis=0) @ pinvh(noise) @ xi.mean(axis=0) > likely:
        method, places = "widened", None
        xi = NoiseLaw(np.zeros(d), noise).sample(rng, len(pooled))

    candidates = spread_out(len(pooled), CANDIDATES)
    picked, share = _resample(rng, centred[candidates], xi)
    weight_ess = share * min(ess, len(candidates))
    moved = pooled - xi @ covariance
    if method == "shift" and not shape.near_normal and weight_ess >= WEIGHT_ESS:
        method, moved = "resampled", pooled[candidates[picked]]
    elif places is not None and much:
        method, moved = "explored", places
    return NoiseAware(
        moved.reshape(draws.shape),
        method,
        shape,
        float(weight_ess),
        float(np.sqrt(np.mean(moved.var(axis=0) / pooled.var(axis=0)))),
        bend,
    )


def directions(noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orthonormal (d, k) and (d, d - k) directions with noise, which records see, and without."""
    values, vectors = np.linalg.eigh(noise)
    loud = values > max(NONE * values.max(), 0.0)
    return vectors[:, loud], vectors[:, ~loud]


def spread_out(n: int, most: int) -> np.ndarray:
    """Up to so many of n indices, evenly."""
    return np.linspace(0, n - 1, min(n, most)).round().astype(int)


def _possible(
    curvature: np.ndarray,
    seen: np.ndarray,
    axes: np.ndarray,
    pairs: np.ndarray | None,
) -> np.ndarray:
    """The part of a curvature that a likelihood can have; the rest of what draws show is chance."""
    if pairs is not None:
        back = np.linalg.inv(axes)
        curvature = axes.T @ np.where(pairs, back.T @ curvature @ back, 0.0) @ axes
    return np.asarray(seen @ positive_part(seen.T @ curvature @ seen) @ seen.T)


def _resample(
    rng: np.random.Generator, draws: np.ndarray, xi: np.ndarray
) -> tuple[np.ndarray, float]:
    """For every xi' the index of a draw, chosen with weights exp(-xi' . w). Also the share of the
    draws that the weights make use of, for nine in ten xi'.
    """
    uniform = rng.random(len(xi))
    chosen, effective = np.empty(len(xi), dtype=int), np.empty(len(xi))
    for start in range(0, len(xi), _CHUNK):
        part = slice(start, start + _CHUNK)
        log_weights = -xi[part] @ draws.T
        weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        effective[part] = 1.0 / np.square(weights).sum(axis=1)
        below = (np.cumsum(weights, axis=1) < uniform[part, None]).sum(axis=1)
        chosen[part] = np.minimum(below, len(draws) - 1)
    return chosen, float(np.quantile(effective, 0.1)) / len(draws)
