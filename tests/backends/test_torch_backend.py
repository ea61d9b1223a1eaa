"""Every case on the torch backend, on the CPU, against the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases import ALL, Case
from bole_testing.cases.base import Setup
from bole_testing.cases.numeric import near_critical_keys

from bole_runtime import commit, set_backend, verify

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _torch_backend():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny operations: more threads only wait for each other
    set_backend("torch")
    yield
    set_backend(None)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("in_dtype", "state_dtype"),
    [(FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16), (FP32, FP16)],
    ids=["fp32", "bf16", "fp16", "bf16-sbf16", "fp32-sfp16"],
)
@pytest.mark.parametrize("case", [c for c in ALL if c.cost != "large"], ids=lambda c: c.name)
def test_case(case: Case, in_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    if not case.applies(in_dtype):
        pytest.skip(f"not about {in_dtype}")
    case.run(verify, commit, "cpu", in_dtype, state_dtype, "lossless")


@pytest.mark.parametrize("case", [c for c in ALL if c.name.startswith("more_value_heads")], ids=lambda c: c.name)
@pytest.mark.slow
def test_large_case(case: Case) -> None:
    case.run(verify, commit, "cpu", FP32, FP32, "lossless")


@pytest.mark.parametrize("nodes", [16, 64, 128, 256])
def test_near_critical_keys_stay_within_the_bound_itself(nodes: int) -> None:
    near_critical_keys(Setup(verify, commit, torch.device("cpu"), FP32, FP32, "lossless"), nodes, sequential=False)
