"""Random forests on the torch backend against the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.base import Setup
from bole_testing.cases.draws import Draw, draws, run_draw
from hypothesis import given, settings

from bole_runtime import commit, set_backend, verify


@pytest.fixture(autouse=True)
def _torch_backend():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_backend("torch")
    yield
    set_backend(None)
    torch.set_num_threads(threads)


def _setup(in_dtype: torch.dtype, state_dtype: torch.dtype) -> Setup:
    return Setup(verify, commit, torch.device("cpu"), in_dtype, state_dtype, "lossless")


@given(draws())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_fp32(draw: Draw) -> None:
    run_draw(_setup(torch.float32, torch.float32), draw)


@given(draws(max_nodes=24))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_bf16_inputs(draw: Draw) -> None:
    run_draw(_setup(torch.bfloat16, torch.float32), draw)


@given(draws(max_nodes=24))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_bf16_state(draw: Draw) -> None:
    run_draw(_setup(torch.bfloat16, torch.bfloat16), draw)
