"""All private samplers on one model and one budget, side by side.

The data are a hundred thousand simulated log incomes with unknown mean and standard deviation.
Every sampler can fit this model, and its exact posterior is known.  All get the same budget,
default settings, and the same number of chains and draws.

Run with ``python examples/compare_samplers.py``; it takes some minutes.  It prints the table and
writes the figure to compare_samplers_output/.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
from matplotlib.figure import Figure
from pymc.model import Model
from rich.console import Console
from rich.table import Column, Table

import pymc_dp as dp

N, DELTA = 100_000, 1e-6
CHAINS, DRAWS = 4, 1000
Y = np.random.default_rng(4).normal(10.3, 0.8, N)
SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DPLangevin": (dp.DPLangevin, {}),
    "DPHMC": (dp.DPHMC, {}),
    "DPPenalty": (dp.DPPenalty, {}),
    "DPPenalty, one component": (dp.DPPenalty, {"proposal": "one_component"}),
    "DPPenalty, guided": (dp.DPPenalty, {"proposal": "guided"}),
    "DPBarker": (dp.DPBarker, {}),
    "ExponentialFamilyPenalty": (dp.ExponentialFamilyPenalty, {}),
    "DPSGLD": (dp.DPSGLD, {}),
    "DPSGNHT": (dp.DPSGNHT, {}),
}


@dataclass(frozen=True)
class Row:
    """Results of one sampler."""

    name: str
    mmd: float
    rmse: float
    ratios: np.ndarray
    effective: float
    seconds: float


def incomes(epsilon: float) -> Model:
    """Normal records with public bounds and weak priors."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 10, 2)
        sigma = pm.HalfNormal("sigma", 2)
        pm.Normal("y", mu, sigma, observed=pm.Data("incomes", Y))
        dp.bounds(incomes=(6.0, 15.0))
        dp.PrivacyBudget(epsilon, DELTA, ledger=dp.Ledger.temporary())
    return model


def exact(size: int) -> np.ndarray:
    """(size, 2) draws of the posterior without privacy, from a grid."""
    error = Y.std() / np.sqrt(N)
    mu = Y.mean() + error * np.linspace(-7, 7, 401)[:, None]
    sigma = Y.std() + error * np.linspace(-5, 5, 401)
    squares = ((Y - Y.mean()) ** 2).sum() + N * (mu - Y.mean()) ** 2
    log_p = -N * np.log(sigma) - squares / (2 * sigma**2)
    log_p = log_p - (mu - 10) ** 2 / 8 - sigma**2 / 8
    p = np.exp(log_p - log_p.max()).ravel()
    chosen = np.random.default_rng(5).choice(p.size, size, p=p / p.sum())
    i, j = np.unravel_index(chosen, log_p.shape)
    return np.stack([mu[i, 0], sigma[j]], axis=1)


def measured(name: str, draws: np.ndarray, seconds: float, reference: np.ndarray) -> Row:
    """Compare (chains, draws, 2) draws with the reference, in its standard deviations."""
    mean, sd = reference.mean(axis=0), reference.std(axis=0)
    flat = draws.reshape(-1, 2)
    effective = min(float(az.ess(draws[:, :, k])) for k in range(2))
    return Row(
        name,
        dp.mmd((flat - mean) / sd, (reference - mean) / sd),
        float(np.sqrt(np.mean(((flat.mean(axis=0) - mean) / sd) ** 2))),
        flat.std(axis=0) / sd,
        effective,
        seconds,
    )


def run(name: str, epsilon: float, reference: np.ndarray) -> Row:
    """Sample with one sampler."""
    step, settings = SAMPLERS[name]
    with warnings.catch_warnings():
        # small budgets and separate ledgers are intended here
        warnings.simplefilter("ignore")
        model = incomes(epsilon)
        begin = time.perf_counter()
        released = dp.sample(
            DRAWS,
            chains=CHAINS,
            step=step,
            step_kwargs=settings,
            model=model,
            progressbar=False,
            compute_convergence_checks=False,
        )
    seconds = time.perf_counter() - begin
    posterior = released["posterior"]
    draws = np.stack([np.asarray(posterior[v]) for v in ("mu", "sigma")], axis=-1)
    return measured(name, draws, seconds, reference)


def table(rows: list[Row], epsilon: float) -> Table:
    """Table of the rows for the terminal."""
    found = Table(
        Column("Sampler", no_wrap=True),
        *("MMD", "RMSE", "sd ratios", "ESS", "s"),
        title=f"n = {N:,}, ε = {epsilon:g}, {CHAINS} chains of {DRAWS} draws",
    )
    for row in rows:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in row.ratios)
        found.add_row(
            row.name,
            f"{row.mmd:.3f}",
            f"{row.rmse:.2f}",
            ratios,
            f"{row.effective:.0f}",
            f"{row.seconds:.0f}",
        )
    return found


def draw(rows: list[Row], epsilon: float) -> Figure:
    """One panel for each measure."""
    figure = Figure(figsize=(11.0, 3.8), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    places = np.arange(len(rows))[::-1]
    panels[0].plot([row.mmd for row in rows], places, "o")
    panels[0].axvline(0.016, color="0.6", linestyle=":")
    panels[0].set(xscale="log", xlabel="MMD to the exact posterior\n(dotted: two exact samples)")
    ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    panels[0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[0].set_xticks([], minor=True)
    for k, label in enumerate(("mu", "sigma")):
        panels[1].plot([row.ratios[k] for row in rows], places + 0.12 - 0.24 * k, "o", label=label)
    panels[1].axvline(1.0, color="0.6", linestyle=":")
    panels[1].set(xlabel="standard deviation / exact one")
    panels[1].legend(frameon=False, fontsize=8)
    panels[2].plot([row.effective for row in rows], places, "o")
    panels[2].set(xscale="log", xlabel=f"effective draws of {CHAINS * DRAWS}")
    panels[0].set_yticks(places, [row.name for row in rows])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="0.92")
    figure.suptitle(f"One model, one budget (ε = {epsilon:g}), default settings", fontsize=11)
    return figure


def main() -> None:
    """Run all samplers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--output", type=Path, default=Path("compare_samplers_output"))
    options = parser.parse_args()
    console, reference = Console(), exact(4000)
    rows = []
    for name in SAMPLERS:
        console.print(f"{name} ...")
        rows.append(run(name, options.epsilon, reference))
    console.print(table(rows, options.epsilon))
    options.output.mkdir(exist_ok=True)
    path = options.output / "samplers.png"
    draw(rows, options.epsilon).savefig(path, dpi=150)
    console.print(f"Figure: {path}")


if __name__ == "__main__":
    main()
