"""What is asked of records, as public data: what each unit adds to an answer.

:mod:`pymc_dp.rows.contributions` has the quantities of one-off releases; here are those of chains.
All positions are in the coordinates z of the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_dp.privacy.accounting import BatchEvent


@dataclass(frozen=True, eq=False)
class ScoreAt:
    """The score vector at z."""

    z: np.ndarray


@dataclass(frozen=True, eq=False)
class LogRatio:
    """l_i(end) - l_i(start)."""

    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, eq=False)
class Kick:
    """The score vector at a midpoint of a path, which has come to the point `at`.

    Paths of a chain have numbers.  From one kick to the next question a unit gathers its work,
    clip(g_i(midpoint)) . (where the path has come then - `at`), which is not released.
    """

    path: int
    at: np.ndarray
    midpoint: np.ndarray


@dataclass(frozen=True, eq=False)
class EnergyError:
    """e_i = l_i(end) - l_i(start) - the work of the path, which had so many kicks."""

    path: int
    kicks: int
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, eq=False)
class OfBatch:
    """What the units of a secret batch add, which is drawn for the answer; others add nothing."""

    of: Any
    event: BatchEvent


@dataclass(frozen=True, eq=False)
class TemperedRatio:
    """T r / q - T^2 (1 - q) r^2 / (2 q^2), with r the log-likelihood ratio clipped to [-c, c].

    `linear` and `square` are T / q and T^2 (1 - q) / (2 q^2), of the power T and the sampling
    probability q.
    """

    start: np.ndarray
    end: np.ndarray
    c: float
    linear: float
    square: float


@dataclass(frozen=True, eq=False)
class RatioMoments:
    """(T / q) (r, w r^2 / c), with r the log-likelihood ratio clipped to [-c, c].

    `linear` and `weight` are T / q and w.
    """

    start: np.ndarray
    end: np.ndarray
    c: float
    linear: float
    weight: float
