"""Several owners in one process: whose noise and whose budget it is, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import stats

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.privacy.answer import Query, Receipt
from pymc_dp.privacy.queries import ScoreAt
from pymc_dp.tuning.model_parts import ModelParts
from tests.owners.common import (
    EPSILONS,
    MARKS,
    SIZES,
    analyst,
    ask,
    by_hand,
    data,
    kick,
    logistic,
    owner,
)
from tests.selection import marked

pytestmark = MARKS

# -- budgets and statements -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", marked(["DPLangevin", "DPHMC", "DPPenalty"], slow=["DPHMC", "DPPenalty"])
)
def test_each_owner_pays_from_its_own_ledger(models: list[pm.Model], kind: str) -> None:
    model, _ = analyst(models)
    step = by_hand(model, kind)
    draws = dp.sample(10, chains=2, step=step, model=model, progressbar=False)
    assert _compat.group(draws, "posterior")["b"].shape == (2, 10, 2)
    for k, one in enumerate(models):
        budget = dp.get_budget(one)
        assert budget is not None
        spent = budget.spent().epsilon
        assert 0.999 * EPSILONS[k] < spent <= EPSILONS[k]
        counts: dict[str, int] = {}
        for _, _, event, count in budget.releases():
            counts[event.mechanism] = counts.get(event.mechanism, 0) + count
        plan = step.plan
        expected = {
            name: 20 * plan.per_iteration.get(name, 0) + 2 * plan.at_start.get(name, 0)
            for name in plan.events
        }
        assert counts == expected


def test_the_statement_has_a_paragraph_for_each_owner(
    models: list[pm.Model], tmp_path: Path
) -> None:
    model, _ = analyst(models)
    released = dp.sample(10, chains=2, step=by_hand(model), model=model, progressbar=False)
    text = dp.privacy_statement(released)
    for k, (n, epsilon) in enumerate(zip(SIZES, EPSILONS, strict=True)):
        [paragraph] = [line for line in text.split("\n") if f"hospital {k + 1}:" in line]
        assert f"({epsilon:g}, 1e-06)-differentially private" in paragraph
        assert f"{n} rows" in paragraph and "everybody else" in paragraph
    facts = json.loads(_compat.attributes(released)["pymc_dp_statement"])
    assert [one["epsilon"] for one in facts["owners"]] == list(EPSILONS)
    assert facts["epsilon"] == max(EPSILONS)
    page = dp.report(released, tmp_path / "report.html", model=model).read_text(encoding="utf-8")
    for k, one in enumerate(facts["owners"]):
        assert f"<caption>What hospital {k + 1} promises</caption>" in page
        assert f"The ledger of hospital {k + 1} was temporary" in page
        assert f"<td>{one['gdp_mu']:.4g}</td>" in page
    with pytest.raises(ValueError, match="result of several owners"):
        dp.plot_budget(released)


def test_what_is_not_used_comes_back(models: list[pm.Model]) -> None:
    model, owners = analyst(models)
    step = by_hand(model)
    before = [dp.get_budget(one).spent().gdp_mu2 for one in models]
    step.queries.holder.forget()
    step.close()
    after = [dp.get_budget(one).spent().gdp_mu2 for one in models]
    assert min(before) > 0.05
    assert max(after) == 0.0
    teller = owners.owners[0].channel.teller
    found = ask(teller, step.plan.plan_id, {"chain": 0, "number": 0, "query": kick()})
    assert "not agreed, or was ended" in found["error"][1]


# -- noise ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_noise_of_owners_adds_up(models: list[pm.Model]) -> None:
    """Mean and variance of many answers; each test fails by chance in one of 10^7 runs."""
    model, _ = analyst(models)
    step = by_hand(model, draws=400, chains=1)
    queries = step.queries
    queries.holder.forget()
    z, sum_ = np.array([0.2, -0.1]), queries._scores
    exact = 0.0
    for one in models:
        parts = ModelParts(one, dp.get_budget(one))
        engine = parts.engine.with_coordinates(step.coordinates)
        vectors = np.concatenate([b for _, b in engine.vectors(engine.scores(z))], axis=1)
        norms = np.linalg.norm(vectors, axis=0)
        exact = exact + (vectors * np.minimum(1.0, 1.0 / norms)).sum(axis=1)
    receipt = Receipt([("gradient", 0.0, 800)])
    found = np.array(
        [queries.holder.answer(Query("gradient", ScoreAt(z), sum_), receipt) for _ in range(800)]
    )
    sd = queries.gradient_noise_sd
    assert sd == pytest.approx(2.0 * math.sqrt(sum(x**2 for x in own_multipliers(models))))
    errors = ((found - exact) / sd).ravel()
    assert abs(errors.mean()) * math.sqrt(errors.size) < 5.4
    squares = (errors**2).sum()
    assert stats.chi2.ppf(5e-8, errors.size) < squares < stats.chi2.isf(5e-8, errors.size)
    assert abs(np.corrcoef(found.T)[0, 1]) * math.sqrt(len(found)) < 5.4


def own_multipliers(models: list[pm.Model]) -> list[float]:
    """Of the gradients of the newest plan of each owner."""
    found = []
    for one in models:
        budget = dp.get_budget(one)
        assert budget is not None
        plans = [e.payload for e in budget.account.entries() if e.kind == "plan"]
        found.append(plans[-1]["events"]["gradient"]["noise_multiplier"])
    return found


@pytest.mark.slow
def test_shares_are_those_of_the_budgets(models: list[pm.Model]) -> None:
    model, _ = analyst(models)
    by_hand(model)
    mu2 = [dp.get_budget(one).spent().gdp_mu2 for one in models]
    squares = [x**2 for x in own_multipliers(models)]
    products = [a * b for a, b in zip(mu2, squares, strict=True)]
    np.testing.assert_allclose(products, products[0], rtol=1e-6)


# -- models that differ ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prior": 2.5}, r"the prior of the same numbers is another"),
        ({"name": "beta"}, r"its parameters are \[\['beta', \[2\]\]\], not \[\['b'"),
    ],
)
def test_another_model_is_refused(
    models: list[pm.Model], changes: dict[str, Any], words: str
) -> None:
    other = logistic(50, 5, **changes)
    with other:
        dp.PrivacyBudget(1.0, 1e-6, dataset="the other")
    with pytest.raises(dp.UnsafeModel, match=f"The model of the other is not yours: {words}"):
        analyst([*models[:2], other])
    assert dp.get_budget(other).spent().epsilon == 0.0


def test_a_likelihood_with_numbers_of_its_own_is_refused(models: list[pm.Model]) -> None:
    x, y = data(80, 7)
    with pm.Model() as other:
        b = pm.Normal("b", 0.0, 2.0, shape=2)
        pm.Bernoulli("y", logit_p=(pm.Data("x", x) - float(x.mean())) @ b, observed=y)
        dp.PrivacyBudget(1.0, 1e-6)
    with pytest.raises(dp.UnsafeModel, match="the likelihood of the same numbers is another"):
        analyst([*models[:2], other])


def test_relations_must_be_the_same(models: list[pm.Model]) -> None:
    other = logistic(50, 5)
    with other:
        dp.PrivacyBudget(1.0, 1e-6, neighboring="add_or_remove_one", n_public=50)
    with pytest.raises(dp.UnsafeModel, match="All must protect the same"):
        analyst([models[0], other])


def test_one_owner_is_not_several(models: list[pm.Model]) -> None:
    with logistic(40, 99), pytest.raises(ValueError, match="two or more"):
        dp.Owners(models[:1])
    model = logistic(40, 99)
    with model, pytest.raises(ValueError, match=r"owners\[1\] must be an address"):
        dp.Owners([models[0], 42])
    with model, pytest.raises(ValueError, match="The owner at hospital needs certificates"):
        dp.Owners([models[0], "hospital"])
    with model, pytest.raises(ValueError, match=r"owners\[1\] is the analyst's model"):
        dp.Owners([models[0], model])


@pytest.fixture(scope="module")
def agreed() -> tuple[pm.Model, list[pm.Model]]:
    """An analyst and owners of whom no test may spend."""
    models = [owner(k) for k in range(3)]
    return analyst(models)[0], models


@pytest.mark.parametrize(
    ("step", "settings", "words"),
    [
        ("DPSGLD", {"batch_size": 20}, "not for batches"),
        ("DPPenalty", {"batch_size": 20}, "not for batches"),
        ("DPLangevin", {"runs": 2}, "one run at a time"),
        ("ExponentialFamilyPenalty", {}, "sends owners code"),
    ],
)
def test_steps_that_do_not_fit_are_refused(
    agreed: tuple[pm.Model, list[pm.Model]], step: str, settings: dict[str, Any], words: str
) -> None:
    model, models = agreed
    with pytest.raises(ValueError, match=words):
        dp.sample(10, chains=2, step=step, step_kwargs=settings, model=model, progressbar=False)
    assert all(dp.get_budget(one).spent().epsilon == 0.0 for one in models)
