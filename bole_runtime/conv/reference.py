"""The convolution node by node in float64: slow, and the one to trust."""

from __future__ import annotations

import torch

from bole_runtime.conv.calls import ConvCall, ConvCommitCall, ConvCommitLayer
from bole_runtime.conv.factors import ConvPending


def _history(pool: torch.Tensor, pending: ConvPending | None, slot: int) -> list[torch.Tensor]:
    """Return the inputs above the roots, each float64 [C], oldest first."""
    tokens = list(pool[slot].double().unbind(1))
    if pending is not None:
        length, start = int(pending.length[slot]), int(pending.start[slot])
        tokens += [pending.x[slot, (start + t) % pending.capacity].double() for t in range(length)]
    return tokens


@torch.inference_mode()
def tree_conv(call: ConvCall) -> None:
    """Fill ``call.out``, and the capture buffer if there is one."""
    tree, width = call.tree, call.width
    rows, live = (t.tolist() for t in tree.rows())
    x = call.x.flatten(0, -2).double()
    weights = call.weight.flatten(0, -3) if call.dynamic else None
    result = torch.zeros(tree.max_total, call.x.shape[-1], dtype=torch.float64, device=x.device)
    for b, slot in enumerate(call.slots.tolist()):
        if not 0 <= slot < call.state.shape[0]:
            continue
        history = _history(call.state, call.pending, slot)
        for i in (i for i in range(tree.max_nodes) if live[b][i]):
            tokens = history + [x[rows[b][j]] for j in tree.path(b, i)]
            weight = (call.weight if weights is None else weights[rows[b][i]]).double()
            value = (torch.stack(tokens[-width:], 1) * weight).sum(1)
            if call.bias is not None:
                value = value + call.bias.double()
            result[rows[b][i]] = torch.nn.functional.silu(value) if call.silu else value
    call.out.copy_(result.reshape(call.out.shape))
    if call.capture is not None:
        call.capture.x.copy_(call.x)


@torch.inference_mode()
def conv_commit(call: ConvCommitCall) -> None:
    """Update the pools of every layer."""
    for layer in call.layers:
        _commit_layer(call, layer)


def _commit_layer(call: ConvCommitCall, layer: ConvCommitLayer) -> None:
    tree, pool = call.tree, layer.pool
    rows, live = (t.tolist() for t in tree.rows())
    x = layer.factors.x.flatten(0, -2)
    for b, (slot, node) in enumerate(zip(call.slots.tolist(), call.accepted.tolist(), strict=True)):
        if not (0 <= slot < pool.shape[0] and 0 <= node < tree.max_nodes and live[b][node]):
            continue
        tokens = _history(pool, layer.factors.pending, slot) + [x[rows[b][j]].double() for j in tree.path(b, node)]
        pool[slot] = torch.stack(tokens[-pool.shape[2] :], 1).to(pool.dtype)
