"""What a noisy histogram says about the tail of a positive quantity."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["tail_quantile"]

#: Four octaves: about as wide as the norms of one model's scores are spread.
_WINDOW = 16
#: How far above the window its tail is looked for: two octaves.
_MARGIN = 8
#: The fullest window must stand out of the noise by this many sds; with 480 windows an empty
#: histogram passes with probability below 2e-4.
_CLEAR = 5.0
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
    Most bins are empty and add nothing but noise, so the tail is summed over the fullest window of
    16 bins, up to the highest 8 bins that stand out of the noise, and 8 above. What lies beyond is
    too rare to be seen. Where the noise
    hides a tail as thin as asked for, the quantile of a thicker one is continued.
    """
    inner = counts[1:]
    sums = np.convolve(inner, np.ones(_WINDOW), mode="valid")
    start = int(np.argmax(sums))
    if sums[start] < _CLEAR * noise_sd * np.sqrt(_WINDOW):
        return 0.0 if counts[0] > n / 2 else None
    top = start + _WINDOW
    seen = np.convolve(inner, np.ones(_MARGIN), mode="valid") > _CLEAR * noise_sd * math.sqrt(
        _MARGIN
    )
    if seen.any():  # records far above the fullest window, if they stand out too
        top = max(top, int(np.flatnonzero(seen)[-1]) + _MARGIN)
    top = min(top + _MARGIN, len(inner))
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
    beyond = math.log(1.0 / tail) / math.log(max(n / least, 2.0))
    beyond = beyond if heavy else math.sqrt(beyond)
    return float(edge) * min(max(beyond, 1.0), _FURTHEST)
