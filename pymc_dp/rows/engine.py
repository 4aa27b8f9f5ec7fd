"""Row engine: per-record log-likelihoods and score vectors of a whole data set, block by block.

The engine is data access without privacy: only :mod:`pymc_dp.privacy` holds one, and calls it after
the ledger has been charged.  Everything is in the coordinates z of ``theta = m + A z``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, Self

import numpy as np

from pymc_dp.base.matrices import Coordinates
from pymc_dp.records.extraction import Records
from pymc_dp.records.graph import ParameterVector
from pymc_dp.rows import groups as row_groups
from pymc_dp.rows import loops
from pymc_dp.rows.functions import RowFunctions
from pymc_dp.rows.groups import RowGroup, Scores
from pymc_dp.rows.linear import LinearRows
from pymc_dp.rows.loops import Layout, ScaledDesign, SparseBlock

_CACHED = 2**16  # numbers of a block of vectors: half of a second-level cache

_WIDE, _LOOKS = (1.0, 3.0, 10.0), 3  # distances, relative to 1 + |theta|, and looks at each

_MAKING = threading.Lock()  # held while a thread makes what all keep


Blocks = Iterator[tuple[slice, np.ndarray]]


class RowEngine:
    """Per-unit log-likelihoods and score vectors; units are records, or users."""

    def __init__(
        self,
        groups: list[RowGroup],
        parameters: ParameterVector,
        n_units: int,
        coordinates: Coordinates,
    ) -> None:
        self.groups = groups
        self.parameters = parameters
        self.n_units = n_units
        self.coordinates = coordinates
        self.is_tilted = False
        self._keeps = True  # whether it will be asked more than once
        self._forget_all()

    def _forget_all(self) -> None:
        """Keep nothing that is made at the first use, in these coordinates."""
        self._designs: dict[tuple[int, int], tuple[bytes, ScaledDesign]] = {}
        self._layouts: dict[int, Layout] = {}
        self._reference: Any = None
        self._moved: Self | None = None

    @classmethod
    def of(
        cls,
        records: Records,
        coordinates: Coordinates,
        compile_kwargs: dict[str, Any] | None = None,
    ) -> RowEngine:
        """Compile the functions of the records of a model."""
        groups = [
            RowGroup(RowFunctions(g.graph, records.parameters, compile_kwargs), g.store, g.units)
            for g in records.groups
        ]
        return cls(groups, records.parameters, records.n_units, coordinates)

    def _but(self, **changes: Any) -> Self:
        """The same engine, with changes and nothing kept."""
        other = copy(self)
        other.__dict__.update(changes)
        other._forget_all()
        return other

    def on(self, groups: list[RowGroup], n_units: int) -> Self:
        """The same functions, in the same coordinates, on other records."""
        return self._but(groups=groups, n_units=n_units)

    def of_another_chain(self) -> Self:
        """The same records, and what was made of them, with a memory of its own."""
        other = copy(self)
        other.forget()
        return other

    def release_memory(self) -> None:
        """Keep nothing that was made of the records, until it is needed again."""
        self._forget_all()
        for group in self.groups:
            group.release_memory()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_designs": {}, "_reference": None, "_moved": None}

    @property
    def d(self) -> int:
        """Number of parameters."""
        return self.parameters.size

    @property
    def reads(self) -> int:
        """How often the private arrays were asked for, over all groups."""
        return sum(group.store.reads for group in self.groups)

    @property
    def elsewhere(self) -> Any:
        """Who has the records, if this process does not."""
        return self.groups[0].store.elsewhere

    @property
    def one_row_per_unit(self) -> bool:
        """True when rows are units, so that nothing has to be summed by unit."""
        return len(self.groups) == 1 and self.groups[0].units is None

    def synthetic(self, value: int | None = 0, first: int = 0, last: int | None = None) -> Self:
        """The functions on made-up data (`value`: see `RecordStore.synthetic`); reads no record.

        Of the units `first` to `last`, with nothing that was computed from others.
        """
        groups, n_units = [], 0
        for group in self.groups:
            n_rows = min(group.n_rows, row_groups.BLOCK + 2)  # array layouts are the same
            made = group.synthetic(n_rows if value == 0 else max(n_rows, 4), value, first, last)
            groups.append(made)
            users = value is None and made.units is not None
            n_units = max(n_units, -(-made.n_rows // 2) if users else made.n_rows)
        return self.on(groups, n_units)

    def with_coordinates(self, coordinates: Coordinates) -> Self:
        """The same records in other coordinates; parameter-free columns are shared."""
        if coordinates.same(self.coordinates):
            return self
        if self._moved is None or not coordinates.same(self._moved.coordinates):
            self._moved = self._but(coordinates=coordinates)  # several releases ask for it
        return self._moved

    def tilted(self) -> Self:
        """The same records, measured against their linearisation at z = 0.

        The log-likelihood of a unit is then l_i(z) - g_i(0) . z, and its score vector g_i(z) -
        g_i(0).  Scores are subtracted row by row where d phi / d z is constant.  Elsewhere a row
        has the scores s and -s0 at twice as many shared values, at z and at 0.  The private
        reference is not pickled, and made at the first use in a process, after the ledger has been
        charged.
        """
        if self.is_tilted:
            return self
        tilted = self._but(is_tilted=True)
        tilted._designs, tilted._layouts = self._designs, self._layouts
        return tilted

    def part(self, units: slice | np.ndarray) -> Self:
        """The records of some units, in ascending order, with the same bits."""
        count = units.stop - units.start if isinstance(units, slice) else len(units)
        groups = [group.part(units, self.n_units) for group in self.groups]
        return self._but(groups=groups, n_units=count, _keeps=False)

    def each_alone(self) -> RowEngine:
        """The same units, with a group of rows for each observed variable that has parameters."""
        every = (alone for group in self.groups for alone in group.each_alone())
        groups = [alone for alone in every if alone.functions.graph.cuts]
        if groups == self.groups:
            return self
        return RowEngine(groups, self.parameters, self.n_units, self.coordinates)

    def index_blocks(self, theta: np.ndarray) -> list[np.ndarray]:
        """Blocks of parameters of which a row sees one entry at a time; the others are dense.

        A block's k >= 2 indices reach the rows through "index" cuts alone, each in one label of a
        cut, all in the same columns: the intercepts ``alpha[g]``, the ``z`` of ``(mu + tau *
        z)[g]``, each column of ``slopes[g]``.  Public: read from the zeros of d phi / d theta at a
        public `theta`.
        """
        dense: set[int] = set()
        labels: dict[int, set[tuple[int, int, int]]] = {}
        columns: dict[int, set[tuple[int, int, int]]] = {}
        for g, group in enumerate(self.groups):
            for at in _places(theta):
                phis, jacobians = group.functions.shared(at)
                for k, cut in enumerate(group.functions.ordered):
                    jacobian = jacobians[k]
                    if jacobian is None:
                        continue
                    entries, parameters = np.nonzero(jacobian)
                    if cut.kind != "index":
                        dense.update(parameters.tolist())
                        continue
                    width = phis[k].size // len(phis[k])
                    for entry, j in zip(entries.tolist(), parameters.tolist(), strict=True):
                        labels.setdefault(j, set()).add((g, k, entry // width))
                        columns.setdefault(j, set()).add((g, k, entry % width))
        found: dict[frozenset[tuple[int, int, int]], list[int]] = {}
        for j in sorted(labels.keys() - dense):
            if len(labels[j]) == len({(g, k) for g, k, _ in labels[j]}):
                found.setdefault(frozenset(columns[j]), []).append(j)
        return [np.array(block, dtype=np.int64) for block in found.values() if len(block) > 1]

    def effects(self, theta: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Index blocks, and coordinates in which their entries are the effects that rows see.

        T, (d, d), of theta' = T theta is the identity, but for rows of a block: derivatives of its
        effects by theta, at a public `theta`.  For ``(mu + tau * z)[g]`` group means replace the
        ``z``: a row of a group has no score in ``mu`` and ``tau``, and the ridge along these needs
        no noise.
        """
        blocks = self.index_blocks(theta)
        change = np.eye(theta.size)
        rows: dict[int, list[np.ndarray]] = {}
        members = {int(j) for block in blocks for j in block}
        for group in self.groups:
            _, jacobians = group.functions.shared(theta)
            for k, cut in enumerate(group.functions.ordered):
                jacobian = jacobians[k]
                if cut.kind != "index" or jacobian is None:
                    continue
                for j in members:
                    for entry in np.flatnonzero(jacobian[:, j]):
                        rows.setdefault(j, []).append(jacobian[entry])
        for block in blocks:
            # an effect that is seen through several cuts has no one row that stands for it
            if all(len(rows.get(int(j), [])) == 1 for j in block):
                for j in map(int, block):
                    change[j] = rows[j][0]
        if not np.linalg.cond(change) < 1e8:
            change = np.eye(theta.size)
        return blocks, change

    def touched(self, coordinates: Coordinates) -> np.ndarray:
        """(d, d) which of some coordinates z a row may see together; symmetric.

        Where False, the entry of every unit's curvature is 0; on the diagonal, that of every score.
        Public, as :func:`index_blocks`; also looked at far away: max(b, 0) is flat on one side.
        """
        theta, scaling = coordinates.location, coordinates.scaling
        d, rng = theta.size, np.random.default_rng(1)
        steps = np.repeat(_WIDE, _LOOKS)[:, None] * rng.standard_normal((_LOOKS * len(_WIDE), d))
        places = [*_places(theta), *(theta + steps * (1.0 + np.abs(theta)))]
        sizes = np.abs(scaling)
        pairs = np.zeros((d, d), dtype=bool)
        for group in self.groups:
            functions = group.functions
            supports: dict[int, np.ndarray] = {}  # per cut, (labels, d) of 0 and 1
            for number, at in enumerate(places if functions.varying else places[:1]):
                with np.errstate(all="ignore"):
                    phis, jacobians = functions.shared(at)
                for k, (cut, jacobian) in enumerate(zip(functions.ordered, jacobians, strict=True)):
                    if jacobian is None or (number and k not in functions.varying):
                        continue
                    given = np.where(np.isfinite(jacobian), jacobian, 1.0)
                    # what cancels leaves rounding errors
                    moved = ~(np.abs(given @ scaling) - 1e-12 * (np.abs(given) @ sizes) <= 0.0)
                    labels = len(phis[k]) if cut.kind == "index" else 1
                    support = moved.reshape(labels, -1, d).any(axis=1).astype("float64")
                    supports[k] = np.maximum(supports.get(k, 0.0), support)
            found = list(supports.values())
            for k, a in enumerate(found):
                pairs |= a.T @ a > 0.0
                for b in found[:k]:
                    both = np.outer(a.any(axis=0), b.any(axis=0))
                    pairs |= both | both.T
        return pairs

    # -- what rows see --------------------------------------------------------------------------

    def by_unit(self, size: int, of_rows: Callable[[int], Blocks]) -> Blocks:
        """(size, units) numbers of units: the sums of those of the rows of each group."""
        if self.one_row_per_unit:
            yield from of_rows(0)
            return
        total = np.zeros((size, self.n_units))
        for g, group in enumerate(self.groups):
            for where, block in of_rows(g):
                if group.units is None:
                    total[:, where] += block
                else:
                    loops.add_to_units(block, group.units[where], total)
        yield slice(0, self.n_units), total

    # -- evaluation -----------------------------------------------------------------------------

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) log-likelihood of every unit at z."""
        values = self._log_likelihood(z)
        if self.is_tilted:
            values -= self.work(self.reference(), np.zeros(self.d), z, 1.0)
        return values

    def _log_likelihood(self, z: np.ndarray) -> np.ndarray:
        theta = self.coordinates.theta(z)
        out = np.zeros(self.n_units)
        for group in self.groups:
            phis, _ = group.functions.shared(theta)
            values = group.log_likelihoods(phis)
            if group.units is None:
                out += values
            else:
                loops.add_to_units(values[None], group.units, out[None])
        return out

    def scores(self, z: np.ndarray) -> Any:
        """Scores at the cuts of every row at z."""
        found = self._scores(z)
        if self.is_tilted:
            reference = self.reference()
            for g, group in enumerate(self.groups):
                rows, maps = found.rows[g], found.maps[g]
                for k, constant in enumerate(group.functions.constant_jacobians):
                    s, s0 = rows[k], reference.rows[g][k]
                    if s is None or s0 is None:
                        continue
                    if constant is not None:
                        s -= s0
                    else:
                        rows[k] = np.stack([s, -s0], axis=1).reshape(2 * len(s), -1)
                        maps[k] = _side_by_side(maps[k], reference.maps[g][k], len(s))
        return found

    def reference(self) -> Any:
        """Scores at z = 0, of which those of a tilted engine are changes."""
        if self._reference is None:
            self._reference = self._scores(np.zeros(self.d))
        return self._reference

    def _scores(self, z: np.ndarray) -> Scores:
        theta = self.coordinates.theta(z)
        scores = Scores([], [])
        for group in self.groups:
            phis, maps = group.shared(self.coordinates, theta)
            scores.rows.append(group.scores(phis))
            scores.maps.append(maps)
        return scores

    def vectors(self, scores: Any) -> Iterator[tuple[slice, np.ndarray]]:
        """(d, rows) blocks of score vectors, each valid until the next; they may be overwritten."""
        for where, block in self.sparse_vectors(scores, slice(0, self.n_units)):
            yield where, block.dense(self.d)

    def sparse_vectors(self, scores: Any, units: slice) -> Iterator[tuple[slice, SparseBlock]]:
        """Vectors without most zeros, of some units; of all of them if units have several rows."""
        if self.one_row_per_unit:
            yield from self._row_vectors(0, scores, units)
            return
        assert units == slice(0, self.n_units)
        total = np.zeros((self.d, self.n_units))
        for k, group in enumerate(self.groups):
            for where, block in self._row_vectors(k, scores, slice(0, group.n_rows)):
                if group.units is None:
                    total[:, where] += block.dense(self.d)
                else:
                    loops.add_block_to_units(*block, group.units[where], total)
        yield units, SparseBlock.full(total)

    def _layout(self, g: int, scores: Scores) -> Layout:
        """Which coordinates rows of a group touch; kept where maps are the same for all z."""
        functions = self.groups[g].functions
        if g in self._layouts:
            return self._layouts[g]
        rows, maps = scores.rows[g], scores.maps[g]
        present = [None if s is None else m for s, m in zip(rows, maps, strict=True)]
        widths = [1 if s is None else len(s) for s in rows]
        layout = Layout.of([cut.kind for cut in functions.ordered], widths, present, self.d)
        fixed = zip(functions.constant_jacobians, functions.differentiable, strict=True)
        if all(constant is not None for constant, smooth in fixed if smooth):
            self._layouts[g] = layout
        return layout

    def _row_vectors(
        self, g: int, scores: Scores, some: slice
    ) -> Iterator[tuple[slice, SparseBlock]]:
        group, layout, rows = self.groups[g], self._layout(g, scores), scores.rows[g]
        columns, adding, labelled = group.columns(), [], []
        for k, cut in enumerate(group.functions.ordered):
            s, matrix = rows[k], scores.maps[g][k]
            if s is None or matrix is None:
                continue
            common = np.ascontiguousarray(matrix[:, layout.common])
            if common.any():
                adding.append(self._adding(g, k, common, layout, s))
            if layout.labelled[k] is not None:
                labelled.append((k, columns.labels[cut], s))
        size, found = max(1, min(row_groups.BLOCK, _CACHED // max(1, layout.width))), None
        for where in loops.row_blocks(some.stop - some.start, size, some.start):
            if found is None or found.values.shape[1] != where.stop - where.start:
                found = layout.empty(where.stop - where.start)
                block = found.values[: len(layout.common)]
            block[:] = 0.0
            for add in adding:
                add(block, where.start)
            layout.fill(found, [(k, own[where], s[:, where]) for k, own, s in labelled])
            yield where, found

    def _adding(
        self, g: int, k: int, matrix: np.ndarray, layout: Layout, scores: np.ndarray
    ) -> Callable[[np.ndarray, int], None]:
        """Adds to (q, rows) of a block, from a row on, scores of a cut times its map."""
        group, width = self.groups[g], len(scores)
        columns, cut = group.columns(), group.functions.ordered[k]
        if cut.kind != "dot" or not ScaledDesign.pays(matrix, width):
            entries = loops.compressed_rows(matrix)
            return lambda out, first: columns.add(cut, out, scores, first, entries)
        keeps = self._keeps and group.functions.constant_jacobians[k] is not None
        of = partial(ScaledDesign.of, columns.designs[cut], matrix, width)
        if not keeps or width * matrix.any(axis=0).sum() * group.n_rows > loops.LARGEST:
            return lambda out, first: loops.add_scaled(  # for each block: the same bits
                out, *of(slice(first, first + out.shape[1])), 0, scores, first
            )
        touched = layout.common.tobytes()  # coordinates that rows touch may change with z
        with _MAKING:
            if (g, k) not in self._designs or self._designs[g, k][0] != touched:
                self._designs[g, k] = touched, of(slice(0, group.n_rows))
            kept = self._designs[g, k][1]
        return lambda out, first: loops.add_scaled(out, *kept, first, scores, first)

    def linear(self) -> LinearRows | None:
        """The rows as multiples of vectors that do not depend on z; None if they are not."""
        return None  # score vectors may be sums of several vectors

    def forget(self) -> None:
        """Keep nothing of an earlier chain."""

    def work(
        self, scores: Any, start: np.ndarray, end: np.ndarray, scale: float | np.ndarray
    ) -> np.ndarray:
        """(n_units,) scale_i * g_i . (end - start): the work of clipped score vectors."""
        displacement = end - start
        out = np.zeros(self.n_units)
        for g, group in enumerate(self.groups):
            rows = np.zeros(group.n_rows) if group.units is not None else out
            changes = [None if m is None else m @ displacement for m in scores.maps[g]]
            self._add_products(g, scores.rows[g], changes, rows)
            if group.units is not None:
                loops.add_to_units(rows[None], group.units, out[None])
        out *= scale
        return out

    def _add_products(
        self,
        g: int,
        rows: Sequence[np.ndarray | None],
        phis: Sequence[np.ndarray | None],
        out: np.ndarray,
    ) -> None:
        """Add to `out` products of row values at the cuts with flat shared values, row by row."""
        group, columns = self.groups[g], self.groups[g].columns()
        for cut, s, flat in zip(group.functions.ordered, rows, phis, strict=True):
            if s is None or flat is None:
                continue
            eta = flat
            if cut.kind == "dot":
                eta = np.empty_like(s)
                weights = np.ascontiguousarray(flat.reshape(-1, len(s)).T)
                loops.linear_predictor(columns.designs[cut], 0, weights, eta)
            elif cut.kind == "index":
                eta = flat.reshape(-1, len(s)).T[:, columns.labels[cut]]
            for own, values in zip(s, eta, strict=True):
                out += own * values


def _places(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A point and one nearby: a derivative may vanish by chance at one (by tau at z = 0)."""
    return theta, theta + np.random.default_rng(0).uniform(0.05, 0.15, theta.size)


def _side_by_side(here: np.ndarray | None, there: np.ndarray | None, width: int) -> np.ndarray:
    """The maps of `width` numbers per row at two places, as one of pairs of them."""
    assert here is not None and there is not None
    d = here.shape[1]
    parts = [matrix.reshape(-1, width, d) for matrix in (here, there)]
    return np.stack(parts, axis=2).reshape(-1, d)
