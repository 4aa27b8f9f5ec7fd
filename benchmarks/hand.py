"""What a careful programmer would write by hand for one model: Numba or NumPy, whichever is faster.

Each function is given unconstrained parameters in the model's order and returns the sum of clipped
score vectors, or the log-likelihood of every record.  Written for speed alone: ``fastmath``, sums
in floating point, constants precomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import pymc as pm

__all__ = ["CASES", "Case", "logistic_case"]

Gradient = Callable[[np.ndarray, float], np.ndarray]
LogLikelihood = Callable[[np.ndarray], np.ndarray]

_fast = numba.njit(fastmath=True, error_model="numpy")


@dataclass(frozen=True)
class Case:
    """A model, and rivals that are ready to be called.

    Attributes
    ----------
    name : str
    build : callable
        () -> the PyMC model.
    theta : ndarray
        Where to measure.
    gradients : dict of str to callable
        Kind ("numba", "numpy") -> (theta, clip norm) -> sum of clipped scores.
    log_likelihood : callable
    jax : callable
        () -> (theta, clip norm) -> the same by ``vmap(grad)``; imports JAX.
    unit : ndarray, optional
        The user of each row.
    """

    name: str
    n: int
    build: Callable[[], pm.Model]
    theta: np.ndarray
    gradients: dict[str, Gradient]
    log_likelihood: LogLikelihood
    jax: Callable[[], Gradient]
    unit: np.ndarray | None = None


def jax_gradient(log_density: Callable[..., Any], *data: np.ndarray) -> Gradient:
    """Sum of clipped per-record gradients as users of JAX write it, in double precision."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    gradient = jax.grad(log_density)
    arrays = [jnp.asarray(array) for array in data]

    @jax.jit
    def total(theta: Any, bound: Any, *rows: Any) -> Any:
        vectors = jax.vmap(gradient, in_axes=(None,) + (0,) * len(rows))(theta, *rows)
        norms = jnp.sqrt((vectors * vectors).sum(axis=1))
        return (bound / jnp.maximum(norms, bound)) @ vectors

    return lambda theta, bound: total(theta, bound, *arrays).block_until_ready()


# -- logistic regression --------------------------------------------------------------------------


@_fast
def _logistic(theta, bound, x, y):  # type: ignore[no-untyped-def]
    n, d = x.shape
    total = np.zeros(d)
    for i in range(n):
        eta = 0.0
        square = 0.0
        for k in range(d):
            eta += x[i, k] * theta[k]
            square += x[i, k] * x[i, k]
        s = y[i] - 1.0 / (1.0 + math.exp(-eta))
        norm = abs(s) * math.sqrt(square)
        if norm > bound:
            s *= bound / norm
        for k in range(d):
            total[k] += s * x[i, k]
    return total


@_fast
def _logistic_likelihood(theta, x, y, out):  # type: ignore[no-untyped-def]
    n, d = x.shape
    for i in range(n):
        eta = 0.0
        for k in range(d):
            eta += x[i, k] * theta[k]
        softplus = max(eta, 0.0) + math.log1p(math.exp(-abs(eta)))
        out[i] = y[i] * eta - softplus


def logistic_case(d: int, n: int = 100_000) -> Case:
    """A logistic regression with `d` features and `n` records."""
    rng = np.random.default_rng(d)
    x = rng.standard_normal((n, d))
    truth = rng.standard_normal(d) / math.sqrt(d)
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-x @ truth))).astype("int64")
    lengths, out = np.linalg.norm(x, axis=1), np.empty(n)

    def build() -> pm.Model:
        with pm.Model() as model:
            beta = pm.Normal("beta", 0.0, 3.0, shape=d)
            pm.Bernoulli("y", logit_p=pm.math.dot(x, beta), observed=y)
        return model

    def with_numpy(theta: np.ndarray, bound: float) -> np.ndarray:
        s = y - 1.0 / (1.0 + np.exp(-(x @ theta)))
        return (s * bound / np.maximum(np.abs(s) * lengths, bound)) @ x

    def likelihood(theta: np.ndarray) -> np.ndarray:
        _logistic_likelihood(theta, x, y, out)
        return out

    def with_jax() -> Gradient:
        import jax

        return jax_gradient(lambda theta, x, y: y * (x @ theta) - jax.nn.softplus(x @ theta), x, y)

    gradients = {"numba": lambda theta, bound: _logistic(theta, bound, x, y), "numpy": with_numpy}
    return Case(f"logistic d={d}", n, build, truth, gradients, likelihood, with_jax)


# -- Gaussian with known covariance ---------------------------------------------------------------


@_fast
def _gaussian(theta, bound, y, precision):  # type: ignore[no-untyped-def]
    n, d = y.shape
    total, g = np.zeros(d), np.empty(d)
    for i in range(n):
        for k in range(d):
            g[k] = 0.0
        for j in range(d):
            difference = y[i, j] - theta[j]
            for k in range(d):
                g[k] += precision[j, k] * difference
        square = 0.0
        for k in range(d):
            square += g[k] * g[k]
        factor = bound / max(math.sqrt(square), bound)
        for k in range(d):
            total[k] += factor * g[k]
    return total


@_fast
def _gaussian_likelihood(theta, y, inverse, constant, out):  # type: ignore[no-untyped-def]
    """`inverse` is that of the lower Cholesky factor."""
    n, d = y.shape
    for i in range(n):
        square = 0.0
        for j in range(d):
            entry = 0.0
            for k in range(j + 1):
                entry += inverse[j, k] * (y[i, k] - theta[k])
            square += entry * entry
        out[i] = constant - 0.5 * square


def _gaussian_case(d: int = 10, n: int = 100_000) -> Case:
    rng = np.random.default_rng(d)
    root = rng.standard_normal((d, d))
    covariance = root @ root.T / d + np.eye(d)
    y = rng.multivariate_normal(np.zeros(d), covariance, size=n)
    precision, out = np.linalg.inv(covariance), np.empty(n)
    factor = np.linalg.cholesky(covariance)
    inverse = np.linalg.inv(factor)
    constant = -0.5 * d * math.log(2.0 * math.pi) - float(np.log(np.diag(factor)).sum())

    def build() -> pm.Model:
        with pm.Model() as model:
            mu = pm.Normal("mu", 0.0, 10.0, shape=d)
            pm.MvNormal("y", mu=mu, cov=covariance, observed=y)
        return model

    def with_numpy(theta: np.ndarray, bound: float) -> np.ndarray:
        g = (y - theta) @ precision
        return (bound / np.maximum(np.sqrt(np.einsum("ij,ij->i", g, g)), bound)) @ g

    def likelihood(theta: np.ndarray) -> np.ndarray:
        _gaussian_likelihood(theta, y, inverse, constant, out)
        return out

    def with_jax() -> Gradient:
        return jax_gradient(lambda theta, y: -0.5 * (y - theta) @ precision @ (y - theta), y)

    gradients = {
        "numba": lambda theta, bound: _gaussian(theta, bound, y, precision),
        "numpy": with_numpy,
    }
    return Case(f"Gaussian d={d}", n, build, np.full(d, 0.1), gradients, likelihood, with_jax)


# -- banana ---------------------------------------------------------------------------------------

_SD1, _SD2, _BEND = 4.5, 3.2, 20.0


@_fast
def _banana(theta, bound, x1, x2):  # type: ignore[no-untyped-def]
    first = second = 0.0
    mean, slope = theta[1] + _BEND * theta[0] ** 2, 2.0 * _BEND * theta[0]
    for i in range(x1.shape[0]):
        v = (x2[i] - mean) / _SD2**2
        u = (x1[i] - theta[0]) / _SD1**2 + slope * v
        factor = bound / max(math.sqrt(u * u + v * v), bound)
        first += factor * u
        second += factor * v
    return np.array([first, second])


@_fast
def _banana_likelihood(theta, x1, x2, out):  # type: ignore[no-untyped-def]
    mean = theta[1] + _BEND * theta[0] ** 2
    constant = -math.log(2.0 * math.pi * _SD1 * _SD2)
    for i in range(x1.shape[0]):
        u, v = (x1[i] - theta[0]) / _SD1, (x2[i] - mean) / _SD2
        out[i] = constant - 0.5 * (u * u + v * v)


def _banana_case(n: int = 100_000) -> Case:
    rng = np.random.default_rng(2)
    x1, x2 = rng.normal(0.0, _SD1, n), rng.normal(3.0, _SD2, n)
    out = np.empty(n)

    def build() -> pm.Model:
        with pm.Model() as model:
            first, second = pm.Normal("theta1", 0.0, 10.0), pm.Normal("theta2", 0.0, 10.0)
            pm.Normal("x1", first, _SD1, observed=x1)
            pm.Normal("x2", second + _BEND * first**2, _SD2, observed=x2)
        return model

    def with_numpy(theta: np.ndarray, bound: float) -> np.ndarray:
        v = (x2 - theta[1] - _BEND * theta[0] ** 2) / _SD2**2
        u = (x1 - theta[0]) / _SD1**2 + 2.0 * _BEND * theta[0] * v
        factor = bound / np.maximum(np.sqrt(u * u + v * v), bound)
        return np.array([factor @ u, factor @ v])

    def likelihood(theta: np.ndarray) -> np.ndarray:
        _banana_likelihood(theta, x1, x2, out)
        return out

    def with_jax() -> Gradient:
        def log_density(theta: Any, a: Any, b: Any) -> Any:
            bent = theta[1] + _BEND * theta[0] ** 2
            return -0.5 * (((a - theta[0]) / _SD1) ** 2 + ((b - bent) / _SD2) ** 2)

        return jax_gradient(log_density, x1, x2)

    gradients = {"numba": lambda theta, bound: _banana(theta, bound, x1, x2), "numpy": with_numpy}
    return Case("banana", n, build, np.array([0.1, 2.8]), gradients, likelihood, with_jax)


# -- Poisson regression ---------------------------------------------------------------------------


@_fast
def _poisson(theta, bound, x, y):  # type: ignore[no-untyped-def]
    n, d = x.shape
    total = np.zeros(d + 1)
    for i in range(n):
        eta = theta[0]
        square = 1.0
        for k in range(d):
            eta += x[i, k] * theta[k + 1]
            square += x[i, k] * x[i, k]
        s = y[i] - math.exp(eta)
        norm = abs(s) * math.sqrt(square)
        if norm > bound:
            s *= bound / norm
        total[0] += s
        for k in range(d):
            total[k + 1] += s * x[i, k]
    return total


@_fast
def _poisson_likelihood(theta, x, y, log_factorials, out):  # type: ignore[no-untyped-def]
    n, d = x.shape
    for i in range(n):
        eta = theta[0]
        for k in range(d):
            eta += x[i, k] * theta[k + 1]
        out[i] = y[i] * eta - math.exp(eta) - log_factorials[i]


def _poisson_case(d: int = 10, n: int = 20_000) -> Case:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n, d))
    truth = np.concatenate([[0.5], 0.2 * rng.standard_normal(d)])
    y = rng.poisson(np.exp(truth[0] + x @ truth[1:]))
    lengths, out = np.sqrt(1.0 + (x * x).sum(axis=1)), np.empty(n)
    log_factorials = np.array([math.lgamma(count + 1.0) for count in y])

    def build() -> pm.Model:
        with pm.Model() as model:
            a, beta = pm.Normal("a", 0.0, 3.0), pm.Normal("beta", 0.0, 3.0, shape=d)
            pm.Poisson("y", mu=pm.math.exp(a + pm.math.dot(x, beta)), observed=y)
        return model

    def with_numpy(theta: np.ndarray, bound: float) -> np.ndarray:
        s = y - np.exp(theta[0] + x @ theta[1:])
        s = s * bound / np.maximum(np.abs(s) * lengths, bound)
        return np.concatenate([[s.sum()], s @ x])

    def likelihood(theta: np.ndarray) -> np.ndarray:
        _poisson_likelihood(theta, x, y, log_factorials, out)
        return out

    def with_jax() -> Gradient:
        import jax.numpy as jnp

        def log_density(theta: Any, x: Any, y: Any) -> Any:
            eta = theta[0] + x @ theta[1:]
            return y * eta - jnp.exp(eta)

        return jax_gradient(log_density, x, y)

    gradients = {"numba": lambda theta, bound: _poisson(theta, bound, x, y), "numpy": with_numpy}
    return Case(f"Poisson d={d}", n, build, truth, gradients, likelihood, with_jax)


# -- logistic regression with several rows a user -------------------------------------------------


@_fast
def _users(theta, bound, x, y, starts):  # type: ignore[no-untyped-def]
    """Rows are sorted by user."""
    d = x.shape[1]
    total, g = np.zeros(d), np.empty(d)
    for u in range(starts.shape[0] - 1):
        for k in range(d):
            g[k] = 0.0
        for i in range(starts[u], starts[u + 1]):
            eta = 0.0
            for k in range(d):
                eta += x[i, k] * theta[k]
            s = y[i] - 1.0 / (1.0 + math.exp(-eta))
            for k in range(d):
                g[k] += s * x[i, k]
        square = 0.0
        for k in range(d):
            square += g[k] * g[k]
        factor = bound / max(math.sqrt(square), bound)
        for k in range(d):
            total[k] += factor * g[k]
    return total


@_fast
def _users_likelihood(theta, x, y, starts, out):  # type: ignore[no-untyped-def]
    for u in range(starts.shape[0] - 1):
        out[u] = 0.0
        for i in range(starts[u], starts[u + 1]):
            eta = 0.0
            for k in range(x.shape[1]):
                eta += x[i, k] * theta[k]
            out[u] += y[i] * eta - (max(eta, 0.0) + math.log1p(math.exp(-abs(eta))))


def _users_case(d: int = 10, users: int = 33_000, rows: int = 3) -> Case:
    """Rows in any order; by hand they are sorted once."""
    n = users * rows
    rng = np.random.default_rng(d)
    unit = rng.permutation(np.repeat(np.arange(users), rows))
    x = rng.standard_normal((n, d))
    truth = rng.standard_normal(d) / math.sqrt(d)
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-x @ truth))).astype("int64")
    order, starts = np.argsort(unit, kind="stable"), np.arange(users + 1) * rows
    xs, ys, out = x[order], y[order], np.empty(users)

    def build() -> pm.Model:
        with pm.Model() as model:
            beta = pm.Normal("beta", 0.0, 3.0, shape=d)
            pm.Bernoulli("y", logit_p=pm.math.dot(x, beta), observed=y)
        return model

    def with_numpy(theta: np.ndarray, bound: float) -> np.ndarray:
        s = ys - 1.0 / (1.0 + np.exp(-(xs @ theta)))
        g = np.add.reduceat(s[:, None] * xs, starts[:-1])
        return (bound / np.maximum(np.sqrt(np.einsum("ij,ij->i", g, g)), bound)) @ g

    def likelihood(theta: np.ndarray) -> np.ndarray:
        _users_likelihood(theta, xs, ys, starts, out)
        return out

    def with_jax() -> Gradient:
        import jax

        def log_density(theta: Any, x: Any, y: Any) -> Any:
            return (y * (x @ theta) - jax.nn.softplus(x @ theta)).sum()

        return jax_gradient(log_density, xs.reshape(users, rows, d), ys.reshape(users, rows))

    gradients = {
        "numba": lambda theta, bound: _users(theta, bound, xs, ys, starts),
        "numpy": with_numpy,
    }
    name = f"logistic d={d}, {rows} rows a user"
    return Case(name, n, build, truth, gradients, likelihood, with_jax, unit)


# -- Student t regression -------------------------------------------------------------------------

_NU = 4.0


@_fast
def _student(theta, bound, x, y):  # type: ignore[no-untyped-def]
    """Order: intercept, coefficients, log sigma."""
    n, d = x.shape
    total, sigma = np.zeros(d + 2), math.exp(theta[d + 1])
    for i in range(n):
        eta, square = theta[0], 1.0
        for k in range(d):
            eta += x[i, k] * theta[k + 1]
            square += x[i, k] * x[i, k]
        z = (y[i] - eta) / sigma
        w = (_NU + 1.0) * z / (_NU + z * z)
        s, t = w / sigma, w * z - 1.0
        factor = bound / max(math.sqrt(s * s * square + t * t), bound)
        s *= factor
        total[0] += s
        for k in range(d):
            total[k + 1] += s * x[i, k]
        total[d + 1] += factor * t
    return total


@_fast
def _student_likelihood(theta, x, y, constant, out):  # type: ignore[no-untyped-def]
    n, d = x.shape
    sigma = math.exp(theta[d + 1])
    for i in range(n):
        eta = theta[0]
        for k in range(d):
            eta += x[i, k] * theta[k + 1]
        z = (y[i] - eta) / sigma
        out[i] = constant - theta[d + 1] - 0.5 * (_NU + 1.0) * math.log1p(z * z / _NU)


def _student_case(d: int = 10, n: int = 100_000) -> Case:
    rng = np.random.default_rng(5)
    x, beta = rng.standard_normal((n, d)), 0.3 * rng.standard_normal(d)
    y = 0.5 + x @ beta + 0.7 * rng.standard_t(_NU, n)
    theta = np.concatenate([[0.5], beta, [math.log(0.7)]])
    squares, out = 1.0 + (x * x).sum(axis=1), np.empty(n)
    constant = math.lgamma((_NU + 1.0) / 2.0) - math.lgamma(_NU / 2.0)
    constant -= 0.5 * math.log(_NU * math.pi)

    def build() -> pm.Model:
        with pm.Model() as model:
            a, slopes = pm.Normal("a", 0.0, 3.0), pm.Normal("beta", 0.0, 3.0, shape=d)
            sigma = pm.HalfNormal("sigma", 2.0)
            pm.StudentT("y", nu=_NU, mu=a + pm.math.dot(x, slopes), sigma=sigma, observed=y)
        return model

    def with_numpy(theta: np.ndarray, bound: float) -> np.ndarray:
        sigma = math.exp(theta[-1])
        z = (y - theta[0] - x @ theta[1:-1]) / sigma
        w = (_NU + 1.0) * z / (_NU + z * z)
        s, t = w / sigma, w * z - 1.0
        factor = bound / np.maximum(np.sqrt(s * s * squares + t * t), bound)
        s = s * factor
        return np.concatenate([[s.sum()], s @ x, [factor @ t]])

    def likelihood(theta: np.ndarray) -> np.ndarray:
        _student_likelihood(theta, x, y, constant, out)
        return out

    def with_jax() -> Gradient:
        import jax.numpy as jnp

        def log_density(theta: Any, x: Any, y: Any) -> Any:
            z = (y - theta[0] - x @ theta[1:-1]) / jnp.exp(theta[-1])
            return -theta[-1] - 0.5 * (_NU + 1.0) * jnp.log1p(z * z / _NU)

        return jax_gradient(log_density, x, y)

    gradients = {"numba": lambda theta, bound: _student(theta, bound, x, y), "numpy": with_numpy}
    name = f"Student t d={d}"
    return Case(name, n, build, theta, gradients, likelihood, with_jax)


# -- hierarchical normal --------------------------------------------------------------------------


@_fast
def _hierarchical(theta, bound, x, y, group, groups):  # type: ignore[no-untyped-def]
    """Order: mu, log tau, group means, coefficients, log sigma."""
    n, d = x.shape
    total = np.zeros(len(theta))
    sigma = math.exp(theta[len(theta) - 1])
    for i in range(n):
        eta = theta[2 + group[i]]
        square = 1.0
        for k in range(d):
            eta += x[i, k] * theta[2 + groups + k]
            square += x[i, k] * x[i, k]
        residual = (y[i] - eta) / sigma
        s, t = residual / sigma, residual * residual - 1.0
        factor = bound / max(math.sqrt(s * s * square + t * t), bound)
        s *= factor
        total[2 + group[i]] += s
        for k in range(d):
            total[2 + groups + k] += s * x[i, k]
        total[len(theta) - 1] += factor * t
    return total


@_fast
def _hierarchical_likelihood(theta, x, y, group, groups, out):  # type: ignore[no-untyped-def]
    n, d = x.shape
    log_sigma = theta[len(theta) - 1]
    sigma, constant = math.exp(log_sigma), -0.5 * math.log(2.0 * math.pi) - log_sigma
    for i in range(n):
        eta = theta[2 + group[i]]
        for k in range(d):
            eta += x[i, k] * theta[2 + groups + k]
        residual = (y[i] - eta) / sigma
        out[i] = constant - 0.5 * residual * residual


def _hierarchical_case(groups: int = 50, d: int = 5, n: int = 100_000) -> Case:
    rng = np.random.default_rng(4)
    x, group = rng.standard_normal((n, d)), rng.integers(0, groups, n)
    means, beta = rng.standard_normal(groups), rng.standard_normal(d)
    y = means[group] + x @ beta + 0.7 * rng.standard_normal(n)
    theta = np.concatenate([[0.0, 0.0], means, beta, [math.log(0.7)]])
    squares, out = 1.0 + (x * x).sum(axis=1), np.empty(n)

    def build() -> pm.Model:
        with pm.Model() as model:
            mu, tau = pm.Normal("mu", 0.0, 3.0), pm.HalfNormal("tau", 2.0)
            alpha = pm.Normal("alpha", mu, tau, shape=groups)
            slopes, sigma = pm.Normal("beta", 0.0, 3.0, shape=d), pm.HalfNormal("sigma", 2.0)
            pm.Normal("y", alpha[group] + pm.math.dot(x, slopes), sigma, observed=y)
        return model

    def with_numpy(theta: np.ndarray, bound: float) -> np.ndarray:
        sigma = math.exp(theta[-1])
        residual = (y - theta[2:-1][:groups][group] - x @ theta[2 + groups : -1]) / sigma
        s, t = residual / sigma, residual * residual - 1.0
        factor = bound / np.maximum(np.sqrt(s * s * squares + t * t), bound)
        s = s * factor
        sums = np.bincount(group, s, groups)
        return np.concatenate([[0.0, 0.0], sums, s @ x, [factor @ t]])

    def likelihood(theta: np.ndarray) -> np.ndarray:
        _hierarchical_likelihood(theta, x, y, group, groups, out)
        return out

    def with_jax() -> Gradient:
        import jax.numpy as jnp

        def log_density(theta: Any, x: Any, y: Any, g: Any) -> Any:
            eta = theta[2 + g] + x @ theta[2 + groups : -1]
            return -0.5 * ((y - eta) / jnp.exp(theta[-1])) ** 2 - theta[-1]

        return jax_gradient(log_density, x, y, group)

    gradients = {
        "numba": lambda theta, bound: _hierarchical(theta, bound, x, y, group, groups),
        "numpy": with_numpy,
    }
    return Case(f"hierarchical {groups} groups", n, build, theta, gradients, likelihood, with_jax)


CASES: dict[str, Callable[[], Case]] = {
    "logistic10": lambda: logistic_case(10),
    "logistic50": lambda: logistic_case(50),
    "gaussian": _gaussian_case,
    "banana": _banana_case,
    "poisson": _poisson_case,
    "users": _users_case,
    "student_t": _student_case,
    "hierarchical": _hierarchical_case,
}
