"""Which guarantees hold for what was spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pymc_dp.base.checks import check_delta
from pymc_dp.privacy.accounting import epsilon_from_mu, mu_from_units
from pymc_dp.report.plots.charges import Charges, charges_of
from pymc_dp.report.plots.drawing import (
    COLOURS,
    LIMIT,
    REFERENCE,
    axes_for,
    legend_above,
    mark,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_epsilon_delta(
    spent: Any, deltas: Sequence[float] | None = None, *, ax: Axes | None = None
) -> Axes:
    """Every (epsilon, delta) guarantee that holds for what was spent.

    Parameters
    ----------
    spent : PrivacyBudget, InferenceData, DataTree, or events
        A budget; a released result, of which the statement is drawn; or an event of
        ``pymc_dp.privacy.events``, a list of them, or a list of pairs (event, number of releases).
        Events are taken to be under ``replace_one``, which matters for batches alone.
    deltas : sequence of float, optional
        Where to compute epsilon, each strictly between 0 and 1.  Default: 60 values from 10^-4
        times the stated delta to 0.1.  For releases on batches of records, which take about a
        second each and have no guarantee at very small deltas, 6 values from the stated delta.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes
        Epsilon to the right, delta upwards, logarithmic.  Below and to the left of the curve no
        guarantee is claimed.

    Raises
    ------
    UnsafeRelease
        If a result was not released.
    ValueError
        If an argument is not usable.

    Notes
    -----
    The statement of a release is the point that the budget promised; what was charged when one
    stopped is no promise if stopping depended on what was seen.  The grey curve is everything that
    the budget may still come to, where it has one: releases on batches of records are accounted at
    the budget's own delta alone.

    Examples
    --------
    >>> from pymc_dp.privacy.events import GaussianEvent
    >>> ax = dp.plot_epsilon_delta([(GaussianEvent("sum", 20.0), 100)])  # doctest: +SKIP
    """
    charges = charges_of(spent, "spent")
    grid = _deltas(deltas, charges)
    ax = axes_for(ax, (6.4, 4.0))
    if charges.cap is not None and not charges.batches:
        mu = mu_from_units(charges.cap)
        whole = [epsilon_from_mu(mu, delta) for delta in grid]
        label = f"the whole budget, {mu:.3g}-GDP"
        ax.plot(whole, grid, color=REFERENCE, linewidth=5.0, label=label)
    label = "charged"
    if not charges.batches:
        label += f", {mu_from_units(charges.units):.3g}-GDP"
    found = [charges.epsilon_at(delta) for delta in grid]
    ax.plot(found, grid, color=COLOURS[0], linewidth=2.0, label=label)
    if charges.epsilon is not None and charges.delta is not None:
        label = charges.stated
        ax.plot(
            [charges.epsilon],
            [charges.delta],
            "o",
            color=LIMIT,
            markersize=7,
            label=label,
            zorder=3,
        )
    ax.set_yscale("log")
    ax.set_xlim(left=0.0)
    ax.set_xlabel("ε")
    ax.set_ylabel("δ")
    legend_above(ax, 0.5 * grid[0], min(2.0 * grid[-1], 1.0))
    mark(ax, charges.secure)
    tidy(ax)
    return ax


def _deltas(deltas: Sequence[float] | None, charges: Charges) -> np.ndarray:
    if deltas is None:
        delta = charges.usual_delta
        if charges.batches:
            return np.geomspace(delta, 1e-2, 6)
        return np.geomspace(1e-4 * delta, 0.1, 60)
    values = np.atleast_1d(np.asarray(deltas, dtype="float64"))
    if values.ndim != 1 or len(values) < 2:
        raise ValueError("deltas must be a list of at least two numbers, from which a curve goes.")
    return np.array(sorted(check_delta(float(value)) for value in values))
