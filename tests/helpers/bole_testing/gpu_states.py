"""Rounds of a StateManager that the GPU tests capture."""

from __future__ import annotations

from typing import Any

import torch

from bole_runtime import LayerGeometry
from bole_runtime.tree import Capacity
from bole_testing.captured import WHOLE, StaticRounds

LAYER = LayerGeometry(2, 4, 128, 128, gate_mode="raw", conv_width=4)
POLICIES: dict[str, dict[str, Any]] = {
    "eager": {"policy": "eager"},
    "fused": {"policy": "fused"},
    "deferred": {"policy": "deferred"},
}
#: Graphs of one manager, from the smallest: one request, flat trees, deep trees, and a bucket of nodes of its own.
CAPACITIES = (
    Capacity(max_total=8, max_batch=1, max_nodes=8, max_depth=7),
    Capacity(max_total=24, max_batch=3, max_nodes=14, max_depth=3),
    WHOLE,
    Capacity(max_total=80, max_batch=4, max_nodes=30, max_depth=29),
)


def state_rounds(device: str, policy: str) -> StaticRounds:
    """Return the rounds of a policy, in one graph."""
    return StaticRounds(device, 5, LAYER, dtype=torch.bfloat16, bounds=(1e-5, 2e-6), **POLICIES[policy])


def bucket_rounds(device: str, policy: str) -> StaticRounds:
    """Return the rounds of a policy, in a graph a capacity."""
    return StaticRounds(
        device, 6, LAYER, dtype=torch.bfloat16, bounds=(1e-5, 2e-6), capacities=CAPACITIES, **POLICIES[policy]
    )
