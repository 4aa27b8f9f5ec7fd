"""Which clip norm the model expects to clip how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pymc_dp.report.advice import ClipAdvice
from pymc_dp.report.plots.drawing import COLOURS, LIMIT, axes_for, log_x_axis, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Ratio of norms from which their axis is logarithmic.
_WIDE = 20.0


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
