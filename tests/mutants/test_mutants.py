"""Faults that were planted are caught: none of the table survives its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.mutants.plant import PACKAGE, Fault, planting, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    """Its text stands once in the file; and its tests are named."""
    text = (PACKAGE / fault.file).read_text(encoding="utf-8")
    compile(fault.planted(text), fault.file, "exec")
    assert fault.what and fault.tests


def test_the_faults_are_different_ones() -> None:
    assert len({str(fault) for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS) > 60


@pytest.fixture(scope="module")
def planted(request: Any) -> Iterator[tuple[Callable[[], str], dict[str, Future[bool]]]]:
    """What becomes of the faults that were chosen, two at a time."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    faults = [params["survivor"] for params in chosen if "survivor" in params]
    with planting(faults) as (without, found):
        yield without, dict(zip(map(str, faults), found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("survivor", FAULTS, ids=str)
def test_no_fault_survives(survivor: Fault, planted: Any) -> None:
    assert not planted[1][str(survivor)].result(), f"{survivor} passes {survivor.tests}"


@pytest.mark.exhaustive
def test_the_tests_pass_without_a_fault(planted: Any) -> None:
    """They do if the tests of the package do, which continuous integration runs."""
    said = planted[0]()
    assert not said, said
