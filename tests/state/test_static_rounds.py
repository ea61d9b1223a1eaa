"""The rounds that the GPU tests capture in graphs, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.captured import StaticRounds
from bole_testing.gpu_states import CAPACITIES

from bole_runtime import LayerGeometry

POLICIES: dict[str, dict[str, Any]] = {
    "eager": {"policy": "eager"},
    "fused": {"policy": "fused"},
    "deferred": {"policy": "deferred", "pending": 16},
}
LAYER = LayerGeometry(1, 2, 8, 8, gate_mode="raw", conv_width=4)


@pytest.mark.parametrize("policy", POLICIES)
def test_static_rounds(policy: str) -> None:
    made = StaticRounds("cpu", 3, LAYER, dtype=torch.float32, bounds=(1e-5, 2e-6), **POLICIES[policy])
    for _ in range(10):
        made.play()
    made.finish()


@pytest.mark.parametrize("policy", POLICIES)
def test_rounds_of_several_capacities_take_turns(policy: str) -> None:
    made = StaticRounds(
        "cpu", 4, LAYER, dtype=torch.float32, bounds=(1e-5, 2e-6), capacities=CAPACITIES, **POLICIES[policy]
    )
    for _ in range(4):
        for which in range(len(CAPACITIES)):
            made.play(which)
    made.finish()
