"""Linear predictors with coefficients in intervals: their range, and how fast they can change."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from pymc_dp.rows.intervals import Interval, product

#: Columns whose corners (2 to this power) are looked at one by one, and numbers held for it.
_CORNERS, _NUMBERS = 14, 2**24


@dataclass(frozen=True, eq=False)
class Terms:
    """A part of a predictor u: sum of coefficients, within intervals, times values of parameters.

    Shapes: coefficients (m,), values (m,) or (groups * m,), rows (m, d) or (groups * m, d).  Values
    are at z = 0; in a group effect they are those of all groups, one of which the record chooses.
    `rows` are derivatives of the values by z.
    """

    coefficients: Interval
    values: np.ndarray
    rows: np.ndarray

    @classmethod
    def nothing(cls, d: int) -> Terms:
        """The empty sum, in d coordinates."""
        return cls((np.zeros(0), np.zeros(0)), np.zeros(0), np.zeros((0, d)))

    def and_also(self, other: Terms) -> Terms:
        """Both, where both are the same for all groups."""
        ends = zip(self.coefficients, other.coefficients, strict=True)
        lower, upper = (np.concatenate(pair) for pair in ends)
        return Terms(
            (lower, upper),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.rows, other.rows]),
        )

    @property
    def largest(self) -> np.ndarray:
        """(m,) sizes of the coefficients, at most."""
        return np.maximum(np.abs(self.coefficients[0]), np.abs(self.coefficients[1]))

    def value(self) -> tuple[float, float]:
        """Least and greatest value."""
        m = len(self.coefficients[0])
        if not m:
            return 0.0, 0.0
        values = self.values.reshape(-1, m)
        lower, upper = product(self.coefficients, (values, values))
        return float(lower.sum(axis=1).min()), float(upper.sum(axis=1).max())

    def length(self) -> float:
        """Largest norm of the derivative: at the corners if there are few, else a bound."""
        lower, upper = self.coefficients
        m, d = len(lower), self.rows.shape[1]
        if not m:
            return 0.0
        rows = self.rows.reshape(-1, m, d)
        if m == 1:
            return float(self.largest[0] * np.linalg.norm(self.rows, axis=1).max())
        centre = np.einsum("m,gmd->gd", (lower + upper) / 2.0, rows)
        radius = (upper - lower) / 2.0
        free = np.flatnonzero(radius)
        if len(free) <= _CORNERS and len(rows) * d * 2 ** len(free) <= _NUMBERS:
            signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(free))))
            corners = centre[:, None] + np.einsum(
                "sm,gmd->gsd", signs * radius[free], rows[:, free]
            )
            return float(np.linalg.norm(corners, axis=-1).max())
        arms = radius[:, None] * rows
        by_entry = np.linalg.norm(np.abs(centre) + np.abs(arms).sum(axis=1), axis=-1)
        by_arm = np.linalg.norm(centre, axis=-1) + np.linalg.norm(arms, axis=-1).sum(axis=-1)
        spectral = np.linalg.norm(centre, axis=-1) + math.sqrt(m) * np.linalg.norm(
            arms, 2, axis=(-2, -1)
        )
        return float(np.minimum(np.minimum(by_entry, by_arm), spectral).max())

    def overlap(self, other: Terms) -> float:
        """Largest size of the inner product of the derivatives of two parts."""
        m, k = len(self.largest), len(other.largest)
        gram = np.abs(self.rows @ other.rows.T).reshape(-1, m, other.rows.shape[0] // k, k)
        return float(np.einsum("m,gmhk,k->gh", self.largest, gram, other.largest).max())


def longest(fixed: Terms, grouped: list[Terms]) -> float:
    """Largest norm of the derivative of a sum of parts, at most.

    |a + b|^2 = |a|^2 + |b|^2 + 2 a . b, with each of the three at its largest.
    """
    parts = [terms for terms in (fixed, *grouped) if terms.rows.shape[0]]
    square = sum(terms.length() ** 2 for terms in parts)
    square += 2.0 * sum(a.overlap(b) for a, b in itertools.combinations(parts, 2))
    return math.sqrt(square)
