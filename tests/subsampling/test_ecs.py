"""Samples of records instead of all: control variates, estimates, and what their chains target."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy.special import expit

from pymc_dp.rows.predictor import FAMILIES
from pymc_dp.subsampling import estimates as estimates_module
from pymc_dp.subsampling import transitions as transitions_module
from pymc_dp.subsampling.estimates import (
    MEAN,
    PERTURBED,
    Sampled,
    density,
    drawn,
    expand,
    first_records,
    quadratic,
)
from pymc_dp.subsampling.linear import LinearRows
from pymc_dp.subsampling.preparation import Variates, prepare
from pymc_dp.subsampling.transitions import (
    Drawn,
    log_constants,
    perturbed_numbers,
    signed_numbers,
    start_perturbed,
    start_signed,
)

pytestmark = pytest.mark.compiled

#: Two-sided normal tail 3.8e-8 for each of fewer than twenty moments.
Z = 5.5
N = 300


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, 3))
    eta = x @ [0.5, -0.5, 0.3]
    return x, rng.binomial(1, expit(eta)), rng.poisson(np.exp(eta)), eta + rng.normal(size=N)


def prepared(
    declare: Callable[[], None], order: int, estimator: str = "perturbed", general: bool = False
) -> Variates:
    with pm.Model() as model:
        declare()
    return prepare(model, "HMCECS", order=order, estimator=estimator, general=general)


def logistic() -> None:
    x, y, _, _ = data()
    pm.Bernoulli("y", logit_p=x @ pm.Normal("beta", 0, 2, shape=3), observed=y)


def poisson() -> None:
    x, _, y, _ = data()
    beta = pm.Normal("beta", 0, 2, shape=3)
    pm.Poisson("y", mu=pm.math.exp(0.2 + x @ beta), observed=y)


def normal() -> None:
    x, _, _, y = data()
    beta = pm.Normal("beta", 0, 2, shape=3)
    pm.Normal("y", x @ beta, pm.HalfNormal("sigma", 2), observed=y)


# -- control variates -----------------------------------------------------------------------------


def glm(theta: np.ndarray, centre: np.ndarray, order: int, kind: str) -> np.ndarray:
    """d_k of a generalised linear model by hand, from its definition (eq. 4.4)."""
    x, binary, count, _ = data()
    if kind == "logistic":
        offset, y = 0.0, binary
        kernels = [lambda v: np.logaddexp(0, v), expit, lambda v: expit(v) * expit(-v)]
    else:
        offset, y, kernels = 0.2, count, [np.exp] * 3
    v, star = offset + x @ theta, offset + x @ centre
    q = y * star - kernels[0](star)
    if order >= 1:
        q = q + (x * (y - kernels[1](star))[:, None]) @ (theta - centre)
    if order == 2:
        hessians = -x[:, :, None] * x[:, None, :] * kernels[2](star)[:, None, None]
        q = q + 0.5 * np.einsum("kij,i,j->k", hessians, theta - centre, theta - centre)
    return y * v - kernels[0](v) - q


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("declare", [logistic, poisson])
def test_control_variates_of_linear_predictors(declare: Callable[[], None], order: int) -> None:
    variates = prepared(declare, order)
    assert variates.kernel is None and variates.prior is None
    theta = variates.curved.theta + np.array([0.3, -0.2, 0.1])
    found = variates.differences(theta, np.arange(N))
    expected = glm(theta, variates.curved.theta, order, declare.__name__)
    assert np.abs(found - expected).max() < 1e-12
    assert np.abs(expected).max() > 1e-4


@cache
def general_logistic(order: int) -> Variates:
    return prepared(logistic, order, general=True)


@pytest.mark.parametrize(
    "order",
    [pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(2, marks=pytest.mark.slow)],
)
def test_control_variates_from_the_graph_are_those_of_the_loops(order: int) -> None:
    own, general = prepared(logistic, order), general_logistic(order)
    assert own.kernel is None and general.kernel is not None
    theta = own.curved.theta + np.array([0.3, -0.2, 0.1])
    assert np.abs(own.curved.theta - general.curved.theta).max() < 1e-10
    assert np.allclose(own.curved.hessian, general.curved.hessian, rtol=1e-12)
    expected = glm(theta, own.curved.theta, order, "logistic")
    assert np.abs(general.differences(theta, np.arange(N)) - expected).max() < 1e-12


@cache
def general_normal() -> Variates:
    return prepared(normal, 2)


@pytest.mark.slow
def test_control_variates_of_a_scale_that_enters_through_its_logarithm() -> None:
    """A shared value that is not affine in theta has second derivatives of its own."""
    x, _, _, y = data()
    variates = general_normal()
    centre = variates.curved.theta
    delta = np.array([0.05, -0.03, 0.02, 0.1])

    def loglik(theta: np.ndarray) -> np.ndarray:
        return (
            -theta[3]
            - 0.5 * np.log(2 * np.pi)
            - (y - x @ theta[:3]) ** 2 / (2 * np.exp(2 * theta[3]))
        )

    residual, precision = y - x @ centre[:3], np.exp(-2 * centre[3])
    slope = np.column_stack([x * (residual * precision)[:, None], residual**2 * precision - 1])
    hessian = np.zeros((N, 4, 4))
    hessian[:, :3, :3] = -precision * x[:, :, None] * x[:, None, :]
    hessian[:, :3, 3] = hessian[:, 3, :3] = -2 * precision * residual[:, None] * x
    hessian[:, 3, 3] = -2 * precision * residual**2
    q = loglik(centre) + slope @ delta + 0.5 * np.einsum("kij,i,j->k", hessian, delta, delta)
    found = variates.differences(centre + delta, np.arange(N))
    assert np.abs(found - (loglik(centre + delta) - q)).max() < 1e-12
    assert np.allclose(variates.curved.hessian, hessian.sum(axis=0), rtol=1e-10)


def test_the_sum_of_control_variates_is_quadratic() -> None:
    """Sum of q_k + sum of d_k is the log-likelihood, with the prior where that is normal."""
    x, y, _, _ = data()
    variates = prepared(logistic, 2)
    centre = variates.curved.theta

    def rest(theta: np.ndarray) -> float:
        """What is left beside the log-posterior: a constant of the prior."""
        total = quadratic(variates.expansion, theta, np.empty(3))
        total += variates.differences(theta, np.arange(N)).sum()
        v = x @ theta
        return total - (y * v - np.logaddexp(0, v)).sum() + 0.5 * (theta**2).sum() / 4

    assert abs(rest(centre + np.array([0.3, -0.2, 0.1])) - rest(centre)) < 1e-10


# -- estimates ------------------------------------------------------------------------------------


def estimate_of(variates: Variates, batch: int) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    m = 20
    shift = -12.0 if batch > 0 else 0.0
    scale = N / (batch if batch > 0 else m)
    at = Sampled(variates.family, variates.expansion, scale, shift, batch)
    index = np.random.default_rng(1).integers(0, N, m)
    sample = variates.sample(index)

    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        gradient = np.empty_like(theta)
        kernel, prior = variates.kernel, variates.prior
        return density(kernel, prior, at, sample, theta, np.empty(m), gradient), gradient

    return evaluate


@pytest.mark.parametrize(
    ("variates", "batch"),
    [
        (lambda: prepared(logistic, 2), PERTURBED),
        (lambda: prepared(logistic, 1), 5),
        (lambda: prepared(poisson, 0), MEAN),
        pytest.param(general_normal, PERTURBED, marks=pytest.mark.slow),
    ],
)
def test_gradient_of_the_whole_estimate(variates: Callable[[], Variates], batch: int) -> None:
    found = variates()
    evaluate = estimate_of(found, batch)
    theta = found.curved.theta + 0.2
    _, gradient = evaluate(theta)
    h = 1e-5
    for j, unit in enumerate(np.eye(len(theta))):
        slope = (evaluate(theta + h * unit)[0] - evaluate(theta - h * unit)[0]) / (2 * h)
        assert abs(slope - gradient[j]) < 1e-6 * max(1.0, abs(gradient[j]))


@pytest.mark.slow
def test_the_graph_estimates_as_the_loops_do() -> None:
    own, general = prepared(logistic, 2), general_logistic(2)
    theta = own.curved.theta + 0.2
    a, b = (estimate_of(variates, PERTURBED)(theta) for variates in (own, general))
    assert abs(a[0] - b[0]) < 1e-10 and np.allclose(a[1], b[1], rtol=1e-10)


# -- a posterior that is known ---------------------------------------------------------------------


class Few:
    """Four records of a logistic regression on one covariate, and a N(0, 1) prior."""

    x = np.array([3.0, -1.5, 3.0, 1.0])
    y = np.array([1.0, 1.0, 0.0, 1.0])
    grid = np.linspace(-6, 6, 2401)

    def __init__(self, order: int) -> None:
        source = LinearRows(
            FAMILIES.index("logit"), np.zeros(4), self.x[:, None], self.y, np.ones(4)
        )
        centre = np.array([0.1])
        value, gradient = source.total(centre)
        expansion = expand(centre, value, gradient, source.hessian(centre), order)
        # log N(0, 1) about the centre
        self.expansion = expansion.plus(-0.005, -centre, -np.eye(1))
        self.rows, self.width = source.remainders(centre, order)
        v = self.grid[:, None] * self.x
        self.loglik = (self.y * v - np.logaddexp(0, v)).sum(axis=1) - 0.5 * self.grid**2
        d = np.array([self.differences(theta) for theta in self.grid])
        self.d = d
        self.quadratic = np.array(
            [quadratic(self.expansion, np.array([t]), np.empty(1)) for t in self.grid]
        )

    def differences(self, theta: float) -> np.ndarray:
        design, v, value, b, linear, bent = self.rows.T
        t = design * (theta - 0.1)
        return linear * t + 0.5 * bent * t**2 - b * np.logaddexp(0, v + t) - value

    def moments(self, log_density: np.ndarray) -> np.ndarray:
        """Mean, variance about 0 and probability of (0, inf) on the grid."""
        weights = np.exp(log_density - log_density.max())
        weights /= weights.sum()
        return np.array([weights @ f for f in self.functions(self.grid)])

    @staticmethod
    def functions(theta: np.ndarray) -> list[np.ndarray]:
        return [theta, theta**2, (theta > 0).astype(float)]

    def perturbed(self, m: int) -> np.ndarray:
        """Log-density of the perturbed target, by all samples of m of the four records."""
        index = np.array(np.meshgrid(*[range(4)] * m)).reshape(m, -1)
        d = self.d[:, index]
        estimate = 4 / m * d.sum(axis=1)
        variance = (4 / m) ** 2 * ((d - d.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
        return self.quadratic + np.log(np.exp(estimate - 0.5 * variance).mean(axis=1))


def errors(found: list[np.ndarray], weights: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Errors of ratio estimates in units of their standard errors, by means of batches."""
    z = []
    for f, truth in zip(found, expected, strict=True):
        terms = (weights * (f - truth)).reshape(50, -1).mean(axis=1)
        z.append(terms.mean() / (terms.std(ddof=1) / np.sqrt(50)))
    return np.array(z)


def run(
    transition: Callable[..., tuple[float, ...]],
    at: Sampled,
    rows: Any,
    chain: Any,
    chances: Callable[[np.random.Generator], Drawn],
    draws: int,
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    theta, last = np.empty(draws), np.ones(draws)
    for k in range(draws):
        found = transition(None, None, at, rows, chain, np.eye(1), 0.7, 2, chances(rng))
        theta[k], last[k] = chain.theta[0], found[-1]
    return theta, last


def perturbed_errors(
    transition: Callable[..., tuple[float, ...]], draws: int, m: int = 2
) -> np.ndarray:
    few = Few(order=1)
    at = Sampled(FAMILIES.index("logit"), few.expansion, 4 / m, 0.0, PERTURBED)
    chain = start_perturbed(np.random.default_rng(2), np.zeros(1), few.rows, few.width, m, m)

    def chances(rng: np.random.Generator) -> Drawn:
        return perturbed_numbers(rng, np.eye(1), 4, m, 1)

    theta, _ = run(transition, at, few.rows, chain, chances, draws)
    target = few.moments(few.perturbed(m))
    assert np.abs(target - few.moments(few.loglik)).max() > 0.03  # these can be told apart
    return errors(few.functions(theta), np.ones(draws), target)


@pytest.mark.slow
def test_perturbed_chains_have_the_perturbed_target() -> None:
    found = perturbed_errors(transitions_module.perturbed, 100_000)
    assert np.abs(found).max() < Z


#: The same transition without the compiler, so that parts of it can be replaced.
interpreted = transitions_module.perturbed.py_func


@pytest.mark.slow
def test_a_forgotten_variance_is_found() -> None:
    def without(kernel: Any, prior: Any, at: Sampled, *rest: Any) -> tuple[float, ...]:
        """Trajectories and their accept test see the mean alone, the sample's update does not."""
        return transitions_module.perturbed(kernel, prior, at._replace(batch=MEAN), *rest)

    assert np.abs(perturbed_errors(without, 100_000)).max() > 1.5 * Z


@pytest.mark.slow
def test_dynamics_with_another_sample_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original, rng = estimates_module.leapfrog, np.random.default_rng(4)
    few = Few(order=1)

    def leapfrog(kernel: Any, prior: Any, at: Any, sample: Any, *rest: Any) -> float:
        other = drawn(few.rows, few.width, rng.integers(0, 4, len(sample[0])))
        return original(kernel, prior, at, other, *rest)

    monkeypatch.setattr(estimates_module, "leapfrog", leapfrog)
    monkeypatch.setattr(transitions_module, "trajectory", estimates_module.trajectory.py_func)
    assert np.abs(perturbed_errors(interpreted, 20_000)).max() > 1.5 * Z


@pytest.mark.slow
def test_the_planted_faults_are_all_that_is_wrong_with_those_runs() -> None:
    assert np.abs(perturbed_errors(interpreted, 20_000)).max() < Z


def signed_setting(batch: int = 2, products: int = 5) -> tuple[Few, Sampled, Any]:
    few = Few(order=1)
    at = Sampled(FAMILIES.index("logit"), few.expansion, 4 / batch, -1.0 - products, batch)
    return (
        few,
        at,
        lambda rng: start_signed(rng, np.array([1.2]), few.rows, few.width, batch, products),
    )


@pytest.mark.slow
def test_the_block_poisson_estimate_is_unbiased() -> None:
    few, at, start = signed_setting()
    rng, values = np.random.default_rng(5), np.empty(40_000)
    gradient = np.empty(1)
    for k in range(len(values)):
        chain = start(rng)
        m = chain.counts[0] * at.batch
        sample, d = first_records(chain.sample, m), chain.d[:m]
        value = density(None, None, at, sample, chain.theta, d, gradient)
        value += log_constants(at.shift, chain.counts[1], chain.counts[0])
        sign = -1.0 if transitions_module.negative(d, at.scale, at.shift, at.batch) else 1.0
        values[k] = sign * np.exp(value)
    v = 1.2 * few.x
    exact = np.exp((few.y * v - np.logaddexp(0, v)).sum() - 0.72)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - exact) < Z * error < 0.2 * exact


@pytest.mark.slow
def test_signed_chains_have_the_posterior_itself() -> None:
    few, at, start = signed_setting()
    chain = start(np.random.default_rng(2))

    def chances(rng: np.random.Generator) -> Drawn:
        return signed_numbers(rng, np.eye(1), 4, int(chain.counts[1]), at.batch)

    theta, sign = run(transitions_module.signed, at, few.rows, chain, chances, 150_000)
    assert 0.05 < (sign < 0).mean() < 0.4
    expected = few.moments(few.loglik)
    assert np.abs(errors(few.functions(theta), sign, expected)).max() < Z
    # without the signs it is another distribution
    assert np.abs(errors(few.functions(theta), np.ones(len(sign)), expected)).max() > 1.5 * Z
