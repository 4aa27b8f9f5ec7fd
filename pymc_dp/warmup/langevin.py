"""What DPLangevin needs before its chains can run: coordinates, bounds, the anchored score.

Released here, once, in the parent process: where the bulk is (`find_bulk`), how long score vectors
and their changes are, the anchored score itself, and the size of energy errors. What is left of the
budget pays for the chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pymc_dp.rows.contributions import Change, Contribution, Curvature, PathError, Score
from pymc_dp.rows.engine import Coordinates
from pymc_dp.warmup.bulk import FULL, Bulk, Gradient, Releases, find_bulk
from pymc_dp.warmup.geometry import clip_scaling
from pymc_dp.warmup.linear import root
from pymc_dp.warmup.quantiles import tail_quantile

__all__ = ["Form", "Prepared", "prepare_langevin", "tail_of_scores"]

Form = Literal["anchored", "plain", "quadratic"]

#: Parts of the budget: the search of the bulk, one look at a norm, the move of the origin.
WARM_UP, LOOK, RECENTRE = 0.12, 0.008, 0.02
#: A bound that nothing passes is used if it is not longer than this much of the learned one.
WORTH_IT = 1.2
#: Part for the first of the two scores that an anchor is made of.
FIRST = 0.25
#: Most that the look at the scores may cost: a bound that is too long costs more.
LONG_LOOK = 0.04
#: Least and largest parts for residual scores, and for accept tests.
KICKS, TESTS = (0.02, 0.25), (0.01, 0.10)
#: Effective draws that residual scores are to be worth, over all chains.
WANTED = 800.0
#: Effective draws per squared mu of a score of norm bound 1/2, where its noise is the friction:
#: measured on N(0, I), per kick .86 / sigma^2.
WORTH = 0.86
#: Fewer are not worth a chain that touches records.
LEAST = 200.0
#: With more noise than this, in posterior sds, the noise is the shape of what is published.
WIDE = 0.6
#: Where scores change by more than this part of themselves, an anchor saves nothing.
NONLINEAR = 0.4


@dataclass(frozen=True)
class Prepared:
    """What the chains start from; released values and public numbers only.

    The chains move in w, theta = location + clip.scaling @ basis @ w, where the posterior is about
    N(0, I); contributions are clipped in z = basis @ w.

    Attributes
    ----------
    form : {"anchored", "plain", "quadratic"}
    clip : Coordinates
        In which contributions are clipped; its location is the origin.
    basis : (d, d) ndarray
    score : (d,) ndarray
        Released score at the origin, in w; 0 in the plain form.
    covariance : (d, d) ndarray
        Of the noise in it.
    curvature : (d, d) ndarray
        Of the log-likelihood at the origin, in w: the whole likelihood of the quadratic form.
    clip_norms : dict of str to float
        "anchor", "gradient" and "energy_error", as far as the form has them.
    shares : dict of str to float
        Relative parts of the rest of the budget.
    step_size : float
    n_steps : int
    friction : float
    persistent : bool
    effective_draws : float
        What the chains' releases are worth.
    trusted : bool
        False where the budget could not tell the records from the noise.
    """

    form: Form
    clip: Coordinates
    basis: np.ndarray
    score: np.ndarray
    covariance: np.ndarray
    curvature: np.ndarray
    clip_norms: dict[str, float]
    shares: dict[str, float]
    step_size: float
    n_steps: int
    friction: float
    persistent: bool
    effective_draws: float
    trusted: bool

    @property
    def radius(self) -> float:
        """Of the ball in w that anchored chains stay in: no normal draw comes near its edge."""
        return 8.0 * math.sqrt(len(self.score)) + 20.0

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates w of the chains."""
        return Coordinates(self.clip.location, self.clip.scaling @ self.basis)


def tail_of_scores(n: int) -> float:
    """Fraction of the scores that an anchor may clip.

    With 0.3 % clipped at n = 1e5 the bias was below 0.05 posterior sds in logistic regression; it
    grows like sqrt(n) for a fixed fraction, while posterior sds shrink.
    """
    return 0.003 * min(1.0, math.sqrt(1e5 / n))


def _look(n: int, total: float) -> float:
    """Share of a histogram whose noise hides no more of the tail than may be clipped."""
    return float(np.clip(28.0 / (tail_of_scores(n) * n) ** 2 / total, LOOK, LONG_LOOK))


class _Budget:
    """Shares that were used."""

    def __init__(self, releases: Releases) -> None:
        self.releases = releases
        self.spent = 0.0

    def tail(self, label: str, spec: Contribution, tail: float, share: float) -> float | None:
        self.spent += share
        edges, counts, noise_sd = self.releases.histogram(label, spec, share)
        return tail_quantile(edges, counts, noise_sd, tail, self.releases.n_public)

    def sum(
        self, label: str, spec: Contribution, clip_norm: float, share: float
    ) -> tuple[np.ndarray, float]:
        self.spent += share
        return self.releases.vector_sum(label, spec, clip_norm, share)


def prepare_langevin(
    releases: Releases,
    gradient: Gradient,
    start: Coordinates,
    blocks: Callable[[np.ndarray], Sequence[np.ndarray]],
    *,
    paths: int,
    sensitivity: float,
    form: Form | None = None,
    robust: Callable[[Coordinates, float], None] = lambda at, clip_norm: None,
    limit: Callable[[Coordinates], float | None] = lambda at: None,
) -> Prepared:
    """Everything that the chains of DPLangevin need.

    Parameters
    ----------
    releases : Releases
    gradient : callable
        theta -> gradient of the public log density.
    start : Coordinates
        Location and standard deviations of the prior.
    blocks : callable
        theta -> parameters that reach each unit through an index.
    paths : int
        Iterations of all chains and runs together.
    sensitivity : float
        Of a sum of vectors clipped to norm 1: 2 if records are replaced, else 1.
    form : {"anchored", "plain", "quadratic"}, optional
        Default: the one that makes most of the budget.
    robust : callable
        Told the clip coordinates and the clip norm of the anchor, so that releases from then on are
        those of the Huberised likelihood.
    limit : callable
        Clip coordinates -> a bound that no record's score at the origin can pass, where one follows
        from declared bounds.

    Returns
    -------
    Prepared
    """
    bulk = find_bulk(releases, gradient, start, blocks, share=WARM_UP)
    budget = _Budget(releases)
    budget.spent = bulk.spent
    n, d, total = releases.n_public, len(start.location), releases.units_mu2
    clip = Coordinates(bulk.location, clip_scaling(bulk.precision, blocks(bulk.location), n))
    basis = np.linalg.solve(clip.scaling, root(np.linalg.inv(bulk.precision)))
    stretch = float(np.linalg.norm(basis, 2))  # of noise, from z to w
    rng = np.random.default_rng(0)  # public: places at which norms are looked at
    away = rng.standard_normal(d)
    away *= (math.sqrt(d) + 1.5) / np.linalg.norm(away)
    bound = budget.tail("scores", Score(clip), tail_of_scores(n), _look(n, total))
    rigorous = limit(clip)
    if bound and rigorous is not None and rigorous < WORTH_IT * bound:
        bound = rigorous
    change = budget.tail("changes", Change(clip, basis @ away), 0.002, LOOK)
    blank = Prepared(
        form="quadratic",
        clip=clip,
        basis=basis,
        score=np.zeros(d),
        covariance=np.zeros((d, d)),
        curvature=np.zeros((d, d)),
        clip_norms={},
        shares={},
        step_size=0.4,
        n_steps=4,
        friction=0.3,
        persistent=False,
        effective_draws=math.inf,
        trusted=bulk.arrived and bound is not None,
    )
    if not blank.trusted or not bound:
        return _prior_only(blank, start, bulk)
    robust(clip, bound)
    change = 1.1 * change if change else bound

    def worth(share: float) -> float:
        """Effective draws that residual scores with a share of the budget are worth."""
        return WORTH * share * total / (sensitivity * change * stretch) ** 2

    kicks = min(max(KICKS[0], WANTED / worth(1.0)), KICKS[1])
    plain = WORTH * 0.85 * (1.0 - budget.spent) * total / (sensitivity * bound * stretch) ** 2
    spread = sensitivity * bound * stretch / math.sqrt(0.7 * total)  # sd of the anchor's noise
    if form is None:
        normal = bulk.known and spread < WIDE and worth(kicks) > LEAST
        if change > NONLINEAR * bound and plain > LEAST:
            form = "plain"
        else:
            form = "anchored" if normal else "quadratic"

    if form == "quadratic":
        return _quadratic(blank, budget, bound, gradient)
    if form == "plain":
        return _plain(blank, budget, bound, paths, sensitivity, rng)
    return _anchored(
        blank, budget, bound, change, kicks, worth(kicks), gradient, paths, sensitivity
    )


def _anchored(
    blank: Prepared,
    budget: _Budget,
    bound: float,
    change: float,
    kicks: float,
    effective_draws: float,
    gradient: Gradient,
    paths: int,
    sensitivity: float,
) -> Prepared:
    """One score, released in two parts; what is left pays for changes.

    The first part moves the origin to the mode that it implies, from where changes are smallest;
    the second is taken there, and the first joins it by a released change, whose noise is small.
    """
    basis, total = blank.basis, budget.releases.units_mu2
    rng = np.random.default_rng(1)
    score, sd = budget.sum("first score", Score(blank.clip), bound, FIRST)
    first, first_noise = basis.T @ score, sd**2 * basis.T @ basis
    at = blank.coordinates
    step = first + at.scaling.T @ gradient(at.location)  # the precision in w is about 1
    spec = Change(blank.clip, basis @ step)
    moved = replace(blank, form="anchored", clip=Coordinates(at.theta(step), blank.clip.scaling))
    reach = budget.tail("move of the origin", spec, 0.001, 0.25 * RECENTRE)
    joined = None
    if reach:
        difference, sd = budget.sum("move of the origin", spec, 1.1 * reach, 0.75 * RECENTRE)
        joined = first + basis.T @ difference
        first_noise = first_noise + sd**2 * basis.T @ basis

    noise = sensitivity * change * float(np.linalg.norm(basis, 2))
    noise *= math.sqrt(paths * blank.n_steps / (kicks * total))
    moved = replace(moved, step_size=min(blank.step_size, 2.0 / noise))
    error = _energy_clip(moved, budget, noise, change, rng)
    tests = (5.0 * sensitivity * error) ** 2 * paths / total  # noise of 0.2 in the log ratio
    tests = min(max(tests, TESTS[0]), TESTS[1])
    score, sd = budget.sum("anchor", Score(moved.clip), bound, 1.0 - budget.spent - kicks - tests)
    anchored, covariance = basis.T @ score, sd**2 * basis.T @ basis
    if joined is not None:
        anchored, covariance = _pooled(joined, first_noise, anchored, covariance)
    return replace(
        moved,
        score=anchored,
        covariance=covariance,
        clip_norms={"anchor": bound, "gradient": change, "energy_error": error},
        shares={"gradient": kicks, "energy_error": tests},
        effective_draws=effective_draws,
    )


def _pooled(
    first: np.ndarray, first_noise: np.ndarray, second: np.ndarray, second_noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The best of two noisy measurements of one vector, and the covariance of its noise."""
    weight = np.linalg.solve((first_noise + second_noise).T, second_noise.T).T  # of the first
    covariance = second_noise - weight @ second_noise
    return second + weight @ (first - second), (covariance + covariance.T) / 2.0


def _energy_clip(
    prepared: Prepared, budget: _Budget, noise: float, clip_norm: float, rng: np.random.Generator
) -> float:
    """Bound on the energy errors of the records, from one path of the dynamics of N(0, I)."""
    d, h = len(prepared.score), prepared.step_size
    noise = max(noise, math.sqrt(2.0 * prepared.friction / h))
    kappa = (h * noise) ** 2 / 4.0
    w, p = rng.standard_normal((2, d))
    points, midpoints = [w], []
    for _ in range(prepared.n_steps):
        middle = w + h * p / 2.0
        force = noise * rng.standard_normal(d) - middle
        kicked = ((1.0 - kappa) * p + h * force) / (1.0 + kappa)
        w, p = w + h * (p + kicked) / 2.0, kicked
        points.append(w)
        midpoints.append(middle)
    spec = PathError(
        prepared.clip,
        np.array(points) @ prepared.basis.T,
        np.array(midpoints) @ prepared.basis.T,
        clip_norm,
    )
    found = budget.tail("energy errors", spec, 0.001, LOOK)
    return 2.0 * found if found else 0.1 * clip_norm


def _plain(
    blank: Prepared,
    budget: _Budget,
    bound: float,
    paths: int,
    sensitivity: float,
    rng: np.random.Generator,
) -> Prepared:
    """Every kick pays for the whole score: the form for posteriors far from normal."""
    total = budget.releases.units_mu2
    left = 1.0 - budget.spent - LOOK
    stretch = float(np.linalg.norm(blank.basis, 2))
    noise = sensitivity * bound * stretch * math.sqrt(paths / (0.85 * left * total))
    prepared = replace(
        blank,
        form="plain",
        n_steps=1,
        persistent=True,
        friction=1.0,
        step_size=min(0.5, 2.0 / noise),
    )
    error = _energy_clip(prepared, budget, noise, 2.0 * bound, rng)
    tests = (3.0 * sensitivity * error) ** 2 * paths / (left * total)  # noise of 1/3
    tests = min(max(tests, 0.02), 0.3)
    return replace(
        prepared,
        clip_norms={"gradient": bound, "energy_error": error},
        shares={"gradient": 1.0 - tests, "energy_error": tests},
        effective_draws=WORTH * (1.0 - tests) * left * total / (sensitivity * bound * stretch) ** 2,
    )


def _quadratic(blank: Prepared, budget: _Budget, bound: float, gradient: Gradient) -> Prepared:
    """The whole rest for scores at two places and one curvature: the form for small budgets.

    The first score moves the origin to where the second and the curvature are taken; it then counts
    there, too. What the noise in the curvature adds to the score, over the distance to the mode, is
    noise like any other.
    """
    d, basis = len(blank.score), blank.basis
    left = 1.0 - budget.spent
    score, sd = budget.sum("first score", Score(blank.clip), bound, 0.35 * left)
    first, noise = basis.T @ score, sd**2 * basis.T @ basis
    at = blank.coordinates
    step = first + at.scaling.T @ gradient(at.location)  # the precision in w is about 1
    moved = replace(blank, clip=Coordinates(at.theta(step), blank.clip.scaling))

    spec = Curvature(moved.clip, diagonal=d > FULL, step=1e-6)
    clip_norm = budget.tail("curvature norms", spec, 0.01, 0.04 * left)
    if not clip_norm:
        return replace(blank, trusted=False)
    packed, error = budget.sum("curvature", spec, clip_norm, 0.2 * left)
    error *= float(np.linalg.norm(basis, 2)) ** 2
    floor = 3.0 * error if spec.diagonal else error * math.sqrt(2.0 * d)
    values, vectors = np.linalg.eigh(basis.T @ spec.matrix(packed) @ basis)
    curvature = (vectors * np.where(values > floor, values, 0.0)) @ vectors.T
    score, sd = budget.sum("anchor", Score(moved.clip), bound, 1.0 - budget.spent)
    second, rest = basis.T @ score, sd**2 * basis.T @ basis

    transported = first - curvature @ step
    noise = noise + error**2 * float(step @ step) * np.eye(d)
    pooled, covariance = _pooled(transported, noise, second, rest)
    prior = moved.coordinates.scaling.T @ gradient(moved.clip.location)
    ahead = np.linalg.solve(curvature + np.eye(d), pooled + prior)
    covariance = covariance + error**2 * float(ahead @ ahead) * np.eye(d)
    return replace(
        moved,
        score=pooled,
        covariance=covariance,
        curvature=curvature,
        clip_norms={"anchor": bound},
    )


def _prior_only(blank: Prepared, start: Coordinates, bulk: Bulk) -> Prepared:
    """Nothing could be learned: the prior, which is honest, and says so."""
    return replace(blank, clip=start, basis=np.eye(len(start.location)), trusted=False)
