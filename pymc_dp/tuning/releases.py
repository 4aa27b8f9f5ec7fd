"""Releases of a preparation, by their share of the budget: norms, hence where to clip, and sums.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from rich.progress import Progress

from pymc_dp.base.matrices import Coordinates, positive_part
from pymc_dp.privacy.preparation import Histogram, Preparation
from pymc_dp.rows.contributions import (
    Change,
    ConsistentScore,
    Contribution,
    Curvature,
    LawNotFound,
    Loss,
    OuterProduct,
    Score,
)
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.forecast import ROOM, costs_of_clipping

_T = TypeVar("_T")
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

    def of_trace(self, moment: np.ndarray) -> float:
        """Variance of the trace of N times a symmetric (d, d) matrix."""
        own = np.sum(self.variances * (2.0 - np.eye(len(moment))) * moment**2)
        return float(own + sum(np.sum(part * moment) ** 2 for part in self.shared))


class Shares:
    """Releases by their share of the budget, shown as they are made; counts what was spent so far.

    `n` is the public number of units, `total` the squared mu of which shares are parts.
    """

    def __init__(
        self, releases: Preparation, structure: RowEngine, bar: Progress | None = None
    ) -> None:
        self.releases, self.structure, self.spent = releases, structure, 0.0
        self.n, self.total = releases.n_public, releases.units_mu2
        self._bar = bar or Progress(disable=True)
        self._task = self._bar.add_task("", total=1.0)

    def _ask(self, release: Callable[..., _T], label: str, share: float, *asked: Any) -> _T:
        self._bar.update(self._task, description=label)
        self.spent += share
        answer = release(label, *asked, share)
        self._bar.advance(self._task, share)
        return answer

    # -- histograms -----------------------------------------------------------------------------

    def histogram(self, label: str, spec: Contribution, share: float) -> Histogram:
        """Noisy histogram of the norms of `spec`."""
        return self._ask(self.releases.histogram, label, share, spec)

    def tail(self, label: str, spec: Contribution, tail: float, share: float) -> float | None:
        """Upper quantile of the norms of `spec`; see `tail_quantile`."""
        return tail_quantile(self.histogram(label, spec, share), tail, self.n)

    def heavy_tail(self, label: str, spec: Contribution, tail: float, share: float) -> float | None:
        """Upper quantile where what lies above matters; see `heavy_quantile`."""
        return heavy_quantile(self.histogram(label, spec, share), tail, self.n)[0]

    def clipping(
        self, spec: Score, tail: float, price: float | None, share: float
    ) -> tuple[Clipping, Clipping] | None:
        """Clipping in the plain form, and in the others; None where noise hides the scores."""
        histogram, n = self.histogram("scores", spec, share), self.n
        bound, index = heavy_quantile(histogram, tail, n)
        if not bound:
            return None
        begin = _tail(histogram, tail, n)
        assert begin is not None  # as there is a bound
        hidden = max(begin.least - tail * begin.n, 0.0)  # beyond those asked for
        whole = Clipping(bound, None, above(histogram, bound, n), hidden, index)
        shorter = price and Clipping.consistent(histogram, price, bound, n)
        return whole, shorter or whole

    def laws_found(self, at: Coordinates) -> bool:
        """Whether the laws of the outcomes of nearly all units are found, as far as noise shows."""
        edges, counts, noise_sd = self.histogram("laws not found", LawNotFound(at), _LAWS)
        one = int(np.searchsorted(edges, 1.0, side="right")) - 1
        return float(counts[one]) - 2.0 * noise_sd < _NOT_FOUND * self.n

    # -- sums -----------------------------------------------------------------------------------

    def vector_sum(
        self, label: str, spec: Contribution, clip_norm: float, share: float
    ) -> tuple[np.ndarray, float]:
        """Noisy sum of what is clipped to this norm, and the standard deviation of its noise."""
        return self._ask(self.releases.vector_sum, label, share, spec, clip_norm)

    def score(
        self, label: str, spec: Score | Change, clip_norm: float, share: float
    ) -> tuple[np.ndarray, ScoreNoise]:
        """Noisy sum of scores or of their changes, in z."""
        total, sd = self.vector_sum(label, spec, clip_norm, share)
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
        total, _ = self.vector_sum(label, spec, bound or _LOSS_BOUND * clipping.inner**2, _LOSS)
        reach = self.structure.touched(at).diagonal()
        lost, shared = np.where(reach, np.maximum(total.reshape(2, -1), 0.0), 0.0)
        return Lost(basis.T * lost @ basis, basis.T * shared @ basis)

    def curvature(
        self, label: str, spec: Curvature, clip_norm: float, share: float
    ) -> tuple[np.ndarray, CurvatureNoise]:
        """Noisy (d, d) sum of curvatures, in z."""
        packed, sd = self.vector_sum(label, spec, clip_norm, share)
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


# -- where to clip --------------------------------------------------------------------------------


_WINDOWS = (1, 2, 4, 8, 16)  # widths in bins: norms spread over four octaves or take few values
_MARGIN = 8  # bins above the highest that is seen in which the tail is searched: two octaves
_CLEAR = 5.2  # sds above noise: any of 480 empty windows passes with p < 3e-4
_ALONE = 0.12  # noise up to which a unit alone in its bin stands out of it; one in 3000 does not
_FURTHEST, _FARTHEST_HEAVY = 2.0, 32.0  # longest continuations: of a normal tail, of a power law
_THICKER = 5.0  # how much thicker a tail is at the quantile that gives the exponent
_LIGHTEST = 0.1  # least index with which a tail is continued: quantiles are known to a bin
_THIN = 0.2  # largest part of the units above the thicker one, for it to be a tail
_TAIL_BINS = 8  # bins above a quantile in which what it cuts off is counted: two octaves
_HEAVY = 0.6  # tail index: noisy squares of normal residuals seem to have 0.5
_MOST_CLIPPED = 0.2  # largest fraction of the scores that is clipped consistently
#: Least curvature by which a loss is divided (the posterior has 1); largest part that may be lost.
_LEAST_CURVATURE, _MOST_LOST = 0.01, 0.6


@dataclass(frozen=True)
class Clipping:
    """How the scores of an anchor are clipped.

    `bound` is on what a unit adds to the sum. What clipping to `inner` takes is given back on
    average (`ConsistentScore`). `above` is the noisy fraction of longer scores and its sd. Without
    `inner`, `hidden` scores above the bound may be hidden by noise; `tail_index`: see
    `heavy_quantile`.
    """

    bound: float
    inner: float | None = None
    above: tuple[float, float] = (0.0, 0.0)
    hidden: float = 0.0
    tail_index: float = 0.0

    @classmethod
    def consistent(
        cls, histogram: Histogram, price: float, longest: float, n: float
    ) -> Clipping | None:
        """The cheapest clipping where what it takes is given back; None if not below `longest`.

        Costs are `costs_of_clipping`; `price` is the variance of the noise, all entries of the sum
        together, for a bound of 1 on each.
        """
        found = _tail(histogram, _MOST_CLIPPED, n)
        if found is None or found.edge == 0.0:
            return None
        inner, (edges, counts, noise_sd) = found.edge, histogram
        # what stands out of the noise; a bin is as long as its geometric middle
        seen = np.flatnonzero(counts[1:-1] > _CLEAR * noise_sd) + 1
        if seen.size:
            used = np.arange(seen[0], seen[-1] + 1 + _WINDOWS[1])
            used = used[used < len(counts) - 1]
            norms, numbers = np.sqrt(edges[used] * edges[used + 1]), counts[used]
            candidates = inner * 2.0 ** (np.arange(0, 49) / 12.0)
            _, cost = costs_of_clipping(norms, numbers, candidates, price)
            inner = float(candidates[int(np.argmin(cost))])
        if ROOM * inner >= longest:
            return None
        return cls(ROOM * inner, inner, above(histogram, inner, n))

    @property
    def heavy_tails(self) -> bool:
        """Whether what is clipped may matter more than the noise."""
        return self.tail_index > _HEAVY

    def facts(self) -> dict[str, Any]:
        """For the privacy statement."""
        return {
            "clipping": "consistent" if self.inner is not None else None,
            "clipped": list(self.above),
            "heavy_tails": self.heavy_tails,
        }

    @property
    def counted(self) -> str:
        """A noisy count of the scores that were clipped, for a statement."""
        fraction, sd = self.above
        count = f"By a noisy count, {100 * fraction:.2g} % (sd {100 * sd:.2g}) of the scores were "
        if self.inner is not None:
            return f"{count}clipped."
        heavy = (
            " THE SCORES HAVE HEAVY TAILS: the posterior of the model as written may lie farther "
            "away than the intervals say."
        )
        return (
            f"{count}clipped: such records, and outliers too few to be seen, count for less than "
            f"the model says.{heavy if self.heavy_tails else ''}"
        )

    @property
    def sentence(self) -> str:
        """What clipping did to draws whose target it changes, for a statement."""
        if self.inner is None:
            return f"Intervals do not account for the bias of clipping scores. {self.counted}"
        return (
            "What clipping takes from a score was given back on average, over outcomes that the "
            "model would draw for the record (Fisher consistency), so that it leaves no bias where "
            "the model is true, and intervals account for what it cost. Where the model is wrong, "
            f"outliers count for less than it says. {self.counted}"
        )

    def score(self, at: Coordinates) -> Score:
        """What units add to the sum."""
        return Score(at) if self.inner is None else ConsistentScore(at, clip_norm=self.inner)


@dataclass(frozen=True, eq=False)
class Lost:
    """What clipping takes from a sum of scores of which it gives back the mean.

    Let e be what clipping takes from the sum g, of covariance H over data of the model at the
    origin. What is left changes with w as H - C does, C = Cov(e, g): it leans towards the origin.
    Multiplied by H (H - C)^-1 it is a score again. In w, `covariance` is Cov(e) and `shared` is C.
    """

    covariance: np.ndarray
    shared: np.ndarray

    def corrected(
        self, score: np.ndarray, noise: np.ndarray, curvature: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Score (d,), and covariances of its noise and of what clipping lost; `curvature` is H."""
        if not self.shared.any():
            return score, noise, self.covariance
        values, vectors = np.linalg.eigh(curvature)
        sizes = np.sqrt(np.maximum(values, _LEAST_CURVATURE))
        whiten, back = (vectors / sizes) @ vectors.T, (vectors * sizes) @ vectors.T
        parts, axes = np.linalg.eigh(whiten @ self.shared @ whiten)
        parts = np.clip(parts, 0.0, _MOST_LOST)
        factor = back @ (axes / (1.0 - parts)) @ axes.T @ whiten
        rest = whiten @ self.covariance @ whiten - (axes * parts**2) @ axes.T
        lost = back @ positive_part(rest) @ back
        return factor @ score, factor @ noise @ factor.T, factor @ lost @ factor.T


def tail_of_scores(n: int) -> float:
    """Fraction of the scores that may be clipped where noise is about a posterior sd.

    With 0.3 % clipped at n = 1e5 the bias was below 0.05 posterior sds in logistic regression; it
    grows like sqrt(n), as posterior sds shrink.
    """
    return 0.003 * min(1.0, math.sqrt(1e5 / n))


def harmless_tail(n: int, noise: float) -> float:
    """Fraction of the scores that may be clipped where clipping changes the target.

    `noise` is the noise sd of the sum over the clip norm b. Scores above b exceed it by about 0.15
    b on average and may all point the same way (squares of residuals do), so a fraction t moves the
    sum by up to 0.15 n t b. Half of the noise is harmless.
    """
    return min(0.003, 0.5 * noise / (0.15 * n))


def above(norms: Histogram, bound: float, n: float) -> tuple[float, float]:
    """Noisy fraction of the units above a bound, and its standard deviation."""
    edges, counts, noise_sd = norms
    top = np.flatnonzero(edges[:-1] >= bound)[:_TAIL_BINS]
    return max(float(counts[top].sum()), 0.0) / n, noise_sd * math.sqrt(len(top)) / n


# -- tails ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tail:
    """Where a tail begins.

    About `least` units, as many as asked for or as noise hides, are above `edge`, which is 0 where
    nearly all units are zero. `n` counts those that are not. `above` (m,) are noisy numbers of
    units above the edges ``edges[top + 1 - k]``, k = 1, ..., m.
    """

    edge: float
    least: float
    n: float
    above: np.ndarray
    top: int


_ZERO = _Tail(0.0, 0.0, 0.0, np.empty(0), 0)


def tail_quantile(histogram: Histogram, tail: float, n: float) -> float | None:
    """Upper quantile of a positive quantity from a histogram with noisy counts.

    The first bin holds zeros; about the fraction `tail` of the
    units that are not zero lies above the result. It is 0 where nearly all units are zero or beyond
    all bins, and None where nothing stands out of the noise.

    Empty bins add only noise, so the tail is summed from 8 bins above the highest that is seen. The
    quantile is not below the first bin of the highest window that is thicker than the tail. Where
    noise hides so thin a tail, the quantile of a thicker one is continued like a normal one.
    """
    found = _tail(histogram, tail, n)
    if found is None or found.edge == 0.0:
        return None if found is None else 0.0
    beyond = math.log(1.0 / tail) / math.log(max(found.n / found.least, 2.0))
    return found.edge * min(max(math.sqrt(beyond), 1.0), _FURTHEST)


def heavy_quantile(histogram: Histogram, tail: float, n: float) -> tuple[float | None, float]:
    """The quantile of a quantity whose excess matters, and the index of its tail.

    As :func:`tail_quantile`, but `tail` is the fraction that may lie above if its mean excess is
    0.15 of the quantile; a larger excess allows fewer. The index is xi of a tail t ~ q^(-1/xi)
    about its thinnest part that is seen (0.2 for squares of normal residuals, 2/3 for those of
    Student's t with 3 degrees of freedom), or 0 where no tail thinner than a fifth is seen.

    The mean excess of a power law is xi / (1 - xi) of the quantile. A hidden tail is continued by
    that law, or like an exponential one where none is seen. Where a unit alone in its bin is not
    hidden, the quantity ends at the highest bin that is seen.
    """
    found = _tail(histogram, tail, n)
    if found is None or found.edge == 0.0:
        return (None if found is None else 0.0), 0.0
    edges, counts, noise_sd = histogram
    longest = 0.0
    clear = _CLEAR * noise_sd
    if noise_sd < _ALONE and (seen := np.flatnonzero(counts[1:] > max(clear, 0.5))).size:
        longest = float(edges[min(seen[-1] + 2, len(edges) - 2)])
    # where two octaves of empty bins cannot be mistaken for a tail
    bins = np.arange(1.0, len(found.above) + 1.0)
    sure = np.maximum(tail * found.n, clear * np.sqrt(bins))
    unsure = np.flatnonzero(found.above <= sure)
    begin = int(unsure[-1]) + 1 if unsure.size else 0
    least = float(sure[min(begin, len(sure) - 1)])
    if begin == len(found.above) or _THICKER * least > _THIN * found.n:
        beyond = math.log(1.0 / tail) / math.log(max(found.n / found.least, 2.0))
        return longest or found.edge * min(max(beyond, 1.0), _FURTHEST), 0.0
    thicker = int(np.flatnonzero(found.above > _THICKER * least)[0])
    edge = float(edges[found.top - begin + 1])
    index = math.log(max(edge / float(edges[found.top - thicker + 1]), 1.0)) / math.log(_THICKER)
    excess = max(index / (1.0 - min(index, 0.9)), 0.15)
    factor = max(least * excess / (0.15 * tail * found.n), 1.0) ** max(index, _LIGHTEST)
    return longest or max(found.edge, edge * min(factor, _FARTHEST_HEAVY)), index


def _tail(histogram: Histogram, tail: float, n: float) -> _Tail | None:
    """As in `tail_quantile`; None where nothing stands out of the noise."""
    edges, counts, noise_sd = histogram
    inner = counts[1:]
    highest, least_edge = 0, 0.0
    for width in _WINDOWS:
        sums = np.convolve(inner, np.ones(width), mode="valid")
        noise = _CLEAR * noise_sd * math.sqrt(width)
        # the window one bin higher does not stand out, so the first bin is not empty
        seen = np.flatnonzero(sums > noise)
        highest = max(highest, int(seen[-1]) + 1) if seen.size else highest
        thick = np.flatnonzero(sums > max(noise, tail * n))
        if thick.size:
            least_edge = max(least_edge, float(edges[min(thick[-1] + 2, len(edges) - 2)]))
    if highest == 0:
        return _ZERO if counts[0] > max(n / 2, _CLEAR * noise_sd) else None
    start = min(int(np.argmax(sums)), max(highest - _WINDOWS[-1], 0))
    top = min(highest + _MARGIN, len(inner))
    above = np.cumsum(inner[start:top][::-1])
    n = min(n, max(float(above[-1]), 0.0))  # of those that are not zero
    # the noise of a sum over k bins grows like sqrt(k): two of its sds are no tail
    hidden = 2.0 * noise_sd * np.sqrt(np.arange(1.0, len(above) + 1.0))
    below = np.flatnonzero(above <= np.maximum(tail * n, hidden))
    first = int(below[-1]) + 1 if below.size else 0  # from here on the sums stay above
    if first == len(above):
        return None
    if top - 1 - first >= len(inner) - 1:
        return _ZERO
    least = max(tail * n, float(hidden[first]))
    j = top - 1 - first  # the bin in which the tail begins
    inside = (float(above[first]) - least) / max(float(inner[j]), 1.0)
    edge = edges[j + 2] * (edges[j + 1] / edges[j + 2]) ** (1.0 - min(max(inside, 0.0), 1.0))
    edge = max(float(edge), least_edge)
    return _Tail(edge, least, n, above, top)
