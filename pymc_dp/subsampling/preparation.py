"""What samplers that see samples of records compute once from all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pymc.model import Model

from pymc_dp.records.graph import ParameterVector, RowGraph
from pymc_dp.subsampling.compiling import Kernel, KernelGraph, callable_prior
from pymc_dp.subsampling.estimates import Sampled, density, estimate
from pymc_dp.subsampling.expansion import Expansion, expand
from pymc_dp.subsampling.few import CompactGraph, FewNumbers, few_numbers
from pymc_dp.subsampling.gather import Sample, drawn
from pymc_dp.subsampling.general import GeneralRows, WholeGraph
from pymc_dp.subsampling.guard import refuse_another_density
from pymc_dp.subsampling.linear import LinearRows, linear_rows
from pymc_dp.subsampling.mode import Curved, Posterior, find_mode
from pymc_dp.subsampling.prior import PriorTerm
from pymc_dp.subsampling.reading import read
from pymc_dp.subsampling.weights import MEAN

#: Records that are evaluated at once.
_RECORDS = 20_000
#: Of the pilot: places at which all records are looked at; then the records that are looked at
#: further, the worst and others, and at how many places.
_POINTS, _WORST, _OTHERS, _PLACES = 8, 2_000, 5_000, 100


class Variates:
    """Control variates of all records, ready for compiled loops.

    `curved` is the log-posterior about the centre. `expansion` is the sum of the control variates;
    with the prior, if that is quadratic. `family` is that of the linear predictor; -1 without one.
    `rows` (n, k) is what an estimate reads of every record: first the design, `width` numbers.
    Trajectories call `kernel_graph` and `prior_graph`; these are None where loops of our own, or
    the expansion, do.
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

    def all_differences(self, theta: np.ndarray) -> np.ndarray:
        """(n,) d_k of all records."""
        index = np.arange(self.n)
        parts = [index[first : first + _RECORDS] for first in range(0, self.n, _RECORDS)]
        return np.concatenate([self.differences(theta, part) for part in parts])

    def log_density(self, at: Sampled, sample: Sample, theta: np.ndarray) -> float:
        """Log-posterior as a sample estimates it, up to a constant."""
        d, gradient = np.empty(len(sample[0])), np.empty(len(theta))
        return float(density(self.kernel, self.prior, at, sample, theta, d, gradient))

    def total(self, theta: np.ndarray) -> float:
        """Log-posterior of all records, up to a constant, by the functions that chains call."""
        at = Sampled(self.family, self.expansion, 1.0, 0.0, MEAN)
        nobody = self.sample(np.arange(0))
        return self.log_density(at, nobody, theta) + float(self.all_differences(theta).sum())

    def typical(self, rng: np.random.Generator) -> np.ndarray:
        """(d,) draw from the normal approximation of the posterior."""
        return self.curved.mode + self.curved.root @ rng.standard_normal(len(self.curved.theta))


class Pilot:
    """How far the control variates are off, where the posterior is.

    - variance: n^2 times the variance of d_k: the estimate from m records has this over m.
    - total: sum of d_k over all records.
    - largest: n times the largest distance of d_k from its mean, at all but a tenth of the places.
    - third: n^3 times the third central moment of d_k, root mean square over the places.

    All records are looked at, at a few places: some of a small group can be all that the expansion
    misses. Those for which it is farthest off, and a sample of the others, are then looked at in
    many places, since third moments grow as the ninth power of the distance from the centre.
    """

    def __init__(self, variates: Variates, rng: np.random.Generator) -> None:
        n = variates.n
        farthest = np.zeros(n)
        for _ in range(_POINTS):
            found = np.abs(variates.all_differences(variates.typical(rng)))
            np.maximum(farthest, found, out=farthest)  # what is not a number stays, and sorts last
        order = np.argsort(farthest, kind="stable")
        others, worst = order[: max(0, n - _WORST)], order[max(0, n - _WORST) :]
        some = rng.choice(others, min(len(others), _OTHERS), replace=False)
        index = np.concatenate([worst, some])
        weights = np.repeat([1.0, len(others) / max(1, len(some))], [len(worst), len(some)]) / n
        moments = np.empty((_PLACES, 4))
        for found in moments:
            d = n * variates.differences(variates.typical(rng), index)
            with np.errstate(all="ignore"):  # impossible places
                mean = weights @ d
                away = d - mean
                found[:] = mean, weights @ away**2, np.abs(away).max(), weights @ away**3
        self.total, self.variance = map(float, moments[:, :2].mean(axis=0))
        self.largest = float(np.quantile(moments[:, 2], 0.9))
        self.third = float(np.sqrt((moments[:, 3] ** 2).mean()))

    def bias(self, size: int) -> float:
        """Error of the log-density that samples of `size` perturb, where the posterior is.

        The correction by half the variance leaves a third of the third cumulant of the estimate,
        with the opposite sign.
        """
        return self.third / (3.0 * float(size) ** 2)


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

    `sampler` is a name for messages, and `estimator` one of "perturbed", "signed" and "mean".
    `reference` holds values of the free variables, in their own spaces, to expand about; default:
    the mode. If `general`, no loops of our own for linear predictors are used.

    Raises RuntimeError if what was derived is not the density of the model.
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
    start, shapes = {}, model.eval_rv_shapes()
    for rv in model.free_RVs:
        value, shape = np.asarray(reference[rv.name]), tuple(map(int, shapes[rv.name]))
        if value.dtype.kind not in "fiub" or value.shape != shape:
            raise ValueError(
                f"reference[{rv.name!r}] must be numbers of shape {shape}, not {value.dtype} of "
                f"shape {value.shape}."
            )
        start[rv] = value
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
