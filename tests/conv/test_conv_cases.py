"""The shared cases on the torch and reference backends."""

from __future__ import annotations

import pytest
import torch
from bole_testing.conv_cases import CASES

from bole_runtime import set_backend


@pytest.fixture(params=["torch", "reference"])
def backend(request: pytest.FixtureRequest):
    set_backend(request.param)
    yield
    set_backend(None)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_case(body) -> None:
    body(torch.device("cpu"))
