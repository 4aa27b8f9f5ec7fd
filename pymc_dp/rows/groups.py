"""Rows of one likelihood: their columns, what they see, and compiled functions over all of them.

Each row sees the parameters through a few numbers eta (:mod:`pymc_dp.records.graph`).  Where they
are affine in z, with u_a = d eta_a / d z, the curvature of a row is -sum_ab S_ab u_a u_b'.  S, the
second derivatives of its log-likelihood by its eta, takes as many evaluations as there are eta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import over
from pymc_dp.records.graph import Cut
from pymc_dp.records.units import RecordStore
from pymc_dp.rows import loops
from pymc_dp.rows.functions import RowFunctions

BLOCK = 8192  # rows per block, at most: what a block needs stays in a second-level cache
_COST = 8  # what a function of rows costs, as numbers read for each row

Rows = slice | np.ndarray
Inputs = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]
Maps = Sequence[np.ndarray | None]


@dataclass(eq=False)
class Scores:
    """Derivatives at one z, by group and cut: rows (k, n_rows), maps d phi / d z (entries, d)."""

    rows: list[list[np.ndarray | None]]
    maps: list[list[np.ndarray | None]]


@dataclass(frozen=True, eq=False)
class Columns:
    """Parameter-free columns of a group, in the layout of the loops.

    `designs`, (p, n_rows), belong to "dot" cuts, `labels`, (n_rows,), to "index" cuts.  `blocks`
    are the data that row functions read, records first.  `order` sorts the rows by unit, stably,
    and `starts` says where units start; both are None when each row is its own unit.
    """

    designs: dict[Cut, np.ndarray]
    labels: dict[Cut, np.ndarray]
    blocks: list[np.ndarray]
    order: np.ndarray | None = None
    starts: np.ndarray | None = None

    @classmethod
    def of(cls, functions: RowFunctions, arrays: list[np.ndarray]) -> Columns:
        """From row data in the order of ``functions.graph.leaves``."""
        designs, labels = {}, {}
        for cut in functions.ordered:
            if cut.kind == "dot":
                design = np.asarray(functions.column(cut, arrays))
                if design.dtype.char not in "fd":
                    design = design.astype("float64")
                designs[cut] = np.ascontiguousarray(design.T)
            elif cut.kind == "index":
                labels[cut] = np.ascontiguousarray(functions.column(cut, arrays))
        return cls(designs, labels, functions.row_data(arrays))

    def part(self, rows: Rows) -> Columns:
        """The columns of some rows."""
        return Columns(
            {cut: np.ascontiguousarray(x[:, rows]) for cut, x in self.designs.items()},
            {cut: np.ascontiguousarray(x[rows]) for cut, x in self.labels.items()},
            [rows_of(x, rows) for x in self.blocks],
        )

    def add(
        self, cut: Cut, out: np.ndarray, scores: np.ndarray, first: int, entries: loops.Compressed
    ) -> None:
        """Add to `out`, (d, rows), scores (k, n_rows) from row `first` times a map d phi / d z."""
        if cut.kind == "dot":
            loops.add_products(out, self.designs[cut], scores, first, entries)
        elif cut.kind == "index":
            loops.add_indexed(out, self.labels[cut], scores, first, entries)
        else:
            loops.add_copies(out, scores, first, entries)


def rows_of(array: np.ndarray, rows: Rows) -> np.ndarray:
    """Some rows of an array, of the same type for the compiled functions (they tell read-only)."""
    part = np.ascontiguousarray(array[rows])
    part.flags.writeable = array.flags.writeable
    return part


@dataclass(eq=False)
class RowGroup:
    """Observed variables that share rows; `units`, (n_rows,), is None if each row is a unit."""

    functions: RowFunctions
    store: RecordStore
    units: np.ndarray | None
    _columns: Columns | None = field(default=None, init=False, repr=False)
    _each_alone: list[RowGroup] | None = field(default=None, init=False, repr=False)
    #: What an engine has computed of these rows, whatever its coordinates, and by which function.
    kept: tuple[object, Any] | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": None, "_each_alone": None, "kept": None}

    @property
    def n_rows(self) -> int:
        """Number of rows of the data."""
        return self.store.n_rows

    def columns(self) -> Columns:
        """The parameter-free columns, made at the first use in a process."""
        if self._columns is None:
            self._columns = Columns.of(self.functions, self.store.read())
        return self._columns

    def each_alone(self) -> list[RowGroup]:
        """The same rows, a group for each observed variable."""
        if self._each_alone is None:
            alone = self.functions.each_alone
            others = [RowGroup(functions, self.store, self.units) for functions in alone]
            self._each_alone = [self] if alone == [self.functions] else others
        return self._each_alone

    def release_memory(self) -> None:
        """Keep nothing that was made of the rows, until it is needed again."""
        for group in self._each_alone or ():
            group._columns = None
        self._columns = self._each_alone = self.kept = None

    def synthetic(
        self, n_rows: int, value: int | None = 0, first: int = 0, last: int | None = None
    ) -> RowGroup:
        """The functions on made-up rows, of the units `first` to `last`.

        Each user has two rows, or one has all if `value` is given.
        """
        each = 1 if self.units is None else 2
        rows = slice(each * first, None if last is None else each * last)
        largest = min([1, *(size - 1 for _, size in self.functions.graph.lookups)])
        store = self.store.synthetic(n_rows, value, rows, largest)
        users = np.arange(store.n_rows) // 2 * (value is None)
        return RowGroup(self.functions, store, None if self.units is None else users)

    def part(self, units: Rows, n_units: int) -> RowGroup:
        """The rows of some of the `n_units` units, in their order within each unit."""
        columns = self.columns()
        rows: Rows = units
        renumbered = None
        if self.units is not None:
            if columns.order is None:
                order = np.argsort(self.units, kind="stable")
                starts = np.searchsorted(self.units, np.arange(n_units + 1), sorter=order)
                self._columns = columns = replace(columns, order=order, starts=starts)
            assert columns.order is not None and columns.starts is not None
            if isinstance(units, slice):
                rows = columns.order[columns.starts[units.start] : columns.starts[units.stop]]
                renumbered = self.units[rows] - units.start
            else:
                counts = columns.starts[units + 1] - columns.starts[units]
                renumbered = np.repeat(np.arange(len(units)), counts)
                within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                rows = columns.order[columns.starts[units][renumbered] + within]
        return self.rows(rows, renumbered)

    def rows(self, rows: Rows, units: np.ndarray | None = None) -> RowGroup:
        """Some rows, of these units; without, each is a unit of its own."""
        store = RecordStore([rows_of(array, rows) for array in self.store.read()])
        part = RowGroup(self.functions, store, units)
        part._columns = self.columns().part(rows)
        return part

    def inputs(self, phis: Sequence[np.ndarray], where: slice) -> Inputs:
        """The linear predictors, labels and data of a block of rows."""
        functions, columns = self.functions, self.columns()
        etas = []
        for cut, phi in zip(functions.ordered[: functions.n_dots], phis, strict=False):
            weights = np.ascontiguousarray(phi.reshape(len(phi), -1).T, dtype="float64")
            eta = np.empty((len(weights), where.stop - where.start))
            loops.linear_predictor(columns.designs[cut], where.start, weights, eta)
            etas.append(eta[0] if phi.ndim == 1 else np.ascontiguousarray(eta.T))
        labels = [columns.labels[cut][where] for cut in functions.labels]
        return etas, labels, [block[where] for block in columns.blocks]

    def log_likelihoods(self, phis: list[np.ndarray]) -> np.ndarray:
        """(n_rows,) log-likelihoods, given the shared value of each cut."""
        values = np.empty(self.n_rows)

        def block(where: slice) -> None:
            etas, labels, data = self.inputs(phis, where)
            values[where] = self.functions.loglik(etas, phis, labels, data)

        self._each(block)
        return values

    def scores(self, phis: list[np.ndarray]) -> list[np.ndarray | None]:
        """Per cut, (k, n_rows) derivatives of log-likelihoods by what rows see; 0 if not finite."""
        functions = self.functions
        cuts = zip(functions.ordered, phis, functions.differentiable, strict=True)
        found = [np.empty((width(c, p), self.n_rows)) if smooth else None for c, p, smooth in cuts]

        def block(where: slice) -> None:
            etas, labels, data = self.inputs(phis, where)
            parts = functions.scores(etas, phis, labels, data)
            for whole, part in zip(found, parts, strict=True):
                if whole is not None and part is not None:
                    if part.shape != (where.stop - where.start, len(whole)):
                        raise ValueError("Not every row has a score of its own.")
                    loops.clean(part.T, whole, where.start)

        self._each(block)
        return found

    def _each(self, block: Callable[[slice], None]) -> None:
        """Call `block` for all blocks, in threads where it pays."""
        self.columns()  # made by one thread
        blocks = loops.row_blocks(self.n_rows, BLOCK)
        numbers = self.n_rows * _COST if self.functions.threaded else 0

        def part(some: slice) -> None:
            for where in blocks[some]:
                block(where)

        over(part, len(blocks), numbers)

    def shared(
        self, coordinates: Coordinates, theta: np.ndarray | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        """Shared values and their derivatives by z, per cut, at `theta`, or at z = 0."""
        phis, jacobians = self.functions.shared(coordinates.location if theta is None else theta)
        return phis, [None if j is None else j @ coordinates.scaling for j in jacobians]

    def seen(self, phis: Sequence[np.ndarray], maps: Maps) -> np.ndarray:
        """(K, d) whether the k-th number that rows see depends on the j-th coordinate; public."""
        found = [part.any(axis=0) for *_, part in self._numbers(phis, maps)]
        return np.array(found, dtype=bool).reshape(len(found), -1)

    def directions(self, phis: Sequence[np.ndarray], maps: Maps, where: slice) -> np.ndarray:
        """(K, d, rows) derivatives u_a of the numbers that a block of rows sees."""
        columns, ones, found = self.columns(), np.ones((1, where.stop)), []
        for _, cut, _, part in self._numbers(phis, maps):
            u = np.zeros((part.shape[1], where.stop - where.start))
            columns.add(cut, u, ones, where.start, loops.compressed_rows(part))
            found.append(u)
        return np.array(found)

    def second_derivatives(
        self, phis: list[np.ndarray], maps: Maps, where: slice, step: float, norms: np.ndarray
    ) -> np.ndarray:
        """(K, K, rows) second derivatives of log-likelihoods by what a block of rows sees.

        Symmetrised forward differences: a number moves by `step` |u_a|, by one public length where
        rows share it; S is 0 if it does not move.  `norms`, (K, rows), are |u_a|, for "dot" cuts.
        """
        functions = self.functions
        etas, labels, blocks = self.inputs(phis, where)

        def scores(etas: list[np.ndarray], phis: list[np.ndarray]) -> np.ndarray:
            by_cut = functions.scores(etas, phis, labels, blocks)
            found = np.concatenate([np.ascontiguousarray(s.T) for s in by_cut if s is not None])
            loops.clean(found, found, 0)
            return found

        start = scores(etas, phis)
        found = np.zeros((len(start), *start.shape))
        for a, (k, cut, j, part) in enumerate(self._numbers(phis, maps)):
            at = etas[k] if cut.kind == "dot" else phis[k]
            moved = at.copy()
            entries = moved.reshape(1 if cut.kind == "copy" else len(moved), -1)[:, j]
            if cut.kind == "dot":
                entries += step * norms[a]
            else:
                entries += (step * np.linalg.norm(part, axis=1)).astype(at.dtype)
            length = entries - at.reshape(len(entries), -1)[:, j]  # as it was rounded
            if cut.kind == "dot":
                end = scores([*etas[:k], moved, *etas[k + 1 :]], phis)
            else:
                end = scores(etas, [*phis[:k], moved, *phis[k + 1 :]])
            if cut.kind == "index":
                length = length[self.columns().labels[cut][where]]
            length = length.astype("float64")
            np.divide(end - start, length, out=found[a], where=length != 0.0)
        return (found + found.transpose(1, 0, 2)) / 2.0

    def _numbers(
        self, phis: Sequence[np.ndarray], maps: Maps
    ) -> Iterator[tuple[int, Cut, int, np.ndarray]]:
        """Numbers that a row sees: cut, place in it, (coefficients or labels or 1, d) of a map."""
        for k, (cut, phi, matrix) in enumerate(
            zip(self.functions.ordered, phis, maps, strict=True)
        ):
            if matrix is None:
                continue
            many = width(cut, phi)
            for j in range(many):
                part = matrix[j : j + 1] if cut.kind == "copy" else matrix[j::many]
                yield k, cut, j, np.ascontiguousarray(part)


def width(cut: Cut, phi: np.ndarray) -> int:
    """How many numbers a row sees at a cut."""
    return phi.size if cut.kind == "copy" else phi.size // max(phi.shape[0], 1)


_ROWS = 16
_STEP = 1e-3
_ZERO = 1e-9


def is_flat(groups: Sequence[RowGroup], places: Sequence[np.ndarray]) -> bool:
    """Whether rows push a shared value by a force that does not change with it.

    As in Laplace likelihoods and quantile regression, whose curvature is zero almost everywhere and
    says nothing about the posterior.  Public: looked at on made-up rows, at public `places`.  If
    its parameters push anything else it does not count: Poisson terms ``y log(m) - m`` are both
    linear.
    """
    rng = np.random.default_rng(0)
    for group in groups:
        made_up = group.synthetic(_ROWS)
        functions = made_up.functions
        ones = functions.row_data(group.store.synthetic(_ROWS, 1).read())
        everywhere = None
        for theta in places:
            phis, jacobians = functions.shared(theta)
            # whether the parameters behind each shared value are behind no other
            behind = [None if j is None else np.any(j != 0.0, axis=0) for j in jacobians]
            many = sum(b.astype(int) for b in behind if b is not None)
            alone = [b is not None and not np.any(b & (many > 1)) for b in behind]
            etas, labels, zeros = made_up.inputs(phis, slice(0, _ROWS))
            etas = [rng.normal(size=eta.shape) for eta in etas]
            for blocks in (zeros, ones):
                flat = np.zeros(len(functions.ordered), dtype=bool)
                for k, smooth in enumerate(functions.differentiable):
                    if not (smooth and alone[k]):
                        continue
                    moved_etas, moved_phis = list(etas), list(phis)
                    moved = moved_etas if k < functions.n_dots else moved_phis
                    # not all by the same: choices do not see what is added to all of them
                    move = _STEP * rng.uniform(0.5, 1.5, np.shape(moved[k]))
                    # of the same type and number of axes, or numba compiles once more
                    moved[k] = np.asarray(moved[k] + move, dtype=moved[k].dtype, order="C")
                    with np.errstate(all="ignore"):
                        here = functions.scores(etas, phis, labels, blocks)[k]
                        there = functions.scores(moved_etas, moved_phis, labels, blocks)[k]
                    assert here is not None and there is not None
                    # a made-up outcome may be impossible, and its score infinite
                    same = np.isclose(there, here, rtol=_ZERO, atol=0.0) & np.isfinite(here)
                    flat[k] = np.mean(same & (here != 0.0)) > 0.5
                everywhere = flat if everywhere is None else everywhere & flat
        if everywhere is not None and everywhere.any():
            return True
    return False
