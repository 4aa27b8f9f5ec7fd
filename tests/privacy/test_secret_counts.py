"""Where the number of rows is secret, nothing that is decided from the graph depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_dp.records import extract
from pymc_dp.rows.engine import Coordinates
from pymc_dp.rows.predictor import recognise
from pymc_dp.steps.effects import effects_of

GROUPS, USERS = 40, 30


def noncentred(group: Any, y: np.ndarray) -> None:
    mu = pm.Normal("mu", 0.0, 1.0)
    tau = pm.HalfNormal("tau", 1.0)
    z = pm.Normal("z", 0.0, 1.0, shape=GROUPS)
    pm.Normal("y", (mu + tau * z)[group], 1.0, observed=y)


def transformed(group: Any, y: np.ndarray) -> None:
    a = pm.Normal("a", 0.0, 1.0, shape=GROUPS)
    pm.Poisson("y", pt.exp(a)[group], observed=np.abs(y).round().astype(int))


def constant_labels(group: Any, y: np.ndarray) -> None:
    a = pm.Normal("a", 0.0, 1.0, shape=GROUPS)
    b = pm.Normal("b", 0.0, 1.0)
    pm.Bernoulli("y", logit_p=b * a[group], observed=(y > 0).astype(int))


@pytest.mark.parametrize("data", [False, True], ids=["numpy", "data"])
@pytest.mark.parametrize("declare", [noncentred, transformed, constant_labels])
def test_form_of_the_likelihood(declare: Any, data: bool) -> None:
    """One user with 5, 9 or 50 rows more, below and above the number of groups."""
    found = []
    for more in (5, 9, 11, 50):
        rng = np.random.default_rng(0)
        unit = np.r_[np.arange(USERS), np.zeros(more, dtype=int)]
        group = np.r_[rng.integers(0, GROUPS, USERS), np.zeros(more, dtype=int)]
        y = np.r_[rng.normal(size=USERS), np.zeros(more)]
        with pm.Model() as model:
            declare(pm.Data("group", group) if data else group, y)
        records = extract(model, privacy_unit=unit, check=False)
        d = records.parameters.size
        engine = records.engine(Coordinates(np.zeros(d), np.eye(d)))
        drawn = np.random.default_rng(1).normal(0.0, 0.7, (50, d))
        effects = effects_of(records, engine, drawn, None)
        graph = records.groups[0].graph
        found.append(
            (
                [(cut.kind, cut.phi.type.ndim) for cut in graph.cuts],
                [jacobian is None for jacobian in engine.groups[0].functions.constant_jacobians],
                None if effects is None else effects.engine.d,
                recognise(engine)[1],
            )
        )
    assert all(one == found[0] for one in found)
