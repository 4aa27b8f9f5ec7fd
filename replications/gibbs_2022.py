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
from benchmarks.gibbs import BETA, SENSITIVITY, Chain, log_linear, publish, with_noise
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


@dataclass(frozen=True, eq=False)
class Experiment:
    """A model of the paper, what it publishes, and where the paper reports on it.

    Attributes
    ----------
    chain : callable
        noncentered -> Chain.
    new, again : callable
        (rng, epsilon) -> what is published about new records, and about the confidential data.
    truth, prior, confidential : (d,) ndarray
        Parameters; their prior means; their posterior means given the confidential data.
    noncentered : False or "auto"
        Whether the coverage is that of chains with non-centred moves.
    reasons : dict
        (epsilon, k) -> why the coverage of parameter k is not the paper's.
    """

    name: str
    symbol: str
    first: int
    chain: Callable[[Any], Chain]
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
    bound: str
    reasons: dict[tuple[float, int], str]

    def parameter(self, k: int) -> str:
        """Name and true value of a parameter, counted as in the paper."""
        return f"{self.symbol}{k + self.first} = {self.truth[k]:.3g}"


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


def _log_linear_chain(noncentered: Any) -> Chain:
    model, records = log_linear(N)
    with model:
        step = dp.PrivacyAwareGibbs(records, noncentered=noncentered)
    return Chain(model, step, Dirichlets(), _class_probabilities)


def _noisy_counts(rng: np.random.Generator, counts: np.ndarray, epsilon: float) -> np.ndarray:
    return with_noise(rng, counts.ravel(), 2.0 * len(counts) / epsilon)


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
    first=1,
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
    bound="Attained: a record can move between cells that all raise the distance to what was "
    "published.",
    reasons={},
)
_NOT_MIXED = (
    "The paper's chains have not mixed: its algorithm, run here as well (last rows), covers even "
    "less often."
)
_NOT_EXPLAINED = (
    "Not explained: the paper's algorithm, run here as well (last rows), agrees with ours, though "
    "its chains hold few effective draws."
)
REGRESSION = Experiment(
    name="regression",
    symbol="β",
    first=0,
    chain=Chain.of_regression,
    new=lambda rng, epsilon: publish(rng, N, epsilon),
    again=lambda rng, epsilon: with_noise(rng, SUMS, SENSITIVITY / epsilon),
    truth=BETA,
    prior=np.zeros(3),
    confidential=COEFFICIENT_MEANS,
    noncentered="auto",
    coverage=TABLE_S1,
    table="Supplement, Table 1",
    means="Figure 2",
    acceptance="Figure S1",
    bound="Higher than the bound: the sensitivity of 13 is valid but not the smallest, 9.375, and "
    "no record drawn from the model uses it up.",
    reasons={(0.1, 1): _NOT_MIXED, (0.3, 1): _NOT_MIXED, (1.0, 2): _NOT_EXPLAINED},
)

# -- the mechanisms of Proposition 3.1 ------------------------------------------------------------

_CANDIDATES = np.arange(11) / 10
_CHOSEN = 0.4  # a candidate; 0.3 is expected
_COUNT = 45


def _objective(x: Any, epsilon: float) -> None:
    """A logistic regression of the intercept alone."""
    curvature = np.full((N, 1, 1), _CHOSEN * (1.0 - _CHOSEN))
    dp.ObjectivePerturbationRelease(
        "s",
        (_CHOSEN - x)[:, None],
        curvature,
        observed=np.array([math.log(_CHOSEN / (1.0 - _CHOSEN))]),
        scale=1.0 / epsilon,
    )


#: How something about N yes-or-no answers x is published with epsilon.  The last two satisfy
#: zero-concentrated privacy, with the rho = epsilon^2 / 2 that follows from epsilon.
MECHANISMS: dict[str, Callable[[Any, float], Any]] = {
    "Laplace": lambda x, epsilon: dp.LaplaceRelease(
        "s", x, sensitivity=1, epsilon=epsilon, observed=_COUNT
    ),
    "geometric": lambda x, epsilon: dp.GeometricRelease(
        "s", x, sensitivity=1, epsilon=epsilon, observed=_COUNT
    ),
    "randomized response": lambda x, epsilon: dp.RandomizedResponse(
        "s", x, epsilon=epsilon, observed=(np.arange(N) < _COUNT).astype(int)
    ),
    "exponential": lambda x, epsilon: dp.ExponentialMechanismRelease(
        "s", -abs(x[:, None] - _CANDIDATES), sensitivity=1, epsilon=epsilon, observed=4
    ),
    "K-norm gradient": lambda x, epsilon: dp.KNormGradientRelease(
        "s",
        x[:, None, None] - _CANDIDATES[:, None],
        sensitivity=1,
        epsilon=epsilon,
        observed=4,
    ),
    "objective perturbation": _objective,
    "Gaussian": lambda x, epsilon: dp.GaussianRelease(
        "s", x, sensitivity=1, rho=epsilon**2 / 2, observed=_COUNT
    ),
    "discrete Gaussian": lambda x, epsilon: dp.DiscreteGaussianRelease(
        "s", x, sensitivity=1, rho=epsilon**2 / 2, observed=_COUNT
    ),
}


_UNBOUNDED = (
    "Zero-concentrated privacy of rho = ε²/2 has no such bound, as section 6 says; the lowest "
    "probability is that of the start, far from what was published."
)
_CHOICE = (
    "The bound allows for the largest change of the chosen candidate and of the normalising "
    "constant at once; here they are smaller."
)
#: Why a lowest acceptance probability is not the bound.
REASONS = {
    "Gaussian": _UNBOUNDED,
    "discrete Gaussian": _UNBOUNDED,
    "exponential": _CHOICE,
    "K-norm gradient": _CHOICE,
}


def lowest_acceptance(mechanism: str, epsilon: float, sweeps: int = 500) -> float:
    """Smallest acceptance probability of the records."""
    with pm.Model() as model:
        x = pm.Bernoulli("x", 0.3, shape=N)
        MECHANISMS[mechanism](x, epsilon)
        step = dp.PrivacyAwareGibbs([x], noncentered=False)
    step.set_rng(np.random.default_rng(7))
    point, lowest = model.initial_point(), math.inf
    for _ in range(sweeps):
        point, [told] = step.step(point)
        lowest = min(lowest, told["dp_min_log_alpha"])
    return math.exp(lowest)


# -- chains ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Repeats:
    """Chains over several releases.

    Attributes
    ----------
    means, low, high : (repeats, d) ndarray
        Posterior means and ends of 90 % intervals.
    rates : (repeats, iterations) ndarray
        Part of the records that moved in a sweep.
    lowest : float
        Smallest acceptance probability of a record.
    """

    means: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rates: np.ndarray
    lowest: float

    @classmethod
    def of(cls, chain: Chain, releases: Iterable[np.ndarray], tune: int, draws: int) -> Repeats:
        kept, told = [], []
        for seed, published in enumerate(releases):
            theta, stats, _ = chain.run(published, seed, tune, draws)
            kept.append(theta)
            told.append(stats)
        theta = np.array(kept)
        low, high = np.quantile(theta, [0.05, 0.95], axis=1)
        rates = np.array([[stat["dp_acceptance"] for stat in stats] for stats in told])
        lowest = min(stat["dp_min_log_alpha"] for stats in told for stat in stats)
        return cls(theta.mean(axis=1), low, high, rates, math.exp(lowest))

    def inside(self, truth: np.ndarray) -> np.ndarray:
        """(repeats, d) whether intervals hold the truth."""
        return (self.low <= truth) & (truth <= self.high)


@dataclass(frozen=True)
class Effort:
    """How many data sets, queries of the confidential data, and iterations."""

    data_sets: int
    queries: int
    tune: int
    draws: int
    epsilons: tuple[float, ...] = EPSILONS

    def repeats(
        self,
        chain: Chain,
        publish: Callable[[np.random.Generator, float], np.ndarray],
        epsilon: float,
        number: int,
    ) -> Repeats:
        releases = (publish(np.random.default_rng(1000 + r), epsilon) for r in range(number))
        return Repeats.of(chain, releases, self.tune, self.draws)


# -- tables and figures ---------------------------------------------------------------------------


def coverage(found: Found, experiment: Experiment, chain: Chain, effort: Effort) -> None:
    """Coverage at fixed parameters, over new records and releases."""
    curves = found.series.setdefault(experiment.table, {"epsilon": list(effort.epsilons)})
    for epsilon in effort.epsilons:
        repeats = effort.repeats(chain, experiment.new, epsilon, effort.data_sets)
        inside = repeats.inside(experiment.truth).mean(axis=0)
        curves.setdefault("ours", []).append(inside.tolist())
        curves.setdefault("paper", []).append(experiment.coverage[epsilon])
        for k, (ours, theirs) in enumerate(zip(inside, experiment.coverage[epsilon], strict=True)):
            found.rows.append(
                Row(
                    experiment.table,
                    f"coverage, ε = {epsilon:g}, {experiment.parameter(k)}",
                    theirs,
                    float(ours),
                    _error(ours, effort.data_sets),
                    experiment.reasons.get((epsilon, k), ""),
                )
            )


def _error(part: float, number: int) -> float:
    """Standard error of a coverage; of .5 successes less where all succeed."""
    part = (part * number + 0.5) / (number + 1.0)
    return math.sqrt(part * (1.0 - part) / number)


def posterior_means(found: Found, experiment: Experiment, chain: Chain, effort: Effort) -> None:
    """Posterior means and acceptance rates over queries of the same confidential data."""
    means = found.series.setdefault(
        experiment.means,
        {
            "epsilon": list(effort.epsilons),
            "prior": experiment.prior.tolist(),
            "confidential": experiment.confidential.tolist(),
        },
    )
    rates = found.series.setdefault(experiment.acceptance, {"epsilon": list(effort.epsilons)})
    for epsilon in effort.epsilons:
        repeats = effort.repeats(chain, experiment.again, epsilon, effort.queries)
        means.setdefault("means", []).append(repeats.means.tolist())
        average, least = repeats.rates.mean(axis=1), repeats.rates.min(axis=1)
        rates.setdefault("average", []).append(average.tolist())
        rates.setdefault("least", []).append(least.tolist())
        found.rows += [
            _learned(experiment, epsilon, repeats.means),
            *_rates(experiment, epsilon, average, least, repeats.lowest),
        ]


def _learned(experiment: Experiment, epsilon: float, means: np.ndarray) -> Row:
    """How far the posterior means went from the prior's to those given the confidential data."""
    way = experiment.confidential - experiment.prior
    parts = (means - experiment.prior) @ way / (way @ way)
    return Row(
        experiment.means,
        f"way from prior to confidential posterior mean, ε = {epsilon:g}",
        None,
        float(parts.mean()),
        float(parts.std(ddof=1) / math.sqrt(len(parts))),
        "The paper draws points and states no number; 0 at its dashed lines, 1 at its solid ones.",
    )


def _rates(
    experiment: Experiment, epsilon: float, average: np.ndarray, least: np.ndarray, lowest: float
) -> Iterator[Row]:
    where, bound = experiment.acceptance, math.exp(-epsilon)
    error = float(average.std(ddof=1) / math.sqrt(len(average)))
    yield Row(
        where,
        f"average acceptance rate, ε = {epsilon:g}",
        None,
        float(average.mean()),
        error,
        "The paper draws points and states no number.",
    )
    yield Row(
        where,
        f"least rate of a sweep, ε = {epsilon:g}",
        None,
        float(least.min()),
        None,
        "Of 100 records, so it may fall below the bound by chance.",
    )
    yield Row(
        where,
        f"lowest acceptance probability (paper: its bound), ε = {epsilon:g}",
        bound,
        lowest,
        None,
        experiment.bound,
    )


def unmixed(found: Found, chain: Chain, epsilon: float, data_sets: int) -> None:
    """The regression as in the paper: moves of single records alone, 10,000 iterations."""
    effort = Effort(data_sets, 0, 5000, 5000)
    inside = effort.repeats(chain, REGRESSION.new, epsilon, data_sets).inside(BETA).mean(axis=0)
    for k, ours in enumerate(inside):
        found.rows.append(
            Row(
                REGRESSION.table,
                f"coverage, ε = {epsilon:g}, {REGRESSION.parameter(k)}, the paper's algorithm",
                TABLE_S1[epsilon][k],
                float(ours),
                _error(ours, data_sets),
                "No non-centred moves; 10,000 iterations, half of them dropped; chains start at 0, "
                "the paper's at draws from the prior.",
            )
        )


def mixing(
    found: Found, experiment: Experiment, chain: Chain, epsilons: Iterable[float], draws: int
) -> None:
    """Effective draws of the slowest parameter, and seconds for the paper's chain."""
    moves = "records only" if chain.records.noncentred is None else "non-centred moves"
    seconds = []
    for epsilon in epsilons:
        published = experiment.again(np.random.default_rng(5), epsilon)
        kept, _, used = chain.run(published, 5, draws // 4, draws)
        least = min(float(az.ess(column[None])) for column in kept.T)
        seconds.append(used / draws)
        for what, ours in (("1000 iterations", 1000 * least / draws), ("second", least / used)):
            found.rows.append(
                Row(
                    "Section 6",
                    f"effective draws per {what}, {experiment.name}, ε = {epsilon:g}, {moves}",
                    None,
                    ours,
                    None,
                    "The paper states that correlation may cause poor mixing, without a number.",
                )
            )
    found.rows.append(
        Row(
            "S-6",
            f"seconds for 10,000 iterations, {experiment.name}, {moves}",
            SECONDS[experiment.name],
            10_000 * float(np.mean(seconds)),
            None,
            "Theirs is R code; ours is compiled." + EXTRA[moves],
        )
    )


#: What a sweep has that the paper's has not.
EXTRA = {"records only": "", "non-centred moves": " The paper has no such moves."}


def mechanisms(found: Found, names: Iterable[str], epsilons: Iterable[float]) -> None:
    """Lowest acceptance probability beside exp(-epsilon), for all ways of publishing."""
    for name in names:
        for epsilon in epsilons:
            found.rows.append(
                Row(
                    "Proposition 3.1",
                    f"lowest acceptance probability (paper: its bound), {name}, ε = {epsilon:g}",
                    math.exp(-epsilon),
                    lowest_acceptance(name, epsilon),
                    None,
                    REASONS.get(name, ""),
                )
            )


def run(quick: bool) -> Found:
    """All tables and figures."""
    found = Found()
    if quick:
        efforts = {LOG_LINEAR: Effort(4, 2, 200, 500), REGRESSION: Effort(4, 2, 150, 250)}
    else:
        efforts = {LOG_LINEAR: Effort(50, 12, 500, 2500), REGRESSION: Effort(50, 12, 300, 600)}
    for experiment, effort in efforts.items():
        chain = experiment.chain(experiment.noncentered)
        coverage(found, experiment, chain, effort)
        posterior_means(found, experiment, chain, effort)
        mixing(found, experiment, chain, (0.1, 1.0, 10.0), 800 if quick else 3000)
    if quick:  # compiling the other models takes longer than all of these chains
        return found
    mixing(found, LOG_LINEAR, LOG_LINEAR.chain("auto"), (0.1, 1.0, 10.0), 2000)
    paper = REGRESSION.chain(False)
    mixing(found, REGRESSION, paper, (0.1, 1.0, 10.0), 3000)
    for epsilon in (0.1, 0.3, 1.0):
        unmixed(found, paper, epsilon, 16)
    mechanisms(found, MECHANISMS, (0.1, 1.0, 10.0))
    return found
