"""Tensor-parallel shards: two processes with half of the heads each, against one with all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bole_testing.close import assert_close, assert_same_bits

from bole_runtime import LayerGeometry, StateManager, TreeBatch
from bole_runtime.state import shard_channels, shard_heads

LAYER = LayerGeometry(2, 4, 8, 8, conv_width=4)
WORLD, LAYERS, ROUNDS = 2, 2, 8
POLICIES = ("eager", "fused", "deferred")


def play(policy: str, rank: int, world: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Run the rounds of one rank; return its outputs, states and convolution states. Every rank draws all heads."""
    layer = LAYER.shard(world)
    manager = StateManager(
        [layer] * LAYERS, slots=3, max_batch=2, max_nodes=5, dtype=torch.float32, device="cpu", policy=policy
    )
    slots = torch.tensor([manager.allocate(), manager.allocate()])
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 2, 1]] * 2))
    rnd = manager.round(tree, slots)
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(LAYER.channels, 4, generator=gen)
    outputs = []
    for n in range(ROUNDS):
        for number in range(LAYERS):
            x = torch.randn(2, 5, LAYER.channels, generator=gen)
            g = -torch.rand(2, 5, 4, generator=gen)
            mine = shard_channels(x, 2, LAYER, rank, world)
            mixed = rnd.conv(number, mine, shard_channels(weight, 0, LAYER, rank, world))
            keys = layer.key_heads * 8
            q, k, v = (t.unflatten(2, (-1, 8)) for t in mixed.split((keys, keys, layer.value_heads * 8), 2))
            gates = {"g": shard_heads(g, 2, rank, world), "beta": shard_heads(g.exp(), 2, rank, world)}
            outputs.append(rnd.verify(number, q, k, v, gates=gates))
        rnd.commit(torch.tensor([(4, 0, -1)[n % 3], (3, 1)[n % 2]]))
    manager.materialise()
    convs = [c for c in manager.request.conv_pools if c is not None]
    return torch.stack(outputs), list(manager.request.pools), convs


def gathered(part: torch.Tensor, dim: int) -> torch.Tensor:
    import torch.distributed as dist

    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


def rank_main(rank: int, store: str, result: str) -> None:
    """One rank: nothing of the others is needed before the outputs are put together."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    made: dict[str, Any] = {}
    for policy in POLICIES:
        outputs, pools, convs = play(policy, rank, WORLD)
        made[policy] = (gathered(outputs, 3), [gathered(p, 1) for p in pools], convs)
    if rank == 0:
        torch.save(made, result)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_ranks_are_one(tmp_path: Path) -> None:
    import os
    import subprocess

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    code = "import sys, runpy; runpy.run_path(sys.argv[1])['rank_main'](int(sys.argv[2]), sys.argv[3], sys.argv[4])"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, __file__, str(rank), str(tmp_path / "store"), str(tmp_path / "result")],
            env=env,
        )
        for rank in range(WORLD)
    ]
    assert [process.wait(timeout=150) for process in ranks] == [0, 0]
    made = torch.load(tmp_path / "result")
    for policy in POLICIES:
        whole_out, whole_pools, whole_convs = play(policy, 0, 1)
        out, pools, convs = made[policy]
        assert_close(f"{policy}: outputs", out, whole_out, 1e-6)
        for got, want in zip(pools, whole_pools, strict=True):
            assert_close(f"{policy}: states", got, want, 1e-6)
        for got, want in zip(convs, whole_convs, strict=True):
            assert_same_bits(f"{policy}: convolution states of rank 0", got, shard_channels(want, 1, LAYER, 0, WORLD))


def test_shards_of_a_geometry() -> None:
    model = LayerGeometry(16, 32, 128, 128, conv_width=4)
    half = model.shard(2)
    assert (half.key_heads, half.value_heads, half.channels) == (8, 16, model.channels // 2)
    assert model.shard(1) == model
    heads = torch.arange(12).reshape(2, 6)
    assert shard_heads(heads, 1, 1, 3).tolist() == [[2, 3], [8, 9]]
    channels = torch.arange(LAYER.channels)
    parts = [shard_channels(channels, 0, LAYER, rank, 2).tolist() for rank in range(2)]
    assert parts[1] == [*range(8, 16), *range(24, 32), *range(48, 64)]
    assert sorted(parts[0] + parts[1]) == channels.tolist()


def test_refused() -> None:
    with pytest.raises(ValueError, match="world: 3 ranks cannot share 2 key heads evenly"):
        LAYER.shard(3)
    with pytest.raises(ValueError, match="world: 0 ranks"):
        LAYER.shard(0)
    with pytest.raises(ValueError, match="cannot share 9 convolution channels"):
        LayerGeometry(2, 4, 8, 8, conv_width=4, conv_channels=9).shard(2)
    with pytest.raises(ValueError, match="rank 2 of 2 cannot take an even share of 4 heads"):
        shard_heads(torch.zeros(4), 0, 2, 2)
    with pytest.raises(ValueError, match="tensor: 9 channels in dimension 0, expected q, k and v: 64"):
        shard_channels(torch.zeros(9), 0, LAYER, 0, 2)
