"""The sequential recurrence in float64 as a backend: slow, and the one to trust."""

from __future__ import annotations

import torch

from bole_runtime.calls import CommitCall, VerifyCall
from bole_runtime.factors import capture_eager
from bole_runtime.reference import commit_sequential, verify_sequential


@torch.no_grad()
def verify(call: VerifyCall) -> None:
    """Fill ``call.out``, and the capture buffers if there are any."""
    gates: dict[str, torch.Tensor | float] = {**call.gates, "beta_scale": call.beta_scale}
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


@torch.no_grad()
def commit(call: CommitCall) -> None:
    """Update the pools of every layer."""
    live = call.tree.rows()[1].tolist()
    for layer in call.layers:
        states = commit_sequential(layer.pool, call.slots, layer.factors, call.accepted)
        for b, (slot, node) in enumerate(zip(call.slots.tolist(), call.accepted.tolist(), strict=True)):
            if 0 <= slot < layer.pool.shape[0] and 0 <= node < call.tree.max_nodes and live[b][node]:
                layer.pool[slot] = states[b].to(layer.pool.dtype)
