"""Released sums of scores and curvatures, and the noise in them.

Entries that the structure of the model makes 0 for every unit are set to 0: whatever the release
puts there is noise.  A parameter of the prior alone has no score, and two groups have no curvature
in common, so a hierarchy pays only for what its records see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pymc_dp.rows.contributions import Change, Contribution, Curvature, Loss, OuterProduct, Score
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.tuning.alike import put_together

#: Number of made-up noises from which the size of one is estimated.
_DRAWS = 24


class Structure(Protocol):
    """The public structure of how records see the parameters."""

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
    """The noise in a sum of scores: of this sd in the entries of z that some record sees, `reach`.

    Shape of `reach`: (d,).
    """

    sd: float
    reach: np.ndarray

    def covariance(self, basis: np.ndarray) -> np.ndarray:
        """(d, d) covariance in w, z = basis @ w."""
        return np.asarray(self.sd**2 * (basis.T * self.reach) @ basis)


@dataclass(frozen=True, eq=False)
class CurvatureNoise:
    """The noise in a sum of curvatures, a symmetric random matrix.

    `variances` (d, d) are those of the noise that each entry has of its own, independent but for
    symmetry.  Each (d, d) array in `shared` is multiplied by one standard normal number, and added.
    """

    variances: np.ndarray
    shared: Sequence[np.ndarray] = ()

    @classmethod
    def of(cls, sd: float, pairs: np.ndarray) -> CurvatureNoise:
        """The noise of a packed matrix whose numbers have noise of this sd.

        That is the sd on the diagonal; entries off it have half its variance.  `pairs` (d, d) says
        which entries are noisy.
        """
        return cls(sd**2 * np.where(pairs, 0.5 + 0.5 * np.eye(len(pairs)), 0.0))

    def norm(self, basis: np.ndarray | None = None) -> float:
        """About the largest spectral norm of basis' N basis; `basis` is (d, k).

        It is the mean and two standard deviations over made-up noise with a fixed seed.
        """
        d = len(self.variances)
        sds = np.sqrt(self.variances)
        if not np.any(sds - np.diag(np.diag(sds))):  # the diagonal alone: d numbers
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
        """(d, d) covariance of N u for a vector u with E u u' = `moment`."""
        off = self.variances * (1.0 - np.eye(len(moment)))
        own = off * moment + np.diag(self.variances @ moment.diagonal())
        return np.asarray(own + sum(part @ moment @ part for part in self.shared))


class Answers:
    """Sums of scores and curvatures, with the entries set to 0 in which there is only noise."""

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
