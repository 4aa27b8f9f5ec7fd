"""Releases on batches of records: fixed for a budget before anything else is released under it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from pymc_dp._checks import check_integer
from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import LedgerError
from pymc_dp.mechanisms import COINS
from pymc_dp.plan import Batches, plan_batches
from pymc_dp.warmup.scaled import FIRST_PART

__all__ = ["check_batch_size", "fixed_batches"]


def check_batch_size(
    size: Any, budget: PrivacyBudget, runs: int, noise_multiplier: Any, mode: Any
) -> int:
    """An expected number of units in a batch; refuses what has no accounting."""
    size = check_integer("batch_size", size, minimum=1)
    if size > budget.n_public:
        raise ValueError(
            f"batch_size is the expected size of a batch, at most the {budget.n_public} "
            f"{budget.unit}s of the data, not {size}."
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
    budget: PrivacyBudget,
    mechanism: str,
    batch_size: int,
    counts: Mapping[str, int],
    noise_multiplier: float | None,
    automatic: bool,
) -> Iterator[Batches]:
    """One release on a Poisson batch per iteration, charged as a whole while a step is made.

    If that fails before anything was released, the charge is taken back.

    Parameters
    ----------
    budget : PrivacyBudget
    mechanism : str
    batch_size : int
        Expected number of units in a batch.
    counts : mapping
        ``draws``, ``tune`` and ``chains``.
    noise_multiplier : float or None
        None: the smallest one with which all fits.
    automatic : bool
        Whether a preparation will need a part of the budget.
    """
    ledger, account = budget.ledger, budget.account
    cap = ledger.cap(account)
    before = ledger.batches(account)
    found = plan_batches(
        mechanism,
        draws=counts["draws"],
        tune=counts["tune"],
        chains=counts["chains"],
        sampling_probability=round(COINS * batch_size / budget.n_public) / COINS,
        epsilon=budget.epsilon,
        delta=budget.delta,
        neighboring=budget.neighboring,
        cap=cap,
        room=math.ceil(FIRST_PART * cap) if automatic else 0,
        noise_multiplier=noise_multiplier,
    )
    ledger.fix_batches(account, found.to_dict())
    try:
        yield found
    except BaseException:
        with suppress(LedgerError):  # something was released: they stay
            ledger.fix_batches(account, before)
        raise
