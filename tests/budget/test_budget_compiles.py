"""The kernels of allocation, of tree links and of packing compile for an H200 without one."""

from __future__ import annotations

import pytest
from sm90 import compile_sm90

pytest.importorskip("triton")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranked", [False, True])
def test_reach(ranked: bool) -> None:
    from bole_runtime.budget.allocation_triton import reach_kernel

    types = {"parents": "*i32", "scores": "*fp32", "raw": "*fp32", "keys": "*fp32"}
    compile_sm90(reach_kernel, {"RANKED": ranked, "BLOCK": 256}, types, 4)


@pytest.mark.parametrize("tensor", [False, True])
def test_place(tensor: bool) -> None:
    from bole_runtime.budget.allocation_triton import place_kernel

    types = {
        "parents": "*i32", "keys": "*fp32", "places": "*i32", "budget": "*i64", "out_parents": "*i32",
        "out_offsets": "*i32", "chosen": "*i64", "counts": "*i32", "expected": "*fp32", "lost": "*i32",
    }  # fmt: skip
    compile_sm90(place_kernel, {"TENSOR": tensor, "BLOCK": 256, "TILE": 4096}, types, 8)


@pytest.mark.parametrize("block", [1, 1024])
def test_lost(block: int) -> None:
    from bole_runtime.budget.allocation_triton import lost_kernel

    compile_sm90(lost_kernel, {"BIT": 16, "BLOCK": block}, {"lost": "*i32", "status": "*i32"}, 1)


@pytest.mark.parametrize("nodes", [16, 512])
def test_links(nodes: int) -> None:
    from bole_runtime.tree.links_triton import links_kernel

    types = {"next_token": "*i64", "next_sibling": "*i64", "live": "*i32", "parents": "*i32"}
    compile_sm90(links_kernel, {"FLAGS": False, "ROWS": 16, "BLOCK": nodes}, types, 4 if nodes > 64 else 1)


@pytest.mark.parametrize("counted", [False, True])
def test_pack(counted: bool) -> None:
    from bole_runtime.tree.pack_triton import pack_kernel

    types = {"source": "*i64", "given": "*i64", "parents": "*i32", "offsets": "*i32", "lost": "*i32"}
    compile_sm90(pack_kernel, {"COUNTED": counted, "ROWS": 32, "BLOCK": 128, "TILE": 256}, types, 4)
