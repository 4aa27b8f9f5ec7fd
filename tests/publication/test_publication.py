"""What may be published, and whether the statement says the truth."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.model.fgraph import clone_model

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.privacy.accounting import epsilon_from_mu
from pymc_dp.publication.publish import Provenance, provenance

N = 40
RNG = np.random.default_rng(4)
FLAGS = RNG.integers(0, 2, (N, 2))
OUTCOME = RNG.integers(0, 2, N)
SETTINGS = {"step_size": 0.3, "clip_norm": 1.5, "scaling": 1.0}


def budgeted(deterministics=None, **options) -> pm.Model:
    """A logistic regression on 0/1 columns, with Deterministics of (model, beta) by name."""
    with pm.Model(coords={"effect": ["smoker", "treated"]}) as model:
        beta = pm.Normal("beta", 0, 1, dims="effect")
        for name, formula in (deterministics or {}).items():
            pm.Deterministic(name, formula(beta))
        pm.Bernoulli("y", logit_p=pt.as_tensor_variable(FLAGS) @ beta, observed=OUTCOME)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dp.PrivacyBudget(epsilon=2.0, delta=1e-3, model=model, **options)
    return model


def sampled(model: pm.Model, draws: int = 6) -> object:
    return run(model, dp.DPPenalty(draws=draws, chains=1, model=model, **SETTINGS))


def run(model: pm.Model, step: dp.DPPenalty) -> object:
    return pm.sample(
        draws=step.plan.draws,
        tune=0,
        chains=1,
        cores=1,
        step=step,
        model=model,
        progressbar=False,
        compute_convergence_checks=False,
    )


def facts(result: object) -> dict:
    return json.loads(_compat.attributes(result)["pymc_dp_statement"])


@pytest.fixture(scope="module")
def plain():
    """A model without Deterministics, its raw draws and what was released of them."""
    model = budgeted()
    raw = sampled(model)
    return model, raw, dp.release(raw, model)


FORMULAS = {
    "log_odds_ratio": (lambda b: pt.exp(b), Provenance.PUBLIC),
    "difference": (lambda b: b[1] - b[0], Provenance.CONSTANTS),
    "one_record_row": (lambda b: pt.as_tensor_variable(FLAGS[0]) @ b, Provenance.PRIVATE),
    "column_means": (lambda b: pt.as_tensor_variable(FLAGS.mean(0)) @ b, Provenance.PRIVATE),
    "outcome": (lambda b: b[0] + pt.as_tensor_variable(OUTCOME).mean(), Provenance.PRIVATE),
    "rescaled": (lambda b: b / float(FLAGS.std()), Provenance.CONSTANTS),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_deterministics_leave_only_if_their_graph_shows_that_they_may(name):
    formula, expected = FORMULAS[name]
    model = budgeted({name: formula})
    assert provenance(model, model[name], dp.get_budget(model)) is expected
    raw = sampled(model)
    released = dp.release(raw, model)
    assert (name in _compat.group(released, "posterior")) == (expected is Provenance.PUBLIC)
    if expected is Provenance.PRIVATE:
        with pytest.raises(dp.UnsafeRelease, match=name):
            dp.release(raw, model, var_names=["beta", name])
    else:
        asked = dp.release(raw, model, var_names=["beta", name])
        assert name in _compat.group(asked, "posterior")
        assert (name in facts(asked)["taken_as_public"]) == (expected is Provenance.CONSTANTS)
        assert (name in dp.privacy_statement(asked)) == (expected is Provenance.CONSTANTS)


@pytest.mark.slow
def test_shorter_data_set_after_sampling_do_not_open_the_door():
    with pm.Model() as model:
        y = pm.Data("y_data", OUTCOME)
        beta = pm.Normal("beta", 0, 1, shape=2)
        pm.Deterministic("mu", pt.as_tensor_variable(FLAGS) @ beta)
        pm.Bernoulli("y", logit_p=pt.as_tensor_variable(FLAGS) @ beta, observed=y)
        dp.PrivacyBudget(epsilon=2.0, delta=1e-3)
    raw = sampled(model)
    with model:
        pm.set_data({"y_data": np.zeros(7, dtype=int)})
    assert list(_compat.group(dp.release(raw, model), "posterior").data_vars) == ["beta"]


def test_data_of_another_length_than_promised_are_refused():
    with pm.Model():
        x, y = pm.Data("x", FLAGS[:10]), pm.Data("y_data", OUTCOME[:10])
        beta = pm.Normal("beta", 0, 1, shape=2)
        pm.Bernoulli("y", logit_p=x @ beta, observed=y)
        budget = dp.PrivacyBudget(epsilon=2.0, delta=0.05)
        pm.set_data({"x": FLAGS, "y_data": OUTCOME})
        with pytest.raises(dp.UnsafeModel, match="changed their length"):
            dp.DPPenalty(draws=5, chains=1, **SETTINGS)
    assert budget.spent().epsilon == 0


@pytest.mark.slow
def test_a_copy_predicts_nothing_at_private_covariates(plain):
    model, _, released = plain
    for other in (model, clone_model(model)):
        with pytest.raises(dp.UnsafeRelease, match="covariates"):
            dp.sample_posterior_predictive(released, other)


def test_predictions_at_public_covariates_are_labelled(plain):
    _, _, released = plain
    with pm.Model():
        beta = pm.Normal("beta", 0, 1, shape=2)
        pm.Bernoulli("new", logit_p=pt.as_tensor_variable(np.eye(2)) @ beta, observed=[0, 0])
        predicted = dp.sample_posterior_predictive(released, progressbar=False)
    assert _compat.group_names(predicted) == ["posterior_predictive"]
    assert facts(predicted)["epsilon"] == 2.0


def test_a_budget_can_not_be_restated_after_the_fact(plain):
    model, raw, released = plain
    budget = dp.get_budget(model)
    for name in ("epsilon", "delta", "neighboring", "public"):
        with pytest.raises(AttributeError, match=name):
            setattr(budget, name, 0.01)
    assert facts(released)["epsilon"] == 2.0
    object.__setattr__(budget, "epsilon", 0.01)  # even then the ledger has the truth
    try:
        assert facts(dp.release(raw, model))["epsilon"] == 2.0
    finally:
        object.__setattr__(budget, "epsilon", 2.0)


def test_units_that_do_not_add_up_are_not_added(tmp_path):
    ledger = dp.Ledger.create(tmp_path / "study.sqlite")
    budgeted(ledger=ledger)
    with pytest.raises(dp.LedgerError, match="privacy_unit"):
        budgeted(ledger=ledger, privacy_unit=np.arange(N) // 2)


def test_the_total_of_a_ledger_names_all_that_was_declared_public(tmp_path):
    ledger = dp.Ledger.create(tmp_path / "study.sqlite")
    budgeted(ledger=ledger, public=["effect"])
    model = budgeted(ledger=ledger)
    total = facts(dp.release(sampled(model), model))["ledger_total"]
    assert total["public"] == ["effect"]
    budget = dp.get_budget(model)
    # the total counts what may be spent, of both budgets
    assert total["gdp_mu2"] == pytest.approx(
        2 * (budget.spent().gdp_mu2 + budget.remaining().gdp_mu2)
    )
    assert total["epsilon"] == pytest.approx(
        epsilon_from_mu(math.sqrt(total["gdp_mu2"]), budget.delta), rel=1e-6
    )


def test_names_of_coordinates_stay_unless_declared(plain):
    _, _, released = plain
    posterior = _compat.group(released, "posterior")
    assert posterior.coords["effect"].values.tolist() == [0, 1]
    declared = budgeted(public=["effect"])
    posterior = _compat.group(dp.release(sampled(declared), declared), "posterior")
    assert posterior.coords["effect"].values.tolist() == ["smoker", "treated"]


def test_data_without_a_label_have_that_of_their_ledger(tmp_path):
    dp.Ledger.create(tmp_path / "l.sqlite", dataset="wave 3")
    model = budgeted(ledger=tmp_path / "l.sqlite")
    released = dp.release(sampled(model), model)
    assert dp.statement_facts(released)["dataset"] == "wave 3"
    assert 'respect to the data "wave 3"' in dp.privacy_statement(released)


def test_the_ledger_head_hides_what_was_hashed(tmp_path):
    heads = set()
    for k in range(2):
        ledger = dp.Ledger.create(tmp_path / f"{k}.sqlite", dataset="same")
        heads.add(ledger.head())
    assert len(heads) == 2


def test_the_epsilon_shown_while_sampling_counts_what_other_steps_spent():
    model = budgeted()
    with model:
        steps = [
            dp.DPPenalty(draws=5, chains=1, noise_multiplier=8.0, **SETTINGS) for _ in range(2)
        ]
    for step in steps:
        idata = run(model, step)
    last = float(_compat.group(idata, "sample_stats")["dp_epsilon"][0, -1])
    assert last == pytest.approx(dp.get_budget(model).spent().epsilon, rel=1e-9)
