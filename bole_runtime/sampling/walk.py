"""The walk in torch, all requests side by side: what runs on CPUs, and what the device kernel is compared with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bole_runtime.sampling.calls import AcceptCall
from bole_runtime.sampling.distribution import draw, greedy_token, target_probs, unusable
from bole_runtime.sampling.philox import uniform
from bole_runtime.sampling.result import STATUS_DRAFT, STATUS_LOGITS, STATUS_TOKEN

#: A draft row of a smaller sum, other than 0, is not used. The kernel has the same number.
SMALLEST_SUM = 1e-30


class _Forest(NamedTuple):
    """Dense views of a tree: flat row, parent (-2 where not live) and token of each node, all int64 [B, N]."""

    rows: torch.Tensor
    parents: torch.Tensor
    tokens: torch.Tensor


class _Step(NamedTuple):
    """What one step decides, [B] each: next node or -1, emitted token, status bits."""

    child: torch.Tensor
    token: torch.Tensor
    status: torch.Tensor


def _first(mask: torch.Tensor) -> torch.Tensor:
    """Return the first marked index of bool [B, N], or -1."""
    size = mask.shape[-1]
    index = torch.arange(size, device=mask.device)
    found = torch.where(mask, index, size).amin(-1)
    return torch.where(found < size, found, -1)


def walk(call: AcceptCall) -> None:
    """Fill ``call.out``. Fixed shapes, no host sync except an early end on the CPU."""
    tree, out = call.tree, call.out
    rows, live = tree.rows()
    flat_parents, flat_tokens = tree.parents.reshape(-1), call.tokens.reshape(-1)
    if tree.max_total == 0:
        parents = torch.full_like(rows, -2)
        tokens = torch.full_like(rows, -1)
    else:
        parents = torch.where(live, flat_parents[rows].long(), -2)
        tokens = torch.where(live, flat_tokens[rows].long(), -1)
    forest = _Forest(rows, parents, tokens)
    if tree.offsets is None:
        start = torch.arange(tree.max_batch, device=tree.device) * tree.max_nodes
    else:
        start = tree.offsets[:-1].long()

    node = _first(parents == -1)
    for tensor in (out.path, out.tokens, out.source, out.target, out.bonus, out.accepted):
        tensor.fill_(-1)
    out.lengths.zero_()
    out.status.zero_()
    active = node >= 0
    for step in range(tree.max_depth + 1):
        if tree.device.type == "cpu" and not bool(active.any()):
            break
        here = node.clamp(min=0)
        row = rows.gather(1, here.unsqueeze(1)).squeeze(1)
        made = _decide(call, forest, here, row, active, step)
        child = torch.where(active, made.child, -1)
        ends = active & (child < 0)
        out.path[:, step] = torch.where(active, node, -1).int()
        out.source[:, step] = torch.where(active, row, -1)
        out.target[:, step] = torch.where(active, start + step, -1)
        follow = tokens.gather(1, child.clamp(min=0).unsqueeze(1)).squeeze(1)
        token = torch.where(child >= 0, follow, made.token)
        out.tokens[:, step] = torch.where(active, token, -1)
        out.lengths.add_(active.int())
        out.status.copy_(torch.where(active, out.status | made.status.int(), out.status))
        out.accepted.copy_(torch.where(ends, node, out.accepted.long()).int())
        out.bonus.copy_(torch.where(ends, made.token, out.bonus))
        node, active = child, child >= 0


def _decide(
    call: AcceptCall, forest: _Forest, node: torch.Tensor, row: torch.Tensor, active: torch.Tensor, step: int
) -> _Step:
    if call.tree.max_total == 0:
        nothing = torch.full_like(node, -1)
        return _Step(nothing, nothing, torch.zeros_like(node))
    below = forest.parents == node.unsqueeze(1)
    if call.method == "predicted":
        token = call.logits.reshape(-1)[row].long()
        wrong = token < 0
        token = token.clamp(min=0)
        child = _first(below & (forest.tokens == token.unsqueeze(1)) & ~wrong.unsqueeze(1))
        return _Step(child, token, wrong * STATUS_TOKEN)
    # Rows of requests that have ended are read again, so that shapes stay fixed; what they hold is not used.
    logits = call.logits.reshape(-1, call.logits.shape[-1])[row].float()
    wrong = unusable(logits)
    best = greedy_token(logits)
    status = wrong * STATUS_LOGITS
    if call.method == "greedy":
        child = _first(below & (forest.tokens == best.unsqueeze(1)) & ~wrong.unsqueeze(1))
        return _Step(child, best, status)
    probs = target_probs(logits, call.params)
    if call.method == "sample":
        token = torch.where(wrong, best, draw(probs, _uniform(call, row, step, 0)))
        child = _first(below & (forest.tokens == token.unsqueeze(1)) & ~wrong.unsqueeze(1))
        return _Step(child, token, status)
    child, probs, bad_draft = _reject(call, forest, below, probs, row, active & ~wrong, step)
    token = torch.where(wrong, best, draw(probs, _uniform(call, row, step, 0)))
    return _Step(child, token, status | bad_draft * STATUS_DRAFT)


def _uniform(call: AcceptCall, row: torch.Tensor, step: int, decision: int) -> torch.Tensor:
    """Return the numbers that decide: the emission at ``row`` (0), or the acceptance of the child at ``row``."""
    if call.uniforms is not None:
        return call.uniforms.reshape(-1, 2)[row, 1 if decision == 0 else 0]
    assert call.seeds is not None
    assert call.positions is not None
    return uniform(call.seeds, call.positions.long() + step + 1, decision)


def _reject(
    call: AcceptCall,
    forest: _Forest,
    below: torch.Tensor,
    probs: torch.Tensor,
    row: torch.Tensor,
    active: torch.Tensor,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Try the children of one node a request in index order.

    Returns:
        The accepted child or -1, the distribution that is left, and whether the draft's row is not usable.
    """
    assert call.draft_probs is not None
    size = probs.shape[-1]
    draft = call.draft_probs.reshape(-1, size)[row].float()
    wrong = ~((draft >= 0) & (draft < float("inf"))).all(-1)
    total = draft.sum(-1, keepdim=True)
    # Of so small a sum, what a row is divided by is no longer its sum.
    wrong = wrong | ((total > 0) & (total < SMALLEST_SUM)).squeeze(1)
    draft = torch.where(wrong.unsqueeze(1), 0.0, draft)
    total = torch.where(wrong.unsqueeze(1), 0.0, total)
    # A sum of 1 up to rounding is left alone: a draft equal to the target stays equal to it.
    draft = torch.where((total - 1).abs() < 1e-5, draft, draft / total.clamp(min=SMALLEST_SUM))
    accepted = torch.full_like(row, -1)
    last = torch.full_like(row, -1)
    index = torch.arange(below.shape[1], device=row.device)
    for rank in range(below.shape[1] - 1):
        child = _first(below & (index > last.unsqueeze(1)))
        tried = active & (child >= 0) & (accepted < 0)
        if row.device.type == "cpu" and not bool(tried.any()):
            break
        last = torch.where(child >= 0, child, below.shape[1])
        here = child.clamp(min=0).unsqueeze(1)
        token = forest.tokens.gather(1, here).squeeze(1)
        known = (token >= 0) & (token < size)
        at = token.clamp(0, size - 1).unsqueeze(1)
        p, q = probs.gather(1, at).squeeze(1), draft.gather(1, at).squeeze(1)
        number = _uniform(call, forest.rows.gather(1, here).squeeze(1), step, rank + 1)
        # A token that the draft cannot have drawn says nothing: it is passed over.
        counts = tried & known & (q > 0)
        taken = counts & (number * q < p)
        accepted = torch.where(taken, child, accepted)
        lost = (counts & ~taken).unsqueeze(1)
        left = (probs - draft).clamp(min=0)
        mass = left.sum(-1, keepdim=True)
        probs = torch.where(lost & (mass > 0), left / mass.clamp(min=1e-38), probs)
        rest = draft.scatter(1, at, 0.0)
        draft = torch.where(lost, rest / rest.sum(-1, keepdim=True).clamp(min=1e-38), draft)
    return accepted, probs, wrong & active
