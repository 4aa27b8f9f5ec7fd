"""A model as a prior and one log-likelihood term per record, for samplers that are not private."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
from pymc.logprob.utils import ParameterValueError
from pymc.model import Model
from pymc.util import get_value_vars_from_user_vars
from pytensor import scalar
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, Join, MakeVector
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor

from pymc_dp.base.compat import AdvancedSubtensor1, SolveTriangular
from pymc_dp.base.matrices import minus_hessian
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.budget import get_budget, has_lost_budget
from pymc_dp.errors import NotFactorizable, UnsafeModel
from pymc_dp.records.ancestry import array_of, is_data
from pymc_dp.records.arithmetic import without_errors
from pymc_dp.records.extraction import Records, extract
from pymc_dp.records.graph import ParameterVector, RowGraph
from pymc_dp.records.units import row_counts
from pymc_dp.rows.functions import compile_function

_CHECKED = 20_000  # records up to which the structural proof is also checked numerically


def refuse_budget(model: Model, sampler: str) -> None:
    """Refuse a model that was given a privacy budget, or a copy of one."""
    if get_budget(model) is not None or has_lost_budget(model):
        raise UnsafeModel(
            f"{sampler} is not private, and this model has a PrivacyBudget. Use a private step, "
            "pm.sample(step=dp.DPLangevin(...)) for example, or build the model without a budget."
        )


def refuse_partial(vars: Any, model: Model, sampler: str) -> None:
    """Refuse discrete variables, and a part of the variables: all must move together."""
    discrete = [rv.name for rv in model.free_RVs if not rv.type.dtype.startswith("float")]
    if discrete:
        raise ValueError(
            f"{sampler} moves continuous variables, and {discrete} are discrete. Sum them out "
            "(pm.Mixture, pm.ZeroInflatedPoisson, ...)."
        )
    if vars is not None:
        chosen = set(get_value_vars_from_user_vars(vars, model))
        values = [model.rvs_to_values[rv] for rv in model.free_RVs]
        left = [value.name for value in values if value not in chosen]
        if left:
            raise ValueError(
                f"{sampler} moves all variables together, but `vars` leaves out {left}. Leave "
                "`vars` out."
            )


class Data:
    """The shared arrays that a step has read, to see whether they are still the same."""

    def __init__(self, model: Model) -> None:
        used = ancestors([*model.basic_RVs, *model.rvs_to_values.values(), *model.potentials])
        shared = {*filter(is_data, used), *model.data_vars}
        self._held = [(v, array_of(v)) for v in shared]

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": []}  # a copy in another process runs what was checked here

    def refuse_changed(self) -> None:
        """Raise a ValueError if one was set to something else."""
        for v, before in self._held:
            now = array_of(v)
            if now is not before and not np.array_equal(now, before):
                name = f"`{v.name}`" if v.name else "A shared variable of the model"
                raise ValueError(
                    f"{name} was changed after the step was made, which has read it already. "
                    "Make the step again."
                )


def read(model: Model, sampler: str) -> Records:
    """Prior and per-record terms of a model, with one group of rows; `sampler` is for messages.

    NotFactorizable if the log-likelihood cannot be shown to be a sum of one term per record,
    UnsafeModel if the data are not finite.
    """
    try:
        rows = row_counts(model, ())
    except NotFactorizable as error:
        raise NotFactorizable(error.nonprivate) from error
    if not rows:
        raise NotFactorizable(
            f"{sampler} samples records, and the model has no observed variable. Use NUTS."
        )
    if len(set(rows.values())) > 1:
        lengths = ", ".join(f"`{name}`: {n}" for name, n in rows.items())
        raise NotFactorizable(
            f"{sampler} samples records, and the observed variables differ in length ({lengths}). "
            "Give them one row per record each, or use NUTS."
        )
    [n] = set(rows.values())
    # data without an axis of records, centres of groups for example, may reach every record
    shared = [v.name for v in model.data_vars if n not in np.shape(array_of(v))]
    try:
        return extract(model, public=shared, check=n <= _CHECKED)
    except NotFactorizable as error:
        raise NotFactorizable(
            f"{sampler} estimates the log-likelihood from a sample of records, so it has to be a "
            f"sum of one term per record. {error.nonprivate} NUTS samples models that are "
            "none."
        ) from error
    except UnsafeModel as error:
        raise UnsafeModel(error.nonprivate) from error


# -- the prior -------------------------------------------------------------------------------------


class PriorTerm:
    """Log-density of the prior with the Jacobian of the transforms, and its derivatives.

    `graph` gives the (1,) log-density and its (d,) gradient from theta. `is_quadratic`: the graph
    shows that the log-density is a quadratic function of theta, as for normal priors.
    """

    def __init__(self, records: Records) -> None:
        theta = records.parameters.theta
        [logp] = records.parameters.substitute([records.public_logp])
        gradient = pytensor.grad(logp, theta, disconnected_inputs="ignore")
        self.graph = ([theta], [logp.reshape((1,)), gradient])
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


# Second derivatives are no test: PyTensor 2.38 never finishes simplifying those of a simplex.

#: Entries of the first input, moved about.
_VIEWS: tuple[type, ...] = (
    AdvancedSubtensor,
    Alloc,
    CheckAndRaise,
    DimShuffle,
    Reshape,
    SpecifyShape,
    Subtensor,
    *((AdvancedSubtensor1,) if AdvancedSubtensor1 is not None else ()),
)


def degree_of(value: Variable, theta: Variable) -> float:
    """A bound of the degree of `value` as a polynomial in `theta`; infinite if none is seen."""
    degrees: dict[Variable, float] = {theta: 1.0}
    for node in toposort([value]):
        inputs = [degrees.get(x, 0.0) for x in node.inputs]
        degree = _degree(node, inputs) if any(inputs) else 0.0
        degrees.update(dict.fromkeys(node.outputs, degree))
    return degrees.get(value, 0.0)


def _degree(node: Apply, inputs: list[float]) -> float:
    """The degree of the outputs of a node, from those of its inputs; not all are 0."""
    op = node.op
    if isinstance(op, Shape | Shape_i):  # a choice of entries changes the shape
        return 0.0 if math.isfinite(max(inputs)) else math.inf
    if isinstance(op, Elemwise):
        return _of_scalars(op.scalar_op, node, inputs)
    if isinstance(op, CAReduce):
        return inputs[0] if isinstance(op.scalar_op, scalar.Add) else math.inf
    if isinstance(op, Dot):
        return sum(inputs)
    if isinstance(op, Join | MakeVector):
        return max(inputs)
    if isinstance(op, _VIEWS):
        return inputs[0] if not any(inputs[1:]) else math.inf
    core = op.core_op if isinstance(op, Blockwise) else op
    if isinstance(core, SolveTriangular):
        return inputs[1] if not inputs[0] else math.inf
    if isinstance(core, Dot):
        return sum(inputs)
    return math.inf


def _of_scalars(op: scalar.ScalarOp, node: Apply, inputs: list[float]) -> float:
    """The same for an elementwise operation."""
    if isinstance(op, scalar.Add | scalar.Sub | scalar.Neg | scalar.Identity):
        return max(inputs)
    if isinstance(op, scalar.Cast):
        return inputs[0] if str(node.outputs[0].type.dtype) == "float64" else math.inf
    if isinstance(op, scalar.Mul):
        return sum(inputs)
    if isinstance(op, scalar.Sqr):
        return 2.0 * inputs[0]
    if isinstance(op, scalar.TrueDiv):
        return inputs[0] if not inputs[1] else math.inf
    if isinstance(op, scalar.Second):
        return inputs[1] if math.isfinite(inputs[0]) else math.inf
    if isinstance(op, scalar.Switch):
        return max(inputs[1:]) if not inputs[0] else math.inf
    if isinstance(op, scalar.Pow):
        return inputs[0] * _power(node.inputs[1]) if not inputs[1] else math.inf
    return math.inf


def _power(exponent: Variable) -> float:
    """A constant whole exponent, from 1 on; infinity for any other."""
    while exponent.owner is not None and isinstance(exponent.owner.op, DimShuffle):
        [exponent] = exponent.owner.inputs
    if isinstance(exponent, Constant) and np.size(exponent.data) == 1:
        power = float(np.asarray(exponent.data).item())
        if power >= 1 and power.is_integer():
            return power
    return math.inf


# -- data and density --------------------------------------------------------------------------


def columns_of(graph: RowGraph, data: Sequence[np.ndarray]) -> dict[Variable, np.ndarray]:
    """Designs (n, p), labels (n,) of cuts with a row expression; `data` as ``graph.leaves``."""
    blocks = [leaf.block for leaf in graph.leaves]
    found: dict[Variable, np.ndarray] = {}
    for cut in graph.cuts:
        if cut.row_data is None or cut.row_data in found:
            continue
        [expression] = without_errors([cut.row_data], interpreted=True)
        evaluate = pytensor.function(blocks, expression, mode=INTERPRETED, on_unused_input="ignore")
        column = np.asarray(evaluate(*data))
        found[cut.row_data] = np.ascontiguousarray(
            column.astype("float64") if cut.kind == "dot" else column
        )
    return found


_TOLERANCE, _ROUNDING = 1e-6, 1e-9  # rounding of a difference, and of the log-density


def refuse_another_density(
    model: Model,
    parameters: ParameterVector,
    total: Callable[[np.ndarray], float],
    points: Sequence[np.ndarray],
) -> None:
    """Compare the log-posterior of all records with PyMC's own, at some points.

    `total` gives it at a (d,) point, up to a constant. UnsafeModel if the density of some records
    is not finite at the first point, which should be possible; RuntimeError if differences between
    the points are others than PyMC's.
    """
    names = [rv.name for rv in model.observed_RVs]
    by_record = model.logp(vars=model.observed_RVs, sum=False)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    prior = model.logp(vars=[*model.free_RVs, *model.potentials])
    function = pytensor.function(
        values, [prior, *by_record], mode=INTERPRETED, on_unused_input="ignore"
    )

    def evaluate(theta: np.ndarray) -> list[np.ndarray]:
        at = parameters.point(theta)
        try:
            with np.errstate(all="ignore"):
                return [np.asarray(x) for x in function(*[at[value.name] for value in values])]
        except ParameterValueError:
            return [np.array(-np.inf)]

    first = evaluate(points[0])
    for name, terms in zip(names, first[1:], strict=False):
        impossible = np.flatnonzero(~np.isfinite(terms.reshape(len(terms), -1)).all(axis=1))
        if len(impossible):
            raise UnsafeModel(
                f"{len(impossible)} records of `{name}` have no finite log-density at the "
                f"reference, record {impossible[0]} for example: values that the distribution "
                "cannot take, labels other than 0 and 1 for example, or a reference so far off "
                "that densities underflow. Check them."
            )
    expected = np.array([sum(float(x.sum()) for x in evaluate(p)) for p in points])
    with np.errstate(all="ignore"):
        found = np.array([total(p) for p in points])
    possible = np.isfinite(expected)
    change, of_model = (found - found[0])[possible], (expected - expected[0])[possible]
    slack = _TOLERANCE * (1.0 + np.abs(of_model)) + _ROUNDING * np.abs(expected[possible])
    same_support = np.array_equal(np.isfinite(found), possible)
    if not (same_support and np.all(np.abs(change - of_model) <= slack)):
        raise RuntimeError(
            "What was derived from the model is not its log-density, which is a defect of pymc_dp: "
            "please report the model. NUTS samples it."
        )
