"""PrivacyAwareGibbs: sweeps and effective draws, beside hand-written code and R packages.

    python -m benchmarks.gibbs --quick
    python -m benchmarks.gibbs --json gibbs.json

The models are those of Ju, Awan, Gong & Rao (2022): linear regression from clamped, noisy
sufficient statistics, and the naive Bayes log-linear model from noisy counts.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numba import njit
from pymc.model import Model
from rich.console import Console
from rich.table import Table

import pymc_dp as dp
from benchmarks.machine import description

BETA = np.array([-1.79, -2.89, -0.66])
MEAN = np.array([0.9, -1.17])
#: l1 sensitivity of the paper for two covariates; valid, but not the smallest (9.375).
SENSITIVITY = 13.0


def statistic(x: Any, y: Any) -> list[Any]:
    """Columns of the clamped sufficient statistics."""
    return [
        y,
        x[:, 0] * y,
        x[:, 1] * y,
        y * y,
        x[:, 0],
        x[:, 1],
        x[:, 0] ** 2,
        x[:, 0] * x[:, 1],
        x[:, 1] ** 2,
    ]


def declare(rows: Any, published: np.ndarray) -> None:
    """Sums with Laplace noise, and last its scale: one model serves for every epsilon.

    ``dp.LaplaceRelease``, but for the scale, which is fixed there.
    """

    def log_density(value: Any, total: Any) -> Any:
        return -(pt.abs(value[:-1] - total) / value[-1]).sum()

    data = pm.Data("published", published)
    dp.Release("s", rows, observed=data, log_density=log_density)


def regression(n: int) -> tuple[Model, list[Any], Any]:
    """Model, records, coefficients; what was published is ``pm.Data``."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        x = pm.Normal("x", MEAN, 1.0, shape=(n, 2))
        y = pm.Normal("y", beta[0] + x @ beta[1:], math.sqrt(2.0), shape=n)
        rows = pt.stack(statistic(dp.clamp(x, -10, 10), dp.clamp(y, -10, 10)), axis=1)
        declare(rows, np.append(np.zeros(9), SENSITIVITY))
    return model, [x, y], beta


def publish(rng: np.random.Generator, n: int, epsilon: float) -> np.ndarray:
    """Published statistics of new records, and the scale of their noise."""
    x = rng.normal(MEAN, 1.0, (n, 2))
    y = rng.normal(BETA[0] + x @ BETA[1:], math.sqrt(2.0))
    rows = np.stack(statistic(np.clip(x, -10, 10) / 10, np.clip(y, -10, 10) / 10), axis=1)
    return with_noise(rng, rows.sum(axis=0), SENSITIVITY / epsilon)


def with_noise(rng: np.random.Generator, sums: np.ndarray, scale: float) -> np.ndarray:
    """Sums with simulated Laplace noise, and its scale."""
    return np.append(sums + rng.laplace(0.0, scale, sums.shape), scale)


def log_linear(
    n: int, classes: int = 5, features: int = 5, answers: int = 3
) -> tuple[Model, list[Any]]:
    """Naive Bayes with noisy counts of every feature and class; what was published is ``pm.Data``.

    Counts are in the order of features, answers, classes.
    """
    cells = answers * classes
    with pm.Model() as model:
        p = pm.Dirichlet("p", np.full(classes, 2.0))
        q = pm.Dirichlet("q", np.full(answers, 2.0), shape=(features, classes, answers))
        label = pm.Categorical("label", p, shape=n)
        given = [pm.Categorical(f"answer{k}", q[k][label], shape=n) for k in range(features)]
        cell = classes * pt.stack(given, axis=1) + label[:, None]
        rows = pt.eq(cell[:, :, None], np.arange(cells)).reshape((n, features * cells))
        noisy = np.full(features * cells, n / cells)
        declare(rows, np.append(noisy, 2.0 * features))
    return model, [label, *given]


@njit
def hand_sweeps(
    sweeps: int, n: int, beta: np.ndarray, s: np.ndarray, scale: float, rng: np.random.Generator
) -> float:
    """The same sweep over the same regression, written for it alone."""
    sd = math.sqrt(2.0)
    rows, total, new = np.zeros((n, 9)), np.zeros(9), np.empty(9)
    kept = 0
    for _ in range(sweeps):
        for i in range(n):
            a = 0.9 + rng.standard_normal()
            b = -1.17 + rng.standard_normal()
            y = beta[0] + beta[1] * a + beta[2] * b + sd * rng.standard_normal()
            a = min(max(a, -10.0), 10.0) / 10.0
            b = min(max(b, -10.0), 10.0) / 10.0
            y = min(max(y, -10.0), 10.0) / 10.0
            new[0], new[1], new[2], new[3], new[4] = y, a * y, b * y, y * y, a
            new[5], new[6], new[7], new[8] = b, a * a, a * b, b * b
            change = 0.0
            for k in range(9):
                here = total[k] - s[k]
                change += abs(here) - abs(here - rows[i, k] + new[k])
            if math.log(rng.random()) < change / scale:
                kept += 1
                for k in range(9):
                    total[k] += new[k] - rows[i, k]
                    rows[i, k] = new[k]
    return kept / (sweeps * n)


def fastest(run: Callable[[], Any], repeats: int = 5) -> float:
    """Least CPU seconds of several runs."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


@njit
def hand_log_linear(
    sweeps: int, n: int, p: np.ndarray, q: np.ndarray, s: np.ndarray, rng: np.random.Generator
) -> float:
    """The same for the log-linear model: `p` and `q` are cumulated, `s` is (features, cells)."""
    features, classes, answers = q.shape
    scale = 2.0 * features
    label, given = np.zeros(n, dtype=np.int64), np.zeros((n, features), dtype=np.int64)
    new, total = np.zeros(features, dtype=np.int64), np.zeros((features, answers * classes))
    total[:, 0] = n
    kept = 0
    for _ in range(sweeps):
        for i in range(n):
            u, c = rng.random(), 0
            while c < classes - 1 and p[c] <= u:
                c += 1
            change = 0.0
            for k in range(features):
                u, a = rng.random(), 0
                while a < answers - 1 and q[k, c, a] <= u:
                    a += 1
                new[k] = a
                before, after = classes * given[i, k] + label[i], classes * a + c
                if before != after:
                    x, y = total[k, before] - s[k, before], total[k, after] - s[k, after]
                    change += abs(x) - abs(x - 1.0) + abs(y) - abs(y + 1.0)
            if math.log(rng.random()) < change / scale:
                kept += 1
                for k in range(features):
                    total[k, classes * given[i, k] + label[i]] -= 1.0
                    total[k, classes * new[k] + c] += 1.0
                    given[i, k] = new[k]
                label[i] = c
    return kept / (sweeps * n)


def compare(
    name: str, n: int, sweeps: int, model: Model, records: list[Any], hand: Callable[..., float]
) -> dict[str, Any]:
    """Seconds for 1000 sweeps over the records, and for as many of the loop written by `hand`."""
    rng = np.random.default_rng(1)
    with model:
        step = dp.PrivacyAwareGibbs(records, noncentered=False)
    step.set_rng(rng)
    point = model.initial_point()
    if "beta" in point:
        point["beta"] = BETA

    def ours() -> None:
        nonlocal point
        for _ in range(sweeps):
            point, _ = step.step(point)

    begin = time.process_time()
    ours()
    first = time.process_time() - begin
    hand(sweeps, n, rng)
    times = [(fastest(ours, 1), fastest(lambda: hand(sweeps, n, rng), 1)) for _ in range(15)]
    mine, theirs = (1000 * best / sweeps for best in np.min(times, axis=0))
    return {
        "model": name,
        "n": n,
        "seconds_of_the_first": first,
        "seconds_per_1000": mine,
        "hand_seconds_per_1000": theirs,
        "ratio_vs_hand": mine / theirs,
    }


def of_regression(n: int, sweeps: int) -> dict[str, Any]:
    """Sweeps over the regression."""
    model, records, _ = regression(n)
    s = publish(np.random.default_rng(1), n, 1.0)
    with model:
        pm.set_data({"published": s})
    return compare(
        "regression",
        n,
        sweeps,
        model,
        records,
        lambda sweeps, n, rng: hand_sweeps(sweeps, n, BETA, s[:-1], SENSITIVITY, rng),
    )


def of_log_linear(n: int, sweeps: int) -> dict[str, Any]:
    """Sweeps over the log-linear model, with equal probabilities and counts."""
    model, records = log_linear(n)
    p, q = np.arange(1, 6) / 5, np.tile(np.arange(1, 4) / 3, (5, 5, 1))
    s = np.full((5, 15), n / 15)
    return compare(
        "log-linear",
        n,
        sweeps,
        model,
        records,
        lambda sweeps, n, rng: hand_log_linear(sweeps, n, p, q, s, rng),
    )


class Chain:
    """Records and parameters of a model in turn.

    Parameters
    ----------
    model : Model
        What was published is its ``pm.Data`` of that name.
    records : PrivacyAwareGibbs
    parameters : step method
        Draws from their conditional distribution given the records.
    kept : callable
        What to keep of a point.
    """

    def __init__(
        self,
        model: Model,
        records: dp.PrivacyAwareGibbs,
        parameters: Any,
        kept: Callable[[dict[str, np.ndarray]], np.ndarray],
    ) -> None:
        self.model, self.records, self.parameters, self.kept = model, records, parameters, kept

    @classmethod
    def of_regression(cls, noncentered: Any) -> Chain:
        """The coefficients are drawn from their normal conditional."""
        model, records, beta = regression(100)
        with model:
            step = dp.PrivacyAwareGibbs(records, noncentered=noncentered)
            return cls(model, step, dp.ConjugateNormal([beta]), lambda point: point["beta"])

    def run(
        self, published: np.ndarray, seed: int, tune: int, draws: int
    ) -> tuple[np.ndarray, list[dict[str, Any]], float]:
        """(draws, d) kept parameters, what the step told in all iterations, and CPU seconds."""
        with self.model:
            pm.set_data({"published": published})
        self.records.set_rng(np.random.default_rng(seed))
        self.parameters.set_rng(np.random.default_rng(10**6 + seed))
        point, kept, told = self.model.initial_point(), [], []
        for k in range(tune + draws):
            if k == tune:
                self.records.stop_tuning()
                begin = time.process_time()
            point, [stat] = self.records.step(point)
            point, _ = self.parameters.step(point)
            kept.append(self.kept(point))
            told.append(stat)
        return np.array(kept[tune:]), told, time.process_time() - begin


def mixing(chain: Chain, epsilon: float, noncentered: Any, iterations: int) -> dict[str, Any]:
    """Effective draws of the coefficients, which are drawn from their normal distribution."""
    published = publish(np.random.default_rng(4), 100, epsilon)
    kept, told, seconds = chain.run(published, 5, iterations // 4, iterations)
    effective = [float(az.ess(kept[None, :, k])) for k in range(3)]
    return {
        "epsilon": epsilon,
        "noncentered": noncentered is not False,
        "ess_per_1000": [1000 * e / iterations for e in effective],
        "ess_per_second": min(effective) / seconds,
        "acceptance": float(np.mean([stat["dp_acceptance"] for stat in told])),
        "lowest_alpha": float(np.exp(min(stat["dp_min_log_alpha"] for stat in told))),
    }


R_CODE = """
suppressMessages(library(dapper))
n <- 100; set.seed(1); s <- as.numeric(commandArgs(TRUE))
stat <- function(d) { u <- pmin(pmax(d[1:2], -10), 10) / 10; w <- min(max(d[3], -10), 10) / 10
  c(w, u[1]*w, u[2]*w, w*w, u[1], u[2], u[1]^2, u[1]*u[2], u[2]^2) }
sample_data <- function(theta) { x <- cbind(rnorm(n, 0.9), rnorm(n, -1.17))
  cbind(x, theta[1] + x %*% theta[2:3] + rnorm(n, sd = sqrt(2))) }
sample_theta <- function(dmat, theta) { X <- cbind(1, dmat[, 1:2])
  S <- solve(t(X) %*% X / 2 + diag(3) / 4); m <- S %*% t(X) %*% dmat[, 3] / 2
  as.numeric(m + t(chol(S)) %*% rnorm(3)) }
model <- new_privacy(post_f = sample_theta, latent_f = sample_data,
  priv_f = function(sdp, sx) sum(-abs(sdp - sx) / 13), st_f = function(xi, sdp, i) stat(xi),
  npar = 3)
t <- system.time(dapper_sample(model, sdp = s, niter = 200, warmup = 1, init_par = c(0, 0, 0)))
cat(5 * t[["user.self"]])
"""


def r_seconds() -> float | None:
    """Seconds of dapper for 1000 sweeps, where R and dapper are installed."""
    if shutil.which("Rscript") is None:
        return None
    s = publish(np.random.default_rng(1), 100, 1.0)
    try:
        found = subprocess.run(
            ["Rscript", "-e", R_CODE, *[str(v) for v in s[:-1]]],
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        return float(found.stdout.split()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return None


def main() -> None:
    """Run, print tables, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer sweeps; under two minutes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, sweeps = Console(), 300 if options.quick else 1000
    found: dict[str, Any] = {"machine": description()}
    console.print("sweeps over the records")
    found["sweeps"] = [of_regression(100, sweeps), of_regression(100_000, 3)]
    if not options.quick:
        found["sweeps"] += [of_log_linear(100, sweeps), of_log_linear(100_000, 3)]
    for row in found["sweeps"]:
        console.print(row)
    found["dapper_seconds_per_1000"] = r_seconds()
    table = Table("epsilon", "moves", "ESS per 1000", "ESS per second", "moved", "lowest alpha")
    found["mixing"] = []
    chains = {noncentered: Chain.of_regression(noncentered) for noncentered in (False, "auto")}
    for epsilon in (1.0,) if options.quick else (0.1, 1.0, 10.0):
        for noncentered in (False, "auto"):
            row = mixing(chains[noncentered], epsilon, noncentered, 2000 if options.quick else 8000)
            found["mixing"].append(row)
            table.add_row(
                f"{epsilon:g}",
                "non-centred" if row["noncentered"] else "records only",
                " ".join(f"{e:.0f}" for e in row["ess_per_1000"]),
                f"{row['ess_per_second']:.0f}",
                f"{row['acceptance']:.3f}",
                f"{row['lowest_alpha']:.3f}",
            )
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
