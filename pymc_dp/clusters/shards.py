"""Records that are elsewhere: what stands for them here, and what answers for them there.

An engine is public: compiled functions, coordinates, structure.  Where its stores are
`DistantStore`, it is sent to the `Shard` objects that have the records, once, and queries follow.
A shard answers with exact integers, before noise, and these add to the same sum whatever shard a
unit is in.  No record, no number of one unit, and no message that may tell of one, is sent back.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import cloudpickle
import numpy as np
from pymc.model import Model

from pymc_dp.errors import PrivacyError, UnsafeModel
from pymc_dp.privacy.answer import Query
from pymc_dp.privacy.holder import Answers, Holder
from pymc_dp.privacy.queries import EnergyError, Kick, Rows, ScoreAt
from pymc_dp.records.ancestry import array_of
from pymc_dp.records.bounds import Interval, clamp, source_limits
from pymc_dp.records.extraction import Records, checked_rows, refuse_impossible
from pymc_dp.records.graph import RowGraph
from pymc_dp.records.units import Group, RecordStore, stands_in
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from pymc_dp.rows.predictor import Predictor

#: Made-up rows that a model is built on: more than public arrays usually have, and no round number.
EXAMPLES = 1009
#: What is sent to a shard once, however many messages mention it.
_SENT_ONCE = (RowEngine, RowGroup, Predictor)
#: Most machines that one question may cost.
_LOSSES = 10
#: Rows below which a portion is joined to the next: a pass over fewer takes less than its overhead.
_FEW_ROWS = 2**18


@dataclass(frozen=True, eq=False)
class Column:
    """Where a shard finds one array of the rows: its name there, its type here, public bounds."""

    name: str
    dtype: np.dtype
    limits: Interval | None = None


class DistantStore(RecordStore):
    """The types of arrays that `elsewhere` has, and none of their values."""

    def __init__(
        self, blank: list[np.ndarray], columns: Sequence[Column], n_rows: int, elsewhere: Any
    ) -> None:
        super().__init__(blank)
        self.columns, self._n_rows, self.elsewhere = tuple(columns), n_rows, elsewhere

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "elsewhere": None}

    @property
    def n_rows(self) -> int:
        """Number of rows on all machines."""
        return self._n_rows

    def read(self) -> list[np.ndarray]:
        """Refused: there is nothing to read here."""
        raise PrivacyError("Records that are on other machines were to be read on this one.")


class Lost(Exception):
    """A machine is gone, with its shard."""


# -- where the records are ------------------------------------------------------------------------


class Portion:
    """Some of the records, with all rows of each of their units.

    `arrays` are by name, rows first; `ids`, (n_rows,), say whose each row is, None if rows are
    units.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], ids: np.ndarray | None) -> None:
        self.arrays, self.on_disk = dict(arrays), False
        self.n_rows = len(next(iter(self.arrays.values())))
        self.units, self.n_units = None, self.n_rows
        if ids is not None:
            unique, units = np.unique(ids, return_inverse=True)
            self.units, self.n_units = units.astype("int64"), len(unique)

    def __getstate__(self) -> dict[str, Any]:
        """What is on the disk of one machine is in memory on the next."""
        arrays = {name: np.array(array) for name, array in self.arrays.items()}
        return {**self.__dict__, "arrays": arrays, "on_disk": False}

    def __sizeof__(self) -> int:
        """Bytes in memory."""
        arrays = [] if self.on_disk else [*self.arrays.values()]
        return sum(array.nbytes for array in (*arrays, self.units) if array is not None)

    def move_to(self, folder: str) -> None:
        """Keep the arrays in a file there, which has no name and ends with the process; they are in
        memory while they are read.
        """
        for name, array in self.arrays.items() if self.n_rows else ():
            with tempfile.TemporaryFile(dir=folder) as file:
                kept = np.memmap(file, array.dtype, "w+", shape=array.shape)
            kept[:] = array
            self.arrays[name] = kept
        self.on_disk = True
        self.release_memory()

    def digest(self, salt: int) -> int:
        """A number of 64 bits that other rows, or other units, would change; their order does not.

        It tells whether records that are loaded again are the same ones, and guards against
        accidents, not against somebody who chooses the records.
        """
        odd = np.random.default_rng(salt).integers(2**63, size=2**10, dtype="uint64") * 2 + 1
        arrays = [self.arrays[name] for name in sorted(self.arrays)]
        arrays += [] if self.units is None else [self.units]
        entries = [x for array in arrays for x in (array.T if array.ndim > 1 else [array])]
        found = np.zeros(self.n_rows, dtype="uint64")
        for k, entry in enumerate(entries):
            wide = entry if entry.dtype.itemsize == 8 else entry.astype("float64")
            found ^= np.ascontiguousarray(wide).view("uint64")
            found *= odd[k % len(odd)]
            found ^= found >> np.uint64(32)
        self.release_memory()
        return int(found.sum(dtype="uint64"))

    @property
    def bytes_per_row(self) -> int:
        """Of the arrays, as float64."""
        return 8 * sum(int(np.prod(array.shape[1:])) for array in self.arrays.values())

    def release_memory(self) -> None:
        """Leave on disk what is there."""
        for array in self.arrays.values():
            if self.on_disk and isinstance(array, np.memmap):
                array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def rows(self, graph: RowGraph, columns: Sequence[Column]) -> list[np.ndarray]:
        """The arrays of a graph; UnsafeModel if they hold what no row may."""
        arrays = []
        for column in columns:
            array = np.asarray(self.arrays[column.name]).astype(column.dtype, copy=False)
            arrays.append(array if column.limits is None else clamp(array, column.limits))
        names = [f"`{column.name}`" for column in columns]
        return checked_rows(graph, arrays, names)


def joined(portions: Sequence[Portion]) -> list[Portion]:
    """The same records in fewer portions, where they are small."""
    lots: list[list[Portion]] = [[]]
    for portion in portions:
        before = lots[-1]
        if any(p.on_disk for p in (portion, *before)) or sum(p.n_rows for p in before) >= _FEW_ROWS:
            lots.append([])
        lots[-1].append(portion)
    return [lot[0] if len(lot) == 1 else _one(lot) for lot in lots if lot]


def _one(portions: Sequence[Portion]) -> Portion:
    arrays = {
        name: np.concatenate([np.asarray(portion.arrays[name]) for portion in portions])
        for name in portions[0].arrays
    }
    ids, before = [], 0
    for portion in portions:
        if portion.units is not None:
            ids.append(portion.units + before)
        before += portion.n_units
    return Portion(arrays, np.concatenate(ids) if ids else None)


class _PortionStore(RecordStore):
    """The arrays of a portion that is on disk."""

    def __init__(self, portion: Portion, graph: RowGraph, columns: Sequence[Column]) -> None:
        super().__init__([])
        self._given = portion, graph, columns

    @property
    def n_rows(self) -> int:
        """Number of rows of the portion."""
        return self._given[0].n_rows

    def read(self) -> list[np.ndarray]:
        """The arrays, as they are now."""
        portion, graph, columns = self._given
        return portion.rows(graph, columns)


class Shard:
    """The records of one machine, as portions of about a million rows.

    If `lean`, nothing that is made of rows is kept from one question to the next, but what a chain
    needs: 40 bytes for each unit.
    """

    def __init__(self, portions: Sequence[Portion], lean: bool = False) -> None:
        self.portions, self.lean = [p for p in portions if p.n_rows], lean
        self.n_rows = sum(portion.n_rows for portion in portions)
        self.n_units = sum(portion.n_units for portion in portions)
        self._known: dict[str, Any] = {}
        #: Of what was learnt, the same for each portion.
        self._groups: WeakKeyDictionary[RowGroup, list[RowGroup]] = WeakKeyDictionary()
        self._engines: WeakKeyDictionary[RowEngine, list[RowEngine]] = WeakKeyDictionary()
        self._holders: dict[str, list[Holder]] = {}

    def learn(self, token: str, message: bytes) -> None:
        """Keep an engine, or a part of one, for the records that are here."""
        found = _Reader(io.BytesIO(message), self._known).load()
        if isinstance(found, RowGroup):
            self._groups[found] = [self._group(found, portion) for portion in self.portions]
        elif isinstance(found, RowEngine):
            self._engines[found] = [
                found.on([self._groups[group][k] for group in found.groups], portion.n_units)
                for k, portion in enumerate(self.portions)
            ]
        self._known[token] = found

    def _group(self, group: RowGroup, portion: Portion) -> RowGroup:
        assert isinstance(group.store, DistantStore)
        given = group.functions.graph, group.store.columns
        arrays = portion.rows(*given)  # refused now if they are bad
        refuse_impossible(given[0], arrays)
        store = RecordStore(arrays)
        if portion.on_disk:
            store = _PortionStore(portion, *given)
            portion.release_memory()
        return RowGroup(group.functions, store, portion.units)

    def total(self, holder: str, message: bytes) -> np.ndarray:
        """The exact sum over the units here, for a holder that remembers one chain."""
        engine, query = _Reader(io.BytesIO(message), self._known).load()
        total = np.zeros(query.sum.size, dtype=np.int64)
        if holder not in self._holders:
            engines = self._engines[engine]
            if isinstance(query.of, Kick | ScoreAt) and not self.lean:
                for each in engines:
                    each.linear()  # made once, for all chains
            self._holders[holder] = [Holder(each.of_another_chain()) for each in engines]
        for portion, of_portion in zip(self.portions, self._holders[holder], strict=True):
            with np.errstate(all="ignore"):  # as silent as an answer
                total += of_portion.total(query)
            if self.lean:
                rows: Any = of_portion.engine
                rows.release_memory()
                portion.release_memory()
        return total

    def drop(self, tokens: Sequence[str]) -> None:
        """Forget holders and what was learnt."""
        for token in tokens:
            self._holders.pop(token, None)
            self._known.pop(token, None)


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        """What was learnt before; `Lost` in another shard than the one that learnt it."""
        if pid not in self._known:
            raise Lost
        return self._known[pid]


# -- where the noise is added ---------------------------------------------------------------------

_tokens: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_numbers = itertools.count()


def _token(of: Any) -> str:
    if of not in _tokens:
        _tokens[of] = f"{os.getpid()}-{next(_numbers)}"
    return _tokens[of]


class _Writer(cloudpickle.Pickler):
    """Writes a message that mentions engines and their parts by tokens: `mentioned`."""

    def __init__(self, file: io.BytesIO, root: Any) -> None:
        super().__init__(file)
        self._root = root
        self.mentioned: list[Any] = []

    def persistent_id(self, obj: Any) -> str | None:
        """The token of what is sent once."""
        if obj is self._root or not isinstance(obj, _SENT_ONCE):
            return None
        if obj not in self.mentioned:
            self.mentioned.append(obj)
        return _token(obj)


def written(root: Any) -> tuple[bytes, list[Any]]:
    """A message, and what must be known to read it."""
    file = io.BytesIO()
    writer = _Writer(file, root)
    writer.dump(root)
    return file.getvalue(), writer.mentioned


class Remote(Protocol):
    """A shard on another machine; calls return what is waited for with `result`."""

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Begin a call of a method of the shard; the function returned waits for its value."""


class Spread(Answers):
    """The records of several shards as one holder, for one chain; see `Holder`.

    If a shard is lost before its sum has come, nothing was released: it is made again from its
    source, told again what it had been told on the path under way, and asked again.
    """

    def __init__(self, shards: Shards, rows: Rows) -> None:
        self.engine, self._shards = rows, shards
        self._path: list[bytes] = []
        self._number: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._name = shards_name = f"{os.getpid()}-{next(_numbers)}"
        self._process = os.getpid()
        self._path, self._number = [], None
        finalize(self, self._shards.discard, shards_name)

    def __getstate__(self) -> dict[str, Any]:
        return {"engine": self.engine, "_shards": self._shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_shards"], state["engine"])  # type: ignore[misc]

    def forget(self) -> None:
        """Keep nothing of an earlier chain."""
        self._shards.discard(self._name)
        self._begin()

    def total(self, query: Query) -> np.ndarray:
        """(size,) int64, the exact sum over all units."""
        message, mentioned = written((self.engine, query))
        of = query.of
        if isinstance(of, Kick) and of.path != self._number:
            self._path, self._number = [], of.path
        sums = self._shards.ask(self._name, message, mentioned, self._path)
        total = np.zeros(query.sum.size, dtype=np.int64)
        for part in sums:
            if part.dtype != np.int64 or part.shape != total.shape:
                raise PrivacyError("A shard did not answer with the integers that were asked for.")
            total += part
        if isinstance(of, Kick):
            self._path.append(message)
        elif isinstance(of, EnergyError):
            self._path, self._number = [], None
        return total


class Announced:
    """Records that a model is built without: on made-up rows, in whose place they come.

    Attributes
    ----------
    n_rows, n_units : int
        Of all of them.
    """

    n_rows: int
    n_units: int
    given = "records.example(...)"  # what a model is built on
    trusted = True  # who has them runs code that is sent, and draws secret batches

    def announce(
        self,
        kinds: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
        n_rows: int,
        n_units: int,
        users: bool,
    ) -> None:
        """Say what there is: type and shape of a row of each array, and whether rows have users."""
        self.n_rows, self.n_units = n_rows, n_units
        self._examples = examples_of(kinds)
        #: Ids of the made-up rows, where rows belong to units.
        self.example_ids = np.arange(EXAMPLES) // 2 if users else None

    def example(self, name: str) -> np.ndarray:
        """Made-up rows, to build a model on.

        Parameters
        ----------
        name : str
            Of an array of the records.

        Returns
        -------
        (1009,) or (1009, number of columns) ndarray
            Of the type of the records: integers are 0 and 1, reals between 0 and 1.  Hand them over
            as they are: NumPy would compute of made-up rows, and nothing of the records.  Compute
            in the model, or before the records are handed over.
        """
        if name not in self._examples:
            raise ValueError(f"There is no array {name!r}; there are {sorted(self._examples)}.")
        return self._examples[name].copy()

    def in_place_of(self, records: Records, model: Model) -> Records:
        """The records of a model that was built on :meth:`example`."""
        limits = source_limits(model)
        found = {}
        for g, group in enumerate(records.groups):
            columns = []
            for leaf in group.graph.leaves:
                array = np.moveaxis(np.asarray(array_of(leaf.source)), leaf.axis, 0)
                names = [
                    name
                    for name, example in self._examples.items()
                    if example.shape == array.shape and np.array_equal(example, array)
                ]
                if not names:
                    what = f"`{leaf.source.name}`" if leaf.source.name else "An array"
                    raise UnsafeModel(
                        f"{what} of {group.graph.quoted} has rows and is not made of {self.given} "
                        "as it was given. Compute it before it is handed over, or in the model "
                        "(pm.math), where it is computed of every record."
                    )
                columns.append(Column(names[0], array.dtype, limits.get(leaf.source)))
            found[g] = columns
        return self._put(records, found)

    def _put(self, records: Records, columns: Mapping[int, Sequence[Column]]) -> Records:
        return take_place(records, columns, self.n_rows, self.n_units, self)

    def stated(self) -> dict[str, Any]:
        """What a statement says of them: nothing."""
        return {}

    def agree(self, plan_id: int, plan: Mapping[str, Any], rows: Rows | None = None) -> None:
        """Nothing is to be agreed with the machines of one owner."""


class Shards:
    """All shards of some records; a subclass says how to reach them, and makes lost ones again."""

    def __init__(self, remotes: Sequence[Remote]) -> None:
        self.remotes = list(remotes)
        self._known: list[set[str]] = [set() for _ in remotes]
        self._discarded: list[str] = []
        self._process = os.getpid()
        self._one_at_a_time = threading.RLock()

    def replaced(self, k: int) -> Remote:
        """Another shard with the records of the one that was lost; `Lost` if that is impossible."""
        raise Lost

    def holder(self, rows: Rows, plan_id: int) -> Spread:
        """A holder of all records, for one chain.  Bad records are refused now, before a charge."""
        with self._one_at_a_time:
            self._teach(range(len(self.remotes)), [rows])
        return Spread(self, rows)

    def processes(self, chains: int) -> int:
        """How many processes a number of chains takes: all machines work for one at a time."""
        return 1

    def discard(self, name: str) -> None:
        """Tell shards, with the next question, to forget a holder."""
        self._discarded.append(name)

    def ask(
        self, holder: str, message: bytes, mentioned: Sequence[Any], path: Sequence[bytes]
    ) -> list[np.ndarray]:
        """The sums of all shards; `path` are the earlier questions of the path under way."""
        if self._process != os.getpid():
            raise RuntimeError(
                "The machines that have the records were asked in another process than the one "
                "that found them. Sample with cores=1: all machines work for one chain at a time."
            )
        with self._one_at_a_time:
            return self._ask(holder, message, mentioned, path)

    def _ask(
        self, holder: str, message: bytes, mentioned: Sequence[Any], path: Sequence[bytes]
    ) -> list[np.ndarray]:
        dropped, self._discarded = self._discarded, []
        everywhere = range(len(self.remotes))
        for known in self._known:
            known.difference_update(dropped)
        lost = self._teach(everywhere, mentioned)
        told = holder, message, path
        waiting = {k: self._on_path(k, *told) for k in everywhere if k not in lost}
        for k in everywhere if dropped else ():
            self._begin(k, "drop", dropped)
        answers = []
        for k in everywhere:
            wait = waiting.get(k)
            for _ in range(_LOSSES):
                try:
                    if wait is not None:
                        answers.append(np.asarray(wait()))
                        break
                except Lost:
                    pass
                wait = self._ask_again(k, mentioned, *told)
            else:
                raise RuntimeError(
                    f"{_LOSSES} machines were lost one after the other while they answered the "
                    "same question, perhaps for want of memory. No answer was made. Give them more "
                    "memory, or each fewer records."
                )
        return answers

    def _ask_again(
        self,
        k: int,
        mentioned: Sequence[Any],
        holder: str,
        message: bytes,
        path: Sequence[bytes],
    ) -> Callable[[], Any] | None:
        """Ask a shard in the place of one that was lost; None if it is lost as well."""
        self.remotes[k], self._known[k] = self.replaced(k), set()
        return None if self._teach([k], mentioned) else self._on_path(k, holder, message, path)

    def _on_path(
        self, k: int, holder: str, message: bytes, path: Sequence[bytes]
    ) -> Callable[[], Any] | None:
        """Ask a shard, and tell it first of the path under way, if it took the place of another."""
        if holder not in self._known[k]:
            for earlier in path:  # the sums are not looked at
                wait = self._begin(k, "total", holder, earlier)
                try:
                    if wait is None:
                        return None
                    wait()
                except Lost:
                    return None
            self._known[k].add(holder)
        return self._begin(k, "total", holder, message)

    def _begin(self, k: int, method: str, *arguments: Any) -> Callable[[], Any] | None:
        """Begin a call; None if the shard is lost."""
        try:
            return self.remotes[k].call(method, *arguments)
        except Lost:
            return None

    def _teach(self, shards: Iterable[int], parts: Sequence[Any]) -> set[int]:
        """Send what some shards do not know yet to all of these at once; which ones are lost."""
        lost = set[int]()
        for part in parts:
            token = _token(part)
            ignorant = [k for k in shards if token not in self._known[k] and k not in lost]
            if not ignorant:
                continue
            message, inside = written(part)
            lost |= self._teach(ignorant, inside)
            waiting = [(k, self._begin(k, "learn", token, message)) for k in ignorant]
            for k, wait in waiting:
                try:
                    if wait is not None:
                        wait()
                        self._known[k].add(token)
                        continue
                except Lost:
                    pass
                lost.add(k)
            finalize(part, self._discarded.append, token)
        return lost


def take_place(
    records: Records, columns: Mapping[int, Sequence[Column]], n_rows: int, n_units: int, of: Any
) -> Records:
    """The same records, of which this process has none."""
    groups = []
    for g, group in enumerate(records.groups):
        blank = [np.zeros((2, *leaf.entries), leaf.block.type.dtype) for leaf in group.graph.leaves]
        store = DistantStore(blank, columns[g], n_rows, of)
        groups.append(Group(group.graph, store, group.units))
    return Records(records.parameters, tuple(groups), records.public_logp, n_units, records.initial)


def examples_of(kinds: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """Made-up rows of arrays, by name, of which type and shape of a row are given."""
    rng = np.random.default_rng(0)
    return {name: made_up_rows(dtype, row, rng) for name, (dtype, row) in kinds.items()}


def made_up_rows(dtype: np.dtype, row: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Rows that differ from those of any other array, and are exact in any type PyMC casts to."""
    shape = (EXAMPLES, *row)
    made = rng.integers(1, 1024, shape) / 1024 if dtype.kind == "f" else rng.integers(0, 2, shape)
    return stands_in(made.astype("int64" if dtype.kind == "b" else dtype))
