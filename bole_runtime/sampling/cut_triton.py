"""The filters' cut on the device: the smallest logit that top-k and top-p keep, as a key in the order of logits.

Mostly it is found among a few groups. The LIST groups with the largest leaders hold every logit down to the smallest of
these leaders, so as soon as top-k and top-p stop above it, a tile of LIST x GROUP logits decides. Where they go further
down, or too many groups tie, the cut is searched in the whole row, one pass a step.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from bole_runtime.sampling.groups_triton import draw_in, measure, meet, page_of, pick, read
from bole_runtime.sampling.parts_triton import key_of, lowest_key


@triton.jit
def _bisect(keys, worth, need, low, high):
    """Return the largest key in [low, high) at or above which at least ``need`` is found; ``low`` if none does."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = tl.sum(tl.where(keys >= middle.to(tl.int32), worth, 0.0)) >= need
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _list_groups(
    notes, tops, groups, end, LIST: tl.constexpr, GROUPS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """List up to LIST groups with the largest leaders, in order of ids, in ``notes``.

    Returns:
        How many they are, the smallest key with all of its logits among them, and whether none was left out.
    """
    group = tl.arange(0, GROUPS)
    finite = tops > float("-inf")
    keys = key_of(tl.where(tops == 0, 0.0, tops), SHIFT)
    low = tl.min(tl.where(finite, keys, 2147483647), axis=0).to(tl.int64)
    whole = tl.sum(finite.to(tl.int32), axis=0) <= LIST
    high = tl.where(whole, low, end)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        fits = tl.sum((finite & (keys >= middle.to(tl.int32))).to(tl.int32), axis=0) <= LIST
        low = tl.where(fits, low, middle)
        high = tl.where(fits, middle, high)
    chosen = finite & (keys >= high.to(tl.int32))
    place = tl.cumsum(chosen.to(tl.int32), axis=0)
    tl.store(notes + place - 1, group, mask=chosen)
    tl.debug_barrier()
    return tl.max(place, axis=0), tl.where(whole, lowest_key(SHIFT), high), whole


@triton.jit
def listed(
    row, notes, tops, size, groups, total, number, top, best, rate, kept, mass_kept, least,
    LIST: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Cut and draw among the groups with the largest leaders.

    Args:
        total: the weight of all tokens before the filters.
        number: the random number of the draw.
        kept: of top-k, 0 where it is off; ``mass_kept`` of top-p, 1 where it is off; ``least`` of min-p.

    Returns:
        Whether these groups decide, the cut (where they do not: a key above it), the weight that is kept, the token.
    """
    end = key_of(top, SHIFT).to(tl.int64) + 1
    count, bound, whole = _list_groups(notes, tops, groups, end, LIST, GROUPS, SHIFT)
    slot = tl.arange(0, LIST)
    chosen = tl.load(notes + slot, mask=slot < count, other=0)
    at = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    given = tl.load(row + at, mask=(at < size) & (slot < count)[:, None], other=float("-inf")).to(tl.float32)
    values = tl.where(given == 0, 0.0, given)
    # What is below the bound is not complete here, so it does not count.
    keys = tl.where(values > float("-inf"), key_of(values, SHIFT), -2147483648)
    keys = tl.where(keys >= bound.to(tl.int32), keys, -2147483648)
    made = tl.exp2((values - top) * rate)
    cut = bound
    decided = whole
    if kept > 0:
        wanted = kept.to(tl.float32)
        held = tl.sum((keys > -2147483648).to(tl.float32))
        decided = decided | (held >= wanted)
        cut = _bisect(keys, 1.0, wanted, bound, end)
    if mass_kept < 1:
        held = tl.sum(tl.where(keys >= cut.to(tl.int32), made, 0.0))
        if kept > 0:
            need = mass_kept * held
        else:
            need = mass_kept * total
            decided = decided | (held >= need)
        cut = _bisect(keys, made, need, cut, end)
    elif kept <= 0:
        # min-p alone: nothing that it keeps may be left out.
        decided = decided | (tl.min(tl.where(keys > -2147483648, made, 1.0)) < least)
    masses = tl.sum(tl.where((keys >= cut.to(tl.int32)) & (made >= least), made, 0.0), axis=1)
    weight = tl.sum(masses, axis=0)
    goal = weight * number
    picked, below = pick(masses, goal, LIST)
    group = tl.sum(tl.where(slot == picked, chosen, 0), axis=0)
    token = draw_in(row, group, below, goal, size, top, best, rate, cut.to(tl.int32), least, GROUP, SHIFT)
    return decided, tl.where(decided, cut, bound), weight, token


@triton.jit
def _low_for_mass(cut, high, total, size, top, rate, mass_kept, SHIFT: tl.constexpr):
    """Return a key that top-p keeps for sure, not below ``cut``."""
    # Tokens below this logit cannot hold the mass that is dropped, even all together.
    bound = top + tl.log2(0.5 * (1 - mass_kept) * total / size) / rate
    low = tl.maximum(cut, key_of(tl.where(bound == 0, 0.0, bound), SHIFT).to(tl.int64))
    return tl.maximum(tl.minimum(low, high - 1), lowest_key(SHIFT))


@triton.jit
def searched(
    row, stats, width, counter, turn, size, groups, rank, total, number,
    top, best, rate, kept, mass_kept, least, above,
    KINDS: tl.constexpr, SHIFT: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Cut and draw in the whole row, by bisection over the bits of a logit.

    Args:
        above: a key above the cut of the first filter that is on.

    Returns:
        The cut, the weight that is kept, the token, the next turn. The other arguments are those of :func:`listed`.
    """
    low = lowest_key(SHIFT)
    high = above
    need = mass_kept * total
    # 0 search for top-k, 1 the mass that it leaves, 2 search for top-p, 3 the weights that are left. One loop for all,
    # since each pass that is compiled takes registers from the rest.
    phase = tl.full([], 3, tl.int32)
    if kept > 0:
        phase = tl.full([], 0, tl.int32)
        need = kept.to(tl.float32)
    elif mass_kept < 1:
        phase = tl.full([], 2, tl.int32)
        low = _low_for_mass(low, high, total, size, top, rate, mass_kept, SHIFT)
    while phase < 4:
        searches = (phase == 0) | (phase == 2)
        middle = tl.where(searches, low + ((high - low) >> 1), low)
        measure(
            row, page_of(stats, turn, width, KINDS), size, groups, rank, top, rate, middle.to(tl.int32),
            tl.where(phase == 3, least, 0.0), phase == 0, SHIFT, GROUP, ROWS, SPLIT, STAGES,
        )  # fmt: skip
        turn = meet(counter, turn, SPLIT)
        got = tl.sum(read(page_of(stats, turn - 1, width, KINDS), groups, 0.0, GROUPS), axis=0)
        if searches:
            low = tl.where(got >= need, middle, low)
            high = tl.where(got >= need, high, middle)
            phase = tl.where(high - low > 1, phase, phase + 1)
            phase = tl.where((phase == 1) & (mass_kept >= 1), 3, phase)
        elif phase == 1:
            need = mass_kept * got
            high = key_of(top, SHIFT).to(tl.int64) + 1
            low = _low_for_mass(low, high, got, size, top, rate, mass_kept, SHIFT)
            phase = tl.full([], 2, tl.int32)
        else:
            phase = tl.full([], 4, tl.int32)
            total = got
    cut = low.to(tl.int32)
    goal = total * number
    group, below = pick(read(page_of(stats, turn - 1, width, KINDS), groups, 0.0, GROUPS), goal, GROUPS)
    token = draw_in(row, group, below, goal, size, top, best, rate, cut, least, GROUP, SHIFT)
    return low, total, token, turn
