"""Three unequal owners of a logistic regression, and messages of an analyst to one of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.owners.analyst import Study
from pymc_dp.owners.messages import unpacked
from pymc_dp.owners.teller import Teller

#: Of the modules of this folder: they compile, and what these warnings say does not matter here.
MARKS = [
    pytest.mark.compiled,
    *(
        pytest.mark.filterwarnings(f"ignore:{words}")
        for words in ("The gradients of this plan", "These data already", "Only 0.0%")
    ),
]
SIZES, EPSILONS = (300, 200, 100), (2.0, 1.0, 4.0)
TRUTH = np.array([0.8, -0.5])


def data(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    return x, (rng.random(n) < 1.0 / (1.0 + np.exp(-x @ TRUTH))).astype(int)


def logistic(n: int, seed: int, prior: float = 2.0, name: str = "b") -> pm.Model:
    x, y = data(n, seed)
    with pm.Model() as model:
        b = pm.Normal(name, 0.0, prior, shape=2)
        pm.Bernoulli("y", logit_p=pm.Data("x", x) @ b, observed=y)
    return model


def owner(k: int, **budget: Any) -> pm.Model:
    model = logistic(SIZES[k], k + 1)
    with model:
        dp.PrivacyBudget(EPSILONS[k], 1e-6, dataset=f"hospital {k + 1}", **budget)
    return model


def analyst(models: list[pm.Model]) -> tuple[pm.Model, Study]:
    model = logistic(40, 99)
    with model:
        found = dp.Owners(models)._study
    return model, found


def by_hand(model: pm.Model, kind: str = "DPLangevin", draws: int = 10, chains: int = 2) -> Any:
    settings: dict[str, Any] = {"scaling": 0.3, "progressbar": False, "model": model}
    if kind == "DPLangevin":
        settings |= {"clip_norm": 1.0, "step_size": 0.2, "n_steps": 2, "energy_clip": 0.5}
    elif kind == "DPHMC":
        settings |= {"clip_norm": 1.0, "step_size": 0.2, "n_steps": 2}
    else:
        settings |= {"clip_norm": 1.0, "step_size": 0.5}
    return getattr(dp, kind)(draws=draws, chains=chains, **settings)


# -- messages -------------------------------------------------------------------------------------


def kick(z: float = 0.1, norm: float = 1.0, path: int = 0, **changes: Any) -> dict[str, Any]:
    """A question about a kick, as a message."""
    at = {"is": "reals", "shape": [2], "values": [z, z]}
    of = {"is": "Kick", "path": path, "at": at, "midpoint": at, **changes}
    return {"mechanism": "gradient", "of": of, "sum": {"is": "VectorSum", "norm": norm}}


def energy(lower: float, upper: float, kicks: int = 2) -> dict[str, Any]:
    at = {"is": "reals", "shape": [2], "values": [0.1, 0.1]}
    of = {"is": "EnergyError", "path": 0, "kicks": kicks, "start": at, "end": at}
    return {
        "mechanism": "energy_error",
        "of": of,
        "sum": {"is": "IntervalSum", "lower": lower, "upper": upper},
    }


def plan_message(**changes: Any) -> dict[str, Any]:
    at = {
        "is": "Coordinates",
        "location": {"is": "reals", "shape": [2], "values": [0.0, 0.0]},
        "scaling": {"is": "reals", "shape": [2, 2], "values": [1.0, 0.0, 0.0, 1.0]},
    }
    return {
        "plan": 12,
        "kind": "chains",
        "sampler": "DPHMC",
        "draws": 5,
        "tune": 0,
        "chains": 1,
        "per_iteration": {"gradient": 1},
        "at_start": {},
        "noise_multipliers": {"gradient": 50.0},
        "clip_norms": {"gradient": 1.0},
        "engine": {"predictor": True, "effects": False, "tilted": False, "at": at},
        **changes,
    }


def call(teller: Teller, method: str, message: Any) -> dict[str, Any]:
    return unpacked(teller.handle(method, json.dumps(message).encode()))


def ask(teller: Teller, plan_id: int, *questions: Any) -> dict[str, Any]:
    reply = call(teller, "ask", {"plan": plan_id, "questions": list(questions)})
    return {"error": reply["error"]} if "error" in reply else reply["found"]["answers"][0]
