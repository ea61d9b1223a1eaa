"""The decision of :mod:`bole_runtime.state.chains` as one kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from bole_runtime.calls import RowAction

if TYPE_CHECKING:
    from bole_runtime.state.chain_counters import ChainCounters, ChainRule
    from bole_runtime.tree import TreeBatch

_BLOCK = 128


@triton.jit(do_not_specialize=["batch", "slot_count", "nodes", "capacity", "limit"])
def chain_decide_kernel(
    slots_ptr,  # int32 or int64 [batch]
    accepted_ptr,  # int32 or int64 [batch]
    depths_ptr,  # int32, dense [batch, nodes] or packed
    offsets_ptr,  # int32 [batch + 1], or None
    length_ptr,  # int32 [slot_count]
    start_ptr,
    before_length_ptr,
    before_start_ptr,
    actions_ptr,  # int32 [batch], written
    batch,
    slot_count,
    nodes,
    capacity,
    limit,
    CONSUMED: tl.constexpr,
    COMMIT: tl.constexpr,
    APPEND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = b < batch
    slot = tl.load(slots_ptr + b, mask=row, other=-1).to(tl.int64)
    accepted = tl.load(accepted_ptr + b, mask=row, other=-1).to(tl.int64)
    inside = (slot >= 0) & (slot < slot_count)
    first = b.to(tl.int64) * nodes
    count = first * 0 + nodes
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + b, mask=row, other=0).to(tl.int64)
        count = tl.minimum(tl.load(offsets_ptr + b + 1, mask=row, other=0) - first, nodes)
    chosen = inside & (accepted >= 0) & (accepted < count)
    tokens = tl.load(depths_ptr + first + accepted, mask=chosen, other=-1) + 1
    length = tl.load(length_ptr + slot, mask=inside, other=0)
    start = tl.load(start_ptr + slot, mask=inside, other=0)
    if CONSUMED:
        start = (start + length) % capacity
        length = length * 0
    acts = tokens > 0
    fits = length + tokens <= limit
    tl.store(actions_ptr + b, tl.where(acts, tl.where(fits, APPEND, COMMIT), 0), mask=row)
    tl.store(before_length_ptr + slot, length, mask=inside)
    tl.store(before_start_ptr + slot, start, mask=inside)
    tl.store(length_ptr + slot, tl.where(acts, tl.where(fits, length + tokens, 0), length), mask=inside)
    tl.store(start_ptr + slot, start, mask=inside)


def decide_on_device(
    counters: ChainCounters,
    rule: ChainRule,
    tree: TreeBatch,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    actions: torch.Tensor,
) -> None:
    """Launch the decision; see :func:`bole_runtime.state.chains.decide`."""
    batch = slots.shape[0]
    if batch == 0:
        return
    chain_decide_kernel[(triton.cdiv(batch, _BLOCK),)](
        slots,
        accepted,
        tree.depths,
        tree.offsets,
        *counters.rows,
        actions,
        batch,
        counters.slots,
        tree.max_nodes,
        rule.capacity,
        rule.limit,
        CONSUMED=rule.consumed,
        COMMIT=int(RowAction.COMMIT),
        APPEND=int(RowAction.APPEND),
        BLOCK=_BLOCK,
        num_warps=1,
    )
