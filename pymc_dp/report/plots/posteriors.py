"""A private posterior beside one to compare it with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from pymc_dp.base import compat as _compat
from pymc_dp.publication.statement import STATEMENT
from pymc_dp.report.diagnostics.draws import dataset_of, is_labelled, names_of, numbers, variables
from pymc_dp.report.plots.drawing import COLOURS, LIMIT, REFERENCE, axes_for, check_choice, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Parameters up to which "auto" draws densities, panels in a row, and parameters of a picture.
_DENSITIES, _COLUMNS, _MOST = 8, 2, 60
#: Probability of the thick and the thin part of an interval.
_THICK, _THIN = 0.5, 0.9


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
    A reference that is not private is as confidential as the data that it was made from, and so is
    the picture: the legend says so.  Entries of a variable are matched by their coordinates where
    both have names for them, and by position otherwise.

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
    if is_labelled(private) != is_labelled(reference):
        raise ValueError(
            "private and reference must both be labelled (results or data sets), or both be arrays."
        )
    if not is_labelled(private):
        if var_names is not None:
            raise ValueError("var_names are for labelled draws; private and reference are arrays.")
        private, reference = _dataset("private", private), _dataset("reference", reference)
    one = dataset_of("private", private, ["posterior"])
    two = dataset_of("reference", reference, ["posterior"])
    names = names_of(var_names, list(one.data_vars))
    if not names:
        raise ValueError("var_names is empty: name at least one variable.")
    pairs = []
    for name, x, y in zip(
        names, variables("private", one, names), variables("reference", two, names), strict=True
    ):
        if x.shape[2:] != y.shape[2:]:
            raise ValueError(
                f"{name!r} has shape {x.shape[2:]} in private and {y.shape[2:]} in reference: "
                "pass posteriors of the same model, or choose with var_names."
            )
        y = _matched(name, one[name], two[name], y)
        labels = _entries(name, one[name])
        x, y = (a.reshape(a.shape[0] * a.shape[1], -1).astype("float64") for a in (x, y))
        for k, label in enumerate(labels):
            for of, draws in (("private", x[:, k]), ("reference", y[:, k])):
                if len(draws) < 2 or not np.isfinite(draws).all():
                    raise ValueError(f"{of} must have two finite draws or more of {label}.")
            pairs.append(_Pair(label, x[:, k], y[:, k]))
    return pairs


def _dataset(name: str, draws: Any) -> xr.Dataset:
    values = numbers(name, draws)
    if values.ndim not in (2, 3):
        raise ValueError(
            f"{name} must have shape (chains, draws) or (chains, draws, d); got {values.shape}."
        )
    dims = ("chain", "draw", "entry")[: values.ndim]
    return xr.Dataset({"x": (dims, values)})


def _coordinates(array: xr.DataArray) -> list[np.ndarray | None]:
    """Coordinates of each axis behind chain and draw; None where they are only numbers from 0."""
    found = []
    for dim in array.transpose("chain", "draw", ...).dims[2:]:
        values = array.coords[dim].values if dim in array.coords else np.arange(array.sizes[dim])
        found.append(None if np.array_equal(values, np.arange(len(values))) else values)
    return found


def _matched(name: str, one: xr.DataArray, two: xr.DataArray, values: np.ndarray) -> np.ndarray:
    """`values` of `two` in the order in which `one` has them."""
    for axis, (mine, other) in enumerate(zip(_coordinates(one), _coordinates(two), strict=True)):
        if mine is None or other is None:
            continue
        places = {label: k for k, label in enumerate(other.tolist())}
        if set(mine.tolist()) != set(places):
            raise ValueError(
                f"{name!r} has other coordinates in private than in reference: give both the same "
                "names, or none."
            )
        values = np.take(values, [places[label] for label in mine.tolist()], axis=axis + 2)
    return values


def _entries(name: str, array: xr.DataArray) -> list[str]:
    """beta[veteran], beta[age], ..., as ArviZ calls the entries of a variable."""
    sizes = array.transpose("chain", "draw", ...).shape[2:]
    if not sizes:
        return [name]
    names = [
        np.arange(size) if values is None else values
        for size, values in zip(sizes, _coordinates(array), strict=True)
    ]
    return [
        f"{name}[{', '.join(str(axis[k]) for axis, k in zip(names, where, strict=True))}]"
        for where in np.ndindex(sizes)
    ]


def _label(draws: Any, array: str, otherwise: str) -> str:
    """Private with its epsilon, if there is a statement; else `array` or `otherwise`."""
    if not is_labelled(draws):
        return array
    attrs = draws.attrs if isinstance(draws, xr.Dataset) else _compat.attributes(draws)
    if STATEMENT not in attrs:
        return otherwise
    facts = json.loads(attrs[STATEMENT])
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

    if kind == "forest":
        size = (6.4, 1.2 + 0.3 * len(pairs))
        return np.array([plt.subplots(figsize=size, layout="constrained")[1]])
    columns = min(_COLUMNS, wanted)
    rows = -(-wanted // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(6.4, 0.5 + 2.0 * rows), layout="constrained", squeeze=False
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
