"""Audits of the Gaussian mechanism: tight where it is right, loud where a fault is planted.

The mechanism is the one of the package in miniature: an integer sum of clipped records plus
`rounded_normal`. Its noise comes from the operating system, so each test states how often it fails
although nothing is wrong.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from pymc_dp.audit import (
    AuditResult,
    audit_scores,
    gaussian_score,
    gaussian_separation,
    runs_needed,
    t_bound,
)
from pymc_dp.privacy.accounting import epsilon_from_mu, mu_from_budget
from pymc_dp.privacy.noise import insecure_noise, rounded_normal

pytestmark = pytest.mark.audit

DELTA = 1e-6
LOG2_SIGMA = 30
N_RECORDS = 1000
CERTAIN = 1 - 1e-6
METHODS = ("gaussian", "student", "clopper_pearson_gdp", "clopper_pearson")


class ClippedSum:
    """Transcripts of a sum of records clipped to [-C, C], released several times in each run.

    All records ask for far more than C; the canary pulls down in world 0 and up in world 1.
    """

    def __init__(self, epsilon, releases=1, clip_factor=1, sigma_factor=1):
        mu = mu_from_budget(epsilon, DELTA)
        self.clip = int(2**LOG2_SIGMA * mu / (2 * releases**0.5))
        self.releases = releases
        self.clip_factor = clip_factor
        self.sigma_factor = sigma_factor

    def center(self, world, clip=None):
        clip = self.clip if clip is None else clip
        records = np.full(N_RECORDS, -(2**40))
        records[0] = 2**40 if world else -(2**40)
        return np.full(self.releases, np.clip(records, -clip, clip).sum())

    def transcript(self, world, runs):
        noise = rounded_normal(runs * self.releases, LOG2_SIGMA).reshape(runs, self.releases)
        if self.sigma_factor != 1:
            noise = np.rint(noise * self.sigma_factor).astype(np.int64)
        return self.center(world, self.clip * self.clip_factor) + noise

    def scores(self, runs):
        claim = self.center(0), self.center(1), 2.0**LOG2_SIGMA
        return [gaussian_score(self.transcript(world, runs), *claim) for world in (0, 1)]


@pytest.mark.parametrize("releases", [1, 16])
def test_scores_have_unit_variance_and_the_claimed_separation(releases):
    # Two Kolmogorov-Smirnov tests at 5e-7.
    mechanism = ClippedSum(4.0, releases)
    mu = gaussian_separation(mechanism.center(0), mechanism.center(1), 2.0**LOG2_SIGMA)
    assert mu == pytest.approx(mu_from_budget(4.0, DELTA), rel=1e-7)  # the clip is an integer
    for scores, mean in zip(mechanism.scores(100_000), (0, mu), strict=True):
        assert stats.kstest(scores - mean, "norm").pvalue > 5e-7


def test_large_integers_lose_no_digits():
    base = 2**62
    score = gaussian_score(np.array([[base + 7], [base - 3]]), [base], [base + 4], 2.0)
    np.testing.assert_array_equal(score, [3.5, -1.5])


def test_adaptive_queries_are_scored_run_by_run():
    # The direction in which the canary pulls depends on the sign of the first release, the
    # distance does not. Two Kolmogorov-Smirnov tests at 5e-7.
    def play(world, runs=50_000):
        first = world + rounded_normal(runs, LOG2_SIGMA) / 2**LOG2_SIGMA
        pull = np.where(first > 0, 1.0, -1.0)
        second = world * pull + rounded_normal(runs, LOG2_SIGMA) / 2**LOG2_SIGMA
        center1 = np.column_stack([np.ones(runs), pull])
        return gaussian_score(np.column_stack([first, second]), 0.0 * center1, center1, 1.0)

    for world in (0, 1):
        assert stats.kstest(play(world) - world * 2**0.5, "norm").pvalue > 5e-7


@pytest.mark.slow
@pytest.mark.parametrize("releases", [1, 16])
def test_thousand_runs_find_nine_tenths_of_epsilon_ten(releases):
    # A bound reaches 9 with probability .978; of 200, fewer than the 1e-6 quantile of .95 do with
    # probability below 1e-6.
    mechanism = ClippedSum(10.0, releases)
    bounds = [audit_scores(*mechanism.scores(1000), DELTA).epsilon_lower for _ in range(200)]
    assert np.sum(np.array(bounds) >= 9.0) >= stats.binom.ppf(1e-6, 200, 0.95)


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_the_computed_number_of_runs_suffices(epsilon):
    # Each bound reaches .9 epsilon with probability .9; false alarm 1e-6.
    mechanism = ClippedSum(epsilon)
    runs = runs_needed(epsilon, DELTA)
    bounds = [audit_scores(*mechanism.scores(runs), DELTA).epsilon_lower for _ in range(50)]
    assert np.sum(np.array(bounds) >= 0.9 * epsilon) >= stats.binom.ppf(1e-6, 50, 0.9)


@pytest.mark.parametrize("method", ["student", "clopper_pearson_gdp"])
def test_power_is_as_planned(method):
    # Fixed seed. 400 repeats: the power .9 has a standard error of .015.
    rng = np.random.default_rng(0)
    epsilon = 6.0
    mu = mu_from_budget(epsilon, DELTA)
    runs = runs_needed(epsilon, DELTA, method=method)
    threshold = mu / 2 if method == "clopper_pearson_gdp" else None
    reached = 0
    for _ in range(400):
        scores = rng.standard_normal(runs), mu + rng.standard_normal(runs)
        result = audit_scores(*scores, DELTA, method=method, threshold=threshold)
        reached += result.epsilon_lower >= 0.9 * epsilon
    assert 0.85 < reached / 400 < 0.95


@pytest.mark.parametrize("method", METHODS)
def test_bounds_keep_their_confidence(method):
    # 300 bounds, each above the truth with probability at most .05; false alarm 1e-6. The normal
    # methods are exact, so too few errors are wrong as well (another 1e-6).
    epsilon = 10.0 if method != "clopper_pearson" else 2.0
    mechanism = ClippedSum(epsilon)
    above = sum(
        audit_scores(*mechanism.scores(400), DELTA, method=method).refutes(epsilon)
        for _ in range(300)
    )
    assert above <= stats.binom.isf(1e-6, 300, 0.05)
    if method in ("gaussian", "student"):
        assert above >= stats.binom.ppf(1e-6, 300, 0.05)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 10.0])
def test_honest_claims_are_not_refuted(epsilon, method):
    # At confidence 1 - 1e-6, which is the false-alarm rate.
    result = audit_scores(
        *ClippedSum(epsilon).scores(20_000), DELTA, method=method, confidence=CERTAIN
    )
    assert not result.refutes(epsilon)


# --- planted faults: each test fails to detect its fault with probability below 1e-6 --------------


@pytest.mark.parametrize(("epsilon", "runs"), [(1.0, 10_000), (10.0, 500)])
def test_doubled_clip_is_caught(epsilon, runs):
    scores = ClippedSum(epsilon, releases=4, clip_factor=2).scores(runs)
    for method in ("gaussian", "student"):
        assert audit_scores(*scores, DELTA, method=method, confidence=CERTAIN).refutes(epsilon)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 10.0])
@pytest.mark.parametrize("method", ["student", "clopper_pearson_gdp"])
def test_too_little_noise_is_caught(method, epsilon):
    # sigma * .8 makes mu a quarter larger. Runs by the planning formula for that mu.
    mu = mu_from_budget(epsilon, DELTA)
    actual = epsilon_from_mu(1.25 * mu, DELTA)
    runs = 2 * runs_needed(
        actual, DELTA, fraction=epsilon / actual, power=CERTAIN, confidence=CERTAIN, method=method
    )
    scores = ClippedSum(epsilon, sigma_factor=0.8).scores(runs)
    assert audit_scores(*scores, DELTA, method=method, confidence=CERTAIN).refutes(epsilon)


@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_noise_reused_by_two_chains_is_caught(epsilon):
    # The canary pulls the two chains in opposite directions, as it does at two points of the
    # parameter space: the difference of the releases then has no noise left. Claimed: both releases
    # together are (epsilon, delta)-DP.
    runs = 2000
    clip = int(2**LOG2_SIGMA * mu_from_budget(epsilon, DELTA) / 8**0.5)
    claim = np.array([-clip, clip]), np.array([clip, -clip]), 2.0**LOG2_SIGMA

    def chain(center, seed):
        with insecure_noise(seed):
            return center + rounded_normal(runs, LOG2_SIGMA)

    def refuted(seeds, method):
        scores = []
        for world in (0, 1):
            releases = [chain(claim[world][c], 10 * world + seeds[c]) for c in (0, 1)]
            scores.append(gaussian_score(np.column_stack(releases), *claim))
        result = audit_scores(*scores, DELTA, method=method, confidence=CERTAIN)
        return result.refutes(epsilon)

    assert refuted((1, 1), "clopper_pearson_gdp")
    assert not refuted((1, 2), "clopper_pearson_gdp")  # control: chains with noise of their own
    if epsilon == 1.0:  # without any assumption, 1000 counted runs show at most log(1000 / 15)
        assert refuted((1, 1), "clopper_pearson")
        assert not refuted((1, 2), "clopper_pearson")


# --- interface ------------------------------------------------------------------------------------


def test_result_is_frozen_and_complete():
    rng = np.random.default_rng(1)
    scores = rng.standard_normal(100), 3 + rng.standard_normal(120)
    result = audit_scores(*scores, DELTA)
    assert result == AuditResult(
        result.epsilon_lower, result.mu_lower, DELTA, 0.95, (100, 120), "gaussian"
    )
    assert result.epsilon_lower == epsilon_from_mu(result.mu_lower, DELTA)
    assert result.refutes(result.epsilon_lower / 2) and not result.refutes(result.epsilon_lower)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.epsilon_lower = 0.0
    split = audit_scores(*scores, DELTA, method="clopper_pearson")
    assert (split.mu_lower, split.runs) == (None, (50, 60))
    whole = audit_scores(*scores, DELTA, method="clopper_pearson", threshold=1.5)
    assert whole.runs == (100, 120)


def test_known_bounds():
    # No errors in n runs: Clopper-Pearson 1 - (alpha/2)^(1/n) on both sides.
    scores = np.zeros(50), np.ones(50)
    rate = 1 - 0.025 ** (1 / 50)
    gdp = audit_scores(*scores, DELTA, method="clopper_pearson_gdp", threshold=0.5)
    assert gdp.mu_lower == pytest.approx(2 * stats.norm.isf(rate), rel=1e-10)
    classic = audit_scores(*scores, DELTA, method="clopper_pearson", threshold=0.5)
    assert classic.epsilon_lower == pytest.approx(np.log((1 - rate - DELTA) / rate), rel=1e-10)
    # The noncentral t bound tends to the z bound with the number of runs.
    rng = np.random.default_rng(2)
    many = rng.standard_normal(200_000), 0.1 + rng.standard_normal(200_000)
    z, t = (audit_scores(*many, DELTA, method=m).mu_lower for m in ("gaussian", "student"))
    assert t == pytest.approx(z, abs=5e-4)


@pytest.mark.parametrize("method", METHODS)
def test_worlds_in_the_wrong_order_bound_nothing(method):
    # Scores that speak against their own world carry no evidence in this direction.
    rng = np.random.default_rng(3)
    scores = 2 + rng.standard_normal(1000), rng.standard_normal(1000)
    threshold = 1.0 if method.startswith("clopper") else None
    result = audit_scores(*scores, DELTA, method=method, threshold=threshold)
    assert result.epsilon_lower == 0.0


def test_almost_noiseless_scores_are_bounded():
    rng = np.random.default_rng(4)
    scores = [world + 1e-12 * rng.standard_normal(10) for world in (0, 1)]
    result = audit_scores(*scores, DELTA, method="student")
    assert 50 < result.mu_lower < 100  # the observed effect is cut at 100 sd
    assert np.isfinite(result.epsilon_lower)


@pytest.mark.parametrize("runs", [4, 100, 5000])
@pytest.mark.parametrize("alpha", [0.05, 1e-6])
def test_t_bound_solves_the_noncentral_t(runs, alpha):
    # P(T >= t) written the other way round: T >= t iff the chi variable is below (Z + m) / t.
    z, step = np.linspace(-12, 12, 100_001, retstep=True)
    rng = np.random.default_rng(5)
    scores = rng.standard_normal(runs), 3.0 + rng.standard_normal(runs)
    t = stats.ttest_ind(scores[1], scores[0]).statistic
    bound = t_bound(*scores, alpha)
    if bound == 0.0:
        assert stats.t.sf(t, 2 * runs - 2) > alpha * (1 - 1e-5)
        return
    chi_square = (2 * runs - 2) * np.maximum((z + bound * np.sqrt(runs / 2)) / t, 0) ** 2
    tail = step * stats.norm.pdf(z) @ stats.chi2.cdf(chi_square, 2 * runs - 2)
    assert alpha * (1 - 1e-5) < tail <= alpha


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"confidence": 0.4}, "confidence"),
        ({"confidence": 1.0}, "confidence"),
        ({"delta": 0.0}, "delta"),
        ({"method": "bootstrap"}, "method must be one of"),
        ({"threshold": 1.0}, "no threshold"),
        ({"threshold": np.nan, "method": "clopper_pearson"}, "threshold"),
        ({"scores0": np.zeros(3)}, "scores0"),
        ({"scores1": np.zeros((5, 2))}, "scores1"),
        ({"scores1": np.full(5, np.nan)}, "finite"),
        ({"scores1": np.ones(5), "method": "student"}, "constant"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arguments = {"scores0": np.zeros(5), "scores1": np.arange(5.0), "delta": DELTA} | changes
    with pytest.raises(ValueError, match=message):
        audit_scores(**arguments)


def test_wrong_transcripts_are_named():
    with pytest.raises(ValueError, match="must differ"):
        gaussian_score(np.zeros((3, 2)), [1, 2], [1, 2], 1.0)
    with pytest.raises(ValueError, match="sigma"):
        gaussian_score(np.zeros((3, 2)), [1, 2], [1, 3], 0.0)
    with pytest.raises(ValueError, match="same in all runs"):
        gaussian_score(np.zeros((2, 1)), [[0], [0]], [[1], [2]], 1.0)
    with pytest.raises(ValueError, match="first axis"):
        gaussian_score(0.0, 0.0, 1.0, 1.0)


def test_runs_needed_refuses_what_it_can_not_plan():
    with pytest.raises(ValueError, match="approaches epsilon"):
        runs_needed(1.0, DELTA, method="clopper_pearson")
    with pytest.raises(ValueError, match="fraction"):
        runs_needed(1.0, DELTA, fraction=1.0)
