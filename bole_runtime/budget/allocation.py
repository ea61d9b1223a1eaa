"""Choosing nodes over a whole batch by cumulative probability, connected to their roots, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.tree import STATUS_TOTAL, TreeBatch
from bole_runtime.tree.check import INDEX_DTYPES, check_capacity, check_dense, check_index_tensor


class Allocation(NamedTuple):
    """What was chosen; the packed tree itself is updated in place.

    Attributes:
        chosen: int64 [max_total], for each row of the packed tree the flat candidate ``b * C + i`` it came from, -1
            where the row is no node. Gather tokens, hidden states or draft distributions with it.
        counts: int32 [B], nodes of each request.
        expected: fp32 [B], expected tokens of each request: the sum of the scores of its nodes, the root as 1.
    """

    chosen: torch.Tensor
    counts: torch.Tensor
    expected: torch.Tensor

    def take(self, values: torch.Tensor, fill: int | float = -1) -> torch.Tensor:
        """Return the values of the chosen candidates in packed order.

        Args:
            values: [B, C, ...].
            fill: for rows that are no node.

        Returns:
            [max_total, ...].
        """
        flat = values.flatten(0, 1)
        if flat.shape[0] == 0:
            return flat.new_full((self.chosen.shape[0], *flat.shape[1:]), fill)
        made = flat[self.chosen.clamp(min=0)]
        used = (self.chosen >= 0).reshape(-1, *[1] * (made.dim() - 1))
        return torch.where(used, made, torch.full((), fill, dtype=made.dtype, device=made.device))


def reach(
    parents: torch.Tensor, scores: torch.Tensor, max_nodes: int | None = None, max_depth: int | None = None
) -> torch.Tensor:
    """Return keys by which taking the largest first is always connected.

    Args:
        parents: int32 or int64 [B, C]; -1 root, -2 padding, a parent before its child. Acceptance begins at the first
            root of a request, so further ones and what is below them can never be accepted.
        scores: fp32 [B, C], probability that a node is accepted (cumulative over its path), entries of roots ignored.
        max_nodes: only the best so many of a request count.
        max_depth: deeper nodes do not count.

    Returns:
        fp32 [B, C]: 2 for the first root of a request; for nodes below it the smallest score on the path to them,
        within [0, 1]; -1 for padding, further roots, nodes with an invalid parent or beyond a limit, and for all below
        such a node. NaN counts as 0.

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes or devices, or a negative limit.
    """
    check_index_tensor("parents", parents, 2)
    if not isinstance(scores, torch.Tensor) or not scores.is_floating_point():
        given = scores.dtype if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise TypeError(f"scores: expected a floating-point tensor, got {given}")
    check_dense("scores", scores)
    for name, limit in (("max_nodes", max_nodes), ("max_depth", max_depth)):
        if limit is not None:
            check_capacity(name, limit, 0, 2**31 - 1)
    if tuple(scores.shape) != tuple(parents.shape):
        raise ValueError(f"scores: expected shape {tuple(parents.shape)}, got {tuple(scores.shape)}")
    if scores.device != parents.device:
        raise ValueError(f"scores: on {scores.device}, but parents are on {parents.device}")
    batch, size = parents.shape
    if parents.numel() and backend_name(parents.device) == "triton":
        from bole_runtime.budget.allocation_triton import reach_into

        most = size if max_nodes is None else max_nodes
        return reach_into(parents, scores, most, size if max_depth is None else max_depth)
    index = torch.arange(size, device=parents.device).expand(batch, size)
    root = parents == -1
    root = root & (root.cumsum(1) == 1)
    inner = (parents >= 0) & (parents < index)
    key = torch.where(inner, scores.float().nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0), -1.0)
    key = torch.where(root, 2.0, key)
    up = torch.where(inner, parents, index).long()
    depth = inner.long()
    for _ in range(max(0, size - 1).bit_length()):
        key = torch.minimum(key, key.gather(1, up))
        depth = depth + depth.gather(1, up)
        up = up.gather(1, up)
    if max_depth is not None:
        key = torch.where(depth > max_depth, -1.0, key)
    if max_nodes is not None and max_nodes < size:
        order = key.sort(dim=1, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(1, order, index)
        key = torch.where(rank < max_nodes, key, -1.0)
    return key


def allocate(parents: torch.Tensor, scores: torch.Tensor, budget: int | torch.Tensor, tree: TreeBatch) -> Allocation:
    """Keep the most probable nodes of all requests together, and rebuild a packed tree of them in place.

    The root of every live request is kept first; then the nodes with the largest scores over the whole batch, a node
    only after its parent (ties: lower request, then lower index). Nodes with score 0 are left out. Shapes are fixed and
    nothing is read back: a CUDA graph can hold it, and the budget may be a tensor that changes between replays.

    What is kept depends on the drafted tokens, so accept it with ``greedy`` or ``sample``, not with ``rejection``.

    Args:
        parents: int32 or int64 [B, C], candidates of each request (e.g. of :class:`~bole_runtime.tree.TopKDraft`).
        scores: fp32 [B, C], probability that a node is accepted; see :func:`reach`.
        budget: most nodes in all, roots included; int, or int tensor of one element on the device. At most
            ``tree.max_total`` count.
        tree: packed, for at least B requests; its ``max_nodes`` and ``max_depth`` bound each request. ``status`` gets
            bit 16 if there are more live requests than the budget has room for; the last ones then have no nodes.

    Returns:
        Where each row came from, and what is expected of each request.

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes or devices, a dense tree, or a budget below 0.
    """
    if not isinstance(tree, TreeBatch):
        raise TypeError(f"tree: expected a TreeBatch, got {type(tree).__name__}")
    if not tree.is_packed:
        raise ValueError("tree: must be packed; create it with max_total")
    check_index_tensor("parents", parents, 2)
    batch, size = parents.shape
    if batch > tree.max_batch:
        raise ValueError(f"parents: {batch} requests, above max_batch = {tree.max_batch}")
    if parents.device != tree.device:
        raise ValueError(f"parents: on {parents.device}, but the tree is on {tree.device}")
    _check_budget(budget, tree)
    key = reach(parents, scores, tree.max_nodes, tree.max_depth)
    if parents.numel() and backend_name(tree.device) == "triton":
        return _on_device(parents, key, budget, tree)
    if isinstance(budget, torch.Tensor):
        limit = budget.reshape(()).clamp(0, tree.max_total)
    else:
        limit = torch.full((), min(budget, tree.max_total), device=tree.device)
    flat = key.flatten()
    order = flat.sort(dim=0, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(batch * size, device=tree.device))
    kept = ((rank < limit) & (flat > 0)).view(batch, size)
    counts = kept.sum(1)
    place = kept.cumsum(1) - 1
    offsets = torch.zeros(tree.max_batch + 1, dtype=torch.int32, device=tree.device)
    ends = counts.cumsum(0).int()
    offsets[1 : batch + 1] = ends
    if batch:
        offsets[batch + 1 :] = ends[-1:]
    # What is not kept lands in one extra row.
    rows = torch.where(kept, offsets[:batch].unsqueeze(1) + place, tree.max_total).flatten()
    above = torch.where(parents < 0, -1, place.gather(1, parents.long().clamp(0, max(0, size - 1))))
    new_parents = torch.full((tree.max_total + 1,), -2, dtype=torch.int32, device=tree.device)
    new_parents.scatter_(0, rows, above.int().flatten())
    chosen = torch.full((tree.max_total + 1,), -1, dtype=torch.int64, device=tree.device)
    chosen.scatter_(0, rows, torch.arange(batch * size, device=tree.device))
    tree.update_(new_parents[:-1], offsets)
    tree.status |= ((key == 2) & ~kept).any().int() * STATUS_TOTAL
    expected = torch.where(kept, key.clamp(max=1.0), 0.0).sum(1)
    return Allocation(chosen[:-1], counts.int(), expected)


def _check_budget(budget: object, tree: TreeBatch) -> None:
    if isinstance(budget, torch.Tensor):
        if budget.numel() != 1 or budget.dtype not in INDEX_DTYPES or budget.device != tree.device:
            raise ValueError(f"budget: expected one integer on {tree.device}, got {tuple(budget.shape)} {budget.dtype}")
    elif isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget: expected an int or a tensor, got {type(budget).__name__}")
    elif budget < 0:
        raise ValueError(f"budget: {budget} is not allowed; allowed: 0 or more")


def _on_device(parents: torch.Tensor, key: torch.Tensor, budget: int | torch.Tensor, tree: TreeBatch) -> Allocation:
    from bole_runtime.budget.allocation_triton import note_lost, place_into

    assert tree.offsets is not None
    chosen = torch.empty(tree.max_total, dtype=torch.int64, device=tree.device)
    given = budget if isinstance(budget, torch.Tensor) else None
    limit = tree.max_total if isinstance(budget, torch.Tensor) else min(budget, tree.max_total)
    counts, expected, lost = place_into(parents, key, given, limit, tree.parents, tree.offsets, chosen)
    tree.update_()
    note_lost(lost, tree.status, STATUS_TOTAL)
    return Allocation(chosen, counts, expected)
