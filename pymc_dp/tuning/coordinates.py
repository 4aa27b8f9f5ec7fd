"""What the other samplers need before their chains can run: coordinates, clip norms, moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pymc_dp.base.matrices import Coordinates, minus_hessian, root
from pymc_dp.kernels.interfaces import Prior
from pymc_dp.rows.contributions import LongestEntry, Score, Statistic, law_unknown
from pymc_dp.tuning.bulk import WARM_UP, find_bulk
from pymc_dp.tuning.forecast import PROJECTION, SCORE
from pymc_dp.tuning.forms import LOOK
from pymc_dp.tuning.model_parts import (
    Density,
    Design,
    Public,
    compile_rows,
    find_mode,
    piecewise_linear,
)
from pymc_dp.tuning.preparing import Preparing
from pymc_dp.tuning.releases import Clipping, Shares, tail_of_scores, tail_quantile

#: Sd of the log acceptance ratio, signal and noise, with the longest mean squared jumps; 23 % are
#: accepted (Roberts, Gelman & Gilks 1997; for noise Ceperley & Dewing 1999).
LOUDEST = 2.38
STEP = 1.1  # longest leapfrog step, times d^(1/4): the variance of its energy error is below 0.1
MANY = 20  # most steps of a trajectory, if only their size is given
CENTRE, LEAST, MOST = 0.5, 0.02, 0.25  # noise in the start, in posterior sds; budget parts
NEWTON = (0.2, 0.8)  # parts of that for two steps, as noise in the curvature leaves an error in one
STATISTIC = 0.05  # the least part for the start of an exponential family
LONG_LOOK = 0.06  # part for the tail of the projections: what it hides biases the draws
#: The most for all of this without the last steps; the search may take twice what is planned.
FIRST_PART = 2.0 * WARM_UP + LOOK + LONG_LOOK
DIRECTIONS = 4  # directions on which scores are projected


@dataclass(frozen=True)
class Scaled:
    """Coordinates in which the posterior is about N(0, I), and how long scores are there.

    `clip_norms` are "gradient", of scores, and "log_ratio", of log-likelihood ratios per unit of
    distance. `left` is the squared mu for the chains. `trusted` is False where the noise hid the
    records: these are then the prior's coordinates, and a guess.
    """

    coordinates: Coordinates
    clip_norms: dict[str, float]
    left: float
    trusted: bool


@dataclass(frozen=True)
class Trajectory:
    """How DPHMC moves."""

    n_steps: int
    step_size: float
    gradient_share: float


def prepare_scaled(
    budget: Shares,
    density: Density,
    start: Coordinates,
    *,
    sensitivity: float = 2.0,
    flat: bool = False,
    centred: bool = True,
    along_axes: bool = False,
    consistent: bool = False,
) -> Scaled:
    """The same search as for DPLangevin, two looks at the scores, last steps to their zero.

    Arguments as for `pymc_dp.tuning.choice.prepare_langevin`; `consistent` concerns the last steps.
    Without these (`centred` False) at most `FIRST_PART` is spent. `along_axes`: chains move along
    the axes of z.

    A log-likelihood ratio is about a projection of the score on the move. In random directions
    projections are shorter than scores by sqrt(d), so ratios per unit of distance are clipped to
    their upper quantile on a few directions. Along an axis a score may have its full length (that
    of a group, on the axis of its effect), so there it is a quantile of the longest entries. The
    tail of the projections biases the draws (that of the scores only lowers acceptance), in
    logistic regression by about 80 tail (n / 2e4)^(1/2) posterior sds; it is kept to a sixth of the
    Monte-Carlo error, as far as noise allows. Chains of a small budget hardly move, so two more
    scores centre their start.
    """
    n, d, total = budget.n, len(start.location), budget.total
    most = None if centred else FIRST_PART - LOOK - LONG_LOOK
    public = Public(density, budget.structure, start)
    bulk = find_bulk(budget, public, start, most=most, flat=flat)
    left = 1.0 - budget.spent - LOOK - LONG_LOOK
    at = Coordinates(bulk.location, root(np.linalg.inv(bulk.precision)))

    # Monte-Carlo error of the mean of long chains, see `random_walk`
    error = sensitivity * PROJECTION * math.sqrt(3.0 * d / (0.8 * total * n))
    norms = budget.histogram("scores", Score(at), LOOK)
    longest = tail_quantile(norms, 3.0 * tail_of_scores(n), n)
    tail = min(0.003, 0.3 * error / math.sqrt(n))
    if along_axes:
        looked_at = budget.histogram("scores along the axes", LongestEntry(at), LONG_LOOK)
    else:  # random directions, whose mean histogram is as noisy as a single one
        k = min(d, DIRECTIONS)
        basis = np.linalg.qr(np.random.default_rng(0).standard_normal((d, d)))[0]  # public
        turned = Coordinates(at.location, at.scaling @ basis)
        looks = [
            budget.histogram(f"scores along {j + 1}", Score(turned, np.array([j])), LONG_LOOK / k)
            for j in range(k)
        ]
        counts = np.mean([look.counts for look in looks], axis=0)
        looked_at = looks[0]._replace(counts=counts, noise_sd=looks[0].noise_sd / math.sqrt(k))
    # no projection is longer than its score
    found = tail_quantile(looked_at, tail, n), tail_quantile(norms, tail, n)
    if not bulk.arrived or not longest:
        # scores of a prior's width are about this long if n records add up to its precision
        guess = {"gradient": SCORE * math.sqrt(d / n), "log_ratio": PROJECTION / math.sqrt(n)}
        return Scaled(start, guess, left * total, False)
    share = min((sensitivity * longest / CENTRE) ** 2 / total, MOST)
    if share < LEAST or not centred:  # the last score of the search was as good
        share = 0.0
    clipping = Clipping(longest)
    if consistent and share:
        price = d * sensitivity**2 / (NEWTON[-1] * share * total)
        clipping = Clipping.consistent(norms, price, longest, n) or clipping
    for k, part in enumerate(NEWTON if share else (), start=1):
        spec = clipping.score(at)
        score, _ = budget.score(f"centre {k}", spec, clipping.bound, part * share)
        at = Coordinates(at.theta(score + public.score(at)), at.scaling)
    shortest = min((bound for bound in found if bound), default=longest)
    clip_norms = {"gradient": longest, "log_ratio": shortest}
    return Scaled(at, clip_norms, (left - share) * total, True)


def learn_coordinates(
    preparing: Preparing, centred: bool = True, along_axes: bool = False
) -> tuple[Scaled, Design]:
    """A design in coordinates that are learned privately; see `prepare_scaled`."""
    parts = preparing.parts
    start, engine = parts.start, parts.engine
    compile_rows(engine, preparing.progressbar)

    def ask(budget: Shares) -> Scaled:
        return prepare_scaled(
            budget,
            parts.terms,
            start,
            sensitivity=parts.budget.sensitivity,
            flat=piecewise_linear(engine),
            centred=centred,
            along_axes=along_axes,
            consistent=not law_unknown(engine),
        )

    needed = 1.0 if centred else FIRST_PART
    found = preparing.prepared(ask, {"along_axes": along_axes}, needed=needed)
    if not found.trusted:
        preparing.warn_untrusted()
    design = parts.design(found.coordinates, {}, {"trusted": found.trusted})
    preparing.tell_threads(design.engine)
    return found, design


def random_walk(d: int, iterations: int, noise: float) -> float:
    """Proposal sd, per coordinate, of a random walk on N(0, I) with a noisy accept test.

    `noise` is the sd of a log-likelihood ratio per unit of distance, if one of the K iterations
    (of all chains) had the whole budget. The log ratio of a move of length r has variance r^2 of
    its own, K noise^2 r^2 of noise, and half of both as its mean, so a fraction 2 Phi(-v^(1/2)/2)
    is accepted, v = r^2 (1 + K noise^2). Mean squared jumps are longest at v = 2.38^2. The
    effective draws, K r^2 / (4 d) times the fraction accepted, are then 0.33 K N / (d (K + N)) with
    N = 1 / noise^2: chains much longer than N neither gain nor lose from more iterations.
    """
    return LOUDEST / math.sqrt(d * (1.0 + iterations * noise**2))


def trajectory(
    d: int,
    iterations: int,
    gradient_noise: float,
    ratio_noise: float,
    weight: Callable[[int], float],
    *,
    n_steps: int | None = None,
    step_size: float | None = None,
    gradient_share: float | None = None,
) -> Trajectory:
    """Steps of noisy Hamiltonian trajectories on N(0, I), and what to spend on gradients.

    `gradient_noise` is the noise sd of one score with the whole budget; `ratio_noise` that of a
    log-likelihood ratio, per unit of distance. ``weight(n_steps)`` is the noise of all kicks
    relative to that of one: the number of gradients times the sum of squared kick coefficients,
    over n_steps^2.

    A trajectory of length T = L h moves by about T d^(1/2). With the share w of the budget for
    gradients and K `iterations` of all chains, their noise adds T^2 d K gradient_noise^2 weight / w
    to the variance of the log acceptance ratio, however T is cut into steps, and that of the ratio
    T^2 d K ratio_noise^2 / (1 - w). The sum is least at w proportional to gradient_noise
    weight^(1/2). Mean squared jumps are longest where the variance is 2.38^2, or at the quarter
    turn T = pi/2. Steps only have to be short enough for their own energy error.
    """
    longest = STEP * d**-0.25

    def turn(steps: int) -> tuple[float, float]:
        kicks = gradient_noise * math.sqrt(weight(steps))
        share = kicks / (kicks + ratio_noise) if gradient_share is None else gradient_share
        noise = math.sqrt(kicks**2 / share + ratio_noise**2 / (1.0 - share))
        return min(math.pi / 2.0, LOUDEST / (noise * math.sqrt(d * iterations))), share

    if n_steps is None and step_size is not None:
        n_steps = min(max(round(turn(1)[0] / step_size), 1), MANY)
    if n_steps is None:
        n_steps = 1
        while turn(n_steps)[0] > n_steps * longest:
            n_steps += 1
    length, share = turn(n_steps)
    return Trajectory(n_steps, step_size or min(length / n_steps, longest), share)


# -- exponential families -------------------------------------------------------------------------


class Natural(Protocol):
    """A statistic; natural parameters and minus the log-normaliser, in unconstrained parameters."""

    @property
    def statistic(self) -> Statistic:
        """(m,) of a record."""

    @property
    def n(self) -> float:
        """Public factor of the log-normaliser; 0 if the number of records is an entry."""

    def natural(self, theta: np.ndarray) -> np.ndarray:
        """(m + 1,)"""

    def jacobian(self, theta: np.ndarray) -> np.ndarray:
        """(m + 1, d)"""


@dataclass(frozen=True)
class Start:
    """About where the posterior is: `coordinates` make it about N(0, I).

    `noise` is the noise sd of a log-likelihood ratio per unit of distance (root mean square over
    directions), if one release had the whole budget. Where no mode was found, `trusted` is False,
    and the coordinates are the prior's.
    """

    coordinates: Coordinates
    noise: float
    spent: float
    total: float  # squared mu of which `spent` is a part
    trusted: bool


@dataclass(frozen=True, eq=False)
class _Noisy:
    """The posterior of a noisy statistic, taken for the true one; in coordinates z."""

    model: Natural
    prior: Prior
    value: np.ndarray
    at: Coordinates
    restraint: float
    centre: np.ndarray  # natural parameters at the location

    def log_density(self, z: np.ndarray) -> float:
        theta = self.at.theta(z)
        natural = self.model.natural(theta)
        away = natural[:-1] - self.centre
        known = natural @ self.value + self.prior.log_density(theta)
        return float(known - 0.5 * self.restraint * (away @ away))

    def gradient(self, z: np.ndarray) -> np.ndarray:
        theta = self.at.theta(z)
        slope = self.value.copy()
        slope[:-1] -= self.restraint * (self.model.natural(theta)[:-1] - self.centre)
        found = self.model.jacobian(theta).T @ slope + self.prior.gradient(theta)
        return np.asarray(self.at.scaling.T @ found)


def prepare_statistic(budget: Shares, model: Natural, prior: Prior, start: Coordinates) -> Start:
    """Normal approximation of the posterior of a noisy statistic, by plain optimisation.

    `prior` is in unconstrained parameters, as `start`, its location and spread.

    A second release follows, of up to a quarter of the budget, where noise moves the mode by more
    than half a posterior standard deviation per parameter. Noise may bring the sums to where no
    parameter puts them (a negative variance), and the mode to infinity: then the search is repeated
    with half the variance that the noise gives a log ratio to the prior's location taken off, as in
    the accept test.
    """
    n, asked = model.n, (model.statistic, model.statistic.norm)
    value, sd = budget.vector_sum("statistic 1", *asked, STATISTIC)
    at, trusted = _mode(model, prior, start, np.append(value, n), sd)
    loud = _noise(model, at) * sd * math.sqrt(STATISTIC)
    share = min((loud / CENTRE) ** 2, MOST) - STATISTIC
    if share >= STATISTIC:
        again, other = budget.vector_sum("statistic 2", *asked, share)
        weights = sd**-2, other**-2
        value = (weights[0] * value + weights[1] * again) / sum(weights)
        sd = sum(weights) ** -0.5
        at, trusted = _mode(model, prior, start, np.append(value, n), sd)
    noise = _noise(model, at) * sd * math.sqrt(budget.spent)
    return Start(at, noise, budget.spent, budget.total, trusted)


def _noise(model: Natural, at: Coordinates) -> float:
    """Root mean square over directions of the change of phi per unit of distance."""
    change = model.jacobian(at.location)[:-1] @ at.scaling
    return float(np.linalg.norm(change)) / math.sqrt(len(at.location))


@np.errstate(all="ignore")
def _mode(
    model: Natural, prior: Prior, start: Coordinates, value: np.ndarray, sd: float
) -> tuple[Coordinates, bool]:
    centre = model.natural(start.location)[:-1]
    for restraint in (0.0, sd**2):
        target = _Noisy(model, prior, value, start, restraint, centre)
        try:
            z, precision = find_mode(target, np.eye(len(start.location)))
            hessian = minus_hessian(target.gradient, z, np.full(len(z), 1e-4))
            slope = target.gradient(z)
            left = float(slope @ np.linalg.solve(precision, slope))
            found = np.linalg.eigvalsh(hessian)[0] > 0.0 and left < 0.01
            scaling = start.scaling @ root(np.linalg.inv(precision))
        except np.linalg.LinAlgError:
            continue
        if found and np.isfinite(scaling).all():
            return Coordinates(start.theta(z), scaling), True
    return start, False
