"""Barker's test on batches: what the noise of sampling does to it, beside what theory says.

Log-likelihood ratios of a few records, copied many times, are estimated from Poisson batches as
`pymc_dp.privacy.chains.MomentQueries` does.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit, ndtr
from scipy.stats import expon

from pymc_dp.kernels.penalty import _WIDTH, BarkerTest, correction

#: Two-sided normal tail 3.8e-8.
Z = 5.5
Q, SD = 0.25, 1.2
#: Skewed ratios without a mean: neither way is more likely.
BASE = expon.ppf((np.arange(10) + 0.5) / 10)
BASE -= BASE.mean()


def answers(copies, sampling, private, unsure):
    """Ratios, estimates of the variance of their sampling, and sum r^3.

    Their noise has standard deviations of `sampling` and of `private`; that on the estimates has
    `unsure`.
    """
    rng = np.random.default_rng(copies)
    r = BASE * sampling / np.sqrt(copies * (1 - Q) / Q * np.sum(BASE**2))
    counts = rng.binomial(copies, Q, (100_000, len(r)))
    noise = rng.standard_normal((2, 100_000))
    # pairs with the noise of privacy reversed
    counts, noise = np.r_[counts, counts], np.c_[noise, -noise]
    variance = (1 - Q) / Q**2 * counts @ r**2 + unsure * noise[1]
    return counts @ r / Q + private * noise[0], variance, copies * np.sum(r**3)


def chance(value, variance):
    """Of being accepted, given an answer and the variance of its noise."""
    found = correction(SD)
    wide = np.sqrt(SD**2 - variance + _WIDTH**2)
    each = [
        weight * 0.5 * (ndtr((value + place) / wide) + ndtr((value - place) / wide))
        for place, weight in zip(found.places, found.weights, strict=True)
    ]
    return np.sum(each, axis=0)


def mean_chance(ratio, noise, variance):
    """Mean over noise of a known mean of 0, and its standard error."""
    assert ((variance >= 0) & (variance <= SD**2)).all()
    found = chance(ratio + noise, variance)
    found = found - np.cov(found, noise)[0, 1] / np.var(noise) * noise
    return found.mean(), found.std() / np.sqrt(len(found))


@pytest.mark.parametrize("estimated", [True, False])
def test_skewed_ratios_bias_it_by_one_over_the_root_of_the_batch(estimated):
    shifts = []
    for copies in (16, 64, 256):
        noise, variance, cubes = answers(copies, sampling=0.7, private=0.2, unsure=0.05)
        third = Q**-2 * (1 - Q) * (1 - 2 * Q) * cubes
        covariance = Q**-2 * (1 - Q) ** 2 * cubes if estimated else 0.0
        if not estimated:
            variance = np.full_like(variance, 0.7**2)
        mean, error = mean_chance(0.0, noise, np.clip(0.2**2 + variance, 0, SD**2))
        shift, error = 4 * (mean - 0.5), 4 * error  # log odds, which should be 0
        predicted = -(third - 3 * covariance) / 12
        assert predicted == pytest.approx(
            (2 - Q) * (1 - Q) * cubes / (12 * Q**2) if estimated else -third / 12
        )
        # next order: half as large at each step
        assert abs(shift - predicted) < Z * error + 0.4 * abs(predicted) / np.sqrt(copies)
        shifts.append(shift)
        if copies == 16:
            assert abs(shift) > 4 * error
    # a quarter, with a standard error of up to 0.06
    assert abs(shifts[2]) < 0.6 * abs(shifts[0])


@pytest.mark.parametrize("ratio", [-1.0, 1.0])
def test_an_estimate_below_zero_is_worth_keeping(ratio):
    """Cut off, the total is overestimated, too little is filled up, and the test is too sharp."""
    noise, variance, _ = answers(1024, sampling=0.2, private=0.7, unsure=0.2)
    kept, error = mean_chance(ratio, noise, np.clip(0.7**2 + variance, 0, SD**2))
    cut, _ = mean_chance(ratio, noise, np.clip(0.7**2 + np.maximum(variance, 0), 0, SD**2))
    # a variance whose estimate has noise gives the total a fourth cumulant of 3 unsure^2
    f = expit(ratio) * expit(-ratio)
    heavier = 3 * 0.2**2 / 24 * np.sign(ratio) * abs(1 - 2 * expit(ratio)) * f * (12 * f - 1)
    assert abs(kept - expit(ratio) - heavier) < Z * error + 2e-4
    assert (cut - expit(ratio)) * np.sign(ratio) > 1e-3 > 4 * error


def test_the_step_accepts_with_this_chance():
    noise, variance, _ = answers(64, sampling=0.7, private=0.2, unsure=0.05)
    total = np.clip(0.2**2 + variance, 0, None)
    total[::10] = SD**2 * 1.001  # too noisy
    everywhere = np.ones(len(noise), dtype=bool)
    rng = np.random.default_rng(3)
    accepted, _ = BarkerTest(SD)(rng, everywhere, 1.0 + noise, np.sqrt(total), 0.0)
    quiet = total <= SD**2
    assert not accepted[~quiet].any() and quiet.mean() > 0.85
    expected = chance(1.0 + noise[quiet], total[quiet])
    error = np.sqrt(np.sum(expected * (1 - expected)))
    assert abs(accepted[quiet].sum() - expected.sum()) < Z * error
