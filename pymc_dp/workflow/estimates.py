"""What a released posterior says of the error of its mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pymc.model import Model
from scipy.linalg import pinvh

from pymc_dp.base import compat as _compat
from pymc_dp.base.matrices import Coordinates, positive_part, root
from pymc_dp.budget import PrivacyBudget
from pymc_dp.publication.publish import plan_of, released_draws
from pymc_dp.publication.results import unconstrain
from pymc_dp.records.graph import ParameterVector

_FLATTEST = 1e-10  # relative; a covariance has no direction without width
#: Variances of an error in z, from which noise has moved a mean further than records do, and the
#: most directions that are looked at for it.
_WIDE, _DIRECTIONS = 2.0, 8


@dataclass(frozen=True, eq=False)
class Estimate:
    """The mean of a released posterior of theta (d,), as an estimate of its true value theta_0.

    To first order ``mean - theta_0 = gain (S + xi)``, less what the prior adds, with the score S of
    the records at theta_0 and the privacy noise xi in it.  `covariance` (d, d) is that of the
    error, over the prior, the records, the noise and the chains.  In `coordinates` z about the mean
    the posterior would be about N(0, I) without noise in the score.  `secure`: whether the noise of
    all that was released was.
    """

    mean: np.ndarray
    gain: np.ndarray
    covariance: np.ndarray
    coordinates: Coordinates
    secure: bool = True

    @classmethod
    def of(
        cls,
        mean: np.ndarray,
        gain: np.ndarray,
        covariance: np.ndarray,
        raw: np.ndarray,
        secure: bool = True,
    ) -> Estimate:
        """Of these, and the covariance `raw` of the posterior without noise in its score."""
        largest = float(np.linalg.eigvalsh(raw)[-1])
        scaling = root(positive_part(raw, _FLATTEST * largest))
        return cls(mean, gain, covariance, Coordinates(mean, scaling), secure)

    def in_z(self) -> tuple[np.ndarray, np.ndarray]:
        """The gain and the covariance in z: for a score in z, an error in z."""
        back = np.linalg.inv(self.coordinates.scaling)
        return back @ self.gain @ back.T, back @ self.covariance @ back.T

    def points(self) -> tuple[Coordinates, ...]:
        """Where averages are those over the error, to the third order, if noise has made it wide.

        Two for each of the directions in which it is wide; none, if the mean stands for all.
        """
        variances, axes = np.linalg.eigh(self.in_z()[1])
        wide = np.flatnonzero(variances > _WIDE)[-_DIRECTIONS:]
        steps = (axes[:, wide] * np.sqrt(len(wide) * variances[wide])).T
        at = self.coordinates
        return tuple(Coordinates(at.theta(z), at.scaling) for z in (*steps, *-steps))


def estimate_of(
    released: Any, model: Model, budget: PrivacyBudget, parameters: ParameterVector
) -> Estimate:
    """The estimate of a released result of this model and budget; UnsafeRelease for others."""
    facts, posterior = released_draws(released)
    missing = [rv.name for rv in model.free_RVs if rv.name not in posterior]
    if missing:
        raise ValueError(
            f"released lacks {', '.join(missing)}: all free variables are needed. Release without "
            "var_names."
        )
    settings = plan_of(facts["plan_id"], budget)["settings"]
    if settings.get("trusted") is False:
        raise ValueError(
            "released is about the prior: its budget was too small to learn from the records, so "
            "they can neither confirm nor refute it. Nothing has been spent for this. Fit with a "
            "larger epsilon or share, fewer parameters or narrower priors."
        )
    secure = facts["privacy_guarantee"] != "none"
    theta = unconstrain(model, parameters, posterior)
    covariance, mean = _moments(theta)
    raw = covariance
    chains = theta
    if "posterior_raw" in _compat.group_names(released):
        chains = unconstrain(model, parameters, _compat.group(released, "posterior_raw"))
        raw, _ = _moments(chains)
    if settings.get("likelihood_power") not in (None, 1.0):
        raise ValueError("released has a tempered likelihood; sample with likelihood_power=1.")
    error = covariance + raw / float(_compat.effective_draws(chains).min())
    if "likelihood" not in settings:
        return Estimate.of(mean, raw, error, raw, secure)
    if settings["likelihood"] is None:
        raise ValueError(
            "released is from a likelihood of effects that are non-linear in the parameters, whose "
            "error is not known in the parameters. Sample with DPLangevin(form='anchored')."
        )
    parts = (np.array(settings["likelihood"][name]) for name in ("curvature", "covariance"))
    curvature, noise = (positive_part(matrix) for matrix in parts)
    weight = curvature @ pinvh(curvature + noise)
    precision = np.linalg.inv(covariance) + curvature - weight @ curvature
    raw = np.linalg.inv(positive_part(precision))
    return Estimate.of(mean, covariance @ weight, error, raw, secure)


def _moments(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Covariance and mean of (chains, draws, d) parameters."""
    pooled = theta.reshape(-1, theta.shape[-1])
    d = pooled.shape[1]
    if not np.isfinite(pooled).all():
        raise ValueError("Some draws of released lie on the boundary of their support.")
    if len(pooled) <= 4 * d or np.linalg.matrix_rank(pooled - pooled.mean(axis=0)) < d:
        raise ValueError(f"released has too few draws for {d} parameters: at least {4 * d + 1}.")
    return np.cov(pooled.T).reshape(d, d), pooled.mean(axis=0)
