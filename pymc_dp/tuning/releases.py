"""Releases of a preparation: sums of scores and curvatures, by their share of the budget.

Entries that the structure of the model makes 0 for every unit hold only noise and are set to 0, so
a hierarchy pays only for what its records see.

Entries of a curvature that are alike (those of one coordinate with the effects of all groups, and
those between whitened coordinates, about 0) are shrunk to their mean where they hardly differ but
for noise (James and Stein 1961; Efron and Morris 1973). This leaves the noise that each has of its
own and that of the mean. A hierarchy needs it most: the noise of the entries of a shared parameter
with all groups adds up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pymc_dp.rows.contributions import (
    Change,
    Contribution,
    Curvature,
    LawNotFound,
    Loss,
    OuterProduct,
    Score,
)
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.clip_norms import (
    Clipping,
    Histogram,
    Lost,
    above,
    heavy_quantile,
    hidden_tail,
    tail_quantile,
)
from pymc_dp.tuning.preparing import Shown

_DRAWS = 24  # number of made-up noises from which the size of one is estimated
_FEWEST = 10  # fewer entries tell too little about what they have in common
_FARTHEST = 3.0  # sds from the mean of another population (Efron and Morris 1972)
#: Parts of the budget for the size of clipping losses, and their covariance; units above its bound.
_LOSS_LOOK, _LOSS, _LOSS_TAIL = 0.004, 0.008, 0.002
_LAWS, _NOT_FOUND = 0.002, 0.02  # part of the budget, and fraction of laws that may be unknown
_LOSS_BOUND = 0.25  # bound on a clipping loss, in squared clip norms, where noise hides it


@dataclass(frozen=True, eq=False)
class ScoreNoise:
    """Noise in a sum of scores: of this sd in the entries `reach` (d,) of z that records see."""

    sd: float
    reach: np.ndarray

    def covariance(self, basis: np.ndarray) -> np.ndarray:
        """(d, d) covariance in w, z = basis @ w."""
        return np.asarray(self.sd**2 * (basis.T * self.reach) @ basis)


@dataclass(frozen=True, eq=False)
class CurvatureNoise:
    """The noise in a sum of curvatures, a symmetric random matrix.

    `variances` (d, d): each entry's own noise, independent but for symmetry. Each (d, d) array in
    `shared` is multiplied by one standard normal number, and added.
    """

    variances: np.ndarray
    shared: Sequence[np.ndarray] = ()

    @classmethod
    def of(cls, sd: float, pairs: np.ndarray) -> CurvatureNoise:
        """Noise of a packed matrix of numbers of this sd; half the variance off the diagonal."""
        return cls(sd**2 * np.where(pairs, 0.5 + 0.5 * np.eye(len(pairs)), 0.0))

    def norm(self, basis: np.ndarray | None = None) -> float:
        """About the largest spectral norm of basis' N basis: mean and two sds of made-up noise."""
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


class Shares:
    """Releases by their share of the budget; counts what was spent so far."""

    def __init__(self, releases: Shown, structure: RowEngine, spent: float = 0.0) -> None:
        self.releases, self.structure = releases, structure
        self.spent = spent

    @property
    def total(self) -> float:
        """Squared mu of which shares are parts."""
        return self.releases.units_mu2

    # -- histograms -----------------------------------------------------------------------------

    def histogram(self, label: str, spec: Contribution, share: float) -> Histogram:
        """Noisy histogram of the norms of `spec`."""
        self.spent += share
        return self.releases.histogram(label, spec, share)

    def tail(self, label: str, spec: Contribution, tail: float, share: float) -> float | None:
        """Upper quantile of the norms of `spec`; see `tail_quantile`."""
        return tail_quantile(*self.histogram(label, spec, share), tail, self.releases.n_public)

    def heavy_tail(self, label: str, spec: Contribution, tail: float, share: float) -> float | None:
        """Upper quantile where what lies above matters; see `heavy_quantile`."""
        histogram = self.histogram(label, spec, share)
        return heavy_quantile(*histogram, tail, self.releases.n_public)[0]

    def clipping(
        self, spec: Score, tail: float, price: float | None, share: float
    ) -> tuple[Clipping, Clipping] | None:
        """Clipping in the plain form, and in the others; None where noise hides the scores."""
        histogram, n = self.histogram("scores", spec, share), self.releases.n_public
        bound, index = heavy_quantile(*histogram, tail, n)
        if not bound:
            return None
        hidden = hidden_tail(*histogram, tail, n)
        whole = Clipping(bound, None, above(histogram, bound, n), hidden, index)
        shorter = price and Clipping.consistent(histogram, price, bound, n)
        return whole, shorter or whole

    def laws_found(self, at: Coordinates) -> bool:
        """Whether the laws of the outcomes of nearly all units are found, as far as noise shows."""
        edges, counts, noise_sd = self.histogram("laws not found", LawNotFound(at), _LAWS)
        one = int(np.searchsorted(edges, 1.0, side="right")) - 1
        n = self.releases.n_public
        return float(counts[one]) - 2.0 * noise_sd < _NOT_FOUND * n

    # -- sums -----------------------------------------------------------------------------------

    def _sum(
        self, label: str, spec: Contribution, clip_norm: float, share: float
    ) -> tuple[np.ndarray, float]:
        self.spent += share
        return self.releases.vector_sum(label, spec, clip_norm, share)

    def score(
        self, label: str, spec: Score | Change, clip_norm: float, share: float
    ) -> tuple[np.ndarray, ScoreNoise]:
        """Noisy sum of scores or of their changes, in z."""
        total, sd = self._sum(label, spec, clip_norm, share)
        reach = self.structure.touched(spec.coordinates).diagonal()
        if isinstance(spec, Change):
            there = Coordinates(spec.coordinates.theta(spec.z), spec.coordinates.scaling)
            reach = reach | self.structure.touched(there).diagonal()
        return np.where(reach, total, 0.0), ScoreNoise(sd, reach)

    def lost(self, clipping: Clipping, at: Coordinates, basis: np.ndarray) -> Lost:
        """What clipping takes from the scores beyond its mean, in w."""
        if clipping.inner is None:
            nothing = np.zeros((len(basis), len(basis)))
            return Lost(nothing, nothing)
        spec, label = Loss(at, clipping.inner), "what clipping takes"
        bound = self.tail(f"{label}, norms", spec, _LOSS_TAIL, _LOSS_LOOK)
        total, _ = self._sum(label, spec, bound or _LOSS_BOUND * clipping.inner**2, _LOSS)
        reach = self.structure.touched(at).diagonal()
        lost, shared = np.where(reach, np.maximum(total.reshape(2, -1), 0.0), 0.0)
        return Lost(basis.T * lost @ basis, basis.T * shared @ basis)

    def curvature(
        self, label: str, spec: Curvature, clip_norm: float, share: float
    ) -> tuple[np.ndarray, CurvatureNoise]:
        """Noisy (d, d) sum of curvatures, in z."""
        packed, sd = self._sum(label, spec, clip_norm, share)
        pairs = self.structure.touched(spec.coordinates)
        if isinstance(spec, OuterProduct) and not self.structure.one_row_per_unit:
            pairs = np.logical_and.outer(pairs.diagonal(), pairs.diagonal())
        if spec.diagonal:
            pairs = np.diag(pairs.diagonal())
        matrix, noise = np.where(pairs, spec.matrix(packed), 0.0), CurvatureNoise.of(sd, pairs)
        blocks, _ = self.structure.effects(spec.coordinates.location)
        matrix, own, shared = put_together(matrix, noise.variances, blocks)
        return matrix, CurvatureNoise(own, shared)


def put_together(
    matrix: np.ndarray, variances: np.ndarray, blocks: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The curvature (d, d) and its noise, with entries that are alike put near to their mean.

    In the coordinates z, where the released noise is independent; `blocks` are those of effects of
    groups, and the others are whitened. The third result is as `CurvatureNoise.shared`.
    """
    matrix, before, variances = matrix.copy(), variances, variances.copy()
    shared = []
    for where, centred in _alike(before > 0.0, blocks):
        if len(where[0]) < _FEWEST:
            continue
        values, own = matrix[where], before[where]
        middle = 0.0 if centred else float(values.mean())
        # with its standard error, or what is left would be said to be nothing where it is found 0
        spread = max(float(np.mean((values - middle) ** 2 - own)), 0.0)
        spread += float(own.mean()) * math.sqrt(2.0 / len(values))
        part = own / (own + spread)
        part[np.abs(values - middle) > _FARTHEST * np.sqrt(own + spread)] = 0.0
        of_mean = np.zeros_like(matrix)
        for place in (where, where[::-1]):
            matrix[place] = values + part * (middle - values)
            variances[place] = (1.0 - part) * own
            of_mean[place] = part * math.sqrt(float(np.mean(own + spread)) / len(values))
        if not centred:
            shared.append(of_mean)
    return matrix, variances, shared


def _alike(
    noisy: np.ndarray, blocks: Sequence[np.ndarray]
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], bool]]:
    """Places off the diagonal (groups differ in size) that are alike; whether they lie about 0."""
    d = len(noisy)
    group = np.full(d, -1)
    for k, block in enumerate(blocks):
        group[block] = k
    rows, columns = np.nonzero(np.triu(noisy, 1))
    first, second = group[rows], group[columns]
    whitened = (first < 0) & (second < 0)
    yield (rows[whitened], columns[whitened]), True
    for k in range(len(blocks)):
        for j in np.flatnonzero(group < 0):
            meets = ((rows == j) & (second == k)) | ((columns == j) & (first == k))
            yield (rows[meets], columns[meets]), False
        for m in range(k, len(blocks)):
            both = ((first == k) & (second == m)) | ((first == m) & (second == k))
            yield (rows[both], columns[both]), False
