"""Cost of one pass over the records: derived from a PyMC model, against hand-written code and JAX.

All rivals run in this process in turn, on one processor; times are medians.  A ratio is our time
over theirs: below 1 is faster::

    python -m benchmarks.engine --quick
    python -m benchmarks.engine --repeats 31 --json engine.json
"""

from __future__ import annotations

import os

# One thread for every rival; read when the libraries are first imported.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

if hasattr(os, "sched_setaffinity"):  # JAX takes as many threads as there are processors
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hand import CASES, Case
from benchmarks.machine import description
from pymc_dp.base.matrices import Coordinates
from pymc_dp.privacy.answer import Grid, Query, VectorSum
from pymc_dp.privacy.holder import Holder
from pymc_dp.privacy.queries import ScoreAt
from pymc_dp.records.extraction import extract
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise

__all__ = ["measure", "private_engine", "private_sum"]

#: Seconds between two rivals.
_PAUSE = 0.02
#: Part of the scores that the bound clips.
_TAIL = 0.01


def private_engine(case: Case) -> RowEngine:
    """The engine of a model in the coordinates theta."""
    records = extract(case.build(), privacy_unit=case.unit, check=False)
    d = records.parameters.size
    return RowEngine.of(records, Coordinates(np.zeros(d), np.eye(d)))


def private_sum(engine: RowEngine, z: np.ndarray, bound: float) -> np.ndarray:
    """What a gradient release adds up before the noise, in natural units."""
    sum_ = VectorSum(Grid.finest(1.0, engine.n_units), "replace_one", engine.d, bound)
    return Holder(engine).total(Query("gradient", ScoreAt(z), sum_)) * sum_.unit


def _milliseconds(rivals: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median CPU time of each, called in turn.

    With a pause: threads of JAX wait busily for a while after a call, which would count as time of
    whoever comes next.
    """
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, call in rivals.items():
            time.sleep(_PAUSE)
            begin = time.process_time_ns()
            call()
            times[name].append((time.process_time_ns() - begin) / 1e6)
    return {name: float(np.median(values)) for name, values in times.items()}


def measure(name: str, repeats: int, jax: bool) -> list[dict[str, Any]]:
    """Rows of the table for one model."""
    case = CASES[name]()
    engine = private_engine(case)
    theta, rng = case.theta, np.random.default_rng(1)
    scores = np.concatenate(
        [np.linalg.norm(block, axis=0) for _, block in engine.vectors(engine.scores(theta))]
    )
    bound = float(np.quantile(scores, 1.0 - _TAIL))
    engines: dict[str, RowEngine] = {"plain": engine}
    predictor, _ = recognise(engine)
    if predictor is not None:
        engines["one predictor"] = PredictorEngine(engine, predictor)
    hand = {f"hand {kind}": call for kind, call in case.gradients.items()}
    rivals = {kind: (lambda f=f: f(theta, bound)) for kind, f in hand.items()}
    if jax:
        with_jax = case.jax()
        rivals["JAX"] = lambda: with_jax(theta, bound)
    for kind, own in engines.items():
        rivals[kind] = lambda own=own: private_sum(own, theta, bound)
    expected = case.gradients["numpy"](theta, bound)
    for kind, call in rivals.items():
        found = np.asarray(call())
        if not np.allclose(found, expected, rtol=1e-6, atol=1e-6 * bound * np.sqrt(case.n)):
            raise SystemExit(f"{case.name}: {kind} computes something else")
    times = _milliseconds(rivals, repeats)
    best = min(value for kind, value in times.items() if kind.startswith("hand"))
    rows = [_row(case, "gradient", kind, times[kind], best, times.get("JAX")) for kind in engines]

    rivals = {"hand": lambda: case.log_likelihood(theta)}
    points = iter(theta + 1e-3 * rng.standard_normal((10_000, len(theta))))
    for kind, own in engines.items():
        rivals[kind] = lambda own=own: own.log_likelihood(next(points))
        rivals[kind]()
    times = _milliseconds(rivals, repeats)
    rows += [
        _row(case, "log-likelihood", kind, times[kind], times["hand"], None) for kind in engines
    ]

    rivals = {}
    for kind, own in engines.items():
        moved = own.with_coordinates(Coordinates(theta, np.eye(len(theta))))
        tilted = moved.tilted()
        rivals[kind] = lambda own=moved: private_sum(own, next(points) - theta, bound)
        rivals[f"{kind}, anchored"] = lambda own=tilted: private_sum(
            own, next(points) - theta, bound
        )
        for call in rivals.values():
            call()
    times = _milliseconds(rivals, repeats)
    for kind in engines:
        row = _row(case, "anchored gradient", kind, times[f"{kind}, anchored"], None, None)
        rows.append({**row, "ratio_vs_plain": times[f"{kind}, anchored"] / times[kind]})
    return rows


def _row(
    case: Case, task: str, form: str, ours: float, hand: float | None, jax: float | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": case.name, "n": case.n, "task": task, "form": form}
    row["ms"] = ours
    if hand is not None:
        row |= {"hand_ms": hand, "ratio_vs_hand": ours / hand}
    if jax is not None:
        row |= {"jax_ms": jax, "ratio_vs_jax": ours / jax}
    return row


_COLUMNS = ("ms", "hand_ms", "ratio_vs_hand", "jax_ms", "ratio_vs_jax", "ratio_vs_plain")
_TITLES = ("ms", "hand", "ratio", "JAX", "ratio", "vs plain")


def _line(row: dict[str, Any]) -> str:
    numbers = [f"{row[key]:8.2f}" if key in row else " " * 8 for key in _COLUMNS]
    return f"{row['model']:24s} {row['task']:18s} {row['form']:10s}" + "".join(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three models, fewer repeats")
    parser.add_argument("--models", nargs="+", choices=CASES)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax = importlib.util.find_spec("jax") is not None
    print(description())
    print("JAX " + ("is compared with" if jax else "is not installed"))
    head = f"{'model':24s} {'task':18s} {'form':10s}"
    print(head + "".join(f"{title:>8s}" for title in _TITLES))
    rows: list[dict[str, Any]] = []
    names = args.models or (["logistic10", "poisson", "banana"] if args.quick else list(CASES))
    for name in names:
        for row in measure(name, args.repeats or (11 if args.quick else 31), jax):
            rows.append(row)
            print(_line(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": description(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
