"""Releases on batches of records: fixed for a budget before anything else is released under it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import Any

from pymc_dp.base.checks import check_integer
from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import LedgerError
from pymc_dp.privacy.events import BatchEvent, FixedBatchGaussianEvent, SubsampledGaussianEvent
from pymc_dp.privacy.holder import COINS
from pymc_dp.privacy.plan import Batches, plan_batches
from pymc_dp.tuning.scaled import FIRST_PART

#: How batches are drawn.
KINDS = ("poisson", "fixed_size")


def check_batch_size(
    size: Any, budget: PrivacyBudget, runs: int, noise_multiplier: Any, mode: Any
) -> int:
    """Return the size of a batch, expected or fixed; refuse what has no accounting."""
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


def check_kind(batches: Any, size: Any, budget: PrivacyBudget) -> None:
    """Refuse a kind of batches that is unknown, or has no accounting under the budget."""
    if batches not in KINDS:
        raise ValueError(f"batches must be 'poisson' or 'fixed_size', not {batches!r}.")
    if batches == "poisson":
        return
    if size is None:
        raise ValueError("batches='fixed_size' needs a batch_size, the number of units in a batch.")
    if budget.neighboring != "replace_one":
        raise ValueError(
            "batches='fixed_size' is accounted under neighboring='replace_one' only, where the "
            "number of units is public. Leave batches at 'poisson'."
        )


def batch_events(
    mechanism: str, size: int, batches: str, budget: PrivacyBudget
) -> Callable[[float], BatchEvent]:
    """The event of a release on one batch, as a function of its noise multiplier."""
    if batches == "fixed_size":
        return lambda noise: FixedBatchGaussianEvent(mechanism, noise, size, budget.n_public)
    probability = round(COINS * size / budget.n_public) / COINS
    return lambda noise: SubsampledGaussianEvent(mechanism, noise, probability)


@contextmanager
def fixed_batches(
    budget: PrivacyBudget,
    event_of: Callable[[float], BatchEvent],
    counts: Mapping[str, int],
    noise_multiplier: float | None,
    automatic: bool,
) -> Iterator[Batches]:
    """One release on a batch per iteration, charged as a whole while a step is made.

    If making the step fails before anything was released, the charge is taken back.  Without a
    `noise_multiplier` the smallest one with which all fits is used.  `automatic` says that a
    preparation will need a part of the budget; `event_of` comes from `batch_events`.
    """
    ledger, account = budget.ledger, budget.account
    cap = ledger.cap(account)
    before = ledger.batches(account)
    found = plan_batches(
        event_of,
        draws=counts["draws"],
        tune=counts["tune"],
        chains=counts["chains"],
        epsilon=budget.epsilon,
        delta=budget.delta,
        neighboring=budget.neighboring,
        cap=cap,
        room=math.ceil(Fraction(FIRST_PART) * cap) if automatic else 0,
        noise_multiplier=noise_multiplier,
    )
    ledger.fix_batches(account, found.to_dict())
    try:
        yield found
    except BaseException:
        with suppress(LedgerError):  # something was released: they stay
            ledger.fix_batches(account, before)
        raise
