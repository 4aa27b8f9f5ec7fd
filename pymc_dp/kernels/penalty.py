"""Metropolis-Hastings with Gaussian noise on the log-likelihood ratio: penalty and Barker's test.

Yildirim & Ermis (2019), Exact MCMC with differentially private moves, with the correction of
Ceperley & Dewing (1999), The penalty method for random walks with uncertain energies.

Barker (1965); Seita, Pan, Chen & Canny (2017), An efficient minibatch acceptance test for
Metropolis-Hastings; Räisä (2021), section 3.2, for the private form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.special import expit, ndtr

from pymc_dp.kernels.interfaces import (
    AcceptTest,
    Array,
    Batch,
    LogRatioQueries,
    Mask,
    Prior,
    Proposal,
    Proposed,
    StatisticQueries,
    every,
    penalty_test,
    select,
    start_log_prior,
)

# -- proposals -------------------------------------------------------------------------------------
# None looks at a record.  A `scale` is a number, or (d,) with one entry per coordinate.


@dataclass(frozen=True, slots=True)
class GaussianProposal:
    """Random walk z' = z + scale * N(0, I); symmetric."""

    scale: float | Array

    def __call__(self, rng: np.random.Generator, z: Array, direction: Array) -> Proposed:
        """All coordinates move."""
        return Proposed(z + self.scale * rng.standard_normal(z.shape), 0.0, direction)


@dataclass(frozen=True, slots=True)
class OneComponentProposal:
    """Random walk of one coordinate, chosen at random, by scale * N(0, 1); symmetric. The move, and
    so the noise of its log-likelihood ratio, is less by sqrt(d) than that of all coordinates with
    the same scale (Yildirim & Ermis 2019, section 3.1).
    """

    scale: float | Array

    def __call__(self, rng: np.random.Generator, z: Array, direction: Array) -> Proposed:
        """One coordinate moves."""
        step = self.scale * rng.standard_normal(z.shape)
        return Proposed(z + np.where(_one(rng, z), step, 0.0), 0.0, direction)


@dataclass(frozen=True, slots=True)
class GuidedProposal:
    """Guided walk: one coordinate moves on in its own direction until a move is rejected.

    Every coordinate carries a direction of 1 or -1, kept where it moved and reversed where it did
    not (Gustafson 1998; Yildirim & Ermis 2019). The posterior times fair coins is stationary: a
    move and its reverse, with the direction reversed, are proposed with the same density, and the
    accept test satisfies detailed balance in the positions.
    """

    scale: float | Array

    def __call__(self, rng: np.random.Generator, z: Array, direction: Array) -> Proposed:
        """One coordinate moves in its direction."""
        one = _one(rng, z)
        step = self.scale * np.abs(rng.standard_normal(z.shape))
        return Proposed(
            z + np.where(one, direction * step, 0.0), 0.0, np.where(one, -direction, direction)
        )


@dataclass(frozen=True, slots=True)
class IndependenceProposal:
    """Draws from a Student t with 5 degrees of freedom about z = 0, wherever the chain is. In
    learned coordinates, where the posterior is about N(0, I) as was released before; the tails are
    heavier than those of most posteriors. Moves are long, and so noisy: for large budgets.
    """

    scale: float | Array

    def __call__(self, rng: np.random.Generator, z: Array, direction: Array) -> Proposed:
        """A new position, whatever the old one."""
        mixing = np.sqrt(rng.chisquare(_FREEDOM, z.shape[:-1]) / _FREEDOM)
        new = self.scale * rng.standard_normal(z.shape) / mixing[..., None]
        return Proposed(new, self._log_density(z) - self._log_density(new), direction)

    def _log_density(self, z: Array) -> Array:
        square = np.square(z / self.scale).sum(axis=-1)
        log_density: Array = -0.5 * (_FREEDOM + z.shape[-1]) * np.log1p(square / _FREEDOM)
        return log_density


_FREEDOM = 5.0


def _one(rng: np.random.Generator, z: Array) -> Array:
    """One-hot masks of a coordinate for each chain, (..., d)."""
    chosen = rng.integers(0, z.shape[-1], z.shape[:-1])
    mask: Array = np.arange(z.shape[-1]) == np.asarray(chosen)[..., None]
    return mask


# -- log-likelihood ratios of an exponential family ------------------------------------------------


@dataclass(frozen=True)
class StatisticRatios:
    """Log-likelihood ratios of an exponential family, from noisy sums of its sufficient statistic.

    With p(y|z) = h(y) exp(phi(z) . S(y) - A(z)), and S^ = sum_i S(y_i) + N(0, sd^2 I) released in
    every iteration, the log ratio of two positions is (phi(z') - phi(z)) . S^ - n (A(z') - A(z)).
    Its noise has standard deviation sd |phi(z') - phi(z)|, the same in both directions, as
    `transition` demands. Source: Yildirim & Ermis (2019), Algorithm 3.

    `n` is the public number of records. Where it is not public, 1 is an entry of the statistic,
    -A(z) is one of the natural parameters, and `n` is 0.

    *Guarantee.* One release of the sums for each ratio. *Assumptions.* The noise of the sums is
    fresh at every call, of the stated size, and the same for all entries. *Weaknesses.* All entries
    get the same noise, in whatever units they are; the caller scales them.
    """

    queries: StatisticQueries
    natural: Callable[[Array], Array]  # z -> (..., m + 1): natural parameters phi(z), then -A(z)
    n: float

    def log_ratio(self, z_from: Array, z_to: Array) -> tuple[Batch, Batch]:
        """Noisy log-likelihood ratio, and the standard deviation of its noise."""
        value, noise_sd = self.queries.statistic()
        here = self.natural(z_from)
        change = self.natural(z_to) - here
        phi = change[..., :-1]
        with np.errstate(all="ignore"):  # an overflow is a rejection, not an error
            ratio: Batch = np.vecdot(phi, value) + self.n * change[..., -1]
            sd = noise_sd * np.sqrt(np.vecdot(phi, phi))
            usable = np.isfinite(ratio) & np.isfinite(sd)
            return np.where(usable, ratio, -np.inf), np.where(usable, sd, 0.0)


# -- the transition --------------------------------------------------------------------------------


class PenaltyState(NamedTuple):
    """What the chain carries on."""

    z: Array  # (..., d)
    log_prior: Batch  # public log density at z, (...)
    direction: Array  # 1 or -1 per coordinate, (..., d); for guided proposals


class PenaltyInfo(NamedTuple):
    """Public diagnostics of one iteration, each of shape ``(...)``."""

    accepted: Mask
    log_accept: Batch  # noisy, penalised log acceptance ratio
    noise_sd: Batch  # noise of the released log-likelihood ratio
    finite: Mask  # False where it was rejected as not finite: a position, or its prior density


def initial_state(rng: np.random.Generator, z: Array, prior: Prior) -> PenaltyState:
    """State of a chain that starts at ``z``, with directions at random."""
    direction = np.where(rng.random(z.shape) < 0.5, -1.0, 1.0)
    return PenaltyState(z, start_log_prior(z, prior), direction)


def transition(
    rng: np.random.Generator,
    state: PenaltyState,
    queries: LogRatioQueries,
    prior: Prior,
    *,
    proposal: Proposal,
    likelihood_power: float = 1.0,
    test: AcceptTest = penalty_test,
) -> tuple[PenaltyState, PenaltyInfo]:
    """One iteration of the penalty method, for prior times likelihood to the power T.

    T, `likelihood_power`, multiplies the answer: to clip T r_i to T c (Yildirim & Ermis 2019) is
    the same. Accept z' when log u < R~ + log pi0(z')/pi0(z) + log q(z|z')/q(z'|z) - s^2/2, with R~
    the released sum of clipped log-likelihood ratios and s its noise standard deviation.

    *Guarantee.* The target is stationary, for any noise.

    *Assumptions.* No ratio is clipped, and s is symmetric in (z, z'). Where the model has a public
    Lipschitz bound |l_i(z') - l_i(z)| <= b |z' - z| and the clip is at least that, nothing is
    clipped.

    *Weaknesses.* Clipping biases the chain, and much more than often stated: on logistic regression
    with d = 10 and n = 2e4 to 1e5, clipping 0.5 % of the ratios moved the posterior mean by about
    1.3 posterior standard deviations, 10 to 20 % by 10 to 18. The noise must stay of order 1, so
    the step shrinks and the chain slows as the budget falls.
    """
    with np.errstate(all="ignore"):  # an overflowing proposal is a rejection, not an error
        z_new, log_q_ratio, turned = proposal(rng, state.z, state.direction)
        finite = every(np.isfinite(z_new))
        log_prior_new = prior.log_density(select(finite, z_new, state.z))
        public = log_prior_new - state.log_prior + log_q_ratio
        possible = finite & np.isfinite(public)

        z_new = select(possible, z_new, state.z)
        value, noise_sd = queries.log_ratio(state.z, z_new)
        value, noise_sd = likelihood_power * value, likelihood_power * noise_sd
        accepted, log_accept = test(rng, possible, value, noise_sd, public)

    state = PenaltyState(
        select(accepted, z_new, state.z),
        np.where(accepted, log_prior_new, state.log_prior),
        select(accepted, state.direction, turned),
    )
    return state, PenaltyInfo(accepted, log_accept, noise_sd, possible)


def releases() -> dict[str, int]:
    """Gaussian releases of one iteration, by query name."""
    return {"log_ratio": 1}


# -- Barker's test --------------------------------------------------------------------------------


#: Components of the correction: normals of this width, this far apart, out to this place.
_WIDTH, _SPAN = 0.25, 14.0
#: Where distribution functions are compared; beyond, both are 1 to within 1e-13.
_GRID = np.linspace(0.0, 30.0, 1201)


@dataclass(frozen=True, eq=False)
class Correction:
    """What is added to N(0, sd^2) so that the sum is nearly logistic: a mixture of normals."""

    sd: float
    places: Array  # (k,): the components are normals of one width about +place and -place
    weights: Array  # (k,)
    error: float  # largest difference of the distribution functions: of the sum, and logistic

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Independent draws of the correction."""
        place = rng.choice(self.places, shape, p=self.weights)
        sign = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
        draws: Array = sign * place + _WIDTH * rng.standard_normal(shape)
        return draws


@cache
def correction(sd: float) -> Correction:
    """The mixture of normals that brings N(0, sd^2) closest to the logistic distribution.

    sd < pi / 3^(1/2) = 1.81. A logistic variable is for no sd exactly a normal one plus an
    independent other: its characteristic function over the Gaussian's diverges. A linear program in
    the weights makes the largest difference of distribution functions least: 2.3e-7 for sd 1,
    2.9e-5 for 1.2, 6.5e-4 for 1.4 and 5.0e-3 for 1.6.
    """
    if not 0.0 < sd < np.pi / np.sqrt(3.0):
        raise ValueError(
            f"The noise of Barker's test must have a standard deviation between 0 and 1.81, not "
            f"{sd:g}: a logistic variable has no more."
        )
    places = np.arange(0.0, _SPAN, _WIDTH)
    cells = _components(_GRID, places, sd)
    slack = np.ones((len(_GRID), 1))
    found = linprog(
        np.r_[np.zeros(len(places)), 1.0],
        A_ub=np.block([[cells, -slack], [-cells, -slack]]),
        b_ub=np.r_[expit(_GRID), -expit(_GRID)],
        A_eq=np.r_[np.ones(len(places)), 0.0][None],
        b_eq=[1.0],
        bounds=[(0.0, None)] * (len(places) + 1),
    )
    weights = np.maximum(found.x[:-1], 0.0)
    kept = weights > 1e-12
    places, weights = places[kept], weights[kept] / weights[kept].sum()
    fine = np.linspace(0.0, _GRID[-1], 20_001)
    error = np.abs(_components(fine, places, sd) @ weights - expit(fine)).max()
    return Correction(sd, places, weights, float(error))


def _components(x: Array, places: Array, sd: float) -> Array:
    """(len(x), k) distribution functions of the components of the sum."""
    total = np.hypot(sd, _WIDTH)
    both: Array = 0.5 * sum(ndtr((x[:, None] - sign * places) / total) for sign in (-1.0, 1.0))
    return both


@dataclass(frozen=True, slots=True)
class BarkerTest:
    """Accept when log ratio + noise + correction > 0.

    Public noise fills the noise of every answer up to `noise_sd`. Proposals whose answer is noisier
    are rejected; noise, or the law of its estimate, is symmetric in the two positions, so that is
    too.

    *Guarantee.* With a logistic V, P(lambda + V > 0) / P(-lambda + V > 0) = exp(lambda): detailed
    balance. Here V is logistic up to `Correction.error`.

    *Weaknesses.* Approximate, whatever the correction. The relative error of small acceptance
    probabilities is larger than that of the distribution function. The test accepts at most half as
    many proposals as a Metropolis test. Noise with a third cumulant k changes the log odds of a
    move and its reverse by k (1 - 6 f) / 6 in first order, with f the logistic density at the log
    ratio. Where part of the noise is that of sampling, with an estimated variance v, k is its third
    cumulant less three times its covariance with v.
    """

    noise_sd: float

    def __call__(
        self, rng: np.random.Generator, possible: Mask, value: Batch, noise_sd: Batch, public: Batch
    ) -> tuple[Mask, Batch]:
        """As `pymc_dp.kernels.interfaces.penalty_test`."""
        shape = np.shape(possible)
        missing = np.square(self.noise_sd) - np.square(noise_sd)
        filled = np.sqrt(np.maximum(missing, 0.0)) * rng.standard_normal(shape)
        log_ratio = value + public + filled
        drawn = correction(self.noise_sd).draw(rng, shape)
        return possible & (missing >= 0.0) & (log_ratio + drawn > 0.0), log_ratio
