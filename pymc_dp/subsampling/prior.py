"""The prior of unconstrained parameters, as a part of the target and of trajectories."""

from __future__ import annotations

import numpy as np
import pytensor
from pytensor.compile.mode import Mode

from pymc_dp.base.matrices import minus_hessian
from pymc_dp.records.extraction import Records
from pymc_dp.rows.functions import compile_function
from pymc_dp.subsampling.compiling import KernelGraph
from pymc_dp.subsampling.degree import degree_of


class PriorTerm:
    """Log-density of the prior with the Jacobian of the transforms, and its derivatives.

    `graph` gives the (1,) log-density and its (d,) gradient from theta. `is_quadratic` says that
    the log-density is a quadratic function of theta, as for normal priors: the graph shows it.
    """

    def __init__(self, records: Records) -> None:
        theta = records.parameters.theta
        [logp] = records.parameters.substitute([records.public_logp])
        gradient = pytensor.grad(logp, theta, disconnected_inputs="ignore")
        self.graph: KernelGraph = ([theta], [logp.reshape((1,)), gradient])
        self.is_quadratic = degree_of(logp, theta) <= 2.0
        # called a few times, while the mode is sought
        mode = {"mode": Mode(linker="py", optimizer="fast_run")}
        self._total = compile_function([theta], [logp, gradient], mode)

    def total(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """Log-density at theta, and its (d,) gradient."""
        value, gradient = self._total(theta)
        return float(value), gradient

    def hessian(self, theta: np.ndarray) -> np.ndarray:
        """(d, d) second derivatives at theta: differences of gradients, exact for quadratics."""
        steps = np.ones(len(theta)) if self.is_quadratic else 1e-5 * (1.0 + np.abs(theta))
        return -minus_hessian(lambda at: self.total(at)[1], theta, steps)
