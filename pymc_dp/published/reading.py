"""What a model of privatised statistics says about its confidential records.

A release is recognised by its density, not by how it was declared. Behind the density of an
observed variable stands a sum over records; in front of it only the sum, never a single record::

    records --> rows t_i (n, M) --> total T = sum of rows (M,) --> log-density g(T)

Every factor of the model that depends on records is read in this way (Ju et al. 2022, Assumption 2,
record additivity), or else must give one number per record: randomised response, measurements with
noise of their own, and other variables below a record. Factors that do neither are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar.basic import LT, Add
from pytensor.tensor.basic import ARange
from pytensor.tensor.elemwise import CAReduce, Elemwise

from pymc_dp.base.linker import INTERPRETED
from pymc_dp.errors import NotFactorizable
from pymc_dp.records.ancestry import ancestors_without_shapes, array_of, is_data
from pymc_dp.records.arithmetic import is_discrete, without_wrapping


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
    def _fixed(self) -> list[Variable]:
        behind = ancestors([*self.latents, *self.model.logp(sum=False)])
        observed = [self.model.rvs_to_values[rv] for rv in self.model.observed_RVs]
        changing = set(ancestors(observed))
        return [v for v in dict.fromkeys(behind) if is_data(v) and v not in changing]

    def fixed(self) -> list[tuple[str, np.ndarray]]:
        """Names and copies of all ``pm.Data``, and lengths of ``dims``, that were not observed."""
        return [(str(v.name or "a shared array"), np.array(array_of(v))) for v in self._fixed]

    def published(self) -> np.ndarray:
        """(P,) numbers that were published, as they are now."""
        parts = [np.ravel(v).astype(float) for v in _numbers(self.observed)]
        return np.concatenate([np.zeros(0), *parts])

    @cached_property
    def start(self) -> dict[str, np.ndarray]:
        """The model's initial point."""
        return self.model.initial_point()

    @cached_property
    def at_the_start(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Value variables of the records and of everything else at the initial point."""
        return (
            [np.asarray(self.start[v.name]) for v in self.values],
            [np.asarray(self.start[v.name]) for v in self.inputs],
        )

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
        """Value variables of `others`."""
        return [self.model.rvs_to_values[rv] for rv in self.others]

    def without_records(self) -> list[Variable]:
        """Free variables and Deterministics that do not depend on a record."""
        kept = []
        for v in self.model.unobserved_RVs:
            behind = set(ancestors([v], blockers=self.others))
            if v in self.others or not behind & set(self.latents):
                kept.append(v)
        return kept

    def factors(self, given: Mapping[Variable, Variable]) -> list[Variable]:
        """Rows, if all `n` records existed, and local densities, with value variables replaced."""
        rows = self.rows
        if self.count is not None:
            value = self.model.rvs_to_values[self.count]
            all_of_them = pt.constant(np.asarray(self.n, dtype=value.type.dtype))
            changed = {
                v: pt.alloc(np.array(True), self.n) for v in ancestors([rows]) if _exist(v, value)
            }
            rows = clone_replace(rows, {**changed, value: all_of_them}, rebuild_strict=False)
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

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """Shape of a function of value variables at the initial point."""
        return _shapes(self.model, [variable])[0]

    def at_start(self, variable: Variable) -> np.ndarray:
        """A variable of the model at the model's initial point."""
        [graph] = self.model.replace_rvs_by_values([variable])
        return _at_start(self.model, [graph])[0]


def read(model: Model, latents: Sequence[Variable], count: Variable | None) -> Reading:
    """Find rows, sums and densities in a model.

    `latents` are free random variables with one row per record. `count` is a free scalar integer
    variable: how many of the records exist.

    Raises NotFactorizable if a factor is neither a function of sums over records nor one of single
    records, and ValueError if the records differ in length.
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
            [rows] = without_wrapping([_rows(found)], what, single=True)
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
    log_density = _with_published(sum(densities, pt.zeros(())), observed, total, width)
    rows = pt.concatenate(pieces, axis=1) if pieces else pt.zeros((n, 0))
    prior = ancestors_without_shapes(model.logp(vars=latents, sum=False, jacobian=False))
    if count is not None and prior & counts:
        raise NotFactorizable(
            f"The distribution of the records depends on their number, `{count.name}`."
        )
    touched = ancestors_without_shapes([rows])
    for rv in model.free_RVs:
        if model.rvs_to_values[rv] in touched - hidden - counts:
            bounded = [v for v in latents if rv in _behind_transform(model, v)]
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
    """The variables with one row per record about which something was published.

    Behind an observed sum over records; or discrete, and each reported with noise: the density has
    an entry per record and depends on nothing else that is unknown.
    """
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


def _exist(v: Variable, count: Variable) -> bool:
    """Whether a mask compares places of records with their number, as ``dp.present`` does."""
    node = v.owner
    if node is None or not isinstance(node.op, Elemwise) or not isinstance(node.op.scalar_op, LT):
        return False
    places, number = node.inputs
    in_order = any(
        isinstance(w.owner.op, ARange)
        if w.owner is not None
        else isinstance(w, Constant) and np.array_equal(w.data, np.arange(np.size(w.data)))
        for w in ancestors([places])
        if w.owner is not None or w.type.ndim == 1
    )
    return v.type.ndim == 1 and in_order and count in ancestors([number])


def _behind_transform(model: Model, rv: Variable) -> set[Variable]:
    """Free random variables on which the transform of another one depends."""
    transform = model.rvs_to_transforms[rv]
    if transform is None:
        return set()
    here = transform.backward(model.rvs_to_values[rv], *rv.owner.inputs)
    return set(ancestors([here])) & set(model.free_RVs)


def names(variables: Iterable[Variable]) -> str:
    """Names in backticks, for messages."""
    return ", ".join(f"`{v.name}`" for v in variables)


def _number_of_records(model: Model, latents: Sequence[Variable]) -> int:
    start = model.initial_point()
    shapes = {rv.name: np.shape(start[model.rvs_to_values[rv].name]) for rv in latents}
    lengths = {shape[0] if shape else -1 for shape in shapes.values()}
    if len(lengths) != 1 or -1 in lengths:
        told = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        if len(lengths) > 1 and -1 not in lengths:
            steps = ", ".join(
                f"dp.PrivacyAwareGibbs([{', '.join(v for v, s in shapes.items() if s[0] == k)}])"
                for k in sorted(lengths)
            )
            raise ValueError(
                f"Records of one step must be as many in every variable; shapes are {told}. Give "
                f"each table of records a step of its own: pm.sample(step=[{steps}])."
            )
        single = names(rv for rv in latents if not shapes[rv.name])
        raise ValueError(
            f"Every variable of the records must have one row per record, but {single} is a single "
            f"number; shapes are {told}. If it is a parameter, leave it out of `vars`: PyMC gives "
            "it a step of its own. If it is the only record, declare it with shape=1."
        )
    return int(lengths.pop())


def _shapes(model: Model, variables: Sequence[Variable]) -> list[tuple[int, ...]]:
    """Shapes, from the types where they are known, or else at the initial point."""
    static = [tuple(k for k in v.type.shape if k is not None) for v in variables]
    if all(len(shape) == v.type.ndim for shape, v in zip(static, variables, strict=True)):
        return static
    found = _at_start(model, [v.shape for v in variables])
    return [tuple(int(k) for k in shape) for shape in found]


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


def _rows(total: Variable) -> Variable:
    """What each record adds to a sum."""
    x, axis = total.owner.inputs[0], total.owner.op.axis
    others = [k for k in (range(x.type.ndim) if axis is None else axis) if k != 0]
    return x.sum(axis=others) if others else x


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
        raise _not_additive(
            rv,
            "records enter in another way than through sums of their rows",
        )
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
) -> Variable:
    """The density with published numbers as inputs, so that its code serves others as well."""
    given: dict[Variable, Variable] = {}
    for array, v in zip(_numbers(list(observed)), observed.values(), strict=True):
        given[v] = _like(total[width : width + array.size].reshape(array.shape), v)
        width += array.size
    for v in ancestors([density]):
        if is_data(v) and v not in given:
            given[v] = pt.constant(array_of(v))
    return clone_replace([density], given, rebuild_strict=False)[0]


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
