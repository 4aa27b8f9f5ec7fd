"""The ordinary models: what the planner says, and what runs with default arguments deliver.

Errors of the posterior mean, in posterior sds, root mean square over parameters and repeats, and
geometric means of the ratios of sds to those of the exact posterior: with consistent clipping, and
with clip norms beyond the tail instead.  What the anchor's scores cost is told in passes of
ordinary scores over the records, and the widest of all sds in widths of the prior::

    python -m benchmarks.everyday --quick
    python -m benchmarks.everyday --repeats 10 --epsilon 2 --json everyday.json
    python -m benchmarks.everyday --records 2000 --epsilon 1
    python -m benchmarks.everyday --misspecified
    python -m benchmarks.everyday --rehearse --repeats 4

With ``--rehearse``, errors of rehearsals on made-up records stand beside those of the real runs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

import pymc_dp as dp
from benchmarks.models import EVERYDAY, Arrays, Data, Problem, everyday
from benchmarks.reference import Reference, reference
from benchmarks.runs import METHODS, Run, private_run, quiet
from pymc_dp.base.matrices import Coordinates
from pymc_dp.records.extraction import extract
from pymc_dp.rows.contributions import ConsistentScore
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.model_parts import ModelParts

__all__ = ["measure", "misspecified", "passes", "rehearsed"]

CHAINS, DRAWS = 2, 500
CLIPPING = {"consistent": "DPLangevin", "beyond the tail": "DPLangevin without"}
QUICK = ("everyday_logistic", "everyday_poisson")
METHODS["DPLangevin without"] = (dp.DPLangevin, {"consistent_clipping": False}, 1000)


def _shift(run: Run, exact: Reference) -> np.ndarray:
    """(d,) error of the posterior means, in posterior sds."""
    return (run.theta.mean(axis=(0, 1)) - exact.draws.mean(axis=0)) / exact.draws.std(axis=0)


def measure(problem: Problem, epsilon: float, repeats: int, first: int = 1) -> dict[str, Any]:
    """Planner, errors and sds of one model."""
    found: dict[str, Any] = {"model": problem.name, "epsilon": epsilon, "passes": passes(problem)}
    found["records"] = problem.units
    runs: dict[str, list[dict[str, Any]]] = {clipping: [] for clipping in CLIPPING}
    for seed in range(first, first + repeats):
        data = problem.data(seed)
        exact = reference(problem, data, seed)
        if seed == first:
            with problem.model(data) as model:
                budget = dp.PrivacyBudget(epsilon, problem.delta)
                prior = ModelParts(model, budget).start.scaling.diagonal()
                plan = budget.plan(draws=DRAWS, chains=CHAINS)
            found.update(parameters=plan.d, planned=plan.error)
        for clipping, method in CLIPPING.items():
            run = private_run(problem, data, method, epsilon, chains=CHAINS, draws=DRAWS, seed=seed)
            theta, error = run.theta.reshape(-1, plan.d), _shift(run, exact)
            ratios = theta.std(axis=0) / exact.draws.std(axis=0)
            runs[clipping].append(
                {
                    "error": float(np.mean(error**2)),
                    "sd": float(np.mean(np.log(ratios))),
                    "widest": float((theta.std(axis=0) / prior).max()),
                    "covered": float(run.covered.mean()),
                    "form": run.form,
                }
            )
    for clipping, all_runs in runs.items():
        found[clipping] = {
            "error": float(np.sqrt(np.mean([run["error"] for run in all_runs]))),
            "sd_ratio": float(np.exp(np.mean([run["sd"] for run in all_runs]))),
            "coverage": float(np.mean([run["covered"] for run in all_runs])),
            "widest": max(run["widest"] for run in all_runs),
            "forms": sorted({run["form"] for run in all_runs}),
        }
    return found


def rehearsed(problem: Problem, epsilon: float, repeats: int, first: int = 1) -> dict[str, Any]:
    """Root mean square errors of rehearsals, and of runs on records of the model."""
    rehearsals, runs, said, forms = [], [], [], set()
    for seed in range(first, first + repeats):
        data = problem.data(seed)
        exact = reference(problem, data, seed)
        run = private_run(
            problem, data, "DPLangevin", epsilon, chains=CHAINS, draws=DRAWS, seed=seed
        )
        runs.append(_shift(run, exact))
        with problem.model(data) as model:
            dp.PrivacyBudget(epsilon, problem.delta, privacy_unit=data.arrays.get("unit"))
        tried = dp.rehearse(
            model, DRAWS, chains=CHAINS, cores=1, random_seed=seed, progressbar=False
        )
        rehearsals.append(tried.error)
        said.append(tried.forecast.error if tried.forecast else math.nan)
        forms |= {run.form, f"{tried.form} (rehearsed)"}
    return {
        "model": problem.name,
        "epsilon": epsilon,
        "records": problem.units,
        "real": float(np.sqrt(np.mean(np.square(runs)))),
        "rehearsed": float(np.sqrt(np.mean(np.square(rehearsals)))),
        "each": {
            "real": [float(np.sqrt(np.mean(run**2))) for run in runs],
            "rehearsed": rehearsals,
            "planned": said,
        },
        "forms": sorted(forms),
    }


def passes(problem: Problem, repeats: int = 5) -> float:
    """What clipped scores with what is given back cost, in passes of ordinary score vectors."""
    data = problem.data(0)
    records = extract(problem.model(data), check=False)
    d = records.parameters.size
    engine = RowEngine.of(records, Coordinates(records.initial, np.eye(d)))
    zero = np.zeros(d)
    norms = [np.linalg.norm(block, axis=0) for _, block in engine.vectors(engine.scores(zero))]
    clip_norm = float(np.quantile(np.concatenate(norms), 0.97))

    def shortest(call: Callable[[], None]) -> float:
        times = []
        for _ in range(repeats + 1):  # the first compiles
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    def ordinary() -> None:
        for _ in engine.vectors(engine.scores(zero)):
            pass

    def consistent() -> None:
        for _ in ConsistentScore(engine.coordinates, clip_norm=clip_norm).blocks(engine):
            pass

    return shortest(consistent) / shortest(ordinary)


# -- models that are wrong ------------------------------------------------------------------------


def _line(x: np.ndarray) -> Any:
    return pm.Normal("a", 0.0, 5.0) + pm.Normal("b", 0.0, 5.0) * x


def _normal(a: Arrays) -> None:
    pm.Normal("y", _line(a["x"]), pm.HalfNormal("sigma", 5.0), observed=a["y"])


def _poisson(a: Arrays) -> None:
    pm.Poisson("y", pt.exp(_line(a["x"])), observed=a["y"])


def _wrong(
    outcomes: Callable[[np.random.Generator, np.ndarray], np.ndarray],
) -> Callable[[np.random.Generator], Data]:
    def generate(rng: np.random.Generator) -> Data:
        x = rng.standard_normal(20_000)
        return Data({}, {"x": x, "y": outcomes(rng, x)})

    return generate


def _contaminated(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    y = 1.0 + 0.5 * x + rng.standard_normal(len(x))
    return np.where(rng.random(len(x)) < 0.01, y + 10.0, y)


WRONG = {
    "t noise (3 df), normal model": Problem(
        "wrong_t",
        _wrong(lambda rng, x: 1.0 + 0.5 * x + rng.standard_t(3.0, len(x))),
        _normal,
        20_000,
        2.0,
        fixed_delta=1e-6,
    ),
    "1 % outliers, normal model": Problem(
        "wrong_outliers", _wrong(_contaminated), _normal, 20_000, 2.0, fixed_delta=1e-6
    ),
    "overdispersed counts, Poisson model": Problem(
        "wrong_counts",
        _wrong(lambda rng, x: rng.poisson(np.exp(0.5 + 0.3 * x) * rng.gamma(2.0, 0.5, len(x)))),
        _poisson,
        20_000,
        2.0,
        fixed_delta=1e-6,
    ),
}


def misspecified(name: str, epsilon: float, repeats: int) -> dict[str, Any]:
    """Shifts of posterior means, in sds of the exact posterior of the wrong model."""
    problem = WRONG[name]
    found: dict[str, Any] = {"model": name, "epsilon": epsilon}
    for clipping, method in CLIPPING.items():
        shifts = []
        for seed in range(1, repeats + 1):
            data = problem.data(seed)
            exact = reference(problem, data, seed)
            run = private_run(problem, data, method, epsilon, chains=CHAINS, draws=DRAWS, seed=seed)
            shifts.append(_shift(run, exact))
        found[clipping] = np.mean(shifts, axis=0).tolist()
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(EVERYDAY), choices=list(EVERYDAY))
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--misspecified", action="store_true", help="data of other models")
    parser.add_argument("--rehearse", action="store_true", help="rehearsals beside real runs")
    parser.add_argument("--quick", action="store_true", help="two models, two repeats")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    quiet()
    results = []
    repeats = 2 if given.quick else given.repeats
    if given.misspecified:
        for name in WRONG:
            found = misspecified(name, given.epsilon, repeats)
            results.append(found)
            shifts = (f"{c}: {np.round(found[c], 1)}" for c in CLIPPING)
            print(f"{name}: {'; '.join(shifts)}", flush=True)
    elif given.rehearse:
        print("| model | planner | rehearsed | real | ratio |\n|---|---|---|---|---|")
        problems = everyday(given.records)
        for name in QUICK if given.quick else given.models:
            found = rehearsed(problems[name], given.epsilon, repeats)
            results.append(found)
            print(
                f"| {name.removeprefix('everyday_')} | {np.median(found['each']['planned']):.2f} "
                f"| {found['rehearsed']:.2f} | {found['real']:.2f} "
                f"| {found['rehearsed'] / found['real']:.2f} |",
                flush=True,
            )
    else:
        print("| model | planner | error | sd ratio | of prior | coverage | without | passes |")
        print("|---|---|---|---|---|---|---|---|")
        problems = everyday(given.records)
        for name in QUICK if given.quick else given.models:
            found = measure(problems[name], given.epsilon, repeats)
            results.append(found)
            own, other = (found[clipping] for clipping in CLIPPING)
            print(
                f"| {name.removeprefix('everyday_')} ({found['parameters']}) "
                f"| {found['planned']:.2f} | {own['error']:.2f} | {own['sd_ratio']:.2f} "
                f"| {own['widest']:.2f} | {own['coverage']:.2f} "
                f"| {other['error']:.2f}, {other['sd_ratio']:.2f} | {found['passes']:.0f} |",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
