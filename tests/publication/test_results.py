"""Draws that were paid for outlive what fails, and what makes no result is refused before."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.ode import DifferentialEquation
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import wrap_py
from pytensor.scalar import Composite, add, constant, float64
from pytensor.tensor.elemwise import Elemwise
from pytensor.xtensor import as_xtensor

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.errors import LedgerError
from pymc_dp.privacy.account import Account
from pymc_dp.privacy.meter import Meter
from pymc_dp.publication.publish import releasable
from pymc_dp.publication.results import check_fits, largest_rectangle
from pymc_dp.steps.base import PrivateStep
from tests.steps.test_automatic import charged, check_all_spent

pytestmark = [
    pytest.mark.filterwarnings("ignore:These data already have a budget:UserWarning"),
    pytest.mark.filterwarnings("ignore:The gradients of this plan are worth:UserWarning"),
]

DRAWS = 40
Y = np.random.default_rng(0).normal(size=300)


def normal(
    declare: Callable[[pm.Model, Any], None] | None = None, name: str = "a", **of: Any
) -> tuple[pm.Model, dp.PrivacyBudget]:
    """A mean, or several of them, and whatever else is declared before the budget."""
    coords, options = of.pop("coords", None), of.pop("budget", {})
    with pm.Model(coords=coords) as model:
        a = pm.Normal(name, 0, 10, **of)
        y = pm.Data("data", Y)
        if declare is not None:
            declare(model, a)
        pm.Normal("y", a if a.ndim == 0 else a.sum(), 1.0, observed=y)
        budget = dp.PrivacyBudget(5.0, 1e-5, **options)
    return model, budget


def step(model: pm.Model, **options: Any) -> dp.DPHMC:
    d = sum(int(np.prod(rv.type.shape)) for rv in model.free_RVs)
    by_hand = {"scaling": 0.1 * np.eye(d), "clip_norm": 1.0, "n_steps": 2, "step_size": 0.3}
    return dp.DPHMC(
        **{"draws": DRAWS, "chains": 2, "progressbar": False, **by_hand, **options}, model=model
    )


def sample(model: pm.Model, step: Any, **options: Any) -> Any:
    settings = {"cores": 1, "progressbar": False, "compute_convergence_checks": False}
    return dp.sample(DRAWS, chains=2, step=step, model=model, **{**settings, **options})


def sizes(released: Any) -> tuple[int, int]:
    found = _compat.group(released, "posterior").sizes
    return found["chain"], found["draw"]


# -- refused before anything is spent -------------------------------------------------------------


def _wrong_coords() -> Any:
    return normal(shape=2, dims="k", coords={"k": ["a", "b", "c"]})


def _wrong_deterministic() -> Any:
    declare = lambda model, a: pm.Deterministic("b", a + a, dims="k")  # noqa: E731
    return normal(declare, shape=1, coords={"k": ["a", "b"]})


def _wrong_data() -> Any:
    return normal(lambda model, a: pm.Data("z", np.zeros(3), dims="k"), coords={"k": [1, 2]})


def _two_lengths() -> Any:
    def declare(model: pm.Model, a: Any) -> None:
        model.named_vars_to_dims["a"] = ("k",)
        pm.Normal("b", shape=3)
        model.named_vars_to_dims["b"] = ("k",)

    return normal(declare, shape=2)


def _variable_and_dim() -> Any:
    def declare(model: pm.Model, a: Any) -> None:
        pm.Normal("k")
        model.named_vars_to_dims["a"] = ("k",)  # PyMC 6 refuses this when it is declared

    return normal(declare, shape=2)


MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "coords": (_wrong_coords, r"`a` has 2 entries along dim 'k', which has 3 coords"),
    "deterministic": (_wrong_deterministic, r"`b` has 1 entries along dim 'k', which has 2 coords"),
    "data": (_wrong_data, r"data of `z` do not have one entry for each of the coords of dim 'k'"),
    "labels": (
        lambda: normal(shape=2, dims="k", coords={"k": [("a", 1), ("b", 2)]}),
        "coords of dim 'k' are not all numbers or strings",
    ),
    "lengths": (_two_lengths, r"`b` has 3 entries along dim 'k', and `a` 2"),
    "draw": (lambda: normal(name="draw"), "'draw' is a name that results use"),
    "another's dim": (
        _variable_and_dim,
        "`k` is the name of a variable and of a dim",
    ),
}
CALLS: dict[str, Callable[[pm.Model], Any]] = {
    "sample": lambda model: sample(model, "DPHMC"),
    "step": step,
    "laplace": lambda model: dp.laplace(10, model=model, progressbar=False),
    "find_MAP": lambda model: dp.find_MAP(model, progressbar=False),
}


@pytest.mark.parametrize(
    ("misfit", "call"),
    [
        (misfit, call)
        for misfit in MISFITS
        for call in CALLS
        if misfit != "data" or call in ("step", "find_MAP")
    ],
)
def test_what_fits_no_result_is_refused_before_anything_is_spent(misfit, call):
    make, words = MISFITS[misfit]
    model, budget = make()
    if misfit == "data" and call != "step":  # no part of such results
        CALLS[call](model)
        return
    with pytest.raises(ValueError, match=f"{words}.*Nothing has been spent"):
        CALLS[call](model)
    assert budget.spent().epsilon == 0.0


def test_a_name_of_one_result_alone_is_refused_there():
    model, budget = normal(name="estimate")
    with pytest.raises(ValueError, match="'estimate' is a name that results use"):
        CALLS["find_MAP"](model)
    assert budget.spent().epsilon == 0.0
    assert sizes(sample(model, step(model))) == (2, DRAWS)


@pytest.mark.slow
def test_what_is_not_computed_need_not_fit():
    def declare(model: pm.Model, a: Any) -> None:
        pm.Deterministic("draw", a * np.ones(1), dims="k")

    model, budget = normal(declare, shape=1, coords={"k": ["a", "b"]})
    with pytest.raises(ValueError, match="'draw' is a name"):
        step(model)
    assert budget.spent().epsilon == 0.0
    assert "a" in _compat.group(sample(model, "DPHMC", var_names=["a"]), "posterior")
    model, _ = normal(declare, shape=1, coords={"k": ["a", "b"]})
    dp.laplace(10, model=model, var_names=["a"], progressbar=False)


def test_a_private_number_of_data_is_not_told():
    make = lambda: normal(  # noqa: E731
        lambda model, a: pm.Data("z", np.zeros(3), dims="k"),
        coords={"k": [1, 2]},
        budget={"neighboring": "add_or_remove_one", "n_public": 300},
    )
    model, _ = make()
    step(model)


def test_a_length_that_is_not_known_is_not_refused():
    with pm.Model(coords={"k": [1, 2]}) as model:
        pm.Normal("a", dims="k")
    check_fits(model, {"a": (None,)})
    with pytest.raises(ValueError, match="3 entries"):
        check_fits(model, {"a": (3,)})


def test_no_names_are_refused():
    model, budget = normal()
    for call in (
        lambda: sample(model, "DPHMC", var_names=[]),
        lambda: dp.laplace(10, model=model, var_names=[]),
    ):
        with pytest.raises(ValueError, match="var_names is empty"):
            call()
    with pytest.raises(ValueError, match="no argument target_accept"):
        sample(model, "DPHMC", target_accept=0.9)
    with pytest.raises(TypeError):
        dp.laplace(10, model=model, random_seed="seed")
    assert budget.spent().epsilon == 0.0


@pytest.mark.parametrize("rows", [49, 50, 51])
@pytest.mark.parametrize(
    "options",
    [
        {"privacy_unit": True},
        {"privacy_unit": True, "neighboring": "add_or_remove_one", "n_public": 50},
    ],
    ids=["replaced", "added"],
)
def test_what_is_released_does_not_depend_on_a_number_of_rows(rows, options):
    """A public grid may have as many points as the data have rows."""
    with pm.Model(coords={"point": range(50)}) as model:
        a, b = pm.Normal("a"), pm.Normal("b")
        grid = pm.Data("grid", np.linspace(0, 1, 50))
        pm.Deterministic("curve", a + b * grid)
        pm.Deterministic("labelled", a * grid, dims="point")
        pm.Deterministic("level", a * pt.ones(50))
        pm.Normal("y1", a, 1.0, observed=np.zeros(60))
        pm.Normal("y2", b, 1.0, observed=np.zeros(rows))
        units = {"y1": np.arange(60), "y2": np.arange(rows)}
        budget = dp.PrivacyBudget(5.0, 1e-5, public=["grid"], **{**options, "privacy_unit": units})
    assert releasable(model, budget) == ["a", "b", "curve", "labelled"]
    assert releasable(model, budget, ["a", "curve"]) == ["a", "curve"]
    assert releasable(model, budget, ["a", "level"]) == ["a", "level"]


@pytest.mark.parametrize(("n_public", "unit"), [(100, None), (60, 5)])
def test_the_private_number_of_rows_is_published_in_no_case(n_public, unit):
    """The length of the dim of the rows; a number is vouched for by whoever names it."""
    ids = None if unit is None else np.arange(300) // unit
    with pm.Model(coords={"row": range(300)}) as model:
        a = pm.Normal("a", 0, 10)
        pm.Deterministic("total", a * model.dim_lengths["row"])
        pm.Deterministic("written", a * 300)
        pm.Normal("y", a, 1.0, observed=pm.Data("data", Y, dims="row"), dims="row")
        budget = dp.PrivacyBudget(
            5.0, 1e-5, neighboring="add_or_remove_one", n_public=n_public, privacy_unit=ids
        )
    released = sample(model, step(model))
    assert set(_compat.group(released, "posterior").data_vars) == {"a"}
    with pytest.raises(dp.UnsafeRelease, match="number of records"):
        releasable(model, budget, ["a", "total"])
    assert releasable(model, budget, ["a", "written"]) == ["a", "written"]
    with pytest.raises(dp.UnsafeRelease):
        dp.sample_posterior_predictive(released, model=model)


def _labels(a: Any) -> Any:
    return pt.stack([a[int(k)] for k in (Y[:5] > 0)])


def _times(a: Any) -> Any:
    equation = DifferentialEquation(
        func=lambda y, t, p: [p[0] + 0 * y[0]], times=list(abs(Y[:3])), n_states=1, n_theta=1, t0=0
    )
    return equation(y0=a[:1], theta=a[:1])


def _in_code(a: Any) -> Any:
    """Code that is not seen, within a graph that an operation holds."""
    x = a[0].type()
    hidden = wrap_py(itypes=[x.type], otypes=[x.type])(lambda value: np.asarray(value + Y.mean()))
    return OpFromGraph([x], [hidden(x)])(a[0])


def _in_a_scalar_graph(a: Any) -> Any:
    x = float64()
    return Elemwise(Composite([x], [add(x, constant(Y.mean()))]))(a)


#: What a Deterministic may hide, of a variable with two entries, and whether it leaves if named.
HIDDEN: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "labels of records": (_labels, True),
    "an index": (lambda a: a[int(Y.argmax()) % 2], True),
    "a slice": (lambda a: a[: int(Y[0] > 0) + 1], True),
    "a row of each": (lambda a: pt.stack([a[0]] * 300), True),
    "minus the count": (lambda a: a * -300, True),
    "an array": (lambda a: a * pt.constant(Y[:2]), False),
    "an imaginary number": (lambda a: abs(a * pt.constant(1j)), False),
    "a labelled array": (
        lambda a: (as_xtensor(a[0]) * as_xtensor(Y, ("row",)).sum()).values,
        False,
    ),
    "times": (_times, False),
    "code in a graph": (_in_code, False),
    "a number in a graph of scalars": (_in_a_scalar_graph, True),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_what_is_not_a_function_of_parameters_alone_does_not_leave_by_default(what):
    make, may_be_named = HIDDEN[what]
    model, budget = normal(
        lambda model, a: pm.Deterministic("hidden", make(a)),
        shape=2,
        budget={"neighboring": "add_or_remove_one", "n_public": 300},
    )
    assert releasable(model, budget) == ["a"]
    if may_be_named:
        assert releasable(model, budget, ["a", "hidden"]) == ["a", "hidden"]
    else:
        with pytest.raises(dp.UnsafeRelease):
            releasable(model, budget, ["a", "hidden"])


def test_functions_of_parameters_alone_leave_by_default():
    def declare(model: pm.Model, a: Any) -> None:
        pm.Deterministic("whole", pm.math.exp(a) + a.sum())
        pm.Deterministic("shifted", a - a.mean())

    model, budget = normal(
        declare,
        shape=200,
        budget={"neighboring": "add_or_remove_one", "n_public": 300},
    )
    assert releasable(model, budget) == ["a", "whole"]
    # a mean is divided by a number
    assert releasable(model, budget, ["a", "shifted"]) == ["a", "shifted"]


def test_a_length_that_is_not_public_is_a_number():
    declare = lambda model, a: pm.Deterministic("d", a * model.dim_lengths["k"])  # noqa: E731
    for public, names in (((), ["a"]), (("k",), ["a", "d"])):
        model, budget = normal(declare, coords={"k": range(7)}, budget={"public": public})
        assert releasable(model, budget) == names


@pytest.mark.parametrize("how", ["random", "dist"])
def test_predictions_by_code_that_may_hold_data_are_refused(how):
    draw = {
        "random": {
            "random": lambda t, rng, size: rng.normal(t * Y, 0.1),
            "logp": lambda v, t: -((v - t * Y) ** 2) / 2,
        },
        "dist": {"dist": lambda t, size: pm.Normal.dist(t * Y, 1.0, size=size)},
    }[how]
    with pm.Model() as model:
        a = pm.Normal("a", 0, 10)
        pm.CustomDist("y", a, observed=2 * Y, **draw)
        dp.PrivacyBudget(5.0, 1e-5)
    released = dp.laplace(10, model=model, progressbar=False)
    with pytest.raises(dp.UnsafeRelease, match="whose code may hold private data"):
        dp.sample_posterior_predictive(released, model=model)


# -- kept ------------------------------------------------------------------------------------------


def _failing_callback(error: type[BaseException], chain: int, draw: int) -> Any:
    def callback(trace: Any, draw: Any, at: tuple[int, int] = (chain, draw)) -> None:
        if (draw.chain, draw.draw_idx) == at:
            raise error("broken")

    return callback


@pytest.mark.parametrize(
    ("chain", "draw", "left"), [(0, 9, (1, 10)), (1, 5, (1, DRAWS)), (1, 35, (2, 36))]
)
def test_draws_outlive_a_failure_between_them(chain, draw, left):
    model, budget = normal()
    callback = _failing_callback(ZeroDivisionError, chain, draw)
    with pytest.raises(ZeroDivisionError) as caught:
        sample(model, step(model), callback=callback)
    assert "dp.release(model=model)" in " ".join(caught.value.__notes__)
    released = dp.release(model=model)
    assert sizes(released) == left
    chains = 1 if chain == 0 else 2
    done = (chains - 1) * DRAWS + draw + 1
    assert (
        0
        < budget.spent().gdp_mu2
        == pytest.approx(budget.account.read().cap / 2**40 * done / (2 * DRAWS), rel=0.02)
    )


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("pymc.sampling.mcmc._sample_return", MemoryError),
        ("pymc.sampling.mcmc._sample_return", KeyboardInterrupt),
        ("pymc_dp.sampling.run_convergence_checks", MemoryError),
        ("pymc_dp.publication.results.PaidDraws.result", MemoryError),
        ("pymc_dp.sampling.release", MemoryError),
        ("pymc_dp.sampling.release", KeyboardInterrupt),
    ],
)
def test_draws_outlive_what_fails_after_them(where, error, monkeypatch):
    model, budget = normal()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(where, broken)
        if error is KeyboardInterrupt and where.startswith("pymc.sampling"):
            assert sizes(sample(model, step(model))) == (2, DRAWS)  # as after any interrupt
            return
        with pytest.raises(error):
            sample(model, step(model), compute_convergence_checks=True)
    check_all_spent(budget)
    assert sizes(dp.release(model=model)) == (2, DRAWS)


@pytest.mark.parametrize("call", [2, 4])
def test_draws_outlive_a_ledger_that_fails(call, monkeypatch):
    model, _ = normal()
    calls, lease = [], Account.lease

    def locked(self: Account, *args: Any) -> int:
        calls.append(args)
        if len(calls) == call:
            raise LedgerError("locked by another process")
        return lease(self, *args)

    with monkeypatch.context() as patch, pytest.raises(LedgerError):
        patch.setattr("pymc_dp.privacy.meter.SMALLEST_LEASE", 16)
        patch.setattr(Meter, "_lease_size", lambda self: 16)
        patch.setattr(Account, "lease", locked)
        sample(model, step(model))
    # leases of 16, 16 and 8 iterations
    assert sizes(dp.release(model=model)) == ((1, 16) if call == 2 else (1, DRAWS))


def test_draws_of_several_runs_are_kept_until_they_are_released():
    model, budget = normal()
    two = step(model, runs=3)
    for draw in (5, 7):
        with pytest.raises(ZeroDivisionError):
            sample(model, two, callback=_failing_callback(ZeroDivisionError, 1, DRAWS - draw))
    assert sizes(sample(model, two)) == (2, DRAWS)
    # processes of chains are sent the budget: without draws, nor the model behind them
    assert len(budget.unreleased) == 2 and not pickle.loads(pickle.dumps(budget)).unreleased
    assert sizes(dp.release(model=model)) == (2, DRAWS - 6)
    assert sizes(dp.release(model=model)) == (2, DRAWS - 4)
    with pytest.raises(dp.UnsafeRelease, match="Nothing was kept"):
        dp.release(model=model)


def test_draws_that_another_thread_released_meanwhile_are_returned(monkeypatch):
    model, _ = normal()
    released = []

    def twice(idata: Any, model: pm.Model, **options: Any) -> Any:
        if not released:
            released.append(dp.release(model=model))
        return dp.release(idata, model, **options)

    monkeypatch.setattr("pymc_dp.sampling.release", twice)
    assert sizes(sample(model, step(model))) == sizes(released[0]) == (2, DRAWS)


def test_what_can_never_be_released_is_not_kept(monkeypatch):
    model, _ = normal()
    monkeypatch.setattr(Account, "lease", lambda self, *args: 0)
    with pytest.raises(dp.UnsafeRelease, match="No draw was made") as caught:
        sample(model, step(model))
    assert not getattr(caught.value, "__notes__", [])
    with pytest.raises(dp.UnsafeRelease, match="Nothing was kept"):
        dp.release(model=model)


@pytest.mark.slow
@pytest.mark.parametrize("error", [LedgerError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["laplace", "find_MAP", "sample"])
def test_the_last_row_of_the_ledger_costs_no_result(call, error, monkeypatch):
    model, budget = normal()
    monkeypatch.setattr(Account, "finish_plan", lambda *args: (_ for _ in ()).throw(error))
    with pytest.warns(UserWarning, match=r"not told that a run has ended: (full|interrupted)"):
        found = CALLS[call](model)
    assert "a" in (found if call == "find_MAP" else _compat.group(found, "posterior"))
    assert budget.spent().epsilon > 0


def test_a_call_that_failed_before_its_chains_says_that_it_resumes(monkeypatch):
    model, budget = normal()
    with monkeypatch.context() as patch, pytest.raises(MemoryError) as caught:
        patch.setattr(_compat, "sample_into", Mock(side_effect=MemoryError))
        sample(model, "DPHMC")
    assert "the same call resumes" in " ".join(caught.value.__notes__)
    labels = charged(budget)
    assert sizes(sample(model, "DPHMC")) == (2, DRAWS)
    assert charged(budget) == labels


def test_another_call_is_told_of_what_was_paid_for():
    model, _ = normal()
    dp.DPHMC(draws=DRAWS, chains=2, model=model, progressbar=False)
    with pytest.warns(UserWarning, match=r"of DPHMC \(40 draws, 2 chains\) was paid for"):
        dp.laplace(10, share=0.3, model=model, progressbar=False)


def test_largest_rectangle():
    assert largest_rectangle([10, 40, 0])[1] == 40
    chains, length = largest_rectangle([30, 40, 36])
    assert (chains.tolist(), length) == ([0, 1, 2], 30)


# -- one step, one set of data, one thread ---------------------------------------------------------


@pytest.mark.parametrize("sampler", [sample, lambda m, s: pm.sample(
    DRAWS, tune=0, chains=2, step=s, model=m, cores=1, progressbar=False)])  # fmt: skip
def test_a_step_does_not_sample_data_of_then(sampler):
    model, budget = normal()
    built = step(model)
    pm.set_data({"data": Y + 5.0}, model=model)
    with pytest.raises(dp.PlanMismatch, match="Data were replaced"):
        sampler(model, built)
    assert budget.spent().epsilon == 0.0
    start = {"a": np.array(5.0)}
    released = sample(model, step(model), initvals=start)
    assert abs(float(_compat.group(released, "posterior")["a"].mean()) - 5.0) < 1.0


def test_new_labels_are_no_new_data():
    with pm.Model(coords={"row": np.arange(300)}) as model:
        a = pm.Normal("a", 0, 10)
        pm.Normal("y", a, 1.0, observed=pm.Data("data", Y, dims="row"), dims="row")
        dp.PrivacyBudget(5.0, 1e-5)
    built = step(model)
    model.set_dim("row", 300, coord_values=np.arange(300) + 7)
    assert sizes(sample(model, built)) == (2, DRAWS)


def test_two_threads_do_not_share_a_step():
    model, budget = normal()
    shared = step(model, runs=2)
    inside, leave = threading.Event(), threading.Event()

    def waits(trace: Any, draw: Any) -> None:
        if draw.draw_idx == 3 and draw.chain == 0:
            inside.set()
            assert leave.wait(60)

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(sample(model, shared, callback=waits)))
    thread.start()
    assert inside.wait(60)
    spent = budget.account.read().spent
    for _ in range(2):
        with pytest.raises(dp.PlanMismatch, match="another thread is sampling"):
            sample(model, shared)
    assert budget.account.read().spent == spent
    leave.set()
    thread.join()
    assert sizes(found[0]) == (2, DRAWS)
    assert sizes(sample(model, shared)) == (2, DRAWS)
    check_all_spent(budget)


def test_a_meter_is_one_thread_s(monkeypatch):
    model, _ = normal()
    queries = step(model).queries
    meter = queries.meter
    monkeypatch.setattr(Account, "begin_chain", lambda *args: 0)
    queries.begin_chain()
    assert queries.begin_iteration()
    paid = dict(queries._receipt._left)
    errors: list[Exception] = []

    def other() -> None:
        for call in (queries.begin_chain, queries.begin_iteration, meter.begin_chain):
            try:
                call()
            except dp.PlanMismatch as error:
                errors.append(error)
        meter.close()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(errors) == 3 and meter.started == 1
    assert queries._receipt._left == paid, "what the first one has paid for is still there"
    assert meter.begin_iteration()


def test_close_is_not_asked_for_twice_what_was_paid():
    """A step that is closed by `dp.sample` has given back what it did not use, once."""
    model, budget = normal()
    built = step(model)
    with pytest.raises(ZeroDivisionError):
        sample(model, built, callback=_failing_callback(ZeroDivisionError, 0, 3))
    spent = budget.account.read().spent
    PrivateStep.close(built)
    assert budget.account.read().spent == spent
