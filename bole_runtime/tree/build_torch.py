"""Vectorised construction of ancestor bitmasks: the algorithm of the device kernel, in torch."""

from __future__ import annotations

import torch

#: Bits of ``TreeBatch.status``.
STATUS_ORDER, STATUS_DEPTH, STATUS_NODES, STATUS_PARENT, STATUS_TOTAL = 1, 2, 4, 8, 16
PADDING = -2


def as_int32(values: torch.Tensor) -> torch.Tensor:
    """Return integers as int32; those beyond its range become its ends, as in the device kernels.

    A plain conversion wraps: a parent of 2**32 would become node 0, which is a node.
    """
    if values.dtype is torch.int32:
        return values
    limits = torch.iinfo(torch.int32)
    return values.clamp(limits.min, limits.max).to(torch.int32)


def words_of(nodes: int) -> int:
    """Return the int32 words that hold one bit a node."""
    return (nodes + 31) // 32


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Pack bool [..., N] into int32 words [..., ceil(N / 32)], bit j % 32 of word j // 32."""
    nodes = mask.shape[-1]
    words = words_of(nodes)
    padded = torch.zeros(*mask.shape[:-1], words * 32, dtype=torch.int64, device=mask.device)
    padded[..., :nodes] = mask
    weights = 2 ** torch.arange(32, dtype=torch.int64, device=mask.device)
    packed = (padded.unflatten(-1, (words, 32)) * weights).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack_bits(words: torch.Tensor, nodes: int) -> torch.Tensor:
    """Unpack int32 words [..., W] into bool [..., nodes]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)[..., :nodes].bool()


def build(
    parents: torch.Tensor, counts: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the parent pointers of every node.

    Args:
        parents: int [B, N]; -1 root, -2 padding.
        counts: int [B], nodes of each request; the rest of its row is padding whatever it holds.
        max_depth: largest number of strict ancestors.

    Returns:
        Inclusive ancestor mask bool [B, N, N] and depths int32 [B, N] (both empty and -1 for padding and for invalid
        nodes with their descendants), and the status int32 [1].
    """
    batch, nodes = parents.shape
    device = parents.device
    parents = parents.long()
    index = torch.arange(nodes, device=device).expand(batch, nodes)
    inside = index < counts.clamp(0, nodes).unsqueeze(1)
    active = inside & (parents != PADDING)
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=device)
    depths = torch.full((batch, nodes), -1, dtype=torch.int32, device=device)
    found = torch.zeros((), dtype=torch.int32, device=device)
    current = index
    for step in range(max_depth + 1):
        if device.type == "cpu" and not active.any():
            break
        # A finished lane re-marks its own last node, which changes nothing.
        mask.scatter_(2, current.unsqueeze(2), active.unsqueeze(2) | mask.gather(2, current.unsqueeze(2)))
        parent = parents.gather(1, current)
        order = active & (parent >= current) & (parent < counts.unsqueeze(1))
        wrong = active & ((parent < -1) | (parent >= counts.unsqueeze(1)))
        found |= order.any().int() * STATUS_ORDER | wrong.any().int() * STATUS_PARENT
        done = active & (parent == -1)
        depths = torch.where(done, torch.full_like(depths, step), depths)
        active = active & ~done & ~order & ~wrong
        current = torch.where(active, parent, current)
    found |= active.any().int() * STATUS_DEPTH
    mask &= (depths >= 0).unsqueeze(2)
    return mask, depths, found.reshape(1)


def dense_parents(
    source: torch.Tensor, offsets: torch.Tensor | None, max_batch: int, max_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring parents into dense form.

    Args:
        source: int, dense [B <= max_batch, N <= max_nodes] or packed [T].
        offsets: int [max_batch + 1] for packed parents, else None.
        max_batch: capacity.
        max_nodes: capacity.

    Returns:
        parents int64 [max_batch, max_nodes], first row int64 [max_batch] and node count int64 [max_batch] of each
        request as given (not clamped).
    """
    device = source.device
    dense = torch.full((max_batch, max_nodes), PADDING, dtype=torch.int64, device=device)
    if offsets is None:
        batch, nodes = source.shape
        dense[:batch, :nodes] = source
        request = torch.arange(max_batch, device=device)
        return dense, request * max_nodes, torch.where(request < batch, nodes, 0)
    start, end = offsets[:-1].long(), offsets[1:].long()
    if source.shape[0] == 0:
        return dense, start, end - start
    rows = start.unsqueeze(1) + torch.arange(max_nodes, device=device)
    inside = (rows >= 0) & (rows < end.unsqueeze(1)) & (rows < source.shape[0])
    return torch.where(inside, source[torch.where(inside, rows, 0)].long(), PADDING), start, end - start
