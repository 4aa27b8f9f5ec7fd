"""Records measured against a reference point: what is left after the score there was released.

The anchored sampler pays once for the sum of the score vectors g_i(0), and afterwards only for
changes.  :class:`TiltedEngine` turns the log-likelihood l_i(z) of a unit into l_i(z) - g_i(0) . z,
and its score vector into g_i(z) - g_i(0), which is exactly 0 at z = 0; samplers do not notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pymc_dp.rows.interfaces import Coordinates, Engine, Scores
from pymc_dp.rows.linear import LinearRows
from pymc_dp.rows.predicted import slopes_in
from pymc_dp.rows.sparse import SparseBlock


class TiltedEngine:
    """The records of an engine, minus their linearisation at z = 0.

    Where d phi / d z does not depend on z, as in linear predictors and group effects, scores are
    subtracted row by row, and a score vector costs what it costs without a reference.  Elsewhere a
    row has the scores s and -s0 at twice as many shared values, those at z and those at 0.

    The reference is private: it is made at the first use in a process, after the ledger has been
    charged, and is not pickled.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._reference: Scores | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reference": None}

    @property
    def d(self) -> int:
        """Number of parameters."""
        return self.engine.d

    @property
    def n_units(self) -> int:
        """Number of privacy units."""
        return self.engine.n_units

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates z; the reference is their origin."""
        return self.engine.coordinates

    @property
    def reads(self) -> int:
        """How often the private arrays were asked for."""
        return self.engine.reads

    def constant_maps(self) -> list[list[bool]]:
        """Per group and cut, whether d phi / d z is the same for all z."""
        return self.engine.constant_maps()

    def synthetic(self) -> TiltedEngine:
        """The same functions on made-up data."""
        return TiltedEngine(self.engine.synthetic())

    def with_coordinates(self, coordinates: Coordinates) -> TiltedEngine:
        """The same records in other coordinates, whose origin is the new reference."""
        return TiltedEngine(self.engine.with_coordinates(coordinates))

    def part(self, units: slice) -> TiltedEngine:
        """The records of some units alone, with the same bits."""
        return TiltedEngine(self.engine.part(units))

    def reference(self) -> Scores:
        """Scores at z = 0."""
        if self._reference is None:
            self._reference = self.engine.scores(np.zeros(self.d))
        return self._reference

    # -- evaluation -----------------------------------------------------------------------------

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) l_i(z) - g_i(0) . z."""
        linear = self.engine.work(self.reference(), np.zeros(self.d), z, np.ones(1))
        return np.subtract(self.engine.log_likelihood(z), linear, out=linear)

    def scores(self, z: np.ndarray) -> Scores:
        """Changes of the scores of every row between 0 and z."""
        reference = self.reference()
        found = self.engine.scores(z)
        for g, fixed in enumerate(self.engine.constant_maps()):
            rows, maps = found.rows[g], found.maps[g]
            for k, constant in enumerate(fixed):
                s, s0 = rows[k], reference.rows[g][k]
                if s is None or s0 is None:
                    continue
                if constant:
                    s -= s0
                else:
                    rows[k] = np.stack([s, -s0], axis=1).reshape(2 * len(s), -1)
                    maps[k] = _side_by_side(maps[k], reference.maps[g][k], len(s))
        return found

    def vectors(self, scores: Scores) -> Iterator[tuple[slice, np.ndarray]]:
        """Changes g_i(z) - g_i(0) of all units, as blocks (units, (d, size of the block))."""
        return self.engine.vectors(scores)

    @property
    def divisible(self) -> bool:
        """Whether vectors of some units can be made without those of the others."""
        return self.engine.divisible

    def sparse_vectors(self, scores: Scores, units: slice) -> Iterator[tuple[slice, SparseBlock]]:
        """Changes of some units, without the coordinates in which they are 0 if these are many."""
        return self.engine.sparse_vectors(scores, units)

    def linear(self) -> LinearRows | None:
        """The rows of the engine, with the slopes at z = 0 subtracted."""
        rows = self.engine.linear()
        return None if rows is None else rows.minus(slopes_in(self.reference()))

    def remember(self, z: np.ndarray, moved: np.ndarray) -> None:
        """Left to the engine, whose vectors these are."""
        self.engine.remember(z, moved)

    def forget(self) -> None:
        """Keep nothing of an earlier chain but the reference."""
        self.engine.forget()

    def work(
        self, scores: Scores, start: np.ndarray, end: np.ndarray, scale: np.ndarray
    ) -> np.ndarray:
        """(n_units,) scale_i * (g_i(z) - g_i(0)) . (end - start)."""
        return self.engine.work(scores, start, end, scale)


def _side_by_side(here: np.ndarray | None, there: np.ndarray | None, width: int) -> np.ndarray:
    """The maps of `width` numbers per row at two places, as one of pairs of them."""
    assert here is not None and there is not None
    d = here.shape[1]
    parts = [matrix.reshape(-1, width, d) for matrix in (here, there)]
    return np.stack(parts, axis=2).reshape(-1, d)
