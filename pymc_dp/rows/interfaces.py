"""Coordinates, and what samplers and releases ask of records in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pymc_dp.rows.linear import LinearRows
from pymc_dp.rows.sparse import SparseBlock


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Affine coordinates, theta = location + scaling @ z; shapes (d,) and (d, d), invertible."""

    location: np.ndarray
    scaling: np.ndarray

    def theta(self, z: np.ndarray) -> np.ndarray:
        """(d,) unconstrained parameters at z."""
        return self.location + self.scaling @ z

    def z(self, theta: np.ndarray) -> np.ndarray:
        """(d,) coordinates of unconstrained parameters."""
        return np.linalg.solve(self.scaling, theta - self.location)


@dataclass(eq=False)
class Scores:
    """Derivatives of every row's log-likelihood at the cuts, at one z.

    Per group and per cut: rows (k, n_rows), and maps d phi / d z (entries of phi, d).
    """

    rows: list[list[np.ndarray | None]]
    maps: list[list[np.ndarray | None]]


class Engine(Protocol):
    """What samplers and releases ask of the records; values are private."""

    @property
    def d(self) -> int:
        """Number of parameters."""

    @property
    def n_units(self) -> int:
        """Number of privacy units."""

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates z."""

    @property
    def reads(self) -> int:
        """How often the private arrays were asked for."""

    def constant_maps(self) -> list[list[bool]]:
        """Per group and cut, whether d phi / d z is the same for all z."""

    def synthetic(self) -> Engine:
        """The same functions on made-up data."""

    def with_coordinates(self, coordinates: Coordinates) -> Engine:
        """The same records in other coordinates."""

    def part(self, units: slice) -> Engine:
        """The records of some units alone, with the same bits."""

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) log-likelihood of every unit, up to a constant of the unit."""

    def scores(self, z: np.ndarray) -> Scores:
        """Scores at the cuts of every row."""

    def vectors(self, scores: Scores) -> Iterator[tuple[slice, np.ndarray]]:
        """Score vectors of all units, as blocks (units, (d, size of the block))."""

    @property
    def divisible(self) -> bool:
        """Whether vectors of some units can be made without those of the others."""

    def sparse_vectors(self, scores: Scores, units: slice) -> Iterator[tuple[slice, SparseBlock]]:
        """Vectors of some units, without the coordinates in which they are 0 if these are many.

        Of all units, and no others, where the rows are not `divisible`.
        """

    def linear(self) -> LinearRows | None:
        """The rows as multiples of vectors that do not depend on z; None if they are not."""

    def remember(self, z: np.ndarray, moved: np.ndarray) -> None:
        """Keep (n_units,) u_i . z of the rows in `linear`, for the ends of a path."""

    def forget(self) -> None:
        """Keep nothing of an earlier chain."""

    def work(
        self, scores: Scores, start: np.ndarray, end: np.ndarray, scale: np.ndarray
    ) -> np.ndarray:
        """(n_units,) scale_i * g_i . (end - start)."""
