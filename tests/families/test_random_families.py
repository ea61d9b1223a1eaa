"""Random forests of every family on the torch backend against its own sequential float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.base import Setup
from bole_testing.cases.draws import Draw, draws
from bole_testing.families import run_family_draw
from hypothesis import given, settings

from bole_runtime import commit, set_backend, verify
from bole_runtime.families import FAMILIES

HEADS = ((2, 4), (1, 3), (3, 3), (1, 1))
DIMS = ((16, 16), (24, 20), (20, 36))


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


@pytest.mark.parametrize("name", sorted(FAMILIES))
@given(draw=draws(max_nodes=24, heads=HEADS, dims=DIMS))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_fp32(name: str, draw: Draw) -> None:
    run_family_draw(_setup(torch.float32, torch.float32), name, draw)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@given(draw=draws(max_nodes=12, max_batch=2, heads=HEADS, dims=DIMS))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_bf16_inputs_and_state(name: str, draw: Draw) -> None:
    run_family_draw(_setup(torch.bfloat16, torch.bfloat16), name, draw)
