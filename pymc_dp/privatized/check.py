"""Records are told apart by experiment: another record's values must not change a record's row."""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.replace import clone_replace

from pymc_dp.errors import NotFactorizable
from pymc_dp.privatized.graphs import Function, forward
from pymc_dp.privatized.reading import Reading, names

__all__ = ["check_records"]

_TRIALS = 4
_TOLERANCE = 1e-9


def check_records(reading: Reading) -> bool:
    """Check that rows and densities of records are local, on records drawn from the model.

    Parameters
    ----------
    reading : Reading

    Returns
    -------
    bool
        Whether records are exchangeable: none has covariates or observations of its own.

    Raises
    ------
    NotFactorizable
        If the row or a density of one record depends on other records, or the number of records
        enters in another way than by leaving out the rows of those that do not exist.
    """
    model, n = reading.model, reading.n
    rng = np.random.default_rng(7)  # which experiments are made is a setting
    start = model.initial_point()
    parameters = [start[v.name] for v in reading.inputs]
    given = reading.constrained(reading.others)
    drawn = [forward(model, rv, rv, rv) for rv in reading.latents]
    draw = Function(
        reading.inputs, clone_replace(drawn, given, rebuild_strict=False), compiled=False
    )
    draw.reseed(rng)
    local = pt.zeros(n) if reading.local is None else reading.local
    factors = Function(
        [*reading.values, *reading.inputs],
        [reading.full_rows(), local, reading.row_log_prior()],
        compiled=False,
    )
    labels = ("row of the statistic", "log-density of an observed variable", "log-density")
    first, second = draw(*parameters), draw(*parameters)
    _check_lengths(reading, first)
    of_first, of_second = (factors(*values, *parameters) for values in (first, second))
    for found, label in zip(of_first, labels, strict=True):
        if np.shape(found)[0] != n:
            raise NotFactorizable(
                f"There are {n} records {names(reading.latents)}, but {np.shape(found)[0]} rows: "
                f"every record needs a {label} of its own."
            )
    for _ in range(_TRIALS):
        swapped = rng.random(n) < 0.5
        mixed = [_mix(a, b, swapped) for a, b in zip(first, second, strict=True)]
        of_mixed = factors(*mixed, *parameters)
        for a, b, c, label in zip(of_first, of_second, of_mixed, labels, strict=True):
            if not _same(_mix(a, b, swapped), c):
                raise NotFactorizable(
                    f"The {label} of one record depends on other records. Given the parameters, "
                    f"records ({names(reading.latents)}) must be independent, and the statistic "
                    "must be computed row by row."
                )
    if reading.count is not None:
        _check_count(reading, first, parameters, of_first[0], rng)
    order = rng.permutation(n)
    of_permuted = factors(*[v[order] for v in first], *parameters)
    return all(_same(a[order], b) for a, b in zip(of_first, of_permuted, strict=True))


def _check_lengths(reading: Reading, values: list[np.ndarray]) -> None:
    for rv, value in zip(reading.latents, values, strict=True):
        if np.shape(value)[0] != reading.n:
            raise ValueError(
                f"A transform changes the number of rows of `{rv.name}`, which holds records. "
                "Declare it with transform=None."
            )


def _check_count(
    reading: Reading,
    values: list[np.ndarray],
    parameters: list[np.ndarray],
    full: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Records beyond the count add nothing, and the count changes nothing else."""
    assert reading.count is not None
    place = reading.others.index(reading.count)
    masked = Function([*reading.values, *reading.inputs], [reading.rows], compiled=False)
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
