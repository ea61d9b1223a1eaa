"""Families that a test registers are forgotten after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bole_testing.registry import families_restored


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with families_restored():
        yield
