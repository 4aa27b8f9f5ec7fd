"""Which cases of a test run always, which with the slow tests, and which before a version."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def marked(
    cases: Iterable[Any], *, slow: Collection[Any] = (), exhaustive: Collection[Any] = ()
) -> list[Any]:
    """Parameters of ``pytest.mark.parametrize``; tuples are several arguments.

    Cases that are not among the first are a mistake.
    """
    found = list(cases)
    for named in (*slow, *exhaustive):
        assert named in found, named
    marks = [
        pytest.mark.exhaustive if case in exhaustive else pytest.mark.slow if case in slow else ()
        for case in found
    ]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(found, marks, strict=True)
    ]


def others(cases: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """All cases but the first."""
    return [case for case in cases if case not in first]
