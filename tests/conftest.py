"""Fixtures of all tests."""

from __future__ import annotations

from typing import Any

import pytest

from pymc_dp.published.reading import Function
from pymc_dp.records import PublicTerms, Records
from pymc_dp.rows import functions
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import INTERPRETED
from pymc_dp.rows.interfaces import Coordinates


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTensor functions are interpreted, but where a mode is asked for.

    Most tests call one fewer times than would make up for seconds of compiling it.  Others, and
    those in which functions of rows should be as users have them, are marked as ``compiled``.
    """
    monkeypatch.setattr(functions, "_LARGE_GRAPH", 0)
    if request.node.get_closest_marker("compiled"):
        return
    quick = {"mode": INTERPRETED}
    engine, public_terms, compiled = Records.engine, Records.public_terms, Function.__init__

    def interpreted_engine(self: Records, at: Coordinates, kwargs: Any = None) -> RowEngine:
        return engine(self, at, kwargs or quick)

    def interpreted_terms(self: Records, at: Coordinates, kwargs: Any = None) -> PublicTerms:
        return public_terms(self, at, kwargs or quick)

    def interpreted_function(self: Function, *graphs: Any, **_: Any) -> None:
        compiled(self, *graphs, compiled=False)

    monkeypatch.setattr(Records, "engine", interpreted_engine)
    monkeypatch.setattr(Records, "public_terms", interpreted_terms)
    monkeypatch.setattr(Function, "__init__", interpreted_function)
