"""Threads that share the rows of one pass."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
import warnings
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytest

import pymc_dp as dp
from pymc_dp.base import threads

pytestmark = pytest.mark.compiled


def total(where: slice) -> int:
    return sum(range(where.start, where.stop))


@pytest.mark.parametrize("processors", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [1, 2, 5, 1000])
def test_slices_make_up_all_rows_in_order(
    processors: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "count", lambda: processors)
    slices = list(threads.over(lambda where: where, n, 2**40))
    assert len(slices) == processors
    rows = np.concatenate([np.arange(where.start, where.stop) for where in slices])
    np.testing.assert_array_equal(rows, np.arange(n))
    assert sum(threads.over(total, n, 2**40)) == n * (n - 1) // 2


def test_little_work_and_one_processor_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "count", lambda: 8)
    names = list(threads.over(lambda _: threading.current_thread().name, 10, 100))
    assert names == [threading.current_thread().name]


def test_no_thread_is_left_and_errors_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "count", lambda: 4)
    before = threading.active_count()
    names = set(threads.over(lambda _: threading.current_thread().name, 10, 2**40))
    assert len(names) >= 2
    assert threading.active_count() == before

    def fails(where: slice) -> None:
        if where.start > 0:
            raise RuntimeError("a part failed")

    with pytest.raises(RuntimeError, match="a part failed"):
        list(threads.over(fails, 10, 2**40))
    assert threading.active_count() == before


def test_warnings_that_are_silent_are_silent_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warning in one part would tell of a record there."""
    monkeypatch.setattr(threads, "count", lambda: 3)

    def overflows(where: slice) -> float:
        return float(np.float64(1e308) * np.float64(where.stop))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.errstate(over="ignore"):
            assert list(threads.over(overflows, 90, 2**40)) == [np.inf] * 3


def test_the_environment_sets_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    available = threads.available.__wrapped__  # looked up again
    monkeypatch.setenv("NUMBA_NUM_THREADS", "")
    assert available() == 6
    monkeypatch.setenv("NUMBA_NUM_THREADS", "2")
    assert available() == 2
    monkeypatch.setenv("NUMBA_NUM_THREADS", "99")
    assert available() == 6
    monkeypatch.setenv("NUMBA_NUM_THREADS", "several")
    assert available() == 6


def test_processes_side_by_side_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available", lambda: 6)
    monkeypatch.setattr(threads, "_workers", None)
    assert threads.count() == 6
    threads.share(4)
    assert threads.count() == 6  # this process is not one of them
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert threads.count() == 1
    monkeypatch.setattr(threads, "_workers", None)
    assert threads.count() == 1  # how many others there are is not known
    threads.share(2)
    assert threads.count() == 3
    threads.share(100)
    assert threads.count() == 1


@pytest.mark.slow
def test_which_threads_there_are_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "available", lambda: 4)
    monkeypatch.setattr(threads, "_WORTH", 300)
    y = np.random.default_rng(0).normal(size=1000)
    with pm.Model(), caplog.at_level(logging.INFO):
        pm.Normal("y", pm.Normal("mu", 0.0, 3.0), 1.0, observed=y)
        dp.PrivacyBudget(1.0, 1e-5)
        dp.DPLangevin(draws=2, tune=0, chains=2, form="anchored", progressbar=False)
    # a thousand numbers: three pieces of 300 or more
    assert "read by 3 threads if chains run one after the other, by 2 in each of 2" in caplog.text


def test_flags_of_pytensor_are_as_before_after_threads_that_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second to begin ends last: it would put back what the first had set."""
    began = threading.Event()

    def convert(linker: Any, graph: Any) -> None:
        second = began.is_set()
        began.set()
        time.sleep(0.4 if second else 0.2)

    monkeypatch.setattr(threads.NumbaLinker, "fgraph_convert", convert)
    before = pytensor.config.numba__fastmath
    first, last = (
        threading.Thread(target=threads.ExactLinker().fgraph_convert, args=(None,))
        for _ in range(2)
    )
    first.start()
    began.wait()
    last.start()
    first.join()
    last.join()
    assert pytensor.config.numba__fastmath == before
