"""The rounds that the GPU tests capture in graphs, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.captured import StaticRounds

from bole_runtime import LayerGeometry


@pytest.mark.parametrize(
    "sizes",
    [{"policy": "eager"}, {"policy": "fused"}, {"policy": "deferred", "pending": 16}],
    ids=lambda s: s["policy"],
)
def test_static_rounds(sizes: dict[str, Any]) -> None:
    layer = LayerGeometry(1, 2, 8, 8, gate_mode="raw", conv_width=4)
    made = StaticRounds("cpu", 3, layer, dtype=torch.float32, bounds=(1e-5, 2e-6), **sizes)
    for _ in range(10):
        made.play()
    made.finish()
