"""Statistics of records less what a model expects of them: what one unit adds to a check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt
from numpy import ndarray
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from pymc_dp.base.checks import check_number
from pymc_dp.base.matrices import Coordinates
from pymc_dp.rows.contributions import AtPoint, RowsWithLaw, rows_with_laws
from pymc_dp.rows.engine import Blocks, RowEngine
from pymc_dp.rows.functions import compile_function

#: Standardised residuals are clamped to this many standard deviations.
CLAMP = 3.0
#: Parts of an entry of the release, where |s - e| is at most 1: covariances, longest derivative of
#: an expectation, and 1 for each row whose law is known.
COVARIANCE, LONGEST, COUNT = 0.5, 0.5, 0.25
NAMED = ("mean", "dispersion", "zeros")

Of = Callable[[ndarray, ndarray, ndarray], ndarray]


@dataclass(frozen=True, eq=False)
class Statistic:
    """A bounded number s of each row: `of` (outcomes, means, standard deviations), all (rows,).

    `scale` is a public bound on |s - e|, with e the expectation of s.
    """

    name: str
    of: Of
    scale: float


def named(name: str) -> Statistic:
    """One of `NAMED`."""
    if name == "mean":  # |e| <= 1, as the mean of |u| is at most 1
        return Statistic(name, lambda y, m, sd: np.clip((y - m) / sd, -CLAMP, CLAMP), CLAMP + 1.0)
    if name == "dispersion":
        limit = CLAMP**2
        return Statistic(name, lambda y, m, sd: np.minimum(((y - m) / sd) ** 2, limit), limit)
    return Statistic(name, lambda y, m, sd: np.asarray(y == 0.0, dtype="float64"), 1.0)


def below(q: float) -> Statistic:
    """Whether an outcome is at most q."""
    return Statistic(f"<= {q:g}", lambda y, m, sd: np.asarray(y <= q, dtype="float64"), 1.0)


def function(name: str, given: Callable[[Variable], Any], bounds: tuple[float, float]) -> Statistic:
    """A function of the outcome, of elementwise operations alone, clamped to `bounds`."""
    low, high = bounds
    y = pt.dvector("y")
    how = (
        f"statistic {name!r} must return a tensor from one, of elementwise operations and single "
        "numbers alone, as lambda y: pt.log1p(y): that is how each record is seen to be by itself."
    )
    try:
        found = pt.as_tensor_variable(given(y))
    except Exception as error:
        raise ValueError(how) from error
    behind = set(ancestors([found]))
    single = all(
        v is y
        or (isinstance(v, Constant) and np.size(v.data) == 1)
        or (v.owner is not None and isinstance(v.owner.op, Elemwise | DimShuffle))
        for v in behind
    )
    if y not in behind or found.type.ndim != 1 or not single:
        raise ValueError(how)
    evaluate = compile_function([y], pt.clip(found.astype("float64"), low, high))

    def of(outcome: ndarray, mean: ndarray, sd: ndarray) -> ndarray:
        values = np.asarray(evaluate(np.ascontiguousarray(outcome)))
        return np.where(np.isfinite(values), values, low)

    return Statistic(name, of, high - low)


def checked_bounds(name: str, pair: Any) -> tuple[float, float]:
    """Two finite numbers, the first below the second."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            f"bounds of statistic {name!r} must be (lower, upper), public limits to which it is "
            f"clamped, as bounds={{{name!r}: (0.0, 1.0)}}."
        )
    low, high = (check_number(f"bounds[{name!r}]", end) for end in pair)
    if not low < high:
        raise ValueError(f"bounds[{name!r}] must be (lower, upper) with lower < upper.")
    return low, high


@dataclass(frozen=True, eq=False)
class Discrepancies(AtPoint):
    """Of each unit, by group: s - e, covariances of s, derivatives of e by z, number of rows.

    Rows of the observed variable `observed`, with outcomes y of the law at z = 0, in `groups`
    groups that the integers of the leaf `by` tell.  All are divided by the scales of `statistics`,
    derivatives multiplied by `weight` and cut off at the norm `LONGEST`.  A unit of several rows
    has their average: it cannot be longer than one row.  A row whose law is not found adds 0.
    Expectations are averages over the laws at `points`, if any; residuals are those at z = 0.
    """

    observed: str
    statistics: tuple[Statistic, ...]
    weight: float
    by: int | None = None
    groups: int = 1
    points: tuple[Coordinates, ...] = ()
    over_outcomes = True

    @property
    def entries(self) -> int:
        """Entries of a group."""
        t = len(self.statistics)
        return t + t * (t + 1) // 2 + t * len(self.coordinates.location) + 1

    @property
    def size(self) -> int:
        """Entries per unit."""
        return self.groups * self.entries

    @property
    def norm(self) -> float:
        """The largest l2 norm of a unit's entries: a variance of numbers 1 apart is 1/4 at most."""
        t = len(self.statistics)
        pairs = t * (t + 1) // 2
        return math.sqrt(t * (1 + LONGEST**2) + pairs * (COVARIANCE / 4) ** 2 + COUNT**2)

    def _values(self, engine: RowEngine) -> Blocks:
        [g] = [
            k
            for k, group in enumerate(engine.groups)
            if group.functions.graph.names == (self.observed,)
        ]
        units = engine.groups[g].units
        for where, values in engine.by_unit(self.size, lambda k: self._of_rows(engine, k, g)):
            if units is not None:
                rows = np.bincount(units, minlength=engine.n_units)[where]
                values /= np.maximum(rows, 1)
            yield where, values

    def _of_rows(self, engine: RowEngine, k: int, g: int) -> Blocks:
        if k != g:
            return
        engines = [engine.with_coordinates(at) for at in (self.coordinates, *self.points)]
        for blocks in zip(*(rows_with_laws(each, k) for each in engines), strict=True):
            where, rows = blocks[0]
            values = np.zeros((self.groups, self.entries, where.stop - where.start))
            found = self._of(rows, [there for _, there in blocks[1:]])
            if self.by is None:
                values[0] = found
            else:
                labels = rows.data[self.by]
                for label, own in enumerate(values):
                    own[:, labels == label] = found[:, labels == label]
            yield where, values.reshape(self.size, -1)

    def _of(self, rows: RowsWithLaw, elsewhere: list[RowsWithLaw]) -> ndarray:
        """(entries, rows) numbers of rows at z = 0, and of the same ones at the points."""
        t, d = len(self.statistics), len(self.coordinates.location)
        weights, nodes = rows.law.weights, rows.law.nodes
        mean = _expected(weights, nodes)
        sd = np.sqrt(_expected(weights, (nodes - mean) ** 2))
        sd = np.where(sd > 0.0, sd, 1.0)
        found, laws = np.zeros((self.entries, len(mean))), np.zeros(len(mean))
        for there in elsewhere or [rows]:
            known = _known(there)
            found += np.where(known, self._expectations(there, mean, sd), 0.0)
            laws += known
        found /= np.maximum(laws, 1.0)
        observed = np.asarray(rows.data[rows.outcome.leaf], dtype="float64")
        for k, statistic in enumerate(self.statistics):
            own = statistic.of(observed, mean, sd) / statistic.scale
            found[k] = np.clip(own - found[k], -1.0, 1.0)
        for k in range(self.entries - 1 - t * d, self.entries - 1, d):
            slope = found[k : k + d]
            slope *= self.weight
            squares = np.zeros(len(mean))
            for entry in slope:
                squares += entry * entry
            slope *= LONGEST / np.maximum(np.sqrt(squares), LONGEST)
        found[-1] = COUNT
        found[:, ~(_known(rows) & (laws > 0.0))] = 0.0
        return found

    def _expectations(self, rows: RowsWithLaw, mean: ndarray, sd: ndarray) -> ndarray:
        """(entries, rows) expectations of s, covariances, derivatives, and a 0.

        Sums over nodes go one by one, in one order.
        """
        nodes, weights, scores = rows.law.nodes, rows.law.weights, rows.of_outcomes()
        t, d = len(self.statistics), len(self.coordinates.location)
        found, centred = np.zeros((self.entries, len(mean))), []
        for k, statistic in enumerate(self.statistics):
            values = np.array([statistic.of(node, mean, sd) for node in nodes]) / statistic.scale
            found[k] = _expected(weights, values)
            centred.append(values - found[k])
        pairs = [(i, j) for i in range(t) for j in range(i, t)]
        for place, (i, j) in enumerate(pairs, t):
            covariance = _expected(weights, centred[i] * centred[j])
            found[place] = COVARIANCE * np.clip(covariance, -0.25, 0.25)
        for i, first in enumerate(range(t + len(pairs), self.entries - 1, d)):
            slope = found[first : first + d]
            for a, direction in enumerate(rows.directions):
                slope += _expected(weights, centred[i] * scores[:, a]) * direction
        return found

    def read(self, value: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        """Of a sum over units: s - e (groups, t), covariances, derivatives by z, numbers of rows.

        Still divided by scales; covariances (groups, t, t), derivatives (groups, t, d).
        """
        t, d = len(self.statistics), len(self.coordinates.location)
        pairs = t * (t + 1) // 2
        parts = np.split(value.reshape(self.groups, self.entries), [t, t + pairs, -1], axis=1)
        covariances = np.zeros((self.groups, t, t))
        upper = np.triu_indices(t)
        covariances[:, upper[0], upper[1]] = covariances[:, upper[1], upper[0]] = parts[1]
        slopes = parts[2].reshape(self.groups, t, d) / self.weight
        return parts[0], covariances / COVARIANCE, slopes, parts[3][:, 0] / COUNT


def _known(rows: RowsWithLaw) -> ndarray:
    """(rows,) whether the law of a row was found."""
    return np.logical_or.reduce(rows.law.weights != 0.0, axis=0)


def _expected(weights: ndarray, values: ndarray) -> ndarray:
    """(rows,) sums over nodes, one after the other."""
    found = np.zeros(weights.shape[1])
    for weight, value in zip(weights, values, strict=True):
        found += np.where(weight > 0.0, weight * value, 0.0)
    return found
