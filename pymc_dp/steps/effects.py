"""Posteriors curved for public reasons: records are asked about effects, NUTS does the rest.

Where the shared values of a likelihood are non-linear in the parameters (:mod:`pymc_dp.rows.seen`),
the preparation learns the likelihood of these *effects*, which is near normal in large data; the
target, prior times that likelihood at the effects of the parameters, is public, so that PyMC's own
NUTS may look at it as often as it likes.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pytensor.graph.replace import graph_replace
from scipy.optimize import minimize

from pymc_dp import _compat
from pymc_dp.matrices import root
from pymc_dp.records import Records
from pymc_dp.rows.engine import Coordinates, RowEngine
from pymc_dp.rows.functions import RowFunctions, compile_parameter_function
from pymc_dp.rows.seen import Seen, see
from pymc_dp.rows.store import RowGroup
from pymc_dp.warmup.prepared import Prepared

__all__ = ["Effects", "effects_of", "spread", "target_draws"]

#: Places at which derivatives of effects are looked at.
_PLACES = 4
#: An effect that records accept this many prior widths from its median has no boundary there.
_FAR = 30.0
#: Chains, tuning iterations and draws of NUTS.
_CHAINS, _TUNE, _DRAWS = 2, 1000, 2000
#: Effective draws that are enough.
_ENOUGH = 400.0


@dataclass(frozen=True, eq=False)
class Effects:
    """The records of a model as functions of effects, and a normal approximation of their prior.

    Attributes
    ----------
    seen : Seen
    engine : RowEngine
        In effects.
    start : Coordinates
        Initial values of the effects, and their prior widths.
    median : (k,) ndarray
    precision : (k, k) ndarray
        Of the prior; it guides the search, the target has the exact prior.
    solved : (ndarray, ndarray) or None
        Parameters, and the effects that can take their place: see `_solved`.
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

    def far(self, drawn: np.ndarray, found: Prepared) -> float:
        """Fraction of (m, d) draws at which the released likelihood is an extrapolation.

        Parameters
        ----------
        drawn : (m, d) ndarray
        found : Prepared
        """
        effects = np.array([self.seen.function(theta) for theta in drawn])
        w = np.linalg.solve(spread(effects).scaling, (effects - found.clip.location).T)
        return float((np.linalg.norm(w, axis=0) > 2.0 * np.sqrt(len(w)) + 4.0).mean())


def effects_of(
    records: Records,
    engine: RowEngine,
    prior_draws: np.ndarray | None,
    compile_kwargs: dict[str, Any] | None,
) -> Effects | None:
    """Records in terms of their effects; None where parameters themselves are as good.

    Parameters
    ----------
    records : Records
    engine : RowEngine
        The same records in unconstrained parameters.
    prior_draws : (m, d) ndarray or None
    compile_kwargs : dict, optional

    Notes
    -----
    Public: decided from the graph, the prior and made-up data.  Effects with a boundary (a shape
    ``mu**2 / sigma**2``, say), which a step of the search could pass, are not used.
    """
    if prior_draws is None:
        return None
    graphs = [group.functions.graph for group in engine.groups]
    places = prior_draws[:_PLACES]
    seen = see(engine.groups, graphs, records.parameters, places, compile_kwargs)
    if seen is None:
        return None
    drawn = np.array([seen.function(theta) for theta in prior_draws])
    low, median, high = np.quantile(drawn, [0.16, 0.5, 0.84], axis=0)
    widths = (high - low) / 2.0
    if not (np.isfinite(drawn).all() and (widths > 0.0).all()):
        return None
    groups = [
        RowGroup(RowFunctions(graph, seen.parameters, compile_kwargs), old.store, old.units)
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
    return Effects(seen, in_effects, start, median, precision, _solved(seen, places))


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


def target_draws(
    records: Records, effects: Effects, found: Prepared, size: int, seed: int
) -> np.ndarray:
    """(size, d) unconstrained draws, in random order, of prior times released likelihood.

    Parameters
    ----------
    records : Records
    effects : Effects
    found : Prepared
        What was released, in effects.
    size : int
        At most; there are no more than NUTS makes.
    seed : int
        Public.

    Notes
    -----
    The target is p(theta) N(G; H w, H + V), w the whitened effects of theta, G the released score,
    H the released curvature and V the noise in G.  NUTS moves in effects where these can take the
    place of parameters (the centred parametrisation, which informative data ask for), and in the
    parameters themselves if it does not mix well there.
    """
    theta = records.parameters.theta
    [public] = records.parameters.substitute([records.public_logp])
    flat = effects.seen.symbolic(records.parameters)
    at = found.coordinates
    w = pt.dot(np.ascontiguousarray(np.linalg.inv(at.scaling)), flat - at.location)
    residual = found.score - pt.dot(np.ascontiguousarray(found.curvature), w)
    weight = np.linalg.pinv(found.curvature + found.covariance, hermitian=True)
    weight = np.ascontiguousarray(weight)
    target = public - pt.dot(residual, pt.dot(weight, residual)) / 2.0

    best, most = None, 0.0
    if effects.solved is not None:
        moved, inside = _in_effects(theta, flat, target, effects.solved)
        start = records.initial.copy()
        start[effects.solved[0]] = found.clip.location[effects.solved[1]]
        drawn, most = _nuts(theta, inside, start, seed)
        best = _evaluated(theta, moved, drawn)
    if most < _ENOUGH:
        drawn, ess = _nuts(theta, target, _top(theta, target, records.initial), seed + 1)
        if ess > most:
            best, most = drawn, ess
    assert best is not None
    if most < _ENOUGH:
        warnings.warn(
            "Prior and released likelihood make a posterior in which NUTS did not mix well (about "
            f"{most:.0f} effective draws); results are less reliable than they look. Narrower "
            "priors may help.",
            UserWarning,
            stacklevel=2,
        )
    order = np.random.default_rng(seed).permutation(len(best))[:size]
    return best[order]


def _in_effects(
    theta: Any, flat: Any, target: Any, solved: tuple[np.ndarray, np.ndarray]
) -> tuple[Any, Any]:
    """Parameters, and the target, as functions of a vector with effects in place of parameters.

    Effect j is offset_j + slope_j theta_s(j); the density is that of the effects.
    """
    places, entries = solved
    offset = graph_replace(flat, {theta: pt.set_subtensor(theta[places], 0.0)})[entries]
    ahead = graph_replace(flat, {theta: pt.set_subtensor(theta[places], 1.0)})[entries]
    slope = ahead - offset
    moved = pt.set_subtensor(theta[places], (theta[places] - offset) / slope)
    inside = graph_replace(target, {theta: moved}) - pt.sum(pt.log(pt.abs(slope)))
    return moved, inside


def _nuts(theta: Any, target: Any, start: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
    """(draws, d) draws of a public log density, and how many they are worth."""
    quiet = logging.getLogger("pymc")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), pm.Model(model=None):
            warnings.simplefilter("ignore")  # PyMC calls the dense mass matrix experimental
            x = pm.Flat("theta", shape=len(start))
            pm.Potential("target", graph_replace(target, {theta: x}, strict=False))
            result = pm.sample(
                _DRAWS,
                tune=_TUNE,
                chains=_CHAINS,
                cores=1,
                init="adapt_full",
                target_accept=0.9,
                initvals={"theta": start},
                random_seed=seed,
                progressbar=False,
                compute_convergence_checks=False,
                compile_kwargs={"mode": "NUMBA"},
            )
    finally:
        quiet.setLevel(level)
    drawn = _compat.group(result, "posterior")["theta"].values
    return drawn.reshape(-1, len(start)), float(_compat.effective_draws(drawn).min())


def _evaluated(theta: Any, moved: Any, drawn: np.ndarray) -> np.ndarray:
    """(draws, d) values of a function of the parameters."""
    function = compile_parameter_function([theta], moved)
    return np.array([function(row) for row in drawn])


def _top(theta: Any, target: Any, start: np.ndarray) -> np.ndarray:
    """About the mode of the target, from where NUTS finds its bulk."""
    gradient = pytensor.grad(target, theta, disconnected_inputs="ignore")
    function = compile_parameter_function([theta], [target, gradient])

    def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = function(at)
        return (-float(value), -slope) if np.isfinite(value) else (1e300, np.zeros_like(at))

    return np.asarray(minimize(negative, start, jac=True, method="L-BFGS-B").x)


def spread(drawn: np.ndarray) -> Coordinates:
    """Coordinates in which draws are about N(0, I)."""
    covariance = np.cov(drawn.T).reshape(drawn.shape[1], drawn.shape[1])
    return Coordinates(drawn.mean(axis=0), root(covariance))
