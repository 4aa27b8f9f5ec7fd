"""One private run of one method on one data set."""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import chi2

import pymc_dp as dp
from benchmarks.models import BANANA, GAUSS, Data, Problem
from benchmarks.reference import bend, unconstrained_truth
from pymc_dp.base import compat as _compat
from pymc_dp.privacy.accounting import mu_from_budget
from pymc_dp.publication.results import unconstrain
from pymc_dp.records.extraction import extract

__all__ = [
    "LAPLACE",
    "METHODS",
    "ONE_SHOT",
    "Run",
    "mu2",
    "one_shot",
    "private_run",
    "quiet",
    "released_by",
]

#: Step, its arguments, draws per chain.  All chains share a budget, and DPHMC and DPPenalty make
#: moves as long as it allows: more and shorter ones gain little beyond these numbers, fewer chains
#: nothing, because all start from about the posterior.
METHODS: dict[str, tuple[type, dict[str, Any], int]] = {
    "DPLangevin": (dp.DPLangevin, {}, 1000),
    "DPHMC": (dp.DPHMC, {}, 500),
    "DPPenalty": (dp.DPPenalty, {}, 2000),
    "quadratic": (dp.DPLangevin, {"form": "quadratic"}, 1000),
}
#: The normal approximation, from the same private preparation and without chains.
LAPLACE = "laplace"
#: Problems with a sufficient statistic of fixed size, a sum over records.
ONE_SHOT = ("gauss", "banana")


@dataclass(frozen=True, eq=False)
class Run:
    """What came out.

    Attributes
    ----------
    theta : (chains, draws, d) ndarray
        Unconstrained draws as published: noise-aware where the form is anchored.
    raw : (chains, draws, d) ndarray
        The chains themselves.
    covered, covered_raw : (number of scalars,) bool ndarray
        Whether the 90 % intervals of published and of raw draws hold the truth.
    truth : (d,) ndarray
        Unconstrained; empty for real data.
    form : str
    facts : dict
        Settings and statements that explain the rest.
    """

    theta: np.ndarray
    raw: np.ndarray
    covered: np.ndarray
    covered_raw: np.ndarray
    truth: np.ndarray
    form: str
    acceptance: float
    build_seconds: float
    sample_seconds: float
    warned: list[str]
    facts: dict[str, Any]


def mu2(problem: Problem, epsilon: float) -> float:
    """Squared mu of the budget."""
    return mu_from_budget(epsilon, problem.delta) ** 2


def released_by(step: Any, seed: int, **kwargs: Any) -> Any:
    """What `dp.sample` releases of the run that a step was built for, one chain after the other."""
    plan = step.plan
    return dp.sample(
        plan.draws,
        tune=plan.tune,
        chains=plan.chains,
        step=step,
        cores=1,
        random_seed=seed,
        progressbar=False,
        compute_convergence_checks=False,
        **kwargs,
    )


def private_run(
    problem: Problem,
    data: Data,
    method: str,
    epsilon: float,
    *,
    chains: int = 4,
    draws: int | None = None,
    seed: int = 0,
) -> Run:
    """Build the model, attach a budget, sample with default arguments, release."""
    step, settings = None, {"form": LAPLACE}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with problem.model(data) as model:
            budget = dp.PrivacyBudget(
                epsilon=epsilon, delta=problem.delta, privacy_unit=data.arrays.get("unit")
            )
            begin = time.perf_counter()
            if method == LAPLACE:
                released = dp.laplace(
                    draws or 1000, chains=chains, random_seed=seed, progressbar=False
                )
                end = built = time.perf_counter()
            else:
                step_type, options, length = METHODS[method]
                draws = draws or length
                step = step_type(draws=draws, chains=chains, progressbar=False, **options)
                built = time.perf_counter()
                released = released_by(step, seed)
                end = time.perf_counter()
    posterior = _compat.group(released, "posterior")
    groups = _compat.group_names(released)
    raw = _compat.group(released, "posterior_raw") if "posterior_raw" in groups else posterior
    if step is not None:
        settings = budget.account.plan(step.plan.plan_id)["settings"]
        accepted = _compat.group(released, "sample_stats")["dp_accepted"].values.mean()
    parameters = extract(model, privacy_unit=data.arrays.get("unit"), check=False).parameters
    table = budget.table()
    return Run(
        theta=unconstrain(model, parameters, posterior),
        raw=unconstrain(model, parameters, raw),
        covered=_covered(posterior, data.truth),
        covered_raw=_covered(raw, data.truth),
        truth=unconstrained_truth(model, parameters, data),
        form=settings.get("form", method),
        acceptance=float(accepted) if step is not None else np.nan,
        build_seconds=built - begin,
        sample_seconds=end - built,
        warned=sorted({str(w.message) for w in caught if _matters(w)}),
        facts={
            **{k: v for k, v in settings.items() if k in ("clip_norm", "step_size", "n_steps")},
            "clipping": settings.get("clipping"),
            "shares": {
                row.mechanism: round(float(row.share), 4)
                for row in table.itertuples()
                if row.mechanism and not row.mechanism.startswith("round")
            },
            "rounds": sum(
                str(m).endswith("score") and str(m).startswith("round") for m in table["mechanism"]
            ),
        },
    )


def quiet() -> None:
    """No progress messages of PyMC."""
    logging.getLogger("pymc").setLevel(logging.WARNING)


def _matters(warned: warnings.WarningMessage) -> bool:
    """All that users see, but for the reminder that the same data had a budget before."""
    return warned.category is UserWarning and "already have a budget" not in str(warned.message)


def _covered(posterior: Any, truth: dict[str, np.ndarray]) -> np.ndarray:
    inside = [np.empty(0, dtype=bool)]
    for name, value in truth.items():
        low, high = np.quantile(posterior[name].values, [0.05, 0.95], axis=(0, 1))
        inside.append(np.ravel((low <= value) & (value <= high)))
    return np.concatenate(inside)


def one_shot(problem: Problem, data: Data, epsilon: float, seed: int, k: int = 4000) -> Run:
    """The Gaussian mechanism on the sufficient statistic, told where the data are.

    An oracle: sums are clipped around the truth, in coordinates of unit variance, so no private
    method without that knowledge does better in the mean.  Draws are of the exact posterior given
    the noisy sum, noise taken for noise.
    """
    begin = time.perf_counter()
    rng = np.random.default_rng(seed)
    if problem.name == "gauss":
        root = np.linalg.cholesky(GAUSS.covariance)
        x, centre, prior = data.arrays["x"], GAUSS.mean, GAUSS.prior_sd**2
    else:
        root = np.diag(np.sqrt(BANANA.variances))
        x = np.column_stack([data.arrays["x1"], data.arrays["x2"]])
        centre, prior = np.array([0.0, 3.0]), BANANA.prior_variance
    n, d = x.shape
    z = np.linalg.solve(root, (x - centre).T).T
    bound = float(np.sqrt(chi2.ppf(0.999, d)))
    z *= np.minimum(1.0, bound / np.linalg.norm(z, axis=1))[:, None]
    sd = 2.0 * bound / np.sqrt(mu2(problem, epsilon))
    mean = (z.sum(axis=0) + sd * rng.standard_normal(d)) / n
    variance = 1.0 / n + (sd / n) ** 2
    seen = np.linalg.inv(variance * root @ root.T)
    covariance = np.linalg.inv(seen + np.eye(d) / prior)
    theta = rng.multivariate_normal(covariance @ seen @ (centre + root @ mean), covariance, k)
    truth = np.concatenate([np.ravel(value) for value in data.truth.values()])
    theta = theta if problem.name == "gauss" else bend(theta)
    low, high = np.quantile(theta, [0.05, 0.95], axis=0)
    covered = (low <= truth) & (truth <= high)
    seconds = time.perf_counter() - begin
    chains = theta.reshape(4, -1, d)
    return Run(chains, chains, covered, covered, truth, "one-shot", np.nan, 0.0, seconds, [], {})
