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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtr

from pymc_dp.base.checks import check_delta, check_number
from pymc_dp.privacy.accounting import epsilon_from_mu, mu_from_budget

__all__ = ["AuditResult", "audit_scores", "gaussian_score", "gaussian_separation", "runs_needed"]

Scores = NDArray[np.float64]
#: Of the rates of false positives and false negatives.
ErrorBound = Callable[[Scores, Scores], Scores]
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
    return float(np.linalg.norm(_shift(center0, center1, sigma)))


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
        estimate = z_bound if method == "gaussian" else t_bound
        lower = estimate(world0, world1, alpha)
    else:
        bound = gdp_bound if method == "clopper_pearson_gdp" else classic_bound(delta)
        if threshold is None:
            half0, half1 = len(world0) // 2, len(world1) // 2
            threshold = choose_threshold(world0[:half0], world1[:half1], alpha, bound)
            world0, world1 = world0[half0:], world1[half1:]
        cut = np.array([check_number("threshold", threshold)])
        lower = float(bound(*error_bounds(world0, world1, cut, alpha))[0])
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


# -- how far two worlds of scores lie apart, at least, with confidence 1 - alpha ------------------


def z_bound(scores0: Scores, scores1: Scores, alpha: float) -> float:
    """Difference of the means, of normal scores with variance 1."""
    error = math.sqrt(1 / len(scores0) + 1 / len(scores1))
    return float(scores1.mean() - scores0.mean() - stats.norm.isf(alpha) * error)


def t_bound(scores0: Scores, scores1: Scores, alpha: float) -> float:
    """Difference of the means over the standard deviation, of normal scores with equal variance.

    The bound is the mu under which a t statistic as large as the one observed has probability
    alpha. (SciPy's noncentral t does not converge for a thousand runs and mu = 4.)
    """
    degrees = len(scores0) + len(scores1) - 2
    squares = scores0.var() * len(scores0) + scores1.var() * len(scores1)
    if squares == 0:
        raise ValueError(
            "the scores are constant in both worlds, so they are not normal and the release may "
            "have no noise at all; use method='clopper_pearson'"
        )
    error = math.sqrt(1 / len(scores0) + 1 / len(scores1))
    # The bound grows with the observed effect. Cutting it at 100 sd keeps the bound valid and the
    # integrand below wide enough for the grid.
    effect = min(100.0, float(scores1.mean() - scores0.mean()) / math.sqrt(squares / degrees))
    # P(T >= t) = E Phi(m - t S) for noncentrality m, with degrees * S^2 chi-square distributed: by
    # the trapezoidal rule, the tails left out counted as if they were certain.
    tail = 1e-6 * alpha
    lowest = math.sqrt(stats.chi2.ppf(tail, degrees) / degrees)
    highest = math.sqrt(stats.chi2.isf(tail, degrees) / degrees)
    s = np.linspace(lowest, highest, 4001)
    weights = 2 * degrees * s * stats.chi2.pdf(degrees * s * s, degrees) * (s[1] - s[0])

    def excess(m: float) -> float:
        return float(weights @ ndtr(m - effect / error * s)) + 2 * tail - alpha

    if excess(0.0) >= 0:
        return 0.0
    # The median of a noncentral t is above its noncentrality, so the solution is below t.
    return float(brentq(excess, 0.0, effect / error, xtol=1e-10)) * error


def error_bounds(
    scores0: Scores, scores1: Scores, thresholds: Scores, alpha: float
) -> tuple[Scores, Scores]:
    """Clopper-Pearson upper bounds of both error rates, jointly right with 1 - alpha."""

    def upper(errors: NDArray[np.intp], runs: int) -> Scores:
        bound = stats.beta.isf(alpha / 2, errors + 1, np.maximum(runs - errors, 1))
        return np.where(errors == runs, 1.0, bound)

    false_positives = len(scores0) - np.searchsorted(np.sort(scores0), thresholds, side="right")
    false_negatives = np.searchsorted(np.sort(scores1), thresholds, side="right")
    return upper(false_positives, len(scores0)), upper(false_negatives, len(scores1))


def gdp_bound(false_positive: Scores, false_negative: Scores) -> Scores:
    """Smallest mu with such errors: under mu-GDP, Phi^-1(1 - FPR) - Phi^-1(FNR) <= mu."""
    return stats.norm.isf(false_positive) - stats.norm.ppf(false_negative)


def classic_bound(delta: float) -> ErrorBound:
    """Smallest epsilon with such errors at ``delta``, as a function of the two rates."""

    def bound(false_positive: Scores, false_negative: Scores) -> Scores:
        # (epsilon, delta)-DP: 1 - FNR <= e^epsilon FPR + delta, and the same for the complement.
        smallest = np.finfo(float).tiny
        one = np.maximum(1 - false_negative - delta, smallest) / false_positive
        other = np.maximum(1 - false_positive - delta, smallest) / false_negative
        return np.log(np.maximum(one, other))

    return bound


def choose_threshold(scores0: Scores, scores1: Scores, alpha: float, bound: ErrorBound) -> float:
    """The observed score at which the bound is largest; to be used on other scores."""
    candidates = np.unique(np.concatenate([scores0, scores1]))
    return float(candidates[np.argmax(bound(*error_bounds(scores0, scores1, candidates, alpha)))])
