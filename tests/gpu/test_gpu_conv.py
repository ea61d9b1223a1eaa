"""Convolutions along trees on a CUDA device: the cases and draws of the other backends, and captured graphs."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.conv import (
    ConvDraw,
    conv_config,
    conv_draws,
    conv_tree,
    reference_conv,
    rows_config,
    run_conv_draw,
)
from bole_testing.conv_cases import CASES
from hypothesis import HealthCheck, Phase, given, seed, settings

from bole_runtime import conv_commit, tree_conv

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_case(body) -> None:
    body(torch.device("cuda"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "state_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_dtypes(dtype: torch.dtype, state_dtype: torch.dtype, width: int, packed: bool) -> None:
    draw = ConvDraw((200, 1, 33, 64), 1032, width, packed=packed, pending=5, capture=True, layers=3, seed=width)
    run_conv_draw(draw, "cuda", dtype, state_dtype)


@pytest.mark.parametrize(("bc", "nb", "warps"), [(32, 1, 1), (64, 16, 4), (256, 16, 8), (1024, 4, 8), (512, 1, 2)])
def test_tiles(bc: int, nb: int, warps: int) -> None:
    draw = ConvDraw((63, 9, 100), 2048, 4, pending=3, dynamic=bc == 64, seed=bc)
    run_conv_draw(draw, "cuda", BF16, BF16, conv=conv_config(bc, nb, warps))


@pytest.mark.parametrize(
    ("bc", "nb", "warps", "unroll"), [(256, 16, 1, 2), (512, 4, 1, 1), (128, 32, 1, 2), (512, 1, 2, 1)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_rows(bc: int, nb: int, warps: int, unroll: int, packed: bool) -> None:
    draw = ConvDraw((63, 9, 0, 100), 2056, 4, packed=packed, pending=3 * (nb == 4), capture=True, seed=bc)
    run_conv_draw(draw, "cuda", BF16, BF16, conv=rows_config(bc, nb, warps, unroll))


def test_random() -> None:
    number = int(os.environ["BOLE_SEED"])
    print(f"BOLE_SEED={number}")

    @seed(number)
    @settings(max_examples=40, deadline=None, database=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(conv_draws(max_nodes=130, max_batch=4, max_channels=300))
    def body(draw: ConvDraw) -> None:
        # Few kernels: each costs a second or two to compile.
        few = {"width": 4, "extra": 0, "dynamic": False, "capture": False, "silu": draw.bias}
        run_conv_draw(replace(draw, **few), "cuda", BF16, BF16)

    body()


def test_a_captured_graph_follows_the_trees() -> None:
    rng, nodes, channels, layers = random.Random(1), 16, 8192, 3
    tree = conv_tree([random_parents(rng, nodes)] * 4, False, "cuda")
    at = {"device": "cuda", "dtype": BF16}
    xs = [torch.randn(4, nodes, channels, **at) for _ in range(layers)]
    weight = torch.randn(channels, 4, **at)
    pools = [torch.randn(6, channels, 3, **at) for _ in range(layers)]
    slots = torch.tensor([4, 0, 1, 5], dtype=torch.int32, device="cuda")
    accepted = torch.zeros(4, dtype=torch.int32, device="cuda")
    outs = [torch.empty_like(x) for x in xs]

    def step() -> None:
        factors = [
            tree_conv(x, weight, state=pool, slots=slots, tree=tree, out=out)[1]
            for x, pool, out in zip(xs, pools, outs, strict=True)
        ]
        conv_commit(pools, slots, factors, accepted)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for padding, terminal in ((0.0, 3), (0.3, 0), (0.0, -1)):
        rows = [random_parents(rng, nodes, padding=padding) for _ in range(4)]
        tree.update_(torch.tensor(rows, dtype=torch.int32, device="cuda"))
        live = [[i for i, p in enumerate(row) if p != -2] for row in rows]
        accepted.copy_(torch.tensor([row[terminal] if terminal >= 0 and row else -1 for row in live]))
        before = [pool.clone() for pool in pools]
        graph.replay()
        for x, out, pool, old in zip(xs, outs, pools, before, strict=True):
            layer = {"x": x, "weight": weight, "bias": None, "state": old, "activation": "silu"}
            assert_close("output", out.float(), reference_conv(tree, slots, layer), 2**-8)
            want = old.clone()
            for b, node in enumerate(accepted.tolist()):
                if node >= 0:
                    slot = int(slots[b])
                    want[slot] = torch.cat((old[slot].T, x[b, tree.path(b, node)]))[-3:].T
            assert_same_bits("state", pool, want)
