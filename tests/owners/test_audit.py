"""One owner audited by itself: what its server says to a hostile analyst, in two worlds.

All records ask for far more than the clip, and one of them pulls up in world 1 and down in world
0: every answer then differs between the worlds by its whole sensitivity.  The analyst asks for all
that was agreed, at the points that tell most, and asks everything twice.  Each chain of the plan is
one run; `tests.privacy.test_mechanism_audit` says how seldom a bound is missed by chance.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.audit import audit_scores, gaussian_score
from pymc_dp.owners.teller import Teller
from pymc_dp.privacy import noise
from pymc_dp.privacy.accounting import mu_from_budget
from tests.owners.common import call, plan_message

pytestmark = [pytest.mark.compiled, pytest.mark.audit, pytest.mark.slow]

DELTA, EPSILON, RUNS, DRAWS = 1e-6, 10.0, 1000, 1
N, CLIP, HALF = 5, 0.7, 0.5
DIRECTION = np.array([0.6, 0.8])
COUNTS = {"gradient": 2, "energy_error": 1}
#: Of every answer, so that those of a chain spend EPSILON.
MULTIPLIER = math.sqrt(DRAWS * sum(COUNTS.values())) / mu_from_budget(EPSILON, DELTA)
_plans = itertools.count(1)


def owner(world: int) -> Teller:
    y = np.zeros(N, dtype=int)
    y[0] = world
    with pm.Model() as model:
        b = pm.Normal("b", 0.0, 2.0, shape=2)
        pm.Bernoulli("y", logit_p=pm.Data("x", np.tile(1e6 * DIRECTION, (N, 1))) @ b, observed=y)
        dp.PrivacyBudget(5000.0, DELTA)
    return Teller(model)


def found(teller: Teller, method: str, message: Any) -> Any:
    reply = call(teller, method, message)
    assert "error" not in reply, reply
    return reply["found"]


def agree(teller: Teller) -> int:
    plan = plan_message(
        plan=next(_plans),
        draws=DRAWS,
        chains=RUNS,
        per_iteration=COUNTS,
        noise_multipliers=dict.fromkeys(COUNTS, MULTIPLIER),
        clip_norms={"gradient": CLIP},
    )
    assert found(teller, "agree", plan) == {}
    return plan["plan"]


def reals(*values: float) -> dict[str, Any]:
    return {"is": "reals", "shape": [len(values)], "values": list(values)}


def questions() -> list[dict[str, Any]]:
    """Those of a draw: two kicks where scores are long, and an energy error across a cliff."""
    zero, end = reals(0.0, 0.0), reals(0.6e-3, 0.8e-3)
    kick = {
        "mechanism": "gradient",
        "of": {"is": "Kick", "at": zero, "midpoint": zero},
        "sum": {"is": "VectorSum", "norm": CLIP},
    }
    error = {
        "mechanism": "energy_error",
        "of": {"is": "EnergyError", "kicks": 2, "start": zero, "end": end},
        "sum": {"is": "IntervalSum", "lower": -HALF, "upper": HALF},
    }
    return [kick, kick, error]


def transcripts(teller: Teller) -> np.ndarray:
    """(RUNS, answers of a chain), along the direction in which the worlds differ."""
    plan_id, values = agree(teller), []
    for chain in range(RUNS):
        for number in range(DRAWS * 3):
            query = questions()[number % 3]
            query["of"] = {**query["of"], "path": number // 3}
            question = {"chain": chain, "number": number, "query": query}
            asked = {"plan": plan_id, "questions": [question]}
            [first], [again] = (found(teller, "ask", asked)["answers"] for _ in range(2))
            assert first == again
            answer = np.array(first["answer"])
            values.append(float(answer @ DIRECTION if len(answer) == 2 else answer[0]))
    return np.reshape(values, (RUNS, -1))


def scores() -> list[np.ndarray]:
    sizes = np.tile([CLIP, CLIP, HALF], DRAWS)
    sd = 2.0 * MULTIPLIER * sizes
    centres = -N * sizes, -(N - 2) * sizes
    return [gaussian_score(transcripts(owner(world)), *centres, sd) for world in (0, 1)]


def test_an_owner_alone_spends_its_epsilon_and_no_more() -> None:
    best = 0.0
    for attempt in range(4):
        worlds = scores()
        for method in ("gaussian", "student") if attempt == 0 else ():
            result = audit_scores(*worlds, DELTA, confidence=1 - 1e-6, method=method)
            assert not result.refutes(EPSILON), method
        best = max(best, audit_scores(*worlds, DELTA).epsilon_lower)
        if best >= 0.9 * EPSILON:
            break
    assert best >= 0.9 * EPSILON


def test_an_owner_that_leaves_noise_to_the_others_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the noise of three owners together were to hide the records of one."""
    monkeypatch.setattr(
        "pymc_dp.privacy.answer.rounded_normal",
        lambda size, m: np.rint(noise.rounded_normal(size, m) / 3**0.5).astype(np.int64),
    )
    worlds = scores()
    assert audit_scores(*worlds, DELTA, confidence=1 - 1e-6, method="student").refutes(EPSILON)
