"""Where a budget went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from pymc_dp.base import compat as _compat
from pymc_dp.budget import PrivacyBudget
from pymc_dp.report.plots.charges import Charges, Part, charges_of, parts_of
from pymc_dp.report.plots.drawing import (
    COLOURS,
    LIMIT,
    axes_for,
    check_choice,
    legend_above,
    mark,
    rows_for_legend,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Points of a curve over releases: a millisecond each; with batches of records a second.
_POINTS, _FEW_POINTS = 200, 5
#: Number of releases from which their axis is logarithmic.
_MANY = 100


def plot_budget(spent: Any, kind: str = "mechanism", *, ax: Axes | None = None) -> Axes:
    """What the budget was spent on, or how it was used up.

    Parameters
    ----------
    spent : PrivacyBudget, or arviz.InferenceData or xarray.DataTree
        A budget, of which the ledger is drawn, or a released result, of which the statement is.
    kind : {"mechanism", "time"}
        - "mechanism": one bar for each mechanism, each beginning where the one before it ends.  The
          unit is the share of the budget, in squared GDP mu, since epsilons do not add up.  The
          rounds of a search for the posterior are one bar; of a released result, all that came
          before the chains is one.
        - "time": epsilon at the budget's delta, of everything up to a release, against the number
          of the release; of a released result against the draw that all chains have made.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    UnsafeRelease
        If a result was not released.
    ValueError
        If `kind` or `ax` is none, nothing was spent yet, or a result has no chains to draw over
        time.

    Notes
    -----
    Shown are the charges that the ledger has, unused parts of leases that are still open among
    them; nothing is charged and no record is read.

    Examples
    --------
    >>> dp.plot_budget(budget)  # doctest: +SKIP
    >>> dp.plot_budget(released, kind="time")  # doctest: +SKIP
    """
    check_choice("kind", kind, ("mechanism", "time"))
    parts = parts_of(spent, "spent")
    charges = charges_of(spent, "spent")
    if not parts:
        raise ValueError("spent is a budget of which nothing was spent yet: sample first.")
    if kind == "time":
        ax = _over_time(spent, charges, ax)
    else:
        ax = _by_mechanism(parts, charges, ax)
    mark(ax, charges.secure)
    tidy(ax)
    return ax


def _by_mechanism(parts: Sequence[Part], charges: Charges, ax: Axes | None) -> Axes:
    samplers = list(dict.fromkeys(part.sampler for part in parts))
    ax = axes_for(ax, (6.4, 1.0 + 0.24 * (len(parts) + len(samplers) + 1)))
    begin = 0.0
    for row, part in enumerate(parts):
        end = begin + part.share
        new = part.sampler not in ax.get_legend_handles_labels()[1]
        ax.barh(
            row,
            part.share,
            left=begin,
            color=COLOURS[samplers.index(part.sampler) % len(COLOURS)],
            height=0.75,
            label=part.sampler if new else None,
        )
        # beside the bar where there is room, within it where there is none
        x, align, shift = (end, "left", 4) if end < 0.85 else (begin, "right", -4)
        within = part.share > 0.85
        ax.annotate(
            f"{part.share:.1%}",
            (0.5 * (begin + end), row) if within else (x, row),
            xytext=(0, 0) if within else (shift, 0),
            textcoords="offset points",
            ha="center" if within else align,
            va="center",
            color="white" if within else "black",
            fontsize="small",
        )
        begin = end
    ax.axvline(1.0, color=LIMIT, linestyle="--", label=charges.stated)
    ax.set_yticks(
        range(len(parts)), [part.mechanism.replace(", ", ",\n") for part in parts], fontsize="small"
    )
    ax.set_ylim((len(parts) - 0.4) * (1.0 + rows_for_legend(ax)), -0.6)
    ax.set_xlim(0.0, 1.04)
    ax.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g} %")
    spent = charges.epsilon_at(charges.usual_delta)
    ax.set_xlabel(f"share of the budget (µ²); spent: ε = {spent:.3g}")
    ax.legend(loc="lower left", frameon=False, fontsize="small")
    return ax


def _over_time(spent: Any, charges: Charges, ax: Axes | None) -> Axes:
    if isinstance(spent, PrivacyBudget):
        curves = _history(spent)
        what = "number of the release"
    else:
        curves = [_recorded(spent)]
        what = "draw that every chain has made"
    ax = axes_for(ax, (6.4, 4.0))
    samplers = list(dict.fromkeys(curve[0] for curve in curves))
    for sampler, numbers, epsilons in curves:
        new = sampler not in ax.get_legend_handles_labels()[1]
        ax.plot(
            numbers,
            epsilons,
            # what is charged for a release is charged before it is made
            drawstyle="steps-pre",
            color=COLOURS[samplers.index(sampler) % len(COLOURS)],
            linewidth=2.0,
            label=sampler if new else None,
        )
    assert charges.epsilon is not None  # a budget and a statement have one
    ax.axhline(charges.epsilon, color=LIMIT, linestyle="--", label=charges.stated)
    last = curves[-1][1][-1]
    if isinstance(spent, PrivacyBudget) and last > _MANY:
        ax.set_xscale("log")
    ax.set_xlim(1, max(last, 2) * (1.1 if last > _MANY else 1.02))
    legend_above(ax, 0.0, 1.03 * charges.epsilon)
    ax.set_xlabel(what)
    ax.set_ylabel(f"ε charged so far, at δ = {charges.delta:g}")
    return ax


def _history(budget: PrivacyBudget) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """By sampler, numbers of releases and epsilon of all up to there, oldest first."""
    steps: list[list[Any]] = []  # plan, sampler, event, number
    for plan_id, plan, event, count in budget.releases():
        place = len(steps)
        while count < 0:  # the unused part of a lease: it comes off the newest charges
            place -= 1
            if steps[place][0] == plan_id and steps[place][2] == event:
                taken = min(steps[place][3], -count)
                steps[place][3] -= taken
                count += taken
        if count:
            steps.append([plan_id, plan["sampler"], event, count])
    steps = [step for step in steps if step[3]]
    found = budget.batches()
    first = 0 if found is None else found["releases"]
    numbers = first + np.cumsum([step[3] for step in steps], dtype=int)
    units = np.cumsum([step[3] * step[2].cost for step in steps], dtype=object)
    curves = []
    if found is not None:  # charged as a whole, before the others
        epsilon = budget.epsilon_beside_batches(0, found)
        curves.append(("releases on batches", np.array([1, first]), np.full(2, epsilon)))
    stride = -(-len(steps) // (_POINTS if found is None else _FEW_POINTS))
    begin = max(first, 1)
    before = budget.epsilon_beside_batches(int(units[0]), found) if steps else 0.0
    for sampler, entries in groupby(range(len(steps)), key=lambda k: steps[k][1]):
        places = list(entries)
        kept = sorted({*places[stride - 1 :: stride], places[-1]})
        values = [budget.epsilon_beside_batches(int(units[k]), found) for k in kept]
        curves.append((sampler, np.array([begin, *numbers[kept]]), np.array([before, *values])))
        begin, before = numbers[kept[-1]], values[-1]
    return curves


def _recorded(released: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """Sampler, draws, and the epsilon that its chains noted."""
    groups = [] if not _compat.is_result(released) else _compat.group_names(released)
    stats = _compat.group(released, "sample_stats") if "sample_stats" in groups else {}
    if "dp_epsilon" not in stats:
        raise ValueError(
            "spent has no dp_epsilon in its sample_stats: no chains were run for it. Use "
            "kind='mechanism', or pass the budget."
        )
    epsilons = np.asarray(stats["dp_epsilon"].max("chain").values)
    return "chains", np.arange(1, len(epsilons) + 1), epsilons
