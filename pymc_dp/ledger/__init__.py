"""What was spent on a data set, in a file that survives its writers."""

from __future__ import annotations

from pymc_dp.ledger.accounts import Account
from pymc_dp.ledger.entry import SPENDING, Entry
from pymc_dp.ledger.ledger import Ledger
from pymc_dp.ledger.releases import PREPARATION, STATISTIC, Release

__all__ = ["PREPARATION", "SPENDING", "STATISTIC", "Account", "Entry", "Ledger", "Release"]
