"""What a holder remembers of a path, and that rows which see each other are found out."""

from __future__ import annotations

import pickle

import numpy as np
import pymc as pm
import pytest

from pymc_dp.base.matrices import Coordinates
from pymc_dp.errors import PrivacyError
from pymc_dp.privacy.answer import Grid, IntervalSum, Query, VectorSum
from pymc_dp.privacy.holder import Holder, rehearse
from pymc_dp.privacy.queries import EnergyError, Kick
from pymc_dp.records.extraction import extract
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import Columns, RowGroup, Scores
from tests.privacy.toy import LinearRecords, Rows, VectorRecords, make_queries

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


class MadeUp(VectorRecords):
    """Made-up records differ from each other; `see` is what a record sees of all of them."""

    see = staticmethod(lambda rows: rows)

    def synthetic(self, value: int | None = 0, first: int = 0, last: int | None = None) -> MadeUp:
        return type(self)(np.random.default_rng(0).normal(size=(9, self.d))[first:last])

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__(self.see(np.asarray(rows)))


class Centred(MadeUp):
    see = staticmethod(lambda rows: rows - rows.mean(axis=0))


class Placed(MadeUp):
    """A record is changed a little by where it stands."""

    see = staticmethod(lambda rows: rows * (1.0 + 1e-9 * np.arange(len(rows))[:, None]))


@pytest.mark.parametrize("coupled", [Centred, Placed])
def test_rows_that_see_each_other_are_found_before_they_are_charged(coupled) -> None:
    query = Query("gradient", Rows(2), VectorSum(GRID, "replace_one", 2, 9.0))
    rehearse(MadeUp(np.ones((5, 2))), [query])
    with pytest.raises(PrivacyError, match="not sums of one contribution per unit"):
        rehearse(coupled(np.ones((5, 2))), [query])


def coupled_log_likelihood(self: RowEngine, z: np.ndarray) -> np.ndarray:
    values = OWN["log_likelihood"](self, z)
    return values + values.mean()


def coupled_scores(self: RowEngine, z: np.ndarray) -> Scores:
    found = OWN["scores"](self, z)
    [[scores]] = found.rows
    scores += scores.mean()
    return found


def coupled_work(self: RowEngine, *args: np.ndarray) -> np.ndarray:
    values = OWN["work"](self, *args)
    return values + values.mean()


def centred_columns(self: RowGroup) -> Columns:
    columns = OWN["columns"](self)
    for cut, design in columns.designs.items():
        columns.designs[cut] = design - design.mean(axis=1, keepdims=True)
    return columns


OWN = {name: getattr(RowEngine, name) for name in ("log_likelihood", "scores", "work")}
OWN["columns"] = RowGroup.columns


@pytest.mark.parametrize(
    ("where", "name", "fault", "mechanisms"),
    [
        (RowEngine, "log_likelihood", coupled_log_likelihood, ["energy_error", "log_ratio"]),
        (RowEngine, "scores", coupled_scores, ["gradient"]),
        (RowEngine, "work", coupled_work, ["energy_error"]),
        (RowGroup, "columns", centred_columns, ["gradient", "log_ratio"]),
    ],
)
@pytest.mark.parametrize("family", [pm.Bernoulli, pm.Poisson])
def test_rows_of_a_model_that_see_each_other_are_found(
    monkeypatch, where, name, fault, mechanisms, family
) -> None:
    rng = np.random.default_rng(0)
    with pm.Model() as model:
        eta = rng.normal(size=(30, 2)) @ pm.Normal("b", shape=2)
        law = {"logit_p": eta} if family is pm.Bernoulli else {"mu": pm.math.exp(eta)}
        family("y", **law, observed=rng.integers(0, 2, 30))
    engine = RowEngine.of(extract(model), Coordinates(np.zeros(2), np.eye(2)))
    for mechanism in mechanisms:
        asked = [mechanism] if mechanism != "energy_error" else ["gradient", mechanism]
        bounds = {"gradient": 50.0, "log_ratio": 1.0}
        queries = make_queries(engine, dict.fromkeys(asked, 1.0), bounds)
        queries.compile()
        with monkeypatch.context() as patch, pytest.raises(PrivacyError, match="not sums of one"):
            patch.setattr(where, name, fault)
            queries.compile()
