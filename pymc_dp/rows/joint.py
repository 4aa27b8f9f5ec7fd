"""Scores of units over the outcomes of all their terms at once.

A term is a row of an observed variable.  The score of a unit is the sum of those of its terms,
whose outcomes are independent given the parameters, so that their joint law is the product of
their laws (:mod:`pymc_dp.rows.law`).  Where a unit has few combinations of nodes, all of them are
taken.  Elsewhere points of a lattice rule stand for them: each term goes once through all strata of
its law, and in another order than the terms before.

The lattice of each term is shifted by a hash of the bits of the unit's own score.  So errors of
units whose scores differ do not add up, and all is a function of the unit's own rows, in their
order, and of constants.  Random numbers that units share would let one unit change what all others
add.  Units with the same score have the same error: where a unit has more combinations than points,
and scores have few values (counts or choices without a covariate that is continuous), errors add
up, and no interval covers them.  There the sum of 20,000 units was off by up to 0.8 posterior sds.

Notes
-----
Korobov, *Dokl. Akad. Nauk SSSR* 124 (1959): multipliers 1, a, a^2, ... modulo a prime.  Shifts:
Cranley and Patterson, *SIAM J. Numer. Anal.* 13 (1976).
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from pymc_dp._jit import compiled

__all__ = ["POINTS", "JointPoints"]

#: Points of a lattice, a prime, and so many combinations at most: two laws without a mixture have
#: fewer.
POINTS = 1021
#: A primitive root of that prime, whose lattices are even in up to 10 dimensions.
_ROOT = 327


class JointPoints:
    """Scores of a block of units at points that stand for what they could observe.

    Parameters
    ----------
    scores : (d, n) ndarray
        Of what they do observe.
    combinations : (n,) ndarray
        How many combinations of nodes each unit has.

    Attributes
    ----------
    scores : (d, n) ndarray
    vectors : (n, k, d) ndarray
        Scores at the points.
    weights : (n, k) ndarray
        They add up to one; all are 0 where the law of a term is not found.
    """

    def __init__(self, scores: ndarray, combinations: ndarray) -> None:
        d, n = scores.shape
        self.scores = scores
        self._every = combinations <= POINTS
        counts = np.where(self._every, combinations, POINTS).astype("int64")
        most = int(counts.max(initial=1))
        self.vectors = np.zeros((n, most, d))
        points = np.arange(most) < counts[:, None]
        self.weights = points / np.where(self._every, 1, POINTS)[:, None]
        self._counts, self._strides = counts, np.ones(n, dtype="int64")
        bits = np.ascontiguousarray(scores, dtype="float64").view("uint64")
        self._seeds = _hashes(bits)

    @property
    def unknown(self) -> ndarray:
        """(n,): 1 where the law of a term is not found, else 0."""
        return np.subtract(1.0, self.weights.any(axis=1))

    def add(
        self, units: ndarray, size: int, weights: ndarray, scores: ndarray, directions: ndarray
    ) -> None:
        """Add terms, those of a unit in the order of its rows.

        Parameters
        ----------
        units : (rows,) ndarray
        size : int
            Nodes that any of these terms may have.
        weights : (nodes, rows) ndarray
            Their laws.
        scores : (nodes, K, rows) ndarray
            By what rows see.
        directions : (K, d, rows) ndarray
        """
        _add_terms(
            units,
            size,
            weights,
            scores,
            directions,
            self._every,
            self._counts,
            self._seeds,
            self._strides,
            self.vectors,
            self.weights,
        )

    def moments(self, clip_norm: float) -> tuple[ndarray, ...]:
        """Means of e = g - clip(g), g, e * e and e * g, entry by entry, (d, n); of e.g and |g|^2.

        The last two, (n,), are what clipping takes of the squared norm, and all of it.
        """
        of_entries = np.zeros((4, *self.scores.shape))
        of_norms = np.zeros((2, len(self.weights)))
        _add_moments(self.vectors, self.weights, clip_norm, *of_entries, *of_norms)
        return *of_entries, *of_norms

    def norms(self) -> ndarray:
        """(n, k) norms of the scores."""
        out = np.empty(self.weights.shape)
        _norms(self.vectors, out)
        return out


@compiled(error_model="numpy")
def _mixed(bits: np.uint64) -> np.uint64:
    """A 64-bit hash: SplitMix64 (Steele, Lea and Flood 2014)."""
    x = np.uint64(bits) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled(error_model="numpy")
def _hashes(bits: ndarray) -> ndarray:
    """A hash of each column."""
    d, n = bits.shape
    out = np.zeros(n, dtype=np.uint64)
    for j in range(d):
        for i in range(n):
            out[i] = _mixed(out[i] ^ bits[j, i])
    return out


@compiled(error_model="numpy")
def _strata(weights: ndarray, i: int, place: float, out: ndarray) -> None:
    """The node of row i at a place of each of equal strata of its law."""
    count, last = out.shape[0], 0
    for node in range(weights.shape[0]):
        if weights[node, i] > 0.0:
            last = node
    node, passed = 0, weights[0, i]
    for j in range(count):
        while node < last and passed * count <= j + place:
            node += 1
            passed += weights[node, i]
        out[j] = node


@compiled(error_model="numpy")
def _add_terms(
    units: ndarray,
    size: int,
    laws: ndarray,
    scores: ndarray,
    directions: ndarray,
    every: ndarray,
    counts: ndarray,
    seeds: ndarray,
    strides: ndarray,
    vectors: ndarray,
    weights: ndarray,
) -> None:
    nodes, width, n = scores.shape
    d = directions.shape[1]
    terms, chosen = np.empty((nodes, d)), np.empty(POINTS, dtype=np.int64)
    for i in range(n):
        u = units[i]
        found = False
        for node in range(nodes):
            found = found or laws[node, i] > 0.0
            for j in range(d):
                terms[node, j] = 0.0
            for a in range(width):
                for j in range(d):
                    terms[node, j] += directions[a, j, i] * scores[node, a, i]
        if not found:
            weights[u] = 0.0
        elif every[u]:
            for k in range(counts[u]):
                node = k // strides[u] % size
                if node < nodes:
                    weights[u, k] *= laws[node, i]
                    for j in range(d):
                        vectors[u, k, j] += terms[node, j]
                else:
                    weights[u, k] = 0.0
            strides[u] *= size
        else:
            seeds[u] = _mixed(seeds[u])
            shift = (seeds[u] >> np.uint64(11)) * 2.0**-53 * POINTS
            first = int(shift)
            _strata(laws, i, shift - first, chosen)
            for k in range(POINTS):
                node = chosen[(k * strides[u] + first) % POINTS]
                for j in range(d):
                    vectors[u, k, j] += terms[node, j]
            strides[u] = strides[u] * _ROOT % POINTS


@compiled(error_model="numpy")
def _norms(vectors: ndarray, out: ndarray) -> None:
    n, count, d = vectors.shape
    for i in range(n):
        for k in range(count):
            square = 0.0
            for j in range(d):
                square += vectors[i, k, j] * vectors[i, k, j]
            out[i, k] = math.sqrt(square)


@compiled(error_model="numpy")
def _taken(vector: ndarray, clip_norm: float) -> tuple[float, float]:
    """The part of a vector that clipping takes, and its squared norm; all if that is infinite."""
    square = 0.0
    for j in range(vector.shape[0]):
        square += vector[j] * vector[j]
    norm = math.sqrt(square)
    if not norm < math.inf:
        return 1.0, 0.0
    return (1.0 - clip_norm / norm if norm > clip_norm else 0.0), square


@compiled(error_model="numpy")
def _add_moments(
    vectors: ndarray,
    weights: ndarray,
    clip_norm: float,
    excess: ndarray,
    mean: ndarray,
    squares: ndarray,
    products: ndarray,
    taken: ndarray,
    square: ndarray,
) -> None:
    n, count, d = vectors.shape
    for i in range(n):
        for k in range(count):
            w = weights[i, k]
            if w == 0.0:
                continue
            part, length = _taken(vectors[i, k], clip_norm)
            square[i] += w * length
            taken[i] += w * part * length
            for j in range(d):
                g = vectors[i, k, j]
                e = part * g
                excess[j, i] += w * e
                mean[j, i] += w * g
                squares[j, i] += w * e * e
                products[j, i] += w * e * g
