"""Log-likelihood ratios of an exponential family, from noisy sums of its sufficient statistic.

With p(y|z) = h(y) exp(phi(z) . S(y) - A(z)), and S^ = sum_i S(y_i) + N(0, sd^2 I) released in
every iteration, the log ratio of two positions is released as

    (phi(z') - phi(z)) . S^ - n (A(z') - A(z)),

whose noise has standard deviation sd |phi(z') - phi(z)|: the same in both directions, as
:func:`pymc_dp.kernels.penalty.transition` demands.  Source: Yildirim & Ermis (2019), Exact MCMC
with differentially private moves, Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pymc_dp.kernels.interfaces import Array, Batch, StatisticQueries


@dataclass(frozen=True)
class StatisticRatios:
    """What the penalty method asks, answered from the sums of a statistic.

    `n` is the public number of records. Where it is not public, 1 is an entry of the statistic,
    -A(z) is one of the natural parameters, and `n` is 0.

    Guarantee: one release of the sums for each ratio.

    Assumptions: the noise of the sums is fresh at every call, of the stated size, and the same for
    all entries.

    Weaknesses: all entries get the same noise, in whatever units they are; the caller scales them.
    """

    queries: StatisticQueries
    natural: Callable[[Array], Array]  # z -> (..., m + 1): natural parameters phi(z), then -A(z)
    n: float

    def log_ratio(self, z_from: Array, z_to: Array) -> tuple[Batch, Batch]:
        """Noisy log-likelihood ratio, and the standard deviation of its noise."""
        value, noise_sd = self.queries.statistic()
        here = self.natural(z_from)
        change = self.natural(z_to) - here
        phi = change[..., :-1]
        with np.errstate(all="ignore"):  # an overflow is a rejection, not an error
            ratio: Batch = np.vecdot(phi, value) + self.n * change[..., -1]
            sd = noise_sd * np.sqrt(np.vecdot(phi, phi))
            usable = np.isfinite(ratio) & np.isfinite(sd)
            return np.where(usable, ratio, -np.inf), np.where(usable, sd, 0.0)


def releases() -> dict[str, int]:
    """Gaussian releases of one iteration, by query name."""
    return {"statistic": 1}


def start_releases() -> dict[str, int]:
    """Gaussian releases once per chain, by query name."""
    return {}
