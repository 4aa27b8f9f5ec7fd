"""Public densities, sampled by NUTS: a prior, and a likelihood made of released values."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.exceptions import SamplingError
from pymc.model import Model
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.basic import NormalRV
from pytensor.tensor.subtensor import Subtensor

from pymc_dp.base import compat as _compat
from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.publication.noise_aware import Likelihood
from pymc_dp.records.graph import ParameterVector
from pymc_dp.rows.functions import compile_parameter_function

#: Chains, tuning iterations and draws of NUTS.
CHAINS, _TUNE, _DRAWS = 4, 1000, 1000
_AGAIN = "The same call resumes from what was released, at no further cost."
#: Most parameters for a dense mass matrix. From the 101 draws of the first window, one of more than
#: 100 parameters would be singular, and NUTS would never recover.
_DENSE = 50
#: Effective draws that are enough.
ENOUGH = 400.0
#: Variance between chains over that within, above which they are in different places.
_APART = 0.5


class Explored(NamedTuple):
    """What NUTS made of a target."""

    draws: np.ndarray  # (4000, d), unconstrained
    effective: float  # what they are worth in the worst parameter
    apart: bool  # whether chains ended in different places

    @property
    def doubt(self) -> str:
        """Why the draws are not to be relied on, in words; empty where they are."""
        if self.apart:
            return "chains that explored prior times released likelihood ended in different places"
        if not self.effective >= ENOUGH:
            return (
                "chains that explored prior times released likelihood are worth about "
                f"{self.effective:.0f} draws"
            )
        return ""


def better(*ways: Callable[[], Explored]) -> Explored:
    """Of two ways to explore, what the first made, or the better where that is worth too little.

    SamplingError if NUTS could begin in neither.
    """
    found: list[Explored] = []
    for k, way in enumerate(ways):
        try:
            found.append(way())
        except SamplingError:
            if k == len(ways) - 1 and not found:
                raise
        if found and found[-1].effective >= ENOUGH:
            break
    apart = any(explored.apart for explored in found)  # modes may be seen from one place only
    best = max(found, key=lambda explored: np.nan_to_num(explored.effective))
    return best._replace(apart=apart)


class NonCentred(NamedTuple):
    """Symbolic functions of one vector: theta of z, z of theta, and log |d theta / d z| at z."""

    theta: Any
    z: Any
    log_jacobian: Any


def noncentred(model: Model, parameters: ParameterVector) -> NonCentred | None:
    """Normal variables of unknown location or scale as location + scale * z; None without any.

    In z, NUTS comes to where the scale of many variables is near 0. In the variables themselves it
    does not, and its draws may look well mixed all the same.
    """
    plain = parameters.symbolic
    theta, z, logs = list(plain), list(plain), []
    for rv in model.free_RVs:  # parents first
        value, node = model.rvs_to_values[rv], rv.owner
        if not isinstance(node.op, NormalRV) or model.rvs_to_transforms[rv] is not None:
            continue
        law = model.replace_rvs_by_values(node.op.dist_params(node))
        if set(parameters.values).isdisjoint(ancestors(law)):
            continue
        k = parameters.values.index(value)
        location, scale = parameters.substitute(law, theta)
        theta[k] = location + scale * plain[k]
        logs.append(pt.log(scale + pt.zeros(parameters.shapes[k])).sum())
        location, scale = parameters.substitute(law)
        z[k] = (plain[k] - location) / scale
    if not logs:
        return None
    at, back = (pt.concatenate([part.ravel() for part in parts]) for parts in (theta, z))
    return NonCentred(at, back, pt.add(*logs))


def _shared(array: np.ndarray) -> Any:
    """An input of a known shape: to check it in compiled code takes seconds to compile."""
    return pytensor.shared(np.ascontiguousarray(array), shape=array.shape)


def _in_coordinates(target: Any, theta: Any, x: Any, scaling: np.ndarray | None) -> Any:
    """The target as a function of x, theta = scaling @ x."""
    if scaling is None:
        return graph_replace(target, {theta: x}, strict=False)
    matrix, replaced = _shared(scaling), {}
    for v in ancestors([target]):  # a product is quicker to compile than a gradient of entries
        if v.owner is not None and isinstance(v.owner.op, Subtensor) and v.owner.inputs[0] is theta:
            replaced[v] = v.owner.op(matrix, *v.owner.inputs[1:]) @ x
    if theta in ancestors([target], blockers=replaced):
        replaced[theta] = matrix @ x
    return graph_replace(target, replaced, strict=False)


def log_likelihood(flat: Any, at: Coordinates, likelihood: Likelihood) -> Any:
    """Log N(G; H w, H + V) up to a constant, of symbolic theta `flat` (d,) with coordinates w.
    Released values are inputs, so that the compiled function is cached.
    """
    weight = np.linalg.pinv(likelihood.curvature + likelihood.noise, hermitian=True)
    inverse, curvature, weight, location, score = (
        _shared(array)
        for array in (
            np.linalg.inv(at.scaling),
            likelihood.curvature,
            weight,
            at.location,
            likelihood.score,
        )
    )
    residual = score - pt.dot(curvature, pt.dot(inverse, flat - location))
    return -pt.dot(residual, pt.dot(weight, residual)) / 2.0


def in_support(theta: Any, target: Any, starts: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """The starts; those outside of the support of the target are replaced by spare ones inside."""
    log_density = compile_parameter_function([theta], target, {"mode": INTERPRETED})
    inside = (at for at in spare if np.isfinite(log_density(at)))
    return np.array([at if np.isfinite(log_density(at)) else next(inside, at) for at in starts])


class _Whole:
    """A callback that ends all chains once one was interrupted: PyMC goes on with the next."""

    def __init__(self) -> None:
        self.chains = 0

    def __call__(self, trace: Any, draw: Any) -> None:
        if draw.chain > self.chains:
            raise KeyboardInterrupt
        self.chains += draw.draw_idx == _TUNE + _DRAWS - 1  # draw.is_last never says so


def explore(
    theta: Any,
    target: Any,
    starts: np.ndarray,
    seed: int,
    scaling: np.ndarray | None = None,
    target_accept: float = 0.9,
    through: NonCentred | None = None,
) -> Explored:
    """Draws of a public log density, a symbolic function `target` of the vector `theta`.

    `starts` are (CHAINS, d). With a (d, d) `scaling`, NUTS moves in x, theta = scaling @ x, in
    which widths are about alike; `through` which it moves in z instead. Narrow places need a
    `target_accept` nearer to 1.
    KeyboardInterrupt however PyMC takes one: draws of part of the chains are not used.
    SamplingError if NUTS cannot begin.
    """
    quiet = logging.getLogger("pymc")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    d = starts.shape[1]
    if through is not None:
        target = graph_replace(target, {theta: through.theta}, strict=False) + through.log_jacobian
        forth, back = (compile_parameter_function([theta], x) for x in (through.z, through.theta))
        starts = np.array([forth(start) for start in starts])
    if scaling is not None:
        starts = np.linalg.solve(scaling, starts.T).T
    try:
        with warnings.catch_warnings(), pm.Model(model=None):
            warnings.simplefilter("ignore")  # PyMC calls the dense mass matrix experimental
            x = pm.Flat("theta", shape=d)
            pm.Potential("target", _in_coordinates(target, theta, x, scaling))
            result = pm.sample(
                _DRAWS,
                tune=_TUNE,
                chains=CHAINS,
                cores=1,
                init="adapt_full" if d <= _DENSE else "adapt_diag",
                target_accept=target_accept,
                initvals=[{"theta": start} for start in starts],
                random_seed=seed,
                progressbar=False,
                compute_convergence_checks=False,
                compile_kwargs={"mode": "NUMBA"},
                callback=_Whole(),
            )
    except ValueError as error:
        if "Not enough samples" in str(error):  # interrupted before there were any
            raise KeyboardInterrupt(_AGAIN) from None
        raise
    finally:
        quiet.setLevel(level)
    drawn = _compat.group(result, "posterior")["theta"].values
    drawn = drawn if scaling is None else drawn @ scaling.T
    if drawn.shape[:2] != (CHAINS, _DRAWS):
        raise KeyboardInterrupt(_AGAIN)
    if through is not None:
        drawn = np.apply_along_axis(back, 2, drawn)
    between, within = drawn.mean(axis=1).var(axis=0, ddof=1), drawn.var(axis=1, ddof=1).mean(axis=0)
    apart = bool(np.any(between > _APART * within))
    return Explored(drawn.reshape(-1, d), float(_compat.effective_draws(drawn).min()), apart)
