"""Compiled functions of a model's records and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.logprob.utils import CheckParameterValue
from pymc.model import Model
from pymc.pytensorf import collect_default_updates, reseed_rngs
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import graph_inputs, toposort
from pytensor.scalar.basic import AND
from pytensor.tensor.basic import Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle
from pytensor.tensor.random.type import RandomType

from pymc_dp.base.linker import INTERPRETED, exact


class Function:
    """A compiled function with random streams of its own.

    PyMC's random variables share their generators with every function compiled from the model; a
    copy of a function in another process would repeat their draws. The generators are replaced
    here, and renewed for each chain with :meth:`reseed`. A function that is called too rarely to be
    worth it is not `compiled`.
    """

    def __init__(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], compiled: bool = True
    ) -> None:
        shared = [
            v
            for v in dict.fromkeys(graph_inputs(outputs))
            if isinstance(v, SharedVariable) and isinstance(v.type, RandomType)
        ]
        fresh = {v: pytensor.shared(np.random.default_rng()) for v in shared}
        outputs = clone_replace(list(outputs), fresh, rebuild_strict=False)
        updates = collect_default_updates(inputs=list(inputs), outputs=outputs)
        self._generators = list(fresh.values())
        self._call = _compiled(inputs, outputs, updates, "NUMBA" if compiled else INTERPRETED)

    def reseed(self, rng: np.random.Generator) -> None:
        """New streams, drawn from `rng`."""
        if self._generators:
            reseed_rngs(self._generators, int(rng.integers(2**62)))

    def __call__(self, *values: Any) -> list[np.ndarray]:
        """The outputs; arrays go in as they are, of the inputs' own types."""
        return self._call(*[np.asarray(v) for v in values])  # no NumPy scalars


def density_of_total(total: Variable, log_density: Variable) -> Callable[[np.ndarray], Any]:
    """The log-density of the releases as a function for compiled code."""
    return _compiled([total], [log_density], {}, "NUMBA").vm.jit_fn


def _compiled(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    updates: dict[Variable, Variable],
    mode: Any,
) -> Any:
    outputs = _checked(outputs)
    # without fastmath, which may leave tests for NaN out
    mode = exact(mode).including("random_make_inplace")
    function = pytensor.function(
        list(inputs), list(outputs), updates=updates, mode=mode, on_unused_input="ignore"
    )
    function.trust_input = True
    return function


def _checked(outputs: Sequence[Variable]) -> list[Variable]:
    """Log-densities that are -inf exactly where their parameters are impossible.

    PyMC's checks raise an error, or make all records impossible if one is. Without them, densities
    of impossible parameters may be finite. Each check is split into the conditions on single
    entries of which it is made.
    """
    found: dict[Variable, Variable] = {}
    for node in toposort(list(outputs)):
        inputs = [found.get(x, x) for x in node.inputs]
        if isinstance(node.op, CheckParameterValue):
            value, *conditions = inputs
            for condition in conditions:
                for entry in _entries(condition):
                    fits = entry.type.ndim <= value.type.ndim
                    switched = pt.switch(entry if fits else pt.all(entry), value, -np.inf)
                    value = switched.astype(node.outputs[0].type.dtype)
            found[node.outputs[0]] = value
        elif any(x is not y for x, y in zip(inputs, node.inputs, strict=True)):
            again = node.clone_with_new_inputs(inputs, strict=False)
            found.update(zip(node.outputs, again.outputs, strict=True))
    return [found.get(x, x) for x in outputs]


def _entries(condition: Variable) -> list[Variable]:
    """Conditions that must all hold."""
    node = condition.owner
    if node is None:
        return [condition]
    if isinstance(node.op, CAReduce) and isinstance(node.op.scalar_op, AND):
        return _entries(node.inputs[0])
    if isinstance(node.op, MakeVector):
        return [entry for x in node.inputs for entry in _entries(x)]
    if isinstance(node.op, Join):
        return [entry for x in node.inputs[1:] for entry in _entries(x)]
    scalar = isinstance(node.op, DimShuffle) and node.inputs[0].type.ndim == 0
    if scalar or isinstance(node.op, ScalarFromTensor | TensorFromScalar):
        return _entries(node.inputs[0])
    return [condition]


def placed(rv: Variable, given: Mapping[Variable, Variable]) -> Variable:
    """The random variable with the variables behind it, but not itself, replaced."""
    others = {key: value for key, value in given.items() if key is not rv}
    return clone_replace([rv], others, rebuild_strict=False)[0]


def forward(model: Model, rv: Variable, x: Variable, here: Variable) -> Variable:
    """The value variable of records `x`; bounds of a transform are those of `here`."""
    transform = model.rvs_to_transforms[rv]
    value = x if transform is None else transform.forward(x, *here.owner.inputs)
    return value.astype(model.rvs_to_values[rv].type.dtype)
