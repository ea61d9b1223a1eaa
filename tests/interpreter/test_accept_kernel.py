"""The device walk, interpreted, against the torch walk: several tiles a row, dense and packed, every method."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import random_parents

from bole_runtime import SamplingParams, TreeBatch, accept, accept_predicted, set_backend

pytestmark = pytest.mark.interpreter

FIELDS = ("accepted", "path", "lengths", "bonus", "tokens", "source", "target", "status")
NAN = float("nan")
FILTERS: dict[str, Any] = {
    "temperature": [0.0, 1.0, 0.5], "top_k": [0, 3, 2], "top_p": [0.5, 1.0, 0.9], "min_p": 0.05,
}  # fmt: skip


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Any:
    from bole_runtime.sampling import launch_triton

    monkeypatch.setattr(
        launch_triton, "TUNING", launch_triton.Tuning(group=4, filter_group=4, tile=8, block=32, stages=1)
    )

    def run(call: Any) -> Any:
        results = []
        for backend in ("torch", "triton"):
            set_backend(backend)
            try:
                results.append(call())
            finally:
                set_backend(None)
        for name in FIELDS:
            assert torch.equal(*(getattr(r, name) for r in results)), (name, results)
        return results[0]

    return run


def make_tree(packed: bool, seed: int) -> TreeBatch:
    rng = random.Random(seed)
    rows = [random_parents(rng, 6, padding=0.1, roots=0.0) for _ in range(3)]
    if not packed:
        return TreeBatch.from_parents(torch.tensor(rows), validate=False)
    flat = rows[0] + rows[2][:4] + [-2]
    return TreeBatch.from_packed(torch.tensor(flat), torch.tensor([0, 6, 6, 10]), 6, validate=False)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("method", "dtype", "options", "given"),
    [
        ("greedy", torch.float16, {}, False),
        ("sample", torch.float32, {}, False),
        ("sample", torch.float16, FILTERS, True),
        ("sample", torch.float32, FILTERS, False),
        ("rejection", torch.float32, {"temperature": 1.5}, False),
        ("rejection", torch.float16, FILTERS, True),
    ],
)
def test_walk(both: Any, packed: bool, method: str, dtype: torch.dtype, options: dict[str, Any], given: bool) -> None:
    gen = torch.Generator().manual_seed(3)
    tree = make_tree(packed, seed=1)
    size = 20  # three tiles, which is no power of two
    # Few values near the top, so that walks go on; the vocabulary is a view into wider rows.
    logits = torch.randn(*tree.lead, 32, generator=gen)[..., :size] * 0.3
    logits[..., 5:7] += 4
    tokens = torch.randint(5, 7, tree.lead, generator=gen)
    logits[tree.depths < 0] = NAN
    extra: dict[str, Any] = {}
    if method != "greedy":
        extra["params"] = SamplingParams(3, **options)
        if given:
            extra["uniforms"] = torch.rand(*tree.lead, 2, generator=gen)
        else:
            extra["seeds"] = torch.tensor([2**62 + 5, -3, 0])
            extra["positions"] = torch.tensor([0, 7, 100_000], dtype=torch.int32)
    if method == "rejection":
        draft = torch.zeros(*tree.lead, size)
        draft[..., 5:7] = torch.rand(*tree.lead, 2, generator=gen)
        extra["draft_probs"] = draft
    got = both(lambda: accept(logits.to(dtype), tokens, tree, method=method, **extra))
    assert int(got.lengths.max()) > 1


@pytest.mark.parametrize("method", ["greedy", "rejection"])
def test_unusable_rows(both: Any, method: str) -> None:
    logits = torch.zeros(4, 2, 11)
    logits[:, :, 10] = 5.0
    logits[0, 0, 3] = NAN
    logits[1, 1] = float("-inf")
    logits[2, 0, 4] = float("inf")
    draft = torch.full((4, 2, 11), 1 / 11)
    draft[3, 0, 2] = NAN
    extra: dict[str, Any] = {}
    if method == "rejection":
        extra = {"draft_probs": draft, "uniforms": torch.zeros(4, 2, 2)}
    got = both(lambda: accept(logits, torch.full((4, 2), 10), TreeBatch.chain(4, 2), method=method, **extra))
    assert got.status.tolist() == [1, 1, 1, 2 if method == "rejection" else 0]


def test_predicted(both: Any) -> None:
    tree = make_tree(True, seed=2)
    tokens = torch.randint(0, 2, tree.lead, generator=torch.Generator().manual_seed(0))
    both(lambda: accept_predicted(torch.ones_like(tokens), tokens.int(), tree))
    both(lambda: accept_predicted(torch.full_like(tokens, -4), tokens, tree))
