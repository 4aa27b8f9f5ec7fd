"""Do 90 % intervals hold the truth in 90 % of all data sets?

Every repeat generates new data, builds the model, attaches a budget and samples with default
arguments.  Results are kept in a JSON file after each repeat, so a run may be stopped and resumed,
or several may work on different models with files of their own::

    python -m benchmarks.coverage --model zoo --out coverage.json
    python -m benchmarks.coverage --model logistic10_20k --epsilon 4 --repeats 100 --out a.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.metrics import diagnostics
from benchmarks.models import MODELS, ZOO, Problem
from benchmarks.runs import private_run, quiet

__all__ = ["LEVEL", "one_repeat", "summary"]

LEVEL = 0.9
#: What `--model standard` runs: (model, epsilon, repeats).
STANDARD = [
    ("logistic10_20k", 4.0, 100),
    ("logistic10_100k", 4.0, 100),
    ("logistic10_100k", 1.0, 100),
]


def one_repeat(
    problem: Problem, epsilon: float, seed: int, chains: int = 2, draws: int = 500
) -> dict[str, Any]:
    """Coverage and diagnostics of one data set."""
    begin = time.perf_counter()
    data = problem.data(seed)
    try:
        run = private_run(
            problem, data, "DPLangevin", epsilon, chains=chains, draws=draws, seed=seed
        )
    except Exception as error:  # a failure is a result
        return {"seed": seed, "error": f"{type(error).__name__}: {error}"}
    if not np.isfinite(run.theta).all():
        return {"seed": seed, "error": f"infinite draws, form {run.form}"}
    theta = run.theta.reshape(-1, run.theta.shape[-1])
    ess, rhat = diagnostics(run.raw)
    result = {
        "seed": seed,
        "covered": run.covered.astype(int).tolist(),
        "covered_raw": run.covered_raw.astype(int).tolist(),
        "form": run.form,
        "acceptance": run.acceptance,
        "ess_per_1000": ess,
        "rhat": rhat,
        "sd": theta.std(axis=0).tolist(),
        "seconds": time.perf_counter() - begin,
    }
    if data.truth:
        # in standard deviations of the posterior: sd 1 over many data sets if these are right
        errors = (theta.mean(axis=0) - run.truth) / theta.std(axis=0)
        result["errors"] = errors.tolist()
    if run.warned:
        result["warned"] = run.warned
    return result


def summary(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Coverage over the repeats that ended, with the standard error between repeats.

    Parameters of one data set share its noise, so they count as one observation: the mean over
    parameters of each repeat is what varies.
    """
    done = [r for r in repeats if "error" not in r]
    if not done:
        return {"repeats": 0, "errors": len(repeats)}

    def rate(key: str) -> tuple[float, float]:
        means = np.array([np.mean(r[key]) for r in done])
        spread = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
        return float(means.mean()), float(spread)

    coverage, error = rate("covered")
    raw, _ = rate("covered_raw")
    worst = np.mean([r["covered"] for r in done], axis=0)
    return {
        "coverage": coverage,
        "standard_error": error,
        "coverage_raw": raw,
        "lowest_of_a_parameter": float(worst.min()),
        "error_in_sds": float(np.sqrt(np.mean(np.square([r["errors"] for r in done])))),
        "ess_per_1000": float(np.median([r["ess_per_1000"] for r in done])),
        "rhat": float(np.median([r["rhat"] for r in done])),
        "acceptance": float(np.mean([r["acceptance"] for r in done])),
        "forms": dict(Counter(r["form"] for r in done)),
        "warned": sum("warned" in r for r in done),
        "repeats": len(done),
        "errors": len(repeats) - len(done),
        "seconds": float(np.median([r["seconds"] for r in done])),
    }


def _show(key: str, found: dict[str, Any]) -> None:
    if not found["repeats"]:
        print(f"{key:28s} {found['errors']} errors", flush=True)
        return
    forms = ", ".join(f"{name} {count}" for name, count in found["forms"].items())
    print(
        f"{key:28s} coverage {found['coverage']:.3f} +- {found['standard_error']:.3f}"
        f" (raw {found['coverage_raw']:.3f}, lowest {found['lowest_of_a_parameter']:.2f})"
        f"  error/sd {found['error_in_sds']:.2f}  ESS/1000 {found['ess_per_1000']:.0f}"
        f"  R-hat {found['rhat']:.3f}  accepted {found['acceptance']:.2f}  {forms}"
        f"  n={found['repeats']}, errors {found['errors']}, warned {found['warned']}"
        f"  {found['seconds']:.1f} s",
        flush=True,
    )


def _save(path: Path, results: dict[str, Any]) -> None:
    written = path.with_suffix(".part")
    written.write_text(json.dumps(results))
    written.replace(path)


def _tasks(args: argparse.Namespace) -> list[tuple[str, float, int]]:
    if args.model == ["standard"]:
        return [(name, epsilon, args.repeats or times) for name, epsilon, times in STANDARD]
    names = [name for model in args.model for name in (ZOO if model == "zoo" else [model])]
    unknown = sorted(set(names) - set(MODELS) | {"mortgages"} & set(names))
    if unknown:
        known = sorted(set(MODELS) - {"mortgages"})  # real data have no known truth
        raise SystemExit(f"no models with a truth: {unknown}; there are {known}")
    return [(name, args.epsilon or MODELS[name].epsilon, args.repeats or 50) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["standard"], help="names, zoo or standard")
    parser.add_argument("--epsilon", type=float, help="default: that of each model")
    parser.add_argument("--repeats", type=int, help="default: 50, standard 100")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON file, made or resumed")
    args = parser.parse_args()
    quiet()
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name, epsilon, repeats in _tasks(args):
        key = f"{name} epsilon={epsilon:g}"
        found = results.setdefault(key, {"repeats": []})
        have = {r["seed"] for r in found["repeats"]}
        for seed in range(args.first_seed, args.first_seed + repeats):
            if seed in have:
                continue
            found["repeats"].append(
                one_repeat(MODELS[name], epsilon, seed, args.chains, args.draws)
            )
            found["summary"] = summary(found["repeats"])
            _save(args.out, results)
            if len(found["repeats"]) % 10 == 0:
                _show(key, found["summary"])
        if len(found["repeats"]) % 10 or len(have) >= repeats:
            _show(key, found["summary"])


if __name__ == "__main__":
    main()
