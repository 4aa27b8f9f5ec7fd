"""Log-likelihoods of rows that PyTensor evaluates slowly, written otherwise.

PyMC checks that the probability of a Bernoulli variable lies in [0, 1] and the mean of a Poisson
one is not negative, also where these are a logistic or an exponential function.  It evaluates both
outcomes of a Bernoulli variable for every record, and computes the log-factorial of a count again
at every place.  What follows from the data alone is *hoisted* here: computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.scalar.basic as scalar
import pytensor.scalar.math as special
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.tensor.elemwise import DimShuffle, Elemwise

#: Functions that take longer than reading a number from memory.
_SLOW = (
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


def _of(variable: Variable, kind: type | tuple[type, ...]) -> Apply | None:
    """The node that computes `variable`, if it applies this scalar function."""
    node = variable.owner
    if node is None or not isinstance(node.op, Elemwise):
        return None
    return node if isinstance(node.op.scalar_op, kind) else None


@node_rewriter([Elemwise])
def _sure_bounds(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """0 <= sigmoid(x), sigmoid(x) <= 1 and 0 <= exp(x) for all x but not a number."""
    bounds: tuple[type, ...]
    if isinstance(node.op.scalar_op, scalar.GE):
        bounds, limit = (special.Sigmoid, scalar.Exp), 0.0
    elif isinstance(node.op.scalar_op, scalar.LE):
        bounds, limit = (special.Sigmoid,), 1.0
    else:
        return None
    value, end = node.inputs
    inner = _of(value, bounds)
    if inner is None or _number(end) != limit:
        return None
    x = inner.inputs[0]
    return (
        [pt.invert(pt.isnan(x))]
        if x.type.broadcastable == node.outputs[0].type.broadcastable
        else None
    )


@node_rewriter([Elemwise])
def _log_of_the_rest(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """log1p(-sigmoid(x)) -> -softplus(x)."""
    if not isinstance(node.op.scalar_op, scalar.Log1p):
        return None
    found = _negated(node.inputs[0])
    inner = None if found is None else _of(found, special.Sigmoid)
    return None if inner is None else [-pt.softplus(inner.inputs[0])]


@node_rewriter([Elemwise])
def _one_softplus(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """The softplus of x or of -x, whichever a condition chooses, as one: the same bits."""
    if not isinstance(node.op.scalar_op, scalar.Switch):
        return None
    condition, first, second = node.inputs
    x, y = _negated(first), _negated(second)
    negative = x is not None and y is not None
    nodes = [_of(v, special.Softplus) for v in ((x, y) if negative else (first, second))]
    if any(found is None for found in nodes):
        return None
    x, y = (found.inputs[0] for found in nodes if found is not None)
    if _negated(x) is not y and _negated(y) is not x:
        return None
    one = pt.softplus(pt.switch(condition, x, y))
    return [-one if negative else one]


def _negated(variable: Variable) -> Variable | None:
    negative, product = _of(variable, scalar.Neg), _of(variable, scalar.Mul)
    if negative is not None:
        return negative.inputs[0]
    if product is None or len(product.inputs) != 2:
        return None
    first, second = product.inputs
    if _number(first) == -1.0:
        return second
    return first if _number(second) == -1.0 else None


def _number(variable: Variable) -> float | None:
    if not isinstance(variable, Constant) or variable.data.size != 1:
        return None
    return float(variable.data.item())


_SIMPLIFY = in2out(_sure_bounds, _log_of_the_rest, _one_softplus, name="simplify_rows")


def simplified(value: Variable) -> Variable:
    """`value` with bounds that always hold left out, and one softplus function for two.

    It is the canonical log-likelihood of a block of rows, not yet differentiated; its values stay.
    """
    fgraph = FunctionGraph(outputs=[value], clone=False)
    _SIMPLIFY.rewrite(fgraph)
    return fgraph.outputs[0]


def hoisted(
    values: Sequence[Variable], data: Sequence[Variable]
) -> tuple[list[Variable], list[Variable], list[Variable]]:
    """`values` with slow functions of the data alone replaced by inputs.

    `values` are log-likelihoods of a block of rows, or scores; `data` have rows first.  Returns the
    new values, the inputs that they read, rows first, and these as functions of the data, row by
    row.
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
