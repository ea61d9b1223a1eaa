"""Copies accepted paths behind the pending chains with torch operations: no host sync, any strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bole_runtime.factors import kept_gates

if TYPE_CHECKING:
    from bole_runtime.calls import CommitCall


def append_paths(call: CommitCall, compact: torch.Tensor, length: torch.Tensor, chosen: torch.Tensor) -> None:
    """Copy the paths of some rows to the rings of every layer that has one.

    Args:
        call: layers and slots. The rings' ``length`` and ``start`` are those before the copy, and stay so.
        compact: int64 [B, longest], the flat row of each node of a path, in order.
        length: int64 [B], nodes of the path.
        chosen: bool [B], the rows to copy.
    """
    slots = call.slots.long()
    token = torch.arange(compact.shape[1], device=slots.device)
    for layer in call.layers:
        pending, factors = layer.factors.pending, layer.factors
        if pending is None or pending.k.shape[0] == 0 or factors.k.numel() == 0:
            continue  # no ring, or trees without a node
        rows = chosen & (slots >= 0) & (slots < pending.k.shape[0])
        kept = torch.where(rows, slots, 0)
        first = pending.start[kept].long() + pending.length[kept].long()
        ring = (first.unsqueeze(1) + token) % pending.capacity
        live = ((token < length.unsqueeze(1)) & rows.unsqueeze(1)).flatten()
        # Dead entries repeat the write of the first live one, or rewrite row 0 with itself where there is none.
        some, source = live.any(), torch.argmax(live.int())
        pick = torch.where(live, torch.arange(live.shape[0], device=slots.device), source)
        slot = torch.where(some, kept.repeat_interleave(token.shape[0])[pick], 0)
        target = torch.where(some, ring.flatten()[pick], 0)
        node = compact.flatten()[pick]
        skip = factors.k.dim() - 2
        gates = kept_gates(factors.spec, factors.gates, factors.gate_mode, factors.beta_scale, factors.options)
        pairs = [
            (pending.k, factors.k),
            (pending.v, factors.v),
            *((g, gates[name]) for name, g in pending.gates.items()),
        ]
        for buffer, value in pairs:
            new = value.flatten(0, skip - 1)[node].to(buffer.dtype)
            buffer[slot, target] = torch.where(some, new, buffer[0, 0])
