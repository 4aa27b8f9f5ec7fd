"""The parts of a model that a sampler is made of: records, public terms, where the prior is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pymc as pm
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.transforms import CircularTransform
from pymc.logprob.transforms import IntervalTransform
from pymc.model import Model
from pytensor.graph.traversal import ancestors

from pymc_dp.base.compat import working
from pymc_dp.budget import PrivacyBudget
from pymc_dp.kernels.interfaces import Prior
from pymc_dp.publication.results import check_step, unconstrain
from pymc_dp.records.extraction import draws_are_public
from pymc_dp.rows.contributions import law_unknown
from pymc_dp.rows.coordinates import Coordinates
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
    """

    coordinates: Coordinates
    engine: RowEngine
    prior: Prior
    clip_norms: dict[str, float]
    shares: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


class ModelParts:
    """What a model is made of, in unconstrained parameters theta. Raises UnsafeModel."""

    def __init__(
        self, model: Model, budget: PrivacyBudget, compile_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.model, self.budget, self.compile_kwargs = model, budget, compile_kwargs
        # the number of entries of the data must not be told where it is private
        check_step(model, data=not budget.rows_are_private)
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
            curved = np.ones(len(initial))
            for j, axis in enumerate(_STEP * np.eye(len(initial))):
                slope = self.terms.gradient(initial + axis)[j]
                slope -= self.terms.gradient(initial - axis)[j]
                if slope < 0.0:
                    curved[j] = 1.0 / np.sqrt(-slope / (2.0 * _STEP))
            widths = np.where(usable, widths, curved)
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
            named = rv not in bounded and not _is_bounding(transform, rv) and _is_flat(rv, model)
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


def _is_bounding(transform: Any, rv: Any) -> bool:
    if not isinstance(transform, IntervalTransform):
        return False
    return all(bound is not None for bound in transform.args_fn(*rv.owner.inputs))


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
