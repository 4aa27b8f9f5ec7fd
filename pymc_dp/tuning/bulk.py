"""Where the bulk of the posterior is, and how wide: private Newton steps from the prior.

Each round releases what one step needs in the coordinates that earlier rounds learned, so noise
shrinks with the distance (Biswas et al. 2020, CoinPress, for means). It is isotropic where
contributions are clipped, and proportional to the largest norm of a record. For dense predictors,
whitened coordinates make it least in posterior standard deviations. Where a record touches one
entry of an indexed parameter, one scale for the block gives the score of each of its groups the
same noise, however many there are; whitening would clip away the force of small groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import sqrtm

from pymc_dp.base.matrices import Coordinates, minus_hessian, positive_part, root, within
from pymc_dp.rows.contributions import Curvature, LongestScore, OuterProduct, Score
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.forecast import whole_curvature
from pymc_dp.tuning.model_parts import Public, unseen
from pymc_dp.tuning.releases import Clipping, CurvatureNoise, ScoreNoise, Shares, tail_quantile

WARM_UP = 0.12  # part of the budget for a search
PERSISTENCE = 13.0 / 3.0  # most that a search may cost, in units of the planned part of the budget
LONGEST = 100.0  # largest width of a parameter that no record sees, in widths of the prior
ROUNDS = 50  # before the last ones
PATIENCE = 2  # most times that one step is shortened
LOOK = 0.35  # part of a release's budget for the histogram that finds its clip norm
LEAST = 0.002  # least share of a round: noise that hides a few per cent hides rare events
DEARER = 3.0  # cost of a round after one whose noise hid what was left to learn
BENT = 0.3  # error of a step where the posterior is not normal, as a part of it
FINEST = 0.1  # no place is said to be nearer to the mode than this, in posterior sds
WIDENS = 0.5  # of the noise in a hidden curvature: coordinates too narrow would hide it for good
_CHEAPER = 0.999  # cost of whitened groups over that of others: not for rounding to decide
TAIL = 0.01  # fraction of the scores that may be clipped while the bulk is looked for

Gradient = Callable[[np.ndarray], np.ndarray]  # of the public log density, in theta


@dataclass(frozen=True)
class Bulk:
    """A released Gaussian approximation of the posterior, in theta; shapes (d,) and (d, d).

    `location` is about the mode. `data_precision` is the curvature of the log-likelihood, positive
    semidefinite; `precision` that of the posterior, with absolute eigenvalues raised to their
    noise. `arrived` is False where the noise hid the records or the last steps were longer than
    noise; `known` is False where noise hides the curvature of a direction. `unsure` (d, d) is the
    covariance of the mode about the location, as far as the search can tell.
    """

    location: np.ndarray
    data_precision: np.ndarray
    precision: np.ndarray
    arrived: bool
    known: bool
    unsure: np.ndarray


def prior_curvature(gradient: Gradient, at: Coordinates, step: float = 1e-3) -> np.ndarray:
    """(d, d) minus the Hessian in z of the public log density at z = 0, by central differences."""
    d = len(at.location)
    curvature = minus_hessian(
        lambda z: at.scaling.T @ gradient(at.theta(z)), np.zeros(d), np.full(d, step)
    )
    return np.where(np.isfinite(curvature), curvature, 0.0)


def scaling_of(
    precision: np.ndarray, location: np.ndarray, structure: RowEngine, n: int
) -> np.ndarray:
    """The (d, d) scaling of the coordinates in which contributions are clipped about a place."""
    blocks, effects = structure.effects(location)
    back = np.linalg.inv(effects)  # units see the entries of the blocks in theta' = T theta
    hidden = unseen(structure, location)
    return np.asarray(back @ clip_scaling(back.T @ precision @ back, blocks, n, hidden))


def find_bulk(
    budget: Shares,
    public: Public,
    start: Coordinates,
    *,
    share: float = WARM_UP,
    most: float | None = None,
    flat: bool = False,
    counts: bool = False,
    price: float | None = None,
) -> Bulk:
    """Private Newton steps from `start` (location and widths of the prior) to the bulk.

    `share` is the part of the budget to spend; a search that has not arrived may go on to `most`
    (default `PERSISTENCE` times `share`). `flat`: log-likelihoods are piecewise linear, so outer
    products of scores stand for their curvature. `counts`: outcomes are counts or choices, so
    bounds come from the longest score of any outcome, as rare ones would be clipped. With `price`,
    the noise variance of all entries of a sum for a bound of 1 and the whole budget, scores after a
    step within the noise get the cheapest bound, and what that clips is given back.

    A round steps by (|H| + lambda D)^-1 (G + prior gradient): |H| is the released curvature of the
    log posterior, eigenvalues in absolute value (Dauphin et al. 2014) and at least the size of
    their noise, D the inverse prior variances, and lambda keeps the step in a trust region
    (More 1978). Coordinates of the next round have only half of that noise, as the curvature may be
    less. The next score judges a step: it is shortened if it went too far, and prolonged, without
    another curvature, if it did not change the score. Unseen parameters follow (`Public.settled`).
    """
    d, n = len(start.location), budget.n
    kind = OuterProduct if flat else Curvature
    search = _Search(budget, public, start, kind, LongestScore if counts else Score, price)
    # enough noise-free digits for a step in the right direction while all scores agree
    cost = min(max((9e5 + 200.0 * d**2) / n**2 / budget.total, LEAST), share / 12.0)
    while budget.spent + 2.0 * cost < share and search.rounds < ROUNDS:
        if search.advance(cost):
            cost *= DEARER
    last = (share - budget.spent) / 2.0
    for _ in range(2):
        search.advance(last)
    cost = max(cost, share / 6.0)
    look = share / 3.0
    limit = (PERSISTENCE * share if most is None else most) - look
    while not (search.arrived and search.known) and budget.spent + cost < limit:
        hidden = search.advance(cost)
        if hidden and not search.known:  # within the noise, which is too much
            cost = min(1.5 * cost, max(limit - budget.spent, cost))
    if not search.arrived:  # one more score tells whether it ended in the right place
        clipping = search.clipping("last look:", look)
        if clipping and clipping.bound:
            score, noise = search.score("last look:", clipping, look)
            search.arrived = search.near(score + public.score(search.at), noise)
    found = search.at.location, search.data_precision, search.precision
    return Bulk(*found, search.arrived, search.known, search.unsure)


@dataclass(eq=False)
class _Search:
    budget: Shares
    public: Public
    at: Coordinates
    kind: type[Curvature]
    norms: type[Score] | type[LongestScore]
    price: float | None
    rounds: int = 0
    visible: float = 0.0  # share of a round at which scores could be told from noise
    step: np.ndarray | None = None  # the last one, in theta
    shortened: int = 0  # times in a row
    rise: float = 0.0  # slope of the log posterior along it, where it began
    arrived: bool = False
    known: bool = False

    def __post_init__(self) -> None:
        self.n, self.d = self.budget.n, len(self.at.location)
        self.radius = math.sqrt(self.d)
        self.metric = self.precision = np.diag(self.public.spread**-2.0)
        self.data_precision = np.zeros((self.d, self.d))
        # covariance of the mode about the place; the width of a flat prior is made up
        bent = prior_curvature(self.public.gradient, self.at).diagonal()
        self.unsure = np.diag(self.public.spread**2 / np.clip(bent, LONGEST**-2, 1.0))

    def advance(self, share: float) -> bool:
        """One round; True if its step was within the noise."""
        self.rounds += 1
        label = f"round {self.rounds}:"
        clipping = self.clipping(label, 0.5 * share)
        # noise that scores stood out of once may hide the next ones by chance
        if clipping is None and (self.step is None or share < 2.0 * self.visible):
            self.known = False  # nor is the curvature here seen: the next round becomes dearer
            return True
        if not clipping or not clipping.bound:  # they overflowed, or spread over many octaves
            if self.step is not None:  # which was far too long
                self.shortened = 0
                self.shorten(0.25)
            return False
        self.visible = share
        score, noise = self.score(label, clipping, 0.5 * share)
        total = score + self.public.score(self.at)
        if self.step is not None and not self.near(total, noise):
            along = np.linalg.solve(self.at.scaling, self.step)
            slope = float(total @ along)
            unsure = 3.0 * noise.sd * float(np.linalg.norm(along[noise.reach]))
            if slope < -0.6 * self.rise - unsure and self.shortened < PATIENCE:
                self.shorten(self.rise / (self.rise - slope))
                return False
            if slope > 0.6 * self.rise + unsure:
                self.prolong(slope)
                return False
            if self.shortened == PATIENCE:
                # the direction was wrong, from before rare records were seen, not the length
                self.radius = math.sqrt(self.d)
            self.shortened = 0
            if self.step @ self.metric @ self.step > 0.5 * self.radius**2:
                self.radius *= 2.0
        return self.newton(label, 0.5 * share, total, noise)

    def near(self, total: np.ndarray, noise: ScoreNoise) -> bool:
        """Whether a score is no more than its noise, by the curvature that is known."""
        hessian = self.at.scaling.T @ self.precision @ self.at.scaling
        decrement = float(total @ np.linalg.solve(hessian, total))
        explained = noise.sd**2 * float(np.linalg.inv(hessian).diagonal()[noise.reach].sum())
        return decrement < 4.0 * explained + self.d

    # -- releases -------------------------------------------------------------------------------

    def clipping(self, label: str, share: float) -> Clipping | None:
        """How scores are clipped, for a part of their share; None where noise hides them."""
        histogram = self.budget.histogram(f"{label} score norms", self.norms(self.at), LOOK * share)
        bound = tail_quantile(histogram, TAIL, self.n)
        if bound is None:
            return None
        if self.price is None or not self.arrived:
            return Clipping(bound)
        price = self.price / ((1.0 - LOOK) * share)
        return Clipping.consistent(histogram, price, bound, self.n) or Clipping(bound)

    def score(self, label: str, clipping: Clipping, share: float) -> tuple[np.ndarray, ScoreNoise]:
        """Release it with what the histogram left of its share."""
        spec = clipping.score(self.at)
        return self.budget.score(f"{label} score", spec, clipping.bound, (1.0 - LOOK) * share)

    def curvature(
        self, label: str, share: float
    ) -> tuple[np.ndarray, CurvatureNoise | None] | None:
        """Released curvature in z, and its noise if any; None where hidden."""
        whole = whole_curvature(self.n, self.d, self.budget.total)
        spec = self.kind(self.at, diagonal=not whole, step=1e-6)
        label = f"{label} curvature"
        clip_norm = self.budget.tail(f"{label} norms", spec, 2.0 * TAIL, LOOK * share)
        if clip_norm is None:
            return None
        if clip_norm == 0.0:  # a likelihood that is linear here, or does not see the parameters
            return np.zeros((self.d, self.d)), None
        return self.budget.curvature(label, spec, clip_norm, (1.0 - LOOK) * share)

    # -- steps ----------------------------------------------------------------------------------

    def newton(self, label: str, share: float, total: np.ndarray, noise: ScoreNoise) -> bool:
        """A step within the radius of trust, and new coordinates."""
        seen = self.curvature(label, share)
        if seen is None:
            self.step = None
            return True
        records, unsure = seen
        values, vectors = np.linalg.eigh(records + prior_curvature(self.public.gradient, self.at))
        # directions that no unit sees are those of the prior
        floor = 0.0 if unsure is None else unsure.norm()
        visible = np.sum(vectors[noise.reach] ** 2, axis=0)
        metric = self.at.scaling.T @ self.metric @ self.at.scaling
        flattest = max(1e-2 * float(np.linalg.eigvalsh(metric)[0]), 1e-10)
        floors = np.maximum(floor * visible, flattest)
        sizes = np.maximum(np.abs(values), floors)
        # a width of the prior that grows from step to step would leave no digits to the others
        rows = self.at.scaling[self.public.unseen] / self.public.spread[self.public.unseen, None]
        rows /= LONGEST
        hessian = (vectors * sizes) @ vectors.T + rows.T @ rows
        step = within(hessian, metric, total, self.radius)
        decrement = float(total @ step)
        explained = noise.sd**2 * float(np.sum(visible / sizes))
        back = np.linalg.inv(self.at.scaling)
        self.data_precision = back.T @ positive_part(records) @ back
        in_theta = self.at.scaling @ step
        if np.allclose(hessian @ step, total, atol=1e-6 * np.abs(total).max()):  # not cut short
            width = np.linalg.inv(hessian)
            noisy = noise.sd**2 * width[:, noise.reach] @ width[noise.reach] + FINEST**2 * width
            in_theta = self.weighed(in_theta, self.at.scaling @ noisy @ self.at.scaling.T)
        in_theta[self.public.unseen] = 0.0
        self.precision = back.T @ hessian @ back
        least = np.maximum(WIDENS * floor * visible, flattest)
        flatter = (vectors * np.maximum(np.abs(values), least)) @ vectors.T + rows.T @ rows
        place, flatter = self.at.location, back.T @ flatter @ back
        self.at = Coordinates(place, scaling_of(flatter, place, self.budget.structure, self.n))
        self.move(in_theta, float(total @ back @ in_theta))
        self.known = bool(np.all((values > 0.7 * floors) | (visible < 0.5)))
        self.arrived = decrement < 8.0 * explained + 4.0 * self.d
        return decrement < 3.0 * explained + 0.5 * self.d

    def weighed(self, step: np.ndarray, noisy: np.ndarray) -> np.ndarray:
        """The part of a step, with an error of covariance `noisy`, that all rounds together tell.

        A Kalman filter of where the mode is.  A step that earlier rounds do not allow for is taken.
        """
        gain = self.unsure @ np.linalg.inv(self.unsure + noisy)
        square = float(step @ np.linalg.solve(self.unsure + noisy, step))
        if square > self.d + 3.0 * math.sqrt(2.0 * self.d):
            gain = np.eye(self.d)
        rest = np.eye(self.d) - gain
        self.unsure = rest @ self.unsure @ rest.T + gain @ noisy @ gain.T
        return np.asarray(gain @ step)

    def move(self, step: np.ndarray, rise: float) -> None:
        self.step, self.rise = step, rise
        self.unsure = self.unsure + BENT**2 * np.outer(step, step)
        self.go(self.at.location + step)

    def go(self, place: np.ndarray) -> None:
        """Move there; the parameters that no record sees follow."""
        place = self.public.settled(place, self.precision)
        self.at = Coordinates(place, self.at.scaling)

    def shorten(self, fraction: float) -> None:
        """Take a part of the last step back."""
        self.shortened += 1
        self.arrived = False
        fraction = min(max(fraction, 0.1), 0.7)
        assert self.step is not None
        origin = self.at.location - self.step
        self.step = fraction * self.step
        self.rise *= fraction
        self.unsure = self.unsure + np.outer(self.step, self.step)
        self.radius = float(np.sqrt(self.step @ self.metric @ self.step))
        self.go(origin + self.step)

    def prolong(self, slope: float) -> None:
        """Another step the same way, up to three times as long."""
        self.arrived = False
        assert self.step is not None
        further = slope / max(self.rise - slope, slope / 3.0)
        self.radius *= 1.0 + further
        self.move(further * self.step, further * slope)


def clip_scaling(
    precision: np.ndarray,
    blocks: Sequence[np.ndarray],
    n: int,
    unseen: np.ndarray | None = None,
) -> np.ndarray:
    """The scaling A of the coordinates theta = m + A z in which contributions are clipped.

    `precision` (d, d) is about that of the posterior in theta, positive definite. `blocks` are the
    parameters that reach each of the n units through an index; the rest is dense. `unseen`
    parameters reach no unit and are kept apart. A has mean square posterior width 1 in z, of seen
    and of unseen parameters.

    With noise of sd proportional to the norm q of a record, the sum over parameters of noise
    variance over posterior variance is the trace of Sigma Q^-1 times q^2, Q = A A'. For block b
    with tr(Sigma_b Q_b^-1) = e_b and mean square norm q_b^2 = tr(Q_b W_b) / n, scaling by
    lambda_b^2 = sqrt(e_b) / q_b minimises the product of sum e_b / lambda_b^2 and sum lambda_b^2
    q_b^2 (Cauchy-Schwarz); in the dense block, so does the geometric mean of Sigma_b and W_b^-1.
    Entries of a block that depend on each other need whitening, and few groups of like sizes allow
    it: all is then taken as dense, if that product is smaller with the longest norm that a group
    may have, max Q_gg tr(W_b) / n, in the place of its mean.
    """
    d = len(precision)
    if unseen is not None and 0 < len(unseen) < d:
        seen = np.setdiff1d(np.arange(d), unseen)
        inside = [np.searchsorted(seen, block) for block in blocks]
        scaling, covariance = np.zeros((d, d)), np.linalg.inv(precision)
        marginal = np.linalg.inv(covariance[np.ix_(seen, seen)])
        scaling[np.ix_(seen, seen)] = clip_scaling(marginal, inside, n)
        scaling[np.ix_(unseen, unseen)] = root(covariance[np.ix_(unseen, unseen)])
        return scaling
    covariance = np.linalg.inv(precision)
    covariance = (covariance + covariance.T) / 2.0

    def cost(scaling: np.ndarray) -> float:
        """Noise variance over posterior variance, by the longest norms that groups may have."""
        square = scaling @ scaling.T
        lengths = square * precision
        norm = float(lengths.sum())
        for block in blocks:
            own = np.ix_(block, block)
            longest = float(square[own].diagonal().max() * precision[own].diagonal().sum())
            norm += longest - float(lengths[own].sum())
        return norm * float(np.trace(np.linalg.solve(square, covariance)))

    scaling = _by_block(covariance, precision, blocks, n)
    if blocks:  # few groups of like sizes: as if each were a dense predictor
        white = _by_block(covariance, precision, [], n)
        if cost(white) < _CHEAPER * cost(scaling):
            scaling = white
    inner = np.linalg.solve(scaling, covariance) @ np.linalg.inv(scaling).T
    return np.asarray(scaling * np.sqrt(np.trace(inner) / d))


def _by_block(
    covariance: np.ndarray, precision: np.ndarray, blocks: Sequence[np.ndarray], n: int
) -> np.ndarray:
    """The best scaling with one scale for each block, whatever its size."""
    d = len(precision)
    indexed = np.concatenate(blocks) if blocks else np.empty(0, dtype=int)
    dense = np.setdiff1d(np.arange(d), indexed)
    scaling = np.zeros((d, d))
    for block in [dense, *blocks]:
        if block.size == 0:
            continue
        where = np.ix_(block, block)
        sigma, weight = covariance[where], precision[where]
        if block is dense:
            # A # B = A^1/2 (A^-1/2 B A^-1/2)^1/2 A^1/2 of Sigma and W^-1
            half = root(sigma)
            inner = np.linalg.solve(half, np.linalg.solve(half, np.linalg.inv(weight)).T)
            shape = root(half @ np.real(sqrtm((inner + inner.T) / 2.0)) @ half.T)
        else:
            shape = np.eye(len(block))
        square = shape @ shape.T
        error = float(np.trace(np.linalg.solve(square, sigma)))
        norm = float(np.sqrt(np.trace(square @ weight) / n))
        scaling[where] = np.sqrt(np.sqrt(error) / norm) * shape
    return scaling
