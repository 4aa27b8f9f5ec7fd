"""Records in a Dask DataFrame: each worker of a cluster keeps some, and answers for them."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import pymc_dp.errors
from pymc_dp.clusters.shards import (
    Announced,
    Lost,
    Portion,
    Shard,
    Shards,
    joined,
)
from pymc_dp.errors import PrivacyError

if TYPE_CHECKING:
    from distributed import Client

#: Part of its memory that a worker fills with arrays (what comes later goes to its disk), and with
#: all that makes passes fast.
_IN_MEMORY, _FULL = 0.3, 0.6
#: Bytes that a fast pass keeps for each unit, beside vectors as large as its row.
_OF_A_UNIT = 150
#: Seconds without an answer after which it is asked whether a worker is alive.
_PATIENCE = 2.0
#: How often a lost worker's records are tried to be loaded again, at most if each try costs more
#: workers their lives, and seconds between two tries.
_TRIES, _DEATHS, _LONGEST_PAUSE = 60, 5, 5.0


def from_dask(
    frame: Any,
    columns: Mapping[str, str | Sequence[str]],
    *,
    privacy_unit: str | None = None,
    client: Client | None = None,
) -> DaskRecords:
    """Records that stay on the workers of a Dask cluster.

    ::

        records = dp.from_dask(frame, {"x": ["age", "income"], "y": "owns_home"})
        with pm.Model() as model:
            x = pm.Data("x", records.example("x"))
            beta = pm.Normal("beta", 0, 2, shape=2)
            pm.Bernoulli("y", logit_p=x @ beta, observed=records.example("y"))
            dp.PrivacyBudget(1.0, 1e-6, records=records)
            idata = dp.sample()

    Parameters
    ----------
    frame : dask.dataframe.DataFrame
        From Parquet or CSV files, a database, or anything that Dask reads; one row per record.
        Its partitions are loaded when this is called, and stay in the memory of the workers.  If a
        worker is lost, they are loaded again, and must be the same.
    columns : mapping of str to str or sequence of str
        Arrays for the model: one column makes a vector, several make a matrix with a row for each
        record.  Columns hold integers, reals or truth values.
    privacy_unit : str, optional
        A column of integers: the person, or other unit, that each row belongs to.  The rows of a
        unit are brought to one worker.  Default: every row is a unit of its own.
    client : distributed.Client, optional
        Default: the current one.

    Returns
    -------
    DaskRecords
        What `PrivacyBudget` takes as `records`.

    Raises
    ------
    ImportError
        If Dask is not installed.
    ValueError
        If there is no client, or a column is unknown or holds no numbers.

    Notes
    -----
    *Guarantee.* As for records in memory, to the last bit: workers send sums of clipped integers,
    which add to the sum over all records whatever their partitions are. (Numbers of a unit with
    several rows are rounded in the order of these, which a shuffle may change.) No record, and no
    number of one unit, is sent to the client, logged, or shown on the dashboard.

    *Assumptions.* The workers, the network between them and the machine of the client are trusted,
    as one machine would be: exact sums travel to the client, which adds the noise.

    *Weaknesses.* Errors of tasks that make the frame (a file that cannot be parsed, say) are logged
    by Dask, with what it was given.
    """
    try:
        import distributed
    except ImportError:
        raise ImportError(
            "dp.from_dask needs Dask. Install it: pip install 'pymc_dp[distributed]'."
        ) from None
    if client is None:
        try:
            client = distributed.get_client()
        except ValueError:
            raise ValueError(
                "There is no Dask client. Make one first, `client = distributed.Client()` for the "
                "processors of this machine, or give client=."
            ) from None
    spec = _checked(frame, columns, privacy_unit)
    wanted = [name for given in spec.values() for name in np.atleast_1d(given)]
    frame = frame[list(dict.fromkeys([*wanted, *([privacy_unit] if privacy_unit else [])]))]
    if privacy_unit is not None:
        frame = frame.shuffle(on=privacy_unit)
    return DaskRecords(client, frame, spec, privacy_unit)


def _checked(
    frame: Any, columns: Mapping[str, str | Sequence[str]], unit: str | None
) -> dict[str, str | list[str]]:
    """The columns of each array; ValueError if there is one without numbers."""
    if not hasattr(frame, "to_delayed") or not hasattr(frame, "dtypes"):
        raise ValueError(f"frame must be a Dask DataFrame, not {type(frame).__name__}.")
    if not isinstance(columns, Mapping) or not columns:
        raise ValueError(
            "columns must name the arrays of the model: {'x': ['age', 'income'], 'y': 'owns_home'}."
        )
    spec = {
        name: given if isinstance(given, str) else list(given) for name, given in columns.items()
    }
    known = dict(frame.dtypes)
    there = sorted(map(str, known))
    for name, given in [*spec.items(), *([("privacy_unit", unit)] if unit is not None else [])]:
        if not len(given):
            raise ValueError(f"'{name}' has no columns. Name at least one, or leave it out.")
        for column in [given] if isinstance(given, str) else given:
            if column not in known:
                raise ValueError(f"'{name}' asks for column {column!r}, and the frame has {there}.")
            kind = getattr(getattr(known[column], "numpy_dtype", known[column]), "kind", "O")
            if kind not in ("iu" if name == "privacy_unit" else "iufb"):
                wanted = "integers" if name == "privacy_unit" else "integers, reals or truth values"
                raise ValueError(
                    f"Column {column!r} holds {known[column]}, and '{name}' needs {wanted}. Encode "
                    "it in the frame, by `.cat.codes` or a dictionary that is public."
                )
    return spec


def _type(dtypes: Mapping[str, Any], given: str | list[str]) -> np.dtype:
    """Of the array that some columns make."""
    names = [given] if isinstance(given, str) else given
    return np.result_type(*[getattr(dtypes[n], "numpy_dtype", dtypes[n]) for n in names])


def _portion(
    frame: Any, spec: Mapping[str, str | list[str]], types: Mapping[str, np.dtype], unit: str | None
) -> Portion | None:
    """Arrays of a partition, and whose rows they are; None if they cannot be made.

    Nothing is raised, and no warning: Dask logs what a task was given, and these are records.
    """
    try:
        with np.errstate(all="ignore"):
            arrays = {
                name: np.ascontiguousarray(_exactly(frame[given], types[name]))
                for name, given in spec.items()
            }
            ids = None if unit is None else _exactly(frame[unit], np.dtype("int64"))
        return _in_its_place(Portion(arrays, ids))
    except Exception:
        return None


def _exactly(frame: Any, dtype: np.dtype) -> np.ndarray:
    """The numbers of a frame or a column; ValueError where integers are none, or do not fit."""
    found: np.ndarray = frame.to_numpy(dtype)
    if dtype.kind != "f" and not np.array_equal(found, frame.to_numpy()):
        raise ValueError("integers or truth values were announced")
    return found


def _in_its_place(portion: Portion) -> Portion:
    """A portion in memory, or on the disk of this worker if its memory is full."""
    used, limit, folder = _memory()
    if used > _IN_MEMORY * limit and not portion.on_disk:
        portion.move_to(folder)
    return portion


def _memory() -> tuple[int, int, str]:
    """Bytes that this worker uses, bytes that it may use, and its folder for the rest."""
    import psutil
    from distributed import get_worker

    worker = get_worker()
    limit = worker.memory_manager.memory_limit or psutil.virtual_memory().total // 2
    return psutil.Process().memory_info().rss, limit, worker.local_directory


class _Worker:
    """A shard on a worker: answers in words of this package alone."""

    def __init__(self, salt: int, *portions: Portion | None) -> None:
        self._shard: Shard | None = None
        found = [_in_its_place(portion) for portion in portions if portion is not None]
        if len(found) < len(portions):
            return
        # of portions as they came: whether they are joined depends on what memory is free
        self._digest = sum(portion.digest(salt) for portion in found) % 2**64
        used, limit, _ = _memory()
        kept = sum(portion.n_rows * (portion.bytes_per_row + _OF_A_UNIT) for portion in found)
        lean = any(portion.on_disk for portion in found) or used + kept > _FULL * limit
        self._shard = Shard(joined(found), lean)
        _share_processors()

    def call(self, method: str, *arguments: Any) -> tuple[str, Any]:
        """The value of a method, or an error whose message holds no record."""
        if self._shard is None:
            return "UnsafeModel", (
                "Some partitions hold no numbers where columns of numbers were announced (missing "
                "values among integers, say). Clean them in the frame."
            )
        if method == "size":
            return "", (self._shard.n_rows, self._shard.n_units, self._digest)
        try:
            return "", getattr(self._shard, method)(*arguments)
        except Lost:  # Dask has asked this one in the place of another
            return "Lost", ""
        except Exception as error:
            name = type(error).__name__
            known = hasattr(pymc_dp.errors, name)
            return (name, str(error)) if known else ("RuntimeError", f"A worker failed: {name}.")


def _share_processors() -> None:
    """Use as many threads as the worker was given."""
    from distributed import get_worker

    from pymc_dp.base import threads

    threads.share(max(1, threads.available() // get_worker().state.nthreads))


def _given_up(actor: Any) -> None:
    """Want an actor no more: or Dask would load its records too, and count every worker that dies
    meanwhile against the partitions, which it refuses after some.
    """
    if actor is not None:
        actor.cancel(force=True)


def _killed(error: Exception) -> bool:
    """Whether Dask gave a task up, since every worker that began it died."""
    from distributed import KilledWorker

    return isinstance(error, KilledWorker)


class _Reached:
    """A shard that is reached through Dask."""

    def __init__(self, made: Any, actor: Any, alive: Callable[[], list[str]]) -> None:
        self.made, self._actor, self._alive = made, actor, alive

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Begin a call; see `Remote`."""
        try:
            future = self._actor.call(method, *arguments)
        except Exception:
            raise Lost from None

        def wait() -> Any:
            while True:
                try:
                    failed, value = future.result(timeout=_PATIENCE)
                    break
                except TimeoutError:  # Dask may wait for ever for a worker that is gone
                    if self._actor._address not in self._alive():
                        raise Lost from None
                except Exception:
                    raise Lost from None
            if failed == Lost.__name__:
                raise Lost
            if failed:
                raise getattr(pymc_dp.errors, failed, RuntimeError)(value)
            return value

        return wait


class DaskRecords(Announced, Shards):
    """Records on the workers of a Dask cluster; made by :func:`pymc_dp.from_dask`."""

    def __init__(
        self, client: Any, frame: Any, spec: Mapping[str, str | list[str]], unit: str | None
    ) -> None:
        import dask

        self._client, self._salt = client, secrets.randbits(64)
        dtypes = dict(frame.dtypes)
        types = {name: _type(dtypes, given) for name, given in spec.items()}
        make = dask.delayed(_portion, pure=False)
        self._portion = lambda part: make(part, dict(spec), types, unit)  # a new task each time
        parts, workers = frame.to_delayed(), self._alive()
        if not workers:
            raise ValueError("The Dask cluster has no workers. Start some, and call again.")
        chunks = np.array_split(np.arange(len(parts)), min(len(workers), len(parts)))
        self._sources = [[parts[k] for k in chunk] for chunk in chunks]
        loading = [self._load(k, workers[k]) for k in range(len(chunks))]
        super().__init__([self._loaded(k, workers, loading.pop(0)) for k in range(len(chunks))])
        self._sizes = [self._size(k) for k in range(len(chunks))]
        n_rows, n_units, _ = (sum(each) for each in zip(*self._sizes, strict=True))
        if n_units < 2:
            raise ValueError("The frame has fewer than two records, and one cannot be hidden.")
        kinds = {name: (types[name], _row(given)) for name, given in spec.items()}
        self.announce(kinds, n_rows, n_units, unit is not None)

    def _alive(self) -> list[str]:
        """Addresses of the workers."""
        if self._client.status not in ("running", "connecting"):
            raise RuntimeError(
                "The Dask client was closed, or has lost its scheduler. No answer was made; what "
                "was charged is in the ledger. Connect again, and call dp.from_dask again."
            )
        return list(self._client.scheduler_info(n_workers=-1)["workers"])

    def _load(self, k: int, worker: str) -> Any:
        """A future of the actor that has the k-th part of the records, best on that worker."""
        # tasks that are tied to a worker wait for ever when it is lost
        here = {"workers": [worker], "allow_other_workers": True}
        portions = self._client.compute([self._portion(part) for part in self._sources[k]], **here)
        return self._client.submit(_Worker, self._salt, *portions, actor=True, pure=False, **here)

    def _loaded(self, k: int, workers: Sequence[str], actor: Any = None) -> _Reached:
        """The shard that is being loaded, or else the one that is loaded in its place."""
        for attempt in range(_TRIES):
            if actor is None:
                workers = self._alive()
                actor = self._load(k, workers[(k + attempt) % len(workers)]) if workers else None
            try:
                while actor is not None:
                    with contextlib.suppress(TimeoutError):
                        return _Reached(actor, actor.result(timeout=_PATIENCE), self._alive)
                    if actor.status != "pending" or not set(workers) <= set(self._alive()):
                        break
            except Exception as error:
                lost = not set(workers) <= set(self._alive()) or _killed(error)
                if actor.status == "error" and (not lost or attempt >= _DEATHS):
                    raise self._unreadable(k, error) from None
            _given_up(actor)
            actor = None
            time.sleep(min(attempt + 1, _LONGEST_PAUSE))  # workers may be about to come back
        raise RuntimeError(
            "The records of a worker that was lost could not be loaded again: others were lost "
            "too. No answer was made; what was charged is in the ledger. Check the cluster, and "
            "call again."
        )

    def _unreadable(self, k: int, error: Exception) -> RuntimeError:
        """What is raised if records cannot be loaded; the message of `error` may hold some."""
        first = sum(len(parts) for parts in self._sources[:k])
        return RuntimeError(
            f"Partitions {first} to {first + len(self._sources[k]) - 1} of the frame could not be "
            f"loaded ({type(error).__name__}). "
            + (
                "The workers that tried were killed, perhaps for want of memory: make partitions "
                "smaller, or give workers more."
                if _killed(error)
                else "Call frame.partitions[k].compute() to see why: what it says may hold records."
            )
        )

    def _size(self, k: int) -> tuple[int, int, int]:
        """Rows and units of the k-th part, and their digest."""
        while True:
            try:
                size: tuple[int, int, int] = self.remotes[k].call("size")()
                return size
            except Lost:
                self.remotes[k] = self._in_place(k)

    def replaced(self, k: int) -> _Reached:
        """The same records, loaded again by a worker that is alive; PrivacyError if the source has
        others now, as the same one may then be with two workers.
        """
        self.remotes[k] = self._in_place(k)
        if self._size(k) != self._sizes[k]:
            raise PrivacyError(
                "A worker was lost, and the frame gave other rows than before when they were "
                "loaded again. No answer was made. Use a source whose partitions are the same at "
                "each reading (a database needs an order), best files that nobody changes."
            )
        found = self.remotes[k]
        assert isinstance(found, _Reached)
        return found

    def _in_place(self, k: int) -> _Reached:
        lost = self.remotes[k]
        assert isinstance(lost, _Reached)
        _given_up(lost.made)
        return self._loaded(k, [])


def _row(given: str | list[str]) -> tuple[int, ...]:
    """Shape of a row of the array that some columns make."""
    return () if isinstance(given, str) else (len(given),)
