"""Bounds that are infinite for the records that have none, in pm.Censored and pm.Truncated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import pymc_dp as dp
from pymc_dp.records import extract
from pymc_dp.rows.engine import Coordinates
from pymc_dp.rows.functions import INTERPRETED

QUICK = {"mode": INTERPRETED}
N = 48
RNG = np.random.default_rng(8)
X = RNG.normal(size=N)
REAL = 0.5 * X + RNG.normal(size=N)
POSITIVE = np.exp(0.5 * X) * RNG.weibull(1.5, N) + 0.1
FRACTION = RNG.uniform(0.1, 0.9, N)
COUNT = RNG.poisson(3.0, N)
#: Records without a bound below, above.
OPEN = np.arange(N) % 3 == 0, np.arange(N) % 2 == 0

Family = tuple[np.ndarray, Callable[[Any, Any], Any]]
FAMILIES: dict[str, Family] = {
    "normal": (REAL, lambda eta, s: pm.Normal.dist(eta, s)),
    "student": (REAL, lambda eta, s: pm.StudentT.dist(4.0, mu=eta, sigma=s)),
    "logistic": (REAL, lambda eta, s: pm.Logistic.dist(eta, s)),
    "skewed": (REAL, lambda eta, s: pm.Gumbel.dist(eta, s)),
    "weibull": (POSITIVE, lambda eta, s: pm.Weibull.dist(s, pt.exp(eta))),
    "exponential": (POSITIVE, lambda eta, s: pm.Exponential.dist(s * pt.exp(eta))),
    "lognormal": (POSITIVE, lambda eta, s: pm.LogNormal.dist(eta, s)),
    "gamma": (POSITIVE, lambda eta, s: pm.Gamma.dist(s, pt.exp(eta))),
    "beta": (FRACTION, lambda eta, s: pm.Beta.dist(pt.exp(eta), s)),
    "poisson": (COUNT, lambda eta, s: pm.Poisson.dist(s * pt.exp(eta))),
    "negative binomial": (COUNT, lambda eta, s: pm.NegativeBinomial.dist(mu=pt.exp(eta), alpha=s)),
}


def bounds_of(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    below, above = OPEN
    return np.where(below, -np.inf, y - 1.5 * (y + 0.5) % 1), np.where(above, np.inf, y + 1.5)


def truncated(family: str, rows: np.ndarray, lower: Any, upper: Any) -> pm.Model:
    y, dist = FAMILIES[family]
    with pm.Model() as model:
        s = pm.HalfNormal("s")
        eta = pm.Normal("a") + pm.Normal("b") * X[rows]
        pm.Truncated("y", dist(eta, s), lower=lower, upper=upper, observed=y[rows])
    return model


def evaluate(model: pm.Model, thetas: np.ndarray, **options: Any) -> list[tuple[Any, Any]]:
    records = extract(model, **options)
    d = records.parameters.size
    engine = records.engine(Coordinates(np.zeros(d), np.eye(d)), QUICK)
    return [
        (
            engine.log_likelihood(z),
            np.concatenate([b.T.copy() for _, b in engine.vectors(engine.scores(z))]),
        )
        for z in thetas
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_truncated_record_counts_as_in_a_model_of_its_own_bounds(family: str) -> None:
    y, _ = FAMILIES[family]
    lower, upper = bounds_of(y)
    rng = np.random.default_rng(5)
    thetas = rng.normal(size=(60, 3)) * np.repeat([0.5, 3.0, 30.0], 20)[:, None]
    found = evaluate(truncated(family, np.arange(N), lower, upper), thetas)
    for below in (True, False):
        for above in (True, False):
            rows = np.flatnonzero((OPEN[0] == below) & (OPEN[1] == above))
            if below and above:
                continue
            sides = [None if x else e[rows] for x, e in ((below, lower), (above, upper))]
            expected = evaluate(truncated(family, rows, *sides), thetas)
            for k, (e, f) in enumerate(zip(expected, found)):
                bad = ~np.isclose(e[0], f[0][rows], rtol=1e-9) & ~(e[0]==f[0][rows])
                bs = ~np.isclose(e[1], f[1][rows], rtol=1e-8, atol=1e-9).all(1)
                if bad.any() or bs.any():
                    print(family, below, above, k, thetas[k], bad.sum(), bs.sum(), e[0][bad][:2], f[0][rows][bad][:2], e[1][bs][:2], f[1][rows][bs][:2])
