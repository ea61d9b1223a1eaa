"""Rows of one commit that commit, flush, append or do nothing."""

from __future__ import annotations

import pytest
import torch
from bole_testing.actions import check_actions
from bole_testing.cases.base import Setup

import bole_runtime


@pytest.fixture(params=["torch", "reference"])
def backend(request: pytest.FixtureRequest):
    bole_runtime.set_backend(request.param)
    yield request.param
    bole_runtime.set_backend(None)


def test_rows_do_what_their_action_says(backend: str) -> None:
    drawn: set[int] = set()
    for seed in range(30 if backend == "torch" else 6):
        state = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        setup = Setup(bole_runtime.verify, bole_runtime.commit, torch.device("cpu"), torch.float32, state, "lossless")
        drawn |= check_actions(setup, seed, mode=("ready", "raw")[seed % 2])
    assert drawn == {0, 1, 2, 3}
