"""Designs and labels: what the records put into the places where they see the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytensor
from pytensor.graph.basic import Variable

from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.arithmetic import without_errors
from pymc_dp.records.graph import RowGraph


def columns_of(graph: RowGraph, data: Sequence[np.ndarray]) -> dict[Variable, np.ndarray]:
    """The row expression of every cut that has one, evaluated: (n, p) designs, (n,) labels.

    `data` is in the order of ``graph.leaves``, records first.
    """
    blocks = [leaf.block for leaf in graph.leaves]
    found: dict[Variable, np.ndarray] = {}
    for cut in graph.cuts:
        if cut.row_data is None or cut.row_data in found:
            continue
        [expression] = without_errors([cut.row_data], interpreted=True)
        evaluate = pytensor.function(blocks, expression, mode=INTERPRETED, on_unused_input="ignore")
        column = np.asarray(evaluate(*data))
        found[cut.row_data] = np.ascontiguousarray(
            column.astype("float64") if cut.kind == "dot" else column
        )
    return found
