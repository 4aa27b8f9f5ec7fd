"""Posteriors curved for public reasons: records are asked about effects.

Where the shared values of a likelihood are non-linear in the parameters
(:mod:`pymc_dp.rows.nonlinear`), the preparation learns the likelihood of these *effects*, which is
near normal in large data; the target, prior times that likelihood at the effects of the parameters,
is public (:mod:`pymc_dp.steps.target`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pymc_dp.records.extraction import Records
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import RowFunctions
from pymc_dp.rows.nonlinear import Seen, see

#: Places at which derivatives of effects are computed.
_PLACES = 4
#: An effect has no boundary on a side where records accept it this many prior widths away.
_FAR = 30.0


@dataclass(frozen=True, eq=False)
class Effects:
    """The records of a model as functions of effects, and a normal approximation of their prior.

    Shapes: median (k,), precision (k, k).  `engine` and `start` are in effects; `start` holds their
    initial values and prior widths.  The normal prior guides the search, the target has the exact
    prior.  `solved`: parameters, and the effects that can take their place, see `_solved`.
    """

    seen: Seen
    engine: RowEngine
    start: Coordinates
    median: np.ndarray
    precision: np.ndarray
    solved: tuple[np.ndarray, np.ndarray] | None

    def gradient(self, effects: np.ndarray) -> np.ndarray:
        """(k,) gradient of the log-density of the approximate prior."""
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

    `engine` has the same records in unconstrained parameters; `prior_draws` are (m, d).

    Public: decided from the graph, the prior and made-up data.  Effects with a boundary (a shape
    ``mu**2 / sigma**2``, say), which a step of the search could pass, are not used.
    """
    if prior_draws is None:
        return None
    graphs = [group.functions.graph for group in engine.groups]
    places = prior_draws[:_PLACES]
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
    """For every mixed effect a parameter that is linear in it and in no other effect.

    The ``z`` of ``(mu + tau * z)[g]``, the ``b`` of ``b + a**2``.  None where there are no such.
    """
    d = places.shape[1]
    mixed = np.arange(seen.n_direct, seen.parameters.size)
    alone = np.ones(d, dtype=bool)  # seen by no other effect, so far
    owner = np.full(d, -1)
    for theta in places:
        for s, e in enumerate(np.eye(d)):
            ahead, here, behind = (seen.function(theta + h * e) for h in (1.0, 0.0, -1.0))
            changed = np.flatnonzero(ahead != here)
            bent = np.abs(ahead - 2.0 * here + behind) > 1e-9 * np.abs(ahead - behind)
            if len(changed) != 1 or changed[0] < seen.n_direct or bent[changed].any():
                alone[s] = False
            elif owner[s] in (-1, changed[0]):
                owner[s] = changed[0]
    parameters = []
    for j in mixed:
        candidates = np.flatnonzero(alone & (owner == j))
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
