"""How norms of records' scores are expected to lie, from records that the model simulates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from pymc_dp.records.bounds import Interval, clamp, source_limits
from pymc_dp.records.extraction import Records, extract
from pymc_dp.records.graph import RowLeaf
from pymc_dp.records.units import RecordStore, longest_unnamed, private_observed, public_inputs
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import RowFunctions
from pymc_dp.rows.groups import RowGroup
from pymc_dp.steps.settings import scaling_matrix

# -- records simulated from the prior predictive distribution -------------------------------------


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


# -- the clip norm that is about right for them ---------------------------------------------------


#: With 200 draws of 100 records there are 100 above the quantile of 99.5 %.
_QUANTILES = (0.5, 0.9, 0.99, 0.995, 0.999)


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
    """Clip norms that would be about right if the prior were, without touching the data.

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
    """Norms of the scores of simulated records, one array for each draw from the prior.

    Arguments, errors and guarantee are those of :func:`clip_advice`.
    """
    draws = check_integer("draws", draws, minimum=10)
    model = pm.modelcontext(model)
    budget = get_budget(model)
    public = () if budget is None else budget.public
    secrecy = {} if budget is None else budget.secrecy
    records = extract(model, **secrecy, check=False, read=False)
    matrix = scaling_matrix(scaling, records.parameters, model)
    rng = np.random.default_rng(random_seed)
    features = Features(model, records, public, dict(data or {}))
    length = longest_unnamed(records.n_units, None) if budget is None else budget.longest_unnamed
    simulators = [
        simulator(model, rv, features, public, length, rng)
        for rv in private_observed(model, public)
    ]
    names = [rv.name for rv in model.free_RVs]
    prior = draw_prior(model, draws, rng)
    theta = unconstrain(model, records.parameters, prior)[0]
    groups = [
        (group.graph.leaves, RowFunctions(group.graph, records.parameters, {"mode": MODE}))
        for group in records.groups
    ]
    norms = []
    for k in range(draws):
        if not np.isfinite(theta[k]).all():  # rounded to the boundary of its support
            continue
        known = {name: prior[name].values[0, k] for name in names}
        arrays = features.draw(rng)
        for simulate in simulators:
            simulate(known, arrays)
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
