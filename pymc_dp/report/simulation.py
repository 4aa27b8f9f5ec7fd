"""Records simulated from the prior predictive distribution, without reading a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from pymc.distributions.shape_utils import change_dist_size
from pymc.model import Model
from pymc.pytensorf import compile as compile_random
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.tensor.type import TensorType

from pymc_dp.errors import UnsafeModel
from pymc_dp.records.ancestry import (
    ancestors_without_shapes,
    array_of,
    data_behind,
    is_data,
    is_long_constant,
)
from pymc_dp.records.bounds import Interval, clamp, source_limits
from pymc_dp.records.extraction import Records
from pymc_dp.records.graph import RowLeaf
from pymc_dp.records.units import private_observed, public_inputs

#: Records for each draw of the parameters.
ROWS = 100
#: A few hundred calls take less time than a compilation.
MODE = Mode(linker="py", optimizer="fast_run")


def draw_prior(model: Model, draws: int, rng: np.random.Generator) -> xr.Dataset:
    """Draws of the free variables, as one chain."""
    seed = int(rng.integers(2**31))
    try:
        values = pm.draw(model.free_RVs, draws=draws, random_seed=seed, mode=MODE)
    except NotImplementedError:
        raise ValueError(
            "The prior is improper (pm.Flat, ...), so there is no prior predictive distribution. "
            "Give every parameter a proper prior."
        ) from None
    return xr.Dataset(
        {
            rv.name: (("chain", "draw", *[f"{rv.name}_{k}" for k in range(rv.ndim)]), value[None])
            for rv, value in zip(model.free_RVs, values, strict=True)
        }
    )


# -- features -------------------------------------------------------------------------------------


class Features:
    """Simulated arrays in place of those of the model, records on the first axis."""

    def __init__(
        self, model: Model, records: Records, public: Sequence[str], given: dict[str, Any]
    ) -> None:
        self.limits = source_limits(model)
        self.leaves: dict[Variable, RowLeaf] = {}
        self.sizes: dict[Variable, int] = {}
        for group in records.groups:
            self.leaves.update({leaf.source: leaf for leaf in group.graph.leaves})
            blocks = {leaf.block: leaf.source for leaf in group.graph.leaves}
            self.sizes.update(
                {blocks[label]: size for label, size in group.graph.lookups if label in blocks}
            )
        values = (data_behind(model.rvs_to_values[rv]) for rv in private_observed(model, public))
        self.observed = {source for source in values if source is not None}
        named = public_inputs(model, public)
        examples = {source: array_of(source) for source in self.leaves if source in named}
        names = {source.name: source for source in self.leaves if is_data(source)}
        for name, array in given.items():
            if name not in names:
                raise ValueError(
                    f"data names {name!r}, which is no pm.Data with one row per record in a "
                    f"likelihood; those are {sorted(names)}."
                )
            examples[names[name]] = _example(name, array, names[name])
        self.examples = {
            source: np.moveaxis(np.asarray(array), self.leaves[source].axis, 0)
            for source, array in examples.items()
        }
        for source in self.leaves:
            self._check(source)

    def _row(self, source: Variable) -> tuple[int, ...]:
        shape = list(np.shape(array_of(source)))
        del shape[self.leaves[source].axis]
        return tuple(shape)

    def _check(self, source: Variable) -> None:
        known = source in self.examples or source in self.observed or source in self.sizes
        limits = self.limits.get(source)
        if known or (limits is not None and np.isfinite(limits).all()):
            return
        if not is_data(source):
            raise UnsafeModel(
                "An unnamed array in the likelihood may be private, so clip_advice does not read "
                "it. Pass features as pm.Data('X', ...), then clip_advice(data={'X': a public "
                "example}) or dp.bounds(X=(lower, upper))."
            )
        raise UnsafeModel(
            f"`{source.name}` is private, so clip_advice does not read it. Pass a public example, "
            f"data={{{source.name!r}: array}}, or declare finite bounds of it, "
            f"dp.bounds({source.name}=(lower, upper)), before the budget."
        )

    def draw(self, rng: np.random.Generator) -> dict[Variable, np.ndarray]:
        """`ROWS` rows of every array; zeros in those that are observed."""
        rows: dict[int, np.ndarray] = {}
        arrays = {}
        for source in self.leaves:
            shape, dtype = (ROWS, *self._row(source)), np.dtype(source.type.dtype)
            if source in self.examples:
                example = self.examples[source]
                at = rows.setdefault(len(example), rng.integers(0, len(example), ROWS))
                array = example[at].astype(dtype)
            elif source in self.observed:
                array = np.zeros(shape, dtype)
            elif source in self.limits and np.isfinite(self.limits[source]).all():
                array = _uniform(rng, self.limits[source], shape, dtype)
            else:
                array = rng.integers(0, self.sizes[source], shape).astype(dtype)
            arrays[source] = self.clamped(source, array)
        return arrays

    def clamped(self, source: Variable, array: np.ndarray) -> np.ndarray:
        """The array clamped to the bounds, as the data will be."""
        limits = self.limits.get(source)
        return np.ascontiguousarray(array if limits is None else clamp(array, limits))


def _example(name: str, given: Any, source: Variable) -> np.ndarray:
    array = np.asarray(given)
    columns = np.shape(array_of(source))[1:]
    fits = array.ndim >= 1 and len(array) > 0 and array.shape[1:] == columns
    if not fits or array.dtype.kind not in "iufb" or not np.isfinite(array).all():
        raise ValueError(
            f"data[{name!r}] must be finite numbers of shape (rows, {', '.join(map(str, columns))})"
            f"; got shape {array.shape} of type {array.dtype}."
        )
    return array


def _uniform(
    rng: np.random.Generator, limits: Interval, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    lower, upper = (np.broadcast_to(end, shape) for end in limits)
    if dtype.kind in "iu":
        return np.floor(rng.uniform(lower, upper + 1.0)).astype(dtype)
    return rng.uniform(lower, upper).astype(dtype)


# -- observed variables ---------------------------------------------------------------------------


def simulator(
    model: Model,
    rv: Variable,
    features: Features,
    public: Sequence[str],
    length: int,
    rng: np.random.Generator,
) -> Any:
    """A function that draws one observed variable, `ROWS` records of it.

    It takes the known variables by name and the arrays, and puts what it draws into both.
    Unnamed arrays with `length` entries or more may be private.
    """
    value = data_behind(model.rvs_to_values[rv])
    names = {}
    for other in (*model.free_RVs, *private_observed(model, public)):
        if other is not rv:
            names[other] = other.type(name=other.name)
        else:
            break
    arrays = {
        source: TensorType(source.type.dtype, (None,) * source.type.ndim)()
        for source in features.leaves
    }
    published = {
        other: model.rvs_to_values[other] for other in model.observed_RVs if other.name in public
    }
    # earlier observed variables have other lengths here than in the model
    inputs = {
        other: x if other in model.free_RVs else TensorType(x.type.dtype, (None,) * x.type.ndim)()
        for other, x in names.items()
    }
    [clone] = clone_replace([rv], {**published, **inputs, **arrays}, rebuild_strict=False)
    op = clone.owner.op
    batch = clone.type.ndim - getattr(op, "ndim_supp", 0)
    rows = np.shape(array_of(value))[1:batch] if value is not None else ()
    try:
        clone = change_dist_size(clone, (ROWS, *rows))
        _refuse_private_left(model, rv, clone, arrays, public, length)
        function = compile_random(
            [*inputs.values(), *arrays.values()],
            clone,
            random_seed=int(rng.integers(2**31)),
            mode=MODE,
            on_unused_input="ignore",
        )
    except NotImplementedError:
        raise _not_simulated(rv) from None

    def simulate(known: dict[str, np.ndarray], drawn: dict[Variable, np.ndarray]) -> None:
        placed = [np.moveaxis(drawn[source], 0, features.leaves[source].axis) for source in arrays]
        try:
            found = function(*[known[other.name] for other in inputs], *placed)
        except (NotImplementedError, ValueError):
            raise _not_simulated(rv) from None
        known[rv.name] = found
        if value is not None and value in drawn:
            cast = np.asarray(found).astype(value.type.dtype)
            drawn[value] = features.clamped(value, cast)

    return simulate


def _not_simulated(rv: Variable) -> ValueError:
    return ValueError(
        f"`{rv.name}` cannot be simulated: its distribution has no way to draw from it, or its "
        f"formula holds a fixed number of rows. Find a clip norm in another way."
    )


def _refuse_private_left(
    model: Model,
    rv: Variable,
    clone: Variable,
    arrays: Mapping[Variable, Variable],
    public: Sequence[str],
    length: int,
) -> None:
    """Refuse a graph in which something that may hold private data was not replaced."""
    named = public_inputs(model, public)
    for variable in ancestors_without_shapes([clone]) - named - set(arrays):
        if is_data(variable) or is_long_constant(variable, length):
            label = f"`{variable.name}`" if variable.name else "An unnamed array"
            raise UnsafeModel(
                f"{label} behind `{rv.name}` may be private, so clip_advice does not read it. "
                "Pass it as pm.Data with a public example (data=...) or with bounds."
            )
