"""Ways to offer records something new; each leaves their conditional distribution invariant.

Given the parameters, the records have density prod f(x_i) g(sum t(x_i)) prod l_i(x_i): the model,
the releases, and whatever else depends on single records.

The loops over records are compiled for the density of the releases of one model, once per process
and not cached on disk. They keep up to date `rows` (n, M) float64, what each record adds to the
sum, and `total` (M + P,) float64, the sum of the rows of the first `n_present` records
(others add nothing), then what was published. `uniforms` are uniform random numbers.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from numba import njit
from pytensor.compile.mode import Mode
from pytensor.compile.ops import DeepCopyOp
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import ancestors, toposort
from pytensor.link.numba.dispatch.basic import numba_funcify_and_cache_key
from pytensor.link.utils import compile_function_src
from pytensor.scalar import get_scalar_type
from pytensor.tensor.basic import Alloc, Join
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import Subtensor

from pymc_dp.base.jit import compiled
from pymc_dp.base.threads import FLAGS
from pymc_dp.published.innovations import (
    HIGHEST_SCORE,
    Draw,
    depends_on_variables,
    innovation,
    known,
    normal_scores,
)
from pymc_dp.published.reading import (
    Function,
    Reading,
    State,
    by_row,
    check_proposal,
    compiled_exactly,
    forward,
    is_drawn,
    placed,
)
from pymc_dp.records.ancestry import SHAPE_OPS

_FEW = 64  # entries, which loops may write out one by one
_SIGNS = {"Add": " + ", "Sub": " - ", "Mul": " * ", "TrueDiv": " / "}
_BLOCK = 4096  # random numbers of a kind that are drawn at once
#: What loops over entries can do: arithmetic, and moves of entries to known places.
_COMPUTED = (Elemwise, CAReduce, Dot)
_MOVED = (DimShuffle, Reshape, SpecifyShape, Subtensor, Alloc, DeepCopyOp)
#: Simplified in the usual ways, but with one operation a step.
_SIMPLER = Mode("py", RewriteDatabaseQuery(["fast_run"], exclude=["fusion", "inplace", "BlasOpt"]))
_JOINT_CELLS = 32  # of all discrete variables of a record, up to which they are drawn jointly


# -- what is offered ------------------------------------------------------------------------------


class Offers(ABC):
    """What the ways have in common: compiled rows, and the density of the releases."""

    _move: Function  # what a sweep asks of the model
    _replace: Callable[..., tuple[int, float]] | None = None
    _constants: list[np.ndarray] | None  # further arguments; None if the model is asked before

    def __init__(self, reading: Reading) -> None:
        self.reading, self._n_values = reading, len(reading.latents)
        #: Random numbers of a sweep: how they are drawn, and their shapes.
        self._random: list[tuple[Draw, tuple[int, ...]]] = [
            (np.random.Generator.standard_exponential, (reading.n,))
        ]
        self.published = reading.published()
        self.density = density_of(reading)
        self.births_and_deaths = bound(births_and_deaths, self.density)
        self._rows = Function(reading.inputs, self._factors(reading.values))

    def _factors(self, values: Sequence[Variable]) -> list[Variable]:
        """Rows and local densities of other values of the records."""
        return self.reading.factors(dict(zip(self.reading.values, values, strict=True)))

    def _offered(self, values: Sequence[Variable], log_ratio: Any = 0.0) -> list[Variable]:
        """New values of the records, rows, local densities (-inf at an end of a transform), and
        what else the logarithms of acceptance ratios have.
        """
        rows, local = self._factors(values)
        outside = [by_row(pt.or_(pt.isinf(v), pt.isnan(v))) > 0 for v in values]
        local = pt.switch(pt.any(pt.stack(outside), axis=0), -np.inf, local)
        return [*values, rows, local, pt.zeros(self.reading.n) + log_ratio]

    def state(self, point: Sequence[np.ndarray], n_present: int) -> State:
        """Records with their rows and sum, freshly computed."""
        rows, local = self._rows(*point)
        rows = np.ascontiguousarray(rows)
        total = np.concatenate([rows[:n_present].sum(axis=0), self.published])
        return State([np.array(v) for v in point], rows, total, local, n_present)

    def begin(self, rng: np.random.Generator) -> None:
        """Begin a chain: with new random streams, and with what is observed by now."""
        self._rows.reseed(rng)
        self._move.reseed(rng)
        self._stock: list[tuple[np.ndarray, ...]] = []
        self.published = self.reading.published()

    @abstractmethod
    def __call__(self, state: State, rng: np.random.Generator) -> tuple[float, float]:
        """One sweep over all records: which part of them moved, and the lowest log acceptance."""

    def _drawn(self, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Random numbers of a sweep; those of several are drawn at once."""
        if not self._stock:
            sweeps = max(1, _BLOCK // max(math.prod(shape) for _, shape in self._random))
            many = [draw(rng, (sweeps, *shape)) for draw, shape in self._random]
            self._stock = list(zip(*many, strict=True))
        return self._stock.pop()

    def _one_by_one(
        self, state: State, exponential: np.ndarray, *asked: Any
    ) -> tuple[float, float]:
        """Offer each record in turn what the model answers when it is `asked`."""
        move = self._move
        if self._replace is None:
            try:
                loops = _Loops(dict(zip(move.inputs, move.asked(asked), strict=True)), move.outputs)
                answer, self._constants = _per_density(loops.records()), loops.constants
            except NotImplementedError:
                answer, self._constants = _answered, None
            keep = keeping([v.type.ndim for v in self.reading.values])
            self._replace = replacing(self.density, state.rows.shape[1], keep, answer)
        if self._constants is None:
            asked = tuple(map(np.ascontiguousarray, move(*asked)))
        else:
            asked = (*move.asked(asked), *self._constants)
        n_accepted, lowest = self._replace(
            asked,
            tuple(state.point[: self._n_values]),
            state.rows,
            state.local,
            state.total,
            exponential,
            state.n_present,
        )
        return n_accepted / len(state.rows), lowest


class Prior(Offers):
    """Independent records from the model, given the parameters (Ju et al. 2022, Algorithm 1)."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        model = reading.model
        given = reading.constrained(reading.others)
        values, inputs = [], []
        for rv, value in zip(reading.latents, reading.values, strict=True):
            found, here = innovation(rv), placed(rv, given)
            given[rv] = here
            if found is not None and found.drawn is not None:
                u = pt.tensor(dtype="float64", shape=(None,) * rv.type.ndim)
                given[rv] = found.restored(here, u)
                inputs.append(u)
                self._random.append((found.drawn, reading.at_start(value).shape))
            values.append(forward(model, rv, given[rv], here))
        parameters = reading.inputs[len(values) :]
        self._move = Function([*parameters, *inputs], self._offered(values))

    def draw(
        self, state: State, rng: np.random.Generator
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """New values of all records, their rows, and their local densities."""
        parameters = state.point[self._n_values :]
        *values, rows, local, _ = self._move(*parameters, *self._drawn(rng)[1:])
        return values, rows, local

    def __call__(self, state: State, rng: np.random.Generator) -> tuple[float, float]:
        """One sweep."""
        exponential, *fresh = self._drawn(rng)
        parameters = state.point[self._n_values :]
        return self._one_by_one(state, exponential, *parameters, *fresh)


class Soma(Prior):
    """Single offers to all records at once (Xiong & Ju 2025).

    An offer that suits one record badly may suit another, so fewer are rejected where the releases
    are precise. Each costs as much as a sweep of the other ways, so there are few.
    """

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._swap = bound(swap_offers, self.density)

    def __call__(self, state: State, rng: np.random.Generator) -> tuple[float, float]:
        """As many offers as the square root of the number of records; padding is drawn again."""
        values, rows, local = self.draw(state, rng)
        n = state.n_present
        n_offers = math.isqrt(n)
        places = np.full(n_offers, -1, dtype=np.int64)
        finite = np.isfinite(local)
        order = np.flatnonzero(finite[:n_offers])  # the others would be refused
        n_accepted, lowest = self._swap(
            state.rows,
            np.ascontiguousarray(rows[order]),
            state.total,
            rng.random((len(order), 2)),
            n,
            places,
        )
        padding = n + np.flatnonzero(finite[n:])
        for mine, new in zip(state.point, values, strict=False):
            for offer, place in zip(order, places, strict=False):
                if place >= 0:
                    mine[place] = new[offer]
            mine[padding] = new[padding]
        state.rows[padding] = rows[padding]
        return n_accepted / max(n_offers, 1), lowest


class Crank(Offers):
    """Autoregressive moves of the normal scores of the records (preconditioned Crank-Nicolson).

    Reversible for the model, so only the releases decide. Records too far in a tail to come back
    stay. The correlation is learned while the chain tunes: towards 0 where nearly all moves pass.
    """

    _TARGET = 0.5

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        model = reading.model
        given = reading.constrained(model.free_RVs)
        before = dict(given)
        rho = pt.scalar("rho", dtype="float64")
        noise, uniforms, values, limited = [], [], [], []
        found = known(reading, reading.latents, normal_scores)
        for rv in reading.latents:
            if rv not in found:
                raise ValueError(
                    f"proposal='pcn' needs normal scores from which records come back; none are "
                    f"known for `{rv.name}`. Use proposal='prior'."
                )
            scores = found[rv]
            z, w = (pt.tensor(dtype="float64", shape=(None,) * rv.type.ndim) for _ in range(2))
            old, new = placed(rv, before), placed(rv, given)
            score = scores.standardised(old, before[rv], w)
            moved = rho * score + pt.sqrt(1.0 - rho**2) * z
            if scores.limited:  # both ends of a move, so that it is refused both ways
                limited.append(by_row(pt.maximum(score, moved) > HIGHEST_SCORE))
            x = scores.restored(new, moved)
            given[rv] = x
            values.append(forward(model, rv, x, new))
            noise.append(z)
            uniforms.append(w)
        far = sum(limited, pt.zeros(reading.n)) > 0
        graphs = self._offered(values, pt.switch(far, -np.inf, 0.0))
        self._move = Function([*reading.inputs, rho, *noise, *uniforms], graphs)
        shapes = [reading.at_start(rv).shape for rv in reading.latents]
        normal, uniform = np.random.Generator.standard_normal, np.random.Generator.random
        self._random += [(draw, shape) for draw in (normal, uniform) for shape in shapes]

    def begin(self, rng: np.random.Generator) -> None:
        """Begin a chain."""
        super().begin(rng)
        self._log_odds = 0.0  # of the correlation
        self._adaptations = 0

    def adapt(self, acceptance: float) -> None:
        """Learn from the acceptance of a tuning iteration."""
        self._adaptations += 1
        self._log_odds += (self._TARGET - acceptance) * 4.0 / math.sqrt(self._adaptations)
        self._log_odds = min(max(self._log_odds, -6.0), 12.0)

    def __call__(self, state: State, rng: np.random.Generator) -> tuple[float, float]:
        """One sweep."""
        rho = np.asarray(1.0 / (1.0 + math.exp(-self._log_odds)))
        exponential, *fresh = self._drawn(rng)
        return self._one_by_one(state, exponential, *state.point, rho, *fresh)


class Enumerate(Offers):
    """Draws of discrete records from their full conditionals, jointly up to 32 cells."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        supports = [self._support(rv) for rv in reading.latents]
        widths = [math.prod(reading.at_start(rv).shape[1:]) for rv in reading.latents]
        coordinates = [
            (k, column, support)
            for k, (support, width) in enumerate(zip(supports, widths, strict=True))
            for column in range(width)
        ]
        joint = math.prod(len(support) for _, _, support in coordinates)
        self._blocks = [coordinates] if joint <= _JOINT_CELLS else [[c] for c in coordinates]
        graphs = [reading.row_log_prior(), *self._factors(reading.values)]
        self._move = Function(reading.inputs, graphs)
        self._choose = bound(choose_cells, self.density)

    def _support(self, rv: Variable) -> np.ndarray:
        """Possible values of each entry."""
        name, found = rv.owner.op.name, rv.owner.op.dist_params(rv.owner)
        if name == "bernoulli":
            return np.arange(2)
        if name == "categorical":
            return np.arange(self.reading.at_start(found[0]).shape[-1])
        if name not in ("binomial", "beta_binomial", "discrete_uniform"):
            raise ValueError(
                f"proposal='enumerate' needs finitely many values; `{rv.name}` is {name}. Use "
                "'prior'."
            )
        low, high = found if name == "discrete_uniform" else (pt.zeros(()), found[0])
        if depends_on_variables(low) or depends_on_variables(high):
            raise ValueError(
                f"proposal='enumerate': the values that `{rv.name}` can take depend on unknown "
                "parameters. Use 'prior'."
            )
        low, high = self.reading.at_start(low).min(), self.reading.at_start(high).max()
        return np.arange(int(low), int(high) + 1)

    def __call__(self, state: State, rng: np.random.Generator) -> tuple[float, float]:
        """One sweep."""
        n, changed = len(state.rows), 0
        for block in self._blocks:
            cells = list(itertools.product(*[support for _, _, support in block]))
            chosen = np.full(n, -1, dtype=np.int64)
            log_weights, rows = np.empty((len(cells), n)), []
            for c, cell in enumerate(cells):
                point = [v.copy() for v in state.point]
                here = np.ones(n, dtype=np.bool_)
                for (k, column, _), entry in zip(block, cell, strict=True):
                    flat = point[k].reshape(n, -1)
                    here &= flat[:, column] == entry
                    flat[:, column] = entry
                chosen[here] = c
                log_prior, found, local = self._move(*point)
                log_weights[c] = log_prior + local
                rows.append(found)
            log_weights[np.isnan(log_weights)] = -np.inf
            changed += self._choose(
                state.rows,
                np.ascontiguousarray(np.stack(rows)),
                log_weights,
                state.total,
                rng.random(n),
                state.n_present,
                chosen,
            )
            taken = np.array(cells)[chosen]
            for j, (k, column, _) in enumerate(block):
                state.point[k].reshape(n, -1)[:, column] = taken[:, j]
        return changed / (n * len(self._blocks)), 0.0


#: ``proposal(current, parameters)``, dicts of tensors by name: the proposed records by name, and
#: (n,) log q(current | proposed) - log q(proposed | current).
Proposal = Callable[[dict[str, Variable], dict[str, Variable]], tuple[dict[str, Any], Any]]


class Written(Offers):
    """A proposal written by the user."""

    def __init__(self, reading: Reading, proposal: Proposal) -> None:
        super().__init__(reading)
        model = reading.model
        given = reading.constrained(model.free_RVs)
        current = {rv.name: given[rv] for rv in reading.latents}
        parameters = {rv.name: given[rv] for rv in reading.others}
        proposed, log_ratio = proposal(current, parameters)
        if set(proposed) != set(current):
            raise ValueError(
                f"The proposal must return new records for exactly {sorted(current)}, by name."
            )
        before = reading.row_log_prior()
        ratio = pt.zeros(reading.n) + log_ratio
        new = {
            rv: pt.as_tensor_variable(proposed[rv.name]).astype(rv.type.dtype)
            for rv in reading.latents
        }
        check_proposal(reading, given, [*new.values(), ratio])
        values = []
        for rv, x in new.items():
            here = placed(rv, given)
            given[rv] = x
            values.append(forward(model, rv, x, here))
        after = clone_replace(before, dict(zip(reading.values, values, strict=True)))
        self._move = Function(reading.inputs, self._offered(values, after - before + ratio))

    def __call__(self, state: State, rng: np.random.Generator) -> tuple[float, float]:
        """One sweep."""
        return self._one_by_one(state, *self._drawn(rng), *state.point)


# -- the density of the releases ------------------------------------------------------------------


Density = Callable[[np.ndarray], float]
#: Of functions that call a compiled density: they are compiled again for each one.
_per_density = njit(nogil=True, error_model="numpy")


def density_of(reading: Reading) -> Density:
    """The log-density of all releases as a compiled function of `total`; -inf where it is NaN."""
    total = reading.total
    try:
        loops = _Loops({total: np.zeros(total.type.shape)}, [reading.log_density])
        log_density = _per_density(loops.number())
    except NotImplementedError:
        code = compiled_exactly([total], [reading.log_density]).vm.jit_fn
        log_density = _per_density(lambda total: code(total)[0].item())

    @_per_density
    def density(total: np.ndarray) -> float:
        found = log_density(total)
        return found if not math.isnan(found) else -math.inf

    return density


class _Loops:
    """Graphs as code of loops over their entries: one for each sum, and one over all records.

    PyTensor makes an array in each step, which takes most of the time where steps or entries are
    few. NotImplementedError if there is more than arithmetic, sums (products, maxima), and moves
    of entries to known places. `examples` of all inputs tell their shapes.
    """

    def __init__(self, examples: Mapping[Variable, np.ndarray], graphs: Sequence[Variable]) -> None:
        if any(map(is_drawn, ancestors(graphs))):
            raise NotImplementedError
        simpler = compiled_exactly(list(examples), graphs, mode=_SIMPLER).maker.fgraph
        self._graphs = simpler.outputs
        self._names = {v: f"x{k}" for k, v in enumerate(simpler.inputs)}  # of inputs, then of sums
        self._values = {v: v.data for v in ancestors(self._graphs) if isinstance(v, Constant)}
        self._numbers: dict[Variable, np.ndarray] = {}  # one for every entry of every variable
        self._owners: list[Variable] = []  # whose numbers follow each other,
        self._ends = [0]  # and up to where
        self.constants: list[np.ndarray] = []  # large ones are further arguments
        self._known: dict[str, Any] = {"np": np}  # functions and constants of the code
        self._functions: dict[tuple[Any, ...], str] = {}
        self._lines: list[str] = []
        given = dict(zip(simpler.inputs, examples.values(), strict=True))
        for v, x in (given | self._values).items():
            self._number(v, np.shape(x))
        for node in toposort(self._graphs):
            self._read(node)

    def _number(self, v: Variable, shape: tuple[int, ...]) -> None:
        start = self._ends[-1]
        self._ends.append(start + math.prod(shape))
        self._numbers[v] = np.arange(start, self._ends[-1]).reshape(shape)
        self._owners.append(v)

    def _read(self, node: Any) -> None:
        """Entries are computed, or those of other variables; what no input changes has values."""
        op, [v, *more], inputs = node.op, node.outputs, node.inputs
        if isinstance(op, SHAPE_OPS) or all(x in self._values for x in inputs):
            found: list[list[Any]] = [[None] for _ in node.outputs]
            op.perform(node, [self._values.get(x, self._numbers[x]) for x in inputs], found)
            for v, [x] in zip(node.outputs, found, strict=True):
                self._values[v] = x
                self._number(v, np.shape(x))
            return
        shapes = [self._numbers[x].shape for x in inputs]
        whole = isinstance(op, CAReduce) and not v.type.ndim
        if more or ((whole or isinstance(op, Dot)) and v.type.dtype != "float64"):
            raise NotImplementedError(op)
        if isinstance(op, Join):  # has an axis among its inputs in PyMC 5
            moved = [self._numbers[x] for x in inputs if x.type.ndim]
            axis = op.axis if len(moved) == len(inputs) else int(self._values[inputs[0]])
            self._numbers[v] = np.concatenate(moved, axis=axis)
        elif isinstance(op, _MOVED) and all(x in self._values for x in inputs[1:]):
            output: list[Any] = [None]
            op.perform(
                node, [self._numbers[inputs[0]], *map(self._values.get, inputs[1:])], [output]
            )
            self._numbers[v] = output[0]
        elif not isinstance(op, _COMPUTED) or 0 in sum(shapes, ()):
            raise NotImplementedError(op)
        elif isinstance(op, Elemwise):
            self._number(v, np.broadcast_shapes(*shapes))
        elif isinstance(op, Dot):
            self._number(v, shapes[0][:-1] + shapes[1][1:])
        else:
            self._number(v, () if whole else tuple(np.delete(shapes[0], op.axis)))
        if whole:
            s, identity = f"s{len(self._names)}", self._name(float(op.scalar_op.identity))
            self._lines.append(f"    {s} = {identity}")
            call = self._call(v, [v, v], [s, self._loop(inputs[0])])
            self._lines.append(f"        {s} = {call}")
            self._names[v] = s

    def number(self) -> Callable[..., float]:
        """The function of a graph without axes."""
        self._lines += [f"        found = {self._loop(self._graphs[0])}", "    return found"]
        return self._function()

    def records(self) -> Callable[..., tuple[np.ndarray, ...]]:
        """The function of graphs of shape (n, ...)."""
        numbers = [self._numbers[v] for v in self._graphs]
        if sum(x[:1].size for x in numbers) > _FEW:
            raise NotImplementedError
        for j, (v, x) in enumerate(zip(self._graphs, numbers, strict=True)):
            self._lines.append(f"    o{j} = np.empty({x.size}, np.{v.type.dtype})")
        self._lines.append(f"    for k in range({len(numbers[0])}):")
        known: dict[Any, str] = {}
        for j, x in enumerate(numbers):
            columns = x.reshape(len(x), -1 if x.size else 0).T
            for c, column in enumerate(columns):
                entry = self._entry(column, known)
                self._lines.append(f"        o{j}[k * {len(columns)} + {c}] = {entry}")
        outputs = [f"o{j}.reshape({x.shape})" for j, x in enumerate(numbers)]
        self._lines.append(f"    return {', '.join(outputs)}")
        return self._function()

    def _function(self) -> Callable[..., Any]:
        inputs = {x: v for v, x in self._names.items() if v.owner is None}
        names = [*inputs, *[f"y{j}" for j in range(len(self.constants))]]
        views = [f"    {x} = {x}.ravel()" for x, v in inputs.items() if v.type.ndim > 1]
        source = "\n".join([f"def function({', '.join(names)}):", *views, *self._lines])
        return compile_function_src(source, "function", self._known)

    def _name(self, thing: Any) -> str:
        self._known[f"c{len(self._known)}"] = thing
        return f"c{len(self._known) - 1}"

    def _call(self, v: Variable, inputs: Sequence[Variable], given: Sequence[str]) -> str:
        """The scalar operation of `v` with what is `given` for inputs of these types."""
        op = v.owner.op.scalar_op
        sign = _SIGNS.get(type(op).__name__)
        if sign is not None and all(x.type.dtype == "float64" for x in inputs):
            return sign.join(given)  # compiled faster than a function
        key = op, *[x.type.dtype for x in inputs]
        if key not in self._functions:
            node = op.make_node(*[get_scalar_type(dtype=dtype)() for dtype in key[1:]])
            with FLAGS, pytensor.config.change_flags(numba__fastmath=False):
                function, _ = numba_funcify_and_cache_key(op, node=node)
            kind = self._name(np.dtype(v.type.dtype).type)
            self._functions[key] = f"{kind}({self._name(function)}"
        return f"{self._functions[key]}({', '.join(given)}))"

    def _loop(self, v: Variable) -> str:
        """A loop over the entries of `v`; what stands for one of them in it."""
        numbers = self._numbers[v].ravel()
        self._lines.append(f"    for k in range({len(numbers)}):")
        return self._entry(numbers, {})

    def _entry(self, numbers: np.ndarray, known: dict[Any, str]) -> str:
        """What stands for entry ``numbers[k]``; `known` is what the loop has already."""
        j = int(np.searchsorted(self._ends, numbers[0], side="right")) - 1
        v, places = self._owners[j], numbers - self._ends[j]
        if places.min() < 0 or numbers.max() >= self._ends[j + 1]:
            raise NotImplementedError  # of several variables
        first, step = int(places[0]), int(places[-1] - places[0]) // max(len(places) - 1, 1)
        line = np.array_equal(places, first + step * np.arange(len(places)))
        key = (v, first, step) if line else (v, places.tobytes())
        if key in known:
            return known[key]
        if v in self._values:
            found = self._constant(np.ravel(self._values[v])[places])
        elif v in self._names:
            place = f"k * {step} + {first}" if line else f"{self._constant(places)}"
            found = self._names[v] + (f"[{place}]" if v.type.ndim else ".item()" * (not v.owner))
        else:
            computed, found = self._computed(v, places, known), f"v{len(self._lines)}"
            self._lines.append(f"        {found} = {computed}")
        return known.setdefault(key, found)

    def _constant(self, values: np.ndarray) -> str:
        if values.tobytes() == values[:1].tobytes() * len(values):  # zeros have signs
            return self._name(values[0])
        if len(values) <= _FEW:
            return f"{self._name(values)}[k]"
        self.constants.append(values)
        return f"y{len(self.constants) - 1}[k]"

    def _computed(self, v: Variable, places: np.ndarray, known: dict[Any, str]) -> str:
        """Entries of `v`, computed from those of the inputs."""
        op, inputs = v.owner.op, v.owner.inputs
        numbers, shape = [self._numbers[x] for x in inputs], self._numbers[v].shape
        if isinstance(op, Elemwise):
            where = [np.broadcast_to(x, shape).ravel()[places] for x in numbers]
            return self._call(v, inputs, [self._entry(x, known) for x in where])
        terms: list[Sequence[np.ndarray]]
        if isinstance(op, CAReduce):
            last = range(-len(op.axis), 0)
            columns = np.moveaxis(numbers[0], op.axis, last).reshape(math.prod(shape), -1)
            terms = [[column] for column in columns[places].T]
        else:
            length = len(numbers[1])
            row, column = np.divmod(places, numbers[1].size // length)
            left, right = numbers[0].reshape(-1, length), numbers[1].reshape(length, -1)
            terms = list(zip(left[row].T, right[:, column], strict=True))
        if len(terms) > _FEW:
            raise NotImplementedError
        products = [" * ".join(self._entry(x, known) for x in term) for term in terms]
        if isinstance(op, Dot):
            return " + ".join(products)
        return reduce(lambda one, other: self._call(v, [v, v], [one, other]), products)


# -- the loops over records -----------------------------------------------------------------------


@compiled(error_model="numpy")
def _exponentiate(weights: np.ndarray, highest: float) -> float:
    """Turn logarithms into weights relative to `highest`, in place; returns their sum."""
    mass = 0.0
    for c in range(weights.shape[0]):
        weights[c] = math.exp(weights[c] - highest)
        mass += weights[c]
    return mass


@compiled(error_model="numpy")
def _pick(weights: np.ndarray, left: float) -> int:
    """The first place at which the weights so far pass `left`, or the last of positive weight."""
    place = -1
    for c in range(weights.shape[0]):
        if weights[c] > 0.0:
            place = c
            left -= weights[c]
            if left < 0.0:
                break
    return place


def bound(loop: Callable[..., Any], density: Density) -> Callable[..., Any]:
    """A loop over records for one density: passing a compiled function takes a while."""
    return _per_density(lambda *given: loop(density, *given))


@_per_density
def _answered(*found: np.ndarray) -> tuple[np.ndarray, ...]:
    """What the model has answered already."""
    return found


def keeping(ndims: Sequence[int]) -> Callable[..., None]:
    """``keep(i, old, new)``: entry i of each array in `new`, (n, ...), takes its place in `old`."""
    at = [f"[{k}][i, j]" if ndim == 2 else f"[{k}][i]" for k, ndim in enumerate(ndims)]
    loops = [f"for j in range(new[{k}].shape[1]): " * (d == 2) for k, d in enumerate(ndims)]
    lines = [f"    {loop}old{x} = new{x}" for loop, x in zip(loops, at, strict=True)]
    source = "\n".join(["def keep(i, old, new):", *lines])
    return _per_density(compile_function_src(source, "keep", {}))


def replacing(
    density: Density, width: int, keep: Callable[..., None], answer: Callable[..., Any]
) -> Callable[..., tuple[int, float]]:
    """Compile: offer every record its proposal, in turn (Ju et al. 2022, Algorithm 1, step 2)."""

    @_per_density
    def replace(
        asked: tuple[np.ndarray, ...],
        values: tuple[np.ndarray, ...],
        rows: np.ndarray,
        local: np.ndarray,
        total: np.ndarray,
        exponential: np.ndarray,
        n_present: int,
    ) -> tuple[int, float]:
        """How many proposals were accepted, and the smallest log acceptance probability.

        When `asked`, the model answers new `values`, (n, M) rows that they would add, their (n,)
        local densities, and what else the log acceptance ratios have, but for the releases.
        `exponential` (n,) are standard exponential random numbers.
        """
        new = answer(*asked)
        proposed, offered, log_ratio = new[-3], new[-2], new[-1]
        moved = total.copy()
        current = density(total)
        n_accepted, lowest = 0, 0.0
        for i in range(rows.shape[0]):
            following = current
            if i < n_present and width > 0:
                for k in range(width):
                    moved[k] = total[k] - rows[i, k] + proposed[i, k]
                following = density(moved)
            log_alpha = following - current + (offered[i] - local[i] + log_ratio[i])
            if log_alpha < lowest:
                lowest = log_alpha
            if -exponential[i] < log_alpha:
                n_accepted += 1
                for k in range(width):
                    rows[i, k] = proposed[i, k]
                    if i < n_present:
                        total[k] = moved[k]
                current, local[i] = following, offered[i]
                keep(i, values, new)
        return n_accepted, lowest

    return replace


@_per_density
def choose_cells(
    density: Density,
    rows: np.ndarray,
    cells: np.ndarray,
    log_weights: np.ndarray,
    total: np.ndarray,
    uniforms: np.ndarray,
    n_present: int,
    chosen: np.ndarray,
) -> int:
    """Draw every record's cell from its full conditional distribution, in turn; how many changed.

    `cells` (C, n, M) is what each record would add in each cell, `log_weights` (C, n) the
    log-probability of each cell but for the releases; `uniforms` is (n,). `chosen` (n,) int64 holds
    the current cells, and receives the new ones.
    """
    n_cells, width = cells.shape[0], rows.shape[1]
    moved, weights = total.copy(), np.empty(n_cells)
    changed = 0
    for i in range(rows.shape[0]):
        highest = -math.inf
        for c in range(n_cells):
            weights[c] = log_weights[c, i]
            if i < n_present and width > 0 and weights[c] > -math.inf:
                for k in range(width):
                    moved[k] = total[k] - rows[i, k] + cells[c, i, k]
                weights[c] += density(moved)
            if weights[c] > highest:
                highest = weights[c]
        if highest == -math.inf:
            continue
        mass = _exponentiate(weights, highest)
        cell = _pick(weights, uniforms[i] * mass)
        changed += cell != chosen[i]
        chosen[i] = cell
        for k in range(width):
            if i < n_present:
                total[k] += cells[cell, i, k] - rows[i, k]
            rows[i, k] = cells[cell, i, k]
    return changed


@_per_density
def swap_offers(
    density: Density,
    rows: np.ndarray,
    offers: np.ndarray,
    total: np.ndarray,
    uniforms: np.ndarray,
    n_present: int,
    places: np.ndarray,
) -> tuple[int, float]:
    """Offer single proposals to all records at once (Xiong & Ju 2025, SOMA).

    `offers` (k, M) is what each offer would add; `uniforms` is (k, 2). `places` (k,) int64 receives
    the record, of the first `n_present`, that each offer replaced, or -1. Returns how many were
    accepted, and the smallest log acceptance probability.
    """
    width = rows.shape[1]
    moved, weights = total.copy(), np.empty(n_present)
    n_accepted, lowest = 0, 0.0
    current = density(total)
    for o in range(offers.shape[0]):
        highest = current
        for i in range(n_present):
            for k in range(width):
                moved[k] = total[k] - rows[i, k] + offers[o, k]
            weights[i] = density(moved)
            highest = max(highest, weights[i])
        mass = _exponentiate(weights, highest)
        places[o] = -1
        if not mass > 0.0:
            lowest = -math.inf
            continue
        place = _pick(weights, uniforms[o, 0] * mass)
        others = mass - weights[place] + math.exp(current - highest)
        log_alpha = math.log(mass) - math.log(others) if others > 0.0 else math.inf
        lowest = min(lowest, log_alpha)
        if math.log(uniforms[o, 1]) < log_alpha:
            n_accepted += 1
            places[o] = place
            for k in range(width):
                total[k] += offers[o, k] - rows[place, k]
                rows[place, k] = offers[o, k]
            current = density(total)
    return n_accepted, lowest


@_per_density
def births_and_deaths(
    density: Density,
    rows: np.ndarray,
    total: np.ndarray,
    log_prior: np.ndarray,
    n_present: int,
    uniforms: np.ndarray,
    exchangeable: bool,
    order: np.ndarray,
) -> int:
    """Moves of the number of records by one, up or down; returns the new number.

    `log_prior` (n + 1,) is the log-probability of 0, ..., n records; `uniforms` is (moves, 3). Any
    of `exchangeable` records may leave or come, else the last or the next; `order` (n,) int64, the
    places of the records, is reordered like the rows.
    """
    n, width = rows.shape
    moved = total.copy()
    current = density(total)
    for m in range(uniforms.shape[0]):
        birth = uniforms[m, 0] < 0.5
        if (birth and n_present == n) or (not birth and n_present == 0):
            continue
        place = n_present if birth else n_present - 1
        if exchangeable:
            low, high = (n_present, n) if birth else (0, n_present)
            other = min(low + int(uniforms[m, 1] * (high - low)), high - 1)
            order[place], order[other] = order[other], order[place]
            for k in range(width):
                rows[place, k], rows[other, k] = rows[other, k], rows[place, k]
        sign = 1.0 if birth else -1.0
        for k in range(width):
            moved[k] = total[k] + sign * rows[place, k]
        new = density(moved)
        following = n_present + 1 if birth else n_present - 1
        log_alpha = new - current + log_prior[following] - log_prior[n_present]
        if math.log(uniforms[m, 2]) < log_alpha:
            n_present, current = following, new
            total[:] = moved
    return n_present
