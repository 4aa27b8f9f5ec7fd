"""What a Dask cluster costs: time of a kick, of a round of questions, and memory.

::

    python -m benchmarks.clusters --quick
    python -m benchmarks.clusters --json clusters.json

A logistic regression with 10 features, as Parquet files, on a LocalCluster with two workers of one
thread each.  *Kick*: a clipped sum of scores on a path, beside one process with two threads that
has the same records in memory.  *Round*: the same for a thousand records, less what it takes
without a cluster.  *Memory*: the most that the whole tree of processes was ever seen to hold
(resident, shared pages counted once in each), with workers limited to --limit gigabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import description

__all__ = ["kicks", "memory", "written"]

D, ROWS_OF_A_FILE = 10, 1_000_000
NAMES = [f"x{j}" for j in range(D)]


def written(n: int, folder: Path) -> Path:
    """Parquet files of n rows."""
    import pandas as pd

    folder.mkdir(parents=True)
    truth = np.linspace(-1.0, 1.0, D)
    for k, start in enumerate(range(0, n, ROWS_OF_A_FILE)):
        rng = np.random.default_rng(k)
        x = rng.standard_normal((min(ROWS_OF_A_FILE, n - start), D))
        frame = pd.DataFrame(x, columns=NAMES)
        frame["y"] = (rng.random(len(x)) < 1.0 / (1.0 + np.exp(-x @ truth))).astype("int8")
        frame.to_parquet(folder / f"part{k:03d}.parquet")
    return folder


def _model(x: np.ndarray, y: np.ndarray, records: Any = None) -> Any:
    import pymc as pm

    import pymc_dp as dp

    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=D)
        pm.Bernoulli("y", logit_p=pm.Data("x", x) @ beta, observed=y)
        dp.PrivacyBudget(4.0, 1e-9, records=records)
    return model


def _holder(model: Any) -> Any:
    """Who answers questions of chains about the records of a model."""
    import pymc_dp as dp

    step = dp.DPLangevin(
        draws=100,
        chains=1,
        model=model,
        clip_norm=1.0,
        scaling=0.01,
        step_size=0.2,
        n_steps=6,
        energy_clip=0.1,
        noise_multiplier=100.0,
        progressbar=False,
    )
    return step.queries.holder


def _kick(holder: Any, n: int, repeats: int) -> float:
    """Median seconds of a kick, after warm ones."""
    from pymc_dp.privacy.answer import Grid, Query, VectorSum
    from pymc_dp.privacy.queries import Kick

    sum_ = VectorSum(Grid.finest(1.0, n), "replace_one", D, 1.0)
    times = []
    for k in range(repeats + 3):
        z = np.full(D, 0.01 * k)
        begin = time.perf_counter()
        holder.total(Query("gradient", Kick(1, z, z + 0.005), sum_))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


@contextmanager
def _cluster(limit: str | int = 0) -> Iterator[Any]:
    import distributed

    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit=limit,
            dashboard_address=None,
            silence_logs="ERROR",
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def _records(folder: Path) -> Any:
    import dask.dataframe as dd

    import pymc_dp as dp

    return dp.from_dask(dd.read_parquet(folder), {"x": NAMES, "y": "y"})


def _on_cluster(folder: Path) -> tuple[Any, Any]:
    records = _records(folder)
    return records, _model(records.example("x"), records.example("y"), records)


def kicks(n: int, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of a kick on two workers, and in this process with two threads."""
    import pandas as pd

    frame = pd.read_parquet(written(n, folder))
    here = _kick(_holder(_model(frame[NAMES].to_numpy(), frame["y"].to_numpy())), n, repeats)
    del frame
    with _cluster():
        records, model = _on_cluster(folder)
        there = _kick(_holder(model), n, repeats)
        del records
    return {"n": n, "one_process": here, "two_workers": there}


@contextmanager
def _watched() -> Iterator[Callable[[], float]]:
    """The most gigabytes that this process and all below it held at a time."""
    import psutil

    most, end = 0.0, threading.Event()

    def look() -> None:
        nonlocal most
        while not end.wait(0.2):
            total = 0
            me = psutil.Process()
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
            most = max(most, total / 1e9)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield lambda: most
    finally:
        end.set()
        watcher.join()


def memory(n: int, folder: Path, limit: str, repeats: int) -> dict[str, Any]:
    """Gigabytes of the tree of processes, and seconds to load the records and of a kick."""
    written(n, folder)
    with _watched() as most, _cluster(limit):
        begin = time.perf_counter()
        records, model = _on_cluster(folder)
        loaded = time.perf_counter() - begin
        kick = _kick(_holder(model), n, repeats)
        peak = most()
        assert records.n_rows == n
    return {"n": n, "limit": limit, "peak_gb": peak, "load": loaded, "kick": kick}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a hundred times fewer records")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the kicks")
    parser.add_argument("--many", type=int, default=50_000_000, help="of the memory")
    parser.add_argument("--limit", default="3GB", help="memory of a worker")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.many, args.repeats = args.rows // 100, args.many // 100, 5
    os.environ.setdefault("NUMBA_NUM_THREADS", "2")
    warnings.filterwarnings("ignore", "The gradients of this plan")
    print(description())
    folder = Path(tempfile.mkdtemp())
    try:
        few = kicks(1000, folder / "few", max(args.repeats, 20))
        overhead = few["two_workers"] - few["one_process"]
        print(f"a round: {1e3 * overhead:.2f} ms", flush=True)
        kick = kicks(args.rows, folder / "rows", args.repeats)
        print(
            f"a kick of {kick['n']:,} records: {1e3 * kick['one_process']:.0f} ms in one process "
            f"with 2 threads, {1e3 * kick['two_workers']:.0f} ms on 2 workers, ratio "
            f"{kick['two_workers'] / kick['one_process']:.2f}",
            flush=True,
        )
        shutil.rmtree(folder / "rows")
        held = memory(args.many, folder / "many", args.limit, min(args.repeats, 3))
        print(
            f"{held['n']:,} records, workers limited to {args.limit}: {held['peak_gb']:.2f} GB in "
            f"all processes, {held['load']:.0f} s to load, {held['kick']:.2f} s a kick"
        )
    finally:
        shutil.rmtree(folder)
    if args.json is not None:
        cells = {"round": few, "kick": kick, "memory": held}
        args.json.write_text(json.dumps({"machine": description(), **cells}, indent=1))


if __name__ == "__main__":
    main()
