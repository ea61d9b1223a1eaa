"""TreeBatch: bitmasks, depths, layouts, capacities, in-place updates, SGLang's form, and errors."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import random_parents

from bole_runtime.tree import MAX_NODES, STATUS_DEPTH, STATUS_NODES, STATUS_ORDER, STATUS_PARENT, TreeBatch

PARENTS = [-1, 0, 0, 1, 2]


def ancestors_of(parents: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


def bits(words: torch.Tensor) -> set[int]:
    return {32 * w + b for w, word in enumerate(words.tolist()) for b in range(32) if word >> b & 1}


def test_small_tree() -> None:
    tree = TreeBatch.from_parents(torch.tensor([PARENTS, [-1, -1, 1, -2, -2]]))
    assert tree.ancestors.dtype is torch.int32
    assert tree.ancestors.flatten().tolist() == [1, 3, 5, 11, 21, 1, 2, 6, 0, 0]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2], [0, 0, 1, -1, -1]]
    assert (tree.batch, tree.max_nodes, tree.max_total, tree.max_depth) == (2, 5, 10, 4)
    assert int(tree.status) == 0
    assert tree.path(0, 4) == [0, 2, 4]
    assert tree.mask()[0, 4].tolist() == [True, False, True, False, True]
    with pytest.raises(ValueError, match="node: 3 of request 1 is padding"):
        tree.path(1, 3)


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 64, 65, 200, MAX_NODES])
@pytest.mark.parametrize("packed", [False, True])
def test_random_forests(nodes: int, packed: bool) -> None:
    rng = random.Random(nodes)
    rows = [random_parents(rng, nodes, padding=0.1) for _ in range(2)]
    if packed:
        tree = TreeBatch.from_packed(
            torch.tensor([p for row in rows for p in row]), torch.tensor([0, nodes, 2 * nodes]), nodes
        )
    else:
        tree = TreeBatch.from_parents(torch.tensor(rows))
    words = tree.ancestors.reshape(2, nodes, -1)
    assert words.shape[-1] == (nodes + 31) // 32
    assert tree.ancestors.is_contiguous()
    for b, row in enumerate(rows):
        for i, p in enumerate(row):
            expected = set() if p == -2 else ancestors_of(row, i)
            assert bits(words[b, i]) == expected
            assert int(tree.depths.reshape(2, nodes)[b, i]) == len(expected) - 1


def test_bit_31_is_the_sign() -> None:
    tree = TreeBatch.chain(1, 32)
    assert int(tree.ancestors[0, 31, 0]) == -1


def test_packed_layout() -> None:
    parents = torch.tensor([-1, 0, -1, 0, 0, 7, 7])
    tree = TreeBatch.from_packed(parents, torch.tensor([0, 2, 2, 5]), 4)
    assert tree.is_packed
    assert (tree.batch, tree.max_nodes, tree.max_total) == (3, 4, 7)
    assert tree.depths.tolist() == [0, 1, 0, 1, 1, -1, -1]
    assert tree.ancestors.flatten().tolist() == [1, 3, 1, 3, 5, 0, 0]
    rows, live = tree.rows()
    assert live.sum(1).tolist() == [2, 0, 3]
    assert rows[2, :3].tolist() == [2, 3, 4]


def test_update_in_place() -> None:
    tree = TreeBatch.from_parents(torch.tensor([PARENTS, PARENTS]))
    pointers = [t.data_ptr() for t in (tree.parents, tree.ancestors, tree.depths, tree.status)]
    assert tree.update_(torch.tensor([[-1, 0, 1]], dtype=torch.int64)) is tree
    assert tree.depths.tolist() == [[0, 1, 2, -1, -1], [-1] * 5]
    assert [t.data_ptr() for t in (tree.parents, tree.ancestors, tree.depths, tree.status)] == pointers
    tree.parents[0, 2] = 0
    tree.update_()
    assert tree.depths.tolist()[0] == [0, 1, 1, -1, -1]


def test_update_packed_offsets() -> None:
    tree = TreeBatch.from_packed(torch.tensor([-1, 0, -1, 0]), torch.tensor([0, 2, 4]), 4)
    tree.update_(torch.tensor([-1, 0, 1, -1]), torch.tensor([0, 3, 4]))
    assert tree.depths.tolist() == [0, 1, 2, 0]
    tree.update_(torch.tensor([-1, 0, 0, -1]))
    assert tree.depths.tolist() == [0, 1, 1, 0]


def test_an_invalid_update_changes_nothing() -> None:
    tree = TreeBatch.from_parents(torch.tensor([PARENTS]))
    with pytest.raises(ValueError, match="parent must come before its child"):
        tree.update_(torch.tensor([[-1, 2, 0, 1, 2]]))
    assert tree.parents.tolist() == [PARENTS]
    assert int(tree.status) == 0


def test_sglang_form() -> None:
    parents = torch.tensor([[0, 0, 0, 1, 2], [5, 0, 99, 1, 2], [7, 0, 1, 2, 3]])
    for live in (
        torch.tensor([True, False, True]),
        torch.tensor([3, -1, 0]),
        torch.tensor([3, -1, 0], dtype=torch.int32),
    ):
        tree = TreeBatch.from_sglang(parents, live)
        assert tree.depths.tolist() == [[0, 1, 1, 2, 2], [-1] * 5, [0, 1, 2, 3, 4]]
    assert parents.tolist()[1] == [5, 0, 99, 1, 2]
    with pytest.raises(TypeError, match="live: expected a bool, int32 or int64 tensor"):
        TreeBatch.from_sglang(parents, torch.tensor([1.0, 0.0, 1.0]))
    with pytest.raises(ValueError, match="live: expected shape \\(3,\\), got \\(2,\\)"):
        TreeBatch.from_sglang(parents, torch.tensor([True, False]))


def test_chain() -> None:
    tree = TreeBatch.chain(2, 3)
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2
    assert tree.path(1, 2) == [0, 1, 2]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 2, 0], "node 1 of request 0 has parent 2; a parent must come before its child"),
        ([-1, 1, 0], "node 1 of request 0 has parent 1; a parent must come before"),  # a cycle of one
        ([2, 0, 1], "node 0 of request 0 has parent 2; a parent must come before"),  # a cycle of three
        ([-1, 0, 3], "node 2 of request 0 has parent 3; allowed: -1 .root., -2 .padding., or a node below 2"),
        ([-1, -3, 0], "node 1 of request 0 has parent -3; allowed"),
        ([-1, -2, 1], "node 2 of request 0 has parent 1, which is a padding node"),
    ],
)
def test_invalid_trees_are_refused(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeBatch.from_parents(torch.tensor([parents]))


def test_depth_above_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="2 strict ancestors, above max_depth = 1"):
        TreeBatch.from_parents(torch.tensor([[-1, 0, 1]]), max_depth=1)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3, 6], "request 1 owns rows 3 to 6, outside 0 to 5"),
        ([-1, 3, 5], "request 0 owns rows -1 to 3"),
        ([0, 4, 5], "request 0 has 4 nodes, above max_nodes = 3"),
        ([3, 1, 5], "request 0 ends before it starts"),
    ],
)
def test_invalid_offsets_are_refused(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeBatch.from_packed(torch.tensor([-1, 0, 1, -1, 0]), torch.tensor(offsets), 3)


@pytest.mark.parametrize(
    ("parents", "max_depth", "status", "depths"),
    [
        ([-1, 2, 0, 1, 2], 4, STATUS_ORDER, [0, -1, 1, -1, 2]),
        ([-1, 0, 9, 2, 1], 4, STATUS_PARENT, [0, 1, -1, -1, 2]),
        ([-1, -2, 1, 2, 0], 4, STATUS_PARENT, [0, -1, -1, -1, 1]),
        ([-1, 0, 1, 2, 0], 1, STATUS_DEPTH, [0, 1, -1, -1, 1]),
        ([3, -7, 1, 0, -1], 4, STATUS_ORDER | STATUS_PARENT, [-1, -1, -1, -1, 0]),
    ],
)
def test_without_validation_faults_become_padding(
    parents: list[int], max_depth: int, status: int, depths: list[int]
) -> None:
    tree = TreeBatch.from_parents(torch.tensor([parents]), max_depth, validate=False)
    assert int(tree.status) == status
    assert tree.depths.tolist() == [depths]
    assert [int(w) == 0 for w in tree.ancestors.flatten()] == [d < 0 for d in depths]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "far", [2**31, 2**32, 2**32 - 1, 2**32 - 2, 2**33 + 1, -(2**32), -(2**32) + 1, 2**63 - 1, -(2**63)]
)
def test_int64_parents_beyond_int32_do_not_wrap_into_nodes(far: int, packed: bool) -> None:
    parents = torch.tensor([-1, 0, far, 1])
    if packed:
        tree = TreeBatch.from_packed(parents, torch.tensor([0, 4]), 4, validate=False)
        repacked = TreeBatch(1, 4, max_total=4, validate=False).pack_(parents[None])
        assert repacked.parents.tolist() == tree.parents.tolist()
    else:
        tree = TreeBatch.from_parents(parents[None], validate=False)
    assert int(tree.status) & STATUS_PARENT
    assert tree.depths.flatten().tolist() == [0, 1, -1, 2]
    assert tree.parents.flatten().tolist() == [-1, 0, 2**31 - 1 if far > 0 else -(2**31), 1]
    # Built again from what it holds, it is the same tree.
    tree.update_()
    assert int(tree.status) & STATUS_PARENT
    assert tree.depths.flatten().tolist() == [0, 1, -1, 2]


@pytest.mark.parametrize("far", [2**32, 2**32 + 1, -(2**32)])
def test_int64_offsets_beyond_int32_do_not_wrap(far: int) -> None:
    tree = TreeBatch.from_packed(torch.tensor([-1, 0]), torch.tensor([0, far]), 2, validate=False)
    assert int(tree.status) & STATUS_NODES
    assert tree.offsets is not None
    assert tree.offsets.tolist() == [0, 2 if far > 0 else 0]
    assert tree.depths.tolist() == [-1, -1]


def test_too_many_packed_nodes_become_padding() -> None:
    tree = TreeBatch.from_packed(torch.tensor([-1, 0, 1, 2, -1]), torch.tensor([0, 4, 5]), 3, validate=False)
    assert int(tree.status) == STATUS_NODES
    assert tree.depths.tolist() == [0, 1, 2, -1, 0]


def test_argument_errors() -> None:
    with pytest.raises(TypeError, match=r"parents: expected a torch\.Tensor, got list"):
        TreeBatch.from_parents([[-1]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"parents: dtype torch\.float32 is not allowed"):
        TreeBatch.from_parents(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="parents: expected 2 dimension"):
        TreeBatch.from_parents(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="number of nodes: 513 is not allowed; allowed: 1 to 512"):
        TreeBatch.from_parents(torch.full((1, 513), -1))
    with pytest.raises(ValueError, match="number of nodes: 0 is not allowed"):
        TreeBatch.from_parents(torch.zeros(1, 0, dtype=torch.int32))
    with pytest.raises(ValueError, match="max_depth: 5 is not allowed; allowed: 0 to 4"):
        TreeBatch.from_parents(torch.tensor([PARENTS]), max_depth=5)
    with pytest.raises(TypeError, match="max_nodes: expected an int, got float"):
        TreeBatch.from_packed(torch.tensor([-1]), torch.tensor([0, 1]), 2.0)  # type: ignore[arg-type]
    tree = TreeBatch.from_parents(torch.tensor([PARENTS]))
    with pytest.raises(ValueError, match="above the capacity"):
        tree.update_(torch.full((1, 6), -1))
    with pytest.raises(ValueError, match="offsets: not allowed for a dense tree"):
        tree.update_(torch.tensor([PARENTS]), torch.tensor([0, 5]))
    packed = TreeBatch.from_packed(torch.tensor([-1, 0]), torch.tensor([0, 2]), 2)
    with pytest.raises(ValueError, match="parents: expected shape"):
        packed.update_(torch.tensor([-1]))
    with pytest.raises(ValueError, match="offsets: expected shape"):
        packed.update_(torch.tensor([-1, 0]), torch.tensor([0, 1, 2]))


def test_offsets_of_an_invalid_tree_stay_in_the_buffers() -> None:
    tree = TreeBatch.from_packed(torch.tensor([-1, 0, -1, 0]), torch.tensor([-3, 2, 50]), 3, validate=False)
    assert int(tree.status) & STATUS_NODES
    assert tree.offsets.tolist() == [0, 2, 4]
    assert tree.depths.tolist() == [-1] * 4
