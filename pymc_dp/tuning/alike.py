"""A noisy curvature whose entries are alike: their mean and spread tell how much of each is noise.

The entries in which one coordinate meets the effects of all groups are draws of one population, as
the effects themselves are to the model, and the entries between whitened coordinates lie about 0.
Where such entries hardly differ but for their noise they are put near to their mean (James and
Stein 1961; Efron and Morris 1973), and the noise that is left in them is less: what each has of
its own, and what the mean has, which all share.  A hierarchy needs it most: a parameter that all
records see has one entry with each group, and their noise adds up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

#: Fewer entries tell too little about what they have in common.
_FEWEST = 10
#: An entry that is farther from the mean, in standard deviations of all, stays what it is: it is
#: of another population (Efron and Morris 1972 limit how far it is moved).
_FARTHEST = 3.0


def put_together(
    matrix: np.ndarray, variances: np.ndarray, blocks: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The curvature and its noise, with entries that are alike put near to their mean.

    `matrix` and `variances` are (d, d), in the coordinates z in which the released noise is
    independent.  `blocks` are the coordinates of the effects of groups; the others are whitened.
    Each of the (d, d) arrays that come third is multiplied by one standard normal number, which all
    its entries share, and added to the noise.
    """
    matrix, before, variances = matrix.copy(), variances, variances.copy()
    shared = []
    for where, centred in _alike(before > 0.0, blocks):
        if len(where[0]) < _FEWEST:
            continue
        values, own = matrix[where], before[where]
        middle = 0.0 if centred else float(values.mean())
        # with its standard error, or what is left would be said to be nothing where it is found 0
        spread = max(float(np.mean((values - middle) ** 2 - own)), 0.0)
        spread += float(own.mean()) * math.sqrt(2.0 / len(values))
        part = own / (own + spread)
        part[np.abs(values - middle) > _FARTHEST * np.sqrt(own + spread)] = 0.0
        of_mean = np.zeros_like(matrix)
        for place in (where, where[::-1]):
            matrix[place] = values + part * (middle - values)
            variances[place] = (1.0 - part) * own
            of_mean[place] = part * math.sqrt(float(np.mean(own + spread)) / len(values))
        if not centred:
            shared.append(of_mean)
    return matrix, variances, shared


def _alike(
    noisy: np.ndarray, blocks: Sequence[np.ndarray]
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], bool]]:
    """Places above the diagonal that are alike, and whether they lie about 0.

    There are none on the diagonal: groups differ in size, and those whose size the noise hides are
    left out.
    """
    d = len(noisy)
    group = np.full(d, -1)
    for k, block in enumerate(blocks):
        group[block] = k
    rows, columns = np.nonzero(np.triu(noisy, 1))
    first, second = group[rows], group[columns]
    whitened = (first < 0) & (second < 0)
    yield (rows[whitened], columns[whitened]), True
    for k in range(len(blocks)):
        for j in np.flatnonzero(group < 0):
            meets = ((rows == j) & (second == k)) | ((columns == j) & (first == k))
            yield (rows[meets], columns[meets]), False
        for m in range(k, len(blocks)):
            both = ((first == k) & (second == m)) | ((first == m) & (second == k))
            yield (rows[both], columns[both]), False
