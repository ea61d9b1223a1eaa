"""Pieces of the device walk: random numbers, and the weights of logits."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position, decision):
    """Return a number in [0, 1), the one that bole_runtime.sampling.philox gives."""
    zero = tl.full([1], 0, tl.int32)
    words = tl.philox(seed, zero + position.to(tl.int32), zero + decision, zero, zero)
    return tl.sum((words[0] >> 8).to(tl.float32), axis=0) * 5.9604644775390625e-08


@triton.jit
def load_row(row, at, size):
    """Load logits as fp32; NaN and what is outside are -inf, and there is only one zero."""
    given = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
    given = tl.where(given == 0, 0.0, given)
    return tl.where(given != given, float("-inf"), given)


@triton.jit
def key_of(values, SHIFT: tl.constexpr):
    """Return integers in the order of the values. The lowest SHIFT bits, which hold nothing, are dropped."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def lowest_key(SHIFT: tl.constexpr):
    """Return the key of the smallest finite value."""
    return key_of(tl.full([], -3.4028234663852886e38, tl.float32), SHIFT).to(tl.int64)


@triton.jit
def weights(values, at, top, best, rate, cut, least, one_hot, SHIFT: tl.constexpr):
    """Return the weights of tokens under temperature and filters, the largest 1; or 1 for ``best`` alone.

    ``rate`` is log2(e) over the temperature.
    """
    made = tl.exp2((values - top) * rate)
    kept = (key_of(values, SHIFT) >= cut) & (values > float("-inf")) & (made >= least)
    return tl.where(one_hot, (at == best).to(tl.float32), tl.where(kept, made, 0.0))
