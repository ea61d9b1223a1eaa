"""The walk on the device: one launch, one program a request, only visited rows of logits are read."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bole_runtime.sampling.acceptance import AcceptCall
from bole_runtime.sampling.parts_triton import STAGES, cut_key, draw, tile_masses, uniform
from bole_runtime.sampling.reject_triton import prepare, subtract

_GREEDY, _SAMPLE, _REJECT, _PREDICTED = 0, 1, 2, 3
_METHODS = {"greedy": _GREEDY, "sample": _SAMPLE, "rejection": _REJECT, "predicted": _PREDICTED}
#: Low bits of an fp32 that a wider cast leaves empty: the search for a cut skips them.
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
_BLOCK = 2048


@triton.jit
def accept_kernel(
    logits, logits_stride_b, logits_stride_n,  # [*lead, V]; with METHOD 3 the predicted tokens [*lead]
    tokens, parents, depths,  # contiguous [*lead]
    offsets,  # int32 [B + 1] when PACKED
    temperature, top_k, top_p, min_p,  # [B], or unused
    draft, draft_stride_b, draft_stride_n,
    seeds, positions, uniforms,
    scratch,  # fp32 [2, B, V] with METHOD 2: the residual of the target, and of the draft
    masses,  # fp32 [B, TILES] with METHOD 1 and 2
    accepted, path, lengths, bonus, new_tokens, source, target, status,
    size,  # vocabulary
    max_nodes,
    max_total,
    steps,  # max_depth + 1
    METHOD: tl.constexpr,
    PACKED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    GIVEN: tl.constexpr,  # uniforms are given
    SHIFT: tl.constexpr,
    NODES_P2: tl.constexpr,
    STEPS_P2: tl.constexpr,
    TILES: tl.constexpr,  # tiles of a row, rounded up to a power of two
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NODES_P2)
    if PACKED:
        start = tl.load(offsets + request).to(tl.int64)
        count = tl.load(offsets + request + 1).to(tl.int64) - start
        fits = (start >= 0) & (count >= 0) & (start + count <= max_total)
        count = tl.where(fits, tl.minimum(count, max_nodes), 0)
        logits_row = logits + start * logits_stride_n
        draft_row = draft + start * draft_stride_n
    else:
        start = request * max_nodes
        count = max_nodes
        logits_row = logits + request * logits_stride_b
        draft_row = draft + request * draft_stride_b
    inside = index < count
    live = inside & (tl.load(depths + start + index, mask=inside, other=-1) >= 0)
    parent = tl.load(parents + start + index, mask=live, other=-2)
    token_of = tl.load(tokens + start + index, mask=live, other=-1).to(tl.int64)

    heat, kept, mass_kept, least = 1.0, 0, 1.0, 0.0
    seed, position = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if (METHOD == 1) | (METHOD == 2):
        heat = tl.load(temperature + request)
        if TOP_K:
            kept = tl.load(top_k + request)
        if TOP_P:
            mass_kept = tl.load(top_p + request)
        if MIN_P:
            least = tl.load(min_p + request)
        if not GIVEN:
            seed = tl.load(seeds + request)
            position = tl.load(positions + request).to(tl.int64)
    cold = heat <= 1e-5
    heat = tl.where(cold, 1.0, heat)

    root = tl.min(tl.where(live & (parent == -1), index, NODES_P2), axis=0)
    node = tl.where(root < NODES_P2, root, -1)
    last_node = tl.full([], -1, tl.int32)
    last_token = tl.full([], -1, tl.int64)
    flags = tl.full([], 0, tl.int32)
    step = tl.full([], 0, tl.int32)
    while (node >= 0) & (step < steps):
        flat = start + node
        below = live & (parent == node)
        child = tl.full([], -1, tl.int32)
        if METHOD == 3:
            given = tl.load(logits + flat).to(tl.int64)
            wrong = given < 0
            flags = tl.where(wrong, flags | 4, flags)
            token = tl.maximum(given, 0)
        else:
            row = logits_row + node.to(tl.int64) * logits_stride_n
            top, best, wrong = _largest(row, size, BLOCK)
            flags = tl.where(wrong, flags | 1, flags)
            token = best.to(tl.int64)
            if METHOD > 0:
                one_hot = wrong | cold
                cut = cut_key(row, size, top, heat, kept, mass_kept, TOP_K, TOP_P, SHIFT, BLOCK)
                tiles = masses + request * TILES
                sums, total = tile_masses(
                    row, tiles, size, top, best, heat, cut, least, one_hot, False, SHIFT, TILES, BLOCK
                )
                if GIVEN:
                    number = tl.load(uniforms + flat * 2 + 1)
                else:
                    number = uniform(seed, position + step + 1, 0)
                if METHOD == 1:
                    drawn = draw(
                        row, sums, total * number, size, top, best, heat, cut, least, one_hot, False,
                        SHIFT, TILES, BLOCK,
                    )  # fmt: skip
                    token = drawn.to(tl.int64)
                else:
                    probs = scratch + request * size
                    rest = scratch + (tl.num_programs(0) + request) * size
                    usable = prepare(
                        row, draft_row + node.to(tl.int64) * draft_stride_n, probs, rest,
                        size, top, best, heat, cut, least, one_hot, total, SHIFT, BLOCK,
                    )  # fmt: skip
                    flags = tl.where(usable | wrong, flags, flags | 2)
                    next_child = tl.min(tl.where(below, index, NODES_P2), axis=0)
                    rank = tl.full([], 1, tl.int32)
                    while (next_child < NODES_P2) & (child < 0) & (~wrong):
                        held = tl.sum(tl.where(index == next_child, token_of, 0), axis=0)
                        known = (held >= 0) & (held < size)
                        at = tl.minimum(tl.maximum(held, 0), size - 1)
                        p = tl.load(probs + at)
                        q = tl.load(rest + at)
                        if GIVEN:
                            chance = tl.load(uniforms + (start + next_child) * 2)
                        else:
                            chance = uniform(seed, position + step + 1, rank)
                        counts = known & (q > 0)
                        taken = counts & (chance * q < p)
                        child = tl.where(taken, next_child, child)
                        if counts & (~taken):
                            subtract(probs, rest, at, size, BLOCK)
                        next_child = tl.min(tl.where(below & (index > next_child), index, NODES_P2), axis=0)
                        rank += 1
                    if child < 0:
                        sums, total = tile_masses(
                            probs, tiles, size, top, best, heat, cut, least, False, True, SHIFT, TILES, BLOCK
                        )
                        drawn = draw(
                            probs, sums, total * number, size, top, best, heat, cut, least, False, True,
                            SHIFT, TILES, BLOCK,
                        )  # fmt: skip
                        token = tl.where(wrong, best, drawn).to(tl.int64)
                    tl.debug_barrier()  # the next step writes the scratch again
        if METHOD != 2:
            found = tl.min(tl.where(below & (token_of == token), index, NODES_P2), axis=0)
            child = tl.where((found < NODES_P2) & (~wrong), found, -1)
        follow = tl.sum(tl.where(index == child, token_of, 0), axis=0)
        place = request * steps + step
        tl.store(path + place, node)
        tl.store(source + place, flat)
        tl.store(target + place, start + step)
        tl.store(new_tokens + place, tl.where(child >= 0, follow, token))
        last_node = node
        last_token = token
        node = child
        step += 1
    tl.store(accepted + request, last_node)
    tl.store(bonus + request, last_token)
    tl.store(lengths + request, step)
    tl.store(status + request, flags)
    at = tl.arange(0, STEPS_P2)
    empty = (at >= step) & (at < steps)
    tl.store(path + request * steps + at, tl.full([STEPS_P2], -1, tl.int32), mask=empty)
    nothing = tl.full([STEPS_P2], -1, tl.int64)
    tl.store(source + request * steps + at, nothing, mask=empty)
    tl.store(target + request * steps + at, nothing, mask=empty)
    tl.store(new_tokens + request * steps + at, nothing, mask=empty)


@triton.jit
def _largest(row, size, BLOCK: tl.constexpr):
    """Return the largest logit, its lowest id, and whether the row is not usable."""
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], 0, tl.int32)
    wrong = tl.full([BLOCK], 0, tl.int32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)
        given = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
        nan = given != given
        wrong = tl.where(nan | (given == float("inf")), 1, wrong)
        better = (given > tops) & (~nan)
        ids = tl.where(better, at, ids)
        tops = tl.where(better, given, tops)
    top = tl.max(tops, axis=0)
    lowest = tl.min(tl.where(tops == top, ids, size), axis=0)
    empty = top == float("-inf")
    return top, tl.where(empty, 0, lowest), (tl.max(wrong, axis=0) > 0) | empty


def accept_into(call: AcceptCall) -> None:
    """Launch the walk. Allocates scratch for ``rejection`` only; no host sync.

    Args:
        call: checked, with at least one request.
    """
    tree, out, params = call.tree, call.out, call.params
    packed = tree.offsets is not None
    predicted = call.method == "predicted"
    size = 1 if predicted else call.logits.shape[-1]
    status = out.status
    scratch = masses = status
    block = min(_BLOCK, triton.next_power_of_2(size))
    tiles = triton.next_power_of_2(triton.cdiv(size, block))
    if call.method in ("sample", "rejection"):
        masses = torch.empty(tree.max_batch, tiles, dtype=torch.float32, device=tree.device)
    if call.method == "rejection":
        scratch = torch.empty(2, tree.max_batch, size, dtype=torch.float32, device=tree.device)

    def or_unused(tensor: torch.Tensor | None) -> torch.Tensor:
        return status if tensor is None else tensor

    def strides(tensor: torch.Tensor | None) -> tuple[int, int]:
        if tensor is None or predicted:
            return 0, 0
        return (0, tensor.stride(0)) if packed else (tensor.stride(0), tensor.stride(1))

    accept_kernel[(tree.max_batch,)](
        call.logits, *strides(call.logits),
        call.tokens, tree.parents, tree.depths,
        or_unused(tree.offsets),
        or_unused(params.temperature if params else None), or_unused(params.top_k if params else None),
        or_unused(params.top_p if params else None), or_unused(params.min_p if params else None),
        or_unused(call.draft_probs), *strides(call.draft_probs),
        or_unused(call.seeds), or_unused(call.positions), or_unused(call.uniforms),
        scratch, masses,
        out.accepted, out.path, out.lengths, out.bonus, out.tokens, out.source, out.target, status,
        size, tree.max_nodes, tree.max_total, tree.max_depth + 1,
        METHOD=_METHODS[call.method],
        PACKED=packed,
        TOP_K=params is not None and params.top_k is not None,
        TOP_P=params is not None and params.top_p is not None,
        MIN_P=params is not None and params.min_p is not None,
        GIVEN=call.uniforms is not None,
        SHIFT=_SHIFT.get(call.logits.dtype, 0),
        NODES_P2=triton.next_power_of_2(tree.max_nodes),
        STEPS_P2=triton.next_power_of_2(tree.max_depth + 1),
        TILES=tiles,
        BLOCK=block,
        num_warps=8 if size > 1024 else 1,
    )  # fmt: skip
