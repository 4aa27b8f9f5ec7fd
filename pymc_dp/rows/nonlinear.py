"""What records see of the parameters: coordinates in which a likelihood may be simpler.

Shared values (:mod:`pymc_dp.records.graph`) may be non-linear in the parameters: group means
``(mu + tau * z)[g]``, coefficients ``tau * z``, a curve ``b + a**2``.  The posterior is then
curved, though the likelihood of shared values is near normal in large data.  Here these *effects*
replace the parameters; how parameters follow from effects is public.  Shared values that meet in
the rows are merged first (:mod:`pymc_dp.rows.merging`), however a model is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import ParameterVector, RowGraph
from pymc_dp.rows.functions import compile_parameter_function, jacobian_of
from pymc_dp.rows.groups import RowGroup
from pymc_dp.rows.merging import first_equal, merged

_LINEAR = 1e-9  # derivatives that differ by less than this part of the largest are constant
_SINGULAR = 1e-6  # singular values, in prior widths, below this part of the largest are redundant


@dataclass(frozen=True, eq=False)
class Seen:
    """Effects that replace the parameters of a likelihood.

    `effects` are value variables that records see directly, then shared values non-linear in
    several.  `parameters` has their k <= d entries, of which the first `n_direct` are parameters;
    `graphs` are the likelihood by group; `function` maps (d,) parameters to (k,) effects.
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
    parameters: ParameterVector,
    places: np.ndarray,
    compile_kwargs: dict[str, Any] | None = None,
) -> Iterator[Seen]:
    """The effects of a likelihood that is non-linear in its parameters, if any.

    Derivatives are taken at public `places`, (m, d).  Yields effects of the merged graphs, then of
    the graphs as cut; none if no shared value is non-linear in several parameters, or k > d, or
    they are functions of each other.
    """
    graphs = tuple(group.functions.graph for group in groups)
    together = tuple(merged(graph) for graph in graphs)
    known = _known(groups, places)
    candidates = [graphs]
    if together != graphs:
        new = {cut.phi: None for graph in together for cut in graph.cuts if cut.phi not in known}
        known |= _evaluated(list(new), parameters, places, compile_kwargs)
        candidates.insert(0, together)
    for candidate in candidates:
        seen = _seen(candidate, known, parameters, places, compile_kwargs)
        if seen is not None:
            yield seen


@dataclass(frozen=True)
class _Shape:
    """The shape of a shared value, and whether it is non-linear in several parameters."""

    shape: tuple[int, ...]
    mixed: bool


def _known(groups: Sequence[RowGroup], places: np.ndarray) -> dict[Variable, _Shape]:
    """What the compiled functions of groups tell of shared values."""
    found = {}
    for group in groups:
        at = [group.functions.shared(theta) for theta in places]
        for k, cut in enumerate(group.functions.ordered):
            mixed = k in group.functions.varying and _mixes([jacobians[k] for _, jacobians in at])
            found[cut.phi] = _Shape(np.shape(at[0][0][k]), mixed)
    return found


def _evaluated(
    phis: Sequence[Variable],
    parameters: ParameterVector,
    places: np.ndarray,
    compile_kwargs: dict[str, Any] | None,
) -> dict[Variable, _Shape]:
    """The same for differentiable shared values that no group has."""
    theta = parameters.theta
    values = parameters.substitute(phis)
    jacobians = [jacobian_of(value, theta) for value in values]
    function = compile_parameter_function([theta], [*values, *jacobians], compile_kwargs)
    at = [function(place) for place in places]
    return {
        phi: _Shape(np.shape(at[0][k]), _mixes([row[len(phis) + k] for row in at]))
        for k, phi in enumerate(phis)
    }


def _mixes(jacobians: Sequence[np.ndarray | None]) -> bool:
    """Whether some entry of a shared value is non-linear in several parameters, at some places."""
    matrices = np.array(jacobians)
    largest = np.abs(matrices).max(axis=(0, 2), initial=0.0)
    bends = ~(np.ptp(matrices, axis=0).max(axis=1, initial=0.0) <= _LINEAR * largest)
    several = np.any(np.count_nonzero(matrices, axis=2) > 1, axis=0)
    return bool(np.any(several & bends))


def _seen(
    graphs: Sequence[RowGraph],
    known: Mapping[Variable, _Shape],
    parameters: ParameterVector,
    places: np.ndarray,
    compile_kwargs: dict[str, Any] | None,
) -> Seen | None:
    # likelihoods that share parameters, and predictors of two columns, have a copy each
    first = first_equal([cut.phi for graph in graphs for cut in graph.cuts])
    leaves: dict[Variable, Variable] = {}  # shared value -> the input that takes its place
    direct: list[Variable] = []
    for graph in graphs:
        for cut in graph.cuts:
            phi = first[cut.phi]
            if known[cut.phi].mixed and phi not in leaves:
                kind = pt.TensorType("float64", shape=known[cut.phi].shape)
                leaves[phi] = kind(name=f"effect{len(leaves)}")
        behind = ancestors_without_shapes([c.phi for c in graph.cuts if not known[c.phi].mixed])
        direct += [v for v in parameters.values if v in behind and v not in direct]
    if not leaves:
        return None
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
            cuts=tuple(replace(cut, phi=leaves.get(first[cut.phi], cut.phi)) for cut in graph.cuts),
        )
        for graph in graphs
    )
    n_direct = sum(int(np.prod(shapes[v], dtype=int)) for v in direct)
    return Seen(effects, vector, rebuilt, n_direct, lambda theta: np.asarray(function(theta)))


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
