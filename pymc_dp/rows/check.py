"""A numerical check of what the walk over the graph has proved, on synthetic data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.utils import rewrite_graph

from pymc_dp.errors import NotFactorizable
from pymc_dp.rows.ancestry import array_of
from pymc_dp.rows.cuts import Cut, RowGraph
from pymc_dp.rows.functions import INTERPRETED
from pymc_dp.rows.total import without_errors


def _synthetic(
    source: Variable, shape: tuple[int, ...], largest: int, rng: np.random.Generator
) -> np.ndarray:
    """Data of the shape and type of `source`: in (0, 1) if real, in 0..largest if integer."""
    dtype = np.dtype(source.type.dtype)
    if dtype.kind == "f":
        return rng.uniform(0.1, 0.9, shape).astype(dtype)
    return rng.integers(0, largest + 1, shape).astype(dtype)


def check_numerically(
    raw: dict[str, Variable],
    graph: RowGraph,
    values: Sequence[Variable],
    shapes: Mapping[Variable, tuple[int, ...]],
    public: set[Variable],
) -> None:
    """Perturb one synthetic record: all other terms of PyMC's own graph must keep their bits.

    The rebuilt row graph must agree with PyMC's.  Public data stay as they are.  Labels that are
    computed from data may not fit synthetic ones; the structural proof then stands alone.
    """
    rng = np.random.default_rng(20211)
    sources = [leaf.source for leaf in graph.leaves]
    blanks = [source.type() for source in sources]
    terms = []
    for logp in raw.values():
        terms.append(logp if logp.type.ndim == 1 else logp.sum(tuple(range(1, logp.type.ndim))))
    # clone first: the model's own graph must not be rewritten in place
    terms = clone_replace(terms, dict(zip(sources, blanks, strict=True)), rebuild_strict=False)
    terms = rewrite_graph(
        terms, include=("canonicalize", "local_remove_check_parameter"), clone=False
    )
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    shared_etas = [full_eta(cut, graph.n_rows) for cut in graph.cuts]
    rebuilt = clone_replace(
        [graph.loglik],
        {cut.eta: eta for cut, eta in zip(graph.cuts, shared_etas, strict=True)},
        rebuild_strict=False,
    )[0]
    blocks = [leaf.block for leaf in graph.leaves]
    function = pytensor.function(
        [*values, *blanks, *blocks],
        without_errors([total, rebuilt], interpreted=True),
        mode=INTERPRETED,
        on_unused_input="ignore",
        accept_inplace=True,
    )
    theta = [
        np.asarray(0.05 + 0.1 * rng.standard_normal(shapes[v]), dtype=v.type.dtype) for v in values
    ]
    largest = min([1, *[size - 1 for _, size in graph.lookups]])
    arrays = [
        array_of(leaf.source)
        if leaf.source in public
        else _synthetic(leaf.source, np.shape(array_of(leaf.source)), largest, rng)
        for leaf in graph.leaves
    ]

    def evaluate() -> tuple[np.ndarray, np.ndarray]:
        moved = [
            np.moveaxis(array, leaf.axis, 0)
            for array, leaf in zip(arrays, graph.leaves, strict=True)
        ]
        with np.errstate(all="ignore"):
            return function(*theta, *arrays, *moved)

    try:
        before, lifted = evaluate()
    except IndexError:
        return
    chosen = int(rng.integers(graph.n_rows))
    for k, (array, leaf) in enumerate(zip(arrays, graph.leaves, strict=True)):
        if leaf.source in public:
            continue
        changed = np.moveaxis(array.copy(), leaf.axis, 0)
        changed[chosen] = _synthetic(leaf.source, changed[chosen].shape, largest, rng)
        arrays[k] = np.moveaxis(changed, 0, leaf.axis)
    after, _ = evaluate()
    others = np.arange(graph.n_rows) != chosen
    names = ", ".join(f"`{name}`" for name in graph.names)
    if not np.array_equal(before[others], after[others], equal_nan=True):
        raise NotFactorizable(
            f"Changing one record of synthetic data changes the likelihood terms of other records "
            f"of {names}. Remove what couples records (means, sorts, cumulative sums)."
        )
    usable = np.isfinite(before) & np.isfinite(lifted)
    if not np.allclose(before[usable], lifted[usable], rtol=1e-6, atol=1e-8):
        raise NotFactorizable(
            f"The per-record terms of {names} could not be rebuilt faithfully from the model. "
            "Please report the model; use a simpler form of the likelihood meanwhile."
        )


def full_eta(cut: Cut, n_rows: int) -> Variable:
    """The row input of a cut, computed from the shared value for all rows."""
    if cut.kind == "dot":
        return pt.dot(cut.row_data, cut.phi).astype(cut.eta.type.dtype)
    if cut.kind == "index":
        return cut.phi[cut.row_data]
    return pt.alloc(cut.phi, n_rows, *cut.phi.shape)
