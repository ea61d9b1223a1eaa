"""The walk compiles for an H200 without one, within its shared memory and without spills."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

WIDE = {"positions", "bonus", "new_tokens", "source", "target", "seeds", "tokens"}
FLOATS = {"temperature", "top_p", "min_p", "draft", "uniforms", "scratch"}
INTS = {
    "logits_stride_b", "logits_stride_n", "draft_stride_b", "draft_stride_n", "size", "max_nodes", "max_total", "steps",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("method", "dtype", "filters"), [
    (0, "bf16", False), (1, "bf16", True), (1, "fp32", False), (2, "bf16", True), (3, "i64", False),
])  # fmt: skip
def test_sm_90(method: int, dtype: str, filters: bool, packed: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bole_codegen.compile.offline import _usage
    from bole_runtime.sampling.accept_triton import accept_kernel

    constants: dict[str, Any] = {
        "METHOD": method, "PACKED": packed, "TOP_K": filters, "TOP_P": filters, "MIN_P": filters, "GIVEN": not filters,
        "SHIFT": 16 if dtype == "bf16" else 0, "NODES_P2": 512, "STEPS_P2": 512, "BLOCK": 1 if method == 3 else 2048,
    }  # fmt: skip
    types = {}
    for name in accept_kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in INTS:
            types[name] = "i32"
        elif name == "logits":
            types[name] = f"*{dtype}"
        else:
            types[name] = "*i64" if name in WIDE else "*fp32" if name in FLOATS else "*i32"
    made = triton.compile(
        ASTSource(accept_kernel, types, constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 1 if method == 3 else 8},
    )
    registers, local = _usage(made.asm["cubin"])
    assert registers <= 255
    assert local <= 32  # a few words of stack, no spilled tiles
    assert made.metadata.shared <= 48 << 10
