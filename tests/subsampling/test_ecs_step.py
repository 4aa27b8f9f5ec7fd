"""HMCECS in PyMC: what it samples, what it refuses, what it says."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy.special import expit
from scipy.stats import binom

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.subsampling import hmcecs as hmcecs_module
from pymc_dp.subsampling.preparation import Pilot
from tests.selection import marked

pytestmark = pytest.mark.compiled

#: Two-sided normal tail 3.8e-8 for each of fewer than twenty moments.
Z = 5.5
N = 20_000
X = np.column_stack([np.ones(N), np.random.default_rng(0).normal(size=(N, 2))])
ETA = X @ [-1.0, 0.5, 0.3]


def regression(family: str, n: int = N) -> pm.Model:
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 3, shape=3)
        eta, linear = X[:n] @ beta, ETA[:n]
        if family == "logistic":
            pm.Bernoulli("y", logit_p=eta, observed=rng.binomial(1, expit(linear)))
        elif family == "poisson":
            pm.Poisson("y", mu=pm.math.exp(eta), observed=rng.poisson(np.exp(linear)))
        elif family == "student":
            y = linear + rng.standard_t(5, n)
            sigma, nu = pm.HalfNormal("sigma", 2), pm.Gamma("nu", 2, 0.1)
            pm.StudentT("y", nu=nu, mu=eta, sigma=sigma, observed=y)
        else:
            y = rng.negative_binomial(2, 2 / (2 + np.exp(linear)))
            alpha = pm.Exponential("alpha", 0.5)
            pm.NegativeBinomial("y", mu=pm.math.exp(eta), alpha=alpha, observed=y)
    return model


def sample(model: pm.Model, step: Any, draws: int = 1500, **kwargs: Any) -> Any:
    arguments = {"chains": 2, "cores": 1, "tune": 300, "random_seed": 3, **kwargs}
    with model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pm.sample(
            draws, step=step, progressbar=False, compute_convergence_checks=False, **arguments
        )


@cache
def logistic_run(estimator: str) -> tuple[dp.HMCECS, Any]:
    model = regression("logistic")
    step = dp.HMCECS(estimator=estimator, model=model, progressbar=False)
    return step, sample(model, step)


def moments(idata: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, standard deviations and effective draws of all parameters."""
    posterior = _compat.group(idata, "posterior")
    values = np.concatenate(
        [x.values.reshape(*x.shape[:2], -1) for _, x in sorted(posterior.data_vars.items())],
        axis=2,
    )
    flat = values.reshape(-1, values.shape[2])
    return flat.mean(axis=0), flat.std(axis=0), _compat.effective_draws(values)


def agree(found: Any, other: Any) -> bool:
    """Whether means and standard deviations differ by no more than Monte Carlo error."""
    (m1, s1, e1), (m2, s2, e2) = moments(found), moments(other)
    error = np.sqrt(s1**2 / e1 + s2**2 / e2)
    # the standard deviation of a normal sample has half the relative variance of its mean
    spread = np.sqrt(0.5 / e1 + 0.5 / e2) * 1.5
    return bool(
        (np.abs(m1 - m2) < Z * error).all() and (np.abs(np.log(s1 / s2)) < Z * spread).all()
    )


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["perturbed", "signed"])
def test_chains_agree_with_the_normal_approximation(estimator: str) -> None:
    """20 000 records: skewness is of the order of 1/sqrt(n), below Monte Carlo error."""
    step, idata = logistic_run(estimator)
    mean, sd, ess = moments(idata)
    curved = step.variates.curved
    exact = np.sqrt(np.diag(curved.covariance))
    assert (ess > 1000).all()
    assert (np.abs(mean - curved.theta) < Z * exact / np.sqrt(ess) + 0.03 * exact).all()
    assert (np.abs(np.log(sd / exact)) < Z * 1.5 * np.sqrt(0.5 / ess) + 0.02).all()


@pytest.mark.slow
def test_statistics_of_a_chain() -> None:
    step, idata = logistic_run("perturbed")
    stats = _compat.group(idata, "sample_stats")
    assert abs(float(stats["acceptance_rate"].mean()) - 0.85) < 0.15
    assert float(stats["acceptance_rate_u"].mean()) > 0.98
    assert 0 < float(stats["sigma2"].mean()) < 1
    assert (stats["sign"] == 1).all() and not stats["diverging"].any()
    assert (stats["step_size"] * stats["n_steps"] <= np.pi / 2 + 1e-9).all()
    assert step.subsample_size % step.blocks == 0


@pytest.mark.slow
def test_processes_repeat_what_one_process_does() -> None:
    _step, idata = logistic_run("perturbed")
    model = regression("logistic")
    again = sample(model, dp.HMCECS(model=model, progressbar=False), cores=2)
    for name in ("beta",):
        one, two = (_compat.group(x, "posterior")[name].values for x in (idata, again))
        assert np.array_equal(one, two)
        assert not np.array_equal(one[0], one[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    marked(
        ["poisson", "student", "negative_binomial"], exhaustive=["student", "negative_binomial"]
    ),
)
def test_chains_agree_with_nuts(family: str) -> None:
    model = regression(family, 2000)
    with model:  # the default of PyMC 5 needs a C compiler
        nuts = pm.NUTS(compile_kwargs={"mode": "NUMBA"})
    exact = sample(model, nuts)
    for order, estimator in ((2, "perturbed"), (2, "signed"), (1, "perturbed")):
        step = dp.HMCECS(order=order, estimator=estimator, model=model, progressbar=False)
        assert agree(sample(model, step), exact)


@pytest.mark.slow
def test_chains_of_started_processes() -> None:
    model = regression("logistic")
    step = dp.HMCECS(model=model, progressbar=False)
    idata = sample(model, step, draws=50, tune=20, cores=2, mp_ctx="spawn")
    assert float(_compat.group(idata, "posterior")["beta"].std()) > 0


@pytest.mark.slow
def test_order_1_needs_larger_samples() -> None:
    model = regression("logistic")
    first, second = (dp.HMCECS(order=k, model=model, progressbar=False) for k in (1, 2))
    assert first.sigma2 * first.subsample_size > 50 * second.sigma2 * second.subsample_size


def test_given_steps_are_used_as_they_are() -> None:
    model = regression("logistic")
    step = dp.HMCECS(step_size=0.2, path_length=1.2, model=model, progressbar=False)
    stats = _compat.group(sample(model, step, draws=20, tune=20), "sample_stats")
    assert (stats["step_size"] == 0.2).all() and (stats["n_steps"] == 6).all()


# -- what it says ---------------------------------------------------------------------------------


def test_trajectories_that_stay_too_short_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hmcecs_module, "_MOST_STEPS", 2)
    model = regression("logistic")
    step = dp.HMCECS(target_accept=0.999, model=model, progressbar=False)
    assert re.search(r"of 2 steps .* instead of path_length=1\.6", step_warning(model, step))


@pytest.mark.slow
def test_a_reference_from_few_records_is_reported() -> None:
    """The expansion about the mode of 1 % of the records, as in the paper, does not suffice."""
    few = dp.HMCECS(model=regression("logistic", N // 100), progressbar=False)
    reference = {"beta": few.variates.curved.theta}
    model = regression("logistic")
    with pytest.warns(UserWarning, match=r"(?s)variance of about.*would not do.*`reference`"):
        step = dp.HMCECS(
            reference=reference, subsample_size=100, order=1, model=model, progressbar=False
        )
    with pytest.warns(UserWarning, match="sigma2"):
        warnings.warn(step_warning(model, step), UserWarning, stacklevel=1)


def rare(rows: list[int], n: int = 30_000) -> pm.Model:
    """A coefficient that the given rows alone know of, all of them successes."""
    rng, group = np.random.default_rng(2), np.zeros(n)
    x, group[rows] = rng.normal(size=n), 1.0
    y = rng.binomial(1, expit(0.3 * x))
    y[rows] = 1
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, [5.0, 3.0], shape=2)
        pm.Bernoulli("y", logit_p=beta[0] * x + beta[1] * group, observed=y)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[10, 20, 30], [50, 52, 53], [29_000, 29_500, 29_999]])
def test_rare_records_are_seen_wherever_they_are(rows: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all records may not be enough
        step = dp.HMCECS(model=rare(rows), progressbar=False)
    assert step.subsample_size > 15_000
    assert dp.HMCECS(model=rare([]), progressbar=False).subsample_size == 100
    with pytest.warns(UserWarning, match=r"(?s)Single records change.*is off.*signed"):
        dp.HMCECS(model=rare(rows), subsample_size=10_000, progressbar=False)


def test_the_error_of_perturbed_estimates_is_foreseen() -> None:
    """Log-density of the perturbed target, with the number of rare records in a sample summed."""
    n, m, delta, k = 30_000, 20_000, np.array([0.3, -0.4]), 3
    count, s = np.arange(60), n / m
    for d in delta:
        total, spread = (
            s * count * d,
            count * (d - count * d / m) ** 2 + (m - count) * (count * d / m) ** 2,
        )
        exact = np.log(np.sum(binom.pmf(count, m, k / n) * np.exp(total - 0.5 * s**2 * spread)))
        found = Pilot.__new__(Pilot)
        found.third = abs(n**2 * k * d**3)
        assert 0.6 < found.bias(m) / abs(exact - k * d) < 1.6


@pytest.mark.slow
def test_estimates_that_change_their_sign_are_reported() -> None:
    """Far from the mode, order 1 and 100 records: the factors of the products vary too much."""
    model = regression("logistic")
    reference = {"beta": np.array([-0.95, 0.55, 0.35])}
    with pytest.warns(UserWarning, match="variance of about"):
        step = dp.HMCECS(
            estimator="signed",
            order=1,
            subsample_size=100,
            reference=reference,
            model=model,
            progressbar=False,
        )
    assert "of the likelihood estimates are positive" in step_warning(model, step)


@pytest.mark.slow
def test_a_chain_that_left_the_posterior_is_reported() -> None:
    """Three records and two blocks: the estimate has mass where the expansion means nothing."""
    x, y = np.array([0.5, -0.3, 1.2]), np.array([1, 0, 2])
    with pm.Model():
        b = pm.Normal("b", 0.0, 0.5)
        pm.Poisson("y", pm.math.exp(b * x), observed=y)
        with pytest.warns(UserWarning, match="Use 20 blocks or more"):
            step = dp.HMCECS(
                estimator="signed",
                order=1,
                blocks=2,
                subsample_size=10,
                reference={"b": 0.3},
                progressbar=False,
            )
    step._kept, step._sigma2_sum, step._sign_sum, step._accept_sum = 100, 1.0, 100.0, 80.0
    step._accept_u_sum = 0.5
    assert "Only 0.5% of the moves" in str(step._warning().message)
    step._accept_u_sum = 50.0
    assert step._warning() is None


def step_warning(model: pm.Model, step: dp.HMCECS) -> str:
    """What a chain says at its end."""
    point = model.initial_point()
    step.setup_chain(np.random.default_rng(0), 5, 300)
    for k in range(305):
        if k == 5:
            step.stop_tuning()
        point, [stats] = step.step(point)
    assert stats["warning"] is not None
    return str(stats["warning"].message)


@pytest.mark.slow
def test_a_good_reference_is_not_reported() -> None:
    step, _ = logistic_run("perturbed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = dp.HMCECS(
            reference={"beta": step.variates.curved.theta},
            subsample_size=1000,
            model=regression("logistic"),
            progressbar=False,
        )
    assert other.sigma2 < 1


def constant() -> pm.Model:
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 1)
        pm.Normal("y", mu, 1, observed=np.arange(5.0))
    return model


def budgeted() -> pm.Model:
    with constant() as model:
        dp.PrivacyBudget(1.0, 1e-6)
    return model


def latents() -> pm.Model:
    with pm.Model() as model:
        z = pm.Normal("z", 0, 1, shape=50)
        pm.Normal("y", z, 1, observed=np.arange(50.0))
    return model


def coupled() -> pm.Model:
    with pm.Model() as model:
        pm.AR("y", rho=[pm.Normal("rho")], sigma=1.0, observed=np.arange(50.0))
    return model


def lengths() -> pm.Model:
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Normal("a", mu, 1, observed=np.arange(5.0))
        pm.Normal("b", mu, 1, observed=np.arange(6.0))
    return model


def discrete() -> pm.Model:
    with pm.Model() as model:
        pm.Normal("y", pm.Poisson("k", 2.0), 1, observed=np.arange(5.0))
    return model


def standardised() -> pm.Model:
    with pm.Model() as model:
        x = pm.Data("x", np.arange(50.0))
        pm.Normal("y", pm.Normal("b") * (x - x.mean()), 1, observed=np.arange(50.0))
    return model


def masked() -> pm.Model:
    with pm.Model() as model:
        mu = pm.Normal("mu", shape=2)
        pm.Normal("y", mu[np.arange(50) % 3], 1, observed=np.arange(50.0))
    return model


def not_finite() -> pm.Model:
    with pm.Model() as model:
        x = np.where(np.arange(50) == 7, np.inf, 1.0)
        pm.Normal("y", pm.Normal("b") * pm.Data("x", x), 1, observed=np.arange(50.0))
    return model


@pytest.mark.parametrize("make", [standardised, masked, not_finite, latents, coupled])
def test_refusals_speak_of_subsampling(make: Callable[[], pm.Model]) -> None:
    with pytest.raises((dp.UnsafeModel, dp.NotFactorizable, IndexError)) as found:
        dp.HMCECS(model=make(), progressbar=False)
    words = str(found.value).lower()
    assert not any(word in words for word in ("privat", "privacy", "public", "released"))


def bounded(width: float) -> pm.Model:
    with pm.Model() as model:
        mu = pm.Uniform("mu", 0, width, default_transform=None, initval=width / 2)
        y = np.random.default_rng(0).normal(size=200)
        pm.Normal("y", mu, 1.0, observed=y - y.mean() + width / 2)
    return model


@pytest.mark.slow
def test_chains_begin_where_the_density_is_finite() -> None:
    """About half of the draws from the normal approximation lie outside the bounds."""
    model = bounded(0.1)
    step = dp.HMCECS(model=model, progressbar=False)
    for seed in range(20):
        step.set_rng(np.random.default_rng(seed))
        assert 0.0 <= step.step(model.initial_point())[0]["mu"] <= 0.1


@pytest.mark.slow
def test_bounds_that_leave_no_start_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not finite at 100 draws.*`mu`"):
        dp.HMCECS(model=bounded(1e-6), progressbar=False)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (budgeted, dp.UnsafeModel, "not private.*DPLangevin"),
        (latents, dp.NotFactorizable, "`z`.*one entry per record.*NUTS"),
        (coupled, dp.NotFactorizable, "HMCECS estimates.*`y`"),
        (lengths, dp.NotFactorizable, "`a`: 5, `b`: 6"),
        (discrete, ValueError, "'k'.*discrete"),
    ],
)
def test_models_that_are_refused(
    make: Callable[[], pm.Model], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"(?s){match}"):
        dp.HMCECS(model=make(), progressbar=False)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"estimator": "exact"}, "estimator must be"),
        ({"order": 3}, "order must be"),
        ({"blocks": 0}, "blocks must be"),
        ({"subsample_size": 0.5}, "subsample_size must be"),
        ({"subsample_size": 2}, "subsample_size must be.* 10"),
        ({"step_size": -1.0}, "step_size must be positive"),
        ({"step_size": 2**0.5}, "must be at most 1"),
        ({"order": np.array([1, 2])}, "order must be"),
        ({"reference": {"mu": np.zeros(2)}}, r"reference\['mu'\] must be numbers of shape \(\)"),
        ({"reference": {"mu": "a"}}, r"reference\['mu'\] must be numbers"),
        ({"step_size": 1e-4}, "more than 1000 steps of step_size=0.0001"),
        ({"target_accept": 1.0}, "target_accept must lie"),
        ({"reference": {"nu": 1.0}}, r"reference must give.*\['mu'\]"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dp.HMCECS(model=constant(), progressbar=False, **arguments)


# -- signs ----------------------------------------------------------------------------------------


def signed_draws(negative: int) -> Any:
    """A chain in which some draws around 1 are cancelled by negative ones."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=1000), np.repeat(rng.normal(1.0, 0.1, negative), 2)])
    sign = np.ones(len(x))
    sign[1001::2] = -1.0
    groups = {"posterior": {"x": x[None]}, "sample_stats": {"sign": sign[None]}}
    return _compat.inference_data(
        {
            name: xr.Dataset(
                {k: (("chain", "draw"), v) for k, v in values.items()},
                coords={"chain": [0], "draw": np.arange(len(x))},
            )
            for name, values in groups.items()
        },
        {},
    )


def test_signed_expectations_and_draws() -> None:
    idata = signed_draws(60)
    plain = _compat.group(idata, "posterior")["x"].values[0, :1000]
    found = dp.signed_expectation(idata, lambda draws: draws["x"])
    assert abs(float(found) - plain.mean()) < 1e-12
    assert abs(found.attrs["tau"] - 1060 / 1120) < 1e-12
    left = _compat.group(dp.resample_signed(idata, random_seed=0), "posterior")["x"].values
    assert np.array_equal(np.sort(left[0]), np.sort(plain))


def test_draws_that_are_left_out_do_not_count() -> None:
    idata = signed_draws(60)
    x, sign = _compat.group(idata, "posterior")["x"], _compat.group(idata, "sample_stats")["sign"]
    for part in (slice(500, None), slice(None, None, 10)):
        found = dp.signed_expectation(idata, lambda draws, part=part: draws["x"].isel(draw=part))
        s = sign.isel(draw=part).values
        assert float(found) == pytest.approx((x.isel(draw=part).values * s).sum() / s.sum())
        assert found.attrs["tau"] == pytest.approx((s > 0).mean())
    with pytest.raises(ValueError, match="keep the coordinates chain and draw"):
        dp.signed_expectation(idata, lambda draws: draws["x"][:, 10:].drop_vars("draw"))


def test_too_many_negative_signs_are_an_error() -> None:
    idata = signed_draws(200)
    for function in (lambda x: dp.signed_expectation(x, lambda d: d["x"]), dp.resample_signed):
        with pytest.raises(ValueError, match=r"0\.857 of the signs.*subsample_size"):
            function(idata)
    assert abs(float(dp.signed_expectation(idata, lambda d: d["x"], min_positive=0.8))) < 0.2


def test_values_that_are_missing_in_some_draws_do_not_match_them() -> None:
    idata = signed_draws(60)
    posterior = _compat.group(idata, "posterior")
    missing = posterior["x"].where(np.arange(posterior.sizes["draw"]) % 3 > 0)
    groups = {
        "posterior": posterior.to_dataset() if hasattr(posterior, "to_dataset") else posterior
    }
    groups["posterior"] = groups["posterior"].assign(missing=missing)
    groups["sample_stats"] = xr.Dataset({"sign": _compat.group(idata, "sample_stats")["sign"]})
    with_gaps = _compat.inference_data(groups, {})
    plain, other = (
        _compat.group(dp.resample_signed(x, random_seed=0), "posterior")["x"].values
        for x in (idata, with_gaps)
    )
    assert np.array_equal(plain, other)


def test_a_chain_without_positive_sum_is_an_error() -> None:
    idata = signed_draws(60)
    sign = _compat.group(idata, "sample_stats")["sign"]
    sign[:] = np.where(np.arange(sign.sizes["draw"]) % 2, -1.0, 1.0)
    with pytest.raises(ValueError, match="no more positive signs than negative"):
        dp.signed_expectation(idata, lambda d: d["x"], min_positive=0.5)
    with pytest.raises(ValueError, match="Chain 0 has no more positive signs"):
        dp.resample_signed(idata, min_positive=0.5)


def test_draws_without_signs_are_an_error() -> None:
    idata = _compat.inference_data({"posterior": xr.Dataset()}, {})
    with pytest.raises(ValueError, match="no statistic `sign`"):
        dp.signed_expectation(idata, lambda d: d["x"])
