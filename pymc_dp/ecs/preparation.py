"""What samplers that see samples of records compute once from all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pymc.model import Model

from pymc_dp.ecs.compiling import Kernel, KernelGraph, callable_prior
from pymc_dp.ecs.estimates import MEAN, Sampled, density, estimate
from pymc_dp.ecs.expansion import Expansion, expand
from pymc_dp.ecs.few import CompactGraph, FewNumbers, few_numbers
from pymc_dp.ecs.gather import Sample, drawn
from pymc_dp.ecs.general import GeneralRows, WholeGraph
from pymc_dp.ecs.guard import refuse_another_density
from pymc_dp.ecs.linear import LinearRows, linear_rows
from pymc_dp.ecs.mode import Curved, Posterior, find_mode
from pymc_dp.ecs.prior import PriorTerm
from pymc_dp.ecs.reading import read
from pymc_dp.rows.cuts import RowGraph
from pymc_dp.rows.functions import ParameterVector

__all__ = ["Pilot", "Variates", "prepare"]

#: Records that are evaluated at once, those of the pilot, and points of the pilot.
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
    rows : (n, k) ndarray
        What an estimate reads of every record.
    width : int
        Of the designs, which come first.
    kernel_graph, prior_graph : graphs or None
        What trajectories call; None where loops of our own, or the expansion, do.
    """

    def __init__(
        self,
        parameters: ParameterVector,
        curved: Curved,
        expansion: Expansion,
        family: int,
        rows: np.ndarray,
        width: int,
        kernel_graph: CompactGraph | WholeGraph | None,
        prior_graph: KernelGraph | None,
        functions: Kernel | None = None,
    ) -> None:
        self.parameters, self.curved, self.expansion = parameters, curved, expansion
        self.family, self.rows, self.width = family, rows, width
        self.kernel_graph, self.prior_graph = kernel_graph, prior_graph
        self.kernel: Any = None
        self.prior: Any = None
        self._kept: list[Any] = []
        self.compile(functions)

    def compile(self, functions: Kernel | None = None) -> None:
        """Make the compiled functions, unless they are given: they do not leave a process."""
        if self.kernel_graph is not None:
            functions = functions or self.kernel_graph.compiled()
            self.kernel = functions.arguments
            self._kept.append(functions)
        if self.prior_graph is not None:
            prior = callable_prior(self.prior_graph)
            self.prior = prior.address
            self._kept.append(prior)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kernel": None, "prior": None, "_kept": []}

    @property
    def n(self) -> int:
        """Number of records."""
        return len(self.rows)

    def sample(self, index: np.ndarray) -> Sample:
        """Some records, as estimates read them."""
        return drawn(self.rows, self.width, index)

    def differences(self, theta: np.ndarray, index: np.ndarray) -> np.ndarray:
        """d_k = l_k - q_k of some records."""
        d, gradient = np.empty(len(index)), np.empty(len(theta))
        at = Sampled(self.family, self.expansion, 1.0, 0.0, 1)
        estimate(self.kernel, at, self.sample(index), theta, d, gradient)
        return d

    def log_density(self, at: Sampled, sample: Sample, theta: np.ndarray) -> float:
        """Log-posterior as a sample estimates it, up to a constant."""
        d, gradient = np.empty(len(sample[0])), np.empty(len(theta))
        return float(density(self.kernel, self.prior, at, sample, theta, d, gradient))

    def total(self, theta: np.ndarray) -> float:
        """Log-posterior of all records, up to a constant, by the functions that chains call."""
        at = Sampled(self.family, self.expansion, 1.0, 0.0, MEAN)
        index = np.arange(self.n)
        value = self.log_density(at, self.sample(index[:0]), theta)
        for first in range(0, self.n, _RECORDS):
            value += float(self.differences(theta, index[first : first + _RECORDS]).sum())
        return value

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
        index = np.sort(rng.choice(n, min(n, _RECORDS), replace=False))
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
    RuntimeError
        If what was derived is not the density of the model.
    """
    records = read(model, sampler)
    [group] = records.groups
    data = group.store.read()
    parameters, prior = records.parameters, PriorTerm(records)
    source = _source(group.graph, parameters, data, order, general)
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
    family = -1
    graph: CompactGraph | WholeGraph | None = None
    if isinstance(source, LinearRows):
        family = source.family
        rows, width = source.remainders(centre, order)
    elif isinstance(source, FewNumbers):
        source.expand(centre)
        graph, rows, width = source.graph, source.rows, source.width
    else:
        graph, rows, width = source.remainders(centre, order, estimator)
    kernel = source.kernel if isinstance(source, FewNumbers) else None
    variates = Variates(
        parameters, curved, expansion, family, rows, width, graph, prior_graph, kernel
    )
    places = [centre, variates.typical(rng), variates.typical(rng)]
    refuse_another_density(model, parameters, variates.total, places)
    return variates


def _source(
    graph: RowGraph,
    parameters: ParameterVector,
    data: Sequence[np.ndarray],
    order: int,
    general: bool,
) -> LinearRows | FewNumbers | GeneralRows:
    """The records, in the form that is fastest."""
    linear = None if general else linear_rows(graph, parameters, data)
    return (
        linear
        or few_numbers(graph, parameters, data, order)
        or GeneralRows(graph, parameters, data)
    )


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
