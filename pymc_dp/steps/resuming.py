"""Which preparation a step may resume, those not finished of the same data, and their end."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pymc.model import Model
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors

from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import LedgerError
from pymc_dp.privacy.ledger import PREPARATION
from pymc_dp.records.ancestry import is_data
from pymc_dp.records.units import private_observed

PREPARES = " preparation"
"""Ending of the names of plans of preparations."""


@dataclass(frozen=True, eq=False)
class Version:
    """Data and priors as they were at some time.

    Whether private data are still the same is told by what was done, and not by their values: a
    result shows whether a preparation was resumed, and could tell whether a record was changed
    in between.  ``pm.set_data`` makes another version, whatever it sets.

    `public` is a digest of public data and priors.  Each function in `private` gives a private
    array, as long as anybody holds it.
    """

    public: bytes
    private: list[Callable[[], Any]]

    def is_that_of(self, other: Version) -> bool:
        """Whether data and priors are the same."""
        if self.public != other.public or len(self.private) != len(other.private):
            return False
        pairs = zip(self.private, other.private, strict=True)
        return all(a() is not None and a() is b() for a, b in pairs)


def private_arrays(model: Model, public: Iterable[str]) -> list[Callable[[], Any]]:
    """References to the arrays behind the private observed variables, in a fixed order."""
    public = set(public)
    observed = private_observed(model, public)
    roots = [*observed, *(model.rvs_to_values[rv] for rv in observed)]
    lengths = set(model.dim_lengths.values())  # new labels are no new data
    found: dict[int, Any] = {}
    for source in ancestors(roots):
        if isinstance(source, Constant):
            array = source.data
        elif is_data(source) and source.name not in public and source not in lengths:
            array = source.container.storage[0]
        else:
            continue
        found.setdefault(id(array), array)
    return [_reference(array) for array in found.values() if array is not None]


def _reference(array: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(array)
    except TypeError:  # a number
        return lambda: array


def unfinished_preparations(budget: PrivacyBudget) -> list[tuple[int, dict[str, Any]]]:
    """Plan ids and payloads of the preparations that were not finished, newest first."""
    ledger = budget.ledger
    mine = [e for e in ledger.entries() if e.account == budget.account]
    finished = {e.plan for e in mine if e.kind == "finish"}
    return [
        (e.plan, e.payload)
        for e in reversed(mine)
        if e.kind == "plan"
        and e.plan is not None
        and e.plan not in finished
        and e.payload.get("kind") == PREPARATION
        and e.payload.get("sampler", "").endswith(PREPARES)
    ]


def settle(end: Callable[[], None]) -> None:
    """Call `end`, which tells the ledger that a run or its preparation has ended.

    If that fails or is interrupted it warns: this is no reason to lose a result.
    """
    try:
        end()
    except (LedgerError, KeyboardInterrupt) as error:
        why = str(error) or "interrupted"
        warnings.warn(
            f"The ledger was not told that a run has ended: {why}. Nothing is lost but what was "
            "charged and not used.",
            UserWarning,
            stacklevel=3,
        )
