"""What was paid for is not lost: steps that were not run, late failures, other data between."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
import sys
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.raise_op import Assert

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.errors import LedgerError
from pymc_dp.privacy import meter
from pymc_dp.privacy.accounting import MU2_UNIT, epsilon_from_mu
from pymc_dp.privacy.meter import Meter
from pymc_dp.steps.base import PrivateStep
from pymc_dp.tuning.model_parts import ModelParts
from tests.selection import marked, others
from tests.steps.test_automatic import (
    automatic,
    build,
    charged,
    check_all_spent,
    check_result,
    interrupt,
)
from tests.steps.test_conformance import pm_sample

laplace_module = sys.modules["pymc_dp.steps.laplace"]  # hidden by the function

pytestmark = [
    pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning"),
]


def fail(*args: Any, **kwargs: Any) -> None:
    raise MemoryError


def laplace(model: pm.Model, **kwargs: Any) -> Any:
    return dp.laplace(10, model=model, progressbar=False, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", marked(["langevin-quadratic", "langevin-anchored"], exhaustive=["langevin-quadratic"])
)
def test_a_step_that_was_not_run_is_built_again_for_nothing(name):
    model, budget = build("logistic")
    automatic(name, model)  # and lost, as by an interrupt of pm.sample(step=...)
    labels = charged(budget)
    step = automatic(name, model)
    assert charged(budget) == labels
    check_result(dp.release(pm_sample(model, step, cores=1), model), budget)
    check_all_spent(budget)
    if step.form == "quadratic":  # other draws of the same target, which cost nothing
        again = automatic(name, model)
        check_result(dp.release(pm_sample(model, again, cores=1), model), budget)
        assert charged(budget) == labels
    else:
        with pytest.raises(dp.BudgetExceeded, match="used up"):
            automatic(name, model)


@pytest.mark.parametrize(
    "where",
    marked(
        ["pymc_dp.sampling.pm.sample", "pymc_dp.sampling.release"],
        slow=["pymc_dp.sampling.release"],
        exhaustive=["pymc_dp.sampling.pm.sample"],
    ),
)
def test_a_failure_after_the_step_was_built_loses_nothing(where, monkeypatch):
    model, budget = build("logistic")

    def sample() -> Any:
        return dp.sample(
            20, chains=2, step_kwargs={"form": "quadratic"}, model=model, cores=1, progressbar=False
        )

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(where, fail)
        sample()
    labels = charged(budget)
    check_all_spent(budget)
    assert _compat.group(sample(), "posterior").sizes["draw"] == 20
    assert charged(budget) == labels
    with pytest.raises(dp.BudgetExceeded, match="used up"):
        sample()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["laplace", "find_MAP"])
def test_a_failure_after_the_preparation_loses_nothing(call, monkeypatch):
    model, budget = build("logistic")
    again = laplace if call == "laplace" else lambda model: dp.find_MAP(model=model)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(laplace_module, "dataset", fail)
        again(model)
    labels = charged(budget)
    check_all_spent(budget)
    again(model)
    assert charged(budget) == labels
    with pytest.raises(dp.BudgetExceeded, match="used up"):
        again(model)


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 1])
def test_whether_data_were_replaced_is_told_by_what_was_done(again, monkeypatch):
    """Not by their values: a result shows whether a preparation was resumed."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(2, 500))
    with pm.Model() as model:
        y = pm.Data("data", data[0])
        pm.Normal("y", pm.Normal("a", 0, 10), 1.0, observed=y)
        budget = dp.PrivacyBudget(20.0, 1e-5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 4)
        laplace(model)
    labels = charged(budget)
    pm.set_data({"data": data[again]}, model=model)
    with pytest.warns(UserWarning, match="cannot be resumed .data or priors were replaced"):
        laplace(model)
    after = charged(budget)[len(labels) :]
    assert after[0] == labels[0], "a new one, from its beginning"  # what follows, noise decides


@pytest.mark.slow
def test_a_complete_preparation_goes_on_whatever_was_paid_since():
    model, budget = build("logistic")
    automatic("langevin-anchored", model)
    labels = charged(budget)
    dp.clipping_report(model, scaling=0.1, clip_norm=1.0, epsilon=0.5)
    assert len(charged(budget)) == len(labels) + 1
    step = automatic("langevin-anchored", model)
    assert len(charged(budget)) == len(labels) + 1
    check_result(dp.release(pm_sample(model, step, cores=1), model), budget)
    check_all_spent(budget)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.5, 0.98])
def test_what_was_paid_since_is_missed_by_the_chains(part):
    model, budget = build("logistic")
    automatic("langevin-plain", model)
    left = budget.account.read().remaining / MU2_UNIT
    epsilon = epsilon_from_mu(math.sqrt(part * left), budget.delta)
    dp.clipping_report(model, scaling=0.1, clip_norm=1.0, epsilon=epsilon)
    if part == 0.5:
        with pytest.warns(UserWarning, match="50% of what it left for the chains"):
            step = automatic("langevin-plain", model)
        check_result(dp.release(pm_sample(model, step, cores=1), model), budget)
    else:
        spent = budget.account.read().spent
        with pytest.raises(dp.BudgetExceeded, match="98% of what it left"):
            automatic("langevin-plain", model)
        assert budget.account.read().spent == spent


@pytest.mark.slow
def test_a_step_by_hand_does_not_take_what_rounding_left(monkeypatch):
    """What an interrupted preparation may still need, though nothing else is left."""
    with pm.Model() as model:
        a = pm.Normal("a", 0, 10)
        pm.Normal("y", a, 1.0, observed=np.random.default_rng(0).normal(size=500))
        dp.bounds(y=(-5.0, 5.0))
        dp.PrivacyBudget(20.0, 1e-5)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(laplace_module, "dataset", fail)
        laplace(model)
    with pytest.raises(dp.BudgetExceeded, match="used up"):
        dp.ExponentialFamilyPenalty(
            draws=1, chains=1, scaling=1.0, step_size=0.1, model=model, progressbar=False
        )


@pytest.mark.slow
def test_what_is_missing_is_asked_before_it_is_paid(monkeypatch):
    """The rest of an interrupted preparation cannot be paid: nothing is added to it."""
    model, budget = build("logistic")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 4)
        laplace(model)
    first = charged(budget)
    laplace(model, share=0.5)
    between = charged(budget)
    laplace(model)
    after = charged(budget)[len(between) :]
    assert after[: len(first)] == first, "a new one, from its beginning"
    check_all_spent(budget)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: pm.Uniform("a", 0.0, 5.0, initval=0.0),
        lambda: pm.HalfNormal("a", 1.0, initval=0.0),
    ],
)
def test_an_initial_value_on_the_edge_is_refused_before_anything_is_spent(declare):
    with pm.Model() as model:
        a = declare()
        pm.Normal("y", a, 1.0, observed=np.random.default_rng(0).normal(1.0, 1.0, 300))
        budget = dp.PrivacyBudget(5.0, 1e-5)
    with pytest.raises(ValueError, match="initial value of a lies on the edge"):
        laplace(model)
    with pytest.raises(ValueError, match="initial value of a lies on the edge"):
        automatic("langevin", model)
    assert not charged(budget)


def test_a_prior_that_holds_no_number_is_refused_before_anything_is_spent():
    """So are those that bambi makes of truncated data with PyMC 5."""
    with pm.Model() as model:
        scale = pm.HalfStudentT("scale", 4.0, [1.0, np.nan])
        pm.Normal("y", 0.0, scale.sum(), observed=np.random.default_rng(0).normal(1.0, 1.0, 300))
        budget = dp.PrivacyBudget(5.0, 1e-5)
    for call in (laplace, lambda model: automatic("langevin", model)):
        with pytest.raises(ValueError, match="A prior may hold NaN or an infinite number"):
            call(model)
    assert not charged(budget)


@pytest.mark.slow
def test_a_product_begins_where_its_slope_is_not_zero():
    """Both factors are 0 at the initial point, where one cannot be told from the other."""
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b")
        pm.Normal("y", a * b, 1.0, observed=rng.normal(1.2, 1.0, 800))
        dp.PrivacyBudget(20.0, 1e-6)
    step = dp.DPLangevin(draws=400, chains=2, model=model, progressbar=False)
    assert step.form == "quadratic"
    idata = pm.sample(
        400, tune=0, chains=2, cores=1, step=step, model=model, progressbar=False,
        compute_convergence_checks=False,
    )  # fmt: skip
    posterior = _compat.group(dp.release(idata, model), "posterior")
    product = (posterior["a"] * posterior["b"]).values
    assert abs(product.mean() - 1.2) < 0.5 and product.std() < 0.5


# -- runs ------------------------------------------------------------------------------------------


def sample(model: pm.Model, form: str, draws: int = 40, **options: Any) -> Any:
    return dp.sample(
        draws, chains=2, step_kwargs={"form": form}, model=model, cores=1, progressbar=False,
        compute_convergence_checks=False, **options,
    )  # fmt: skip


def stop_at(patch: pytest.MonkeyPatch, iteration: int) -> None:
    """An interrupt before an iteration of each chain; before the first lease if it is 0."""
    begin = Meter.begin_iteration

    def interrupted(self: Meter) -> bool:
        if self.started == iteration:
            raise KeyboardInterrupt
        return begin(self)

    patch.setattr(Meter, "begin_iteration", interrupted)


@pytest.mark.parametrize(
    ("where", "form"),
    marked(
        itertools.product(["start", "lease", "third draw"], ["quadratic", "anchored"]),
        slow=[("third draw", "quadratic"), ("lease", "anchored")],
        exhaustive=[("start", "quadratic"), ("start", "anchored"), ("lease", "quadratic")],
    ),
)
def test_an_interrupted_run_does_not_end_its_preparation(form, where, monkeypatch):
    model, budget = build("logistic")
    with monkeypatch.context() as patch:
        if where == "start":
            patch.setattr(Meter, "begin_chain", interrupted_start)
        else:
            stop_at(patch, 0 if where == "lease" else 3)
        if where == "third draw":
            with pytest.warns(
                UserWarning, match="interrupted: the result has 2 chains of 3 draws"
            ) as said:
                found = sample(model, form)
            again = any("same call makes all draws" in str(w.message) for w in said)
            assert again == (form == "quadratic"), "its chains cost nothing"
            assert _compat.group(found, "posterior").sizes["draw"] == 3
            planned = "2 chains of 3 draws (of 2 chains of 40 draws planned)"
            assert planned in dp.privacy_statement(found)
        else:  # PyMC's words for an interrupt before there are draws
            with pytest.raises(ValueError, match="Not enough samples"):
                sample(model, form)
    labels = charged(budget)
    assert _compat.group(sample(model, form), "posterior").sizes["draw"] == 40
    assert charged(budget) == labels, "what was released is not paid again"
    with pytest.raises(dp.BudgetExceeded, match="used up"):
        sample(model, form)


def interrupted_start(self: Meter) -> int:
    raise KeyboardInterrupt


@pytest.mark.compiled
@pytest.mark.slow
def test_batches_are_made_where_the_first_run_was_interrupted_before_its_chains(monkeypatch):
    """They are charged once, so that another step makes them, and the first one never."""
    model, budget = build("logistic", epsilon=5.0)

    def batches() -> Any:
        return dp.sample(
            20, chains=2, step="DPSGLD", step_kwargs={"batch_size": 50}, model=model, cores=1,
            progressbar=False, compute_convergence_checks=False,
        )  # fmt: skip

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="Not enough samples"):
        patch.setattr(Meter, "begin_chain", interrupted_start)
        batches()
    [first] = [e.plan for e in budget.ledger.entries() if e.kind == "run"]
    assert _compat.group(batches(), "posterior").sizes["draw"] == 20
    with pytest.raises(dp.PlanMismatch, match="another step"):
        budget.account.begin_chain(first)
    with pytest.raises(dp.BudgetExceeded, match="have been made"):
        batches()


@pytest.mark.slow
@pytest.mark.parametrize("what", marked(["finish", "close"], exhaustive=["close"]))
def test_a_ledger_that_can_not_be_told_of_the_end_costs_no_result(what, monkeypatch):
    model, _ = build("logistic")

    def locked(self: PrivateStep) -> None:
        raise LedgerError("locked by another process")

    monkeypatch.setattr(PrivateStep, what, locked)
    with pytest.warns(UserWarning, match="locked by another process"):
        released = sample(model, "quadratic")
    assert _compat.group(released, "posterior").sizes["draw"] == 40


@pytest.mark.slow
def test_only_chains_that_are_charged_miss_what_was_paid_since(monkeypatch):
    """A normal approximation of the prior leaves most of the budget, and needs none of it."""
    model, budget = build("logistic", epsilon=0.02)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(laplace_module, "dataset", fail)
        laplace(model)
    left = budget.account.read().remaining / MU2_UNIT
    epsilon = epsilon_from_mu(math.sqrt(0.97 * left), budget.delta)
    dp.clipping_report(model, scaling=0.1, clip_norm=1.0, epsilon=epsilon)
    labels = charged(budget)
    laplace(model)
    assert charged(budget) == labels


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_release_that_was_not_kept_is_not_paid_again(share, monkeypatch):
    model, budget = build("logistic")
    keep = type(budget.account).keep

    def locked(self: Any, *args: Any) -> None:
        if args[-1] == 2:
            raise LedgerError("locked by another process")
        keep(self, *args)

    with monkeypatch.context() as patch, pytest.raises(LedgerError):
        patch.setattr(type(budget.account), "keep", locked)
        laplace(model, share=share)
    before = charged(budget)
    assert len(before) == 3
    laplace(model, share=share)
    after = charged(budget)
    assert after[:3] == before and len(set(after)) == len(after)
    assert after == [e.payload["label"] for e in budget.ledger.entries() if e.kind == "release"]


@pytest.mark.slow
def test_a_second_run_that_was_planned_is_missed(monkeypatch):
    model, _ = build("logistic")
    step = automatic("langevin-plain", model, runs=2)
    pm_sample(model, step, cores=1)
    with pytest.warns(UserWarning, match="has not made all of its runs"):
        laplace(model)


@pytest.mark.slow
def test_automatic_draws_go_on_with_those_of_an_interrupted_preparation(monkeypatch):
    model, budget = build("logistic")

    def auto() -> Any:
        return dp.sample(
            "auto", chains=2, step="DPPenalty", model=model, cores=1, progressbar=False,
            compute_convergence_checks=False,
        )  # fmt: skip

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 9)
        auto()
    labels = charged(budget)
    auto()
    after = charged(budget)
    assert after[: len(labels)] == labels and len(set(after)) == len(after)


def test_a_worker_that_runs_the_script_again_opens_no_budget(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pm.Model():
        pm.Normal("y", pm.Normal("a"), 1.0, observed=np.zeros(100))
        with pytest.raises(RuntimeError, match="__main__"):
            dp.PrivacyBudget(1.0, 1e-5)


# -- improper priors ------------------------------------------------------------------------------


def _pilot(of: Any) -> None:
    pm.Normal("pilot", of, 1.0, observed=np.array([0.2, -0.3, 0.1]))


def _centred() -> Any:
    tau = pm.HalfCauchy("tau", 2.0)
    return pm.Normal("a", pm.Normal("mu"), tau, shape=4)[np.arange(200) % 4]


def _flat_mean() -> Any:
    tau = pm.HalfNormal("tau", 2.0)
    return pm.Normal("b", pm.Flat("a"), tau, shape=4)[np.arange(200) % 4]


def _observed(of: Any, made: Any) -> Any:
    _pilot(of(made))
    return made


def _small_scales(scale: Any) -> Any:
    """Effects, beside a slope: at small scales log densities are numbers of sixteen digits."""
    effects = pm.Normal("a", pm.Normal("mu", 0.0, 10.0), scale, shape=4)
    return effects[np.arange(200) % 4] + pm.Normal("slope") * np.linspace(-1, 1, 200)


def _limited(value: Any) -> Any:
    return Assert("too far")(-0.5 * value**2, pt.abs(value) < 100.0)


#: What the records see, and whether the prior of `a` is improper.
PRIORS = {
    "normal": (lambda: pm.Normal("a"), False),
    "heavy tails": (lambda: pm.Cauchy("a", 0.0, 3.0), False),
    "centred hierarchy": (_centred, False),
    "very small scales": (
        lambda: _small_scales(pm.Gamma("prec", 0.01, 0.01) ** -0.5),
        False,
    ),
    "very large and small scales": (lambda: _small_scales(pm.LogNormal("t", 0.0, 10.0)), False),
    "limited by hand": (lambda: pm.CustomDist("a", logp=_limited), False),
    "angle": (lambda: pm.VonMises("a", 0.0, 2.0), False),
    "flat between bounds": (
        lambda: pm.Flat("a", transform=pm.distributions.transforms.Interval(0, 5), initval=2.0),
        False,
    ),
    "flat and observed": (lambda: _observed(lambda a: a, pm.Flat("a")), False),
    "flat": (lambda: pm.Flat("a"), True),
    "flat mean of a hierarchy": (_flat_mean, True),
    "flat and not observed": (lambda: _observed(lambda a: 0.0 * a, pm.Flat("a")), True),
    "flat beyond what is observed": (lambda: _observed(pm.math.sigmoid, pm.Flat("a")), True),
    "part of a mixture": (
        lambda: pm.Mixture("a", [0.5, 0.5], [pm.Flat.dist(), pm.Normal.dist()]),
        True,
    ),
    "by hand": (lambda: pm.CustomDist("a", logp=lambda value: 0.0 * value), True),
}


#: One of each kind runs always.
IMPROPER_OR_NOT = [
    "heavy tails",
    "centred hierarchy",
    "flat and observed",
    "flat",
    "flat beyond what is observed",
]


@pytest.mark.parametrize(
    "name",
    marked(PRIORS, slow=others(PRIORS, IMPROPER_OR_NOT)),
)
def test_which_priors_are_improper(name):
    declare, expected = PRIORS[name]
    with pm.Model() as model:
        mean = declare()
        pm.Normal("y", mean, 1.0, observed=np.random.default_rng(0).normal(size=200))
        observed = [rv.name for rv in model.observed_RVs if rv.name != "y"]
        budget = dp.PrivacyBudget(
            2.0, 1e-5, public=observed, privacy_unit={"y": np.arange(200)}, n_public=200
        )
    assert ModelParts(model, budget).improper == (["a"] if expected else [])


# -- signals --------------------------------------------------------------------------------------


def test_releases_where_python_does_not_own_the_signal(monkeypatch):
    """As in a program that embeds Python: there is no handler to put back."""
    with monkeypatch.context() as patch:
        patch.setattr(meter.signal, "getsignal", lambda number: None)
        patch.setattr(meter.signal, "signal", lambda *args: pytest.fail("not ours"))
        with meter.interrupts_wait():
            pass


def test_an_interrupt_waits_for_the_release():
    seen = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt), meter.interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            seen.append("released")
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen
