"""A guard among PyMC's step methods: a budgeted model is not sampled without privacy by accident.

PyMC asks every class in ``pymc.step_methods.STEP_METHODS`` about a variable without a step. This
one raises for a budgeted model: no plain ``pm.sample()``, external sampler or partial step.
"""

from __future__ import annotations

from typing import Any, NoReturn

import pymc as pm
from pymc.step_methods.compound import BlockedStep, Competence

from pymc_dp.budget import MODELS, is_tagged
from pymc_dp.errors import UnsafeModel


class BudgetGuard(BlockedStep):
    """Never samples; refuses to let other step methods sample a budgeted model."""

    name = "budget_guard"

    def step(self, point: Any) -> NoReturn:
        """Raise: the guard does not sample."""
        raise UnsafeModel("The guard of budgeted models does not sample.")

    @staticmethod
    def competence(var: Any, has_grad: bool = False) -> Competence:
        """INCOMPATIBLE, or an error for a variable of a budgeted model."""
        if is_tagged(var) or any(var in model.free_RVs for model in list(MODELS)):
            raise UnsafeModel(
                f"`{var.name}` belongs to a model with a PrivacyBudget (or to a copy of one) and "
                "would be sampled without privacy. Pass a private step for all variables: "
                "pm.sample(..., step=dp.DPLangevin(...)), or use dp.sample. For a non-private run, "
                "build the model without a budget."
            )
        return Competence.INCOMPATIBLE


def install() -> None:
    """Add the guard to PyMC's step methods, once."""
    methods = pm.step_methods.STEP_METHODS
    if not any(getattr(method, "name", None) == BudgetGuard.name for method in methods):
        methods.append(BudgetGuard)
