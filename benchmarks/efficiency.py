"""What a budget buys: every sampler against exact posteriors and the figures of the paper.

::

    python -m benchmarks.efficiency --quick
    python -m benchmarks.efficiency --models gauss banana --epsilon 1 4 10 15 --repeats 3 \\
        --json efficiency.json --figure docs/figures/efficiency.png
    python -m benchmarks.figure docs/efficiency.md more.json --out docs/figures/efficiency.png
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figure import draw
from benchmarks.metrics import diagnostics
from benchmarks.models import MODELS, PAPER, REGRESSIONS, ZOO
from benchmarks.reference import reference
from benchmarks.runs import LAPLACE, METHODS, ONE_SHOT, Run, mu2, one_shot, private_run, quiet
from pymc_dp import mmd
from replications.dp_hmc_2021 import PAPER_MMD, best_of_paper

__all__ = ["measure"]

EPSILONS = (1.0, 4.0, 10.0, 15.0)
QUICK_MODELS = ("banana", "logistic10_20k")
GROUPS = {"paper": PAPER, "regressions": REGRESSIONS, "zoo": ZOO, "all": MODELS}


def measure(
    name: str, method: str, epsilon: float, seed: int, chains: int, draws: int | None
) -> dict[str, Any]:
    """One run and its distances from the reference, under stable keys."""
    problem = MODELS[name]
    data = problem.data(seed)
    exact = reference(problem, data, seed)
    limit = exact.anchor_noise(mu2(problem, epsilon))
    result: dict[str, Any] = {
        "model": name,
        "method": method,
        "epsilon": epsilon,
        "seed": seed,
        "sigma0": limit,
        "n_eff_limit": exact.effective_draws(mu2(problem, epsilon)),
        "reference_ess": exact.ess,
    }
    try:
        if method == "one-shot":
            run = one_shot(problem, data, epsilon, seed)
        else:
            run = private_run(problem, data, method, epsilon, chains=chains, draws=draws, seed=seed)
    except Exception as error:  # a failure is a result
        return {**result, "error": f"{type(error).__name__}: {error}"}
    return {**result, **_distances(run, exact.directions, exact.exact(), name, epsilon, limit)}


def _distances(
    run: Run, directions: Any, exact: np.ndarray, name: str, epsilon: float, limit: float
) -> dict[str, Any]:
    d = run.theta.shape[-1]
    published, raw = run.theta.reshape(-1, d), run.raw.reshape(-1, d)
    finite = bool(np.isfinite(published).all() and np.isfinite(raw).all())
    if not finite:
        return {"error": "draws on the boundary of their support", "form": run.form}
    ratios = directions.sd_ratios(raw)
    ess, rhat = diagnostics(run.raw)
    distance, paper = mmd(published, exact), best_of_paper(name, epsilon)
    rmse = directions.rmse(raw)
    return {
        "form": run.form,
        "rmse": rmse,
        "rmse_over_sigma0": rmse / limit,
        "sd_ratio": {
            "min": float(ratios.min()),
            "mean": float(ratios.mean()),
            "max": float(ratios.max()),
        },
        "sd_ratio_published": float(directions.sd_ratios(published).mean()),
        "coverage": float(run.covered.mean()) if run.covered.size else None,
        "mmd": distance,
        "mmd_raw": mmd(raw, exact),
        "ratio_vs_paper_mmd": None if paper is None else distance / paper,
        "ess_per_1000": ess,
        "ess": ess * len(raw) / 1000.0,
        "rhat": rhat,
        "acceptance": run.acceptance,
        "build_seconds": run.build_seconds,
        "sample_seconds": run.sample_seconds,
        "warned": run.warned,
        "facts": run.facts,
    }


def _pooled(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the repeats of one cell: root mean square of RMSE, medians, mean coverage."""
    done = [run for run in runs if "error" not in run]
    first = {key: runs[0][key] for key in ("model", "method", "epsilon")}
    if not done:
        return {**first, "errors": len(runs), "error": runs[0]["error"]}

    def median(key: str) -> float | None:
        values = [run[key] for run in done if run[key] is not None and np.isfinite(run[key])]
        return float(np.median(values)) if values else None

    covered = [run["coverage"] for run in done if run["coverage"] is not None]
    keys = ("mmd", "ratio_vs_paper_mmd", "ess_per_1000", "ess", "rhat", "acceptance", "sigma0")
    times = ("n_eff_limit", "build_seconds", "sample_seconds", "sd_ratio_published")
    rmse = float(np.sqrt(np.mean([run["rmse"] ** 2 for run in done])))
    return {
        **first,
        **{key: median(key) for key in (*keys, *times)},
        "rmse": rmse,
        "rmse_over_sigma0": rmse / float(np.median([run["sigma0"] for run in done])),
        "sd_ratio": {
            "min": min(run["sd_ratio"]["min"] for run in done),
            "mean": float(np.mean([run["sd_ratio"]["mean"] for run in done])),
            "max": max(run["sd_ratio"]["max"] for run in done),
        },
        "coverage": float(np.mean(covered)) if covered else None,
        "forms": sorted({run["form"] for run in done}),
        "repeats": len(done),
        "errors": len(runs) - len(done),
    }


def _finite(value: Any) -> Any:
    """The same with null where JSON has no number."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


_HEADER = (
    f"{'model':20s} {'eps':>4s} {'method':11s} {'RMSE':>6s} {'/sig0':>6s} {'sd min/mean/max':>16s} "
    f"{'cover':>6s} {'MMD':>6s} {'/paper':>6s} {'ESS/k':>6s} {'ESS':>6s} {'Neff':>6s} {'Rhat':>6s} "
    f"{'acc':>5s} {'s':>6s}  form"
)


def _number(value: float | None, width: int = 6, digits: int = 3) -> str:
    if value is None or not np.isfinite(value):
        return "-".rjust(width)
    return (f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}").rjust(width)


def _row(cell: dict[str, Any]) -> str:
    head = f"{cell['model']:20s} {cell['epsilon']:4g} {cell['method']:11s} "
    if "rmse" not in cell:
        return head + f"{cell['errors']} of {cell['errors']} failed: {cell['error'][:120]}"
    ratios = "/".join(f"{cell['sd_ratio'][key]:.2f}" for key in ("min", "mean", "max"))
    numbers = [
        _number(cell["rmse"]),
        _number(cell["rmse_over_sigma0"], digits=2),
        ratios.rjust(16),
        _number(cell["coverage"], digits=2),
        _number(cell["mmd"]),
        _number(cell["ratio_vs_paper_mmd"], digits=2),
        *(_number(cell[key], digits=0) for key in ("ess_per_1000", "ess", "n_eff_limit")),
        _number(cell["rhat"]),
        _number(cell["acceptance"], 5, 2),
        _number(cell["build_seconds"] + cell["sample_seconds"], digits=1),
    ]
    errors = f"  ({cell['errors']} failed)" if cell["errors"] else ""
    return head + " ".join(numbers) + "  " + ", ".join(cell["forms"]) + errors


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, epsilon 4, 2 x 300 draws")
    parser.add_argument("--models", nargs="+", help=f"of {', '.join([*GROUPS, *MODELS])}")
    parser.add_argument("--epsilon", nargs="+", type=float, help="default: 1 4 10 15")
    parser.add_argument("--own-epsilon", action="store_true", help="that of each model")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, LAPLACE, "one-shot"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--chains", type=int)
    parser.add_argument("--draws", type=int, help="per chain, of every method")
    parser.add_argument("--json", type=Path, help="write all runs and their summaries")
    parser.add_argument("--figure", type=Path, help="compare methods by epsilon")
    return parser.parse_args()


def _names(args: argparse.Namespace) -> list[str]:
    chosen = args.models or (QUICK_MODELS if args.quick else [*PAPER, *REGRESSIONS])
    names = [name for group in chosen for name in GROUPS.get(group, [group])]
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        raise SystemExit(f"unknown models {unknown}; there are {sorted(MODELS)}")
    return list(dict.fromkeys(names))


def main() -> None:
    args = _arguments()
    quiet()
    begin = time.perf_counter()
    methods = args.methods or ["DPLangevin", "DPHMC", "DPPenalty", LAPLACE, "one-shot"]
    epsilons = args.epsilon or ([4.0] if args.quick else EPSILONS)
    chains = args.chains or (2 if args.quick else 4)
    runs: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    print(_HEADER)
    for name in _names(args):
        for epsilon in [MODELS[name].epsilon] if args.own_epsilon else epsilons:
            for method in methods:
                if method == "one-shot" and name not in ONE_SHOT:
                    continue
                draws = args.draws or (300 if args.quick else None)
                cell = [
                    measure(name, method, epsilon, seed, chains, draws)
                    for seed in range(1, args.repeats + 1)
                ]
                runs += cell
                cells.append(_pooled(cell))
                print(_row(cells[-1]), flush=True)
                if args.json:  # after each cell, so that an interrupted run is not lost
                    report = {"cells": cells, "runs": runs}
                    args.json.write_text(json.dumps(_finite(report), indent=1))
            for method, row in PAPER_MMD.get(name, {}).items():
                if epsilon in row:
                    head = f"{name:20s} {epsilon:4g} {method:11s}"
                    print(f"{head} {'MMD in the paper':>37s} {row[epsilon]:6.3f}")
    if args.figure:
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(cells).savefig(args.figure, dpi=150)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
