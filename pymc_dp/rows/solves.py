"""Solves with a constant triangular matrix, one row at a time, as sums of products.

A multivariate normal log-density solves a triangular system for every row.  The library routine is
called row by row (a joint call may round a row differently according to its place), which takes
longer than the arithmetic.  Where the matrix is constant, its inverse is computed once instead.
"""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.blockwise import Blockwise
from scipy.linalg import solve_triangular

from pymc_dp._compat import SolveTriangular

__all__ = ["constant_solves"]

#: Sums are written out up to this length; longer ones would take long to compile.
_LONGEST = 20


def constant_solves(value: Variable) -> Variable:
    """`value` with its solves of constant triangular systems replaced.

    Parameters
    ----------
    value : Variable
        Log-likelihood of a block of rows, before it is differentiated.

    Returns
    -------
    Variable
        Equal up to rounding.  Each row is computed by the same operations, in the same order.
    """
    nodes = {v.owner for v in ancestors([value]) if v.owner is not None}
    replaced = {}
    for node in nodes:
        inverse = _inverse(node)
        if inverse is not None:
            b = node.inputs[1]
            terms = [b[..., j : j + 1] * inverse[:, j] for j in range(len(inverse))]
            replaced[node.outputs[0]] = pt.add(*terms) if len(terms) > 1 else terms[0]
    return graph_replace(value, replaced, strict=False) if replaced else value


def _inverse(node: Apply) -> np.ndarray | None:
    """The inverse of the matrix of a solve with vectors, if it is constant."""
    op = node.op
    if not isinstance(op, Blockwise) or not isinstance(op.core_op, SolveTriangular):
        return None
    matrix, b = node.inputs
    k = matrix.type.shape[-1]
    if op.core_op.b_ndim != 1 or b.type.ndim < 2 or k is None or k > _LONGEST:
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
