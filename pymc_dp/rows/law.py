"""The law of the outcome of each record, by quadrature with the model's own density.

Nodes and weights of a record are a function of its other data, of the parameters and of constants:
no random numbers, and nothing of another record.  A first search narrows an interval that holds
nearly all of the support down to where the density is; nodes are then spread over it such that
tails of any power are reached.  A law whose weights do not add up to one is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from pymc_dp._jit import compiled
from pymc_dp.rows.cuts import Column, Outcome

__all__ = ["NODES", "Law", "LogDensity", "law_of", "most_nodes"]

LogDensity = Callable[[ndarray], ndarray]
"""(rows,) outcomes -> (rows,) log-densities, or log-probabilities."""
Densities = Callable[[slice | ndarray], LogDensity]
"""Some rows of a block -> their log-density."""

#: Nodes of an interval, or groups of integers, for each mode.
NODES = 28
#: Integers that are tried one by one first, and the probability above them that is ignored.
_FEW, _IGNORED = 16, 1e-6
#: Places at which a density is looked at to narrow an interval, and how often at most.
_LOOKS, _ROUNDS = 10, 24
#: So many places must be seen about the mode, whose log-densities are less than this below it.
_SEEN, _NEAR = 3, 3.0
#: Log-densities below the largest by more than this do not count for nodes.
_FAR = 13.0
#: How often the cell in which it falls below that is halved.
_HALVINGS = 2
#: How far the search reaches: asinh of a real number, of the log of a positive one, log-odds; log
#: of an integer.
_WIDEST = {"line": 24.0, "half": 5.0, "interval": 4.3}
#: And nodes: asinh of the distance from the mode in standard deviations.
_TAIL = 10.0
#: How much the weights may differ from a sum of one.
_TOLERANCE = 0.02


@dataclass(frozen=True, eq=False)
class Law:
    """Nodes and weights of each row.

    Attributes
    ----------
    nodes, weights : (k, rows) ndarray
        Weights add up to one, or are all 0 where the law could not be found.
    """

    nodes: ndarray
    weights: ndarray


def law_of(outcome: Outcome, data: list[ndarray], density_of: Densities) -> Law:
    """The laws of the outcomes of a block of rows.

    Parameters
    ----------
    outcome : Outcome
    data : list of ndarray
        The leaves of the rows.
    density_of : callable
    """
    n, size = len(data[outcome.leaf]), NODES * outcome.modes
    if outcome.discrete:
        largest = float(outcome.upper)  # type: ignore[arg-type]
        nodes, weights = _integers(n, largest, density_of, size)
    else:
        log_density = density_of(slice(0, n))
        ends = [_column(end, data) for end in (outcome.lower, outcome.upper)]
        nodes, weights = _reals(ends[0], ends[1], log_density, size)
        for atom in outcome.atoms:
            place = _column(atom, data)
            mass = np.zeros(n)
            _add_mass(log_density(place), np.ones(n), 0.0, mass)
            nodes = np.concatenate([nodes, place[None]])
            weights = np.concatenate([weights, mass[None]])
    _normalise(weights, _TOLERANCE)
    return Law(nodes, weights)


def most_nodes(outcome: Outcome) -> int:
    """How many nodes a row has at most."""
    if not outcome.discrete:
        return NODES * outcome.modes + len(outcome.atoms)
    largest = float(outcome.upper)  # type: ignore[arg-type]
    return int(min(largest + 1.0, max(_FEW, NODES * outcome.modes + 1)))


def _column(end: float | Column, data: list[ndarray]) -> ndarray:
    if isinstance(end, Column):
        return np.clip(np.ascontiguousarray(data[end.leaf], dtype="float64"), end.least, end.most)
    return np.full(len(data[0]), float(end))


def _narrowed(
    low: ndarray, high: ndarray, look: Callable[[ndarray, ndarray], None]
) -> tuple[ndarray, ndarray]:
    """Places and log-densities at which a density was looked at last, close to its mode."""
    n = len(low)
    places, values = np.empty((_LOOKS, n)), np.empty((_LOOKS, n))
    done = np.zeros(n, dtype=bool)
    for _ in range(_ROUNDS):
        last = done.all()
        _midpoints(low, high, places)
        for place, value in zip(places, values, strict=True):
            look(place, value)
        if last:
            break
        _narrow(values, _NEAR, _SEEN, low, high, done)
    return places, values


def _reach(n: int, look: Callable[[ndarray, ndarray], None]) -> tuple[ndarray, ndarray]:
    """Where nodes begin and end, in terms of asinh of the distance from the mode."""
    low, high = np.full(n, -_TAIL), np.full(n, _TAIL)
    places, values = np.empty((_LOOKS, n)), np.empty((_LOOKS, n))
    _midpoints(low, high, places)
    for place, value in zip(places, values, strict=True):
        look(place, value)
    first, last, least = np.empty(n), np.empty(n), np.empty(n)
    _ends(places, values, _FAR, low, first, last, high, least)
    middle, value = np.empty(n), np.empty(n)
    for _ in range(_HALVINGS):
        for outside, inside in ((low, first), (high, last)):
            np.add(outside, inside, out=middle)
            np.multiply(middle, 0.5, out=middle)
            look(middle, value)
            _halve(middle, value, least, outside, inside)
    return low, high


def _reals(
    lower: ndarray, upper: ndarray, log_density: LogDensity, size: int
) -> tuple[ndarray, ndarray]:
    """Nodes and weights between two ends, which may be infinite."""
    n = len(lower)
    low, high = np.empty(n), np.empty(n)
    _widest(lower, upper, _WIDEST["line"], _WIDEST["half"], _WIDEST["interval"], low, high)
    outcome, slope = np.empty(n), np.empty(n)
    zeros, ones = np.zeros(n), np.ones(n)
    centre, width = zeros, ones

    def look(place: ndarray, value: ndarray) -> None:
        _place(place, centre, width, lower, upper, outcome, slope)
        _add_slope(log_density(outcome), slope, value)

    places, values = _narrowed(low, high, look)
    centre, width = np.empty(n), np.empty(n)
    _mode(places, values, centre, width)
    low, high = _reach(n, look)
    nodes, weights, places = (np.empty((size, n)) for _ in range(3))
    _midpoints(low, high, places)
    for node, weight, place in zip(nodes, weights, places, strict=True):
        look(place, weight)
        node[:] = outcome
    _masses(weights, low, high)
    return nodes, weights


def _integers(n: int, largest: float, density_of: Densities, size: int) -> tuple[ndarray, ndarray]:
    """Nodes and weights of nonnegative integers: all of them where these are few."""
    few = int(min(largest + 1.0, _FEW))
    nodes, weights, missing = np.zeros((few, n)), np.zeros((few, n)), np.ones(n)
    log_density = density_of(slice(0, n))
    for k, weight in enumerate(weights):
        nodes[k] = k
        _add_mass(log_density(nodes[k]), missing, _IGNORED, weight)
        if not np.any(missing > _IGNORED):
            return nodes[: k + 1], weights[: k + 1]
    others = np.flatnonzero(missing > _IGNORED)
    if largest < _FEW or not others.size:
        return nodes, weights
    groups, masses = _grouped(weights[0, others], largest, density_of(others), size)
    if len(others) == n:
        return groups, masses
    shape = (max(few, len(groups)), n)
    all_nodes, all_weights = np.zeros(shape), np.zeros(shape)
    all_nodes[:few], all_weights[:few] = nodes, weights
    all_nodes[:, others], all_weights[:, others] = 0.0, 0.0
    all_nodes[: len(groups), others], all_weights[: len(groups), others] = groups, masses
    return all_nodes, all_weights


def _grouped(
    none: ndarray, largest: float, log_density: LogDensity, size: int
) -> tuple[ndarray, ndarray]:
    """Nodes and weights of nonnegative integers: 0, of probability `none`, and groups of others."""
    n = len(none)
    outcome = np.empty(n)

    def look(place: ndarray, value: ndarray) -> None:
        _exponential(place, largest, outcome)
        _add_slope(log_density(outcome), place, value)

    low, high = np.zeros(n), np.full(n, math.log(largest + 1.0))
    places, values = _narrowed(low, high, look)
    centre, width, slope = np.empty(n), np.empty(n), np.empty(n)
    _integer_mode(places, values, largest, none, centre, width)

    def look_again(place: ndarray, value: ndarray) -> None:
        _standardised(place, centre, width, largest, outcome, slope)
        _add_slope(log_density(outcome), slope, value)

    low, high = _reach(n, look_again)
    nodes, ends = np.zeros((size + 1, n)), np.zeros((size + 1, n))
    _groups(low, high, centre, width, largest, ends)
    _middles(ends, nodes)
    weights = np.empty_like(nodes)
    for node, weight in zip(nodes, weights, strict=True):
        weight[:] = log_density(node)
    _group_masses(weights, nodes, ends)
    return nodes, weights


# -- loops over rows ------------------------------------------------------------------------------


@compiled(error_model="numpy")
def _midpoints(low: ndarray, high: ndarray, out: ndarray) -> None:
    k = out.shape[0]
    for j in range(k):
        for i in range(low.shape[0]):
            out[j, i] = low[i] + (high[i] - low[i]) * ((j + 0.5) / k)


@compiled(error_model="numpy")
def _narrow(
    values: ndarray, near: float, seen: int, low: ndarray, high: ndarray, done: ndarray
) -> None:
    """The cells in which the density is near to its largest, and their neighbours.

    Where many are, those of the largest alone, and no others after that.
    """
    k, n = values.shape
    for i in range(n):
        if done[i]:
            continue
        largest, at = -math.inf, 0
        for j in range(k):
            if values[j, i] > largest:
                largest, at = values[j, i], j
        if largest == -math.inf:
            high[i] = low[i] + (high[i] - low[i]) / k  # integers end below all that were looked at
            continue
        first, last = k, -1
        for j in range(k):
            if values[j, i] >= largest - near:
                first = min(first, j)
                last = j
        if last + 1 - first >= seen:
            done[i] = True
            first = last = at
        first, last = max(first - 1, 0), min(last + 1, k - 1)
        length = (high[i] - low[i]) / k
        high[i] = low[i] + length * (last + 1)
        low[i] = low[i] + length * first


@compiled(error_model="numpy")
def _ends(
    places: ndarray,
    values: ndarray,
    far: float,
    low: ndarray,
    first: ndarray,
    last: ndarray,
    high: ndarray,
    least: ndarray,
) -> None:
    """The cells between the values that count and those that do not, and the least that counts."""
    k, n = places.shape
    for i in range(n):
        largest = -math.inf
        for j in range(k):
            largest = max(largest, values[j, i])
        first[i], last[i], least[i] = low[i], high[i], largest - far
        if not math.fabs(largest) < math.inf:
            continue
        j = 0
        while values[j, i] < least[i]:
            j += 1
        first[i] = places[j, i]
        if j > 0:
            low[i] = places[j - 1, i]
        j = k - 1
        while values[j, i] < least[i]:
            j -= 1
        last[i] = places[j, i]
        if j < k - 1:
            high[i] = places[j + 1, i]


@compiled(error_model="numpy")
def _halve(
    middle: ndarray, value: ndarray, least: ndarray, outside: ndarray, inside: ndarray
) -> None:
    """Move one end of a cell to its middle."""
    for i in range(middle.shape[0]):
        if value[i] >= least[i]:
            inside[i] = middle[i]
        else:
            outside[i] = middle[i]


@compiled(error_model="numpy")
def _widest(
    lower: ndarray,
    upper: ndarray,
    line: float,
    half: float,
    interval: float,
    low: ndarray,
    high: ndarray,
) -> None:
    for i in range(lower.shape[0]):
        ends = (1 if lower[i] > -math.inf else 0) + (1 if upper[i] < math.inf else 0)
        reach = line if ends == 0 else (half if ends == 1 else interval)
        low[i], high[i] = -reach, reach


@compiled(error_model="numpy")
def _place(
    place: ndarray,
    centre: ndarray,
    width: ndarray,
    lower: ndarray,
    upper: ndarray,
    outcome: ndarray,
    slope: ndarray,
) -> None:
    """The outcome at a place, and the log of its derivative by the place.

    The place is asinh of a standardised real number, which is the outcome, its logarithm where it
    has one end, or its log-odds between two.
    """
    for i in range(place.shape[0]):
        grown = math.exp(place[i])
        v = centre[i] + width[i] * (0.5 * (grown - 1.0 / grown))  # sinh
        log_slope = math.log(width[i] * (0.5 * (grown + 1.0 / grown)))  # cosh
        from_below, from_above = lower[i] > -math.inf, upper[i] < math.inf
        if from_below and from_above:
            small = math.exp(-math.fabs(v))
            part = small / (1.0 + small)
            span = upper[i] - lower[i]
            outcome[i] = lower[i] + span * part if v < 0.0 else upper[i] - span * part
            log_slope += math.log(span) - math.fabs(v) - 2.0 * math.log1p(small)
        elif from_below:
            outcome[i] = lower[i] + math.exp(v)
            log_slope += v
        elif from_above:
            outcome[i] = upper[i] - math.exp(v)
            log_slope += v
        else:
            outcome[i] = v
        slope[i] = log_slope


@compiled(error_model="numpy")
def _add_slope(log_density: ndarray, slope: ndarray, out: ndarray) -> None:
    """Their sum; minus infinity where it is not finite: at ends to which an outcome was rounded."""
    for i in range(out.shape[0]):
        value = log_density[i] + slope[i]
        out[i] = value if math.fabs(value) < math.inf else -math.inf


@compiled(error_model="numpy")
def _mode(places: ndarray, values: ndarray, centre: ndarray, width: ndarray) -> None:
    """Where the density by sinh of the place is largest, and the sd of a normal that is as high."""
    k, n = places.shape
    for i in range(n):
        largest, at = -math.inf, 0.0
        for j in range(k):
            value = values[j, i] - math.log(math.cosh(places[j, i]))
            if value > largest:
                largest, at = value, places[j, i]
        if math.fabs(largest) < 300.0:
            centre[i], width[i] = math.sinh(at), 0.3989422804014327 * math.exp(-largest)
        else:
            centre[i], width[i] = 0.0, 1.0


@compiled(error_model="numpy")
def _add_mass(log_density: ndarray, missing: ndarray, ignored: float, out: ndarray) -> None:
    """Probabilities of one place, 0 where others have all but `ignored`; what is missing then."""
    for i in range(out.shape[0]):
        if missing[i] > ignored:
            out[i] = math.exp(log_density[i]) if log_density[i] < 100.0 else math.inf
            missing[i] -= out[i]


@compiled(error_model="numpy")
def _masses(values: ndarray, low: ndarray, high: ndarray) -> None:
    """Log-densities at midpoints -> masses of the cells."""
    k, n = values.shape
    for j in range(k):
        for i in range(n):
            values[j, i] = math.exp(min(values[j, i], 100.0)) * ((high[i] - low[i]) / k)


@compiled(error_model="numpy")
def _exponential(place: ndarray, largest: float, out: ndarray) -> None:
    for i in range(place.shape[0]):
        out[i] = min(math.floor(math.exp(place[i])), largest)


@compiled(error_model="numpy")
def _integer_mode(
    places: ndarray,
    values: ndarray,
    largest: float,
    none: ndarray,
    centre: ndarray,
    width: ndarray,
) -> None:
    """The likeliest integer above 0, and the sd of a normal law that is as high there."""
    k, n = places.shape
    for i in range(n):
        most, at = -math.inf, 0.0
        for j in range(k):
            value = values[j, i] - places[j, i]
            if value > most:
                most, at = value, places[j, i]
        centre[i] = min(math.floor(math.exp(at)), largest)
        # below one half all integers that matter are next to it
        width[i] = 1.0
        if most > -300.0:
            width[i] = max(0.3989422804014327 * (1.0 - none[i]) * math.exp(-most), 0.5)


@compiled(error_model="numpy")
def _standardised(
    place: ndarray,
    centre: ndarray,
    width: ndarray,
    largest: float,
    outcome: ndarray,
    slope: ndarray,
) -> None:
    """The integer at asinh of a distance from the mode, and the log of its derivative."""
    for i in range(place.shape[0]):
        grown = math.exp(place[i])
        y = math.floor(centre[i] + width[i] * (0.5 * (grown - 1.0 / grown)))
        outcome[i] = min(max(y, 1.0), largest)
        slope[i] = -math.inf
        if outcome[i] == y:
            slope[i] = math.log(width[i] * (0.5 * (grown + 1.0 / grown)))


@compiled(error_model="numpy")
def _groups(
    low: ndarray, high: ndarray, centre: ndarray, width: ndarray, largest: float, ends: ndarray
) -> None:
    """The last integers of groups of which the first is {0}; the others begin at `low`.

    A group that is left over has the same end as the one before.
    """
    k, n = ends.shape
    for i in range(n):
        start = math.floor(centre[i] + width[i] * math.sinh(low[i]))
        stop = min(math.floor(centre[i] + width[i] * math.sinh(high[i])), largest)
        grown, growth = math.exp(low[i]), math.exp((high[i] - low[i]) / (k - 1.0))
        ends[0, i] = max(start, 1.0) - 1.0
        for j in range(1, k):
            grown *= growth
            end = math.floor(centre[i] + width[i] * (0.5 * (grown - 1.0 / grown)))
            ends[j, i] = min(max(end, ends[j - 1, i] + 1.0), stop)


@compiled(error_model="numpy")
def _middles(ends: ndarray, nodes: ndarray) -> None:
    # of two integers in the middle the first and the second in turn, or the mean would be too small
    k, n = ends.shape
    nodes[0] = 0.0
    for j in range(1, k):
        for i in range(n):
            nodes[j, i] = math.floor((ends[j - 1, i] + 1.0 + ends[j, i] + j % 2) / 2.0)


@compiled(error_model="numpy")
def _group_masses(values: ndarray, nodes: ndarray, ends: ndarray) -> None:
    """Log-probabilities of middles -> probabilities of groups, as if each fell geometrically."""
    k, n = values.shape
    for i in range(n):
        before = -math.inf
        for j in range(k):
            value = values[j, i]
            size = ends[j, i] - ends[j - 1, i] if j > 0 else 1.0
            mass = math.exp(value) if value < 1.0 and size > 0.0 else 0.0
            if size > 1.0:
                rate, gaps = 0.0, 0
                if j > 1 and math.fabs(before) < math.inf:
                    rate += (value - before) / (nodes[j, i] - nodes[j - 1, i])
                    gaps += 1
                if j + 1 < k and ends[j + 1, i] > ends[j, i] and values[j + 1, i] > -math.inf:
                    rate += (values[j + 1, i] - value) / (nodes[j + 1, i] - nodes[j, i])
                    gaps += 1
                rate /= max(gaps, 1)
                total = size
                if 1e-6 < math.fabs(rate) and math.fabs(rate) * size < 60.0:
                    first = math.exp(rate * (ends[j - 1, i] + 1.0 - nodes[j, i]))
                    total = first * math.expm1(rate * size) / math.expm1(rate)
                mass *= total
            before = value
            values[j, i] = mass


@compiled(error_model="numpy")
def _normalise(weights: ndarray, tolerance: float) -> None:
    """Divide by the sum of a row; all are 0 where it is far from one."""
    k, n = weights.shape
    total = np.zeros(n)
    for j in range(k):
        for i in range(n):
            total[i] += weights[j, i]
    for i in range(n):
        total[i] = 1.0 / total[i] if math.fabs(total[i] - 1.0) < tolerance else 0.0
    for j in range(k):
        for i in range(n):
            weights[j, i] = weights[j, i] * total[i] if total[i] > 0.0 else 0.0
