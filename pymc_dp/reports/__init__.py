"""Plots and diagnostics of budgets, posteriors and clip norms; on this page, what plots share.

Plots return matplotlib axes and draw only what their arguments say: no record is read and
nothing is spent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours that readers with any kind of colour vision can tell apart (Okabe & Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":")  # for more lines than colours, and for black-and-white print
LIMIT, REFERENCE = "0.15", "0.75"  # greys of limits and bounds, and of references to compare with


def axes_for(ax: Any, size: tuple[float, float]) -> Axes:
    """The axes given, or those of a new figure of `size` inches."""
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes

    if ax is None:
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise ValueError(
            f"ax must be matplotlib axes, not {type(ax).__name__}: leave it out for a new figure, "
            "or make one with figure, ax = plt.subplots()."
        )
    return ax


def legend_above(ax: Axes, low: float, high: float) -> None:
    """Set the vertical limits to `low` and `high`, with room above for a legend of all labels."""
    forward, back = (math.log, math.exp) if ax.get_yscale() == "log" else (float, float)
    room = (forward(high) - forward(low)) * rows_for_legend(ax)
    ax.set_ylim(low, back(forward(high) + room))
    for minor in (False, True):
        ax.set_yticks([y for y in ax.get_yticks(minor=minor) if low <= y <= high], minor=minor)
    ax.legend(loc="upper left", frameon=False, fontsize="small")


def rows_for_legend(ax: Axes) -> float:
    """Height of a legend of all labels, over the height that it leaves of the axes."""
    from matplotlib.font_manager import FontProperties

    rows = len(ax.get_legend_handles_labels()[1])
    line = 1.7 * FontProperties(size="small").get_size_in_points() / 72.0  # inches
    share = min(line * (rows + 0.7) / (ax.bbox.height / ax.figure.dpi), 0.6)
    return share / (1.0 - share)


def log_x_axis(ax: Axes) -> None:
    """Make the horizontal axis logarithmic; with plain numbers at 1, 3, 10, 30 where few fit."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    low, high = ax.xaxis.get_data_interval()
    if high < 1e3 * low:
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())


def mark(ax: Axes, secure: bool) -> None:
    """Say above the axes if nothing is guaranteed."""
    if not secure:
        ax.set_title("NO PRIVACY GUARANTEE: insecure test noise", color=COLOURS[1], loc="left")


def tidy(ax: Axes) -> None:
    """Remove the frame at the top and on the right."""
    ax.spines[["top", "right"]].set_visible(False)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.")
