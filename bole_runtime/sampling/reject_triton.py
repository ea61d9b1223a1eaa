"""Pieces of the device walk for sampled drafts: both distributions after some rejections, formed where they are needed.

A rejection takes the target to its residual and a token from the draft, and divides each by a sum over all tokens. What
a token has left after some rejections follows from its logit, its draft probability and those sums alone, so the sums
are noted and nothing is written back: one pass over the row for each rejection.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from bole_runtime.sampling.groups_triton import share
from bole_runtime.sampling.parts_triton import load_row, weights


@triton.jit
def note(history, count, token, mass, others):
    """Note a rejection: the token, the sum of the residual, the sum of the draft without the token."""
    tl.store(history + 3 * count, token)
    tl.store(history + 3 * count + 1, mass.to(tl.int32, bitcast=True))
    tl.store(history + 3 * count + 2, others.to(tl.int32, bitcast=True))
    tl.debug_barrier()


@triton.jit
def left_over(
    row, draft_row, history, count, at, size, top, best, rate, cut, least, one_hot, per_total, per_draft,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the probabilities of tokens under the target and the draft after ``count`` noted rejections.

    ``per_total`` and ``per_draft`` are what weights and given draft probabilities are multiplied with.
    """
    values = load_row(row, at, size)
    p = weights(values, at, top, best, rate, cut, least, one_hot, SHIFT) * per_total
    q = tl.load(draft_row + at, mask=at < size, other=0.0).to(tl.float32) * per_draft
    for i in range(count):
        token = tl.load(history + 3 * i)
        mass = tl.load(history + 3 * i + 1).to(tl.float32, bitcast=True)
        others = tl.load(history + 3 * i + 2).to(tl.float32, bitcast=True)
        # Without a residual the target stays as it is.
        p = tl.where(mass > 0, tl.maximum(p - q, 0.0) * (1 / tl.maximum(mass, 2e-38)), p)
        q = tl.where(at == token, 0.0, q * (1 / tl.maximum(others, 2e-38)))
    return p, q


@triton.jit
def subtract(
    row, draft_row, history, count, token, page, width, size, groups, rank,
    top, best, rate, cut, least, one_hot, per_total, per_draft,
    SHIFT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write, for a rejection of ``token``, of each group the residual, the draft without the token, and the target.

    The last is what is left where there is no residual.
    """
    start, end = share(groups, rank, ROWS, SPLIT)
    for block in tl.range(start, end, num_stages=STAGES):
        group = block * ROWS + tl.arange(0, ROWS)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        p, q = left_over(
            row, draft_row, history, count, at, size, top, best, rate, cut, least, one_hot, per_total, per_draft, SHIFT
        )
        residual = tl.sum(tl.maximum(p - q, 0.0), axis=1)
        tl.store(page + group, residual, mask=group < groups)
        tl.store(page + width + group, tl.sum(tl.where(at == token, 0.0, q), axis=1), mask=group < groups)
        tl.store(page + 2 * width + group, tl.sum(p, axis=1), mask=group < groups)
