"""Released sums of scores and curvatures, and the noise in them.

Entries that the structure of the model makes 0 for every unit are 0: what noise puts there is known
to be noise.  A parameter of the prior alone has no score, and two groups have no curvature in
common, so a hierarchy pays for what its records see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pymc_dp.rows.contributions import Change, Contribution, Curvature, Loss, OuterProduct, Score
from pymc_dp.rows.interfaces import Coordinates
from pymc_dp.tuning.alike import put_together

#: Made-up noises from which the size of one is told.
_DRAWS = 24


class Structure(Protocol):
    """What is public of how records see the parameters."""

    def effects(self, theta: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Parameters that reach each unit through an index, and coordinates in which they do."""

    def touched(self, coordinates: Coordinates) -> np.ndarray:
        """(d, d) bool: which coordinates of z a row may see together."""

    @property
    def one_row_per_unit(self) -> bool:
        """Whether rows are units."""


class Releases(Protocol):
    """One-off private answers; each is charged before a record is touched."""

    @property
    def n_public(self) -> int:
        """Public number of units."""

    @property
    def units_mu2(self) -> float:
        """Squared mu of which shares are parts."""

    def histogram(
        self, label: str, spec: Contribution, share: float
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """(edges, noisy counts, noise sd) of the norms of `spec`."""

    def vector_sum(
        self, label: str, spec: Contribution, clip_norm: float, share: float
    ) -> tuple[np.ndarray, float]:
        """Noisy sum of clipped vectors, and the noise sd of each entry."""


@dataclass(frozen=True, eq=False)
class ScoreNoise:
    """The noise in a sum of scores.

    Attributes
    ----------
    sd : float
        Of each entry of z that some record sees.
    reach : (d,) bool ndarray
        Which these are.
    """

    sd: float
    reach: np.ndarray

    def covariance(self, basis: np.ndarray) -> np.ndarray:
        """(d, d) covariance in w, z = basis @ w."""
        return np.asarray(self.sd**2 * (basis.T * self.reach) @ basis)


@dataclass(frozen=True, eq=False)
class CurvatureNoise:
    """The noise in a sum of curvatures, a symmetric random matrix.

    Attributes
    ----------
    variances : (d, d) ndarray
        Of what entries have of their own, which is independent but for symmetry.
    shared : sequence of (d, d) ndarray
        Each is multiplied by one standard normal number, and added to that.
    """

    variances: np.ndarray
    shared: Sequence[np.ndarray] = ()

    @classmethod
    def of(cls, sd: float, pairs: np.ndarray) -> CurvatureNoise:
        """The noise of a packed matrix, each of whose numbers has that noise.

        Parameters
        ----------
        sd : float
            Of the entries on the diagonal; those off it have half its variance.
        pairs : (d, d) bool ndarray
            Entries that are noisy.
        """
        return cls(sd**2 * np.where(pairs, 0.5 + 0.5 * np.eye(len(pairs)), 0.0))

    def norm(self, basis: np.ndarray | None = None) -> float:
        """About the largest spectral norm of basis' N basis.

        Of made-up noise with a fixed seed, mean and two standard deviations; `basis` is (d, k).
        """
        d = len(self.variances)
        sds = np.sqrt(self.variances)
        if not np.any(sds - np.diag(np.diag(sds))):  # no more than d numbers
            longest = 3.0 * float(sds.max(initial=0.0))
            return longest * (1.0 if basis is None else float(np.linalg.norm(basis, 2)) ** 2)
        rng = np.random.default_rng(d)
        norms = []
        for _ in range(_DRAWS):
            noise = np.triu(rng.standard_normal((d, d)))
            noise = sds * (noise + np.triu(noise, 1).T)
            for part in self.shared:
                noise += rng.standard_normal() * part
            norms.append(np.linalg.norm(noise if basis is None else basis.T @ noise @ basis, 2))
        return float(np.mean(norms) + 2.0 * np.std(norms))

    def of_product(self, moment: np.ndarray) -> np.ndarray:
        """(d, d) covariance of N u for a vector u of which E u u' is given."""
        off = self.variances * (1.0 - np.eye(len(moment)))
        own = off * moment + np.diag(self.variances @ moment.diagonal())
        return np.asarray(own + sum(part @ moment @ part for part in self.shared))


class Answers:
    """Sums of scores and curvatures without noise where there is nothing else.

    Parameters
    ----------
    releases : Releases
    structure : Structure
    """

    def __init__(self, releases: Releases, structure: Structure) -> None:
        self.releases, self.structure = releases, structure

    def score(
        self, label: str, spec: Score | Change, clip_norm: float, share: float
    ) -> tuple[np.ndarray, ScoreNoise]:
        """Noisy sum of scores or of their changes, in z."""
        total, sd = self.releases.vector_sum(label, spec, clip_norm, share)
        reach = self.structure.touched(spec.coordinates).diagonal()
        if isinstance(spec, Change):
            there = Coordinates(spec.coordinates.theta(spec.z), spec.coordinates.scaling)
            reach = reach | self.structure.touched(there).diagonal()
        return np.where(reach, total, 0.0), ScoreNoise(sd, reach)

    def loss(
        self, label: str, spec: Loss, clip_norm: float, share: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Noisy sums (d,) of the variances of what clipping takes, and of its covariances."""
        total, _ = self.releases.vector_sum(label, spec, clip_norm, share)
        reach = self.structure.touched(spec.coordinates).diagonal()
        lost, shared = np.where(reach, np.maximum(total.reshape(2, -1), 0.0), 0.0)
        return lost, shared

    def curvature(
        self, label: str, spec: Curvature, clip_norm: float, share: float
    ) -> tuple[np.ndarray, CurvatureNoise]:
        """Noisy (d, d) sum of curvatures, in z."""
        packed, sd = self.releases.vector_sum(label, spec, clip_norm, share)
        pairs = self.structure.touched(spec.coordinates)
        if isinstance(spec, OuterProduct) and not self.structure.one_row_per_unit:
            pairs = np.logical_and.outer(pairs.diagonal(), pairs.diagonal())
        if spec.diagonal:
            pairs = np.diag(pairs.diagonal())
        matrix, noise = np.where(pairs, spec.matrix(packed), 0.0), CurvatureNoise.of(sd, pairs)
        blocks, _ = self.structure.effects(spec.coordinates.location)
        matrix, own, shared = put_together(matrix, noise.variances, blocks)
        return matrix, CurvatureNoise(own, shared)
