"""Checks of numbers given by the user: one wording, and the argument is named."""

from __future__ import annotations

import math
import numbers
import sys
import warnings
from typing import Literal, TypeAlias

Neighboring: TypeAlias = Literal["replace_one", "add_or_remove_one"]

SMALLEST_EPSILON = 1e-3
#: Least and largest epsilon, and delta, of a budget.
_EPSILONS, _DELTAS = (SMALLEST_EPSILON, 1e6), (1e-300, 0.5)


def check_number(name: str, value: object) -> float:
    """Return `value` as a float; raise ValueError unless it is a finite real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    return number


def check_positive(name: str, value: object) -> float:
    """Return `value` as a float; raise ValueError unless it is positive and finite."""
    number = check_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be positive, not {number}.")
    return number


def check_integer(name: str, value: object, minimum: int) -> int:
    """Return `value` as an int; raise ValueError unless it is an integer >= `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, not {value!r}")
    return int(value)


def check_epsilon(epsilon: object) -> float:
    """Return `epsilon` as a float; raise ValueError unless it is positive and finite."""
    value = check_number("epsilon", epsilon)
    if value <= 0:
        raise ValueError(f"epsilon must be positive, not {value}; 1.0 is a common choice")
    return value


def check_delta(delta: object) -> float:
    """Return `delta` as a float; raise ValueError unless it lies strictly between 0 and 1."""
    value = check_number("delta", delta)
    if not 0 < value < 1:
        raise ValueError(
            f"delta must lie strictly between 0 and 1, not {value}; take it well below "
            "1/(number of records), for instance 1e-6"
        )
    return value


def check_budget(epsilon: object, delta: object) -> tuple[float, float]:
    """Return a budget as floats; raise ValueError unless a ledger can count it. Ledgers add units
    of 2^-40 squared mu in 64 bits: a budget has several hundred to 2^62 of them.
    """
    budget = check_epsilon(epsilon), check_delta(delta)
    facts = ("epsilon", budget[0], _EPSILONS), ("delta", budget[1], _DELTAS)
    for name, value, (low, high) in facts:
        if not low <= value <= high:
            raise ValueError(
                f"{name} of a budget must be from {low:g} to {high:g}, not {value:g}: privacy "
                "losses beyond are not counted exactly"
            )
    return budget


def check_probability(name: str, value: object) -> float:
    """Return `value` as a float; raise ValueError unless it lies in (0, 1]."""
    probability = check_number(name, value)
    if not 0 < probability <= 1:
        raise ValueError(f"{name} must be positive and at most 1, not {probability}")
    return probability


def check_share(value: object) -> float:
    """Return the part of what is left of a budget that may be used."""
    share = check_number("share", value)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must be in (0, 1], got {share}.")
    return share


def check_neighboring(value: object) -> Neighboring:
    """Return `value`; raise ValueError unless it names a neighbouring relation."""
    if value not in ("replace_one", "add_or_remove_one"):
        raise ValueError(f"neighboring must be 'replace_one' or 'add_or_remove_one', not {value!r}")
    return value


def counted(n: int, what: str) -> str:
    """A number of things, in words."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def warn(text: str) -> None:
    """Warn the user, at the line that has called the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals["__name__"].startswith("pymc_dp"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)
