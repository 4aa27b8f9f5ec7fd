"""What records see of the parameters: coordinates in which a likelihood may be simpler.

The shared values of a likelihood (:mod:`pymc_dp.rows.cuts`) may be non-linear in the parameters:
the group means of a non-centred hierarchy ``(mu + tau * z)[g]``, coefficients ``tau * z`` with a
shared scale, a curve ``b + a**2``.  The posterior is then curved, whatever the data say, although
the likelihood of the shared values themselves is near normal in large data.  Here these *effects*
replace the parameters, so that records are asked about something simple; how the parameters follow
from the effects is public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from pymc_dp.rows.ancestry import ancestors_without_shapes
from pymc_dp.rows.cuts import RowGraph
from pymc_dp.rows.functions import ParameterVector, compile_parameter_function
from pymc_dp.rows.store import RowGroup

__all__ = ["Seen", "see"]

#: Singular values below this part of the largest, in prior widths, make effects redundant.
_SINGULAR = 1e-6


@dataclass(frozen=True, eq=False)
class Seen:
    """Effects that replace the parameters of a likelihood.

    Attributes
    ----------
    effects : tuple of Variable
        In terms of the model's value variables: those of them that records see directly, and the
        shared values that are non-linear in several.
    parameters : ParameterVector
        (k,) vector of all entries, k <= d.
    graphs : tuple of RowGraph
        The likelihood as a function of the effects, group by group.
    n_direct : int
        The first entries are parameters themselves, the others are mixed.
    function : callable
        (d,) unconstrained parameters -> (k,) effects.
    """

    effects: tuple[Variable, ...]
    parameters: ParameterVector
    graphs: tuple[RowGraph, ...]
    n_direct: int
    function: Callable[[np.ndarray], np.ndarray]

    def symbolic(self, parameters: ParameterVector) -> Variable:
        """(k,) effects as a function of ``parameters.theta``."""
        return _flat(self.effects, parameters)


def _flat(effects: Sequence[Variable], parameters: ParameterVector) -> Variable:
    values = parameters.substitute(effects)
    return pt.concatenate([pt.as_tensor(e).astype("float64").flatten() for e in values])


def see(
    groups: Sequence[RowGroup],
    graphs: Sequence[RowGraph],
    parameters: ParameterVector,
    places: np.ndarray,
    compile_kwargs: dict[str, Any] | None = None,
) -> Seen | None:
    """The effects of a likelihood that is non-linear in its parameters.

    Parameters
    ----------
    groups : sequence of RowGroup
        With the compiled shared values of `graphs`.
    graphs : sequence of RowGraph
    parameters : ParameterVector
    places : (m, d) ndarray
        Public points at which derivatives are looked at: draws from the prior.

    Returns
    -------
    Seen or None
        None where no shared value is non-linear in several parameters, or where effects are
        redundant (more of them than parameters, functions of each other).
    """
    mixed = _mixed(groups, places)
    if not mixed:
        return None
    leaves: dict[Variable, Variable] = {}  # shared value -> the input that takes its place
    direct: list[Variable] = []
    for group, graph in zip(groups, graphs, strict=True):
        sizes = group.functions.shared(places[0])[0]
        for phi, value in zip((c.phi for c in group.functions.ordered), sizes, strict=True):
            if phi in mixed and phi not in leaves:
                kind = pt.TensorType("float64", shape=np.shape(value))
                leaves[phi] = kind(name=f"effect{len(leaves)}")
        behind = ancestors_without_shapes([c.phi for c in graph.cuts if c.phi not in mixed])
        direct += [v for v in parameters.values if v in behind and v not in direct]
    shapes = dict(zip(parameters.values, parameters.shapes, strict=True))
    inputs = [*direct, *leaves.values()]
    vector = ParameterVector.of(
        inputs, [*[shapes[v] for v in direct], *[leaf.type.shape for leaf in leaves.values()]]
    )
    effects = (*direct, *leaves)
    flat = _flat(effects, parameters)
    function = compile_parameter_function([parameters.theta], flat, compile_kwargs)
    if not _independent(function, vector.size, places):
        return None
    rebuilt = tuple(
        replace(
            graph,
            cuts=tuple(replace(cut, phi=leaves.get(cut.phi, cut.phi)) for cut in graph.cuts),
        )
        for graph in graphs
    )
    n_direct = sum(int(np.prod(shapes[v], dtype=int)) for v in direct)
    return Seen(effects, vector, rebuilt, n_direct, lambda theta: np.asarray(function(theta)))


def _mixed(groups: Sequence[RowGroup], places: np.ndarray) -> set[Variable]:
    """Shared values with entries that are non-linear functions of several parameters."""
    mixed = set()
    for group in groups:
        for k in group.functions.varying:
            for theta in places:
                jacobian = group.functions.shared(theta)[1][k]
                if jacobian is not None and np.any(np.count_nonzero(jacobian, axis=1) > 1):
                    mixed.add(group.functions.ordered[k].phi)
    return mixed


def _independent(
    function: Callable[[np.ndarray], np.ndarray], size: int, places: np.ndarray
) -> bool:
    """Whether effects can be varied one by one, almost everywhere."""
    d = places.shape[1]
    if size > d:
        return False
    widths = places.std(axis=0)
    for theta in places:
        columns = [
            function(theta + 1e-6 * w * e) - function(theta - 1e-6 * w * e)
            for w, e in zip(widths, np.eye(d), strict=True)
        ]
        jacobian = np.array(columns).T
        norms = np.linalg.norm(jacobian, axis=1)
        if not (np.isfinite(jacobian).all() and norms.all()):
            return False
        values = np.linalg.svd(jacobian / norms[:, None], compute_uv=False)
        if values[-1] < _SINGULAR * values[0]:
            return False
    return True
