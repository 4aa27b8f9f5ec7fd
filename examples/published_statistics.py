"""A custodian publishes noisy statistics; an analyst gets a valid posterior from them.

The custodian holds 1,566 records of the NHEFS study (public data of the ``causaldata`` package,
confidential here) and publishes the clamped sums that a regression of weight change on quitting
smoking needs.  The analyst sees no record, but writes a PyMC model of the records, declares the
release, and samples the parameters together with the imputed records.  For the demonstration only,
the result is compared with the posterior from the records themselves.

Run with ``python examples/published_statistics.py``.  Writes ``published_statistics.png`` and
``published_statistics.json``; only the latter leaves the custodian.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arviz as az
import causaldata
import numpy as np
import pymc as pm
import pytensor.tensor as pt
from matplotlib.figure import Figure
from pymc.model import Model
from scipy.stats import gaussian_kde

import pymc_dp as dp

EPSILON, DELTA = 1.0, 1e-5
GAIN = (-20.0, 25.0)  # kilograms, a public bound
NAMES = ("intercept", "quitting smoking")


def statistic(quit_smoking: Any, gain: Any) -> Any:
    """(n, 4) contributions of the records to the sums that the regression needs."""
    u = (gain - GAIN[0]) / (GAIN[1] - GAIN[0])
    q = quit_smoking * 1.0
    return pt.stack([q, u, q * u, u**2], axis=1)


def custodian(path: Path, quit_smoking: np.ndarray, gain: np.ndarray) -> None:
    """Publish: sums of entries clamped to [0, 1], with Gaussian noise charged to a ledger."""
    released = dp.release_statistic(
        {"quit_smoking": quit_smoking, "gain": gain},
        statistic,
        (0.0, 1.0),
        "gaussian",
        dp.Ledger.temporary(),
        epsilon=EPSILON,
        delta=DELTA,
        name="weight change",
    )
    print(released.statement)
    path.write_text(released.to_json(), encoding="utf-8")


def analyst(path: Path) -> Any:
    """The posterior given the published file."""
    published = dp.PublishedStatistic.from_json(path.read_text(encoding="utf-8"))
    with records_model(published.n) as model:
        published.declare("published", statistic(model["quit"], model["gain"]))
        return dp.sample(1000, chains=2, step=dp.PrivacyAwareGibbs, random_seed=1)


def records_model(
    n: int | None, quit_smoking: np.ndarray | None = None, gain: np.ndarray | None = None
) -> Model:
    """The regression, with observed or free records."""
    with pm.Model(coords={"coefficient": NAMES}) as model:
        share = pm.Beta("share", 1.0, 1.0)
        beta = pm.Normal("beta", 0.0, 5.0, dims="coefficient")
        spread = pm.HalfNormal("spread", 10.0)
        q = pm.Bernoulli("quit", share, shape=n, observed=quit_smoking)
        pm.Normal("gain", beta[0] + beta[1] * q, spread, shape=n, observed=gain)
    return model


def picture(private: Any, exact: Any, path: Path) -> None:
    """Densities of the coefficients, from the published sums and from the records."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), NAMES, strict=True):
        for label, result in (("from published sums", private), ("from the records", exact)):
            draws = result.posterior["beta"].sel(coefficient=name).values.ravel()
            grid = np.linspace(*np.quantile(draws, [0.0005, 0.9995]), 200)
            axes.plot(grid, gaussian_kde(draws)(grid), label=label)
        axes.set(title=name, xlabel="kg gained, 1971 to 1982", yticks=[])
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Both sides, and the comparison."""
    data = causaldata.nhefs_complete.load_pandas().data
    quit_smoking = data["qsmk"].to_numpy(int)
    gain = data["wt82_71"].to_numpy(float)
    path = Path("published_statistics.json")
    custodian(path, quit_smoking, gain)
    private = analyst(path)
    with records_model(None, quit_smoking, gain):
        exact = pm.sample(
            1000, chains=2, random_seed=1, progressbar=False, compile_kwargs={"mode": "NUMBA"}
        )
    for label, result in (("From the published sums", private), ("From the records", exact)):
        print(f"\n{label}:")
        print(az.summary(result, var_names=["beta", "spread", "share"]).to_string())
    picture(private, exact, Path("published_statistics.png"))


if __name__ == "__main__":
    main()
