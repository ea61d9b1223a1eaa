"""The device construction, interpreted, against the torch construction."""

from __future__ import annotations

import random

import pytest
import torch

from bole_runtime.tree import TreeBatch

pytestmark = pytest.mark.interpreter


def random_row(rng: random.Random, nodes: int, faulty: bool) -> list[int]:
    row = []
    for i in range(nodes):
        if faulty and rng.random() < 0.1:
            row.append(rng.choice([rng.randint(-4, nodes + 3), 2**31 - 1, -(2**31), -2]))
        elif i == 0 or rng.random() < 0.1:
            row.append(-1)
        else:
            row.append(i - 1 if rng.random() < 0.5 else rng.randrange(i))
    return row


def both(source: torch.Tensor, offsets: torch.Tensor | None, **capacities: int) -> int:
    """Build with torch and with the kernel, compare everything, and return the status."""
    from bole_runtime.tree.build_triton import build_into

    plain = TreeBatch(validate=False, **capacities)
    plain.update_(source, offsets)
    made = TreeBatch(validate=False, **capacities)
    made.ancestors.fill_(77)
    made.depths.fill_(77)
    made.status.fill_(77)
    if offsets is not None:
        made.offsets.copy_(offsets)
    for _ in range(2):  # the second time in place, from the parents that the first has stored
        build_into(
            source, made.offsets, made.parents, made.ancestors, made.depths, made.status,
            made.max_batch, made.max_nodes, made.max_depth,
        )  # fmt: skip
        for name in ("parents", "ancestors", "depths", "status"):
            assert torch.equal(getattr(made, name), getattr(plain, name)), (name, source.tolist(), offsets)
        if source.shape == made.parents.shape:
            source = made.parents
    return int(made.status)


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_dense(seed: int, faulty: bool) -> None:
    rng = random.Random(seed)
    for nodes in (1, 5, 31, 32, 33, 70):
        batch, depth = rng.randint(1, 3), rng.choice([nodes - 1, min(3, nodes - 1)])
        given = rng.randint(1, batch), rng.randint(1, nodes)
        source = torch.tensor(
            [random_row(rng, given[1], faulty) for _ in range(given[0])], dtype=rng.choice([torch.int32, torch.int64])
        )
        status = both(source, None, max_batch=batch, max_nodes=nodes, max_depth=depth)
        assert faulty or status in (0, 2)


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_packed(seed: int, faulty: bool) -> None:
    rng = random.Random(seed)
    for nodes in (1, 5, 32, 40):
        counts = [rng.randint(0, nodes + (2 if faulty else 0)) for _ in range(rng.randint(1, 4))]
        ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
        flat = [p for n in counts for p in random_row(rng, n, faulty)] + [-9] * rng.randrange(3)
        total = len(flat)
        if faulty and rng.random() < 0.5:
            ends[-1] += 10
        both(
            torch.tensor(flat, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32),
            max_batch=len(counts), max_nodes=nodes, max_depth=nodes - 1, max_total=total,
        )  # fmt: skip


def test_the_largest_tree() -> None:
    # Shallow, because interpreted steps are slow: a binary tree over all 512 bits.
    assert both(torch.tensor([[(i - 1) // 2 if i else -1 for i in range(512)]]), None, max_batch=1, max_nodes=512) == 0


def test_transposed_source() -> None:
    source = torch.tensor([[-1, 0, 0], [-1, 0, 1]]).t().contiguous().t()
    assert both(source, None, max_batch=2, max_nodes=3) == 0


def test_tree_batch_uses_the_kernel_when_triton_is_chosen() -> None:
    from bole_runtime import set_backend

    set_backend("triton")
    try:
        tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1, 2]]))
        assert tree.ancestors.flatten().tolist() == [1, 3, 5, 11, 21]
        packed = TreeBatch.from_packed(torch.tensor([-1, 0, -1, 0]), torch.tensor([0, 2, 4]), 4)
        packed.update_(torch.tensor([-1, 0, 1, -1]), torch.tensor([0, 3, 4]))
        assert packed.depths.tolist() == [0, 1, 2, 0]
        with pytest.raises(ValueError, match="parent must come before"):
            tree.update_(torch.tensor([[-1, 0, 4, 1, 2]]))
    finally:
        set_backend(None)


@pytest.mark.parametrize("far", [2**32, 2**32 + 1, -(2**32), 2**63 - 1])
def test_int64_offsets_beyond_int32_do_not_wrap(far: int) -> None:
    from bole_runtime import set_backend

    given = torch.tensor([-1, 0, far, 1]), torch.tensor([0, 2, far])
    trees = []
    for backend in ("triton", "torch"):
        set_backend(backend)
        try:
            trees.append(TreeBatch.from_packed(*given, 4, validate=False))
        finally:
            set_backend(None)
    made, plain = trees
    for name in ("parents", "ancestors", "depths", "status", "offsets"):
        assert torch.equal(getattr(made, name), getattr(plain, name)), name
    assert int(made.status) & 4
