"""Answers about batches of the records."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pymc_dp import noise
from pymc_dp.clipping import clip_norm_sum, vector_bound
from pymc_dp.errors import PrivacyError
from pymc_dp.events import BatchEvent, FixedBatchGaussianEvent, GaussianEvent
from pymc_dp.mechanisms.queries import Path, Queries
from pymc_dp.metering import Meter
from pymc_dp.noise import rounded_normal
from pymc_dp.rows.engine import RowEngine

__all__ = ["COINS", "BatchQueries", "MomentQueries"]

#: Probabilities of being in a batch are multiples of 1 / COINS.
COINS = 2**32
#: Weight w of the squares beside the ratios: both fill the bound in a proportion of w to 1.  More
#: makes the variance of sampling better known and the ratio noisier, here by 12 %.
_SQUARES = 0.5


class BatchQueries(Queries):
    """Private answers about batches, drawn for each answer in a way that nobody knows.

    Parameters
    ----------
    engine : RowEngine
    meter : Meter
        Counts iterations; they were paid for together (`pymc_dp.plan.Batches`).
    event : SubsampledGaussianEvent or FixedBatchGaussianEvent
        Mechanism "gradient" or "log_ratio".  The sampling probability of a Poisson batch is a
        multiple of 1 / `COINS`; a batch of a fixed size is one of all units of the engine.
    clip_norm : float
        As in `Queries`.
    n_public : int
    likelihood_power : float, default 1.0
        Of the target, for "log_ratio".

    Notes
    -----
    *Guarantee.*  The contribution of a unit that is in the batch has norm at most C, and the noise
    has standard deviation ``noise_multiplier * C``, on the integer grid of `Queries`, whose
    sensitivity is here that of one unit in or out of the sum.  What neighbours are is for the
    accountant: if a unit is replaced, one contribution of norm C gives way to another.

    *Assumptions.*  As for `Queries`; batches stay secret.

    *Weaknesses.*  The time an answer takes tells the size of a Poisson batch.
    """

    def __init__(
        self,
        engine: RowEngine,
        meter: Meter,
        event: BatchEvent,
        clip_norm: float,
        n_public: int,
        likelihood_power: float = 1.0,
    ) -> None:
        name = event.mechanism
        super().__init__(
            engine,
            meter,
            {name: GaussianEvent(name, event.noise_multiplier)},
            {name: 1},
            {},
            {name: clip_norm},
            "add_or_remove_one",
            n_public,
        )
        self.event = event
        self.probability = event.sampling_probability
        self.likelihood_power = likelihood_power
        if isinstance(event, FixedBatchGaussianEvent):
            if event.n_units != engine.n_units:
                raise PrivacyError("Batches of a fixed size were accounted for another data set.")
        elif not (self.probability * COINS).is_integer():
            raise ValueError("The sampling probability must be a multiple of 2^-32.")

    @property
    def gradient_noise_sd(self) -> float:
        """Standard deviation of the noise on each entry of a gradient answer."""
        return super().gradient_noise_sd / self.probability

    def gradient(self, z: np.ndarray) -> np.ndarray:
        """(d,) estimate of the sum of clipped scores: noisy, that of a batch / its probability."""
        self._use("gradient")
        return self._gradient(z, self._batch())[0] / self.probability

    def log_ratio(self, z_from: np.ndarray, z_to: np.ndarray) -> tuple[float, float]:
        """Estimate of the tempered log-likelihood ratio, less half its sampling variance.

        Returns
        -------
        value : float
            sum over the batch of T r / q - T^2 (1 - q) r^2 / (2 q^2), plus noise; r are the ratios,
            clipped to c = clip_norm |z_to - z_from|, q is the probability and T the power.
        noise_sd : float
            That of the privacy noise alone.

        Notes
        -----
        A sum of T r / q over a Poisson batch has the mean sum T r over all records and a variance
        of T^2 (1 - q) / q sum r^2, of which T^2 (1 - q) / q^2 sum r^2 over the batch is an unbiased
        estimate.  If the sum is about normal, subtracting half of that is the penalty for sampling.
        One unit in or out of the batch changes the value by at most
        C = T c / q + T^2 (1 - q) c^2 / (2 q^2), at r = -c.

        With B of n records, q = B / n, and 1 - q corrects for a finite population.  The variance
        is then T^2 (1 - q) / q times n / (n - 1) times the sum of squares about the mean; what is
        taken off for it is too much by (sum T r)^2 (1 - q) / (2 B), which is small beside 1 where
        a proposal may be accepted, and is the price of terms that hold one record each.
        """
        self._use("log_ratio")
        ratios, c = self._clipped_ratios(z_from, z_to)
        linear = self.likelihood_power / self.probability
        square = 0.5 * linear**2 * (1.0 - self.probability)
        bound = linear * c + square * c**2
        with np.errstate(all="ignore"):
            values = linear * ratios - square * ratios**2
            return self._interval_sum("log_ratio", values, -bound, bound)

    @property
    def ratio_noise_sd(self) -> float:
        """Privacy noise of a ratio per unit of distance, for small distances and power 1."""
        multiplier = self.events["log_ratio"].noise_multiplier
        return multiplier * self.clip_norms["log_ratio"] / self.probability

    def _clipped_ratios(self, z_from: np.ndarray, z_to: np.ndarray) -> tuple[np.ndarray, float]:
        """Log-likelihood ratios of the records of a new batch, within -c and c; and c."""
        c = self.clip_norms["log_ratio"] * float(np.linalg.norm(z_to - z_from))
        batch = self._batch()
        if batch is None:
            return np.zeros(0), c
        with np.errstate(all="ignore"):
            ratios = batch.log_likelihood(z_to) - batch.log_likelihood(z_from)
        return np.clip(ratios, -c, c), c

    def path(self, z_start: np.ndarray) -> Path:
        """Refused: a path reads all records, which the noise of a batch does not protect."""
        raise PrivacyError("A path was asked for on batches, which pay for no other answer.")

    def _batch(self) -> RowEngine | None:
        """The records of a new batch; None if it is empty."""
        engine, event = self.engine, self.event
        assert isinstance(engine, RowEngine)
        if isinstance(event, FixedBatchGaussianEvent):
            return engine.part(noise.subset(engine.n_units, event.batch_size))
        drawn = np.flatnonzero(noise.coins(engine.n_units, int(self.probability * COINS)))
        return engine.part(drawn) if len(drawn) else None


class MomentQueries(BatchQueries):
    """Answers about batches that give the sampling variance of a ratio apart, for Barker's test.

    Notes
    -----
    *Guarantee.*  As for `BatchQueries`, for one vector with two entries.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # refuse a grid that is too coarse before anything is charged
        self._bound = vector_bound(self.grids["log_ratio"].norm_bound(self.neighboring), 2)

    def compile(self) -> None:
        """As `Queries.compile`."""
        super().compile()
        self._add_up(np.zeros((2, 1)), 1.0)

    @property
    def ratio_noise_sd(self) -> float:
        """Privacy noise of a ratio per unit of distance, for power 1."""
        return super().ratio_noise_sd * math.hypot(1.0, _SQUARES)

    def log_ratio(self, z_from: np.ndarray, z_to: np.ndarray) -> tuple[float, float]:
        """Estimate of the tempered log-likelihood ratio, and of all the noise that it has.

        Returns
        -------
        value : float
            sum over the batch of T r / q, plus noise; r are the ratios, clipped to
            c = clip_norm |z_to - z_from|, q is the probability and T the power.
        noise_sd : float
            (s^2 + v)^(1/2), with s the standard deviation of the privacy noise and v an estimate of
            the variance of sampling; 0 if the sum is negative.

        Notes
        -----
        A record of the batch adds the vector (T / q) (r, w r^2 / c), whose norm is at most
        C = (T c / q) (1 + w^2)^(1/2), attained at r = -c and c: one Gaussian release with noise
        s = noise_multiplier C on both entries.  From the second follows
        v = T^2 (1 - q) / q^2 sum r^2, whose mean is the sampling variance of the first under
        Poisson sampling (for batches of a fixed size see `BatchQueries.log_ratio`).  Its own
        privacy noise has the standard deviation (1 - q) (T c / q) s / w, so v may be negative.  It
        is not cut off at 0: that would bias the total upwards, by 0.4 of this noise where there is
        little sampling variance.
        """
        self._use("log_ratio")
        ratios, c = self._clipped_ratios(z_from, z_to)
        linear = self.likelihood_power / self.probability
        bound = linear * c * math.hypot(1.0, _SQUARES)
        if (told := self._without_sum("log_ratio", bound)) is not None:
            return told, 0.0
        with np.errstate(all="ignore"):
            vectors = linear * np.stack([ratios, (_SQUARES / c * ratios) * ratios])
            value, squares = self._add_up(vectors, bound)
        noise_sd = self.events["log_ratio"].noise_multiplier * bound
        sampling = (1.0 - self.probability) * linear * (c / _SQUARES) * squares
        return value, math.sqrt(max(noise_sd**2 + sampling, 0.0))

    def _add_up(self, vectors: np.ndarray, bound: float) -> list[float]:
        """Noisy sum of vectors of two entries and norms of at most a bound, one per column."""
        grid = self.grids["log_ratio"]
        unit = grid.unit(bound)
        total = rounded_normal(2, grid.log2_sigma)
        clip_norm_sum(vectors, 1.0 / unit, self._bound, total, np.empty(vectors.shape[1]))
        return [float(entry) for entry in total * unit]
