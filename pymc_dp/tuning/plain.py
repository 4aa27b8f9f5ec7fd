"""The plain form: every kick pays for the whole score."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pymc_dp.tuning.paths import LOOK, accept_tests, can_pay, energy_clip
from pymc_dp.tuning.prepared import WORTH, Prepared, Shares

#: Kicks of a path; more kicks are shorter. In large budgets the noise in the log ratio of one long
#: step may reject nearly all of them, but is small for short ones.
_KICKS = (1, 2, 4, 8)
#: That noise is to be 1 / `_QUIET`, if a part of the budget between `_TESTS` pays for it. Above
#: `_LOUD` it is too much.
_QUIET, _LOUD = 3.0, 1.0
_TESTS = (0.02, 0.3)


def plain(
    blank: Prepared,
    budget: Shares,
    paths: int,
    sensitivity: float,
    step_size: float | None,
    n_steps: int | None,
    rng: np.random.Generator,
) -> Prepared:
    """Every kick pays for the whole score: the form for posteriors far from normal."""
    total, bound = budget.total, blank.clipping.bound
    norm = sensitivity * bound * float(np.linalg.norm(blank.basis, 2))
    tried: list[tuple[float, Prepared]] = []
    for kicks in (n_steps or 1,) if n_steps or step_size else _KICKS:
        left = 1.0 - budget.spent - LOOK
        if tried and not can_pay(kicks * paths, left * total):
            break
        noise = norm * math.sqrt(paths * kicks / (0.85 * left * total))
        prepared = replace(
            blank,
            form="plain",
            n_steps=kicks,
            persistent=kicks == 1,
            friction=1.0,
            step_size=step_size or min(0.5 / kicks, 2.0 / noise),
        )
        error = energy_clip(prepared, budget, noise, 2.0 * bound, rng)
        unit = _QUIET * sensitivity * math.sqrt(paths / (left * total))
        error, tests = accept_tests(error, unit, *_TESTS)
        loud = unit * error / (_QUIET * math.sqrt(tests))  # the noise that is left
        prepared = replace(
            prepared,
            clip_norms={"gradient": bound, "energy_error": error},
            shares={"gradient": 1.0 - tests, "energy_error": tests},
            effective_draws=WORTH * (1.0 - tests) * left * total / norm**2,
        )
        tried.append((loud, prepared))
        if loud < _LOUD:
            break
    return min(tried, key=lambda attempt: attempt[0])[1]
