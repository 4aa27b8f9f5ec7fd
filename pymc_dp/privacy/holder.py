"""Who has records: answers a query with the exact integer sum over its units, before noise.

It knows no budget. The sum is private, asked for by :func:`pymc_dp.privacy.answer.answer` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pymc_dp.base.threads import over
from pymc_dp.errors import PrivacyError
from pymc_dp.privacy import noise
from pymc_dp.privacy.accounting import BatchEvent, FixedBatchGaussianEvent
from pymc_dp.privacy.answer import (
    LaplaceSum,
    Query,
    Receipt,
    Sum,
    VectorSum,
    answer,
    clip_linear,
)
from pymc_dp.privacy.queries import (
    Contribution,
    EnergyError,
    Kick,
    LogRatio,
    OfBatch,
    RatioMoments,
    Rows,
    ScoreAt,
    TemperedRatio,
)
from pymc_dp.rows.loops import SparseBlock

#: Probabilities of being in a batch are multiples of 1 / COINS.
COINS = 2**32


class _Path:
    """What each unit has gathered along one path."""

    def __init__(self, number: int, at: np.ndarray, n_units: int) -> None:
        self.number = number
        self.at = at
        self.work = np.zeros(n_units)
        self.kicks = 0
        self.scores: Any = None
        self.scale = np.empty(0)

    def arrive(self, engine: Rows, at: np.ndarray) -> None:
        """Add each unit's work from where it was kicked last to `at`."""
        self.work += engine.work(self.scores, self.at, at, self.scale)
        self.at = at


class Answers(ABC):
    """What a mechanism asks: sums with noise, of whoever can tell the exact ones."""

    @abstractmethod
    def total(self, query: Query) -> np.ndarray:
        """(size,) int64, the exact sum over all units; private."""

    def answer(self, query: Query, receipt: Receipt) -> np.ndarray:
        """The released value; see :func:`pymc_dp.privacy.answer.answer`."""
        return answer(query, self.total, receipt)

    def release(
        self, query: Query, receipt: Receipt, place: tuple[int, int], request: Mapping[str, Any]
    ) -> tuple[np.ndarray, float]:
        """The value of a one-off release, and its noise_sd. `place` is the plan and how many
        releases of it came before; `request` is what the ledger keeps of the question.
        """
        return self.answer(query, receipt), self.noise_sd(query.mechanism, query.sum)

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """No more will be asked for the plan."""

    def noise_sd(self, mechanism: str, sum_: Sum | LaplaceSum) -> float:
        """Standard deviation of the noise in each entry of an answer."""
        return sum_.noise_sd


class Holder(Answers):
    """The records of one machine. It remembers, for one chain and in one process, log-likelihoods
    at the last two points, what units gathered along a path, and the sum of a statistic; no pickle
    holds any of it.
    """

    def __init__(self, engine: Rows) -> None:
        self.engine = engine
        self._begin()

    def _begin(self) -> None:
        self._likelihoods: dict[bytes, np.ndarray] = {}
        self._path: _Path | None = None
        self._same: tuple[Query, np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"engine": self.engine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def forget(self) -> None:
        """Keep nothing of an earlier chain."""
        self._begin()
        self.engine.forget()

    def total(self, query: Query) -> np.ndarray:
        """(size,) int64, the exact sum over all units."""
        of, total = query.of, np.zeros(query.sum.size, dtype=np.int64)

        def add(vectors: np.ndarray, units: int = self.engine.n_units) -> None:
            block = np.atleast_2d(vectors)
            if block.shape[1] != units:
                raise PrivacyError("Not every unit was about to contribute once.")
            query.sum.add(SparseBlock.full(block), total)

        if isinstance(of, OfBatch):
            batch = _batch(self.engine, of.event)
            if batch is not None:
                total += Holder(batch).total(Query(query.mechanism, of.of, query.sum))
        elif isinstance(of, ScoreAt):
            self._add_scores(of.z, query.sum, total)
        elif isinstance(of, Kick):
            # the score first: an engine may find `at` as the middle of two midpoints
            scores, scale = self._add_scores(of.midpoint, query.sum, total)
            path = self._path
            if path is None or path.number != of.path:
                path = self._path = _Path(of.path, of.at, self.engine.n_units)
            else:
                path.arrive(self.engine, of.at)
            path.scores, path.scale, path.kicks = scores, scale, path.kicks + 1
        elif isinstance(of, EnergyError):
            path, self._path = self._path, None
            if path is None or (path.number, path.kicks) != (of.path, of.kicks):
                raise PrivacyError("A path was asked for its energy error, but not for all kicks.")
            path.arrive(self.engine, of.end)
            # the end last: it is what the next path begins with, if it is accepted
            add(self._ratio(of.start, of.end) - path.work)
        elif isinstance(of, LogRatio):
            add(self._ratio(of.start, of.end))
        elif isinstance(of, TemperedRatio):
            r = np.clip(self._ratio(of.start, of.end), -of.c, of.c)
            add(of.linear * r - of.square * r**2)
        elif isinstance(of, RatioMoments):
            r = np.clip(self._ratio(of.start, of.end), -of.c, of.c)
            add(of.linear * np.stack([r, (of.weight / of.c * r) * r]))
        elif self._same is not None and self._same[0] is query:
            total += self._same[1]
        else:
            for block in checked(self.engine, of):
                add(block, block.shape[1])
            self._same = query, total.copy()  # a chain may ask for the same again and again
        return total

    def _ratio(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """(n_units,) change of the log-likelihoods, remembering them at the last two points."""
        first = at_last_two(self._likelihoods, start, self.engine.log_likelihood)
        return at_last_two(self._likelihoods, end, self.engine.log_likelihood) - first

    def _add_scores(self, z: np.ndarray, sum_: Any, total: np.ndarray) -> tuple[Any, np.ndarray]:
        """Add the clipped scores at z; return those of every row before clipping, and scales."""
        assert isinstance(sum_, VectorSum)
        engine, n = self.engine, self.engine.n_units
        units, bound, rows = 1.0 / sum_.unit, sum_.bound, engine.linear()
        if rows is None:
            scores, scale = engine.scores(z), np.empty(n)

            def some(where: slice) -> np.ndarray:
                own, seen = np.zeros(len(total), dtype=np.int64), where.start
                for place, block in engine.sparse_vectors(scores, where):
                    if place != slice(seen, seen + block.values.shape[1]):
                        raise PrivacyError("A unit was about to contribute twice, or not at all.")
                    seen = place.stop
                    sum_.add(block, own, scale[place])
                if seen != where.stop:
                    raise PrivacyError("Not all units were about to contribute.")
                return own

            numbers = n * engine.d if engine.one_row_per_unit else 0
        else:
            found = np.empty((2, n))

            def some(where: slice) -> np.ndarray:
                own = np.zeros(len(total), dtype=np.int64)
                part = np.array([where.start, where.stop])
                clip_linear(rows, z, part, units, bound, own, found)
                return own

            numbers = rows.moves.common_values.size + rows.moves.moving_values.size
        for own in over(some, n, numbers):
            total += own
        if rows is not None:
            scores, scale = found
        return scores, scale


def holder_of(rows: Rows, plan_id: int) -> Any:
    """Who answers the queries of a plan: this process, or those who have the records."""
    return Holder(rows) if rows.elsewhere is None else rows.elsewhere.holder(rows, plan_id)


class Table(Answers):
    """Records of which a function makes the contributions, (size, n_units), of one query."""

    def __init__(self, n_units: int, contributions: Callable[[], np.ndarray]) -> None:
        self.n_units, self.contributions = n_units, contributions

    def total(self, query: Query) -> np.ndarray:
        """(size,) int64, the exact sum over all units."""
        vectors = self.contributions()
        if vectors.shape != (query.sum.size, self.n_units):
            raise PrivacyError("Not every unit was about to contribute once.")
        total = np.zeros(query.sum.size, dtype=np.int64)
        query.sum.add(SparseBlock.full(vectors), total)
        return total


@np.errstate(all="ignore")  # as silent as an answer
def rehearse(rows: Rows, queries: Sequence[Query]) -> None:
    """Answer queries about made-up records, in this order, before they are charged.

    All that an answer runs is compiled then, and tried: the sum over all units is that of the first
    one plus that over the others, to the last bit.  PrivacyError if it is not, as where a row sees
    other rows.
    """
    some = rows.synthetic(None), rows.synthetic(None, 0, 1), rows.synthetic(None, 1)
    whole, one, others = map(Holder, some)
    for query in queries:
        if not np.array_equal(whole.total(query), one.total(query) + others.total(query)):
            raise PrivacyError(
                f"Answers about {query.mechanism} are not sums of one contribution per unit, so "
                "none was charged or made. Please report the model."
            )


def at_last_two(
    memory: dict[bytes, np.ndarray], z: np.ndarray, compute: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """The value at z (d,), from a memory of the last two points: a chain's current and proposed
    one.
    """
    key = z.tobytes()
    if key in memory:  # the point was used: it is now the newer one
        memory[key] = memory.pop(key)
    else:
        if len(memory) >= 2:
            del memory[next(iter(memory))]
        memory[key] = compute(z)
    return memory[key]


def checked(rows: Rows, of: Contribution) -> Iterator[np.ndarray]:
    """Blocks in which every unit stands exactly once, with as many entries as announced."""
    seen = 0
    for where, block in of.blocks(rows):
        if where.start != seen or block.shape != (of.size, where.stop - where.start):
            raise PrivacyError("A unit was about to contribute twice, or with other entries.")
        seen = where.stop
        yield block
    if seen != rows.n_units:
        raise PrivacyError("Not all units were about to contribute.")


def _batch(rows: Rows, event: BatchEvent) -> Rows | None:
    """The records of a new secret batch; None if it is empty."""
    if isinstance(event, FixedBatchGaussianEvent):
        return rows.part(noise.subset(rows.n_units, event.batch_size))
    drawn = np.flatnonzero(noise.coins(rows.n_units, int(event.sampling_probability * COINS)))
    return rows.part(drawn) if len(drawn) else None
