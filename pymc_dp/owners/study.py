"""A model file: what an analyst and all owners build, each on its own rows.

It is Python that defines two things: `columns`, the arrays of a record, by name, with their types
(``"float64"``, ``"int64"``), or type and width (``("float64", 3)``) of a matrix; and
``build(**arrays)``, which returns a PyMC model of them.  All parties build it on made-up rows: it
is never given a record.
"""

from __future__ import annotations

import hashlib
import os
import runpy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pymc.model import Model

from pymc_dp.budget import PrivacyBudget
from pymc_dp.clusters.shards import Announced, Column, Portion, examples_of
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.records.extraction import Records
from pymc_dp.records.units import Group, RecordStore, codes_of_ids


class ModelFile:
    """A model file that was read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"model_file: there is no file {str(path)!r}.")
        source = self.path.read_bytes()
        self.hash = hashlib.sha256(source.replace(b"\r\n", b"\n")).hexdigest()
        found = runpy.run_path(str(self.path))
        columns, build = found.get("columns"), found.get("build")
        if not isinstance(columns, Mapping) or not columns or not callable(build):
            raise ValueError(
                f"{self.path.name} must define `columns`, a dict of the arrays of a record, and "
                "`build`, a function of these arrays that returns a PyMC model."
            )
        self._build: Callable[..., Any] = build
        self.columns = {name: _column(name, given) for name, given in columns.items()}

    def model(self, arrays: Mapping[str, np.ndarray]) -> Model:
        """The model of some rows."""
        found = self._build(**arrays)
        if not isinstance(found, Model):
            raise ValueError(
                f"`build` of {self.path.name} must return a PyMC model, not {type(found).__name__}."
            )
        return found

    def example(self) -> dict[str, np.ndarray]:
        """Made-up rows."""
        return examples_of(self.columns)

    def rows(self, data: Any) -> dict[str, np.ndarray]:
        """The arrays of a data frame or a mapping; ValueError if they are not those declared."""
        arrays = {}
        for name, (dtype, row) in self.columns.items():
            if name not in data:
                raise ValueError(f"data has no {name!r}, which {self.path.name} declares.")
            array = np.asarray(data[name])
            fits = array.dtype.kind in ("iub" if dtype.kind == "i" else "fiub")
            if not fits or array.shape[1:] != row:
                shape = f" with {row[0]} columns" if row else ""
                raise ValueError(
                    f"data[{name!r}] must hold {'integers' if dtype.kind == 'i' else 'numbers'}"
                    f"{shape}, as {self.path.name} declares."
                )
            arrays[name] = np.array(array, dtype, order="C")  # not what may be changed meanwhile
        lengths = {len(array) for array in arrays.values()}
        if len(lengths) > 1:
            raise ValueError("The arrays of data differ in their number of rows.")
        return arrays


class _Records(Announced):
    """An owner's records, of which the model file sees none."""

    given = "the arrays of `columns`"

    def __init__(self, file: ModelFile, data: Any, privacy_unit: Any) -> None:
        arrays, ids = file.rows(data), None
        if privacy_unit is not None:
            [ids] = codes_of_ids({"data": privacy_unit}).values()
            if len(ids) != _length(arrays):
                raise ValueError("privacy_unit must have one id for each row of data.")
        self._rows = Portion(arrays, ids)
        self.announce(file.columns, self._rows.n_rows, self._rows.n_units, ids is not None)

    def _put(self, records: Records, columns: Mapping[int, Sequence[Column]]) -> Records:
        groups = []
        for g, group in enumerate(records.groups):
            store = RecordStore(self._rows.rows(group.graph, columns[g]))
            groups.append(Group(group.graph, store, self._rows.units))
        return replace(records, groups=tuple(groups), n_units=self.n_units)

    def processes(self, chains: int) -> int:
        """All: the records are here."""
        return chains


def _length(arrays: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(arrays.values())))


def _column(name: str, given: Any) -> tuple[np.dtype, tuple[int, ...]]:
    kind, width = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    dtype: np.dtype = np.dtype("O")
    with suppress(TypeError):
        dtype = np.dtype(kind)
    wide = width is None or (isinstance(width, int) and width > 0)
    if dtype.kind not in "fi" or not wide:
        raise ValueError(
            f"columns[{name!r}] must be a type, 'float64' or 'int64', or a type and a width, "
            f"('float64', 3); got {given!r}."
        )
    return dtype, () if width is None else (width,)


class Owner:
    """One owner's records and budget, for a study of several owners.

    Parameters
    ----------
    model_file : str or Path
        Python that defines `columns` and `build`; the same file as that of the analyst.
    data : pandas.DataFrame or mapping of str to array
        The records, one row each.  Matrices of `columns` need a mapping.
    epsilon, delta : float
        What the owner allows everybody else to learn, in all; see :class:`PrivacyBudget`.
    **budget
        Other arguments of :class:`PrivacyBudget`: ``ledger`` (a file, so that a restart forgets
        nothing; made if there is none, with `epsilon` and `delta` as its overall cap), ``dataset``
        (the owner's name), ``privacy_unit`` (a column of ids), ``neighboring``, ``n_public``.

    Raises
    ------
    ValueError
        If the data are not those that the model file declares.
    UnsafeModel
        If the model is not one of single records, or they hold what none may.
    BudgetExceeded
        If the ledger has another budget, of other records or another promise, and no room for this.

    Notes
    -----
    *Guarantee.* The model is built on made-up rows. What it computes from arrays while it is built
    sees no record, and what it computes of a record sees that record alone.

    *Assumptions.* A model file is a program that runs here, and can do what this process can: read
    it before you serve it.
    """

    def __init__(
        self, model_file: str | Path, data: Any, epsilon: float, delta: float, **budget: Any
    ) -> None:
        if "records" in budget:
            raise ValueError("records of a cluster: build the model and serve it without Owner.")
        file = ModelFile(model_file)
        self.model_hash = file.hash
        records = _Records(file, data, budget.pop("privacy_unit", None))
        self.model = file.model(file.example())
        ledger = budget.get("ledger")
        if isinstance(ledger, str | os.PathLike) and not Path(ledger).exists():
            same = {name: budget[name] for name in ("neighboring", "dataset") if name in budget}
            Ledger.create(ledger, epsilon=epsilon, delta=delta, **same)
        with self.model:
            # a process that is started again resumes what was agreed
            self.budget = PrivacyBudget(epsilon, delta, records=records, resume=True, **budget)

    def __repr__(self) -> str:
        return f"Owner({self.budget.dataset or 'without a name'}, {self.budget!r})"
