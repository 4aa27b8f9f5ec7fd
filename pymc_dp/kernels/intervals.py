"""Clip intervals for the per-record energy errors of a Langevin path.

Each is a function of the released path quantities D = sum |delta_j|^2 (steps from z_j to mid_j)
and D' = sum |delta'_j|^2 (steps from mid_j to z_{j+1}). Reversing the path swaps them, and turns
[lower, upper] into [-upper, -lower].
"""

from __future__ import annotations

from dataclasses import dataclass

from pymc_dp.kernels.interfaces import Batch


@dataclass(frozen=True, slots=True)
class ConstantInterval:
    """Clip energy errors to [-c, c] whatever the path.

    About a tenth of the gradient clip norm suits whitened coordinates.

    Weaknesses: nothing shows that no record is clipped, and clipped energy errors bias the target.
    """

    c: float

    def __call__(self, departure: Batch, arrival: Batch) -> tuple[Batch, Batch]:
        """Return ``(-c, c)``."""
        return -self.c, self.c


@dataclass(frozen=True, slots=True)
class CurvatureInterval:
    """Interval that contains every energy error of a record with bounded curvature.

    `beta` is a public bound on the spectral norm of a record's log-likelihood Hessian in z. It
    comes from public bounds on the covariates, never from the data. `log_concave` says that every
    record's Hessian lies in [-beta I, 0]; this halves the width.

    The path moves from z_j by delta_j to mid_j and by delta'_j to z_{j+1}. Taylor's theorem about
    mid_j leaves e_i = sum_j (delta'_j.H'_j.delta'_j - delta_j.H_j.delta_j) / 2 for some Hessians of
    l_i, so with D = sum |delta_j|^2 and D' = sum |delta'_j|^2

    - |e_i| <= beta (D + D') / 2 in general,
    - -beta D'/2 <= e_i <= beta D/2 if log-concave.

    Guarantee: no energy error is clipped, so the accept test is exact.
    Assumptions: ``beta`` holds along the path and no gradient was clipped.
    """

    beta: float
    log_concave: bool = False

    def __call__(self, departure: Batch, arrival: Batch) -> tuple[Batch, Batch]:
        """Return ``(lower, upper)`` from D and D', floats or arrays of shape ``(...)``."""
        half = 0.5 * self.beta
        if self.log_concave:
            return -half * arrival, half * departure
        width = half * (departure + arrival)
        return -width, width
