"""What was spent on a data set, in a file that survives its writers."""

from __future__ import annotations

from pymc_dp.ledger.accounts import Account
from pymc_dp.ledger.entry import Entry
from pymc_dp.ledger.ledger import Ledger

__all__ = ["Account", "Entry", "Ledger"]
