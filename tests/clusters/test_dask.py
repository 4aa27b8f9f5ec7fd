"""Records in a Dask DataFrame, on a cluster of two processes of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.clusters.dask import _portion
from pymc_dp.privacy import holder
from pymc_dp.privacy.answer import Grid, IntervalSum, Query, VectorSum
from pymc_dp.privacy.noise import insecure_noise
from pymc_dp.privacy.queries import EnergyError, Kick, ScoreAt
from tests.selection import marked

distributed = pytest.importorskip("distributed")
dd = pytest.importorskip("dask.dataframe")
tcp = pytest.importorskip("distributed.comm.tcp")

ROOT = Path(__file__).parents[2]
N = 4000
TRUTH = np.array([1.0, -0.5, 0.3])


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs="ERROR"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def table(n: int = N) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3))
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    frame["y"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-x @ TRUTH))).astype(int)
    frame["person"] = np.arange(n) // 2
    frame["town"] = np.where(frame["a"] > 0.0, "north", "south")
    frame["rich"] = frame["b"] > 0.0
    return frame


COLUMNS = {"x": ["a", "b", "c"], "y": "y"}
QUIET = {"progressbar": False, "random_seed": 1}


@pytest.fixture(scope="module")
def records(client: Any) -> Any:
    return dp.from_dask(dd.from_pandas(table(), npartitions=5), COLUMNS)


def logistic(records: Any, **budget: Any) -> pm.Model:
    with pm.Model() as model:
        x = pm.Data("x", records.example("x"))
        b = pm.Normal("b", 0.0, 2.0, shape=3)
        pm.Bernoulli("y", logit_p=x @ b, observed=records.example("y"))
        dp.PrivacyBudget(4.0, 1e-6, records=records, **budget)
    return model


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "unit", "words"),
    [
        ({"x": ["a", "nowhere"]}, None, r"'x' asks for column 'nowhere', and the frame has \['a',"),
        ({"x": "town"}, None, r"Column 'town' holds .* Encode it in the frame"),
        ({"x": []}, None, r"'x' has no columns"),
        ({}, None, r"columns must name the arrays"),
        ({"x": "a"}, "a", r"Column 'a' holds float64, and 'privacy_unit' needs integers"),
    ],
)
def test_columns_that_make_no_arrays(client: Any, columns: Any, unit: Any, words: str) -> None:
    frame = dd.from_pandas(table(20), npartitions=2)
    with pytest.raises(ValueError, match=words):
        dp.from_dask(frame, columns, privacy_unit=unit)


def test_a_frame_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a Dask DataFrame, not DataFrame"):
        dp.from_dask(table(20), COLUMNS)


def test_without_a_client_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise ValueError("No global client found and no address provided")

    monkeypatch.setattr(distributed, "get_client", none)
    with pytest.raises(ValueError, match=r"client = distributed\.Client"):
        dp.from_dask(dd.from_pandas(table(20), npartitions=2), COLUMNS)


def test_examples_have_names(records: Any) -> None:
    assert records.example("x").shape == (1009, 3)
    with pytest.raises(ValueError, match=r"no array 'z'; there are \['x', 'y'\]"):
        records.example("z")


def test_what_was_computed_from_an_example_is_refused(records: Any) -> None:
    with pm.Model() as model:
        x = pm.Data("x", 2.0 * records.example("x"))
        pm.Bernoulli("y", logit_p=x @ pm.Normal("b", shape=3), observed=records.example("y"))
        budget = dp.PrivacyBudget(1.0, 1e-6, records=records)
    with pytest.raises(dp.UnsafeModel, match=r"`x` .* is not made of records\.example"):
        by_hand(model)
    assert budget.spent().epsilon == 0.0


@pytest.mark.parametrize("where", ["prior", "likelihood"])
def test_the_number_of_made_up_rows_is_no_number(records: Any, where: str) -> None:
    with pm.Model() as model:
        x = pm.Data("x", records.example("x"))
        root = pt.sqrt(x.shape[0])
        b = pm.Normal("b", 0.0, 1.0 / root if where == "prior" else 1.0, shape=3)
        scale = root if where == "likelihood" else 1.0
        pm.Bernoulli("y", logit_p=x @ b / scale, observed=records.example("y"))
        budget = dp.PrivacyBudget(1.0, 1e-6, records=records)
    refused = dp.UnsafeModel if where == "prior" else dp.NotFactorizable
    with pytest.raises(refused, match="made-up rows where the records are elsewhere"):
        by_hand(model)
    assert budget.spent().epsilon == 0.0


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pd.Series([1.0, 1.7, np.nan]), "int64"),
        (pd.Series([1.0, 1.5]), "int64"),
        (pd.Series([True, None, np.nan]), "bool"),
        (pd.Series([-1, 300, 2**40]), "uint8"),
        (pd.Series([1, None], dtype="Int64"), "int64"),
        (pd.Series([2.0**63]), "int64"),
        (pd.Series(["1.0", "x"]), "float64"),
    ],
)
def test_what_is_no_number_of_its_type_is_no_portion(
    given: pd.Series, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a data set may differ in their types."""
    monkeypatch.setattr("pymc_dp.clusters.dask._memory", lambda: (0, 1, ""))

    def portion(x: Any, kind: str, person: Any) -> Any:
        frame = pd.DataFrame({"x": x, "person": person})
        return _portion(frame, {"x": "x"}, {"x": np.dtype(kind)}, "person")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a record, in the log of a worker
        assert portion(given, kind, 7) is None
        assert portion(np.ones(len(given)), kind, 7).n_rows == len(given)
        if kind == "int64":
            assert portion(0.5, "float64", given) is None
        assert portion(0.5, "float64", np.ones(len(given))).n_units == 1


def test_a_frame_without_records(client: Any) -> None:
    frame = dd.from_pandas(table(20), npartitions=2)
    with pytest.raises(ValueError, match="fewer than two records"):
        dp.from_dask(frame[frame["a"] > 100.0], COLUMNS)


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_examples_are_refused_without_their_records(records: Any, kind: str) -> None:
    with pm.Model():
        x = pm.Data("x", records.example("x").astype(kind))
        pm.Bernoulli("y", logit_p=x @ pm.Normal("b", shape=3), observed=table(1009)["y"])
        with pytest.raises(
            dp.UnsafeModel, match=r"made-up rows .* PrivacyBudget\(\.\.\., records="
        ):
            dp.PrivacyBudget(1.0, 1e-6)


def test_batches_of_a_fixed_size_are_refused(records: Any) -> None:
    model = logistic(records)
    with pytest.raises(ValueError, match="on several machines"):
        dp.DPSGLD(draws=20, chains=1, batch_size=50, batches="fixed_size", model=model)
    assert dp.get_budget(model).spent().epsilon == 0.0


def test_records_know_their_units(records: Any) -> None:
    with pytest.raises(ValueError, match="leave privacy_unit out"):
        logistic(records, privacy_unit=np.arange(1009))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("b", np.nan, r"column 1 of `x` holds NaN"), ("y", 3, "outcomes of `y` have probability")],
)
def test_bad_rows_are_refused_before_anything_is_spent(
    client: Any, column: str, value: Any, message: str
) -> None:
    frame = table(200)
    frame.loc[17, column] = value
    model = logistic(dp.from_dask(dd.from_pandas(frame, npartitions=3), COLUMNS))
    with pytest.raises(dp.UnsafeModel, match=message) as caught:
        by_hand(model)
    assert not re.search(r"\d\.\d{3}", str(caught.value))
    assert dp.get_budget(model).spent().epsilon == 0.0


def by_hand(model: pm.Model) -> Any:
    settings = {
        "clip_norm": 1.0,
        "scaling": 0.1,
        "step_size": 0.2,
        "n_steps": 2,
        "energy_clip": 0.1,
    }
    return dp.DPLangevin(draws=20, tune=0, chains=2, model=model, progressbar=False, **settings)


def test_a_file_that_cannot_be_read_is_no_lost_worker(client: Any, tmp_path: Path) -> None:
    frame = parquet(tmp_path, 400)
    (tmp_path / "part2.parquet").write_bytes(b"PAR1 a secret PAR1")
    with pytest.raises(RuntimeError, match=r"Partitions 2 to 3 of the frame") as caught:
        dp.from_dask(frame, COLUMNS)
    assert "frame.partitions[k].compute()" in str(caught.value)
    assert "secret" not in str(caught.value) and caught.value.__suppress_context__


@pytest.mark.slow
def test_one_chain_at_a_time(records: Any) -> None:
    model = logistic(records)
    step = by_hand(model)
    with pytest.raises(dp.PlanMismatch, match=r"Add cores=1"):
        pm.sample(draws=20, tune=0, chains=2, cores=2, step=step, model=model, progressbar=False)
    assert dp.get_budget(model).spent().epsilon == 0.0


# -- what is the same ------------------------------------------------------------------------------


def asked(d: int) -> list[Query]:
    z, grid = np.linspace(-0.2, 0.3, d), Grid.finest(1.0, N)
    sum_ = VectorSum(grid, "replace_one", d, 0.5)
    number = IntervalSum(grid, "replace_one", -1.0, 1.0)
    return [
        Query("q", ScoreAt(z), sum_),
        Query("q", Kick(1, 0.0 * z, z), sum_),
        Query("q", Kick(1, 2.0 * z, 2.5 * z), sum_),
        Query("q", EnergyError(1, 2, 0.0 * z, 3.0 * z), number),
    ]


def in_memory(frame: pd.DataFrame, **budget: Any) -> pm.Model:
    with pm.Model() as model:
        x = pm.Data("x", frame[COLUMNS["x"]].to_numpy())
        b = pm.Normal("b", 0.0, 2.0, shape=3)
        pm.Bernoulli("y", logit_p=x @ b, observed=frame["y"].to_numpy())
        dp.PrivacyBudget(4.0, 1e-6, **budget)
    return model


def queries_of(model: pm.Model) -> Any:
    return by_hand(model).queries


FORMS = {
    "anchored": lambda model: dp.sample(
        20, chains=1, tune=5, model=model, step_kwargs={"form": "anchored"}, **QUIET
    ),
    "plain": lambda model: dp.sample(
        20, chains=1, tune=5, model=model, step_kwargs={"form": "plain"}, **QUIET
    ),
    "quadratic": lambda model: dp.sample(
        20, chains=1, tune=5, model=model, step_kwargs={"form": "quadratic"}, **QUIET
    ),
    "hmc": lambda model: dp.sample(20, chains=1, tune=5, model=model, step="DPHMC", **QUIET),
    "penalty": lambda model: dp.sample(
        20, chains=1, tune=5, model=model, step="DPPenalty", **QUIET
    ),
    "laplace": lambda model: dp.laplace(20, model=model, **QUIET),
}


RUNS = list(product(FORMS, ["replace_one", "add_or_remove_one"], [None, "household"]))
#: Any two of form, relation and unit meet in the others.
THIRD = [run for k, run in enumerate(RUNS) if k % 4 in ((0, 3) if k // 4 % 2 else (1, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "neighboring", "unit"), marked(RUNS, exhaustive=THIRD))
def test_a_run_is_the_same_to_the_last_bit(
    client: Any, form: str, neighboring: str, unit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is released, in order, for one tape of noise."""
    frame = table(3000)
    frame["household"] = np.random.default_rng(5).integers(0, 900, size=len(frame))
    released: list[np.ndarray] = []
    answer = holder.answer

    def spy(*args: Any) -> np.ndarray:
        released.append(answer(*args))
        return released[-1]

    monkeypatch.setattr(holder, "answer", spy)

    def run(model: pm.Model) -> list[np.ndarray]:
        released.clear()
        with insecure_noise(7):
            FORMS[form](model)
        return list(released)

    budget: dict[str, Any] = {"neighboring": neighboring}
    if neighboring == "add_or_remove_one":
        budget["n_public"] = 900
    ids = None if unit is None else frame[unit].to_numpy()
    expected = run(in_memory(frame, privacy_unit=ids, **budget))
    assert len(expected) > 20 or form == "laplace"
    for partitions in (1, 2, 7):
        parts = dd.from_pandas(frame, npartitions=partitions)
        records = dp.from_dask(parts, COLUMNS, privacy_unit=unit)
        found = run(logistic(records, **budget))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["order", "number"])
def test_a_source_that_changes_is_refused(client: Any, tmp_path: Path, change: str) -> None:
    """The same table in another order would put records on two workers, and twice in a sum."""
    records = dp.from_dask(parquet(tmp_path, 4000), COLUMNS)
    there = queries_of(logistic(records)).holder
    there.total(asked(3)[0])
    frame = table()
    frame = frame.iloc[::-1] if change == "order" else frame.iloc[:1200]
    for k, rows in enumerate(np.array_split(np.arange(len(frame)), 4)):
        frame.iloc[rows].to_parquet(tmp_path / f"part{k}.parquet")
    for worker in client.run(os.getpid).values():
        os.kill(worker, signal.SIGKILL)
    with pytest.raises(dp.PrivacyError, match="the frame gave other rows than before"):
        there.total(asked(3)[1])


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(client: Any) -> None:
    records = dp.from_dask(dd.from_pandas(table(), npartitions=4), COLUMNS)
    here = queries_of(in_memory(table())).holder
    there = queries_of(logistic(records)).holder
    queries = asked(3)
    expected = [here.total(query) for query in queries]
    for query, exact in zip(queries[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(there.total(query), exact)
    victim = next(iter(client.run(os.getpid).values()))
    os.kill(victim, signal.SIGKILL)
    for query, exact in zip(queries[2:], expected[2:], strict=True):  # on the same path
        np.testing.assert_array_equal(there.total(query), exact)


def parquet(folder: Path, n: int, files: int = 4) -> Any:
    frame = table(n)
    for k, rows in enumerate(np.array_split(np.arange(n), files)):
        frame.iloc[rows].to_parquet(folder / f"part{k}.parquet")
    return dd.read_parquet(folder)


def parts_of_budget(budget: dp.PrivacyBudget) -> list[tuple[str, int]]:
    """Mechanisms, and how many releases of each were charged."""
    counts: dict[str, int] = {}
    for _, _, event, count in budget.releases():
        counts[event.mechanism] = counts.get(event.mechanism, 0) + count
    return sorted(counts.items())


@pytest.mark.slow
def test_workers_that_are_killed_change_nothing(tmp_path: Path) -> None:
    kills, draws = 20, 400
    rng, done = np.random.default_rng(), threading.Event()
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs="CRITICAL"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        records = dp.from_dask(parquet(tmp_path, 4000), COLUMNS)
        killed = 0

        def kill() -> None:
            nonlocal killed
            while killed < kills and not done.wait(rng.uniform(0.2, 2.0)):
                known = client.scheduler_info(n_workers=-1)["workers"]
                nannies = list(cluster.workers.values())
                victims = [n.pid for n in nannies if n.status == distributed.Status.running]
                if len(victims) == len(known) == 2:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victims[rng.integers(2)], signal.SIGKILL)
                        killed += 1
                elif len(nannies) < 2:  # one whose worker died as it began has given up
                    cluster.scale(2)

        killer = threading.Thread(target=kill)
        killer.start()
        settings = {"form": "plain"}
        found, rounds = [], 0
        try:
            while killed < kills:
                model = logistic(records)
                found.append(
                    dp.sample(draws, chains=2, model=model, progressbar=False, step_kwargs=settings)
                )
                rounds += 1
                budget = dp.get_budget(model)
                counted = dict(parts_of_budget(budget))
                [plan] = [
                    e.payload for e in budget.account.entries() if "per_iteration" in e.payload
                ]
                for name, each in plan["per_iteration"].items():
                    assert counted[name] == 2 * draws * each
                kept = [e for e in budget.account.entries() if e.kind == "release"]
                charged = [e for e in budget.account.entries() if e.kind == "charge"]
                assert len(kept) == len(charged)
        finally:
            done.set()
            killer.join()
        assert killed == kills
        for result in found:
            assert _compat.group(result, "posterior")["b"].shape == (2, draws, 3)
        assert client.status == "running"


CLIENT = """
import sys
import dask.dataframe as dd
import distributed
import pymc_dp as dp
from pymc_dp.privacy import holder
from tests.clusters.test_dask import COLUMNS, answers_to, logistic

address, folder, ledger, seen = sys.argv[1:]
holder.answer = answers_to(seen, holder.answer)
with distributed.Client(address):
    records = dp.from_dask(dd.read_parquet(folder), COLUMNS)
    model = logistic(records, ledger=ledger, resume=True)
    dp.sample(300, chains=2, model=model, progressbar=False, step_kwargs={"form": "plain"})
"""


def answers_to(path: str, answer: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The same answers, whose mechanisms are written down as soon as they are there."""
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def spy(query: Query, *rest: Any) -> np.ndarray:
        value = answer(query, *rest)
        os.write(file, f"{query.mechanism}\n".encode())
        return value

    return spy


@pytest.mark.slow
@pytest.mark.parametrize("answers", [5, 60, 250])  # the last of these are in the middle of chains
def test_a_client_that_dies_has_paid_for_all_that_it_saw(
    client: Any, tmp_path: Path, answers: int
) -> None:
    ledger, seen, folder = tmp_path / "ledger", tmp_path / "seen", tmp_path / "rows"
    folder.mkdir()
    frame = parquet(folder, 2000)
    dp.Ledger.create(ledger)
    given = [client.scheduler.address, str(folder), str(ledger), str(seen)]
    process = subprocess.Popen([sys.executable, "-c", CLIENT, *given], cwd=ROOT)
    try:
        while not seen.exists() or seen.read_text().count("\n") < answers:
            assert process.poll() is None
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    model = logistic(dp.from_dask(frame, COLUMNS), ledger=ledger, resume=True)
    budget = dp.get_budget(model)
    answered, charged = (
        Counter(seen.read_text().splitlines()),
        Counter(dict(parts_of_budget(budget))),
    )
    assert answered.total() >= answers and answered <= charged
    assert 0.0 < budget.spent().epsilon <= 4.0
    assert client.status == "running"


@pytest.mark.slow
@pytest.mark.parametrize("unit", [None, "person"])
def test_no_message_holds_a_record(
    tmp_path: Path, unit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes to the processes of the scheduler and the client, over the network and in logs."""
    seen: list[bytes] = []
    read = tcp.from_frames

    async def spy(frames: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(bytes(frame) for frame in frames)
        return await read(frames, *args, **kwargs)

    monkeypatch.setattr(tcp, "from_frames", spy)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs="ERROR"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        records = dp.from_dask(parquet(tmp_path, 2000), COLUMNS, privacy_unit=unit)
        dp.sample(50, chains=1, model=logistic(records), progressbar=False)
        logs = str(client.get_worker_logs()) + str(client.get_scheduler_logs())
        logs += str(client.get_events())
    values = table(2000)[["a", "b", "c"]].to_numpy().ravel()
    everything = b"".join(seen)
    assert len(seen) > 100 and b"total" in everything
    assert not any(value.tobytes() in everything for value in values)
    # Whole numbers with ten decimals, or all that are printed from six on: the first six of a clock
    # time of the events are those of a value in 1 % of runs. Durations hardly ever lie where the
    # values do: false alarm below 1e-6.
    printed = re.findall(r"(?<![\d.])\d+\.\d{6,10}", everything.decode("latin1") + logs)
    told = {f"{abs(value):.16f}"[:12] for value in values}
    told |= {f"{abs(v):.{k}f}" for v in values if abs(v) > 0.1 for k in range(6, 11)}
    assert printed and told.isdisjoint(printed)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [None, "person"])
def test_a_run_on_a_cluster(client: Any, unit: str | None) -> None:
    frame = dd.from_pandas(table(20_000), npartitions=5)
    model = logistic(dp.from_dask(frame, COLUMNS, privacy_unit=unit))
    found = dp.sample(100, chains=2, model=model, progressbar=False, random_seed=1)
    draws = _compat.group(found, "posterior")["b"].values.reshape(-1, 3)
    assert len(draws) == 200
    # a standard error of .02, noise as much again: false alarm below 1e-6
    np.testing.assert_allclose(draws.mean(axis=0), TRUTH, atol=0.2)
    text = dp.privacy_statement(found)
    assert ("10,000 units" if unit else "20,000 rows") in text
