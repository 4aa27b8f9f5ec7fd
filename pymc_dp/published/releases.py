"""Declaring how a published statistic was made from confidential records.

Each function adds one observed variable to the model.  It is an ordinary PyMC variable: its
density, given the records, is that of the mechanism, so PyMC can differentiate it, draw it in
predictive samples and show it in a graph.  :class:`pymc_dp.PrivacyAwareGibbs` finds the sum over
records in the density by itself (:mod:`pymc_dp.published.reading`), so a release written with a
plain distribution, ``pm.Laplace("s", mu=statistic.sum(0), b=2.0, observed=s)``, works as well.
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

from pymc_dp.base.checks import check_epsilon, check_integer, check_number
from pymc_dp.privacy.accounting import mu_from_budget
from pymc_dp.records.arithmetic import is_discrete, without_wrapping

#: Shapes of random variables are computed without drawing them, and without a compiler.
_NOTHING_DRAWN = Mode(linker="py", optimizer="fast_compile")
#: Up to this standard deviation the discrete Gaussian is drawn from a table of probabilities.
_TABLE_SD = 300.0


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
    b = _scale("LaplaceRelease", scale, sensitivity, epsilon)
    return _noisy_sum(
        "LaplaceRelease",
        name,
        statistic,
        b,
        observed,
        lambda total, b: pm.Laplace.dist(total, b),
        lambda value, total, b: -pt.abs(value - total) / b - pt.log(2.0 * b),
        **kwargs,
    )


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
    told = [mu is not None, rho is not None, epsilon is not None or delta is not None]
    if scale is not None and (sensitivity is not None or any(told)):
        raise ValueError("GaussianRelease: give scale, or sensitivity with a privacy level.")
    if sensitivity is not None:
        size = _positive("sensitivity", sensitivity)
        if sum(told) != 1 or (epsilon is None) != (delta is None):
            raise ValueError(
                "GaussianRelease: with sensitivity give one of mu, rho, or epsilon and delta."
            )
        if mu is not None:
            scale = size / _positive("mu", mu)
        elif rho is not None:
            scale = size / math.sqrt(2.0 * _positive("rho", rho))
        else:
            assert epsilon is not None and delta is not None
            scale = size / mu_from_budget(epsilon, delta)
    sd = _scale("GaussianRelease", scale, None, None, "sensitivity with mu, rho, or epsilon, delta")
    return _noisy_sum(
        "GaussianRelease",
        name,
        statistic,
        sd,
        observed,
        lambda total, sd: pm.Normal.dist(total, sd),
        lambda value, total, sd: (
            -0.5 * ((value - total) / sd) ** 2 - pt.log(math.sqrt(2.0 * math.pi) * sd)
        ),
        **kwargs,
    )


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
        Scale b of the noise: the probability of u is proportional to
        ``exp(-|u| / b)``.
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
    b = _scale("GeometricRelease", scale, sensitivity, epsilon)

    def draw(total: Variable, b: Variable) -> Variable:
        p = pt.broadcast_to(-pt.expm1(-1.0 / b), total.shape)
        return total + pm.Geometric.dist(p) - pm.Geometric.dist(p)

    return _noisy_sum(
        "GeometricRelease",
        name,
        statistic,
        b,
        observed,
        draw,
        lambda value, total, b: -pt.abs(value - total) / b + pt.log(pt.tanh(0.5 / b)),
        discrete=True,
        **kwargs,
    )


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
    Canonne, Kamath & Steinke (2020).  The density is exact.  Predictive draws are exact up to
    sigma = 300; above, a rounded Gaussian stands in, whose probabilities differ by less than
    one part in a million per squared standard deviation.
    """
    if scale is not None and (sensitivity is not None or rho is not None):
        raise ValueError("DiscreteGaussianRelease: give scale, or sensitivity with rho.")
    if sensitivity is not None and rho is not None:
        scale = _positive("sensitivity", sensitivity) / math.sqrt(2.0 * _positive("rho", rho))
    sigma = _scale("DiscreteGaussianRelease", scale, None, None, "sensitivity with rho")
    log_sum = np.vectorize(_log_theta)(sigma)
    largest = float(np.max(sigma))

    def draw(total: Variable, sigma: Variable) -> Variable:
        if largest > _TABLE_SD:
            noise = pm.Normal.dist(0.0, pt.broadcast_to(sigma, total.shape))
            return total + pt.round(noise).astype("int64")
        reach = math.ceil(12.0 * largest) + 2
        u = np.arange(-reach, reach + 1)
        logits = -0.5 * (u / pt.broadcast_to(sigma, total.shape)[..., None]) ** 2
        return total + pm.Categorical.dist(logit_p=logits) - reach

    return _noisy_sum(
        "DiscreteGaussianRelease",
        name,
        statistic,
        sigma,
        observed,
        draw,
        lambda value, total, sigma: -0.5 * ((value - total) / sigma) ** 2 - log_sum,
        discrete=True,
        **kwargs,
    )


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
    rows = _rows("Release", name, statistic)
    published = _numbers(observed)
    core = ["()", "(k)"][published.ndim] if published.ndim < 2 else None
    if core is None:
        raise ValueError(f"Release `{name}`: observed must be a number or a vector.")
    inner = "(n)" if rows.type.ndim == 1 else "(n,m)"
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
        dist=None if dist is None else draw,
        logp=logp,
        signature=f"{inner},{core}->{core}",
        observed=_as_given(observed, published),
        class_name="Release",
        **({} if dist is not None else {"dtype": published.dtype.name}),
        **kwargs,
    )


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
    answers = pt.as_tensor_variable(statistic)
    _integers("RandomizedResponse", name, answers)
    reported = _numbers(observed)
    if reported.dtype.kind not in "iub" or not ((reported >= 0) & (reported < k)).all():
        raise ValueError(f"RandomizedResponse `{name}`: observed must be integers 0 to {k - 1}.")
    _check_shape("RandomizedResponse", name, tuple(_shape(answers)), reported)

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
        observed=_as_given(observed, reported.astype("int64")),
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
    rate = check_epsilon(epsilon) / (2.0 * _positive("sensitivity", sensitivity))
    rows = _rows("ExponentialMechanismRelease", name, utility, ndim=(2,))
    return _choice(
        "ExponentialMechanismRelease",
        name,
        rows,
        "(n,k)->()",
        lambda total: rate * total,
        _shape(rows)[1],
        observed,
        **kwargs,
    )


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
    rate = check_epsilon(epsilon) / (2.0 * _positive("sensitivity", sensitivity))
    if norm not in (1, 2, np.inf):
        raise ValueError(f"norm must be 1, 2 or numpy.inf, not {norm!r}.")
    rows = _rows("KNormGradientRelease", name, gradient, ndim=(3,))
    return _choice(
        "KNormGradientRelease",
        name,
        rows,
        "(n,k,p)->()",
        lambda total: -rate * _norm(total, norm),
        _shape(rows)[1],
        observed,
        **kwargs,
    )


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
    size, ridge = _positive("scale", scale), check_number("regularization", regularization)
    published = np.asarray(observed, dtype=float)
    first = _rows("ObjectivePerturbationRelease", name, gradient, ndim=(2,))
    second = _rows("ObjectivePerturbationRelease", name, hessian, ndim=(3,))
    p = _shape(first)[1]
    _check_shape("ObjectivePerturbationRelease", name, (p,), published)
    if _shape(second)[1:] != [p, p]:
        raise ValueError(f"ObjectivePerturbationRelease `{name}`: hessian must be (n, {p}, {p}).")
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
        return constant - _norm(b, 1 if noise == "l1" else 2) / size + log_det

    return pm.CustomDist(
        name,
        first,
        second,
        logp=logp,
        signature="(n,p),(n,p,p)->(p)",
        observed=published,
        class_name="ObjectivePerturbationRelease",
        **kwargs,
    )


# -- shared ---------------------------------------------------------------------------------------


def _noisy_sum(
    kind: str,
    name: str,
    statistic: Any,
    scale: np.ndarray,
    observed: Any,
    draw: Callable[[Variable, Variable], Variable],
    log_density: Callable[[Variable, Variable, Any], Variable],
    discrete: bool = False,
    **kwargs: Any,
) -> Variable:
    rows = _rows(kind, name, statistic)
    if discrete:
        _integers(kind, name, rows)
    published = _numbers(observed)
    expected = tuple(_shape(rows)[1:])
    _check_shape(kind, name, expected, published)
    whole = published.dtype.kind in "iub" or (published == np.rint(published)).all()
    if discrete and not whole:
        raise ValueError(f"{kind} `{name}`: observed must be integers.")
    if scale.ndim and scale.shape != expected:
        raise ValueError(
            f"{kind} `{name}`: scale has shape {scale.shape}, the published sum {expected}."
        )
    inner = "(n)" if rows.type.ndim == 1 else "(n,m)"
    core = "()" if rows.type.ndim == 1 else "(m)"

    def logp(value: Variable, rows: Variable, scale: Variable) -> Variable:
        return log_density(value, rows.sum(axis=0), scale).sum()

    def dist(rows: Variable, scale: Variable, size: Any) -> Variable:
        return draw(rows.sum(axis=0), scale)

    return pm.CustomDist(
        name,
        rows,
        scale,
        dist=dist,
        logp=logp,
        signature=f"{inner},{'(m)' if scale.ndim else '()'}->{core}",
        observed=_as_given(observed, published.astype("int64" if discrete else "float64")),
        class_name=kind,
        **kwargs,
    )


def _choice(
    kind: str,
    name: str,
    rows: Variable,
    signature: str,
    logits: Callable[[Variable], Variable],
    k: int,
    observed: int,
    **kwargs: Any,
) -> Variable:
    chosen = check_integer("observed", observed, minimum=0)
    if chosen >= k:
        raise ValueError(f"{kind} `{name}`: observed is {chosen}, but there are {k} candidates.")

    def logp(value: Variable, rows: Variable) -> Variable:
        scores = logits(rows.sum(axis=0))
        return scores[value] - pt.logsumexp(scores)

    def dist(rows: Variable, size: Any) -> Variable:
        return pm.Categorical.dist(logit_p=logits(rows.sum(axis=0)))

    return pm.CustomDist(
        name,
        rows,
        dist=dist,
        logp=logp,
        signature=signature,
        observed=chosen,
        class_name=kind,
        **kwargs,
    )


def _numbers(observed: Any) -> np.ndarray:
    """What was published, from an array or from ``pm.Data``."""
    return np.asarray(observed.get_value() if hasattr(observed, "get_value") else observed)


def _as_given(observed: Any, array: np.ndarray) -> Any:
    return observed if hasattr(observed, "get_value") else array


def _norm(vector: Variable, norm: float) -> Variable:
    if norm == 1:
        return pt.abs(vector).sum(axis=-1)
    if norm == 2:
        return pt.sqrt((vector**2).sum(axis=-1))
    return pt.abs(vector).max(axis=-1)


def _rows(kind: str, name: str, statistic: Any, ndim: tuple[int, ...] = (1, 2)) -> Variable:
    rows = pt.as_tensor_variable(statistic)
    if rows.type.ndim not in ndim:
        shapes = {1: "(n,)", 2: "(n, m)", 3: "(n, k, p)"}
        raise ValueError(
            f"{kind} `{name}`: the statistic must have one row per record, shape "
            f"{' or '.join(shapes[k] for k in ndim)}, not {rows.type.ndim} dimensions. Pass the "
            "rows, not their sum."
        )
    [found] = without_wrapping([rows], f"{kind} `{name}`: the statistic", single=True)
    return found.astype("int64") if is_discrete(rows) else found.astype("float64")


def _integers(kind: str, name: str, rows: Variable) -> None:
    if not is_discrete(rows):
        raise ValueError(
            f"{kind} `{name}`: the statistic must be integers, not {rows.type.dtype}; counts can "
            "be cast with .astype('int64')."
        )


def _shape(rows: Variable) -> list[int]:
    """Lengths of all axes: those of the type, or else (``dims``) as they are now."""
    if None in rows.type.shape:
        return [int(k) for k in pytensor.function([], rows.shape, mode=_NOTHING_DRAWN)()]
    return [int(k) for k in rows.type.shape]


def _check_shape(kind: str, name: str, expected: tuple[int, ...], observed: np.ndarray) -> None:
    if expected != observed.shape:
        raise ValueError(
            f"{kind} `{name}`: observed has shape {observed.shape}, but the statistic gives "
            f"{expected}."
        )
    if not np.isfinite(observed.astype(float)).all():
        raise ValueError(f"{kind} `{name}`: observed must be finite.")


def _positive(name: str, value: Any) -> float:
    number = check_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be positive, not {number}.")
    return number


def _scale(
    kind: str,
    scale: Any,
    sensitivity: float | None,
    epsilon: float | None,
    instead: str = "sensitivity with epsilon",
) -> np.ndarray:
    if scale is None and sensitivity is not None and epsilon is not None:
        scale = _positive("sensitivity", sensitivity) / check_epsilon(epsilon)
    elif scale is None or sensitivity is not None or epsilon is not None:
        raise ValueError(f"{kind} needs scale=..., or {instead}: how large the noise was.")
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
