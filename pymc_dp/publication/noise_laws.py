"""Normal laws of the noise in a released score, and of the parameters given that score.

G = S + xi is the score, xi ~ N(0, V).  The likelihood has curvature H, the prior precision P0; both
scores are taken at w = 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import pinvh

from pymc_dp.base.matrices import positive_part, root

#: Of the largest variance or precision, what is none but for rounding.
NONE = 1e-12


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


def noise_law(
    score: np.ndarray,
    noise: np.ndarray,
    curvature: np.ndarray,
    prior_precision: np.ndarray,
    prior_score: np.ndarray,
) -> NoiseLaw:
    """Law of xi given G, N(K (G - H w_p), V - K V), of a Gaussian likelihood and prior.

    The gain K = V (V + H + H P0^-1 H)^-1 is how much of a surprising score is noise: 0 where the
    prior is flat, as nothing is surprising then.

    Parameters
    ----------
    score : (d,) ndarray
        G, noisy score of the likelihood at w = 0.
    noise, curvature, prior_precision : (d, d) ndarray
        V, H and P0, symmetric and positive semidefinite; each may be singular, unless V + H is.
    prior_score : (d,) ndarray
        P0 w_p, score of the prior at w = 0; w_p itself need not exist.

    Notes
    -----
    P0 is never inverted.  Written with the noise-aware posterior N(mu, C), C = (P0 + H U H)^-1 and
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


@dataclass(frozen=True, eq=False)
class LinearPrior:
    """The score of a prior over the draws of a posterior, as a linear function of them.

    `precision`, (d, d), is P0: the best linear fit is score - P0 (w - centre). `score` and
    `centre`, (d,), are means over the draws that were fitted; centre None stands for that of the
    draws it is used for. `bend` is what the fit leaves, a root mean square in the direction where
    it is largest, in units of the posterior's own score there: one over its standard deviation.  It
    is 0 for a normal prior.
    """

    precision: np.ndarray
    score: np.ndarray
    bend: float = 0.0
    centre: np.ndarray | None = None

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
    """Fit a linear function to the (m, d) scores of a prior at (m, d) draws of a posterior.

    For a Gaussian likelihood of curvature H, whatever the prior, integration by parts gives
    H = Sigma^-1 - P0 with this P0, and a score of the likelihood at the mean that is minus `score`.
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
    """A likelihood that is normal but for the noise in its score: N(score; H w, H + V).

    The noisy score, (d,), is that at w = 0. Curvature and noise, (d, d), are H and V.
    """

    score: np.ndarray
    curvature: np.ndarray
    noise: np.ndarray

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
    """Law of xi under a normal prior; see `pymc_dp.publication.noise_aware`.

    Directions without noise are those that no record sees.  The likelihood has neither score nor
    curvature there, exactly, and whatever draws show of them instead would be divided by next to
    nothing: they are integrated out first.
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
