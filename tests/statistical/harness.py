"""Stationarity of a kernel on small analytic posteriors, by thousands of chains at once.

The targets are sums over a dozen records in two dimensions, with moments by quadrature. The
queries implement the kernel protocols with known, strong noise. Chains start from exact draws, so
a valid kernel keeps every moment from the first iteration on, and an invalid one drifts away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

# Two-sided normal tail 3.8e-8 for each of at most 12 moments: below 1e-6 per test with room for
# the skewness of chain means.
Z_LIMIT = 5.5


class Target:
    """Posterior in two dimensions: a sum of per-record terms and a public prior."""

    half_range = 5.0  # the grid covers the posterior's mass to 1e-10

    def log_likelihood(self, z):
        """Per record, (..., n)."""
        raise NotImplementedError

    def record_gradients(self, z):
        """Gradient of `log_likelihood`, (..., n, 2)."""
        raise NotImplementedError

    def log_density(self, z):
        raise NotImplementedError

    def gradient(self, z):
        raise NotImplementedError

    @cached_property
    def grid(self):
        """Nodes (k, 2), their probabilities (k,), and the spacing."""
        axis, spacing = np.linspace(-self.half_range, self.half_range, 601, retstep=True)
        nodes = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
        log_p = np.concatenate(
            [
                self.log_likelihood(part).sum(-1) + self.log_density(part)
                for part in np.array_split(nodes, 16)
            ]
        )
        p = np.exp(log_p - log_p.max())
        return nodes, p / p.sum(), spacing

    @cached_property
    def mean(self):
        nodes, p, _ = self.grid
        return p @ nodes

    @cached_property
    def sd(self):
        nodes, p, _ = self.grid
        return np.sqrt(p @ (nodes - self.mean) ** 2)

    @cached_property
    def exact(self):
        """Expectation of each of `moments`."""
        nodes, p, _ = self.grid
        return {name: p @ value for name, value in self.moments(nodes).items()}

    def moments(self, z):
        """Functions whose averages are compared, of standardised coordinates u."""
        u = (z - self.mean) / self.sd
        u1, u2 = u[..., 0], u[..., 1]
        return {
            "mean 1": u1,
            "mean 2": u2,
            "variance 1": u1 * u1,
            "variance 2": u2 * u2,
            "covariance": u1 * u2,
            "third 1": u1 * u1 * u1,
            "third 2": u2 * u2 * u2,
        }

    def draw(self, rng, size):
        """Exact draws, up to the grid spacing, (size, 2)."""
        nodes, p, spacing = self.grid
        index = rng.choice(len(nodes), size, p=p)
        return nodes[index] + spacing * rng.uniform(-0.5, 0.5, (size, 2))


class Logistic(Target):
    """Logistic regression with prior N(0, I) and covariates of norm at most `bound`."""

    bound = 2.0

    def __init__(self, n=12, seed=0):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, 2)) * [1.5, 0.7]
        x *= np.minimum(1.0, self.bound / np.linalg.norm(x, axis=1))[:, None]
        self.signed = x * np.where(rng.random(n) < 0.7, 1.0, -1.0)[:, None]

    def log_likelihood(self, z):
        return -np.log1p(np.exp(-(z @ self.signed.T)))

    def record_gradients(self, z):
        return (1.0 / (1.0 + np.exp(z @ self.signed.T)))[..., None] * self.signed

    def log_density(self, z):
        return -0.5 * (z**2).sum(-1)

    def gradient(self, z):
        return -z


class Banana(Target):
    """x1 ~ N(t1, s1^2), x2 ~ N(t2 + a t1^2, s2^2), prior Ban(0, I, a) (dp_hmc 2021, section 4.1).

    Its log-likelihood has unbounded curvature and the posterior a closed form.
    """

    half_range = 12.0

    def __init__(self, n=12, a=0.7, s1=3.0, s2=2.5, seed=1):
        rng = np.random.default_rng(seed)
        self.a, self.s1, self.s2 = a, s1, s2
        self.x = rng.normal(size=(n, 2)) * [s1, s2] + [0.5, 1.0]

    def _residuals(self, z):
        t1, t2 = z[..., :1], z[..., 1:]
        return (self.x[:, 0] - t1) / self.s1, (self.x[:, 1] - t2 - self.a * t1**2) / self.s2

    def log_likelihood(self, z):
        r1, r2 = self._residuals(z)
        return -0.5 * (r1**2 + r2**2)

    def record_gradients(self, z):
        r1, r2 = self._residuals(z)
        chain = 2.0 * self.a * z[..., :1]
        return np.stack([r1 / self.s1 + r2 / self.s2 * chain, r2 / self.s2], axis=-1)

    def log_density(self, z):
        return -0.5 * (z[..., 0] ** 2 + (z[..., 1] + self.a * z[..., 0] ** 2) ** 2)

    def gradient(self, z):
        straight = z[..., 1] + self.a * z[..., 0] ** 2
        return -np.stack([z[..., 0] + 2.0 * self.a * z[..., 0] * straight, straight], axis=-1)


class Anchored(Target):
    """A target whose score was released once, at the origin, with an error of `tilt`.

    Records keep l_i(z) - l_i(0) - g_i(0).z; the released score times z is public.
    """

    def __init__(self, base, tilt):
        self.base = base
        origin = np.zeros(2)
        self.half_range = base.half_range
        self.value, self.slope = base.log_likelihood(origin), base.record_gradients(origin)
        self.score = self.slope.sum(0) + tilt

    def log_likelihood(self, z):
        return self.base.log_likelihood(z) - self.value - z @ self.slope.T

    def record_gradients(self, z):
        return self.base.record_gradients(z) - self.slope

    def log_density(self, z):
        return self.base.log_density(z) + z @ self.score

    def gradient(self, z):
        return self.base.gradient(z) + self.score


class Moved(Target):
    """A target in coordinates w, z = basis @ w."""

    half_range = 10.0

    def __init__(self, base, basis):
        self.base, self.basis = base, basis

    def log_likelihood(self, w):
        return self.base.log_likelihood(w @ self.basis.T)

    def log_density(self, w):
        return self.base.log_density(w @ self.basis.T)

    def gradient(self, w):
        return self.base.gradient(w @ self.basis.T) @ self.basis


class Ball(Target):
    """A target restricted to a ball about the origin."""

    def __init__(self, base, radius):
        self.base, self.radius = base, radius
        self.half_range = radius

    def log_likelihood(self, z):
        return self.base.log_likelihood(z)

    def log_density(self, z):
        return np.where(self.inside(z), self.base.log_density(z), -np.inf)

    def inside(self, z):
        return (z**2).sum(-1) <= self.radius**2

    def draw(self, rng, size):
        z = super().draw(rng, 2 * size)
        return z[self.inside(z)][:size]


class Public(Target):
    """A target without private records: all terms of a target, or of public terms, are public."""

    def __init__(self, base):
        self.base = base

    def log_likelihood(self, z):
        return np.zeros((*z.shape[:-1], 1))

    def log_density(self, z):
        value = self.base.log_density(z)
        if isinstance(self.base, Target):
            value = value + self.base.log_likelihood(z).sum(-1)
        return value

    def gradient(self, z):
        value = self.base.gradient(z)
        if isinstance(self.base, Target):
            value = value + self.base.record_gradients(z).sum(-2)
        return value


class RecordPath:
    """Per-record accounts along one path."""

    def __init__(self, queries, start, start_value):
        self.queries, self.start, self.start_value = queries, start, start_value
        self.account = np.zeros_like(self.start_value)
        self.at = self.g = None

    def gradient(self, z, mid):
        self.arrive(z)
        self.g = self.clipped_gradients(mid)
        return self.queries.noisy_gradient(mid, self.g)

    def clipped_gradients(self, mid):
        return self.queries.clipped_gradients(mid)

    def arrive(self, z):
        assert np.isfinite(z).all()
        if self.g is not None:
            self.account += np.matmul(self.g, (z - self.at)[..., None])[..., 0]
        self.at = z

    def energy_error(self, z_end, lower, upper):
        self.arrive(z_end)
        self.end, self.end_value = z_end, self.queries.target.log_likelihood(z_end)
        errors = self.end_value - self.start_value - self.account
        return self.queries.noisy_sum("energy_error", errors, lower, upper)


@dataclass
class NoisyQueries:
    """Queries with known noise on the records of a target; counts its answers.

    Parameters
    ----------
    target : Target
    rng : numpy.random.Generator
    gradient_noise_sd : float
        Per coordinate of a gradient release.
    noise_multiplier : float
        Of log-ratio and energy-error releases, times the replace_one width of the interval.
    ratio_clip : callable
        Half-width for log-likelihood ratios as a function of the distance moved.
    clip_norm : float
        Of per-record gradients.
    """

    target: Target
    rng: np.random.Generator
    gradient_noise_sd: float = 0.0
    noise_multiplier: float = 0.0
    ratio_clip: Callable[[Any], Any] = lambda distance: 2.0 * distance
    clip_norm: float = np.inf
    path_class: ClassVar[type[RecordPath]] = RecordPath

    def __post_init__(self):
        self.answers: Counter[str] = Counter()
        self.clipped = 0  # log ratios and energy errors outside their interval
        self.last_gradient = None  # position and answer of the last gradient release
        self.last_path = None

    def clipped_gradients(self, z):
        g = self.target.record_gradients(z)
        if np.isfinite(self.clip_norm):
            norm = np.sqrt((g**2).sum(-1, keepdims=True))
            g = g * np.minimum(1.0, self.clip_norm / norm)
        return g

    def noisy_gradient(self, z, g):
        assert np.isfinite(z).all()
        self.answers["gradient"] += 1
        total = np.einsum("...nd->...d", g)  # several times faster than sum(-2)
        answer = total + self.gradient_noise_sd * self.rng.standard_normal(z.shape)
        self.last_gradient = z, answer
        return answer

    def noisy_sum(self, name, terms, lower, upper):
        self.answers[name] += 1
        lower, upper = np.asarray(lower), np.asarray(upper)
        bounded = np.clip(terms, lower[..., None], upper[..., None])
        self.clipped += np.count_nonzero(np.abs(bounded - terms) > 1e-9)
        noise_sd = self.noise_multiplier * (upper - lower)
        noise = noise_sd * self.rng.standard_normal(terms.shape[:-1])
        return bounded.sum(-1) + noise, noise_sd

    def gradient(self, z):
        return self.noisy_gradient(z, self.clipped_gradients(z))

    def log_ratio(self, z_from, z_to):
        assert np.isfinite(z_to).all()
        ratios = self.target.log_likelihood(z_to) - self.target.log_likelihood(z_from)
        c = self.ratio_clip(np.sqrt(((z_to - z_from) ** 2).sum(-1)))
        return self.noisy_sum("log_ratio", ratios, -c, c)

    def path(self, z_start):
        """From the start of the last path, or its end: chains go where an answer took them."""
        last = self.last_path
        if last is None:
            value = self.target.log_likelihood(z_start)
        else:
            moved = (z_start == last.end).all(axis=-1)[..., None]
            np.testing.assert_array_equal(np.where(moved, last.end, last.start), z_start)
            value = np.where(moved, last.end_value, last.start_value)
        self.last_path = self.path_class(self, z_start, value)
        return self.last_path


@dataclass(frozen=True)
class Report:
    """Outcome of a run."""

    z_scores: dict[str, float]
    acceptance: float

    @property
    def worst(self):
        """The moment with the largest absolute z-score, and that score."""
        return max(self.z_scores.items(), key=lambda item: abs(item[1]))


def run(step, state, target, *, iterations, discard=50):
    """Run a batch of chains and compare time averages with exact expectations.

    Parameters
    ----------
    step : callable
        ``step(state, iteration) -> (state, info)``.
    state : NamedTuple
        Batch of start states, exact draws of the target.
    target : Target
    iterations, discard : int
        Iterations averaged, and before them iterations for a faulty kernel to drift.

    Returns
    -------
    Report
        z-scores of the means over chains of per-chain time averages; chains are independent. A
        momentum carried on is compared with N(0, I) independent of the position.
    """
    sums: dict[str, Any] = Counter()
    accepted = 0.0
    for iteration in range(discard + iterations):
        state, info = step(state, iteration)
        if iteration < discard:
            continue
        accepted += np.mean(info.accepted)
        values = target.moments(state.z)
        if hasattr(state, "momentum"):
            u, p = (state.z - target.mean) / target.sd, state.momentum
            values["momentum variance"] = (p**2).sum(-1) - 2.0
            values["momentum position"] = (p * u).sum(-1)
            values["momentum"] = p.sum(-1)
        for name, value in values.items():
            sums[name] = sums[name] + value

    z_scores = {}
    for name, total in sums.items():
        average = total / iterations - target.exact.get(name, 0.0)
        z_scores[name] = float(average.mean() / (average.std(ddof=1) / np.sqrt(average.size)))
    return Report(z_scores, accepted / iterations)
