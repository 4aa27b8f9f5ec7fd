"""Functions compiled from graphs, which compiled loops call through their addresses.

The types of the loops are those of their arguments alone, so they are compiled and cached without
the functions. Numbers that depend on data are inputs: no compile cache holds them. Where a function
raises (the inverse of a singular matrix), its results are not numbers: an error would not leave an
address, which would return 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cfunc, types
from pytensor.graph.basic import Variable

from pymc_dp.rows.functions import compile_function

KernelGraph = tuple[list[Variable], list[Variable]]


@dataclass(frozen=True, eq=False)
class Kernel:
    """What loops read, and functions that must live as long as their addresses are used."""

    reads: Any
    functions: list[Any]

    @property
    def arguments(self) -> tuple[Any, np.ndarray]:
        """What compiled loops take: what is read, and addresses."""
        return self.reads, np.array([f.address for f in self.functions], dtype=np.int64)


_VECTOR, _MATRIX = types.float64[::1], types.float64[:, ::1]


def _jitted(graph: KernelGraph) -> Any:
    return compile_function(*graph).vm.jit_fn


# loops, because a slice that is assigned takes numba seconds to compile


def callable_rows(graph: KernelGraph) -> Any:
    """From (K, m) eta and the numbers of records to (K + 1, m) values and derivatives by eta."""
    function = _jitted(graph)

    def rows(eta, numbers, found):  # type: ignore[no-untyped-def]
        try:
            [value] = function(eta, numbers)
        except Exception:
            found.fill(np.nan)
            return np.nan
        for j in range(found.shape[0]):
            for i in range(found.shape[1]):
                found[j, i] = value[j, i]
        return 0.0

    return cfunc(types.float64(_MATRIX, _MATRIX, _MATRIX))(rows)


def callable_shared(graph: KernelGraph) -> Any:
    """From theta, centre, constants and an adjoint to shared values, and what it pulls back."""
    function = _jitted(graph)

    def shared(theta, centre, constants, adjoint, values, gradient):  # type: ignore[no-untyped-def]
        try:
            found, slope = function(theta, centre, constants, adjoint)
        except Exception:
            values.fill(np.nan)
            gradient.fill(np.nan)
            return np.nan
        for k in range(values.shape[0]):
            values[k] = found[k]
        for k in range(gradient.shape[0]):
            gradient[k] = slope[k]
        return 0.0

    return cfunc(types.float64(*[_VECTOR] * 6))(shared)


def callable_kernel(graph: KernelGraph) -> Any:
    """The whole estimate of a sample: d and the gradient are written."""
    function = _jitted(graph)

    def estimate(theta, centre, numbers, d, gradient, design, others):  # type: ignore[no-untyped-def]
        try:
            value, found, slope = function(theta, centre, numbers, design, others)
        except Exception:
            d.fill(np.nan)
            gradient.fill(np.nan)
            return np.nan
        for i in range(d.shape[0]):
            d[i] = found[i]
        for k in range(gradient.shape[0]):
            gradient[k] = slope[k]
        return value[0]

    signature = types.float64(_VECTOR, _VECTOR, _VECTOR, _VECTOR, _VECTOR, _MATRIX, _MATRIX)
    return cfunc(signature)(estimate)


def callable_prior(graph: KernelGraph) -> Any:
    """The log-prior: takes theta and room for its gradient."""
    function = _jitted(graph)

    def log_prior(theta, gradient):  # type: ignore[no-untyped-def]
        try:
            value, slope = function(theta)
        except Exception:
            gradient.fill(np.nan)
            return np.nan
        for k in range(gradient.shape[0]):
            gradient[k] = slope[k]
        return value[0]

    return cfunc(types.float64(_VECTOR, _VECTOR))(log_prior)
