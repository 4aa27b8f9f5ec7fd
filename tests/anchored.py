"""Results of anchored runs, made by hand: draws as of sampling, and a plan in the ledger."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.publication.results import constrain
from pymc_dp.records.extraction import extract
from pymc_dp.tuning.releases import Clipping

N = 60
RNG = np.random.default_rng(12)
X = RNG.normal(size=(N, 2))
Y = RNG.normal(size=N)
CHAINS, DRAWS = 2, 400


def budgeted(declare: Any, **options: Any) -> tuple[pm.Model, dp.PrivacyBudget]:
    with pm.Model(coords={"effect": ["one", "two"]}) as model:
        declare()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            budget = dp.PrivacyBudget(epsilon=2.0, delta=1e-3, model=model, **options)
    return model, budget


def transformed() -> None:
    """A log, an interval whose bound is another parameter, and a vector."""
    beta = pm.Normal("beta", 0.0, 1.0, dims="effect")
    sigma = pm.HalfNormal("sigma", 1.0)
    lower = pm.Normal("lower", -1.0, 0.5)
    middle = pm.Uniform("middle", lower, lower + 3.0)
    pm.Deterministic("spread", pt.exp(beta).sum() * sigma)
    pm.Deterministic("scaled", 2.0 * sigma)
    pm.Normal("y", pt.as_tensor_variable(X) @ beta + middle, sigma, observed=Y)


def linear() -> None:
    """Everything Gaussian, with one informative prior and one that says little."""
    beta = pm.Normal("beta", [1.0, -2.0], [0.2, 2.0], dims="effect")
    pm.Normal("y", pt.as_tensor_variable(X) @ beta, 1.0, observed=Y)


def flat() -> None:
    beta = pm.Normal("beta", 0.0, 10.0, dims="effect")
    pm.Normal("y", pt.as_tensor_variable(X) @ beta, 1.0, observed=Y)


def anchored_result(
    model: pm.Model,
    budget: dp.PrivacyBudget,
    theta: np.ndarray,
    settings: Mapping[str, Any],
    *,
    plan_id: int = 7,
    frozen: int = 0,
    keep: tuple[str, ...] | None = None,
    newton: np.ndarray | None = None,
) -> Any:
    """What sampling with an anchored step would give, and its plan in the ledger."""
    budget.account.record_plan(
        plan_id,
        {
            "sampler": "DPLangevin",
            "draws": theta.shape[1],
            "tune": 0,
            "chains": theta.shape[0],
            "runs": 1,
            "per_iteration": {"gradient": 1},
            "at_start": {},
            "events": {},
            "settings": {"secure": True, "clip_norm": {"anchor": 1.5}, **settings},
        },
    )
    parameters = extract(model, public=budget.public, check=False).parameters
    names = [rv.name for rv in (*model.free_RVs, *model.deterministics)]
    values = constrain(model, parameters, theta, names)
    dims = {name: model.named_vars_to_dims.get(name) for name in names}
    posterior = xr.Dataset(
        {
            name: (
                ("chain", "draw", *(dims[name] or [f"{name}_dim_{k}" for k in range(v.ndim - 2)])),
                v,
            )
            for name, v in values.items()
        },
        coords={"effect": list(model.coords["effect"])},
    )
    shape = theta.shape[:2]
    is_frozen = np.broadcast_to(np.arange(shape[1]) >= shape[1] - frozen, shape)
    stats = {
        "dp_plan_id": np.full(shape, plan_id),
        "dp_epsilon": np.full(shape, 2.0),
        "dp_accepted": np.ones(shape, dtype=bool),
        "dp_frozen": is_frozen,
    }
    sample_stats = xr.Dataset({k: (("chain", "draw"), v) for k, v in stats.items()})
    if newton is not None:
        sample_stats["dp_newton"] = (("chain", "draw", "dp_newton_dim_0"), newton)
    groups = {
        "posterior": posterior[list(keep or names)],
        "sample_stats": sample_stats,
        "observed_data": xr.Dataset({"y": ("rows", Y)}),
    }
    return _compat.inference_data(groups, {})


def facts(result: Any) -> dict[str, Any]:
    return json.loads(_compat.attributes(result)["pymc_dp_statement"])


def coordinates(d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=d), 0.3 * rng.normal(size=(d, d)) + np.eye(d)


def settings_of(
    location: np.ndarray, scaling: np.ndarray, noise: np.ndarray, **others: Any
) -> dict[str, Any]:
    inner = 1.4 if others.get("clipping") == "consistent" else None
    return {
        "location": location.tolist(),
        "scaling": scaling.tolist(),
        "anchor": {
            "score": [0.0] * len(location),
            "covariance": noise.tolist(),
            "pairs": np.ones_like(noise, dtype=int).tolist(),
            "clipped": Clipping(1.5, inner, (0.01, 0.002)).sentence,
        },
        **others,
    }
