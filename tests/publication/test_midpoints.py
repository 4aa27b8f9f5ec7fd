"""The posterior mean from released scores: unbiased, better than the draws, with honest errors."""

from __future__ import annotations

import numpy as np
import pytest

import pymc_dp as dp
from pymc_dp.kernels import langevin
from pymc_dp.kernels.langevin import ConstantInterval
from pymc_dp.publication.release import _standard_error
from pymc_dp.records.extraction import extract
from tests.anchored import anchored_result, budgeted, coordinates, flat, settings_of, transformed

PRECISION = np.array([[1.5, 0.4], [0.4, 0.8]])
MEAN = np.array([0.7, -1.3])
REPEATS = 400


def newton_estimate(midpoint: np.ndarray, score: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """Mid-point + Lambda^-1 score, of means over a path: unbiased, whatever Lambda is."""
    return midpoint + np.linalg.solve(precision, score[..., None])[..., 0]


class Gaussian:
    """Queries about one Gaussian likelihood, N(MEAN, PRECISION^-1), for a batch of chains."""

    gradient_noise_sd = 2.0

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def path(self, z_start: np.ndarray) -> Gaussian:
        self.start, self.work, self.drift = z_start, 0.0, None
        return self

    def _score(self, z: np.ndarray) -> np.ndarray:
        return -(z - MEAN) @ PRECISION

    def gradient(self, z: np.ndarray, mid: np.ndarray) -> np.ndarray:
        self.arrive(z)
        self.drift = self._score(mid)
        return self.drift + self.gradient_noise_sd * self.rng.standard_normal(mid.shape)

    def arrive(self, z: np.ndarray) -> None:
        if self.drift is not None:
            self.work = self.work + (self.drift * (z - self.at)).sum(-1)
        self.at = z

    def energy_error(self, z_end, lower, upper):
        self.arrive(z_end)

        def density(z):
            return 0.5 * (self._score(z) * (z - MEAN)).sum(-1)

        return density(z_end) - density(self.start) - self.work, np.zeros(len(z_end))


class Flat:
    def log_density(self, z):
        return np.zeros(z.shape[:-1])

    def gradient(self, z):
        return np.zeros_like(z)


def chains(start: np.ndarray, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws, mid-points and scores, (repeats, n, 2) each."""
    rng = np.random.default_rng(seed)
    queries = Gaussian(rng)
    state = langevin.initial_state(rng, start, Flat())
    found = []
    for _ in range(n):
        state, info = langevin.transition(
            rng,
            state,
            queries,
            Flat(),
            step_size=0.5,
            n_steps=1,
            interval=ConstantInterval(1e9),
            persistent=False,
        )
        found.append((state.z, info.midpoint, info.gradient))
    draws, midpoints, scores = (np.stack(part, axis=1) for part in zip(*found, strict=True))
    return draws, midpoints, scores


def z_scores(estimates: np.ndarray) -> np.ndarray:
    """Of the mean of independent estimates; beyond 5 by chance in less than 1e-6 of runs."""
    return (estimates.mean(axis=0) - MEAN) / (estimates.std(axis=0) / np.sqrt(len(estimates)))


def test_better_than_the_draws():
    """In 400 stationary runs of 300 iterations; both errors are known to 4 %, the ratio is 0.4."""
    rng = np.random.default_rng(1)
    start = rng.multivariate_normal(MEAN, np.linalg.inv(PRECISION), REPEATS)
    draws, midpoints, scores = chains(start, 300)
    of_draws = draws.mean(axis=1)
    exact = newton_estimate(midpoints, scores, PRECISION).mean(axis=1)
    rough = newton_estimate(midpoints, scores, 1.5 * np.diag(np.diag(PRECISION))).mean(axis=1)
    rmse = [np.sqrt(np.square(found - MEAN).mean()) for found in (of_draws, exact, rough)]
    assert rmse[1] < 0.6 * rmse[0]
    for found in (exact, rough):  # no precision, however wrong, makes a bias
        assert np.abs(z_scores(found)).max() < 5
    wrong = newton_estimate(midpoints, -scores, PRECISION).mean(axis=1)
    assert np.sqrt(np.square(wrong - MEAN).mean()) > rmse[0]


def test_unbiased_wherever_the_path_ran():
    """With the exact precision, from far away and after three iterations."""
    draws, midpoints, scores = chains(np.full((REPEATS, 2), 20.0), 3)
    assert np.abs(z_scores(newton_estimate(midpoints, scores, PRECISION).mean(axis=1))).max() < 5
    for wrong in (draws, midpoints, newton_estimate(midpoints, -scores, PRECISION)):
        assert np.abs(wrong.mean(axis=(0, 1)) - MEAN).min() > 1


# -- of a released result -------------------------------------------------------------------------


@pytest.mark.slow
def test_variables_are_moved_to_the_estimate():
    """A log-normal: the estimate is exact up to the shape of 4,000 draws, 1 % in its mean."""
    model, budget = budgeted(transformed)
    initial = extract(model, public=budget.public, check=False).initial
    rng = np.random.default_rng(2)
    truth = initial + np.linspace(-0.2, 0.2, 5)
    white = rng.normal(size=(4, 1000, 5))
    white = (white - white.mean(axis=(0, 1))) / white.std(axis=(0, 1))
    theta = truth + 0.3 * np.array([1, -1, 1, -1, 1]) + 0.2 * white  # all draws far off
    newton = truth + 0.5 * rng.normal(size=theta.shape)
    newton += truth - newton.mean(axis=(0, 1))
    settings = settings_of(*coordinates(5), 1e-12 * np.eye(5))
    result = anchored_result(model, budget, theta, settings, newton=newton)
    for anchored in (True, False):
        if not anchored:
            del settings["anchor"]
            result = anchored_result(model, budget, theta, settings, newton=newton, plan_id=8)
        found = dp.posterior_mean(dp.release(result, model), model)
        assert list(found) == ["beta", "sigma", "lower", "middle", "spread"]
        assert found["beta"].dims == ("estimate", "effect")
        mean, error = found.sel(estimate="mean"), found.sel(estimate="standard_error")
        np.testing.assert_allclose(mean["beta"], truth[:2], atol=1e-5)
        np.testing.assert_allclose(error["beta"], 0.5 / np.sqrt(4000), rtol=0.15)
        log_normal = np.exp(truth[2] + 0.02)
        assert float(mean["sigma"]) == pytest.approx(log_normal, rel=0.01)
        assert float(error["sigma"]) == pytest.approx(log_normal * 0.5 / np.sqrt(4000), rel=0.15)


def test_standard_errors_are_honest():
    """Scaled errors of 100 chains have a spread near 1; 0.7 to 1.4 is 5 errors of it away."""
    rng = np.random.default_rng(3)
    start = rng.multivariate_normal(MEAN, np.linalg.inv(PRECISION), 100)
    draws, midpoints, scores = chains(start, 400, seed=3)
    newton = newton_estimate(midpoints, scores, np.diag(np.diag(PRECISION)))
    errors = np.array(
        [_standard_error(d[None], d[None], n[None]) for d, n in zip(draws, newton, strict=True)]
    )
    scaled = (newton.mean(axis=1) - MEAN) / errors
    assert 0.7 < scaled.std() < 1.4


def test_what_is_missing_is_named():
    model, budget = budgeted(flat)
    theta = np.random.default_rng(4).normal(size=(1, 20, 2))
    result = anchored_result(model, budget, theta, {})
    with pytest.raises(dp.UnsafeRelease, match="Release the draws first"):
        dp.posterior_mean(result, model)
    with pytest.raises(ValueError, match="no dp_newton"):
        dp.posterior_mean(dp.release(result, model), model)
    model, budget = budgeted(transformed)
    theta = np.random.default_rng(4).normal(size=(1, 20, 5))
    result = anchored_result(model, budget, theta, {}, newton=theta)
    with pytest.raises(ValueError, match="lacks lower, middle"):
        dp.posterior_mean(dp.release(result, model, var_names=["beta", "sigma"]), model)
    with pytest.raises(dp.UnsafeRelease, match="Release the draws first"):
        dp.posterior_mean({}, model)
