"""Step sizes, scalings and batches that are given by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import Any

import numpy as np
from pymc.model import Model

from pymc_dp.base.checks import check_integer
from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import LedgerError
from pymc_dp.privacy.accounting import BatchEvent, FixedBatchGaussianEvent, SubsampledGaussianEvent
from pymc_dp.privacy.holder import COINS
from pymc_dp.privacy.plan import Batches, plan_batches
from pymc_dp.records.graph import ParameterVector
from pymc_dp.tuning.coordinates import FIRST_PART


def step_sizes(value: Any) -> np.ndarray | None:
    """Standard deviations of a random walk, one number or (d,), if they are given."""
    if value is None:
        return None
    steps = np.asarray(value, dtype="float64")
    if not (np.isfinite(steps).all() and (steps > 0).all()):
        raise ValueError("step_size must be positive and finite.")
    return steps


def scaling_matrix(scaling: Any, parameters: ParameterVector, model: Model) -> np.ndarray:
    """The (d, d) matrix A of theta = m + A z.

    `scaling` is one number for all, a (d,) vector, a (d, d) matrix, or a dict by variable name (the
    model's names or PyMC's names of the unconstrained values) of numbers or arrays of the
    variable's shape. ValueError if shape, names or values do not fit.
    """
    d = parameters.size
    if isinstance(scaling, Mapping):
        scales = _by_name(scaling, parameters, model)
        matrix = np.diag(scales)
    else:
        array = _numbers("scaling", scaling)
        if array.ndim == 0:
            matrix = np.diag(_scales("scaling", np.full(d, array)))
        elif array.shape == (d,):
            matrix = np.diag(_scales("scaling", array))
        elif array.shape == (d, d):
            matrix = array.copy()
        else:
            raise ValueError(
                f"scaling must be a number, a vector of {d} scales, a ({d}, {d}) matrix or a dict "
                f"by variable name; got shape {array.shape}. The parameters are, in order: "
                f"{', '.join(value.name for value in parameters.values)}."
            )
    if not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix) < d:
        raise ValueError("scaling must be finite and invertible, with no scale of 0.")
    return np.ascontiguousarray(matrix)


def _numbers(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value, dtype="float64")
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers, not {type(value).__name__}.") from None


def _scales(name: str, scales: np.ndarray) -> np.ndarray:
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise ValueError(f"{name}: scales must be positive and finite.")
    return scales


def _by_name(scaling: Mapping[str, Any], parameters: ParameterVector, model: Model) -> np.ndarray:
    names = {value.name: value.name for value in parameters.values}
    names.update({rv.name: model.rvs_to_values[rv].name for rv in model.free_RVs})
    unknown = [name for name in scaling if name not in names]
    if unknown:
        raise ValueError(f"scaling names {unknown}; the variables are {sorted(set(names))}.")
    given = {names[name]: value for name, value in scaling.items()}
    missing = [value.name for value in parameters.values if value.name not in given]
    if missing:
        raise ValueError(f"scaling lacks {missing}: give a scale for every variable.")
    scales = np.empty(parameters.size)
    for value, where, shape in zip(
        parameters.values, parameters.slices, parameters.shapes, strict=True
    ):
        label = f"scaling of `{value.name}`"
        numbers = _scales(label, _numbers(label, given[value.name]))
        if numbers.shape not in ((), shape):
            raise ValueError(f"{label} must be a number or of shape {shape}.")
        scales[where] = np.broadcast_to(numbers, shape).ravel()
    return scales


# -- batches --------------------------------------------------------------------------------------

KINDS = ("poisson", "fixed_size")  # how batches are drawn


def check_batches(
    batches: Any, size: Any, budget: PrivacyBudget, runs: int, noise_multiplier: Any, mode: Any
) -> int | None:
    """The size of a batch, expected or fixed, if there are any; refuse what has no accounting."""
    if batches not in KINDS:
        raise ValueError(f"batches must be 'poisson' or 'fixed_size', not {batches!r}.")
    if batches == "fixed_size" and size is None:
        raise ValueError("batches='fixed_size' needs a batch_size, the number of units in a batch.")
    if batches == "fixed_size" and budget.neighboring != "replace_one":
        raise ValueError(
            "batches='fixed_size' is accounted under neighboring='replace_one' only, where the "
            "number of units is public. Leave batches at 'poisson'."
        )
    if batches == "fixed_size" and budget.records is not None:
        raise ValueError(
            "batches='fixed_size' draws a batch from all records together, and these are on "
            "several machines. Leave batches at 'poisson'."
        )
    if size is None:
        return None
    if budget.records is not None and not budget.records.trusted:
        raise ValueError(
            "Owners answer for all of their records, and not for batches. Leave batch_size out, or "
            "use a step that reads all records: DPLangevin, DPHMC, DPPenalty."
        )
    size = check_integer("batch_size", size, minimum=1)
    if size > budget.n_public:
        raise ValueError(
            f"batch_size is the size of a batch, at most the {budget.n_public} {budget.unit}s of "
            f"the data, not {size}."
        )
    if runs != 1:
        raise ValueError(
            "With batches, a step is run once: its releases are accounted together. Leave "
            "`runs` at 1."
        )
    if isinstance(noise_multiplier, Mapping):
        raise ValueError("With batches, noise_multiplier is one number: there is one release.")
    if mode is not None:
        raise ValueError("With batches, rows are compiled as they are: leave the mode out.")
    return size


@contextmanager
def fixed_batches(
    mechanism: str,
    batches: str,
    size: int,
    budget: PrivacyBudget,
    counts: Mapping[str, int],
    noise_multiplier: Any,
    automatic: bool,
) -> Iterator[Batches]:
    """One release on a batch per iteration, charged as a whole while a step is made.

    If making the step fails before anything was released, the charge is taken back. Without a
    `noise_multiplier` the smallest one with which all fits is used. `automatic` leaves room for a
    preparation.
    """

    def event_of(noise: float) -> BatchEvent:
        if batches == "fixed_size":
            return FixedBatchGaussianEvent(mechanism, noise, size, budget.n_public)
        probability = round(COINS * size / budget.n_public) / COINS
        return SubsampledGaussianEvent(mechanism, noise, probability)

    account = budget.account
    cap = account.read().cap
    before = account.batches()
    found = plan_batches(
        event_of,
        counts["chains"] * (counts["draws"] + counts["tune"]),
        epsilon=budget.epsilon,
        delta=budget.delta,
        neighboring=budget.neighboring,
        cap=cap,
        room=math.ceil(Fraction(FIRST_PART) * cap) if automatic else 0,
        noise_multiplier=noise_multiplier,
    )
    account.fix_batches(found.to_dict())
    try:
        yield found
    except BaseException:
        with suppress(LedgerError):  # something was released: they stay
            account.fix_batches(before)
        raise
