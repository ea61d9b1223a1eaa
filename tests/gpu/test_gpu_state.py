"""A StateManager on a GPU: whole rounds in CUDA graphs under every policy, and batch-invariant bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.captured import StaticRounds
from bole_testing.gpu_plan import STATE_LAYER, STATE_POLICIES, state_rounds

from bole_runtime import StateManager, TreeBatch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]


@pytest.mark.parametrize("policy", STATE_POLICIES)
def test_rounds_in_a_graph(policy: str) -> None:
    made = state_rounds("cuda", policy)
    for _ in range(24):
        made.play()
    made.finish()


@pytest.mark.parametrize("policy", STATE_POLICIES)
def test_a_round_does_not_wait_for_the_device(policy: str) -> None:
    made: StaticRounds = state_rounds("cuda", policy)
    made.play()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", STATE_POLICIES)
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(policy: str) -> None:
    sizes: dict[str, Any] = STATE_POLICIES[policy]
    results = []
    for row, batch in ((0, 1), (2, 4), (40, 64)):
        manager = StateManager(
            [STATE_LAYER], slots=64, max_batch=64, max_nodes=14, batch_invariant=True, device="cuda", **sizes
        )
        slots = torch.tensor([manager.allocate() for _ in range(batch)], dtype=torch.int32, device="cuda")
        parents = torch.tensor([[-1, *((i - 1) // 2 for i in range(1, 14))]] * batch, device="cuda")
        rnd = manager.round(TreeBatch.from_parents(parents), slots)
        own, noise = torch.Generator().manual_seed(9), torch.Generator().manual_seed(row)
        layer, outputs = STATE_LAYER, []
        for end in (13, 0, 5, 2, 12):
            drawn = []
            shapes = [(14, layer.key_heads, layer.dk)] * 2 + [(14, layer.value_heads, layer.dv)]
            for shape in [*shapes, (14, layer.value_heads), (14, layer.value_heads)]:
                rows = [torch.randn(*shape, generator=own if b == row else noise) for b in range(batch)]
                drawn.append(torch.stack(rows).bfloat16().cuda())
            q, k, v, a, b = drawn
            fixed = {n: torch.zeros(layer.value_heads, device="cuda") for n in ("A_log", "dt_bias")}
            outputs.append(rnd.verify(0, q, k, v, gates={"a": a, "b": b, **fixed})[row])
            rnd.commit(torch.tensor([3] * row + [end] + [3] * (batch - row - 1), device="cuda"))
        manager.materialise()
        results.append((torch.stack(outputs), manager.request.pools[0][int(slots[row])]))
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(state, results[0][1])
