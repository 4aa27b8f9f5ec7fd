"""What a model of privatised statistics says about its confidential records.

A release is recognised by its density, not by how it was declared. Behind the density of an
observed variable stands a sum over records; in front of it only the sum, never a single record::

    records --> rows t_i (n, M) --> total T = sum of rows (M,) --> log-density g(T)

Every factor that depends on records is read in this way (Ju et al. 2022, Assumption 2, record
additivity), or must give one number per record: randomised response, measurements with noise of
their own, and other variables below a record. Factors that do neither are refused.

That no record changes the row, density or proposal of another is proved as for private data, by a
walk along the records' axis (:mod:`pymc_dp.records.lifter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.distributions.distribution import SymbolicRandomVariable
from pymc.logprob.utils import CheckParameterValue
from pymc.model import Model
from pymc.pytensorf import collect_default_updates, reseed_rngs
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, graph_inputs, toposort
from pytensor.scalar.basic import Add
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.random.type import RandomType

from pymc_dp.base.compat import advanced_indices
from pymc_dp.base.threads import INTERPRETED, exact
from pymc_dp.errors import NotFactorizable
from pymc_dp.records.ancestry import TAKES, ancestors_without_shapes, array_of, is_data
from pymc_dp.records.arithmetic import is_discrete, without_wrapping
from pymc_dp.records.graph import RowLeaf
from pymc_dp.records.lifter import Lifter, conjunction
from pymc_dp.records.proof import check_shared

_SEED = 7  # of records drawn for a check: a setting
_TRIALS = 20
#: What `Reading.factors` and `Reading.row_log_prior` give.
_LABELS = ("row of the statistic", "log-density of an observed variable", "log-density")


# -- functions compiled from a model --------------------------------------------------------------


class Function:
    """A compiled function with random streams of its own.

    PyMC's random variables share their generators with every function compiled from the model, so
    copies in other processes would repeat their draws. :meth:`reseed` renews them for each chain.
    Functions that are called rarely are not `compiled`.
    """

    def __init__(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], compiled: bool = True
    ) -> None:
        found = [v for v in graph_inputs(outputs) if isinstance(v, SharedVariable)]
        shared = dict.fromkeys(v for v in found if isinstance(v.type, RandomType))
        fresh = {v: pytensor.shared(np.random.default_rng()) for v in shared}
        data = {v: v.type() for v in found if v not in shared}
        self.outputs = clone_replace(list(outputs), fresh | data, rebuild_strict=False)
        self.inputs, self._data = [*inputs, *data.values()], list(data)
        updates = collect_default_updates(inputs=self.inputs, outputs=self.outputs)
        self._generators = list(fresh.values())
        self._call = compiled_exactly(
            self.inputs, self.outputs, updates, "NUMBA" if compiled else INTERPRETED
        )

    def reseed(self, rng: np.random.Generator) -> None:
        """New streams, drawn from `rng`."""
        if self._generators:
            reseed_rngs(self._generators, int(rng.integers(2**62)))

    def __call__(self, *values: Any) -> list[np.ndarray]:
        """The outputs; arrays go in as they are, of the inputs' own types."""
        return self._call(*self.asked(values))

    def asked(self, values: Sequence[Any]) -> tuple[np.ndarray, ...]:
        """Values of all `inputs`, ``pm.Data`` included; arrays in place of NumPy's scalars."""
        return (*map(np.asarray, values), *[v.get_value(borrow=True) for v in self._data])


def compiled_exactly(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    updates: dict[Variable, Variable] | None = None,
    mode: Any = "NUMBA",
) -> Any:
    """Compile without fastmath, which may leave tests for NaN out."""
    mode = exact(mode).including("random_make_inplace")
    outputs = _impossible_by_entry(outputs)
    function = pytensor.function(
        list(inputs), outputs, updates=updates, mode=mode, on_unused_input="ignore"
    )
    function.trust_input = True
    return function


def _impossible_by_entry(outputs: Sequence[Variable]) -> list[Variable]:
    """Log-densities that are -inf exactly where their parameters are impossible.

    PyMC's checks raise an error or make all records impossible; without them, densities of
    impossible parameters may be finite. So each check is split into conditions on single entries.
    """
    found: dict[Variable, Variable] = {}
    for node in toposort(list(outputs)):
        inputs = [found.get(x, x) for x in node.inputs]
        if isinstance(node.op, CheckParameterValue):
            value, *conditions = inputs
            for entry in (entry for condition in conditions for entry in conjunction(condition)):
                fits = entry.type.ndim <= value.type.ndim
                switched = pt.switch(entry if fits else pt.all(entry), value, -np.inf)
                value = switched.astype(node.outputs[0].type.dtype)
            found[node.outputs[0]] = value
        elif any(x is not y for x, y in zip(inputs, node.inputs, strict=True)):
            again = node.clone_with_new_inputs(inputs, strict=False)
            found.update(zip(node.outputs, again.outputs, strict=True))
    return [found.get(x, x) for x in outputs]


def placed(rv: Variable, given: Mapping[Variable, Variable]) -> Variable:
    """The random variable with the variables behind it, but not itself, replaced."""
    others = {key: value for key, value in given.items() if key is not rv}
    return clone_replace([rv], others, rebuild_strict=False)[0]


def forward(model: Model, rv: Variable, x: Variable, here: Variable) -> Variable:
    """The value variable of records `x`; bounds of a transform are those of `here`."""
    transform = model.rvs_to_transforms[rv]
    value = x if transform is None else transform.forward(x, *here.owner.inputs)
    return value.astype(model.rvs_to_values[rv].type.dtype)


# -- records, rows and densities ------------------------------------------------------------------


@dataclass
class State:
    """Records of one chain and what they add up to."""

    point: list[np.ndarray]  # value variables of the records (n, ...), then of everything else
    rows: np.ndarray  # (n, M) what each record adds to the sum where it exists
    total: np.ndarray  # (M + P,) the sum over the records that exist, and what was published
    local: np.ndarray  # (n,) other log-densities of each record
    n_present: int  # how many of the records exist: the first ones

    def refresh(self) -> float:
        """Compute the sum again; returns how far it had drifted, relative to its terms."""
        rows = self.rows[: self.n_present]
        total, size = rows.sum(axis=0), np.abs(rows).sum(axis=0)
        drift = np.abs(total - self.total[: len(total)]) / np.where(size > 0.0, size, 1.0)
        self.total[: len(total)] = total
        return float(np.max(drift, initial=0.0))


@dataclass(frozen=True, eq=False)
class Reading:
    """A model, seen as parameters, records, and densities of what was published."""

    model: Model
    latents: list[Variable]  # random variables of the records, in the order of the model
    count: Variable | None  # random variable of the number of records, if confidential
    n: int  # number of records; the largest possible one if confidential
    rows: Variable  # (n, M) rows of all releases, side by side, as functions of value variables
    total: Variable  # (M + P,) input: the sum of the rows, then all published numbers
    log_density: Variable  # of all releases, a function of `total` alone
    observed: list[Variable]  # what was published: constants, or of pm.Data that may change
    local: Variable | None  # (n,) log-densities of all else that depends on single records

    @cached_property
    def all_records(self) -> list[Variable]:
        """The records of this step, and those of others about which something was published."""
        return list(dict.fromkeys([*self.latents, *records_of(self.model)]))

    @cached_property
    def fixed(self) -> list[tuple[Variable, Any]]:
        """All ``pm.Data`` and lengths of ``dims``, and copies of them; shapes of observed ones."""
        behind = ancestors([*self.latents, *self.model.logp(sum=False)])
        observed = [self.model.rvs_to_values[rv] for rv in self.model.observed_RVs]
        changing = set(ancestors(observed))
        data = [(v, array_of(v)) for v in dict.fromkeys(behind) if is_data(v)]
        return [(v, np.shape(x) if v in changing else np.array(x)) for v, x in data]

    def published(self) -> np.ndarray:
        """(P,) numbers that were published, as they are now."""
        return np.concatenate([[], *map(np.ravel, _numbers(self.observed))]).astype(float)

    @cached_property
    def values(self) -> list[Variable]:
        """Value variables of the records."""
        return [self.model.rvs_to_values[rv] for rv in self.latents]

    @cached_property
    def others(self) -> list[Variable]:
        """The free random variables that are not records: parameters, and the count."""
        return [rv for rv in self.model.free_RVs if rv not in self.latents]

    @cached_property
    def inputs(self) -> list[Variable]:
        """Value variables of the records, then of everything else."""
        return [self.model.rvs_to_values[rv] for rv in (*self.latents, *self.others)]

    @cached_property
    def start(self) -> dict[str, np.ndarray]:
        """The model's initial point."""
        return self.model.initial_point()

    @cached_property
    def at_the_start(self) -> list[np.ndarray]:
        """`inputs` at the initial point."""
        return [np.asarray(self.start[v.name]) for v in self.inputs]

    def at_start(self, variable: Variable) -> np.ndarray:
        """A variable of the model at the model's initial point."""
        return _at_start(self.model, self.model.replace_rvs_by_values([variable]))[0]

    def without_records(self) -> list[Variable]:
        """Free variables and Deterministics that do not depend on a record."""
        return [
            v
            for v in self.model.unobserved_RVs
            if not set(ancestors([v], blockers=self.others)) & set(self.latents)
        ]

    def factors(self, given: Mapping[Variable, Variable]) -> list[Variable]:
        """Rows, if all `n` records existed, and local densities, with value variables replaced."""
        rows = self.rows
        if self.count is not None:
            value = self.model.rvs_to_values[self.count]
            every = pt.constant(self.n, dtype=value.type.dtype)
            rows = clone_replace(rows, {value: every}, rebuild_strict=False)
        local = pt.zeros(self.n) if self.local is None else self.local
        found = clone_replace([rows, local], given, rebuild_strict=False)
        return [v.astype("float64") for v in found]

    def constrained(self, over: Sequence[Variable]) -> dict[Variable, Variable]:
        """The random variables `over`, each as a function of its value variable."""
        found: dict[Variable, Variable] = {}
        for rv in self.model.free_RVs:
            if rv in over:
                value = self.model.rvs_to_values[rv]
                transform = self.model.rvs_to_transforms[rv]
                x = value if transform is None else transform.backward(value, *rv.owner.inputs)
                [found[rv]] = clone_replace([x], found, rebuild_strict=False)
        return found

    def row_log_prior(self) -> Variable:
        """(n,) log-density of each record given the parameters, on the scale of the records."""
        terms = self.model.logp(vars=self.latents, sum=False, jacobian=False)
        return sum([by_row(term) for term in terms[1:]], by_row(terms[0]))


def read(model: Model, latents: Sequence[Variable], count: Variable | None) -> Reading:
    """Find rows, sums and densities in a model.

    `latents` are free random variables with one row per record; `count`, a free scalar integer one,
    says how many exist. NotFactorizable if a factor is neither a function of sums over records nor
    one of single records, ValueError if the records differ in length.
    """
    latents = [rv for rv in model.free_RVs if rv in latents]
    n = _number_of_records(model, latents)
    hidden = {model.rvs_to_values[rv] for rv in latents}
    counts = {model.rvs_to_values[count]} if count is not None else set()
    pieces: list[Variable] = []
    densities: list[Variable] = []
    local: list[Variable] = []
    observed: dict[Variable, Variable] = {}
    total = pt.vector("total", dtype="float64")
    width = 0
    for rv in (*model.free_RVs, *model.observed_RVs, *model.potentials):
        if rv in latents or rv is count:
            continue
        term = model.logp(vars=[rv], sum=False, jacobian=True)[0]
        if not ancestors_without_shapes([term]) & (hidden | counts):
            continue
        sums = _sums_over_records(model, term, hidden | counts, n)
        if not sums:
            local.append(_local(model, rv, term, n, counts))
            continue
        parts = {}
        if rv in model.observed_RVs:
            value = model.rvs_to_values[rv]
            observed[value] = parts[value] = value.type()
        for found, shape in zip(sums, _shapes(model, sums), strict=True):
            what = f"The statistic of `{rv.name}`"
            x, axis = found.owner.inputs[0], found.owner.op.axis
            others = [k for k in (range(x.type.ndim) if axis is None else axis) if k != 0]
            [rows] = without_wrapping([x.sum(axis=others) if others else x], what, single=True)
            size = int(np.prod(shape, dtype=int))
            piece = total[width : width + size].reshape(shape)
            parts[found] = _like(piece, found)
            pieces.append(rows.reshape((n, size)).astype("float64"))
            width += size
        [density] = clone_replace([term.sum()], parts, rebuild_strict=False)
        densities.append(_without_records(model, rv, density, hidden | counts))
    if not pieces and not local:
        raise NotFactorizable(
            f"Nothing that was observed depends on {names(latents)}. Declare what was published: "
            "dp.LaplaceRelease(name, statistic, scale=..., observed=...)."
        )
    total, log_density = _with_published(sum(densities, pt.zeros(())), observed, total, width)
    rows = pt.concatenate(pieces, axis=1) if pieces else pt.zeros((n, 0))
    prior = ancestors_without_shapes(model.logp(vars=latents, sum=False, jacobian=False))
    if count is not None and prior & counts:
        raise NotFactorizable(
            f"The distribution of the records depends on their number, `{count.name}`."
        )
    touched = ancestors_without_shapes([rows])
    for rv in model.free_RVs:
        if model.rvs_to_values[rv] in touched - hidden - counts:
            transforms = {v: model.rvs_to_transforms[v] for v in latents}
            bounded = [
                v
                for v, transform in transforms.items()
                if transform is not None
                and rv in ancestors([transform.backward(model.rvs_to_values[v], *v.owner.inputs)])
            ]
            if bounded:
                raise NotFactorizable(
                    f"The bounds of {names(bounded)} depend on `{rv.name}`, and so does the "
                    "transform of the records. Declare them with default_transform=None."
                )
            raise NotFactorizable(
                f"The statistic depends on `{rv.name}`, but a mechanism knows only the records. "
                "Write the statistic as a function of the records, or, if these are records too, "
                f"add `{rv.name}` to the variables of the step."
            )
    return Reading(
        model=model,
        latents=latents,
        count=count,
        n=n,
        rows=rows,
        total=total,
        log_density=log_density,
        observed=list(observed),
        local=sum(local[1:], local[0]) if local else None,
    )


def records_of(model: Model) -> list[Variable]:
    """Variables behind an observed sum over records, or discrete and each reported with noise."""
    start = model.initial_point()
    shapes = {rv: np.shape(start[model.rvs_to_values[rv].name]) for rv in model.free_RVs}
    found: set[Variable] = set()
    for rv in model.observed_RVs:
        term = model.logp(vars=[rv], sum=False)[0]
        behind = ancestors_without_shapes([term])
        every = [v for v in model.free_RVs if model.rvs_to_values[v] in behind]
        direct = [v for v in every if shapes[v]]
        hidden = {model.rvs_to_values[v] for v in direct}
        whole = every == direct and all(map(is_discrete, every))
        reported = _shapes(model, [term])[0][:1] if whole else ()
        for n in {shapes[v][0] for v in direct}:
            if reported == (n,) or _sums_over_records(model, term, hidden, n):
                rows = [v for v in direct if shapes[v][0] == n]
                behind_rows = set(ancestors(rows))
                found |= {v for v in model.free_RVs if v in behind_rows and shapes[v][:1] == (n,)}
    return [v for v in model.free_RVs if v in found]


def names(variables: Iterable[Variable]) -> str:
    """Names in backticks, for messages."""
    return ", ".join(f"`{v.name}`" for v in variables)


def _number_of_records(model: Model, latents: Sequence[Variable]) -> int:
    start = model.initial_point()
    shapes = {rv.name: np.shape(start[model.rvs_to_values[rv].name]) for rv in latents}
    told = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
    if single := names(rv for rv in latents if not shapes[rv.name]):
        raise ValueError(
            f"Every variable of the records must have one row per record, but {single} is a single "
            f"number; shapes are {told}. If it is a parameter, leave it out of `vars`: PyMC gives "
            "it a step of its own. If it is the only record, declare it with shape=1."
        )
    lengths = sorted({shape[0] for shape in shapes.values()})
    if len(lengths) > 1:
        tables = [", ".join(v for v, shape in shapes.items() if shape[0] == n) for n in lengths]
        steps = ", ".join(f"dp.PrivacyAwareGibbs([{table}])" for table in tables)
        raise ValueError(
            f"Records of one step must be as many in every variable; shapes are {told}. Give "
            f"each table of records a step of its own: pm.sample(step=[{steps}])."
        )
    return lengths[0]


def _shapes(model: Model, variables: Sequence[Variable]) -> list[tuple[int, ...]]:
    """Shapes, from the types where they are known, or else at the initial point."""
    static = [v.type.shape for v in variables]
    if not any(None in shape for shape in static):
        return static
    return [tuple(map(int, shape)) for shape in _at_start(model, [v.shape for v in variables])]


def _at_start(model: Model, graphs: Sequence[Variable]) -> list[np.ndarray]:
    """Functions of value variables at the initial point."""
    function = pytensor.function(
        model.value_vars, list(graphs), mode=INTERPRETED, on_unused_input="ignore"
    )
    start = model.initial_point()
    return function(*[start[value.name] for value in model.value_vars])


def _sums_over_records(
    model: Model, term: Variable, hidden: set[Variable], n: int
) -> list[Variable]:
    """The sums over records behind `term` that have no other such sum behind them."""
    candidates = []
    for node in toposort([term]):
        if isinstance(node.op, CAReduce) and isinstance(node.op.scalar_op, Add):
            x = node.inputs[0]
            along = node.op.axis is None or 0 in node.op.axis
            if x.type.ndim and along and ancestors_without_shapes([x]) & hidden:
                candidates.append(node.outputs[0])
    shapes = _shapes(model, [v.owner.inputs[0] for v in candidates]) if candidates else []
    sums = {v for v, shape in zip(candidates, shapes, strict=True) if shape[0] == n}
    return [v for v in candidates if v in sums and not set(ancestors(v.owner.inputs)) & sums]


def _like(piece: Variable, total: Variable) -> Variable:
    """A part of the total as the type of the sum that it stands for."""
    if total.type.dtype.startswith("float"):
        return piece.astype(total.type.dtype)
    return pt.round(piece).astype(total.type.dtype)


def _without_records(
    model: Model, rv: Variable, density: Variable, hidden: set[Variable]
) -> Variable:
    """The density as a function of sums alone; what is left of the records is their shapes."""
    depends = ancestors_without_shapes([density])
    if depends & hidden:
        raise _not_additive(rv, "records enter in another way than through sums of their rows")
    for other in model.free_RVs:
        if model.rvs_to_values[other] in depends:
            raise NotFactorizable(
                f"The density of `{rv.name}` depends on `{other.name}`, which is unknown. How a "
                "statistic was published has to be known: give numbers."
            )
    start = model.initial_point()
    blanks = {v: pt.constant(np.asarray(start[v.name])) for v in hidden}
    return clone_replace([density], blanks, rebuild_strict=False)[0]


def _numbers(observed: Sequence[Variable]) -> list[np.ndarray]:
    """What was published, as it is now."""
    return pytensor.function([], list(observed), mode=INTERPRETED)() if observed else []


def _with_published(
    density: Variable, observed: Mapping[Variable, Variable], total: Variable, width: int
) -> tuple[Variable, Variable]:
    """The density with published numbers as inputs, so that its code serves others as well; after
    the total, whose shape is known now.
    """
    given: dict[Variable, Variable] = {}
    for array, v in zip(_numbers(list(observed)), observed.values(), strict=True):
        given[v] = _like(total[width : width + array.size].reshape(array.shape), v)
        width += array.size
    for v in ancestors([density]):
        if is_data(v) and v not in given:
            given[v] = pt.constant(array_of(v))
    density = clone_replace(density, given, rebuild_strict=False)
    whole = pt.vector("total", dtype="float64", shape=(width,))
    return whole, clone_replace(density, {total: whole}, rebuild_strict=False)


def _local(model: Model, rv: Variable, term: Variable, n: int, counts: set[Variable]) -> Variable:
    """(n,) log-densities of a factor that sees records one by one."""
    [shape] = _shapes(model, [term])
    if not shape or shape[0] != n:
        raise _not_additive(rv, "no sum over the records' axis was found behind its density")
    if ancestors_without_shapes([term]) & counts:
        raise _not_additive(rv, "it depends on the number of records without a sum")
    return without_wrapping([by_row(term)], f"The density of `{rv.name}`")[0]


def by_row(term: Variable) -> Variable:
    """(n,) sums over all axes but the first."""
    return term.sum(axis=list(range(1, term.type.ndim))) if term.type.ndim > 1 else term


def _not_additive(rv: Variable, why: str) -> NotFactorizable:
    return NotFactorizable(
        f"`{rv.name}` is not a function of sums over records, nor of records one by one: {why}. "
        "Write its statistic with one row per record, (n,) or (n, m), and pass these rows to a "
        "dp...Release, or add them up with .sum(axis=0); products such as x.T @ y can be written "
        "(x * y[:, None]).sum(axis=0)."
    )


# -- records are apart ----------------------------------------------------------------------------


def check_records(reading: Reading) -> bool:
    """Check that rows and densities of records are local, and that records can be drawn.

    Returns whether records are known to be exchangeable: that rows and densities are the same
    function of every record. NotFactorizable if one depends on other records, or their number does
    more than leave out rows.
    """
    n, what = reading.n, names(reading.latents)
    graphs = [*reading.factors({}), reading.row_log_prior()]
    for label, shape in zip(_LABELS, _shapes(reading.model, graphs), strict=True):
        if shape[:1] != (n,):
            raise NotFactorizable(
                f"There are {n} records {what}, but not as many values of the {label}: every "
                "record needs one of its own, independent of the others."
            )
    values = dict(zip(reading.inputs, reading.at_the_start, strict=True))
    try:
        alike = _alike(graphs, values, reading.values, n) and reading.local is None
    except NotFactorizable as error:
        raise NotFactorizable(
            "The statistic or density of one record depends on other records, or something behind "
            f"it puts all records together. Given the parameters, records ({what}) must be "
            "independent, and each record's row must be computed from that record alone. "
            f"{error.nonprivate}"
        ) from None
    points = _drawn(reading)
    if reading.count is None:
        next(points)  # records can be drawn
    else:
        _check_count(reading, reading.count, graphs[0], points)
    return alike


def _drawn(reading: Reading) -> Iterator[list[np.ndarray]]:
    """`Reading.inputs` with records from the model: at the initial point, and farther and farther.

    Parameters with a transform move on all of the real line, others stay as they are.
    """
    drawn = [forward(reading.model, rv, rv, rv) for rv in reading.latents]
    graphs = clone_replace(drawn, reading.constrained(reading.others), rebuild_strict=False)
    draw, rng = Function(reading.inputs, graphs, compiled=False), np.random.default_rng(_SEED)
    draw.reseed(rng)
    free = [reading.model.rvs_to_transforms[rv] is not None for rv in reading.others]
    n_latents = len(reading.latents)
    for trial in range(_TRIALS):
        point = list(reading.at_the_start)
        for k, moves in enumerate(free, start=n_latents):
            if moves:
                point[k] = point[k] + trial / _TRIALS * rng.normal(0.0, 3.0, point[k].shape)
        try:
            records = draw(*point)
        except NotImplementedError:
            raise NotFactorizable(
                f"Records ({names(reading.latents)}) cannot be drawn from the model, so there is "
                "nothing to offer them. Give them a distribution that PyMC can draw from."
            ) from None
        for rv, value in zip(reading.latents, records, strict=True):
            if len(value) != reading.n:
                raise ValueError(
                    f"A transform changes the number of rows of `{rv.name}`, which holds records. "
                    "Declare it with transform=None."
                )
        yield [*records, *point[n_latents:]]


def _check_count(
    reading: Reading, count: Variable, every: Variable, points: Iterable[list[np.ndarray]]
) -> None:
    """The number of records leaves out rows; else they are what they are if `every` one exists."""
    n, rng = reading.n, np.random.default_rng(_SEED)
    both = Function(reading.inputs, [every, reading.rows], compiled=False)
    place = reading.inputs.index(reading.model.rvs_to_values[count])
    for point in points:
        for k in (0, n, int(rng.integers(0, n + 1))):
            point[place] = np.asarray(k, dtype=point[place].dtype)
            whole, rows = both(*point)
            kept = np.where(np.arange(n)[:, None] < k, whole, 0.0)
            if not np.allclose(kept, rows, rtol=1e-9, atol=0.0, equal_nan=True):
                raise NotFactorizable(
                    f"`{count.name}` must enter every statistic as a factor "
                    f"dp.present({count.name}, {n}), and in no other way."
                )


def check_proposal(
    reading: Reading, given: Mapping[Variable, Variable], proposed: Sequence[Variable]
) -> None:
    """Check that a proposal offers each record something that depends on that record alone.

    `given` maps random variables to what stands for them; `proposed` holds what is proposed
    (n, ...) and its log-ratio (n,), functions of value variables. NotFactorizable if that depends
    on other records, ValueError if the proposal draws a variable whose value is given.
    """
    behind = list(ancestors(proposed))
    if taken := set(behind) & set(given):
        raise ValueError(
            f"The proposal uses {names(taken)} of the model itself, which would be drawn again. "
            "Take current records and parameters from its arguments, by name."
        )
    nodes = dict.fromkeys(v.owner for v in behind if is_drawn(v))
    draws = [node.default_output() for node in nodes]
    drawn = Function(reading.inputs, draws, compiled=False)(*reading.at_the_start)
    laws = [law for d in draws for law in d.owner.op.dist_params(d.owner)]
    values = dict(zip([*reading.inputs, *draws], [*reading.at_the_start, *drawn], strict=True))
    own = [d for d, x in zip(draws, drawn, strict=True) if np.shape(x)[:1] == (reading.n,)]
    try:
        _alike([*proposed, *laws], values, [*reading.values, *own], reading.n)
    except NotFactorizable as error:
        raise NotFactorizable(
            "What is proposed to one record, or its log-ratio, depends on other records. "
            "Records are accepted one by one, so each proposal must be computed from that "
            f"record and the parameters. {error.nonprivate}"
        ) from None


def is_drawn(v: Variable) -> bool:
    """Whether a variable is random, of the model or of a proposal."""
    drawn = RandomVariable | SymbolicRandomVariable
    return v.owner is not None and isinstance(v.owner.op, drawn)


class _Walk(Lifter):
    """Also takes columns of all rows, ``x[:, columns]``: no entry in memory is private here."""

    def _lift(self, variable: Variable, axis: int) -> Variable:
        node = variable.owner
        if node is not None and isinstance(node.op, TAKES) and axis == 0:
            rows, *columns = advanced_indices(node)
            if rows == slice(None) and all(isinstance(x, Variable) for x in columns):
                self.shared.extend(columns)
                return self.lift(node.inputs[0], 0)[(rows, *columns)]
        return super()._lift(variable, axis)


def _alike(
    graphs: Sequence[Variable],
    values: Mapping[Variable, np.ndarray],
    records: Sequence[Variable],
    n: int,
) -> bool:
    """Prove that an entry of `graphs`, of n, depends on its own entry of `records` alone.

    What has not n entries must not depend on records at all. `values` of all inputs tell shapes.
    Returns whether nothing else is different for each record; NotFactorizable without a proof.
    """
    if n == 1:
        return True
    inputs = {v: pytensor.shared(np.array(x), v.name, shape=np.shape(x)) for v, x in values.items()}
    graphs = clone_replace(list(graphs), inputs, rebuild_strict=False)
    # what depends on no input is a constant, however it is made
    depend, fixed = set(inputs.values()), set()
    for node in toposort(graphs):
        if not depend.isdisjoint(node.inputs):
            depend.update(node.outputs)
            fixed.update(node.inputs)
    made = [x for x in fixed.union(graphs) - depend if not isinstance(x, Constant)]
    found = pytensor.function([], made, mode=INTERPRETED)()
    constants = {v: pt.constant(x, dtype=v.type.dtype) for v, x in zip(made, found, strict=True)}
    graphs = clone_replace(graphs, constants, rebuild_strict=False)
    sources = {inputs[v] for v in records}
    public = {v for v in ancestors(graphs) if v.owner is None} - sources
    leaves: dict[Variable, RowLeaf] = {}
    for graph in graphs:
        walk = _Walk("records", {}, public, n, n, leaves, {}, [])
        if graph.type.ndim and graph.type.shape[0] in (n, None):
            walk.lift(graph, 0)
        else:
            walk.shared.append(graph)
        check_shared(walk)
    others = [leaf for source, leaf in leaves.items() if source not in sources]
    rows = [np.moveaxis(array_of(leaf.source), leaf.axis, 0) for leaf in others]
    constant = all(isinstance(leaf.source, Constant) for leaf in others)
    return constant and all(np.array_equal(x[1:], x[:-1]) for x in rows)
