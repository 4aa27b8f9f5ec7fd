"""Räisä (2021), Differentially Private Markov Chain Monte Carlo: clipping, variants, accountants.

Run with::

    python -m replications thesis_2021 --quick
    python -m replications thesis_2021 --json replications/results/thesis_2021.json

The text has the settings of Figure 7.1 but no number of either figure, and no settings of Figure
7.2.  Its theorems have numbers: what they give is set beside what the package counts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
from scipy.optimize import brentq
from scipy.special import binom, erfc, logsumexp

import pymc_dp as dp
from benchmarks.models import BANANA
from benchmarks.reference import bend
from benchmarks.runs import released_by
from pymc_dp.privacy.accounting import (
    FixedBatchGaussianEvent,
    SubsampledGaussianEvent,
    mu_from_budget,
)
from pymc_dp.privacy.subsampled import epsilon_of
from replications.report import Found, Row, mean_and_error

#: Of the thesis (section 7.2), and what it needs but does not print: delta, n0 of tempering.
N, DELTA, N_TEMPERED = 100_000, 1e-6, 1000
#: So large a budget that its noise cannot be seen: Figure 7.1 was made without privacy.
NO_PRIVACY = 1e6
NAMES = ("theta1", "theta2", "rest")


@dataclass(frozen=True)
class Settings:
    """What a quick run and a full run differ in.

    Attributes
    ----------
    records : int
        Of Figure 7.1.  Variances are scaled by records / 100,000, so that the posterior is that of
        the thesis, and so is the part of the ratios that is clipped.
    bounds : tuple of float
        Clip bounds of Figure 7.1, in units of 1 / sqrt(records) per posterior sd of distance: in
        standard deviations of a ratio.
    chains : int
        Of each bound.
    epsilons : tuple of float
        Of Figure 7.2.
    powers, tempered : tuple
        Beside the T of Figure 7.2, at epsilon 4, in the dimensions of `tempered`.
    repeats : int
        Private runs of each setting, of one chain, with a budget each.
    draws : int
        Of each, fewer for trajectories.
    samplers : tuple of (int, tuple of str)
        Dimensions of Figure 7.2, and the samplers in each.
    """

    records: int
    bounds: tuple[float, ...]
    chains: int
    epsilons: tuple[float, ...]
    powers: tuple[float, ...]
    tempered: tuple[int, ...]
    repeats: int
    draws: int
    samplers: tuple[tuple[int, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Banana:
    """The model of Theorem 5: a = 20, b = m = 0, sigma_0^2 = 1000, true mean (0, 3, 0, ...).

    The likelihood to the power T is that of variances divided by T, up to a constant: so methods
    without `likelihood_power` are tempered by `power`.
    """

    d: int
    n: int = N
    power: float = 1.0

    @property
    def variances(self) -> np.ndarray:
        """(d,) of a record; the posterior is the same for every n."""
        return np.array([20.0, 2.5, *[1.0] * (self.d - 2)]) * (self.n / N)

    @property
    def data(self) -> np.ndarray:
        """(n, d) records."""
        noise = np.random.default_rng([2021, self.d]).normal(size=(self.n, self.d))
        return np.eye(1, self.d, 1) * 3.0 + noise * np.sqrt(self.variances)

    @property
    def scales(self) -> np.ndarray:
        """(d,) posterior sds before bending, without the prior: public."""
        return np.sqrt(self.variances / self.n / self.power)

    def model(self, epsilon: float, away: float = 0.0) -> pm.Model:
        """The model and its budget; chains begin `away` standard deviations from the truth."""
        x, sds = self.data, np.sqrt(self.variances / self.power)
        prior_sd = math.sqrt(BANANA.prior_variance)
        start = bend(away * self.scales[None, :2] + [0.0, 3.0])[0]
        with pm.Model() as model:
            theta1 = pm.Normal("theta1", 0.0, prior_sd, initval=start[0])
            theta2 = pm.Normal("theta2", -BANANA.a * theta1**2, prior_sd, initval=start[1])
            pm.Normal("x1", theta1, sds[0], observed=x[:, 0])
            pm.Normal("x2", theta2 + BANANA.a * theta1**2, sds[1], observed=x[:, 1])
            if self.d > 2:
                others = away * self.scales[2:]
                rest = pm.Normal("rest", 0.0, prior_sd, shape=self.d - 2, initval=others)
                pm.Normal("x", rest, sds[2:], observed=x[:, 2:])
            dp.PrivacyBudget(epsilon, DELTA, ledger=dp.Ledger.temporary())
        return model

    def exact(self, k: int, seed: int, power: float | None = None) -> np.ndarray:
        """(k, d) draws of the posterior, to the power T of the likelihood (Theorem 5)."""
        weight = self.n / self.variances * (self.power if power is None else power)
        precision = weight + 1.0 / BANANA.prior_variance
        noise = np.random.default_rng(seed).normal(size=(k, self.d))
        u = weight * self.data.mean(axis=0) / precision + noise / np.sqrt(precision)
        return np.hstack([bend(u), u[:, 2:]])

    def clipped(self, theta: np.ndarray, bound: float, moves: int = 50) -> float | None:
        """Part of the log-likelihood ratios above `bound` times the distance, in accepted moves."""
        moved = np.flatnonzero(np.any(np.diff(theta, axis=0), axis=1))
        if not len(moved):
            return None
        x, shares = self.data, []
        for t in moved[np.linspace(0, len(moved) - 1, moves).astype(int)]:
            old, new = theta[t], theta[t + 1]
            ratio = self._log_likelihoods(x, new) - self._log_likelihoods(x, old)
            limit = bound * np.linalg.norm((new - old) / self.scales)
            shares.append(np.mean(np.abs(ratio) > limit))
        return float(np.mean(shares))

    def _log_likelihoods(self, x: np.ndarray, theta: np.ndarray) -> np.ndarray:
        mean = theta + np.eye(1, self.d, 1)[0] * BANANA.a * theta[0] ** 2
        return -0.5 * self.power * ((x - mean) ** 2 / self.variances).sum(axis=1)


@dataclass(frozen=True, eq=False)
class Chains:
    """(chains, draws, d) draws and the part of proposals accepted."""

    theta: np.ndarray
    accepted: float
    step: Any


def sample(
    banana: Banana,
    epsilon: float,
    step: type,
    draws: int,
    *,
    chains: int = 1,
    away: float = 0.0,
    seed: int,
    **settings: Any,
) -> Chains:
    """One private run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small and repeated budgets are intended here
        with banana.model(epsilon, away):
            planned = step(draws=draws, chains=chains, progressbar=False, **settings)
            released = released_by(planned, seed)
    posterior, stats = released["posterior"], released["sample_stats"]
    columns = [np.asarray(posterior[name]) for name in NAMES if name in posterior]
    theta = np.concatenate([x.reshape(*x.shape[:2], -1) for x in columns], axis=2)
    return Chains(theta, float(stats["dp_accepted"].mean()), planned)


# -- Figure 7.1: clipping without privacy ---------------------------------------------------------

#: As many samples as in the thesis; steps in posterior standard deviations.
WALK, HMC = (dp.DPPenalty, 3000), (dp.DPHMC, 500)


def _by_hand(sampler: str, banana: Banana, bound: float) -> tuple[type, int, dict[str, Any]]:
    scaling, width = banana.scales, 1.0 / math.sqrt(banana.n)
    if sampler == "RWMH":
        step = 2.38 / math.sqrt(banana.d)
        return *WALK, {"step_size": step, "scaling": scaling, "clip_norm": bound * width}
    wide = 20.0 * math.sqrt(banana.d) * width  # of scores, which the thesis does not clip here
    clip = {"gradient": wide, "log_ratio": bound * width}
    return *HMC, {"step_size": 0.3, "n_steps": 5, "scaling": scaling, "clip_norm": clip}


def clipping(found: Found, given: Settings) -> None:
    """MMD against the clip bound and the fraction clipped."""
    for d in (2, 10):
        banana = Banana(d, given.records)
        reference = banana.exact(2000, seed=1)
        exact = [dp.mmd(banana.exact(2000, seed=2 + k), reference) for k in range(10)]
        found.series[f"7.1 d={d} exact"] = {"mmd": exact}
        found.rows.append(
            Row(f"Figure 7.1, d={d}", "MMD of exact samples", None, *mean_and_error(exact))
        )
        for sampler in ("HMC", "RWMH"):
            curve: dict[str, list[Any]] = {"bound": [], "clipped": [], "mmd": []}
            for bound in given.bounds:
                clipped, values = _clipped_run(sampler, banana, bound, given.chains, reference)
                curve["bound"].append(bound)
                curve["clipped"].append(clipped)
                curve["mmd"].append(values)
                found.rows.append(_clipping_row(sampler, d, bound, clipped, values))
            found.series[f"7.1 d={d} {sampler}"] = curve
    if len(given.bounds) > 2:  # fewer say nothing about where the bias begins
        found.rows.append(_harmless(found))


def _clipped_run(
    sampler: str, banana: Banana, bound: float, chains: int, reference: np.ndarray
) -> tuple[float | None, list[float]]:
    """Fraction clipped, and the MMD of the second half of every chain."""
    step, draws, settings = _by_hand(sampler, banana, bound)
    made = sample(banana, NO_PRIVACY, step, draws, chains=chains, away=5.0, seed=1, **settings)
    kept = made.theta[:, draws // 2 :]
    width = 1.0 / math.sqrt(banana.n)
    shares = [banana.clipped(chain, bound * width) for chain in kept]
    seen = [share for share in shares if share is not None]
    return float(np.mean(seen)) if seen else None, [dp.mmd(chain, reference) for chain in kept]


def _clipping_row(
    sampler: str, d: int, bound: float, clipped: float | None, values: list[float]
) -> Row:
    share, why = "", ""
    if clipped is None:
        why = (
            "No move was accepted from 5 standard deviations away: ratios are clipped while the "
            "kinetic energy is not. The thesis, too, saw chains fail with most bounds."
        )
    else:
        share = f", {100 * clipped:.2g} % of ratios clipped"
    if sampler == "RWMH" and d == 10:
        why = (
            "The thesis: no convergence in reasonable time. Proposals here have the posterior's "
            "scales, and chains begin 5 standard deviations from the truth in each coordinate."
        )
    what = f"MMD, {sampler}, bound {bound:g} sd of a ratio{share}"
    return Row(f"Figure 7.1, d={d}", what, None, *mean_and_error(values), why)


def _harmless(found: Found) -> Row:
    """Largest fraction clipped, over all four curves, below which no chain is off."""
    harmless = 1.0  # chains that never moved clipped nothing
    for name, curve in found.series.items():
        if not name.startswith("7.1") or name.endswith("exact"):
            continue
        limit = 2.0 * np.mean(curve["mmd"][-1])  # the largest bound clips next to nothing
        off = [
            share
            for share, values in zip(curve["clipped"], curve["mmd"], strict=True)
            if share is not None and np.mean(values) > limit
        ]
        harmless = min([harmless, *off])
    return Row(
        "Section 7.2",
        "fraction clipped at which the MMD is seen to double",
        0.1,
        harmless,
        None,
        "The thesis: below 10 % clipping is likely undetectable. Ours is the smallest fraction "
        "of the sweep at which a curve's mean MMD is twice that of its largest bound, which is "
        "several times that of exact draws: short chains hide small biases. Chains that never "
        "moved have no fraction and are left out.",
    )


# -- Figure 7.2: samplers against epsilon ---------------------------------------------------------

TEMPER = N_TEMPERED / N
BATCH = 1000  # of 100,000; the thesis does not print its own
#: Step, part of the draws, settings.  DPHMC and DPLangevin get the tempered variances.
SAMPLERS: dict[str, tuple[type, float, dict[str, Any]]] = {
    "penalty": (dp.DPPenalty, 1.0, {}),
    "penalty, one component": (dp.DPPenalty, 1.0, {"proposal": "one_component"}),
    "penalty, guided": (dp.DPPenalty, 1.0, {"proposal": "guided"}),
    "penalty, batches": (dp.DPPenalty, 1.0, {"batch_size": BATCH}),
    "Barker, batches": (dp.DPBarker, 1.0, {"batch_size": BATCH}),
    "Barker, all records": (dp.DPBarker, 1.0, {}),
    "HMC": (dp.DPHMC, 0.2, {}),
}


FULL = Settings(
    records=10_000,
    bounds=(0.1, 0.5, 1.0, 2.0, 4.0),
    chains=2,
    epsilons=(1.0, 4.0, 15.0),
    powers=(1.0, 0.1),
    tempered=(2, 10),
    repeats=2,
    draws=1000,
    samplers=((2, tuple(SAMPLERS)), (10, tuple(SAMPLERS))),
)
QUICK = Settings(
    records=2_000,
    bounds=(0.1, 4.0),
    chains=2,
    epsilons=(4.0,),
    powers=(1.0,),
    tempered=(2,),
    repeats=1,
    draws=200,
    samplers=(
        (2, ("penalty", "penalty, guided", "HMC", "penalty, batches", "Barker, all records")),
        (10, ("penalty",)),
    ),
)


@dataclass(frozen=True, eq=False)
class Runs:
    """Repeats of one setting: MMD, that of the coordinates without bend, part accepted."""

    mmd: list[float]
    normal: list[float]
    accepted: float


def private_runs(name: str, d: int, power: float, epsilon: float, given: Settings) -> Runs:
    """One chain for each repeat, with a budget of its own."""
    step, part, settings = SAMPLERS[name]
    if issubclass(step, dp.DPPenalty):
        banana, settings = Banana(d), {**settings, "likelihood_power": power}
    else:
        banana = Banana(d, power=power)
    reference = banana.exact(2000, seed=1, power=power)
    mmd, normal, accepted = [], [], []
    for seed in range(given.repeats):
        made = sample(banana, epsilon, step, int(part * given.draws), seed=seed, **settings)
        mmd.append(dp.mmd(made.theta[0], reference))
        if d > 2:
            normal.append(dp.mmd(made.theta[0, :, 2:], reference[:, 2:]))
        accepted.append(made.accepted)
    return Runs(mmd, normal, float(np.mean(accepted)))


def _private_rows(name: str, d: int, power: float, epsilon: float, runs: Runs) -> Iterator[Row]:
    what = f"{name}, epsilon {epsilon:g}, T = {power:g}"
    bend_sds = BANANA.a * Banana(2, power=power).scales[0] ** 2 / Banana(2, power=power).scales[1]
    why = f"{100 * runs.accepted:.0f} % accepted; bend of {bend_sds:.1f} sds."
    yield Row(f"Figure 7.2, d={d}", f"MMD, {what}", None, *mean_and_error(runs.mmd), why)
    if runs.normal and name in ("penalty", "HMC"):
        what = f"MMD without the two bent coordinates, {what}"
        yield Row(f"Figure 7.2, d={d}", what, None, *mean_and_error(runs.normal))


def samplers(found: Found, given: Settings) -> None:
    """MMD against epsilon, tempered, in 2 and 10 dimensions."""
    for d, names in given.samplers:
        for name in names:
            # each plan on batches takes 15 s to calibrate
            epsilons = (4.0,) if "batch_size" in SAMPLERS[name][2] else given.epsilons
            curve: dict[str, list[Any]] = {"epsilon": [], "mmd": [], "accepted": []}
            for epsilon in epsilons:
                runs = private_runs(name, d, TEMPER, epsilon, given)
                curve["epsilon"].append(epsilon)
                curve["mmd"].append(runs.mmd)
                curve["accepted"].append(runs.accepted)
                found.rows += _private_rows(name, d, TEMPER, epsilon, runs)
            found.series[f"7.2 d={d} {name}"] = curve


def tempering(found: Found, given: Settings) -> None:
    """The penalty algorithm and DP-HMC with less tempering, and with none."""
    for d in given.tempered:
        for name in ("penalty", "HMC"):
            for power in given.powers:
                runs = private_runs(name, d, power, 4.0, given)
                found.series[f"T={power:g} d={d} {name}"] = {"mmd": runs.mmd}
                found.rows += _private_rows(name, d, power, 4.0, runs)


# -- DP-HMC with its last gradient used again -----------------------------------------------------


def reuse(found: Found, given: Settings) -> None:
    """Algorithm 3: k L + 1 gradients in k iterations."""
    draws, n_steps, d = given.draws // 5, 5, 10
    banana = Banana(d, power=TEMPER)
    reference = banana.exact(2000, seed=1)
    clip = 3.0 * math.sqrt(d * TEMPER / N)  # three times the usual norm of a score, in z
    for again in (True, False):
        values, accepted = [], []
        for seed in range(given.repeats):
            made = sample(
                banana,
                4.0,
                dp.DPHMC,
                draws,
                seed=seed,
                step_size=0.1,
                n_steps=n_steps,
                scaling=banana.scales,
                clip_norm=clip,
                reuse_gradient=again,
            )
            values.append(dp.mmd(made.theta[0], reference))
            accepted.append(made.accepted)
        label = "last gradient used again" if again else "fresh first gradient"
        plan = made.step.plan
        found.rows += [
            Row(
                "Algorithm 3",
                f"gradients released, k = {draws}, L = {n_steps}, {label}",
                draws * n_steps + 1,
                plan.releases("gradient"),
                None,
                "" if again else "L + 1 each iteration: the default with settings by hand.",
            ),
            Row("Algorithm 3", f"part accepted, d={d}, {label}", None, *mean_and_error(accepted)),
            Row("Algorithm 3", f"MMD, d={d}, epsilon 4, {label}", None, *mean_and_error(values)),
        ]


# -- the accountants ------------------------------------------------------------------------------

FORMULA = "The value of the printed formula at this setting. "


def zcdp_budget(epsilon: float) -> float:
    """Rho of Theorem 6."""
    return (math.sqrt(epsilon - math.log(DELTA)) - math.sqrt(-math.log(DELTA))) ** 2


def tight_budget(epsilon: float) -> float:
    """k mu of Theorem 7: where its delta(epsilon) is delta."""

    def excess(total: float) -> float:
        width = 2.0 * math.sqrt(total)
        second = math.exp(epsilon) * erfc((epsilon + total) / width)
        return 0.5 * (erfc((epsilon - total) / width) - second) - DELTA

    return float(brentq(excess, 1e-6, epsilon))


def amplified_epsilon(log_moments: dict[int, float], q: float, iterations: int) -> float:
    """Epsilon of Theorems 8 and 9 by Theorem 1; `log_moments` are their epsilon'(j), from j = 2."""

    def divergence(alpha: int) -> float:
        second = log_moments[2]
        smaller = min(math.log(4.0 * math.expm1(second)), math.log(2.0) + second)
        terms = [0.0, 2.0 * math.log(q) + math.log(binom(alpha, 2)) + smaller]
        for j in range(3, alpha + 1):
            weight = math.log(2.0) + j * math.log(q) + math.log(binom(alpha, j))
            terms.append(weight + (j - 1) * log_moments[j])
        return float(logsumexp(terms)) / (alpha - 1)

    return min(
        iterations * divergence(alpha) - math.log(DELTA) / (alpha - 1) for alpha in log_moments
    )


def barker_moments(batch: int) -> dict[int, float]:
    """epsilon'(alpha) of Theorem 8, for alpha < batch / 5."""
    return {
        alpha: 2.5 / batch
        + math.log(2.0 * batch / (batch - 5 * alpha)) / (2.0 * (alpha - 1))
        + 2.0 * alpha / (batch - 5 * alpha)
        for alpha in range(2, min(batch // 5, 200))
    }


def iterations_paid() -> Iterator[Row]:
    """Iterations of the penalty algorithm and of DP-HMC that a budget pays for."""
    tau2, epsilon, n_steps = 2500.0, 4.0, 10
    ours = mu_from_budget(epsilon, DELTA) ** 2 / 2.0
    setting = f"epsilon {epsilon:g}, delta {DELTA:g}"
    rate = 1.0 / (2.0 * tau2)
    tight = "zCDP is not tight; the package counts Gaussian releases exactly, as Theorem 7 does."
    for where, budget, why in (
        ("Theorem 6", zcdp_budget(epsilon), tight),
        ("Theorem 7", tight_budget(epsilon), ""),
    ):
        what = f"iterations, sigma = 50 sensitivities, {setting}"
        yield Row(
            where, what, math.floor(budget / rate), math.floor(ours / rate), None, FORMULA + why
        )
    each = rate * (1 + n_steps)
    yield Row(
        "Section 5.2",
        f"iterations of DP-HMC, L = {n_steps}, sigma = 50 sensitivities, {setting}",
        math.floor((zcdp_budget(epsilon) - rate) / each),
        math.floor((ours - rate) / each),
        None,
        FORMULA + tight,
    )


def barker_on_batches() -> Iterator[Row]:
    """Theorem 8, and what the package counts for the same batches."""
    n, iterations = 1_000_000, 20_000
    # the noise of variance 1 that the theorem leaves, by the norm of the two sums of DPBarker
    noise = math.sqrt(BATCH / 1.25)
    printed = amplified_epsilon(barker_moments(BATCH), BATCH / n, iterations)
    for batches, event in (
        ("fixed size", FixedBatchGaussianEvent("log_ratio", noise, BATCH, n)),
        ("Poisson batches", SubsampledGaussianEvent("log_ratio", noise, BATCH / n)),
    ):
        yield Row(
            "Theorem 8",
            f"epsilon of DP Barker, {batches}, n = 1e6, |B| = {BATCH}, k = {iterations}",
            printed,
            epsilon_of([(event, iterations)], 0, DELTA),
            None,
            FORMULA + "Without its logarithm, which bounds noise whose variance depends on the "
            "data, it gives 0.23: `DPBarker` adds noise of a known size (here variance 1) and "
            "releases the variance of the batch with it. The rest is tighter amplification.",
        )


def penalty_on_batches() -> Iterator[Row]:
    """Theorem 9 and Lemma 1."""
    moments = {alpha: alpha / (2.0 * 6.25) for alpha in range(2, 400)}
    printed = amplified_epsilon(moments, 0.01, 1000)
    for batches, event, why in (
        (
            "fixed size",
            FixedBatchGaussianEvent("log_ratio", 5.0, BATCH, N),
            "Theorem 1 loses most: with the conversion of the package the formula gives 1.35. The "
            "rest is Theorem 27 of Wang et al. (2019), which bounds the same terms more tightly.",
        ),
        (
            "Poisson batches",
            SubsampledGaussianEvent("log_ratio", 5.0, 0.01),
            "Poisson batches, the default, are counted by privacy loss distributions.",
        ),
    ):
        yield Row(
            "Theorem 9",
            f"epsilon of the subsampled penalty, {batches}, q = 0.01, k = 1000, sigma = 2.5 "
            "sensitivities",
            printed,
            epsilon_of([(event, 1000)], 0, DELTA),
            None,
            FORMULA + why,
        )
    c, k = 0.1, 1.0  # bound of one ratio; n T / |B|
    share = BATCH / N
    yield Row(
        "Lemma 1",
        f"sensitivity of the released ratio, |r| <= {c:g}, n = {N}, |B| = {BATCH}, T = {TEMPER:g}",
        2.0 * k * c + 3.0 * (1.0 - 1.0 / BATCH) * (k * c) ** 2,
        2.0 * (k * c + 0.5 * (1.0 - share) * (k * c) ** 2),
        None,
        FORMULA + "`DPPenalty` estimates the variance by the sum of squares about 0, so that each "
        "record has one bounded term; the lemma bounds the mean and the squares apart.",
    )


def run(quick: bool) -> Found:
    """All tables and figures."""
    given, found = QUICK if quick else FULL, Found()
    found.rows += [*iterations_paid(), *barker_on_batches(), *penalty_on_batches()]
    clipping(found, given)
    samplers(found, given)
    tempering(found, given)
    reuse(found, given)
    return found
