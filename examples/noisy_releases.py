"""Posteriors from four published statistics.

1. A clamped linear regression from noisy sufficient statistics (Ju, Awan, Gong & Rao 2022).
2. A naive Bayes log-linear model from noisy counts (the same).
3. A 2 x 2 table of randomised answers.
4. A Poisson rate from one noisy count, with an unknown number of records.

Run with ``python examples/noisy_releases.py``; the data are simulated.  Prints summaries.
"""

from __future__ import annotations

import math
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.model import Model

import pymc_dp as dp

RNG = np.random.default_rng(20)
N = 100


def regression(epsilon: float = 1.0) -> Model:
    """Coefficients -1.79, -2.89, -0.66."""
    mean = np.array([0.9, -1.17])
    x = RNG.normal(mean, 1.0, (N, 2))
    y = RNG.normal(-1.79 + x @ [-2.89, -0.66], math.sqrt(2.0))
    true = _sufficient(dp.clamp(x, -10, 10), dp.clamp(y, -10, 10)).eval().sum(axis=0)
    noise = RNG.laplace(0.0, 9.375 / epsilon, 9)  # 9.375: l1 sensitivity of replacing a record
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        records = pm.Normal("x", mean, 1.0, shape=(N, 2))
        answers = pm.Normal("y", beta[0] + records @ beta[1:], math.sqrt(2.0), shape=N)
        rows = _sufficient(dp.clamp(records, -10, 10), dp.clamp(answers, -10, 10))
        dp.LaplaceRelease("s", rows, sensitivity=9.375, epsilon=epsilon, observed=true + noise)
    return model


def _sufficient(x: Any, y: Any) -> Any:
    u, v = x[:, 0], x[:, 1]
    return pt.stack([y, u * y, v * y, y * y, u, v, u * u, u * v, v * v], axis=1)


def log_linear(
    epsilon: float = 3.0, classes: int = 3, features: int = 2, answers: int = 3
) -> Model:
    """Class 0 has probability 0.5; answers depend on the class."""
    label = RNG.choice(classes, N, p=[0.5, 0.3, 0.2])
    given = [(label + (RNG.random(N) < 0.3)) % answers for _ in range(features)]
    cells = [(k, j, i) for k in range(features) for j in range(answers) for i in range(classes)]
    counts = np.array([((given[k] == j) & (label == i)).sum() for k, j, i in cells])
    p = -math.expm1(-epsilon / (2.0 * features))
    noisy = counts + RNG.geometric(p, len(cells)) - RNG.geometric(p, len(cells))
    with pm.Model() as model:
        share = pm.Dirichlet("share", np.ones(classes))
        table = pm.Dirichlet("table", np.ones(answers), shape=(features, classes, answers))
        labels = pm.Categorical("label", share, shape=N)
        answer = [pm.Categorical(f"answer{k}", table[k][labels], shape=N) for k in range(features)]
        rows = pt.stack([pt.eq(answer[k], j) * pt.eq(labels, i) for k, j, i in cells], axis=1)
        dp.GeometricRelease(
            "counts",
            rows.astype("int64"),
            sensitivity=2.0 * features,
            epsilon=epsilon,
            observed=noisy,
        )
    return model


def randomised_table(epsilon: float = 1.0) -> Model:
    """Two answers per person, correlated; each is randomised on its own."""
    first = RNG.random(500) < 0.3
    second = RNG.random(500) < np.where(first, 0.7, 0.2)
    truth = 1.0 / (1.0 + math.exp(-epsilon))
    told = [np.where(RNG.random(500) < truth, a, ~a).astype(int) for a in (first, second)]
    with pm.Model() as model:
        cells = pm.Dirichlet("cells", np.ones(4))
        cell = pm.Categorical("cell", cells, shape=500)
        dp.RandomizedResponse("first", cell // 2, epsilon=epsilon, observed=told[0])
        dp.RandomizedResponse("second", cell % 2, epsilon=epsilon, observed=told[1])
        pm.Deterministic(
            "log odds ratio", pt.log(cells[0] * cells[3]) - pt.log(cells[1] * cells[2])
        )
    return model


def rate(epsilon: float = 0.5) -> Model:
    """Visits of about 60 to 100 persons at rate 2; at most 5 of each person count."""
    visits = np.minimum(RNG.poisson(2.0, 80), 5)
    noisy = [visits.sum() + RNG.laplace(0, 5 / epsilon), 80 + RNG.laplace(0, 1 / epsilon)]
    with pm.Model() as model:
        level = pm.Gamma("rate", 2.0, 1.0)
        persons = pm.DiscreteUniform("persons", 40, 120)
        x = pm.Poisson("x", level, shape=120)
        here = dp.present(persons, 120)
        dp.LaplaceRelease(
            "visits", pt.minimum(x, 5) * here, sensitivity=5.0, epsilon=epsilon, observed=noisy[0]
        )
        dp.LaplaceRelease("size", here, sensitivity=1.0, epsilon=epsilon, observed=noisy[1])
    return model


def main() -> None:
    """Sample from each posterior."""
    with regression():
        print("1. Regression: beta is -1.79, -2.89, -0.66")
        show(dp.sample(1000, chains=2, step=dp.PrivacyAwareGibbs, random_seed=1))
    with log_linear():
        print("2. Log-linear model: shares are 0.5, 0.3, 0.2")
        show(dp.sample(1000, chains=2, step=dp.PrivacyAwareGibbs, random_seed=1), ["share"])
    with randomised_table() as model:
        print("3. Randomised table: the log odds ratio is about 2.2")
        step = dp.PrivacyAwareGibbs([model["cell"]], proposal="enumerate")
        show(dp.sample(1000, chains=2, step=step, random_seed=1))
    with rate() as model:
        print("4. Rate: 2, of 80 persons")
        step = dp.PrivacyAwareGibbs([model["x"], model["persons"]])
        show(dp.sample(1000, chains=2, step=step, random_seed=1))


def show(result: Any, names: list[str] | None = None) -> None:
    """Means, intervals and diagnostics."""
    print(az.summary(result, var_names=names).to_string(), "\n")


if __name__ == "__main__":
    main()
