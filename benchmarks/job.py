"""Where the time of whole runs goes: compilation, iterations, and the quickstart's model.

::

    python -m benchmarks.job --quick
    python -m benchmarks.job --json job.json

Three tables: seconds until the first draw, in a process that compiles everything and in later ones;
what part of an iteration is not spent on the records (PyMC, kernel, noise, ledger); and a default
run of the quickstart's model with 4 chains of 1,000 draws.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import description
from benchmarks.models import MODELS

__all__ = ["compilation", "iterations", "quickstart"]

#: Step methods and arguments of the tables; `n_steps` = 6 as in the quickstart of the design.
STEPS: dict[str, dict[str, Any]] = {
    "DPLangevin": {},
    "DPHMC": {"n_steps": 6},
    "DPPenalty": {},
}
REGRESSION, EPSILON = "logistic10_100k", 4.0


def _declared(name: str, epsilon: float, seed: int = 1) -> Any:
    """A model of the benchmarks with its data and a budget."""
    import pymc_dp as dp

    problem = MODELS[name]
    model = problem.model(problem.data(seed))
    with model:
        public = tuple(problem.coords)
        dp.PrivacyBudget(epsilon, problem.delta, public=public, ledger=dp.Ledger.temporary())
    return model


# -- compilation ----------------------------------------------------------------------------------


def _first_draw(name: str) -> dict[str, float]:
    """Seconds of this process; run it in a new one."""
    times = {}
    begin = time.perf_counter()
    import pymc as pm

    import pymc_dp as dp

    times["import"] = time.perf_counter() - begin
    model = _declared(name, EPSILON)
    begin = time.perf_counter()
    with model:
        step = dp.DPLangevin(draws=50, chains=1, progressbar=False)
        times["step"] = time.perf_counter() - begin
        begin = time.perf_counter()
        pm.sample(
            50, tune=0, chains=1, step=step, progressbar=False, compute_convergence_checks=False
        )
    times["draws"] = time.perf_counter() - begin
    return times


#: Process, and which of the two caches it finds filled.
_PROCESSES = (
    ("first on a machine", "new", "new"),
    ("first of a model", "kept", "new"),
    ("later", "kept", "kept"),
)


def compilation(name: str) -> list[dict[str, Any]]:
    """Seconds to the end of 50 draws, by what is cached: loops of the package, and the model."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for process, loops, model in _PROCESSES:
            for cache, state in (("loops", loops), ("model", model)):
                if state == "new":
                    shutil.rmtree(f"{folder}/{cache}", ignore_errors=True)
            caches = {
                "NUMBA_CACHE_DIR": f"{folder}/loops",
                "PYTENSOR_FLAGS": f"cxx=,base_compiledir={folder}/model",
            }
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.job", "--first-draw", name],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
                check=True,
            )
            times = json.loads(done.stdout.splitlines()[-1])
            rows.append({"model": name, "process": process, **times})
    return rows


# -- iterations -----------------------------------------------------------------------------------


class _Watch:
    """Seconds spent inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed; calls from inside a timed one are part of that one."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, begin = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin
                self._inside = False

        return timed


def iterations(sampler: str, draws: int) -> dict[str, Any]:
    """Milliseconds of an iteration, and the part of it that reads records."""
    import pymc as pm

    import pymc_dp as dp
    from pymc_dp.privacy.holder import Holder

    records, marks = _Watch(), []
    model = _declared(REGRESSION, EPSILON)
    with model:
        settings = {"draws": draws, "tune": 0, "chains": 1}
        step = getattr(dp, sampler)(**STEPS[sampler], **settings, progressbar=False)
        plain = Holder.total
        Holder.total = records.over(plain)
        try:
            pm.sample(
                draws,
                tune=0,
                chains=1,
                step=step,
                progressbar=False,
                compute_convergence_checks=False,
                callback=lambda **_: marks.append((time.perf_counter(), records.seconds)),
            )
        finally:
            Holder.total = plain
    (begin, before), (end, after) = marks[len(marks) // 10], marks[-1]
    count = len(marks) - 1 - len(marks) // 10
    return {
        "sampler": sampler,
        "ms": 1e3 * (end - begin) / count,
        "other_ms": 1e3 * (end - begin - after + before) / count,
        "other_share": 1.0 - (after - before) / (end - begin),
    }


# -- the quickstart -------------------------------------------------------------------------------


def quickstart(sampler: str, draws: int, chains: int) -> dict[str, Any]:
    """Seconds of a default run: model, step with its preparation, draws, release."""
    import pymc_dp as dp

    begin = time.perf_counter()
    with _declared("mortgages", 1.0):
        dp.sample(
            draws=draws,
            chains=chains,
            cores=min(chains, os.cpu_count() or 1),
            step=getattr(dp, sampler),
            step_kwargs=STEPS[sampler],
            progressbar=False,
        )
    return {
        "sampler": sampler,
        "draws": draws,
        "chains": chains,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer draws, no quickstart")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--first-draw", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_draw:
        print(json.dumps(_first_draw(args.first_draw)))
        return
    print(description())
    found: dict[str, Any] = {"machine": description()}
    print(
        f"\nSeconds to the end of 50 draws, {REGRESSION}\n"
        "process               import   step  draws"
    )
    found["compilation"] = compilation(REGRESSION)
    for row in found["compilation"]:
        numbers = "".join(f"{row[key]:7.1f}" for key in ("import", "step", "draws"))
        print(f"{row['process']:20s}{numbers}", flush=True)
    print(f"\nAn iteration, {REGRESSION}\nsampler           ms  not on records, ms   part")
    found["iterations"] = []
    for sampler in STEPS:
        row = iterations(sampler, 200 if args.quick else 1000)
        found["iterations"].append(row)
        print(
            f"{sampler:12s}{row['ms']:8.2f}{row['other_ms']:15.3f}{row['other_share']:12.1%}",
            flush=True,
        )
    if not args.quick:
        print("\nThe quickstart's model, 4 chains of 1,000 draws")
        found["quickstart"] = [quickstart(sampler, 1000, 4) for sampler in ("DPLangevin", "DPHMC")]
        for row in found["quickstart"]:
            print(f"{row['sampler']:12s}{row['seconds']:8.1f} s")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
