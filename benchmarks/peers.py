"""Peers side by side on the same data, at the same (epsilon, delta).

::

    python -m benchmarks.peers --quick
    python -m benchmarks.peers --python PEERS/bin/python D3P/bin/python \\
        --noise-aware-dpvi CHECKOUT --json benchmarks/results/peers.json

Peers run in other interpreters (`--python`), so that nothing of theirs need be installed here; each
takes the first that has its packages, and is listed as missing if none has.  Results are kept
after each cell, and a run that was stopped continues with those that its file lacks.

Private tasks: linear regression with 10 predictors, a rate and a waiting time, as in Alrawajfeh,
Jälkö & Honkela (2025); a line; logistic regression of the UCI Adult data.  All fits have n records
and replace-one neighbours.  Not private: subsampling samplers, and NUTS, on 100,000 records.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
from scipy.special import expit, logit
from scipy.stats import beta as beta_law
from scipy.stats import gamma as gamma_law

import pymc_dp as dp
from benchmarks import ecs, peer_scripts
from benchmarks.machine import description
from benchmarks.models import Arrays, Data, Problem
from benchmarks.reference import reference
from benchmarks.runs import quiet

__all__ = ["LEVELS", "OURS", "RESULTS", "shortfalls", "standard_error"]

#: Results of the full run, which the documentation reads.
RESULTS = Path(__file__).parent / "results" / "peers.json"
LEVELS, DELTA = (0.5, 0.8, 0.9, 0.95), 1e-5
#: Data sets on which peers search their settings, beside those that are compared.
TUNING = 2
ADULT_TRAIN = 25_000


# -- tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model, the law of its data, its exact posterior, and what is public for peers that ask."""

    problem: Problem
    names: tuple[str, ...]
    exact: Callable[[Data, int], tuple[np.ndarray, np.ndarray]]
    public: dict[str, Any] = field(default_factory=dict)
    statistic: tuple[Callable[[Any], Any], Callable[[], Any]] | None = None

    def truth(self, data: Data) -> np.ndarray:
        """The parameters in one vector; empty for real data."""
        return np.concatenate([np.ravel(data.truth[k]) for k in self.names if data.truth] or [[]])


def _linear(k: int, n: int) -> Task:
    """w ~ N(0, 4 s2 I), s2 ~ InverseGamma(20, 1/2), predictors standard normal, an intercept."""

    def generate(rng: np.random.Generator) -> Data:
        s2 = 0.5 / rng.gamma(20.0)
        w = 2.0 * math.sqrt(s2) * rng.normal(size=k + 1)
        x = np.column_stack([rng.normal(size=(n, k)), np.ones(n)])
        y = x @ w + math.sqrt(s2) * rng.normal(size=n)
        return Data({"w": w, "s2": np.array(s2)}, {"x": x, "y": y})

    def declare(a: Arrays) -> None:
        s2 = pm.InverseGamma("s2", 20.0, 0.5)
        w = pm.Normal("w", 0.0, 2.0 * pm.math.sqrt(s2), shape=k + 1)
        pm.Normal("y", a["x"] @ w, pm.math.sqrt(s2), observed=a["y"])

    def exact(data: Data, seed: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = data.arrays["x"], data.arrays["y"]
        precision = x.T @ x + np.eye(k + 1) / 4.0
        mean = np.linalg.solve(precision, x.T @ y)
        a, b = 20.0 + n / 2, 0.5 + (y @ y - mean @ precision @ mean) / 2
        s2 = b / (a - 1)
        variances = s2 * np.diag(np.linalg.inv(precision))
        return np.append(mean, s2), np.sqrt(np.append(variances, s2**2 / (a - 2)))

    name = f"linear regression, {k} predictor{'s' * (k > 1)}"
    problem = Problem(name, generate, declare, n, 1.0, fixed_delta=DELTA)
    public = {"kind": "linear", "bound_x": 4.0, "bound_y": 5.0}
    return Task(problem, ("w", "s2"), exact, public)


def _rate(n: int) -> Task:
    def generate(rng: np.random.Generator) -> Data:
        p = rng.beta(10.0, 10.0)
        return Data({"p": np.array(p)}, {"y": rng.binomial(1, p, n)})

    def prior() -> Any:
        return pm.Beta("p", 10.0, 10.0)

    def exact(data: Data, seed: int) -> tuple[np.ndarray, np.ndarray]:
        count = data.arrays["y"].sum()
        law = beta_law(10.0 + count, 10.0 + n - count)
        return np.array([law.mean()]), np.array([law.std()])

    def declare(a: Arrays) -> None:
        pm.Bernoulli("y", prior(), observed=a["y"])

    problem = Problem("rate, beta-Bernoulli", generate, declare, n, 1.0, fixed_delta=DELTA)
    published = (lambda y: 1.0 * y, lambda: pm.Bernoulli("y", prior(), shape=n))
    return Task(problem, ("p",), exact, {"kind": "bernoulli"}, published)


def _waiting(n: int) -> Task:
    def generate(rng: np.random.Generator) -> Data:
        rate = rng.gamma(8.0, 0.5)
        return Data({"rate": np.array(rate)}, {"y": rng.exponential(1.0 / rate, n)})

    def prior() -> Any:
        return pm.Gamma("rate", 8.0, 2.0)

    def exact(data: Data, seed: int) -> tuple[np.ndarray, np.ndarray]:
        law = gamma_law(8.0 + n, scale=1.0 / (2.0 + data.arrays["y"].sum()))
        return np.array([law.mean()]), np.array([law.std()])

    def declare(a: Arrays) -> None:
        pm.Exponential("y", prior(), observed=a["y"])

    name = "waiting time, gamma-exponential"
    problem = Problem(name, generate, declare, n, 1.0, fixed_delta=DELTA)
    published = (
        lambda y: (np if isinstance(y, np.ndarray) else pm.math).minimum(y, 1.0),
        lambda: pm.Exponential("y", prior(), shape=n),
    )
    return Task(problem, ("rate",), exact, {"kind": "exponential"}, published)


def _adult(columns: Arrays) -> Task:
    """One column for each category, four numbers in public units, an intercept."""
    table = dict(zip(columns["head"], columns["rows"].T, strict=True))
    kinds = ("workclass", "education", "marital-status", "occupation", "ethnicity", "gender")
    complete = np.all([table[k] != "?" for k in kinds], axis=0)
    table = {k: v[complete] for k, v in table.items()}
    parts = [(table[k][:, None] == np.unique(table[k])).astype(float) for k in kinds]
    scales = {"age": (40, 13), "capital-gain": (0, 7500), "capital-loss": (0, 400)}
    for name, (centre, scale) in {**scales, "hours-per-week": (40, 12)}.items():
        value = (table[name].astype(float)[:, None] - centre) / scale
        parts.append(np.clip(value, -3.0, 3.0))
    y = (table["loan"] == ">50K").astype(int)
    x = np.hstack([*parts, np.ones((len(y), 1))])

    def generate(rng: np.random.Generator) -> Data:
        order = rng.permutation(len(y))
        train, test = order[:ADULT_TRAIN], order[ADULT_TRAIN:]
        return Data({}, {"x": x[train], "y": y[train], "test_x": x[test], "test_y": y[test]})

    def declare(a: Arrays) -> None:
        beta = pm.Normal("beta", 0.0, 1.0, shape=a["x"].shape[1])
        pm.Bernoulli("y", logit_p=a["x"] @ beta, observed=a["y"])

    def exact(data: Data, seed: int) -> tuple[np.ndarray, np.ndarray]:
        draws = reference(problem, data, seed).draws
        return draws.mean(axis=0), draws.std(axis=0)

    problem = Problem(
        "logistic regression, UCI Adult", generate, declare, ADULT_TRAIN, 1.0, fixed_delta=DELTA
    )
    # six categories, and four numbers between -3 and 3
    public = {"kind": "logistic", "norm": math.sqrt(6 + 4 * 9)}
    return Task(problem, ("beta",), exact, public)


# -- this package ---------------------------------------------------------------------------------


def _columns(task: Task, found: Any) -> np.ndarray:
    """(draws, parameters)"""
    stacked = found.stack(sample=("chain", "draw"))
    return np.vstack([stacked[k].values.reshape(-1, stacked.sizes["sample"]) for k in task.names]).T


def sample(task: Task, data: Data, epsilon: float, seed: int) -> np.ndarray:
    """`dp.sample` with default settings."""
    with task.problem.model(data):
        dp.PrivacyBudget(epsilon, DELTA)
        released = dp.sample(500, chains=2, cores=1, random_seed=seed, progressbar=False)
    return _columns(task, released.posterior)


def find_map(task: Task, data: Data, epsilon: float, seed: int) -> np.ndarray:
    """`dp.find_MAP`: (parameters,)."""
    with task.problem.model(data):
        dp.PrivacyBudget(epsilon, DELTA)
        found = dp.find_MAP(progressbar=False).sel(estimate="mode")
    return np.concatenate([np.ravel(found[k].values) for k in task.names])


def published(task: Task, data: Data, epsilon: float, seed: int) -> np.ndarray:
    """One noisy sum with the whole budget, and `dp.PrivacyAwareGibbs` from it."""
    assert task.statistic is not None
    rows, records = task.statistic
    told = dp.release_statistic(
        {"y": data.arrays["y"]},
        lambda y: rows(y),
        (0.0, 1.0),
        "gaussian",
        dp.Ledger.temporary(),
        epsilon=epsilon,
        delta=DELTA,
        name="sum",
    )
    with pm.Model():
        told.declare("sum", rows(records()))
        found = dp.sample(
            300,
            tune=100,
            chains=1,
            cores=1,
            step=dp.PrivacyAwareGibbs,
            random_seed=seed,
            progressbar=False,
        )
    return _columns(task, found.posterior)


OURS = {"dp.sample": sample, "dp.PrivacyAwareGibbs": published, "dp.find_MAP": find_map}


# -- peers ----------------------------------------------------------------------------------------


class Peers:
    """Interpreters, and which of them has what."""

    def __init__(self, interpreters: list[str]) -> None:
        self.interpreters = interpreters
        self.missing: dict[str, str] = {}
        self.versions = {}
        for k, python in enumerate(interpreters):
            told = subprocess.run(
                [python, peer_scripts.__file__, "versions"],
                capture_output=True,
                text=True,
                check=True,
            )
            self.versions[f"interpreter {k + 1}"] = json.loads(told.stdout)

    def run(self, script: str, **given: Any) -> Arrays | None:
        """What a script gives, or None where it is missing; `missing` then says why."""
        if script in self.missing:
            return None
        why = ""
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "in.npz", Path(folder) / "out.npz"
            np.savez(source, **given)
            for python in self.interpreters:
                call = [python, "-W", "ignore", peer_scripts.__file__, script, source, target]
                told = subprocess.run(call, capture_output=True, text=True, check=False)
                if told.returncode == 0:
                    with np.load(target) as found:
                        return dict(found)
                why = told.stderr.strip()
                if told.returncode != peer_scripts.MISSING:
                    raise RuntimeError(f"{script} failed: {why[-2000:]}")
        self.missing[script] = why
        print(f"{script}: left out: {why}", flush=True)
        return None


#: Script: what the table calls it, and the tasks that it knows.
PEERS = {
    "dpvi": ("d3p, DP-SGD variational", ("linear", "rate", "waiting", "adult")),
    "diffprivlib": ("diffprivlib (pure ε)", ("linear", "line", "adult")),
    "opendp": ("OpenDP (pure ε)", ("line",)),
    "noise_aware_dpvi": ("noise-aware DPVI", ("linear", "rate", "waiting")),
}
#: What is run at which epsilon; all with delta = 1e-5.
EPSILONS = {"linear": (0.1, 0.3, 1.0), "line": (1.0,), "rate": (0.1,), "waiting": (0.1,)}
EPSILONS["adult"] = (1.0,)


# -- what is measured -----------------------------------------------------------------------------


def _one(task: Task, data: Data, seed: int, found: np.ndarray) -> dict[str, Any]:
    """Errors of (draws, parameters), or of a point, against the truth and the exact posterior."""
    truth, (exact, sd) = task.truth(data), task.exact(data, seed)
    point = found if found.ndim == 1 else found.mean(axis=0)
    d = len(point)  # some peers do not estimate the variance
    result: dict[str, Any] = {
        "error_sds": float(np.sqrt(np.mean(((point - exact[:d]) / sd[:d]) ** 2)))
    }
    if truth.size:
        away = np.linalg.norm(point - truth[:d]) / np.linalg.norm(truth[:d])
        result["error"] = float(away)
    target = truth if truth.size else exact
    if found.ndim == 2:
        bounds = [np.quantile(found, [(1 - v) / 2, (1 + v) / 2], axis=0) for v in LEVELS]
        result["covered"] = [
            float(np.mean((low <= target) & (target <= high))) for low, high in bounds
        ]
        result["sd_ratio"] = float(np.exp(np.mean(np.log(found.std(axis=0) / sd))))
    if "test_y" in data.arrays:
        eta = data.arrays["test_x"] @ np.atleast_2d(found)[:1000].T
        p, y = np.clip(expit(eta).mean(axis=1), 1e-6, 1 - 1e-6), data.arrays["test_y"]
        bins = np.array_split(np.argsort(p), 10)
        gaps = [p[rows].mean() - y[rows].mean() for rows in bins]
        result["test_loss"] = float(-np.mean(np.where(y == 1, np.log(p), np.log1p(-p))))
        result["test_calibration"] = float(np.sqrt(np.mean(np.square(gaps))))
        result["accuracy"] = float(np.mean((logit(p) > 0) == (y == 1)))
    return result


def _summary(fits: list[dict[str, Any]]) -> dict[str, float]:
    """Root mean squares over data sets, mean coverage, and its distance from the levels."""
    found: dict[str, float] = {"repeats": len(fits)}
    for key in ("error", "error_sds"):
        if key in fits[0]:
            found[key] = float(np.sqrt(np.mean([fit[key] ** 2 for fit in fits])))
    if "covered" in fits[0]:
        covered = np.array([fit["covered"] for fit in fits])
        for j, level in enumerate(LEVELS):
            found[f"cover {100 * level:.0f} %"] = float(covered[:, j].mean())
        found["calibration"] = float(np.sqrt(np.mean((covered.mean(axis=0) - LEVELS) ** 2)))
        found["sd_ratio"] = float(np.exp(np.mean(np.log([fit["sd_ratio"] for fit in fits]))))
    for key in ("test_loss", "test_calibration", "accuracy"):
        if key in fits[0]:
            found[key] = float(np.mean([fit[key] for fit in fits]))
    found["seconds"] = float(np.median([fit["seconds"] for fit in fits]))
    return found


def standard_error(cell: dict[str, Any]) -> float:
    """Of coverage, between data sets, whose parameters share noise; the mean over levels."""
    covered = np.array([fit["covered"] for fit in cell["fits"]])
    return float(np.mean(covered.std(axis=0, ddof=1)) / math.sqrt(len(covered)))


def shortfalls(cells: list[dict[str, Any]]) -> dict[str, str]:
    """For each method of this package in one task at one epsilon, which peers are ahead in what."""
    said = {}
    for cell in (cell for cell in cells if cell["method"] in OURS):
        ahead = []
        for key, what in (("error_sds", "error"), ("calibration", "coverage")):
            gaps = {
                p["method"]: cell[key] - p[key]
                for p in cells
                if p["method"] not in OURS and key in p and key in cell and p[key] < cell[key]
            }
            names = [
                name + " (within errors)" * (key != "error_sds" and gap < standard_error(cell))
                for name, gap in gaps.items()
            ]
            ahead += [f"{what}: {', '.join(names)}"] * bool(names)
        said[cell["method"]] = "; ".join(ahead)
    return said


def _short(x: Any) -> Any:
    """Numbers with four digits."""
    if isinstance(x, dict):
        return {k: _short(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_short(v) for v in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


# -- runs -----------------------------------------------------------------------------------------


@dataclass
class Store:
    """Cells that are done, kept in a file."""

    path: Path | None
    facts: dict[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list)

    def has(self, **key: Any) -> bool:
        return any(all(cell.get(k) == v for k, v in key.items()) for cell in self.cells)

    def add(self, cell: dict[str, Any]) -> None:
        self.cells.append(cell)
        shown = [
            f"{k} {v:.3g}" if isinstance(v, float) else str(v)
            for k, v in cell.items()
            if k not in ("fits", "settings")
        ]
        print(" | ".join(shown), flush=True)
        self.write()

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(exist_ok=True)
            facts = json.dumps(self.facts, indent=1, ensure_ascii=False).removesuffix("\n}")
            cells = ",\n".join(json.dumps(_short(c), ensure_ascii=False) for c in self.cells)
            self.path.write_text(f'{facts},\n "cells": [\n{cells}\n]}}\n', encoding="utf-8")


def private(
    store: Store,
    peers: Peers,
    name: str,
    task: Task,
    epsilon: float,
    repeats: int,
    methods: list[str],
    **given: Any,
) -> None:
    """One task at one epsilon: this package, then the peers that know the model."""
    seeds = range(1, 1 + TUNING + repeats)
    data = [task.problem.data(seed) for seed in seeds]
    key = {"task": task.problem.name, "epsilon": epsilon}

    def keep(method: str, found: Any, seconds: Any, settings: Any = ()) -> None:
        fits = [
            {**_one(task, data[TUNING + k], seeds[TUNING + k], fit), "seconds": float(seconds[k])}
            for k, fit in enumerate(found)
        ]
        cell = {**key, "method": method, **_summary(fits), "settings": list(settings)}
        store.add({**cell, "fits": fits})

    for method, fit in OURS.items():
        fits = task.statistic is not None if fit is published else fit is find_map or name != "line"
        if method not in methods or store.has(**key, method=method) or not fits:
            continue
        found, seconds = [], []
        for k in range(repeats):
            begin = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(fit(task, data[TUNING + k], epsilon, k))
            seconds.append(time.process_time() - begin)
        keep(method, found, seconds)
    for script, (method, known) in PEERS.items():
        if script not in methods or name not in known or store.has(**key, method=method):
            continue
        y = np.array([each.arrays["y"] for each in data])
        x = np.array([each.arrays.get("x", np.zeros((len(y[0]), 1))) for each in data])
        # real data have no truth: the public search takes the exact posterior for it
        truth = [
            task.truth(each) if each.truth else task.exact(each, seed)[0]
            for seed, each in zip(seeds[:TUNING], data, strict=False)
        ]
        public = {"epsilon": epsilon, "delta": DELTA, "tuning": TUNING, **task.public, **given}
        told = peers.run(script, x=x, y=y, truth=truth, **public)
        if told is not None:
            found = told["draws" if "draws" in told else "points"]
            keep(method, found, told["seconds"], told.get("settings", np.array([])).tolist())


def subsampling(store: Store, peers: Peers, n: int, draws: int) -> None:
    """Not private: samplers that read samples of the records, and NUTS."""
    x, y = ecs.higgs(n)
    model, name = ecs.build(x, y), f"not private, n = {n:,}"
    curved = dp.HMCECS(model=model, progressbar=False).variates.curved
    given = {
        "x": x,
        "y": y,
        "mode": curved.theta,
        "covariance": curved.covariance,
        "prior_sd": ecs.PRIOR_SD,
        "draws": draws,
    }

    def peer(script: str, **more: Any) -> Callable[[str, int], ecs.Run | None]:
        def run(method: str, length: int) -> ecs.Run | None:
            told = peers.run(script, **{**given, "draws": length, **more})
            if told is None:
                return None
            result = ecs.Result(name, n, method, math.nan, 0.0, 0.0, 0.0, 0.0)
            return ecs.summarised(result, told["draws"], float(told["seconds"][0]))

        return run

    def own(**settings: Any) -> Callable[[str, int], ecs.Run]:
        return lambda method, length: ecs.ours(name, model, method, length, **settings)

    full = min(draws, max(50, 100_000_000 // n))
    methods: dict[str, tuple[Callable[[str, int], ecs.Run | None], int]] = {
        "HMC on all records": (lambda m, k: ecs.full_hmc(name, model, m, k), full),
        "dp.HMCECS, m = 1300": (own(subsample_size=1300, **ecs.SETTINGS), draws),
        "NumPyro HMCECS, m = 1300": (peer("numpyro_ecs", m=1300), draws),
        "dp.HMCECS, m = 100": (own(subsample_size=100, **ecs.SETTINGS), draws),
        "NumPyro HMCECS, m = 100": (peer("numpyro_ecs", m=100), 4 * draws),
        "dp.HMCECS, default": (own(), draws),
        "dp.SGLD, m = 1300": (own(sampler=dp.SGLD, subsample_size=1300), draws),
        "BlackJAX SGLD, m = 1300": (peer("blackjax", kind="sgld", m=1300, step_size=0.1), draws),
        "dp.SGHMC, m = 1300": (own(sampler=dp.SGHMC, subsample_size=1300), draws),
        "BlackJAX SGHMC, m = 1300": (peer("blackjax", kind="sghmc", m=1300, step_size=0.1), draws),
        "PyMC NUTS": (lambda m, k: ecs.nuts(name, model, m, k), full // 2),
        "nutpie NUTS": (peer("nutpie"), full // 2),
    }
    exact = None
    for method, (run, length) in methods.items():
        if store.has(task=name, method=method) and exact is not None:
            continue
        found = run(method, length)
        if found is None:
            continue
        result, chain = found
        exact = chain if exact is None else exact
        if chain is not exact:
            ecs.compared(result, chain, exact)
        if store.has(task=name, method=method):
            continue
        bias = (chain.mean(axis=0) - exact.mean(axis=0)) / exact.std(axis=0)
        store.add(
            {
                "task": name,
                "method": method,
                "ms_per_draw": result.ms_per_draw,
                "ess_per_s": result.ess_per_s,
                "error_sds": float(np.sqrt(np.mean(bias**2))),
                "sd_ratio": float(np.exp(np.mean(np.log(chain.std(axis=0) / exact.std(axis=0))))),
                "error_mean": result.error_mean,
                "error_sd": result.error_sd,
            }
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="three tasks, two repeats, few records"
    )
    parser.add_argument("--json", type=Path, help="results, made or resumed")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PATH")
    parser.add_argument("--noise-aware-dpvi", type=Path, metavar="DIR", help="a checkout of theirs")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=2000, help="of noise-aware DPVI")
    tasks = [*EPSILONS, "subsampling"]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--methods", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    args = parser.parse_args()
    quiet()
    peers = Peers(args.python)
    facts = {"date": date.today().isoformat(), "machine": description()}
    store = Store(args.json, {**facts, "versions": peers.versions, "missing": peers.missing})
    if args.json is not None and args.json.exists():
        store.cells = json.loads(args.json.read_text(encoding="utf-8"))["cells"]
    for interpreter, versions in peers.versions.items():
        print(interpreter, ", ".join(f"{k} {v}" for k, v in versions.items()))
    if args.noise_aware_dpvi is None:
        peers.missing["noise_aware_dpvi"] = "no checkout given with --noise-aware-dpvi"
    given = {
        "path": str(args.noise_aware_dpvi),
        "batch": 500,
        "steps": 1000,
        "iterations": args.iterations,
    }
    n, repeats = 5000, args.repeats
    if args.quick:
        n, repeats, args.tasks = 2000, 2, ["linear", "rate", "subsampling"]
        given.update(batch=200, steps=200, iterations=200)
    if "subsampling" in args.tasks:
        subsampling(store, peers, 20_000 if args.quick else 100_000, 500 if args.quick else 5000)
    makers: dict[str, Callable[[], Task]] = {
        "linear": lambda: _linear(10, n),
        "line": lambda: _linear(1, n),
        "rate": lambda: _rate(n),
        "waiting": lambda: _waiting(n),
    }
    if "adult" in args.tasks and (columns := peers.run("adult")) is not None:
        makers["adult"] = lambda: _adult(columns)
    for name, make in makers.items():
        if name in args.tasks:
            task, k = make(), min(repeats, 3) if name == "adult" else repeats
            for epsilon in (1.0,) if args.quick else EPSILONS[name]:
                private(store, peers, name, task, epsilon, k, args.methods, **given)
    store.write()


if __name__ == "__main__":
    main()
