"""Pieces of the device walk for sampled drafts: both distributions in scratch, and the residual after a rejection."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from bole_runtime.sampling.parts_triton import load_row, weights


@triton.jit
def prepare(
    row, draft_row, probs, rest, size, top, best, heat, cut, least, one_hot, total,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the target's and the draft's distribution to the scratch; return whether the draft's row is usable."""
    bad = tl.full([BLOCK], 0, tl.int32)
    sums = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        q = tl.load(draft_row + at, mask=at < size, other=0.0).to(tl.float32)
        bad = tl.where((q >= 0) & (q < float("inf")), bad, 1)
        sums += q
    wrong = tl.max(bad, axis=0)
    given = tl.sum(sums, axis=0)
    # A sum of 1 up to rounding is left alone, so that a draft equal to the target stays equal to it.
    scale = tl.where(tl.abs(given - 1) < 1e-5, 1.0, tl.maximum(given, 1e-30))
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = load_row(row, at, size)
        p = weights(values, at, top, best, heat, cut, least, one_hot, SHIFT) / total
        q = tl.load(draft_row + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(probs + at, p, mask=at < size)
        tl.store(rest + at, tl.where(wrong > 0, 0.0, q / scale), mask=at < size)
    tl.debug_barrier()
    return wrong == 0


@triton.jit
def subtract(probs, rest, token, size, BLOCK: tl.constexpr):
    """After a rejection: the target becomes its residual, the draft loses the token."""
    masses = tl.full([BLOCK], 0.0, tl.float32)
    rests = tl.full([BLOCK], 0.0, tl.float32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        p = tl.load(probs + at, mask=at < size, other=0.0)
        q = tl.load(rest + at, mask=at < size, other=0.0)
        masses += tl.maximum(p - q, 0.0)
        rests += tl.where(at == token, 0.0, q)
    mass = tl.sum(masses, axis=0)
    others = tl.sum(rests, axis=0)
    tl.debug_barrier()
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        p = tl.load(probs + at, mask=at < size, other=0.0)
        q = tl.load(rest + at, mask=at < size, other=0.0)
        left = tl.maximum(p - q, 0.0) / tl.maximum(mass, 1e-38)
        tl.store(probs + at, tl.where(mass > 0, left, p), mask=at < size)
        tl.store(rest + at, tl.where(at == token, 0.0, q) / tl.maximum(others, 1e-38), mask=at < size)
    tl.debug_barrier()
