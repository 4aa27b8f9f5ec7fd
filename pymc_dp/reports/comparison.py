"""One plan of Gaussian releases, as different accountants would count it.

For papers and readers of older ones: this package counts budgets exactly (Gaussian DP), or by
privacy loss distributions where batches are sampled, never by the bounds shown here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from pymc_dp.base.checks import (
    check_delta,
    check_integer,
    check_neighboring,
    check_positive,
    check_probability,
)
from pymc_dp.privacy.accounting import SubsampledGaussianEvent, epsilon_from_mu
from pymc_dp.privacy.subsampled import epsilon_of, library


def compare_accountants(
    noise_multiplier: float,
    releases: int,
    delta: float,
    *,
    sampling_probability: float = 1.0,
    neighboring: str = "replace_one",
) -> pd.DataFrame:
    """Epsilon of a plan of Gaussian releases under exact and older accounting.

    Parameters
    ----------
    noise_multiplier : float
        τ = σ/Δ, with Δ the l2 sensitivity under `neighboring`, also where batches are sampled: if C
        is the largest norm of one unit's contribution, Δ = 2C under ``replace_one`` and Δ = C
        under ``add_or_remove_one``.
    releases : int
        How many releases.
    delta : float
        Strictly between 0 and 1.
    sampling_probability : float, default 1.0
        Below 1, each release is a sum over a Poisson batch; needs ``pymc_dp[accounting]``.
    neighboring : {"replace_one", "add_or_remove_one"}
        Matters for sampled batches alone.

    Returns
    -------
    pandas.DataFrame
        One row for each accountant, with the columns

        - ``epsilon``, or NaN where the theorem does not apply;
        - ``ratio``: epsilon over that of the package's own accountant, which is the first row;
        - ``amplified``: whether the bound knows that batches are sampled.  One that does not is
          valid, since a batch tells no more than all units would, but far too large;
        - ``source``.

    Raises
    ------
    ImportError
        If batches are sampled and dp-accounting is not installed.
    ValueError
        If an argument is out of its range.

    Notes
    -----
    *Guarantee.*  Every finite epsilon in the table is an upper bound, up to rounding.

    *Weaknesses.*  Advanced composition uses the classical Gaussian mechanism, proved for
    epsilon < 1 per release, with delta divided in the best way between the releases and their
    composition; it is NaN where a release has more.  No Rényi bound for Poisson batches under
    ``replace_one`` is known to dp-accounting, so that row is then not amplified.

    Examples
    --------
    >>> import pymc_dp as dp
    >>> dp.compare_accountants(noise_multiplier=20.0, releases=100, delta=1e-6).epsilon.round(3)
    accountant
    Gaussian DP (exact)      2.254
    zCDP, tighter            2.419
    zCDP                     2.753
    RDP                      2.756
    advanced composition    28.013
    Name: epsilon, dtype: float64
    """
    tau = check_positive("noise_multiplier", noise_multiplier)
    releases = check_integer("releases", releases, minimum=1)
    delta = check_delta(delta)
    q = check_probability("sampling_probability", sampling_probability)
    neighboring = check_neighboring(neighboring)
    rho = releases / (2.0 * tau**2)
    exact = epsilon_from_mu(math.sqrt(2.0 * rho), delta)
    classical = rho + 2.0 * math.sqrt(-rho * math.log(delta))  # Proposition 1.3
    advanced = advanced_epsilon(tau, releases, delta)
    rows = [
        ("Gaussian DP (exact)", exact, False, "Dong et al. 2022"),
        ("zCDP, tighter", zcdp_epsilon(rho, delta), False, "Canonne, Kamath & Steinke 2020"),
        ("zCDP", classical, False, "Bun & Steinke 2016"),
        ("RDP", rdp_epsilon(rho, delta), False, "Mironov 2017"),
        ("advanced composition", advanced, False, "Dwork & Roth 2014"),
    ]
    if q < 1:
        s = 2.0 * tau if neighboring == "replace_one" else tau
        plan = SubsampledGaussianEvent("plan", s, q), releases
        poisson = epsilon_of([plan], 0, delta, neighboring)
        rows.insert(0, ("PLD", poisson, True, "Doroshenko et al. 2022"))
        if neighboring == "add_or_remove_one":
            sampled = sampled_rdp_epsilon(s, q, releases, delta)
            rows[4] = ("RDP", sampled, True, "Mironov, Talwar & Zhang 2019")
    table = pd.DataFrame(rows, columns=["accountant", "epsilon", "amplified", "source"])
    first = rows[0][1]
    table.insert(2, "ratio", table["epsilon"] / first if first else math.nan)
    return table.set_index("accountant")


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Least over alpha > 1 of rho alpha + log(1 - 1/alpha) - log(alpha delta)/(alpha - 1).

    Canonne, Kamath & Steinke 2020, Proposition 12.
    """

    def epsilon(log_order: float) -> float:
        excess = math.exp(log_order)  # alpha - 1
        alpha = 1.0 + excess
        return rho * alpha + math.log(excess / alpha) - math.log(alpha * delta) / excess

    classical = 0.5 * math.log(-math.log(delta) / rho)  # the best order of the classical bound
    return max(0.0, _least(epsilon, classical - 3.0, classical + 3.0))


def rdp_epsilon(rho: float, delta: float) -> float:
    """Least over alpha = 2, 3, ... of rho alpha + log(1/delta)/(alpha - 1) (Mironov 2017)."""
    best = 1.0 + math.sqrt(-math.log(delta) / rho)
    orders = [max(2.0, math.floor(best)), max(2.0, math.ceil(best))]
    return min(rho * alpha - math.log(delta) / (alpha - 1.0) for alpha in orders)


def sampled_rdp_epsilon(s: float, q: float, releases: int, delta: float) -> float:
    """Epsilon of a plan on Poisson batches by Rényi divergences, under ``add_or_remove_one``.

    Mironov, Talwar & Zhang 2019.  dp-accounting knows no such bound for ``replace_one``.
    """
    found = library()
    accountant = found.rdp.RdpAccountant(
        neighboring_relation=found.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    accountant.compose(found.PoissonSampledDpEvent(q, found.GaussianDpEvent(s)), releases)
    return float(accountant.get_epsilon(delta))


def advanced_epsilon(tau: float, releases: int, delta: float) -> float:
    """Advanced composition of classical Gaussian mechanisms, or NaN where it does not apply.

    Theorems 2 and 3 of Yıldırım & Ermiş 2019, after Dwork & Roth 2014: each release is (e, d)-DP
    with e = sqrt(2 log(1.25/d))/τ < 1, all of them (sqrt(2k log(1/d')) e + k e (exp(e) - 1),
    k d + d')-DP.  Basic composition, k e, where it is better.
    """

    def one(d: float) -> float:
        e = math.sqrt(2.0 * math.log(1.25 / d)) / tau
        return e if e < 1.0 else math.inf

    def composed(log_share: float) -> float:
        share = math.exp(log_share)  # of delta, for the composition
        e = one(delta * (1.0 - share) / releases)
        if math.isinf(e):
            return 1e300
        slack = math.sqrt(-2.0 * releases * math.log(delta * share))
        return slack * e + releases * e * math.expm1(e)

    found = min(_least(composed, -20.0, -1e-6), releases * one(delta / releases))
    return found if found < 1e300 else math.nan


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Least value of a function with one minimum; where it lies does not matter for validity."""
    grid = np.linspace(low, high, 61)
    values = [function(float(x)) for x in grid]
    k = int(np.argmin(values))
    bounds = float(grid[max(k - 1, 0)]), float(grid[min(k + 1, 60)])
    refined = minimize_scalar(function, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return min(values[k], float(refined.fun))
