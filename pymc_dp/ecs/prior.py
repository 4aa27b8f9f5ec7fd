"""The prior of unconstrained parameters, as a part of the target and of trajectories."""

from __future__ import annotations

import numpy as np
import pytensor
from pytensor.compile.mode import Mode
from pytensor.graph.rewriting.utils import rewrite_graph

from pymc_dp.ecs.compiling import KernelGraph
from pymc_dp.ecs.kinks import has_kinks
from pymc_dp.records import Records
from pymc_dp.rows.ancestry import ancestors_without_shapes
from pymc_dp.rows.functions import compile_function, jacobian_of

__all__ = ["PriorTerm"]


class PriorTerm:
    """Log-density of the prior with the Jacobian of the transforms, and its derivatives.

    Attributes
    ----------
    graph : (inputs, outputs)
        From theta to the (1,) log-density and its (d,) gradient.
    is_quadratic : bool
        Whether the Hessian is constant and nothing bends or jumps, as for normal priors: the graph
        shows it.
    """

    def __init__(self, records: Records) -> None:
        theta = records.parameters.theta
        [logp] = records.parameters.substitute([records.public_logp])
        gradient = pytensor.grad(logp, theta, disconnected_inputs="ignore")
        hessian = rewrite_graph(jacobian_of(gradient, theta), include=("canonicalize", "stabilize"))
        self.graph: KernelGraph = ([theta], [logp.reshape((1,)), gradient])
        constant = theta not in ancestors_without_shapes([hessian])
        self.is_quadratic = constant and not has_kinks([logp], theta)
        # called a few times, while the mode is sought
        mode = {"mode": Mode(linker="py", optimizer="fast_run")}
        self._total = compile_function([theta], [logp, gradient], mode)
        self._hessian = compile_function([theta], hessian, mode)

    def total(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """Log-density at theta, and its (d,) gradient."""
        value, gradient = self._total(theta)
        return float(value), gradient

    def hessian(self, theta: np.ndarray) -> np.ndarray:
        """(d, d) second derivatives at theta."""
        found = np.asarray(self._hessian(theta), dtype="float64")
        return (found + found.T) / 2.0
