"""The torch backend against the float64 reference, on random trees."""

from __future__ import annotations

import pytest
import torch
from bole_testing.conv import ConvDraw, conv_draws, run_conv_draw
from hypothesis import given, settings

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@given(conv_draws(max_nodes=14, max_batch=3))
@settings(max_examples=40, deadline=None)
def test_random(draw: ConvDraw) -> None:
    run_conv_draw(draw, "cpu", FP32, FP32)


@pytest.mark.parametrize(("dtype", "state_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, BF16)])
@pytest.mark.parametrize("packed", [False, True])
def test_dtypes(dtype: torch.dtype, state_dtype: torch.dtype, packed: bool) -> None:
    draw = ConvDraw((9, 17, 3), channels=24, packed=packed, pending=3, layers=2, seed=3)
    run_conv_draw(draw, "cpu", dtype, state_dtype)


@pytest.mark.parametrize("nodes", [1, 2, 9, 17, 33, 63, 100, 129, 200])
def test_sizes(nodes: int) -> None:
    run_conv_draw(ConvDraw((nodes, max(1, nodes // 2)), channels=5, seed=nodes), "cpu", FP32, FP32)
