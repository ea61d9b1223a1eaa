"""Tensor-parallel ranks in processes of their own: half of the heads each, against one process with all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bole_runtime import LayerGeometry, StateManager, TreeBatch
from bole_runtime.state import shard_channels, shard_heads
from bole_testing.close import assert_close, assert_same_bits

LAYER = LayerGeometry(2, 4, 8, 8, conv_width=4)
WORLD, LAYERS, ROUNDS = 2, 2, 8
POLICIES = ("eager", "fused", "deferred")


def play(
    policy: str, rank: int, world: int, device: str = "cpu"
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Run the rounds of one rank; return its outputs, states and convolution states. Every rank draws all heads."""
    layer = LAYER.shard(world)
    manager = StateManager(
        [layer] * LAYERS, slots=3, max_batch=2, max_nodes=5, dtype=torch.float32, device=device, policy=policy
    )
    slots = torch.tensor([manager.allocate(), manager.allocate()], device=device)
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 2, 1]] * 2, device=device))
    rnd = manager.round(tree, slots)
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(LAYER.channels, 4, generator=gen).to(device)
    outputs = []
    for n in range(ROUNDS):
        for number in range(LAYERS):
            x = torch.randn(2, 5, LAYER.channels, generator=gen).to(device)
            g = -torch.rand(2, 5, 4, generator=gen).to(device)
            mine = shard_channels(x, 2, LAYER, rank, world)
            mixed = rnd.conv(number, mine, shard_channels(weight, 0, LAYER, rank, world))
            keys = layer.key_heads * 8
            q, k, v = (t.unflatten(2, (-1, 8)) for t in mixed.split((keys, keys, layer.value_heads * 8), 2))
            gates = {"g": shard_heads(g, 2, rank, world), "beta": shard_heads(g.exp(), 2, rank, world)}
            outputs.append(rnd.verify(number, q, k, v, gates=gates))
        rnd.commit(torch.tensor([(4, 0, -1)[n % 3], (3, 1)[n % 2]], device=device))
    manager.materialise()
    convs = [c for c in manager.request.conv_pools if c is not None]
    return torch.stack(outputs), list(manager.request.pools), convs


def gathered(part: torch.Tensor, dim: int) -> torch.Tensor:
    import torch.distributed as dist

    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


def rank_main(rank: int, store: str, result: str, backend: str) -> None:
    """One rank: nothing of the others is needed before the outputs are put together."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    made: dict[str, Any] = {}
    for policy in POLICIES:
        outputs, pools, convs = play(policy, rank, WORLD, device)
        whole = [gathered(p, 1).cpu() for p in pools]
        made[policy] = (gathered(outputs, 3).cpu(), whole, [c.cpu() for c in convs])
    if rank == 0:
        torch.save(made, result)
    dist.barrier()
    dist.destroy_process_group()


def check_shards(folder: Path, backend: str, bound: float) -> None:
    """Run the ranks in processes of their own and compare with one process that has all heads.

    Args:
        folder: for the files that the processes share.
        backend: ``gloo`` on the CPU, ``nccl`` on one GPU a rank.
        bound: relative error allowed between them.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    code = "import sys; from bole_testing.shards import rank_main; rank_main(int(sys.argv[1]), *sys.argv[2:])"
    shared = [str(folder / "store"), str(folder / "result"), backend]
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank), *shared], env=env) for rank in range(WORLD)]
    assert [process.wait(timeout=150) for process in ranks] == [0] * WORLD
    made = torch.load(folder / "result")
    for policy in POLICIES:
        whole_out, whole_pools, whole_convs = play(policy, 0, 1, "cuda" if backend == "nccl" else "cpu")
        out, pools, convs = made[policy]
        assert_close(f"{policy}: outputs", out, whole_out, bound)
        for got, want in zip(pools, whole_pools, strict=True):
            assert_close(f"{policy}: states", got, want, bound)
        for got, want in zip(convs, whole_convs, strict=True):
            assert_same_bits(f"{policy}: convolution states of rank 0", got, shard_channels(want, 1, LAYER, 0, WORLD))
