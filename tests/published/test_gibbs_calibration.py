"""Simulation-based calibration of PrivacyAwareGibbs: ranks of true parameters are uniform.

Talts et al. (2018).  Parameters are drawn from the prior, records from the model, a release from
the records; then the rank of the true parameter among nearly independent posterior draws is uniform
if, and nearly only if, the sampler is exact.  One compiled step serves all releases of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.model import Model
from scipy import stats

import pymc_dp as dp
from tests.selection import marked

pytestmark = pytest.mark.compiled

N = 15
RELEASES, DRAWS, STRIDE, BURN = 200, 9, 12, 60
#: False alarms of a chi-square test of ten counts.
ALPHA = 1e-6

Point = dict[str, np.ndarray]
Generator = np.random.Generator


@dataclass
class Case:
    """A model, how its data arise, and how its parameter is drawn given the records."""

    model: Model
    records: list[Any]
    name: str
    simulate: Callable[[Generator], tuple[float, np.ndarray]]
    parameter: Callable[[Point, Generator], float]


def rates() -> Case:
    """Poisson records, a geometric release of their clamped sum."""
    with pm.Model() as model:
        published = pm.Data("published", np.array(0))
        rate = pm.Gamma("rate", 2.0, 1.0, default_transform=None)
        x = pm.Poisson("x", rate, shape=N)
        dp.GeometricRelease("s", pt.minimum(x, 4), scale=3.0, observed=published)

    def simulate(rng: Generator) -> tuple[float, np.ndarray]:
        true = rng.gamma(2.0, 1.0)
        total = np.minimum(rng.poisson(true, N), 4).sum()
        p = 1 - np.exp(-1 / 3.0)
        return true, np.asarray(total + rng.geometric(p) - rng.geometric(p))

    def parameter(point: Point, rng: Generator) -> float:
        return rng.gamma(2.0 + point["x"].sum(), 1.0 / (1.0 + N))

    return Case(model, [x], "rate", simulate, parameter)


def answers() -> Case:
    """Two noisy counts, and randomised response of the same records."""
    with pm.Model() as model:
        published = pm.Data("published", np.zeros(2))
        p = pm.Beta("p", 1.0, 2.0, default_transform=None)
        x = pm.Bernoulli("x", p, shape=N)
        rows = pt.stack([x, 1 - x], axis=1)
        dp.LaplaceRelease("s", rows, scale=2.0, observed=published)

    def simulate(rng: Generator) -> tuple[float, np.ndarray]:
        true = rng.beta(1.0, 2.0)
        ones = (rng.random(N) < true).sum()
        return true, np.array([ones, N - ones]) + rng.laplace(0, 2.0, 2)

    def parameter(point: Point, rng: Generator) -> float:
        ones = point["x"].sum()
        return rng.beta(1.0 + ones, 2.0 + N - ones)

    return Case(model, [x], "p", simulate, parameter)


def lines() -> Case:
    """A clamped regression: covariates and responses are records."""
    with pm.Model() as model:
        published = pm.Data("published", np.zeros(3))
        slope = pm.Normal("slope")
        x = pm.Normal("x", 0.5, 1.0, shape=N)
        y = pm.Normal("y", slope * x, 1.0, shape=N)
        u, w = dp.clamp(x, -2, 2), dp.clamp(y, -2, 2)
        rows = pt.stack([u * w, u**2, w], axis=1)
        dp.GaussianRelease("s", rows, scale=0.7, observed=published)

    def simulate(rng: Generator) -> tuple[float, np.ndarray]:
        true = rng.standard_normal()
        x = rng.normal(0.5, 1.0, N)
        y = rng.normal(true * x, 1.0)
        u, w = np.clip(x, -2, 2) / 2, np.clip(y, -2, 2) / 2
        return true, np.stack([u * w, u**2, w], 1).sum(0) + rng.normal(0, 0.7, 3)

    def parameter(point: Point, rng: Generator) -> float:
        precision = 1.0 + (point["x"] ** 2).sum()
        mean = (point["x"] * point["y"]).sum() / precision
        return rng.normal(mean, precision**-0.5)

    return Case(model, [x, y], "slope", simulate, parameter)


def ranks(case: Case, step: dp.PrivacyAwareGibbs, seed: int) -> np.ndarray:
    """(RELEASES,) ranks of the true parameter, 0 to DRAWS."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(RELEASES):
        true, published = case.simulate(rng)
        with case.model:
            pm.set_data({"published": published})
        step.set_rng(np.random.default_rng(rng.integers(2**31)))
        point, below = case.model.initial_point(), 0
        for k in range(BURN + DRAWS * STRIDE):
            point, _ = step.step(point)
            point[case.name] = np.asarray(case.parameter(point, rng))
            if k == BURN // 2:
                step.stop_tuning()
            if k >= BURN and (k - BURN) % STRIDE == STRIDE - 1:
                below += float(point[case.name]) < true
        found.append(below)
    return np.array(found)


def p_value(found: np.ndarray) -> float:
    counts = np.bincount(found, minlength=DRAWS + 1)
    return float(stats.chisquare(counts).pvalue)


@pytest.mark.parametrize(
    ("build", "noncentered"),
    marked(
        [(rates, "auto"), (answers, False), (lines, "auto")],
        slow=[(answers, False), (lines, "auto")],
        exhaustive=[(rates, "auto")],
    ),
)
def test_ranks_are_uniform(build: Callable[[], Case], noncentered: Any) -> None:
    case = build()
    with case.model:
        step = dp.PrivacyAwareGibbs(case.records, noncentered=noncentered)
    assert p_value(ranks(case, step, seed=17)) > ALPHA


@pytest.mark.slow
def test_a_wrong_scale_is_found() -> None:
    """Half the noise in the declared release makes intervals too narrow."""
    case = lines()
    with case.model:
        step = dp.PrivacyAwareGibbs(case.records)
    honest = case.simulate

    def simulate(rng: Generator) -> tuple[float, np.ndarray]:
        true, published = honest(rng)
        return true, published + rng.normal(0, 6.0, 3)

    case.simulate = simulate
    assert p_value(ranks(case, step, seed=18)) < ALPHA
