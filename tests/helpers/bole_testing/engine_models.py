"""A small model of Gated DeltaNet layers over pools of an engine, driven layer by layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bole_runtime import LayerGeometry
from bole_runtime.integrations.engine_rounds import BatchRound, EnginePools, EngineRounds

LAYERS, SLOTS, NODES, HK, HV, D, W = 2, 6, 4, 1, 2, 8, 4
PARTS = (HK * D, HK * D, HV * D)
CHANNELS = sum(PARTS)
LAYER = LayerGeometry(HK, HV, D, D, gate_mode="raw", conv_width=W)


def engine_pools() -> EnginePools:
    return EnginePools(torch.randn(LAYERS, SLOTS, HV, D, D), torch.randn(LAYERS, SLOTS, CHANNELS, W - 1))


def engine_rounds(pools: EnginePools, layer: LayerGeometry = LAYER) -> EngineRounds:
    return EngineRounds(layer, pools, nodes=NODES, max_depth=NODES - 1, batch=2, dtype=torch.float32)


def forward(
    current: BatchRound, slots: torch.Tensor, layers: Iterable[int] = range(LAYERS), *, trees: bool = True,
    conv: bool = True,
) -> None:  # fmt: skip
    """Run layers of a round of chains on random inputs."""
    rows = slots.shape[0]
    if trees:
        current.set_parents(None)
    for n in layers:
        x = torch.randn(rows, NODES, CHANNELS)
        if conv:
            x = current.conv(n, x, torch.randn(CHANNELS, W), None, slots, "silu")
        q, k, v = (t.unflatten(-1, (-1, D)) for t in x.split(PARTS, dim=-1))
        gates = {"a": torch.randn(rows, NODES, HV), "b": torch.randn(rows, NODES, HV)}
        current.verify(n, q, k, v, {**gates, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}, slots)
