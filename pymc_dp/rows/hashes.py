"""Hashes of the data of rows: numbers that look random, and are a function of a row alone.

Errors of quadratures that are shifted by them do not add up over rows whose data differ.  Random
numbers that rows share would let one row change what all others add; so would ids of units, which
may be numbers that other units decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled


def bits_of(data: ndarray) -> ndarray:
    """(rows, entries) uint64 of (rows, ...) numbers: equal for equal numbers of one type."""
    kind = "float64" if data.dtype.kind == "f" else "uint64"
    numbers = np.ascontiguousarray(data, dtype=kind)
    return numbers.reshape(len(data), math.prod(data.shape[1:])).view("uint64")


def hashed(columns: Iterable[ndarray], units: ndarray, n_units: int) -> ndarray:
    """(units,) hashes of columns of their rows, (rows, ...) each, in the order of the rows.

    Not in the order of the columns, which may depend on what other columns a model needs.
    """
    total = np.zeros(n_units, dtype="uint64")
    for column in columns:
        own = np.zeros_like(total)
        _hash(bits_of(column), units, own)
        total += own
    return total


@compiled(error_model="numpy")
def fractions(hashes: ndarray) -> ndarray:
    """A hash, or an array of hashes, as numbers in [0, 1)."""
    return (hashes >> np.uint64(11)) * 2.0**-53


@compiled(error_model="numpy")
def mixed(bits: np.uint64) -> np.uint64:
    """A 64-bit hash: SplitMix64 (Steele, Lea and Flood 2014)."""
    x = np.uint64(bits) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled(error_model="numpy")
def _hash(bits: ndarray, units: ndarray, seeds: ndarray) -> None:
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            seeds[units[i]] = mixed(seeds[units[i]] ^ bits[i, j])
