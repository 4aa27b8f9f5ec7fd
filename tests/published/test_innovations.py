"""Innovations: round trips, and the law of records that are made from new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from scipy import stats

from pymc_dp.published.innovations import innovation, normal_scores

N = 4000
MODE = Mode(linker="py", optimizer=None)
#: By chance a Kolmogorov-Smirnov test is below this once in a million times.
ALPHA = 1e-6

CONTINUOUS = {
    "normal": (lambda: pm.Normal.dist(1.0, 2.0, shape=N), stats.norm(1, 2)),
    "half normal": (lambda: pm.HalfNormal.dist(2.0, shape=N), stats.halfnorm(0, 2)),
    "laplace": (lambda: pm.Laplace.dist(1.0, 2.0, shape=N), stats.laplace(1, 2)),
    "logistic": (lambda: pm.Logistic.dist(1.0, 2.0, shape=N), stats.logistic(1, 2)),
    "cauchy": (lambda: pm.Cauchy.dist(1.0, 2.0, shape=N), stats.cauchy(1, 2)),
    "half cauchy": (lambda: pm.HalfCauchy.dist(2.0, shape=N), stats.halfcauchy(0, 2)),
    "gumbel": (lambda: pm.Gumbel.dist(1.0, 2.0, shape=N), stats.gumbel_r(1, 2)),
    "t": (lambda: pm.StudentT.dist(nu=3.0, mu=1.0, sigma=2.0, shape=N), stats.t(3, 1, 2)),
    "exponential": (lambda: pm.Exponential.dist(2.0, shape=N), stats.expon(0, 0.5)),
    "gamma": (lambda: pm.Gamma.dist(2.0, 3.0, shape=N), stats.gamma(2, 0, 1 / 3)),
    "log normal": (lambda: pm.LogNormal.dist(1.0, 0.5, shape=N), stats.lognorm(0.5, 0, np.e)),
    "uniform": (lambda: pm.Uniform.dist(1.0, 4.0, shape=N), stats.uniform(1, 3)),
    "beta": (lambda: pm.Beta.dist(2.0, 3.0, shape=N), stats.beta(2, 3)),
    "weibull": (lambda: pm.Weibull.dist(2.0, 3.0, shape=N), stats.weibull_min(2, 0, 3)),
}
DISCRETE = {
    "bernoulli": (lambda: pm.Bernoulli.dist(0.3, shape=N), stats.bernoulli(0.3)),
    "categorical": (
        lambda: pm.Categorical.dist(np.array([0.2, 0.5, 0.3]), shape=N),
        stats.rv_discrete(values=([0, 1, 2], [0.2, 0.5, 0.3])),
    ),
    "poisson": (lambda: pm.Poisson.dist(3.0, shape=N), stats.poisson(3)),
    "binomial": (lambda: pm.Binomial.dist(6, 0.3, shape=N), stats.binom(6, 0.3)),
    "negative binomial": (
        lambda: pm.NegativeBinomial.dist(n=4, p=0.4, shape=N),
        stats.nbinom(4, 0.4),
    ),
    "geometric": (lambda: pm.Geometric.dist(0.3, shape=N), stats.geom(0.3)),
    "discrete uniform": (lambda: pm.DiscreteUniform.dist(2, 5, shape=N), stats.randint(2, 6)),
}
Family = tuple[Callable[[], Any], Any]


def check(family: Family, normal: bool, discrete: bool) -> None:
    declare, law = family
    rv = declare()
    found = normal_scores(rv) if normal else innovation(rv)
    assert found is not None
    rng = np.random.default_rng(6)
    x, w, u = pt.vector("x", dtype=rv.type.dtype), pt.vector("w"), pt.vector("u")
    there = pytensor.function(
        [x, w], found.standardised(rv, x, w), on_unused_input="ignore", mode=MODE
    )
    back = pytensor.function([u], found.restored(rv, u), on_unused_input="ignore", mode=MODE)
    records = np.asarray(law.rvs(size=N, random_state=rng)).astype(rv.type.dtype)
    innovations = there(records, rng.random(N))
    np.testing.assert_allclose(
        back(innovations), records, rtol=1e-5, atol=1e-7
    )  # quantiles are that exact
    if found.normal:
        assert stats.kstest(innovations, "norm").pvalue > ALPHA
    elif found.uniform:
        assert stats.kstest(innovations, "uniform").pvalue > ALPHA
    if normal:
        fresh = rng.standard_normal(N)
    elif found.drawn is not None:
        fresh = found.drawn(rng, (N,))
    else:
        fresh = rng.random(N)
    made = np.asarray(back(fresh))
    if discrete:
        support = np.unique(np.r_[made, records])
        expected = law.pmf(support)
        counts = np.array([(made == k).sum() for k in support])
        many = expected * N > 10
        error = np.sqrt(N * expected * (1 - expected))[many]
        assert (np.abs(counts - N * expected)[many] < 6 * error).all()
    else:
        assert stats.kstest(made, law.cdf).pvalue > ALPHA


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("family", CONTINUOUS)
def test_continuous_records(family: str, normal: bool) -> None:
    if family == "t" and normal:  # its quantiles are not exact enough in PyMC
        assert normal_scores(CONTINUOUS[family][0]()) is None
        return
    check(CONTINUOUS[family], normal, discrete=False)


@pytest.mark.parametrize(
    ("family", "normal"), [(family, k % 2 == 1) for k, family in enumerate(DISCRETE)]
)
def test_discrete_records(family: str, normal: bool) -> None:
    check(DISCRETE[family], normal, discrete=True)


def test_many_normals() -> None:
    cov = np.array([[2.0, 0.6], [0.6, 1.0]])
    rv = pm.MvNormal.dist(np.array([1.0, -1.0]), cov, shape=(N, 2))
    found = innovation(rv)
    assert found is not None and found.drawn is not None
    x, u = pt.matrix("x"), pt.matrix("u")
    there = pytensor.function([x], found.standardised(rv, x, x), mode=MODE)
    back = pytensor.function([u], found.restored(rv, u), mode=MODE)
    fresh = found.drawn(np.random.default_rng(1), (N, 2))
    np.testing.assert_allclose(there(back(fresh)), fresh, atol=1e-12)
    white = np.linalg.solve(np.linalg.cholesky(cov), (back(fresh) - [1.0, -1.0]).T)
    np.testing.assert_allclose(white, fresh.T, atol=1e-12)


def test_shapes_that_move_are_held_by_quantiles() -> None:
    with pm.Model():
        shape = pm.HalfNormal("shape")
        moving = pm.Gamma("moving", alpha=shape, beta=2.0, shape=3)
        fixed = pm.Gamma("fixed", alpha=2.0, beta=shape, shape=3)
    by_quantiles, by_scale = innovation(moving), innovation(fixed)
    assert by_quantiles is not None and by_quantiles.uniform
    assert by_scale is not None and not by_scale.uniform


def test_records_without_a_formula() -> None:
    mixture = pm.NormalMixture.dist([0.5, 0.5], [0.0, 1.0], [1.0, 1.0], shape=3)
    censored = pm.Censored.dist(pm.Normal.dist(), lower=-1.0, upper=1.0, shape=3)
    assert innovation(censored) is None  # its distribution function jumps
    assert innovation(mixture) is None
    assert normal_scores(mixture) is None
