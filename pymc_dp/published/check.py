"""Records are told apart by experiment: another record's values must not change a record's row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from pymc.distributions.distribution import SymbolicRandomVariable
from pymc.logprob.utils import CheckParameterValue
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, walk
from pytensor.tensor.basic import ARange, Eye
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.sort import ArgSortOp, SortOp

from pymc_dp.errors import NotFactorizable
from pymc_dp.published.graphs import Function, forward
from pymc_dp.published.reading import Reading, names
from pymc_dp.records.ancestry import ancestors_without_shapes, is_long_array

#: The seed of the experiments: a setting.
_SEED = 7
_TRIALS = 4
_POINTS = 4
#: Names of what `Reading.factors` and `Reading.row_log_prior` give.
_LABELS = ("row of the statistic", "log-density of an observed variable", "log-density")
#: Distributions on all real numbers, by the names of PyTensor's operations.
_REAL = ("normal", "multivariate_normal", "laplace", "logistic", "cauchy", "gumbel", "t")
_TOLERANCE = 1e-9


def check_records(reading: Reading) -> bool:
    """Check that rows and densities of records are local, on records drawn from the model.

    Returns whether records are known to be exchangeable: nothing behind their densities has room
    for an entry per record, and permuted records have permuted rows and densities.

    Raises NotFactorizable if the row or a density of one record depends on other records, or the
    number of records enters in another way than by leaving out the rows of those that do not exist.
    """
    _check_structure(reading)
    n = reading.n
    rng = np.random.default_rng(_SEED)
    inputs = [*reading.values, *reading.inputs]
    factors = Function(inputs, [*reading.factors({}), reading.row_log_prior()], compiled=False)
    masked = Function(inputs, [reading.rows], compiled=False)
    alike = True
    for parameters, first, second in _experiments(reading, rng):
        _check_lengths(reading, first)
        of_first, of_second = (factors(*values, *parameters) for values in (first, second))
        for found, label in zip(of_first, _LABELS, strict=True):
            if np.ndim(found) == 0 or np.shape(found)[0] != n:
                raise NotFactorizable(
                    f"There are {n} records {names(reading.latents)}, but not as many values of "
                    f"the {label}: every record needs one of its own, independent of the others."
                )
        order = rng.permutation(n)
        permuted = factors(*[v[order] for v in first], *parameters)
        alike = alike and all(_same(a[order], b) for a, b in zip(of_first, permuted, strict=True))
        for _ in range(_TRIALS):
            swapped = rng.random(n) < 0.5
            expected = _mix(of_first, of_second, swapped)
            _check_mixture(reading, expected, factors(*_mix(first, second, swapped), *parameters))
        if reading.count is not None:
            _check_count(reading, masked, first, parameters, of_first[0], rng)
    return alike and reading.local is None and not _has_own_data(reading)


def check_proposal(
    reading: Reading, given: Mapping[Variable, Variable], proposed: Sequence[Variable]
) -> None:
    """Check that a proposal offers each record something that depends on that record alone.

    `given` maps random variables of the model to what stands for them in the proposal. `proposed`
    holds what is proposed (n, ...) and its log-ratio (n,), functions of value variables.

    Raises NotFactorizable if one record's proposal depends on other records, and ValueError if the
    proposal draws a variable of the model instead of taking its current value.
    """
    taken = set(ancestors(proposed)) & set(given)
    if taken:
        raise ValueError(
            f"The proposal uses {names(taken)} of the model itself, which would be drawn again. "
            "Take current records and parameters from its arguments, by name."
        )
    nodes = [v.owner for v in ancestors(proposed) if v.owner is not None]
    draws = [
        node.default_output()
        for node in dict.fromkeys(nodes)
        if isinstance(node.op, RandomVariable | SymbolicRandomVariable)
    ]
    inputs = [*reading.values, *reading.inputs]
    draw = Function(inputs, draws, compiled=False)
    rng = np.random.default_rng(_SEED)
    draw.reseed(rng)
    behind = [p for d in draws for p in d.owner.op.dist_params(d.owner)]
    held = {d: d.type(name=f"draw{k}") for k, d in enumerate(draws)}
    outputs = clone_replace([*proposed, *behind], held, rebuild_strict=False)
    propose = Function([*inputs, *held.values()], outputs, compiled=False)
    for parameters, first, second in _experiments(reading, rng):
        drawn, others = draw(*first, *parameters), draw(*second, *parameters)
        own = [np.shape(d)[:1] == (reading.n,) for d in drawn]
        others = [b if mine else a for a, b, mine in zip(drawn, others, own, strict=True)]
        of_first = propose(*first, *parameters, *drawn)
        of_second = propose(*second, *parameters, *others)
        swapped = rng.random(reading.n) < 0.5
        mixed = [
            _mixed(a, b, swapped) if mine else a
            for a, b, mine in zip(drawn, others, own, strict=True)
        ]
        found = propose(*_mix(first, second, swapped), *parameters, *mixed)
        for a, b, c in zip(of_first, of_second, found, strict=True):
            own_rows = np.shape(a)[:1] == (reading.n,)
            expected = _mixed(a, b, swapped) if own_rows else a
            if not _same(expected, c):
                raise NotFactorizable(
                    "What is proposed to one record, or its log-ratio, depends on other records. "
                    "Records are accepted one by one, so each proposal must be computed from that "
                    "record and the parameters."
                )


def _experiments(
    reading: Reading, rng: np.random.Generator
) -> Iterator[tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]]:
    """Parameters about the start, where coefficients may be 0, and away; two sets of records."""
    model = reading.model
    drawn = [forward(model, rv, rv, rv) for rv in reading.latents]
    given = reading.constrained(reading.others)
    draw = Function(
        reading.inputs, clone_replace(drawn, given, rebuild_strict=False), compiled=False
    )
    draw.reseed(rng)
    for trial in range(_POINTS):
        parameters = [_moved(reading, v, trial, rng) for v in reading.inputs]
        try:
            first, second = draw(*parameters), draw(*parameters)
        except NotImplementedError:
            raise NotFactorizable(
                f"Records ({names(reading.latents)}) cannot be drawn from the model, so there is "
                "nothing to offer them. Give them a distribution that PyMC can draw from."
            ) from None
        yield parameters, first, second


def _check_structure(reading: Reading) -> None:
    """Nothing behind a record's factors reduces, sorts or multiplies along the records' axis."""
    hidden = set(reading.values)
    graphs = [*reading.factors({}), reading.row_log_prior()]
    for v in walk(graphs, _without_conditions):
        for x in _joined(v.owner) if v.owner is not None else ():
            if ancestors_without_shapes([x]) & hidden and reading.shape(x)[0] == reading.n:
                raise NotFactorizable(
                    f"Behind the statistic or density of one record, `{v.owner.op}` puts all "
                    f"records ({names(reading.latents)}) together. Each record's row must be "
                    "computed from that record alone."
                )


def _without_conditions(v: Variable) -> list[Variable]:
    if v.owner is None:
        return []
    checked = isinstance(v.owner.op, CheckParameterValue)
    return list(v.owner.inputs[:1] if checked else v.owner.inputs)


def _joined(node: Apply) -> list[Variable]:
    """Inputs whose entries are put together along their first axis."""
    op, inputs = node.op, node.inputs
    if isinstance(op, Dot):
        return inputs[1:] if inputs[0].type.ndim > 1 else inputs
    if isinstance(op, SortOp | ArgSortOp) and len(inputs) > 1:  # until PyTensor 3
        known = isinstance(inputs[1], Constant) and inputs[1].data is not None
        axis = [int(inputs[1].data) % inputs[0].type.ndim] if known else None
    elif isinstance(op, CAReduce | CumOp | Argmax | SortOp | ArgSortOp):
        axis = op.axis
    else:
        return []
    first = axis is None or 0 in np.atleast_1d(axis)
    return inputs[:1] if first and inputs[0].type.ndim else []


def _moved(reading: Reading, value: Variable, trial: int, rng: np.random.Generator) -> np.ndarray:
    """A parameter at the start, and then at random about it, where its value is unbounded."""
    start = np.asarray(reading.start[value.name])
    if trial == 0 or start.dtype.kind != "f":
        return start
    rv = reading.model.values_to_rvs[value]
    real = getattr(rv.owner.op, "name", None) in _REAL
    bounded = reading.model.rvs_to_transforms[rv] is None and not real
    moved = rng.standard_normal(start.shape)
    if bounded:  # stay inside of a support that is not known
        moved = 0.1 * start * np.tanh(moved)
    return np.asarray(start + moved, dtype=start.dtype)


def _check_mixture(reading: Reading, expected: list[np.ndarray], found: list[np.ndarray]) -> None:
    """Where some records were replaced, the factors of the others must have stayed."""
    for a, b, label in zip(expected, found, _LABELS, strict=True):
        if not _same(a, b):
            raise NotFactorizable(
                f"The {label} of one record depends on other records. Given the parameters, "
                f"records ({names(reading.latents)}) must be independent, and the statistic "
                "must be computed row by row."
            )


def _has_own_data(reading: Reading) -> bool:
    """Whether something with room for an entry per record is behind the records' densities."""
    graphs = [reading.factors({})[0], reading.row_log_prior()]
    for v in ancestors_without_shapes(graphs) - set(reading.values):
        if v.owner is not None:
            found = isinstance(v.owner.op, ARange | Eye)
        else:
            longest = max(np.shape(reading.start.get(v.name, 0)), default=0)
            found = is_long_array(v, reading.n) or longest >= reading.n
        if found:
            return True
    return False


def _check_lengths(reading: Reading, values: list[np.ndarray]) -> None:
    for rv, value in zip(reading.latents, values, strict=True):
        if np.shape(value)[0] != reading.n:
            raise ValueError(
                f"A transform changes the number of rows of `{rv.name}`, which holds records. "
                "Declare it with transform=None."
            )


def _check_count(
    reading: Reading,
    masked: Function,
    values: list[np.ndarray],
    parameters: list[np.ndarray],
    full: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Records beyond the count add nothing, and the count changes nothing else."""
    assert reading.count is not None
    place = reading.others.index(reading.count)
    for count in {0, reading.n, *rng.integers(0, reading.n + 1, _TRIALS).tolist()}:
        given = list(parameters)
        given[place] = np.asarray(count, dtype=parameters[place].dtype)
        exists = np.arange(reading.n) < count
        [found] = masked(*values, *given)
        if not _same(np.where(exists[:, None], full, 0.0), found):
            raise NotFactorizable(
                f"`{reading.count.name}` must enter every statistic as a factor "
                f"dp.present({reading.count.name}, {reading.n}), and in no other way."
            )


def _mixed(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Rows of `b` where a mask says, of `a` elsewhere."""
    return np.where(where.reshape((-1,) + (1,) * (np.ndim(a) - 1)), b, a)


def _mix(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray], where: np.ndarray
) -> list[np.ndarray]:
    return [_mixed(a, b, where) for a, b in zip(first, second, strict=True)]


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether columns agree, on the scale of their own entries."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    size = np.abs(np.where(np.isfinite(a), a, 0.0)).max(axis=0, initial=0.0)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= _TOLERANCE * np.maximum(size, np.abs(a))
    return bool((near | (a == b) | (np.isnan(a) & np.isnan(b))).all())
