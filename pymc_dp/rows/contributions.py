"""What one unit adds to a release: its score, a change of it, its curvature, its statistic.

A *contribution* says which quantity is meant, at which points; it is public.  Its `blocks` are
private: only :mod:`pymc_dp.privacy` asks for them, after the ledger has been charged.  A value is a
function of its unit's rows, computed by the same operations wherever these stand, so that sums of
rounded values have an exact sensitivity.

Scores of outcomes that the model at z = 0 would draw for a unit have mean 0 (the score identity),
so what clipping takes from them on average is known, the *expected excess*
c_i = E[g(y*, x_i) - clip(g(y*, x_i))].  Added to the clipped score it removes the bias of clipping,
whatever the bound, where the model is true and z = 0 is near the truth.  It is a function of one
unit: of its data, the parameters, and constants.  What a row could observe has the scores
sum_a u_a s_a, with directions u_a that do not depend on the outcome (:mod:`pymc_dp.rows.groups`).
Rows of a unit are independent (:mod:`pymc_dp.rows.joint`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from pymc_dp.base.matrices import Coordinates
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.extraction import Records
from pymc_dp.records.units import RecordStore
from pymc_dp.rows import loops
from pymc_dp.rows.engine import Blocks, RowEngine
from pymc_dp.rows.groups import BLOCK, RowGroup, rows_of
from pymc_dp.rows.joint import POINTS, JointPoints, fractions, hashed, repetitions
from pymc_dp.rows.law import LogDensity, law_of, most_nodes
from pymc_dp.rows.predicted import PredictorEngine

_LARGEST = 2**23  # numbers held at once: 64 MB of float64
_DIRECTIONS = 2**20  # numbers of a block of directions: what fits into the third level of cache
_JOINT = 2**22  # numbers of the joint points of a block of units


def law_unknown(engine: RowEngine) -> str:
    """Why the law of what a unit observes is not known, in one public sentence; empty if it is."""
    graphs = [group.functions.graph for group in engine.groups]
    read = []  # the arrays whose entries matter
    for graph in graphs:
        columns = [cut.row_data for cut in graph.cuts if cut.row_data is not None]
        behind = ancestors_without_shapes([*graph.terms, *columns])
        read.append({leaf.source for leaf in graph.leaves if leaf.block in behind})
    for k, graph in enumerate(graphs):
        seen = set().union(*read[:k], *read[k + 1 :])
        observed = {graph.leaves[outcome.leaf].source for outcome in graph.outcomes}
        if not observed or observed & seen:
            return (
                f"The support of {graph.quoted} is not known, or what is observed is a covariate "
                "too."
            )
    return ""


class RowsWithLaw:
    """Rows of a group: directions, and scores of the outcomes that are and could be."""

    def __init__(self, engine: RowEngine, where: slice, g: int) -> None:
        group = engine.groups[g].rows(where)
        functions = group.functions
        self._tried = functions.of_outcomes
        self.data = [np.asarray(array) for array in group.store.read()]
        everyone = slice(0, group.n_rows)
        self._phis, maps = group.shared(engine.coordinates)
        self.directions = group.directions(self._phis, maps, everyone)
        self._used = [matrix is not None for matrix in maps]
        self._etas, self._labels, blocks = group.inputs(self._phis, everyone)
        self.scores = self._parts(functions.scores(self._etas, self._phis, self._labels, blocks))
        self._constants = self._tried.constants(self._etas, self._phis, self._labels, self.data)
        [self.outcome] = functions.graph.outcomes
        self.law = law_of(self.outcome, self.data, self._shifts_of, self._density_of)

    def _parts(self, found: list[ndarray | None]) -> ndarray:
        parts = [
            np.ascontiguousarray(s.T)
            for s, used in zip(found, self._used, strict=True)
            if s is not None and used
        ]
        scores = np.concatenate(parts)
        loops.clean(scores, scores, 0)
        return scores

    def _with(self, outcome: ndarray, data: list[ndarray]) -> list[ndarray]:
        data, leaf = list(data), self.outcome.leaf
        old = data[leaf]
        data[leaf] = outcome.astype(old.dtype, copy=False).view()
        data[leaf].flags.writeable = old.flags.writeable
        return data

    def _shifts_of(self, some: slice | ndarray) -> ndarray:
        columns = [rows_of(self.data[k], some) for k in self.outcome.hashed]
        n = len(columns[0])
        return np.asarray(fractions(hashed(columns, np.arange(n), n)))

    def _density_of(self, some: slice | ndarray) -> LogDensity:
        etas, labels, constants = (
            [array[some] for array in found]
            for found in (self._etas, self._labels, self._constants)
        )
        data = [rows_of(array, some) for array in self.data]

        def log_density(outcome: ndarray) -> ndarray:
            blocks = [*self._with(outcome, data), *constants]
            found = self._tried.loglik(etas, self._phis, labels, blocks)
            return np.asarray(found, dtype="float64")

        return log_density

    def of_outcomes(self) -> ndarray:
        """(nodes, K, rows) scores of the outcomes that could be, 0 where none has a weight."""
        law = self.law
        found = np.zeros((len(law.weights), *self.scores.shape))
        for scores, node, weight in zip(found, law.nodes, law.weights, strict=True):
            if weight.any():
                blocks = [*self._with(node, self.data), *self._constants]
                tried = self._tried.scores(self._etas, self._phis, self._labels, blocks)
                scores[:] = self._parts(tried)
        return found


def units_with_outcomes(engine: RowEngine) -> Iterator[tuple[slice, JointPoints]]:
    """Units, with what they could observe, for an engine `each_alone` whose laws are known."""
    sizes = [most_nodes(*group.functions.graph.outcomes) for group in engine.groups]
    points = sizes[0] if engine.one_row_per_unit else POINTS
    at_once = max(1, min(BLOCK, _JOINT // (points * engine.d)))
    for where in loops.row_blocks(engine.n_units, at_once):
        part = engine.part(where)
        combinations, seeds = np.ones(part.n_units), np.zeros(part.n_units, dtype="uint64")
        terms = []
        for group, size in zip(part.groups, sizes, strict=True):
            units = np.arange(group.n_rows) if group.units is None else group.units
            data, times = group.store.read(), np.ones(len(units), dtype="int64")
            [outcome] = group.functions.graph.outcomes
            seeds += hashed([data[k] for k in outcome.hashed], units, part.n_units)
            if size == 2 and group.units is not None:
                times = repetitions([x for k, x in enumerate(data) if k != outcome.leaf], units)
            np.multiply.at(combinations, units, np.where(times > 0, size + times - 1.0, 1.0))
            terms.append((units, times))
        found = JointPoints(_vectors(part), seeds, combinations)
        for g, (units, times) in enumerate(terms):
            for some, rows in rows_with_laws(part, g):
                own = rows.law.weights, rows.of_outcomes(), rows.directions
                found.add(units[some], times[some], sizes[g], own)
        yield where, found


def rows_with_laws(engine: RowEngine, g: int) -> Iterator[tuple[slice, RowsWithLaw]]:
    """Rows of group number `g` of an engine `each_alone`, block by block."""
    group = engine.groups[g]
    seen = len(group.seen(*group.shared(engine.coordinates)))
    size = max(1, min(BLOCK, _DIRECTIONS // (seen * (engine.d + seen))))
    for where in loops.row_blocks(group.n_rows, size):
        yield where, RowsWithLaw(engine, where, g)


class Contribution(ABC):
    """Numbers of each unit, a function of its rows."""

    over_outcomes = False  # whether the law of the outcome must be known
    nonnegative = False

    @property
    @abstractmethod
    def size(self) -> int:
        """Entries per unit."""

    @abstractmethod
    def _values(self, engine: RowEngine) -> Blocks:
        """Units, and (size, units) values of these, valid until the next; some may be infinite."""

    def blocks(self, engine: RowEngine) -> Blocks:
        """Units, and their (size, units) values, 0 where not finite; they may be overwritten."""
        if isinstance(self, AtPoint):
            engine = engine.with_coordinates(self.coordinates)
        if self.over_outcomes:
            if why := law_unknown(engine):
                raise TypeError(why)
            assert not engine.is_tilted  # its scores are changes
            engine = engine.each_alone()
        step = max(1, min(BLOCK, _LARGEST // (self.size + 4 * engine.d)))
        for start in range(0, engine.n_units, step):
            with np.errstate(all="ignore"):
                part = engine.part(slice(start, min(start + step, engine.n_units)))
                for where, values in self._values(part):
                    loops.clean(values, values, 0)
                    yield slice(start + where.start, start + where.stop), values


@dataclass(frozen=True, eq=False)
class AtPoint(Contribution):
    """d numbers of each unit, in some coordinates."""

    coordinates: Coordinates

    @property
    def size(self) -> int:
        """Entries per unit."""
        return len(self.coordinates.location)


class _Number(AtPoint):
    """One number of each unit."""

    @property
    def size(self) -> int:
        """Entries per unit."""
        return 1


@dataclass(frozen=True, eq=False)
class Score(AtPoint):
    """The score vector g_i at z = 0, or those of its entries that `part`, (k,) integers, lists."""

    part: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Entries per unit."""
        return super().size if self.part is None else len(self.part)

    def _values(self, engine: RowEngine) -> Blocks:
        vectors = _vectors(engine)
        yield slice(0, engine.n_units), vectors if self.part is None else vectors[self.part]


@dataclass(frozen=True, eq=False)
class ConsistentScore(Score):
    """The clipped score vector at z = 0 plus its expected excess, c_i (see above)."""

    clip_norm: float = math.inf
    over_outcomes = True

    def _values(self, engine: RowEngine) -> Blocks:
        for where, units in units_with_outcomes(engine):
            yield where, units.clipped(self.clip_norm)


class LongestEntry(_Number):
    """The largest absolute entry of the score at z = 0, a bound on its projections on axes of z."""

    def _values(self, engine: RowEngine) -> Blocks:
        vectors = _vectors(engine)
        yield slice(0, engine.n_units), np.abs(vectors, out=vectors).max(axis=0, keepdims=True)


class LongestScore(_Number):
    """The norm that the score of a unit would have at z = 0 with the outcome that fits worst.

    All units have one, so noise does not hide it, as it does the few long scores of a rare outcome.
    """

    def _values(self, engine: RowEngine) -> Blocks:
        if not isinstance(engine, PredictorEngine):
            raise TypeError("The longest score is known for one linear predictor per row alone.")
        yield slice(0, engine.n_units), engine.longest_scores()


@dataclass(frozen=True, eq=False)
class Change(AtPoint):
    """The change of the score vector, g_i(z) - g_i(0)."""

    z: np.ndarray

    def _values(self, engine: RowEngine) -> Blocks:
        yield slice(0, engine.n_units), _vectors(engine.tilted(), self.z)


@dataclass(frozen=True, eq=False)
class Curvature(AtPoint):
    """The curvature H_i = -d g_i/d z at z = 0, by forward differences along the axes of z.

    Packed: the entries (j, k), j <= k, of (H_i + H_i')/2, row by row, those off the diagonal times
    sqrt(2), so that the l2 norm is the Frobenius norm; or, if `diagonal`, only the entries (j, j).
    `step` is the length of a difference, where the posterior has a width of about 1: for 0.01 the
    error is half a per cent of the change of curvature over that width, and cancellation 1e-14.
    Rows that :func:`sees_few` numbers have differences along these, as far as `step` moves them.
    """

    diagonal: bool = False
    step: float = 0.01

    @property
    def size(self) -> int:
        """Entries per unit."""
        d = super().size
        return d if self.diagonal else d * (d + 1) // 2

    def matrix(self, packed: np.ndarray) -> np.ndarray:
        """(d, d) symmetric matrix of packed entries (size,)."""
        if self.diagonal:
            return np.diag(packed)
        d = super().size
        matrix = np.zeros((d, d))
        matrix[np.triu_indices(d)] = packed
        matrix /= math.sqrt(2.0)
        matrix += matrix.T
        np.fill_diagonal(matrix, np.diag(matrix) / math.sqrt(2.0))
        return matrix

    def _values(self, engine: RowEngine) -> Blocks:
        if sees_few(engine):
            return engine.by_unit(self.size, lambda g: self._of_rows(engine, g))
        return iter([(slice(0, engine.n_units), self._along_axes(engine.tilted()))])

    def _of_rows(self, engine: RowEngine, g: int) -> Blocks:
        group = engine.groups[g]
        shared, n = group.shared(engine.coordinates), group.n_rows
        seen = group.seen(*shared)
        at_once = max(1, min(BLOCK, _DIRECTIONS // (len(seen) * (engine.d + len(seen)))))
        for start in range(0, n, at_once):
            rows = slice(start, min(start + at_once, n))
            directions = group.directions(*shared, rows)
            squares = np.zeros((len(seen), rows.stop - start))
            for u in directions.transpose(1, 0, 2):  # in one order, however many rows there are
                squares += u * u
            seconds = group.second_derivatives(*shared, rows, self.step, np.sqrt(squares))
            for where, block in loops.packed(seen, directions, seconds, self.diagonal):
                yield slice(start + where.start, start + where.stop), block

    def _along_axes(self, tilted: RowEngine) -> np.ndarray:
        d = tilted.d
        values = np.zeros((self.size, tilted.n_units))
        place = np.empty((d, d), dtype=np.int64)
        upper = np.triu_indices(d)
        place[upper] = place.T[upper] = np.arange(d * (d + 1) // 2)
        for k in range(d):
            z = np.zeros(d)
            z[k] = self.step
            column = _vectors(tilted, z)
            column *= -1.0 / self.step
            if self.diagonal:
                values[k] = column[k]
                continue
            for j in range(d):
                # (H_jk + H_kj)/2 sqrt(2): each of the two differences adds its half
                values[place[j, k]] += column[j] if j == k else column[j] * math.sqrt(0.5)
        return values


class OuterProduct(Curvature):
    """The outer product g_i g_i' of the score at z = 0, packed like a curvature.

    Its mean is that of the curvature if the model is true, also for Laplace and quantile terms.
    """

    def _values(self, engine: RowEngine) -> Blocks:
        vectors = _vectors(engine)
        everywhere, seconds = np.ones((1, engine.d), bool), np.full((1, 1, engine.n_units), -1.0)
        return loops.packed(everywhere, vectors[None], seconds, self.diagonal)


class ExpectedCurvature(Curvature):
    """An :class:`OuterProduct` averaged over the model's outcomes at z = 0: its tail is lighter."""

    over_outcomes = True

    def _values(self, engine: RowEngine) -> Blocks:
        return engine.by_unit(self.size, lambda g: self._of_rows(engine, g))

    def _of_rows(self, engine: RowEngine, g: int) -> Blocks:
        # scores have mean 0, and rows are independent
        for where, rows in rows_with_laws(engine, g):
            second = np.zeros((len(rows.scores), *rows.scores.shape))
            for weight, scores in zip(rows.law.weights, rows.of_outcomes(), strict=True):
                second += (weight * scores)[:, None] * scores
            # a row whose law is not found: its own outcome stands for those that it could have
            own = np.subtract(1.0, rows.law.weights.any(axis=0)) * rows.scores
            second += own[:, None] * rows.scores
            everywhere = np.ones(rows.directions.shape[:2], dtype=bool)
            for part, block in loops.packed(everywhere, rows.directions, -second, self.diagonal):
                yield slice(where.start + part.start, where.start + part.stop), block


class LawNotFound(_Number):
    """1 where the law of the outcome is not found at z = 0, else 0."""

    over_outcomes = True

    def _values(self, engine: RowEngine) -> Blocks:
        for where, units in units_with_outcomes(engine):
            yield where, units.unknown[None].copy()


@dataclass(frozen=True, eq=False)
class Loss(AtPoint):
    """With e = g - clip(g) at z = 0, over outcomes: variances of e, then covariances with g."""

    clip_norm: float
    over_outcomes = True

    @property
    def size(self) -> int:
        """Entries per unit: 2 d."""
        return 2 * super().size

    def _values(self, engine: RowEngine) -> Blocks:
        for where, units in units_with_outcomes(engine):
            yield where, units.lost(self.clip_norm)


@dataclass(frozen=True, eq=False)
class PathError(_Number):
    """The energy error of a public path of the anchored Langevin sampler.

    e_i = l_i(z_L) - l_i(z_0) - sum_j clip(g_i(mid_j) - g_i(0)) . (z_{j+1} - z_j)
      - g_i(0) . (z_L - z_0), for `points` z_0, ..., z_L, (L + 1, d), and `midpoints`, (L, d).
    """

    points: np.ndarray
    midpoints: np.ndarray
    clip_norm: float

    def _values(self, engine: RowEngine) -> Blocks:
        tilted, points = engine.tilted(), self.points
        error = tilted.log_likelihood(points[-1]) - tilted.log_likelihood(points[0])
        factor = np.empty(tilted.n_units)
        for midpoint, start, end in zip(self.midpoints, points[:-1], points[1:], strict=True):
            scores = tilted.scores(midpoint)
            for where, vectors in tilted.vectors(scores):
                loops.clip_factors(vectors, self.clip_norm, factor[where])
            error -= tilted.work(scores, start, end, factor)
        yield slice(0, tilted.n_units), error[None]


@dataclass(frozen=True, eq=False)
class Statistic(Contribution):
    """A statistic of the data of one record, for engines of one group whose rows are units.

    ``rows(arrays)`` gives (m, n) values from arrays of n records, records first; a column is a
    function of its own record.  `entries` is m.  `norm` is a public bound on the l2 norm of a
    unit's entries, once clamped: to at least 0 if `nonnegative`, to [-1, 1] if `boxed`.
    """

    rows: Callable[[list[np.ndarray]], np.ndarray]
    entries: int
    norm: float
    nonnegative: bool = False
    boxed: bool = False

    @property
    def size(self) -> int:
        """Entries per unit."""
        return self.entries

    def _values(self, engine: RowEngine) -> Blocks:
        if not engine.one_row_per_unit:
            raise TypeError("A statistic is known for records of one row each alone.")
        found = np.ascontiguousarray(self.rows(engine.groups[0].store.read()))
        if self.boxed:
            loops.clean(found, found, 0)  # what is infinite is 0, and not an end of the box
            np.clip(found, -1.0, 1.0, out=found)
        yield slice(0, engine.n_units), found


def _vectors(engine: RowEngine, z: np.ndarray | None = None) -> np.ndarray:
    """(d, n_units) score vectors at z, or at 0."""
    out = np.empty((engine.d, engine.n_units))
    for where, block in engine.vectors(engine.scores(np.zeros(engine.d) if z is None else z)):
        out[:, where] = block
    return out


def sees_few(engine: RowEngine) -> bool:
    """Whether rows see z through at least one and at most d numbers, all of them affine in z."""
    counts = []
    for group in engine.groups:
        functions = group.functions
        fixed = zip(functions.constant_jacobians, functions.differentiable, strict=True)
        if any(constant is None for constant, smooth in fixed if smooth):
            return False
        counts.append(len(group.seen(*group.shared(engine.coordinates))))
    return 1 <= min(counts) and max(counts) <= engine.d


# A forecast needs the tail of the scores.  Features are made up, outcomes have the model's law at a
# public point, and the posterior is white in the coordinates; no record is read.

_ROWS = 1000
#: Part of laws not found, and condition number of the curvature, from which on a place says little.
_NOT_FOUND, _CONDITION, _MOST_PARAMETERS = 0.05, 1e8, 60

Norms = tuple[np.ndarray, np.ndarray]


def score_norms(records: Records) -> Norms | None:
    """Norms of the scores of made-up records, about PyMC's initial point."""
    at = Coordinates(records.initial, np.eye(records.parameters.size))
    return made_up_norms(RowEngine.of(records, at), records.initial)


def made_up_norms(engine: RowEngine, theta: np.ndarray) -> Norms | None:
    """(k,) norms of scores of one record in whitened coordinates, and their probabilities.

    Only public parts of `engine` are used; None if laws are unknown, or a public `theta` no guide.
    """
    d = engine.d
    if d > _MOST_PARAMETERS or law_unknown(engine) or engine.index_blocks(theta):
        return None
    if not engine.one_row_per_unit:  # how many rows a unit has is private
        return None
    made = _with_features(engine, np.random.default_rng(0)).each_alone()
    with np.errstate(all="ignore"):
        spec = ExpectedCurvature(Coordinates(theta, np.eye(d)))
        made = made.with_coordinates(spec.coordinates)
        total = np.sum([v.sum(axis=1) for _, v in spec._values(made)], axis=0)
        values, vectors = np.linalg.eigh(spec.matrix(total / _ROWS))
        if not (np.isfinite(values).all() and values[0] * _CONDITION > values[-1] > 0.0):
            return None
        made = made.with_coordinates(Coordinates(theta, vectors / np.sqrt(values)))
        norms, weights = np.hstack([units.norms() for _, units in units_with_outcomes(made)])
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
