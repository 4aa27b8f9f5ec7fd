"""Noise-aware draws: from the posterior given a noisy score to that given the noise's law.

An anchored chain targets pi(w | G) with G = S + xi the released score: the posterior tilted by
exp(xi . w), xi ~ N(0, V).  It takes the noise for data.  With xi' from the law of xi given what was
released, pi(w | G - xi') mixed over xi' takes it for noise.  All of it is post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.linalg import pinvh

from pymc_dp.matrices import positive_part

__all__ = [
    "NoiseAware",
    "NoiseLaw",
    "Normality",
    "gain",
    "likelihood_curvature",
    "noise_aware",
    "noise_law",
    "noisy_posterior",
    "normality",
]

#: Skewness and excess kurtosis that a posterior near normal may have.  Shifting all draws alike is
#: wrong by about skewness * t^2 / 2 posterior sds in the mean, where t sds is the size of a shift.
SKEWNESS, KURTOSIS = 0.25, 0.5
#: Monte-Carlo errors beyond which a moment counts: with 4, one in 16,000 by chance.
ERRORS = 4.0
#: Effective draws under the weights of one xi', for nine in ten of them, from which on resampling
#: is sound; below, single draws stand for whole regions.
WEIGHT_ESS = 50.0
#: Draws to choose from when resampling: more would cost time and add nothing.
CANDIDATES = 4000
_CHUNK = 256
#: Of the largest variance or precision, what is none but for rounding.
_NONE = 1e-12


@dataclass(frozen=True, eq=False)
class NoiseLaw:
    """N(mean, covariance), the law of the noise in a score given that score.

    Attributes
    ----------
    mean : (d,) ndarray
    covariance : (d, d) ndarray
    """

    mean: np.ndarray
    covariance: np.ndarray

    def sample(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """(n, d) draws; the covariance may be singular."""
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        return self.mean + rng.standard_normal((n, len(self.mean))) @ root.T


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    return (matrix + matrix.T) / 2.0


def likelihood_curvature(covariance: np.ndarray, prior_precision: np.ndarray) -> np.ndarray:
    """H = inverse posterior covariance less the prior precision, negative eigenvalues set to 0."""
    return positive_part(pinvh(covariance) - prior_precision)


def _terms(
    noise: np.ndarray, curvature: np.ndarray, prior_precision: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """U = (V + H)^-1 and C = (P0 + H U H)^-1, the noise-aware posterior covariance."""
    u = pinvh(_symmetric(noise + curvature))
    return u, pinvh(_symmetric(prior_precision + curvature @ u @ curvature))


def _mean(
    u: np.ndarray,
    c: np.ndarray,
    score: np.ndarray,
    curvature: np.ndarray,
    prior_score: np.ndarray,
) -> np.ndarray:
    """The noise-aware posterior mean C (H U G + P0 w_p)."""
    return np.asarray(c @ (curvature @ (u @ score) + prior_score))


def gain(noise: np.ndarray, curvature: np.ndarray, prior_precision: np.ndarray) -> np.ndarray:
    """K = V (V + H + H P0^-1 H)^-1: how much of a surprising score is noise.

    Parameters
    ----------
    noise, curvature, prior_precision : (d, d) ndarray
        V, H and P0, symmetric and positive semidefinite; each may be singular, unless V + H is.

    Returns
    -------
    (d, d) ndarray
        0 where the prior is flat: then nothing is surprising.

    Notes
    -----
    P0 is never inverted: with U = (V + H)^-1 the inverse is U - U H (P0 + H U H)^-1 H U (Woodbury).
    """
    u, c = _terms(noise, curvature, prior_precision)
    hu = curvature @ u
    return noise @ (u - hu.T @ c @ hu)


def noise_law(
    score: np.ndarray,
    noise: np.ndarray,
    curvature: np.ndarray,
    prior_precision: np.ndarray,
    prior_score: np.ndarray,
) -> NoiseLaw:
    """Law of xi given G, N(K (G - H w_p), V - K V), of a Gaussian likelihood and prior.

    Parameters
    ----------
    score : (d,) ndarray
        G, noisy score of the likelihood at w = 0.
    noise, curvature, prior_precision : (d, d) ndarray
        V, H, P0 as in :func:`gain`.
    prior_score : (d,) ndarray
        P0 w_p, score of the prior at w = 0; w_p itself need not exist.

    Returns
    -------
    NoiseLaw

    Notes
    -----
    Written with the noise-aware posterior N(mu, C), C = (P0 + H U H)^-1 and
    mu = C (H U G + P0 w_p): the mean is V U (G - H mu), the covariance is
    V - V U V + V U H C H U V, a sum of positive semidefinite terms.
    """
    u, c = _terms(noise, curvature, prior_precision)
    vu = noise @ u
    mu = _mean(u, c, score, curvature, prior_score)
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
    u, c = _terms(noise, curvature, prior_precision)
    return _mean(u, c, score, curvature, prior_score), c


def _law_at_mean(
    covariance: np.ndarray,
    noise: np.ndarray,
    prior_precision: np.ndarray,
    prior_score: np.ndarray,
) -> tuple[NoiseLaw, bool]:
    """Law of xi in the coordinates of draws with this covariance, and whether records see all.

    Directions without noise are those that no record sees.  The likelihood has neither score nor
    curvature there, exactly, and whatever draws show of them instead (the prior of a scale is not
    normal) would be divided by next to nothing: they are integrated out first.
    """
    values, vectors = np.linalg.eigh(noise)
    seen = values > _NONE * values.max()
    if seen.all():
        curvature = likelihood_curvature(covariance, prior_precision)
        return noise_law(-prior_score, noise, curvature, prior_precision, prior_score), True
    into, unseen = vectors[:, seen], vectors[:, ~seen]
    across = into.T @ prior_precision @ unseen
    rounding = _NONE * np.trace(prior_precision)
    follow = across @ pinvh(_symmetric(unseen.T @ prior_precision @ unseen), atol=rounding)
    law, _ = _law_at_mean(
        into.T @ covariance @ into,
        np.diag(values[seen]),
        _symmetric(into.T @ prior_precision @ into - follow @ across.T),
        into.T @ prior_score - follow @ (unseen.T @ prior_score),
    )
    return NoiseLaw(into @ law.mean, into @ law.covariance @ into.T), False


@dataclass(frozen=True, eq=False)
class Normality:
    """How far draws are from normal, along standardised axes and their principal directions.

    Attributes
    ----------
    skewness, excess_kurtosis : (2d,) ndarray
    skewness_error, kurtosis_error : float
        Monte-Carlo standard errors of these for normal draws.
    near_normal : bool
        None of them is both large enough to matter and significant.
    """

    skewness: np.ndarray
    excess_kurtosis: np.ndarray
    skewness_error: float
    kurtosis_error: float
    near_normal: bool


def normality(draws: np.ndarray, ess: float) -> Normality:
    """Compare skewness and kurtosis of draws with those of a normal law.

    Parameters
    ----------
    draws : (n, d) ndarray
        Pooled draws, in coordinates whose axes have a meaning: a skewed parameter hides in a
        rotation.
    ess : float
        Effective number of these draws.

    Returns
    -------
    Normality
    """
    standardised = (draws - draws.mean(axis=0)) / draws.std(axis=0)
    _, vectors = np.linalg.eigh(standardised.T @ standardised)
    projected = standardised @ vectors
    projected = np.hstack([standardised, projected / projected.std(axis=0)])
    skewness = (projected**3).mean(axis=0)
    kurtosis = (projected**4).mean(axis=0) - 3.0
    skewness_error, kurtosis_error = np.sqrt(6.0 / ess), np.sqrt(24.0 / ess)
    near = np.all(np.abs(skewness) <= np.maximum(SKEWNESS, ERRORS * skewness_error)) and np.all(
        np.abs(kurtosis) <= np.maximum(KURTOSIS, ERRORS * kurtosis_error)
    )
    return Normality(skewness, kurtosis, float(skewness_error), float(kurtosis_error), bool(near))


@dataclass(frozen=True, eq=False)
class NoiseAware:
    """Noise-aware draws, and how they were made.

    Attributes
    ----------
    draws : (chains, draws, d) ndarray
    method : {"shift", "resampled"}
    normality : Normality
        Of the raw draws.
    weight_ess : float
        Effective number of raw draws under the weights of one xi', for nine in ten of them.
    widening : float
        Noise-aware over raw posterior standard deviation, a root mean square over directions.
    """

    draws: np.ndarray
    method: Literal["shift", "resampled"]
    normality: Normality
    weight_ess: float
    widening: float


def noise_aware(
    rng: np.random.Generator,
    draws: np.ndarray,
    noise: np.ndarray,
    prior_precision: np.ndarray,
    prior_score: np.ndarray,
    *,
    ess: float,
    axes: np.ndarray | None = None,
    normal: bool = True,
) -> NoiseAware:
    """Turn draws given a noisy score into draws given the law of its noise.

    Parameters
    ----------
    rng : numpy.random.Generator
        Public randomness.
    draws : (chains, draws, d) ndarray
        Raw draws w.  More than d of them, and not all in a plane.
    noise : (d, d) ndarray
        V, covariance of the noise in the released score, in the coordinates w.  Singular where
        parameters reach no record.
    prior_precision : (d, d) ndarray
        P0, minus the Hessian of the public log-density at the mean of the draws, positive
        semidefinite.
    prior_score : (d,) ndarray
        Gradient of the public log-density at the mean of the draws.
    ess : float
        Effective number of draws, over all chains.
    axes : (d, d) ndarray, optional
        The A of theta = m + A w with theta the parameters of the model, by which normality is
        judged.  Default: w itself.
    normal : bool, default True
        Whether the prior is normal over the draws.

    Returns
    -------
    NoiseAware

    Notes
    -----
    With Sigma the covariance of the raw draws and xi' from :func:`noise_law`:

    - shift: w - Sigma xi', which keeps chains and order.  Exact for a normal posterior.
    - resampled: a raw draw, chosen with weights exp(-xi' . w).  These turn pi(w | G) into
      pi(w | G - xi') whatever its shape, without a look at the data: it is what a chain of its own
      for every xi' would give.  Taken where the posterior is not near normal and the weights are
      spread over enough draws.  The order of the draws means nothing then.

    The score G itself is not needed: at the mean of the raw draws the score of their target
    vanishes, so that the noisy score of the likelihood there is minus `prior_score`.  This is exact
    for a Gaussian posterior, and for others does not depend on how far from it G was released.

    Parameters that no record sees (mean and scale of a centred hierarchy) have no noise: the law of
    xi' is that of the others with the Gaussian prior integrated over them, and they follow a shift
    by their covariance with the others.  If the prior is not normal over the draws (a scale that is
    little known), that is no guide to the mean of xi', which is taken for 0: draws are widened by a
    shift, and not moved.

    *Weaknesses.*  The law of xi' takes likelihood and prior for Gaussian near the posterior mean.
    """
    d = draws.shape[-1]
    pooled = draws.reshape(-1, d)
    centred = pooled - pooled.mean(axis=0)
    covariance = centred.T @ centred / (len(pooled) - 1)
    law, sees_all = _law_at_mean(covariance, noise, prior_precision, prior_score)
    known = normal or sees_all
    if not known:
        law = NoiseLaw(np.zeros(d), law.covariance)
    xi = law.sample(rng, len(pooled))

    shape = normality(centred if axes is None else centred @ axes.T, ess)
    candidates = np.linspace(0, len(pooled) - 1, min(len(pooled), CANDIDATES)).round().astype(int)
    picked, share = _resample(rng, centred[candidates], xi)
    weight_ess = share * min(ess, len(candidates))
    resampled = known and not shape.near_normal and weight_ess >= WEIGHT_ESS
    widening = np.sqrt(1.0 + np.trace(covariance @ law.covariance) / d)
    moved = pooled[candidates[picked]] if resampled else pooled - xi @ covariance
    return NoiseAware(
        moved.reshape(draws.shape),
        "resampled" if resampled else "shift",
        shape,
        float(weight_ess),
        float(widening),
    )


def _resample(
    rng: np.random.Generator, draws: np.ndarray, xi: np.ndarray
) -> tuple[np.ndarray, float]:
    """For every xi' the index of a draw, chosen with weights exp(-xi' . w).

    Also the share of the draws that the weights make use of, for nine in ten xi'.
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
