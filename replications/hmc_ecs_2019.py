"""Dang et al. (2019), Hamiltonian Monte Carlo with Energy Conserving Subsampling.

::

    python -m replications hmc_ecs_2019 --quick
    python -m replications hmc_ecs_2019 --json replications/results/hmc_ecs_2019.json

The data are simulated: like the HIGGS data (d = 29) and like the firms of the bankruptcy data
(d = 81), with fewer records than in the paper. Samplers are in `replications.hmc_ecs_chains`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
from scipy.special import expit
from scipy.stats import gaussian_kde

import pymc_dp as dp
from benchmarks.ecs import build
from pymc_dp.base.compat import effective_draws
from replications.hmc_ecs_chains import (
    BANKRUPTCY,
    HIGGS,
    HMC,
    PATH,
    Chain,
    Sampler,
    Study,
    full_passes,
    hmc,
    sampled,
)
from replications.report import Found, Row

#: Tables 1 and 3: least, median and largest computational time relative to perturbed HMC-ECS.
TIMES = {
    "HIGGS": {
        "signed": (0.8, 1.15, 1.95),
        "SG-HMC": (2.43, 2.97, 4.08),
        "SGLD": (3.58, 12.46, 326.8),
    },
    "bankruptcy": {
        "signed": (1.2, 1.6, 2.6),
        "SG-HMC, L = 60": (6.8, 9.5, 682.3),
        "SG-HMC, L = 7": (48.6, 100.2, 246.7),
        "SGLD": (53.9, 230.1, 2784.2),
    },
}
#: Sections 6.5 and 6.6: evaluations of HMC on all records, relative to perturbed and signed.
HMC_COST = {
    "HIGGS": {"perturbed": 642.8, "signed": 554.1},
    "bankruptcy": {"perturbed": 478.7, "signed": 311.5},
}
#: Tables 2 and 4: acceptance of theta and of u, L, IF, ESS, tau and 100 m / n.
SETTINGS = {
    "HIGGS": {
        "perturbed": (0.98, 1.0, 6, 2.185, 927, None, 0.012),
        "signed": (0.979, 0.993, 6, 2.192, 922, 1.0, 0.029),
    },
    "bankruptcy": {
        "perturbed": (0.967, 0.994, 6, 2.202, 912, None, 0.021),
        "signed": (0.962, 0.964, 6, 2.31, 871, 1.0, 0.126),
    },
}
#: The same tables: acceptance and IF of HMC.
BENCHMARK = {"HIGGS": (0.98, 2.084), "bankruptcy": (0.966, 2.195)}
#: Draws of the paper.
R = 2000


@dataclass(frozen=True)
class Size:
    """How much is computed."""

    records: int
    draws: int
    hmc_draws: int
    chains: int
    tune: int
    dimensions: Sequence[int]


FULL_SIZE = Size(100_000, R, 1000, 3, 300, [2, 4, 8, 16, 32, 64, 128, 256])
QUICK_SIZE = Size(20_000, 150, 150, 2, 50, [4, 8, 16, 32])


def run(quick: bool) -> Found:
    """All tables and figures."""
    size = QUICK_SIZE if quick else FULL_SIZE
    found = Found()
    for study in (HIGGS, BANKRUPTCY):
        measured = Measured(study, size)
        computational_times(measured, found)
        settings(measured, found)
        marginals(measured, found)
        moments(measured, found)
        if study is HIGGS:
            prediction(measured, found)
            orders(measured, found)
        else:
            failures(measured, found)
    scaling(size, found)
    return found


class Measured:
    """All chains on the data of one study; the last fifth of the records are for tests."""

    def __init__(self, study: Study, size: Size) -> None:
        self.study, self.size, self.n = study, size, size.records
        x, y = study.simulate(self.n + self.n // 4)
        self.x, self.y = x[: self.n], y[: self.n]
        self.held_out = x[self.n :], y[self.n :]
        self.model = build(self.x, self.y)
        self.passes = full_passes(self.model)
        full, self.hmc_accept = hmc(study, self.model, size.hmc_draws)
        self.chains: dict[str, Chain] = {HMC: full}
        for name, sampler in study.samplers.items():
            chains = size.chains if sampler.step is dp.HMCECS else 1
            self.chains[name] = self.sampled(sampler, chains)

    def sampled(self, sampler: Sampler, chains: int = 1) -> Chain:
        """Chains of a sampler on these data."""
        size = self.size
        draws = size.draws * sampler.times
        return sampled(self.model, sampler, draws, chains=chains, tune=size.tune)

    @property
    def exact(self) -> Chain:
        """HMC on all records."""
        return self.chains[HMC]

    def whole_run(self, name: str) -> float:
        """Evaluations of a run of R draws on as many records as in the paper, set-up and all."""
        n, one = self.study.records, self.chains[name].evaluations
        if name == HMC:
            one *= n / self.n
        return self.passes * n + (FULL_SIZE.tune + R) * one


def normal_inefficiency(length: float) -> float:
    """IF of exact trajectories where the posterior is normal: autocorrelations are cos^k."""
    return float((1.0 + np.cos(length)) / (1.0 - np.cos(length)))


# -- Tables 1 and 3 -------------------------------------------------------------------------------


def computational_times(measured: Measured, found: Found) -> None:
    """Computational times relative to the perturbed sampler, and evaluations of HMC."""
    study, where = measured.study, measured.study.tables[0]
    for name in measured.chains:
        if name in ("perturbed", HMC) or "no control" in name:
            continue
        printed = _printed(study, name)
        if name == "signed":
            times = _times(measured, name, measured.whole_run(name))
            times /= _times(measured, "perturbed", measured.whole_run("perturbed"))
        else:
            times = _times(measured, name, measured.chains[name].evaluations)
            times /= _times(measured, "perturbed", measured.chains["perturbed"].evaluations)
        three = (times.min(), np.median(times), times.max())
        for label, paper, ours in zip(("least", "median", "largest"), printed, three, strict=True):
            what = f"time of {name} over perturbed, {label}"
            found.rows.append(Row(where, what, paper, float(ours), None, _why_time(measured, name)))
        found.series.setdefault(where, {})[name] = _rounded(times)
    section = "Section 6.5" if study is HIGGS else "Section 6.6"
    for name, paper in HMC_COST[study.name].items():
        ratio = measured.whole_run(HMC) / measured.whole_run(name)
        why = (
            f"Counted for the n of the paper: {measured.passes} passes over all records build the "
            f"step (mode, curvature, pilot, checks), then "
            f"{FULL_SIZE.tune + R:,} iterations read samples."
        )
        what = f"evaluations of HMC over {name}"
        found.rows.append(Row(section, what, paper, ratio, None, why))


def _printed(study: Study, name: str) -> tuple[float | None, ...]:
    """Numbers of the paper, also for variants of its samplers."""
    variant = name.removesuffix(", a quarter of the step").removesuffix(", 5 times the draws")
    return TIMES[study.name].get(variant, (None, None, None))


def _times(measured: Measured, name: str, evaluations: float) -> np.ndarray:
    """(d,) CT of eq. 3.2, and of eq. 5.4 with signs."""
    chain = measured.chains[name]
    return chain.inefficiency.mean(axis=0) * evaluations / (2 * chain.positive.mean() - 1) ** 2


def _why_time(measured: Measured, name: str) -> str:
    chains = measured.chains
    cost = chains[name].evaluations / chains["perturbed"].evaluations
    if name == "signed":
        return (
            "Whole runs at the n of the paper, where building the step is much of the cost; a draw "
            f"alone costs {cost:.1f} times as much. Least and largest are far apart because IF "
            "is estimated from one chain in the paper, from three here."
        )
    if name.startswith("SG-HMC"):
        own = measured.study.samplers[name]
        ratio = cost * normal_inefficiency(own.settings["step_size"] * own.settings["n_steps"])
        ratio /= normal_inefficiency(PATH["path_length"])
        found = (
            "New momentum for each draw, next to no friction. Exact trajectories on a "
            f"normal posterior would give {ratio:.3g} for all parameters."
        )
        if name == "SG-HMC, L = 7":
            found += f" {chains[name].draws.shape[1]:,} draws are too few to estimate such an IF."
        if name == "SG-HMC, L = 60":
            found += " The paper does not say why one of its parameters mixed far more slowly."
        return found
    if name.startswith("SGLD"):
        return (
            "The time goes as one over the step size, which the paper found by trial. Least and "
            "largest are as far apart as the widths of the posterior: a matter of the data."
        )
    return (
        "The step of this package, with its own settings: in units of posterior standard "
        "deviations" + (", momentum kept between draws." if name == "dp.SGHMC" else ".")
    )


# -- Tables 2 and 4 -------------------------------------------------------------------------------


def settings(measured: Measured, found: Found) -> None:
    """Acceptance, efficiency and cost of HMC-ECS."""
    study, where = measured.study, measured.study.tables[1]
    for name, printed in SETTINGS[study.name].items():
        chain = measured.chains[name]
        factor = chain.inefficiency.mean(axis=1)
        size = chain.evaluations / (chain.stats["n_steps"][0, 0] + 1)
        share = np.array([100.0 * size / measured.n])
        ours: list[tuple[str, np.ndarray, str]] = [
            ("acceptance of theta", chain.stats["acceptance_rate"].mean(axis=1), ""),
            (_ACCEPT_U, chain.stats["acceptance_rate_u"].mean(axis=1), _WHY_U),
            ("steps L", chain.stats["n_steps"].mean(axis=1), ""),
            ("IF, average over parameters", factor, _WHY_FACTOR),
            ("ESS of 2,000 draws", R / factor, ""),
            ("positive signs", chain.positive, ""),
            ("records read, %", share, f"As many records as in the paper, of {measured.n:,}."),
        ]
        for (what, values, why), paper in zip(ours, printed, strict=True):
            if what != "positive signs" or name == "signed":
                found.rows.append(_row(where, f"{name}: {what}", paper, values, why))
    accept_u = _about_a_draw(measured).stats["acceptance_rate_u"].mean(axis=1)
    what = f"signed, theta* a single draw: {_ACCEPT_U}"
    found.rows.append(_row(where, what, SETTINGS[study.name]["signed"][1], accept_u, _WHY_U))
    accept, factor = BENCHMARK[study.name]
    full = measured.exact.inefficiency.mean(axis=1)
    found.rows.append(Row(where, "HMC: acceptance of theta", accept, measured.hmc_accept))
    what = "HMC: IF, average over parameters"
    found.rows.append(_row(where, what, factor, full, _WHY_FACTOR))


def _about_a_draw(measured: Measured) -> Chain:
    """The signed sampler, expanded about a draw instead of the mode."""
    signed = measured.study.samplers["signed"]
    reference = {"beta": measured.chains["perturbed"].flat[-1]}
    return measured.sampled(Sampler(signed.step, {**signed.settings, "reference": reference}))


_ACCEPT_U = "acceptance of u"
_WHY_U = (
    "Theta* is the mode on all records here, a mean of draws in the paper. A single draw as theta* "
    "explains only a part of the lower acceptance of the paper's signed sampler, whose a (eq. 5.1) "
    "and renewed products the text does not give."
)
_WHY_FACTOR = (
    f"Exact trajectories on a normal posterior have {normal_inefficiency(1.2):.2f}. CODA in the "
    "paper, ArviZ here."
)


def _row(where: str, what: str, paper: float | None, chains: np.ndarray, why: str = "") -> Row:
    """Mean over chains, and its standard error."""
    error = None
    if len(chains) > 1 and chains.std() > 0.0:
        error = float(chains.std(ddof=1) / np.sqrt(len(chains)))
    return Row(where, what, paper, float(chains.mean()), error, why)


# -- Figures 1, 2, 4, 5 ---------------------------------------------------------------------------

_LOST = "A picture without numbers in the text."


def marginals(measured: Measured, found: Found) -> None:
    """Kernel densities of four parameters."""
    where = measured.study.figures[0]
    chosen = np.random.default_rng(0).choice(measured.x.shape[1], 4, replace=False)
    curves: dict[str, Any] = found.series.setdefault(where, {})
    curves["parameters"] = chosen.tolist()
    grids, exact = [], []
    for j in chosen:
        draws = measured.exact.flat[:, j]
        center, reach = draws.mean(), 5.0 * draws.std()
        grids.append(np.linspace(center - reach, center + reach, 80))
        exact.append(gaussian_kde(draws)(grids[-1]))
    curves["grid"], curves[HMC] = _rounded(np.array(grids)), _rounded(np.array(exact))
    for name in _without(measured, HMC):
        draws = measured.chains[name].flat
        own = [gaussian_kde(draws[:, j])(grid) for j, grid in zip(chosen, grids, strict=True)]
        curves[name] = _rounded(np.array(own))
        widths = [grid[1] - grid[0] for grid in grids]
        away = [
            0.5 * width * np.abs(a - b).sum()
            for width, a, b in zip(widths, own, exact, strict=True)
        ]
        what = f"{name}: total variation distance of four marginals from HMC, largest"
        found.rows.append(Row(where, what, None, float(max(away)), None, _LOST))


def moments(measured: Measured, found: Found) -> None:
    """Means and variances of all parameters against those of HMC."""
    where, exact = measured.study.figures[1], measured.exact
    found.series[where] = {HMC: _moments(exact)}
    for name in _without(measured, HMC):
        _compare(where, name, measured.chains[name], exact, found, _why_moments(name))


def _compare(where: str, name: str, chain: Chain, exact: Chain, found: Found, why: str) -> None:
    """Distance of means and ratio of variances."""
    found.series[where][name] = _moments(chain)
    center, sd = exact.flat.mean(axis=0), exact.flat.std(axis=0)
    away = np.sqrt(np.mean(((chain.flat.mean(axis=0) - center) / sd) ** 2))
    noise = np.sqrt(np.mean(1.0 / _ess(chain) + 1.0 / _ess(exact)))
    ratio = np.median(chain.flat.var(axis=0) / sd**2)
    what = f"{name}: distance of means from HMC, rms, posterior sds"
    errors = f"{why} Monte Carlo errors alone: {noise:.3f}."
    found.rows.append(Row(where, what, None, float(away), None, errors))
    what = f"{name}: variance over HMC's, median"
    found.rows.append(Row(where, what, None, float(ratio), None, why))


def _why_moments(name: str) -> str:
    if "no control variates" in name:
        return "Noise of samples adds to the variance, more so with the n/m of the paper."
    if name.startswith("SGLD"):
        return (
            "Biased in the paper. Here the error is mostly Monte Carlo: the chain mixes slowly in "
            "wide directions."
        )
    if name.startswith("SG-HMC, L = 7"):
        return "Worse than with L = 60, as in the paper: the chain has few effective draws."
    if "SG" in name:
        return "No accept test: a bias that depends on the step size."
    return "Indistinguishable from HMC in the paper."


def _ess(chain: Chain) -> np.ndarray:
    return effective_draws(chain.draws)


def _moments(chain: Chain) -> dict[str, list[float]]:
    return {"mean": _rounded(chain.flat.mean(axis=0)), "variance": _rounded(chain.flat.var(axis=0))}


# -- Figures 3 and 6 ------------------------------------------------------------------------------


def prediction(measured: Measured, found: Found) -> None:
    """Figure 3: ROC curves for records that were held out."""
    x, y = measured.held_out
    grid = np.linspace(0.0, 1.0, 101)
    curves = {
        name: _roc(_predicted(x, measured.chains[name]).mean(axis=1), y, grid)
        for name in (HMC, "perturbed", "signed")
    }
    found.series["Figure 3"] = {
        "grid": _rounded(grid),
        **{k: _rounded(v) for k, v in curves.items()},
    }
    for name, curve in curves.items():
        area = float(np.trapezoid(curve, grid))
        found.rows.append(
            Row("Figure 3", f"{name}: area under the ROC curve", None, area, None, _LOST)
        )
    for name in ("perturbed", "signed"):
        away = float(np.abs(curves[name] - curves[HMC]).max())
        what = f"{name}: largest distance of its ROC curve from HMC's"
        found.rows.append(
            Row("Figure 3", what, None, away, None, "Indistinguishable in the paper.")
        )


def _predicted(x: np.ndarray, chain: Chain, draws: int = 100) -> np.ndarray:
    """(n, draws) probabilities."""
    some = chain.flat[np.linspace(0, len(chain.flat) - 1, draws).astype(int)]
    return expit(x @ some.T)


def _roc(score: np.ndarray, y: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """True positive rates at false positive rates."""
    y = y[np.argsort(-score)]
    return np.interp(grid, np.cumsum(1 - y) / (1 - y).sum(), np.cumsum(y) / y.sum())


def failures(measured: Measured, found: Found) -> None:
    """Figure 6: realised and predicted rates in 100 groups by the first covariate."""
    knots = np.delete(np.linspace(-2.0, 2.0, 11), 5)
    covariate = measured.x[:, 1:11] @ knots  # hat functions interpolate; the one left out is at 0
    groups = np.array_split(np.argsort(covariate, kind="stable"), 100)
    curves: dict[str, Any] = {
        "covariate": _rounded(np.array([covariate[g].mean() for g in groups])),
        "realised": _rounded(np.array([measured.y[g].mean() for g in groups])),
    }
    means, widths = {}, {}
    for name in (HMC, "perturbed"):
        each = _predicted(measured.x, measured.chains[name])
        rates = np.array([each[g].mean(axis=0) for g in groups])
        low, high = np.quantile(rates, [0.05, 0.95], axis=1)
        means[name], widths[name] = rates.mean(axis=1), high - low
        curves[name] = {"mean": _rounded(means[name]), "low": _rounded(low), "high": _rounded(high)}
    found.series["Figure 6"] = curves
    away = float((np.abs(means["perturbed"] - means[HMC]) / widths[HMC]).mean())
    ratio = float((widths["perturbed"] / widths[HMC]).mean())
    why = "Indistinguishable in the paper. 100 draws of each give an error of a few hundredths."
    what = "perturbed: distance of predicted rates from HMC's, mean, in widths of 90 % intervals"
    found.rows.append(Row("Figure 6", what, None, away, None, why))
    what = "perturbed: widths of 90 % intervals over HMC's, mean"
    found.rows.append(Row("Figure 6", what, None, ratio, None, why))


# -- Figure 7 -------------------------------------------------------------------------------------


def scaling(size: Size, found: Found) -> None:
    """Step sizes by dual averaging in a normal regression with n = 10,000 (Section 6.7)."""
    where, dimensions = "Figure 7", np.array(size.dimensions)
    found.series[where] = {"d": dimensions.tolist()}
    lengths = {"order 1": (1, 1.2), "order 2": (2, 1.2), _DEFAULT: (2, None)}
    for name, (order, length) in lengths.items():
        sampler = Sampler(dp.HMCECS, {"order": order, "path_length": length})
        chains = [sampled(_normal(int(d)), sampler, 300, chains=1, tune=600) for d in dimensions]
        steps = np.array([_tuned(chain, "step_size") for chain in chains])
        factors = np.array([chain.inefficiency.mean() for chain in chains])
        found.series[where][name] = {
            "step size": _rounded(steps),
            "acceptance": _rounded(np.array([_tuned(c, "acceptance_rate") for c in chains])),
            "sigma2": _rounded(np.array([c.stats["sigma2"].mean() for c in chains])),
            "IF": _rounded(factors),
        }
        far = dimensions >= 4
        (slope, _), errors = np.polyfit(np.log(dimensions[far]), np.log(steps[far]), 1, cov=True)
        error = float(np.sqrt(errors[0, 0]))
        what = f"{name}: exponent of d in the step size, d = 4 to {dimensions[-1]}"
        found.rows.append(Row(where, what, -0.25, float(slope), error, _WHY_SLOPE))
        why = _WHY_REJECTED if name == _DEFAULT else _WHY_IF
        what = f"{name}: IF, average over d"
        found.rows.append(Row(where, what, 1.0, float(factors.mean()), None, why))


_DEFAULT = "order 2, length pi/2"
_WHY_SLOPE = "The paper's number is the rate that it sees in the figure; ours is a regression."
_WHY_REJECTED = "Exact trajectories of length pi/2 have 1; a fifth of these are rejected."
_WHY_IF = (
    f"A trajectory of length 1.2 has an IF of {normal_inefficiency(1.2):.2f} for a normal "
    "posterior, as in Tables 2 and 4. The text says close to 1."
)


def _normal(d: int) -> pm.Model:
    rng = np.random.default_rng(d)
    x = rng.standard_normal((10_000, d))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 5.0, shape=d)
        observed = x @ rng.normal(size=d) + rng.standard_normal(10_000)
        pm.Normal("y", x @ beta, 1.0, observed=observed)
    return model


def _tuned(chain: Chain, name: str) -> float:
    """Mean over the second half of the tuning."""
    values = chain.tuning[name]
    return float(values[:, values.shape[1] // 2 :].mean())


# -- Figures 8 and 9 ------------------------------------------------------------------------------


def orders(measured: Measured, found: Found) -> None:
    """Variance of the estimate, and the posterior, by order of the control variates."""
    m = measured.study.samplers["perturbed"].settings["subsample_size"]
    chains = {2: measured.chains["perturbed"]}
    for order in (1, 0):
        sampler = Sampler(dp.HMCECS, {"order": order, "subsample_size": m, **PATH})
        chains[order] = measured.sampled(sampler)
    found.series["Figure 8"] = {}
    found.series["Figure 9"] = {HMC: _moments(measured.exact)}
    for order, chain in chains.items():
        trace = np.concatenate([chain.tuning["sigma2"][0], chain.stats["sigma2"][0]])
        found.series["Figure 8"][f"order {order}"] = _rounded(trace[::5])
        what = f"order {order}: variance of the log-likelihood from {m} records"
        variance = float(chain.stats["sigma2"].mean())
        found.rows.append(Row("Figure 8", what, None, variance, None, _LOST))
    for order, exponent in ((2, "1/n"), (1, "a constant")):
        what = f"order {order}: the same, theta* from 1 % of the records"
        why = f"With n this goes as {exponent}."
        variance = _variance_from_few(measured, order, m)
        found.rows.append(Row("Figure 8", what, None, variance, None, why))
    for order, why in ((1, "Accurate in the paper."), (0, "Too crude in the paper as well.")):
        _compare("Figure 9", f"order {order}", chains[order], measured.exact, found, why)


def _variance_from_few(measured: Measured, order: int, m: int) -> float:
    """Pilot variance about the mode of a hundredth of the records."""
    few = measured.n // 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = dp.HMCECS(model=build(measured.x[:few], measured.y[:few]), progressbar=False)
        reference = {"beta": start.variates.curved.theta}
        return dp.HMCECS(
            model=measured.model,
            order=order,
            subsample_size=m,
            reference=reference,
            progressbar=False,
        ).sigma2


# -- all ------------------------------------------------------------------------------------------


def _without(measured: Measured, name: str) -> list[str]:
    return [other for other in measured.chains if other != name]


def _rounded(values: np.ndarray) -> list[Any]:
    """Five digits, as lists."""
    return np.vectorize(lambda v: float(f"{v:.5g}"))(values).tolist()
