"""What the chains of DPLangevin ask of the records, and what their draws follow: two of the forms.

The anchored form pays for one score with most of the budget, and then only for its changes; the
plain form pays for the whole score in every kick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from scipy.linalg import pinvh

from pymc_dp.base.matrices import Coordinates
from pymc_dp.kernels.targets import Tilted
from pymc_dp.rows.contributions import Change, PathError
from pymc_dp.rows.engine import RowEngine
from pymc_dp.tuning.forecast import WORTH
from pymc_dp.tuning.model_parts import Design, Public, seen_together
from pymc_dp.tuning.preparing import Preparing, can_pay, improper_prior
from pymc_dp.tuning.releases import Clipping, Shares

LOOK = 0.008  # part of the budget for a look at a histogram
_PATHS = 8  # most paths: one alone may miss the record with the largest energy error
#: Anchored: parts for the first of two scores (of the rest), a move of the origin, accept tests.
_FIRST, _RECENTRE = 0.3, 0.02
_TESTS = (0.01, 0.10)
#: Plain: halvings of the step that are tried while the noise of energy errors is above `_LOUD`. It
#: should be 1 / `_QUIET`, if a part of the budget between `_LOUD_TESTS` pays for it.
_KICKS = (1, 2, 4, 8)
_QUIET, _LOUD = 3.0, 1.0
_LOUD_TESTS = (0.02, 0.3)

F = TypeVar("F", bound="Form")


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a preparation has learned; released values and public numbers only.

    Chains move in w, theta = location + clip.scaling @ basis @ w, where the posterior is about
    N(0, I); contributions are clipped in z = basis @ w. The origin is the location of `clip`.

    `score` (d,) is the released score at the origin, in w, or 0 in the plain form, and `covariance`
    that of its noise. `curvature` (d, d) is that of the log-likelihood there: the whole likelihood
    of the quadratic form. `clip_norms` holds "anchor", "gradient" and "energy_error", `shares`
    relative parts of the rest of the budget, which buys `effective_draws`. `clipping` is that of
    the scores of the anchor (of all in the plain form). `diagonal`: only the diagonal of the
    curvature was released.
    """

    form: ClassVar[str]  # as users name it
    asks: ClassVar[bool] = True  # whether chains ask the records
    trusted: ClassVar[bool] = True  # whether the records could be distinguished from the noise
    apart: ClassVar[float] = 1.0  # how far apart chains start, in the widths that were learned

    clip: Coordinates
    basis: np.ndarray
    score: np.ndarray
    covariance: np.ndarray
    curvature: np.ndarray
    clipping: Clipping
    step_size: float
    n_steps: int
    friction: float = 0.3
    persistent: bool = False
    effective_draws: float = math.inf
    diagonal: bool = False
    clip_norms: dict[str, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)

    def become(self, form: type[F], **learned: Any) -> F:
        """Another form, with what was learned besides."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return form(**{**known, **learned})

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates w of the chains."""
        return Coordinates(self.clip.location, self.clip.scaling @ self.basis)

    def design(self, preparing: Preparing, engine: RowEngine) -> Design:
        """What chains follow and may ask; `engine` has the records in the coordinates `clip`."""
        prior = preparing.parts.terms.with_coordinates(self.coordinates)
        return Design(self.coordinates, engine, prior, self.clip_norms, self.shares)

    def sentences(self, facts: dict[str, Any]) -> list[str]:
        """What a statement says of the draws, with the facts that the ledger keeps."""
        return improper_prior(facts)


class Anchored(Form):
    """One score, released in two parts; what is left pays for changes."""

    form = "anchored"

    @classmethod
    def prepare(
        cls,
        blank: Form,
        budget: Shares,
        change: float,
        kicks: float,
        public: Public,
        known: np.ndarray,
        paths: int,
        sensitivity: float,
        step_size: float | None,
    ) -> Anchored:
        """Release the anchor; `known` (d, d) is the curvature of the log-likelihood in theta.

        The first part moves the origin to the mode that it implies, where changes are smallest. The
        second is taken there; a released change, of little noise, joins the first to it.
        """
        basis, total, clipping = blank.basis, budget.total, blank.clipping
        rng = np.random.default_rng(1)
        left = 1.0 - budget.spent
        spec, bound = clipping.score(blank.clip), clipping.bound
        at = blank.coordinates
        curvature = at.scaling.T @ known @ at.scaling
        loss = budget.lost(clipping, blank.clip, basis)
        score, noise = budget.score("first score", spec, bound, _FIRST * left)
        first, first_noise, _ = loss.corrected(basis.T @ score, noise.covariance(basis), curvature)
        step = first + public.score(at)  # the precision in w is about 1
        change_of = Change(blank.clip, basis @ step)
        moved = blank.become(cls, clip=Coordinates(at.theta(step), blank.clip.scaling))
        reach = budget.tail("norms of the move", change_of, 0.001, 0.25 * _RECENTRE)
        joined = None
        if reach:
            label, share = "move of the origin", 0.75 * _RECENTRE
            difference, noise = budget.score(label, change_of, 1.1 * reach, share)
            joined = first + basis.T @ difference
            first_noise = first_noise + noise.covariance(basis)

        kick = sensitivity * change * float(np.linalg.norm(basis, 2))  # sd of its noise
        kick *= math.sqrt(paths * blank.n_steps / (kicks * total))
        moved = moved.become(cls, step_size=step_size or min(blank.step_size, 2.0 / kick))
        error = _energy_clip(moved, budget, kick, change, rng)
        unit = 5.0 * sensitivity * math.sqrt(paths / total)  # noise of 0.2 in the log ratio
        error, tests = _accept_tests(error, unit, _TESTS[0], _TESTS[1] * (1.0 - budget.spent))
        left = 1.0 - budget.spent - kicks - tests
        score, noise = budget.score("anchor", clipping.score(moved.clip), bound, left)
        final, covariance, lost = loss.corrected(
            basis.T @ score, noise.covariance(basis), curvature
        )
        if joined is not None:
            final, covariance = pooled(joined, first_noise, final, covariance)
        return moved.become(
            cls,
            score=final,
            covariance=covariance + lost,  # of the same records in both scores
            clip_norms={"anchor": bound, "gradient": change, "energy_error": error},
            shares={"gradient": kicks, "energy_error": tests},
        )

    def design(self, preparing: Preparing, engine: RowEngine) -> Design:
        """The posterior tilted by the noise of the anchor, in a ball that no normal draw leaves."""
        radius = 8.0 * math.sqrt(len(self.score)) + 20.0
        pairs = seen_together(preparing.parts.engine, self.clip.location)
        anchor = {
            "score": self.score.tolist(),
            "covariance": self.covariance.tolist(),
            "pairs": pairs.astype(int).tolist(),
            "clipped": self.clipping.sentence,
        }
        known = super().design(preparing, engine.tilted())
        tilted = Tilted(known.prior, self.score, radius)
        return replace(known, prior=tilted, settings={"radius": radius, "anchor": anchor})

    def sentences(self, facts: dict[str, Any]) -> list[str]:
        """What a statement says, besides what is said of the correction for the noise."""
        return [
            "Changes of scores and energy errors were clipped at bounds learned from noisy "
            "histograms; the chains are exact as far as no energy error was clipped.",
            *super().sentences(facts),
        ]


class Plain(Form):
    """Every kick pays for the whole score: the form for posteriors far from normal."""

    form = "plain"
    # far from normal, the width that was learned is no guide to where the bulk ends
    apart = 0.1

    @classmethod
    def prepare(
        cls,
        blank: Form,
        budget: Shares,
        paths: int,
        sensitivity: float,
        step_size: float | None,
        n_steps: int | None,
        rng: np.random.Generator,
    ) -> Plain:
        """Look at the energy errors of a few steps, and take the one with the least noise."""
        total, bound = budget.total, blank.clipping.bound
        norm = sensitivity * bound * float(np.linalg.norm(blank.basis, 2))
        tried: list[tuple[float, Plain]] = []
        for kicks in (n_steps or 1,) if n_steps or step_size else _KICKS:
            left = 1.0 - budget.spent - LOOK
            if tried and not can_pay(kicks * paths, left * total):
                break
            noise = norm * math.sqrt(paths * kicks / (0.85 * left * total))
            found = blank.become(
                cls,
                n_steps=kicks,
                persistent=kicks == 1,
                friction=1.0,
                step_size=step_size or min(0.5 / kicks, 2.0 / noise),
            )
            error = _energy_clip(found, budget, noise, 2.0 * bound, rng)
            unit = _QUIET * sensitivity * math.sqrt(paths / (left * total))
            error, tests = _accept_tests(error, unit, *_LOUD_TESTS)
            loud = unit * error / (_QUIET * math.sqrt(tests))  # the noise that is left
            found = found.become(
                cls,
                clip_norms={"gradient": bound, "energy_error": error},
                shares={"gradient": 1.0 - tests, "energy_error": tests},
                effective_draws=WORTH * (1.0 - tests) * left * total / norm**2,
            )
            tried.append((loud, found))
            if loud < _LOUD:
                break
        return min(tried, key=lambda attempt: attempt[0])[1]

    def sentences(self, facts: dict[str, Any]) -> list[str]:
        """What a statement says."""
        clipped = self.clipping.counted
        return [f"The chains are exact as far as nothing was clipped. {clipped}"]


def _accept_tests(error: float, unit: float, least: float, most: float) -> tuple[float, float]:
    """Bound on energy errors, and part of the budget for tests: unit^2 for a bound of 1."""
    error = max(error, math.sqrt(least) / unit)
    return error, min((error * unit) ** 2, most)


def _energy_clip(
    found: Form, budget: Shares, noise: float, clip_norm: float, rng: np.random.Generator
) -> float:
    """Bound on energy errors, from as many paths of N(0, I) as histograms can be paid for."""
    noise = max(noise, math.sqrt(2.0 * found.friction / found.step_size))
    count = min(max(int(LOOK * budget.total / 2.0), 1), _PATHS)
    longest = 0.0
    for k in range(count):
        spec = _path(found, noise, clip_norm, rng)
        label = "energy errors" + (f" {k + 1}" if k else "")
        longest = max(budget.heavy_tail(label, spec, 0.001, LOOK / count) or 0.0, longest)
    return 2.0 * longest if longest else 0.1 * clip_norm


def _path(found: Form, noise: float, clip_norm: float, rng: np.random.Generator) -> PathError:
    """Energy errors along one path of N(0, I)."""
    d, h = len(found.score), found.step_size
    kappa = (h * noise) ** 2 / 4.0
    w, p = rng.standard_normal((2, d))
    points, midpoints = [w], []
    for _ in range(found.n_steps):
        middle = w + h * p / 2.0
        force = noise * rng.standard_normal(d) - middle
        kicked = ((1.0 - kappa) * p + h * force) / (1.0 + kappa)
        w, p = w + h * (p + kicked) / 2.0, kicked
        points.append(w)
        midpoints.append(middle)
    return PathError(
        found.clip,
        np.array(points) @ found.basis.T,
        np.array(midpoints) @ found.basis.T,
        clip_norm,
    )


def pooled(
    first: np.ndarray, first_noise: np.ndarray, second: np.ndarray, second_noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The best of two noisy measurements of one vector, and the covariance of its noise."""
    # of the first; both are exact where there is no noise
    weight = second_noise @ pinvh(first_noise + second_noise)
    covariance = second_noise - weight @ second_noise
    return second + weight @ (first - second), (covariance + covariance.T) / 2.0
