"""Exact Gaussian and Laplace noise on an integer grid, from operating-system entropy.

A mechanism adds ``rounded_normal(size, m)`` to an integer answer. Rounding commutes with adding an
integer, so the result is a rounded exact Gaussian release: post-processing, with the Gaussian
guarantee and none of the leaks of floating-point noise (Mironov 2012).

Normal draws are a function of a tape of random words: algorithms N, H and B of C. F. F. Karney,
*Sampling exactly from the normal distribution*, ACM TOMS 42(1), arXiv:1303.6257, in integers alone.
The compiled functions share `words`, the tape, uint32; `digits` (4, DIGITS), drawn so far of the
deviates in use; and `state` (5,), how many digits are known of each deviate and, last, the cursor
on the tape, past its end once the words have run out.
"""

from __future__ import annotations

import operator
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pymc_dp.base.jit import compiled

MAX_LOG2_SIGMA = 40

WORDS_PER_DRAW = 19  # the mean is 18.5
POOL_WORDS = 2048  # 8 KiB: a refill costs about 15 us and serves about 110 draws
BLOCK_WORDS = 32768  # bulk calls read 128 KiB at a time, which stays in cache
POOL_TAPES = 4  # kept when several threads draw at the same time

# A uniform deviate is a base-2^32 fraction whose digits are drawn when a comparison needs them.
DIGITS = 8
# Rows of `digits`: the fractional part x of the draw, the last two terms of a falling sequence of
# uniforms, and the uniform of one Bernoulli selection. `state` has the cursor in its last place.
# Integers of NumPy: numba would compile the functions below once more for each constant of Python.
X, FALLING, SELECT, CURSOR = map(np.int64, (0, 1, 3, 4))
FIRST, SECOND = map(np.int64, (0, 1))  # digits

Place = int | np.int64
Words = NDArray[np.uint32]
State = NDArray[np.int64]


# -- random words of this process, and who owns them ---------------------------------------------


class EntropyPool:
    """Unused random words of this process.

    A tape leaves the pool before it is read and comes back without its used words: it has one owner
    at any moment, and an interrupted owner takes its words with it. ``deque`` is atomic, so there
    is no lock that a forked child could inherit locked, or on which a signal handler could wait for
    its own thread. A child refuses its parent's words by process id, even if forked without
    Python's hooks.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._tapes: deque[tuple[int, NDArray[np.uint32], int]] = deque(maxlen=POOL_TAPES)

    def take(self) -> tuple[NDArray[np.uint32], int]:
        """Words of this process, perhaps none, and the position of the first unused one."""
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


@contextmanager
def insecure_noise(seed: int) -> Iterator[None]:
    """Make the noise reproducible, for tests only: what is released inside is **not private**.

    The mode holds for all threads of the process, and `is_insecure` reports it: a release must ask
    and stamp ``privacy_guarantee="none"``. A forked child stays insecure, with a stream of its own
    (a function of the seed and of the number of forks before it), as chains with shared noise would
    be copies of each other. A fresh interpreter (spawn, forkserver) draws operating-system entropy
    and reports so; a result to which an insecure parent contributed must carry the parent's stamp.
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


# -- normal draws --------------------------------------------------------------------------------


# Without reference counts on the arrays that the parts of a draw share, and inlined, a draw takes
# 0.07 us instead of 1.2 (numba 0.68).
_part = compiled(_nrt=False, forceinline=True)


@_part
def _word(words: Words, state: State) -> np.uint32:
    """Next word; 0 past the end, which ends every loop below (the draw is then discarded)."""
    position = state[CURSOR]
    state[CURSOR] = position + 1
    if position < words.shape[0]:
        return words[position]
    return np.uint32(0)


@_part
def _renew(words: Words, digits: Words, state: State, row: Place) -> None:
    """Replace deviate ``row`` by a fresh uniform."""
    digits[row, 0] = _word(words, state)
    state[row] = 1


@_part
def _digit(words: Words, digits: Words, state: State, row: Place, place: Place) -> np.uint32:
    """Digit ``place`` of deviate ``row``, drawn at its first use."""
    if state[row] == place:
        digits[row, place] = _word(words, state)
        state[row] = place + 1
    return digits[row, place]


@_part
def _less(words: Words, digits: Words, state: State, row: Place, other: Place) -> bool:
    """Whether deviate ``row`` is below deviate ``other``."""
    for place in range(DIGITS):
        left = _digit(words, digits, state, row, place)
        right = _digit(words, digits, state, other, place)
        if left != right:
            return bool(left < right)
    return False  # equal in 256 bits: see the bound in `fill`


@_part
def _half_exponential(words: Words, digits: Words, state: State) -> bool:
    """Algorithm H: True with probability exp(-1/2)."""
    last, fresh = FALLING, FALLING + 1
    _renew(words, digits, state, last)
    if digits[last, 0] >> np.uint32(31):
        return True  # the first uniform is not below 1/2
    even = False
    while True:  # the length of the run 1/2 > U1 > U2 > ... is even with probability exp(-1/2)
        _renew(words, digits, state, fresh)
        if not _less(words, digits, state, fresh, last):
            return even
        even = not even
        last, fresh = fresh, last


@_part
def _selected(words: Words, digits: Words, state: State, k: int) -> bool:
    """Step B3: True with probability (2k + x) / (2k + 2), x being the deviate X."""
    cell = np.int64(2**32) // (2 * k + 2)
    while True:
        word = np.int64(_word(words, state))
        if word < cell:
            return False
        if word < 2 * cell:
            _renew(words, digits, state, SELECT)
            return _less(words, digits, state, SELECT, X)
        if word < (2 * k + 2) * cell:
            return True
        # the words left over by the division are drawn again


@_part
def _accept_fraction(words: Words, digits: Words, state: State, k: int) -> bool:
    """Algorithm B: True with probability exp(-x (2k + x) / (2k + 2)), x being the deviate X."""
    last, fresh, spare = X, FALLING, FALLING + 1
    even = True
    while True:
        _renew(words, digits, state, fresh)
        if not _less(words, digits, state, fresh, last) or not _selected(words, digits, state, k):
            return even
        even = not even
        last, fresh, spare = fresh, spare, fresh


@_part
def _draw(words: Words, digits: Words, state: State, log2_sigma: int) -> int:
    """Algorithm N, then rounding: ``round(2^log2_sigma * N(0, 1))``."""
    while state[CURSOR] <= words.shape[0]:
        k = 0  # N1: probability proportional to exp(-k/2)
        while _half_exponential(words, digits, state):
            k += 1
        accepted = True
        for _ in range(k * (k - 1)):  # N2: keep k with probability exp(-k (k - 1) / 2)
            if not _half_exponential(words, digits, state):
                accepted = False
                break
        if not accepted:
            continue
        _renew(words, digits, state, X)  # N3
        for _ in range(k + 1):  # N4: keep x with probability exp(-x (2k + x) / 2)
            if not _accept_fraction(words, digits, state, k):
                accepted = False
                break
        if not accepted:
            continue
        # N5: |normal| = k + x, and round(2^m x) = floor((floor(2^(m+1) x) + 1) / 2)
        high = np.int64(_digit(words, digits, state, X, FIRST))
        low = np.int64(_digit(words, digits, state, X, SECOND))
        first_63_bits = (high << 31) | (low >> 1)
        fraction = int((first_63_bits >> (62 - log2_sigma)) + 1) >> 1
        magnitude = (k << log2_sigma) + fraction
        return -magnitude if _word(words, state) & np.uint32(1) else magnitude  # N6
    return 0


@compiled()
def fill(
    draws: NDArray[np.int64], done: int, log2_sigma: int, words: Words, position: int
) -> tuple[int, int]:
    """Write draws as far as the words reach, and erase the words that were used.

    Draws from ``done`` on become ``round(2**log2_sigma * N(0, 1))``; the exponent, 0 to 40, is not
    checked. Returned are ``done`` and ``position`` (of the first unused word) after the last
    finished draw. A draw for which the words do not suffice has used none: call again with more
    words behind them. The draws are thus a function of one endless tape, wherever it was cut;
    dropping the unfinished draw would favour draws that need few words.

    *Guarantee.* The distribution is exact but for comparisons that are undecided after 256 bits,
    which count as "not less". In each comparison one deviate is fresh, so they are equal in 256
    bits with probability 2^-256. A draw makes fewer than 2^5 comparisons on average (it uses 18.5
    words, and each comparison needs a new one), so the total variation distance is below 2^-250 per
    draw. The rounding looks at the first 41 bits of the fraction at most and is exact.
    """
    digits = np.empty((4, DIGITS), np.uint32)
    state = np.zeros(5, np.int64)
    state[CURSOR] = position
    end = position
    while done < draws.shape[0]:
        value = _draw(words, digits, state, log2_sigma)
        if state[CURSOR] > words.shape[0]:
            break
        draws[done] = value
        done += 1
        end = state[CURSOR]
    words[position:end] = 0
    digits[:] = 0
    return done, end


def rounded_normal(size: int, log2_sigma: int) -> NDArray[np.int64]:
    """Independent draws of ``round(2**log2_sigma * N(0, 1))``, log2_sigma from 0 to 40.

    *Guarantee.* Given independent uniform words, the distribution is within 2^-250 of the exact one
    in total variation (see `fill`). No word serves two draws: not in two calls, threads or
    processes, not after a fork, nor after a ``KeyboardInterrupt`` at any moment (the words in use
    are lost). The state of ``numpy.random`` and the ``random_seed`` of PyMC have no influence.
    *Assumptions.* ``os.urandom`` is indistinguishable from random, and the memory of this process
    is private (the bytes that ``os.urandom`` delivers are freed without being erased).
    *Weaknesses.* The running time depends on the draws. A machine image restored twice (a virtual
    machine snapshot, CRIU) repeats the words then in the pool, 128 KiB per thread at most.
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


# -- Laplace draws -------------------------------------------------------------------------------


def discrete_laplace(size: int, scale: Fraction) -> list[int]:
    """Independent integers u with probability proportional to exp(-|u| / scale), scale > 0.

    Canonne, Kamath & Steinke (2020), Algorithms 1 and 2, in Python integers. *Guarantee.* Exact,
    given uniform random bits, which come from ``secrets``, never from a seed. *Weaknesses.* The
    running time depends on the draws.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}.")
    return [_laplace(scale.numerator, scale.denominator) for _ in range(size)]


def _laplace(t: int, s: int) -> int:
    """One draw of scale t / s."""
    while True:
        u = secrets.randbelow(t)
        if not _happens(Fraction(u, t)):
            continue
        v = 0
        while _happens(Fraction(1)):
            v += 1
        y = (u + t * v) // s
        negative = secrets.randbits(1)
        if negative and y == 0:
            continue
        return -y if negative else y


def _happens(gamma: Fraction) -> bool:
    """True with probability exp(-gamma), 0 <= gamma <= 1."""
    k = 1
    while secrets.randbelow(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1


# -- secret batches ------------------------------------------------------------------------------


def coins(size: int, numerator: int) -> NDArray[np.bool_]:
    """Independent secret coins, True with probability ``numerator / 2**32``, exactly. They decide
    who is in a Poisson batch. A coin is one word of operating-system entropy that no other draw has
    used: a subsampled release needs coins that nobody can predict; a seed would void it.
    """
    size, numerator = operator.index(size), operator.index(numerator)
    if size < 0 or not 0 <= numerator <= 2**32:
        raise ValueError("size must not be negative, and numerator between 0 and 2**32.")
    if numerator == 2**32:
        return np.ones(size, dtype=np.bool_)
    return np.frombuffer(_pool.fresh(size), np.uint32) < np.uint32(numerator)


def subset(n: int, size: int) -> NDArray[np.int64]:
    """A secret subset of 0, ..., n - 1, ascending, each of this size with the same probability,
    exactly.

    size <= n <= 2^32. Numbers are drawn uniformly, from words as in `coins`, until enough are
    distinct. A round draws no more than are missing, so none has to be dropped. What is drawn is
    the smaller of the subset and its complement.
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
