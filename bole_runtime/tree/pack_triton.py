"""Packing on the device: one launch, one program a request."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def pack_kernel(
    source, source_stride_b, source_stride_n,  # parents, dense [batch, nodes]
    given,  # int [batch] when COUNTED
    parents,  # int32 [max_total], written
    offsets,  # int32 [max_batch + 1], written
    lost,  # int32 [1], written: whether some request did not fit
    nodes,
    max_total,
    max_batch,
    COUNTED: tl.constexpr,
    ROWS: tl.constexpr,  # requests counted at a time
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
    TILE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    batch = tl.num_programs(0)
    index = tl.arange(0, BLOCK)
    inside = index < nodes
    start = tl.full([], 0, tl.int64)
    before = tl.full([], 0, tl.int64)
    count = tl.full([], 0, tl.int64)
    own_end = tl.full([], 0, tl.int64)
    # Everybody counts those before; it begins at the last end that still fits.
    for first in range(0, request + 1, ROWS):
        which = first + tl.arange(0, ROWS)
        counted = which <= request
        if COUNTED:
            counts = tl.load(given + which, mask=counted, other=0).to(tl.int64)
            counts = tl.minimum(tl.maximum(counts, 0), nodes)
        else:
            rows = source + which.to(tl.int64)[:, None] * source_stride_b
            rows = rows + index.to(tl.int64)[None, :] * source_stride_n
            held = tl.load(rows, mask=counted[:, None] & inside[None, :], other=-2)
            counts = tl.max(tl.where(held != -2, index[None, :] + 1, 0), axis=1).to(tl.int64)
        ends = before + tl.cumsum(counts, axis=0)
        start = tl.maximum(start, tl.max(tl.where((which < request) & (ends <= max_total), ends, 0), axis=0))
        count += tl.sum(tl.where(which == request, counts, 0), axis=0)
        own_end += tl.sum(tl.where(which == request, ends, 0), axis=0)
        before += tl.sum(counts, axis=0)
    fits = own_end <= max_total
    count = tl.where(fits, count, 0)
    own = source + request.to(tl.int64) * source_stride_b + index.to(tl.int64) * source_stride_n
    held = tl.load(own, mask=index < count, other=-2)
    row = tl.minimum(tl.maximum(held, -2147483648), 2147483647).to(tl.int32)
    tl.store(parents + start + index, row, mask=index < count)
    tl.store(offsets + request, start.to(tl.int32))
    if request == batch - 1:
        # If any does not fit, nor does the last one that has nodes; ends never fall.
        tl.store(lost, (own_end > max_total).to(tl.int32))
        end = start + count
        for first in range(batch, max_batch + 1):
            tl.store(offsets + first, end.to(tl.int32))
        tile = tl.arange(0, TILE)
        while end < max_total:
            tl.store(parents + end + tile, tl.full([TILE], -2, tl.int32), mask=end + tile < max_total)
            end += TILE


def pack_into(
    source: torch.Tensor, counts: torch.Tensor | None, parents: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Pack dense rows; arguments are checked by :func:`bole_runtime.tree.pack.pack`.

    Args:
        source: int32 or int64 [B, N], both at least 1.
        counts: int32 or int64 [B], or None.
        parents: int32 [max_total], written.
        offsets: int32 [max_batch + 1], written.

    Returns:
        int32 [1], 1 if some request did not fit.
    """
    batch, nodes = source.shape
    lost = torch.empty(1, dtype=torch.int32, device=source.device)
    block = triton.next_power_of_2(nodes)
    pack_kernel[(batch,)](
        source, *source.stride(), lost if counts is None else counts.contiguous(), parents, offsets, lost,
        nodes, parents.shape[0], offsets.shape[0] - 1,
        COUNTED=counts is not None, ROWS=max(1, min(64, 4096 // block)), BLOCK=block, TILE=256, num_warps=4,
    )  # fmt: skip
    return lost
