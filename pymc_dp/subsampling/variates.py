"""Control variates: what the Taylor expansion of each record's log-likelihood leaves.

q_k expands the log-likelihood of record k in theta about a centre, and d_k = l_k - q_k is what a
sample of records has to estimate (Dang et al. 2019, eq. 4.1, 4.4). The record sees theta through a
few numbers eta (:mod:`pymc_dp.records.graph`), so with eta' and eta'' the first and second
derivatives of eta along delta = theta - centre,

    q_k = l_k(eta*) + grad l_k . eta' + (eta' . H_k eta' + grad l_k . eta'') / 2.

Rows are separate, so the gradient of a *sum* over rows holds the gradient of every row. One more
gradient, of ``sum_k grad l_k . eta'`` with eta' held fixed, holds all products H_k eta'. No Hessian
of a record is formed, and the cost does not depend on the number of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace

from pymc_dp.base.compat import pushforward
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import Cut, ParameterVector
from pymc_dp.rows.functions import jacobian_of
from pymc_dp.rows.predictor import has_kinks
from pymc_dp.rows.simplify import hoisted

#: Up to so many numbers that a row sees, its derivatives by them are stored: 28 at most.
FEW = 6
#: Numbers of a second derivative that are kept in a compiled function.
_NUMBERS = 2**14


@dataclass(frozen=True, eq=False)
class SharedValues:
    """What the rows see of the parameters at each cut, and its derivatives along a direction."""

    centre: Variable  # (d,) input
    direction: Variable  # (d,) input
    value: list[Variable]  # phi at the vector of parameters
    at_centre: list[Variable]  # phi at the centre
    first: list[Variable]  # its first derivative there along `direction`
    second: list[Variable]  # its second one
    affine: list[bool]  # whether affine in theta: `second` is 0, `value` `at_centre` + `first`

    @classmethod
    def of(cls, cuts: Sequence[Cut], parameters: ParameterVector) -> SharedValues:
        """The shared values of some cuts."""
        theta = parameters.theta
        centre, direction = theta.type("centre"), theta.type("direction")
        value = parameters.substitute([cut.phi for cut in cuts])
        at_centre = clone_replace(value, {theta: centre}) if value else []
        first = [_along(phi, centre, direction) for phi in at_centre]
        second = [_along(phi, centre, direction) for phi in first]
        affine = [
            theta not in ancestors_without_shapes([jacobian_of(v, theta)])
            and not has_kinks([v], theta)
            for v in value
        ]
        return cls(centre, direction, value, at_centre, first, second, affine)

    def along(self, theta: Variable, which: Sequence[int], order: int) -> Along:
        """First and second derivatives of some phi along theta - centre.

        Those of values that are not affine are read from an input, where they are few.
        """
        constants = pt.dvector("constants")
        way = theta - self.centre
        delta = {self.direction: way}
        firsts = clone_replace([self.first[k] for k in which], delta, rebuild_strict=False)
        seconds = clone_replace([self.second[k] for k in which], delta, rebuild_strict=False)
        d = int(theta.type.shape[0])
        parts: list[Variable] = []
        start = 0
        for place, k in enumerate(which):
            shape = self.at_centre[k].type.shape
            if self.affine[k] or None in shape or math.prod(shape) * d * d > _NUMBERS:
                continue
            size = math.prod(shape)
            slope = jacobian_of(self.at_centre[k], self.centre)
            parts += [slope.flatten(), jacobian_of(slope, self.centre).flatten()]
            matrix = constants[start : start + size * d].reshape((size, d))
            start += size * d
            cube = constants[start : start + size * d * d].reshape((size * d, d))
            start += size * d * d
            firsts[place] = pt.dot(matrix, way).reshape(shape)
            seconds[place] = pt.dot(pt.dot(cube, way).reshape((size, d)), way).reshape(shape)
        if order < 2:
            seconds = [pt.zeros_like(x) for x in seconds]
        whole = pt.concatenate(parts) if parts else pt.zeros(0)
        at = pytensor.function([self.centre], whole, mode=INTERPRETED, on_unused_input="ignore")
        return Along(firsts, seconds, constants, at, start)


@dataclass(frozen=True, eq=False)
class Along:
    """Derivatives of shared values along theta - centre."""

    firsts: list[Variable]
    seconds: list[Variable]
    constants: Variable  # an input that they read
    at: Callable[[np.ndarray], np.ndarray]  # its value for a centre
    size: int  # its length


def _along(value: Variable, wrt: Variable, direction: Variable) -> Variable:
    """Derivative of an array along a direction: forward mode."""
    return pushforward(value, wrt, direction, disconnected_outputs="ignore")


@dataclass(frozen=True, eq=False)
class Remainder:
    """d_k of a block of rows, as a function of what the rows see."""

    value: Variable  # (rows,) d_k
    stars: list[Variable]  # per cut, the row input that stands for eta at the centre
    firsts: list[Variable]  # row inputs for its first derivative along theta - centre
    seconds: list[Variable]  # for its second one
    etas: list[Variable]  # for eta at theta
    stored: list[Variable]  # inputs for functions of the data and of the centre alone
    columns: list[Variable]  # these as functions of the data and of `stars`


def remainder(
    loglik: Variable, cuts: Sequence[Cut], data: Sequence[Variable], affine: list[bool], order: int
) -> Remainder:
    """d_k for control variates of an order.

    `loglik` is the (rows,) log-likelihood, a function of the ``eta`` of the cuts and of the row
    `data`. `affine` says per cut whether its shared value is affine in the parameters.
    """
    etas = [cut.eta for cut in cuts]
    stars, firsts, seconds = ([eta.type() for eta in etas] for _ in range(3))
    [at_star] = clone_replace([loglik], dict(zip(etas, stars, strict=True)))
    moved = {
        eta: star + first
        for eta, star, first, flat in zip(etas, stars, firsts, affine, strict=True)
        if flat
    }
    [here] = clone_replace([loglik], moved, rebuild_strict=False)
    if numbers_seen(etas) <= FEW:
        column = pt.dmatrix("coefficients")
        derivatives = pt.stack(by_row(at_star, stars, order), axis=1)
        polynomial = _polynomial(column, firsts, seconds, affine, order)
        [value], stored, columns = hoisted([here], data)
        value = value - polynomial
        stored, columns = [column, *stored], [derivatives, *columns]
    else:
        expansion = _expansion(at_star, stars, firsts, seconds, affine, order)
        [value], stored, columns = hoisted([here - expansion], [*data, *stars])
    return Remainder(value, stars, firsts, seconds, etas, stored, columns)


def numbers_seen(etas: Sequence[Variable]) -> float:
    """How many numbers a row sees."""
    return sum(math.prod(s or math.inf for s in eta.type.shape[1:]) for eta in etas)


def _flat(values: Sequence[Variable]) -> list[Variable]:
    """(rows,) entries of row values."""
    found = []
    for x in values:
        flat = x.reshape((x.shape[0], -1)) if x.type.ndim != 1 else x[:, None]
        found += [flat[:, k] for k in range(math.prod(x.type.shape[1:]))]
    return found


def entries(matrix: Variable, first: int, shape: tuple[int, ...], dtype: str) -> Variable:
    """(rows, *shape) values that are held as rows of a matrix, an array over the records each."""
    size = math.prod(shape)
    found = matrix[first] if shape == () else matrix[first : first + size].T
    if len(shape) > 1:
        found = found.reshape((found.shape[0], *shape))
    return pt.neq(found, 0.0) if dtype == "bool" else found.astype(dtype)


def _slopes(value: Variable, wrt: Sequence[Variable]) -> list[Variable]:
    """Gradients of (rows,) values, each with respect to its own row of the inputs."""
    return pytensor.grad(value.sum(), wrt, disconnected_inputs="ignore")


def by_row(value: Variable, etas: list[Variable], order: int) -> list[Variable]:
    """(rows,) values, first and second derivatives of each row, in the order of `_polynomial`."""
    found = [value]
    if order >= 1:
        slopes = _flat(_slopes(value, etas))
        found += slopes
    if order == 2:
        for k, slope in enumerate(slopes):
            found += _flat(_slopes(slope, etas))[k:]
    return [x.astype("float64") for x in found]


def _polynomial(
    derivatives: Variable,
    firsts: list[Variable],
    seconds: list[Variable],
    affine: list[bool],
    order: int,
) -> Variable:
    """(rows,) q_k from its coefficients, by products of small matrices."""
    value = derivatives[:, 0]
    if order == 0:
        return value
    moves = pt.stack(_flat(firsts), axis=1)
    ways = moves
    if order == 2 and not all(affine):
        bent = [
            pt.zeros_like(f) if flat else s
            for f, s, flat in zip(firsts, seconds, affine, strict=True)
        ]
        ways = moves + 0.5 * pt.stack(_flat(bent), axis=1)
    k = int(numbers_seen(firsts))
    value = value + (derivatives[:, 1 : 1 + k] * ways).sum(axis=1)
    if order == 2:
        first, second = np.triu_indices(k)
        left = np.eye(k)[:, first] * np.where(first == second, 0.5, 1.0)
        pairs = pt.dot(moves, pt.constant(left)) * pt.dot(moves, pt.constant(np.eye(k)[:, second]))
        value = value + (derivatives[:, 1 + k :] * pairs).sum(axis=1)
    return value


def _expansion(
    at_star: Variable,
    stars: list[Variable],
    firsts: list[Variable],
    seconds: list[Variable],
    affine: list[bool],
    order: int,
) -> Variable:
    """(rows,) q_k by products, for rows that see many numbers."""
    value = at_star
    if order >= 1:
        slopes = _slopes(at_star, stars)
        linear = _products(slopes, firsts)
        value = value + linear
    if order == 2:
        value = value + 0.5 * _products(_slopes(linear, stars), firsts)
        bent = [k for k, flat in enumerate(affine) if not flat]
        if bent:
            value = value + 0.5 * _products([slopes[k] for k in bent], [seconds[k] for k in bent])
    return value


def _products(xs: Sequence[Variable], ys: Sequence[Variable]) -> Variable:
    """(rows,) sum over all entries of a row of the products of pairs of arrays."""
    terms = []
    for x, y in zip(xs, ys, strict=True):
        product = x * y
        terms.append(
            product.sum(axis=tuple(range(1, product.ndim))) if product.ndim > 1 else product
        )
    return pt.add(*terms) if len(terms) > 1 else terms[0]
