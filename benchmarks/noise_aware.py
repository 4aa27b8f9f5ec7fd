"""Noise-aware draws against exact posteriors, for priors that are and are not normal.

No records and no chains: likelihoods are Gaussian, so that posteriors given a noisy score, and
given the law of its noise, are known exactly; raw draws are taken from the one, and what is made of
them is compared with the other::

    python -m benchmarks.noise_aware --quick
    python -m benchmarks.noise_aware --repeats 60 --json noise_aware.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pymc_dp.publication.noise_aware import Likelihood, linear_prior, noise_aware

__all__ = ["Coefficients", "Effects", "measure"]

LEVEL = 0.9
DRAWS, EXPLORED = 1000, 4000
#: Noise over information of the records, in the score; where the records tell nearly everything of
#: a few coefficients and the noise hides it, raw draws are narrow and far from where they belong.
RATIOS, LARGE = (0.01, 0.1, 1.0, 4.0), (100.0, 1000.0)


class Model(Protocol):
    """Parameters of which the first are seen by a Gaussian likelihood."""

    seen: int

    def truth(self, rng: np.random.Generator) -> np.ndarray:
        """One draw from the prior."""

    def draws(
        self, rng: np.random.Generator, at: np.ndarray, variances: np.ndarray, n: int
    ) -> np.ndarray:
        """(n, d) of the posterior, if what is seen is `at`, with errors of these variances."""

    def scores(self, theta: np.ndarray) -> np.ndarray:
        """(n, d) gradient of the log prior density."""


class Effects:
    """a_j ~ N(mu, tau), mu ~ N(0, 1), tau half-normal; the last two as mu and log tau."""

    def __init__(self, groups: int) -> None:
        self.seen = groups

    def truth(self, rng: np.random.Generator) -> np.ndarray:
        tau, mu = abs(rng.normal()), rng.normal()
        return np.array([*(mu + tau * rng.normal(size=self.seen)), mu, np.log(tau)])

    def draws(
        self, rng: np.random.Generator, at: np.ndarray, variances: np.ndarray, n: int
    ) -> np.ndarray:
        grid = np.linspace(-6.0, 2.0, 1601)
        total = variances + np.exp(2 * grid)[:, None]
        weight = (1 / total).sum(axis=1) + 1.0
        mean = (at / total).sum(axis=1) / weight
        log_mass = -0.5 * (np.log(total) + at**2 / total).sum(axis=1)
        log_mass += -0.5 * np.log(weight) + 0.5 * mean**2 * weight - np.exp(2 * grid) / 2 + grid
        mass = np.exp(log_mass - log_mass.max())
        k = rng.choice(len(grid), n, p=mass / mass.sum())
        mu = mean[k] + rng.normal(size=n) / np.sqrt(weight[k])
        inverse = np.exp(-2 * grid[k])[:, None]
        precision = 1 / variances + inverse
        centre = (at / variances + mu[:, None] * inverse) / precision
        a = centre + rng.normal(size=centre.shape) / np.sqrt(precision)
        return np.column_stack([a, mu, grid[k] + rng.uniform(-0.0025, 0.0025, n)])

    def scores(self, theta: np.ndarray) -> np.ndarray:
        a, mu, x = theta[:, :-2], theta[:, -2], theta[:, -1]
        rest, inverse = a - mu[:, None], np.exp(-2 * x)
        return np.column_stack(
            [
                -rest * inverse[:, None],
                rest.sum(axis=1) * inverse - mu,
                (rest**2).sum(axis=1) * inverse - a.shape[1] + 1 - np.exp(2 * x),
            ]
        )


@dataclass(frozen=True)
class Prior:
    """Of one coefficient: log density up to a constant, its derivative, draws."""

    log_density: Callable[[np.ndarray], np.ndarray]
    score: Callable[[np.ndarray], np.ndarray]
    sample: Callable[[np.random.Generator, int], np.ndarray]


def _student(nu: float) -> Prior:
    return Prior(
        lambda x: -(nu + 1) / 2 * np.log1p(x * x / nu),
        lambda x: -(nu + 1) * x / (nu + x * x),
        lambda rng, n: rng.standard_t(nu, n),
    )


def _spike_and_slab() -> Prior:
    sds, shares = np.array([0.3, 3.0]), np.array([0.7, 0.3])

    def parts(x: np.ndarray) -> np.ndarray:
        return np.asarray(shares / sds * np.exp(-0.5 * (x[..., None] / sds) ** 2))

    return Prior(
        lambda x: np.log(parts(x).sum(axis=-1)),
        lambda x: -(parts(x) / sds**2).sum(axis=-1) * x / parts(x).sum(axis=-1),
        lambda rng, n: rng.normal(size=n) * sds[(rng.random(n) < shares[1]).astype(int)],
    )


PRIORS = {
    "normal": Prior(lambda x: -0.5 * x * x, lambda x: -x, lambda rng, n: rng.normal(size=n)),
    "Student t, nu=3": _student(3.0),
    "Cauchy": _student(1.0),
    "Laplace": Prior(
        lambda x: -np.abs(x), lambda x: -np.sign(x), lambda rng, n: rng.laplace(size=n)
    ),
    "mixture": _spike_and_slab(),
}


class Coefficients:
    """Independent ones, all of them seen."""

    _edges = np.concatenate(
        [np.linspace(-60, -8, 1500), np.linspace(-8, 8, 8001)[1:-1], np.linspace(8, 60, 1500)]
    )

    def __init__(self, prior: str, number: int = 10) -> None:
        self.prior, self.seen = PRIORS[prior], number

    def truth(self, rng: np.random.Generator) -> np.ndarray:
        return np.clip(self.prior.sample(rng, self.seen), -50, 50)

    def draws(
        self, rng: np.random.Generator, at: np.ndarray, variances: np.ndarray, n: int
    ) -> np.ndarray:
        columns = []
        for y, variance in zip(at, variances, strict=True):
            log_mass = self.prior.log_density(self._edges) - 0.5 * (self._edges - y) ** 2 / variance
            mass = np.gradient(self._edges) * np.exp(log_mass - log_mass.max())
            columns.append(np.interp(rng.random(n), np.cumsum(mass / mass.sum()), self._edges))
        return np.column_stack(columns)

    def scores(self, theta: np.ndarray) -> np.ndarray:
        return self.prior.score(theta)


def _repeat(model: Model, information: np.ndarray, ratio: float, seed: int) -> dict[str, Any]:
    """Raw, published and exact draws of one data set."""
    rng = np.random.default_rng(seed)
    noise = ratio * np.median(information)
    truth = model.truth(rng)
    score = information * truth[: model.seen]
    score = score + np.sqrt(information + noise) * rng.normal(size=model.seen)
    at, seen = score / information, slice(0, model.seen)
    raw = model.draws(rng, at, 1 / information, DRAWS)
    exact = model.draws(rng, at, 1 / information + noise / information**2, DRAWS)
    width, centre = raw.std(axis=0), raw.mean(axis=0)

    def explore(likelihood: Likelihood) -> np.ndarray:
        curvature = np.maximum(likelihood.curvature.diagonal()[seen] / width[seen] ** 2, 1e-9)
        place = likelihood.score[seen] / width[seen] / curvature + centre[seen]
        drawn = model.draws(rng, place, 1 / curvature + noise / curvature**2, EXPLORED)
        return (drawn - centre) / width

    covariance = np.zeros((len(width), len(width)))
    covariance[seen, seen] = noise * np.diag(width[seen] ** 2)
    w = (raw - centre) / width
    found = noise_aware(
        rng,
        w[None],
        covariance,
        linear_prior(w, width * model.scores(raw)),
        ess=DRAWS,
        axes=np.diag(width),
        pairs=covariance > 0,
        explore=explore,
        scores=lambda at: width * model.scores(centre + width * at),
    )
    published = centre + width * found.draws[0]
    mean, sd = exact.mean(axis=0), exact.std(axis=0)
    result: dict[str, Any] = {"method": found.method}
    for name, draws in (("raw", raw), ("published", published), ("exact", exact)):
        low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        result[name] = {
            "covered": float(np.mean((low <= truth) & (truth <= high))),
            "error": float(np.sqrt(np.mean(((draws.mean(axis=0) - mean) / sd) ** 2))),
            "log_ratio": float(np.mean(np.log(draws.std(axis=0) / sd))),
        }
    return result


def measure(model: Model, information: np.ndarray, ratio: float, repeats: int) -> dict[str, Any]:
    """Coverage, errors of means and ratios of sds over several data sets."""
    found = [_repeat(model, information, ratio, seed) for seed in range(repeats)]
    result: dict[str, Any] = {"methods": dict(Counter(f["method"] for f in found))}
    for name in ("raw", "published", "exact"):
        covered = [f[name]["covered"] for f in found]
        result[name] = {
            "coverage": float(np.mean(covered)),
            "standard_error": float(np.std(covered) / np.sqrt(repeats)),
            "error_of_mean": float(np.sqrt(np.mean([f[name]["error"] ** 2 for f in found]))),
            "sd_ratio": float(np.exp(np.mean([f[name]["log_ratio"] for f in found]))),
        }
    return result


def _settings(quick: bool) -> dict[str, tuple[Model, np.ndarray, tuple[float, ...]]]:
    """What is measured: models, the information of the records on what they see, and noise."""
    sizes = np.random.default_rng(0).dirichlet(np.full(25, 2.0))
    settings: dict[str, tuple[Model, np.ndarray, tuple[float, ...]]] = {
        "8 effects": (Effects(8), np.full(8, 4.0), RATIOS),
        "25 effects, unequal": (Effects(25), 100 * sizes, RATIOS),
        "25 effects, well known": (Effects(25), 10_000 * sizes, RATIOS),
    }
    for prior in PRIORS:
        for error in (0.3, 1.0, 3.0):
            model = Coefficients(prior)
            settings[f"{prior}, error {error:g}"] = (model, np.full(10, error**-2), RATIOS)
        for number in (1, 5):
            model = Coefficients(prior, number)
            settings[f"{prior}, {number}, error 0.1"] = (model, np.full(number, 100.0), LARGE)
    kept = ("8 effects", "mixture, error 1", "normal, error 1", "Laplace, 1, error 0.1")
    return {name: settings[name] for name in kept} if quick else settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="four models, 10 repeats")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for name, (model, information, ratios) in _settings(args.quick).items():
        for ratio in ratios:
            found = measure(model, information, ratio, 10 if args.quick else args.repeats)
            results[f"{name}, noise {ratio:g}"] = found
            covered = ", ".join(
                f"{kind} {found[kind]['coverage']:.3f}" for kind in ("raw", "published", "exact")
            )
            of = found["published"]
            print(
                f"{name:28s} noise {ratio:<5g} coverage: {covered} +- {of['standard_error']:.3f}"
                f"   error of means {of['error_of_mean']:.2f} sds"
                f" (raw {found['raw']['error_of_mean']:.2f}), sd ratio {of['sd_ratio']:.2f}"
                f"   {found['methods']}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
