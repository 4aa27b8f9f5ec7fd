"""What is asked of records, as public data, and of whom.

A question says what each unit adds to an answer. Those of chains are here, with all positions in
the chain's coordinates z; :mod:`pymc_dp.rows.contributions` has those of one-off releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pymc_dp.privacy.accounting import BatchEvent
from pymc_dp.rows.linear import LinearRows
from pymc_dp.rows.loops import SparseBlock


class Rows(Protocol):
    """Records of `n_units` units, whatever the model; :mod:`pymc_dp.rows` makes them.

    They are trusted for one thing: what they say of a unit is a function of its own rows and of
    public numbers, computed by the same operations wherever these rows stand. A rehearsal tries it
    (:func:`pymc_dp.privacy.holder.rehearse`).
    """

    n_units: int

    @property
    def elsewhere(self) -> Any:
        """Who has the records, if this process does not: its ``holder`` answers for them."""

    @property
    def d(self) -> int:
        """Entries of a score vector."""

    @property
    def one_row_per_unit(self) -> bool:
        """Whether rows are units, so that vectors of some are made without those of the others."""

    def synthetic(self, value: int | None = 0, first: int = 0, last: int | None = None) -> Rows:
        """The same functions on made-up data: all of one value, or (None) of different ones.

        Of the units `first` to `last`, with nothing that was computed from others.
        """

    def part(self, units: Any) -> Rows:
        """The records of some units alone."""

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) log-likelihood of every unit."""

    def scores(self, z: np.ndarray) -> Any:
        """Scores of all units, in whatever form the other methods understand."""

    def sparse_vectors(self, scores: Any, units: slice) -> Iterator[tuple[slice, SparseBlock]]:
        """Score vectors of some units, block by block."""

    def work(
        self, scores: Any, start: np.ndarray, end: np.ndarray, scale: float | np.ndarray
    ) -> np.ndarray:
        """(n_units,) scale_i g_i . (end - start)."""

    def linear(self) -> LinearRows | None:
        """The rows as multiples of vectors that do not depend on z; None if they are not. `scores`
        are then the (n_units,) factors of these vectors, their slopes.
        """

    def forget(self) -> None:
        """Keep nothing of an earlier chain."""


class Contribution(Protocol):
    """What each unit adds to a one-off release: (size,) numbers."""

    @property
    def size(self) -> int:
        """Entries per unit."""

    @property
    def nonnegative(self) -> bool:
        """Whether no entry is negative."""

    def blocks(self, rows: Any) -> Iterator[tuple[slice, np.ndarray]]:
        """Units, and (size, units) values of these, which may be overwritten."""


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
    """The score vector at a midpoint of path number `path`, which has come to the point `at`. From
    one kick to the next question a unit gathers its work, clip(g_i(midpoint)) . (where the path has
    come then - `at`), which is not released.
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
    """linear r - square r^2, with r the log-likelihood ratio clipped to [-c, c]. `linear` is T / q
    and `square` T^2 (1 - q) / (2 q^2): power T, sampling probability q.
    """

    start: np.ndarray
    end: np.ndarray
    c: float
    linear: float
    square: float


@dataclass(frozen=True, eq=False)
class RatioMoments:
    """linear (r, weight r^2 / c), with r the log-likelihood ratio clipped to [-c, c], linear = T /
    q.
    """

    start: np.ndarray
    end: np.ndarray
    c: float
    linear: float
    weight: float
