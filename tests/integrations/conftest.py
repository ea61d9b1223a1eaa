"""One small model for the tests that do not care which."""

from __future__ import annotations

from typing import Any

import pytest
from bole_testing.hybrid import build


@pytest.fixture(scope="module")
def qwen() -> Any:
    return build("qwen3_5")
