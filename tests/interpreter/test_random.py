"""Random problems on random variants, interpreted, against the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.draws import Draw, draws, run_draw
from bole_testing.pins import Pin, pinned_setup
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

#: Where a parameter does not fit a problem, the variant's default runs; where a variant does not, the dispatched one.
PINS = st.sampled_from(
    [
        Pin("fused", (("bv", 16),), commit=(("chunk", 16),)),
        Pin("fused", (("orient", "state"), ("bv", 16))),
        Pin("two_stage", (("bv", 16),), commit=(("chunk", 32), ("bv", 16))),
        Pin("two_stage", (("share", True), ("row_block", 16), ("prepare_warps", 1))),
        Pin("two_stage", (("programs", 128), ("bv", 16)), commit=(("variant", "steps"),)),
        Pin("fused", commit=(("variant", "steps"), ("bv", 8), ("tiles", 4))),
        Pin("chunked", (("chunk", 16), ("bv", 16))),
    ]
)
QUICK = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # a failure says enough, and shrinking it takes an interpreter minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def run(draw: Draw, pin: Pin, in_dtype: torch.dtype, state_dtype: torch.dtype, precision: str) -> None:
    run_draw(pinned_setup(pin, "cpu", in_dtype, state_dtype, precision), draw)


@given(draws(max_nodes=30, max_batch=2, dims=((16, 16), (40, 20), (20, 48)), pending=(0, 0, 5, 16)), PINS)
@QUICK
def test_fp32(draw: Draw, pin: Pin) -> None:
    run(draw, pin, torch.float32, torch.float32, "lossless")


@given(draws(max_nodes=20, max_batch=2, heads=((2, 4), (1, 3)), pending=(0, 0, 5)), PINS)
@QUICK
def test_fp16(draw: Draw, pin: Pin) -> None:
    run(draw, pin, torch.float16, torch.float16, "fast")
