"""A model as a prior and one log-likelihood term per record, for samplers that are not private."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from pymc.model import Model
from pymc.util import get_value_vars_from_user_vars
from pytensor.graph.traversal import ancestors

from pymc_dp.budget import get_budget, has_lost_budget
from pymc_dp.errors import NotFactorizable, UnsafeModel
from pymc_dp.records.ancestry import array_of, is_data
from pymc_dp.records.extraction import Records, extract
from pymc_dp.records.units import row_counts
from pymc_dp.subsampling.wording import in_words_of_subsampling

#: Records up to which the structural proof is also checked numerically.
_CHECKED = 20_000


def refuse_budget(model: Model, sampler: str) -> None:
    """Refuse a model that was given a privacy budget, or a copy of one."""
    if get_budget(model) is not None or has_lost_budget(model):
        raise UnsafeModel(
            f"{sampler} is not private, and this model has a PrivacyBudget. Use a private step, "
            "pm.sample(step=dp.DPLangevin(...)) for example, or build the model without a budget."
        )


def refuse_partial(vars: Any, model: Model, sampler: str) -> list[Any]:
    """The value variables of the model, all of which must move together."""
    discrete = [rv.name for rv in model.free_RVs if not rv.type.dtype.startswith("float")]
    if discrete:
        raise ValueError(
            f"{sampler} moves continuous variables, and {discrete} are discrete. Sum them out "
            "(pm.Mixture, pm.ZeroInflatedPoisson, ...)."
        )
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    if vars is not None:
        chosen = set(get_value_vars_from_user_vars(vars, model))
        left = [value.name for value in values if value not in chosen]
        if left:
            raise ValueError(
                f"{sampler} moves all variables together, but `vars` leaves out {left}. Leave "
                "`vars` out."
            )
    return values


def check_order(order: Any) -> int:
    """An order of control variates."""
    whole = isinstance(order, Integral) and not isinstance(order, bool)
    if not (whole and order in (0, 1, 2)):
        raise ValueError(f"order must be 0, 1 or 2, not {order!r}.")
    return int(order)


class Data:
    """The shared arrays that a step has read, to see whether they are still the same."""

    def __init__(self, model: Model) -> None:
        used = ancestors([*model.basic_RVs, *model.rvs_to_values.values(), *model.potentials])
        shared = {*filter(is_data, used), *model.data_vars}
        self._held = [(v, array_of(v)) for v in shared]

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": []}  # a copy in another process runs what was checked here

    def refuse_changed(self) -> None:
        """Raise a ValueError if one was set to something else."""
        for v, before in self._held:
            now = array_of(v)
            if now is not before and not np.array_equal(now, before):
                name = f"`{v.name}`" if v.name else "A shared variable of the model"
                raise ValueError(
                    f"{name} was changed after the step was made, which has read it already. "
                    "Make the step again."
                )


def read(model: Model, sampler: str) -> Records:
    """Prior and per-record terms of a model, with one group of rows; `sampler` is for messages.

    Raises NotFactorizable if the log-likelihood cannot be shown to be a sum of one term per record,
    and UnsafeModel if the data are not finite.
    """
    try:
        rows = row_counts(model, ())
    except NotFactorizable as error:
        raise NotFactorizable(in_words_of_subsampling(str(error))) from error
    if not rows:
        raise NotFactorizable(
            f"{sampler} samples records, and the model has no observed variable. Use NUTS."
        )
    if len(set(rows.values())) > 1:
        lengths = ", ".join(f"`{name}`: {n}" for name, n in rows.items())
        raise NotFactorizable(
            f"{sampler} samples records, and the observed variables differ in length ({lengths}). "
            "Give them one row per record each, or use NUTS."
        )
    [n] = set(rows.values())
    # data without an axis of records, centres of groups for example, may reach every record
    shared = [v.name for v in model.data_vars if n not in np.shape(array_of(v))]
    try:
        return extract(model, public=shared, check=n <= _CHECKED)
    except NotFactorizable as error:
        raise NotFactorizable(
            f"{sampler} estimates the log-likelihood from a sample of records, so it has to be a "
            f"sum of one term per record. {in_words_of_subsampling(str(error))} NUTS samples "
            "models that are none."
        ) from error
    except UnsafeModel as error:
        raise UnsafeModel(in_words_of_subsampling(str(error))) from error
