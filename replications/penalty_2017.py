"""Yıldırım (2016), On the Use of Penalty MCMC for Differential Privacy: its theorems, as runs.

::

    python -m replications penalty_2017 --quick
    python -m replications penalty_2017 --json replications/results/penalty_2017.json

The paper has no experiments: no table, no figure, no data set.  `Row.paper` is therefore the value
of one of its formulas, or of a claim (a chain is exact: no bias), for the models and settings that
we chose: a proportion (Beta-Bernoulli) and a normal distribution with unknown mean and variance,
both with conjugate priors, so that posteriors are known exactly.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
from scipy.optimize import brentq
from scipy.special import log_ndtr, logit, ndtr

import pymc_dp as dp
from benchmarks.exponential import measure
from benchmarks.metrics import Directions, diagnostics
from benchmarks.models import Arrays, Data, Problem
from replications.report import Found, Row

__all__ = ["run"]

DELTA = 1e-6
EXACT, ADVANCED = "Gaussian DP (exact)", "advanced composition"
#: What a record can change, in the same order of size as in the data.
PROPORTION, MEAN, SD = 0.3, 1.0, 2.0
#: Prior of the normal model: sigma^2 ~ InverseGamma(2, 2), mu ~ N(0, sigma^2 / 0.01).
SHAPE, SCALE, PSEUDO_RECORDS = 2.0, 2.0, 0.01


@dataclass(frozen=True)
class Size:
    """How much of everything a run does."""

    repeats: int
    coin: int  # records
    draws: int  # of each of 4 chains
    noises: tuple[float, ...]  # of a ratio per posterior sd
    steps: int  # iterations for each of them
    records: tuple[int, ...]  # of the runs of Theorem 1
    normal: int
    owners: tuple[int, ...]
    owner_draws: int
    owner_repeats: int
    timed: tuple[int, int]


QUICK = Size(1, 10_000, 500, (1.0,), 1000, (10_000,), 0, (2,), 200, 1, (1_000, 100_000))
FULL = Size(
    8,
    10_000,
    2500,
    (0.5, 1.0, 2.0, 4.0),
    8000,
    (1_000, 10_000, 100_000, 1_000_000),
    100_000,
    (2, 4),
    1000,
    4,
    (1_000, 1_000_000),
)
CHAINS = 4


def run(quick: bool) -> Found:
    """All of it."""
    size, found = QUICK if quick else FULL, Found()
    composition(found)
    theorem_1(found, size)
    propositions(found, size)
    algorithms_on_a_proportion(found, size)
    if size.normal:
        algorithms_on_a_normal(found, size)
    cost_of_an_iteration(found, size)
    several_owners(found, size)
    return found


# -- models with known posteriors -----------------------------------------------------------------


def coin(n: int) -> Problem:
    """A proportion with a uniform prior; chains start at the truth, at most some sds away."""

    def generate(rng: np.random.Generator) -> Data:
        return Data({"p": np.array(PROPORTION)}, {"y": rng.binomial(1, PROPORTION, n)})

    def declare(a: Arrays) -> None:
        p = pm.Beta("p", 1.0, 1.0, initval=PROPORTION)
        pm.Bernoulli("y", p=p, observed=a["y"])

    return Problem("beta_bernoulli", generate, declare, n, 4.0, fixed_delta=DELTA)


def normal(n: int) -> Problem:
    """A normal distribution; bounds of the data five standard deviations from its mean."""

    def generate(rng: np.random.Generator) -> Data:
        truth = {"mu": np.array(MEAN), "sigma2": np.array(SD**2)}
        return Data(truth, {"y": rng.normal(MEAN, SD, n)})

    def declare(a: Arrays) -> None:
        sigma2 = pm.InverseGamma("sigma2", SHAPE, SCALE)
        mu = pm.Normal("mu", 0.0, pm.math.sqrt(sigma2 / PSEUDO_RECORDS))
        pm.Normal("y", mu, pm.math.sqrt(sigma2), observed=a["y"])
        dp.bounds(y=(MEAN - 5.0 * SD, MEAN + 5.0 * SD))

    return Problem("normal", generate, declare, n, 10.0, fixed_delta=DELTA)


def coin_posterior(data: Data, k: int) -> np.ndarray:
    """(k, 1) draws of logit p."""
    y = data.arrays["y"]
    rng = np.random.default_rng(0)
    return logit(rng.beta(1.0 + y.sum(), 1.0 + len(y) - y.sum(), (k, 1)))


def normal_posterior(data: Data, k: int) -> np.ndarray:
    """(k, 2) draws of mu and log sigma^2."""
    y = data.arrays["y"]
    n, mean, rng = len(y), y.mean(), np.random.default_rng(0)
    known = PSEUDO_RECORDS + n
    squares = np.square(y - mean).sum() + PSEUDO_RECORDS * n / known * mean**2
    sigma2 = (SCALE + squares / 2.0) / rng.gamma(SHAPE + n / 2.0, size=k)
    mu = n * mean / known + np.sqrt(sigma2 / known) * rng.standard_normal(k)
    return np.column_stack([mu, np.log(sigma2)])


#: Unconstrained parameters, in the order of the exact draws.
UNCONSTRAINED: dict[str, dict[str, Callable[[np.ndarray], np.ndarray]]] = {
    "beta_bernoulli": {"p": logit},
    "normal": {"mu": np.asarray, "sigma2": np.log},
}


# -- private runs ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Chains:
    """Unconstrained draws (chains, draws, d), part of proposals accepted, seconds an iteration."""

    theta: np.ndarray
    accepted: float
    seconds: float

    @property
    def effective(self) -> float:
        """Least number of effective draws of a parameter."""
        return diagnostics(self.theta)[0] * self.theta.shape[0] * self.theta.shape[1] / 1000.0


def sampled(
    problem: Problem,
    model: pm.Model,
    sampler: type,
    draws: int,
    chains: int,
    seed: int,
    **settings: Any,
) -> Chains:
    """Build the step and sample a model that has a budget."""
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = sampler(draws=draws, chains=chains, progressbar=False, **settings)
        begin = time.perf_counter()
        released = dp.sample(
            draws,
            chains=chains,
            step=step,
            cores=1,
            random_seed=seed,
            progressbar=False,
            compute_convergence_checks=False,
        )
        seconds = time.perf_counter() - begin
    posterior, stats = released["posterior"], released["sample_stats"]
    columns = [f(posterior[name].values) for name, f in UNCONSTRAINED[problem.name].items()]
    accepted = float(stats["dp_accepted"].values.mean())
    return Chains(np.stack(columns, axis=-1), accepted, seconds / (chains * draws))


def with_budget(problem: Problem, data: Data, epsilon: float, **budget: Any) -> pm.Model:
    """The model with records and a budget of its own."""
    model = problem.model(data)
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same data have a budget in every repeat
        dp.PrivacyBudget(epsilon, budget.pop("delta", problem.delta), **budget)
    return model


def walk(noise: float) -> float:
    """Longest mean squared jump on N(0, 1): proposal sd, see `pymc_dp.DPPenalty`."""
    return 2.38 / math.hypot(1.0, noise)


def penalty_settings(sd: float, noise: float, sampler: type) -> dict[str, Any]:
    """Settings in z = logit p / sd, where a record's log-likelihood has slopes below `sd`."""
    clip = {"clip_norm": sd} if sampler is dp.DPPenalty else {}
    return {"scaling": sd, "step_size": walk(noise), **clip}


#: Sensitivity of a released ratio for a move of one logit.  Algorithm 1 bounds |ratio| by the
#: move, so that two records differ by twice of it; the sum of y changes by 1.
SENSITIVITY = {dp.DPPenalty: 2.0, dp.ExponentialFamilyPenalty: 1.0}
ALGORITHM = {dp.DPPenalty: "Algorithm 1", dp.ExponentialFamilyPenalty: "Algorithm 3"}


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean over repeats and its standard error."""
    mean = float(np.mean(values))
    return mean, float(np.std(values, ddof=1) / math.sqrt(len(values))) if values[1:] else None


# -- accounting -----------------------------------------------------------------------------------


def smallest_multiplier(accountant: str, epsilon: float, releases: int, delta: float) -> float:
    """Noise over sensitivity with which an accountant allows so many releases."""

    def excess(log_multiplier: float) -> float:
        table = dp.compare_accountants(math.exp(log_multiplier), releases, delta)
        found = float(table.epsilon[accountant])
        return 1e3 if math.isnan(found) else found - epsilon  # NaN: too little noise for a theorem

    middle = 0.5 * math.log(releases) - math.log(epsilon)
    return math.exp(brentq(excess, middle - 2.0, middle + 6.0, xtol=1e-9))


def composition(found: Found) -> None:
    """Noise multipliers by Theorems 2 and 3, and by exact Gaussian composition."""
    for epsilon, releases in [(0.5, 1), *((e, k) for e in (0.5, 1.0, 4.0) for k in (100, 10_000))]:
        advanced, exact = (
            smallest_multiplier(name, epsilon, releases, DELTA) for name in (ADVANCED, EXACT)
        )
        why = (
            f"Exact composition of Gaussian releases needs {advanced / exact:.1f} times less noise "
            "than the classical Gaussian mechanism with advanced composition, even with delta "
            "divided in the best way."
        )
        what = f"noise over sensitivity, {releases} iterations, epsilon {epsilon:g}, delta 1e-6"
        found.rows.append(Row("Theorems 2 and 3", what, advanced, exact, None, why))
    counts = [10**k for k in range(6)]
    found.series["noise multiplier, epsilon 1"] = {
        "iterations": counts,
        **{
            name: [smallest_multiplier(name, 1.0, k, DELTA) for k in counts]
            for name in (ADVANCED, EXACT)
        },
    }


@dataclass(frozen=True)
class Theorem:
    """Theorem 1: what k(n) iterations cost, with noise that does not depend on n."""

    alpha: float = 0.5
    beta: float = 1.5
    k0: float = 1.0
    c: float = 4.0  # longest move, times n^alpha
    sigma: float = 4.0  # noise of a ratio of that length

    @property
    def order(self) -> float:
        """2 alpha + beta, of the delta of one release."""
        return 2.0 * self.alpha + self.beta

    def iterations(self, n: int) -> int:
        return math.floor(self.k0 * n ** (2.0 * self.alpha) / math.log(n))

    def multiplier(self, n: int) -> float:
        """Noise over sensitivity of one iteration."""
        return self.sigma / self.c * n**self.alpha

    def delta(self, n: int) -> float:
        """Eq. (4)."""
        return (1.25 * self.k0 / math.log(n) + 1.0) * n**-self.beta

    def printed(self) -> float:
        """Eq. (3), the same for all n."""
        noise = self.c / self.sigma
        first = 2.0 * math.sqrt(self.k0 * self.order * self.beta) * noise
        return first + 4.0 * self.k0 * self.order * noise**2

    def proved(self, n: int) -> float:
        """Last line of the proof, with k = k(n) put into it without the slip."""
        noise = self.c / self.sigma
        first = 2.0 * math.sqrt(self.k0 * self.order * self.beta * math.log(n)) * noise
        return first + 4.0 * self.k0 * self.order * noise**2

    def counted(self, n: int) -> dict[str, float]:
        """Epsilon of the same releases by accountant."""
        table = dp.compare_accountants(self.multiplier(n), self.iterations(n), self.delta(n))
        return {name: float(table.epsilon[name]) for name in (ADVANCED, EXACT)}


def theorem_1(found: Found, size: Size) -> None:
    """Epsilon of k(n) iterations, and what the chains are worth."""
    theorem = Theorem()
    where, setting = "Theorem 1", "alpha 0.5, beta 1.5, k0 1, c 4, sigma 4"
    for n in (10_000, 1_000_000):
        why = (
            "Eq. (3) lacks a factor sqrt(log n) in its first term: k(n) = k0 n^(2 alpha) / log n "
            "in the last line of the proof leaves log(1/delta') = beta log n uncancelled."
        )
        what = f"epsilon that the proof gives, n = {n}, {setting}"
        found.rows.append(Row(where, what, theorem.printed(), theorem.proved(n), None, why))
    for n in size.records:
        found.rows += _run_of_theorem_1(theorem, n)
    sizes = [10**k for k in range(3, 10)]
    found.series["Theorem 1"] = {
        "n": sizes,
        "as printed": [theorem.printed()] * len(sizes),
        "as proved": [theorem.proved(n) for n in sizes],
        **{name: [theorem.counted(n)[name] for n in sizes] for name in (ADVANCED, EXACT)},
    }


def _run_of_theorem_1(theorem: Theorem, n: int) -> list[Row]:
    """k(n) iterations of Algorithm 3, whose cost does not grow with n."""
    problem, sampler = coin(n), dp.ExponentialFamilyPenalty
    data, k = problem.data(1), theorem.iterations(n)
    epsilon = 1.01 * theorem.counted(n)[EXACT]
    model = with_budget(problem, data, epsilon, delta=theorem.delta(n))
    sd = float(coin_posterior(data, 10_000).std())
    noise = theorem.multiplier(n) * sd * SENSITIVITY[sampler]
    settings = penalty_settings(sd, noise, sampler)
    chains = sampled(
        problem, model, sampler, k, 1, 1, noise_multiplier=theorem.multiplier(n), **settings
    )
    spent = dp.get_budget(model).spent().epsilon
    why = (
        "The theorem is true with exact composition: epsilon tends to sqrt(2 k0 beta) c / sigma, "
        "although the proof by advanced composition does not give it."
    )
    where, of = "Theorem 1", f"of k(n) = {k} iterations, n = {n}"
    expected = expected_acceptance(data, noise)
    return [
        Row(where, f"epsilon {of}", theorem.printed(), spent, None, why),
        Row(
            "Corollary 1",
            f"acceptance {of}",
            expected,
            chains.accepted,
            _binomial_error(chains),
            "The same for all n, as the corollary says: the noise of a ratio does not grow.",
        ),
        Row("Corollary 1", f"effective draws {of}", None, chains.effective),
    ]


# -- the accept test ------------------------------------------------------------------------------


def acceptance(log_ratio: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Expected acceptance probability (Appendix A of the paper)."""
    scaled = log_ratio / noise
    return ndtr(scaled - noise / 2.0) + np.exp(log_ratio + log_ndtr(-scaled - noise / 2.0))


def expected_acceptance(data: Data, noise: float, step: float | None = None) -> float:
    """Of the proportion's chain, its noise per posterior sd given; an average over 10^5 moves."""
    eta = coin_posterior(data, 100_000)[:, 0]
    sd, rng = eta.std(), np.random.default_rng(1)
    move = sd * (walk(noise) if step is None else step) * rng.standard_normal(len(eta))
    y = data.arrays["y"]
    ones, total = 1.0 + y.sum(), 2.0 + len(y)
    log_normalizers = np.logaddexp(0.0, eta + move) - np.logaddexp(0.0, eta)
    log_ratio = ones * move - total * log_normalizers
    return float(acceptance(log_ratio, noise * np.abs(move) / sd).mean())


def _binomial_error(chains: Chains) -> float:
    """Standard error of an acceptance rate, as if moves were independent."""
    return math.sqrt(chains.accepted * (1.0 - chains.accepted) / chains.theta[..., 0].size)


def propositions(found: Found, size: Size) -> None:
    """Acceptance falls with the noise (Proposition 1), but keeps a part of it."""
    for sd in (1.0, 2.0):
        ratios = np.linspace(-20.0, 20.0, 4001)
        least = float(np.min(acceptance(ratios, sd) / np.minimum(1.0, np.exp(ratios))))
        why = (
            "1 - Phi(B/2) with B = sup sigma^2 is printed where the proof needs sup sigma, and "
            "the proof halves the bound. The least ratio is 2 Phi(-sigma/2), at lambda = 0."
        )
        what = f"kappa, least acceptance over that without noise, sigma {sd:g}"
        found.rows.append(Row("Proposition 2", what, float(ndtr(-(sd**2) / 2.0)), least, None, why))
    problem = coin(size.coin)
    data = problem.data(1)
    sd = float(coin_posterior(data, 10_000).std())
    measured: dict[str, list[float]] = {}
    for sampler, of in ALGORITHM.items():
        measured[of], measured[f"{of}, effective"] = [], []
        for noise in size.noises:
            chains = _noisy_walk(problem, data, sampler, sd, noise, size.steps)
            expected = expected_acceptance(data, noise, 1.0)
            measured[of].append(chains.accepted)
            measured[f"{of}, effective"].append(chains.effective / size.steps)
            what = f"acceptance of {of}, noise of a ratio {noise:g} per posterior sd"
            error = _binomial_error(chains)
            found.rows.append(Row("Proposition 1", what, expected, chains.accepted, error))
    noises = np.geomspace(0.1, 10.0, 50)
    found.series["acceptance"] = {
        "noise": noises.tolist(),
        "expected": [expected_acceptance(data, float(noise), 1.0) for noise in noises],
        "noise measured": list(size.noises),
        **measured,
    }


def _noisy_walk(
    problem: Problem, data: Data, sampler: type, sd: float, noise: float, steps: int
) -> Chains:
    """A chain whose proposals are one posterior sd long, with this noise per posterior sd."""
    multiplier = noise / (sd * SENSITIVITY[sampler])
    model = with_budget(problem, data, 1e3)  # not about privacy: the noise is given
    settings = {**penalty_settings(sd, noise, sampler), "step_size": 1.0}
    return sampled(
        problem, model, sampler, steps // CHAINS, CHAINS, 1, noise_multiplier=multiplier, **settings
    )


# -- Algorithms 1, 2 and 3 ------------------------------------------------------------------------


def noise_of(problem: Problem, epsilon: float, iterations: int, sd: float, sampler: type) -> float:
    """Noise of a ratio per posterior sd if so many iterations share a budget."""
    multiplier = smallest_multiplier(EXACT, epsilon, iterations, problem.delta)
    return multiplier * sd * SENSITIVITY[sampler]


def rows_of(where: str, who: str, runs: Sequence[Chains], exact: np.ndarray, why: str) -> list[Row]:
    """Bias and width beside the exact posterior, and what the chains are worth."""
    directions = Directions.of(exact.mean(axis=0), np.atleast_2d(np.cov(exact, rowvar=False)))
    draws = [chains.theta.reshape(-1, exact.shape[1]) for chains in runs]
    errors = [directions.whitened(one.mean(axis=0)) for one in draws]
    rms = [float(np.sqrt(np.mean(np.square(error)))) for error in errors]
    widths = [float(np.mean(directions.sd_ratios(one))) for one in draws]
    values = {
        "error of the posterior mean, in posterior sds": (0.0, [float(e.mean()) for e in errors]),
        "absolute error of the posterior mean, in posterior sds": (None, rms),
        "posterior sd over the exact one": (1.0, widths),
        "effective draws": (None, [chains.effective for chains in runs]),
        "acceptance": (None, [chains.accepted for chains in runs]),
        "microseconds an iteration": (None, [1e6 * chains.seconds for chains in runs]),
    }
    return [
        Row(where, f"{what}, {who}", paper, *mean_and_error(found), why)
        for what, (paper, found) in values.items()
    ]


def algorithms_on_a_proportion(found: Found, size: Size) -> None:
    """Algorithm 3 beside Algorithm 1: the same moves in logit p, start and budget."""
    problem = coin(size.coin)
    data = problem.data(1)
    exact = coin_posterior(data, 100_000)
    sd, worth = float(exact.std()), {}
    for sampler, of in ALGORITHM.items():
        noise = noise_of(problem, problem.epsilon, CHAINS * size.draws, sd, sampler)
        settings = penalty_settings(sd, noise, sampler)
        runs = [
            sampled(
                problem,
                with_budget(problem, data, problem.epsilon),
                sampler,
                size.draws,
                CHAINS,
                seed,
                **settings,
            )
            for seed in range(size.repeats)
        ]
        worth[of] = [chains.effective for chains in runs]
        who = f"{of}, n = {size.coin}, epsilon {problem.epsilon:g}"
        found.rows += rows_of("Beta-Bernoulli", who, runs, exact, "")
        found.series.setdefault("Beta-Bernoulli", {})[of] = _histogram(runs, exact)
    ratio = np.mean(worth["Algorithm 3"]) / np.mean(worth["Algorithm 1"])
    why = (
        "The paper's sensitivity of a ratio is |logit p' - logit p| in both. DPPenalty clips a "
        "record's ratio to an interval about 0 and counts its whole length, twice that: the "
        "noise is twice as large."
    )
    what = "effective draws of Algorithm 3 over those of Algorithm 1"
    found.rows.append(Row("Beta-Bernoulli", what, 1.0, float(ratio), None, why))


def _histogram(runs: Sequence[Chains], exact: np.ndarray) -> list[float]:
    """Density of draws of all repeats, in exact posterior sds, in 24 bins from -4 to 4."""
    draws = np.concatenate([chains.theta[..., 0].ravel() for chains in runs])
    z = (draws - exact.mean()) / exact.std()
    return np.histogram(z, bins=np.linspace(-4.0, 4.0, 25), density=True)[0].tolist()


def algorithms_on_a_normal(found: Found, size: Size) -> None:
    """Both with default settings: coordinates, clip norm and step are learned privately."""
    problem = normal(size.normal)
    data = problem.data(1)
    exact = normal_posterior(data, 100_000)
    whys = {
        dp.DPPenalty: "Clip norm learned privately: a normal record has no bound of its own.",
        dp.ExponentialFamilyPenalty: "",
    }
    for sampler, of in ALGORITHM.items():
        runs = [
            sampled(
                problem,
                with_budget(problem, data, problem.epsilon),
                sampler,
                size.draws,
                CHAINS,
                seed,
            )
            for seed in range(size.repeats)
        ]
        who = f"{of}, n = {size.normal}, epsilon {problem.epsilon:g}, defaults"
        found.rows += rows_of("Normal", who, runs, exact, whys[sampler])


def cost_of_an_iteration(found: Found, size: Size) -> None:
    """Section 3.3: the computation does not grow with n."""
    few, many = (measure(n, 1000)["iteration_us"] for n in size.timed)
    what = f"time of an iteration with {size.timed[1]} records over that with {size.timed[0]}"
    found.rows.append(Row("Algorithm 3", what, 1.0, many / few))


def several_owners(found: Found, size: Size) -> None:
    """Algorithm 2: each owner has the budget that a pool of all records would have."""
    problem, sampler = coin(size.coin), dp.DPPenalty
    data = problem.data(1)
    exact = coin_posterior(data, 100_000)
    sd = float(exact.std())
    alone = noise_of(problem, problem.epsilon, CHAINS * size.owner_draws, sd, sampler)
    worth: dict[int, list[float]] = {}
    for owners in (1, *size.owners):
        noise = math.sqrt(owners) * alone
        settings = penalty_settings(sd, noise, sampler)
        runs = [
            sampled(
                problem,
                _study(problem, data, owners),
                sampler,
                size.owner_draws,
                CHAINS,
                seed,
                **settings,
            )
            for seed in range(size.owner_repeats)
        ]
        worth[owners] = [chains.effective for chains in runs]
        who = f"{owners} owners" if owners > 1 else "pooled"
        found.rows += rows_of("Algorithm 2", who, runs, exact, "")
        mean, error = mean_and_error([chains.accepted for chains in runs])
        what = f"acceptance with the noise of {owners} owners"
        found.rows.append(Row("Algorithm 2", what, expected_acceptance(data, noise), mean, error))
        if owners > 1:
            ratio = float(np.mean(worth[owners]) / np.mean(worth[1]))
            what = f"effective draws with {owners} owners over those of the pooled run"
            found.rows.append(Row("Algorithm 2", what, None, ratio))


def _study(problem: Problem, data: Data, owners: int) -> pm.Model:
    """The model of the pooled records, or that of an analyst who asks several owners."""
    if owners == 1:
        return with_budget(problem, data, problem.epsilon)
    y = data.arrays["y"]
    parts = [
        with_budget(
            problem,
            Data({}, {"y": y[k::owners]}),
            problem.epsilon,
            dataset=f"owner {k + 1}",
        )
        for k in range(owners)
    ]
    made_up = problem.model(Data({}, {"y": np.zeros(40, dtype=np.int64)}))
    with made_up:
        return dp.Owners(parts).model
