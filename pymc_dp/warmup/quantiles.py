"""What a noisy histogram says about the tail of a positive quantity."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["tail_quantile"]

#: Widths of the windows, in bins, in which norms are looked for: the norms of one model's scores
#: are spread over four octaves, or are a few values alone.
_WINDOWS = (1, 2, 4, 8, 16)
#: How far above the highest bin that is seen its tail is looked for: two octaves.
_MARGIN = 8
#: A window must stand out of the noise by this many sds; with 480 windows of each width an empty
#: histogram passes with probability below 3e-4.
_CLEAR = 5.2
#: Farthest continuation of the tail, as a factor.
_FURTHEST = 2.0


def tail_quantile(
    edges: np.ndarray,
    counts: np.ndarray,
    noise_sd: float,
    tail: float,
    n: float,
    heavy: bool = False,
) -> float | None:
    """Upper quantile of a positive quantity from a histogram with noisy counts.

    Parameters
    ----------
    edges : (k + 1,) ndarray
        Ascending bin edges in natural units; the first bin holds zeros.
    counts : (k,) ndarray
        Noisy counts.
    noise_sd : float
        Standard deviation of the noise on each count.
    tail : float
        Fraction that may lie above, of the units that are not zero.
    n : float
        Public number of units.
    heavy : bool
        Continue a hidden tail like that of an exponential law, not like that of a normal one.

    Returns
    -------
    float or None
        The edge with about that fraction above it. 0 where nearly all units are zero, or beyond
        all bins; None where nothing stands out of the noise.

    Notes
    -----
    Most bins are empty and add nothing but noise, so the tail is summed from 8 bins above the
    highest that are seen; what lies beyond is too rare to be seen. The quantile is not below the
    first bin of the highest window that is thicker than the tail. Where the noise hides a tail as
    thin as asked for, the quantile of a thicker one is continued.
    """
    inner = counts[1:]
    highest, least_edge = 0, 0.0
    for width in _WINDOWS:
        sums = np.convolve(inner, np.ones(width), mode="valid")
        noise = _CLEAR * noise_sd * math.sqrt(width)
        # the window one bin higher does not stand out, so the first bin is not empty
        seen = np.flatnonzero(sums > noise)
        highest = max(highest, int(seen[-1]) + 1) if seen.size else highest
        thick = np.flatnonzero(sums > max(noise, tail * n))
        if thick.size:
            least_edge = max(least_edge, float(edges[min(thick[-1] + 2, len(edges) - 2)]))
    if highest == 0:
        return 0.0 if counts[0] > n / 2 else None
    start = min(int(np.argmax(sums)), max(highest - _WINDOWS[-1], 0))
    top = min(highest + _MARGIN, len(inner))
    above = np.cumsum(inner[start:top][::-1])
    n = min(n, max(float(above[-1]), 0.0))  # of those that are not zero
    # the noise of a sum over k bins grows like sqrt(k): two of its sds are no tail
    hidden = 2.0 * noise_sd * np.sqrt(np.arange(1.0, len(above) + 1.0))
    below = np.flatnonzero(above <= np.maximum(tail * n, hidden))
    first = int(below[-1]) + 1 if below.size else 0  # from here on the sums stay above
    if first == len(above):
        return None
    if top - 1 - first >= len(inner) - 1:
        return 0.0
    least = max(tail * n, float(hidden[first]))
    j = top - 1 - first  # the bin in which the tail begins
    inside = (float(above[first]) - least) / max(float(inner[j]), 1.0)
    edge = edges[j + 2] * (edges[j + 1] / edges[j + 2]) ** (1.0 - min(max(inside, 0.0), 1.0))
    edge = max(float(edge), least_edge)
    beyond = math.log(1.0 / tail) / math.log(max(n / least, 2.0))
    beyond = beyond if heavy else math.sqrt(beyond)
    return edge * min(max(beyond, 1.0), _FURTHEST)
