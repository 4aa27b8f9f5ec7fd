"""Compiled functions of a row graph: log-likelihoods, scores at the cuts, shared values.

Data are inputs, never constants, so that no compile cache can hold them.  No ``fastmath`` where
rows are seen: a row must give the same bits everywhere, or sensitivities are not exact.

What PyTensor evaluates slowly is written otherwise.  PyMC checks bounds that logistic and
exponential functions cannot leave, evaluates both outcomes of a Bernoulli variable, and computes
log-factorials at every place.  What follows from data alone is :func:`hoisted`: computed once.
Multivariate normals solve a triangular system by a library call for each row (a joint call may
round a row by its place); a constant matrix is inverted once instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pytensor
import pytensor.scalar.basic as scalar
import pytensor.scalar.math as special
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.gradient import disconnected_type, jacobian
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.rewriting.basic import PatternNodeRewriter, in2out, node_rewriter
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.link.numba.dispatch.basic import register_funcify_default_op_cache_key
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.rewriting.elemwise import FusionOptimizer
from scipy.linalg import solve_triangular

from pymc_dp.base.compat import SolveTriangular
from pymc_dp.base.jit import DIGEST, compiled
from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import FLAGS, INTERPRETED, code_of, exact
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.arithmetic import without_errors
from pymc_dp.records.extraction import Records
from pymc_dp.records.graph import Cut, ParameterVector, RowGraph, each_alone
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
    used = [loops.places(weights[c]) for c in range(m)]
    for start in range(0, n, tile):
        size = min(tile, n - start)
        for i in range(size):
            for j in range(k):
                x[j, i] = rows[start + i, j]
        for c in range(m):
            loops.combine(x, 0, weights[c], used[c], y[c, :size])
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
    found = pytensor.function([], matrix, mode=INTERPRETED)().reshape(k, k)
    shape = {"lower": op.core_op.lower, "unit_diagonal": op.core_op.unit_diagonal}
    return np.ascontiguousarray(solve_triangular(found, np.eye(k), check_finite=False, **shape))


_LARGE_GRAPH = 60  # operations from which on to interpret: compiling an LKJ prior takes minutes
_GATHERING = (  # rows into one matrix for a library routine, which may round a row by its place
    "batched_vector_b_solve_to_matrix_b_solve",
    "local_batched_matmul_to_core_matmul",
    "local_batched_matmul_to_core_matmul_with_reshape",
    "local_sumsqr2dot",
    "specialize_matmul_to_batched_dot",
)


class _Fusion(FusionOptimizer):
    """PyTensor's loop fusion without NumPy's limit of 32 operands, which it assumes without C++."""

    def apply(self, fgraph: Any) -> Any:
        with FLAGS, pytensor.config.change_flags(cxx=pytensor.config.cxx or "none"):
            return super().apply(fgraph)


def compile_function(
    inputs: Sequence[Variable], outputs: Any, compile_kwargs: dict[str, Any] | None = None
) -> Any:
    """Compile with numba and exact floating-point semantics; no input value raises an error."""
    kwargs = {"mode": "NUMBA", "on_unused_input": "ignore", **(compile_kwargs or {})}
    interpreted = kwargs["mode"] != "NUMBA"
    # shortly before PyTensor's own fusion
    rewrites = [JOIN_PRODUCTS] if interpreted else [JOIN_PRODUCTS, (_Fusion(), 48.6)]
    kwargs["mode"] = exact(kwargs["mode"]).excluding(*_GATHERING).register(*rewrites)
    single = isinstance(outputs, Variable)
    found = without_errors([outputs] if single else outputs, interpreted=interpreted)
    function = pytensor.function(inputs, found[0] if single else found, **kwargs)
    function.trust_input = True
    return function


def compile_parameter_function(
    inputs: Sequence[Variable], outputs: Any, compile_kwargs: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a function of parameters, silent if not finite; interpret large graphs."""
    if not (compile_kwargs and "mode" in compile_kwargs):
        mode = Mode(linker="py", optimizer="fast_run")
        interpreted = compile_function(inputs, outputs, {**(compile_kwargs or {}), "mode": mode})
        if len(interpreted.maker.fgraph.apply_nodes) > _LARGE_GRAPH:
            return _Silent(interpreted)
    return _Silent(compile_function(inputs, outputs, compile_kwargs))


class _Silent:
    """A function that raises no floating-point warnings; unlike a closure, it can be pickled."""

    def __init__(self, function: Any) -> None:
        self.function = function
        #: Numba's function, called directly if nothing shared goes in; it warns of nothing.
        implicit = any(container.implicit for container in function.input_storage)
        self._code = None if implicit else code_of(function)
        self._single = function.unpack_single

    def __reduce__(self) -> tuple[Any, ...]:
        return _Silent, (self.function,)

    def __call__(self, *inputs: np.ndarray) -> Any:
        if self._code is not None:
            found = self._code(*inputs)
            return found[0] if self._single else found
        with np.errstate(all="ignore"):
            return self.function(*inputs)


def jacobian_of(phi: Variable, theta: Variable) -> Variable:
    """(entries of phi, d) Jacobian, without a scan."""
    flat = phi.astype("float64").flatten()
    try:
        return jacobian(flat, theta, vectorize=True, disconnected_inputs="ignore")
    except (NotImplementedError, ValueError, TypeError):
        size = int(np.prod(phi.type.shape, dtype=int))
        rows = [pytensor.grad(flat[k], theta, disconnected_inputs="ignore") for k in range(size)]
        return pt.stack(rows)


def prepared_loglik(graph: RowGraph) -> Variable:
    """The log-likelihood of a block of rows, stable and simplified, to be differentiated."""
    [loglik] = clone_replace([graph.loglik])  # others need the graph as it was
    loglik = rewrite_graph(loglik, include=("canonicalize", "stabilize"), clone=False)
    return constant_solves(simplified(loglik))


def by_row(rows: np.ndarray) -> np.ndarray:
    """(rows, k) values of rows of any shape; there may be no rows."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


class _Evaluated:
    n_dots: int
    differentiable: list[bool]
    _loglik: Any
    _scores: Any

    @property
    def threaded(self) -> bool:
        """Whether threads may call `loglik` and `scores` side by side."""
        return code_of(self._loglik) is not None and code_of(self._scores) is not None

    def loglik(self, etas: Any, phis: Any, labels: Any, blocks: Any) -> np.ndarray:
        """(rows,) log-likelihood of a block."""
        function = code_of(self._loglik) or self._loglik
        return function(*etas, *phis[self.n_dots :], *labels, *blocks)[0]

    def scores(self, etas: Any, phis: Any, labels: Any, blocks: Any) -> list[np.ndarray | None]:
        """Per cut, (rows, k) derivative of each row's log-likelihood by its ``eta``."""
        function = code_of(self._scores) or self._scores
        found = iter(function(*etas, *phis[self.n_dots :], *labels, *blocks) or ())
        return [by_row(next(found)) if smooth else None for smooth in self.differentiable]


class RowFunctions(_Evaluated):
    """The compiled functions of one graph; `constant_jacobians` are d phi / d theta, or None."""

    def __init__(
        self,
        graph: RowGraph,
        parameters: ParameterVector,
        compile_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.graph, self.parameters, self.compile_kwargs = graph, parameters, compile_kwargs
        dots = [cut for cut in graph.cuts if cut.kind == "dot"]
        others = [cut for cut in graph.cuts if cut.kind != "dot"]
        self.ordered = (*dots, *others)
        self.n_dots = len(dots)
        self.differentiable = [cut.phi.type.dtype.startswith("float") for cut in self.ordered]
        self.labels = [cut for cut in others if cut.kind == "index"]
        self._compile_columns()
        self._compile_shared()
        self._compile_rows()

    def _compile_columns(self) -> None:
        blocks = [leaf.block for leaf in self.graph.leaves]
        self.column_of: dict[Cut, int | Callable[..., Any]] = {}
        for cut in self.ordered:
            if cut.row_data is None:
                continue
            if cut.row_data in blocks:
                self.column_of[cut] = blocks.index(cut.row_data)
            else:
                [column] = without_errors([cut.row_data], interpreted=True)
                self.column_of[cut] = pytensor.function(
                    blocks, column, mode=INTERPRETED, on_unused_input="ignore"
                )

    def column(self, cut: Cut, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The design or the labels of a cut, from the row data (records first)."""
        how = self.column_of[cut]
        return arrays[how] if isinstance(how, int) else how(*arrays)

    def row_data(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the functions of rows read, records first, from the row data."""
        data = [np.ascontiguousarray(array) for array in arrays]
        columns = self._hoisted(*data) if self._hoisted is not None else []
        return [*(data[k] for k in self.block_leaves), *columns]

    def _compile_shared(self) -> None:
        theta, shared = self.parameters.theta, [cut.phi for cut in self.ordered]
        phis = self.parameters.substitute(shared)
        self.constant_jacobians: list[np.ndarray | None] = []
        jacobians, self.varying = [], []
        for k, phi in enumerate(phis):
            constant = None
            if self.differentiable[k]:
                matrix = jacobian_of(phi, theta)
                if theta in ancestors_without_shapes([matrix]):
                    jacobians.append(matrix)
                    self.varying.append(k)
                else:
                    function = pytensor.function(
                        [theta], matrix, mode=INTERPRETED, on_unused_input="ignore"
                    )
                    constant = np.asarray(function(np.zeros(self.parameters.size)), dtype="float64")
            self.constant_jacobians.append(constant)
        outputs = [*self.parameters.substitute(shared, self.parameters.inputs), *jacobians]
        inputs = [theta, *self.parameters.inputs]
        self._shared = compile_parameter_function(inputs, outputs, self.compile_kwargs)

    def shared(self, theta: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        """Shared values and their Jacobians at `theta`, per cut."""
        results = self._shared(theta, *self.parameters.parts(theta))
        phis = [np.asarray(phi, order="C") for phi in results[: len(self.ordered)]]
        jacobians = list(self.constant_jacobians)
        for k, matrix in zip(self.varying, results[len(self.ordered) :], strict=True):
            jacobians[k] = np.ascontiguousarray(matrix)
        return phis, jacobians

    def _compile_rows(self) -> None:
        graph = self.graph
        label_inputs = {
            cut: pt.vector(f"label{k}", dtype=cut.row_data.type.dtype)
            for k, cut in enumerate(self.labels)
            if cut.row_data is not None
        }
        # the rows see shared values through inputs of the size of the shared value
        n_block = graph.leaves[0].block.shape[0]
        phi_inputs: list[Variable] = []
        self._replacements = {}
        for cut in self.ordered[self.n_dots :]:
            phi = cut.phi.type.clone(shape=cut.phi.type.shape)(name=f"phi{len(phi_inputs)}")
            phi_inputs.append(phi)
            if cut.kind == "index":
                self._replacements[cut.eta] = phi[label_inputs[cut]]
            else:
                self._replacements[cut.eta] = pt.alloc(phi, n_block, *phi.shape)
        dot_inputs = [cut.eta for cut in self.ordered[: self.n_dots]]
        self._inputs = [*dot_inputs, *phi_inputs, *label_inputs.values()]
        data = [leaf.block for leaf in graph.leaves]
        [loglik], inputs, columns = hoisted([prepared_loglik(graph)], data)
        self._hoisted = compile_function(data, columns, self.compile_kwargs) if columns else None
        outputs = [loglik, *self.gradients(loglik)]
        used = ancestors_without_shapes(outputs)
        sizes_from = graph.leaves[0].block
        self.block_leaves = [
            k
            for k, leaf in enumerate(graph.leaves)
            if leaf.block in used or leaf.block is sizes_from
        ]
        blocks = [graph.leaves[k].block for k in self.block_leaves]
        self._loglik, self._scores = self.evaluating(outputs, [*blocks, *inputs])

    def gradients(self, loglik: Variable) -> list[Variable]:
        """Of a log-likelihood, by what rows see."""
        etas = [cut.eta for cut in self.ordered]
        smooth = [eta for eta, smooth in zip(etas, self.differentiable, strict=True) if smooth]
        return pytensor.grad(loglik.sum(), smooth, disconnected_inputs="ignore")

    def evaluating(self, outputs: list[Variable], blocks: list[Variable]) -> tuple[Any, Any]:
        """Compiled functions of a log-likelihood and of scores, the first output and the others."""
        value, *scores = clone_replace(outputs, self._replacements, rebuild_strict=False)
        # not a number: an impossible value of the parameters for this record, like minus infinity
        value = pt.switch(pt.isnan(value), -np.inf, value)
        scores = [s.astype("float64") for s in scores]
        inputs = [*self._inputs, *blocks]
        return tuple(compile_function(inputs, o, self.compile_kwargs) for o in ([value], scores))

    @cached_property
    def of_outcomes(self) -> OutcomeFunctions:
        """The same where many outcomes of each row are tried; compiled at the first use."""
        return OutcomeFunctions(self)

    @cached_property
    def each_alone(self) -> list[RowFunctions]:
        """Functions of each observed variable; compiled at the first use."""
        if len(self.graph.names) == 1:
            return [self]
        given = self.parameters, self.compile_kwargs
        return [RowFunctions(graph, *given) for graph in each_alone(self.graph)]


class OutcomeFunctions(_Evaluated):
    """Row functions to try many outcomes: they take all row data, then :meth:`constants`."""

    def __init__(self, functions: RowFunctions) -> None:
        self.n_dots, self.differentiable = functions.n_dots, functions.differentiable
        [outcome] = functions.graph.outcomes
        data = [leaf.block for leaf in functions.graph.leaves]
        stays = [cut.eta for cut in functions.ordered]
        stays += [block for k, block in enumerate(data) if k != outcome.leaf]
        loglik = prepared_loglik(functions.graph)
        outputs, inputs, columns = hoisted([loglik, *functions.gradients(loglik)], stays)
        self._loglik, self._scores = functions.evaluating(outputs, [*data, *inputs])
        columns = clone_replace(columns, functions._replacements, rebuild_strict=False)
        seen = [*functions._inputs, *data]
        self._constants = compile_function(seen, columns, functions.compile_kwargs)

    def constants(self, etas: Any, phis: Any, labels: Any, data: Any) -> list[np.ndarray]:
        """Columns that do not depend on the outcome, rows first, computed once."""
        return list(self._constants(*etas, *phis[self.n_dots :], *labels, *data))


class PublicTerms:
    """Log-density and gradient in z of everything that is not private."""

    def __init__(self, function: Any, parameters: ParameterVector, at: Coordinates) -> None:
        self._function, self._parameters, self.coordinates = function, parameters, at
        self._places = list(zip(parameters.slices, parameters.shapes, strict=True))

    @classmethod
    def of(
        cls,
        records: Records,
        coordinates: Coordinates,
        compile_kwargs: dict[str, Any] | None = None,
    ) -> PublicTerms:
        """Compile the prior and other public terms of a model."""
        parameters = records.parameters
        [logp] = parameters.substitute([records.public_logp], parameters.inputs)
        slopes = pytensor.grad(logp, parameters.inputs, disconnected_inputs="ignore")
        function = compile_parameter_function(parameters.inputs, [logp, *slopes], compile_kwargs)
        return cls(function, parameters, coordinates)

    def with_coordinates(self, coordinates: Coordinates) -> PublicTerms:
        """The same terms in other coordinates."""
        return PublicTerms(self._function, self._parameters, coordinates)

    def log_density(self, z: np.ndarray) -> float:
        """Log-density at z, a (d,) vector."""
        return self.both(z)[0]

    def gradient(self, z: np.ndarray) -> np.ndarray:
        """(d,) gradient at z."""
        return self.both(z)[1]

    @np.errstate(all="ignore")  # 0 times the infinite slope of a place that is not possible
    def both(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        """Log-density and gradient at z, for the price of one."""
        theta, values = self.coordinates.theta(z), []
        for where, shape in self._places:  # at every step of a chain: no calls
            values.append(theta[where].reshape(shape))
        value, *slopes = self._function(*values)
        for (where, _), part in zip(self._places, slopes, strict=True):
            theta[where] = part.ravel()
        return float(value), self.coordinates.scaling.T.dot(theta)
