"""Reparameterise by what the likelihood depends on, where that is non-linear in the parameters.

The preparation learns the likelihood of these *effects* (:mod:`pymc_dp.rows.nonlinear`), which is
near normal in large data. The target is public: prior times that likelihood at the effects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.replace import graph_replace
from scipy.optimize import minimize

from pymc_dp.base.matrices import Coordinates
from pymc_dp.publication.explore import CHAINS, Explored, better, explore, in_support
from pymc_dp.records.extraction import Records
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import RowFunctions, compile_parameter_function
from pymc_dp.rows.nonlinear import Seen, see
from pymc_dp.tuning.model_parts import ModelParts
from pymc_dp.tuning.quadratic import Quadratic, far_from, shuffled, spare

_PLACES = 4  # places at which derivatives of effects are computed
_FAR = 30.0  # no boundary where records accept an effect this many prior widths away
_SEEDS = 0, 1  # seeds of the draws: all is public


@dataclass(frozen=True, eq=False)
class Effects:
    """The records of a model as functions of effects, and a normal approximation of their prior.

    Shapes: median (k,), precision (k, k). `start` holds initial values and prior widths of the
    effects. The normal prior guides only the search. `solved`: see `_solved`.
    """

    seen: Seen
    engine: RowEngine
    start: Coordinates
    median: np.ndarray
    precision: np.ndarray
    solved: tuple[np.ndarray, np.ndarray] | None

    def gradient(self, effects: np.ndarray) -> np.ndarray:
        """Gradient of the log-density of the approximate prior."""
        return self.precision @ (self.median - effects)

    def both(self, effects: np.ndarray) -> tuple[float, np.ndarray]:
        """Log-density of the approximate prior, and its gradient."""
        slope = self.gradient(effects)
        return 0.5 * float((effects - self.median) @ slope), slope


def effects_of(
    records: Records,
    engine: RowEngine,
    prior_draws: np.ndarray | None,
    compile_kwargs: dict[str, Any] | None,
) -> Effects | None:
    """Records in terms of their effects; None where parameters themselves are as good.

    Public: decided from the graph, the prior draws (m, d) and made-up data. Effects with a boundary
    (a shape ``mu**2 / sigma**2``, say), which a step of the search could pass, are not used.
    """
    if prior_draws is None:
        return None
    places = prior_draws[:_PLACES]
    graphs = [group.functions.graph for group in engine.groups]
    for seen in see(engine.groups, graphs, records.parameters, places, compile_kwargs):
        found = _effects(seen, records, engine, prior_draws, compile_kwargs)
        if found is not None:  # a product of scales has a boundary, its factors may have none
            return found
    return None


def _effects(
    seen: Seen,
    records: Records,
    engine: RowEngine,
    prior_draws: np.ndarray,
    compile_kwargs: dict[str, Any] | None,
) -> Effects | None:
    """The records in terms of `seen`; None where these cannot be drawn, or have a boundary."""
    drawn = np.array([seen.function(theta) for theta in prior_draws])
    low, median, high = np.quantile(drawn, [0.16, 0.5, 0.84], axis=0)
    widths = (high - low) / 2.0
    if not (np.isfinite(drawn).all() and (widths > 0.0).all()):
        return None
    groups = [
        replace(old, functions=RowFunctions(graph, seen.parameters, compile_kwargs))
        for graph, old in zip(seen.graphs, engine.groups, strict=True)
    ]
    k = len(median)
    start = Coordinates(seen.function(records.initial), np.diag(widths))
    in_effects = RowEngine(groups, seen.parameters, engine.n_units, start)
    if _has_boundary(in_effects):
        return None
    # heavy tails (products of a scale and a normal) would make it too wide in the middle
    scaled = np.clip((drawn - median) / widths, -3.0, 3.0)
    correlation = np.corrcoef(scaled.T).reshape(k, k)
    correlation = 0.99 * correlation + 0.01 * np.eye(k)
    precision = np.linalg.inv(widths[:, None] * correlation * widths)
    precision = (precision + precision.T) / 2.0
    return Effects(seen, in_effects, start, median, precision, _solved(seen, prior_draws[:_PLACES]))


def _solved(seen: Seen, places: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """A parameter for each mixed effect, linear in it alone (b of b + a**2), and the effects."""
    d = places.shape[1]
    mixed = np.arange(seen.n_direct, seen.parameters.size)
    only_here = np.ones(d, dtype=bool)  # seen by no other effect, so far
    owner = np.full(d, -1)
    for theta in places:
        for s, e in enumerate(np.eye(d)):
            ahead, here, behind = (seen.function(theta + h * e) for h in (1.0, 0.0, -1.0))
            changed = np.flatnonzero(ahead != here)
            bent = np.abs(ahead - 2.0 * here + behind) > 1e-9 * np.abs(ahead - behind)
            if len(changed) != 1 or changed[0] < seen.n_direct or bent[changed].any():
                only_here[s] = False
            elif owner[s] in (-1, changed[0]):
                owner[s] = changed[0]
    parameters = []
    for j in mixed:
        candidates = np.flatnonzero(only_here & (owner == j))
        if not candidates.size:
            return None
        parameters.append(int(candidates[-1]))
    return np.array(parameters), mixed


def _has_boundary(engine: RowEngine) -> bool:
    """Whether made-up records become impossible when one effect is changed a lot."""
    made_up = engine.synthetic()
    here = np.isfinite(made_up.log_likelihood(np.zeros(engine.d)))
    for j in range(engine.d):
        for sign in (-_FAR, _FAR):
            there = made_up.log_likelihood(sign * np.eye(engine.d)[j])
            if not np.isfinite(there[here]).all():
                return True
    return False


# -- the form -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InEffects(Quadratic):
    """The quadratic form where coordinates, score and curvature are those of effects."""

    effects: Effects

    _replaced = (
        "log-likelihood, as a function of the effects that the records see (group means, say), was "
        "replaced"
    )

    @property
    def likelihood(self) -> None:
        """It is one of effects."""
        return None

    def explored(self, parts: ModelParts) -> Explored:
        """As for `Quadratic`; w are the whitened effects of theta.

        NUTS moves in effects where they can replace parameters (the centred parametrisation, which
        suits informative data), and if that does not mix well also in the parameters; the better
        run is kept. Chains start far apart in the prior, so that several modes are seen.
        """
        theta, effects = parts.records.parameters.theta, self.effects
        flat = effects.seen.symbolic(parts.records.parameters)
        target, starts = self.log_target(parts, flat), _apart(parts)

        def in_parameters() -> Explored:
            begin = in_support(theta, target, _tops(theta, target, starts), spare(parts))
            return explore(theta, target, begin, _SEEDS[1])

        if effects.solved is None:
            return shuffled(in_parameters())
        moved, inside = _in_effects(theta, flat, target, effects.solved)
        places, entries = effects.solved
        begin, others = starts.copy(), spare(parts).copy()
        begin[:, places] = others[:, places] = self.clip.location[entries]

        def in_effects() -> Explored:
            found = explore(theta, inside, in_support(theta, inside, begin, others), _SEEDS[0])
            back = compile_parameter_function([theta], moved)
            return found._replace(draws=np.array([back(row) for row in found.draws]))

        return shuffled(better(in_effects, in_parameters))

    def far(self, drawn: np.ndarray, parts: ModelParts) -> float:
        """As for `Quadratic`."""
        effects = np.array([self.effects.seen.function(theta) for theta in drawn])
        return far_from(self.clip.location, effects)


def _apart(parts: ModelParts) -> np.ndarray:
    """(chains, d) the initial point, and draws from the middle of the prior far from each other."""
    assert parts.prior_draws is not None  # or there were no effects
    low, median, high = np.quantile(parts.prior_draws, [0.16, 0.5, 0.84], axis=0)
    widths = (high - low) / 2.0
    scaled = (parts.prior_draws - median) / widths
    norms = np.linalg.norm(scaled, axis=1)
    middle = parts.prior_draws[norms <= np.median(norms)]
    chosen = [parts.records.initial]
    for _ in range(CHAINS - 1):
        nearest = np.min(
            [np.linalg.norm((middle - place) / widths, axis=1) for place in chosen], axis=0
        )
        chosen.append(middle[np.argmax(nearest)])
    return np.array(chosen)


def _in_effects(
    theta: Any, flat: Any, target: Any, solved: tuple[np.ndarray, np.ndarray]
) -> tuple[Any, Any]:
    """Parameters and target as functions of effects, effect j = offset_j + slope_j theta_s(j)."""
    places, entries = solved
    offset = graph_replace(flat, {theta: pt.set_subtensor(theta[places], 0.0)})[entries]
    ahead = graph_replace(flat, {theta: pt.set_subtensor(theta[places], 1.0)})[entries]
    slope = ahead - offset
    moved = pt.set_subtensor(theta[places], (theta[places] - offset) / slope)
    inside = graph_replace(target, {theta: moved}) - pt.sum(pt.log(pt.abs(slope)))
    return moved, inside


def _tops(theta: Any, target: Any, starts: np.ndarray) -> np.ndarray:
    """Places about the modes of the target near `starts`, from where NUTS finds the bulk."""
    gradient = pytensor.grad(target, theta, disconnected_inputs="ignore")
    function = compile_parameter_function([theta], [target, gradient])

    def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = function(at)
        return (-float(value), -slope) if np.isfinite(value) else (1e300, np.zeros_like(at))

    return np.array([minimize(negative, at, jac=True, method="L-BFGS-B").x for at in starts])
