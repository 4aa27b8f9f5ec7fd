"""A likelihood as a graph: its parameters, and where they enter the rows.

A likelihood that factorises over records has *row* graphs, whose value at row ``i`` uses only row
``i`` of the data, and *shared* graphs, which use only parameters and public constants.  A shared
value enters the rows through one of three doors, and a :class:`Cut` is made at each:

``dot``    ``eta_i = x_i @ phi`` with row data ``x``: a linear predictor,
``index``  ``eta_i = phi[g_i]`` with an integer column ``g``: a group effect,
``copy``   ``eta_i = phi``: the same value for every row (a scale, an intercept, cut points).

A row's log-likelihood is a function of its ``eta`` alone, so the gradient of the *sum* over rows
gives all ``s_i = d l_i / d eta_i`` at once ("ghost" gradients: Goodfellow 2015, arXiv:1510.01799;
Li et al. 2022, arXiv:2110.05679).  Record ``i`` has ``sum over cuts of (d eta_i / d theta)' s_i``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import pairwise
from operator import add
from typing import Literal

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from pymc_dp.records.ancestry import array_of


@dataclass(frozen=True, eq=False)
class RowLeaf:
    """A private array `source` with rows on `axis`; the input `block`, rows first, holds some."""

    source: Variable
    axis: int
    block: Variable

    @property
    def entries(self) -> tuple[int, ...]:
        """The shape of what it holds of one row."""
        shape = np.shape(array_of(self.source))
        return shape[: self.axis] + shape[self.axis + 1 :]


@dataclass(frozen=True, eq=False)
class Cut:
    """One place where shared values enter the rows.

    The shared value `phi` is (p,) or (p, k) for "dot", (K, ...) for "index", any for "copy"; the
    row input `eta` is (rows,) or (rows, k) for "dot", else (rows, ...).  `row_data` are the design
    (rows, p) of a "dot", the integer labels (rows,) of an "index": free of parameters.
    """

    kind: Literal["dot", "index", "copy"]
    phi: Variable
    eta: Variable
    row_data: Variable | None = None


@dataclass(frozen=True)
class Column:
    """A number of each row, held by a leaf, and cut off at public ends."""

    leaf: int
    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where the one number that a row observes can lie; see :mod:`pymc_dp.records.densities`.

    The leaf number `leaf` holds it, from `lower` to `upper`; a nonnegative integer if `discrete`.
    `atoms` are places with a probability of their own; `modes` is how many the density may have.
    `hashed` leaves are those that the law needs, which may enter a hash, without ends of a censored
    one: PyMC 6 leaves these out if all are infinite.
    """

    leaf: int
    discrete: bool
    lower: float | Column
    upper: float | Column
    atoms: tuple[float | Column, ...] = ()
    modes: int = 1
    hashed: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class RowGraph:
    """The log-likelihood of a block of rows of one or several observed variables of one length.

    `terms`, (rows,) by observed variable in `names`, are functions of the blocks of `leaves` and
    the ``eta`` of `cuts`.  `lookups` are labels of rows, and sizes of what they index.  The density
    is zero outside `conditions`, boolean scalars of parameters (``sigma > 0``).  `outcomes` are
    empty where one is not known, or is a covariate of another.  `impossible`, (rows,) conditions of
    the blocks by observed variable, all hold where its distribution cannot have the outcome.
    """

    terms: tuple[Variable, ...]
    cuts: tuple[Cut, ...]
    leaves: tuple[RowLeaf, ...]
    lookups: tuple[tuple[Variable, int], ...]
    conditions: tuple[Variable, ...]
    n_rows: int
    names: tuple[str, ...]
    outcomes: tuple[Outcome, ...] = ()
    impossible: tuple[tuple[Variable, ...], ...] = ()

    @property
    def quoted(self) -> str:
        """The observed variables, for messages."""
        return ", ".join(f"`{name}`" for name in self.names)

    @cached_property
    def loglik(self) -> Variable:
        """(rows,) log-likelihood: the sum of the terms."""
        return reduce(add, self.terms)


@dataclass(frozen=True, eq=False)
class ParameterVector:
    """All unconstrained parameters as one (d,) input `theta`, with `values` at `slices` of it."""

    theta: Variable
    values: tuple[Variable, ...]
    slices: tuple[slice, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, values: Sequence[Variable], shapes: Sequence[tuple[int, ...]]) -> ParameterVector:
        """The vector of value variables of these shapes."""
        ends = np.cumsum([0, *(math.prod(shape) for shape in shapes)]).tolist()
        slices = tuple(slice(*places) for places in pairwise(ends))
        theta = pt.TensorType("float64", shape=(ends[-1],))(name="theta")
        return cls(theta, tuple(values), slices, tuple(tuple(s) for s in shapes))

    @property
    def size(self) -> int:
        """Number of parameters, d."""
        return int(self.theta.type.shape[0])

    @cached_property
    def inputs(self) -> list[Variable]:
        """The values of the variables; see `parts`."""
        return [pt.TensorType("float64", shape=shape)() for shape in self.shapes]

    @property
    def symbolic(self) -> list[Variable]:
        """The values of the variables, of `theta`."""
        pieces = zip(self.slices, self.shapes, strict=True)
        return [self.theta[p].reshape(s) if s else self.theta[p.start] for p, s in pieces]

    def substitute(
        self, outputs: Sequence[Variable], parts: Sequence[Variable] | None = None
    ) -> list[Variable]:
        """`outputs` as functions of `theta`, or of other `parts`: `inputs` are compiled sooner."""
        pairs = zip(self.values, parts or self.symbolic, strict=True)
        replaced = {value: part.astype(value.type.dtype) for value, part in pairs}
        return clone_replace(list(outputs), replaced, rebuild_strict=False)

    def parts(self, theta: np.ndarray) -> list[np.ndarray]:
        """Values of `inputs`: views of a (d,) vector."""
        return [theta[p].reshape(s) for p, s in zip(self.slices, self.shapes, strict=True)]

    def ravel(self, point: dict[str, np.ndarray]) -> np.ndarray:
        """(d,) vector of a PyMC point."""
        theta = np.empty(self.size)
        for value, where in zip(self.values, self.slices, strict=True):
            theta[where] = np.ravel(point[value.name])
        return theta

    def point(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        """PyMC point of a (d,) vector."""
        return {
            value.name: np.asarray(part, dtype=value.type.dtype)
            for value, part in zip(self.values, self.parts(theta), strict=True)
        }


def full_eta(cut: Cut, n_rows: int) -> Variable:
    """The row input of a cut, computed from the shared value for all rows."""
    if cut.kind == "dot":
        return pt.dot(cut.row_data, cut.phi).astype(cut.eta.type.dtype)
    if cut.kind == "index":
        return cut.phi[cut.row_data]
    return pt.alloc(cut.phi, n_rows, *cut.phi.shape)


def each_alone(graph: RowGraph) -> list[RowGraph]:
    """A graph for each observed variable, of the same leaves and of the cuts that it needs."""
    found = []
    for k, term in enumerate(graph.terms):
        behind = set(ancestors([term]))
        cuts = tuple(cut for cut in graph.cuts if cut.eta in behind)
        outcomes = graph.outcomes[k : k + 1]
        names = graph.names[k : k + 1]
        found.append(replace(graph, terms=(term,), cuts=cuts, names=names, outcomes=outcomes))
    return found
