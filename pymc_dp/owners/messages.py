"""Questions as JSON: what an analyst may send to owners, checked where it arrives.

A message is numbers, and names of the few classes below; it holds no code.  What is decoded is a
question that an analyst could have asked in one process, or it is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np

from pymc_dp.base.checks import Neighboring
from pymc_dp.base.matrices import Coordinates
from pymc_dp.errors import PrivacyError
from pymc_dp.privacy.answer import Grid, IntervalSum, NormCounts, Query, VectorSum
from pymc_dp.privacy.queries import EnergyError, Kick, LogRatio, ScoreAt
from pymc_dp.rows import contributions

#: What may be asked, by name: questions of chains, and of one-off releases.
OF_CHAINS = {kind.__name__: kind for kind in (ScoreAt, LogRatio, Kick, EnergyError)}
OF_RELEASES = {
    kind.__name__: kind
    for kind in (
        contributions.Score,
        contributions.ConsistentScore,
        contributions.LongestEntry,
        contributions.LongestScore,
        contributions.Change,
        contributions.Curvature,
        contributions.OuterProduct,
        contributions.ExpectedCurvature,
        contributions.LawNotFound,
        contributions.Loss,
        contributions.PathError,
    )
}
_KNOWN: dict[str, Any] = {**OF_CHAINS, **OF_RELEASES, Coordinates.__name__: Coordinates}


def packed(message: Mapping[str, Any]) -> bytes:
    """A message as bytes; ValueError for a number that is not finite."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode()


def unpacked(data: bytes) -> dict[str, Any]:
    """A message from bytes."""
    try:
        found = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise PrivacyError("A message is not JSON of finite numbers.") from None
    if not isinstance(found, dict):
        raise PrivacyError("A message is not an object with named parts.")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


# -- values ---------------------------------------------------------------------------------------


def encoded(value: Any) -> Any:
    """A question, or a part of one, as plain values."""
    if isinstance(value, np.ndarray):
        kind = "integers" if value.dtype.kind in "iu" else "reals"
        return {"is": kind, "shape": list(value.shape), "values": value.ravel().tolist()}
    name = type(value).__name__
    if _KNOWN.get(name) is type(value):
        return {"is": name, **{f.name: encoded(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float):
        return value
    raise PrivacyError(
        f"{name} cannot be asked of owners: they answer questions of numbers alone, and run no "
        "code of others. DPLangevin, DPHMC, DPPenalty, DPBarker, dp.laplace and dp.find_MAP can."
    )


def decoded(value: Any, kinds: Mapping[str, Any], d: int) -> Any:
    """A question about d parameters, of one of these kinds."""
    kind = kinds.get(str(value.get("is"))) if isinstance(value, dict) else None
    if kind is None:
        raise PrivacyError("A question is of no kind that is known here.")
    declared = _declared(kind)
    if set(value) != {"is", *declared}:
        raise PrivacyError(f"A question does not have the parts of {kind.__name__}.")
    parts = {name: _part(name, of_type, value[name], d) for name, of_type in declared.items()}
    if "midpoints" in parts and len(parts["points"]) != len(parts["midpoints"]) + 1:
        raise PrivacyError("A path does not have a midpoint between any two points.")
    return kind(**parts)


@cache
def _declared(kind: Any) -> dict[str, str]:
    """The parts of a question, and their types."""
    return {field.name: str(field.type) for field in fields(kind)}


def _part(name: str, declared: str, value: Any, d: int) -> Any:
    """One part of a question; its shape follows from its name."""
    if declared.endswith("| None") and value is None:
        return None
    if declared == "Coordinates":
        return coordinates(value, d)
    if declared == "bool" and isinstance(value, bool):
        return value
    if declared == "int" and isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < 2**53:
            return value
    if declared == "float":
        return positive(name, value)
    if declared.startswith("np.ndarray"):
        if name == "part":
            return _array(value, "integers", None, d)
        return _array(value, "reals", d, None, rows=name in ("points", "midpoints"))
    raise PrivacyError(f"`{name}` of a question is not of its type.")


def positive(name: str, value: Any) -> float:
    """A positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PrivacyError(f"`{name}` of a question is not a number.")
    if not 0.0 < value < math.inf:
        raise PrivacyError(f"`{name}` of a question must be positive and finite.")
    return float(value)


def _array(
    value: Any, kind: str, d: int | None, below: int | None, rows: bool = False
) -> np.ndarray:
    """A vector of d reals, rows of these, or distinct integers below a number."""
    if not isinstance(value, dict) or set(value) != {"is", "shape", "values"}:
        raise PrivacyError("An array of a question is not one.")
    if value["is"] != kind or not isinstance(value["shape"], list):
        raise PrivacyError("An array of a question is not of its type.")
    numbers = {int} if kind == "integers" else {int, float}
    if not (isinstance(value["values"], list) and {*map(type, value["values"])} <= numbers):
        raise PrivacyError("An array of a question does not hold numbers of its type.")
    try:
        array = np.array(value["values"], "int64" if kind == "integers" else "float64")
        array = array.reshape(value["shape"])
    except (ValueError, TypeError, OverflowError):
        raise PrivacyError("An array of a question does not have its shape.") from None
    if not np.isfinite(array).all():
        raise PrivacyError("An array of a question holds numbers that are not finite.")
    fits = array.ndim == 1 + rows and d in (None, *array.shape[-1:])
    if below is not None:
        distinct = len({*array.tolist()}) == array.size
        fits = fits and distinct and bool(((array >= 0) & (array < below)).all())
    if not fits:
        raise PrivacyError("An array of a question does not fit to the parameters of the model.")
    return array


def coordinates(value: Any, d: int) -> Coordinates:
    """Coordinates of d parameters."""
    if not isinstance(value, dict) or set(value) != {"is", "location", "scaling"}:
        raise PrivacyError("Coordinates do not have their parts.")
    location = _array(value["location"], "reals", d, None)
    scaling = _array(value["scaling"], "reals", d, None, rows=True)
    if value["is"] != "Coordinates" or len(scaling) != d:
        raise PrivacyError("Coordinates do not fit to the parameters of the model.")
    return Coordinates(location, scaling)


# -- queries --------------------------------------------------------------------------------------


def encoded_query(query: Query) -> dict[str, Any]:
    """A query, without its grid: the noise is the owner's."""
    sum_: dict[str, Any] = {"is": type(query.sum).__name__}
    if isinstance(query.sum, VectorSum):
        sum_ |= {"norm": query.sum.norm}
    elif isinstance(query.sum, IntervalSum):
        sum_ |= {"lower": query.sum.lower, "upper": query.sum.upper}
    elif not isinstance(query.sum, NormCounts):
        raise PrivacyError(f"A {type(query.sum).__name__} cannot be asked of owners.")
    return {"mechanism": query.mechanism, "of": encoded(query.of), "sum": sum_}


def decoded_query(
    message: Any, kinds: Mapping[str, Any], d: int, grid: Grid, neighboring: Neighboring
) -> Query:
    """The query of a message, with the noise of this grid; PrivacyError for what may not be."""
    if not isinstance(message, dict) or set(message) != {"mechanism", "of", "sum"}:
        raise PrivacyError("A query does not have its parts.")
    of, given = decoded(message["of"], kinds, d), message["sum"]
    if not isinstance(message["mechanism"], str) or not isinstance(given, dict):
        raise PrivacyError("A query does not have its parts.")
    sum_: VectorSum | IntervalSum | NormCounts
    what = set(given), given.get("is")
    numbers = {"is", "lower", "upper"}
    scalar = isinstance(of, LogRatio | EnergyError)
    if what == ({"is", "norm"}, "VectorSum") and not scalar:
        size, sign = getattr(of, "size", d), getattr(of, "nonnegative", False)
        sum_ = VectorSum(grid, neighboring, size, positive("norm", given["norm"]), sign)
    elif what == ({"is"}, "NormCounts") and not scalar:
        sum_ = NormCounts(grid, neighboring)
    elif what == (numbers, "IntervalSum") and scalar:
        ends = [given["lower"], given["upper"]]
        if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in ends):
            raise PrivacyError("An interval of a question is not one of numbers.")
        lower, upper = map(float, ends)
        if not (-math.inf < lower <= 0.0 <= upper < math.inf):
            raise PrivacyError("An interval of a question must be finite, and hold 0.")
        sum_ = IntervalSum(grid, neighboring, lower, upper)
    else:
        raise PrivacyError("A query asks for a sum that is not of its kind.")
    if sum_.told is not None:
        raise PrivacyError("A bound of a question is too small or too large to compute with.")
    return Query(message["mechanism"], of, sum_)
