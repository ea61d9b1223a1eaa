"""The torch backend against the float64 reference, on random trees."""

from __future__ import annotations

import pytest
import torch
from bole_testing.close import assert_close
from bole_testing.conv import ConvDraw, conv_draws, live_rows, make_conv, reference_conv, run_conv_draw
from hypothesis import given, settings

from bole_runtime import ConvFactors, TreeBatch, tree_conv
from bole_runtime.conv import prepare_conv_commit

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@given(conv_draws(max_nodes=14, max_batch=3))
@settings(max_examples=40, deadline=None)
def test_random(draw: ConvDraw) -> None:
    run_conv_draw(draw, "cpu", FP32, FP32)


@pytest.mark.parametrize(("dtype", "state_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, BF16)])
@pytest.mark.parametrize("packed", [False, True])
def test_dtypes(dtype: torch.dtype, state_dtype: torch.dtype, packed: bool) -> None:
    draw = ConvDraw((9, 17, 3), channels=24, packed=packed, pending=3, layers=2, seed=3)
    run_conv_draw(draw, "cpu", dtype, state_dtype)


@pytest.mark.parametrize("nodes", [1, 2, 9, 17, 33, 63, 100, 129, 200])
def test_sizes(nodes: int) -> None:
    run_conv_draw(ConvDraw((nodes, max(1, nodes // 2)), channels=5, seed=nodes), "cpu", FP32, FP32)


def test_a_prepared_commit_reads_what_is_there_when_it_runs() -> None:
    tree = TreeBatch.chain(2, 3)
    factors = [ConvFactors.allocate(tree, channels=4, width=3, dtype=FP32) for _ in range(2)]
    pools = [torch.zeros(3, 4, 2) for _ in range(2)]
    commit = prepare_conv_commit(pools, factors)
    for part in factors:
        part.x.copy_(torch.randn(2, 3, 4))
    tree.update_(torch.tensor([[-1, 0, 0], [-1, -1, 1]]))
    commit(torch.tensor([2, 0]), torch.tensor([2, -1]))
    for pool, part in zip(pools, factors, strict=True):
        assert torch.equal(pool[2].T, part.x[0, [0, 2]])
        assert bool((pool[:2] == 0).all())
    with pytest.raises(ValueError, match=r"^pools: two layers share a pool"):
        prepare_conv_commit([pools[0]] * 2, factors)


def test_float64_stays_float64() -> None:
    made = make_conv(ConvDraw((9, 6), 7, 5, pending=3, packed=True, seed=6), "cpu", torch.float64, torch.float64)
    layer = {**made.layers[0], "bias": made.layers[0]["bias"].double()}
    out, _ = tree_conv(**layer, slots=made.slots, tree=made.tree)
    owned = live_rows(made.tree)
    assert_close("output", out[owned], reference_conv(made.tree, made.slots, layer)[owned], 1e-14)
