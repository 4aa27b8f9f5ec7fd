"""What a unit is expected to add, over outcomes that the model at z = 0 would draw for it.

The scores of such outcomes have mean 0 (the score identity), so what clipping takes from them on
average is known, the *expected excess* c_i = E[g(y*, x_i) - clip(g(y*, x_i))].  Added to the
clipped score it removes the bias of clipping, whatever the bound, where the model is true and z = 0
is near the truth.  It is a function of one unit: of its data, the parameters, and constants.  What
a row could observe has the scores sum_a u_a s_a, with directions u_a that do not depend on the
outcome (:mod:`pymc_dp.rows.groups`).  Rows of a unit are independent (:mod:`pymc_dp.rows.joint`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy import ndarray
from pytensor.graph.basic import Variable

from pymc_dp.base.jit import compiled
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import RowGraph
from pymc_dp.rows import loops
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import BLOCK, rows_of
from pymc_dp.rows.joint import POINTS, JointPoints, fractions, hashed, repetitions
from pymc_dp.rows.law import LogDensity, law_of, most_nodes

_DIRECTIONS = 2**20  # numbers of a block of directions: what fits into the third level of cache
_JOINT = 2**22  # numbers of the joint points of a block of units


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
        second = np.zeros((len(rows.scores), *rows.scores.shape))
        for weight, scores in zip(rows.law.weights, rows.of_outcomes(), strict=True):
            _add_products(weight, scores, second)
        # a row whose law is not found: its own outcome stands for those that it could have
        _add_products(np.subtract(1.0, rows.law.weights.any(axis=0)), rows.scores, second)
        everywhere = np.ones(rows.directions.shape[:2], dtype=bool)
        for part, block in loops.packed(everywhere, rows.directions, -second, diagonal):
            yield slice(where.start + part.start, where.start + part.stop), block


class _Rows:
    """Rows of a group: directions, and scores of the outcomes that are and could be."""

    def __init__(self, engine: RowEngine, where: slice, g: int) -> None:
        group = engine.groups[g].rows(where)
        functions = group.functions
        self._tried = functions.of_outcomes
        self._data = [np.asarray(array) for array in group.store.read()]
        everyone, scaling = slice(0, group.n_rows), engine.coordinates.scaling
        self._phis, jacobians = functions.shared(engine.coordinates.location)
        maps = [None if jacobian is None else jacobian @ scaling for jacobian in jacobians]
        self.directions = group.directions(self._phis, maps, everyone)
        self._used = [jacobian is not None for jacobian in jacobians]
        self._etas, self._labels, blocks = group.inputs(self._phis, everyone)
        self.scores = self._parts(functions.scores(self._etas, self._phis, self._labels, blocks))
        self._constants = self._tried.constants(self._etas, self._phis, self._labels, self._data)
        [self.outcome] = functions.graph.outcomes
        self.law = law_of(self.outcome, self._data, self._shifts_of, self._density_of)

    def _parts(self, found: list[ndarray | None]) -> ndarray:
        parts = [
            np.ascontiguousarray(s.T)
            for s, used in zip(found, self._used, strict=True)
            if s is not None and used
        ]
        scores = np.concatenate(parts)
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

    def of_outcomes(self) -> ndarray:
        """(nodes, K, rows) scores of the outcomes that could be, 0 where none has a weight."""
        law = self.law
        found = np.zeros((len(law.weights), *self.scores.shape))
        for scores, node, weight in zip(found, law.nodes, law.weights, strict=True):
            if weight.any():
                scores[:] = self._scores(node)
        return found


def units_with_outcomes(engine: RowEngine) -> Iterator[tuple[slice, JointPoints]]:
    """Units, with what they could observe, for an engine `each_alone` whose laws are known."""
    sizes = [most_nodes(*group.functions.graph.outcomes) for group in engine.groups]
    points = sizes[0] if engine.one_row_per_unit else POINTS
    at_once = max(1, min(BLOCK, _JOINT // (points * engine.d)))
    for where in loops.row_blocks(engine.n_units, at_once):
        part = engine.part(where)
        scores = np.empty((part.d, part.n_units))
        for some, block in part.vectors(part.scores(np.zeros(part.d))):
            scores[:, some] = block
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
        found = JointPoints(scores, seeds, combinations)
        for g, (units, times) in enumerate(terms):
            for some, rows in _blocks(part, g):
                own = rows.law.weights, rows.of_outcomes(), rows.directions
                found.add(units[some], times[some], sizes[g], *own)
        yield where, found


def _blocks(engine: RowEngine, g: int) -> Iterator[tuple[slice, _Rows]]:
    group = engine.groups[g]
    phis, jacobians = group.functions.shared(engine.coordinates.location)
    seen = len(group.seen(phis, jacobians))
    size = max(1, min(BLOCK, _DIRECTIONS // (seen * (engine.d + seen))))
    for where in loops.row_blocks(group.n_rows, size):
        yield where, _Rows(engine, where, g)


@compiled(error_model="numpy")
def _add_products(weights: ndarray, scores: ndarray, out: ndarray) -> None:
    """out[a, b, i] += w_i s_a s_b."""
    width, n = scores.shape
    for a in range(width):
        for b in range(width):
            s, t, y = scores[a], scores[b], out[a, b]
            for i in range(n):
                y[i] += weights[i] * s[i] * t[i]
