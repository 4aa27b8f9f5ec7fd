"""Draws as PyMC stores them, and as vectors of unconstrained parameters: the way there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytensor
import xarray as xr
from pymc.model import Model
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace

from pymc_dp.records.graph import ParameterVector

#: A few thousand calls take less time than a compilation, and nothing is written to a cache.
_MODE = Mode(linker="py", optimizer="fast_run")


def _function(inputs: Sequence[Variable], outputs: list[Variable]) -> Callable[..., list]:
    return pytensor.function(inputs, outputs, mode=_MODE, on_unused_input="ignore")


def unconstrain(model: Model, parameters: ParameterVector, posterior: xr.Dataset) -> np.ndarray:
    """(chains, draws, d) unconstrained parameters of draws of all free variables.

    `posterior` holds every free variable, with dims chain and draw first. A parameter is infinite
    where a draw was rounded to the boundary of its support.
    """
    forward = []
    for rv in model.free_RVs:
        transform = model.rvs_to_transforms[rv]
        forward.append(rv if transform is None else transform.forward(rv, *rv.owner.inputs))
    inputs = [rv.type(name=rv.name) for rv in model.free_RVs]
    # the bounds of a transform may be other variables
    outputs = clone_replace(
        forward, dict(zip(model.free_RVs, inputs, strict=True)), rebuild_strict=False
    )
    function = _function(inputs, outputs)
    columns = [np.asarray(posterior[rv.name].values, dtype=rv.type.dtype) for rv in model.free_RVs]
    shape = columns[0].shape[:2]
    theta = np.empty((*shape, parameters.size))
    with np.errstate(all="ignore"):
        for where in np.ndindex(shape):
            values = function(*[column[where] for column in columns])
            for part, value in zip(parameters.slices, values, strict=True):
                theta[(*where, part)] = np.ravel(value)
    return theta


def constrain(
    model: Model, parameters: ParameterVector, theta: np.ndarray, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """(chains, draws, ...) free variables and Deterministics at (chains, draws, d) parameters.

    `names` are functions of unconstrained parameters and public data alone.
    """
    outputs = model.replace_rvs_by_values([model[name] for name in names])
    function = _function([parameters.theta], parameters.substitute(outputs))
    shape = theta.shape[:2]
    draws = [function(theta[where]) for where in np.ndindex(shape)]
    return {
        name: np.stack(found).reshape((*shape, *np.shape(found[0])))
        for name, found in zip(names, zip(*draws, strict=True), strict=True)
    }
