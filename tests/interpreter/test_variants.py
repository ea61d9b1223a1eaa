"""Every verify variant under its parameters, on problems with everything in them: padding nodes and slots full of NaN,
a pending chain, captured factors, dense and packed trees, sizes no tile divides."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.draws import Draw, run_draw
from bole_testing.pins import Pin, pin, pinned_setup

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16

#: Two heads a key head, three of one, and one of one.
TWO, THREE, ONE = (2, 4), (1, 3), (1, 1)


def draw(
    sizes: tuple[int, ...],
    heads: tuple[int, int],
    dims: tuple[int, int],
    *,
    packed: bool = False,
    pending: int = 0,
    mode: str = "ready",
    capture: bool = True,
) -> Draw:
    return Draw(sum(sizes), sizes, packed, heads, dims, mode, 0.2, pending, True, capture)


VERIFY: tuple[tuple[Pin, Draw], ...] = (
    (pin("fused", bv=32), draw((13, 9), TWO, (48, 40), packed=True, mode="raw")),
    (pin("fused", bv=16, prefetch=False), draw((5, 11), THREE, (40, 48), pending=5)),
    (pin("fused", orient="state", bv=16, prefetch=True), draw((16, 3), ONE, (100, 20), mode="raw")),
    (pin("fused", bv=32, warps=4), draw((17, 33), ONE, (16, 24), packed=True, capture=False)),
    (pin("two_stage", bv=32), draw((13, 9), THREE, (48, 20), packed=True, pending=5)),
    (pin("two_stage", orient="state", bv=16), draw((6, 16), ONE, (40, 48), mode="raw")),
    (pin("two_stage", bv=16, prefetch=True), draw((12, 7), TWO, (20, 16))),
    (pin("two_stage", bk=128, stages=2, bv=32), draw((13, 16), ONE, (136, 24), mode="raw")),
    (pin("two_stage", bk=128, stages=2, bv=32, orient="state"), draw((9, 4), ONE, (150, 20), packed=True)),
    (pin("two_stage", programs=128, bv=16), draw((9, 14, 5), THREE, (40, 48), packed=True)),
    (pin("two_stage", programs=128, bv=16, orient="state"), draw((6, 20), ONE, (40, 20), pending=5, mode="raw")),
    (pin("fused", bv=16, solve="fp32"), draw((13, 9), ONE, (20, 16))),
    (pin("fused", bv=16, stack=False), draw((11, 3), TWO, (20, 16), mode="raw")),
    (pin("two_stage", share=True), draw((13, 9), TWO, (24, 16), mode="raw")),
    (pin("two_stage", share=True, row_block=16, prepare_warps=1), draw((14, 9), TWO, (16, 16), pending=16)),
    (pin("two_stage", share=True, row_block=16, prepare_warps=1), draw((21, 33), THREE, (16, 20), packed=True)),
    (pin("two_stage", row_block=16, prepare_warps=1), draw((64, 17), ONE, (20, 16), mode="raw")),
    (pin("two_stage", row_block=32, prepare_warps=2), draw((50, 33), ONE, (16, 40), packed=True)),
    (pin("two_stage", row_block=64, prepare_warps=4), draw((63, 40), ONE, (16, 16), capture=False)),
    (pin("two_stage", row_block=64, solve="fp16"), draw((50, 33), ONE, (48, 40), mode="raw")),
    (pin("two_stage", share=True), draw((13, 9), TWO, (48, 40), packed=True, mode="raw")),
    (pin("two_stage", prefetch=True), draw((14, 3), THREE, (64, 20), pending=16)),
    (pin("two_stage", prefetch=True), draw((12, 7), ONE, (40, 16), mode="raw")),
    (pin("two_stage", prefetch=True, solve="fp16"), draw((20, 29), TWO, (40, 16))),
    (pin("chunked", chunk=16, bv=16), draw((40, 33), ONE, (48, 40), packed=True, mode="raw")),
    (pin("chunked", chunk=16, bv=32), draw((35, 17), TWO, (16, 24), pending=5)),
    (pin("chunked", chunk=32, bv=16), draw((70, 66), ONE, (24, 16))),
    (pin("chunked", chunk=32, bv=32), draw((20, 29), THREE, (16, 20), mode="raw")),
    (pin("two_stage_blocks", bv=16), draw((70, 66), ONE, (24, 16), mode="raw")),
    (pin("two_stage_blocks", block=64, bv=32), draw((97, 65), ONE, (16, 40), packed=True)),
    (pin("two_stage_blocks", block=16, bv=16, share=True), draw((129, 3), TWO, (16, 24), mode="raw")),
    (pin("two_stage_blocks", row_block=16, prepare_warps=1, bv=32), draw((70, 101), THREE, (20, 24), pending=16)),
    (
        pin("two_stage_blocks", row_block=32, prepare_warps=4, block=16, bv=16),
        draw((67, 120), ONE, (16, 16), packed=True),
    ),
    (pin("four_stage", bv=16), draw((70, 66), ONE, (24, 16), mode="raw")),
    (pin("four_stage", block=32, bv=32, unroll=2), draw((97, 165), ONE, (16, 40), packed=True)),
    (pin("four_stage", bv=16, unroll=1), draw((129, 3), TWO, (16, 24), mode="raw")),
    (
        pin("four_stage", row_block=16, row_warps=1, inverse_warps=1, solve_warps=1),
        draw((70, 101), THREE, (20, 24), pending=16),
    ),
    (pin("four_stage", unroll=2), draw((67, 80), TWO, (16, 16), packed=True, pending=5, capture=False)),
)


def name(value: object) -> str:
    if isinstance(value, Draw):
        return f"{'x'.join(map(str, value.dims))}-{'packed' if value.packed else 'dense'}-{value.mode}"
    return str(value)


@pytest.mark.parametrize(("pin", "draw"), VERIFY, ids=name)
def test_verify(pin: Pin, draw: Draw) -> None:
    # Element types and profiles take turns: an interpreter is too slow for all of them everywhere.
    turn = VERIFY.index((pin, draw)) % 4
    in_dtype = (FP32, FP16)[turn % 2]
    run_draw(pinned_setup(pin, "cpu", in_dtype, FP32 if turn != 3 else FP16, ("lossless", "fast")[turn // 2]), draw)


COMMIT: tuple[tuple[Pin, Draw], ...] = (
    (pin(commit={"chunk": 16, "bv": 32}), draw((33, 20), TWO, (16, 24), mode="raw", capture=False)),
    (pin(commit={"chunk": 32, "bv": 16}), draw((40, 26), THREE, (20, 16), packed=True, pending=5)),
    (pin(commit={"chunk": 16, "bv": 16}), draw((37, 60), ONE, (48, 40), pending=5, mode="raw")),
    (pin(commit={"variant": "blocks", "block": 4, "bv": 16}), draw((33, 20), TWO, (48, 24), mode="raw")),
    (pin(commit={"variant": "blocks", "block": 2, "bv": 16}), draw((13, 6), THREE, (20, 40), packed=True, pending=5)),
    (pin(commit={"variant": "blocks", "block": 8, "bv": 8}), draw((9, 26), ONE, (100, 20), pending=5, mode="raw")),
)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("pin", "draw"), COMMIT, ids=name)
def test_commit(pin: Pin, draw: Draw, dtype: torch.dtype) -> None:
    # Half of the nodes of a random tree continue the newest branch: paths are longer than a chunk.
    precision = "lossless" if dtype is FP32 else "fast"
    run_draw(pinned_setup(pin, "cpu", dtype, FP32, precision), draw)
