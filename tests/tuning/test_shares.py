"""What the quadratic form asks for, of made-up scores and curvatures: never more than is left."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pymc_dp.base.matrices import Coordinates
from pymc_dp.tuning.forms import Form
from pymc_dp.tuning.quadratic import Quadratic
from pymc_dp.tuning.releases import Clipping, CurvatureNoise, Lost, ScoreNoise
from tests.selection import marked


class MadeUp:
    """A budget whose releases are the score and curvature of a likelihood that flattens far from
    its mode, with noise; `tails` are the clip norms of curvatures, or what noise looks like."""

    def __init__(self, rng: np.random.Generator, d: int, noise: float, away: float) -> None:
        self.rng, self.d, self.labels = rng, d, []
        self.n = int(10.0 ** rng.uniform(2.3, 4.0))
        self.bound = 3.5 * math.sqrt(d / self.n)
        self.total = (2.0 * self.bound / noise) ** 2
        self.spent = float(rng.uniform(0.15, 0.55))
        self.mode = away * (1.0 + noise) * rng.normal(size=d)
        self.flattens = 10.0 ** rng.uniform(-3.0, 0.0)
        self.tails = float(rng.uniform(1.0, 6.0)) * d / self.n
        self.structure = SimpleNamespace(effects=lambda location: ([], np.eye(d)))

    def _ask(self, label: str, share: float) -> None:
        assert label not in self.labels, "resumed preparations tell releases by their labels"
        assert 0.0 < share <= 1.0 - self.spent + 1e-12, label
        self.labels.append(label)
        self.spent += share

    def score(self, label: str, spec: Any, bound: float, share: float) -> Any:
        self._ask(label, share)
        at, sd = spec.coordinates, 2.0 * bound / math.sqrt(share * self.total)
        away = self.mode - at.location
        score = away / np.sqrt(1.0 + self.flattens * away**2)
        noise = ScoreNoise(sd, np.ones(self.d, dtype=bool))
        return at.scaling.T @ score + sd * self.rng.normal(size=self.d), noise

    def tail(self, label: str, spec: Any, tail: float, share: float) -> float:
        self._ask(label, share)
        noise = 1e18 if self.rng.random() < 0.05 else 1.0
        return noise * self.tails * math.exp(0.2 * self.rng.normal())

    def curvature(self, label: str, spec: Any, clip_norm: float, share: float) -> Any:
        self._ask(label, share)
        at, sd = spec.coordinates, 2.0 * clip_norm / math.sqrt(share * self.total)
        curvature = np.diag((1.0 + self.flattens * (self.mode - at.location) ** 2) ** -1.5)
        released = at.scaling.T @ curvature @ at.scaling
        pairs = np.eye(self.d, dtype=bool) if spec.diagonal else np.ones((self.d, self.d), bool)
        return released + spec.matrix(sd * self.rng.normal(size=spec.size)), CurvatureNoise.of(
            sd, pairs
        )

    def lost(self, *asked: Any) -> Lost:
        return Lost(np.zeros((self.d, self.d)), np.zeros((self.d, self.d)))


@pytest.mark.parametrize("away", marked([1.0, 15.0], slow=[1.0]))
def test_no_release_asks_for_more_than_is_left(away):
    """Also where the search ended far from the mode, and each look at the curvature is dear."""
    rng, again = np.random.default_rng(1), 0
    for _ in range(2500):
        d = int(rng.integers(1, 8))
        budget = MadeUp(rng, d, 10.0 ** rng.uniform(-0.7, 0.5), away * rng.uniform())
        width = float(rng.uniform(2.0, 10.0))
        public = SimpleNamespace(
            unseen=np.array([], dtype=int),
            gradient=lambda theta, width=width: -theta / width**2,
            settled=lambda location, precision: location,
            score=lambda at, width=width: -at.scaling.T @ at.location / width**2,
        )
        nothing = np.zeros((d, d))
        blank = Form(
            clip=Coordinates(np.zeros(d), np.eye(d)),
            basis=np.eye(d),
            score=np.zeros(d),
            covariance=nothing,
            curvature=nothing,
            clipping=Clipping(budget.bound),
            step_size=0.4,
            n_steps=4,
        )
        searched = 2.0 * (1.0 + (budget.bound**2 * 4.0 / budget.total)) * np.eye(d)
        found = Quadratic.prepare(blank, budget, public, 0.8 * np.eye(d), searched)
        again += "curvature at last" in budget.labels
        assert found is None or budget.spent == pytest.approx(1.0)
    assert again > 5
