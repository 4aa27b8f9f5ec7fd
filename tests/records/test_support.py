"""Supports that end at a parameter are refused before anything is spent, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.distributions.dist_math import check_parameters

import pymc_dp as dp
from pymc_dp.records.extraction import extract
from tests.models import GROUPS, Data
from tests.selection import marked

D = Data()
ABOVE = D.positive + 3.0
DISTANCE = np.abs(D.x) + 0.1
INSIDE = 1900.0 + D.positive


def end(**options: Any) -> Any:
    return pm.HalfNormal("theta", 1.0, **options)


def predictor() -> Any:
    return D.X @ pm.Normal("theta", shape=3)


def custom(logp: Callable[..., Any], *parameters: Any, observed: Any = ABOVE) -> None:
    pm.CustomDist("y", *(parameters or (end(),)), logp=logp, observed=observed)


def simulated(dist: Callable[..., Any]) -> None:
    pm.CustomDist("y", end(), dist=lambda t, size: dist(t, size), observed=ABOVE)


def hurdle(zero: Any, truncated: Any, observed: Any) -> None:
    parts = [pm.DiracDelta.dist(zero), pm.Truncated.dist(truncated, lower=zero + 1e-9, upper=end())]
    pm.Mixture("y", w=[0.3, 0.7], comp_dists=parts, observed=observed)


def logp_of(dist: Any) -> Callable[..., Any]:
    return lambda y, t: pm.logp(dist, y - t)


#: Models of `y` whose support ends at a function of `theta`.
ENDS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: pm.Uniform("y", 0, end(), observed=ABOVE),
    "lower end": lambda: pm.Uniform("y", pm.Normal("theta"), 5, observed=ABOVE),
    "pm.Data": lambda: pm.Uniform("y", 0, end(), observed=pm.Data("data", ABOVE)),
    "single precision": lambda: pm.Uniform("y", 0, end(), observed=ABOVE.astype("float32")),
    "of groups": lambda: pm.Uniform("y", 0, end(shape=GROUPS)[D.group], observed=ABOVE),
    "of columns": lambda: pm.Uniform("y", 0, end(shape=2), observed=np.abs(D.pair)),
    "of a regression": lambda: pm.Uniform("y", 0, pt.exp(predictor()), observed=ABOVE),
    "beside a far fixed end": lambda: pm.Uniform("y", 1900.0, 1990.0 + end(), observed=INSIDE),
    "beside a negative fixed end": lambda: pm.Uniform("y", -200.0 - end(), -100, observed=-INSIDE),
    "far from 0": lambda: pm.Uniform("y", 0, pm.Normal("theta", 1e5, 10.0), observed=ABOVE),
    "pareto": lambda: pm.Pareto("y", alpha=2.0, m=end(), observed=ABOVE),
    "wald": lambda: pm.Wald("y", mu=1.0, lam=1.0, alpha=end(), observed=ABOVE),
    "truncated normal": lambda: pm.TruncatedNormal("y", 0, 1, upper=end(), observed=ABOVE),
    "truncated below": lambda: pm.TruncatedNormal("y", 0, 1, lower=end(), observed=ABOVE),
    "truncated": lambda: pm.Truncated("y", pm.Gamma.dist(2, 1), upper=end(), observed=ABOVE),
    "triangular": lambda: pm.Triangular("y", lower=0, c=0.2, upper=1 + end(), observed=ABOVE),
    "integers": lambda: pm.DiscreteUniform("y", 0, pt.floor(10 * end()), observed=D.count),
    "unsigned integers": lambda: pm.DiscreteUniform(
        "y", 0, 10 * end(), observed=D.count.astype("uint8")
    ),
    "censored": lambda: pm.Censored("y", pm.Normal.dist(), lower=None, upper=end(), observed=ABOVE),
    "hurdle": lambda: hurdle(0.0, pm.Gamma.dist(2, 1), D.half * ABOVE),
    "shifted exponential": lambda: custom(logp_of(pm.Exponential.dist(1.0))),
    "simulated shift": lambda: simulated(lambda t, size: t + pm.Exponential.dist(1.0, size=size)),
    "simulated scale": lambda: simulated(lambda t, size: t * pm.Beta.dist(2, 1, size=size)),
    "switch": lambda: custom(lambda y, t: pt.switch(pt.lt(y, t), -np.inf, t - y)),
    "not": lambda: custom(lambda y, t: pt.switch(pt.invert(y <= t), t - y, -1 * np.inf)),
    "and": lambda: custom(lambda y, t: pt.switch((y > t) & (y < t + 9), -2.2, -np.inf)),
    "product of conditions": lambda: custom(
        lambda y, t: pt.switch((y > t) * (y < t + 9), -2.2, -np.inf)
    ),
    "nested": lambda: custom(
        lambda y, t: pt.switch(y < t, -y, pt.switch(y < t + 1, -2 * y, -np.inf))
    ),
    "logarithm of 0": lambda: custom(lambda y, t: pt.switch(y > t, t - y, pt.log(0.0))),
    "logarithm of a switch": lambda: custom(
        lambda y, t: pt.log(pt.switch(y > t, pt.exp(t - y), 0.0))
    ),
    "logarithm of a product": lambda: custom(lambda y, t: pt.log((y > t) * pt.exp(t - y))),
    "logarithm of a condition": lambda: custom(
        lambda y, t: pt.log(pt.cast(y > t, "float64")) + t - y
    ),
    "logarithm of a maximum": lambda: custom(lambda y, t: pt.log(pt.maximum(t - y, 0))),
    "logarithm of a clip": lambda: custom(lambda y, t: pt.log(pt.clip(t - y, 0, np.inf))),
    "check": lambda: custom(lambda y, t: check_parameters(t - y, y > t)),
    "absolute value": lambda: custom(
        lambda y, t: pt.switch(pt.abs(y) <= t, -pt.log(2 * t), -np.inf)
    ),
    "given another variable": lambda: pm.Uniform(
        "y",
        0,
        end() + pm.Poisson("count", pt.exp(pm.Normal("a")), observed=D.count),
        observed=ABOVE,
    ),
}
#: Models with conditions that end no support; tests.models has the ordinary families.
NO_ENDS: dict[str, Callable[[], Any]] = {
    "huber": lambda: custom(
        lambda y, t: pt.switch(pt.abs(y - t) < 1, -0.5 * (y - t) ** 2, 0.5 - pt.abs(y - t))
    ),
    "hinge": lambda: custom(
        lambda y, m: -pt.maximum(0, 1 - y * m), predictor(), observed=2 * D.binary - 1
    ),
    "quantile": lambda: custom(lambda y, t: -pt.maximum(0.3 * (y - t), 0.7 * (t - y))),
    "clipped residual": lambda: custom(lambda y, t: -0.5 * pt.clip(y - t, -3, 3) ** 2),
    "change point": lambda: custom(
        lambda y, t: pm.logp(pm.Exponential.dist(pt.switch(y < t, 1.0, 2.0)), y)
    ),
    "change of distribution": lambda: custom(
        lambda y, t: pt.switch(
            y < t, pm.logp(pm.Exponential.dist(1.0), y), pm.logp(pm.Gamma.dist(2, 1), y)
        )
    ),
    "censored at a parameter": lambda: custom(
        lambda y, t: pt.switch(
            y >= t, pm.logcdf(pm.Normal.dist(), -t), pm.logp(pm.Normal.dist(), y)
        )
    ),
    "range of a parameter": lambda: custom(
        lambda y, t: pt.switch(t > 0, -0.5 * (y - t) ** 2, -np.inf)
    ),
    "range of the data": lambda: custom(lambda y, t: pt.switch(y > 0, pt.log(t) - t * y, -np.inf)),
    "distribution function": lambda: custom(
        lambda y, t: pm.logcdf(pm.Normal.dist(0.0, t), y), observed=D.real
    ),
    "rounded": lambda: pm.CustomDist(
        "y",
        predictor(),
        dist=lambda m, size: pt.round(pm.Normal.dist(m, 1.0, size=size)),
        observed=np.round(D.real),
    ),
    "mixture with an end": lambda: pm.Mixture(
        "y", w=[0.3, 0.7], comp_dists=[pm.Normal.dist(), pm.Uniform.dist(0, end())], observed=ABOVE
    ),
    "mixture with a shift": lambda: custom(
        lambda y, t: pt.logaddexp(
            pm.logp(pm.Normal.dist(), y), pm.logp(pm.Exponential.dist(1.0), y - t)
        )
    ),
    "folded": lambda: pm.CustomDist(
        "y",
        predictor(),
        dist=lambda m, size: pt.abs(pm.Normal.dist(m, 1.0, size=size)),
        observed=DISTANCE,
    ),
    "mode": lambda: pm.Triangular(
        "y", lower=0.0, c=pm.Beta("theta", 1, 1), upper=1.0, observed=D.fraction
    ),
    "asymmetric laplace": lambda: pm.AsymmetricLaplace(
        "y", kappa=end(), mu=pm.Normal("mu"), b=1.0, observed=D.real
    ),
    "normal plus exponential": lambda: pm.ExGaussian(
        "y", mu=predictor(), sigma=pm.HalfNormal("sigma"), nu=1.0, observed=D.real
    ),
    "wald": lambda: pm.Wald("y", mu=end(), lam=2.0, observed=ABOVE),
    "pareto": lambda: pm.Pareto("y", alpha=end(), m=1.0, observed=ABOVE),
    "angles": lambda: pm.VonMises("y", mu=pm.Normal("mu"), kappa=end(), observed=D.fraction),
    "truncated where the data say": lambda: pm.Truncated(
        "y", pm.Normal.dist(predictor()), lower=DISTANCE, observed=DISTANCE + 1.0
    ),
    "rate that may be negative": lambda: pm.Poisson("y", mu=predictor(), observed=D.count),
    "scale that may be negative": lambda: pm.Normal(
        "y", 0, end() + pm.Normal("b") * D.x, observed=D.real
    ),
    "rate by exposure": lambda: pm.Poisson(
        "y", mu=DISTANCE * pt.exp(predictor()), observed=D.count
    ),
    "scale from another variable": lambda: pm.Normal(
        "y",
        0,
        end() + pm.Normal("b") * pm.Poisson("c", pt.exp(pm.Normal("a")), observed=D.count),
        observed=D.real,
    ),
}


#: Further laws and functions of these kinds.
FURTHER = ["quantile", "change of distribution", "rounded", "mixture with a shift", "folded"]
FURTHER += ["asymmetric laplace", "normal plus exponential", "wald", "angles"]
FURTHER += ["truncated where the data say", "scale from another variable"]


def read(declare: Callable[[], Any]) -> None:
    with pm.Model() as model:
        declare()
    extract(model, check=False)


@pytest.mark.parametrize("what", ENDS)
def test_supports_that_end_at_a_parameter_are_refused(what: str) -> None:
    with pytest.raises(dp.UnsafeModel, match=r"`y` ends at .* on (`a`, )?`theta`: .*Fix"):
        read(ENDS[what])


@pytest.mark.parametrize("what", marked(NO_ENDS, slow=FURTHER))
def test_other_conditions_are_accepted(what: str) -> None:
    read(NO_ENDS[what])


def test_subsampling_refuses_them_in_its_own_words() -> None:
    with pm.Model():
        pm.Uniform("y", 0, end(), observed=ABOVE)
        with pytest.raises(dp.UnsafeModel, match=r"samples of records .*, or use NUTS") as error:
            dp.HMCECS()
    assert "public" not in str(error.value) and "Gibbs" not in str(error.value)


COUNTS: dict[str, Any] = {"draws": 10, "chains": 2}
CALLS: dict[str, Callable[[], Any]] = {
    "dp.sample": lambda: dp.sample(**COUNTS, progressbar=False),
    "DPHMC": lambda: pm.sample(tune=0, **COUNTS, step=dp.DPHMC(**COUNTS)),
    "DPPenalty": lambda: dp.DPPenalty(**COUNTS),
    "DPSGLD": lambda: dp.DPSGLD(**COUNTS),
    "laplace": dp.laplace,
    "find_MAP": dp.find_MAP,
}


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_spent_on_them(call: str) -> None:
    with pm.Model():
        pm.Uniform("y", 0, end(), observed=ABOVE)
        budget = dp.PrivacyBudget(1.0, 1e-6)
        with pytest.raises(dp.UnsafeModel, match=r"support of `y` ends.*`theta`"):
            CALLS[call]()
    assert budget.spent().gdp_mu2 == 0.0


def test_public_supports_may_end_at_a_parameter() -> None:
    """A public likelihood is evaluated exactly, its ends included."""
    with pm.Model() as model:
        pm.Uniform("known", 0, end(), observed=np.linspace(0.1, 0.5, 5))
        pm.Normal("y", pm.Normal("mu"), 1.0, observed=D.real)
    extract(model, public=["known"], check=False)
