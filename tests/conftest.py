"""Fixtures of all tests."""

from __future__ import annotations

from typing import Any

import pytest

from pymc_dp.records import PublicTerms, Records
from pymc_dp.rows import functions
from pymc_dp.rows.engine import Coordinates, RowEngine
from pymc_dp.rows.functions import INTERPRETED


@pytest.fixture(autouse=True)
def parameters_interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of parameters alone are interpreted, as large ones are, but in slow tests.

    Most tests call one fewer times than would make up for seconds of compiling it.
    """
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(functions, "_LARGE_GRAPH", 0)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of records are interpreted, where they are not told otherwise.

    For tests of what is charged, said and refused: what they see does not depend on bits, and
    compiling a model takes longer than all else that they do.
    """
    quick = {"mode": INTERPRETED}
    engine, public_terms = Records.engine, Records.public_terms

    def interpreted_engine(self: Records, at: Coordinates, kwargs: Any = None) -> RowEngine:
        return engine(self, at, kwargs or quick)

    def interpreted_terms(self: Records, at: Coordinates, kwargs: Any = None) -> PublicTerms:
        return public_terms(self, at, kwargs or quick)

    monkeypatch.setattr(Records, "engine", interpreted_engine)
    monkeypatch.setattr(Records, "public_terms", interpreted_terms)
