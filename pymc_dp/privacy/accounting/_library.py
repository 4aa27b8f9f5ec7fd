"""dp-accounting, and what it takes for granted about sensitivities."""

from __future__ import annotations

from typing import Any


def library() -> Any:
    """dp-accounting, or an ImportError that says how to install it."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ImportError(
            "Accounting for subsampled releases needs the library dp-accounting, which is not "
            "installed: pip install pymc_dp[accounting]"
        ) from error
    return dp_accounting


def relation(neighboring: str) -> Any:
    """A neighbouring relation as dp-accounting names it."""
    relations = library().NeighboringRelation
    return relations.REPLACE_ONE if neighboring == "replace_one" else relations.ADD_OR_REMOVE_ONE


def true_multiplier(noise_multiplier: float, neighboring: str) -> float:
    """σ/Δ: under replace_one, two contributions of norm C are up to 2C apart."""
    return noise_multiplier / 2.0 if neighboring == "replace_one" else noise_multiplier
