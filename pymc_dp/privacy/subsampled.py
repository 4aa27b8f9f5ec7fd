"""What releases on batches cost, by dp-accounting.

Batches of a fixed size are accounted by Rényi differential privacy (`renyi_epsilon`), Poisson
batches by numerical privacy loss distributions: dp-accounting puts the loss of one release on a
grid ("connect the dots": Doroshenko et al. 2022), always to the pessimistic side, and composes by
Fourier transforms. Every function here errs on the private side. The one error that is not
pessimistic by construction, rounding in the transforms, is paid with a part of delta (`_ROUNDING`).

With an interval h, each of k releases adds at most h²/4 to the variance of the loss (h²/6 on
average), so what matters is h relative to the standard deviation v of *one* release's loss: h =
v/100 overstates epsilon by some 1e-5 of it. Coarser grids are taken where this one would have more
points than a call of about a second allows (but none coarser than v/10 for that reason), and where
second differences of delta on the grid would drown in rounding errors (losses below 1e-3). The grid
follows from the plans alone, so that all functions agree about the same plans. Above an epsilon of
some hundreds it would have millions of points, and that batches are secret is worth little: there
they are not counted as secret (`_told_epsilon`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom

from pymc_dp.base.checks import (
    check_delta,
    check_epsilon,
    check_integer,
    check_neighboring,
)
from pymc_dp.privacy.accounting import (
    MU2_UNIT,
    BatchEvent,
    FixedBatchGaussianEvent,
    SubsampledGaussianEvent,
    epsilon_from_mu,
    mu_from_budget,
    mu_from_units,
    units_from_mu,
)

#: A plan: the event of one release, and how many there are.
Plan = tuple[BatchEvent, int]

# Interval of the grid in standard deviations of one release's loss.
_FINEST, _COARSEST = 0.01, 0.1
_POINTS_ONCE = 60_000  # grid points of one release's loss: some 7 µs each
_POINTS = 60_000  # grid points of a composition, some 7 µs each beside a GDP transcript
#: Error of a composition by Fourier transform, per release.  The largest seen was 2e-17 (against
#: the closed form, sampling probability 1, from 10^4 to 10^6 releases).
_ROUNDING = 1e-16
_RESOLUTION = 2.0**-20  # relative, of noise multipliers
_LARGE = 500.0  # an epsilon above which batches do not count as secret


# Beyond the first order, or with noise above the second (in units of the sensitivity), there is no
# amplification: dp-accounting has no better bound there, or loses its digits. The orders are so
# close that epsilon is within 0.2 % of the least over all up to `_AMPLIFIED`, wherever divergences
# grow in proportion to their order; the others are for epsilon below 0.05.
_AMPLIFIED, _VAST = 256.0, 1e6
_ORDERS = (
    *(tenths / 10 for tenths in range(11, 50)),
    *(quarters / 4 for quarters in range(20, 32)),
    *(float(order) for order in range(8, 21)),
    *(22.0, 25.0, 28.0, 31.0, 35.0, 39.0, 44.0, 49.0, 55.0, 61.0, 68.0),
    *(80.0, 100.0, 125.0, 156.0, 200.0, _AMPLIFIED),
    *(2.0**power for power in range(9, 17)),
)


# -- dp-accounting -------------------------------------------------------------------------------


def library() -> Any:
    """dp-accounting, or an ImportError that says how to install it."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ImportError(
            "Accounting for subsampled releases needs the library dp-accounting, which is not "
            "installed: pip install pymc_dp[accounting]"
        ) from error
    return dp_accounting


def _relation(neighboring: str) -> Any:
    """A neighbouring relation as dp-accounting names it."""
    relations = library().NeighboringRelation
    return relations.REPLACE_ONE if neighboring == "replace_one" else relations.ADD_OR_REMOVE_ONE


def _true_multiplier(noise_multiplier: float, neighboring: str) -> float:
    """σ/Δ: under replace_one, two contributions of norm C are up to 2C apart."""
    return noise_multiplier / 2.0 if neighboring == "replace_one" else noise_multiplier


# -- plans ---------------------------------------------------------------------------------------


def _check_plans(plans: Iterable[Plan], neighboring: str) -> list[Plan]:
    checked = []
    for plan in plans:
        event, steps = plan
        if not isinstance(event, SubsampledGaussianEvent | FixedBatchGaussianEvent):
            raise ValueError(
                f"plans must hold pairs (event on batches, steps), not {type(event)}; "
                "releases on all units are counted as ledger units"
            )
        checked.append((event, check_integer("steps", steps, minimum=1)))
    if len({type(event) for event, _ in checked}) > 1:
        raise ValueError(
            "plans must be all on Poisson batches or all on batches of fixed sizes: the two have "
            "different accountants"
        )
    if _fixed(checked) and neighboring != "replace_one":
        raise ValueError(
            "batches of a fixed size have an accounting under neighboring='replace_one' only; use "
            "Poisson batches"
        )
    return checked


def _fixed(plans: Sequence[Plan]) -> list[tuple[FixedBatchGaussianEvent, int]]:
    """The plans on batches of fixed sizes: all of them, or none."""
    return [(one, steps) for one, steps in plans if isinstance(one, FixedBatchGaussianEvent)]


# -- batches of a fixed size ---------------------------------------------------------------------


def renyi_epsilon(
    plans: Sequence[tuple[FixedBatchGaussianEvent, int]], units: int, delta: float
) -> float:
    """Epsilon of plans on batches of fixed sizes together with a GDP transcript of `units`.

    The least over the orders α. The bound of every release (Wang, Balle & Kasiviswanathan 2019,
    Theorem 27) holds whatever came before it, so divergences of one order add up over an adaptive
    sequence. A µ-GDP release of the transcript has α µ²/2 at most: if sums of µ² are refused beyond
    `units`, that is a Rényi filter (Feldman & Zrnic 2021) at *every* order, since the same sum
    decides at all of them. So the order may be chosen last.
    """
    convert, best = library().rdp.compute_epsilon, math.inf
    for order in _ORDERS:
        divergence = order * units / (2.0 * MU2_UNIT)
        for event, steps in plans:
            divergence += steps * _divergence(event, order)
        best = min(best, float(convert([order], [divergence], delta)[0]))
        if divergence + math.log1p(-1.0 / order) > best:
            break  # divergences increase with their order: the others are no better
    return best


@lru_cache(maxsize=4096)
def _divergence(event: FixedBatchGaussianEvent, order: float) -> float:
    """Bound on the Rényi divergence of one release; at most that without amplification, α/(2τ²).
    The latter holds since both neighbours draw the same batches: divergences of mixtures with the
    same weights are at most the largest of their components.
    """
    # This accountant takes σ/Δ and, unlike that of privacy loss distributions, doubles nothing.
    tau = _true_multiplier(event.noise_multiplier, "replace_one")
    plain = 0.5 * (order / tau) / tau
    if order > _AMPLIFIED or tau > _VAST:
        return plain
    found = library()
    accountant = found.rdp.RdpAccountant([order], neighboring_relation=_relation("replace_one"))
    one = found.GaussianDpEvent(tau)
    sampled = found.SampledWithoutReplacementDpEvent(event.n_units, event.batch_size, one)
    bound = float(accountant.compose(sampled).rdp[0])
    return bound if bound < plain else plain  # also where the bound is not a number


# -- Poisson batches: the grid ------------------------------------------------------------------


def _loss_variance(event: BatchEvent, neighboring: str) -> float:
    """About the variance of one release's loss, q² (exp(1/τ²) - 1), without its heavy tail."""
    tau = _true_multiplier(event.noise_multiplier, neighboring)
    return event.sampling_probability**2 * math.expm1(min(tau**-2.0, 1.0))


def _loss_range(event: BatchEvent) -> float:
    """About the width of the support of one release's loss, cut at 10 standard deviations."""
    s, q = event.noise_multiplier, event.sampling_probability
    exponent = math.log(q) + 0.5 / s**2 + 10.0 / s
    return 2.0 * (max(exponent, 0.0) + math.log1p(math.exp(-abs(exponent))))


def _interval(plans: Sequence[Plan], neighboring: str) -> float:
    """Interval of the grid; see the beginning of this module."""
    steps = sum(count for _, count in plans)
    variance = sum(count * _loss_variance(event, neighboring) for event, count in plans)
    sd = math.sqrt(variance / steps)
    affordable = min(20.0 * math.sqrt(steps) / _POINTS, _COARSEST)
    relative = max(_FINEST, affordable, (6e-11 / sd) ** 0.25)
    return max(relative * sd, max(_loss_range(event) for event, _ in plans) / _POINTS_ONCE)


def _composed(plans: Sequence[Plan], neighboring: str) -> Any:
    """Privacy loss distribution of all plans."""
    interval = _interval(plans, neighboring)
    make = library().pld.privacy_loss_distribution.from_gaussian_mechanism
    total = None
    for event, steps in plans:
        one = make(
            event.noise_multiplier,
            value_discretization_interval=interval,
            sampling_prob=event.sampling_probability,
            neighboring_relation=_relation(neighboring),
        ).self_compose(steps)
        total = one if total is None else total.compose(one)
    return total


class _Curve:
    """Upper bound of the hockey-stick divergence of all plans, by its order; constant far below
    `delta`. The divergence of order e^t is a convex function of e^t, so its chords bound it from
    above.
    """

    def __init__(self, losses: Any, delta: float) -> None:
        top = float(losses.get_epsilon_for_delta(max(1e-6 * delta, 1e-13)))
        self.top = max(top, 1e-12)
        orders = np.linspace(-self.top, self.top, _CHORDS)
        self._u = np.concatenate([[0.0], np.exp(orders)])
        self._divergence = np.concatenate([[1.0], losses.get_delta_for_epsilon(orders)])

    def beside(self, units: int, epsilon: float) -> float:
        """Delta at epsilon, together with a GDP transcript.

        E[H(epsilon - L)], with H the divergence of the plans and L ~ N(mu²/2, mu²) the loss of the
        transcript in cells. H(epsilon - L) is increasing in L and convex in e^-L: within a cell of
        width d, a chord in e^-L bounds it, and gives the upper end at most d/8 more weight than a
        chord in L.
        """
        mu = mu_from_units(units)
        order = epsilon - mu * (_CELLS + mu / 2.0)
        divergence = np.interp(np.exp(np.minimum(order, self.top)), self._u, self._divergence)
        low, high = divergence[:-1], divergence[1:]
        weight = np.minimum(_UPPER + mu * _CELL / 8.0, 1.0)
        total = float(_MASS @ (low + weight * (high - low)))
        return min(1.0, total + 2.0 * _TAIL)


def _standard_cells() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ends of cells of N(0, 1), their masses, and where within a cell its mean is, in [0, 1]."""
    half = np.linspace(0.0, _REACH, _HALF_CELLS + 1)
    mass = ndtr(-half[:-1]) - ndtr(-half[1:])  # of the upper half: no cancellation in its tail
    density = np.exp(-(half**2) / 2.0) / math.sqrt(2.0 * math.pi)
    where = ((density[:-1] - density[1:]) / mass - half[:-1]) / _CELL
    ends = np.concatenate([-half[:0:-1], half])
    return ends, np.concatenate([mass[::-1], mass]), np.concatenate([1.0 - where[::-1], where])


_CHORDS = 4096
_REACH, _HALF_CELLS = 9.5, 1000
_CELL = _REACH / _HALF_CELLS
_CELLS, _MASS, _UPPER = _standard_cells()
_TAIL = float(ndtr(-_REACH))  # 1e-21


def _usable(delta: float, plans: Sequence[Plan]) -> float:
    """Delta less what rounding errors may amount to."""
    rounding = _ROUNDING * (100 + sum(steps for _, steps in plans))
    if delta < 10 * rounding:
        raise ValueError(
            f"delta = {delta:g} is too small for this many subsampled releases: their composition "
            f"is computed with an error of up to {rounding:.0e}. Use delta >= {10 * rounding:.0e}"
        )
    return delta - rounding


def _told_epsilon(plans: Sequence[Plan], units: int, delta: float, neighboring: str) -> float:
    """Epsilon, from above, of plans on Poisson batches that an adversary is told, and `units`. A
    unit is in k of the releases, or fewer, but for a probability of delta/2. Given its coins, these
    and the transcript are Gaussian releases whose squared mu add up; they get the rest of delta.
    """
    squares, chance = units / MU2_UNIT, delta / 2.0 / len(plans)
    for event, steps in plans:
        k = binom.isf(chance, steps, event.sampling_probability)
        if not binom.sf(k, steps, event.sampling_probability) <= chance:
            k = steps
        squares += k / _true_multiplier(event.noise_multiplier, neighboring) ** 2
    return epsilon_from_mu(math.sqrt(squares * (1.0 + 1e-12)), delta / 2.0)


# -- public -------------------------------------------------------------------------------------


def epsilon_of(
    plans: Iterable[Plan], units: int, delta: float, neighboring: str = "replace_one"
) -> float:
    """Epsilon of fixed plans of subsampled releases together with a GDP transcript, rounded up.

    All plans are on batches of one kind. `units` is the squared mu of all other releases in ledger
    units, relative to the sensitivity under `neighboring`.

    *Guarantee.* (epsilon, delta)-DP for everything that the plans and the transcript release, in
    whatever order and however the releases of the transcript were chosen (see `room_beside`).
    *Assumptions.* Batches are what the events say, drawn for each release, and secret.

    *Weaknesses.* Batches of a fixed size cost 2 to 7 times the epsilon of Poisson batches. For
    Poisson batches the result is above the exact value: by some 1e-5 of it at 1000 releases, 1e-4
    at 10^4, 1e-3 at 10^6; by 5e-3 at q = 1e-4, and by up to 1e-2 where the loss of one release is
    below 1e-6. Poisson batches do not count as secret where that alone gives more than 500: the
    result is then several times the exact value, where that is below 1000.
    """
    neighboring = check_neighboring(neighboring)
    plans, delta = _check_plans(plans, neighboring), check_delta(delta)
    units = check_integer("units", units, minimum=0)
    if not plans:
        return epsilon_from_mu(mu_from_units(units), delta)
    if fixed := _fixed(plans):
        return renyi_epsilon(fixed, units, delta)
    told = _told_epsilon(plans, units, delta, neighboring)
    if told > _LARGE:
        return told
    usable = _usable(delta, plans)
    losses = _composed(plans, neighboring)
    alone = float(losses.get_epsilon_for_delta(usable))
    if units == 0 or math.isinf(alone):
        return alone
    curve = _Curve(losses, usable)

    def excess(epsilon: float) -> float:
        return math.log(curve.beside(units, epsilon) / usable)

    if excess(0.0) <= 0:
        return 0.0
    high = epsilon_from_mu(mu_from_units(units), usable / 2) + curve.top
    while excess(high) > 0:
        high *= 2
    return _last_private(excess, high, 0.0, high * 1e-12)


def room_beside(
    plans: Iterable[Plan], epsilon: float, delta: float, neighboring: str, cap: int
) -> int:
    """How many ledger units of GDP releases a budget allows beside fixed plans, rounded down.

    A ledger that may charge `cap` units reserves ``cap - room_beside(...)`` for the plans, which
    are all on batches of one kind. The result is the largest such number up to about 1e-9 of it.
    ValueError if the plans alone pass the budget.

    *Guarantee.* Plans of subsampled releases, fixed beforehand, together with GDP releases that are
    chosen adaptively (also from what the plans released, and interleaved with them) and refused
    once their squared mu would pass the result, are (epsilon, delta)-DP.

    *Why a filter may run beside a fixed plan.* Write H(t; W) for the hockey-stick divergence of
    order e^t of a pair W of distributions, and N(r) for the pair N(0, 1), N(r, 1). Each release k
    of the plan has a dominating pair W_k, whatever came before; a GDP release of m has N(m). Let
    V(t; K, r) be the largest divergence of order e^t that an adversary can still bring about when
    the releases K of the plan are to come and r² of squared mu is left. Claim: V(t; K, r) <= H(t;
    N(r) x W_K), with W_K the product over K. Backwards induction on the number of releases: if the
    next one is a GDP release of m <= r, its privacy loss L leaves E[V(t - L; K, sqrt(r² - m²))] <=
    H(t; N(m) x N(sqrt(r² - m²)) x W_K), and N(m) x N(sqrt(r² - m²)) is N(r), as normal
    distributions are invariant under rotation. If it is a release k of the plan, E[V(t - L; K
    without k, r)] <= H(t; W_k x N(r) x W_(K without k)). Stopping early is post-processing. Only
    sums of squared mu enter, so m may depend on everything released. The same argument fails for
    two adaptively chosen kinds of losses, which is why the plans are fixed.
    """
    neighboring = check_neighboring(neighboring)
    plans = _check_plans(plans, neighboring)
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    cap = check_integer("cap", cap, minimum=0)
    high = min(cap, units_from_mu(mu_from_budget(epsilon, delta)))
    if not plans:
        return high
    fixed = _fixed(plans)
    if fixed or epsilon > _LARGE:

        def excess(units: float) -> float:
            if fixed:
                return renyi_epsilon(fixed, math.floor(units), delta) - epsilon
            return _told_epsilon(plans, math.floor(units), delta, neighboring) - epsilon

        _check_alone(excess(0.0) <= 0, epsilon, delta)
    else:
        usable, losses = _usable(delta, plans), _composed(plans, neighboring)
        _check_alone(losses.get_delta_for_epsilon(epsilon) <= usable, epsilon, delta)
        curve = _Curve(losses, usable)

        def excess(units: float) -> float:
            return math.log(curve.beside(math.floor(units), epsilon) / usable)

    if excess(0.0) > 0:  # by the chords of a curve
        return 0
    if excess(high) <= 0:
        return high
    return min(high, math.floor(_last_private(excess, 0.0, float(high), max(1.0, high * 1e-10))))


def _check_alone(fit: bool, epsilon: float, delta: float) -> None:
    if not fit:
        raise ValueError(
            f"the plans alone pass epsilon = {epsilon:g}, delta = {delta:g}. Use a larger noise "
            "multiplier, fewer steps or smaller batches"
        )


def _last_private(
    excess: Callable[[float], float], inside: float, outside: float, resolution: float
) -> float:
    """A point near the zero of a monotone function at which it was seen to be at most 0."""
    root = brentq(excess, inside, outside, xtol=resolution)
    step = math.copysign(resolution, inside - outside)
    point = root + step
    while (point - inside) * step < 0 and excess(point) > 0:
        step *= 2
        point += step
    return inside if (point - inside) * step >= 0 else point


def smallest_noise_multiplier(
    epsilon: float,
    delta: float,
    event_of: Callable[[float], BatchEvent],
    steps: int,
    neighboring: str = "replace_one",
    units: int = 0,
) -> float:
    """Smallest noise multiplier with which a plan keeps a budget, rounded up, within 1e-5.

    s = σ/C, with C the largest norm of one unit's contribution. `event_of` gives the event of one
    of `steps` releases by its noise multiplier; `units` of GDP releases are under the same budget.

    *Guarantee.* ``epsilon_of`` was evaluated at the result and is at most `epsilon`.
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    steps = check_integer("steps", steps, minimum=1)
    neighboring = check_neighboring(neighboring)
    _check_plans([(event_of(1.0), steps)], neighboring)
    used = epsilon_of([], units, delta, neighboring)
    if used >= epsilon:
        raise ValueError(
            f"nothing is left of epsilon = {epsilon:g}: what else is planned or spent uses "
            f"{used:.6g} at delta = {delta:g}. Use a larger epsilon, or plan less beside it"
        )

    def excess(log_s: float) -> float:
        event = event_of(math.exp(log_s))
        found = epsilon_of([(event, steps)], units, delta, neighboring)
        # Slack for rounding; bounded for the root finder.
        return min(found - epsilon * (1.0 - 1e-9), 10.0 * epsilon)

    q = event_of(1.0).sampling_probability
    inside = outside = math.log(_clt_multiplier(epsilon, delta, q, steps, neighboring))
    stride = 0.05
    if excess(inside) <= 0:
        while excess(outside := outside - stride) <= 0:
            inside, stride = outside, 2 * stride
    else:
        while excess(inside := inside + stride) > 0:
            outside, stride = inside, 2 * stride
            if inside > 60:
                raise ValueError(
                    f"no noise multiplier keeps epsilon = {epsilon:g} to the accuracy of the "
                    f"computation: what else is planned or spent uses {used:.9g}"
                )
    return math.exp(_last_private(excess, inside, outside, _RESOLUTION))


def _clt_multiplier(epsilon: float, delta: float, q: float, steps: int, neighboring: str) -> float:
    """Where to begin: by the central limit theorem, mu² = steps q² (exp(1/τ²) - 1)."""
    mu = mu_from_budget(epsilon, delta)
    tau = math.log1p((mu / q) ** 2 / steps) ** -0.5
    return 2.0 * tau if neighboring == "replace_one" else tau
