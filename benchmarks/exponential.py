"""Cost of an iteration of ExponentialFamilyPenalty by number of records.

::

    python -m benchmarks.exponential --quick
    python -m benchmarks.exponential --json exponential.json

The model is normal with unknown mean and standard deviation.  Timed are: building the step, which
looks at types and checks that the data are finite; the first answer of a chain, which sums the
statistics of all records; and the answers after it, with everything else that an iteration does.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

import pymc_dp as dp
from benchmarks.machine import description

__all__ = ["measure"]

ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)


def measure(n: int, iterations: int) -> dict[str, Any]:
    """Seconds to build and to sum, and microseconds of the later iterations, for `n` records."""
    y = np.random.default_rng(0).normal(1.0, 2.0, n)
    with pm.Model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pm.Normal("y", pm.Normal("mu", 0, 10), pm.HalfNormal("sigma", 5), observed=y)
        dp.bounds(y=(-10, 10))
        budget = dp.PrivacyBudget(4.0, min(1e-8, 0.01 / n))
        begin = time.perf_counter()
        step = dp.ExponentialFamilyPenalty(
            draws=iterations,
            chains=1,
            scaling=2.0 / np.sqrt(n),
            step_size=0.3,
        )
        build = time.perf_counter() - begin
        budget.account.begin_run(
            step.plan.plan_id,
            max_runs=1,
            run_cost=step.plan.run_cost,
        )
        point = model.initial_point()
        seconds = []
        for _ in range(iterations):
            begin = time.perf_counter()
            point, _ = step.step(point)
            seconds.append(time.perf_counter() - begin)
        step.close()
    later = 1e6 * np.array(seconds[1:])
    return {
        "n": n,
        "build_s": build,
        "first_s": seconds[0],
        "iteration_us": float(np.median(later)),
        "iteration_us_quartiles": [float(q) for q in np.quantile(later, [0.25, 0.75])],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 100,000 records")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [n for n in ROWS if not given.quick or n <= 100_000]
    found = [measure(n, given.iterations) for n in rows]
    for r in found:
        low, high = r["iteration_us_quartiles"]
        print(
            f"n = {r['n']:>10,}: build {r['build_s']:6.2f} s, first {r['first_s']:8.4f} s, "
            f"then {r['iteration_us']:6.0f} us ({low:.0f} to {high:.0f})"
        )
    if given.json is not None:
        facts = {"machine": description(), "results": found}
        given.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
