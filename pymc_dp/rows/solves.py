"""Solves with a constant triangular matrix, one row at a time, as sums of products.

A multivariate normal log-density solves a triangular system for every row.  The library routine is
called row by row (a joint call may round a row differently according to its place), which takes
longer than the arithmetic.  Where the matrix is constant, its inverse is computed once instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.replace import graph_replace
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.graph.traversal import ancestors
from pytensor.link.numba.dispatch.basic import register_funcify_default_op_cache_key
from pytensor.tensor.blockwise import Blockwise
from scipy.linalg import solve_triangular

from pymc_dp.base.compat import SolveTriangular
from pymc_dp.base.jit import DIGEST, compiled
from pymc_dp.rows import loops

#: Numbers of a tile of rows: half of a first-level cache.
_CACHED = 2560
#: Of the compiled routine: PyTensor's cache on disk does not look at its text.
_VERSION = int(DIGEST, 16)


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
    """-(x A) -> x (-A) and (x A) B -> x (A B), where nothing else needs x A.

    The gradient of a quadratic form is of this kind.
    """
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


#: For `Mode.register`, with a place after the simplifications and before elementwise fusion.
JOIN_PRODUCTS = (
    in2out(node_rewriter([_RowsTimes, pt.neg])(_joined_products), name="joined_products"),
    48.0,
)


def constant_solves(value: Variable) -> Variable:
    """`value` with its solves of constant triangular systems replaced.

    It is the log-likelihood of a block of rows, before it is differentiated.  The result is equal
    up to rounding.  Each row is computed by the same operations, in the same order.
    """
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
    found = pytensor.function([], matrix, mode=Mode(linker="py", optimizer=None))()
    found = found.reshape(k, k)
    core = op.core_op
    return np.ascontiguousarray(
        solve_triangular(
            found, np.eye(k), lower=core.lower, unit_diagonal=core.unit_diagonal, check_finite=False
        )
    )
