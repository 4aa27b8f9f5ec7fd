"""The naive Bayes log-linear model with noisy counts, small enough to enumerate all records."""

from __future__ import annotations

import itertools
from math import lgamma
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

import pymc_dp as dp

CLASSES, FEATURES, ANSWERS, N = 2, 2, 2, 4
ALPHA = 2.0


def published(rng: np.random.Generator, epsilon: float) -> tuple[np.ndarray, float]:
    """(FEATURES, ANSWERS, CLASSES) noisy counts, and the scale of their noise."""
    scale = 2.0 * FEATURES / epsilon
    counts = np.zeros((FEATURES, ANSWERS, CLASSES))
    for _ in range(N):
        label = int(rng.random() < 0.75)
        for k in range(FEATURES):
            counts[k, int(rng.random() < 0.3), label] += 1
    return counts + rng.laplace(0, scale, counts.shape), scale


def exact_mean(noisy: np.ndarray, scale: float) -> float:
    """Posterior mean of the probability of class 0, by enumeration of all records."""
    cells = list(itertools.product(range(CLASSES), *[range(ANSWERS)] * FEATURES))
    logs, means = [], []
    for records in itertools.product(cells, repeat=N):
        sizes = np.zeros(CLASSES)
        counts = np.zeros((FEATURES, ANSWERS, CLASSES))
        for label, *answers in records:
            sizes[label] += 1
            for k, answer in enumerate(answers):
                counts[k, answer, label] += 1
        log = _dirichlet(sizes) - np.abs(counts - noisy).sum() / scale
        log += sum(_dirichlet(counts[k, :, i]) for k in range(FEATURES) for i in range(CLASSES))
        logs.append(log)
        means.append((sizes[0] + ALPHA) / (N + 2 * ALPHA))
    weights = np.exp(np.array(logs) - max(logs))
    return float(weights @ np.array(means) / weights.sum())


def _dirichlet(counts: np.ndarray) -> float:
    total = lgamma(2 * ALPHA) - lgamma(2 * ALPHA + counts.sum())
    return total + sum(lgamma(ALPHA + c) - lgamma(ALPHA) for c in counts)


def model(noisy: np.ndarray, scale: float) -> tuple[pm.Model, list[Any]]:
    """The model, without transforms, and its records."""
    with pm.Model() as built:
        p = pm.Beta("p", ALPHA, ALPHA, default_transform=None)  # of class 0
        q = pm.Beta(
            "q", ALPHA, ALPHA, shape=(FEATURES, CLASSES), default_transform=None
        )  # of answer 0
        label = pm.Bernoulli("label", 1.0 - p, shape=N)
        answers = [pm.Bernoulli(f"answer{k}", 1.0 - q[k][label], shape=N) for k in range(FEATURES)]
        cells = [
            pt.eq(answers[k], j) * pt.eq(label, i)
            for k in range(FEATURES)
            for j in range(ANSWERS)
            for i in range(CLASSES)
        ]
        dp.LaplaceRelease("s", pt.stack(cells, axis=1), scale=scale, observed=noisy.ravel())
    return built, [label, *answers]


def draw_parameters(point: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Parameters given the records, in place."""
    label = point["label"]
    point["p"] = np.asarray(rng.beta(ALPHA + (label == 0).sum(), ALPHA + (label == 1).sum()))
    q = np.empty((FEATURES, CLASSES))
    for k in range(FEATURES):
        for i in range(CLASSES):
            mine = point[f"answer{k}"][label == i]
            q[k, i] = rng.beta(ALPHA + (mine == 0).sum(), ALPHA + (mine == 1).sum())
    point["q"] = q
