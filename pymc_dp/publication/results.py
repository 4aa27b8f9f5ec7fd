"""Results and what they are made of: draws as PyMC stores them, and as unconstrained vectors.

``pm.sample`` converts and checks its draws after the last iteration was paid for; an error then
would lose them. `PaidDraws` holds them from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytensor
import xarray as xr
from pymc.backends.ndarray import NDArray
from pymc.model import Model
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace

from pymc_dp.base import compat as _compat
from pymc_dp.records.ancestry import array_of
from pymc_dp.records.graph import ParameterVector

#: Dims of results; `pymc_dp.find_MAP` has one more.
_RESERVED = ("chain", "draw")
#: Rewrites to operations that NumPy has not, such as sums of three: they become loops over entries.
LOOPS = ("fusion", "add_mul_fusion", "local_add_canonizer", "local_mul_canonizer")
#: A few thousand calls take less time than a compilation, and nothing is written to a cache.
PYTHON = Mode(linker="py", optimizer="fast_run").excluding(*LOOPS)


def dims_of(model: Model, name: str, n: int) -> list[str]:
    """A name for each of the n axes of a variable."""
    given = model.named_vars_to_dims.get(name) or ()
    named = [*given, *[None] * n][:n]
    return [f"{name}_dim_{k}" if dim is None else str(dim) for k, dim in enumerate(named)]


def dataset(model: Model, values: Mapping[str, np.ndarray], public: Iterable[str]) -> xr.Dataset:
    """(chains, draws, ...) variables of a model with the dims they have there, and public
    coords.
    """
    columns = {
        name: (("chain", "draw", *dims_of(model, name, draws.ndim - 2)), draws)
        for name, draws in values.items()
    }
    used = {dim for dims, _ in columns.values() for dim in dims}
    coords = {
        name: list(model.coords[name])
        for name in used.intersection(public)
        if model.coords.get(name) is not None
    }
    return xr.Dataset(columns, coords=coords)


# -- before anything is spent ---------------------------------------------------------------------


def check_step(model: Model, data: bool, computed: Sequence[str] | None) -> None:
    """:func:`check_fits` of what is `computed` with a step, as far as the graph tells shapes.

    None: ``pm.sample`` computes all Deterministics, and makes groups of the `data`, if these count.
    """
    shapes = {
        rv.name: tuple(rv.type.shape)
        for rv in (*model.free_RVs, *model.deterministics)
        if computed is None or rv.name in computed
    }
    check_fits(model, shapes, data=data and computed is None)


def check_fits(
    model: Model,
    shapes: Mapping[str, Sequence[int | None]],
    *,
    data: bool = False,
    reserved: Sequence[str] = _RESERVED,
) -> None:
    """Refuse names and dims of which no result can be made, before anything is spent. `shapes` are
    those of one draw of each variable, None where a length is not known. `data`: look also at the
    data, of which PyMC makes groups. `reserved` are further dims of the result.
    """
    dims = {name: dims_of(model, name, len(shape)) for name, shape in shapes.items()}
    used = {dim for names in dims.values() for dim in names}
    for name in reserved:
        if name in shapes or name in used:
            raise ValueError(
                f"'{name}' is a name that results use for themselves. Nothing has been spent. "
                f"Give the variable, or the dim, another name than '{name}'."
            )
    for name in sorted(used.intersection(shapes)):
        raise ValueError(
            f"`{name}` is the name of a variable and of a dim, and a result cannot hold both. "
            "Nothing has been spent. Rename one of them."
        )
    for dim in sorted(used.intersection(model.coords)):
        if any(np.ndim(label) for label in model.coords[dim] or ()):
            raise ValueError(
                f"The coords of dim '{dim}' are not all numbers or strings, and label no result. "
                "Nothing has been spent. Give each entry one label, such as 'a, 1'."
            )
    first: dict[str, tuple[str, int]] = {}
    for name, shape in shapes.items():
        for dim, length in zip(dims[name], shape, strict=True):
            if length is None:
                continue
            coords = model.coords.get(dim)
            if coords is not None and len(coords) != length:
                raise ValueError(
                    f"`{name}` has {length} entries along dim '{dim}', which has {len(coords)} "
                    "coords. Nothing has been spent. Give the variable the shape of its dims, or "
                    "other dims."
                )
            other, before = first.setdefault(dim, (name, length))
            if before != length:
                raise ValueError(
                    f"`{name}` has {length} entries along dim '{dim}', and `{other}` {before}. "
                    "Nothing has been spent. Give them dims of their own."
                )
    for name, named in model.named_vars_to_dims.items() if data else ():
        variable = model.rvs_to_values.get(model[name], model[name])
        if not isinstance(variable, Constant | SharedVariable):
            continue
        for dim, length in zip(named, np.shape(array_of(variable)), strict=False):
            coords = model.coords.get(dim)
            if coords is not None and len(coords) != length:
                raise ValueError(
                    f"The data of `{name}` do not have one entry for each of the coords of dim "
                    f"'{dim}'. Nothing has been spent. Give them other dims, or the dim as many "
                    "coords."
                )


# -- while it is spent ----------------------------------------------------------------------------


def largest_rectangle(lengths: Sequence[int]) -> tuple[np.ndarray, int]:
    """Which chains to keep, and how much of each, to have the most draws in equal chains."""
    n = np.asarray(lengths)
    best = max(range(len(n)), key=lambda c: n[c] * (n >= n[c]).sum())
    return np.flatnonzero(n >= n[best]), int(n[best])


class PaidDraws(NDArray):
    """A ``trace`` for ``pm.sample`` that has the draws of all chains, however that ends. `names`
    are free variables and Deterministics to keep, without the first `tune` iterations.
    """

    def __init__(self, model: Model, names: Sequence[str], tune: int) -> None:
        super().__init__(
            model=model, vars=model.replace_rvs_by_values([model[name] for name in names])
        )
        self.tune = tune
        self.chains: list[NDArray] = []

    def __copy__(self) -> NDArray:
        """What PyMC does for every chain."""
        chain = NDArray(
            model=self.model,
            vars=self.vars,
            fn=self.fn,
            var_shapes=self.var_shapes,
            var_dtypes=self.var_dtypes,
        )
        self.chains.append(chain)
        return chain

    @property
    def any(self) -> bool:
        """Whether a draw was made."""
        return any(len(chain) > self.tune for chain in self.chains)

    def result(self) -> Any:
        """Draws and statistics as ``pm.sample`` returns them, without data."""
        lengths = [max(len(chain) - self.tune, 0) for chain in self.chains]
        chosen, length = largest_rectangle(lengths)
        made = slice(self.tune, self.tune + length)
        chains = [self.chains[k] for k in chosen]

        def stacked(columns: Iterable[np.ndarray]) -> np.ndarray:
            return np.stack([column[made] for column in columns])

        values = {name: stacked(c.get_values(name) for c in chains) for name in self.varnames}
        [kinds] = chains[0].sampler_vars
        stats = {
            name: stacked(chain.get_sampler_stats(name, 0) for chain in chains)
            for name, kind in kinds.items()
            if np.dtype(kind).base.kind in "biuf"
        }
        numbers = {"chain": chosen, "draw": np.arange(length)}
        groups = {
            "posterior": dataset(self.model, values, self.model.coords).assign_coords(numbers),
            "sample_stats": dataset(self.model, stats, ()).assign_coords(numbers),
        }
        return _compat.inference_data(groups, {})


# -- the way to unconstrained parameters, and back ------------------------------------------------


def unconstrain(model: Model, parameters: ParameterVector, draws: Mapping[Any, Any]) -> np.ndarray:
    """(chains, draws, d) unconstrained parameters of (chains, draws, ...) free variables, by name.
    A parameter is infinite where a draw was rounded to the boundary of its support.
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
    function = pytensor.function(inputs, outputs, mode=PYTHON, on_unused_input="ignore")
    columns = [np.asarray(draws[rv.name], dtype=rv.type.dtype) for rv in model.free_RVs]
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
    """(chains, draws, ...) values of `names` at (chains, draws, d) unconstrained parameters. They
    are functions of these and of public data alone.
    """
    outputs = model.replace_rvs_by_values([model[name] for name in names])
    outputs = parameters.substitute(outputs)
    function = pytensor.function([parameters.theta], outputs, mode=PYTHON, on_unused_input="ignore")
    shape = theta.shape[:2]
    draws = [function(theta[where]) for where in np.ndindex(shape)]
    return {
        name: np.stack(found).reshape((*shape, *np.shape(found[0])))
        for name, found in zip(names, zip(*draws, strict=True), strict=True)
    }
