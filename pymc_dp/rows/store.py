"""The private arrays of a model, and the columns that the loops over rows read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pymc_dp.rows.cuts import Cut
from pymc_dp.rows.functions import RowFunctions

Rows = slice | np.ndarray


class RecordStore:
    """The private arrays of a model.  `reads` counts how often they were asked for."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays
        self.reads = 0

    @property
    def n_rows(self) -> int:
        """Number of rows of the data."""
        return len(self._arrays[0])

    def read(self) -> list[np.ndarray]:
        """The arrays, records first."""
        self.reads += 1
        return self._arrays

    def synthetic(self, n_rows: int, value: int = 0) -> RecordStore:
        """Made-up data, all of one value, of the same types and layout; no value is looked at."""
        arrays = []
        for array in self._arrays:
            made = np.full((n_rows, *array.shape[1:]), value, array.dtype)
            made.flags.writeable = array.flags.writeable
            arrays.append(made)
        return RecordStore(arrays)


@dataclass(frozen=True, eq=False)
class Columns:
    """Parameter-free columns of a group, in the layout of the loops.

    `designs`, (p, n_rows), are the row data of each "dot", and `labels`, (n_rows,), those of each
    "index".  `blocks` are the data that the compiled row functions read, records first.  `order`
    has the rows sorted by unit, in the order of the rows within a unit, and `starts` where each
    unit starts; both are None when each row is its own unit.
    """

    designs: dict[Cut, np.ndarray]
    labels: dict[Cut, np.ndarray]
    blocks: list[np.ndarray]
    order: np.ndarray | None = None
    starts: np.ndarray | None = None

    @classmethod
    def of(cls, functions: RowFunctions, arrays: list[np.ndarray]) -> Columns:
        """The columns of the row data `arrays`, in the order of ``functions.graph.leaves``."""
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

    def sorted_by(self, units: np.ndarray, n_units: int) -> Columns:
        """The same columns, with the rows of every unit known."""
        order = np.argsort(units, kind="stable")
        starts = np.searchsorted(units, np.arange(n_units + 1), sorter=order)
        return replace(self, order=order, starts=starts)

    def part(self, rows: Rows) -> Columns:
        """The columns of some rows."""
        return Columns(
            {cut: np.ascontiguousarray(x[:, rows]) for cut, x in self.designs.items()},
            {cut: np.ascontiguousarray(x[rows]) for cut, x in self.labels.items()},
            [rows_of(x, rows) for x in self.blocks],
        )


def rows_of(array: np.ndarray, rows: Rows) -> np.ndarray:
    """Some rows of an array, of the same type for the compiled functions (they tell read-only)."""
    part = np.ascontiguousarray(array[rows])
    part.flags.writeable = array.flags.writeable
    return part


@dataclass(eq=False)
class RowGroup:
    """Observed variables that share their rows.

    `store` has row data, in the order of ``functions.graph.leaves``.  `units`, (n_rows,), is the
    privacy unit of each row; None when each row is its own unit.
    """

    functions: RowFunctions
    store: RecordStore
    units: np.ndarray | None
    _columns: Columns | None = field(default=None, init=False, repr=False)
    _each_alone: list[RowGroup] | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": None, "_each_alone": None}

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
        """The same rows, a group for each observed variable; compiled at the first use."""
        if len(self.functions.graph.names) == 1:
            return [self]
        if self._each_alone is None:
            self._each_alone = [
                RowGroup(functions, self.store, self.units)
                for functions in self.functions.each_alone()
            ]
        return self._each_alone

    def row_by_row(self) -> RowGroup:
        """The same rows, each a unit of its own."""
        if self.units is None:
            return self
        same = RowGroup(self.functions, self.store, None)
        same._columns = self.columns()
        return same

    def synthetic(self, n_rows: int) -> RowGroup:
        """The same functions on made-up data: `n_rows` rows, all of one unit if units are told."""
        units = None if self.units is None else np.zeros(n_rows, dtype="int64")
        return RowGroup(self.functions, self.store.synthetic(n_rows), units)

    def part(self, units: Rows, n_units: int) -> RowGroup:
        """The rows of some of the `n_units` units, in their order within each unit."""
        columns = self.columns()
        rows: Rows = units
        renumbered = None
        if self.units is not None:
            if columns.order is None:
                self._columns = columns = columns.sorted_by(self.units, n_units)
            assert columns.order is not None and columns.starts is not None
            if isinstance(units, slice):
                rows = columns.order[columns.starts[units.start] : columns.starts[units.stop]]
                renumbered = self.units[rows] - units.start
            else:
                counts = columns.starts[units + 1] - columns.starts[units]
                renumbered = np.repeat(np.arange(len(units)), counts)
                within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                rows = columns.order[columns.starts[units][renumbered] + within]
        part = RowGroup(
            self.functions,
            RecordStore([rows_of(a, rows) for a in self.store.read()]),
            renumbered,
        )
        part._columns = columns.part(rows)
        return part
