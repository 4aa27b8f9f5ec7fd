"""Posteriors and chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from pymc_dp.base.checks import check_epsilon, check_integer, check_neighboring
from pymc_dp.errors import UnsafeRelease
from pymc_dp.publication.publish import statement_facts
from pymc_dp.reports import (
    COLOURS,
    LIMIT,
    REFERENCE,
    STYLES,
    axes_for,
    check_choice,
    legend_above,
    tidy,
)
from pymc_dp.reports.diagnostics import dataset_of, draws_of, entries, is_labelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# -- a private posterior beside another one -------------------------------------------------------


_DENSITIES, _COLUMNS, _MOST = 8, 2, 60  # most densities of "auto", panels in a row, parameters
_THICK, _THIN = 0.5, 0.9  # probability of the thick and the thin part of an interval


class _Pair(NamedTuple):
    """One scalar parameter: its label, and its draws in both posteriors."""

    label: str
    private: np.ndarray
    reference: np.ndarray


def plot_posterior_comparison(
    private: Any,
    reference: Any,
    var_names: str | Sequence[str] | None = None,
    *,
    kind: str = "auto",
    labels: tuple[str, str] | None = None,
    axes: Any = None,
) -> np.ndarray:
    """A private posterior beside another one, parameter by parameter.

    Parameters
    ----------
    private, reference : InferenceData, DataTree, xarray.Dataset or array
        Results, of which the group ``posterior`` is drawn, or both arrays of shape (chains, draws)
        or (chains, draws, d).  Numbers of draws may differ.
    var_names : str or sequence of str, optional
        Variables of labelled draws; default: those of `private`.
    kind : {"auto", "density", "forest"}
        Densities, one panel for each scalar parameter; or one panel of intervals: 50 % thick, 90 %
        thin, both equal-tailed, and the median.  "auto": densities of up to 8 parameters.
    labels : (str, str), optional
        Names in the legend.  Default: a released result is called private, with its epsilon, and
        what has no statement "not released" or "reference, not private".
    axes : matplotlib.axes.Axes or array of them, optional
        At least one for each panel.  Default: a new figure, 6.4 inches wide.

    Returns
    -------
    (k,) array of matplotlib.axes.Axes
        One for each panel.

    Raises
    ------
    ValueError
        If a variable is missing in one of the two or has another shape or other coordinates there,
        draws are not finite, or an argument is not usable.

    Notes
    -----
    A reference that is not private is as confidential as its data, and so is the picture: the
    legend says so.  Entries of a variable are matched by coordinates where both have names for
    them, and by position otherwise.

    Examples
    --------
    >>> axes = dp.plot_posterior_comparison(released, nuts, var_names="beta")  # doctest: +SKIP
    """
    check_choice("kind", kind, ("auto", "density", "forest"))
    pairs = _pairs(private, reference, var_names)
    if labels is None:
        labels = (
            _label(private, "private", "not released"),
            _label(reference, "reference", "reference, not private"),
        )
    if len(labels) != 2:
        raise ValueError("labels must be two: of private, and of reference.")
    if kind == "auto":
        kind = "density" if len(pairs) <= _DENSITIES else "forest"
    if len(pairs) > _MOST:
        raise ValueError(
            f"{len(pairs)} parameters are too many for one picture: choose with var_names."
        )
    panels = _panels(axes, pairs, kind)
    if kind == "forest":
        _forest(panels[0], pairs, labels)
    else:
        for panel, pair in zip(panels, pairs, strict=True):
            _densities(panel, pair, labels)
    handles, names = panels[0].get_legend_handles_labels()
    if axes is None:
        panels[0].figure.legend(
            handles, names, loc="outside upper center", ncols=2, frameon=False, fontsize="small"
        )
    else:
        panels[0].legend(handles, names, loc="best", frameon=False, fontsize="small")
    return panels


# -- draws ----------------------------------------------------------------------------------------


def _pairs(private: Any, reference: Any, var_names: str | Sequence[str] | None) -> list[_Pair]:
    labelled = is_labelled(private)
    if labelled != is_labelled(reference):
        raise ValueError(
            "private and reference must both be labelled (results or data sets), or both be arrays."
        )
    one = draws_of("private", private, var_names)
    if not one:
        raise ValueError("var_names is empty: name at least one variable.")
    two = draws_of("reference", reference, list(one) if labelled else None)
    pairs = []
    for name, x in one.items():
        if x.shape[2:] != two[name].shape[2:]:
            raise ValueError(
                f"{name!r} has shape {x.shape[2:]} in private and {two[name].shape[2:]} in "
                "reference: pass posteriors of the same model, or choose with var_names."
            )
        y = _matched(x, two[name])
        for (label, mine), (_, other) in zip(entries(x), entries(y), strict=True):
            for of, draws in (("private", mine), ("reference", other)):
                if draws.size < 2 or not np.isfinite(draws).all():
                    raise ValueError(f"{of} must have two finite draws or more of {label}.")
            pairs.append(_Pair(label, mine.ravel(), other.ravel()))
    return pairs


def _matched(one: xr.DataArray, two: xr.DataArray) -> xr.DataArray:
    """`two` with its entries in the order of `one`, along axes where both have names for them."""
    for dim, other in zip(one.dims[2:], two.dims[2:], strict=True):
        mine, numbered = one[dim].values, np.arange(one.sizes[dim])
        if any(np.array_equal(names, numbered) for names in (mine, two[other].values)):
            continue
        try:
            two = two.sel({other: mine})
        except KeyError:
            raise ValueError(
                f"{one.name!r} has other coordinates in private than in reference: give both the "
                "same names, or none."
            ) from None
    return two


def _label(draws: Any, array: str, otherwise: str) -> str:
    """Private with its epsilon, if there is a statement; else `array` or `otherwise`."""
    if not is_labelled(draws):
        return array
    try:
        facts = statement_facts(draws)
    except UnsafeRelease:
        return otherwise
    if facts["privacy_guarantee"] == "none":
        return "no privacy guarantee: insecure test noise"
    return f"private, ε = {facts['epsilon']:g}, δ = {facts['delta']:g}"


# -- panels ---------------------------------------------------------------------------------------


def _panels(axes: Any, pairs: list[_Pair], kind: str) -> np.ndarray:
    wanted = 1 if kind == "forest" else len(pairs)
    if axes is not None:
        found = np.array([axes_for(ax, (0, 0)) for ax in np.ravel(np.asarray(axes, dtype=object))])
        if len(found) < wanted:
            raise ValueError(f"axes has {len(found)} panels, but {wanted} are needed.")
        return found[:wanted]
    from matplotlib import pyplot as plt

    columns = min(_COLUMNS, wanted)
    rows = -(-wanted // columns)
    height = 1.2 + 0.3 * len(pairs) if kind == "forest" else 0.5 + 2.0 * rows
    figure, grid = plt.subplots(
        rows, columns, figsize=(6.4, height), layout="constrained", squeeze=False
    )
    for ax in grid.ravel()[wanted:]:
        figure.delaxes(ax)
    return grid.ravel()[:wanted]


def _densities(ax: Axes, pair: _Pair, labels: tuple[str, str]) -> None:
    import arviz as az

    for draws, label, reference in (
        (pair.reference, labels[1], True),
        (pair.private, labels[0], False),
    ):
        if np.ptp(draws) == 0.0:  # a chain that never moved has no density
            ax.axvline(draws[0], color=REFERENCE if reference else COLOURS[0], label=label)
            continue
        grid, density = az.kde(draws)[:2]  # ArviZ 1 also returns the bandwidth
        if reference:
            ax.fill_between(grid, density, color=REFERENCE, label=label)
        else:
            ax.plot(grid, density, color=COLOURS[0], linewidth=2.0, label=label)
    ax.set_xlabel(pair.label)
    ax.locator_params(axis="x", nbins=4)
    ax.set_yticks([])
    ax.set_ylim(bottom=0.0)
    tidy(ax)
    ax.spines["left"].set_visible(False)


def _forest(ax: Axes, pairs: list[_Pair], labels: tuple[str, str]) -> None:
    rows = np.arange(len(pairs))
    for draws, label, colour, shift in (
        ([pair.private for pair in pairs], labels[0], COLOURS[0], -0.16),
        ([pair.reference for pair in pairs], labels[1], "0.5", 0.16),
    ):
        for probability, width in ((_THIN, 1.2), (_THICK, 3.5)):
            tails = [0.5 - probability / 2.0, 0.5 + probability / 2.0]
            low, high = np.array([np.quantile(x, tails) for x in draws]).T
            ax.hlines(rows + shift, low, high, color=colour, linewidth=width)
        medians = [np.median(x) for x in draws]
        marker = "o" if colour == COLOURS[0] else "D"
        ax.plot(
            medians,
            rows + shift,
            marker,
            color=colour,
            markersize=5,
            markeredgecolor="white",
            label=label,
        )
    low, high = ax.get_xlim()
    if low < 0.0 < high:
        ax.axvline(0.0, color=LIMIT, linewidth=0.6, zorder=0)
    ax.set_yticks(rows, [pair.label for pair in pairs], fontsize="small")
    ax.set_ylim(len(pairs) - 0.4, -0.6)
    ax.set_xlabel(f"parameter: median, {_THICK:.0%} and {_THIN:.0%} intervals")
    tidy(ax)


# -- how often chains moved -----------------------------------------------------------------------


_NAMED = 6  # chains with a line of their own in the legend


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
    step are not.  Draws that were frozen after the budget was used up are left out.

    Examples
    --------
    >>> dp.plot_acceptance(released)  # doctest: +SKIP
    """
    stats = _statistics(idata, "dp_accepted", "another sampler made it, or plot_gibbs_acceptance")
    chains = _accepted(stats)
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
    if not is_labelled(idata):
        raise ValueError(
            f"idata must be a result of sampling, or its sample_stats; not {type(idata).__name__}."
        )
    stats = dataset_of("idata", idata, ("sample_stats",))
    if name not in stats:
        raise ValueError(f"idata has no {name} among its sample_stats: {otherwise}.")
    return stats


def _accepted(stats: xr.Dataset) -> list[np.ndarray]:
    """(draws,) accept decisions of each chain that has any, without frozen draws."""
    accepted = stats["dp_accepted"].transpose("chain", "draw").astype(bool)
    made = ~stats.get("dp_frozen", xr.zeros_like(accepted)).transpose("chain", "draw").astype(bool)
    chains = [x[kept] for x, kept in zip(accepted.values, made.values, strict=True) if kept.any()]
    if not chains:
        raise ValueError("idata has no draw that was made before the budget was used up.")
    return chains


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
        axis is logarithmic, without zeros, where probabilities or the bound are below 0.05.

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
