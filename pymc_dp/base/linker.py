"""PyTensor's Numba backend without fastmath, for functions that threads may run side by side."""

from __future__ import annotations

from typing import Any

import pymc_dp.base.jit  # noqa: F401  before numba: sets how it rounds

# isort: split
import pytensor
from pytensor.compile.mode import Mode, get_mode
from pytensor.link.numba.dispatch.basic import numba_njit
from pytensor.link.numba.linker import NumbaLinker

#: For functions called once: no compilation, no compiler needed, and constants stay in the graph.
INTERPRETED = Mode(linker="py", optimizer=None)


class ExactLinker(NumbaLinker):
    """Numba's linker: every row of a block gives the same bits wherever it stands.

    A function that was pickled is compiled again where it arrives, and PyTensor's default there is
    ``fastmath``: so the linker, which travels with the function, turns that off.
    """

    def fgraph_convert(self, fgraph: Any, **kwargs: Any) -> Any:
        """Convert the functions of all operations, without fastmath."""
        with pytensor.config.change_flags(numba__fastmath=False):
            return super().fgraph_convert(fgraph, **kwargs)

    def jit_compile(self, fn_and_cache: Any) -> Any:
        """Compile without holding the lock of the interpreter while it runs."""
        function, key = fn_and_cache
        cached = key is not None
        return numba_njit(
            function.py_func, fastmath=False, final_function=True, cache=cached, nogil=True
        )


def exact(mode: Any) -> Mode:
    """The mode, with this linker if it compiles with Numba."""
    found = get_mode(mode)
    if isinstance(found.linker, NumbaLinker):
        return Mode(ExactLinker(), found.provided_optimizer)
    return found


def code_of(function: Any) -> Any:
    """What Numba made of a function, which keeps nothing between calls; None if it did not."""
    exactly = isinstance(function.maker.linker, ExactLinker)
    return function.vm.jit_fn if exactly else None
