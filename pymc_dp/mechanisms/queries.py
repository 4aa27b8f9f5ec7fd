"""Answers for a chain: sums over the records, paid for by whole iterations.

A query raises unless an iteration that pays for it has been started
(:meth:`Queries.begin_iteration`), so no record is read before the ledger has been charged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from pymc_dp._memory import at_last_two
from pymc_dp.clipping import (
    Grid,
    Neighboring,
    clip_interval_sum,
    vector_bound,
)
from pymc_dp.errors import PrivacyError
from pymc_dp.events import GaussianEvent
from pymc_dp.mechanisms.sums import clipped_sum
from pymc_dp.metering import Meter
from pymc_dp.noise import rounded_normal
from pymc_dp.rows.engine import Engine, Scores

__all__ = ["Path", "Queries"]

#: A floating-point warning would tell of an extreme record.
_QUIET = np.errstate(all="ignore")

#: Relative slack for the rounding of interval ends: 8 units in the last place, for 4 roundings.
_SLACK = 1.0 - 2.0**-50
#: Below this, a unit or its inverse would lose relative accuracy or overflow.
_SMALLEST_UNIT = 2.0**-1000


class Queries:
    """Private answers about the records of one model, for one chain.

    Parameters
    ----------
    engine : Engine
    meter : Meter
        Pays for whole iterations.
    events : mapping of str to GaussianEvent
        Noise multiplier of each mechanism ("gradient", "log_ratio", "energy_error").
    per_iteration, at_start : mapping of str to int
        How many answers of each mechanism one iteration, and the start of a chain, pay for.
    clip_norms : mapping of str to float
        "gradient": bound on the l2 norm of one unit's score in z; "log_ratio": bound on the change
        of one unit's log-likelihood per unit of distance in z.
    neighboring : {"replace_one", "add_or_remove_one"}
    n_public : int
        Public number of units, which sets the resolution of the grid.

    Notes
    -----
    *Guarantee.*  Each answer of mechanism k is (1 / noise_multiplier_k)-GDP with respect to one
    unit, given all earlier answers.

    *Assumptions.*  Contributions of different units are computed independently of each other,
    which :mod:`pymc_dp.records` proves for the model.

    *Weaknesses.*  The time an answer takes is not protected.
    """

    def __init__(
        self,
        engine: Engine,
        meter: Meter,
        events: Mapping[str, GaussianEvent],
        per_iteration: Mapping[str, int],
        at_start: Mapping[str, int],
        clip_norms: Mapping[str, float],
        neighboring: Neighboring,
        n_public: int,
    ) -> None:
        self.engine = engine
        self.meter = meter
        self.events = dict(events)
        self.per_iteration = dict(per_iteration)
        self.at_start = dict(at_start)
        self.clip_norms = dict(clip_norms)
        self.neighboring: Neighboring = neighboring
        self.grids = {
            name: Grid.finest(event.noise_multiplier, n_public)
            for name, event in self.events.items()
        }
        if "gradient" in self.events:  # refuse a grid that is too coarse before anything is charged
            vector_bound(self.grids["gradient"].norm_bound(neighboring), engine.d)
        self._paid: dict[str, int] = {}
        self._process: int | None = None
        self._likelihoods: dict[bytes, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_paid": {}, "_likelihoods": {}}

    def compile(self) -> None:
        """Compile all that a query runs, on made-up data: forked chains inherit the code."""
        if not self.events:
            return
        engine, z = self.engine.synthetic(), np.zeros(self.engine.d)
        rounded_normal(0, 0)
        values = engine.log_likelihood(z)
        clip_interval_sum(values, 1.0, np.int64(-1), np.int64(1))
        if "gradient" in self.events:
            _, scores, scale = clipped_sum(engine, z, 1.0, 1.0)
            engine.work(scores, z, z, scale)

    # -- paying ---------------------------------------------------------------------------------

    def begin_chain(self) -> None:
        """Register a chain, pay for its start, and forget what an earlier chain left behind."""
        self.meter.refuse_other_threads()
        self._likelihoods = {}
        self._paid = {}
        self.engine.forget()
        self.meter.begin_chain()
        if not self.meter.frozen:
            self._pay(self.at_start)

    def begin_iteration(self) -> bool:
        """Pay for one iteration; False when the budget is used up and records stay closed."""
        self.meter.refuse_other_threads()
        self._paid = {}
        if not self.meter.begin_iteration():
            return False
        self._pay(self.per_iteration)
        return True

    def _pay(self, counts: Mapping[str, int]) -> None:
        self._paid = dict(counts)
        self._process = os.getpid()

    def _use(self, mechanism: str) -> None:
        # a fork shares nothing that was paid for
        if self._paid.get(mechanism, 0) < 1 or self._process != os.getpid():
            raise PrivacyError(
                f"A {mechanism} answer was asked for that no charged iteration pays for. This is a "
                "fault of the kernel: its count of releases does not match its queries."
            )
        self._paid[mechanism] -= 1

    # -- sensitivity ----------------------------------------------------------------------------

    def _sensitivity(self, lower: float, upper: float) -> float:
        """l2 sensitivity of a sum of one value in [lower, upper] per unit."""
        if self.neighboring == "replace_one":
            return upper - lower
        return max(-lower, upper)

    @property
    def gradient_noise_sd(self) -> float:
        """Standard deviation of the noise on each entry of a gradient answer."""
        bound = self.clip_norms["gradient"]
        return self.events["gradient"].noise_multiplier * self._sensitivity(-bound, bound)

    # -- answers --------------------------------------------------------------------------------

    def gradient(self, z: np.ndarray) -> np.ndarray:
        """Noisy sum of clipped scores.

        Parameters
        ----------
        z : (d,) ndarray

        Returns
        -------
        (d,) ndarray
            sum_i clip(g_i(z)) + N(0, gradient_noise_sd^2 I).
        """
        self._use("gradient")
        return self._gradient(z, self.engine)[0]

    @_QUIET
    def _gradient(
        self, z: np.ndarray, engine: Engine | None
    ) -> tuple[np.ndarray, Scores, np.ndarray]:
        """Noisy sum of clipped scores of some records, or of none; scores and scales of them."""
        clip_norm = self.clip_norms["gradient"]
        grid = self.grids["gradient"]
        unit = grid.unit(self._sensitivity(-clip_norm, clip_norm))
        bound = vector_bound(grid.norm_bound(self.neighboring), self.engine.d)
        if engine is None:
            total = np.zeros(self.engine.d, dtype=np.int64)
            scores, scale = Scores([], []), np.empty(0)
        else:
            total, scores, scale = clipped_sum(engine, z, 1.0 / unit, bound)
        total += rounded_normal(self.engine.d, grid.log2_sigma)
        return total * unit, scores, scale

    @_QUIET
    def log_ratio(self, z_from: np.ndarray, z_to: np.ndarray) -> tuple[float, float]:
        """Noisy sum of clipped log-likelihood ratios (Yildirim & Ermis 2019).

        Returns
        -------
        value : float
            sum_i clip_c(l_i(z_to) - l_i(z_from)) + N(0, noise_sd^2), with
            c = clip_norm |z_to - z_from|.
        noise_sd : float
            Symmetric in the two points.
        """
        self._use("log_ratio")
        c = self.clip_norms["log_ratio"] * float(np.linalg.norm(z_to - z_from))
        ratios = self._log_likelihood(z_to) - self._log_likelihood(z_from)
        return self._interval_sum("log_ratio", ratios, -c, c)

    def path(self, z_start: np.ndarray) -> Path:
        """A path of the Langevin sampler; per-unit accumulators stay inside."""
        return Path(self, z_start)

    def _interval_sum(
        self, mechanism: str, values: np.ndarray, lower: float, upper: float
    ) -> tuple[float, float]:
        grid = self.grids[mechanism]
        sensitivity = self._sensitivity(lower, upper)
        if (told := self._without_sum(mechanism, sensitivity)) is not None:
            return told, 0.0
        unit = grid.unit(sensitivity)
        # both ends shrink alike, to stay antisymmetric under reversal
        low, high = math.ceil(lower / unit * _SLACK), math.floor(upper / unit * _SLACK)
        if not low <= 0 <= high:
            raise PrivacyError("An interval for clipping must contain zero.")
        total = np.array([clip_interval_sum(values, 1.0 / unit, np.int64(low), np.int64(high))])
        # in 64 bits, like the sum itself: if one wraps, both do, and wrapping is post-processing
        total += rounded_normal(1, grid.log2_sigma)
        return float(total[0] * unit), grid.noise_multiplier * sensitivity

    def _without_sum(self, mechanism: str, sensitivity: float) -> float | None:
        """The answer where the bound decides it and records do not; None elsewhere."""
        if sensitivity == 0.0:
            return 0.0  # a point compared with itself: every contribution is clipped to 0
        if not (
            _SMALLEST_UNIT < self.grids[mechanism].unit(sensitivity) and sensitivity < math.inf
        ):
            return -math.inf  # no usable bound for this pair of points: a rejection
        return None

    def _log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) log-likelihoods, remembering the last two points."""
        return at_last_two(self._likelihoods, z, lambda: self.engine.log_likelihood(z))


class Path:
    """One trajectory of the Langevin sampler and its private per-unit accumulators."""

    def __init__(self, queries: Queries, z_start: np.ndarray) -> None:
        self._queries = queries
        self._start = self._at = z_start
        self._next: np.ndarray | None = None
        self._work = np.zeros(queries.engine.n_units)
        self._scores: Scores | None = None
        self._scale = np.empty(0)

    def gradient(self, midpoint: np.ndarray) -> np.ndarray:
        """(d,) noisy sum of clipped scores at a midpoint."""
        self._queries._use("gradient")
        noisy, scores, scale = self._queries._gradient(midpoint, self._queries.engine)
        self._arrive(self._next)
        self._scores, self._scale = scores, scale
        return noisy

    def advance(self, displacement: np.ndarray) -> None:
        """Add every unit's work clip(g_i(midpoint)) . displacement; nothing is released."""
        if self._scores is None:
            raise PrivacyError("advance() follows gradient(): there is no midpoint yet.")
        self._arrive(self._next)
        self._next = self._at + displacement

    @_QUIET
    def _arrive(self, end: np.ndarray | None) -> None:
        """Account for the step that was announced; its end is known to rounding until then."""
        if self._next is None or self._scores is None or end is None:
            return
        self._work += self._queries.engine.work(self._scores, self._at, end, self._scale)
        self._at, self._next = end, None

    @_QUIET
    def energy_error(
        self, z_end: np.ndarray, lower: float | np.ndarray, upper: float | np.ndarray
    ) -> tuple[float, float]:
        """Noisy sum of energy errors e_i = l_i(z_end) - l_i(z_start) - work_i, clipped.

        Parameters
        ----------
        z_end : (d,) ndarray
        lower, upper : float
            Interval for every e_i, lower <= 0 <= upper, a function of released quantities.

        Returns
        -------
        value, noise_sd : float
        """
        queries = self._queries
        queries._use("energy_error")
        self._arrive(z_end)
        # the end last: it is what the next path begins with, if it is accepted
        start = queries._log_likelihood(self._start)
        errors = queries._log_likelihood(z_end) - start
        errors -= self._work
        return queries._interval_sum("energy_error", errors, float(lower), float(upper))

    def finish(self, accepted: bool | np.bool_ | np.ndarray) -> None:
        """End of the path: the per-unit accumulators are forgotten."""
        self._scores = self._next = None
        self._scale = self._work = np.empty(0)
