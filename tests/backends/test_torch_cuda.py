"""The torch backend on a CUDA device: the same cases, no host sync, and TF32 of the process without effect."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases import ALL, Case
from bole_testing.cases.base import Setup, chain_tree, make_inputs
from bole_testing.cases.checks import check_verify

from bole_runtime import commit, set_backend, verify

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _torch_backend():
    set_backend("torch")
    yield
    set_backend(None)


@pytest.mark.parametrize("case", [c for c in ALL if c.cost == "small"], ids=lambda c: c.name)
def test_case(case: Case) -> None:
    dtype = torch.bfloat16
    if not case.applies(dtype):
        pytest.skip(f"not about {dtype}")
    case.run(verify, commit, "cuda", dtype, torch.float32, "lossless")


def test_no_host_sync_and_no_tf32() -> None:
    setup = Setup(verify, commit, torch.device("cuda", 0), torch.float32, torch.float32, "lossless")
    inputs = make_inputs(setup, chain_tree(setup, 2, 8), dims=(64, 64))
    accepted = torch.tensor([7, -1], device="cuda")
    _, factors = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
        commit(inputs.state.clone(), inputs.slots, factors, accepted)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.set_float32_matmul_precision("high")
    try:
        check_verify(setup, inputs)
    finally:
        torch.set_float32_matmul_precision("highest")
