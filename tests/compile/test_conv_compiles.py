"""Kernels of convolutions compile for sm_90 without spills, with wide loads of x."""

from __future__ import annotations

import pytest

from bole_codegen.render import render
from bole_runtime import gpus
from bole_runtime.kernels import default_config
from bole_runtime.kernels.conv_problem import ConvProblem

pytest.importorskip("triton")
from bole_codegen.compile import compile_offline

H200 = gpus.get("h200").limits()
USUAL = ConvProblem("tree_conv", 8192, 4, 3, "bf16", "bf16", False, True, False, 16, 0, 64)


@pytest.mark.parametrize(
    "problem",
    [
        USUAL,
        USUAL.replace(width=8, length=7, bias=True, pending=16, state_dtype="fp32"),
        USUAL.replace(op="conv_commit", silu=False, pending=16),
    ],
    ids=["usual", "wide", "commit"],
)
def test_defaults_do_not_spill(problem: ConvProblem) -> None:
    for kernel in render(problem, default_config(problem, H200)):
        found = compile_offline(kernel, problem, H200)
        assert found.spill_bytes == 0, kernel.name
        assert 0 < found.registers <= 255
        assert found.programs_per_sm() >= 1
