"""A private posterior of home ownership among 214,144 men, at epsilon = 1 and epsilon = 3.

Run with ``make demo`` or ``python examples/quickstart.py``. Prints the budget, a summary and the
privacy statement of each fit, and writes to ``quickstart_output/``:

``posterior_eps1.nc``, ``posterior_eps3.nc``
    What may be published: private draws with their statement.
``comparison.png``
    The private posteriors beside one that is not private, made for the demonstration only.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import arviz as az
import numpy as np
import pymc as pm
from matplotlib.figure import Figure
from mortgages import (
    FEATURES,
    N_PEOPLE,
    PRIOR_SD,
    design_scaling,
    load,
    logistic_model,
    norm_bound,
)
from scipy.stats import gaussian_kde

import pymc_dp as dp

OUTPUT = Path("quickstart_output")
DELTA = 1e-6  # well below 1 / N_PEOPLE
CHAINS = 2

# Settings of the sampler, from public knowledge only. Nothing here was computed from the data.
SCALING = design_scaling()
# No gradient can be longer, so nothing is clipped and the chain targets the exact posterior. The
# slack of 1e-6 is wider than the mechanism's rounding allowance.
CLIP_NORM = norm_bound(SCALING) * (1 + 1e-6)
# A record's log-likelihood has second derivative p (1 - p) (x' A v)^2 <= |A' x|^2 / 4 in z.
CURVATURE = CLIP_NORM**2 / 4
# In units of z, where the posterior has standard deviations of about one: half of one per step.
STEP_SIZE = 0.5


class Length(NamedTuple):
    """Draws and tuning steps of each chain."""

    draws: int
    tune: int


# The budget buys a number of effective draws that does not grow with the chain: about M / (4 b^2),
# with M the squared GDP mu and b the clip norm, here 43 at epsilon = 1 and 320 at epsilon = 3 if
# SCALING were exact. Roughly ten steps for each are enough.
LENGTHS = {1.0: Length(draws=200, tune=80), 3.0: Length(draws=1000, tune=80)}


def private_fit(x: np.ndarray, y: np.ndarray, epsilon: float, ledger: dp.Ledger) -> Any:
    """Sample privately; return what may be published."""
    draws, tune = LENGTHS[epsilon]
    with logistic_model(x, y):
        budget = dp.PrivacyBudget(epsilon=epsilon, delta=DELTA, public=("feature",), ledger=ledger)
        released = dp.sample(
            draws=draws,
            tune=tune,
            chains=CHAINS,
            cores=CHAINS,
            step=dp.DPLangevin,
            step_kwargs={
                "clip_norm": CLIP_NORM,
                "curvature": CURVATURE,
                "log_concave": True,
                "scaling": SCALING,
                "step_size": STEP_SIZE,
            },
        )
    print(budget.table())
    return released


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
        Draws of ``beta`` by epsilon.
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
    for epsilon in LENGTHS:
        print(f"\n=== Private posterior, epsilon = {epsilon:g}, delta = {DELTA:g} ===\n")
        released = private_fit(x, y, epsilon, ledger)
        print(az.summary(released, var_names=["beta"]).to_string())
        print(dp.privacy_statement(released))
        released.to_netcdf(str(OUTPUT / f"posterior_eps{epsilon:g}.nc"))
        private[epsilon] = coefficient_draws(released)
    print("\n=== Reference, non-private, for demonstration only ===\n")
    reference = coefficient_draws(reference_fit(x, y))
    mean, sd = reference.mean(axis=0), reference.std(axis=0)
    for epsilon, draws in private.items():
        print(f"\nepsilon = {epsilon:g} against NUTS (errors in NUTS standard deviations)")
        for j, name in enumerate(FEATURES):
            error = (draws[:, j].mean() - mean[j]) / sd[j]
            print(
                f"  {name:<10} mean {draws[:, j].mean():7.3f} ({mean[j]:7.3f}, error {error:5.2f})"
                f"   sd {draws[:, j].std():6.4f} ({sd[j]:6.4f})"
            )

    comparison_figure(private, reference).savefig(OUTPUT / "comparison.png", dpi=150)
    print(f"\nWrote {OUTPUT}/ in {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
