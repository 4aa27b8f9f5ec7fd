"""What a kernel may ask, and what kernels share.

Every vector is ``(..., d)`` and every scalar ``(...)``, with the same leading batch axes throughout
one call; a single chain has none. Positions are in the scaled coordinates z in which gradients are
clipped (theta = m + A z).

Every answer is already clipped record by record, summed over records, noised and charged; the noise
is Gaussian, fresh at every call and independent of everything else. A kernel passes finite
positions only. Where the proposal of a batch member has failed, the kernel asks about the current
position instead (a log ratio with ``z_to == z_from``) and ignores the answer, so that each
iteration makes the same number of releases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Batch: TypeAlias = float | Array  # one number per chain, shape (...); a plain float without batch
Mask: TypeAlias = np.bool_ | npt.NDArray[np.bool_]  # one truth value per chain, shape (...)


class Prior(Protocol):
    """The public part of the log posterior: prior, Jacobians, public likelihood terms, a known
    tilt.
    """

    def log_density(self, z: Array) -> Batch:
        """Log density at ``z`` up to a constant, shape ``(...)``."""

    def gradient(self, z: Array) -> Array:
        """Gradient of `log_density`, shape ``(..., d)``."""


class LogRatioQueries(Protocol):
    """Noisy differences of the log-likelihood between two positions."""

    def log_ratio(self, z_from: Array, z_to: Array) -> tuple[Batch, Batch]:
        """Noisy sum over records of the clipped log-likelihood ratio, and noise_sd. noise_sd and
        the clip are symmetric in the two positions: the penalty method is exact only then.
        """


class GradientQueries(Protocol):
    """Noisy scores."""

    @property
    def gradient_noise_sd(self) -> float:
        """Standard deviation of the noise on each coordinate of one gradient release."""

    def gradient(self, z: Array) -> Array:
        """Sum over records of the clipped log-likelihood gradient at ``z``, plus noise."""


class HamiltonianQueries(LogRatioQueries, GradientQueries, Protocol):
    """What the Hamiltonian kernel asks."""


class Path(Protocol):
    """Questions along one trajectory; keeps per-record accumulators that stay private."""

    def gradient(self, z: Array, mid: Array) -> Array:
        """Sum over records of the clipped log-likelihood gradient at ``mid``, plus noise.

        The path has come to ``z``.  Where it has come at the next question, z', record i's account
        receives clip(g_i(mid)) . (z' - z).  The gradient is the true clipped one: the released one
        is correlated with the path, and would make the accept test invalid.  Arrays are kept, not
        copied: they must not change until the path ends.
        """

    def energy_error(self, z_end: Array, lower: Batch, upper: Batch) -> tuple[Batch, Batch]:
        """Noisy sum over records of e_i clipped to [lower, upper], and noise_sd. e_i = l_i(z_end) -
        l_i(z_start) - account_i. [-upper, -lower] would give the same noise_sd.
        """


class PathQueries(Protocol):
    """What the Langevin kernel asks."""

    @property
    def gradient_noise_sd(self) -> float:
        """Standard deviation of the noise on each coordinate of one gradient release."""

    def path(self, z_start: Array) -> Path:
        """Begin a trajectory at ``z_start``: the start of the last one, or its end if accepted."""


class StatisticQueries(Protocol):
    """Noisy sums of a sufficient statistic: every time the same sums, with other noise."""

    def statistic(self) -> tuple[Array, Batch]:
        """Noisy sum over records of the bounded statistic, ``(..., m)``, and noise_sd of every
        entry.
        """


ClipInterval: TypeAlias = Callable[[Batch, Batch], tuple[Batch, Batch]]
"""Interval [lower, upper] to which the energy errors of a path are clipped, a function of released
quantities: of D = sum |delta_j|^2 and D' = sum |delta'_j|^2. Reversing the path swaps the arguments
and must turn [lower, upper] into [-upper, -lower].
"""


class Proposed(NamedTuple):
    """A proposal."""

    z: Array  # (..., d)
    log_ratio: Batch  # log q(z | z') - log q(z' | z), shape (...)
    turned: Array  # (..., d): directions that the chain goes on with after a rejection


Proposal: TypeAlias = Callable[[np.random.Generator, Array, Array], Proposed]
"""Proposes from a position and directions, (..., d) of 1 or -1, without a look at the data."""
AcceptTest: TypeAlias = Callable[
    [np.random.Generator, Mask, Batch, Batch, Batch], tuple[Mask, Batch]
]
"""Decides on a proposal from the noisy answer alone, as `penalty_test` does, whose arguments and
values it has.
"""


# -- over batch axes -------------------------------------------------------------------------------


#: Whether something holds for all coordinates, (..., d) to (...).
every: Callable[[npt.NDArray[np.bool_]], Mask] = partial(np.logical_and.reduce, axis=-1)


def select(mask: Mask, yes: Array, no: Array) -> Array:
    """Vectors of ``yes`` where the mask holds, of ``no`` elsewhere."""
    if isinstance(mask, bool | np.bool_):
        return yes if mask else no
    return np.where(mask[..., None], yes, no)


def start_log_prior(z: Array, prior: Prior) -> Array:
    """Log prior density of a start position; a chain cannot leave a point of density zero."""
    log_prior = np.asarray(prior.log_density(z), dtype=float)
    if not (np.isfinite(z).all() and np.isfinite(log_prior).all()):
        raise ValueError(
            "The start position `z` or its log prior density is not finite; "
            "start the chain inside the support of the prior."
        )
    return log_prior


# -- the penalty method: Ceperley & Dewing (1999) --------------------------------------------------


def penalty_test(
    rng: np.random.Generator, possible: Mask, value: Batch, noise_sd: Batch, public: Batch
) -> tuple[Mask, Batch]:
    """Accept when log u < value + public - noise_sd^2 / 2; returns decisions and right-hand side.

    `value` is the released log ratio, R + N(0, noise_sd^2), `public` the public part. Where
    `possible` is False the proposal is rejected whatever the released value.

    *Guarantee.* With lambda = R + public odd and noise_sd even under exchange of current and
    proposed state, detailed balance holds exactly: E min(1, exp(lambda + xi - s^2/2)) = exp(lambda)
    E min(1, exp(-lambda + xi - s^2/2)) for xi ~ N(0, s^2).
    """
    log_accept = value + public - 0.5 * np.square(noise_sd)
    log_u = -rng.standard_exponential(np.shape(possible))
    return possible & (log_u < log_accept), log_accept


# -- step sizes: Owen (2017); Hoffman, Radul & Sountsov (2021) for Hamiltonian trajectories --------


@dataclass(frozen=True, slots=True)
class HaltonJitter:
    """Multipliers 1 + width * (2 u_t - 1), u_t the t-th van der Corput point (0, 1/2, 1/4, 3/4,
    1/8, ...) + `shift`, modulo 1; a random `shift` makes the sequence one of its own.

    *Guarantee.* The multiplier depends on the iteration only, never on the state, so a kernel that
    leaves the posterior stationary at every step size still does.
    """

    width: float
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.width < 1.0:
            raise ValueError(
                f"The jitter `width` must be in [0, 1) so that step sizes stay positive, "
                f"got {self.width}."
            )

    def __call__(self, iteration: int) -> float:
        """Multiplier for the given iteration, counted from 0."""
        point = int(f"{iteration:b}"[::-1], 2) / 2.0 ** iteration.bit_length()
        u = (point + self.shift) % 1.0
        return 1.0 + self.width * (2.0 * u - 1.0)
