"""Most memory that a run takes, beside the data, by type of the features.

::

    python -m benchmarks.memory --quick
    python -m benchmarks.memory --rows 1000000 10000000 --json memory.json

Every case is a process of its own: a logistic regression with 10 features, passes over the records
as DPLangevin makes them (the clipped sum at an anchor, changes of it, energy errors), and the most
memory that was ever resident, less what the imports take.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import description

__all__ = ["measure"]

D = 10


def _resident() -> float:
    """Most gigabytes that were ever resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(n: int, kind: str, engine: str) -> dict[str, Any]:
    """Peak of this process, in GB; run it in a new one."""
    import pymc as pm

    from benchmarks.engine import private_sum
    from pymc_dp.base.matrices import Coordinates
    from pymc_dp.records.extraction import extract
    from pymc_dp.rows.engine import RowEngine
    from pymc_dp.rows.predicted import PredictorEngine
    from pymc_dp.rows.predictor import recognise

    before = _resident()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, D), dtype=kind)
    y = rng.integers(0, 2, n, dtype="int8")
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=D)
        pm.Bernoulli("y", logit_p=pm.math.dot(x, beta), observed=y)
    data = (x.nbytes + y.nbytes) / 1e9
    built = _resident()
    records = extract(model, check=False)
    rows = RowEngine.of(records, Coordinates(np.zeros(D), np.eye(D)))
    found: RowEngine = rows
    if engine == "linear":
        predictor, reason = recognise(rows)
        if predictor is None:
            raise SystemExit(reason)
        found = PredictorEngine(rows, predictor)
    found = found.tilted()
    z = np.full(D, 0.01)
    for k in range(1, 4):
        private_sum(found, k * z, 1.0)
        found.log_likelihood(k * z)
    return {
        "n": n,
        "features": kind,
        "engine": engine,
        "data_gb": data,
        "model_gb": built - before,
        "peak_gb": _resident() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a million records")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        n, kind, engine = args.one
        print(json.dumps(measure(int(n), kind, engine)))
        return
    print(description())
    print("    records  features  engine    data, GB  with the model  with all passes  ratio")
    cells = []
    for n in [1_000_000] if args.quick else args.rows:
        for kind in ("float64", "float32"):
            for engine in ("linear", "general"):
                command = [sys.executable, "-m", "benchmarks.memory", "--one", str(n), kind, engine]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                cell = json.loads(done.stdout.splitlines()[-1])
                cells.append(cell)
                print(
                    f"{n:11,d}  {kind:8s}  {engine:8s}{cell['data_gb']:10.3f}"
                    f"{cell['model_gb']:16.3f}{cell['peak_gb']:17.3f}"
                    f"{cell['peak_gb'] / cell['data_gb']:7.1f}",
                    flush=True,
                )
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": description(), "cells": cells}, indent=1))


if __name__ == "__main__":
    main()
