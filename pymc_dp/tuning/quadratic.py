"""The quadratic form: two scores and a few curvatures, for budgets that pay for no more.

Its chains never touch a record: prior times released likelihood is public. It is normal where the
prior is, and NUTS samples it elsewhere.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.linalg import pinv, pinvh

from pymc_dp.base.checks import warn
from pymc_dp.base.compat import working
from pymc_dp.base.matrices import Coordinates, positive_part, root
from pymc_dp.kernels import targets
from pymc_dp.publication.explore import (
    CHAINS,
    Explored,
    better,
    explore,
    in_support,
    log_likelihood,
    noncentred,
)
from pymc_dp.publication.noise_aware import Likelihood, noisy_posterior
from pymc_dp.rows.contributions import Curvature, ExpectedCurvature
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.bulk import prior_curvature
from pymc_dp.tuning.forecast import CURVATURE, whole_curvature
from pymc_dp.tuning.forms import Form, pooled
from pymc_dp.tuning.model_parts import Design, ModelParts, Public, unseen
from pymc_dp.tuning.preparing import Preparing, too_small
from pymc_dp.tuning.releases import CurvatureNoise, Shares

#: Length of the differences of a piecewise linear likelihood, in standard deviations of one record:
#: enough records must pass a kink for the noise. Intervals of Laplace residuals are 7 % wider.
_FLAT_STEP = 0.3
#: Part of the rest for the first score.
_FIRST = 0.15
#: Parts of the rest for a curvature, and for more where it changes by this factor over a step.
_CURVATURES, _STEADY = (CURVATURE / 2.0, 0.06, 0.06), 0.6
_ANCHORS = 8  # parts of the last score, each where the mode is by those before
_FALLS = 0.3  # part of a curvature by which it is less on average over a step; logistic regression
_REACHES = 3  # times that the posterior widens by what the noise in the curvature adds
_AGAIN = 0.2  # part of the rest for a score where the way of the first was long, or bent
_UNCLEAR = 2.0  # noise variance of a score from which on a cheap look would see nothing
_WIDER = 2.0  # by which the search knows less than it says, where it has not come near enough
_CERTAIN = 1.0  # sds of its noise that a mean curvature must have
_UNSURE = 8.0  # sds of its noise by which a curvature must change as well
_CLEAR, _MOST = 0.3, 0.45  # noise that hides a curvature of 1; largest part to pay for less
#: How far a step goes, in sds of a score, noise included; and how far the posterior mean may end
#: from where the curvature was taken: in 4 % of simulated runs it was farther, with bad intervals.
_FURTHEST = 3.0
_FLATTEST = 1e-3  # of the prior in w: the quadratic holds over 30 posterior sds at most
_FAR = 9.0  # square in one direction, in units of its variance, that is not noise
_EXCESS = 0.15  # how much clipped scores exceed the bound, in units of it
_TAIL = 0.03  # fraction of the curvatures that may be clipped, which makes intervals wider
_NOTHING = 1e4  # noise of a curvature, in w, by whose bound nothing would be seen
_TRIES = 100  # places near the initial point that are tried where there are no prior draws
_SEED = 0  # seed of the draws: all is public
_DRAWS = 4000  # of the prior, where nothing was learned, and of a normal target
_UNTOUCHED = 0.8  # part of the prior's width from which on the records have said next to nothing


def _consistent(difference: np.ndarray, covariance: np.ndarray) -> bool:
    """Whether two measurements of a vector agree, to five sds of chi-square (p < 1e-4)."""
    inverse, d = pinvh(covariance, return_rank=True)
    square = float(difference @ inverse @ difference)
    return square < d + 5.0 * math.sqrt(2.0 * d) + 10.0


def _unlike(difference: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """(d, d) covariance of what a difference of two measurements has that is not noise."""
    square = difference**2
    return np.diag(np.where(square > _FAR * covariance.diagonal(), square, 0.0))


def _common(
    moved: np.ndarray, curvature: np.ndarray, noise: np.ndarray, inside: np.ndarray, n: float
) -> float:
    """Error of the score of a residual sd, say, after a move (d,) of the effects of many groups.

    The score of the log sd of n residuals changes by the sum of the squared moves of means, in
    their posterior sds; its own is 1/sqrt(2 n). No expected curvature contains this. `noise` (d, d)
    is that of the move, from the noise of `curvature`; `inside` marks effects of groups.
    """
    moved = np.where(inside, moved, 0.0)
    unsure = math.sqrt(float(moved @ noise @ moved))
    return (max(float(moved @ curvature @ moved), 0.0) + unsure) / math.sqrt(2.0 * n)


def _visible(
    released: np.ndarray, error: CurvatureNoise, basis: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """A noisy curvature with the mean of those eigenvalues that may be nothing but noise for each.

    Eigenvalues are compared with the largest that noise alone has in as many dimensions: first in
    all directions, then in those that were not above it, until none is. The noise of their mean is
    far less. It is 0 where it may be nothing but noise as well, and in directions that records do
    not see: other than the (k, d) directions `seen`.
    """
    space = np.linalg.qr(seen.T)[0]
    values, vectors = np.linalg.eigh(space.T @ released @ space)
    vectors = space @ vectors
    hidden = np.ones(len(values), dtype=bool)
    while hidden.any():
        still = hidden & (values <= error.norm(basis @ vectors[:, hidden]))
        if (still == hidden).all():
            break
        hidden = still
    if hidden.any():
        of_hidden = basis @ vectors[:, hidden]
        noise = math.sqrt(error.of_trace(of_hidden @ of_hidden.T))
        total = float(values[hidden].sum())
        values[hidden] = total / hidden.sum() if total > _CERTAIN * noise else 0.0
    return np.asarray((vectors * values) @ vectors.T)


class _Origin:
    """Where scores are taken: coordinates w (`here`), `clip`, and (k, d) directions `seen`.

    `place` (d,) is the way from the first of them, in w.
    """

    def __init__(self, blank: Form, public: Public, searched: np.ndarray) -> None:
        self.here, self.clip, self._public = blank.coordinates, blank.clip, public
        scaling = self.here.scaling
        self._precision = np.linalg.inv(scaling @ scaling.T)
        self.seen = np.eye(len(scaling))
        if public.unseen.size:
            self.seen = np.delete(scaling, public.unseen, axis=0)
            self.seen /= np.linalg.norm(self.seen, axis=1, keepdims=True)
        back = np.linalg.inv(scaling)
        self._searched = _WIDER * back @ searched @ back.T
        self.place = np.zeros(len(scaling))
        # records see no step at right angles to that
        self._along = pinv(self.seen) @ self.seen

    def move(self, step: np.ndarray, longest: float) -> np.ndarray:
        """Move by a step in w, or by a part of it; that part."""
        step = self._along @ step
        length = float(np.linalg.norm(step))
        step = step if length <= longest else step * (longest / length)
        self.place = self.place + step
        location = self._public.settled(self.here.theta(step), self._precision)
        self.here = Coordinates(location, self.here.scaling)
        self.clip = Coordinates(location, self.clip.scaling)
        return step

    def towards(
        self, score: np.ndarray, covariance: np.ndarray, curvature: np.ndarray
    ) -> np.ndarray:
        """The step to where the mode is, by a score here and, if it agrees, by the search."""
        mean, width = self.posterior(score, covariance, curvature)
        if _consistent(mean + self.place, width + self._searched):
            mean, _ = pooled(-self.place, self._searched, mean, width)
        return mean

    def posterior(
        self, score: np.ndarray, covariance: np.ndarray, curvature: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance in w, as far as a score here tells them."""
        bend = positive_part(prior_curvature(self._public.gradient, self.here), _FLATTEST)
        prior = self._public.score(self.here)
        return noisy_posterior(score, covariance, curvature, bend, prior)


class _Look:
    """The newest released curvature: `matrix` (d, d) in z, its noise, and what it shows in w.

    `size` is the largest eigenvalue of the noise for the whole budget and a clip norm of 1, in w.
    """

    matrix: np.ndarray
    error: CurvatureNoise
    released: np.ndarray  # (d, d) in w
    visible: np.ndarray  # of which noise hides nothing

    def __init__(
        self, budget: Shares, basis: np.ndarray, size: float, of: Callable[[_Origin], Curvature]
    ) -> None:
        self._budget, self._basis, self._size, self._of = budget, basis, size, of
        self._clip_norm: float | None = None

    def take(self, again: str, origin: _Origin, share: float, most: float) -> bool:
        """Release one, for `share` of the budget, or up to `most` where it would not be clear.

        `again` is for labels. False where noise hides how long curvatures are, here and before.
        """
        spec, label = self._of(origin), f"curvature{again}"
        self._clip_norm = (
            self._norm(f"curvature norms{again}", spec, share / 6.0)
            or self._clip_norm  # without any, all is lost
            or self._norm("curvature norms once more", spec, share / 2.0)
        )
        if not self._clip_norm:
            return False
        part = max(share * 5.0 / 6.0, min((self._size * self._clip_norm / _CLEAR) ** 2, most))
        self.matrix, self.error = self._budget.curvature(label, spec, self._clip_norm, part)
        self.released = self._basis.T @ self.matrix @ self._basis
        self.visible = _visible(self.released, self.error, self._basis, origin.seen)
        return True

    def _norm(self, label: str, spec: Curvature, share: float) -> float | None:
        """How long curvatures are; None where noise hides it, or was taken for long ones."""
        found = self._budget.tail(label, spec, _TAIL, share)
        return found if found and found * self._size < _NOTHING else None


class _Scores:
    """Noisy scores, the places w (d,) where they were taken, and what they tell of another.

    All are moved by one curvature. Its noise is the same for all, so in a weighted mean of them it
    acts on the distance from the mean of their places: near 0 once these surround the mode.
    """

    def __init__(self, basis: np.ndarray, reach: np.ndarray, inside: np.ndarray, n: float) -> None:
        self._basis, self._reach, self._inside, self._n = basis, reach, inside, n
        self._taken: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, place: np.ndarray, score: np.ndarray, noise: np.ndarray) -> None:
        """A score with noise of this covariance (d, d)."""
        self._taken.append((place, score, noise))

    def of_step(self, step: np.ndarray, look: _Look) -> tuple[np.ndarray, np.ndarray]:
        """Errors of a score after a step: of the curvature, and in what all groups share."""
        basis, moved = self._basis, self._basis @ step
        product = look.error.of_product(np.outer(moved, moved))
        common = _common(moved, look.matrix, product, self._inside, self._n)
        shared = self._reach * np.where(self._inside, 0.0, common**2)
        return basis.T @ product @ basis, (basis.T * shared) @ basis

    def at(self, place: np.ndarray, look: _Look) -> tuple[np.ndarray, np.ndarray]:
        """Their mean at a place, with the weights of least error, and its covariance.

        Older scores tell less in directions, or nothing, where they disagree with the newest.
        """
        kept: list[tuple[np.ndarray, ...]] = []
        for taken, score, noise in reversed(self._taken):
            step = place - taken
            moved = score - look.visible @ step
            of_curvature, common = self.of_step(step, look)
            bend = _FALLS * look.visible @ step
            own = noise + common + np.outer(bend, bend)
            if kept:
                newest, of_newest, *_ = kept[0]
                own = own + _unlike(moved - newest, of_newest + own + of_curvature)
                if not _consistent(moved - newest, of_newest + own + of_curvature):
                    continue
            kept.append((moved, own, step, bend))
        moves, covariances, steps, bends = (np.array(part) for part in zip(*kept, strict=True))
        basis, error = self._basis, look.error
        away = steps @ basis.T
        alike = away @ error.of_product(basis @ basis.T) @ away.T
        # bends have one sign where all steps have
        total = alike + bends @ bends.T + np.diag(np.trace(covariances, axis1=1, axis2=2))
        weights = np.linalg.solve(total, np.ones(len(kept)))
        weights /= weights.sum()
        rest = weights @ away
        bend = weights @ bends
        of_mean = basis.T @ error.of_product(np.outer(rest, rest)) @ basis + np.outer(bend, bend)
        return weights @ moves, np.tensordot(weights**2, covariances, axes=1) + of_mean


class Quadratic(Form):
    """The whole rest for scores at two places and a curvature: the form for small budgets."""

    form = "quadratic"
    asks = False
    _replaced = "log-likelihood was replaced"

    @classmethod
    def prepare(
        cls,
        blank: Form,
        budget: Shares,
        public: Public,
        known: np.ndarray,
        searched: np.ndarray,
        flat: bool = False,
    ) -> Quadratic | None:
        """Release scores and curvatures; None where noise hides them.

        The first score moves the origin to where the second and the curvature are taken, and then
        counts there, too, with what the curvature leaves open on the way. Where that changes much,
        or the way was longer than a step may be, another score is taken, and the origin moves
        again. The last score comes in parts, each where the mode is by all before; half-way, the
        curvature is taken again.
        `known` (d, d) is the curvature of the log-likelihood, `searched` (d, d) the covariance of
        the mode, in theta, from the search; `flat`: log-likelihoods are piecewise linear.
        """
        d, basis, clipping = len(blank.score), blank.basis, blank.clipping
        left = 1.0 - budget.spent
        spec, bound = clipping.score(blank.clip), clipping.bound
        loss = budget.lost(clipping, blank.clip, basis)
        score, of_score = budget.score("first score", spec, bound, _FIRST * left)
        origin = _Origin(blank, public, searched)
        at = origin.here
        before = at.scaling.T @ known @ at.scaling
        first, noise, _ = loss.corrected(basis.T @ score, of_score.covariance(basis), before)
        longest = _FURTHEST * math.sqrt(d + float(np.trace(noise)))
        inside = np.zeros(d, dtype=bool)
        for block in budget.structure.effects(at.location)[0]:
            inside[block] = True
        n = budget.n
        scores = _Scores(basis, of_score.reach, inside, n)
        diagonal = not whole_curvature(n, d, budget.total)
        length = _FLAT_STEP * math.sqrt(n / d) if flat else 1e-6
        # what is piecewise linear has the curvature of the density at its kinks, whatever the model
        kind = Curvature if flat or clipping.inner is None else ExpectedCurvature
        size = of_score.sd / bound * math.sqrt(_FIRST * left) * float(np.linalg.norm(basis, 2)) ** 2
        size *= 3.0 if diagonal else math.sqrt(2.0 * d)
        look = _Look(budget, basis, size, lambda at: kind(at.clip, diagonal=diagonal, step=length))
        unseen = _EXCESS * clipping.hidden * bound / d  # sd of what clipping may have taken besides
        besides = replace(of_score, sd=unseen).covariance(basis)

        def another(label: str, part: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            score, of_score = budget.score(label, clipping.score(origin.clip), bound, part)
            return loss.corrected(basis.T @ score, of_score.covariance(basis), look.visible)

        scores.add(origin.place, first, noise)
        step = origin.towards(first, noise, before)
        shares = list(_CURVATURES)
        for k in range(len(_CURVATURES)):
            # another look follows a long way: this one is cheap, where it would see something
            far_off = np.linalg.norm(step) > longest and np.trace(noise) < _UNCLEAR * d
            share = shares.pop(-1 if far_off else 0) * left
            step = origin.move(step, longest)
            if not look.take(f" {k + 1}" if k else "", origin, share, share):
                return None
            now, then = float(step @ look.released @ step), float(step @ before @ step)
            of_step, _ = scores.of_step(step, look)
            unsure = _UNSURE * math.sqrt(max(float(step @ of_step @ step), 0.0))
            steady = _STEADY * then - unsure <= now <= then / _STEADY + unsure
            if steady and float(np.linalg.norm(step)) < 0.999 * longest:
                break
            before = look.visible
            if k < len(_CURVATURES) - 1:
                again = another(f"first score {k + 2}", _AGAIN * (1.0 - budget.spent))
                scores.add(origin.place, *again[:2])
                # a score means nothing in directions that noise hides
                step = origin.towards(*scores.at(origin.place, look), look.visible)
        looked_at = origin.place
        for k in range(_ANCHORS):
            if k == _ANCHORS // 2:
                most = _MOST * (1.0 - budget.spent)
                if look.take(" at last", origin, min(_CURVATURES[0] * left, most), most):
                    looked_at = origin.place
            part = (1.0 - budget.spent) / (_ANCHORS - k)
            score, noise, lost = another(f"anchor {k + 1}" if k else "anchor", part)
            besides = besides if k else besides + lost
            scores.add(origin.place, score, noise)
            score, noise = scores.at(origin.place, look)
            if k < _ANCHORS - 1:
                origin.move(origin.posterior(score, noise + besides, look.visible)[0], longest)
        mean, _ = origin.posterior(score, noise + besides, look.visible)
        bend = _FALLS * look.visible @ (mean + origin.place - looked_at)
        own = covariance = noise + besides + np.outer(bend, bend)
        mean, width = origin.posterior(score, covariance, look.visible)
        away = origin.seen @ mean
        inverse = pinvh(origin.seen @ width @ origin.seen.T)
        if float(away @ inverse @ away) > _FURTHEST**2 * len(away):
            return None
        for _ in range(_REACHES):  # the noise in the curvature counts as far as that reaches
            reach = basis @ (width + np.outer(mean, mean)) @ basis.T
            covariance = own + basis.T @ look.error.of_product(reach) @ basis
            mean, width = origin.posterior(score, covariance, look.visible)
        return blank.become(
            cls,
            clip=origin.clip,
            score=score,
            covariance=covariance,
            curvature=look.visible,
            diagonal=diagonal,
            clip_norms={"anchor": bound},
        )

    # -- the target -----------------------------------------------------------------------------

    @property
    def likelihood(self) -> dict[str, Any] | None:
        """Curvature of the log-likelihood in theta, and covariance of the noise in its score."""
        back = np.linalg.inv(self.coordinates.scaling)
        parts = {"curvature": self.curvature, "covariance": self.covariance}
        return {name: (back.T @ matrix @ back).tolist() for name, matrix in parts.items()}

    def design(self, preparing: Preparing, engine: RowEngine) -> Design:
        """Draws of prior times released likelihood, about N(0, I) in their coordinates."""
        parts = preparing.parts
        with working("Exploring what was released", preparing.progressbar):
            explored = self.explored(parts)
        drawn = explored.draws
        covariance = np.cov(drawn.T).reshape(drawn.shape[1], drawn.shape[1])
        at = Coordinates(drawn.mean(axis=0), root(covariance))
        facts = {
            "far": self.far(drawn, parts),
            "about_prior": about_prior(drawn, parts),
            "departs": explored.doubt,
            "likelihood": self.likelihood,
        }
        prior = parts.terms.with_coordinates(at)
        return Design(at, engine, prior, self.clip_norms, self.shares, facts, drawn)

    def explored(self, parts: ModelParts) -> Explored:
        """Draws of prior times released likelihood, in random order; warns where they are few.

        The target is p(theta) N(G; H w, H + V), with the released score G and curvature H, and V
        the noise in G. The same releases give the same draws. Raises KeyboardInterrupt however PyMC
        takes one, and SamplingError if NUTS cannot begin.
        """
        if (drawn := self.normal(parts)) is not None:
            return Explored(drawn, float(len(drawn)), apart=False)
        theta, at = parts.records.parameters.theta, self.coordinates
        rng = np.random.default_rng(_SEED)
        inside = rng.standard_normal((CHAINS, parts.engine.d)) * np.arange(CHAINS)[:, None] / CHAINS
        target = self.log_target(parts, theta)
        starts = in_support(theta, target, np.array([at.theta(w) for w in inside]), spare(parts))
        run = partial(explore, theta, target, starts, _SEED + 1, at.scaling)
        through = noncentred(parts.model, parts.records.parameters)
        if through is None:
            return shuffled(run())
        return shuffled(better(partial(run, through=through), run))

    @np.errstate(all="ignore")  # a draw of the prior may be without end
    def normal(self, parts: ModelParts) -> np.ndarray | None:
        """Draws of the target where the prior, and so the target, is normal; None elsewhere.

        The log density of the prior is compared with that of its slope and curvature at the mode,
        at draws of the prior and of the target. Its constant, that of public outcomes say, does not
        count.
        """
        if parts.prior_draws is None:
            return None
        at, zero = self.coordinates, np.zeros(parts.engine.d)
        prior = parts.terms.with_coordinates(at)
        bend = prior_curvature(parts.terms.gradient, at, step=1.0)
        target = targets.Quadratic(prior, self.score, self.curvature, self.covariance)
        try:
            covariance = np.linalg.inv(bend + target.information)
            width = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return None
        drawn = np.random.default_rng(_SEED).standard_normal((_DRAWS, len(zero)))
        drawn = covariance @ target.gradient(zero) + drawn @ width.T
        known = np.linalg.solve(at.scaling, (parts.prior_draws - at.location).T).T
        places = np.concatenate([drawn, known])
        there = np.array([prior.log_density(w) for w in places]) - prior.log_density(zero)
        fitted = places @ prior.gradient(zero) - np.vecdot(places @ bend, places) / 2.0
        alike = np.allclose(there, fitted, rtol=1e-6, atol=1e-4)
        return at.location + drawn @ at.scaling.T if alike else None

    def log_target(self, parts: ModelParts, likelihood_of: Any) -> Any:
        """Symbolic log density of theta; the likelihood is a function of `likelihood_of`."""
        [public] = parts.records.parameters.substitute([parts.records.public_logp])
        released = Likelihood(self.score, self.curvature, self.covariance)
        return public + log_likelihood(likelihood_of, self.coordinates, released)

    def far(self, drawn: np.ndarray, parts: ModelParts) -> float:
        """Fraction of (m, d) draws, by seen parameters, that extrapolate the likelihood."""
        hidden = unseen(parts.engine, self.clip.location)
        return far_from(np.delete(self.clip.location, hidden), np.delete(drawn, hidden, axis=1))

    def sentences(self, facts: dict[str, Any]) -> list[str]:
        """What a statement says."""
        return [
            f"The chains did not touch the records: the {self._replaced} by a quadratic one, from "
            "released scores and curvatures, whose noise the intervals account for; the prior is "
            f"exact. Approximate where that likelihood is not near normal. {self.caveats(facts)}",
            *unreliable(facts),
            *super().sentences(facts),
        ]

    def caveats(self, facts: dict[str, Any]) -> str:
        """What else is to be known of intervals."""
        diagonal, untouched = "", ""
        if self.diagonal:
            diagonal = (
                " ONLY THE DIAGONAL OF THE CURVATURE was released: intervals of sums and means of "
                "parameters are too narrow."
            )
        if names := facts["about_prior"]:
            untouched = f" ABOUT AS WIDE AS THEIR PRIOR: {', '.join(names)}."
        return f"{self.clipping.sentence}{diagonal}{untouched}"


class PriorOnly(Form):
    """Where nothing could be learned: the prior."""

    form = "quadratic"
    asks = trusted = False

    @classmethod
    def instead_of(cls, found: Form, start: Coordinates) -> PriorOnly:
        """The prior of these location and widths in place of what was found."""
        d = len(start.location)
        nothing = np.zeros((d, d))
        return found.become(
            cls,
            clip=start,
            basis=np.eye(d),
            score=np.zeros(d),
            covariance=nothing,
            curvature=nothing,
        )

    def design(self, preparing: Preparing, engine: RowEngine) -> Design:
        """Prior draws where nothing public is observed, as a chain may not reach all of it."""
        parts, draws = preparing.parts, None
        public = set(parts.budget.public)
        if not any(rv.name in public for rv in parts.model.observed_RVs):
            draws = parts.draw_prior(_DRAWS, secrets.randbits(32))
        if draws is not None and not np.isfinite(draws).all():
            draws = None
        nothing = {name: self.curvature.tolist() for name in ("curvature", "covariance")}
        known = super().design(preparing, engine)
        return replace(known, draws=draws, settings={"likelihood": nothing})

    def sentences(self, facts: dict[str, Any]) -> list[str]:
        """What a statement says."""
        return [too_small("from the prior, or about it"), *super().sentences(facts)]


def unreliable(facts: dict[str, Any]) -> list[str]:
    """How the draws differ from what they should be draws of, if that was seen."""
    return [f"UNRELIABLE: {facts['departs']}."] if facts["departs"] else []


def spare(parts: ModelParts) -> np.ndarray:
    """(m, d) places of which one may be in the support of a target."""
    if parts.prior_draws is not None:
        return parts.prior_draws
    initial = parts.records.initial
    return initial + np.random.default_rng(_SEED).standard_normal((_TRIES, len(initial)))


def shuffled(explored: Explored) -> Explored:
    """The draws in random order; warns where they are not to be relied on."""
    if explored.doubt:
        warn(
            "Prior and released likelihood make a posterior in which NUTS did not mix well, or "
            f"that has several modes (about {explored.effective:.0f} effective draws): results are "
            "less reliable than they look. Narrower priors, one that breaks a symmetry, or the "
            "effects of a hierarchy written as mu + tau * z with z ~ N(0, 1), may help."
        )
    order = np.random.default_rng(_SEED).permutation(len(explored.draws))
    return explored._replace(draws=explored.draws[order])


def far_from(origin: np.ndarray, drawn: np.ndarray) -> float:
    """Fraction of (m, k) draws that lie farther from a place than normal ones do."""
    k = len(origin)
    scaling = root(np.cov(drawn.T).reshape(k, k))
    w = np.linalg.solve(scaling, (drawn - origin).T)
    return float((np.linalg.norm(w, axis=0) > 2.0 * np.sqrt(len(w)) + 4.0).mean())


def about_prior(drawn: np.ndarray, parts: ModelParts) -> list[str]:
    """Variables about which (m, d) draws say no more than the prior; warns if these are all."""
    if parts.prior_draws is None:
        return []
    low, high = np.quantile(drawn, [0.16, 0.84], axis=0)
    least, most = np.quantile(parts.prior_draws, [0.16, 0.84], axis=0)
    untouched = high - low > _UNTOUCHED * (most - least)
    found = []
    for name, where in parts.names:
        count, size = int(untouched[where].sum()), len(untouched[where])
        if count:
            found.append(name if count == size else f"{name} ({count} of {size} entries)")
    if {name for name, _ in parts.names} <= set(found):
        warn(
            "These draws are about as wide as the prior in every variable: the budget told next to "
            "nothing of these records under this model. A larger epsilon, more records or fewer "
            "parameters would help."
        )
    return found
