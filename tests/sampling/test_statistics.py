"""Losslessness: emitted tokens are distributed as the target's, by chi-square over at least 100,000 draws a case.

Seeds are fixed. With a right implementation a p-value falls below the threshold of 1e-4 once in 10,000 seeds; the last
test shows that a distribution one percent off falls far below it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bole_runtime import SamplingParams, TreeBatch, accept
from bole_runtime.sampling import draw, target_probs

SIZE, BATCH = 6, 120_000
TREES = {"chain": [-1, 0, 1], "tree": [-1, 0, 0, 0, 1, 1, 2, 3], "star": [-1, 0, 0, 0, 0, 0]}
PARAMS: dict[str, dict[str, float]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 0.8, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
}
DEFAULT = (("chain", "plain"), ("tree", "all"))
LEAST_P = 1e-4


def expected(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """The definition in docs/sampling.md, in plain Python; the logits have no ties."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    weight = {i: math.exp((logits[i] - max(logits)) / temperature) for i in order}
    kept = order[: int(top_k) or None]
    total, mass, nucleus = sum(weight[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += weight[i]
        if mass >= top_p * total:
            break
    final = [i for i in nucleus if weight[i] >= min_p]
    total = sum(weight[i] for i in final)
    return [weight[i] / total if i in final else 0.0 for i in range(len(logits))]


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Return the p-value of counts [K] under probabilities [K]; 0 if something impossible was seen."""
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    counts, probs = counts[probs > 0].double(), probs[probs > 0].double()
    if len(counts) < 2:
        return 1.0
    wanted = counts.sum() * probs
    assert wanted.min() >= 5, "too few draws for a chi-square"
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


def logits_of() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's logits after the root [V] and after each token [V, V]."""
    gen = torch.Generator().manual_seed(11)
    return torch.randn(SIZE, generator=gen) * 1.2, torch.randn(SIZE, SIZE, generator=gen) * 1.2


def draft_tokens(parents: list[int], table: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """Draw the children of every node without replacement, in index order, from the row of their parent's token."""
    tokens = torch.zeros(BATCH, len(parents), dtype=torch.int64)
    for node in range(len(parents)):
        below = [i for i, p in enumerate(parents) if p == node]
        if below:
            weights = table[tokens[:, node] if node else torch.full((BATCH,), SIZE)]
            tokens[:, below] = torch.multinomial(weights, len(below), generator=gen)
    return tokens


def check(first: torch.Tensor, second: torch.Tensor, options: dict[str, Any]) -> list[float]:
    """Return p-values: of the first tokens, and of the second ones after each first token. -1 marks no token."""
    root, after = logits_of()
    values = [chi_square_p(torch.bincount(first, minlength=SIZE), torch.tensor(expected(root.tolist(), **options)))]
    for token in range(SIZE):
        seen = second[(first == token) & (second >= 0)]
        if len(seen) >= 2000:
            wanted = torch.tensor(expected(after[token].tolist(), **options))
            values.append(chi_square_p(torch.bincount(seen, minlength=SIZE), wanted))
    return values


def run(method: str, tree: str, options: dict[str, Any], draft_heat: float = 1.5, seed: int = 5) -> list[float]:
    parents = TREES[tree]
    gen = torch.Generator().manual_seed(seed)
    root, after = logits_of()
    noise = torch.randn(SIZE + 1, SIZE, generator=gen)
    target_rows = torch.cat([after, root.unsqueeze(0)])
    table = ((target_rows + noise) / draft_heat).softmax(-1)
    tokens = draft_tokens(parents, table, gen)
    rows = tokens.clone()
    rows[:, 0] = SIZE
    extra = {"draft_probs": table[rows]} if method == "rejection" else {}
    got = accept(
        target_rows[rows], tokens, TreeBatch.from_parents(torch.tensor([parents]).expand(BATCH, -1), max_depth=2),
        method=method, params=SamplingParams(BATCH, **options),
        seeds=torch.randint(-(2**62), 2**62, (BATCH,), generator=gen), positions=torch.zeros(BATCH, dtype=torch.int64),
        **extra,
    )  # fmt: skip
    assert bool((got.status == 0).all())
    assert bool((got.lengths > 1).any())
    return check(got.tokens[:, 0], got.tokens[:, 1], options)


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        pytest.param(tree, o, id=f"{tree}-{name}", marks=[] if (tree, name) in DEFAULT else pytest.mark.slow)
        for tree in ("chain", "tree")
        for name, o in PARAMS.items()
    ],
)
@pytest.mark.parametrize("method", ["sample", "rejection"])
def test_emitted_tokens_have_the_target_distribution(method: str, tree: str, options: dict[str, Any]) -> None:
    values = run(method, tree, options)
    assert len(values) >= 3
    assert min(values) > LEAST_P, values


def test_children_for_all_but_one_token_of_the_vocabulary() -> None:
    values = run("rejection", "star", {}, draft_heat=3.0)
    assert min(values) > LEAST_P, values


def test_target_probs_is_the_definition() -> None:
    root, after = logits_of()
    rows = torch.cat([after, root.unsqueeze(0)])
    for options in PARAMS.values():
        made = target_probs(rows, SamplingParams(len(rows), **options))
        wanted = torch.tensor([expected(row, **options) for row in rows.tolist()])
        assert (made - wanted).abs().max() < 1e-6
    assert target_probs(rows, SamplingParams(len(rows), temperature=0.0)).amax(-1).eq(1).all()


def test_a_draw_on_the_edge_goes_to_the_next_token() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0]]).expand(4, -1)
    numbers = torch.tensor([0.0, 0.49, 0.5, 1 - 2**-24])
    assert draw(weights, numbers).tolist() == [1, 1, 3, 3]


def test_ties_at_the_cut_are_kept() -> None:
    row = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert (target_probs(row, SamplingParams(1, top_k=2)) > 0).tolist() == [[True, True, True, False]]
    assert (target_probs(row, SamplingParams(1, top_p=0.7)) > 0).tolist() == [[True, True, True, False]]
    assert (target_probs(row, SamplingParams(1, top_p=1.0, top_k=0)) > 0).all()


def test_rejection_accepts_more_than_sampling_from_a_random_draft() -> None:
    parents = torch.tensor([TREES["chain"]]).expand(BATCH, -1)
    gen = torch.Generator().manual_seed(3)
    probs = torch.tensor([0.3, 0.3, 0.2, 0.2])
    tokens = torch.multinomial(probs.expand(BATCH, -1), 3, replacement=True, generator=gen)
    logits = probs.log().expand(BATCH, 3, 4)
    seeds, positions = torch.arange(BATCH), torch.zeros(BATCH, dtype=torch.int64)
    tree = TreeBatch.from_parents(parents)
    by_draw = accept(logits, tokens, tree, method="sample", seeds=seeds, positions=positions).lengths
    by_ratio = accept(
        logits, tokens, tree, method="rejection", seeds=seeds, positions=positions,
        draft_probs=probs.expand(BATCH, 3, 4).contiguous(),
    ).lengths  # fmt: skip
    assert (by_ratio == 3).all()
    # Two independent draws agree with probability sum p^2 = 0.26.
    assert abs(float((by_draw > 1).float().mean()) - 0.26) < 0.005


def test_the_chi_square_sees_one_percent() -> None:
    root, _ = logits_of()
    wanted = torch.tensor(expected(root.tolist()))
    off = wanted.clone()
    off[0] += 0.01
    off[1] -= 0.01
    drawn = torch.multinomial(off, BATCH, replacement=True, generator=torch.Generator().manual_seed(0))
    assert chi_square_p(torch.bincount(drawn, minlength=SIZE), wanted) < 1e-10
