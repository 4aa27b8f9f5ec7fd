"""Exponential families of PyMC distributions, with statistics scaled to public bounds.

A record y has log density phi . T(y) - A + (a function of y alone). All entries of the sum of T get
the same noise, as large as the norm of the longest T(y), so T is chosen among its affine images:

- Entries in a box are scaled to [-1, 1]. With sensitivities Delta_j and weights w_j of entries, the
  noise on entry j has variance sum_k (w_k Delta_k)^2 / w_j^2; the product of these, the squared
  volume of the noise, is least where all w_k Delta_k are equal. The norm is then sqrt(m).
- (t, t^2) with t in [-1, 1] is a curve that stays away from corners of its box: see `_gaussian`.
- Indicators of K categories have norm 1, and no negative entries.
- Where the number of records is private, 1 is an entry too, with weight w: the volume of the noise,
  (norm^2 + w^2)^(m+1) / w^2, is least at w^2 = norm^2 / m.

Entries with a constant natural parameter say nothing of the parameters and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.linalg import cholesky, solve_triangular

from pymc_dp.errors import UnsafeModel
from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.bounds import Interval


@dataclass(frozen=True, eq=False)
class Family:
    """An exponential family: statistic of the records, and natural parameters of a model.

    `statistic` clamps records (n, ...) to `limits` and maps them to (n, m), with rows no longer
    than `norm`. `natural` is phi, (m,); `log_normalizer` is A, a scalar, or None where it is 0.
    `nonnegative`: no entry of the statistic is negative.
    """

    name: str
    statistic: Callable[[Variable], Variable]
    natural: Variable
    log_normalizer: Variable | None
    norm: float
    nonnegative: bool = False
    limits: Interval | None = None


@dataclass(frozen=True)
class Known:
    """An observed variable: its shared parameters as graphs of `values`, and bounds of a record."""

    name: str
    parameters: list[Variable]
    values: set[Variable]
    lower: np.ndarray
    upper: np.ndarray
    count_is_private: bool

    def varies(self, graph: Variable) -> bool:
        """Whether a graph depends on the parameters."""
        return bool(self.values & ancestors_without_shapes([graph]))

    def within(self, least: float = -math.inf, most: float = math.inf) -> tuple[float, float]:
        """Bounds of a number within the support; UnsafeModel if no finite interval is left."""
        lower, upper = max(float(self.lower), least), min(float(self.upper), most)
        self.refuse_unusable(np.array(lower), np.array(upper))
        return lower, upper

    def refuse_unusable(self, lower: np.ndarray, upper: np.ndarray) -> None:
        """UnsafeModel unless bounds, of a number or a vector, are finite and make an interval."""
        if not (np.isfinite(lower).all() and np.isfinite(upper).all() and (lower < upper).all()):
            raise UnsafeModel(
                f"`{self.name}` needs public bounds, lower < upper, for its sufficient statistic "
                f"to have a sensitivity. Before the budget, write dp.bounds({self.name}=(lower, "
                "upper)) with limits from public knowledge."
            )


# -- statistics in a box --------------------------------------------------------------------------

#: A column of the statistic, its natural parameter, and its public bounds.
Entry = tuple[Callable[[Variable], Variable], Variable, float, float]


def box(
    name: str, known: Known, entries: Sequence[Entry], log_normalizer: Variable, limits: Interval
) -> Family:
    """A family whose entries are scaled to [-1, 1] one by one."""
    kept = [entry for entry in entries if known.varies(entry[1])]
    if not kept:
        raise UnsafeModel(f"The likelihood of `{known.name}` does not depend on the parameters.")
    centre = [(lower + upper) / 2.0 for _, _, lower, upper in kept]
    half = [(upper - lower) / 2.0 for _, _, lower, upper in kept]
    low, high = (np.asarray(end, dtype="float64") for end in limits)

    def statistic(y: Variable) -> Variable:
        y = pt.clip(y.astype("float64"), low, high)
        columns = [
            (column(y) - c) / h for (column, _, _, _), c, h in zip(kept, centre, half, strict=True)
        ]
        return pt.stack(columns, axis=1)

    natural = pt.stack([phi * h for (_, phi, _, _), h in zip(kept, half, strict=True)])
    for (_, phi, _, _), c in zip(kept, centre, strict=True):
        log_normalizer = log_normalizer - phi * c
    return Family(name, statistic, natural, log_normalizer, math.sqrt(len(kept)), False, limits)


def _one(
    name: str, known: Known, phi: Variable, log_normalizer: Variable, most: float = math.inf
) -> Family:
    """A family whose statistic is the record itself, a number from 0 to `most`."""
    lower, upper = known.within(0.0, most)
    limits = np.array(lower), np.array(upper)
    return box(name, known, [(lambda y: y, phi, lower, upper)], log_normalizer, limits)


def _bernoulli(known: Known) -> Family:
    [p] = known.parameters
    return _trials("Bernoulli", known, 1, p)


def _binomial(known: Known) -> Family:
    trials, p = known.parameters
    try:
        n = int(trials.eval())
    except Exception:  # it depends on the parameters, say
        raise UnsafeModel(
            f"`{known.name}`: the number of trials of a Binomial must be a fixed number."
        ) from None
    return _trials("Binomial", known, n, p)


def _trials(name: str, known: Known, n: int, p: Variable) -> Family:
    return _one(name, known, pt.log(p) - pt.log1p(-p), -n * pt.log1p(-p), float(n))


def _poisson(known: Known) -> Family:
    [mu] = known.parameters
    return _one("Poisson", known, pt.log(mu), mu)


def _exponential(known: Known) -> Family:
    [scale] = known.parameters
    return _one("Exponential", known, -1.0 / scale, pt.log(scale))


def _gamma(known: Known) -> Family:
    alpha, scale = known.parameters
    lower, upper = known.within(least=0.0)
    entries: list[Entry] = [(lambda y: y, -1.0 / scale, lower, upper)]
    if known.varies(alpha):
        if lower <= 0.0:
            raise UnsafeModel(
                f"`{known.name}` needs a positive lower bound, since the logarithm of a record is "
                f"an entry of its statistic: dp.bounds({known.name}=(lower, upper)), 0 < lower."
            )
        entries.append((pt.log, alpha, math.log(lower), math.log(upper)))
    normalizer = pt.gammaln(alpha) + alpha * pt.log(scale)
    return box("Gamma", known, entries, normalizer, (np.array(lower), np.array(upper)))


# -- statistics that are no box -------------------------------------------------------------------


def _categorical(known: Known) -> Family:
    """Indicators of the K categories; a label that is none of them counts as zeros.

    Where their sum, the number of records, is public, natural parameters may be shifted: they, and
    the noise of ratios, are smallest with mean 0.
    """
    [p] = known.parameters
    k = p.type.shape[-1]
    if k is None:
        raise UnsafeModel(f"`{known.name}`: the number of categories must be a fixed number.")
    natural = pt.log(p)
    log_normalizer = None
    if not known.count_is_private:
        log_normalizer = -natural.mean()
        natural = natural + log_normalizer

    def statistic(y: Variable) -> Variable:
        return pt.eq(y[:, None], np.arange(k)).astype("float64")

    limits = np.array(0.0), np.array(k - 1.0)
    return Family("Categorical", statistic, natural, log_normalizer, 1.0, True, limits)


def _normal(known: Known) -> Family:
    mu, sigma = known.parameters
    lower, upper = known.within()
    known = replace(known, lower=np.array([lower]), upper=np.array([upper]))
    precision = (sigma**-2.0).reshape((1, 1))
    return _gaussian("Normal", known, mu.reshape((1,)), precision, pt.log(sigma))


def _mv_normal(known: Known) -> Family:
    mu, covariance = known.parameters
    known.refuse_unusable(known.lower, known.upper)
    root = cholesky(covariance, lower=True)
    inverse = solve_triangular(root, pt.eye(covariance.shape[0]), lower=True)
    half = pt.log(pt.diagonal(root)).sum()
    precision = (inverse[:, :, None] * inverse[:, None, :]).sum(axis=0)  # L^-T L^-1
    return _gaussian("MvNormal", known, mu, precision, half)


def _gaussian(
    name: str, known: Known, mean: Variable, precision: Variable, half_log_determinant: Variable
) -> Family:
    r"""Normal vectors of length k.

    With t in [-1, 1]^k the entries are t_i, a^(1/2) (t_i^2 - kappa), and t_i t_j for i < j, of
    squared norm sum_i x_i + a sum_i (x_i - kappa)^2 + sum_{i<j} x_i x_j in x_i = t_i^2.  This is
    convex in each x_i, so it is largest where all are 0 or 1, and convex in the number of ones, so
    at 0 or k ones.  Both are equal, a k kappa^2, at kappa = (k + 3) / (k + 5) and a = (k + 5) / 2,
    which together with the weight 1 of t_i t_j make the volume of the noise least.  k = 1:
    (t, 3^(1/2) (t^2 - 2/3)) of norm (4/3)^(1/2), against 2^(1/2) for the box.
    """
    lower, upper = np.atleast_1d(known.lower), np.atleast_1d(known.upper)
    centre, half = (lower + upper) / 2.0, (upper - lower) / 2.0
    k = len(centre)
    squares = known.varies(precision)
    a, kappa = (k + 5.0) / 2.0, (k + 3.0) / (k + 5.0)
    above, right = np.triu_indices(k, 1)

    def statistic(y: Variable) -> Variable:
        y = y.astype("float64")
        t = (pt.clip(y[:, None] if y.type.ndim == 1 else y, lower, upper) - centre) / half
        if not squares:
            return t
        columns = [t[:, i] for i in range(k)]
        found = columns + [math.sqrt(a) * (t_i * t_i - kappa) for t_i in columns]
        found += [columns[i] * columns[j] for i, j in zip(above, right, strict=True)]
        return pt.stack(found, axis=1)

    distance = mean - centre
    slope = precision @ distance
    natural, log_normalizer = half * slope, 0.5 * (distance * slope).sum()
    norm = math.sqrt(k)
    if squares:
        scaled = precision * np.outer(half, half)
        diagonal = pt.diagonal(scaled)
        parts = [natural, -0.5 / math.sqrt(a) * diagonal]
        if k > 1:
            parts.append(-scaled[above, right])
        natural = pt.concatenate(parts)
        log_normalizer = log_normalizer + half_log_determinant + 0.5 * kappa * diagonal.sum()
        norm = kappa * math.sqrt(a * k)
    elif not known.varies(mean):
        raise UnsafeModel(f"The likelihood of `{known.name}` does not depend on the parameters.")
    limits = known.lower, known.upper
    return Family(name, statistic, natural, log_normalizer, norm, False, limits)


# -- finding them ---------------------------------------------------------------------------------

#: By PyTensor's names: what makes the family; numbers of dimensions of a record and of parameters.
FAMILIES: dict[str, tuple[Callable[[Known], Family], int, tuple[int, ...]]] = {
    "bernoulli": (_bernoulli, 0, (0,)),
    "binomial": (_binomial, 0, (0, 0)),
    "categorical": (_categorical, 0, (1,)),
    "exponential": (_exponential, 0, (0,)),
    "gamma": (_gamma, 0, (0, 0)),
    "multivariate_normal": (_mv_normal, 1, (1, 2)),
    "normal": (_normal, 0, (0, 0)),
    "poisson": (_poisson, 0, (0,)),
}
_NAMES = "Normal, Bernoulli, Binomial, Poisson, Exponential, Gamma, Categorical and MvNormal"
_HAND = "give statistic=, natural=, log_normalizer= and statistic_bounds= by hand"


def family_of(
    rv: Variable,
    parameters: Sequence[Variable],
    values: set[Variable],
    limits: Interval,
    count_is_private: bool,
) -> Family:
    """The family of an observed variable.

    `parameters` are functions of the value variables `values`; `limits` are public bounds of a
    record or infinite. UnsafeModel if the distribution is not known, parameters differ from record
    to record, or bounds lack.
    """
    op = rv.owner.op
    if getattr(op, "name", None) not in FAMILIES:
        raise UnsafeModel(
            f"`{rv.name}` is not one of {_NAMES}, the distributions whose statistics are known. If "
            f"it is an exponential family, {_HAND}; otherwise use DPPenalty."
        )
    make, ndim, core = FAMILIES[op.name]
    if rv.type.ndim != 1 + ndim:
        raise UnsafeModel(
            f"`{rv.name}` has records of {rv.type.ndim - 1} dimensions, where its distribution has "
            f"{ndim}: for several columns use MvNormal, or {_HAND}."
        )
    shared = []
    for parameter, dims in zip(parameters, core, strict=True):
        if parameter.type.ndim == dims + 1 and parameter.type.shape[0] == 1:
            parameter = parameter[0]
        if parameter.type.ndim != dims:
            raise UnsafeModel(
                f"The parameters of `{rv.name}` differ from record to record, so its records have "
                f"no common statistic. Use parameters without a record axis, or {_HAND}; "
                "otherwise use DPPenalty."
            )
        # PyTensor keeps short constants in single precision
        whole = parameter.type.dtype.startswith(("int", "uint"))
        shared.append(parameter if whole else parameter.astype("float64"))
    return make(Known(rv.name, shared, values, *limits, count_is_private))


def with_count(family: Family, m: int) -> Family:
    """The family for a private number of records: 1 is entry m + 1, with -A as its parameter."""
    if family.log_normalizer is None:
        return family
    weight = family.norm / math.sqrt(m)

    def statistic(y: Variable) -> Variable:
        rows = family.statistic(y)
        return pt.concatenate([rows, pt.full((rows.shape[0], 1), weight)], axis=1)

    parts = [family.natural, (-family.log_normalizer / weight).reshape((1,))]
    return replace(
        family,
        statistic=statistic,
        natural=pt.concatenate(parts),
        log_normalizer=None,
        norm=math.hypot(family.norm, weight),
    )
