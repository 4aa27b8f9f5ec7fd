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
from benchmarks.metrics import diagnostics
from benchmarks.models import Arrays, Data, Problem
from benchmarks.runs import released_by
from replications.report import Found, Row, mean_and_error

__all__ = ["run"]

DELTA = 1e-6
EXACT, ADVANCED = "Gaussian DP (exact)", "advanced composition"
#: The truth of the two models.
PROPORTION, MEAN, SD = 0.3, 1.0, 2.0
#: Prior of the normal model: sigma^2 ~ InverseGamma(2, 2), mu ~ N(0, sigma^2 / 0.01).
SHAPE, SCALE, PSEUDO_RECORDS = 2.0, 2.0, 0.01


@dataclass(frozen=True)
class Size:
    """How much of everything a run does."""

    repeats: int
    draws: int  # of each of 4 chains
    noises: tuple[float, ...]  # of a ratio, per posterior sd of the move
    steps: int  # iterations of all chains for each of them
    records: tuple[int, ...]  # of the runs of Theorem 1
    normal: int  # records; 0 leaves the normal model out
    owners: tuple[int, ...]
    timed: tuple[int, int]  # records whose iterations are timed


QUICK = Size(1, 500, (1.0,), 1_000, (10_000,), 0, (2,), (1_000, 100_000))
FULL = Size(
    repeats=6,
    draws=2_500,
    noises=(0.5, 1.0, 2.0, 4.0),
    steps=8_000,
    records=(1_000, 10_000, 100_000, 1_000_000),
    normal=100_000,
    owners=(2, 4),
    timed=(1_000, 1_000_000),
)
CHAINS, COIN = 4, 10_000
#: Draws of each chain with several owners, each of whom is asked in every iteration.
OWNER_DRAWS = 500


def run(quick: bool) -> Found:
    """All of it."""
    size, found = QUICK if quick else FULL, Found()
    composition(found)
    theorem_1(found, size)
    proposition_1(found, size)
    proposition_2(found)
    beta_bernoulli(found, size)
    if size.normal:
        normal_model(found, size)
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


def coin_posterior(data: Data) -> np.ndarray:
    """(10^5, 1) draws of logit p."""
    y, rng = data.arrays["y"], np.random.default_rng(0)
    return logit(rng.beta(1.0 + y.sum(), 1.0 + len(y) - y.sum(), (100_000, 1)))


def normal_posterior(data: Data) -> np.ndarray:
    """(10^5, 2) draws of mu and log sigma^2."""
    y, rng = data.arrays["y"], np.random.default_rng(0)
    n, mean, known = len(y), y.mean(), PSEUDO_RECORDS + len(y)
    squares = np.square(y - mean).sum() + PSEUDO_RECORDS * n / known * mean**2
    sigma2 = (SCALE + squares / 2.0) / rng.gamma(SHAPE + n / 2.0, size=100_000)
    mu = n * mean / known + np.sqrt(sigma2 / known) * rng.standard_normal(len(sigma2))
    return np.column_stack([mu, np.log(sigma2)])


#: Names of the unconstrained parameters, in the order of the exact draws: the variable, and how it
#: is transformed.
PARAMETERS: dict[str, dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]] = {
    "beta_bernoulli": {"logit p": ("p", logit)},
    "normal": {"mu": ("mu", np.asarray), "log sigma^2": ("sigma2", np.log)},
}


# -- private runs ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Chains:
    """What came out of a run.

    Attributes
    ----------
    theta : (chains, draws, d) ndarray
        Unconstrained draws.
    accepted : float
        Part of the proposals.
    seconds : float
        An iteration took.
    clip_norm : float
        Of log-likelihood ratios, per unit of distance; NaN in Algorithm 3.
    """

    theta: np.ndarray
    accepted: float
    seconds: float
    clip_norm: float

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
        released = released_by(step, seed)
        seconds = time.perf_counter() - begin
    posterior, stats = released["posterior"], released["sample_stats"]
    columns = [f(posterior[name].values) for name, f in PARAMETERS[problem.name].values()]
    accepted = float(stats["dp_accepted"].values.mean())
    clip_norms = dp.statement_facts(released)["settings"].get("clip_norm") or {}
    return Chains(
        np.stack(columns, axis=-1),
        accepted,
        seconds / (chains * draws),
        clip_norms.get("log_ratio", math.nan),
    )


def with_budget(problem: Problem, data: Data, epsilon: float, **budget: Any) -> pm.Model:
    """The model with records and a budget of its own."""
    model = problem.model(data)
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same data have a budget in every repeat
        dp.PrivacyBudget(epsilon, budget.pop("delta", problem.delta), **budget)
    return model


def spent_by(model: pm.Model) -> float:
    """Epsilon that the ledger of a model counts."""
    budget = dp.get_budget(model)
    assert budget is not None
    return float(budget.spent().epsilon)


def width(n: int) -> float:
    """Posterior sd of logit p of n records, guessed from the truth."""
    return 1.0 / math.sqrt(n * PROPORTION * (1.0 - PROPORTION))


#: How much two records can differ in the log-likelihood ratio of a move of one logit.  Algorithm 1
#: knows |ratio| <= |move| alone, so 2; in Algorithm 3 the sum of y changes by 1.
SENSITIVITY: dict[type, float] = {dp.DPPenalty: 2.0, dp.ExponentialFamilyPenalty: 1.0}
ALGORITHM: dict[type, str] = {
    dp.DPPenalty: "Algorithm 1",
    dp.ExponentialFamilyPenalty: "Algorithm 3",
}


def noise_of(sampler: type, multiplier: float, n: int) -> float:
    """Noise sd of a ratio for a move of one posterior sd."""
    return multiplier * SENSITIVITY[sampler] * width(n)


def longest_step(noise: float) -> float:
    """Proposal sd for the longest mean squared jump, in posterior sds: see `pymc_dp.DPPenalty`."""
    return 2.38 / math.hypot(1.0, noise)


def settings_of(sampler: type, n: int, step: float) -> dict[str, Any]:
    """Settings in units of the posterior sd; slopes of a record's log-likelihood are below 1."""
    clip = {"clip_norm": width(n)} if sampler is dp.DPPenalty else {}
    return {"scaling": width(n), "step_size": step, **clip}


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
            "Exact composition of Gaussian releases needs less noise than the classical Gaussian "
            "mechanism with advanced composition, even with delta divided in the best way."
        )
        what = f"noise over sensitivity, epsilon {epsilon:g}, delta 1e-6, iterations: {releases}"
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
    problem, sampler, multiplier = coin(n), dp.ExponentialFamilyPenalty, theorem.multiplier(n)
    data, k = problem.data(1), theorem.iterations(n)
    enough = 1.01 * theorem.counted(n)[EXACT]
    model = with_budget(problem, data, enough, delta=theorem.delta(n))
    noise = noise_of(sampler, multiplier, n)
    step = longest_step(noise)
    settings = settings_of(sampler, n, step)
    chains = sampled(problem, model, sampler, k, 1, 1, noise_multiplier=multiplier, **settings)
    claim = (
        "What the ledger counts is below eq. (3) for every n: exact composition makes the theorem "
        "true, with epsilon about sqrt(2 k0 beta) c / sigma."
    )
    same = "As the corollary says, it does not depend on n."
    of, expected = f"of k(n) = {k} iterations, n = {n}", expected_acceptance(data, noise, step)
    return [
        Row("Theorem 1", f"epsilon {of}", theorem.printed(), spent_by(model), None, claim),
        Row("Corollary 1", f"acceptance {of}", expected, *acceptance_of(chains), same),
        Row("Corollary 1", f"effective draws {of}", None, chains.effective),
    ]


# -- the accept test ------------------------------------------------------------------------------


def acceptance(log_ratio: np.ndarray, noise: float | np.ndarray) -> np.ndarray:
    """Expected acceptance probability (Appendix A of the paper)."""
    scaled = log_ratio / noise
    return ndtr(scaled - noise / 2.0) + np.exp(log_ratio + log_ndtr(-scaled - noise / 2.0))


def expected_acceptance(data: Data, noise: float, step: float) -> float:
    """Average of `acceptance` over the exact posterior of logit p and its moves."""
    y, eta = data.arrays["y"], coin_posterior(data)[:, 0]
    move = width(len(y)) * step * np.random.default_rng(1).standard_normal(len(eta))
    ones, total = 1.0 + y.sum(), 2.0 + len(y)
    log_ratio = ones * move - total * (np.logaddexp(0.0, eta + move) - np.logaddexp(0.0, eta))
    return float(acceptance(log_ratio, noise * np.abs(move) / width(len(y))).mean())


def acceptance_of(chains: Chains) -> tuple[float, float]:
    """Part of proposals accepted, and its standard error as if they were independent."""
    rate = chains.accepted
    return rate, math.sqrt(rate * (1.0 - rate) / chains.theta[..., 0].size)


def proposition_1(found: Found, size: Size) -> None:
    """Acceptance falls with the noise; so do the effective draws."""
    problem = coin(COIN)
    data = problem.data(1)
    series: dict[str, Any] = {"noise measured": list(size.noises)}
    for sampler, of in ALGORITHM.items():
        runs = [_noisy_walk(problem, data, sampler, noise, size.steps) for noise in size.noises]
        for noise, chains in zip(size.noises, runs, strict=True):
            what = f"acceptance of {of}, noise of a ratio {noise:g} per posterior sd"
            expected = expected_acceptance(data, noise, 1.0)
            found.rows.append(Row("Proposition 1", what, expected, *acceptance_of(chains)))
        series[of] = [chains.accepted for chains in runs]
        series[f"{of}, effective"] = [1000.0 * c.effective / size.steps for c in runs]
    noises = np.geomspace(0.2, 8.0, 40)
    series["noise"] = noises.tolist()
    series["expected"] = [expected_acceptance(data, float(noise), 1.0) for noise in noises]
    found.series["acceptance"] = series


def _noisy_walk(problem: Problem, data: Data, sampler: type, noise: float, steps: int) -> Chains:
    """Chains with proposals of one posterior sd and this noise, from a budget that is no limit."""
    model = with_budget(problem, data, 1e3)
    return sampled(
        problem,
        model,
        sampler,
        steps // CHAINS,
        CHAINS,
        1,
        noise_multiplier=noise / noise_of(sampler, 1.0, COIN),
        **settings_of(sampler, COIN, 1.0),
    )


def proposition_2(found: Found) -> None:
    """The part kappa of its acceptance without noise that a chain keeps at least."""
    ratios = np.linspace(-20.0, 20.0, 4001)
    why = (
        "Printed is 1 - Phi(B/2) with B = sup sigma^2; the proof needs B = sup sigma, and drops "
        "the moves that are accepted although the noise lowers their ratio. The least part is "
        "2 Phi(-sigma/2), at lambda = 0."
    )
    for noise in (1.0, 2.0):
        least = float(np.min(acceptance(ratios, noise) / np.minimum(1.0, np.exp(ratios))))
        what = f"kappa, sigma {noise:g}"
        printed = float(ndtr(-(noise**2) / 2.0))
        found.rows.append(Row("Proposition 2", what, printed, least, None, why))


# -- Algorithms 1, 2 and 3 ------------------------------------------------------------------------


def rows_of(
    where: str,
    who: str,
    problem: Problem,
    runs: Sequence[Chains],
    exact: np.ndarray,
    *,
    expected: float | None = None,
) -> list[Row]:
    """Draws beside the exact posterior, acceptance beside what is expected, effective draws."""
    draws = [chains.theta.reshape(-1, exact.shape[1]) for chains in runs]
    # of a mean: by the effective draws, since few repeats would give a poor estimate
    monte_carlo = 1.0 / math.sqrt(sum(chains.effective for chains in runs))
    rows: list[Row] = []
    values: dict[str, tuple[float | None, list[float]]] = {}
    for k, name in enumerate(PARAMETERS[problem.name]):
        mean, sd = exact[:, k].mean(), exact[:, k].std()
        errors = [float((one[:, k].mean() - mean) / sd) for one in draws]
        widths = [float(one[:, k].std() / sd) for one in draws]
        what = f"error of the posterior mean of {name}, in posterior sds, {who}"
        rows.append(Row(where, what, 0.0, float(np.mean(errors)), monte_carlo))
        values[f"posterior sd of {name} over the exact one"] = 1.0, widths
    values["acceptance"] = expected, [chains.accepted for chains in runs]
    values["effective draws"] = None, [chains.effective for chains in runs]
    values["microseconds an iteration"] = None, [1e6 * chains.seconds for chains in runs]
    rows += [
        Row(where, f"{what}, {who}", paper, *mean_and_error(ours))
        for what, (paper, ours) in values.items()
    ]
    return rows


def repeated(
    problem: Problem, data: Data, sampler: type, size: Size, **settings: Any
) -> list[Chains]:
    """Runs with the same records, each with a budget of its own."""
    return [
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


def ratio_of_effective(
    ours: Sequence[Chains], others: Sequence[Chains]
) -> tuple[float, float | None]:
    """Effective draws of some runs over those of others, and the standard error over repeats."""
    (a, a_error), (b, b_error) = (
        mean_and_error([chains.effective for chains in runs]) for runs in (ours, others)
    )
    if a_error is None or b_error is None:
        return a / b, None
    return a / b, a / b * math.hypot(a_error / a, b_error / b)


def beta_bernoulli(found: Found, size: Size) -> None:
    """Algorithm 3 beside Algorithm 1, with the same budget."""
    where, problem, k = "Beta-Bernoulli", coin(COIN), CHAINS * size.draws
    data = problem.data(1)
    exact, epsilon = coin_posterior(data), problem.epsilon
    multiplier = smallest_multiplier(EXACT, epsilon, k, DELTA)
    runs, density = {}, {}
    for sampler, of in ALGORITHM.items():
        noise = noise_of(sampler, multiplier, COIN)
        step = longest_step(noise)
        settings = settings_of(sampler, COIN, step)
        runs[sampler] = repeated(problem, data, sampler, size, **settings)
        density[of] = _density(runs[sampler], exact)
        expected = expected_acceptance(data, noise, step)
        who = f"{of}, n = {COIN}, epsilon {epsilon:g}, {k} iterations"
        found.rows += rows_of(where, who, problem, runs[sampler], exact, expected=expected)
    found.series[where] = density
    why = (
        "The paper's sensitivity is |logit p' - logit p| in both. DPPenalty clips a record's "
        "ratio to an interval about 0 and counts its whole length, twice that, so its noise is "
        "twice as large."
    )
    what = "effective draws of Algorithm 3 over those of Algorithm 1"
    ratio, error = ratio_of_effective(runs[dp.ExponentialFamilyPenalty], runs[dp.DPPenalty])
    found.rows.append(Row(where, what, 1.0, ratio, error, why))
    noisy = _by_advanced_composition(problem, data, size)
    theirs, _ = mean_and_error([chains.effective for chains in noisy])
    ours, error = mean_and_error([chains.effective for chains in runs[dp.ExponentialFamilyPenalty]])
    what = "effective draws of Algorithm 3, noise by advanced composition (paper) or exact (ours)"
    why = (
        "Both measured. Effective draws go with 1 / noise^2; fewer than about 10 from 4 chains "
        "mean that these have not mixed."
    )
    found.rows.append(Row(where, what, theirs, ours, error, why))


def _by_advanced_composition(problem: Problem, data: Data, size: Size) -> list[Chains]:
    """Algorithm 3 with the noise that Theorems 2 and 3 ask for."""
    sampler = dp.ExponentialFamilyPenalty
    multiplier = smallest_multiplier(ADVANCED, problem.epsilon, CHAINS * size.draws, DELTA)
    step = longest_step(noise_of(sampler, multiplier, COIN))
    settings = settings_of(sampler, COIN, step)
    return repeated(problem, data, sampler, size, noise_multiplier=multiplier, **settings)


def _density(runs: Sequence[Chains], exact: np.ndarray) -> list[float]:
    """Density of the draws of all repeats in 24 bins from -4 to 4 exact posterior sds."""
    draws = np.concatenate([chains.theta[..., 0].ravel() for chains in runs])
    z = (draws - exact.mean()) / exact.std()
    return np.histogram(z, bins=np.linspace(-4.0, 4.0, 25), density=True)[0].tolist()


def normal_model(found: Found, size: Size) -> None:
    """Both with default settings: coordinates, clip norm and step are learned privately."""
    problem = normal(size.normal)
    data = problem.data(1)
    exact = normal_posterior(data)
    for sampler, of in ALGORITHM.items():
        runs = repeated(problem, data, sampler, size)
        who = f"{of}, n = {size.normal}, epsilon {problem.epsilon:g}, defaults"
        found.rows += rows_of("Normal", who, problem, runs, exact)
        if sampler is not dp.DPPenalty:
            continue
        biases = [bias_of_clipping(data, exact, chains.clip_norm) for chains in runs]
        for name, bias in zip(PARAMETERS[problem.name], np.transpose(biases), strict=True):
            what = f"error of the posterior mean of {name} that clipping explains, {of}"
            why = (
                "The paper's likelihood ratios are bounded; a normal record's are not, and "
                "DPPenalty clips the longest ones, at a bound learned privately."
            )
            found.rows.append(Row("Normal", what, 0.0, *mean_and_error(bias.tolist()), why))


def bias_of_clipping(data: Data, exact: np.ndarray, clip_norm: float) -> np.ndarray:
    """(2,) shift of the posterior mean, in posterior sds, where short moves are clipped so.

    Scores s are taken in posterior sds at the exact mean, where the log posterior is -|z|^2 / 2.
    Averaged over directions u, chains come to rest where E[u (u . z)] = z / 2 is the drift that
    clipping adds, -E[u sum(u . s - clip(u . s))].
    """
    mu, log_variance = exact.mean(axis=0)
    z = (data.arrays["y"] - mu) / math.exp(log_variance / 2.0)
    scores = np.stack([z / math.exp(log_variance / 2.0), (z**2 - 1.0) / 2.0])
    scores *= exact.std(axis=0)[:, None]
    drift = np.zeros(2)
    angles = np.linspace(0.0, 2.0 * math.pi, 64, endpoint=False)
    for u in np.column_stack([np.cos(angles), np.sin(angles)]):
        along = u @ scores
        drift -= u * (along - np.clip(along, -clip_norm, clip_norm)).sum() / len(angles)
    return 2.0 * drift


def cost_of_an_iteration(found: Found, size: Size) -> None:
    """Section 3.3: the computation of Algorithm 3 does not grow with n."""
    few, many = (measure(n, 1000)["iteration_us"] for n in size.timed)
    what = f"time of an iteration with {size.timed[1]} records over that with {size.timed[0]}"
    found.rows.append(Row("Algorithm 3", what, 1.0, many / few))


def several_owners(found: Found, size: Size) -> None:
    """Algorithm 2: each owner has the budget that a pool of all records would have."""
    where, problem, sampler = "Algorithm 2", coin(COIN), dp.DPPenalty
    data = problem.data(1)
    exact, epsilon = coin_posterior(data), problem.epsilon
    k, draws = CHAINS * OWNER_DRAWS, OWNER_DRAWS
    alone = noise_of(sampler, smallest_multiplier(EXACT, epsilon, k, DELTA), COIN)
    pooled: list[Chains] = []
    for owners in (1, *size.owners):
        noise = math.sqrt(owners) * alone
        step = longest_step(noise)
        runs, spent = [], []
        for seed in range(size.repeats):
            model, parts = _study(problem, data, owners)
            settings = settings_of(sampler, COIN, step)
            runs.append(sampled(problem, model, sampler, draws, CHAINS, seed, **settings))
            spent += [spent_by(part) for part in parts]
        who = f"{owners} owners" if owners > 1 else "pooled"
        expected = expected_acceptance(data, noise, step)
        found.rows += rows_of(where, who, problem, runs, exact, expected=expected)
        found.rows.append(Row(where, f"epsilon spent by an owner, {who}", epsilon, max(spent)))
        if owners == 1:
            pooled = runs
            continue
        theory = (1.0 + alone**2) / (1.0 + noise**2)
        found.rows.append(
            Row(
                where,
                f"effective draws with {owners} owners over those of the pooled run",
                None,
                *ratio_of_effective(runs, pooled),
                f"The variance of the noise is {owners} times as large (section 3.2.2). With steps "
                f"as long as it allows, {theory:.2f} is expected; so few effective draws are "
                "estimated badly, and rather too high.",
            )
        )


def _study(problem: Problem, data: Data, owners: int) -> tuple[pm.Model, list[pm.Model]]:
    """A model to sample, and the models that have records and budgets."""
    if owners == 1:
        model = with_budget(problem, data, problem.epsilon)
        return model, [model]
    y = data.arrays["y"]
    parts = [
        with_budget(
            problem, Data({}, {"y": y[k::owners]}), problem.epsilon, dataset=f"owner {k + 1}"
        )
        for k in range(owners)
    ]
    with problem.model(Data({}, {"y": np.zeros(40, dtype=y.dtype)})):  # made-up records
        return dp.Owners(parts).model, parts
