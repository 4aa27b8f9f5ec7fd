"""Likelihood-ratio audits of the samplers, from the records to the transcript, with real noise.

World 0 and world 1 differ in the first record.  All records ask for far more than the clip: the
others, and the first one in world 0, pull down; in world 1 the first one pulls up.  Every answer
then differs between the worlds by its whole sensitivity, and along the log-likelihood ratio a
transcript is exactly N(0, 1) against N(mu, 1).

False alarms.  A bound at confidence 1 - 1e-6 passes the truth with probability 1e-6.  A bound at 95
percent from 1,000 runs reaches nine tenths of epsilon = 10 with probability .978, so all of four
miss it with probability 2.3e-7.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest

from pymc_dp.audit import audit_scores, gaussian_score, runs_needed
from pymc_dp.errors import PrivacyError
from pymc_dp.kernels import hmc, langevin, penalty
from pymc_dp.kernels.langevin import ConstantInterval, CurvatureInterval
from pymc_dp.kernels.penalty import GaussianProposal
from pymc_dp.privacy import answer, noise
from pymc_dp.privacy.account import Account
from pymc_dp.privacy.accounting import mu_from_budget, units_from_mu
from pymc_dp.privacy.answer import Grid, Query, Receipt, VectorSum, clip_interval, vector_bound
from pymc_dp.privacy.chains import Queries
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.privacy.meter import Meter
from pymc_dp.privacy.plan import make_plan
from pymc_dp.privacy.queries import ScoreAt
from tests.privacy.toy import DELTA, FreeMeter, LinearRecords, NormalPrior, make_queries
from tests.selection import marked

pytestmark = [pytest.mark.compiled, pytest.mark.audit]

CERTAIN = 1 - 1e-6
CLIP = {"gradient": 0.7, "log_ratio": 0.4}
STEEP = 1e12  # all a record asks for is beyond its clip
N_RECORDS = 5
DIRECTION = np.array([0.6, 0.8])


def records(world: int) -> LinearRecords:
    sign = np.full(N_RECORDS, -1.0)
    sign[0] = 1.0 if world else -1.0
    return LinearRecords(STEEP * sign[:, None] * DIRECTION)


@dataclass
class Transcript:
    """Passes the questions of a kernel on, and keeps every answer with its two noiseless values."""

    queries: Queries
    values: list = field(default_factory=list)
    center0: list = field(default_factory=list)
    center1: list = field(default_factory=list)
    sigma: list = field(default_factory=list)

    @property
    def gradient_noise_sd(self):
        return self.queries.gradient_noise_sd

    def _vector(self, answer):
        pull = CLIP["gradient"] * DIRECTION
        self.values.extend(answer)
        self.center0.extend(-N_RECORDS * pull)
        self.center1.extend(-(N_RECORDS - 2) * pull)
        self.sigma.extend([self.queries.gradient_noise_sd] * 2)
        return answer

    def _scalar(self, answer, low, high, displacement):
        value, sd = answer
        down, up = (low, high) if DIRECTION @ displacement > 0 else (high, low)
        self.values.append(value)
        self.center0.append(N_RECORDS * down)
        self.center1.append((N_RECORDS - 1) * down + up)
        self.sigma.append(sd)
        return answer

    def gradient(self, z):
        return self._vector(self.queries.gradient(z))

    def log_ratio(self, z_from, z_to):
        c = CLIP["log_ratio"] * float(np.linalg.norm(z_to - z_from))
        return self._scalar(self.queries.log_ratio(z_from, z_to), -c, c, z_to - z_from)

    def path(self, z_start):
        return PathTranscript(self, self.queries.path(z_start), z_start)


class PathTranscript:
    def __init__(self, transcript, path, start):
        self._transcript, self._path, self._start = transcript, path, start

    def gradient(self, z, mid):
        return self._transcript._vector(self._path.gradient(z, mid))

    def energy_error(self, z_end, lower, upper):
        answer = self._path.energy_error(z_end, lower, upper)
        return self._transcript._scalar(answer, lower, upper, z_end - self._start)


@dataclass(frozen=True)
class Sampler:
    """A kernel with settings, as its step method would run it."""

    per_iteration: dict[str, int]
    shares: dict[str, float]
    begin: Callable
    move: Callable
    at_start: dict[str, int] = field(default_factory=dict)


PRIOR = NormalPrior()
SAMPLERS = {
    "DPPenalty": Sampler(
        penalty.releases(),
        {"log_ratio": 1.0},
        lambda rng, z, queries: penalty.initial_state(rng, z, PRIOR),
        lambda rng, state, queries: penalty.transition(
            rng, state, queries, PRIOR, proposal=GaussianProposal(0.5)
        ),
    ),
    "DPHMC": Sampler(
        hmc.releases(2),
        {"gradient": 0.5, "log_ratio": 0.5},
        lambda rng, z, queries: hmc.initial_state(z, PRIOR),
        lambda rng, state, queries: hmc.transition(
            rng, state, queries, PRIOR, step_size=0.2, n_steps=2
        ),
    ),
    "DPHMC reusing gradients": Sampler(
        hmc.releases(2, "leapfrog", True),
        {"gradient": 0.5, "log_ratio": 0.5},
        lambda rng, z, queries: hmc.initial_state(z, PRIOR, release_gradient=queries.gradient),
        lambda rng, state, queries: hmc.transition(
            rng, state, queries, PRIOR, step_size=0.2, n_steps=2
        ),
        hmc.start_releases(True),
    ),
    "DPLangevin": Sampler(
        langevin.releases(1),
        {"gradient": 0.85, "energy_error": 0.15},
        lambda rng, z, queries: langevin.initial_state(rng, z, PRIOR),
        lambda rng, state, queries: langevin.transition(
            rng,
            state,
            queries,
            PRIOR,
            step_size=0.5,
            n_steps=1,
            interval=CurvatureInterval(0.3, log_concave=True),
            friction=1.0,
        ),
    ),
    "DPLangevin with fresh momentum": Sampler(
        langevin.releases(2),
        {"gradient": 0.7, "energy_error": 0.3},
        lambda rng, z, queries: langevin.initial_state(rng, z, PRIOR),
        lambda rng, state, queries: langevin.transition(
            rng,
            state,
            queries,
            PRIOR,
            step_size=0.5,
            n_steps=2,
            interval=ConstantInterval(0.05),
            persistent=False,
        ),
    ),
}
DRAWS = 3


def run(sampler: Sampler, epsilon: float, world: int, runs: int, seed: int) -> Transcript:
    """Transcripts of `runs` chains of a plan that uses the whole budget, one after the other."""
    plan = make_plan(
        "audit",
        draws=DRAWS,
        tune=0,
        chains=1,
        per_iteration=sampler.per_iteration,
        at_start=sampler.at_start,
        available=units_from_mu(mu_from_budget(epsilon, DELTA)),
        shares=sampler.shares,
    )
    multipliers = {name: event.noise_multiplier for name, event in plan.events.items()}
    clip_norms = {name: CLIP[name] for name in CLIP if name in multipliers}
    queries = make_queries(
        records(world), multipliers, clip_norms, per_iteration=sampler.per_iteration
    )
    queries.meter.at_start = [(name, multipliers[name], n) for name, n in sampler.at_start.items()]
    transcript = Transcript(queries)
    rng = np.random.default_rng([seed, world])
    for _ in range(runs):
        queries.begin_chain()
        state = sampler.begin(rng, np.array([0.1, -0.2]), transcript)
        for _ in range(DRAWS):
            assert queries.begin_iteration()
            state, _ = sampler.move(rng, state, transcript)
            left = queries._receipt._left.values()
            assert not any(count for _, count in left)  # everything paid for is asked, always
    return transcript


def scores(sampler: Sampler, epsilon: float, runs: int, seed: int) -> list[np.ndarray]:
    found = []
    for world in (0, 1):
        t = run(sampler, epsilon, world, runs, seed)
        columns = [
            np.reshape(column, (runs, -1)) for column in (t.values, t.center0, t.center1, t.sigma)
        ]
        found.append(gaussian_score(*columns))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_whole_path_spends_its_epsilon_and_no_more(name):
    epsilon, best = 10.0, 0.0
    for attempt in range(4):
        worlds = scores(SAMPLERS[name], epsilon, 1000, attempt)
        for method in ("gaussian", "student") if attempt == 0 else ():
            result = audit_scores(*worlds, DELTA, confidence=CERTAIN, method=method)
            assert not result.refutes(epsilon), method
        best = max(best, audit_scores(*worlds, DELTA).epsilon_lower)
        if best >= 0.9 * epsilon:
            break
    assert best >= 0.9 * epsilon


@pytest.mark.slow
def test_the_mechanism_alone_at_epsilon_one():
    """The computed number of runs reaches .9 epsilon with probability .9: six misses are 1e-6."""
    epsilon, delta, best = 1.0, DELTA, 0.0
    runs = runs_needed(epsilon, delta)
    tau = 1.0 / mu_from_budget(epsilon, delta)
    c = CLIP["log_ratio"]
    for attempt in range(6):
        worlds = []
        for world in (0, 1):
            queries = make_queries(records(world), {"log_ratio": tau}, {"log_ratio": c})
            z = np.zeros(2), DIRECTION
            answers = np.empty(runs)
            for k in range(runs):
                if k % 1000 == 0:
                    queries.begin_iteration()
                answers[k], sd = queries.log_ratio(*z)
            worlds.append((answers + N_RECORDS * c) / sd)
        if attempt == 0:
            assert not audit_scores(*worlds, delta, confidence=CERTAIN).refutes(epsilon)
        best = max(best, audit_scores(*worlds, delta).epsilon_lower)
        if best >= 0.9 * epsilon:
            break
    assert best >= 0.9 * epsilon


# -- planted faults -------------------------------------------------------------------------------


def double_clip(monkeypatch):
    monkeypatch.setattr(answer, "vector_bound", lambda bound, d: vector_bound(2 * bound, d))
    monkeypatch.setattr(
        answer,
        "clip_interval",
        lambda values, units, low, high: clip_interval(
            values, units, np.int64(2 * low), np.int64(2 * high)
        ),
    )


def weak_noise(monkeypatch):
    monkeypatch.setattr(
        answer,
        "rounded_normal",
        lambda size, m: np.rint(0.8 * noise.rounded_normal(size, m)).astype(np.int64),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plant"),
    marked(
        itertools.product(["DPPenalty", "DPHMC", "DPLangevin"], [double_clip, weak_noise]),
        exhaustive=[
            ("DPPenalty", double_clip),
            ("DPLangevin", weak_noise),
            ("DPHMC", double_clip),
            ("DPHMC", weak_noise),
        ],
    ),
)
def test_planted_faults_of_a_release_are_caught(name, plant, monkeypatch):
    """Missed below 1e-10: sigma times .8 is 6.6 standard errors above the bound."""
    plant(monkeypatch)
    worlds = scores(SAMPLERS[name], 10.0, 2000, 0)
    assert audit_scores(*worlds, DELTA, confidence=CERTAIN, method="student").refutes(10.0)


def contrast(first: list[float], second: list[float], sd: float) -> np.ndarray:
    """Score of two chains whose questions have opposite signs: their difference."""
    return (np.array(first) - np.array(second)) / (sd * 2**0.5)


def two_chains(world: int, tau: float, runs: int, between=lambda: None):
    """Answers of two chains that move in opposite directions, and what they are centred at."""
    answers = []
    for z in (DIRECTION, -DIRECTION):
        between()
        queries = make_queries(records(world), {"log_ratio": tau}, {"log_ratio": CLIP["log_ratio"]})
        queries.begin_iteration()
        found = [queries.log_ratio(np.zeros(2), z) for _ in range(runs)]
        answers.append([value for value, _ in found])
    return contrast(*answers, found[0][1])


TWO_CHAINS_TAU = 2**0.5 / mu_from_budget(10.0, DELTA)


def refuted_by_contrast(worlds) -> bool:
    return audit_scores(
        *worlds,
        DELTA,
        confidence=CERTAIN,
        method="clopper_pearson_gdp",
        threshold=np.concatenate(worlds).mean(),
    ).refutes(10.0)


def test_noise_shared_by_chains_is_caught():
    """The noise cancels in the difference, which is then certain; 500 runs bound mu above 4."""
    runs = 500
    honest = [two_chains(world, TWO_CHAINS_TAU, runs) for world in (0, 1)]
    assert not refuted_by_contrast(honest)

    def copy_pool():
        noise._pool = noise.InsecurePool(np.random.SeedSequence(5))

    try:
        shared = [two_chains(world, TWO_CHAINS_TAU, runs, copy_pool) for world in (0, 1)]
    finally:
        noise._pool = noise._secure_pool
    assert refuted_by_contrast(shared)


def forked_answers(world: int, z: np.ndarray, runs: int, in_child: bool) -> list[float]:
    queries = make_queries(
        records(world), {"log_ratio": TWO_CHAINS_TAU}, {"log_ratio": CLIP["log_ratio"]}
    )
    if not in_child:
        queries.begin_iteration()
        return [queries.log_ratio(np.zeros(2), z)[0] for _ in range(runs)]
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(source)
            with os.fdopen(sink, "wb") as file:
                pickle.dump(forked_answers(world, z, runs, False), file)
        finally:
            os._exit(0)
    os.close(sink)
    found = forked_answers(world, -z, runs, False)
    with os.fdopen(source, "rb") as file:
        other = pickle.load(file)
    os.waitpid(child, 0)
    sd = TWO_CHAINS_TAU * 2 * CLIP["log_ratio"]
    return list(contrast(other, found, sd))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_noise_shared_by_a_forked_chain_is_caught(monkeypatch):
    """Parent and child draw at the same time, 50 answers in each of ten forks of a world."""

    def worlds():
        return [
            np.concatenate([forked_answers(w, DIRECTION, 50, True) for _ in range(10)])
            for w in (0, 1)
        ]

    noise.rounded_normal(1, 30)  # there are unused words that a child could inherit
    assert not refuted_by_contrast(worlds())
    monkeypatch.setattr(noise.EntropyPool, "after_fork_in_child", lambda self: None)
    me = os.getpid()
    monkeypatch.setattr(noise.os, "getpid", lambda: me)
    words = np.random.default_rng(0)
    monkeypatch.setattr(noise, "_pool", noise.EntropyPool(words.bytes))
    assert refuted_by_contrast(worlds())


# -- charging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_kernel_that_asks_for_more_than_it_pays_is_stopped(name):
    sampler = SAMPLERS[name]
    for mechanism in sampler.per_iteration:
        fewer = {**sampler.per_iteration, mechanism: sampler.per_iteration[mechanism] - 1}
        engine = records(0)
        queries = make_queries(engine, dict.fromkeys(fewer, 2.0), CLIP, per_iteration=fewer)
        queries._receipt = Receipt((name, 2.0, n) for name, n in sampler.at_start.items())
        rng = np.random.default_rng(0)
        state = sampler.begin(rng, np.zeros(2), queries)
        queries.begin_iteration()
        with pytest.raises(PrivacyError, match=f"A {mechanism} answer was asked for"):
            sampler.move(rng, state, queries)


def refused(queries):
    reads = queries.holder.engine.reads
    with pytest.raises(PrivacyError, match="no charge pays for"):
        queries.gradient(np.zeros(2))
    assert queries.holder.engine.reads == reads


def test_nothing_paid_for_survives_the_next_iteration_a_freeze_a_pickle_or_a_new_chain():
    meter = FreeMeter(left=2)
    queries = make_queries(
        records(0), {"gradient": 1.0}, CLIP, per_iteration={"gradient": 1}, meter=meter
    )
    refused(queries)  # no iteration yet
    assert queries.begin_iteration()
    assert queries.begin_iteration()  # does not add to the one before
    refused(pickle.loads(pickle.dumps(queries)))
    queries.gradient(np.zeros(2))
    refused(queries)
    assert not queries.begin_iteration()  # frozen
    refused(queries)
    meter.left = 1
    assert queries.begin_iteration()
    assert not queries.begin_iteration()  # nor is what was not used left to a frozen one
    refused(queries)
    meter.left = 1
    assert queries.begin_iteration()
    queries.begin_chain()
    refused(queries)
    meter.at_start = [("gradient", 1.0, 1)]
    queries.begin_chain()
    queries.gradient(np.zeros(2))
    refused(queries)
    meter.at_start = []  # the start could not be paid
    queries.begin_chain()
    refused(queries)


def test_a_charge_pays_for_its_noise_alone():
    engine = records(0)
    queries = make_queries(engine, {"gradient": 1.0}, CLIP)
    queries.begin_iteration()
    for multiplier, allowed in ((0.999, False), (1.0, True), (1.5, True)):
        grid = Grid.finest(multiplier, N_RECORDS)
        query = Query("gradient", ScoreAt(np.zeros(2)), VectorSum(grid, "replace_one", 2, 1.0))
        reads = engine.reads
        with nullcontext() if allowed else pytest.raises(PrivacyError, match="no charge pays"):
            answer.answer(query, queries.holder.total, queries._receipt)
        assert (engine.reads > reads) == allowed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_paid_for_nothing():
    queries = make_queries(records(0), {"gradient": 1.0}, CLIP, per_iteration={"gradient": 2})
    assert queries.begin_iteration()
    queries.gradient(np.zeros(2))
    child = os.fork()
    if child == 0:
        try:
            refused(queries)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    queries.gradient(np.zeros(2))


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_ledger_is_charged_before_a_record_is_read(name):
    """Another handle on the file, asked at every look at a record, has seen the charge."""
    sampler = SAMPLERS[name]
    plan = make_plan(
        "audit",
        draws=70,  # more than the first lease of 64
        tune=0,
        chains=1,
        per_iteration=sampler.per_iteration,
        at_start=sampler.at_start,
        available=2**40,
        shares=sampler.shares,
    )
    ledger = Ledger.temporary()
    account = Account.open(
        ledger,
        2**40,
        epsilon=10.0,
        delta=DELTA,
        neighboring="replace_one",
        unit=None,
        public_payload={},
    )
    account.record_plan(plan.plan_id, plan.payload())
    account.begin_run(plan.plan_id, max_runs=1, run_cost=plan.run_cost)
    begun = 0
    looks = 0

    class Watched(LinearRecords):
        def look(self):
            nonlocal looks
            looks += 1
            spent = Account(Ledger(ledger.path), account.number).read().spent
            assert spent >= plan.start_cost + begun * plan.iteration_cost
            assert spent > 0

        def log_likelihood(self, z):
            self.look()
            return super().log_likelihood(z)

        def scores(self, z):
            self.look()
            return super().scores(z)

    paid = plan.answers(plan.per_iteration), plan.answers(plan.at_start)
    meter = Meter(account, plan.plan_id, *paid, plan.iterations)
    queries = Queries(
        Watched(records(0).rows),
        meter,
        plan.events,
        {key: CLIP[key] for key in CLIP if key in plan.events},
        "replace_one",
        N_RECORDS,
    )
    rng = np.random.default_rng(0)
    queries.begin_chain()
    state = sampler.begin(rng, np.zeros(2), queries)
    for _ in range(70):
        assert queries.begin_iteration()
        begun += 1
        state, _ = sampler.move(rng, state, queries)
    assert looks >= 70
    assert not queries.begin_iteration()
    assert account.read().spent == plan.run_cost <= 2**40
