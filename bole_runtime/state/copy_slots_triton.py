"""The copy of :mod:`bole_runtime.state.copy_slots` as one kernel: for slots that are a dense block, and for others."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
#: Fewer where an element's place takes divisions, so that the int64 numbers stay in registers.
_STRIDED_BLOCK = 1024


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


@triton.jit(do_not_specialize=["slot_count", "elements", "size1", "size2", "size3"])
def copy_strided_slots_kernel(
    pool_ptr,  # [layers, slots, size0, size1, size2, size3]
    source_ptr,  # int32 or int64 [B]
    target_ptr,
    slot_count,
    layer_stride,
    slot_stride,
    elements,
    size1,
    size2,
    size3,
    stride0,
    stride1,
    stride2,
    stride3,
    BLOCK: tl.constexpr,
):
    source = tl.load(source_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(target_ptr + tl.program_id(0)).to(tl.int64)
    if (source >= 0) & (source < slot_count) & (target >= 0) & (target < slot_count) & (source != target):
        base = pool_ptr + tl.program_id(1).to(tl.int64) * layer_stride
        at = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        rest = at // size3
        place = (at - rest * size3) * stride3
        above = rest // size2
        place += (rest - above * size2) * stride2
        first = above // size1
        place += (above - first * size1) * stride1 + first * stride0
        value = tl.load(base + source * slot_stride + place, mask=inside)
        tl.store(base + target * slot_stride + place, value, mask=inside)


def copy_on_device(pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Enqueue the copy; arguments are checked.

    Args:
        pool: [layers, slots, ...], the dimensions of a slot by falling stride and merged where they can be. Beyond four
            of those there is one launch for each index of the ones in front; pools of states have at most three.
        source: of :func:`~bole_runtime.state.copy_slots.copy_slots`.
        target: likewise.
    """
    layers, slots, *sizes = pool.shape
    strides = pool.stride()[2:]
    if len(sizes) > 4:
        for part in pool.unbind(2):
            copy_on_device(part, source, target)
        return
    dense = len(sizes) == 1 and (strides[0] == 1 or sizes[0] == 1)
    elements = pool[0, 0].numel()
    # A grid's first dimension is the only one that may exceed 65,535; blocks are larger where a slot would need more.
    block = _BLOCK if dense else _STRIDED_BLOCK
    while triton.cdiv(elements, block) > 65_535:
        block *= 2
    grid = (source.shape[0], layers, triton.cdiv(elements, block))
    common = (pool, source, target, slots, pool.stride(0), pool.stride(1), elements)
    with torch.cuda.device_of(pool):
        if dense:
            copy_slots_kernel[grid](*common, BLOCK=block, num_warps=4)
            return
        missing = 4 - len(sizes)
        shape, steps = (*(1,) * missing, *sizes), (*(0,) * missing, *strides)
        copy_strided_slots_kernel[grid](*common, *shape[1:], *steps, BLOCK=block, num_warps=4)
