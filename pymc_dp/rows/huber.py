"""Consistent clipping: a likelihood whose own score vectors are bounded.

A record that sees the parameters through one linear predictor v_i, with direction
u_i = d v_i / d z and a concave term l_i(v), has the score vector l_i'(v_i) u_i.  Clipping it to
norm b is clipping l_i' to +-b/|u_i|, and that is the derivative of another concave function: l_i
between two knots, continued by its tangents beyond (Huber 1964).  With this one in place of l_i the
clipped score vectors *are* the gradient of the stated likelihood, and a sampler that clips targets
that robust posterior exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_dp.rows import concave, loops
from pymc_dp.rows.engine import Coordinates, RowEngine, Scores
from pymc_dp.rows.predictor import FAMILIES, Predictor

__all__ = ["HuberEngine"]

#: Rows at once while the numbers of the rows are found.
_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class _Rows:
    """What each row is, whatever the coordinates: v = offset + weights . (values at the cuts)."""

    a: np.ndarray
    b: np.ndarray
    offset: np.ndarray
    weights: list[np.ndarray | None]

    def part(self, rows: slice) -> _Rows:
        return _Rows(
            self.a[rows],
            self.b[rows],
            self.offset[rows],
            [None if w is None else np.ascontiguousarray(w[:, rows]) for w in self.weights],
        )


@dataclass(frozen=True, eq=False)
class _Knots:
    """The predictor at z = 0, and where each row is continued linearly."""

    origin: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    def part(self, rows: slice) -> _Knots:
        return _Knots(self.origin[rows], self.lower[rows], self.upper[rows])


class _Private:
    """Values of records, made at the first use in a process and never pickled."""

    def __init__(self) -> None:
        self.rows: _Rows | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": None}


class HuberEngine(RowEngine):
    """Per-unit Huberised log-likelihoods, and score vectors of norm at most `clip_norm`.

    Parameters
    ----------
    engine : RowEngine
    predictor : Predictor
        From :func:`pymc_dp.rows.predictor.recognise`.
    clip_norm : float
        Bound on the l2 norm of a score vector in z, up to rounding.

    Notes
    -----
    Log-likelihoods are given up to a constant of the record, of which only differences remain.  A
    record outside the support of the likelihood contributes nothing.
    """

    def __init__(self, engine: RowEngine, predictor: Predictor, clip_norm: float) -> None:
        super().__init__(engine.groups, engine.parameters, engine.n_units, engine.coordinates)
        self.predictor = predictor
        self.clip_norm = clip_norm
        self._family = FAMILIES.index(predictor.family)
        self._private = _Private()
        self._knots: _Knots | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_knots": None}

    def synthetic(self) -> HuberEngine:
        """The same functions on made-up data."""
        return HuberEngine(super().synthetic(), self.predictor, self.clip_norm)

    def with_coordinates(
        self, coordinates: Coordinates, clip_norm: float | None = None
    ) -> HuberEngine:
        """The same records in other coordinates, with score vectors bounded there.

        Parameters
        ----------
        coordinates : Coordinates
        clip_norm : float, optional
            Default: as before.
        """
        clip_norm = self.clip_norm if clip_norm is None else clip_norm
        if coordinates is self.coordinates and clip_norm == self.clip_norm:
            return self
        moved = HuberEngine(super().with_coordinates(coordinates), self.predictor, clip_norm)
        moved._private = self._private
        return moved

    def part(self, units: slice) -> HuberEngine:
        """The records of some units alone, with the same bits."""
        part = HuberEngine(super().part(units), self.predictor, self.clip_norm)
        part._private.rows = self._rows().part(units)
        part._knots = self._knot_values().part(units)
        return part

    # -- records --------------------------------------------------------------------------------

    def _rows(self) -> _Rows:
        if self._private.rows is None:
            n = self.n_units
            arrays = self.groups[0].store.read()
            a, b, offset = np.empty(n), np.empty(n), np.empty(n)
            weights: list[np.ndarray] = []
            for start in range(0, n, _BLOCK):
                where = slice(start, min(start + _BLOCK, n))
                block = [array[where] for array in arrays]
                a[where], b[where] = self.predictor.coefficients(block)
                offset[where], found = self.predictor.affine_form(block)
                if not weights:
                    weights = [np.empty((len(w), n)) for w in found]
                for w, part in zip(weights, found, strict=True):
                    w[:, where] = part
            self._private.rows = _Rows(a, b, offset, list(weights))
        return self._private.rows

    def _knot_values(self) -> _Knots:
        if self._knots is None:
            rows = self._rows()
            phis, _ = self.groups[0].functions.shared(self.coordinates.location)
            origin = rows.offset.copy()
            self._add_products(0, rows.weights, [np.ravel(phi) for phi in phis], origin)
            bounds = np.empty(self.n_units)
            for where, vectors in self.vectors(self._directions()):
                concave.norms(vectors, bounds[where])
            with np.errstate(divide="ignore"):
                np.divide(self.clip_norm, bounds, out=bounds)
            lower, upper = np.empty(self.n_units), np.empty(self.n_units)
            concave.knots(self._family, rows.a, rows.b, bounds, lower, upper)
            self._knots = _Knots(origin, lower, upper)
        return self._knots

    def _directions(self) -> Scores:
        """The derivatives of v at the cuts, in the place of scores."""
        jacobians = self.groups[0].functions.constant_jacobians
        maps = [None if j is None else j @ self.coordinates.scaling for j in jacobians]
        return Scores([self._rows().weights], [maps])

    def _predictors(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) v_i at z."""
        v = self.work(self._directions(), z, np.ones(1))
        v += self._knot_values().origin
        return v

    # -- evaluation -----------------------------------------------------------------------------

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """(n_units,) Huberised log-likelihood of every unit at z, up to a constant of the unit."""
        rows, knots, v = self._rows(), self._knot_values(), self._predictors(z)
        concave.huber_log_likelihoods(self._family, rows.a, rows.b, knots.lower, knots.upper, v)
        return v

    def scores(self, z: np.ndarray) -> Scores:
        """Scores at the cuts of every row at z."""
        rows, knots, v = self._rows(), self._knot_values(), self._predictors(z)
        concave.huber_slopes(self._family, rows.a, rows.b, knots.lower, knots.upper, v)
        loops.clean(v[None])
        return Scores(
            [[None if w is None else w * v for w in rows.weights]], self._directions().maps
        )
