"""The small cases on interpreted kernels, against the float64 recurrence: every variant takes its share of them."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases import ALL, Case
from bole_testing.pins import DISPATCH, Pin, pinned_setup

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16
#: Tiles as wide as a head: the fewer programs, the sooner an interpreter is done.
PINS = (
    Pin(DISPATCH),
    Pin("fused", (("bv", 32), ("warps", 2))),
    Pin("two_stage", commit=(("variant", "path"),)),
    Pin("chunked", (("chunk", 16),), commit=(("variant", "path"),)),
)
SMALL = [c for c in ALL if c.cost == "small"]
#: Head dims that take an interpreter seconds: once, in fp16.
WIDE = {"dims_64_48", "dims_96_100", "dims_128_128", "dims_256_64"}
#: What depends on the element type of the inputs; everything else runs in fp32.
TYPED = (
    "inputs_near", "fp16_values", "repeated_keys", "mixed_log", "tiny_keys", "garbage_in", "dims_48", "nodes_33",
    "slices", "pending_chain_raw", "captured_packed", "heads_1_3",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "pin"),
    [pytest.param(c, PINS[i % 4], id=f"{c.name}-{PINS[i % 4]}") for i, c in enumerate(SMALL) if c.name not in WIDE],
)
def test_fp32(case: Case, pin: Pin) -> None:
    if not case.applies(FP32):
        pytest.skip("not about fp32")
    case.body(pinned_setup(pin, "cpu", FP32, FP32, "lossless"))


@pytest.mark.parametrize(
    ("case", "pin"),
    [
        # The next variant: not the one that has this case in fp32.
        pytest.param(c, PINS[(i + 1) % 4], id=f"{c.name}-{PINS[(i + 1) % 4]}")
        for i, c in enumerate(SMALL)
        if c.name in WIDE or c.name.startswith(TYPED)
    ],
)
def test_fp16(case: Case, pin: Pin) -> None:
    precision, state = ("fast", FP16) if "packed" in case.name else ("lossless", FP32)
    case.body(pinned_setup(pin, "cpu", FP16, state, precision))
