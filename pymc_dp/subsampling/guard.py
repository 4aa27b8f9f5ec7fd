"""The last check before sampling: what was derived from the graph is the density of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytensor
from pymc.logprob.utils import ParameterValueError
from pymc.model import Model

from pymc_dp.base.threads import INTERPRETED
from pymc_dp.errors import UnsafeModel
from pymc_dp.records.graph import ParameterVector

#: Relative error that rounding may make, of a difference and of the log-density itself.
_TOLERANCE, _ROUNDING = 1e-6, 1e-9


def refuse_another_density(
    model: Model,
    parameters: ParameterVector,
    total: Callable[[np.ndarray], float],
    points: Sequence[np.ndarray],
) -> None:
    """Compare the log-posterior of all records with PyMC's own, at some points.

    `total` gives the log-posterior of all records at a (d,) point, up to a constant. The first of
    the `points` should be possible.

    Raises UnsafeModel if the density of some records is not finite at the first point, and
    RuntimeError if differences between the points are others than PyMC's.
    """
    names = [rv.name for rv in model.observed_RVs]
    by_record = model.logp(vars=model.observed_RVs, sum=False)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    prior = model.logp(vars=[*model.free_RVs, *model.potentials])
    function = pytensor.function(
        values, [prior, *by_record], mode=INTERPRETED, on_unused_input="ignore"
    )

    def evaluate(theta: np.ndarray) -> list[np.ndarray]:
        at = parameters.point(theta)
        try:
            with np.errstate(all="ignore"):
                return [np.asarray(x) for x in function(*[at[value.name] for value in values])]
        except ParameterValueError:
            return [np.array(-np.inf)]

    first = evaluate(points[0])
    for name, terms in zip(names, first[1:], strict=False):
        impossible = np.flatnonzero(~np.isfinite(terms.reshape(len(terms), -1)).all(axis=1))
        if len(impossible):
            raise UnsafeModel(
                f"{len(impossible)} records of `{name}` have no finite log-density at the "
                f"reference, record {impossible[0]} for example: values that the distribution "
                "cannot take, labels other than 0 and 1 for example, or a reference so far off "
                "that densities underflow. Check them."
            )
    expected = np.array([sum(float(x.sum()) for x in evaluate(p)) for p in points])
    with np.errstate(all="ignore"):
        found = np.array([total(p) for p in points])
    possible = np.isfinite(expected)
    change, of_model = (found - found[0])[possible], (expected - expected[0])[possible]
    slack = _TOLERANCE * (1.0 + np.abs(of_model)) + _ROUNDING * np.abs(expected[possible])
    same_support = np.array_equal(np.isfinite(found), possible)
    if not (same_support and np.all(np.abs(change - of_model) <= slack)):
        raise RuntimeError(
            "What was derived from the model is not its log-density, which is a defect of pymc_dp: "
            "please report the model. NUTS samples it."
        )
