"""The kernels for links and for packing, interpreted, against the torch code."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import random_parents
from tree_links import links_of

from bole_runtime import set_backend
from bole_runtime.tree import TreeBatch, parents_from_links

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("nodes", [1, 2, 9, 33])
def test_links(nodes: int) -> None:
    rng = random.Random(nodes)
    trees = [[-1, *(max(p, 0) for p in random_parents(rng, nodes)[1:])] for _ in range(2)]
    tokens, siblings = (list(part) for part in zip(*(links_of(row) for row in trees), strict=True))
    wild = [[rng.choice([-1, rng.randrange(nodes), nodes, 2**40, -9]) for _ in range(nodes)] for _ in range(6)]
    cycle = [(i + 1) % nodes for i in range(nodes)]
    tokens += [*wild[:3], [-1] * nodes, cycle]
    siblings += [*wild[3:], cycle, [-1] * nodes]
    next_token, next_sibling = torch.tensor(tokens).t().contiguous().t(), torch.tensor(siblings)
    for live in (torch.tensor([0, -1, 5, 0, 1, 2, 3]), torch.tensor([True, False, True, True, True, True, True])):
        made = []
        for backend in ("torch", "triton"):
            set_backend(backend)
            try:
                made.append(parents_from_links(next_token, next_sibling, live))
            finally:
                set_backend(None)
        assert torch.equal(*made), (tokens, siblings, made)


@pytest.mark.parametrize("seed", range(5))
def test_packing(seed: int) -> None:
    rng = random.Random(seed)
    nodes, batch = rng.choice([1, 5, 9]), rng.randint(1, 5)
    rows = []
    for _ in range(batch):
        row = random_parents(rng, nodes, padding=0.1)
        rows.append(row[: rng.randint(0, nodes)] + [-2] * nodes)
    parents = torch.tensor([r[:nodes] for r in rows], dtype=rng.choice([torch.int32, torch.int64])).t().contiguous().t()
    for total in (0, 3, batch * nodes, batch * nodes + 300):
        counts = torch.tensor([rng.randint(-1, nodes + 1) for _ in range(batch)]) if rng.random() < 0.5 else None
        made = []
        for backend in ("torch", "triton"):
            tree = TreeBatch(batch + 2, nodes + 1, max_total=total, validate=False)
            tree.parents.fill_(55)
            set_backend(backend)
            try:
                made.append(tree.pack_(parents, counts))
            finally:
                set_backend(None)
        for name in ("parents", "offsets", "depths", "ancestors", "status"):
            plain, kernel = (getattr(t, name) for t in made)
            assert torch.equal(plain, kernel), (name, parents, counts, total, plain, kernel)
