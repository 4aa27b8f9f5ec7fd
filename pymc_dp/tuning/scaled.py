"""What DPHMC and DPPenalty need before their chains can run: coordinates, clip norms, moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pymc_dp.base.matrices import root
from pymc_dp.rows.contributions import LongestEntry, Score
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.tuning.answers import Answers, Releases, Structure
from pymc_dp.tuning.bulk import find_bulk
from pymc_dp.tuning.langevin import WARM_UP
from pymc_dp.tuning.paths import LOOK
from pymc_dp.tuning.prepared import Clipping, tail_of_scores
from pymc_dp.tuning.public import Density, Public
from pymc_dp.tuning.quantiles import tail_quantile

#: Standard deviation of the log acceptance ratio, signal and noise together, at which mean squared
#: jumps are longest: v 2 Phi(-v^(1/2) / 2) is greatest at v = 2.38^2, where 23 % are accepted
#: (Roberts, Gelman & Gilks 1997 for the signal, Ceperley & Dewing 1999 for the noise).
LOUDEST = 2.38
#: Longest leapfrog step, times d^(1/4): its energy error has a variance below 0.1 where widths are
#: known to a factor of 1.5.
STEP = 1.1
#: Norm of nearly all scores, in units of sqrt(d/n), and of nearly all projections of scores on a
#: direction, in units of 1/sqrt(n), where the posterior is whitened.
SCORE, PROJECTION = 3.5, 4.5
#: Most steps of a trajectory, if only their size is given.
MANY = 20
#: Noise in the place where chains start, in posterior sds, and the least and the most of the budget
#: for it: the search of the bulk has spent 2 % on its last score.
CENTRE, LEAST, MOST = 0.5, 0.02, 0.25
#: Parts of that for two Newton steps: as the curvature is noisy too, the first leaves an error that
#: the second divides again.
NEWTON = (0.2, 0.8)
#: Part of the budget for a look at the tail of the projections: what it hides biases the draws.
LONG_LOOK = 0.06
#: The most of the budget for all of this without the last steps to the centre: the search may take
#: twice as long as planned.
FIRST_PART = 2.0 * WARM_UP + LOOK + LONG_LOOK
#: Number of directions on which scores are projected.
DIRECTIONS = 4


@dataclass(frozen=True)
class Scaled:
    """Coordinates in which the posterior is about N(0, I), and how long scores are there.

    `clip_norms` are "gradient", of scores, and "log_ratio", of log-likelihood ratios per unit of
    distance.  `left` is the squared mu that is left for the chains.  `trusted` is False where the
    budget could not tell the records from the noise: these are then the prior's coordinates, and a
    guess.
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
    releases: Releases,
    density: Density,
    start: Coordinates,
    structure: Structure,
    *,
    sensitivity: float = 2.0,
    flat: bool = False,
    centred: bool = True,
    along_axes: bool = False,
    consistent: bool = False,
) -> Scaled:
    """The same search as for DPLangevin, two looks at the scores, last steps to their zero.

    Parameters
    ----------
    releases, density, start, structure, sensitivity, flat
        As for `pymc_dp.tuning.langevin.prepare_langevin`.
    centred : bool, default True
        Whether to make the last steps to the centre; without them at most `FIRST_PART` is spent,
        also by a search that does not arrive.
    along_axes : bool, default False
        Whether the chains move along the axes of z, not in random directions.
    consistent : bool, default False
        The law of outcomes is known: the scores of the last steps are given back what clipping
        takes.

    Notes
    -----
    A log-likelihood ratio is about a projection of the score on the move, and moves have random
    directions: projections are shorter than scores by a factor of sqrt(d), so the bound of ratios
    per unit of distance is the upper quantile of the projections on a few directions.  Along an
    axis there may be scores of full length (those of a group, on the axis of its effect), so for
    moves along axes it is that of the longest entries.  The tail of the projections biases the
    draws (the tail of the scores only lowers acceptance), in logistic regression by about
    80 tail (n / 2e4)^(1/2) posterior sds; this is to be a sixth of the Monte-Carlo error, as far as
    the noise lets it be seen.

    Chains of a small budget hardly move from their start.  Two more scores, with noise of half a
    posterior sd if a quarter of the budget can pay for it, centre them.
    """
    n, d, total = releases.n_public, len(start.location), releases.units_mu2
    most = None if centred else FIRST_PART - LOOK - LONG_LOOK
    public = Public(density, structure, start)
    bulk = find_bulk(releases, public, start, structure, share=WARM_UP, most=most, flat=flat)
    at = Coordinates(bulk.location, root(np.linalg.inv(bulk.precision)))

    # Monte-Carlo error of the mean of long chains, see `random_walk`
    error = sensitivity * PROJECTION * math.sqrt(3.0 * d / (0.8 * total * n))
    norms = releases.histogram("scores", Score(at), LOOK)
    longest = tail_quantile(*norms, 3.0 * tail_of_scores(n), n)
    tail = min(0.003, 0.3 * error / math.sqrt(n))
    if along_axes:
        looked_at = releases.histogram("scores along the axes", LongestEntry(at), LONG_LOOK)
    else:
        looked_at = _projections(releases, at)
    # no projection is longer than its score
    found = tail_quantile(*looked_at, tail, n), tail_quantile(*norms, tail, n)
    left = 1.0 - bulk.spent - LOOK - LONG_LOOK
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
    answers = Answers(releases, structure)
    for k, part in enumerate(NEWTON if share else (), start=1):
        spec = clipping.score(at)
        score, _ = answers.score(f"centre {k}", spec, clipping.bound, part * share)
        at = Coordinates(at.theta(score + public.score(at)), at.scaling)
    shortest = min((bound for bound in found if bound), default=longest)
    clip_norms = {"gradient": longest, "log_ratio": shortest}
    return Scaled(at, clip_norms, (left - share) * total, True)


def _projections(releases: Releases, at: Coordinates) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean histogram of the scores along a few random directions; as noisy as a single one."""
    d = len(at.location)
    k = min(d, DIRECTIONS)
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((d, d)))[0]  # public
    turned = Coordinates(at.location, at.scaling @ basis)
    looks = [
        releases.histogram(f"scores along {j + 1}", Score(turned, np.array([j])), LONG_LOOK / k)
        for j in range(k)
    ]
    edges, _, noise_sd = looks[0]
    return edges, np.mean([counts for _, counts, _ in looks], axis=0), noise_sd / math.sqrt(k)


def random_walk(d: int, iterations: int, noise: float) -> float:
    """Proposal sd, per coordinate, of a random walk on N(0, I) with a noisy accept test.

    `iterations` are those of all chains together.  `noise` is the noise sd of a log-likelihood
    ratio per unit of distance, if one iteration had the whole budget.

    Notes
    -----
    The log ratio of a move of length r has variance r^2 of its own and K noise^2 r^2 of noise, if K
    iterations share the budget, and half of both as its mean, so that a fraction 2 Phi(-v^(1/2)/2)
    is accepted, v = r^2 (1 + K noise^2).  Mean squared jumps are longest at v = 2.38^2.  The
    effective draws, K r^2 / (4 d) times the fraction accepted, are then 0.33 K N / (d (K + N)) with
    N = 1 / noise^2: chains much longer than N gain nothing from more iterations, and lose nothing.
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

    Parameters
    ----------
    iterations : int
        Of all chains together.
    gradient_noise : float
        Noise sd of one released score, if it had the whole budget.
    ratio_noise : float
        The same for a log-likelihood ratio, per unit of distance.
    weight : callable
        n_steps -> number of gradients times the sum of squared kick coefficients, over n_steps^2:
        the noise of all kicks relative to that of one.
    n_steps, step_size, gradient_share
        Kept where given.

    Notes
    -----
    A trajectory of length T = L h moves by about T d^(1/2).  With the share w of the budget for
    gradients, and K iterations, their noise adds T^2 d K gradient_noise^2 weight / w to the
    variance of the log acceptance ratio, however many steps T is cut into, and that of the ratio
    T^2 d K ratio_noise^2 / (1 - w).  The sum is least where w is proportional to
    gradient_noise weight^(1/2), and the mean squared jump is longest where it is 2.38^2, or at the
    quarter turn T = pi/2, after which the start is forgotten.  Steps only have to be short enough
    for their own energy error.
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
