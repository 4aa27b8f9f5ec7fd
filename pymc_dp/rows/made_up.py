"""How long the scores of made-up records are, by the law of their outcomes: a public matter.

A forecast needs the tail of the scores, which differs from model to model.  Features are made up,
outcomes have the law that the model gives them at a public point, and coordinates are those in
which the posterior is white; no record is read.
"""

from __future__ import annotations

import numpy as np

from pymc_dp.rows.ancestry import ancestors_without_shapes
from pymc_dp.rows.contributions import ExpectedCurvature
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.expected import expected_curvatures, law_unknown, norms_of_outcomes
from pymc_dp.rows.interfaces import Coordinates
from pymc_dp.rows.store import RecordStore, RowGroup

_ROWS = 1000
#: Where more laws of outcomes are not found, and from this condition number of the curvature on,
#: the place says little; more parameters take too long.
_NOT_FOUND, _CONDITION, _LARGEST = 0.05, 1e8, 60

Norms = tuple[np.ndarray, np.ndarray]


def made_up_norms(engine: RowEngine, theta: np.ndarray) -> Norms | None:
    """Norms of scores in whitened coordinates, and the parts of the records that have them.

    `theta` is a public point; of `engine` only functions, types and shapes are used.  Norms, (k,),
    are those of one record: the mean of their squares is d.  None where the law of the outcomes is
    not known, or the point is no guide.
    """
    d = engine.d
    if d > _LARGEST or law_unknown(engine) or engine.index_blocks(theta):
        return None
    if not engine.one_row_per_unit:  # how many rows a unit has is private
        return None
    made = _with_features(engine, np.random.default_rng(0)).each_alone()
    with np.errstate(all="ignore"):
        spec = ExpectedCurvature(Coordinates(theta, np.eye(d)))
        made = made.with_coordinates(spec.coordinates)
        total = np.sum([v.sum(axis=1) for _, v in expected_curvatures(made, False)], axis=0)
        values, vectors = np.linalg.eigh(spec.matrix(total / _ROWS))
        if not (np.isfinite(values).all() and values[0] * _CONDITION > values[-1] > 0.0):
            return None
        made = made.with_coordinates(Coordinates(theta, vectors / np.sqrt(values)))
        norms, weights = norms_of_outcomes(made)
    if weights.sum() < (1.0 - _NOT_FOUND) * _ROWS:
        return None
    return norms, weights / weights.sum()


def _with_features(engine: RowEngine, rng: np.random.Generator) -> RowEngine:
    """Normal features, positive numbers elsewhere, and labels that are as likely as each other."""
    [group] = engine.groups
    graph = group.functions.graph
    designs = {cut.row_data for cut in graph.cuts if cut.kind == "dot"}
    arrays = []
    for leaf, blank in zip(graph.leaves, group.store.synthetic(_ROWS).read(), strict=True):
        sizes = [
            size for label, size in graph.lookups if leaf.block in ancestors_without_shapes([label])
        ]
        if blank.dtype.kind == "f":
            made = rng.standard_normal(blank.shape)
            if leaf.block not in designs and blank.ndim == 1:
                made = np.exp(made / 2.0)
        else:
            made = np.floor(rng.random(blank.shape) * min(sizes, default=2))
        array = made.astype(blank.dtype)
        array.flags.writeable = blank.flags.writeable
        arrays.append(array)
    part = RowGroup(group.functions, RecordStore(arrays), None)
    return RowEngine([part], engine.parameters, _ROWS, engine.coordinates)
