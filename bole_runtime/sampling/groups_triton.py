"""Passes of the device walk over a row: what is kept of each group of neighbouring logits, and the programs' meeting.

A row is cut into groups of GROUP logits. A pass leaves one number a group (its largest logit, its mass) on a page of
scratch, and all decisions are taken from those numbers. The programs of a request share a pass, meet, and then read
the whole page: each takes every decision itself, so that nothing has to be sent around. A number of a group and the
order in which groups are summed depend on the vocabulary alone, not on the number of programs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from bole_runtime.sampling.parts_triton import key_of, load_row, weights


@triton.jit
def meet(counter, turn, SPLIT: tl.constexpr):
    """Wait until all programs of the request have finished their share of pass ``turn``; return the next turn.

    A page is written again two passes later. By then each program has come to the meeting in between, so it has to
    read what it needs of a page before that: before its own next pass.
    """
    tl.debug_barrier()
    if SPLIT > 1:
        tl.atomic_add(counter, 1, sem="release")
        missing = True
        while missing:
            missing = tl.atomic_add(counter, 0, sem="acquire") < (turn + 1) * SPLIT
        tl.debug_barrier()
    return turn + 1


@triton.jit
def page_of(stats, turn, width, KINDS: tl.constexpr):
    """Return the page of a pass: two take turns, each with ``width`` numbers of every kind."""
    return stats + (turn & 1) * (KINDS * width)


@triton.jit
def read(page, groups, other, GROUPS: tl.constexpr):
    """Return the numbers of all groups [GROUPS], past the first cache, which does not see what other programs wrote."""
    group = tl.arange(0, GROUPS)
    return tl.load(page + group, mask=group < groups, other=other, cache_modifier=".cg")


@triton.jit
def share(groups, rank, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """Return the first block of ROWS groups that a program reads, and the end of its blocks."""
    blocks = (groups + ROWS - 1) // ROWS
    each = (blocks + SPLIT - 1) // SPLIT
    return rank * each, tl.minimum((rank + 1) * each, blocks)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def survey(
    row, draft_row, page, width, size, groups, rank, rate,
    MASS: tl.constexpr, DRAFT: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the largest logit of each group, or NaN; its mass in units of the largest; the sum of the draft.

    The sum of a draft's group that has a negative probability or a NaN is NaN.
    """
    start, end = share(groups, rank, ROWS, SPLIT)
    for block in tl.range(start, end, num_stages=STAGES):
        group = block * ROWS + tl.arange(0, ROWS)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        given = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
        top = tl.reduce(given, 1, _larger)
        tl.store(page + group, top, mask=group < groups)
        if MASS:
            base = tl.where(top > float("-inf"), top, 0.0)
            made = tl.exp2((given - base[:, None]) * rate)
            tl.store(page + width + group, tl.sum(made, axis=1), mask=group < groups)
        if DRAFT:
            q = tl.load(draft_row + at, mask=at < size, other=0.0).to(tl.float32)
            q = tl.where(q >= 0, q, float("nan"))
            tl.store(page + 2 * width + group, tl.sum(q, axis=1), mask=group < groups)


@triton.jit
def leader(row, tops, size, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit, its lowest id, and whether the row is not usable; ``tops`` are those of the groups."""
    top, group = tl.max(tl.where(tops == tops, tops, float("inf")), axis=0, return_indices=True)
    top = tl.where(top == 0, 0.0, top)
    at = group * GROUP + tl.arange(0, GROUP)
    best = tl.min(tl.where(load_row(row, at, size) == top, at, size), axis=0)
    wrong = (top == float("inf")) | (top == float("-inf"))
    if wrong:
        best = _largest(row, size, BLOCK)
    return top, best, wrong


@triton.jit
def _largest(row, size, BLOCK: tl.constexpr):
    """Return the lowest id of the largest logit; 0 if there is none. NaN count as -inf."""
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], 0, tl.int32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = load_row(row, at, size)
        better = values > tops
        ids = tl.where(better, at, ids)
        tops = tl.where(better, values, tops)
    top = tl.max(tops, axis=0)
    lowest = tl.min(tl.where(tops == top, ids, size), axis=0)
    return tl.where(top == float("-inf"), 0, lowest)


@triton.jit
def measure(
    row, page, size, groups, rank, top, rate, cut, least, counts,
    SHIFT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the weight of each group under the filters; with ``counts``, how many of its logits they keep."""
    start, end = share(groups, rank, ROWS, SPLIT)
    for block in tl.range(start, end, num_stages=STAGES):
        group = block * ROWS + tl.arange(0, ROWS)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        values = load_row(row, at, size)
        made = tl.exp2((values - top) * rate)
        kept = (key_of(values, SHIFT) >= cut) & (values > float("-inf")) & (made >= least)
        tl.store(page + group, tl.sum(tl.where(kept, tl.where(counts, 1.0, made), 0.0), axis=1), mask=group < groups)


@triton.jit
def pick(masses, goal, WIDTH: tl.constexpr):
    """Return the first of masses [WIDTH] whose cumulative sum exceeds ``goal``, and the sum below it."""
    slot = tl.arange(0, WIDTH)
    sums = tl.cumsum(masses, axis=0)
    picked = tl.min(tl.where((sums > goal) & (masses > 0), slot, WIDTH), axis=0)
    if picked == WIDTH:  # rounding of the sums: the last one with a mass
        picked = tl.maximum(tl.max(tl.where(masses > 0, slot, -1), axis=0), 0)
    return picked, tl.sum(tl.where(slot == picked - 1, sums, 0.0), axis=0)


@triton.jit
def pick_token(made, at, below, goal, best, size):
    """Return the lowest id of a group whose cumulative weight, on top of ``below``, exceeds ``goal``."""
    token = tl.min(tl.where((below + tl.cumsum(made, axis=0) > goal) & (made > 0), at, size), axis=0)
    if token == size:
        token = tl.max(tl.where(made > 0, at, -1), axis=0)
        token = tl.where(token < 0, best, token)
    return token


@triton.jit
def draw_in(
    row, group, below, goal, size, top, best, rate, cut, least, GROUP: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Return the token of a group that a draw falls on; see :func:`pick_token`."""
    at = group * GROUP + tl.arange(0, GROUP)
    made = weights(load_row(row, at, size), at, top, best, rate, cut, least, False, SHIFT)
    return pick_token(made, at, below, goal, best, size)
