"""Exactly rounded normal draws as a function of a tape of random words (Karney 2016).

Algorithm N of C. F. F. Karney, *Sampling exactly from the normal distribution*, ACM TOMS 42(1),
arXiv:1303.6257, with its algorithms H and B: comparisons of uniform deviates, no floating-point
number anywhere. This module holds no randomness; `pymc_dp.privacy.noise` feeds it.

The functions share three arrays: `words`, the tape, uint32; `digits` (4, DIGITS), the digits drawn
so far of the deviates in use; and `state` (5,), how many digits are known of each deviate and,
last, the cursor on the tape, past its end once the words have run out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pymc_dp.base.jit import compiled

# A uniform deviate is a base-2^32 fraction whose digits are drawn when a comparison needs them.
DIGITS = 8
# Rows of `digits`: the fractional part x of the draw, the last two terms of a falling sequence of
# uniforms, and the uniform of one Bernoulli selection. `state` has the cursor in its last place.
X, FALLING, SELECT, CURSOR = 0, 1, 3, 4

Words = NDArray[np.uint32]
State = NDArray[np.int64]


# The parts of one draw own no memory: without reference counts on the arrays they share, which
# numba would keep at every call, and inlined, a draw takes 0.07 us instead of 1.2 (numba 0.68).
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
def _renew(words: Words, digits: Words, state: State, row: int) -> None:
    """Replace deviate ``row`` by a fresh uniform."""
    digits[row, 0] = _word(words, state)
    state[row] = 1


@_part
def _digit(words: Words, digits: Words, state: State, row: int, place: int) -> np.uint32:
    """Digit ``place`` of deviate ``row``, drawn at its first use."""
    if state[row] == place:
        digits[row, place] = _word(words, state)
        state[row] = place + 1
    return digits[row, place]


@_part
def _less(words: Words, digits: Words, state: State, row: int, other: int) -> bool:
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
        high = np.int64(_digit(words, digits, state, X, 0))
        low = np.int64(_digit(words, digits, state, X, 1))
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

    Parameters
    ----------
    draws : ndarray of int64, shape (size,)
        Entries from ``done`` on are overwritten by ``round(2**log2_sigma * N(0, 1))``.
    log2_sigma : int
        Between 0 and 40 (not checked).
    words : ndarray of uint32
        The tape: independent uniform words. Those used up are set to zero.
    position : int
        First unused word.

    Returns
    -------
    done, position : int
        After the last finished draw. A draw for which the words do not suffice has used none: call
        again with the same words and more behind them. The draws are thus a function of one endless
        tape, wherever it was cut; to drop the unfinished draw instead would favour draws that need
        few words.

    Notes
    -----
    Guarantee
        The distribution is exact but for comparisons that are undecided after 256 bits, which count
        as "not less". In each comparison one deviate is fresh, hence independent of the other and
        equal to it in 256 bits with probability 2^-256. A draw makes fewer than 2^5 comparisons on
        average (it uses 18.5 words, and each comparison needs a new one), so by the union bound the
        total variation distance is below 2^-250 per draw. The rounding looks at the first 41 bits
        of the fraction at most and is exact.
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
