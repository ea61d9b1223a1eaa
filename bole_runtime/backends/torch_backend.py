"""The closed form with torch operations. Default on the CPU; on a device it runs without a host sync."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bole_runtime.backends.closed_form import Rows, final_state, outputs
from bole_runtime.backends.torch_append import append_paths
from bole_runtime.calls import CommitCall, CommitLayer, RowAction, VerifyCall
from bole_runtime.capture import capture_eager
from bole_runtime.factors import Factors, PendingChain, pending_gates, ready_gates
from bole_runtime.families.spec import RecurrenceSpec

#: Bytes of the largest temporary, a head's [rows, rows] or [dv, dk]; a batch is processed in slices below it.
_MAX_BYTES = 1 << 28


def _compute_dtype(spec: RecurrenceSpec, x: torch.Tensor, pool: torch.Tensor, precision: str) -> torch.dtype:
    if torch.float64 in (x.dtype, pool.dtype):
        return torch.float64
    if spec.erase != "none":
        # A solve passes the rounding of keys and Gram matrices on from row to row. With betas near 2 nothing dampens
        # it: at 64 nodes fp32 is off by tens of times what the sequential recurrence in fp32 is.
        if precision == "lossless":
            return torch.float64
        # What a token erases and what it writes are summed apart, and can cancel over many tokens.
        if not spec.merged:
            return torch.float64
    # A process that allows TF32 must not change what this path returns.
    if x.is_cuda and torch.get_float32_matmul_precision() != "highest":
        return torch.float64
    return torch.float32


def _slices(batch: int, heads: int, rows: int, pool: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    elements = max(rows * rows, pool.shape[-2] * pool.shape[-1])
    step = max(1, _MAX_BYTES // (heads * elements * dtype.itemsize))
    return [slice(i, min(i + step, batch)) for i in range(0, batch, step)]


def _keep(x: torch.Tensor, live: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` in ``dtype`` with dead rows zero. Selection, not multiplication: a dead row may hold NaN."""
    return torch.where(live.reshape(*live.shape, *[1] * (x.dim() - live.dim())), x, 0).to(dtype)


def _normalised(x: torch.Tensor, eps: float, l2norm: bool, dtype: torch.dtype) -> torch.Tensor:
    if not l2norm:
        return x.to(dtype)
    wide = x.double()  # bf16 values near 3e38 have no square in float32
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(dtype)


class _Source:
    """Access to the rows of a segment as dense [requests, rows, ...], whatever the layout."""

    def __init__(self, index: torch.Tensor, live: torch.Tensor) -> None:
        self.index, self.live = index, live

    def take(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if flat.shape[0] == 0:
            return flat.new_zeros(*self.index.shape, *flat.shape[1:], dtype=dtype)
        return _keep(flat[self.index], self.live, dtype)


class _Segment(NamedTuple):
    """Inputs of the pending chains, or of the nodes: k, v, ready node gates and per-head parameters, by name."""

    tensors: dict[str, torch.Tensor]
    #: Leading dimensions that make up the rows.
    skip: int

    @classmethod
    def of_nodes(cls, call: VerifyCall | Factors) -> _Segment:
        options = call.options
        gates = ready_gates(call.spec, call.gates, call.gate_mode, call.beta_scale, options)
        return cls({"k": call.k, "v": call.v, **gates}, call.k.dim() - 2)

    @classmethod
    def of_pending(cls, call: VerifyCall | Factors) -> _Segment | None:
        pending = call.pending
        if pending is None:
            return None
        mode, gates = pending_gates(call.spec, pending, call.gates, call.gate_mode)
        gates = ready_gates(call.spec, gates, mode, call.beta_scale, call.options)
        return cls({"k": pending.k, "v": pending.v, **gates}, 2)


def _inputs(
    spec: RecurrenceSpec, source: _Source, segment: _Segment, l2norm: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the inputs of a segment's rows, [requests, rows, ...]; per-head parameters as they are."""
    made: dict[str, torch.Tensor] = {}
    for name, x in segment.tensors.items():
        declared = spec.by_name[name]
        to = torch.float64 if declared is spec.log_decay else dtype
        if declared.shape[0] != "node":
            made[name] = x.to(to)
            continue
        flat = x.flatten(0, segment.skip - 1)
        if name in spec.normed:
            made[name] = _normalised(source.take(flat, flat.dtype), spec.l2norm_eps, l2norm, dtype)
        else:
            made[name] = source.take(flat, to)
    return made


def _pending_source(pending: PendingChain, slots: torch.Tensor, ok: torch.Tensor) -> _Source:
    """Rows of the pending chains, token 0 first; dead for padding rows."""
    cap = pending.capacity
    if pending.length.shape[0] == 0:
        # A pool without slots: every row is padding.
        none = torch.zeros(slots.shape[0], cap, dtype=torch.long, device=slots.device)
        return _Source(none, none > 0)
    safe = torch.where(ok, slots, 0)
    token = torch.arange(cap, device=slots.device)
    length = torch.where(ok, pending.length[safe].long(), 0).unsqueeze(1)
    start = torch.where(ok, pending.start[safe].long(), 0).unsqueeze(1)
    return _Source(safe.unsqueeze(1) * cap + (start + token) % cap, token < length)


def _join(
    spec: RecurrenceSpec,
    first: dict[str, torch.Tensor] | None,
    second: dict[str, torch.Tensor],
    live: torch.Tensor | None,
    mask: torch.Tensor,
    heads: int,
) -> Rows:
    """Put the pending rows in front of the rows of the tree, as a chain of ancestors of every live row."""
    if first is None or live is None:
        return Rows(second, mask, heads)
    cap, nodes = live.shape[1], mask.shape[1]
    chain = torch.ones(cap, cap, dtype=torch.bool, device=mask.device).tril() & live.unsqueeze(2) & live.unsqueeze(1)
    above = mask.any(-1).unsqueeze(2) & live.unsqueeze(1)
    top = torch.cat((chain, mask.new_zeros(mask.shape[0], cap, nodes)), 2)
    both = {
        name: torch.cat((first[name], x), 1) if spec.by_name[name].shape[0] == "node" else x
        for name, x in second.items()
    }
    return Rows(both, torch.cat((top, torch.cat((above, mask), 2)), 1), heads)


def _states(pool: torch.Tensor, slots: torch.Tensor, ok: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if pool.shape[0] == 0:
        return pool.new_zeros(slots.shape[0], *pool.shape[1:], dtype=dtype)
    return _keep(pool[torch.where(ok, slots, 0)], ok, dtype)


@torch.inference_mode()
def verify(call: VerifyCall) -> None:
    """Fill ``call.out``, and the capture buffers if there are any."""
    spec, tree, pending = call.spec, call.tree, call.pending
    dtype = _compute_dtype(spec, call.q, call.state, call.precision)
    heads = call.v.shape[-2]
    skip = call.q.dim() - 2
    nodes, ring = _Segment.of_nodes(call), _Segment.of_pending(call)
    slots = call.slots.long()
    ok = (slots >= 0) & (slots < call.state.shape[0])
    index, live = tree.rows()
    live = live & ok.unsqueeze(1)
    mask = tree.mask() & live.unsqueeze(2)
    rows = tree.max_nodes + (0 if pending is None else pending.capacity)
    result = torch.zeros(tree.max_total + 1, *call.v.shape[skip:], dtype=dtype, device=call.v.device)
    # Rows that are not live land in one extra row, which is dropped.
    target = torch.where(live, index, tree.max_total)
    for part in _slices(tree.max_batch, heads, rows, call.state, dtype):
        source = _Source(index[part], live[part])
        own = _inputs(spec, source, nodes, call.qk_l2norm, dtype)
        chain = chain_live = None
        if pending is not None and ring is not None:
            tokens = _pending_source(pending, slots[part], ok[part])
            chain, chain_live = _inputs(spec, tokens, ring, call.qk_l2norm, dtype), tokens.live
        q = source.take(call.q.flatten(0, skip - 1), call.q.dtype)
        q = _normalised(q, spec.l2norm_eps, call.qk_l2norm, dtype) * call.scale
        state = _states(call.state, slots[part], ok[part], dtype)
        out = outputs(spec, _join(spec, chain, own, chain_live, mask[part], heads), q, state)
        result[target[part]] = out
    call.out.copy_(result[:-1].reshape(call.out.shape))
    capture_eager(call)


@torch.inference_mode()
def commit(call: CommitCall) -> None:
    """Update the pools of every layer."""
    tree = call.tree
    index, live = tree.rows()
    accepted = call.accepted.long()
    request = torch.arange(tree.max_batch, device=tree.device)
    inside = (accepted >= 0) & (accepted < tree.max_nodes)
    terminal = torch.where(inside, accepted, 0)
    chosen = inside & live[request, terminal]
    path = tree.mask()[request, terminal]
    length = path.sum(-1)
    longest = min(tree.max_nodes, tree.max_depth + 1)
    if tree.device.type == "cpu":
        longest = max(1, int(torch.where(chosen, length, 0).max()))
    # Compact the nodes of each path, in order, into the first columns; the rest goes to a column that is dropped.
    position = torch.where(path, path.long().cumsum(-1) - 1, longest).clamp(max=longest)
    compact = index.new_zeros(tree.max_batch, longest + 1).scatter_(1, position, index)[:, :longest]
    flush = torch.zeros_like(chosen)
    if call.actions is not None:
        append_paths(call, compact, length, chosen & (call.actions == RowAction.APPEND))
        flush = call.actions == RowAction.FLUSH
        chosen = chosen & (call.actions == RowAction.COMMIT)
        length = torch.where(flush, 0, length)
    for layer in call.layers:
        _commit_layer(call, layer, compact, length, chosen, flush)


def _commit_layer(
    call: CommitCall,
    layer: CommitLayer,
    compact: torch.Tensor,
    length: torch.Tensor,
    chosen: torch.Tensor,
    flush: torch.Tensor,
) -> None:
    pool, factors = layer.pool, layer.factors
    if pool.shape[0] == 0:
        return
    spec, pending = call.spec, factors.pending
    dtype = _compute_dtype(spec, factors.k, pool, call.precision)
    heads = pool.shape[1]
    slots = call.slots.long()
    inside = (slots >= 0) & (slots < pool.shape[0])
    chain_length = torch.zeros_like(slots)
    if pending is not None:
        chain_length = pending.length[torch.where(inside, slots, 0)].long().clamp(0, pending.capacity)
    ok = inside & (chosen | (flush & (chain_length > 0)))
    nodes, ring = _Segment.of_nodes(factors), _Segment.of_pending(factors)
    longest = compact.shape[1]
    live = (torch.arange(longest, device=pool.device) < length.unsqueeze(1)) & ok.unsqueeze(1)
    chain_mask = torch.ones(longest, longest, dtype=torch.bool, device=pool.device).tril() & live.unsqueeze(2)
    shift = 0 if pending is None else pending.capacity
    new = torch.empty(slots.shape[0], *pool.shape[1:], dtype=pool.dtype, device=pool.device)
    for part in _slices(slots.shape[0], heads, longest + shift, pool, dtype):
        source = _Source(compact[part], live[part])
        own = _inputs(spec, source, nodes, factors.qk_l2norm, dtype)
        chain = chain_live = None
        if pending is not None and ring is not None:
            tokens = _pending_source(pending, slots[part], ok[part])
            chain, chain_live = _inputs(spec, tokens, ring, factors.qk_l2norm, dtype), tokens.live
        rows = _join(spec, chain, own, chain_live, chain_mask[part], heads)
        # Of a flush, the last token of the chain.
        last = torch.where(flush[part], chain_length[part] - 1, shift + length[part] - 1).clamp(min=0)
        state = _states(pool, slots[part], ok[part], dtype)
        new[part] = final_state(spec, rows, last, state).to(pool.dtype)
    _store(pool, slots, ok, new)


def _store(pool: torch.Tensor, slots: torch.Tensor, ok: torch.Tensor, new: torch.Tensor) -> None:
    """Write ``new[b]`` to ``pool[slots[b]]`` where ``ok``; everything else stays bit-identical. No host sync.

    Other rows repeat the write of the first row that commits, or rewrite slot 0 with itself when none does.
    """
    first = torch.argmax(ok.int()).reshape(1)
    source = torch.where(ok, torch.arange(ok.shape[0], device=ok.device), first)
    some = ok.any()
    target = torch.where(some, slots[source], 0)
    value = torch.where(some, new[source], pool[:1])
    pool.index_copy_(0, target, value)
