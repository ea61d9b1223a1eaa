"""Child and sibling links to parents on the device: one launch, one program a request."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def links_kernel(
    next_token, token_stride_b, token_stride_n,
    next_sibling, sibling_stride_b, sibling_stride_n,
    live,  # bool (as int8) or slots
    parents,  # int32 [B, nodes], contiguous; holds the links in between
    nodes,
    FLAGS: tl.constexpr,  # live is bool
    ROWS: tl.constexpr,  # nodes compared with all nodes at a time
    BLOCK: tl.constexpr,  # nodes, rounded up to a power of two
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    tokens = next_token + request * token_stride_b
    siblings = next_sibling + request * sibling_stride_b
    out = parents + request * nodes
    is_live = tl.load(live + request)
    if FLAGS:
        keep = is_live != 0
    else:
        keep = is_live >= 0
    index = tl.arange(0, BLOCK)
    inside = index < nodes
    child = tl.load(tokens + index.to(tl.int64) * token_stride_n, mask=inside, other=-1)
    sibling = tl.load(siblings + index.to(tl.int64) * sibling_stride_n, mask=inside, other=-1)
    child = tl.where((child > 0) & (child < nodes), child, -1).to(tl.int32)
    sibling = tl.where((sibling > 0) & (sibling < nodes), sibling, -1).to(tl.int32)
    # Who names a node: a parent p is kept as p, the sibling s before it as -(s + 3), nobody as -2.
    for first in range(0, nodes, ROWS):
        row = first + tl.arange(0, ROWS)
        above = tl.max(tl.where(child[None, :] == row[:, None], index[None, :], -1), axis=1)
        before = tl.max(tl.where(sibling[None, :] == row[:, None], index[None, :], -1), axis=1)
        link = tl.where(above >= 0, above, tl.where(before >= 0, -(before + 3), -2))
        link = tl.where(row == 0, -1, link)
        tl.store(out + row, link, mask=row < nodes)
    tl.debug_barrier()
    # Back through the siblings to the first child, whose link is the parent of all of them.
    link = tl.load(out + index, mask=inside, other=-2)
    hops = tl.full([], 0, tl.int32)
    while (hops < nodes) & (tl.min(link, axis=0) < -2):
        link = tl.where(link < -2, tl.load(out - (link + 3), mask=inside & (link < -2), other=-2), link)
        hops += 1
    # A cycle of siblings; and a list that begins at nobody's child gave -2 or, behind node 0, -1.
    link = tl.where((link < -2) | ((link == -1) & (index > 0)), -2, link)
    tl.debug_barrier()
    tl.store(out + index, link, mask=inside)
    tl.debug_barrier()
    # What hangs below such a node is not reachable either.
    top = tl.where(link >= 0, link, index)
    more = tl.full([], 1, tl.int32)
    hops = tl.full([], 0, tl.int32)
    while (hops < nodes) & (more > 0):
        above = tl.load(out + top, mask=inside, other=-2)
        climbs = inside & (above >= 0)
        top = tl.where(climbs, above, top)
        more = tl.max(climbs.to(tl.int32), axis=0)
        hops += 1
    # A cycle of parents goes on until the hops end.
    good = (top == 0) & keep
    tl.debug_barrier()
    tl.store(out + index, tl.where(good, link, -2), mask=inside)


def links_into(next_token: torch.Tensor, next_sibling: torch.Tensor, live: torch.Tensor, out: torch.Tensor) -> None:
    """Launch the translation; arguments are checked by :func:`bole_runtime.tree.links.parents_from_links`."""
    batch, nodes = next_token.shape
    flags = live.dtype is torch.bool
    block = triton.next_power_of_2(nodes)
    links_kernel[(batch,)](
        next_token, *next_token.stride(),
        next_sibling, *next_sibling.stride(),
        (live.view(torch.int8) if flags else live).contiguous(),
        out, nodes,
        FLAGS=flags, ROWS=min(block, 16), BLOCK=block,
        num_warps=4 if block >= 128 else 1,
    )  # fmt: skip
