"""Child and sibling links to parents, packing of ragged rows, capacity buckets."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import random_parents
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_links import follow, links_of

from bole_runtime.tree import (
    STATUS_NODES,
    STATUS_ORDER,
    STATUS_TOTAL,
    Capacity,
    CapacityBuckets,
    TreeBatch,
    parents_from_links,
)


def single_root(rng: random.Random, nodes: int) -> list[int]:
    return [-1, *(p if p >= 0 else rng.randrange(i + 1) for i, p in enumerate(random_parents(rng, nodes)[1:]))]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("nodes", [1, 2, 9, 33, 200, 512])
def test_links_of_a_tree_give_its_parents(nodes: int, dtype: torch.dtype) -> None:
    rng = random.Random(nodes)
    rows = [single_root(rng, nodes) for _ in range(3)]
    rows.append(list(range(-1, nodes - 1)))
    rows.append([-1] + [0] * (nodes - 1))
    links = [links_of(row) for row in rows]
    tokens = torch.tensor([t for t, _ in links], dtype=dtype)
    siblings = torch.tensor([s for _, s in links], dtype=dtype)
    slots = torch.tensor([3, 0, -1, 1, 2])
    wanted = torch.tensor([[-2] * nodes if s < 0 else r for r, s in zip(rows, slots.tolist(), strict=True)])
    assert torch.equal(parents_from_links(tokens, siblings, slots), wanted.int())
    assert torch.equal(parents_from_links(tokens, siblings, slots >= 0), wanted.int())
    tree = TreeBatch.from_links(tokens, siblings, slots)
    assert torch.equal(tree.parents, wanted.int())


@st.composite
def trees_with_gaps(draw: Any) -> list[int]:
    row = [-1]
    for _ in range(draw(st.integers(0, 20))):
        row.append(draw(st.sampled_from([-2, *[j for j in range(len(row)) if row[j] != -2]])))
    return row


@settings(max_examples=80, deadline=None)
@given(parents=trees_with_gaps())
def test_nodes_without_a_link_are_padding(parents: list[int]) -> None:
    tokens, siblings = links_of(parents)
    got = parents_from_links(torch.tensor([tokens]), torch.tensor([siblings]), torch.tensor([True]))
    assert got.tolist() == [parents]
    assert follow(tokens, siblings) == parents


@settings(max_examples=150, deadline=None)
@given(data=st.data(), nodes=st.integers(1, 9))
def test_random_links_never_lead_out_of_the_row(data: Any, nodes: int) -> None:
    link = st.one_of(st.integers(-2, nodes + 1), st.sampled_from([2**31 - 1, -(2**31), 2**40]))
    tokens, siblings = ([data.draw(link) for _ in range(nodes)] for _ in range(2))
    got = parents_from_links(torch.tensor([tokens]), torch.tensor([siblings]), torch.tensor([0])).tolist()[0]
    assert got[0] == -1
    for i, parent in enumerate(got[1:], 1):
        assert parent == -2 or (0 <= parent < nodes and parent != i)
        # Every parent is reached, so that no node hangs below padding, and there is no cycle.
        seen = set()
        while parent >= 0:
            assert parent not in seen
            seen.add(parent)
            parent = got[parent]
        assert parent in (-1, -2)
        assert parent == -1 or not seen
    if len({t for t in tokens + siblings if 0 < t < nodes}) == sum(0 < t < nodes for t in tokens + siblings):
        assert got == follow(tokens, siblings)  # no node is claimed twice


def test_links_whose_child_comes_first_are_reported() -> None:
    tokens, siblings = torch.tensor([[2, -1, 1]]), torch.full((1, 3), -1)
    with pytest.raises(ValueError, match="a parent must come before its child"):
        TreeBatch.from_links(tokens, siblings, torch.tensor([0]))
    tree = TreeBatch.from_links(tokens, siblings, torch.tensor([0]), validate=False)
    assert (int(tree.status), tree.depths.tolist()) == (STATUS_ORDER, [[0, -1, 1]])


def test_link_errors() -> None:
    good = torch.zeros(2, 3, dtype=torch.int32)
    live = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"next_sibling: expected shape \(2, 3\)"):
        parents_from_links(good, good[:, :2], live)
    with pytest.raises(TypeError, match="live: expected a bool"):
        parents_from_links(good, good, live.float())
    with pytest.raises(ValueError, match=r"live: expected shape \(2,\)"):
        parents_from_links(good, good, live[:1])
    with pytest.raises(ValueError, match="out: expected contiguous int32"):
        parents_from_links(good, good, live, out=good.long())
    with pytest.raises(TypeError, match="next_token: dtype"):
        parents_from_links(good.float(), good, live)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), counts=st.lists(st.integers(0, 7), min_size=1, max_size=5), spare=st.integers(-6, 3))
def test_packing(seed: int, counts: list[int], spare: int) -> None:
    rng = random.Random(seed)
    rows = [random_parents(rng, n, padding=0.1) if n else [] for n in counts]
    dense = torch.tensor([r + [-2] * (7 - len(r)) for r in rows])
    given = None if rng.random() < 0.5 else torch.tensor(counts)
    if given is None:  # padding at the end of a row is not a node
        counts = [max((i + 1 for i, p in enumerate(r) if p != -2), default=0) for r in rows]
    total = max(0, sum(counts) + spare)
    tree = TreeBatch(len(counts) + 1, 7, max_total=total, validate=False)
    tree.parents.fill_(99)
    pointer = tree.parents.data_ptr()
    assert tree.pack_(dense, given) is tree
    assert tree.parents.data_ptr() == pointer
    kept, used = [], 0
    for n in counts:
        used += n
        kept.append(n if used <= total else 0)
    assert bool(int(tree.status) & STATUS_TOTAL) == (used > total)
    assert tree.offsets.tolist() == [sum(kept[:b]) for b in range(len(kept) + 1)] + [sum(kept)]
    flat = [p for row, n in zip(rows, kept, strict=True) for p in row[:n]]
    assert tree.parents.tolist() == flat + [-2] * (total - len(flat))
    if used <= total:
        _, live = tree.rows()
        assert torch.equal(live[:-1], TreeBatch.from_parents(dense, validate=False).depths >= 0)
    else:
        with pytest.raises(ValueError, match="nodes in all, above max_total"):
            TreeBatch(len(counts), 7, max_total=total).pack_(dense, given)


def test_packing_errors() -> None:
    dense = torch.tensor([[-1, 0]])
    with pytest.raises(ValueError, match="pack_: the tree is dense"):
        TreeBatch(1, 2).pack_(dense)
    tree = TreeBatch(1, 2, max_total=2)
    with pytest.raises(ValueError, match=r"parents: shape \(2, 2\) is above the capacity"):
        tree.pack_(dense.repeat(2, 1))
    with pytest.raises(ValueError, match=r"counts: expected shape \(1,\)"):
        tree.pack_(dense, torch.tensor([1, 1]))
    tree.pack_(dense)
    with pytest.raises(ValueError, match="a parent must come before"):
        tree.pack_(torch.tensor([[1, -1]]))
    assert (tree.parents.tolist(), int(tree.status) & STATUS_NODES) == ([-1, 0], 0)


def test_buckets_pick_the_smallest_that_holds() -> None:
    buckets = CapacityBuckets.grid(batches=[1, 4, 16], nodes_per_request=[2, 8], max_nodes=16, max_depth=7)
    assert len(buckets) == 6
    assert [c.max_total for c in buckets] == sorted(c.max_total for c in buckets)
    for batch, nodes, total, depth in ((1, 1, 1, 0), (1, 8, 8, 7), (3, 5, 8, 4), (4, 9, 12, 3), (16, 16, 128, 7)):
        picked = buckets.pick(batch, nodes, total, depth)
        assert picked.holds(batch, nodes, total, depth)
        assert all(not c.holds(batch, nodes, total, depth) for c in buckets if c < picked)
    with pytest.raises(ValueError, match="no capacity bucket holds batch 17"):
        buckets.pick(17, 1, 17, 0)
    tree = Capacity(8, 4, 5, 3).tree()
    assert (tree.max_batch, tree.max_nodes, tree.max_depth, tree.max_total, tree.is_packed) == (4, 5, 3, 8, True)
    with pytest.raises(ValueError, match="at least one"):
        CapacityBuckets([])
    with pytest.raises(ValueError, match="max_depth: 5 is not allowed"):
        CapacityBuckets([Capacity(8, 4, 5, 5)])
