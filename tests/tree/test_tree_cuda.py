"""Trees on a CUDA device: equal to the CPU's, rebuilt in place inside a captured graph, without a host sync."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import random_parents

from bole_runtime import TreeBatch

pytestmark = pytest.mark.gpu

NAMES = ("parents", "ancestors", "depths", "status")


def assert_equal(made: TreeBatch, plain: TreeBatch) -> None:
    for name in NAMES:
        assert torch.equal(getattr(made, name).cpu(), getattr(plain, name)), name


@pytest.mark.parametrize("nodes", [1, 33, 64, 200, 512])
@pytest.mark.parametrize("faulty", [False, True])
def test_dense(nodes: int, faulty: bool) -> None:
    rng = random.Random(nodes)
    rows = [random_parents(rng, nodes, padding=0.05) for _ in range(9)]
    rows.append(list(range(-1, nodes - 1)))
    if faulty:
        for row in rows:
            row[rng.randrange(nodes)] = rng.choice([nodes - 1, nodes + 5, -9])
    parents = torch.tensor(rows)
    for depth in (None, min(7, nodes - 1)):
        made = TreeBatch.from_parents(parents.cuda(), depth)
        assert_equal(made, TreeBatch.from_parents(parents, depth, validate=False))


def test_packed() -> None:
    rng = random.Random(0)
    counts = [5, 0, 64, 1, 40]
    flat = [p for n in counts for p in random_parents(rng, n)] + [-2, -2]
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    parents, offsets = torch.tensor(flat), torch.tensor(ends)
    made = TreeBatch.from_packed(parents.cuda(), offsets.cuda(), 64)
    assert_equal(made, TreeBatch.from_packed(parents, offsets, 64))
    assert made.offsets.tolist() == ends


def test_validation_on_request() -> None:
    bad = torch.tensor([[-1, 2, 0]], device="cuda")
    with pytest.raises(ValueError, match="a parent must come before its child"):
        TreeBatch.from_parents(bad, validate=True)


def test_update_in_a_captured_graph() -> None:
    rng = random.Random(1)
    source = torch.full((3, 40), -1, dtype=torch.int32, device="cuda")
    live = torch.tensor([0, 1, 2], device="cuda")
    tree = TreeBatch.from_parents(source)
    tree.update_(TreeBatch.sglang_parents(source, live))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree.update_(TreeBatch.sglang_parents(source, live))
    for slots in ([0, 1, 2], [4, -1, 0]):
        rows = [[0, *(rng.randrange(i) for i in range(1, 40))] for _ in range(3)]
        source.copy_(torch.tensor(rows))
        live.copy_(torch.tensor(slots))
        graph.replay()
        assert_equal(tree, TreeBatch.from_sglang(torch.tensor(rows), torch.tensor(slots)))


def test_no_host_sync() -> None:
    parents = torch.tensor([[-1, 0, 0]], device="cuda")
    tree = TreeBatch.from_parents(parents)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree.update_(parents)
        TreeBatch.from_sglang(parents, torch.zeros(1, dtype=torch.int64, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
