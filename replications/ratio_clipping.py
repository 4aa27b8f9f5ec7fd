"""The clipping experiment of Raisa, Koskela & Honkela (2021, section 4.2): chains without noise.

Log-likelihood ratios are clipped as private ones are, and nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import arviz as az
import numpy as np
import xarray as xr

import pymc_dp as dp
from benchmarks.models import BANANA, GAUSS, PAPER, Data, Problem
from benchmarks.reference import reference
from pymc_dp.kernels import hmc, penalty
from pymc_dp.kernels.interfaces import HaltonJitter
from replications.report import Found, Row

__all__ = ["CHAINS", "SEED", "Problems", "Sample", "clip", "split_rhat"]

CHAINS, SEED = 4, 1


@dataclass(frozen=True, eq=False)
class Problems:
    """A model with its data and exact posterior draws."""

    problem: Problem
    data: Data
    exact: np.ndarray

    @classmethod
    def of(cls, name: str) -> Problems:
        problem = PAPER[name]
        data = problem.data(SEED)
        return cls(problem, data, reference(problem, data, SEED).exact())

    def starts(self, seed: int) -> list[dict[str, np.ndarray]]:
        """Normal about the truth, as wide as the mean of the posterior sds."""
        rng, sd = np.random.default_rng([SEED, seed]), self.exact.std(axis=0).mean()
        return [
            {name: value + sd * rng.standard_normal(value.shape) for name, value in truth.items()}
            for truth in [self.data.truth] * CHAINS
        ]


@dataclass(frozen=True, eq=False)
class Sample:
    """Draws (chains, draws, d) after the first half, and the share of accepted proposals."""

    theta: np.ndarray
    acceptance: float

    @property
    def flat(self) -> np.ndarray:
        return self.theta.reshape(-1, self.theta.shape[-1])


def split_rhat(theta: np.ndarray) -> float:
    """Largest over parameters, not rank-normalised, as in the paper's code."""
    data = xr.Dataset({"theta": (("chain", "draw", "entry"), theta)})
    return float(np.max(az.rhat(data, method="split")["theta"].values))


def _natural(name: str, theta: np.ndarray) -> np.ndarray:
    """(..., d) means of a record."""
    if name == "gauss":
        return theta
    return np.stack([theta[..., 0], theta[..., 1] + BANANA.a * theta[..., 0] ** 2], axis=-1)


def _pulled(name: str, theta: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Score in theta from the score in the means."""
    if name == "gauss":
        return score
    first = score[..., 0] + 2.0 * BANANA.a * theta[..., 0] * score[..., 1]
    return np.stack([first, score[..., 1]], axis=-1)


class MeanPrior:
    """Normal on the means, as both models have it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.precision = GAUSS.prior_sd**-2 if name == "gauss" else 1.0 / BANANA.prior_variance

    def log_density(self, z: np.ndarray) -> np.ndarray:
        return -0.5 * self.precision * np.sum(_natural(self.name, z) ** 2, axis=-1)

    def gradient(self, z: np.ndarray) -> np.ndarray:
        return _pulled(self.name, z, -self.precision * _natural(self.name, z))


class Noiseless:
    """Queries without privacy noise: ratios clipped to ``clip_norm * |z' - z|``, exact scores.

    Noise is what the experiment leaves out, so no step method makes it; the chains are those of the
    package's kernels.  Ratios are linear in a record x with known covariance.
    """

    gradient_noise_sd = 0.0

    def __init__(self, of: Problems, clip_norm: float) -> None:
        self.name, self.clip_norm = of.problem.name, clip_norm
        if self.name == "gauss":
            self.records = np.ascontiguousarray(of.data.arrays["x"].T)
            self.precision = np.linalg.inv(GAUSS.covariance)
        else:
            self.records = np.stack([of.data.arrays["x1"], of.data.arrays["x2"]])
            self.precision = np.diag(1.0 / BANANA.variances)
        self.sum = self.records.sum(axis=1)
        self.clipped: list[float] = []

    def gradient(self, z: np.ndarray) -> np.ndarray:
        score = (self.sum - self.records.shape[1] * _natural(self.name, z)) @ self.precision
        return _pulled(self.name, z, score)

    def log_ratio(self, z_from: np.ndarray, z_to: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        before, after = _natural(self.name, z_from), _natural(self.name, z_to)
        weights = (after - before) @ self.precision
        middle = np.sum(weights * (before + after), axis=-1) / 2.0
        ratios = weights @ self.records - middle[:, None]
        bound = self.clip_norm * np.linalg.norm(z_to - z_from, axis=-1)[:, None]
        clipped = np.clip(ratios, -bound, bound)
        if len(self.clipped) % 20 == 0:
            share = float(np.mean(clipped != ratios))
        else:
            share = self.clipped[-1]
        self.clipped.append(share)
        return clipped.sum(axis=1), np.zeros(len(bound))


#: Of the full run, from theirs: iterations, step, leapfrog steps (0: random walk) and clip norms.
CLIPPING: dict[str, dict[str, tuple[int, float, int, tuple[float, ...]]]] = {
    "gauss": {
        "HMC": (1000, 0.0005, 12, (0.2, 1.0, 5.0, 6.0, 10.0, 100.0)),
        "RWMH": (6000, 0.0007, 0, (1.0, 5.0, 10.0, 100.0)),
    },
    "banana": {
        "HMC": (500, 0.01, 100, (0.025, 0.05, 0.1, 0.2, 1.0)),
        "RWMH": (8000, 0.3, 0, (0.025, 0.05, 0.1, 0.15, 1.0)),
    },
}
#: Bounds of the main experiment.
BOUNDS = {("gauss", "HMC"): 6.0, ("gauss", "RWMH"): 10.0}
BOUNDS |= {("banana", "HMC"): 0.1, ("banana", "RWMH"): 0.15}


def clipped_chain(
    of: Problems, clip_norm: float, iterations: int, step_size: float, n_steps: int
) -> tuple[Sample, float]:
    """Chains without noise, and the share of the log-likelihood ratios that were clipped."""
    rng, prior = np.random.default_rng(SEED), MeanPrior(of.problem.name)
    queries = Noiseless(of, clip_norm)
    z = np.stack([np.concatenate([np.ravel(v) for v in s.values()]) for s in of.starts(SEED)])
    draws, accepted = [], []
    if n_steps:
        advance = _hamiltonian(z, queries, prior, step_size, n_steps, rng)
    else:
        advance = _random_walk(z, queries, prior, step_size, rng)
    for iteration in range(iterations):
        state, moved = advance(iteration)
        draws.append(state)
        accepted.append(moved)
    theta = np.stack(draws, axis=1)[:, iterations // 2 :]
    return Sample(theta, float(np.mean(accepted))), float(np.mean(queries.clipped))


Advance = Callable[[int], tuple[np.ndarray, np.ndarray]]


def _hamiltonian(
    z: np.ndarray,
    queries: Noiseless,
    prior: MeanPrior,
    step_size: float,
    n_steps: int,
    rng: np.random.Generator,
) -> Advance:
    state, jitter = hmc.initial_state(z, prior), HaltonJitter(0.999, rng.random())

    def advance(iteration: int) -> tuple[np.ndarray, np.ndarray]:
        nonlocal state
        eta = step_size / 2.0 * jitter(iteration)
        state, info = hmc.transition(rng, state, queries, prior, step_size=eta, n_steps=n_steps)
        return state.z, info.accepted

    return advance


def _random_walk(
    z: np.ndarray,
    queries: Noiseless,
    prior: MeanPrior,
    step_size: float,
    rng: np.random.Generator,
) -> Advance:
    state, proposal = penalty.initial_state(rng, z, prior), penalty.GaussianProposal(step_size)

    def advance(iteration: int) -> tuple[np.ndarray, np.ndarray]:
        nonlocal state
        state, info = penalty.transition(rng, state, queries, prior, proposal=proposal)
        return state.z, info.accepted

    return advance


def clip(found: Found, of: Problems, quick: bool) -> None:
    """MMD by clip bound and by the share of ratios that are clipped."""
    name = of.problem.name
    for algorithm, (iterations, step_size, n_steps, bounds) in CLIPPING[name].items():
        usual = BOUNDS[name, algorithm]
        points: dict[str, list[float]] = {key: [] for key in ("bound", "mmd", "clipped", "rhat")}
        for bound in (usual, bounds[-1]) if quick else bounds:
            length = iterations // 20 if quick else iterations
            chains, clipped = clipped_chain(of, bound, length, step_size, n_steps)
            points["bound"].append(bound)
            points["mmd"].append(dp.mmd(chains.flat, of.exact))
            points["clipped"].append(clipped)
            points["rhat"].append(split_rhat(chains.theta))
        found.series[f"figure 3, {name}, {algorithm}"] = points
        where, at = f"Figure 3, {name}", points["bound"].index(usual)
        found.rows += [
            Row(
                where,
                f"share of ratios clipped, {algorithm}, bound {usual:g}",
                0.2,
                points["clipped"][at],
                why='The paper says "less than 20 %", an upper limit.',
            ),
            Row(where, f"MMD, {algorithm}, bound {usual:g}", None, points["mmd"][at]),
            Row(where, f"MMD, {algorithm}, bound {bounds[-1]:g}", None, points["mmd"][-1]),
            Row(
                where,
                f"split R-hat, {algorithm}, bound {bounds[-1]:g}",
                1.05,
                points["rhat"][-1],
                why="An upper limit: the paper's chains were as long as it takes; ours have "
                f"{length} iterations.",
            ),
        ]
