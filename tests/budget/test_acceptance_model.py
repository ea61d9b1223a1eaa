"""What an AcceptanceModel keeps lives on from round to round: no graph hangs on it, and it is made in any mode."""

from __future__ import annotations

import contextlib

import pytest
import torch

from bole_runtime import TreeBatch, accept
from bole_runtime.budget import AcceptanceModel
from bole_runtime.sampling.result import Acceptance

MODES = {"plain": contextlib.nullcontext, "inference": torch.inference_mode, "no_grad": torch.no_grad}


def a_round() -> tuple[TreeBatch, Acceptance]:
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0]]))
    logits = torch.zeros(1, 3, 5)
    logits[0, 0, 2] = 1.0  # the first child is accepted
    return tree, accept(logits, torch.tensor([[1, 2, 3]]), tree)


def test_scores_that_require_grad_leave_no_graph() -> None:
    tree, result = a_round()
    drafted = [[1.0, 0.5, 0.25]]
    model, other = AcceptanceModel(), AcceptanceModel()
    for _ in range(3):
        model.update(torch.tensor(drafted, requires_grad=True) * 1.0, tree, result)
        other.update(torch.tensor(drafted), tree, result)
    for name in ("predicted", "accepted"):
        made = getattr(model, name)
        assert made.grad_fn is None
        assert not made.requires_grad
        assert torch.equal(made, getattr(other, name))
    assert model.accepted.sum() > 0


def test_a_gradient_still_goes_through_correct() -> None:
    model = AcceptanceModel()
    scores = torch.tensor([0.5, 0.25], requires_grad=True)
    model.correct(scores).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("drafts", MODES)
@pytest.mark.parametrize("updates", MODES)
@pytest.mark.parametrize("makes", MODES)
def test_modes_mix(makes: str, updates: str, drafts: str) -> None:
    with MODES[makes]():
        model = AcceptanceModel()
    assert not model.predicted.is_inference()
    assert not model.accepted.is_inference()
    with MODES[drafts]():
        tree, result = a_round()
        scores = torch.tensor([[1.0, 0.5, 0.25]])
    for mode in (updates, "plain", updates):
        with MODES[mode]():
            model.update(scores, tree, result)
    want = AcceptanceModel()
    for _ in range(3):
        want.update(torch.tensor([[1.0, 0.5, 0.25]]), *a_round())
    assert torch.equal(model.predicted, want.predicted)
    assert torch.equal(model.accepted, want.accepted)
