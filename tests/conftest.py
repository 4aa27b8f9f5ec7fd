"""Fixtures of all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
from pytensor.graph.rewriting.basic import WalkingGraphRewriter, node_rewriter
from pytensor.scalar import Add, Mul
from pytensor.tensor.elemwise import Elemwise

from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.published.reading import Function
from pymc_dp.records.extraction import Records
from pymc_dp.rows import functions
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import PublicTerms


def pytest_collection_finish() -> None:
    """Modules are there to stay, and graphs are many small objects: garbage is looked for less
    often, and not among them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 10, 1000)


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Models of one module do not live on in the next, where budgets alive are looked through.

    What is left is there to stay: code that was compiled, above all.
    """
    yield
    gc.collect()
    gc.freeze()


def _in_pairs(fgraph: Any, node: Any) -> Any:
    """A sum or product of several arrays as NumPy has it: PyTensor would loop over numbers."""
    if not isinstance(node.op.scalar_op, Add | Mul) or len(node.inputs) < 3:
        return None
    found = reduce(node.op, node.inputs)
    return [found] if found.type == node.outputs[0].type else None


# not as a decorator: a function of this name is pickled, as part of the mode
_PAIRS = WalkingGraphRewriter(node_rewriter([Elemwise])(_in_pairs))
_QUICK = INTERPRETED.register((_PAIRS, 1000.0))


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTensor functions are interpreted, but where a mode is asked for.

    Most tests call one fewer times than would make up for seconds of compiling it.  Others, and
    those in which functions of rows should be as users have them, are marked as ``compiled``.
    """
    monkeypatch.setattr(functions, "_LARGE_GRAPH", 0)
    if request.node.get_closest_marker("compiled"):
        return
    quick = {"mode": _QUICK}
    engine, public_terms, compiled = RowEngine.of, PublicTerms.of, Function.__init__

    def interpreted_engine(records: Records, at: Coordinates, kwargs: Any = None) -> RowEngine:
        return engine(records, at, kwargs or quick)

    def interpreted_terms(records: Records, at: Coordinates, kwargs: Any = None) -> PublicTerms:
        return public_terms(records, at, kwargs or quick)

    def interpreted_function(self: Function, *graphs: Any, **_: Any) -> None:
        compiled(self, *graphs, compiled=False)

    monkeypatch.setattr(RowEngine, "of", interpreted_engine)
    monkeypatch.setattr(PublicTerms, "of", interpreted_terms)
    monkeypatch.setattr(Function, "__init__", interpreted_function)
