"""What samplers that see samples of records compute once from all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pymc.model import Model

from pymc_dp.ecs.estimates import Sampled, estimate
from pymc_dp.ecs.expansion import Expansion, expand
from pymc_dp.ecs.general import GeneralRows, KernelGraph, callable_kernel, callable_prior
from pymc_dp.ecs.linear import LinearRows, linear_rows
from pymc_dp.ecs.mode import Curved, Posterior, find_mode
from pymc_dp.ecs.prior import PriorTerm
from pymc_dp.ecs.reading import read
from pymc_dp.rows.functions import ParameterVector

__all__ = ["Pilot", "Variates", "prepare"]

#: Records and points of the pilot.
_RECORDS, _POINTS = 20_000, 8


class Variates:
    """Control variates of all records, ready for compiled loops.

    Attributes
    ----------
    parameters : ParameterVector
    curved : Curved
        The log-posterior about the centre.
    expansion : Expansion
        The sum of the control variates; with the prior, if that is quadratic.
    family : int
        Of the linear predictor; -1 without one.
    rows : tuple of ndarray
        What an estimate reads of every record.
    kernel_graph, prior_graph : (inputs, outputs) or None
        What trajectories call; None where loops of our own, or the expansion, do.
    """

    def __init__(
        self,
        parameters: ParameterVector,
        curved: Curved,
        expansion: Expansion,
        family: int,
        rows: tuple[np.ndarray, ...],
        kernel_graph: KernelGraph | None,
        prior_graph: KernelGraph | None,
    ) -> None:
        self.parameters, self.curved, self.expansion = parameters, curved, expansion
        self.family, self.rows = family, rows
        self.kernel_graph, self.prior_graph = kernel_graph, prior_graph
        self.kernel: Any = None
        self.prior: Any = None
        self.compile()

    def compile(self) -> None:
        """Make the compiled functions, which do not travel between processes."""
        graph, prior = self.kernel_graph, self.prior_graph
        self.kernel = None if graph is None else callable_kernel(graph)
        self.prior = None if prior is None else callable_prior(prior)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kernel": None, "prior": None}

    @property
    def n(self) -> int:
        """Number of records."""
        return len(self.rows[0])

    def differences(self, theta: np.ndarray, index: np.ndarray) -> np.ndarray:
        """d_k = l_k - q_k of some records."""
        rows = tuple(x[index] for x in self.rows)
        d, gradient = np.empty(len(index)), np.empty(len(theta))
        at = Sampled(self.family, self.expansion, 1.0, 0.0, 1)
        estimate(self.kernel, at, rows, theta, d, gradient)
        return d

    def typical(self, rng: np.random.Generator) -> np.ndarray:
        """(d,) draw from the normal approximation of the posterior."""
        return self.curved.mode + self.curved.root @ rng.standard_normal(len(self.curved.theta))


class Pilot:
    """How far the control variates are off, where the posterior is.

    Attributes
    ----------
    variance : float
        n^2 times the variance of d_k: the estimate from m records has this over m.
    total : float
        Sum of d_k over all records.
    largest : float
        n times the largest distance of d_k from its mean.
    """

    def __init__(self, variates: Variates, rng: np.random.Generator) -> None:
        n = variates.n
        index = rng.choice(n, min(n, _RECORDS), replace=False)
        found = np.array(
            [n * variates.differences(variates.typical(rng), index) for _ in range(_POINTS)]
        )
        self.variance = float(found.var(axis=1).mean())
        self.total = float(found.mean())
        self.largest = float(np.abs(found - found.mean(axis=1, keepdims=True)).max())


def prepare(
    model: Model,
    sampler: str,
    *,
    order: int,
    estimator: str,
    reference: Mapping[str, Any] | None,
    rng: np.random.Generator,
    progressbar: bool,
    general: bool = False,
) -> Variates:
    """Read a model, find its mode, and expand the records about it.

    Parameters
    ----------
    model : pymc.Model
    sampler : str
        For messages.
    order : {0, 1, 2}
    estimator : {"perturbed", "signed", "mean"}
    reference : mapping, optional
        Values of the free variables, in their own spaces, to expand about.  Default: the mode.
    rng : numpy.random.Generator
    progressbar : bool
    general : bool, default False
        Do without loops of our own for linear predictors.

    Raises
    ------
    NotFactorizable, UnsafeModel, ValueError
    """
    records = read(model, sampler)
    [group] = records.groups
    data = group.store.read()
    parameters, prior = records.parameters, PriorTerm(records)
    linear = None if general else linear_rows(group.graph, parameters, data)
    source: LinearRows | GeneralRows = linear or GeneralRows(group.graph, parameters, data)
    if reference is None:
        curved = find_mode(source, prior, records.initial, rng, progressbar)
    else:
        curved = Posterior(source, prior).curved(_at(model, parameters, reference))
    centre = curved.theta
    value, gradient = source.total(centre)
    expansion = expand(centre, value, gradient, curved.hessian, order)
    prior_graph: KernelGraph | None = prior.graph
    if prior.is_quadratic:
        expansion = expansion.plus(*prior.total(centre), prior.hessian(centre))
        prior_graph = None
    if isinstance(source, LinearRows):
        rows: tuple[np.ndarray, ...] = source.remainders(centre, order)
        return Variates(parameters, curved, expansion, source.family, rows, None, prior_graph)
    kernel, rows = source.remainders(centre, order, estimator)
    return Variates(parameters, curved, expansion, -1, rows, kernel, prior_graph)


def _at(model: Model, parameters: ParameterVector, reference: Mapping[str, Any]) -> np.ndarray:
    """Unconstrained parameters of values of the free variables."""
    names = {rv.name for rv in model.free_RVs}
    if set(reference) != names:
        raise ValueError(
            f"reference must give a value for each of {sorted(names)}; it has {sorted(reference)}."
        )
    start = {rv: np.asarray(reference[rv.name]) for rv in model.free_RVs}
    strategies = dict(model.rvs_to_initial_values)
    try:
        model.rvs_to_initial_values.update(start)
        point = model.initial_point()
    finally:
        model.rvs_to_initial_values.update(strategies)
    theta = parameters.ravel(point)
    if not np.isfinite(theta).all():
        raise ValueError("reference lies outside the support of the prior. Choose it inside.")
    return theta
