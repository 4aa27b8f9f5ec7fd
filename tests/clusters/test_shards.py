"""Records that are spread over shards: the same integers as on one machine, and nothing else."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest

from pymc_dp.base.matrices import Coordinates
from pymc_dp.clusters.shards import Column, Lost, Portion, Shard, Shards, Spread, joined, take_place
from pymc_dp.errors import PrivacyError, UnsafeModel
from pymc_dp.privacy.answer import Grid, IntervalSum, NormCounts, Query, VectorSum
from pymc_dp.privacy.holder import holder_of
from pymc_dp.privacy.queries import EnergyError, Kick, LogRatio, ScoreAt
from pymc_dp.records.ancestry import array_of
from pymc_dp.records.extraction import extract
from pymc_dp.rows.contributions import (
    Change,
    ConsistentScore,
    Curvature,
    ExpectedCurvature,
    LawNotFound,
    Loss,
    Score,
)
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from tests.selection import marked, others

N, USERS, EXAMPLES = 600, 200, 64
Data = dict[str, np.ndarray]


def data(n: int, seed: int) -> Data:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(n, 3)),
        "g": rng.integers(0, 4, size=n),
        "y": rng.integers(0, 2, size=n),
        "r": rng.normal(size=n),
    }


def logistic(given: Data) -> None:
    x = pm.Data("features", given["x"])
    pm.Bernoulli("owns", logit_p=x @ pm.Normal("b", 0.0, 2.0, shape=3), observed=given["y"])


def groups(given: Data) -> None:
    g = pm.Data("group", given["g"])
    mu, tau, z = pm.Normal("mu"), pm.HalfNormal("tau"), pm.Normal("z", shape=4)
    pm.Normal("height", (mu + tau * z)[g], pm.HalfNormal("s"), observed=given["r"])


MODELS: dict[str, Callable[[Data], None]] = {"logistic": logistic, "groups": groups}


class Near:
    """A shard in this process, which sees of the world what would come over a network."""

    def __init__(self, shard: Shard, seen: list[bytes]) -> None:
        self.shard, self.seen = shard, seen

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        sent = pickle.dumps(arguments)
        back = pickle.dumps(getattr(self.shard, method)(*pickle.loads(sent)))
        self.seen += [sent, back]
        return lambda: pickle.loads(back)


class Mortal(Near):
    """A shard whose machine goes down at a call, before its answer comes, and stays down."""

    calls = 0
    dies_at: tuple[int, ...] = ()
    dead = False

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        if self.dead:
            raise Lost
        wait = super().call(method, *arguments)
        Mortal.calls += 1
        self.dead = Mortal.calls in self.dies_at

        def lost() -> Any:
            raise Lost

        return lost if self.dead else wait


class Pool(Shards):
    """Shards of some data; lost ones are made again."""

    def __init__(self, parts: list[tuple[Data, np.ndarray | None]], kind: type[Near]) -> None:
        self.parts, self.kind, self.seen = parts, kind, list[bytes]()
        self.made_again = 0
        super().__init__([self.shard(k) for k in range(len(parts))])

    def shard(self, k: int) -> Near:
        return self.kind(Shard([Portion(*self.parts[k])]), self.seen)

    def replaced(self, k: int) -> Near:
        self.made_again += 1
        return self.shard(k)


def engine_of(records: Any) -> RowEngine:
    d = records.parameters.size
    engine = RowEngine.of(records, Coordinates(records.initial, np.eye(d)))
    predictor, _ = recognise(engine)
    return engine if predictor is None else PredictorEngine(engine, predictor)


def here_and_elsewhere(
    name: str, users: bool, k: int, kind: type[Near] = Near
) -> tuple[RowEngine, RowEngine, Pool]:
    """The same records in one place, and in k shards of unequal size, the first of them empty."""
    given, made_up = data(N, 1), data(EXAMPLES, 2)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, USERS, size=N) if users else None
    with pm.Model() as model:
        MODELS[name](given)
    whole = extract(model, privacy_unit=ids)
    with pm.Model() as model:
        MODELS[name](made_up)
    records = extract(model, privacy_unit=np.arange(EXAMPLES) // 2 if users else None)
    columns = {}
    for number, group in enumerate(records.groups):
        arrays = [array_of(leaf.source) for leaf in group.graph.leaves]
        columns[number] = [
            Column(key, array.dtype)
            for array in arrays
            for key, example in made_up.items()
            if example.shape == array.shape and np.array_equal(example, array)
        ]
    of = (np.arange(N) if ids is None else ids) ** 2 % max(k - 1, 1) + (k > 1)
    parts = [
        ({key: x[of == j] for key, x in given.items()}, None if ids is None else ids[of == j])
        for j in range(k)
    ]
    pool = Pool(parts, kind)
    return engine_of(whole), engine_of(take_place(records, columns, N, whole.n_units, pool)), pool


def queries(d: int, tilted: bool) -> list[Query]:
    """Some of every kind."""
    grid, z = Grid.finest(1.0, N), np.linspace(-0.2, 0.3, d)
    at = Coordinates(z, 0.3 * np.eye(d) + 0.01)

    def vector(size: int) -> VectorSum:
        return VectorSum(grid, "replace_one", size, 0.5)

    number = IntervalSum(grid, "replace_one", -1.0, 1.0)
    asked = [
        Query("q", ScoreAt(z), vector(d)),
        Query("q", Kick(1, 0.0 * z, z), vector(d)),
        Query("q", Kick(1, 2.0 * z, 2.5 * z), vector(d)),
        Query("q", EnergyError(1, 2, 0.0 * z, 3.0 * z), number),
        Query("q", LogRatio(z, 2.0 * z), number),
    ]
    specs: list[Any] = [Score(at), Change(at, z), Curvature(at)]
    if not tilted:
        specs += [ConsistentScore(at, clip_norm=0.3), ExpectedCurvature(at), LawNotFound(at)]
        specs += [Loss(at, 0.3)]
    for spec in specs:
        asked.append(Query("q", spec, vector(spec.size)))
        asked.append(Query("q", spec, NormCounts(grid, "replace_one")))
    return asked


CASES = [(name, users, k) for name in MODELS for users in (False, True) for k in (1, 2, 7)]


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "users", "k"), marked(CASES, slow=others(CASES, [("logistic", False, 2)]))
)
def test_sums_are_those_of_one_machine(name: str, users: bool, k: int) -> None:
    whole, spread, _ = here_and_elsewhere(name, users, k)
    for one, other in ((whole, spread), (whole.tilted(), spread.tilted())):
        near, far = holder_of(one, 0), holder_of(other, 0)
        assert isinstance(far, Spread)
        for query in queries(whole.d, one.is_tilted):
            np.testing.assert_array_equal(far.total(query), near.total(query), str(query))


@pytest.mark.parametrize("users", marked([False, True], slow=[True]))
def test_portions_on_disk_give_the_same_sums(users: bool, tmp_path: Path) -> None:
    whole, spread, pool = here_and_elsewhere("logistic", users, 5)
    portions = [Portion(*part) for part in pool.parts]
    for portion in portions:
        portion.move_to(str(tmp_path))
    assert all(portion.on_disk for portion in portions) and not list(tmp_path.iterdir())
    pool.remotes = [Near(Shard(portions[:3], lean=True), []), Near(Shard(portions[3:], True), [])]
    pool._known = [set(), set()]
    near, far = holder_of(whole.tilted(), 0), holder_of(spread.tilted(), 0)
    for query in queries(whole.d, True) * 2:
        np.testing.assert_array_equal(far.total(query), near.total(query), str(query))


@pytest.mark.parametrize("users", [False, True])
def test_small_portions_are_joined(users: bool) -> None:
    _, _, pool = here_and_elsewhere("logistic", users, 5)
    portions = [Portion(*part) for part in pool.parts]
    [one] = joined(portions)
    assert (one.n_rows, one.n_units) == (N, sum(portion.n_units for portion in portions))
    np.testing.assert_array_equal(one.arrays["r"], np.concatenate([p["r"] for p, _ in pool.parts]))
    if users:
        where = np.concatenate([ids for _, ids in pool.parts])
        assert len({*zip(where, one.units, strict=True)}) == one.n_units


@pytest.mark.parametrize("dies_at", [(), (3,), (5,), (7, 8, 9), (12,)])
def test_a_lost_shard_is_told_again_what_it_knew(
    dies_at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, spread, pool = here_and_elsewhere("groups", False, 2, Mortal)
    monkeypatch.setattr(Mortal, "calls", 0)
    monkeypatch.setattr(Mortal, "dies_at", dies_at)
    near, far = holder_of(whole, 0), holder_of(spread, 0)
    for query in queries(whole.d, False)[:5]:
        np.testing.assert_allclose(far.total(query), near.total(query), rtol=1e-9)
    assert pool.made_again == len(dies_at)


def test_a_question_that_costs_all_machines_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, spread, pool = here_and_elsewhere("groups", False, 2, Mortal)
    monkeypatch.setattr(Mortal, "calls", 0)
    far = holder_of(spread, 0)
    monkeypatch.setattr(Mortal, "dies_at", range(10**6))
    with pytest.raises(RuntimeError, match="10 machines were lost one after the other"):
        far.total(queries(whole.d, False)[0])
    assert pool.made_again == 10


def test_threads_ask_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chains on paths of their own, while machines are lost."""
    whole, spread, _ = here_and_elsewhere("groups", False, 2, Mortal)
    monkeypatch.setattr(Mortal, "calls", 0)
    near = holder_of(whole, 0)
    path = queries(whole.d, False)[1:4]
    expected = [near.total(query) for query in path]
    chains = [holder_of(spread, 0) for _ in range(2)]
    monkeypatch.setattr(Mortal, "dies_at", range(20, 400, 37))

    def ask(chain: Any) -> list[np.ndarray]:
        return [chain.total(query) for _ in range(10) for query in path]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(ask, chains):
            for total, exact in zip(found, expected * 10, strict=True):
                np.testing.assert_array_equal(total, exact)


def test_a_digest_tells_other_rows() -> None:
    given, ids = data(50, 1), np.arange(50) // 2
    digest, order = Portion(given, ids).digest(7), np.random.default_rng(2).permutation(50)
    assert Portion({k: x[order] for k, x in given.items()}, ids[order]).digest(7) == digest
    others = [Portion(given, None), Portion(given, np.arange(50) // 5), Portion(data(50, 3), ids)]
    for name, array in given.items():
        changed = array.copy()
        changed[17] += 1
        others.append(Portion({**given, name: changed}, ids))
    others.append(Portion({**given, "y": given["g"], "g": given["y"]}, ids))
    assert digest not in {other.digest(7) for other in others}
    assert Portion(given, ids).digest(8) != digest


def test_a_portion_that_moves_to_another_machine(tmp_path: Path) -> None:
    portion = Portion(data(50, 1), np.arange(50) // 2)
    size, digest = sys.getsizeof(portion), portion.digest(7)
    assert size > 50 * 8 * 5
    portion.move_to(str(tmp_path))
    assert sys.getsizeof(portion) < size / 2
    again = pickle.loads(pickle.dumps(portion))
    assert not again.on_disk and again.digest(7) == digest
    again.release_memory()
    again.move_to(str(tmp_path))
    again.release_memory()
    assert again.on_disk and again.digest(7) == portion.digest(7) == digest


def test_no_record_is_sent() -> None:
    whole, spread, pool = here_and_elsewhere("groups", False, 2)
    far = holder_of(spread, 0)
    for query in queries(whole.d, False)[:7]:
        far.total(query)
    secret = {value.tobytes() for part, _ in pool.parts for value in part["r"]}
    assert len(secret) > N - 5
    everything = b"".join(pool.seen)
    found = sum(value in everything for value in secret)
    assert found == 0
    # what is looked for would be seen
    assert all(value in pickle.dumps(pool.parts) for value in list(secret)[:10])


def test_bad_records_are_named_without_their_values() -> None:
    _, spread, pool = here_and_elsewhere("groups", False, 2)
    pool.parts[1][0]["r"][5] = np.nan
    pool.remotes = [pool.shard(k) for k in range(2)]
    with pytest.raises(UnsafeModel, match=r"`r` holds NaN or infinite values"):
        holder_of(spread, 0).total(queries(spread.d, False)[0])


def test_there_is_nothing_to_read_where_the_noise_is_added() -> None:
    _, spread, _ = here_and_elsewhere("groups", False, 2)
    with pytest.raises(PrivacyError, match="on other machines"):
        spread.log_likelihood(np.zeros(spread.d))


def test_another_process_is_told_to_use_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    _, spread, _ = here_and_elsewhere("groups", False, 2)
    far = holder_of(spread, 0)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="cores=1"):
        far.total(queries(spread.d, False)[0])
