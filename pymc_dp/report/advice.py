"""How norms of records' scores are expected to lie, from records that the model simulates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
from pymc.distributions.shape_utils import change_dist_size
from pymc.model import Model
from pymc.pytensorf import compile as compile_random
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.tensor.type import TensorType

from pymc_dp.base.checks import check_integer
from pymc_dp.budget import get_budget
from pymc_dp.errors import UnsafeModel
from pymc_dp.publication.results import unconstrain
from pymc_dp.records.ancestry import (
    ancestors_without_shapes,
    array_of,
    data_behind,
    is_data,
    is_long_constant,
)
from pymc_dp.records.bounds import clamp, source_limits
from pymc_dp.records.extraction import Records, extract
from pymc_dp.records.units import RecordStore, longest_unnamed, private_observed, public_inputs
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import RowFunctions
from pymc_dp.rows.groups import RowGroup
from pymc_dp.steps.settings import scaling_matrix

# -- records simulated from the prior predictive distribution -------------------------------------


ROWS = 100  # records for each draw of the parameters
MODE = Mode(linker="py", optimizer="fast_run")  # cheaper than a compilation, for a few calls


class Simulation:
    """`ROWS` simulated records; unnamed arrays of `length` entries or more may be private."""

    def __init__(
        self,
        model: Model,
        records: Records,
        public: Sequence[str],
        length: int,
        given: Mapping[str, Any],
        rng: np.random.Generator,
    ) -> None:
        self.rng, self.limits = rng, source_limits(model)
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
            examples[names[name]] = _example(name, array, names[name])
        self.examples = {
            source: np.moveaxis(array, self.leaves[source].axis, 0)
            for source, array in examples.items()
        }
        for source in self.leaves:
            known = source in self.examples or source in observed.values() or source in self.sizes
            if not known and not self._is_bounded(source):
                raise _not_public(source)
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
                clone = change_dist_size(clone, (ROWS, *rows))
                for left in ancestors_without_shapes([clone]) - named - set(arrays):
                    if is_data(left) or is_long_constant(left, length):
                        label = f"`{left.name}`" if left.name else "An unnamed array"
                        raise UnsafeModel(
                            f"{label} behind `{rv.name}` may be private, so clip_advice does not "
                            "read it. Pass it as pm.Data with a public example (data=...) or with "
                            "bounds."
                        )
                function = compile_random(
                    [*known.values(), *arrays.values()],
                    clone,
                    random_seed=int(self.rng.integers(2**31)),
                    mode=MODE,
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
        arrays = {}
        for source, leaf in self.leaves.items():
            row = np.delete(np.shape(array_of(source)), leaf.axis)
            shape, whole = (ROWS, *row.tolist()), source.type.dtype.startswith(("int", "uint"))
            if source in self.examples:
                n = len(self.examples[source])
                places.setdefault(n, self.rng.integers(0, n, ROWS))
                array = self.examples[source][places[n]]
            elif any(source is value for _, value, _ in self._outcomes):
                array = np.zeros(shape)  # until it is drawn
            elif self._is_bounded(source):
                lower, upper = (np.broadcast_to(end, shape) for end in self.limits[source])
                array = self.rng.uniform(lower, upper + whole)
                array = np.floor(array) if whole else array
            else:
                array = self.rng.integers(0, self.sizes[source], shape)
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

    def _clamped(self, source: Variable, array: np.ndarray) -> np.ndarray:
        """Of the type of the source and clamped to its bounds, as the data will be."""
        array, limits = np.asarray(array).astype(source.type.dtype), self.limits.get(source)
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


def _not_public(source: Variable) -> UnsafeModel:
    if not is_data(source):
        return UnsafeModel(
            "An unnamed array in the likelihood may be private, so clip_advice does not read it. "
            "Pass features as pm.Data('X', ...), then clip_advice(data={'X': a public example}) or "
            "dp.bounds(X=(lower, upper))."
        )
    return UnsafeModel(
        f"`{source.name}` is private, so clip_advice does not read it. Pass a public example, "
        f"data={{{source.name!r}: array}}, or declare finite bounds of it, "
        f"dp.bounds({source.name}=(lower, upper)), before the budget."
    )


def _not_simulated(rv: Variable) -> ValueError:
    return ValueError(
        f"`{rv.name}` cannot be simulated: its distribution has no way to draw from it, or its "
        f"formula holds a fixed number of rows. Find a clip norm in another way."
    )


# -- the clip norm that is about right for them ---------------------------------------------------


_QUANTILES = (0.5, 0.9, 0.99, 0.995, 0.999)  # 100 records of 20,000 are above the quantile of 0.995


@dataclass(frozen=True)
class ClipAdvice:
    """How long score vectors are under the prior predictive distribution.

    Attributes
    ----------
    clip_norm : float
        The norm that 0.5 % of the simulated records exceed.
    quantiles : dict of float to float
        Norms of the score vectors of simulated records, in z.
    draws : int
        Draws of the parameters that were used.
    """

    clip_norm: float
    quantiles: dict[float, float]
    draws: int

    def __repr__(self) -> str:
        norms = ", ".join(f"{100 * q:g} %: {norm:.3g}" for q, norm in self.quantiles.items())
        return (
            f"clip_norm = {self.clip_norm:.3g}\n"
            f"Norms of score vectors in z at {self.draws} draws from the prior, of records "
            f"simulated there: {norms}.\n"
            "From the model and public features alone; no private record was read. Where the prior "
            "is wide, most of it is far from the posterior and this is more than is needed."
        )


def clip_advice(
    model: Model | None = None,
    *,
    scaling: Any,
    data: Mapping[str, Any] | None = None,
    draws: int = 200,
    random_seed: int | None = None,
) -> ClipAdvice:
    """Clip norms that are about right if the prior is, without touching the data.

    Parameters are drawn from the prior, observed variables given these and public features, and
    the score vectors of these simulated records are measured at the parameters that made them.

    Parameters
    ----------
    model : pymc.Model, optional
        Default: the model of the context.
    scaling : float, array or dict
        As the private step will have it: norms are in its coordinates z.
    data : mapping of str to array, optional
        Public examples of features by name of their ``pm.Data``, records on the first axis: rows
        are drawn from them.  Any number of rows; arrays of equal length keep theirs together.
        Features without an example are drawn uniformly within their :func:`pymc_dp.bounds`;
        labels of groups uniformly from all groups; public data are used as they are.
    draws : int, default 200
        Draws of the parameters, with 100 records each.
    random_seed : int, optional

    Returns
    -------
    ClipAdvice

    Raises
    ------
    UnsafeModel
        If features are private, and neither an example nor bounds are given.
    ValueError
        If `data` has an unknown name or other columns, or the model cannot be simulated.

    Notes
    -----
    *Guarantee.*  A function of the model, the public arguments and the shapes of a row: no value
    of a private array is read, nor their number of rows.  Nothing is charged.

    *Assumptions.*  `data` are public.

    *Weaknesses.*  A unit of k rows has a score of up to k times the norm of one row.  It says
    nothing about records that the model does not expect.
    """
    norms = score_norms(model, scaling=scaling, data=data, draws=draws, random_seed=random_seed)
    values = np.quantile(np.concatenate(norms), _QUANTILES)
    quantiles = {q: float(value) for q, value in zip(_QUANTILES, values, strict=True)}
    return ClipAdvice(quantiles[0.995], quantiles, len(norms))


def score_norms(
    model: Model | None,
    *,
    scaling: Any,
    data: Mapping[str, Any] | None,
    draws: int,
    random_seed: int | None,
) -> list[np.ndarray]:
    """Norms of the scores of simulated records, an array per draw; see `clip_advice`."""
    draws = check_integer("draws", draws, minimum=10)
    model = pm.modelcontext(model)
    budget = get_budget(model)
    public = () if budget is None else budget.public
    secrecy = {} if budget is None else budget.secrecy
    records = extract(model, **secrecy, check=False, read=False)
    matrix = scaling_matrix(scaling, records.parameters, model)
    rng = np.random.default_rng(random_seed)
    length = longest_unnamed(records.n_units, None) if budget is None else budget.longest_unnamed
    simulation = Simulation(model, records, public, length, data or {}, rng)
    seed = int(rng.integers(2**31))
    try:
        drawn = pm.draw(model.free_RVs, draws=draws, random_seed=seed, mode=MODE)
    except NotImplementedError:
        raise ValueError(
            "The prior is improper (pm.Flat, ...), so there is no prior predictive distribution. "
            "Give every parameter a proper prior."
        ) from None
    prior = {rv.name: values[None] for rv, values in zip(model.free_RVs, drawn, strict=True)}
    theta = unconstrain(model, records.parameters, prior)[0]
    groups = [
        (group.graph.leaves, RowFunctions(group.graph, records.parameters, {"mode": MODE}))
        for group in records.groups
    ]
    norms = []
    for k in range(draws):
        if not np.isfinite(theta[k]).all():  # rounded to the boundary of its support
            continue
        arrays = simulation.draw([values[k] for values in drawn])
        engine = RowEngine(
            [
                RowGroup(functions, RecordStore([arrays[leaf.source] for leaf in leaves]), None)
                for leaves, functions in groups
            ],
            records.parameters,
            ROWS,
            Coordinates(theta[k], matrix),
        )
        scores = engine.scores(np.zeros(records.parameters.size))
        blocks = [np.linalg.norm(block, axis=0) for _, block in engine.vectors(scores)]
        norms.append(np.concatenate(blocks))
    if not norms:
        raise ValueError("No draw of the prior is inside of its support; choose another prior.")
    return norms
