"""The loops over records: one decision each, with the sum over all records kept up to date.

They are compiled for the density of the releases of one model, once per process and not cached on
disk: each function only when it is called first.

What the loops share: `rows` (n, M) float64 are what each record adds to the sum, and are kept up to
date. `total` (M + P,) float64 is the sum of the rows of the first `n_present` records, kept up to
date, and then what was published. Records from `n_present` on add nothing to the sum. `uniforms`
are uniform random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from pymc_dp.base.jit import compiled


class Loops:
    """The loops for one density.

    ``log_density(total)`` is a compiled function: it gives a tuple of one array of one number.
    """

    def __init__(self, log_density: Callable[[np.ndarray], Any]) -> None:
        @njit(nogil=True, error_model="numpy")
        def density(total: np.ndarray) -> float:
            found = log_density(total)[0].item()
            return found if not math.isnan(found) else -math.inf

        self.density = density
        self.replace_one_by_one = _replace_one_by_one(density)
        self.choose_cells = _choose_cells(density)
        self.swap_offers = _swap_offers(density)
        self.births_and_deaths = _births_and_deaths(density)


@compiled(error_model="numpy")
def _exponentiate(weights: np.ndarray, highest: float) -> float:
    """Turn logarithms into weights relative to `highest`, in place; returns their sum."""
    mass = 0.0
    for c in range(weights.shape[0]):
        weights[c] = math.exp(weights[c] - highest)
        mass += weights[c]
    return mass


@compiled(error_model="numpy")
def _pick(weights: np.ndarray, left: float) -> int:
    """The first place at which the weights so far pass `left`, or the last of positive weight."""
    place = -1
    for c in range(weights.shape[0]):
        if weights[c] > 0.0:
            place = c
            left -= weights[c]
            if left < 0.0:
                break
    return place


def _replace_one_by_one(density: Callable[[np.ndarray], float]) -> Any:
    @njit(nogil=True, error_model="numpy")
    def replace_one_by_one(
        rows: np.ndarray,
        proposed: np.ndarray,
        log_ratio: np.ndarray,
        total: np.ndarray,
        log_uniform: np.ndarray,
        n_present: int,
        accepted: np.ndarray,
    ) -> tuple[int, float]:
        """Offer every record its proposal, in turn (Ju et al. 2022, Algorithm 1, step 2).

        `proposed` (n, M) is what the proposals would add, `log_ratio` (n,) all of the acceptance
        ratios but the densities of the releases, and `log_uniform` (n,) logarithms of uniform
        numbers. `accepted` (n,) receives the decisions.

        Returns how many were accepted, and the smallest log acceptance probability.
        """
        width = rows.shape[1]
        moved = total.copy()
        current = density(total)
        n_accepted, lowest = 0, 0.0
        for i in range(rows.shape[0]):
            new = current
            if i < n_present and width > 0:
                for k in range(width):
                    moved[k] = total[k] - rows[i, k] + proposed[i, k]
                new = density(moved)
            log_alpha = new - current + log_ratio[i]
            accepted[i] = log_uniform[i] < log_alpha
            if log_alpha < lowest:
                lowest = log_alpha
            if accepted[i]:
                n_accepted += 1
                for k in range(width):
                    rows[i, k] = proposed[i, k]
                    if i < n_present:
                        total[k] = moved[k]
                current = new
        return n_accepted, lowest

    return replace_one_by_one


def _choose_cells(density: Callable[[np.ndarray], float]) -> Any:
    @njit(nogil=True, error_model="numpy")
    def choose_cells(
        rows: np.ndarray,
        cells: np.ndarray,
        log_weights: np.ndarray,
        total: np.ndarray,
        uniforms: np.ndarray,
        n_present: int,
        chosen: np.ndarray,
    ) -> int:
        """Draw every record's cell from its full conditional distribution, in turn.

        `cells` (C, n, M) is what each record would add in each cell, and `log_weights` (C, n) the
        log-probability of each cell but for the releases; `uniforms` is (n,). `chosen` (n,) int64
        holds the current cells, and receives the new ones.

        Returns how many records changed.
        """
        n_cells, width = cells.shape[0], rows.shape[1]
        moved, weights = total.copy(), np.empty(n_cells)
        changed = 0
        for i in range(rows.shape[0]):
            highest = -math.inf
            for c in range(n_cells):
                weights[c] = log_weights[c, i]
                if i < n_present and width > 0 and weights[c] > -math.inf:
                    for k in range(width):
                        moved[k] = total[k] - rows[i, k] + cells[c, i, k]
                    weights[c] += density(moved)
                if weights[c] > highest:
                    highest = weights[c]
            if highest == -math.inf:
                continue
            mass = _exponentiate(weights, highest)
            cell = _pick(weights, uniforms[i] * mass)
            changed += cell != chosen[i]
            chosen[i] = cell
            for k in range(width):
                if i < n_present:
                    total[k] += cells[cell, i, k] - rows[i, k]
                rows[i, k] = cells[cell, i, k]
        return changed

    return choose_cells


def _swap_offers(density: Callable[[np.ndarray], float]) -> Any:
    @njit(nogil=True, error_model="numpy")
    def swap_offers(
        rows: np.ndarray,
        offers: np.ndarray,
        total: np.ndarray,
        uniforms: np.ndarray,
        n_present: int,
        places: np.ndarray,
    ) -> tuple[int, float]:
        """Offer single proposals to all records at once (Xiong & Ju 2025, SOMA).

        `offers` (k, M) is what each offer would add; `uniforms` is (k, 2). Only the first
        `n_present` records are offered anything. `places` (k,) int64 receives the record that each
        offer replaced, or -1.

        Returns how many were accepted, and the smallest log acceptance probability.
        """
        width = rows.shape[1]
        moved, weights = total.copy(), np.empty(n_present)
        n_accepted, lowest = 0, 0.0
        current = density(total)
        for o in range(offers.shape[0]):
            highest = current
            for i in range(n_present):
                for k in range(width):
                    moved[k] = total[k] - rows[i, k] + offers[o, k]
                weights[i] = density(moved)
                highest = max(highest, weights[i])
            mass = _exponentiate(weights, highest)
            places[o] = -1
            if not mass > 0.0:
                lowest = -math.inf
                continue
            place = _pick(weights, uniforms[o, 0] * mass)
            others = mass - weights[place] + math.exp(current - highest)
            log_alpha = math.log(mass) - math.log(others) if others > 0.0 else math.inf
            lowest = min(lowest, log_alpha)
            if math.log(uniforms[o, 1]) < log_alpha:
                n_accepted += 1
                places[o] = place
                for k in range(width):
                    total[k] += offers[o, k] - rows[place, k]
                    rows[place, k] = offers[o, k]
                current = density(total)
        return n_accepted, lowest

    return swap_offers


def _births_and_deaths(density: Callable[[np.ndarray], float]) -> Any:
    @njit(nogil=True, error_model="numpy")
    def births_and_deaths(
        rows: np.ndarray,
        total: np.ndarray,
        log_prior: np.ndarray,
        n_present: int,
        uniforms: np.ndarray,
        exchangeable: bool,
        order: np.ndarray,
    ) -> int:
        """Moves of the number of records by one, up or down.

        `log_prior` (n + 1,) is the log-probability of 0, ..., n records; `uniforms` is (moves, 3).
        If the records are `exchangeable`, any of them may be the one that leaves or comes; else it
        is the last or the next. `order` (n,) int64 is the place of each record, and is reordered
        like the rows.

        Returns the new number of records.
        """
        n, width = rows.shape
        moved = total.copy()
        current = density(total)
        for m in range(uniforms.shape[0]):
            birth = uniforms[m, 0] < 0.5
            if (birth and n_present == n) or (not birth and n_present == 0):
                continue
            place = n_present if birth else n_present - 1
            if exchangeable:
                low, high = (n_present, n) if birth else (0, n_present)
                other = min(low + int(uniforms[m, 1] * (high - low)), high - 1)
                order[place], order[other] = order[other], order[place]
                for k in range(width):
                    rows[place, k], rows[other, k] = rows[other, k], rows[place, k]
            sign = 1.0 if birth else -1.0
            for k in range(width):
                moved[k] = total[k] + sign * rows[place, k]
            new = density(moved)
            following = n_present + 1 if birth else n_present - 1
            log_alpha = new - current + log_prior[following] - log_prior[n_present]
            if math.log(uniforms[m, 2]) < log_alpha:
                n_present, current = following, new
                total[:] = moved
        return n_present

    return births_and_deaths
