"""Small stand-ins for the tests of privacy: records without a model, and a model of few records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pymc as pm

import pymc_dp as dp
from pymc_dp.privacy.accounting import GaussianEvent
from pymc_dp.privacy.answer import Receipt
from pymc_dp.privacy.chains import Queries
from pymc_dp.rows.loops import SparseBlock

DELTA = 1e-6
#: Settings that make a step valid; the samplers need not mix here.
SETTINGS = {
    "DPPenalty": {"step_size": 0.3, "clip_norm": 1.5, "scaling": 1.0},
    "DPHMC": {"step_size": 0.2, "n_steps": 2, "clip_norm": 1.5, "scaling": 1.0},
    "DPLangevin": {"step_size": 0.3, "curvature": 0.5, "clip_norm": 1.5, "scaling": 1.0},
}
_serial = itertools.count()


class FreeMeter:
    """Every iteration is paid for, or the next `left` ones."""

    plan_id = 0

    def __init__(self, left: float = math.inf) -> None:
        self.left = left
        self.per_iteration: list[tuple[str, float, int]] = []
        self.at_start: list[tuple[str, float, int]] = []

    def refuse_other_threads(self) -> None:
        pass

    def begin_chain(self) -> Receipt:
        return Receipt(self.at_start)

    def begin_iteration(self) -> Receipt | None:
        self.left -= 1
        return Receipt(self.per_iteration) if self.left >= 0 else None


class LinearRecords:
    """A row engine whose records have log-likelihood ``x_i . z`` and score ``x_i``.

    ``log_likelihoods`` replaces the log-likelihoods by those of a function of z, to put any values
    before the clip; ``reads`` counts the calls that look at records.
    """

    elsewhere = None

    def __init__(self, rows, log_likelihood=None):
        self.rows = np.asarray(rows, dtype=float)
        self.n_units, self.d = self.rows.shape
        self._log_likelihood = log_likelihood
        self.reads = 0

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        self.reads += 1
        if self._log_likelihood is not None:
            return self._log_likelihood(z)
        return self.rows @ z

    def scores(self, z: np.ndarray) -> np.ndarray:
        self.reads += 1
        return self.rows

    def vectors(self, scores: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        yield slice(0, self.n_units), np.ascontiguousarray(scores.T)

    one_row_per_unit = False

    def sparse_vectors(
        self, scores: np.ndarray, units: slice
    ) -> Iterator[tuple[slice, SparseBlock]]:
        for where, block in self.vectors(scores):
            yield where, SparseBlock.full(block)

    def linear(self):
        return None

    def forget(self):
        pass

    def work(self, scores, start, end, scale):
        self.reads += 1
        return scale * (scores @ (end - start))


class VectorRecords:
    """An engine of one-off releases whose units contribute the rows of a matrix.

    ``reads`` counts the evaluations, those on made-up data not included.
    """

    elsewhere = None

    def __init__(self, rows, block=3):
        self.rows = np.asarray(rows, dtype=float)
        self.n_units, self.d = self.rows.shape
        self.block = block
        self.reads = 0

    def synthetic(self, value=0, first=0, last=None) -> VectorRecords:
        return VectorRecords(np.zeros((4, self.d))[first:last])


@dataclass(frozen=True)
class Rows:
    """What the units of `VectorRecords` contribute: their rows."""

    size: int
    nonnegative = False

    def blocks(self, engine: VectorRecords) -> Iterator[tuple[slice, np.ndarray]]:
        engine.reads += 1
        for start in range(0, engine.n_units, engine.block):
            where = slice(start, min(start + engine.block, engine.n_units))
            yield where, engine.rows[where].T.copy()  # it may be overwritten


#: What `Rows` do unless a test replaces it.
vector_blocks = Rows.blocks


class NormalPrior:
    """A standard normal prior."""

    def log_density(self, z):
        return -0.5 * float(z @ z)

    def gradient(self, z):
        return -z


def make_queries(
    engine,
    noise_multipliers: Mapping[str, float],
    clip_norms: Mapping[str, float],
    *,
    neighboring="replace_one",
    per_iteration: Mapping[str, int] | None = None,
    meter=None,
    n_public=None,
) -> Queries:
    """The door of the package to `engine`, with one chain begun."""
    meter, counts = meter or FreeMeter(), per_iteration or dict.fromkeys(noise_multipliers, 1000)
    meter.per_iteration = [(name, noise_multipliers[name], n) for name, n in counts.items()]
    queries = Queries(
        engine,
        meter,
        {name: GaussianEvent(name, tau) for name, tau in noise_multipliers.items()},
        clip_norms,
        neighboring,
        n_public or engine.n_units,
    )
    queries.begin_chain()
    return queries


def logistic_model(epsilon=5.0, *, n=40, data_seed=None, **budget) -> pm.Model:
    """A budgeted logistic regression, with other data at every call unless `data_seed` is given."""
    rng = np.random.default_rng([1, next(_serial)] if data_seed is None else data_seed)
    with pm.Model() as model:
        a = pm.Normal("a", 0, 2)
        b = pm.Normal("b", 0, 2)
        pm.Bernoulli("y", logit_p=a + b * rng.uniform(-1, 1, n), observed=rng.integers(0, 2, n))
        dp.PrivacyBudget(epsilon=epsilon, delta=DELTA, **budget)
    return model


def make_step(model: pm.Model, name="DPPenalty", *, draws=5, tune=0, chains=1, **kwargs):
    """A step of the given class for `model`."""
    settings = SETTINGS[name] | kwargs
    return getattr(dp, name)(draws=draws, tune=tune, chains=chains, model=model, **settings)


def sample(model: pm.Model, step, *, beside=(), order=1, **kwargs):
    """``pm.sample`` as planned, quietly; `beside` are other steps, before it if `order` is -1."""
    plan = step.plan
    arguments = {"cores": 1, "progressbar": False, "compute_convergence_checks": False}
    return pm.sample(
        draws=plan.draws,
        tune=plan.tune,
        chains=plan.chains,
        step=[step, *beside][::order] if beside else step,
        model=model,
        **arguments | kwargs,
    )
