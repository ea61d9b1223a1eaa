"""Allocation on the device: two launches before the tree is built, and a small one after it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096


@triton.jit
def reach_kernel(
    parents, parents_stride_b, parents_stride_n,
    scores, scores_stride_b, scores_stride_n,
    raw,  # fp32 [B, size], scratch: each node's own key
    keys,  # fp32 [B, size]: the smallest on its path, -1 where the node does not count
    size,
    max_nodes,
    max_depth,
    RANKED: tl.constexpr,  # size is above max_nodes
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    above_rows = parents + request * parents_stride_b
    row = request * size
    index = tl.arange(0, BLOCK)
    inside = index < size
    above = tl.load(above_rows + index.to(tl.int64) * parents_stride_n, mask=inside, other=-2)
    inner = inside & (above >= 0) & (above < index)
    score = tl.load(scores + request * scores_stride_b + index.to(tl.int64) * scores_stride_n, mask=inside, other=0.0)
    score = score.to(tl.float32)
    score = tl.where(score != score, 0.0, score)
    own = tl.where(inner, tl.minimum(tl.maximum(score, 0.0), 1.0), -1.0)
    # Acceptance begins at the first root.
    first = tl.min(tl.where(above == -1, index, BLOCK), axis=0)
    own = tl.where(index == first, 2.0, own)
    tl.store(raw + row + index, own, mask=inside)
    tl.debug_barrier()
    key = own
    up = tl.where(inner, above, -1).to(tl.int32)
    depth = inner.to(tl.int32)
    steps = tl.full([], 0, tl.int32)
    while (steps < size) & (tl.max(up, axis=0) >= 0):
        climbs = up >= 0
        key = tl.where(climbs, tl.minimum(key, tl.load(raw + row + up, mask=climbs, other=2.0)), key)
        further = tl.load(above_rows + up.to(tl.int64) * parents_stride_n, mask=climbs, other=-1)
        valid = climbs & (further >= 0) & (further < up)
        depth += valid.to(tl.int32)
        up = tl.where(valid, further, -1).to(tl.int32)
        steps += 1
    key = tl.where(depth > max_depth, -1.0, key)
    tl.store(keys + row + index, key, mask=inside)
    if RANKED:
        tl.debug_barrier()
        rank = tl.full([BLOCK], 0, tl.int32)
        for other in range(size):
            its = tl.load(keys + row + other)
            rank += ((its > key) | ((its == key) & (other < index))).to(tl.int32)
        tl.debug_barrier()
        tl.store(keys + row + index, tl.where(rank < max_nodes, key, -1.0), mask=inside)


@triton.jit
def place_kernel(
    parents, parents_stride_b, parents_stride_n,
    keys,  # fp32 [B, size]
    places,  # int32 [B, size], scratch
    budget,  # one int, when TENSOR
    limit,  # at most so many nodes
    out_parents,  # int32 [max_total], the packed tree's
    out_offsets,  # int32 [max_batch + 1]
    chosen,  # int64 [max_total]
    counts,  # int32 [B]
    expected,  # fp32 [B]
    lost,  # int32 [B]: whether the request's root was not kept
    size,
    max_total,
    max_batch,
    TENSOR: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    batch = tl.num_programs(0)
    total = batch.to(tl.int64) * size
    room = limit.to(tl.int64)
    if TENSOR:
        room = tl.maximum(tl.minimum(tl.load(budget).to(tl.int64), room), 0)
    # The smallest key that is kept; keys above 0 are in the order of their bits. Every program finds the same one.
    # Both ends jump to keys that occur.
    low = tl.full([], 1, tl.int64)
    high = tl.full([], 1073741825, tl.int64)  # just above the bits of 2.0
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        number, smallest, largest = _count(keys, total, middle, TILE)
        if number >= room:
            low = tl.maximum(middle, tl.minimum(smallest, high - 1))
        else:
            high = tl.maximum(largest, low) + 1
    above, _, _ = _count(keys, total, low + 1, TILE)
    # Of the ties at the cut, so many of the first.
    ties = room - above
    before_above, before_ties = _before(keys, request.to(tl.int64) * size, low, TILE)
    start = before_above + tl.minimum(before_ties, tl.maximum(ties, 0))
    row = request.to(tl.int64) * size
    index = tl.arange(0, BLOCK)
    inside = index < size
    key = tl.load(keys + row + index, mask=inside, other=-1.0)
    bits = key.to(tl.int32, bitcast=True)
    tied = bits == low
    kept = (bits > low) | (tied & (before_ties + tl.cumsum(tied.to(tl.int32), axis=0) <= ties))
    kept = kept & inside & (room > 0)
    start = tl.where(room > 0, start, 0)
    place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    number = tl.sum(kept.to(tl.int32), axis=0)
    tl.store(places + row + index, place, mask=inside)
    tl.debug_barrier()
    above_row = parents + request.to(tl.int64) * parents_stride_b
    above_node = tl.load(above_row + index.to(tl.int64) * parents_stride_n, mask=kept, other=-1)
    moved = tl.load(places + row + above_node, mask=kept & (above_node >= 0), other=-1)
    tl.store(out_parents + start + place, moved, mask=kept)
    tl.store(chosen + start + place, row + index, mask=kept)
    tl.store(counts + request, number)
    tl.store(expected + request, tl.sum(tl.where(kept, tl.minimum(key, 1.0), 0.0), axis=0))
    tl.store(lost + request, tl.max((inside & (key == 2.0) & (~kept)).to(tl.int32), axis=0))
    tl.store(out_offsets + request, start.to(tl.int32))
    if request == batch - 1:
        end = start + number
        for first in range(batch, max_batch + 1):
            tl.store(out_offsets + first, end.to(tl.int32))
        tile = tl.arange(0, TILE)
        at = end
        while at < max_total:
            tl.store(out_parents + at + tile, tl.full([TILE], -2, tl.int32), mask=at + tile < max_total)
            tl.store(chosen + at + tile, tl.full([TILE], -1, tl.int64), mask=at + tile < max_total)
            at += TILE


@triton.jit
def lost_kernel(lost, status, batch, BIT: tl.constexpr, BLOCK: tl.constexpr):
    any_lost = tl.full([], 0, tl.int32)
    for first in range(0, batch, BLOCK):
        at = first + tl.arange(0, BLOCK)
        any_lost = tl.maximum(any_lost, tl.max(tl.load(lost + at, mask=at < batch, other=0), axis=0))
    tl.store(status, tl.load(status) | any_lost * BIT)


@triton.jit
def _count(keys, total, cut, TILE: tl.constexpr):
    """Return how many keys have bits of at least ``cut``, the smallest of these, and the largest bits below."""
    number = tl.full([TILE], 0, tl.int32)
    smallest = tl.full([TILE], 2147483647, tl.int32)
    largest = tl.full([TILE], 0, tl.int32)
    for first in range(0, total, TILE):
        at = first + tl.arange(0, TILE)
        bits = tl.load(keys + at, mask=at < total, other=-1.0).to(tl.int32, bitcast=True)
        kept = bits >= cut
        number += kept.to(tl.int32)
        smallest = tl.where(kept, tl.minimum(smallest, bits), smallest)
        largest = tl.where(kept, largest, tl.maximum(largest, bits))
    return (
        tl.sum(number, axis=0).to(tl.int64),
        tl.min(smallest, axis=0).to(tl.int64),
        tl.max(largest, axis=0).to(tl.int64),
    )


@triton.jit
def _before(keys, end, cut, TILE: tl.constexpr):
    """Return how many of the first ``end`` keys have bits above the cut, and how many are at it."""
    above = tl.full([TILE], 0, tl.int32)
    tied = tl.full([TILE], 0, tl.int32)
    for first in range(0, end, TILE):
        at = first + tl.arange(0, TILE)
        bits = tl.load(keys + at, mask=at < end, other=-1.0).to(tl.int32, bitcast=True)
        above += (bits > cut).to(tl.int32)
        tied += (bits == cut).to(tl.int32)
    return tl.sum(above, axis=0).to(tl.int64), tl.sum(tied, axis=0).to(tl.int64)


def reach_into(parents: torch.Tensor, scores: torch.Tensor, max_nodes: int, max_depth: int) -> torch.Tensor:
    """Return what :func:`bole_runtime.budget.reach` does, for at least one candidate; one launch."""
    batch, size = parents.shape
    made = torch.empty(2, batch, size, dtype=torch.float32, device=parents.device)
    block = triton.next_power_of_2(size)
    reach_kernel[(batch,)](
        parents, *parents.stride(), scores, *scores.stride(), made[0], made[1], size, max_nodes, max_depth,
        RANKED=size > max_nodes, BLOCK=block, num_warps=4 if block >= 128 else 1,
    )  # fmt: skip
    return made[1]


def place_into(
    parents: torch.Tensor,
    keys: torch.Tensor,
    budget: torch.Tensor | None,
    limit: int,
    out_parents: torch.Tensor,
    out_offsets: torch.Tensor,
    chosen: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write the parents and offsets of the nodes that are kept, and where they came from; one launch.

    Args:
        parents: int [B, C], B and C at least 1.
        keys: fp32 [B, C], of :func:`reach_into`.
        budget: one int on the device, or None.
        limit: most nodes whatever the budget says.
        out_parents: int32 [max_total], written.
        out_offsets: int32 [max_batch + 1], written.
        chosen: int64 [max_total], written.

    Returns:
        Counts int32 [B], expected tokens fp32 [B], and whether the root was not kept, int32 [B].
    """
    batch, size = parents.shape
    device = parents.device
    ints = torch.empty(2, batch, dtype=torch.int32, device=device)
    expected = torch.empty(batch, dtype=torch.float32, device=device)
    places = torch.empty(batch, size, dtype=torch.int32, device=device)
    block = triton.next_power_of_2(size)
    place_kernel[(batch,)](
        parents, *parents.stride(), keys, places, budget if budget is not None else places, limit,
        out_parents, out_offsets, chosen, ints[0], expected, ints[1],
        size, out_parents.shape[0], out_offsets.shape[0] - 1,
        TENSOR=budget is not None, BLOCK=block, TILE=min(_TILE, triton.next_power_of_2(batch * size)), num_warps=8,
    )  # fmt: skip
    return ints[0], expected, ints[1]


def note_lost(lost: torch.Tensor, status: torch.Tensor, bit: int) -> None:
    """Set a bit of ``status``, int32 [1], where one of ``lost``, int32 [B], is 1: one launch, where torch has three."""
    batch = lost.shape[0]
    block = min(1024, triton.next_power_of_2(batch))
    lost_kernel[(1,)](lost, status, batch, BIT=bit, BLOCK=block, num_warps=1)
