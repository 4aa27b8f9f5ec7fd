"""Scores of units over the outcomes of all their terms at once.

A term is a row of an observed variable; choices of a unit with equal covariates are one term, with
a binomial outcome.  Outcomes of terms are independent given the parameters: their joint law is the
product of their laws (:mod:`pymc_dp.rows.law`), and the score of a unit the sum of theirs.  If
combinations of nodes are few, all are taken.  Else points of a lattice rule stand for them: each
term goes once through all strata of its law, in an order of its own.

The lattice of each term is shifted by a hash of the unit's own rows, in their order, so that errors
of units whose data differ do not add up.  Shared random numbers would let one row change what
others add; so would ids, which other units may decide.  Units with the same data share their error,
which matters where tens of thousands are alike.

Korobov, *Dokl. Akad. Nauk SSSR* 124 (1959): multipliers 1, a, a^2, ... modulo a prime.  Shifts:
Cranley and Patterson, *SIAM J. Numer. Anal.* 13 (1976).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy import ndarray

from pymc_dp.base.jit import compiled
from pymc_dp.rows import loops


def bits_of(data: ndarray) -> ndarray:
    """(rows, entries) uint64 of (rows, ...) numbers: equal for equal numbers of one type."""
    kind = "float64" if data.dtype.kind == "f" else "uint64"
    numbers = np.ascontiguousarray(data, dtype=kind)
    return numbers.reshape(len(data), math.prod(data.shape[1:])).view("uint64")


def hashed(columns: Iterable[ndarray], units: ndarray, n_units: int) -> ndarray:
    """(units,) hashes of (rows, ...) columns, in the order of rows and in any order of columns."""
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


POINTS = 1021  # of a lattice, a prime; also the most combinations: two laws of one mode have fewer
_ROOT = 327  # a primitive root of that prime, whose lattices are even in up to 10 dimensions


class JointPoints:
    """Scores of a block of units at points that stand for what they could observe.

    `scores`, (d, n), are those of what they do observe, `seeds`, (n,), hashes of their data, and
    `combinations`, (n,), numbers of combinations of nodes.  `vectors`, (n, k, d), are scores at the
    points; their `weights`, (n, k), add up to one, or are 0 where the law of a term is not found.
    """

    def __init__(self, scores: ndarray, seeds: ndarray, combinations: ndarray) -> None:
        d, n = scores.shape
        self.scores = scores
        self._every = combinations <= POINTS
        counts = np.where(self._every, combinations, POINTS).astype("int64")
        most = int(counts.max(initial=1))
        self.vectors = np.zeros((n, most, d))
        points = np.arange(most) < counts[:, None]
        self.weights = points / np.where(self._every, 1, POINTS)[:, None]
        self._counts, self._strides = counts, np.ones(n, dtype="int64")
        self._seeds = seeds

    @property
    def unknown(self) -> ndarray:
        """(n,): 1 where the law of a term is not found, else 0."""
        return np.subtract(1.0, self.weights.any(axis=1))

    def add(
        self, units: ndarray, times: ndarray, size: int, terms: tuple[ndarray, ndarray, ndarray]
    ) -> None:
        """Add terms, those of a unit in the order of its rows, of at most `size` nodes each.

        A row stands for `times` terms (:func:`repetitions`), with laws (nodes, rows), scores
        (nodes, K, rows) by what rows see, and directions (K, d, rows).
        """
        lattices = self._every, self._counts, self._seeds, self._strides
        _add_terms(units, times, size, terms, (*lattices, self.vectors, self.weights))

    def clipped(self, clip_norm: float) -> ndarray:
        """(d, n) clipped scores plus expected excess, with the mean score as control variate."""
        factors = np.empty(self.scores.shape[1])
        loops.clip_factors(self.scores, clip_norm, factors)
        total = self.scores * factors
        excess, mean, _, _, taken, square = self.moments(clip_norm)
        part = np.divide(taken, square, out=np.zeros_like(taken), where=square > 0.0)
        total += excess - part * mean
        return total

    def lost(self, clip_norm: float) -> ndarray:
        """(2 d, n): variances of what clipping takes, then its covariances with the score."""
        factors = np.empty(self.scores.shape[1])
        loops.clip_factors(self.scores, clip_norm, factors)
        mean, _, lost, shared, _, _ = self.moments(clip_norm)
        lost -= mean * mean
        taken = (1.0 - factors) * self.scores
        lost += self.unknown * taken * taken
        shared += self.unknown * taken * self.scores
        return np.concatenate([lost, shared])

    def moments(self, clip_norm: float) -> tuple[ndarray, ...]:
        """(d, n) means of e = g - clip(g), g, e * e, e * g by entry; (n,) means of e.g, |g|^2."""
        of_entries = np.zeros((4, *self.scores.shape))
        of_norms = np.zeros((2, len(self.weights)))
        _add_moments(self.vectors, self.weights, clip_norm, of_entries, of_norms)
        return *of_entries, *of_norms

    def norms(self) -> ndarray:
        """(2, n k) norms of the scores that units could have, and weights."""
        norms = np.sqrt(np.einsum("nkd,nkd->nk", self.vectors, self.vectors))
        return np.stack([norms.ravel(), self.weights.ravel()])


def repetitions(data: list[ndarray], units: ndarray) -> ndarray:
    """(rows,): how many rows of its unit have the same data, for the first of them; else 0."""
    numbers = np.hstack([units.astype("uint64")[:, None], *map(bits_of, data)])
    _, first, counts = np.unique(numbers, axis=0, return_index=True, return_counts=True)
    times = np.zeros(len(units), dtype="int64")
    times[first] = counts
    return times


@compiled(error_model="numpy")
def _strata(law: ndarray, place: float, out: ndarray) -> None:
    """The node at a place of each of equal strata of a law."""
    count, last = out.shape[0], 0
    for node in range(law.shape[0]):
        if law[node] > 0.0:
            last = node
    node, passed = 0, law[0]
    for j in range(count):
        while node < last and passed * count <= j + place:
            node += 1
            passed += law[node]
        out[j] = node


@compiled(error_model="numpy")
def _repeat(m: int, law: ndarray, terms: ndarray) -> None:
    """The law of how many of m equal choices are the second, and the sums of their scores."""
    for j in range(terms.shape[1]):
        first, second = terms[0, j], terms[1, j]
        for node in range(m + 1):
            terms[node, j] = (m - node) * first + node * second
    first, second = law[0], law[1]
    for node in range(m + 1):
        value = math.lgamma(m + 1.0) - math.lgamma(node + 1.0) - math.lgamma(m - node + 1.0)
        if node < m:
            value += (m - node) * math.log(first)
        if node > 0:
            value += node * math.log(second)
        law[node] = math.exp(value)


@compiled(error_model="numpy")
def _add_terms(
    units: ndarray,
    times: ndarray,
    size: int,
    added: tuple[ndarray, ndarray, ndarray],
    points: tuple[ndarray, ndarray, ndarray, ndarray, ndarray, ndarray],
) -> None:
    laws, scores, directions = added
    every, counts, seeds, strides, vectors, weights = points
    nodes, width, n = scores.shape
    d = directions.shape[1]
    longest = max(nodes, 2)
    for i in range(n):
        longest = max(longest, times[i] + 1)
    terms, law, filled = np.zeros((longest, d)), np.zeros(longest), 0
    chosen = np.empty(POINTS, dtype=np.int64)
    for i in range(n):
        if times[i] == 0:
            continue
        u = units[i]
        found = False
        terms[:filled] = 0.0
        law[:filled] = 0.0
        most, filled = size, nodes
        for node in range(nodes):
            law[node] = laws[node, i]
            # what a node without weight has may depend on whether other rows have weight there
            if law[node] > 0.0:
                found = True
                for a in range(width):
                    for j in range(d):
                        terms[node, j] += directions[a, j, i] * scores[node, a, i]
        if times[i] > 1:
            most, filled = times[i] + 1, max(nodes, times[i] + 1)
            _repeat(times[i], law, terms)
        if not found:
            weights[u] = 0.0
        elif every[u]:
            for k in range(counts[u]):
                node = k // strides[u] % most
                if node < longest:
                    weights[u, k] *= law[node]
                    for j in range(d):
                        vectors[u, k, j] += terms[node, j]
                else:
                    weights[u, k] = 0.0
            strides[u] *= most
        else:
            seeds[u] = mixed(seeds[u])
            shift = float(fractions(seeds[u])) * POINTS
            first = int(shift)
            _strata(law, shift - first, chosen)
            for k in range(POINTS):
                node = chosen[(k * strides[u] + first) % POINTS]
                for j in range(d):
                    vectors[u, k, j] += terms[node, j]
            strides[u] = strides[u] * _ROOT % POINTS


@compiled(error_model="numpy")
def _add_moments(
    vectors: ndarray, weights: ndarray, clip_norm: float, of_entries: ndarray, of_norms: ndarray
) -> None:
    n, count, d = vectors.shape
    sums = np.empty((d, 4))
    for i in range(n):
        sums[:] = 0.0
        for k in range(count):
            w, length = weights[i, k], 0.0
            if w == 0.0:
                continue
            for j in range(d):
                length += vectors[i, k, j] * vectors[i, k, j]
            norm = math.sqrt(length)
            part = 1.0 - clip_norm / norm if norm > clip_norm else 0.0  # that clipping takes
            if not norm < math.inf:
                part, length = 1.0, 0.0
            of_norms[0, i] += w * part * length
            of_norms[1, i] += w * length
            for j in range(d):
                sums[j, 1] += w * vectors[i, k, j]
            if part > 0.0:
                for j in range(d):
                    g = vectors[i, k, j]
                    e = part * g
                    sums[j, 0] += w * e
                    sums[j, 2] += w * e * e
                    sums[j, 3] += w * e * g
        for j in range(d):
            for m in range(4):
                of_entries[m, j, i] = sums[j, m]
