"""Deterministic properties of the transition kernels: algebra, reversibility, failures, counts."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pytest

from pymc_dp.kernels import hmc, langevin, penalty
from pymc_dp.kernels.interfaces import HaltonJitter
from pymc_dp.kernels.langevin import ConstantInterval, CurvatureInterval, kick_coefficients
from pymc_dp.kernels.penalty import GaussianProposal

D = 3


class Prior:
    """N(0, I), with an optional wall beyond which the density is not a number."""

    def __init__(self, wall=np.inf):
        self.wall = wall

    def log_density(self, z):
        inside = np.abs(z).max(-1) < self.wall
        return np.where(inside, -0.5 * (z**2).sum(-1), np.nan)

    def gradient(self, z):
        return -z


class Queries:
    """Records -w |z - x_i|^4 / 4, which no quadratic integrator follows exactly.

    Answers carry gradient noise only. Every position and answer is kept.
    """

    centres = np.array([[0.4, -0.2, 0.1], [-0.3, 0.5, 0.2], [0.1, 0.1, -0.6]])

    def __init__(self, rng=None, gradient_noise_sd=0.0, weight=0.3):
        self.rng, self.gradient_noise_sd, self.weight = rng, gradient_noise_sd, weight
        self.answers = Counter()
        self.asked = []
        self.mids, self.points = [], []

    def likelihood(self, z):
        square = ((z[..., None, :] - self.centres) ** 2).sum(-1)
        return -0.25 * self.weight * (square**2).sum(-1)

    def true_gradient(self, z):
        offset = z[..., None, :] - self.centres
        square = (offset**2).sum(-1, keepdims=True)
        return -self.weight * (square * offset).sum(-2)

    def gradient(self, z):
        assert np.isfinite(z).all()
        self.answers["gradient"] += 1
        self.asked.append(z)
        answer = self.true_gradient(z)
        if self.gradient_noise_sd:
            answer = answer + self.gradient_noise_sd * self.rng.standard_normal(z.shape)
        return answer

    def log_ratio(self, z_from, z_to):
        assert np.isfinite(z_from).all() and np.isfinite(z_to).all()
        self.answers["log_ratio"] += 1
        return self.likelihood(z_to) - self.likelihood(z_from), np.zeros(z_to.shape[:-1])

    def path(self, z_start):
        path = PathQueries(self.rng, self.gradient_noise_sd, self.weight)
        path.answers, path.asked = self.answers, path.mids
        path.start, path.account = z_start, np.zeros(z_start.shape[:-1])
        self.last_path = path
        return path


class PathQueries(Queries):
    """Along one path."""

    def gradient(self, z, mid):
        self.arrive(z)
        return super().gradient(mid)

    def arrive(self, z):
        assert np.isfinite(z).all()
        if self.mids:
            force, displacement = self.true_gradient(self.mids[-1]), z - self.points[-1]
            self.account = self.account + (force * displacement).sum(-1)
        self.points.append(z)

    def energy_error(self, z_end, lower, upper):
        self.arrive(z_end)
        assert (np.asarray(lower) < np.asarray(upper)).all()
        self.answers["energy_error"] += 1
        value = self.likelihood(z_end) - self.likelihood(self.start) - self.account
        return value, np.zeros(z_end.shape[:-1])


class AlwaysAccept(np.random.Generator):
    """Public randomness whose accept uniforms are vanishingly small."""

    def standard_exponential(self, size=None, **kwargs):
        return np.full(size, 1e6)


def always_accept(seed):
    return AlwaysAccept(np.random.PCG64(seed))


def start(kernel, rng, z, prior=None, queries=None):
    prior = prior or Prior()
    if kernel is langevin:
        return langevin.initial_state(rng, z, prior)
    if kernel is hmc and queries is not None:
        return hmc.initial_state(z, prior, release_gradient=queries.gradient)
    if kernel is penalty:
        return penalty.initial_state(rng, z, prior)
    return kernel.initial_state(z, prior)


KERNELS = {
    "penalty": (penalty, {"proposal": GaussianProposal(0.3)}),
    "leapfrog": (hmc, {"step_size": 0.2, "n_steps": 3}),
    "position": (hmc, {"step_size": 0.2, "n_steps": 3, "integrator": "position"}),
    "langevin": (langevin, {"step_size": 0.3, "n_steps": 2, "interval": CurvatureInterval(9.0)}),
}


# Integrators and coefficients


@pytest.mark.parametrize("integrator", hmc.INTEGRATORS)
@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_stages_are_palindromes_that_cover_n_steps(integrator, n_steps):
    stages = hmc.INTEGRATORS[integrator](n_steps)
    moves = [
        (name, size) for stage in stages for name, size in zip("kd", stage, strict=True) if size
    ]
    assert moves == moves[::-1]
    assert sum(kick for kick, _ in stages) == sum(drift for _, drift in stages) == n_steps


@pytest.mark.parametrize("integrator", hmc.INTEGRATORS)
def test_integrator_is_reversible_for_every_noise(integrator):
    rng = np.random.default_rng(0)
    queries = Queries()
    noise = rng.standard_normal((5, 4, D))
    z, p = rng.standard_normal((2, 4, D))
    stages = hmc.INTEGRATORS[integrator](4)

    def noisy_score(draws):
        draws = iter(draws)
        return lambda z: queries.true_gradient(z) - z + next(draws)

    used = hmc.releases(4, integrator)["gradient"]
    end = hmc.integrate(z, p, 0.2, stages, noisy_score(noise[:used]))
    back = hmc.integrate(end.z, -end.momentum, 0.2, stages, noisy_score(noise[:used][::-1]))
    np.testing.assert_allclose(back.z, z, atol=1e-12)
    np.testing.assert_allclose(back.momentum, -p, atol=1e-12)


def test_integrator_error_is_third_order_in_one_step():
    rng = np.random.default_rng(1)
    queries = Queries()
    z, p = rng.standard_normal((2, D))

    def energy_error(h):
        end = hmc.integrate(z, p, h, hmc.INTEGRATORS["leapfrog"](1), queries.true_gradient)
        kinetic = 0.5 * (end.momentum @ end.momentum - p @ p)
        return abs(queries.likelihood(end.z) - queries.likelihood(z) - kinetic)

    assert energy_error(0.01) / energy_error(0.005) == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("step_size", [0.1, 0.6, 3.0, np.array([0.2, 0.5, 4.0])])
@pytest.mark.parametrize("sigma", [0.0, 0.7, 5.0])
@pytest.mark.parametrize("friction", [0.0, 1.0, np.array([0.0, 0.5, 9.0])])
def test_kick_coefficients_leave_momentum_stationary(step_size, sigma, friction):
    a, s, extra = kick_coefficients(step_size, sigma, friction)
    total = sigma**2 + extra**2
    np.testing.assert_allclose(a**2 + s**2 * total, 1.0, atol=1e-14)
    np.testing.assert_allclose(s, step_size * (1.0 + a) / 2.0)
    expected = np.maximum(sigma, np.sqrt(2.0 * np.asarray(friction) / step_size))
    np.testing.assert_allclose(np.sqrt(total), np.broadcast_to(expected, np.shape(total)))


# Langevin paths


@pytest.mark.parametrize("step_size", [0.3, 0.8, np.array([0.2, 0.4, 0.8])])
@pytest.mark.parametrize("friction", [0.0, 6.0])
def test_langevin_log_accept_is_the_ratio_of_path_densities(step_size, friction):
    # log Pi(S path) / Pi(path), Pi = pi(z_0) phi(p_0) prod N(p' ; a p + s g(mid), s^2 sigma^2 I)
    sigma, prior = 3.0, Prior()
    rng = np.random.default_rng(2)
    queries = Queries(rng, sigma)
    state = start(langevin, rng, 0.3 * rng.standard_normal((50, D)))
    _, info = langevin.transition(
        rng,
        state,
        queries,
        prior,
        step_size=step_size,
        n_steps=3,
        interval=ConstantInterval(1.0),
        friction=friction,
    )
    a, s, extra = kick_coefficients(step_size, sigma, friction)
    if not np.any(friction):
        assert np.min(a) < 0 or np.max(step_size) < 2 / sigma
    variance = s**2 * (sigma**2 + extra**2)
    path = queries.last_path
    z, p, expected = state.z, state.momentum, 0.0
    for mid, displacement in zip(path.mids, np.diff(path.points, axis=0), strict=True):
        np.testing.assert_allclose(mid, z + step_size * p / 2.0)
        q = 2.0 * displacement / step_size - p
        g = queries.true_gradient(mid) - mid
        forward = -(((q - a * p - s * g) ** 2) / (2.0 * variance)).sum(-1)
        backward = -(((-p + a * q - s * g) ** 2) / (2.0 * variance)).sum(-1)
        expected = expected + backward - forward
        z, p = z + displacement, q
    for weight, (position, momentum) in ((1.0, (z, p)), (-1.0, (state.z, state.momentum))):
        log_target = queries.likelihood(position) + prior.log_density(position)
        expected = expected + weight * (log_target - 0.5 * (momentum**2).sum(-1))
    np.testing.assert_allclose(info.log_accept, expected, rtol=1e-9, atol=1e-9)


def test_langevin_path_is_reversible_without_noise():
    queries, prior = Queries(), Prior()
    settings = {"step_size": 0.2, "n_steps": 4, "interval": ConstantInterval(1.0)}
    rng = always_accept(3)
    begin = start(langevin, rng, rng.standard_normal((6, D)))
    end, forward = langevin.transition(rng, begin, queries, prior, **settings)
    back, backward = langevin.transition(
        rng, end._replace(momentum=-end.momentum), queries, prior, **settings
    )
    np.testing.assert_allclose(back.z, begin.z, atol=1e-12)
    np.testing.assert_allclose(back.momentum, -begin.momentum, atol=1e-12)
    np.testing.assert_allclose(backward.log_accept, -forward.log_accept, atol=1e-12)


@pytest.mark.parametrize(
    "interval",
    [ConstantInterval(0.7), CurvatureInterval(1.3), CurvatureInterval(1.3, log_concave=True)],
)
def test_intervals_are_antisymmetric_under_reversal(interval):
    departure, arrival = np.random.default_rng(4).exponential(size=(2, 20))
    lower, upper = interval(departure, arrival)
    reversed_lower, reversed_upper = interval(arrival, departure)
    np.testing.assert_array_equal(reversed_lower, -np.asarray(upper))
    np.testing.assert_array_equal(reversed_upper, -np.asarray(lower))


class CapturedInterval:
    def __call__(self, departure, arrival):
        self.departure, self.arrival = departure, arrival
        return -1.0, 1.0


@pytest.mark.parametrize("log_concave", [True, False])
def test_curvature_interval_contains_every_energy_error_and_is_tight(log_concave):
    # A record's curvature on either side of mid is at an end of what its assumption allows.
    rng, beta = np.random.default_rng(5), 1.7
    queries, captured = Queries(rng, gradient_noise_sd=3.0, weight=0.0), CapturedInterval()
    state = start(langevin, rng, rng.standard_normal((4000, D)))
    langevin.transition(rng, state, queries, Prior(), step_size=0.8, n_steps=1, interval=captured)
    path = queries.last_path
    mid, move = path.mids[0], path.points[1] - path.points[0]
    lower, upper = CurvatureInterval(beta, log_concave)(captured.departure, captured.arrival)

    def energy_error(h_before, h_after):
        delta, delta_new = mid - state.z, state.z + move - mid
        return 0.5 * (h_after * delta_new**2 - h_before * delta**2).sum(-1)

    extremes = [-beta, 0.0] if log_concave else [-beta, beta]
    errors = np.array([energy_error(h0, h1) for h0 in extremes for h1 in extremes])
    assert (errors >= lower - 1e-12).all() and (errors <= upper + 1e-12).all()
    np.testing.assert_allclose(errors.max(0), upper, atol=1e-12)
    np.testing.assert_allclose(errors.min(0), lower, atol=1e-12)


def test_langevin_flips_momentum_at_rejection_only():
    rng = np.random.default_rng(6)
    queries, prior = Queries(rng, 2.0, weight=3.0), Prior()
    state = start(langevin, rng, rng.standard_normal((200, D)))
    new, info = langevin.transition(
        rng, state, queries, prior, step_size=0.5, n_steps=1, interval=ConstantInterval(1.0)
    )
    rejected = ~info.accepted
    assert 0 < rejected.sum() < 200
    np.testing.assert_array_equal(new.momentum[rejected], -state.momentum[rejected])
    np.testing.assert_array_equal(new.z[rejected], state.z[rejected])
    end = queries.last_path.points[1][info.accepted]
    np.testing.assert_array_equal(new.z[info.accepted], end)


def test_langevin_averages_recover_a_gaussian_mean_from_any_path():
    # Without noise, mid + Lambda^{-1} G is the posterior mean exactly; here N(0, I).
    rng = np.random.default_rng(7)
    queries = Queries(weight=0.0)
    state = start(langevin, rng, 5.0 + rng.standard_normal(D))
    _, info = langevin.transition(
        rng,
        state,
        queries,
        Prior(),
        step_size=0.4,
        n_steps=3,
        interval=ConstantInterval(1.0),
        friction=1.0,
    )
    np.testing.assert_allclose(info.midpoint + info.gradient, 0.0, atol=1e-12)


# Gradient reuse


def test_reuse_keeps_the_stored_gradient_at_rejection_and_replaces_it_otherwise():
    rng = np.random.default_rng(8)
    queries, prior = Queries(rng, 3.0), Prior()
    state = start(hmc, rng, rng.standard_normal((200, D)), prior, queries)
    new, info = hmc.transition(rng, state, queries, prior, step_size=0.4, n_steps=2)
    rejected = ~info.accepted
    assert 0 < rejected.sum() < 200
    np.testing.assert_array_equal(new.gradient[rejected], state.gradient[rejected])
    np.testing.assert_array_equal(new.z[~rejected], queries.asked[-1][~rejected])
    assert (new.gradient[~rejected] != state.gradient[~rejected]).all()


def test_reuse_needs_leapfrog():
    rng = np.random.default_rng(9)
    queries, prior = Queries(), Prior()
    state = start(hmc, rng, np.zeros(D), prior, queries)
    with pytest.raises(ValueError, match="integrator='position'"):
        hmc.transition(rng, state, queries, prior, step_size=0.1, n_steps=2, integrator="position")


# Shapes, counts, failures


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=str)
def test_shapes(name, batch):
    kernel, settings = KERNELS[name]
    rng = np.random.default_rng(10)
    queries, prior = Queries(rng, 0.5), Prior()
    state = start(kernel, rng, rng.standard_normal((*batch, D)))
    new, info = kernel.transition(rng, state, queries, prior, **settings)
    assert type(new) is type(state)
    assert [np.shape(x) for x in new if x is not None] == [
        np.shape(x) for x in state if x is not None
    ]
    for field, value in info._asdict().items():
        expected = (*batch, D) if field in ("midpoint", "gradient") else batch
        assert np.shape(value) == expected, field


COUNTED = {
    "penalty": (penalty, KERNELS["penalty"][1], {}, {}),
    **{
        f"hmc {integrator} {n_steps}": (
            hmc,
            {"step_size": 0.1, "n_steps": n_steps, "integrator": integrator},
            {"n_steps": n_steps, "integrator": integrator},
            {},
        )
        for integrator in hmc.INTEGRATORS
        for n_steps in (1, 4)
    },
    "hmc reuse 1": (
        hmc,
        {"step_size": 0.1, "n_steps": 1},
        {"n_steps": 1, "reuse_gradient": True},
        {"reuse_gradient": True},
    ),
    "hmc reuse 4": (
        hmc,
        {"step_size": 0.1, "n_steps": 4},
        {"n_steps": 4, "reuse_gradient": True},
        {"reuse_gradient": True},
    ),
    "langevin 1": (
        langevin,
        {"step_size": 0.1, "n_steps": 1, "interval": ConstantInterval(1.0)},
        {"n_steps": 1},
        {},
    ),
    "langevin 3": (
        langevin,
        {"step_size": 0.1, "n_steps": 3, "interval": ConstantInterval(1.0), "persistent": False},
        {"n_steps": 3},
        {},
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_releases_are_what_the_kernel_asks(name):
    kernel, settings, plan, start_plan = COUNTED[name]
    rng = np.random.default_rng(11)
    queries, prior = Queries(), Prior()
    state = start(kernel, rng, np.zeros(D), prior, queries if start_plan else None)
    at_start = kernel.start_releases(**start_plan) if start_plan else {}
    assert queries.answers == at_start
    queries.answers.clear()
    for iteration in range(1, 4):
        state, _ = kernel.transition(rng, state, queries, prior, **settings)
        expected = {query: iteration * k for query, k in kernel.releases(**plan).items()}
        assert queries.answers == expected


def test_release_counts_follow_the_paper():
    assert hmc.releases(7) == {"gradient": 8, "log_ratio": 1}
    assert hmc.releases(7, "position") == {"gradient": 7, "log_ratio": 1}
    assert hmc.releases(7, reuse_gradient=True) == {"gradient": 7, "log_ratio": 1}
    assert hmc.start_releases(reuse_gradient=True) == {"gradient": 1}
    assert langevin.releases(7) == {"gradient": 7, "energy_error": 1}
    assert penalty.releases() == {"log_ratio": 1}


OVERFLOWING = {
    "penalty": {"proposal": GaussianProposal(1e308)},
    "leapfrog": {"step_size": 1e200, "n_steps": 3},
    "position": {"step_size": 1e200, "n_steps": 3, "integrator": "position"},
    "langevin": {"step_size": 1e200, "n_steps": 3, "interval": CurvatureInterval(1.0)},
}


@pytest.mark.parametrize("batch", [(), (40,)], ids=str)
@pytest.mark.parametrize("name", OVERFLOWING)
def test_overflow_is_a_rejection(name, batch):
    kernel, _ = KERNELS[name]
    rng = always_accept(12)
    queries, prior = Queries(), Prior()
    state = start(kernel, rng, rng.standard_normal((*batch, D)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, info = kernel.transition(rng, state, queries, prior, **OVERFLOWING[name])
    assert not np.any(info.accepted) and not np.any(info.finite)
    np.testing.assert_array_equal(new.z, state.z)
    np.testing.assert_array_equal(new.log_prior, state.log_prior)
    if kernel is langevin:
        np.testing.assert_array_equal(new.momentum, -state.momentum)


@pytest.mark.parametrize("name", KERNELS)
def test_failed_members_do_not_touch_the_others(name):
    # The wall stops some members; the others must move exactly as they would without it.
    kernel, settings = KERNELS[name]
    z = np.random.default_rng(13).uniform(-0.9, 0.9, (60, D))
    outcomes = []
    for wall in (np.inf, 1.0):
        rng = always_accept(14)
        prior = Prior(wall)
        state = start(kernel, rng, z, prior)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcomes.append(kernel.transition(rng, state, Queries(), prior, **settings))
    (free, _), (walled, info) = outcomes
    assert 0 < info.finite.sum() < 60
    np.testing.assert_array_equal(info.accepted, info.finite)
    np.testing.assert_array_equal(info.finite, np.abs(free.z).max(-1) < 1.0)
    np.testing.assert_array_equal(walled.z[info.finite], free.z[info.finite])
    np.testing.assert_array_equal(walled.z[~info.finite], z[~info.finite])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("z", [np.array([0.0, np.nan, 0.0]), np.full(D, 3.0)], ids=["nan", "wall"])
def test_start_must_have_finite_density(name, z):
    with pytest.raises(ValueError, match="inside the support"):
        start(KERNELS[name][0], np.random.default_rng(15), z, Prior(wall=2.0))


# Jitter


def test_van_der_corput_starts_as_published():
    expected = [0, 1 / 2, 1 / 4, 3 / 4, 1 / 8, 5 / 8, 3 / 8, 7 / 8, 1 / 16]
    jitter = HaltonJitter(0.5)
    assert [jitter(i) - 0.5 for i in range(9)] == expected


def test_jitter_covers_its_range_evenly():
    jitter = HaltonJitter(0.3, np.random.default_rng(16).random())
    values = np.array([jitter(i) for i in range(256)])
    assert values.min() >= 0.7 and values.max() < 1.3
    counts, _ = np.histogram(values, bins=64, range=(0.7, 1.3))
    assert set(counts) <= {3, 4, 5}  # 4 each, up to rounding at the edges of bins
    assert jitter(17) == jitter(17)


def test_jitter_of_zero_width_is_one():
    assert [HaltonJitter(0.0, shift=0.4)(i) for i in range(5)] == [1.0] * 5


@pytest.mark.parametrize("width", [-0.1, 1.0, np.nan])
def test_jitter_refuses_widths_that_allow_no_step(width):
    with pytest.raises(ValueError, match="width"):
        HaltonJitter(width)
