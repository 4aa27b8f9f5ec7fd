"""Declaring how a published statistic was made from confidential records.

Each function adds one observed variable, an ordinary PyMC variable whose density, given the
records, is that of the mechanism: PyMC can differentiate it and draw it in predictive samples.
:class:`pymc_dp.PrivacyAwareGibbs` finds the sum over records in the density
(:mod:`pymc_dp.published.reading`), so a release written with a plain distribution,
``pm.Laplace("s", mu=statistic.sum(0), b=2.0, observed=s)``, works as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable

from pymc_dp.base.checks import (
    check_delta,
    check_epsilon,
    check_integer,
    check_number,
    check_positive,
)
from pymc_dp.privacy.accounting import mu_from_budget
from pymc_dp.records.arithmetic import is_discrete, without_wrapping

#: Shapes of random variables are computed without drawing them, and without a compiler.
_NOTHING_DRAWN = Mode(linker="py", optimizer="fast_compile")
_TABLE_SD = 300.0  # up to which the discrete Gaussian is drawn from a table


# -- statistics -----------------------------------------------------------------------------------


def clamp(x: Any, lower: Any, upper: Any, *, rescale: bool = True) -> Variable:
    """Clamp records to public bounds, as most releases do before they add anything up.

    Parameters
    ----------
    x : tensor
        Records.
    lower, upper : float or array
        Public bounds, lower < upper, that broadcast against `x`.
    rescale : bool, default True
        Also map [lower, upper] to [-1, 1] linearly, as Ju et al. (2022, section 5) do.

    Returns
    -------
    tensor

    Raises
    ------
    ValueError
        If the bounds are not finite numbers with lower < upper.
    """
    low, high = np.asarray(lower, dtype=float), np.asarray(upper, dtype=float)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ValueError("clamp needs finite bounds with lower < upper.")
    clipped = pt.clip(pt.as_tensor_variable(x), low, high)
    return 2.0 * (clipped - low) / (high - low) - 1.0 if rescale else clipped


def present(count: Any, capacity: int) -> Variable:
    """Which of `capacity` possible records exist when only `count` of them do.

    For releases made under add/remove privacy, where the number of records is confidential: give
    it a prior, give the records the shape of its largest value, and multiply the statistic.

    Parameters
    ----------
    count : tensor
        Number of records, a discrete random variable of the model.
    capacity : int
        Its largest value.

    Returns
    -------
    (capacity,) tensor
        1 for the first `count` records and 0 for the others.

    Examples
    --------
    >>> import pymc as pm, pymc_dp as dp
    >>> with pm.Model():
    ...     count = pm.DiscreteUniform("count", 50, 150)
    ...     mu = pm.Normal("mu", 0, 1)
    ...     rows = dp.clamp(pm.Normal("x", mu, 1, shape=150), -3, 3) * dp.present(count, 150)
    ...     total = dp.LaplaceRelease("total", rows, scale=4, observed=12.3)
    """
    capacity = check_integer("capacity", capacity, minimum=1)
    return pt.lt(pt.arange(capacity), pt.as_tensor_variable(count)).astype("int64")


# -- sums with noise ------------------------------------------------------------------------------


def LaplaceRelease(
    name: str,
    statistic: Any,
    *,
    observed: Any,
    scale: Any = None,
    sensitivity: float | None = None,
    epsilon: float | None = None,
    **kwargs: Any,
) -> Variable:
    """A sum over records published with Laplace noise.

    Parameters
    ----------
    name : str
    statistic : (n,) or (n, m) tensor
        One row per confidential record; their sum was published.
    observed : float, (m,) array or pm.Data
        What was published.
    scale : float or (m,) array
        Scale b of the noise; its density is ``exp(-|u| / b) / 2b``.
    sensitivity, epsilon : float
        In place of `scale`: l1 sensitivity of the sum and epsilon; b = sensitivity / epsilon.
    **kwargs
        Passed on to PyMC (``dims``).

    Returns
    -------
    tensor
        The observed variable.

    Raises
    ------
    ValueError
        If the noise is not described, or shapes do not fit.

    Notes
    -----
    Dwork, McSherry, Nissim & Smith (2006).  With unit l1 sensitivity per epsilon the acceptance
    probability of :class:`pymc_dp.PrivacyAwareGibbs` never falls below exp(-epsilon) (Ju et al.
    2022, Proposition 3.1).
    """
    levels = [] if epsilon is None else [check_epsilon(epsilon)]
    b = _scale("LaplaceRelease", scale, sensitivity, levels, "epsilon")
    rows, value = _sum(f"LaplaceRelease `{name}`", statistic, b, observed)
    return pm.Laplace(name, rows.sum(axis=0), b, observed=value, **kwargs)


def GaussianRelease(
    name: str,
    statistic: Any,
    *,
    observed: Any,
    scale: Any = None,
    sensitivity: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    rho: float | None = None,
    mu: float | None = None,
    **kwargs: Any,
) -> Variable:
    """A sum over records published with Gaussian noise.

    Parameters
    ----------
    name : str
    statistic : (n,) or (n, m) tensor
        One row per confidential record; their sum was published.
    observed : float, (m,) array or pm.Data
        What was published.
    scale : float or (m,) array
        Standard deviation of the noise.
    sensitivity : float
        In place of `scale`, with one of the following: l2 sensitivity of the sum.
    epsilon, delta : float
        For noise calibrated exactly to (epsilon, delta) (Balle & Wang 2018).
    rho : float
        For zero-concentrated privacy: sensitivity / sqrt(2 rho).
    mu : float
        For Gaussian privacy: sensitivity / mu.
    **kwargs
        Passed on to PyMC (``dims``).

    Returns
    -------
    tensor
        The observed variable.

    Raises
    ------
    ValueError
        If the noise is not described, or shapes do not fit.
    """
    levels = [] if mu is None else [check_positive("mu", mu)]
    if rho is not None:
        levels.append(math.sqrt(2.0 * check_positive("rho", rho)))
    if epsilon is not None or delta is not None:
        levels.append(mu_from_budget(check_epsilon(epsilon), check_delta(delta)))
    way = "one of mu, rho, or epsilon and delta"
    sd = _scale("GaussianRelease", scale, sensitivity, levels, way)
    rows, value = _sum(f"GaussianRelease `{name}`", statistic, sd, observed)
    return pm.Normal(name, rows.sum(axis=0), sd, observed=value, **kwargs)


def GeometricRelease(
    name: str,
    statistic: Any,
    *,
    observed: Any,
    scale: Any = None,
    sensitivity: float | None = None,
    epsilon: float | None = None,
    **kwargs: Any,
) -> Variable:
    """Counts published with two-sided geometric (discrete Laplace) noise.

    Parameters
    ----------
    name : str
    statistic : (n,) or (n, m) integer tensor
        One row per confidential record; their sum was published.
    observed : int or (m,) integer array
        What was published.
    scale : float or (m,) array
        Scale b of the noise: the probability of u is proportional to ``exp(-|u| / b)``.
    sensitivity, epsilon : float
        In place of `scale`: l1 sensitivity of the sum and epsilon; b = sensitivity / epsilon.
    **kwargs
        Passed on to PyMC (``dims``).

    Returns
    -------
    tensor
        The observed variable.

    Raises
    ------
    ValueError
        If the noise is not described, shapes do not fit, or numbers are not integers.

    Notes
    -----
    Ghosh, Roughgarden & Sundararajan (2009).
    """
    kind = "GeometricRelease"
    levels = [] if epsilon is None else [check_epsilon(epsilon)]
    b = _scale(kind, scale, sensitivity, levels, "epsilon")
    rows, value = _sum(f"{kind} `{name}`", statistic, b, observed, whole=True)

    def log_density(value: Variable, total: Variable) -> Variable:
        return (np.log(np.tanh(0.5 / b)) - pt.abs(value - total) / b).sum()

    def draw(total: Variable) -> Variable:
        p = pt.broadcast_to(-np.expm1(-1.0 / b), total.shape)
        return total + pm.Geometric.dist(p) - pm.Geometric.dist(p)

    return _release(kind, name, rows, value, log_density, draw, **kwargs)


def DiscreteGaussianRelease(
    name: str,
    statistic: Any,
    *,
    observed: Any,
    scale: Any = None,
    sensitivity: float | None = None,
    rho: float | None = None,
    **kwargs: Any,
) -> Variable:
    """Counts published with discrete Gaussian noise, as by the US Census Bureau since 2020.

    Parameters
    ----------
    name : str
    statistic : (n,) or (n, m) integer tensor
        One row per confidential record; their sum was published.
    observed : int or (m,) integer array
        What was published.
    scale : float or (m,) array
        sigma: the probability of u is proportional to exp(-u^2 / (2 sigma^2)).
    sensitivity, rho : float
        In place of `scale`: l2 sensitivity and rho of zero-concentrated privacy;
        sigma = sensitivity / sqrt(2 rho).
    **kwargs
        Passed on to PyMC (``dims``).

    Returns
    -------
    tensor
        The observed variable.

    Raises
    ------
    ValueError
        If the noise is not described, shapes do not fit, or numbers are not integers.

    Notes
    -----
    Canonne, Kamath & Steinke (2020).  The density is exact, and so are predictive draws up to
    sigma = 300; above, a rounded Gaussian is drawn, whose probabilities differ by less than one
    part in a million per squared standard deviation.
    """
    kind = "DiscreteGaussianRelease"
    levels = [] if rho is None else [math.sqrt(2.0 * check_positive("rho", rho))]
    sigma = _scale(kind, scale, sensitivity, levels, "rho")
    rows, value = _sum(f"{kind} `{name}`", statistic, sigma, observed, whole=True)
    log_sum, largest = np.vectorize(_log_theta)(sigma), float(np.max(sigma))

    def log_density(value: Variable, total: Variable) -> Variable:
        return (-0.5 * ((value - total) / sigma) ** 2 - log_sum).sum()

    def draw(total: Variable) -> Variable:
        sd = pt.broadcast_to(sigma, total.shape)
        if largest > _TABLE_SD:
            return total + pt.round(pm.Normal.dist(0.0, sd)).astype("int64")
        reach = math.ceil(12.0 * largest) + 2
        logits = -0.5 * (np.arange(-reach, reach + 1) / sd[..., None]) ** 2
        return total + pm.Categorical.dist(logit_p=logits) - reach

    return _release(kind, name, rows, value, log_density, draw, **kwargs)


def Release(
    name: str,
    statistic: Any,
    *,
    observed: Any,
    log_density: Callable[[Variable, Variable], Variable],
    dist: Callable[[Variable], Variable] | None = None,
    **kwargs: Any,
) -> Variable:
    """A release of your own, made from a sum over records.

    Parameters
    ----------
    name : str
    statistic : (n,) or (n, m) tensor
        One row per confidential record.
    observed : array
        What was published.
    log_density : callable
        ``log_density(value, total)``: log-density of publishing `value` when the sum of the
        statistic is `total` (a scalar, or an (m,) vector); one number, in PyTensor.
    dist : callable, optional
        ``dist(total)``: a PyMC distribution of the same density, for predictive draws.
    **kwargs
        Passed on to PyMC (``dims``).

    Returns
    -------
    tensor
        The observed variable.

    Raises
    ------
    ValueError
        If an argument is not usable.
    """
    if np.ndim(_numbers(observed)) > 1:
        raise ValueError(f"Release `{name}`: observed must be a number or a vector.")
    rows = _rows(f"Release `{name}`", statistic)
    return _release("Release", name, rows, observed, log_density, dist, **kwargs)


# -- one answer per record ------------------------------------------------------------------------


def RandomizedResponse(
    name: str,
    statistic: Any,
    *,
    observed: Any,
    categories: int = 2,
    epsilon: float | None = None,
    truth: float | None = None,
    **kwargs: Any,
) -> Variable:
    """Every record's own answer, replaced at random before it was collected (local privacy).

    Parameters
    ----------
    name : str
    statistic : (n,) integer tensor
        True answers 0, ..., categories - 1.
    observed : (n,) integer array
        Reported answers.
    categories : int, default 2
        k, the number of possible answers.
    epsilon : float
        Local privacy: the truth is told with probability e^epsilon / (e^epsilon + k - 1).
    truth : float
        In place of `epsilon`: the probability of telling the truth; each other answer is
        equally likely.
    **kwargs
        Passed on to PyMC (``dims``).

    Returns
    -------
    tensor
        The observed variable.

    Raises
    ------
    ValueError
        If the probability is not described, or reported answers are not among the categories.

    Notes
    -----
    Warner (1965).
    """
    k = check_integer("categories", categories, minimum=2)
    if (epsilon is None) == (truth is None):
        raise ValueError("RandomizedResponse needs epsilon, or truth in its place.")
    if epsilon is not None:
        honest = 1.0 / (1.0 + (k - 1) * math.exp(-check_epsilon(epsilon)))
    else:
        honest = check_number("truth", truth)
        if not 0.0 < honest < 1.0:
            raise ValueError(f"truth must lie between 0 and 1, not {honest}.")
    lie = (1.0 - honest) / (k - 1)
    what = f"RandomizedResponse `{name}`"
    answers = pt.as_tensor_variable(statistic)
    _check_integers(what, answers)
    reported = _numbers(observed)
    if reported.dtype.kind not in "iub" or not ((reported >= 0) & (reported < k)).all():
        raise ValueError(f"{what}: observed must be integers 0 to {k - 1}.")
    value = _published(what, observed, _shape(answers), "int64")

    def draw(answers: Variable, size: Any) -> Variable:
        same = pt.eq(pt.arange(k), answers[..., None])
        return pm.Categorical.dist(p=pt.switch(same, honest, lie))

    def logp(value: Variable, answers: Variable) -> Variable:
        return pt.switch(pt.eq(value, answers), math.log(honest), math.log(lie))

    return pm.CustomDist(
        name,
        answers,
        dist=draw,
        logp=logp,
        signature="()->()",
        observed=value,
        class_name="RandomizedResponse",
        **kwargs,
    )


# -- mechanisms that choose -----------------------------------------------------------------------


def ExponentialMechanismRelease(
    name: str,
    utility: Any,
    *,
    observed: int,
    epsilon: float,
    sensitivity: float,
    **kwargs: Any,
) -> Variable:
    """The candidate that the exponential mechanism chose, from a finite set.

    Parameters
    ----------
    name : str
    utility : (n, k) tensor
        What each record adds to the utility of each of k candidates.
    observed : int
        The chosen candidate, 0 to k - 1.
    epsilon : float
    sensitivity : float
        Largest change of a utility when a record is replaced.
    **kwargs
        Passed on to PyMC.

    Returns
    -------
    tensor
        The observed variable.

    Notes
    -----
    McSherry & Talwar (2007): probabilities are proportional to exp(epsilon utility / (2
    sensitivity)).  Their sum depends on the records, so the set of candidates has to be finite.
    """
    rate = check_epsilon(epsilon) / (2.0 * check_positive("sensitivity", sensitivity))
    kind = "ExponentialMechanismRelease"
    rows = _rows(f"{kind} `{name}`", utility, ndim=(2,))
    return _choice(kind, name, rows, lambda total: rate * total, observed, **kwargs)


def KNormGradientRelease(
    name: str,
    gradient: Any,
    *,
    observed: int,
    epsilon: float,
    sensitivity: float,
    norm: Literal[1, 2] | float = 2,
    **kwargs: Any,
) -> Variable:
    """The candidate that the K-norm gradient mechanism chose, from a finite set.

    Parameters
    ----------
    name : str
    gradient : (n, k, p) tensor
        Gradient of each record's loss at each of k candidates.
    observed : int
        The chosen candidate, 0 to k - 1.
    epsilon : float
    sensitivity : float
        Largest change of the sum of gradients, in that norm, when a record is replaced.
    norm : {1, 2, numpy.inf}, default 2
    **kwargs
        Passed on to PyMC.

    Returns
    -------
    tensor
        The observed variable.

    Raises
    ------
    ValueError
        If an argument is not usable.

    Notes
    -----
    Reimherr & Awan (2019): probabilities are proportional to
    ``exp(-epsilon |gradient| / (2 sensitivity))``.
    """
    rate = check_epsilon(epsilon) / (2.0 * check_positive("sensitivity", sensitivity))
    if norm not in (1, 2, np.inf):
        raise ValueError(f"norm must be 1, 2 or numpy.inf, not {norm!r}.")
    kind = "KNormGradientRelease"
    rows = _rows(f"{kind} `{name}`", gradient, ndim=(3,))

    def logits(total: Variable) -> Variable:
        return -rate * pt.linalg.norm(total, norm, axis=-1)

    return _choice(kind, name, rows, logits, observed, **kwargs)


def ObjectivePerturbationRelease(
    name: str,
    gradient: Any,
    hessian: Any,
    *,
    observed: Any,
    scale: float,
    regularization: float = 0.0,
    noise: Literal["l1", "l2", "gaussian"] = "l2",
    **kwargs: Any,
) -> Variable:
    """The minimiser of a loss to which a random linear term was added.

    Parameters
    ----------
    name : str
    gradient : (n, p) tensor
        Gradient of each record's loss, at the published minimiser.
    hessian : (n, p, p) tensor
        Second derivatives of each record's loss, there.
    observed : (p,) array
        The published minimiser s.
    scale : float
        Scale of the noise b in the linear term.
    regularization : float, default 0
        gamma, where ``(gamma / 2) |s|^2`` was added to the sum of losses.
    noise : {"l2", "l1", "gaussian"}
        Density of b: proportional to ``exp(-|b|_2 / scale)``, ``exp(-|b|_1 / scale)``, or
        normal with standard deviation `scale`.
    **kwargs
        Passed on to PyMC.

    Returns
    -------
    tensor
        The observed variable.  It cannot be drawn in predictive samples.

    Raises
    ------
    ValueError
        If an argument is not usable.

    Notes
    -----
    Chaudhuri, Monteleoni & Sarwate (2011); Kifer, Smith & Thakurta (2012).  s solves
    sum gradient + gamma s + b = 0, so its density is that of b times
    ``|det(sum hessian + gamma I)|``.
    """
    size, ridge = check_positive("scale", scale), check_number("regularization", regularization)
    what = f"ObjectivePerturbationRelease `{name}`"
    first, second = _rows(what, gradient, ndim=(2,)), _rows(what, hessian, ndim=(3,))
    p = _shape(first)[1]
    value = _published(what, observed, (p,), "float64")
    if _shape(second)[1:] != (p, p):
        raise ValueError(f"{what}: hessian must be (n, {p}, {p}).")
    if noise == "gaussian":
        constant = -0.5 * p * math.log(2.0 * math.pi) - p * math.log(size)
    elif noise == "l1":
        constant = -p * math.log(2.0 * size)
    elif noise == "l2":
        ball = 0.5 * p * math.log(math.pi) - math.lgamma(0.5 * p + 1.0)
        constant = -ball - math.lgamma(p + 1.0) - p * math.log(size)
    else:
        raise ValueError(f"noise must be 'l2', 'l1' or 'gaussian', not {noise!r}.")

    def logp(value: Variable, first: Variable, second: Variable) -> Variable:
        b = -(first.sum(axis=0) + ridge * value)
        curvature = second.sum(axis=0) + ridge * pt.eye(p)
        log_det = pt.log(pt.abs(pt.linalg.det(curvature)))
        if noise == "gaussian":
            return constant - 0.5 * ((b / size) ** 2).sum() + log_det
        return constant - pt.linalg.norm(b, int(noise[1:]), axis=-1) / size + log_det

    return pm.CustomDist(
        name,
        first,
        second,
        logp=logp,
        signature="(n,p),(n,p,p)->(p)",
        observed=value,
        class_name="ObjectivePerturbationRelease",
        **kwargs,
    )


# -- shared ---------------------------------------------------------------------------------------


def _sum(
    what: str, statistic: Any, scale: np.ndarray, observed: Any, whole: bool = False
) -> tuple[Variable, Any]:
    """Rows of a sum, and what was published about it: integers if `whole`."""
    rows = _rows(what, statistic)
    if whole:
        _check_integers(what, rows)
    expected = _shape(rows)[1:]
    value = _published(what, observed, expected, "int64" if whole else "float64")
    if scale.ndim and scale.shape != expected:
        raise ValueError(f"{what}: scale has shape {scale.shape}, the published sum {expected}.")
    return rows, value


def _published(what: str, observed: Any, expected: tuple[int, ...], dtype: str) -> Any:
    """What was published as an array of this type; ``pm.Data`` stay as they are."""
    array = _numbers(observed)
    if array.shape != expected:
        raise ValueError(
            f"{what}: observed has shape {array.shape}, but the statistic gives {expected}."
        )
    if not np.isfinite(array.astype(float)).all():
        raise ValueError(f"{what}: observed must be finite.")
    if dtype == "int64" and array.dtype.kind == "f" and not (array == np.rint(array)).all():
        raise ValueError(f"{what}: observed must be integers.")
    return observed if hasattr(observed, "get_value") else array.astype(dtype)


def _numbers(observed: Any) -> np.ndarray:
    """The values of an array or of ``pm.Data``."""
    return np.asarray(observed.get_value() if hasattr(observed, "get_value") else observed)


def _release(
    kind: str,
    name: str,
    rows: Variable,
    observed: Any,
    log_density: Callable[[Variable, Variable], Variable],
    dist: Callable[[Variable], Variable] | None,
    **kwargs: Any,
) -> Variable:
    """What was published about a sum of rows; `dist` draws it again, if it can be drawn."""
    published = _numbers(observed)
    core = "(k)" if published.ndim else "()"
    blank = pt.zeros(published.shape)  # tells PyMC the length of what is published

    def logp(value: Variable, rows: Variable, blank: Variable) -> Variable:
        return log_density(value, rows.sum(axis=0))

    def draw(rows: Variable, blank: Variable, size: Any) -> Variable:
        assert dist is not None
        return dist(rows.sum(axis=0))

    return pm.CustomDist(
        name,
        rows,
        blank,
        logp=logp,
        signature=f"{('(n)', '(n,m)', '(n,m,p)')[rows.type.ndim - 1]},{core}->{core}",
        observed=observed if hasattr(observed, "get_value") else published,
        class_name=kind,
        **({"dtype": published.dtype.name} if dist is None else {"dist": draw}),
        **kwargs,
    )


def _choice(
    kind: str,
    name: str,
    rows: Variable,
    logits: Callable[[Variable], Variable],
    observed: int,
    **kwargs: Any,
) -> Variable:
    """A candidate with probabilities proportional to exponentials of `logits` of the sum."""
    chosen, k = check_integer("observed", observed, minimum=0), _shape(rows)[1]
    if chosen >= k:
        raise ValueError(f"{kind} `{name}`: observed is {chosen}, but there are {k} candidates.")

    def log_density(value: Variable, total: Variable) -> Variable:
        scores = logits(total)
        return scores[value] - pt.logsumexp(scores)

    def draw(total: Variable) -> Variable:
        return pm.Categorical.dist(logit_p=logits(total))

    return _release(kind, name, rows, chosen, log_density, draw, **kwargs)


def _rows(what: str, statistic: Any, ndim: tuple[int, ...] = (1, 2)) -> Variable:
    rows = pt.as_tensor_variable(statistic)
    if rows.type.ndim not in ndim:
        shapes = {1: "(n,)", 2: "(n, m)", 3: "(n, k, p)"}
        raise ValueError(
            f"{what}: the statistic must have one row per record, shape "
            f"{' or '.join(shapes[k] for k in ndim)}, not {rows.type.ndim} dimensions. Pass the "
            "rows, not their sum."
        )
    [found] = without_wrapping([rows], f"{what}: the statistic", single=True)
    return found.astype("int64" if is_discrete(rows) else "float64")


def _check_integers(what: str, rows: Variable) -> None:
    if not is_discrete(rows):
        raise ValueError(
            f"{what}: the statistic must be integers, not {rows.type.dtype}; counts can be cast "
            "with .astype('int64')."
        )


def _shape(rows: Variable) -> tuple[int, ...]:
    """Lengths of all axes: those of the type, or else (``dims``) as they are now."""
    if None in rows.type.shape:
        return tuple(map(int, pytensor.function([], rows.shape, mode=_NOTHING_DRAWN)()))
    return rows.type.shape


def _scale(
    kind: str, scale: Any, sensitivity: float | None, levels: list[float], way: str
) -> np.ndarray:
    """The scale as it is given, or else the sensitivity by the privacy level."""
    if scale is None and sensitivity is not None and len(levels) == 1:
        scale = check_positive("sensitivity", sensitivity) / levels[0]
    elif scale is None or sensitivity is not None or levels:
        raise ValueError(
            f"{kind} needs scale=..., or sensitivity with {way}: how large the noise was."
        )
    try:
        size = np.asarray(scale, dtype=float)
    except (TypeError, ValueError):
        size = np.asarray(math.nan)
    if size.ndim > 1 or not np.isfinite(size).all() or not (size > 0).all():
        raise ValueError(f"{kind}: scale must be a positive number, or one per entry.")
    return size


def _log_theta(sigma: float) -> float:
    """Logarithm of the sum of exp(-u^2 / (2 sigma^2)) over all integers u."""
    if sigma > 5.0:  # the sum differs from the integral by less than exp(-2 pi^2 sigma^2)
        return math.log(math.sqrt(2.0 * math.pi) * sigma)
    u = np.arange(1, math.ceil(40.0 * sigma) + 2)
    return math.log1p(2.0 * float(np.exp(-0.5 * (u / sigma) ** 2).sum()))
