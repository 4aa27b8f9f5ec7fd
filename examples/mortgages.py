"""Home ownership of 214,144 men: data and model of the quickstart.

Source: D. K. Fetter (2013), "How do mortgage subsidies affect home ownership? Evidence from the
mid-century GI bills", American Economic Journal: Economic Policy 5(2), 111-147; distributed with
the Python package ``causaldata``. The data are public. The quickstart treats them as if they were
private: every number in this file could be written down without opening the data.
"""

from __future__ import annotations

import numpy as np
import pymc as pm

__all__ = ["FEATURES", "N_PEOPLE", "PRIOR_SD", "load", "logistic_model"]

FEATURES = ("intercept", "veteran", "nonwhite", "age")

# Number of people in the study: public under the replace-one relation.
N_PEOPLE = 214_144

# The study follows men born in 84 successive quarters, from 54.5 quarters before to 28.5 quarters
# after the cohort at which eligibility for the Korean War mortgage subsidy changes.
FIRST_COHORT, LAST_COHORT = -54.5, 28.5

# Standard deviation of the normal priors: odds ratios from 1/50 to 50 are within two of them.
PRIOR_SD = 2.0


def load() -> tuple[np.ndarray, np.ndarray]:
    """Read one row per person.

    Returns
    -------
    x : np.ndarray, float64, shape (n, 4)
        Columns as in `FEATURES`: 1; veteran of World War II or the Korean War (-1/2 or 1/2);
        nonwhite (0 or 1); age, linear from -1 (youngest cohort) to 1 (oldest, 83 quarters older).
    y : np.ndarray, int64, shape (n,)
        1 for a home owner, else 0.

    Notes
    -----
    The features are centred and scaled with constants of the study design, never with means or
    ranges of the data: no privacy statement covers what is computed before the model is built.
    """
    from causaldata import mortgages

    frame = mortgages.load_pandas().data
    centre = 0.5 * (FIRST_COHORT + LAST_COHORT)
    half_width = 0.5 * (LAST_COHORT - FIRST_COHORT)
    birth = (frame["qob_minus_kw"].to_numpy(dtype=np.float64) - centre) / half_width
    veteran = np.where(frame["vet_wwko"].to_numpy() == 1, 0.5, -0.5)
    nonwhite = np.where(frame["nonwhite"].to_numpy() == 1, 1.0, 0.0)
    x = np.column_stack([np.ones(len(frame)), veteran, nonwhite, -birth])
    y = np.where(frame["home_ownership"].to_numpy() == 1, 1, 0)
    return x, y


def logistic_model(x: np.ndarray, y: np.ndarray) -> pm.Model:
    """Logistic regression of home ownership, with coefficients ``beta`` named by `FEATURES`."""
    with pm.Model(coords={"feature": list(FEATURES)}) as model:
        beta = pm.Normal("beta", 0.0, PRIOR_SD, dims="feature")
        pm.Bernoulli("owns_home", logit_p=x @ beta, observed=y)
    return model
