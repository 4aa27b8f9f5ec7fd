"""What a holder remembers of a path, and that it answers for no other one."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from pymc_dp.errors import PrivacyError
from pymc_dp.privacy.answer import Grid, IntervalSum, Query, VectorSum
from pymc_dp.privacy.holder import Holder
from pymc_dp.privacy.queries import EnergyError, Kick
from tests.privacy.toy import LinearRecords

GRID = Grid.finest(1.0, 3)
START, END = np.zeros(2), np.array([0.3, -0.2])


def holder() -> Holder:
    return Holder(LinearRecords([[0.5, 0.1], [-0.2, 0.4], [0.3, 0.3]]))


def kick(asked: Holder, path: int) -> None:
    asked.total(Query("gradient", Kick(path, START, END / 2), VectorSum(GRID, "replace_one", 2, 9)))


def energy_error(asked: Holder, path: int, kicks: int = 1) -> int:
    of = EnergyError(path, kicks, START, END)
    [total] = asked.total(Query("energy_error", of, IntervalSum(GRID, "replace_one", -1.0, 1.0)))
    return int(total)


def test_linear_log_likelihoods_have_no_energy_error() -> None:
    asked = holder()
    kick(asked, 1)
    assert abs(energy_error(asked, 1)) <= 3  # rounding


def test_a_lost_path_is_not_answered() -> None:
    """Its work would count as 0, and the chain would have another target."""
    twice, other, fewer, copied = holder(), holder(), holder(), holder()
    for asked in (twice, other, fewer, copied):
        kick(asked, 1)
    energy_error(twice, 1)
    kick(other, 2)
    copied = pickle.loads(pickle.dumps(copied))
    for asked, kicks in ((twice, 1), (other, 1), (fewer, 2), (copied, 1), (holder(), 1)):
        with pytest.raises(PrivacyError, match="asked for its energy error"):
            energy_error(asked, 1, kicks)
    fewer.forget()
    with pytest.raises(PrivacyError, match="asked for its energy error"):
        energy_error(fewer, 1)
