"""The plain form: every kick pays for the whole score."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pymc_dp.warmup.paths import LOOK, energy_clip
from pymc_dp.warmup.prepared import WORTH, Prepared, Shares

__all__ = ["plain"]


def plain(
    blank: Prepared,
    budget: Shares,
    bound: float,
    paths: int,
    sensitivity: float,
    step_size: float | None,
    n_steps: int | None,
    rng: np.random.Generator,
) -> Prepared:
    """Every kick pays for the whole score: the form for posteriors far from normal."""
    total = budget.total
    left = 1.0 - budget.spent - LOOK
    stretch = float(np.linalg.norm(blank.basis, 2))
    kicks = n_steps or 1
    noise = sensitivity * bound * stretch * math.sqrt(paths * kicks / (0.85 * left * total))
    prepared = replace(
        blank,
        form="plain",
        n_steps=kicks,
        persistent=kicks == 1,
        friction=1.0,
        step_size=step_size or min(0.5, 2.0 / noise),
    )
    error = energy_clip(prepared, budget, noise, 2.0 * bound, rng)
    tests = (3.0 * sensitivity * error) ** 2 * paths / (left * total)  # noise of 1/3
    tests = min(max(tests, 0.02), 0.3)
    return replace(
        prepared,
        clip_norms={"gradient": bound, "energy_error": error},
        shares={"gradient": 1.0 - tests, "energy_error": tests},
        effective_draws=WORTH * (1.0 - tests) * left * total / (sensitivity * bound * stretch) ** 2,
    )
