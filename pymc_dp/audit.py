"""Empirical lower bounds on epsilon from repeated runs in two neighbouring worlds.

World 0 and world 1 differ in one record, the canary. Whoever runs the audit builds both worlds,
runs the mechanism in each many times, reduces every released transcript to a score (the
log-likelihood ratio of the worlds), and asks how well the scores tell the worlds apart. If that is
better than the claimed (epsilon, delta) allows, the claim is false. Worlds for a clipped sum: all
other records at -C, the canary at -C or at +C (replace_one), which makes the transcript exactly
N(0, 1) against N(mu, 1) along the score.

A lower bound below the claim is no proof of privacy: another canary, another score or more runs
might separate the worlds better, and the bound can only see what reached the transcript given to
it (not timing, not logs). A bound above the claim refutes it at the stated confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from pymc_dp.base.checks import check_delta, check_number
from pymc_dp.privacy.accounting import epsilon_from_mu, mu_from_budget
from pymc_dp.report import audit_bounds as bounds
from pymc_dp.report.audit_bounds import Scores

__all__ = ["AuditResult", "audit_scores", "gaussian_score", "gaussian_separation", "runs_needed"]

Method = Literal["gaussian", "student", "clopper_pearson_gdp", "clopper_pearson"]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """A lower bound on the privacy loss, and what it rests on.

    Attributes
    ----------
    epsilon_lower : float
        Lower confidence bound of epsilon at ``delta``.
    mu_lower : float or None
        Lower confidence bound of the Gaussian-DP parameter; None for ``"clopper_pearson"``, which
        does not assume one.
    delta : float
    confidence : float
        The bound is above the truth with probability at most ``1 - confidence``.
    runs : tuple of int
        Runs of world 0 and of world 1 on which the bound rests.
    method : str
        See `audit_scores`.
    """

    epsilon_lower: float
    mu_lower: float | None
    delta: float
    confidence: float
    runs: tuple[int, int]
    method: Method

    def refutes(self, epsilon: float) -> bool:
        """Whether a claim of (epsilon, delta) is refuted at this confidence.

        Parameters
        ----------
        epsilon : float

        Returns
        -------
        bool
        """
        return self.epsilon_lower > epsilon


def gaussian_separation(center0: ArrayLike, center1: ArrayLike, sigma: ArrayLike) -> float:
    """Gaussian-DP parameter of releasing ``center + N(0, sigma^2)``, if it tells two worlds apart.

    Parameters
    ----------
    center0, center1 : array_like
        Noiseless answers in the two worlds, all releases of one run together.
    sigma : array_like
        Standard deviations of the noise, broadcast against the centres.

    Returns
    -------
    float
        ``norm((center1 - center0) / sigma)``.
    """
    return float(np.sqrt(np.sum(_shift(center0, center1, sigma) ** 2)))


def _shift(center0: ArrayLike, center1: ArrayLike, sigma: ArrayLike) -> Scores:
    scale = np.asarray(sigma, dtype=np.float64)
    if not np.all(scale > 0):
        raise ValueError("sigma must be positive: without noise there is nothing to audit")
    return _difference(center1, center0) / scale


def _difference(left: ArrayLike, right: ArrayLike) -> Scores:
    # Integer answers are subtracted as integers: they can exceed 2^53, their differences do not.
    return np.subtract(np.asarray(left), np.asarray(right)).astype(np.float64)


def gaussian_score(
    transcript: ArrayLike, center0: ArrayLike, center1: ArrayLike, sigma: ArrayLike
) -> Scores:
    """Log-likelihood ratio of each run, normalised to N(0, 1) in world 0 and N(mu, 1) in world 1.

    Parameters
    ----------
    transcript : array_like, shape (runs, ...)
        Released values; the axes after the first hold all releases of one run (integers welcome).
    center0, center1 : array_like
        Noiseless answers in world 0 and world 1, of one run or, where the queries were adaptive,
        of each run: broadcast against ``transcript``.
    sigma : array_like
        Standard deviations the noise is claimed to have, broadcast likewise. The noise is taken to
        be independent over releases.

    Returns
    -------
    ndarray of float, shape (runs,)
        ``sum(w (transcript - center0) / sigma) / norm(w)`` with ``w = (center1 - center0) / sigma``
        and ``mu = norm(w)`` as given by `gaussian_separation`.

    Raises
    ------
    ValueError
        If the worlds have equal answers, or if ``norm(w)`` is not the same in all runs (then the
        scores of world 1 have no common distribution).

    Notes
    -----
    Any function of the transcript gives a valid audit; this one is the most powerful if the
    mechanism is what it claims to be (Neyman & Pearson). Queries may depend on earlier releases:
    with ``norm(w)`` fixed, the score is a Brownian motion stopped at time mu^2, over mu.
    """
    released = np.asarray(transcript)
    if released.ndim == 0:
        raise ValueError("transcript must have the runs along its first axis, got a scalar")
    runs = released.shape[0]
    shift = np.broadcast_to(_shift(center0, center1, sigma), released.shape).reshape(runs, -1)
    residual = (_difference(released, center0) / np.asarray(sigma, np.float64)).reshape(runs, -1)
    mu = np.linalg.norm(shift, axis=1)
    if not np.all(mu > 0):
        raise ValueError("center0 and center1 must differ: these worlds cannot be told apart")
    if np.ptp(mu) > 1e-9 * mu[0]:
        raise ValueError(
            "the distance between center0 and center1 must be the same in all runs, in units of "
            "sigma; choose records at the clip bound so that it does not depend on the releases"
        )
    return np.einsum("ij,ij->i", residual, shift) / mu


def audit_scores(
    scores0: ArrayLike,
    scores1: ArrayLike,
    delta: float,
    *,
    confidence: float = 0.95,
    method: Method = "gaussian",
    threshold: float | None = None,
) -> AuditResult:
    """Lower confidence bound on epsilon from scores of independent runs in two worlds.

    Parameters
    ----------
    scores0, scores1 : array_like, shapes (runs0,) and (runs1,)
        One score per independent run; larger ones speak for world 1.
    delta : float
        The delta at which epsilon is bounded.
    confidence : float, default 0.95
        One-sided, between 0.5 and 1. For a test that must not raise false alarms: ``1 - 1e-6``.
    method : str, default "gaussian"
        What is assumed of the scores, from most to least.

        ``"gaussian"``
            Normal with unit variance in both worlds: z-test on the means. The most powerful; it
            takes the noise scale for granted and so cannot notice noise that is too small.
        ``"student"``
            Normal with equal, unknown variance: inverts the noncentral t distribution. Notices
            noise that is too small or cancels in part.
        ``"clopper_pearson_gdp"``
            Nothing about the scores; bounds both error rates of a threshold and the mu-GDP curve
            through them (Nasr et al. 2023, *Tight auditing of differentially private machine
            learning*). Refutes any false claim of mu-GDP; as a bound on epsilon it assumes that
            the trade-off curve of the mechanism is that of a Gaussian.
        ``"clopper_pearson"``
            Nothing at all: epsilon from the two error rates and delta (Kairouz, Oh & Viswanath
            2015). Weak: with n runs it never exceeds about log(n).
    threshold : float, optional
        Clopper-Pearson methods only: a score above it votes for world 1. It must be chosen without
        looking at these scores; ``mu / 2`` suits ``"clopper_pearson_gdp"``. Default: the first half
        of the runs of each world chooses, and only the second half is counted.

    Returns
    -------
    AuditResult

    Raises
    ------
    ValueError
        If an argument is out of range, scores are not finite or too few, or for ``"student"`` all
        scores of both worlds are constant (then they are not normal).

    Notes
    -----
    Guarantee
        Where the assumptions of the method hold, ``epsilon_lower`` exceeds the true epsilon with
        probability at most ``1 - confidence``, for one method fixed in advance. Taking the largest
        of several methods multiplies that probability by their number.

    Assumptions
        Runs are independent: own noise, own chains. Nothing that was tuned on these runs enters
        the scores.

    Weaknesses
        See the module: a small bound does not prove privacy.
    """
    delta = check_delta(delta)
    confidence = check_number("confidence", confidence)
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence must lie between 0.5 and 1, not {confidence}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, not {method!r}")
    world0, world1 = _check_scores("scores0", scores0), _check_scores("scores1", scores1)
    alpha = 1 - confidence
    if method in ("gaussian", "student"):
        if threshold is not None:
            raise ValueError(f"method {method!r} uses no threshold; leave it out")
        estimate = bounds.z_bound if method == "gaussian" else bounds.t_bound
        lower = estimate(world0, world1, alpha)
    else:
        bound = bounds.gdp_bound if method == "clopper_pearson_gdp" else bounds.classic_bound(delta)
        if threshold is None:
            half0, half1 = len(world0) // 2, len(world1) // 2
            threshold = bounds.choose_threshold(world0[:half0], world1[:half1], alpha, bound)
            world0, world1 = world0[half0:], world1[half1:]
        cut = np.array([check_number("threshold", threshold)])
        lower = float(bound(*bounds.error_bounds(world0, world1, cut, alpha))[0])
    lower = max(0.0, lower)
    runs = len(world0), len(world1)
    if method == "clopper_pearson":
        return AuditResult(lower, None, delta, confidence, runs, method)
    return AuditResult(epsilon_from_mu(lower, delta), lower, delta, confidence, runs, method)


def _check_scores(name: str, scores: ArrayLike) -> Scores:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or len(values) < 4:
        raise ValueError(f"{name} must be a vector of at least 4 scores, one per run")
    if not np.all(np.isfinite(values)):
        raise ValueError(f"{name} must be finite")
    return values


def runs_needed(
    epsilon: float,
    delta: float,
    *,
    fraction: float = 0.9,
    power: float = 0.9,
    confidence: float = 0.95,
    method: Method = "gaussian",
) -> int:
    """Runs per world after which a tight mechanism is shown to spend most of its epsilon.

    Parameters
    ----------
    epsilon, delta : float
        What the mechanism claims and, being Gaussian with the worst canary, attains.
    fraction : float, default 0.9
        The lower bound is to reach ``fraction * epsilon``.
    power : float, default 0.9
        With this probability.
    confidence : float, default 0.95
        Of the bound, as in `audit_scores`.
    method : str, default "gaussian"
        ``"gaussian"``, ``"student"`` or ``"clopper_pearson_gdp"``, the last with ``threshold=mu/2``
        (twice as many runs without). ``"clopper_pearson"`` would need on the order of 1/delta.

    Returns
    -------
    int
        By the normal approximation of the estimated mu.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    for name, value in (("fraction", fraction), ("power", power), ("confidence", confidence)):
        if not 0 < check_number(name, value) < 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {value}")
    mu = mu_from_budget(epsilon, delta)
    gap = mu - mu_from_budget(fraction * epsilon, delta)
    z_power = stats.norm.ppf(power)
    if method == "clopper_pearson_gdp":
        # Each rate p = Phi(-mu/2) moves mu by 1/phi(mu/2); its bound has half of 1 - confidence.
        sd = math.sqrt(stats.norm.cdf(-mu / 2) * stats.norm.cdf(mu / 2)) / stats.norm.pdf(mu / 2)
        width = sd * (2 * stats.norm.isf((1 - confidence) / 2) + math.sqrt(2) * z_power)
    elif method in ("gaussian", "student"):
        # Variance of the difference of means, plus that of the estimated scale.
        variance = 2.0 if method == "gaussian" else 2 + mu * mu / 4
        width = math.sqrt(variance) * (stats.norm.isf(1 - confidence) + z_power)
    else:
        raise ValueError(
            "method must be 'gaussian', 'student' or 'clopper_pearson_gdp', for which the bound "
            f"approaches epsilon, not {method!r}"
        )
    return max(4, math.ceil((width / gap) ** 2))
