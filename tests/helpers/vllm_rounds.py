"""Bole's round on vLLM's memory and tokens, through the adapter."""

from __future__ import annotations

import torch
from vllm_pages import Memory, Sizes, split_heads

from bole_runtime.integrations import vllm
from bole_runtime.integrations.engine_rounds import BatchRound, EngineRounds


def layout_of(s: Sizes) -> vllm.PageLayout:
    return vllm.PageLayout(s.geometry, s.drafts, s.state_dtype, s.conv_dtype, s.order)


def pools_of(memory: Memory) -> vllm.GroupPools:
    layout = layout_of(memory.sizes)
    return vllm.GroupPools.bind(layout, [layout.split(memory.pages(n)) for n in range(memory.sizes.layers)])


def rounds_of(pools: vllm.GroupPools, nodes: int) -> EngineRounds:
    return EngineRounds(
        pools.layout.layer, pools.engine, nodes=nodes, max_depth=nodes - 1, batch=2, dtype=torch.float32
    )


def run_layer(
    s: Sizes, current: BatchRound, layer: int, w: dict[str, torch.Tensor], given: dict[str, torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """A layer of Bole's round on dense rows of nodes."""
    q, k, v = split_heads(s, current.conv(layer, given["x"], w["conv"], None, slots, "silu"))
    gates = {name: t for name, t in (w | given).items() if name not in ("x", "conv")}
    return current.verify(layer, q, k, v, gates, slots)


def bole_step(
    s: Sizes, rounds: EngineRounds, ws: list[dict[str, torch.Tensor]], given: list[dict[str, torch.Tensor]],
    table: torch.Tensor, starts: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    """All layers of a step on vLLM's tokens, before any commit."""
    current, nodes = rounds.batch(table.shape[0]), s.drafts + 1
    current.set_parents(vllm.chain_parents(starts, nodes))
    outs = []
    for layer, (w, tokens) in enumerate(zip(ws, given, strict=True)):
        dense = {name: vllm.to_nodes(t, starts, nodes) for name, t in tokens.items()}
        out = run_layer(s, current, layer, w, dense, vllm.home_slots(table))
        outs.append(vllm.to_tokens(out, starts, tokens["x"].shape[0]))
    return outs
