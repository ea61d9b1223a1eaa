"""The walk on the device: one launch, some programs a request, only visited rows of logits are read."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bole_runtime.sampling.calls import AcceptCall
from bole_runtime.sampling.cut_triton import listed, searched
from bole_runtime.sampling.groups_triton import draw_in, leader, meet, page_of, pick, pick_token, read, survey
from bole_runtime.sampling.launch_triton import multiprocessors, shape_of
from bole_runtime.sampling.parts_triton import lowest_key, uniform
from bole_runtime.sampling.reject_triton import left_over, note, subtract

_GREEDY, _SAMPLE, _REJECT, _PREDICTED = 0, 1, 2, 3
_METHODS = {"greedy": _GREEDY, "sample": _SAMPLE, "rejection": _REJECT, "predicted": _PREDICTED}
#: Low bits of an fp32 that a wider cast leaves empty: the search for a cut skips them.
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def accept_kernel(
    logits, logits_stride_b, logits_stride_n,  # [*lead, V]; with METHOD 3 the predicted tokens [*lead]
    tokens, parents, depths,  # contiguous [*lead]
    offsets,  # int32 [B + 1] when PACKED
    temperature, top_k, top_p, min_p,  # [B], or unused
    draft, draft_stride_b, draft_stride_n,
    seeds, positions, uniforms,
    stats,  # fp32 [B, 2, METHOD + 1, width]: what passes leave of each group
    notes,  # int32 [B, SPLIT, LIST + 3 max_nodes]: groups listed, rejections
    counters,  # int32 [B, 32], zeros, a line of memory each: meetings, where SPLIT > 1
    accepted, path, lengths, bonus, new_tokens, source, target, status,
    size,  # vocabulary
    width,  # groups, rounded up to a multiple of 16
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
    GROUP: tl.constexpr,  # logits of a group
    GROUPS: tl.constexpr,  # groups of a row, rounded up to a power of two
    LIST: tl.constexpr,  # groups that the filters look into
    ROWS: tl.constexpr,  # groups of a block
    SPLIT: tl.constexpr,  # programs of a request
    STAGES: tl.constexpr,  # blocks in flight
):  # fmt: skip
    program = tl.program_id(0)
    request = (program // SPLIT).to(tl.int64)
    rank = program % SPLIT
    groups = (size + GROUP - 1) // GROUP
    KINDS: tl.constexpr = METHOD + 1
    stats += request * (2 * KINDS * width)
    notes += program.to(tl.int64) * (LIST + 3 * max_nodes)
    history = notes + LIST
    counter = counters + request * 32
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
            kept = tl.where(kept < size, kept, 0)
        if TOP_P:
            mass_kept = tl.load(top_p + request)
        if MIN_P:
            least = tl.load(min_p + request)
        if not GIVEN:
            seed = tl.load(seeds + request)
            position = tl.load(positions + request).to(tl.int64)
    cold = heat <= 1e-5
    # Not 0, so that a logit of -inf has no weight even where the temperature is infinite.
    rate = tl.maximum(1.4426950408889634 / tl.where(cold, 1.0, heat), 1e-30)

    root = tl.min(tl.where(live & (parent == -1), index, NODES_P2), axis=0)
    node = tl.where(root < NODES_P2, root, -1)
    last_node = tl.full([], -1, tl.int32)
    last_token = tl.full([], -1, tl.int64)
    flags = tl.full([], 0, tl.int32)
    step = tl.full([], 0, tl.int32)
    turn = tl.full([], 0, tl.int32)
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
            draft_at = draft_row + node.to(tl.int64) * draft_stride_n
            page = page_of(stats, turn, width, KINDS)
            survey(
                row, draft_at, page, width, size, groups, rank, rate,
                METHOD > 0, METHOD == 2, GROUP, ROWS, SPLIT, STAGES,
            )  # fmt: skip
            turn = meet(counter, turn, SPLIT)
            tops = read(page, groups, float("-inf"), GROUPS)
            top, best, wrong = leader(row, tops, size, GROUP, ROWS * GROUP)
            flags = tl.where(wrong, flags | 1, flags)
            token = best.to(tl.int64)
            given = 0.0
            if METHOD == 2:
                given = tl.sum(read(page + 2 * width, groups, 0.0, GROUPS), axis=0)
            if METHOD > 0:
                one_hot = wrong | cold
                cut = lowest_key(SHIFT)
                total = tl.full([], 1.0, tl.float32)
                if GIVEN:
                    number = tl.load(uniforms + flat * 2 + 1)
                else:
                    number = uniform(seed, position + step + 1, 0)
                if not one_hot:
                    masses = read(page + width, groups, 0.0, GROUPS)
                    masses = tl.where(tops > float("-inf"), masses * tl.exp2((tops - top) * rate), 0.0)
                    total = tl.sum(masses, axis=0)
                    filtered = tl.full([], 0, tl.int1)
                    if TOP_K | TOP_P | MIN_P:
                        filtered = (kept > 0) | (mass_kept < 1) | (least > 0)
                    if filtered:
                        every = total
                        decided, cut, total, drawn = listed(
                            row, notes, tops, size, groups, every, number,
                            top, best, rate, kept, mass_kept, least, LIST, GROUP, GROUPS, SHIFT,
                        )  # fmt: skip
                        if not decided:
                            cut, total, drawn, turn = searched(
                                row, stats, width, counter, turn, size, groups, rank, every, number,
                                top, best, rate, kept, mass_kept, least, cut,
                                KINDS, SHIFT, GROUP, GROUPS, ROWS, SPLIT, STAGES,
                            )  # fmt: skip
                    else:
                        goal = total * number
                        group, below_it = pick(masses, goal, GROUPS)
                        drawn = draw_in(row, group, below_it, goal, size, top, best, rate, cut, 0.0, GROUP, SHIFT)
                    token = drawn.to(tl.int64)
            if METHOD == 2:
                cut = cut.to(tl.int32)
                # Not NaN either, and not so small that what it is divided by would no longer be its sum.
                usable = (given < float("inf")) & ((given <= 0) | (given >= 1e-30))
                flags = tl.where(usable | wrong, flags, flags | 2)
                # A sum of 1 up to rounding is left alone, so that a draft equal to the target stays equal to it.
                scale = tl.where(tl.abs(given - 1) < 1e-5, 1.0, 1 / tl.maximum(given, 1e-30))
                mass = tl.full([], 0.0, tl.float32)
                rejected = tl.full([], 0, tl.int32)
                next_child = tl.min(tl.where(below, index, NODES_P2), axis=0)
                rank_of = tl.full([], 1, tl.int32)
                while (next_child < NODES_P2) & (child < 0) & usable & (~wrong):
                    held = tl.sum(tl.where(index == next_child, token_of, 0), axis=0)
                    known = (held >= 0) & (held < size)
                    at = tl.minimum(tl.maximum(held, 0), size - 1).to(tl.int32)
                    p, q = left_over(
                        row, draft_at, history, rejected, at, size,
                        top, best, rate, cut, least, one_hot, 1 / total, scale, SHIFT,
                    )  # fmt: skip
                    if GIVEN:
                        chance = tl.load(uniforms + (start + next_child) * 2)
                    else:
                        chance = uniform(seed, position + step + 1, rank_of)
                    counts = known & (q > 0)
                    taken = counts & (chance * q < p)
                    child = tl.where(taken, next_child, child)
                    if counts & (~taken):
                        page = page_of(stats, turn, width, KINDS)
                        subtract(
                            row, draft_at, history, rejected, at, page, width, size, groups, rank,
                            top, best, rate, cut, least, one_hot, 1 / total, scale,
                            SHIFT, GROUP, ROWS, SPLIT, STAGES,
                        )  # fmt: skip
                        turn = meet(counter, turn, SPLIT)
                        mass = tl.sum(read(page, groups, 0.0, GROUPS), axis=0)
                        note(history, rejected, at, mass, tl.sum(read(page + width, groups, 0.0, GROUPS), axis=0))
                        rejected += 1
                    next_child = tl.min(tl.where(below & (index > next_child), index, NODES_P2), axis=0)
                    rank_of += 1
                if (child < 0) & (rejected > 0):
                    page = page_of(stats, turn - 1, width, KINDS)
                    if mass > 0:
                        left = read(page, groups, 0.0, GROUPS) * (1 / tl.maximum(mass, 2e-38))
                    else:
                        left = read(page + 2 * width, groups, 0.0, GROUPS)
                    goal = tl.sum(left, axis=0) * number
                    group, below_it = pick(left, goal, GROUPS)
                    at = group * GROUP + tl.arange(0, GROUP)
                    p, q = left_over(
                        row, draft_at, history, rejected, at, size,
                        top, best, rate, cut, least, one_hot, 1 / total, scale, SHIFT,
                    )  # fmt: skip
                    token = pick_token(p, at, below_it, goal, best, size).to(tl.int64)
        if METHOD != 2:
            found = tl.min(tl.where(below & (token_of == token), index, NODES_P2), axis=0)
            child = tl.where((found < NODES_P2) & (~wrong), found, -1)
        follow = tl.sum(tl.where(index == child, token_of, 0), axis=0)
        if rank == 0:
            place = request * steps + step
            tl.store(path + place, node)
            tl.store(source + place, flat)
            tl.store(target + place, start + step)
            tl.store(new_tokens + place, tl.where(child >= 0, follow, token))
        last_node = node
        last_token = token
        node = child
        step += 1
    if rank == 0:
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


def accept_into(call: AcceptCall) -> None:
    """Launch the walk. Allocates scratch; no host sync.

    Args:
        call: checked, with at least one request.
    """
    tree, out, params = call.tree, call.out, call.params
    packed = tree.offsets is not None
    predicted = call.method == "predicted"
    size = 1 if predicted else call.logits.shape[-1]
    status = out.status
    widest = max(call.logits.itemsize, call.draft_probs.itemsize if call.draft_probs is not None else 1)
    filters = params is not None and params.filters
    light = call.method != "rejection" and not filters
    shape = shape_of(size, tree.max_batch, widest, multiprocessors(tree.device), filters, light)
    width = triton.cdiv(triton.cdiv(size, shape.group), 16) * 16
    kinds = _METHODS[call.method] + 1
    stats = notes = counters = status
    options: dict[str, int] = {}
    if not predicted:
        stats = torch.empty(tree.max_batch, 2, kinds, width, dtype=torch.float32, device=tree.device)
    if call.method in ("sample", "rejection"):
        lists = tree.max_batch * shape.split * (shape.list + 3 * tree.max_nodes)
        notes = torch.empty(lists, dtype=torch.int32, device=tree.device)
    if shape.split > 1:
        counters = torch.zeros(tree.max_batch, 32, dtype=torch.int32, device=tree.device)
        # The programs of a request wait for each other, so all have to run at once; the driver sees to that.
        options["launch_cooperative_grid"] = True
    if shape.registers is not None:
        options["maxnreg"] = shape.registers

    def or_unused(tensor: torch.Tensor | None) -> torch.Tensor:
        return status if tensor is None else tensor

    def strides(tensor: torch.Tensor | None) -> tuple[int, int]:
        if tensor is None or predicted:
            return 0, 0
        return (0, tensor.stride(0)) if packed else (tensor.stride(0), tensor.stride(1))

    accept_kernel[(tree.max_batch * shape.split,)](
        call.logits, *strides(call.logits),
        call.tokens, tree.parents, tree.depths,
        or_unused(tree.offsets),
        or_unused(params.temperature if params else None), or_unused(params.top_k if params else None),
        or_unused(params.top_p if params else None), or_unused(params.min_p if params else None),
        or_unused(call.draft_probs), *strides(call.draft_probs),
        or_unused(call.seeds), or_unused(call.positions), or_unused(call.uniforms),
        stats, notes, counters,
        out.accepted, out.path, out.lengths, out.bonus, out.tokens, out.source, out.target, status,
        size, width, tree.max_nodes, tree.max_total, tree.max_depth + 1,
        METHOD=_METHODS[call.method],
        PACKED=packed,
        TOP_K=params is not None and params.top_k is not None,
        TOP_P=params is not None and params.top_p is not None,
        MIN_P=params is not None and params.min_p is not None,
        GIVEN=call.uniforms is not None,
        SHIFT=_SHIFT.get(call.logits.dtype, 0),
        NODES_P2=triton.next_power_of_2(tree.max_nodes),
        STEPS_P2=triton.next_power_of_2(tree.max_depth + 1),
        GROUP=shape.group,
        GROUPS=shape.groups,
        LIST=shape.list,
        ROWS=shape.rows,
        SPLIT=shape.split,
        STAGES=shape.stages,
        num_warps=shape.warps,
        **options,
    )  # fmt: skip
