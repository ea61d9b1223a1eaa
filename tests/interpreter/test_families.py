"""The additive families on every variant, interpreted, against their own float64 recurrence: padding nodes and slots
full of NaN, a pending chain, captured factors, dense and packed trees, ready and raw gates, sizes no tile divides."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.draws import Draw
from bole_testing.families import run_family_draw
from bole_testing.pins import Pin, pin, pinned_setup

from bole_runtime.families import FAMILIES, KERNEL_FAMILIES

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16
TWO, THREE, ONE = (2, 4), (1, 3), (1, 1)
ADDITIVE = [name for name in KERNEL_FAMILIES if FAMILIES[name].erase == "none"]
CALLS = [(name, mode) for name in ADDITIVE for mode in FAMILIES[name].modes]


def draw(
    sizes: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], *, packed: bool = False, pending: int = 0
) -> Draw:
    return Draw(sum(sizes), sizes, packed, heads, dims, "", 0.2, pending, True, True)


BLOCKS = {"row_block": 16, "prepare_warps": 1, "solve": "fp32"}
STEPS, PATH = {"variant": "steps"}, {"chunk": 16, "bv": 16}
PROBLEMS: dict[str, tuple[Pin, Draw]] = {
    "fused": (pin("fused", bv=16, commit=STEPS), draw((13, 9), TWO, (40, 20), packed=True)),
    "fused-pending": (pin("fused", orient="state", bv=16, commit=PATH), draw((5, 11), THREE, (20, 36), pending=5)),
    "two_stage": (pin("two_stage", bv=16, commit=PATH), draw((17, 6), TWO, (24, 20))),
    "two_stage-pending": (pin("two_stage", share=True, commit=STEPS), draw((13, 9), THREE, (16, 20), pending=5)),
    "two_stage-blocks": (pin("two_stage", share=True, **BLOCKS), draw((14, 19), TWO, (16, 16), packed=True)),
    "two_stage-dims": (pin("two_stage", prepare_dk=32, share=True, bv=16), draw((11, 14), TWO, (70, 20), pending=5)),
    "two_stage-walks": (
        pin("two_stage", programs=128, bv=16, orient="state"),
        draw((9, 14, 5), ONE, (40, 20), packed=True),
    ),
    "chunked": (pin("chunked", chunk=16, bv=16), draw((30, 21), ONE, (24, 40), pending=5)),
}


@pytest.mark.parametrize("label", PROBLEMS)
@pytest.mark.parametrize(("name", "mode"), CALLS)
def test_variants(name: str, mode: str, label: str) -> None:
    pinned, problem = PROBLEMS[label]
    # Element types and profiles take turns: an interpreter is too slow for all of them everywhere.
    turn = (CALLS.index((name, mode)) + list(PROBLEMS).index(label)) % 4
    setup = pinned_setup(
        pinned, "cpu", (FP32, FP16)[turn % 2], FP32 if turn != 3 else FP16, ("lossless", "fast")[turn // 2]
    )
    run_family_draw(setup, name, Draw(**{**vars(problem), "mode": mode}))
