"""The (epsilon, delta) curve of Gaussian differential privacy and its inverses."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from pymc_dp.base.checks import check_delta, check_epsilon
from pymc_dp.privacy.accounting import (
    MU2_UNIT,
    delta_from_mu,
    epsilon_from_mu,
    mu_from_budget,
    mu_from_units,
    units_from_mu,
)


def exact_delta(epsilon, mu):
    """The textbook formula with 60 digits; the two terms cancel in at most 20 of them."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)


@pytest.mark.parametrize(
    ("squared_mu", "epsilon"), [(0.01, 0.396857), (0.1, 1.367571), (1, 4.886554), (4, 10.997151)]
)
def test_reference_values(squared_mu, epsilon):
    # Published to six digits, hence the tolerance.
    mu = math.sqrt(squared_mu)
    assert epsilon_from_mu(mu, 1e-6) == pytest.approx(epsilon, abs=6e-7)
    assert delta_from_mu(epsilon, mu) == pytest.approx(1e-6, rel=1e-4)
    assert mu_from_budget(epsilon, 1e-6) == pytest.approx(mu, rel=1e-5)


@pytest.mark.parametrize("mu", [1e-6, 1e-4, 0.01, 0.3, 1.0, 3.0, 12.0, 37.0, 100.0])
def test_delta_is_a_tight_upper_bound(mu):
    # a = mu/2 - epsilon/mu runs from the bulk into the far tail, over both branches of the code.
    for a in (-20.0, -7.3, -3.0, -0.5, -1e-3, 0.0, 1e-3, 0.4, 2.0, 6.0):
        epsilon = mu * (mu / 2 - a)
        if epsilon < 0:
            continue
        truth = exact_delta(epsilon, mu)
        bound = delta_from_mu(epsilon, mu)
        assert bound >= truth
        assert bound <= truth * (1 + 3e-12 * (1 + 1 / mu))


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.1, 1.0, 5.0, 40.0, 100.0, 441.0, 2000.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-15, 1e-6, 1e-3, 0.5])
def test_epsilon_is_rounded_up(mu, delta):
    epsilon = epsilon_from_mu(mu, delta)
    assert exact_delta(epsilon, mu) <= delta
    if epsilon > 0:
        assert exact_delta(epsilon * (1 - 1e-12 - 1e-14 / mu), mu) > delta


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 0.1, 1.0, 15.0, 700.0, 710.0, 5e3, 1e5, 1e6])
@pytest.mark.parametrize("delta", [1e-300, 1e-15, 1e-6, 1e-3, 0.5])
def test_mu_is_rounded_down(epsilon, delta):
    mu = mu_from_budget(epsilon, delta)
    assert exact_delta(epsilon, mu) <= delta
    slack = 1e-12 + 1e-14 / mu
    assert exact_delta(epsilon, mu * (1 + slack)) > delta
    assert epsilon_from_mu(mu, delta) == pytest.approx(epsilon, rel=slack)
    # in the currency of a ledger, which has 63 bits
    units = units_from_mu(mu)
    assert 500 < units < 2**62 or epsilon < 1e-3
    if units > 0:
        assert exact_delta(epsilon, mu_from_units(units)) <= delta
        assert epsilon_from_mu(mu_from_units(units), delta) <= epsilon


def test_extremes():
    assert delta_from_mu(1.0, 0.0) == 0.0
    assert epsilon_from_mu(0.0, 1e-6) == 0.0
    assert epsilon_from_mu(1e-9, 1e-6) == 0.0  # delta alone covers it
    assert 0 < delta_from_mu(1e6, 1e-6) <= 1e-300
    assert 0 < delta_from_mu(1e308, 1e-6) <= 1e-300
    assert delta_from_mu(0.0, 200.0) == 1.0
    assert delta_from_mu(0.0, 1e200) == 1.0
    for epsilon in (1e12, 1e300):
        mu = mu_from_budget(epsilon, 1e-6)
        assert 0.99 * math.sqrt(2 * epsilon) < mu <= math.sqrt(2 * epsilon)


def test_monotone():
    mus = np.geomspace(1e-6, 100, 400)
    epsilons = [epsilon_from_mu(mu, 1e-6) for mu in mus]
    assert all(np.diff(epsilons) >= 0)
    assert all(np.diff([mu_from_budget(e, 1e-6) for e in np.geomspace(1e-3, 5e3, 400)]) > 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "noise_multipliers",
    [
        (2.0,),
        (1.0, 2.0),
        pytest.param((1.5, 1.5, 3.0), marks=pytest.mark.exhaustive),
        (8.0,) * 16,
    ],
)
def test_agrees_with_dp_accounting(noise_multipliers):
    """The privacy loss distribution of the composed Gaussians, at discretisation 1e-5.

    Its connect-the-dots estimate is pessimistic by up to a few 1e-10, hence "never below it by
    more than 1e-9"; the comparison with exact arithmetic above has no such allowance.
    """
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld import privacy_loss_distribution as pld

    composed = math.sqrt(sum(1 / tau**2 for tau in noise_multipliers))
    oracle = pld.from_gaussian_mechanism(
        1 / composed, value_discretization_interval=1e-5, log_mass_truncation_bound=-60
    )
    for delta in (1e-9, 1e-6, 1e-3):
        expected = oracle.get_epsilon_for_delta(delta)
        assert expected - 1e-9 <= epsilon_from_mu(composed, delta) <= expected + 1e-6


@pytest.mark.filterwarnings("ignore")
def test_composition_adds_squared_mu():
    """The oracle composes the releases itself; the coarser grid allows 2e-6 above the truth."""
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld import privacy_loss_distribution as pld

    step = pld.from_gaussian_mechanism(8.0, value_discretization_interval=1e-4)
    expected = step.self_compose(64).get_epsilon_for_delta(1e-6)
    assert epsilon_from_mu(1.0, 1e-6) == pytest.approx(expected, abs=2e-6)


def test_units_round_against_the_spender():
    rng = np.random.default_rng(1)
    for mu in [0.0, 2.0**-20, 1.0, 100.0, *rng.uniform(0, 5, 200), *rng.uniform(0, 2896, 200)]:
        units = units_from_mu(float(mu))
        assert Fraction(units) <= MU2_UNIT * Fraction(float(mu)) ** 2 < units + 1
        back = mu_from_units(units)
        assert back <= mu
        assert Fraction(back) ** 2 * MU2_UNIT >= units
    assert mu_from_units(MU2_UNIT) == 1.0


@pytest.mark.parametrize(
    "bad", [-1.0, float("nan"), float("inf"), -float("inf"), True, "1", None, [1.0], np.True_]
)
def test_wrong_arguments_are_named(bad):
    for call, name in [
        (lambda: check_epsilon(bad), "epsilon"),
        (lambda: check_delta(bad), "delta"),
        (lambda: epsilon_from_mu(bad, 1e-6), "mu"),
        (lambda: epsilon_from_mu(1.0, bad), "delta"),
        (lambda: mu_from_budget(bad, 1e-6), "epsilon"),
        (lambda: mu_from_budget(1.0, bad), "delta"),
        (lambda: units_from_mu(bad), "mu"),
    ]:
        with pytest.raises(ValueError, match=f"^{name} must"):
            call()


@pytest.mark.parametrize("delta", [0, 0.0, 1, 1.0, 1.5])
def test_delta_is_strictly_inside(delta):
    with pytest.raises(ValueError, match="delta"):
        mu_from_budget(1.0, delta)


def test_epsilon_zero_is_refused_as_a_budget():
    with pytest.raises(ValueError, match="epsilon must be positive"):
        mu_from_budget(0, 1e-6)


@pytest.mark.parametrize("bad", [-1, 1.0, True, "3", None])
def test_units_are_integers(bad):
    with pytest.raises(ValueError, match="units"):
        mu_from_units(bad)


def test_numpy_scalars_are_numbers():
    assert mu_from_budget(np.float64(1.0), np.float64(1e-6)) == mu_from_budget(1, 1e-6)
    assert mu_from_units(np.int64(MU2_UNIT)) == 1.0
