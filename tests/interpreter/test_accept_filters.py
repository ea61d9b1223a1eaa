"""The device walk's filters, interpreted, against the torch walk: the cut among a few groups, and in the whole row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.accept_calls import same_on_both
from bole_testing.side_by_side import run_side_by_side

from bole_runtime import SamplingParams, TreeBatch, accept
from bole_runtime.sampling import accept_triton, launch_triton, target_probs

pytestmark = pytest.mark.interpreter

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[4, 32])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Logits that the filters look into first: one group of 4, or eight."""
    tuning = launch_triton.Tuning(group=4, filter_group=4, tile=request.param, block=64, stages=1)
    monkeypatch.setattr(launch_triton, "TUNING", tuning)
    return int(request.param)


def draws(logits: torch.Tensor, params: dict[str, Any]) -> Any:
    """Sample once a row of logits [B, V], with numbers that cover [0, 1); return the tokens, after a comparison."""
    batch = logits.shape[0]
    numbers = torch.zeros(batch, 1, 2)
    numbers[:, 0, 1] = torch.arange(batch) / batch
    numbers[-1] = 1 - 2**-24
    tokens = torch.zeros(batch, 1, dtype=torch.int64)
    made = SamplingParams(batch, **params)
    call = lambda: accept(  # noqa: E731
        logits.unsqueeze(1), tokens, TreeBatch.chain(batch, 1), method="sample", params=made, uniforms=numbers
    )
    got = same_on_both(call)
    usable = got.status == 0
    kept = target_probs(logits, made)
    assert (kept.gather(1, got.bonus.unsqueeze(1)) > 0).all()
    return got.bonus[usable]


# The vocabulary is a multiple of nothing.
SIZE, BATCH = 53, 8
ALL: dict[str, Any] = {
    "temperature": [0.0, 0.3, 1.0, 2.0, 1e-6, 1.0, 0.7, 1.0],
    "top_k": [5, 0, 40, -1, 3, 53, 7, 2],
    "top_p": [0.5, 0.9, 0.9, 0.7, 0.5, 1.0, 1e-6, 0.99],
    "min_p": [0.0, 0.0, 0.02, 0.0, 0.1, 0.3, 0.0, 0.0],
}


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": [1, 2, 3, 5, 9, 30, 52, 60]},
        {"top_p": [0.05, 0.3, 0.5, 0.8, 0.9, 0.99, 0.999, 1.0], "temperature": 0.6},
        {"min_p": [1.0, 0.5, 0.1, 0.05, 0.01, 1e-3, 1e-6, 0.0]},
        ALL,
    ],
)
def test_filters(tile: int, params: dict[str, Any]) -> None:
    logits = torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(4)) * 3
    draws(logits.half(), params)
    if params is ALL:
        draws(logits, params)


@pytest.mark.parametrize(
    "params", [{"top_k": [1, 2, 6, 7, 13, 20, 40, 53]}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.5}]
)
def test_ties_across_groups(tile: int, params: dict[str, Any]) -> None:
    # Three values alone: every group has leaders that tie with those of others, zeros of both signs among them.
    gen = torch.Generator().manual_seed(6)
    logits = torch.randint(-1, 2, (BATCH, SIZE), generator=gen).float()
    logits = torch.where((logits == 0) & (torch.rand(logits.shape, generator=gen) < 0.5), -0.0, logits)
    draws(logits.half(), params)
    draws(torch.zeros(BATCH, SIZE).half(), params)


def test_a_peak_in_one_group_and_a_flat_rest(tile: int) -> None:
    # top-p ends in the first group, or far below the groups that are looked into.
    logits = torch.linspace(0, 0.01, SIZE).repeat(BATCH, 1)
    logits[:, 17:20] += torch.tensor([6.0, 5.0, 4.0])
    logits = logits.half()
    draws(logits, {"top_p": [0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.97, 0.999]})
    draws(logits, {"top_k": [0, 1, 4, 20, 0, 3, 2, 52], "top_p": [0.97, 0.97, 0.99, 0.999, 0.8, 1.0, 0.6, 0.9]})


def test_rows_that_are_odd(tile: int) -> None:
    logits = torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(7))
    logits[0, 50] = NAN
    logits[1, 9] = INF
    logits[2] = -INF
    logits[3, 3:] = -INF  # fewer tokens than top-k asks for
    logits[4, ::2] = -INF
    logits[5] = NAN
    logits[6, 52] = 6e4
    for params in ({"top_p": 0.9}, {"top_k": 7, "top_p": 0.8, "min_p": 0.01}):
        assert len(draws(logits.half(), params)) == BATCH - 4


@pytest.mark.parametrize("params", [{}, {"top_k": [0, 5, 2, 20, 1, 53, 9, 0], "top_p": 0.9, "temperature": 0.7}])
def test_several_rejections_at_a_node(tile: int, params: dict[str, Any]) -> None:
    # Drafts that the target mostly refuses, one token twice, one outside the vocabulary, one the draft cannot have.
    gen = torch.Generator().manual_seed(8)
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 0, 0, 0, 1, 1]]).expand(BATCH, -1))
    logits = torch.randn(BATCH, 8, SIZE, generator=gen)
    draft = (torch.randn(BATCH, 8, SIZE, generator=gen) * 1.5 + logits).softmax(-1)
    tokens = draft[:, 0].topk(8, dim=-1).indices.roll(1, 1)
    tokens[:, 3] = tokens[:, 1]
    tokens[1, 1] = SIZE
    draft[2, 0, int(tokens[2, 1])] = 0.0
    draft[3] *= 4  # not normalised
    numbers = torch.rand(BATCH, 8, 2, generator=gen) * 0.8 + 0.2
    made = SamplingParams(BATCH, **params)
    call = lambda: accept(  # noqa: E731
        logits.half(), tokens, tree, method="rejection", params=made, draft_probs=draft, uniforms=numbers
    )
    got = same_on_both(call)
    assert int(got.lengths.min()) == 1
    assert int(got.lengths.max()) > 1


@pytest.mark.parametrize("seed", [0, 1])
def test_programs_of_a_request_side_by_side(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    # A program that is ahead must not write a page that another still has to read: searches, then rejections.
    baton = run_side_by_side(monkeypatch, seed)
    tuning = launch_triton.Tuning(group=4, filter_group=4, tile=4, block=16, stages=1, split=2)
    monkeypatch.setattr(launch_triton, "TUNING", tuning)
    monkeypatch.setattr(accept_triton, "multiprocessors", lambda device: 132)
    gen = torch.Generator().manual_seed(seed)
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1, 1]]).expand(2, -1))
    logits = torch.randn(2, 5, SIZE, generator=gen)
    draft = (torch.randn(2, 5, SIZE, generator=gen) + logits).softmax(-1)
    tokens = draft[:, 0].topk(5, dim=-1).indices.roll(1, 1)
    numbers = torch.rand(2, 5, 2, generator=gen) * 0.6 + 0.4
    params = SamplingParams(2, top_k=[0, 5], top_p=0.9)
    for method, extra in (("sample", {}), ("rejection", {"draft_probs": draft})):
        same_on_both(
            lambda m=method, e=extra: accept(
                logits.half(), tokens, tree, method=m, params=params, uniforms=numbers, **e
            )
        )
    same_on_both(lambda: accept(logits.half(), tokens, tree))
    assert baton.passed > 100
