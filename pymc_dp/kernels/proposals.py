"""Ways to propose a new position that look at no record.

Each has a `scale`: a float, or an array (d,) with one entry per coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pymc_dp.kernels.interfaces import Array, Proposed


@dataclass(frozen=True, slots=True)
class GaussianProposal:
    """Random walk z' = z + scale * N(0, I); symmetric."""

    scale: float | Array

    def __call__(self, rng: np.random.Generator, z: Array, direction: Array) -> Proposed:
        """All coordinates move."""
        return Proposed(z + self.scale * rng.standard_normal(z.shape), 0.0, direction)


@dataclass(frozen=True, slots=True)
class OneComponentProposal:
    """Random walk of one coordinate, chosen at random, by scale * N(0, 1); symmetric.

    The move is shorter by a factor of sqrt(d) than one of all coordinates with the same scale, and
    so is the noise of its log-likelihood ratio (Yildirim & Ermis 2019, section 3.1).
    """

    scale: float | Array

    def __call__(self, rng: np.random.Generator, z: Array, direction: Array) -> Proposed:
        """One coordinate moves."""
        step = self.scale * rng.standard_normal(z.shape)
        return Proposed(z + np.where(_one(rng, z), step, 0.0), 0.0, direction)


@dataclass(frozen=True, slots=True)
class GuidedProposal:
    """Guided walk: one coordinate goes on in its own direction until a move is rejected.

    The length of the step is scale * |N(0, 1)|. Every coordinate carries a direction of 1 or -1,
    kept where it moved and turned round where it did not (Gustafson 1998; Yildirim & Ermis 2019).
    The stationary distribution of position and directions is the posterior times fair coins: a move
    and its reverse, with the direction turned round, are proposed with the same density, and the
    accept test satisfies detailed balance in the positions.
    """

    scale: float | Array

    def __call__(self, rng: np.random.Generator, z: Array, direction: Array) -> Proposed:
        """One coordinate moves in its direction."""
        one = _one(rng, z)
        step = self.scale * np.abs(rng.standard_normal(z.shape))
        return Proposed(
            z + np.where(one, direction * step, 0.0), 0.0, np.where(one, -direction, direction)
        )


@dataclass(frozen=True, slots=True)
class IndependenceProposal:
    """Draws from a fixed distribution about z = 0, wherever the chain is.

    A multivariate Student t with 5 degrees of freedom, whose tails are heavier than those of most
    posteriors. In learned coordinates, where the posterior is about N(0, I), it was itself released
    before. The moves are long, and so is the noise of their ratios: for large budgets.
    """

    scale: float | Array

    def __call__(self, rng: np.random.Generator, z: Array, direction: Array) -> Proposed:
        """A new position, whatever the old one."""
        mixing = np.sqrt(rng.chisquare(_FREEDOM, z.shape[:-1]) / _FREEDOM)
        new = self.scale * rng.standard_normal(z.shape) / mixing[..., None]
        return Proposed(new, self._log_density(z) - self._log_density(new), direction)

    def _log_density(self, z: Array) -> Array:
        square = np.square(z / self.scale).sum(axis=-1)
        log_density: Array = -0.5 * (_FREEDOM + z.shape[-1]) * np.log1p(square / _FREEDOM)
        return log_density


_FREEDOM = 5.0


def _one(rng: np.random.Generator, z: Array) -> Array:
    """One-hot masks of a coordinate for each chain, (..., d)."""
    chosen = rng.integers(0, z.shape[-1], z.shape[:-1])
    mask: Array = np.arange(z.shape[-1]) == np.asarray(chosen)[..., None]
    return mask
