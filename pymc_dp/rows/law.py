"""The law of the outcome of each record, by quadrature with the model's own density.

Nodes and weights are a function of the record, the parameters and constants: no random numbers,
nothing of other records.  A search narrows an interval that holds nearly all of the support down to
where the density is.  Nodes are spread over it such that tails of any power are reached, and
shifted by a hash of the record, or errors of records with the same covariates would add up.  Places
with a probability of their own come first.  A law whose weights do not add up to one is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.records.graph import Column, Outcome

LogDensity = Callable[[ndarray], ndarray]
"""(rows,) outcomes -> (rows,) log-densities, or log-probabilities."""
Look = Callable[[ndarray, ndarray], None]
"""Writes log-densities at (rows,) places into the second array."""
Densities = Callable[[slice | ndarray], LogDensity]
"""Some rows of a block -> their log-density."""
Shifts = Callable[[slice | ndarray], ndarray]
"""Some rows of a block -> the shifts of their nodes, in parts of their distance, from 0 to 1."""

_NODES, _INTEGERS = 20, 26  # nodes of an interval, and integers where they are many, for each mode
_FEW, _IGNORED = 16, 1e-6  # integers tried one by one first, and the probability above left out
_LOOKS, _ROUNDS = 9, 40  # first places of a search, and halvings of the cells about the best
_NEAR = 1.0  # halving ends once the ends are less than this log-density below the best
#: How far the first places reach: asinh of a real number, of the log of a positive one, log-odds.
_WIDEST = (24.0, 5.0, 4.3)
_FAR = 13.0  # places of a log-density this far below the largest do not count for nodes
#: Nor do some by their distance from the mode: asinh of standard deviations.  Where the end is
#: looked for first, and how often: nodes of counts are fewer than integers, and need it.
_TAIL, _START, _HALVINGS, _HALVINGS_OF_COUNTS = 10.0, 3.0, 3, 4
_LOG_PEAK = -0.9189385332046727  # log-density of a normal law of sd 1 at its mode
_TOLERANCE, _LOST = 0.02, 1e-5  # how far from one weights of spread nodes, and of all, may sum up


@dataclass(frozen=True, eq=False)
class Law:
    """Nodes and weights, (k, rows); weights add up to one, or are all 0 where no law was found."""

    nodes: ndarray
    weights: ndarray


@np.errstate(all="ignore")
def law_of(outcome: Outcome, data: list[ndarray], shifts_of: Shifts, density_of: Densities) -> Law:
    """The laws of the outcomes of a block of rows, whose leaves are `data`."""
    size = _spread(outcome)
    lower, upper = (_column(end, data) for end in (outcome.lower, outcome.upper))
    atoms = [_column(atom, data) for atom in outcome.atoms]
    if outcome.discrete:
        counts = _Counts.of(lower, upper, atoms)
        nodes, weights = _integers(counts, _largest(outcome), shifts_of, density_of, size)
        for atom in atoms:
            weights[:, np.isfinite(atom) & (atom != np.floor(atom))] = 0.0
    else:
        n = len(lower)
        everywhere = slice(0, n)
        shifts, log_density = shifts_of(everywhere), density_of(everywhere)
        masses = _masses(log_density, atoms, n)
        rest = 1.0 - masses.sum(axis=0)
        nodes, weights = _reals(lower, upper, shifts, _of_rest(density_of, rest), size)
        _normalise(weights, _TOLERANCE)
        if atoms:
            nodes, weights = np.vstack([nodes, *atoms]), np.vstack([weights * rest, masses])
    _normalise(weights, _LOST)
    return Law(nodes, weights)


def _masses(log_density: LogDensity, places: Sequence[ndarray], rows: int) -> ndarray:
    """(places, rows) probabilities of places of each row."""
    masses = np.empty((len(places), rows))
    for place, mass in zip(places, masses, strict=True):
        _add_mass(log_density(place), np.ones(rows), -math.inf, mass)
    return masses


def _of_rest(density_of: Densities, rest: ndarray) -> Densities:
    """The law of what does not stand alone, given its probability."""
    if np.all(rest == 1.0):
        return density_of

    def of_rows(rows: slice | ndarray) -> LogDensity:
        log_density, log_rest = density_of(rows), np.log(np.maximum(rest[rows], 0.0))
        return lambda outcome: log_density(outcome) - log_rest

    return of_rows


def most_nodes(outcome: Outcome) -> int:
    """The most nodes of a row, with both ends of censoring: PyMC 6 may drop unused ones."""
    nodes = _spread(outcome) + max(len(outcome.atoms), 2)
    if not outcome.discrete:
        return nodes
    return 1 + int(_largest(outcome)) if _largest(outcome) < _FEW else 1 + nodes


def _spread(outcome: Outcome) -> int:
    """How many nodes are spread over what does not stand alone."""
    return outcome.modes * (_INTEGERS if outcome.discrete else _NODES)


def _largest(outcome: Outcome) -> float:
    """The largest integer that any row may have."""
    return outcome.upper.most if isinstance(outcome.upper, Column) else outcome.upper


@dataclass(frozen=True, eq=False)
class _Counts:
    """Nonnegative integers that rows could observe.

    `alone`, (k, rows), are 0 and ends of censored counts, whose probabilities are unlike those
    beside them; -1 without such an end.  The others, if any, go from `least` to `most`, (rows,).
    """

    alone: ndarray
    least: ndarray
    most: ndarray

    @classmethod
    def of(cls, lower: ndarray, upper: ndarray, atoms: list[ndarray]) -> _Counts:
        """Those between two ends, which may be anything in private data."""
        alone = np.array([np.zeros_like(lower), *atoms])
        alone[1:][~((alone[1:] >= 1.0) & (alone[1:] <= upper))] = -1.0
        most = np.fmax(upper, 0.0)
        return cls(alone, np.fmax(lower, 0.0) + 1.0, most - (alone[1:] == most).any(axis=0))

    def of_rows(self, rows: ndarray) -> _Counts:
        """Those of some rows."""
        return _Counts(self.alone[:, rows], self.least[rows], self.most[rows])


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
    place, _, growth = _progression(low, high, _LOOKS - 1.0, np.zeros(n))
    look = looking(slice(0, n))
    for seen, value in zip(first, found, strict=True):
        seen[:] = place
        look(seen, value)
        place *= growth
    best = found.argmax(axis=0) + np.array([[-1], [0], [1]])  # between its neighbours
    np.clip(best, 0, _LOOKS - 1, out=best)
    places, values = (np.take_along_axis(array, best, axis=0) for array in (first, found))
    for _ in range(_ROUNDS):
        wide = values[1] - np.minimum(values[0], values[2]) > _NEAR  # not if none is finite
        if not wide.any():
            break
        rows = slice(0, n) if wide.all() else np.flatnonzero(wide)
        look = looking(rows)
        ends, theirs = places[:, rows], values[:, rows]
        middles = np.sqrt(ends[:2] * ends[1:])
        found = np.empty_like(middles)
        for place, value in zip(middles, found, strict=True):
            look(place, value)
        _halve(middles, found, ends, theirs)
        places[:, rows], values[:, rows] = ends, theirs
    return places, values


def _set(value: ndarray, log_density: ndarray) -> None:
    """Minus infinity where it is not finite, at ends to which an outcome was rounded."""
    value[:] = np.where(np.isfinite(log_density), log_density, -math.inf)


def _ends(width: ndarray, look: Look, halvings: int) -> tuple[ndarray, ndarray]:
    """Where nodes begin and end."""
    found = []
    for side in (-1.0, 1.0):
        inside, outside = np.ones_like(width), np.full_like(width, math.exp(side * _TAIL))
        place, value = np.full_like(width, math.exp(side * _START)), np.empty_like(width)
        for _ in range(halvings):
            look(place, value)
            _move(value, width, place, inside, outside)
        found.append(outside)
    return found[0], found[1]


def _reals(
    lower: ndarray, upper: ndarray, shifts: ndarray, density_of: Densities, size: int
) -> tuple[ndarray, ndarray]:
    """Nodes and weights between two ends, which may be infinite."""
    n = len(lower)
    ends = (lower > -math.inf).astype(int) + (upper < math.inf)
    low, high = (np.array([math.exp(side * x) for x in _WIDEST])[ends] for side in (-1.0, 1.0))
    centre, width, outcome, slope = np.zeros(n), np.ones(n), np.empty(n), np.empty(n)

    def looking(rows: slice | ndarray) -> Look:
        log_density = density_of(rows)
        own = [array[rows] for array in (centre, width, lower, upper, outcome, slope)]

        def look(place: ndarray, value: ndarray) -> None:
            _place(place, *own)
            _set(value, log_density(own[4]) + own[5])

        return look

    places, values = _search(low, high, looking)
    _mode(0.5 * (places - 1.0 / places), values, centre, width)
    look = looking(slice(0, n))
    low, high = _ends(width, look, _HALVINGS)
    nodes, weights = np.empty((size, n)), np.empty((size, n))
    place, step, growth = _progression(low, high, size, shifts)
    half = 0.5 * width * step
    for node, weight in zip(nodes, weights, strict=True):
        look(place, weight)
        node[:] = outcome
        _to_masses(place, half, weight)
        place *= growth
    return nodes, weights


def _integers(
    counts: _Counts, largest: float, shifts_of: Shifts, density_of: Densities, size: int
) -> tuple[ndarray, ndarray]:
    """Nodes and weights of nonnegative integers: all of them where these are few."""
    n, few = len(counts.least), int(min(largest + 1.0, _FEW))
    nodes, weights, missing = np.zeros((few, n)), np.zeros((few, n)), np.ones(n)
    log_density = density_of(slice(0, n))
    # one or two outcomes of little probability may be all that a row tells
    needed = 2 if largest >= _FEW else few
    for k, weight in enumerate(weights):
        nodes[k] = k
        _add_mass(log_density(nodes[k]), missing, _IGNORED if k >= needed else -math.inf, weight)
        if k + 1 >= needed and not np.any(missing > _IGNORED):
            return nodes[: k + 1], weights[: k + 1]
    others = np.flatnonzero(missing > _IGNORED)
    if largest < _FEW or not others.size:
        return nodes, weights
    some, masses = _thinned(
        counts.of_rows(others), shifts_of(others), lambda rows: density_of(others[rows]), size
    )
    if len(others) == n:
        return some, masses
    shape = (max(few, len(some)), n)
    all_nodes, all_weights = np.zeros(shape), np.zeros(shape)
    all_nodes[:few], all_weights[:few] = nodes, weights
    all_nodes[:, others], all_weights[:, others] = 0.0, 0.0
    all_nodes[: len(some), others], all_weights[: len(some), others] = some, masses
    return all_nodes, all_weights


def _thinned(
    counts: _Counts, shifts: ndarray, density_of: Densities, size: int
) -> tuple[ndarray, ndarray]:
    """Nodes and weights of nonnegative integers: those that stand alone, and some of the others."""
    n = len(counts.least)
    centre, width, outcome = np.empty(n), np.empty(n), np.empty(n)
    alone, log_density = np.maximum(counts.alone, 0.0), density_of(slice(0, n))
    masses = _masses(log_density, list(alone), n)
    masses[counts.alone < 0.0] = 0.0
    rest = 1.0 - masses.sum(axis=0)
    density_of = _of_rest(density_of, rest)
    log_density = density_of(slice(0, n))

    def looking(rows: slice | ndarray) -> Look:
        log_density, most, own = density_of(rows), counts.most[rows], outcome[rows]

        def look(place: ndarray, value: ndarray) -> None:
            np.minimum(np.floor(place), most, out=own)
            _set(value, log_density(own))

        return look

    places, values = _search(counts.least, np.maximum(counts.least, counts.most), looking)
    _mode(np.minimum(np.floor(places), counts.most), values, centre, width)
    # below one half all integers that matter are next to the likeliest
    centre, width = np.floor(centre), np.maximum(width, 0.5)

    def look(place: ndarray, value: ndarray) -> None:
        y = np.floor(centre + width * (0.5 * (place - 1.0 / place)))
        outcome[:] = np.minimum(np.maximum(y, counts.least), counts.most)
        _set(value, np.where(outcome == y, log_density(outcome), -math.inf))

    low, high = _ends(width, look, _HALVINGS_OF_COUNTS)
    nodes, weights = np.empty((size, n)), np.empty((size, n))
    _choose(low, high, shifts, centre, width, counts.least, counts.most, nodes)
    for node, weight in zip(nodes, weights, strict=True):
        weight[:] = log_density(node)
    _to_probabilities(nodes, counts.least > counts.most, weights)
    _normalise(weights, _TOLERANCE)
    weights *= rest
    return np.vstack([alone[:1], nodes, alone[1:]]), np.vstack([masses[:1], weights, masses[1:]])


# -- loops over rows ------------------------------------------------------------------------------


@compiled(error_model="numpy")
def _progression(
    low: ndarray, high: ndarray, steps: float, shifts: ndarray
) -> tuple[ndarray, ndarray, ndarray]:
    """Geometric progressions of places: first place, `shifts` steps in; log ratio; ratio."""
    first, step, growth = np.empty_like(low), np.empty_like(low), np.empty_like(low)
    for i in range(low.shape[0]):
        step[i] = math.log(high[i] / low[i]) / steps
        growth[i] = math.exp(step[i])
        first[i] = low[i] * math.exp(shifts[i] * step[i])
    return first, step, growth


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
    value: ndarray, width: ndarray, place: ndarray, inside: ndarray, outside: ndarray
) -> None:
    """Move one end of a cell to a place, and the place to its middle."""
    for i in range(value.shape[0]):
        by_place = value[i] + math.log(width[i] * 0.5 * (place[i] + 1.0 / place[i]))
        if by_place >= _LOG_PEAK - _FAR:
            inside[i] = place[i]
        else:
            outside[i] = place[i]
        place[i] = math.sqrt(inside[i] * outside[i])


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
    """The outcome at a place, and its log-derivative by a real number: itself, log or log-odds."""
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
    """Where the density is largest, and the sd of a normal that is as high; or 0 and 1."""
    for i in range(places.shape[1]):
        at, largest = _summit(places[:, i], values[:, i])
        centre[i], width[i] = 0.0, 1.0
        if math.fabs(largest) < 300.0:
            centre[i], width[i] = at, math.exp(_LOG_PEAK - largest)


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
def _choose(
    low: ndarray,
    high: ndarray,
    shifts: ndarray,
    centre: ndarray,
    width: ndarray,
    least: ndarray,
    most: ndarray,
    nodes: ndarray,
) -> None:
    """Integers between two ends, the second `shifts` steps on; surplus ones repeat the last."""
    k, n = nodes.shape
    for i in range(n):
        start = math.floor(centre[i] + width[i] * (0.5 * (low[i] - 1.0 / low[i])))
        stop = math.floor(centre[i] + width[i] * (0.5 * (high[i] - 1.0 / high[i])))
        stop = min(stop, most[i])
        step = math.log(high[i] / low[i]) / (k - 2.0)
        place, growth = low[i] * math.exp(shifts[i] * step), math.exp(step)
        nodes[0, i], nodes[k - 1, i] = min(max(start, least[i]), stop), stop
        for j in range(1, k - 1):
            y = math.floor(centre[i] + width[i] * (0.5 * (place - 1.0 / place)))
            nodes[j, i] = min(max(y, nodes[j - 1, i] + 1.0), stop)
            place *= growth


@compiled(error_model="numpy")
def _between(first: float, second: float, gap: float, bend: float) -> tuple[float, float]:
    """Probabilities between two integers (log-parabola), divided as linear interpolation does."""
    rate = math.fabs(second - first) / gap
    larger = math.exp(max(first, second) - min(max(bend * gap * (gap + 1.0) / 12.0, -0.5), 0.5))
    if rate * gap < 1e-3:
        all_of_it = larger * (gap - 1.0) * math.exp(-0.5 * rate * gap)
        farther = 0.5 * all_of_it
    else:
        r, q = math.exp(-rate), -math.expm1(-rate)
        last = math.exp(-rate * (gap - 1.0))
        all_of_it = larger * r * -math.expm1(-rate * (gap - 1.0)) / q
        farther = larger * r * (1.0 - last * (1.0 + (gap - 1.0) * q)) / (q * q * gap)
    nearer = all_of_it - farther
    return (nearer, farther) if first >= second else (farther, nearer)


@compiled(error_model="numpy")
def _to_probabilities(nodes: ndarray, nothing: ndarray, values: ndarray) -> None:
    """Log-probabilities -> weights that sum functions linear between nodes; 0 if `nothing`."""
    k, n = values.shape
    slope, gap, weight = np.zeros(k - 1), np.zeros(k - 1), np.zeros(k)
    for i in range(n):
        for j in range(k - 1):
            gap[j] = nodes[j + 1, i] - nodes[j, i]
            slope[j] = (values[j + 1, i] - values[j, i]) / gap[j] if gap[j] > 0.0 else math.nan
        for j in range(k):
            is_there = not nothing[i] and (j == 0 or gap[j - 1] > 0.0)
            weight[j] = math.exp(values[j, i]) if is_there and values[j, i] < 1.0 else 0.0
        for j in range(k - 1):
            if not nothing[i] and gap[j] > 1.0 and math.fabs(slope[j]) < math.inf:
                bend, sides = 0.0, 0
                for before in (j - 1, j):
                    if before >= 0 and before < k - 2:
                        by = 2.0 * (slope[before + 1] - slope[before])
                        by /= gap[before + 1] + gap[before]
                        if math.fabs(by) < math.inf:
                            bend += by
                            sides += 1
                bend /= max(sides, 1)
                left, right = _between(values[j, i], values[j + 1, i], gap[j], bend)
                weight[j] += left
                weight[j + 1] += right
        values[:, i] = weight


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
