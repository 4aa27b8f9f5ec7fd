"""Models that bambi writes: private posteriors at a large budget are those of NUTS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from tests.selection import marked, others

pandas = pytest.importorskip("pandas")
bambi = pytest.importorskip("bambi")


def _data(n: int) -> Any:
    """A table with a column for each kind of outcome."""
    rng = np.random.default_rng(27)
    age = rng.uniform(-1.0, 1.0, n)
    height = rng.normal(size=n)
    firm = rng.integers(0, 6, n)
    trade = rng.integers(0, 3, n)
    eta = 0.4 + 0.8 * age - 0.3 * height
    of_firm = rng.normal(size=6)[firm] * 0.6
    rate = np.exp(eta)
    chance = 1.0 / (1.0 + np.exp(-eta))
    pay = 2.0 + eta + of_firm + rng.normal(size=n)
    latent = eta + rng.logistic(size=n)
    grade = (latent[:, None] > np.array([-0.5, 1.0])).sum(axis=1)
    zeros = rng.random(n) < 0.3
    counts = rng.poisson(rate)
    over = rng.negative_binomial(3.0, 3.0 / (3.0 + rate))
    size = rng.gamma(4.0, rate / 4.0)
    ends = np.where(rng.random(n) < 0.5, 3.0, 10.0)
    return pandas.DataFrame(
        {
            "age": age,
            "height": height,
            "firm": pandas.Categorical(firm.astype(str)),
            "trade": pandas.Categorical(np.array(["baker", "mason", "smith"])[trade]),
            "exposure": rng.uniform(0.5, 2.0, n),
            "pay": pay,
            "pay_in_time": pay + of_firm * age,
            "sick": (rng.random(n) < chance).astype(int),
            "trials": np.full(n, 5),
            "hits": rng.binomial(5, chance),
            "visits": counts,
            "over": over,
            "zero_visits": np.where(zeros, 0, counts),
            "zero_over": np.where(zeros, 0, over),
            "zero_size": np.where(zeros, 0.0, size),
            "share": np.clip(rng.beta(4.0 * chance, 4.0 * (1.0 - chance)), 1e-6, 1.0 - 1e-6),
            "size": size,
            "heavy": 2.0 + eta + rng.standard_t(4.0, n),
            "angle": rng.vonmises(np.arctan(eta), 3.0),
            "skew": 2.0 + eta + rng.laplace(size=n) * np.where(rng.random(n) < 0.4, 0.7, 1.3),
            "time": rng.wald(rate, 4.0),
            "mood": pandas.Categorical(np.array(["bad", "fair", "good"])[grade], ordered=True),
            "choice": pandas.Categorical(np.array(["a", "b", "c"])[grade]),
            "lasted": np.minimum(size, ends),
            "status": np.where(size > ends, "right", "none"),
            "weight": rng.integers(1, 4, n).astype(float),
            "spread": 2.0 + eta + np.exp(0.5 * age) * rng.normal(size=n),
            "positive": np.abs(pay) + 0.05,
        }
    )


@dataclass(frozen=True)
class Case:
    """What bambi is asked for."""

    formula: Any  # a str, or a bambi.Formula
    family: str = "gaussian"
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 800
    draws: int = 1000


PRIORS = {
    "Intercept": bambi.Prior("Normal", mu=2.0, sigma=5.0),
    "age": bambi.Prior("Normal", mu=0.0, sigma=5.0),
    "sigma": bambi.Prior("HalfNormal", sigma=5.0),
}

#: With the default priors NUTS itself diverges.
CURVE = "hsgp(age, m=8, c=1.5)"
SMOOTH = {
    "sigma": bambi.Prior("LogNormal", mu=0.0, sigma=0.3),
    "ell": bambi.Prior("LogNormal", mu=-0.3, sigma=0.2),
}

CASES: dict[str, Case] = {
    "offset": Case("visits ~ age + offset(log(exposure))", "poisson"),
    "categorical predictor": Case("pay ~ age + trade"),
    # in a quadratic likelihood sigma does not know how many effects were fitted: with k of them it
    # is k / sqrt(2 n) posterior sds lower
    "group effects": Case("pay ~ age + (1|firm)", rows=3000),
    "group effects, centred": Case(
        "pay ~ age + (1|firm)", options={"noncentered": False}, draws=8000
    ),
    "group slopes": Case("pay_in_time ~ age + (age|firm)", rows=3000),
    "splines": Case("pay ~ bs(age, df=5)"),
    "hsgp": Case(f"pay ~ {CURVE}", options={"priors": {CURVE: SMOOTH}}),
    "weighted": Case("weighted(pay, weight) ~ age"),
    "censored": Case("censored(lasted, status) ~ age", "exponential", {"link": "log"}),
    # with PyMC 5, bambi scales its default priors here by what is not a number
    "truncated": Case("truncated(positive, lb=0) ~ age", options={"priors": PRIORS}),
    "distributional": Case(bambi.Formula("spread ~ age", "sigma ~ age")),
    "bernoulli": Case("sick ~ age + height", "bernoulli"),
    "binomial": Case("p(hits, trials) ~ age", "binomial"),
    "poisson": Case("visits ~ age + height", "poisson"),
    "negative binomial": Case("over ~ age", "negativebinomial"),
    "zero-inflated": Case("zero_visits ~ age", "zero_inflated_poisson"),
    # two kinds of zeros: in 800 rows they can hardly be told apart
    "zero-inflated, negative binomial": Case(
        "zero_over ~ age", "zero_inflated_negativebinomial", rows=4000
    ),
    "hurdle": Case("zero_visits ~ age", "hurdle_poisson"),
    "hurdle, gamma": Case("zero_size ~ age", "hurdle_gamma", {"link": "log"}),
    "beta": Case("share ~ age", "beta"),
    "gamma": Case("size ~ age", "gamma", {"link": "log"}),
    "t": Case("heavy ~ age", "t"),
    "von Mises": Case("angle ~ age", "vonmises"),
    "asymmetric Laplace": Case("skew ~ age", "asymmetriclaplace"),
    "Wald": Case("time ~ age", "wald", {"link": "log"}),
    "categorical": Case("choice ~ age", "categorical"),
    "cumulative": Case("mood ~ age", "cumulative"),
    "sratio": Case("mood ~ age", "sratio"),
}

#: Splines, an end of the range, two parameters with covariates, two parts.
SOME = ["splines", "censored", "distributional", "hurdle, gamma"]


def _model(case: Case) -> pm.Model:
    made = bambi.Model(case.formula, _data(case.rows), family=case.family, **case.options)
    made.build()
    return made.backend.model


@pytest.mark.compiled
@pytest.mark.parametrize("name", marked(CASES, slow=SOME, exhaustive=others(CASES, SOME)))
def test_the_posterior_at_a_large_budget_is_that_of_nuts(name: str) -> None:
    """Means within .25 posterior sd, widths within a quarter.

    Both sides have some 1000 effective draws, so that means differ by .25 sd with probability
    below 1e-7 a parameter.
    """
    with _model(CASES[name]) as model:
        dp.PrivacyBudget(epsilon=1e4, delta=1e-6)
        private = dp.sample(draws=CASES[name].draws, chains=4, cores=1, progressbar=False)
    with _model(CASES[name]):
        exact = pm.sample(
            1500,
            chains=2,
            cores=1,
            target_accept=0.9,
            var_names=[rv.name for rv in model.free_RVs],
            random_seed=27,
            progressbar=False,
            compute_convergence_checks=False,
            compile_kwargs={"mode": "NUMBA"},
        )
    ours, theirs = (_compat.group(draws, "posterior") for draws in (private, exact))
    for rv in model.free_RVs:
        one, other = ours[rv.name].values, theirs[rv.name].values
        sd = other.std(axis=(0, 1))
        assert np.all(np.abs(one.mean(axis=(0, 1)) - other.mean(axis=(0, 1))) < 0.25 * sd), rv.name
        assert np.all(np.abs(np.log(one.std(axis=(0, 1)) / sd)) < 0.25), rv.name
