"""Exact Gaussian noise on an integer grid, from operating-system entropy.

A mechanism adds ``rounded_normal(size, m)``, a normal of standard deviation 2^m grid units rounded
to integers, to an integer answer. Rounding commutes with adding an integer, so the result is a
rounded exact Gaussian release: post-processing, with the Gaussian guarantee and none of the leaks
of floating-point noise (Mironov 2012). `exact_normal` turns random words into draws; here is where
the words come from and who owns them.
"""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pymc_dp.privacy.exact_normal import fill

MAX_LOG2_SIGMA = 40

WORDS_PER_DRAW = 19  # the mean is 18.5
POOL_WORDS = 2048  # 8 KiB: a refill costs about 15 us and serves about 110 draws
BLOCK_WORDS = 32768  # bulk calls read 128 KiB at a time, which stays in cache
POOL_TAPES = 4  # kept when several threads draw at the same time


class EntropyPool:
    """Unused random words of this process.

    A tape leaves the pool before it is read and comes back when its used words are behind the
    returned position. So it has one owner at any moment, and an owner that is interrupted takes its
    words with it. ``deque.pop`` and ``deque.append`` are atomic: there is no lock that a forked
    child could inherit locked, or that a signal handler could wait for while its own thread holds
    it. Tapes carry the process id, so that a child refuses its parent's words even if it was forked
    without Python's hooks.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._tapes: deque[tuple[int, NDArray[np.uint32], int]] = deque(maxlen=POOL_TAPES)

    def take(self) -> tuple[NDArray[np.uint32], int]:
        """Words of this process and the position of the first unused one; perhaps none left."""
        while True:
            try:
                process, words, position = self._tapes.pop()
            except IndexError:
                return np.empty(0, np.uint32), 0
            if process == os.getpid():
                return words, position

    def extend(
        self, words: NDArray[np.uint32], position: int, draws: int
    ) -> tuple[NDArray[np.uint32], int]:
        """The unused words, followed by fresh ones for about ``draws`` more draws."""
        unused = words.shape[0] - position
        fresh = min(max(draws * WORDS_PER_DRAW, POOL_WORDS), BLOCK_WORDS)
        tape = np.empty(unused + fresh, np.uint32)
        tape[:unused] = words[position:]
        tape[unused:] = np.frombuffer(self._read(4 * fresh), np.uint32)
        words[position:] = 0
        return tape, 0

    def fresh(self, size: int) -> bytes:
        """Bytes of `size` words that are in no tape."""
        return self._read(4 * size)

    def give_back(self, words: NDArray[np.uint32], position: int) -> None:
        """Return a tape whose words before ``position`` are used up."""
        self._tapes.append((os.getpid(), words, position))

    def after_fork_in_child(self) -> None:
        """Forget the words that the parent will use too."""
        self._tapes.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError("The entropy of privacy noise is never pickled or copied.")


class InsecurePool(EntropyPool):
    """A reproducible pool for tests. A forked child continues with a stream of its own."""

    def __init__(self, seed: np.random.SeedSequence) -> None:
        super().__init__(np.random.Generator(np.random.PCG64(seed)).bytes)
        self._seed = seed
        self._child_seed = seed

    def before_fork(self) -> None:
        """Set a seed aside for the child about to be forked."""
        (self._child_seed,) = self._seed.spawn(1)

    def after_fork_in_child(self) -> None:
        """Start the child's own stream."""
        InsecurePool.__init__(self, self._child_seed)


_secure_pool = EntropyPool(os.urandom)
_pool = _secure_pool


def _before_fork() -> None:
    if isinstance(_pool, InsecurePool):
        _pool.before_fork()


def _after_fork_in_child() -> None:
    _secure_pool.after_fork_in_child()
    _pool.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def coins(size: int, numerator: int) -> NDArray[np.bool_]:
    """Independent secret coins, which decide who is in a Poisson batch.

    Each is True with probability ``numerator / 2**32``, exactly; the numerator is 0 to 2^32. A coin
    is one word of operating-system entropy, never one that another draw has used.  The guarantee of
    a subsampled release needs coins that nobody can predict: a seed would void it.
    """
    size, numerator = operator.index(size), operator.index(numerator)
    if size < 0 or not 0 <= numerator <= 2**32:
        raise ValueError("size must not be negative, and numerator between 0 and 2**32.")
    if numerator == 2**32:
        return np.ones(size, dtype=np.bool_)
    return np.frombuffer(_pool.fresh(size), np.uint32) < np.uint32(numerator)


def subset(n: int, size: int) -> NDArray[np.int64]:
    """A secret subset of 0, ..., n - 1, each of this size with the same probability, exactly.

    It is in ascending order; size <= n <= 2^32. Numbers are drawn uniformly until `size` of them
    are distinct; all are equally likely to be among these.  A round draws no more than are missing,
    so none is drawn too much, and which ones to keep is never a question.  What is drawn is the
    smaller of the subset and its complement. Words of operating-system entropy as in `coins`; those
    of the bits of n that are n or more are rejected.
    """
    n, size = operator.index(n), operator.index(size)
    if not 0 <= size <= n <= 2**32:
        raise ValueError("size must be between 0 and n, and n at most 2**32.")
    few = min(size, n - size)
    drawn = np.zeros(n, dtype=np.bool_)
    mask = np.uint32((1 << max(n - 1, 0).bit_length()) - 1)
    missing = few
    while missing:
        words = np.frombuffer(_pool.fresh(missing), np.uint32) & mask
        drawn[words[words < n]] = True
        missing = few - int(np.count_nonzero(drawn))
    return np.flatnonzero(drawn if few == size else ~drawn)


def rounded_normal(size: int, log2_sigma: int) -> NDArray[np.int64]:
    """Independent draws of a normal variable of mean 0, rounded to the integer grid.

    They are ``round(2**log2_sigma * N(0, 1))``. The standard deviation before rounding is
    ``2**log2_sigma`` grid units, from 2^0 to 2^40 (else ValueError). With a power of two, rounding
    is a matter of bits. Karney (2016), arXiv:1303.6257.

    Notes
    -----
    Guarantee
        Given independent uniform words, the distribution is within 2^-250 of the exact one in total
        variation (the argument is in `exact_normal.fill`). No word serves two draws: not in two
        calls, threads or processes, not after a fork, nor after a ``KeyboardInterrupt`` at any
        moment (the words in use are lost). The state of ``numpy.random`` and the ``random_seed`` of
        PyMC have no influence.

    Assumptions
        ``os.urandom`` is indistinguishable from random, and the memory of this process is private.
        Used words are overwritten in the pool, but the bytes object in which ``os.urandom``
        delivered them is freed without being erased.

    Weaknesses
        The running time depends on the draws. A machine image restored twice (a virtual machine
        snapshot, CRIU) repeats the words then in the pool, 128 KiB per thread at most.
    """
    size = operator.index(size)
    log2_sigma = operator.index(log2_sigma)
    if size < 0:
        raise ValueError(f"size must not be negative, got {size}.")
    if not 0 <= log2_sigma <= MAX_LOG2_SIGMA:
        raise ValueError(f"log2_sigma must be in [0, {MAX_LOG2_SIGMA}], got {log2_sigma}.")
    pool = _pool
    draws = np.empty(size, np.int64)
    words, position = pool.take()
    done, position = fill(draws, 0, log2_sigma, words, position)
    while done < size:
        words, position = pool.extend(words, position, size - done)
        done, position = fill(draws, done, log2_sigma, words, position)
    pool.give_back(words, position)
    return draws


@contextmanager
def insecure_noise(seed: int) -> Iterator[None]:
    """Make the noise reproducible, for tests only: what is released inside is **not private**.

    Two blocks entered with the same seed see the same draws. The mode holds for the whole process,
    all threads included, and `is_insecure` reports it: whoever releases an answer must ask and
    stamp ``privacy_guarantee="none"``. A forked child stays insecure for its lifetime and gets a
    stream of its own (a function of the seed and of the number of forks before it): with shared
    noise, chains would be copies of each other. A fresh interpreter (spawn, forkserver) draws
    operating-system entropy and says so truthfully; a result to which an insecure parent
    contributed must carry the parent's stamp.
    """
    global _pool
    outer = _pool
    _pool = InsecurePool(np.random.SeedSequence(seed))
    try:
        yield
    finally:
        _pool = outer


def is_insecure() -> bool:
    """Whether noise drawn now in this process is reproducible and therefore protects nothing."""
    return _pool is not _secure_pool
