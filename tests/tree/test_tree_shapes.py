"""Static shapes and EAGLE-2 style drafts."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bole_runtime.tree import Candidates, CapacityBuckets, TopKDraft, TreeBatch, chain, k_ary, keep_best, sequoia


def test_small_shapes_by_hand() -> None:
    assert chain(4).parents == (-1, 0, 1, 2)
    shape = k_ary((2, 2))
    assert shape.parents == (-1, 0, 0, 1, 1, 2, 2)
    assert shape.ranks == (0, 0, 1, 0, 1, 0, 1)
    assert (shape.nodes, shape.depth, shape.depths) == (7, 2, (0, 1, 1, 2, 2, 2, 2))
    assert k_ary(()).parents == (-1,)
    assert k_ary((2, 2)).expected([0.5, 0.2]) == pytest.approx(1 + 0.7 + 0.49)
    tree = k_ary((2, 1)).batch(3)
    assert (tree.max_batch, tree.max_nodes, tree.max_depth) == (3, 5, 2)
    with pytest.raises(ValueError, match="number of nodes: 513"):
        k_ary((600 // 2, 2))
    with pytest.raises(ValueError, match="nodes: 0 is not allowed"):
        chain(0)


def every_tree(nodes: int, ranks: int, depth: int) -> list[list[float]]:
    """All trees of up to ``nodes`` nodes, as the products of rank factors: list of (node -> path of ranks)."""

    @lru_cache(None)
    def grow(size: int, levels: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        if size == 1 or levels == 0:
            return (((),),)
        made = set()
        for widths in itertools.product(range(size), repeat=ranks):
            if sum(widths) > size - 1 or any(b and not a for a, b in itertools.pairwise(widths)):
                continue
            options = [grow(w, levels - 1) for w in widths if w]
            for picked in itertools.product(*options):
                made.add(((), *((r, *path) for r, sub in enumerate(picked) for path in sub)))
        return tuple(made)

    return list(grow(nodes, depth))


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("rates", [(0.6, 0.3), (0.3, 0.6), (0.5, 0.0, 0.4), (0.8,), (0.2, 0.2, 0.2)])
def test_sequoia_finds_the_best_of_all_trees(rates: tuple[float, ...], depth: int) -> None:
    nodes = 5

    def value(paths: tuple[tuple[int, ...], ...]) -> float:
        total = 0.0
        for path in paths:
            product = 1.0
            for r in path:
                product *= rates[r]
            total += product
        return total

    best = max(value(paths) for paths in every_tree(nodes, len(rates), depth))
    found = sequoia(rates, nodes, depth)
    assert found.nodes <= nodes
    assert found.depth <= depth
    assert found.expected(rates) == pytest.approx(best)


@settings(max_examples=25, deadline=None)
@given(
    rates=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
    nodes=st.integers(1, 40),
    depth=st.integers(0, 12),
)
def test_sequoia_equals_the_greedy_choice_for_falling_rates(rates: list[float], nodes: int, depth: int) -> None:
    # With falling rates the most probable nodes are connected, so taking them one by one is optimal.
    rates = sorted((r / sum(rates) * 0.95 for r in rates), reverse=True)
    shape = sequoia(rates, nodes, depth)
    frontier, taken = [(1.0, 0)], []
    while frontier and len(taken) < nodes:
        frontier.sort(reverse=True)
        chance, level = frontier.pop(0)
        taken.append(chance)
        if level < depth:
            frontier.extend((chance * r, level + 1) for r in rates)
    assert shape.expected(rates) == pytest.approx(sum(taken), rel=1e-9)
    assert all(p < i for i, p in enumerate(shape.parents))
    assert list(shape.depths) == sorted(shape.depths)
    for i, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        siblings = [shape.ranks[j] for j in range(shape.nodes) if shape.parents[j] == parent]
        assert siblings == list(range(len(siblings))), i
        assert rank < len(rates)


def test_sequoia_of_the_largest_size_and_errors() -> None:
    shape = sequoia((0.6, 0.2, 0.1), 512, 16)
    assert shape.nodes == 512
    assert shape.depth <= 16
    for rates in ((1.2,), (-0.1, 0.5), (0.7, 0.7), (float("nan"),)):
        with pytest.raises(ValueError, match="acceptance"):
            sequoia(rates, 4)


def draft_by_hand(
    rng: random.Random, k: int, levels: int, nodes: int
) -> tuple[list[list[float]], list[int], list[int]]:
    """Draw the probabilities of every call, and the tree that a plain loop over scored nodes keeps."""
    calls = [[rng.random() for _ in range(k)]]
    score, parent = [1.0], [-1]
    frontier = [0]
    for level in range(levels):
        if level:
            calls.append([rng.random() for _ in range(k * k)])
        start = len(score)
        for i, node in enumerate(frontier):
            for j in range(k):
                score.append(score[node] * calls[-1][i * k + j])
                parent.append(node)
        frontier = sorted(range(start, len(score)), key=lambda n: -score[n])[:k]
    kept = sorted(sorted(range(len(score)), key=lambda n: -score[n])[:nodes])
    place = {n: i for i, n in enumerate(kept)}
    return calls, [place[parent[n]] if n else -1 for n in kept], kept


@pytest.mark.parametrize(("k", "levels", "nodes"), [(1, 5, 6), (3, 1, 4), (3, 4, 12), (4, 3, 20)])
def test_top_k_draft_is_the_plain_loop(k: int, levels: int, nodes: int) -> None:
    rng = random.Random(k)
    made = [draft_by_hand(rng, k, levels, nodes) for _ in range(3)]
    draft = TopKDraft(4, k, levels)  # the last request is padding
    for _ in range(2):  # buffers are reused
        ids = torch.arange(1, k + 1).expand(4, k)
        probs = torch.tensor([calls[0] for calls, _, _ in made] + [[0.5] * k])
        frontier = draft.start(torch.tensor([100, 101, 102, -1]), ids, probs)
        assert frontier.shape == (4, k)
        for level in range(1, levels):
            first = 1 + k + (level - 1) * k * k
            ids = torch.arange(first, first + k * k).view(k, k).expand(4, k, k)
            probs = torch.tensor([calls[level] for calls, _, _ in made] + [[0.5] * k * k]).view(4, k, k)
            frontier = draft.expand(ids, probs)
    got = draft.best(nodes)
    for b, (_, parents, kept) in enumerate(made):
        assert got.parents[b].tolist() == parents
        assert got.chosen[b].tolist() == kept
        assert got.tokens[b].tolist() == [100 + b, *kept[1:]]  # ids are candidate indices here
    assert got.parents[3].tolist() == [-2] * nodes
    assert got.tokens[3].tolist() == [-1] * nodes
    TreeBatch.from_parents(got.parents)
    with pytest.raises(ValueError, match="expand: level"):
        draft.expand(torch.zeros(4, k, k).long(), torch.zeros(4, k, k))


def test_bad_probabilities_never_disconnect_a_tree() -> None:
    draft = TopKDraft(1, 2, 3)
    draft.start(torch.tensor([1]), torch.tensor([[2, 3]]), torch.tensor([[0.5, float("nan")]]))
    draft.expand(torch.full((1, 2, 2), 4), torch.tensor([[[1.5, 1.0], [0.9, 2.0]]]))
    draft.expand(torch.full((1, 2, 2), 5), torch.tensor([[[1.0, 0.0], [1.0, 1.0]]]))
    for nodes in range(1, 12):
        got = draft.best(nodes)
        TreeBatch.from_parents(got.parents)  # validates
        live = got.parents[0] != -2
        assert not bool((live[1:] & ~live[:-1]).any())  # padding comes last
        assert bool((got.log_probs[0][live] > float("-inf")).all())


def test_ties_keep_the_parent() -> None:
    parents = torch.tensor([[-1, 0, 1, 2, 0]], dtype=torch.int32)
    got = keep_best(Candidates(parents, torch.arange(5).unsqueeze(0), torch.zeros(1, 5)), 3)
    assert got.chosen.tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="nodes: 6"):
        keep_best(Candidates(parents, torch.arange(5).unsqueeze(0), torch.zeros(1, 5)), 6)


def test_trees_of_wrong_types_are_refused_by_name() -> None:
    for call in (lambda b: TreeBatch.chain(b, 3), lambda b: chain(3).batch(b)):
        with pytest.raises(ValueError, match="batch: -1 is not allowed"):
            call(-1)
    with pytest.raises(TypeError, match="nodes: expected an int, got str"):
        TreeBatch.chain(1, "4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"capacities\[0\]: expected a Capacity, got str"):
        CapacityBuckets(["small"])  # type: ignore[list-item]
    draft, one = TopKDraft(1, 2, 1), torch.tensor([1])
    with pytest.raises(TypeError, match=r"tokens: expected a torch.Tensor, got list"):
        draft.start([1], one, one)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ids: dtype torch.float32 is not allowed"):
        draft.start(one, torch.rand(1, 2), torch.rand(1, 2))
