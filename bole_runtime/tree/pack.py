"""Packs the dense rows of a batch into one flat buffer with offsets, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.tree.build_torch import PADDING, STATUS_TOTAL, as_int32
from bole_runtime.tree.check import check_index_tensor

if TYPE_CHECKING:
    from bole_runtime.tree.tree import TreeBatch


def pack(tree: TreeBatch, parents: torch.Tensor, counts: torch.Tensor | None) -> TreeBatch:
    """Do what :meth:`TreeBatch.pack_` says."""
    if not tree.is_packed:
        raise ValueError("pack_: the tree is dense; create it with max_total, or call update_")
    check_index_tensor("parents", parents, 2)
    batch, nodes = parents.shape
    if batch > tree.max_batch or nodes > tree.max_nodes:
        raise ValueError(
            f"parents: shape {tuple(parents.shape)} is above the capacity ({tree.max_batch}, {tree.max_nodes})"
        )
    if counts is not None:
        check_index_tensor("counts", counts, 1)
        if tuple(counts.shape) != (batch,):
            raise ValueError(f"counts: expected shape ({batch},), got {tuple(counts.shape)}")
    for name, tensor in (("parents", parents), ("counts", counts)):
        if tensor is not None and tensor.device != tree.device:
            raise ValueError(f"{name}: on {tensor.device}, but the tree is on {tree.device}")
    if parents.numel() and not tree.validates and backend_name(tree.device) == "triton":
        from bole_runtime.tree.pack_triton import pack_into

        assert tree.offsets is not None
        lost = pack_into(parents, counts, tree.parents, tree.offsets)
        tree.update_()
        tree.status |= lost * STATUS_TOTAL
        return tree
    index = torch.arange(nodes, device=tree.device)
    if counts is None:
        given = torch.where(parents != PADDING, index + 1, 0)
        counts = given.amax(1) if nodes else given.sum(1)
    counts = counts.long().clamp(0, nodes)
    wanted = counts.cumsum(0)
    fits = wanted <= tree.max_total
    kept = torch.where(fits, counts, 0)
    if tree.validates and not bool(fits.all()):
        raise ValueError(f"parents: {int(wanted[-1])} nodes in all, above max_total = {tree.max_total}")
    offsets = torch.zeros(tree.max_batch + 1, dtype=torch.int32, device=tree.device)
    ends = kept.cumsum(0).int()
    offsets[1 : batch + 1] = ends
    if batch:
        offsets[batch + 1 :] = ends[-1:]
    flat = torch.full((tree.max_total + 1,), PADDING, dtype=torch.int32, device=tree.device)
    # What is not a node of the tree lands in one extra place.
    rows = torch.where(index < kept.unsqueeze(1), offsets[:batch].unsqueeze(1) + index, tree.max_total)
    flat.scatter_(0, rows.flatten(), as_int32(parents).flatten())
    flat[-1:] = PADDING
    tree.update_(flat[:-1], offsets)
    tree.status |= (~fits).any().int() * STATUS_TOTAL
    return tree
