"""What every private step method must do, whatever it computes: one test for all of them.

Each step is built once for each model, with three planned runs: ``pm.sample`` on one core and on
two, and ``dp.sample``.  The records are few and the budget is large: nothing is said about the
accuracy of the draws here.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
import xarray as xr

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from tests.selection import marked, others

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings(
        "ignore:These data already have a budget:UserWarning",
        "ignore:The gradients of this plan:UserWarning",
    ),
]

N = 60
DRAWS, TUNE, CHAINS = 20, 5, 2
EPSILON, DELTA = 1000.0, 1e-4

_rng = np.random.default_rng(11)
X = np.c_[np.ones(N), _rng.uniform(-1, 1, N)]
BINARY = _rng.integers(0, 2, N)
COUNT = _rng.poisson(2.0, N)
GROUP = np.arange(N) % 3
REAL = _rng.normal(size=N)
PAIR = _rng.normal(size=(N, 2))


def logistic() -> None:
    beta = pm.Normal("beta", 0, 2, shape=2)
    pm.Bernoulli("y", logit_p=X @ beta, observed=BINARY)


def poisson_groups() -> None:
    intercept = pm.Normal("intercept", 0, 1, dims="group")
    slope = pm.Normal("slope", 0, 1)
    pm.Poisson("y", pt.exp(intercept[GROUP] + slope * X[:, 1]), observed=COUNT)


def mv_normal() -> None:
    mu = pm.Normal("mu", 0, 1, shape=2)
    sd = pm.HalfNormal("sd", 1, shape=2)
    correlation = np.array([[1.0, 0.0], [0.6, 0.8]])  # its Cholesky factor
    pm.MvNormal("y", mu, chol=sd[:, None] * correlation, observed=PAIR)


def negative_binomial() -> None:
    beta = pm.Normal("beta", 0, 1, shape=2)
    alpha = pm.Gamma("alpha", 2, 0.5)
    pm.NegativeBinomial("y", mu=pt.exp(X @ beta), alpha=alpha, observed=COUNT)


def two_observed() -> None:
    beta = pm.Normal("beta", 0, 1, shape=2)
    sigma = pm.HalfNormal("sigma", 1)
    pm.Deterministic("log_sigma", pt.log(sigma))
    pm.Normal("income", X @ beta, sigma, observed=REAL)
    pm.Bernoulli("employed", logit_p=X @ beta, observed=BINARY)


@dataclass(frozen=True)
class Case:
    declare: Callable[[], None]
    shapes: dict[str, tuple[int, ...]]  # of what is released, chains and draws left out


def iid_normal() -> None:
    mu, sigma = pm.Normal("mu", 0, 1), pm.HalfNormal("sigma", 1)
    pm.Normal("y", mu, sigma, observed=REAL)
    dp.bounds(y=(-4, 4))


MODELS = {
    "logistic": Case(logistic, {"beta": (2,)}),
    "poisson_groups": Case(poisson_groups, {"intercept": (3,), "slope": ()}),
    "mv_normal": Case(mv_normal, {"mu": (2,), "sd": (2,)}),
    "negative_binomial": Case(negative_binomial, {"beta": (2,), "alpha": ()}),
    "two_observed": Case(two_observed, {"beta": (2,), "sigma": (), "log_sigma": ()}),
}
#: For methods that know the records by a statistic.
IID = {"iid_normal": Case(iid_normal, {"mu": (), "sigma": ()})}

# Scores of most of these records are below 10 in norm: nothing is exact here, and need not be.
COMMON = {"scaling": 0.1, "clip_norm": 1.0, "step_size": 0.3}
STEPS: dict[str, tuple[type, dict[str, Any]]] = {
    "penalty": (dp.DPPenalty, {}),
    "hmc-leapfrog": (dp.DPHMC, {"n_steps": 2}),
    "hmc-position": (dp.DPHMC, {"n_steps": 2, "integrator": "position"}),
    "hmc-reuse_gradient": (dp.DPHMC, {"n_steps": 2, "reuse_gradient": True}),
    "langevin-persistent": (dp.DPLangevin, {"curvature": 0.2}),
    "langevin-fresh": (dp.DPLangevin, {"curvature": 0.2, "momentum": "fresh", "n_steps": 2}),
    "langevin-energy_clip": (dp.DPLangevin, {"energy_clip": 0.1}),
}
#: Of these in every run; others with the slow tests or before a version.
QUICK = ["penalty", "hmc-reuse_gradient", "langevin-persistent"]
#: For one model.
VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "penalty-one_component": (dp.DPPenalty, {**COMMON, "proposal": "one_component"}),
    "penalty-guided": (dp.DPPenalty, {**COMMON, "proposal": "guided", "likelihood_power": 0.5}),
    "penalty-independence": (dp.DPPenalty, {**COMMON, "proposal": "independence"}),
    "barker": (dp.DPBarker, {**COMMON, "noise_sd": 1.0}),
}
IID_STEPS: dict[str, tuple[type, dict[str, Any]]] = {
    "exponential": (dp.ExponentialFamilyPenalty, {"scaling": 0.1, "step_size": 0.3}),
}


def build(model_name: str) -> tuple[pm.Model, dp.PrivacyBudget]:
    with pm.Model(coords={"group": ["a", "b", "c"]}) as model:
        {**MODELS, **IID}[model_name].declare()
        budget = dp.PrivacyBudget(EPSILON, DELTA, dataset="made up")
    return model, budget


def plan(step_name: str, model: pm.Model, runs: int) -> Any:
    steps = {name: (cls, {**COMMON, **given}) for name, (cls, given) in STEPS.items()}
    cls, settings = {**steps, **VARIANTS, **IID_STEPS}[step_name]
    return cls(draws=DRAWS, tune=TUNE, chains=CHAINS, runs=runs, model=model, **settings)


def pm_sample(model: pm.Model, step: Any, cores: int, mp_ctx: Any = None) -> Any:
    return pm.sample(
        draws=DRAWS,
        tune=TUNE,
        chains=CHAINS,
        step=step,
        cores=cores,
        mp_ctx=mp_ctx,
        random_seed=1,
        model=model,
        progressbar=True,  # its columns show epsilon: they must not fail
        compute_convergence_checks=False,
    )


def check_raw(idata: Any, step: Any, newton: bool = False) -> None:
    """Statistics of ours are prefixed, and there are no others."""
    stats = _compat.group(idata, "sample_stats")
    names = {"dp_accept_rate", "dp_accepted", "dp_epsilon", "dp_frozen", "dp_plan_id"}
    assert {str(name) for name in stats} == names | ({"dp_newton"} if newton else set())
    assert all(stats[name].dims == ("chain", "draw") for name in names)
    assert not stats["dp_frozen"].values.any()
    assert (stats["dp_plan_id"] == step.plan.plan_id).all()


def check_released(safe: Any, shapes: dict[str, tuple[int, ...]], budget: dp.PrivacyBudget) -> None:
    assert isinstance(safe, az.InferenceData if _compat.PYMC_MAJOR < 6 else xr.DataTree)
    assert sorted(_compat.group_names(safe)) == ["posterior", "sample_stats"]
    posterior, stats = _compat.group(safe, "posterior"), _compat.group(safe, "sample_stats")
    assert dict(posterior.sizes)["chain"] == CHAINS
    assert {str(n): v.shape for n, v in posterior.items()} == {
        name: (CHAINS, DRAWS, *shape) for name, shape in shapes.items()
    }
    assert all(np.isfinite(variable).all() for variable in posterior.values())
    if "group" in posterior.coords:  # labels were not declared public
        assert posterior["group"].values.tolist() == [0, 1, 2]
    assert {str(name) for name in stats} == {"dp_accepted", "dp_epsilon", "dp_plan_id"}
    moved = np.diff(posterior[next(iter(shapes))].values.reshape(CHAINS, DRAWS, -1), axis=1)
    assert np.array_equal(moved.any(axis=-1), stats["dp_accepted"].values[:, 1:])

    epsilon = stats["dp_epsilon"].values
    assert (np.diff(epsilon, axis=1) > 0).all()
    assert (epsilon[:, -1] == budget.spent().epsilon).all()
    statement = dp.privacy_statement(safe)
    assert f"({EPSILON:g}, {DELTA:g})-differentially private" in statement
    assert "made up" in statement
    assert f"epsilon = {budget.spent().epsilon:.4g}" in statement


def check_ledger(budget: dp.PrivacyBudget, step: Any, runs: int) -> None:
    """A complete run costs what was planned, to the unit."""
    spent = budget.account.read().spent
    assert spent == runs * step.plan.run_cost
    table = budget.table().set_index("mechanism")
    for name in step.plan.events:
        assert table.loc[name, "releases"] == runs * step.plan.releases(name) // step.plan.runs
        assert table.loc[name, "sampler"] == type(step).__name__


def check_round_trip(safe: Any, path: Any) -> None:
    safe.to_netcdf(str(path))
    if _compat.PYMC_MAJOR < 6:
        back = az.from_netcdf(str(path))
    else:
        back = xr.open_datatree(path, engine="h5netcdf")
    xr.testing.assert_equal(_compat.group(back, "posterior"), _compat.group(safe, "posterior"))
    assert dp.privacy_statement(back) == dp.privacy_statement(safe)
    facts = json.loads(_compat.attributes(back)["pymc_dp_statement"])
    assert facts["privacy_guarantee"] == "(epsilon, delta)-differential privacy"
    assert (facts["epsilon"], facts["delta"]) == (EPSILON, DELTA)


def every_model_with_every_step() -> list[Any]:
    """Each sampler with the first model, its options with it or another; the rest takes minutes."""
    pairs = list(itertools.product(MODELS, STEPS))
    quick = [("logistic", step) for step in QUICK]
    slow = [
        ("logistic", "hmc-position"),
        ("logistic", "langevin-fresh"),
        ("poisson_groups", "hmc-reuse_gradient"),
        ("mv_normal", "langevin-energy_clip"),
        ("two_observed", "penalty"),
    ]
    return marked(pairs, slow=slow, exhaustive=others(pairs, [*quick, *slow]))


@pytest.mark.parametrize(
    ("model_name", "step_name"),
    [
        *every_model_with_every_step(),
        *marked(
            [("logistic", variant) for variant in VARIANTS],
            slow=[("logistic", "penalty-one_component"), ("logistic", "penalty-independence")],
            exhaustive=[("logistic", "penalty-guided")],
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(IID, IID_STEPS)
        ),
    ],
)
def test_step(model_name, step_name, tmp_path):
    shapes = {**MODELS, **IID}[model_name].shapes
    model, budget = build(model_name)
    step = plan(step_name, model, runs=3)
    assert budget.spent().epsilon == 0

    for run, cores in enumerate([1, 2], start=1):
        idata = pm_sample(model, step, cores, multiprocessing.get_context("fork"))
        check_raw(idata, step)
        check_ledger(budget, step, run)
        check_released(dp.release(idata, model), shapes, budget)

    safe = dp.sample(
        DRAWS, tune=TUNE, chains=CHAINS, step=step, cores=1, model=model, progressbar=False
    )
    check_ledger(budget, step, 3)
    check_released(safe, shapes, budget)
    if step_name != "penalty-independence":  # its noise rejects all 40 once in about 50 runs
        # others accept with a probability of 0.5 or more: all are rejected once in 2^40 runs
        assert _compat.group(safe, "sample_stats")["dp_accepted"].values.sum() > 0
    # calibrated: the three runs use the budget, up to the rounding of the ledger
    assert 0 <= budget.remaining().gdp_mu2 < 1e-6 * budget.spent().gdp_mu2
    check_round_trip(safe, tmp_path / "posterior.nc")
    summary = az.summary(safe)
    assert len(summary) == sum(int(np.prod(shape)) for shape in shapes.values())


@pytest.mark.parametrize(
    ("model_name", "step_name", "start_method"),
    [
        pytest.param("logistic", "penalty", "spawn", marks=pytest.mark.slow),
        *(
            pytest.param(*other, marks=pytest.mark.exhaustive)
            for other in [
                ("logistic", "langevin-persistent", "forkserver"),
                ("iid_normal", "exponential", "spawn"),
                ("logistic", "hmc-reuse_gradient", "spawn"),
                ("logistic", "penalty", "forkserver"),
                ("logistic", "hmc-reuse_gradient", "forkserver"),
                ("logistic", "langevin-persistent", "spawn"),
                ("iid_normal", "exponential", "forkserver"),
            ]
        ),
    ],
)
def test_start_method(model_name, step_name, start_method):
    """Steps reach new interpreters in one piece."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["pymc_dp"])
    model, budget = build(model_name)
    step = plan(step_name, model, runs=1)
    idata = pm_sample(model, step, cores=2, mp_ctx=context)
    check_raw(idata, step)
    check_ledger(budget, step, 1)
    shapes = {**MODELS, **IID}[model_name].shapes
    check_released(dp.release(idata, model), shapes, budget)


@pytest.mark.parametrize("step", [dp.DPPenalty, "DPHMC"])
def test_step_made_by_dp_sample(step):
    model, budget = build("logistic")
    cls, settings = next(
        found
        for found in [*STEPS.values(), *VARIANTS.values()]
        if step in (found[0], found[0].__name__)
    )
    safe = dp.sample(
        DRAWS,
        tune=TUNE,
        chains=CHAINS,
        step=step,
        step_kwargs={**COMMON, **settings},
        model=model,
        cores=2,
        progressbar=False,
    )
    check_released(safe, MODELS["logistic"].shapes, budget)
    assert budget.table()["sampler"].iloc[0] == cls.__name__
