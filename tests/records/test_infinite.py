"""Bounds of pm.Censored and pm.Truncated that are infinite for the records that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.errors import UnsafeModel
from pymc_dp.records.extraction import extract
from pymc_dp.rows.engine import RowEngine
from tests.selection import marked

N = 24
RNG = np.random.default_rng(8)
X = RNG.normal(size=N)
REAL = 0.5 * X + RNG.normal(size=N)
POSITIVE = np.exp(0.5 * X) * RNG.weibull(1.5, N) + 0.1
COUNT = RNG.poisson(3.0, N)
#: Records without a bound below, above.
OPEN = np.arange(N) % 3 == 0, np.arange(N) % 2 == 0
FAMILIES: dict[str, tuple[np.ndarray, Callable[[Any, Any], Any]]] = {
    "normal": (REAL, lambda eta, s: pm.Normal.dist(eta, s)),
    "student": (REAL, lambda eta, s: pm.StudentT.dist(4.0, mu=eta, sigma=s)),
    "gumbel": (REAL, lambda eta, s: pm.Gumbel.dist(eta, s)),
    "weibull": (POSITIVE, lambda eta, s: pm.Weibull.dist(s, pt.exp(eta))),
    "exponential": (POSITIVE, lambda eta, s: pm.Exponential.dist(s * pt.exp(eta))),
    "lognormal": (POSITIVE, lambda eta, s: pm.LogNormal.dist(eta, s)),
    "gamma": (POSITIVE, lambda eta, s: pm.Gamma.dist(2.0, s * pt.exp(eta))),
    "poisson": (COUNT, lambda eta, s: pm.Poisson.dist(s * pt.exp(eta))),
    "geometric": (COUNT + 1, lambda eta, s: pm.Geometric.dist(pm.math.invlogit(s + eta))),
}
#: Those that are not further combinations.
SOME = {"geometric", "normal"}


def truncated(family: str, rows: np.ndarray, lower: Any, upper: Any) -> pm.Model:
    y, dist = FAMILIES[family]
    with pm.Model() as model:
        s = pm.HalfNormal("s")
        eta = pm.Normal("a") + pm.Normal("b") * X[rows]
        pm.Truncated("y", dist(eta, s), lower=lower, upper=upper, observed=y[rows])
    return model


def records_of(model: pm.Model, thetas: np.ndarray, **options: Any) -> list[np.ndarray]:
    """(n, 1 + d) log-likelihoods and scores of the records."""
    records = extract(model, **options)
    d = records.parameters.size
    engine = RowEngine.of(records, Coordinates(np.zeros(d), np.eye(d)), {"mode": INTERPRETED})
    scores = (np.hstack([b for _, b in engine.vectors(engine.scores(z))]) for z in thetas)
    return [np.vstack([engine.log_likelihood(z), s]).T for z, s in zip(thetas, scores, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("family", marked(FAMILIES, exhaustive=FAMILIES.keys() - SOME))
def test_each_truncated_record_counts_as_in_a_model_of_its_own_bounds(family: str) -> None:
    """Also far out, where the formula for bounds that a record has not gives no number."""
    y = FAMILIES[family][0]
    lower, upper = np.where(OPEN[0], -np.inf, y - 0.5), np.where(OPEN[1], np.inf, y + 1.5)
    thetas = np.repeat([0.5, 3.0, 15.0], 5)[:, None] * np.random.default_rng(5).normal(size=(15, 3))
    found = records_of(truncated(family, np.arange(N), lower, upper), thetas)
    for below in (True, False):
        for above in (True, False):
            rows = np.flatnonzero((OPEN[0] == below) & (OPEN[1] == above))
            ends = [None if x else e[rows] for x, e in ((below, lower), (above, upper))]
            ends = [-np.inf, None] if below and above else ends  # PyMC wants one
            expected = records_of(truncated(family, rows, *ends), thetas, check=False)
            for mine, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(mine[rows], theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_finite_bounds_of_rows_count_as_in_pymc() -> None:
    model = truncated("normal", np.arange(N), REAL - 0.5, REAL + 1.5)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    [rows] = model.logp(vars=model.observed_RVs, jacobian=False, sum=False)
    function = pytensor.function(
        values, [rows, *pytensor.grad(rows.sum(), values)], mode=INTERPRETED
    )
    theta = np.array([0.2, -0.1, 0.3])
    by_row, *gradient = function(*theta)
    [found] = records_of(model, theta[None])
    np.testing.assert_allclose(found[:, 0], by_row, rtol=1e-9)
    np.testing.assert_allclose(found[:, 1:].sum(axis=0), gradient, rtol=1e-9)


# -- censored -------------------------------------------------------------------------------------

LIMIT = np.random.default_rng(9).uniform(0.5, 3.0, N)
CENSORED = POSITIVE > LIMIT
TIME = np.minimum(POSITIVE, LIMIT)
#: How the bound of the records that are censored gets into a model.
GIVEN: dict[str, Callable[[], Any]] = {
    "an array": lambda: np.where(CENSORED, TIME, np.inf),
    "pm.Data": lambda: pm.Data("limit", np.where(CENSORED, TIME, np.inf)),
    "a choice": lambda: pt.switch(CENSORED, TIME, np.inf),
    "a choice by pm.Data": lambda: pt.switch(pm.Data("censored", CENSORED), TIME, np.inf),
    "shifted": lambda: pt.as_tensor(np.where(CENSORED, TIME - 0.5, np.inf)) + 0.5,
    "the larger one": lambda: pt.maximum(np.where(CENSORED, TIME, np.inf), -1.0),
}


def survival(given: str, lower: Any = None) -> pm.Model:
    with pm.Model() as model:
        eta = pm.Normal("a") + pm.Normal("b") * X
        times = pm.Weibull.dist(pm.HalfNormal("s"), pt.exp(eta))
        pm.Censored("y", times, lower=lower, upper=GIVEN[given](), observed=TIME)
    return model


@pytest.mark.parametrize(
    ("given", "lower"),
    [*((given, None) for given in GIVEN), ("an array", -np.inf), ("pm.Data", np.full(N, -np.inf))],
)
def test_records_that_are_not_censored_have_an_infinite_bound(given: str, lower: Any) -> None:
    theta = np.array([0.3, -0.2, 0.1])
    order = [rv.name for rv in survival(given).free_RVs]
    at = dict(zip(order, theta, strict=True))
    scale, shape = np.exp(at["a"] + at["b"] * X), np.exp(at["s"])
    hazard = np.where(CENSORED, 0.0, np.log(shape / scale * (TIME / scale) ** (shape - 1.0)))
    [found] = records_of(survival(given, lower), theta[None])
    np.testing.assert_allclose(found[:, 0], hazard - (TIME / scale) ** shape, rtol=1e-9)
    slope = shape * ((TIME / scale) ** shape - ~CENSORED)
    np.testing.assert_allclose(found[:, 1 + order.index("a")], slope, rtol=1e-9, atol=1e-12)


# -- what stays refused ---------------------------------------------------------------------------


def with_bound(bound: Any) -> None:
    pm.Censored("y", pm.Normal.dist(pm.Normal("a")), lower=None, upper=bound, observed=TIME)


SOME_INFINITE = np.where(OPEN[0], np.inf, 5.0)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: with_bound(np.where(OPEN[0], np.nan, 5.0)),
        lambda: pm.Normal("y", pm.Normal("a") * SOME_INFINITE, 1.0, observed=TIME),
        lambda: pm.Normal("y", pm.Normal("a"), SOME_INFINITE, observed=TIME),
        lambda: pm.Normal("y", pm.Normal("a"), 1.0, observed=SOME_INFINITE),
        lambda: with_bound(pt.switch(SOME_INFINITE > 1e3, 5.0, 2.0 * pt.as_tensor(SOME_INFINITE))),
        lambda: with_bound(pt.as_tensor(SOME_INFINITE) - pt.as_tensor(SOME_INFINITE)),
        lambda: pm.Truncated(
            "y", pm.Normal.dist(pm.Normal("a")), upper=np.where(OPEN[0], np.nan, 5.0), observed=TIME
        ),
    ],
)
def test_other_data_must_be_finite(declare: Callable[[], Any]) -> None:
    with pm.Model() as model:
        declare()
    with pytest.raises(UnsafeModel, match=r"holds NaN.*Clean the data.*it is private"):
        extract(model)
