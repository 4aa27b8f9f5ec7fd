"""Records are told apart by experiment: another record's values must not change a record's row."""

from __future__ import annotations

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.tensor.basic import ARange, Eye

from pymc_dp.errors import NotFactorizable
from pymc_dp.privatized.graphs import Function, forward
from pymc_dp.privatized.reading import Reading, names
from pymc_dp.rows.ancestry import ancestors_without_shapes, is_long_array

__all__ = ["check_records"]

_TRIALS = 4
_POINTS = 4
#: Of what `Reading.factors` and `Reading.row_log_prior` give.
_LABELS = ("row of the statistic", "log-density of an observed variable", "log-density")
#: Distributions on all real numbers, by the names of PyTensor's operations.
_REAL = ("normal", "multivariate_normal", "laplace", "logistic", "cauchy", "gumbel", "t")
_TOLERANCE = 1e-9


def check_records(reading: Reading) -> bool:
    """Check that rows and densities of records are local, on records drawn from the model.

    Parameters
    ----------
    reading : Reading

    Returns
    -------
    bool
        Whether records are known to be exchangeable: nothing behind their densities has room for
        an entry per record.

    Raises
    ------
    NotFactorizable
        If the row or a density of one record depends on other records, or the number of records
        enters in another way than by leaving out the rows of those that do not exist.
    """
    model, n = reading.model, reading.n
    rng = np.random.default_rng(7)  # which experiments are made is a setting
    given = reading.constrained(reading.others)
    drawn = [forward(model, rv, rv, rv) for rv in reading.latents]
    draw = Function(
        reading.inputs, clone_replace(drawn, given, rebuild_strict=False), compiled=False
    )
    draw.reseed(rng)
    inputs = [*reading.values, *reading.inputs]
    factors = Function(inputs, [*reading.factors({}), reading.row_log_prior()], compiled=False)
    masked = Function(inputs, [reading.rows], compiled=False)
    for trial in range(_POINTS):
        # about the start, where coefficients may be 0, and away from it
        parameters = [_moved(reading, v, trial, rng) for v in reading.inputs]
        first, second = draw(*parameters), draw(*parameters)
        _check_lengths(reading, first)
        of_first, of_second = (factors(*values, *parameters) for values in (first, second))
        for found, label in zip(of_first, _LABELS, strict=True):
            if np.ndim(found) == 0 or np.shape(found)[0] != n:
                raise NotFactorizable(
                    f"There are {n} records {names(reading.latents)}, but not as many values of "
                    f"the {label}: every record needs one of its own, independent of the others."
                )
        for _ in range(_TRIALS):
            swapped = rng.random(n) < 0.5
            mixed = [_mix(a, b, swapped) for a, b in zip(first, second, strict=True)]
            expected = [_mix(a, b, swapped) for a, b in zip(of_first, of_second, strict=True)]
            _check_mixture(reading, expected, factors(*mixed, *parameters))
        if reading.count is not None:
            _check_count(reading, masked, first, parameters, of_first[0], rng)
    return reading.local is None and not _has_own_data(reading)


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


def _mix(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> np.ndarray:
    return np.where(where.reshape((-1,) + (1,) * (np.ndim(a) - 1)), b, a)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True))
