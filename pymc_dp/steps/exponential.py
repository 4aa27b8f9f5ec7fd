"""The penalty method for exponential families as a PyMC step: its cost does not grow with n."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pymc_dp.base.checks import warn
from pymc_dp.kernels import penalty
from pymc_dp.kernels.penalty import GaussianProposal
from pymc_dp.privacy.chains import Queries, StatisticQueries
from pymc_dp.privacy.holder import at_last_two
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.steps.base import PrivateStep
from pymc_dp.steps.exponential_model import ByHand, ExponentialModel, exponential_model
from pymc_dp.steps.settings import step_sizes
from pymc_dp.tuning.coordinates import Start, prepare_statistic, random_walk
from pymc_dp.tuning.model_parts import Design, ModelParts
from pymc_dp.tuning.preparing import Preparing, Shown

_FEW = 10.0  # fewer effective draws than that are worth a warning


class ExponentialFamilyPenalty(PrivateStep):
    """Random-walk Metropolis on noisy sufficient statistics (the penalty method).

    For records that are independent and identically distributed given the parameters, in an
    exponential family: Normal, Bernoulli, Binomial, Poisson, Exponential, Gamma, Categorical and
    MvNormal are recognised, whatever the priors and however their parameters are computed; others
    are described by hand. The statistics are summed once, so the cost of an iteration does not
    depend on the number of records.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    draws, tune, chains : int
        The plan: what ``pm.sample`` will be called with. Noise is calibrated to it; another call is
        refused before anything is spent.
    step_size : float or (d,) array, optional
        Standard deviation of the Gaussian proposal in z, per coordinate if an array. Default
        (automatic settings only): as for :class:`DPPenalty`.
    scaling : float, (d,) array, (d, d) array or dict, optional
        The A of theta = initial point + A z, in unconstrained space: about the posterior standard
        deviation of each parameter, from public knowledge. Default: a normal approximation of one
        or two noisy sums of the statistic, which are charged first.
    statistic : callable, optional
        By hand, together with the next three: the statistic S of the records. Called with one
        (n, ...) tensor, or with tensors by name where the likelihood reads ``pm.Data`` beside the
        observed variable; returns (n, m), each row computed from its record alone.
    natural : callable, optional
        The natural parameters phi, (m,). Its arguments are names of variables of the model:
        ``lambda mu, sigma: pt.stack([mu / sigma**2, -0.5 / sigma**2])``.
    log_normalizer : callable, optional
        A in p(y) = h(y) exp(phi . S(y) - A); arguments as for `natural`.
    statistic_bounds : (lower, upper), optional
        Public bounds of the entries of S, numbers or (m,) arrays: entries are clamped.
    noise_multiplier : float, optional
        Noise standard deviation over sensitivity; default: so that the plan uses the budget.
    runs : int, default 1
        How many times ``pm.sample`` may be called with this step.
    model, rng, compile_kwargs, initial_point, blocked, progressbar
        As in PyMC.

    Raises
    ------
    TypeError, ValueError, UnsafeModel, NotFactorizable, BudgetExceeded
        Before anything is spent.

    Notes
    -----
    *Guarantee.* One Gaussian release of the sums per iteration, with fresh noise; all draws
    together satisfy the budget. Stationary distribution: the exact posterior given the statistics,
    clamped to their public bounds and rounded to a fine grid, whatever the noise.

    With statistics of norm at most R (``pymc_dp.steps.families`` derives their scales) the l2
    sensitivity of the sums is 2 R if one record is replaced, 2^(1/2) R where no entry is negative
    (Categorical), and R if one is added or removed. In the last case the number of records, which
    multiplies the log-normaliser, is private, so 1 is an entry of the statistic.

    *Assumptions.* Bounds (:func:`pymc_dp.bounds`, `statistic_bounds`) and settings are public. The
    statistic is not assumed to be that of the model: it is compared with PyMC's log-density.

    *Weaknesses.* Bounds that are too narrow clamp, and the posterior is then about the clamped
    data; bounds that are too wide cost noise in proportion. The noise of a ratio grows with the
    distance moved, so the chain slows as the budget falls: chains are worth about M / (12 d s^2)
    independent draws for squared mu M, with s the change of phi per posterior standard deviation
    times the sensitivity, however many iterations are made.

    References
    ----------
    Yildirim & Ermis (2019), Exact MCMC with differentially private moves, Algorithm 3.
    """

    name = "exponential_family_penalty"
    _by_hand = ("scaling",)
    _needed = ("step_size",)

    def __init__(
        self,
        vars: Any = None,
        *,
        step_size: float | np.ndarray | None = None,
        scaling: Any = None,
        statistic: Callable[..., Any] | None = None,
        natural: Callable[..., Any] | None = None,
        log_normalizer: Callable[..., Any] | None = None,
        statistic_bounds: tuple[Any, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if "clip_norm" in kwargs:
            raise TypeError(
                "ExponentialFamilyPenalty has no argument `clip_norm`: statistics are clamped to "
                "public bounds. Declare them with dp.bounds, or as statistic_bounds."
            )
        self.step_size = step_sizes(step_size)
        self._naturals: dict[bytes, np.ndarray] = {}
        self._family = _described(statistic, natural, log_normalizer, statistic_bounds)
        super().__init__(
            vars,
            scaling=scaling,
            shares={"statistic": 1.0},
            settings={"step_size": None if self.step_size is None else self.step_size.tolist()},
            **kwargs,
        )
        self._family = None  # functions of the user need not reach other processes

    def _prepare(self, preparing: Preparing) -> Design:
        parts, paths = preparing.parts, preparing.paths
        found = self._read(parts)
        units = 0.0

        def ask(releases: Shown) -> Start:
            nonlocal units
            units = releases.units_mu2

            def release(label: str, share: float) -> tuple[np.ndarray, float]:
                return releases.vector_sum(label, found.statistic, found.statistic.norm, share)

            return prepare_statistic(release, found, parts.terms, parts.start, found.n)

        at = preparing.prepared(ask, found.facts(parts.records.initial))
        if not at.trusted:
            preparing.warn_untrusted()
        d, left = self.parameters.size, 1.0 - at.spent
        noise = at.noise / math.sqrt(left)
        if self.step_size is None:
            self.step_size = np.asarray(random_walk(d, paths, noise))
        worth = 0.33 * paths / (d * (1.0 + paths * noise**2))
        if at.trusted and worth < _FEW:
            warn(
                f"The chains of this plan are worth about {worth:.2g} effective draws. A larger "
                "epsilon, more records, more draws or narrower public bounds would help; "
                f"{1.0 - left:.0%} of the budget ({units:.3g} of squared mu) is spent."
            )
        design = self._design(parts, at.coordinates)
        return replace(design, settings={**design.settings, "trusted": at.trusted})

    def _given(self, parts: ModelParts, scaling: np.ndarray, clip_norm: Any) -> Design:
        self._read(parts)
        return self._design(parts, Coordinates(parts.records.initial, scaling))

    def _read(self, parts: ModelParts) -> ExponentialModel:
        self._exponential = exponential_model(parts, self._family, type(self).__name__)
        return self._exponential

    def _exactness(self) -> str:
        return (
            "The records were seen through their sufficient statistic alone "
            f"({self._exponential.name}), clamped to public bounds; the draws are from the exact "
            "posterior of the statistics so clamped, as far as the chains have converged."
        )

    def _design(self, parts: ModelParts, coordinates: Coordinates) -> Design:
        found = self._exponential
        assert self.step_size is not None
        return Design(
            coordinates,
            parts.engine.with_coordinates(coordinates),
            parts.terms.with_coordinates(coordinates),
            {"statistic": found.statistic.norm},
            {"statistic": 1.0},
            {
                "form": "exponential_family",
                "family": found.name,
                "entries": found.statistic.size,
                "step_size": self.step_size.tolist(),
            },
        )

    def _open(self, **settings: Any) -> Queries:
        statistic = self._exponential.statistic
        return StatisticQueries(statistic, statistic.norm, **settings)

    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        return {"statistic": 1}, {}

    def _natural(self, z: np.ndarray) -> np.ndarray:
        """(m + 1,) as `ExponentialModel.natural`; remembers the last two points."""
        return at_last_two(
            self._naturals, z, lambda z: self._exponential.natural(self.coordinates.theta(z))
        )

    def _initial_state(self, z: np.ndarray) -> penalty.PenaltyState:
        if not np.isfinite(self._natural(z)).all():
            raise ValueError(
                "The natural parameters are not finite where the chain starts. Start it inside the "
                "support of the likelihood's parameters (initvals)."
            )
        return penalty.initial_state(self.rng, z, self.prior)

    def _transition(
        self, state: penalty.PenaltyState, iteration: int
    ) -> tuple[penalty.PenaltyState, bool]:
        assert self.step_size is not None and isinstance(self.queries, StatisticQueries)
        ratios = penalty.StatisticRatios(self.queries, self._natural, self._exponential.n)
        proposal = GaussianProposal(self.step_size)
        state, info = penalty.transition(self.rng, state, ratios, self.prior, proposal=proposal)
        return state, bool(info.accepted)


def _described(statistic: Any, natural: Any, log_normalizer: Any, bounds: Any) -> ByHand | None:
    """The family as the user describes it; all arguments are given, or none."""
    functions = {"statistic": statistic, "natural": natural, "log_normalizer": log_normalizer}
    given = {**functions, "statistic_bounds": bounds}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing == ["statistic", "natural", "log_normalizer"]:
        raise ValueError(
            "statistic_bounds are about statistic, which is not given. Where the family is found "
            "from the model, declare bounds of the data instead: dp.bounds(y=(lower, upper))."
        )
    if missing:
        raise ValueError(
            f"A family by hand lacks {', '.join(missing)}: give statistic, natural, log_normalizer "
            "and statistic_bounds, or none of them."
        )
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(f"{name} must be a function, not {type(function).__name__}.")
    return ByHand(statistic, natural, log_normalizer, bounds)
