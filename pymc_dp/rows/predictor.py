"""Records that see the parameters through one scalar linear predictor, with a concave term.

:func:`recognise` finds in a row graph the scalar v_i, affine in theta, through which alone the
parameters reach row i (:func:`linear_predictor`), and the family of its log-likelihood l(v):

``logit``   l' = a - b / (1 + exp(-v))   Bernoulli and binomial with a logit link
``log``     l' = a - b exp(v)            Poisson, exponential, gamma with a log link
``normal``  l' = a - b v                 normal with a known scale
``probit``  l = log Phi(a v), b = 1      Bernoulli with a probit link

with numbers a and b >= 0 of the row: l is concave.  Others keep the ordinary clipping.  Nothing
private is looked at.  Kinks and jumps are looked for in the graph: derivatives do not show them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor import scalar
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar import Add, Cast, Mul, Neg, Sub, TrueDiv
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.sort import SortOp
from scipy.special import expit

from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.ancestry import ancestors_without_shapes, number
from pymc_dp.records.arithmetic import is_float
from pymc_dp.records.graph import Cut, RowGraph
from pymc_dp.rows import linear
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import by_row, compile_function


def _affine_inputs(variable: Variable, moving: Callable[[Variable], bool]) -> list[Variable] | None:
    """The inputs in which a value is affine, row by row; None if it is not."""
    node = variable.owner
    if node is None:
        return None
    depends = [x for x in node.inputs if moving(x)]
    op = node.op
    if isinstance(op, Elemwise):
        scalar = op.scalar_op
        linear = (
            isinstance(scalar, Add | Sub | Neg)
            or (isinstance(scalar, Mul) and len(depends) == 1)
            or (isinstance(scalar, TrueDiv) and not moving(node.inputs[1]))
            or (isinstance(scalar, Cast) and variable.type.dtype == "float64")
        )
        return depends if linear else None
    if isinstance(op, CAReduce):
        axes = None if op.axis is None else {a % node.inputs[0].type.ndim for a in op.axis}
        linear = isinstance(op.scalar_op, Add) and axes is not None and 0 not in axes
        return depends if linear else None
    if isinstance(op, DimShuffle | Reshape | SpecifyShape | Alloc) and depends == node.inputs[:1]:
        return depends
    return None


def linear_predictor(graph: RowGraph) -> Variable | None:
    """The (rows,) float64 variable, affine in the cuts, through which alone they act.

    The nearest to the log-likelihood; None if cuts act in another way as well, or not elementwise.
    """
    etas = {cut.eta for cut in graph.cuts}

    @cache
    def moving(x: Variable) -> bool:
        return x in etas or not etas.isdisjoint(ancestors_without_shapes([x]))

    @cache
    def is_affine(x: Variable) -> bool:
        inputs = [] if x in etas else _affine_inputs(x, moving)
        return inputs is not None and all(map(is_affine, inputs))

    @cache
    def deep(x: Variable) -> int:
        return 0 if x.owner is None else 1 + max(map(deep, x.owner.inputs), default=0)

    ends: set[Variable] = set()
    seen: set[Variable] = set()
    stack = [graph.loglik]
    while stack:
        x = stack.pop()
        if x in seen or not moving(x):
            continue
        seen.add(x)
        if is_affine(x):
            ends.add(x)
        elif x.owner is None or not isinstance(x.owner.op, Elemwise | DimShuffle | Alloc):
            return None
        else:
            stack.extend(x.owner.inputs)
    while len(ends) > 1:  # several affine values: go down to the one that they have in common
        last = max(ends, key=deep)
        if last in etas:
            return None
        ends.remove(last)
        ends.update(x for x in last.owner.inputs if moving(x))
    for x in ends:
        if x.type.ndim == 1 and x.type.dtype == "float64":
            [rest] = clone_replace([graph.loglik], {x: x.type()}, rebuild_strict=False)
            return x if etas.isdisjoint(ancestors([rest])) else None
    return None


_BENDS = (
    scalar.Abs,
    scalar.Ceil,
    scalar.Clip,
    scalar.Floor,
    scalar.IntDiv,
    scalar.Mod,
    scalar.RoundHalfAwayFromZero,
    scalar.RoundHalfToEven,
    scalar.ScalarMaximum,
    scalar.ScalarMinimum,
    scalar.Sign,
    scalar.Trunc,
)


def has_bends(value: Variable, v: Variable, *, equalities: bool) -> bool:
    """Whether an operation on the way from `v` to `value` bends, or chooses by a range of `v`.

    `equalities` allows choices by ``==``: single points do not matter.  Checks of parameters (a
    rate is not negative) are no choices: what is impossible beyond 0 or 1 is seen at a few points.
    """
    decided: dict[Variable, bool] = {}  # what a range of v decides; whether that ends at 0 or 1
    for node, operation, depend in _way([value], v):
        if isinstance(operation, _BENDS) or isinstance(node.op, SortOp):
            return True
        mine = [x for x in node.inputs if x in depend]
        if isinstance(operation, scalar.Switch) and node.inputs[0] in depend:
            condition, *branches = node.inputs
            checks = decided.get(condition, True) and any(number(x) == -math.inf for x in branches)
            if not equalities or (condition in decided and not checks):
                return True
        if not is_float(node.outputs[0]) and not isinstance(operation, scalar.EQ):
            compares, before = any(map(is_float, mine)), [decided[x] for x in mine if x in decided]
            if compares or before:
                ends = [number(x) in (0.0, 1.0) for x in node.inputs if x not in depend]
                decided[node.outputs[0]] = all(before) and (not compares or any(ends))
    return False


def _way(values: Sequence[Variable], v: Variable) -> Iterator[tuple[Apply, object, set[Variable]]]:
    """Nodes from `v` to `values`: each with its scalar operation, and what depends on v so far."""
    depend = {v}
    for node in toposort(list(values)):
        if isinstance(node.op, Shape | Shape_i) or depend.isdisjoint(node.inputs):
            continue
        depend.update(node.outputs)
        operation = node.op.scalar_op if isinstance(node.op, Elemwise | CAReduce) else None
        yield node, operation, depend


def has_kinks(values: Sequence[Variable], theta: Variable) -> bool:
    """Whether an operation on the way from `theta` to `values` bends, jumps or chooses."""
    for node, operation, _ in _way(values, theta):
        chooses = not all(map(is_float, node.outputs))  # conditions, places are no floats
        if chooses or isinstance(operation, _BENDS) or isinstance(node.op, SortOp):
            return True
    return False


FAMILIES = ("logit", "log", "normal", "probit")
#: K' of l' = a - b K'(v); probit has another form.
_KERNELS: dict[str, Callable[[float], float]] = {"logit": expit, "log": math.exp, "normal": float}
#: Where slopes tell a and b apart if one is much larger than the other; elsewhere, 0 and 1.
_FAR = {"log": (-300.0, 300.0), "normal": (0.0, 1e12)}
_ROWS, _TOLERANCE = 512, 1e-9  # rows of the numerical check; a few hundred roundings of float64


@dataclass(frozen=True, eq=False)
class Predictor:
    """The linear predictor of a row graph, and the family of its rows.

    The family is that of v: the variable of the graph times `sign`.  `affine` maps ones (rows,),
    zeros for the cuts, with rows of shapes `tails`, and data to the variable's offset (rows,) and
    derivatives (rows, ...); `slope` maps variable and data to (rows,) dl/dv; data are the graph's
    `leaves`.
    `single`: float32 holds all data that multiply group effects or coefficients.
    """

    family: str
    sign: float
    affine: Callable[..., Any]
    slope: Callable[..., Any]
    leaves: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]
    single: bool

    @property
    def counts(self) -> bool:
        """Whether rows are counts or choices, of which some outcome may be rare."""
        return self.family != "normal"

    def affine_form(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """(rows,) offset of v, and (k, rows) weights of each cut."""
        data = [np.ascontiguousarray(arrays[k]) for k in self.leaves]
        n = len(arrays[0])
        zeros = [np.zeros((n, *tail)) for tail in self.tails]
        offset, *weights = self.affine(np.ones(n), *zeros, *data)
        return self.sign * offset, [np.ascontiguousarray(self.sign * by_row(w).T) for w in weights]

    def coefficients(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(rows,) numbers a and b of each row; both 0 where the row is impossible."""
        data = [np.ascontiguousarray(arrays[k]) for k in self.leaves]
        n = len(arrays[0])

        def slope(v: float) -> np.ndarray:
            return np.asarray(self.sign * self.slope(np.full(n, self.sign * v), *data))

        places = _FAR.get(self.family, (0.0, 1.0))
        a, b = _solve(self.family, slope(places[0]), slope(places[1]), places)
        usable = np.isfinite(a) & np.isfinite(b) & (b >= 0.0)
        a, b = np.where(usable, a, 0.0), np.where(usable, b, 0.0)
        size = np.maximum(np.abs(a), b)
        for x in (a, b):  # integers where they are counts: their scores vanish where they should
            nearest = np.rint(x)
            nothing = 1e-99 if self.family in _FAR else 1e-13
            slack = np.where(nearest == 0.0, nothing * size, 1e-13 * np.abs(nearest))
            np.copyto(x, nearest, where=np.abs(x - nearest) <= slack)
        return a, b


#: A predictor, if there is one, and one public sentence: its family, or why there is none.
Recognised = tuple[Predictor | None, str]


def recognise(engine: RowEngine, compile_kwargs: dict[str, Any] | None = None) -> Recognised:
    """The linear predictor of a model, if its rows have one."""
    if not engine.one_row_per_unit:
        return None, "A privacy unit may have several rows, whose scores add up."
    functions = engine.groups[0].functions
    linear = all(jacobian is not None for jacobian in functions.constant_jacobians)
    return predictor_of(functions.graph, functions.ordered, linear, compile_kwargs)


def predictor_of(
    graph: RowGraph,
    cuts: Sequence[Cut],
    linear: bool,
    compile_kwargs: dict[str, Any] | None = None,
) -> Recognised:
    """The linear predictor of a row graph; `linear`: all shared values are affine in theta."""
    if not linear:
        return None, (
            f"Some parameters do not reach {graph.quoted} linearly (a scale, or a product of "
            "parameters)."
        )
    variable = linear_predictor(graph)
    if variable is None:
        return None, (
            f"The parameters do not reach {graph.quoted} through one linear predictor per row."
        )
    etas = [cut.eta for cut in cuts]
    v = pt.vector("v", dtype="float64")
    [loglik] = clone_replace([graph.loglik], {variable: v}, rebuild_strict=False)
    found = _family(loglik, v, graph)
    if found is None:
        return None, f"The log-likelihood of {graph.quoted} is of no known concave family."
    slope = pytensor.grad(loglik.sum(), v, disconnected_inputs="ignore")
    ones = pt.vector("ones", dtype="float64")
    weights = pytensor.grad(None, etas, known_grads={variable: ones}, disconnected_inputs="ignore")
    outputs = [variable, *[w.astype("float64") for w in weights]]
    used = set(ancestors([slope, *outputs]))
    leaves = tuple(k for k, leaf in enumerate(graph.leaves) if leaf.block in used)
    blocks = [graph.leaves[k].block for k in leaves]
    family, sign = found
    predictor = Predictor(
        family,
        sign,
        compile_function([ones, *etas, *blocks], outputs, compile_kwargs),
        compile_function([v, *blocks], slope, compile_kwargs),
        leaves,
        tuple(tuple(cut.phi.type.shape[cut.kind != "copy" :]) for cut in cuts),
        not any(
            np.result_type(leaf.block.type.dtype, "float32") != "float32"
            for cut, weight in zip(cuts, weights, strict=True)
            for leaf in graph.leaves
            if cut.kind != "dot" and leaf.block in ancestors_without_shapes([weight])
        ),
    )
    return predictor, f"{graph.quoted} is of the {family} family in one linear predictor per row."


def _solve(
    family: str, first: np.ndarray, second: np.ndarray, places: tuple[float, float] = (0.0, 1.0)
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers a and b of rows from their slopes at two places; probit: at 0 and 1."""
    if family == "probit":  # the slope at 0 is a phi(0)/Phi(0)
        a = first * math.sqrt(math.pi / 2.0)
        return a, np.where((first != 0.0) | (second != 0.0), np.ones_like(a), 0.0)
    k0, k1 = map(_KERNELS[family], places)
    b = (first - second) / (k1 - k0)
    return first + b * k0, b


def _draw(variable: Variable, rng: np.random.Generator) -> np.ndarray:
    dtype = np.dtype(variable.type.dtype)
    if dtype.kind == "f":
        x = rng.standard_normal(_ROWS)
        return np.where(rng.uniform(size=_ROWS) < 0.5, np.exp(x), x).astype(dtype)
    return rng.integers(0, 2 if dtype.kind == "b" else 7, _ROWS).astype(dtype)


def _family(loglik: Variable, v: Variable, graph: RowGraph) -> tuple[str, float] | None:
    """The family and sign that hold for every value of what the data put into the terms in v.

    Values through which data enter, conditions too, are drawn one by one, so a rare branch is seen.
    """
    leaves = {leaf.block for leaf in graph.leaves}
    doors: list[Variable] = []
    stack, seen = [loglik], set()
    while stack:
        x = stack.pop()
        if x in seen or isinstance(x, Constant | SharedVariable) or x is v:
            continue
        seen.add(x)
        behind = ancestors_without_shapes([x])
        if v in behind:
            assert x.owner is not None
            stack.extend(x.owner.inputs)
        elif not leaves.isdisjoint(behind):
            doors.append(x)
    if any(door.type.ndim != 1 for door in doors):
        return None
    # a probe need not find that a predictor is cut off, or bent, far out
    if has_bends(loglik, v, equalities=True):
        return None
    chosen = has_bends(loglik, v, equalities=False)
    inputs = [door.type() for door in doors]
    [value] = clone_replace([loglik], dict(zip(doors, inputs, strict=True)), rebuild_strict=False)
    slope = pytensor.grad(value.sum(), v, disconnected_inputs="ignore")
    shapes = [leaf.block for leaf in graph.leaves]
    function = pytensor.function(
        [v, *inputs, *shapes], [value, slope], mode=INTERPRETED, on_unused_input="ignore"
    )
    rng = np.random.default_rng(20260)
    drawn = [_draw(door, rng) for door in doors]
    blanks = [
        np.ones((_ROWS, *[s or 1 for s in block.type.shape[1:]]), block.type.dtype)
        for block in shapes
    ]

    def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):
            found = [function(np.full(_ROWS, x), *drawn, *blanks) for x in points]
        return np.array([f[0] for f in found]), np.array([f[1] for f in found])

    near = np.concatenate([[0.0, 1.0], np.linspace(-4.0, 4.0, 11)])
    far = np.array([5.0, 7.0, 10.0, 15.0, 20.0, 25.0, 30.0])
    further = np.concatenate([far, 10.0 ** np.arange(2, 13)])
    much = np.append(far, [40.0, 100.0, 300.0])
    places = {
        "probit": near,  # further out it may underflow
        "normal": np.concatenate([near, further, -further]),
        "log": np.concatenate([near, much, -much]),
    }
    for sign in (1.0, -1.0):
        for family in FAMILIES:
            if family == "normal" and chosen:
                continue
            points = places.get(family, np.concatenate([near, far, -far]))
            values, slopes = evaluate(sign * points)
            possible = np.isfinite(values)
            rows = possible.all(axis=0)
            if np.array_equal(possible.any(axis=0), rows) and _holds(
                family, points, values[:, rows], sign * slopes[:, rows]
            ):
                return family, sign
    return None


def _holds(family: str, points: np.ndarray, values: np.ndarray, slopes: np.ndarray) -> bool:
    """Whether rows (points, rows) are of the family; some of them must be strictly concave."""
    if values.shape[1] < 16 or not np.isfinite(slopes).all():
        return False
    a, b = _solve(family, slopes[0], slopes[1])
    place = FAMILIES.index(family)
    expected, slope = (np.repeat(points[:, None], len(a), axis=1) for _ in range(2))
    for v, dv in zip(expected, slope, strict=True):
        linear.evaluate(place, a, b, v)
        linear.differentiate(place, a, b, dv)
    v, size = points[:, None], np.abs(a) + np.abs(b)
    if family == "normal":
        growth = v * v
    else:  # 1 - p of a probability p that was computed first has lost digits
        growth = np.exp(v) if family == "log" else 1e-6 * np.exp(v)
    scale = _TOLERANCE * size * (1.0 + np.abs(v))
    more = _TOLERANCE * size * growth
    close = np.abs(values - values[0] - expected + expected[0]) <= scale + more
    close &= np.abs(slopes - slope) <= (scale if family == "normal" else scale + more)
    concave = np.abs(a) if family == "probit" else b
    return bool(close.all() and np.count_nonzero(concave > 0.0) >= 16)
