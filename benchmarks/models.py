"""Models with generated data: a stated truth, weakly informative priors, nothing to tune.

`PAPER` are the two models of Raisa, Koskela & Honkela (2021, section 4), `REGRESSIONS` those on
which the samplers are compared, `ZOO` models of many kinds, sizes and scales that all have to work
with default arguments, `EVERYDAY` the ordinary models of statistics, at n = 20,000 and epsilon 2.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from scipy.special import expit
from scipy.stats import gamma as gamma_law

__all__ = [
    "BANANA",
    "EVERYDAY",
    "GAUSS",
    "MODELS",
    "PAPER",
    "REGRESSIONS",
    "ZOO",
    "Data",
    "Problem",
    "everyday",
]

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Data:
    """One generated data set.

    Attributes
    ----------
    truth : dict of str to ndarray
        Values of the free variables, empty for real data.
    arrays : dict of str to ndarray
        What the model is built from; ``unit``, if present, is the privacy unit of each row.
    """

    truth: Arrays
    arrays: Arrays


@dataclass(frozen=True)
class Problem:
    """A model and the law of its data.

    Attributes
    ----------
    generate : callable
        rng -> Data.
    declare : callable
        Declares the variables of the model from the arrays, inside of its context.
    units : int
        Number of privacy units.
    epsilon : float
        At which a user of so many records would be content with the result.
    """

    name: str
    generate: Callable[[np.random.Generator], Data]
    declare: Callable[[Arrays], None]
    units: int
    epsilon: float
    coords: dict[str, Any] = field(default_factory=dict)
    fixed_delta: float | None = None

    @property
    def delta(self) -> float:
        """0.1 / n, as in the paper, if no other is given."""
        return self.fixed_delta or 0.1 / self.units

    def data(self, seed: int) -> Data:
        """The data set of a seed; the name is part of the seed."""
        return self.generate(np.random.default_rng([seed, *self.name.encode()]))

    def model(self, data: Data) -> pm.Model:
        """The model of a data set, without a budget."""
        with pm.Model(coords=self.coords) as model:
            self.declare(data.arrays)
        return model


def _features(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    return rng.normal(size=(n, d))


# -- the paper's models ---------------------------------------------------------------------------


class Gauss:
    """Mean of a normal law with known covariance, d = 10.

    Eigenvalues of the covariance from a gamma law of shape 1/2, eigenvectors of a uniform matrix;
    drawn once, from a seed of their own.
    """

    d, n, prior_sd = 10, 100_000, 100.0

    def __init__(self) -> None:
        rng = np.random.default_rng(43235667)
        values = gamma_law(0.5).rvs(self.d, random_state=rng)
        vectors, _ = np.linalg.qr(rng.uniform(size=(self.d, self.d)))
        self.covariance = (vectors * values) @ vectors.T
        self.mean = np.concatenate([[0.0, 3.0], np.zeros(self.d - 2)])

    def generate(self, rng: np.random.Generator) -> Data:
        root = np.linalg.cholesky(self.covariance)
        x = self.mean + rng.normal(size=(self.n, self.d)) @ root.T
        return Data({"theta": self.mean}, {"x": x})

    def declare(self, arrays: Arrays) -> None:
        theta = pm.Normal("theta", 0.0, self.prior_sd, shape=self.d)
        pm.MvNormal("x", theta, cov=self.covariance, observed=arrays["x"])


class Banana:
    """theta ~ Ban(0, 1000 I, 20); x1 ~ N(theta1, 2000), x2 ~ N(theta2 + 20 theta1^2, 2500)."""

    n, a, prior_variance = 100_000, 20.0, 1000.0
    variances = np.array([2000.0, 2500.0])

    def generate(self, rng: np.random.Generator) -> Data:
        x = rng.normal(size=(self.n, 2)) * np.sqrt(self.variances) + np.array([0.0, 3.0])
        truth = {"theta1": np.array(0.0), "theta2": np.array(3.0)}
        return Data(truth, {"x1": x[:, 0].copy(), "x2": x[:, 1].copy()})

    def declare(self, arrays: Arrays) -> None:
        prior_sd = np.sqrt(self.prior_variance)
        theta1 = pm.Normal("theta1", 0.0, prior_sd)
        theta2 = pm.Normal("theta2", -self.a * theta1**2, prior_sd)
        sds = np.sqrt(self.variances)
        pm.Normal("x1", theta1, sds[0], observed=arrays["x1"])
        pm.Normal("x2", theta2 + self.a * theta1**2, sds[1], observed=arrays["x2"])


GAUSS, BANANA = Gauss(), Banana()


# -- regressions ----------------------------------------------------------------------------------


def _logistic(n: int, d: int, epsilon: float) -> Problem:
    def generate(rng: np.random.Generator) -> Data:
        x = _features(rng, n, d)
        beta = np.linspace(-1.0, 1.0, d) / np.sqrt(d) * 1.7
        y = rng.binomial(1, expit(x @ beta))
        return Data({"beta": beta}, {"x": x, "y": y})

    def declare(a: Arrays) -> None:
        beta = pm.Normal("beta", 0.0, 3.0, shape=d)
        pm.Bernoulli("y", logit_p=a["x"] @ beta, observed=a["y"])

    size = f"{n // 1000}k"
    return Problem(f"logistic{d}_{size}", generate, declare, n, epsilon)


def _poisson(n: int = 20_000, d: int = 10) -> Problem:
    truth = {"a": np.array(0.5), "beta": 0.2 * np.sin(1.0 + np.arange(d))}

    def generate(rng: np.random.Generator) -> Data:
        x = _features(rng, n, d)
        y = rng.poisson(np.exp(truth["a"] + x @ truth["beta"]))
        return Data(truth, {"x": x, "y": y})

    def declare(a: Arrays) -> None:
        intercept = pm.Normal("a", 0.0, 3.0)
        beta = pm.Normal("beta", 0.0, 1.0, shape=d)
        pm.Poisson("y", pt.exp(intercept + a["x"] @ beta), observed=a["y"])

    return Problem("poisson", generate, declare, n, 4.0)


def _hierarchical_logistic(groups: int, n: int = 200_000) -> Problem:
    """Group intercepts of very unequal groups, their mean and spread unknown; effects vary."""
    effects = np.array([0.4, -0.3, 0.5, 0.0, 0.2])

    def generate(rng: np.random.Generator) -> Data:
        group = rng.choice(groups, n, p=rng.dirichlet(2.0 * np.ones(groups)))
        x = np.column_stack(
            [
                rng.binomial(1, 0.1, n),
                rng.binomial(1, 0.5, n),
                rng.uniform(-1.0, 1.0, n),
                rng.uniform(-1.0, 1.0, n),
                rng.normal(size=n).clip(-3.0, 3.0),
            ]
        )
        alpha = rng.normal(-0.5, 0.5, groups)
        y = rng.binomial(1, expit(alpha[group] + x @ effects))
        truth = {"mu": np.array(-0.5), "tau": np.array(0.5), "alpha": alpha, "beta": effects}
        return Data(truth, {"x": x, "group": group, "y": y})

    def declare(a: Arrays) -> None:
        mu = pm.Normal("mu", 0.0, 2.0)
        tau = pm.HalfNormal("tau", 1.0)
        alpha = pm.Normal("alpha", mu, tau, shape=groups)
        beta = pm.Normal("beta", 0.0, 2.0, shape=len(effects))
        pm.Bernoulli("y", logit_p=alpha[a["group"]] + a["x"] @ beta, observed=a["y"])

    return Problem(f"hierarchical{groups}", generate, declare, n, 4.0)


def _mortgages() -> Problem:
    """The data of the quickstart: real ones, so there is no truth and no coverage."""
    path = Path(__file__).parents[1] / "examples" / "mortgages.py"
    spec = importlib.util.spec_from_file_location("mortgages", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def generate(rng: np.random.Generator) -> Data:
        x, y = example.load()
        return Data({}, {"x": x, "y": y})

    def declare(a: Arrays) -> None:
        beta = pm.Normal("beta", 0.0, example.PRIOR_SD, dims="feature")
        pm.Bernoulli("owns_home", logit_p=a["x"] @ beta, observed=a["y"])

    coords = {"feature": list(example.FEATURES)}
    return Problem("mortgages", generate, declare, example.N_PEOPLE, 1.0, coords)


# -- the zoo --------------------------------------------------------------------------------------


def _normal_far(n: int = 5_000) -> Problem:
    truth = {"mu": np.array(712.0), "sigma": np.array(45.0)}

    def generate(rng: np.random.Generator) -> Data:
        return Data(truth, {"y": rng.normal(truth["mu"], truth["sigma"], n)})

    def declare(a: Arrays) -> None:
        mu = pm.Normal("mu", 0.0, 1000.0)
        sigma = pm.HalfNormal("sigma", 500.0)
        pm.Normal("y", mu, sigma, observed=a["y"])

    return Problem("normal_far", generate, declare, n, 4.0)


def _linear_scales(n: int = 20_000) -> Problem:
    scales = np.array([0.01, 0.1, 1.0, 10.0, 100.0])
    effects = np.array([0.5, -1.0, 0.8, 0.3, -0.4])
    truth = {"a": np.array(20.0), "beta": effects / scales, "sigma": np.array(2.0)}

    def generate(rng: np.random.Generator) -> Data:
        x = _features(rng, n, len(scales)) * scales
        y = truth["a"] + x @ truth["beta"] + rng.normal(size=n) * truth["sigma"]
        return Data(truth, {"x": x, "y": y})

    def declare(a: Arrays) -> None:
        intercept = pm.Normal("a", 0.0, 50.0)
        beta = pm.Normal("beta", 0.0, 5.0 / scales)
        sigma = pm.HalfNormal("sigma", 10.0)
        pm.Normal("y", intercept + a["x"] @ beta, sigma, observed=a["y"])

    return Problem("linear_scales", generate, declare, n, 4.0)


def _negative_binomial(n: int = 20_000) -> Problem:
    beta = np.array([0.5, -0.3, 0.2, 0.0])
    truth = {"a": np.array(1.0), "beta": beta, "alpha": np.array(1.5)}

    def generate(rng: np.random.Generator) -> Data:
        x = _features(rng, n, len(beta))
        mean = np.exp(truth["a"] + x @ beta)
        y = rng.poisson(mean * rng.gamma(truth["alpha"], 1.0 / truth["alpha"], n))
        return Data(truth, {"x": x, "y": y})

    def declare(a: Arrays) -> None:
        intercept = pm.Normal("a", 0.0, 3.0)
        beta = pm.Normal("beta", 0.0, 1.0, shape=4)
        alpha = pm.Exponential("alpha", 0.5)
        mean = pt.exp(intercept + a["x"] @ beta)
        pm.NegativeBinomial("y", mu=mean, alpha=alpha, observed=a["y"])

    return Problem("negative_binomial", generate, declare, n, 4.0)


def _gamma(n: int = 10_000) -> Problem:
    """Amounts of about 1500 with features between 0 and 1."""
    beta = np.array([0.3, -0.5, 0.1])
    truth = {"a": np.array(7.3), "beta": beta, "shape": np.array(2.5)}

    def generate(rng: np.random.Generator) -> Data:
        x = rng.uniform(size=(n, len(beta)))
        y = rng.gamma(truth["shape"], np.exp(truth["a"] + x @ beta) / truth["shape"])
        return Data(truth, {"x": x, "y": y})

    def declare(a: Arrays) -> None:
        intercept = pm.Normal("a", 5.0, 5.0)
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        shape = pm.HalfNormal("shape", 5.0)
        mean = pt.exp(intercept + a["x"] @ beta)
        pm.Gamma("y", alpha=shape, beta=shape / mean, observed=a["y"])

    return Problem("gamma", generate, declare, n, 4.0)


def _student_t(n: int = 10_000) -> Problem:
    """A location of 2e-3 and a scale of 1e-3."""
    truth = {"mu": np.array(2e-3), "sigma": np.array(1e-3)}

    def generate(rng: np.random.Generator) -> Data:
        return Data(truth, {"y": truth["mu"] + truth["sigma"] * rng.standard_t(4.0, n)})

    def declare(a: Arrays) -> None:
        mu = pm.Normal("mu", 0.0, 0.01)
        sigma = pm.HalfNormal("sigma", 0.01)
        pm.StudentT("y", nu=4.0, mu=mu, sigma=sigma, observed=a["y"])

    return Problem("student_t", generate, declare, n, 4.0)


def _hierarchical_normal(n: int = 50_000, groups: int = 30) -> Problem:
    def generate(rng: np.random.Generator) -> Data:
        group = rng.choice(groups, n, p=rng.dirichlet(5.0 * np.ones(groups)))
        z = rng.normal(size=groups)
        truth = {name: np.array(v) for name, v in (("mu", 4.0), ("tau", 1.5), ("sigma", 2.0))}
        y = truth["mu"] + truth["tau"] * z[group] + truth["sigma"] * rng.normal(size=n)
        return Data({**truth, "z": z}, {"group": group, "y": y})

    def declare(a: Arrays) -> None:
        mu = pm.Normal("mu", 0.0, 10.0)
        tau = pm.HalfNormal("tau", 5.0)
        z = pm.Normal("z", 0.0, 1.0, shape=groups)
        sigma = pm.HalfNormal("sigma", 5.0)
        pm.Normal("y", (mu + tau * z)[a["group"]], sigma, observed=a["y"])

    return Problem("hierarchical_normal", generate, declare, n, 4.0)


def _beta(n: int = 5_000) -> Problem:
    truth = {"a": np.array(-1.0), "b": np.array(0.7), "kappa": np.array(8.0)}

    def generate(rng: np.random.Generator) -> Data:
        x = rng.normal(size=n)
        mean = expit(truth["a"] + truth["b"] * x)
        y = rng.beta(mean * truth["kappa"], (1.0 - mean) * truth["kappa"])
        return Data(truth, {"x": x, "y": np.clip(y, 1e-9, 1.0 - 1e-9)})

    def declare(a: Arrays) -> None:
        mean = pm.math.sigmoid(pm.Normal("a", 0.0, 2.0) + pm.Normal("b", 0.0, 1.0) * a["x"])
        kappa = pm.HalfNormal("kappa", 20.0)
        pm.Beta("y", alpha=mean * kappa, beta=(1.0 - mean) * kappa, observed=a["y"])

    return Problem("beta", generate, declare, n, 4.0)


def _softmax(n: int = 50_000, classes: int = 3) -> Problem:
    """All classes have coefficients: what is added to all of them is known from the prior alone."""

    def generate(rng: np.random.Generator) -> Data:
        x = np.column_stack([np.ones(n), _features(rng, n, 3)])
        beta = rng.normal(size=(4, classes))
        logits = x @ beta
        y = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
        return Data({"beta": beta}, {"x": x, "y": y})

    def declare(a: Arrays) -> None:
        beta = pm.Normal("beta", 0.0, 1.0, shape=(4, classes))
        p = pm.math.softmax(a["x"] @ beta, axis=-1)
        pm.Categorical("y", p=p, observed=a["y"])

    return Problem("softmax", generate, declare, n, 4.0)


def _users(users: int = 3_000, rows: int = 20) -> Problem:
    """20 rows for each user, who is the unit of privacy."""
    beta = np.array([-0.5, 0.8, 0.3])

    def generate(rng: np.random.Generator) -> Data:
        unit = np.repeat(np.arange(users), rows)
        x = np.column_stack([np.ones(users * rows), _features(rng, users * rows, 2)])
        y = rng.binomial(1, expit(x @ beta))
        return Data({"beta": beta}, {"x": x, "y": y, "unit": unit})

    def declare(a: Arrays) -> None:
        beta = pm.Normal("beta", 0.0, 2.5, shape=3)
        pm.Bernoulli("y", logit_p=a["x"] @ beta, observed=a["y"])

    return Problem("users", generate, declare, users, 4.0)


def _rate(n: int = 1_000) -> Problem:
    truth = {"p": np.array(0.3)}

    def generate(rng: np.random.Generator) -> Data:
        return Data(truth, {"y": rng.binomial(1, truth["p"], n)})

    def declare(a: Arrays) -> None:
        pm.Bernoulli("y", pm.Beta("p", 1.0, 1.0), observed=a["y"])

    return Problem("rate", generate, declare, n, 1.0)


def _named(*problems: Problem) -> dict[str, Problem]:
    return {problem.name: problem for problem in problems}


# -- everyday models ------------------------------------------------------------------------------

#: Effects of three standard normal features.
_EFFECTS = np.array([0.4, -0.3, 0.2])


def _regression(
    name: str,
    draw: Callable[[np.random.Generator, np.ndarray, Arrays], np.ndarray],
    declare: Callable[[Any, np.ndarray, Any], None],
    scalars: Arrays,
    n: int,
    effects: np.ndarray = _EFFECTS,
) -> Problem:
    """Outcomes that depend on an intercept, some features and further parameters."""
    truth = {"a": np.array(0.5), "beta": effects, **scalars}

    def generate(rng: np.random.Generator) -> Data:
        x = _features(rng, n, len(effects))
        return Data(truth, {"x": x, "y": draw(rng, truth["a"] + x @ effects, truth)})

    def declared(a: Arrays) -> None:
        intercept = pm.Normal("a", 0.0, 2.0)
        beta = pm.Normal("beta", 0.0, 1.0, shape=len(effects))
        declare(intercept + a["x"] @ beta, a["y"])

    return Problem(name, generate, declared, n, 2.0, fixed_delta=1e-6)


def everyday(n: int = 20_000) -> dict[str, Problem]:
    """The ordinary models, one of each family, with n records."""
    one = _EFFECTS[:1]

    def negative_binomial(eta: Any, y: np.ndarray) -> None:
        alpha = pm.Exponential("alpha", 0.5)
        pm.NegativeBinomial("y", mu=pt.exp(eta), alpha=alpha, observed=y)

    def gamma(eta: Any, y: np.ndarray) -> None:
        shape = pm.HalfNormal("shape", 5.0)
        pm.Gamma("y", alpha=shape, beta=shape / pt.exp(eta), observed=y)

    def beta(eta: Any, y: np.ndarray) -> None:
        mean, kappa = pm.math.sigmoid(eta), pm.HalfNormal("kappa", 20.0)
        pm.Beta("y", alpha=mean * kappa, beta=(1.0 - mean) * kappa, observed=y)

    def zero_inflated(eta: Any, y: np.ndarray) -> None:
        psi = pm.Beta("psi", 2.0, 2.0)
        pm.ZeroInflatedPoisson("y", psi=psi, mu=pt.exp(eta), observed=y)

    def censored(eta: Any, y: np.ndarray) -> None:
        shape = pm.HalfNormal("shape", 3.0)
        time = pm.Weibull.dist(alpha=shape, beta=pt.exp(eta))
        pm.Censored("y", time, lower=None, upper=3.0, observed=y)

    return _named(
        _regression(
            "everyday_logistic",
            lambda rng, eta, t: rng.binomial(1, expit(eta)),
            lambda eta, y: pm.Bernoulli("y", logit_p=eta, observed=y),
            {},
            n,
        ),
        _regression(
            "everyday_student_t",
            lambda rng, eta, t: eta + t["sigma"] * rng.standard_t(4.0, len(eta)),
            lambda eta, y: pm.StudentT(
                "y", nu=4.0, mu=eta, sigma=pm.HalfNormal("sigma", 5.0), observed=y
            ),
            {"sigma": np.array(1.5)},
            n,
        ),
        _regression(
            "everyday_poisson",
            lambda rng, eta, t: rng.poisson(np.exp(eta)),
            lambda eta, y: pm.Poisson("y", pt.exp(eta), observed=y),
            {},
            n,
        ),
        _regression(
            "everyday_negative_binomial",
            lambda rng, eta, t: rng.poisson(
                np.exp(eta) * rng.gamma(t["alpha"], 1.0 / t["alpha"], len(eta))
            ),
            negative_binomial,
            {"alpha": np.array(0.8)},
            n,
        ),
        _regression(
            "everyday_gamma",
            lambda rng, eta, t: rng.gamma(t["shape"], np.exp(eta) / t["shape"]),
            gamma,
            {"shape": np.array(1.5)},
            n,
        ),
        _regression(
            "everyday_beta",
            lambda rng, eta, t: rng.beta(
                expit(eta) * t["kappa"], (1.0 - expit(eta)) * t["kappa"]
            ).clip(1e-9, 1.0 - 1e-9),
            beta,
            {"kappa": np.array(8.0)},
            n,
            one,
        ),
        _regression(
            "everyday_zero_inflated_poisson",
            lambda rng, eta, t: rng.binomial(1, t["psi"], len(eta)) * rng.poisson(np.exp(eta)),
            zero_inflated,
            {"psi": np.array(0.7)},
            n,
            one,
        ),
        _regression(
            "everyday_censored_weibull",
            lambda rng, eta, t: np.minimum(np.exp(eta) * rng.weibull(t["shape"], len(eta)), 3.0),
            censored,
            {"shape": np.array(1.5)},
            n,
            one,
        ),
    )


PAPER = _named(
    Problem("gauss", GAUSS.generate, GAUSS.declare, GAUSS.n, 4.0),
    Problem("banana", BANANA.generate, BANANA.declare, BANANA.n, 4.0),
)
REGRESSIONS = _named(
    _logistic(20_000, 10, 4.0),
    _logistic(100_000, 10, 1.0),
    _poisson(),
    _hierarchical_logistic(25),
    _hierarchical_logistic(50),
    _mortgages(),
)
ZOO = _named(
    _rate(),
    _normal_far(),
    _linear_scales(),
    REGRESSIONS["poisson"],
    _negative_binomial(),
    _gamma(),
    _logistic(100_000, 50, 4.0),
    _student_t(),
    _hierarchical_normal(),
    _beta(),
    _softmax(),
    _users(),
)
EVERYDAY = everyday()
MODELS = {**PAPER, **REGRESSIONS, **ZOO, **EVERYDAY}
