"""Metropolis-adjusted underdamped Langevin trajectories in which the privacy noise is the friction.

Relatives: Horowitz (1991), generalised HMC; Zhang, Cooper & De Sa (2020), AMAGOLD; Riou-Durand &
Vogrinc (2022), MALT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pymc_dp.kernels.interfaces import (
    Array,
    Batch,
    ClipInterval,
    Mask,
    PathQueries,
    Prior,
    every,
    penalty_test,
    select,
    start_log_prior,
)

# -- intervals of energy errors --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConstantInterval:
    """Clip energy errors to [-c, c] whatever the path. About a tenth of the gradient clip norm
    suits whitened coordinates. *Weaknesses.* Nothing shows that no record is clipped, and clipped
    energy errors bias the target.
    """

    c: float

    def __call__(self, departure: Batch, arrival: Batch) -> tuple[Batch, Batch]:
        """Return ``(-c, c)``."""
        return -self.c, self.c


@dataclass(frozen=True, slots=True)
class CurvatureInterval:
    """Interval that contains every energy error of a record with bounded curvature.

    `beta` is a public bound on the spectral norm of a record's log-likelihood Hessian in z, from
    public bounds on the covariates, never from the data. `log_concave` says that every record's
    Hessian lies in [-beta I, 0]; this halves the width.

    The path moves from z_j by delta_j to mid_j and by delta'_j to z_{j+1}. Taylor's theorem about
    mid_j leaves e_i = sum_j (delta'_j.H'_j.delta'_j - delta_j.H_j.delta_j) / 2 for some Hessians of
    l_i. So with D = sum |delta_j|^2 and D' = sum |delta'_j|^2, |e_i| <= beta (D + D') / 2, and
    -beta D'/2 <= e_i <= beta D/2 if log-concave.

    *Guarantee.* No energy error is clipped, so the accept test is exact. *Assumptions.* ``beta``
    holds along the path and no gradient was clipped.
    """

    beta: float
    log_concave: bool = False

    def __call__(self, departure: Batch, arrival: Batch) -> tuple[Batch, Batch]:
        """Return ``(lower, upper)`` from D and D', floats or arrays of shape ``(...)``."""
        half = 0.5 * self.beta
        if self.log_concave:
            return -half * arrival, half * departure
        width = half * (departure + arrival)
        return -width, width


# -- the transition --------------------------------------------------------------------------------


class LangevinState(NamedTuple):
    """What the chain carries on; the joint target is pi(z) N(momentum; 0, I)."""

    z: Array  # (..., d)
    momentum: Array  # (..., d)
    log_prior: Batch  # public log density at z, (...)


class LangevinInfo(NamedTuple):
    """Public diagnostics of one iteration; vectors ``(..., d)``, the rest ``(...)``."""

    accepted: Mask
    log_accept: Batch  # noisy, penalised log acceptance ratio
    noise_sd: Batch  # noise of the released energy error
    finite: Mask  # False where the path was rejected because it overflowed
    midpoint: Array  # mean of the mid-points of the path, accepted or not
    gradient: Array  # mean of the scores released there


class KickCoefficients(NamedTuple):
    """p' = decay p + gain G, with public noise added to G; floats or arrays of shape (d,)."""

    decay: Batch  # a = (1 - kappa) / (1 + kappa)
    gain: Batch  # s = h / (1 + kappa)
    extra_sd: Batch  # sd of the public noise that lifts the release's to what friction asks for


def kick_coefficients(
    step_size: float | Array, gradient_noise_sd: float, friction: float | Array = 0.0
) -> KickCoefficients:
    """Coefficients of one kick. With the noise of a kick sigma_t = max(sigma, sqrt(2 friction / h))
    and kappa = h^2 sigma_t^2 / 4, they satisfy a^2 + s^2 sigma_t^2 = 1 and s = h (1 + a) / 2: a
    kick without force leaves N(0, I) unchanged. kappa > 1 is allowed and makes a negative.
    """
    variance = np.maximum(gradient_noise_sd**2, 2.0 * np.asarray(friction) / step_size)
    kappa = np.square(step_size) * variance / 4.0
    extra_sd = np.sqrt(variance - gradient_noise_sd**2)
    return KickCoefficients((1.0 - kappa) / (1.0 + kappa), step_size / (1.0 + kappa), extra_sd)


def initial_state(rng: np.random.Generator, z: Array, prior: Prior) -> LangevinState:
    """State of a chain that starts at ``z``, with momentum from N(0, I)."""
    return LangevinState(z, rng.standard_normal(z.shape), start_log_prior(z, prior))


@np.errstate(all="ignore")  # an overflowing path is a rejection, not an error
def transition(
    rng: np.random.Generator,
    state: LangevinState,
    queries: PathQueries,
    prior: Prior,
    *,
    step_size: float | Array,
    n_steps: int,
    interval: ClipInterval,
    persistent: bool = True,
    friction: float | Array = 0.0,
    adjusted: bool = True,
) -> tuple[LangevinState, LangevinInfo]:
    """One Langevin trajectory with an exact path-space accept test.

    `step_size` is h in z; an array (d,) is a diagonal mass, h / sqrt(m_j). It may vary between
    iterations if it does not depend on the state; the noise sets no upper limit. `n_steps` is L,
    the number of kicks, with a gradient release each. If not `persistent`, the momentum is drawn
    again, which suits L > 1; with strong noise the kicks refresh it anyway. `friction`, a number or
    (d,), is the least gamma wanted, in 1 / time (about 1 in whitened coordinates): public noise is
    added where the release's own is below sqrt(2 gamma / h). If not `adjusted`, there is no accept
    test and no release for it: a burn-in from a distance at which no path would be accepted, whose
    draws are not kept.

    For j = 0..L-1, with a and s from `kick_coefficients`::

        mid_j   = z_j + h p_j / 2
        G_j     = sum_i clip_b(g_i(mid_j)) + grad log pi0(mid_j) + N(0, sigma^2 I)
        p_{j+1} = a p_j + s G_j
        z_{j+1} = z_j + h (p_j + p_{j+1}) / 2

    Each record's energy error is that of a mid-point rule for a line integral, e_i = l_i(z_L) -
    l_i(z_0) - sum_j clip_b(g_i(mid_j)).(z_{j+1} - z_j). With E the released sum of clipped e_i and
    s_e its noise, accept when log u < E + log pi0(z_L)/pi0(z_0) - sum_j grad log
    pi0(mid_j).(z_{j+1} - z_j) - s_e^2 / 2. Otherwise the position stays and the momentum changes
    sign. Path reversal is a unit-Jacobian involution; the kinetic terms cancel because s^2 sigma^2
    = 1 - a^2, and each kick leaves -(h/2) (p_j + p_{j+1}).(true drift), which the accounts hold.

    The info's averages estimate the posterior mean better than the draws do: mean(midpoint) +
    Lambda^{-1} mean(gradient), Lambda the posterior precision in z, is unbiased for a Gaussian
    posterior whatever the path.

    *Guarantee.* pi(z) N(p; 0, I) is stationary, for any gradient noise, any step size and any
    clipping of the gradients (that only lowers acceptance). *Assumptions.* No energy error is
    clipped (`CurvatureInterval` proves it where gradients are not clipped either), the accounts
    hold the true clipped gradients, the interval is antisymmetric under path reversal, and
    `queries.gradient_noise_sd` is the actual noise. *Weaknesses.* Where gradients are clipped,
    energy errors are first order in the step, and clipping them biases the target. Rejections
    reverse a persistent momentum, so acceptance should be high.
    """
    start, momentum = state.z, state.momentum
    if not persistent:
        momentum = rng.standard_normal(start.shape)
    turned = -momentum
    kick = kick_coefficients(step_size, queries.gradient_noise_sd, friction)
    add_noise = np.logical_or.reduce(kick.extra_sd, axis=None)
    path = queries.path(start)

    # mid-point kicks with half drifts about them; positions passed on are always finite
    z = start.copy()
    finite: Mask = np.True_
    overflowed = False
    departure = arrival = prior_work = np.zeros(z.shape[:-1])
    midpoint = gradient = np.zeros(z.shape)
    half_step = 0.5 * step_size
    delta = half_step * momentum
    square = np.vecdot(delta, delta)
    for _ in range(n_steps):
        mid = z + delta
        known = np.isfinite(mid)  # z is finite, too, where the middle is
        if overflowed or not np.logical_and.reduce(known, axis=None):
            overflowed, finite = True, finite & every(known)
            mid[~finite] = z[~finite] = start[~finite]
        prior_gradient = prior.gradient(mid)
        score = path.gradient(z, mid) + prior_gradient
        midpoint, gradient = midpoint + mid, gradient + score

        force = score
        if add_noise:
            force = score + kick.extra_sd * rng.standard_normal(z.shape)
        momentum = kick.decay * momentum + kick.gain * force

        departure = departure + square
        displacement = delta
        delta = half_step * momentum
        displacement = displacement + delta
        square = np.vecdot(delta, delta)
        arrival = arrival + square

        z = z + displacement
        prior_work = prior_work + np.vecdot(prior_gradient, displacement)
    finite = finite & every(np.isfinite(z))

    end = select(finite, z, start)
    log_prior_new = prior.log_density(end)
    public = log_prior_new - state.log_prior - prior_work
    possible = finite & np.isfinite(public) & np.isfinite(departure + arrival)

    z_new = select(possible, end, start)
    if adjusted:
        # A failed path has no interval; any positive width serves, the answer is ignored.
        squares = np.where(possible, (departure, arrival), 1.0)
        value, noise_sd = path.energy_error(z_new, *interval(*squares))
        accepted, log_accept = penalty_test(rng, possible, value, noise_sd, public)
    else:
        accepted, noise_sd, log_accept = possible, 0.0, np.zeros_like(public)

    state = LangevinState(
        select(accepted, z_new, start),
        select(accepted, momentum, turned),
        np.where(accepted, log_prior_new, state.log_prior),
    )
    means = midpoint / n_steps, gradient / n_steps
    return state, LangevinInfo(accepted, log_accept, noise_sd, possible, *means)


def releases(n_steps: int) -> dict[str, int]:
    """Gaussian releases of one iteration, by query name."""
    return {"gradient": n_steps, "energy_error": 1}
