"""The longest score vector that a record within public bounds can have.

A record that sees the parameters through one linear predictor u, affine in theta, has the score
vector l'(u) du/dz.  The term l is concave, so the slope l' is largest in size at an end of the
range of u.  The range, the slopes at its ends and the direction du/dz are enclosed over all records
within the bounds by interval arithmetic (:mod:`pymc_dp.rows.intervals`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.utils import rewrite_graph

from pymc_dp.records.ancestry import ancestors_without_shapes, array_of
from pymc_dp.records.bounds import Interval
from pymc_dp.records.graph import RowGraph, RowLeaf
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import RowFunctions
from pymc_dp.rows.intervals import NoEnclosure, enclose, product
from pymc_dp.rows.predictor import Recognised, linear_predictor

# -- directions ------------------------------------------------------------------------------------


#: Columns whose corners (2 to this power) are looked at one by one, and numbers held for it.
_CORNERS, _NUMBERS = 14, 2**24


@dataclass(frozen=True, eq=False)
class Terms:
    """A part of a predictor u: sum of coefficients, within intervals, times values of parameters.

    Shapes: coefficients (m,), values (m,) or (groups * m,), rows (m, d) or (groups * m, d).  Values
    are at z = 0; in a group effect they are those of all groups, one of which the record chooses.
    `rows` are derivatives of the values by z.
    """

    coefficients: Interval
    values: np.ndarray
    rows: np.ndarray

    @classmethod
    def nothing(cls, d: int) -> Terms:
        """The empty sum, in d coordinates."""
        return cls((np.zeros(0), np.zeros(0)), np.zeros(0), np.zeros((0, d)))

    def and_also(self, other: Terms) -> Terms:
        """Both, where both are the same for all groups."""
        ends = zip(self.coefficients, other.coefficients, strict=True)
        lower, upper = (np.concatenate(pair) for pair in ends)
        return Terms(
            (lower, upper),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.rows, other.rows]),
        )

    @property
    def largest(self) -> np.ndarray:
        """(m,) sizes of the coefficients, at most."""
        return np.maximum(np.abs(self.coefficients[0]), np.abs(self.coefficients[1]))

    def value(self) -> tuple[float, float]:
        """Least and greatest value."""
        m = len(self.coefficients[0])
        if not m:
            return 0.0, 0.0
        values = self.values.reshape(-1, m)
        lower, upper = product(self.coefficients, (values, values))
        return float(lower.sum(axis=1).min()), float(upper.sum(axis=1).max())

    def length(self) -> float:
        """Largest norm of the derivative: at the corners if there are few, else a bound."""
        lower, upper = self.coefficients
        m, d = len(lower), self.rows.shape[1]
        if not m:
            return 0.0
        rows = self.rows.reshape(-1, m, d)
        if m == 1:
            return float(self.largest[0] * np.linalg.norm(self.rows, axis=1).max())
        centre = np.einsum("m,gmd->gd", (lower + upper) / 2.0, rows)
        radius = (upper - lower) / 2.0
        free = np.flatnonzero(radius)
        if len(free) <= _CORNERS and len(rows) * d * 2 ** len(free) <= _NUMBERS:
            signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(free))))
            corners = centre[:, None] + np.einsum(
                "sm,gmd->gsd", signs * radius[free], rows[:, free]
            )
            return float(np.linalg.norm(corners, axis=-1).max())
        arms = radius[:, None] * rows
        by_entry = np.linalg.norm(np.abs(centre) + np.abs(arms).sum(axis=1), axis=-1)
        by_arm = np.linalg.norm(centre, axis=-1) + np.linalg.norm(arms, axis=-1).sum(axis=-1)
        spectral = np.linalg.norm(centre, axis=-1) + math.sqrt(m) * np.linalg.norm(
            arms, 2, axis=(-2, -1)
        )
        return float(np.minimum(np.minimum(by_entry, by_arm), spectral).max())

    def overlap(self, other: Terms) -> float:
        """Largest size of the inner product of the derivatives of two parts."""
        m, k = len(self.largest), len(other.largest)
        gram = np.abs(self.rows @ other.rows.T).reshape(-1, m, other.rows.shape[0] // k, k)
        return float(np.einsum("m,gmhk,k->gh", self.largest, gram, other.largest).max())


def longest(fixed: Terms, grouped: list[Terms]) -> float:
    """Largest norm of the derivative of a sum of parts, at most.

    |a + b|^2 = |a|^2 + |b|^2 + 2 a . b, with each of the three at its largest.
    """
    parts = [terms for terms in (fixed, *grouped) if terms.rows.shape[0]]
    square = sum(terms.length() ** 2 for terms in parts)
    square += 2.0 * sum(a.overlap(b) for a, b in itertools.combinations(parts, 2))
    return math.sqrt(square)


# -- limits ----------------------------------------------------------------------------------------


#: Combinations of integer data that are looked at one by one.
_COMBINATIONS = 4096
#: For rounding errors in interval arithmetic and in scores: thousands of units in the last place of
#: double precision, and dozens of single precision.
_ROUNDING, _SINGLE_ROUNDING = 1e-12, 4e-6


def score_norm_limit(
    engine: RowEngine,
    coordinates: Coordinates,
    limits: Mapping[Variable, Interval],
    recognised: Recognised,
) -> tuple[float | None, str]:
    """An upper bound on the norm of the score vector at z = 0 of any record within `limits`.

    No value of a record is used.  The norm is taken in `coordinates`, whose location is z = 0.
    `limits` are public bounds of data, by their constant or shared variable: arrays that broadcast
    to one row (:func:`pymc_dp.records.bounds.known_limits`).  `recognised` is from
    :func:`pymc_dp.rows.predictor.recognise`.

    The bound is in units of z, and None if none follows.  With it comes one public sentence: what
    it follows from, or why there is none.

    *Guarantee.*  No record within the limits has a longer score vector at z = 0, if the model is of
    a family that :func:`pymc_dp.rows.predictor.recognise` knows.

    *Weaknesses.*  The largest slope and the longest direction may belong to different records, and
    beyond a few columns the length of the direction is bounded, not attained: for logistic
    regression the limit is mostly within a factor of 2 of the longest score.
    """
    predictor, reason = recognised
    if predictor is None:
        return None, reason
    functions = engine.groups[0].functions
    variable = linear_predictor(functions.graph)
    assert variable is not None
    try:
        limit = _limit(functions, variable, coordinates, limits)
    except NoEnclosure as error:
        return None, str(error)
    if not math.isfinite(limit):
        return None, "Within these bounds the slope of the log-likelihood overflows."
    single = any(leaf.block.type.dtype == "float32" for leaf in functions.graph.leaves)
    return limit * (
        1.0 + (_SINGLE_ROUNDING if single else _ROUNDING)
    ), f"{reason} Its data are bounded."


def _limit(
    functions: RowFunctions,
    variable: Variable,
    coordinates: Coordinates,
    limits: Mapping[Variable, Interval],
) -> float:
    graph = functions.graph
    etas = [cut.eta for cut in functions.ordered]
    weights = pytensor.grad(variable.sum(), etas, disconnected_inputs="ignore")
    designs = [cut.row_data for cut in functions.ordered if cut.kind == "dot"]
    outputs = _simplified([variable, *weights, *designs])
    given = {leaf.block: interval for leaf, interval in _one_row(graph, outputs, limits)}
    for cut in functions.ordered:
        tail = cut.phi.type.shape[cut.kind != "copy" :]
        zeros = np.zeros((1, *tail), cut.eta.type.dtype)
        given[cut.eta] = (zeros, zeros)
    offset, *found = [_flat(interval) for interval in enclose(outputs, given)]
    phis, jacobians = functions.shared(coordinates.location)
    fixed, grouped = Terms.nothing(len(coordinates.location)), []
    columns = iter(found[len(etas) :])
    for cut, weight, phi, jacobian in zip(functions.ordered, found, phis, jacobians, strict=False):
        assert jacobian is not None
        rows = jacobian @ coordinates.scaling
        values = np.asarray(phi, dtype="float64").ravel()
        if cut.kind == "index":
            grouped.append(Terms(weight, values, rows))
            continue
        if cut.kind == "dot":
            least, most = next(columns)
            weight = _flat(product((least[:, None], most[:, None]), weight))
        fixed = fixed.and_also(Terms(weight, values, rows))
    lower, upper = (float(end[0]) for end in offset)
    for terms in (fixed, *grouped):
        low, high = terms.value()
        lower, upper = lower + low, upper + high
    return _largest_slope(graph, variable, limits, (lower, upper)) * longest(fixed, grouped)


def _simplified(outputs: list[Variable]) -> list[Variable]:
    """The same values, each input as often as it is needed: intervals are wider otherwise."""
    clones = clone_replace(outputs, {})  # the graphs of the engine must not be rewritten in place
    return rewrite_graph(clones, include=("canonicalize", "stabilize"), clone=False)


# -- bounded data ---------------------------------------------------------------------------------


def _one_row(
    graph: RowGraph, outputs: list[Variable], limits: Mapping[Variable, Interval]
) -> list[tuple[RowLeaf, Interval]]:
    """The interval of one row of each leaf; zeros where only its shape matters."""
    used = ancestors_without_shapes(outputs)
    intervals = []
    for leaf in graph.leaves:
        shape = list(np.shape(array_of(leaf.source)))
        del shape[leaf.axis]
        dtype = np.dtype(leaf.block.type.dtype)
        interval = _of_type(dtype)
        if leaf.source in limits and leaf.axis == 0:
            given = limits[leaf.source]
            interval = np.maximum(interval[0], given[0]), np.minimum(interval[1], given[1])
        lower, upper = (np.broadcast_to(end, (1, *shape)) for end in interval)
        largest = np.maximum(np.abs(lower), np.abs(upper)).max(initial=0.0)
        if leaf.block not in used:
            lower = upper = np.zeros((1, *shape))
        elif not largest < (np.inf if dtype.kind == "f" else 2.0**53):
            name = f"`{leaf.source.name}`" if leaf.source.name else "an unnamed array"
            raise NoEnclosure(
                f"The score depends on {name} in the likelihood of {graph.quoted}, which has no "
                "public bounds on both sides (dp.bounds)."
            )
        first = np.ascontiguousarray(lower.astype(dtype))
        last = first if lower is upper else np.ascontiguousarray(upper.astype(dtype))
        intervals.append((leaf, (first, last)))
    return intervals


def _of_type(dtype: np.dtype) -> Interval:
    if dtype.kind == "b":
        return np.array(0.0), np.array(1.0)
    if dtype.kind == "f":
        return np.array(-np.inf), np.array(np.inf)
    info = np.iinfo(dtype)
    return np.array(float(info.min)), np.array(float(info.max))


def _flat(interval: Interval) -> Interval:
    return interval[0].astype("float64").ravel(), interval[1].astype("float64").ravel()


# -- slope ----------------------------------------------------------------------------------------


def _largest_slope(
    graph: RowGraph,
    variable: Variable,
    limits: Mapping[Variable, Interval],
    ends: tuple[float, float],
) -> float:
    """Largest |l'| for u between `ends` and data within `limits`."""
    u = pt.vector("u", dtype="float64")
    [loglik] = clone_replace([graph.loglik], {variable: u}, rebuild_strict=False)
    slope = pytensor.grad(loglik.sum(), u, disconnected_inputs="ignore")
    loglik, slope = _simplified([loglik, slope])
    rows = _one_row(graph, [slope], limits)
    count, integers = 1, []
    for leaf, (lower, upper) in rows:
        if leaf.block.type.dtype.startswith("float") or lower is upper:
            continue
        further = math.prod((upper.astype(float) - lower.astype(float) + 1.0).ravel())
        if count * further <= _COMBINATIONS:
            count *= further
            integers.append((leaf, lower, upper))
    given = _combinations(rows, integers)
    n = max([1, *[len(lower) for lower, _ in given.values()]])

    def at(point: float, output: Variable) -> Interval:
        known = np.full(n, point)
        return enclose([output], {**given, u: (known, known)})[0]

    bounds = np.array([np.abs(end) for point in ends for end in at(point, slope)])
    if not np.isfinite(bounds).all():
        # outside of its support a record is impossible wherever the parameters are, and counts as 0
        possible = np.isfinite(at(0.0, loglik)[0])
        bounds = np.where(np.broadcast_to(possible, bounds.shape), bounds, 0.0)
    return float(np.nan_to_num(bounds, nan=np.inf).max())


def _combinations(
    rows: list[tuple[RowLeaf, Interval]],
    integers: list[tuple[RowLeaf, np.ndarray, np.ndarray]],
) -> dict[Variable, Interval]:
    """One row for each combination of the values of `integers`, the others repeated as they are."""
    ranges = [
        range(int(low), int(high) + 1)
        for _, lower, upper in integers
        for low, high in zip(lower.ravel(), upper.ravel(), strict=True)
    ]
    combinations = list(itertools.product(*ranges))
    table = np.array(combinations, dtype=object).reshape(len(combinations), len(ranges))
    given = {}
    for leaf, (lower, upper) in rows:
        first, last = (np.repeat(end, len(table), axis=0) for end in (lower, upper))
        given[leaf.block] = (first, first if lower is upper else last)
    at = 0
    for leaf, lower, _ in integers:
        chosen = table[:, at : at + lower.size].astype(lower.dtype)
        known = np.ascontiguousarray(chosen.reshape(-1, *lower.shape[1:]))
        given[leaf.block] = (known, known)
        at += lower.size
    return given
