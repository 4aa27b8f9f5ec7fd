"""What records see of the parameters: coordinates in which a likelihood may be simpler.

The shared values of a likelihood (:mod:`pymc_dp.records.graph`) may be non-linear in the
parameters: the group means of a non-centred hierarchy ``(mu + tau * z)[g]``, coefficients ``tau *
z`` with a shared scale, a curve ``b + a**2``.  The posterior is then curved, whatever the data say,
although the likelihood of the shared values themselves is near normal in large data.  Here these
*effects* replace the parameters, so that records are asked about something simple; how the
parameters follow from the effects is public.  It does not matter how a model is written: shared
values that meet in the rows alone are merged first (:mod:`pymc_dp.rows.merging`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import MergeOptimizer

from pymc_dp.records.ancestry import ancestors_without_shapes
from pymc_dp.records.graph import ParameterVector, RowGraph
from pymc_dp.rows.functions import compile_parameter_function, jacobian_of
from pymc_dp.rows.groups import RowGroup
from pymc_dp.rows.merging import merged

#: Derivatives that differ by less than this part of the largest are those of something linear.
_LINEAR = 1e-9
#: Singular values below this part of the largest, in prior widths, make effects redundant.
_SINGULAR = 1e-6


@dataclass(frozen=True, eq=False)
class Seen:
    """Effects that replace the parameters of a likelihood.

    `effects` are in terms of the model's value variables: those of them that records see directly,
    and the shared values that are non-linear in several.  `parameters` is the (k,) vector of all
    entries, k <= d.  Its first `n_direct` entries are parameters themselves, the others are mixed.
    `graphs` are the likelihood as a function of the effects, group by group.  `function` maps (d,)
    unconstrained parameters to (k,) effects.
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
) -> Iterator[Seen]:
    """The effects of a likelihood that is non-linear in its parameters.

    `groups` have the compiled shared values of `graphs`.  `places`, (m, d), are public points at
    which derivatives are looked at: draws from the prior.

    Yields those of the merged graphs, then those of `graphs` as they are cut.  Yields none where no
    shared value is non-linear in several parameters, or where effects are redundant (more of them
    than parameters, functions of each other).
    """
    known = _known(groups, places)
    together = tuple(merged(graph) for graph in graphs)
    candidates = [tuple(graphs)]
    if any(new is not old for new, old in zip(together, graphs, strict=True)):
        phis = {cut.phi: None for graph in together for cut in graph.cuts}
        new = [phi for phi in phis if phi not in known]
        known |= _evaluated(new, parameters, places, compile_kwargs)
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
            varies = k in group.functions.varying
            mixed = varies and _mixes([jacobians[k] for _, jacobians in at])
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
    matrices = [jacobian_of(value, theta) for value in values]
    varies = [theta in ancestors_without_shapes([matrix]) for matrix in matrices]
    moving = [matrix for matrix, varying in zip(matrices, varies, strict=True) if varying]
    function = compile_parameter_function([theta], [*values, *moving], compile_kwargs)
    at = [function(place) for place in places]
    found, j = {}, len(phis)
    for k, (phi, varying) in enumerate(zip(phis, varies, strict=True)):
        found[phi] = _Shape(np.shape(at[0][k]), varying and _mixes([row[j] for row in at]))
        j += varying
    return found


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
    first = _equal([cut.phi for graph in graphs for cut in graph.cuts])
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


def _equal(phis: Sequence[Variable]) -> dict[Variable, Variable]:
    """For each shared value the first of those that are computed alike.

    Likelihoods that share parameters, and predictors that take two columns of one matrix, have a
    copy each.
    """
    graph = FunctionGraph(outputs=list(phis), clone=True)
    MergeOptimizer().rewrite(graph)
    firsts: dict[Variable, Variable] = {}
    for phi, merged_phi in zip(phis, graph.outputs, strict=True):
        firsts.setdefault(merged_phi, phi)
    return {p: firsts[m] for p, m in zip(phis, graph.outputs, strict=True)}


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
