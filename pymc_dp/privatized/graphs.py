"""Compiled functions of a model's records and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytensor
from pymc.model import Model
from pymc.pytensorf import collect_default_updates, reseed_rngs
from pytensor.compile.mode import get_mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.random.type import RandomType

from pymc_dp.rows.functions import INTERPRETED

__all__ = ["Function", "density_of_total", "forward", "placed"]


class Function:
    """A compiled function with random streams of its own.

    PyMC's random variables share their generators with every function compiled from the model; a
    copy of a function in another process would repeat their draws.  The generators are replaced
    here, and renewed for each chain with :meth:`reseed`.

    Parameters
    ----------
    inputs, outputs : sequence of Variable
    compiled : bool, default True
        False for a function that is called too rarely to be worth it.
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
    # Impossible parameters of one record must not make all records impossible: they give NaN
    # there, which is rejected. Without fastmath, which may leave tests for NaN out.
    mode = get_mode(mode).including("random_make_inplace", "local_remove_check_parameter")
    with pytensor.config.change_flags(numba__fastmath=False):
        function = pytensor.function(
            list(inputs), list(outputs), updates=updates, mode=mode, on_unused_input="ignore"
        )
    function.trust_input = True
    return function


def placed(rv: Variable, given: Mapping[Variable, Variable]) -> Variable:
    """The random variable with the variables behind it, but not itself, replaced."""
    others = {key: value for key, value in given.items() if key is not rv}
    return clone_replace([rv], others, rebuild_strict=False)[0]


def forward(model: Model, rv: Variable, x: Variable, here: Variable) -> Variable:
    """The value variable of records `x`; bounds of a transform are those of `here`."""
    transform = model.rvs_to_transforms[rv]
    value = x if transform is None else transform.forward(x, *here.owner.inputs)
    return value.astype(model.rvs_to_values[rv].type.dtype)
