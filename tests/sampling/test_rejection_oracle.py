"""Sampling and rejection with given random numbers against a plain loop in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import random_parents
from hypothesis import given, settings
from hypothesis import strategies as st

from bole_runtime import SamplingParams, TreeBatch, accept
from bole_runtime.sampling import target_probs

Outcome = tuple[list[int], int]


def invert(weights: list[float], number: float) -> int:
    goal, below = number * sum(weights), 0.0
    for i, w in enumerate(weights):
        below += w
        if below > goal and w > 0:
            return i
    return max(i for i, w in enumerate(weights) if w > 0)


def walk(
    parents: list[int], tokens: list[int], probs: list[list[float]], numbers: list[list[float]], drafts: Any
) -> Outcome:
    """Return the accepted path and the emitted token. ``drafts`` is None for sampling."""
    node, path = 0, []
    while True:
        path.append(node)
        p = probs[node]
        below = [i for i, parent in enumerate(parents) if parent == node]
        child = None
        if drafts is None:
            drawn = invert(p, numbers[node][1])
            child = next((i for i in below if tokens[i] == drawn), None)
        else:
            q = [x / sum(drafts[node]) for x in drafts[node]]
            for i in below:
                token = tokens[i]
                if not 0 <= token < len(p) or q[token] <= 0:
                    continue
                if numbers[i][0] * q[token] < p[token]:
                    child = i
                    break
                left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
                if sum(left) > 0:
                    p = [x / sum(left) for x in left]
                q[token] = 0.0
                if sum(q) > 0:
                    q = [x / sum(q) for x in q]
            drawn = invert(p, numbers[node][1])
        if child is None:
            return path, drawn
        node = child


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9), sampled=st.booleans())
def test_given_numbers_give_the_plain_loop(seed: int, sampled: bool) -> None:
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    batch, nodes, size = 3, rng.randint(1, 9), rng.randint(2, 5)
    rows = [[-1, *(max(p, 0) for p in random_parents(rng, nodes)[1:])] for _ in range(batch)]
    tokens = torch.randint(-1, size + 1, (batch, nodes), generator=gen)
    logits = torch.randn(batch, nodes, size, generator=gen) * 2
    params = SamplingParams(batch, temperature=[0.0, 0.7, 1.5], top_p=[1.0, 0.9, 1.0])
    draft = torch.rand(batch, nodes, size, generator=gen) + 0.01
    # Some tokens the draft cannot have drawn.
    draft[torch.rand(draft.shape, generator=gen) < 0.2] = 0.0
    draft[..., 0] += 0.1
    numbers = torch.rand(batch, nodes, 2, generator=gen)
    extra: dict[str, Any] = {} if sampled else {"draft_probs": draft}
    got = accept(
        logits, tokens, TreeBatch.from_parents(torch.tensor(rows)), method="sample" if sampled else "rejection",
        params=params, uniforms=numbers, **extra,
    )  # fmt: skip
    probs = target_probs(logits, params).double()
    for b in range(batch):
        drafts = None if sampled else draft[b].double().tolist()
        path, token = walk(rows[b], tokens[b].tolist(), probs[b].tolist(), numbers[b].double().tolist(), drafts)
        assert got.path[b, : len(path)].tolist() == path
        assert int(got.lengths[b]) == len(path)
        assert int(got.bonus[b]) == token


@pytest.mark.parametrize("method", ["sample", "rejection"])
def test_a_draft_of_one_token_that_the_target_has_half_of(method: str) -> None:
    # The child is accepted below one half of the numbers that decide, else the other token comes out.
    numbers = torch.tensor([[[0.0, x], [x, 0.0]] for x in (0.0, 0.25, 0.499, 0.5, 0.75)])
    draft = torch.tensor([1.0, 0.0]).expand(5, 2, 2)
    extra = {} if method == "sample" else {"draft_probs": draft}
    got = accept(
        torch.zeros(5, 2, 2), torch.zeros(5, 2, dtype=torch.int64), TreeBatch.chain(5, 2), method=method,
        uniforms=numbers, **extra,
    )  # fmt: skip
    assert got.lengths.tolist() == [2, 2, 2, 1, 1]
    assert got.tokens[:, 0].tolist() == [0, 0, 0, 1, 1]
