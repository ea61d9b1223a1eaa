"""The walk compiles for an H200 without one, within its shared memory and without spilled tiles."""

from __future__ import annotations

from typing import Any

import pytest
from sm90 import compile_sm90

pytest.importorskip("triton")

WIDE = {"positions", "bonus", "new_tokens", "source", "target", "seeds", "tokens"}
FLOATS = {"temperature", "top_p", "min_p", "draft", "uniforms", "stats"}
INTS = {
    "logits_stride_b", "logits_stride_n", "draft_stride_b", "draft_stride_n", "size", "width", "max_nodes", "max_total",
    "steps",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("packed", "batch"), [(False, 16), (True, 200)])
@pytest.mark.parametrize(("method", "dtype", "filters"), [
    (0, "bf16", False), (1, "bf16", True), (1, "fp32", False), (2, "bf16", True), (3, "i64", False),
])  # fmt: skip
def test_sm_90(method: int, dtype: str, filters: bool, packed: bool, batch: int) -> None:
    from bole_runtime.sampling.accept_triton import accept_kernel
    from bole_runtime.sampling.launch_triton import shape_of

    size = 1 if method == 3 else 151_936
    shape = shape_of(size, batch, 4 if method == 2 or dtype == "fp32" else 2, 132, filters, method < 2 and not filters)
    assert shape.split == (1 if packed or method == 3 else 8)
    constants: dict[str, Any] = {
        "METHOD": method, "PACKED": packed, "TOP_K": filters, "TOP_P": filters, "MIN_P": filters, "GIVEN": not filters,
        "SHIFT": 16 if dtype == "bf16" else 0, "NODES_P2": 512, "STEPS_P2": 512, "GROUP": shape.group,
        "GROUPS": shape.groups, "LIST": shape.list, "ROWS": shape.rows, "SPLIT": shape.split, "STAGES": shape.stages,
    }  # fmt: skip
    types = {"logits": f"*{dtype}", **dict.fromkeys(WIDE, "*i64"), **dict.fromkeys(FLOATS, "*fp32")}
    types |= dict.fromkeys(INTS, "i32")
    aligned = ("logits", "logits_stride_b", "logits_stride_n", "size", "draft", "draft_stride_b", "draft_stride_n")
    made = compile_sm90(
        accept_kernel, constants, types, shape.warps, other="*i32", aligned=() if packed else aligned,
        registers=shape.registers, shared=96 << 10,
        stack=64 if packed else 32,  # rows at odd addresses take a pointer for each logit
    )  # fmt: skip
    # A program reads its share alone: it has to ask for blocks ahead.
    assert method == 3 or packed or "cp.async" in made.asm["ptx"]


def test_the_programs_of_a_request_fit_at_once() -> None:
    from bole_runtime.sampling.launch_triton import shape_of

    for batch in (1, 7, 16, 32, 33, 64, 100, 132, 133, 300):
        for light in (False, True):
            shape = shape_of(151_936, batch, 2, 132, not light, light)
            assert shape.split == 1 or batch * shape.split <= 132 * (2 if light else 1)
            if light and shape.split > 1:
                assert shape.registers is not None
                assert 2 * shape.registers * shape.warps * 32 <= 65536
    assert shape_of(151_936, 1, 2, 0, False, True).split == 1
    # Rows of any length: few enough groups, and a short row is not shared.
    for size in (1, 5, 300, 4096, 32_000, 262_144, 3_000_000):
        for filters in (False, True):
            shape = shape_of(size, 1, 4, 132, filters, False)
            assert shape.groups <= 8192
            assert shape.groups * shape.group >= size
            assert shape.list <= shape.groups
            assert size > 8192 or shape.split == 1
