"""Records as parameters and innovations: x = F(parameters, u), with u free of the parameters.

Holding the innovations u fixed while the parameters move (the non-centred, or ancillary, half of an
interweaving strategy, Yu & Meng 2011) moves all records with them, which breaks the tight coupling
between parameters and imputed records.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.distributions.distribution import SymbolicRandomVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.op import RandomVariable

from pymc_dp.base.compat import SolveTriangular
from pymc_dp.base.linker import INTERPRETED

#: Ends of uniform innovations, where quantiles are infinite.
_LOWEST, _LAST = 2.0**-1000, 1.0 - 2.0**-53
#: Above this a distribution function cannot tell values apart to six digits: 6.6 sds of a normal.
HIGHEST = 1.0 - 2.0**-36
HIGHEST_SCORE = 6.6
#: Symbolic random variables of PyMC whose distribution functions do not jump.
_SMOOTH = ("halfcauchy", "weibull")
#: PyMC's quantiles of these are off by 1e-4 about the median.
_INEXACT = ("t",)
#: Halvings of the search for a quantile of counts without a closed form: up to 2^24.
_HALVINGS = 24


Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Innovation:
    """How the records of one random variable are standardised.

    ``standardised(rv, x, w)`` gives the innovations of records x under the parameters of `rv`; w
    are uniform numbers, one per entry, which only discrete records need. ``restored(rv, u)`` gives
    the records again, under whatever parameters `rv` has by then. ``drawn(rng, shape)`` gives new
    innovations; it is ``None`` where drawing records directly is faster.

    Innovations are standard normal (`normal`), uniform on (0, 1) (`uniform`), or neither. They are
    `limited` if they are values of a distribution function (or their scores), from which records
    come back up to `HIGHEST` (`HIGHEST_SCORE`) only.
    """

    standardised: Callable[[Variable, Variable, Variable], Variable]
    restored: Callable[[Variable, Variable], Variable]
    normal: bool = False
    uniform: bool = False
    drawn: Draw | None = None
    limited: bool = False


def innovation(rv: Variable) -> Innovation | None:
    """Innovations of a random variable; ``None`` where no formula is known."""
    name = getattr(rv.owner.op, "name", None) or ""
    if name == "multivariate_normal" and any(k != 1 for k in _parameters(rv)[1].type.shape[:-2]):
        return None  # a covariance of each record's own
    if name in _FAMILIES:
        return _FAMILIES[name]
    if name in _SHAPED:
        place, family, draw = _SHAPED[name]
        shape = _parameters(rv)[place]
        if not depends_on_variables(shape):
            number = pytensor.function([], shape, mode=INTERPRETED)()
            return replace(family, drawn=lambda rng, size: draw(rng, number, size))
    if name == "discrete_uniform":
        return _whole_interval()
    if name in ("bernoulli", "categorical"):
        return Innovation(
            _within_step, _step_of, uniform=True, drawn=np.random.Generator.random, limited=True
        )
    return _by_quantiles(rv)


def normal_scores(rv: Variable) -> Innovation | None:
    """Standard normal innovations of a random variable; ``None`` where no formula is known."""
    found = innovation(rv)
    if found is not None and not found.normal and not found.uniform:
        found = _by_quantiles(rv)
    if found is None or found.normal:
        return found
    inner = found

    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        u = pt.clip(inner.standardised(rv, x, w), _LOWEST, _LAST)
        return -math.sqrt(2.0) * pt.erfcinv(2.0 * u)

    def restored(rv: Variable, z: Variable) -> Variable:
        return inner.restored(rv, 0.5 * pt.erfc(-z / math.sqrt(2.0)))

    return Innovation(standardised, restored, normal=True, limited=True)


def depends_on_variables(parameter: Variable) -> bool:
    """Whether a parameter is computed from random variables of the model."""
    return any(
        v.owner is not None and isinstance(v.owner.op, RandomVariable | SymbolicRandomVariable)
        for v in ancestors([parameter])
    )


def _parameters(rv: Variable) -> list[Variable]:
    return list(rv.owner.op.dist_params(rv.owner))


_normal = np.random.Generator.standard_normal


def _location_scale(
    location: int | None, scale: int | None, drawn: Draw | None = None, normal: bool = False
) -> Innovation:
    """Records location + scale u, with the places of both among the parameters."""

    def both(rv: Variable) -> tuple[Variable, Variable]:
        found = _parameters(rv)
        return (
            pt.zeros(()) if location is None else found[location],
            pt.ones(()) if scale is None else found[scale],
        )

    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        place, size = both(rv)
        return (x - place) / size

    def restored(rv: Variable, u: Variable) -> Variable:
        place, size = both(rv)
        return place + size * u

    return Innovation(standardised, restored, normal=normal, drawn=drawn)


def _log_normal() -> Innovation:
    inner = _location_scale(0, 1)
    return Innovation(
        lambda rv, x, w: inner.standardised(rv, pt.log(x), w),
        lambda rv, u: pt.exp(inner.restored(rv, u)),
        normal=True,
        drawn=_normal,
    )


def _interval() -> Innovation:
    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        low, high = _parameters(rv)
        return (x - low) / (high - low)

    def restored(rv: Variable, u: Variable) -> Variable:
        low, high = _parameters(rv)
        return low + (high - low) * u

    return Innovation(standardised, restored, uniform=True, drawn=np.random.Generator.random)


def _whole_interval() -> Innovation:
    def ends(rv: Variable) -> tuple[Variable, Variable]:
        low, high = _parameters(rv)
        return low, high - low + 1

    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        low, width = ends(rv)
        return (x - low + w) / width

    def restored(rv: Variable, u: Variable) -> Variable:
        low, width = ends(rv)
        return (low + pt.minimum(pt.floor(u * width), width - 1)).astype(rv.type.dtype)

    return Innovation(standardised, restored, uniform=True, drawn=np.random.Generator.random)


def _many_normals() -> Innovation:
    def root(rv: Variable) -> tuple[Variable, Variable]:
        mean, cov = _parameters(rv)
        while cov.type.ndim > 2:
            cov = cov[0]
        return mean, pt.linalg.cholesky(cov)

    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        mean, lower = root(rv)
        return SolveTriangular(lower=True, b_ndim=2)(lower, (x - mean).T).T

    def restored(rv: Variable, u: Variable) -> Variable:
        mean, lower = root(rv)
        return mean + u @ lower.T

    return Innovation(standardised, restored, normal=True, drawn=_normal)


#: By the names of PyTensor's random operations; places are those of their parameters.
_FAMILIES = {
    "normal": _location_scale(0, 1, _normal, normal=True),
    "halfnormal": _location_scale(0, 1, lambda rng, size: np.abs(rng.standard_normal(size))),
    "laplace": _location_scale(0, 1, lambda rng, size: rng.laplace(size=size)),
    "logistic": _location_scale(0, 1, lambda rng, size: rng.logistic(size=size)),
    "cauchy": _location_scale(0, 1, np.random.Generator.standard_cauchy),
    "halfcauchy": _location_scale(None, 0, lambda rng, size: np.abs(rng.standard_cauchy(size))),
    "gumbel": _location_scale(0, 1, lambda rng, size: rng.gumbel(size=size)),
    "exponential": _location_scale(None, 0, np.random.Generator.standard_exponential),
    "lognormal": _log_normal(),
    "uniform": _interval(),
    "multivariate_normal": _many_normals(),
}
#: Those with one parameter that must not move: else x is no such function of the others.
_SHAPED: dict[str, tuple[int, Innovation, Callable[..., np.ndarray]]] = {
    "t": (0, _location_scale(1, 2), np.random.Generator.standard_t),
    "gamma": (0, _location_scale(None, 1), np.random.Generator.standard_gamma),
}


# -- by distribution functions --------------------------------------------------------------------


def _steps(rv: Variable) -> Variable:
    """(..., k) cumulative probabilities of 0, ..., k - 1."""
    [p] = _parameters(rv)
    if rv.owner.op.name == "bernoulli":
        return pt.stack([1.0 - p, pt.ones_like(p)], axis=-1)
    return pt.cumsum(p, axis=-1)


def _within_step(rv: Variable, x: Variable, w: Variable) -> Variable:
    """Uniform on the step of the distribution function that belongs to x."""
    ends = _steps(rv)
    starts = pt.concatenate([pt.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    here = pt.eq(pt.arange(ends.shape[-1]), x[..., None])
    low, high = (pt.switch(here, edge, 0.0).sum(axis=-1) for edge in (starts, ends))
    return low + w * (high - low)


def _step_of(rv: Variable, u: Variable) -> Variable:
    ends = _steps(rv)
    last = ends.shape[-1] - 1
    below = pt.le(ends[..., :-1], u[..., None]).sum(axis=-1)
    return pt.minimum(below, last).astype(rv.type.dtype)


def _by_quantiles(rv: Variable) -> Innovation | None:
    """Values of the distribution function; for counts, uniform numbers within its step."""
    name = getattr(rv.owner.op, "name", None)
    if not isinstance(rv.owner.op, RandomVariable) and name not in _SMOOTH:
        return None  # made of others, such as censored ones: it may have atoms
    if name in _INEXACT:
        return None
    discrete = rv.type.dtype.startswith("int")
    probe = pt.as_tensor_variable(np.zeros((1,) * rv.type.ndim))
    try:
        pm.logcdf(rv, probe.astype(rv.type.dtype), warn_rvs=False)
    except (NotImplementedError, ValueError, TypeError):
        return None
    quantile = _quantile(rv, probe) if not discrete else _count_quantile
    if quantile is None:
        return None

    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        high = pt.exp(pm.logcdf(rv, x, warn_rvs=False))
        if not discrete:
            return high
        low = pt.exp(pm.logcdf(rv, x - 1, warn_rvs=False))
        return low + w * (high - low)

    def restored(rv: Variable, u: Variable) -> Variable:
        return quantile(rv, pt.clip(u, _LOWEST, _LAST)).astype(rv.type.dtype)

    return Innovation(standardised, restored, uniform=True, limited=True)


def _quantile(rv: Variable, probe: Variable) -> Callable[[Variable, Variable], Variable] | None:
    try:
        pm.icdf(rv, probe + 0.5, warn_rvs=False)
    except (NotImplementedError, ValueError, TypeError):
        return None
    return lambda rv, u: pm.icdf(rv, u, warn_rvs=False)


def _count_quantile(rv: Variable, u: Variable) -> Variable:
    """The smallest count of at least this probability, found by halving."""
    log_u = pt.log(u)
    below = pt.full_like(u, -1.0)  # the distribution function is less than u here
    above = pt.full_like(u, 2.0**_HALVINGS - 1.0)
    for _ in range(_HALVINGS):
        middle = pt.floor((below + above) / 2.0)
        reached = pt.ge(pm.logcdf(rv, middle.astype(rv.type.dtype), warn_rvs=False), log_u)
        above, below = pt.switch(reached, middle, above), pt.switch(reached, below, middle)
    return above
