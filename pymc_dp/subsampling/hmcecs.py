"""Hamiltonian Monte Carlo on samples of the records, as a PyMC step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from pymc.model import Model
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.step_sizes import DualAverageAdaptation
from pymc.util import get_random_generator

from pymc_dp.base.checks import check_integer, check_number, check_positive
from pymc_dp.base.compat import CompiledStep
from pymc_dp.subsampling.estimates import PERTURBED, Sampled, first_records
from pymc_dp.subsampling.preparation import Pilot, prepare
from pymc_dp.subsampling.signs import MIN_POSITIVE
from pymc_dp.subsampling.transitions import (
    perturbed,
    perturbed_numbers,
    signed,
    signed_numbers,
    start_perturbed,
    start_signed,
)

_VARIANCE = 0.5  # variance of the estimated log-likelihood that subsample sizes are chosen for
_HARDLY_MOVED = 0.1  # fraction of accepted moves below which a chain is said to be stuck
_FEW_BLOCKS = 20  # signed estimates bound the target where the expansion fails by exp(-blocks) only
_TOO_LARGE = 1.0  # variance above which the user is warned
_SAFE = 0.25  # a quarter of the way to a negative factor, for the farthest record of the pilot
#: Most that a record may add to a perturbed log-likelihood, so that rare ones count; and its error.
_LARGEST, _BIAS = 1.0, 0.05
_BIASED = 0.15  # error of the log-density at which users are warned: means move by less of a sd
_DIVERGENT = 1000.0  # energy error from which on an iteration counts as divergent
_LEAST = 10  # records of a sample, at least: from fewer, the tails of the posterior cannot be told
_MOST_STEPS = 1000  # leapfrog steps of an iteration, at most
_LONGEST = 2.0  # longest step, in posterior standard deviations: longer ones are unstable
STARTS = 100  # a chain tries to begin at so many draws, until one has a finite density


class HMCECS(CompiledStep):
    r"""Hamiltonian Monte Carlo with energy-conserving subsampling.

    Each iteration reads a sample of the records: trajectories follow the gradient of an estimate
    of the log-posterior, and the accept test uses the same estimate from the same sample, so that
    energy is conserved whatever the size of the sample.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    estimator : {"perturbed", "signed"}, default "perturbed"
        "perturbed": the target is within O(1 / (n m^2)) of the posterior, n records and m of them
        in a sample (eq. 4.5, 4.6), where no few records dominate what the expansion leaves.
        "signed": the likelihood is estimated without bias, at about twice the cost, with a sign
        that every draw keeps as the statistic ``sign``; expectations are exact with
        :func:`pymc_dp.signed_expectation`, ordinary draws come from
        :func:`pymc_dp.resample_signed`.
    order : {2, 1, 0}, default 2
        Of the Taylor control variates.  2 needs by far the smallest samples.
    subsample_size : int, optional
        m, expected records in a sample, 10 or more; rounded up to a multiple of `blocks`.  Default:
        by a pilot, for a variance of the estimated log-likelihood of about 0.5; at least 100.
    blocks : int, default 100
        G: one block of a sample is renewed in each iteration, so that successive estimates have
        correlation 1 - 1/G.  For "signed", the number of products lambda.
    reference : dict of str to array, optional
        theta*, about which records are expanded: a value for each free variable.  Default: the
        posterior mode on all records, which is cheap beside any chain on all records.
    step_size : float, optional
        Of the leapfrog integrator, in units of posterior standard deviations, at most 1; used as it
        is.  At most 1000 steps make a trajectory.  Default: dual averaging while the chain tunes,
        then shortened a little so that a whole number of steps makes up `path_length`.
    path_length : float, optional
        Length of a trajectory, of ``ceil(path_length / step_size)`` steps; default pi/2, a quarter
        of the period of a normal posterior, after which draws are independent.
    target_accept : float, default 0.8
        Of dual averaging.
    model : pymc.Model, optional
        Default: the model of the context.
    rng : optional
        As in PyMC.
    compile_kwargs, initial_point, blocked
        For PyMC; without effect.
    progressbar : bool, default True
        Of the search for the mode.

    Raises
    ------
    UnsafeModel
        If the model has a privacy budget, or its data are not finite.
    NotFactorizable
        If the log-likelihood is not a sum of one term per record, or parameters are latent
        variables of records.
    ValueError
        If an argument is out of its range, or variables are discrete.

    Notes
    -----
    *Guarantee.*  None: not private.

    *Assumptions.*  Records are independent given the parameters, and the posterior is smooth and
    near enough to its mode that Taylor expansions about it predict the records' log-likelihoods.
    The perturbed estimator takes the error of the estimate to be normal.

    *Weaknesses.*  One mode.  With few records per parameter there is little to gain, and NUTS is
    better.  Where a `reference` is far from the mode, estimates are too variable: the step warns
    when it is made, and when a chain ends.  Chains start in the normal approximation of the
    posterior, where the density is finite, whatever the initial values, since estimates far from
    the mode say nothing.  The mass matrix is minus the Hessian at the reference and is not adapted.
    With few records, or few blocks of the signed estimator, the estimated likelihood may have mass
    where the expansion is meaningless; a chain that is lost there hardly moves, and warns.

    Statistics per draw: ``acceptance_rate`` of theta and ``acceptance_rate_u`` of the sample,
    ``sigma2`` (estimated variance of the log-likelihood estimate), ``sign``, ``energy_error``,
    ``lp``, ``step_size``, ``n_steps``, ``diverging``, ``tune``.

    References
    ----------
    Dang, Quiroz, Kohn, Tran & Villani (2019), Hamiltonian Monte Carlo with energy conserving
    subsampling: Algorithm 1, eq. 4.1-4.7 and 5.1-5.3.
    """

    name = "hmc_ecs"
    _shown: Mapping[str, tuple[str, str]] = {
        "step_size": ("Step", ".3f"),
        "acceptance_rate": ("Accept", ".3f"),
        "sigma2": ("σ²", ".3f"),
    }
    default_tune_steps = 300
    stats_dtypes_shapes: dict[str, Any] = {  # noqa: RUF012 - PyMC reads it from the class
        "acceptance_rate": (np.float64, []),
        "acceptance_rate_u": (np.float64, []),
        "sigma2": (np.float64, []),
        "sign": (np.float64, []),
        "energy_error": (np.float64, []),
        "lp": (np.float64, []),
        "step_size": (np.float64, []),
        "n_steps": (np.int64, []),
        "diverging": (bool, []),
        "tune": (bool, []),
        "warning": (SamplerWarning, None),
    }
    _made = ("_chain",)

    def __init__(
        self,
        vars: Any = None,
        *,
        estimator: str = "perturbed",
        order: int = 2,
        subsample_size: int | None = None,
        blocks: int = 100,
        reference: Mapping[str, Any] | None = None,
        step_size: float | None = None,
        path_length: float | None = None,
        target_accept: float = 0.8,
        model: Model | None = None,
        rng: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        initial_point: Any = None,
        blocked: bool = True,
        progressbar: bool = True,
    ) -> None:
        if estimator not in ("perturbed", "signed"):
            raise ValueError(f"estimator must be 'perturbed' or 'signed', not {estimator!r}.")
        self.estimator = estimator
        self.blocks = check_integer("blocks", blocks, minimum=1)
        if estimator == "signed" and self.blocks < _FEW_BLOCKS:
            warnings.warn(
                f"With blocks={self.blocks} a signed estimate may be far too large where the "
                "expansion about the mode is poor, and a chain that comes there stays. Use "
                f"{_FEW_BLOCKS} blocks or more.",
                UserWarning,
                stacklevel=2,
            )
        path_length = math.pi / 2.0 if path_length is None else path_length
        self.path_length = check_positive("path_length", path_length)
        self.target_accept = check_number("target_accept", target_accept)
        if not 0.0 < self.target_accept < 1.0:
            raise ValueError(f"target_accept must lie between 0 and 1, not {target_accept}.")
        self._given_step = None if step_size is None else check_positive("step_size", step_size)
        if self._given_step is not None and self._given_step > 1.0:
            raise ValueError(
                f"step_size={step_size} is in posterior standard deviations, and must be at most "
                "1: trajectories of few large steps come back to where they began, and from 2 on "
                "they are unstable."
            )
        if self._given_step is not None and self.path_length > _MOST_STEPS * self._given_step:
            raise ValueError(
                f"path_length={self.path_length:.4g} would take more than {_MOST_STEPS} steps of "
                f"step_size={step_size}. Raise step_size, or lower path_length."
            )
        if subsample_size is not None:
            subsample_size = check_integer("subsample_size", subsample_size, minimum=_LEAST)
        self.rng = get_random_generator(rng)
        self.variates = prepare(
            model,
            "HMCECS",
            vars=vars,
            order=order,
            blocked=blocked,
            estimator=estimator,
            reference=reference,
            progressbar=progressbar,
        )
        self.vars, self.order = list(self.variates.parameters.values), order
        pilot = Pilot(self.variates, np.random.default_rng(0))  # whatever the seed of the chains
        self._choose(pilot, subsample_size)
        self._begin()
        self._compile_transition()

    # -- the size of a sample -------------------------------------------------------------------

    def _choose(self, pilot: Pilot, wanted: int | None) -> None:
        """Set the sizes of samples and mini-batches, and say if they do not suffice."""
        size = wanted
        if size is None:
            most = _SAFE if self.estimator == "signed" else _LARGEST
            size = max(_at_most(pilot.variance / _VARIANCE), _at_most(pilot.largest / most))
            if self.estimator == "perturbed":
                size = max(size, _at_most(math.sqrt(pilot.third / (3.0 * _BIAS))))
            if size > self.variates.n:
                self._warn_of_size(self.variates.n, size, pilot)
                size = self.variates.n
            size = max(100, size)
        per_block = -(-size // self.blocks)
        self.subsample_size = per_block * self.blocks
        #: Variance of the estimated log-likelihood where the posterior is, by the pilot.
        self.sigma2 = pilot.variance / self.subsample_size
        shift, batch = 0.0, PERTURBED
        scale = self.variates.n / self.subsample_size
        if self.estimator == "signed":
            shift, batch = pilot.total - self.blocks, per_block
            scale = self.variates.n / per_block
        self.sampled = Sampled(self.variates.family, self.variates.expansion, scale, shift, batch)
        if wanted is not None and not self.sigma2 <= _TOO_LARGE:
            needed = _at_most(pilot.variance / _VARIANCE)
            self._warn_of_size(self.subsample_size, needed, pilot)
        elif self.estimator == "perturbed" and pilot.bias(self.subsample_size) > _BIASED:
            needed = _at_most(math.sqrt(pilot.third / (3.0 * _BIAS)))
            self._warn_of_size(self.subsample_size, needed, pilot)

    def _warn_of_size(self, size: int, needed: int, pilot: Pilot) -> None:
        distance = self.variates.curved.distance
        far = (
            f" `reference` is about {distance:.0f} posterior standard deviations from the mode: "
            "leave it out to have the mode found on all records."
            if distance > 1.0
            else ""
        )
        less = " order=2 would need fewer." if self.order < 2 else ""
        n = self.variates.n
        would_do = f"About {needed} of {n} records would do: raise subsample_size, or use NUTS."
        if needed > n:
            would_do = f"As many as there are, {n}, would not do."
        what = (
            f"The log-likelihood estimated from {size} records has a variance of about "
            f"{pilot.variance / size:.3g}; above 1 chains get stuck and the perturbed posterior is "
            "off."
        )
        if pilot.variance / size <= _TOO_LARGE:
            what = (
                f"Single records change the log-likelihood estimated from {size} of them by up to "
                f"{pilot.largest / size:.2g}: the expansion about the mode does not predict them, "
            )
            what += (
                f"and the perturbed posterior is off, by about {pilot.bias(size):.2g} of its "
                'log-density. estimator="signed" has no such error.'
                if self.estimator == "perturbed"
                else "and estimates may change their sign."
            )
        warnings.warn(f"{what} {would_do}{far}{less}", UserWarning, stacklevel=4)

    # -- the life of a chain --------------------------------------------------------------------

    def _compile(self) -> None:
        self.variates.compile()
        self._begin()

    def _begin(self) -> None:
        self.variates.data.refuse_changed()
        self.tune = True
        self._chain: Any = None
        # Hoffman & Gelman (2014), Section 3.2, which shrinks log step sizes towards log path_length
        start, target = 0.1 * self.path_length, self.target_accept
        self._averaging = DualAverageAdaptation(start, target, gamma=0.05, k=0.75, t0=10)
        self._set_step(self._given_step or 0.5 * self.path_length)
        self._iterations = self._kept = 0
        self._sigma2_sum = self._sign_sum = self._accept_sum = self._accept_u_sum = 0.0

    def _set_step(self, step_size: float) -> None:
        self.step_size = float(min(step_size, _LONGEST))
        steps = self.path_length / self.step_size - 1e-9
        self.n_steps = max(1, math.ceil(min(steps, _MOST_STEPS)))

    def stop_tuning(self) -> None:
        """Keep the step size from here on."""
        if self.tune and self._given_step is None and self._iterations:
            self._set_step(self._averaging.current(tune=False))
            # shorter, so that the trajectory has the length that was asked for
            self.step_size = min(self.step_size, self.path_length / self.n_steps)
        self.tune = False

    def reset_tuning(self) -> None:
        """Begin to tune again."""
        self._begin()

    def _start(self) -> Any:
        """A chain at a draw from the normal approximation, where its density is finite."""
        variates, at = self.variates, self.sampled
        records = (variates.rows, variates.width)
        theta = variates.typical(self.rng)
        chain: Any
        for _ in range(STARTS):
            if self.estimator == "signed":
                chain = start_signed(self.rng, theta, *records, at.batch, self.blocks)
                sample = first_records(chain.sample, chain.counts[0] * at.batch)
            else:
                chain = start_perturbed(self.rng, theta, *records, self.subsample_size, self.blocks)
                sample = chain.sample
            if math.isfinite(variates.log_density(at, sample, theta)):
                return chain
            refused, theta = theta, variates.typical(self.rng)
        centre, names = variates.curved.theta, []
        for value, where in zip(
            variates.parameters.values, variates.parameters.slices, strict=True
        ):
            alone = centre.copy()
            alone[where] = refused[where]
            if not math.isfinite(variates.log_density(at, sample, alone)):
                names.append(f"`{value.name}`")
        raise ValueError(
            f"The density is not finite at {STARTS} draws from the normal approximation about "
            f"the mode, for {', '.join(names) or 'values of several variables together'}. The "
            "mode lies at a bound of the support, or the posterior is not finite about it: use "
            "the default transform, another parameterisation, or NUTS."
        )

    def _compile_transition(self) -> None:
        """Compile in the process that starts the chains, so that forked ones need not."""
        given, self.rng = self.rng, np.random.default_rng(0)
        self._chain = self._start()
        self._transition()
        self._chain, self.rng = None, given

    def _transition(self) -> tuple[float, ...]:
        variates, curved, n = self.variates, self.variates.curved, self.variates.n
        state = (variates.kernel, variates.prior, self.sampled, variates.rows, self._chain)
        settings = (curved.covariance, self.step_size, self.n_steps)
        if self.estimator == "signed":
            some = (self.blocks, self.sampled.batch)
            numbers = signed_numbers(self.rng, curved.inverse_root.T, n, *some)
            return signed(*state, *settings, numbers)
        some = (self.blocks, self.subsample_size // self.blocks)
        numbers = perturbed_numbers(self.rng, curved.inverse_root.T, n, *some)
        return (*perturbed(*state, *settings, numbers), 1.0)

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[Any]]:
        """One iteration: a block of the sample, then a trajectory."""
        if self._chain is None:
            self._chain = self._start()
        accept, accept_u, sigma2, error, lp, sign = self._transition()
        stats = {
            "acceptance_rate": accept,
            "acceptance_rate_u": accept_u,
            "sigma2": sigma2,
            "sign": sign,
            "energy_error": error,
            "lp": lp,
            "step_size": self.step_size,
            "n_steps": self.n_steps,
            "diverging": not abs(error) < _DIVERGENT,
            "tune": self.tune,
            "warning": None,
        }
        self._iterations += 1
        if not self.tune:
            self._kept += 1
            self._sigma2_sum += sigma2
            self._sign_sum += sign
            self._accept_sum += accept
            self._accept_u_sum += accept_u
            if self._iterations == self._planned:
                stats["warning"] = self._warning()
        elif self._given_step is None:
            self._averaging.update(accept, tune=True)
            self._set_step(self._averaging.current(tune=True))
        moved = self.variates.parameters.point(self._chain.theta.copy())
        return {**point, **moved}, [stats]

    # -- what it says ---------------------------------------------------------------------------

    def _warning(self) -> SamplerWarning | None:
        """At the end: signs that cancel, or estimates that vary too much, and what would help."""
        positive = 0.5 * (1.0 + self._sign_sum / self._kept)
        sigma2 = self._sigma2_sum / self._kept
        remedy = "Raise subsample_size"
        if self.order < 2:
            remedy += ", use order=2"
        if self.variates.curved.distance > 1.0:
            remedy += ", leave out `reference` to expand about the mode"
        message, level = "", "warn"
        least = min(self._accept_sum, self._accept_u_sum) / self._kept
        length = self.n_steps * self.step_size
        if positive < MIN_POSITIVE:
            level = "error"
            message = (
                f"Only {positive:.2f} of the likelihood estimates are positive: expectations are "
                f"differences of nearly equal sums, and dp.signed_expectation refuses. {remedy}."
            )
        elif not sigma2 <= _TOO_LARGE:
            message = (
                f"The estimated log-likelihood has a variance of {sigma2:.3g} on average (sigma2), "
                f"above 1: the chain may be stuck, and the posterior off. {remedy}."
            )
        elif least < _HARDLY_MOVED:
            message = (
                f"Only {least:.1%} of the moves of theta or of the sample were accepted: the chain "
                "hardly moved, and may have left the posterior for a place where the expansion "
                f"about the mode is meaningless. {remedy}, or use NUTS."
            )
        elif length < 0.99 * self.path_length:
            message = (
                f"Trajectories of {self.n_steps} steps of {self.step_size:.2g} are {length:.2g} "
                f"long instead of path_length={self.path_length:.2g}, so draws are strongly "
                "correlated. Use another parameterisation, lower target_accept, or NUTS."
            )
        return SamplerWarning(WarningType.CONVERGENCE, message, level) if message else None


def _at_most(size: float) -> int:
    """A number of records, where the pilot may have found no finite one."""
    return math.ceil(size) if size < 1e15 else 10**15
