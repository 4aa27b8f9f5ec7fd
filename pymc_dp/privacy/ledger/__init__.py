"""What was spent on a data set, in a file that survives its writers."""

from __future__ import annotations

from pymc_dp.privacy.ledger.accounts import Account
from pymc_dp.privacy.ledger.entry import SPENDING, Entry
from pymc_dp.privacy.ledger.ledger import Ledger
from pymc_dp.privacy.ledger.releases import PREPARATION, STATISTIC, Release

__all__ = ["PREPARATION", "SPENDING", "STATISTIC", "Account", "Entry", "Ledger", "Release"]
