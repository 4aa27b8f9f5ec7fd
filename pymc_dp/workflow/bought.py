"""What the results that a part of the budget buys have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import pandas as pd

from pymc_dp.privacy.preparation import Preparation
from pymc_dp.workflow.estimates import Estimate


@dataclass(frozen=True, eq=False, repr=False)
class Bought(ABC):
    """A table that was bought; it prints with what it cost, and says if nothing is guaranteed."""

    table: pd.DataFrame
    epsilon: float
    privacy_guarantee: str

    @property
    def _secure(self) -> bool:
        return self.privacy_guarantee != "none"

    @abstractmethod
    def _says(self) -> str:
        """The result in one sentence."""

    def _heading(self) -> str:
        return self._says() if self._secure else f"NO PRIVACY GUARANTEE. {self._says()}"

    def __repr__(self) -> str:
        return f"{self._heading()}\n{self.table.to_string(float_format=_short)}"

    def _repr_html_(self) -> str:
        return f"<p>{self._heading()}</p>{self.table.to_html(float_format=_short)}"


def _short(x: float) -> str:
    return f"{x:.4g}"


def guarantee_of(preparation: Preparation, *estimates: Estimate) -> str:
    """What is guaranteed: "none" after insecure noise, now or in what was released before."""
    secure = preparation.secure and all(estimate.secure for estimate in estimates)
    return "(epsilon, delta)-differential privacy" if secure else "none"
