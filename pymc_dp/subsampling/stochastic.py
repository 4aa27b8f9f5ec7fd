"""Stochastic-gradient samplers with control variates, for comparison.  They are not private."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pymc.model import Model
from pymc.util import get_random_generator

from pymc_dp.base.checks import check_integer, check_number
from pymc_dp.base.compat import CompiledStep, full_signature
from pymc_dp.kernels import sgmcmc
from pymc_dp.subsampling.estimates import MEAN, Sampled, density
from pymc_dp.subsampling.hmcecs import STARTS
from pymc_dp.subsampling.preparation import Variates, prepare

StepSize = float | Callable[[int], float]
_SHORTEST = 1e-4  # smallest step size


class _Scores:
    """Scores in units of posterior standard deviations, from a new sample each time (eq. 4.7)."""

    gradient_noise_sd = 0.0

    def __init__(self, variates: Variates, size: int, rng: np.random.Generator) -> None:
        self.variates, self.size, self.rng = variates, size, rng
        scale = variates.n / size
        self._at = Sampled(variates.family, variates.expansion, scale, 0.0, MEAN)
        self._d = np.empty(size)
        self._nothing = variates.sample(np.empty(0, dtype=np.int64))

    def theta(self, z: np.ndarray) -> np.ndarray:
        """(d,) unconstrained parameters."""
        return self.variates.curved.theta + self.variates.curved.root @ z

    def gradient(self, z: np.ndarray) -> np.ndarray:
        """(d,) score of the log-posterior at z."""
        variates = self.variates
        index = self.rng.integers(0, variates.n, self.size)
        sample = variates.sample(index)
        gradient = np.empty(len(z))
        kernel, prior = variates.kernel, variates.prior
        density(kernel, prior, self._at, sample, self.theta(z), self._d, gradient)
        return variates.curved.root.T @ gradient

    def possible(self, z: np.ndarray) -> bool:
        """Whether z is in the support, as far as parameters alone decide."""
        return math.isfinite(self.variates.log_density(self._at, self._nothing, self.theta(z)))


class _Support:
    """Where the posterior is: the prior itself is part of the scores."""

    def __init__(self, scores: _Scores) -> None:
        self._scores = scores

    def log_density(self, z: np.ndarray) -> np.ndarray:
        return np.where(self._scores.possible(z), 0.0, -np.inf)

    def gradient(self, z: np.ndarray) -> np.ndarray:
        return np.zeros_like(z)


class _Stochastic(CompiledStep):
    """What the samplers have in common: a preparation, and steps without an accept test."""

    _longest: float
    #: The dynamics, their first state, and settings beside the step size.
    _kernel: Callable[..., tuple[Any, Any]]
    _initial: Callable[[np.ndarray], Any]
    _settings: Mapping[str, float] = {}
    stats_dtypes_shapes: dict[str, Any] = {  # noqa: RUF012 - PyMC reads it from the class
        "step_size": (np.float64, []),
        "tune": (bool, []),
    }
    _made = ("_scores", "_support", "_state")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Tell `help` and editors what `**kwargs` stands for."""
        super().__init_subclass__(**kwargs)
        cls.__signature__ = full_signature(cls)

    def __init__(
        self,
        vars: Any = None,
        *,
        step_size: StepSize | None = None,
        subsample_size: int = 1000,
        order: int = 2,
        n_steps: int | None = None,
        reference: Mapping[str, Any] | None = None,
        model: Model | None = None,
        rng: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        initial_point: Any = None,
        blocked: bool = True,
        progressbar: bool = True,
    ) -> None:
        self.subsample_size = check_integer("subsample_size", subsample_size, minimum=1)
        self.step_size: StepSize = self._longest if step_size is None else step_size
        first = self._step_at(0)
        if n_steps is None:
            n_steps = self._enough(self._longest if callable(step_size) else first)
        self.n_steps = check_integer("n_steps", n_steps, minimum=1)
        self.rng = get_random_generator(rng)
        self.variates = prepare(
            model,
            type(self).__name__,
            vars=vars,
            order=order,
            blocked=blocked,
            estimator="mean",
            reference=reference,
            progressbar=progressbar,
        )
        self.vars = list(self.variates.parameters.values)
        self._begin()

    def _enough(self, step_size: float) -> int:
        """Steps for one draw."""
        return 1

    def _step_at(self, iteration: int) -> float:
        given = self.step_size
        found = check_number("step_size", given(iteration) if callable(given) else given)
        if not _SHORTEST <= found <= 1.0:
            raise ValueError(
                f"step_size must lie between {_SHORTEST:g} and 1, in posterior standard "
                f"deviations, not {found:g} (iteration {iteration}): larger steps are unstable."
            )
        return found

    def _compile(self) -> None:
        self.variates.compile()
        self._begin()

    def _begin(self) -> None:
        self.variates.data.refuse_changed()
        self.tune = True
        self._iteration = 0
        self._scores = _Scores(self.variates, self.subsample_size, self.rng)
        self._support = _Support(self._scores)
        self._state: Any = None

    def reset_tuning(self) -> None:
        """Nothing is tuned."""

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[Any]]:
        """`n_steps` steps of the dynamics."""
        curved = self.variates.curved
        if self._state is None:
            draws = (self.variates.typical(self.rng) - curved.theta for _ in range(STARTS))
            starts = (curved.inverse_root @ draw for draw in draws)
            inside = (z for z in starts if self._scores.possible(z))
            self._state = self._initial(next(inside, np.zeros(len(curved.theta))))
        step_size = self._step_at(self._iteration)
        for _ in range(self.n_steps):
            self._state, _ = self._kernel(
                self.rng,
                self._state,
                self._scores,
                self._support,
                step_size=step_size,
                **self._settings,
            )
        self._iteration += 1
        moved = self.variates.parameters.point(self._scores.theta(self._state.z))
        return {**point, **moved}, [{"step_size": step_size, "tune": self.tune}]


class SGLD(_Stochastic):
    """Stochastic-gradient Langevin dynamics with control variates.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    step_size : float or callable, optional
        h of z' = z + h/2 score + N(0, h), in units of posterior standard deviations, at most 1; a
        callable gives it for each iteration, ``lambda t: 0.1 * (1 + t / 100) ** -0.55``.
        Default: 0.1.
    subsample_size : int, default 1000
        Records of the sample from which a score is estimated, a new one for every score.
    order : {2, 1, 0}, default 2
        Of the Taylor control variates; 0 has none in the score.
    n_steps : int, optional
        Steps for one draw; default 1.
    reference : dict of str to array, optional
        As for :class:`pymc_dp.HMCECS`.
    model, rng, compile_kwargs, initial_point, blocked, progressbar : optional
        As for :class:`pymc_dp.HMCECS`.

    Raises
    ------
    UnsafeModel, NotFactorizable, ValueError
        As for :class:`pymc_dp.HMCECS`.

    Notes
    -----
    *Guarantee.*  None: not private.

    *Assumptions.*  As for :class:`pymc_dp.HMCECS`.

    *Weaknesses.*  There is no accept test: variances are those of the posterior over 1 - h/4, and
    further off by about h/4 times the variance of the score of a sample.  A decreasing schedule
    removes the bias in the limit; draws then have unequal weight, which results do not account for.

    References
    ----------
    Welling & Teh (2011); Baker, Fearnhead, Fox & Nemeth (2019); Dang et al. (2019), Section 6.2.
    """

    name = "sgld"
    _longest = 0.1

    _kernel = staticmethod(sgmcmc.langevin)

    def _initial(self, z: np.ndarray) -> sgmcmc.SGLDState:
        return sgmcmc.SGLDState(z)


class _WithMomentum(_Stochastic):
    """Dynamics with a momentum and a friction."""

    _longest = 0.25

    def __init__(self, vars: Any = None, *, friction: float = 1.0, **kwargs: Any) -> None:
        self.friction = check_number("friction", friction)
        if self.friction <= 0.0:
            raise ValueError(
                f"friction must be positive, got {friction}: without it, energy is not exchanged."
            )
        self._settings = {"friction": self.friction}
        super().__init__(vars, **kwargs)

    def _enough(self, step_size: float) -> int:
        return max(1, math.ceil(0.5 * math.pi / step_size))


class SGHMC(_WithMomentum):
    """Stochastic-gradient Hamiltonian Monte Carlo with friction and control variates.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    friction : float, default 1
        C: the momentum gets noise of variance 2 C h per step.
    step_size, subsample_size, order : optional
        As for :class:`SGLD`; step_size is h of a leapfrog-like step, default 0.25.
    n_steps : int, optional
        Steps for one draw; default: as many as make up a quarter of a period, pi/2.
    reference, model, rng, compile_kwargs, initial_point, blocked, progressbar : optional
        As for :class:`SGLD`.

    Raises
    ------
    UnsafeModel, NotFactorizable, ValueError
        As for :class:`pymc_dp.HMCECS`.

    Notes
    -----
    *Guarantee.*  None: not private.

    *Assumptions.*  As for :class:`pymc_dp.HMCECS`.

    *Weaknesses.*  There is no accept test: a bias of order h^2, and one of order h times the
    variance of the score of a sample, which is not subtracted from the noise.

    References
    ----------
    Chen, Fox & Guestrin (2014); Dang et al. (2019), Section 6.2.
    """

    name = "sghmc"

    _kernel = staticmethod(sgmcmc.hamiltonian)

    def _initial(self, z: np.ndarray) -> sgmcmc.SGHMCState:
        return sgmcmc.initial_hamiltonian(self.rng, z)


class SGNHT(_WithMomentum):
    """Stochastic-gradient Nosé-Hoover thermostat with control variates.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    friction : float, default 1
        A: the momentum gets noise of variance 2 A h per step, beside that of the samples.
    step_size, subsample_size, order : optional
        As for :class:`SGLD`; step_size is h of a leapfrog-like step, default 0.25.
    n_steps : int, optional
        Steps for one draw; default: as many as make up a quarter of a period, pi/2.
    reference, model, rng, compile_kwargs, initial_point, blocked, progressbar : optional
        As for :class:`SGLD`.

    Raises
    ------
    UnsafeModel, NotFactorizable, ValueError
        As for :class:`pymc_dp.HMCECS`.

    Notes
    -----
    *Guarantee.*  None: not private.

    *Assumptions.*  As for :class:`pymc_dp.HMCECS`.

    *Weaknesses.*  There is no accept test: a bias of order h^2.  Noise of samples is absorbed if
    it is Gaussian, the same everywhere, and the same in all directions.

    References
    ----------
    Ding et al. (2014); Leimkuhler & Shang (2016).
    """

    name = "sgnht"

    _kernel = staticmethod(sgmcmc.thermostat)

    def _initial(self, z: np.ndarray) -> sgmcmc.SGNHTState:
        return sgmcmc.initial_thermostat(self.rng, z, self.friction)
