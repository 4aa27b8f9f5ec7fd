"""What one unit adds to a release: its score, a change of it, its curvature, its statistic.

A *spec* says which quantity of a unit is meant and at which points; it is public.  :func:`blocks`
gives the values, which are private: only :mod:`pymc_dp.privacy` asks for them, after the ledger has
been charged.  Each value is a function of the rows of its own unit, computed by the same operations
wherever these rows stand, so that sums of rounded values have an exact sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.extraction import Records
from pymc_dp.records.units import RecordStore
from pymc_dp.rows import loops
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.engine import Engine, RowEngine, TiltedEngine
from pymc_dp.rows.expected import (
    clipped_scores,
    expected_curvatures,
    law_unknown,
    laws_not_found,
    losses,
    norms_of_outcomes,
)
from pymc_dp.rows.groups import BLOCK, RowGroup
from pymc_dp.rows.hessians import outer_products, packed_curvatures, sees_few
from pymc_dp.rows.predicted import PredictorEngine

#: Numbers held at once: 64 MB of float64.
_LARGEST = 2**23


@dataclass(frozen=True, eq=False)
class Score:
    """The score vector g_i at z = 0, or those of its entries that `part`, (k,) integers, lists."""

    coordinates: Coordinates
    part: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Entries per unit."""
        return len(self.coordinates.location) if self.part is None else len(self.part)


@dataclass(frozen=True, eq=False)
class ConsistentScore(Score):
    """The score vector at z = 0, clipped, plus what that takes from it on average.

    The average is over outcomes that the model at z = 0 would draw for the record, so that the sum
    has no bias where the model is true and z = 0 is near the truth
    (:func:`pymc_dp.rows.expected.clipped_scores`).
    """

    clip_norm: float = math.inf


@dataclass(frozen=True, eq=False)
class _Number:
    """One number of each unit at z = 0."""

    coordinates: Coordinates

    @property
    def size(self) -> int:
        """Entries per unit: 1."""
        return 1


@dataclass(frozen=True, eq=False)
class LongestEntry(_Number):
    """The largest absolute entry of the score at z = 0, a bound on its projections on axes of z."""


@dataclass(frozen=True, eq=False)
class LongestScore(_Number):
    """The norm that the score of a unit would have at z = 0 with the outcome that fits worst.

    For engines of one linear predictor.  All units have one, so that noise hides none: the scores
    of an outcome that few units have may be many times as long as the others, and too few to be
    seen.
    """


@dataclass(frozen=True, eq=False)
class Change:
    """The change of the score vector, g_i(z) - g_i(0)."""

    coordinates: Coordinates
    z: np.ndarray

    @property
    def size(self) -> int:
        """Entries per unit: d."""
        return len(self.coordinates.location)


@dataclass(frozen=True, eq=False)
class Curvature:
    """The curvature H_i = -d g_i/d z at z = 0, by forward differences along the axes of z.

    Symmetrised and packed: the entries (j, k) with j <= k of (H_i + H_i')/2, row by row, with those
    off the diagonal times sqrt(2), so that the l2 norm is the Frobenius norm of the matrix; or, if
    `diagonal`, only the d entries (j, j).

    `step` is the length of the differences in z, where the posterior has a width of about 1: for
    0.01 the error is half a per cent of the change of curvature over that width, and cancellation
    1e-14.

    Where rows see z through a few numbers that are affine in it (:mod:`pymc_dp.rows.hessians`), the
    differences are taken along these numbers, each over the change that `step` makes to it along
    its own gradient; both are the same up to the error of a difference.
    """

    coordinates: Coordinates
    diagonal: bool = False
    step: float = 0.01

    @property
    def size(self) -> int:
        """Entries per unit: d, or d(d + 1)/2."""
        d = len(self.coordinates.location)
        return d if self.diagonal else d * (d + 1) // 2

    def matrix(self, packed: np.ndarray) -> np.ndarray:
        """(d, d) symmetric matrix of packed entries (size,)."""
        if self.diagonal:
            return np.diag(packed)
        d = len(self.coordinates.location)
        matrix = np.zeros((d, d))
        matrix[np.triu_indices(d)] = packed
        matrix /= math.sqrt(2.0)
        matrix += matrix.T
        np.fill_diagonal(matrix, np.diag(matrix) / math.sqrt(2.0))
        return matrix


@dataclass(frozen=True, eq=False)
class OuterProduct(Curvature):
    """The outer product g_i g_i' of the score at z = 0, packed like a curvature.

    Its mean is that of the curvature if the model is true, also where log-likelihoods are piecewise
    linear and have none (Laplace, quantile regression).
    """


@dataclass(frozen=True, eq=False)
class ExpectedCurvature(Curvature):
    """The expected outer product E[g g'] at z = 0, over outcomes that the model would draw.

    Where the model is true its mean is that of the curvature, and its tail lighter.
    """


@dataclass(frozen=True, eq=False)
class LawNotFound(_Number):
    """1 where the law of the outcome is not found at z = 0, else 0."""


@dataclass(frozen=True, eq=False)
class Loss:
    """What clipping takes from the score at z = 0, over outcomes of the model, entry by entry.

    Its variances, then its covariances with the score (:func:`pymc_dp.rows.expected.losses`).
    """

    coordinates: Coordinates
    clip_norm: float

    @property
    def size(self) -> int:
        """Entries per unit: 2 d."""
        return 2 * len(self.coordinates.location)


@dataclass(frozen=True, eq=False)
class PathError:
    """The energy error of a public path of the anchored Langevin sampler.

    e_i = l_i(z_L) - l_i(z_0) - sum_j clip(g_i(mid_j) - g_i(0)) . (z_{j+1} - z_j)
      - g_i(0) . (z_L - z_0), with clipping to l2 norm `clip_norm`.

    `points`, (L + 1, d), are z_0, ..., z_L; the scores are taken at `midpoints`, (L, d).
    """

    coordinates: Coordinates
    points: np.ndarray
    midpoints: np.ndarray
    clip_norm: float

    @property
    def size(self) -> int:
        """Entries per unit: 1."""
        return 1


@dataclass(frozen=True, eq=False)
class Statistic:
    """The sufficient statistic of the record, a function of its data alone.

    For engines of one group of rows, each of them a unit.  ``rows(arrays)`` gives (m, n) values
    from the arrays of n records, records first; a column is a function of its own record.  `size`
    is m, and `norm` a public bound on the l2 norm of a unit's entries.  Before their norm is,
    entries are clamped to be at least 0 if `nonnegative`, and to [-1, 1] if `boxed`.
    """

    rows: Callable[[list[np.ndarray]], np.ndarray]
    size: int
    norm: float
    nonnegative: bool = False
    boxed: bool = False


_UNDER_THE_MODEL = ConsistentScore | ExpectedCurvature | LawNotFound | Loss

Contribution = (
    Score
    | LongestEntry
    | LongestScore
    | Change
    | Curvature
    | OuterProduct
    | LawNotFound
    | Loss
    | PathError
    | Statistic
)


def blocks(engine: Engine, spec: Contribution) -> Iterator[tuple[slice, np.ndarray]]:
    """What every unit adds to a release: units, and (size, units of the block) values.

    Values are finite: 0 where an entry is not.  They may be overwritten.  `engine` may be in any
    coordinates: those of `spec` are used.
    """
    if not isinstance(spec, Statistic):
        engine = engine.with_coordinates(spec.coordinates)
    if isinstance(spec, _UNDER_THE_MODEL):
        assert isinstance(engine, RowEngine)
        if why := law_unknown(engine):
            raise TypeError(why)
        engine = engine.each_alone()
    per_unit = spec.size + 4 * engine.d
    step = max(1, min(BLOCK, _LARGEST // per_unit))
    for start in range(0, engine.n_units, step):
        with np.errstate(all="ignore"):
            part = engine.part(slice(start, min(start + step, engine.n_units)))
            for where, values in _values(part, spec):
                loops.clean(values)
                if isinstance(spec, Statistic) and spec.boxed:
                    np.clip(values, -1.0, 1.0, out=values)
                yield slice(start + where.start, start + where.stop), values


def _values(engine: Engine, spec: Contribution) -> Iterator[tuple[slice, np.ndarray]]:
    everyone = slice(0, engine.n_units)
    if isinstance(spec, Statistic):
        if not (isinstance(engine, RowEngine) and engine.one_row_per_unit):
            raise TypeError("A statistic is known for records of one row each alone.")
        yield everyone, np.ascontiguousarray(spec.rows(engine.groups[0].store.read()))
        return
    if isinstance(spec, _UNDER_THE_MODEL):
        assert isinstance(engine, RowEngine)
        if isinstance(spec, ConsistentScore):
            yield from clipped_scores(engine, spec.clip_norm)
        elif isinstance(spec, Loss):
            yield from losses(engine, spec.clip_norm)
        elif isinstance(spec, LawNotFound):
            yield from laws_not_found(engine)
        else:
            yield from expected_curvatures(engine, spec.diagonal)
        return
    if isinstance(spec, Score):
        vectors = _vectors(engine, np.zeros(engine.d))
        yield everyone, vectors if spec.part is None else vectors[spec.part]
        return
    if isinstance(spec, LongestEntry):
        vectors = _vectors(engine, np.zeros(engine.d))
        yield everyone, np.abs(vectors, out=vectors).max(axis=0, keepdims=True)
        return
    if isinstance(spec, LongestScore):
        if not isinstance(engine, PredictorEngine):
            raise TypeError("The longest score is known for one linear predictor per row alone.")
        yield from engine.longest_scores()
        return
    if isinstance(spec, OuterProduct):
        yield from outer_products(_vectors(engine, np.zeros(engine.d)), spec.diagonal)
        return
    tilted = TiltedEngine(engine)
    if isinstance(spec, Change):
        yield everyone, _vectors(tilted, spec.z)
    elif isinstance(spec, PathError):
        yield everyone, _path_error(tilted, spec)
    else:
        rows = engine.engine if isinstance(engine, TiltedEngine) else engine
        if isinstance(rows, RowEngine) and sees_few(rows):
            yield from packed_curvatures(rows, spec.step, spec.diagonal)
        else:
            yield everyone, _curvature(tilted, spec)


def _vectors(engine: Engine, z: np.ndarray) -> np.ndarray:
    """(d, n_units) score vectors."""
    out = np.empty((engine.d, engine.n_units))
    for where, block in engine.vectors(engine.scores(z)):
        out[:, where] = block
    return out


def _curvature(tilted: TiltedEngine, spec: Curvature) -> np.ndarray:
    d = tilted.d
    values = np.zeros((spec.size, tilted.n_units))
    place = np.empty((d, d), dtype=np.int64)
    upper = np.triu_indices(d)
    place[upper] = place.T[upper] = np.arange(d * (d + 1) // 2)
    for k in range(d):
        z = np.zeros(d)
        z[k] = spec.step
        column = _vectors(tilted, z)
        column *= -1.0 / spec.step
        if spec.diagonal:
            values[k] = column[k]
            continue
        for j in range(d):
            # (H_jk + H_kj)/2 sqrt(2): each of the two differences adds its half
            values[place[j, k]] += column[j] if j == k else column[j] * math.sqrt(0.5)
    return values


def _path_error(tilted: TiltedEngine, spec: PathError) -> np.ndarray:
    error = tilted.log_likelihood(spec.points[-1]) - tilted.log_likelihood(spec.points[0])
    factor = np.empty(tilted.n_units)
    ends = zip(spec.points[:-1], spec.points[1:], strict=True)
    for midpoint, (start, end) in zip(spec.midpoints, ends, strict=True):
        scores = tilted.scores(midpoint)
        for where, vectors in tilted.vectors(scores):
            loops.clip_factors(vectors, spec.clip_norm, factor[where])
        error -= tilted.work(scores, start, end, factor)
    return error[None]


# -- made-up records -------------------------------------------------------------------------------


_ROWS = 1000
#: Where more laws of outcomes are not found, and from this condition number of the curvature on,
#: the place says little; more parameters take too long.
_NOT_FOUND, _CONDITION, _LARGEST = 0.05, 1e8, 60

Norms = tuple[np.ndarray, np.ndarray]


def score_norms(records: Records) -> Norms | None:
    """Norms of the scores of made-up records, about PyMC's initial point."""
    at = Coordinates(records.initial, np.eye(records.parameters.size))
    return made_up_norms(RowEngine.of(records, at), records.initial)


def made_up_norms(engine: RowEngine, theta: np.ndarray) -> Norms | None:
    """Norms of scores in whitened coordinates, and the parts of the records that have them.

    `theta` is a public point; of `engine` only functions, types and shapes are used.  Norms, (k,),
    are those of one record: the mean of their squares is d.  None where the law of the outcomes is
    not known, or the point is no guide.
    """
    d = engine.d
    if d > _LARGEST or law_unknown(engine) or engine.index_blocks(theta):
        return None
    if not engine.one_row_per_unit:  # how many rows a unit has is private
        return None
    made = _with_features(engine, np.random.default_rng(0)).each_alone()
    with np.errstate(all="ignore"):
        spec = ExpectedCurvature(Coordinates(theta, np.eye(d)))
        made = made.with_coordinates(spec.coordinates)
        total = np.sum([v.sum(axis=1) for _, v in expected_curvatures(made, False)], axis=0)
        values, vectors = np.linalg.eigh(spec.matrix(total / _ROWS))
        if not (np.isfinite(values).all() and values[0] * _CONDITION > values[-1] > 0.0):
            return None
        made = made.with_coordinates(Coordinates(theta, vectors / np.sqrt(values)))
        norms, weights = norms_of_outcomes(made)
    if weights.sum() < (1.0 - _NOT_FOUND) * _ROWS:
        return None
    return norms, weights / weights.sum()


def _with_features(engine: RowEngine, rng: np.random.Generator) -> RowEngine:
    """Normal features, positive numbers elsewhere, and labels that are as likely as each other."""
    [group] = engine.groups
    graph = group.functions.graph
    designs = {cut.row_data for cut in graph.cuts if cut.kind == "dot"}
    arrays = []
    for leaf, blank in zip(graph.leaves, group.store.synthetic(_ROWS).read(), strict=True):
        sizes = [
            size for label, size in graph.lookups if leaf.block in ancestors_without_shapes([label])
        ]
        if blank.dtype.kind == "f":
            made = rng.standard_normal(blank.shape)
            if leaf.block not in designs and blank.ndim == 1:
                made = np.exp(made / 2.0)
        else:
            made = np.floor(rng.random(blank.shape) * min(sizes, default=2))
        array = made.astype(blank.dtype)
        array.flags.writeable = blank.flags.writeable
        arrays.append(array)
    part = RowGroup(group.functions, RecordStore(arrays), None)
    return RowEngine([part], engine.parameters, _ROWS, engine.coordinates)
