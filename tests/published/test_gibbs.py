"""PrivacyAwareGibbs: exact posteriors, through every proposal and through PyMC."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.model import Model
from scipy import stats

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.published.reading import read
from tests import naive_bayes
from tests.selection import marked

#: Two-sided normal tail 3.8e-8, with room for the estimated standard error.
Z = 5.5
Point = dict[str, np.ndarray]


def run(
    model: Model,
    step: dp.PrivacyAwareGibbs,
    parameters: Callable[[Point, np.random.Generator], None],
    quantity: Callable[[Point], float],
    iterations: int,
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """One chain whose parameters are drawn exactly; the first tenth tunes and is dropped."""
    rng = np.random.default_rng(8)
    step.set_rng(np.random.default_rng(9))
    point, found, told = model.initial_point(), [], []
    for k in range(iterations):
        point, [stat] = step.step(point)
        parameters(point, rng)
        if k == iterations // 10:
            step.stop_tuning()
        found.append(quantity(point))
        told.append(stat)
    return np.array(found)[iterations // 10 :], told


def deviation(values: np.ndarray, expected: float) -> float:
    """Standard errors between a chain's mean and what it should be."""
    error = values.std() / np.sqrt(_compat.effective_draws(values[None, :, None])[0])
    return float(abs(values.mean() - expected) / error)


# -- the posterior by enumeration -----------------------------------------------------------------


@pytest.fixture(scope="module")
def tables() -> dict[float, tuple[np.ndarray, float]]:
    rng = np.random.default_rng(2)
    return {epsilon: naive_bayes.published(rng, epsilon) for epsilon in (1.0, 3.0, 10.0)}


def any_answer(current: dict[str, Any], parameters: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """A symmetric proposal: every variable is a fair coin."""
    return {name: pm.Bernoulli.dist(0.5, shape=(4,)) for name in current}, 0.0


def test_the_table_of_the_enumerated_posterior(tables: dict[float, Any]) -> None:
    """The paper's model with four records (MATH, section 9)."""
    means = [naive_bayes.exact_mean(*tables[epsilon]) for epsilon in (1.0, 3.0, 10.0)]
    np.testing.assert_allclose(means, [0.4097, 0.4442, 0.3733], atol=5e-5)


@pytest.mark.parametrize(
    ("epsilon", "proposal", "noncentered"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(10.0, any_answer, False), (1.0, "soma", False)]
        ),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                (10.0, "enumerate", False),
                (1.0, "prior", False),
                (10.0, "pcn", False),
                (1.0, "pcn", "auto"),
                (10.0, "prior", "auto"),
            ]
        ),
    ],
)
def test_the_posterior_is_that_of_the_enumeration(
    epsilon: float, proposal: Any, noncentered: Any, tables: dict[float, Any]
) -> None:
    noisy, scale = tables[epsilon]
    model, records = naive_bayes.model(noisy, scale)
    with model:
        step = dp.PrivacyAwareGibbs(records, proposal=proposal, noncentered=noncentered)
    values, told = run(
        model, step, naive_bayes.draw_parameters, lambda point: float(point["p"]), 4000
    )
    assert deviation(values, naive_bayes.exact_mean(noisy, scale)) < Z
    assert max(stat["dp_drift"] for stat in told) < 1e-12
    if proposal == "prior":  # Proposition 3.1, with equality
        assert min(stat["dp_min_log_alpha"] for stat in told) == pytest.approx(-epsilon)


@pytest.mark.exhaustive
@pytest.mark.parametrize("epsilon", [1.0, 3.0, 10.0])
def test_the_table_to_three_digits(epsilon: float, tables: dict[float, Any]) -> None:
    noisy, scale = tables[epsilon]
    model, records = naive_bayes.model(noisy, scale)
    with model:
        step = dp.PrivacyAwareGibbs(records)
    values, _ = run(
        model, step, naive_bayes.draw_parameters, lambda point: float(point["p"]), 60_000
    )
    exact = naive_bayes.exact_mean(noisy, scale)
    assert abs(values.mean() - exact) < 0.002 + 4 * 0.001  # 0.001: the chain's standard error
    assert deviation(values, exact) < Z


@pytest.mark.compiled
@pytest.mark.parametrize(
    "fault",
    marked(
        ["always accepted", "rows are lost", "prior of the count"],
        slow=["always accepted", "rows are lost"],
        exhaustive=["prior of the count"],
    ),
)
def test_planted_faults_are_found(
    fault: str, tables: dict[float, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong acceptance ratio misses the enumerated posterior; so does a lost update."""
    if fault == "prior of the count":
        model, step, exact = counted(True)
        step.set_rng(np.random.default_rng(3))
        monkeypatch.setattr(step, "_log_counts", lambda *parameters: [np.zeros(9)])
        values, _ = run(model, step, nothing, lambda point: float(point["n"]), 4000)
        assert deviation(values, exact) > Z
        return
    noisy, scale = tables[10.0]
    model, records = naive_bayes.model(noisy, scale)
    with model:
        step = dp.PrivacyAwareGibbs(records, noncentered=False)
    drawn, one_by_one = step.offers._drawn, step.offers._one_by_one

    def always(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        exponential, *fresh = drawn(rng)
        return (np.full_like(exponential, np.inf), *fresh)

    def lost(state: Any, *asked: Any) -> tuple[float, float]:
        before = state.rows[:3].copy()
        found = one_by_one(state, *asked)
        state.total[: state.rows.shape[1]] -= (state.rows[:3] - before).sum(axis=0)
        state.rows[:3] = before
        return found

    if fault == "always accepted":
        monkeypatch.setattr(step.offers, "_drawn", always)
    else:
        monkeypatch.setattr(step.offers, "_one_by_one", lost)
    monkeypatch.setattr("pymc_dp.published.step._REFRESH", 10**9)
    values, _ = run(model, step, naive_bayes.draw_parameters, lambda point: float(point["p"]), 8000)
    assert deviation(values, naive_bayes.exact_mean(noisy, scale)) > Z


# -- an unknown number of records -----------------------------------------------------------------

CAPACITY = 8


def counted(alike: bool) -> tuple[Model, dp.PrivacyAwareGibbs, float]:
    """Bernoulli records of unknown number, and the exact mean of that number."""
    p = 0.3 if alike else np.linspace(0.1, 0.8, CAPACITY)
    with pm.Model() as model:
        n = pm.Binomial("n", CAPACITY, 0.4)
        x = pm.Bernoulli("x", p, shape=CAPACITY)
        here = dp.present(n, CAPACITY)
        dp.LaplaceRelease("sum", x * here, scale=2.0, observed=3.3)
        dp.LaplaceRelease("size", here, scale=2.0, observed=4.1)
        step = dp.PrivacyAwareGibbs([x, n])
    weights = stats.binom(CAPACITY, 0.4).pmf(np.arange(CAPACITY + 1))
    for k in range(CAPACITY + 1):
        pmf = np.ones(1)
        for q in np.broadcast_to(p, CAPACITY)[:k]:
            pmf = np.convolve(pmf, [1 - q, q])
        weights[k] *= (pmf * np.exp(-np.abs(np.arange(k + 1) - 3.3) / 2)).sum()
        weights[k] *= np.exp(-abs(k - 4.1) / 2)
    return model, step, float(weights @ np.arange(CAPACITY + 1) / weights.sum())


def nothing(point: Point, rng: np.random.Generator) -> None:
    """No parameters to draw."""


@pytest.mark.slow
@pytest.mark.parametrize("alike", marked([True, False], exhaustive=[True]))
def test_an_unknown_number_of_records(alike: bool) -> None:
    model, step, exact = counted(alike)
    assert step._exchangeable == alike
    values, _ = run(model, step, nothing, lambda point: float(point["n"]), 6000)
    assert deviation(values, exact) < Z


# -- normal records, where everything is known ----------------------------------------------------

N = 12


def normal_model(**kwargs: Any) -> tuple[Model, dp.PrivacyAwareGibbs, float, float]:
    """mu ~ N(0, 1), x_i ~ N(mu, 2), s = sum x + N(0, 3), and two records measured: conjugate."""
    measured = np.array([0.5, -1.0])
    with pm.Model() as model:
        mu = pm.Normal("mu")
        x = pm.Normal("x", mu, 2.0, shape=N)
        dp.GaussianRelease("s", x, scale=3.0, observed=9.0)
        error = np.full(N, 1e6)
        error[:2] = 1.0
        seen = np.zeros(N)
        seen[:2] = measured
        pm.Normal("seen", x, error, observed=seen)
        step = dp.PrivacyAwareGibbs([x], **kwargs)
    # joint normal of (mu, x), conditioned on linear observations
    prior = np.ones((N + 1, N + 1)) + np.diag([0.0] + [4.0] * N)
    looked = np.zeros((3, N + 1))
    looked[0, 1:] = 1.0
    looked[1, 1], looked[2, 2] = 1.0, 1.0
    noise = np.diag([9.0, 1.0, 1.0])
    gain = prior @ looked.T @ np.linalg.inv(looked @ prior @ looked.T + noise)
    mean = gain @ np.array([9.0, *measured])
    covariance = prior - gain @ looked @ prior
    return model, step, float(mean[0]), float(covariance[0, 0])


def draw_mean(point: Point, rng: np.random.Generator) -> None:
    variance = 1.0 / (1.0 + N / 4.0)
    point["mu"] = np.asarray(
        variance * point["x"].sum() / 4.0 + np.sqrt(variance) * rng.standard_normal()
    )


def autoregressive(current: dict[str, Any], parameters: dict[str, Any]) -> tuple[Any, Any]:
    """Random walk: symmetric."""
    return {"x": current["x"] + pm.Normal.dist(0, 1.5, shape=(N,))}, 0.0


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("proposal", "noncentered"),
    [
        ("pcn", False),
        ("prior", "auto"),
        *(
            pytest.param(*other, marks=pytest.mark.exhaustive)
            for other in [
                ("prior", False),
                ("pcn", "auto"),
                (autoregressive, "auto"),
                (autoregressive, False),
            ]
        ),
    ],
)
def test_releases_and_measurements_of_single_records(proposal: Any, noncentered: Any) -> None:
    model, step, mean, variance = normal_model(proposal=proposal, noncentered=noncentered)
    values, _ = run(model, step, draw_mean, lambda point: float(point["mu"]), 8000)
    assert deviation(values, mean) < Z
    assert deviation((values - mean) ** 2, variance) < Z


@pytest.mark.slow
@pytest.mark.compiled
def test_conjugate_draws() -> None:
    model, step, mean, variance = normal_model()
    with model:
        draw = dp.ConjugateNormal([model["mu"]])
    draw.set_rng(np.random.default_rng(4))

    def parameters(point: Point, rng: np.random.Generator) -> None:
        point.update(draw.step(point)[0])

    values, _ = run(model, step, parameters, lambda point: float(point["mu"]), 8000)
    assert deviation(values, mean) < Z
    assert deviation((values - mean) ** 2, variance) < Z


def test_conjugacy_is_checked() -> None:
    with pm.Model():
        mu = pm.StudentT("mu", 3)
        sd = pm.HalfNormal("sd")
        k = pm.Poisson("k", 2)
        pm.Normal("x", mu, sd, shape=3)
        with pytest.raises(ValueError, match="not normal in"):
            dp.ConjugateNormal([mu])
        with pytest.raises(ValueError, match="bounds"):
            dp.ConjugateNormal([sd])
        with pytest.raises(ValueError, match="discrete"):
            dp.ConjugateNormal([k])


@pytest.mark.parametrize(
    "jump",
    [
        lambda b: pm.Potential("c", pt.switch(b > 0, 0.0, -np.inf)),
        lambda b: pm.Bernoulli("y", pt.switch(b > 0, 0.99, 0.01), observed=[1, 1, 1]),
        lambda b: pm.Normal("y", pt.floor(b), 1.0, observed=np.full(20, 12.0)),
    ],
)
def test_conditionals_that_jump_are_refused(jump: Callable[[Any], Any]) -> None:
    """Their gradients are those of a normal distribution everywhere."""
    with pm.Model() as model:
        b = pm.Normal("b")
        jump(b)
        with pytest.raises(ValueError, match="not normal in"):
            draw = dp.ConjugateNormal([b])
            draw.set_rng(np.random.default_rng(1))
            point = model.initial_point()
            for _ in range(50):
                point, _ = draw.step(point)


def test_conditionals_that_are_nearly_normal_are_refused() -> None:
    """In money, a gradient is small everywhere: the draw is checked on its own scale."""
    with pm.Model() as model:
        b = pm.StudentT("b", nu=3, mu=0, sigma=2000)
        pm.Normal("x", b, 5000, shape=20)
        with pytest.raises(ValueError, match="not normal in"):
            draw = dp.ConjugateNormal([b])
            draw.set_rng(np.random.default_rng(1))
            point = model.initial_point() | {"x": np.full(20, 10_000.0)}
            for _ in range(50):
                draw.step(point)


@pytest.mark.compiled
@pytest.mark.slow
def test_dims_and_as_many_entries_as_records() -> None:
    """Shapes that only the coordinates tell; and a statistic with n = m entries."""
    coords = {"record": range(N), "entry": range(N)}
    with pm.Model(coords=coords) as model:
        mu = pm.Normal("mu", dims="entry")
        x = pm.Normal("x", mu, 1.0, dims=("record", "entry"))
        dp.GaussianRelease("s", x, scale=np.arange(1.0, N + 1), observed=np.ones(N), dims="entry")
        step = dp.PrivacyAwareGibbs(["x"], proposal="pcn")
        draw = dp.ConjugateNormal([mu])
    draw.set_rng(np.random.default_rng(6))

    def parameters(point: Point, rng: np.random.Generator) -> None:
        point.update(draw.step(point)[0])

    values, _ = run(model, step, parameters, lambda point: point["mu"], 6000)
    noise = N + np.arange(1.0, N + 1) ** 2  # variance of s given mu
    variance = 1.0 / (1.0 + N**2 / noise)
    mean = variance * N / noise
    for k in range(N):
        assert deviation(values[:, k], mean[k]) < Z
        assert deviation((values[:, k] - mean[k]) ** 2, variance[k]) < Z


# -- what the review of the kernels found ---------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("proposal", ["prior", "pcn"])
def test_records_far_in_a_tail_stay_where_they_are(proposal: str) -> None:
    """The distribution function is 1 to double precision there; they must not be brought back."""
    with pm.Model() as model:
        rate = pm.Gamma("rate", 100, 100)
        x = pm.Poisson("x", rate, shape=2)
        pm.Normal("seen", x, 0.3, observed=[3.0, 40.0])
        dp.GaussianRelease("s", x, scale=1.0, observed=43.0)
        step = dp.PrivacyAwareGibbs([x], proposal=proposal)
    step._planned = 200
    step.set_rng(np.random.default_rng(1))
    point = model.initial_point() | {"x": np.array([3, 40])}
    for _ in range(200):
        point, [stat] = step.step(point)
        assert point["x"][1] == 40
    assert "heavier tails" in str(stat["warning"])


def test_covariates_are_found_however_they_are_made() -> None:
    for p in (
        pt.concatenate([pt.full((3,), 0.1), pt.full((3,), 0.7)]),
        pt.set_subtensor(pt.full((6,), 0.1)[3:], 0.7),
    ):
        with pm.Model():
            x = pm.Bernoulli("x", p, shape=6)
            dp.LaplaceRelease("s", x, scale=0.4, observed=4.0)
            with pytest.raises(ValueError, match="exchangeable"):
                dp.PrivacyAwareGibbs([x], proposal="soma")


def test_small_products_of_records_are_found() -> None:
    with pm.Model():
        x = pm.Normal("x", shape=N)
        dp.GaussianRelease("s", 1e-10 * x * pt.roll(x, 1), scale=1e-10, observed=0.0)
        with pytest.raises(dp.NotFactorizable):
            dp.PrivacyAwareGibbs([x])


@pytest.mark.compiled
@pytest.mark.slow
def test_published_entries_of_an_array_may_change() -> None:
    with pm.Model() as model:
        seen = pm.Data("seen", np.array([0.0, 0.0, 5.0]))
        theta = pm.Normal("theta")
        x = pm.Normal("x", theta, 1.0, shape=3)
        pm.Normal("s", x.sum(), 1.0, observed=seen[2])
        step = dp.PrivacyAwareGibbs([x])
        draw = dp.ConjugateNormal([theta])
        assert step.reading.published() == [5.0]
        pm.set_data({"seen": np.array([0.0, 0.0, 8.0])})
    draw.set_rng(np.random.default_rng(3))

    def parameters(point: Point, rng: np.random.Generator) -> None:
        point.update(draw.step(point)[0])

    values, _ = run(model, step, parameters, lambda point: float(point["theta"]), 6000)
    assert deviation(values, 3.0 * 8.0 / 13.0) < Z


@pytest.mark.slow
def test_impossible_parameters_of_single_records_are_rejected() -> None:
    """Bernoulli with p > 1 has a positive logarithm; it must count as impossible."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.6, 0.1)
        x = pm.Normal("x", mu, 0.15, shape=4)
        pm.Bernoulli("y", p=x, observed=np.ones(4, int))
        dp.GaussianRelease("s", x, scale=0.5, observed=4.5)
        step = dp.PrivacyAwareGibbs([x])
    point = model.initial_point() | {"x": np.full(4, 0.5)}
    step.set_rng(np.random.default_rng(1))
    for _ in range(300):
        point, _ = step.step(point)
        assert (point["x"] >= 0).all() and (point["x"] <= 1).all()


def test_records_that_look_alike_only_at_the_start() -> None:
    covariate = np.linspace(0.0, 5.0, 6)
    with pm.Model():
        b = pm.Normal("b")
        x = pm.Normal("x", b * covariate, 1.0, shape=6)
        dp.GaussianRelease("s", x, scale=1.0, observed=20.0)
        with pytest.raises(ValueError, match="exchangeable"):
            dp.PrivacyAwareGibbs([x], proposal="soma")
    with pm.Model():
        b = pm.Normal("b")
        x = pm.Normal("x", shape=6)
        y = pm.Normal("y", b * x.mean(), 0.5, shape=6)
        dp.GaussianRelease("s", pt.stack([x, y], axis=1), scale=1.0, observed=[1.0, 2.0])
        with pytest.raises(dp.NotFactorizable, match="puts all records"):
            dp.PrivacyAwareGibbs([x, y])


def test_absent_records_that_seldom_count_are_found() -> None:
    """At the initial point, one record in fifty has more than three."""
    with pm.Model():
        count = pm.DiscreteUniform("count", 1, 6)
        rate = pm.HalfNormal("rate", 1.0)
        x = pm.Poisson("x", rate, shape=6)
        here = dp.present(count, 6)
        rows = here * x + (1 - here) * pt.gt(x, 3)
        dp.LaplaceRelease("s", rows, scale=1.0, observed=2.0)
        with pytest.raises(dp.NotFactorizable, match=r"as a factor dp\.present\(count, 6\)"):
            dp.PrivacyAwareGibbs([x, count])


def test_records_whose_distribution_knows_their_number() -> None:
    with pm.Model():
        count = pm.DiscreteUniform("count", 1, 6)
        x = pm.Normal("x", 0.0, count, shape=6)
        dp.LaplaceRelease("s", x * dp.present(count, 6), scale=1.0, observed=2.0)
        with pytest.raises(dp.NotFactorizable, match="depends on their number"):
            dp.PrivacyAwareGibbs([x, count])


@pytest.mark.slow
def test_records_rounded_to_the_end_of_a_transform_are_rejected() -> None:
    with pm.Model() as model:
        a = pm.Gamma("a", 2.0, 20.0)
        x = pm.Beta("x", a, a, shape=20)
        dp.GaussianRelease("s", x, scale=1.0, observed=9.0)
        step = dp.PrivacyAwareGibbs([x], noncentered=False)
    point = model.initial_point() | {"a_log__": np.asarray(np.log(0.01))}
    step.set_rng(np.random.default_rng(1))
    for _ in range(100):
        point, _ = step.step(point)
        assert np.isfinite(point["x_logodds__"]).all()


# -- through PyMC ---------------------------------------------------------------------------------


def unseen() -> tuple[Model, list[Any]]:
    """Gamma records with bounds that depend on a parameter, t records, ordered categories."""
    with pm.Model() as model:
        level = pm.Normal("level")
        income = pm.Gamma("income", alpha=2.0, beta=pm.math.exp(-level), shape=20)
        shift = pm.StudentT("shift", nu=4.0, mu=0.1 * income, sigma=0.5, shape=20)
        rank = pm.OrderedLogistic("rank", eta=shift, cutpoints=[-1.0, 1.0], shape=20)
        rows = pt.stack([dp.clamp(income, 0, 10), dp.clamp(shift, -3, 3)], axis=1)
        dp.LaplaceRelease("totals", rows, scale=1.0, observed=np.array([-12.0, 3.0]))
        dp.GeometricRelease("top", pt.eq(rank, 2).astype("int64"), scale=1.0, observed=7)
    return model, [income, shift, rank]


@pytest.mark.slow
def test_a_model_of_other_distributions_works_by_the_same_three_lines() -> None:
    model, _ = unseen()
    with model:
        step = dp.PrivacyAwareGibbs()
        idata = dp.sample(
            30, tune=20, chains=2, cores=2, step=step, random_seed=1, progressbar=False
        )
    assert [rv.name for rv in step.reading.latents] == ["income", "shift", "rank"]
    posterior = _compat.group(idata, "posterior")
    assert set(posterior) == {"level"}
    assert posterior["level"].shape == (2, 30)
    statistics = _compat.group(idata, "sample_stats")
    assert (statistics["dp_acceptance"] > 0).any()
    assert not np.array_equal(*statistics["dp_acceptance"].values)
    assert set(_compat.group(idata, "observed_data")) == {"totals", "top"}


@pytest.mark.slow
def test_the_density_of_records_is_that_of_the_model() -> None:
    """Differences of log-densities at fixed parameters: what the step uses, and PyMC's own."""
    model, records = unseen()
    reading = read(model, records, None)
    density = model.compile_fn(
        reading.log_density, inputs=[reading.total], point_fn=False, mode="FAST_COMPILE"
    )
    rows = model.compile_fn(
        [reading.rows, reading.row_log_prior()],
        inputs=model.value_vars,
        point_fn=False,
        mode="FAST_COMPILE",
        on_unused_input="ignore",
    )
    joint = model.compile_fn(model.logp(jacobian=False), mode="FAST_COMPILE")
    rng = np.random.default_rng(5)
    found = []
    for _ in range(5):
        point = model.initial_point()
        point["income_log__"] = rng.normal(size=20)
        point["shift"] = rng.normal(size=20)
        point["rank"] = rng.integers(0, 3, 20)
        t, log_prior = rows(*[point[v.name] for v in model.value_vars])
        total = np.concatenate([t.sum(axis=0), reading.published()])
        found.append(density(total) + log_prior.sum() - joint(point))
    np.testing.assert_allclose(found, found[0], rtol=1e-10)


@pytest.mark.slow
def test_a_step_in_a_pickle_has_streams_of_its_own() -> None:
    model, step, *_ = normal_model(noncentered=False)
    copy = pickle.loads(cloudpickle.dumps(step))
    found = []
    for seed, mine in ((0, step), (0, copy), (1, copy)):
        mine.set_rng(np.random.default_rng(seed))
        found.append(mine.step(model.initial_point())[0]["x"])
    np.testing.assert_array_equal(found[0], found[1])  # a seed gives the same chain
    assert not np.array_equal(found[1], found[2])


@pytest.mark.slow
def test_large_records_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymc_dp.published.step._LARGE", 100)
    model, *_ = normal_model()
    with model, pytest.warns(UserWarning, match="var_names=\\['mu'\\]"):
        pm.sample(
            5,
            tune=5,
            chains=1,
            cores=1,
            step=[dp.PrivacyAwareGibbs(), dp.ConjugateNormal([model["mu"]])],
            progressbar=False,
            compute_convergence_checks=False,
        )


@pytest.mark.slow
def test_slow_parameters_are_announced() -> None:
    with pm.Model() as model:
        mu = pm.Normal("mu")
        x = pm.Normal("x", mu, 0.01, shape=50)
        dp.GaussianRelease("s", x, scale=100.0, observed=0.0)
        step = dp.PrivacyAwareGibbs([x], noncentered=False)
        draw = dp.ConjugateNormal([mu])
    step._planned = 1000
    step.set_rng(np.random.default_rng(1))
    draw.set_rng(np.random.default_rng(2))
    point = model.initial_point()
    for _ in range(1000):
        point, [stat] = step.step(draw.step(point)[0])
    assert "noncentered" in str(stat["warning"])


# -- several tables of records --------------------------------------------------------------------

TABLES = (6, 8, 5)


def tables_of_records() -> tuple[Model, list[Any]]:
    """Three tables that share a parameter: continuous, transformed, and randomised answers."""
    n, m, k = TABLES
    with pm.Model() as model:
        mu = pm.Normal("mu")
        x = pm.Normal("x", mu, 1.0, shape=n)
        waits = pm.Exponential("waits", scale=pt.exp(mu / 2), shape=m)
        answer = pm.Bernoulli("answer", pm.math.invlogit(2.0 * mu), shape=k)
        dp.LaplaceRelease("s", x, scale=2.0, observed=pm.Data("published", np.array(0.0)))
        clamped = pt.minimum(waits, 3.0)
        dp.GaussianRelease("t", clamped, scale=1.5, observed=pm.Data("noisy", np.array(0.0)))
        told = pm.Data("told", np.zeros(k, dtype=int))
        dp.RandomizedResponse("r", answer, truth=0.7, observed=told)
    return model, [x, waits, answer]


def from_the_model(rng: np.random.Generator) -> tuple[Point, Point]:
    """Parameters and records, on the scale that steps see, and what is published about them."""
    n, m, k = TABLES
    mu = rng.standard_normal()
    x, waits = rng.normal(mu, 1.0, n), rng.exponential(np.exp(mu / 2), m)
    answer = (rng.random(k) < 1 / (1 + np.exp(-2 * mu))).astype(np.int64)
    published = {
        "published": np.array(x.sum() + rng.laplace(0, 2.0)),
        "noisy": np.array(np.minimum(waits, 3.0).sum() + rng.normal(0, 1.5)),
        "told": np.where(rng.random(k) < 0.7, answer, 1 - answer),
    }
    return {
        "mu": np.array(mu),
        "x": x,
        "waits_log__": np.log(waits),
        "answer": answer,
    }, published


def moments(point: Point, published: Point) -> np.ndarray:
    """Of parameter, records and what was published, together."""
    mu, x, told = float(point["mu"]), point["x"], published["told"]
    waits, answer = np.minimum(np.exp(point["waits_log__"]), 3.0), point["answer"]
    noisy = np.array([published["published"], published["noisy"]], dtype=float)
    apart = [x.mean() - mu, point["waits_log__"].mean() + np.euler_gamma - mu / 2]
    apart.append(answer.mean() - 1 / (1 + np.exp(-2 * mu)))
    own = [mu, mu**2, x.mean(), x.mean() ** 2, x.var(), waits.mean(), waits.var(), answer.mean()]
    across = [mu * x.mean(), mu * waits.mean(), mu * answer.mean(), x.mean() * waits.mean()]
    seen = [*mu * noisy, x.mean() * noisy[0], waits.mean() * noisy[1], (answer == told).mean()]
    return np.array([*own, *across, *seen, *apart, *np.square(apart)])


@pytest.mark.parametrize("table", marked([0, 1, 2], slow=[0], exhaustive=[1, 2]))
def test_moves_leave_all_tables_and_the_noise_invariant(table: int) -> None:
    """From draws of everything, releases included, their joint distribution stays.

    It would not if the records of the other tables were left behind.  False alarms: 9e-7, of 23
    moments.
    """
    model, records = tables_of_records()
    with model:
        step = dp.PrivacyAwareGibbs([records[table]])
    assert step.noncentred is not None and step.noncentred.latents == records
    rng, changes, faulty, followed = np.random.default_rng(3), [], [], 0
    others = [name for k, name in enumerate(("x", "waits_log__", "answer")) if k != table]
    for _ in range(1500):
        before, published = from_the_model(rng)
        with model:
            pm.set_data(published)
        step.set_rng(np.random.default_rng(rng.integers(2**31)))
        step.stop_tuning()
        after, _ = step.step(before)
        followed += any(not np.array_equal(after[name], before[name]) for name in others)
        left = {**after, **{name: before[name] for name in others}}
        changes.append(moments(after, published) - moments(before, published))
        faulty.append(moments(left, published) - moments(before, published))
    assert followed > 1400
    assert largest_score(changes) < Z < largest_score(faulty)


def largest_score(changes: list[np.ndarray]) -> float:
    """Of mean changes, in standard errors, where there are any."""
    found = np.array(changes)
    found = found[:, found.std(axis=0) > 0.0]
    return float(np.max(np.abs(found.mean(axis=0)) / found.std(axis=0)) * np.sqrt(len(found)))


@pytest.mark.compiled
@pytest.mark.slow
def test_parameters_that_tables_share_mix() -> None:
    """Records of another step would hold them: this step alone gives a fourth or less."""
    effective = []
    for alone in (True, False):
        with pm.Model() as model:
            mu = pm.Normal("mu", 0.0, 2.0)
            x, y = (pm.Normal(name, mu, 1.0, shape=n) for name, n in (("x", 200), ("y", 240)))
            for records in (x, y):
                dp.GaussianRelease(f"of {records.name}", records, scale=60.0, observed=220.0)
            steps = [
                dp.PrivacyAwareGibbs([records], noncentered=[records] if alone else "auto")
                for records in (x, y)
            ]
        rng, drawn = np.random.default_rng(5), []
        for k, step in enumerate(steps):
            step.set_rng(np.random.default_rng(k))
        point = model.initial_point()
        for _ in range(1000):
            for step in steps:
                point, _ = step.step(point)
            every = np.concatenate([point["x"], point["y"]])
            variance = 1.0 / (0.25 + len(every))
            point["mu"] = np.asarray(rng.normal(variance * every.sum(), np.sqrt(variance)))
            drawn.append(float(point["mu"]))
        effective.append(_compat.effective_draws(np.array(drawn[200:])[None, :, None])[0])
    assert effective[1] > max(400.0, 4.0 * effective[0]), effective


# -- one report per record ------------------------------------------------------------------------


@pytest.mark.parametrize("plain", marked([False, True], slow=[False], exhaustive=[True]))
def test_reports_of_single_records_alone(plain: bool) -> None:
    """The records are found, declared by name or in plain PyMC; the posterior by quadrature."""
    told = np.array([1, 1, 1, 0, 1, 1, 0, 1])
    with pm.Model() as model:
        p = pm.Beta("p", 1.0, 2.0, default_transform=None)
        x = pm.Bernoulli("x", p, shape=8)
        if plain:
            pm.Bernoulli("r", pt.switch(x, 0.8, 0.2), observed=told)
        else:
            dp.RandomizedResponse("r", x, truth=0.8, observed=told)
        step = dp.PrivacyAwareGibbs()
    assert step.vars == [model.rvs_to_values[x]]
    grid = (np.arange(10_000) + 0.5) / 10_000
    said = 0.2 + 0.6 * grid
    weights = (1 - grid) * said ** told.sum() * (1 - said) ** (8 - told.sum())

    def parameter(point: Point, rng: np.random.Generator) -> None:
        ones = point["x"].sum()
        point["p"] = np.asarray(rng.beta(1.0 + ones, 2.0 + 8 - ones))

    values, _ = run(model, step, parameter, lambda point: float(point["p"]), 6000)
    assert deviation(values, float(weights @ grid / weights.sum())) < Z


@pytest.mark.slow
def test_what_is_found_without_names() -> None:
    """A latent class is no report: its density knows parameters.  Tables get a step each."""
    with pm.Model():
        mu = pm.Normal("mu", shape=2)
        label = pm.Bernoulli("label", 0.4, shape=N)
        pm.Normal("y", mu[label], 1.0, observed=np.zeros(N))
        with pytest.raises(dp.NotFactorizable, match="name the records"):
            dp.PrivacyAwareGibbs()
    model, records = tables_of_records()
    with model, pytest.raises(ValueError, match=r"\[x\]\), .*\[waits\]\)") as told:
        dp.PrivacyAwareGibbs()
    assert all(f"`{rv.name}`" in str(told.value) for rv in records)
    with model:
        for wrong in ("nobody", "mu", "r"):
            with pytest.raises(ValueError, match=wrong):
                dp.PrivacyAwareGibbs([wrong])
            with pytest.raises(ValueError, match=r"noncentered.*\['answer', 'waits', 'x'\]"):
                dp.PrivacyAwareGibbs(["x"], noncentered=[wrong])


# -- wrong input ----------------------------------------------------------------------------------


def model_with(declare: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    def build() -> Any:
        with pm.Model():
            mu = pm.Normal("mu")
            x = pm.Normal("x", mu, shape=N)
            declare(x, mu)
            return dp.PrivacyAwareGibbs([x])

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (model_with(lambda x, mu: None), "Nothing that was observed"),
        (
            model_with(lambda x, mu: dp.LaplaceRelease("s", x * mu, scale=1.0, observed=0.0)),
            "depends on `mu`",
        ),
        (
            model_with(lambda x, mu: pm.Laplace("s", x.sum(), pm.math.exp(mu), observed=0.0)),
            "has to be known",
        ),
        (
            model_with(lambda x, mu: dp.LaplaceRelease("s", x - x.mean(), scale=1.0, observed=0.0)),
            "than through sums of their rows",
        ),
        (
            model_with(
                lambda x, mu: dp.LaplaceRelease(
                    "s", pt.switch(pt.abs(x).max() > 40.0, x, 0.0), scale=1.0, observed=0.0
                )
            ),
            "puts all records",
        ),
        (
            model_with(  # ranks, since PyTensor 3 drops a sort whose result is only added up
                lambda x, mu: dp.LaplaceRelease(
                    "s", pt.sort(x) * np.arange(N), scale=1.0, observed=0.0
                )
            ),
            "puts all records",
        ),
        (
            model_with(lambda x, mu: dp.LaplaceRelease("s", x[:5], scale=1.0, observed=0.0)),
            "not a function of sums|rows",
        ),
        (
            model_with(lambda x, mu: pm.Normal("s", pt.max(x), 1.0, observed=0.0)),
            "not a function of sums",
        ),
        (
            model_with(lambda x, mu: pm.Normal("s", pt.dot(x, x), 1.0, observed=0.0)),
            "sum\\(axis=0\\)",
        ),
        (
            model_with(lambda x, mu: pm.Normal("s", x[::-1], 1.0, observed=np.zeros(N))),
            "depends on other records",
        ),
    ],
)
def test_models_that_are_not_record_additive(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(dp.NotFactorizable, match=message):
        build()


@pytest.mark.slow
def test_arguments_are_checked() -> None:
    with pm.Model() as model:
        mu = pm.Normal("mu")
        x = pm.Normal("x", mu, shape=N)
        y = pm.Normal("y", mu, shape=N + 1)
        dp.LaplaceRelease("s", x, scale=1.0, observed=0.0)
        with pytest.raises(ValueError, match="proposal must be one of"):
            dp.PrivacyAwareGibbs([x], proposal="gibbs")
        with pytest.raises(ValueError, match=r"step=\[.*\[x\]\), .*\[y\]\)\]"):
            dp.PrivacyAwareGibbs([x, y])
        for given in ([mu], [x, mu]):
            with pytest.raises(ValueError, match=r"`mu` is a single number.*leave it out"):
                dp.PrivacyAwareGibbs(given)
        with pytest.raises(ValueError, match="not free random variables"):
            dp.PrivacyAwareGibbs([model["s"]])
        with pytest.raises(ValueError, match="finitely many values"):
            dp.PrivacyAwareGibbs([x], proposal="enumerate")
        for wrong in ("yes", [mu], ["nobody"], []):
            with pytest.raises(ValueError, match="noncentered"):
                dp.PrivacyAwareGibbs([x], noncentered=wrong)
        with pytest.raises(ValueError, match="exactly"):
            dp.PrivacyAwareGibbs([x], proposal=lambda current, parameters: ({}, 0.0))
        with pytest.raises(ValueError, match="step must be one of"):
            dp.sample(step="Gibbs")
    with pm.Model():
        x = pm.Normal("x", np.arange(N), shape=N)
        dp.LaplaceRelease("s", x, scale=1.0, observed=0.0)
        with pytest.raises(ValueError, match="exchangeable"):
            dp.PrivacyAwareGibbs([x], proposal="soma")
        with pytest.raises(ValueError, match="no continuous parameter"):
            dp.PrivacyAwareGibbs([x], noncentered=True)


def test_records_must_have_a_distribution_to_draw_from() -> None:
    with pm.Model():
        x = pm.Flat("x", shape=N)
        dp.LaplaceRelease("s", dp.clamp(x, -1, 1), scale=1.0, observed=0.0)
        with pytest.raises(dp.NotFactorizable, match="cannot be drawn"):
            dp.PrivacyAwareGibbs([x])


def test_bounds_of_records_must_not_move_with_parameters() -> None:
    with pm.Model():
        top = pm.Pareto("top", 2, 1)
        x = pm.Uniform("x", 0, top, shape=N)
        dp.LaplaceRelease("s", dp.clamp(x, 0, 5), scale=1.0, observed=0.0)
        with pytest.raises(dp.NotFactorizable, match="default_transform=None"):
            dp.PrivacyAwareGibbs([x])


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (lambda c, p: ({"x": c["x"].mean() + pm.Normal.dist(shape=N)}, 0.0), "other records"),
        (lambda c, p: ({"x": pm.Normal.dist(c["x"][::-1])}, 0.0), "other records"),
        (lambda c, p: ({"x": pm.Normal.dist(c["x"])}, c["x"].sum()), "other records"),
        (lambda c, p: ({"x": pm.modelcontext(None)["x"] + 0.0}, 0.0), "drawn again"),
    ],
)
def test_proposals_are_of_single_records(proposal: Any, message: str) -> None:
    with pm.Model():
        x = pm.Normal("x", pm.Normal("mu"), shape=N)
        dp.LaplaceRelease("s", x, scale=1.0, observed=0.0)
        with pytest.raises(ValueError, match=message):
            dp.PrivacyAwareGibbs([x], proposal=proposal)


@pytest.mark.slow
def test_other_data_must_not_change() -> None:
    with pm.Model() as model:
        b = pm.Data("b", 2.0)
        x = pm.Normal("x", pm.Normal("mu"), shape=N)
        pm.Laplace("s", x.sum(), b, observed=1.0)
        step = dp.PrivacyAwareGibbs([x], noncentered=False)
        pm.set_data({"b": 3.0})
        with pytest.raises(ValueError, match="`b` was changed"):
            step.set_rng(np.random.default_rng(1))
        pm.set_data({"b": 2.0})
        step.set_rng(np.random.default_rng(1))
        step.step(model.initial_point())


def test_the_shape_of_what_was_observed_must_not_change() -> None:
    """Loops read as many entries as there were."""
    with pm.Model():
        x = pm.Normal("x", pm.Normal("mu"), shape=N)
        seen, told = pm.Data("seen", np.zeros(N)), pm.Data("told", np.zeros(2))
        pm.Normal("y", x, 1.0, observed=seen)
        dp.LaplaceRelease("s", pt.stack([x, x**2], axis=1), scale=1.0, observed=told)
        step = dp.PrivacyAwareGibbs([x], noncentered=False)
        for data in (seen, told):
            before = data.get_value()
            for wrong in (before[1:], np.append(before, 0.0)):
                data.set_value(wrong)
                with pytest.raises(ValueError, match=f"`{data.name}` was changed.*not its shape"):
                    step.set_rng(np.random.default_rng(1))
            data.set_value(before + 1.0)
            step.set_rng(np.random.default_rng(1))


@pytest.mark.slow
def test_a_number_of_records_at_its_capacity_is_announced() -> None:
    with pm.Model() as model:
        count = pm.Poisson("count", 30)
        x = pm.Bernoulli("x", 0.9, shape=N)
        rows = dp.present(count, N) * x
        dp.GeometricRelease("s", rows, scale=1.0, observed=30)
        step = dp.PrivacyAwareGibbs([x, count], noncentered=False)
    step._planned = 100
    step.set_rng(np.random.default_rng(1))
    point = model.initial_point() | {"count": np.asarray(N)}
    for _ in range(100):
        point, [stat] = step.step(point)
    assert "capacity" in str(stat["warning"])


@pytest.mark.slow
def test_an_impossible_release_is_refused_at_the_start() -> None:
    def log_density(value: Any, total: Any) -> Any:
        return pt.switch(pt.abs(value - total) < 1.0, 0.0, -np.inf)

    with pm.Model() as model:
        x = pm.Bernoulli("x", 0.5, shape=N)
        dp.Release("s", x, observed=99.0, log_density=log_density)
        step = dp.PrivacyAwareGibbs([x])
        with pytest.raises(ValueError, match="impossible under"):
            step.step(model.initial_point())
    with pm.Model() as model:
        x = pm.Bernoulli("x", 0.5, shape=N)
        dp.Release("s", x, observed=6.0, log_density=log_density)
        step = dp.PrivacyAwareGibbs([x])
        step.set_rng(np.random.default_rng(1))
        point, _ = step.step(model.initial_point())
        assert abs(point["x"].sum() - 6) < 1


def test_a_budgeted_model_is_refused() -> None:
    with pm.Model():
        mu = pm.Normal("mu")
        pm.Normal("y", mu, observed=np.zeros(20))
        dp.PrivacyBudget(epsilon=1.0, delta=1e-6)
        with pytest.raises(dp.UnsafeModel, match="need no"):
            dp.PrivacyAwareGibbs([mu])


@pytest.mark.slow
def test_az_reads_the_result() -> None:
    """R-hat and effective sample sizes of a chain with records stored."""
    model, _, *_ = normal_model()
    with model:
        step = dp.PrivacyAwareGibbs(store_records=True)
        idata = dp.sample(
            20,
            tune=10,
            chains=2,
            cores=1,
            step=step,
            progressbar=False,
            random_seed=2,
        )
    assert set(_compat.group(idata, "posterior")) == {"mu", "x"}
    assert np.isfinite(float(az.rhat(idata, var_names=["mu"])["mu"]))
