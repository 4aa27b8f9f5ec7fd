"""Records of any model: control variates and the estimate of a sample, compiled from its graph.

q_k expands the log-likelihood of record k in theta about a centre, and d_k = l_k - q_k is what a
sample of records has to estimate (Dang et al. 2019, eq. 4.1, 4.4). The record sees theta through a
few numbers eta (:mod:`pymc_dp.rows.cuts`), so with eta' and eta'' the first and second derivatives
of eta along delta = theta - centre,

    q_k = l_k(eta*) + grad l_k . eta' + (eta' . H_k eta' + grad l_k . eta'') / 2.

Rows are separate, so the gradient of a *sum* over rows holds the gradient of every row. One more
gradient, of ``sum_k grad l_k . eta'`` with eta' held fixed, holds all products H_k eta'. No Hessian
of a record is formed, and the cost does not depend on the number of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace

from pymc_dp.base.compat import pushforward
from pymc_dp.errors import NotFactorizable
from pymc_dp.rows.ancestry import ancestors_without_shapes
from pymc_dp.rows.cuts import Cut, RowGraph
from pymc_dp.rows.functions import (
    INTERPRETED,
    ParameterVector,
    compile_function,
    jacobian_of,
    prepared_loglik,
)
from pymc_dp.rows.kinks import has_kinks
from pymc_dp.rows.simplify import hoisted
from pymc_dp.subsampling.estimates import KernelGraph, packed
from pymc_dp.subsampling.reading import columns_of

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


#: For functions called once for every row, one array operation after the other.
_ONCE = Mode(linker="py", optimizer="fast_run").excluding("fusion")
#: Rows that are evaluated at once, so that what is between stays in a cache.
_BLOCK = 4096


class GeneralRows:
    """The records of a model, each a function of what it sees of theta.

    `data` is in the order of ``graph.leaves``, records first.
    """

    def __init__(
        self, graph: RowGraph, parameters: ParameterVector, data: Sequence[np.ndarray]
    ) -> None:
        self.graph = graph
        self.parameters = parameters
        self._loglik = prepared_loglik(graph)
        self._place_columns(data)
        used = ancestors_without_shapes([self._loglik])
        for leaf, array in zip(graph.leaves, data, strict=True):
            if leaf.block in used:
                self.inputs.append(leaf.block)
                self.arrays.append(np.ascontiguousarray(array))
        self.n = graph.n_rows
        self.d = parameters.size
        real = [cut for cut in graph.cuts if cut.phi.type.dtype.startswith("float")]
        self._others = [cut for cut in graph.cuts if cut not in real]
        self._cuts = real
        self._shared = SharedValues.of(real, parameters)
        self._other_values = parameters.substitute([cut.phi for cut in self._others])
        self._derivatives: Callable[..., Any] | None = None

    def _place_columns(self, data: Sequence[np.ndarray]) -> None:
        columns = columns_of(self.graph, data)
        self._input_of = {
            expression: pt.TensorType(str(array.dtype), (None, *expression.type.shape[1:]))()
            for expression, array in columns.items()
        }
        self.inputs: list[Variable] = list(self._input_of.values())
        self.arrays: list[np.ndarray] = list(columns.values())

    # -- the whole log-likelihood ---------------------------------------------------------------

    def _seen(self, cuts: Sequence[Cut], values: Sequence[Variable]) -> list[Variable]:
        """What a block of rows sees of shared values, per cut."""
        n_block = self.inputs[0].shape[0]
        found = []
        for cut, phi in zip(cuts, values, strict=True):
            if cut.kind == "dot":
                eta = pt.dot(self._input_of[cut.row_data], phi)
            elif cut.kind == "index":
                eta = phi[self._input_of[cut.row_data]]
            else:
                eta = pt.alloc(phi, n_block, *phi.shape)
            found.append(eta.astype(cut.eta.type.dtype))
        return found

    def _sum(self) -> Variable:
        cuts, values = [*self._cuts, *self._others], [*self._shared.value, *self._other_values]
        etas = dict(zip([cut.eta for cut in cuts], self._seen(cuts, values), strict=True))
        [rows] = clone_replace([self._loglik], etas, rebuild_strict=False)
        return rows.sum()

    def total(self, theta: np.ndarray, rows: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """Log-likelihood of all records, or of some of them, and its (d,) gradient."""
        value, gradient, _ = self._sums(theta, rows, second=False)
        return value, gradient

    def hessian(self, theta: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """(d, d) sum of the Hessians of all records, or of some of them."""
        found = self._sums(theta, rows, second=True)[2]
        return (found + found.T) / 2.0

    def _sums(
        self, theta: np.ndarray, rows: np.ndarray | None, *, second: bool
    ) -> tuple[float, np.ndarray, np.ndarray]:
        value, gradient, hessian = 0.0, np.zeros(self.d), np.zeros((self.d, self.d))
        if self._derivatives is None:
            self._derivatives = self._compile_sums()
        for block in self._blocks(rows):
            part, slope, bent = self._derivatives(theta, block, second)
            value += part
            gradient += slope
            hessian += bent
        return value, gradient, hessian

    def _compile_sums(self) -> Callable[..., tuple[float, np.ndarray, np.ndarray]]:
        """Log-likelihood, gradient and Hessian of a block of rows."""
        shared = self._shared
        wrt, value = self.parameters.theta, self._sum()
        slope = pytensor.grad(value, wrt, disconnected_inputs="ignore")
        product = pytensor.grad((slope * shared.direction).sum(), wrt, disconnected_inputs="ignore")
        total = compile_function([wrt, *self.inputs], [value, slope])
        along = compile_function([wrt, shared.direction, *self.inputs], product)

        def by_parameters(theta: np.ndarray, block: list[np.ndarray], second: bool) -> Any:
            units = np.eye(len(theta) if second else 0)
            bent = np.array([along(theta, unit, *block) for unit in units])
            part, gradient = total(theta, *block)
            return float(part), gradient, bent if second else 0.0

        return by_parameters

    def _blocks(self, rows: np.ndarray | None) -> Iterator[list[np.ndarray]]:
        arrays = self.arrays if rows is None else [x[rows] for x in self.arrays]
        for start in range(0, len(arrays[0]), _BLOCK):
            yield [x[start : start + _BLOCK] for x in arrays]

    # -- what a sample estimates ----------------------------------------------------------------

    def remainders(
        self, centre: np.ndarray, order: int, estimator: str
    ) -> tuple[KernelGraph, np.ndarray, np.ndarray, int]:
        """The estimate from a sample of records, and what it reads of every record.

        `order` is that of the control variates; `estimator` is "perturbed", "signed" or "mean".

        Returns the kernel's graph, its constants, the rows (n, k), and the width of the designs,
        which come first in the rows. From theta, centre, (scale, shift, size of a mini-batch,
        constants) and a sample, the kernel gives the (1,) estimate, the (rows,) d_k, and the (d,)
        gradient of the estimate by theta.
        """
        shared, cuts = self._shared, self._cuts
        data = [x for x in self.inputs if x not in self._input_of.values()]
        if self._others and numbers_seen([cut.eta for cut in cuts]) > FEW:
            names = ", ".join(f"`{name}`" for name in self.graph.names)
            raise NotFactorizable(
                f"{names}: records see more than {FEW} numbers of parameters, and a condition on "
                "them, which an expansion cannot follow. Write it without the condition, or use "
                "NUTS."
            )
        found = remainder(self._loglik, cuts, data, shared.affine, order)
        theta = self.parameters.theta
        along = shared.along(theta, range(len(cuts)), order)
        firsts, seconds = along.firsts, along.seconds
        stars = dict(zip(found.stars, self._seen(cuts, shared.at_centre), strict=True))
        seen = dict(zip(found.etas, self._seen(cuts, shared.value), strict=True))
        seen |= dict(zip(found.firsts, self._seen(cuts, firsts), strict=True))
        seen |= dict(zip(found.seconds, self._seen(cuts, seconds), strict=True))
        # others, of conditions for example: those at theta here, those at the centre in columns
        others = [cut.eta for cut in self._others]
        seen |= dict(zip(others, self._seen(self._others, self._other_values), strict=True))
        at_centre = clone_replace(self._other_values, {theta: shared.centre})
        stars |= dict(zip(others, self._seen(self._others, at_centre), strict=True))
        # what a linear predictor is at the centre is stored; other shared values are at hand
        stored, columns = list(found.stored), list(found.columns)
        used = ancestors_without_shapes([found.value])
        for cut, star in zip(cuts, found.stars, strict=True):
            if cut.kind == "dot" and star in used:
                stored.append(star)
                columns.append(star)
            else:
                seen[star] = stars[star]
        [d] = clone_replace([found.value], seen, rebuild_strict=False)
        numbers = pt.dvector("numbers")
        value = _estimate(d, numbers, estimator)
        gradient = pytensor.grad(value, theta, disconnected_inputs="ignore")
        read = ancestors_without_shapes([value, gradient])
        designs = {cut.row_data for cut in self.graph.cuts if cut.kind == "dot"}
        designs = {self._input_of[expression] for expression in designs}
        held = dict(zip(self.inputs, self.arrays, strict=True))
        first = {v: x for v, x in held.items() if v in read and v in designs}
        other = {v: x for v, x in held.items() if v in read and v not in designs}
        other |= dict(zip(stored, self._stored(columns, stars, centre), strict=True))
        inputs, design, others = {}, pt.dmatrix("design"), pt.dmatrix("others")
        width = 0
        for v, x in first.items():
            inputs[v] = design[:, width : width + x.shape[1]]
            width += x.shape[1]
        place = 0
        for v, x in other.items():
            inputs[v] = entries(others, place, x.shape[1:], v.type.dtype)
            place += math.prod(x.shape[1:])
        for v in self.inputs:  # of others the shape alone may be read
            inputs.setdefault(v, pt.zeros((design.shape[0], *v.type.shape[1:]), v.type.dtype))
        inputs[along.constants] = numbers[3:]
        outputs = clone_replace([value.reshape((1,)), d, gradient], inputs, rebuild_strict=False)
        rows = packed([*first.values(), *other.values()])
        graph = ([theta, shared.centre, numbers, design, others], outputs)
        return graph, along.at(centre), rows, width

    def _stored(
        self, columns: list[Variable], stars: dict[Variable, Variable], centre: np.ndarray
    ) -> list[np.ndarray]:
        """What is stored of every record: functions of the data and of the centre."""
        if not columns:
            return []
        values = clone_replace(columns, stars, rebuild_strict=False)
        inputs = [self._shared.centre, *self.inputs]
        function = pytensor.function(inputs, values, mode=_ONCE, on_unused_input="ignore")
        blocks = [function(centre, *block) for block in self._blocks(None)]
        return [np.concatenate(part) for part in zip(*blocks, strict=True)]


def _estimate(d: Variable, numbers: Variable, how: str) -> Variable:
    """What a sample says of the sum of d_k, on the scale of the log-likelihood."""
    scale, shift = numbers[0], numbers[1]
    if how == "signed":  # eq. 5.1, but for its constants
        batch = numbers[2].astype("int64")
        sums = d.reshape((d.shape[0] // batch, batch)).sum(axis=1)
        return pt.log(pt.abs(scale * sums - shift)).sum()
    if how == "mean":
        return scale * d.sum()
    # eq. 4.5
    return scale * d.sum() - 0.5 * scale**2 * ((d - d.mean()) ** 2).sum()
