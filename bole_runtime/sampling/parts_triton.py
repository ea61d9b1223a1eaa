"""Pieces of the device walk: random numbers, the filters' cut, weights, and inverting the cumulative sum."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

#: Tiles of logits in flight: one program reads a row, so it must not wait for each load.
STAGES = tl.constexpr(6)


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
def weights(values, at, top, best, heat, cut, least, one_hot, SHIFT: tl.constexpr):
    """Return the weights of tokens under temperature and filters, the largest 1; or 1 for ``best`` alone."""
    made = tl.exp((values - top) / heat)
    kept = (key_of(values, SHIFT) >= cut) & (values > float("-inf")) & (made >= least)
    return tl.where(one_hot, (at == best).to(tl.float32), tl.where(kept, made, 0.0))


@triton.jit
def _measure(row, size, top, heat, cut, floor, MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number or the mass of tokens whose key is at least ``cut`` and ``floor``, the smallest such key, and
    the largest key below ``cut``."""
    total = tl.full([BLOCK], 0.0, tl.float32)
    above = tl.full([BLOCK], 2147483647, tl.int32)
    under = tl.full([BLOCK], -2147483648, tl.int32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)
        values = load_row(row, at, size)
        key = key_of(values, SHIFT)
        kept = (key >= cut) & (key >= floor) & (values > float("-inf"))
        if MASS:
            total += tl.where(kept, tl.exp((values - top) / heat), 0.0)
        else:
            total += kept.to(tl.float32)
        above = tl.where(kept, tl.minimum(above, key), above)
        under = tl.where(key < cut, tl.maximum(under, key), under)
    return tl.sum(total, axis=0), tl.min(above, axis=0), tl.max(under, axis=0)


@triton.jit
def _bisect(
    row, size, top, heat, need, low, high, floor, MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the largest key in [low, high) that leaves at least ``need`` above; ``low`` if none does.

    Both ends jump to keys that occur, so the steps are those of a search among the logits, not among all bits.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        got, above, under = _measure(row, size, top, heat, middle, floor, MASS, SHIFT, BLOCK)
        enough = got >= need
        # Nothing lies between ``under`` and the middle, nor between the middle and ``above``.
        low = tl.where(enough, tl.maximum(middle, tl.minimum(above.to(tl.int64), high - 1)), low)
        high = tl.where(enough, high, tl.maximum(under.to(tl.int64), low) + 1)
    return low


@triton.jit
def cut_key(
    row, size, top, heat, kept, mass_kept,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the smallest key that top-k and top-p keep, by bisection over the bits of a logit: no sort, no scratch."""
    lowest = key_of(tl.full([], -3.4028234663852886e38, tl.float32), SHIFT).to(tl.int64)
    end = key_of(tl.where(top == 0, 0.0, top), SHIFT).to(tl.int64) + 1
    cut = lowest
    if TOP_K:  # noqa: SIM102 - a constant decides what is compiled, a tensor what runs
        if (kept > 0) & (kept < size):
            cut = _bisect(row, size, top, heat, kept.to(tl.float32), cut, end, cut, False, SHIFT, BLOCK)
    if TOP_P:  # noqa: SIM102
        if mass_kept < 1:
            total, _, _ = _measure(row, size, top, heat, cut, cut, True, SHIFT, BLOCK)
            # Tokens below this logit cannot hold the mass that is dropped, even all together.
            bound = top + heat * tl.log(0.5 * (1 - mass_kept) * total / size)
            low = tl.maximum(cut, key_of(tl.where(bound == 0, 0.0, bound), SHIFT).to(tl.int64))
            low = tl.maximum(tl.minimum(low, end - 1), lowest)
            cut = _bisect(row, size, top, heat, mass_kept * total, low, end, cut, True, SHIFT, BLOCK)
    return cut


@triton.jit
def _weights_at(
    row, at, size, top, best, heat, cut, least, one_hot, READY: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    if READY:
        made = tl.load(row + at, mask=at < size, other=0.0)
    else:
        made = weights(load_row(row, at, size), at, top, best, heat, cut, least, one_hot, SHIFT)
    return made


@triton.jit
def tile_masses(
    row, masses, size, top, best, heat, cut, least, one_hot,
    READY: tl.constexpr, SHIFT: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the mass of each tile of a row, and return the cumulative masses [TILES] and their total.

    READY: the row holds weights, not logits.
    """
    for first in tl.range(0, size, BLOCK, num_stages=1 if READY else STAGES):
        at = first + tl.arange(0, BLOCK)
        made = _weights_at(row, at, size, top, best, heat, cut, least, one_hot, READY, SHIFT)
        tl.store(masses + first // BLOCK, tl.sum(made, axis=0))
    tl.debug_barrier()
    tile = tl.arange(0, TILES)
    sums = tl.cumsum(tl.load(masses + tile, mask=tile * BLOCK < size, other=0.0), axis=0)
    tl.debug_barrier()  # the next row writes them again
    return sums, tl.max(sums, axis=0)


@triton.jit
def draw(
    row, sums, goal, size, top, best, heat, cut, least, one_hot,
    READY: tl.constexpr, SHIFT: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the lowest id whose cumulative weight exceeds ``goal``: its tile from ``sums``, then that tile."""
    tile = tl.arange(0, TILES)
    picked = tl.min(tl.where(sums > goal, tile, TILES - 1), axis=0)
    below = tl.sum(tl.where(tile == picked - 1, sums, 0.0), axis=0)
    at = picked * BLOCK + tl.arange(0, BLOCK)
    made = _weights_at(row, at, size, top, best, heat, cut, least, one_hot, READY, SHIFT)
    hit = (below + tl.cumsum(made, axis=0) > goal) & (made > 0)
    lowest = tl.min(tl.where(hit, at, size), axis=0)
    # Rounding of the cumulative sums: the last token of the tile with a weight.
    token = tl.where(lowest < size, lowest, tl.max(tl.where(made > 0, at, -1), axis=0))
    return tl.where(token < 0, best, token)
