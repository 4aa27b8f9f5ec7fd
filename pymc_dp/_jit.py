"""Numba compilation with a disk cache wherever there is a place for one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

# Intel's vector library rounds exp and log differently from the scalar code at the end of a block;
# a record would not give the same bits wherever it stands. Read when numba is first imported.
os.environ.setdefault("NUMBA_DISABLE_INTEL_SVML", "1")

import numba
from numba import njit

__all__ = ["compiled"]

if getattr(numba.config, "USING_SVML", False):
    warnings.warn(
        "numba was imported before pymc_dp and uses Intel's vector mathematics, with which a "
        "record may be rounded differently according to its place. Set NUMBA_DISABLE_INTEL_SVML=1 "
        "before Python starts: without it, guarantees for users with several rows and for "
        "neighboring='add_or_remove_one' hold up to rounding only.",
        UserWarning,
        stacklevel=2,
    )

F = TypeVar("F", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[F], F]:
    """``numba.njit(cache=True, nogil=True, **options)``, uncached where nothing can be written.

    Threads may run it side by side (:mod:`pymc_dp.threads`).  In a read-only
    installation without a writable user cache directory ``cache=True`` raises at decoration, and
    the package could not be imported.
    """

    def decorate(function: F) -> F:
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:
            return njit(nogil=True, **options)(function)

    return decorate
