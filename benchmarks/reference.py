"""Reference posteriors, not private: exact draws, or Metropolis near a Laplace approximation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pymc as pm
import xarray as xr

from benchmarks.metrics import Directions, diagnostics
from benchmarks.models import BANANA, GAUSS, Data, Problem
from pymc_dp.base.matrices import Coordinates, root
from pymc_dp.publication.results import unconstrain
from pymc_dp.records.extraction import extract
from pymc_dp.records.graph import ParameterVector
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from pymc_dp.tuning.bulk import clip_scaling

__all__ = ["Reference", "bend", "reference", "unconstrained_truth"]

#: Moves of the Metropolis chain, half as many where a move takes tens of milliseconds, and how much
#: of the last state a proposal keeps, in turn: jumps where the approximation is good, short steps
#: where it is not.
MOVES, LARGE, KEPT = 3000, 3_000_000, (0.0, 0.0, 0.8)
#: Part of the scores that the limit of accuracy takes for clipped, and of the budget for an anchor.
TAIL, ANCHOR = 0.003, 0.7

_cache: dict[tuple[str, int], Reference] = {}


@dataclass(frozen=True, eq=False)
class Reference:
    """A posterior in unconstrained parameters.

    Attributes
    ----------
    draws : (k, d) ndarray
    ess : float
        Effective number of these draws.
    noise : float
        Error of the posterior mean, in posterior sds, that one score of sensitivity 2 b and noise
        multiplier 1 leaves: b is the norm that 0.3 % of the scores exceed at the mean.  A limit
        where the posterior is near normal; a curved ridge (banana) can be known better.
    """

    draws: np.ndarray
    ess: float
    noise: float

    @cached_property
    def directions(self) -> Directions:
        return Directions.of(self.draws.mean(axis=0), np.cov(self.draws, rowvar=False))

    def exact(self, k: int = 1000) -> np.ndarray:
        """(k, d) draws spread over all."""
        return self.draws[np.linspace(0, len(self.draws) - 1, k).astype(int)]

    def anchor_noise(self, mu2: float) -> float:
        """sigma0: RMSE of the mean, in sds, from the noise of an anchor with 70 % of mu^2."""
        return self.noise / np.sqrt(ANCHOR * mu2)

    def effective_draws(self, mu2: float) -> float:
        """N_eff: independent draws whose mean is as good as one release with all of mu^2."""
        return mu2 / self.noise**2


def reference(problem: Problem, data: Data, seed: int) -> Reference:
    """The posterior of `problem` for the data of a seed; kept for the next caller."""
    key = problem.name, seed
    if key not in _cache:
        target = _Target(problem, data)
        rng = np.random.default_rng(seed)
        exact = _EXACT.get(problem.name)
        if exact is not None:
            draws = exact(rng, data, 4 * MOVES)
            ess = float(len(draws))
        else:
            draws = target.metropolis(rng)
            ess = diagnostics(draws[None])[0] * len(draws) / 1000.0
        covariance = np.atleast_2d(np.cov(draws, rowvar=False))
        _cache[key] = Reference(draws, ess, target.noise(draws.mean(axis=0), covariance))
    return _cache[key]


def unconstrained_truth(model: pm.Model, parameters: ParameterVector, data: Data) -> np.ndarray:
    """(d,) the truth in unconstrained parameters; empty for real data."""
    if not data.truth:
        return np.empty(0)
    values = {
        name: (("chain", "draw", *[f"{name}{k}" for k in range(value.ndim)]), value[None, None])
        for name, value in data.truth.items()
    }
    return unconstrain(model, parameters, xr.Dataset(values))[0, 0]


class _Target:
    """Log-density and gradient of a posterior, and where it is large."""

    def __init__(self, problem: Problem, data: Data) -> None:
        model = problem.model(data)
        records = extract(model, privacy_unit=data.arrays.get("unit"), check=False)
        d = records.parameters.size
        at = Coordinates(np.zeros(d), np.eye(d))
        self.d = d
        self.engine = RowEngine.of(records, at)
        predictor, _ = recognise(self.engine)
        if predictor is not None:  # the same likelihood, clipped nowhere, in a tenth of the time
            self.engine = PredictorEngine(self.engine, predictor)
        self.terms = PublicTerms.of(records, at)
        self.n = problem.units
        self.start = records.initial
        if data.truth:
            self.start = unconstrained_truth(model, records.parameters, data)

    def log_density(self, theta: np.ndarray) -> float:
        return float(self.engine.log_likelihood(theta).sum()) + self.terms.log_density(theta)

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        total = self.terms.gradient(theta)
        for _, block in self.engine.vectors(self.engine.scores(theta)):
            total = total + block.sum(axis=1)
        return total

    def precision(self, theta: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """Minus the Hessian, by central differences; eigenvalues in absolute value."""
        rows = []
        for j in range(self.d):
            shift = np.zeros(self.d)
            shift[j] = 1e-3 * widths[j]
            difference = self.gradient(theta - shift) - self.gradient(theta + shift)
            rows.append(difference / (2.0 * shift[j]))
        matrix = np.array(rows)
        # per unit of the widths, so that scales do not matter
        matrix = widths[:, None] * (matrix + matrix.T) / 2.0 * widths
        values, vectors = np.linalg.eigh(matrix)
        values = np.maximum(np.abs(values), 1e-8 * np.abs(values).max())
        return (vectors * values) @ vectors.T / np.outer(widths, widths)

    def laplace(self) -> tuple[np.ndarray, np.ndarray]:
        """Mode and covariance, by damped Newton steps from the truth."""
        theta, value = self.start, self.log_density(self.start)
        widths = np.full(self.d, 1e-2)
        for _ in range(3):
            covariance = np.linalg.inv(self.precision(theta, widths))
            widths = np.sqrt(np.diag(covariance))
            for _ in range(10):
                gradient = self.gradient(theta)
                step = covariance @ gradient
                if gradient @ step < 1e-4:
                    break
                while self.log_density(theta + step) < value and np.any(
                    np.abs(step) > 1e-9 * widths
                ):
                    step = step / 2.0
                theta = theta + step
                value = self.log_density(theta)
        return theta, np.linalg.inv(self.precision(theta, widths))

    def metropolis(self, rng: np.random.Generator) -> np.ndarray:
        """(k, d) draws: proposals leave the Laplace approximation invariant (Neal 1998)."""
        mode, covariance = self.laplace()
        scale = root(covariance)
        w, draws = np.zeros(self.d), []
        excess = self.log_density(mode)  # of the log density over that of the approximation
        for move in range(MOVES if self.n * self.d < LARGE else MOVES // 2):
            kept = KEPT[move % len(KEPT)]
            proposal = kept * w + np.sqrt(1.0 - kept**2) * rng.standard_normal(self.d)
            found = self.log_density(mode + scale @ proposal) + 0.5 * proposal @ proposal
            if np.log(rng.random()) < found - excess:
                w, excess = proposal, found
            draws.append(mode + scale @ w)
        return np.array(draws)

    def noise(self, mean: np.ndarray, covariance: np.ndarray) -> float:
        precision = np.linalg.inv(covariance)
        scaling = clip_scaling(precision, self.engine.index_blocks(mean), self.n)
        clip = self.engine.with_coordinates(Coordinates(mean, scaling))
        blocks = clip.vectors(clip.scores(np.zeros(self.d)))
        norms = np.concatenate([np.linalg.norm(block, axis=0) for _, block in blocks])
        bound = float(np.quantile(norms, 1.0 - TAIL))
        inside = np.linalg.solve(scaling, root(covariance))
        return 2.0 * bound * float(np.linalg.norm(inside)) / np.sqrt(self.d)


def _gauss(rng: np.random.Generator, data: Data, k: int) -> np.ndarray:
    x = data.arrays["x"]
    data_precision = len(x) * np.linalg.inv(GAUSS.covariance)
    covariance = np.linalg.inv(data_precision + np.eye(GAUSS.d) / GAUSS.prior_sd**2)
    return rng.multivariate_normal(covariance @ data_precision @ x.mean(axis=0), covariance, k)


def _banana(rng: np.random.Generator, data: Data, k: int) -> np.ndarray:
    means = np.array([data.arrays["x1"].mean(), data.arrays["x2"].mean()])
    precision = BANANA.n / BANANA.variances + 1.0 / BANANA.prior_variance
    means = BANANA.n / BANANA.variances * means / precision
    return bend(means + rng.standard_normal((k, 2)) / np.sqrt(precision))


def bend(u: np.ndarray) -> np.ndarray:
    """(k, 2) draws of (theta1, theta2) from those of (theta1, theta2 + 20 theta1^2)."""
    return np.column_stack([u[:, 0], u[:, 1] - BANANA.a * u[:, 0] ** 2])


def _hierarchical_normal(rng: np.random.Generator, data: Data, k: int) -> np.ndarray:
    """Gibbs sampling of the group means, which data of this size know better than their prior."""
    y, group = data.arrays["y"], data.arrays["group"]
    counts = np.bincount(group)
    means = np.bincount(group, weights=y) / counts
    within = float(np.sum((y - means[group]) ** 2))
    groups, alpha, mu, tau, sigma = len(counts), means, means.mean(), means.std(), y.std()
    grid = np.exp(np.linspace(-3.0, 3.0, 4000))  # of tau and sigma; uniform in their logarithms

    def scale(squares: float, size: float) -> float:
        """A draw of a half-normal scale (sd 5) given a sum of squares of normals."""
        log_density = -(size - 1.0) * np.log(grid) - squares / (2.0 * grid**2) - grid**2 / 50.0
        weights = np.cumsum(np.exp(log_density - log_density.max()))
        return float(grid[np.searchsorted(weights, rng.random() * weights[-1])])

    draws = []
    for _ in range(k):
        precision = counts / sigma**2 + 1.0 / tau**2
        alpha = (counts * means / sigma**2 + mu / tau**2) / precision
        alpha = alpha + rng.standard_normal(groups) / np.sqrt(precision)
        precision_mu = groups / tau**2 + 1.0 / 100.0
        mu = alpha.sum() / tau**2 / precision_mu + rng.standard_normal() / np.sqrt(precision_mu)
        tau = scale(float(np.sum((alpha - mu) ** 2)), groups)
        sigma = scale(within + float(np.sum(counts * (means - alpha) ** 2)), len(y))
        draws.append(np.concatenate([[mu, np.log(tau)], (alpha - mu) / tau, [np.log(sigma)]]))
    return np.array(draws)


_EXACT = {"gauss": _gauss, "banana": _banana, "hierarchical_normal": _hierarchical_normal}
