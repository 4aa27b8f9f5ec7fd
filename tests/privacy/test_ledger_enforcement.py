"""The budget is enforced: what is not paid for reads no record, and nothing paid for is lost."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.budget import get_budget
from pymc_dp.errors import BudgetExceeded, PlanMismatch, UnsafeModel
from pymc_dp.privacy.accounting import epsilon_from_mu, mu_from_units
from pymc_dp.records.units import RecordStore
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.groups import RowGroup
from tests.privacy.toy import SETTINGS, logistic_model, make_step, sample

pytestmark = pytest.mark.filterwarnings("ignore:The gradients of this plan:UserWarning")


class Looks:
    """Counts every look at records: the store that holds them, and the engine that computes."""

    def __init__(self, monkeypatch):
        self.count = 0
        for cls, names in (
            (RecordStore, ["read"]),
            (RowGroup, ["columns"]),
            (RowEngine, ["log_likelihood", "scores", "vectors", "work"]),
        ):
            for name in names:
                monkeypatch.setattr(cls, name, self._counting(getattr(cls, name)))

    def _counting(self, method):
        def counted(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        return counted


@pytest.fixture
def looks(monkeypatch):
    return Looks(monkeypatch)


def spend(model, units=None):
    """Charge the account from elsewhere, by `units` or to its end."""
    budget = get_budget(model)
    units = budget.ledger.remaining(budget.account) if units is None else units
    assert budget.ledger.lease(budget.account, 1, units, 1) == 1


def mu2(model):
    budget = get_budget(model)
    return budget.ledger.spent(budget.account)


def posterior(idata):
    return _compat.group(idata, "posterior")["a"].values


def stats(idata):
    return _compat.group(idata, "sample_stats")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_finished_budget_is_refused_when_the_step_is_built(name, looks):
    model = logistic_model()
    spend(model)
    with pytest.raises(BudgetExceeded, match="used up; no record was read"):
        make_step(model, name)
    assert looks.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_finished_budget_is_refused_by_sample(name, looks):
    model = logistic_model()
    step = make_step(model, name)
    spend(model)
    spent, looks.count = mu2(model), 0
    with pytest.raises(BudgetExceeded, match="remains"):
        sample(model, step)
    with pytest.raises(BudgetExceeded, match="remains"):
        dp.sample(5, chains=1, step=step, model=model, cores=1, progressbar=False)
    assert looks.count == 0
    assert mu2(model) == spent


@pytest.mark.slow
def test_a_budget_that_does_not_reach_to_the_end_is_refused_before_a_look(looks):
    model = logistic_model()
    step = make_step(model)
    spend(model, step.plan.iteration_cost)  # one iteration short
    looks.count = 0
    with pytest.raises(BudgetExceeded, match="remains"):
        sample(model, step)
    assert looks.count == 0


@pytest.mark.slow
def test_building_a_step_charges_nothing_and_reads_no_value_of_the_store():
    model = logistic_model()
    step = make_step(model)
    assert step.queries.holder.engine.reads == 0
    assert mu2(model) == 0


def test_a_budget_that_is_eaten_meanwhile_freezes_the_chains(caplog):
    """All chains have begun; then a charge from elsewhere takes what is left."""
    draws, cores = 70, 2  # more than the first lease
    model = logistic_model()
    step = make_step(model, draws=draws, chains=cores)
    begun = set()

    def eat(trace, draw):
        begun.add(draw.chain)
        if len(begun) == cores and get_budget(model).remaining().gdp_mu2 > 0:
            spend(model)

    idata = sample(model, step, callback=eat, cores=cores)
    frozen = stats(idata)["dp_frozen"].values
    assert not frozen[:, 0].any()
    assert frozen[:, -1].any()
    for chain, flags in zip(posterior(idata), frozen, strict=True):
        first = int(np.argmax(flags)) if flags.any() else draws
        assert flags[first:].all()  # for good
        assert np.all(chain[first:] == chain[first - 1])
    assert mu2(model) <= get_budget(model).ledger.cap(1)
    assert caplog.text.count("used up") == frozen.any(axis=1).sum()
    safe = dp.release(idata, model)
    lengths = (~frozen).sum(axis=1)
    assert posterior(safe).size == max(k * (lengths >= k).sum() for k in lengths)
    assert "dp_frozen" not in stats(safe)


def test_a_frozen_chain_does_not_call_the_engine_and_warns_once(looks):
    model = logistic_model()
    step = make_step(model, draws=70)
    said = []

    def eat(trace, draw):
        if draw.draw_idx == 3:
            spend(model)
        if draw.stats[0]["dp_frozen"]:
            if not said:
                looks.count = 0
            said.append(draw.stats[0]["warning"])

    sample(model, step, callback=eat)
    assert len(said) == 70 - 64
    assert looks.count == 0
    assert "used up" in said[0].message
    assert not any(said[1:])


def test_a_chain_whose_start_can_not_be_paid_reads_nothing(looks, monkeypatch):
    model = logistic_model()
    step = make_step(model, "DPHMC", reuse_gradient=True)
    begin = type(step.queries).begin_chain

    def late(queries):
        spend(model)
        begin(queries)

    monkeypatch.setattr(type(step.queries), "begin_chain", late)
    looks.count = 0
    idata = sample(model, step)
    assert looks.count == 0
    assert stats(idata)["dp_frozen"].values.all()
    with pytest.raises(dp.PrivacyError, match="No draw was made"):
        dp.release(idata, model)


def test_an_interrupt_keeps_the_draws_made():
    model = logistic_model()
    step = make_step(model, draws=30, chains=1)

    def interrupt(trace, draw):
        if draw.draw_idx == 11:
            raise KeyboardInterrupt

    idata = sample(model, step, callback=interrupt, cores=1)
    safe = dp.release(idata, model)
    assert 11 <= posterior(safe).size <= 12
    np.testing.assert_array_equal(posterior(safe), posterior(idata))
    assert "differentially private" in dp.privacy_statement(safe)


def test_dp_sample_gives_back_what_was_not_begun():
    """After an interrupt only the iterations that were begun stay charged."""
    model = logistic_model()
    step = make_step(model, draws=30)

    def interrupt(trace, draw):
        if draw.draw_idx == 11:
            raise KeyboardInterrupt

    safe = dp.sample(
        30, chains=1, step=step, model=model, cores=1, progressbar=False, callback=interrupt
    )
    assert posterior(safe).shape[1] == 12
    assert mu2(model) == 12 * step.plan.iteration_cost


@pytest.mark.slow
def test_dp_sample_gives_back_after_an_error_too():
    model = logistic_model()
    step = make_step(model, draws=30)

    def fail(trace, draw):
        if draw.draw_idx == 4:
            raise RuntimeError("callback")

    with pytest.raises(RuntimeError, match="callback"):
        dp.sample(30, chains=1, step=step, model=model, cores=1, progressbar=False, callback=fail)
    assert mu2(model) == 5 * step.plan.iteration_cost


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 2])
def test_a_step_samples_as_often_as_planned_and_not_once_more(runs, looks):
    model = logistic_model()
    step = make_step(model, runs=runs)
    for k in range(runs):
        sample(model, step)
        assert mu2(model) == (k + 1) * step.plan.run_cost
    looks.count = 0
    with pytest.raises(BudgetExceeded, match=r"all planned runs .* have been used"):
        sample(model, step)
    assert looks.count == 0
    assert mu2(model) == runs * step.plan.run_cost <= get_budget(model).ledger.cap(1)


def test_a_step_that_pm_sample_did_not_start_does_not_move(looks):
    model = logistic_model()
    step = make_step(model)
    looks.count = 0
    with pytest.raises(PlanMismatch, match="no run was authorised"):
        step.step(model.initial_point())
    with pytest.raises(PlanMismatch, match=r"was not started by pm\.sample"):
        step._progressbar_config(1)
    assert looks.count == 0
    assert mu2(model) == 0


@pytest.mark.parametrize("order", [1, -1])
def test_another_step_beside_a_private_one_is_refused(order, looks):
    """Its moves would be made with exact log-densities and published as private."""
    model = logistic_model()
    step = make_step(model)
    with model:
        other = pm.Slice([model["a"]])
    looks.count = 0
    with pytest.raises(UnsafeModel, match="combined with other step methods"):
        sample(model, step, beside=[other], order=order)
    assert looks.count == 0
    assert mu2(model) == 0


@pytest.mark.slow
def test_draws_that_another_step_has_moved_stop_the_chain():
    """Population samplers never ask for the progress bar, where the plan is checked."""
    model = logistic_model()
    step = make_step(model, draws=5)
    sample_once = {"cores": 1, "callback": _interrupt}
    sample(model, step, **sample_once)  # authorises a run, of which no chain is left
    with model, pytest.raises((PlanMismatch, UnsafeModel)):
        pm.sample(
            draws=5,
            tune=0,
            chains=3,
            cores=1,
            step=[step, pm.DEMetropolis([model["a"]])],
            progressbar=False,
        )
    point = model.initial_point()
    fresh = make_step(logistic_model(), draws=5)
    fresh.budget.ledger.begin_run(1, fresh.plan.plan_id, max_runs=1, run_cost=0)
    moved, _ = fresh.step(point)
    with pytest.raises(UnsafeModel, match="Another step method has moved"):
        fresh.step({**moved, "b": moved["b"] + 1.0})


def _interrupt(trace, draw):
    raise KeyboardInterrupt


def test_two_budgets_on_one_ledger_share_its_cap(tmp_path):
    path = tmp_path / "ledger.sqlite"
    dp.Ledger.create(path, epsilon=3.0, delta=1e-6)
    first = logistic_model(2.0, ledger=path)
    with pytest.raises(BudgetExceeded, match="overall cap"):
        logistic_model(2.5, ledger=path)
    sample(first, make_step(first))
    assert mu2(first) > 0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_an_account_may_spend_what_was_promised_and_no_more(epsilon):
    budget = get_budget(logistic_model(epsilon))
    cap = budget.ledger.cap(budget.account)
    assert 0.999999 * epsilon < epsilon_from_mu(mu_from_units(cap), budget.delta) <= epsilon
