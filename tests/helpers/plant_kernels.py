"""Triton kernels that the compiler, the assembler or a launch refuses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def planted_refused(out_ptr):
    # Triton stops at it.
    tl.static_assert(False, "planted")
    tl.store(out_ptr, 1.0)


@triton.jit
def planted_assembly(out_ptr):
    # Triton takes it, ptxas does not.
    value = tl.inline_asm_elementwise("planted.instruction $0, $1;", "=r,r", [tl.arange(0, 32)], tl.int32, True, 1)
    tl.store(out_ptr + tl.arange(0, 32), value.to(tl.float32))


@triton.jit
def planted_shared(values_ptr, out_ptr):
    # With eight stages, tiles of 32 KiB ahead of the product take more shared memory than a block of any GPU has.
    rows, cols = tl.arange(0, 128)[:, None], tl.arange(0, 64)[None, :]
    product = tl.zeros((128, 128), tl.float32)
    for i in range(0, 4096, 64):
        a = tl.load(values_ptr + rows * 4096 + i + cols)
        b = tl.load(values_ptr + rows * 4096 + i + 4096 * 128 + cols)
        product = tl.dot(a, tl.trans(b), product)
    tl.store(out_ptr + rows * 128 + tl.arange(0, 128)[None, :], product)


@triton.jit
def planted_endless(out_ptr):
    # Unrolled, it has as many instructions as a search has patience for many times over.
    value = tl.load(out_ptr)
    for i in tl.static_range(1 << 24):
        value = value * 1.5 + i
    tl.store(out_ptr, value)
