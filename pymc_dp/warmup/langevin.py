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
from pymc_dp.warmup.bulk import Bulk, Gradient, Releases, find_bulk
from pymc_dp.warmup.geometry import clip_scaling
from pymc_dp.warmup.linear import positive_part, root
from pymc_dp.warmup.quantiles import tail_quantile

__all__ = ["Form", "Prepared", "prepare_langevin", "tail_of_scores"]

Form = Literal["anchored", "plain", "quadratic"]

#: Parts of the budget: the search of the bulk, one look at a norm, the move of the origin.
WARM_UP, LOOK, RECENTRE = 0.12, 0.008, 0.02
#: Least and largest parts for residual scores, and for accept tests.
KICKS, TESTS = (0.02, 0.25), (0.01, 0.10)
#: Effective draws that residual scores are to be worth, over all chains.
WANTED = 800.0
#: Fewer are not worth a chain that touches records.
LEAST = 30.0
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
    def coordinates(self) -> Coordinates:
        """The coordinates w of the chains."""
        return Coordinates(self.clip.location, self.clip.scaling @ self.basis)


def tail_of_scores(n: int) -> float:
    """Fraction of the scores that an anchor may clip.

    With 0.3 % clipped at n = 1e5 the bias was below 0.05 posterior sds in logistic regression; it
    grows like sqrt(n) for a fixed fraction, while posterior sds shrink.
    """
    return 0.003 * min(1.0, math.sqrt(1e5 / n))


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
    """
    bulk = find_bulk(releases, gradient, start, blocks, share=WARM_UP)
    budget = _Budget(releases)
    budget.spent = WARM_UP
    n, d, total = releases.n_public, len(start.location), releases.units_mu2
    clip = Coordinates(bulk.location, clip_scaling(bulk.precision, blocks(bulk.location), n))
    basis = np.linalg.solve(clip.scaling, root(np.linalg.inv(bulk.precision)))
    stretch = float(np.linalg.norm(basis, 2))  # of noise, from z to w
    rng = np.random.default_rng(0)  # public: places at which norms are looked at
    away = rng.standard_normal(d)
    away *= (math.sqrt(d) + 1.5) / np.linalg.norm(away)
    bound = budget.tail("scores", Score(clip), tail_of_scores(n), LOOK)
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
        step_size=0.35,
        n_steps=4,
        friction=1.0,
        persistent=False,
        effective_draws=math.inf,
        trusted=bulk.trusted and bound is not None,
    )
    if not blank.trusted or not bound:
        return _prior_only(blank, start, bulk)
    robust(clip, bound)
    change = 1.25 * change if change else bound

    def worth(share: float) -> float:
        """Effective draws that residual scores with a share of the budget are worth."""
        return share * total * 2.0 / (sensitivity * change * stretch) ** 2

    kicks = min(max(KICKS[0], WANTED / worth(1.0)), KICKS[1])
    plain = 0.85 * (1.0 - budget.spent) * total / (sensitivity * bound * stretch) ** 2
    if form is None:
        if change > NONLINEAR * bound and plain > LEAST:
            form = "plain"
        else:
            form = "anchored" if worth(kicks) > LEAST else "quadratic"

    if form == "quadratic":
        return _quadratic(blank, budget, bound, gradient)
    if form == "plain":
        return _plain(blank, budget, bound, paths, sensitivity, rng)
    noise = sensitivity * change * stretch * math.sqrt(paths * blank.n_steps / (kicks * total))
    prepared = replace(
        blank,
        form="anchored",
        step_size=min(blank.step_size, 2.0 / noise),
        clip_norms={"anchor": bound, "gradient": change},
        effective_draws=worth(kicks),
    )
    error = _energy_clip(prepared, budget, noise, change, rng)
    tests = (5.0 * sensitivity * error) ** 2 * paths / total  # noise of 0.2 in the log ratio
    tests = min(max(tests, TESTS[0]), TESTS[1])
    anchor = 1.0 - budget.spent - kicks - tests - RECENTRE
    score, sd = budget.sum("anchor", Score(clip), bound, anchor)
    prepared = replace(
        prepared,
        score=basis.T @ score,
        covariance=sd**2 * basis.T @ basis,
        clip_norms={**prepared.clip_norms, "energy_error": error},
        shares={"gradient": kicks, "energy_error": tests},
    )
    return _recentred(prepared, budget, gradient)


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


def _recentred(prepared: Prepared, budget: _Budget, gradient: Gradient) -> Prepared:
    """The origin moved to the mode of the anchored posterior: changes are smallest from there.

    The score there is the anchored one plus a released change, whose noise is small.
    """
    coordinates = prepared.coordinates
    step = prepared.score + coordinates.scaling.T @ gradient(coordinates.location)
    if np.linalg.norm(step) < 0.3 * math.sqrt(len(step)):
        return prepared
    spec = Change(prepared.clip, prepared.basis @ step)
    clip_norm = budget.tail("move of the origin", spec, 0.001, 0.25 * RECENTRE)
    if not clip_norm:
        return prepared
    change, sd = budget.sum("move of the origin", spec, 1.25 * clip_norm, 0.75 * RECENTRE)
    basis = prepared.basis
    return replace(
        prepared,
        clip=Coordinates(prepared.clip.theta(spec.z), prepared.clip.scaling),
        score=prepared.score + basis.T @ change,
        covariance=prepared.covariance + sd**2 * basis.T @ basis,
    )


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
        blank, form="plain", n_steps=1, persistent=True, step_size=min(0.5, 2.0 / noise)
    )
    error = _energy_clip(prepared, budget, noise, 2.0 * bound, rng)
    tests = (3.0 * sensitivity * error) ** 2 * paths / (left * total)  # noise of 1/3
    tests = min(max(tests, 0.02), 0.3)
    return replace(
        prepared,
        clip_norms={"gradient": bound, "energy_error": error},
        shares={"gradient": 1.0 - tests, "energy_error": tests},
        effective_draws=(1.0 - tests) * left * total / (sensitivity * bound * stretch) ** 2,
    )


def _quadratic(blank: Prepared, budget: _Budget, bound: float, gradient: Gradient) -> Prepared:
    """The whole rest for one score and one curvature: the form for small budgets."""
    d = len(blank.score)
    left = 1.0 - budget.spent
    whitened = blank.coordinates
    spec = Curvature(whitened, diagonal=d > 60, step=1e-6)
    clip_norm = budget.tail("curvatures", spec, 0.01, 0.05 * left)
    if not clip_norm:
        return replace(blank, trusted=False)
    packed, sd = budget.sum("curvature", spec, clip_norm, 0.25 * left)
    floor = 3.0 * sd if spec.diagonal else sd * math.sqrt(2.0 * d)
    values, vectors = np.linalg.eigh(spec.matrix(packed))
    curvature = (vectors * np.where(values > 2.0 * floor, values, 0.0)) @ vectors.T
    score, score_sd = budget.sum("anchor", Score(blank.clip), bound, 1.0 - budget.spent)
    return replace(
        blank,
        score=blank.basis.T @ score,
        covariance=score_sd**2 * blank.basis.T @ blank.basis,
        curvature=positive_part(curvature),
        clip_norms={"anchor": bound},
    )


def _prior_only(blank: Prepared, start: Coordinates, bulk: Bulk) -> Prepared:
    """Nothing could be learned: the prior, which is honest, and says so."""
    return replace(blank, clip=start, basis=np.eye(len(start.location)), trusted=False)
