"""Dual averaging of a step size (Hoffman & Gelman 2014, Section 3.2)."""

from __future__ import annotations

import math

#: gamma, t0 and kappa of the paper.
_SHRINKAGE, _DELAY, _DECAY = 0.05, 10.0, 0.75


class DualAveraging:
    """Finds the step size at which the mean acceptance probability is `target`.

    Step sizes stay below `longest`.
    """

    def __init__(self, start: float, target: float, longest: float) -> None:
        self.target, self.longest = target, longest
        self._mu = math.log(2.0 * start)
        self._log, self._log_mean, self._error, self._count = math.log(start), 0.0, 0.0, 0

    @property
    def current(self) -> float:
        """Step size to try next."""
        return min(math.exp(self._log), self.longest)

    @property
    def mean(self) -> float:
        """Step size to keep."""
        return min(math.exp(self._log_mean), self.longest) if self._count else self.current

    def update(self, accept: float) -> None:
        """Learn from the acceptance probability of one iteration."""
        self._count += 1
        share = 1.0 / (self._count + _DELAY)
        self._error += share * (self.target - accept - self._error)
        self._log = self._mu - math.sqrt(self._count) / _SHRINKAGE * self._error
        # a long run of one outcome must not carry it out of reach
        self._log = min(max(self._log, math.log(self.longest) - 12.0), math.log(self.longest))
        weight = self._count**-_DECAY
        self._log_mean += weight * (self._log - self._log_mean)
