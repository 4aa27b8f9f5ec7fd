"""How often chains moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import check_epsilon, check_integer, check_neighboring
from pymc_dp.report.diagnostics.draws import dataset_of
from pymc_dp.report.plots.drawing import (
    COLOURS,
    LIMIT,
    REFERENCE,
    STYLES,
    axes_for,
    legend_above,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Chains with a line of their own in the legend.
_NAMED = 6


def plot_acceptance(idata: Any, *, window: int | None = None, ax: Axes | None = None) -> Axes:
    """Share of accepted proposals along each chain, and where each chain stayed longest.

    Parameters
    ----------
    idata : arviz.InferenceData, xarray.DataTree or xarray.Dataset
        A result of a private step, or its ``sample_stats``.
    window : int, optional
        Draws over which acceptance is averaged; default: a tenth of them, at least 10.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes
        One line for each chain, at the last draw of the window; below, one bar for each chain, over
        the longest run of draws without an accepted proposal.

    Raises
    ------
    ValueError
        If `idata` has no ``dp_accepted``, or `window` is not between 1 and the number of draws.

    Notes
    -----
    Drawn from ``dp_accepted`` alone, which is released; the acceptance *probabilities* of a private
    step are not.  In a result that was not released, draws that were frozen after the budget was
    used up are left out.

    Examples
    --------
    >>> dp.plot_acceptance(released)  # doctest: +SKIP
    """
    stats = _statistics(idata, "dp_accepted", "another sampler made it, or plot_gibbs_acceptance")
    chains = list(_accepted(stats))
    shortest = min(len(accepted) for accepted in chains)
    if window is None:
        window = min(max(10, shortest // 10), shortest)
    window = check_integer("window", window, minimum=1)
    if window > shortest:
        raise ValueError(f"window must be at most the number of draws, {shortest}; got {window}.")
    ax = axes_for(ax, (6.4, 4.0))
    height = min(0.05, 0.2 / len(chains))
    for k, accepted in enumerate(chains):
        colour, style = COLOURS[k % len(COLOURS)], STYLES[k // len(COLOURS) % len(STYLES)]
        sums = np.cumsum([0, *accepted])
        rolling = (sums[window:] - sums[:-window]) / window
        begin, length = longest_stay(accepted)
        stay = f"longest stay {length} draw{'s' if length != 1 else ''}"
        label = f"chain {k}: {accepted.mean():.1%} accepted, {stay}"
        ax.plot(
            np.arange(window, len(accepted) + 1),
            rolling,
            color=colour,
            linestyle=style,
            label=label if k < _NAMED else None,
        )
        ax.barh(-(k + 1) * height, length, left=begin + 0.5, height=0.8 * height, color=colour)
    ax.axhline(0.0, color=LIMIT, linewidth=0.8)
    ax.set_xlim(0, max(map(len, chains)) + 1)
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.set_xlabel("draw; bars: longest run without an accepted proposal")
    ax.set_ylabel(f"accepted, mean of {window} draws")
    legend_above(ax, -(len(chains) + 1) * height, 1.03)
    tidy(ax)
    return ax


def longest_stay(accepted: np.ndarray) -> tuple[int, int]:
    """First draw (from 0) and length of the longest run of False."""
    ends = np.flatnonzero(np.concatenate([[True], accepted, [True]]))
    lengths = np.diff(ends) - 1
    longest = int(np.argmax(lengths))
    return int(ends[longest]), int(lengths[longest])


def _statistics(idata: Any, name: str, otherwise: str) -> xr.Dataset:
    """The statistics of a run, among them the one named."""
    if not isinstance(idata, xr.Dataset) and not _compat.is_result(idata):
        raise ValueError(
            f"idata must be a result of sampling, or its sample_stats; not {type(idata).__name__}."
        )
    stats = dataset_of("idata", idata, ["sample_stats"])
    if name not in stats:
        raise ValueError(f"idata has no {name} among its sample_stats: {otherwise}.")
    return stats


def _accepted(stats: xr.Dataset) -> Iterator[np.ndarray]:
    """(draws,) accept decisions of each chain, without frozen draws."""
    accepted = stats["dp_accepted"].transpose("chain", "draw").values.astype(bool)
    frozen = np.zeros_like(accepted)
    if "dp_frozen" in stats:
        frozen = stats["dp_frozen"].transpose("chain", "draw").values.astype(bool)
    for one, stopped in zip(accepted, frozen, strict=True):
        if not stopped.all():
            yield one[~stopped]
    if frozen.all():
        raise ValueError("idata has no draw that was made before the budget was used up.")


def plot_gibbs_acceptance(
    idata: Any,
    epsilon: float | None = None,
    *,
    neighboring: str = "replace_one",
    ax: Axes | None = None,
) -> Axes:
    """How many records moved in each sweep of ``PrivacyAwareGibbs``, and the least likely to.

    Parameters
    ----------
    idata : arviz.InferenceData, xarray.DataTree or xarray.Dataset
        A result with :class:`pymc_dp.PrivacyAwareGibbs`, or its ``sample_stats``.
    epsilon : float, optional
        Of everything that was published about the records, added up, if it is purely private:
        ``proposal="prior"`` then accepts each record with a probability of at least
        exp(-epsilon) (Ju et al. 2022, Proposition 3.1), which is drawn.  Default: no bound.
    neighboring : {"replace_one", "add_or_remove_one"}
        Of `epsilon`; the bound is exp(-2 epsilon) under the latter.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes
        For each chain a line, the part of the records that moved (``dp_acceptance``), and points,
        the smallest acceptance probability of any record (``exp(dp_min_log_alpha)``).  The vertical
        axis is logarithmic where probabilities or the bound are below 0.05; a probability of 0 is
        then not seen.

    Raises
    ------
    ValueError
        If `idata` has none of these statistics, or `epsilon` is not positive.

    Notes
    -----
    Points below the bound mean that the declared release is not as private as `epsilon` says, or
    that another proposal than "prior" was used, for which there is no bound.

    Examples
    --------
    >>> dp.plot_gibbs_acceptance(posterior, epsilon=0.5)  # doctest: +SKIP
    """
    stats = _statistics(idata, "dp_min_log_alpha", "PrivacyAwareGibbs did not make it")
    neighboring = check_neighboring(neighboring)
    bound = None
    if epsilon is not None:
        epsilon = check_epsilon(epsilon)
        bound = float(np.exp(-epsilon if neighboring == "replace_one" else -2.0 * epsilon))
    moved = stats["dp_acceptance"].transpose("chain", "draw").values
    lowest = np.exp(stats["dp_min_log_alpha"].transpose("chain", "draw").values)
    ax = axes_for(ax, (6.4, 4.0))
    draws = np.arange(1, moved.shape[1] + 1)
    for k, (part, least) in enumerate(zip(moved, lowest, strict=True)):
        colour = COLOURS[k % len(COLOURS)]
        of = f"chain {k}: " if len(moved) > 1 else ""
        ax.plot(
            draws,
            part,
            color=colour,
            linewidth=1.0,
            label=f"{of}{part.mean():.1%} of the records moved" if k < _NAMED else None,
        )
        label = "smallest acceptance probability" if k == len(moved) - 1 else None
        ax.plot(draws, least, ".", color=colour, markersize=4, alpha=0.7, label=label)
    shown = [*lowest[lowest > 0], *([] if bound is None else [bound])]
    smallest = min(shown, default=1.0)
    low = 0.0
    if smallest < 0.05:
        ax.set_yscale("log")
        low = 0.5 * smallest
    if bound is not None:
        power = "−ε" if neighboring == "replace_one" else "−2ε"
        ax.axhspan(low, bound, color=REFERENCE, alpha=0.4, linewidth=0)
        ax.axhline(
            bound,
            color=LIMIT,
            linestyle="--",
            label=f"bound of the proposal “prior”: exp({power}) = {bound:.2g}, ε = {epsilon:g}",
        )
    ax.set_xlim(0, len(draws) + 1)
    ax.set_xlabel("draw")
    ax.set_ylabel("part of the records; probability")
    legend_above(ax, low, 1.03)
    tidy(ax)
    return ax
