"""Public bounds of private data, declared in a model: values outside are clamped, by rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
from pymc.model import Model
from pytensor.graph.basic import Variable

from pymc_dp.errors import UnsafeModel
from pymc_dp.records.ancestry import array_of, data_behind, is_data

_ATTRIBUTE = "pymc_dp_bounds"
_SUPPORT = {  # values of an observed variable that are possible
    "bernoulli": (0.0, 1.0),
    "binomial": (0.0, np.inf),
    "poisson": (0.0, np.inf),
}


class _Declared:
    """The bounds of a model, closed once its budget is declared."""

    def __init__(self) -> None:
        self.limits: dict[str, Interval] = {}
        self.sealed = False


def bounds(
    model: Model | Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    /,
    **limits: Any,
) -> None:
    """Declare public bounds of private data.

    Call it in the model, after the data and before :class:`pymc_dp.PrivacyBudget`::

        dp.bounds(X=(-3, 3), y=(0, 20))
        dp.bounds({"blood pressure": ([60, 40], [220, 140])})

    Parameters
    ----------
    model : pymc.Model, optional
        Default: the model of the context.
    given : mapping of str to (lower, upper), optional
        As `limits`, for names that are no Python identifiers.
    **limits : (lower, upper)
        By name of a ``pm.Data`` or of an observed variable: two numbers, or arrays that broadcast
        to one row (bounds by column).  Infinite on a side without bound.

    Raises
    ------
    TypeError
        If there is no model.
    ValueError
        If a name is unknown or bounded before, or its limits are not lower < upper, do not fit
        its columns, or are not whole where the data are.
    UnsafeModel
        If the model has a budget already, or is nested.

    Notes
    -----
    *Guarantee.*  Wherever a private step reads these data, a value outside is replaced by the
    nearest bound.  It is never an error, and nobody is told which values were, or how many.  An
    infinite value is replaced as well; one that is not a number is still refused.

    *Assumptions.*  Bounds come from public knowledge (a scale, a physical limit, a law), never from
    the smallest and largest value of these data.

    *Weaknesses.*  What is clamped is another data set than the one collected: bounds that are too
    narrow bias the posterior.  The model's own graph is left as it is: prior and posterior
    predictive draws use the data unclamped, and so does anything that is computed from the same
    NumPy array elsewhere in the model.
    """
    if isinstance(model, Mapping):
        if given is not None:
            raise ValueError("dp.bounds takes one mapping of names to limits; merge the two.")
        model, given = None, model
    twice = set(given or {}) & set(limits)
    if twice:
        raise ValueError(f"dp.bounds got limits of {sorted(twice)} twice.")
    try:
        model = pm.modelcontext(model)
    except TypeError:
        raise TypeError(
            "There is no model: call this inside `with model:`, or give it first: "
            "dp.bounds(model, y=(0, 1))."
        ) from None
    assert isinstance(model, Model)
    if model.parent is not None:
        raise UnsafeModel("The model is nested. Declare bounds in the outermost model.")
    declared = _declared(model)
    if declared.sealed:
        raise UnsafeModel(
            "The model already has a PrivacyBudget, which states what is clamped. Declare bounds "
            "before it: dp.bounds(...), then dp.PrivacyBudget(...)."
        )
    if not given and not limits:
        raise ValueError("dp.bounds got no limits. Give some: dp.bounds(age=(18, 100)).")
    checked: dict[str, Interval] = {}
    for name, pair in {**(given or {}), **limits}.items():
        source = _source(model, name)
        earlier = {_source(model, other): other for other in (*declared.limits, *checked)}
        if source in earlier:
            raise ValueError(
                f"`{name}` has bounds already"
                + (f", as `{earlier[source]}`" if earlier[source] != name else "")
                + ". Give the limits of each array once."
            )
        checked[name] = _checked(name, pair, source)
    declared.limits.update(checked)
    setattr(model, _ATTRIBUTE, declared)


def _declared(model: Model) -> _Declared:
    return getattr(model, _ATTRIBUTE, None) or _Declared()


def declared_bounds(model: Model) -> Mapping[str, Interval]:
    """Lower and upper limits by name, read-only."""
    return MappingProxyType(dict(_declared(model).limits))


def seal(model: Model) -> None:
    """Let no more bounds be declared."""
    declared = _declared(model)
    declared.sealed = True
    setattr(model, _ATTRIBUTE, declared)


def _source(model: Model, name: str) -> Variable:
    observed = {rv.name: rv for rv in model.observed_RVs}
    if name in observed:
        source = data_behind(model.rvs_to_values[observed[name]])
        if source is not None:
            return source
        raise ValueError(
            f"The observed value of `{name}` is computed in the model. Pass it as an array or as "
            "pm.Data, and bound that."
        )
    data = {v.name: v for v in model.data_vars}
    if name not in data:
        raise ValueError(
            f"dp.bounds names {name!r}, which is no pm.Data or observed variable of the model; "
            f"those are {sorted({*data, *observed})}. Declare bounds after the data; NumPy arrays "
            "have no name, so pass them as pm.Data."
        )
    return data[name]


def _checked(name: str, pair: Any, source: Variable) -> Interval:
    """Limits of one row, of the type of the data, rounded inwards."""
    label = f"bounds of `{name}`"
    try:
        low, high = pair
        if any(np.asarray(end).dtype.kind in "SU" for end in pair):
            raise TypeError  # NumPy would read numbers in text
        lower, upper = (np.array(end, dtype="float64") for end in (low, high))
    except (TypeError, ValueError):
        raise ValueError(f"{label} must be a pair (lower, upper) of numbers or arrays.") from None
    if isinstance(low, pd.Series) and isinstance(high, pd.Series):
        if not low.index.equals(high.index):  # and nobody knows which order is that of the data
            raise ValueError(f"{label} name their columns in two orders. Give both in one.")
    row = np.shape(array_of(source))[1:]
    for end in (lower, upper):
        try:
            np.broadcast_to(end, row)
        except ValueError:
            raise ValueError(
                f"{label} must be numbers or fit one row, of shape {row}; got shape {end.shape}."
            ) from None
    if np.isnan(lower).any() or np.isnan(upper).any():
        raise ValueError(f"{label} hold NaN; use -inf or inf on a side without bound.")
    if (lower == np.inf).any() or (upper == -np.inf).any():
        raise ValueError(f"{label} leave no number: lower is inf, or upper is -inf.")
    if (lower > upper).any() or (lower == upper).all():
        raise ValueError(f"{label}: lower must be below upper. Give (lower, upper).")
    dtype = np.dtype(source.type.dtype)
    if dtype.kind == "b":
        raise ValueError(f"`{name}` is True or False; it needs no bounds.")
    if dtype.kind in "iu":
        for end in (lower, upper):
            if (np.isfinite(end) & (end != np.rint(end))).any():
                raise ValueError(f"{label} must be whole numbers, as its data are.")
        # the limits of the type itself are no news
        least, most = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
        if (upper < least).any() or (lower > most).any():
            raise ValueError(f"{label} are outside of what its type {dtype} can hold.")
    elif dtype == np.float32:
        lower, upper = _inwards(lower, np.inf), _inwards(upper, -np.inf)
        if (lower > upper).any():
            raise ValueError(f"{label}: its type {dtype} has no number between them.")
    for end in (lower, upper):
        end.flags.writeable = False
    return lower, upper


def _inwards(end: np.ndarray, towards: float) -> np.ndarray:
    """The nearest single-precision number that is not beyond `end`."""
    rounded = end.astype("float32")
    beyond = rounded < end if towards > 0 else rounded > end
    return np.where(beyond, np.nextafter(rounded, np.float32(towards)), rounded).astype("float64")


def source_limits(model: Model) -> dict[Variable, Interval]:
    """The declared limits, by the variable that holds the data."""
    return {_source(model, name): limits for name, limits in declared_bounds(model).items()}


def clamp(data: np.ndarray, limits: Interval) -> np.ndarray:
    """A copy of `data`, values beyond the limits of one row set to these; NaN stays NaN."""
    lower, upper = (np.broadcast_to(end, data.shape[1:]) for end in limits)
    if data.dtype.kind in "iu":
        info = np.iinfo(data.dtype)
        lower, upper = (  # as integers: not every limit of a type is a number in double precision
            np.array(
                [
                    info.min if x <= info.min else info.max if x >= info.max else int(x)
                    for x in end.ravel()
                ],
                dtype=data.dtype,
            ).reshape(end.shape)
            for end in (lower, upper)
        )
    return np.clip(data, lower.astype(data.dtype), upper.astype(data.dtype))


def check_public(model: Model, public: Iterable[str]) -> None:
    """Refuse bounds on public data with a ValueError."""
    limits = source_limits(model)
    for name in public:
        known = {*[v.name for v in model.data_vars], *[rv.name for rv in model.observed_RVs]}
        if name in known and _source(model, name) in limits:
            raise ValueError(
                f"`{name}` is declared public and has bounds: public data are used as they are. "
                "Clip them before the model is built, or leave out one of the two."
            )


def known_limits(model: Model, public: Iterable[str] = ()) -> dict[Variable, Interval]:
    """Publicly known ranges of data: declared bounds, supports of counts, ends of public data."""
    limits = source_limits(model)
    public = set(public)
    for rv in model.observed_RVs:
        source = data_behind(model.rvs_to_values[rv])
        support = _SUPPORT.get(getattr(rv.owner.op, "name", None) or "")
        if support is None or rv.name in public or source is None:
            continue
        lower, upper = limits.get(source, (np.array(-np.inf), np.array(np.inf)))
        lower, upper = np.maximum(lower, support[0]), np.minimum(upper, support[1])
        if (lower <= upper).all():
            limits[source] = lower, upper
    for variable in model.data_vars:
        if variable.name in public and is_data(variable):
            values = np.asarray(array_of(variable))
            if values.ndim and len(values):
                ends = values.min(axis=0), values.max(axis=0)
                limits[variable] = ends[0].astype("float64"), ends[1].astype("float64")
    return limits


def stated(model: Model) -> dict[str, list[Any]]:
    """The declared bounds for a ledger: [lower, upper] by name, None for a side without bound."""
    declared = declared_bounds(model).items()
    return {
        name: [np.where(np.isfinite(x), x, np.array(None)).tolist() for x in pair]
        for name, pair in declared
    }


Interval = tuple[np.ndarray, np.ndarray]  # lower, upper; the same array twice if the value is known
