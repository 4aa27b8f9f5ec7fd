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
Look = Callable[[ndarray, ndarray], None]
"""Writes log-densities at (rows,) places into the second array."""
Densities = Callable[[slice | ndarray], LogDensity]
"""Some rows of a block -> their log-density."""

#: Nodes of an interval, or groups of integers, for each mode.
NODES = 28
#: Integers that are tried one by one first, and the probability above them that is ignored.
_FEW, _IGNORED = 16, 1e-6
#: Places at which a density is looked at first, and how often the cells about the best are halved.
_LOOKS, _ROUNDS = 9, 40
#: Until the log-densities at their ends are less than this below it.
_NEAR = 1.0
#: How far the first places reach: asinh of a real number, of the log of a positive one, log-odds.
_WIDEST = {"line": 24.0, "half": 5.0, "interval": 4.3}
#: Places whose log-densities are below the largest by more than this do not count for nodes.
_FAR = 13.0
#: Nor do some by their distance from the mode: asinh of standard deviations.  Where the end is
#: looked for first, and how often.
_TAIL, _START, _HALVINGS = 10.0, 3.0, 4
#: Log-density of a normal law of sd 1 at its mode.
_LOG_PEAK = -0.9189385332046727
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
        ends = [_column(end, data) for end in (outcome.lower, outcome.upper)]
        nodes, weights = _reals(ends[0], ends[1], density_of, size)
        for atom in outcome.atoms:
            place = _column(atom, data)
            mass = np.zeros(n)
            _add_mass(density_of(slice(0, n))(place), np.ones(n), 0.0, mass)
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


def _search(
    low: ndarray, high: ndarray, looking: Callable[[slice | ndarray], Look]
) -> tuple[ndarray, ndarray]:
    """Three places of each row, (3, rows), the second close to its mode, and log-densities."""
    n = len(low)
    first, found = np.empty((_LOOKS, n)), np.empty((_LOOKS, n))
    place, step, growth = np.empty(n), np.empty(n), np.empty(n)
    _progression(low, high, _LOOKS, 0.0, place, step, growth)
    look = looking(slice(0, n))
    for seen, value in zip(first, found, strict=True):
        seen[:] = place
        look(seen, value)
        place *= growth
    places, values = np.empty((3, n)), np.empty((3, n))
    _best(first, found, places, values)
    wide = np.empty(n, dtype=bool)
    for _ in range(_ROUNDS):
        _are_wide(values, _NEAR, wide)
        rows = np.flatnonzero(wide)
        if not rows.size:
            break
        look = looking(rows)
        ends, theirs = places[:, rows], values[:, rows]
        middles = np.sqrt(ends[:2] * ends[1:])
        found = np.empty_like(middles)
        for place, value in zip(middles, found, strict=True):
            look(place, value)
        _halve(middles, found, ends, theirs)
        places[:, rows], values[:, rows] = ends, theirs
    return places, values


def _ends(width: ndarray, look: Look) -> tuple[ndarray, ndarray]:
    """Where nodes begin and end."""
    found = []
    for side in (-1.0, 1.0):
        inside, outside = np.ones_like(width), np.full_like(width, math.exp(side * _TAIL))
        place, value = np.full_like(width, math.exp(side * _START)), np.empty_like(width)
        for _ in range(_HALVINGS):
            look(place, value)
            _move(value, width, _FAR, place, inside, outside)
        found.append(outside)
    return found[0], found[1]


def _reals(
    lower: ndarray, upper: ndarray, density_of: Densities, size: int
) -> tuple[ndarray, ndarray]:
    """Nodes and weights between two ends, which may be infinite."""
    n = len(lower)
    low, high = np.empty(n), np.empty(n)
    _widest(lower, upper, _WIDEST["line"], _WIDEST["half"], _WIDEST["interval"], low, high)
    centre, width, outcome, slope = np.zeros(n), np.ones(n), np.empty(n), np.empty(n)

    def looking(rows: slice | ndarray) -> Look:
        log_density = density_of(rows)
        own = [array[rows] for array in (centre, width, lower, upper, outcome, slope)]

        def look(place: ndarray, value: ndarray) -> None:
            _place(place, *own)
            _add_slope(log_density(own[4]), own[5], value)

        return look

    _mode(*_search(low, high, looking), centre, width)
    look = looking(slice(0, n))
    low, high = _ends(width, look)
    nodes, weights = np.empty((size, n)), np.empty((size, n))
    place, step, growth = np.empty(n), np.empty(n), np.empty(n)
    _progression(low, high, size, 0.5, place, step, growth)
    half = 0.5 * width * step
    for node, weight in zip(nodes, weights, strict=True):
        look(place, weight)
        node[:] = outcome
        _to_masses(place, half, weight)
        place *= growth
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
    groups, masses = _grouped(
        weights[0, others], largest, lambda some: density_of(others[some]), size
    )
    if len(others) == n:
        return groups, masses
    shape = (max(few, len(groups)), n)
    all_nodes, all_weights = np.zeros(shape), np.zeros(shape)
    all_nodes[:few], all_weights[:few] = nodes, weights
    all_nodes[:, others], all_weights[:, others] = 0.0, 0.0
    all_nodes[: len(groups), others], all_weights[: len(groups), others] = groups, masses
    return all_nodes, all_weights


def _grouped(
    none: ndarray, largest: float, density_of: Densities, size: int
) -> tuple[ndarray, ndarray]:
    """Nodes and weights of nonnegative integers: 0, of probability `none`, and groups of others."""
    n = len(none)
    centre, width, outcome = np.empty(n), np.empty(n), np.empty(n)

    def looking(rows: slice | ndarray) -> Look:
        log_density, own = density_of(rows), outcome[rows]

        def look(place: ndarray, value: ndarray) -> None:
            _to_integer(place, largest, own)
            value[:] = log_density(own)

        return look

    _integer_mode(*_search(np.ones(n), np.full(n, largest), looking), largest, none, centre, width)
    log_density = density_of(slice(0, n))

    def look(place: ndarray, value: ndarray) -> None:
        _standardised(place, centre, width, largest, outcome, value)
        _add_slope(log_density(outcome), value, value)

    low, high = _ends(width, look)
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
def _progression(
    low: ndarray,
    high: ndarray,
    size: int,
    margin: float,
    first: ndarray,
    step: ndarray,
    growth: ndarray,
) -> None:
    """The first of some places in a geometric progression, and their ratio and its log.

    They begin and end at the ends, or this part of a step away from them.
    """
    for i in range(low.shape[0]):
        step[i] = math.log(high[i] / low[i]) / (size - 1.0 + 2.0 * margin)
        growth[i] = math.exp(step[i])
        first[i] = low[i] * math.exp(margin * step[i])


@compiled(error_model="numpy")
def _best(first: ndarray, found: ndarray, places: ndarray, values: ndarray) -> None:
    """The place of the largest value, between its neighbours."""
    k, n = found.shape
    for i in range(n):
        at = 0
        for j in range(1, k):
            if found[j, i] > found[at, i]:
                at = j
        for side in range(3):
            j = min(max(at + side - 1, 0), k - 1)
            places[side, i], values[side, i] = first[j, i], found[j, i]


@compiled(error_model="numpy")
def _are_wide(values: ndarray, near: float, out: ndarray) -> None:
    """Whether the values at the ends are far below the one between; not if none is finite."""
    for i in range(out.shape[0]):
        out[i] = values[1, i] - min(values[0, i], values[2, i]) > near


@compiled(error_model="numpy")
def _halve(middles: ndarray, found: ndarray, places: ndarray, values: ndarray) -> None:
    """The best of the place between and the middles of the cells beside it, between neighbours."""
    for i in range(places.shape[1]):
        if found[0, i] > values[1, i] and found[0, i] >= found[1, i]:
            places[2, i], values[2, i] = places[1, i], values[1, i]
            places[1, i], values[1, i] = middles[0, i], found[0, i]
        elif found[1, i] > values[1, i]:
            places[0, i], values[0, i] = places[1, i], values[1, i]
            places[1, i], values[1, i] = middles[1, i], found[1, i]
        else:
            places[0, i], values[0, i] = middles[0, i], found[0, i]
            places[2, i], values[2, i] = middles[1, i], found[1, i]


@compiled(error_model="numpy")
def _move(
    value: ndarray,
    width: ndarray,
    far: float,
    place: ndarray,
    inside: ndarray,
    outside: ndarray,
) -> None:
    """Move one end of a cell to a place, and the place to its middle."""
    for i in range(value.shape[0]):
        by_place = value[i] + math.log(width[i] * 0.5 * (place[i] + 1.0 / place[i]))
        if by_place >= _LOG_PEAK - far:
            inside[i] = place[i]
        else:
            outside[i] = place[i]
        place[i] = math.sqrt(inside[i] * outside[i])


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
        low[i], high[i] = math.exp(-reach), math.exp(reach)


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
    """The outcome at a place, and the log of its derivative by a standardised real number.

    That is the outcome, its logarithm where it has one end, or its log-odds between two.
    """
    for i in range(place.shape[0]):
        v = centre[i] + width[i] * (0.5 * (place[i] - 1.0 / place[i]))
        from_below, from_above = lower[i] > -math.inf, upper[i] < math.inf
        if from_below and from_above:
            small = math.exp(-math.fabs(v))
            part = small / (1.0 + small)
            span = upper[i] - lower[i]
            outcome[i] = lower[i] + span * part if v < 0.0 else upper[i] - span * part
            slope[i] = math.log(span * part / (1.0 + small))
        elif from_below:
            outcome[i] = lower[i] + math.exp(v)
            slope[i] = v
        elif from_above:
            outcome[i] = upper[i] - math.exp(v)
            slope[i] = v
        else:
            outcome[i] = v
            slope[i] = 0.0


@compiled(error_model="numpy")
def _add_slope(log_density: ndarray, slope: ndarray, out: ndarray) -> None:
    """Their sum; minus infinity where it is not finite: at ends to which an outcome was rounded."""
    for i in range(out.shape[0]):
        value = log_density[i] + slope[i]
        out[i] = value if math.fabs(value) < math.inf else -math.inf


@compiled(error_model="numpy")
def _summit(x: ndarray, f: ndarray) -> tuple[float, float]:
    """Where a parabola through three points is highest, and how high; the second if it is not."""
    before, after = (f[1] - f[0]) / (x[1] - x[0]), (f[2] - f[1]) / (x[2] - x[1])
    slope = (before * (x[2] - x[1]) + after * (x[1] - x[0])) / (x[2] - x[0])
    bend = 2.0 * (after - before) / (x[2] - x[0])
    rise = -0.5 * slope * slope / bend
    if bend < 0.0 and rise < math.inf:
        return x[1] - slope / bend, f[1] + rise
    return x[1], f[1]


@compiled(error_model="numpy")
def _mode(places: ndarray, values: ndarray, centre: ndarray, width: ndarray) -> None:
    """Where the density is largest, and the sd of a normal that is as high."""
    x, f = np.empty(3), np.empty(3)
    for i in range(places.shape[1]):
        for side in range(3):
            x[side] = 0.5 * (places[side, i] - 1.0 / places[side, i])
            f[side] = values[side, i]
        at, largest = _summit(x, f)
        if math.fabs(largest) < 300.0:
            centre[i], width[i] = at, math.exp(_LOG_PEAK - largest)
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
def _to_masses(place: ndarray, half: ndarray, value: ndarray) -> None:
    """Log-densities -> masses of the cells about places, given half their width at the mode."""
    for i in range(value.shape[0]):
        value[i] = math.exp(min(value[i], 300.0)) * (half[i] * (place[i] + 1.0 / place[i]))


@compiled(error_model="numpy")
def _to_integer(place: ndarray, largest: float, out: ndarray) -> None:
    for i in range(place.shape[0]):
        out[i] = min(math.floor(place[i]), largest)


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
    x, f = np.empty(3), np.empty(3)
    for i in range(places.shape[1]):
        for side in range(3):
            x[side], f[side] = min(math.floor(places[side, i]), largest), values[side, i]
        at, largest_value = _summit(x, f)
        centre[i] = math.floor(at)
        # below one half all integers that matter are next to it
        width[i] = 1.0
        if largest_value > -300.0:
            width[i] = max((1.0 - none[i]) * math.exp(_LOG_PEAK - largest_value), 0.5)


@compiled(error_model="numpy")
def _standardised(
    place: ndarray,
    centre: ndarray,
    width: ndarray,
    largest: float,
    outcome: ndarray,
    value: ndarray,
) -> None:
    """The integer at a place, and 0; minus infinity where there is none."""
    for i in range(place.shape[0]):
        y = math.floor(centre[i] + width[i] * (0.5 * (place[i] - 1.0 / place[i])))
        outcome[i] = min(max(y, 1.0), largest)
        value[i] = 0.0 if outcome[i] == y else -math.inf


@compiled(error_model="numpy")
def _groups(
    low: ndarray, high: ndarray, centre: ndarray, width: ndarray, largest: float, ends: ndarray
) -> None:
    """The last integers of groups of which the first is {0}; the others begin at `low`.

    A group that is left over has the same end as the one before.
    """
    k, n = ends.shape
    for i in range(n):
        start = math.floor(centre[i] + width[i] * (0.5 * (low[i] - 1.0 / low[i])))
        stop = math.floor(centre[i] + width[i] * (0.5 * (high[i] - 1.0 / high[i])))
        stop = min(stop, largest)
        place, growth = low[i], math.exp(math.log(high[i] / low[i]) / (k - 1.0))
        ends[0, i] = max(start, 1.0) - 1.0
        for j in range(1, k):
            place *= growth
            end = math.floor(centre[i] + width[i] * (0.5 * (place - 1.0 / place)))
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
