"""Records simulated at values of the parameters: of public features alone, no record is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pymc as pm
from pymc.distributions.shape_utils import change_dist_size
from pymc.model import Model
from pymc.pytensorf import compile as compile_random
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.tensor.type import TensorType

from pymc_dp.base.columns import numbers
from pymc_dp.errors import UnsafeModel
from pymc_dp.publication.results import PYTHON
from pymc_dp.records.ancestry import (
    ancestors_without_shapes,
    array_of,
    data_behind,
    is_data,
    is_long_constant,
    share_memory,
)
from pymc_dp.records.bounds import clamp, source_limits
from pymc_dp.records.extraction import Records
from pymc_dp.records.units import private_observed, public_inputs

ROWS = 100  # records for each draw of the parameters


def drawn_from_prior(model: Model, draws: int, seed: int) -> list[np.ndarray]:
    """(draws, ...) values of each free variable."""
    try:
        drawn: list[np.ndarray] = pm.draw(model.free_RVs, draws, random_seed=seed, mode=PYTHON)
    except NotImplementedError:
        raise ValueError(
            "The prior is improper (pm.Flat, ...), so there is no prior predictive distribution. "
            "Give every parameter a proper prior."
        ) from None
    return drawn


class Simulation:
    """Simulated records, `rows` at a time; unnamed arrays of `length` entries or more may be
    private.  With `standard`, real features of which nothing is known are standard normal, whole
    numbers 0 or 1, and `assumed` names them.
    """

    def __init__(
        self,
        model: Model,
        records: Records,
        public: Sequence[str],
        length: int,
        given: Mapping[str, Any],
        rng: np.random.Generator,
        rows: int = ROWS,
        standard: bool = False,
    ) -> None:
        self.rng, self.limits, self.rows = rng, source_limits(model), rows
        graphs = [group.graph for group in records.groups]
        self.leaves = {leaf.source: leaf for graph in graphs for leaf in graph.leaves}
        blocks = {leaf.block: leaf.source for graph in graphs for leaf in graph.leaves}
        lookups = [lookup for graph in graphs for lookup in graph.lookups]
        #: Numbers of groups, by their labels.
        self.sizes = {blocks[label]: size for label, size in lookups if label in blocks}
        private = private_observed(model, public)
        observed = {rv: data_behind(model.rvs_to_values[rv]) for rv in private}
        named = public_inputs(model, public)
        names = {source.name: source for source in self.leaves if is_data(source)}
        examples = {source: array_of(source) for source in self.leaves if source in named}
        for name, array in given.items():
            if name not in names:
                raise ValueError(
                    f"data names {name!r}, which is no pm.Data with one row per record in a "
                    f"likelihood; those are {sorted(names)}."
                )
            source = names[name]
            examples[source] = _example(name, array, source, self.sizes.get(source))
        self.examples = {
            source: np.moveaxis(array, self.leaves[source].axis, 0)
            for source, array in examples.items()
        }
        self.assumed: list[str] = []
        for source in self.leaves:
            known = source in self.examples or source in observed.values() or source in self.sizes
            if known or self._is_bounded(source):
                continue
            if not standard:
                raise _not_public(source)
            self.assumed.append(source.name if is_data(source) else "an array without a name")
        self._compile(model, observed, named, length)

    def _is_bounded(self, source: Variable) -> bool:
        return source in self.limits and bool(np.isfinite(self.limits[source]).all())

    def _compile(
        self,
        model: Model,
        observed: Mapping[Variable, Variable | None],
        named: set[Variable],
        length: int,
    ) -> None:
        """For each observed variable, a function of parameters, earlier ones, and all arrays."""
        values = {rv: model.rvs_to_values[rv] for rv in model.observed_RVs}
        published = {rv: value for rv, value in values.items() if rv not in observed}
        known = {rv: rv.type() for rv in model.free_RVs}
        arrays = {
            source: TensorType(source.type.dtype, (None,) * source.type.ndim)()
            for source in self.leaves
        }
        self._outcomes: list[tuple[Variable, Variable | None, Callable[..., np.ndarray]]] = []
        for rv, value in observed.items():
            [clone] = clone_replace([rv], {**published, **known, **arrays}, rebuild_strict=False)
            batch = clone.type.ndim - getattr(clone.owner.op, "ndim_supp", 0)
            rows = np.shape(array_of(value))[1:batch] if value is not None else ()
            try:
                clone = change_dist_size(clone, (self.rows, *rows))
                for left in ancestors_without_shapes([clone]) - named - set(arrays):
                    if is_data(left) or is_long_constant(left, length):
                        label = f"`{left.name}`" if left.name else "An unnamed array"
                        raise UnsafeModel(
                            f"{label} behind `{rv.name}` may be private, so it is not read. "
                            "Pass it as pm.Data with a public example (data=...) or with "
                            "bounds."
                        )
                function = compile_random(
                    [*known.values(), *arrays.values()],
                    clone,
                    random_seed=int(self.rng.integers(2**31)),
                    mode=PYTHON,
                    on_unused_input="ignore",
                )
            except NotImplementedError:
                raise _not_simulated(rv) from None
            self._outcomes.append((rv, value, function))
            # its length is another one here than in the model
            known[rv] = TensorType(rv.type.dtype, (None,) * rv.type.ndim)()

    def draw(self, parameters: Sequence[np.ndarray]) -> dict[Variable, np.ndarray]:
        """Records at values of the free variables, by the arrays in whose place they are."""
        places: dict[int, np.ndarray] = {}  # rows of examples, by length
        arrays: dict[Variable, np.ndarray] = {}
        for source, leaf in self.leaves.items():
            row = np.delete(np.shape(array_of(source)), leaf.axis)
            shape, whole = (self.rows, *row.tolist()), source.type.dtype.startswith(("int", "uint"))
            if source in self.examples:
                n = len(self.examples[source])
                chosen = np.arange(n) if n == self.rows else self.rng.integers(0, n, self.rows)
                places.setdefault(n, chosen)
                array = self.examples[source][places[n]]
            elif any(source is value for _, value, _ in self._outcomes):
                array = np.zeros(shape)  # until it is drawn
            elif self._is_bounded(source):
                lower, upper = (np.broadcast_to(end, shape) for end in self.limits[source])
                array = self.rng.uniform(lower, upper + whole)
                array = np.floor(array) if whole else array
            elif source in self.sizes:
                array = self.rng.integers(0, self.sizes[source], shape)
            else:
                array = self._standard(source, shape, arrays)
            arrays[source] = self._clamped(source, array)
        known = list(parameters)
        for rv, value, function in self._outcomes:
            placed = [np.moveaxis(x, 0, self.leaves[source].axis) for source, x in arrays.items()]
            try:
                known.append(function(*known, *placed))
            except (NotImplementedError, ValueError):
                raise _not_simulated(rv) from None
            if value in arrays:
                arrays[value] = self._clamped(value, known[-1])
        return arrays

    def _standard(
        self, source: Variable, shape: tuple[int, ...], made: Mapping[Variable, np.ndarray]
    ) -> np.ndarray:
        """The same numbers where the model holds the same array twice."""
        for other, array in made.items():
            if array.shape == shape and share_memory(array_of(other), array_of(source)):
                return array
        real = source.type.dtype.startswith("float")
        return self.rng.standard_normal(shape) if real else self.rng.integers(0, 2, shape)

    def _clamped(self, source: Variable, array: np.ndarray) -> np.ndarray:
        """Of the type of the source and clamped to its bounds, as the data will be."""
        array, limits = np.asarray(array).astype(source.type.dtype), self.limits.get(source)
        return np.ascontiguousarray(array if limits is None else clamp(array, limits))


def _example(name: str, given: Any, source: Variable, labels: int | None) -> np.ndarray:
    array = numbers(f"data[{name!r}]", given)
    columns = np.shape(array_of(source))[1:]
    fits = array.ndim >= 1 and len(array) > 0 and array.shape[1:] == columns
    if not fits or array.dtype.kind not in "iufb" or not np.isfinite(array).all():
        raise ValueError(
            f"data[{name!r}] must be finite numbers of shape (rows, {', '.join(map(str, columns))})"
            f"; got shape {array.shape} of type {array.dtype}."
        )
    if labels is not None and not (array.min() >= 0 and array.max() < labels):
        raise ValueError(f"data[{name!r}] must be labels of groups, from 0 to {labels - 1}.")
    return array


def _not_public(source: Variable) -> UnsafeModel:
    if not is_data(source):
        return UnsafeModel(
            "An unnamed array in the likelihood may be private, so it is not read. "
            "Pass features as pm.Data('X', ...), with a public example, data={'X': array}, or "
            "dp.bounds(X=(lower, upper))."
        )
    return UnsafeModel(
        f"`{source.name}` is private, so it is not read. Pass a public example, "
        f"data={{{source.name!r}: array}}, or declare finite bounds of it, "
        f"dp.bounds({source.name}=(lower, upper)), before the budget."
    )


def _not_simulated(rv: Variable) -> ValueError:
    return ValueError(
        f"`{rv.name}` cannot be simulated: its distribution has no way to draw from it, or its "
        f"formula holds a fixed number of rows."
    )
