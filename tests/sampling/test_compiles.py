"""The walk compiles for an H200 without one, within its shared memory and without spilled tiles."""

from __future__ import annotations

from typing import Any

import pytest
from sm90 import compile_sm90

pytest.importorskip("triton")

WIDE = {"positions", "bonus", "new_tokens", "source", "target", "seeds", "tokens"}
FLOATS = {"temperature", "top_p", "min_p", "draft", "uniforms", "scratch", "masses"}
INTS = {
    "logits_stride_b", "logits_stride_n", "draft_stride_b", "draft_stride_n", "size", "max_nodes", "max_total", "steps",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("method", "dtype", "filters"), [
    (0, "bf16", False), (1, "bf16", True), (1, "fp32", False), (2, "bf16", True), (3, "i64", False),
])  # fmt: skip
def test_sm_90(method: int, dtype: str, filters: bool, packed: bool) -> None:
    from bole_runtime.sampling.accept_triton import accept_kernel

    constants: dict[str, Any] = {
        "METHOD": method, "PACKED": packed, "TOP_K": filters, "TOP_P": filters, "MIN_P": filters, "GIVEN": not filters,
        "SHIFT": 16 if dtype == "bf16" else 0, "NODES_P2": 512, "STEPS_P2": 512, "BLOCK": 1 if method == 3 else 2048,
        "TILES": 1 if method == 3 else 128,
    }  # fmt: skip
    types = {"logits": f"*{dtype}", **dict.fromkeys(WIDE, "*i64"), **dict.fromkeys(FLOATS, "*fp32")}
    types |= dict.fromkeys(INTS, "i32")
    aligned = ("logits", "logits_stride_b", "logits_stride_n", "size") if not packed else ()
    made = compile_sm90(accept_kernel, constants, types, 1 if method == 3 else 8, other="*i32", aligned=aligned)
    # A program reads its row alone: it has to ask for tiles ahead.
    assert method == 3 or not aligned or "cp.async" in made.asm["ptx"]
