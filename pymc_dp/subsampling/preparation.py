"""What samplers that see samples of records compute once from all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import pymc as pm
from pymc.model import Model
from scipy.linalg import eigh
from scipy.optimize import minimize

from pymc_dp.base.compat import working
from pymc_dp.records.graph import ParameterVector
from pymc_dp.subsampling.estimates import (
    MEAN,
    Expansion,
    KernelGraph,
    Sample,
    Sampled,
    callable_kernel,
    callable_prior,
    density,
    drawn,
    estimate,
    expand,
)
from pymc_dp.subsampling.general import GeneralRows
from pymc_dp.subsampling.linear import LinearRows, linear_rows
from pymc_dp.subsampling.reading import (
    Data,
    PriorTerm,
    read,
    refuse_another_density,
    refuse_budget,
    refuse_partial,
)

_RECORDS = 20_000  # records that are evaluated at once
#: Of the pilot: places for all records; then the worst records, others, and places for these.
_POINTS, _WORST, _OTHERS, _PLACES = 8, 2_000, 5_000, 100


Source = LinearRows | GeneralRows


class Variates:
    """Control variates of all records, ready for compiled loops.

    `curved` is the log-posterior about the centre, `expansion` the sum of the control variates,
    with the prior if that is quadratic; `family` is that of the linear predictor, or -1. `rows`
    (n, k) is what an estimate reads of every record, first the design of `width` numbers.
    `kernel_graph`, with `tables`, and `prior_graph` are None where loops of our own, or the
    expansion, replace them.
    """

    def __init__(
        self,
        parameters: ParameterVector,
        curved: Curved,
        expansion: Expansion,
        family: int,
        rows: np.ndarray,
        width: int,
        kernel_graph: KernelGraph | None,
        tables: np.ndarray,
        prior_graph: KernelGraph | None,
        data: Data,
    ) -> None:
        self.parameters, self.curved, self.expansion = parameters, curved, expansion
        self.family, self.rows, self.width = family, rows, width
        self.kernel_graph, self.tables, self.prior_graph = kernel_graph, tables, prior_graph
        self.data = data
        self.compile()

    def compile(self) -> None:
        """Make the compiled functions, which do not leave a process."""
        self.kernel: Any = None
        self.prior: Any = None
        self._functions: list[Any] = []  # their addresses are good for as long as they live
        if self.kernel_graph is not None:
            self._functions.append(callable_kernel(self.kernel_graph))
            self.kernel = self._functions[-1].address, self.tables
        if self.prior_graph is not None:
            self._functions.append(callable_prior(self.prior_graph))
            self.prior = self._functions[-1].address

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kernel": None, "prior": None, "_functions": []}

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

    All records are looked at in a few places, since the expansion may miss only some of a small
    group; the worst and a sample of the others in many: third moments grow as distance^9.
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

        The correction by half the variance leaves minus a third of the estimate's third cumulant.
        """
        return self.third / (3.0 * float(size) ** 2)


_FIRST, _PER_PARAMETER = 5000, 50  # records at the start of the search: least, per parameter
_NEAR = 0.03  # Newton decrement, in posterior standard deviations, that counts as the mode
_LONGEST = 100  # Newton steps, at most


class Posterior:
    """The log-posterior, on all records or extrapolated from some."""

    def __init__(self, source: Source, prior: PriorTerm, rows: np.ndarray | None = None) -> None:
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

    `hessian` (d, d) is that of the log-likelihood. `covariance` is the inverse of minus the Hessian
    of the log-posterior, with absolute curvatures where that is not concave; `root` and
    `inverse_root` are a square root of it, and the inverse of that.
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
    source: Source, prior: PriorTerm, start: np.ndarray, rng: np.random.Generator
) -> Curved:
    """The posterior mode, and the curvature there.

    Newton's method on some records, which `rng` chooses; then a quasi-Newton method on all, in
    coordinates in which the posterior of the few has unit covariance; then Newton's method, of
    which one step is the rule.
    """
    size, everything = max(_FIRST, _PER_PARAMETER * source.d), Posterior(source, prior)
    if size >= source.n:
        return _newton(everything, start, _NEAR)
    few = Posterior(source, prior, rng.choice(source.n, size, replace=False))
    found = _newton(few, start, 0.1)

    def negative(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = everything.total(found.theta + found.root @ z)
        return -value, -(found.root.T @ gradient)

    options = {"gtol": 0.1 * _NEAR, "ftol": 1e-14, "maxiter": 200}
    best = minimize(negative, np.zeros(source.d), jac=True, method="L-BFGS-B", options=options)
    return _newton(everything, found.theta + found.root @ best.x, _NEAR)


def _newton(posterior: Posterior, theta: np.ndarray, near: float) -> Curved:
    """Newton's method with step halving, until the next step would be shorter than `near`."""
    at = posterior.curved(theta)
    for _ in range(_LONGEST):
        if at.distance < near and at.concave:
            break
        way, factor = at.mode - at.theta, 1.0
        while not posterior.total(at.theta + factor * way)[0] > at.value:
            factor /= 2.0
            if factor < 1e-8:  # rounding hides any further gain
                return at
        at = posterior.curved(at.theta + factor * way)
    return at


def prepare(
    model: Model | None,
    sampler: str,
    *,
    vars: Any = None,
    order: int,
    blocked: bool = True,
    estimator: str,
    reference: Mapping[str, Any] | None = None,
    progressbar: bool = False,
    general: bool = False,
) -> Variates:
    """Read a model, find its mode, and expand the records about it.

    `estimator` is one of "perturbed", "signed" and "mean". `reference` holds values of the free
    variables, in their own spaces, to expand about in place of the mode. `general` uses no special
    loops for linear predictors. RuntimeError if what was derived is not the density of the model.
    """
    model = pm.modelcontext(model)
    refuse_budget(model, sampler)
    refuse_partial(vars, model, sampler)
    if not (isinstance(order, Integral) and not isinstance(order, bool) and order in (0, 1, 2)):
        raise ValueError(f"order must be 0, 1 or 2, not {order!r}.")
    if not blocked:
        raise ValueError(f"{sampler} moves all variables together; leave `blocked` at True.")
    rng = np.random.default_rng(0)  # the same, whatever the seed of the chains
    records = read(model, sampler)
    [group] = records.groups
    data = group.store.read()
    parameters, prior = records.parameters, PriorTerm(records)
    source: Source | None = None if general else linear_rows(group.graph, parameters, data)
    source = source or GeneralRows(group.graph, parameters, data)
    if reference is None:
        with working("Posterior mode", progressbar), np.errstate(all="ignore"):
            curved = find_mode(source, prior, records.initial, rng)
    else:
        curved = Posterior(source, prior).curved(_at(model, parameters, reference))
    centre = curved.theta
    value, gradient = source.total(centre)
    expansion = expand(centre, value, gradient, curved.hessian, order)
    prior_graph: KernelGraph | None = prior.graph
    if prior.is_quadratic:
        expansion = expansion.plus(*prior.total(centre), prior.hessian(centre))
        prior_graph = None
    family, graph, tables = -1, None, np.zeros((0, 0))
    if isinstance(source, LinearRows):
        family = source.family
        rows, width = source.remainders(centre, order)
    else:
        graph, tables, rows, width = source.remainders(centre, order, estimator)
    variates = Variates(
        parameters,
        curved,
        expansion,
        family,
        rows,
        width,
        graph,
        tables,
        prior_graph,
        Data(model),
    )
    places = [centre, variates.typical(rng), variates.typical(rng)]
    refuse_another_density(model, parameters, variates.total, places)
    return variates


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
