"""The copy of :mod:`bole_runtime.state.copy_slots` as one kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit(do_not_specialize=["slot_count"])
def copy_slots_kernel(
    pool_ptr,  # [layers, slots, elements]
    source_ptr,  # int32 or int64 [B]
    target_ptr,
    slot_count,
    layer_stride,
    slot_stride,
    elements,
    BLOCK: tl.constexpr,
):
    source = tl.load(source_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(target_ptr + tl.program_id(0)).to(tl.int64)
    if (source >= 0) & (source < slot_count) & (target >= 0) & (target < slot_count) & (source != target):
        base = pool_ptr + tl.program_id(1).to(tl.int64) * layer_stride
        at = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        tl.store(base + target * slot_stride + at, tl.load(base + source * slot_stride + at, mask=inside), mask=inside)


def copy_on_device(pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Enqueue the copy; arguments are checked."""
    layers, slots, elements = pool.shape
    # A grid's first dimension is the only one that may exceed 65,535; blocks are larger where a slot would need more.
    block = _BLOCK
    while triton.cdiv(elements, block) > 65_535:
        block *= 2
    grid = (source.shape[0], layers, triton.cdiv(elements, block))
    with torch.cuda.device_of(pool):
        copy_slots_kernel[grid](
            pool, source, target, slots, pool.stride(0), pool.stride(1), elements, BLOCK=block, num_warps=4
        )
