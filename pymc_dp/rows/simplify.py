"""Log-likelihoods of rows that PyTensor evaluates slowly, written otherwise.

PyMC checks bounds that logistic and exponential functions cannot leave, evaluates both outcomes of
a Bernoulli variable, and computes log-factorials at every place.  What follows from data alone is
*hoisted*: computed once.  Multivariate normals solve a triangular system by a library call for each
row (a joint call may round a row by its place); a constant matrix is inverted once instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.scalar.basic as scalar
import pytensor.scalar.math as special
import pytensor.tensor as pt
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.rewriting.basic import PatternNodeRewriter, in2out, node_rewriter
from pytensor.graph.traversal import ancestors
from pytensor.link.numba.dispatch.basic import register_funcify_default_op_cache_key
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from scipy.linalg import solve_triangular

from pymc_dp.base.compat import SolveTriangular
from pymc_dp.base.jit import DIGEST, compiled
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.rows import loops

_SLOW = (  # functions that take longer than reading a number from memory
    scalar.Exp,
    scalar.Expm1,
    scalar.Log,
    scalar.Log1p,
    scalar.Log2,
    scalar.Log10,
    scalar.Pow,
    special.GammaLn,
    special.Psi,
    special.Softplus,
    special.Sigmoid,
)


def _is(number: float) -> dict[str, str | Callable[[Variable], bool]]:
    """The pattern of a constant."""

    def same(x: Variable) -> bool:
        return isinstance(x, Constant) and x.data.size == 1 and x.data.item() == number

    return {"pattern": f"constant {number}", "constraint": same}


_NOT_MISSING = (pt.invert, (pt.isnan(pt.dvector()).owner.op, "x"))
_PATTERNS = (  # what Bernoulli, binomial and Poisson log-likelihoods of PyMC become
    ((pt.le, (pt.sigmoid, "x"), _is(1.0)), _NOT_MISSING),
    ((pt.ge, (pt.sigmoid, "x"), _is(0.0)), _NOT_MISSING),
    ((pt.ge, (pt.exp, "x"), _is(0.0)), _NOT_MISSING),
    # as it stands, minus infinity for large x
    ((pt.log1p, (pt.mul, _is(-1.0), (pt.sigmoid, "x"))), (pt.neg, (pt.softplus, "x"))),
    (  # one function for two: the same bits
        (pt.switch, "y", (pt.neg, (pt.softplus, (pt.neg, "x"))), (pt.neg, (pt.softplus, "x"))),
        (pt.neg, (pt.softplus, (pt.switch, "y", (pt.neg, "x"), "x"))),
    ),
)
_SIMPLIFY = in2out(
    *(PatternNodeRewriter(*pair, allow_multiple_clients=True) for pair in _PATTERNS),
    name="simplify_rows",
)


def simplified(value: Variable) -> Variable:
    """The canonical log-likelihood without checks that always hold, with one softplus for two."""
    fgraph = FunctionGraph(outputs=[value], clone=False)
    _SIMPLIFY.rewrite(fgraph)
    return fgraph.outputs[0]


def hoisted(
    values: Sequence[Variable], data: Sequence[Variable]
) -> tuple[list[Variable], list[Variable], list[Variable]]:
    """`values` of rows, with slow functions of the `data` alone replaced by inputs.

    Returns new values, the inputs that they read, and these as functions of the data, row by row.
    """
    rows, slow = {v for v in data if v.type.ndim > 0}, set()
    nodes = FunctionGraph(outputs=list(values), clone=False).toposort()
    for node in nodes:
        if not _is_by_row(node, rows):
            continue
        output = node.outputs[0]
        rows.add(output)
        takes_long = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, _SLOW)
        if takes_long or any(v in slow for v in node.inputs):
            slow.add(output)
    read = {v for node in nodes if node.outputs[0] not in rows for v in node.inputs}
    read.update(values)
    columns = [node.outputs[0] for node in nodes if node.outputs[0] in slow & read]
    inputs = [v.type.clone(shape=v.type.shape)(name=f"hoisted{k}") for k, v in enumerate(columns)]
    if columns:
        values = clone_replace(list(values), dict(zip(columns, inputs, strict=True)))
    return list(values), inputs, columns


def _is_by_row(node: Apply, rows: set[Variable]) -> bool:
    """Whether each row of the output is a function of the same row of data alone."""
    own = [v for v in node.inputs if v in rows]
    if isinstance(node.op, DimShuffle):
        return bool(own) and node.op.new_order[:1] == (0,)
    if not own or any(v.type.ndim != node.outputs[0].type.ndim for v in own):
        return False
    others = [v for v in node.inputs if v not in rows]
    return isinstance(node.op, Elemwise) and all(
        isinstance(v, Constant) and v.type.broadcastable[0] for v in others
    )


# -- solves of constant triangular systems ---------------------------------------------------------


_CACHED = 2560  # numbers of a tile of rows: half of a first-level cache
_VERSION = int(DIGEST, 16)  # of the routine: PyTensor's cache on disk does not look at its text


class _RowsTimes(Op):
    """(rows, k) @ (k, m), each row by the same sums of products; no matrix library."""

    __props__ = ()

    def make_node(self, rows: Variable, matrix: Variable) -> Apply:
        rows, matrix = pt.as_tensor(rows), pt.as_tensor(matrix)
        shape = (rows.type.shape[0], matrix.type.shape[1])
        return Apply(self, [rows, matrix], [pt.TensorType("float64", shape=shape)()])

    def perform(self, node: Apply, inputs: list[np.ndarray], outputs: list[list[Any]]) -> None:
        outputs[0][0] = _rows_times(*inputs)

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Variable]:
        return [self(cotangents[0], inputs[1].T), disconnected_type()]

    L_op = pullback  # its name in PyTensor 2

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True], [False]]


@compiled(error_model="numpy")
def _in_tiles(rows: np.ndarray, matrix: np.ndarray, tile: int) -> np.ndarray:
    # a function of its own: compiled for a known tile, it takes twice as long
    n, k = rows.shape
    m = matrix.shape[1]
    out = np.empty((n, m))
    x, y = np.empty((k, tile)), np.empty((m, tile))  # columns of rows, so that loops vectorise
    weights = np.ascontiguousarray(matrix.T)
    used, counts = np.empty((m, k), dtype=np.int64), np.empty(m, dtype=np.int64)
    for c in range(m):
        counts[c] = loops.nonzero(weights[c], used[c])
    for start in range(0, n, tile):
        size = min(tile, n - start)
        for i in range(size):
            for j in range(k):
                x[j, i] = rows[start + i, j]
        for c in range(m):
            loops.combine(x, 0, weights[c], used[c], counts[c], y[c, :size])
        for i in range(size):
            for c in range(m):
                out[start + i, c] = y[c, i]
    return out


@compiled(error_model="numpy")
def _rows_times(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    if matrix.shape[0] != rows.shape[1]:
        raise ValueError("Rows and the matrix of a solve have other lengths.")
    return _in_tiles(rows, matrix, max(16, _CACHED // max(*matrix.shape, 1)))


@register_funcify_default_op_cache_key(_RowsTimes)
def _numba_rows_times(op: _RowsTimes, node: Apply, **kwargs: Any) -> Any:
    return _rows_times, _VERSION


def _joined_products(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """-(x A) -> x (-A), (x A) B -> x (A B) if x A has no other use, as in quadratic forms."""
    inner = node.inputs[0]
    if inner.owner is None or not isinstance(inner.owner.op, _RowsTimes):
        return None
    if len(fgraph.clients[inner]) > 1:
        return None
    rows, first = inner.owner.inputs
    second = None if node.op == pt.neg else node.inputs[1]
    if not isinstance(first, Constant) or not isinstance(second, Constant | None):
        return None
    product = -first.data if second is None else first.data @ second.data
    return [_RowsTimes()(rows, product)] if np.isfinite(product).all() else None


JOIN_PRODUCTS = (  # for `Mode.register`: after the simplifications, before elementwise fusion
    in2out(node_rewriter([_RowsTimes, pt.neg])(_joined_products), name="joined_products"),
    48.0,
)


def constant_solves(value: Variable) -> Variable:
    """Replace solves of constant triangular systems; equal up to rounding, each row alike."""
    nodes = {v.owner for v in ancestors([value]) if v.owner is not None}
    replaced = {}
    for node in nodes:
        inverse = _inverse(node)
        if inverse is not None:
            b = node.inputs[1].astype("float64")
            rows = b if b.type.ndim == 2 else b.reshape((-1, len(inverse)))
            found = _RowsTimes()(rows, inverse.T.copy())
            replaced[node.outputs[0]] = found if b.type.ndim == 2 else found.reshape(b.shape)
    return graph_replace(value, replaced, strict=False) if replaced else value


def _inverse(node: Apply) -> np.ndarray | None:
    """The inverse of the matrix of a solve with vectors, if it is constant."""
    op = node.op
    if not isinstance(op, Blockwise) or not isinstance(op.core_op, SolveTriangular):
        return None
    matrix, b = node.inputs
    k = matrix.type.shape[-1]
    if op.core_op.b_ndim != 1 or b.type.ndim < 2 or k is None:
        return None
    if any(matrix.type.shape[i] != 1 for i in range(matrix.type.ndim - 2)):
        return None
    if any(v.owner is None and not isinstance(v, Constant) for v in ancestors([matrix])):
        return None
    found = pytensor.function([], matrix, mode=INTERPRETED)()
    found = found.reshape(k, k)
    core = op.core_op
    return np.ascontiguousarray(
        solve_triangular(
            found, np.eye(k), lower=core.lower, unit_diagonal=core.unit_diagonal, check_finite=False
        )
    )
