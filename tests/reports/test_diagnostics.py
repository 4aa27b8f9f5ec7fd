"""Distances of draws, inefficiency factors, and shares of clipped records."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pymc as pm
import pytest
import xarray as xr

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.privacy.answer import EDGES
from pymc_dp.reports import diagnostics

RNG = np.random.default_rng(11)
N = 5000


def labelled(draws: dict[str, np.ndarray], group: str = "posterior") -> Any:
    """A result of the installed PyMC with (chains, draws, ...) values by name."""
    values = {
        name: (("chain", "draw", *[f"{name}_dim_{k}" for k in range(x.ndim - 2)]), x)
        for name, x in draws.items()
    }
    return _compat.inference_data({group: xr.Dataset(values)}, {})


# -- maximum mean discrepancy -------------------------------------------------------------------


def by_definition(x: np.ndarray, y: np.ndarray, width: float) -> float:
    """The unbiased estimate, pair by pair."""

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.exp(-np.sum((a - b) ** 2) / (2 * width**2)))

    within = [
        np.mean([kernel(a, b) for i, a in enumerate(z) for j, b in enumerate(z) if i != j])
        for z in (x, y)
    ]
    between = np.mean([kernel(a, b) for a in x for b in y])
    return float(np.sqrt(abs(within[0] + within[1] - 2 * between)))


def test_mmd_is_its_definition() -> None:
    x, y = RNG.normal(size=(30, 2)), RNG.normal(1.0, 1.0, size=(25, 2))
    pairs = np.random.default_rng(3)
    i, j = pairs.integers(0, 30, 500), pairs.integers(0, 25, 500)
    width = float(np.median(np.linalg.norm(x[i] - y[j], axis=1)))
    assert dp.mmd(x, y, random_seed=3) == pytest.approx(by_definition(x, y, width), rel=1e-10)


def test_mmd_of_shifted_normals() -> None:
    # E k(x, y) of N(0, 1) and N(a, 1) with width w is w/sqrt(w² + 2) exp(-a²/(2(w² + 2)))
    x, y = np.random.default_rng(5).normal(size=(2, 2000))
    shift = 1.5
    w2 = 1.4**2  # the median of |x - y - shift| is about 1.4: sqrt(2) |z - 1.06|
    expected = np.sqrt(2 * np.sqrt(w2 / (w2 + 2)) * (1 - np.exp(-(shift**2) / (2 * (w2 + 2)))))
    # the width is itself estimated from 500 pairs; fixed seeds
    assert dp.mmd(x, y + shift) == pytest.approx(expected, abs=0.06)
    assert dp.mmd(x, y) < 0.03


def test_mmd_takes_every_form_of_draws() -> None:
    chains = {"a": RNG.normal(size=(2, 300)), "b": RNG.normal(size=(2, 300, 3))}
    others = {"b": RNG.normal(size=(4, 100, 3)), "a": RNG.normal(size=(4, 100)) + 1}
    one = np.concatenate([chains["a"].reshape(600, 1), chains["b"].reshape(600, 3)], axis=1)
    two = np.concatenate([others["a"].reshape(400, 1), others["b"].reshape(400, 3)], axis=1)
    expected = dp.mmd(one, two)
    assert expected > 0.1
    result, reference = labelled(chains), labelled(others)
    assert dp.mmd(result, reference) == expected
    assert dp.mmd(_compat.group(result, "posterior"), reference) == expected
    assert dp.mmd(result, two) == expected
    assert dp.mmd(one, reference, var_names=["a", "b"]) == expected
    assert dp.mmd(one.reshape(2, 300, 4), two) == expected
    assert dp.mmd(result, reference, var_names="a") == dp.mmd(one[:, 0], two[:, 0])
    assert dp.mmd(result, reference, var_names="a") != expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dp.mmd(np.ones((5, 2)), np.zeros((5, 3))), "2 columns and reference 3"),
        (lambda: dp.mmd(np.ones((5, 2)), np.full((5, 2), np.nan)), "reference .* finite"),
        (lambda: dp.mmd(np.ones((5, 2)), np.ones((5, 2))), "same point"),
        (lambda: dp.mmd(np.ones((2, 2, 2, 2)), np.ones((5, 2))), "sample must have shape"),
        (lambda: dp.mmd("draws", np.ones((5, 2))), "sample must be an array"),
        (lambda: dp.mmd(np.ones(5), np.zeros(5), var_names="a"), "var_names"),
        (lambda: dp.mmd(labelled({"a": np.ones((1, 5))}), np.ones(5), var_names="b"), "'b'"),
        (lambda: dp.mmd(labelled({"a": np.ones((1, 5))}, "prior"), np.ones(5)), "posterior"),
    ],
)
def test_mmd_of_what_can_not_be_compared(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_mmd_thins_long_runs() -> None:
    x = np.repeat(RNG.normal(size=(2000, 1)), 3, axis=0)
    y = RNG.normal(size=(1000, 1))
    assert dp.mmd(x, y) == dp.mmd(x[::3], y)


# -- inefficiency -------------------------------------------------------------------------------


def autoregressive(phi: float, chains: int = 4, draws: int = 20_000) -> np.ndarray:
    noise = np.random.default_rng(7).normal(size=(chains, draws))
    x = np.empty_like(noise)
    x[:, 0] = noise[:, 0] / np.sqrt(1 - phi**2)
    for t in range(1, draws):
        x[:, t] = phi * x[:, t - 1] + noise[:, t]
    return x


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_inefficiency_of_autoregressions(phi: float) -> None:
    # IF = 1 + 2 sum of autocorrelations = (1 + phi)/(1 - phi)
    found = dp.inefficiency(autoregressive(phi)).inefficiency["x"]
    assert found == pytest.approx((1 + phi) / (1 - phi), rel=0.1)


def test_computational_time_with_and_without_signs() -> None:
    x = autoregressive(0.5, draws=1000)
    plain = dp.inefficiency(x, 1e6)
    assert list(plain.columns) == ["ess", "inefficiency", "computational_time"]
    assert plain.computational_time["x"] == plain.inefficiency["x"] * 1e6
    signs = np.ones((4, 1000))
    signs[:, :100] = -1  # tau = 0.9
    signed = dp.inefficiency(x, 1e6, signs=signs)
    assert signed.computational_time["x"] == pytest.approx(plain.computational_time["x"] / 0.64)
    assert signed.inefficiency["x"] == plain.inefficiency["x"]


def test_inefficiency_names_parameters_and_prefers_raw_draws() -> None:
    raw = {"a": autoregressive(0.8, 2, 2000), "b": RNG.normal(size=(2, 2000, 1, 2))}
    published = {name: RNG.normal(size=x.shape) for name, x in raw.items()}
    groups = {
        "posterior": _compat.group(labelled(published), "posterior"),
        "posterior_raw": _compat.group(labelled(raw), "posterior"),
    }
    table = dp.inefficiency(_compat.inference_data(groups, {}))
    assert list(table.index) == ["a", "b[0, 0]", "b[0, 1]"]
    assert table.inefficiency["a"] > 5  # of the chains, not of the independent noise-aware draws
    only = dp.inefficiency(labelled(published), var_names="b")
    assert list(only.index) == ["b[0, 0]", "b[0, 1]"]
    assert (only.ess * only.inefficiency == 4000).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dp.inefficiency(np.ones(5)), r"shape \(chains, draws\)"),
        (lambda: dp.inefficiency(np.ones((1, 5)), -1.0), "evaluations"),
        (lambda: dp.inefficiency(np.ones((1, 5)), signs=np.ones((1, 5))), "evaluations as well"),
        (lambda: dp.inefficiency(np.ones((1, 5)), 1.0, signs=np.ones((5, 1))), "signs"),
        (lambda: dp.inefficiency(np.ones((1, 4)), 1.0, signs=[[1, -1, 1, -1]]), "As many signs"),
        (lambda: dp.inefficiency(np.ones((1, 5)), var_names="x"), "var_names"),
        (lambda: dp.inefficiency(xr.Dataset({"a": ("k", np.ones(5))})), "dims 'chain'"),
    ],
)
def test_inefficiency_of_what_has_none(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_examples_in_docstrings() -> None:
    failed, tried = doctest.testmod(diagnostics)
    assert tried > 0 and failed == 0


# -- clipping -----------------------------------------------------------------------------------


def normal_model(y: np.ndarray, **budget: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu", 0.0, 3.0), 1.0, observed=y)
        if budget:
            dp.PrivacyBudget(**budget)
    return model


def test_simulated_share_of_clipped_records() -> None:
    # the score of mu is y - mu, standard normal: P(|x| > 1.96) = 0.05, P(|x| > 1) = 0.3173
    table = dp.clipping_report(
        normal_model(np.zeros(50)), scaling=0.1, clip_norm=[0.1, 0.196], random_seed=1, draws=400
    )
    assert list(table.index) == [0.1, 0.196]
    # 40,000 records: standard errors 0.0023 and 0.0011; 5.5 of them have a rate of 4e-8
    assert table.clipped[0.1] == pytest.approx(0.3173, abs=5.5 * 0.0023)
    assert table.clipped[0.196] == pytest.approx(0.05, abs=5.5 * 0.0011)
    assert (table.worst > table.clipped).all()
    # E min(|x|, 1) / E|x| = 1 - (phi(1) - (1 - Phi(1))) / phi(0) = 0.7911
    assert table.kept[0.1] == pytest.approx(0.7911, abs=0.01)


def test_simulated_share_agrees_with_the_advice() -> None:
    model = normal_model(np.zeros(50))
    advice = dp.clip_advice(model, scaling=2.0, random_seed=4, draws=50)
    table = dp.clipping_report(
        model, scaling=2.0, clip_norm=advice.clip_norm, random_seed=4, draws=50
    )
    assert table.clipped.iloc[0] == pytest.approx(0.005, abs=0.0003)


def test_simulation_reads_no_record_and_spends_nothing() -> None:
    reports = []
    for y in (np.zeros(50), np.full(80, 1e9)):
        model = normal_model(y, epsilon=1.0, delta=1e-6)
        reports.append(dp.clipping_report(model, scaling=1.0, clip_norm=1.0, random_seed=2))
        assert dp.get_budget(model).spent().epsilon == 0.0
    assert reports[0].equals(reports[1])


def test_bought_share_is_that_of_the_records() -> None:
    # 700 records of 5000 lie more than 2 from mu = 1
    y = np.full(N, 1.5)
    y[:400], y[400:700] = 4.0, -3.0
    model = normal_model(y, epsilon=5.0, delta=1e-6)
    budget = dp.get_budget(model)
    table = dp.clipping_report(
        model, scaling=0.5, clip_norm=[1.0, 0.1, 3.0], epsilon=1.0, at={"mu": 1.0}
    )
    # privacy noise: 6.5 standard deviations have a rate of 8e-11
    for c, share in ((1.0, 0.14), (0.1, 1.0), (3.0, 0.0)):
        assert abs(table.clipped[c] - share) < 6.5 * table.noise_sd[c]
    # sqrt(2) counts under replacement, three releases of a third of mu²(1.0) = 0.0558
    assert table.noise_sd[1.0] * N == pytest.approx(np.sqrt(2 / (0.0558 / 3)), rel=0.01)
    assert table.attrs["privacy_guarantee"] == "(epsilon, delta)-differential privacy"
    # charged: epsilon = 1 were nothing else released
    assert 0.999 < budget.spent().epsilon <= 1.0
    shown = budget.table()
    assert list(shown.mechanism[:3]) == [f"records above {c}" for c in ("1", "0.1", "3")]
    # asked again, it is paid again, with new noise
    again = dp.clipping_report(model, scaling=0.5, clip_norm=1.0, epsilon=1.0, at={"mu": 1.0})
    assert again.clipped[1.0] != table.clipped[1.0]
    assert budget.spent().epsilon > 1.4


def test_a_norm_on_the_edge_counts_as_clipped() -> None:
    assert EDGES[-2] == 2.0**60 and np.isinf(EDGES[-1])  # where scores are moved to
    # bins hold their lower end: norms of exactly the clip norm are counted, those below are not
    y = np.concatenate([np.full(N // 2, 2.0), np.full(N // 2, np.nextafter(2.0, 0.0) - 1e-12)])
    model = normal_model(y, epsilon=20.0, delta=1e-6)
    table = dp.clipping_report(model, scaling=1.0, clip_norm=2.0, epsilon=10.0, at={"mu": 0.0})
    assert abs(table.clipped[2.0] - 0.5) < 6.5 * table.noise_sd[2.0]


def test_nothing_is_bought_beyond_the_budget() -> None:
    model = normal_model(np.zeros(N), epsilon=0.5, delta=1e-6)
    budget = dp.get_budget(model)
    with pytest.raises(dp.BudgetExceeded, match="No record was read"):
        dp.clipping_report(model, scaling=0.5, clip_norm=1.0, epsilon=1.0)
    assert budget.spent().epsilon == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"clip_norm": [1.0, np.inf]}, "clip_norm must be finite"),
        ({"epsilon": 1.0}, "no budget to charge"),
        ({"epsilon": -1.0}, "epsilon must be positive"),
        ({"at": {"mu": 0.0}}, "at is for bought counts"),
        ({"scaling": -1.0}, "scales must be positive"),
    ],
)
def test_reports_that_can_not_be_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dp.clipping_report(
            normal_model(np.zeros(50)), **{"scaling": 1.0, "clip_norm": 1.0, **arguments}
        )


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ({"nu": 0.0}, r"each of \['mu'\]; it gives \['nu'\]"),
        ({"mu": [0.0]}, "0 axes, not 1"),
        ({"mu": np.inf}, "not finite"),
        ({"mu": "high"}, "must be an array of numbers"),
    ],
)
def test_points_that_are_none(at: dict[str, Any], message: str) -> None:
    model = normal_model(RNG.normal(size=N), epsilon=1.0, delta=1e-6)
    with pytest.raises(ValueError, match=message):
        dp.clipping_report(model, scaling=1.0, clip_norm=1.0, epsilon=0.5, at=at)
    assert dp.get_budget(model).spent().epsilon == 0.0
