"""Allocation over a batch: the best connected sets, in place, within every capacity; correction by feedback."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import random_parents
from hypothesis import given, settings
from hypothesis import strategies as st

from bole_runtime.budget import AcceptanceModel, allocate, choose_capacity, expected_tokens, reach
from bole_runtime.sampling import Acceptance, accept_predicted
from bole_runtime.tree import STATUS_TOTAL, TopKDraft, TreeBatch


def random_scores(rng: random.Random, parents: list[int], ties: bool) -> list[float]:
    """Cumulative probabilities that never grow along a path."""
    made: list[float] = []
    for parent in parents:
        step = rng.choice([1.0, 0.5, 0.25]) if ties else rng.random()
        made.append(1.0 if parent < 0 else made[parent] * step)
    return made


def depth_of(parents: list[int], node: int) -> int:
    return 0 if parents[node] < 0 else depth_of(parents, parents[node]) + 1


@st.composite
def batches(draw: Any) -> tuple[list[list[int]], list[list[float]]]:
    rng = random.Random(draw(st.integers(0, 10**6)))
    size, ties = draw(st.integers(1, 9)), draw(st.booleans())
    parents = []
    for _ in range(draw(st.integers(1, 4))):
        row = [-1, *(max(p, 0) for p in random_parents(rng, size)[1:])]
        live = rng.choice([0, size, rng.randint(1, size)])
        parents.append(row[:live] + [-2] * (size - live))
    return parents, [random_scores(rng, row, ties) for row in parents]


def plain(
    parents: list[list[int]], scores: list[list[float]], budget: int, max_nodes: int, max_depth: int
) -> list[tuple[int, int]]:
    """Take the best allowed node whose parent is taken, one by one; roots first."""
    taken = [(b, 0) for b, row in enumerate(parents) if row[0] == -1][:budget]
    while len(taken) < budget:
        options = [
            (-scores[b][i], b, i)
            for b, row in enumerate(parents)
            for i, p in enumerate(row)
            if p >= 0 and (b, p) in taken and (b, i) not in taken
            and sum(r == b for r, _ in taken) < max_nodes and depth_of(row, i) <= max_depth
        ]  # fmt: skip
        if not options:
            break
        _, b, i = min(options)
        taken.append((b, i))
    return sorted(taken)


@settings(max_examples=120, deadline=None)
@given(batch=batches(), data=st.data())
def test_the_best_nodes_of_the_batch_are_kept_connected(batch: Any, data: Any) -> None:
    parents, scores = batch
    size = len(parents[0])
    max_total = data.draw(st.integers(0, size * len(parents) + 2))
    budget = data.draw(st.integers(0, max_total + 2))
    max_nodes = data.draw(st.integers(1, size))
    max_depth = data.draw(st.integers(0, max_nodes - 1))
    tree = TreeBatch(len(parents) + 1, max_nodes, max_depth=max_depth, max_total=max_total)
    pointer = tree.parents.data_ptr()
    given_budget = torch.tensor([budget]) if data.draw(st.booleans()) else budget
    got = allocate(torch.tensor(parents), torch.tensor(scores), given_budget, tree)
    assert tree.parents.data_ptr() == pointer

    limit = min(budget, max_total)
    wanted = plain(parents, scores, limit, max_nodes, max_depth)
    rows = got.chosen[got.chosen >= 0].tolist()
    assert got.chosen.tolist() == rows + [-1] * (max_total - len(rows))
    found = [divmod(r, size) for r in rows]
    # Among ties the sets may differ where caps bind, but not in what they are worth, nor in size.
    assert len(found) == len(wanted)
    values = [sorted(1.0 if i == 0 else scores[b][i] for b, i in nodes) for nodes in (found, wanted)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    if len({s for row in scores for s in row[1:]}) == sum(len(row) - 1 for row in scores):
        assert found == wanted
    counts = [sum(b == r for r, _ in found) for b in range(len(parents))]
    assert got.counts.tolist() == counts
    assert tree.offsets.tolist()[:-1] == [sum(counts[:b]) for b in range(len(counts) + 1)]
    assert float(got.expected.sum()) == pytest.approx(sum(values[0]), rel=1e-5)
    # The packed tree is the same tree: parents by their old index.
    for row, (b, i) in enumerate(found):
        parent = int(tree.parents[row])
        start = int(tree.offsets[b])
        assert (parents[b][i] if parent < 0 else found[start + parent][1]) == parents[b][i]
    roots = sum(row[0] == -1 for row in parents)
    assert bool(int(tree.status) & STATUS_TOTAL) == (roots > limit)
    assert int(tree.status) & ~STATUS_TOTAL == 0
    taken = got.take(torch.tensor(scores), fill=-7)
    assert taken.tolist() == pytest.approx([scores[b][i] for b, i in found] + [-7] * (max_total - len(found)))


def test_faulty_candidates_become_padding() -> None:
    nan = float("nan")
    parents = torch.tensor([[-1, 0, 3, 2, 1, 9, 1], [-2, 0, 0, 0, 0, 0, 0]])
    scores = torch.tensor([[nan, 0.9, 0.9, 0.9, nan, 0.9, 2.0], [1.0] * 7])
    # A parent after its child and one beyond the row; all below padding; more than 1 counts as what the parent has.
    assert reach(parents, scores).tolist()[0] == pytest.approx([2, 0.9, -1, -1, 0, -1, 0.9])
    assert reach(parents, scores).tolist()[1] == [-1] * 7
    tree = TreeBatch(2, 7, max_total=9)
    got = allocate(parents, scores, 9, tree)
    assert got.chosen.tolist() == [0, 1, 6] + [-1] * 6


def test_further_roots_take_no_room_and_promise_nothing() -> None:
    # Acceptance begins at the first root: what hangs on another one is never reached.
    parents = torch.tensor([[-1, -1, -1, 0, 1], [-2, -1, 1, -1, 3]])
    scores = torch.tensor([[1.0, 0.01, 1.0, 0.9, 1.0], [1.0, 1.0, 0.5, 0.8, 0.7]])
    keys = reach(parents, scores)
    assert keys.flatten().tolist() == pytest.approx([2, -1, -1, 0.9, -1, -1, 2, 0.5, -1, -1])
    totals = torch.tensor([1, 2, 3, 4, 9])
    assert expected_tokens(parents, scores, totals).tolist() == pytest.approx([1, 2, 2.9, 3.4, 3.4])
    tree = TreeBatch(2, 5, max_total=3)
    got = allocate(parents, scores, 3, tree)
    assert (got.chosen.tolist(), got.counts.tolist(), int(tree.status)) == ([0, 3, 6], [2, 1], 0)
    assert got.expected.tolist() == pytest.approx([1.9, 1.0])
    # Two requests are live, whatever they have of roots: the bucket of two rows starves none.
    index, rates = choose_capacity(parents, scores, torch.tensor([1, 2, 9]), torch.tensor([1.0, 10.0, 1000.0]))
    assert (int(index), rates.tolist()) == (1, pytest.approx([0.0, 2e5, 3.4e3]))


def test_a_draft_goes_straight_into_the_forest() -> None:
    draft = TopKDraft(2, 2, 2)
    draft.start(torch.tensor([5, 6]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.9, 0.05], [0.5, 0.4]]))
    draft.expand(torch.arange(8).view(2, 2, 2), torch.full((2, 2, 2), 0.5))
    tree = TreeBatch(2, 7, max_total=8)
    made = draft.candidates
    got = allocate(made.parents, made.log_probs.exp(), 6, tree)
    assert got.counts.tolist() == [4, 2]  # 0.9 and twice 0.45; 0.5
    assert got.take(made.tokens).tolist() == [5, 1, 0, 1, 6, 3, -1, -1]


def test_expected_tokens_and_the_best_capacity() -> None:
    parents = torch.tensor([[-1, 0, 1, 0], [-1, 0, 0, 1]])
    scores = torch.tensor([[1.0, 0.8, 0.4, 0.1], [1.0, 0.6, 0.3, 0.5]])
    totals = torch.tensor([0, 1, 2, 3, 5, 8, 100])
    wanted = [0, 1, 2, 2.8, 3.9, 4.7, 4.7]
    assert expected_tokens(parents, scores, totals).tolist() == pytest.approx(wanted)
    for total, value in zip(totals.tolist(), wanted, strict=True):
        tree = TreeBatch(2, 4, max_total=max(total, 2))
        assert float(allocate(parents, scores, total, tree).expected.sum()) == pytest.approx(value)
    costs = torch.tensor([1.0, 10.0, 10.0, 11.0, 14.0, 40.0, 400.0])
    index, rates = choose_capacity(parents, scores, totals, costs)
    enough = [0, 0, *wanted[2:]]  # the first two have no row for the second root
    assert rates.tolist() == pytest.approx([w / c * 1e6 for w, c in zip(enough, costs.tolist(), strict=True)])
    assert int(index) == 4
    assert int(choose_capacity(parents, scores, totals[2:4], torch.tensor([2.0, 2.8]))[0]) == 0  # a tie


PACKED, CHAIN = TreeBatch(1, 2, max_total=2), TreeBatch.chain(1, 2)
OTHER = Acceptance.empty(TreeBatch.chain(1, 3))


def test_a_bucket_that_would_starve_a_request_is_not_chosen() -> None:
    parents, scores = torch.tensor([[-1, 0]] * 8), torch.full((8, 2), 0.1)
    index, rates = choose_capacity(parents, scores, torch.tensor([2, 8, 16]), torch.tensor([1.0, 100.0, 101.0]))
    assert int(index) == 2
    assert rates.tolist() == pytest.approx([0.0, 8e4, 8.8e6 / 101])
    # Where every bucket is too small, the best of them has to do.
    assert int(choose_capacity(parents, scores, torch.tensor([2, 4]), torch.tensor([1.0, 100.0]))[0]) == 0


@pytest.mark.parametrize("bad", [float("nan"), 0.0, -1.0])
def test_a_cost_that_is_none_rules_its_bucket_out(bad: float) -> None:
    parents, scores, totals = torch.tensor([[-1, 0]]), torch.ones(1, 2), torch.tensor([1, 2])
    index, rates = choose_capacity(parents, scores, totals, torch.tensor([bad, 2.0]))
    assert (int(index), rates.tolist()) == (1, pytest.approx([0.0, 1e6]))
    index, rates = choose_capacity(parents, scores, totals, torch.tensor([bad, bad]))
    assert (int(index), rates.tolist()) == (0, [0.0, 0.0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p, s: reach(p, [1.0]), TypeError, "scores: expected a floating-point tensor, got list"),
        (lambda p, s: reach(p, s.long()), TypeError, "scores: expected a floating-point tensor, got torch.int64"),
        (lambda p, s: reach(p, s, -1), ValueError, "max_nodes: -1 is not allowed"),
        (lambda p, s: reach(p, s, None, 1.5), TypeError, "max_depth: expected an int"),
        (lambda p, s: allocate(p, s, 2, None), TypeError, "tree: expected a TreeBatch, got NoneType"),
        (lambda p, s: allocate(p, s, torch.tensor(True), PACKED), ValueError, "budget: expected one integer"),
        (lambda p, s: expected_tokens(p, s, [2]), TypeError, "totals: expected a torch.Tensor, got list"),
        (lambda p, s: expected_tokens(p, s, torch.tensor([2.0])), TypeError, "totals: dtype torch.float32"),
        (lambda p, s: choose_capacity(p, s, [2], [1.0]), TypeError, "totals: expected a torch.Tensor, got list"),
        (lambda p, s: AcceptanceModel(bins=1.5), TypeError, "bins: expected an int"),
        (lambda p, s: AcceptanceModel(prior=math.inf), ValueError, "prior: inf is not allowed; allowed: above 0, fin"),
        (lambda p, s: AcceptanceModel(memory="x"), TypeError, "memory: expected a number, got str"),
        (lambda p, s: AcceptanceModel().correct([0.5]), TypeError, "scores: expected a floating-point tensor"),
        (lambda p, s: AcceptanceModel().update(s, None, None), TypeError, "tree, result: expected TreeBatch and Acc"),
        (lambda p, s: AcceptanceModel().update(s, CHAIN, OTHER), ValueError, r"result\.path: expected torch\.int32"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.tensor([[-1, 0]]), torch.ones(1, 2))


def test_allocation_errors() -> None:
    parents, scores = torch.tensor([[-1, 0]]), torch.ones(1, 2)
    packed = TreeBatch(1, 2, max_total=2)
    with pytest.raises(ValueError, match="tree: must be packed"):
        allocate(parents, scores, 2, TreeBatch(1, 2))
    with pytest.raises(ValueError, match=r"scores: expected shape \(1, 2\)"):
        allocate(parents, scores[:, :1], 2, packed)
    with pytest.raises(ValueError, match="parents: 2 requests, above max_batch = 1"):
        allocate(parents.repeat(2, 1), scores.repeat(2, 1), 2, packed)
    with pytest.raises(ValueError, match="budget: -1 is not allowed"):
        allocate(parents, scores, -1, packed)
    with pytest.raises(TypeError, match="budget: expected an int"):
        allocate(parents, scores, 2.0, packed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget: expected one integer"):
        allocate(parents, scores, torch.tensor([1, 2]), packed)
    with pytest.raises(ValueError, match="totals, costs_us"):
        choose_capacity(parents, scores, torch.tensor([1]), torch.tensor([1.0, 2.0]))


def test_the_correction_learns_what_is_accepted() -> None:
    # Drafts at 0.8 are accepted half of the time, those at 0.1 as predicted.
    model = AcceptanceModel(prior=4.0, memory=1000.0)
    assert model.correct(torch.tensor([0.8, 0.1, 1.0])).tolist() == pytest.approx([0.8, 0.1, 1.0])
    gen = torch.Generator().manual_seed(0)
    batch = 64
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0]]).expand(batch, -1))
    scores = torch.tensor([1.0, 0.8, 0.1]).expand(batch, -1)
    tokens = torch.tensor([0, 1, 2]).expand(batch, -1)
    for _ in range(100):
        draw = torch.rand(batch, generator=gen)
        said = torch.where(draw < 0.4, 1, torch.where(draw < 0.5, 2, 9)).unsqueeze(1).expand(-1, 3)
        model.update(scores, tree, accept_predicted(said, tokens, tree))
    found = model.correct(torch.tensor([0.8, 0.1, 0.001])).tolist()
    # 6400 draws: one standard deviation is 0.006 for the first and 0.004 for the second.
    assert found[0] == pytest.approx(0.4, abs=0.025)
    assert found[1] == pytest.approx(0.1, abs=0.016)
    assert found[2] == pytest.approx(0.001)
    with pytest.raises(ValueError, match="prior: 0 is not allowed"):
        AcceptanceModel(prior=0)
    with pytest.raises(ValueError, match=r"scores: expected shape \(64, 3\)"):
        model.update(scores[:1], tree, accept_predicted(tokens, tokens, tree))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [1, 2, 4])
def test_what_could_not_be_walked_is_no_rejection(packed: bool, bad: int) -> None:
    # Request 0 is accepted whole; the walk of request 1 met a row that says nothing.
    parents, tokens, size = [[-1, 0, 1], [-1, 0, 1]], torch.tensor([[0, 1, 2]] * 2), 3
    tree = TreeBatch.from_parents(torch.tensor(parents))
    if packed:
        tree = TreeBatch.from_packed(torch.tensor(parents).flatten(), torch.tensor([0, 3, 6]), 3)
        tokens = tokens.flatten()
    said = torch.tensor([[1, 2, 9], [-5, 2, 9]]).reshape(tokens.shape)
    result = accept_predicted(said, tokens, tree)
    assert result.status.tolist() == [0, 4]
    result.status[1] = bad
    scores = torch.tensor([[1.0, 0.9, 0.4], [1.0, 0.9, 0.4]]).reshape(tokens.shape)
    model, alone = AcceptanceModel(prior=1.0), AcceptanceModel(prior=1.0)
    model.update(scores, tree, result)
    one = TreeBatch.from_parents(torch.tensor(parents[:1]))
    first = torch.tensor([[0, 1, 2]])
    alone.update(scores.reshape(2, size)[:1], one, accept_predicted(torch.tensor([[1, 2, 9]]), first, one))
    assert torch.equal(model.predicted, alone.predicted)
    assert torch.equal(model.accepted, alone.accepted)
    assert float(model.accepted.sum()) == 2.0


def test_the_correction_forgets() -> None:
    model = AcceptanceModel(prior=1.0, memory=5.0)
    tree = TreeBatch.chain(1, 2)
    scores, tokens = torch.tensor([[1.0, 0.5]]), torch.tensor([[0, 1]])
    yes = accept_predicted(torch.tensor([[1, 1]]), tokens, tree)
    no = accept_predicted(torch.tensor([[0, 0]]), tokens, tree)
    for _, result in itertools.product(range(50), [yes]):
        model.update(scores, tree, result)
    high = float(model.correct(torch.tensor(0.5)))
    for _ in range(50):
        model.update(scores, tree, no)
    assert high > 0.7
    assert float(model.correct(torch.tensor(0.5))) < 0.2
