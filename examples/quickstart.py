"""A private posterior of home ownership among 214,144 men, at epsilon = 1 and epsilon = 3.

Run with ``make demo`` or ``python examples/quickstart.py``. Prints the forecast for each
budget, what it was spent on, a summary and the privacy statement of each fit. Writes to
``quickstart_output/``:

``posterior_eps1.nc``, ``posterior_eps3.nc``
    What may be published: private draws with their statement.
``comparison.png``
    The private posteriors beside one that is not private, made for the demonstration only.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
from matplotlib.figure import Figure
from mortgages import FEATURES, N_PEOPLE, PRIOR_SD, load, logistic_model
from scipy.stats import gaussian_kde

import pymc_dp as dp

OUTPUT = Path("quickstart_output")
EPSILONS = (1.0, 3.0)
DELTA = 1e-6  # well below 1 / N_PEOPLE
DRAWS, CHAINS = 500, 2


def private_fit(x: np.ndarray, y: np.ndarray, epsilon: float, ledger: dp.Ledger) -> Any:
    """Sample privately; return what may be published."""
    with logistic_model(x, y):
        budget = dp.PrivacyBudget(epsilon=epsilon, delta=DELTA, public=("feature",), ledger=ledger)
        print(budget.plan(draws=DRAWS, chains=CHAINS))
        released = dp.sample(draws=DRAWS, chains=CHAINS, cores=CHAINS)
    print(spending(budget).to_string())
    print(f"Spent: epsilon = {budget.spent().epsilon:.4g} of {budget.epsilon:g}.\n")
    return released


def summary(released: Any) -> pd.DataFrame:
    """Noise-aware means and intervals; diagnostics of the raw chains."""
    raw = "posterior_raw" if "posterior_raw" in released else "posterior"  # only anchored runs
    stats = az.summary(released, var_names=["beta"], kind="stats", round_to="none")
    chains = az.summary(
        released, var_names=["beta"], group=raw, kind="diagnostics", round_to="none"
    )
    return stats.round(4).join(chains[["ess_bulk", "ess_tail", "r_hat"]].round(2))


def spending(budget: dp.PrivacyBudget) -> pd.DataFrame:
    """The budget's table, with all rounds of the search for the posterior in one line."""
    table = budget.table()
    charged = table[table["mechanism"] != ""]  # the others are totals
    stage = charged["mechanism"].str.replace(
        r"^round \d+: .*", "search for the posterior", regex=True
    )
    by_stage = charged.groupby([charged["sampler"], stage], sort=False)
    return by_stage[["releases", "share"]].sum().round({"share": 3})


def reference_fit(x: np.ndarray, y: np.ndarray) -> Any:
    """NOT PRIVATE, for demonstration only: NUTS on the same model.

    People with equal features are counted together. The likelihood is the same up to a constant and
    NUTS takes seconds; the private fit keeps one row per person, the unit that is protected.
    """
    cells, inverse = np.unique(x, axis=0, return_inverse=True)
    inverse = inverse.ravel()
    people = np.bincount(inverse)
    owners = np.bincount(inverse, weights=y).astype(np.int64)
    with pm.Model(coords={"feature": list(FEATURES)}):
        beta = pm.Normal("beta", 0.0, PRIOR_SD, dims="feature")
        pm.Binomial("owners", n=people, logit_p=cells @ beta, observed=owners)
        return pm.sample(
            draws=1000,
            tune=1000,
            chains=CHAINS,
            cores=CHAINS,
            progressbar=False,
            compile_kwargs={"mode": "NUMBA"},
        )


def coefficient_draws(result: Any) -> np.ndarray:
    """Draws of ``beta``, shape (chains * draws, 4), from the result of either fit."""
    return np.asarray(result["posterior"]["beta"]).reshape(-1, len(FEATURES))


def comparison_figure(private: dict[float, np.ndarray], reference: np.ndarray) -> Figure:
    """Density of each coefficient: private fits as lines, the non-private reference as a grey area.

    Parameters
    ----------
    private : dict of float to np.ndarray, shape (draws, 4)
        Noise-aware draws of ``beta`` by epsilon.
    reference : np.ndarray, shape (draws, 4)
        Draws that are not private.
    """
    colours = ("#D55E00", "#0072B2", "#009E73")
    figure = Figure(figsize=(9.0, 6.2), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    for j, (panel, name) in enumerate(zip(panels, FEATURES, strict=True)):
        everything = np.concatenate([reference[:, j], *(draws[:, j] for draws in private.values())])
        low, high = everything.min(), everything.max()
        margin = 0.08 * (high - low)
        grid = np.linspace(low - margin, high + margin, 400)
        panel.fill_between(
            grid,
            gaussian_kde(reference[:, j])(grid),
            color="0.82",
            label="NUTS, non-private, for demonstration only",
        )
        for (epsilon, draws), colour in zip(private.items(), colours, strict=False):
            panel.plot(
                grid,
                gaussian_kde(draws[:, j])(grid),
                color=colour,
                linewidth=1.8,
                label=f"DPLangevin, ε = {epsilon:g}, δ = {DELTA:g}",
            )
        panel.set_title(name, loc="left", fontsize=11)
        panel.set_xlabel("coefficient (log-odds)", fontsize=9)
        panel.set_yticks([])
        panel.set_ylim(bottom=0.0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"Home ownership of {N_PEOPLE:,} men: posterior of a logistic regression")
    return figure


def main() -> None:
    """Fit, print, write."""
    begin = time.perf_counter()
    OUTPUT.mkdir(exist_ok=True)
    x, y = load()

    # One ledger for both fits, so that the second statement also counts the first. For real data
    # make a file that outlives the session: dp.Ledger.create("study.sqlite", epsilon=..., ...).
    ledger = dp.Ledger.temporary()
    private = {}
    for epsilon in EPSILONS:
        print(f"\n=== Private posterior, epsilon = {epsilon:g}, delta = {DELTA:g} ===\n")
        released = private_fit(x, y, epsilon, ledger)
        print(summary(released).to_string())
        print(dp.privacy_statement(released))
        released.to_netcdf(str(OUTPUT / f"posterior_eps{epsilon:g}.nc"))
        private[epsilon] = coefficient_draws(released)
    print("\n=== Reference, non-private, for demonstration only ===\n")
    reference = coefficient_draws(reference_fit(x, y))
    mean, sd = reference.mean(axis=0), reference.std(axis=0)
    for epsilon, draws in private.items():
        # A private sd holds the privacy noise, so it is larger; the error should be within 2 of it.
        print(f"\nepsilon = {epsilon:g} against NUTS (error in NUTS standard deviations)")
        for j, name in enumerate(FEATURES):
            error = (draws[:, j].mean() - mean[j]) / sd[j]
            print(
                f"  {name:<10} mean {draws[:, j].mean():7.3f} ({mean[j]:7.3f}, error {error:5.2f})"
                f"   sd {draws[:, j].std():6.4f} ({sd[j]:6.4f}, "
                f"ratio {draws[:, j].std() / sd[j]:4.2f})"
            )

    comparison_figure(private, reference).savefig(OUTPUT / "comparison.png", dpi=150)
    print(f"\nWrote {OUTPUT}/ in {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
