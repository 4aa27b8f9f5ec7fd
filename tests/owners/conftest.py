"""Owners for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pymc as pm
import pytensor
import pytest

from tests.owners.common import owner


@pytest.fixture(autouse=True, scope="module")
def flags() -> Iterator[None]:
    """Owners in threads of one process compile side by side, and PyTensor, which changes its mode
    meanwhile, may not change it back: whatever came later was compiled with Numba.
    """
    with pytensor.config.change_flags(mode=pytensor.config.mode):
        yield


@pytest.fixture
def models() -> list[pm.Model]:
    return [owner(k) for k in range(3)]
