"""The sequential recurrence in float64 as a backend: slow, and the one to trust."""

from __future__ import annotations

import torch

from bole_runtime.calls import CommitCall, RowAction, VerifyCall
from bole_runtime.capture import capture_eager
from bole_runtime.factors import Factors, PendingChain, kept_gates
from bole_runtime.reference import commit_sequential, flush_sequential, verify_sequential


@torch.inference_mode()
def verify(call: VerifyCall) -> None:
    """Fill ``call.out``, and the capture buffers if there are any."""
    gates: dict[str, torch.Tensor | float] = {**call.gates, "beta_scale": call.beta_scale, **call.options}
    out = verify_sequential(
        call.q,
        call.k,
        call.v,
        gates=gates,
        state=call.state,
        slots=call.slots,
        tree=call.tree,
        recurrence=call.spec,
        scale=call.scale,
        qk_l2norm=call.qk_l2norm,
        pending=call.pending,
    )
    call.out.copy_(out)
    capture_eager(call)


@torch.inference_mode()
def commit(call: CommitCall) -> None:
    """Update the pools of every layer, row by row as its action says."""
    live = call.tree.rows()[1].tolist()
    slots, accepted = call.slots.tolist(), call.accepted.tolist()
    actions = [RowAction.COMMIT] * len(slots) if call.actions is None else call.actions.tolist()
    for layer in call.layers:
        pool, factors, pending = layer.pool, layer.factors, layer.factors.pending
        committed = commit_sequential(pool, call.slots, factors, call.accepted)
        flushed = None
        if pending is not None and RowAction.FLUSH in actions:
            flushed = flush_sequential(
                pool, call.slots, pending, recurrence=factors.spec, qk_l2norm=factors.qk_l2norm,
                gates={**factors.gates, **factors.all_options},
            )  # fmt: skip
        for b, (slot, node, action) in enumerate(zip(slots, accepted, actions, strict=True)):
            if not 0 <= slot < pool.shape[0]:
                continue
            path = 0 <= node < call.tree.max_nodes and live[b][node]
            if action == RowAction.COMMIT and path:
                pool[slot] = committed[b].to(pool.dtype)
            elif action == RowAction.FLUSH and flushed is not None and pending is not None:
                if int(pending.length[slot]) == 0:
                    continue
                pool[slot] = flushed[b].to(pool.dtype)
            elif action == RowAction.APPEND and path and pending is not None:
                _append(factors, pending, call.tree.path(b, node), b, slot)


def _append(factors: Factors, pending: PendingChain, path: list[int], request: int, slot: int) -> None:
    """Copy a path behind the pending chain of a slot."""
    tree = factors.tree
    gates = kept_gates(factors.spec, factors.gates, factors.gate_mode, factors.beta_scale, factors.options)
    pairs = [(pending.k, factors.k), (pending.v, factors.v), *((g, gates[name]) for name, g in pending.gates.items())]
    end = int(pending.start[slot]) + int(pending.length[slot])
    for t, node in enumerate(path):
        for ring, value in pairs:
            row = value[int(tree.offsets[request]) + node] if tree.offsets is not None else value[request, node]
            ring[slot, (end + t) % pending.capacity] = row.to(ring.dtype)
