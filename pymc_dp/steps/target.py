"""Targets that are public as a whole: the prior times a released likelihood, sampled by NUTS.

Chains of the quadratic form never touch a record, so nothing speaks for a sampler of our own.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.exceptions import SamplingError
from pytensor.graph.replace import graph_replace
from scipy.optimize import minimize

from pymc_dp.base.matrices import root
from pymc_dp.records.extraction import Records
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.functions import compile_parameter_function
from pymc_dp.steps.effects import Effects
from pymc_dp.tuning.explore import CHAINS, ENOUGH, Explored, explore, in_support, log_likelihood
from pymc_dp.tuning.prepared import Prepared

#: Places near the initial point that are tried where there are no prior draws.
_TRIES = 100
#: Seed of everything here: all is public.
_SEED = 0
#: Part of the prior's width from which on the records have said next to nothing.
_UNTOUCHED = 0.8


def target_draws(
    records: Records,
    effects: Effects | None,
    found: Prepared,
    prior_draws: np.ndarray | None,
) -> Explored:
    """Draws of prior times released likelihood, in random order.

    The same releases give the same draws.

    The target is p(theta) N(G; H w, H + V), w the whitened parameters, or effects, of theta, G the
    released score, H the released curvature and V the noise in G.  Where effects can take the place
    of parameters NUTS moves in these (the centred parametrisation, which informative data ask for);
    if it does not mix well there, in the parameters themselves, and the better one is kept.

    `found` is about `effects`, or about unconstrained parameters where these are None.  Chains
    start near `prior_draws`, (m, d) and public, so that several modes are seen.

    Raises KeyboardInterrupt however PyMC takes one: no draws of part of the chains are used.
    Raises SamplingError if NUTS cannot begin, wherever it was tried.
    """
    theta = records.parameters.theta
    [public] = records.parameters.substitute([records.public_logp])
    flat = theta if effects is None else effects.seen.symbolic(records.parameters)
    target = public + log_likelihood(flat, found.coordinates, found.likelihood)
    starts = _starts(records, found, prior_draws, about=effects is None)
    spare = prior_draws
    if spare is None:
        around = np.random.default_rng(_SEED).standard_normal((_TRIES, len(records.initial)))
        spare = records.initial + around

    best = Explored(np.empty((0, records.parameters.size)), -1.0, False)
    if effects is not None and effects.solved is not None:
        moved, inside = _in_effects(theta, flat, target, effects.solved)
        places, entries = effects.solved
        begin, others = starts.copy(), spare.copy()
        begin[:, places] = others[:, places] = found.clip.location[entries]
        try:
            best = explore(theta, inside, in_support(theta, inside, begin, others), _SEED)
            best = best._replace(draws=_evaluated(theta, moved, best.draws))
        except SamplingError:
            pass
    if best.effective < ENOUGH:
        begin = starts if effects is None else _tops(theta, target, starts)
        begin = in_support(theta, target, begin, spare)
        scaling = found.coordinates.scaling if effects is None else None
        again = explore(theta, target, begin, _SEED + 1, scaling)
        apart = best.apart or again.apart  # modes may be seen from one place only
        best = max(best, again, key=lambda explored: explored.effective)._replace(apart=apart)
    if best.doubt:
        warnings.warn(
            "Prior and released likelihood make a posterior in which NUTS did not mix well, or "
            f"that has several modes (about {best.effective:.0f} effective draws): results are "
            "less reliable than they look. Narrower priors, one that breaks a symmetry, or the "
            "effects of a hierarchy written as mu + tau * z with z ~ N(0, 1), may help.",
            UserWarning,
            stacklevel=2,
        )
    order = np.random.default_rng(_SEED).permutation(len(best.draws))
    return best._replace(draws=best.draws[order])


def _starts(
    records: Records, found: Prepared, prior_draws: np.ndarray | None, about: bool
) -> np.ndarray:
    """(chains, d) points: about the released place, or draws from the prior."""
    if about:
        rng = np.random.default_rng(_SEED)
        at, d = found.coordinates, len(records.initial)
        inside = rng.standard_normal((CHAINS, d)) * np.arange(CHAINS)[:, None] / CHAINS
        return np.array([at.theta(w) for w in inside])
    if prior_draws is None:
        return np.tile(records.initial, (CHAINS, 1))
    return _apart(records.initial, prior_draws)


def _apart(initial: np.ndarray, prior_draws: np.ndarray) -> np.ndarray:
    """(chains, d) the initial point, and draws from the middle of the prior far from each other."""
    low, median, high = np.quantile(prior_draws, [0.16, 0.5, 0.84], axis=0)
    widths = (high - low) / 2.0
    scaled = (prior_draws - median) / widths
    norms = np.linalg.norm(scaled, axis=1)
    middle = prior_draws[norms <= np.median(norms)]
    chosen = [initial]
    for _ in range(CHAINS - 1):
        nearest = np.min(
            [np.linalg.norm((middle - place) / widths, axis=1) for place in chosen], axis=0
        )
        chosen.append(middle[np.argmax(nearest)])
    return np.array(chosen)


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


def _evaluated(theta: Any, moved: Any, drawn: np.ndarray) -> np.ndarray:
    function = compile_parameter_function([theta], moved)
    return np.array([function(row) for row in drawn])


def _tops(theta: Any, target: Any, starts: np.ndarray) -> np.ndarray:
    """Places about the modes of the target near `starts`, from where NUTS finds the bulk."""
    gradient = pytensor.grad(target, theta, disconnected_inputs="ignore")
    function = compile_parameter_function([theta], [target, gradient])

    def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = function(at)
        return (-float(value), -slope) if np.isfinite(value) else (1e300, np.zeros_like(at))

    return np.array([minimize(negative, at, jac=True, method="L-BFGS-B").x for at in starts])


def spread(drawn: np.ndarray) -> Coordinates:
    """Coordinates in which (m, d) draws are about N(0, I)."""
    covariance = np.cov(drawn.T).reshape(drawn.shape[1], drawn.shape[1])
    return Coordinates(drawn.mean(axis=0), root(covariance))


def far(
    drawn: np.ndarray, effects: Effects | None, found: Prepared, unseen: np.ndarray | None
) -> float:
    """Fraction of (m, d) draws at which the released likelihood is an extrapolation.

    Distances are in widths of the draws themselves: those of a normal posterior lie within
    2 sqrt(d) + 4 of where its curvature was taken. Parameters that records do not see (`unseen`, by
    their indices) may be anywhere.
    """
    seen = drawn if effects is None else np.array([effects.seen.function(t) for t in drawn])
    origin = found.clip.location
    if unseen is not None:
        seen, origin = np.delete(seen, unseen, axis=1), np.delete(origin, unseen)
    w = np.linalg.solve(spread(seen).scaling, (seen - origin).T)
    return float((np.linalg.norm(w, axis=0) > 2.0 * np.sqrt(len(w)) + 4.0).mean())


def about_prior(
    drawn: np.ndarray,
    prior_draws: np.ndarray | None,
    names: list[tuple[str, slice]],
    stacklevel: int = 5,
) -> list[str]:
    """Variables about which the draws say no more than the prior; warns if these are all.

    A name comes with the number of entries where these are not all.  Both draws are (m, d) and
    unconstrained; `names` are variables, and where their entries are.
    """
    if prior_draws is None:
        return []
    low, high = np.quantile(drawn, [0.16, 0.84], axis=0)
    least, most = np.quantile(prior_draws, [0.16, 0.84], axis=0)
    untouched = high - low > _UNTOUCHED * (most - least)
    found = []
    for name, where in names:
        count, size = int(untouched[where].sum()), len(untouched[where])
        if count:
            found.append(name if count == size else f"{name} ({count} of {size} entries)")
    if {name for name, _ in names} <= set(found):
        warnings.warn(
            "These draws are about as wide as the prior in every variable: the budget told next to "
            "nothing of these records under this model. A larger epsilon, more records or fewer "
            "parameters would help.",
            UserWarning,
            stacklevel=stacklevel,
        )
    return found
