"""Acceptance, links, packing, allocation on a CUDA device: equal to the CPU's, in captured graphs, without a sync."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import random_parents
from tree_links import links_of

from bole_runtime import Acceptance, SamplingParams, TreeBatch, accept, set_backend
from bole_runtime.budget import AcceptanceModel, allocate, choose_capacity
from bole_runtime.sampling import compact_
from bole_runtime.tree import TopKDraft, parents_from_links

pytestmark = pytest.mark.gpu

FIELDS = ("accepted", "path", "lengths", "bonus", "tokens", "source", "target", "status")
FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}


def problem(method: str, size: int, dtype: torch.dtype, packed: bool) -> tuple[TreeBatch, Any]:
    """Return a tree and a call of accept on the device; the logits have clear winners."""
    gen = torch.Generator().manual_seed(size)
    rng = random.Random(size)
    rows = [[-1, *(max(p, 0) for p in random_parents(rng, 20)[1:])] for _ in range(6)]
    if packed:
        flat = torch.tensor([p for row in rows for p in row])
        tree = TreeBatch.from_packed(flat.cuda(), torch.arange(0, 121, 20).cuda(), 20)
    else:
        tree = TreeBatch.from_parents(torch.tensor(rows).cuda())
    logits = torch.randn(*tree.lead, size, generator=gen) * 0.5
    logits[..., :3] += 9
    tokens = torch.randint(0, 3, tree.lead, generator=gen)
    options: dict[str, Any] = {}
    if method != "greedy":
        options = {"params": SamplingParams(6, **FILTERS, device="cuda"), "seeds": torch.arange(6).cuda(),
                   "positions": torch.arange(6).cuda()}  # fmt: skip
    if method == "rejection":
        options["draft_probs"] = (torch.randn(*tree.lead, size, generator=gen) + logits).softmax(-1).cuda()
    arguments = (logits.to(dtype).cuda(), tokens.cuda(), tree)
    return tree, lambda out=None: accept(*arguments, method=method, out=out, **options)


# Few, because every one compiles a kernel for seconds.
@pytest.mark.parametrize(
    ("method", "dtype", "size", "packed"),
    [
        ("greedy", torch.bfloat16, 151_936, False),
        ("greedy", torch.float32, 100, True),
        ("sample", torch.bfloat16, 151_936, False),
        ("sample", torch.float32, 5000, True),
        ("rejection", torch.bfloat16, 5000, True),
        ("rejection", torch.float32, 151_936, False),
    ],
)
def test_the_kernel_is_the_torch_walk(method: str, dtype: torch.dtype, size: int, packed: bool) -> None:
    _, call = problem(method, size, dtype, packed)
    made = call()
    set_backend("torch")
    try:
        plain = call()
    finally:
        set_backend(None)
    for name in FIELDS:
        assert torch.equal(getattr(made, name), getattr(plain, name)), name
    assert int(made.lengths.max()) > 1


def test_a_round_in_one_captured_graph() -> None:
    batch, k, levels, size = 4, 3, 3, 64
    draft = TopKDraft(batch, k, levels, device="cuda")
    forest = TreeBatch(batch, 16, max_total=40, device="cuda")
    out = Acceptance.empty(forest)
    model = AcceptanceModel(device="cuda")
    params = SamplingParams(batch, temperature=0.7, top_p=0.9, device="cuda")
    seeds, positions = torch.arange(batch).cuda(), torch.zeros(batch, dtype=torch.int64).cuda()
    budget = torch.tensor([20]).cuda()
    last = torch.zeros(batch, dtype=torch.int64).cuda()
    ids = torch.randint(0, size, (levels, batch, k, k)).cuda()
    probs = torch.rand(levels, batch, k, k).cuda()
    logits = torch.randn(40, size).cuda()
    cache = torch.randn(40, 8).cuda()
    totals, costs = torch.tensor([8, 20, 40]).cuda(), torch.tensor([10.0, 12.0, 30.0]).cuda()

    def step() -> torch.Tensor:
        draft.start(last, ids[0, :, 0], probs[0, :, 0])
        for level in range(1, levels):
            draft.expand(ids[level], probs[level])
        made = draft.candidates
        scores = made.log_probs.exp()
        bucket, _ = choose_capacity(made.parents, model.correct(scores), totals, costs)
        chosen = allocate(made.parents, scores, budget, forest)
        got = accept(logits, chosen.take(made.tokens), forest, method="sample", params=params, seeds=seeds,
                     positions=positions, out=out)  # fmt: skip
        model.update(chosen.take(scores, fill=0.0), forest, got)
        compact_(cache, got)
        return bucket

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for nodes in (5, 40, 0):
        budget.fill_(nodes)
        logits.copy_(torch.randn(40, size))
        probs.copy_(torch.rand(levels, batch, k, k))
        graph.replay()
        assert int((forest.depths >= 0).sum()) == min(nodes, 40)
        assert int(forest.status) == (16 if nodes < batch else 0)
        taken = accept(
            logits.cpu(), out_tokens(draft, forest, budget), cpu_tree(forest), method="sample", seeds=seeds.cpu(),
            params=SamplingParams(batch, temperature=0.7, top_p=0.9), positions=positions.cpu(),
        )  # fmt: skip
        assert torch.equal(taken.path, out.path.cpu())


def cpu_tree(tree: TreeBatch) -> TreeBatch:
    made = TreeBatch(tree.max_batch, tree.max_nodes, max_depth=tree.max_depth, max_total=tree.max_total)
    return made.update_(tree.parents.cpu(), tree.offsets.cpu())


def out_tokens(draft: TopKDraft, forest: TreeBatch, budget: torch.Tensor) -> torch.Tensor:
    """The tokens of the forest, chosen again on the CPU."""
    parents, candidates, scores = (t.cpu() for t in draft.candidates)
    again = TreeBatch(forest.max_batch, forest.max_nodes, max_total=forest.max_total, validate=False)
    return allocate(parents, scores.exp(), int(budget), again).take(candidates)


def test_links_and_packing_in_a_captured_graph() -> None:
    rng = random.Random(5)
    rows = [[-1, *(max(p, 0) for p in random_parents(rng, 30)[1:])] for _ in range(5)]
    links = [links_of(row) for row in rows]
    tokens = torch.tensor([t for t, _ in links]).cuda()
    siblings = torch.tensor([s for _, s in links]).cuda()
    slots = torch.tensor([0, 1, -1, 2, 3]).cuda()
    tree = TreeBatch(5, 30, max_total=130, device="cuda")
    tree.pack_(parents_from_links(tokens, siblings, slots))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree.pack_(parents_from_links(tokens, siblings, slots))
    for live in ([0, -1, -1, 2, 3], [0, 1, 2, 3, -1], [0, 1, 2, 3, 4]):
        slots.copy_(torch.tensor(live))
        graph.replay()
        plain = TreeBatch(5, 30, max_total=130, validate=False)
        plain.pack_(parents_from_links(tokens.cpu(), siblings.cpu(), slots.cpu()))
        for name in ("parents", "offsets", "depths", "ancestors", "status"):
            assert torch.equal(getattr(tree, name).cpu(), getattr(plain, name)), name
