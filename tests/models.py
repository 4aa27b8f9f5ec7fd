"""Small models for tests: one per likelihood, and per way in which parameters reach the records.

Every example is a function of a :class:`Data` object that declares the random variables of one
model; :func:`build` calls it inside a new ``pm.Model``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt

N = 60
GROUPS = 4


class Data:
    """Columns of a made-up data set of `n` rows."""

    def __init__(self, n: int = N, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.n = n
        self.X = rng.normal(size=(n, 3))
        self.x = rng.normal(size=n)
        self.real = rng.normal(size=n)
        self.pair = rng.normal(size=(n, 2))
        self.wide = rng.normal(size=(n, 12))
        self.positive = rng.gamma(2.0, size=n)
        self.fraction = rng.uniform(0.1, 0.9, n)
        self.binary = rng.integers(0, 2, n)
        self.count = rng.poisson(2.0, n)
        self.group = rng.integers(0, GROUPS, n)
        self.half = rng.integers(0, 2, n)
        self.choice = rng.integers(0, 3, n)
        self.counts = rng.multinomial(5, [0.2, 0.3, 0.5], n)
        self.shares = rng.dirichlet([2.0, 2.0, 2.0], n)
        self.series = rng.normal(size=(n, 4))
        self.person = rng.integers(0, max(n // 3, 1), n)
        self.other_count = rng.poisson(1.0, n + 7)
        self.other_person = rng.integers(0, max(n // 3, 1), n + 7)

    @cached_property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.X, columns=["one", "two", "three"])


@dataclass(frozen=True)
class Example:
    declare: Callable[[Data], None]
    options: Callable[[Data], dict[str, Any]]


EXAMPLES: dict[str, Example] = {}


def example(**options: Any) -> Callable[[Callable[[Data], None]], Callable[[Data], None]]:
    """Register an example; `options` are those of the budget, or functions of the data."""

    def register(declare: Callable[[Data], None]) -> Callable[[Data], None]:
        def of(data: Data) -> dict[str, Any]:
            return {k: v(data) if callable(v) else v for k, v in options.items()}

        EXAMPLES[declare.__name__] = Example(declare, of)
        return declare

    return register


def build(name: str, data: Data | None = None) -> pm.Model:
    with pm.Model() as model:
        EXAMPLES[name].declare(data or Data())
    return model


def coefficients(size: int = 3, name: str = "beta") -> Any:
    return pm.Normal(name, 0.0, 1.0, shape=size)


def scale() -> Any:
    return pm.HalfNormal("sigma", 1.0)


# -- likelihoods ----------------------------------------------------------------------------------


@example()
def logistic(d: Data) -> None:
    pm.Bernoulli("y", logit_p=d.X @ coefficients(), observed=d.binary)


@example()
def bernoulli_p(d: Data) -> None:
    pm.Bernoulli("y", p=pm.math.sigmoid(d.X @ coefficients()), observed=d.binary)


@example()
def binomial(d: Data) -> None:
    pm.Binomial("y", n=d.count + 1, logit_p=d.X @ coefficients(), observed=np.minimum(d.count, 1))


@example()
def poisson_groups(d: Data) -> None:
    alpha = pm.Normal("alpha", 0.0, 1.0, shape=GROUPS)
    pm.Poisson("y", mu=pt.exp(alpha[d.group] + d.X @ coefficients()), observed=d.count)


@example()
def negative_binomial(d: Data) -> None:
    alpha = pm.HalfNormal("alpha", 2.0)
    pm.NegativeBinomial("y", mu=pt.exp(d.X @ coefficients()), alpha=alpha, observed=d.count)


@example()
def normal(d: Data) -> None:
    pm.Normal("y", d.X @ coefficients(), scale(), observed=d.real)


@example()
def student_t(d: Data) -> None:
    pm.StudentT("y", nu=4.0, mu=d.X @ coefficients(), sigma=scale(), observed=d.real)


@example(public=["cov"])
def mv_normal(d: Data) -> None:
    # as large as makes a library routine work on several columns at once; with more entries than
    # there are records it must be declared public
    cov = pm.Data("cov", np.eye(12) + 0.5)
    pm.MvNormal("y", mu=d.X @ coefficients((3, 12)), cov=cov, observed=d.wide)


@example()
def mv_normal_lkj(d: Data) -> None:
    sd = pm.HalfNormal.dist(1.0, shape=2)
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=sd)
    pm.MvNormal("y", mu=coefficients(2, "mu"), chol=chol, observed=d.pair)


@example()
def categorical(d: Data) -> None:
    p = pm.math.softmax(d.X @ coefficients((3, 3)), axis=-1)
    pm.Categorical("y", p=p, observed=d.choice)


@example()
def categorical_shared(d: Data) -> None:
    pm.modelcontext(None).add_coord("choice", range(3))
    probabilities = pm.Dirichlet("p", np.ones(3), dims="choice")  # a size that no graph tells
    pm.Categorical("y", p=probabilities, observed=d.choice)


@example()
def ordered_logistic(d: Data) -> None:
    cutpoints = pm.Normal(
        "cutpoints",
        0.0,
        1.0,
        shape=2,
        transform=pm.distributions.transforms.ordered,
        initval=[-1.0, 1.0],
    )
    pm.OrderedLogistic("y", eta=d.X @ coefficients(), cutpoints=cutpoints, observed=d.choice)


@example()
def gamma(d: Data) -> None:
    pm.Gamma(
        "y", alpha=pm.HalfNormal("alpha"), beta=pt.exp(d.X @ coefficients()), observed=d.positive
    )


@example()
def beta(d: Data) -> None:
    pm.Beta("y", mu=pm.math.sigmoid(d.X @ coefficients()), sigma=0.2, observed=d.fraction)


@example()
def mixture_shared(d: Data) -> None:
    weights = pm.Dirichlet("w", np.ones(2))
    pm.NormalMixture("y", w=weights, mu=coefficients(2, "mu"), sigma=1.0, observed=d.real)


@example()
def mixture_of_regressions(d: Data) -> None:
    parts = [pm.Normal.dist(d.X @ coefficients(), 1.0), pm.StudentT.dist(nu=3, mu=0, sigma=2)]
    pm.Mixture("y", w=[0.3, 0.7], comp_dists=parts, observed=d.real)


@example()
def zero_inflated(d: Data) -> None:
    psi = pm.Beta("psi", 1.0, 1.0)
    pm.ZeroInflatedPoisson("y", psi=psi, mu=pt.exp(d.X @ coefficients()), observed=d.count)


@example()
def hurdle(d: Data) -> None:
    psi = pm.Beta("psi", 1.0, 1.0)
    observed = d.positive * d.half
    pm.HurdleGamma("y", psi=psi, alpha=2.0, beta=pt.exp(d.X @ coefficients()), observed=observed)


@example()
def censored(d: Data) -> None:
    latent = pm.Normal.dist(d.X @ coefficients(), scale())
    pm.Censored("y", latent, lower=-1.0, upper=1.0, observed=d.real.clip(-1.0, 1.0))


@example()
def censored_by_row(d: Data) -> None:
    limit = np.abs(d.x) + 0.1
    latent = pm.Normal.dist(d.X @ coefficients(), 1.0)
    pm.Censored("y", latent, lower=None, upper=limit, observed=np.minimum(d.real, limit))


@example()
def truncated(d: Data) -> None:
    pm.Truncated("y", pm.Normal.dist(d.X @ coefficients(), scale()), lower=0, observed=d.positive)


@example()
def multinomial(d: Data) -> None:
    pm.Multinomial("y", n=5, p=pm.Dirichlet("p", np.ones(3)), observed=d.counts)


@example()
def dirichlet_multinomial(d: Data) -> None:
    pm.DirichletMultinomial("y", n=5, a=pm.HalfNormal("a", 2.0, shape=3), observed=d.counts)


@example()
def dirichlet(d: Data) -> None:
    pm.Dirichlet("y", a=pm.HalfNormal("a", 2.0, shape=3), observed=d.shares)


@example()
def custom_logp(d: Data) -> None:
    def logp(value: Any, b: Any) -> Any:
        return -0.5 * (value - b) ** 2

    pm.CustomDist("y", coefficients(None, "b"), logp=logp, observed=d.real)


@example()
def custom_dist(d: Data) -> None:
    def dist(mu: Any, sigma: Any, size: Any) -> Any:
        return pt.exp(pm.Normal.dist(mu, sigma, size=size))

    pm.CustomDist("y", d.X @ coefficients(), scale(), dist=dist, observed=d.positive)


# -- ways in which parameters reach the records ---------------------------------------------------


@example()
def non_centred_groups(d: Data) -> None:
    mu, tau = pm.Normal("mu"), pm.HalfNormal("tau")
    z = pm.Normal("z", 0.0, 1.0, shape=GROUPS)
    pm.Normal("y", (mu + tau * z)[d.group], scale(), observed=d.real)


@example()
def nested_groups(d: Data) -> None:
    region = pm.Normal("region", 0.0, 1.0, shape=2)
    town = pm.Normal("town", region[np.array([0, 0, 1, 1])], 1.0, shape=GROUPS)
    pm.Normal("y", town[d.group], 1.0, observed=d.real)


@example()
def two_indices(d: Data) -> None:
    a = pm.Normal("a", 0.0, 1.0, shape=(GROUPS, 2))
    pm.Normal("y", a[d.group, d.half], 1.0, observed=d.real)


@example()
def index_and_constant(d: Data) -> None:
    a = pm.Normal("a", 0.0, 1.0, shape=(GROUPS, 2))
    pm.Normal("y", a[d.group, 0] + a[d.group, 1] * d.x, 1.0, observed=d.real)


@example()
def small_unsigned_labels(d: Data) -> None:
    a = pm.Normal("a", 0.0, 1.0, shape=GROUPS)
    c = pm.Normal("c", 0.0, 1.0, shape=2)
    mu = a[d.group.astype("uint8")] + c[d.half.astype("uint64")]
    pm.Normal("y", mu, 1.0, observed=d.real)


@example()
def labels_computed_in_the_model(d: Data) -> None:
    year = pm.Data("year", 2018 + d.group)
    a = pm.Normal("a", 0.0, 1.0, shape=GROUPS)
    pm.Normal("y", a[year - 2018], 1.0, observed=d.real)


@example(public=["public_x"])
def public_data_by_row_and_by_mean(d: Data) -> None:
    x = pm.Data("public_x", np.linspace(-1.0, 1.0, d.n) ** 3)
    pm.Normal("y", pm.Normal("b") * (x - x.mean()), 1.0, observed=d.real)


@example()
def random_slopes(d: Data) -> None:
    slopes = pm.Normal("slopes", 0.0, 1.0, shape=(GROUPS, 3))
    pm.Normal("y", (slopes[d.group] * d.X).sum(axis=1), 1.0, observed=d.real)


@example()
def random_walk_prior(d: Data) -> None:
    walk = pm.GaussianRandomWalk("walk", sigma=1.0, init_dist=pm.Normal.dist(), shape=GROUPS)
    pm.Normal("y", walk[d.group], 1.0, observed=d.real)


@example()
def scalar_times_column(d: Data) -> None:
    b = coefficients()
    pm.Normal("y", b[0] + b[1] * d.X[:, 1] + b[2] * d.X[:, 2] ** 2, 1.0, observed=d.real)


@example()
def sum_of_products(d: Data) -> None:
    pm.Normal("y", (d.X * coefficients()).sum(axis=1), 1.0, observed=d.real)


@example()
def vector_times_transpose(d: Data) -> None:
    pm.Normal("y", pm.math.dot(coefficients(), d.X.T), 1.0, observed=d.real)


@example()
def one_column(d: Data) -> None:
    pm.Normal("y", d.X[:, :1] @ coefficients(1), 1.0, observed=d.real)


@example()
def one_column_of_data(d: Data) -> None:
    # PyTensor makes an elementwise product of it, in which the column is broadcast
    mu = pm.Data("X", d.X[:, :1]) @ coefficients((1, 2))
    pm.Normal("y", mu, 1.0, observed=d.pair)


@example()
def matrix_with_one_column(d: Data) -> None:
    pm.Normal("y", d.X @ coefficients((3, 1)), scale(), observed=d.real[:, None])


@example()
def square_design(d: Data) -> None:
    design = np.random.default_rng(5).normal(size=(d.n, d.n))
    pm.Normal("y", design @ coefficients(d.n), 1.0, observed=d.real)


@example()
def matrix_observations(d: Data) -> None:
    pm.Normal("y", coefficients(2, "mu"), scale(), observed=d.pair)


@example()
def neural_network(d: Data) -> None:
    hidden = pt.tanh(d.X @ coefficients((3, 4), "W") + coefficients(4, "c"))
    pm.Normal(
        "y", pt.tanh(hidden @ coefficients((4, 2), "V")) @ coefficients(2), 1.0, observed=d.real
    )


@example()
def spline(d: Data) -> None:
    knots = np.linspace(-1.0, 1.0, 5)
    basis = pt.maximum(pt.as_tensor(d.x)[:, None] - knots, 0.0)
    pm.Normal("y", basis @ coefficients(5), 1.0, observed=d.real)


@example()
def single_precision_design(d: Data) -> None:
    pm.Normal("y", d.X.astype("float32") @ coefficients(), 1.0, observed=d.real.astype("float32"))


@example()
def integer_design(d: Data) -> None:
    pm.Normal("y", d.counts @ coefficients(), 1.0, observed=d.real)


@example()
def boolean_design(d: Data) -> None:
    pm.Normal("y", (d.X > 0) @ coefficients() + pm.Normal("c") * (d.x > 0), 1.0, observed=d.real)


@example()
def switch_on_data(d: Data) -> None:
    b = coefficients()
    pm.Normal("y", pt.switch(d.x > 0, b[0] * d.x, b[1]), 1.0, observed=d.real)


@example()
def pandas_inputs(d: Data) -> None:
    mu = pm.math.dot(pm.Data("frame", d.frame), coefficients()) + pm.Normal("c") * d.frame["one"]
    pm.Normal("y", mu, 1.0, observed=pd.Series(d.real))


@example()
def series_by_row(d: Data) -> None:
    shock = pm.Normal("shock", 0.0, 1.0, shape=GROUPS)[d.group]
    pm.Normal("y", shock[:, None] + coefficients(4, "time"), scale(), observed=d.series)


@example()
def data_with_dims(d: Data) -> None:
    X = pm.Data("X", d.X, dims=("row", "feature"))
    mu = pm.Deterministic("mu", X @ pm.Normal("beta", dims="feature"), dims="row")
    pm.Normal("y", mu, scale(), observed=pm.Data("y_data", d.real, dims="row"), dims="row")


@example(public=["centre", "covariate"])
def public_data(d: Data) -> None:
    X = pm.Data("X", d.X) - pm.Data("centre", d.X[:2].mean(axis=0))
    covariate = pm.Data("covariate", np.linspace(0.0, 1.0, d.n + 5))
    prior_sd = 1.0 + pt.abs(covariate).mean()
    b = pm.Normal("b", 0.0, prior_sd)
    pm.Normal("y", X @ coefficients() + b * covariate[d.group], 1.0, observed=d.real)


@example(public=["z"])
def public_likelihood(d: Data) -> None:
    b = coefficients()
    pm.Normal("z", b.sum(), 1.0, observed=np.linspace(-1.0, 1.0, 9))
    pm.Bernoulli("y", logit_p=d.X @ b, observed=d.binary)


@example()
def two_observed(d: Data) -> None:
    b = coefficients()
    pm.Normal("y", d.X @ b, scale(), observed=d.real)
    pm.Poisson("count", pt.exp(d.X @ b), observed=d.count)


@example()
def observed_given_observed(d: Data) -> None:
    count = pm.Poisson("count", pt.exp(pm.Normal("a")), observed=d.count)
    pm.Normal("y", pm.Normal("b") * count, 1.0, observed=d.real)


@example(privacy_unit=lambda d: d.person)
def persons(d: Data) -> None:
    alpha = pm.Normal("alpha", 0.0, 1.0, shape=GROUPS)
    pm.Normal("y", alpha[d.group] + d.X @ coefficients(), scale(), observed=d.real)


@example(privacy_unit=lambda d: {"y": d.person, "visits": d.other_person})
def two_lengths(d: Data) -> None:
    b = pm.Normal("b")
    pm.Normal("y", b * d.x, scale(), observed=d.real)
    pm.Poisson("visits", pt.exp(b) * np.ones(d.n + 7), observed=d.other_count)
