"""Samplers of Dang et al. (2019), run by `pm.sample` on simulated data like theirs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pymc as pm
import xarray as xr
from scipy.special import expit

import pymc_dp as dp
from benchmarks import ecs
from pymc_dp.base.compat import effective_draws, group
from pymc_dp.kernels import sgmcmc
from pymc_dp.subsampling.linear import LinearRows
from pymc_dp.subsampling.preparation import Variates

__all__ = [
    "BANKRUPTCY",
    "HIGGS",
    "HMC",
    "PATH",
    "Chain",
    "Sampler",
    "Study",
    "full_passes",
    "hmc",
    "sampled",
]

#: Step size and length of trajectories in Section 6.3: L = 6.
PATH = {"step_size": 0.2, "path_length": 1.2}
HMC = "HMC"


def higgs(n: int) -> tuple[np.ndarray, np.ndarray]:
    """An intercept and 28 standardised features, made up as those of the HIGGS data.

    Angles and tags are independent. Momenta are skewed, and masses are functions of them, so that
    posterior standard deviations differ by a factor of ten.
    """
    rng = np.random.default_rng(1)
    angles, tags = rng.uniform(-1.0, 1.0, (n, 11)), rng.integers(0, 3, (n, 4))
    momenta = 0.3 * rng.standard_normal((n, 1)) + 0.4 * rng.standard_normal((n, 6))
    masses = momenta @ rng.dirichlet(np.ones(6), 7).T + 0.2 * rng.standard_normal((n, 7))
    x = np.hstack([angles, tags, np.exp(momenta), np.exp(masses)])
    x = np.column_stack([np.ones(n), (x - x.mean(axis=0)) / x.std(axis=0)])
    theta = rng.normal(0.0, 0.15, 29)
    return x, rng.binomial(1, expit(x @ theta))


class Refreshed(dp.SGHMC):
    """SG-HMC as in the paper: each draw begins with a new momentum, nearly without friction."""

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[Any]]:
        if self._state is not None:
            self._state = sgmcmc.initial_hamiltonian(self.rng, self._state.z)
        return super().step(point)


class Plain(dp.SGLD):
    """SGLD as in the paper: one step size for all parameters, whatever their scales.

    With ``step_size=1`` it is the variance of the posterior along its narrowest direction.
    """

    def _begin(self) -> None:
        curved = self.variates.curved
        narrowest = np.sqrt(np.linalg.eigvalsh(curved.covariance)[0])
        unit = np.eye(len(curved.theta))
        self.variates.curved = replace(curved, root=narrowest * unit, inverse_root=unit / narrowest)
        super()._begin()


@dataclass(frozen=True)
class Sampler:
    """A step method, its settings, and how many times the draws of others it needs."""

    step: type
    settings: Mapping[str, Any]
    times: int = 1


@dataclass(frozen=True)
class Study:
    """A data set of the paper and the samplers that are run on it.

    Attributes
    ----------
    simulate : callable
        n -> design (n, d) and outcomes.
    records : int
        Number of records in the paper.
    tables, figures : tuple of str
        Where the paper has costs and settings; marginals and moments.
    """

    name: str
    simulate: Callable[[int], tuple[np.ndarray, np.ndarray]]
    records: int
    tables: tuple[str, str]
    figures: tuple[str, str]
    samplers: Mapping[str, Sampler] = field(default_factory=dict)


def _conserving(size: int, products: int) -> dict[str, Sampler]:
    """The two HMC-ECS samplers, mini-batches of 30."""
    signed = {"estimator": "signed", "blocks": products, "subsample_size": 30 * products}
    return {
        "perturbed": Sampler(dp.HMCECS, {"subsample_size": size, **PATH}),
        "signed": Sampler(dp.HMCECS, {**signed, **PATH}),
    }


def _momentum(
    size: int, step_size: float, n_steps: int, *, order: int = 2, times: int = 1
) -> Sampler:
    settings = {"step_size": step_size, "n_steps": n_steps, "subsample_size": size, "order": order}
    return Sampler(Refreshed, {**settings, "friction": 1e-4}, times)


def _langevin(size: int, *, order: int = 2, step_size: float = 1.0) -> Sampler:
    """As many scores for a draw as HMC-ECS has gradients."""
    settings = {"step_size": step_size, "n_steps": 6, "subsample_size": size, "order": order}
    return Sampler(Plain, settings)


HIGGS = Study(
    "HIGGS",
    higgs,
    10_500_000,
    ("Table 1", "Table 2"),
    ("Figure 1", "Figure 2"),
    {
        **_conserving(1300, 100),
        "SG-HMC": _momentum(1300, 0.06, 20),
        "SGLD": _langevin(1300),
        "SGLD, a quarter of the step": _langevin(1300, step_size=0.25),
        "SG-HMC, no control variates": _momentum(1300, 0.06, 20, order=0),
        "SGLD, no control variates": _langevin(1300, order=0),
        "dp.SGHMC": Sampler(dp.SGHMC, {"subsample_size": 1300}),
        "dp.SGLD": Sampler(dp.SGLD, {"subsample_size": 1300, "n_steps": 6}),
    },
)
BANKRUPTCY = Study(
    "bankruptcy",
    ecs.splines,
    4_748_089,
    ("Table 3", "Table 4"),
    ("Figure 4", "Figure 5"),
    {
        **_conserving(1000, 200),
        "SG-HMC, L = 60": _momentum(1000, 0.02, 60),
        "SG-HMC, L = 7": _momentum(1000, 0.02, 7),
        "SG-HMC, L = 7, 5 times the draws": _momentum(1000, 0.02, 7, times=5),
        "SGLD": _langevin(1000),
        "SGLD, a quarter of the step": _langevin(1000, step_size=0.25),
        "dp.SGHMC": Sampler(dp.SGHMC, {"subsample_size": 1000}),
        "dp.SGLD": Sampler(dp.SGLD, {"subsample_size": 1000, "n_steps": 6}),
    },
)


@dataclass(frozen=True, eq=False)
class Chain:
    """Chains of one sampler.

    Attributes
    ----------
    draws : (chains, draws, d) ndarray
    evaluations : float
        Of the density or gradient of one record, for each draw.
    stats, tuning : dict of str to (chains, draws) ndarray
        Of the draws, and of the iterations before them.
    """

    draws: np.ndarray
    evaluations: float
    stats: Mapping[str, np.ndarray]
    tuning: Mapping[str, np.ndarray]

    @property
    def flat(self) -> np.ndarray:
        """(chains x draws, d)."""
        return self.draws.reshape(-1, self.draws.shape[-1])

    @property
    def inefficiency(self) -> np.ndarray:
        """(chains, d) inefficiency factors, IF."""
        return np.array([len(x) / effective_draws(x[None]) for x in self.draws])

    @property
    def positive(self) -> np.ndarray:
        """(chains,) part of positive signs, tau."""
        sign = self.stats.get("sign", np.ones(self.draws.shape[:2]))
        return (sign > 0).mean(axis=1)


def sampled(model: pm.Model, sampler: Sampler, draws: int, *, chains: int, tune: int) -> Chain:
    """Run a sampler with `pm.sample`."""
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some settings of the paper are warned of
        step = sampler.step(progressbar=False, **sampler.settings)
        idata = pm.sample(
            draws,
            tune=tune,
            chains=chains,
            cores=1,
            step=step,
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
            discard_tuned_samples=False,
        )
    conserving = isinstance(step, dp.HMCECS)  # one density more than gradients
    return Chain(
        group(idata, "posterior")["beta"].values,
        float(step.subsample_size * (step.n_steps + conserving)),
        _numbers(group(idata, "sample_stats")),
        _numbers(group(idata, "warmup_sample_stats")),
    )


def _numbers(stats: xr.Dataset) -> dict[str, np.ndarray]:
    return {name: stats[name].values for name in stats.data_vars if name != "warning"}


def hmc(study: Study, model: pm.Model, draws: int) -> tuple[Chain, float]:
    """HMC on all records with the same trajectories, and its average acceptance."""
    result, found = ecs.full_hmc(study.name, model, HMC, draws)
    return Chain(found[None], result.evaluations, {}, {}), result.accept


def full_passes(model: pm.Model) -> int:
    """How often building `dp.HMCECS` evaluates all records: mode, curvature, pilot, checks."""

    def watched(owner: type, name: str) -> Any:
        original = getattr(owner, name)
        return mock.patch.object(owner, name, autospec=True, side_effect=original)

    with (
        watched(LinearRows, "total") as total,
        watched(LinearRows, "hessian") as hessian,
        watched(Variates, "all_differences") as differences,
    ):
        dp.HMCECS(model=model, progressbar=False)
    calls = [*total.call_args_list, *hessian.call_args_list]
    of_all = sum(len(call.args) < 3 or call.args[2] is None for call in calls)
    return of_all + differences.call_count
