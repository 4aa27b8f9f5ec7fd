"""Records of any model: control variates and the estimate of a sample, compiled from its graph.

q_k expands the log-likelihood of record k in theta about a centre, and d_k = l_k - q_k is what a
sample of records has to estimate (Dang et al. 2019, eq. 4.1, 4.4). The record sees theta through a
few numbers eta (:mod:`pymc_dp.records.graph`), so with eta' and eta'' the first and second
derivatives of eta along delta = theta - centre,

    q_k = l_k(eta*) + grad l_k . eta' + (eta' . H_k eta' + grad l_k . eta'') / 2.

Rows are separate, so the gradient of a *sum* over rows holds that of every row, and the gradient of
``sum_k grad l_k . eta'``, with eta' held fixed, holds all products H_k eta'. No Hessian of a record
is formed, and the cost does not depend on the number of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import DimShuffle

from pymc_dp.base.compat import pushforward
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import ParameterVector, RowGraph
from pymc_dp.rows.functions import compile_function, hoisted, jacobian_of, prepared_loglik
from pymc_dp.rows.predictor import has_kinks
from pymc_dp.subsampling.estimates import KernelGraph, packed
from pymc_dp.subsampling.reading import columns_of

_NUMBERS = 2**14  # numbers of a second derivative that are kept in a compiled function
_FEW = 6  # up to so many numbers that a row sees, its derivatives by them are stored: 28 at most
#: For functions called once for every row, one array operation after the other.
_ONCE = Mode(linker="py", optimizer="fast_run").excluding("fusion")
_BLOCK = 4096  # rows that are evaluated at once, so that what is between stays in a cache


class GeneralRows:
    """The records of a model; `data` is in the order of ``graph.leaves``, records first."""

    def __init__(
        self, graph: RowGraph, parameters: ParameterVector, data: Sequence[np.ndarray]
    ) -> None:
        self.graph, self.n, self.d = graph, graph.n_rows, parameters.size
        self.theta, self._loglik = parameters.theta, prepared_loglik(graph)
        columns = columns_of(graph, data)
        self._column_of = {
            expression: pt.TensorType(str(array.dtype), (None, *expression.type.shape[1:]))()
            for expression, array in columns.items()
        }
        used = ancestors_without_shapes([self._loglik])
        leaves = zip([leaf.block for leaf in graph.leaves], data, strict=True)
        self._data = {v: np.ascontiguousarray(x) for v, x in leaves if v in used}
        #: What rows read, rows first.
        self.arrays = dict(zip(self._column_of.values(), columns.values(), strict=True))
        self.arrays |= self._data
        # what conditions choose by, and other integers, is not expanded
        self._real = [cut for cut in graph.cuts if cut.phi.type.dtype.startswith("float")]
        self._cuts = [*self._real, *(cut for cut in graph.cuts if cut not in self._real)]
        self._shared = parameters.substitute([cut.phi for cut in self._cuts])
        etas = dict(zip(self._etas(), self._seen(self._shared), strict=True))
        [rows] = clone_replace([self._loglik], etas, rebuild_strict=False)
        value, direction = rows.sum(), self.theta.type()
        slope = pytensor.grad(value, self.theta, disconnected_inputs="ignore")
        product = pytensor.grad((slope * direction).sum(), self.theta, disconnected_inputs="ignore")
        self._total = compile_function([self.theta, *self.arrays], [value, slope])
        self._product = compile_function([self.theta, direction, *self.arrays], product)

    def total(self, theta: np.ndarray, rows: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """Log-likelihood of all records, or of some of them, and its (d,) gradient."""
        value, gradient = 0.0, np.zeros(self.d)
        for block in self._blocks(rows):
            part, slope = self._total(theta, *block)
            value += float(part)
            gradient += slope
        return value, gradient

    def hessian(self, theta: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """(d, d) sum of the Hessians of all records, or of some of them."""
        found = np.zeros((self.d, self.d))
        for block in self._blocks(rows):
            found += [self._product(theta, unit, *block) for unit in np.eye(self.d)]
        return (found + found.T) / 2.0

    def _blocks(self, rows: np.ndarray | None) -> Iterator[list[np.ndarray]]:
        arrays = [x if rows is None else x[rows] for x in self.arrays.values()]
        for start in range(0, len(arrays[0]), _BLOCK):
            yield [x[start : start + _BLOCK] for x in arrays]

    def _etas(self) -> list[Variable]:
        return [cut.eta for cut in self._cuts]

    def _numbers_seen(self) -> float:
        """How many real numbers a row sees."""
        shapes = [cut.eta.type.shape[1:] for cut in self._real]
        return sum(math.prod(s or math.inf for s in shape) for shape in shapes)

    def _seen(self, values: Sequence[Any], spread: bool = True) -> list[Any]:
        """What a block of rows sees of shared values, per cut; nothing of those that are None.

        If not `spread`, the axis of rows has length 1 where all rows see the same.
        """
        n_block = next(iter(self.arrays)).shape[0]
        found: list[Any] = []
        for cut, phi in zip(self._cuts, values, strict=False):
            if phi is None:
                found.append(None)
                continue
            if cut.kind == "dot":
                eta = pt.dot(self._column_of[cut.row_data], phi)
            elif cut.kind == "index":
                eta = phi[self._column_of[cut.row_data]]
            elif not spread:
                eta = phi[None]
            elif all(phi.type.broadcastable):  # loops over (rows, 1) are slow
                eta = pt.alloc(phi.squeeze(), n_block).dimshuffle(0, *"x" * phi.type.ndim)
            else:
                eta = pt.alloc(phi, n_block, *phi.shape)
            found.append(eta.astype(cut.eta.type.dtype))
        return found

    # -- what a sample estimates ----------------------------------------------------------------

    def remainders(
        self, at: np.ndarray, order: int, estimator: str
    ) -> tuple[KernelGraph, np.ndarray, np.ndarray, int]:
        """The estimate from a sample of records, and what it reads of every record.

        Control variates of `order` are about `at`; `estimator` is "perturbed", "signed" or "mean".
        Returns the kernel's graph, its tables, the rows (n, k), and the width of the designs,
        which come first, before coefficients. From theta, centre, (scale, shift, size of a
        mini-batch), tables, and designs, coefficients and other numbers of a sample the kernel
        gives the (1,) estimate, the (rows,) d_k, and its (d,) gradient.
        """
        theta, centre, tables = self.theta, self.theta.type("centre"), pt.dmatrix("tables")
        at_centre = clone_replace(self._shared, {theta: centre}) if self._shared else []
        firsts, seconds, table = self._moves(at_centre, centre, tables)
        stars = [eta.type() for eta in self._etas()]  # row inputs for eta at the centre
        [at_star] = clone_replace([self._loglik], dict(zip(self._etas(), stars, strict=True)))
        ways, bends = self._seen(firsts, spread=False), self._seen(seconds, spread=False)
        moved = {
            cut.eta: star + way
            for cut, star, way, bend in zip(self._real, stars, ways, bends, strict=False)
            if bend is None
        }
        [here] = clone_replace([self._loglik], moved, rebuild_strict=False)
        expand = _polynomial if self._numbers_seen() <= _FEW else _products
        expansion, coefficients, kept = expand(at_star, stars[: len(ways)], ways, bends, order)
        [value], stored, columns = hoisted([here - expansion], [*self._data, *stars])
        seen = dict(zip(self._etas(), self._seen(self._shared), strict=True))
        star_of = dict(zip(stars, self._seen(at_centre), strict=True))
        # what a linear predictor is at the centre is stored; other shared values are at hand
        used = ancestors_without_shapes([value])
        for cut, star in zip(self._cuts, stars, strict=True):
            if cut.kind == "dot" and star in used:
                stored, columns = [*stored, star], [*columns, star]
            else:
                seen[star] = star_of[star]
        [d] = clone_replace([value], seen, rebuild_strict=False)
        numbers = pt.dvector("numbers")
        value = _estimate(d, numbers, estimator)
        gradient = pytensor.grad(value, theta, disconnected_inputs="ignore")
        read = ancestors_without_shapes([value, gradient])
        designs = {self._column_of[cut.row_data] for cut in self._cuts if cut.kind == "dot"}
        first = {v: x for v, x in self.arrays.items() if v in read and v in designs}
        other = {v: x for v, x in self.arrays.items() if v in read and v not in designs}
        columns = clone_replace([*columns, kept], star_of, rebuild_strict=False)
        inputs = [centre, *self.arrays]
        function = pytensor.function(inputs, columns, mode=_ONCE, on_unused_input="ignore")
        blocks = [function(at, *block) for block in self._blocks(None)]
        *filled, constants = [np.concatenate(part) for part in zip(*blocks, strict=True)]
        other |= dict(zip(stored, filled, strict=True))
        design, others, width, place = pt.dmatrix("design"), pt.dmatrix("others"), 0, 0
        replaced = {}
        for v, x in first.items():
            replaced[v] = design if len(first) == 1 else design[:, width : width + x.shape[1]]
            width += x.shape[1]
        for v, x in other.items():
            replaced[v] = _entries(others, place, x.shape[1:], v.type.dtype)
            place += math.prod(x.shape[1:])
        for v, x in self.arrays.items():  # of others the shape alone may be read
            replaced.setdefault(v, pt.zeros((design.shape[0], *x.shape[1:]), v.type.dtype))
        outputs = clone_replace([value.reshape((1,)), d, gradient], replaced, rebuild_strict=False)
        # a product would copy a matrix that PyTensor transposes: both forms are inputs
        transposed = {design: pt.dmatrix(), coefficients: pt.dmatrix()}
        replaced = {}
        for v in ancestors(outputs):
            of = v.owner.inputs[0] if v.owner and isinstance(v.owner.op, DimShuffle) else None
            if of in transposed and v.type.ndim == 2:
                replaced[v] = transposed[of]
        outputs = clone_replace(outputs, replaced, rebuild_strict=False)
        matrices = [x for pair in transposed.items() for x in pair]
        graph = ([theta, centre, numbers, tables, *matrices, others], outputs)
        return graph, table(at), packed([*first.values(), constants, *other.values()]), width

    def _moves(
        self, at_centre: Sequence[Variable], centre: Variable, tables: Variable
    ) -> tuple[list[Variable], list[Variable | None], Callable[[np.ndarray], np.ndarray]]:
        """First and second derivatives of shared values along theta - centre; None for affine ones.

        Few derivatives of other values are stored in `tables`, which the function gives for a
        centre.
        """
        theta, direction, way = self.theta, self.theta.type("direction"), self.theta - centre
        firsts: list[Variable] = []
        seconds: list[Variable | None] = []
        whole, products, start = [pt.zeros((0, self.d))], pt.dot(tables, way), 0
        for value, star in zip(self._shared[: len(self._real)], at_centre, strict=False):
            jacobian = jacobian_of(star, centre)
            moves = [pushforward(star, centre, direction, disconnected_outputs="ignore")]
            if centre in ancestors_without_shapes([jacobian]) or has_kinks([value], theta):
                moves += [pushforward(moves[0], centre, direction, disconnected_outputs="ignore")]
            moves = clone_replace(moves, {direction: way}, rebuild_strict=False)
            shape = star.type.shape
            size = math.prod(s or 0 for s in shape)
            if len(moves) == 2 and None not in shape and size * self.d**2 <= _NUMBERS:
                whole += [jacobian, jacobian_of(jacobian, centre)]
                middle, end = start + size, start + size * (1 + self.d)
                along = products[middle:end].reshape((size, self.d))
                moves = [products[start:middle].reshape(shape), pt.dot(along, way).reshape(shape)]
                start = end
            firsts.append(moves[0])
            seconds.append(moves[1] if len(moves) == 2 else None)
        table = pt.concatenate(whole)
        at = pytensor.function([centre], table, mode=INTERPRETED, on_unused_input="ignore")
        return firsts, seconds, at


def _entries(matrix: Variable, first: int, shape: tuple[int, ...], dtype: str) -> Variable:
    """(rows, *shape) values that are held as rows of a matrix, an array over the records each."""
    size = math.prod(shape)
    found = matrix[first] if shape == () else matrix[first : first + size].T
    if len(shape) > 1:
        found = found.reshape((found.shape[0], *shape))
    return pt.neq(found, 0.0) if dtype == "bool" else found.astype(dtype)


def _slopes(value: Variable, wrt: Sequence[Variable]) -> list[Variable]:
    """Gradients of (rows,) values, each with respect to its own row of the inputs."""
    return pytensor.grad(value.sum(), wrt, disconnected_inputs="ignore")


def _products(
    at_star: Variable,
    stars: list[Variable],
    ways: list[Variable],
    bends: list[Variable | None],
    order: int,
) -> tuple[Variable, Variable, Variable]:
    """(rows,) q_k without coefficients; values seen that are not affine in theta have bends."""
    value = at_star
    if order >= 1:
        slopes = _slopes(at_star, stars)
        linear = _sum_of_products(slopes, ways)
        value = value + linear
    if order == 2:
        value = value + 0.5 * _sum_of_products(_slopes(linear, stars), ways)
        value = value + 0.5 * _sum_of_products(slopes, bends)
    return value, pt.TensorType("float64", (0, None))(), pt.zeros((at_star.shape[0], 0))


def _polynomial(
    at_star: Variable,
    stars: list[Variable],
    ways: list[Variable],
    bends: list[Variable | None],
    order: int,
) -> tuple[Variable, Variable, Variable]:
    """(rows,) q_k, an input for its (k, rows) coefficients, and these (rows, k)."""
    terms: list[tuple[Variable, list[Variable]]] = [(at_star, [])]  # coefficients and factors
    if order >= 1:
        slopes, moves = _flat(_slopes(at_star, stars)), _flat(ways)
        bent = _flat(
            [
                way if bend is None or order < 2 else way + 0.5 * bend
                for way, bend in zip(ways, bends, strict=True)
            ]
        )
        terms += [(slope, [x]) for slope, x in zip(slopes, bent, strict=True)]
    if order == 2:
        for j, slope in enumerate(slopes):
            curvatures = _flat(_slopes(slope, stars))
            terms += [
                ((0.5 if j == k else 1.0) * curvatures[k], [moves[j], moves[k]])
                for k in range(j, len(moves))
            ]
    coefficients = pt.TensorType("float64", (len(terms), None))("coefficients")
    # weights of the coefficients, the same for all rows, by the factors that are not
    groups: dict[tuple[Variable, ...], dict[int, Any]] = {}
    for k, (_, factors) in enumerate(terms):
        rows = tuple(x for x in factors if not x.type.broadcastable[0])
        alike = [x[0] for x in factors if x.type.broadcastable[0]]
        groups.setdefault(rows, {})[k] = math.prod(alike, start=1.0)
    value = 0.0
    for rows, group in groups.items():
        if list(group.values()) == [1.0]:
            part = coefficients[next(iter(group))]
        else:
            weights = [group.get(k, 0.0) for k in range(len(terms))]
            part = pt.dot(pt.stack(weights), coefficients)
        value = value + math.prod(rows, start=part)
    return value, coefficients, pt.stack([x for x, _ in terms], axis=1)


def _flat(arrays: Sequence[Variable]) -> list[Variable]:
    """(rows,) entries of arrays of rows."""
    return [
        x.squeeze(tuple(range(1, x.ndim))) if all(x.type.broadcastable[1:]) else x[:, *index]
        for x in arrays
        for index in np.ndindex(x.type.shape[1:])
    ]


def _sum_of_products(xs: Sequence[Variable], ys: Sequence[Variable | None]) -> Variable:
    """(rows,) sum over all entries of a row of the products of pairs of arrays."""
    products = [x * y for x, y in zip(xs, ys, strict=True) if y is not None]
    return sum(p.sum(axis=tuple(range(1, p.ndim))) if p.ndim > 1 else p for p in products)


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
