"""Device construction of ancestor bitmasks: one launch, no host sync, replayable in a CUDA graph."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 32


@triton.jit
def tree_build_kernel(
    source,  # int32 or int64: parents to read, dense [batch, nodes] or packed [total]
    offsets,  # int32 [max_batch + 1] when PACKED
    parents,  # int32, contiguous, dense [max_batch, max_nodes] or packed [max_total]
    ancestors,  # int32, contiguous, the rows of parents x WORDS
    depths,  # int32, the rows of parents
    status,  # int32 [1], zero on entry
    source_batch,  # rows of source that exist; the rest is padding
    source_nodes,
    source_stride_b,
    source_stride_n,
    max_nodes,
    max_total,
    max_depth,
    PACKED: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_P2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) == 0
    if PACKED:
        start = tl.load(offsets + request).to(tl.int64)
        given = tl.load(offsets + request + 1).to(tl.int64) - start
        # Offsets that are negative, decreasing or beyond the buffer own nothing.
        fits = (start >= 0) & (given >= 0) & (start + given <= max_total)
        count = tl.where(fits, tl.minimum(given, max_nodes), 0).to(tl.int32)
        rows = tl.where(fits, given, 0).to(tl.int32)
        if first & ((count < given) | (given < 0)):
            tl.atomic_or(status, 4)
        base = source + start * source_stride_n
        row0 = start
    else:
        count = tl.where(request < source_batch, source_nodes, 0).to(tl.int32)
        rows = max_nodes
        base = source + request * source_stride_b
        row0 = request * max_nodes
    given_parent = tl.load(base + node.to(tl.int64) * source_stride_n, mask=node < count, other=-2)
    parent = tl.minimum(tl.maximum(given_parent, -3), 1 << 20).to(tl.int32)

    word = tl.arange(0, WORDS_P2)
    bits = tl.zeros([BLOCK, WORDS_P2], dtype=tl.int32)
    depth = tl.full([BLOCK], -1, dtype=tl.int32)
    current = node
    active = (node < count) & (parent != -2)
    found = tl.zeros([BLOCK], dtype=tl.int32)
    step = 0
    running = tl.max(active.to(tl.int32), axis=0)
    while (step <= max_depth) & (running > 0):
        one = tl.full([BLOCK], 1, dtype=tl.int32) << (current & 31)
        mark = active[:, None] & ((current >> 5)[:, None] == word[None, :])
        bits = tl.where(mark, bits | one[:, None], bits)
        order = active & (parent >= current) & (parent < count)
        wrong = active & ((parent < -1) | (parent >= count))
        found = tl.where(order, found | 1, found)
        found = tl.where(wrong, found | 8, found)
        done = active & (parent == -1)
        depth = tl.where(done, step, depth)
        active = active & (parent >= 0) & (parent < current)
        current = tl.where(active, parent, current)
        above = tl.load(base + current.to(tl.int64) * source_stride_n, mask=active, other=-2)
        parent = tl.minimum(tl.maximum(above, -3), 1 << 20).to(tl.int32)
        step += 1
        running = tl.max(active.to(tl.int32), axis=0)
    found = tl.where(active, found | 2, found)
    flags = tl.reduce(found, 0, _or)
    if flags != 0:
        tl.atomic_or(status, flags)

    bits = tl.where((depth >= 0)[:, None], bits, 0)
    row = row0 + node
    write = node < rows
    tl.store(depths + row, depth, mask=write)
    # Far-out parents are kept as given, down to the width of the column.
    clipped = tl.minimum(tl.maximum(given_parent, -2147483648), 2147483647).to(tl.int32)
    tl.store(parents + row, clipped, mask=write)
    tl.store(
        ancestors + row[:, None] * WORDS + word[None, :],
        bits,
        mask=write[:, None] & (word < WORDS)[None, :],
    )


@triton.jit
def _or(a, b):
    return a | b


def build_into(
    source: torch.Tensor,
    offsets: torch.Tensor | None,
    parents: torch.Tensor,
    ancestors: torch.Tensor,
    depths: torch.Tensor,
    status: torch.Tensor,
    max_batch: int,
    max_nodes: int,
    max_depth: int,
) -> None:
    """Rebuild the tensors of a tree on their device, without a host sync.

    Args:
        source: int32 or int64 parents, dense [B <= max_batch, N <= max_nodes] or packed [max_total]; may be
            ``parents``.
        offsets: int32 [max_batch + 1] for a packed tree, else None.
        parents: int32, written. Same for ancestors, depths and status.
        ancestors: int32 words.
        depths: int32.
        status: int32 [1].
        max_batch: capacity, as in :class:`~bole_runtime.tree.TreeBatch`.
        max_nodes: capacity.
        max_depth: capacity.
    """
    status.zero_()
    packed = offsets is not None
    if packed:
        # Rows that no request owns.
        depths.fill_(-1)
        ancestors.zero_()
        if source.data_ptr() != parents.data_ptr():
            parents.fill_(-2)
    if max_batch == 0:
        return
    words = ancestors.shape[-1]
    tree_build_kernel[(max_batch, triton.cdiv(max_nodes, _BLOCK))](
        source,
        offsets if offsets is not None else status,
        parents,
        ancestors,
        depths,
        status,
        max_batch if packed else source.shape[0],
        max_nodes if packed else source.shape[1],
        0 if packed else source.stride(0),
        source.stride(-1),
        max_nodes,
        parents.shape[0] if packed else 0,
        max_depth,
        PACKED=packed,
        WORDS=words,
        WORDS_P2=triton.next_power_of_2(words),
        BLOCK=_BLOCK,
        num_warps=1,
    )
