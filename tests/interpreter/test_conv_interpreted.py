"""Generated kernels of convolutions along trees, interpreted: tiles of several kinds, sizes that no tile divides."""

from __future__ import annotations

import pytest
import torch
from bole_testing.conv import ConvDraw, conv_config, conv_draws, rows_config, run_conv_draw
from bole_testing.conv_cases import CASES
from hypothesis import HealthCheck, Phase, given, settings

from bole_runtime.kernels import Config

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16

#: Everything at once, and draws without most of it.
DRAWS = {
    "everything": ConvDraw((7, 0, 4), 40, 4, extra=1, pending=5, packed=True, capture=True, layers=2, seed=2),
    "plain": ConvDraw((7, 4), 33, 4, bias=False, silu=False, layers=3, seed=3),
    "narrow": ConvDraw((5,), 3, 2, wide_state=True, pending=1, seed=4),
    "wide": ConvDraw((9, 3), 20, 8, dynamic=True, capture=True, layers=2, wide_state=True, seed=5),
}
ROWS = [rows_config(128, 8, 1, 2), rows_config(128, 4, 1, 1), rows_config(128, 1, 1, 1)]


@pytest.mark.parametrize(
    ("name", "dtype", "state_dtype"),
    [("everything", FP32, FP32), ("everything", FP16, FP32), ("plain", FP16, FP16), ("narrow", FP32, FP16),
     ("wide", FP16, FP16)],
)  # fmt: skip
def test_a_few(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    run_conv_draw(DRAWS[name], "cpu", dtype, state_dtype, conv=conv_config(bc=32, nb=8, warps=1))


@pytest.mark.parametrize(("bc", "nb", "warps"), [(128, 1, 2), (64, 2, 1), (32, 16, 4)])
def test_tiles(bc: int, nb: int, warps: int) -> None:
    draw = ConvDraw((6,), 90, 3, pending=2, seed=bc)
    run_conv_draw(draw, "cpu", FP32, FP32, conv=conv_config(bc, nb, warps))


@pytest.mark.parametrize("config", ROWS, ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "state_dtype"),
    [("everything", FP16, FP32), ("plain", FP32, FP32), ("narrow", FP16, FP16)],
)
def test_rows(name: str, dtype: torch.dtype, state_dtype: torch.dtype, config: Config) -> None:
    run_conv_draw(DRAWS[name], "cpu", dtype, state_dtype, conv=config)


def test_default() -> None:
    run_conv_draw(ConvDraw((5, 2), 20, seed=9), "cpu", FP32, FP32)


@given(conv_draws(max_nodes=12, max_batch=2, max_channels=50))
@settings(
    max_examples=6, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_random(draw: ConvDraw) -> None:
    run_conv_draw(draw, "cpu", FP32, FP32, conv=conv_config(32, 16, 1))
    if not draw.dynamic:
        run_conv_draw(draw, "cpu", FP32, FP32, conv=rows_config(128, 4, 1, 2))


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_case(body) -> None:
    body(torch.device("cpu"))
