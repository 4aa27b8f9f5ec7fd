"""Records as parameters and innovations: x = F(parameters, u), with u free of the parameters.

Moving the parameters with u held fixed (the non-centred, or ancillary, half of an interweaving
strategy, Yu & Meng 2011) moves the imputed records as well, and so breaks their tight coupling to
the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.random import Generator
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.op import RandomVariable

from pymc_dp.base.compat import SolveTriangular
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.published.reading import Function, Reading, State, forward, is_drawn, placed
from pymc_dp.records.graph import ParameterVector

_LOWEST, _LAST = 2.0**-1000, 1.0 - 2.0**-53  # ends of uniform innovations with finite quantiles
#: Above this a distribution function does not separate values to six digits: 6.6 sds of a normal.
HIGHEST = 1.0 - 2.0**-36
HIGHEST_SCORE = 6.6
_SMOOTH = ("halfcauchy", "weibull")  # symbolic, but their distribution functions do not jump
_INEXACT = ("t",)  # PyMC's quantiles of these are off by 1e-4 about the median
_HALVINGS = 24  # halvings of the search for a quantile of counts without a closed form: up to 2^24
_PRIOR_DRAWS = 400  # draws of the prior from which the first reference normal is made
_PRIOR_WEIGHT = 20.0  # its weight, in draws, against what the chain sees while it tunes
_SHRINKS = 100  # a bracket is halved about this often before the parameters stay where they are

Draw = Callable[[Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Innovation:
    """How the records of one random variable are standardised.

    ``standardised(rv, x, w)`` gives the innovations of records x under the parameters of `rv`; w
    are uniform numbers for discrete records. ``restored(rv, u)`` gives the records under the
    parameters that `rv` has then. ``drawn(rng, shape)`` draws innovations; ``None`` where drawing
    records is faster. Innovations may be standard normal (`normal`) or uniform on (0, 1)
    (`uniform`). `limited` ones are values of a distribution function (or their scores), from which
    records come back up to `HIGHEST` (`HIGHEST_SCORE`) only.
    """

    standardised: Callable[[Variable, Variable, Variable], Variable]
    restored: Callable[[Variable, Variable], Variable]
    normal: bool = False
    uniform: bool = False
    drawn: Draw | None = None
    limited: bool = False


def innovation(rv: Variable) -> Innovation | None:
    """Innovations of a random variable; ``None`` where no formula is known."""
    name = getattr(rv.owner.op, "name", None)
    if name == "multivariate_normal" and any(k != 1 for k in _parameters(rv)[1].type.shape[:-2]):
        return None  # a covariance of each record's own
    if name in _SHAPED and not depends_on_variables(_parameters(rv)[0]):
        family, draw = _SHAPED[name]
        shape = pytensor.function([], _parameters(rv)[0], mode=INTERPRETED)()
        return replace(family, drawn=lambda rng, size: draw(rng, shape, size))
    return _FAMILIES.get(name) or _by_quantiles(rv)


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


def known(
    reading: Reading, records: Sequence[Variable], find: Callable[[Variable], Innovation | None]
) -> dict[Variable, Innovation]:
    """Innovations, as `find` gives them, of records that come back from them at the start."""
    candidates = {rv: f for rv in records if (f := find(rv)) is not None}
    given, back = reading.constrained(reading.model.free_RVs), []
    for rv, found in candidates.items():
        here, x = placed(rv, given), given[rv]
        u = found.standardised(here, x, pt.full_like(x, 0.5, dtype="float64"))
        back.append(forward(reading.model, rv, found.restored(here, u), here))
    values = Function(reading.inputs, back, compiled=False)(*reading.at_the_start)
    start = (reading.start[reading.model.rvs_to_values[rv].name] for rv in candidates)
    return {
        rv: found
        for (rv, found), x, y in zip(candidates.items(), start, values, strict=True)
        if np.allclose(x, y, rtol=1e-4, atol=1e-4)
    }


def depends_on_variables(parameter: Variable) -> bool:
    """Whether a parameter is computed from random variables of the model."""
    return any(map(is_drawn, ancestors([parameter])))


def _parameters(rv: Variable) -> list[Variable]:
    return list(rv.owner.op.dist_params(rv.owner))


# -- by formulas ----------------------------------------------------------------------------------


def _affine(ends: Callable[..., tuple[Variable, Variable]], **kinds: Any) -> Innovation:
    """Records location + scale u, where ``ends(*parameters)`` gives both."""

    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        location, scale = ends(*_parameters(rv))
        return (x - location) / scale

    def restored(rv: Variable, u: Variable) -> Variable:
        location, scale = ends(*_parameters(rv))
        return location + scale * u

    return Innovation(standardised, restored, **kinds)


def _log_normal() -> Innovation:
    inner = _affine(_first_two)
    return Innovation(
        lambda rv, x, w: inner.standardised(rv, pt.log(x), w),
        lambda rv, u: pt.exp(inner.restored(rv, u)),
        normal=True,
        drawn=Generator.standard_normal,
    )


def _whole_interval() -> Innovation:
    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        low, high = _parameters(rv)
        return (x - low + w) / (high - low + 1)

    def restored(rv: Variable, u: Variable) -> Variable:
        low, high = _parameters(rv)
        place = pt.minimum(pt.floor(u * (high - low + 1)), high - low)
        return (low + place).astype(rv.type.dtype)

    return Innovation(standardised, restored, uniform=True, drawn=Generator.random)


def _many_normals() -> Innovation:
    def mean_and_root(rv: Variable) -> tuple[Variable, Variable]:
        mean, cov = _parameters(rv)
        while cov.type.ndim > 2:
            cov = cov[0]
        return mean, pt.linalg.cholesky(cov)

    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        mean, lower = mean_and_root(rv)
        return SolveTriangular(lower=True, b_ndim=2)(lower, (x - mean).T).T

    def restored(rv: Variable, u: Variable) -> Variable:
        mean, lower = mean_and_root(rv)
        return mean + u @ lower.T

    return Innovation(standardised, restored, normal=True, drawn=Generator.standard_normal)


def _categories() -> Innovation:
    """Uniform on the step of the distribution function that belongs to a category."""

    def steps(rv: Variable) -> Variable:
        """(..., k) cumulative probabilities of 0, ..., k - 1."""
        [p] = _parameters(rv)
        if rv.owner.op.name == "bernoulli":
            return pt.stack([1.0 - p, pt.ones_like(p)], axis=-1)
        return pt.cumsum(p, axis=-1)

    def standardised(rv: Variable, x: Variable, w: Variable) -> Variable:
        ends = steps(rv)
        starts = pt.concatenate([pt.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
        here = pt.eq(pt.arange(ends.shape[-1]), x[..., None])
        low, high = (pt.switch(here, edge, 0.0).sum(axis=-1) for edge in (starts, ends))
        return low + w * (high - low)

    def restored(rv: Variable, u: Variable) -> Variable:
        ends = steps(rv)
        below = pt.le(ends[..., :-1], u[..., None]).sum(axis=-1)
        return pt.minimum(below, ends.shape[-1] - 1).astype(rv.type.dtype)

    return Innovation(standardised, restored, uniform=True, drawn=Generator.random, limited=True)


def _first_two(location: Variable, scale: Variable) -> tuple[Variable, Variable]:
    return location, scale


def _scale_alone(*parameters: Variable) -> tuple[Any, Variable]:
    return 0.0, parameters[-1]


#: By the names of PyTensor's random operations.
_FAMILIES: dict[str | None, Innovation] = {
    "normal": _affine(_first_two, normal=True, drawn=Generator.standard_normal),
    "halfnormal": _affine(_first_two, drawn=lambda rng, n: np.abs(rng.standard_normal(n))),
    "laplace": _affine(_first_two, drawn=lambda rng, n: rng.laplace(size=n)),
    "logistic": _affine(_first_two, drawn=lambda rng, n: rng.logistic(size=n)),
    "cauchy": _affine(_first_two, drawn=Generator.standard_cauchy),
    "halfcauchy": _affine(_scale_alone, drawn=lambda rng, n: np.abs(rng.standard_cauchy(n))),
    "gumbel": _affine(_first_two, drawn=lambda rng, n: rng.gumbel(size=n)),
    "exponential": _affine(_scale_alone, drawn=Generator.standard_exponential),
    "lognormal": _log_normal(),
    "uniform": _affine(lambda a, b: (a, b - a), uniform=True, drawn=Generator.random),
    "discrete_uniform": _whole_interval(),
    "multivariate_normal": _many_normals(),
    "bernoulli": _categories(),
    "categorical": _categories(),
}
#: Those whose first parameter must not move: else x is no such function of the others.
_SHAPED: dict[str | None, tuple[Innovation, Callable[..., np.ndarray]]] = {
    "t": (_affine(lambda nu, mu, sigma: (mu, sigma)), Generator.standard_t),
    "gamma": (_affine(_scale_alone), Generator.standard_gamma),
}


# -- by distribution functions --------------------------------------------------------------------


def _by_quantiles(rv: Variable) -> Innovation | None:
    """Values of the distribution function; for counts, uniform numbers within its step."""
    name = getattr(rv.owner.op, "name", None)
    if not isinstance(rv.owner.op, RandomVariable) and name not in _SMOOTH:
        return None  # made of others, such as censored ones: it may have atoms
    if name in _INEXACT:
        return None
    discrete = rv.type.dtype.startswith("int")
    quantile = _count_quantile if discrete else partial(pm.icdf, warn_rvs=False)
    probe = pt.as_tensor_variable(np.zeros((1,) * rv.type.ndim))
    try:
        pm.logcdf(rv, probe.astype(rv.type.dtype), warn_rvs=False)
        quantile(rv, probe + 0.5)
    except (NotImplementedError, ValueError, TypeError):
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


# -- moves that hold them -------------------------------------------------------------------------


class NonCentred:
    """Elliptical slice moves of the parameters with the records' innovations held fixed.

    Records in `latents` move, by default all with known innovations, also those of other steps,
    which would hold shared parameters in place. ValueError if a given variable has no innovations,
    or no parameter can be moved.

    The target is the posterior of the parameters given the innovations and the records that are
    held. Elliptical slice sampling (Murray, Adams & MacKay 2010) with any normal reference
    (Nishihara, Murray & Adams 2014) is exact; the reference is learned from the prior and from
    draws of the tuning chain. Far in the upper tail records do not come back from innovations. If
    there is such a record nothing is moved; innovations stay, so this holds on both sides of a move
    and the target stays invariant.
    """

    def __init__(self, reading: Reading, latents: Sequence[Variable] | None = None) -> None:
        model = reading.model
        found = known(reading, reading.all_records, innovation)
        wanted = list(found) if latents is None else latents
        unknown = [rv.name for rv in wanted if rv not in found]
        if unknown:
            raise ValueError(
                f"noncentered: no innovations are known from which {unknown} come back. Leave "
                "these out."
            )
        self.moved = _parents(reading, [rv for rv in reading.latents if rv in wanted])
        if not self.moved:
            raise ValueError(
                "noncentered: no continuous parameter stands directly behind the records, so "
                "nothing can be moved together with them."
            )
        self.latents = [
            rv
            for rv in model.free_RVs
            if rv in wanted and rv not in self.moved and set(ancestors([rv])) & set(self.moved)
        ]
        self.reading = reading
        values = [model.rvs_to_values[rv] for rv in self.moved]
        self.vector = ParameterVector.of(values, [reading.start[v.name].shape for v in values])
        both = [*reading.latents, *reading.others]
        self._where = [both.index(rv) for rv in self.moved]
        self._places = [both.index(rv) for rv in self.latents]
        self._rest = [
            k for k, rv in enumerate(both) if rv not in self.moved and rv not in self.latents
        ]
        self._limited = [k for k, rv in enumerate(self.latents) if found[rv].limited]
        self._compile(found)
        self._learn_prior()

    def _compile(self, found: dict[Variable, Innovation]) -> None:
        reading, model = self.reading, self.reading.model
        given = reading.constrained(model.free_RVs)
        held, uniforms, standardised = [], [], []
        moved: dict[Variable, Variable] = {}
        new = {rv: x for rv, x in given.items() if rv not in self.latents}
        for rv in self.latents:
            w, u = (pt.tensor(dtype="float64", shape=(None,) * rv.type.ndim) for _ in range(2))
            standardised.append(found[rv].standardised(placed(rv, given), given[rv], w))
            here = placed(rv, new)
            new[rv] = found[rv].restored(here, u)
            moved[model.rvs_to_values[rv]] = forward(model, rv, new[rv], here)
            uniforms.append(w)
            held.append(u)
        others = [rv for rv in model.basic_RVs if rv not in self.latents]
        log_density = model.logp(vars=[*others, *model.potentials])
        [log_density] = clone_replace([log_density], moved, rebuild_strict=False)
        finite = pt.all([pt.all(pt.abs(v) < np.inf) for v in moved.values()])
        level = pt.switch(finite, log_density.astype("float64"), -np.inf)
        outputs = self.vector.substitute([level, *reading.factors(moved), *moved.values()])
        self._innovations = Function([*reading.inputs, *uniforms], standardised)
        self._target = Function(
            [self.vector.theta, *[reading.inputs[k] for k in self._rest], *held], outputs
        )

    def _learn_prior(self) -> None:
        """A reference normal about the prior; robust, since priors may have heavy tails."""
        model = self.reading.model
        values = [forward(model, rv, rv, rv) for rv in self.moved]
        try:  # the seed is a setting, the same in all chains
            drawn = pm.draw(values, draws=_PRIOR_DRAWS, mode=INTERPRETED, random_seed=0)
            theta = np.concatenate([x.reshape(_PRIOR_DRAWS, -1) for x in drawn], axis=1)
        except NotImplementedError:  # an improper prior cannot be drawn from
            theta = self.vector.ravel(self.reading.start)[None] + [[-1.0], [0.0], [1.0]]
        low, middle, high = np.quantile(theta, [0.16, 0.5, 0.84], axis=0)
        self._prior = middle, np.diag(np.maximum((high - low) / 2.0, 1e-6) ** 2)

    def forget(self) -> None:
        """Begin a chain."""
        self._learned = 0
        self._recent: list[np.ndarray] = []
        self._refer(*self._prior)

    def _refer(self, mean: np.ndarray, covariance: np.ndarray) -> None:
        self._location, self._root = mean, np.linalg.cholesky(covariance)
        self._whiten = np.linalg.inv(self._root)

    def learn(self, state: State) -> None:
        """Take a tuning draw into account: the reference comes from the last half of them."""
        self._recent.append(self._theta(state))
        self._learned += 1
        n, d = len(self._recent), self.vector.size
        if n >= 2 * d and self._learned & (self._learned - 1) == 0:
            draws = np.array(self._recent)
            learned = np.cov(draws, rowvar=False, bias=True).reshape(d, d)
            weight = _PRIOR_WEIGHT / (_PRIOR_WEIGHT + n)
            # the prior's own correlations are not known, and it may be very wide
            capped = np.minimum(np.diag(self._prior[1]), 25.0 * np.diag(learned) + 1e-12)
            covariance = weight * np.diag(capped) + (1.0 - weight) * learned
            self._refer(draws.mean(axis=0), covariance + 1e-12 * np.eye(d))
            self._recent = []

    def _theta(self, state: State) -> np.ndarray:
        return np.concatenate([np.ravel(state.point[k]) for k in self._where]).astype(float)

    def __call__(self, state: State, rng: Generator) -> bool:
        """Move the parameters and records of `state`; False if a record is too far in a tail."""
        uniforms = [rng.random(state.point[k].shape) for k in self._places]
        held = self._innovations(*state.point, *uniforms)
        if any((held[k] > HIGHEST).any() for k in self._limited):
            return False
        rest = [state.point[k] for k in self._rest]
        theta = self._theta(state)

        def target(theta: np.ndarray) -> tuple[float, list[np.ndarray]]:
            log_density, *found = self._target(theta, *rest, *held)
            white = self._whiten @ (theta - self._location)
            level = float(log_density) + 0.5 * float(white @ white)
            return (level if level == level else -math.inf), found

        level, _ = target(theta)
        if not math.isfinite(level):
            return True
        level += math.log(rng.random())
        offset = theta - self._location
        other = self._root @ rng.standard_normal(len(theta))
        angle = 2.0 * math.pi * rng.random()
        low, high = angle - 2.0 * math.pi, angle
        for _ in range(_SHRINKS):
            new = self._location + offset * math.cos(angle) + other * math.sin(angle)
            reached, found = target(new)
            if reached > level:
                self._take(state, new, found)
                break
            low, high = (angle, high) if angle < 0.0 else (low, angle)
            angle = low + (high - low) * rng.random()
        return True

    def _take(self, state: State, theta: np.ndarray, found: list[np.ndarray]) -> None:
        rows, local, *moved = found
        for k, x in zip(self._where, self.vector.point(theta).values(), strict=True):
            state.point[k] = x
        for k, x in zip(self._places, moved, strict=True):
            state.point[k] = np.array(x)
        state.rows, state.local = np.ascontiguousarray(rows), np.array(local)
        state.total[: rows.shape[1]] = state.rows[: state.n_present].sum(axis=0)


def _parents(reading: Reading, latents: Sequence[Variable]) -> list[Variable]:
    """Continuous parameters directly behind records, not behind other parameters alone."""
    found: set[Variable] = set()
    for rv in latents:
        found |= set(ancestors(rv.owner.inputs, blockers=reading.model.free_RVs))
    return [rv for rv in reading.others if rv in found and rv.type.dtype.startswith("float")]
