"""What to expect of a budget, and of a clip norm, before anything is spent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from pymc.model import Model

from pymc_dp.base.checks import check_epsilon
from pymc_dp.budget import MODELS, PrivacyBudget, get_budget, name_of, require_budget
from pymc_dp.privacy.accounting import mu_from_budget
from pymc_dp.report.advice import ClipAdvice
from pymc_dp.report.plots import COLOURS, LIMIT, axes_for, legend_above, log_x_axis, tidy
from pymc_dp.rows.contributions import score_norms
from pymc_dp.tuning.forecast import forecast_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_effective_draws(
    model: Model | PrivacyBudget,
    epsilons: Sequence[float] | None = None,
    *,
    step: Any = "DPLangevin",
    draws: int = 1000,
    tune: int = 0,
    chains: int = 4,
    ax: Axes | None = None,
) -> Axes:
    """Effective draws that a budget can be expected to buy, against its epsilon.

    Parameters
    ----------
    model : pymc.Model or PrivacyBudget
        A model with a budget, or the budget of a model.
    epsilons : sequence of float, optional
        At the budget's delta.  Default: 25 values from a tenth of the budget to ten times it.
    step : name, class, or list of them, default "DPLangevin"
        Step methods that ``budget.plan`` knows.
    draws, tune, chains : int
        As in ``budget.plan``.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes
        Both axes logarithmic.  Solid: effective draws of all chains together; dotted where these
        would sample a normal approximation of the likelihood ("quadratic"), which costs no budget.
        Dashed, for ``DPLangevin``: independent draws that would estimate a posterior mean equally
        well, privacy noise and Monte-Carlo error together.  Vertical: the budget, and its rest.

    Raises
    ------
    UnsafeModel
        If the model has no budget.
    ValueError
        If an argument is not usable.

    Notes
    -----
    *Guarantee.*  Arithmetic on public numbers by ``budget.plan``: nothing is spent, nothing is
    written to a ledger, no record is read.

    *Weaknesses.*  Rules of thumb for posteriors near normal.

    Examples
    --------
    >>> dp.plot_effective_draws(model, step=["DPLangevin", "DPHMC"])  # doctest: +SKIP
    """
    model, budget = _model_of(model)
    if epsilons is None:
        grid = budget.epsilon * np.geomspace(0.1, 10.0, 25)
    else:
        grid = np.array(sorted(check_epsilon(float(epsilon)) for epsilon in epsilons))
    if len(grid) < 2:
        raise ValueError("epsilons must be a list of at least two numbers.")
    names = list(step) if isinstance(step, list | tuple) else [step]
    records = budget.records_of(model, check=False, read=False)
    known: dict[str, Any] = {"d": records.parameters.size, "norms": score_norms(records)}
    mu2s = [mu_from_budget(float(epsilon), budget.delta) ** 2 for epsilon in grid]
    plans = [
        [forecast_of(budget, name_of(name), draws, tune, chains, mu2=mu2, **known) for mu2 in mu2s]
        for name in names
    ]
    ax = axes_for(ax, (6.4, 4.0))
    for colour, found in zip(cycle(COLOURS), plans, strict=False):
        effective = np.array([plan.effective_draws for plan in found])
        chosen = np.array([plan.form == "quadratic" for plan in found])
        noisy = any(plan.noise_sd > 0 for plan in found)
        worth = np.array([plan.error**-2.0 if noisy else np.nan for plan in found])
        for values, style, width, what in (
            (np.where(chosen, np.nan, effective), "-", 2.0, "effective draws"),
            (np.where(chosen, effective, np.nan), ":", 2.0, "of a normal approximation"),
            (worth, "--", 1.5, "worth, privacy noise included"),
        ):
            if not np.isnan(values).all():
                label = f"{found[0].sampler}: {what}"
                ax.plot(grid, values, style, color=colour, linewidth=width, label=label)
    drawn = np.concatenate([np.asarray(line.get_ydata()) for line in ax.get_lines()])
    low, high = 0.7 * np.nanmin(drawn), 1.3 * np.nanmax(drawn)
    label = f"budget: ε = {budget.epsilon:g}, δ = {budget.delta:g}"
    ax.vlines(budget.epsilon, low, high, color=LIMIT, linestyle="--", linewidth=1.0, label=label)
    left = budget.remaining().epsilon
    if grid[0] <= left < 0.99 * budget.epsilon:
        label = f"left of it: ε = {left:.3g}"
        ax.vlines(left, low, high, color=LIMIT, linewidth=1.0, label=label)
    log_x_axis(ax)
    ax.set_yscale("log")
    ax.set_xlabel(f"ε at δ = {budget.delta:g}")
    ax.set_ylabel("draws, all chains together")
    legend_above(ax, low, high)
    tidy(ax)
    return ax


def _model_of(given: Any) -> tuple[Model, PrivacyBudget]:
    if isinstance(given, PrivacyBudget):
        for model in MODELS:
            if get_budget(model) is given:
                return model, given
        raise ValueError("model is a budget whose model is gone; pass the model.")
    if not isinstance(given, Model):
        raise ValueError(
            f"model must be a PyMC model with a budget, or a budget; not {type(given).__name__}."
        )
    return given, require_budget(given, "dp.plot_effective_draws")


# -- clip norms -----------------------------------------------------------------------------------


_WIDE = 20.0  # ratio of norms from which their axis is logarithmic


def plot_clip_advice(advice: ClipAdvice, *, ax: Axes | None = None) -> Axes:
    """Share of simulated records that a clip norm would clip, and the norm advised.

    Parameters
    ----------
    advice : ClipAdvice
        From :func:`pymc_dp.clip_advice`.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes
        Clip norm in the coordinates z to the right, share of the records above it upwards, both
        logarithmic where the norms differ by a factor of more than 20, else the latter alone.

    Raises
    ------
    ValueError
        If `advice` is something else.

    Notes
    -----
    Records simulated at draws from the prior: no private record was read.

    Examples
    --------
    >>> dp.plot_clip_advice(dp.clip_advice(model, scaling=0.01))  # doctest: +SKIP
    """
    if not isinstance(advice, ClipAdvice):
        raise ValueError(
            f"advice must be what dp.clip_advice returns, not {type(advice).__name__}."
        )
    norms = np.array(list(advice.quantiles.values()))
    above = 1.0 - np.array(list(advice.quantiles))
    ax = axes_for(ax, (6.4, 4.0))
    ax.plot(
        norms, above, "o-", color=COLOURS[0], label=f"simulated, {advice.draws} draws of the prior"
    )
    ax.axvline(
        advice.clip_norm, color=LIMIT, linestyle="--", label=f"clip_norm = {advice.clip_norm:.3g}"
    )
    ax.set_yscale("log")
    ax.set_yticks(above, [f"{share:.3g}" for share in 100 * above])
    ax.minorticks_off()
    ax.set_ylim(0.6 * above.min(), 1.0)
    if norms.min() > 0 and norms.max() > _WIDE * norms.min():
        log_x_axis(ax)
    else:
        ax.set_xlim(0.0, 1.05 * norms.max() or 1.0)
    ax.set_xlabel("clip norm: norm of a record's score, in z")
    ax.set_ylabel("records above it, %")
    ax.legend(loc="lower left", frameon=False, fontsize="small")
    tidy(ax)
    return ax
