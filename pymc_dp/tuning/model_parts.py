"""The parts of a model that a sampler is made of: records, public terms, where the prior is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pymc as pm
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.transforms import CircularTransform
from pymc.logprob.transforms import IntervalTransform
from pymc.model import Model
from pytensor.graph.traversal import ancestors
from scipy.optimize import minimize

from pymc_dp.base.compat import working
from pymc_dp.base.matrices import Coordinates, minus_hessian, root, within
from pymc_dp.budget import PrivacyBudget
from pymc_dp.kernels.interfaces import Prior
from pymc_dp.publication.results import check_step, unconstrain
from pymc_dp.records.extraction import draws_are_public
from pymc_dp.rows.contributions import law_unknown
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import PublicTerms
from pymc_dp.rows.groups import is_flat
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise

_DRAWS = 500
_SEED = 20_240_229  # public; a resumed preparation asks the same questions
_FAR, _FALL = 1e6, 5.0  # a proper log density falls by `_FALL` at `_FAR` prior widths
_PLACES, _EXACT = 5, 1e12  # places that are checked; largest log density that shows it
_STEP = 1e-3  # step of the differences that tell the prior's curvature
_NO_NUMBERS = (  # about a prior that has no density, or no draws
    "Nothing has been spent. A prior may hold NaN or an infinite number: model.point_logps() says "
    "which one. Default priors that bambi scales by truncated or censored data may; give your own."
)


@dataclass(frozen=True)
class Design:
    """How a sampler moves and what it may ask.

    `engine` has the records in the coordinates of clipping, `prior` the public terms in those of
    the chains. `shares` are relative parts of the rest of the budget; the ledger keeps `settings`.
    Public `draws` (m, d) replace the chains of a target that is public altogether.
    """

    coordinates: Coordinates
    engine: RowEngine
    prior: Prior
    clip_norms: dict[str, float]
    shares: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    draws: np.ndarray | None = None


class ModelParts:
    """What a model is made of, in unconstrained parameters theta. Raises UnsafeModel."""

    def __init__(
        self,
        model: Model,
        budget: PrivacyBudget,
        compile_kwargs: dict[str, Any] | None = None,
        computed: Sequence[str] | None = None,
    ) -> None:
        self.model, self.budget, self.compile_kwargs = model, budget, compile_kwargs
        # the number of entries of the data must not be told where it is private
        check_step(model, not budget.rows_are_private, computed)
        self.records = budget.records_of(model)
        d = len(self.records.initial)
        self._theta = Coordinates(np.zeros(d), np.eye(d))

    @cached_property
    def terms(self) -> PublicTerms:
        """The public log density; a search cannot begin where it has none."""
        terms = PublicTerms.of(self.records, self._theta, self.compile_kwargs)
        value, slope = terms.both(self.records.initial)
        if np.isnan(value) or not (np.isfinite(value) or np.isfinite(slope).all()):
            raise ValueError(
                f"The prior density at the initial values is not a number. {_NO_NUMBERS}"
            )
        return terms

    @cached_property
    def engine(self) -> RowEngine:
        """The records."""
        return RowEngine.of(self.records, self._theta, self.compile_kwargs)

    @property
    def names(self) -> list[tuple[str, slice]]:
        """The free variables, and where their entries are among the parameters."""
        parameters = self.records.parameters
        return [
            (self.model.values_to_rvs[value].name, where)
            for value, where in zip(parameters.values, parameters.slices, strict=True)
        ]

    def design(
        self,
        coordinates: Coordinates,
        clip_norms: dict[str, float],
        settings: Mapping[str, Any] | None = None,
    ) -> Design:
        """A design in which chains move in the coordinates in which records are clipped."""
        engine: RowEngine = self.engine.with_coordinates(coordinates)
        predictor, _ = recognise(self.engine, self.compile_kwargs)
        if predictor is not None:  # the same likelihood, several times as fast
            linear = PredictorEngine(self.engine, predictor).with_coordinates(coordinates)
            engine = linear if linear.pays(self.budget.n_public) else engine
        prior = self.terms.with_coordinates(coordinates)
        return Design(coordinates, engine, prior, clip_norms, settings=dict(settings or {}))

    # -- the prior ------------------------------------------------------------------------------

    @cached_property
    def start(self) -> Coordinates:
        """Initial point of the model, and the prior width of every parameter as a diagonal scaling.

        Half the width of the central 68 % of the prior draws, which heavy tails do not spoil;
        without draws (``pm.Flat``, code of the user) the inverse root of the prior's curvature
        there, or 1.
        """
        initial, widths = self.records.initial, np.full(len(self.records.initial), np.nan)
        if self.prior_draws is not None:
            low, high = np.quantile(self.prior_draws, [0.16, 0.84], axis=0)
            widths = (high - low) / 2.0
        usable = np.isfinite(widths) & (widths > 0.0)
        if not usable.all():
            steps = np.full(len(initial), _STEP)
            bent = minus_hessian(self.terms.gradient, initial, steps).diagonal()
            bent = np.where(bent > 0.0, bent, 1.0)
            widths = np.where(usable, widths, 1.0 / np.sqrt(bent))
        return Coordinates(initial, np.diag(widths))

    @cached_property
    def prior_draws(self) -> np.ndarray | None:
        """Always the same (500, d) draws from the prior, if it can be drawn from."""
        return self.draw_prior(_DRAWS, _SEED)

    def draw_prior(self, size: int, seed: int) -> np.ndarray | None:
        """(size, d) draws from the prior; None where it cannot be.  The seed is public."""
        model, budget = self.model, self.budget
        if not draws_are_public(model, budget.public, budget.longest_unnamed):
            return None
        try:
            draws = pm.draw(model.free_RVs, draws=size, random_seed=seed)
            if any(np.isnan(value).all(axis=0).any() for value in draws):  # PyMC 6 raises no error
                raise ValueError("not a number")
        except (NotImplementedError, ArithmeticError):  # without end: Flat, Uniform(-inf, inf)
            return None
        except ValueError as error:
            raise ValueError(f"PyMC cannot draw from the prior. {_NO_NUMBERS}") from error
        named = {rv.name: v[None] for rv, v in zip(model.free_RVs, draws, strict=True)}
        return unconstrain(model, self.records.parameters, named)[0]

    @cached_property
    def improper(self) -> list[str]:
        """Names of the free variables that nothing public bounds, as ``pm.Flat``.

        Found by name in the graph, or because the public log density does not fall along their
        axes; a sum of two of them that a public observation bounds is not found.
        """
        model, public = self.model, set(self.budget.public)
        bounded = {*ancestors([rv for rv in model.observed_RVs if rv.name in public])}
        places = self.prior_draws
        if places is None or not np.isfinite(places).all():
            places = np.random.default_rng(_SEED).standard_normal(
                (_PLACES, len(self._theta.location))
            )
            places = self.start.location + places @ self.start.scaling
        found = []
        for name, where in self.names:
            rv = model[name]
            transform = model.rvs_to_transforms[rv]
            between = isinstance(transform, IntervalTransform) and all(
                bound is not None for bound in transform.args_fn(*rv.owner.inputs)
            )
            named = rv not in bounded and not between and _is_flat(rv, model)
            periodic = isinstance(transform, CircularTransform)
            if named or not (periodic or self._falls(places[:_PLACES], where)):
                found.append(name)
        return found

    def _falls(self, places: np.ndarray, where: slice) -> bool:
        """Whether the public log density falls far out on the axes of some parameters, or may.

        By 5 at 10^6 widths of the prior, where a Cauchy density has fallen by 27; from several
        places with unequal parameters, as a scale of 0 suits equal effects and large values hide a
        fall.
        """

        def log_density(at: np.ndarray) -> float:
            try:
                return float(self.terms.log_density(at))
            except Exception:  # so far out, a model may refuse its parameters in any way
                return np.nan

        with np.errstate(all="ignore"):
            here = np.array([log_density(at) for at in places])
            exact = np.abs(here) < _EXACT
            known = here[exact]
            for j in range(*where.indices(places.shape[1])):
                for sign in (-1.0, 1.0):
                    far = places[exact]
                    far[:, j] += sign * _FAR * self.start.scaling[j, j]
                    # all places are looked at only where it does not fall
                    falls = (
                        not log_density(at) >= h - _FALL for at, h in zip(far, known, strict=True)
                    )
                    if len(far) and not any(falls):
                        return False
        return True


def _is_flat(rv: Any, model: Model) -> bool:
    """Whether a flat distribution is part of that of `rv`, apart from other free variables."""
    others = {*model.free_RVs} - {rv}
    nodes = {v.owner for v in ancestors([rv], blockers=others) if v.owner and v not in others}
    for node in nodes:
        inner = node.op.fgraph.apply_nodes if hasattr(node.op, "fgraph") else ()
        ops = [node.op, getattr(node.op, "base_rv_op", None), *(n.op for n in inner)]
        if any(isinstance(op, FlatRV | HalfFlatRV) for op in ops):
            return True
    return False


# -- records in other parameters ------------------------------------------------------------------


def piecewise_linear(engine: RowEngine) -> bool:
    """Whether log-likelihoods are piecewise linear, near the start."""
    at = engine.coordinates.location
    nearby = np.random.default_rng(0).normal(0.0, 0.3, (2, len(at)))
    return is_flat(engine.groups, [at + move for move in nearby])


def compile_rows(engine: RowEngine, progressbar: bool) -> None:
    """Evaluate on made-up data what a preparation will ask for; it takes seconds."""
    at = np.zeros(engine.d)
    with working("Compiling the model", progressbar), np.errstate(all="ignore"):
        engines = [engine]
        if not law_unknown(engine) and (outcomes := engine.each_alone()) is not engine:
            engines.append(outcomes)
        for made_up in (each.synthetic() for each in engines):
            made_up.log_likelihood(at)
            made_up.scores(at)


# -- what a search sees of the public terms -------------------------------------------------------


#: Pairs of public draws; most steps of the optimiser; how far it goes, in widths of the prior.
_PAIRS, _STEPS, _FURTHEST = 8, 30, 20.0
_FARTHEST_MODE = 5.0  # how far a mode may be, in standard deviations per parameter


class Density(Protocol):
    """A log density of d parameters."""

    def gradient(self, theta: np.ndarray, /) -> np.ndarray:
        """(d,) gradient."""

    def both(self, theta: np.ndarray, /) -> tuple[float, np.ndarray]:
        """Log density and gradient."""


def unseen(structure: RowEngine, location: np.ndarray) -> np.ndarray:
    """Indices of the parameters that reach no record, as those of the prior of group effects."""
    return np.flatnonzero(~seen_together(structure, location).diagonal())


def seen_together(structure: RowEngine, location: np.ndarray) -> np.ndarray:
    """(d, d) bool: pairs of parameters that a record may see; from the graph, at public places."""
    return structure.touched(Coordinates(location, np.eye(len(location))))


class Public:
    """The public log density, as a search sees it: widths `spread` of the prior, and `unseen`."""

    def __init__(self, density: Density, structure: RowEngine, start: Coordinates) -> None:
        self.density, self.gradient = density, density.gradient
        self.origin = start.location
        self.spread = np.linalg.norm(start.scaling, axis=1)
        self.unseen = unseen(structure, start.location)

    def score(self, at: Coordinates) -> np.ndarray:
        """(d,) gradient in w at the location, without the parameters that are settled there."""
        slope = np.array(self.gradient(at.location))
        slope[self.unseen] = 0.0
        return np.asarray(at.scaling.T @ slope)

    def settled(self, location: np.ndarray, precision: np.ndarray) -> np.ndarray:
        """The location, with the parameters that no record sees where the density expects them.

        Unchanged where the density cannot be evaluated. It is the mean, in these parameters, of the
        normal law of this `precision` (d, d), about the posterior's, nearest to the density
        (Kullback-Leibler; Opper & Archambeau 2009). The density at the location alone would make
        scales too small, as estimates of effects differ less than effects do, or 0, the mode for
        two levels of groups.
        """
        unseen = self.unseen
        if not unseen.size:
            return location
        unit, metric = self.spread[unseen], precision.copy()
        metric[unseen, unseen] += unit**-2.0  # the quadratic model of their density may be flat
        draws = np.random.default_rng(0).standard_normal((_PAIRS, len(location)))
        moves = draws @ root(np.linalg.inv(metric)).T
        places = location + np.vstack([moves, -moves])
        before, away = places[:, unseen], (self.origin - location)[unseen] / unit

        def expected(move: np.ndarray) -> tuple[float, np.ndarray]:
            """Minus the mean log density, and its gradient."""
            places[:, unseen] = before + unit * move
            values, slopes = zip(*(self.density.both(theta) for theta in places), strict=True)
            return -float(np.mean(values)), -unit * np.mean(slopes, axis=0)[unseen]

        with np.errstate(all="ignore"):
            found = minimize(
                expected,
                np.zeros(len(unseen)),
                jac=True,
                method="L-BFGS-B",
                bounds=[(x - _FURTHEST, x + _FURTHEST) for x in away],
                options={"maxiter": _STEPS},
            )
            there = location.copy()
            there[unseen] += unit * found.x
            known = math.isfinite(found.fun) and np.isfinite(self.gradient(there)).all()
        return there if known else location


def find_mode(
    target: Prior, metric: np.ndarray, start: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mode (d,) of a public target, and the precision there, by Newton steps in a trust region.

    It is looked for within five standard deviations of the start, per parameter, by the precision
    `metric` (d, d) of what is known before.
    """
    d = len(metric)
    start = np.zeros(d) if start is None else start
    z, radius = start, math.sqrt(d)
    for _ in range(200):
        precision = _precision(target, z)
        slope = np.asarray(target.gradient(z))
        step = within(precision, np.eye(d), slope, radius)
        gain = float(target.log_density(z + step) - target.log_density(z))
        reach = z + step - start
        far = float(reach @ metric @ reach) > _FARTHEST_MODE**2 * d
        if far or not gain > -1e-9:  # a scale in the prior may have its mode at 0
            radius /= 4.0
            if radius < 1e-10:
                break
            continue
        z, radius = z + step, radius * 2.0
        if float(np.linalg.norm(step)) < 1e-6:
            break
    return z, _precision(target, z)


def _precision(target: Prior, z: np.ndarray, step: float = 1e-4) -> np.ndarray:
    """Minus the Hessian, eigenvalues in absolute value."""
    hessian = minus_hessian(target.gradient, z, np.full(len(z), step))
    hessian = np.where(np.isfinite(hessian), hessian, 0.0)
    values, vectors = np.linalg.eigh(hessian)
    return np.asarray((vectors * np.maximum(np.abs(values), 1e-8)) @ vectors.T)
