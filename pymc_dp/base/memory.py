"""Values at the last points of a chain: the current one and the proposed one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def at_last_two(
    memory: dict[bytes, np.ndarray], z: np.ndarray, compute: Callable[[], np.ndarray]
) -> np.ndarray:
    """The value at z (d,), from a memory of the two points that were used last.

    The memory is changed in place; its owner decides who may see it and when it is emptied.
    """
    key = z.tobytes()
    if key in memory:  # the point was used: it is now the newer one
        memory[key] = memory.pop(key)
    else:
        if len(memory) >= 2:
            del memory[next(iter(memory))]
        memory[key] = compute()
    return memory[key]
