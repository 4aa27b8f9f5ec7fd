"""Which rows, and which entries in memory, belong to which privacy unit; what is public.

Identity of entries is that of the memory, so a view or a slice of an array is the array itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.type import TensorType

from pymc_dp.errors import NotFactorizable, UnsafeModel
from pymc_dp.records.ancestry import ancestors_without_shapes, array_of, share_memory
from pymc_dp.records.graph import RowGraph


def made_up(
    shape: tuple[int, ...], dtype: np.dtype, largest: int, rng: np.random.Generator
) -> np.ndarray:
    """Reals from 0.1 to 0.9, or integers from 0 to `largest`."""
    real = dtype.kind == "f"
    made = rng.uniform(0.1, 0.9, shape) if real else rng.integers(largest + 1, size=shape)
    return made.astype(dtype)


#: Keys of the arrays that stand for records which are elsewhere.
_STAND_INS: set[bytes] = set()


def stands_in(array: np.ndarray) -> np.ndarray:
    """An array of made-up rows, remembered as one that stands for records which are elsewhere."""
    _STAND_INS.add(_key(array))
    return array


def _key(array: np.ndarray) -> bytes:
    """The same whatever PyMC casts it to."""
    return array.astype("float64").tobytes()


def holds_stand_ins(model: Model) -> bool:
    """Whether a model was built on arrays that stand for records which are elsewhere."""
    if not _STAND_INS:
        return False
    roots = [*model.observed_RVs, *(model.rvs_to_values[rv] for rv in model.observed_RVs)]
    data = [v for v in ancestors(roots) if isinstance(v, Constant | SharedVariable)]
    arrays = [array_of(v) for v in data if isinstance(v.type, TensorType)]
    return any(_key(array) in _STAND_INS for array in arrays)


class RecordStore:
    """The private arrays of a model.  `reads` counts how often they were asked for."""

    elsewhere: Any = None  # who has the arrays, if this process does not

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays
        self.reads = 0

    @property
    def n_rows(self) -> int:
        """Number of rows of the data."""
        return len(self._arrays[0])

    def read(self) -> list[np.ndarray]:
        """The arrays, records first."""
        self.reads += 1
        return self._arrays

    def synthetic(
        self, n_rows: int, value: int | None = 0, rows: slice = slice(None), largest: int = 0
    ) -> RecordStore:
        """Some of `n_rows` made-up rows; reads no record.

        All are of one `value`; for None, reals from 0.1 to 0.9 and integers from 0 to `largest`.
        """
        arrays, rng = [], np.random.default_rng(0)
        for array in self._arrays:
            shape = (n_rows, *array.shape[1:])
            if value is None:
                made = made_up(shape, array.dtype, largest, rng)
            else:
                made = np.full(shape, value, array.dtype)
            made = made[rows].copy()
            made.flags.writeable = array.flags.writeable
            arrays.append(made)
        return RecordStore(arrays)


@dataclass(frozen=True, eq=False)
class Group:
    """The likelihood of observed variables that share their rows, the data, and units of rows."""

    graph: RowGraph
    store: RecordStore
    units: np.ndarray | None


def private_observed(model: Model, public: Iterable[str]) -> list[Variable]:
    """The observed variables of a model that are not declared public."""
    public = set(public)
    return [rv for rv in model.observed_RVs if rv.name not in public]


def _n_rows(model: Model, rv: Variable) -> int:
    source = model.rvs_to_values[rv]
    while source.owner is not None and isinstance(source.owner.op, Elemwise | SpecifyShape):
        source = source.owner.inputs[0]  # PyMC casts pm.Data to the type of the distribution
    if not isinstance(source, Constant | SharedVariable):
        raise NotFactorizable(
            f"The observed value of `{rv.name}` is computed in the model, so it is not known which "
            "of its entries belong to one record. Compute it before: observed= an array or pm.Data."
        )
    shape = np.shape(array_of(source))
    if not shape:
        raise NotFactorizable(
            f"`{rv.name}` has no record axis: its observed value is a single number. Pass one "
            "entry per record."
        )
    if shape[0] < 2:
        what = f"`{rv.name}` has fewer than two records on its first axis;"
        remedy = "Put records on the first axis, one row each."
        raise NotFactorizable(
            f"{what} nothing can be hidden among so few. {remedy}",
            f"{what} there is nothing to take a sample of. {remedy}",
        )
    return int(shape[0])


def row_counts(model: Model, public: Iterable[str]) -> dict[str, int]:
    """Number of rows of each private observed variable."""
    return {rv.name: _n_rows(model, rv) for rv in private_observed(model, public)}


def count_units(
    model: Model, public: Iterable[str], privacy_unit: Any = None
) -> tuple[int, dict[str, np.ndarray | None]]:
    """The number of privacy units, and the unit of every row of each private observed variable.

    `privacy_unit`: see :class:`pymc_dp.PrivacyBudget`.  Raises ValueError if ids do not match the
    variables, NotFactorizable if variables of different lengths have none, or values are missing.
    """
    for rv in model.free_RVs:
        if type(rv.owner.op).__name__ == "PartialObservedRV" or rv.name.endswith("_unobserved"):
            raise NotFactorizable(
                f"`{rv.name}`: the observed data hold missing values, which PyMC turns into one "
                "latent variable per missing entry. Drop or impute them before the model is built."
            )
    rows = row_counts(model, public)
    if not rows:
        raise UnsafeModel(
            "The model has no private observed variable, so there is nothing to protect. Add "
            "observed data before the budget, or sample without pymc_dp."
        )
    if privacy_unit is None:
        if len(set(rows.values())) > 1:
            names = ", ".join(f"`{name}`" for name in rows)
            raise NotFactorizable(
                f"Observed variables {names} differ in length, so it is not known which rows "
                "belong to one record. Pass privacy_unit={'name': ids, ...} to PrivacyBudget."
            )
        return next(iter(rows.values())), dict.fromkeys(rows)
    given = (
        dict(privacy_unit)
        if isinstance(privacy_unit, Mapping)
        else dict.fromkeys(rows, privacy_unit)
    )
    if set(given) != set(rows):
        raise ValueError(
            f"privacy_unit names {sorted(given)}, but the private observed variables are "
            f"{sorted(rows)}. Give ids for each of these."
        )
    ids = codes_of_ids({name: given[name] for name in rows})
    for name, n in rows.items():
        if len(ids[name]) != n:
            raise ValueError(
                f"privacy_unit of `{name}` must have one id for each row of `{name}`; it has "
                "another length."
            )
    unique = np.unique(np.concatenate(list(ids.values())))
    return len(unique), {
        name: np.searchsorted(unique, array).astype("int64") for name, array in ids.items()
    }


def codes_of_ids(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """(n,) integers for each column of ids, by name: equal where the ids are.

    Ids are integers, text, or anything else that is equal or not; all of one kind, as "7" is not
    7.  ValueError, with the name and without an id, for other columns.
    """
    columns = {}
    for name, ids in given.items():
        whole = isinstance(getattr(ids, "dtype", None), np.dtype) and ids.dtype.kind in "iu"
        column = columns[name] = np.asarray(ids) if whole else np.asarray(ids, dtype=object)
        if column.ndim != 1 or isinstance(ids, np.ma.MaskedArray):
            raise ValueError(
                f"privacy_unit of `{name}` must be one vector of ids, or one column, such as "
                f"df['person']; got {type(ids).__name__} with {column.ndim} axes."
            )
        if not whole and pd.isna(column).any():
            raise ValueError(
                f"privacy_unit of `{name}` lacks the ids of some rows. Give each row the id of its "
                "person, or leave these rows out."
            )
    if all(column.dtype != object for column in columns.values()):
        return {name: column.astype("int64") for name, column in columns.items()}
    joint = np.concatenate([column.astype(object) for column in columns.values()])
    alike = {np.integer: int, str: str}  # NumPy has types of its own
    kinds = {
        next((one for of, one in alike.items() if issubclass(kind, of)), kind)
        for kind in set(map(type, joint))
    }
    what = f"privacy_unit of {', '.join(f'`{name}`' for name in columns)}"
    if len(kinds) > 1:
        raise ValueError(
            f"{what} has ids of several kinds ({', '.join(sorted(k.__name__ for k in kinds))}), so "
            "that one person may have two. Make them alike: df['person'].astype(str)."
        )
    try:
        if any(issubclass(kind, float | np.floating | bool | np.bool_) for kind in kinds):
            raise TypeError
        codes = pd.factorize(joint)[0].astype("int64")
    except TypeError:
        raise ValueError(
            f"{what} must be ids, integers or text, not of type {kinds.pop().__name__}. Write "
            "whole numbers that came as reals as df['person'].astype('int64')."
        ) from None
    ends = np.cumsum([len(column) for column in columns.values()])
    return dict(zip(columns, np.split(codes, ends[:-1]), strict=True))


def public_inputs(model: Model, public: Iterable[str]) -> set[Variable]:
    """Variables declared public, the data of public observed ones, and lengths of dims."""
    named = {model[name] for name in public if name in model.named_vars}
    observed = [model.rvs_to_values[rv] for rv in named & set(model.observed_RVs)]
    data = {v for v in ancestors(observed) if v.owner is None}
    return named | data | set(model.dim_lengths.values())


def lengths_of_rows(model: Model, axes: Mapping[Variable, int]) -> set[Variable]:
    """Lengths of the dims of variables and of data, at the axes on which their rows stand."""
    of = ((model.named_vars_to_dims.get(v.name, ()), axis) for v, axis in axes.items())
    dims = {dims[axis] for dims, axis in of if len(dims) > axis}
    return {model.dim_lengths[dim] for dim in dims if dim in model.dim_lengths}


def longest_unnamed(n_units: int, n_public: int | None) -> int:
    """The number of entries from which on an unnamed array may hold one for each record, or unit.

    Refusals may not depend on a private number, so half of `n_public`, at least 3, stands for it.
    """
    return n_units if n_public is None else max(n_public // 2, 3)


def refuse_shared_rows(groups: Sequence[Group], public: set[Variable]) -> None:
    """An entry in memory belongs to one unit, wherever a likelihood reads it.

    Only the user knows whether copies, such as PyMC makes of data, hold the same entries.
    """
    earlier: list[tuple[Variable, np.ndarray, np.ndarray]] = []
    for group in groups:
        for leaf in group.graph.leaves:
            if leaf.source in public:
                continue
            array = np.moveaxis(np.asarray(array_of(leaf.source)), leaf.axis, 0)
            units = np.arange(len(array)) if group.units is None else group.units
            if _rows_overlap(array):
                named = f"`{leaf.source.name}`" if leaf.source.name else "An array"
                raise NotFactorizable(
                    f"{named} shows one entry in memory in several rows, as sliding windows and "
                    "broadcast arrays do, so it would belong to several records. Give a copy "
                    "(numpy.array) if these are different data."
                )
            for source, other, others in earlier:
                if not _same_units(array, units, other, others):
                    named = leaf.source.name or source.name
                    raise NotFactorizable(
                        f"{f'`{named}`' if named else 'One array'} is read by several likelihoods, "
                        "or as several arrays, and some of its entries belong to another "
                        "privacy_unit, or to another row, in one than in the other. Give each a "
                        "copy of its own if they are different data, or the same ids."
                    )
            earlier.append((leaf.source, array, units))


def refuse_captured_rows(groups: Sequence[Group]) -> None:
    """No part of an array of records, such as a row, may be left where every record reads it."""
    arrays = [array_of(leaf.source) for group in groups for leaf in group.graph.leaves]
    for group in groups:
        graph = group.graph
        outputs = [graph.loglik, *graph.conditions, *(cut.phi for cut in graph.cuts)]
        outputs += [cut.row_data for cut in graph.cuts if cut.row_data is not None]
        outputs += [label for label, _ in graph.lookups]
        for variable in ancestors_without_shapes(outputs):
            if isinstance(variable, Constant) and any(
                share_memory(variable.data, array) for array in arrays
            ):
                what = (
                    f"The likelihood of {graph.quoted} is not a sum of one term per record: a part "
                    "of an array that holds records reaches all of them."
                )
                raise NotFactorizable(
                    f"{what} Standardise with public constants before the model is built, or give "
                    "it a copy if it is public.",
                    f"{what} Standardise with constants before the model is built, or give it a "
                    "copy.",
                )


def _rows_overlap(array: np.ndarray) -> bool:
    """Whether an entry in memory is in several rows of an array."""
    reach = array.itemsize
    for stride, size in sorted(
        (abs(k), n) for k, n in zip(array.strides, array.shape, strict=True)
    ):
        if size > 1 and stride < reach:
            break
        reach += stride * (size - 1)
    else:  # each axis steps over what the shorter steps reach
        return False
    if not _whole_entries(array):
        return True
    places = _addresses(array)
    rows = np.repeat(np.arange(len(array)), max(array[:1].size, 1))
    order = np.lexsort((rows, places))
    return bool(np.any((np.diff(places[order]) == 0) & (np.diff(rows[order]) > 0)))


def _same_units(a: np.ndarray, of_a: np.ndarray, b: np.ndarray, of_b: np.ndarray) -> bool:
    """Whether the entries that two arrays share have the same unit in both; each is in one row."""
    if not share_memory(a, b):
        return True
    if a.itemsize != b.itemsize or not _whole_entries(a, b):
        return False
    if a.__array_interface__["data"] == b.__array_interface__["data"] and (
        (a.strides, a.shape) == (b.strides, b.shape)
    ):
        return np.array_equal(of_a, of_b)
    rows = [np.repeat(units, max(x[:1].size, 1)) for x, units in ((a, of_a), (b, of_b))]
    _, at_a, at_b = np.intersect1d(_addresses(a), _addresses(b), return_indices=True)
    return len(at_a) > 0 and np.array_equal(rows[0][at_a], rows[1][at_b])


def _whole_entries(*arrays: np.ndarray) -> bool:
    """Whether entries of arrays with items of one size coincide in memory or are apart."""
    size, first = arrays[0].itemsize, arrays[0].__array_interface__["data"][0]
    starts = [array.__array_interface__["data"][0] - first for array in arrays]
    strides = [k for a in arrays for k, n in zip(a.strides, a.shape, strict=True) if n > 1]
    return not any(step % size for step in (*starts, *strides))


def _addresses(array: np.ndarray) -> np.ndarray:
    places = np.full(1, array.__array_interface__["data"][0])
    for size, stride in zip(array.shape, array.strides, strict=True):
        places = np.add.outer(places, stride * np.arange(size))
    return places.ravel()
