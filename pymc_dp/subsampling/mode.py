"""The posterior mode on all records, where control variates are expanded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from scipy.linalg import eigh
from scipy.optimize import minimize

from pymc_dp.subsampling.prior import PriorTerm

#: The search begins with at least so many records, and with so many for each parameter.
_FIRST, _PER_PARAMETER = 5000, 50
#: Newton decrement, in posterior standard deviations, that counts as the mode.
_NEAR = 0.03
#: Newton steps, at most.
_LONGEST = 100


class Rows(Protocol):
    """Records whose log-likelihood can be summed."""

    n: int
    d: int

    def total(self, theta: np.ndarray, rows: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """Log-likelihood of all records or of some, and its gradient."""

    def hessian(self, theta: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """(d, d) second derivatives of the same."""


class Posterior:
    """The log-posterior, on all records or extrapolated from some."""

    def __init__(self, source: Rows, prior: PriorTerm, rows: np.ndarray | None = None) -> None:
        self.source, self.prior, self.rows = source, prior, rows
        self.weight = 1.0 if rows is None else source.n / len(rows)

    def total(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient."""
        value, gradient = self.source.total(theta, self.rows)
        log_prior, slope = self.prior.total(theta)
        return self.weight * value + log_prior, self.weight * gradient + slope

    def curved(self, theta: np.ndarray) -> Curved:
        """The quadratic approximation at theta."""
        likelihood = self.source.hessian(theta, self.rows)
        value, gradient = self.total(theta)
        precision = -self.weight * likelihood - self.prior.hessian(theta)
        return Curved(theta, value, gradient, likelihood, *_inverse(precision))


@dataclass(frozen=True, eq=False)
class Curved:
    """A quadratic approximation of the log-posterior at theta.

    `hessian` (d, d) is that of the log-likelihood. `covariance`, `root` and `inverse_root` (d, d)
    are the inverse of minus the Hessian of the log-posterior, a square root of it, and the inverse
    of that; with the absolute values of curvatures, where the log-posterior is not concave.
    """

    theta: np.ndarray
    value: float
    gradient: np.ndarray
    hessian: np.ndarray
    covariance: np.ndarray
    root: np.ndarray
    inverse_root: np.ndarray
    concave: bool

    @property
    def mode(self) -> np.ndarray:
        """(d,) where the approximation has its maximum."""
        return self.theta + self.covariance @ self.gradient

    @property
    def distance(self) -> float:
        """From theta to `mode`, in posterior standard deviations."""
        return float(np.sqrt(max(0.0, self.gradient @ self.covariance @ self.gradient)))


def _inverse(precision: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    if not np.isfinite(precision).all():
        raise ValueError(
            "The log-posterior has no finite curvature where control variates are to be expanded. "
            "Give a point of high posterior density as `reference`."
        )
    sizes = np.sqrt(np.maximum(np.abs(np.diag(precision)), 1e-300))
    values, vectors = eigh(precision / np.outer(sizes, sizes))
    concave = bool(values[0] > 1e-10)
    values = np.maximum(np.abs(values), 1e-10)
    root = (vectors / np.sqrt(values)) / sizes[:, None]
    inverse_root = (vectors * np.sqrt(values)).T * sizes
    return root @ root.T, root, inverse_root, concave


def find_mode(
    source: Rows, prior: PriorTerm, start: np.ndarray, rng: np.random.Generator, progressbar: bool
) -> Curved:
    """The posterior mode, and the curvature there.

    Newton's method on some records, which costs little; `rng` chooses them. Then a quasi-Newton
    method on all of them, in coordinates in which the posterior of the few has unit covariance;
    then Newton's method, of which one step is the rule.
    """
    size = min(source.n, max(_FIRST, _PER_PARAMETER * source.d))
    few = rng.choice(source.n, size, replace=False) if size < source.n else None
    columns = TextColumn("Posterior mode"), SpinnerColumn(), TimeElapsedColumn()
    bar = Progress(*columns, TextColumn("{task.description}"), disable=not progressbar)
    task = bar.add_task("", total=None)

    def show(text: str) -> None:
        bar.update(task, description=text)

    with bar, np.errstate(all="ignore"):
        found = _newton(Posterior(source, prior, few), start, 0.1, show)
        everything = Posterior(source, prior)
        if few is None:
            return _newton(everything, found.theta, _NEAR, show)
        show(f"{source.n} records")

        def negative(z: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = everything.total(found.theta + found.root @ z)
            show(f"{source.n} records, log-posterior {value:.6g}")
            return -value, -(found.root.T @ gradient)

        best = minimize(
            negative,
            np.zeros(source.d),
            jac=True,
            method="L-BFGS-B",
            options={"gtol": 0.1 * _NEAR, "ftol": 1e-14, "maxiter": 200},
        )
        return _newton(everything, found.theta + found.root @ best.x, _NEAR, show)


def _newton(
    posterior: Posterior, theta: np.ndarray, near: float, show: Callable[[str], None]
) -> Curved:
    """Newton's method with step halving, until the next step would be shorter than `near`."""
    at = posterior.curved(theta)
    for _ in range(_LONGEST):
        size = posterior.source.n if posterior.rows is None else len(posterior.rows)
        show(f"{size} records, log-posterior {at.value:.6g}")
        if at.distance < near and at.concave:
            break
        way, factor = at.mode - at.theta, 1.0
        while factor > 1e-8:
            value = posterior.total(at.theta + factor * way)[0]
            if value > at.value:
                break
            factor /= 2.0
        else:  # rounding hides any further gain
            break
        at = posterior.curved(at.theta + factor * way)
    return at
