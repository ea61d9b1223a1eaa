"""What happens to each row's pending chain at the end of a round, decided on the device in one small launch.

The decision moves the counters on, so the commit that follows must see the chain as it was: every decision leaves the
old length and start in ``before``. One set of counters serves all layers, whose rings move together.
"""

from __future__ import annotations

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.calls import RowAction
from bole_runtime.state.chain_counters import ChainCounters, ChainRule
from bole_runtime.tree import TreeBatch


def decide(
    counters: ChainCounters,
    rule: ChainRule,
    tree: TreeBatch,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    actions: torch.Tensor,
) -> None:
    """Fill ``actions`` with a :class:`RowAction` a row and move the counters on. No host sync.

    A row that accepted nothing, or is padding, does nothing. Otherwise the path is appended to the chain where it fits
    the limit, and chain and path are committed where it does not, which leaves the chain empty.

    Args:
        counters: updated.
        rule: of the policy.
        tree: topology of the round.
        slots: int32 or int64 [B]; no live slot twice.
        accepted: int32 or int64 [B], terminal node or -1.
        actions: int32 [B], written.
    """
    if backend_name(tree.device) == "triton":
        from bole_runtime.state.chains_triton import decide_on_device

        decide_on_device(counters, rule, tree, slots, accepted, actions)
        return
    slots, accepted = slots.long(), accepted.long()
    inside = (slots >= 0) & (slots < counters.slots)
    at = torch.where(inside, slots, counters.slots)
    request = torch.arange(tree.max_batch, device=tree.device)
    rows, live = tree.rows()
    node = accepted.clamp(0, tree.max_nodes - 1)
    chosen = inside & (accepted == node) & live[request, node]
    depths = tree.depths.flatten()
    depth = depths[rows[request, node]].long() if depths.shape[0] else torch.zeros_like(node)
    tokens = torch.where(chosen, depth + 1, 0)
    all_length, all_start, all_before_length, all_before_start = counters.rows
    length, start = all_length[at].long(), all_start[at].long()
    if rule.consumed:
        start, length = (start + length) % rule.capacity, torch.zeros_like(length)
    fits = length + tokens <= rule.limit
    action = torch.where(fits, int(RowAction.APPEND), int(RowAction.COMMIT))
    actions.copy_(torch.where(tokens > 0, action, int(RowAction.NONE)))
    all_before_length[at], all_before_start[at] = length.int(), start.int()
    all_length[at] = torch.where(fits, length + tokens, 0).where(tokens > 0, length).int()
    all_start[at] = start.int()


def flush_rows(counters: ChainCounters, slots: torch.Tensor, rows: torch.Tensor | None, actions: torch.Tensor) -> None:
    """Fill ``actions`` for a flush of some rows and empty their chains. No host sync.

    Args:
        counters: updated.
        slots: int32 or int64 [B].
        rows: bool or int [B], which rows to flush; None for all.
        actions: int32 [B], written.
    """
    slots = slots.long()
    chosen = (slots >= 0) & (slots < counters.slots)
    if rows is not None:
        chosen = chosen & (rows != 0)
    at = torch.where(chosen, slots, counters.slots)
    length, start, before_length, before_start = counters.rows
    before_length[at], before_start[at] = length[at], start[at]
    length[at] = 0
    actions.copy_(torch.where(chosen, int(RowAction.FLUSH), int(RowAction.NONE)))
