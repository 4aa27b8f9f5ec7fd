"""What a unit is expected to add, over outcomes that the model at z = 0 would draw for it.

The scores of such outcomes have mean 0 (the model's own score identity), so that what clipping
takes from them is known on average: the *expected excess*

    c_i = E[g(y*, x_i) - clip(g(y*, x_i))].

Added to the clipped score of the unit, it takes the bias of clipping away, whatever the bound.
Everything here is a function of one unit: of its data, the parameters, and constants.  For a unit
of one row with one outcome, all of it happens in terms of what rows see
(:mod:`pymc_dp.rows.groups`): a score is sum_a u_a s_a, with directions u_a that do not depend on
the outcome.  Several outcomes, those of several rows or variables, are independent:
:mod:`pymc_dp.rows.joint`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from pytensor.graph.basic import Variable

from pymc_dp.base.jit import compiled
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import Cut, RowGraph
from pymc_dp.rows import loops
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import rows_of, width
from pymc_dp.rows.joint import POINTS, JointPoints, add_centred, fractions, hashed, repetitions
from pymc_dp.rows.law import LogDensity, law_of, most_nodes

#: Numbers of a block of directions: what fits into the third level of cache.
_DIRECTIONS = 2**20
#: Numbers of the joint points of a block of units.
_JOINT = 2**22


def law_unknown(engine: RowEngine) -> str:
    """Why the law of what a unit observes is not known, in one public sentence; empty if it is."""
    graphs = [group.functions.graph for group in engine.groups]
    read = [_sources(graph) for graph in graphs]
    for k, graph in enumerate(graphs):
        seen = set().union(*read[:k], *read[k + 1 :])
        observed = {graph.leaves[outcome.leaf].source for outcome in graph.outcomes}
        if not observed or observed & seen:
            return (
                f"The support of {graph.quoted} is not known, or what is observed is a covariate "
                "too."
            )
    return ""


def _sources(graph: RowGraph) -> set[Variable]:
    """The arrays whose entries matter."""
    columns = [cut.row_data for cut in graph.cuts if cut.row_data is not None]
    behind = ancestors_without_shapes([*graph.terms, *columns])
    return {leaf.source for leaf in graph.leaves if leaf.block in behind}


def expected_products(engine: RowEngine, g: int, diagonal: bool) -> Iterator[tuple[slice, ndarray]]:
    """Packed E[g g'] of the rows of a group, which have mean 0 and are independent."""
    for where, rows in _blocks(engine, g):
        scores = rows.scores
        second = np.zeros((len(scores), *scores.shape))
        nothing = np.zeros(scores.shape[1])
        for weight, other in rows.outcomes():
            _add_products(weight, other, nothing, 0, second)
        _add_products(rows.unknown, scores, nothing, 0, second)
        for part, block in rows.packed(second, diagonal):
            yield slice(where.start + part.start, where.start + part.stop), block


@dataclass(frozen=True, eq=False)
class _Copies:
    """Numbers that all rows see alike, as the fewer parameters that they are functions of.

    `copied`, (K,) bool, tells which of the numbers that rows see are alike; jacobian: (copied, p).
    """

    copied: ndarray
    parameters: ndarray
    jacobian: ndarray

    @classmethod
    def of(
        cls, cuts: Sequence[Cut], phis: Sequence[ndarray], jacobians: Sequence[ndarray | None]
    ) -> _Copies:
        """Those of a group; none where that would not make them fewer."""
        moving = [
            (cut.kind == "copy", width(cut, phi), matrix)
            for cut, phi, matrix in zip(cuts, phis, jacobians, strict=True)
            if matrix is not None
        ]
        copied = np.array([copy for copy, width, _ in moving for _ in range(width)])
        if copied.any():
            jacobian = np.concatenate([matrix for copy, _, matrix in moving if copy])
            parameters = np.flatnonzero(jacobian.any(axis=0))
            if len(parameters) < len(jacobian):
                return cls(copied, parameters, jacobian[:, parameters])
        return cls(np.zeros_like(copied), np.empty(0, dtype=int), np.empty((0, 0)))

    def scores(self, parts: Sequence[ndarray]) -> ndarray:
        """(k, rows) of each cut -> (K', rows): by the parameters instead of by their copies."""
        if not len(self.parameters):
            return np.concatenate(parts)
        own, n = len(self.copied) - len(self.jacobian), parts[0].shape[1]
        found = np.zeros((own + len(self.parameters), n))
        begin = copies = 0
        for part in parts:
            end = begin + len(part)
            if self.copied[begin:end].any():
                _add_copies(self.jacobian[copies : copies + len(part)], part, found[own:])
                copies += len(part)
            else:
                found[begin - copies : end - copies] = part
            begin = end
        return found

    def directions(self, directions: ndarray, scaling: ndarray) -> ndarray:
        """The same of directions in z, (K, d, rows)."""
        if not len(self.parameters):
            return directions
        n = directions.shape[2]
        own = np.repeat(scaling[self.parameters][:, :, None], n, axis=2)
        return np.concatenate([directions[~self.copied], own])


class _Rows:
    """Rows of a group: directions, their products, scores of the outcomes that are and could be.

    A row whose law is not found is `unknown`.  Nothing is given back to it, and its own outcome
    stands for those that it could have in what clipping loses and in its curvature.
    """

    def __init__(self, engine: RowEngine, where: slice, g: int = 0) -> None:
        group = engine.groups[g].rows(where)
        functions = group.functions
        self._tried = functions.of_outcomes
        self._data = [np.asarray(array) for array in group.store.read()]
        everyone, scaling = slice(0, group.n_rows), engine.coordinates.scaling
        self._phis, jacobians = functions.shared(engine.coordinates.location)
        maps = [None if jacobian is None else jacobian @ scaling for jacobian in jacobians]
        directions = group.directions(self._phis, maps, everyone)
        self._used = [jacobian is not None for jacobian in jacobians]
        self._copies = _Copies.of(functions.ordered, self._phis, jacobians)
        self.directions = self._copies.directions(directions, scaling)
        self._etas, self._labels, blocks = group.inputs(self._phis, everyone)
        self.scores = self._parts(functions.scores(self._etas, self._phis, self._labels, blocks))
        self._constants = self._tried.constants(self._etas, self._phis, self._labels, self._data)
        self.gram = np.empty((len(self.scores), *self.scores.shape))
        _products(self.directions, self.gram)
        [self.outcome] = functions.graph.outcomes
        self._law = law_of(self.outcome, self._data, self._shifts_of, self._density_of)
        self.unknown: ndarray = np.subtract(1.0, self._law.weights.any(axis=0))

    def _parts(self, found: list[ndarray | None]) -> ndarray:
        parts = [
            np.ascontiguousarray(s.T)
            for s, used in zip(found, self._used, strict=True)
            if s is not None and used
        ]
        scores = self._copies.scores(parts)
        loops.clean(scores)
        return scores

    def _with(self, outcome: ndarray, data: list[ndarray]) -> list[ndarray]:
        data, leaf = list(data), self.outcome.leaf
        old = data[leaf]
        data[leaf] = outcome.astype(old.dtype, copy=False).view()
        data[leaf].flags.writeable = old.flags.writeable
        return data

    def _shifts_of(self, some: slice | ndarray) -> ndarray:
        columns = [rows_of(self._data[k], some) for k in self.outcome.hashed]
        n = len(columns[0])
        return np.asarray(fractions(hashed(columns, np.arange(n), n)))

    def _density_of(self, some: slice | ndarray) -> LogDensity:
        etas, labels, constants = (
            [array[some] for array in found]
            for found in (self._etas, self._labels, self._constants)
        )
        data = [rows_of(array, some) for array in self._data]

        def log_density(outcome: ndarray) -> ndarray:
            blocks = [*self._with(outcome, data), *constants]
            found = self._tried.loglik(etas, self._phis, labels, blocks)
            return np.asarray(found, dtype="float64")

        return log_density

    def _scores(self, outcome: ndarray) -> ndarray:
        blocks = [*self._with(outcome, self._data), *self._constants]
        return self._parts(self._tried.scores(self._etas, self._phis, self._labels, blocks))

    def outcomes(self) -> Iterator[tuple[ndarray, ndarray]]:
        """Weights, (rows,), and scores, (K, rows), of the outcomes that could be."""
        for node, weight in zip(self._law.nodes, self._law.weights, strict=True):
            if weight.any():
                yield weight, self._scores(node)

    def packed(self, second: ndarray, diagonal: bool) -> Iterator[tuple[slice, ndarray]]:
        """Blocks of rows, of packed matrices; `second` (K, K, rows) is by what rows see."""
        seen = np.ones(self.directions.shape[:2], dtype=bool)
        return loops.packed(seen, self.directions, -second, diagonal)

    def clipped(self, clip_norm: float) -> ndarray:
        """(d, rows) scores, clipped to a norm, plus what that takes from them on average."""
        factors = np.empty(self.scores.shape[1])
        _factors(self.scores, self.gram, clip_norm, factors)
        total = self.scores * factors
        excess, mean = np.zeros_like(total), np.zeros_like(total)
        taken, square = np.zeros_like(factors), np.zeros_like(factors)
        for weight, other in self.outcomes():
            _add_excess(weight, other, self.gram, clip_norm, excess, mean, taken, square)
        add_centred(excess, mean, taken, square, total)
        return _assembled(self.directions, total)

    def lost(self, clip_norm: float) -> ndarray:
        """(2 d, rows): variances of what clipping takes, then its covariances with the score."""
        scores = self.scores
        factors, mean = np.empty(scores.shape[1]), np.zeros_like(scores)
        lost, shared = (np.zeros((len(scores), *scores.shape)) for _ in range(2))
        for weight, other in self.outcomes():
            _factors(other, self.gram, clip_norm, factors)
            mean += weight * (1.0 - factors) * other
            _add_products(weight, other, factors, 2, lost)
            _add_products(weight, other, factors, 1, shared)
        lost -= mean[:, None] * mean
        _factors(scores, self.gram, clip_norm, factors)
        _add_products(self.unknown, scores, factors, 2, lost)
        _add_products(self.unknown, scores, factors, 1, shared)
        d = self.directions.shape[1]
        out = np.empty((2 * d, scores.shape[1]))
        for entries, seconds in ((slice(0, d), lost), (slice(d, 2 * d), shared)):
            for part, block in self.packed(seconds, True):
                out[entries, part] = block
        return out

    def norms(self) -> Iterator[tuple[ndarray, ndarray]]:
        """Norms of the scores that rows could have, and weights."""
        for weight, scores in self.outcomes():
            squares = np.empty(len(weight))
            _squares(scores, self.gram, squares)
            yield np.sqrt(squares), weight

    def add_to(self, points: JointPoints, units: ndarray, times: ndarray) -> None:
        """Add these rows to what their units could observe."""
        weights = self._law.weights
        scores = np.zeros((len(weights), *self.scores.shape))
        for at, node, weight in zip(scores, self._law.nodes, weights, strict=True):
            if weight.any():
                at[:] = self._scores(node)
        points.add(units, times, most_nodes(self.outcome), weights, scores, self.directions)


def units_with_outcomes(engine: RowEngine) -> Iterator[tuple[slice, _Rows | JointPoints]]:
    """Units, with what they could observe.

    The law must be known (:func:`law_unknown`), and each observed variable alone
    (`RowEngine.each_alone`).
    """
    return _blocks(engine, 0) if engine.one_row_per_unit else _joint_blocks(engine)


def _joint_blocks(engine: RowEngine) -> Iterator[tuple[slice, JointPoints]]:
    for where in loops.row_blocks(engine.n_units, max(1, _JOINT // (POINTS * engine.d))):
        part = engine.part(where)
        scores = np.empty((part.d, part.n_units))
        for some, block in part.vectors(part.scores(np.zeros(part.d))):
            scores[:, some] = block
        combinations, seeds = np.ones(part.n_units), np.zeros(part.n_units, dtype="uint64")
        terms = []
        for group in part.groups:
            units = np.arange(group.n_rows) if group.units is None else group.units
            data = group.store.read()
            [outcome] = group.functions.graph.outcomes
            seeds += hashed([data[k] for k in outcome.hashed], units, part.n_units)
            size, times = most_nodes(outcome), np.ones(len(units), dtype="int64")
            if size == 2:
                times = repetitions([x for k, x in enumerate(data) if k != outcome.leaf], units)
            np.multiply.at(combinations, units, np.where(times > 0, size + times - 1.0, 1.0))
            terms.append((units, times))
        points = JointPoints(scores, seeds, combinations)
        for g, (units, times) in enumerate(terms):
            for some, rows in _blocks(part, g):
                rows.add_to(points, units[some], times[some])
        yield where, points


def _blocks(engine: RowEngine, g: int) -> Iterator[tuple[slice, _Rows]]:
    group = engine.groups[g]
    phis, jacobians = group.functions.shared(engine.coordinates.location)
    seen = len(group.seen(phis, jacobians))
    size = max(1, min(8192, _DIRECTIONS // (seen * (engine.d + seen))))
    for where in loops.row_blocks(group.n_rows, size):
        yield where, _Rows(engine, where, g)


@compiled(error_model="numpy")
def _add_copies(jacobian: ndarray, scores: ndarray, out: ndarray) -> None:
    """out[k] += jacobian[j, k] scores[j], where the first is not 0."""
    for j in range(jacobian.shape[0]):
        for k in range(jacobian.shape[1]):
            slope, score, own = jacobian[j, k], scores[j], out[k]
            if slope != 0.0:
                for i in range(score.shape[0]):
                    own[i] += slope * score[i]


@compiled(error_model="numpy")
def _products(directions: ndarray, out: ndarray) -> None:
    """out[a, b, i] = u_a . u_b."""
    width, d, n = directions.shape
    for a in range(width):
        for b in range(a + 1):
            y = out[a, b]
            y[:] = 0.0
            for j in range(d):
                u, v = directions[a, j], directions[b, j]
                for i in range(n):
                    y[i] += u[i] * v[i]
            if b < a:
                out[b, a] = y


@compiled(error_model="numpy")
def _squares(scores: ndarray, gram: ndarray, out: ndarray) -> None:
    """out[i] = |sum_a u_a s_a|^2."""
    width, n = scores.shape
    out[:] = 0.0
    for a in range(width):
        for b in range(a + 1):
            s, t, g, times = scores[a], scores[b], gram[a, b], 1.0 if a == b else 2.0
            for i in range(n):
                out[i] += times * s[i] * t[i] * g[i]
    for i in range(n):
        out[i] = math.fabs(out[i])  # 0 may have been rounded to less


@compiled(error_model="numpy")
def _factors(scores: ndarray, gram: ndarray, clip_norm: float, out: ndarray) -> None:
    """out[i] = min(1, clip_norm / |sum_a u_a s_a|), 0 where the norm is not finite."""
    _squares(scores, gram, out)
    loops.to_factors(out, clip_norm)


@compiled(error_model="numpy")
def _add_excess(
    weights: ndarray,
    scores: ndarray,
    gram: ndarray,
    clip_norm: float,
    excess: ndarray,
    mean: ndarray,
    taken: ndarray,
    square: ndarray,
) -> None:
    """Add w e and w g, with e what clipping takes from g; and of w |g|^2 what it takes, and all."""
    width, n = scores.shape
    squares, rest = np.empty(n), np.empty(n)
    _squares(scores, gram, squares)
    rest[:] = squares
    loops.to_factors(rest, clip_norm)
    for i in range(n):
        rest[i] = weights[i] * (1.0 - rest[i])
        finite = squares[i] < math.inf
        square[i] += weights[i] * squares[i] if finite else 0.0
        taken[i] += rest[i] * squares[i] if finite else 0.0
    for a in range(width):
        s, m, e = scores[a], mean[a], excess[a]
        for i in range(n):
            m[i] += weights[i] * s[i]
            e[i] += rest[i] * s[i]


@compiled(error_model="numpy")
def _add_products(
    weights: ndarray, scores: ndarray, factors: ndarray, power: int, out: ndarray
) -> None:
    """out[a, b, i] += w_i (1 - f_i)^power s_a s_b."""
    width, n = scores.shape
    for a in range(width):
        for b in range(width):
            s, t, y = scores[a], scores[b], out[a, b]
            for i in range(n):
                weight = weights[i]
                for _ in range(power):
                    weight *= 1.0 - factors[i]
                y[i] += weight * s[i] * t[i]


@compiled(error_model="numpy")
def _assembled(directions: ndarray, scores: ndarray) -> ndarray:
    """(d, rows) sum_a u_a s_a."""
    width, d, n = directions.shape
    out = np.zeros((d, n))
    for a in range(width):
        for j in range(d):
            u, s, y = directions[a, j], scores[a], out[j]
            for i in range(n):
                y[i] += u[i] * s[i]
    return out
