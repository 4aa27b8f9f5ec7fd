"""Ju, Awan, Gong & Rao (2022), Data Augmentation MCMC for Bayesian Inference from Privatized Data.

    python -m replications gibbs_2022 --quick
    python -m replications gibbs_2022 --json replications/results/gibbs_2022.json

The two models are those of the paper, with its parameters and its confidential data: a naive Bayes
log-linear model with noisy counts, and a linear regression with noisy clamped sums; n = 100.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import arviz as az
import numpy as np
import pymc as pm

import pymc_dp as dp
from benchmarks.gibbs import BETA, SENSITIVITY, Chain, log_linear, publish
from replications.report import Found, Row

EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0)
N = 100

# -- the paper's numbers --------------------------------------------------------------------------

#: Table 1: coverage of 90 % intervals of P(Y = i).
TABLE_1 = {
    0.1: (1.0, 1.0, 1.0, 0.36, 1.0),
    0.3: (0.97, 1.0, 1.0, 0.59, 1.0),
    1.0: (0.94, 0.99, 0.97, 0.83, 0.98),
    3.0: (0.95, 0.91, 0.97, 0.89, 0.93),
    10.0: (0.92, 0.88, 0.94, 0.92, 0.90),
}
#: Table 1 of the supplement: coverage of 90 % intervals of the regression's coefficients.
TABLE_S1 = {
    0.1: (0.99, 0.60, 0.99),
    0.3: (1.0, 0.66, 0.94),
    1.0: (1.0, 0.84, 0.80),
    3.0: (1.0, 0.84, 0.75),
    10.0: (0.93, 0.87, 0.85),
}
#: S-6: seconds for a chain of 10,000 iterations.
SECONDS = {"log-linear": 404.0, "regression": 330.0}

# -- the authors' parameters and confidential data, from the repository that the paper names ------

CLASS_PROBABILITIES = np.array([0.0979, 0.1481, 0.1447, 0.4463, 0.1630])
#: (features, answers, classes)
ANSWER_PROBABILITIES = np.array(
    [
        [[272, 186, 349, 258, 403], [330, 635, 174, 368, 310], [398, 180, 477, 373, 287]],
        [[445, 330, 173, 279, 524], [400, 563, 421, 73, 309], [155, 107, 406, 648, 167]],
        [[276, 605, 504, 745, 359], [661, 185, 356, 115, 448], [63, 210, 140, 140, 193]],
        [[353, 385, 535, 448, 388], [278, 377, 183, 179, 258], [369, 238, 283, 373, 353]],
        [[471, 561, 425, 276, 476], [331, 300, 70, 707, 329], [198, 139, 506, 17, 195]],
    ]
)
#: (features, answers, classes) confidential counts behind Figure 1.
COUNTS = np.array(
    [
        [[2, 3, 2, 12, 3], [3, 6, 1, 23, 3], [1, 2, 7, 28, 4]],
        [[4, 3, 2, 22, 4], [1, 8, 3, 6, 4], [1, 0, 5, 35, 2]],
        [[0, 8, 6, 48, 4], [5, 1, 4, 9, 1], [1, 2, 0, 6, 5]],
        [[3, 5, 6, 28, 6], [2, 4, 1, 8, 1], [1, 2, 3, 27, 3]],
        [[4, 8, 6, 17, 7], [0, 3, 1, 46, 0], [2, 0, 3, 0, 3]],
    ]
)
#: Confidential sums behind Figure 2, and the posterior means given these records.
SUMS = np.array([-37.4211, -6.2943, 2.995, 24.9949, 9.3791, -12.6974, 1.7999, -0.9352, 2.8001])
COEFFICIENT_MEANS = np.array([-2.232, -2.7924, -0.8739])

# -- the two experiments --------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """A model of the paper, what it publishes, and where the paper reports on it.

    Attributes
    ----------
    chain : callable
        (epsilon, noncentered) -> Chain.
    new, again : callable
        (rng, epsilon) -> what is published about new records, and about the confidential data.
    truth, prior, confidential : (d,) ndarray
        Parameters; their prior means; their posterior means given the confidential data.
    noncentered : bool
        Whether the coverage is that of chains with non-centred moves.
    """

    name: str
    symbol: str
    chain: Callable[[float, Any], Chain]
    new: Callable[[np.random.Generator, float], np.ndarray]
    again: Callable[[np.random.Generator, float], np.ndarray]
    truth: np.ndarray
    prior: np.ndarray
    confidential: np.ndarray
    noncentered: Any
    coverage: dict[float, tuple[float, ...]]
    table: str
    means: str
    acceptance: str


class Dirichlets:
    """The probabilities of the log-linear model given its records: step 1 of Algorithm 1."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def set_rng(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[Any]]:
        """One exact draw; the prior is Dirichlet(2, ..., 2)."""
        features, answers, classes = COUNTS.shape
        label = point["label"]
        given = np.stack([point[f"answer{k}"] for k in range(features)])
        cell = (np.arange(features)[:, None] * classes + label) * answers + given
        counts = np.bincount(cell.ravel(), minlength=COUNTS.size)
        p = self._draw(np.bincount(label, minlength=classes))
        q = self._draw(counts.reshape(features, classes, answers))
        return {**point, "p_simplex__": _unconstrained(p), "q_simplex__": _unconstrained(q)}, [{}]

    def _draw(self, counts: np.ndarray) -> np.ndarray:
        gamma = self.rng.standard_gamma(2.0 + counts)
        return gamma / gamma.sum(axis=-1, keepdims=True)


def _unconstrained(p: np.ndarray) -> np.ndarray:
    """PyMC's coordinates of probabilities: centred logarithms without the last."""
    logs = np.log(p)
    return (logs - logs.mean(axis=-1, keepdims=True))[..., :-1]


def _class_probabilities(point: dict[str, np.ndarray]) -> np.ndarray:
    logs = point["p_simplex__"]
    weights = np.exp(np.append(logs, -logs.sum()))
    return weights / weights.sum()


def _log_linear_chain(epsilon: float, noncentered: Any) -> Chain:
    model, records = log_linear(N, epsilon)
    with model:
        step = dp.PrivacyAwareGibbs(records, noncentered=noncentered)
    return Chain(model, step, Dirichlets(), _class_probabilities)


def _noisy_counts(rng: np.random.Generator, counts: np.ndarray, epsilon: float) -> np.ndarray:
    scale = 2.0 * len(counts) / epsilon
    return counts.ravel() + rng.laplace(0.0, scale, counts.size)


def _new_counts(rng: np.random.Generator) -> np.ndarray:
    p = CLASS_PROBABILITIES / CLASS_PROBABILITIES.sum()
    q = ANSWER_PROBABILITIES / ANSWER_PROBABILITIES.sum(axis=1, keepdims=True)
    sizes = rng.multinomial(N, p)
    # the features of the records of a class are independent of each other
    return np.array(
        [[rng.multinomial(n, feature[:, i]) for i, n in enumerate(sizes)] for feature in q]
    ).swapaxes(1, 2)


LOG_LINEAR = Experiment(
    name="log-linear",
    symbol="p",
    chain=_log_linear_chain,
    new=lambda rng, epsilon: _noisy_counts(rng, _new_counts(rng), epsilon),
    again=lambda rng, epsilon: _noisy_counts(rng, COUNTS, epsilon),
    truth=CLASS_PROBABILITIES,
    prior=np.full(5, 0.2),
    confidential=(COUNTS[0].sum(axis=0) + 2.0) / (N + 10.0),
    noncentered=False,
    coverage=TABLE_1,
    table="Table 1",
    means="Figure 1a",
    acceptance="Figure 1b",
)
REGRESSION = Experiment(
    name="regression",
    symbol="beta",
    chain=Chain.of_regression,
    new=lambda rng, epsilon: publish(rng, N, epsilon),
    again=lambda rng, epsilon: SUMS + rng.laplace(0.0, SENSITIVITY / epsilon, len(SUMS)),
    truth=BETA,
    prior=np.zeros(3),
    confidential=COEFFICIENT_MEANS,
    noncentered="auto",
    coverage=TABLE_S1,
    table="Supplement, Table 1",
    means="Figure 2",
    acceptance="Figure S1",
)
