"""Events and the noise that a plan gets out of a budget."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError
from fractions import Fraction

import numpy as np
import pytest

from pymc_dp.privacy.accounting import (
    MU2_UNIT,
    GaussianEvent,
    calibrate,
    mu_from_budget,
    smallest_noise_multiplier,
    units_from_mu,
)
from pymc_dp.privacy.plan import make_plan


def test_cost_is_the_exact_ceiling():
    assert GaussianEvent("gradient", 1.0).cost == MU2_UNIT
    assert GaussianEvent("gradient", 2.0**20).cost == 1
    assert GaussianEvent("gradient", 1e300).cost == 1
    assert GaussianEvent("gradient", math.nextafter(2.0**20, 0)).cost == 2
    rng = np.random.default_rng(2)
    for tau in rng.uniform(0.01, 1e4, 200):
        cost = GaussianEvent("gradient", float(tau)).cost
        exact = MU2_UNIT / Fraction(float(tau)) ** 2
        assert exact <= cost < exact + 1


def test_event_is_frozen_and_serialisable():
    event = GaussianEvent("gradient", np.float64(0.1) * 3)
    with pytest.raises(FrozenInstanceError):
        event.noise_multiplier = 1e9
    assert GaussianEvent.from_dict(json.loads(json.dumps(event.to_dict()))) == event
    assert pickle.loads(pickle.dumps(event)) == event
    assert hash(event) == hash(GaussianEvent("gradient", event.noise_multiplier))


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), True, "1", None])
def test_event_refuses_bad_noise(bad):
    with pytest.raises(ValueError, match="noise_multiplier"):
        GaussianEvent("gradient", bad)


@pytest.mark.parametrize("bad", ["", None, 3])
def test_event_refuses_bad_mechanism(bad):
    with pytest.raises(ValueError, match="mechanism"):
        GaussianEvent(bad, 1.0)


@pytest.mark.parametrize("bad", [{}, {"event": "laplace"}, {"event": "gaussian"}])
def test_event_refuses_foreign_dictionaries(bad):
    with pytest.raises(ValueError, match="gaussian event"):
        GaussianEvent.from_dict(bad)


def test_smallest_noise_multiplier():
    rng = np.random.default_rng(3)
    for cost in [1, 2, 3, MU2_UNIT, MU2_UNIT + 1, 2**70, *map(int, rng.integers(1, 2**45, 300))]:
        tau = smallest_noise_multiplier(cost)
        assert GaussianEvent("x", tau).cost <= cost
        assert GaussianEvent("x", math.nextafter(tau, 0)).cost > cost


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "1", None])
def test_smallest_noise_multiplier_refuses(bad):
    with pytest.raises(ValueError, match="cost"):
        smallest_noise_multiplier(bad)


def test_calibrate_never_exceeds_the_total():
    rng = np.random.default_rng(4)
    for _ in range(300):
        names = [f"m{k}" for k in range(rng.integers(1, 6))]
        counts = {name: int(rng.integers(1, 5000)) for name in names}
        shares = {name: float(rng.exponential() + 1e-3) for name in names}
        total = int(rng.integers(2**27, 2**46))
        events = calibrate(total, counts, shares)
        assert list(events) == names
        used = {name: counts[name] * events[name].cost for name in names}
        assert sum(used.values()) <= total
        # Whole units per release are all that rounding may leave unspent; one more unit of
        # slack covers floats of τ that are coarser than a unit of cost.
        whole = sum(shares.values())
        for name in names:
            assert events[name].mechanism == name
            allowed = total * shares[name] / whole
            assert used[name] > allowed - counts[name] - 1e-9 * allowed


def test_calibrate_uses_a_real_budget():
    total = units_from_mu(mu_from_budget(1.0, 1e-6))
    events = calibrate(total, {"gradient": 4000, "energy": 500}, {"gradient": 0.9, "energy": 0.1})
    spent = 4000 * events["gradient"].cost + 500 * events["energy"].cost
    assert total * (1 - 1e-5) < spent <= total


@pytest.mark.parametrize("scale", [1, 1e-200, 1e200])
def test_shares_are_relative(scale):
    one = calibrate(10**9, {"a": 3, "b": 5}, {"a": 1, "b": 3})
    assert calibrate(10**9, {"a": 3, "b": 5}, {"a": 1 * scale, "b": 3 * scale})["b"].cost == (
        pytest.approx(one["b"].cost, rel=1e-9)
    )


def test_too_small_a_budget_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"fewer draws.*larger epsilon"):
        calibrate(100, {"gradient": 101}, {"gradient": 1.0})
    assert calibrate(100, {"gradient": 100}, {"gradient": 1.0})["gradient"].cost == 1


@pytest.mark.parametrize(
    ("total", "counts", "shares", "match"),
    [
        (0, {"a": 1}, {"a": 1}, "total"),
        (-5, {"a": 1}, {"a": 1}, "total"),
        (1.5, {"a": 1}, {"a": 1}, "total"),
        (True, {"a": 1}, {"a": 1}, "total"),
        (10, {}, {}, "counts"),
        (10, {"a": 0}, {"a": 1}, "counts"),
        (10, {"a": 1.0}, {"a": 1}, "counts"),
        (10, {"a": 1}, {"b": 1}, "same mechanisms"),
        (10, {"a": 1}, {"a": 1, "b": 1}, "same mechanisms"),
        (10, {"a": 1}, {"a": 0.0}, "shares"),
        (10, {"a": 1}, {"a": -1.0}, "shares"),
        (10, {"a": 1}, {"a": float("nan")}, "shares"),
        (10, {"a": 1}, {"a": float("inf")}, "shares"),
        (10, {"a": 1}, {"a": "1"}, "shares"),
        (10, {"a": 1}, {"a": True}, "shares"),
    ],
)
def test_calibrate_refuses(total, counts, shares, match):
    with pytest.raises(ValueError, match=match):
        calibrate(total, counts, shares)


def test_a_plan_pays_for_all_of_its_runs_chains_and_starts():
    """Counted by hand: 3 runs of 2 chains, each with a start and 3 + 2 iterations."""
    available = 10**9
    plan = make_plan(
        "sampler",
        draws=3,
        tune=2,
        chains=2,
        runs=3,
        per_iteration={"gradient": 2, "log_ratio": 1},
        at_start={"gradient": 1},
        available=available,
        shares={"gradient": 0.7, "log_ratio": 0.3},
    )
    gradient, ratio = plan.events["gradient"].cost, plan.events["log_ratio"].cost
    assert plan.releases("gradient") == 3 * 2 * (1 + 5 * 2)
    assert plan.releases("log_ratio") == 3 * 2 * 5
    assert plan.iteration_cost == 2 * gradient + ratio
    assert plan.start_cost == gradient
    assert plan.run_cost == 2 * (gradient + 5 * (2 * gradient + ratio))
    assert 0.999 * available < 3 * plan.run_cost <= available
