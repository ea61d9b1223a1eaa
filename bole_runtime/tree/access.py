"""What a tree says about its nodes: rows, ancestor mask, paths. :class:`TreeBatch` has them as methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bole_runtime.tree.build_torch import unpack_bits

if TYPE_CHECKING:
    from bole_runtime.tree.tree import TreeBatch


def rows_of(tree: TreeBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what :meth:`TreeBatch.rows` says."""
    index = torch.arange(tree.max_nodes, device=tree.device)
    if tree.offsets is None:
        base = torch.arange(tree.max_batch, device=tree.device) * tree.max_nodes
        return base.unsqueeze(1) + index, tree.depths >= 0
    start, end = tree.offsets[:-1].long().unsqueeze(1), tree.offsets[1:].long().unsqueeze(1)
    rows = start + index
    inside = (start >= 0) & (rows < end) & (rows < tree.max_total)
    if tree.max_total == 0:
        return torch.zeros_like(rows), torch.zeros_like(inside)
    rows = torch.where(inside, rows, 0)
    live = inside & (tree.depths[rows] >= 0)
    return torch.where(live, rows, 0), live


def mask_of(tree: TreeBatch) -> torch.Tensor:
    """Do what :meth:`TreeBatch.mask` says."""
    rows, live = tree.rows()
    if tree.max_total == 0:
        return live.unsqueeze(2).expand(-1, -1, tree.max_nodes)
    words = tree.ancestors.reshape(tree.max_total, -1)[rows]
    return unpack_bits(words, tree.max_nodes) & live.unsqueeze(2)


def path_of(tree: TreeBatch, request: int, node: int) -> list[int]:
    """Do what :meth:`TreeBatch.path` says."""
    if not 0 <= request < tree.max_batch or not 0 <= node < tree.max_nodes:
        raise ValueError(f"request, node: ({request}, {node}) is outside ({tree.max_batch}, {tree.max_nodes})")
    rows, live = tree.rows()
    if not bool(live[request, node]):
        raise ValueError(f"node: {node} of request {request} is padding")
    words = tree.ancestors.reshape(tree.max_total, -1)[rows[request, node]]
    return [int(i) for i in unpack_bits(words, tree.max_nodes).nonzero().flatten()]
