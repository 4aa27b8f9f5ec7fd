"""Threads that share the rows of one pass, and PyTensor functions that they may run side by side.

Several threads are used where no other chain needs the processors.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from itertools import pairwise
from threading import RLock
from typing import Any

import pymc_dp.base.jit  # noqa: F401  before numba: sets how it rounds

# isort: split
import pytensor
from pytensor.compile.mode import Mode, get_mode
from pytensor.link.numba.dispatch.basic import numba_njit
from pytensor.link.numba.linker import NumbaLinker

#: Least numbers to be read per thread: starting one takes one or two tenths of a millisecond.
_WORTH = 2**18

#: For functions called once: no compilation, no compiler needed, and constants stay in the graph.
INTERPRETED = Mode(linker="py", optimizer=None)

#: Held while flags of PyTensor are changed: two threads at once would leave them changed.
FLAGS = RLock()

_workers: int | None = None


@cache
def available() -> int:
    """Processors that this process may use, or ``NUMBA_NUM_THREADS`` if that is less; looked up
    once.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    found = processors or os.cpu_count() or 1
    asked = os.environ.get("NUMBA_NUM_THREADS", "")
    return max(1, min(found, int(asked))) if asked.isdecimal() else found


def share(workers: int) -> None:
    """Say how many processes will sample at the same time, if they are processes of their own."""
    global _workers
    _workers = max(1, workers)


def count() -> int:
    """Threads for one pass: all processors, or a fair part in a process among several."""
    if multiprocessing.parent_process() is None:
        return available()
    return 1 if _workers is None else of_each(_workers)


def of_each(workers: int) -> int:
    """Threads for one pass in each of several processes."""
    return max(1, available() // workers)


def pieces(numbers: int, threads: int) -> int:
    """Into how many pieces a pass that reads so many numbers is cut, with so many threads."""
    return min(threads, max(1, numbers // _WORTH))


def over(part: Callable[[slice], Any], n: int, numbers: int) -> list[Any]:
    """The results of ``part`` for slices that make up 0, ..., n - 1, in order. Threads live for the
    pass alone: none is alive when a process is forked.
    """
    parts = 1 if numbers < 2 * _WORTH else pieces(numbers, count())
    if parts == 1:
        return [part(slice(0, n))]
    edges = [n * k // parts for k in range(parts + 1)]
    slices = [slice(a, b) for a, b in pairwise(edges)]
    with ThreadPoolExecutor(parts - 1) as pool:
        # in the context of the caller: which warnings of NumPy are silent belongs to it
        waiting = [pool.submit(copy_context().run, part, where) for where in slices[1:]]
        return [part(slices[0]), *(future.result() for future in waiting)]


class ExactLinker(NumbaLinker):
    """Numba's linker: every row of a block gives the same bits wherever it stands. A pickled
    function is compiled again where it arrives, by default with ``fastmath``; the linker travels
    with it and turns that off.
    """

    def fgraph_convert(self, fgraph: Any, **kwargs: Any) -> Any:
        """Convert the functions of all operations, without fastmath."""
        with FLAGS, pytensor.config.change_flags(numba__fastmath=False):
            return super().fgraph_convert(fgraph, **kwargs)

    def jit_compile(self, fn_and_cache: Any) -> Any:
        """Compile without holding the lock of the interpreter while it runs."""
        function, key = fn_and_cache
        cached = key is not None
        return numba_njit(
            function.py_func, fastmath=False, final_function=True, cache=cached, nogil=True
        )


def exact(mode: Any) -> Mode:
    """The mode, with this linker if it compiles with Numba."""
    found = get_mode(mode)
    if isinstance(found.linker, NumbaLinker):
        return Mode(ExactLinker(), found.provided_optimizer)
    return found


def code_of(function: Any) -> Any:
    """What Numba made of a function, which keeps nothing between calls; None if it did not."""
    return function.vm.jit_fn if isinstance(function.maker.linker, ExactLinker) else None
