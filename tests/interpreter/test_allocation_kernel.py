"""The allocation kernels, interpreted, against the torch allocation."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import random_parents

from bole_runtime import set_backend
from bole_runtime.budget import Allocation, allocate, reach
from bole_runtime.tree import TreeBatch

pytestmark = pytest.mark.interpreter


def on(backend: str, call: Any) -> Any:
    set_backend(backend)
    try:
        return call()
    finally:
        set_backend(None)


def test_further_roots_are_left_out() -> None:
    parents, scores = torch.tensor([[-2, -1, -1, -1, 1, 2]]), torch.tensor([[1.0, 1.0, 0.01, 1.0, 0.9, 1.0]])
    assert on("triton", lambda: reach(parents, scores)).tolist() == [[-1, 2, -1, -1, pytest.approx(0.9), -1]]
    tree = TreeBatch(1, 6, max_total=2)
    got = on("triton", lambda: allocate(parents, scores, 2, tree))
    assert (got.chosen.tolist(), tree.parents.tolist(), int(tree.status)) == ([1, 4], [-1, 0], 0)
    assert float(got.expected) == pytest.approx(1.9)


@pytest.mark.parametrize(("batch", "last"), [(1, 0), (3, 2), (1025, 1024), (1025, 3), (5, None)])
def test_one_lost_request_sets_the_bit_and_keeps_the_others(batch: int, last: int | None) -> None:
    from bole_runtime.budget.allocation_triton import note_lost

    lost, status = torch.zeros(batch, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    if last is not None:
        lost[last] = 1
    note_lost(lost, status, 16)
    assert int(status) == (5 if last is None else 21)


@pytest.mark.parametrize("seed", range(6))
def test_allocation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_runtime.budget import allocation_triton

    monkeypatch.setattr(allocation_triton, "_TILE", 16)
    rng = random.Random(seed)
    batch, size = rng.randint(1, 4), rng.choice([1, 7, 20])
    rows = [random_parents(rng, size, padding=0.1) for _ in range(batch)]
    if seed % 2:
        for row in rows:
            row[rng.randrange(size)] = rng.choice([size - 1, size + 3, -9])
    parents = torch.tensor(rows, dtype=rng.choice([torch.int32, torch.int64])).t().contiguous().t()
    levels = [0.0, 0.25, 0.5, 1.0, float("nan")]
    scores = torch.tensor([[rng.choice(levels) if seed % 3 else rng.random() for _ in range(size)] for _ in rows])
    made, plain = (on(b, lambda: reach(parents, scores)) for b in ("triton", "torch"))
    assert torch.equal(made, plain)
    for _ in range(2):
        max_nodes, max_total = rng.randint(1, size), rng.randint(0, batch * size + 3)
        budget = rng.randint(0, max_total + 2)
        depth = rng.randint(0, max_nodes - 1)
        results: list[tuple[Allocation, TreeBatch]] = []
        for backend in ("triton", "torch"):
            tree = TreeBatch(batch + 1, max_nodes, max_depth=depth, max_total=max_total, validate=False)
            tree.parents.fill_(77)
            given = torch.tensor([budget]) if rng.random() < 0.5 else budget
            results.append((on(backend, lambda t=tree, g=given: allocate(parents, scores, g, t)), tree))
        (made, mine), (plain, other) = results
        case = (parents, scores, budget, max_nodes, max_total, depth)
        for name in ("parents", "offsets", "depths", "ancestors", "status"):
            assert torch.equal(getattr(mine, name), getattr(other, name)), (name, case)
        assert torch.equal(made.chosen, plain.chosen), case
        assert torch.equal(made.counts, plain.counts), case
        torch.testing.assert_close(made.expected, plain.expected)
