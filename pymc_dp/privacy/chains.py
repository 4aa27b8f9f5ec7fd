"""Answers for a chain, paid for by whole iterations.

A query raises unless an iteration that pays for it has begun (:meth:`Queries.begin_iteration`), so
no record is read before the ledger has been charged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pymc_dp.base.checks import Neighboring
from pymc_dp.errors import PrivacyError
from pymc_dp.privacy import noise
from pymc_dp.privacy.accounting import BatchEvent, FixedBatchGaussianEvent, GaussianEvent
from pymc_dp.privacy.answer import (
    Grid,
    IntervalSum,
    Query,
    Receipt,
    VectorSum,
)
from pymc_dp.privacy.holder import COINS, holder_of, rehearse
from pymc_dp.privacy.meter import Meter
from pymc_dp.privacy.queries import (
    Contribution,
    EnergyError,
    Kick,
    LogRatio,
    OfBatch,
    RatioMoments,
    Rows,
    ScoreAt,
    TemperedRatio,
)

#: Weight w of the squares beside the ratios: both fill the bound in a proportion of w to 1.  More
#: makes the variance of sampling better known and the ratio noisier, here by 12 %.
_SQUARES = 0.5


class Queries:
    """Private answers about the records of one model, for one chain.

    `events` and `clip_norms` are by mechanism: "gradient" (bound on the l2 norm of one unit's score
    in z), "log_ratio" (on the change of its log-likelihood per unit of distance in z),
    "energy_error", "statistic". `n_public`, the public number of units, sets the resolution of the
    grid.

    *Guarantee.* Each answer of mechanism k is (1 / noise_multiplier_k)-GDP with respect to one
    unit, given all earlier answers. *Assumptions.* Contributions of different units are computed
    independently of each other, which :mod:`pymc_dp.records` proves for the model. *Weaknesses.*
    The time an answer takes is not protected.
    """

    def __init__(
        self,
        engine: Rows,
        meter: Meter,
        events: Mapping[str, GaussianEvent],
        clip_norms: Mapping[str, float],
        neighboring: Neighboring,
        n_public: int,
    ) -> None:
        self.holder = holder_of(engine, meter.plan_id)
        self.meter = meter
        self.events = dict(events)
        self.clip_norms = dict(clip_norms)
        self.neighboring: Neighboring = neighboring
        self.grids = {
            name: Grid.finest(event.noise_multiplier, n_public)
            for name, event in self.events.items()
        }
        self._receipt = Receipt()
        self._paths = 0
        if "gradient" in self.events:
            self._scores = VectorSum(
                self.grids["gradient"], neighboring, engine.d, self.clip_norms["gradient"]
            )
            _refuse_unusable(self._scores)

    def compile(self) -> None:
        """Compile all that a query runs, on made-up data: forked chains inherit the code."""
        z = np.full(self.holder.engine.d, 0.1)
        noise.rounded_normal(0, 0)
        rehearse(self.holder.engine, self._examples(z))

    def _examples(self, z: np.ndarray) -> list[Query]:
        found, there = [], 1.1 * z
        if "gradient" in self.events:
            found.append(Query("gradient", Kick(0, z, 1.05 * z), self._scores))
        numbers = {"energy_error": EnergyError(0, 1, z, there), "log_ratio": LogRatio(z, there)}
        for name, of in numbers.items():
            if name in self.events:
                sum_ = IntervalSum(self.grids[name], self.neighboring, -1.0, 1.0)
                found.append(Query(name, of, sum_))
        return found

    # -- paying ---------------------------------------------------------------------------------

    def begin_chain(self) -> None:
        """Register a chain, pay for its start, and forget what an earlier chain left behind."""
        self.meter.refuse_other_threads()
        self._receipt = Receipt()
        self.holder.forget()
        self._receipt = self.meter.begin_chain()

    def begin_iteration(self) -> bool:
        """Pay for one iteration; False when the budget is used up and records stay closed."""
        receipt = self.meter.begin_iteration()
        self._receipt = Receipt() if receipt is None else receipt
        return receipt is not None

    # -- answers --------------------------------------------------------------------------------

    @property
    def gradient_noise_sd(self) -> float:
        """Standard deviation of the noise on each entry of a gradient answer."""
        return float(self.holder.noise_sd("gradient", self._scores))

    def gradient(self, z: np.ndarray) -> np.ndarray:
        """(d,) noisy sum of clipped scores: sum_i clip(g_i(z)) + N(0, gradient_noise_sd^2 I)."""
        return self.holder.answer(Query("gradient", ScoreAt(z), self._scores), self._receipt)

    def log_ratio(self, z_from: np.ndarray, z_to: np.ndarray) -> tuple[float, float]:
        """Noisy sum of clipped log-likelihood ratios (Yildirim & Ermis 2019), and noise_sd. sum_i
        clip_c(l_i(z_to) - l_i(z_from)) + N(0, noise_sd^2), with c = clip_norm |z_to - z_from|;
        noise_sd is symmetric in the two points.
        """
        c = self._ratio_bound(z_from, z_to)
        return self._number("log_ratio", LogRatio(z_from, z_to), -c, c)

    def path(self, z_start: np.ndarray) -> Path:
        """A path of the Langevin sampler; per-unit accumulators stay with the holder."""
        self._paths += 1
        return Path(self, self._paths, z_start)

    def _ratio_bound(self, z_from: np.ndarray, z_to: np.ndarray) -> float:
        return self.clip_norms["log_ratio"] * float(np.linalg.norm(z_to - z_from))

    def _number(self, mechanism: str, of: Any, lower: float, upper: float) -> tuple[float, float]:
        """Noisy sum of one number of each unit, and the noise."""
        sum_ = IntervalSum(self.grids[mechanism], self.neighboring, lower, upper)
        [value] = self.holder.answer(Query(mechanism, of, sum_), self._receipt)
        return float(value), self.holder.noise_sd(mechanism, sum_) if sum_.told is None else 0.0


def _refuse_unusable(sum_: VectorSum) -> None:
    if sum_.told is not None:
        raise PrivacyError(f"A bound of {sum_.norm:g} is not usable.")


class Path:
    """One trajectory of the Langevin sampler."""

    def __init__(self, queries: Queries, number: int, z_start: np.ndarray) -> None:
        self._queries = queries
        self._number = number
        self._start = z_start
        self._kicks = 0

    def gradient(self, z: np.ndarray, midpoint: np.ndarray) -> np.ndarray:
        """(d,) noisy sum of clipped scores at a midpoint, to which the path goes on from z."""
        self._kicks += 1
        of = Kick(self._number, z, midpoint)
        query, queries = Query("gradient", of, self._queries._scores), self._queries
        return queries.holder.answer(query, queries._receipt)

    def energy_error(
        self, z_end: np.ndarray, lower: float | np.ndarray, upper: float | np.ndarray
    ) -> tuple[float, float]:
        """Noisy sum of clipped energy errors, and noise_sd. Every e_i = l_i(z_end) - l_i(z_start) -
        work_i is clipped to [lower, upper], lower <= 0 <= upper, a function of released quantities.
        """
        of = EnergyError(self._number, self._kicks, self._start, z_end)
        return self._queries._number("energy_error", of, float(lower), float(upper))


class StatisticQueries(Queries):
    """Noisy sums of a statistic of the records of one model, for one chain; as `Queries` otherwise.

    *Guarantee.* Each answer is (1 / noise_multiplier)-GDP with respect to one unit, given all
    earlier ones: its noise is its own. Records are read at the first answer of a chain, after it
    was paid for, and not again.
    """

    def __init__(self, spec: Contribution, norm: float, **settings: Any) -> None:
        super().__init__(**settings)
        grid = self.grids["statistic"]
        sum_ = VectorSum(grid, self.neighboring, spec.size, norm, spec.nonnegative)
        _refuse_unusable(sum_)
        self._query = Query("statistic", spec, sum_)

    def _examples(self, z: np.ndarray) -> list[Query]:
        return [self._query]

    def statistic(self) -> tuple[np.ndarray, float]:
        """(size,) noisy sum over all units, sum_i S_i + N(0, noise_sd^2 I), and noise_sd."""
        value = self.holder.answer(self._query, self._receipt)
        return value, self.holder.noise_sd("statistic", self._query.sum)


class BatchQueries(Queries):
    """Private answers about secret batches, drawn for each answer.

    They were paid for together (`pymc_dp.privacy.plan.Batches`); `meter` counts iterations. The
    mechanism of `event` is "gradient" or "log_ratio", for which `likelihood_power` is that of the
    target. The probability of a Poisson batch is a multiple of 1 / `COINS`.

    *Guarantee.* The contribution of a unit in the batch has norm at most C, and the noise has
    standard deviation ``noise_multiplier * C``, on the integer grid of `Queries`, whose sensitivity
    is here that of one unit in or out of the sum. The accountant takes care of the neighbouring
    relation: if a unit is replaced, one contribution of norm C gives way to another. *Assumptions.*
    As for `Queries`; batches stay secret. *Weaknesses.* The time an answer takes tells the size of
    a Poisson batch.
    """

    def __init__(
        self,
        engine: Rows,
        meter: Meter,
        event: BatchEvent,
        clip_norm: float,
        n_public: int,
        likelihood_power: float = 1.0,
    ) -> None:
        name = event.mechanism
        events = {name: GaussianEvent(name, event.noise_multiplier)}
        bounds = {name: clip_norm}
        super().__init__(engine, meter, events, bounds, "add_or_remove_one", n_public)
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
        query = Query("gradient", OfBatch(ScoreAt(z), self.event), self._scores)
        return self.holder.answer(query, self._receipt) / self.probability

    def log_ratio(self, z_from: np.ndarray, z_to: np.ndarray) -> tuple[float, float]:
        """Estimate of the tempered log-likelihood ratio less half its sampling variance, and
        noise_sd.

        The estimate is the sum over the batch of T r / q - T^2 (1 - q) r^2 / (2 q^2), plus privacy
        noise with noise_sd. r are the ratios, clipped to c = clip_norm |z_to - z_from|, q is the
        probability and T the power. One unit changes it by at most C = T c / q + T^2 (1 - q) c^2 /
        (2 q^2), at r = -c.

        The sum of T r / q over a Poisson batch has the variance T^2 (1 - q) / q sum r^2 over all
        records, of which T^2 (1 - q) / q^2 sum r^2 over the batch is an unbiased estimate. If the
        sum is about normal, subtracting half of that is the penalty for sampling. With B of n
        records, q = B / n, the variance is T^2 (1 - q) / q times n / (n - 1) times the sum of
        squares about the mean. The penalty is then too large by (sum T r)^2 (1 - q) / (2 B). This
        is small beside 1 where a proposal may be accepted, and is the price of terms that hold one
        record each.
        """
        c = self._ratio_bound(z_from, z_to)
        linear = self.likelihood_power / self.probability
        square = 0.5 * linear**2 * (1.0 - self.probability)
        bound = linear * c + square * c**2
        of = OfBatch(TemperedRatio(z_from, z_to, c, linear, square), self.event)
        return self._number("log_ratio", of, -bound, bound)

    @property
    def ratio_noise_sd(self) -> float:
        """Privacy noise of a ratio per unit of distance, for small distances and power 1."""
        multiplier = self.events["log_ratio"].noise_multiplier
        return multiplier * self.clip_norms["log_ratio"] / self.probability

    def path(self, z_start: np.ndarray) -> Path:
        """Refused: a path reads all records, which the noise of a batch does not protect."""
        raise PrivacyError("A path was asked for on batches, which pay for no other answer.")


class MomentQueries(BatchQueries):
    """Answers about batches that give the sampling variance of a ratio apart, for Barker's test.
    *Guarantee.* As for `BatchQueries`, for one vector with two entries.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pairs(1.0)  # refuses a grid that is too coarse before anything is charged

    def _pairs(self, norm: float) -> VectorSum:
        return VectorSum(self.grids["log_ratio"], self.neighboring, 2, norm)

    def _examples(self, z: np.ndarray) -> list[Query]:
        return [Query("log_ratio", RatioMoments(z, 1.1 * z, 1.0, 1.0, 1.0), self._pairs(1.0))]

    @property
    def ratio_noise_sd(self) -> float:
        """Privacy noise of a ratio per unit of distance, for power 1."""
        return super().ratio_noise_sd * math.hypot(1.0, _SQUARES)

    def log_ratio(self, z_from: np.ndarray, z_to: np.ndarray) -> tuple[float, float]:
        """Estimate of the tempered log-likelihood ratio, and the standard deviation of all its
        noise.

        The first is the sum over the batch of T r / q, plus noise, with r, q, c and T as in
        `BatchQueries.log_ratio`. The second is (s^2 + v)^(1/2), with s that of the privacy noise
        and v an estimate of the variance of sampling; 0 if the sum is negative.

        A record of the batch adds the vector (T / q) (r, w r^2 / c), of norm at most C = (T c / q)
        (1 + w^2)^(1/2): one Gaussian release with noise s = noise_multiplier C on both entries.
        From the second entry follows v = T^2 (1 - q) / q^2 sum r^2, whose mean is the sampling
        variance of the first for Poisson batches. Its own privacy noise, (1 - q) (T c / q) s / w,
        may make v negative. v is not cut off at 0: that would bias the total upwards, by 0.4 of
        this noise where there is little sampling variance.
        """
        c = self._ratio_bound(z_from, z_to)
        linear = self.likelihood_power / self.probability
        sum_ = self._pairs(linear * c * math.hypot(1.0, _SQUARES))
        of = OfBatch(RatioMoments(z_from, z_to, c, linear, _SQUARES), self.event)
        value, squares = self.holder.answer(Query("log_ratio", of, sum_), self._receipt)
        if sum_.told is not None:
            return float(value), 0.0
        sampling = (1.0 - self.probability) * linear * (c / _SQUARES) * squares
        return float(value), math.sqrt(max(sum_.noise_sd**2 + sampling, 0.0))
