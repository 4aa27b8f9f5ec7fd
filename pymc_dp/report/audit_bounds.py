"""Confidence bounds on how far two worlds of scores lie apart, for `pymc_dp.audit`.

World 0 and world 1 are samples of scores, larger in world 1. `alpha` is one minus the confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtr

Scores = NDArray[np.float64]
ErrorBound = Callable[[Scores, Scores], Scores]


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
