"""What a check and a comparison release: exact distances of neighbours, and audits with real noise.

In an audit the worlds differ in one user of twenty rows, who has other outcomes.  False alarms: a
bound passes the truth with probability 1e-6, and so does a mean of 1,000 runs that is 0.25 mu off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_dp.audit import audit_scores, gaussian_score, gaussian_separation
from pymc_dp.privacy import answer, noise, preparation
from pymc_dp.privacy.accounting import epsilon_from_mu, mu_from_budget, units_from_mu
from pymc_dp.privacy.answer import Grid, Query, VectorSum
from pymc_dp.privacy.holder import Holder
from pymc_dp.privacy.preparation import Preparation
from pymc_dp.records.extraction import extract
from pymc_dp.records.units import RecordStore
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from pymc_dp.workflow.checking import discrepancies
from pymc_dp.workflow.comparing import Moments, Together
from pymc_dp.workflow.discrepancies import below, named
from pymc_dp.workflow.estimates import Estimate
from tests.privacy.test_oneoff import FreeAccount

pytestmark = [pytest.mark.compiled, pytest.mark.audit]

DELTA, EPSILON, RUNS, CERTAIN = 1e-6, 10.0, 1000, 1 - 1e-6
USERS = np.concatenate([np.zeros(20, int), np.repeat(np.arange(1, 21), 2)])
RELEASES = ("check", "comparison")


def counts(family: str) -> tuple[RowEngine, pm.Model, Estimate]:
    """Rows of counts, and an estimate that noise has made wide."""
    rng = np.random.default_rng(4)
    n = len(USERS)
    with pm.Model() as model:
        x = pm.Data("x", rng.normal(size=n))
        group = pm.Data("group", np.where(USERS, rng.integers(0, 3, n), 0))
        mu = pt.exp(pm.Normal("a", shape=3)[group] + pm.Normal("b") * x)
        if family == "poisson":
            pm.Poisson("y", mu, observed=rng.poisson(1.0, n))
        else:
            pm.NegativeBinomial("y", mu=mu, alpha=2.0, observed=rng.poisson(1.0, n))
    d = 4
    estimate = Estimate.of(np.zeros(d), np.eye(d) / 50, np.eye(d) / 10, np.eye(d) / 50)
    assert len(estimate.points()) == 2 * d
    return RowEngine.of(extract(model, privacy_unit=USERS), estimate.coordinates), model, estimate


class Release:
    """What is asked, of records in which some rows have other numbers."""

    def __init__(self, name: str) -> None:
        self.compares = name == "comparison"
        families = ("poisson", "negative binomial") if self.compares else ("poisson",)
        self.engines, models, estimates = zip(*map(counts, families), strict=True)
        self.worlds = (0, 1) if self.compares else (0, 40)  # what speaks for another model
        self.spec: Any
        if self.compares:
            self.spec = Moments(tuple(e.coordinates for e in self.engines), 0.4, len(set(USERS)))
        else:
            some = [named("mean"), named("zeros"), below(2.0)]
            self.spec = discrepancies(
                self.engines[0], estimates[0], some, len(set(USERS)), models[0], "group", None
            )

    def rows(self, change: Any = None, by_user: bool = True) -> Any:
        """The records after `change` of the arrays; each row is a unit if not `by_user`."""
        changed = []
        for engine in self.engines:
            [group] = engine.groups
            arrays = [array.copy() for array in group.store.read()]
            if change is not None:
                [outcome] = group.functions.graph.outcomes
                change(arrays, outcome.leaf)
            for array, old in zip(arrays, group.store.read(), strict=True):
                array.flags.writeable = old.flags.writeable  # or functions are compiled again
            units = group.units if by_user else None
            n = engine.n_units if by_user else len(USERS)
            changed.append(engine.on([RowGroup(group.functions, RecordStore(arrays), units)], n))
        return Together(tuple(changed), frozenset()) if self.compares else changed[0]

    def outcomes(self, of_user: float) -> Any:
        """A change of the outcomes of the first user."""

        def change(arrays: list[np.ndarray], outcome: int) -> None:
            arrays[outcome][USERS == 0] = of_user

        return change


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    return Release(request.param)


def nasty(arrays: list[np.ndarray], outcome: int) -> None:
    """The worst that the first user may have."""
    worst = np.resize([np.nan, np.inf, -np.inf, 1e300, -5e-324, 40.0], 20)
    for array in arrays:
        own = array[USERS == 0]
        of_type = worst if array.dtype.kind == "f" else np.resize([2, 0, 1], 20)
        array[USERS == 0] = np.resize(of_type, own.shape).astype(array.dtype)


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_neighbours_are_as_close_as_what_was_paid_for(release: Release, relation: str) -> None:
    """In integers, exactly, whatever one user has; what the others add is the same to the bit."""
    spec, grid = release.spec, Grid.finest(0.7, 21)
    query = Query("release", spec, VectorSum(grid, relation, spec.size, spec.norm))
    others = Holder(release.rows().part(np.arange(1, 21))).total(query)
    bound, sums = (2**grid.log2_sigma / 0.7) ** 2, []
    for change in (None, nasty, release.outcomes(0), release.outcomes(40)):
        rows = release.rows(change)
        with np.errstate(all="ignore"):
            sums.append(Holder(rows).total(query))
            np.testing.assert_array_equal(Holder(rows.part(np.arange(1, 21))).total(query), others)
            values = np.hstack([block.copy() for _, block in spec.blocks(rows)])
        assert np.linalg.norm(values, axis=0).max() <= spec.norm * (1 + 1e-12)
    sums = [others, *sums] if relation == "add_or_remove_one" else sums
    assert max(sum(int(x) ** 2 for x in one - sums[0]) for one in sums) <= bound


class Once(Holder):
    """Adds up the records once for all runs of an audit."""

    found: Any = None

    def total(self, query: Query) -> np.ndarray:
        if self.found is None:
            self.found = super().total(query)
        return self.found


def audit(release: Release, monkeypatch: pytest.MonkeyPatch, by_user: bool = True) -> Any:
    """The bound, and the epsilon of these two worlds."""
    spec, account, rehearsed, found = release.spec, FreeAccount(), set[Any](), []
    units = units_from_mu(mu_from_budget(EPSILON, DELTA))
    for outcome in release.worlds:
        rows = release.rows(release.outcomes(outcome), by_user)
        holder = Once(rows)
        monkeypatch.setattr(preparation, "holder_of", lambda rows, plan, own=holder: own)
        values = []
        for _ in range(RUNS):
            one = Preparation(rows, account, 1, units, 21)  # type: ignore[arg-type]
            one._rehearsed = rehearsed
            value, sd = one.vector_sum("release", spec, spec.norm, 1.0)
            values.append(value)
        tau = one.units_mu2**-0.5
        unit = VectorSum(Grid.finest(tau, 21), "replace_one", spec.size, spec.norm).unit
        found.append((np.array(values), holder.found * unit, sd))
    (here, first, sd), (there, second, _) = found
    scores = [gaussian_score(values, first, second, sd) for values in (here, there)]
    bound = audit_scores(*scores, DELTA, confidence=CERTAIN, method="student")
    return bound, epsilon_from_mu(gaussian_separation(first, second, sd), DELTA)


def test_no_audit_refutes_what_was_promised(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, epsilon = audit(release, monkeypatch)
    assert not bound.refutes(EPSILON)
    assert epsilon > 0.2 * EPSILON  # the worlds are far apart
    assert 0.5 * epsilon < bound.epsilon_lower < 1.5 * epsilon


def test_an_audit_sees_users_that_count_by_their_rows(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: each row is a unit."""
    bound, _ = audit(release, monkeypatch, by_user=False)
    assert bound.refutes(2.0 * EPSILON)


def test_an_audit_sees_noise_that_is_too_small(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: a tenth of the noise."""
    monkeypatch.setattr(
        answer, "rounded_normal", lambda size, m: noise.rounded_normal(size, m) // 10
    )
    bound, _ = audit(release, monkeypatch)
    assert bound.refutes(2.0 * EPSILON)
