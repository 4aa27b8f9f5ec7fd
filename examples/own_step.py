"""A private step method of one's own: the penalty method with Crank-Nicolson proposals.

The kernel moves a chain and sees no record. It queries a sum of log-likelihood ratios, which is
clipped, noisy and paid for. The step method lists the releases and connects the kernel to PyMC. The
package handles budgets, records, noise and publication.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pymc as pm

import pymc_dp as dp
from pymc_dp.kernels.interfaces import LogRatioQueries, Prior
from pymc_dp.steps.base import PrivateStep
from pymc_dp.tuning.coordinates import learn_coordinates
from pymc_dp.tuning.model_parts import Design
from pymc_dp.tuning.preparing import Preparing


# kernel: begin
class State(NamedTuple):
    """State of a chain."""

    z: np.ndarray
    log_prior: float


class Info(NamedTuple):
    """Public information about one iteration."""

    accepted: bool


def transition(
    rng: np.random.Generator,
    state: State,
    queries: LogRatioQueries,
    prior: Prior,
    *,
    step_size: float,
) -> tuple[State, Info]:
    """Propose z' = (1 - h^2)^(1/2) z + h N(0, I); accept by the penalty method.

    The proposal leaves N(0, I) invariant, which is about the posterior in learned coordinates, so
    log q(z | z') - log q(z' | z) = (|z'|^2 - |z|^2) / 2.
    """
    z = state.z
    proposed = math.sqrt(1.0 - step_size**2) * z + step_size * rng.standard_normal(z.shape)
    log_prior = prior.log_density(proposed)
    possible = bool(np.isfinite(log_prior))
    if not possible:
        proposed = z  # query all the same: every iteration makes the same number of releases
    value, noise_sd = queries.log_ratio(z, proposed)
    public = log_prior - state.log_prior + 0.5 * (proposed @ proposed - z @ z)
    log_accept = value + public - 0.5 * noise_sd**2  # Ceperley & Dewing (1999)
    accepted = possible and -rng.standard_exponential() < log_accept
    return (State(proposed, log_prior) if accepted else state), Info(accepted)


# kernel: end


# step: begin
class DPCrankNicolson(PrivateStep):
    """The kernel as a step of PyMC.

    Parameters
    ----------
    step_size : float, default 0.5
        h, between 0 and 1.
    **kwargs
        draws, tune, chains and other arguments of all private steps.
    """

    name = "dp_crank_nicolson"

    def __init__(self, vars=None, *, step_size=0.5, **kwargs):
        if not 0.0 < step_size < 1.0:
            raise ValueError(f"step_size must be between 0 and 1, got {step_size}.")
        self.step_size = step_size
        super().__init__(
            vars, shares={"log_ratio": 1.0}, settings={"step_size": step_size}, **kwargs
        )

    def _releases(self):
        return {"log_ratio": 1}, {}  # in each iteration; at the start of a chain

    def _prepare(self, preparing: Preparing) -> Design:
        found, design = learn_coordinates(preparing)  # and clip norms, privately
        clip_norms = {"log_ratio": found.clip_norms["log_ratio"]}
        return replace(design, clip_norms=clip_norms, shares={"log_ratio": 1.0})

    def _initial_state(self, z):
        return State(z, self.prior.log_density(z))

    def _transition(self, state, iteration):
        state, info = transition(
            self.rng, state, self.queries, self.prior, step_size=self.step_size
        )
        return state, info.accepted


# step: end


def main() -> None:
    """Fit a logistic regression of simulated data at a large budget."""
    rng = np.random.default_rng(5)
    x = np.c_[np.ones(20_000), rng.normal(size=(20_000, 2))]
    y = rng.random(20_000) < 1 / (1 + np.exp(-x @ [0.5, 1.0, -1.0]))
    with pm.Model():
        beta = pm.Normal("beta", 0, 2, shape=3)
        pm.Bernoulli("y", logit_p=x @ beta, observed=y.astype(int))
        dp.PrivacyBudget(epsilon=10.0, delta=1e-6)
        released = dp.sample(
            200, chains=2, step=DPCrankNicolson, step_kwargs={"step_size": 0.2}, progressbar=False
        )
    print(dp.privacy_statement(released))
    print("means", released["posterior"]["beta"].mean(("chain", "draw")).values.round(3))
    print("accepted", float(released["sample_stats"]["dp_accepted"].mean()))


if __name__ == "__main__":
    main()
