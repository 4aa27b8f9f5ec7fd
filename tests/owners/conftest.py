"""Owners for the tests of this folder."""

from __future__ import annotations

import pymc as pm
import pytest

from tests.owners.common import owner


@pytest.fixture
def models() -> list[pm.Model]:
    return [owner(k) for k in range(3)]
