"""Batch-invariant mode: one request, alone and among others, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bole_runtime import LayerGeometry, StateManager, TreeBatch
from bole_testing.close import assert_same_bits

LAYER = LayerGeometry(1, 2, 16, 16)


def check_batch_invariance(
    sizes: dict[str, Any], *, ends: Sequence[int] = (3, 1, 0, 2), places: Sequence[tuple[int, int]] = ((0, 1), (2, 4))
) -> None:
    """Run the same rounds of a request in several places and compare outputs and states.

    Args:
        sizes: of the manager, its policy among them.
        ends: accepted node of each round; chains of neighbours have another length.
        places: row and batch of each run.
    """
    results = []
    for row, batch in places:
        manager = StateManager(
            [LAYER], slots=5, max_batch=4, max_nodes=4, dtype=torch.float32, batch_invariant=True, **sizes
        )
        mine = manager.allocate()
        others = [manager.allocate() for _ in range(batch - 1)]
        slots = torch.tensor([*others[:row], mine, *others[row:]], dtype=torch.int32)
        rnd = manager.round(TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 2]] * batch)), slots)
        own, noise = torch.Generator().manual_seed(9), torch.Generator().manual_seed(row)
        outputs = []
        for end in ends:
            drawn = []
            for n, shape in enumerate(((4, 1, 16), (4, 1, 16), (4, 2, 16), (4, 2), (4, 2))):
                # Torch rounds a function differently by where an element lies in a vector: apply it before placing.
                rows = [torch.randn(*shape, generator=own if b == row else noise) for b in range(batch)]
                change = (torch.Tensor.clone,) * 3 + (lambda t: -t.abs(), torch.sigmoid)
                drawn.append(torch.stack([change[n](t) for t in rows]))
            q, k, v, g, beta = drawn
            outputs.append(rnd.verify(0, q, k, v, gates={"g": g, "beta": beta})[row])
            rnd.commit(torch.tensor([3] * row + [end] + [3] * (batch - row - 1)))
        manager.materialise([mine])
        results.append((torch.stack(outputs), manager.request.pools[0][mine]))
    for out, state in results[1:]:
        assert_same_bits("outputs", out, results[0][0])
        assert_same_bits("state", state, results[0][1])
