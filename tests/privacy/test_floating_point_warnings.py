"""NumPy's floating-point warnings are about values of single records: none may come out."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp

N = 20_011


@pytest.mark.parametrize(
    ("step", "extreme"),
    [
        (dp.DPLangevin, 1e308),
        (dp.DPHMC, 5e-324),
        pytest.param(dp.DPLangevin, 5e-324, marks=pytest.mark.exhaustive),
        pytest.param(dp.DPPenalty, 1e308, marks=pytest.mark.slow),
        pytest.param(dp.DPHMC, 1e308, marks=pytest.mark.exhaustive),
        pytest.param(dp.DPPenalty, 5e-324, marks=pytest.mark.exhaustive),
    ],
)
def test_an_extreme_record_raises_no_warning(step: Any, extreme: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2))
    y = rng.poisson(np.exp(x @ [0.5, -0.5]))
    exposure = np.ones(N)
    exposure[7] = extreme
    x[11] = extreme
    with pm.Model():
        beta = pm.Normal("beta", 0.0, 1.0, shape=2)
        scale = pm.Data("exposure", exposure)
        pm.Poisson("y", scale * pm.math.exp(pm.math.dot(pm.Data("x", x), beta)), observed=y)
        dp.PrivacyBudget(epsilon=8.0, delta=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            made = step(draws=10, tune=0, chains=1, progressbar=False)
            dp.sample(10, tune=0, chains=1, step=made, cores=1, progressbar=False)
