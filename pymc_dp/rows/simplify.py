"""Log-likelihoods of rows that PyTensor evaluates slowly, written otherwise.

PyMC checks that the probability of a Bernoulli variable lies in [0, 1] and the mean of a Poisson
one is not negative, also where these are a logistic or an exponential function.  It evaluates both
outcomes of a Bernoulli variable for every record, and computes the log-factorial of a count again
at every place.  What follows from the data alone is *hoisted* here: computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytensor.scalar.basic as scalar
import pytensor.scalar.math as special
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import PatternNodeRewriter, in2out
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


def _is(number: float) -> dict[str, str | Callable[[Variable], bool]]:
    """The pattern of a constant."""

    def same(x: Variable) -> bool:
        return isinstance(x, Constant) and x.data.size == 1 and x.data.item() == number

    return {"pattern": f"constant {number}", "constraint": same}


_NOT_MISSING = (pt.invert, (pt.isnan(pt.dvector()).owner.op, "x"))
#: What PyMC's Bernoulli, binomial and Poisson log-likelihoods become, in canonical form.
_PATTERNS = (
    ((pt.le, (pt.sigmoid, "x"), _is(1.0)), _NOT_MISSING),
    ((pt.ge, (pt.sigmoid, "x"), _is(0.0)), _NOT_MISSING),
    ((pt.ge, (pt.exp, "x"), _is(0.0)), _NOT_MISSING),
    # as it stands, minus infinity for large x
    ((pt.log1p, (pt.mul, _is(-1.0), (pt.sigmoid, "x"))), (pt.neg, (pt.softplus, "x"))),
    # one function for two: the same bits
    (
        (pt.switch, "y", (pt.neg, (pt.softplus, (pt.neg, "x"))), (pt.neg, (pt.softplus, "x"))),
        (pt.neg, (pt.softplus, (pt.switch, "y", (pt.neg, "x"), "x"))),
    ),
)
_SIMPLIFY = in2out(
    *(PatternNodeRewriter(*pair, allow_multiple_clients=True) for pair in _PATTERNS),
    name="simplify_rows",
)


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
