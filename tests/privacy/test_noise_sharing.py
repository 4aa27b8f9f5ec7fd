"""Chains, workers, repeated calls and refits never share privacy noise, whatever `random_seed` is.

The step of these tests has the same public randomness in every chain: momenta, proposals and the
uniforms of accept tests are equal.  Two chains that also shared their noise would make the same
draws; with noise of their own they agree in no state but the start.
"""

from __future__ import annotations

import itertools
import multiprocessing

import numpy as np
import pytest

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.privacy import answer
from pymc_dp.privacy.noise import insecure_noise
from tests.privacy.toy import SETTINGS, logistic_model, sample

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings(
        "ignore:The gradients of this plan:UserWarning",
        "ignore:These data already have a budget:UserWarning",
        "ignore:.*fork.*:DeprecationWarning",
        "ignore:More chains:UserWarning",
        "ignore:Found chain dimension:UserWarning",
    ),
]
DRAWS = 12


def make_step(model, name="DPLangevin", *, chains, runs=1):
    # A class made in a function travels to fresh interpreters by value.
    class SamePublicRandomness(getattr(dp, name)):
        def set_rng(self, rng):
            super().set_rng(np.random.default_rng(0))

    # Tuning moves are never rejected, so every release shows in them.
    return SamePublicRandomness(
        draws=1, tune=DRAWS, chains=chains, runs=runs, model=model, **SETTINGS[name]
    )


def histories(model, step, **kwargs):
    """The states of every chain after its start, tuning included."""
    idata = sample(model, step, random_seed=1, discard_tuned_samples=False, **kwargs)
    warm = _compat.group(idata, "warmup_posterior")
    return [list(map(tuple, np.stack([warm["a"][c], warm["b"][c]], axis=-1))) for c in warm.chain]


def shared_states(chains):
    """States that two chains have in common."""
    return [set(left) & set(right) for left, right in itertools.combinations(chains, 2)]


def assert_unshared(chains):
    for chain in chains:
        assert len(set(chain)) == DRAWS  # the chain moved with every release
    assert not any(shared_states(chains))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPLangevin", "DPHMC"])
def test_chains_and_repeated_calls_in_one_process(name):
    model = logistic_model()
    step = make_step(model, name, chains=2, runs=2)
    first = histories(model, step)
    assert_unshared(first + histories(model, step))


@pytest.mark.slow
def test_refits_of_the_same_data_with_the_same_seed():
    chains = []
    for _ in range(2):
        model = logistic_model(data_seed=3)
        chains += histories(model, make_step(model, chains=1))
    assert_unshared(chains)


@pytest.mark.slow
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_chains_in_workers(method):
    model = logistic_model()
    step = make_step(model, chains=2, runs=2 if method == "fork" else 1)
    chains = histories(model, step, cores=2, mp_ctx=method)
    if method == "fork":  # and between one pair of workers and the next
        chains += histories(model, step, cores=2, mp_ctx=method)
    assert_unshared(chains)


@pytest.mark.slow
def test_shared_noise_would_be_seen(monkeypatch):
    """Planted: all chains draw the same noise."""
    model = logistic_model()
    step = make_step(model, chains=2)
    draws = itertools.cycle(range(1, 3 * DRAWS))
    begin = type(step.queries).begin_chain

    def restart(queries):
        nonlocal draws
        draws = itertools.count(1)
        begin(queries)

    monkeypatch.setattr(type(step.queries), "begin_chain", restart)
    monkeypatch.setattr(
        answer,
        "rounded_normal",
        lambda size, m: np.full(size, next(draws) * 2**m // 7, np.int64),
    )
    [shared] = shared_states(histories(model, step))
    assert len(shared) == DRAWS


@pytest.mark.slow
def test_insecure_noise_repeats_itself_and_says_so():
    chains, marks = [], []
    for _ in range(2):
        model = logistic_model(data_seed=4)
        with insecure_noise(9):
            step = make_step(model, chains=1)
            chains += histories(model, step)
        marks.append(step.plan.plan_id)
        plan = step.budget.account.plan(step.plan.plan_id)
        assert plan["settings"]["secure"] is False
    assert len(shared_states(chains)[0]) == DRAWS
    assert marks[0] != marks[1]
