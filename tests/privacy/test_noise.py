"""The noise is the exact rounded normal, and no two draws ever share entropy.

Statistical tests draw operating-system entropy; each states the probability with which a correct
sampler fails it.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from threading import Thread

import cloudpickle
import numpy as np
import pytest
from numba import njit
from numba.core import caching
from scipy import stats

from pymc_dp.base.jit import compiled
from pymc_dp.privacy import noise
from pymc_dp.privacy.noise import insecure_noise, is_insecure, rounded_normal

ALPHA = 1e-6
N_DRAWS = 10_000_000
FINE = 30  # log2_sigma at which the grid is far below what 1e7 draws resolve
COARSE = 2


def chi_square_pvalue(draws, log2_sigma):
    """Against the exact probabilities of the integers, two-sided tails merged at 4 sigma."""
    sigma = 2**log2_sigma
    edge = 4 * sigma
    observed = np.bincount(np.clip(draws, -edge - 1, edge + 1) + edge + 1, minlength=2 * edge + 3)
    upper = stats.norm.cdf((np.arange(-edge - 1, edge + 1) + 0.5) / sigma)
    expected = np.diff(upper, prepend=0.0, append=1.0) * len(draws)
    return stats.chisquare(observed, expected).pvalue


def ks_pvalue(draws, log2_sigma):
    """Kolmogorov-Smirnov with the asymptotic distribution (n is at least 1e6 here)."""
    cdf = stats.norm.cdf(np.sort(draws) / 2.0**log2_sigma)
    n = len(cdf)
    rank = np.arange(n)
    distance = max(np.max((rank + 1) / n - cdf), np.max(cdf - rank / n))
    return stats.kstwobign.sf(math.sqrt(n) * distance)


def moment_pvalue(draws, log2_sigma):
    """Smallest p-value of the first four moments, times four (Bonferroni)."""
    x = draws / 2.0**log2_sigma
    square = x * x
    z = [
        math.sqrt(len(x) / variance) * (np.mean(power) - mean)
        for power, mean, variance in (
            (x, 0, 1),
            (square, 1, 2),
            (square * x, 0, 15),
            (square * square, 3, 96),
        )
    ]
    return 4 * 2 * stats.norm.sf(np.max(np.abs(z)))


@pytest.fixture(scope="module")
def fine():
    return rounded_normal(N_DRAWS, FINE)


@pytest.mark.slow
@pytest.mark.parametrize(("log2_sigma", "size"), [(0, 1_000_000), (COARSE, N_DRAWS)])
def test_coarse_draws_have_the_exact_probabilities(log2_sigma, size):
    # False alarm 1e-6 each.
    draws = rounded_normal(size, log2_sigma)
    assert draws.dtype == np.int64
    assert draws.shape == (size,)
    assert chi_square_pvalue(draws, log2_sigma) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("pvalue", [ks_pvalue, moment_pvalue])
def test_fine_draws_are_normal(fine, pvalue):
    # False alarm 1e-6 each; rounding to 2^-30 sigma moves the statistics by less than 1e-5.
    assert pvalue(fine, FINE) > ALPHA


@pytest.mark.slow
def test_one_percent_in_sigma_is_rejected(fine):
    # Planted fault. At 1e7 draws the second moment is off by 45 standard errors.
    faulty = np.rint(fine * 0.99).astype(np.int64)
    coarse = np.rint(faulty / 2 ** (FINE - COARSE)).astype(np.int64)
    assert chi_square_pvalue(coarse, COARSE) < ALPHA
    assert ks_pvalue(faulty, FINE) < ALPHA
    assert moment_pvalue(faulty, FINE) < ALPHA


def test_rounding_down_is_rejected(fine):
    # Planted fault: the floor instead of the nearest integer.
    assert chi_square_pvalue(fine >> (FINE - COARSE), COARSE) < ALPHA


def test_signs_are_fair_and_independent_of_size(fine):
    # Two tests at 5e-7: the sign alone, and the sign against eight classes of magnitude.
    positive = fine[fine != 0] > 0
    size = np.abs(fine[fine != 0])
    assert stats.binomtest(int(positive.sum()), len(positive)).pvalue > ALPHA / 2
    octile = stats.norm.ppf(0.5 + np.arange(1, 8) / 16) * 2.0**FINE
    classes = np.searchsorted(octile, size)
    table = np.array([np.bincount(classes[positive]), np.bincount(classes[~positive])])
    assert stats.chi2_contingency(table).pvalue > ALPHA / 2


def test_low_bits_are_uniform():
    # At m = 40 the last 8 bits come from the second digit of the fraction. False alarm 1e-6.
    draws = rounded_normal(1_000_000, 40)
    assert stats.chisquare(np.bincount(draws & 0xFF, minlength=256)).pvalue > ALPHA


@pytest.mark.parametrize("size", [1, 10, 500_000])
def test_draws_are_uncorrelated_within_and_between_calls(size):
    # Autocorrelations of x and of x^2 at lags 1 to 20, each sqrt(n) r ~ N(0, 1). False alarm 1e-6.
    n = 500_000 if size > 1 else 100_000
    x = np.concatenate([rounded_normal(size, FINE) for _ in range(n // size)]) / 2.0**FINE
    assert ks_pvalue(x, 0) > ALPHA / 2
    z = []
    for series in (x, (x * x - 1) / math.sqrt(2)):
        z += [series[lag:] @ series[:-lag] / math.sqrt(n - lag) for lag in range(1, 21)]
    assert np.max(np.abs(z)) < stats.norm.isf(ALPHA / 2 / 2 / len(z))


@pytest.mark.parametrize("pool_words", [1, 7, 64])
def test_draws_do_not_depend_on_where_the_tape_is_cut(monkeypatch, pool_words):
    # The same words in refills of any size give the same draws: a draw that runs out of words is
    # continued, not dropped (dropping it would favour draws that need few words).
    with insecure_noise(1):
        expected = rounded_normal(2000, 36)
    monkeypatch.setattr(noise, "POOL_WORDS", pool_words)
    monkeypatch.setattr(noise, "BLOCK_WORDS", pool_words)
    with insecure_noise(1):
        draws = [rounded_normal(size, 36) for size in (0, 1, 3, 1000, 996)]
    np.testing.assert_array_equal(np.concatenate(draws), expected)


def test_undecided_comparisons_draw_more_digits():
    words = np.array([5, 9, 7, 2**32 - 1], np.uint32)
    digits = np.zeros((4, noise.DIGITS), np.uint32)
    state = np.array([1, 1, 1, 0, 0])
    assert not noise._less(words, digits, state, 0, 0)  # equal to itself in all digits
    digits[:, 0] = 3
    state[:] = [1, 1, 1, 0, 0]
    assert noise._less(words, digits, state, 0, 1)  # 3,5 < 3,9
    assert not noise._less(words, digits, state, 2, 0) and state[-1] == 3  # 3,7 > 3,5
    assert noise._less(words, digits, state, 0, 2) and state[-1] == 3  # digits are kept
    assert noise._less(words, digits, state, 2, 1)  # 3,7 < 3,9
    np.testing.assert_array_equal(state, [2, 2, 2, 0, 3])


def test_repeated_words_end_in_draws():
    # Half the words are one constant, so that many comparisons go far beyond the first digit.
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    words[rng.random(len(words)) < 0.5] = 0x12345678
    draws = np.empty(100_000, np.int64)
    done, position = noise.fill(draws, 0, 20, words, 0)
    assert 1000 < done < len(draws)
    assert position <= len(words)
    assert np.max(np.abs(draws[:done])) < 12 * 2**20


@pytest.mark.parametrize("arguments", [(-1, 30), (1, -1), (1, 41)])
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match=r"size|log2_sigma"):
        rounded_normal(*arguments)


def test_arguments_must_be_integers():
    with pytest.raises(TypeError):
        rounded_normal(10.0, 30)
    with pytest.raises(TypeError):
        rounded_normal(10, 30.0)


# --- entropy is used once -------------------------------------------------------------------------


def shared_values(*samples):
    """Number of values that occur more than once in all."""
    values = np.concatenate(samples)
    return len(values) - len(np.unique(values))


def draw_in_children(method, size, children=2):
    """What child processes draw, and whether they call their noise insecure."""
    context = multiprocessing.get_context(method)
    with ExitStack() as stack:
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, mp_context=context)) for _ in range(children)
        ]
        # Functions of the package, since a fresh interpreter cannot import a test module.
        jobs = [(p.submit(rounded_normal, size, 36), p.submit(is_insecure)) for p in pools]
        return [draws.result() for draws, _ in jobs], [flag.result() for _, flag in jobs]


# Two independent values at sigma = 2^36 agree with probability 2^-36 / (2 sqrt(pi)) = 4.1e-12. For
# up to 2e4 of them the expected number of coincidences is below 8.3e-4, so that two or more have
# probability 3.5e-7. A reused pool repeats hundreds.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "method",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("forkserver", marks=pytest.mark.exhaustive),
    ],
)
def test_processes_and_calls_share_no_value(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} on this platform")
    before = rounded_normal(1000, 36)
    children, insecure = draw_in_children(method, 1000)
    after = [rounded_normal(1000, 36) for _ in range(5)]
    assert not any(insecure)
    assert shared_values(before, *children, *after) <= 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_many_forks_of_one_parent_share_no_value():
    def forked(size):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, rounded_normal(size, 36).tobytes())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            draws = np.frombuffer(stream.read(), np.int64)
        os.waitpid(child, 0)
        return draws

    samples = [rounded_normal(10, 36)]
    samples += [forked(100) for _ in range(20)]
    samples += [rounded_normal(100, 36)]
    assert [len(sample) for sample in samples] == [10] + 20 * [100] + [100]
    assert shared_values(*samples) <= 1


def test_a_tape_of_another_process_is_refused(monkeypatch):
    # What protects a child that was forked without Python's hooks.
    rounded_normal(1, 36)
    words, position = noise._pool.take()
    noise._pool.give_back(words, position)
    monkeypatch.setattr(noise.os, "getpid", lambda: -1)
    other, _ = noise._pool.take()
    assert other is not words


def test_a_forked_child_forgets_the_pool():
    rounded_normal(1, 36)
    noise._after_fork_in_child()
    words, _ = noise._pool.take()
    assert len(words) == 0


def test_threads_share_no_value():
    samples = [[] for _ in range(8)]

    def draw(mine):
        for _ in range(200):
            mine.append(rounded_normal(10, 36))

    threads = [Thread(target=draw, args=(mine,)) for mine in samples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared_values(*(draws for mine in samples for draws in mine)) <= 1


def test_seeds_of_other_generators_have_no_influence():
    samples = []
    for _ in range(5):
        np.random.seed(1)  # noqa: NPY002
        samples.append(rounded_normal(1000, 36))
        np.random.default_rng(1).normal()
    assert shared_values(*samples) <= 1


def test_interrupted_calls_lose_their_words(monkeypatch):
    # A KeyboardInterrupt before every line executed in the module, one after the other; whatever
    # the interrupted call had read must never be read again. Two unrelated runs of three words are
    # equal with probability 2^-96.
    read = []
    real_fill = noise.fill

    def recording_fill(draws, done, log2_sigma, words, position):
        before = words.copy()
        done, end = real_fill(draws, done, log2_sigma, words, position)
        read.append(before[position:end])
        return done, end

    def tracer(frame, event, argument):
        nonlocal lines_left
        if frame.f_code.co_filename != noise.__file__:
            return None
        if event == "line":
            lines_left -= 1
            if lines_left == 0:
                raise KeyboardInterrupt
        return tracer

    monkeypatch.setattr(noise, "fill", recording_fill)
    interrupts = 0
    previous = sys.gettrace()
    for line in range(1, 200):
        lines_left = line
        try:
            sys.settrace(tracer)
            rounded_normal(10, 36)
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(previous)
        if lines_left > 0:
            break
        rounded_normal(30, 36)
    assert 15 < interrupts < 199, "the interrupts must cover whole calls"
    runs = [tuple(words[i : i + 3]) for words in read for i in range(len(words) - 2)]
    assert len(runs) > 1000
    assert len(set(runs)) == len(runs)


def test_used_words_are_erased():
    rounded_normal(50, 36)
    words, position = noise._pool.take()
    noise._pool.give_back(words, position)
    assert position > 0
    assert not words[:position].any()
    assert words[position:].any()


def test_small_calls_do_not_refill(monkeypatch):
    rounded_normal(1, 36)
    refills = []
    extend = noise.EntropyPool.extend
    monkeypatch.setattr(
        noise.EntropyPool, "extend", lambda *args: refills.append(1) or extend(*args)
    )
    for _ in range(1000):
        rounded_normal(10, 36)
    # 18.5 words a draw from refills of 2048: 90.3 expected, standard deviation below 1.
    assert 80 < len(refills) < 101


def test_the_pool_is_in_no_pickle():
    rounded_normal(1, 36)
    words, position = noise._pool.take()
    secret = words[position:].tobytes()
    noise._pool.give_back(words, position)
    for dump in (pickle.dumps, cloudpickle.dumps):
        assert secret[:16] not in dump(rounded_normal)
        with pytest.raises(TypeError, match="never pickled"):
            dump(noise._pool)
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="never pickled"):
            duplicate(noise._pool)
    cloudpickle.register_pickle_by_value(noise)
    try:
        with pytest.raises((TypeError, pickle.PicklingError), match="never pickled"):
            cloudpickle.dumps(rounded_normal)
    finally:
        cloudpickle.unregister_pickle_by_value(noise)


def test_compiles_where_numba_can_not_write(monkeypatch):
    # As in a read-only installation without a writable user cache: no place accepts the file.
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError):
        njit(cache=True)(lambda x: x)
    assert compiled()(lambda x: x + 1)(1) == 2


# --- the mode for tests ---------------------------------------------------------------------------


def test_insecure_noise_is_reproducible_and_visible():
    assert not is_insecure()
    with insecure_noise(1):
        assert is_insecure()
        first = rounded_normal(1000, 36)
        with insecure_noise(2):
            other = rounded_normal(1000, 36)
        assert is_insecure()
        more = rounded_normal(1000, 36)
    assert not is_insecure()
    with insecure_noise(1):
        np.testing.assert_array_equal(rounded_normal(1000, 36), first)
        np.testing.assert_array_equal(rounded_normal(1000, 36), more)
    assert shared_values(first, other, more, rounded_normal(1000, 36)) <= 1


def test_insecure_noise_ends_with_an_exception():
    with pytest.raises(KeyError), insecure_noise(1):
        raise KeyError
    assert not is_insecure()


def test_insecure_noise_leaves_no_words_behind():
    with insecure_noise(1):
        inside = rounded_normal(1, 36)
        rest = rounded_normal(50, 36)
    assert shared_values(inside, rest, rounded_normal(100, 36)) <= 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_children_of_an_insecure_parent_stay_insecure():
    runs = []
    for _ in range(2):
        with insecure_noise(1):
            rounded_normal(1, 36)
            children, insecure = draw_in_children("fork", 100)
            assert all(insecure)
            runs.append([*children, rounded_normal(100, 36)])
    np.testing.assert_array_equal(runs[0], runs[1])
    assert shared_values(*runs[0]) <= 1


@pytest.mark.slow
def test_fresh_interpreters_are_secure():
    with insecure_noise(1):
        children, insecure = draw_in_children("spawn", 100)
    assert not any(insecure)
    assert shared_values(*children) <= 1
